"""Weights of several rewards: how they are checked, and the file of --reward weights.json.

A writer replaces the file by renaming another one over it. At the start of a run a bad file is an error. Later it keeps
the weights that were read last, one warning says what is wrong, and reward/weights_stale is 1 until it is repaired.
"""

from pathlib import Path
from typing import Any

import torch.distributed as dist
from pydantic import BaseModel, ConfigDict, FiniteFloat

from common.data.json_lines import read_value
from common.errors import BadInput, say, warn
from common.placement import World
from common.rewards.schema import parse_as


class Weights(BaseModel):
    model_config = ConfigDict(strict=True)  # true and "1" are no numbers
    weights: dict[str, FiniteFloat]


def read_weights(path: Path) -> dict[str, float]:
    """The weights in a file. Raises BadInput, which names the file."""
    if not path.is_file():
        raise BadInput(f"--reward {path}: file not found")
    return check_weights(str(path), read_value(path))


def check_weights(where: str, content: Any) -> dict[str, float]:
    """The weights of {"weights": {NAME: WEIGHT}}: finite numbers, not all 0. Raises BadInput."""
    try:
        weights = parse_as(Weights, content).weights
    except ValueError as error:
        raise BadInput(f"{where}: {error}") from None
    if not any(weights.values()):
        raise BadInput(f"{where}: no reward has a weight other than 0")
    return weights


class WeightsFile:
    """A file of weights that is read again before each step."""

    def __init__(self, path: Path):
        self.path = path
        self.complaint = ""  # the fault that the file had when it was read last, "" if it had none

    def refresh(self, weights: dict[str, float], world: World) -> dict[str, float]:
        """The weights of the file, or those given if it is bad. Rank 0 reads. Collective: every rank calls it."""
        # Only rank 0 reads. Two ranks that read while the file is replaced would have different weights.
        message: list = [weights, ""]
        if world.is_main:
            try:
                current = read_weights(self.path)
                if set(current) != set(weights):
                    raise BadInput(f"{self.path}: weighs {sorted(current)}, the run has the rewards {sorted(weights)}")
                message[0] = current
            except BadInput as error:
                message[1] = str(error)
        dist.broadcast_object_list(message, src=0, group=world.group)
        current, complaint = message
        # A file that stays broken is worth one warning, not one a step.
        if complaint and complaint != self.complaint:
            warn(f"{complaint}; the weights stay {weights}", "reward-weights")
        if current != weights:
            say(f"reward weights are now {current} ({self.path})")
        self.complaint = complaint
        return current
