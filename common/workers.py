"""Graders that may hang, crash, eat all memory or raise: they run in worker processes that can be killed.

    MathReward("math"), UserReward("mine.py", "reward")        two rewards, called like any other
    WorkerPool                                                 the processes, common/worker_main.py

Each worker is a fresh `python -m common.worker_main` that speaks JSON over its stdin and stdout. Not multiprocessing:
its fork would copy a process with CUDA and vLLM in it, its spawn would import the training script, and with it torch,
in every worker. Threads wait for the workers, so a reward may be called from any thread.
"""

import contextlib
import json
import os
import queue
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain, groupby
from pathlib import Path
from typing import Any

from tqdm import tqdm

from common.errors import BadInput, RunFailed, warn
from common.grading import Item, Result
from common.math_grading import grade_by_string, last_answer

Task = tuple[list[Item], list[int], list[bool]]  # what a reward takes
START_SECONDS = 60.0  # for a worker's imports; sympy needs one, or ten on a busy machine
MANY_TIMEOUTS = 0.01  # of a call's responses: worth a warning, also because a policy can learn to provoke them


@dataclass(frozen=True)
class Failure:
    kind: str  # "start": no worker can be started; "timeout"; "died"; "raised"; "wrong": no numbers
    message: str  # of "raised" and "start": a traceback
    row: int = 0  # of the task, where it is known


