"""The worker processes that hold the environments of a run's episodes.

A process steps many episodes at once, in threads, because most environments wait for something. How many follows from
how long a step computes, because threads share one core (see Episodes.places). An episode stays with its worker:

    [7, problem, [a], false]       ->    begin episode 7 and take its first step
    [7, null, [a, b], false]       ->    take the steps that are new
                                   <-    UNKNOWN: the episode began in a process that has been replaced
    [7, problem, [a, b], false]    ->    begin again, and take all steps once more

If an environment hangs or takes its process down, all episodes that were stepping there are lost, and nobody knows
which of them was guilty. So each of them is played again from its first turn, alone in a process of its own. There the
guilty one fails again. The others go on as if nothing had happened, because their state follows from their problem and
turns. Without this rule one bad turn would fail up to a hundred episodes, and different ones in each run.
"""

import dataclasses
import os
from dataclasses import dataclass
from pathlib import Path

from common.cores import cores_of_this_rank
from common.errors import BadInput, RunFailed
from common.processes.child import Handler, import_file
from common.processes.pool import Failure, Program, Worker
from common.rewards.workers import to_rows
from common.rollout.environments import BUILT_IN, Environment, Problem, Step, built_in
from common.rollout.environments.tools import Tools, schemas

# Episodes that step at the same time in one process. More than that wait.
THREADS = 128
# The same before the first answer, when nobody knows yet for how long a step computes.
UNTRIED = 4
# Share of the time limit that all steps at once may compute, one after another. The rest is for a busy machine.
COMPUTING = 0.25
MAX_OBSERVATION = 100_000  # characters
UNKNOWN = "unknown episode"


@dataclass(frozen=True)
class EnvironmentInfo:
    """Facts about the class of environments, which a worker tells when it is ready."""

    role: str  # role of an observation in the chat template
    seconds: float  # limit for one call
    failed_score: float
    tools: list[dict]  # schemas for the chat template
    has_score: bool  # whether the class has score()


class EnvironmentPool:
    """The workers of one rank. Any thread may call ask()."""

    def __init__(self, spec: str, call_format: str):
        """Starts one worker, to see whether the class can be loaded. Raises BadInput."""
        program = Program(
            name=f"--environment {spec}:",
            loader="common.rollout.environments.workers:load",
            arguments=[spec, call_format],
            error_code="environment-failed",
            # Otherwise glibc reserves 64 MiB of addresses for each thread, which count towards memory_gib.
            variables={"MALLOC_ARENA_MAX": "2"},
        )
        self.workers = [Worker(program) for _ in range(cores_of_this_rank())]
        for worker in self.workers:
            worker.max_open = UNTRIED
        # For lost episodes, each alone in a process. A process is replaced now and then, in case an episode leaves
        # something behind.
        lone = dataclasses.replace(program, arguments=[spec, call_format, False], max_requests=THREADS)
        self.lone_workers = [Worker(lone) for _ in self.workers]
        try:
            self.info = EnvironmentInfo(**self.workers[0].start())
        except RunFailed as failure:
            raise BadInput(str(failure)) from None

    def ask(self, key: int, problem: dict, texts: list[str], ends: bool, again: bool = False) -> dict | Failure:
        """The answer of Episodes.answer() to the turns of episode `key` so far, or a Failure. Raises nothing.

        again: these turns have been answered, and now the episode ends with them.
        """
        worker = self.workers[key % len(self.workers)]
        # A process that begins an episode takes all its steps at once.
        seconds_from_start = self.info.seconds * (1 + len(texts))
        from_start = [key, problem, texts, ends]
        try:
            answer = UNKNOWN
            # When the first turn is asked for, no process can know the episode.
            if len(texts) > 1 or again:
                answer = worker.ask([key, None, texts, ends], self.info.seconds)
            if answer == UNKNOWN:
                answer = worker.ask(from_start, seconds_from_start)
            if isinstance(answer, Failure) and answer.kind in ("timeout", "died"):
                worker = self.lone_workers[key % len(self.lone_workers)]
                answer = worker.ask(from_start, seconds_from_start)
        except RunFailed as failure:
            # The class could be loaded at the start, but not again. If it stays like this, results() ends the run.
            return Failure("died", str(failure))
        if not isinstance(answer, Failure) and worker not in self.lone_workers:
            with worker.changed:
                worker.max_open = answer["places"]
                worker.changed.notify_all()
        return answer

    def close(self) -> None:
        """End all processes. The next ask() starts one again."""
        for worker in [*self.workers, *self.lone_workers]:
            worker.stop()


