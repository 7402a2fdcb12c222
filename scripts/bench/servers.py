"""Tokens a second of vLLM's server and of SGLang's, in turns, each alone on the same core with one thread.

    bash scripts/sglang/install_cpu.sh .sglang
    python scripts/bench/servers.py --sglang .sglang
    python scripts/bench/servers.py --sglang .sglang --model models/SmolLM2-135M-Instruct --dataset sums --prompts 8

Both are asked as a run asks them: for all groups of a step at once, with log-probs. A push is the whole model, through
shared memory. Two cores: the servers have the last one.
"""

import dataclasses
import os
import signal
import statistics
import subprocess
import time
from pathlib import Path

import httpx
import torch
import tyro
from torch.distributed.elastic.utils.distributed import get_free_port

from common import placement, weight_sync
from common.data import arithmetic, prompts
from common.data.tokenizer import load_tokenizer
from common.placement import Layout, World
from common.rollout import engines
from common.trainer import model
from common.trainer.batching import Compute

ROOT = Path(__file__).resolve().parents[2]
START_SECONDS = 300


@dataclasses.dataclass
class Args:
    sglang: str  # Folder of SGLang's virtual environment.
    model: str = str(arithmetic.WARM_START)
    dataset: str = "arithmetic"
    rounds: int = 7  # How often each server is asked. The first time does not count.
    prompts: int = 32  # Of a step.
    group_size: int = 16  # Responses to a prompt.
    max_response_tokens: int = 48


def main(args: Args) -> None:
    core = max(os.sched_getaffinity(0))
    world = placement.init(0, layout=Layout("split", (core,)))
    torch.set_num_threads(1)
    tokenizer, stop_token_ids = load_tokenizer(args.model)
    asked = prompts.load((args.dataset,), prompts.TrainSource(), "train", tokenizer, 256)[: args.prompts]
    ids = [prompt.ids for prompt in asked]
    policy = model.load(args.model, world, torch.float32, Compute())
    longest = max(map(len, ids)) + args.max_response_tokens
    server, url = start_sglang(args, core, longest)
    try:
        layouts = {"vllm": Layout("split", (core,)), "sglang": Layout("split", rollout_urls=(url,))}
        own = {}
        for backend, layout in layouts.items():
            own[backend] = start(backend, layout, args, stop_token_ids, world, longest)
        measured = {backend: [] for backend in own}
        for turn in range(args.rounds):
            for backend, engine in own.items():
                measured[backend].append(measure(engine, policy, ids, args, seed=turn))
        show({backend: rows[1:] for backend, rows in measured.items()})
        for engine in own.values():
            engine.shutdown()
    finally:
        os.killpg(server.pid, signal.SIGTERM)
        server.wait()
    placement.finish(world)


def start(backend: str, layout: Layout, args: Args, stop_token_ids: list[int], world: World, longest: int):
    return engines.start(
        backend,
        args.model,
        stop_token_ids,
        world,
        torch.float32,
        max_model_len=longest,
        sequences=args.prompts * args.group_size,
        layout=layout,
    )


def start_sglang(args: Args, core: int, longest: int) -> tuple[subprocess.Popen, str]:
    """SGLang's server with room for as many responses as vLLM's, and its URL."""
    sequences = min(engines.MOST_SEQUENCES, args.prompts * args.group_size)
    url = f"http://127.0.0.1:{(port := get_free_port())}"
    flags = ["--port", port, "--dtype", "float32", "--max-running-requests", sequences]
    flags += ["--max-total-tokens", sequences * (longest + 16), "--log-level", "error"]
    server = subprocess.Popen(
        ["bash", str(ROOT / "scripts/serve_rollout.sh"), args.model, *map(str, flags)],
        env=os.environ | {"SGLANG": args.sglang, "OMP_NUM_THREADS": "1"},
        start_new_session=True,
        preexec_fn=lambda: os.sched_setaffinity(0, {core}),
    )
    deadline = time.monotonic() + START_SECONDS
    while True:
        try:
            if httpx.get(f"{url}/health", timeout=30).status_code == 200:
                return server, url
        except httpx.TransportError:
            time.sleep(0.5)
        if server.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError("SGLang's server did not start")


def measure(engine, policy, ids: list[list[int]], args: Args, seed: int) -> dict[str, float]:
    """One push and one step of responses."""
    began = time.perf_counter()
    weight_sync.push(policy, engine)
    pushed = time.perf_counter()
    rollout = engine.generate(ids, args.group_size, 1.0, args.max_response_tokens, seed)
    seconds = time.perf_counter() - pushed
    return {"push": pushed - began, "tokens/s": int(rollout.response_mask.sum()) / seconds}


def show(measured: dict[str, list[dict[str, float]]]) -> None:
    """The medians of both, and the ratios of the pairs: SGLang's over vLLM's."""
    for what in ("tokens/s", "push"):
        values = {backend: [row[what] for row in rows] for backend, rows in measured.items()}
        ratios = [theirs / ours for ours, theirs in zip(values["vllm"], values["sglang"])]
        medians = " | ".join(f"{backend} {statistics.median(found):,.3g}" for backend, found in values.items())
        print(
            f"{what:<8} | {medians} | ratio {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})",
            flush=True,
        )


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
