"""The rewards that --reward names. This file and the graders it imports need no torch.

A reward is a function: reward(items, lengths, truncated) -> list[Result], in the order of the items. Lengths count
response tokens; truncated says which responses were cut off by the length limit.

--reward gsm8k                            one reward
--reward gsm8k=1.0 format=0.1             several rewards, with weights
--reward weights.json                     {"version": 1, "weights": {"gsm8k": 1.0, "format": 0.1}}; the file is read
                                          again before each step (common/rewards/weights_file.py)
"""

import difflib
import re
from functools import partial
from pathlib import Path

from common.data.rows import split_weight
from common.rewards.grading import Item, Result, Reward, grade_gsm8k, gsm8k_reward

__all__ = ["Item", "Result", "grade_gsm8k"]  # names that a user's reward imports

GSM8K = {name: partial(gsm8k_reward, mode=mode) for name, mode in [("gsm8k", "flexible"), ("gsm8k-strict", "strict")]}
# text.py has a function for each
OF_TEXT = ("dapo", "dapo-lenient", "format", "format-boxed", "repetition", "missing-eos")
BUILT_IN = (*GSM8K, *OF_TEXT)
OTHERS = (
    "environment, overlong:MAX:CACHE, math, math-flexible, reasoning-gym, file.py:function, "
    "model[-sharded|-cpu]:FOLDER, http://..."
)


def load_one(spec: str) -> Reward:
    """One reward of --reward, without its weight. Each branch imports only what its reward needs. Raises BadInput."""
    from common.errors import BadInput

    kind, _, rest = spec.partition(":")
    if spec == "environment":
        return None  # mixture.py has the scores of --environment in its place
    if spec in GSM8K:
        return GSM8K[spec]
    if spec in OF_TEXT:
        from common.rewards import text

        return getattr(text, f"{spec.replace('-', '_')}_reward")
    if spec in ("math", "math-flexible"):
        from common.rewards.workers import MathReward

        return MathReward(spec)
    if spec == "reasoning-gym":
        from common.rewards.reasoning_gym import ReasoningGym

        return ReasoningGym()
    if kind in ("model", "model-sharded", "model-cpu"):
        from common.rewards.model import RewardModel, RewardModelOnCPU

        return RewardModelOnCPU(rest) if kind == "model-cpu" else RewardModel(rest, sharded=kind == "model-sharded")
    if kind in ("http", "https"):
        from common.rewards.service import RewardService

        return RewardService(spec)
    if kind == "overlong":
        from common.rewards import text

        limits = re.fullmatch(r"(\d+):(\d+)", rest)
        if not limits or int(limits[2]) > int(limits[1]):
            raise BadInput(f'--reward "{spec}": expected overlong:MAX:CACHE, in tokens, with CACHE <= MAX')
        return partial(text.overlong_reward, max_length=int(limits[1]), cache_length=int(limits[2]))
    path, _, function = spec.rpartition(":")
    if path.endswith(".py"):
        from common.rewards.workers import UserReward

        return UserReward(path, function)
    near = difflib.get_close_matches(spec, [*BUILT_IN, "math", "math-flexible", "overlong", "reasoning-gym"], 1)
    hint = f" (did you mean {near[0]}?)" if near else ""
    raise BadInput(f'--reward: unknown reward "{spec}"{hint}; known: {", ".join(BUILT_IN)}, {OTHERS}')


def load(specs: tuple[str, ...]):
    """The mixture.Rewards of all values of --reward. Asks a service whether it is there. Raises BadInput."""
    from common.errors import BadInput
    from common.rewards.mixture import Rewards
    from common.rewards.weights_file import WeightsFile, check_weights, read_weights

    file = Path(specs[0]) if len(specs) == 1 and specs[0].endswith(".json") else None
    weights = read_weights(file) if file else dict(map(split_weight, specs))
    if not file:
        if len(weights) < len(specs):
            raise BadInput(f"--reward {' '.join(specs)}: a reward is named twice")
        check_weights("--reward", weights)
    rewards = {name: load_one(name) for name in weights}
    for name, reward in rewards.items():
        if name.startswith(("http://", "https://")):
            reward.check()
    return Rewards(rewards, weights, WeightsFile(file) if file else None)
