"""Graders that may hang, crash, eat all memory or raise. They run in worker processes that can be killed.

    MathReward("math"), UserReward("mine.py", "reward")        two rewards, called like any other
    WorkerPool                                                 the processes, common/rewards/worker_main.py

Each worker is a fresh `python -m common.rewards.worker_main` that speaks JSON over its stdin and stdout. The fork of
multiprocessing would copy a process with CUDA and vLLM in it, and its spawn would import the training script, and with
it torch, into every worker. Threads wait for the workers, so a reward may be called from any thread.
"""

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from common.errors import BadInput, RunFailed, warn
from common.rewards.grading import Item, Result
from common.rewards.math_grading import grade_by_string, last_answer

Task = tuple[list[Item], list[int], list[bool]]  # arguments of a reward
TRY_SECONDS = 2.0  # for each response when a reward is tried before the run
START_SECONDS = 60.0  # for the imports of a worker: sympy needs one second, or ten on a busy machine
MAX_TIMEOUT_SHARE = 0.01  # more timeouts are worth a warning, also because a policy can learn to provoke them


@dataclass(frozen=True)
class Failure:
    kind: str  # "timeout", "died", "raised" or "wrong": the results are no numbers
    message: str  # a traceback if kind is "raised"
    row: int = 0  # row in the task, where it is known


def spawn(module: str, *words: str, **variables: str) -> subprocess.Popen:
    """A process that runs a module of this repository, with pipes for text, and without a GPU.

    variables: more environment variables.
    """
    root, path = str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH")
    limits = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.Popen(
        [sys.executable, "-P", "-m", module, *words], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env={**os.environ, **limits, **variables, "PYTHONPATH": root + (os.pathsep + path if path else "")},
        start_new_session=True,  # the group is killed as a whole, with all that a user's code has started
    )  # fmt: skip


class Worker:
    """One process. It starts with its first task, and again after a failure or after many tasks."""

    def __init__(self, spec: str, memory_gib: float, max_tasks: int, start_seconds: float):
        self.spec, self.memory_gib, self.max_tasks, self.process = spec, memory_gib, max_tasks, None
        self.start_seconds = start_seconds

    def start(self) -> str:
        """Returns why the worker does not start, or ""."""
        self.answered, self.process = 0, spawn("common.rewards.worker_main", self.spec, str(self.memory_gib))
        answer = self.exchange("", self.start_seconds)
        if isinstance(answer, Failure):
            return f"cannot be loaded: {answer.message}"
        if answer:
            self.stop()
        return answer

    def ask(self, task: Task, seconds: float) -> list[Result] | Failure:
        """The results of a task, or the reason why there are none. Raises RunFailed if the worker does not start."""
        if self.process and (self.answered == self.max_tasks or self.process.poll() is not None):
            self.stop()
        complaint = "" if self.process else self.start()
        if complaint:
            raise RunFailed(f'reward "{self.spec}" {complaint}', code="reward-failed")
        items, lengths, truncated = task
        answer = self.exchange(json.dumps([[vars(item) for item in items], lengths, truncated], default=str), seconds)
        self.answered += 1
        return answer if isinstance(answer, Failure) else [Result(*row) for row in answer]

    def exchange(self, request: str, seconds: float) -> Any:
        """Send a line and wait for one. A Failure stops the process."""
        began, timer = time.monotonic(), threading.Timer(seconds, self.kill)
        timer.daemon = True
        timer.start()  # killing the process ends its output, so that readline() returns
        with contextlib.suppress(BrokenPipeError):  # the end of the output tells how it died
            self.process.stdin.write(request + "\n")
            self.process.stdin.flush()
        line = self.process.stdout.readline()
        timer.cancel()
        timer.join()
        if time.monotonic() - began >= seconds:
            answer = Failure("timeout", f"no answer within {seconds:g} s")
        elif line.endswith("\n"):
            answer = json.loads(line)
            answer = Failure(**answer) if isinstance(answer, dict) else answer
        else:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(1.0)  # pipes are closed a moment before there is an exit status
            answer = Failure("died", f"exit status {self.process.returncode}")
        if isinstance(answer, Failure):
            self.stop()
        return answer

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def stop(self) -> None:
        """Kill the process and its children, and close the pipes."""
        self.kill()
        self.process.communicate()
        self.process = None


