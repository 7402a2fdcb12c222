"""Weights of several rewards: how they are checked, and the file of --reward weights.json.

A writer replaces the file by renaming another one over it. At the start of a run a bad file is an error. Later it keeps
the weights that were read last, one warning says what is wrong, and reward/weights_stale is 1 until it is repaired.
"""

import hashlib
import json
import math
from pathlib import Path

import torch.distributed as dist

from common.data.json_lines import is_number, read_value
from common.errors import BadInput, say, warn
from common.placement import World


def read_weights(path: Path, names: set[str] | None = None) -> dict[str, float]:
    """The weights in a file. names: the rewards that it must weigh. Raises BadInput with file and line."""
    if not path.is_file():
        raise BadInput(f"--reward {path}: file not found")
    content = read_value(path)
    weights = content.get("weights") if isinstance(content, dict) else None
    if not isinstance(weights, dict):
        raise BadInput(f'{path}: expected an object with "weights", an object of names and numbers')
    check_weights(str(path), weights, names)
    return {name: float(weight) for name, weight in weights.items()}


def check_weights(where: str, weights: dict, names: set[str] | None = None) -> None:
    """Weights are finite numbers, not all 0, for exactly these names. Raises BadInput."""
    if names is not None and set(weights) != names:
        raise BadInput(f"{where}: has weights of {sorted(weights)}, the run has the rewards {sorted(names)}")
    for name, weight in weights.items():
        if not is_number(weight) or not math.isfinite(weight):
            raise BadInput(f'{where}: the weight of "{name}" is {json.dumps(weight)[:80]}, expected a finite number')
    if not any(weights.values()):
        raise BadInput(f"{where}: no reward has a weight other than 0")


class WeightsFile:
    """A file of weights that is read again before each step."""

    def __init__(self, path: Path):
        self.path, self.complaint = path, ""  # complaint: what is wrong with the file, "" if nothing is

    def refresh(self, weights: dict[str, float], world: World) -> dict[str, float]:
        """The weights of the file, or those given if it is bad. Rank 0 reads. Collective: every rank calls it."""
        message = [weights, ""]
        if world.is_main:
            try:
                message[0] = read_weights(self.path, set(weights))
            except BadInput as error:
                message[1] = str(error)
        dist.broadcast_object_list(message, src=0, group=world.group)
        current, complaint = message
        if complaint and complaint != self.complaint:
            warn(f"{complaint}; the weights stay {weights}", "reward-weights")
        if current != weights:
            digest = hashlib.sha256(json.dumps(current).encode()).hexdigest()[:12]
            say(f"reward weights are now {current} ({self.path}, sha256 {digest})")
        self.complaint = complaint
        return current
