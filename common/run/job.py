"""The frame around training: flags that all algorithm files share, checks before a model is loaded, and the loop.

    plan = prepare(args, models=["policy"])      refuses bad input and prints the layout; loads no model
    run = start(plan, world, engine, trained)    resumes, pushes weights to the engine, opens the run directory
    for step, batch in run.steps(sample):        samples and grades; the algorithm file trains
        run.end_step(step, batch, ...)           writes metrics and rollouts/, evaluates, checks, saves
    run.close()

Nothing here computes a loss, an advantage or a gradient, and nothing calls an optimizer.
"""

import contextlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import torch
import torch.distributed as dist
import tyro
from tyro.conf import OmitArgPrefixes

from common import errors, placement, rewards, weight_sync
from common.data import arithmetic
from common.data import prompts as data
from common.data import tokenizer as tokenizers
from common.errors import BadInput
from common.placement import World
from common.rollout import engines
from common.run import checkpoint, checks, diagnosis, directory, evaluation, guards, precision, ranges, sampling
from common.run.plan import fit_memory, show_roles
from common.run.plan import show as show_plan
from common.run.sampling import Batch, Sample
from common.run.tracking import Tracker
from common.trainer import batching

EMBEDDED = {  # Defaults that all files share without --model: two-digit addition, learned on a CPU in minutes.
    "dataset": ("arithmetic",),
    "max_prompt_tokens": 64,
    "max_response_tokens": 48,
    "schedule": "linear",
    "warmup_steps": 2,
}


