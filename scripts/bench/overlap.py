"""Sampling the next batch while one trains: seconds of a step, one after the other and overlapped.

python scripts/bench/overlap.py

algos/grpo.py trains on the embedded task in a split layout: the server has the last core, the trainer the others. In
both jobs sampling takes about as long as training: one has a reward that sleeps, the other more passes over each batch.
Each job runs with --max-inflight-batches 1 and 2, in turns. Times are medians of steps without a checkpoint, after the
first two. The bound is the longer of the two phases plus the sync.
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

ROOT = Path(__file__).parents[2]


@dataclasses.dataclass
class Args:
    steps: int = 12
    rounds: int = 2  # How often each setting runs.


def run(folder: Path, steps: int, inflight: int, epochs: int, sleep: float) -> list[dict]:
    """Metrics of the steps that count."""
    reward = folder.parent / "reward.py"
    # `sleep` is for a whole step, whose 64 prompts are graded in 64 calls, as many at a time as there are cores.
    sleep *= len(os.sched_getaffinity(0)) / 64
    reward.write_text(
        "import time\nfrom common.rewards.grading import grade_gsm8k\n\n\ndef score(items, lengths, truncated):\n"
        f"    time.sleep({sleep})\n    return [grade_gsm8k(item.response, item.answer) for item in items]\n"
    )
    core = max(os.sched_getaffinity(0))
    flags = ["--rollout-placement", "split", "--rollout-devices", core, "--max-inflight-batches", inflight]
    flags += ["--tis-cap", 2]  # a batch in flight needs it
    flags += ["--steps", steps, "--epochs", epochs, "--reward", f"{reward}:score", "--eval-prompts", 0]
    flags += ["--run-dir", folder, "--rollouts-every", 1000, "--kl-coef", 0.001]  # with a KL term no row is skipped
    command = [sys.executable, ROOT / "algos/grpo.py", *flags]
    subprocess.run(list(map(str, command)), check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return rows[2:-1]


def median(rows: list[dict], *names: str) -> float:
    return statistics.median(sum(row.get(name, 0.0) for name in names) for row in rows)


SAMPLING = ("time/rollout", "time/reward")
TRAINING = ("time/logprobs", "time/update")


def main(args: Args) -> None:
    print("| job | sampling, s | training, s | sync, s | one after the other, s | overlapped, s | of the bound |")
    print("|---" * 7 + "|", flush=True)
    with tempfile.TemporaryDirectory() as scratch:
        probe = run(Path(scratch) / "probe", 6, 1, 1, 0.0)
        sampling, training = median(probe, *SAMPLING), median(probe, *TRAINING)
        jobs = {
            # Sleeping takes no core: so does a reward service on another machine.
            "a reward that sleeps": (max(1, round(4 * sampling / training)), None),
            "real work": (max(1, round(sampling / training)), 0.0),
        }
        for name, (epochs, sleep) in jobs.items():
            sleep = max(0.0, epochs * training - sampling) if sleep is None else sleep
            rows = {1: [], 2: []}
            for turn in range(args.rounds):
                for inflight in rows:
                    folder = Path(scratch) / f"{epochs}-{sleep:.3f}-{turn}-{inflight}"
                    rows[inflight] += run(folder, args.steps, inflight, epochs, sleep)
            apart, together = (median(rows[i], "time/step") for i in (1, 2))
            phases = median(rows[1], *SAMPLING), median(rows[1], *TRAINING), median(rows[1], "time/sync")
            bound = max(phases[:2]) + phases[2]
            cells = " | ".join(f"{seconds:.2f}" for seconds in (*phases, apart, together))
            print(f"| {name} | {cells} | {together / bound:.2f} |", flush=True)


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
