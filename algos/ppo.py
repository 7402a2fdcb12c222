"""PPO -- Proximal Policy Optimization with a critic (arXiv:1707.06347, eq. 7; GAE arXiv:1506.02438, eq. 16).

    r_t     = -kl_coef (old_t - ref_t), plus the score on the last token  the KL to the reference is part of the reward
    delta_t = r_t + V_{t+1} - V_t,   A_t = delta_t + lam A_{t+1}                                        (gamma = 1)
    returns = A + V, with an A of its own: it has critic_lam in the place of lam
    ratio   = exp(logprobs - old_logprobs)
    L       = sum_it max(-A_it ratio, -A_it clip(ratio, 1 - clip, 1 + clip)) / sum_it m_it             (A whitened)
    L_V     = 1/2 sum_it max((V - returns)^2, (V_old + clip(V - V_old, +-value_clip) - returns)^2) / sum_it m_it

V_t is the critic's value before response token t, 0 after the last one: a response cut off by --max-response-tokens
ends like any other. sum_it m_it is the number of response tokens in the whole optimizer mini-batch, on all ranks.
The mask m is False on tokens that the policy did not sample, and on all responses to a prompt if one of them could not
be graded. The recursion skips these tokens, wherever they stand.

--tis-cap works as in grpo.py; L leaves out its weights. grpo.py also explains the log-probs and the letters N, B, G, T
and n.

Differs from grpo.py: a critic, with its own weights and optimizer, in place of the group; one advantage for each
token; the KL sits in the reward; every token of the mini-batch weighs the same. --group-size 1 will do.

Differs from the papers:
- Advantages are whitened, and the value loss is clipped. Both are from OpenAI's baselines.
- There is no shared network and no entropy bonus. PPO's Atari runs have both (eq. 9), and its MuJoCo runs neither.
- The critic starts as the policy with a zero head, and its --critic-learning-rate stays constant.
- The critic may train alone for --critic-warmup-steps, with lam = 1 for its targets, and may have another lam than the
  actor. Both are VC-PPO's (arXiv:2503.01491).
- kl_coef is 0 by default.

Run:    python algos/ppo.py                                             (embedded arithmetic, 4 minutes on two cores)
        torchrun --nproc-per-node 8 algos/ppo.py --model Qwen/Qwen2.5-0.5B-Instruct --kl-coef 0.001
Result: embedded arithmetic, greedy, mean of three seeds: 85.5 % from 53.5 %. On GPUs: not yet run.
"""

import dataclasses
from collections.abc import Callable
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
    prompts_per_step: PositiveInt = 256  # Prompts of one step, on all ranks together.
    group_size: PositiveInt = 1  # G, the number of responses to each prompt. The critic needs no group.
    max_response_tokens: PositiveInt = 1024  # A longer response is cut off.
    temperature: ranges.Temperature = 1.0  # Used for sampling and for all log-probs.
    # algorithm
    clip: ranges.PositiveFraction = 0.2  # epsilon of eq. 7: the ratio is clipped at 1 - clip and 1 + clip.
    tis_cap: ranges.WeightCap = 0.0  # Cap of the weight exp(old_logprobs - rollout_logprobs), often 2; 0 turns it off.
    value_clip: PositiveFloat = 0.2  # V - V_old is clipped at +- this, and L_V takes the larger of both errors.
    lam: ranges.Fraction = 1.0  # lambda of GAE (eq. 16 of the GAE paper) for the advantages.
    critic_lam: ranges.Fraction = 1.0  # lambda of GAE for the returns that the critic learns.
    critic_warmup_steps: NonNegativeInt = 0  # First of --steps: only the critic learns. --schedule begins after them.
    kl_coef: NonNegativeFloat = 0.0  # Weight of the KL term. With 0 the reference policy is never loaded.
    # optimization
    mini_batches: PositiveInt = 4  # Optimizer steps per pass. --prompts-per-step must be a multiple of this x ranks.
    epochs: PositiveInt = 1  # Passes over each rollout. Each visits the mini-batches in the same order.
    learning_rate: ranges.LearningRate = 1e-6  # Peak learning rate of the policy.
    critic_learning_rate: ranges.LearningRate = 1e-5  # Learning rate of the critic; it stays constant.
    schedule: Literal["constant", "linear"] = "constant"  # linear decays to learning_rate / steps in the last step.
    warmup_steps: NonNegativeInt = 10  # Steps in which the rate rises linearly. With a decay, the lower of both counts.
    weight_decay: NonNegativeFloat = 0.0  # Weight decay of AdamW.
    max_grad_norm: PositiveFloat = 1.0  # Gradients are clipped to this norm.


