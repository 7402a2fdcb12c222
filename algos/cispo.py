"""CISPO -- Clipped IS-weight Policy Optimization (MiniMax-M1, arXiv:2506.13585, section 3).

    A_i   = (R_i - mean(R)) / (std(R) + eps)             over the G responses to one prompt; equal rewards give 0
    w     = sg(clip(exp(logprobs - old_logprobs), 1 - clip_low, 1 + clip_high))      sg stops the gradient
    L     = - 1/M sum_i sum_t w A_i logprobs

M is the number of response tokens in the whole optimizer mini-batch, on all ranks, those of advantage 0 included.

GRPO's clip takes the gradient away from tokens whose ratio has left the interval, and with it from rare tokens, such as
"however" and "wait", which move most. Here the clip bounds the weight of a token, and every token keeps its gradient.

Differs from grpo.py: the weight in the place of the clipped ratio; a token mean. Nothing else.

Differs from the paper: it bounds weights from above only and does not say where. Here they are at most 5, and clip_low,
which is 1, bounds nothing. M counts the tokens of the mini-batch, and its formula those of each prompt's group.
Its dynamic sampling and length penalty are in dapo.py alone. The KL term (--kl-coef, k3 in the loss) exists and is off.

Run:    python algos/cispo.py                                           (embedded arithmetic, 2 minutes on two cores)
        torchrun --nproc-per-node 8 algos/cispo.py --model Qwen/Qwen2.5-0.5B-Instruct
Result: embedded arithmetic, greedy, mean of three seeds: 91.9 % from 53.5 %. On GPUs: not yet reproduced.
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
    clip_low: float = 1.0  # A token's weight is at least 1 - clip_low.
    clip_high: float = 4.0  # A token's weight is at most 1 + clip_high.
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
EMBEDDED = job.EMBEDDED | {"steps": 52, "learning_rate": 2e-4}


def compute_advantages(rewards: torch.Tensor, group_size: int, eps: float = 1e-6) -> torch.Tensor:
    """(N,) -> (N,): z-score within each group (outcome supervision). A group of equal rewards gives exactly 0.

    Equality is tested on the rewards: in float32 sixteen rewards of 0.7 have a std of 6e-8, and |A| would be 0.06.
    """
    groups = rewards.view(-1, group_size)  # (B, G)
    centred = groups - groups.mean(dim=1, keepdim=True)
    constant = groups.amax(dim=1, keepdim=True) == groups.amin(dim=1, keepdim=True)
    advantages = centred / (groups.std(dim=1, keepdim=True) + eps)  # sample std (n - 1), the same as in verl and TRL
    return torch.where(constant, 0.0, advantages).view(-1)


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
    """Scalar: the sum of the given rows' token losses, divided by `denominator`. Its gradient is what counts.

    All are (n, T), advantages are (n,). Log-probs outside the mask, NaN included, change nothing.
    denominator: response tokens of the whole mini-batch on all ranks.
    weights: (n, T), from rollout_weights().
    """
    ratio = torch.where(response_mask, logprobs - old_logprobs, 0.0).clamp(-20, 20).exp()
    advantages = advantages[:, None]  # (n, 1)
    weight = ratio.clamp(1 - clip_low, 1 + clip_high).detach()  # (n, T)
    per_token = -weight * advantages * torch.where(response_mask, logprobs, 0.0)
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
def clipped_tokens(logprobs, old_logprobs, response_mask, *, clip_low, clip_high) -> torch.Tensor:
    """How many response tokens have a weight that was clipped. They keep their gradient."""
    ratio = torch.where(response_mask, logprobs - old_logprobs, 0.0).exp()
    return (((ratio > 1 + clip_high) | (ratio < 1 - clip_low)) & response_mask).sum()


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
        return draw.grade(prompts, rollout, grading)

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
                denominator = world.sum(batch.response_mask[rows].sum())  # response tokens
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
                        logprobs=logprobs, old_logprobs=old, response_mask=mask, clip_low=args.clip_low,
                        clip_high=args.clip_high,
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
