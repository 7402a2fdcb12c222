"""One worker process of workers.py: it holds the environments of many episodes, and steps them in threads.

    python -m common.rollout.environments.worker_main calculator|guess|FILE.py:CLASS FORMAT

A line of JSON in is [number, key, problem, texts, ends]; a line out is [number, answer, seconds of a core used
since the first line]. `texts` are all turns of the episode so far. If this process does not know the episode, it
begins it and takes all its steps again.
"""

import json
import os
import resource
import signal
import sys
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from common.rewards.worker_main import describe, end_with, take_pipes, to_rows
from common.rollout.environments import Environment, Problem, Step, find
from common.rollout.environments.tools import Tools, schemas

THREADS = 128  # episodes that step at the same time; more than that wait
STACK = 8 * 2**20  # bytes of a thread's stack
MAX_OBSERVATION = 100_000  # characters of one observation


class Episodes:
    """The environments of this process, by the key of their episode."""

    def __init__(self, kind: type[Environment], path: str):
        """path: the user's file, where a traceback begins."""
        self.kind, self.path = kind, path
        self.open: dict[str, tuple[Environment, list[Step]]] = {}  # key -> the environment, and its steps so far

    def answer(self, key: str, problem: dict, texts: list[str], ends: bool) -> dict:
        """The latest observation, and the result if the episode is over. Raises what the environment raises."""
        environment, steps = self.open.pop(key, (None, []))
        if environment is None:
            environment = self.kind()
            environment.reset(Problem(**problem))
        for text in texts[len(steps) :]:
            steps.append(checked(environment.step(text)))
        done = ends or steps[-1].done or steps[-1].observation is None
        result = None
        if done and environment.score:
            rows = to_rows([environment.score()], 1)
            if isinstance(rows, dict):
                raise Refused(f"score(): {rows['message']}")
            (result,) = rows
        if not done:
            self.open[key] = environment, steps
        return {
            "observation": None if done else steps[-1].observation,
            "result": result,  # score, acc, extracted, info
            "calls": sum(step.calls for step in steps),
            "errors": sum(step.errors for step in steps),
        }

    def finish(self, answer: Future) -> dict:
        """The dict of answer(), or as "failure" the error of the environment, which ends only its own episode."""
        error = answer.exception()
        if error is None:
            return answer.result()
        refused = {"kind": "wrong", "message": str(error)} if isinstance(error, Refused) else None
        return {"failure": refused or describe(error, error.__traceback__, self.path)}


class Refused(ValueError):
    """An environment returned something else than a Step with text."""


def checked(step: Step) -> Step:
    if not isinstance(step, Step):
        raise Refused(f"step() returned {type(step).__name__}, expected Step")
    texts = step.observation if isinstance(step.observation, list) else [step.observation or ""]
    if not texts or not all(isinstance(text, str) for text in texts):
        raise Refused(f"an observation is no text: {step.observation!r:.200}")
    if sum(map(len, texts)) > MAX_OBSERVATION:
        raise Refused(f"an observation of {sum(map(len, texts))} characters; at most {MAX_OBSERVATION} are allowed")
    return step


def computed() -> float:
    """Seconds of a core that this process has used, with the programs that it has called and that have ended."""
    return sum(os.times()[:4])


def main(spec: str, call_format: str) -> None:
    requests, answers = take_pipes()
    lock = threading.Lock()

    def send(answer) -> None:
        try:
            text = json.dumps(answer, default=str)
        except (TypeError, ValueError, RecursionError) as error:  # an info may hold anything
            failure = {"kind": "wrong", "message": f"an answer that cannot be written as JSON: {error}"}
            text = json.dumps([answer[0], {"failure": failure}, *answer[2:]])
        with lock:
            print(text, file=answers, flush=True)

    threading.Thread(target=end_with, args=(os.getppid(),), daemon=True).start()
    path = spec.rpartition(":")[0]
    sys.excepthook = lambda kind, error, trace: send(describe(error, trace, path)["message"])
    kind = find(spec)
    if kind is None or not callable(getattr(kind, "step", None)) or not callable(getattr(kind, "reset", None)):
        return send(f'{path} has no class "{spec.rpartition(":")[2]}" with reset() and step()')
    is_tools = issubclass(kind, Tools)
    if is_tools:
        kind.format = call_format
    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    limit = mapped + THREADS * STACK + int(getattr(kind, "memory_gib", Environment.memory_gib) * 2**30)
    threading.stack_size(STACK)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    facts = {name: getattr(kind, name, getattr(Environment, name)) for name in ("role", "seconds", "failed_score")}
    send({**facts, "tools": schemas(kind) if is_tools else [], "scores": bool(getattr(kind, "score", None))})
    episodes, start = Episodes(kind, path), computed()
    with ThreadPoolExecutor(THREADS) as threads:
        for line in requests:
            number, *request = json.loads(line)
            answer = threads.submit(episodes.answer, *request)
            answer.add_done_callback(
                lambda answer, number=number: send([number, episodes.finish(answer), computed() - start])
            )
    os.killpg(0, signal.SIGKILL)  # with whatever an environment has started


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
