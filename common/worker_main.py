"""One worker process of common/workers.py: one JSON line in, one JSON line out, for each task, until stdin closes.

    python -m common.worker_main math|math-flexible|FILE.py:FUNCTION|model-cpu:FOLDER MEMORY_GIB

Imports no torch but for a model, so that starting one is quick. Lines are ASCII: lone surrogates survive, and so do NaN
and infinity.
"""

import importlib.util
import json
import os
import resource
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from types import NoneType
from typing import SupportsFloat

from common.grading import Item, Result
from common.math_grading import grade_math

MATH = ("math", "math-flexible")


def main(spec: str, memory_gib: float) -> None:
    requests, answers = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # the two pipes are ours alone: input() of a grader finds nothing,
    os.dup2(2, 1)  # and what it prints goes to stderr
    threading.Thread(target=end_with, args=(os.getppid(),), daemon=True).start()
    send = lambda answer: print(json.dumps(answer, default=str), file=answers, flush=True)
    # Whatever a grader raises is told and ends the process: what state it left behind, nobody knows.
    path, _, name = ("", "", spec) if spec in MATH else spec.rpartition(":")
    sys.excepthook = partial(tell, send, path)
    if spec in MATH:
        grade = load_math(spec)
    elif spec.startswith("model-cpu:"):
        grade = load_model(spec.removeprefix("model-cpu:"))
    else:
        grade = load_function(path, name)
    if not callable(grade):
        return send({"kind": "start", "message": f'has no function "{name}"'})
    limit_memory(memory_gib)
    send("ready")
    for line in requests:
        rows, lengths, truncated = json.loads(line)
        send(to_rows(grade([Item(**row) for row in rows], lengths, truncated), len(rows)))
    os.killpg(0, signal.SIGKILL)  # with whatever a grader has started


def load_math(spec: str) -> Callable:
    import math_verify  # noqa: F401  now, not within the deadline of the first item

    mode = "boxed" if spec == "math" else "flexible"
    return lambda items, lengths, truncated: [grade_math(item.response, item.answer, mode) for item in items]


def load_model(path: str) -> Callable:
    from common import placement, reward_model  # torch and transformers

    placement.use_cores()
    model = reward_model.RewardModel(path, trust_pickle=True)  # checked by who started this process
    model.load()
    return model


def load_function(path: str, name: str) -> Callable | None:
    """A function of a user's file; None if it has none of that name. Raises what importing the file raises."""
    sys.path.append(str(Path(path).parent))  # last: the file may import its neighbours, but they hide nothing
    spec = importlib.util.spec_from_file_location(f"reward_{Path(path).stem}", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up there
    spec.loader.exec_module(module)
    return getattr(module, name, None)


def to_rows(results: Iterable, count: int) -> dict | list:
    """[score, acc, extracted, info] of each result; a plain number n is (n, n > 0). Else what is wrong, and where."""
    if not isinstance(results, Iterable):
        return {"kind": "wrong", "message": f"expected {count} results, got {type(results).__name__}"}
    number = lambda value: float(value) if isinstance(value, SupportsFloat) else value  # of numpy and torch, too
    rows = []
    for i, result in enumerate(results):
        if isinstance(result, SupportsFloat):
            result = Result(float(result), float(result > 0))
        if not isinstance(result, Result) or {type(number(v)) for v in (result.score, result.acc)} - {float, NoneType}:
            message = f"expected a number or a Result, got {str(result)[:200]!r}, {type(result).__name__}"
            return {"kind": "wrong", "message": message, "row": i}
        rows.append([number(result.score), number(result.acc), result.extracted, result.info])
    return rows


def tell(send: Callable, path: str, error_type: type, error: BaseException, trace) -> None:
    """Send an error instead of an answer, with the traceback from the user's file on."""
    if issubclass(error_type, MemoryError):
        return send({"kind": "died", "message": "ran out of memory"})
    inside = trace
    while inside and inside.tb_frame.f_code.co_filename != os.path.abspath(path):
        inside = inside.tb_next
    send({"kind": "raised", "message": "".join(traceback.format_exception(error_type, error, inside or trace)).strip()})


def limit_memory(gib: float) -> None:
    """An allocation of more than `gib` on top of what the imports have mapped raises MemoryError."""
    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    limit = mapped + int(gib * 2**30)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def end_with(parent: int) -> None:
    """End this process, whatever it computes, once its parent is gone."""
    while os.getppid() == parent:
        time.sleep(1)
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]))
