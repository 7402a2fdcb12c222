"""Try what a long run relies on: model, engine, weight sync, gradients and checkpoints. Prints a table.

    python scripts/selftest.py --model Qwen/Qwen2.5-0.5B-Instruct --dataset gsm8k --max-prompt-tokens 512
    torchrun --nproc-per-node 8 scripts/selftest.py --model MODEL --rollout-tp 2

Each row says what was measured and whether it holds:

    rollout                the engine samples complete responses with finite log-probs
    log-probs, as loaded   the trainer computes the log-probs that the engine reports
    gradient               it does not depend on how responses are cut into forwards
    weight sync            after changed weights were pushed, the engine samples with them
    weights restored       the same, after the first weights were pushed again
    checkpoint             weights and optimizer are the same after a save and a load
    Hugging Face export    the exported weights are those of the trainer

Nothing is trained, and nothing is left behind: checkpoints go to a temporary folder in --folder. If rows fail, the
script exits with 3, and its last line names them.

After you have changed an algorithm, try its file alone. It may be anywhere, and takes its own flags:

    python scripts/selftest.py algos/grpo.py             (or with flags: my_fork.py --kl-coef 0.1)

Are its gradients the same in one and in several micro-batches, and with other numbers on masked tokens? See
scripts/selftest_file.py.
"""

import dataclasses
import io
import math
import sys
import tempfile
import time
import zlib
from collections.abc import Iterator
from contextlib import ExitStack, redirect_stdout
from pathlib import Path
from typing import Annotated, Literal

import torch
import torch.distributed as dist
import tyro
from pydantic import NonNegativeFloat, PositiveInt
from safetensors.torch import load_file
from selftest_file import launch as launch_file
from selftest_file import shard, squares

from common import errors, placement, rewards, weight_sync
from common.data import arithmetic, prompts
from common.data.tokenizer import load_tokenizer, resolve_model
from common.placement import World
from common.preflight import checks, machine, precision, ranges
from common.preflight.docstrings import help_text
from common.preflight.flags import Saving
from common.preflight.memory import MemoryPlan
from common.preflight.ranges import Temperature
from common.rollout import engines
from common.rollout.rollout import Rollout
from common.run.checkpoint import Saver
from common.run.diagnosis import PROMPTS_PER_RANK, RESPONSES_PER_PROMPT, GapProbe
from common.trainer import batching, lora, model

GAP_NATS = 1e-4  # bound of the largest |trainer - engine| of a token's log-prob in float32
GRADIENT = {torch.float32: 1e-5, torch.bfloat16: 0.1}  # bound of the relative difference of a gradient cut in two ways
NOISE = 0.05  # noise on changed weights, as a share of a parameter's root mean square
NOTICED = 4  # an engine with the old weights is noticed if its gap is this many times the bound
MOST_DOUBLINGS = 6  # of the noise, until an engine with the old weights is noticed


@dataclasses.dataclass
class Row:
    """A row of the table."""

    name: str
    measured: str
    holds: bool  # the same on all ranks


@dataclasses.dataclass
class Bound:
    """The largest gap between the log-probs of trainer and engine that a row may have."""

    figure: str  # the field of diagnosis.Gap that is bounded
    nats: float


@dataclasses.dataclass
class Args:
    model: str = "embedded"  # Folder or Hub name. "embedded" is the committed arithmetic model.
    dataset: tuple[str, ...] = ("arithmetic",)  # Prompts to sample responses to, named as in algos/.
    source: Annotated[prompts.Source, tyro.conf.OmitArgPrefixes] = prompts.Source()
    max_prompt_tokens: PositiveInt = 64
    max_response_tokens: PositiveInt = 48
    temperature: Temperature = 1.0  # Temperature of sampling and of every log-prob.
    rollout_backend: Literal["vllm", "sglang", "hf"] = "vllm"
    rollout_tp: PositiveInt = 1  # Number of ranks that share one engine by tensor parallelism.
    layout: Annotated[placement.Layout, tyro.conf.OmitArgPrefixes] = placement.Layout()
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"  # Data type of the forward and backward.
    compute: Annotated[batching.Compute, tyro.conf.OmitArgPrefixes] = batching.Compute()
    offload: Literal["none", "all"] = "none"  # "all" keeps the policy in host memory while it is not used.
    max_logprob_gap: NonNegativeFloat = 0.1
    """In bfloat16: bound of the mean |trainer - engine| of a token's log-prob, in nats."""
    folder: str = "."  # A checkpoint is tried in a temporary folder in this one, which all ranks must see.
    file: tyro.conf.Positional[str] = ""  # An algorithm's file. It comes first; the flags behind it are its own.


