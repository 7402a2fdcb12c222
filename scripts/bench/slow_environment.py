"""How much a slow environment costs: GRPO on `calculator`, where one episode in ten waits a second for each answer.

    python scripts/bench/slow_environment.py --prompts-per-step 64 256 512

For each size of a step, two runs take turns, each twice. The first two steps of a run, in which processes start, do
not count.
"""

import dataclasses
import json
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


def metrics(environment: str, prompts: int, steps: int, folder: Path) -> list[dict[str, float]]:
    """The metrics of all steps but the first two."""
    command = [sys.executable, ROOT / "algos/grpo.py", "--model", arithmetic.warm_start("calculator")]
    command += ["--environment", environment, "--dataset", "calculator", "--max-response-tokens", 48]
    command += ["--max-prompt-tokens", 64, "--steps", steps, "--prompts-per-step", prompts]
    command += ["--eval-prompts", 0, "--run-dir", folder]
    subprocess.run(list(map(str, command)), check=True, cwd=ROOT, stdout=subprocess.DEVNULL)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if row["step"] > 2]


def main(args: Args) -> None:
    print("prompts  rollout s: fast  slow  step s: fast   slow  slow / fast")
    for prompts in args.prompts_per_step:
        with tempfile.TemporaryDirectory() as scratch:
            file = Path(scratch) / "slow.py"
            file.write_text(SLOW)
            found: dict[str, list[dict]] = {"calculator": [], f"{file}:Slow": []}
            for turn in range(2):
                for number, name in enumerate(found):
                    found[name] += metrics(name, prompts, args.steps, Path(scratch) / f"{turn}-{number}")
        mean = lambda rows, key: statistics.mean(row[key] for row in rows)
        (fast_rollout, fast), (slow_rollout, slow) = (
            (mean(rows, "time/rollout"), mean(rows, "time/step")) for rows in found.values()
        )
        print(f"{prompts:7}  {fast_rollout:15.2f}  {slow_rollout:4.2f}  {fast:12.2f}  {slow:5.2f}  {slow / fast:11.2f}")


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
