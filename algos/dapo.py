"""DAPO -- Decoupled clip and dynamic sampling (arXiv:2503.14476, eq. 8-13).

    R_i   = 2 score_i - 1 + overlong_penalty(length_i)   +1 or -1 for a score of 1 or 0; the penalty is <= 0
    A_i   = (R_i - mean(R)) / (std(R) + eps)             over the G responses to one prompt; equal rewards give 0
    ratio = exp(logprobs - old_logprobs)
    L     = sum_it max(-A_i ratio, -A_i clip(ratio, 1 - clip_low, 1 + clip_high)) / sum_it m_it

length_i counts the text of an environment, too. A token with A_i < 0 adds at most -A_i clip_dual to the sum.
sum_it m_it is the number of response tokens in the whole optimizer mini-batch, on all ranks. Dynamic sampling: prompts
are drawn until --prompts-per-step of them have both right and wrong responses. The filter asks for raw correctness, not
for the shaped reward: a group of right responses of unequal lengths would teach nothing but length.

--tis-cap works as in grpo.py; L leaves out its weights. grpo.py also explains the log-probs and the letters N, B, G, T
and n.

Differs from grpo.py: clip_high above clip_low; a dual clip; dynamic sampling; a token mean over the mini-batch; rewards
of 1 and -1 with overlong shaping; no KL term.

Differs from the paper: the mean is over the tokens of the mini-batch, as in its code, where its formula has one mean
for each prompt's group; dual clip as in its code. All ranks draw until each has its share, and surplus groups are
discarded.

Run:    python algos/dapo.py                                            (embedded arithmetic, 4 minutes on two cores)
        torchrun --nnodes 4 --nproc-per-node 8 algos/dapo.py --model Qwen/Qwen2.5-32B --dataset dapo
            --reward dapo-lenient=0.5 --steps 400 --prompts-per-step 512 --gen-prompts 1536 --group-size 16
            --mini-batches 16 --warmup-steps 20 --weight-decay 0.1 --max-prompt-tokens 2048
            --max-response-tokens 20480 --overlong-cache 4096
            --activation-checkpointing --rollout-tp 4
Result: embedded arithmetic, greedy, mean of three seeds: 86.1 % from 53.5 %. On GPUs: not yet run.
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
    gen_prompts: NonNegativeInt = 128  # Prompts in one draw of dynamic sampling, on all ranks. 0: prompts_per_step.
    max_gen_batches: PositiveInt = 10  # Maximum number of draws in one step. If they don't fill it, the run fails.
    group_size: PositiveInt = 8  # G, the number of responses to each prompt.
    max_response_tokens: PositiveInt = 1024  # A longer response is cut off.
    temperature: ranges.Temperature = 1.0  # Used for sampling and for all log-probs.
    # algorithm
    clip_low: ranges.PositiveFraction = 0.2  # The ratio is clipped at 1 - clip_low.
    clip_high: PositiveFloat = 0.28  # The ratio is clipped at 1 + clip_high.
    tis_cap: ranges.WeightCap = 0.0  # Cap of the weight exp(old_logprobs - rollout_logprobs), often 2; 0 turns it off.
    clip_dual: PositiveFloat = 10.0  # The loss of a token with A < 0 is at most -A clip_dual.
    overlong_cache: NonNegativeInt = 128
    """The length penalty grows over the last N tokens before the limit. 0: only responses that reach the limit cost."""
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
# A step takes several draws, so there are fewer steps than in the other files.
EMBEDDED = flags.EMBEDDED | {
    "steps": 26,
    "prompts_per_step": 32,
    "gen_prompts": 64,
    "learning_rate": 2.5e-4,
    "overlong_cache": 8,
}


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


def overlong_penalty(lengths: torch.Tensor, max_len: int, cache_len: int, factor: float = 1.0) -> torch.Tensor:
    """(N,) -> (N,): 0 up to max_len - cache_len tokens, then linearly down to -factor at max_len (eq. 13)."""
    over = lengths - (max_len - cache_len)
    if cache_len:
        share = over / cache_len
    else:
        share = (lengths >= max_len).float()  # only a response that reaches the limit costs
    return -factor * share.clamp(0, 1)


def keep_groups(correct: torch.Tensor) -> torch.Tensor:
    """(B, G) bool -> (B,) bool: groups with both right and wrong responses (eq. 11), by the first --reward."""
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
    token_weights: torch.Tensor | float = 1.0,
) -> torch.Tensor:
    """Scalar: the sum of the given rows' token losses, divided by `denominator`.

    Tensors are (n, T), except advantages (n,). Log-probs outside the mask, NaN included, change nothing.
    denominator: response tokens that the loss counts, of the whole mini-batch on all ranks.
    token_weights: (n, T), from rollout_weights(), or 1.0.
    """
    log_ratio = torch.where(response_mask.bool(), logprobs - old_logprobs, 0.0)
    ratio = log_ratio.clamp(-20, 20).exp()  # clamped to stay finite: an inf times advantage 0 would be NaN
    advantages = advantages[:, None]  # (n, 1); leave this line out if each token has its own advantage
    per_token = torch.max(-advantages * ratio, -advantages * ratio.clamp(1 - clip_low, 1 + clip_high))
    per_token = torch.where(advantages < 0, torch.min(per_token, -advantages * clip_dual), per_token)
    per_token = token_weights * per_token
    return (per_token * response_mask).sum() / denominator


def rollout_weights(old_logprobs, rollout_logprobs, response_mask, cap: float) -> torch.Tensor:
    """(n, T): truncated importance sampling (Ionides, 2008), min(exp(old - rollout), cap).

    The engine's policy differs from the trainer's by rounding error. With --max-inflight-batches > 1 it is also some
    steps older. The weight multiplies the policy loss and carries no gradient.
    """
    log_weights = torch.where(response_mask.bool(), old_logprobs - rollout_logprobs, 0.0)
    return log_weights.clamp(-20, 20).exp().clamp(max=cap)


@torch.no_grad()
def clipped_tokens(
    logprobs, old_logprobs, advantages, response_mask, *, clip_low, clip_high, clip_dual
) -> torch.Tensor:
    """How many response tokens have no policy-loss gradient because their ratio was clipped."""
    response_mask = response_mask.bool()
    ratio = torch.where(response_mask, logprobs - old_logprobs, 0.0).exp()
    advantages = advantages[:, None]  # (n, 1); leave this line out if each token has its own advantage
    too_high = (advantages > 0) & (ratio > 1 + clip_high)
    too_low = (advantages < 0) & ((ratio < 1 - clip_low) | (ratio > clip_dual))
    return ((too_high | too_low) & response_mask).sum()


def check_args(args: Args) -> None:
    """Refuse flags that the formulas above cannot work with. Raises BadInput."""
    if args.group_size < 2:
        raise errors.BadInput(f"--group-size {args.group_size}: a group of one always equals its own mean; use >= 2")
    if args.clip_dual <= 1 + args.clip_high:
        raise errors.BadInput(f"--clip-dual {args.clip_dual} must be above 1 + --clip-high {args.clip_high}")
    if args.overlong_cache > args.max_response_tokens:
        raise errors.BadInput(
            f"--overlong-cache {args.overlong_cache} must be in [0, --max-response-tokens {args.max_response_tokens}]"
        )
    if args.layout.max_inflight_batches > 1 and not args.tis_cap:
        raise errors.BadInput("--max-inflight-batches > 1: its tokens are from older weights; add --tis-cap 2")


def main(args: Args) -> None:
    check_args(args)
    # Checks the flags, the data and the model files before any weights are loaded.
    settings = prepare(
        args,
        models=["policy"],
        prompts_per_draw=args.gen_prompts,
        most_draws=args.max_gen_batches,
    )
    # With dapo=0.5 R is -2 or 0. Its two values are still 2 apart, and a constant drops out of A.
    if max(settings.reward.weights.get(name, 0.0) for name in ("dapo", "dapo-lenient")) > 0.5:
        raise errors.BadInput(
            "--reward dapo and dapo-lenient score -1 or 1, which R = 2 score - 1 would double; use dapo=0.5 or "
            "dapo-lenient=0.5"
        )
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

        def generate(prompts, draw, grading):  # draw: 0, 1, ... in each step; it makes the seed differ
            return engine.generate(
                [prompt.ids for prompt in prompts],
                args.group_size,
                args.temperature,
                args.max_response_tokens,
                seed=args.seed * 2**20 + step * args.max_gen_batches + draw,
                done=grading,
                reply=grading.reply,  # the next turn of an environment (--environment)
            )

        # Dynamic sampling: draw prompts until enough of them pass the filter.
        batch = sampler.until_full(
            generate,
            keep_groups,
            wanted=args.prompts_per_step,
            prompts_per_draw=args.gen_prompts or args.prompts_per_step,
            max_draws=args.max_gen_batches,
            filter_in_words="with both right and wrong responses",
        )
        # An engine that shares the trainer's device frees memory until the push of new weights. An engine on
        # devices of its own, as --max-inflight-batches > 1 needs, does nothing here.
        engine.sleep()
        return batch

    for step, batch in run.steps(sample):
        penalty = overlong_penalty(
            lengths=batch.lengths,
            max_len=args.max_response_tokens,
            cache_len=args.overlong_cache,
        )  # (N,)
        rewards = 2 * batch.scores - 1 + penalty  # (N,)
        advantages = compute_advantages(rewards=rewards, group_size=args.group_size)  # (N,)

        # Only rows with a gradient need a forward, and a row with advantage 0 has none.
        # If you add a loss term that doesn't depend on the advantages, use all graded rows: batch.response_mask.any(1).
        has_gradient = advantages != 0  # (N,)

        # The rollout is packed once. The same micro-batches serve all log-probs and the training.
        mini_batches = batching.split(batch, args.mini_batches, has_gradient, settings.compute, world)
        micro_batches = [micro for mini_batch in mini_batches for micro in mini_batch.micro_batches]

        with tracker.time("logprobs"):
            # "Old" is the policy before this step's updates. Rows without a forward keep 0. The first update computes
            # the same log-probs once more, with the same weights and packing, so its ratio is 1 (on a CPU exactly).
            old_logprobs = model.frozen_logprobs(policy, batch, micro_batches, args.temperature)  # (N, T)

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
                denominator = world.sum(batch.response_mask[mini_batch.rows].sum())  # response tokens

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
                        advantages=advantages[micro.rows],
                        response_mask=micro.response_mask,
                        clip_low=args.clip_low,
                        clip_high=args.clip_high,
                        clip_dual=args.clip_dual,
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
                        clip_dual=args.clip_dual,
                    )
                    # train/entropy and train/clip_frac are means over the tokens that had a forward.
                    tokens = micro.response_mask.sum()
                    tracker.loss("loss/policy", loss, micro)
                    tracker.mean("train/entropy", (entropy * micro.response_mask).sum(), tokens)
                    tracker.mean("train/clip_frac", clipped, tokens)

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
