"""Evaluation files: which held-out problems a policy solved after a step, and what it answered.

evaluations/step_000010.jsonl has one object for each problem that could be graded, in the order of the data. A report
compares the first file of a run with the last one.
"""

import itertools
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist
from pydantic import BaseModel

from common.data import json_lines
from common.errors import BadInput
from common.placement import World
from common.preflight import folders
from common.rewards.schema import parse_as


class Outcome(BaseModel):
    """A held-out problem and the greedy response to it."""

    index: int  # place of the problem among the held-out ones
    id: str
    dataset: str
    prompt: str
    answer: str | None  # reference
    response: str
    acc: float  # above 0 if the response is right
    truncated: bool  # the engine cut it off at the length limit

    @property
    def solved(self) -> bool:
        return self.acc > 0


@dataclass(frozen=True)
class Change:
    """A problem that was graded in both evaluations."""

    before: Outcome
    after: Outcome

    @property
    def kind(self) -> str:
        """One of report.KINDS."""
        if self.after.solved:
            return "kept" if self.before.solved else "learned"
        return "forgotten" if self.before.solved else "unsolved"


def path_of(run_dir: Path, step: int) -> Path:
    return run_dir / "evaluations" / f"step_{step:06d}.jsonl"


def write(path: Path, outcomes: list[Outcome], world: World) -> None:
    """Write the outcomes of all ranks. Collective: every rank calls it with those of its problems."""
    everyone = [None] * world.size if world.is_main else None
    dist.gather_object(outcomes, everyone)
    if world.is_main:
        path.parent.mkdir(parents=True, exist_ok=True)
        in_order = sorted(itertools.chain(*everyone), key=lambda outcome: outcome.index)
        # json escapes a half of a surrogate pair, which pydantic's own writer refuses.
        folders.write(path, [json.dumps(outcome.model_dump()) + "\n" for outcome in in_order])


def saved(run_dir: Path) -> dict[int, Path]:
    """Step -> file, for all evaluations that are saved, oldest first."""
    return folders.files_of_steps(run_dir / "evaluations")


def read(path: Path) -> list[Outcome]:
    """The outcomes in a file that write() wrote. Raises BadInput."""
    outcomes = []
    for number, row in json_lines.read(path):
        try:
            outcomes.append(parse_as(Outcome, row))
        except ValueError as error:
            raise BadInput(f"{path}:{number}: is no outcome of an evaluation: {error}") from None
    return outcomes


def compare(before: Iterable[Outcome], after: Iterable[Outcome]) -> list[Change]:
    """The problems that both have, in the order of the data. One that only one evaluation could grade has no change."""
    earlier = {(outcome.index, outcome.id): outcome for outcome in before}
    changes = []
    for outcome in after:
        if first := earlier.get((outcome.index, outcome.id)):
            changes.append(Change(before=first, after=outcome))
    return changes
