"""Trainer -> engine: the policy's weights, gathered one parameter at a time."""

import zlib
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor


class Parameter(NamedTuple):
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]


class FullParameters:
    """(name, full tensor) of every parameter, anew in each iteration; one is whole at a time, on a GPU two.

    Collective: every rank iterates. Tied parameters appear once, under their first name. Also a weight source of
    vLLM's trainer engines, which ask for metadata() first.
    """

    def __init__(self, policy: nn.Module, dtype: torch.dtype | None = None):
        """dtype: None, or another than the float32 of the masters, to send less."""
        self.policy, self.dtype = policy, dtype

    def metadata(self) -> list[Parameter]:
        """Name, dtype and full shape of what an iteration yields, without gathering it."""
        return [Parameter(name, self.dtype or p.dtype, tuple(p.shape)) for name, p in self.policy.named_parameters()]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        pairs = ((name, self.gather(parameter)) for name, parameter in self.policy.named_parameters())
        return one_ahead(pairs) if next(self.policy.parameters()).is_cuda else pairs

    def gather(self, parameter: nn.Parameter) -> torch.Tensor:
        """The whole of one parameter. Collective: every rank calls it."""
        tensor = parameter.detach()
        tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        return tensor if self.dtype is None else tensor.to(self.dtype)


def one_ahead(pairs: Iterator[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    """The same pairs on a GPU, the next one gathered on a stream of its own while the one before is loaded."""
    gathering = torch.cuda.Stream()
    gathering.wait_stream(torch.cuda.current_stream())  # the update that made these weights

    def gathered() -> tuple[tuple[str, torch.Tensor] | None, torch.cuda.Event]:
        with torch.cuda.stream(gathering):
            return next(pairs, None), gathering.record_event()

    pair, ready = gathered()
    while pair is not None:
        following = gathered()
        user = torch.cuda.current_stream()  # asked anew: vLLM's sender changes it between two tensors
        user.wait_event(ready)
        pair[1].record_stream(user)  # else the next gather could be given this memory while it is still read
        yield pair
        pair, ready = following


def push(policy: nn.Module, engine) -> None:
    """Make the engine sample from the policy as it is now. Collective: every rank calls it."""
    engine.load_weights(FullParameters(policy, engine.wire_dtype))


def checksum(tensor: torch.Tensor) -> int:
    """CRC-32 of a CPU tensor's bytes, for weights that cross from one process to another."""
    return zlib.crc32(memoryview(tensor.contiguous().view(torch.uint8).numpy()))
