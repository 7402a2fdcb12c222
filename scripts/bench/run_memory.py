"""Peak memory of a run: what its processes hold for themselves, in RAM and swap, looked at once a second.

    python scripts/bench/run_memory.py ppo                                  # two steps of the baseline of `sums`
    python scripts/bench/run_memory.py ppo --flags=--token-budget=1024      # with a further flag
    python scripts/bench/run_memory.py grpo --task arithmetic --steps 3

Memory that processes share, such as libraries, is not counted. A peak shorter than a second may be missed.
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

GIB = 2**30


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


def main(args: Args) -> None:
    if (args.task, args.run) in baselines.OFFLINE:
        sys.exit(f"error: {args.run} on {args.task} learns offline, with other commands; name a baseline that samples")
    baselines.prepare(args.task, args.run)
    with tempfile.TemporaryDirectory() as folder:
        words = baselines.command(args.task, args.run, seed=0)
        words += ["--steps", str(args.steps), "--warmup-steps", "1", "--eval-prompts", "0", *args.flags]
        process = psutil.Popen([sys.executable, *words, "--run-dir", f"{folder}/run"], cwd=baselines.ROOT)
        peak = 0
        while process.poll() is None:
            peak = max(peak, held(process))
            time.sleep(1)
        if process.wait():
            sys.exit(f"error: exit code {process.returncode}")
        rows = [json.loads(line) for line in (Path(folder) / "run/metrics.jsonl").read_text().splitlines()]
    updates = ", ".join(f"{row['time/update']:.1f}" for row in rows if "time/update" in row)
    print(f"{args.run}: {peak / GIB:.1f} GiB at most; updates of {updates} s")


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
