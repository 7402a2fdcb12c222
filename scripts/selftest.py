"""Try what a run relies on before a long one: model, engine, weight sync, gradients and checkpoints, in a table.

    python scripts/selftest.py --model Qwen/Qwen2.5-0.5B-Instruct --dataset gsm8k --max-prompt-tokens 512
    torchrun --nproc-per-node 8 scripts/selftest.py --model MODEL --rollout-tp 2

Each row says what was measured and whether it holds. Nothing is trained, and nothing is left behind: checkpoints are
tried in a temporary folder in --folder. Exits with 3 and one line that names the rows that fail.

After you have changed an algorithm, put this script before its file, which may be anywhere, and the file's own flags:

    python scripts/selftest.py algos/grpo.py             (or with flags, as in: my_fork.py --kl-coef 0.1)

This tries the file alone: are its gradients the same in one and in several micro-batches (scripts/selftest_file.py)?
"""

import dataclasses
import io
import sys
import tempfile
import time
import zlib
from contextlib import nullcontext, redirect_stdout
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
Bound = tuple[str, float]  # (field of a Gap, the largest value in nats that it may have)
Row = tuple[str, str, bool]  # (name, what was measured, whether it holds: the same on all ranks)
NOISE = 0.05  # share of a parameter's root mean square; doubled until an engine with the old weights would be noticed
NOTICED = 4  # an engine with the old weights is noticed when its gap is this many times the bound


@dataclasses.dataclass
class Args:
    model: str = "embedded"  # Folder or Hub name. "embedded" is the committed arithmetic model.
    dataset: tuple[str, ...] = ("arithmetic",)  # Prompts to sample responses to, named as in algos/.
    source: Annotated[prompts.Source, tyro.conf.OmitArgPrefixes] = prompts.Source()
    max_prompt_tokens: PositiveInt = 64
    max_response_tokens: PositiveInt = 48
    temperature: Temperature = 1.0  # Temperature of sampling and of every log-prob.
    rollout_backend: Literal["vllm", "hf"] = "vllm"
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
    complete = complete and bool(lengths.all() and batch.rollout_logprobs.isfinite().all())
    count, tokens = (int(probe.world.sum(value)) for value in (len(batch), lengths.sum()))
    gap, measured = gap_of(probe, batch, bound)
    probe.engine.sleep()  # as in a step; the next weights wake it
    return [
        ("rollout", f"{count} responses, {tokens / seconds:.0f} tokens/s", probe.world.min(complete) == 1),
        ("log-probs, as loaded", measured, gap <= bound[1]),
        gradient_row(probe, batch, GRADIENT[dtype]),
        *sync_rows(probe, batch, bound),
    ]


def gap_of(probe: GapProbe, batch: Rollout, bound: Bound) -> tuple[float, str]:
    """(the figure of the gap that has a bound, the same in words)."""
    gap = getattr(probe.gap(batch), bound[0])
    return gap, f"{bound[0]} {gap:.1e} (<= {bound[1]:g})"


def gradient_row(probe: GapProbe, batch: Rollout, bound: float) -> Row:
    """Is the gradient of the mean log-prob the same in the run's micro-batches and in forwards of one response each?"""
    alone = dataclasses.replace(probe.compute, token_budget=1, shared_prompts=False)
    tokens, gradients, forwards = probe.world.sum(batch.response_mask.sum()), [], []
    for compute in (probe.compute, alone):
        micro_batches = batching.pack(batch, torch.arange(len(batch)), compute, probe.world)
        for micro in micro_batches:
            logprobs, _ = model.response_logprobs(probe.policy, micro, probe.temperature)
            ((logprobs * micro.response_mask).sum() / tokens).backward()
        gradients.append([shard(p.grad).to("cpu", copy=True) for p in probe.policy.parameters() if p.grad is not None])
        forwards.append(len(micro_batches))
        probe.policy.zero_grad()
    length = squares(gradients[0], probe.world)
    difference = (squares([a - b for a, b in zip(*gradients)], probe.world) / max(length, 1e-300)) ** 0.5
    measured = f"{difference:.1e} (<= {bound:g}) between {forwards[0]} and {forwards[1]} forwards"
    return ("gradient", measured, difference <= bound and length > 0)