def rows_without_disk(probe: GapProbe, dtype: torch.dtype, bound: Bound) -> list[Row]:
    """All rows except those about a checkpoint. The engine has the policy's weights. Collective."""
    began = time.perf_counter()
    batch = probe.sample(probe.some_prompts(), seed=1)
    seconds = probe.world.max(time.perf_counter() - began)
    lengths = batch.response_mask.sum(1)
    complete = len(batch) == PROMPTS_PER_RANK * RESPONSES_PER_PROMPT
    usable = lengths.all() and batch.rollout_logprobs.isfinite().all()
    all_ranks_complete = probe.world.min(complete and bool(usable)) == 1
    count = int(probe.world.sum(len(batch)))
    tokens = int(probe.world.sum(lengths.sum()))
    gap, measured = gap_of(probe, batch, bound)
    probe.engine.sleep()  # as in a step; the next weights wake it
    return [
        Row("rollout", f"{count} responses, {tokens / seconds:.0f} tokens/s", all_ranks_complete),
        Row("log-probs, as loaded", measured, gap <= bound.nats),
        gradient_row(probe, batch, GRADIENT[dtype]),
        *sync_rows(probe, batch, bound),
    ]


def gap_of(probe: GapProbe, batch: Rollout, bound: Bound) -> tuple[float, str]:
    """(the gap in nats, the same in words)."""
    gap = getattr(probe.gap(batch), bound.figure)
    return gap, f"{bound.figure} {gap:.1e} (<= {bound.nats:g})"


def gradient_row(probe: GapProbe, batch: Rollout, bound: float) -> Row:
    """Is the gradient of the mean log-prob the same in the run's micro-batches and in forwards of one response each?"""
    one_by_one = dataclasses.replace(probe.compute, token_budget=1, shared_prompts=False)
    gradients, forwards = gradient_of_mean(probe, batch, probe.compute)
    gradients_alone, forwards_alone = gradient_of_mean(probe, batch, one_by_one)
    length = squares(gradients, probe.world) ** 0.5
    difference = math.inf
    if len(gradients) == len(gradients_alone):
        distance = squares([a - b for a, b in zip(gradients, gradients_alone)], probe.world) ** 0.5
        difference = distance / max(length, 1e-150)
    measured = f"{difference:.1e} (<= {bound:g}) between {forwards} and {forwards_alone} forwards"
    return Row("gradient", measured, difference <= bound and length > 0)


def gradient_of_mean(probe: GapProbe, batch: Rollout, compute: batching.Compute) -> tuple[list[torch.Tensor], int]:
    """(this rank's shards of the gradient of the mean log-prob, the number of forwards). Collective."""
    tokens = probe.world.sum(batch.response_mask.sum())
    micro_batches = batching.pack(batch, torch.arange(len(batch)), compute, probe.world)
    for micro in micro_batches:
        logprobs, _ = model.response_logprobs(probe.policy, micro, probe.temperature)
        loss = (logprobs * micro.response_mask).sum() / tokens
        loss.backward()
    gradients = []
    for parameter in probe.policy.parameters():
        if parameter.grad is not None:
            gradients.append(shard(parameter.grad).to("cpu", copy=True))
    probe.policy.zero_grad()
    return gradients, len(micro_batches)


def sync_rows(probe: GapProbe, old: Rollout, bound: Bound) -> list[Row]:
    """Push changed weights, then the first ones again. Does the engine follow? old: responses of the first weights."""
    policy = probe.policy
    first_checksums = checksums(policy, {})
    first_weights = [shard(parameter).to("cpu", copy=True) for parameter in policy.parameters()]

    # Change the weights until an engine that had kept the old ones would have far too large a gap.
    unsynced_gap = 0.0
    for doublings in range(MOST_DOUBLINGS):
        perturb(policy, probe.world, NOISE * 2**doublings)
        unsynced_gap, _ = gap_of(probe, old, bound)
        if unsynced_gap >= NOTICED * bound.nats:
            break
    noticeable = unsynced_gap > bound.nats

    def push_and_measure(name: str, seed: int, *, restored: bool) -> Row:
        """restored: whether the policy has its first weights again."""
        began = time.perf_counter()
        weight_sync.push(policy, probe.engine)
        seconds = probe.world.max(time.perf_counter() - began)
        batch = probe.sample(probe.some_prompts(), seed)
        gap, measured = gap_of(probe, batch, bound)
        has_old_version = (batch.weight_versions != probe.engine.weight_version) & batch.response_mask
        stale_tokens = probe.world.sum(has_old_version.sum())
        different = count_different(first_checksums, checksums(policy, {}), probe.world)
        measured += f", {unsynced_gap:.1g} without; {seconds:.2f} s"
        measured += f"; {different} of {len(first_checksums)} checksums differ"
        holds = gap <= bound.nats and noticeable and not stale_tokens and (different == 0) == restored
        return Row(name, measured, holds)

    changed = push_and_measure("weight sync", seed=2, restored=False)
    for parameter, values in zip(policy.parameters(), first_weights):
        shard(parameter).copy_(values)
    return [changed, push_and_measure("weights restored", seed=3, restored=True)]


