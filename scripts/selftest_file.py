"""The part of scripts/selftest.py that tries an algorithm's file: its gradients in one and in several micro-batches.

    python scripts/selftest.py algos/grpo.py             (any file, then its own flags: my_fork.py --kl-coef 0.1)

It runs the file's own main() twice, in float32, on few prompts:

    first run     the rows of each optimizer step are in one micro-batch
    second run    the same rows, in several micro-batches

Micro-batches only limit memory, so all gradients must agree. They don't if the loss, an advantage or anything else
depends on how rows are cut. For this, run() replaces a few functions of common/ while main() runs:

    placement.init          both runs share one process group
    batching.fill_bins      decides which rows share a micro-batch, see Trial.fill_bins
    job.Run                 ends after the first updates, and writes nothing, see TrialRun
    Rewards.score           gives half of the responses a score of 1, so that gradients don't vanish

A hook of torch keeps the gradients of each optimizer step.

Exits with 1 and a line for each model whose gradients differ. One rank can't find what goes wrong on several.
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
from dataclasses import dataclass, replace
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
from common.processes.child import import_algorithm
from common.rewards import mixture as reward_mixture
from common.rewards.grading import Result
from common.rollout.rollout import Rollout
from common.run import job
from common.trainer import batching

BOUND = 1e-4  # largest relative difference of two gradients in float32
# Sizes of the second run's micro-batches, repeated. They differ, because a mean of equal micro-batches would be right.
ROWS_IN_MICRO_BATCHES = (3, 1, 2)
ROWS_PER_UPDATE = 24  # at least so many responses in an optimizer step on one rank; and at least two prompts
MOST_STEPS = 10  # a model that was not updated after so many steps fails
NEGLIGIBLE = 0.01  # a gradient below this share of the longest one is mostly rounding error, which every cut changes
Gradients = list[torch.Tensor]  # this rank's shards of a model's gradients in one optimizer step


class Trial:
    """One of the two runs of a file: the batches it trained on, and the gradients of its optimizer steps."""

    def __init__(self, first: "Trial | None" = None):
        """first: the run that this one repeats, on the same batches and with smaller micro-batches."""
        self.first = first
        self.trained: dict = {}  # name -> (model, optimizer), as in job.start()
        self.batches: list[Rollout] = []  # of each step
        self.gradients: dict[str, list[Gradients]] = {}  # name of the model -> gradients of its optimizer steps
        self.micro_batches = 0  # the largest number of micro-batches that rows were cut into

    def fill_bins(
        self, rollout: Rollout, rows: torch.Tensor, compute: batching.Compute, unit_size: int
    ) -> list[batching.Bin]:
        """The rows of each micro-batch, in place of batching.fill_bins: all in one or, in the second run, a few."""
        left = rows.view(-1, unit_size).tolist()
        sizes = itertools.repeat(len(left))
        if self.first:
            sizes = itertools.cycle(ROWS_IN_MICRO_BATCHES)
        bins = []
        while left:
            size = next(sizes)
            bins.append(batching.Bin(left[:size]))
            left = left[size:]
        self.micro_batches = max(self.micro_batches, len(bins))
        return bins

    @torch.no_grad()
    def before_update(self, optimizer: torch.optim.Optimizer, *hook_arguments) -> None:
        """Keep the gradients. The second run then takes those of the first, so that both go on with equal weights.

        Otherwise Adam would turn rounding errors of tiny gradients into steps, and the next gradients would differ.
        """
        name = self.name_of(optimizer)
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        gradients = [shard(parameter.grad) for parameter in parameters if parameter.grad is not None]
        updates = self.gradients.setdefault(name, [])
        updates.append([gradient.to("cpu", copy=True) for gradient in gradients])
        if self.first is None:
            return
        updates_of_first = self.first.gradients.get(name, [])
        if len(updates) > len(updates_of_first):
            return  # the first run has no such update; compare() will say so
        for gradient, of_first in zip(gradients, updates_of_first[len(updates) - 1]):
            gradient.copy_(of_first)

    def batch_of(self, step: int, sampler) -> Rollout:
        """The batch of a step, in place of the file's own sample()."""
        return self.batches[step - 1]

    def name_of(self, optimizer: torch.optim.Optimizer) -> str:
        """The name of the model that this optimizer trains."""
        for name, (_, its_optimizer) in self.trained.items():
            if its_optimizer is optimizer:
                return name
        return "another model"