@dataclass
class Flags:
    """Flags that all algorithm files have. Each file adds the hyperparameters of its algorithm."""

    # model and data
    model: str = "embedded"  # Folder or Hub name. "embedded" is the small arithmetic model that is committed here.
    dataset: tuple[str, ...] = ("gsm8k",)  # arithmetic, sums, gsm8k, math, FILE, owner/name ... Several: each =WEIGHT.
    source: Annotated[data.TrainSource, OmitArgPrefixes] = data.TrainSource()
    environment: str = ""  # Answers the policy between its turns: calculator, guess or file.py:Class.
    reward: tuple[str, ...] = ()
    """gsm8k, math, file.py:function, model:FOLDER, URL. Several: each =WEIGHT. Default: the environment's or gsm8k."""
    max_prompt_tokens: int = 512  # Longest prompt. Longer ones are dropped.
    # rollout
    rollout_backend: Literal["vllm", "hf"] = "vllm"  # hf samples slowly with transformers, where vLLM is missing.
    rollout_tp: int = 1  # Number of ranks that share one engine by tensor parallelism.
    layout: Annotated[placement.Layout, OmitArgPrefixes] = placement.Layout()
    # computing
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Data type of forward and backward; masters are float32. auto: bfloat16 on a GPU, on a CPU where it is faster."""
    compute: Annotated[batching.Compute, OmitArgPrefixes] = batching.Compute()
    offload: Literal["none", "others", "all"] = "none"
    """Keep weights in host memory while they are not used: none, others (all but the policy), or all."""
    # bookkeeping
    seed: int = 0  # Seed of sampling and of the order of the prompts.
    run_dir: str = ""  # Folder that the run writes to. Default: runs/NAME-DATE-TIME, with the name of this file.
    eval_every: int = 0  # Steps between greedy evaluations. 0: only before the first and after the last step.
    saving: Annotated[checkpoint.Saving, OmitArgPrefixes] = checkpoint.Saving()
    rollouts_every: int = 10  # Steps between files in rollouts/.
    max_logprob_gap: float = 0.0
    """A larger mean |trainer - engine| of the log-probs, in nats, stops the run. 0: 0.001 or, in bfloat16, 0.1."""
    track: Literal["none", "wandb", "tensorboard", "mlflow", "trackio", "swanlab"] = "none"
    """Tracker for metrics, in addition to metrics.jsonl. It stays offline unless its own variables say otherwise."""


def launch(main: Callable, flags: type, embedded: dict, description: str) -> None:
    """Parse the command line and call main(args). Without --model, `embedded` replaces defaults of `flags`, and a
    built-in --environment brings its problems.
    """
    defaults = embedded if given("--model") in ("", "embedded") else {}
    if given("--environment") in arithmetic.WITH_ENVIRONMENT:
        defaults = defaults | {"dataset": (given("--environment"),)}
    args = tyro.cli(flags, default=flags(**defaults), description=description)
    errors.launch(main, args)


def given(flag: str) -> str:
    """The last value of a flag on the command line; "" without it."""
    words = [word.partition("=") for word in sys.argv[1:]]
    values = [rest or "".join(sys.argv[i + 2 : i + 3]) for i, (name, _, rest) in enumerate(words) if name == flag]
    return values[-1] if values else ""


@dataclass
class Plan:
    """A run whose input has been checked, and which has not started."""

    args: Flags
    name: str  # name of the algorithm's file, without .py
    size: int  # number of ranks
    tokenizer: object
    stop_token_ids: list[int]  # each of them ends a response
    prompts: list[data.Prompt]  # prompts for training
    held_out: list[data.Prompt]  # prompts for evaluation
    reward: object
    resume: Path | None  # checkpoint to resume; None starts at step 1
    dtype: torch.dtype  # data type of forward and backward
    max_model_len: int  # tokens of the longest prompt plus max_response_tokens

    @property
    def sequences(self) -> int:
        """Number of responses that one engine samples in one call."""
        return sequences(self.args, self.size)


def sequences(args: Flags, size: int) -> int:
    """Number of responses that one engine samples in one call."""
    prompts = getattr(args, "gen_prompts", 0) or args.prompts_per_step
    share = prompts * args.group_size // placement.engine_count(size, args.rollout_tp, args.layout)
    return max(args.group_size, share)  # A request asks for a whole group.


def prepare(args: Flags, models: list[str], others: dict[str, str] | None = None) -> Plan:
    """Check the whole input before a model is loaded. Raises BadInput.

    models: the models that the trainer loads from --model; "reference" is frozen, all others are trained.
    others: name of a flag -> frozen model that it names, which reads the same tokens.
    Replaces args.model by a folder, and fills in what was left open: args.dtype, args.max_logprob_gap, the token budget
    of args.compute and the engine's memory in args.layout. Prints the layout of ranks and models, and with --dry-run
    the whole plan.
    """
    ranges.check(args)
    name = directory.name_of(args)
    size = checks.check_world(args.rollout_tp, args.layout, args.rollout_backend, args.compute)
    check_numbers(args, size)
    args.reward = args.reward or (("environment",) if args.environment else ("gsm8k",))
    reward = rewards.load(args.reward)
    resume = directory.check_directory(args.run_dir, args.saving.resume, args.track)
    if args.model == "embedded":
        args.model = arithmetic.warm_start(args.environment, args.dataset)
    args.model = tokenizers.resolve_model(args.model)
    tokenizer, stop_token_ids = tokenizers.load_tokenizer(args.model)
    source = args.source
    if args.environment:
        from common.rollout.environments import episodes

        source = episodes.attach(args.environment, reward, source, tokenizer, stop_token_ids)
    prompts = data.load(args.dataset, source, "train", tokenizer, args.max_prompt_tokens)
    held_out = data.load_eval(args.dataset, source, tokenizer, args.max_prompt_tokens)
    evaluation.check_prompts(held_out, size)
    checks.check_images(prompts + held_out, args.compute, args.environment, args.layout)
    reward.check_answers(prompts + held_out)
    checks.try_rewards(reward, prompts, tokenizer)
    if reward.environment:
        reward.environment.try_out(prompts[0])
    max_model_len = checks.total_tokens(args.model, prompts + held_out, args.max_response_tokens)
    checks.check_model(args.model, tokenizer, prompts + held_out, value_head="critic" in models)
    engines.check_family(args.rollout_backend, args.model)
    checks.check_engine_heads(args.model, args.rollout_tp)
    others = {flag: tokenizers.resolve_model(path) for flag, path in (others or {}).items()}
    for flag, path in others.items():
        checks.check_companion(
            f"--{flag}", path, tokenizer, prompts + held_out, args.max_response_tokens, args.compute.sequence_parallel
        )
    dtype = precision.choose(args.dtype, args.model, resume)
    args.dtype = str(dtype).removeprefix("torch.")
    args.max_logprob_gap = args.max_logprob_gap or guards.MAX_GAP[dtype]
    fit_memory(args, models, reward.rewards, size, dtype, max_model_len, sequences(args, size), others)
    show_roles(
        args.model, [m for m in models if m != "reference"], [m for m in models if m == "reference"], reward.rewards,
        others=others, size=size, layout=args.layout, backend=args.rollout_backend, rollout_tp=args.rollout_tp,
        dtype=dtype, offload=args.offload, shards=args.compute.shard_size, lora_rank=args.compute.lora_rank,
    )  # fmt: skip
    directory.check_configuration(args, name)
    directory.leave_if_done(args, resume)
    if args.saving.dry_run:
        show_plan(args, size, prompts, held_out, tokenizer, resume)
    return Plan(args, name, size, tokenizer, stop_token_ids, prompts, held_out, reward, resume, dtype, max_model_len)


def check_numbers(args: Flags, size: int) -> None:
    """Refuse numbers that do not divide evenly, and batches in flight without a correction. Raises BadInput."""
    share = args.mini_batches * size
    if args.prompts_per_step % share:
        raise BadInput(
            f"--prompts-per-step {args.prompts_per_step} is not a multiple of --mini-batches {args.mini_batches} "
            f"x {size} ranks = {share}"
        )
    corrected = getattr(args, "tis_cap", True) or getattr(args, "full_vocabulary", False)
    if args.layout.max_inflight_batches > 1 and not corrected:
        raise BadInput(
            "--max-inflight-batches 2: its responses are one update old, and nothing corrects for that; add --tis-cap 2"
        )
    drawn = getattr(args, "gen_prompts", 0)
    if drawn % size:
        raise BadInput(f"--gen-prompts {drawn}: must be a multiple of the {size} ranks, or 0")
    if drawn and drawn * args.max_gen_batches < args.prompts_per_step:
        raise BadInput(
            f"--gen-prompts {drawn} x --max-gen-batches {args.max_gen_batches} draws fewer prompts than "
            f"--prompts-per-step {args.prompts_per_step}"
        )


class Run:
    """The loop around training: sampling, metrics, evaluation, checks, checkpoints. Every rank calls every method."""

    def __init__(self, plan: Plan, world: World, engine, trained: checkpoint.Trained):
        """Load the checkpoint to resume, give the engine the policy's weights, evaluate them. Raises RunFailed."""
        args, policy = plan.args, trained["policy"][0]
        self.plan, self.args, self.world, self.engine = plan, args, world, engine
        self.loader = data.PromptLoader(plan.prompts, args.seed)
        self.saver = checkpoint.Saver(
            args.saving, trained, self.loader, plan.reward, engine, plan.tokenizer, plan.dtype, world
        )
        done = self.saver.load(plan.resume)
        if plan.resume or args.layout.split:  # A fresh colocated engine has loaded these weights from disk already.
            weight_sync.push(policy, engine)
        self.probe = diagnosis.GapProbe(
            policy, engine, plan.prompts, args.temperature, args.max_response_tokens, args.compute, world
        )
        self.tracker = Tracker(args.run_dir, plan.name, args, world, args.track, done, args.steps)
        self.saver.signals.doing = self.tracker.doing
        self.rollouts: sampling.Prefetcher | None = None
        self.weight_version = 0  # number of pushes to the engine before this step's update
        if plan.held_out and not plan.resume:
            self.tracker.first(self.accuracy())

    def accuracy(self) -> float:
        """Greedy accuracy on the held-out prompts."""
        plan = self.plan
        evaluator = evaluation.Evaluator(
            self.engine, plan.reward, plan.tokenizer, self.world, self.args.max_response_tokens
        )
        return evaluator.greedy_accuracy(plan.held_out, metrics=self.tracker)

    def steps(self, sample: Sample) -> Iterator[tuple[int, Batch]]:
        """Yields (step, batch) for the remaining steps, up to --steps or until a signal asks the run to stop."""
        plan, tracker = self.plan, self.tracker
        self.rollouts = sampling.Prefetcher(
            sample, self.loader, plan.reward, plan.tokenizer, self.world, tracker, self.args.layout
        )
        for step in self.saver.steps(tracker.run_dir, self.args.steps):
            tracker.begin(step)
            begin = self.loader.resume_at
            tracker.before_failing = partial(self.rescue, step - 1, begin)
            with self.rescued(step - 1, begin):
                batch = self.rollouts.get(step, last=self.saver.due(step))
            self.weight_version = self.engine.weight_version
            yield step, batch

    def end_step(
        self, step: int, batch: Batch, *, advantages: torch.Tensor, old_logprobs: torch.Tensor,
        rows: torch.Tensor | None = None, values: torch.Tensor | None = None,
    ) -> None:  # fmt: skip
        """Write metrics. Write rollouts, evaluate and save a checkpoint in steps in which they are due.

        advantages: (N,) or (N, T). old_logprobs: (N, T), valid in `rows` (N,) bool; None: in all rows. values: (N, T),
        the critic's values. Raises RunFailed if the metrics show that the run cannot be right.
        """
        args, tracker = self.args, self.tracker
        with self.rescued(step, self.loader.resume_at):
            tracker.mismatch(old_logprobs, batch, self.weight_version, rows)
            tracker.max("advantage/abs_max", advantages.abs().max())
            if step % args.rollouts_every == 0 or step in (1, args.steps):
                tracker.save_rollouts(step, batch, advantages, old_logprobs, rows, values=values)
            if self.plan.held_out and (step == args.steps or (args.eval_every and step % args.eval_every == 0)):
                with tracker.time("eval"):
                    self.rollouts.wait()
                    tracker.mean("eval/accuracy", self.accuracy())
            metrics = tracker.write(step)
            explain = partial(diagnosis.explain_gap, self.probe, batch.prompts, self.rollouts.wait)
            guards.check(metrics, args.max_logprob_gap, explain)
            tracker.refresh_report()
        with tracker.time("save"):  # This step's metrics are written, so the time counts in the next step.
            self.saver.step_done(step, metrics)

    @contextlib.contextmanager
    def rescued(self, step: int, position: int) -> Iterator[None]:
        """Call rescue() if the run fails inside, which it does on all ranks together."""
        try:
            yield
        except errors.OneLine:
            self.rescue(step, position)
            raise

    def rescue(self, step: int, position: int) -> None:
        """Save the state after `step`, from which the prompts at `position` come next, and write the report.

        Updates that the failing step has made before are in it. Collective: every rank calls it.
        """
        self.saver.rescue(step, position)
        self.tracker.close()
        dist.barrier()  # A rank that ended now would end rank 0, which writes the report.

    def close(self) -> None:
        """Write the report and end the run on all ranks together."""
        self.rollouts.wait()  # A run that was stopped early may have a batch in flight.
        self.tracker.close()
        placement.finish(self.world, self.engine)


def start(plan: Plan, world: World, engine, trained: checkpoint.Trained) -> Run:
    """Start or resume the run. trained: name -> (model, optimizer), for "policy" and every other trained model."""
    return Run(plan, world, engine, trained)
