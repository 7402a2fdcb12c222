"""Sampling and grading of one step's responses, and the threads that sample later steps while one trains.

An algorithm file defines `sample(step, sampler) -> Batch`. The sampler gives it prompts, grades responses and records
metrics. With `--max-inflight-batches 2` or more, sample() runs in threads, one for each step. The sampler of a thread
has its own process group and metrics.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from multiprocessing.pool import AsyncResult, ThreadPool

import torch

from common.data.prompts import Prompt, PromptLoader
from common.errors import RunFailed
from common.placement import Layout, World
from common.rewards.grading import Result
from common.rollout.rollout import Rollout, select
from common.run.tracking import Metrics, Tracker

Sample = Callable[[int, "PromptSampler"], "Batch"]
# (prompts, number of the draw, grading) -> their responses
Generate = Callable[[list[Prompt], int, Callable | None], Rollout]


@dataclass
class Batch(Rollout):
    """The responses of one step on this rank, graded: N = B * G rows, group-major."""

    prompts: list[Prompt] = field(default_factory=list)  # B
    responses: list[str] = field(default_factory=list)  # N texts without special tokens
    results: list[Result] = field(default_factory=list)  # N
    baseline: "Batch | None" = None  # one greedy response to each prompt, if the algorithm uses it as a baseline

    @classmethod
    def of(cls, rollout: Rollout, prompts: list[Prompt], responses: list[str], results: list[Result]) -> "Batch":
        """A rollout together with its prompts, the texts of its responses and their grades."""
        sampled = {field.name: getattr(rollout, field.name) for field in fields(Rollout)}
        return cls(**sampled, prompts=prompts, responses=responses, results=results)

    @property
    def group_size(self) -> int:
        """G, the number of responses to each prompt."""
        return len(self) // len(self.prompts)

    @property
    def scores(self) -> torch.Tensor:
        """(N,) float32: scores of the responses, the weighted sum of all rewards."""
        return torch.tensor([result.score for result in self.results], device=self.response_mask.device)

    @property
    def correct(self) -> torch.Tensor:
        """(N,) float32: 1 if the first reward's acc (its score, if it has none) is above 0, otherwise 0."""
        return torch.tensor([float(result.acc > 0) for result in self.results], device=self.response_mask.device)


def texts_of(rollout: Rollout, tokenizer) -> list[str]:
    """The responses as people read them: the decoded tokens, or the transcripts of the episodes."""
    if rollout.episodes is not None:
        return [turns.transcript for turns in rollout.episodes]
    return tokenizer.batch_decode(rollout.response_ids, skip_special_tokens=True)


