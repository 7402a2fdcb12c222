"""DAPO -- Decoupled clip and dynamic sampling (arXiv:2503.14476, eq. 8-13).

    R_i   = 2 score_i - 1 + overlong_penalty(|o_i|)      +1 or -1 for a score of 1 or 0; the penalty is <= 0
    A_i   = (R_i - mean(R)) / (std(R) + eps)             over the G responses to one prompt
    ratio = exp(logprobs - old_logprobs)
    L     = sum_it max(-A_i ratio, -A_i clip(ratio, 1 - clip_low, 1 + clip_high)) / sum_it m_it

where a token with A_i < 0 adds at most -A_i clip_dual to the sum. sum_it m_it is the number of response tokens in the
whole optimizer mini-batch, on all ranks. Dynamic sampling: prompts are drawn until --prompts-per-step of them have both
right and wrong responses. The filter asks for raw correctness, not for the shaped reward: a group of right responses of
unequal lengths would teach nothing but length.

Differs from grpo.py: clip_high above clip_low; dynamic sampling; a token mean over the mini-batch; overlong shaping; no
KL term.

Differs from the paper: the mean is over the tokens of the mini-batch, as in its code, where its formula has one mean
for each prompt's group; dual clip as in its code. Each rank draws until it has its share; surplus groups are discarded.

Run:    python algos/dapo.py                                            (embedded arithmetic, 4 minutes on two cores)
        torchrun --nnodes 4 --nproc-per-node 8 algos/dapo.py --model Qwen/Qwen2.5-32B --dataset train.jsonl --steps 400
            --prompts-per-step 512 --gen-prompts 1536 --group-size 16 --mini-batches 16 --warmup-steps 20
            --weight-decay 0.1 --max-prompt-tokens 2048 --max-response-tokens 20480 --overlong-cache 4096
            --activation-checkpointing --rollout-tp 4
Result: embedded arithmetic, greedy, mean of three seeds: 86.2 % from 53.5 %. On GPUs: not yet reproduced.
"""

import dataclasses
from typing import Literal

import torch

from common import errors, placement, weight_sync
from common.rollout import engines
from common.run import job
from common.run.sampling import Batch, Draw
from common.trainer import batching, model


@dataclasses.dataclass
class Args(job.Flags):
    # sampling
    steps: int = 200  # One step is one rollout and its updates.
    prompts_per_step: int = 64  # Prompts of one step, on all ranks together.
    gen_prompts: int = 128  # Prompts in one draw of dynamic sampling, on all ranks. 0: prompts_per_step.
    max_gen_batches: int = 10  # Largest number of draws in one step; then the run stops.
    group_size: int = 8  # G, the number of responses to each prompt.
    max_response_tokens: int = 1024  # A longer response is cut off.
    temperature: float = 1.0  # Used for sampling and for the policy's log-probs.
    # algorithm
    clip_low: float = 0.2  # The ratio is clipped at 1 - clip_low.
    clip_high: float = 0.28  # The ratio is clipped at 1 + clip_high.
    tis_cap: float = 0.0  # Cap of the weight exp(old_logprobs - rollout_logprobs); 2 is common. 0 turns it off.
    clip_dual: float = 10.0  # c: the loss of a token with A < 0 is at most -A c.
    overlong_cache: int = 128  # L_c: the last tokens before the limit cost more and more. 0: only the limit costs.
    # optimization
    mini_batches: int = 4  # Optimizer steps in each pass over the rollout. A group is never split.
    epochs: int = 1  # Passes over each rollout, in the same order.
    learning_rate: float = 1e-6  # Peak learning rate of the policy.
    schedule: Literal["constant", "linear"] = "constant"  # linear falls, to learning_rate / steps in the last step.
    warmup_steps: int = 10  # Steps in which the learning rate rises linearly.
    weight_decay: float = 0.0  # Weight decay of AdamW.
    max_grad_norm: float = 1.0  # A gradient of a larger norm is scaled down to it.


