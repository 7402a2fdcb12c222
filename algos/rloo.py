"""RLOO -- REINFORCE Leave-One-Out (Back to Basics, arXiv:2402.14740, eq. 6; estimator of Kool et al. 2019).

    R_i   = score_i - kl_coef sum_t (old_i,t - ref_i,t)                   the KL to the reference is part of the reward
    A_i   = R_i - mean of the other G - 1 rewards of the group,           the same on every token of the response
    ratio = exp(logprobs - old_logprobs)
    L     = sum_it max(-A_i ratio, -A_i clip(ratio, 1 - clip_low, 1 + clip_high)) / sum_it m_it

sum_it m_it counts the response tokens of the whole optimizer mini-batch, on all ranks. The siblings' mean depends on
nothing that response i did: an unbiased baseline without a critic. With --mini-batches 1 the ratio is 1 and L is
REINFORCE; with more, the clip keeps later mini-batches near the policy that sampled.

Differs from grpo.py: the baseline leaves response i out and there is no std; the KL sits in the reward, not in the
loss; every token of the mini-batch weighs the same.

Differs from the paper: clipped token ratios and several mini-batches a rollout where it makes one on-policy update;
a token mean where its loss is a mean over sequences.

Run:    python algos/rloo.py                                            (embedded arithmetic, 3 minutes on two cores)
        torchrun --nproc-per-node 8 algos/rloo.py --model Qwen/Qwen2.5-0.5B-Instruct --dataset gsm8k --mini-batches 1
            --steps 200 --learning-rate 1e-6 --max-prompt-tokens 512 --max-response-tokens 1024
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
    steps: int = 60  # one step: one rollout and its updates; 52 at 2e-4, as in grpo.py, ended 1 % lower
    prompts_per_step: int = 64  # B, all ranks together
    group_size: int = 8  # G, responses per prompt
    max_prompt_tokens: int = 64  # longer prompts: --overlong-prompts
    max_response_tokens: int = 48
    temperature: float = 1.0  # of sampling and of every log-prob
    rollout_backend: Literal["vllm", "hf"] = "vllm"  # hf: slow, for comparison or where vLLM is not installed
    rollout_tp: int = 1  # ranks that share one engine by tensor parallelism
    layout: Annotated[placement.Layout, tyro.conf.OmitArgPrefixes] = placement.Layout()  # colocate | split, ...
    # algorithm
    clip_low: float = 0.2  # epsilon, below
    clip_high: float = 0.2  # epsilon, above
    tis_cap: float = 0.0  # C of truncated importance sampling, 2 is usual; 0: every weight is 1
    kl_coef: float = 0.0  # beta; 0 never loads the reference policy
    # optimization
    mini_batches: int = 4  # optimizer steps per pass over the rollout, of whole groups
    epochs: int = 1  # passes over each rollout, in the same order
    learning_rate: float = 1.5e-4  # for the embedded model; 1e-6 is usual for a pretrained one
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


def compute_advantages(rewards: torch.Tensor, group_size: int) -> torch.Tensor:
    """(N,) -> (N,): rewards minus the mean of the others in the group. A group of equal rewards gives exactly 0.

    Equality is tested on the rewards: in float32 the mean of sixteen times 0.7 is not 0.7.
    """
    groups = rewards.view(-1, group_size)  # (B, G)
    centred = groups - groups.mean(dim=1, keepdim=True)
    constant = groups.amax(dim=1, keepdim=True) == groups.amin(dim=1, keepdim=True)
    advantages = centred * group_size / (group_size - 1)  # = R_i - mean of the other G - 1
    return torch.where(constant, 0.0, advantages).view(-1)


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

    All (n, T) but advantages (n,). Values outside the mask, NaN included, change nothing.
    denominator: response tokens of the whole mini-batch on all ranks.
    weights: (n, T), see rollout_weights.
    """
    ratio = torch.where(response_mask, logprobs - old_logprobs, 0.0).clamp(-20, 20).exp()
    advantages = advantages[:, None]  # (n, 1)
    per_token = torch.max(-advantages * ratio, -advantages * ratio.clamp(1 - clip_low, 1 + clip_high))
    per_token = weights * per_token
    return (per_token * response_mask).sum() / denominator


def rollout_weights(old_logprobs, rollout_logprobs, response_mask, cap: float) -> torch.Tensor:
    """(n, T): truncated importance sampling, min(exp(old - rollout), cap); 1 outside the mask.

    Responses were sampled by the engine's policy: another rounding of the trainer's, or with batches in flight an
    older one. Weighs the policy loss alone, without a gradient (Ionides, 2008).
    """
    return torch.where(response_mask, old_logprobs - rollout_logprobs, 0.0).clamp(-20, 20).exp().clamp(max=cap)


def sequence_kl(old_logprobs: torch.Tensor, ref_logprobs: torch.Tensor, response_mask: torch.Tensor) -> torch.Tensor:
    """(N,): the estimator k1 summed over each response; its expectation is the KL of the whole sequence."""
    return torch.where(response_mask, old_logprobs - ref_logprobs, 0.0).sum(1)


@torch.no_grad()
def clipped_tokens(logprobs, old_logprobs, advantages, response_mask, *, clip_low, clip_high) -> torch.Tensor:
    """How many response tokens have no gradient because their ratio was clipped."""
    ratio = torch.where(response_mask, logprobs - old_logprobs, 0.0).exp()
    advantages = advantages[:, None]  # (n, 1)
    clipped = ((advantages > 0) & (ratio > 1 + clip_high)) | ((advantages < 0) & (ratio < 1 - clip_low))
    return (clipped & response_mask).sum()


