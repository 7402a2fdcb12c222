"""Environments answer the policy between its turns: a game, a calculator, a shell. This file needs no torch.

A subclass of Environment with three methods. It runs in a worker process, one object for each response:

    class Guess(Environment):
        def reset(self, problem): ...        a new episode begins; problem has prompt, answer, meta and seed
        def step(self, text): ...            the policy's turn as text -> Step(observation), or Step(done=True)
        def score(self): ...                 after the last turn -> Result(score, acc)

The state of an episode must follow from its problem and the turns alone, random numbers included: draw them from
problem.seed. If its process was lost, also by another episode, reset() and step() are called again with the same texts.
`Tools` (tools.py) is an environment whose methods the policy calls.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from common.errors import BadInput
from common.rewards.grading import Result

__all__ = ["Environment", "Problem", "Result", "Step"]  # names that a user's environment imports

BUILT_IN = {"calculator": "Calculator", "guess": "Guess"}  # classes of built_in.py


@dataclass(frozen=True)
class Problem:
    prompt: str  # the text that the policy sees before its first turn
    answer: str | None  # the reference answer, if the row of the data set has one
    meta: dict[str, Any] = field(default_factory=dict)  # the row of the data set
    seed: int = 0  # the same for all responses to a prompt in a step


@dataclass(frozen=True)
class Step:
    observation: str | list[str] | None = None  # text that the policy reads next; a list is one message for each entry
    done: bool = False  # True ends the episode; so does an observation of None
    calls: int = 0  # tools that were called, for the metrics
    errors: int = 0  # calls that failed


class Environment:
    """Base class with the defaults. Only step() has to be written; without score() name a --reward."""

    role = "user"  # who says an observation, in the model's chat template
    seconds = 10.0  # limit for a turn: step() and, after the last one, score(); the first turn has twice as long
    memory_gib = 4.0  # limit for all episodes of one worker process, on top of its imports
    failed_score = 0.0  # score of an episode whose environment raised, hung, died or returned something wrong

    def reset(self, problem: Problem) -> None:
        """Begin an episode."""
        self.problem = problem

    def step(self, text: str) -> Step:
        """Take the text of one turn of the policy, without special tokens."""
        raise NotImplementedError

    score = None  # def score(self) -> Result


def check(spec: str) -> None:
    """Raise BadInput if --environment SPEC has the wrong form, or names a file or a server that isn't there."""
    if spec in BUILT_IN:
        return
    if spec.startswith("openenv:"):
        # Imported here, because few runs need its WebSockets.
        from common.data import openenv

        openenv.check(spec)
        return
    path, _, name = spec.rpartition(":")
    if not path.endswith(".py") or not name:
        raise BadInput(f'--environment "{spec}": expected {", ".join(BUILT_IN)} or file.py:Class, or openenv:URL')
    if not Path(path).is_file():
        raise BadInput(f"--environment: {path}: file not found")
