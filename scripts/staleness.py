"""How much do older weights cost GRPO, and which correction helps? One run for each staleness, correction and seed.

    python scripts/staleness.py                            # the embedded task, 125 runs; those with a CSV are skipped
    python scripts/staleness.py --ks 0 4 --corrections none tis --seeds 0 1 2
    python scripts/staleness.py --task sums --corrections none tis delight-gate --seeds 0 1 2
    python scripts/staleness.py --rebuild                  # tables and figures from the CSVs alone
    python scripts/staleness.py --ks 2 --corrections tis --seeds 0 --steps 4 --folder runs/try

With staleness k the responses of step t + k are sampled before step t trains, so they miss the updates of k steps. The
first k + 1 steps have responses of the initial weights. With --max-inflight-batches K, k is at most K - 1, and it
depends on the clock. Here it is always k, in one process and one thread, so a run repeats bit for bit.

A correction is a flag of algos/grpo.py, or a variant of docs/variants.md. Every run has one thread, and --jobs 2 has
two runs at a time, each on its own core. baselines/staleness/TASK/CORRECTION/ gets a CSV and a JSON for each run.

The unit of all intervals is the seed. They are Student's, of the mean over the seeds and of the mean difference of the
same seeds. The functions of common/run/estimates.py that say how certain an accuracy is have problems as their unit.
All runs answer the same held-out problems here, so these intervals say nothing about other problems.
"""

import csv
import dataclasses
import json
import math
import multiprocessing
import os
import queue
import re
import runpy
import statistics
import sys
import tempfile
from collections import deque
from collections.abc import Iterator
from multiprocessing.pool import ThreadPool
from pathlib import Path

import torch
import tyro

sys.path.append(str(Path(__file__).parent))
import pictures
import variants

import baselines
from common import errors
from common.preflight.run_directory import read_metrics
from common.run import estimates, sampling
from common.run.tracking import Metrics

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "baselines/staleness"
TASKS = ("arithmetic", "sums")  # their flags are in scripts/baselines.py
CORRECTIONS = {  # name -> (variant of docs/variants.md, flags)
    "none": ("", ""),
    "tis": ("", "--tis-cap 2"),
    "icepop": ("icepop", "--tis-cap 5"),
    "sequence-mask": ("sequence-mask", "--tis-cap 3"),
    "delight-gate": ("delight-gate", ""),
}
KS = (0, 1, 2, 4, 8)
COLUMNS = (
    "step",
    "eval/accuracy",
    "reward/mean",
    "response/length_mean",
    "train/entropy",
    "train/clip_frac",
    "train/grad_norm",
    "mismatch/logprob_abs_mean",
    "mismatch/kl",
    "mismatch/staleness",
    "mismatch/staleness_max",
    "mismatch/weight_over_2_frac",
    "mismatch/effective_frac",
    "masked/icepop",
    "masked/sequence",
    "time/step",
)
COLLAPSES = ("non-finite", "all-truncated")  # errors that are a result of a run, and not of this machine
LEFT_OUT = {"icepop": ("masked/icepop", "tokens"), "sequence-mask": ("masked/sequence", "responses")}
BEGIN, END = "<!-- staleness {} -->", "<!-- /staleness {} -->"  # the table between them is generated
# Quantiles of Student's t for which the expansion in common/run/estimates.py is too small.
FEW_SEEDS = {1: 12.706, 2: 4.303, 3: 3.182}


@dataclasses.dataclass
class Args:
    task: str = "arithmetic"  # arithmetic (the embedded model) or sums (SmolLM2-135M-Instruct).
    ks: tuple[int, ...] = KS  # Staleness, in steps.
    corrections: tuple[str, ...] = tuple(CORRECTIONS)
    seeds: tuple[int, ...] = (0, 1, 2, 3, 4)
    jobs: int = 2  # Runs at a time, each on a core of its own.
    steps: int = 0  # Steps of each run, for a try in another --folder. 0: as many as the task has.
    folder: str = str(FOLDER.relative_to(ROOT))  # Where the CSVs are.
    rebuild: bool = False  # Run nothing. Write tables and figures from the CSVs.


