"""Does the embedded job learn as well with each switch for speed or memory, and one batch behind? One run a row.

python scripts/bench/learning.py --runs switches              # seven runs, one on each core: eight minutes on two
python scripts/bench/learning.py --runs behind                # three runs of three seeds: 16 minutes on two cores
python scripts/bench/learning.py --runs behind --seeds 3 4 --steps 80

"switches" change rounding and random numbers alone (tests/trainer/test_packing.py compares gradients): this shows that
a whole run learns with them. "behind" samples the responses of a step before the step before it trains: from the same
weights as with --max-inflight-batches 2, but in one process and one after the other, so that a run repeats bit for bit.
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
from typing import Literal

import tyro

from algos import grpo
from common.run import sampling

SWITCHES = (
    "",
    "--token-budget 400",
    "--activation-checkpointing",
    "--offload all",
    "--kernels compile",
    "--dtype bfloat16",
    "--rollout-backend hf",
)
RUNS = {  # name -> rows of the table: what it is called -> (steps behind, flags)
    "switches": {f"`{flags}`" if flags else "as by default": (0, flags) for flags in SWITCHES},
    "behind": {
        "in turns": (0, "--max-logprob-gap 100"),
        "one step behind": (1, "--max-logprob-gap 100"),
        "one step behind, `--tis-cap 2`": (1, "--max-logprob-gap 100 --tis-cap 2"),
    },
}


@dataclasses.dataclass
class Args:
    runs: Literal["switches", "behind"]
    seeds: tuple[int, ...] = ()  # Empty: 0 for the switches; 0, 1 and 2 for the runs one step behind.
    steps: int = 52


class Ahead(sampling.Prefetcher):
    """Samples the next step's responses when this step's are taken, before it trains. No thread, no server."""

    next = None

    def get(self, step: int, *, last: bool = False):
        current = self.next or super().get(step)
        self.next = None if last else super().get(step + 1)
        self.tracker.sampled = current
        return current


def learn(behind: int, flags: list[str], log: Path) -> None:
    """One run, in a process that does nothing else."""
    with open(log, "w") as file:
        os.dup2(file.fileno(), sys.stdout.fileno())
        os.dup2(file.fileno(), sys.stderr.fileno())
    if behind:
        sampling.Prefetcher = Ahead
    grpo.main(tyro.cli(grpo.Args, args=flags, default=grpo.Args(**grpo.EMBEDDED)))


def metrics_of(behind: int, flags: str, seed: int, steps: int, run_dir: Path) -> list[dict]:
    """The rows of metrics.jsonl. The process keeps to the cores of the calling thread."""
    every = [*flags.split(), "--seed", str(seed), "--steps", str(steps), "--run-dir", str(run_dir)]
    log = run_dir.with_suffix(".log")
    process = multiprocessing.get_context("spawn").Process(target=learn, args=(behind, every, log))
    process.start()
    process.join()
    if process.exitcode:
        raise RuntimeError(f"{flags}, seed {seed}: exit {process.exitcode}: {log.read_text()[-2000:]}")
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def main(args: Args) -> None:
    rows, seeds = RUNS[args.runs], args.seeds or ((0,) if args.runs == "switches" else (0, 1, 2))
    free = queue.Queue()
    for core in os.sched_getaffinity(0):
        free.put(core)
    with (
        tempfile.TemporaryDirectory() as scratch,
        ThreadPool(free.qsize(), lambda: os.sched_setaffinity(0, {free.get()})) as pool,
    ):
        folder = Path(scratch)
        work = [
            (*row, seed, args.steps, folder / f"{i}-{seed}") for seed in seeds for i, row in enumerate(rows.values())
        ]
        results = pool.starmap(metrics_of, work, chunksize=1)
    print("| | before | after, each seed | after, mean | last ten rewards | largest gap | staleness | a step, s |")
    print("|---" * 8 + "|")
    for i, name in enumerate(rows):
        runs = results[i :: len(rows)]
        after = [run[-1]["eval/accuracy"] for run in runs]
        steps = [step for run in runs for step in run[1:]]
        cells = (
            f"{runs[0][0]['eval/accuracy']:.1%}",
            ", ".join(f"{value:.1%}" for value in after),
            f"{statistics.mean(after):.1%}",
            f"{statistics.mean(step['reward/mean'] for run in runs for step in run[1:][-10:]):.3f}",
            f"{max(step['mismatch/logprob_abs_mean'] for step in steps):.0e}",
            f"{statistics.mean(run[-1]['mismatch/staleness'] for run in runs):.0f}",
            f"{statistics.median(step['time/step'] for step in steps):.2f}",
        )
        print(f"| {name} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
