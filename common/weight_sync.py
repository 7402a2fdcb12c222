"""Weight sync: after every step the engine gets the policy's new weights.

The engine is the program that samples: vLLM in this process, vLLM's servers, or transformers. FSDP2 shards the policy
over the ranks, but the engine wants full tensors, under the names that it knows. So we walk through the policy, one
parameter at a time:

    gather    the ranks exchange their shards, and each rank then has the full tensor (an all-gather, a collective)
    merge     with LoRA, the layer's adapters are added to its weight
    rename    one parameter can become several tensors, because vLLM knows the names in the model's files:
                  transformers       layers.1.mlp.experts.down_proj, of all experts
                  the model's files  layers.1.mlp.experts.0.down_proj.weight, and so on for each expert
    load      the engine copies the tensors into its own weights, and then we free them

A rank never holds a full copy of the model. It holds one full parameter, or two on a GPU (see gather_ahead).

What we rely on:
- Every rank walks through the same parameters in the same order. Gathering would hang otherwise.
- Each parameter can be renamed on its own. It may become several tensors of the files. The reverse is not supported:
  several parameters that are parts of one tensor in the files. tests/test_families.py covers the supported families.
- Tied parameters are sent once, under their first name. The engine ties its own copies.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from transformers.core_model_loading import revert_weight_conversion

ADAPTERS = ("lora_a", "lora_b")  # parameters of a LoRA layer besides its weight (common/trainer/lora.py)

NamedTensors = list[tuple[str, torch.Tensor]]  # (name, full tensor): what one parameter becomes in the engine


class TensorInfo(NamedTuple):
    """The description of a tensor that will be sent."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]  # shape of the full tensor, not of a shard


class FullParameters:
    """The weights to send: iterating over it yields (name, full tensor) pairs.

    Each iteration gathers the weights as they are now: all parameters, with adapters merged, and the buffers that are
    saved with the model. Collective: every rank iterates to the end. vLLM's NCCL sender takes this object as its
    "weight source"; inside engine.load_weights it asks for metadata() first.
    """

    def __init__(self, policy: nn.Module, dtype: torch.dtype, saved_names: bool = False):
        """dtype: data type of the engine's weights. saved_names: True for vLLM, which uses the names and shapes of the
        model's files; False for an engine that uses those of the transformers model.
        """
        self.policy = policy
        self.dtype = dtype
        self.saved_names = saved_names

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        first_parameter = next(self.policy.parameters())
        if device_type(first_parameter) == "cuda":
            yield from gather_ahead(self.gather_each())
        else:
            for tensors in self.gather_each():
                yield from tensors
                tensors.clear()  # frees them before the next parameter is gathered

    def gather_each(self) -> Iterator[NamedTensors]:
        """Yields, for each parameter and buffer, the tensors to send. Collective: every rank iterates to the end."""
        for name, parameter in self.parameters_and_buffers():
            tensor = self.gather_full(name, parameter)
            yield self.to_engine_names(name, tensor)

    def metadata(self) -> list[TensorInfo]:
        """What an iteration will yield. A vLLM server allocates its receive buffers from this list.

        Nothing is gathered: a sharded parameter knows its full shape.
        """
        infos = []
        for name, parameter in self.parameters_and_buffers():
            # A tensor on the meta device has a shape but no data. Renaming it shows how the real one will be split.
            empty = torch.empty(parameter.shape, dtype=self.wire_dtype(parameter), device="meta")
            for engine_name, tensor in self.to_engine_names(name, empty):
                infos.append(TensorInfo(engine_name, tensor.dtype, tuple(tensor.shape)))
        return infos

    def parameters_and_buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Sharded parameters and saved buffers, under transformers' names. No adapters: gather_full merges them."""
        for name, parameter in self.policy.named_parameters():
            if not name.endswith(ADAPTERS):
                yield name, parameter
        saved = self.policy.state_dict().keys()
        for name, buffer in self.policy.named_buffers():
            if name in saved:
                yield name, buffer

    def wire_dtype(self, tensor: torch.Tensor) -> torch.dtype:
        """Parameters are sent in the engine's dtype. Buffers, such as a router's biases, keep their own dtype in the
        engine, so they are sent in it.
        """
        if isinstance(tensor, nn.Parameter):
            return self.dtype
        return tensor.dtype

    def gather_full(self, name: str, parameter: torch.Tensor) -> torch.Tensor:
        """The full tensor of a parameter or buffer, with its layer's adapters added. Collective."""
        module_name, _, kind = name.rpartition(".")
        layer = self.policy.get_submodule(module_name)
        if kind == "weight" and hasattr(layer, "lora_a"):
            # Weight and adapters are gathered as they are, added in float32, and rounded once. If we cast them before
            # the sum, a small change by the adapters could be lost.
            weight = gather(parameter, parameter.dtype)
            lora_a = gather(layer.lora_a, layer.lora_a.dtype)
            lora_b = gather(layer.lora_b, layer.lora_b.dtype)
            return layer.merged(weight, lora_a, lora_b).to(self.dtype)
        return gather(parameter, self.wire_dtype(parameter))

    def to_engine_names(self, name: str, tensor: torch.Tensor) -> NamedTensors:
        """The tensor under the engine's name, or the tensors that the model's files have in its place."""
        if not self.saved_names:
            return [(name, tensor)]
        # When transformers loads a model, it fuses some tensors of the files into one parameter. This reverses it.
        return list(revert_weight_conversion(self.policy, {name: tensor}).items())


