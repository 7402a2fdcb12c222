"""How much a slow environment costs: steps of GRPO on `calculator`, with one episode in ten that waits for a second.

    python scripts/bench/slow_environment.py --steps 8

Two runs take turns, each twice. The first two steps of a run, in which processes start, do not count.
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
        if self.problem.seed % 10 == 0 and self.turns == 0:
            time.sleep(1.0)
        return super().step(text)
"""


@dataclasses.dataclass
class Args:
    steps: int = 8  # Steps of each run.
    prompts_per_step: int = 64  # Prompts of a step, with 8 responses to each.


def seconds(environment: str, args: Args, folder: Path) -> list[dict[str, float]]:
    """The metrics of all steps but the first two."""
    command = [sys.executable, ROOT / "algos/grpo.py", "--model", arithmetic.warm_start("calculator")]
    command += ["--environment", environment, "--dataset", "calculator", "--max-response-tokens", 48]
    command += ["--max-prompt-tokens", 64, "--steps", args.steps, "--prompts-per-step", args.prompts_per_step]
    command += ["--eval-prompts", 0, "--run-dir", folder]
    subprocess.run(list(map(str, command)), check=True, cwd=ROOT, stdout=subprocess.DEVNULL)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if row["step"] > 2]


def main(args: Args) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch) / "slow.py"
        file.write_text(SLOW)
        found: dict[str, list[dict]] = {"calculator": [], f"{file}:Slow": []}
        for turn in range(2):
            for number, name in enumerate(found):
                found[name] += seconds(name, args, Path(scratch) / f"{turn}-{number}")
    print("environment  step s  rollout s  waited s")
    for name, rows in zip(("fast", "slow"), found.values()):
        mean = lambda key, rows=rows: statistics.mean(row[key] for row in rows)
        print(f"{name:11}  {mean('time/step'):6.2f}  {mean('time/rollout'):9.2f}  {mean('time/environment'):8.2f}")
    fast, slow = (statistics.mean(row["time/step"] for row in rows) for rows in found.values())
    print(f"slow / fast = {slow / fast:.2f}")


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
