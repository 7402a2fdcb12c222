"""The roles of a run, where each lives and what it takes: one table, and a refusal before anything is loaded.

Memory is an estimate from configurations: a trained role has float32 masters, gradients and Adam's two moments, a
frozen one float32 weights, both sharded over the ranks; an engine has weights in the compute dtype. Activations and
the engine's cache are not in it: --token-budget and the engine are to leave room for them.
"""

import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from common.batching import rank_memory
from common.errors import BadInput, say
from common.placement import Layout, Sharding
from common.reward_model import RewardModel, RewardModelOnCPU
from common.reward_service import RewardService

TRAINED, FROZEN = 16, 4  # bytes a parameter


def check_world(
    rollout_tp: int, layout: Layout = Layout(), backend: str = "vllm", sharding: Sharding = Sharding()
) -> int:
    """Number of ranks torchrun started (1 without it), before any of them is joined. Raises BadInput."""
    size, local_size = (int(os.environ.get(name, "1")) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"))
    together = {"rollout-tp": size if layout.split and rollout_tp > 0 else rollout_tp}
    together |= {"sequence-parallel": sharding.sequence_parallel, "shard-size": sharding.shard_size or size}
    for flag, ranks in together.items():
        if ranks < 1 or size % ranks:
            raise BadInput(f"--{flag} {ranks} does not divide the {size} ranks")
    if torch.cuda.is_available() and local_size + len(layout.rollout_devices) > torch.cuda.device_count():
        servers = f" and {len(layout.rollout_devices)} --rollout-devices" if layout.rollout_devices else ""
        raise BadInput(f"{local_size} ranks{servers} on this node but {torch.cuda.device_count()} GPUs")
    check_layout(layout, rollout_tp, backend)
    return size


def engines(size: int, rollout_tp: int, layout: Layout) -> int:
    """How many engines share a step's prompts."""
    return (
        (len(layout.rollout_devices) // rollout_tp or len(layout.rollout_urls)) if layout.split else size // rollout_tp
    )


def check_layout(layout: Layout, rollout_tp: int, backend: str) -> None:
    """Flags that do not go together. Raises BadInput."""
    devices, urls = layout.rollout_devices, layout.rollout_urls
    if layout.max_inflight_batches not in (1, 2):
        raise BadInput(f"--max-inflight-batches {layout.max_inflight_batches}: 1, or 2 for one batch ahead")
    if not layout.split:
        if devices or urls or layout.max_inflight_batches > 1 or layout.inflight_updates:
            raise BadInput(
                "--rollout-devices, --rollout-urls, --max-inflight-batches 2 and --inflight-updates need "
                "--rollout-placement split: a colocated engine sleeps while its rank trains"
            )
        return
    if bad := [url for url in urls if not re.fullmatch(r"https?://[^/?#@]+/?", url)]:
        raise BadInput(f"--rollout-urls {re.split('[?#]', bad[0])[0]}: expected http://HOST:PORT")
    if backend != "vllm":
        raise BadInput(f"--rollout-placement split: vLLM's servers; --rollout-backend {backend} has none")
    if bool(devices) == bool(urls):
        raise BadInput("--rollout-placement split: needs --rollout-devices to start servers on, or --rollout-urls")
    if layout.inflight_updates and layout.max_inflight_batches == 1:
        raise BadInput("--inflight-updates: nothing is in flight with --max-inflight-batches 1")
    there = range(torch.cuda.device_count()) if torch.cuda.is_available() else sorted(os.sched_getaffinity(0))
    kind = "GPUs" if torch.cuda.is_available() else "cores"
    if len(set(devices)) < len(devices) or not set(devices) <= set(there):
        raise BadInput(f"--rollout-devices {devices}: expected different ones of this node's {kind}, {list(there)}")
    if set(devices) == set(there):
        raise BadInput(f"--rollout-devices {devices}: none of this node's {len(there)} {kind} is left for the trainer")
    if len(devices) % rollout_tp:
        raise BadInput(f"--rollout-tp {rollout_tp} does not divide the {len(devices)} --rollout-devices")


@dataclass(frozen=True)
class Role:
    name: str
    lives: str
    dtype: str
    device: float = 0.0  # bytes on each rank's device
    host: float = 0.0  # bytes of host memory a rank


@lru_cache
def parameters(model_path: str) -> int:
    """How many a causal language model has, tied ones once; no weights are read."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model_path))
    return sum(parameter.numel() for parameter in model.parameters())


def sharded(name: str, path: str, bytes_each: int, size: int, dtype: torch.dtype, offload: bool) -> Role:
    """A role on the trainer's ranks."""
    share = bytes_each * parameters(path) / size
    lives = f"sharded over {size} rank(s)" + (", in host memory" if offload else "")
    computes = f"float32, computes in {str(dtype).removeprefix('torch.')}"
    return Role(name, lives, computes, 0.0 if offload else share, share if offload else 0.0)


def engine(path: str, size: int, layout: Layout, backend: str, tp: int, dtype: torch.dtype) -> Role:
    """The rollout role."""
    each = parameters(path) * dtype.itemsize / tp
    name = str(dtype).removeprefix("torch.")
    if layout.rollout_urls:
        return Role("rollout", " ".join(layout.rollout_urls), name)
    if layout.split:
        on_gpu = torch.cuda.is_available()
        where = f"{'GPUs' if on_gpu else 'cores'} {layout.rollout_devices}, {tp} a server, by vLLM"
        return Role("rollout", where, name, 0.0, 0.0 if on_gpu else each * len(layout.rollout_devices) / size)
    # A GPU's engine sleeps while its rank trains: the two do not add up.
    sleeps = torch.cuda.is_available() and backend == "vllm"
    where = f"every rank, by {backend}" if tp == 1 else f"{tp} ranks share one, by {backend}"
    return Role("rollout", where + (", asleep while training" if sleeps else ""), name, 0.0 if sleeps else each)


def of_reward(name: str, reward: Callable, size: int) -> Role:
    """A reward's: only models take much."""
    if isinstance(reward, RewardModelOnCPU):
        path = reward.spec.partition(":")[2]
        return Role(f"reward {name}", "a CPU process of each rank", "float32", 0.0, FROZEN * parameters(path))
    if isinstance(reward, RewardModel):
        each = (2 if torch.cuda.is_available() else FROZEN) * parameters(reward.path)
        lives = f"sharded over {size} rank(s)" if reward.sharded else "every rank"
        dtype = "bfloat16" if torch.cuda.is_available() else "float32"
        return Role(f"reward {name}", lives, dtype, each / (size if reward.sharded else 1))
    lives = "a service" if isinstance(reward, RewardService) else "worker processes or the rank itself"
    return Role(f"reward {name}", lives, "")


def show(
    model_path: str, trained: list[str], frozen: list[str], rewards: dict[str, Callable], *, size: int, layout: Layout,
    backend: str, rollout_tp: int, dtype: torch.dtype, offload: str,
) -> list[Role]:  # fmt: skip
    """Print the table of roles, which all start from one model. Raises BadInput if they cannot fit.

    trained: "policy" and those beside it; offload: "none", "others" (all but the policy) or "all".
    """
    tp = rollout_tp if backend == "vllm" else 1
    aside = lambda name: offload == "all" or (offload == "others" and name != "policy")
    kinds = dict.fromkeys(trained, TRAINED) | dict.fromkeys(frozen, FROZEN)
    roles = [sharded(name, model_path, each, size, dtype, aside(name)) for name, each in kinds.items()]
    roles.append(engine(model_path, size, layout, backend, tp, dtype))
    roles += [of_reward(name, reward, size) for name, reward in rewards.items()]
    rows = [("role", "lives on", "dtype", "GiB a rank")]
    rows += [(role.name, role.lives, role.dtype, f"{(role.device + role.host) / 2**30:.2f}") for role in roles]
    widths = [max(map(len, column)) for column in zip(*rows)]
    for row in rows:
        say("  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip())
    check_memory(roles)
    for name, reward in rewards.items():
        if layout.max_inflight_batches > 1 and isinstance(reward, RewardModel) and reward.sharded:
            raise BadInput(
                f"--reward {name} with --max-inflight-batches 2: its collectives would mix with the trainer's; use "
                "model: or model-cpu:"
            )
    return roles


def check_memory(roles: list[Role]) -> None:
    """Raises BadInput naming the largest role where the ranks' memory is too small for all of them."""
    cuda, there = torch.cuda.is_available(), rank_memory()
    local_size = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    host = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / local_size if cuda else there
    device_needs, host_needs = (sum(getattr(role, kind) for role in roles) for kind in ("device", "host"))
    if not cuda:  # one and the same memory
        device_needs, host_needs = device_needs + host_needs, 0.0
    largest = max(roles, key=lambda role: role.device + role.host)
    for kind, needs, has in (("device", device_needs, there), ("host", host_needs, host)):
        if needs > has:
            raise BadInput(
                f"the roles need {needs / 2**30:.1f} GiB of {kind} memory a rank, which has {has / 2**30:.1f}; most of "
                f"it is the {largest.name}'s: more ranks, a smaller model, or --offload"
            )
