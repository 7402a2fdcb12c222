"""A model of the loop with K batches in flight: who waits for whom, and for how long. scripts/simulate.py asks it.

It repeats the rules of common/run/sampling.py and common/rollout/servers/engine.py: which step may begin, and when new
weights go in. All responses under way on a server get their next token at the same time. The more there are, the longer
it takes. Others wait for a place. Requests and prompts take no time here.
"""

import heapq
import math
import random
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Costs:
    """Seconds of the parts, and the servers."""

    servers: int
    places: int  # responses that a server works on at once
    decode: Callable[[int], float]  # number of responses under way -> seconds for a token of each
    train: Callable[[int], float]  # tokens of a step -> seconds of the trainer for it
    update: float = 0.0  # the trainer sends new weights
    recompute: float = 0.0  # a server computes keys and values of a token again
    grade: float = 0.0  # after the last response of a step
    slower: float = 1.0  # a token takes so many times as long while the trainer works
    restart: float = 0.0  # after a server was lost


@dataclass(frozen=True)
class Loop:
    """Flags of a run."""

    inflight: int = 1  # --max-inflight-batches, K
    updates: str = "none"  # --inflight-updates
    lost: float = 0.0  # probability that a server is lost in a step
    save_every: int = 10
    seed: int = 0  # decides in which steps a server is lost


@dataclass(order=True)
class Response:
    """One that is under way. The order is that in which they end; if two end together, the older step is first."""

    ends: float  # the server's `token` at its last one
    step: int
    length: int  # tokens that it will have
    version: int  # of the weights that sampled its first token
    version_sum: float  # the server's `version_sum` at its first token


@dataclass
class Trained:
    """A step that is done."""

    step: int
    tokens: int
    at: float  # seconds since the start of the run
    age: float  # updates between sampling and training, mean of the tokens
    oldest: int  # the same of the oldest token


class Server:
    """A server with its own clock, which runs ahead of the trainer's until somebody waits for it.

    All its responses get their tokens in step. So one number, `token`, says how far all of them are: a response that
    began at token 5 and has 3 tokens ends at token 8. `version_sum` does the same for the weights' versions: its
    growth over a response is the sum of the versions that sampled its tokens.
    """

    def __init__(self, costs: Costs, now: float, version: int):
        self.costs = costs
        self.now = now  # seconds since the start of the run
        self.token = 0.0  # tokens that a response would have if it had been under way since the start
        self.version = version  # of its weights
        self.version_sum = 0.0  # sum of the versions that sampled those tokens
        self.waiting: deque[tuple[int, int]] = deque()  # (step, length)
        self.running: list[Response] = []  # a heap
        self.finished: dict[int, list[tuple[int, int, float]]] = {}  # step -> (length, first version, sum of versions)
        self.unfinished: Counter[int] = Counter()  # step -> responses that wait or are under way
        self.ended: dict[int, float] = {}  # step -> when its last response ended

    def add(self, step: int, lengths: list[int]) -> None:
        """Take requests for responses of these lengths."""
        self.waiting.extend((step, length) for length in lengths)
        self.unfinished[step] += len(lengths)
        self.fill()

    def fill(self) -> None:
        """Give free places to the responses that have waited longest."""
        while self.waiting and len(self.running) < self.costs.places:
            step, length = self.waiting.popleft()
            response = Response(self.token + length, step, length, self.version, self.version_sum)
            heapq.heappush(self.running, response)

    def advance(self, until: float = math.inf, *, step: int | None = None, slower: float = 1.0) -> None:
        """Sample until this moment, or until all responses of `step` are finished."""
        while self.running and self.now < until and (step is None or self.unfinished[step]):
            pace = slower * self.costs.decode(len(self.running))  # seconds for a token of each
            # The pace holds until the next response ends, because the number under way stays the same.
            tokens = min(self.running[0].ends - self.token, (until - self.now) / pace)
            self.now = min(until, self.now + tokens * pace)
            self.token += tokens
            self.version_sum += tokens * self.version
            while self.running and self.running[0].ends <= self.token + 1e-9:  # sums of floats are not exact
                done = heapq.heappop(self.running)
                record = (done.length, done.version, self.version_sum - done.version_sum)
                self.finished.setdefault(done.step, []).append(record)
                self.unfinished[done.step] -= 1
                self.ended[done.step] = self.now
            self.fill()
        if until < math.inf:
            self.now = max(self.now, until)  # it has nothing to do until then

    def under_way(self) -> float:
        """Tokens that responses under way have so far."""
        return sum(response.length - (response.ends - self.token) for response in self.running)


