"""PRIME -- Process reinforcement through implicit rewards (arXiv:2502.01456, eq. 3-5; implicit PRM arXiv:2412.01981).

    r_t   = beta (log phi(y_t) - log ref(y_t))           process reward of a token, from outcome labels alone
    L_phi = BCE(sigmoid(sum_t r_t), correct)             mean over responses; phi learns from a batch, then rewards it
    r'_t  = r_t / (M + 1e-6)                             M: the largest |sum_{s>=t} r_s| of the step, on all ranks
    p_t   = r'_t - mean over the G - 1 others of their mean r';   u = correct - mean of the others' correct
    A_t   = c_process sum_{s>=t} p_s + c_outcome u,      whitened over all response tokens of the step
    ratio = exp(logprobs - old_logprobs)
    L     = sum_it max(-A_it ratio, -A_it clip(ratio, 1 - clip, 1 + clip)) / sum_it m_it

phi, the implicit process reward model, is a language model that starts as the policy; ref is the frozen start. Without
the division by M, r would be tiny beside the outcome. c_outcome is 1: the whitening leaves only c_process / c_outcome.
sum_it m_it is the number of response tokens in the whole optimizer mini-batch, on all ranks. Prompts are drawn until
--prompts-per-step of them have a share of right responses within --accuracy-range.

`correct` is 1 if the first --reward gives a response an acc above 0, or a score above 0 if that reward has no acc. So
use a reward that knows right and wrong: with a dense score, nearly all responses would be right.

--tis-cap works as in grpo.py; L leaves out its weights. grpo.py also explains the log-probs and the letters N, B, G, T
and n.

Differs from rloo.py: the process reward model and its update, a reward-to-go for each token, whitening, the filter; no
KL term in the reward; one pass over a rollout; one --clip for both sides.

Differs from the paper:
- phi learns from a batch before it rewards it ("double-forward"). By default the paper takes the rewards first.
- M and the whitening are those of the authors' code. The paper's equations have neither.

Differs from the authors' code:
- phi's order, as above: their script takes the rewards from the forward of phi's update.
- p_t is the paper's. Their code adds (r'_t - its response's mean r') / (G - 1) to it.
- M is that of all ranks, not of one.
- phi's gradients are clipped to --max-grad-norm. Their script has 10.
- Prompts of surplus groups are dropped. Their code samples them again.

Run:    python algos/prime.py                                           (embedded arithmetic, 4 minutes on two cores)
        torchrun --nproc-per-node 8 algos/prime.py --model PRIME-RL/Eurus-2-7B-SFT --dataset math --reward math
        (docs/algorithms/prime.md has the paper's sizes)
Result: embedded arithmetic, greedy, mean of three seeds: 90.4 % from 53.5 %. On GPUs: not yet run.
"""

import dataclasses
import math
from collections.abc import Callable
from functools import partial
from typing import Literal

import torch
import torch.nn.functional as F
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
    temperature: ranges.Temperature = 1.0  # Used for sampling and for the policy's log-probs. phi and ref have 1.
    # algorithm
    clip: ranges.PositiveFraction = 0.2  # epsilon: the ratio is clipped at 1 - clip and 1 + clip.
    tis_cap: ranges.WeightCap = 0.0  # Cap of the weight exp(old_logprobs - rollout_logprobs), often 2; 0 turns it off.
    accuracy_range: tuple[ranges.Fraction, ranges.Fraction] = (0.2, 0.8)
    """A prompt stays if its share of right responses is within this range, bounds included."""
    beta: PositiveFloat = 0.05  # Scale of the process reward.
    c_process: NonNegativeFloat = 1.0  # Weight of the process rewards. The weight of the outcome is 1.
    # optimization
    mini_batches: PositiveInt = 4  # Optimizer steps per pass. --prompts-per-step must be a multiple of this x ranks.
    learning_rate: ranges.LearningRate = 1e-6  # Peak learning rate of the policy.
    prm_learning_rate: ranges.LearningRate = 1e-6  # Learning rate of the process reward model; it stays constant.
    schedule: Literal["constant", "linear"] = "constant"  # linear decays to learning_rate / steps in the last step.
    warmup_steps: NonNegativeInt = 10  # Steps in which the rate rises linearly. With a decay, the lower of both counts.
    weight_decay: NonNegativeFloat = 0.0  # Weight decay of AdamW.
    max_grad_norm: PositiveFloat = 1.0  # Gradients are clipped to this norm.


