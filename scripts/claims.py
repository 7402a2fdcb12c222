"""Claims of papers, tried on equal terms. docs/claims.md has a row for each: who says it, the arms, the verdict.

    python scripts/claims.py                                  # lists the claims and their verdicts
    python scripts/claims.py leave-one-out                    # repeats a row from scratch, into runs/claims
    python scripts/claims.py std length --seeds 0 1           # two rows, two seeds
    python scripts/claims.py embedded --folder baselines/claims     # what made the committed runs; skips those there
    python scripts/claims.py sums --folder baselines/claims         # the same for SmolLM2, an hour a run and 10 GB
    python scripts/claims.py --rebuild                        # tables, picture and CSV, from the committed runs

A claim compares an arm with a control. Both are runs of an algorithm's file, or of a variant of it (docs/variants.md),
with the same task, flags and seeds, except for what ARMS says. Two claims have no control: they compare the trained
model with the model before training. The verdict is a rule, and was written down before the runs (`verdict`).

FOLDER/TASK/ARM/seedS.csv has the steps of a run. The JSON next to it says where it ran, and how its last checkpoint
does on the held-out problems: greedy, sampled (mean@8) and pass@8.
"""

import dataclasses
import itertools
import json
import math
import random
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

import tyro
from matplotlib.axes import Axes
from matplotlib.figure import Figure

sys.path.append(str(Path(__file__).parent))
import blocks
import pictures
import study
import variants

import baselines
from common import errors
from common.data import arithmetic
from common.preflight import folders
from common.preflight.docstrings import help_text

ROOT = Path(__file__).resolve().parents[1]
COMMITTED = ROOT / "baselines/claims"
PAGE = ROOT / "docs/claims.md"
PICTURE = COMMITTED / "intervals.svg"
DIFFERENCES = COMMITTED / "differences.csv"  # arm and control of each row, seed by seed
ONE_PROBLEM = "runs/one-problem.jsonl"
REVERSAL = "runs/reversal"  # folder of the problems of the task `reversal`
REVERSED = 6  # digits of a problem
# All runs of a task have these flags. An algorithm's own defaults for the embedded job would differ between files.
TASKS = {
    "arithmetic": "--steps 52 --prompts-per-step 64 --group-size 8 --mini-batches 4 --learning-rate 2e-4 "
    "--eval-every 5",
    "maze": baselines.RECIPES["maze"],
    # As in TPO's paper: all problems are trained on and evaluated, and a rollout is used four times.
    "reversal": f"--model {baselines.REVERSAL_START} --dataset {REVERSAL}/problems.jsonl "
    f"--eval-dataset {REVERSAL}/problems.jsonl --dtype float32 --max-prompt-tokens 32 --max-response-tokens 12 "
    "--steps 150 --prompts-per-step 32 --group-size 8 --mini-batches 1 --epochs 4 --learning-rate 3e-4 "
    "--warmup-steps 2 --eval-every 10",
    "sums": baselines.RECIPES["sums"],  # SmolLM2-135M-Instruct; an hour of one core
}
SEEDS = {"arithmetic": 5, "maze": 5, "reversal": 5, "sums": 3}
# Arms of `sums` that are baselines already. scripts/baselines.py makes their committed runs, in baselines/sums.
BASELINE_ARMS = ("grpo", "max_rl")
COLUMNS = (
    "step",
    "eval/accuracy",
    "reward/mean",
    "response/length_mean",
    "response/truncated_frac",
    "train/entropy",
    "train/clip_frac",
    "train/grad_norm",
    "loss/kl",
    "critic/explained_variance",
    "time/step",
)


@dataclasses.dataclass(frozen=True)
class Arm:
    """One way to train."""

    algorithm: str = "grpo"  # algos/ALGORITHM.py
    variant: str = ""  # a name in docs/variants.md, which also says what file it changes; "": the file as it is
    flags: str = ""  # after those of TASKS: of a flag that is given twice, the last one counts

    def text(self) -> str:
        """As a table shows it: the file or the variant, and the flags."""
        name = self.variant or f"{self.algorithm}.py"
        return f"`{name}`" + (f" `{self.flags}`" if self.flags else "")


