"""Processes that hold the environments of a run's episodes, and can be killed.

A worker steps many episodes at once, in threads, because most environments wait for something. If one hangs, its whole
process is killed; the other episodes begin again in the next process and take all their steps once more.
"""

import contextlib
import json
import os
import signal
import subprocess
import threading
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from common.errors import BadInput, RunFailed
from common.rewards.workers import START_SECONDS, Failure, spawn
from common.rollout.environments.worker_main import THREADS

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
        self.process, self.facts = None, None
        self.changed = threading.Condition()
        self.waiting: dict[int, Future] = {}  # number of a request -> its answer
        self.number = 0
        self.alone = False  # a process has crashed: from now on one request at a time, so that the guilty one is known
        self.killed: set[int] = set()  # processes that were killed here, by their ids

    def start(self) -> str:
        """Start the process and read its facts. Returns why it does not start, or "". The caller holds the lock."""
        process = spawn("common.rollout.environments.worker_main", *self.words)
        timer = threading.Timer(START_SECONDS, self.kill, [process])
        timer.start()
        line = process.stdout.readline()
        timer.cancel()
        if not line.startswith("{"):
            self.kill(process)
            process.communicate()
            return f"cannot be loaded: {json.loads(line) if line else 'its process ended'}"
        self.process, self.facts = process, Facts(**json.loads(line))
        threading.Thread(target=self.read, args=[process], daemon=True).start()
        return ""

    def ask(self, *request: Any) -> dict:
        """The answer to [key, problem, texts, ends]. {"failure": ...} if the environment raised, hung or died.

        Raises RunFailed if no process starts.
        """
        while True:
            with self.changed:
                self.changed.wait_for(lambda: len(self.waiting) < (1 if self.alone else THREADS))
                complaint = "" if self.process else self.start()
                if complaint:
                    raise RunFailed(f'environment "{self.words[0]}" {complaint}', code="environment-failed")
                self.number += 1
                number, process, answer = self.number, self.process, Future()
                self.waiting[number] = answer
                with contextlib.suppress(BrokenPipeError):  # read() finds out that the process is gone
                    process.stdin.write(json.dumps([number, *request], default=str) + "\n")
                    process.stdin.flush()
            try:
                found = answer.result(self.facts.seconds)
            except TimeoutError:
                with self.changed:
                    late = self.waiting.pop(number, None)
                if late is not None:
                    self.kill(process)
                    message = f"no answer within {self.facts.seconds:g} s"
                    return {"failure": {"kind": "timeout", "message": message}}
                found = answer.result()
            if found is not LOST:
                return found

    def read(self, process: subprocess.Popen) -> None:
        """Hand out the answers of a process until it ends."""
        for line in process.stdout:
            if not line.endswith("\n"):
                break
            number, found = json.loads(line)
            with self.changed:
                answer = self.waiting.pop(number, None)
                self.changed.notify_all()
            if answer is not None:
                answer.set_result(found)
        process.wait()
        with self.changed:
            lost, self.waiting, self.process = self.waiting, {}, None
            crashed = process.pid not in self.killed and bool(lost)
            guilty = crashed and len(lost) == 1
            self.alone |= crashed
            self.changed.notify_all()
        for answer in lost.values():
            message = f"exit status {process.returncode}"
            answer.set_result({"failure": {"kind": "died", "message": message}} if guilty else LOST)

    def kill(self, process: subprocess.Popen) -> None:
        """Kill a process and all that its environments have started."""
        self.killed.add(process.pid)
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
                worker.kill(worker.process)
