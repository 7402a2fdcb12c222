"""A step of GRPO at several commits of this repository, in turns: what a change has gained or lost.

python scripts/bench/commits.py --commits 82ee0b2 HEAD
python scripts/bench/commits.py --commits HEAD~1 HEAD --flags="--steps 20 --eval-prompts 0"     # the embedded job

By default the job is 256 short answers of SmolLM2-135M to sums (scripts/smollm2_from_pypi.py), whose problems are
written to a file, because older commits do not have the task. Each round starts every commit once, with this
interpreter and its packages. Figures are medians of the steps that count, in all rounds.
"""

import dataclasses
import io
import json
import os
import statistics
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

import tyro

from common.data import tasks

ROOT = Path(__file__).parents[2]
SUMS = (
    "--model models/SmolLM2-135M-Instruct --dataset {problems} --dtype float32 --prompts-per-step 16 --group-size 16 "
    "--mini-batches 2 --steps 4 --learning-rate 3e-5 --warmup-steps 1 --schedule constant --max-response-tokens 24 "
    "--eval-prompts 0"
)


@dataclasses.dataclass
class Args:
    commits: tuple[str, ...] = ("HEAD~1", "HEAD")  # Commits, of which the first is the one to compare with.
    flags: str = SUMS  # Flags of algos/grpo.py, understood by all of them. {problems}: file with the problems of sums.
    rounds: int = 2  # How often each commit runs.
    warmup: int = 1  # First steps of a run, which do not count.


def step_times(tree: Path, run_dir: Path, flags: list[str], warmup: int) -> list[tuple[float, float]]:
    """Seconds of (step, rollout) of a run with the code in `tree`, for the steps that count."""
    command = [sys.executable, str(tree / "algos/grpo.py"), *flags, "--run-dir", str(run_dir)]
    with open(run_dir.with_suffix(".log"), "w") as log:
        code = subprocess.run(
            command, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(tree)}, stdout=log, stderr=subprocess.STDOUT
        ).returncode
    if code:
        sys.exit(f"error: {' '.join(command)} ended with {code}:\n{Path(log.name).read_text()[-2000:]}")
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [(row["time/step"], row["time/rollout"]) for row in rows if row["step"] > warmup]


def main(args: Args) -> None:
    times = {commit: [] for commit in args.commits}
    with tempfile.TemporaryDirectory() as scratch:
        problems = Path(scratch) / "problems.jsonl"
        problems.write_text("".join(json.dumps(row) + "\n" for row in tasks.problems("sums", "train")))
        for place, commit in enumerate(args.commits):
            archive = subprocess.run(["git", "archive", commit], cwd=ROOT, check=True, stdout=subprocess.PIPE).stdout
            with tarfile.open(fileobj=io.BytesIO(archive)) as files:
                files.extractall(Path(scratch) / str(place), filter="data")
        for turn in range(args.rounds):
            for place, commit in enumerate(args.commits):
                run_dir = Path(scratch) / f"run{place}-{turn}"
                flags = args.flags.format(problems=problems).split()
                times[commit] += step_times(Path(scratch) / str(place), run_dir, flags, args.warmup)
    print("| commit | steps | step, s | rollout, s | the rest, s | times the first |")
    print("|---" * 6 + "|")
    for commit, pairs in times.items():
        step, rollout, rest = (statistics.median(column) for column in zip(*[(s, r, s - r) for s, r in pairs]))
        first = statistics.median(step for step, _ in times[args.commits[0]])
        print(f"| {commit} | {len(pairs)} | {step:.1f} | {rollout:.1f} | {rest:.1f} | {first / step:.2f} |")


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