ARMS = {
    "grpo": Arm(),
    "rloo": Arm("rloo"),
    "group-mean": Arm("rloo", "group-mean"),
    "no-std": Arm(variant="no-std"),
    "dr_grpo": Arm("dr_grpo"),
    "token-mean": Arm(variant="token-mean"),
    "max_rl": Arm("max_rl"),
    "negative-only": Arm(variant="negative-only"),
    "delight-gate": Arm(variant="delight-gate"),
    "zero-variance-filter": Arm(variant="zero-variance-filter"),
    "entropy-bonus": Arm(variant="entropy-bonus", flags="--entropy-coef 0.01"),
    "clip-higher": Arm(flags="--clip-high 0.28"),
    "kl": Arm(flags="--kl-coef 0.04"),
    "tpo": Arm(variant="tpo"),
    "snapshot-kl": Arm(variant="snapshot-kl", flags="--kl-coef 0.04"),
    "no-snapshot-kl": Arm(variant="snapshot-kl"),
    "four-epochs": Arm(flags="--epochs 4"),
    "gspo-four-epochs": Arm("gspo", flags="--epochs 4"),
    "lora-1": Arm(flags="--lora-rank 1 --learning-rate 2e-3"),
    "pairs": Arm(flags="--group-size 2 --prompts-per-step 256"),
    "ppo-one-response": Arm("ppo", flags="--group-size 1 --prompts-per-step 512"),
    "reinforce-one-response": Arm("reinforce_pp", flags="--group-size 1 --prompts-per-step 512"),
    "random-reward": Arm(flags="--reward gsm8k=0 baselines/random_reward.py:score"),
    "temperature": Arm(flags="--temperature 1.2"),
    "groups-of-16": Arm(flags="--group-size 16 --prompts-per-step 16"),
    "half-rate": Arm(flags="--learning-rate 1e-5"),
    "one-problem": Arm(flags=f"--dataset {ONE_PROBLEM} --eval-dataset arithmetic"),
}


@dataclasses.dataclass(frozen=True)
class Run:
    """The CSV and the JSON of one run."""

    rows: list[dict]
    about: dict

    def last(self, column: str, share: float) -> float:
        """Mean of a column over the last part of the rows that have it: over the last fifth if share is 0.2."""
        values = [row[column] for row in self.rows if column in row]
        return statistics.mean(values[-max(1, round(share * len(values))) :])


@dataclasses.dataclass(frozen=True)
class Measure:
    """A number that a run is judged by."""

    label: str
    of: Callable[[Run], float]
    margin: float = 0.02  # the smallest difference that would matter
    scale: float = 100  # of the table: 100 shows a share as percent
    digits: int = 1

    def text(self, estimate: study.Estimate | None) -> str:
        """A difference with its interval, or nothing without one."""
        return "" if estimate is None else estimate.text(self.scale, self.digits)

    def mean(self, values: dict[int, float]) -> str:
        """The mean over the seeds, or nothing without a run."""
        return f"{self.scale * statistics.mean(values.values()):.{self.digits}f}" if values else ""


MEASURES = {
    "sampled": Measure("mean@8, %", lambda run: run.about["evaluation"]["sampled"]),
    "pass@8": Measure("pass@8, %", lambda run: run.about["evaluation"]["pass@8"]),
    "greedy": Measure("greedy, %", lambda run: run.about["evaluation"]["greedy"]),
    "entropy": Measure("entropy, nats", lambda run: run.last("train/entropy", 0.5), 0.01, scale=1, digits=3),
    "length": Measure("tokens", lambda run: run.last("response/length_mean", 0.2), 0.5, scale=1, digits=2),
}
# The page shows these for every row that has a control. The verdict is by the claim's own measure alone.
SHOWN = ("greedy", "sampled", "pass@8")


def start(run: Run) -> float:
    """Greedy accuracy before the first step. A claim without a control is compared with it."""
    return run.rows[0]["eval/accuracy"]


@dataclasses.dataclass(frozen=True)
class Claim:
    """One row of the page. The paper's words and ours are in docs/claims.md."""

    source: str  # "NAME, ARXIV NUMBER, SECTION", "NAME, ADDRESS, SECTION", or "ours" for an expectation of our own
    arm: str
    control: str  # "": the arm's own model before training, by its greedy accuracy
    measure: str
    expected: Literal["more", "less", "equal"]  # what the paper expects of the arm, compared with the control
    task: str = "arithmetic"

    @property
    def margin(self) -> float:
        return MEASURES[self.measure].margin


