"""Prints what two ranks hold in memory and exchange, as JSON of rank 0: memory.py MODEL

decided       whether each rank keeps whole gradients, if only rank 0 has room for them
kept          gradients after the first of 4 micro-batches, as a share of all gradients. With "room" for all, and
              "without"
over copies   how often a step of 4 micro-batches adds gradients over two copies of the weights
gathered      layers whose weights a forward holds at the same time
widest        the largest float32 tensor of a push in bfloat16, as a share of the largest parameter
"""

import dataclasses
import json
import sys
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

sys.path.append(str(Path(__file__).parents[1]))
from memory_meter import LargestTensor, bytes_in_use

from common import placement, weight_sync
from common.rollout.rollout import collate
from common.trainer import batching, model
from common.trainer.parts import decoder_of

ROOM, NO_ROOM = 1e15, 1e6  # bytes of a rank


def step(policy: torch.nn.Module, micro_batches: list) -> int:
    """Gradients of all micro-batches. Returns the bytes that the first one leaves."""
    before = bytes_in_use()
    for number, micro in enumerate(micro_batches):
        model.response_logprobs(policy, micro, 1.0)[0].sum().backward()
        if number == 0:
            kept = bytes_in_use() - before
    policy.zero_grad()
    return kept


def main(path: str) -> None:
    world = placement.init(0)
    two_copies = init_device_mesh(world.device.type, (2, 1), mesh_dim_names=("copies", "shards"))
    rollout = collate([[5] * 40] * 4, [[6] * 9] * 4, None, [False] * 4, 0, world.device)
    micro_batches = batching.pack(rollout, torch.arange(4), batching.Compute(token_budget=1), world)  # one for each row
    found = {"decided": [None, None], "kept": {}}

    for memory in ("without", "room"):
        model.rank_memory = lambda memory=memory: ROOM if memory == "room" or world.is_main else NO_ROOM
        policy = model.load(path, world, torch.bfloat16)
        if memory == "without":
            dist.all_gather_object(found["decided"], policy.whole_gradients)
            if len(set(found["decided"])) == 2:
                break  # they would wait for each other
        step(policy, micro_batches)  # makes buffers that stay
        gradient_bytes = 4 * sum(parameter.numel() for parameter in policy.parameters())
        found["kept"][memory] = step(policy, micro_batches) / gradient_bytes

    model.rank_memory = lambda: NO_ROOM
    layers = decoder_of(policy).layers
    copied = model.load(path, dataclasses.replace(world, mesh=two_copies), torch.bfloat16)
    with mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as added:
        step(copied, micro_batches)
    found["over copies"] = added.call_count / (len(layers) + 1)

    model.frozen_logprobs(policy, rollout, micro_batches, 1.0)
    before, held = bytes_in_use(), []
    for layer in layers:
        layer.mlp.register_forward_hook(lambda *given: held.append(bytes_in_use() - before))
    model.frozen_logprobs(policy, rollout, micro_batches[:1], 1.0)
    found["gathered"] = max(held) / (2 * sum(parameter.numel() for parameter in layers[0].parameters()))

    with LargestTensor(torch.float32) as largest:
        for _ in weight_sync.FullParameters(policy, torch.bfloat16):
            pass
    found["widest"] = largest.elements / max(parameter.numel() for parameter in policy.parameters())
    if world.is_main:
        print(json.dumps(found), flush=True)
    placement.finish(world)


main(sys.argv[1])
