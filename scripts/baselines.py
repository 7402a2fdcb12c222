"""The committed baselines on the embedded task: train three seeds, print their table, draw their curves.

python scripts/baselines.py                             # prints the table of the committed CSVs
python scripts/baselines.py --rebuild                   # writes it into both READMEs, and curves.svg
python scripts/baselines.py --run grpo ppo              # trains seeds 0, 1, 2 again (minutes each), then rebuilds
taskset -c 0 python scripts/baselines.py --run grpo --seeds 0     # one seed, on one core
"""

import csv
import dataclasses
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import matplotlib
import tyro
from matplotlib.figure import Figure

from common.run import report
from common.run.directory import flat

ROOT = Path(__file__).parents[1]
BASELINES = ROOT / "baselines"
BEGIN, END = "<!-- baselines -->", "<!-- /baselines -->"  # the table between them is generated
COLUMNS = (
    "step", "reward/mean", "eval/accuracy", "response/length_mean", "mismatch/logprob_abs_max", "time/step",
    "sampling/prompts_generated", "critic/explained_variance", "prm/pair_accuracy",
)  # fmt: skip


@dataclasses.dataclass
class Args:
    run: tuple[str, ...] = ()  # Algorithms to train again.
    seeds: tuple[int, ...] = (0, 1, 2)
    rebuild: bool = False  # Write tables and curves.


def train(algorithm: str, seed: int) -> None:
    """Run python algos/X.py --seed S --eval-every 5, and keep its curve and run.json."""
    folder = BASELINES / algorithm
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        run_dir = Path(scratch) / "run"
        flags = ["--seed", str(seed), "--eval-every", "5", "--run-dir", str(run_dir)]
        subprocess.run([sys.executable, str(ROOT / f"algos/{algorithm}.py"), *flags], check=True)
        with open(folder / f"seed{seed}.csv", "w", newline="") as file:
            writer = csv.DictWriter(file, COLUMNS, extrasaction="ignore", lineterminator="\n")
            writer.writeheader()
            writer.writerows(
                {name: f"{value:.6g}" if isinstance(value, float) else value for name, value in row.items()}
                for row in report.read_metrics(run_dir)
            )
        run = json.loads((run_dir / "run.json").read_text())
    run["argv"] = [f"algos/{algorithm}.py", "--seed", str(seed), "--eval-every", "5"]  # without this machine's folders
    run["args"].update(model="embedded", run_dir="")
    (folder / f"seed{seed}.json").write_text(json.dumps(run, indent=2) + "\n")


def read(path: Path) -> list[dict[str, float]]:
    with open(path, newline="") as file:
        return [{name: float(value) for name, value in row.items() if value} for row in csv.DictReader(file)]


def curves() -> dict[str, list[list[dict]]]:
    """{algorithm: a list of rows for each seed}, from the committed CSVs."""
    folders = [folder for folder in sorted(BASELINES.iterdir()) if list(folder.glob("seed*.csv"))]
    return {folder.name: [read(path) for path in sorted(folder.glob("seed*.csv"))] for folder in folders}


def check_same(algorithm: str) -> None:
    """Seeds of one algorithm must be one experiment: flags that all of them have are the same, except for the seed."""
    runs = [json.loads(path.read_text())["args"] for path in sorted((BASELINES / algorithm).glob("seed*.json"))]
    runs = [flat(args) for args in runs]
    shared = set.intersection(*(set(args) for args in runs)) - {"seed"}
    if any(args[name] != runs[0][name] for args in runs for name in shared):
        sys.exit(f"error: the seeds in baselines/{algorithm} were run with different flags; run them again")


def table(curves: dict[str, list[list[dict]]]) -> str:
    """One line for each algorithm: greedy accuracy before, after (each seed and mean), steps, responses, seconds."""
    lines = [
        "| algorithm | seeds | greedy accuracy before | after, each seed | after, mean | steps | responses | seconds |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for algorithm, seeds in curves.items():
        check_same(algorithm)
        accuracies = [[row["eval/accuracy"] for row in rows if "eval/accuracy" in row] for rows in seeds]
        args = json.loads((BASELINES / algorithm / "seed0.json").read_text())["args"]
        steps = [int(rows[-1]["step"]) for rows in seeds]
        drawn = [row.get("sampling/prompts_generated", args["prompts_per_step"]) for row in seeds[0] if row["step"]]
        responses = int(sum(drawn)) * args["group_size"]
        seconds = statistics.mean(sum(row.get("time/step", 0) for row in rows) for rows in seeds)
        after = [values[-1] for values in accuracies]
        lines.append(
            f"| `{algorithm}.py` | {len(seeds)} | {statistics.mean(v[0] for v in accuracies):.1%} "
            f"| {', '.join(f'{value:.1%}' for value in after)} | {statistics.mean(after):.1%} "
            f"| {steps[0]} | {responses:,} | {seconds:.0f} |"
        )
    return "\n".join(lines)


def draw(curves: dict[str, list[list[dict]]]) -> None:
    """Draw curves.svg: accuracy and reward over the steps. Lines are means, bands go from worst to best seed."""
    figure = Figure(figsize=(10, 4), layout="constrained")
    for axis, key, title in zip(
        figure.subplots(1, 2), ("eval/accuracy", "reward/mean"), ("greedy accuracy, held out", "reward, sampled")
    ):
        for algorithm, seeds in curves.items():
            steps = min(([row["step"] for row in rows if key in row] for rows in seeds), key=len)
            values = list(zip(*[[row[key] for row in rows if key in row] for rows in seeds]))
            axis.plot(steps, [statistics.mean(v) for v in values], label=algorithm)
            axis.fill_between(steps, [min(v) for v in values], [max(v) for v in values], alpha=0.2)
        axis.set(title=title, xlabel="step", ylim=(0, 1))
        axis.legend()
    with matplotlib.rc_context({"svg.hashsalt": "0"}):
        figure.savefig(BASELINES / "curves.svg", metadata={"Date": None})


def main(args: Args) -> None:
    for algorithm in args.run:
        for seed in args.seeds:
            train(algorithm, seed)
    drawn = curves()
    print(table(drawn))
    if args.run or args.rebuild:
        draw(drawn)
        block = f"{BEGIN}\n{table(drawn)}\n{END}"
        for page in (BASELINES / "README.md", ROOT / "README.md"):
            before, rest = page.read_text().split(BEGIN)
            page.write_text(before + block + rest.split(END)[1])


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
