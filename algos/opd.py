"""OPD -- on-policy distillation: the policy samples, and a teacher gives the log-prob of each token.

    A_it  = teacher_it - old_it            log-probs of the sampled token: -A_it estimates the reverse KL to the teacher
    ratio = exp(logprobs - old_logprobs)
    L     = sum_it max(-A_it ratio, -A_it clip(ratio, 1 - clip_low, 1 + clip_high)) / sum_it m_it

or, with --full-vocabulary, no sampled estimate but the reverse KL of the two distributions at each token:

    L     = sum_it sum_v p_it(v) (log p_it(v) - log q_it(v)) / sum_it m_it          p: policy, q: teacher

sum_it m_it is the number of response tokens in the whole optimizer mini-batch, on all ranks. The teacher scores every
token, so the signal is dense. A token's advantage leaves out what the token does to later ones (a discount of 0), which
keeps the variance low. The teacher is any model with the policy's tokenizer. The responses are the policy's own, so it
learns to recover from its own mistakes. A teacher's responses would not contain them.

For sampled tokens --tis-cap works as in grpo.py; L leaves out its weights. grpo.py also explains the log-probs and the
letters N, B, G, T and n.

--full-vocabulary is GKD (arXiv:2306.13649) with lambda = 1 and reverse KL, except that GKD takes the mean over each
response's tokens first, and then over responses. The default is that of Thinking Machines
(On-Policy Distillation, 2025), with PPO's clip.

Rewards are measured, not trained on. As elsewhere, a prompt with an ungraded response leaves the step.

Differs from rloo.py: a teacher in the reference's place; an advantage for each token; with --full-vocabulary a loss
over the vocabulary.

Run:    python algos/opd.py                                             (embedded arithmetic, 2 minutes on two cores)
        torchrun --nproc-per-node 8 algos/opd.py --model Qwen/Qwen2.5-0.5B-Instruct --teacher Qwen/Qwen2.5-7B-Instruct
Result: embedded arithmetic, greedy, mean of three seeds: 95.1 % from 53.5 %. On GPUs: not yet run.
"""

import dataclasses
from typing import Literal

import torch
from pydantic import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from common import errors, placement, weight_sync
from common.data import arithmetic
from common.preflight import flags, ranges
from common.preflight.prepare import prepare
from common.rollout import engines
from common.run import guards, job
from common.run.sampling import Batch, PromptSampler
from common.trainer import batching, distillation, model


@dataclasses.dataclass
class Args(flags.Flags):  # Flags has those that all files share: --model, --dataset, --reward, --seed ...
    # sampling
    steps: PositiveInt = 200  # One step is one rollout and its updates.
    prompts_per_step: PositiveInt = 64  # Prompts of one step, on all ranks together.
    group_size: PositiveInt = 8  # G, the number of responses to each prompt.
    max_response_tokens: PositiveInt = 1024  # A longer response is cut off.
    temperature: ranges.Temperature = 1.0  # Used for sampling and for all log-probs.
    # algorithm
    clip_low: ranges.PositiveFraction = 0.2  # The ratio is clipped at 1 - clip_low. Not used with --full-vocabulary.
    clip_high: PositiveFloat = 0.2  # The ratio is clipped at 1 + clip_high. Not used with --full-vocabulary.
    tis_cap: ranges.WeightCap = 0.0  # Cap of the weight exp(old_logprobs - rollout_logprobs), often 2; 0 turns it off.
    teacher: str = ""  # Folder or Hub name of the teacher, which has the tokenizer of --model.
    full_vocabulary: bool = False  # Compare the whole distribution at each token, not only the sampled token.
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
EMBEDDED = flags.EMBEDDED | {"steps": 60, "learning_rate": 3e-4, "teacher": str(arithmetic.TEACHER)}


def compute_advantages(old_logprobs, teacher_logprobs, response_mask) -> torch.Tensor:
    """(N, T), (N, T) -> (N, T): how much likelier the teacher finds each sampled token, 0 outside the mask."""
    return torch.where(response_mask.bool(), teacher_logprobs - old_logprobs, 0.0)


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


def vocabulary_loss(divergences, response_mask, *, denominator: float) -> torch.Tensor:
    """Scalar: the sum of the given rows' divergences (n, T), one for each token, divided by `denominator`.

    A divergence sums over all possible next tokens, so no sampled token needs a ratio. Older weights may have sampled
    the tokens before this one, which the loss ignores. denominator: the same as in policy_loss.
    """
    return torch.where(response_mask.bool(), divergences, 0.0).sum() / denominator


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
    if not args.teacher:
        raise errors.BadInput("--teacher: name a model to learn from")
    if args.full_vocabulary and args.tis_cap:
        raise errors.BadInput(
            "--tis-cap: --full-vocabulary has no sampled token that it could weigh; leave one of the two out"
        )
    if args.full_vocabulary and (args.clip_low, args.clip_high) != (Args.clip_low, Args.clip_high):
        raise errors.BadInput("--clip-low, --clip-high: --full-vocabulary has no ratio that could be clipped")
    if args.layout.max_inflight_batches > 1 and not (args.tis_cap or args.full_vocabulary):
        raise errors.BadInput("--max-inflight-batches > 1: its tokens are from older weights; add --tis-cap 2")


