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

All intervals are over the seeds (scripts/study.py).
"""

import dataclasses
import json
import math
import multiprocessing
import os
import re
import runpy
import statistics
import sys
import tempfile
from collections import deque
from collections.abc import Iterator
from pathlib import Path

import torch
import tyro

sys.path.append(str(Path(__file__).parent))
import blocks
import pictures
import study
import variants

import baselines
from common import errors
from common.preflight.docstrings import help_text
from common.run import sampling
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
LEFT_OUT = {"icepop": ("masked/icepop", "tokens"), "sequence-mask": ("masked/sequence", "responses")}


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

    def __str__(self) -> str:
        return f"{self.correction}, k = {self.k}, seed {self.seed}"

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
        """The batch of this step. First it samples all steps up to step + staleness. In place of Prefetcher.get()."""
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


def record_masks(metrics: Metrics, old_logprobs, batch, had_forward) -> None:
    """Record what IcePop and the sequence mask leave out of this step, or would: shares of tokens and of responses."""
    mask = batch.response_mask if had_forward is None else batch.response_mask & had_forward[:, None]
    log_weights = torch.where(mask, old_logprobs - batch.rollout_logprobs, 0.0)
    weights = log_weights.exp()  # (N, T), 1 outside the mask
    metrics.mean("masked/icepop", ((weights < 0.5) | (weights > 5)).sum(), mask.sum())
    metrics.mean("masked/sequence", (log_weights.sum(1).exp() > 3).sum(), mask.any(1).sum())


def learn(staleness: int, file: str, flags: list[str]) -> None:
    """Run an algorithm's file as a user would, with that staleness.

    The file itself stays as it is. Two classes that it uses are replaced, in this process, which does nothing else.
    """
    plain_mismatch = Metrics.mismatch

    def mismatch_and_masks(self, old_logprobs, batch, weight_version, had_forward=None) -> None:
        plain_mismatch(self, old_logprobs, batch, weight_version, had_forward)
        record_masks(self, old_logprobs, batch, had_forward)

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
        log.touch()  # a process that is killed at once writes none
        process = multiprocessing.get_context("spawn").Process(
            target=learn_with_log,
            args=(cell.k, str(file), [*flags, "--run-dir", str(run_dir)], log),
        )
        process.start()
        process.join()
        rows, about = study.result(run_dir, process.exitcode, log.read_text())
    about |= {"staleness": cell.k, "correction": cell.correction, "seed": cell.seed, "flags": " ".join(flags)}
    study.write_run(cell.file(folder), rows, about, COLUMNS)
    minutes = sum(row.get("time/step", 0.0) for row in rows) / 60
    return f"{study.final_accuracy(rows):.1%} in {minutes:.1f} minutes"


def read_runs(folder: Path, task: str) -> dict[tuple[str, int], dict[int, list[dict]]]:
    """(correction, k) -> seed -> rows of the CSV, for all runs that are done."""
    runs: dict[tuple[str, int], dict[int, list[dict]]] = {}
    for correction in CORRECTIONS:
        for file in (folder / task / correction).glob("k*-seed*.csv"):
            k, seed = map(int, re.findall(r"\d+", file.stem))
            runs.setdefault((correction, k), {})[seed] = baselines.read_curve(file)
    return runs


def mean_accuracy(seeds: dict[int, list[dict]]) -> study.Estimate:
    """The mean of the final accuracies. Its interval ends at 0 and 1."""
    estimate = study.over_seeds(list(final_accuracies(seeds).values()))
    if math.isnan(estimate.low):
        return estimate
    return study.Estimate(estimate.mean, max(estimate.low, 0.0), min(estimate.high, 1.0))


def final_accuracies(seeds: dict[int, list[dict]]) -> dict[int, float]:
    """seed -> accuracy of the last evaluation."""
    return {seed: study.final_accuracy(rows) for seed, rows in seeds.items()}


def minus(first: dict[int, list[dict]], second: dict[int, list[dict]]) -> study.Estimate | None:
    """Accuracy of the first minus that of the second."""
    return study.paired(final_accuracies(first), final_accuracies(second))


def marked(difference: study.Estimate | None) -> str:
    """A cell of the table: bold if the interval excludes 0."""
    if difference is None:
        return ""
    return f"**{difference}**" if difference.excludes_zero else str(difference)


def mean_of(seeds: dict[int, list[dict]], column: str, form: str) -> str:
    """Mean of a column over all steps of all runs, in that format. "" if a guard has ended them all in their first."""
    values = [row[column] for rows in seeds.values() for row in rows if column in row]
    return format(statistics.mean(values), form) if values else ""


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
            minus_fresh = minus(seeds, runs.get((correction, 0), {})) if k else None
            minus_none = minus(seeds, runs.get(("none", k), {})) if correction != "none" else None
            left_out = ""
            if correction in LEFT_OUT:
                column, unit = LEFT_OUT[correction]
                share = mean_of(seeds, column, ".2%")
                left_out = f"{share} of {unit}" if share else ""
            fields = (
                str(k),
                correction,
                f"{len(seeds)}{ended_early(folder, task, correction, k, seeds)}",
                str(mean_accuracy(seeds)),
                marked(minus_fresh),
                marked(minus_none),
                mean_of(seeds, "mismatch/kl", ".1e"),
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
                finals = list(final_accuracies(runs[correction, k]).values())
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


def remaining(folder: Path, task: str) -> str:
    """What remains of the table's differences if all of them are tested together."""
    runs = read_runs(folder, task)
    differences = {}
    for (correction, k), seeds in sorted(runs.items()):
        if k:
            differences[f"`{correction}` k = {k} minus k = 0"] = minus(seeds, runs.get((correction, 0), {}))
        if correction != "none":
            differences[f"`{correction}` minus none at k = {k}"] = minus(seeds, runs.get(("none", k), {}))
    p_values = {name: difference.p for name, difference in differences.items() if difference is not None}
    kept = study.holm(p_values)
    return (
        f"Tested together, with Holm's correction at 5 %, {len(kept)} of these {len(p_values)} differences remain: "
        f"{'; '.join(kept) or 'none'}."
    )


