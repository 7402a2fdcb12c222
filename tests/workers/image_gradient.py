"""Saves the gradients of a loss over prompts with and without images: image_gradient.py DATA MODEL OUTPUT.

It does so with a trained and with a frozen tower. With two ranks the first has all images, and the second a text alone.
"""

import sys
from pathlib import Path

import torch

from common import placement
from common.data import images
from common.data.prompts import TrainSource, load
from common.data.tokenizer import load_tokenizer
from common.rollout.rollout import collate
from common.trainer import batching, model


def gradients(world: placement.World, data: str, model_path: str) -> dict[str, torch.Tensor]:
    prompts = [prompt.ids for prompt in load((data,), TrainSource(), "train", load_tokenizer(model_path)[0], 400)]
    rows = [(prompts[0], [40, 41, 42]), (prompts[2], [43, 44]), ([50, 51, 52], [60, 61, 62, 63])]
    mine = rows if world.size == 1 else [rows[:2], rows[2:]][world.rank]
    batch, found = collate(*map(list, zip(*mine)), None, [False] * len(mine), 0, world.device), {}
    for train_vision in (False, True):
        compute = batching.Compute(token_budget=1000, train_vision=train_vision)
        policy = model.load(model_path, world, torch.float32, compute)
        for micro in batching.pack(batch, torch.arange(len(batch)), compute, world):
            logprobs, _ = model.response_logprobs(policy, micro, 1.0)
            logprobs.sum().backward()
        trained = {name: p.grad.full_tensor() for name, p in policy.named_parameters() if p.grad is not None}
        found |= {f"{train_vision} {name}": gradient for name, gradient in trained.items()}
    return found


def main(data: str, model_path: str, output: str) -> None:
    if "qwen" in model_path:
        sys.path.append(str(Path(__file__).parents[1]))
        from image_models import QwenProcessor

        images.processor = QwenProcessor
    world = placement.init(0)
    found = gradients(world, data, model_path)
    if world.is_main:
        torch.save(found, output)
    placement.finish(world)


if __name__ == "__main__":
    main(*sys.argv[1:])
