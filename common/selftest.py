"""--selftest: whether model, engine, weight sync, gradients and checkpoints do what a run relies on, in a table.

Rows and their bounds: GAP and GRADIENT below; in bfloat16 the mean gap, against --max-logprob-gap. Checkpoints are
tried in a temporary folder on the disk of the run directory. Nothing is left behind.
"""

import dataclasses
import io
import tempfile
import time
from contextlib import nullcontext, redirect_stdout
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from common import batching, model, placement, weight_sync
from common.checkpoint import Saver, Trained
from common.diagnosis import PROMPTS, RESPONSES, Gap, Probe
from common.errors import RunFailed, say
from common.placement import World
from common.rollout import Rollout

GAP = 1e-4  # largest |trainer - engine| of a token's log-prob in float32, nats
GRADIENT = {torch.float32: 1e-5, torch.bfloat16: 0.1}  # relative difference of one gradient cut in two ways
NOISE = 0.05  # of a parameter's root mean square; twice as much again and again until old weights would show
SHOWS = 4  # times the bound


class Row(NamedTuple):
    name: str
    measured: str
    holds: bool  # the same on all ranks


class Limit(NamedTuple):
    """Which figure of a gap is held against what."""

    figure: str
    bound: float

    def of(self, gap: Gap) -> float:
        return getattr(gap, self.figure)

    def said(self, gap: Gap) -> str:
        return f"{'max' if self.figure == 'largest' else 'mean'} {self.of(gap):.1e} (<= {self.bound:g})"


def run(probe: Probe, saver: Saver, max_logprob_gap: float, run_dir: str) -> None:
    """Print the table and end the processes' work. Collective. Raises RunFailed naming the rows that fail.

    The engine has the policy's weights; run_dir: where the run would write, or "".
    """
    began = time.perf_counter()
    limit = Limit("largest", GAP) if saver.dtype == torch.float32 else Limit("mean", max_logprob_gap)
    batch, rows = sampled(probe, limit)
    probe.engine.sleep()  # as in a step; the next weights wake it
    rows.append(gradient_row(probe, batch, GRADIENT[saver.dtype]))
    rows += synced(probe, saver, batch, limit)
    with temporary_folder(run_dir, probe.world) as folder:
        told = [folder]
        dist.broadcast_object_list(told, src=0)
        rows += saved(saver, Path(told[0]))
        dist.barrier()  # else rank 0 removes what another still reads
    placement.finish(probe.world, probe.engine)
    widths = [max(len(row[i]) for row in rows) for i in (0, 1)]
    for row in rows:
        say(f"{row.name:<{widths[0]}}  {row.measured:<{widths[1]}}  {'holds' if row.holds else 'FAILS'}")
    failed = [f"{row.name} ({row.measured})" for row in rows if not row.holds]
    say(f"selftest: {len(rows) - len(failed)} of {len(rows)} hold, {time.perf_counter() - began:.1f} s")
    if failed:
        raise RunFailed(f"--selftest: {'; '.join(failed)}", code="selftest-failed")


def sampled(probe: Probe, limit: Limit) -> tuple[Rollout, list[Row]]:
    """Responses, and the rows about them: that they came whole, and that the trainer gives them the same log-probs."""
    began = time.perf_counter()
    batch = probe.sample(probe.some_prompts(), seed=1)
    seconds = probe.world.max(time.perf_counter() - began)
    lengths, logprobs = batch.response_mask.sum(1), batch.rollout_logprobs
    whole = len(batch) == PROMPTS * RESPONSES and min(map(len, batch.response_ids)) > 0 and bool(lengths.all())
    whole = whole and bool(logprobs.isfinite().all())
    count, tokens = (int(probe.world.sum(value)) for value in (len(batch), lengths.sum()))
    gap = probe.gap(batch)
    return batch, [
        Row("rollout", f"{count} responses, {tokens / seconds:.0f} tokens/s", probe.world.min(whole) == 1),
        Row("log-probs, as loaded", limit.said(gap), limit.of(gap) <= limit.bound),
    ]


def gradient_row(probe: Probe, batch: Rollout, bound: float) -> Row:
    """Whether the gradient is the same in the run's micro-batches and in rows of one response each."""
    alone = dataclasses.replace(probe.compute, token_budget=1, shared_prompts=False)
    (one, cuts), (other, rows) = (gradient(probe, batch, compute) for compute in (probe.compute, alone))
    squares = lambda tensors: probe.world.sum(sum(tensor.double().square().sum() for tensor in tensors))
    difference = (squares(a - b for a, b in zip(one, other)) / max(squares(one), 1e-300)) ** 0.5
    said = f"{difference:.1e} (<= {bound:g}) between {cuts} and {rows} forwards"
    return Row("gradient", said, difference <= bound and squares(one) > 0)


def gradient(probe: Probe, batch: Rollout, compute: batching.Compute) -> tuple[list[torch.Tensor], int]:
    """This rank's shards of the gradient of the mean log-prob, in host memory, and in how many forwards it came."""
    tokens = probe.world.sum(batch.response_mask.sum())
    micro_batches = batching.pack(batch, torch.arange(len(batch)), compute, probe.world)
    for micro in micro_batches:
        model.accumulate(probe.policy, last=micro is micro_batches[-1])
        logprobs, _ = model.response_logprobs(probe.policy, micro, probe.temperature)
        ((logprobs * micro.response_mask).sum() / tokens * probe.world.size).backward()
    shards = [shard(p.grad).to("cpu", copy=True) for p in probe.policy.parameters() if p.grad is not None]
    probe.policy.zero_grad()
    return shards, len(micro_batches)


