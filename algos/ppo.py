"""PPO -- Proximal Policy Optimization with a critic (arXiv:1707.06347, eq. 7; GAE arXiv:1506.02438, eq. 16).

    r_t     = -kl_coef (old_t - ref_t), plus the score on the last token  the KL to the reference is part of the reward
    delta_t = r_t + V_{t+1} - V_t,   A_t = delta_t + lam A_{t+1},   returns_t = A_t + V_t               (gamma = 1)
    ratio   = exp(logprobs - old_logprobs)
    L       = sum_it max(-A_it ratio, -A_it clip(ratio, 1 - clip, 1 + clip)) / sum_it m_it             (A whitened)
    L_V     = 1/2 sum_it max((V - returns)^2, (V_old + clip(V - V_old, +-value_clip) - returns)^2) / sum_it m_it

V_t is the critic's value before response token t, 0 after the last one: a response cut off by --max-response-tokens
ends like any other. sum_it m_it is the number of response tokens in the whole optimizer mini-batch, on all ranks.
Tokens that the policy did not choose (mask False) are skipped by the recursion, wherever they stand.

Differs from grpo.py: a critic, with its own weights and optimizer, in place of the group; advantages by token; the KL
sits in the reward; every token of the mini-batch weighs the same. --group-size 1 will do.

Differs from the papers: the critic starts as the policy with a zero head, keeps its own --critic-learning-rate and
may train alone for --critic-warmup-steps, with lam = 1 for its targets; actor and critic may have different lam (the
warm-up and the two lam are VC-PPO's, arXiv:2503.01491). kl_coef 0 by default.

Run:    python algos/ppo.py                                             (embedded arithmetic, 4 minutes on two cores)
        torchrun --nproc-per-node 8 algos/ppo.py --model Qwen/Qwen2.5-0.5B-Instruct --steps 400
            --kl-coef 0.001 --max-response-tokens 512
Result: embedded arithmetic, greedy, mean of three seeds: 84.0 % from 53.5 %. On GPUs: not yet reproduced.
"""

import dataclasses
from functools import partial
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
    prompts_per_step: int = 256  # Prompts of one step, on all ranks together.
    group_size: int = 1  # G, the number of responses to each prompt. The critic needs no group.
    max_response_tokens: int = 1024  # A longer response is cut off.
    temperature: float = 1.0  # Used for sampling and for the policy's log-probs.
    # algorithm
    clip: float = 0.2  # epsilon of eq. 7: the ratio is clipped at 1 - clip and 1 + clip.
    tis_cap: float = 0.0  # Cap of the weight exp(old_logprobs - rollout_logprobs); 2 is common. 0 turns it off.
    value_clip: float = 0.2  # A value that has moved towards its return by more has no gradient.
    lam: tuple[float, float] = (1.0, 1.0)
    """lambda of GAE (eq. 16 of the GAE paper): for the advantages, and for the returns that the critic learns."""
    critic_warmup_steps: int = 0  # Steps at the start in which only the critic learns. --schedule begins after them.
    kl_coef: float = 0.0  # beta, the weight of the KL term. With 0 the reference policy is never loaded.
    # optimization
    mini_batches: int = 4  # Optimizer steps in each pass over the rollout. A group is never split.
    epochs: int = 1  # Passes over each rollout, in the same order.
    learning_rate: float = 1e-6  # Peak learning rate of the policy.
    critic_learning_rate: float = 1e-5  # Learning rate of the critic; it stays constant.
    schedule: Literal["constant", "linear"] = "constant"  # linear falls, to learning_rate / steps in the last step.
    warmup_steps: int = 10  # Steps in which the learning rate rises linearly.
    weight_decay: float = 0.0  # Weight decay of AdamW.
    max_grad_norm: float = 1.0  # A gradient of a larger norm is scaled down to it.


# The defaults without --model: two-digit addition, learned on a CPU in minutes.
EMBEDDED = job.EMBEDDED | {"steps": 50, "prompts_per_step": 64, "group_size": 4, "learning_rate": 1.5e-4}
EMBEDDED |= {"critic_learning_rate": 1e-3}