def gather(parameter: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The full tensor of a sharded parameter, in this dtype. Collective: every rank calls it."""
    # Move the shard to the GPU first, if --offload keeps it in host memory: NCCL needs it there, and the GPU casts
    # faster. Cast before the all-gather, because a bfloat16 shard has half the bytes of a float32 one.
    shard = parameter.detach().to(device_type(parameter), non_blocking=True)
    shard = shard.to(dtype)
    return shard.full_tensor() if isinstance(shard, DTensor) else shard


def device_type(parameter: torch.Tensor) -> str:
    """Where a parameter is used, "cuda" or "cpu". With --offload it is used on the GPU, but stored in host memory."""
    return parameter.device_mesh.device_type if isinstance(parameter, DTensor) else parameter.device.type


def gather_ahead(parameters: Iterator[NamedTensors]) -> Iterator[tuple[str, torch.Tensor]]:
    """The (name, tensor) pairs of all parameters, on a GPU. The next parameter is gathered while one is loaded.

    Gathering has its own CUDA stream, so it runs at the same time as the caller's work:

        gathering stream     gather 0   gather 1   gather 2   gather 3
        caller's stream                 load 0     load 1     load 2     load 3        load i waits for gather i

    Gather i + 1 is queued just before the caller gets parameter i, so two full parameters are in memory: the one that
    is being loaded, and the next. When the loop ends, the caller's stream has waited for the last gather. So the next
    optimizer step can't change a shard that is still being read.
    """
    gathering = torch.cuda.Stream()
    gathering.wait_stream(torch.cuda.current_stream())  # don't read shards before the optimizer has written them

    def gather_next() -> tuple[NamedTensors | None, torch.cuda.Event]:
        """The next parameter's tensors (None after the last), and an event recorded after their gather."""
        with torch.cuda.stream(gathering):
            tensors = next(parameters, None)
            return tensors, gathering.record_event()

    tensors, ready = gather_next()
    while tensors is not None:
        upcoming = gather_next()  # starts now; the caller loads `tensors` in the meantime
        while tensors:
            name, tensor = tensors.pop(0)  # popped and deleted: nothing here may keep a loaded tensor alive
            caller = torch.cuda.current_stream()  # ask for every tensor: vLLM's sender switches between two streams
            caller.wait_event(ready)
            tensor.record_stream(caller)  # otherwise a later gather could reuse this memory before it has been read
            yield name, tensor
            del tensor
        tensors, ready = upcoming


def push(policy: nn.Module, engine) -> None:
    """Give the engine the policy's current weights. Collective: every rank calls it."""
    engine.load_weights(FullParameters(policy, engine.wire_dtype, engine.saved_names))
