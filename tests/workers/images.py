"""Prints how far the trainer and vLLM differ on prompts with images: images.py DATA FOLDER ...

A line is {"model", "train_vision", "gaps", "tower moved"}: the largest difference of log-probs after loading, and after
each of three updates of all trained parameters.
"""

import json
import sys
from pathlib import Path

import torch

from common import placement, weight_sync
from common.data.prompts import TrainSource, load
from common.data.tokenizer import load_tokenizer
from common.rollout import engines
from common.trainer import batching, model


def main(data: str, folder: str, train_vision: bool) -> None:
    compute = batching.Compute(token_budget=400, train_vision=train_vision)
    world = placement.init(0)
    prompts = load((data,), TrainSource(), "train", load_tokenizer(folder)[0], 400)
    policy = model.load(folder, world, torch.float32, compute)
    tower = next(policy.get_encoder(modality="image").parameters())
    before = tower.to_local().clone()
    engine = engines.start("vllm", folder, [2], world, torch.float32, max_model_len=256, sequences=8)
    generator, gaps = torch.Generator().manual_seed(1), []
    for update in range(4):
        if update:
            for parameter in policy.parameters():
                if parameter.requires_grad:
                    parameter.data.to_local().add_(0.02 * torch.randn(parameter.shape, generator=generator))
            weight_sync.push(policy, engine)
        batch = engine.generate([prompt.ids for prompt in prompts], n=2, temperature=0.7, max_tokens=12, seed=update)
        micro_batches = batching.pack(batch, torch.arange(len(batch)), compute, world)
        logprobs = model.frozen_logprobs(policy, batch, micro_batches, temperature=0.7)
        gaps.append((logprobs - batch.rollout_logprobs).abs().max().item())
    moved = not torch.equal(before, tower.to_local())
    found = {"model": Path(folder).name, "train_vision": train_vision, "gaps": gaps, "tower moved": moved}
    print(json.dumps(found), flush=True)
    placement.finish(world, engine)


for folder in sys.argv[2:]:
    for train_vision in (False, True):
        main(sys.argv[1], folder, train_vision)
