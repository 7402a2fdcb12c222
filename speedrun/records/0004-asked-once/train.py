"""GRPO that computes what texts begin with once: a prompt's responses, and all prompts. An entry of the speedrun.

It is 0003-beginnings/train.py, with more steps and with an engine that computes what all prompts begin with once, as
the trainer does (common/rollout/vllm_tails.py). It differs from grpo.py:

- Settled prompts. A prompt is first asked --first times. If all of these responses are right, it is settled: it is not
  asked again, and not trained on. The others are asked until they have --group-size responses. A prompt whose G
  responses would have k right ones is so trained on with probability 1 - C(k, first) / C(G, first). With 3 of 8 that is
  0.38 for k = 7, 0.64 for 6, 0.82 for 5 and 0.93 for 4. In expectation the gradient, before it is clipped, is that of
  GRPO with these weights. (A few settled prompts are asked again all the same: see asked_again().)
- Beginnings. Where responses to a prompt begin with the same tokens, these have the same log-probs. Each is computed
  once, with the advantages of all responses that have it. What all responses of a group have in common is laid behind
  the prompt, whose forward they share anyway. Responses that are equal to the end have no forward of their own. What
  all prompts have in common, the system prompt and the first words of the question, stands once in each micro-batch.
- The engine's log-probs are the old ones, which saves the trainer's own forward for them.
- There are no weights of --tis-cap, no KL term and no environments. Rows are packed.

    A_i   = (R_i - mean(R)) / (std(R) + eps)             over the G responses to one prompt; equal rewards give 0
    ratio = exp(logprobs - old_logprobs)
    L     = 1/S sum_i 1/|o_i| sum_t max(-A_i ratio, -A_i clip(ratio, 1 - clip_low, 1 + clip_high))

L is minimised. R is `batch.scores`, and std the sample standard deviation (G - 1). S is one constant: the responses of
a mini-batch, if no prompt were settled. Settled prompts count as responses whose loss is 0.

A rank asks B prompts, and U of them again. These give N = U G rows; row i answers the prompt i // G of them. T is the
longest response in tokens, n the number of rows in a micro-batch.

Run:    python speedrun/run.py NAME THIS_FILE --steps 180 --prompts-per-step 32 --group-size 8 --mini-batches 2
            --learning-rate 2e-5 --warmup-steps 2 --schedule linear
Result: see speedrun/README.md.
"""

import dataclasses
from typing import Literal

import torch
import torch.nn.functional as functional
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
    group_size: PositiveInt = 8  # G, the number of responses to each prompt that isn't settled.
    first: PositiveInt = 3  # Responses after which a prompt is settled, if all of them are right.
    max_response_tokens: PositiveInt = 1024  # A longer response is cut off.
    temperature: ranges.Temperature = 1.0  # Used for sampling and for all log-probs.
    # algorithm
    clip_low: ranges.PositiveFraction = 0.2  # The ratio is clipped at 1 - clip_low.
    clip_high: PositiveFloat = 0.2  # The ratio is clipped at 1 + clip_high.
    # optimization
    mini_batches: PositiveInt = 4  # Optimizer steps per pass. --prompts-per-step must be a multiple of this x ranks.
    epochs: PositiveInt = 1  # Passes over each rollout. Each visits the mini-batches in the same order.
    learning_rate: ranges.LearningRate = 1e-6  # Peak learning rate of the policy.
    schedule: Literal["constant", "linear"] = "constant"  # linear decays to learning_rate / steps in the last step.
    warmup_steps: NonNegativeInt = 10  # Steps in which the learning rate rises linearly.
    weight_decay: NonNegativeFloat = 0.0  # Weight decay of AdamW.
    max_grad_norm: PositiveFloat = 1.0  # Gradients are clipped to this norm.


# The defaults without --model: two-digit addition, learned on a CPU in minutes.
EMBEDDED = flags.EMBEDDED | {"steps": 52, "learning_rate": 2e-4}


