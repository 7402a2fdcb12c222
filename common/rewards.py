"""Rewards by name: what --reward takes.

reward(items, lengths, truncated) -> list[Result]      every reward; same order, same length

--reward gsm8k                            one reward
--reward gsm8k=1.0 format=0.1             several, with weights
--reward weights.json                     {"version": 1, "weights": {"gsm8k": 1.0, "format": 0.1}}, read again
                                          before each step: replace the file by renaming a new one over it
"""

import difflib
import re
from functools import partial
from pathlib import Path

from common import text_rewards
from common.errors import BadInput
from common.grading import Item, Result, Reward, grade_gsm8k, gsm8k_reward
from common.placement import split_weight
from common.reward_mixture import Rewards, check_weights, read_weights
from common.reward_model import RewardModel, RewardModelOnCPU
from common.reward_service import RewardService
from common.workers import MathReward, UserReward

__all__ = ["Item", "Result", "grade_gsm8k"]  # what user rewards import

BUILT_IN: dict[str, Reward] = {
    "gsm8k": partial(gsm8k_reward, mode="flexible"),
    "gsm8k-strict": partial(gsm8k_reward, mode="strict"),
    "dapo": text_rewards.dapo_reward,
    "dapo-lenient": text_rewards.dapo_lenient_reward,
    "format": text_rewards.format_reward,
    "repetition": text_rewards.repetition_reward,
    "missing-eos": text_rewards.missing_eos_reward,
}
OTHERS = "overlong:MAX:CACHE, math, math-flexible, file.py:function, model[-sharded|-cpu]:FOLDER, http://..."


def load_one(spec: str, trust_pickle: bool = False) -> Reward:
    """One reward of --reward, without its weight. Reads no weights of a model. Raises BadInput."""
    if spec in BUILT_IN:
        return BUILT_IN[spec]
    if spec in ("math", "math-flexible"):
        return MathReward(spec)
    kind, _, rest = spec.partition(":")
    if kind in ("model", "model-sharded"):
        return RewardModel(rest, kind == "model-sharded", trust_pickle)
    if kind == "model-cpu":
        return RewardModelOnCPU(rest, trust_pickle)
    if spec.startswith(("http://", "https://")):
        return RewardService(spec)
    if spec.startswith("overlong"):
        limits = re.fullmatch(r"overlong:(\d+):(\d+)", spec)
        if not limits or int(limits[2]) > int(limits[1]):
            raise BadInput(f'--reward "{spec}": expected overlong:MAX:CACHE, tokens, with CACHE <= MAX')
        return partial(text_rewards.overlong_reward, max_length=int(limits[1]), cache_length=int(limits[2]))
    path, _, function = spec.rpartition(":")
    if not path.endswith(".py"):
        near = difflib.get_close_matches(spec, [*BUILT_IN, "math", "math-flexible", "overlong"], 1)
        hint = f" (did you mean {near[0]}?)" if near else ""
        raise BadInput(f'--reward: unknown reward "{spec}"{hint}; known: {", ".join(BUILT_IN)}, {OTHERS}')
    return UserReward(path, function)


def load(specs: tuple[str, ...], failure: str = "drop", trust_pickle: bool = False) -> Rewards:
    """--reward, --reward-failure and --trust-pickle. Asks a service whether it is there. Raises BadInput."""
    file = Path(specs[0]) if len(specs) == 1 and specs[0].endswith(".json") else None
    if file:
        weights = read_weights(file, None)
    else:
        weights = {}
        for spec in specs:
            name, weight = split_weight(spec)
            if name in weights:
                raise BadInput(f'--reward: "{name}" is named twice')
            weights[name] = weight
        check_weights("--reward", weights, None)
    rewards = {name: load_one(name, trust_pickle) for name in weights}
    for reward in rewards.values():
        if isinstance(reward, RewardService):
            reward.check()
    return Rewards(rewards, weights, file, failure)
