"""What studies share: starting many runs, keeping their results, and the statistics over seeds.

claims.py, staleness.py and walkthrough.py are studies. baselines.py writes its runs, and takes its intervals, with it.
A run of a study has one thread and one core, and repeats bit for bit on the same kind of processor.

Intervals are Student's 95 % intervals with one value per seed: of a mean, or of the mean difference between runs of the
same seed. All runs answer the same held-out problems, so these intervals say nothing about other problems. For that see
common/run/estimates.py, where each problem is one value.
"""

import csv
import dataclasses
import json
import math
import os
import queue
import re
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Any

from common import errors
from common.cores import usable_cores
from common.preflight.run_directory import read_metrics
from common.run import estimates

ROOT = Path(__file__).resolve().parents[1]
COLLAPSES = ("non-finite", "all-truncated", "no-signal")  # errors that are a result of a run, and not of this machine


@dataclasses.dataclass
class Estimate:
    """A mean over seeds, its 95 % interval, and the p-value of a mean of 0. Without an interval these are NaN."""

    mean: float
    low: float = math.nan
    high: float = math.nan
    p: float = math.nan

    @property
    def excludes_zero(self) -> bool:
        return self.low > 0 or self.high < 0

    def __str__(self) -> str:
        """In percent or points, such as 91.2 [89.0, 93.4]."""
        return self.text(scale=100)

    def text(self, scale: float = 1.0, digits: int = 1) -> str:
        """All three numbers, multiplied by `scale`."""
        if math.isnan(self.low):
            return f"{scale * self.mean:z.{digits}f}"
        return f"{scale * self.mean:z.{digits}f} [{scale * self.low:z.{digits}f}, {scale * self.high:z.{digits}f}]"


def over_seeds(values: Sequence[float]) -> Estimate:
    """Student's interval of the mean. There is none for one seed, nor for equal seeds: they don't make a mean exact."""
    mean = statistics.mean(values)
    deviation = statistics.stdev(values) if len(values) > 1 else 0.0
    if deviation < 1e-9:  # differences of equal shares may differ by rounding
        return Estimate(mean)
    half = half_width(deviation, len(values))
    return Estimate(mean, mean - half, mean + half, p_value(mean, deviation, len(values)))


def half_width(deviation: float, count: int) -> float:
    """Half of Student's 95 % interval of a mean of `count` values, two or more, with this standard deviation."""
    return estimates.student(count - 1) * deviation / math.sqrt(count)


def p_value(mean: float, deviation: float, count: int) -> float:
    """How likely a mean of `count` values, two or more, is at least so far from 0 by chance: Student's, two-sided.

    deviation: their standard deviation, above 0. Abramowitz and Stegun, Handbook of Mathematical Functions, 26.7.3 and
    26.7.4.
    """
    degrees = count - 1
    angle = math.atan(abs(mean) / deviation * math.sqrt(count / degrees))  # tan(angle) = t / sqrt(degrees)
    is_odd = degrees % 2
    term = math.cos(angle) if is_odd else 1.0
    total = 0.0
    for power in range(1 + is_odd, degrees, 2):
        total += term
        term *= power / (power + 1) * math.cos(angle) ** 2
    inside = math.sin(angle) * total  # the share of Student's distribution between -t and t
    if is_odd:
        inside = 2 / math.pi * (angle + inside)
    return 1 - inside


def holm(p_values: dict[str, float], level: float = 0.05) -> list[str]:
    """Names of the tests that remain significant when all count together, the surest first (Holm 1979).

    A p-value of NaN counts as a test that shows nothing.
    """
    known = {name: p for name, p in p_values.items() if not math.isnan(p)}
    kept = []
    for name in sorted(known, key=known.get):
        if known[name] > holm_limit(len(p_values), len(kept), level):
            break
        kept.append(name)
    return kept


def holm_limit(tests: int, kept: int, level: float = 0.05) -> float:
    """The p-value that the next of these tests needs to remain, if `kept` of them do."""
    return level / (tests - kept)


def paired(first: dict[int, float], second: dict[int, float]) -> Estimate | None:
    """First minus second, over the seeds that both have. None: they have none in common."""
    seeds = sorted(first.keys() & second.keys())
    if not seeds:
        return None
    return over_seeds([first[seed] - second[seed] for seed in seeds])


