"""How much a slow environment costs: GRPO on `calculator`, where one episode in ten waits a second for each answer.

    python scripts/bench/slow_environment.py --prompts-per-step 64 256 512

For each size of a step, two runs take turns, each `--rounds` times. The first two steps of a run, in which processes
start, do not count. --ahead samples one batch ahead, on a server that has the last core.
"""

import dataclasses
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import tyro

from common.data import arithmetic

ROOT = Path(__file__).resolve().parents[2]
SLOW = """
import time
from common.rollout.environments.built_in import Calculator

class Slow(Calculator):
    def step(self, text):
        if self.problem.seed % 10 == 0:
            time.sleep(1.0)
        return super().step(text)
"""


@dataclasses.dataclass
class Args:
    steps: int = 6  # Steps of each run.
    prompts_per_step: tuple[int, ...] = (64, 256, 512)  # Sizes of a step in prompts, with 8 responses to each.
    rounds: int = 2  # How often each of the two runs is repeated.
    ahead: bool = False  # Sample with --max-inflight-batches 2.


def metrics(environment: str, prompts: int, args: Args, folder: Path) -> list[dict[str, float]]:
    """The metrics of all steps but the first two, and but the last if nothing is sampled beside it."""
    command = [sys.executable, ROOT / "algos/grpo.py", "--model", arithmetic.warm_start("calculator")]
    command += ["--environment", environment, "--dataset", "calculator", "--max-response-tokens", 48]
    command += ["--max-prompt-tokens", 64, "--steps", args.steps, "--prompts-per-step", prompts]
    command += ["--eval-prompts", 0, "--run-dir", folder]
    if args.ahead:
        command += ["--rollout-placement", "split", "--rollout-devices", max(os.sched_getaffinity(0))]
        command += ["--max-inflight-batches", 2, "--tis-cap", 2]
    subprocess.run(list(map(str, command)), check=True, cwd=ROOT, stdout=subprocess.DEVNULL)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if 2 < row["step"] <= args.steps - args.ahead]


def main(args: Args) -> None:
    print("prompts  rollout s: fast  slow  step s: fast   slow  slow / fast")
    for prompts in args.prompts_per_step:
        with tempfile.TemporaryDirectory() as scratch:
            file = Path(scratch) / "slow.py"
            file.write_text(SLOW)
            found: dict[str, list[dict]] = {"calculator": [], f"{file}:Slow": []}
            for turn in range(args.rounds):
                for number, name in enumerate(found):
                    found[name] += metrics(name, prompts, args, Path(scratch) / f"{turn}-{number}")
        mean = lambda rows, *keys: statistics.mean(sum(row.get(key, 0.0) for key in keys) for row in rows)
        (fast_rollout, fast), (slow_rollout, slow) = (
            (mean(rows, "time/rollout", "overlapped/rollout"), mean(rows, "time/step")) for rows in found.values()
        )
        print(f"{prompts:7}  {fast_rollout:15.2f}  {slow_rollout:4.2f}  {fast:12.2f}  {slow:5.2f}  {slow / fast:11.2f}")


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
