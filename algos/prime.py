"""PRIME -- Process reinforcement through implicit rewards (arXiv:2502.01456, eq. 3-5; implicit PRM arXiv:2412.01981).

    r_t   = beta (log phi(y_t) - log ref(y_t))           process reward of a token, from outcome labels alone
    L_phi = BCE(sigmoid(sum_t r_t), correct)             mean over sequences; phi learns online, before it rewards
    p_t   = r_t - mean over the G - 1 others of their mean r;   o = correct - mean of the others' correct
    A_t   = c_process sum_{s>=t} p_s + c_outcome o,      whitened over all response tokens of the step
    ratio = exp(logprobs - old_logprobs)
    L     = sum_it max(-A_it ratio, -A_it clip(ratio, 1 - clip, 1 + clip)) / sum_it m_it

phi, the implicit process reward model, is a language model that starts as the policy; ref is the frozen start. r is
divided by the batch's largest |sum_{s>=t} r_s| first, on all ranks, else the outcome drowns it. c_outcome is 1: only
the ratio survives the whitening. Prompts are drawn until --prompts-per-step of them have a share of right
responses within [--min-accuracy, --max-accuracy], counted on raw correctness.

Differs from rloo.py: the process reward model, its update, token rewards and their sums to come, whitening, the filter.

Differs from the paper: the baseline is its formula, where the released code adds (r_t - mean r_i) / (G - 1); the last
token's process reward counts; surplus groups are discarded where the recipe fills up with groups that fail the filter.

Run:    python algos/prime.py                                           (embedded arithmetic, 4 minutes on two cores)
        torchrun --nproc-per-node 8 algos/prime.py --model PRIME-RL/Eurus-2-7B-SFT --dataset train.jsonl
            --steps 500 --prompts-per-step 256 --gen-prompts 1024 --group-size 4 --mini-batches 4
            --learning-rate 5e-7 --prm-learning-rate 1e-6 --schedule constant
            --max-prompt-tokens 1024 --max-response-tokens 3072
Result: embedded arithmetic, 256 held-out problems, greedy: see baselines/README.md. On GPUs: not yet reproduced.
"""

import dataclasses
import math
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import torch
import torch.nn.functional as F
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
    rollout,
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
    steps: int = 48  # one step: one rollout and its updates
    prompts_per_step: int = 16  # B, all ranks together; fewer than elsewhere, the process model doubles the work
    gen_prompts: int = 48  # prompts per draw of dynamic sampling, all ranks together; 0: as many as prompts_per_step
    max_gen_batches: int = 10  # draws per step before the run stops
    group_size: int = 8  # G, responses per prompt
    max_prompt_tokens: int = 64  # longer prompts: --overlong-prompts
    max_response_tokens: int = 48
    temperature: float = 1.0  # of sampling and of every log-prob
    rollout_backend: Literal["vllm", "hf"] = "vllm"  # hf: slow, for comparison or where vLLM is not installed
    rollout_tp: int = 1  # ranks that share one engine by tensor parallelism
    layout: Annotated[placement.Layout, tyro.conf.OmitArgPrefixes] = placement.Layout()  # colocate | split, ...
    # algorithm
    clip: float = 0.2  # epsilon
    tis_cap: float = 0.0  # C of truncated importance sampling, 2 is usual; 0: every weight is 1
    min_accuracy: float = 0.1  # of a prompt's responses, for the prompt to be trained on; 0.2 and 0.8 in the paper,
    max_accuracy: float = 0.9  # but the embedded model seldom answers in between
    beta: float = 0.05  # of the process reward
    c_process: float = 0.3  # weight of the process rewards beside the outcome's 1; 1 drowns it while phi is a beginner
    # optimization
    mini_batches: int = 4  # optimizer steps per pass over the rollout, of whole groups
    learning_rate: float = 2.5e-4  # for the embedded model, for few rows; 1e-6 is usual for a pretrained one
    prm_learning_rate: float = 3e-4  # of the process reward model; constant
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


def implicit_rewards(
    prm_logprobs: torch.Tensor, ref_logprobs: torch.Tensor, response_mask: torch.Tensor, beta: float
) -> torch.Tensor:
    """(N, T): process rewards beta (log phi - log ref), 0 outside the mask."""
    return beta * torch.where(response_mask, prm_logprobs - ref_logprobs, 0.0)