# Inside a worker


def load(spec: str, call_format: str, keeps: bool = True) -> Handler:
    """The handler of an environment's class. Raises BadInput, and what importing a user's file raises.

    keeps: whether episodes stay open for their next turn.
    """
    environment_class = find(spec)
    tools = []
    if issubclass(environment_class, Tools):
        environment_class.format = call_format
        tools = schemas(environment_class)
    info = EnvironmentInfo(
        role=environment_class.role,
        seconds=environment_class.seconds,
        failed_score=environment_class.failed_score,
        tools=tools,
        has_score=environment_class.score is not None,
    )
    return Handler(
        answer=Episodes(environment_class, keeps).answer,
        memory_gib=environment_class.memory_gib,
        facts=vars(info),
        threads=THREADS,
    )


def find(spec: str) -> type[Environment]:
    """The class that --environment names. Raises BadInput if there is none, and what importing a user's file raises."""
    if spec in BUILT_IN:
        return getattr(built_in, BUILT_IN[spec])
    if spec.startswith("openenv:"):
        # Imported here, because few runs need its WebSockets.
        from common.rollout.environments import openenv

        return openenv.class_of(spec)
    path, _, name = spec.rpartition(":")
    environment_class = getattr(import_file(Path(path), "environment"), name, None)
    if not isinstance(environment_class, type) or not issubclass(environment_class, Environment):
        raise BadInput(f'{path} has no subclass of Environment with the name "{name}"')
    if environment_class.step is Environment.step:
        raise BadInput(f"{path}: {name} has no method step(self, text)")
    return environment_class


class Episodes:
    """The environments of this process, by the key of their episode."""

    def __init__(self, environment_class: type[Environment], keeps: bool):
        self.environment_class = environment_class
        self.keeps = keeps
        self.open: dict[int, tuple[Environment, list[Step]]] = {}  # key -> the environment, and its steps so far
        self.answered = 0
        self.seconds_before = core_seconds()

    def answer(self, request: list) -> dict | str:
        """The latest observation, and the result if the episode is over. Raises what the environment raises.

        A request is [key, problem, texts of all turns, whether the episode ends]. Without a problem, the episode has to
        be open; otherwise the answer is UNKNOWN.
        """
        key, problem, texts, ends = request
        # Taken out of `open` while it steps, so that an episode that fails is forgotten.
        environment, steps = self.open.pop(key, (None, []))
        if problem is not None:
            environment, steps = self.environment_class(), []
            environment.reset(Problem(**problem))
        if environment is None:
            return UNKNOWN
        for text in texts[len(steps) :]:
            steps.append(checked(environment.step(text)))
        done = ends or steps[-1].done or steps[-1].observation is None
        result = None
        if done and environment.score:
            (result,) = to_rows([environment.score()], 1)
        if not done and self.keeps:
            self.open[key] = environment, steps
        self.answered += 1
        return {
            "observation": None if done else steps[-1].observation,
            "result": result,  # score, acc, extracted, info
            "calls": sum(step.calls for step in steps),
            "errors": sum(step.errors for step in steps),
            "places": self.places(),
        }

    def places(self) -> int:
        """How many episodes may step at the same time: together they compute for a part of the limit of one step."""
        seconds_per_step = max((core_seconds() - self.seconds_before) / self.answered, 1e-9)
        places = int(COMPUTING * self.environment_class.seconds / seconds_per_step)
        return max(1, min(THREADS, places))


def checked(step: Step) -> Step:
    """The step, if it has the right types and a short observation. Otherwise raises BadInput."""
    if not isinstance(step, Step):
        raise BadInput(f"step() returned {type(step).__name__}, expected Step")
    texts = step.observation if isinstance(step.observation, list) else [step.observation or ""]
    if not texts or not all(isinstance(text, str) for text in texts):
        raise BadInput(f"an observation is no text: {step.observation!r:.200}")
    length = sum(map(len, texts))
    if length > MAX_OBSERVATION:
        raise BadInput(f"an observation of {length} characters; at most {MAX_OBSERVATION} are allowed")
    return step


def core_seconds() -> float:
    """Seconds of a core that this process has used, and the programs that it has called and that have ended."""
    return sum(os.times()[:4])