def sync_rows(probe: GapProbe, old: Rollout, bound: Bound) -> list[Row]:
    """Push changed weights, then the first ones again. Does the engine follow? old: responses of the first weights."""
    policy, rows, unsynced, tries = probe.policy, [], 0.0, 0
    before = checksums(policy, {})
    kept = [shard(parameter).to("cpu", copy=True) for parameter in policy.parameters()]
    while tries < 6 and unsynced < NOTICED * bound[1]:
        perturb(policy, probe.world, NOISE * 2**tries)
        unsynced, tries = gap_of(probe, old, bound)[0], tries + 1
    for name in ("weight sync", "weights restored"):
        restored = name == "weights restored"
        for parameter, values in zip(policy.parameters(), kept if restored else []):
            shard(parameter).copy_(values)
        began = time.perf_counter()
        weight_sync.push(policy, probe.engine)
        seconds = probe.world.max(time.perf_counter() - began)
        batch = probe.sample(probe.some_prompts(), seed=2 + len(rows))
        gap, measured = gap_of(probe, batch, bound)
        stale = probe.world.sum(((batch.weight_versions != probe.engine.weight_version) & batch.response_mask).sum())
        differ = count_different(before, checksums(policy, {}), probe.world)
        measured += f", {unsynced:.1g} without; {seconds:.2f} s; {differ} of {len(before)} checksums differ"
        rows.append((name, measured, gap <= bound[1] < unsynced and not stale and (differ == 0) == restored))
    return rows


def checkpoint_rows(saver: Saver, folder: Path) -> list[Row]:
    """Save after an optimizer step, change everything, load. Is everything back, and is the export the same model?"""
    (policy, optimizer), saved = saver.trained["policy"], folder / "checkpoints/step_000001"
    saver.run_dir = folder
    saver.engine.sleep()  # there is no room for gradients beside it
    for parameter in filter(lambda parameter: parameter.requires_grad, policy.parameters()):
        parameter.grad = parameter.detach().clone()  # any gradient will do: the optimizer needs a state
    optimizer.step()
    optimizer.zero_grad()
    before, began = checksums(policy, optimizer.state), time.perf_counter()
    saver.save(1, {})
    saver.finish_writing()
    seconds = saver.world.max(time.perf_counter() - began)
    perturb(policy, saver.world, NOISE)
    optimizer.state.clear()  # as it is where a run resumes
    lost = count_different(before, checksums(policy, optimizer.state), saver.world)
    with redirect_stdout(io.StringIO()):  # without the line "resumed after step 1"
        saver.load(saved)
    differ = count_different(before, checksums(policy, optimizer.state), saver.world)
    exported, wrong, layers = {}, 0, lora.adapted(policy)
    for file in sorted((saved / "model").glob("*.safetensors")) if saver.world.is_main else []:
        exported |= load_file(file)
    whole = weight_sync.FullParameters(policy, saver.dtype, saved_names=True)
    if layers:
        names = ((f"{name}.{kind}", getattr(layer, kind)) for name, layer in layers for kind in weight_sync.ADAPTERS)
        whole = ((lora.peft_name(name), weight_sync.gather(tensor, tensor.dtype)) for name, tensor in names)
    for name, tensor in whole:
        if saver.world.is_main:
            wrong += name not in exported or not torch.equal(exported.pop(name), tensor.cpu())
    wrong = int(saver.world.sum(wrong + len(exported)))
    measured = f"{differ} of {len(before)} checksums differ; {seconds:.2f} s to save"
    return [
        ("checkpoint", measured, lost > 0 and differ == 0),
        ("Hugging Face export", f"{wrong} parameters differ", wrong == 0),
    ]


@torch.no_grad()
def perturb(trained: torch.nn.Module, world: World, share: float) -> None:
    """Add noise of this share of its root mean square to what is trained. All copies of a shard get the same noise."""
    model.reshard(trained)
    generator = torch.Generator().manual_seed(world.mesh.get_local_rank(world.mesh.ndim - 1))
    for parameter in filter(lambda parameter: parameter.requires_grad, trained.parameters()):
        values = shard(parameter)
        size = values.square().mean().sqrt().item() if values.numel() else 0.0
        values.add_(torch.randn(values.shape, generator=generator).to(values.device) * share * (size or 1.0))


