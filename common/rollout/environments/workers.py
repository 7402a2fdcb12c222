"""Processes that hold the environments of a run's episodes, and can be killed.

A worker steps many episodes at once, in threads, because most environments wait for something. How many follows from
how long a step computes, because threads share one core. If one hangs, its whole process is killed; the other episodes
begin again in the next process and take all their steps once more.
"""

import contextlib
import json
import os
import signal
import subprocess
import threading
from concurrent.futures import Future
from dataclasses import dataclass

from common.errors import BadInput
from common.rewards.workers import START_SECONDS, Failure, spawn
from common.rollout.environments.worker_main import THREADS

UNTRIED = 4  # episodes at once in a process that has not answered yet
COMPUTING = 0.25  # share of the limit for a call that all calls at once may compute, one after another

LOST = object()  # answer to a request whose process ended before it was finished


@dataclass(frozen=True)
class Facts:
    """Facts about the class of environments, which a worker sends when it is ready."""

    role: str  # role of an observation in the chat template
    seconds: float  # limit for one call
    failed_score: float
    tools: list[dict]  # schemas for the chat template
    scores: bool  # whether the class has score()


class Worker:
    """One process, common/rollout/environments/worker_main.py. Any thread may call ask()."""

    def __init__(self, spec: str, call_format: str):
        self.words = (spec, call_format)
        self.process, self.facts, self.complaint = None, None, ""
        self.changed = threading.Condition()  # guards what follows; nobody writes to a pipe while holding it
        self.waiting: dict[int, tuple[str, Future]] = {}  # number of a request -> its episode, and its answer
        self.number = 0
        self.places = UNTRIED  # episodes that may step at the same time
        self.suspects: set[str] = set()  # episodes of a process that ended; they are asked again, one at a time
        self.known: set[str] = set()  # episodes that the process has begun
        self.late: subprocess.Popen | None = None  # the process that was killed for being late
        self.writing = threading.Lock()

    def start(self) -> str:
        """Start the process and read its facts. Returns why it does not start, or "". The caller holds the lock."""
        # Each thread would reserve 64 MiB of addresses for an arena of its own, which count towards memory_gib.
        process = spawn("common.rollout.environments.worker_main", *self.words, MALLOC_ARENA_MAX="2")
        timer = threading.Timer(START_SECONDS, kill, [process])
        timer.start()
        line = process.stdout.readline()
        timer.cancel()
        if not line.startswith("{"):
            kill(process)
            process.communicate()
            self.complaint = f"cannot be loaded: {json.loads(line) if line else 'its process ended'}"
            return self.complaint
        self.process, self.facts, self.known = process, Facts(**json.loads(line)), set()
        threading.Thread(target=self.read, args=[process], daemon=True).start()
        return ""

    def ask(self, key: str, problem: dict, texts: list[str], ends: bool) -> dict:
        """The answer to the turns of an episode; {"failure": ...} if the environment raised, hung or died."""
        while True:
            with self.changed:
                self.changed.wait_for(lambda: len(self.waiting) < (1 if self.suspects else self.places))
                if self.complaint or (not self.process and self.start()):
                    return {"failure": {"kind": "died", "message": self.complaint}}
                self.number += 1
                number, process, answer = self.number, self.process, Future()
                self.waiting[number] = key, answer
                calls = 1 if key in self.known else 1 + len(texts)  # a new process takes the earlier turns again
                self.known.add(key)
            request = json.dumps([number, key, problem, texts, ends], default=str)
            # The pipe is full if the process hangs. Then the one that hangs is late, and killing it ends this write.
            with self.writing, contextlib.suppress(OSError):
                process.stdin.write(request + "\n")
                process.stdin.flush()
            try:
                found = answer.result(self.facts.seconds * calls)
            except TimeoutError:
                self.late = process
                kill(process)
                found = answer.result()
            if found is not LOST:
                if found.get("observation") is None:  # the episode has ended
                    self.known.discard(key)
                return found

    def read(self, process: subprocess.Popen) -> None:
        """Hand out the answers of a process until it ends. Then its only request is guilty, or all are asked again."""
        for count, line in enumerate(process.stdout, start=1):
            try:
                number, found, computed = json.loads(line)
            except (ValueError, TypeError):  # the last words of its main thread
                break
            with self.changed:
                together = COMPUTING * self.facts.seconds * count / max(computed, 1e-9)
                self.places = max(1, min(THREADS, int(together)))
                key, answer = self.waiting.pop(number)
                self.suspects.discard(key)
                self.changed.notify_all()
            answer.set_result(found)
        kill(process)  # with all that its environments have started
        status = process.wait()
        failure = {"kind": "died", "message": f"exit status {status}"}
        if self.late is process:
            failure = {"kind": "timeout", "message": f"no answer within {self.facts.seconds:g} s"}
        with self.changed:
            lost, self.waiting, self.process = list(self.waiting.values()), {}, None
            guilty = len(lost) == 1
            keys = {key for key, _ in lost}
            self.suspects = self.suspects - keys if guilty else self.suspects | keys
            self.changed.notify_all()
        for _, answer in lost:
            answer.set_result({"failure": failure} if guilty else LOST)


def kill(process: subprocess.Popen) -> None:
    """Kill a process and all that its environments have started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


class WorkerPool:
    """The workers of one rank. An episode stays with its worker."""

    def __init__(self, spec: str, call_format: str):
        """Starts one worker, to see whether the class can be loaded. Raises BadInput."""
        ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        count = max(1, len(os.sched_getaffinity(0)) // ranks)
        self.workers = [Worker(spec, call_format) for _ in range(count)]
        complaint = self.workers[0].start()
        if complaint:
            raise BadInput(f"--environment {spec}: {complaint}")
        self.facts: Facts = self.workers[0].facts

    def ask(self, key: int, problem: dict, texts: list[str], ends: bool) -> dict | Failure:
        """The answer of the environment of episode `key` to the turns so far; a Failure without one."""
        answer = self.workers[key % len(self.workers)].ask(str(key), problem, texts, ends)
        return Failure(**answer["failure"]) if "failure" in answer else answer

    def close(self) -> None:
        """Kill all processes. The next ask() starts one again."""
        for worker in self.workers:
            if worker.process:
                kill(worker.process)
