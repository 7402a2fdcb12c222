"""--reward reasoning-gym: the verifier of the task that a row of --dataset reasoning-gym:TASK comes from.

The answer is the text of the last <answer></answer>, as the library's own extract_answer() reads it. The score is what
the task's score_answer() returns: 1 for a right answer, for some tasks less for one that is nearly right or has the
right form. acc is 1 if the score is 1.

Verifiers raise errors on unexpected answers, and an answer can make some of them hang: four evaluate it as Python, and
five parse it with sympy, which evaluates it, too. So they run in worker processes. A response whose verifier raises,
takes longer than 10 s or dies is wrong, and `info` says why.
"""

import functools
import importlib.util
import re

from common.data.reasoning_gym import create, unpack
from common.errors import BadInput
from common.processes.child import Handler
from common.rewards.grading import Item, Result
from common.rewards.math_grading import SYMPY_ERRORS
from common.rewards.workers import Graders, TriedReward, batch_handler

TAKE_NAN = ("complex_arithmetic", "number_sorting")  # tasks whose verifiers pay for an answer of nan

# A worker grades many responses to problems of a few tasks, and making a data set takes up to a second.
dataset_of = functools.cache(create)


class ReasoningGym(TriedReward):
    """reward() in worker processes, one response a batch."""

    def __init__(self):
        """Raises BadInput if the library cannot be imported."""
        if importlib.util.find_spec("reasoning_gym") is None:
            raise BadInput("--reward reasoning-gym: reasoning-gym is not installed; pip install reasoning-gym")
        loader = "common.rewards.reasoning_gym:load_verifiers"
        super().__init__("reasoning-gym", Graders("reasoning-gym", loader, [], item_seconds=10.0))

    def grade(self, items: list[Item], lengths: list[int], truncated: list[bool]) -> list[Result]:
        """Raises BadInput on a row of another data set, and RunFailed if no worker can be started."""
        # A verifier would raise a KeyError, which says nothing about the cause.
        for item in items:
            if not {"question", "task", "metadata"} <= item.meta.keys():
                raise BadInput(
                    '--reward reasoning-gym: needs rows of --dataset "reasoning-gym:TASK"; there is no "task" and '
                    f'"metadata" in the row with the prompt {item.prompt[:200]!r}'
                )
        return self.pool.verdicts(items)


# Inside a worker


def load_verifiers() -> Handler:
    # Imported while the worker starts. Otherwise the time limit of the first item would have to pay for it.
    import reasoning_gym  # noqa: F401

    return batch_handler(reward, memory_gib=4.0)


def reward(items: list[Item], lengths: list[int], truncated: list[bool]) -> list[Result]:
    """The scores of the library."""
    from reasoning_gym.utils import extract_answer

    results = []
    for item in items:
        answer = extract_answer(item.response)
        dataset = dataset_of(item.meta["task"])
        problem = {
            "question": item.meta.get("question"),
            "answer": item.meta.get("answer"),
            "metadata": unpack(item.meta["metadata"]),
        }
        # To these verifiers not-a-number is right: no comparison with it fails.
        if item.meta["task"].partition("?")[0] in TAKE_NAN and re.search("nan", answer or "", re.IGNORECASE):
            results.append(Result(0.0, 0.0, answer))
            continue
        # SYMPY_ERRORS are those that an unexpected answer causes, not only in sympy. Others end the worker.
        try:
            score = float(dataset.score_answer(answer, problem))
            info = {}
        except SYMPY_ERRORS as error:
            score = 0.0
            info = {"error": f"{type(error).__name__}: {error}"[:200]}
        results.append(Result(score, float(score >= 1), answer, info))
    return results