@dataclasses.dataclass(frozen=True)
class Cell:
    """One run of the study."""

    task: str
    correction: str
    k: int
    seed: int

    def file(self, folder: Path) -> Path:
        return folder / self.task / self.correction / f"k{self.k}-seed{self.seed}.csv"

    def flags(self) -> str:
        words = [baselines.RECIPES[self.task], CORRECTIONS[self.correction][1], f"--seed {self.seed}"]
        if self.k:
            # The gap to the engine then holds what was learned in k steps. It is what we measure, so it must not stop
            # the run. Without staleness it is rounding, and the usual limit applies.
            words.append("--max-logprob-gap 100")
        return " ".join(word for word in words if word)


class Early(sampling.Prefetcher):
    """Samples each batch `staleness` steps before it trains, in this thread.

    The engine has one copy of the weights, and every step pushes new ones. So old responses are not sampled with old
    weights: they are sampled earlier, and wait.
    """

    staleness = 0

    def __init__(self, *given, **named):
        super().__init__(*given, **named)
        self.waiting: deque[tuple[sampling.Batch, sampling.PromptSampler]] = deque()  # sampled, and not trained on

    def get(self, step: int, last_step: int) -> sampling.Batch:
        """The batch of this step. First it samples all steps up to step + staleness."""
        while self.begun < min(step + self.staleness, last_step):
            self.begun += 1
            sampler = self._sampler(self.begun, self.world, Metrics(self.world))
            self.waiting.append((self.sample(self.begun, sampler), sampler))
        batch, sampler = self.waiting.popleft()
        self.tracker.merge(sampler.metrics)
        self.tracker.sampled = batch
        # A checkpoint of this step names the place of the next step's prompts, although they are drawn already.
        self.loader.trained_until = sampler.drawn_until
        self.check_ages(batch, step)
        return batch

    def check_ages(self, batch: sampling.Batch, step: int) -> None:
        """Every token is exactly as many updates old as this study says."""
        ages = (self.engine.weight_version - batch.weight_versions)[batch.response_mask]
        expected = min(self.staleness, step - 1)
        assert (ages == expected).all(), f"step {step}: ages {ages.unique().tolist()}, expected {expected}"


def record_masks(metrics: Metrics, old_logprobs, batch, rows) -> None:
    """Record what IcePop and the sequence mask leave out of this step, or would: shares of tokens and of responses."""
    mask = batch.response_mask if rows is None else batch.response_mask & rows[:, None]
    log_weights = torch.where(mask, old_logprobs - batch.rollout_logprobs, 0.0)
    weights = log_weights.exp()  # (N, T), 1 outside the mask
    metrics.mean("masked/icepop", ((weights < 0.5) | (weights > 5)).sum(), mask.sum())
    metrics.mean("masked/sequence", (log_weights.sum(1).exp() > 3).sum(), mask.any(1).sum())


def learn(staleness: int, file: str, flags: list[str]) -> None:
    """Run an algorithm's file as a user would, with that staleness. It changes this process, so it needs its own."""
    mismatch = Metrics.mismatch

    def mismatch_and_masks(self, old_logprobs, batch, weight_version, rows=None) -> None:
        mismatch(self, old_logprobs, batch, weight_version, rows)
        record_masks(self, old_logprobs, batch, rows)

    Metrics.mismatch = mismatch_and_masks
    Early.staleness = staleness
    sampling.Prefetcher = Early
    sys.argv = [file, *flags]
    runpy.run_path(file, run_name="__main__")


def learn_with_log(staleness: int, file: str, flags: list[str], log: Path) -> None:
    """learn(), in a process that does nothing else. log: gets all that it prints."""
    with open(log, "w") as out:
        os.dup2(out.fileno(), sys.stdout.fileno())
        os.dup2(out.fileno(), sys.stderr.fileno())
    os.chdir(ROOT)  # SmolLM2 is in its folder models/
    learn(staleness, file, flags)


