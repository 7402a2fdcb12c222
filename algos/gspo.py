"""GSPO -- Group Sequence Policy Optimization (arXiv:2507.18071, section 4).

    A_i   = (R_i - mean(R)) / (std(R) + eps)             over the G responses to one prompt; equal rewards give 0
    s_i   = exp(1/|o_i| sum_t (logprobs - old_logprobs))  one ratio for a response, the geometric mean of its tokens'
    L     = 1/S sum_i max(-A_i s_i, -A_i clip(s_i, 1 - clip_low, 1 + clip_high))

S is the number of graded responses in the whole optimizer mini-batch, on all ranks, those with advantage 0 included.

--tis-cap and --kl-coef work as in grpo.py; L leaves out their weights and their KL term. grpo.py also explains the
log-probs and the letters N, B, G, T and n.

A reward is for a whole response, and so is the importance ratio: a response is clipped as a whole or not at all. A
geometric mean over many tokens stays near 1, hence the bounds of 3e-4 and 4e-4. With GRPO's 0.2 hardly anything would
be clipped.

The code has the paper's GSPO-token form: the ratio of token t is sg(s_i) exp(logprobs - sg(logprobs)), where sg stops
the gradient. The mean of these over a response has the value and the gradient of s_i. Weights of single tokens
(--tis-cap) fit into it, but then it is no longer GSPO; "Sequence weights" in docs/variants.md has one for a response.

Differs from grpo.py: the ratio and its bounds. Nothing else.

Differs from the paper: its formulas omit the KL term "for brevity", without a coefficient. Here --kl-coef is 0 by
default, and the term is k3.

Run:    python algos/gspo.py                                            (embedded arithmetic, 2 minutes on two cores)
        torchrun --nproc-per-node 8 algos/gspo.py --model Qwen/Qwen2.5-0.5B-Instruct
Result: embedded arithmetic, greedy, mean of three seeds: 90.2 % from 53.5 %. On GPUs: not yet run.
"""

import dataclasses
from typing import Literal

import torch
from pydantic import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from common import errors, placement, weight_sync
from common.preflight import flags, ranges
from common.preflight.prepare import prepare
from common.rollout import engines
from common.run import guards, job
from common.run.sampling import Batch, PromptSampler
from common.trainer import batching, model


@dataclasses.dataclass
class Args(flags.Flags):  # Flags has those that all files share: --model, --dataset, --reward, --seed ...
    # sampling
    steps: PositiveInt = 200  # One step is one rollout and its updates.
    prompts_per_step: PositiveInt = 64  # Prompts of one step, on all ranks together.
    group_size: PositiveInt = 8  # G, the number of responses to each prompt.
    max_response_tokens: PositiveInt = 1024  # A longer response is cut off.
    temperature: ranges.Temperature = 1.0  # Used for sampling and for all log-probs.
    # algorithm
    clip_low: ranges.PositiveFraction = 3e-4  # The ratio is clipped at 1 - clip_low.
    clip_high: PositiveFloat = 4e-4  # The ratio is clipped at 1 + clip_high.
    tis_cap: ranges.WeightCap = 0.0  # Cap of the weight exp(old_logprobs - rollout_logprobs), often 2; 0 turns it off.
    kl_coef: NonNegativeFloat = 0.0  # Weight of the KL term. With 0 the reference policy is never loaded.
    # optimization
    mini_batches: PositiveInt = 4  # Optimizer steps per pass. --prompts-per-step must be a multiple of this x ranks.
    epochs: PositiveInt = 1  # Passes over each rollout. Each visits the mini-batches in the same order.
    learning_rate: ranges.LearningRate = 1e-6  # Peak learning rate of the policy.
    schedule: Literal["constant", "linear"] = "constant"  # linear decays to learning_rate / steps in the last step.
    warmup_steps: NonNegativeInt = 10  # Steps in which the rate rises linearly. With a decay, the lower of both counts.
    weight_decay: NonNegativeFloat = 0.0  # Weight decay of AdamW.
    max_grad_norm: PositiveFloat = 1.0  # Gradients are clipped to this norm.


# The defaults without --model: two-digit addition, learned on a CPU in minutes. flags.EMBEDDED has five more, such as
# --max-response-tokens 48 and --schedule linear.
EMBEDDED = flags.EMBEDDED | {"steps": 52, "learning_rate": 2e-4}


