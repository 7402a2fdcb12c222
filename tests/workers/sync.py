"""Prints max |log-prob of the trainer - log-prob of the engine| at the start and after each of 5 random updates.

sync.py MODEL TP BACKEND DTYPE LORA_RANK, where BACKEND is vllm or hf. turns.py does the same with servers.
"""

import sys

import torch

from common import placement, weight_sync
from common.rollout import engines
from common.rollout.hf_engine import HFEngine
from common.rollout.rollout import Rollout
from common.trainer import batching, lora, model


def main(model_path: str, tp: int, backend: str, dtype: torch.dtype, lora_rank: int) -> None:
    world = placement.init(0, tp)
    policy = model.load(model_path, world, dtype, batching.Compute(lora_rank=lora_rank))
    engine = engines.start(backend, model_path, [1], world, dtype, max_model_len=160, sequences=32)
    if dtype == torch.bfloat16 and world.device.type == "cpu":
        heads = engine.llm.apply_model(lambda served: type(served.lm_head.quant_method).__name__)
        assert heads == ["Float32Head"], heads
    batch, micro_batches = follow(world, policy, engine)
    if lora_rank:  # The engine has moved with the adapters, and would otherwise sample as it did at first.
        with lora.switched_off(policy):
            base = model.frozen_logprobs(policy, batch, micro_batches, temperature=1.0)
        moved = (base - batch.rollout_logprobs)[batch.response_mask].abs().max()
        assert moved > 0.1, moved
        return placement.finish(world, engine)
    # Shards that are cast before they are gathered are the same bits as tensors that are cast afterwards.
    for (name, tensor), parameter in zip(weight_sync.FullParameters(policy, torch.bfloat16), policy.parameters()):
        assert torch.equal(tensor, parameter.detach().full_tensor().bfloat16()), name
    placement.finish(world, engine)


def follow(world: placement.World, policy, engine) -> tuple[Rollout, list[batching.MicroBatch]]:
    """Sample, compare and update, six times. Returns the last batch, sampled before the last update, and its
    micro-batches.
    """
    beginning = [5 + world.rank, 6, 7] * 4  # different ones on each rank, which TP must sort out
    prompts = [[*beginning, 8 + i, 9] for i in range(5)]
    # A whole block, a tail and a beginning (vllm_prefixes.py): none may outlive the weights it came from.
    prompts = [prompts[0] * 4, *prompts[1:], beginning]
    generator = torch.Generator().manual_seed(1)  # the same noise on every rank
    for update in range(6):
        told = {}  # what the engine reports while it still samples
        done = lambda place, ids, ended, told=told: told.update({place: (ids, ended)})
        batch = engine.generate(prompts, n=2, temperature=1.0, max_tokens=24, seed=update, done=done)
        ids, ended = batch.response_ids, batch.truncated.tolist()
        expected = {i: (ids[2 * i : 2 * i + 2], ended[2 * i : 2 * i + 2]) for i in range(len(prompts))}
        assert told == ({} if isinstance(engine, HFEngine) else expected)
        assert (batch.weight_versions == update)[batch.response_mask].all()
        assert batch.prompt_ids == [ids for ids in prompts for _ in range(2)]
        micro_batches = batching.pack(batch, torch.arange(len(batch)), batching.Compute(600), world)
        trainer = model.frozen_logprobs(policy, batch, micro_batches, temperature=1.0)
        gap = world.max((trainer - batch.rollout_logprobs)[batch.response_mask].abs().max())
        if world.is_main:
            print(f"gap {gap:.3e}", flush=True)
        for parameter in policy.parameters():  # every weight moves as in training, but further
            if not parameter.requires_grad:
                continue
            whole = parameter.detach().full_tensor()
            noise = torch.randn(whole.shape, generator=generator) * 0.02
            chunk = torch.distributed.tensor.distribute_tensor(noise, world.mesh, parameter.placements)
            parameter.data.add_(chunk)
        weight_sync.push(policy, engine)
    return batch, micro_batches


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3], getattr(torch, sys.argv[4]), int(sys.argv[5]))
