"""Trainer -> engine: the policy's weights, gathered one parameter at a time."""

from collections.abc import Iterator

import torch
from torch import nn
from torch.distributed.tensor import DTensor


def full_parameters(policy: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, full tensor) for every parameter; only one is whole at a time. Collective: every rank iterates.

    Tied parameters appear once, under their first name.
    """
    for name, parameter in policy.named_parameters():
        tensor = parameter.detach()
        yield name, tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def push(policy: nn.Module, engine) -> None:
    """Make the engine sample from the policy as it is now. Collective: every rank calls it."""
    engine.load_weights(full_parameters(policy))