def check_args(args: Args, size: int) -> None:
    """Numbers that cannot work together. Raises BadInput naming both."""
    if args.group_size < 2:
        raise errors.BadInput(f"--group-size {args.group_size}: a group of one has no mean to differ from; use >= 2")
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
    for name in ("steps", "epochs", "max_prompt_tokens", "max_response_tokens", "rollouts_every"):
        if getattr(args, name) < 1:
            raise errors.BadInput(f"--{name.replace('_', '-')} {getattr(args, name)}: must be at least 1")
    if args.kl_coef < 0 or not 0 < args.clip_low < 1 or args.clip_high <= 0:
        raise errors.BadInput("--kl-coef must be >= 0, --clip-low inside (0, 1) and --clip-high > 0")


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
        args.model, ["policy"], ["reference"] if args.kl_coef > 0 else [], reward.rewards, dtype=dtype,
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
    engine = engines.start(
        args.rollout_backend, args.model, stop_token_ids, world, dtype, max_model_len=max_model_len,
        sequences=args.prompts_per_step * args.group_size // roles.engines(size, args.rollout_tp, args.layout),
        layout=args.layout, rollout_tp=args.rollout_tp,
    )  # fmt: skip
    loader = data.PromptLoader(prompts, args.seed)
    trained = {"policy": (policy, optimizer)}
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
    clip = {"clip_low": args.clip_low, "clip_high": args.clip_high}
    # The log-probs of a single update are the old ones: the ratio is 1, and no pass of its own is due.
    single_update = args.mini_batches * args.epochs == 1 and ref_policy is None
    for step in saver.steps(tracker.run_dir, args.steps):
        tracker.begin(step, args.profile)
        mine, batch, responses, results = rollouts.get(step, last=saver.due(step))
        scores = torch.tensor([result.score for result in results], device=world.device)  # (N,)
        advantages = compute_advantages(scores, args.group_size)  # (N,)
        # Without a KL term a row of advantage 0 has no gradient: it counts in the denominator and skips the forward.
        needed = advantages != 0 if ref_policy is None else batch.response_mask.any(1)  # (N,)

        with tracker.time("logprobs"):  # before any update: "old" are the weights that sampled
            micro_batches = batching.pack(batch, needed.nonzero().flatten(), args.compute, world)
            old_logprobs = torch.zeros_like(batch.rollout_logprobs)  # (N, T); of a single update: its own, below
            if not single_update:
                old_logprobs = model.frozen_logprobs(policy, batch, micro_batches, args.temperature)
            if ref_policy is not None:
                ref_logprobs = model.frozen_logprobs(ref_policy, batch, micro_batches, args.temperature)  # (N, T)
                kl = sequence_kl(old_logprobs, ref_logprobs, batch.response_mask)  # (N,)
                advantages = compute_advantages(scores - args.kl_coef * kl, args.group_size)  # (N,)
                tracker.add("reward/kl", kl.sum(), len(batch))

        with tracker.time("update"):
            for group in optimizer.param_groups:
                decay = 1 - (step - 1) / args.steps if args.schedule == "linear" else 1.0
                group["lr"] = args.learning_rate * min(decay, step / max(1, args.warmup_steps))
            for rows in torch.arange(len(batch), device=world.device).chunk(args.mini_batches) * args.epochs:
                denominator = world.sum(batch.response_mask[rows].sum())  # tokens on all ranks, the skipped rows' too
                micro_batches = batching.pack(batch, rows[needed[rows]], args.compute, world)
                for micro in micro_batches:
                    model.accumulate(policy, last=micro is micro_batches[-1])
                    logprobs, entropy = model.response_logprobs(policy, micro, args.temperature, with_entropy=True)
                    if single_update:
                        old_logprobs[micro.rows] = logprobs.detach()
                    old = old_logprobs[micro.rows]  # (n, T)
                    w = 1.0  # (n, T) with --tis-cap
                    if args.tis_cap:
                        w = rollout_weights(old, batch.rollout_logprobs[micro.rows], micro.response_mask, args.tis_cap)
                    given = (advantages[micro.rows], micro.response_mask)
                    loss = policy_loss(logprobs, old, *given, **clip, denominator=denominator, weights=w)
                    (loss * world.size).backward()  # FSDP averages over ranks; the sum is wanted
                    tracker.update(loss, entropy, micro.response_mask, clipped_tokens(logprobs, old, *given, **clip))
                if micro_batches:  # else no rank has a gradient, and Adam would move on its momentum alone
                    grad_norm = torch.nn.utils.clip_grad_norm_(policy.parameters(), args.max_grad_norm)
                    tracker.grad_norm(step, grad_norm)  # stops the run before NaN reaches the weights
                    optimizer.step()
                    optimizer.zero_grad()

        tracker.mismatch(old_logprobs, batch, engine.weight_version, needed)

        with tracker.time("sync"):
            weight_sync.push(policy, engine)

        tracker.rollout(scores, args.group_size, batch)
        if step % args.rollouts_every == 0 or step in (1, args.steps):
            tracker.save_rollouts(step, mine, responses, results, batch, advantages, old_logprobs, needed)
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
