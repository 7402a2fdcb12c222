"""The child's side of pool.py: for each request one line of JSON in and one line out, until stdin closes.

    python -m common.processes.child MODULE:LOADER ARGUMENTS

Nothing here imports torch, so that children start fast.
"""

import functools
import importlib
import importlib.util
import json
import os
import resource
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, is_dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, TextIO

from common.errors import BadInput

OUR_CODE = str(Path(__file__).parents[1])  # the folder common/
# The memory limit counts the stacks of all threads, so their size must be known.
STACK_BYTES = 8 * 2**20
Send = Callable[..., None]  # send(number, answer, failure=None)


@dataclass(frozen=True)
class Handler:
    """The result of a loader."""

    answer: Callable[[Any], Any]  # request -> answer. BadInput means that the user's code returned something wrong.
    memory_gib: float | None = None  # limit on top of what the imports take; None means no limit
    facts: Any = None  # facts that the parent should know about the program
    # How many requests are answered at the same time. 0: one after another, in the main thread, and an error ends the
    # process, because nobody knows which state it left behind.
    threads: int = 0


def main(loader: str, arguments: list) -> None:
    requests, answers = take_pipes()
    threading.Thread(target=end_with, args=(os.getppid(),), daemon=True).start()
    writing = threading.Lock()

    def send(number: int | None, answer: Any, failure: dict | None = None) -> None:
        # json writes ASCII, which keeps lone surrogates, and also NaN and infinity.
        line = json.dumps([number, answer, failure], default=str)
        with writing:
            print(line, file=answers, flush=True)

    def send_last_words(kind: type, error: BaseException, trace: Any) -> None:
        send(None, None, describe(error))

    # An error in the main thread ends the process. This tells the parent why.
    sys.excepthook = send_last_words
    module, _, function = loader.partition(":")
    handler = getattr(importlib.import_module(module), function)(*arguments)
    limit_memory(handler)
    # Request 0: the parent asks whether the program is ready.
    requests.readline()
    send(0, handler.facts)
    if handler.threads:
        answer_in_threads(handler, requests, send)
    else:
        for line in requests:
            number, request = json.loads(line)
            send(number, handler.answer(request))
    # The parent has closed stdin. End this process, and whatever it has started.
    os.killpg(0, signal.SIGKILL)


def take_pipes() -> tuple[TextIO, TextIO]:
    """Standard input and output, out of reach of a user's code: input() finds nothing, and print() goes to stderr."""
    requests = os.fdopen(os.dup(0))
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    return requests, answers


def answer_in_threads(handler: Handler, requests: TextIO, send: Send) -> None:
    """Answer requests side by side. An error fails its own request only, except MemoryError, which ends the process.

    Other requests may hold the memory, so whoever comes next would fail as well. A new process is empty.
    """

    def respond(number: int, request: Any) -> None:
        send(number, handler.answer(request))

    def report_error(number: int, future: Future) -> None:
        error = future.exception()
        if isinstance(error, MemoryError):
            send(None, None, describe(error))
            os.killpg(0, signal.SIGKILL)
        elif error is not None:
            send(number, None, describe(error))

    with ThreadPoolExecutor(handler.threads) as threads:
        for line in requests:
            number, request = json.loads(line)
            future = threads.submit(respond, number, request)
            future.add_done_callback(functools.partial(report_error, number))


def limit_memory(handler: Handler) -> None:
    """Let a larger allocation raise MemoryError. The limit is one on addresses, so mapped files and stacks count."""
    # macOS has no such limit: there a worker may use all memory.
    if handler.memory_gib is None or sys.platform == "darwin":
        return
    threading.stack_size(STACK_BYTES)
    mapped_pages = int(Path("/proc/self/statm").read_text().split()[0])
    mapped_bytes = mapped_pages * resource.getpagesize()
    limit = mapped_bytes + handler.threads * STACK_BYTES + int(handler.memory_gib * 2**30)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def describe(error: BaseException) -> dict[str, str]:
    """The fields of a pool.Failure. A traceback begins in the user's code."""
    if isinstance(error, MemoryError):
        return {"kind": "died", "message": "ran out of memory"}
    if isinstance(error, BadInput):
        return {"kind": "wrong", "message": str(error)}
    # The first frames are those of this file, of the loader and of Python's import system.
    trace = error.__traceback__
    while trace and trace.tb_frame.f_code.co_filename.startswith((OUR_CODE, "<frozen ")):
        trace = trace.tb_next
    lines = traceback.format_exception(None, error, trace)
    return {"kind": "raised", "message": "".join(lines).strip()}


def end_with(parent: int) -> None:
    """End this process, whatever it computes, once its parent is gone."""
    while os.getppid() == parent:
        time.sleep(1)
    os.killpg(0, signal.SIGKILL)


def import_file(path: Path, kind: str) -> ModuleType:
    """The module of a file that may be anywhere, under the name KIND_FILE. Raises what importing the file raises."""
    # At the end of the path: the file may import its neighbours, but they hide no other module.
    sys.path.append(str(path.parent))
    spec = importlib.util.spec_from_file_location(f"{kind}_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    # dataclasses look their module up there.
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def import_algorithm(path: Path) -> ModuleType:
    """The module of an algorithm's file, which may be anywhere. Raises BadInput, and what importing the file raises."""
    if path.suffix != ".py" or not path.is_file():
        raise BadInput(f"{path}: expected the file of an algorithm, such as algos/grpo.py")
    module = import_file(path.resolve(), "algorithm")
    if not (is_dataclass(getattr(module, "Args", None)) and callable(getattr(module, "main", None))):
        raise BadInput(f"{path}: has no dataclass Args and no function main(args), which each file in algos/ has")
    return module


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
