"""Conversations with an environment in vLLM's engine of this process: its own step loop, without stragglers."""

import torch.distributed as dist

from common.placement import World
from common.rollout.rollout import Rollout, gather_prompts
from common.rollout.turns import Replies, Reply, collate_turns, open_turns, turn_seed


def converse(engine, prompt_ids: list[list[int]], settings: dict, seed: int, reply: Reply) -> Rollout:
    """VLLMEngine.generate() with an environment. Collective over the ranks that share this engine.

    Each turn is a request, sent as soon as the reply to the last one is there. Ranks that share an engine send it the
    same requests at the same time, and each asks for replies to its own.
    """
    from vllm import SamplingParams

    world, n = engine.world, settings.pop("n")
    all_prompts, first = gather_prompts(prompt_ids, world)
    rows = open_turns(all_prompts, n, settings["max_tokens"])
    own = range(first * n, (first + len(prompt_ids)) * n)
    engines, config = world.size // world.rollout_tp, engine.llm.llm_engine.vllm_config.scheduler_config
    if world.device.type == "cpu" and config.max_num_batched_tokens >= engine.longest:
        # Requests bring their seeds. vLLM cannot rewind a generator on a CPU after it has computed half a prompt.
        config.enable_chunked_prefill = False
    replies = Replies(lambda row: reply(row // n - first, rows[row]))
    requests, due, unfinished = {}, list(range(len(rows))), len(rows)
    while unfinished:
        for row in due:
            limits = settings | {"max_tokens": rows[row].room}
            if settings["temperature"] > 0 and (world.device.type == "cuda" or not config.enable_chunked_prefill):
                number = (row // n * engines + world.engine_index) * n + row % n
                limits["seed"] = turn_seed(seed, number, rows[row])
            asked = [{"prompt_token_ids": rows[row].prompt}], SamplingParams(**limits)
            (name,) = engine.llm.enqueue(*asked, use_tqdm=False)
            requests[name.partition("-")[0]] = row
        idle = not requests
        outputs = [] if idle else engine.llm.llm_engine.step()
        arrived = share(engine.world, replies.take(idle))
        for output in outputs:
            if output.finished:
                row, (sampled,) = requests.pop(output.request_id), output.outputs
                rows[row].add(list(sampled.token_ids), sampled.logprobs.logprobs, sampled.finish_reason == "length")
                if row in own:
                    replies.ask(row)
        for row, ids in arrived:
            if ids is not None:
                rows[row].observe(ids)
        due = [row for row, ids in arrived if ids is not None]
        unfinished -= len(arrived) - len(due)
    return collate_turns([rows[row] for row in own], engine.weight_version, world.device)


def share(world: World, arrived: list) -> list:
    """The replies of all ranks that share this engine, in one order. Collective over them."""
    if world.tp_group is None:
        return arrived
    shares: list = [None] * world.rollout_tp
    dist.all_gather_object(shares, arrived, group=world.tp_group)
    return [pair for share in shares for pair in share]
