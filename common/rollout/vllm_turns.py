"""Conversations with an environment in vLLM's engine of this process: its own step loop, without stragglers."""

from common.rollout.rollout import Rollout, gather
from common.rollout.turns import Replies, Reply, collate_turns, open_turns, turn_seed


def converse(engine, prompt_ids: list[list[int]], settings: dict, seed: int, reply: Reply) -> Rollout:
    """VLLMEngine.generate() with an environment. Collective over the ranks that share this engine.

    Each turn is a request, sent as soon as the reply to the last one is there. Ranks that share an engine send it the
    same requests at the same time, and each asks for replies to its own.
    """
    from vllm import SamplingParams

    world = engine.world
    n = settings.pop("n")
    all_prompts, first = gather(prompt_ids, world)
    rows = open_turns(all_prompts, n, settings["max_tokens"])
    rows_of_this_rank = range(first * n, (first + len(prompt_ids)) * n)
    # With a seed of its own, a turn does not depend on which other requests share its forwards.
    has_seeds = can_take_seeds(engine) and settings["temperature"] > 0

    def sampling(row: int) -> SamplingParams:
        limits = settings | {"max_tokens": rows[row].room}
        if has_seeds:
            prompt, sample = divmod(row, n)
            engines = world.size // world.rollout_tp
            # No other response of the step has this number. Ranks that share an engine compute the same one.
            number = (prompt * engines + world.engine_index) * n + sample
            limits["seed"] = turn_seed(seed, number, rows[row])
        return SamplingParams(**limits)

    replies = Replies(lambda row: reply(row // n - first, rows[row]))
    requests = {}  # vLLM's name of a request -> row
    due = list(range(len(rows)))  # rows whose next turn has not been asked for
    unfinished = len(rows)
    while unfinished:
        for row in due:
            prompt = {"prompt_token_ids": rows[row].prompt}
            (name,) = engine.llm.enqueue([prompt], sampling(row), use_tqdm=False)
            # enqueue() returns NUMBER-SUFFIX, and outputs have the number alone.
            requests[name.partition("-")[0]] = row
        idle = not requests
        outputs = [] if idle else engine.llm.llm_engine.step()
        # take() comes before ask() below: it waits only for replies that were asked for in an earlier round.
        arrived, _ = gather(replies.take(idle), world)
        for output in outputs:
            if output.finished:
                row = requests.pop(output.request_id)
                (sampled,) = output.outputs
                rows[row].add(list(sampled.token_ids), sampled.logprobs.logprobs, sampled.finish_reason == "length")
                if row in rows_of_this_rank:
                    replies.ask(row)
        due = []
        for row, ids in arrived:
            if ids is None:
                unfinished -= 1
            else:
                rows[row].observe(ids)
                due.append(row)
    return collate_turns([rows[row] for row in rows_of_this_rank], engine.weight_version, world.device)


def can_take_seeds(engine) -> bool:
    """Whether requests may bring seeds. On a CPU this turns off chunked prefill, if all prompts fit without it.

    vLLM cannot rewind the generator of a request on a CPU after it has computed half a prompt.
    """
    if engine.world.device.type == "cuda":
        return True
    config = engine.llm.llm_engine.vllm_config.scheduler_config
    if config.max_num_batched_tokens >= engine.longest:
        config.enable_chunked_prefill = False
    return not config.enable_chunked_prefill