def block(folder: Path, task: str) -> str:
    """The table, what remains of it, and below it the figure."""
    figure = f"![accuracy against staleness, a panel for each correction]({task}/accuracy.svg)"
    return f"{table(folder, task)}\n\n{remaining(folder, task)}\n\n{figure}"


def rebuild(folder: Path) -> None:
    """Print all tables, draw the figures, and write the tables into the folder's README, if it has one."""
    page = folder / "README.md"
    for task in TASKS:
        if not read_runs(folder, task):
            continue
        print(f"{task}\n{table(folder, task)}")
        draw(folder, task)
        if page.is_file():
            blocks.write(page, f"staleness {task}", block(folder, task))


def missing(args: Args, folder: Path) -> list[Cell]:
    """The runs that are asked for and not done, each once. A seed of all comes before the next: half a study then says
    something.
    """
    ordered: dict[Cell, None] = {}  # keys without values: a dict keeps their order and drops repeats
    for seed in args.seeds:
        for k in args.ks:
            for correction in args.corrections:
                ordered[Cell(args.task, correction, k, seed)] = None
    return [cell for cell in ordered if not cell.file(folder).is_file()]


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
    study.check_jobs(args.jobs)
    if torch.cuda.is_available():
        raise errors.BadInput("a GPU's engine sleeps after each batch, so none can be sampled ahead; hide the GPU")


def main(args: Args) -> None:
    folder = (ROOT / args.folder).resolve()
    check_args(args, folder)
    cells = [] if args.rebuild else missing(args, folder)
    failed = study.run_all(cells, lambda cell: run(cell, folder, args.steps), args.jobs)
    rebuild(folder)
    if failed:
        sys.exit(f"error: {failed} of {len(cells)} runs failed; the same command repeats them")


if __name__ == "__main__":
    errors.launch(main, tyro.cli(Args, description=help_text(__doc__)))
