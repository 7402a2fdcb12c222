"""The table of a run's roles, printed before anything is loaded: what lives where, and the memory it takes.

A role is a model or a reward: the policy, a critic, a reference, the engine, a grader.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from common import placement
from common.errors import BadInput, say
from common.preflight.memory import FROZEN, FROZEN_BYTES, GIB, GRADIENT_BYTES, MOMENT_BYTES, MemoryPlan, pinned_factor


@dataclass(frozen=True)
class Role:
    name: str
    lives: str
    dtype: str
    device: float = 0.0  # bytes on each rank's device
    host: float = 0.0  # bytes of host memory for each rank


def model_roles(plan: MemoryPlan) -> list[Role]:
    """The models that the trainer's ranks share. A trained one also has gradients in an update."""
    computes = str(plan.dtype).removeprefix("torch.")
    adapts = plan.compute.lora_rank > 0
    roles = []
    for name, size in plan.model_states().items():
        if name == "reference" and adapts:
            roles.append(Role(name, "the policy without its adapters", ""))
            continue
        lives = f"sharded over {plan.shards} rank(s)"
        # A teacher from --model follows the policy in float32 (SDPO).
        moves = name in plan.models and name != "reference"
        dtype = f"float32, computes in {computes}" if moves else computes
        trained = name in plan.models and name not in FROZEN
        if trained:
            # The table shows the peak, so a trained model counts with its gradients.
            size += GRADIENT_BYTES * plan.trainable
            if adapts:
                dtype = f"{plan.trainable / 1e6:,.2f} M float32, the rest {computes}"
        if plan.offloaded(name) and plan.gpu:
            # Weights and gradients are page-locked, the optimizer's moments are not.
            moments = MOMENT_BYTES * plan.trainable if trained else 0
            factor = pinned_factor(plan.others.get(name, plan.model), plan.shards)
            size = moments + factor * (size - moments)
        share = size / plan.shards
        if plan.offloaded(name):
            roles.append(Role(name, f"{lives}, in host memory", dtype, host=share))
        else:
            roles.append(Role(name, lives, dtype, device=share))
    return roles


def rollout_role(plan: MemoryPlan) -> Role:
    """The engine, or the servers, that generate responses."""
    layout = plan.layout
    # Only vLLM shares a model over several ranks.
    tp = plan.rollout_tp if plan.backend == "vllm" else 1
    weights = plan.parameters * plan.dtype.itemsize / tp
    dtype = str(plan.dtype).removeprefix("torch.")
    if layout.rollout_urls:
        # A push from a CPU to an SGLang server on this machine has the whole model in shared memory for a moment.
        host = weights / plan.size if plan.backend == "sglang" and not plan.gpu else 0.0
        return Role("rollout", " ".join(layout.rollout_urls), dtype, host=host)
    if layout.split:
        kind = "GPUs" if plan.gpu else "cores"
        lives = f"{kind} {layout.rollout_devices}, {tp} a server, by vLLM"
        # Servers on cores share the machine's memory with the ranks. Servers on GPUs have their own.
        host = 0.0 if plan.gpu else weights * len(layout.rollout_devices) / plan.size
        return Role("rollout", lives, dtype, host=host)
    lives = f"every rank, by {plan.backend}" if tp == 1 else f"{tp} ranks share one, by {plan.backend}"
    if plan.gpu and plan.backend == "vllm":
        # It sleeps while its rank trains, so its weights do not add up with what the trainer needs.
        return Role("rollout", f"{lives}, asleep while training", dtype)
    return Role("rollout", lives, dtype, device=weights)


def reward_role(name: str, reward: Callable, size: int) -> Role:
    """A reward. Only reward models take memory worth counting. size: number of ranks."""
    # Imported here, so that importing an algorithm file does not load them.
    from common.rewards.judge import Judge
    from common.rewards.model import RewardModel, RewardModelOnCPU
    from common.rewards.service import RewardService

    name = f"reward {name}"
    if isinstance(reward, RewardModelOnCPU):
        return Role(name, "a CPU process of each rank", "float32", host=FROZEN_BYTES * reward.parameters)
    if isinstance(reward, RewardModel):
        dtype = torch.bfloat16 if torch.cuda.is_available() else torch.float32
        weights = dtype.itemsize * reward.parameters
        dtype = str(dtype).removeprefix("torch.")
        if reward.sharded:
            return Role(name, f"sharded over {size} rank(s)", dtype, device=weights / size)
        return Role(name, "every rank", dtype, device=weights)
    if isinstance(reward, RewardService | Judge):
        lives = "a service"
    elif hasattr(reward, "waits"):  # for other processes
        lives = "worker processes of each rank"
    else:
        lives = "every rank itself"
    return Role(name, lives, "")


def check_fit(plan: MemoryPlan, roles: list[Role]) -> None:
    """Raises BadInput that names the largest role if the memory of a rank is too small for all of them."""
    if plan.gpu:
        kinds = [
            ("device", lambda role: role.device, plan.memory, "more ranks, a smaller model, or --offload"),
            ("host", lambda role: role.host, placement.host_memory(), "a smaller model, more nodes, or less --offload"),
        ]
    else:  # both are the same memory
        kinds = [("host", lambda role: role.device + role.host, plan.memory, "a smaller model, or a larger machine")]
    for kind, bytes_of, memory, cure in kinds:
        needed = sum(map(bytes_of, roles))
        if needed > memory:
            raise BadInput(
                f"the roles need {needed / GIB:.1f} GiB of {kind} memory a rank, which has {memory / GIB:.1f}; most of "
                f"it is the {max(roles, key=bytes_of).name}'s: {cure}"
            )


def show(roles: list[Role]) -> None:
    """Print the table."""
    rows = [("role", "lives on", "dtype", "GiB per rank")]
    for role in roles:
        rows.append((role.name, role.lives, role.dtype, f"{(role.device + role.host) / GIB:.2f}"))
    # Each column is as wide as its widest cell.
    widths = [max(map(len, column)) for column in zip(*rows)]
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths)]
        say("  ".join(cells).rstrip())
