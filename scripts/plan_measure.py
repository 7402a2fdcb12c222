"""What scripts/plan.py's `measure` and `validate` run: phases timed through common/, and steps of algos/grpo.py.

Each model is random weights in a process of its own (plan_measure.py time|step SIZE), which waits on standard input:
one works at any time, and all take turns, so that a shared machine's moods hit fit and validation alike.
"""

import dataclasses
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path

import torch
from plan_model import (
    GIB,
    Costs,
    Job,
    Layout,
    Model,
    dot,
    from_config,
    logprobs_counts,
    rollout_counts,
    sync_counts,
    update_counts,
    with_budget,
)
from transformers import AutoModelForCausalLM, Qwen2Config

from common import batching, embedded, engines, errors, model, placement, weight_sync
from common.grading import Result

FILE = Path(__file__)
PHASES = ("rollout", "logprobs", "update", "sync")
ALONE = Layout(1, 1, 1, False)  # one rank, which does everything
STEP = {"prompts_per_step": 10, "group_size": 8, "mini_batches": 2, "max_prompt_tokens": 100, "max_response_tokens": 56}
PROMPT_MEAN = 65.0  # tokens, of run_steps: 30 to 100, all alike often
WORK = (  # prompts, group, prompt tokens, response tokens at most, mini-batches: none is STEP's
    (6, 8, 48, 64, 2),
    (4, 4, 24, 64, 1),
    (12, 8, 112, 24, 4),
    (2, 4, 40, 40, 1),
)


def config(size: str) -> Qwen2Config:
    """WIDTHxLAYERS as the embedded job's architecture: heads 64 wide, its vocabulary, untied."""
    width, layers = map(int, size.split("x"))
    heads = width // 64
    own = {"hidden_size": width, "intermediate_size": 4 * width, "num_hidden_layers": layers, "layer_types": None}
    own |= {"num_attention_heads": heads, "num_key_value_heads": heads, "max_window_layers": layers}
    return Qwen2Config(**(embedded.config().to_diff_dict() | own))


def write_model(size: str, folder: str) -> str:
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config(size), dtype=torch.float32).save_pretrained(folder)
    embedded.tokenizer().save_pretrained(folder)
    return folder


def turn(figures) -> None:
    """Report, and wait for the next turn."""
    print("TURN", json.dumps(figures), flush=True)
    if not sys.stdin.readline():
        sys.exit(0)


# ---- workers --------------------------------------------------------------------------------------------------------


def time_phases(size: str) -> None:
    """A turn: each of WORK once, as [{"seconds": by phase, "job": Job's fields}, ...]."""
    world, dtype = placement.init(seed=0), placement.native_dtype()
    with tempfile.TemporaryDirectory() as scratch:
        folder = write_model(size, scratch)
        compute = batching.plan(batching.Compute(), folder, dtype)
        policy = model.load(folder, world, dtype, compute)
        longest = max(prompt + response for _, _, prompt, response, _ in WORK)
        sequences = max(prompts * group for prompts, group, *_ in WORK)
        engine = engines.start("vllm", folder, [1], world, dtype, max_model_len=longest, sequences=sequences)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-6, fused=True)
    turns = 0
    results = None
    while True:
        turn(results)
        turns += 1
        results = [one_step(policy, optimizer, engine, world, compute, work, turns) for work in WORK]


