"""Rewards whose code may hang, crash, eat all memory or raise. It runs in worker processes (common/processes/pool.py).

    MathReward("math"), UserReward("mine.py", "reward")        two rewards, called like any other
    Graders                                                    their worker processes, which grade batches
    load_math(), load_function(), load_reward_model()          called in a worker: they return what it runs

A request is a batch [items, lengths, truncated], and an answer has a row [score, acc, extracted, info] for each item.
"""

from collections.abc import Callable, Iterable
from itertools import groupby
from pathlib import Path
from typing import Any, SupportsFloat

from common.errors import BadInput, RunFailed, warn
from common.processes.child import Handler, import_file
from common.processes.pool import START_SECONDS, Failure, Pool, Program
from common.rewards.grading import Item, Result
from common.rewards.math_grading import grade_by_string, last_answer

TRY_SECONDS = 2.0  # for each response when a reward is tried before the run
MAX_BATCHES = 1000  # after so many batches a worker is replaced, because the caches of sympy grow
MAX_TIMEOUT_SHARE = 0.01  # more timeouts are worth a warning, also because a policy can learn to provoke them
LOST = ("timeout", "died")  # kinds of a Failure that say nothing about the response


class Graders(Pool):
    """Worker processes with the same grader."""

    def __init__(
        self,
        name: str,
        loader: str,
        arguments: list,
        item_seconds: float,
        workers: int = 0,
        start_seconds: float = START_SECONDS,
    ):
        """loader: "module:function", see pool.Program. item_seconds: limit for each item of a batch."""
        self.item_seconds = item_seconds
        program = Program(
            name=f'reward "{name}"',
            loader=loader,
            arguments=arguments,
            error_code="reward-failed",
            start_seconds=start_seconds,
            max_requests=MAX_BATCHES,
        )
        super().__init__(program, workers)

    def grade(self, items: list[Item], lengths: list[int], truncated: list[bool]) -> list[Result] | Failure:
        """The results of a batch. Raises RunFailed if no worker can be started."""
        request = [[vars(item) for item in items], lengths, truncated]
        answer = self.ask(request, self.item_seconds * len(items))
        if isinstance(answer, Failure):
            return answer
        return [Result(*row) for row in answer]


class MathReward:
    """grade_math, one item a batch. An item that needs more than 10 s or 2 GiB is wrong. spec: math, math-flexible."""

    waits = True  # mixture.py calls it in a thread, because it waits for other processes

    def __init__(self, spec: str = "math", workers: int = 0):
        self.spec = spec
        self.mode = "boxed" if spec == "math" else "flexible"
        self.pool = Graders(spec, "common.rewards.workers:load_math", [self.mode], item_seconds=10.0, workers=workers)

    def __call__(self, items: list[Item], lengths: list[int], truncated: list[bool]) -> list[Result]:
        """Raises RunFailed if no worker can be started."""
        results = [grade_by_string(item.response, item.answer, self.mode) for item in items]
        rows_for_sympy = [row for row, result in enumerate(results) if result is None]
        questions = {row: (last_answer(items[row].response), items[row].answer) for row in rows_for_sympy}
        distinct = list(dict.fromkeys(questions.values()))  # responses to one prompt often agree
        verdicts = dict(zip(distinct, self.pool.map(self.grade_question, distinct)))
        for row, question in questions.items():
            results[row] = verdicts[question]
        warn_of_timeouts(self.spec, items, results)
        return results

    def grade_question(self, question: tuple[str, str]) -> Result:
        """The verdict on a pair of (response, reference answer)."""
        response, answer = question
        outcome = self.pool.grade([Item("", response, answer)], [0], [False])
        return wrong_because(outcome) if isinstance(outcome, Failure) else outcome[0]


class UserReward:
    """A user's function (items, lengths, truncated) -> Results or numbers, called with all responses to one prompt."""

    waits = True  # mixture.py calls it in a thread, because it waits for other processes

    def __init__(self, path: str, function: str, workers: int = 0, item_seconds: float = 10.0):
        """Starts one worker to see whether the file can be loaded. Raises BadInput."""
        if not Path(path).is_file():
            raise BadInput(f"--reward: {path}: file not found")
        self.name = f"{path}:{function}"
        loader = "common.rewards.workers:load_function"
        self.pool = Graders(self.name, loader, [path, function], item_seconds, workers)
        try:
            self.pool.start()
        except RunFailed as failure:
            raise BadInput(f"--reward: {failure}") from None

    def __call__(self, items: list[Item], lengths: list[int], truncated: list[bool]) -> list[Result]:
        """Rows whose worker was late or died have no score. Raises BadInput or RunFailed if the function is wrong."""
        results = self.grade(items, lengths, truncated)
        warn_of_timeouts(self.name, items, results)
        return results

    def try_out(self, items: list[Item], lengths: list[int], truncated: list[bool]) -> list[Result]:
        """Call the function before anything is loaded. Raises BadInput if it is wrong, raises, hangs or dies."""
        usual_seconds = self.pool.item_seconds
        self.pool.item_seconds = TRY_SECONDS
        try:
            results = self.grade(items, lengths, truncated)
        except RunFailed as failure:
            raise BadInput(f"--reward: {failure}") from None
        finally:
            self.pool.item_seconds = usual_seconds
        refuse_lost(self.name, items, results)
        return results

    def grade(self, items: list[Item], lengths: list[int], truncated: list[bool]) -> list[Result]:
        """One batch for each prompt."""
        batches = []
        rows = zip(items, lengths, truncated)
        for _, rows_of_prompt in groupby(rows, lambda row: row[0].prompt):
            batches.append(tuple(map(list, zip(*rows_of_prompt))))
        results: list[Result] = []
        for results_of_prompt in self.pool.map(self.grade_prompt, batches):
            results += results_of_prompt
        return results

    def grade_prompt(self, batch: tuple[list[Item], list[int], list[bool]]) -> list[Result]:
        """The results of one prompt's responses, or Results without a score if the worker was late or died."""
        items = batch[0]
        outcome = self.pool.grade(*batch)
        if not isinstance(outcome, Failure):
            return outcome
        if outcome.kind == "wrong":
            raise BadInput(f'reward "{self.name}": {outcome.message}, {quoted(items[0])}')
        if outcome.kind == "raised":
            message = f'reward "{self.name}" raised an error for {quoted(items[0])}:\n{outcome.message}'
            raise RunFailed(message, code="reward-failed")
        return [Result(None, None, None, {outcome.kind: outcome.message})] * len(items)


