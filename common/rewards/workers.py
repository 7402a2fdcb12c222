"""Rewards whose code may hang, crash, eat all memory or raise. It runs in worker processes (common/processes/pool.py).

    MathReward("math"), UserReward("mine.py", "reward")        two rewards, called like any other
    Graders                                                    their worker processes, which grade batches
    load_math(), load_function()                               called in a worker: they return what it runs

A request is a batch [items, lengths, truncated], and an answer has a row [score, acc, extracted, info] for each item.
"""

import contextlib
import math
from collections.abc import Callable, Iterator
from itertools import groupby
from pathlib import Path
from typing import Any, SupportsFloat

from common.data.rows import did_you_mean
from common.errors import BadInput, RunFailed, say, warn
from common.processes.child import Handler, import_file
from common.processes.pool import START_SECONDS, Failure, Pool, Program
from common.rewards.grading import Item, Result, as_list
from common.rewards.math_grading import grade_by_string, last_answer

# A worker is replaced after this many batches, because the caches of sympy grow.
MAX_BATCHES = 1000
# More timeouts than this share are worth a warning, also because a policy can learn to provoke them.
MAX_TIMEOUT_SHARE = 0.01


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
        self.first_loss = ""  # the first batch whose worker was late or died
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
        if not isinstance(answer, Failure):
            return [Result(*row) for row in answer]
        if answer.kind in ("timeout", "died"):
            self.first_loss = self.first_loss or f"{answer.kind}: {answer.message}, {quoted_all(items)}"
        return answer

    def verdicts(self, items: list[Item]) -> list[Result]:
        """The results of items that are graded one by one. One that the grader cannot take is wrong: info says why."""
        return list(self.map(self.verdict, items))

    def verdicts_on(self, questions: dict[int, tuple[str, str]]) -> dict[int, Result]:
        """Row -> its result, for questions (response, reference answer). Equal ones are graded once."""
        distinct = list(dict.fromkeys(questions.values()))
        verdicts = self.verdicts([Item("", response, answer) for response, answer in distinct])
        verdict_of = dict(zip(distinct, verdicts))
        return {row: verdict_of[question] for row, question in questions.items()}

    def verdict(self, item: Item) -> Result:
        outcome = self.grade([item], [0], [False])
        if not isinstance(outcome, Failure):
            return outcome[0]
        kind = "error" if outcome.kind == "raised" else outcome.kind
        return Result(0.0, 0.0, None, {kind: outcome.message.rpartition("\n")[2]})


class MathReward:
    """grade_math, one item a batch. An item that needs more than 10 s or 2 GiB is wrong. spec: math, math-flexible."""

    # mixture.py calls it in a thread, because it waits for other processes.
    waits = True

    def __init__(self, spec: str = "math", workers: int = 0):
        self.spec = spec
        self.mode = "boxed" if spec == "math" else "flexible"
        self.pool = Graders(spec, "common.rewards.workers:load_math", [self.mode], item_seconds=10.0, workers=workers)

    def __call__(self, items: list[Item], lengths: list[int], truncated: list[bool]) -> list[Result]:
        """Raises RunFailed if no worker can be started."""
        # Most answers are equal to the reference as strings, or there is none. sympy decides about the others.
        results = [grade_by_string(item.response, item.answer, self.mode) for item in items]
        questions = {}
        for row, item in enumerate(items):
            if results[row] is None:
                questions[row] = (last_answer(item.response), item.answer)
        # Responses to one prompt often agree.
        for row, verdict in self.pool.verdicts_on(questions).items():
            results[row] = verdict
        warn_of_timeouts(self.spec, items, results)
        return results


class TriedReward:
    """A reward in worker processes that is loaded and tried before the run begins. A subclass has grade()."""

    # mixture.py calls it in a thread, because it waits for other processes.
    waits = True

    def __init__(self, name: str, pool: Graders):
        """Starts one worker to see whether the code can be loaded. Raises BadInput."""
        self.name = name
        self.pool = pool
        with refused_as_input():
            self.facts = pool.start()  # what the worker says about the code

    def __call__(self, items: list[Item], lengths: list[int], truncated: list[bool]) -> list[Result]:
        """Raises BadInput or RunFailed if the code is wrong."""
        results = self.grade(items, lengths, truncated)
        warn_of_timeouts(self.name, items, results)
        return results

    def try_out(self, items: list[Item], lengths: list[int], truncated: list[bool]) -> list[Result]:
        """Grade before a model is loaded. Raises BadInput if the code is wrong, raises, hangs or dies.

        No model has written these responses, and the message says so (preflight/checks.py has them).
        """
        results: list[Result] = []
        # One prompt after the other: a reward that hangs is known after the first, however few workers there are.
        for batch in by_row(items, lengths, truncated):
            with refused_as_input(" (tried before the run on invented responses: the reference, and a wrong one)"):
                results += self.grade(*batch)
            if self.pool.first_loss:
                raise BadInput(f'--reward: reward "{self.name}" {self.pool.first_loss}')
        return results


def by_row(items: list[Item], lengths: list[int], truncated: list[bool]) -> list[list[list]]:
    """A batch [items, lengths, truncated] for each row of the data, with all responses to it.

    Two rows that follow each other may have the same prompt, so the row's number counts. An item without a number is
    known by its prompt.
    """
    rows = zip(items, lengths, truncated)
    batches = groupby(rows, lambda row: (row[0].group, row[0].prompt))
    return [[list(column) for column in zip(*batch)] for _, batch in batches]