def run(cell: Cell, folder: Path, steps: int) -> str:
    """Run a cell, write its CSV and JSON, and say how it ended. The process keeps to the core of this thread."""
    variant, _ = CORRECTIONS[cell.correction]
    flags = cell.flags().split()
    if steps:
        flags += ["--steps", str(steps)]
    with tempfile.TemporaryDirectory() as scratch:
        file = ROOT / "algos/grpo.py"
        if variant:
            file = Path(scratch) / f"grpo_{variant.replace('-', '_')}.py"
            file.write_text(variants.source(variant))
        run_dir = Path(scratch) / "run"
        log = Path(scratch) / "log"
        process = multiprocessing.get_context("spawn").Process(
            target=learn_with_log,
            args=(cell.k, str(file), [*flags, "--run-dir", str(run_dir)], log),
        )
        process.start()
        process.join()
        ended_by = collapse(process.exitcode, log.read_text())
        rows = read_metrics(run_dir)
        about = json.loads((run_dir / "run.json").read_text())
    if not ended_by and rows[-1]["step"] != about["args"]["steps"]:
        raise RuntimeError(f"it was stopped after step {rows[-1]['step']}")
    kept = {name: about[name] for name in ("commit", "uncommitted_changes", "versions", "hardware")}
    kept |= {"staleness": cell.k, "correction": cell.correction, "seed": cell.seed, "flags": " ".join(flags)}
    kept |= {"ended_by": ended_by}
    write_run(cell.file(folder), rows, kept)
    return f"{final_accuracy(rows):.1%} in {sum(row.get('time/step', 0.0) for row in rows) / 60:.1f} minutes"


def collapse(exit_code: int, printed: str) -> str | None:
    """The code of the guard that ended a run: a policy that collapses is a result, too. None if it ran to its end.

    Raises RuntimeError for any other error.
    """
    if exit_code == 0:
        return None
    guard = re.search(rf"error\[({'|'.join(COLLAPSES)})\]", printed)
    if exit_code != 3 or guard is None:
        raise RuntimeError(f"exit code {exit_code}:\n{printed[-2000:]}")
    return guard[1]


def write_run(file: Path, rows: list[dict], about: dict) -> None:
    """Write the JSON and the CSV of a run. The CSV comes last, whole or not at all: it says that the run is done."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.with_suffix(".json").write_text(json.dumps(about, indent=2) + "\n")
    unfinished = file.with_suffix(".unfinished")
    with open(unfinished, "w", newline="") as out:
        writer = csv.DictWriter(out, COLUMNS, extrasaction="ignore", lineterminator="\n")
        writer.writeheader()
        for row in rows:
            writer.writerow({name: f"{value:.6g}" for name, value in row.items()})
    unfinished.replace(file)


def read_runs(folder: Path, task: str) -> dict[tuple[str, int], dict[int, list[dict]]]:
    """(correction, k) -> seed -> rows of the CSV, for all runs that are done."""
    runs: dict[tuple[str, int], dict[int, list[dict]]] = {}
    for correction in CORRECTIONS:
        for file in (folder / task / correction).glob("k*-seed*.csv"):
            k, seed = map(int, re.findall(r"\d+", file.stem))
            runs.setdefault((correction, k), {})[seed] = baselines.read_curve(file)
    return runs


def final_accuracy(rows: list[dict]) -> float:
    """Greedy accuracy of the last evaluation."""
    return [row["eval/accuracy"] for row in rows if "eval/accuracy" in row][-1]


@dataclasses.dataclass
class Estimate:
    """A mean over seeds, and its 95 % interval, which is NaN with fewer than two seeds."""

    mean: float
    low: float = math.nan
    high: float = math.nan

    @property
    def excludes_zero(self) -> bool:
        return self.low > 0 or self.high < 0

    def __str__(self) -> str:
        """In percent or points, such as 91.2 [89.0, 93.4]."""
        if math.isnan(self.low):
            return f"{100 * self.mean:z.1f}"
        return f"{100 * self.mean:z.1f} [{100 * self.low:z.1f}, {100 * self.high:z.1f}]"


def over_seeds(values: list[float]) -> Estimate:
    """Student's interval of the mean."""
    mean = statistics.mean(values)
    degrees = len(values) - 1
    if degrees < 1:
        return Estimate(mean)
    half = FEW_SEEDS.get(degrees, estimates.student(degrees)) * statistics.stdev(values) / math.sqrt(len(values))
    return Estimate(mean, mean - half, mean + half)


