"""The part of scripts/selftest.py that tries an algorithm's file: its gradients in one and in several micro-batches.

    python scripts/selftest.py algos/grpo.py             (any file, then its own flags: my_fork.py --kl-coef 0.1)

It runs the file's own main() twice, in float32, on few prompts. In the first run each optimizer step gets its rows in
one micro-batch, in the second run the same rows in several. Micro-batches only limit memory, so all gradients must
agree. They do not if the loss, an advantage or anything else depends on how rows are cut.

Exits with 1 and a line for each model whose gradients differ. One rank finds nothing that goes wrong on several.
"""

import copy
import io
import itertools
import math
import sys
import tempfile
import time
import zlib
from contextlib import redirect_stdout
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType
from unittest import mock

import torch
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from common import errors, placement
from common.placement import World
from common.preflight import flags, machine
from common.preflight.flags import EMBEDDED, Flags, Saving
from common.preflight.prepare import Settings
from common.rewards import mixture as reward_mixture
from common.rewards.grading import Result
from common.rollout.rollout import Rollout
from common.run import job
from common.run.directory import import_algorithm
from common.trainer import batching

BOUND = 1e-4  # of the relative difference of a gradient in float32
ROWS_IN_MICRO_BATCHES = (3, 1, 2)  # repeated; unequal: a wrong mean over equal micro-batches is right
ROWS_PER_UPDATE = 24  # responses of an optimizer step on one rank, at least; and at least two prompts
MOST_STEPS = 10  # steps after which a model that was not updated fails
Update = tuple[int, list[torch.Tensor]]  # (number of micro-batches, gradients) of an optimizer step


class Trial:
    """One of the two runs of a file: the batches it trained on, and what each optimizer step was given."""

    def __init__(self, first: "Trial | None" = None):
        """first: the run that this one repeats, on the same batches and with other micro-batches."""
        self.first, self.trained, self.batches, self.micro_batches = first, {}, [], 0
        self.updates: dict[str, list[Update]] = {}  # by the name of the model

    def fill_bins(
        self, rollout: Rollout, rows: torch.Tensor, compute: batching.Compute, unit_size: int
    ) -> list[batching.Bin]:
        """The rows of each micro-batch, in place of batching.fill_bins: all in one or, in the second run, a few."""
        left = rows.view(-1, unit_size).tolist()
        sizes = itertools.cycle(ROWS_IN_MICRO_BATCHES) if self.first else iter([len(left)])
        bins = []
        while left:
            size = next(sizes)
            bins.append(batching.Bin(left[:size]))
            left = left[size:]
        self.micro_batches = len(bins)
        return bins

    @torch.no_grad()
    def before_update(self, optimizer: torch.optim.Optimizer, *given) -> None:
        """Keep the gradients. The second run then takes those of the first, so that both go on with equal weights."""
        name = next((name for name, (_, own) in self.trained.items() if own is optimizer), "another model")
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        gradients = [shard(parameter.grad) for parameter in parameters if parameter.grad is not None]
        updates = self.updates.setdefault(name, [])
        updates.append((self.micro_batches, [gradient.to("cpu", copy=True) for gradient in gradients]))
        if self.first and len(updates) <= len(self.first.updates.get(name, [])):
            for gradient, kept in zip(gradients, self.first.updates[name][len(updates) - 1][1]):
                gradient.copy_(kept)


class TrialRun(job.Run):
    """A run that ends as soon as each of its models has been updated. It evaluates, reports and saves nothing."""

    def __init__(self, trial: Trial, settings: Settings, world: World, engine, trained):
        super().__init__(settings, world, engine, trained)
        self.trial, trial.trained = trial, trained
        if world.is_main:
            self.tracker.bar.leave = False
            self.tracker.bar.close()

    def steps(self, sample):
        trial, first = self.trial, self.trial.first
        for step, batch in super().steps((lambda step, draw: first.batches[step - 1]) if first else sample):
            if not first:
                vary_lengths(batch)
                trial.batches.append(copy.deepcopy(batch))  # the file may change its batch
            torch.manual_seed(step)  # without it the second run, which did not sample, would draw other numbers
            yield step, batch
            if step == (len(first.batches) if first else MOST_STEPS) or trial.trained.keys() <= trial.updates.keys():
                return

    def end_step(self, *given, **named) -> None:
        """Nothing is written, evaluated or saved."""

    def rescue(self, *given) -> None:
        """Nothing is saved."""

    def close(self) -> None:
        """The process group stays, for the second run."""


def vary_lengths(batch: Rollout) -> None:
    """Leave row i its first 1 + i mod length tokens: sampled lengths may be equal, and then a wrong divisor is, too."""
    columns = torch.arange(batch.response_mask.shape[1], device=batch.response_mask.device)  # (T,)
    rows = torch.arange(len(batch), device=columns.device)  # (N,)
    left = 1 + rows % batch.response_mask.sum(1).clamp(min=1)
    batch.response_mask &= columns < left[:, None]


def launch(file: str) -> None:
    """Try a file with the flags of the command line, which are those of the file."""
    algorithm = import_algorithm(Path(file))
    if not issubclass(algorithm.Args, Flags):
        raise errors.BadInput(f"{file}: its Args does not extend Flags, so its main() cannot be tried")
    defaults = getattr(algorithm, "EMBEDDED", EMBEDDED)
    flags.launch(partial(main, algorithm), algorithm.Args, defaults, algorithm.__doc__)


