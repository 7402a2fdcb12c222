"""Saves the gradients of a loss over prompts with and without images: image_gradient.py DATA MODEL OUTPUT.

With two ranks the first has all images, and the second a text alone.
"""

import sys

import torch

from common import placement
from common.data.prompts import TrainSource, load
from common.data.tokenizer import load_tokenizer
from common.rollout.rollout import collate
from common.trainer import batching, model


def main(data: str, model_path: str, output: str) -> None:
    world = placement.init(0)
    compute = batching.Compute(token_budget=1000, train_vision=True)
    prompts = [prompt.ids for prompt in load((data,), TrainSource(), "train", load_tokenizer(model_path)[0], 400)]
    rows = [(prompts[0], [40, 41, 42]), (prompts[2], [43, 44]), ([50, 51, 52], [60, 61, 62, 63])]
    mine = rows if world.size == 1 else [rows[:2], rows[2:]][world.rank]
    batch = collate(*map(list, zip(*mine)), None, [False] * len(mine), 0, world.device)
    policy = model.load(model_path, world, torch.float32, compute)
    for micro in batching.pack(batch, torch.arange(len(batch)), compute, world):
        model.accumulate(policy, last=True)
        logprobs, _ = model.response_logprobs(policy, micro, 1.0)
        (logprobs.sum() * world.size).backward()
    found = {name: p.grad.full_tensor() for name, p in policy.named_parameters() if p.grad is not None}
    if world.is_main:
        torch.save(found, output)
    placement.finish(world)


main(*sys.argv[1:])