def mean_accuracy(seeds: dict[int, list[dict]]) -> Estimate:
    """The mean of the final accuracies. Its interval ends at 0 and 1."""
    estimate = over_seeds([final_accuracy(rows) for rows in seeds.values()])
    if math.isnan(estimate.low):
        return estimate
    return Estimate(estimate.mean, max(estimate.low, 0.0), min(estimate.high, 1.0))


def paired(first: dict[int, list[dict]], second: dict[int, list[dict]]) -> Estimate | None:
    """Accuracy of the first minus that of the second, over the seeds that both have. None: they have none in common."""
    seeds = sorted(first.keys() & second.keys())
    if not seeds:
        return None
    return over_seeds([final_accuracy(first[seed]) - final_accuracy(second[seed]) for seed in seeds])


def marked(difference: Estimate | None) -> str:
    """A cell of the table: bold if the interval excludes 0."""
    if difference is None:
        return ""
    return f"**{difference}**" if difference.excludes_zero else str(difference)


def mean_of(seeds: dict[int, list[dict]], column: str) -> float:
    """Mean of a column over all steps of all runs."""
    return statistics.mean(row[column] for rows in seeds.values() for row in rows if column in row)


def table(folder: Path, task: str) -> str:
    """A line for each staleness and correction. "" without a run."""
    return "\n".join(table_lines(folder, task))


def table_lines(folder: Path, task: str) -> Iterator[str]:
    runs = read_runs(folder, task)
    if not runs:
        return
    yield "| k | correction | runs | greedy accuracy, % | minus k = 0 | minus none | KL, nats | left out |"
    yield "|---|---|---|---|---|---|---|---|"
    for k in sorted({k for _, k in runs}):
        for correction in CORRECTIONS:
            seeds = runs.get((correction, k))
            if seeds is None:
                continue
            from_fresh = paired(seeds, runs.get((correction, 0), {})) if k else None
            from_none = paired(seeds, runs.get(("none", k), {})) if correction != "none" else None
            left_out = ""
            if correction in LEFT_OUT:
                column, unit = LEFT_OUT[correction]
                left_out = f"{mean_of(seeds, column):.2%} of {unit}"
            fields = (
                str(k),
                correction,
                f"{len(seeds)}{ended_early(folder, task, correction, k, seeds)}",
                str(mean_accuracy(seeds)),
                marked(from_fresh),
                marked(from_none),
                f"{mean_of(seeds, 'mismatch/kl'):.1e}",
                left_out,
            )
            yield f"| {' | '.join(fields)} |"


def ended_early(folder: Path, task: str, correction: str, k: int, seeds: dict) -> str:
    """Says how many of these runs a guard has ended. They count with their last evaluation."""
    files = [Cell(task, correction, k, seed).file(folder).with_suffix(".json") for seed in seeds]
    count = sum(bool(json.loads(file.read_text())["ended_by"]) for file in files)
    return f" ({count} ended early)" if count else ""


@pictures.styled
def draw(folder: Path, task: str) -> None:
    """Draw TASK/accuracy.svg: a panel for each correction, with a dot for each run and the mean of `none` behind it."""
    runs = read_runs(folder, task)
    ks = sorted({k for _, k in runs})
    points: dict[str, list[tuple[int, list[float]]]] = {}  # correction -> (place of k, final accuracies)
    for place, k in enumerate(ks):
        for correction in CORRECTIONS:
            if (correction, k) in runs:
                finals = [final_accuracy(rows) for rows in runs[correction, k].values()]
                points.setdefault(correction, []).append((place, finals))
    means = {name: [(place, statistics.mean(finals)) for place, finals in known] for name, known in points.items()}
    names = [correction for correction in CORRECTIONS if correction in points]
    caption = "Greedy accuracy, held out. Dots: runs. Lines: means."
    if "none" in names and len(names) > 1:
        caption += " Grey: no correction."
    axes = pictures.panels(names, caption, "staleness k, in steps")
    for axis, name in zip(axes, names):
        if "none" in means and name != "none":
            axis.plot(*zip(*means["none"]), color=pictures.BEHIND, linewidth=4)
        for place, finals in points[name]:
            axis.plot([place] * len(finals), finals, "o", color=pictures.PALE, markersize=4, clip_on=False)
        axis.plot(*zip(*means[name]), color=pictures.BLUE, linewidth=1.8)
        place, mean = means[name][-1]
        pictures.label_end(axis, place, mean, f"{100 * mean:.0f} %")
    axes[0].set_xlim(-0.3, len(ks) - 0.7)
    axes[0].set_xticks(range(len(ks)), [str(k) for k in ks])
    pictures.percent_axis(axes[0], 1)
    pictures.save(axes[0].figure, folder / task / "accuracy.svg")


