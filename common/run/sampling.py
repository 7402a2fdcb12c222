"""Sampling and grading of one step's responses, and the thread that samples one step ahead.

An algorithm file defines `sample(step, draw) -> Batch`. `draw` gives it prompts, grades responses and collects metrics.
With `--max-inflight-batches 2` sample() runs in a thread, whose `draw` has its own process group and its own metrics.
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
from common.run.tracking import Figures, Tracker

Sample = Callable[[int, "Draw"], "Batch"]
Generate = Callable[[list[Prompt], int, Callable | None], Rollout]  # (prompts, number of the draw, done) -> responses


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


class Draw:
    """The argument of sample(): it hands out this rank's prompts, grades responses and collects metrics."""

    def __init__(self, world: World, figures: Figures, loader: PromptLoader, reward, tokenizer):
        self.world, self.figures, self.loader, self.reward, self.tokenizer = world, figures, loader, reward, tokenizer
        self.time, self.add, self.step = figures.time, figures.add, 0

    def prompts(self, count: int) -> list[Prompt]:
        """This rank's share of the next `count` prompts.

        Rank r takes prompts r, r + size, ...: mini-batch k holds the same prompts for any number of ranks.
        """
        return self.loader.take(count)[self.world.rank :: self.world.size]

    def grade_early(self, prompts: list[Prompt]):
        """A function for engine.generate(done=...): it grades finished responses while others are still sampled.

        Its attribute `reply` is what an environment answers, for engine.generate(reply=...); None without one.
        """
        return self.reward.ahead(prompts, self.tokenizer, self.step, self.loader.seed)

    def grade(
        self, prompts: list[Prompt], rollout: Rollout, grading=None, *, figures: bool = True, at_least=-math.inf
    ) -> Batch:  # fmt: skip
        """Grade all responses. Collective: every rank calls it. Raises RunFailed, also for a score below `at_least`.

        grading: the function from grade_early(), if it was used. figures: False keeps the responses out of the metrics
        reward/, group/ and response/.
        """
        with self.time("reward"):
            texts = texts_of(rollout, self.tokenizer)
            add = self.add if figures else None
            results = self.reward.score(prompts, texts, rollout, self.world, self.step, add, grading)
        batch = Batch.of(rollout, prompts, texts, results)
        lowest = self.world.min(batch.scores.min()) if at_least > -math.inf else 0.0
        if lowest < at_least:
            said = f"step {self.step}: a response scored {lowest:.3g}, and this algorithm needs {at_least:g} or more"
            raise RunFailed(f"{said}; change --reward or its weight", code="reward-failed")
        if figures:
            self.figures.rollout(batch.scores, len(texts) // len(prompts), batch)
            if rollout.episodes is not None:
                self.reward.environment.log(rollout.episodes, self.add)
        return batch

    def until_full(
        self, generate: Generate, keep: Callable[[torch.Tensor], torch.Tensor], *, wanted: int, prompts_per_draw: int,
        most: int, kept: str,
    ) -> Batch:  # fmt: skip
        """Dynamic sampling: draw prompts until `wanted` of them, on all ranks together, pass the filter.

        All ranks make the same number of draws, until each has its share. Surplus prompts are discarded: in the next
        step their responses would be off-policy. Collective: every rank calls it.
        keep: (B, G) bool, True for right responses -> (B,) bool, True for groups that stay. most: largest number of
        draws; after it the run stops with RunFailed, whose message uses kept: the filter in words.
        """
        share = wanted // self.world.size
        parts: list[tuple[Batch, list[int]]] = []  # for each group that stays: its draw, and its rows there
        for place in range(most):
            prompts = self.prompts(prompts_per_draw)
            grading = self.grade_early(prompts)
            with self.time("rollout"):
                rollout = generate(prompts, place, grading)
            drawn = self.grade(prompts, rollout, grading)
            group_size = len(drawn) // len(prompts)
            graded = drawn.response_mask.any(1).view(-1, group_size).all(1)  # (B,)
            stays = keep(drawn.correct.bool().view(-1, group_size)) & graded  # (B,)
            for group in stays.nonzero().flatten().tolist():
                parts.append((drawn, list(range(group * group_size, (group + 1) * group_size))))
            self.add("sampling/prompts_generated", len(prompts), 0)
            if self.world.min(len(parts)) >= share:
                break
        else:
            raise RunFailed(
                f"step {self.step}: after --max-gen-batches {most} draws a rank has only "
                f"{self.world.min(len(parts)):.0f} of its {share} prompts {kept}: too easy, too hard, or a constant "
                "reward",
                code="no-signal",
            )
        self.add("sampling/prompts_kept", len(parts), 0)
        parts = parts[:share]
        return Batch.of(
            select(parts),
            [drawn.prompts[rows[0] // len(rows)] for drawn, rows in parts],
            [drawn.responses[row] for drawn, rows in parts for row in rows],
            [drawn.results[row] for drawn, rows in parts for row in rows],
        )


class Prefetcher:
    """Calls sample() for one step after the other. With --max-inflight-batches 2 a thread samples one step ahead.

    A step that is sampled ahead misses the latest update: its responses are one step off-policy.
    """

    def __init__(self, sample: Sample, loader: PromptLoader, reward, tokenizer, world: World, tracker: Tracker,
                 layout: Layout):  # fmt: skip
        """Collective: every rank makes one."""
        self.sample, self.loader, self.world, self.tracker = sample, loader, world, tracker
        self.ahead = layout.max_inflight_batches > 1
        self.beside = world.beside() if self.ahead else world
        self.draw = lambda figures: Draw(self.beside, figures, loader, reward, tokenizer)
        self.thread = ThreadPool(1) if self.ahead else None  # a daemon thread, so that a failed run can end
        self.waiting: AsyncResult | None = None

    def get(self, step: int, *, last: bool = False) -> Batch:
        """The batch of this step. With --max-inflight-batches 2 sampling for the next step starts at once.

        last: True if this step ends with a checkpoint or ends the run. Then nothing is sampled ahead, because a resumed
        run also starts with nothing in flight. Raises the errors of sample().
        """
        if not self.ahead:
            self.tracker.sampled, _ = self._collect(step, self.tracker)
            return self.tracker.sampled
        with self.tracker.time("wait"):
            batch, figures = (self.waiting or self._begin(step)).get()
        self.tracker.merge(figures)
        self.tracker.sampled = batch
        self.loader.in_flight = None if last else self.loader.position  # position that a checkpoint stores
        self.waiting = None if last else self._begin(step + 1)
        return batch

    def wait(self) -> None:
        """Wait until no sampling is in flight, so that an evaluation can use the engine. get() raises its errors."""
        if self.waiting is not None:
            self.waiting.wait()

    def _begin(self, step: int) -> AsyncResult:
        return self.thread.apply_async(self._collect, (step, Figures(self.world)))

    def _collect(self, step: int, figures: Figures) -> tuple[Batch, Figures]:
        if self.ahead and self.world.device.type == "cuda":
            torch.cuda.set_device(self.world.device)  # a thread starts with device 0
        draw = self.draw(figures)
        draw.step = figures.step = step
        return self.sample(step, draw), figures
