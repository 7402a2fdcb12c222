"""DAPO -- Decoupled clip and dynamic sampling (arXiv:2503.14476, eq. 8-13).

    R_i   = +1 or -1 for right or wrong, plus overlong_penalty(|o_i|) <= 0
    A_i   = (R_i - mean(R)) / (std(R) + eps)             over the G responses to one prompt
    ratio = exp(logprobs - old_logprobs)
    L     = sum_it max(-A_i ratio, -A_i clip(ratio, 1 - clip_low, 1 + clip_high)) / sum_it m_it,  <= -A_i clip_dual

sum_it m_it counts the response tokens of the whole optimizer mini-batch, on all ranks. Dynamic sampling: prompts are
drawn until --prompts-per-step of them have both right and wrong responses. The filter asks for raw correctness, not
for the shaped reward: a group of right responses of unequal lengths would teach nothing but length.

Differs from grpo.py: clip_high above clip_low; dynamic sampling; a token mean over the mini-batch; overlong shaping; no
KL term.

Differs from the paper: its formula averages over the tokens of each prompt's group, its code over those of the
mini-batch, as here; dual clip as in its code. Each rank draws until it has its share, surplus groups are discarded.

Run:    python algos/dapo.py                                            (embedded arithmetic, 4 minutes on two cores)
        torchrun --nproc-per-node 8 algos/dapo.py --model Qwen/Qwen2.5-32B --dataset train.jsonl --steps 400
            --prompts-per-step 512 --gen-prompts 1536 --group-size 16 --mini-batches 16 --learning-rate 1e-6
            --schedule constant --warmup-steps 20 --weight-decay 0.1 --max-prompt-tokens 2048
            --max-response-tokens 20480 --overlong-cache 4096
Result: embedded arithmetic, 256 held-out problems, greedy: see baselines/README.md. On GPUs: not yet reproduced.
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
    steps: int = 26  # one step: one rollout and its updates; fewer than elsewhere, each takes several draws
    prompts_per_step: int = 32  # B, all ranks together; here about two draws of gen_prompts
    gen_prompts: int = 64  # prompts per draw of dynamic sampling, all ranks together; 0: as many as prompts_per_step
    max_gen_batches: int = 10  # draws per step before the run stops
    group_size: int = 8  # G, responses per prompt
    max_prompt_tokens: int = 64  # longer prompts: --overlong-prompts
    max_response_tokens: int = 48
    temperature: float = 1.0  # of sampling and of every log-prob
    rollout_backend: Literal["vllm", "hf"] = "vllm"  # hf: slow, for comparison or where vLLM is not installed
    rollout_tp: int = 1  # ranks that share one engine by tensor parallelism
    layout: Annotated[placement.Layout, tyro.conf.OmitArgPrefixes] = placement.Layout()  # colocate | split, ...
    # algorithm
    clip_low: float = 0.2  # epsilon, below
    clip_high: float = 0.28  # epsilon, above
    tis_cap: float = 0.0  # C of truncated importance sampling, 2 is usual; 0: every weight is 1
    clip_dual: float = 10.0  # c: the loss of a token with A < 0 is at most -A c
    overlong_cache: int = 8  # L_c: the last tokens before max_response_tokens cost more and more; 0: only its end
    overlong_factor: float = 1.0  # of the penalty; a right answer is worth +1, a wrong one -1
    # optimization
    mini_batches: int = 4  # optimizer steps per pass over the rollout, of whole groups
    epochs: int = 1  # passes over each rollout, in the same order
    learning_rate: float = 2.5e-4  # for the embedded model, for few steps; 1e-6 is usual for a pretrained one
    schedule: Literal["constant", "linear"] = "linear"  # of the learning rate after warm-up; linear: to 0 at the end
    warmup_steps: int = 2  # steps of linear warm-up
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"  # of computing; master weights are float32
    compute: Annotated[batching.Compute, tyro.conf.OmitArgPrefixes] = batching.Compute()  # token budget, sharing, ...
    offload: Literal["none", "all"] = "none"  # to host memory between uses
    # bookkeeping
    seed: int = 0
    run_dir: str = ""  # empty: runs/NAME-DATE-TIME, with the name of this file
    eval_every: int = 0  # steps between greedy evaluations; 0: before the first and after the last step only
    saving: Annotated[checkpoint.Saving, tyro.conf.OmitArgPrefixes] = checkpoint.Saving()  # resume, save_every, ...
    rollouts_every: int = 10  # steps between files in rollouts/
    max_logprob_gap: float = 0.05  # mean |old - rollout| per token that stops the run
    profile: tuple[int, ...] = ()  # steps of which every rank writes a torch profiler trace
    track: Literal["none", "wandb", "tensorboard"] = "none"  # beside metrics.jsonl


def compute_advantages(rewards: torch.Tensor, group_size: int, eps: float = 1e-6) -> torch.Tensor:
    """(N,) -> (N,): z-score within each group (eq. 4's outcome form). A group of equal rewards gives exactly 0.

    Equality is tested on the rewards: in float32 the std of sixteen times 0.7 is 1e-8, not 0, and |A| 0.06.
    """
    groups = rewards.view(-1, group_size)  # (B, G)
    centred = groups - groups.mean(dim=1, keepdim=True)
    constant = groups.amax(dim=1, keepdim=True) == groups.amin(dim=1, keepdim=True)
    advantages = centred / (groups.std(dim=1, keepdim=True) + eps)  # sample std (n - 1), as verl and TRL
    return torch.where(constant, 0.0, advantages).view(-1)


def overlong_penalty(lengths: torch.Tensor, max_len: int, cache_len: int, factor: float = 1.0) -> torch.Tensor:
    """(N,) -> (N,): 0 up to max_len - cache_len tokens, then linearly down to -factor at max_len (eq. 13)."""
    over = lengths - (max_len - cache_len)
    share = over / cache_len if cache_len else (lengths >= max_len).float()
    return -factor * share.clamp(0, 1)


def keep_groups(correct: torch.Tensor) -> torch.Tensor:
    """(B, G) bool -> (B,) bool: groups with both right and wrong responses (eq. 11)."""
    right = correct.sum(dim=1)
    return (right > 0) & (right < correct.shape[1])


def policy_loss(
    logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    *,
    clip_low: float,
    clip_high: float,
    clip_dual: float,
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
    per_token = torch.where(advantages < 0, torch.min(per_token, -advantages * clip_dual), per_token)
    per_token = weights * per_token
    return (per_token * response_mask).sum() / denominator


def rollout_weights(old_logprobs, rollout_logprobs, response_mask, cap: float) -> torch.Tensor:
    """(n, T): truncated importance sampling, min(exp(old - rollout), cap); 1 outside the mask.

    Responses were sampled by the engine's policy: another rounding of the trainer's, or with batches in flight an
    older one. Weighs the policy loss alone, without a gradient (Ionides, 2008).
    """
    return torch.where(response_mask, old_logprobs - rollout_logprobs, 0.0).clamp(-20, 20).exp().clamp(max=cap)


@torch.no_grad()
def clipped_tokens(
    logprobs, old_logprobs, advantages, response_mask, *, clip_low, clip_high, clip_dual
) -> torch.Tensor:
    """How many response tokens have no gradient because their ratio was clipped."""
    ratio = torch.where(response_mask, logprobs - old_logprobs, 0.0).exp()
    advantages = advantages[:, None]  # (n, 1)
    clipped = ((advantages > 0) & (ratio > 1 + clip_high)) | ((advantages < 0) & (ratio < 1 - clip_low))
    clipped = clipped | ((advantages < 0) & (ratio > clip_dual))
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
    if args.gen_prompts % size or args.gen_prompts < 0 or args.max_gen_batches < 1:
        raise errors.BadInput(f"--gen-prompts must be a multiple of the {size} ranks, --max-gen-batches at least 1")
    if args.gen_prompts and args.gen_prompts * args.max_gen_batches < args.prompts_per_step:
        raise errors.BadInput(
            f"--gen-prompts {args.gen_prompts} x --max-gen-batches {args.max_gen_batches} draws fewer prompts than "
            f"--prompts-per-step {args.prompts_per_step}"
        )
    if not 0 <= args.overlong_cache <= args.max_response_tokens or args.overlong_factor < 0:
        raise errors.BadInput("--overlong-cache must be in [0, --max-response-tokens], --overlong-factor >= 0")
    for name in ("steps", "epochs", "max_prompt_tokens", "max_response_tokens", "rollouts_every"):
        if getattr(args, name) < 1:
            raise errors.BadInput(f"--{name.replace('_', '-')} {getattr(args, name)}: must be at least 1")
    if not 0 < args.clip_low < 1 or args.clip_high <= 0 or args.clip_dual <= 1 + args.clip_high:
        raise errors.BadInput("--clip-low must be inside (0, 1), --clip-high > 0 and --clip-dual > 1 + --clip-high")


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
        args.model, ["policy"], [], reward.rewards, dtype=dtype,
        size=size, layout=args.layout, backend=args.rollout_backend, rollout_tp=args.rollout_tp, offload=args.offload,
    )  # fmt: skip
    run.check_configuration(args, Path(__file__).stem)
    if args.saving.dry_run:
        return plan.show(args, size, prompts, held_out, resume)

    world = placement.init(args.seed, args.rollout_tp, args.layout, args.compute)
    policy = model.load(args.model, world, dtype, args.compute, offload=args.offload == "all")
    optimizer = torch.optim.AdamW(
        policy.parameters(), lr=args.learning_rate, betas=(0.9, 0.95), weight_decay=args.weight_decay, fused=True
    )
    gen_prompts = args.gen_prompts or args.prompts_per_step
    engine = engines.start(
        args.rollout_backend, args.model, stop_token_ids, world, dtype, max_model_len=max_model_len,
        sequences=gen_prompts * args.group_size // roles.engines(size, args.rollout_tp, args.layout),
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

    share = args.prompts_per_step // world.size  # groups this rank trains on

    def sample(step: int, world: placement.World, tracker: tracking.Figures):
        """What this rank needs of a step before it trains: a step ahead, in a thread, with --max-inflight-batches 2."""
        # Dynamic sampling. All ranks make the same number of draws, until each has its share of mixed groups.
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
            for i in keep_groups(correct).nonzero().flatten().tolist():
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
                f"{world.min(len(mine)):.0f} of its {share} prompts with both right and wrong responses: too easy, too "
                "hard, or a constant reward",
                code="no-signal",
            )
        engine.sleep()
        tracker.add("sampling/prompts_kept", len(mine), 0)
        mine, batch = mine[:share], rollout.select(parts[:share])  # the surplus is discarded: it would be off-policy
        responses, results = responses[: len(batch)], results[: len(batch)]
        return mine, batch, responses, results

    rollouts = overlap.Prefetcher(sample, loader, world, tracker, args.layout)
    clip = {"clip_low": args.clip_low, "clip_high": args.clip_high, "clip_dual": args.clip_dual}
    # The log-probs of a single update are the old ones: the ratio is 1, and no pass of its own is due.
    single_update = args.mini_batches * args.epochs == 1
    for step in saver.steps(tracker.run_dir, args.steps):
        tracker.begin(step, args.profile)
        mine, batch, responses, results = rollouts.get(step, last=saver.due(step))
        scores = torch.tensor([result.score for result in results], device=world.device)  # (N,)
        penalty = overlong_penalty(
            batch.response_mask.sum(1), args.max_response_tokens, args.overlong_cache, args.overlong_factor
        )  # (N,)
        advantages = compute_advantages(2 * scores - 1 + penalty, args.group_size)  # (N,)
        # A row of advantage 0 has no gradient: it counts in the denominator and skips the forward.
        needed = advantages != 0  # (N,)

        with tracker.time("logprobs"):  # before any update: "old" are the weights that sampled
            micro_batches = batching.pack(batch, needed.nonzero().flatten(), args.compute, world)
            old_logprobs = torch.zeros_like(batch.rollout_logprobs)  # (N, T); of a single update: its own, below
            if not single_update:
                old_logprobs = model.frozen_logprobs(policy, batch, micro_batches, args.temperature)

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
