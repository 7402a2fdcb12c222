"""Peak memory of a baseline: what its processes hold for themselves, in RAM and swap, looked at once a second.

    python scripts/bench/run_memory.py ppo                                  # two steps on `sums`
    python scripts/bench/run_memory.py ppo --flags=--token-budget=512       # with a further flag
    python scripts/bench/run_memory.py grpo --task arithmetic --steps 3
    python scripts/bench/run_memory.py dpo                                  # a baseline of several commands: the worst

A run that samples evaluates 256 problems after each step, and at its end it saves a checkpoint. A whole run may take
more, because the heap gets holes. Memory that processes share, such as libraries, is not counted. A peak shorter than a
second may be missed.
"""

import contextlib
import json
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import psutil
import tyro

sys.path.append(str(Path(__file__).parents[1]))
import baselines
from common import errors

GB = 1e9


@dataclass
class Args:
    run: tyro.conf.Positional[str]  # Name of a baseline: its flags are used.
    task: str = "sums"
    steps: int = 2
    flags: tuple[str, ...] = ()  # Further flags, each as --name=value.


def held(process: psutil.Process) -> int:
    """Bytes of a process and its children that no other process shares.

    One that has just ended counts 0. So does one that hides its memory, as sandboxed programs do from all but root.
    """
    total = 0
    with contextlib.suppress(psutil.NoSuchProcess):
        for each in (process, *process.children(recursive=True)):
            with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                memory = each.memory_full_info()
                total += memory.uss + memory.swap
    return total


def peak_of(words: list[str]) -> int:
    """Run a command, and return the most bytes that it has held."""
    process = psutil.Popen([sys.executable, *words], cwd=baselines.ROOT)
    peak = 0
    while process.poll() is None:
        peak = max(peak, held(process))
        time.sleep(1)
    if process.wait():
        sys.exit(f"error: exit code {process.returncode} of {' '.join(words)}")
    return peak


def commands(args: Args, folder: str) -> list[list[str]]:
    """The commands of the baseline, for few steps and problems."""
    if (args.task, args.run) in baselines.OFFLINE.keys() - baselines.CONTROLS.keys():
        sys.exit(f"error: {args.run} on {args.task} has other flags; name a baseline of `sums`, or one that samples")
    few_steps = ["--steps", str(args.steps), "--warmup-steps", "1", *args.flags]
    if (args.task, args.run) not in baselines.CONTROLS:
        words = baselines.command(args.task, args.run, seed=0)
        return [[*words, *few_steps, "--eval-every", "1", "--eval-prompts", "256", "--run-dir", f"{folder}/run"]]
    found = []
    for text in baselines.commands(args.task, args.run, seed=0):
        words = text.format(folder=folder).split()
        few = few_steps if words[0].startswith("algos/") else ["--prompts", "640"]
        found.append([*words, *few])
    return found


def main(args: Args) -> None:
    baselines.check_names(baselines.Args(task=args.task, run=(args.run,)))
    baselines.prepare(args.task, args.run)
    with tempfile.TemporaryDirectory() as folder:
        peak = max(peak_of(words) for words in commands(args, folder))
        rows = [json.loads(line) for line in (Path(folder) / "run/metrics.jsonl").read_text().splitlines()]
    seconds = ", ".join(f"{row['time/step']:.1f}" for row in rows if "time/step" in row)
    print(f"{args.run}: {peak / GB:.1f} GB at most; steps of {seconds} s")


if __name__ == "__main__":
    errors.launch(main, tyro.cli(Args, description=__doc__))
