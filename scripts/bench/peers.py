"""One side of scripts/bench/vs_trl.py, a step at a time: peers.py trl|vllm|hf JOB_AS_JSON

Prints "STEP {...}" when it is ready and after each step, then waits for a line on standard input: only one side
works at any time. TRL comes from its wheel, in PYTHONPATH.
"""

import json
import sys
import time
from pathlib import Path

import torch

FILE = Path(__file__)


def spread(items, lengths, truncated) -> list[float]:
    """A reward that differs inside every group, so that no side can skip a group of equal rewards."""
    return [spread_of(item.response) for item in items]


def spread_of(response: str) -> float:
    return sum(response.encode()) % 97 / 97


def turn(figures: dict) -> None:
    """Report, and wait for the next turn."""
    print("STEP", json.dumps(figures), flush=True)
    if not sys.stdin.readline():
        sys.exit(0)


def ours(job: dict, backend: str) -> None:
    """algos/grpo.py as it is; the wait is put between two steps."""
    import tyro

    from algos import grpo
    from common.errors import launch
    from common.tracking import Tracker

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
    launch(grpo.main, tyro.cli(grpo.Args, args=list(map(str, flags))))


def trl(job: dict) -> None:
    """TRL's GRPOTrainer on the same prompts, graded alike; our precision, and the loss that ours has."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    from common import data
    from common.grading import grade_gsm8k

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
        bf16=job["dtype"] == "bfloat16",  # autocast; like ours, with float32 masters
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


if __name__ == "__main__":
    side, job = sys.argv[1], json.loads(sys.argv[2])
    trl(job) if side == "trl" else ours(job, side)
