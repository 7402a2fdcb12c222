"""Weight sync from the trainer to the engine: the policy's parameters are gathered one at a time."""

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
    """Iterates over (name, full tensor) of every parameter. One tensor at a time is whole, two on a GPU.

    Each iteration gathers the current weights. Tied parameters appear once, under their first name. vLLM's trainer
    engines also take it as their weight source, and ask for metadata() first. Collective: every rank iterates.
    """

    def __init__(self, policy: nn.Module, dtype: torch.dtype | None = None):
        """dtype: data type of the engine's weights, or None for that of the parameters (float32)."""
        self.policy, self.dtype = policy, dtype

    def metadata(self) -> list[Parameter]:
        """Name, dtype and full shape of each parameter that an iteration yields. Nothing is gathered."""
        return [Parameter(name, self.dtype or p.dtype, tuple(p.shape)) for name, p in self.policy.named_parameters()]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        pairs = ((name, self.gather(parameter)) for name, parameter in self.policy.named_parameters())
        return one_ahead(pairs) if device_type(next(self.policy.parameters())) == "cuda" else pairs

    def gather(self, parameter: nn.Parameter) -> torch.Tensor:
        """One parameter as a full tensor. Shards are cast first, so that half as many bytes travel, and those of
        --offload travel between GPUs. Collective: every rank calls it.
        """
        # Move first: the host would cast a tensor that is moved and cast in one call.
        tensor = parameter.detach().to(device_type(parameter), non_blocking=True).to(dtype=self.dtype)
        return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def device_type(parameter: torch.Tensor) -> str:
    """Where a parameter is used, "cuda" or "cpu". An offloaded one lives elsewhere."""
    return parameter.device_mesh.device_type if isinstance(parameter, DTensor) else parameter.device.type


def one_ahead(pairs: Iterator[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    """The same pairs on a GPU. A second stream gathers the next one while the caller loads the current one."""
    gathering = torch.cuda.Stream()
    gathering.wait_stream(torch.cuda.current_stream())  # the update must have finished

    def gathered() -> tuple[tuple[str, torch.Tensor] | None, torch.cuda.Event]:
        with torch.cuda.stream(gathering):
            return next(pairs, None), gathering.record_event()

    pair, ready = gathered()
    while pair is not None:
        following = gathered()
        user = torch.cuda.current_stream()  # ask each time: vLLM's sender changes it between two tensors
        user.wait_event(ready)
        pair[1].record_stream(user)  # otherwise the next gather could write to this memory while it is read
        yield pair
        pair, ready = following


def push(policy: nn.Module, engine) -> None:
    """Give the engine the policy's current weights. Collective: every rank calls it."""
    engine.load_weights(FullParameters(policy, engine.wire_dtype))


def checksum(tensor: torch.Tensor) -> int:
    """CRC-32 of a CPU tensor's bytes. It shows whether weights were damaged between two processes."""
    return zlib.crc32(memoryview(tensor.contiguous().view(torch.uint8).numpy()))
