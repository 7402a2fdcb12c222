"""The plan of a run, printed before anything is loaded: the table of its roles, and the plan that --dry-run prints.

A role is a model or a reward: the policy, a critic, a reference, the engine, a grader. The table says where each of
them lives and what memory it takes, and refuses what cannot fit. Its memory is computed from configurations: a trained
role has float32 masters, gradients and Adam's two moments, a frozen role has float32 weights, and both are sharded over
the ranks; an engine has weights in the compute dtype. common/run/memory.py counts what comes on top: activations, and
the engine's KV cache.
"""

import dataclasses
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoConfig

from common.data.prompts import Prompt
from common.errors import BadInput, say
from common.placement import Layout, rank_memory
from common.rollout import engines
from common.run import folders, memory
from common.run.memory import FROZEN_BYTES, GIB, GRADIENT_BYTES, count_parameters, trained_bytes, trained_parameters


@dataclass(frozen=True)
class Role:
    name: str
    lives: str
    dtype: str
    device: float = 0.0  # bytes on each rank's device
    host: float = 0.0  # bytes of host memory for each rank


def show_roles(
    model_path: str, trained: list[str], frozen: list[str], rewards: dict[str, Callable], *, size: int, layout: Layout,
    backend: str, rollout_tp: int, dtype: torch.dtype, offload: str, shards: int = 0, lora_rank: int = 0,
    others: dict[str, str] | None = None,
) -> list[Role]:  # fmt: skip
    """Print the table of roles and return them. Raises BadInput if they cannot fit.

    trained: "policy" and the models trained with it; they and the frozen ones start from one model. others: name ->
    another model, frozen. offload: "none", "others" (all models except the policy) or "all".
    shards: ranks that hold one copy of the weights together; 0 means all.
    """
    tp = rollout_tp if backend == "vllm" else 1
    count, updated = count_parameters(model_path), trained_parameters(model_path, lora_rank)
    of_trained = trained_bytes(count, updated, dtype) + GRADIENT_BYTES * updated
    computing, totals = str(dtype).removeprefix("torch."), dict.fromkeys(trained, of_trained)
    kinds, roles = f"float32, computes in {computing}", []
    if lora_rank:
        kinds = f"{updated / 1e6:,.2f} M float32, the rest {computing}"
    else:
        totals |= dict.fromkeys(frozen, FROZEN_BYTES * count)
    for name, total in totals.items():
        offloaded = offload == "all" or (offload == "others" and name != "policy")
        roles.append(sharded_role(name, total, shards or size, kinds, offloaded))
    roles += [Role(name, "the policy without its adapters", "") for name in frozen if name not in totals]
    for name, path in (others or {}).items():
        total = FROZEN_BYTES * count_parameters(path)
        roles.append(sharded_role(name, total, shards or size, f"float32, computes in {computing}", offload != "none"))
    roles.append(rollout_role(model_path, size, layout, backend, tp, dtype))
    roles += [reward_role(name, reward, size) for name, reward in rewards.items()]
    rows = [("role", "lives on", "dtype", "GiB a rank")]
    rows += [(role.name, role.lives, role.dtype, f"{(role.device + role.host) / GIB:.2f}") for role in roles]
    widths = [max(map(len, column)) for column in zip(*rows)]
    for row in rows:
        say("  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip())
    check_memory(roles)
    for name, reward in rewards.items():
        if layout.max_inflight_batches > 1 and getattr(reward, "sharded", False):
            raise BadInput(
                f"--reward {name} with --max-inflight-batches 2: the reward model's collectives would mix with the "
                "trainer's; use model: or model-cpu:"
            )
    return roles


def fit_memory(
    args, models: list[str], rewards: dict[str, Callable], size: int, dtype: torch.dtype, longest: int,
    sequences: int, others: dict[str, str] | None = None,
) -> None:  # fmt: skip
    """Fill in args.compute's token budget and, on GPUs, args.layout's share of the memory for the engine, and print
    both. Raises BadInput where the memory of a rank is too small.

    models: all that are trained, and "reference". longest: tokens of the longest prompt and response. sequences:
    responses that one engine is asked for in one call. others: name -> another model, frozen.
    """
    shards = args.compute.shard_size or size
    beside = sum(FROZEN_BYTES * count_parameters(path) / shards for path in (others or {}).values())
    vllm = args.rollout_backend == "vllm"
    on_the_gpu = {
        "trained": len(models) - ("reference" in models),
        "frozen": int("reference" in models and not args.compute.lora_rank),
        "offload": args.offload,
        "engine": memory.engine_state(args.layout, args.rollout_backend),
        "other": sum(reward_role(name, reward, size).device for name, reward in rewards.items())
        + (beside if args.offload == "none" else 0),
    }
    args.compute = memory.plan(args.compute, args.model, dtype, size, longest=longest, **on_the_gpu)
    if torch.cuda.is_available() and vllm and not args.layout.rollout_urls:
        gpu = memory.this_gpu(args.compute, args.model, dtype, size, **on_the_gpu)
        together = min(engines.MOST_SEQUENCES, sequences)
        args.layout = memory.plan_engine(args.layout, gpu, args.rollout_tp, longest, together)


def sharded_role(name: str, total: int, shards: int, dtype: str, offloaded: bool) -> Role:
    """A model that the trainer's ranks share. total: its bytes on all of them together. dtype: text for the table."""
    share = total / shards
    lives = f"sharded over {shards} rank(s)" + (", in host memory" if offloaded else "")
    return Role(name, lives, dtype, 0.0 if offloaded else share, share if offloaded else 0.0)


def rollout_role(path: str, size: int, layout: Layout, backend: str, tp: int, dtype: torch.dtype) -> Role:
    """The engine, or the servers, that generate responses."""
    each = count_parameters(path) * dtype.itemsize / tp
    name = str(dtype).removeprefix("torch.")
    if layout.rollout_urls:
        return Role("rollout", " ".join(layout.rollout_urls), name)
    if layout.split:
        on_gpu = torch.cuda.is_available()
        where = f"{'GPUs' if on_gpu else 'cores'} {layout.rollout_devices}, {tp} a server, by vLLM"
        return Role("rollout", where, name, 0.0, 0.0 if on_gpu else each * len(layout.rollout_devices) / size)
    # A GPU's engine sleeps while its rank trains, so that the two do not add up.
    sleeps = torch.cuda.is_available() and backend == "vllm"
    where = f"every rank, by {backend}" if tp == 1 else f"{tp} ranks share one, by {backend}"
    return Role("rollout", where + (", asleep while training" if sleeps else ""), name, 0.0 if sleeps else each)


def reward_role(name: str, reward: Callable, size: int) -> Role:
    """A reward. Only reward models take memory worth counting."""
    # Imported here, so that importing an algorithm file does not load them.
    from common.rewards.model import RewardModel, RewardModelOnCPU
    from common.rewards.service import RewardService

    if isinstance(reward, RewardModelOnCPU):
        return Role(f"reward {name}", "a CPU process of each rank", "float32", 0.0, FROZEN_BYTES * reward.parameters)
    if isinstance(reward, RewardModel):
        each = (2 if torch.cuda.is_available() else FROZEN_BYTES) * reward.parameters
        lives = f"sharded over {size} rank(s)" if reward.sharded else "every rank"
        dtype = "bfloat16" if torch.cuda.is_available() else "float32"
        return Role(f"reward {name}", lives, dtype, each / (size if reward.sharded else 1))
    lives = "a service" if isinstance(reward, RewardService) else "worker processes or the rank itself"
    return Role(f"reward {name}", lives, "")


def check_memory(roles: list[Role]) -> None:
    """Raises BadInput that names the largest role if the memory of a rank is too small for all of them."""
    cuda, device_has = torch.cuda.is_available(), rank_memory()
    local_size = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    host_has = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / local_size if cuda else device_has
    device_needs, host_needs = (sum(getattr(role, kind) for role in roles) for kind in ("device", "host"))
    if not cuda:  # device and host are the same memory
        device_needs, host_needs = device_needs + host_needs, 0.0
    largest = max(roles, key=lambda role: role.device + role.host)
    for kind, needs, has in (("device", device_needs, device_has), ("host", host_needs, host_has)):
        if needs > has:
            raise BadInput(
                f"the roles need {needs / GIB:.1f} GiB of {kind} memory a rank, which has {has / GIB:.1f}; most of "
                f"it is the {largest.name}'s: more ranks, a smaller model, or --offload"
            )


def show(args, size: int, prompts: list[Prompt], held_out: list[Prompt], tokenizer, resume: Path | None) -> None:
    """Print what a checked run on `size` ranks would do. resume: the checkpoint it would continue from, if any."""
    flags = dataclasses.asdict(args)
    rows = [*model_rows(flags, size), *data_rows(flags, prompts, held_out), *step_rows(flags, size, len(prompts))]
    rows.append(("starts", f"from {resume}" if resume else "anew"))
    rows.append(("run directory", flags["run_dir"] or "runs/NAME-DATE-TIME"))
    width = max(len(name) for name, _ in rows)
    say("\n".join(f"{name:<{width}}  {text}" for name, text in rows))
    say(f"the first prompt as the model reads it, {prompts[0].id}:\n{tokenizer.decode(prompts[0].ids)}")


def model_rows(flags: dict, size: int) -> list[tuple[str, str]]:
    config, count = AutoConfig.from_pretrained(flags["model"]), count_parameters(flags["model"])
    dtype = getattr(torch, flags["dtype"])
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    updated = trained_parameters(flags["model"], flags["compute"]["lora_rank"])
    checkpoint = folders.size(12 * updated + (dtype.itemsize if updated == count else 4) * updated)
    every = flags["saving"]["save_every"]
    return [
        ("model", f"{flags['model']}: {config.model_type}, {count / 1e6:,.1f} M parameters, {dtype}"),
        ("ranks", f"{size} on {device}"),
        ("checkpoints", f"{f'every {every} steps' if every else 'at the end'}, each {checkpoint} or more"),
    ]


def data_rows(flags: dict, prompts: list[Prompt], held_out: list[Prompt]) -> list[tuple[str, str]]:
    longest = max(len(prompt.ids) for prompt in prompts + held_out)
    return [
        ("prompts", f"{len(prompts):,} to train on, {len(held_out):,} held out; up to {longest} tokens"),
        ("rewards", " ".join(flags["reward"])),
    ]


def step_rows(flags: dict, size: int, count: int) -> list[tuple[str, str]]:
    """count: number of prompts in the data."""
    drawn, group = flags["prompts_per_step"], flags["group_size"]
    responses, updates = drawn * group, flags["mini_batches"] * flags.get("epochs", 1)
    step = f"{drawn} prompts x {group} = {responses} responses of up to {flags['max_response_tokens']} tokens"
    draws_more = "gen_prompts" in flags  # DAPO and PRIME draw prompts until enough groups are mixed
    if draws_more:
        drawn = flags["gen_prompts"] or drawn
        step += f", from {drawn} to {drawn * flags['max_gen_batches']} prompts drawn"
    budget, passes = flags["compute"]["token_budget"], flags["steps"] * drawn / count
    return [
        ("a step", f"{step}; {responses // size} a rank"),
        ("its updates", f"{updates} of {responses // flags['mini_batches']} responses, {budget} tokens a forward"),
        ("steps", f"{flags['steps']}: {passes:.2g} passes over the prompts{' or more' * draws_more}"),
    ]