@contextlib.contextmanager
def refused_as_input(when: str = "") -> Iterator[None]:
    """Before a run, a reward that fails is bad input."""
    try:
        yield
    except (BadInput, RunFailed) as failure:
        raise BadInput(f"--reward{when}: {failure}") from None


class UserReward(TriedReward):
    """A user's function with one of the signatures of signatures.py. A request has all responses to one row."""

    def __init__(self, path: str, function: str, workers: int = 0, item_seconds: float = 10.0):
        """Raises BadInput if the file cannot be loaded."""
        if not Path(path).is_file():
            raise BadInput(f"--reward: {path}: file not found")
        name = f"{path}:{function}"
        loader = "common.rewards.workers:load_function"
        super().__init__(name, Graders(name, loader, [path, function], item_seconds, workers))
        say(f'reward "{name}" has {self.facts}')

    def grade(self, items: list[Item], lengths: list[int], truncated: list[bool]) -> list[Result]:
        """Rows whose worker was late or died have no score. Raises BadInput or RunFailed if the function is wrong."""
        results: list[Result] = []
        for results_of_row in self.pool.map(self.grade_row, by_row(items, lengths, truncated)):
            results += results_of_row
        return results

    def grade_row(self, batch: list) -> list[Result]:
        """The results of the responses to one row, or Results without a score if the worker was late or died."""
        items = batch[0]
        outcome = self.pool.grade(*batch)
        if not isinstance(outcome, Failure):
            return outcome
        if outcome.kind == "wrong":
            raise BadInput(f'reward "{self.name}": {outcome.message}, {quoted_all(items)}')
        if outcome.kind == "raised":
            message = f'reward "{self.name}" raised an error for {quoted_all(items)}:\n{outcome.message}'
            raise RunFailed(message, code="reward-failed")
        return [Result(None, None, None, {outcome.kind: outcome.message})] * len(items)


def warn_of_timeouts(name: str, items: list[Item], results: list[Result]) -> None:
    late = [item for item, result in zip(items, results) if "timeout" in result.info]
    if len(late) > MAX_TIMEOUT_SHARE * len(results):
        counts = f"{len(late)} of {len(results)} responses"
        warn(f'reward "{name}" took too long on {counts}, such as {quoted(late[0])}', "reward-slow")


def quoted(item: Item) -> str:
    return f"prompt {item.prompt[:200]!r}, response {item.response[:200]!r}"


def quoted_all(items: list[Item]) -> str:
    """The prompt of a call, and the responses to it. Nobody knows which of them the function could not take."""
    responses = ", ".join(repr(item.response[:200]) for item in items)
    which = "response" if len(items) == 1 else f"one of the {len(items)} responses"
    return f"prompt {items[0].prompt[:200]!r}, {which} {responses}"


# Inside a worker


def load_math(mode: str) -> Handler:
    # Imported while the worker starts. Otherwise the time limit of the first item would have to pay for it.
    import common.rewards.math_equality  # noqa: F401
    from common.rewards.math_grading import grade_math

    def grade(items: list[Item], lengths: list[int], truncated: list[bool]) -> list[Result]:
        return [grade_math(item.response, item.answer, mode) for item in items]

    return batch_handler(grade, memory_gib=2.0)


def load_function(path: str, name: str, memory_gib: float = 8.0) -> Handler:
    """A function of a user's file. Raises what importing the file raises, BadInput for an unknown signature."""
    from common.rewards.signatures import adapt

    module = import_file(Path(path), "reward")
    function = getattr(module, name, None)
    if not callable(function):
        own = [known for known, value in vars(module).items() if callable(value) and not known.startswith("_")]
        raise BadInput(f'{path} has no function "{name}"{did_you_mean(name, own)}')
    grade, signature = adapt(function)
    return batch_handler(grade, memory_gib, facts=signature)


def batch_handler(grade: Callable, memory_gib: float | None, facts: str = "") -> Handler:
    """A handler that grades the batches of Graders.grade(). facts: for TriedReward.facts."""

    def answer(request: list) -> list[list]:
        items, lengths, truncated = request
        results = grade([Item(**fields) for fields in items], lengths, truncated)
        return to_rows(results, len(items))

    return Handler(answer, memory_gib, facts)


def to_rows(results: Any, count: int) -> list[list]:
    """[score, acc, extracted, info] of each result. A plain number n means Result(n, n > 0). Raises BadInput.

    It checks what a user's code has returned, by hand: pydantic takes longer to import than most graders to grade.
    """
    rows = []
    for number, result in enumerate(as_list(results, count)):
        # Numbers of numpy and torch are such, too.
        if is_number(result):
            result = Result(float(result), float(result > 0))
        if not isinstance(result, Result):
            hint = "; Result(None, None) says that it cannot be graded" if result is None else ""
            raise BadInput(f"result {number}: expected a number or a Result, got {described(result)}{hint}")
        for value in (result.score, result.acc):
            if value is not None and not is_number(value):
                raise BadInput(f"result {number}: expected a number or None, got {described(value)}")
        if not isinstance(result.info, dict | None):
            raise BadInput(f"result {number}: expected a dictionary as info, got {described(result.info)}")
        # json.dumps() would write a number of numpy as a string.
        score, acc = (None if value is None else float(value) for value in (result.score, result.acc))
        rows.append([score, acc, result.extracted, result.info or {}])
    if len(rows) != count:
        raise BadInput(f"returned {len(rows)} results for {count} items")
    return rows


def is_number(value: Any) -> bool:
    """False for a tensor or an array of several numbers, although it has a method __float__."""
    return isinstance(value, SupportsFloat) and math.prod(getattr(value, "shape", ())) == 1


def described(value: Any) -> str:
    return f"{str(value)[:200]!r}, {type(value).__name__}"