# The defaults without --model: two-digit addition, learned on a CPU in minutes. flags.EMBEDDED has five more, such as
# --max-response-tokens 48 and --schedule linear.
EMBEDDED = flags.EMBEDDED | {
    "steps": 48,
    "prompts_per_step": 16,
    "gen_prompts": 48,
    "learning_rate": 2.5e-4,
    "prm_learning_rate": 3e-4,
    "accuracy_range": (0.1, 0.9),
    "c_process": 0.3,
}


def implicit_rewards(
    prm_logprobs: torch.Tensor, ref_logprobs: torch.Tensor, response_mask: torch.Tensor, beta: float
) -> torch.Tensor:
    """(N, T) or (n, T): process rewards beta (log phi - log ref), 0 outside the mask."""
    return beta * torch.where(response_mask.bool(), prm_logprobs - ref_logprobs, 0.0)


def prm_loss(prm_logprobs, ref_logprobs, response_mask, beta: float, correct) -> torch.Tensor:
    """(n,): cross entropy of sigmoid(sum of process rewards) against correct (n,), 0 or 1.

    0 for a row without response tokens, as in a dummy micro-batch.
    """
    scores = implicit_rewards(prm_logprobs, ref_logprobs, response_mask, beta).sum(1)
    loss = F.binary_cross_entropy_with_logits(scores, correct.to(scores.dtype), reduction="none")
    return loss * response_mask.bool().any(1)


def normalize(process_rewards: torch.Tensor, response_mask: torch.Tensor, largest: Callable = float) -> torch.Tensor:
    """(N, T): process rewards divided by 1e-6 + the largest |reward-to-go| of a response token.

    largest: maximum of a number over the ranks (World.max). The default, float, is for one rank alone.
    """
    to_go = torch.where(response_mask.bool(), process_rewards, 0.0).flip(1).cumsum(1).flip(1)  # sum over s >= t
    scale = largest((to_go * response_mask).abs().max())
    return process_rewards / (scale + 1e-6)


def compute_advantages(
    process_rewards: torch.Tensor,
    correct: torch.Tensor,
    response_mask: torch.Tensor,
    group_size: int,
    c_process: float = 1.0,
    c_outcome: float = 1.0,
) -> torch.Tensor:
    """Scaled process rewards (N, T), correct (N,) -> (N, T): A_t before whitening, 0 outside the mask."""
    response_mask = response_mask.bool()
    process_rewards = torch.where(response_mask, process_rewards, 0.0)
    means = process_rewards.sum(1) / response_mask.sum(1).clamp(min=1)  # (N,)

    def others(x: torch.Tensor) -> torch.Tensor:
        """(N,) -> (N,): mean over the other G - 1 responses in the group."""
        groups = x.view(-1, group_size)  # (B, G)
        return ((groups.sum(1, keepdim=True) - groups) / (group_size - 1)).view(-1)

    process = torch.where(response_mask, process_rewards - others(means)[:, None], 0.0)
    outcome = (correct - others(correct))[:, None]  # (N, 1)
    process_to_go = process.flip(1).cumsum(1).flip(1)  # (N, T) sum over s >= t
    return torch.where(response_mask, c_process * process_to_go + c_outcome * outcome, 0.0)


def whiten(advantages: torch.Tensor, response_mask: torch.Tensor, total: Callable = float) -> torch.Tensor:
    """(N, T) -> (N, T): mean 0 and sample variance 1 over the response tokens of all ranks, 0 outside the mask.
    Equal advantages give 0 everywhere.

    total: sums a number over the ranks (World.sum). The default, float, adds nothing: for one rank alone.
    """
    count = total(response_mask.sum())
    mean = total(torch.where(response_mask.bool(), advantages, 0.0).sum()) / max(1, count)
    centred = torch.where(response_mask.bool(), advantages - mean, 0.0)
    variance = total(centred.square().sum()) / max(1, count - 1)
    # Equal advantages differ from their mean by rounding alone.
    if variance <= 1e-12 * max(1.0, mean**2):
        return torch.zeros_like(centred)
    return centred * (variance + 1e-8) ** -0.5


