"""Saves the gradient of GRPO's loss over 7 rows, dealt unevenly to the ranks: gradient.py MODEL BUDGET OUTPUT"""

import sys

import torch

from algos.grpo import policy_loss
from common import batching, model, placement
from common.rollout import collate


def main(model_path: str, budget: int, output: str) -> None:
    world = placement.init(seed=0)
    policy = model.load(model_path, world, torch.float32)
    generator = torch.Generator().manual_seed(0)
    lengths = [5, 1, 3, 2, 5, 4, 1]
    prompts = [torch.randint(3, 50, (3 + i % 3,), generator=generator).tolist() for i in range(7)]
    responses = [torch.randint(3, 50, (length,), generator=generator).tolist() for length in lengths]
    old, ref = torch.randn(2, 7, 5, generator=generator) * 0.1 - 4
    advantages = torch.randn(7, generator=generator)
    mine = torch.arange(7) if world.size == 1 else [torch.arange(5), torch.arange(5, 7)][world.rank]  # 5 and 2 rows
    batch = collate(
        [prompts[i] for i in mine], [responses[i] for i in mine], None, [False] * len(mine), 0, world.device
    )
    old, ref, advantages = (
        old[mine, : batch.response_mask.shape[1]],
        ref[mine, : batch.response_mask.shape[1]],
        advantages[mine],
    )
    denominator = world.sum(len(batch))
    for micro in batching.pack(batch, torch.arange(len(batch)), budget, world):
        logprobs, _ = model.response_logprobs(policy, micro, temperature=0.9)
        rows = micro.rows
        loss = policy_loss(
            logprobs, old[rows], ref[rows], advantages[rows], micro.response_mask,
            clip_low=0.9, clip_high=9.0, kl_coef=0.1, denominator=denominator,
        )  # fmt: skip
        (loss * world.size).backward()
    gradients = {name: parameter.grad.full_tensor() for name, parameter in policy.named_parameters()}
    if world.is_main:
        torch.save(gradients, output)
    placement.finish(world)


main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
