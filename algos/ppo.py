"""PPO -- Proximal Policy Optimization with a critic (arXiv:1707.06347, eq. 7; GAE arXiv:1506.02438, eq. 16).

    r_t     = -kl_coef (old_t - ref_t), plus the score on the last token  the KL to the reference is part of the reward
    delta_t = r_t + V_{t+1} - V_t,   A_t = delta_t + lam A_{t+1},   returns_t = A_t + V_t               (gamma = 1)
    ratio   = exp(logprobs - old_logprobs)
    L       = sum_it max(-A_it ratio, -A_it clip(ratio, 1 - clip, 1 + clip)) / sum_it m_it             (A whitened)
    L_V     = 1/2 sum_it max((V - returns)^2, (V_old + clip(V - V_old, +-value_clip) - returns)^2) / sum_it m_it

V_t is the critic's value before response token t, 0 after the last one: a response cut off by --max-response-tokens
ends like any other. sum_it m_it counts the response tokens of the whole optimizer mini-batch, on all ranks. Tokens the
policy did not choose (mask False) are skipped by the recursion, wherever they stand.

Differs from grpo.py: a critic, with its own weights and optimizer, in place of the group; advantages by token; the KL
sits in the reward; every token of the mini-batch weighs the same. --group-size 1 will do.

Differs from the papers: the critic starts as the policy with a zero head, keeps its own --critic-learning-rate and
may train alone for --critic-warmup-steps (VC-PPO, arXiv:2503.01491), its targets with lam = 1 then; actor and critic
may have different lam (ibid.). kl_coef 0 by default.

Run:    python algos/ppo.py                                             (embedded arithmetic, 4 minutes on two cores)
        torchrun --nproc-per-node 8 algos/ppo.py --model Qwen/Qwen2.5-0.5B-Instruct --dataset gsm8k
            --steps 400 --prompts-per-step 256 --group-size 1 --learning-rate 1e-6 --critic-learning-rate 1e-5
            --kl-coef 0.001 --schedule constant --max-prompt-tokens 512 --max-response-tokens 512
Result: embedded arithmetic, 256 held-out problems, greedy: see baselines/README.md. GSM8K on GPUs: not yet reproduced.
"""

import dataclasses
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import torch
import tyro

from common import (
    batching,
    checkpoint,
    data,
    diagnosis,
    embedded,
    engines,
    errors,
    evaluation,
    model,
    overlap,
    placement,
    plan,
    rewards,
    roles,
    run,
    selftest,
    tracking,
    weight_sync,
)