def main(args: Args) -> None:
    check_args(args)
    # Checks the flags, the data and the model files before any weights are loaded.
    settings = prepare(
        args,
        models=["policy"],
        others={"teacher": args.teacher},
        teacher_in_update=args.full_vocabulary,
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
    teacher = distillation.load_teacher(
        args.teacher,
        policy,
        world,
        settings.dtype,
        settings.compute,
        offload=args.offload != "none",  # both "others" and "all" offload it
    )
    if args.full_vocabulary:
        distillation.check_heads(policy, teacher)
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
        has_gradient = batch.response_mask.any(1)  # (N,) True for graded rows: all of them learn from the teacher

        # The rollout is packed once. The same micro-batches serve all log-probs and the training.
        mini_batches = batching.split(batch, args.mini_batches, has_gradient, settings.compute, world)
        micro_batches = [micro for mini_batch in mini_batches for micro in mini_batch.micro_batches]

        with tracker.time("logprobs"):
            # "Old" is the policy before this step's updates. Rows without a forward keep 0. The first update computes
            # the same log-probs once more, with the same weights and packing, so its ratio is 1 (on a CPU exactly).
            # With --full-vocabulary they are in no loss: they show that trainer and engine agree (run.end_step).
            old_logprobs = model.frozen_logprobs(policy, batch, micro_batches, args.temperature)  # (N, T)
            advantages = torch.zeros_like(old_logprobs)  # (N, T)
            if not args.full_vocabulary:
                teacher_logprobs = model.frozen_logprobs(teacher, batch, micro_batches, args.temperature)  # (N, T)
                advantages = compute_advantages(
                    old_logprobs=old_logprobs,
                    teacher_logprobs=teacher_logprobs,
                    response_mask=batch.response_mask,
                )  # (N, T)
                tracker.mean("teacher/kl", -advantages.sum(), batch.response_mask.sum())

        with tracker.time("update"):
            decay = 1 - (step - 1) / args.steps if args.schedule == "linear" else 1.0
            for param_group in optimizer.param_groups:
                param_group["lr"] = args.learning_rate * min(decay, step / max(1, args.warmup_steps))

            for mini_batch in mini_batches * args.epochs:  # one optimizer step each; the list repeats for each epoch
                # Ranks with fewer micro-batches get dummies (mask False), so if this rank has none, no rank has any.
                # Then skip the optimizer step: Adam's momentum would move the weights even without a gradient.
                if not mini_batch.micro_batches:
                    continue

                # One number for all micro-batches of the mini-batch: its response tokens on all ranks.
                denominator = world.sum(batch.response_mask[mini_batch.rows].sum())

                for micro in mini_batch.micro_batches:
                    if args.full_vocabulary:
                        # (n, T) each; only the divergences have a gradient.
                        divergences, entropy = distillation.divergences(
                            policy,
                            teacher,
                            micro,
                            args.temperature,
                        )
                        loss = vocabulary_loss(
                            divergences=divergences,
                            response_mask=micro.response_mask,
                            denominator=denominator,
                        )
                        # This loss has no A. rollouts/ and the report show -KL for it: the policy's mean of
                        # log q - log p. It is measured while the weights change, and the last epoch's value stays.
                        advantages[micro.rows] = torch.where(
                            micro.response_mask, -divergences.detach(), advantages[micro.rows]
                        )
                        tracker.mean("teacher/kl", divergences.detach().sum(), micro.response_mask.sum())
                    else:
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
                        clipped = clipped_tokens(
                            logprobs=logprobs,
                            old_logprobs=old_logprobs[micro.rows],
                            advantages=advantages[micro.rows],
                            response_mask=micro.response_mask,
                            clip_low=args.clip_low,
                            clip_high=args.clip_high,
                        )
                        tracker.mean("train/clip_frac", clipped, micro.response_mask.sum())
                    # Gradients add up over the micro-batches. They are also summed over the ranks: during the last
                    # backward, or during each if whole gradients would take too much memory.
                    # FSDP would average over the ranks, but model.load turns that off.
                    loss.backward()

                    # Metrics of train/ are means over the tokens that had a forward.
                    tracker.loss("loss/policy", loss, micro)
                    tracker.mean("train/entropy", (entropy * micro.response_mask).sum(), micro.response_mask.sum())

                # All ranks clip by one norm, that of all shards together. full_tensor() makes it an ordinary tensor.
                grad_norm = torch.nn.utils.clip_grad_norm_(policy.parameters(), args.max_grad_norm).full_tensor()
                guards.stop_unless_finite(tracker, "train/grad_norm", grad_norm)  # before NaN reaches the weights
                tracker.mean("train/grad_norm", grad_norm)
                optimizer.step()
                optimizer.zero_grad()
            model.reshard(teacher)  # frees its gathered weights; for a trained model the backward does that

        with tracker.time("sync"):
            weight_sync.push(policy, engine)  # the engine wakes with the new weights
        run.end_step(step, batch, advantages=advantages, old_logprobs=old_logprobs, rows=has_gradient)
    run.close()


if __name__ == "__main__":
    flags.launch(main, Args, EMBEDDED, __doc__)
