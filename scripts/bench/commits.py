"""A step of GRPO at several commits of this repository, in turns: what a change has gained or lost.

python scripts/bench/commits.py --commits 82ee0b2 HEAD
python scripts/bench/commits.py --commits HEAD~1 HEAD --flags="--steps 20 --eval-prompts 0"     # the embedded job

By default the job is 256 short answers of SmolLM2-135M (scripts/smollm2_from_pypi.py makes it) to sums, whose problems
are written to a file, because older commits do not have the task. So that all commits do the same work, the learning
rate is next to nothing, and the reward differs inside the groups of every other problem. Each round starts every commit
once, with this interpreter and its packages; changes that are not committed do not count. Figures are medians of the
steps that count, in all rounds, with the tokens of a response and the share of groups whose rewards are equal.
"""

import dataclasses
import io
import json
import os
import shlex
import shutil
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
    "--model models/SmolLM2-135M-Instruct --dataset {scratch}/problems.jsonl --reward {scratch}/reward.py:score "
    "--dtype float32 --prompts-per-step 16 --group-size 16 --mini-batches 2 --steps 4 --learning-rate 1e-12 "
    "--schedule constant --max-response-tokens 24 --eval-prompts 0"
)
REWARD = """
def score(items, lengths, truncated):
    return [len(item.response) % 2 if int(item.answer) % 2 else 0.0 for item in items]
"""


@dataclasses.dataclass
class Args:
    commits: tuple[str, ...] = ("HEAD~1", "HEAD")  # Commits, of which the first is the one to compare with.
    flags: str = SUMS  # Flags of algos/grpo.py, understood by all of them. {scratch}: folder with problems and reward.
    rounds: int = 2  # How often each commit runs, in the opposite order every other time.
    warmup: int = 1  # First steps of a run, which do not count.


def steps_of(tree: Path, run_dir: Path, flags: list[str], warmup: int) -> list[dict]:
    """Metrics of the steps that count, of a run with the code in `tree`."""
    command = [sys.executable, str(tree / "algos/grpo.py"), *flags, "--run-dir", str(run_dir)]
    paths = os.pathsep.join([str(tree), *filter(None, [os.environ.get("PYTHONPATH")])])
    log = run_dir.with_suffix(".log")
    with open(log, "w") as file:
        code = subprocess.run(
            command, cwd=ROOT, env=os.environ | {"PYTHONPATH": paths}, stdout=file, stderr=subprocess.STDOUT
        ).returncode
    if code:
        sys.exit(f"error: {shlex.join(command)} ended with {code}:\n{log.read_text()[-2000:]}")
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    shutil.rmtree(run_dir)  # A checkpoint of SmolLM2 has 2 GB.
    return [row for row in rows if row["step"] > warmup] or sys.exit(f"error: --warmup {warmup} leaves no step")


def main(args: Args) -> None:
    found = [[] for _ in args.commits]
    with tempfile.TemporaryDirectory() as scratch:
        problems = Path(scratch) / "problems.jsonl"
        problems.write_text("".join(json.dumps(row) + "\n" for row in tasks.problems("sums", "train")))
        (Path(scratch) / "reward.py").write_text(REWARD)
        flags = shlex.split(args.flags.replace("{scratch}", scratch))
        for place, commit in enumerate(args.commits):
            archive = subprocess.run(["git", "archive", commit], cwd=ROOT, stdout=subprocess.PIPE)
            if archive.returncode:
                sys.exit(f"error: --commits {commit}: no commit of this repository")
            with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as files:
                files.extractall(Path(scratch) / str(place), filter="data")
        for turn in range(args.rounds):
            for place in range(len(found))[:: -1 if turn % 2 else 1]:
                run_dir = Path(scratch) / f"run{place}-{turn}"
                found[place] += steps_of(Path(scratch) / str(place), run_dir, flags, args.warmup)
    print("| commit | steps | step, s | rollout, s | the rest, s | times the first | tokens | groups alike |")
    print("|---" * 8 + "|")
    median = lambda rows, name: statistics.median(row.get(name, 0.0) for row in rows)
    for commit, rows in zip(args.commits, found):
        step, rollout = median(rows, "time/step"), median(rows, "time/rollout")
        rest = statistics.median(row["time/step"] - row.get("time/rollout", 0.0) for row in rows)
        print(
            f"| {commit} | {len(rows)} | {step:.2f} | {rollout:.2f} | {rest:.2f} "
            f"| {median(found[0], 'time/step') / step:.2f} "
            f"| {median(rows, 'response/length_mean'):.1f} | {median(rows, 'group/zero_std_frac'):.2f} |"
        )


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