@dataclasses.dataclass
class Args:
    # what
    model: str = "embedded"  # folder or Hub name; "embedded": the arithmetic model, warm-started on first use
    dataset: tuple[str, ...] = ("arithmetic",)  # arithmetic | gsm8k | FILE | owner/name | ...; several: each =WEIGHT
    source: Annotated[data.TrainSource, tyro.conf.OmitArgPrefixes] = data.TrainSource()  # columns, evaluation set, ...
    reward: tuple[str, ...] = ("gsm8k",)  # gsm8k | math | file.py:function | model:FOLDER | ...; several: each =WEIGHT
    reward_failure: Literal["drop", "abort", "zero"] = "drop"  # a response that cannot be graded leaves with its prompt
    # rollout
    steps: int = 50  # one step: one rollout and its updates
    prompts_per_step: int = 64  # B, all ranks together
    group_size: int = 4  # G, responses per prompt; fewer than elsewhere, the critic doubles the work
    max_prompt_tokens: int = 64  # longer prompts: --overlong-prompts
    max_response_tokens: int = 48
    temperature: float = 1.0  # of sampling and of every log-prob
    rollout_backend: Literal["vllm", "hf"] = "vllm"  # hf: slow, for comparison or where vLLM is not installed
    rollout_tp: int = 1  # ranks that share one engine by tensor parallelism
    layout: Annotated[placement.Layout, tyro.conf.OmitArgPrefixes] = placement.Layout()  # colocate | split, ...
    # algorithm
    clip: float = 0.2  # epsilon in eq. 7
    tis_cap: float = 0.0  # C of truncated importance sampling, 2 is usual; 0: every weight is 1
    value_clip: float = 0.2  # the same for values, in units of reward
    lam_actor: float = 1.0  # lambda in GAE's eq. 16, for the advantages
    lam_critic: float = 1.0  # the same, for the returns the critic learns; 1: Monte Carlo
    critic_warmup_steps: int = 0  # first steps in which the critic alone learns
    kl_coef: float = 0.0  # beta; 0 never loads the reference policy
    # optimization
    mini_batches: int = 4  # optimizer steps per pass over the rollout, of whole groups
    epochs: int = 1  # passes over each rollout, in the same order
    learning_rate: float = 1.5e-4  # for the embedded model; 1e-6 is usual for a pretrained one
    critic_learning_rate: float = 1e-3  # constant
    schedule: Literal["constant", "linear"] = "linear"  # of the learning rate after warm-up; linear: to 0 at the end
    warmup_steps: int = 2  # steps of linear warm-up
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"  # of computing; master weights are float32
    compute: Annotated[batching.Compute, tyro.conf.OmitArgPrefixes] = batching.Compute()  # token budget, sharing, ...
    offload: Literal["none", "others", "all"] = "none"  # to host memory between uses; others: all but the policy
    # bookkeeping
    seed: int = 0
    run_dir: str = ""  # empty: runs/NAME-DATE-TIME, with the name of this file
    eval_every: int = 0  # steps between greedy evaluations; 0: before the first and after the last step only
    saving: Annotated[checkpoint.Saving, tyro.conf.OmitArgPrefixes] = checkpoint.Saving()  # resume, save_every, ...
    rollouts_every: int = 10  # steps between files in rollouts/
    max_logprob_gap: float = 0.05  # mean |old - rollout| per token that stops the run
    profile: tuple[int, ...] = ()  # steps of which every rank writes a torch profiler trace
    track: Literal["none", "wandb", "tensorboard"] = "none"  # beside metrics.jsonl


def reward_tokens(
    scores: torch.Tensor,
    old_logprobs: torch.Tensor,
    ref_logprobs: torch.Tensor | None,
    response_mask: torch.Tensor,
    kl_coef: float,
) -> torch.Tensor:
    """Scores (N,), log-probs (N, T) -> (N, T): the score on the last response token, -kl_coef k1 on each.

    0 outside the mask; a response without a token gets no reward.
    """
    width = response_mask.shape[1]
    last = width - 1 - response_mask.flip(1).float().argmax(1)  # not the length - 1: the mask may have holes
    at_end = torch.arange(width, device=scores.device) == last[:, None]  # (N, T)
    rewards = torch.where(at_end & response_mask, scores[:, None], 0.0)
    if ref_logprobs is None:
        return rewards
    return rewards - kl_coef * torch.where(response_mask, old_logprobs - ref_logprobs, 0.0)  # k1: the KL's own gradient


