"""The frame around training on a fixed data set, without an engine: resuming, metrics, checkpoints, the report.

    resume, dtype = find(args)              refuses folders that do not fit; ends a run that is done already
    run = Run(args, resume, ...)            loads the checkpoint and opens the run directory
    for step in run.steps():                the file trains
        run.end_step(step)                  writes metrics, saves
    run.close()

args: the file's flags, among them `model`, `output`, `dtype`, `run_dir`, `saving`, `track`, `steps` and `seed`.
"""

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import PreTrainedTokenizerBase

from common import placement
from common.data import arithmetic
from common.data.prompts import PromptLoader
from common.errors import BadInput
from common.placement import World
from common.run import checkpoint, directory, precision
from common.run.tracking import Tracker


def find(args) -> tuple[Path | None, torch.dtype]:
    """The checkpoint to resume, or None, and the dtype, which replaces "auto" in args.dtype. Raises BadInput."""
    check_output(args)
    resume = directory.check_directory(args.run_dir, args.saving.resume, args.track)
    dtype = precision.choose(args.dtype, args.model or str(arithmetic.WARM_START), resume)
    args.dtype = str(dtype).removeprefix("torch.")
    directory.check_configuration(args, directory.name_of(args))
    directory.leave_if_done(args, resume)
    return resume, dtype


def check_output(args) -> None:
    """Refuse an --output that cannot be written, that is the start itself, or whose files would mix with the new ones:
    a folder with adapters and whole weights is read as either. Raises BadInput.
    """
    directory.check_writable(args.output, "--output")
    folder, adapts = Path(args.output), args.compute.lora_rank > 0
    if args.model and Path(args.model).is_dir() and folder.is_dir() and folder.samefile(args.model):
        raise BadInput(f"--output {folder}: is --model, which would be overwritten; name another folder")
    if (folder / ("config.json" if adapts else "adapter_config.json")).is_file():
        there, new = ("a whole model", "adapters") if adapts else ("adapters", "a whole model")
        raise BadInput(f"--output {folder}: holds {there}, and this run writes {new}; name another folder")


class Run:
    """The steps of a run. Collective: every rank calls every method."""

    def __init__(
        self, args, resume: Path | None, trained: checkpoint.Trained, loader: PromptLoader,
        tokenizer: PreTrainedTokenizerBase, dtype: torch.dtype, world: World,
    ):  # fmt: skip
        """trained: name -> (model, optimizer); "policy" is exported. Raises BadInput or RunFailed."""
        self.steps_wanted, self.world = args.steps, world
        self.saver = checkpoint.Saver(args.saving, trained, loader, None, None, tokenizer, dtype, world)
        done = self.saver.load(resume)
        self.tracker = Tracker(args.run_dir, directory.name_of(args), args, world, args.track, done, args.steps)
        self.saver.signals.doing = self.tracker.doing

    def steps(self) -> Iterator[int]:
        """Yields the remaining steps, from 1 to --steps, or until a signal asks the run to stop."""
        for step in self.saver.steps(self.tracker.run_dir, self.steps_wanted):
            self.tracker.begin(step)
            self.tracker.before_failing = partial(self.rescue, step - 1, self.saver.loader.resume_at)
            yield step

    def end_step(self, step: int) -> None:
        """Write the metrics of the step, and save a checkpoint if it is due. Raises RunFailed."""
        self.saver.step_done(step, self.tracker.write(step))
        self.tracker.refresh_report()

    def rescue(self, step: int, position: int) -> None:
        """Save the state after `step` before the run fails, and write the report."""
        self.saver.rescue(step, position)
        self.tracker.close()
        dist.barrier()  # A rank that ended now would end rank 0, which writes the report.

    def close(self) -> None:
        """Write the report and end the run on all ranks together."""
        self.tracker.close()
        placement.finish(self.world)
