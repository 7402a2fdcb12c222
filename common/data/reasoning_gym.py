"""--dataset "reasoning-gym:TASK?parameter=value&parameter=value": generated problems (pip install reasoning-gym).

TASK is a generator of the library, and the parameters are fields of its configuration. `size` is the number of training
problems; the test split has HELD_OUT problems from another seed. A row has a "question", an "answer" (in most tasks), a
"solution" (the answer in its tags), and what the task's verifier needs (common/rewards/reasoning_gym.py): the "task",
which is the text after "reasoning-gym:", and "metadata".

The generators run in processes of their own, each of which makes every n-th problem. There PYTHONHASHSEED is 0: several
generators iterate over sets of strings, so that their problems would be others in each process.
"""

import contextlib
import datetime
import difflib
import enum
import functools
import importlib.util
import json
import os
import random
import subprocess
import sys
import threading
import time
import types
import typing
from collections.abc import Sequence
from typing import Any

from common.errors import BadInput, say
from common.rewards.worker_main import end_with
from common.rewards.workers import spawn

HELD_OUT = 256  # problems of the test split
TRAINED_ON = 5000  # problems of the training split, unless the parameter `size` says otherwise
SEEDS = {"train": 0, "test": 2**31}  # problem i of the library is a function of seed + i
MAX_PROCESSES = 8  # more would spend their time importing the library
REFUSED = {
    "codeio": "its problems are outputs of programs, some of which read the clock, so that each run has others",
    "composite": "name several data sets after --dataset instead",
}
LISTS = (list, tuple, Sequence)  # types of parameters that are written as a JSON list
SLOW_SECONDS = 10.0  # after this time a line says how many problems there are


def problems(spec: str, split: str, flag: str = "--dataset") -> list[dict[str, Any]]:
    """Rows of one split, the same on every machine. No question of the test split is trained on. Raises BadInput."""
    task = spec.partition(":")[2]
    if importlib.util.find_spec("reasoning_gym") is None:
        raise BadInput(f"{flag} {spec}: reasoning-gym is not installed; pip install reasoning-gym")
    try:
        rows, test = generate(task, split), generate(task, "test")
    except BadInput as error:
        raise BadInput(f'{flag} "{spec}": {error}') from None
    if split == "test":
        return rows
    tested = {row["question"] for row in test}
    kept = [row for row in rows if row["question"] not in tested]
    if not kept:
        said = f"all {len(rows)} training problems are in the test split; choose parameters that allow more problems"
        raise BadInput(f'{flag} "{spec}": {said}')
    if len(kept) < len(rows):
        say(f"{spec}: left out {len(rows) - len(kept)} of {len(rows)} problems: they are in the test split")
    return kept


@functools.lru_cache(maxsize=16)
def generate(task: str, split: str) -> list[dict[str, Any]]:
    """All problems of a split in the order of their seeds, from several processes. Raises BadInput.

    Problems on which the library raises an error are left out, and a line counts them.
    """
    cores = len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    count = max(1, min(cores, MAX_PROCESSES))
    began, is_slow, rows, failures = time.monotonic(), False, [], []
    with contextlib.ExitStack() as stack:
        processes = []
        for first in range(count):
            words = (task, split, str(first), str(count))
            processes.append(stack.enter_context(spawn("common.data.reasoning_gym", *words, PYTHONHASHSEED="0")))
            stack.callback(processes[-1].kill)
        size = [receive(process)["size"] for process in processes][-1]
        for number in range(size):
            row = receive(processes[number % count])
            if "failure" in row:
                failures.append(row["failure"])
            else:
                rows.append(row)
            if not is_slow and time.monotonic() - began > SLOW_SECONDS:
                is_slow = True
                made = f"{number + 1} of {size} problems of the {split} split after {SLOW_SECONDS:g} s"
                say(f"reasoning-gym:{task}: {made}" + ("; size=N makes fewer" if split == "train" else ""))
    if not rows:
        raise BadInput(failures[0])
    if failures:
        say(f"reasoning-gym:{task}: left out {len(failures)} of {size} problems of the {split} split: {failures[0]}")
    return rows


def receive(process: subprocess.Popen) -> dict[str, Any]:
    """The next line of a process as an object. Raises BadInput with the reason why there is none."""
    line = process.stdout.readline()
    answer = json.loads(line) if line else {"refused": f"its generator died with exit status {process.wait()}"}
    if "refused" in answer:
        raise BadInput(answer["refused"])
    return answer


