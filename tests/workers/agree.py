"""Two ranks score: an error on one of them must be raised on both. Prints a list with what each rank saw."""

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import torch.distributed as dist

from common import placement
from common.data.prompts import Prompt
from common.errors import BadInput, RunFailed
from common.rewards.grading import Result
from common.rewards.mixture import Rewards
from common.rewards.weights_file import WeightsFile
from common.rollout import rollout
from common.rollout.environments.episodes import Environments


def attempt(reward: Rewards, world, step: int | None) -> str:
    prompts = [Prompt("p", "p", [3], "1")] * 2
    rows = rollout.collate([[3]] * 4, [[4]] * 4, [[0.0]] * 4, [False] * 4, 0, "cpu")
    try:
        reward.score(prompts, ["a"] * 4, rows, world, step)
    except (BadInput, RunFailed) as error:
        return f"{type(error).__name__}: {str(error).split(': {')[0]}"
    return ""


def failed_episodes(failures: list[str | None], world) -> str:
    """What this rank says of its episodes. None is one that went well."""
    episodes = [SimpleNamespace(failure=failure, result=None) for failure in failures]
    environments = SimpleNamespace(spec="mine", first_failures={"died": "out of memory"})
    try:
        Environments.results(environments, episodes, world)
    except RunFailed as error:
        return str(error)
    return ""


def main(folder: Path) -> None:
    world = placement.init(seed=0)
    last = world.rank == world.size - 1
    file = folder / "weights.json"

    def write(weight: float) -> None:
        if world.is_main:
            (folder / "new").write_text(json.dumps({"weights": {"mine": weight}}))
            os.replace(folder / "new", file)

    mine = lambda count, score: lambda items, lengths, truncated: [Result(score, 0.0, None, {"why": "x"})] * count
    reward = Rewards({"mine": mine(4, 1.0)}, {"mine": 0.5}, WeightsFile(file))
    weights = []
    for step, weight in ((1, 1.0), (2, 5.0)):
        write(weight)
        attempt(reward, world, step)
        weights.append(reward.weights["mine"])
    wrong_count = Rewards({"mine": mine(3 if last else 4, 1.0)}, {"mine": 1.0})
    half = lambda items, lengths, truncated: mine(2, 1.0)(0, 0, 0) + mine(2, None if last else 1.0)(0, 0, 0)
    dropping = Rewards({"mine": half}, {"mine": 1.0})
    dropping.first_step = 1
    said = {"weights": weights, "error": attempt(wrong_count, world, 9), "dropped": attempt(dropping, world, 9)}
    said["dropped"] = said["dropped"].split(";")[0]
    attempt(dropping, world, None)  # An evaluation goes on. Rank 0 prints why the other one has no scores.
    said["environment"] = failed_episodes(["died", "died"] if last else [None], world)
    everyone = [None] * world.size
    dist.all_gather_object(everyone, said)
    if world.is_main:
        print(json.dumps(everyone), flush=True)
    placement.finish(world)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