# The defaults without --model: two-digit addition, learned on a CPU in minutes. flags.EMBEDDED has five more, such as
# --max-response-tokens 48 and --schedule linear.
EMBEDDED = flags.EMBEDDED | {
    "steps": 50,
    "prompts_per_step": 64,
    "group_size": 4,
    "learning_rate": 1.5e-4,
    "critic_learning_rate": 1e-3,
}


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
    token_rewards: torch.Tensor,
    values: torch.Tensor,
    response_mask: torch.Tensor,
    gamma: float,
    lam: float,
    bootstrap_value: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(N, T) each -> advantages and returns, (N, T) each, by GAE. 0 outside the mask, and not whitened.

    bootstrap_value: (N,), the value after the last token, for responses that were cut off. main() leaves it at 0.
    """
    advantages = torch.zeros_like(values)
    next_advantage = torch.zeros_like(values[:, 0])  # (N,) advantage of the next response token
    next_value = next_advantage if bootstrap_value is None else bootstrap_value  # (N,)
    for t in reversed(range(values.shape[1])):
        in_response = response_mask[:, t].bool()  # (N,)
        delta = token_rewards[:, t] + gamma * next_value - values[:, t]  # (N,)
        # A token outside the mask leaves both as they are, so it costs no discount.
        next_advantage = torch.where(in_response, delta + gamma * lam * next_advantage, next_advantage)
        next_value = torch.where(in_response, values[:, t], next_value)
        advantages[:, t] = torch.where(in_response, next_advantage, 0.0)
    returns = torch.where(response_mask.bool(), advantages + values, 0.0)
    return advantages, returns


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


def value_loss(values, old_values, returns, response_mask, *, clip: float, denominator: float) -> torch.Tensor:
    """Scalar: half the larger squared error of V and of V clipped near V_old, summed and divided by `denominator`.

    All are (n, T). Values outside the mask, NaN included, change nothing. denominator: the same as in policy_loss.
    """
    mask = response_mask.bool()
    values, old_values, returns = (torch.where(mask, x, 0.0) for x in (values, old_values, returns))
    near = old_values + (values - old_values).clamp(-clip, clip)
    squared_errors = torch.max((values - returns).square(), (near - returns).square())  # (n, T)
    return 0.5 * squared_errors.sum() / denominator


def explained_variance(
    values: torch.Tensor, returns: torch.Tensor, response_mask: torch.Tensor, total: Callable = float
) -> float:
    """1 - Var(returns - values) / Var(returns) over the response tokens; 0 for constant returns.

    total: sums a number over the ranks (World.sum). The default, float, adds nothing: for one rank alone.
    """
    count = max(1, total(response_mask.sum()))

    def variance(x: torch.Tensor) -> float:
        x = x[response_mask.bool()].double()
        return total(x.square().sum()) / count - (total(x.sum()) / count) ** 2

    spread = variance(returns)
    return 1 - variance(returns - values) / spread if spread > 1e-12 else 0.0


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
    if args.critic_warmup_steps >= args.steps:
        raise errors.BadInput(
            f"--critic-warmup-steps {args.critic_warmup_steps} leaves nothing of --steps {args.steps}"
        )
    if args.layout.max_inflight_batches > 1 and not args.tis_cap:
        raise errors.BadInput("--max-inflight-batches > 1: its tokens are from older weights; add --tis-cap 2")


def main(args: Args) -> None:
    check_args(args)
    models = ["policy"] if args.kl_coef == 0 else ["policy", "reference"]
    # Checks the flags, the data and the model files before any weights are loaded.
    settings = prepare(args, models, value_heads=("critic",))
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
    critic = model.load(
        settings.model,
        world,
        settings.dtype,
        settings.compute,
        offload=args.offload != "none",
        value_head=True,
    )
    critic_optimizer = torch.optim.AdamW(
        critic.parameters(),
        lr=args.critic_learning_rate,
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
    run = job.start(settings, world, engine, {"policy": (policy, optimizer), "critic": (critic, critic_optimizer)})
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
        # The critic learns from every graded response, and whitening gives nearly every token an advantage.
        has_gradient = batch.response_mask.any(1)  # (N,) True for graded rows

        # While the critic warms up, only the critic learns, from Monte Carlo returns.
        warming_up = step <= args.critic_warmup_steps

        # The rollout is packed once. The same micro-batches serve all log-probs and the training.
        mini_batches = batching.split(batch, args.mini_batches, has_gradient, settings.compute, world)
        micro_batches = [micro for mini_batch in mini_batches for micro in mini_batch.micro_batches]

        with tracker.time("logprobs"):
            # "Old" is the policy before this step's updates. Rows without a forward keep 0. The first update computes
            # the same log-probs once more, with the same weights and packing, so its ratio is 1 (on a CPU exactly).
            old_logprobs = model.frozen_logprobs(policy, batch, micro_batches, args.temperature)  # (N, T)
            old_values = model.frozen_values(critic, batch, micro_batches)  # (N, T)
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
        # GAE runs twice: the policy (--lam) and the critic (--critic-lam) may have different lambdas.
        advantages, _ = compute_advantages(
            token_rewards=token_rewards,
            values=old_values,
            response_mask=batch.response_mask,
            gamma=1.0,
            lam=args.lam,
        )  # (N, T)
        _, returns = compute_advantages(
            token_rewards=token_rewards,
            values=old_values,
            response_mask=batch.response_mask,
            gamma=1.0,
            lam=1.0 if warming_up else args.critic_lam,
        )  # (N, T)
        advantages = whiten(advantages=advantages, response_mask=batch.response_mask, total=world.sum)  # (N, T)
        # If all advantages are 0, skip the policy's updates: Adam's momentum would move it even without a gradient.
        learns = world.max(advantages.abs().max()) > 0
        explained = explained_variance(old_values, returns, batch.response_mask, total=world.sum)
        tracker.mean("critic/explained_variance", explained)

        with tracker.time("update"):
            # The policy's schedule begins after the critic's warm-up. Until then policy_step is 0 or less, and the
            # policy's optimizer makes no step.
            policy_step = step - args.critic_warmup_steps
            policy_steps = args.steps - args.critic_warmup_steps
            decay = 1 - (policy_step - 1) / policy_steps if args.schedule == "linear" else 1.0
            for param_group in optimizer.param_groups:
                param_group["lr"] = args.learning_rate * min(decay, policy_step / max(1, args.warmup_steps))

            for mini_batch in mini_batches * args.epochs:  # one optimizer step each; the list repeats for each epoch
                # Ranks with fewer micro-batches get dummies (mask False), so if this rank has none, no rank has any.
                # Then skip the optimizer step: Adam's momentum would move the weights even without a gradient.
                if not mini_batch.micro_batches:
                    continue

                # One number for all micro-batches of the mini-batch: its response tokens on all ranks.
                denominator = world.sum(batch.response_mask[mini_batch.rows].sum())

                for micro in mini_batch.micro_batches:
                    values = model.response_values(critic, micro)  # (n, T)
                    loss = value_loss(
                        values=values,
                        old_values=old_values[micro.rows],
                        returns=returns[micro.rows],
                        response_mask=micro.response_mask,
                        clip=args.value_clip,
                        denominator=denominator,
                    )
                    loss.backward()
                    tracker.loss("loss/value", loss, micro)
                grad_norm = torch.nn.utils.clip_grad_norm_(critic.parameters(), args.max_grad_norm).full_tensor()
                guards.stop_unless_finite(tracker, "critic/grad_norm", grad_norm)
                tracker.mean("critic/grad_norm", grad_norm)
                critic_optimizer.step()
                critic_optimizer.zero_grad()
                if warming_up or not learns:
                    continue

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
        run.end_step(
            step,
            batch,
            advantages=advantages,
            old_logprobs=old_logprobs,
            rows=has_gradient,
            values=old_values,
        )
    run.close()


if __name__ == "__main__":
    flags.launch(main, Args, EMBEDDED, __doc__)