def one_step(policy, optimizer, engine, world, compute: batching.Compute, work: tuple[int, ...], seed: int) -> dict:
    """A step's phases as algos/ have them, on one rank; the loss is the mean log-prob."""
    prompts, group, prompt_tokens, response_tokens, mini_batches = work
    draw, spent = random.Random(seed), {}

    def clock(phase: str, began: float) -> None:
        if world.device.type == "cuda":
            torch.cuda.synchronize()
        spent[phase] = time.perf_counter() - began

    ids = [[draw.randrange(3, 50) for _ in range(prompt_tokens)] for _ in range(prompts)]
    began = time.perf_counter()
    batch = engine.generate(ids, group, 1.0, response_tokens, seed=seed)
    engine.sleep()
    clock("rollout", began)
    began = time.perf_counter()
    model.frozen_logprobs(policy, batch, batching.pack(batch, torch.arange(len(batch)), compute, world), 1.0)
    clock("logprobs", began)
    began = time.perf_counter()
    for rows in torch.arange(len(batch)).chunk(mini_batches):
        micro_batches = batching.pack(batch, rows, compute, world)
        for micro in micro_batches:
            model.accumulate(policy, last=micro is micro_batches[-1])
            logprobs, _ = model.response_logprobs(policy, micro, 1.0, with_entropy=True)
            (logprobs * micro.response_mask).mean().backward()
        torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    clock("update", began)
    began = time.perf_counter()
    weight_sync.push(policy, engine)
    clock("sync", began)
    lengths = [len(response) for response in batch.response_ids]
    job = {"prompts_per_step": prompts, "group_size": group, "prompt_mean": prompt_tokens}
    job |= {"max_prompt_tokens": prompt_tokens, "max_response_tokens": max(lengths)}
    job |= {"response_mean": statistics.mean(lengths), "mini_batches": mini_batches}
    return {"seconds": spent, "job": job}


def spread(items, lengths, truncated) -> list:
    """A reward that differs inside every group, so that no row skips the update."""
    return [Result(sum(item.response_ids) % 9973 / 9973, None) for item in items]


def run_steps(size: str) -> None:
    """A turn: one step of algos/grpo.py, its metrics. The wait is put between two steps."""
    import tyro

    from algos import grpo
    from common import rewards
    from common.tracking import Tracker

    rewards.load = lambda *given: rewards.Rewards({"spread": spread}, {"spread": 1.0}, None, "drop")

    begin, write = Tracker.begin, Tracker.write
    last = {}

    def first(self, step: int, profiled) -> None:
        turn(last)
        begin(self, step, profiled)

    def then(self, step: int) -> dict[str, float]:
        last.update(write(self, step))
        return last

    Tracker.begin, Tracker.write = first, then
    with tempfile.TemporaryDirectory() as scratch:
        draw = random.Random(0)
        prompts = ["".join(draw.choices("abcdefghijklmnopqrstuvwxyz0123456789", k=30 + k % 71)) for k in range(710)]
        rows = [json.dumps({"prompt": text, "answer": "1"}) for text in prompts]
        (Path(scratch) / "prompts.jsonl").write_text("\n".join(rows))
        flags = ["--model", write_model(size, f"{scratch}/model"), "--dataset", f"{scratch}/prompts.jsonl"]
        flags += ["--run-dir", f"{scratch}/run", "--steps", 10**6]
        flags += ["--learning-rate", 1e-6, "--schedule", "constant", "--eval-prompts", 0, "--rollouts-every", 10**6]
        for name, value in STEP.items():
            flags += [f"--{name.replace('_', '-')}", value]
        errors.launch(grpo.main, tyro.cli(grpo.Args, args=list(map(str, flags))))


# ---- the session that gives them their turns ------------------------------------------------------------------------


class Worker:
    """A process of this file that works while it has the turn."""

    def __init__(self, role: str, size: str, scratch: str):
        self.size, self.log, self.turns = size, Path(scratch) / f"{role}-{size}.log", []
        environment = os.environ | {"PYTHONPATH": str(FILE.parents[1]), "OMP_WAIT_POLICY": "PASSIVE"}
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        with open(self.log, "w") as errors:
            command = [sys.executable, str(FILE), role, size]
            self.process = subprocess.Popen(command, stderr=errors, env=environment, **pipes)

    def wait(self):
        for line in self.process.stdout:
            if line.startswith("TURN "):
                return json.loads(line.removeprefix("TURN "))
        tail = "\n".join(self.log.read_text().splitlines()[-20:])
        raise errors.RunFailed(f"the process of {self.size} ended; the end of its log:\n{tail}", code="process-ended")

    def take_turn(self) -> None:
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        self.turns.append(self.wait())

    def close(self) -> None:
        self.process.stdin.close()
        self.process.wait()


