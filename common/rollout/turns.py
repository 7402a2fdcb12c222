"""Responses of several turns: what the policy sampled, and what its environment answered in between.

    ids       m u l ( 3 , 4 ) E 1 2 \\n 1 2 E       the next prompt is always prompt + ids: nothing is encoded again
    sampled   1 1 1 1 1 1 1 1 1 0 0 0  1 1 1       False on an observation: no loss, log-prob 0

An engine makes one `Turns` for each response, adds each sampled turn to it, and asks `reply` what follows. Replies come
from threads, so other responses are sampled while an environment is busy.
"""

import random
import time
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Any

from common.rollout.rollout import Rollout, collate

# Threads that wait for environments.
REPLIES_AT_ONCE = 256
# Seconds that a reply may take before the engine samples on without it.
PATIENCE = 0.02


@dataclass
class Turns:
    """One response and its budget."""

    prompt_ids: list[int]
    room: int  # tokens that may still be added
    number: int | None = None  # number of the episode, set by episodes.py
    ids: list[int] = field(default_factory=list)
    sampled: list[bool] = field(default_factory=list)  # True on tokens of the policy
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)  # weights of each token, if servers sampled it
    starts: list[int] = field(default_factory=list)  # place of the first token of each of the policy's turns
    truncated: bool = False  # the length limit ended the last turn
    texts: list[str] = field(default_factory=list)  # the policy's turns
    observations: list[str] = field(default_factory=list)  # the environment's answers to them
    seconds: float = 0.0  # time in which the environment was busy
    calls: int = 0  # tools that were called
    errors: int = 0  # calls that failed
    failure: str = ""  # kind of the environment's failure, see processes/pool.py
    result: Any = None  # grading.Result, if the environment scores

    def add(
        self, ids: list[int], logprobs: Iterable[float], truncated: bool, versions: list[int] | None = None
    ) -> None:
        """A turn that the policy sampled."""
        self.starts.append(len(self.ids))
        self.extend(ids, True, logprobs)
        self.versions += versions or []
        self.truncated = truncated

    def observe(self, ids: list[int]) -> None:
        """An observation, and all that stands before the next turn. It leaves room for a token."""
        assert len(ids) < self.room, f"an observation of {len(ids)} tokens, room for {self.room}"
        self.extend(ids, False, [0.0] * len(ids))
        if self.versions:
            self.versions += [0] * len(ids)

    def extend(self, ids: list[int], sampled: bool, logprobs: Iterable[float]) -> None:
        self.ids += ids
        self.sampled += [sampled] * len(ids)
        self.logprobs += logprobs
        self.room -= len(ids)

    @property
    def prompt(self) -> list[int]:
        """The token ids from which the next turn is sampled."""
        return self.prompt_ids + self.ids

    @property
    def latest(self) -> list[int]:
        """The ids of the latest turn."""
        return self.ids[self.starts[-1] :]

    @property
    def transcript(self) -> str:
        """All turns for people to read. An observation stands behind "> "."""
        # The last turn has no observation.
        observations = [f"\n> {text.strip()}\n" for text in self.observations] + [""]
        return "".join(text + observation for text, observation in zip(self.texts, observations))


# (index of the prompt, the response) -> ids of the observation and of what stands before the next turn; None: the end.
Reply = Callable[[int, Turns], list[int] | None]


def open_turns(prompt_ids: list[list[int]], n: int, max_tokens: int) -> list[Turns]:
    """n responses to each prompt, group-major."""
    return [Turns(ids, max_tokens) for ids in prompt_ids for _ in range(n)]


def turn_seed(seed: int, number: int, turns: Turns) -> int:
    """Seed of the next turn of response `number` of a step, for an engine whose requests bring their seeds."""
    return random.Random(f"{seed}/{number}/{len(turns.starts)}").getrandbits(62)


class Replies:
    """The replies that an engine is waiting for, by the row of their response."""

    def __init__(self, reply: Callable[[int], list[int] | None]):
        """reply(row) gives the ids that follow the latest turn of a response; None ends it."""
        self.reply = reply
        self.threads = ThreadPoolExecutor(REPLIES_AT_ONCE, "environment")
        self.coming: dict[int, Future] = {}
        self.new: list[int] = []  # rows asked for since the last take()
        self.until = 0.0  # when the patience with them ends

    def ask(self, row: int) -> None:
        """Ask what follows the latest turn of a response. Environments answer while the engine samples on."""
        self.coming[row] = self.threads.submit(self.reply, row)
        self.new.append(row)
        self.until = time.monotonic() + PATIENCE

    def take(self, idle: bool) -> list[tuple[int, list[int] | None]]:
        """(row, reply) of all replies that are there, in the order of their rows. Raises what reply() raised.

        An engine calls it after each forward, and then asks for more. It waits up to PATIENCE seconds for the replies
        asked for after the previous forward. So environments that answer at once are always answered in the same order,
        and a run can be repeated bit for bit. idle: the engine has nothing to sample, and waits for any reply.
        """
        # Usually nothing is left to wait for: the forward took longer than PATIENCE.
        wait([self.coming[row] for row in self.new], max(0.0, self.until - time.monotonic()))
        self.new = []
        if idle and self.coming:
            wait(self.coming.values(), return_when=FIRST_COMPLETED)
        ready = sorted(row for row, future in self.coming.items() if future.done())
        return [(row, self.coming.pop(row).result()) for row in ready]


def collate_turns(rows: list[Turns], weight_version: int | None, device) -> Rollout:
    """The rollout of finished responses. weight_version: of all tokens; None: each turn brought its own."""
    rollout = collate(
        [turns.prompt_ids for turns in rows],
        [turns.ids for turns in rows],
        [turns.logprobs for turns in rows],
        [turns.truncated for turns in rows],
        [turns.versions for turns in rows] if weight_version is None else weight_version,
        device,
        [turns.sampled for turns in rows],
    )
    rollout.episodes = rows
    return rollout
