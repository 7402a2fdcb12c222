"""The next step's responses while this one trains: `--max-inflight-batches 2`."""

from collections.abc import Callable
from multiprocessing.pool import AsyncResult, ThreadPool
from typing import Any

import torch

from common.data import PromptLoader
from common.placement import Layout, World
from common.tracking import Figures, Tracker


class Prefetcher:
    """sample(step, world, figures) of one step after the other; one step ahead if the layout says so.

    Ahead, a step's responses come from the weights before the latest update: one step off-policy. They are sampled
    and graded in a thread whose collectives and figures are its own. Otherwise sample() is just called.
    """

    def __init__(
        self, sample: Callable[[int, World, Figures], Any], loader: PromptLoader, world: World, tracker: Tracker,
        layout: Layout,
    ):  # fmt: skip
        """Collective: every rank makes one."""
        self.sample, self.loader, self.world, self.tracker = sample, loader, world, tracker
        self.ahead = layout.max_inflight_batches > 1
        self.beside = world.beside() if self.ahead else world
        self.thread = ThreadPool(1) if self.ahead else None  # its thread does not keep a failed run from ending
        self.waiting: AsyncResult | None = None

    def get(self, step: int, *, last: bool = False) -> Any:
        """sample() of this step. Ahead, the next one starts at once, but not after the last of a checkpoint.

        last: this step ends in a checkpoint or the run; a resumed run starts there with nothing in flight, too.
        """
        if not self.ahead:
            self.tracker.sampled = self.sample(step, self.world, self.tracker)
            return self.tracker.sampled
        with self.tracker.time("wait"):
            result, figures = (self.waiting or self._begin(step)).get()
        self.tracker.merge(figures)
        self.tracker.sampled = result
        self.loader.in_flight = None if last else self.loader.position  # drawn again after a stop
        self.waiting = None if last else self._begin(step + 1)
        return result

    def wait(self) -> None:
        """Until nothing is in flight: an evaluation asks the same engine and the same graders. get() raises errors."""
        if self.waiting is not None:
            self.waiting.wait()

    def _begin(self, step: int) -> AsyncResult:
        return self.thread.apply_async(self._collect, (step,))

    def _collect(self, step: int) -> tuple[Any, Figures]:
        if self.world.device.type == "cuda":
            torch.cuda.set_device(self.world.device)  # a thread begins with device 0
        figures = Figures(self.world)
        return self.sample(step, self.beside, figures), figures
