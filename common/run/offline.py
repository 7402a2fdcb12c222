"""The frame around training on a fixed data set, without an engine: resuming, metrics, checkpoints, the report.

    settings = settle(args, ...)            common/preflight/offline.py: refuses folders that do not fit
    run = Run(settings, ...)                loads the checkpoint and opens the run directory
    for step in run.steps():                the file trains
        run.end_step(step)                  writes metrics, saves
    run.close()

There is no evaluation: scripts/evaluate.py measures the model before and after.
"""

from collections.abc import Iterator
from functools import partial

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
    """The steps of a run. Collective: every rank calls every method."""

    def __init__(
        self,
        settings: OfflineSettings,
        trained: checkpoint.Trained,
        loader: PromptLoader,
        tokenizer: PreTrainedTokenizerBase,
        world: World,
    ):
        """trained: name -> (model, optimizer); "policy" is exported. Raises BadInput or RunFailed."""
        args = settings.args
        self.steps_wanted, self.world = args.steps, world
        self.saver = checkpoint.Saver(args.saving, trained, loader, None, None, tokenizer, settings.dtype, world)
        done = self.saver.load(settings.resume)
        self.tracker = Tracker(
            run_dir=args.run_dir,
            name=settings.name,
            args=settings.recorded,
            world=world,
            track=args.track,
            start=done,
            steps=args.steps,
            date=date_of(tokenizer),
        )
        self.saver.signals.doing = self.tracker.doing

    def steps(self) -> Iterator[int]:
        """Yield the remaining steps, up to --steps or until a signal asks the run to stop. end_step() ends each."""
        for step in self.saver.steps(self.tracker.run_dir, self.steps_wanted):
            self.tracker.begin(step)
            self.tracker.before_failing = partial(self.rescue, step - 1, self.saver.loader.resume_at)
            yield step

    def end_step(self, step: int) -> None:
        """Write the metrics of the step, and save a checkpoint if it is due. Raises RunFailed."""
        try:
            self.saver.step_done(step, self.tracker.write(step))
        except errors.OneLine:
            self.rescue(step, self.saver.loader.resume_at)
            raise
        self.tracker.refresh_report()

    def rescue(self, step: int, position: int) -> None:
        """Save the state after `step` before the run fails, and write the report. Collective: every rank calls it.

        position: where the next prompts begin.
        """
        self.saver.rescue(step, position)
        self.tracker.close()
        dist.barrier()  # wait for rank 0's report: torchrun kills rank 0 as soon as another rank exits

    def close(self) -> None:
        """Write the report and end the run on all ranks together."""
        self.tracker.close()
        placement.finish(self.world)
