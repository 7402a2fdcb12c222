"""From flags to a run that can start, before a model is loaded. Each stage returns what it found:

    check_flags     numbers alone, which takes no time
    load_inputs     tokenizer, prompts, rewards, the checkpoint to resume
    check_inputs    do they fit each other, the model and the engine?
    settle          what the user left open: dtype, token budget, the engine's memory ...
    show            the table of roles, and with --dry-run the whole plan

`args` keeps what the user typed. Settled values are in Settings: read them there.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase

from common import placement, rewards
from common.data import arithmetic, preview
from common.data import prompts as data
from common.data.prompts import Prompt
from common.data.tokenizer import load_tokenizer, resolve_model
from common.errors import BadInput, say, warn
from common.placement import Layout
from common.preflight import checks, machine, precision, ranges, roles, run_directory
from common.preflight.flags import Flags
from common.preflight.memory import MemoryPlan
from common.rewards.mixture import Rewards
from common.rollout import engines
from common.trainer.batching import Compute

# The gap that --max-logprob-gap 0 allows: about 100 times the rounding of float32, and in bfloat16 twice that of
# SmolLM2-135M, the smallest real model we know.
MAX_GAP = {torch.float32: 1e-3, torch.bfloat16: 0.1}


@dataclass(frozen=True)
class Inputs:
    """Everything that the flags name, read and not yet checked against each other."""

    size: int  # number of ranks
    model: str  # folder or Hub name
    others: dict[str, str]  # name of a flag -> the frozen model that it names
    tokenizer: PreTrainedTokenizerBase
    stop_token_ids: list[int]  # each of them ends a response
    prompts: list[Prompt]  # prompts for training
    held_out: list[Prompt]  # prompts for evaluation
    reward_names: tuple[str, ...]
    reward: Rewards
    resume: Path | None  # checkpoint to resume; None starts at step 1


@dataclass(frozen=True)
class Settings(Inputs):
    """A run whose input has been checked, and which has not started."""

    args: Flags  # the flags as the user typed them
    name: str  # name of the algorithm's file, without .py
    dtype: torch.dtype  # data type of forward and backward
    compute: Compute  # with a token budget
    layout: Layout  # with the engine's share of the memory
    max_logprob_gap: float
    max_model_len: int  # tokens of the longest prompt plus max_response_tokens
    sequences: int  # number of responses that one engine samples in one call
    plan: MemoryPlan
    roles: list[roles.Role]

    @property
    def recorded(self) -> Flags:
        """The flags with the settled values, for run.json: with them a run can be repeated on another machine."""
        return replace(
            self.args,
            model=self.model,
            reward=self.reward_names,
            dtype=str(self.dtype).removeprefix("torch."),
            compute=self.compute,
            layout=self.layout,
            max_logprob_gap=self.max_logprob_gap,
        )


def prepare(
    args: Flags,
    models: Sequence[str],
    others: dict[str, str] | None = None,
    value_heads: Sequence[str] = (),
    prompts_per_draw: int = 0,
    most_draws: int = 1,
    teacher_in_update: bool = False,
) -> Settings:
    """Check the whole input before a model is loaded, and settle what the user left open. Raises BadInput.

    models: the models that the trainer loads from --model; "reference" and "teacher" are frozen, others are trained.
    others: name of a flag -> frozen model that it names, which reads the same tokens.
    value_heads: further models that are trained from --model, with one value for each token in place of logits.
    prompts_per_draw, most_draws: with dynamic sampling, the prompts that all ranks together sample at once, and how
    often they do in a step. 0: those of a step, once.
    teacher_in_update: whether the frozen teacher has its forwards between those of the update, and not before it.
    """
    prompts_per_draw = prompts_per_draw or args.prompts_per_step
    size = check_flags(args, prompts_per_draw, most_draws)
    inputs = load_inputs(args, size, others or {})
    max_model_len = check_inputs(args, inputs)
    settings = settle(args, inputs, (*models, *value_heads), max_model_len, prompts_per_draw, teacher_in_update)
    engines.check_servers(args.rollout_backend, inputs.model, max_model_len, settings.dtype, args.layout)
    show(settings)
    return settings


def check_flags(args: Flags, prompts_per_draw: int, most_draws: int) -> int:
    """Refuse numbers that are out of range or do not divide evenly. Returns the number of ranks. Raises BadInput."""
    ranges.check(args)
    size = machine.check_world(args.rollout_tp, args.layout, args.rollout_backend, args.compute)
    share = args.mini_batches * size
    if args.prompts_per_step % share:
        raise BadInput(
            f"--prompts-per-step {args.prompts_per_step} is not a multiple of --mini-batches {args.mini_batches} "
            f"x {size} ranks = {share}"
        )
    if prompts_per_draw % size:
        raise BadInput(f"{prompts_per_draw} prompts in a draw are not a multiple of the {size} ranks")
    if prompts_per_draw * most_draws < args.prompts_per_step:
        raise BadInput(
            f"{most_draws} draws of {prompts_per_draw} prompts are fewer than --prompts-per-step "
            f"{args.prompts_per_step}"
        )
    machine.check_tracker(args.track)
    return size


def load_inputs(args: Flags, size: int, others: dict[str, str]) -> Inputs:
    """Read everything that the flags name, except for weights. Raises BadInput."""
    # Quick things come first: a typing error in --reward or --run-dir is reported before data is read.
    default_reward = "environment" if args.environment else "gsm8k"
    reward_names = args.reward or (default_reward,)
    # The same date in all prompts of a run, whichever day it is resumed on.
    date = run_directory.date_of(args.run_dir, args.saving.resume)
    reward = rewards.load(reward_names, date)
    resume = run_directory.check_directory(args.run_dir, args.saving.resume)
    model = args.model
    if model == "embedded":
        model = arithmetic.warm_start(args.environment, args.dataset)
    model = resolve_model(model)
    tokenizer, stop_token_ids = load_tokenizer(model, date=date)
    source = args.source
    if args.environment:
        # Imported here, because most runs have no environment.
        from common.rollout.environments import episodes

        # The prompts now show the tools of the environment, and the reward gets its scores.
        source = episodes.attach(args.environment, reward, source, tokenizer, stop_token_ids)
    if "choice" in reward.rewards:
        source = replace(source, lettered=True)
    return Inputs(
        size=size,
        model=model,
        others={flag: resolve_model(path, f"--{flag}") for flag, path in others.items()},
        tokenizer=tokenizer,
        stop_token_ids=stop_token_ids,
        prompts=data.load(args.dataset, source, "train", tokenizer, args.max_prompt_tokens),
        held_out=data.load_eval(args.dataset, source, tokenizer, args.max_prompt_tokens),
        reward_names=reward_names,
        reward=reward,
        resume=resume,
    )


def check_inputs(args: Flags, inputs: Inputs) -> int:
    """Refuse inputs that do not fit each other. Returns the tokens of the longest sequence. Raises BadInput."""
    reward = inputs.reward
    all_prompts = inputs.prompts + inputs.held_out
    checks.check_held_out(inputs.held_out, inputs.size)
    if not inputs.held_out and args.source.eval_prompts:
        say("nothing is evaluated: --dataset has no test split; --eval-dataset names one, --eval-prompts 0 hides this")
    # An id is the place of a row, in a file or a split.
    trained_on = {prompt.id for prompt in inputs.prompts}
    seen = sum(prompt.id in trained_on for prompt in inputs.held_out)
    if seen:
        warn(
            f"{seen} of {len(inputs.held_out)} prompts of --eval-dataset are rows of --dataset, so eval/accuracy says "
            "nothing about problems that training never shows; name other rows",
            "trained-on-evaluation",
        )
    if len(inputs.prompts) < args.prompts_per_step:
        drawn, given = f"--prompts-per-step {args.prompts_per_step}", len(inputs.prompts)
        say(f"{drawn}, but --dataset has {given} prompts: a step has the same prompt several times")
    checks.check_images(all_prompts, args.compute, args.environment, args.layout)
    for name, function in reward.rewards.items():
        # With a batch in flight, a thread grades while this rank trains.
        if args.layout.max_inflight_batches > 1 and getattr(function, "sharded", False):
            raise BadInput(
                f"--reward {name} with --max-inflight-batches > 1: the reward model's collectives would mix with the "
                "trainer's; use model: or model-cpu:"
            )
    reward.check_answers(all_prompts)
    # A user's reward and environment run once here. Their errors would otherwise appear after the model is loaded.
    checks.try_rewards(reward, inputs.prompts, inputs.tokenizer)
    if reward.environment:
        reward.environment.try_out(inputs.prompts[0])
    # The model, and what it is combined with.
    max_model_len = checks.total_tokens(inputs.model, all_prompts, args.max_response_tokens)
    checks.check_model(inputs.model, inputs.tokenizer, all_prompts)
    checks.check_compute(inputs.model, args.compute)
    engines.check_family(args.rollout_backend, inputs.model)
    checks.check_engine_heads(inputs.model, args.rollout_tp)
    for flag, path in inputs.others.items():
        checks.check_companion(f"--{flag}", path, inputs.tokenizer, all_prompts, args.max_response_tokens, args.compute)
    return max_model_len


def settle(
    args: Flags,
    inputs: Inputs,
    models: tuple[str, ...],
    max_model_len: int,
    prompts_per_draw: int,
    teacher_in_update: bool,
) -> Settings:
    """Choose what the user left open, by the model and this machine. Raises BadInput if the run does not fit it."""
    dtype = precision.choose(args.dtype, inputs.model, inputs.resume)
    responses = prompts_per_draw * args.group_size
    each_engine = responses // placement.engine_count(inputs.size, args.rollout_tp, args.layout)
    # A request asks for a whole group, even where an engine's share is smaller.
    sequences = max(args.group_size, each_engine)

    compute = checks.settle_packing(inputs.model, args.compute, inputs.prompts + inputs.held_out)
    # Reward models take a part of the device, which the memory plan must know.
    reward_roles = [roles.reward_role(name, reward, inputs.size) for name, reward in inputs.reward.rewards.items()]
    plan = MemoryPlan(
        model=inputs.model,
        dtype=dtype,
        size=inputs.size,
        compute=compute,
        models=models,
        others=inputs.others,
        teacher_in_update=teacher_in_update,
        offload=args.offload,
        backend=args.rollout_backend,
        rollout_tp=args.rollout_tp,
        layout=args.layout,
        reward_bytes=sum(role.device for role in reward_roles),
    )
    all_roles = [*roles.model_roles(plan), roles.rollout_role(plan), *reward_roles]
    roles.check_fit(plan, all_roles)
    settings = Settings(
        **vars(inputs),
        args=args,
        name=run_directory.name_of(args),
        dtype=dtype,
        compute=plan.fitted_compute(max_model_len),
        layout=plan.fitted_layout(max_model_len, sequences),
        max_logprob_gap=args.max_logprob_gap or MAX_GAP[dtype],
        max_model_len=max_model_len,
        sequences=sequences,
        plan=plan,
        roles=all_roles,
    )
    # A resumed run is compared with its run.json, which has settled values too.
    run_directory.check_configuration(settings.recorded, settings.name)
    run_directory.check_steps_left(args, inputs.resume)
    run_directory.warn_of_changed_code(args, inputs.resume)
    return settings


def show(settings: Settings) -> None:
    """Print the table of roles, and with --dry-run what the run would do."""
    roles.show(settings.roles)
    args = settings.args
    if not args.saving.dry_run:
        return
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    longest = max(len(prompt.ids) for prompt in settings.prompts + settings.held_out)
    responses = args.prompts_per_step * args.group_size
    passes = args.steps * args.prompts_per_step / len(settings.prompts)
    passes = float(f"{passes:.2g}")  # two digits, which are printed as 120 and not as 1.2e+02
    lines = {
        "model": f"{settings.model}: {settings.plan.parameters / 1e6:,.1f} M parameters, {settings.dtype}",
        "ranks": f"{settings.size} on {device}",
        "prompts": f"{len(settings.prompts):,} to train on, {len(settings.held_out):,} held out; "
        f"up to {longest} tokens",
        "a step": f"{args.prompts_per_step} prompts x {args.group_size} = {responses} responses of up to "
        f"{args.max_response_tokens} tokens; {responses // settings.size} a rank",
        "its updates": f"{args.mini_batches} of {responses // args.mini_batches} responses in each pass over them, "
        f"{settings.compute.token_budget} tokens a forward",
        "steps": f"{args.steps}: {passes:,g} passes over the prompts, if no step drops any",
        "starts": f"from {settings.resume}" if settings.resume else "at step 1",
        "run directory": args.run_dir or "runs/NAME-DATE-TIME",
    }
    width = max(map(len, lines))
    for name, text in lines.items():
        say(f"{name:<{width}}  {text}")
    preview.show(settings.prompts, settings.tokenizer, settings.stop_token_ids)
