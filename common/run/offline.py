"""The frame around training on a fixed data set, without an engine: resuming, metrics, checkpoints, the report.

    settings = settle(args, ...)            common/preflight/offline.py: refuses folders that do not fit
    run = Run(settings, ...)                loads the checkpoint and opens the run directory
    for step in run.steps():                the file trains
        run.end_step(step)                  writes metrics, saves
    run.close()

There is no evaluation: scripts/evaluate.py measures the model before and after.
"""

import contextlib
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch.distributed as dist
from transformers import PreTrainedTokenizerBase

from common import errors, placement
from common.data.dates import date_of
from common.data.prompts import PromptLoader
from common.placement import World
from common.preflight.offline import OfflineSettings
from common.run import checkpoint
from common.run.tracking import Tracker


class Run:
    """The steps of a run. Collective: every rank calls every method. job.Run adds what a run that samples needs."""

    def __init__(
        self,
        settings: OfflineSettings,
        trained: checkpoint.Trained,
        loader: PromptLoader,
        tokenizer: PreTrainedTokenizerBase,
        world: World,
        reward=None,
        engine=None,
    ):
        """trained: name -> (model, optimizer); "policy" is exported. Raises BadInput or RunFailed."""
        self.args = settings.args
        self.loader = loader
        self.world = world
        self.engine = engine
        self.saver = checkpoint.Saver(
            self.args.saving, trained, loader, reward, engine, tokenizer, settings.dtype, world
        )
        # The run directory is written to last. If the run can't begin, the same command can be tried again. If its
        # first evaluation fails, it goes on with --resume auto.
        done = self.load(settings.resume)
        self.tracker = Tracker(settings.recorded, settings.name, world, start=done, date=date_of(tokenizer))
        self.saver.signals.doing = self.tracker.doing  # says what the run is busy with when a signal asks it to stop

    def load(self, resume: Path | None) -> int:
        """Load the checkpoint to resume. Returns its step; 0 for a fresh run. Raises BadInput or RunFailed."""
        return self.saver.load(resume)

    def steps(self) -> Iterator[int]:
        """Yield the remaining steps, up to --steps or until a signal asks the run to stop. end_step() ends each."""
        for step in self.saver.steps(self.tracker.run_dir, self.args.steps):
            self.tracker.begin(step)
            self.tracker.before_failing = partial(self.rescue, step - 1, self.loader.resume_at)
            yield step

    def end_step(self, step: int) -> None:
        """Write the metrics of the step, and save a checkpoint if it is due. Raises RunFailed."""
        with self.rescued(step, self.loader.resume_at):
            self.saver.step_done(step, self.tracker.write(step))
        self.tracker.refresh_report()

    @contextlib.contextmanager
    def rescued(self, step: int, position: int) -> Iterator[None]:
        """If the block raises an errors.OneLine, such as RunFailed, rescue and raise it again.

        Whoever raises a OneLine inside a run makes sure that all ranks do, so rescue() can be a collective.
        """
        try:
            yield
        except errors.OneLine:
            self.rescue(step, position)
            raise

    def rescue(self, step: int, position: int) -> None:
        """Save a checkpoint labelled `step` that resumes with the prompts at `position`, and write the report.

        Its weights include any updates that the failing step has already made. Collective: every rank calls it.
        """
        self.saver.rescue(step, position)
        self.tracker.close()
        dist.barrier()  # wait for rank 0's report: torchrun kills rank 0 as soon as another rank exits

    def close(self) -> None:
        """Write the report and end the run on all ranks together."""
        self.tracker.close()
        placement.finish(self.world, self.engine)