def play(fit: tuple[str, ...], held_out: tuple[str, ...], rounds: int) -> tuple[dict[str, list], dict[str, list]]:
    """Turns of all sizes, `rounds` after one of warm-up: size -> turns, of time_phases and of run_steps."""
    with tempfile.TemporaryDirectory() as scratch:
        workers = [Worker("time", size, scratch) for size in fit]
        workers += [Worker("step", size, scratch) for size in held_out]
        for worker in workers:  # they load at once; from here on one works at any time
            worker.wait()
        for _ in range(rounds + 1):
            for worker in workers:
                worker.take_turn()
        for worker in workers:
            worker.close()
    turns = [(worker.size, worker.turns[1:]) for worker in workers]
    return dict(turns[: len(fit)]), dict(turns[len(fit) :])


def engine_block(longest: int) -> int:
    """Tokens of a block of the engine's KV cache on a CPU, as common/vllm_engine.py sets it."""
    return 32 if longest > 128 else 128


def as_job(size: Model, dtype: torch.dtype, longest: int, **fields) -> Job:
    """A job on one rank of this machine. longest: prompt and response tokens the engine was started for."""
    block = 16 if torch.cuda.is_available() else engine_block(longest)
    job = Job(dtype=dtype, kv_block=block, **fields)
    return with_budget(size, job, batching.rank_memory())


def counts(size: Model, job: Job) -> dict[str, dict[str, float]]:
    """All counts of a step on one rank; the KV cache holds everything."""
    job = dataclasses.replace(job, rollout_memory=0.9)
    return {
        "rollout": rollout_counts(size, job, ALONE, batching.rank_memory()),
        "logprobs": logprobs_counts(size, dataclasses.replace(job, mini_batches=2, epochs=1), 1),  # always one pass
        "update": update_counts(size, job, 1),
        "sync": sync_counts(size),
    }


def fit_costs(rows: list[tuple[dict[str, float], float]]) -> dict[str, float]:
    """Costs >= 0, seconds a unit, that minimize the sum of squared relative errors of (counts, seconds) rows."""
    names = sorted({name for amounts, _ in rows for name, amount in amounts.items() if amount})
    matrix = torch.tensor(
        [[amounts.get(name, 0.0) / spent for name in names] for amounts, spent in rows], dtype=torch.float64
    )
    scale = matrix.amax(0)
    matrix, free = matrix / scale, list(range(len(names)))
    while free:  # least squares without the most negative cost, until none is: few columns, so this is enough
        found = torch.linalg.lstsq(matrix[:, free], torch.ones(len(rows), 1, dtype=torch.float64)).solution[:, 0]
        if found.min() >= 0:
            break
        free.pop(int(found.argmin()))
    solved = {names[k]: (value / scale[k]).item() for k, value in zip(free, found)} if free else {}
    return {name: solved.get(name, 0.0) for name in names}


def fit_turns(turns: dict[str, list], dtype: torch.dtype) -> tuple[Costs, dict[str, float]]:
    """(costs, the largest relative error of a phase where it was fitted) of time_phases' turns.

    A work's seconds are medians over the turns, and so are its lengths, which the engine draws anew each time.
    """
    rows = {phase: [] for phase in PHASES}
    longest = max(prompt + response for _, _, prompt, response, _ in WORK)
    for size, given in turns.items():
        shape = from_config(config(size))
        for results in zip(*given):
            fields = {k: statistics.median(it["job"][k] for it in results) for k in results[0]["job"]}
            amounts = counts(shape, as_job(shape, dtype, longest, **fields))
            for phase in PHASES:
                rows[phase].append((amounts[phase], statistics.median(it["seconds"][phase] for it in results)))
    costs = {phase: fit_costs(rows[phase]) for phase in PHASES}
    errors = {phase: max(abs(dot(a, costs[phase]) / s - 1) for a, s in rows[phase]) for phase in PHASES}
    return costs, errors


