"""The signatures that a function of --reward file.py:function may have: ours, and those of three other libraries.

    f(items, lengths, truncated)                                  ours: all responses to one row of the data
    f(prompts, completions, completion_ids, COLUMN, ...)          TRL: the same, and any column of the row
    f(data_source, solution_str, ground_truth, extra_info)        verl: one response
    f(queries, prompts, labels)                                   OpenRLHF: one response, in lists of one

The names of the parameters tell which one it is. A function of the last three gets what it asks for by name, and may
leave out the rest. Each of the four may be `async def`.

Worker processes import this file, so it imports no torch.
"""

import asyncio
import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from common.data.rows import lookup
from common.errors import BadInput
from common.rewards.grading import NOT_APPLIED, Item, Result, Reward, as_list

# What TRL and verl would pass as well, and why we cannot.
ABSENT = {
    "trainer_state": "a reward runs in a process of its own, which knows no step; --reward weights.json changes the "
    "weights of rewards while a run is going",
    "environments": "an environment of --environment is in another process, and its own score is --reward environment",
    "reward_router_address": "there is no router; a reward model is --reward model:FOLDER or http://HOST:PORT",
    "reward_model_tokenizer": "there is no router; a reward model is --reward model:FOLDER or http://HOST:PORT",
}


class Caller:
    """A user's function. It gets the arguments that it asks for, and is awaited if it is asynchronous."""

    def __init__(self, function: Callable):
        """Raises BadInput if the function needs something that we never have."""
        self.function = function
        self.parameters = parameters_of(function)
        kinds = [parameter.kind for parameter in self.parameters.values()]
        self.takes_everything = inspect.Parameter.VAR_KEYWORD in kinds
        without = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        self.needed = [
            name
            for name, parameter in self.parameters.items()
            if parameter.default is parameter.empty and parameter.kind not in without
        ]
        for name in self.needed:
            if name in ABSENT:
                raise BadInput(f'the function needs "{name}": {ABSENT[name]}')
        # One event loop as long as the process lives: what a function keeps from call to call, such as an HTTP
        # session, belongs to the loop that it was made in.
        self.runner = asyncio.Runner()

    def call(self, *given: Any) -> Any:
        """function(*given)."""
        (returned,) = self.settle([self.function(*given)])
        return returned

    def call_by_name(self, calls: list[dict[str, Any]]) -> list:
        """What the function returns for each of the calls. Coroutines of several calls run at the same time."""
        return self.settle([self.function(**self.wanted(given)) for given in calls])

    def wanted(self, given: dict[str, Any]) -> dict[str, Any]:
        """The arguments that the function takes. Raises BadInput if it needs others."""
        missing = [name for name in self.needed if name not in given]
        if missing:
            raise BadInput(f"the function needs {quoted_names(missing)}; there are {quoted_names(given)}")
        if self.takes_everything:
            return given
        return {name: value for name, value in given.items() if name in self.parameters}

    def settle(self, returned: list) -> list:
        """The values themselves, where some of them have to be awaited."""
        if not any(map(inspect.isawaitable, returned)):
            return returned

        async def settled() -> list:
            return await asyncio.gather(*map(as_coroutine, returned))

        return self.runner.run(settled())


async def as_coroutine(value: Any) -> Any:
    return await value if inspect.isawaitable(value) else value


def parameters_of(function: Callable) -> Mapping[str, inspect.Parameter]:
    """The parameters by name. Some functions that are written in C have none that Python knows."""
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError):
        return {}


def quoted_names(names: Iterable[str]) -> str:
    return ", ".join(f'"{name}"' for name in names)


# The four ways to call a function: grade(caller, items, lengths, truncated) -> numbers or Results


def grade_trl(caller: Caller, items: list[Item], lengths: list[int], truncated: list[bool]) -> list[Result]:
    """TRL passes the batch and the columns of its rows, in lists with an entry for each completion."""
    logged: list[dict[str, Any]] = [{} for _ in items]  # the info of each response

    def log_extra(column: str, values: list) -> None:
        for info, value in zip(logged, as_list(values, len(items)), strict=True):
            info[column] = plain(value)

    def log_metric(name: str, value: float) -> None:
        for info in logged:
            info[name] = plain(value)

    given = columns(items) | {
        "prompts": [item.meta.get("prompt", item.prompt) for item in items],
        "completions": [completion(item) for item in items],
        "completion_ids": [item.response_ids for item in items],
        "log_extra": log_extra,
        "log_metric": log_metric,
    }
    (returned,) = caller.call_by_name([given])
    scores = as_list(returned, len(items))
    if len(scores) != len(items):
        raise BadInput(f"returned {len(scores)} results for {len(items)} items")
    results = []
    for score, info in zip(scores, logged):
        if score is None:
            info = {**info, NOT_APPLIED: "the function returned None"}
        results.append(Result(score, None, None, info))
    return results