# The defaults without --model: two-digit addition, learned on a CPU in minutes.
# A step takes several draws, so there are fewer steps than in the other files.
EMBEDDED = job.EMBEDDED | {"steps": 26, "prompts_per_step": 32, "gen_prompts": 64, "learning_rate": 2.5e-4}
EMBEDDED |= {"overlong_cache": 8}


def compute_advantages(rewards: torch.Tensor, group_size: int, eps: float = 1e-6) -> torch.Tensor:
    """(N,) -> (N,): z-score within each group (outcome supervision). A group of equal rewards gives exactly 0.

    Equality is tested on the rewards: in float32 sixteen rewards of 0.7 have a std of 6e-8, and |A| would be 0.06.
    """
    groups = rewards.view(-1, group_size)  # (B, G)
    centred = groups - groups.mean(dim=1, keepdim=True)
    constant = groups.amax(dim=1, keepdim=True) == groups.amin(dim=1, keepdim=True)
    advantages = centred / (groups.std(dim=1, keepdim=True) + eps)  # sample std (n - 1), the same as in verl and TRL
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

    All are (n, T), advantages are (n,). Log-probs outside the mask, NaN included, change nothing.
    denominator: response tokens of the whole mini-batch on all ranks.
    weights: (n, T), from rollout_weights().
    """
    ratio = torch.where(response_mask, logprobs - old_logprobs, 0.0).clamp(-20, 20).exp()
    advantages = advantages[:, None]  # (n, 1)
    per_token = torch.max(-advantages * ratio, -advantages * ratio.clamp(1 - clip_low, 1 + clip_high))
    per_token = torch.where(advantages < 0, torch.min(per_token, -advantages * clip_dual), per_token)
    per_token = weights * per_token
    return (per_token * response_mask).sum() / denominator


def rollout_weights(old_logprobs, rollout_logprobs, response_mask, cap: float) -> torch.Tensor:
    """(n, T): truncated importance sampling, min(exp(old - rollout), cap); 1 outside the mask.

    The engine sampled with a policy that differs from the trainer's by rounding, or with batches in flight by one step.
    The weight multiplies the policy loss and carries no gradient (Ionides, 2008).
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


def check_args(args: Args) -> None:
    """Refuse flags that the formulas above cannot work with. Raises BadInput."""
    if args.group_size < 2:
        raise errors.BadInput(f"--group-size {args.group_size}: a group of one has no mean to differ from; use >= 2")
    if args.clip_dual <= 1 + args.clip_high:
        raise errors.BadInput(f"--clip-dual {args.clip_dual} must be above 1 + --clip-high {args.clip_high}")
    if args.overlong_cache > args.max_response_tokens:
        raise errors.BadInput(
            f"--overlong-cache {args.overlong_cache} must be in [0, --max-response-tokens {args.max_response_tokens}]"
        )


