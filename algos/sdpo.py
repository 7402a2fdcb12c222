"""SDPO -- self-distillation policy optimization (RL via Self-Distillation, arXiv:2601.20802, eq. 1).

The policy teaches itself. As the student it answers the prompt. As the teacher it reads the same response after a
prompt that also shows a hint, and says which token should come next. The student moves towards it. The hint is another
right response of the group, or the row's reference answer or its written solution (--hint).

    p_it  = policy(. | prompt_i, y_i,<t)                 the student's distribution, which has the gradient
    q_it  = teacher(. | prompt_i with hint_i, y_i,<t)    the teacher's, without a gradient
    L     = sum_it h_i sum_v p_it(v) (log p_it(v) - log q_it(v)) / sum_it h_i m_it

or, with --no-full-vocabulary, from the sampled tokens alone. In a step's first update, each token's gradient is,
given the tokens before it, an unbiased estimate of its gradient above:

    A_it  = log q_it(y_it) - old_it        of the sampled token y_it: -A_it estimates the reverse KL to the teacher
    ratio = exp(logprobs - old_logprobs)
    L     = sum_it h_i max(-A_it ratio, -A_it clip(ratio, 1 - clip_low, 1 + clip_high)) / sum_it h_i m_it

h_i is 1 if response i has a hint, and 0 otherwise. sum_it h_i m_it is the number of response tokens in the whole
optimizer mini-batch, on all ranks, of the responses that have a hint. A response without one has no teacher and no
loss, and counts in no denominator. With --hint peer the hint is another right response of the group, so a lone right
response has none. With --hint answer or solution it is that of the prompt, if there is one. A response has no hint if
it was not graded, if prompt, hint and response together do not fit into the model, or if the hint spells a control
token such as <|im_end|>.

A response is right if the first --reward gives it an acc above 0, or a score above 0 if that reward has no acc. So use
a reward that knows right and wrong: with a dense score, nearly all responses would be right.

For sampled tokens --tis-cap works as in grpo.py; L leaves out its weights. grpo.py also explains the log-probs and the
letters N, B, G, T and n.

The teacher's weights follow the policy's after each step: teacher = (1 - r) teacher + r policy, r = --teacher-rate.
With 1 the teacher is the policy itself, as in eq. 1, and there is no second model: it has the current weights in every
mini-batch (with --no-full-vocabulary those from before the step). With 0 it is the policy before training. The default,
0.05, is that of the authors' code; on the embedded task training collapses with 1.

Differs from opd.py: the teacher's weights and its prompt; which responses have a teacher; the whole vocabulary by
default.

Differs from the paper, which has two recipes (table 12). The defaults here mix them:
- without feedback: Jensen-Shannon divergence, a teacher rate of 0.05, a learning rate of 1e-5, one update a rollout
- with feedback: reverse KL, a teacher rate of 0.01, a learning rate of 1e-6, one update a question
Four things of the paper are not here: a teacher within a trust region (eq. 10), GRPO's advantages mixed in (eq. 3), an
environment's feedback in the hint, and a lone right response as its own hint (table 2; the authors' scripts turn that
off). --hint answer and solution are not in the paper. OPSD (arXiv:2601.18734) has a teacher that reads a solution.

Differs from the authors' code:
- The divergence is exact. Theirs takes the student's top 20 or 100 tokens, and a tail.
- The mean is over the tokens that have a teacher. Theirs is over responses, and one without a teacher counts as 0.
- There are no importance weights with the whole vocabulary. Theirs go up to 2.
- With sampled tokens there is PPO's clip. Their advantage is computed again from the current student.
- A peer's thinking stays in the hint. Theirs is removed.

Run:    python algos/sdpo.py                                            (embedded arithmetic, 2 minutes on two cores)
        torchrun --nproc-per-node 8 algos/sdpo.py --model Qwen/Qwen2.5-7B-Instruct
Result: embedded arithmetic, greedy, mean of three seeds: 96.2 % from 55.9 %, from a start of its own that can read a
        hint (baselines/hints-start). On GPUs: not yet run.
"""

import dataclasses
import re
from functools import partial
from typing import Literal

import torch
from pydantic import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from common import errors, placement, weight_sync
from common.data import arithmetic
from common.data.prompts import Prompt
from common.preflight import flags, ranges
from common.preflight.prepare import prepare
from common.rollout import engines
from common.run import guards, hints, job
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
    hint: Literal["peer", "answer", "solution"] = "peer"
    """What the teacher sees: another right response of the group, or the row's answer or solution."""
    hint_template: str = "{prompt}\n\nThis is a right solution:\n\n{hint}\n\nNow solve the problem yourself."
    """What the user says to the teacher, with {prompt} and {hint}. For --hint answer, call the hint an answer."""
    teacher_rate: ranges.Fraction = 0.05
    """Share by which the teacher's weights move towards the policy's after each step. 1: the teacher is the policy."""
    full_vocabulary: bool = True  # Compare the whole distribution at each token, not only the sampled token.
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
EMBEDDED = flags.EMBEDDED | {
    "steps": 60,
    "learning_rate": 3e-4,
    "hint_template": "{prompt}{hint}\n{prompt}",  # as the start has learned it: 47+38=SOLUTION, a new line, 47+38=
}