def hardware() -> str:
    """This machine in words."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    cores = len(os.sched_getaffinity(0))
    return f"{cores} cores of {(names or [platform.machine()])[0]}, {batching.rank_memory() / GIB:.0f} GiB"


def record(costs: Costs, errors: dict[str, float], sizes: tuple[str, ...], dtype: torch.dtype, rounds: int) -> dict:
    """What `plan.py --constants` reads."""
    return {
        "costs": costs,
        "unit": "seconds a count; plan_model.py says what is counted",
        "largest_fit_error": errors,
        "sizes": list(sizes),
        "rounds": rounds,
        "hardware": hardware(),
        "device": "cuda" if torch.cuda.is_available() else "cpu",
        "memory": batching.rank_memory(),
        "dtype": str(dtype).removeprefix("torch."),
        "torch": torch.__version__,
    }


def validation_rows(costs: Costs, steps: dict[str, list], dtype: torch.dtype) -> list[tuple[str, str, float, float]]:
    """(size, phase, predicted s, measured s) of each held-out size's phases and their sum, "step"."""
    rows = []
    for size, turns in steps.items():
        shape = from_config(config(size))
        length = statistics.median(turn["response/length_mean"] for turn in turns)
        longest = STEP["max_prompt_tokens"] + STEP["max_response_tokens"]
        job = as_job(shape, dtype, longest, prompt_mean=PROMPT_MEAN, response_mean=length, **STEP)
        predicted = {phase: dot(amounts, costs[phase]) for phase, amounts in counts(shape, job).items()}
        measured = {phase: statistics.median(turn[f"time/{phase}"] for turn in turns) for phase in PHASES}
        predicted["step"] = sum(predicted.values())
        measured["step"] = statistics.median(sum(turn[f"time/{phase}"] for phase in PHASES) for turn in turns)
        rows += [(size, phase, predicted[phase], measured[phase]) for phase in (*PHASES, "step")]
    return rows


def page(rows, found: dict, command: str) -> str:
    """The validation as markdown."""
    worst = max(abs(predicted / measured - 1) for _, phase, predicted, measured in rows if phase == "step")
    table = ["| model | parameters | phase | predicted, s | measured, s | ratio |", "|---" * 6 + "|"]
    for size, phase, predicted, measured in rows:
        name = f"{from_config(config(size)).parameters / 1e6:.1f} M"
        cells = [f"{predicted:.2f}", f"{measured:.2f}", f"{predicted / measured:.2f}"]
        if phase == "step":
            phase, cells = "**step**", [f"**{cell}**" for cell in cells]
        table.append(f"| {size} | {name} | {phase} | " + " | ".join(cells) + " |")
    errors = ", ".join(f"{phase} {error:.0%}" for phase, error in found["largest_fit_error"].items())
    paragraphs = (
        f"`{command}` on {found['hardware']}, {found['dtype']}, torch {found['torch']}.",
        f"Models are WIDTHxLAYERS with random weights. Costs come from {', '.join(found['sizes'])}, with {len(WORK)} "
        f"workloads each, of which none is the one below; the largest error where they were fitted: {errors}. Below "
        f"are steps of algos/grpo.py on other sizes: {STEP['prompts_per_step']} prompts of {PROMPT_MEAN:.0f} tokens in "
        f"the mean, {STEP['group_size']} responses of at most {STEP['max_response_tokens']} tokens, "
        f"{STEP['mini_batches']} mini-batches. The responses' mean length, as measured, is an input of the prediction. "
        f"A step is the sum of the four phases. Medians of {found['rounds']} turns; all models take turns.",
        "TABLE",
        f"Largest error of a step: {worst:.0%}.",
    )
    text = "\n\n".join(textwrap.fill(paragraph, 120, break_on_hyphens=False) for paragraph in paragraphs)
    return "# Planner: predicted against measured\n\n" + text.replace("TABLE", "\n".join(table)) + "\n"


if __name__ == "__main__":
    {"time": time_phases, "step": run_steps}[sys.argv[1]](sys.argv[2])