def reward_tokens(scores, old_logprobs, ref_logprobs, response_mask, kl_coef: float) -> torch.Tensor:
    """Scores (N,), log-probs (N, T) -> (N, T): the score on the last response token, -kl_coef k1 on each.

    The result is 0 outside the mask, and a response without a token gets no reward.
    """
    width = response_mask.shape[1]
    last = width - 1 - response_mask.flip(1).float().argmax(1)  # differs from length - 1 if the mask has holes
    at_end = torch.arange(width, device=scores.device) == last[:, None]  # (N, T)
    rewards = torch.where(at_end & response_mask, scores[:, None], 0.0)
    if ref_logprobs is None:
        return rewards
    return rewards - kl_coef * torch.where(response_mask, old_logprobs - ref_logprobs, 0.0)  # k1 is unbiased


def compute_advantages(
    token_rewards: torch.Tensor,
    values: torch.Tensor,
    response_mask: torch.Tensor,
    gamma: float,
    lam: float,
    bootstrap_value: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Advantages and returns (N, T) by GAE from token rewards and values (N, T); before whitening, 0 outside the mask.

    bootstrap_value: (N,), the value after the last token, for responses that were cut off. None: this value is 0.
    """
    advantages = torch.zeros_like(values)
    to_come = torch.zeros_like(values[:, 0])  # (N,) advantage of the next response token
    next_value = to_come if bootstrap_value is None else bootstrap_value  # (N,)
    for t in reversed(range(values.shape[1])):
        chosen = response_mask[:, t]
        delta = token_rewards[:, t] + gamma * next_value - values[:, t]
        # Tokens outside the mask do not change either of them: they neither discount nor add a value.
        to_come = torch.where(chosen, delta + gamma * lam * to_come, to_come)
        next_value = torch.where(chosen, values[:, t], next_value)
        advantages[:, t] = torch.where(chosen, to_come, 0.0)
    return advantages, torch.where(response_mask, advantages + values, 0.0)


def whiten(advantages: torch.Tensor, response_mask: torch.Tensor, total=float) -> torch.Tensor:
    """(N, T) -> (N, T): mean 0 and sample variance 1 over the response tokens of all ranks, 0 outside the mask.

    total: sums a number over the ranks (World.sum). The default, float, is for rows that no other rank shares.
    """
    count = total(response_mask.sum())
    mean = total(torch.where(response_mask, advantages, 0.0).sum()) / max(1, count)
    centred = torch.where(response_mask, advantages - mean, 0.0)
    variance = total(centred.square().sum()) / max(1, count - 1)
    is_rounding = variance <= 1e-12 * max(1.0, mean**2)  # equal advantages differ from their mean by rounding
    return torch.zeros_like(centred) if is_rounding else centred * (variance + 1e-8) ** -0.5


def policy_loss(
    logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    *,
    clip_low: float,
    clip_high: float,
    denominator: float,
    weights: torch.Tensor | float = 1.0,
) -> torch.Tensor:
    """Scalar: the sum of the given rows' token losses, divided by `denominator`.

    All are (n, T). Log-probs outside the mask, NaN included, change nothing.
    denominator: response tokens of the whole mini-batch on all ranks.
    weights: (n, T), from rollout_weights().
    """
    ratio = torch.where(response_mask, logprobs - old_logprobs, 0.0).clamp(-20, 20).exp()
    per_token = torch.max(-advantages * ratio, -advantages * ratio.clamp(1 - clip_low, 1 + clip_high))
    per_token = weights * per_token
    return (per_token * response_mask).sum() / denominator


def rollout_weights(old_logprobs, rollout_logprobs, response_mask, cap: float) -> torch.Tensor:
    """(n, T): truncated importance sampling, min(exp(old - rollout), cap); 1 outside the mask.

    The engine sampled with a policy that differs from the trainer's by rounding, or with batches in flight by one step.
    The weight multiplies the policy loss and carries no gradient (Ionides, 2008).
    """
    return torch.where(response_mask, old_logprobs - rollout_logprobs, 0.0).clamp(-20, 20).exp().clamp(max=cap)


def value_loss(values, old_values, returns, response_mask, *, clip: float, denominator: float) -> torch.Tensor:
    """Scalar: half the larger squared error of V and of V clipped near V_old, summed and divided by `denominator`.

    All are (n, T). Values outside the mask, NaN included, change nothing. denominator: the same as in policy_loss.
    """
    values, old_values, returns = (torch.where(response_mask, x, 0.0) for x in (values, old_values, returns))
    near = old_values + (values - old_values).clamp(-clip, clip)
    return 0.5 * torch.max((values - returns).square(), (near - returns).square()).sum() / denominator


@torch.no_grad()
def clipped_tokens(logprobs, old_logprobs, advantages, response_mask, *, clip_low, clip_high) -> torch.Tensor:
    """How many response tokens have no gradient because their ratio was clipped."""
    ratio = torch.where(response_mask, logprobs - old_logprobs, 0.0).exp()
    clipped = ((advantages > 0) & (ratio > 1 + clip_high)) | ((advantages < 0) & (ratio < 1 - clip_low))
    return (clipped & response_mask).sum()


def check_args(args: Args) -> None:
    """Refuse flags that the formulas above cannot work with. Raises BadInput."""
    if args.critic_warmup_steps >= args.steps:
        raise errors.BadInput(
            f"--critic-warmup-steps {args.critic_warmup_steps} leaves nothing of --steps {args.steps}"
        )


def main(args: Args) -> None:
    check_args(args)
    plan = job.prepare(args, models=["policy", "critic", *["reference"] * (args.kl_coef > 0)])
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
    critic = model.load(args.model, world, plan.dtype, args.compute, offload=args.offload != "none", value_head=True)
    critic_optimizer = torch.optim.AdamW(
        critic.parameters(), lr=args.critic_learning_rate, betas=(0.9, 0.95), weight_decay=args.weight_decay, fused=True
    )
    engine = engines.start(
        args.rollout_backend, args.model, plan.stop_token_ids, world, plan.dtype, max_model_len=plan.max_model_len,
        sequences=plan.sequences, layout=args.layout, rollout_tp=args.rollout_tp,
    )  # fmt: skip
    run = job.start(plan, world, engine, {"policy": (policy, optimizer), "critic": (critic, critic_optimizer)})
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
        needed = batch.response_mask.any(1)  # (N,) True for responses that could be graded
        warming_up = step <= args.critic_warmup_steps  # Only the critic learns, from Monte Carlo returns.
        mini_batches = torch.arange(len(batch), device=world.device).chunk(args.mini_batches)

        with tracker.time("logprobs"):  # "old" means the weights before the updates of this step.
            # The first mini-batch trains from those weights: its own forward gives its old_logprobs, below.
            # A KL in the rewards needs them earlier, and while the critic warms up there is no such forward.
            all_early = ref_policy is not None or warming_up
            later = needed if all_early else needed.index_fill(0, mini_batches[0], False)  # (N,)
            micro_batches = batching.pack(batch, later.nonzero().flatten(), args.compute, world)
            old_logprobs = model.frozen_logprobs(policy, batch, micro_batches, args.temperature)  # (N, T)
            micro_batches = batching.pack(batch, needed.nonzero().flatten(), args.compute, world)
            old_values = model.frozen_values(critic, batch, micro_batches)  # (N, T)
            ref_logprobs = None
            if ref_policy is not None:
                ref_logprobs = model.frozen_logprobs(ref_policy, batch, micro_batches, args.temperature)  # (N, T)
                kl = (old_logprobs - ref_logprobs) * batch.response_mask  # (N, T)
                tracker.add("reward/kl", kl.sum(), needed.sum())
        token_rewards = reward_tokens(
            scores=batch.scores, old_logprobs=old_logprobs, ref_logprobs=ref_logprobs,
            response_mask=batch.response_mask, kl_coef=args.kl_coef,
        )  # (N, T)  # fmt: skip
        gae = partial(
            compute_advantages, token_rewards=token_rewards, values=old_values, response_mask=batch.response_mask,
            gamma=1.0,
        )  # fmt: skip
        advantages, _ = gae(lam=args.lam[0])  # (N, T)
        _, returns = gae(lam=1.0 if warming_up else args.lam[1])  # (N, T)
        advantages = whiten(advantages=advantages, response_mask=batch.response_mask, total=world.sum)
        learns = world.max(advantages.abs().max()) > 0  # Without a gradient Adam would still move the weights.
        tracker.explained_variance(old_values, returns, batch.response_mask)

        with tracker.time("update"):
            own_step, own_steps = step - args.critic_warmup_steps, args.steps - args.critic_warmup_steps  # the policy's
            decay = 1 - (own_step - 1) / own_steps if args.schedule == "linear" else 1.0
            for group in optimizer.param_groups:
                group["lr"] = args.learning_rate * min(decay, own_step / max(1, args.warmup_steps))
            for update, rows in enumerate(mini_batches * args.epochs):
                # The denominator counts the rows of all ranks, and also those that skip the forward.
                denominator = world.sum(batch.response_mask[rows].sum())  # response tokens
                micro_batches = batching.pack(batch, rows[needed[rows]], args.compute, world)
                for micro in micro_batches:
                    model.accumulate(critic, last=micro is micro_batches[-1])
                    values = model.response_values(critic, micro)  # (n, T)
                    loss = value_loss(
                        values=values, old_values=old_values[micro.rows], returns=returns[micro.rows],
                        response_mask=micro.response_mask, clip=args.value_clip, denominator=denominator,
                    )  # fmt: skip
                    (loss * world.size).backward()  # FSDP averages gradients over ranks; the sum is needed.
                    tracker.add("loss/value", loss.detach() * world.size, 0)
                grad_norm = torch.nn.utils.clip_grad_norm_(critic.parameters(), args.max_grad_norm)
                tracker.grad_norm(step, grad_norm, "critic/grad_norm", "loss/value")
                critic_optimizer.step()
                critic_optimizer.zero_grad()
                if warming_up:
                    continue

                for micro in micro_batches:
                    model.accumulate(policy, last=micro is micro_batches[-1])
                    logprobs, entropy = model.response_logprobs(policy, micro, args.temperature, with_entropy=True)
                    old, mask = old_logprobs[micro.rows], micro.response_mask  # (n, T)
                    if update == 0:
                        old = old_logprobs[micro.rows] = torch.where(mask, logprobs.detach(), old)
                    weights = 1.0
                    if args.tis_cap:
                        weights = rollout_weights(
                            old_logprobs=old, rollout_logprobs=batch.rollout_logprobs[micro.rows], response_mask=mask,
                            cap=args.tis_cap,
                        )  # fmt: skip
                    loss = policy_loss(
                        logprobs=logprobs, old_logprobs=old, advantages=advantages[micro.rows], response_mask=mask,
                        clip_low=args.clip, clip_high=args.clip, denominator=denominator, weights=weights,
                    )  # fmt: skip
                    (loss * world.size).backward()  # FSDP averages gradients over ranks; the sum is needed.
                    clipped = clipped_tokens(
                        logprobs=logprobs, old_logprobs=old, advantages=advantages[micro.rows], response_mask=mask,
                        clip_low=args.clip, clip_high=args.clip,
                    )  # fmt: skip
                    tracker.update(loss, entropy, mask, clipped)
                if micro_batches and learns:  # pack() gives all ranks equally many, or none.
                    grad_norm = torch.nn.utils.clip_grad_norm_(policy.parameters(), args.max_grad_norm)
                    tracker.grad_norm(step, grad_norm)  # Stops the run before NaN reaches the weights.
                    optimizer.step()
                    optimizer.zero_grad()

        with tracker.time("sync"):
            weight_sync.push(policy, engine)
        run.end_step(step, batch, advantages=advantages, old_logprobs=old_logprobs, rows=needed, values=old_values)
    run.close()


if __name__ == "__main__":
    job.launch(main, Args, EMBEDDED, __doc__)
