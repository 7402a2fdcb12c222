"""ReMax -- REINFORCE with the greedy response as baseline (arXiv:2310.10505, algorithm 1).

    r_t   = -kl_coef (old_t - ref_t), plus the score on the last token    the KL to the reference is part of the reward
    A_t   = sum_{s>=t} r_s - b,   b = score of the greedy response to the same prompt
    ratio = exp(logprobs - old_logprobs)
    L     = sum_it max(-A_it ratio, -A_it clip(ratio, 1 - clip_low, 1 + clip_high)) / sum_it m_it

sum_it m_it is the number of sampled response tokens in the whole optimizer mini-batch, on all ranks. b does not depend
on the sampled response, and needs neither a critic nor a group. In a plain sum it would add no bias; the division by
the number of sampled tokens adds a small one. The greedy responses carry no loss; their mean score on the training
prompts is the metric `reward/greedy_mean`. Without KL, a response with the same score as the greedy one has advantage
0. With --max-inflight-batches > 1, new weights may come between the two.

--tis-cap works as in grpo.py; L leaves out its weights. grpo.py also explains the log-probs and the letters N, B, G, T
and n.

Differs from rloo.py: the baseline is the score of one extra, greedy response; rewards are per token and are summed from
the end.

Differs from the paper:
- L is a mean over tokens. Algorithm 1 sums over a response's tokens, and takes the mean over responses.
- G sampled responses share a greedy one. The paper samples one.
- Ratios are clipped, and a rollout has several mini-batches. The paper makes one on-policy update.

Differs from the authors' code:
- A token's KL counts for it and for all tokens before it (the true return). Theirs gives each token its own KL alone.
- There is no discount. Theirs is 0.99 a token.
- score - b is not clipped. Theirs is, at +-5.
- Responses are sampled from the policy itself. Theirs are sampled with top_p 0.9.
- The token mean is over the mini-batch. Theirs is over each micro-batch.

Run:    python algos/remax.py                                           (embedded arithmetic, 3 minutes on two cores)
        torchrun --nproc-per-node 8 algos/remax.py --model Qwen/Qwen2.5-0.5B-Instruct --group-size 4 --kl-coef 0.001
Result: embedded arithmetic, greedy, mean of three seeds: 89.8 % from 53.5 %. On GPUs: not yet run.
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
    group_size: PositiveInt = 8  # G, the number of sampled responses to each prompt; 1 in the paper.
    max_response_tokens: PositiveInt = 1024  # A longer response is cut off.
    temperature: ranges.Temperature = 1.0  # Used for sampling and for all log-probs.
    # algorithm
    clip_low: ranges.PositiveFraction = 0.2  # The ratio is clipped at 1 - clip_low.
    clip_high: PositiveFloat = 0.2  # The ratio is clipped at 1 + clip_high.
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
EMBEDDED = flags.EMBEDDED | {"steps": 60, "learning_rate": 1.5e-4}


def reward_tokens(scores, old_logprobs, ref_logprobs, response_mask, kl_coef: float) -> torch.Tensor:
    """Scores (N,), log-probs (N, T) -> (N, T): the score on the last response token, -kl_coef (old - ref) on each.

    The result is 0 outside the mask, and a response without a token gets no reward.
    """
    width = response_mask.shape[1]
    # (N,) index of the last sampled token. Not length - 1, because an environment's replies leave holes in the mask.
    last = width - 1 - response_mask.flip(1).float().argmax(1)
    at_end = torch.arange(width, device=scores.device) == last[:, None]  # (N, T)
    rewards = torch.where(at_end & response_mask.bool(), scores[:, None], 0.0)
    if ref_logprobs is None:
        return rewards
    # old - ref is k1, an unbiased estimate of the KL if the weights behind `old` sampled the tokens.
    return rewards - kl_coef * torch.where(response_mask.bool(), old_logprobs - ref_logprobs, 0.0)


def compute_advantages(
    token_rewards: torch.Tensor, greedy_scores: torch.Tensor, response_mask: torch.Tensor
) -> torch.Tensor:
    """(N, T), (N,), (N, T) -> (N, T): the reward-to-go minus the greedy response's score, 0 outside the mask."""
    response_mask = response_mask.bool()
    rewards = torch.where(response_mask, token_rewards, 0.0)
    to_go = rewards.flip(1).cumsum(1).flip(1)
    return torch.where(response_mask, to_go - greedy_scores[:, None], 0.0)