def create(task: str, split: str = "train"):
    """The library's data set for TASK?parameter=value&parameter=value. Raises BadInput."""
    from reasoning_gym.factory import DATASETS

    name, _, query = task.partition("?")
    tasks = sorted(DATASETS.keys() - REFUSED.keys())
    if name in REFUSED:
        raise BadInput(f'the task "{name}" cannot be used: {REFUSED[name]}')
    if name not in tasks:
        near = difflib.get_close_matches(name, tasks, 3)
        hint = f"did you mean {', '.join(near)}?" if near else f"known: {', '.join(tasks)}"
        raise BadInput(f'unknown task "{name}"; {hint}')
    dataset, config = DATASETS[name]
    kinds = {key: without_none(kind) for key, kind in typing.get_type_hints(config).items() if key != "seed"}
    values = {"size": TRAINED_ON}
    for pair in filter(None, query.split("&")):
        key, _, text = pair.partition("=")
        if key not in kinds:
            near = difflib.get_close_matches(key, kinds, 1)
            hint = f" (did you mean {near[0]}?)" if near else ""
            raise BadInput(f'unknown parameter "{key}"{hint}; known: {", ".join(kinds)}')
        try:
            values[key] = convert(text, kinds[key])
        except (ValueError, KeyError):
            raise BadInput(f"{key}={text}: expected {in_words(kinds[key])}") from None
    if values["size"] < 1:
        raise BadInput(f"size={values['size']}: expected a number > 0")
    values |= {"size": HELD_OUT} if split == "test" else {}
    try:
        return dataset(config(**values, seed=SEEDS[split]))
    except Exception as error:  # their checks are assertions, and a few raise other errors
        raise BadInput(f"refused by its generator: {error or type(error).__name__}") from None


def without_none(kind: Any) -> Any:
    """The type X of Optional[X], or the type as it is."""
    arguments = typing.get_args(kind)
    return arguments[0] if types.NoneType in arguments else kind


def convert(text: str, kind: Any) -> Any:
    """The value of a parameter of this type. Raises ValueError or KeyError."""
    origin = typing.get_origin(kind) or kind
    if kind is bool:
        return {"true": True, "false": False}[text.lower()]
    if kind in (int, float, str) or (isinstance(kind, type) and issubclass(kind, enum.Enum)):
        return kind(text)
    if kind in (datetime.date, datetime.time):
        return kind.fromisoformat(text)
    if origin is typing.Literal:
        return {choice: choice for choice in typing.get_args(kind)}[text]
    value = json.loads(text)
    if origin not in LISTS or not isinstance(value, list):
        raise ValueError
    return tuple(value) if origin is tuple else value


def in_words(kind: Any) -> str:
    """The values that convert() takes, for a message."""
    if (origin := typing.get_origin(kind) or kind) in LISTS:
        return 'a list such as ["a","b"]'
    if origin is typing.Literal:
        return " or ".join(typing.get_args(kind))
    words = {int: "a whole number", float: "a number", bool: "true or false"}
    return words.get(kind, f"a {kind.__name__}")


def pack(value: Any) -> Any:
    """The value as JSON holds it. A tuple, or an object with keys that are no strings, is marked: see unpack()."""
    if isinstance(value, dict):
        if all(isinstance(key, str) for key in value):
            return {key: pack(content) for key, content in value.items()}
        return {"__dict__": [[pack(key), pack(content)] for key, content in value.items()]}
    if isinstance(value, tuple):
        return {"__tuple__": [pack(entry) for entry in value]}
    return [pack(entry) for entry in value] if isinstance(value, list) else value


def unpack(value: Any) -> Any:
    """The value that pack() was called with. Some verifiers compare tuples, or look up numbers."""
    if isinstance(value, list):
        return [unpack(entry) for entry in value]
    if not isinstance(value, dict):
        return value
    if value.keys() == {"__dict__"}:
        return {unpack(key): unpack(content) for key, content in value["__dict__"]}
    if value.keys() == {"__tuple__"}:
        return tuple(unpack(entry) for entry in value["__tuple__"])
    return {key: unpack(content) for key, content in value.items()}


def plain(value: Any) -> Any:
    """A number of numpy as a plain one. Other objects, such as fractions, become text: no verifier reads them."""
    return value.item() if hasattr(value, "item") else str(value)


def make_row(task: str, dataset: Any, number: int) -> dict[str, Any]:
    """Problem `number` of the library's data set as a row. Raises BadInput."""
    random.seed(dataset.seed + number)  # list_functions draws from the global generator
    try:
        problem = dataset[number]
    except Exception as error:
        said = f"problem {number}: its generator raised {type(error).__name__}: {error}"
        raise BadInput(said.split("\n")[0]) from None
    row = {"question": problem["question"], "task": task, "metadata": pack(problem["metadata"])}
    if problem["answer"] is not None:
        row |= {"answer": problem["answer"], "solution": f"<answer>{problem['answer']}</answer>"}
    return row


def main(task: str, split: str, first: int, step: int) -> None:
    """Write a line with the number of problems, and then one for each problem of this process: a row, or a failure."""
    lines = os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # some generators print
    threading.Thread(target=end_with, args=(os.getppid(),), daemon=True).start()
    send = lambda value: print(json.dumps(value, default=plain), file=lines, flush=True)
    try:
        dataset = create(task, split)
        send({"size": dataset.size})
        for number in range(first, dataset.size, step):
            try:
                send(make_row(task, dataset, number))
            except BadInput as error:
                send({"failure": str(error)})
    except ImportError as error:
        send({"refused": f"reasoning-gym cannot be imported ({error}); pip install reasoning-gym"})
    except BadInput as error:
        send({"refused": str(error)})


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
