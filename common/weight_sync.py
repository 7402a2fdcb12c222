"""Weight sync from the trainer to the engine: the policy's parameters are gathered one at a time.

vLLM's loaders know the names in a model's files, where each expert has its own; in transformers they share one.
"""

import zlib
from collections.abc import Iterator
from itertools import chain
from typing import NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from transformers.core_model_loading import revert_weight_conversion

ADAPTERS = ("lora_a", "lora_b")  # names of LoRA's parameters (common/trainer/lora.py)


class Parameter(NamedTuple):
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]


class FullParameters:
    """Iterates over (name, full tensor) of every parameter and every buffer that is saved with the model. One parameter
    at a time is whole, two on a GPU.

    Each iteration gathers the current weights. Tied parameters appear once, under their first name. vLLM's trainer
    engines also take it as their weight source, and ask for metadata() first. Collective: every rank iterates.
    """

    def __init__(self, policy: nn.Module, dtype: torch.dtype | None = None, saved_names: bool = False):
        """dtype: data type of the engine's weights, or None for that of the parameters (float32). saved_names: yield
        names and shapes as in the model's files, which cuts some parameters into several tensors.
        """
        self.policy, self.dtype, self.saved_names = policy, dtype, saved_names

    def metadata(self) -> list[Parameter]:
        """Name, dtype and full shape of each tensor that an iteration yields. Nothing is gathered."""
        empty = ((n, torch.empty(x.shape, dtype=self.sent_as(x) or x.dtype, device="meta")) for n, x in self.tensors())
        return [Parameter(name, x.dtype, tuple(x.shape)) for pair in empty for name, x in self.named(*pair)]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        gathered = (self.named(name, self.whole(name, tensor)) for name, tensor in self.tensors())
        on_cuda = device_type(next(self.policy.parameters())) == "cuda"
        return one_ahead(gathered) if on_cuda else chain.from_iterable(gathered)

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Parameters under their first name, without adapters, and the buffers that belong to a state dict."""
        yield from ((n, p) for n, p in self.policy.named_parameters() if not n.endswith(ADAPTERS))
        saved = self.policy.state_dict().keys()
        yield from ((name, buffer) for name, buffer in self.policy.named_buffers() if name in saved)

    def sent_as(self, tensor: torch.Tensor) -> torch.dtype | None:
        """The engine's dtype for parameters. Buffers, such as a router's biases, keep their own on both sides: None."""
        return self.dtype if isinstance(tensor, nn.Parameter) else None

    def named(self, name: str, tensor: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
        """The full tensor under the name that the engine knows, or the tensors into which its files cut it."""
        if not self.saved_names:
            return [(name, tensor)]
        return list(revert_weight_conversion(self.policy, {name: tensor}).items())

    def whole(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """One parameter as a full tensor, the layer's adapters added, or a buffer. Collective: every rank calls it."""
        module, _, kind = name.rpartition(".")
        layer = self.policy.get_submodule(module)
        if kind != "weight" or not hasattr(layer, "lora_a"):
            return gather(tensor, self.sent_as(tensor))
        return layer.merged(*(gather(x, None) for x in (tensor, layer.lora_a, layer.lora_b))).to(self.dtype)


def gather(parameter: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    """One parameter as a full tensor. Shards are cast first, so that half as many bytes travel, and those of --offload
    travel between GPUs. Collective: every rank calls it.
    """
    # Move first: the host would cast a tensor that is moved and cast in one call.
    tensor = parameter.detach().to(device_type(parameter), non_blocking=True).to(dtype=dtype)
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def device_type(parameter: torch.Tensor) -> str:
    """Where a parameter is used, "cuda" or "cpu". An offloaded one lives elsewhere."""
    return parameter.device_mesh.device_type if isinstance(parameter, DTensor) else parameter.device.type


def one_ahead(gathered: Iterator[list[tuple[str, torch.Tensor]]]) -> Iterator[tuple[str, torch.Tensor]]:
    """All pairs of these lists, on a GPU. A second stream gathers the next list while the caller loads the current one.

    A list has one parameter, or the tensors into which it was cut on that stream.
    """
    gathering = torch.cuda.Stream()
    gathering.wait_stream(torch.cuda.current_stream())  # the update must have finished

    def following() -> tuple[list[tuple[str, torch.Tensor]] | None, torch.cuda.Event]:
        with torch.cuda.stream(gathering):
            return next(gathered, None), gathering.record_event()

    pairs, ready = following()
    while pairs is not None:
        after = following()
        for pair in pairs:
            user = torch.cuda.current_stream()  # ask each time: vLLM's sender changes it between two tensors
            user.wait_event(ready)
            pair[1].record_stream(user)  # otherwise the next gather could write to this memory while it is read
            yield pair
        pairs, ready = after


def push(policy: nn.Module, engine) -> None:
    """Give the engine the policy's current weights. Collective: every rank calls it."""
    engine.load_weights(FullParameters(policy, engine.wire_dtype, engine.saved_names))


def checksum(tensor: torch.Tensor) -> int:
    """CRC-32 of a CPU tensor's bytes. It shows whether weights were damaged between two processes."""
    return zlib.crc32(memoryview(tensor.contiguous().view(torch.uint8).numpy()))