class WorkerPool:
    """Workers with the same grader, `spec` of common/rewards/worker_main.py. They end with this process."""

    def __init__(
        self, spec: str, workers: int, item_seconds: float, memory_gib: float, tasks_per_worker: int = 1000,
        start_seconds: float = START_SECONDS,
    ):  # fmt: skip
        """workers: number of processes, 0 for one on each core of this rank. item_seconds: limit for each item.

        memory_gib: limit for each worker, on top of its imports. A worker is replaced after tasks_per_worker tasks,
        because the caches of sympy grow. start_seconds: limit for the imports of a worker, and for what it reads.
        """
        local_size = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        self.size = workers or max(1, len(os.sched_getaffinity(0)) // local_size)
        self.item_seconds = item_seconds
        self.idle: queue.LifoQueue[Worker] = queue.LifoQueue()  # the latest first: few tasks start few processes
        for _ in range(self.size):
            self.idle.put(Worker(spec, memory_gib, tasks_per_worker, start_seconds))

    def run(
        self, tasks: Sequence[Task], error_of: Callable = lambda index, outcome: None
    ) -> list[list[Result] | Failure]:
        """The results of each task, in order. Raises RunFailed if a worker does not start.

        error_of(index, outcome) is called with each outcome as soon as it is there. An error that it returns is raised,
        and no other task begins.
        """
        # Neighbours go to one worker: they often share a reference answer, which it then parses once.
        length = min(8, 1 + len(tasks) // (8 * self.size))
        blocks = [tasks[i : i + length] for i in range(0, len(tasks), length)]
        given_up = threading.Event()

        def run_block(first: int, tasks: Sequence[Task]) -> list[list[Result] | Failure]:
            outcomes = []
            with self.worker() as worker:
                for index, task in enumerate(tasks, first):
                    if given_up.is_set():
                        break
                    outcomes.append(worker.ask(task, self.item_seconds * len(task[0])))
                    if error := error_of(index, outcomes[-1]):
                        given_up.set()
                        raise error
            return outcomes

        with ThreadPoolExecutor(self.size) as threads:
            found = threads.map(run_block, range(0, len(tasks), length), blocks)
            return [outcome for outcomes in found for outcome in outcomes]

    def check(self) -> str:
        """Start one worker. Returns why it does not start, or ""."""
        with self.worker() as worker:
            return worker.start()

    @contextlib.contextmanager
    def worker(self):
        worker = self.idle.get()
        try:
            yield worker
        finally:
            self.idle.put(worker)

    def close(self) -> None:
        for worker in [self.idle.get() for _ in range(self.size)]:
            if worker.process:
                worker.stop()
            self.idle.put(worker)


def warn_of_timeouts(name: str, results: list[Result]) -> None:
    late = sum("timeout" in result.info for result in results)
    if late > MAX_TIMEOUT_SHARE * len(results):
        warn(f'reward "{name}" took too long on {late} of {len(results)} responses', "reward-slow")


class MathReward:
    """grade_math, one item a task. An item that needs more than 10 s or 2 GiB is wrong. spec: math, math-flexible."""

    waits = True  # mixture.py calls it in a thread, because it waits for other processes

    def __init__(self, spec: str = "math", workers: int = 0):
        self.spec, self.mode = spec, "boxed" if spec == "math" else "flexible"
        self.pool = WorkerPool(spec, workers, item_seconds=10.0, memory_gib=2.0)

    def __call__(self, items: list[Item], lengths: list[int], truncated: list[bool]) -> list[Result]:
        """Raises RunFailed if no worker can be started."""
        results = [grade_by_string(item.response, item.answer, self.mode) for item in items]
        rows = [row for row, result in enumerate(results) if result is None]  # rows that need sympy
        questions = [(last_answer(items[row].response), items[row].answer) for row in rows]
        distinct = list(dict.fromkeys(questions))  # responses to one prompt often agree
        outcomes = self.pool.run([([Item("", said, answer)], [0], [False]) for said, answer in distinct])
        answers = dict(zip(distinct, outcomes))
        for row, question in zip(rows, questions):
            outcome = answers[question]
            if isinstance(outcome, list):
                results[row] = outcome[0]
            else:
                why = outcome.message.rpartition("\n")[2]
                results[row] = Result(0.0, 0.0, None, {"error": why} if outcome.kind == "raised" else {outcome.kind: 1})
        warn_of_timeouts(self.spec, results)
        return results


class UserReward:
    """A user's function (items, lengths, truncated) -> Results or numbers, called with all responses to one prompt."""

    waits = True  # mixture.py calls it in a thread, because it waits for other processes

    def __init__(self, path: str, function: str, workers: int = 0, item_seconds: float = 10.0):
        """Starts one worker to see whether the file can be loaded. Raises BadInput."""
        if not Path(path).is_file():
            raise BadInput(f"--reward: {path}: file not found")
        self.name = f"{path}:{function}"
        self.trying = False  # the run has not begun
        self.was_late = False  # the first late answer of the run has been reported
        self.pool = WorkerPool(self.name, workers, item_seconds, memory_gib=8.0)
        complaint = self.pool.check()
        if complaint:
            raise BadInput(f"--reward: {path} {complaint}")

    def __call__(self, items: list[Item], lengths: list[int], truncated: list[bool]) -> list[Result]:
        """Rows whose worker was late or died have no score. Raises BadInput or RunFailed if the function is wrong."""
        results = self.call(items, lengths, truncated)
        warn_of_timeouts(self.name, results)
        return results

    def try_out(self, items: list[Item], lengths: list[int], truncated: list[bool]) -> list[Result]:
        """Call the function before anything is loaded. Raises BadInput if it is wrong, raises, hangs or dies."""
        usual, self.pool.item_seconds, self.trying = self.pool.item_seconds, TRY_SECONDS, True
        try:
            return self.call(items, lengths, truncated)
        except RunFailed as failure:
            raise BadInput(f"--reward: {failure}") from None
        finally:
            self.pool.item_seconds, self.trying = usual, False

    def call(self, items: list[Item], lengths: list[int], truncated: list[bool]) -> list[Result]:
        """One task for each prompt. The first one that is wrong ends the others; the first that is late is reported."""
        groups = [list(rows) for _, rows in groupby(range(len(items)), lambda row: items[row].prompt)]
        tasks = [tuple([column[row] for row in rows] for column in (items, lengths, truncated)) for rows in groups]

        def error_of(index: int, outcome: list[Result] | Failure) -> BadInput | RunFailed | None:
            rows, group = groups[index], tasks[index][0]
            shown = f"prompt {group[0].prompt[:200]!r}, response {group[0].response[:200]!r}"
            if isinstance(outcome, list):
                said = f'reward "{self.name}" returned {len(outcome)} results for {len(group)} items'
                return None if len(outcome) == len(group) else BadInput(said)
            if outcome.kind == "wrong":
                return BadInput(f'reward "{self.name}": row {rows[outcome.row]}: {outcome.message}')
            if outcome.kind == "raised":
                where = f"rows {rows[0]} to {rows[-1]}, {shown}"
                said = f'reward "{self.name}" raised an error for {where}:\n{outcome.message}'
                return RunFailed(said, code="reward-failed")
            if self.trying:
                return BadInput(f'--reward: reward "{self.name}" {outcome.kind}: {outcome.message}, {shown}')
            if outcome.kind == "timeout" and not self.was_late:
                self.was_late = True
                warn(f'reward "{self.name}": {outcome.message} to {len(group)} responses, {shown}', "reward-slow")
            return None

        results: list[Result] = []
        for rows, outcome in zip(groups, self.pool.run(tasks, error_of)):
            failed = isinstance(outcome, Failure)
            results += [Result(None, None, None, {outcome.kind: 1})] * len(rows) if failed else outcome
        return results
