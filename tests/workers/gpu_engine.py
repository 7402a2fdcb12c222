"""Starts vLLM beside a trainer on a GPU, and prints its settings, its responses' seeds and its memory as JSON.

gpu_engine.py MODEL. Memory is in bytes. "awake" and "asleep" leave out what the trainer takes.
"""

import json
import sys
import time

import numpy
import torch

from common import placement, weight_sync
from common.preflight.memory import MemoryPlan
from common.rollout import engines
from common.trainer import model

LONGEST, SEQUENCES = 1024, 256  # tokens of a prompt and its response, and responses at once


def used_memory() -> int:
    """Bytes of the GPU that are in use, CUDA's own among them."""
    free, total = torch.cuda.mem_get_info()
    return total - free


def main(path: str) -> None:
    world = placement.init(0)
    policy = model.load(path, world, torch.bfloat16)
    plan = MemoryPlan(model=path, dtype=torch.bfloat16, size=1, backend="vllm")
    layout = plan.fitted_layout(LONGEST, SEQUENCES)
    torch.cuda.empty_cache()
    before, began = used_memory(), time.perf_counter()
    sizes = {"max_model_len": LONGEST, "sequences": SEQUENCES}
    engine = engines.start("vllm", path, [1], world, torch.bfloat16, **sizes, layout=layout)
    found = {"start_s": time.perf_counter() - began}
    config = engine.llm.llm_engine.vllm_config
    found["settings"] = {
        "second runner": config.use_v2_model_runner,
        "scheduled ahead": config.scheduler_config.async_scheduling,
        "graphs": config.compilation_config.cudagraph_mode.name != "NONE",
        "head": str(config.model_config.head_dtype),
        "log-probs": config.model_config.logprobs_mode,
        "shared prefixes": config.cache_config.enable_prefix_caching,
        "weights by": config.weight_transfer_config.backend,
        "share of memory": config.cache_config.gpu_memory_utilization == layout.rollout_memory,
    }
    prompts = [[5 + i, 6, 7, 8] for i in range(16)]
    sample = lambda seed: engine.generate(prompts, n=4, temperature=1.0, max_tokens=32, seed=seed).response_ids
    found["first"] = sample(1)
    numpy.random.seed(3)  # where a request without a seed takes its own from
    found["again"], found["other"] = sample(1), sample(2)

    tokens = config.cache_config.num_gpu_blocks * config.cache_config.block_size
    held = plan.engine_needs(tokens) - plan.engine_needs(0) + 2 * plan.parameters  # cache and weights
    found |= {"cache tokens": tokens, "held": held, "awake": used_memory() - before}
    engine.sleep()
    found |= {"asleep": used_memory() - before, "push_s": [], "after cycles": []}
    for _ in range(6):
        began = time.perf_counter()
        weight_sync.push(policy, engine)
        torch.cuda.synchronize()
        found["push_s"].append(time.perf_counter() - began)
        sample(3)
        engine.sleep()
        found["after cycles"].append(used_memory())
    print(json.dumps(found), flush=True)
    placement.finish(world, engine)


main(sys.argv[1])
