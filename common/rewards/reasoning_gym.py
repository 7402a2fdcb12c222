"""--reward reasoning-gym: the verifier of the task that a row of --dataset reasoning-gym:TASK comes from.

The answer is the text of the last <answer></answer>, as the library's own extract_answer() reads it. The score is what
the task's score_answer() returns: 1 for a right answer, for some tasks less for one that is nearly right or has the
right form. acc is 1 if the score is 1.

Verifiers raise errors on unexpected answers, and an answer can make some of them hang: four evaluate it as Python, and
five parse it with sympy, which evaluates it, too. So they run in worker processes. A response whose verifier raises,
takes longer than 10 s or dies is wrong, and `info` says why.
"""

import dataclasses
import functools
import importlib.util

from common.data.reasoning_gym import create, unpack
from common.errors import BadInput
from common.rewards.grading import Item, Result
from common.rewards.math_grading import SYMPY_ERRORS
from common.rewards.workers import WorkerPool, warn_of_timeouts

NONSENSE = "<answer>I do not know.</answer>"  # a verifier that accepts it accepts everything
dataset_of = functools.cache(create)


def reward(items: list[Item], lengths: list[int], truncated: list[bool]) -> list[Result]:
    """The scores of the library. It runs in a worker process."""
    from reasoning_gym.utils import extract_answer

    results = []
    for item in items:
        answer, dataset = extract_answer(item.response), dataset_of(item.meta["task"])
        problem = {name: item.meta.get(name) for name in ("question", "answer")}
        problem["metadata"] = unpack(item.meta["metadata"])
        try:
            score, info = float(dataset.score_answer(answer, problem)), {}
        except SYMPY_ERRORS as error:  # the errors that an unexpected answer causes, not only in sympy
            score, info = 0.0, {"error": f"{type(error).__name__}: {error}"[:200]}
        results.append(Result(score, float(score >= 1), answer, info))
    return results


class ReasoningGym:
    """reward() in worker processes, one response a task."""

    waits = True  # mixture.py calls it in a thread, because it waits for other processes

    def __init__(self, workers: int = 0):
        """Starts one worker to see whether the library can be imported. Raises BadInput."""
        if importlib.util.find_spec("reasoning_gym") is None:
            raise BadInput("--reward reasoning-gym: reasoning-gym is not installed; pip install reasoning-gym")
        self.pool = WorkerPool("reasoning-gym", workers, item_seconds=10.0, memory_gib=4.0)
        complaint = self.pool.check()
        if complaint:
            raise BadInput(f"--reward reasoning-gym: {complaint}")

    def __call__(self, items: list[Item], lengths: list[int], truncated: list[bool]) -> list[Result]:
        """Raises BadInput on a row of another data set, and RunFailed if no worker can be started."""
        for item in items:
            if not {"question", "task", "metadata"} <= item.meta.keys():
                raise BadInput(
                    '--reward reasoning-gym: needs rows of --dataset "reasoning-gym:TASK"; there is no "task" and '
                    f'"metadata" in the row with the prompt {item.prompt[:200]!r}'
                )
        outcomes = self.pool.run([([item], [length], [cut]) for item, length, cut in zip(items, lengths, truncated)])
        results = []
        for outcome in outcomes:
            if not isinstance(outcome, list):
                outcome = [Result(0.0, 0.0, None, {outcome.kind: outcome.message.rpartition("\n")[2]})]
            results += outcome
        warn_of_timeouts("reasoning-gym", results)
        return results

    def try_out(self, items: list[Item], lengths: list[int], truncated: list[bool]) -> list[Result]:
        """Grade before anything is loaded. Raises BadInput if a verifier is broken, or accepts everything."""
        results = self(items, lengths, truncated)
        nonsense = self([dataclasses.replace(item, response=NONSENSE) for item in items], lengths, truncated)
        for item, result in zip(items * 2, results + nonsense):
            for kind in result.info.keys() & {"timeout", "died", "raised", "wrong"}:
                said = f'the verifier of "{item.meta["task"]}" {kind}: {result.info[kind]}'
                raise BadInput(f"--reward reasoning-gym: {said}, response {item.response[:200]!r}")
        for item, result in zip(items, nonsense):
            if result.acc:
                said = f'the verifier of "{item.meta["task"]}" accepts every answer, also {NONSENSE}'
                raise BadInput(f"--reward reasoning-gym: {said}")
        return results
