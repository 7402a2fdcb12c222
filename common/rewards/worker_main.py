"""One worker process of workers.py: for each task one line of JSON in and one line out, until stdin closes.

    python -m common.rewards.worker_main math|math-flexible|reasoning-gym|FILE.py:FUNCTION|model-cpu:FOLDER MEMORY_GIB

Only a model imports torch, so that the other workers start fast. Lines are ASCII, which keeps lone surrogates, NaN and
infinity.
"""

import importlib.util
import inspect
import json
import os
import resource
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType, NoneType
from typing import SupportsFloat, TextIO

from common.rewards.grading import Item, Result


def main(spec: str, memory_gib: float) -> None:
    requests, answers = take_pipes()
    threading.Thread(target=end_with, args=(os.getppid(),), daemon=True).start()
    send = lambda answer: print(json.dumps(answer, default=str), file=answers, flush=True)
    path, _, name = spec.rpartition(":")
    # Whatever a grader raises is sent and ends the process, because nobody knows which state it left behind.
    sys.excepthook = lambda kind, error, trace: send(describe(error, trace, path))
    if spec in ("math", "math-flexible"):
        grade = load_math("boxed" if spec == "math" else "flexible")
    elif spec == "reasoning-gym":
        grade = load_reasoning_gym()
    elif spec.startswith("model-cpu:"):
        grade = load_model(spec.removeprefix("model-cpu:"))
    else:
        grade = load_function(path, name)
    if not callable(grade):
        return send(f'has no function "{name}"')
    if complaint := refused_arguments(grade):
        return send(f'function "{name}" must take (items, lengths, truncated): {complaint}')
    # A larger allocation on top of what the imports have mapped raises MemoryError.
    mapped_bytes = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    limit = mapped_bytes + int(memory_gib * 2**30)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    requests.readline()
    send("")  # the worker is ready
    for line in requests:
        rows, lengths, truncated = json.loads(line)
        send(to_rows(grade([Item(**row) for row in rows], lengths, truncated), len(rows)))
    os.killpg(0, signal.SIGKILL)  # with whatever a grader has started


def take_pipes() -> tuple[TextIO, TextIO]:
    """Standard input and output, out of reach of a user's code: input() finds nothing, and print() goes to stderr."""
    requests, answers = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    return requests, answers


def load_math(mode: str) -> Callable:
    import math_verify  # noqa: F401  imported here, so that the deadline of the first item does not pay for it

    from common.rewards.math_grading import grade_math

    return lambda items, lengths, truncated: [grade_math(item.response, item.answer, mode) for item in items]


def load_reasoning_gym() -> Callable:
    import reasoning_gym  # noqa: F401  imported here, so that the deadline of the first item does not pay for it

    from common.rewards.reasoning_gym import reward

    return reward


def load_model(path: str) -> Callable:
    from common import placement
    from common.rewards.model import RewardModel

    placement.use_cores()
    model = RewardModel(path)
    model.load()
    return model


def load_function(path: str, name: str) -> Callable | None:
    """A function of a user's file, or None if it has none of that name. Raises what importing the file raises."""
    return getattr(import_file(Path(path), "reward"), name, None)


def import_file(path: Path, kind: str) -> ModuleType:
    """The module of a file that may be anywhere, under the name KIND_FILE. Raises what importing the file raises."""
    sys.path.append(str(path.parent))  # at the end: the file may import its neighbours, but they hide nothing
    spec = importlib.util.spec_from_file_location(f"{kind}_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up there
    spec.loader.exec_module(module)
    return module


def refused_arguments(grade: Callable) -> str:
    """Why a function cannot be called with the three arguments of a reward, or ""."""
    try:
        inspect.signature(grade).bind([], [], [])
    except TypeError as error:
        return str(error)
    except ValueError:  # a function without a signature, as some of those written in C
        pass
    return ""


def to_rows(results: Iterable, count: int) -> dict | list:
    """[score, acc, extracted, info] of each result, or a Failure. A plain number n means Result(n, n > 0)."""
    if not isinstance(results, Iterable):
        return {"kind": "wrong", "message": f"expected {count} results, got {type(results).__name__}"}
    number = lambda value: float(value) if isinstance(value, SupportsFloat) else value  # also of numpy and torch
    rows = []
    for i, result in enumerate(results):
        if isinstance(result, SupportsFloat):
            result = Result(float(result), float(result > 0))
        if not isinstance(result, Result) or {type(number(v)) for v in (result.score, result.acc)} - {float, NoneType}:
            message = f"expected a number or a Result, got {str(result)[:200]!r}, {type(result).__name__}"
            return {"kind": "wrong", "message": message, "row": i}
        if not isinstance(result.info or {}, dict):
            return {"kind": "wrong", "message": f"info is {str(result.info)[:200]!r}, expected a dictionary", "row": i}
        rows.append([number(result.score), number(result.acc), result.extracted, result.info or {}])
    return rows


def describe(error: BaseException, trace, path: str) -> dict:
    """A Failure with the part of the traceback that begins in the user's file."""
    if isinstance(error, MemoryError):
        return {"kind": "died", "message": "ran out of memory"}
    inside = trace
    while inside and inside.tb_frame.f_code.co_filename != os.path.abspath(path):
        inside = inside.tb_next
    return {"kind": "raised", "message": "".join(traceback.format_exception(None, error, inside or trace)).strip()}


def end_with(parent: int) -> None:
    """End this process, whatever it computes, once its parent is gone."""
    while os.getppid() == parent:
        time.sleep(1)
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]))
