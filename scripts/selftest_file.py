"""The part of scripts/selftest.py that tries an algorithm's file: do cuts or masked tokens change its gradients?

    python scripts/selftest.py algos/grpo.py             (any file, then its own flags: my_fork.py --kl-coef 0.1)

It runs the file's own main() three times, in float32, on few prompts:

    plain     the rows of each optimizer step are in one micro-batch
    cut       the same rows, in several micro-batches
    masked    the rows as in the plain run, with other log-probs, values and divergences where response_mask is False

Micro-batches only limit memory, so the plain and the cut run must have the same gradients. They don't if the loss, an
advantage or anything else depends on how rows are cut. Masked tokens are padding or an environment's text, so the
masked run must have the same gradients as well. It doesn't if a sum over tokens forgets the mask.

For this, run() replaces a few functions of common/ while main() runs:

    placement.init           all runs share one process group
    batching.fill_bins       decides which rows share a micro-batch, see Trial.fill_bins
    job.Run                  ends after the first updates, and writes nothing, see TrialRun
    Rewards.score            gives half of the responses a score of 1, so that gradients don't vanish
    model.response_logprobs, response_values, whole_rollout and distillation.divergences    in the masked run, see
                             other_where_masked

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
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, redirect_stdout
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Literal
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
from common.trainer import batching, distillation, model

BOUND = 1e-4  # largest relative difference of two gradients in float32
# Sizes of the cut run's micro-batches, repeated. They differ, because a mean of equal micro-batches would be right.
ROWS_IN_MICRO_BATCHES = (3, 1, 2)
ROWS_PER_UPDATE = 24  # at least so many responses in an optimizer step on one rank; and at least two prompts
MOST_STEPS = 10  # a model that was not updated after so many steps fails
NEGLIGIBLE = 0.01  # a gradient below this share of the longest one is mostly rounding error, which every cut changes
Gradients = list[torch.Tensor]  # this rank's shards of a model's gradients in one optimizer step


class Trial:
    """One of the three runs of a file: the batches it trained on, and the gradients of its optimizer steps.

    plain: rows as they are, each mini-batch in one micro-batch. cut: in several. masked: with other numbers where
    response_mask is False.
    """

    def __init__(self, kind: Literal["plain", "cut", "masked"], plain: "Trial | None" = None):
        """plain: the run that this one repeats, on the same batches."""
        self.kind = kind
        self.plain = plain
        self.trained: dict = {}  # name -> (model, optimizer), as in job.start()
        self.batches: list[Rollout] = []  # of each step
        self.gradients: dict[str, list[Gradients]] = {}  # name of the model -> gradients of its optimizer steps
        self.micro_batches = 0  # the largest number of micro-batches that rows were cut into
        self.masked_models: set[int] = set()  # ids of the models whose numbers with a gradient were other ones

    def fill_bins(
        self, rollout: Rollout, rows: torch.Tensor, compute: batching.Compute, unit_size: int
    ) -> list[batching.Bin]:
        """The rows of each micro-batch, in place of what batching chooses: all in one or, in the cut run, a few."""
        left = rows.view(-1, unit_size).tolist()
        sizes = itertools.repeat(len(left))
        if self.kind == "cut":
            sizes = itertools.cycle(ROWS_IN_MICRO_BATCHES)
        bins = []
        while left:
            size = next(sizes)
            bins.append(batching.Bin(left[:size]))
            left = left[size:]
        if self.trained:  # Before, a model that is loaded packs some rows of its own (packing_check).
            self.micro_batches = max(self.micro_batches, len(bins))
        return bins

    def how(self) -> str:
        """What this run does otherwise than the plain one."""
        if self.kind == "masked":
            return "with other numbers where response_mask is False"
        if self.micro_batches:
            return f"in {self.micro_batches} micro-batches instead of one"
        return "before it cut any rows"

    @torch.no_grad()
    def before_update(self, optimizer: torch.optim.Optimizer, *hook_arguments) -> None:
        """Keep the gradients. The other runs then take those of the plain one, so that all go on with equal weights.

        Otherwise Adam would turn rounding errors of tiny gradients into steps, and the next gradients would differ.
        """
        name = self.name_of(optimizer)
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        gradients = [shard(parameter.grad) for parameter in parameters if parameter.grad is not None]
        updates = self.gradients.setdefault(name, [])
        updates.append([gradient.to("cpu", copy=True) for gradient in gradients])
        if self.plain is None:
            return
        plain_updates = self.plain.gradients.get(name, [])
        if len(updates) > len(plain_updates):
            return  # the plain run has no such update; compare() will say so
        for gradient, plain_gradient in zip(gradients, plain_updates[len(updates) - 1]):
            gradient.copy_(plain_gradient)

    def batch_of(self, step: int, sampler) -> Rollout:
        """The batch of a step of the plain run, in place of the file's own sample()."""
        batch = copy.deepcopy(self.plain.batches[step - 1])  # the file may change its batch
        if self.kind == "masked":
            batch.rollout_logprobs = other_if_masked(batch.rollout_logprobs, batch.response_mask)
        return batch

    def name_of(self, optimizer: torch.optim.Optimizer) -> str:
        """The name of the model that this optimizer trains."""
        for name, (_, its_optimizer) in self.trained.items():
            if its_optimizer is optimizer:
                return name
        return "another model"