def checkpoint_rows(saver: Saver, folder: Path) -> list[Row]:
    """Save after an optimizer step, change everything, load. Is everything back, and is the export the same model?"""
    policy, optimizer = saver.trained["policy"]
    world = saver.world
    saved = folder / "checkpoints/step_000001"
    saver.run_dir = folder
    saver.engine.sleep()  # its memory is needed for gradients
    for parameter in policy.parameters():
        if parameter.requires_grad:
            parameter.grad = parameter.detach().clone()  # any gradient will do: the optimizer needs a state
    optimizer.step()
    optimizer.zero_grad()

    before = checksums(policy, optimizer.state)
    began = time.perf_counter()
    saver.save(1, {})
    saver.finish_writing()
    seconds = world.max(time.perf_counter() - began)

    perturb(policy, world, NOISE)
    optimizer.state.clear()  # a run that resumes has no state, either
    lost = count_different(before, checksums(policy, optimizer.state), world)
    with redirect_stdout(io.StringIO()):  # without the line "resumed after step 1"
        saver.load(saved)
    different = count_different(before, checksums(policy, optimizer.state), world)

    wrong = count_wrong_exports(saver, saved / "model")
    return [
        Row(
            "checkpoint",
            f"{different} of {len(before)} checksums differ; {seconds:.2f} s to save",
            lost > 0 and different == 0,
        ),
        Row("Hugging Face export", f"{wrong} parameters differ", wrong == 0),
    ]


def count_wrong_exports(saver: Saver, folder: Path) -> int:
    """Number of parameters that the exported model lacks, has too many, or has with other values. Collective."""
    policy, _ = saver.trained["policy"]
    exported = {}
    if saver.world.is_main:
        for file in sorted(folder.glob("*.safetensors")):
            exported |= load_file(file)
    wrong = 0
    for name, tensor in exportable(saver, policy):  # on all ranks: it gathers shards
        if saver.world.is_main:
            wrong += name not in exported or not torch.equal(exported.pop(name), tensor.cpu())
    return int(saver.world.sum(wrong + len(exported)))


