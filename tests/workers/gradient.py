"""Saves the gradients of all algorithms, or of those that are named, over 8 rows, which the ranks share unevenly:

    gradient.py MODEL OUTPUT COMPUTE ... [--only NAME ...]

It does everything after sampling as the algorithm files do: rewards, advantages over all ranks, denominator, packed
micro-batches, FSDP. PPO's critic and PRIME's process reward model are trained, too. Each COMPUTE has the fields of
batching.Compute as JSON. With shared prompts, the prompt of a group of two responses is computed once, and so is what
all prompts begin with.
"""

import json
import os
import sys
from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist

from algos import cispo, dapo, dpo, dr_grpo, grpo, gspo, max_rl, opd, ppo, prime, reinforce_pp, remax, rloo, sdpo
from common import placement
from common.rollout.rollout import collate
from common.trainer import batching, distillation, model

G, CLIP = 2, {"clip_low": 0.9, "clip_high": 9.0}


def main(model_path: str, output: str, *words: str) -> None:
    layouts, only = words, ()
    if "--only" in words:
        place = words.index("--only")
        layouts, only = words[:place], words[place + 1 :]
    batching.SHARED_PROMPT_MIN_TOKENS = 1
    out = []
    if "RANK" in os.environ:  # every world of this process uses one connection to the other ranks' store
        met = next(dist.rendezvous("env://"))
        dist.rendezvous = lambda url: iter([met])
    for compute in (batching.Compute(**json.loads(layout)) for layout in layouts):
        world = placement.init(0, sharding=compute)
        dist.init_process_group = lambda *given, **named: None  # the group exists after the first
        shards = compute.shard_size or world.size  # neighbours, which are on one node, hold one copy
        assert world.mesh.size(-1) == shards and world.mesh.get_local_rank(world.mesh.ndim - 1) == world.rank % shards
        out.append(all_gradients(model_path, compute, world, only))
    if world.is_main:
        torch.save(out, output)
    placement.finish(world)