def right_peers(correct: torch.Tensor, group_size: int) -> torch.Tensor:
    """(N,) -> (N,) int64: for each response, the row of the first right one of its group but itself, or else -1.

    correct: 1 for a right response, otherwise 0. Rows are group-major: each group is `group_size` consecutive rows.
    """
    right = correct.tolist()  # one copy from the GPU, not one for each element
    peers = [-1] * len(right)
    for row in range(len(right)):
        first = row // group_size * group_size  # the group's first row
        for peer in range(first, first + group_size):
            if right[peer] and peer != row:
                peers[row] = peer
                break
    return torch.tensor(peers, device=correct.device)


def with_hint(text: str, hint: str, template: str) -> str:
    """The template with prompt and hint in their places: what the user says to the teacher.

    Both are filled in at once. One after the other would also replace a {hint} that the prompt itself spells.
    """
    parts = {"{prompt}": text, "{hint}": hint}
    return re.sub(r"\{prompt\}|\{hint\}", lambda found: parts[found[0]], template)


@torch.no_grad()
def follow(teacher: torch.nn.Module, policy: torch.nn.Module, rate: float) -> None:
    """teacher = (1 - rate) teacher + rate policy, in place, on this rank's shards. Both are of one architecture."""
    for teacher_weight, policy_weight in zip(teacher.parameters(), policy.parameters(), strict=True):
        shard = teacher_weight.to_local()
        shard.lerp_(policy_weight.to_local().to(shard.device), rate)  # --offload may keep them on different devices


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
    if args.hint == "peer" and args.group_size < 2:
        raise errors.BadInput(f"--group-size {args.group_size}: a response has no other to learn from; use >= 2")
    if "{hint}" not in args.hint_template or "{prompt}" not in args.hint_template:
        raise errors.BadInput("--hint-template: needs {prompt} and {hint}, where the prompt and the hint go")
    if args.environment:
        raise errors.BadInput("--environment: a conversation of several turns cannot be given a hint")
    if args.teacher_rate < 1 and args.compute.lora_rank:
        raise errors.BadInput("--lora-rank: needs --teacher-rate 1, because a second model as teacher has no adapters")
    if args.full_vocabulary and args.compute.sequence_parallel > 1:
        raise errors.BadInput(
            "--sequence-parallel: add --no-full-vocabulary; a hint shifts the teacher's slices, which would not match"
        )
    if args.full_vocabulary and args.tis_cap:
        raise errors.BadInput(
            "--tis-cap: --full-vocabulary has no sampled token that it could weigh; add --no-full-vocabulary"
        )
    if args.full_vocabulary and (args.clip_low, args.clip_high) != (Args.clip_low, Args.clip_high):
        raise errors.BadInput("--clip-low, --clip-high: --full-vocabulary has no ratio that could be clipped")
    if args.layout.max_inflight_batches > 1 and not (args.tis_cap or args.full_vocabulary):
        raise errors.BadInput("--max-inflight-batches > 1: its tokens are from older weights; add --tis-cap 2")


def hint_of_row(prompt: Prompt, hint: str) -> str | None:
    """The row's "answer" or "solution". None: it has none, or one that is no text, such as turns with tool calls."""
    text = prompt.answer if hint == "answer" else prompt.solution
    return text if text and isinstance(text, str) else None


def check_hints(args: Args, prompts: list[Prompt], hinter: hints.Hinter) -> None:
    """Refuse data without texts for hints, and prompts that do not fit with their hint. Raises BadInput."""
    if args.hint == "peer":
        # The hints will be responses, whose lengths nobody knows yet. The prompts must at least fit with an empty hint.
        hinter.check(prompts, [""] * len(prompts))
        return
    known = [(prompt, hint_of_row(prompt, args.hint)) for prompt in prompts]
    usable = [(prompt, text) for prompt, text in known if text is not None and not hinter.spells_control_token(text)]
    if not usable:
        raise errors.BadInput(
            f'--hint {args.hint}: no row of --dataset has a text in "{args.hint}" that spells no control token; '
            f"name its column with --columns {args.hint}=COLUMN, or use --control-tokens text"
        )
    hinter.check(*zip(*usable))