class Run:
    """One run, step by step as in Prefetcher.get()."""

    def __init__(self, costs: Costs, loop: Loop, lengths: Callable[[int], list[int]], steps: int):
        """lengths: step -> tokens of each of its responses."""
        self.costs = costs
        self.loop = loop
        self.lengths = lengths
        self.steps = steps
        self.random = random.Random(loop.seed)
        self.now = 0.0  # the trainer's clock
        self.version = 0  # updates of the trainer
        self.behind = 0  # updates that the servers lack
        self.servers = [Server(costs, self.now, self.version) for _ in range(costs.servers)]
        self.begun = 0  # the last step whose sampling has begun
        self.trained: list[Trained] = []

    def go(self) -> list[Trained]:
        while len(self.trained) < self.steps:
            step = len(self.trained) + 1
            self.begin_until(step)
            self.wait(step)
            if self.random.random() < self.loop.lost:
                self.lose(step)
                continue
            self.take_latest()
            self.begin_until(step)
            self.train(step)
        return self.trained

    def begin_until(self, step: int) -> None:
        """Begin to sample all steps that may be under way when `step` is next to train."""
        newest = step + self.loop.inflight - 1 - self.behind
        while self.begun < min(newest, self.steps):
            self.begun += 1
            lengths = self.lengths(self.begun)
            for i, server in enumerate(self.servers):
                server.add(self.begun, lengths[i :: len(self.servers)])

    def wait(self, step: int) -> None:
        """Wait until a step is sampled and graded."""
        for server in self.servers:
            server.advance(step=step)
        # A server that is done with this step goes on with later ones.
        ended = max(server.ended[step] for server in self.servers if step in server.ended)
        self.pass_time(max(self.now, ended + self.costs.grade))

    def pass_time(self, until: float, slower: float = 1.0) -> None:
        """Set the trainer's clock, and let all servers sample until then."""
        self.now = until
        for server in self.servers:
            server.advance(until, slower=slower)

    def take_latest(self) -> None:
        """Give the servers the latest weights, if they lack them and can take them."""
        idle = not any(server.running for server in self.servers)
        if not self.behind or not (idle or self.loop.updates != "none"):
            return
        self.now += self.costs.update
        for server in self.servers:
            server.now = max(server.now, self.now)  # it has paused
            server.version = self.version
            if self.loop.updates == "recompute":
                server.now += self.costs.recompute * server.under_way()
        self.behind = 0

    def train(self, step: int) -> None:
        """Train on the responses of a step while the servers go on, and send the new weights."""
        records = [record for server in self.servers for record in server.finished.pop(step, [])]
        tokens = sum(length for length, _, _ in records)
        age = self.version - sum(versions for _, _, versions in records) / tokens
        oldest = self.version - min(version for _, version, _ in records)
        self.pass_time(self.now + self.costs.train(tokens), self.costs.slower)
        self.version += 1
        self.behind += 1
        self.take_latest()
        self.trained.append(Trained(step, tokens, self.now, age, oldest))

    def lose(self, step: int) -> None:
        """A server is lost. Without batches in flight the step is repeated, otherwise all since the last checkpoint."""
        if self.loop.inflight > 1:
            saved = (step - 1) // self.loop.save_every * self.loop.save_every  # the step of the last checkpoint
            del self.trained[saved:]
        self.now += self.costs.restart
        self.begun = len(self.trained)
        self.behind = 0
        self.servers = [Server(self.costs, self.now, self.version) for _ in self.servers]


def rate(trained: list[Trained], first: int, last: int) -> float:
    """Tokens a second of steps first + 1 ... last. They begin when step `first` is done, or with the run."""
    counted = trained[first:last]
    began = trained[first - 1].at if first else 0.0
    return sum(each.tokens for each in counted) / (counted[-1].at - began)