def all_gradients(model_path: str, compute: batching.Compute, world: placement.World, only: tuple) -> dict:
    """name -> gradient of each parameter; only: names of those that are wanted, empty for all."""
    generator = torch.Generator().manual_seed(0)
    lengths = [5, 1, 3, 2, 5, 4, 1, 2]
    ends = [torch.randint(3, 50, (1 + i % 3,), generator=generator).tolist() for i in range(4)]
    prompts = [[7, 8, *end] for end in ends]  # they begin alike
    prompts = [prompt for prompt in prompts for _ in range(G)]
    responses = [torch.randint(3, 50, (length,), generator=generator).tolist() for length in lengths]
    old, ref = torch.randn(2, 8, 5, generator=generator) * 0.1 - 4
    old_values, scores = torch.randn(8, 5, generator=generator), torch.rand(8, generator=generator)
    greedy = torch.ones(8)
    correct = torch.tensor([1.0, 0, 0, 1, 1, 1, 0, 0])
    shares = {1: [8], 2: [6, 2], 4: [2, 2, 2, 2]}[world.size]
    mine = torch.arange(8).split(shares)[world.rank]
    # An environment's tokens are holes in the mask: in the middle of rows 0 and 5, and at the start of row 4.
    holes = {0: [1, 2], 4: [0], 5: [2]}
    sampled = [[t not in holes.get(i, ()) for t in range(lengths[i])] for i in mine.tolist()]
    batch = collate(
        [prompts[i] for i in mine], [responses[i] for i in mine], None, [False] * len(mine), 0, world.device, sampled
    )
    mask = batch.response_mask
    old, ref, old_values = (x[mine, : mask.shape[1]] for x in (old, ref, old_values))
    old, ref, old_values = (x.to(world.device) for x in (old, ref, old_values))
    scores, greedy, correct = (x[mine].to(world.device) for x in (scores, greedy, correct))
    tokens, sequences = world.sum(mask.sum()), world.sum(len(batch))

    def gradients(trained, loss_of, together: int = 1, rows=None) -> dict[str, torch.Tensor]:
        """Gradients of loss_of(micro), a scalar, summed over all micro-batches and ranks. rows: None takes all."""
        rows = torch.arange(len(batch)) if rows is None else rows
        micro_batches = batching.pack(batch, rows, compute, world, together)
        assert [micro.last for micro in micro_batches] == [False] * (len(micro_batches) - 1) + [True]
        for micro in micro_batches:
            loss_of(micro).backward()
        given = ((name, parameter.grad) for name, parameter in trained.named_parameters())
        out = {name: grad.full_tensor().clone() for name, grad in given if grad is not None}  # LoRA freezes most
        trained.zero_grad()
        return out

    policy = model.load(model_path, world, torch.float64, compute)
    critic = model.load(model_path, world, torch.float64, compute, value_head=True)
    with torch.no_grad():  # heads and adapters of zeros would hide the layers below them
        critic.score.weight.fill_(0.1)
        for name, parameter in (*policy.named_parameters(), *critic.named_parameters()):
            if name.endswith("lora_b"):
                parameter.fill_(0.01)

    def policy_gradients(algorithm, advantages, denominator, *kl, **keywords):
        def loss_of(micro):
            logprobs, _ = model.response_logprobs(policy, micro, temperature=0.9)
            given = (old[micro.rows], *(x[micro.rows] for x in kl), advantages[micro.rows], micro.response_mask)
            return algorithm.policy_loss(logprobs, *given, **CLIP, **keywords, denominator=denominator)

        return gradients(policy, loss_of)

    kinds = {}  # name -> what computes its gradients
    of_sequences = [("grpo", grpo, sequences), ("gspo", gspo, sequences), ("cispo", cispo, tokens)]
    of_sequences += [("dr_grpo", dr_grpo, sequences * 5), ("max_rl", max_rl, sequences * 5)]
    for name, algorithm, denominator in of_sequences:
        advantages = algorithm.compute_advantages(scores, G)
        kinds[name] = partial(policy_gradients, algorithm, advantages, denominator, ref, kl_coef=0.1)
    kinds["dapo"] = partial(policy_gradients, dapo, dapo.compute_advantages(scores, G), tokens, clip_dual=20.0)
    rewards = scores - 0.1 * rloo.sequence_kl(old, ref, mask)
    kinds["rloo"] = partial(policy_gradients, rloo, rloo.compute_advantages(rewards, G), tokens)
    token_rewards = remax.reward_tokens(scores, old, ref, mask, 0.1)
    advantages = remax.compute_advantages(token_rewards, greedy, mask)
    kinds["remax"] = partial(policy_gradients, remax, advantages, tokens)

    advantages = reinforce_pp.compute_advantages(token_rewards, scores, mask, G, "group")
    advantages = reinforce_pp.whiten(advantages, mask, world.sum)
    kinds["reinforce_pp"] = partial(policy_gradients, reinforce_pp, advantages, tokens)

    advantages, returns = ppo.compute_advantages(token_rewards, old_values, mask, 1.0, 0.95)
    kinds["ppo"] = partial(policy_gradients, ppo, ppo.whiten(advantages, mask, world.sum), tokens)

    def value_loss(micro):
        values = model.response_values(critic, micro)
        given = (old_values[micro.rows], returns[micro.rows], micro.response_mask)
        return ppo.value_loss(values, *given, clip=0.2, denominator=tokens)

    kinds["ppo critic"] = partial(gradients, critic, value_loss)

    process = prime.normalize(prime.implicit_rewards(old, ref, mask, 0.05), mask, world.max)
    advantages = prime.compute_advantages(process, correct, mask, G)
    kinds["prime"] = partial(policy_gradients, prime, prime.whiten(advantages, mask, world.sum), tokens)

    def prm_loss(micro):
        logprobs, _ = model.response_logprobs(policy, micro, temperature=1.0)
        given = (ref[micro.rows], micro.response_mask, 0.05, correct[micro.rows])
        return prime.prm_loss(logprobs, *given).sum() / sequences

    kinds["prime process model"] = partial(gradients, policy, prm_loss)

    def dpo_loss(micro):
        logprobs, _ = model.response_logprobs(policy, micro, temperature=1.0)
        sums = torch.where(mask, ref, 0.0).sum(1).view(-1, 2)[micro.rows[::2] // 2]
        losses = dpo.dpo_loss(dpo.implicit_rewards(logprobs, sums, micro.response_mask, 0.5), 0.1)
        return (losses * micro.response_mask.any(1)[::2]).sum() / sequences * 2

    kinds["dpo"] = partial(gradients, policy, dpo_loss, together=2)
    kinds["opd"] = partial(policy_gradients, opd, opd.compute_advantages(old, ref, mask), tokens)
    teacher = distillation.load_teacher(model_path, policy, world, torch.float64, compute, offload=False)
    with torch.no_grad():
        for parameter in teacher.parameters():
            parameter.mul_(1.2)

    def vocabulary_loss(micro):
        found, *_ = distillation.divergences(policy, teacher, micro, temperature=0.9)
        assert (found[~micro.response_mask] == 0).all()  # dummies count in no metric
        return opd.vocabulary_loss(found, micro.response_mask, denominator=tokens)

    # Row 3 has no hint, and rows 4 and 5 have the same.
    has_hint = torch.tensor([number != 3 for number in mine.tolist()], device=world.device)
    hints = [torch.randint(3, 50, (1 + i % 4,), generator=generator).tolist() for i in range(8)]
    hints[5] = hints[4]
    hinted = replace(batch, prompt_ids=[hints[i] + prompts[i] for i in mine.tolist()])
    hinted_rows = has_hint.nonzero().flatten()
    taught = mask & has_hint[:, None]
    hinted_tokens = world.sum(taught.sum())
    theirs = model.frozen_logprobs(policy, hinted, batching.pack(hinted, hinted_rows, compute, world), 0.9)
    advantages = sdpo.compute_advantages(old, theirs.to(old.dtype), taught)
    kinds["sdpo"] = partial(policy_gradients, sdpo, advantages, hinted_tokens)

    def hinted_loss(micro):
        other = batching.after_prompts_of(hinted, micro, compute)
        found, *_ = distillation.divergences(policy, distillation.own_teacher(policy), micro, 0.9, other)
        return sdpo.vocabulary_loss(found, micro.response_mask, denominator=hinted_tokens)

    if policy.knows_logits and compute.sequence_parallel == 1:
        kinds["sdpo over the vocabulary"] = partial(gradients, policy, hinted_loss, rows=hinted_rows)
    if policy.knows_logits:
        kinds["opd over the vocabulary"] = partial(gradients, policy, vocabulary_loss)
    out = {name: compute_them() for name, compute_them in kinds.items() if not only or name in only}
    micro_batches = batching.pack(batch, torch.arange(len(batch)), compute, world)
    if compute.shared_prompts and compute.packing != "off" and world.is_main:  # its rows have several prompts
        assert any(micro.beginning for micro in micro_batches)
    out["micro-batches"] = len(micro_batches)
    return out


main(*sys.argv[1:])