def block(folder: Path, task: str) -> str:
    """What stands between the marks of the README: the table, and below it the figure."""
    lines = [BEGIN.format(task)]
    if text := table(folder, task):
        lines += [text, "", f"![accuracy against staleness, a panel for each correction]({task}/accuracy.svg)"]
    return "\n".join([*lines, END.format(task)])


def rebuild(folder: Path) -> None:
    """Print all tables, draw the figures, and write the tables into the folder's README, if it has one."""
    page = folder / "README.md"
    for task in TASKS:
        if not read_runs(folder, task):
            continue
        print(f"{task}\n{table(folder, task)}")
        draw(folder, task)
        if page.is_file():
            before, rest = page.read_text().split(BEGIN.format(task))
            page.write_text(before + block(folder, task) + rest.split(END.format(task))[1])


def missing(args: Args, folder: Path) -> list[Cell]:
    """The runs that are asked for and not done. A seed of all cells comes before the next, so that half of a study says
    something.
    """
    cells = [
        Cell(args.task, correction, k, seed) for seed in args.seeds for k in args.ks for correction in args.corrections
    ]
    return [cell for cell in cells if not cell.file(folder).is_file()]


def check_args(args: Args, folder: Path) -> None:
    """Raises BadInput for a name that does not exist, and for too many jobs."""
    for flag, names, known in (
        ("--task", (args.task,), TASKS),
        ("--corrections", args.corrections, CORRECTIONS),
    ):
        for name in names:
            if name not in known:
                raise errors.BadInput(f"{flag} {name}: use one of {', '.join(known)}")
    if min(args.ks, default=0) < 0:
        raise errors.BadInput(f"--ks {min(args.ks)}: use 0 or more")
    if args.steps and folder == FOLDER:
        raise errors.BadInput(f"--steps {args.steps}: such runs are not those of the study; name another --folder")
    cores = len(os.sched_getaffinity(0))
    if not 0 < args.jobs <= cores:
        raise errors.BadInput(f"--jobs {args.jobs}: each has a core of its own; use 1 to {cores}")
    if torch.cuda.is_available():
        raise errors.BadInput("a GPU's engine sleeps after each batch, so none can be sampled ahead; hide the GPU")


def main(args: Args) -> None:
    folder = (ROOT / args.folder).resolve()
    check_args(args, folder)
    cells = [] if args.rebuild else missing(args, folder)
    cores: queue.Queue[int] = queue.Queue()
    for core in sorted(os.sched_getaffinity(0))[: args.jobs]:
        cores.put(core)

    def numbered_run(work: tuple[int, Cell]) -> bool:
        """True if the run is done. Another run may be under way, so a failure waits for the end."""
        number, cell = work
        try:
            ended = run(cell, folder, args.steps)
            done = True
        except (RuntimeError, errors.BadInput) as error:
            ended = f"error: {error}"
            done = False
        print(f"{number} of {len(cells)}: {cell.correction}, k = {cell.k}, seed {cell.seed}: {ended}", flush=True)
        return done

    # A process that a thread starts inherits the thread's core.
    with ThreadPool(args.jobs, lambda: os.sched_setaffinity(0, {cores.get()})) as pool:
        done = pool.map(numbered_run, enumerate(cells, 1), chunksize=1)
    rebuild(folder)
    if not all(done):
        sys.exit(f"error: {done.count(False)} of {len(cells)} runs failed; the same command repeats them")


if __name__ == "__main__":
    errors.launch(main, tyro.cli(Args, description=__doc__))
