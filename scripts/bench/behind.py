"""What one step of staleness costs in learning: the embedded job in turns, one step behind, and behind with TIS.

python scripts/bench/behind.py                            # three seeds of each, a run on each core: 16 minutes on two
python scripts/bench/behind.py --seeds 3 4 --steps 80

Behind, a step's responses are sampled before the step before it trains: by the same weights as with
--max-inflight-batches 2, but in one process and one after the other, so that a run repeats bit for bit. All runs begin
from one warm start.
"""

import dataclasses
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
from pathlib import Path

import tyro
from cores import on_each_core

from algos import grpo
from common import embedded, overlap

RUNS = {  # what the table says -> steps behind, flags
    "in turns": (0, []),
    "one step behind": (1, []),
    "one step behind, `--tis-cap 2`": (1, ["--tis-cap", "2"]),
}


@dataclasses.dataclass
class Args:
    seeds: tuple[int, ...] = (0, 1, 2)
    steps: int = 52


class Ahead(overlap.Prefetcher):
    """Samples the next step's responses when this one's are taken, before it trains; no thread, no server."""

    next = None

    def get(self, step: int, *, last: bool = False):
        now = self.next or super().get(step)
        self.next = None if last else super().get(step + 1)
        self.tracker.sampled = now
        return now


def learn(behind: int, flags: list[str], log: Path) -> None:
    """A run, in a process of its own."""
    with open(log, "w") as file:
        os.dup2(file.fileno(), sys.stdout.fileno())
        os.dup2(file.fileno(), sys.stderr.fileno())
    if behind:
        overlap.Prefetcher = Ahead
    grpo.main(tyro.cli(grpo.Args, args=flags))


def run(name: str, seed: int, steps: int, folder: Path) -> list[dict]:
    """Its metrics. The process has the cores of the calling thread."""
    behind, flags = RUNS[name]
    run_dir = folder / f"{list(RUNS).index(name)}-{seed}"
    flags = [*flags, "--seed", str(seed), "--steps", str(steps), "--run-dir", str(run_dir), "--max-logprob-gap", "100"]
    log = run_dir.with_suffix(".log")
    process = multiprocessing.get_context("spawn").Process(target=learn, args=(behind, flags, log))
    process.start()
    process.join()
    if process.exitcode:
        raise RuntimeError(f"{name}, seed {seed}: exit {process.exitcode}: {log.read_text()[-2000:]}")
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def main(args: Args) -> None:
    embedded.warm_start()  # once, for all
    with tempfile.TemporaryDirectory() as scratch:
        work = [(name, seed, args.steps, Path(scratch)) for seed in args.seeds for name in RUNS]
        rows = dict(zip([given[:2] for given in work], on_each_core(run, work)))
    print("| | accuracy before | after, each seed | after, mean | reward of the last ten steps | staleness |")
    print("|---" * 6 + "|")
    for name in RUNS:
        runs = [rows[name, seed] for seed in args.seeds]
        after = [found[-1]["eval/accuracy"] for found in runs]
        rewards = [row["reward/mean"] for found in runs for row in found[1:][-10:]]
        staleness = statistics.mean(found[-1]["mismatch/staleness"] for found in runs)
        print(
            f"| {name} | {runs[0][0]['eval/accuracy']:.1%} | {', '.join(f'{value:.1%}' for value in after)} "
            f"| {statistics.mean(after):.1%} | {statistics.mean(rewards):.3f} | {staleness:.0f} |"
        )


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
