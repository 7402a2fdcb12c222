"""Runs on a fixed data set, without an engine: their folders are checked and their sizes settled."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from common.data.prompts import Prompt
from common.errors import BadInput
from common.preflight import checks, machine, precision, run_directory
from common.preflight.memory import MemoryPlan
from common.trainer.batching import Compute


@dataclass(frozen=True)
class OfflineSettings:
    """A run whose input has been checked, and which has not started."""

    args: Any  # the flags as the user typed them
    name: str  # name of the algorithm's file, without .py
    model: str  # folder or Hub name
    resume: Path | None  # checkpoint to resume; None starts at step 1
    dtype: torch.dtype  # data type of forward and backward
    compute: Compute  # with a token budget

    @property
    def recorded(self):
        """The flags with the settled values, for run.json. Without --model a model with random weights is trained."""
        return replace(
            self.args,
            model=self.model if self.args.model else "",
            dtype=str(self.dtype).removeprefix("torch."),
            compute=self.compute,
        )


def settle(args, model: str, prompts: list[Prompt], size: int, longest: int, longest_unit: int = 0) -> OfflineSettings:
    """Check the folders of a run and settle its sizes. Raises BadInput.

    args: the file's flags, among them `model`, `output`, `dtype`, `compute`, `run_dir`, `saving`, `track` and `steps`.
    model: the folder or Hub name that --model stands for. prompts: all that are trained on. size: number of ranks.
    longest: tokens of the longest row. longest_unit: tokens of the longest DPO pair, whose rows share a forward and
    their prompt; 0 without pairs.
    """
    # The caller has checked its flags, its data and the model. What is left are folders and sizes.
    machine.check_tracker(args.track)
    checks.check_compute(model, args.compute)
    check_output(args.output, model if args.model else "", args.compute.lora_rank > 0)
    resume = run_directory.check_directory(args.run_dir, args.saving.resume)
    dtype = precision.choose(args.dtype, model, resume)
    compute = checks.settle_packing(model, args.compute, prompts)
    if longest_unit and (compute.packing == "off" or not compute.shared_prompts):
        longest_unit = 2 * longest  # each row of a pair has the prompt, and padding to the longer row
    settings = OfflineSettings(
        args=args,
        name=run_directory.name_of(args),
        model=model,
        resume=resume,
        dtype=dtype,
        compute=MemoryPlan(model=model, dtype=dtype, size=size, compute=compute).fitted_compute(longest, longest_unit),
    )
    run_directory.check_configuration(settings.recorded, settings.name)
    run_directory.check_steps_left(args, resume)
    run_directory.warn_of_changed_code(args, resume)
    return settings


def check_output(output: str, start: str, adapts: bool) -> None:
    """Refuse an --output that cannot be written, that is the start itself, or whose files would mix with the new ones:
    a folder with adapters and whole weights is read as either. Raises BadInput.
    """
    run_directory.check_writable(output, "--output")
    folder = Path(output)
    if start and Path(start).is_dir() and folder.is_dir() and folder.samefile(start):
        raise BadInput(f"--output {folder}: is --model, which would be overwritten; name another folder")
    # transformers reads a folder with both kinds of files as either.
    if adapts and (folder / "config.json").is_file():
        raise BadInput(f"--output {folder}: holds a whole model, and this run writes adapters; name another folder")
    if not adapts and (folder / "adapter_config.json").is_file():
        raise BadInput(f"--output {folder}: holds adapters, and this run writes a whole model; name another folder")