def compute_advantages(rewards: torch.Tensor, group_size: int, eps: float = 1e-6) -> torch.Tensor:
    """(N,) -> (N,): z-score within each group. A group of equal rewards gives exactly 0.

    `constant` compares the rewards themselves, because rounding leaves the centred ones off 0: in float32 the mean of
    sixteen rewards of 0.7 is off by 6e-8, which would make |A| 0.06.
    """
    groups = rewards.view(-1, group_size)  # (U, G)
    centred = groups - groups.mean(dim=1, keepdim=True)
    constant = groups.amax(dim=1, keepdim=True) == groups.amin(dim=1, keepdim=True)
    advantages = centred / (groups.std(dim=1, keepdim=True) + eps)  # sample std (G - 1), the same as in verl and TRL
    return torch.where(constant, 0.0, advantages).view(-1)


def merge_beginnings(
    advantages: torch.Tensor, response_ids: list[list[int]], response_mask: torch.Tensor, group_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """(N,) and (N, T) mask -> two of (N, T): sums of the positive and of the negative A_i / |o_i| of each token.

    Equal tokens after equal beginnings of responses to one prompt are one token, which stands in the first of these
    rows. The others have 0 there. At one ratio the loss is linear in advantages of one sign, so one sum for each sign
    is enough: the clip cuts positive and negative ones at different ratios.
    """
    advantages = advantages / response_mask.sum(1).clamp(min=1)
    positive = torch.zeros(response_mask.shape, device=advantages.device)
    negative = torch.zeros_like(positive)
    first_rows = {}
    for row, ids in enumerate(response_ids):
        for t in range(len(ids)):
            first = first_rows.setdefault((row // group_size, tuple(ids[: t + 1])), row)
            positive[first, t] += advantages[row].clamp(min=0)
            negative[first, t] += advantages[row].clamp(max=0)
    return positive * response_mask, negative * response_mask


def common_beginnings(response_ids: list[list[int]], trained: list[bool], group_size: int) -> list[int]:
    """N rows -> N: how many tokens all trained responses of the row's group begin with.

    Each response keeps at least one token of its own, because a prompt can't be laid out without any.
    """
    lengths = []
    for first in range(0, len(response_ids), group_size):
        rows = range(first, first + group_size)
        responses = [response_ids[row] for row in rows if trained[row]]
        length = 0
        shortest = min(map(len, responses), default=0)
        while length < shortest - 1 and len({ids[length] for ids in responses}) == 1:
            length += 1
        lengths += [length] * group_size
    return lengths


def lay_behind_prompts(batch: Batch, beginnings: list[int]) -> Batch:
    """The batch with the beginning of each response moved to the end of its prompt. Its tensors stay as they are.

    So it is fit for batching.split() alone, whose micro-batches predict_merged() puts right. Rows that aren't trained
    may have a prompt that isn't their group's, and take no part.
    """
    rows = list(zip(batch.prompt_ids, batch.response_ids, beginnings))
    return dataclasses.replace(
        batch,
        prompt_ids=[prompt + response[:length] for prompt, response, length in rows],
        response_ids=[response[length:] for _, response, length in rows],
    )


def predict_merged(
    micro: batching.MicroBatch, response_ids: list[list[int]], is_merged: torch.Tensor, beginnings: list[int]
) -> batching.MicroBatch:
    """A micro-batch of lay_behind_prompts(), made to predict the tokens of is_merged (N, T) and no others.

    response_ids: as they were sampled. Some of the predicted tokens are behind a prompt now, where lay_out() of
    batching.py predicts nothing. `scatter` has their places in (n, T), also as they were sampled.
    """
    predictors, targets, scatter = [], [], []
    width = is_merged.shape[1]  # T
    rows = enumerate(micro.rows.tolist())
    start = micro.beginning  # of the prompt, in the packed row; what all prompts begin with stands before the first
    for prompt, rests in micro.group_lengths:  # without that, but with the beginning of the responses
        rest_start = start + prompt
        for rest, (number, row) in zip(rests, rows):  # rests first: zip then stops before the next group's row
            beginning = beginnings[row]
            for t in is_merged[row].nonzero().flatten().tolist():
                # The token before it predicts it. For all up to the first one of the rest, that is in the prompt.
                if t <= beginning:
                    predictor = start + prompt - beginning + t - 1
                else:
                    predictor = rest_start + t - beginning - 1
                predictors.append(predictor)
                targets.append(response_ids[row][t])
                scatter.append(number * width + t)
            rest_start += rest
        start = rest_start
    places = {"predictors": predictors, "targets": targets, "scatter": scatter}
    # Without a dtype, an empty list gives floats, which are no indices. A dummy of batching.pack() may be one.
    places = {key: torch.tensor(value, dtype=torch.long, device=micro.rows.device) for key, value in places.items()}
    # The mask of a dummy is False, and stays so.
    return dataclasses.replace(micro, **places, response_mask=is_merged[micro.rows] & micro.response_mask)


def policy_loss(
    logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    positive: torch.Tensor,
    negative: torch.Tensor,
    response_mask: torch.Tensor,
    *,
    clip_low: float,
    clip_high: float,
    denominator: float,
) -> torch.Tensor:
    """Scalar: the losses of the given rows' merged tokens, summed and divided by `denominator`.

    Tensors are (n, T). Log-probs outside the mask, NaN included, change nothing.
    positive, negative: from merge_beginnings(), which has divided them by |o_i|.
    denominator: responses of the whole mini-batch on all ranks, if no prompt were settled.
    """
    log_ratio = torch.where(response_mask.bool(), logprobs - old_logprobs, 0.0)
    ratio = log_ratio.clamp(-20, 20).exp()  # clamped to stay finite: an inf times advantage 0 would be NaN
    clipped_ratio = ratio.clamp(1 - clip_low, 1 + clip_high)
    per_token = torch.max(-positive * ratio, -positive * clipped_ratio)
    per_token = per_token + torch.max(-negative * ratio, -negative * clipped_ratio)
    return (per_token * response_mask).sum() / denominator


@torch.no_grad()
def clipped_tokens(logprobs, old_logprobs, positive, negative, response_mask, *, clip_low, clip_high) -> torch.Tensor:
    """How many merged tokens lose at least a part of their policy-loss gradient because their ratio was clipped."""
    response_mask = response_mask.bool()
    ratio = torch.where(response_mask, logprobs - old_logprobs, 0.0).exp()
    too_high = (positive > 0) & (ratio > 1 + clip_high)
    too_low = (negative < 0) & (ratio < 1 - clip_low)
    return ((too_high | too_low) & response_mask).sum()


def asked_again(correct: torch.Tensor, first: int, multiple: int) -> list[int]:
    """Indices of the prompts with a wrong response among their first ones, and of settled ones that fill them up.

    correct: (B x first,), 1 for a right response. Settled prompts are added until the number is a multiple of
    `multiple`. With that of --mini-batches, each mini-batch has as many groups as the others. At least `multiple` are
    returned, even if all are settled: a step needs a batch.
    """
    settled = correct.view(-1, first).all(1)  # (B,)
    chosen = (~settled).nonzero().flatten().tolist()
    others = settled.nonzero().flatten().tolist()
    missing = -len(chosen) % multiple if chosen else multiple
    return sorted(chosen + others[:missing])


def join(first: Batch, second: Batch, prompts: list[int]) -> Batch:
    """Groups of these prompts: all their responses of the first call, then those of the second, which asked only them.

    prompts: indices into the prompts of the first call.
    """
    n_first = len(first) // len(first.prompts)
    n_second = len(second) // len(second.prompts)
    order = []  # rows of the groups; those of `second` are numbered after those of `first`
    for place, prompt in enumerate(prompts):
        order += range(prompt * n_first, (prompt + 1) * n_first)
        order += range(len(first) + place * n_second, len(first) + (place + 1) * n_second)
    width = max(first.response_mask.shape[1], second.response_mask.shape[1])

    def listed(one: list, other: list) -> list:
        both = one + other
        return [both[row] for row in order]

    def padded(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        """(N, T) of both, with zeros on the right, in the order of the groups."""
        return torch.cat([functional.pad(values, (0, width - values.shape[1])) for values in (one, other)])[order]

    return Batch(
        prompt_ids=listed(first.prompt_ids, second.prompt_ids),
        response_ids=listed(first.response_ids, second.response_ids),
        response_mask=padded(first.response_mask, second.response_mask),
        rollout_logprobs=padded(first.rollout_logprobs, second.rollout_logprobs),
        truncated=torch.cat([first.truncated, second.truncated])[order],
        weight_versions=padded(first.weight_versions, second.weight_versions),
        prompts=second.prompts,
        responses=listed(first.responses, second.responses),
        results=listed(first.results, second.results),
    )


def check_args(args: Args) -> None:
    """Refuse flags that the formulas above cannot work with. Raises BadInput."""
    if args.group_size < 2:
        raise errors.BadInput(f"--group-size {args.group_size}: a group of one always equals its own mean; use >= 2")
    if not args.first < args.group_size:
        raise errors.BadInput(f"--first {args.first}: it must be smaller than --group-size {args.group_size}")
    if args.layout.max_inflight_batches > 1:
        raise errors.BadInput("--max-inflight-batches > 1: the engine's log-probs would be those of older weights")
    if args.environment:
        raise errors.BadInput("--environment: prompts are asked in two calls here, and neither has turns")


def main(args: Args) -> None:
    check_args(args)
    # Checks the flags, the data and the model files before any weights are loaded.
    settings = prepare(args, ["policy"])
    if job.nothing_to_do(settings):  # a dry run, or a run whose last step is done
        return
    if settings.compute.packing == "off" or settings.compute.sequence_parallel > 1:
        raise errors.BadInput("--packing off, --sequence-parallel: predict_merged() needs whole rows that are packed")

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
        """Sample and grade this rank's prompts: --first responses to each, then more to those that aren't settled."""

        def ask(prompts: list, n: int, call: int, with_metrics: bool) -> Batch:
            grading = sampler.grade_early(prompts)  # grades each response as soon as it is finished
            with sampler.time("rollout"):
                rollout = engine.generate(
                    [prompt.ids for prompt in prompts],
                    n,
                    args.temperature,
                    args.max_response_tokens,
                    seed=args.seed * 2**20 + 2 * step + call,  # one for each call
                    done=grading,
                )
            return sampler.grade(prompts, rollout, grading, with_metrics=with_metrics)

        prompts = sampler.prompts(args.prompts_per_step)  # this rank's share of them
        first = ask(prompts, args.first, call=0, with_metrics=True)
        again = asked_again(first.correct, args.first, args.mini_batches)
        # Without metrics, because these prompts are the harder ones. So reward/*, group/* and response/* are of the
        # first call alone, and a group there has --first responses.
        n_second = args.group_size - args.first
        second = ask([prompts[index] for index in again], n_second, call=1, with_metrics=False)
        engine.sleep()  # frees memory until the push of new weights, if engine and trainer share a GPU
        return join(first, second, again)

    for step, batch in run.steps(sample):
        advantages = compute_advantages(rewards=batch.scores, group_size=args.group_size)  # (N,)
        # If the responses of one of the two calls could not be graded, the others are no whole group.
        graded = batch.response_mask.any(1).view(-1, args.group_size).all(1)  # (U,)
        advantages = torch.where(graded.repeat_interleave(args.group_size), advantages, 0.0)
        # (N, T) each
        positive, negative = merge_beginnings(advantages, batch.response_ids, batch.response_mask, args.group_size)

        # Only tokens with a gradient are predicted, and only their rows need a forward. A token that all responses of a
        # group have in common is among them. Its A_i / |o_i| sum to 0 only if all |o_i| are equal, and even then the
        # clip may cut the positive ones alone.
        is_merged = (positive != 0) | (negative != 0)  # (N, T)
        has_gradient = is_merged.any(1)  # (N,)
        beginnings = common_beginnings(batch.response_ids, has_gradient.tolist(), args.group_size)
        shortened = lay_behind_prompts(batch, beginnings)
        of_all_prompts = batching.common_beginning(batch, has_gradient.nonzero().flatten())
        mini_batches = batching.split(
            shortened, args.mini_batches, has_gradient, settings.compute, world, beginning=of_all_prompts
        )

        # The engine has sampled with the weights behind the "old" log-probs, so its own are the same up to rounding.
        # Until the first optimizer step the trainer has these weights, too. So the largest gap (mismatch/) is that of
        # the first mini-batch; the mean counts all others as 0.
        old_logprobs = batch.rollout_logprobs  # (N, T)
        trainer_logprobs = old_logprobs.clone()  # those of the trainer where it had a forward with the same weights

        # One number for all micro-batches and steps, however many prompts are settled.
        denominator = args.prompts_per_step * args.group_size / args.mini_batches

        with tracker.time("update"):
            decay = 1 - (step - 1) / args.steps if args.schedule == "linear" else 1.0
            for param_group in optimizer.param_groups:
                param_group["lr"] = args.learning_rate * min(decay, step / max(1, args.warmup_steps))

            # One optimizer step each; the list repeats for each epoch.
            for number, mini_batch in enumerate(mini_batches * args.epochs):
                # Ranks with fewer micro-batches get dummies (mask False), so if this rank has none, no rank has any.
                # Then skip the optimizer step: Adam's momentum would move the weights even without a gradient.
                if not mini_batch.micro_batches:
                    continue

                for shortened_micro in mini_batch.micro_batches:
                    micro = predict_merged(shortened_micro, batch.response_ids, is_merged, beginnings)
                    # (n, T) each. Only the log-probs have a gradient.
                    logprobs, entropy = model.response_logprobs(policy, micro, args.temperature)
                    loss = policy_loss(
                        logprobs=logprobs,
                        old_logprobs=old_logprobs[micro.rows],
                        positive=positive[micro.rows],
                        negative=negative[micro.rows],
                        response_mask=micro.response_mask,
                        clip_low=args.clip_low,
                        clip_high=args.clip_high,
                        denominator=denominator,
                    )
                    # Gradients add up over the micro-batches. After the mini-batch's last backward they are also summed
                    # over the ranks; FSDP would average, but model.load turns that off.
                    loss.backward()
                    if number == 0:
                        given = trainer_logprobs[micro.rows]
                        trainer_logprobs[micro.rows] = torch.where(micro.response_mask, logprobs.detach(), given)

                    clipped = clipped_tokens(
                        logprobs=logprobs,
                        old_logprobs=old_logprobs[micro.rows],
                        positive=positive[micro.rows],
                        negative=negative[micro.rows],
                        response_mask=micro.response_mask,
                        clip_low=args.clip_low,
                        clip_high=args.clip_high,
                    )
                    # train/entropy and train/clip_frac are means over the merged tokens, so equal ones count once. The
                    # entropy is higher than that of grpo.py, which has the mean over all tokens.
                    tokens = micro.response_mask.sum()
                    tracker.loss("loss/policy", loss, micro)
                    tracker.mean("train/entropy", (entropy * micro.response_mask).sum(), tokens)
                    tracker.mean("train/clip_frac", clipped, tokens)

                # FSDP's parameters are DTensors, and so is their norm.
                grad_norm = torch.nn.utils.clip_grad_norm_(policy.parameters(), args.max_grad_norm).full_tensor()
                guards.stop_unless_finite(tracker, "train/grad_norm", grad_norm)  # before NaN reaches the weights
                tracker.mean("train/grad_norm", grad_norm)
                optimizer.step()
                optimizer.zero_grad()

        with tracker.time("sync"):
            weight_sync.push(policy, engine)  # the engine wakes with the new weights
        run.end_step(step, batch, advantages=advantages, old_logprobs=trainer_logprobs, rows=has_gradient)
    run.close()


if __name__ == "__main__":
    flags.launch(main, Args, EMBEDDED, __doc__)