def exportable(saver: Saver, policy: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Names and whole tensors that an export holds: all weights, or with LoRA the adapters. Collective."""
    layers = lora.adapted(policy)
    if not layers:
        yield from weight_sync.FullParameters(policy, saver.dtype, saved_names=True)
    for name, layer in layers:
        for kind in weight_sync.ADAPTERS:
            tensor = getattr(layer, kind)
            yield lora.peft_name(f"{name}.{kind}"), weight_sync.gather(tensor, tensor.dtype)


@torch.no_grad()
def perturb(trained: torch.nn.Module, world: World, share: float) -> None:
    """Add noise to what is trained: this share of its root mean square. All copies of a shard get the same noise."""
    model.reshard(trained)
    generator = torch.Generator().manual_seed(world.mesh.get_local_rank(world.mesh.ndim - 1))
    for parameter in trained.parameters():
        if not parameter.requires_grad:
            continue
        values = shard(parameter)
        size = values.square().mean().sqrt().item() if values.numel() else 0.0
        noise = torch.randn(values.shape, generator=generator).to(values.device)
        values.add_(noise * share * (size or 1.0))


def checksums(policy: torch.nn.Module, states: dict) -> dict[str, int]:
    """Checksums of this rank's shards of the weights and of the optimizer's states."""
    model.reshard(policy)
    sums = {}
    for name, parameter in policy.named_parameters():
        tensors = {"weight": parameter, **states.get(parameter, {})}
        for kind, tensor in tensors.items():
            whole_bytes = shard(tensor).detach().cpu().contiguous().reshape(-1).view(torch.uint8)
            sums[f"{name} {kind}"] = zlib.crc32(whole_bytes.numpy())
    return sums


def count_different(one: dict[str, int], other: dict[str, int], world: World) -> int:
    """Number of the first's checksums that the second does not have, on the rank with most of them. Collective."""
    different = sum(other.get(name) != value for name, value in one.items())
    return int(world.max(different))


def main(args: Args) -> None:
    if args.file:
        raise errors.BadInput(f"{args.file}: an algorithm's file comes before all flags, which are then its own")
    began = time.perf_counter()

    # The same checks as before a run.
    ranges.check(args)
    size = machine.check_world(args.rollout_tp, args.layout, args.rollout_backend, args.compute)
    path = arithmetic.warm_start() if args.model == "embedded" else resolve_model(args.model)
    tokenizer, stop_token_ids = load_tokenizer(path)
    engines.check_family(args.rollout_backend, path)
    checks.check_engine_heads(path, args.rollout_tp)
    asked = prompts.load(args.dataset, args.source, "train", tokenizer, args.max_prompt_tokens)
    max_model_len = checks.total_tokens(path, asked, args.max_response_tokens)
    dtype = precision.choose(args.dtype, path)
    engines.check_servers(args.rollout_backend, path, max_model_len, dtype, args.layout)
    checks.check_compute(path, args.compute)
    plan = MemoryPlan(
        model=path,
        dtype=dtype,
        size=size,
        compute=checks.settle_packing(path, args.compute, asked),
        offload=args.offload,
        backend=args.rollout_backend,
        layout=args.layout,
    )
    compute = plan.fitted_compute(max_model_len)

    # The same models, engine and saver as in a run. The reward is never asked.
    world = placement.init(0, args.rollout_tp, args.layout, compute)
    policy = model.load(path, world, dtype, compute, offload=args.offload == "all")
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-3, fused=True)
    sequences = PROMPTS_PER_RANK * RESPONSES_PER_PROMPT * size  # of all engines
    engine = engines.start(
        args.rollout_backend,
        path,
        stop_token_ids,
        world,
        dtype,
        max_model_len=max_model_len,
        sequences=sequences // placement.engine_count(size, args.rollout_tp, args.layout),
        layout=args.layout,
        rollout_tp=args.rollout_tp,
    )
    trained = {"policy": (policy, optimizer)}
    loader = prompts.PromptLoader(asked, 0)
    reward = rewards.load(("gsm8k",))
    saver = Saver(Saving(), trained, loader, reward, engine, tokenizer, dtype, world)
    if args.layout.split:  # servers have read the model's files; a fresh colocated engine has its weights already
        weight_sync.push(policy, engine)

    probe = GapProbe(policy, engine, asked, args.temperature, args.max_response_tokens, compute, world)
    bound = Bound("mean", args.max_logprob_gap)
    if dtype == torch.float32:
        bound = Bound("largest", GAP_NATS)
    rows = rows_without_disk(probe, dtype, bound)
    with ExitStack() as stack:
        shared = [""]
        if world.is_main:
            shared = [stack.enter_context(tempfile.TemporaryDirectory(prefix="selftest-", dir=args.folder))]
        dist.broadcast_object_list(shared, src=0)
        rows += checkpoint_rows(saver, Path(shared[0]))
        dist.barrier()  # rank 0 removes the folder when every rank has read it
    placement.finish(world, engine)
    report(rows, time.perf_counter() - began)


def report(rows: list[Row], seconds: float) -> None:
    """Print the table. Raises RunFailed if a row does not hold."""
    for row in rows:
        errors.say(f"{row.name:<20}  {row.measured:<80}  {'holds' if row.holds else 'FAILS'}")
    failed = [f"{row.name} ({row.measured})" for row in rows if not row.holds]
    errors.say(f"selftest: {len(rows) - len(failed)} of {len(rows)} hold, {seconds:.1f} s")
    if failed:
        raise errors.RunFailed(f"these rows fail: {'; '.join(failed)}", code="selftest-failed")


if __name__ == "__main__":
    # An algorithm's file has flags of its own, so its name must come before them.
    if sys.argv[1:] and not sys.argv[1].startswith("-"):
        errors.launch(launch_file, sys.argv.pop(1))
    else:
        errors.launch(main, tyro.cli(Args, description=help_text(__doc__)))