# Name of a claim: its source, arm, control, measure, and what the paper expects.
CLAIMS = {
    "leave-one-out": Claim("Dr. GRPO, 2503.20783, app. A", "rloo", "group-mean", "sampled", "equal"),
    "std": Claim("Dr. GRPO, 2503.20783, 3.1", "no-std", "grpo", "sampled", "more"),
    "length": Claim("Dr. GRPO, 2503.20783, 3.1", "dr_grpo", "no-std", "length", "less"),
    "token-mean": Claim("DAPO, 2503.14476, 3.3", "token-mean", "grpo", "sampled", "more"),
    "clip-higher": Claim("DAPO, 2503.14476, 3.1", "clip-higher", "grpo", "entropy", "more"),
    "zero-variance": Claim("ScaleRL, 2510.13786, 3.2", "zero-variance-filter", "grpo", "sampled", "more"),
    "sequence-ratio": Claim("GSPO, 2507.18071, 4", "gspo-four-epochs", "four-epochs", "sampled", "more"),
    "lora": Claim(
        "LoRA Without Regret, https://thinkingmachines.ai/blog/lora/, Reinforcement learning",
        "lora-1",
        "grpo",
        "sampled",
        "equal",
    ),
    "pairs": Claim("It Takes Two, 2510.00977, abstract", "pairs", "grpo", "sampled", "equal"),
    "critic": Claim("VAPO, 2504.05118, abstract", "ppo-one-response", "reinforce-one-response", "sampled", "more"),
    "delight": Claim("Delightful PG, 2603.14608, abstract", "delight-gate", "grpo", "sampled", "more"),
    "random-reward": Claim("Spurious Rewards, 2506.10947, abstract", "random-reward", "", "greedy", "more"),
    "one-problem": Claim("1-shot RLVR, 2504.20571, abstract", "one-problem", "", "greedy", "more"),
    "max-rl": Claim("MaxRL, 2602.02710, abstract", "max_rl", "grpo", "pass@8", "more", task="maze"),
    "negatives": Claim("NSR, 2506.01347, abstract", "negative-only", "grpo", "pass@8", "more", task="maze"),
    "entropy-bonus": Claim("A3C, 1602.01783, 4", "entropy-bonus", "grpo", "sampled", "more", task="maze"),
    "kl": Claim("ProRL, 2505.24864, abstract", "kl", "grpo", "pass@8", "more", task="maze"),
    "tpo": Claim("TPO, 2604.06159, 3.6", "tpo", "snapshot-kl", "sampled", "more", task="reversal"),
    "tpo-no-kl": Claim("TPO, 2604.06159, 3.6", "tpo", "grpo", "sampled", "more", task="reversal"),
    "kl-snapshot": Claim("TPO, 2604.06159, 3.6", "snapshot-kl", "no-snapshot-kl", "sampled", "more", task="reversal"),
    "kl-sparse": Claim("TPO, 2604.06159, 3.6", "kl", "grpo", "sampled", "more", task="reversal"),
    "max-rl-sums": Claim("MaxRL, 2602.02710, abstract", "max_rl", "grpo", "pass@8", "more", task="sums"),
    "delight-sums": Claim(
        "Delightful PG, 2603.14608, abstract", "delight-gate", "grpo", "sampled", "more", task="sums"
    ),
    "bonus-sums": Claim("A3C, 1602.01783, 4", "entropy-bonus", "grpo", "sampled", "more", task="sums"),
    "clip-higher-sums": Claim("DAPO, 2503.14476, 3.1", "clip-higher", "grpo", "sampled", "more", task="sums"),
    "temperature-sums": Claim("ProRL, 2505.24864, setup", "temperature", "grpo", "sampled", "more", task="sums"),
    "groups-sums": Claim("ours", "groups-of-16", "grpo", "sampled", "more", task="sums"),
    "rate-sums": Claim("ours", "half-rate", "grpo", "sampled", "more", task="sums"),
    "filter-sums": Claim("ScaleRL, 2510.13786, 3.2", "zero-variance-filter", "grpo", "sampled", "more", task="sums"),
}


@dataclasses.dataclass
class Args:
    claims: tyro.conf.Positional[
        tuple[str, ...]
    ] = ()  # Claims to run. "sums": all on that task. "embedded": all others.
    seeds: tuple[int, ...] = ()  # Default: 0 to 4, and 0 to 2 for sums.
    jobs: int = 1  # Runs at a time, each on a core of its own.
    folder: str = "runs/claims"  # Where the runs are kept. Those that are there are skipped.
    rebuild: bool = False  # Write the page's tables, its picture and the CSV from the committed runs.