def compute_advantages(rewards: torch.Tensor, group_size: int, eps: float = 1e-6) -> torch.Tensor:
    """(N,) -> (N,): z-score within each group. A group of equal rewards gives exactly 0.

    `constant` compares the rewards themselves, because rounding leaves the centred ones off 0: in float32 the mean of
    sixteen rewards of 0.7 is off by 6e-8, which would make |A| 0.06.
    """
    groups = rewards.view(-1, group_size)  # (B, G)
    centred = groups - groups.mean(dim=1, keepdim=True)
    constant = groups.amax(dim=1, keepdim=True) == groups.amin(dim=1, keepdim=True)
    advantages = centred / (groups.std(dim=1, keepdim=True) + eps)  # sample std (G - 1), the same as in verl and TRL
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
    token_weights: torch.Tensor | float = 1.0,
) -> torch.Tensor:
    """Scalar: the sum over the given rows of their mean token loss, divided by `denominator`.

    Tensors are (n, T), except advantages (n,). Log-probs outside the mask, NaN included, change nothing.
    denominator: graded responses of the whole mini-batch on all ranks.
    token_weights: (n, T), from rollout_weights(), or 1.0. Without ref_logprobs there is no KL term.
    """
    # 0 in value, with the gradient of each token's log-prob.
    change = torch.where(response_mask.bool(), logprobs - logprobs.detach(), 0.0)  # (n, T)
    ratio = sequence_ratio(logprobs.detach(), old_logprobs, response_mask) * change.exp()
    advantages = advantages[:, None]  # (n, 1); leave this line out if each token has its own advantage
    per_token = torch.max(-advantages * ratio, -advantages * ratio.clamp(1 - clip_low, 1 + clip_high))
    per_token = token_weights * per_token
    if ref_logprobs is not None:
        per_token = per_token + kl_coef * kl_to_reference(logprobs, ref_logprobs, response_mask)
    lengths = response_mask.sum(1)
    return ((per_token * response_mask).sum(1) / lengths.clamp(min=1)).sum() / denominator


def sequence_ratio(logprobs, old_logprobs, response_mask) -> torch.Tensor:
    """(n, 1): exp of the mean of a response's log-ratios."""
    log_ratio = torch.where(response_mask.bool(), logprobs - old_logprobs, 0.0).sum(1, keepdim=True)  # (n, 1)
    lengths = response_mask.sum(1, keepdim=True).clamp(min=1)  # (n, 1)
    return (log_ratio / lengths).clamp(-20, 20).exp()


def rollout_weights(old_logprobs, rollout_logprobs, response_mask, cap: float) -> torch.Tensor:
    """(n, T): truncated importance sampling (Ionides, 2008), min(exp(old - rollout), cap).

    The engine's policy differs from the trainer's by rounding error. With --max-inflight-batches > 1 it is also some
    steps older. The weight multiplies the policy loss and carries no gradient.
    """
    log_weights = torch.where(response_mask.bool(), old_logprobs - rollout_logprobs, 0.0)
    return log_weights.clamp(-20, 20).exp().clamp(max=cap)


def kl_to_reference(logprobs: torch.Tensor, ref_logprobs: torch.Tensor, response_mask: torch.Tensor) -> torch.Tensor:
    """(n, T): Schulman's k3 estimator of KL(policy || reference), never negative, 0 outside the mask."""
    log_r = torch.where(response_mask.bool(), ref_logprobs - logprobs, 0.0).clamp(max=20)  # or exp() may be inf
    return log_r.exp() - log_r - 1


@torch.no_grad()
def clipped_tokens(logprobs, old_logprobs, advantages, response_mask, *, clip_low, clip_high) -> torch.Tensor:
    """How many response tokens have no policy-loss gradient because their response's ratio was clipped."""
    response_mask = response_mask.bool()
    ratio = sequence_ratio(logprobs, old_logprobs, response_mask)
    advantages = advantages[:, None]  # (n, 1); leave this line out if each token has its own advantage
    too_high = (advantages > 0) & (ratio > 1 + clip_high)
    too_low = (advantages < 0) & (ratio < 1 - clip_low)
    return ((too_high | too_low) & response_mask).sum()