def main(algorithm: ModuleType, args: Flags) -> None:
    """Run the file twice and compare all gradients. Collective: every rank calls it. Exits with 1 if they differ."""
    began = time.perf_counter()
    machine.check_world(1, sharding=args.compute)
    world = placement.init(args.seed, sharding=args.compute)
    first = Trial()
    second = Trial(first)
    run(algorithm, args, first, world)
    try:
        run(algorithm, args, second, world)
        names = [*first.trained, *(first.updates.keys() - first.trained.keys())]
        rows = {name: compare(first.updates.get(name, []), second.updates.get(name, []), world) for name in names}
    except errors.RunFailed as error:
        rows = {"all models": ("", f"with its rows in several micro-batches, but not in one, the run fails: {error}")}
    placement.finish(world)
    for name, (measured, wrong) in rows.items():
        errors.say(f"{f'loss of {name}':<20}  {measured:<80}  {'FAILS' if wrong else 'holds'}")
    failed = {name: wrong for name, (_, wrong) in rows.items() if wrong}
    errors.say(f"selftest: {len(rows) - len(failed)} of {len(rows)} hold, {time.perf_counter() - began:.1f} s")
    for name, wrong in failed.items():
        errors.say(f"loss of {name}: {wrong}")
    if failed:
        sys.exit(1)


def run(algorithm: ModuleType, args: Flags, trial: Trial, world: World) -> None:
    """Run the file's main() on few prompts. Collective: every rank calls it."""

    grade = reward_mixture.Rewards.score

    def join(seed: int, *given) -> World:
        torch.manual_seed(seed)
        return world

    def score(rewards, prompts, responses: list[str], *given) -> list[Result]:
        """Grade as usual. Then let a checksum of the text decide, so that half of them are right with any model."""
        right = [float(zlib.crc32(text.encode()) % 2) for text in responses]
        results = grade(rewards, prompts, responses, *given)
        return [replace(result, score=number, acc=number) for result, number in zip(results, right)]

    hook = register_optimizer_step_pre_hook(trial.before_update)
    with (
        tempfile.TemporaryDirectory(prefix="selftest-") as folder,
        redirect_stdout(io.StringIO()),
        mock.patch.object(placement, "init", join),
        mock.patch.object(batching, "fill_bins", trial.fill_bins),
        mock.patch.object(job, "Run", partial(TrialRun, trial)),
        mock.patch.object(reward_mixture.Rewards, "score", score),
    ):
        try:
            algorithm.main(small(args, folder, world.size))
        finally:
            hook.remove()


def small(args: Flags, folder: str, size: int) -> Flags:
    """The flags for few prompts, in float32, with an engine that starts fast. Those of the algorithm stay."""
    prompts = args.mini_batches * size * max(2, math.ceil(ROWS_PER_UPDATE / args.group_size))
    changed = {
        "prompts_per_step": prompts, "gen_prompts": 2 * prompts, "run_dir": folder, "saving": Saving(),
        "source": replace(args.source, eval_prompts=0), "track": "none", "dtype": "float32", "rollout_backend": "hf",
        "rollout_tp": 1, "layout": placement.Layout(),
        "temperature": 2.0,  # at a low one responses may be equal, and then all gradients vanish
        "max_grad_norm": 1e9,  # a gradient that is scaled to a norm would hide a wrong factor
    }  # fmt: skip
    return replace(args, **{name: value for name, value in changed.items() if hasattr(args, name)})


def compare(one: list[Update], several: list[Update], world: World) -> tuple[str, str]:
    """(what was measured of a model's updates in both runs, what is wrong or ""). Collective: every rank calls it."""
    if not one:
        return "no update", f"it was not updated in {MOST_STEPS} steps: do all its gradients vanish?"
    if len(one) != len(several):
        said = f"{len(one)} optimizer steps with one micro-batch each, and {len(several)} with several"
        return said, f"{said}: does optimizer.step() stand in the loop over micro-batches?"
    count = max(number for number, _ in several)
    lengths = [squares(gradients, world) ** 0.5 for _, gradients in one]
    if not max(lengths) > 0:
        return "gradients of 0", "all its gradients are 0 or NaN"
    worst = 0.0
    for length, (_, a), (_, b) in zip(lengths, one, several):
        off = squares([x - y for x, y in zip(a, b)], world) ** 0.5 if len(a) == len(b) else math.inf
        # A gradient that almost vanishes is made of rounding errors, which no cut repeats.
        worst = max(worst, off / max(length, 0.01 * max(lengths)) if math.isfinite(off) else math.inf)
    measured = f"{worst:.1e} (<= {BOUND:g}) between 1 and {count} micro-batches, {len(one)} updates"
    if count < 2:
        return measured, "its rows were never cut into micro-batches: does the file pack them with batching.pack?"
    if worst <= BOUND:
        return measured, ""
    percent = f"{100 * worst:.0f}" if worst > 0.1 else f"{100 * worst:.2g}"
    return measured, (
        f"the gradient in {count} micro-batches differs by {percent} % from that in one: is something divided by a "
        "number of the micro-batch, in place of `denominator`?"
    )


def squares(tensors: list[torch.Tensor], world: World) -> float:
    """Sum of the squares of all numbers, over all ranks. Collective: every rank calls it."""
    return world.sum(sum(tensor.double().square().sum() for tensor in tensors))


@torch.no_grad()
def shard(tensor: torch.Tensor) -> torch.Tensor:
    """The part that this rank holds: the memory itself, not a copy."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