def policy_loss(
    logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    *,
    clip_low: float,
    clip_high: float,
    denominator: float,
    token_weights: torch.Tensor | float = 1.0,
) -> torch.Tensor:
    """Scalar: the sum of the given rows' token losses, divided by `denominator`.

    All are (n, T). Log-probs outside the mask, NaN included, change nothing.
    denominator: response tokens that the loss counts, of the whole mini-batch on all ranks.
    token_weights: (n, T), from rollout_weights(), or 1.0.
    """
    log_ratio = torch.where(response_mask.bool(), logprobs - old_logprobs, 0.0)
    ratio = log_ratio.clamp(-20, 20).exp()  # clamped to stay finite: an inf times advantage 0 would be NaN
    per_token = torch.max(-advantages * ratio, -advantages * ratio.clamp(1 - clip_low, 1 + clip_high))
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
def clipped_tokens(logprobs, old_logprobs, advantages, response_mask, *, clip_low, clip_high) -> torch.Tensor:
    """How many response tokens have no policy-loss gradient because their ratio was clipped."""
    response_mask = response_mask.bool()
    ratio = torch.where(response_mask, logprobs - old_logprobs, 0.0).exp()
    too_high = (advantages > 0) & (ratio > 1 + clip_high)
    too_low = (advantages < 0) & (ratio < 1 - clip_low)
    return ((too_high | too_low) & response_mask).sum()


def check_args(args: Args) -> None:
    """Refuse flags that the formulas above cannot work with. Raises BadInput."""
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
            # The baseline: one greedy response to each prompt, at temperature 0, where the seed has no effect.
            # It has no done=, because `grading` collects the sampled responses.
            greedy = engine.generate(
                [prompt.ids for prompt in prompts],
                1,
                0.0,
                args.max_response_tokens,
                seed=0,
                reply=grading.reply,
            )
            # An engine that shares the trainer's device frees memory until the push of new weights. An engine
            # on devices of its own, as --max-inflight-batches > 1 needs, does nothing here.
            engine.sleep()
        baseline = sampler.grade(prompts, greedy, with_metrics=False)
        graded = baseline.response_mask.any(1)  # (B,)
        sampler.metrics.mean("reward/greedy_mean", baseline.scores.sum(), graded.sum())
        # Without a graded greedy response a prompt has no baseline, and its responses leave the step.
        rollout.response_mask &= graded.repeat_interleave(args.group_size)[:, None]
        batch = sampler.grade(prompts, rollout, grading)
        batch.baseline = baseline
        return batch

    for step, batch in run.steps(sample):
        greedy_scores = batch.baseline.scores.repeat_interleave(args.group_size)  # (N,)

        # Only rows with a gradient need a forward. Without KL, a row that scored like its greedy response has none.
        has_gradient = batch.response_mask.any(1) & (batch.scores != greedy_scores)  # (N,)
        # With KL each token has a reward of its own, so all graded rows have one.
        if ref_policy is not None:
            has_gradient = batch.response_mask.any(1)  # (N,) True for graded rows

        # The rollout is packed once. The same micro-batches serve all log-probs and the training.
        mini_batches = batching.split(batch, args.mini_batches, has_gradient, settings.compute, world)
        micro_batches = [micro for mini_batch in mini_batches for micro in mini_batch.micro_batches]

        with tracker.time("logprobs"):
            # "Old" is the policy before this step's updates. Rows without a forward keep 0. The first update computes
            # the same log-probs once more, with the same weights and packing, so its ratio is 1 (on a CPU exactly).
            old_logprobs = model.frozen_logprobs(policy, batch, micro_batches, args.temperature)  # (N, T)
            ref_logprobs = None
            if ref_policy is not None:
                ref_logprobs = model.frozen_logprobs(ref_policy, batch, micro_batches, args.temperature)  # (N, T)
                kl = (old_logprobs - ref_logprobs) * batch.response_mask  # (N, T)
                tracker.mean("reward/kl", kl.sum(), has_gradient.sum())
        token_rewards = reward_tokens(
            scores=batch.scores,
            old_logprobs=old_logprobs,
            ref_logprobs=ref_logprobs,
            response_mask=batch.response_mask,
            kl_coef=args.kl_coef,
        )  # (N, T)
        advantages = compute_advantages(
            token_rewards=token_rewards,
            greedy_scores=greedy_scores,
            response_mask=batch.response_mask,
        )  # (N, T)

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