@dataclasses.dataclass(frozen=True)
class Cell:
    """One run of the study."""

    task: str
    arm: str
    seed: int

    def __str__(self) -> str:
        return f"{self.task}, {self.arm}, seed {self.seed}"

    @property
    def is_baseline(self) -> bool:
        return self.task == "sums" and self.arm in BASELINE_ARMS

    def file(self, folder: Path) -> Path:
        if folder == COMMITTED and self.is_baseline:
            folder = baselines.BASELINES
        return folder / self.task / self.arm / f"seed{self.seed}.csv"

    def flags(self) -> str:
        return " ".join(f"{TASKS[self.task]} {ARMS[self.arm].flags} --seed {self.seed}".split())


def run(cell: Cell, folder: Path) -> str:
    """Train and evaluate a cell, write its CSV and JSON, and say how it ended. Raises RuntimeError if it fails."""
    variant = ARMS[cell.arm].variant
    with tempfile.TemporaryDirectory() as scratch:
        rows, about, trained = train(cell, Path(scratch))
        about |= {"flags": cell.flags(), "variant": variant, "seed": cell.seed}
        problems = f"{REVERSAL}/problems.jsonl" if cell.task == "reversal" else ""
        about["evaluation"] = baselines.evaluate(cell.task, trained, problems, TASKS[cell.task])
    study.write_run(cell.file(folder), rows, about, COLUMNS)
    minutes = sum(row.get("time/step", 0.0) for row in rows) / 60
    return f"{about['evaluation']['sampled']:.1%} in {minutes:.1f} minutes"


def train(cell: Cell, scratch: Path) -> tuple[list[dict], dict, Path]:
    """Train a cell in an empty folder. Returns its metrics, where it ran, and the folder of the trained model.

    A run that a guard has ended counts with its last checkpoint. Raises RuntimeError if it has none, or failed.
    """
    arm = ARMS[cell.arm]
    file = ROOT / f"algos/{arm.algorithm}.py"
    if arm.variant:
        file = scratch / f"{arm.algorithm}_variant.py"
        file.write_text(variants.source(arm.variant))
    run_dir = scratch / "run"
    ended = study.launch(file, [*cell.flags().split(), "--run-dir", str(run_dir)])
    rows, about = study.result(run_dir, ended.returncode, ended.stdout)
    checkpoints = folders.complete(run_dir)
    if not checkpoints:
        raise RuntimeError(f"{about['ended_by']} ended it before its first checkpoint: there is no model to evaluate")
    trained = checkpoints[-1] / "model"
    if "--lora-rank" in arm.flags:
        # The checkpoint has adapters alone, and scripts/evaluate.py takes whole models.
        merged = scratch / "merged"
        subprocess.run(
            [sys.executable, "scripts/merge_lora.py", str(trained), str(merged), "--dtype", "float32"],
            check=True,
            cwd=ROOT,
        )
        trained = merged
    return rows, about, trained


def has_carry(row: dict) -> bool:
    """Whether the units of a problem such as "47+38=" add up to more than 9."""
    numbers = row["question"].rstrip("=").split("+")
    return sum(int(number) % 10 for number in numbers) > 9


def write_one_problem() -> None:
    """Write ONE_PROBLEM: the first training problem with a carry, 64 times, as a step takes that many prompts."""
    row = next(filter(has_carry, arithmetic.problems("train")))
    line = json.dumps({"question": row["question"], "answer": row["answer"]}) + "\n"
    file = ROOT / ONE_PROBLEM
    file.parent.mkdir(exist_ok=True)
    file.write_text(64 * line)


