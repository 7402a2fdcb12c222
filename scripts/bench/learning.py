"""Does the embedded job learn as well with each switch for speed or memory? One run a row.

python scripts/bench/learning.py                              # seven runs, one on each core: eight minutes on two
python scripts/bench/learning.py --seeds 3 4 --steps 80

The switches change rounding and random numbers alone (tests/trainer/test_packing.py compares gradients): this shows
that a whole run learns with them. What responses of older weights cost is measured by scripts/staleness.py.
"""

import dataclasses
import json
import multiprocessing
import os
import queue
import statistics
import sys
import tempfile
from multiprocessing.pool import ThreadPool
from pathlib import Path

import tyro

from algos import grpo

SWITCHES = (
    "",
    "--token-budget 400",
    "--activation-checkpointing",
    "--offload all",
    "--kernels compile",
    "--dtype bfloat16",
    "--rollout-backend hf",
)


@dataclasses.dataclass
class Args:
    seeds: tuple[int, ...] = (0,)
    steps: int = 52


def learn(flags: list[str], log: Path) -> None:
    """One run, in a process that does nothing else."""
    with open(log, "w") as file:
        os.dup2(file.fileno(), sys.stdout.fileno())
        os.dup2(file.fileno(), sys.stderr.fileno())
    grpo.main(tyro.cli(grpo.Args, args=flags, default=grpo.Args(**grpo.EMBEDDED)))


def metrics_of(flags: str, seed: int, steps: int, run_dir: Path) -> list[dict]:
    """The rows of metrics.jsonl. The process keeps to the cores of the calling thread."""
    every = [*flags.split(), "--seed", str(seed), "--steps", str(steps), "--run-dir", str(run_dir)]
    log = run_dir.with_suffix(".log")
    process = multiprocessing.get_context("spawn").Process(target=learn, args=(every, log))
    process.start()
    process.join()
    if process.exitcode:
        raise RuntimeError(f"{flags}, seed {seed}: exit {process.exitcode}: {log.read_text()[-2000:]}")
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def main(args: Args) -> None:
    free = queue.Queue()
    for core in os.sched_getaffinity(0):
        free.put(core)
    with (
        tempfile.TemporaryDirectory() as scratch,
        ThreadPool(free.qsize(), lambda: os.sched_setaffinity(0, {free.get()})) as pool,
    ):
        folder = Path(scratch)
        work = [
            (flags, seed, args.steps, folder / f"{i}-{seed}") for seed in args.seeds for i, flags in enumerate(SWITCHES)
        ]
        results = pool.starmap(metrics_of, work, chunksize=1)
    print("| | before | after, each seed | after, mean | last ten rewards | largest gap | a step, s |")
    print("|---" * 7 + "|")
    for i, flags in enumerate(SWITCHES):
        name = f"`{flags}`" if flags else "as by default"
        runs = results[i :: len(SWITCHES)]
        after = [run[-1]["eval/accuracy"] for run in runs]
        steps = [step for run in runs for step in run[1:]]
        cells = (
            f"{runs[0][0]['eval/accuracy']:.1%}",
            ", ".join(f"{value:.1%}" for value in after),
            f"{statistics.mean(after):.1%}",
            f"{statistics.mean(step['reward/mean'] for run in runs for step in run[1:][-10:]):.3f}",
            f"{max(step['mismatch/logprob_abs_mean'] for step in steps):.0e}",
            f"{statistics.median(step['time/step'] for step in steps):.2f}",
        )
        print(f"| {name} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