def keep_groups(correct: torch.Tensor, min_accuracy: float, max_accuracy: float) -> torch.Tensor:
    """(B, G) bool -> (B,) bool: groups whose share of right responses is within the bounds, bounds included."""
    right = correct.sum(dim=1)  # (B,)
    group_size = correct.shape[1]
    # 1e-9: a product may be off by rounding. 0.28 * 25 is 7.000000000000001, which ceil() would make 8.
    fewest = math.ceil(min_accuracy * group_size - 1e-9)
    most = math.floor(max_accuracy * group_size + 1e-9)
    return (right >= fewest) & (right <= most)


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


@torch.no_grad()
def ranked_pairs(scores: torch.Tensor, correct: torch.Tensor, group_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(number of pairs that the process reward model ranks right, number of pairs).

    A pair is a right and a wrong response to one prompt. It is ranked right if the right one has the larger score, and
    half right if both have the same, as in the first step, when phi is the reference.
    """
    scores = scores.view(-1, group_size)  # (B, G)
    right = correct.view(-1, group_size) > 0.5  # (B, G)
    pairs = right[:, :, None] & ~right[:, None, :]  # (B, G, G)
    first = scores[:, :, None]
    second = scores[:, None, :]
    ranked_right = (first > second) + 0.5 * (first == second)  # (B, G, G)
    return (pairs * ranked_right).sum(), pairs.sum()


def check_args(args: Args) -> None:
    """Refuse flags that the formulas above cannot work with. Raises BadInput."""
    if args.group_size < 2:
        raise errors.BadInput(f"--group-size {args.group_size}: its baseline is the mean of the others; use >= 2")
    low, high = args.accuracy_range
    if low > high:
        raise errors.BadInput(f"--accuracy-range {low} {high}: the first is larger than the second")
    # One group for each number of right responses: row k has k of them, for k = 0 ... G.
    groups = torch.arange(args.group_size) < torch.arange(args.group_size + 1)[:, None]  # (G + 1, G) bool
    if not keep_groups(groups, low, high).any():
        raise errors.BadInput(f"--accuracy-range {low} {high}: no share of {args.group_size} responses is within it")
    if args.layout.max_inflight_batches > 1 and not args.tis_cap:
        raise errors.BadInput("--max-inflight-batches > 1: its tokens are from older weights; add --tis-cap 2")


def main(args: Args) -> None:
    check_args(args)
    # Checks the flags, the data and the model files before any weights are loaded.
    settings = prepare(
        args,
        models=["policy", "prm", "reference"],
        prompts_per_draw=args.gen_prompts,
        most_draws=args.max_gen_batches,
    )
    # batch.correct is the verdict of the first reward. batch.scores, the weighted sum of all, is not used here.
    further = list(settings.reward.weights)[1:]
    unused = [name for name in further if settings.reward.weights[name]]
    if unused:
        raise errors.BadInput(
            f"--reward {' '.join(unused)}: PRIME uses only the first reward, for right or wrong. With a weight of 0 "
            "(NAME=0) the others are only reported; a single function can grade rows of several kinds"
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
    ref_policy = model.load_reference(
        policy,
        settings.model,
        world,
        settings.dtype,
        settings.compute,
        offload=args.offload != "none",  # both "others" and "all" offload it
    )
    prm = model.load(settings.model, world, settings.dtype, settings.compute, offload=args.offload != "none")
    prm_optimizer = torch.optim.AdamW(
        prm.parameters(),
        lr=args.prm_learning_rate,
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
    trained = {"policy": (policy, optimizer), "prm": (prm, prm_optimizer)}
    run = job.start(settings, world, engine, trained)
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
        low, high = args.accuracy_range
        batch = sampler.until_full(
            generate,
            partial(keep_groups, min_accuracy=low, max_accuracy=high),
            wanted=args.prompts_per_step,
            prompts_per_draw=args.gen_prompts or args.prompts_per_step,
            max_draws=args.max_gen_batches,
            filter_in_words=f"answered right at a rate within [{low}, {high}]",
        )
        # An engine that shares the trainer's device frees memory until the push of new weights. An engine on
        # devices of its own, as --max-inflight-batches > 1 needs, does nothing here.
        engine.sleep()
        return batch

    for step, batch in run.steps(sample):
        # All rows need a forward: until_full() keeps only graded groups, and each token has a process reward.
        has_gradient = torch.ones(len(batch), dtype=torch.bool, device=world.device)  # (N,)

        correct = batch.correct  # (N,) 1 or 0: the verdict of the first reward

        # The rollout is packed once. The same micro-batches serve all log-probs and the training of both models.
        mini_batches = batching.split(batch, args.mini_batches, has_gradient, settings.compute, world)
        micro_batches = [micro for mini_batch in mini_batches for micro in mini_batch.micro_batches]

        with tracker.time("logprobs"):
            # "Old" is the policy before this step's updates. The first update computes the same log-probs once more,
            # with the same weights and packing, so its ratio is 1 (on a CPU exactly).
            old_logprobs = model.frozen_logprobs(policy, batch, micro_batches, args.temperature)  # (N, T)
            # ref and phi have temperature 1: they judge text, and sample nothing.
            ref_logprobs = model.frozen_logprobs(ref_policy, batch, micro_batches, 1.0)  # (N, T)

        with tracker.time("prm"):
            # How well does the process reward model rank these responses, which it has not been trained on?
            before_update = model.frozen_logprobs(prm, batch, micro_batches, 1.0)  # (N, T)
            prm_scores = implicit_rewards(before_update, ref_logprobs, batch.response_mask, args.beta).sum(1)  # (N,)
            ranked_right, pairs = ranked_pairs(scores=prm_scores, correct=correct, group_size=args.group_size)
            tracker.mean("prm/pair_accuracy", ranked_right, pairs)

            for mini_batch in mini_batches:
                denominator = world.sum(len(mini_batch.rows))  # responses
                for micro in mini_batch.micro_batches:
                    prm_logprobs, _ = model.response_logprobs(prm, micro, 1.0, with_entropy=False)  # (n, T)
                    losses = prm_loss(
                        prm_logprobs=prm_logprobs,
                        ref_logprobs=ref_logprobs[micro.rows],
                        response_mask=micro.response_mask,
                        beta=args.beta,
                        correct=correct[micro.rows],
                    )  # (n,)
                    loss = losses.sum() / denominator
                    loss.backward()
                    tracker.loss("loss/prm", loss, micro)
                grad_norm = torch.nn.utils.clip_grad_norm_(prm.parameters(), args.max_grad_norm).full_tensor()
                guards.stop_unless_finite(tracker, "prm/grad_norm", grad_norm)
                tracker.mean("prm/grad_norm", grad_norm)
                prm_optimizer.step()
                prm_optimizer.zero_grad()

            # The rewards come from the updated process reward model.
            prm_logprobs = model.frozen_logprobs(prm, batch, micro_batches, 1.0)  # (N, T)
        process_rewards = implicit_rewards(
            prm_logprobs=prm_logprobs,
            ref_logprobs=ref_logprobs,
            response_mask=batch.response_mask,
            beta=args.beta,
        )  # (N, T)
        # This scales up noise, too: in the first steps phi hardly differs from ref, and prm/pair_accuracy is near 0.5.
        process_rewards = normalize(process_rewards, batch.response_mask, world.max)  # (N, T)
        advantages = compute_advantages(
            process_rewards=process_rewards,
            correct=correct,
            response_mask=batch.response_mask,
            group_size=args.group_size,
            c_process=args.c_process,
        )  # (N, T)
        advantages = whiten(advantages=advantages, response_mask=batch.response_mask, total=world.sum)  # (N, T)
        # If all advantages are 0, skip the policy's updates: Adam's momentum would move it even without a gradient.
        learns = world.max(advantages.abs().max()) > 0

        with tracker.time("update"):
            decay = 1 - (step - 1) / args.steps if args.schedule == "linear" else 1.0
            for param_group in optimizer.param_groups:
                param_group["lr"] = args.learning_rate * min(decay, step / max(1, args.warmup_steps))

            for mini_batch in mini_batches:  # one optimizer step each
                if not learns:
                    continue

                # One number for all micro-batches of the mini-batch: its response tokens on all ranks.
                denominator = world.sum(batch.response_mask[mini_batch.rows].sum())

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
                        clip_low=args.clip,
                        clip_high=args.clip,
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
                        clip_low=args.clip,
                        clip_high=args.clip,
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
        run.end_step(step, batch, advantages=advantages, old_logprobs=old_logprobs)
    run.close()


if __name__ == "__main__":
    flags.launch(main, Args, EMBEDDED, __doc__)