def wrong_because(failure: Failure) -> Result:
    """The result of a response that a verifier could not take: it is wrong, and info says why."""
    kind = "error" if failure.kind == "raised" else failure.kind
    return Result(0.0, 0.0, None, {kind: failure.message.rpartition("\n")[2]})


def warn_of_timeouts(name: str, items: list[Item], results: list[Result]) -> None:
    late = [item for item, result in zip(items, results) if "timeout" in result.info]
    if len(late) > MAX_TIMEOUT_SHARE * len(results):
        counts = f"{len(late)} of {len(results)} responses"
        warn(f'reward "{name}" took too long on {counts}, such as {quoted(late[0])}', "reward-slow")


def refuse_lost(name: str, items: list[Item], results: list[Result]) -> None:
    """Raise BadInput for the first response whose worker was late or died."""
    for item, result in zip(items, results):
        for kind in LOST:
            if kind in result.info:
                raise BadInput(f'--reward: reward "{name}" {kind}: {result.info[kind]}, {quoted(item)}')


def quoted(item: Item) -> str:
    return f"prompt {item.prompt[:200]!r}, response {item.response[:200]!r}"


# Inside a worker


def load_math(mode: str) -> Handler:
    import math_verify  # noqa: F401  imported here, so that the deadline of the first item does not pay for it

    from common.rewards.math_grading import grade_math

    def grade(items: list[Item], lengths: list[int], truncated: list[bool]) -> list[Result]:
        return [grade_math(item.response, item.answer, mode) for item in items]

    return batch_handler(grade, memory_gib=2.0)


def load_function(path: str, name: str, memory_gib: float = 8.0) -> Handler:
    """A function of a user's file. Raises what importing the file raises."""
    function = getattr(import_file(Path(path), "reward"), name, None)
    if not callable(function):
        raise BadInput(f'{path} has no function "{name}"')
    return batch_handler(function, memory_gib)


def load_reward_model(path: str) -> Handler:
    """A reward model on the CPU. It may take all memory of the machine."""
    from common import placement
    from common.rewards.model import RewardModel

    placement.use_cores()
    model = RewardModel(path)
    model.load()
    return batch_handler(model, memory_gib=None)


def batch_handler(grade: Callable, memory_gib: float | None) -> Handler:
    """A handler that grades the batches of Graders.grade()."""

    def answer(request: list) -> list[list]:
        items, lengths, truncated = request
        results = grade([Item(**fields) for fields in items], lengths, truncated)
        return to_rows(results, len(items))

    return Handler(answer, memory_gib)


def to_rows(results: Any, count: int) -> list[list]:
    """[score, acc, extracted, info] of each result. A plain number n means Result(n, n > 0). Raises BadInput.

    It checks what a user's code has returned, by hand: pydantic takes longer to import than most graders to grade.
    """
    if not isinstance(results, Iterable):
        raise BadInput(f"expected {count} results, got {type(results).__name__}")
    rows = []
    for number, result in enumerate(results):
        if isinstance(result, SupportsFloat):  # also a number of numpy or torch
            result = Result(float(result), float(result > 0))
        elif not isinstance(result, Result):
            raise BadInput(f"result {number}: expected a number or a Result, got {described(result)}")
        for value in (result.score, result.acc):
            if value is not None and not isinstance(value, SupportsFloat):
                raise BadInput(f"result {number}: expected a number or None, got {described(value)}")
        if not isinstance(result.info or {}, dict):
            raise BadInput(f"result {number}: info is {described(result.info)}, expected a dictionary")
        score = None if result.score is None else float(result.score)
        acc = None if result.acc is None else float(result.acc)
        rows.append([score, acc, result.extracted, result.info or {}])
    if len(rows) != count:
        raise BadInput(f"returned {len(rows)} results for {count} items")
    return rows


def described(value: Any) -> str:
    return f"{str(value)[:200]!r}, {type(value).__name__}"
