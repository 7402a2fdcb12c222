"""Prints, for engines of several sizes, how many tokens 6 responses to each of 4 prompts took, as JSON: one line each.

There is a number for each length of what all prompts begin with. Each line also has the bytes of the KV cache, and how
many bytes of memory sleep() returned.
prefixes.py MODEL. Raises AssertionError if a log-prob differs from the trainer's, or if a copy is left over.
"""

import json
import sys
import uuid

import psutil
import torch
from vllm import SamplingParams
from vllm.distributed.kv_transfer import get_kv_transfer_group

from common import placement
from common.rollout import engines, vllm_engine
from common.trainer import batching, model

LENGTHS = [41, 49, 44, 100]  # tails of 8, 16, 11 and 3 tokens before each prompt's last one
BEGINNINGS = [0, 26, 40]  # tokens that all prompts begin with: none, a part of a block, a block and a part
own_settings = vllm_engine.engine_settings


def computed_tokens(engine, prompts, **sampling):
    """The responses, and the number of tokens that all forwards together computed for them."""
    scheduler, tokens = engine.llm.llm_engine.engine_core.engine_core.scheduler, 0
    schedule = scheduler.schedule

    def counted(*args, **kwargs):
        nonlocal tokens
        output = schedule(*args, **kwargs)
        tokens += output.total_num_scheduled_tokens
        return output

    scheduler.schedule = counted
    batch = engine.generate(prompts, **sampling)
    scheduler.schedule = schedule
    check_nothing_is_left(scheduler)
    return batch, tokens


def check_nothing_is_left(scheduler) -> None:
    connector = scheduler.connector
    assert not (connector.waiting or connector.computing or connector.saved or connector.found or connector.beginning)
    assert not get_kv_transfer_group().blocks, "a copy is left over"


def prompts_with(beginning: int) -> list[list[int]]:
    """Prompts of LENGTHS, which all begin with the same tokens, and differ from there on."""
    start = [7 + (beginning + place) % 40 for place in range(beginning)]
    return [start + [3 + (i * place + i) % 40 for place in range(n)][beginning:] for i, n in enumerate(LENGTHS)]


def cache_bytes(worker) -> int:
    storages = [cache.untyped_storage() for cache in worker.model_runner.kv_caches]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())  # layers share one


def cancel_the_first(llm, prompt: list[int]) -> None:
    """Of two requests with one prompt, the first is cancelled between its forwards. The other must not wait for it."""
    scheduler = llm.engine_core.engine_core.scheduler
    first, _ = add(llm, prompt, prompt)
    scheduler.reset_prefix_cache()
    llm.step()
    assert scheduler.connector.computing, "the first forward has computed the whole prompt"
    llm.abort_request([first], internal=True)
    finish(llm)


def end_with_another_prompt(llm) -> None:
    """Whatever begins the last prompt to be scheduled, no copy of the others' beginning may outlive the call."""
    beginning = list(range(3, 29))
    # The beginning itself.
    add(llm, [*beginning, *range(10)], [*beginning, *range(20, 32)], beginning)
    finish(llm)
    # A prompt that comes while the second waits for the first, and begins otherwise.
    llm.engine_core.engine_core.scheduler.reset_prefix_cache()
    add(llm, [*beginning, *range(10)], [*beginning, *range(20, 32)])
    llm.step()
    add(llm, [40] * 20)
    finish(llm)


def add(llm, *prompts: list[int]) -> list[str]:
    """Add a request for each prompt. Returns their names in the engine."""
    sampling = SamplingParams(max_tokens=4, detokenize=False)
    names = [str(uuid.uuid4()) for _ in prompts]
    return [llm.add_request(name, {"prompt_token_ids": ids}, sampling) for name, ids in zip(names, prompts)]


def finish(llm) -> None:
    steps = 0
    while llm.has_unfinished_requests():
        llm.step()
        steps += 1
        assert steps < 20, "a request still waits"
    check_nothing_is_left(llm.engine_core.engine_core.scheduler)


def main(model_path: str) -> None:
    world = placement.init(0)
    policy = model.load(model_path, world, torch.float32)
    sets = {beginning: prompts_with(beginning) for beginning in BEGINNINGS}
    for limits in (
        {},  # everything fits
        {"max_num_batched_tokens": 32, "max_num_seqs": 24},  # a prompt takes several forwards
        {"max_num_seqs": 4},  # most responses wait until others have ended, the first one among them
        {"num_gpu_blocks_override": 17},  # requests lose their blocks and begin again
    ):
        vllm_engine.engine_settings = lambda config, limits=limits: own_settings(config) | limits
        engine = engines.start("vllm", model_path, [1], world, torch.float32, max_model_len=128, sequences=24)
        sample = dict(n=6, temperature=1.0, max_tokens=1, seed=0)
        prefill = {beginning: computed_tokens(engine, prompts, **sample)[1] for beginning, prompts in sets.items()}
        (cache,) = engine.llm.collective_rpc(cache_bytes)
        resident = psutil.Process().memory_info().rss
        engine.sleep()
        returned = resident - psutil.Process().memory_info().rss
        # The same prompts as before: their keys and values were in the cache that is gone.
        gaps = []
        for prompts in sets.values():
            batch, _ = computed_tokens(engine, prompts, n=6, temperature=1.0, max_tokens=24, seed=1)
            micro_batches = batching.pack(batch, torch.arange(len(batch)), batching.Compute(600), world)
            trainer = model.frozen_logprobs(policy, batch, micro_batches, temperature=1.0)
            gaps.append((trainer - batch.rollout_logprobs)[batch.response_mask].abs().max().item())
        memory = {"cache": cache, "returned": returned}
        print(json.dumps({"limits": limits, "prefill": prefill, "gap": max(gaps), **memory}), flush=True)
        if "max_num_batched_tokens" in limits:
            cancel_the_first(engine.llm.llm_engine, sets[0][2])
        end_with_another_prompt(engine.llm.llm_engine)
        engine.shutdown()


main(sys.argv[1])
