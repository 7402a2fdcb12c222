"""Four ranks, of which two share an engine that fake_vllm.py plays: ranks.py RUN_DIR

Prints, as JSON, what each rank has sampled, kept, measured and evaluated.
"""

import json
import sys
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.append(str(Path(__file__).parents[1]))
from fake_vllm import VLLM, fake_engine

from algos import grpo
from common import placement
from common.data import arithmetic
from common.data.prompts import Prompt, PromptLoader
from common.rewards.grading import Item, Result
from common.rewards.mixture import Rewards
from common.run import outcomes
from common.run.evaluation import Evaluator
from common.run.sampling import PromptSampler
from common.run.tracking import Tracker

UNGRADED = 3  # number of a prompt
SAMPLES = 2


class InOrder(PromptLoader):
    """Prompts 0, 1, 2, ..., whose token is their number."""

    def prompt_at(self, position: int) -> Prompt:
        return Prompt(f"{position}", f"{position}", [position], "1")


def number_of(item: Item) -> int:
    return int(item.prompt)


def numbered(items, lengths, truncated) -> list[Result]:
    """The score is the prompt's number, one more for every second response. Every third prompt is answered right."""
    results = []
    for row, item in enumerate(items):
        number = number_of(item)
        known = number != UNGRADED
        acc = float(number % 3 == 0)
        results.append(Result(float(number + row % SAMPLES), acc) if known else Result(None, None))
    return results


def late(items, lengths, truncated) -> list[Result]:
    """Rank r has its first right response in draw r, counted from 0."""
    draws = [number_of(item) // 4 for item in items]
    return [Result(0.0, float(draw >= number_of(item) % 4)) for draw, item in zip(draws, items)]


def main(run_dir: str) -> None:
    sys.modules["vllm"] = VLLM
    world = placement.init(0, rollout_tp=2)
    torch.manual_seed(world.rank)  # whatever a rank has drawn before
    engine = fake_engine(world)
    tokenizer = arithmetic.tokenizer()
    tracker = Tracker(grpo.Args(run_dir=run_dir, steps=1), "grpo", world)
    rewards = Rewards({"numbered": numbered}, {"numbered": 1.0})
    rewards.first_step = 1

    sampler = PromptSampler(world, tracker, InOrder([], 0), rewards, tokenizer, step=9)
    prompts = sampler.prompts(24)
    rollout = engine.generate([prompt.ids for prompt in prompts], SAMPLES, 1.0, 5, seed=5)
    batch = sampler.grade(prompts, rollout)
    said = {"engine": world.engine_index, "sampled": batch.response_ids}
    tracker.save_rollouts(1, batch, batch.scores)
    tracker.max("advantage/abs_max", batch.scores.max())
    evaluator = Evaluator(engine, rewards, tokenizer, world, 5)
    file = outcomes.path_of(tracker.run_dir, 1)
    tracker.mean("eval/accuracy", evaluator.greedy_accuracy(prompts_held_out(), tracker, file))
    said["metrics"] = tracker.write(1)

    def generate(prompts, draw, grading):
        return engine.generate([prompt.ids for prompt in prompts], 1, 1.0, 5, seed=draw)

    sampler = PromptSampler(world, tracker, InOrder([], 0), Rewards({"late": late}, {"late": 1.0}), tokenizer, step=2)
    filled = sampler.until_full(
        generate,
        lambda correct: correct.any(1),
        wanted=4,
        prompts_per_draw=4,
        max_draws=9,
        filter_in_words="",
    )
    tracker.max("advantage/abs_max", 0.0)
    said["drawing"] = tracker.write(2)
    said["kept"] = [prompt.id for prompt in filled.prompts]
    said["drawn"] = sampler.loader.position

    everyone = [None] * world.size
    dist.all_gather_object(everyone, said)
    if world.is_main:
        print(json.dumps(everyone), flush=True)
    placement.finish(world)


def prompts_held_out() -> list[Prompt]:
    """Eight prompts of one data set and two of another one, of which two ranks have none."""
    prompts = InOrder([], 0).take(10)
    return [replace(prompt, dataset="a.jsonl" if place < 8 else "b.jsonl") for place, prompt in enumerate(prompts)]


main(sys.argv[1])