class PromptSampler:
    """The second argument of sample(): it hands out this rank's prompts, grades responses and records metrics."""

    def __init__(
        self,
        world: World,
        metrics: Metrics,
        loader: PromptLoader,
        reward,
        tokenizer,
        step: int = 0,
        gates: "Gates | None" = None,
    ):
        """gates: the order of steps that are sampled at the same time; None: one step after the other."""
        self.world = world
        self.metrics = metrics
        self.loader = loader
        self.reward = reward
        self.tokenizer = tokenizer
        self.step = step
        self.gates = gates
        self.time = metrics.time
        self.draws_again = False  # until_full(): this step keeps its turn to draw until it is full
        self.drawn_until: int | None = None  # where the prompts of the next step begin; a resumed run begins there

    def prompts(self, count: int) -> list[Prompt]:
        """This rank's share of the next `count` prompts.

        Rank r takes prompts r, r + size, ...: mini-batch k holds the same prompts for any number of ranks. (Not with
        until_full(), where each rank keeps the first that pass.) Raises RunFailed for a second call in a step that is
        sampled beside others. Collective in such a step: every rank calls it.
        """
        if self.gates is not None:
            self.gates.drawing.enter(self.step)
            # One rank may have been told already when another has not.
            if self.world.max(self.gates.abandoned):
                raise Abandoned(f"step {self.step} will not be trained on")
        prompts = self.loader.take(count)
        self.drawn_until = self.loader.position
        if self.gates is not None and not self.draws_again:
            self.gates.drawing.leave(self.step)
        return prompts[self.world.rank :: self.world.size]

    def grade_early(self, prompts: list[Prompt]):
        """A function for engine.generate(done=...): it grades finished responses while others are still sampled.

        Its attribute `reply` is what an environment answers, for engine.generate(reply=...); None without one.
        """
        return self.reward.begin_early(prompts, self.tokenizer, self.step, self.loader.seed)

    def grade(
        self,
        prompts: list[Prompt],
        rollout: Rollout,
        grading=None,
        *,
        with_metrics: bool = True,
        at_least: float | None = None,
    ) -> Batch:
        """Grade all responses. If one cannot be graded, its group has scores of 0, and rollout.response_mask becomes
        False there. Collective: every rank calls it. Raises BadInput or RunFailed, also for a score below `at_least`.

        grading: the function from grade_early(), if it was used. with_metrics: False keeps these responses out of the
        metrics reward/, group/ and response/.
        """
        metrics = self.metrics if with_metrics else None
        if self.gates is not None:
            self.gates.grading.enter(self.step)
        with self.time("reward"):
            texts = texts_of(rollout, self.tokenizer)
            results = self.reward.score(prompts, texts, rollout, self.world, self.step, metrics, grading)
        batch = Batch.of(rollout, prompts, texts, results)
        if at_least is not None:
            self._check_lowest(batch, at_least)
        if metrics is not None:
            metrics.rollout(batch.scores, batch.group_size, batch)
            if rollout.episodes is not None:
                self.reward.environment.log(rollout.episodes, metrics)
        return batch

    def _check_lowest(self, batch: Batch, at_least: float) -> None:
        """Raise RunFailed on all ranks if a score of any rank is too low. Collective."""
        scores = batch.scores[batch.response_mask.any(1)]  # of the graded responses
        lowest = self.world.min(min(scores.tolist(), default=at_least))
        if lowest < at_least:
            raise RunFailed(
                f"step {self.step}: a response scored {lowest:.3g}, and this algorithm needs {at_least:g} or more; "
                "change --reward or its weight",
                code="reward-failed",
            )

    def until_full(
        self,
        generate: Generate,
        keep: Callable[[torch.Tensor], torch.Tensor],
        *,
        wanted: int,
        prompts_per_draw: int,
        max_draws: int,
        filter_in_words: str,
    ) -> Batch:
        """Dynamic sampling: draw prompts until every rank has wanted / world.size that pass the filter `keep`.

        All ranks make the same number of draws. Surplus prompts are discarded: in the next step their responses would
        be off-policy. Collective: every rank calls it. Raises RunFailed after max_draws.
        With --max-inflight-batches 2 or more, later steps wait with their first draw until this one is full.

        keep: (B, G) bool, True for right responses -> (B,) bool, True for groups that stay.
        filter_in_words: ends the sentence "a rank has only 3 of its 8 prompts ...".
        """
        self.draws_again = True
        share = wanted // self.world.size
        parts: list[tuple[Batch, list[int]]] = []  # for each group that stays: its draw, and its rows there
        for draw in range(max_draws):
            prompts = self.prompts(prompts_per_draw)
            grading = self.grade_early(prompts)
            with self.time("rollout"):
                rollout = generate(prompts, draw, grading)
            batch = self.grade(prompts, rollout, grading)
            self.metrics.sum("sampling/prompts_generated", len(prompts))

            group_size = batch.group_size
            graded = batch.response_mask.any(1).view(-1, group_size).all(1)  # (B,)
            stays = keep(batch.correct.bool().view(-1, group_size)) & graded  # (B,)
            for group in stays.nonzero().flatten().tolist():
                first_row = group * group_size
                parts.append((batch, list(range(first_row, first_row + group_size))))
            if self.world.min(len(parts)) >= share:
                break
        else:
            raise RunFailed(
                f"step {self.step}: after {max_draws} draws (--max-gen-batches) a rank has only "
                f"{self.world.min(len(parts)):.0f} of its {share} prompts {filter_in_words}: too easy, too hard, or a "
                "constant reward",
                code="no-signal",
            )
        self.metrics.sum("sampling/prompts_kept", len(parts))
        return join(parts[:share])