class TrialRun(job.Run):
    """A run that ends as soon as each of its models has been updated. It evaluates, reports and saves nothing."""

    def __init__(self, trial: Trial, settings: Settings, world: World, engine, trained, also):
        super().__init__(settings, world, engine, trained, also)
        self.trial = trial
        trial.trained = {name: both for name, both in trained.items() if both[1] is not None}
        for trained_model, _ in trial.trained.values():
            # A run keeps gradients apart until the last micro-batch. Here each backward must put them in place, so that
            # an optimizer step that comes too early finds some. compare() then counts one step too many.
            trained_model.whole_gradients = False
        if world.is_main:
            self.tracker.bar.leave = False
            self.tracker.bar.close()

    def steps(self, sample):
        """The steps until each model was updated. The other runs get the batches of the plain one."""
        trial = self.trial
        last_step = MOST_STEPS
        if trial.plain:
            sample = trial.batch_of
            last_step = len(trial.plain.batches)
        for step, batch in super().steps(sample):
            if not trial.plain:
                vary_masks(batch)
                trial.batches.append(copy.deepcopy(batch))  # the file may change its batch
            # The other runs don't sample. Without a new seed their later random numbers would be others.
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
        """The process group stays, for the next run."""


def vary_masks(batch: Rollout) -> None:
    """Mask all but the first 1 + i mod length tokens of row i, and its second token if three are left.

    Sampled lengths may all be equal. A loss that divides by a wrong length would then be right. The hole is where an
    environment's text would be. Every fifth row is marked as cut off. So a file that leaves such rows out meets some,
    also if none of these few prompts has one.
    """
    columns = torch.arange(batch.response_mask.shape[1], device=batch.response_mask.device)  # (T,)
    rows = torch.arange(len(batch), device=columns.device)  # (N,)
    left = 1 + rows % batch.response_mask.sum(1).clamp(min=1)
    batch.response_mask &= columns < left[:, None]
    batch.response_mask &= (columns != 1) | (left < 3)[:, None]
    batch.truncated |= rows % 5 == 4


def launch(file: str) -> None:
    """Try a file with the flags of the command line, which are those of the file."""
    algorithm = import_algorithm(Path(file))
    if not issubclass(algorithm.Args, Flags):
        raise errors.BadInput(f"{file}: its Args does not extend Flags, so its main() cannot be tried")
    defaults = getattr(algorithm, "EMBEDDED", EMBEDDED)
    flags.launch(partial(main, algorithm), algorithm.Args, defaults, algorithm.__doc__)


def main(algorithm: ModuleType, args: Flags) -> None:
    """Run the file three times and compare all gradients. Collective: every rank calls it.

    Exits with 1 if gradients differ.
    """
    began = time.perf_counter()
    machine.check_world(1, sharding=args.compute)
    world = placement.init(args.seed, sharding=args.compute)
    plain = Trial("plain")
    run(algorithm, args, plain, world)
    verdicts = {}
    for kind, trial in {"loss": Trial("cut", plain), "mask": Trial("masked", plain)}.items():
        try:
            run(algorithm, args, trial, world)
        except errors.RunFailed as error:
            verdicts[f"{kind} of all models"] = Verdict("", f"{trial.how()}, and not otherwise, the run fails: {error}")
            continue
        for name in [*plain.trained, *(plain.gradients.keys() - plain.trained.keys())]:
            verdicts[f"{kind} of {name}"] = compare(plain, trial, name, world)
    placement.finish(world)

    for label, verdict in verdicts.items():
        errors.say(f"{label:<20}  {verdict.measured:<80}  {'FAILS' if verdict.wrong else 'holds'}")
    failed = {label: verdict.wrong for label, verdict in verdicts.items() if verdict.wrong}
    seconds = time.perf_counter() - began
    errors.say(f"selftest: {len(verdicts) - len(failed)} of {len(verdicts)} hold, {seconds:.1f} s")
    for label, wrong in failed.items():
        errors.say(f"{label}: {wrong}")
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
        mock.patch.object(batching, "fill_padded_bins", trial.fill_bins),  # of a model that is not packed
        mock.patch.object(job, "Run", partial(TrialRun, trial)),
        mock.patch.object(reward_mixture.Rewards, "score", score),
        other_where_masked(trial.masked_models) if trial.kind == "masked" else nullcontext(),
    ):
        try:
            algorithm.main(small(args, folder, world.size))
        finally:
            hook.remove()