class TrialRun(job.Run):
    """A run that ends as soon as each of its models has been updated. It evaluates, reports and saves nothing."""

    def __init__(self, trial: Trial, settings: Settings, world: World, engine, trained):
        super().__init__(settings, world, engine, trained)
        self.trial = trial
        trial.trained = {name: both for name, both in trained.items() if both[1] is not None}
        for model, _ in trial.trained.values():
            # A run keeps gradients apart until the last micro-batch. Here each backward must put them in place, so that
            # an optimizer step that comes too early finds some. compare() then counts one step too many.
            model.whole_gradients = False
        if world.is_main:
            self.tracker.bar.leave = False
            self.tracker.bar.close()

    def steps(self, sample):
        """The steps until each model was updated. The second run gets the batches of the first."""
        trial = self.trial
        last_step = MOST_STEPS
        if trial.first:
            sample = trial.first.batch_of
            last_step = len(trial.first.batches)
        for step, batch in super().steps(sample):
            if not trial.first:
                vary_lengths(batch)
                trial.batches.append(copy.deepcopy(batch))  # the file may change its batch
            # The second run doesn't sample. Without a new seed its later random numbers would be others.
            torch.manual_seed(step)
            yield step, batch
            all_updated = trial.trained.keys() <= trial.gradients.keys()
            if all_updated or step == last_step:
                return

    def end_step(self, *arguments, **named_arguments) -> None:
        """Nothing is written, evaluated or saved."""

    def rescue(self, *arguments) -> None:
        """Nothing is saved."""

    def close(self) -> None:
        """The process group stays, for the second run."""


def vary_lengths(batch: Rollout) -> None:
    """Shorten row i to its first 1 + i mod length tokens, and mark every fifth row as cut off.

    Sampled lengths may all be equal. A loss that divides by a wrong length would then be right. And a few prompts may
    have no response that was cut off, for a file that leaves those out.
    """
    columns = torch.arange(batch.response_mask.shape[1], device=batch.response_mask.device)  # (T,)
    rows = torch.arange(len(batch), device=columns.device)  # (N,)
    left = 1 + rows % batch.response_mask.sum(1).clamp(min=1)
    batch.response_mask &= columns < left[:, None]
    batch.truncated |= rows % 5 == 4


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
    verdicts = {}
    try:
        run(algorithm, args, second, world)
    except errors.RunFailed as error:
        reason = f"with its rows in several micro-batches, but not in one, the run fails: {error}"
        verdicts["all models"] = Verdict("", reason)
    else:
        for name in [*first.trained, *(first.gradients.keys() - first.trained.keys())]:
            one = first.gradients.get(name, [])
            several = second.gradients.get(name, [])
            verdicts[name] = compare(one, several, second.micro_batches, world)
    placement.finish(world)

    for name, verdict in verdicts.items():
        label = f"loss of {name}"
        errors.say(f"{label:<20}  {verdict.measured:<80}  {'FAILS' if verdict.wrong else 'holds'}")
    failed = {name: verdict.wrong for name, verdict in verdicts.items() if verdict.wrong}
    seconds = time.perf_counter() - began
    errors.say(f"selftest: {len(verdicts) - len(failed)} of {len(verdicts)} hold, {seconds:.1f} s")
    for name, wrong in failed.items():
        errors.say(f"loss of {name}: {wrong}")
    if failed:
        sys.exit(1)