def main(args: Args) -> None:
    check_args(args)
    plan = job.prepare(args, models=["policy"])
    if max(plan.reward.weights.get(name, 0.0) for name in ("dapo", "dapo-lenient")) > 0.5:
        raise errors.BadInput("--reward dapo: its scores of -1 and 1 would become R = -3 and 1; use dapo=0.5")
    if args.saving.dry_run:
        return
    world = placement.init(args.seed, args.rollout_tp, args.layout, args.compute)
    policy = model.load(args.model, world, plan.dtype, args.compute, offload=args.offload == "all")
    optimizer = torch.optim.AdamW(
        policy.parameters(), lr=args.learning_rate, betas=(0.9, 0.95), weight_decay=args.weight_decay, fused=True
    )
    engine = engines.start(
        args.rollout_backend, args.model, plan.stop_token_ids, world, plan.dtype, max_model_len=plan.max_model_len,
        sequences=plan.sequences, layout=args.layout, rollout_tp=args.rollout_tp,
    )  # fmt: skip
    run = job.start(plan, world, engine, {"policy": (policy, optimizer)})
    tracker = run.tracker

    def sample(step: int, draw: Draw) -> Batch:
        """Sample and grade this rank's prompts. With --max-inflight-batches 2 a thread does it one step ahead."""
        generate = lambda prompts, place, grading: engine.generate(
            [prompt.ids for prompt in prompts], args.group_size, args.temperature, args.max_response_tokens,
            seed=args.seed * 2**20 + step * args.max_gen_batches + place, done=grading, reply=grading.reply,
        )  # fmt: skip
        # Dynamic sampling: draw prompts until enough of them pass the filter.
        batch = draw.until_full(
            generate, keep_groups, wanted=args.prompts_per_step, most=args.max_gen_batches,
            prompts_per_draw=args.gen_prompts or args.prompts_per_step, kept="with both right and wrong responses",
        )  # fmt: skip
        engine.sleep()
        return batch

    for step, batch in run.steps(sample):
        lengths = batch.lengths  # (N,)
        penalty = overlong_penalty(lengths=lengths, max_len=args.max_response_tokens, cache_len=args.overlong_cache)
        advantages = compute_advantages(rewards=2 * batch.scores - 1 + penalty, group_size=args.group_size)  # (N,)
        # A row of advantage 0 has no gradient: it counts in the denominator and skips the forward.
        needed = advantages != 0  # (N,)
        mini_batches = torch.arange(len(batch), device=world.device).chunk(args.mini_batches)

        with tracker.time("logprobs"):  # "old" means the weights before the updates of this step.
            # The first mini-batch trains from those weights: its own forward gives its old_logprobs, below.
            later = needed.index_fill(0, mini_batches[0], False)  # (N,)
            micro_batches = batching.pack(batch, later.nonzero().flatten(), args.compute, world)
            old_logprobs = model.frozen_logprobs(policy, batch, micro_batches, args.temperature)  # (N, T)

        with tracker.time("update"):
            decay = 1 - (step - 1) / args.steps if args.schedule == "linear" else 1.0
            for group in optimizer.param_groups:
                group["lr"] = args.learning_rate * min(decay, step / max(1, args.warmup_steps))
            for update, rows in enumerate(mini_batches * args.epochs):
                # The denominator counts the rows of all ranks, and also those that skip the forward.
                denominator = world.sum(batch.response_mask[rows].sum())  # response tokens
                micro_batches = batching.pack(batch, rows[needed[rows]], args.compute, world)
                for micro in micro_batches:
                    model.accumulate(policy, last=micro is micro_batches[-1])
                    logprobs, entropy = model.response_logprobs(policy, micro, args.temperature, with_entropy=True)
                    old, mask = old_logprobs[micro.rows], micro.response_mask  # (n, T)
                    if update == 0:
                        old = old_logprobs[micro.rows] = torch.where(mask, logprobs.detach(), old)
                    weights = 1.0
                    if args.tis_cap:
                        weights = rollout_weights(
                            old_logprobs=old, rollout_logprobs=batch.rollout_logprobs[micro.rows], response_mask=mask,
                            cap=args.tis_cap,
                        )  # fmt: skip
                    loss = policy_loss(
                        logprobs=logprobs, old_logprobs=old, advantages=advantages[micro.rows], response_mask=mask,
                        clip_low=args.clip_low, clip_high=args.clip_high, denominator=denominator, weights=weights,
                        clip_dual=args.clip_dual,
                    )  # fmt: skip
                    (loss * world.size).backward()  # FSDP averages gradients over ranks; the sum is needed.
                    clipped = clipped_tokens(
                        logprobs=logprobs, old_logprobs=old, advantages=advantages[micro.rows], response_mask=mask,
                        clip_low=args.clip_low, clip_high=args.clip_high, clip_dual=args.clip_dual,
                    )  # fmt: skip
                    tracker.update(loss, entropy, mask, clipped)
                if micro_batches:  # pack() gives all ranks equally many. With none, no rank has a gradient.
                    grad_norm = torch.nn.utils.clip_grad_norm_(policy.parameters(), args.max_grad_norm)
                    tracker.grad_norm(step, grad_norm)  # Stops the run before NaN reaches the weights.
                    optimizer.step()
                    optimizer.zero_grad()

        with tracker.time("sync"):
            weight_sync.push(policy, engine)
        run.end_step(step, batch, advantages=advantages, old_logprobs=old_logprobs, rows=needed)
    run.close()


if __name__ == "__main__":
    job.launch(main, Args, EMBEDDED, __doc__)