def other_if_masked(values: torch.Tensor, response_mask: torch.Tensor) -> torch.Tensor:
    """(n, T): where the mask is False, other values with other gradients."""
    return torch.where(response_mask, values, 1 - 2 * values)


@contextmanager
def other_where_masked(models: set[int]) -> Iterator[None]:
    """Inside it, log-probs, entropies, values and divergences are other ones where response_mask is False.

    models: gets the id of each model whose numbers the file takes with their gradients.
    """
    logprobs_of, values_of, whole_rollout = model.response_logprobs, model.response_values, model.whole_rollout
    divergences_of = distillation.divergences

    def other(of: torch.nn.Module, values: torch.Tensor, micro: batching.MicroBatch) -> torch.Tensor:
        if values.requires_grad:
            models.add(id(of))
        return other_if_masked(values, micro.response_mask)

    def response_logprobs(policy, micro, *arguments, **keywords) -> tuple[torch.Tensor, torch.Tensor | None]:
        logprobs, entropy = logprobs_of(policy, micro, *arguments, **keywords)
        if entropy is not None:
            entropy = other(policy, entropy, micro)
        return other(policy, logprobs, micro), entropy

    def response_values(critic, micro) -> torch.Tensor:
        return other(critic, values_of(critic, micro), micro)

    def divergences(policy, teacher, micro, *arguments, **keywords) -> tuple[torch.Tensor, torch.Tensor]:
        kl, entropy = divergences_of(policy, teacher, micro, *arguments, **keywords)
        return other(policy, kl, micro), other(policy, entropy, micro)

    def whole(results, rollout: Rollout, micro_batches) -> torch.Tensor:
        """Those without a gradient, which are 0 where the mask is False."""
        return other_if_masked(whole_rollout(results, rollout, micro_batches), rollout.response_mask)

    with (
        mock.patch.object(model, "response_logprobs", response_logprobs),
        mock.patch.object(model, "response_values", response_values),
        mock.patch.object(model, "whole_rollout", whole),
        mock.patch.object(distillation, "divergences", divergences),
    ):
        yield


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


def compare(plain: Trial, trial: Trial, name: str, world: World) -> Verdict:
    """Compare a model's gradients of the plain run and of another one. Collective: every rank calls it."""
    one = plain.gradients.get(name, [])
    other = trial.gradients.get(name, [])
    if not one:
        return Verdict("no update", f"it was not updated in {MOST_STEPS} steps: do all its gradients vanish?")
    if trial.kind == "cut" and trial.micro_batches < 2:
        never = "its rows were never cut into micro-batches: does the file pack them with batching?"
        return Verdict(f"{len(other)} updates", never)
    if len(one) != len(other):
        measured = f"{len(one)} optimizer steps in the plain run, and {len(other)} {trial.how()}"
        hint = "does a condition before optimizer.step() read masked tokens?"
        if trial.kind == "cut":
            hint = "does optimizer.step() stand in the loop over micro-batches?"
        return Verdict(measured, f"{measured}: {hint}")
    lengths = [squares(gradients, world) ** 0.5 for gradients in one]
    longest = max(lengths)
    if not longest > 0:  # NaN is not > 0, either
        return Verdict("gradients of 0", "all its gradients are 0 or NaN")

    worst = 0.0
    for length, a, b in zip(lengths, one, other):
        distance = math.inf
        if len(a) == len(b):
            distance = squares([x - y for x, y in zip(a, b)], world) ** 0.5
        if math.isnan(distance):
            distance = math.inf  # max() would lose a NaN
        worst = max(worst, distance / max(length, NEGLIGIBLE * longest))

    measured = f"{worst:.1e} (<= {BOUND:g}) {trial.how()}, {len(one)} updates"
    if trial.kind == "masked" and name in trial.trained and id(trial.trained[name][0]) not in trial.masked_models:
        return Verdict(
            measured,
            "its log-probs or values stayed as they were: does the file call model.response_logprobs(), "
            "model.response_values() or distillation.divergences(), with the module's name in front?",
        )
    if worst <= BOUND:
        return Verdict(measured)
    percent = f"{100 * worst:.0f}" if worst > 0.1 else f"{100 * worst:.2g}"
    hint = "does a sum over tokens forget the mask?"
    if trial.kind == "cut":
        hint = "is something divided by a number of the micro-batch, in place of `denominator`?"
    return Verdict(measured, f"{trial.how()} the gradient differs by {percent} % from that of the plain run: {hint}")


def squares(tensors: list[torch.Tensor], world: World) -> float:
    """Sum of the squares of all numbers, over all ranks. Collective: every rank calls it."""
    return world.sum(sum(tensor.double().square().sum() for tensor in tensors))


@torch.no_grad()
def shard(tensor: torch.Tensor) -> torch.Tensor:
    """The part that this rank holds: the memory itself, not a copy."""
    if isinstance(tensor, DTensor):
        return tensor.to_local()
    return tensor