def synced(probe: Probe, saver: Saver, old: Rollout, limit: Limit) -> list[Row]:
    """Rows about weights that change and come back: the engine follows both times, to the last bit of the trainer's.

    old: responses of the weights before, which must be off after the change: else an engine that kept them would pass.
    """
    policy, rows = probe.policy, []
    model.reshard(policy)
    kept = [shard(parameter).to("cpu", copy=True) for parameter in policy.parameters()]
    before, without, tries = checksums(saver.trained), None, 0
    while tries < 6 and (without is None or limit.of(without) < SHOWS * limit.bound):
        perturb(policy, probe.world, NOISE * 2**tries)
        without, tries = probe.gap(old), tries + 1
    for name in ("weight sync", "weights restored"):
        if name == "weights restored":
            for parameter, values in zip(policy.parameters(), kept):
                shard(parameter).copy_(values)
        began = time.perf_counter()
        weight_sync.push(policy, probe.engine)
        seconds = probe.world.max(time.perf_counter() - began)
        batch = probe.sample(probe.some_prompts(), seed=2 + len(rows))
        gap, version = probe.gap(batch), probe.engine.weight_version
        stale = probe.world.sum(((batch.weight_versions != version) & batch.response_mask).sum())
        holds = limit.of(gap) <= limit.bound < limit.of(without) and not stale
        rows.append(Row(name, f"{limit.said(gap)}, {limit.of(without):.1g} without; {seconds:.2f} s", holds))
    differ = count_different(before, checksums(saver.trained), probe.world)
    back = rows.pop()
    said = f"{back.measured}; {differ} of {len(before)} checksums differ"
    return [*rows, Row(back.name, said, back.holds and not differ)]


def saved(saver: Saver, folder: Path) -> list[Row]:
    """Rows about a checkpoint of all that is trained, after an optimizer step: it restores it, and it exports it."""
    saver.run_dir = folder
    for trained, optimizer in saver.trained.values():
        for parameter in trained.parameters():
            parameter.grad = parameter.detach().clone()  # any gradient: the optimizers need a state
        optimizer.step()
        optimizer.zero_grad()
    before, began = checksums(saver.trained), time.perf_counter()
    saver.save(saver.done + 1, {})
    saver.finish_writing()
    seconds = saver.world.max(time.perf_counter() - began)
    for trained, optimizer in saver.trained.values():
        perturb(trained, saver.world, NOISE)
        optimizer.state.clear()  # as it is where a run is resumed
    lost = count_different(before, checksums(saver.trained), saver.world)
    checkpoint = folder / "checkpoints" / f"step_{saver.done + 1:06d}"
    with redirect_stdout(io.StringIO()):  # "resumed after step 1", which is no news here
        saver.load(checkpoint)
    differ = count_different(before, checksums(saver.trained), saver.world)
    said = f"{differ} of {len(before)} checksums of {' and '.join(saver.trained)} differ; {seconds:.2f} s to save"
    wrong = export_differs(saver, checkpoint / "model")
    parameters = sum(1 for _ in saver.trained["policy"][0].parameters())
    return [
        Row("checkpoint", said, lost > 0 and differ == 0),
        Row("Hugging Face export", f"{wrong} of {parameters} parameters differ", wrong == 0),
    ]


def export_differs(saver: Saver, folder: Path) -> int:
    """How many of the policy's parameters an exported folder does not hold, in its dtype. Collective."""
    theirs, wrong = {}, 0
    if saver.world.is_main:
        theirs = dict(
            AutoModelForCausalLM.from_pretrained(folder, dtype=saver.dtype, use_safetensors=True).named_parameters()
        )
    for name, tensor in weight_sync.FullParameters(saver.trained["policy"][0], saver.dtype):
        if saver.world.is_main:
            wrong += name not in theirs or not torch.equal(theirs.pop(name), tensor.cpu())
    return int(saver.world.sum(wrong + len(theirs)))


def temporary_folder(run_dir: str, world: World):
    """Context of a folder of rank 0's, beside the run directory: all ranks must see it, as they must see that one."""
    if not world.is_main:
        return nullcontext("")
    parents = Path(run_dir or "runs/run").absolute().parents
    return tempfile.TemporaryDirectory(prefix="selftest-", dir=next(parent for parent in parents if parent.is_dir()))


@torch.no_grad()
def perturb(trained: nn.Module, world: World, share: float) -> None:
    """Add noise to every parameter, in place, this share of its root mean square: the same to all copies of a shard."""
    model.reshard(trained)
    generator = torch.Generator().manual_seed(world.mesh.get_local_rank(world.mesh.ndim - 1))
    for parameter in trained.parameters():
        values = shard(parameter)
        size = values.square().mean().sqrt().item() if values.numel() else 0.0
        noise = torch.randn(values.shape, generator=generator) * share * (size or 1.0)
        values.add_(noise.to(values.device))


@torch.no_grad()
def shard(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank holds of it: its memory, not a copy."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def checksums(trained: Trained) -> dict[str, int]:
    """Of weights and optimizer states, this rank's shards."""
    out = {}
    for name, (module, optimizer) in trained.items():
        model.reshard(module)
        for key, parameter in module.named_parameters():
            held = {"weight": parameter, **optimizer.state.get(parameter, {})}
            out |= {f"{name} {key} {what}": checksum_of(value) for what, value in held.items()}
    return out


def checksum_of(tensor: torch.Tensor) -> int:
    return weight_sync.checksum(shard(tensor).detach().cpu().reshape(-1))


def count_different(one: dict[str, int], other: dict[str, int], world: World) -> int:
    """How many checksums of the first are not in the second, on the rank with most of them. Collective."""
    return int(world.max(sum(other.get(name) != value for name, value in one.items())))