def join(parts: list[tuple[Batch, list[int]]]) -> Batch:
    """One batch made of groups from several batches. parts: for each group its batch, and its rows there."""
    prompts = []
    responses = []
    results = []
    for batch, rows in parts:
        prompts.append(batch.prompts[rows[0] // len(rows)])
        for row in rows:
            responses.append(batch.responses[row])
            results.append(batch.results[row])
    return Batch.of(select(parts), prompts, responses, results)


class Abandoned(Exception):
    """Ends the sampling of a step that will not be trained on. It stays in that step's thread."""


class InOrder:
    """A gate that the threads of several steps pass in the order of the steps, although they run at the same time."""

    def __init__(self, first_step: int):
        self.next_step = first_step  # whose turn it is
        self.left: set[int] = set()  # later steps that have left already, such as those that failed
        self.changed = threading.Condition()

    def enter(self, step: int) -> None:
        """Wait until all earlier steps have left. Raises RunFailed if this step itself has left already."""
        with self.changed:
            self.changed.wait_for(lambda: self.next_step >= step)
        if self.next_step > step:
            raise RunFailed(
                "with --max-inflight-batches 2 or more, sample() has to draw all prompts of a step at once, or with "
                "sampler.until_full()",
                code="drawn-twice",
            )

    def leave(self, step: int) -> None:
        """Let the next step pass. A second call does nothing."""
        with self.changed:
            if step >= self.next_step:
                self.left.add(step)
            while self.next_step in self.left:
                self.left.remove(self.next_step)
                self.next_step += 1
            self.changed.notify_all()


@dataclass
class Gates:
    """Where the threads of several steps keep to the order of the steps."""

    drawing: InOrder  # of prompts: each rank draws the same ones for a step, whichever thread is faster
    grading: InOrder  # rewards have a state, such as weights that are read from a file once a step
    abandoned: bool = False  # no step draws any more


@dataclass
class InFlight:
    """A step that is being sampled, or waits to be trained on."""

    sampler: PromptSampler
    ended: threading.Event  # sample() has returned, or raised an error
    batch: AsyncResult | None = None


class Prefetcher:
    """Calls sample() for one step after the other. With --max-inflight-batches K up to K steps are sampled at a time.

    Step t + K - 1 may be begun when step t is about to train. It then misses the pushes of the K - 1 steps t ...
    t + K - 2, so no token is more than K - 1 pushes old when it is trained on. Nothing is ever dropped for its age,
    because that would favour short responses. For each push that the servers still lack (ServerEngine.behind), one step
    fewer may be begun.

    Each step has a thread. The threads draw prompts and grade in the order of the steps, and the batches are trained on
    in that order. The requests of several steps are at the servers at the same time: while a long response is under
    way, those of the next steps take the places that short ones have left.
    """

    def __init__(
        self,
        sample: Sample,
        loader: PromptLoader,
        reward,
        tokenizer,
        world: World,
        tracker: Tracker,
        layout: Layout,
        engine,
        first_step: int = 1,
    ):
        """Collective: every rank makes one."""
        self.sample = sample
        self.loader = loader
        self.reward = reward
        self.tokenizer = tokenizer
        self.tracker = tracker
        self.world = world
        self.engine = engine
        self.limit = layout.max_inflight_batches  # K
        self.gates = Gates(InOrder(first_step), InOrder(first_step))
        self.begun = first_step - 1  # the last step whose sampling has begun
        self.in_flight: dict[int, InFlight] = {}  # by step
        if self.ahead:
            self.threads = ThreadPool(self.limit)  # daemons, so that a failed run can end
            # A thread's collectives must meet neither those of the trainer nor those of another thread.
            self.worlds = [world.beside() for _ in range(self.limit)]

    @property
    def ahead(self) -> bool:
        return self.limit > 1

    def get(self, step: int, last_step: int) -> Batch:
        """The batch of this step. Collective. Raises the errors of sample().

        With K > 1 it also begins later steps, up to last_step, and gives the servers the latest weights if it finds
        them without work.
        """
        if not self.ahead:
            sampler = self._sampler(step, self.world, self.tracker)
            self.tracker.sampled = self.sample(step, sampler)
            return self.tracker.sampled
        tracker = self.tracker
        # Once before the wait, and again after it: a push that goes in meanwhile lets further steps begin.
        self._begin_until(step, last_step)
        with tracker.time("wait"):
            self.engine.wait_for_step_or_idle(self.in_flight[step].ended.is_set)
        with tracker.time("sync"):
            self.engine.send_if_behind()
        self._begin_until(step, last_step)
        with tracker.time("wait"):
            taken = self.in_flight.pop(step)
            batch = taken.batch.get()
        tracker.merge(taken.sampler.metrics)
        tracker.sampled = batch
        self._check_age(batch)
        # A checkpoint of this step must resume with the prompts of the next one, although they are drawn already.
        self.loader.trained_until = taken.sampler.drawn_until
        return batch

    def settle(self) -> None:
        """Wait until no step is being sampled, and give the servers the latest weights, so that an evaluation has the
        engine to itself. Collective. Raises the errors of sample().
        """
        if not self.ahead:
            return
        # In the order of the steps. If one has failed on this rank alone, the other ranks hang in its collectives, and
        # the later steps of this rank hang with them. The get() of the one that failed raises at once.
        for begun in self.in_flight.values():
            begun.batch.get()
        self.engine.send_if_behind()

    def abandon(self) -> None:
        """End the sampling of steps that will not be trained on, because the run was asked to stop.

        Collective: every rank calls it.
        """
        self.gates.abandoned = True  # first: a step whose requests end lets the next one draw
        if self.in_flight:
            self.engine.abandon()
        for begun in self.in_flight.values():
            begun.ended.wait()

    def _begin_until(self, step: int, last_step: int) -> None:
        """Begin all steps that may be sampled before `step` trains."""
        newest = step + self.limit - 1 - self.engine.behind
        while self.begun < min(newest, last_step):
            self.begun += 1
            self.in_flight[self.begun] = self._begin(self.begun)

    def _sampler(self, step: int, world: World, metrics: Metrics, gates: Gates | None = None) -> PromptSampler:
        metrics.step = step
        return PromptSampler(world, metrics, self.loader, self.reward, self.tokenizer, step, gates)

    def _begin(self, step: int) -> InFlight:
        """Call sample() in a thread."""
        # The step that had this world, K steps ago, has ended: its batch has been taken.
        world = self.worlds[step % self.limit]
        begun = InFlight(self._sampler(step, world, Metrics(world), self.gates), threading.Event())

        def collect() -> Batch:
            if world.device.type == "cuda":
                torch.cuda.set_device(world.device)  # a thread starts with device 0
            self.engine.use_group(world.group)
            try:
                return self.sample(step, begun.sampler)
            finally:
                self.gates.drawing.leave(step)
                self.gates.grading.leave(step)
                begun.ended.set()
                self.engine.wake()

        begun.batch = self.threads.apply_async(collect)
        return begun

    def _check_age(self, batch: Batch) -> None:
        """No token may be more than K - 1 pushes old. Collective, so that all ranks end together."""
        versions = batch.weight_versions[batch.response_mask]
        newest = self.engine.weight_version
        oldest = self.world.min(int(versions.min()) if len(versions) else newest)
        age = newest - int(oldest)
        assert age < self.limit, f"a token is {age} pushes old, with --max-inflight-batches {self.limit}"
