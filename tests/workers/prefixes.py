"""Prints, for engines of several sizes, how many tokens were computed until 6 responses to each of 4 prompts had their
first token, and in how many forwards: one line of JSON each.

There are such numbers for each length of what all prompts begin with. Each line also has the largest difference from
the trainer's log-probs, the bytes of the KV cache, and how many bytes of memory sleep() returned.
prefixes.py MODEL. Raises AssertionError if a copy is left over, a request waits for ever, or prompts share too little.
"""

import contextlib
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
START = list(range(3, 29))  # what some prompts begin with: 26 tokens, a part of a block
BEGINNINGS = [0, 26, 40]  # tokens that all prompts begin with: none, a part of a block, a block and a part
own_settings = vllm_engine.engine_settings


@contextlib.contextmanager
def counted(scheduler):
    """Gives a list, to which each forward adds the number of tokens that it computes."""
    forwards, schedule = [], scheduler.schedule

    def counting(*args, **kwargs):
        output = schedule(*args, **kwargs)
        if output.total_num_scheduled_tokens:
            forwards.append(output.total_num_scheduled_tokens)
        return output

    scheduler.schedule = counting
    yield forwards
    scheduler.schedule = schedule


def sample(engine, prompts, **sampling):
    """The responses, and the number of tokens of each forward that computed them."""
    scheduler = engine.llm.llm_engine.engine_core.engine_core.scheduler
    with counted(scheduler) as forwards:
        batch = engine.generate(prompts, **sampling)
    check_nothing_is_left(scheduler)
    return batch, forwards


def check_nothing_is_left(scheduler) -> None:
    connector = scheduler.connector
    assert not (connector.waiting or connector.computing or connector.saved or connector.beginning)
    assert not get_kv_transfer_group().contents, "a copy is left over"


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


def cancel_some(llm, *prompts: list[int]) -> None:
    """The first request computes for the others, which wait. Whichever are cancelled, no other one waits for ever.

    The first prompt must take exactly two forwards.
    """
    scheduler = llm.engine_core.engine_core.scheduler
    # Half of the first prompt is computed. The same, and it has lost its blocks. All of it is, and the copy is saved.
    for forwards, loses_blocks in ((1, False), (1, True), (2, False)):
        # One that waits, all that wait, the first one and one that waits, all.
        for cancelled in (slice(1, 2), slice(1, None), slice(0, 2), slice(0, None)):
            names = add(llm, *prompts)
            scheduler.reset_prefix_cache()
            for _ in range(forwards):
                llm.step()
            assert scheduler.connector.saved if forwards == 2 else scheduler.connector.computing
            if loses_blocks:
                scheduler.reset_prefix_cache(reset_running_requests=True)
            llm.abort_request(names[cancelled], internal=True)
            llm.step()  # also if none is left: the worker frees copies in the next step
            finish(llm)


def share_what_can_be_shared(llm, same: list[list[int]]) -> None:
    """How few tokens are computed, for prompts that share more or less. same: two prompts with the same beginning."""
    scheduler = llm.engine_core.engine_core.scheduler

    def tokens(*prompts: list[int]) -> int:
        scheduler.reset_prefix_cache()
        with counted(scheduler) as forwards:
            add(llm, *prompts, max_tokens=1)
            finish(llm)
        return sum(forwards)

    first, second = same
    assert tokens(first, second) == len(first) + len(second) - 26
    # All but the last token is the same, also while prompts that begin otherwise wait.
    other = [40] * 20
    assert tokens(other, [*START, 1], [*START, 1], [*START, 2], [*START, 2]) == 20 + 27 + 3
    # The beginning of an earlier call is forgotten: now more is the same.
    longer = [*START, 30, 31]
    assert tokens([*longer, 1, 2], [*longer, 3, 4]) == 30 + 2


def keep_a_beginning(llm) -> None:
    """A prompt that comes late and begins otherwise changes nothing for those that wait."""
    scheduler = llm.engine_core.engine_core.scheduler
    scheduler.reset_prefix_cache()
    with counted(scheduler) as forwards:
        add(llm, [*START, 1, 2], [*START, 3, 4], [*START, 5, 6], max_tokens=1)
        llm.step()
        add(llm, [40] * 20, max_tokens=1)
        finish(llm)
    assert sum(forwards) == 28 + 2 + 2 + 20, forwards


def end_with_another_prompt(llm) -> None:
    """However the last prompt to be scheduled begins, no copy of the others' beginning may outlive the call."""
    # The beginning itself.
    add(llm, [*START, *range(10)], [*START, *range(20, 32)], START)
    finish(llm)
    # A prompt that comes while the second waits for the first, and begins otherwise.
    llm.engine_core.engine_core.scheduler.reset_prefix_cache()
    add(llm, [*START, *range(10)], [*START, *range(20, 32)])
    llm.step()
    add(llm, [40] * 20)
    finish(llm)


def add(llm, *prompts: list[int], max_tokens: int = 4) -> list[str]:
    """Add a request for each prompt. Returns their names in the engine."""
    sampling = SamplingParams(max_tokens=max_tokens, detokenize=False)
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
        one = dict(n=6, temperature=1.0, max_tokens=1, seed=0)
        steps = {beginning: sample(engine, prompts, **one)[1] for beginning, prompts in sets.items()}
        prefill = {beginning: sum(forwards) for beginning, forwards in steps.items()}
        forwards = {beginning: len(forwards) for beginning, forwards in steps.items()}
        again = len(sample(engine, sets[26], **one)[1])  # vLLM has whole blocks of these prompts now
        (cache,) = engine.llm.collective_rpc(cache_bytes)
        resident = psutil.Process().memory_info().rss
        engine.sleep()
        returned = resident - psutil.Process().memory_info().rss
        # The same prompts as before: their keys and values were in the cache that is gone.
        gaps = []
        for prompts in sets.values():
            batch, _ = sample(engine, prompts, n=6, temperature=1.0, max_tokens=24, seed=1)
            micro_batches = batching.pack(batch, torch.arange(len(batch)), batching.Compute(600), world)
            trainer = model.frozen_logprobs(policy, batch, micro_batches, temperature=1.0)
            gaps.append((trainer - batch.rollout_logprobs)[batch.response_mask].abs().max().item())
        counts = {"prefill": prefill, "forwards": forwards, "again": again}
        memory = {"cache": cache, "returned": returned}
        print(json.dumps({"limits": limits, **counts, "gap": max(gaps), **memory}), flush=True)
        llm = engine.llm.llm_engine
        if "max_num_batched_tokens" in limits:
            cancel_the_first(llm, sets[0][2])
            cancel_some(llm, *[sets[0][2]] * 4)  # they wait for a tail
            cancel_some(llm, *sets[40][1:], sets[40][0])  # they wait for what all begin with
        else:
            share_what_can_be_shared(llm, sets[26][:2])
            keep_a_beginning(llm)
        end_with_another_prompt(llm)
        engine.shutdown()


main(sys.argv[1])