def main(args: Args) -> None:
    if args.model == "embedded":
        # The warm start of the other files has never seen a hint.
        args = dataclasses.replace(args, model=str(arithmetic.HINTS_START))
    check_args(args)
    # Checks the flags, the data and the model files before any weights are loaded.
    settings = prepare(
        args,
        models=["policy"] if args.teacher_rate == 1 else ["policy", "teacher"],
        teacher_in_update=args.full_vocabulary,
    )
    # batch.correct is the verdict of the first reward. batch.scores, the weighted sum of all, is not used here.
    further = list(settings.reward.weights)[1:]
    unused = [name for name in further if settings.reward.weights[name]]
    if args.hint == "peer" and unused:
        raise errors.BadInput(
            f"--reward {' '.join(unused)}: --hint peer uses only the first reward, for right or wrong. With a weight "
            "of 0 (NAME=0) the others are only reported; a single function can grade rows of several kinds"
        )
    hinter = hints.Hinter(settings, partial(with_hint, template=args.hint_template))
    check_hints(args, settings.prompts, hinter)
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
    trained = {"policy": (policy, optimizer)}
    if args.teacher_rate == 1:
        teacher = distillation.own_teacher(policy)  # the same object: no second copy of the weights
    else:
        teacher = distillation.load_teacher(
            settings.model,
            policy,
            world,
            settings.dtype,
            settings.compute,
            offload=args.offload != "none",  # both "others" and "all" offload it
            moves=True,  # it follows the policy in float32; bfloat16 would round most of its small steps to nothing
        )
        trained["teacher"] = (teacher, None)  # it has no optimizer, but a checkpoint needs it
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
    # also: a resumed run must find the same hints. The answers are looked at in any case.
    also = [hint_of_row(prompt, "solution") for prompt in settings.prompts] if args.hint == "solution" else None
    run = job.start(settings, world, engine, trained, also)
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
                reply=grading.reply,  # None, because --environment is refused
            )
            # An engine that shares the trainer's device frees memory until the push of new weights. An engine
            # on devices of its own, as --max-inflight-batches > 1 needs, does nothing here.
            engine.sleep()
        return sampler.grade(prompts, rollout, grading)

    for step, batch in run.steps(sample):
        # The hint of each of the N responses, None where there is none.
        if args.hint == "peer":
            peers = right_peers(correct=batch.correct, group_size=args.group_size)  # (N,)
            hint_texts = [batch.responses[peer] if peer >= 0 else None for peer in peers.tolist()]
        else:
            hint_texts = [hint_of_row(batch.prompts[row // args.group_size], args.hint) for row in range(len(batch))]
        # The same responses after their prompts with hints. A response goes without one if the two would not fit.
        hinted_batch, has_hint = hinter.batch(batch, hint_texts, tracker)  # has_hint: (N,) bool
        # A response without a hint has no teacher, so it is in no micro-batch.
        has_gradient = has_hint  # (N,)
        taught = batch.response_mask & has_hint[:, None]  # (N, T) bool: tokens that have a teacher

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
                # Hints change the lengths of the prompts, so the teacher's rows are packed separately.
                hinted_rows = has_hint.nonzero().flatten()
                hinted_micro_batches = batching.pack(hinted_batch, hinted_rows, settings.compute, world)
                teacher_logprobs = model.frozen_logprobs(
                    teacher, hinted_batch, hinted_micro_batches, args.temperature
                )  # (N, T)
                advantages = compute_advantages(
                    old_logprobs=old_logprobs,
                    teacher_logprobs=teacher_logprobs,
                    response_mask=taught,
                )  # (N, T)
                tracker.mean("teacher/kl", -advantages.sum(), taught.sum())

        with tracker.time("update"):
            decay = 1 - (step - 1) / args.steps if args.schedule == "linear" else 1.0
            for param_group in optimizer.param_groups:
                param_group["lr"] = args.learning_rate * min(decay, step / max(1, args.warmup_steps))

            for mini_batch in mini_batches * args.epochs:  # one optimizer step each; the list repeats for each epoch
                # Ranks with fewer micro-batches get dummies (mask False), so if this rank has none, no rank has any.
                # Then skip the optimizer step: Adam's momentum would move the weights even without a gradient.
                if not mini_batch.micro_batches:
                    continue

                # One number for all micro-batches of the mini-batch: its tokens that have a teacher, on all ranks.
                denominator = world.sum(taught[mini_batch.rows].sum())

                for micro in mini_batch.micro_batches:
                    if args.full_vocabulary:
                        # (n, T) each; only the divergences have a gradient.
                        divergences, entropy = distillation.divergences(
                            policy,
                            teacher,
                            micro,
                            args.temperature,
                            batching.after_prompts_of(hinted_batch, micro, settings.compute),
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
            # One step of the moving average for each rollout, not for each mini-batch. It needs shards: reshard first.
            if teacher is not policy:
                follow(teacher, policy, args.teacher_rate)

        with tracker.time("sync"):
            weight_sync.push(policy, engine)  # the engine wakes with the new weights
        run.end_step(step, batch, advantages=advantages, old_logprobs=old_logprobs, rows=has_gradient)
    run.close()


if __name__ == "__main__":
    flags.launch(main, Args, EMBEDDED, __doc__)