def compute_advantages(
    token_rewards: torch.Tensor,
    values: torch.Tensor,
    response_mask: torch.Tensor,
    gamma: float,
    lam: float,
    bootstrap_value: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Advantages and returns (N, T) by GAE from token rewards and values (N, T); before whitening, 0 outside the mask.

    bootstrap_value (N,): value after the last token, for responses that were cut off; None: 0, they ended.
    """
    advantages = torch.zeros_like(values)
    to_come = torch.zeros_like(values[:, 0])  # (N,) A of the next response token
    next_value = to_come if bootstrap_value is None else bootstrap_value  # (N,)
    for t in reversed(range(values.shape[1])):
        chosen = response_mask[:, t]
        delta = token_rewards[:, t] + gamma * next_value - values[:, t]
        # Where the mask is False both are carried to the left as they are: no discount, no value of padding.
        to_come = torch.where(chosen, delta + gamma * lam * to_come, to_come)
        next_value = torch.where(chosen, values[:, t], next_value)
        advantages[:, t] = torch.where(chosen, to_come, 0.0)
    return advantages, torch.where(response_mask, advantages + values, 0.0)


def whiten(advantages: torch.Tensor, response_mask: torch.Tensor, total=float) -> torch.Tensor:
    """(N, T) -> (N, T): mean 0 and sample variance 1 over the response tokens of all ranks, 0 outside the mask.

    total: sums a number over the ranks (World.sum); float: these rows are all there are.
    """
    count = total(response_mask.sum())
    mean = total(torch.where(response_mask, advantages, 0.0).sum()) / max(1, count)
    centred = torch.where(response_mask, advantages - mean, 0.0)
    variance = total(centred.square().sum()) / max(1, count - 1)
    return centred if count < 2 else centred * (variance + 1e-8) ** -0.5


def policy_loss(
    logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    *,
    clip_low: float,
    clip_high: float,
    denominator: float,
    weights: torch.Tensor | float = 1.0,
) -> torch.Tensor:
    """Scalar: the sum of the given rows' token losses, divided by `denominator`.

    All (n, T). Values outside the mask, NaN included, change nothing.
    denominator: response tokens of the whole mini-batch on all ranks.
    weights: (n, T), see rollout_weights.
    """
    ratio = torch.where(response_mask, logprobs - old_logprobs, 0.0).clamp(-20, 20).exp()
    per_token = torch.max(-advantages * ratio, -advantages * ratio.clamp(1 - clip_low, 1 + clip_high))
    per_token = weights * per_token
    return (per_token * response_mask).sum() / denominator


def rollout_weights(old_logprobs, rollout_logprobs, response_mask, cap: float) -> torch.Tensor:
    """(n, T): truncated importance sampling, min(exp(old - rollout), cap); 1 outside the mask.

    Responses were sampled by the engine's policy: another rounding of the trainer's, or with batches in flight an
    older one. Weighs the policy loss alone, without a gradient (Ionides, 2008).
    """
    return torch.where(response_mask, old_logprobs - rollout_logprobs, 0.0).clamp(-20, 20).exp().clamp(max=cap)


def value_loss(
    values: torch.Tensor,
    old_values: torch.Tensor,
    returns: torch.Tensor,
    response_mask: torch.Tensor,
    *,
    clip: float,
    denominator: float,
) -> torch.Tensor:
    """Scalar: half the larger of the squared errors of V and of V kept near V_old, summed, over `denominator`.

    All (n, T). Values outside the mask, NaN included, change nothing. denominator: as in policy_loss.
    """
    values, old_values, returns = (torch.where(response_mask, x, 0.0) for x in (values, old_values, returns))
    near = old_values + (values - old_values).clamp(-clip, clip)
    return 0.5 * torch.max((values - returns).square(), (near - returns).square()).sum() / denominator


def explained_variance(values: torch.Tensor, returns: torch.Tensor, response_mask: torch.Tensor, total=float) -> float:
    """1 - Var(returns - values) / Var(returns) over the response tokens of all ranks; 0 for constant returns."""
    count = max(1, total(response_mask.sum()))

    def variance(x: torch.Tensor) -> float:
        x = x[response_mask].double()
        return total(x.square().sum()) / count - (total(x.sum()) / count) ** 2

    spread = variance(returns)
    return 1 - variance(returns - values) / spread if spread > 1e-12 else 0.0


@torch.no_grad()
def clipped_tokens(logprobs, old_logprobs, advantages, response_mask, *, clip_low, clip_high) -> torch.Tensor:
    """How many response tokens have no gradient because their ratio was clipped."""
    ratio = torch.where(response_mask, logprobs - old_logprobs, 0.0).exp()
    clipped = ((advantages > 0) & (ratio > 1 + clip_high)) | ((advantages < 0) & (ratio < 1 - clip_low))
    return (clipped & response_mask).sum()


def check_args(args: Args, size: int) -> None:
    """Numbers that cannot work together. Raises BadInput naming both."""
    if args.tis_cap < 0:
        raise errors.BadInput(f"--tis-cap {args.tis_cap}: must be at least 0")
    if args.temperature <= 0:
        raise errors.BadInput(f"--temperature {args.temperature}: training samples at a temperature > 0")
    share = args.mini_batches * size
    if args.mini_batches < 1 or args.prompts_per_step < 1 or args.prompts_per_step % share:
        raise errors.BadInput(
            f"--prompts-per-step {args.prompts_per_step} is not a multiple of --mini-batches {args.mini_batches} "
            f"x {size} ranks = {share}"
        )
    for name in (
        "steps",
        "epochs",
        "group_size",
        "max_prompt_tokens",
        "max_response_tokens",
        "rollouts_every",
    ):
        if getattr(args, name) < 1:
            raise errors.BadInput(f"--{name.replace('_', '-')} {getattr(args, name)}: must be at least 1")
    if args.kl_coef < 0 or not 0 < args.clip < 1 or args.value_clip <= 0:
        raise errors.BadInput("--kl-coef must be >= 0, --clip inside (0, 1) and --value-clip > 0")
    if not 0 <= args.lam_actor <= 1 or not 0 <= args.lam_critic <= 1:
        raise errors.BadInput(f"--lam-actor {args.lam_actor}, --lam-critic {args.lam_critic}: must be inside [0, 1]")
    if not 0 <= args.critic_warmup_steps < args.steps:
        raise errors.BadInput(
            f"--critic-warmup-steps {args.critic_warmup_steps} leaves nothing of --steps {args.steps}"
        )


def main(args: Args) -> None:
    # Everything that can be wrong with the input is found here, before a model is loaded.
    size = roles.check_world(args.rollout_tp, args.layout, args.rollout_backend, args.compute)
    check_args(args, size)
    reward = rewards.load(args.reward, args.reward_failure, args.saving.trust_pickle)
    resume = run.check_directory(args.run_dir, args.saving.resume, args.track)
    if args.model == "embedded":
        args.model = embedded.warm_start(train=not args.saving.dry_run)
    args.model = data.resolve_model(args.model, args.source.hub)
    tokenizer, stop_token_ids = data.load_tokenizer(args.model, args.saving.trust_pickle)
    prompts = data.load(args.dataset, args.source, "train", tokenizer, args.max_prompt_tokens)
    held_out = data.load_eval(args.dataset, args.source, tokenizer, args.max_prompt_tokens)
    reward.check_answers(prompts + held_out)
    max_model_len = data.total_tokens(args.model, prompts + held_out, args.max_response_tokens)
    dtype = placement.compute_dtype(args.dtype, args.model)
    args.compute = batching.plan(args.compute, args.model, dtype)
    roles.show(
        args.model, ["policy", "critic"], ["reference"] if args.kl_coef > 0 else [], reward.rewards, dtype=dtype,
        size=size, layout=args.layout, backend=args.rollout_backend, rollout_tp=args.rollout_tp, offload=args.offload,
    )  # fmt: skip
    run.check_configuration(args, Path(__file__).stem)
    if args.saving.dry_run:
        return plan.show(args, size, prompts, held_out, resume)

    world = placement.init(args.seed, args.rollout_tp, args.layout, args.compute)
    policy = model.load(args.model, world, dtype, args.compute, offload=args.offload == "all")
    ref_policy = None
    if args.kl_coef > 0:
        ref_policy = model.load(args.model, world, dtype, args.compute, offload=args.offload != "none")
        ref_policy.requires_grad_(False)
    optimizer = torch.optim.AdamW(
        policy.parameters(), lr=args.learning_rate, betas=(0.9, 0.95), weight_decay=args.weight_decay, fused=True
    )
    critic = model.load(args.model, world, dtype, args.compute, offload=args.offload != "none", value_head=True)
    critic_optimizer = torch.optim.AdamW(
        critic.parameters(), lr=args.critic_learning_rate, betas=(0.9, 0.95), weight_decay=args.weight_decay, fused=True
    )
    engine = engines.start(
        args.rollout_backend, args.model, stop_token_ids, world, dtype, max_model_len=max_model_len,
        sequences=args.prompts_per_step * args.group_size // roles.engines(size, args.rollout_tp, args.layout),
        layout=args.layout, rollout_tp=args.rollout_tp,
    )  # fmt: skip
    loader = data.PromptLoader(prompts, args.seed)
    trained = {"policy": (policy, optimizer), "critic": (critic, critic_optimizer)}
    saver = checkpoint.Saver(args.saving, trained, loader, reward, engine, tokenizer, dtype, world)
    start = saver.load(resume)
    if resume or args.layout.split:  # else the engine has just read these weights
        weight_sync.push(policy, engine)
    probe = diagnosis.Probe(policy, engine, prompts, args.temperature, args.max_response_tokens, args.compute, world)
    if args.saving.selftest:
        return selftest.run(probe, saver, args.max_logprob_gap, args.run_dir)
    tracker = tracking.Tracker(args.run_dir, Path(__file__).stem, args, world, args.track, start, args.steps)
    greedy_accuracy = partial(evaluation.greedy_accuracy, engine, held_out, reward, tokenizer, world)
    if held_out and not resume:
        tracker.first(greedy_accuracy(args.max_response_tokens))

    def sample(step: int, world: placement.World, tracker: tracking.Figures):
        """What this rank needs of a step before it trains: a step ahead, in a thread, with --max-inflight-batches 2."""
        # Rank r takes prompts r, r + size, ...: mini-batch k holds the same prompts for any number of ranks.
        mine = loader.take(args.prompts_per_step)[world.rank :: world.size]
        begun = reward.ahead(mine, tokenizer)  # grades the responses to a prompt while others are sampled
        with tracker.time("rollout"):
            batch = engine.generate(
                [prompt.ids for prompt in mine],
                args.group_size,
                args.temperature,
                args.max_response_tokens,
                seed=args.seed * 2**20 + step,
                done=begun,
            )
            engine.sleep()

        with tracker.time("reward"):
            responses = tokenizer.batch_decode(batch.response_ids, skip_special_tokens=True)
            results = reward.score(mine, responses, batch, world, step, tracker.add, begun)
        return mine, batch, responses, results

    rollouts = overlap.Prefetcher(sample, loader, world, tracker, args.layout)
    clip = {"clip_low": args.clip, "clip_high": args.clip}
    for step in saver.steps(tracker.run_dir, args.steps):
        tracker.begin(step, args.profile)
        mine, batch, responses, results = rollouts.get(step, last=saver.due(step))
        scores = torch.tensor([result.score for result in results], device=world.device)  # (N,)

        with tracker.time("logprobs"):  # before any update: "old" are the weights that sampled
            micro_batches = batching.pack(batch, torch.arange(len(batch)), args.compute, world)
            old_logprobs = model.frozen_logprobs(policy, batch, micro_batches, args.temperature)  # (N, T)
            old_values = model.frozen_values(critic, batch, micro_batches)  # (N, T)
            ref_logprobs = None
            if ref_policy is not None:
                ref_logprobs = model.frozen_logprobs(ref_policy, batch, micro_batches, args.temperature)  # (N, T)
                kl = (old_logprobs - ref_logprobs) * batch.response_mask  # (N, T)
                tracker.add("reward/kl", kl.sum(), len(batch))
        token_rewards = reward_tokens(scores, old_logprobs, ref_logprobs, batch.response_mask, args.kl_coef)  # (N, T)
        warming_up = step <= args.critic_warmup_steps  # the critic alone learns, from Monte-Carlo returns
        given = (token_rewards, old_values, batch.response_mask, 1.0)
        advantages, _ = compute_advantages(*given, args.lam_actor)  # (N, T)
        _, returns = compute_advantages(*given, 1.0 if warming_up else args.lam_critic)  # (N, T)
        advantages = whiten(advantages, batch.response_mask, world.sum)
        explained = explained_variance(old_values, returns, batch.response_mask, world.sum)
        tracker.add("critic/explained_variance", explained)
        tracker.mismatch(old_logprobs, batch, engine.weight_version)

        with tracker.time("update"):
            own_step = step - args.critic_warmup_steps  # the policy's
            for group in optimizer.param_groups:
                decay = (
                    1 - (own_step - 1) / (args.steps - args.critic_warmup_steps) if args.schedule == "linear" else 1.0
                )
                group["lr"] = args.learning_rate * min(decay, own_step / max(1, args.warmup_steps))
            for rows in torch.arange(len(batch), device=world.device).chunk(args.mini_batches) * args.epochs:
                denominator = world.sum(batch.response_mask[rows].sum())  # tokens on all ranks
                micro_batches = batching.pack(batch, rows, args.compute, world)
                for micro in micro_batches:
                    model.accumulate(critic, last=micro is micro_batches[-1])
                    values = model.response_values(critic, micro)  # (n, T)
                    given = (old_values[micro.rows], returns[micro.rows], micro.response_mask)
                    loss = value_loss(values, *given, clip=args.value_clip, denominator=denominator)
                    (loss * world.size).backward()  # FSDP averages over ranks; the sum is wanted
                    tracker.add("loss/value", loss.detach() * world.size, 0)
                grad_norm = torch.nn.utils.clip_grad_norm_(critic.parameters(), args.max_grad_norm)
                tracker.grad_norm(step, grad_norm, "critic/grad_norm", "loss/value")
                critic_optimizer.step()
                critic_optimizer.zero_grad()

                for micro in [] if warming_up else micro_batches:
                    model.accumulate(policy, last=micro is micro_batches[-1])
                    logprobs, entropy = model.response_logprobs(policy, micro, args.temperature, with_entropy=True)
                    old = old_logprobs[micro.rows]  # (n, T)
                    w = 1.0  # (n, T) with --tis-cap
                    if args.tis_cap:
                        w = rollout_weights(old, batch.rollout_logprobs[micro.rows], micro.response_mask, args.tis_cap)
                    given = (advantages[micro.rows], micro.response_mask)
                    loss = policy_loss(logprobs, old, *given, **clip, denominator=denominator, weights=w)
                    (loss * world.size).backward()  # FSDP averages over ranks; the sum is wanted
                    tracker.update(loss, entropy, micro.response_mask, clipped_tokens(logprobs, old, *given, **clip))
                if not warming_up:  # else Adam would move on its momentum alone
                    grad_norm = torch.nn.utils.clip_grad_norm_(policy.parameters(), args.max_grad_norm)
                    tracker.grad_norm(step, grad_norm)  # stops the run before NaN reaches the weights
                    optimizer.step()
                    optimizer.zero_grad()

        with tracker.time("sync"):
            weight_sync.push(policy, engine)

        tracker.rollout(scores, args.group_size, batch)
        if step % args.rollouts_every == 0 or step in (1, args.steps):
            tracker.save_rollouts(step, mine, responses, results, batch, advantages, old_logprobs, values=old_values)
        if held_out and (step == args.steps or (args.eval_every and step % args.eval_every == 0)):
            with tracker.time("eval"):
                rollouts.wait()
                tracker.add("eval/accuracy", greedy_accuracy(args.max_response_tokens))
        metrics = tracker.write(step)
        run.check(metrics, args.max_logprob_gap, partial(diagnosis.explain_gap, probe, mine, rollouts.wait))
        with tracker.time("save"):  # counts in the next step
            saver.step_done(step, metrics)

    rollouts.wait()  # of a run that was stopped early a batch may be in flight
    tracker.close()
    placement.finish(world, engine)


if __name__ == "__main__":
    errors.launch(main, tyro.cli(Args, description=__doc__))