def columns(items: list[Item]) -> dict[str, list]:
    """The columns of the rows, each as a list. The reference is there under the names that rows give it elsewhere."""
    names = dict.fromkeys(name for item in items for name in item.meta)
    found = {name: [item.meta.get(name) for item in items] for name in names if name not in ("prompt", "completion")}
    references = [reference(item) for item in items]
    if any(value is not None for value in references):
        found.setdefault("answer", references)
        found.setdefault("ground_truth", references)
    return found


def completion(item: Item) -> str | list[dict[str, str]]:
    """The response in the form of its prompt: a text, or a list of one message."""
    is_conversation = isinstance(item.meta.get("prompt"), list)
    return [{"role": "assistant", "content": item.response}] if is_conversation else item.response


def grade_verl(caller: Caller, items: list[Item], lengths: list[int], truncated: list[bool]) -> list:
    """verl calls once for each response, and takes a number or an object with a "score"."""
    calls = []
    for item in items:
        of_verl = lookup(item.meta, "reward_model.ground_truth")
        calls.append(
            {
                "data_source": item.meta.get("data_source", ""),
                "solution_str": item.response,
                "ground_truth": reference(item) if of_verl is None else of_verl,
                "extra_info": item.meta.get("extra_info") or {},
            }
        )
    return [as_result(returned, "score", "acc") for returned in caller.call_by_name(calls)]


def grade_openrlhf(caller: Caller, items: list[Item], lengths: list[int], truncated: list[bool]) -> list:
    """OpenRLHF calls once for each response too, with lists of one, and takes a list or tensor of one, or an object."""
    calls = []
    for item in items:
        label = reference(item)
        calls.append(
            {
                "queries": [item.prompt + item.response],
                "prompts": [item.prompt],
                "labels": ["" if label is None else label],
            }
        )
    return [as_result(returned, "rewards", "scores") for returned in caller.call_by_name(calls)]


def reference(item: Item) -> Any:
    """The reference answer. One that is neither a text nor a number is in the row alone, as it stands in the data."""
    return item.meta.get("answer") if item.answer is None else item.answer


def as_result(returned: Any, score: str, acc: str) -> Any:
    """A Result of what a function returns for one response. score, acc: keys of the two if it is an object.

    A number stays one; to_rows() reads that, and complains about anything else. Raises BadInput.
    """
    if not isinstance(returned, Mapping):
        return only(returned)
    if score not in returned:
        raise BadInput(f'expected a number, or an object with "{score}", got {str(dict(returned))[:200]}')
    info = {}
    for key, value in returned.items():
        if key == "extra_logs" and isinstance(value, Mapping):
            info |= {name: only(plain(logged)) for name, logged in value.items()}
        elif key not in (score, acc):
            info[key] = plain(value)
    correct = returned.get(acc)
    return Result(only(returned[score]), None if correct is None else only(correct), None, info)


def only(value: Any) -> Any:
    """The entry of a list of one; anything else as it is."""
    return value[0] if isinstance(value, list | tuple) and len(value) == 1 else value


def plain(value: Any) -> Any:
    """Numbers and arrays of numpy and torch as those of Python. JSON would write them as texts."""
    return value.tolist() if hasattr(value, "tolist") else value


@dataclass(frozen=True)
class Form:
    owner: str
    marks: frozenset[str]  # a function with one of these parameters has this signature
    shown: str  # for messages
    grade: Callable


# In this order. Functions of TRL have parameters for columns, which may be named like parameters of the others.
FORMS = (
    Form("TRL", frozenset({"completions", "completion_ids"}), "f(prompts, completions, COLUMN, **kwargs)", grade_trl),
    Form(
        "verl",
        frozenset({"solution_str"}),
        "f(data_source, solution_str, ground_truth, extra_info)",
        grade_verl,
    ),
    Form("OpenRLHF", frozenset({"queries"}), "f(queries, prompts, labels)", grade_openrlhf),
    Form("onefile-rl", frozenset({"items", "lengths", "truncated"}), "f(items, lengths, truncated)", Caller.call),
)


def recognize(function: Callable) -> Form:
    """The signature of a function. Raises BadInput, with all that are known, if it has another."""
    names = parameters_of(function)
    for form in FORMS:
        if form.marks & names.keys():
            return form
    known = "; ".join(f"{form.owner}: {form.shown}" for form in FORMS)
    raise BadInput(f"its parameters are {quoted_names(names) or 'unknown'}; a reward has one of these forms: {known}")


def adapt(function: Callable) -> tuple[Reward, str]:
    """A function with any of the signatures as one with ours, and what to say about it. Raises BadInput."""
    form = recognize(function)
    caller = Caller(function)

    def grade(items: list[Item], lengths: list[int], truncated: list[bool]) -> Any:
        return form.grade(caller, items, lengths, truncated)

    return grade, f"{form.owner}'s signature, {form.shown}"