def final_accuracy(rows: list[dict]) -> float:
    """Greedy accuracy of the last evaluation."""
    return [row["eval/accuracy"] for row in rows if "eval/accuracy" in row][-1]


def launch(file: Path, words: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Run an algorithm's file, or a copy of it that lies elsewhere, with one thread. stdout: all that it prints."""
    return subprocess.run(
        [sys.executable, str(file), *words],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def collapse(exit_code: int, printed: str) -> str | None:
    """The code of the guard that ended a run: a policy that collapses is a result, too. None if it ran to its end.

    Raises RuntimeError for any other error.
    """
    if exit_code == 0:
        return None
    guard = re.search(rf"error\[({'|'.join(COLLAPSES)})\]", printed)
    if exit_code != 3 or guard is None:  # 3: a run failed (common/errors.py)
        raise RuntimeError(f"exit code {exit_code}:\n{printed[-2000:]}")
    return guard[1]


def result(run_dir: Path, exit_code: int, printed: str) -> tuple[list[dict], dict]:
    """The rows of a run's metrics, and what a study keeps of its run.json: where it ran, and which guard ended it.

    Raises RuntimeError for a run that neither came to its end nor collapsed.
    """
    ended_by = collapse(exit_code, printed)
    rows = read_metrics(run_dir)
    if not rows:
        raise RuntimeError(f"it ended before its first step:\n{printed[-2000:]}")
    about = json.loads((run_dir / "run.json").read_text())
    if not ended_by and rows[-1]["step"] != about["args"]["steps"]:
        raise RuntimeError(f"it was stopped after step {rows[-1]['step']}")
    # "code" has the checksums of the files that ran: of a variant's copy and of a reward's file, too.
    kept = {name: about.get(name) for name in ("commit", "uncommitted_changes", "code", "versions", "hardware")}
    return rows, kept | {"ended_by": ended_by}


def write_run(file: Path, rows: list[dict], about: dict, columns: Sequence[str]) -> None:
    """Write the JSON and the CSV (`file`) of a run, which may replace an earlier one.

    Both get their names only when both are whole. The CSV comes last, because it says that the run is done.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    new_about = file.with_suffix(".json.unfinished")
    new_about.write_text(json.dumps(about, indent=2) + "\n")
    new_rows = file.with_suffix(".csv.unfinished")
    with open(new_rows, "w", newline="") as out:
        writer = csv.DictWriter(out, columns, extrasaction="ignore", lineterminator="\n")
        writer.writeheader()
        for row in rows:
            writer.writerow({name: f"{value:.6g}" for name, value in row.items()})
    file.unlink(missing_ok=True)  # beside the new JSON an old CSV would pass as done
    new_about.replace(file.with_suffix(".json"))
    new_rows.replace(file)


def check_jobs(jobs: int) -> None:
    """Raises BadInput if not every job can have a core of its own."""
    if not hasattr(os, "sched_setaffinity"):
        raise errors.BadInput("a study needs Linux, which gives each run a core of its own")
    cores = len(usable_cores())
    if not 0 < jobs <= cores:
        raise errors.BadInput(f"--jobs {jobs}: each has a core of its own; use 1 to {cores}")


def run_all(cells: Sequence[Any], run: Callable[[Any], str], jobs: int) -> int:
    """Call run(cell) for each cell, `jobs` at a time, each on a core of its own. Print what it returns.

    run() raises RuntimeError, BadInput, OSError or CalledProcessError if a run fails. Another run may be under way, so
    that ends nothing. Returns how many have failed.
    """
    cores: queue.Queue[int] = queue.Queue()
    for core in usable_cores()[:jobs]:
        cores.put(core)

    def failed_run(work: tuple[int, Any]) -> bool:
        """Run a cell, given with its number in the list. Returns whether it failed."""
        number, cell = work
        try:
            ended = run(cell)
            failed = False
        except (RuntimeError, errors.BadInput, OSError, subprocess.CalledProcessError) as error:
            ended = f"error: {error}"
            failed = True
        print(f"{number} of {len(cells)}: {cell}: {ended}", flush=True)
        return failed

    # A process that a thread starts inherits the thread's core.
    with ThreadPool(jobs, lambda: os.sched_setaffinity(0, {cores.get()})) as pool:
        return sum(pool.map(failed_run, enumerate(cells, 1), chunksize=1))
