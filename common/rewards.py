"""Rewards by name: the one interface every reward has, and how the items of a rollout reach it.

    reward(items, lengths, truncated) -> list[Result]      same order, same length

`score` is what training uses, `acc` plain correctness (0 or 1).
"""

import dataclasses
import difflib
import importlib.util
import math
import sys
from functools import partial
from pathlib import Path

from common.grading import Item, Result, Reward, grade_gsm8k, gsm8k_reward, parse_gold
from common.placement import BadInput, refuse_all
from common.reward_model import RewardModel

__all__ = ["Item", "Result", "check_answers", "grade_gsm8k", "load", "score"]  # what user rewards import

BUILT_IN: dict[str, Reward] = {
    "gsm8k": partial(gsm8k_reward, mode="flexible"),
    "gsm8k-strict": partial(gsm8k_reward, mode="strict"),
}


def load(spec: str) -> Reward:
    """--reward: a built-in name, `file.py:function`, a function (items, lengths, truncated) -> Results or floats, or
    `model:FOLDER`, a reward model.
    """
    if spec in BUILT_IN:
        return BUILT_IN[spec]
    if spec.startswith("model:"):
        return RewardModel(spec.removeprefix("model:"))
    path, _, function = spec.rpartition(":")
    if not path.endswith(".py"):
        near = difflib.get_close_matches(spec, BUILT_IN, 1)
        hint = f" (did you mean {near[0]}?)" if near else ""
        raise BadInput(
            f'--reward: unknown reward "{spec}"{hint}; known: {", ".join(BUILT_IN)}, file.py:function, model:FOLDER'
        )
    if not Path(path).is_file():
        raise BadInput(f"--reward: {path}: file not found")
    module_spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    module = importlib.util.module_from_spec(module_spec)
    sys.modules[module_spec.name] = module  # dataclasses look their module up there
    module_spec.loader.exec_module(module)
    if not callable(getattr(module, function, None)):
        raise BadInput(f'--reward: {path} has no function "{function}"')
    return partial(call_user_reward, getattr(module, function))


def call_user_reward(function, items: list[Item], lengths: list[int], truncated: list[bool]) -> list[Result]:
    """Call a user's function; a plain number n becomes Result(score=n, acc=n > 0)."""
    results = function(items, lengths, truncated)
    return [r if isinstance(r, Result) else Result(float(r), float(r > 0)) for r in results]


def score(reward: Reward, prompts: list, responses: list[str], rollout) -> list[Result]:
    """Grade N responses, G to each of B prompts (group-major). Raises BadInput on a wrong count, NaN or infinity."""
    group_size = len(responses) // len(prompts)
    asked = [prompt for prompt in prompts for _ in range(group_size)]
    items = [
        Item(prompt.text, response, prompt.answer, prompt.meta, ids)
        for prompt, response, ids in zip(asked, responses, rollout.response_ids)
    ]
    results = reward(items, [len(ids) for ids in rollout.response_ids], rollout.truncated.tolist())
    if len(results) != len(items):
        raise BadInput(f"the reward returned {len(results)} results for {len(items)} items")
    results = [dataclasses.replace(result, score=float(result.score), acc=float(result.acc)) for result in results]
    for row, result in enumerate(results):
        if not math.isfinite(result.score):
            raise BadInput(f"the reward of row {row} is {result.score}, for prompt {items[row].prompt[:200]!r}")
    return results


def check_answers(spec: str, prompts: list) -> None:
    """Refuse reference answers the reward cannot grade against, naming their lines. Raises BadInput."""
    bad = [prompt for prompt in prompts if spec in BUILT_IN and parse_gold(prompt.answer) is None]
    refuse_all([f'{prompt.id}: gold answer "{prompt.answer[:60]}" is not a number' for prompt in bad])
