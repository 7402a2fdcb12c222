"""Killable worker processes, for code that may hang, crash, eat all memory or raise. This is the parent's side.

Reward functions (common/rewards/workers.py), environments (common/rollout/environments/workers.py) and the generators
of reasoning-gym (common/data/reasoning_gym.py) run in such processes, and never in the trainer itself:

    trainer                                            child process (child.py)

    worker = Worker(Program(name, "module:load", [3]))
    worker.ask(request, seconds=10)
        starts a process if there is none    ---->     handler = module.load(3), then sets the memory limit
                                             <----     [0, handler.facts, null]       "I am ready"
        [1, request]                         ---->     handler.answer(request)
        returns the answer                   <----     [1, answer, null]
        [2, request]                         ---->     hangs
        kills the process after 10 s
        returns Failure("timeout", ...)                the next ask() starts a new process

- A message is one line of JSON. It has a number because a child may answer several requests at once, in any order.
- A request has an answer, or else a Failure of one of four kinds: the child was too late ("timeout"), its process ended
  ("died"), the code raised an error ("raised"), or it returned something of the wrong kind ("wrong").
- When a process ends, all its open requests get the same Failure, because nobody knows which of them was guilty. Only
  environments have several open at once. They try the lost ones again, each alone (see their workers.py).
- A process that cannot be loaded is an error of the user's code: ask() raises RunFailed, now and on every later call.
- A child ends with its parent, even if the parent is killed, and takes along all processes that it has started.

Why not multiprocessing? Its fork copies a process with CUDA and vLLM in it. Its spawn imports the training script, and
with it torch, into every worker.
"""

import contextlib
import json
import math
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from common.cores import cores_of_this_rank
from common.errors import RunFailed

ROOT = Path(__file__).parents[2]
# For the imports of a child. sympy needs one second, or ten on a busy machine.
START_SECONDS = 60.0
# For the end of a process that has been killed.
STOP_SECONDS = 5.0


@dataclass(frozen=True)
class Failure:
    """Why a request has no answer."""

    kind: str  # "timeout", "died", "raised" or "wrong"
    message: str  # a traceback if kind is "raised"


@dataclass(frozen=True)
class Program:
    """The code that a child process runs."""

    name: str  # how an error message calls it
    loader: str  # "module:function"; the child calls it once, and it returns a child.Handler
    arguments: list  # arguments of the loader, as JSON
    error_code: str  # code of the RunFailed if it cannot be loaded, see docs/errors.md
    start_seconds: float = START_SECONDS  # limit for the loader
    # Afterwards the process is replaced. Only for workers with one request at a time: others would be lost.
    max_requests: float = math.inf
    variables: dict[str, str] = field(default_factory=dict)  # more environment variables


