"""MaxRL -- Maximum Likelihood Reinforcement Learning (arXiv:2602.02710).

    A_i   = (R_i - mean(R)) / mean(R)                    over the G responses to one prompt; mean(R) = 0 gives 0
    ratio = exp(logprobs - old_logprobs)
    L     = 1/(S K) sum_i sum_t max(-A_i ratio, -A_i clip(ratio, 1 - clip_low, 1 + clip_high))

S is the number of graded responses in the whole optimizer mini-batch, on all ranks. K is --max-response-tokens, one
constant for the whole run.

With rewards of 0 and 1, mean(R) estimates the probability p of a right response. The gradient of p, which Dr. GRPO
follows, is divided by p and becomes that of log p, the likelihood of being right: prompts that are seldom solved weigh
more. With G responses its expectation is the gradient of the first G - 1 terms of log p = - sum_k (1 - p)^k / k.

Differs from dr_grpo.py: the division by the group's mean, for which rewards must not be negative.

Differs from the paper: PPO's ratio and clip, where the paper is on-policy; a step's first update is the same.
A negative reward ends the run, because mean(R) would no longer be a probability.

Run:    python algos/max_rl.py                                          (embedded arithmetic, 3 minutes on two cores)
        torchrun --nproc-per-node 8 algos/max_rl.py --model Qwen/Qwen2.5-Math-1.5B --dataset math --reward math
            --prompts-per-step 128 --group-size 16 --max-prompt-tokens 1024 --max-response-tokens 3000
Result: embedded arithmetic, greedy, mean of three seeds: 98.2 % from 53.5 %. On GPUs: not yet reproduced.
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
    group_size: int = 8  # G, the number of responses to each prompt.
    max_response_tokens: int = 1024  # A longer response is cut off.
    temperature: float = 1.0  # Used for sampling and for the policy's log-probs.
    # algorithm
    clip_low: float = 0.2  # The ratio is clipped at 1 - clip_low.
    clip_high: float = 0.2  # The ratio is clipped at 1 + clip_high.
    tis_cap: float = 0.0  # Cap of the weight exp(old_logprobs - rollout_logprobs); 2 is common. 0 turns it off.
    kl_coef: float = 0.0  # beta, the weight of the KL term. With 0 the reference policy is never loaded.
    # optimization
    mini_batches: int = 4  # Optimizer steps in each pass over the rollout. A group is never split.
    epochs: int = 1  # Passes over each rollout, in the same order.
    learning_rate: float = 1e-6  # Peak learning rate of the policy.
    schedule: Literal["constant", "linear"] = "constant"  # linear falls, to learning_rate / steps in the last step.
    warmup_steps: int = 10  # Steps in which the learning rate rises linearly.
    weight_decay: float = 0.0  # Weight decay of AdamW.
    max_grad_norm: float = 1.0  # A gradient of a larger norm is scaled down to it.


# The defaults without --model: two-digit addition, learned on a CPU in minutes.
EMBEDDED = job.EMBEDDED | {"steps": 60, "learning_rate": 1.5e-4}


def compute_advantages(rewards: torch.Tensor, group_size: int) -> torch.Tensor:
    """(N,) -> (N,): how far a reward is from its group's mean, in units of that mean. Equal rewards give exactly 0.

    Equality is tested on the rewards: in float32 the mean of sixteen times 0.7 is not 0.7.
    """
    groups = rewards.view(-1, group_size)  # (B, G)
    mean = groups.mean(dim=1, keepdim=True)  # (B, 1)
    constant = groups.amax(dim=1, keepdim=True) == groups.amin(dim=1, keepdim=True)
    return torch.where(constant | (mean <= 0), 0.0, (groups - mean) / mean).view(-1)


def policy_loss(
    logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    ref_logprobs: torch.Tensor | None,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    *,
    clip_low: float,
    clip_high: float,
    kl_coef: float,
    denominator: float,
    weights: torch.Tensor | float = 1.0,
) -> torch.Tensor:
    """Scalar: the sum of the given rows' token losses, divided by `denominator`.

    All are (n, T), advantages are (n,). Log-probs outside the mask, NaN included, change nothing.
    denominator: graded responses of the whole mini-batch on all ranks, times max_response_tokens.
    weights: (n, T), from rollout_weights().
    """
    ratio = torch.where(response_mask, logprobs - old_logprobs, 0.0).clamp(-20, 20).exp()
    advantages = advantages[:, None]  # (n, 1)
    per_token = torch.max(-advantages * ratio, -advantages * ratio.clamp(1 - clip_low, 1 + clip_high))
    per_token = weights * per_token
    if ref_logprobs is not None:
        per_token = per_token + kl_coef * kl_to_reference(logprobs, ref_logprobs, response_mask)
    return (per_token * response_mask).sum() / denominator


def rollout_weights(old_logprobs, rollout_logprobs, response_mask, cap: float) -> torch.Tensor:
    """(n, T): truncated importance sampling, min(exp(old - rollout), cap); 1 outside the mask.

    The engine sampled with a policy that differs from the trainer's by rounding, or with batches in flight by one step.
    The weight multiplies the policy loss and carries no gradient (Ionides, 2008).
    """
    return torch.where(response_mask, old_logprobs - rollout_logprobs, 0.0).clamp(-20, 20).exp().clamp(max=cap)


def kl_to_reference(logprobs: torch.Tensor, ref_logprobs: torch.Tensor, response_mask: torch.Tensor) -> torch.Tensor:
    """(n, T): the estimator k3, never negative, 0 outside the mask."""
    log_r = torch.where(response_mask, ref_logprobs - logprobs, 0.0).clamp(-20, 20)
    return log_r.exp() - log_r - 1


@torch.no_grad()
def clipped_tokens(logprobs, old_logprobs, advantages, response_mask, *, clip_low, clip_high) -> torch.Tensor:
    """How many response tokens have no gradient because their ratio was clipped."""
    ratio = torch.where(response_mask, logprobs - old_logprobs, 0.0).exp()
    advantages = advantages[:, None]  # (n, 1)
    clipped = ((advantages > 0) & (ratio > 1 + clip_high)) | ((advantages < 0) & (ratio < 1 - clip_low))
    return (clipped & response_mask).sum()


def check_args(args: Args) -> None:
    """Refuse flags that the formulas above cannot work with. Raises BadInput."""
    if args.group_size < 2:
        raise errors.BadInput(f"--group-size {args.group_size}: a group of one has no mean to differ from; use >= 2")


def main(args: Args) -> None:
    check_args(args)
    plan = job.prepare(args, models=["policy", *["reference"] * (args.kl_coef > 0)])
    if args.saving.dry_run:
        return
    world = placement.init(args.seed, args.rollout_tp, args.layout, args.compute)
    policy = model.load(args.model, world, plan.dtype, args.compute, offload=args.offload == "all")
    optimizer = torch.optim.AdamW(
        policy.parameters(), lr=args.learning_rate, betas=(0.9, 0.95), weight_decay=args.weight_decay, fused=True
    )
    ref_policy = None
    if args.kl_coef > 0:
        ref_policy = model.load_reference(
            policy, args.model, world, plan.dtype, args.compute, offload=args.offload != "none"
        )
    engine = engines.start(
        args.rollout_backend, args.model, plan.stop_token_ids, world, plan.dtype, max_model_len=plan.max_model_len,
        sequences=plan.sequences, layout=args.layout, rollout_tp=args.rollout_tp,
    )  # fmt: skip
    run = job.start(plan, world, engine, {"policy": (policy, optimizer)})
    tracker = run.tracker

    def sample(step: int, draw: Draw) -> Batch:
        """Sample and grade this rank's prompts. With --max-inflight-batches 2 a thread does it one step ahead."""
        prompts = draw.prompts(args.prompts_per_step)
        grading = draw.grade_early(prompts)
        with draw.time("rollout"):
            rollout = engine.generate(
                [prompt.ids for prompt in prompts], args.group_size, args.temperature, args.max_response_tokens,
                seed=args.seed * 2**20 + step, done=grading, reply=grading.reply,
            )  # fmt: skip
            engine.sleep()
        return draw.grade(prompts, rollout, grading, at_least=0.0)  # mean(R) is to be a probability

    for step, batch in run.steps(sample):
        advantages = compute_advantages(rewards=batch.scores, group_size=args.group_size)  # (N,)
        # Without a KL term a row of advantage 0 has no gradient: it counts in the denominator and skips the forward.
        needed = advantages != 0 if ref_policy is None else batch.response_mask.any(1)  # (N,)
        mini_batches = torch.arange(len(batch), device=world.device).chunk(args.mini_batches)

        with tracker.time("logprobs"):  # "old" means the weights before the updates of this step.
            # The first mini-batch trains from those weights: its own forward gives its old_logprobs, below.
            later = needed.index_fill(0, mini_batches[0], False)  # (N,)
            micro_batches = batching.pack(batch, later.nonzero().flatten(), args.compute, world)
            old_logprobs = model.frozen_logprobs(policy, batch, micro_batches, args.temperature)  # (N, T)
            if ref_policy is not None:
                micro_batches = batching.pack(batch, needed.nonzero().flatten(), args.compute, world)
                ref_logprobs = model.frozen_logprobs(ref_policy, batch, micro_batches, args.temperature)  # (N, T)

        with tracker.time("update"):
            decay = 1 - (step - 1) / args.steps if args.schedule == "linear" else 1.0
            for group in optimizer.param_groups:
                group["lr"] = args.learning_rate * min(decay, step / max(1, args.warmup_steps))
            for update, rows in enumerate(mini_batches * args.epochs):
                # The denominator counts the rows of all ranks, and also those that skip the forward.
                denominator = world.sum(batch.response_mask[rows].any(1).sum()) * args.max_response_tokens  # K
                micro_batches = batching.pack(batch, rows[needed[rows]], args.compute, world)
                for micro in micro_batches:
                    model.accumulate(policy, last=micro is micro_batches[-1])
                    logprobs, entropy = model.response_logprobs(policy, micro, args.temperature, with_entropy=True)
                    old, mask = old_logprobs[micro.rows], micro.response_mask  # (n, T)
                    if update == 0:
                        old = old_logprobs[micro.rows] = torch.where(mask, logprobs.detach(), old)
                    ref = None if ref_policy is None else ref_logprobs[micro.rows]  # (n, T)
                    weights = 1.0
                    if args.tis_cap:
                        weights = rollout_weights(
                            old_logprobs=old, rollout_logprobs=batch.rollout_logprobs[micro.rows], response_mask=mask,
                            cap=args.tis_cap,
                        )  # fmt: skip
                    loss = policy_loss(
                        logprobs=logprobs, old_logprobs=old, advantages=advantages[micro.rows], response_mask=mask,
                        clip_low=args.clip_low, clip_high=args.clip_high, denominator=denominator, weights=weights,
                        ref_logprobs=ref, kl_coef=args.kl_coef,
                    )  # fmt: skip
                    (loss * world.size).backward()  # FSDP averages gradients over ranks; the sum is needed.
                    clipped = clipped_tokens(
                        logprobs=logprobs, old_logprobs=old, advantages=advantages[micro.rows], response_mask=mask,
                        clip_low=args.clip_low, clip_high=args.clip_high,
                    )  # fmt: skip
                    tracker.update(loss, entropy, mask, clipped)
                    if ref is not None:
                        kl = kl_to_reference(logprobs=logprobs.detach(), ref_logprobs=ref, response_mask=mask)  # (n, T)
                        tracker.add("loss/kl", kl.sum(), mask.sum())
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
