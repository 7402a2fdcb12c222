"""The rewards that --reward names. This file and the graders it imports need no torch.

A reward is a function: reward(items, lengths, truncated) -> list[Result], in the order of the items. Lengths count
response tokens; truncated says which responses were cut off by the length limit.

A user's function may also have the signature of another library: signatures.py makes a reward of it.

--reward gsm8k                            one reward
--reward gsm8k=1.0 format=0.1             several rewards, with weights
--reward weights.json                     {"version": 1, "weights": {"gsm8k": 1.0, "format": 0.1}}; the file is read
                                          again before each step (common/rewards/weights_file.py)
"""

import re
from functools import partial
from pathlib import Path

from common.data.rows import split_weight, unknown
from common.errors import BadInput
from common.rewards import text
from common.rewards.choice import ChoiceReward
from common.rewards.grading import Item, Result, Reward, grade_gsm8k, gsm8k_reward

__all__ = ["Item", "Result", "grade_gsm8k"]  # names that a user's reward imports

BUILT_IN = {
    "gsm8k": partial(gsm8k_reward, mode="flexible"),
    "gsm8k-strict": partial(gsm8k_reward, mode="strict"),
    "dapo": text.dapo_reward,
    "dapo-lenient": text.dapo_lenient_reward,
    "choice": ChoiceReward(),
    "format": text.format_reward,
    "format-boxed": text.format_boxed_reward,
    "repetition": text.repetition_reward,
    "missing-eos": text.missing_eos_reward,
}
# The others need an import that takes time, or parameters. load_one() makes them.
WITH_PROCESSES = ("math", "math-flexible", "code", "code-fraction", "reasoning-gym")
WITH_PARAMETERS = (
    "environment, overlong:MAX:CACHE, file.py:function, model[-sharded|-cpu]:FOLDER, http://..., judge:URL, "
    "judge:FILE.json"
)


def load_one(spec: str, date: str = "") -> Reward | None:
    """One reward of --reward, without its weight. Each branch imports only what its reward needs. Raises BadInput.

    None for "environment": mixture.py has the scores of --environment in its place. date: the date of the run, which
    the chat template of a reward model may print.
    """
    kind, _, rest = spec.partition(":")
    # The last colon, because a path may hold others.
    path, _, function = spec.rpartition(":")
    if spec == "environment":
        return None
    if spec in BUILT_IN:
        return BUILT_IN[spec]
    if kind == "overlong":
        limits = re.fullmatch(r"(\d+):(\d+)", rest)
        if not limits or int(limits[2]) > int(limits[1]):
            raise BadInput(f'--reward "{spec}": expected overlong:MAX:CACHE, in tokens, with CACHE <= MAX')
        return partial(text.overlong_reward, max_length=int(limits[1]), cache_length=int(limits[2]))
    if spec in ("math", "math-flexible"):
        from common.rewards.workers import MathReward

        return MathReward(spec)
    if spec in ("code", "code-fraction"):
        from common.rewards.code import CodeReward

        return CodeReward(spec)
    if spec == "reasoning-gym":
        from common.rewards.reasoning_gym import ReasoningGym

        return ReasoningGym()
    if kind == "model-cpu":
        from common.rewards.model import RewardModelOnCPU

        return RewardModelOnCPU(rest, date)
    if kind in ("model", "model-sharded"):
        from common.rewards.model import RewardModel

        return RewardModel(rest, sharded=kind == "model-sharded", date=date)
    if kind in ("http", "https"):
        from common.rewards.service import RewardService

        return RewardService(spec)
    if kind == "judge":
        from common.rewards.judge import Judge

        return Judge(rest)
    if path.endswith(".py"):
        from common.rewards.workers import UserReward

        return UserReward(path, function)
    if spec.endswith(".py"):
        raise BadInput(f"--reward {spec}: add the name of its function, as in {spec}:score")
    if "," in spec:
        raise BadInput(f"--reward {spec}: put spaces between several rewards: {' '.join(spec.split(','))}")
    before, _, weight = spec.rpartition("=")
    if before in BUILT_IN or before in WITH_PROCESSES:
        raise BadInput(f'--reward {spec}: the weight "{weight}" is no number')
    raise BadInput(f"--reward: {unknown('reward', spec, [*BUILT_IN, *WITH_PROCESSES])}, {WITH_PARAMETERS}")


def load(specs: tuple[str, ...], date: str = ""):
    """The mixture.Rewards of all values of --reward. Asks a service whether it is there. Raises BadInput.

    date: the date of the run, as in load_one().
    """
    from common.rewards.mixture import Rewards
    from common.rewards.weights_file import WeightsFile, check_weights, read_weights

    file = None
    if len(specs) == 1 and specs[0].endswith(".json"):
        file = WeightsFile(Path(specs[0]))
        weights = read_weights(file.path)
    else:
        weights = dict(map(split_weight, specs))
        if len(weights) < len(specs):
            raise BadInput(f"--reward {' '.join(specs)}: a reward is named twice")
        check_weights("--reward", {"weights": weights})
    rewards = {name: load_one(name, date) for name in weights}
    # A wrong address should be an error now, and not after the models have been loaded.
    for reward in rewards.values():
        if hasattr(reward, "check"):
            reward.check()
    return Rewards(rewards, weights, file)