def run(algorithm: ModuleType, args: Flags, trial: Trial, world: World) -> None:
    """Run the file's main() on few prompts. Collective: every rank calls it."""
    grade = reward_mixture.Rewards.score

    def join(seed: int, *arguments, **keywords) -> World:
        """In place of placement.init: the world exists already."""
        torch.manual_seed(seed)
        return world

    def score(rewards, prompts, responses: list[str], *arguments) -> list[Result]:
        """Grade as usual. Then let a checksum of the text decide, so that about half are right with any model."""
        results = []
        for text, result in zip(responses, grade(rewards, prompts, responses, *arguments)):
            number = float(zlib.crc32(text.encode()) % 2)
            results.append(replace(result, score=number, acc=number))
        return results

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
    prompts_per_update = max(2, math.ceil(ROWS_PER_UPDATE / args.group_size))
    prompts = args.mini_batches * size * prompts_per_update
    changed = {
        "prompts_per_step": prompts,
        "gen_prompts": 2 * prompts,
        "run_dir": folder,
        "saving": Saving(),
        "source": replace(args.source, eval_prompts=0),
        "track": "none",
        "dtype": "float32",
        "rollout_backend": "hf",
        "rollout_tp": 1,
        "layout": placement.Layout(),
        # At a low temperature all responses may be equal. Then all gradients would vanish.
        "temperature": 2.0,
        # A gradient that is scaled to a norm would hide a wrong factor.
        "max_grad_norm": 1e9,
    }
    return replace(args, **{name: value for name, value in changed.items() if hasattr(args, name)})


@dataclass
class Verdict:
    """What was measured of a model's gradients, and what is wrong with them; "" if nothing is."""

    measured: str
    wrong: str = ""


def compare(one: list[Gradients], several: list[Gradients], micro_batches: int, world: World) -> Verdict:
    """Compare a model's gradients of the first and of the second run. Collective: every rank calls it.

    micro_batches: the largest number of micro-batches in the second run.
    """
    if not one:
        return Verdict("no update", f"it was not updated in {MOST_STEPS} steps: do all its gradients vanish?")
    if len(one) != len(several):
        measured = f"{len(one)} optimizer steps with one micro-batch each, and {len(several)} with several"
        return Verdict(measured, f"{measured}: does optimizer.step() stand in the loop over micro-batches?")
    lengths = [squares(gradients, world) ** 0.5 for gradients in one]
    longest = max(lengths)
    if not longest > 0:  # NaN is not > 0, either
        return Verdict("gradients of 0", "all its gradients are 0 or NaN")

    worst = 0.0
    for length, a, b in zip(lengths, one, several):
        distance = math.inf
        if len(a) == len(b):
            distance = squares([x - y for x, y in zip(a, b)], world) ** 0.5
        if math.isnan(distance):
            distance = math.inf  # max() would lose a NaN
        worst = max(worst, distance / max(length, NEGLIGIBLE * longest))

    measured = f"{worst:.1e} (<= {BOUND:g}) between 1 and {micro_batches} micro-batches, {len(one)} updates"
    if micro_batches < 2:
        return Verdict(measured, "its rows were never cut into micro-batches: does the file pack them with batching?")
    if worst <= BOUND:
        return Verdict(measured)
    percent = f"{100 * worst:.0f}" if worst > 0.1 else f"{100 * worst:.2g}"
    return Verdict(
        measured,
        f"the gradient in {micro_batches} micro-batches differs by {percent} % from that in one: is something divided "
        "by a number of the micro-batch, in place of `denominator`?",
    )


def squares(tensors: list[torch.Tensor], world: World) -> float:
    """Sum of the squares of all numbers, over all ranks. Collective: every rank calls it."""
    return world.sum(sum(tensor.double().square().sum() for tensor in tensors))


@torch.no_grad()
def shard(tensor: torch.Tensor) -> torch.Tensor:
    """The part that this rank holds: the memory itself, not a copy."""
    if isinstance(tensor, DTensor):
        return tensor.to_local()
    return tensor