def prm_loss(
    prm_logprobs: torch.Tensor,
    ref_logprobs: torch.Tensor,
    response_mask: torch.Tensor,
    beta: float,
    correct: torch.Tensor,
) -> torch.Tensor:
    """(n,): cross entropy of sigmoid(sum of process rewards) against correct (n,), 0 or 1; 0 for an empty row."""
    scores = implicit_rewards(prm_logprobs, ref_logprobs, response_mask, beta).sum(1)
    loss = F.binary_cross_entropy_with_logits(scores, correct.to(scores.dtype), reduction="none")
    return loss * response_mask.any(1)


def normalize(process_rewards: torch.Tensor, response_mask: torch.Tensor, largest=float) -> torch.Tensor:
    """(N, T): divided by the largest |sum of a row's rewards to come| + 1e-6.

    largest: maximum of a number over the ranks (World.max); float: these rows are all there are.
    """
    to_come = torch.where(response_mask, process_rewards, 0.0).flip(1).cumsum(1).flip(1)
    return process_rewards / (largest((to_come * response_mask).abs().max()) + 1e-6)


def compute_advantages(
    process_rewards: torch.Tensor,
    correct: torch.Tensor,
    response_mask: torch.Tensor,
    group_size: int,
    c_process: float = 1.0,
    c_outcome: float = 1.0,
) -> torch.Tensor:
    """Process rewards (N, T) and outcomes (N,) -> (N, T), less the mean of the group's others; before whitening."""
    process_rewards = torch.where(response_mask, process_rewards, 0.0)
    means = process_rewards.sum(1) / response_mask.sum(1).clamp(min=1)  # (N,)

    def others(x: torch.Tensor) -> torch.Tensor:
        """(N,) -> (N,): mean over the other G - 1 of the group."""
        groups = x.view(-1, group_size)
        return ((groups.sum(1, keepdim=True) - groups) / (group_size - 1)).view(-1)

    process = torch.where(response_mask, process_rewards - others(means)[:, None], 0.0)
    outcome = (correct - others(correct))[:, None]  # (N, 1)
    advantages = c_process * process.flip(1).cumsum(1).flip(1) + c_outcome * outcome
    return torch.where(response_mask, advantages, 0.0)


def whiten(advantages: torch.Tensor, response_mask: torch.Tensor, total=float) -> torch.Tensor:
    """(N, T) -> (N, T): mean 0 and sample variance 1 over the response tokens of all ranks, 0 outside the mask.

    total: sums a number over the ranks (World.sum); float: these rows are all there are.
    """
    count = total(response_mask.sum())
    mean = total(torch.where(response_mask, advantages, 0.0).sum()) / max(1, count)
    centred = torch.where(response_mask, advantages - mean, 0.0)
    variance = total(centred.square().sum()) / max(1, count - 1)
    return centred if count < 2 else centred * (variance + 1e-8) ** -0.5


def keep_groups(correct: torch.Tensor, min_accuracy: float, max_accuracy: float) -> torch.Tensor:
    """(B, G) bool -> (B,) bool: groups whose share of right responses is within the bounds, bounds included."""
    right, size = correct.sum(dim=1), correct.shape[1]
    return (right >= math.ceil(min_accuracy * size - 1e-9)) & (right <= math.floor(max_accuracy * size + 1e-9))


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


@torch.no_grad()
def clipped_tokens(logprobs, old_logprobs, advantages, response_mask, *, clip_low, clip_high) -> torch.Tensor:
    """How many response tokens have no gradient because their ratio was clipped."""
    ratio = torch.where(response_mask, logprobs - old_logprobs, 0.0).exp()
    clipped = ((advantages > 0) & (ratio > 1 + clip_high)) | ((advantages < 0) & (ratio < 1 - clip_low))
    return (clipped & response_mask).sum()