def check_args(args: Args) -> None:
    """Refuse flags that the formulas above cannot work with. Raises BadInput."""
    if args.group_size < 2:
        raise errors.BadInput(f"--group-size {args.group_size}: a group of one always equals its own mean; use >= 2")
    if args.layout.max_inflight_batches > 1 and not args.tis_cap:
        raise errors.BadInput("--max-inflight-batches > 1: its tokens are from older weights; add --tis-cap 2")


def main(args: Args) -> None:
    check_args(args)
    models = ["policy"] if args.kl_coef == 0 else ["policy", "reference"]
    # Checks the flags, the data and the model files before any weights are loaded.
    settings = prepare(args, models)
    if job.nothing_to_do(settings):  # a dry run, or a run whose last step is done
        return

    # `world` has this rank's number and sums numbers over all ranks. torchrun starts the ranks; plain python has one.
    world = placement.init(args.seed, args.rollout_tp, settings.layout, sharding=settings.compute)
    policy = model.load(settings.model, world, settings.dtype, settings.compute, offload=args.offload == "all")
    optimizer = torch.optim.AdamW(
        policy.parameters(),
        lr=args.learning_rate,
        betas=(0.9, 0.95),
        weight_decay=args.weight_decay,
        fused=True,
    )
    ref_policy = None
    if args.kl_coef > 0:
        ref_policy = model.load_reference(
            policy,
            settings.model,
            world,
            settings.dtype,
            settings.compute,
            offload=args.offload != "none",  # both "others" and "all" offload the reference
        )
    engine = engines.start(
        args.rollout_backend,
        settings.model,
        settings.stop_token_ids,
        world,
        settings.dtype,
        max_model_len=settings.max_model_len,
        sequences=settings.sequences,
        layout=settings.layout,
        rollout_tp=args.rollout_tp,
    )
    # `run` resumes, evaluates, saves and reports. `tracker` records metrics; run.end_step reduces them over the ranks.
    run = job.start(settings, world, engine, {"policy": (policy, optimizer)})
    tracker = run.tracker

    def sample(step: int, sampler: PromptSampler) -> Batch:
        """Sample and grade this rank's prompts. With --max-inflight-batches > 1, threads call it for later steps."""
        prompts = sampler.prompts(args.prompts_per_step)  # this rank's share of them
        grading = sampler.grade_early(prompts)  # a callback: slow graders start while other responses are sampled
        with sampler.time("rollout"):
            rollout = engine.generate(
                [prompt.ids for prompt in prompts],
                args.group_size,
                args.temperature,
                args.max_response_tokens,
                seed=args.seed * 2**20 + step,  # one for each step; the engine derives its own seeds from it
                done=grading,
                reply=grading.reply,  # the next turn of an environment (--environment)
            )
            # An engine that shares the trainer's device frees memory until the push of new weights. An engine
            # on devices of its own, as --max-inflight-batches > 1 needs, does nothing here.
            engine.sleep()
        return sampler.grade(prompts, rollout, grading)

    for step, batch in run.steps(sample):
        advantages = compute_advantages(rewards=batch.scores, group_size=args.group_size)  # (N,)

        # Only rows with a gradient need a forward. Without a KL term, a row with advantage 0 has no gradient. That
        # includes groups that could not be graded, because their scores are 0.
        # If your advantage compares groups with each other, compare with graded rows alone, those of all ranks. On this
        # rank they are batch.response_mask.any(1), and world.sum() adds numbers of all ranks. The advantages still have
        # the shape (N,).
        # If you add a loss term that doesn't depend on the advantages, use all graded rows, as the KL term does.
        has_gradient = advantages != 0  # (N,)
        if ref_policy is not None:
            has_gradient = batch.response_mask.any(1)  # (N,) True for graded rows

        # The rollout is packed once. The same micro-batches serve all log-probs and the training.
        mini_batches = batching.split(batch, args.mini_batches, has_gradient, settings.compute, world)
        micro_batches = [micro for mini_batch in mini_batches for micro in mini_batch.micro_batches]

        with tracker.time("logprobs"):
            # "Old" is the policy before this step's updates. Rows without a forward keep 0. The first update computes
            # the same log-probs once more, with the same weights and packing, so its ratio is 1 (on a CPU exactly).
            old_logprobs = model.frozen_logprobs(policy, batch, micro_batches, args.temperature)  # (N, T)
            if ref_policy is not None:
                ref_logprobs = model.frozen_logprobs(ref_policy, batch, micro_batches, args.temperature)  # (N, T)

        with tracker.time("update"):
            decay = 1 - (step - 1) / args.steps if args.schedule == "linear" else 1.0
            for param_group in optimizer.param_groups:
                param_group["lr"] = args.learning_rate * min(decay, step / max(1, args.warmup_steps))

            for mini_batch in mini_batches * args.epochs:  # one optimizer step each; the list repeats for each epoch
                # Ranks with fewer micro-batches get dummies (mask False), so if this rank has none, no rank has any.
                # Then skip the optimizer step: Adam's momentum would move the weights even without a gradient.
                if not mini_batch.micro_batches:
                    continue

                # One number for all micro-batches of the mini-batch. Rows of other ranks count, and so do rows without
                # a gradient, which are in no micro-batch.
                denominator = world.sum(batch.response_mask[mini_batch.rows].any(1).sum())  # graded responses

                # In this loop the mask is micro.response_mask: a dummy has real rows, and only its mask is False there.
                for micro in mini_batch.micro_batches:
                    # (n, T) each. Only the log-probs have a gradient.
                    logprobs, entropy = model.response_logprobs(policy, micro, args.temperature)
                    token_weights = 1.0
                    if args.tis_cap:
                        token_weights = rollout_weights(
                            old_logprobs=old_logprobs[micro.rows],
                            rollout_logprobs=batch.rollout_logprobs[micro.rows],
                            response_mask=micro.response_mask,
                            cap=args.tis_cap,
                        )  # (n, T)
                    loss = policy_loss(
                        logprobs=logprobs,
                        old_logprobs=old_logprobs[micro.rows],
                        ref_logprobs=None if ref_policy is None else ref_logprobs[micro.rows],
                        advantages=advantages[micro.rows],
                        response_mask=micro.response_mask,
                        clip_low=args.clip_low,
                        clip_high=args.clip_high,
                        kl_coef=args.kl_coef,
                        denominator=denominator,
                        token_weights=token_weights,
                    )
                    # Gradients add up over the micro-batches. They are also summed over the ranks: during the last
                    # backward, or during each if whole gradients would take too much memory.
                    # FSDP would average over the ranks, but model.load turns that off.
                    loss.backward()

                    clipped = clipped_tokens(
                        logprobs=logprobs,
                        old_logprobs=old_logprobs[micro.rows],
                        advantages=advantages[micro.rows],
                        response_mask=micro.response_mask,
                        clip_low=args.clip_low,
                        clip_high=args.clip_high,
                    )
                    # train/entropy, train/clip_frac and loss/kl are means over the tokens that had a forward.
                    tokens = micro.response_mask.sum()
                    tracker.loss("loss/policy", loss, micro)  # with the KL term, if there is one
                    tracker.mean("train/entropy", (entropy * micro.response_mask).sum(), tokens)
                    tracker.mean("train/clip_frac", clipped, tokens)
                    if ref_policy is not None:
                        kl = kl_to_reference(
                            logprobs=logprobs.detach(),
                            ref_logprobs=ref_logprobs[micro.rows],
                            response_mask=micro.response_mask,
                        )  # (n, T)
                        tracker.mean("loss/kl", kl.sum(), tokens)

                # All ranks clip by one norm, that of all shards together. full_tensor() makes it an ordinary tensor.
                grad_norm = torch.nn.utils.clip_grad_norm_(policy.parameters(), args.max_grad_norm).full_tensor()
                guards.stop_unless_finite(tracker, "train/grad_norm", grad_norm)  # before NaN reaches the weights
                tracker.mean("train/grad_norm", grad_norm)
                optimizer.step()
                optimizer.zero_grad()

        with tracker.time("sync"):
            weight_sync.push(policy, engine)  # the engine wakes with the new weights
        run.end_step(step, batch, advantages=advantages, old_logprobs=old_logprobs, rows=has_gradient)
    run.close()


if __name__ == "__main__":
    flags.launch(main, Args, EMBEDDED, __doc__)