class Child:
    """One process, from its start to its end. Any thread may call ask()."""

    def __init__(self, program: Program):
        self.process = spawn(program)
        # Two locks, because a write blocks while the pipe is full. Answers must be read all the same.
        self.writing = threading.Lock()
        self.lock = threading.Lock()  # guards the next three
        self.requests = 0  # how many there were, and so the number of the next one
        self.waiting: dict[int, Future] = {}  # open requests by their number
        self.failure: Failure | None = None  # why the process ends or has ended
        self.reader = threading.Thread(target=self.read_answers, daemon=True)
        self.reader.start()

    def ask(self, request: Any, seconds: float) -> Any:
        """The answer to a request, or a Failure."""
        future: Future = Future()
        with self.lock:
            if self.failure is not None:
                return self.failure
            number = self.requests
            self.requests += 1
            self.waiting[number] = future
        # The timer runs before the request is written. A child that hangs does not read, and then the pipe fills up.
        timer = threading.Timer(seconds, self.expire, [number, seconds])
        timer.daemon = True
        timer.start()
        # If the process has ended, the write fails, and read_answers() finds out why.
        with self.writing, contextlib.suppress(OSError, ValueError):
            self.process.stdin.write(json.dumps([number, request], default=str) + "\n")
            self.process.stdin.flush()
        answer = future.result()
        timer.cancel()
        return answer

    def expire(self, number: int, seconds: float) -> None:
        """The time of a request is up: kill the process, unless the answer came in the last moment."""
        failure = Failure("timeout", f"no answer within {seconds:g} s")
        with self.lock:
            if number not in self.waiting:
                return
            # Before the kill: read_answers() may notice the end first, and would say that the process died.
            self.failure = self.failure or failure
        self.kill()
        self.fail_open_requests(failure)

    def read_answers(self) -> None:
        """Hand out answers until the process ends. Then all open requests fail."""
        # A process that writes anything but answers is out of its mind. It is killed below.
        with contextlib.suppress(ValueError, TypeError, KeyError, RecursionError):
            for line in self.process.stdout:
                number, answer, failure = json.loads(line)
                result = answer if failure is None else Failure(**failure)
                with self.lock:
                    # Without a number these are the last words of a process: why it ends.
                    if number is None:
                        self.failure = result
                    else:
                        self.waiting.pop(number).set_result(result)
        # The pipe closes a moment before the process has an exit status.
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(1.0)
        self.kill()
        self.fail_open_requests(Failure("died", f"exit status {self.process.wait()}"))
        self.process.stdout.close()
        with self.writing, contextlib.suppress(OSError):
            self.process.stdin.close()

    def fail_open_requests(self, failure: Failure) -> None:
        """Answer all open requests, and later ones, with a failure. The first failure counts."""
        with self.lock:
            self.failure = self.failure or failure
            for future in self.waiting.values():
                future.set_result(self.failure)
            self.waiting.clear()

    def kill(self) -> None:
        """Kill the process, and all processes that it has started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def stop(self) -> None:
        """Kill the process, and wait until it has ended."""
        # If its exit status has been read, another process may have its number by now.
        if self.process.returncode is None:
            self.kill()
        # A process that has left the group lives on. It may hold the pipe open, so do not wait for ever.
        self.reader.join(STOP_SECONDS)


def spawn(program: Program) -> subprocess.Popen:
    """Start a child with pipes for text, and without a GPU."""
    python_path = [str(ROOT), os.environ.get("PYTHONPATH")]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONPATH": os.pathsep.join(filter(None, python_path)),
        **program.variables,
    }
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "common.processes.child", program.loader, json.dumps(program.arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
        # This makes a process group, which can be killed as a whole, with all that a user's code has started.
        start_new_session=True,
    )


class Worker:
    """A child that is started by the first request, and replaced when it has ended. Any thread may call ask()."""

    def __init__(self, program: Program):
        self.program = program
        self.child: Child | None = None
        self.facts: Any = None  # facts that the handler tells about itself
        self.complaint = ""  # why the program cannot be loaded
        self.changed = threading.Condition()  # guards everything here
        self.open_requests = 0
        # Requests that the child has at the same time. The others wait, and their time does not run yet.
        self.max_open = 1

    def ask(self, request: Any, seconds: float) -> Any:
        """The answer to a request, or a Failure. Raises RunFailed if the program cannot be loaded.

        seconds: limit for the answer, without the start of the process.
        """
        with self.changed:
            while self.open_requests >= self.max_open:
                self.changed.wait()
            child = self.running_child()
            self.open_requests += 1
        try:
            return child.ask(request, seconds)
        finally:
            with self.changed:
                self.open_requests -= 1
                self.changed.notify_all()

    def start(self) -> Any:
        """Start the process, unless it is running. Returns the facts of its handler. Raises RunFailed."""
        with self.changed:
            self.running_child()
        return self.facts

    def running_child(self) -> Child:
        """The child, after a start if there is none. Raises RunFailed. The caller holds the lock."""
        child = self.child
        # The process may have ended before its reader has noticed.
        if child and (child.failure or child.process.poll() is not None or child.requests > self.program.max_requests):
            self.stop()
        if self.child is None and not self.complaint:
            child = Child(self.program)
            # Request 0 has no content. The child answers when it is ready.
            facts = child.ask(None, self.program.start_seconds)
            if isinstance(facts, Failure):
                self.complaint = f"{self.program.name} cannot be loaded: {facts.message}"
            else:
                self.child = child
                self.facts = facts
        if self.complaint:
            raise RunFailed(self.complaint, code=self.program.error_code)
        return self.child

    def stop(self) -> None:
        """End the process. The next request starts one again."""
        if self.child:
            self.child.stop()
            self.child = None


class Pool:
    """Workers that run the same program. Each has one request at a time. Any thread may call the methods."""

    def __init__(self, program: Program, size: int = 0):
        """size: number of workers; 0 means one for each core of this rank."""
        self.program = program
        self.size = size or cores_of_this_rank()
        # The worker that was used last is taken first, so few requests start few processes.
        self.idle: queue.LifoQueue[Worker] = queue.LifoQueue()
        for _ in range(self.size):
            self.idle.put(Worker(program))

    @contextlib.contextmanager
    def idle_worker(self) -> Iterator[Worker]:
        worker = self.idle.get()
        try:
            yield worker
        finally:
            self.idle.put(worker)

    def start(self) -> Any:
        """Start one worker, to see whether the program can be loaded. Returns its facts. Raises RunFailed."""
        with self.idle_worker() as worker:
            return worker.start()

    def ask(self, request: Any, seconds: float) -> Any:
        """The answer of the next idle worker, or a Failure. Raises RunFailed if the program cannot be loaded."""
        with self.idle_worker() as worker:
            return worker.ask(request, seconds)

    def map(self, call: Callable, tasks: Iterable) -> Iterator:
        """call(task) for each task, in order, from one thread for each worker.

        Raises the first error that call() raises. Tasks that have not begun by then are dropped.
        """
        with ThreadPoolExecutor(self.size) as threads:
            yield from threads.map(call, tasks)

    def close(self) -> None:
        """End all processes."""
        # A busy worker becomes idle when its request has an answer, or has timed out.
        workers = [self.idle.get() for _ in range(self.size)]
        for worker in workers:
            worker.stop()
            self.idle.put(worker)