def checksums(policy: torch.nn.Module, states: dict) -> dict[str, int]:
    """Checksums of this rank's shards of the weights and of the optimizer's states."""
    model.reshard(policy)
    held = {}
    for name, parameter in policy.named_parameters():
        held |= {f"{name} {kind}": value for kind, value in {"weight": parameter, **states.get(parameter, {})}.items()}
    sums = {}
    for name, value in held.items():
        data = shard(value).detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        sums[name] = zlib.crc32(data.numpy())
    return sums


def count_different(one: dict[str, int], other: dict[str, int], world: World) -> int:
    """Number of the first's checksums that the second does not have, on the rank with most of them. Collective."""
    return int(world.max(sum(other.get(name) != value for name, value in one.items())))


def main(args: Args) -> None:
    if args.file:
        raise errors.BadInput(f"{args.file}: an algorithm's file comes before all flags, which are then its own")
    began = time.perf_counter()
    ranges.check(args)
    size = machine.check_world(args.rollout_tp, args.layout, args.rollout_backend, args.compute)
    path = arithmetic.warm_start() if args.model == "embedded" else resolve_model(args.model)
    tokenizer, stop_token_ids = load_tokenizer(path)
    engines.check_family(args.rollout_backend, path)
    checks.check_engine_heads(path, args.rollout_tp)
    asked = prompts.load(args.dataset, args.source, "train", tokenizer, args.max_prompt_tokens)
    max_model_len = checks.total_tokens(path, asked, args.max_response_tokens)
    dtype = precision.choose(args.dtype, path)
    checks.check_compute(path, args.compute)
    plan = MemoryPlan(
        model=path,
        dtype=dtype,
        size=size,
        compute=args.compute,
        offload=args.offload,
        backend=args.rollout_backend,
        layout=args.layout,
    )
    compute = plan.fitted_compute(max_model_len)
    world = placement.init(0, args.rollout_tp, args.layout, compute)
    policy = model.load(path, world, dtype, compute, offload=args.offload == "all")
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-3, fused=True)
    sequences = PROMPTS_PER_RANK * RESPONSES_PER_PROMPT * size
    sequences //= placement.engine_count(size, args.rollout_tp, args.layout)
    engine = engines.start(
        args.rollout_backend, path, stop_token_ids, world, dtype, max_model_len=max_model_len, sequences=sequences,
        layout=args.layout, rollout_tp=args.rollout_tp,
    )  # fmt: skip
    trained, loader, reward = {"policy": (policy, optimizer)}, prompts.PromptLoader(asked, 0), rewards.load(("gsm8k",))
    saver = Saver(Saving(), trained, loader, reward, engine, tokenizer, dtype, world)
    if args.layout.split:  # servers have read the model's files; a fresh colocated engine has its weights already
        weight_sync.push(policy, engine)
    probe = GapProbe(policy, engine, asked, args.temperature, args.max_response_tokens, compute, world)
    bound = ("largest", GAP_NATS) if dtype == torch.float32 else ("mean", args.max_logprob_gap)
    rows = rows_without_disk(probe, dtype, bound)
    with tempfile.TemporaryDirectory(prefix="selftest-", dir=args.folder) if world.is_main else nullcontext("") as made:
        dist.broadcast_object_list(shared := [made], src=0)
        rows += checkpoint_rows(saver, Path(shared[0]))
        dist.barrier()  # rank 0 removes the folder when every rank has read it
    placement.finish(world, engine)
    for name, measured, holds in rows:
        errors.say(f"{name:<20}  {measured:<80}  {'holds' if holds else 'FAILS'}")
    failed = [f"{name} ({measured})" for name, measured, holds in rows if not holds]
    errors.say(f"selftest: {len(rows) - len(failed)} of {len(rows)} hold, {time.perf_counter() - began:.1f} s")
    if failed:
        raise errors.RunFailed(f"these rows fail: {'; '.join(failed)}", code="selftest-failed")


if __name__ == "__main__":
    if sys.argv[1:] and not sys.argv[1].startswith("-"):
        errors.launch(launch_file, sys.argv.pop(1))
    else:
        errors.launch(main, tyro.cli(Args, description=__doc__))
