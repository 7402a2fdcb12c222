"""Sampling and grading of one step's responses, and the thread that samples one step ahead.

An algorithm file defines `sample(step, sampler) -> Batch`. The sampler gives it prompts, grades responses and records
metrics. With `--max-inflight-batches 2` sample() runs in a thread, whose sampler has its own process group and metrics.
"""

import math
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
    def scores(self) -> torch.Tensor:
        """(N,) float32: scores of the responses, the weighted sum of all rewards."""
        return torch.tensor([result.score for result in self.results], device=self.response_mask.device)

    @property
    def correct(self) -> torch.Tensor:
        """(N,) float32: 1 if the first reward says that the response is right, otherwise 0."""
        return torch.tensor([float(result.acc > 0) for result in self.results], device=self.response_mask.device)


def texts_of(rollout: Rollout, tokenizer) -> list[str]:
    """The responses as people read them: the decoded tokens, or the transcripts of the episodes."""
    if rollout.episodes is not None:
        return [turns.transcript for turns in rollout.episodes]
    return tokenizer.batch_decode(rollout.response_ids, skip_special_tokens=True)


class PromptSampler:
    """The second argument of sample(): it hands out this rank's prompts, grades responses and records metrics."""

    def __init__(self, world: World, metrics: Metrics, loader: PromptLoader, reward, tokenizer, step: int = 0):
        self.world = world
        self.metrics = metrics
        self.loader = loader
        self.reward = reward
        self.tokenizer = tokenizer
        self.step = step
        self.time = metrics.time

    def prompts(self, count: int) -> list[Prompt]:
        """This rank's share of the next `count` prompts.

        Rank r takes prompts r, r + size, ...: mini-batch k holds the same prompts for any number of ranks.
        """
        return self.loader.take(count)[self.world.rank :: self.world.size]

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
        at_least: float = -math.inf,
    ) -> Batch:
        """Grade all responses. Collective: every rank calls it. Raises RunFailed, also for a score below `at_least`.

        grading: the function from grade_early(), if it was used. with_metrics: False keeps these responses out of the
        metrics reward/, group/ and response/.
        """
        metrics = self.metrics if with_metrics else None
        with self.time("reward"):
            texts = texts_of(rollout, self.tokenizer)
            results = self.reward.score(prompts, texts, rollout, self.world, self.step, metrics, grading)
        batch = Batch.of(rollout, prompts, texts, results)
        if at_least > -math.inf:
            self._check_lowest(batch.scores, at_least)
        if metrics is not None:
            metrics.rollout(batch.scores, len(texts) // len(prompts), batch)
            if rollout.episodes is not None:
                self.reward.environment.log(rollout.episodes, metrics)
        return batch

    def _check_lowest(self, scores: torch.Tensor, at_least: float) -> None:
        """Raise RunFailed on all ranks if a score of any rank is too low. Collective."""
        lowest = self.world.min(scores.min())
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
        """Dynamic sampling: draw prompts until `wanted` of them, on all ranks together, pass the filter `keep`.

        All ranks make the same number of draws, until each has its share. Surplus prompts are discarded: in the next
        step their responses would be off-policy. Collective: every rank calls it. Raises RunFailed after max_draws.

        keep: (B, G) bool, True for right responses -> (B,) bool, True for groups that stay.
        filter_in_words: ends the sentence "a rank has only 3 of its 8 prompts ...".
        """
        share = wanted // self.world.size
        parts: list[tuple[Batch, list[int]]] = []  # for each group that stays: its draw, and its rows there
        for draw in range(max_draws):
            prompts = self.prompts(prompts_per_draw)
            grading = self.grade_early(prompts)
            with self.time("rollout"):
                rollout = generate(prompts, draw, grading)
            batch = self.grade(prompts, rollout, grading)
            self.metrics.sum("sampling/prompts_generated", len(prompts))

            group_size = len(batch) // len(prompts)
            graded = batch.response_mask.any(1).view(-1, group_size).all(1)  # (B,)
            stays = keep(batch.correct.bool().view(-1, group_size)) & graded  # (B,)
            for group in stays.nonzero().flatten().tolist():
                first_row = group * group_size
                parts.append((batch, list(range(first_row, first_row + group_size))))
            if self.world.min(len(parts)) >= share:
                break
        else:
            raise RunFailed(
                f"step {self.step}: after --max-gen-batches {max_draws} draws a rank has only "
                f"{self.world.min(len(parts)):.0f} of its {share} prompts {filter_in_words}: too easy, too hard, or a "
                "constant reward",
                code="no-signal",
            )
        self.metrics.sum("sampling/prompts_kept", len(parts))
        return join(parts[:share])


def join(parts: list[tuple[Batch, list[int]]]) -> Batch:
    """One batch of some groups of several batches. parts: for each group its batch, and its rows there."""
    prompts = []
    responses = []
    results = []
    for batch, rows in parts:
        prompts.append(batch.prompts[rows[0] // len(rows)])
        for row in rows:
            responses.append(batch.responses[row])
            results.append(batch.results[row])
    return Batch.of(select(parts), prompts, responses, results)


class Prefetcher:
    """Calls sample() for one step after the other. With --max-inflight-batches 2 a thread samples one step ahead.

    A step that is sampled ahead misses the latest update: its responses are one step off-policy.
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
    ):
        """Collective: every rank makes one."""
        self.sample = sample
        self.loader = loader
        self.reward = reward
        self.tokenizer = tokenizer
        self.tracker = tracker
        self.ahead = layout.max_inflight_batches > 1
        # The thread's collectives must not meet those of the trainer, so it has a process group of its own.
        self.world = world.beside() if self.ahead else world
        self.thread = ThreadPool(1) if self.ahead else None  # a daemon thread, so that a failed run can end
        self.waiting: AsyncResult | None = None

    def get(self, step: int, *, prefetch: bool = True) -> Batch:
        """The batch of this step. With --max-inflight-batches 2 sampling for the next step starts at once.

        prefetch: False if this step ends with a checkpoint or ends the run. Then nothing is sampled ahead, because a
        resumed run also starts with nothing in flight. Raises the errors of sample().
        """
        if not self.ahead:
            self.tracker.sampled, _ = self._collect(step, self.tracker)
            return self.tracker.sampled
        with self.tracker.time("wait"):
            batch, metrics = (self.waiting or self._begin(step)).get()
        self.tracker.merge(metrics)
        self.tracker.sampled = batch
        if prefetch:
            # A checkpoint must store the position before the prompts that are now drawn ahead.
            self.loader.in_flight = self.loader.position
            self.waiting = self._begin(step + 1)
        else:
            self.loader.in_flight = None
            self.waiting = None
        return batch

    def wait(self) -> None:
        """Wait until no sampling is in flight, so that an evaluation can use the engine. get() raises its errors."""
        if self.waiting is not None:
            self.waiting.wait()

    def _begin(self, step: int) -> AsyncResult:
        return self.thread.apply_async(self._collect, (step, Metrics(self.world)))

    def _collect(self, step: int, metrics: Metrics) -> tuple[Batch, Metrics]:
        if self.ahead and self.world.device.type == "cuda":
            torch.cuda.set_device(self.world.device)  # a thread starts with device 0
        metrics.step = step
        sampler = PromptSampler(self.world, metrics, self.loader, self.reward, self.tokenizer, step)
        return self.sample(step, sampler), metrics
