"""Learning with each switch that is there for speed or memory: the embedded job, one run a row, from one warm start.

python scripts/bench/switches.py            # a run on each core: eight minutes on two

They change rounding and random numbers alone (tests/test_packing.py compares gradients);
this shows that a whole run learns with them.
"""

import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import tyro
from cores import on_each_core

from common import embedded

SCRIPT = Path(__file__).parents[2] / "algos/grpo.py"
SWITCHES = (
    "",
    "--no-shared-prompts",
    "--token-budget 400",
    "--activation-checkpointing",
    "--offload all",
    "--kernels compile",
    "--dtype bfloat16",
    "--rollout-backend hf",
)


def learn(switch: str, seed: int, folder: Path) -> list[dict]:
    """Metrics of a run, which has the cores of the calling thread."""
    run_dir = folder / (switch.replace(" ", "") or "default")
    command = [sys.executable, str(SCRIPT), *switch.split(), "--seed", str(seed), "--run-dir", str(run_dir)]
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode:
        raise RuntimeError(f"{switch}: exit {result.returncode}: {result.stderr[-2000:]}")
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def main(seed: int = 0) -> None:
    embedded.warm_start()  # once, for all
    with tempfile.TemporaryDirectory() as scratch:
        rows = on_each_core(learn, [(switch, seed, Path(scratch)) for switch in SWITCHES])
    print(
        "| | accuracy before | after | reward of the last ten steps | largest gap | a step, s |",
        "|---" * 6 + "|",
        sep="\n",
    )
    for switch, run in zip(SWITCHES, rows):
        steps = run[1:]
        reward = statistics.mean(row["reward/mean"] for row in steps[-10:])
        gap = max(row["mismatch/logprob_abs_mean"] for row in steps)
        print(
            f"| {f'`{switch}`' if switch else 'as by default'} | {run[0]['eval/accuracy']:.1%} "
            f"| {steps[-1]['eval/accuracy']:.1%} | {reward:.3f} | {gap:.0e} "
            f"| {statistics.median(row['time/step'] for row in steps):.2f} |"
        )


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