@torch.no_grad()
def ranked_pairs(scores: torch.Tensor, correct: torch.Tensor, group_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Pairs of a right and a wrong response to one prompt: how many the process reward model ranks right, and all."""
    scores, right = scores.view(-1, group_size), correct.view(-1, group_size) > 0.5  # (B, G)
    pairs = right[:, :, None] & ~right[:, None, :]  # (B, G, G)
    return (pairs & (scores[:, :, None] > scores[:, None, :])).sum(), pairs.sum()


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
    if args.gen_prompts % size or args.gen_prompts < 0 or args.max_gen_batches < 1:
        raise errors.BadInput(f"--gen-prompts must be a multiple of the {size} ranks, --max-gen-batches at least 1")
    if args.gen_prompts and args.gen_prompts * args.max_gen_batches < args.prompts_per_step:
        raise errors.BadInput(
            f"--gen-prompts {args.gen_prompts} x --max-gen-batches {args.max_gen_batches} draws fewer prompts than "
            f"--prompts-per-step {args.prompts_per_step}"
        )
    if not 0 <= args.min_accuracy <= args.max_accuracy <= 1:
        raise errors.BadInput(
            f"--min-accuracy {args.min_accuracy} and --max-accuracy {args.max_accuracy}: 0 <= min <= max <= 1"
        )
    for name in ("steps", "max_prompt_tokens", "max_response_tokens", "rollouts_every"):
        if getattr(args, name) < 1:
            raise errors.BadInput(f"--{name.replace('_', '-')} {getattr(args, name)}: must be at least 1")
    if args.beta <= 0 or not 0 < args.clip < 1:
        raise errors.BadInput("--beta must be > 0 and --clip inside (0, 1)")


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
        args.model, ["policy", "prm"], ["reference"], reward.rewards, dtype=dtype,
        size=size, layout=args.layout, backend=args.rollout_backend, rollout_tp=args.rollout_tp, offload=args.offload,
    )  # fmt: skip
    run.check_configuration(args, Path(__file__).stem)
    if args.saving.dry_run:
        return plan.show(args, size, prompts, held_out, resume)

    world = placement.init(args.seed, args.rollout_tp, args.layout, args.compute)
    policy = model.load(args.model, world, dtype, args.compute, offload=args.offload == "all")
    ref_policy = model.load(args.model, world, dtype, args.compute, offload=args.offload != "none")
    ref_policy.requires_grad_(False)
    prm = model.load(args.model, world, dtype, args.compute, offload=args.offload != "none")
    optimizer = torch.optim.AdamW(
        policy.parameters(), lr=args.learning_rate, betas=(0.9, 0.95), weight_decay=args.weight_decay, fused=True
    )
    prm_optimizer = torch.optim.AdamW(
        prm.parameters(), lr=args.prm_learning_rate, betas=(0.9, 0.95), weight_decay=args.weight_decay, fused=True
    )
    gen_prompts = args.gen_prompts or args.prompts_per_step
    engine = engines.start(
        args.rollout_backend, args.model, stop_token_ids, world, dtype, max_model_len=max_model_len,
        sequences=gen_prompts * args.group_size // roles.engines(size, args.rollout_tp, args.layout),
        layout=args.layout, rollout_tp=args.rollout_tp,
    )  # fmt: skip
    loader = data.PromptLoader(prompts, args.seed)
    trained = {"policy": (policy, optimizer), "prm": (prm, prm_optimizer)}
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

    share = args.prompts_per_step // world.size  # groups this rank trains on

    def sample(step: int, world: placement.World, tracker: tracking.Figures):
        """What this rank needs of a step before it trains: a step ahead, in a thread, with --max-inflight-batches 2."""
        # Dynamic sampling. All ranks make the same number of draws, until each has its share of groups.
        mine, parts, responses, results = [], [], [], []
        for draw in range(args.max_gen_batches):
            prompts = loader.take(gen_prompts)[world.rank :: world.size]
            begun = reward.ahead(prompts, tokenizer)  # grades the responses to a prompt while others are sampled
            with tracker.time("rollout"):
                drawn = engine.generate(
                    [prompt.ids for prompt in prompts],
                    args.group_size,
                    args.temperature,
                    args.max_response_tokens,
                    seed=args.seed * 2**20 + step * args.max_gen_batches + draw,
                    done=begun,
                )
            with tracker.time("reward"):
                texts = tokenizer.batch_decode(drawn.response_ids, skip_special_tokens=True)
                graded = reward.score(prompts, texts, drawn, world, step, tracker.add, begun)
            correct = torch.tensor([result.acc > 0 for result in graded]).view(-1, args.group_size)  # (B, G)
            could = drawn.response_mask.any(1).view_as(correct).all(1).cpu()  # (B,) all of them could be graded
            for i in (could & keep_groups(correct, args.min_accuracy, args.max_accuracy)).nonzero().flatten().tolist():
                rows = range(i * args.group_size, (i + 1) * args.group_size)
                mine.append(prompts[i])
                parts.append((drawn, rows))
                responses += [texts[row] for row in rows]
                results += [graded[row] for row in rows]
            tracker.rollout(torch.tensor([result.score for result in graded]), args.group_size, drawn)
            tracker.add("sampling/prompts_generated", len(prompts), 0)
            if world.min(len(mine)) >= share:
                break
        else:
            raise errors.RunFailed(
                f"step {step}: after --max-gen-batches {args.max_gen_batches} draws a rank has only "
                f"{world.min(len(mine)):.0f} of its {share} prompts answered right at a rate within "
                f"[{args.min_accuracy}, {args.max_accuracy}]: too easy, too hard, or a constant reward",
                code="no-signal",
            )
        engine.sleep()
        tracker.add("sampling/prompts_kept", len(mine), 0)
        mine, batch = mine[:share], rollout.select(parts[:share])  # the surplus is discarded: it would be off-policy
        responses, results = responses[: len(batch)], results[: len(batch)]
        return mine, batch, responses, results

    rollouts = overlap.Prefetcher(sample, loader, world, tracker, args.layout)
    clip = {"clip_low": args.clip, "clip_high": args.clip}
    # The log-probs of a single update are the old ones: the ratio is 1, and no pass of its own is due.
    single_update = args.mini_batches == 1
    for step in saver.steps(tracker.run_dir, args.steps):
        tracker.begin(step, args.profile)
        mine, batch, responses, results = rollouts.get(step, last=saver.due(step))
        correct = torch.tensor([float(result.acc > 0) for result in results], device=world.device)  # (N,)
        everything = torch.arange(len(batch), device=world.device)  # (N,)
        with tracker.time("logprobs"):  # before any update: "old" are the weights that sampled
            micro_batches = batching.pack(batch, everything, args.compute, world)
            old_logprobs = torch.zeros_like(batch.rollout_logprobs)  # (N, T); of a single update: its own, below
            if not single_update:
                old_logprobs = model.frozen_logprobs(policy, batch, micro_batches, args.temperature)
            ref_logprobs = model.frozen_logprobs(ref_policy, batch, micro_batches, 1.0)  # (N, T)

        with tracker.time("prm"):
            scores = model.frozen_logprobs(prm, batch, micro_batches, 1.0) - ref_logprobs  # before it sees this batch
            scores = torch.where(batch.response_mask, scores, 0.0).sum(1)  # (N,)
            tracker.add("prm/pair_accuracy", *ranked_pairs(scores, correct, args.group_size))
            for rows in everything.chunk(args.mini_batches):
                denominator = world.sum(len(rows))  # responses on all ranks
                micro_batches = batching.pack(batch, rows, args.compute, world)
                for micro in micro_batches:
                    model.accumulate(prm, last=micro is micro_batches[-1])
                    prm_logprobs, _ = model.response_logprobs(prm, micro, 1.0)
                    given = (ref_logprobs[micro.rows], micro.response_mask, args.beta, correct[micro.rows])
                    loss = prm_loss(prm_logprobs, *given).sum() / denominator
                    (loss * world.size).backward()  # FSDP averages over ranks; the sum is wanted
                    tracker.add("loss/prm", loss.detach() * world.size, 0)
                grad_norm = torch.nn.utils.clip_grad_norm_(prm.parameters(), args.max_grad_norm)
                tracker.grad_norm(step, grad_norm, "prm/grad_norm", "loss/prm")
                prm_optimizer.step()
                prm_optimizer.zero_grad()
            prm_logprobs = model.frozen_logprobs(prm, batch, micro_batches, 1.0)  # (N, T)
        process_rewards = implicit_rewards(prm_logprobs, ref_logprobs, batch.response_mask, args.beta)  # (N, T)
        process_rewards = normalize(process_rewards, batch.response_mask, world.max)
        given = (process_rewards, correct, batch.response_mask, args.group_size, args.c_process)
        advantages = whiten(compute_advantages(*given), batch.response_mask, world.sum)  # (N, T)

        with tracker.time("update"):
            for group in optimizer.param_groups:
                decay = 1 - (step - 1) / args.steps if args.schedule == "linear" else 1.0
                group["lr"] = args.learning_rate * min(decay, step / max(1, args.warmup_steps))
            for rows in everything.chunk(args.mini_batches):
                denominator = world.sum(batch.response_mask[rows].sum())  # tokens on all ranks
                micro_batches = batching.pack(batch, rows, args.compute, world)
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
                grad_norm = torch.nn.utils.clip_grad_norm_(policy.parameters(), args.max_grad_norm)
                tracker.grad_norm(step, grad_norm)  # stops the run before NaN reaches the weights
                optimizer.step()
                optimizer.zero_grad()

        tracker.mismatch(old_logprobs, batch, engine.weight_version)

        with tracker.time("sync"):
            weight_sync.push(policy, engine)

        if step % args.rollouts_every == 0 or step in (1, args.steps):
            tracker.save_rollouts(step, mine, responses, results, batch, advantages, old_logprobs)
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
