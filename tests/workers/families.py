"""Prints how far trainer and engine differ for each model: families.py ENGINE DTYPE FOLDER ...

Each model has a world and an engine, "vllm" or "hf", of its own.
A line is {"model", "gaps"}: the largest difference of log-probs after loading, and after each of three updates.
"""

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.tensor import distribute_tensor

from common import placement, weight_sync
from common.rollout import engines
from common.trainer import batching, model

PROMPTS = [[3 + 7 * i % 120 for i in range(45)], [5 + 11 * i % 120 for i in range(33)]]  # longer than a window


def main(backend: str, dtype: torch.dtype, folder: str) -> None:
    world = placement.init(0)
    compute = batching.Compute(400, longest=96)
    policy = model.load(folder, world, dtype, compute)
    engine = engines.start(backend, folder, [2], world, dtype, max_model_len=96, sequences=8)
    # One of longrope's rows begins below the 32 tokens of its short frequencies, and ends above them.
    prompts = [PROMPTS[0][:20], PROMPTS[1]] if folder.endswith("longrope") else PROMPTS
    generator, gaps = torch.Generator().manual_seed(1), []  # the same noise on every rank
    for update in range(4):
        if update:
            for parameter in policy.parameters():
                noise = 0.01 * torch.randn(parameter.shape, generator=generator)
                parameter.data.add_(distribute_tensor(noise, world.mesh, parameter.placements))
            weight_sync.push(policy, engine)
        batch = engine.generate(prompts, n=4, temperature=0.7, max_tokens=30, seed=update)
        micro_batches = batching.pack(batch, torch.arange(len(batch)), compute, world)
        logprobs = model.frozen_logprobs(policy, batch, micro_batches, temperature=0.7)
        gaps.append(world.max((logprobs - batch.rollout_logprobs)[batch.response_mask].abs().max()))
    if world.is_main:
        print(json.dumps({"model": Path(folder).name, "gaps": gaps}), flush=True)
    placement.finish(world, engine)


if "RANK" in os.environ:  # every world of this process uses one connection to the other ranks' store
    met = next(dist.rendezvous("env://"))
    dist.rendezvous = lambda url: iter([met])
backend, dtype, *folders = sys.argv[1:]
for folder in folders:
    main(backend, getattr(torch, dtype), folder)