class Worker:
    """One process; it starts with its first task, and again after a failure or after many tasks."""

    def __init__(self, spec: str, memory_gib: float, tasks: int):
        self.command = [sys.executable, "-P", "-m", "common.worker_main", spec, str(memory_gib)]
        self.tasks, self.answered, self.process = tasks, 0, None

    def start(self) -> Failure | None:
        root, path = str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH")
        quiet = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        self.process = subprocess.Popen(
            self.command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, **quiet, "PYTHONPATH": root + (os.pathsep + path if path else "")},
            start_new_session=True,  # killed as a group, with all that a grader has started
        )
        self.selector, self.answered = selectors.DefaultSelector(), 0
        self.selector.register(self.process.stdout, selectors.EVENT_READ)
        answer = self.read(START_SECONDS)
        if answer == "ready":
            return None
        self.stop()
        return answer if answer.kind == "start" else Failure("start", f"cannot be loaded: {answer.message}")

    def ask(self, task: Task, seconds: float) -> list[Result] | Failure:
        """The results of a task, or why there are none."""
        if self.process and (self.answered == self.tasks or self.selector.select(0)):  # a word unasked: it died
            self.stop()
        failure = self.start() if self.process is None else None
        if failure:
            return failure
        items, lengths, truncated = task
        request = json.dumps([[vars(item) for item in items], lengths, truncated], default=str)
        with contextlib.suppress(BrokenPipeError):  # read() says how it died
            self.process.stdin.write(request.encode() + b"\n")
            self.process.stdin.flush()
        answer = self.read(seconds)
        self.answered += 1
        if isinstance(answer, Failure):
            self.stop()
            return answer
        return [Result(*row) for row in answer]

    def read(self, seconds: float) -> Any:
        """The worker's next line; a Failure if it says so, is late, or has died."""
        end, line = time.monotonic() + seconds, b""
        while not line.endswith(b"\n"):
            if not self.selector.select(max(0.0, end - time.monotonic())):
                return Failure("timeout", f"no answer within {seconds:g} s")
            part = os.read(self.process.stdout.fileno(), 1 << 20)
            if not part:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self.process.wait(1.0)  # it closes its pipes first; killed now, it would lose its exit status
                return Failure("died", f"exit status {self.process.returncode}")
            line += part
        answer = json.loads(line)
        return Failure(**answer) if isinstance(answer, dict) else answer

    def stop(self) -> None:
        """Kill the process and its children."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.selector.close()
        self.process.stdout.close()
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        self.process = None


class WorkerPool:
    """Workers that grade tasks: all with the same grader, `spec`, see common/worker_main.py."""

    def __init__(self, spec: str, workers: int, deadline: float, memory_gib: float, tasks_per_worker: int = 1000):
        """workers: processes; 0: one for each core of this rank. deadline: seconds for each item of a task, a wall.

        memory_gib: for each worker, on top of its imports. tasks_per_worker: then a fresh one, for sympy's caches grow.
        """
        local_size = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        self.size = workers or max(1, len(os.sched_getaffinity(0)) // local_size)
        self.deadline, self.broken = deadline, None
        self.idle: queue.LifoQueue[Worker] = queue.LifoQueue()  # the last one used first: few tasks, few processes
        for _ in range(self.size):
            self.idle.put(Worker(spec, memory_gib, tasks_per_worker))

    def run(self, tasks: Sequence[Task], progress: str = "") -> list[list[Result] | Failure]:
        """The results of each task, in order. progress: the title of a bar, shown on rank 0 after 3 seconds."""
        threads, self.broken = ThreadPoolExecutor(self.size), None
        # Neighbours go to one worker: they often share a reference answer, which it then parses once.
        length = min(8, 1 + len(tasks) // (8 * self.size))
        blocks = [tasks[i : i + length] for i in range(0, len(tasks), length)]
        hidden = not progress or os.environ.get("RANK", "0") != "0"
        try:
            outcomes = chain.from_iterable(threads.map(self.run_block, blocks))
            return list(tqdm(outcomes, progress, len(tasks), leave=False, delay=3, disable=hidden))
        finally:
            threads.shutdown(cancel_futures=True)

    def run_block(self, tasks: Sequence[Task]) -> list[list[Result] | Failure]:
        worker = self.idle.get()
        try:
            return [self.broken or self.ask(worker, task) for task in tasks]
        finally:
            self.idle.put(worker)

    def ask(self, worker: Worker, task: Task) -> list[Result] | Failure:
        outcome = worker.ask(task, self.deadline * len(task[0]))
        if isinstance(outcome, Failure) and outcome.kind == "start":
            self.broken = outcome  # for the rest of this run: each try may take a minute
        return outcome

    def check(self) -> Failure | None:
        """Start one worker now; why it does not start."""
        worker = self.idle.get()
        try:
            return worker.start() if worker.process is None else None
        finally:
            self.idle.put(worker)

    def close(self) -> None:
        """End the workers. Without it they end with this process, however that ends."""
        workers = [self.idle.get() for _ in range(self.size)]
        for worker in workers:
            if worker.process:
                worker.stop()
            self.idle.put(worker)


def warn_of_timeouts(name: str, results: list[Result]) -> None:
    late = sum("timeout" in result.info for result in results)
    if late > MANY_TIMEOUTS * len(results):
        warn(f'reward "{name}" took too long on {late} of {len(results)} responses', "reward-slow")


class MathReward:
    """grade_math, one item a task: 10 s and 2 GiB each; an item that needs more is wrong. spec: math, math-flexible."""

    waits = True  # for other processes: common/reward_mixture.py calls it in a thread

    def __init__(self, spec: str = "math", workers: int = 0):
        self.spec, self.mode = spec, "boxed" if spec == "math" else "flexible"
        self.pool = WorkerPool(spec, workers, deadline=10.0, memory_gib=2.0)

    def __call__(self, items: list[Item], lengths: list[int], truncated: list[bool]) -> list[Result]:
        """Raises RunFailed if no worker can be started."""
        results = [grade_by_string(item.response, item.answer, self.mode) for item in items]
        rows = [row for row, result in enumerate(results) if result is None]  # those that need sympy
        questions = [(last_answer(items[row].response), items[row].answer) for row in rows]
        distinct = list(dict.fromkeys(questions))  # the responses to one prompt often agree
        tasks = [([Item("", said, answer)], [0], [False]) for said, answer in distinct]
        outcomes = dict(zip(distinct, self.pool.run(tasks, f"grading: {self.spec}")))
        for row, question in zip(rows, questions):
            outcome = outcomes[question]
            if not isinstance(outcome, Failure):
                results[row] = outcome[0]
            elif outcome.kind == "start":
                raise RunFailed(f'reward "{self.spec}" {outcome.message}', code="reward-failed")
            else:
                why = outcome.message.rpartition("\n")[2]
                results[row] = Result(0.0, 0.0, None, {"error": why} if outcome.kind == "raised" else {outcome.kind: 1})
        warn_of_timeouts(self.spec, results)
        return results


class UserReward:
    """A user's function (items, lengths, truncated) -> Results or numbers, called with all responses to one prompt."""

    waits = True  # for other processes: common/reward_mixture.py calls it in a thread

    def __init__(self, path: str, function: str, workers: int = 0, deadline: float = 10.0):
        """deadline: seconds for each response. Starts one worker, to see what is wrong. Raises BadInput."""
        if not Path(path).is_file():
            raise BadInput(f"--reward: {path}: file not found")
        self.name = f"{path}:{function}"
        self.pool = WorkerPool(self.name, workers, deadline, memory_gib=8.0)
        failure = self.pool.check()
        if failure:
            raise BadInput(f"--reward: {path} {failure.message}")

    def __call__(self, items: list[Item], lengths: list[int], truncated: list[bool]) -> list[Result]:
        """Rows whose worker was late or died have score None. Raises BadInput or RunFailed if the function is wrong."""
        groups = [list(rows) for _, rows in groupby(range(len(items)), lambda row: items[row].prompt)]
        tasks = [tuple([column[row] for row in rows] for column in (items, lengths, truncated)) for rows in groups]
        results: list[Result] = []
        for (group, _, _), outcome in zip(tasks, self.pool.run(tasks, f"grading: {self.name}")):
            results += self.checked(outcome, group, len(results))
        warn_of_timeouts(self.name, results)
        return results

    def checked(self, outcome: list[Result] | Failure, items: list[Item], first: int) -> list[Result]:
        """The results of one task, whose first item is row `first`. Raises BadInput or RunFailed."""
        rows = f"row {first}" if len(items) == 1 else f"rows {first} to {first + len(items) - 1}"
        if isinstance(outcome, list):
            if len(outcome) != len(items):
                raise BadInput(f'reward "{self.name}" returned {len(outcome)} results for {len(items)} items')
            return outcome
        if outcome.kind in ("timeout", "died"):
            return [Result(None, None, None, {outcome.kind: 1})] * len(items)
        if outcome.kind == "start":
            raise RunFailed(f'reward "{self.name}" {outcome.message}', code="reward-failed")
        if outcome.kind == "wrong":
            raise BadInput(f'reward "{self.name}": row {first + outcome.row}: {outcome.message}')
        about = f"prompt {items[0].prompt[:200]!r}, response {items[0].response[:200]!r}"
        said = f'reward "{self.name}" raised an error for {rows}, {about}:\n{outcome.message}'
        raise RunFailed(said, code="reward-failed")