def write_reversal() -> None:
    """Write the problems of `reversal`, and the demonstrations that baselines.REVERSAL_START has learned from.

    A problem is REVERSED digits, all of them 1 or 2, and its answer is the same digits backwards. Demonstrations have
    random digits for an answer, so at first one response in 2^REVERSED is right, as in the paper's task.
    """
    folder = ROOT / REVERSAL
    folder.mkdir(parents=True, exist_ok=True)
    draw = random.Random(0)
    problems = []
    demonstrations = []
    for digits in map("".join, itertools.product("12", repeat=REVERSED)):
        problem = {"question": f"reverse {digits}=", "answer": digits[::-1]}
        problems.append(problem)
        for _ in range(64):
            demonstrations.append(problem | {"solution": "".join(draw.choices("12", k=REVERSED))})
    draw.shuffle(demonstrations)
    for name, rows in (("problems", problems), ("demonstrations", demonstrations)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def read_runs(folder: Path, task: str, arm: str) -> dict[int, Run]:
    """seed -> run, of those that are done. Of the committed runs only those with the seeds that were fixed before.

    With more seeds a verdict could be changed after it was seen.
    """
    runs = {}
    for file in sorted(Cell(task, arm, 0).file(folder).parent.glob("seed*.csv")):
        about = json.loads(file.with_suffix(".json").read_text())
        if folder == COMMITTED and about["seed"] not in range(SEEDS[task]):
            continue
        runs[about["seed"]] = Run(baselines.read_curve(file), about)
    return runs


def compared(folder: Path, claim: Claim, measure: Measure) -> tuple[dict[int, float], dict[int, float]]:
    """A measure of a claim's arm and of its control, seed -> number, over the seeds that both have."""
    arm = read_runs(folder, claim.task, claim.arm)
    if not claim.control:
        return {seed: measure.of(run) for seed, run in arm.items()}, {seed: start(run) for seed, run in arm.items()}
    control = read_runs(folder, claim.task, claim.control)
    both = sorted(arm.keys() & control.keys())
    return {seed: measure.of(arm[seed]) for seed in both}, {seed: measure.of(control[seed]) for seed in both}


def finished(folder: Path) -> dict[str, tuple[dict[int, float], dict[int, float]]]:
    """compared() by a claim's own measure, for the claims that have all their seeds."""
    found = {}
    for name, claim in CLAIMS.items():
        arm, control = compared(folder, claim, MEASURES[claim.measure])
        if len(arm) >= SEEDS[claim.task]:
            found[name] = arm, control
    return found


def p_of_margin(claim: Claim, arm: dict[int, float], control: dict[int, float]) -> float:
    """One-sided p-value against a gain of at least the margin: small if the difference falls clearly short of it.

    Student's. The claim expects "more" or "less".
    """
    sign = -1 if claim.expected == "less" else 1
    beyond = study.paired({seed: value - sign * claim.margin for seed, value in arm.items()}, control)
    falls_short = sign * beyond.mean < 0
    return beyond.p / 2 if falls_short else 1 - beyond.p / 2


def verdict(claim: Claim, estimate: study.Estimate | None, seeds: int) -> str:
    """The verdict on a claim, by a rule that was fixed before the runs.

    It waits for all SEEDS, so that nobody can stop when the answer pleases. (This was added after the first 21 runs.)
    "more": confirmed if the whole interval is above 0, refuted here if it is below the margin, that is, if the gain is
    smaller than what would matter. "less" is the mirror image. "equal": confirmed if the whole interval is within the
    margin on both sides, otherwise refuted here if it excludes 0. All else is unresolved, also seeds that all differ by
    the same: they have no interval.
    """
    if estimate is None or seeds < SEEDS[claim.task]:
        return f"{seeds} of {SEEDS[claim.task]} seeds"
    low, high, margin = estimate.low, estimate.high, claim.margin
    if claim.expected == "less":
        low, high = -high, -low
    if claim.expected == "equal":
        confirmed = -margin < low and high < margin
        refuted = estimate.excludes_zero
    else:
        confirmed = low > 0
        refuted = high < margin
    if confirmed:
        return "confirmed"
    return "refuted here" if refuted else "unresolved"


def table(folder: Path, names: tuple[str, ...] = tuple(CLAIMS), *, unfinished: bool = True) -> str:
    """unfinished: show the numbers of rows that are missing seeds, too. On the page they would pass for results."""
    return "\n".join(table_lines(folder, names, unfinished))


def table_lines(folder: Path, names: tuple[str, ...], unfinished: bool) -> Iterator[str]:
    yield "| claim | verdict | the claim expects | difference | p | measure | arm | control | task | seeds |"
    yield "|---" * 10 + "|"
    for name in names:
        claim = CLAIMS[name]
        measure = MEASURES[claim.measure]
        arm, control = compared(folder, claim, measure)
        estimate = study.paired(arm, control)
        seeds = len(arm)
        said = verdict(claim, estimate, seeds)
        if seeds < SEEDS[claim.task] and not unfinished:
            estimate, arm, control = None, {}, {}  # whose fields are empty
        fields = (
            f"[{name}](#{name})",
            f"**{said}**",
            claim.expected,
            measure.text(estimate),
            p_text(estimate),
            measure.label,
            measure.mean(arm),
            measure.mean(control),
            claim.task,
            str(seeds),
        )
        yield f"| {' | '.join(fields)} |"


def p_text(estimate: study.Estimate | None) -> str:
    """Two digits, such as 0.0019 or 1.6e-06. Empty without an interval."""
    return "" if estimate is None or math.isnan(estimate.p) else f"{estimate.p:.2g}"


def linked(source: str) -> str:
    """A claim's source as a link and the section."""
    name, *rest = source.split(", ", maxsplit=2)
    if not rest:
        return name
    address, *section = rest
    if re.fullmatch(r"\d{4}\.\d{5}", address):
        address = f"https://arxiv.org/abs/{address}"
    return ", ".join([f"[{name}]({address})", *section])


def differences(folder: Path) -> str:
    """CSV: a line for each seed of each row, by the claim's own measure. In its own unit, so 0.5 for 50 %."""
    lines = ["claim,measure,seed,arm,control,difference"]
    for name, (arm, control) in finished(folder).items():
        measure = CLAIMS[name].measure
        for seed in sorted(arm):
            values = (arm[seed], control[seed], arm[seed] - control[seed])
            lines.append(f"{name},{measure},{seed}," + ",".join(f"{value:.6g}" for value in values))
    return "\n".join(lines) + "\n"


def arms_table() -> str:
    """What each row compares, and who claims it."""
    lines = ["| claim | arm | control | source |", "|---" * 4 + "|"]
    for name, claim in CLAIMS.items():
        control = ARMS[claim.control].text() if claim.control else "the model before training"
        lines.append(f"| [{name}](#{name}) | {ARMS[claim.arm].text()} | {control} | {linked(claim.source)} |")
    return "\n".join(lines)


def summary(folder: Path) -> str:
    """How many verdicts there are of each kind, and which of them remain if all rows are tested together."""
    verdicts: list[str] = []
    p_values: dict[str, float] = {}  # of the hypothesis that the difference is 0
    short_of_margin: dict[str, float] = {}  # of the hypothesis that it reaches the margin
    excluding = []  # rows whose own interval excludes 0
    for name, (arm, control) in finished(folder).items():
        claim = CLAIMS[name]
        estimate = study.paired(arm, control)
        verdicts.append(verdict(claim, estimate, len(arm)))
        p_values[name] = estimate.p
        if claim.expected != "equal":
            short_of_margin[name] = p_of_margin(claim, arm, control)
        if estimate.excludes_zero:
            excluding.append(name)
    remaining = study.holm(p_values)
    next_row = next_in_line(p_values, len(remaining))
    falling_short = study.holm(short_of_margin, level=0.025)
    counts = ", ".join(f"{verdicts.count(kind)} {kind}" for kind in ("confirmed", "refuted here", "unresolved"))
    return "\n".join(
        [
            f"- Of {len(CLAIMS)} rows, {len(verdicts)} have a verdict: {counts}.",
            f"- {len(excluding)} intervals exclude 0. In a joint test of all rows, {listed(remaining)} of these "
            f"differences remain. (Holm's correction keeps the chance of any false finding at 5 %.{next_row})",
            f"- {len(short_of_margin)} rows expect an increase or a decrease. In {listed(falling_short)} of them, a "
            "change in that direction as large as the margin is ruled out even if all of them are tested together "
            "(Holm, one-sided, 2.5 %).",
        ]
    )


def next_in_line(p_values: dict[str, float], remaining: int) -> str:
    """How near the first row that doesn't remain comes to Holm's limit. Empty if there is none."""
    surest = sorted((p, name) for name, p in p_values.items() if not math.isnan(p))
    if len(surest) == remaining:
        return ""
    p, name = surest[remaining]
    limit = study.holm_limit(len(p_values), remaining)
    return f" The next one, [{name}](#{name}), has p = {p:.3g}, and would need {limit:.3g}."


def listed(names: list[str]) -> str:
    """How many rows these are, and links to them."""
    links = ", ".join(f"[{name}](#{name})" for name in names)
    return f"{len(names)} ({links})" if names else "0"


def measures_table(folder: Path) -> str:
    """Arm minus control by all measures of SHOWN, for the rows that have a control and all their seeds.

    The last column is no difference: it has the steps whose gradients were clipped, in percent, of arm and control.
    Below the table is how many of the intervals that decide no verdict exclude 0.
    """
    shown = [MEASURES[name] for name in SHOWN]
    labels = [*(measure.label for measure in shown), "steps with clipped gradients, %: arm, control"]
    lines = [f"| claim | {' | '.join(labels)} |", "|---" * (len(labels) + 1) + "|"]
    unplanned = []
    for name, claim in CLAIMS.items():
        pairs = {kind: compared(folder, claim, MEASURES[kind]) for kind in SHOWN}
        if claim.control and len(pairs["greedy"][0]) >= SEEDS[claim.task]:
            estimates = {kind: study.paired(*pair) for kind, pair in pairs.items()}
            fields = [MEASURES[kind].text(estimate) for kind, estimate in estimates.items()]
            fields.append(", ".join(clipped(folder, claim.task, arm) for arm in (claim.arm, claim.control)))
            lines.append(f"| [{name}](#{name}) | {' | '.join(fields)} |")
            unplanned += [estimate for kind, estimate in estimates.items() if kind != claim.measure]
    excluding = sum(estimate.excludes_zero for estimate in unplanned)
    said = f"{len(unplanned)} of these intervals decide no verdict. {excluding} of them exclude 0, without a correction"
    said += f" for their number. By chance alone, about {0.05 * len(unplanned):.0f} would."
    return "\n".join([*lines, "", said])


def clipped(folder: Path, task: str, arm: str) -> str:
    """Percentage of an arm's steps, of all seeds, whose gradient norm is over 1 in the mean of the step's updates.

    A step without an update isn't counted. "?" if no run has recorded the norm.
    """
    norms = []
    for run in read_runs(folder, task, arm).values():
        norms += [row["train/grad_norm"] for row in run.rows if "train/grad_norm" in row]
    return f"{100 * statistics.mean(norm > 1 for norm in norms):.0f}" if norms else "?"


def entropy_table(folder: Path) -> str:
    """Entropies of the arms on `sums`: the lowest and the highest of the seeds, in step 15 and over steps 21 to 40."""
    lines = ["| arm | step 15 | steps 21 to 40 |", "|---|---|---|"]
    arms = dict.fromkeys(["grpo", *(claim.arm for claim in CLAIMS.values() if claim.task == "sums")])
    for arm in arms:
        runs = read_runs(folder, "sums", arm)
        if len(runs) < SEEDS["sums"]:
            continue
        early, late = [], []
        for run in runs.values():
            entropies = {int(row["step"]): row["train/entropy"] for row in run.rows if "train/entropy" in row}
            early += [entropies[15]] if 15 in entropies else []  # a step without an update has none
            after_20 = [entropy for step, entropy in entropies.items() if step > 20]
            late += [statistics.mean(after_20)] if after_20 else []  # a guard may have ended the run before
        lines.append(f"| {ARMS[arm].text()} | {extent(early)} | {extent(late)} |")
    return "\n".join(lines)


def extent(values: list[float]) -> str:
    """The lowest and the highest: "0.11 to 0.12"."""
    return f"{min(values):.2f} to {max(values):.2f}" if values else "none"


def page_parts(folder: Path) -> dict[str, str]:
    """What the runs of a folder say on the page: the name of each part, and its text."""
    return {
        "claims": table(folder, unfinished=False),
        "claims summary": summary(folder),
        "claims measures": measures_table(folder),
        "claims arms": arms_table(),
        "claims entropy": entropy_table(folder),
    }


EDGE = 25  # points, at both ends of the picture
ROW, HEAD, FOOT = 0.2, 0.45, 0.55  # inches
COLORS = {"confirmed": pictures.BLUE, "refuted here": "#b3261e", "unresolved": "0.45"}  # verdict -> its color


@pictures.styled
def draw(folder: Path, file: Path) -> None:
    """Draw the differences that are in points, with their intervals, in the order and by the verdicts of the page.

    Behind them is a band of the margin, which all of these rows share.
    """
    shown = {}
    for name, (arm, control) in finished(folder).items():
        claim = CLAIMS[name]
        if MEASURES[claim.measure].scale == 100:
            estimate = study.paired(arm, control)
            shown[name] = estimate, verdict(claim, estimate, len(arm))
    height = len(shown) * ROW + HEAD + FOOT
    figure = Figure(figsize=(pictures.WIDTH, height))
    axis = figure.subplots()
    left, right = 1.45 / pictures.WIDTH, 1 - 0.95 / pictures.WIDTH
    figure.subplots_adjust(left=left, right=right, bottom=FOOT / height, top=1 - HEAD / height)
    margin = 100 * MEASURES["sampled"].margin
    axis.axvspan(-margin, margin, color="0.93")
    axis.axvline(0, color=pictures.GREY, linewidth=0.8)
    for place, (estimate, said) in enumerate(shown.values()):
        draw_interval(axis, place, estimate, COLORS[said])
    axis.set_xlim(-EDGE, EDGE)
    axis.set_ylim(len(shown) - 0.5, -0.5)  # the first row on top
    axis.set_yticks(range(len(shown)), list(shown), size=9)
    axis.grid(False)
    for place, (said, color) in enumerate(COLORS.items()):
        x = (0.1 + 1.5 * place) / pictures.WIDTH
        figure.text(x, 1 - 0.1 / height, said, va="top", size=10, weight="bold", color=color)
    below = f"arm minus control, in points, with 95 % intervals; grey: {margin:g} points"
    figure.text(left, 0.1 / height, below, size=10, color=pictures.GREY)
    pictures.save(figure, file)


def draw_interval(axis: Axes, place: int, estimate: study.Estimate, color: str) -> None:
    """An interval, its mean as a dot, and the mean in numbers. An arrow stands for what is beyond the edge."""
    low, mean, high = 100 * estimate.low, 100 * estimate.mean, 100 * estimate.high
    axis.plot([low, high], [place, place], color=color, linewidth=2)
    axis.plot([mean], [place], marker="o", markersize=5, color=color)
    if low < -EDGE:
        axis.plot([-EDGE], [place], marker="<", color=color, clip_on=False)
    if high > EDGE:
        axis.plot([EDGE], [place], marker=">", color=color, clip_on=False)
    beside = (1.05, place)
    axis.annotate(f"{mean:+z.1f}", beside, xycoords=("axes fraction", "data"), va="center", size=9, color=color)


def rebuild() -> None:
    """Write what the committed runs say into the page and DIFFERENCES, and draw the page's picture."""
    for name, text in page_parts(COMMITTED).items():
        blocks.write(PAGE, name, text)
    DIFFERENCES.write_text(differences(COMMITTED))
    draw(COMMITTED, PICTURE)


def check_claims(asked: tuple[str, ...]) -> tuple[str, ...]:
    """The claims that are asked for. Raises BadInput for a name that does not exist."""
    groups = {
        "embedded": [name for name, claim in CLAIMS.items() if claim.task != "sums"],
        "sums": [name for name, claim in CLAIMS.items() if claim.task == "sums"],
    }
    names = []
    for name in asked:
        if name not in CLAIMS and name not in groups:
            raise errors.BadInput(f'"{name}" is not a claim; use embedded, sums, or {", ".join(CLAIMS)}')
        names += groups.get(name, [name])
    return tuple(names)


def cells(names: tuple[str, ...], seeds: tuple[int, ...]) -> list[Cell]:
    """The runs of some claims, each once. A seed of all arms comes before the next, so half a study says something."""
    ordered: dict[Cell, None] = {}  # keys without values: several claims share an arm, which runs once
    for seed in seeds or range(max(SEEDS.values())):
        for name in names:
            claim = CLAIMS[name]
            if not seeds and seed >= SEEDS[claim.task]:
                continue
            for arm in filter(None, (claim.arm, claim.control)):
                ordered[Cell(claim.task, arm, seed)] = None
    return list(ordered)


def main(args: Args) -> None:
    names = check_claims(args.claims)
    if not names and (args.seeds or args.folder != Args.folder):
        raise errors.BadInput("--seeds and --folder are for claims that are named; all others are shown as committed")
    failed = repeat(names, args) if names else 0
    if args.rebuild:
        rebuild()
    if not names:
        print(table(COMMITTED))
    if failed:
        sys.exit(f"error: {failed} runs failed; the same command repeats them")


def repeat(names: tuple[str, ...], args: Args) -> int:
    """Run what is missing of some claims, and print their table. Returns how many runs have failed."""
    study.check_jobs(args.jobs)
    folder = (ROOT / args.folder).resolve()
    wanted = cells(names, args.seeds)
    missing = [cell for cell in wanted if not cell.file(folder).is_file()]
    if there := len(wanted) - len(missing):
        errors.say(
            f"{there} of {len(wanted)} runs are in {folder}, perhaps of older code; delete them to run them again"
        )
    for cell in missing:
        if folder == COMMITTED and cell.is_baseline:
            command = f"scripts/baselines.py --task {cell.task} --run {cell.arm} --seeds {cell.seed}"
            raise errors.BadInput(f"{cell}: is a baseline; make it first, with python {command}")
    if any(cell.arm == "one-problem" for cell in missing):
        write_one_problem()
    if any(cell.task == "reversal" for cell in missing):
        write_reversal()
    failed = study.run_all(missing, lambda cell: run(cell, folder), args.jobs)
    print(table(folder, names))
    return failed


if __name__ == "__main__":
    errors.launch(main, tyro.cli(Args, description=help_text(__doc__)))
