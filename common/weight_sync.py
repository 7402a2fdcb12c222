"""Weight sync: after every step the engine gets the policy's new weights.

FSDP2 shards the policy over the ranks, and transformers names its parameters. The engine wants full tensors under the
names that it knows. So we walk through the policy, one parameter at a time:

    gather    all ranks put their shards together, and each rank then has the full tensor (a collective)
    merge     with LoRA, the layer's adapters are added to its weight
    rename    one parameter can become several tensors, because vLLM knows the names in the model's files:
                  transformers       layers.1.mlp.experts.down_proj, of all experts
                  the model's files  layers.1.mlp.experts.0.down_proj.weight, and so on for each expert
    load      the engine copies the tensors into its weights, and then we drop them

A rank never holds a full copy of the model. It holds one full parameter, or two on a GPU (see gather_ahead).

What we rely on:
- Every rank walks through the same parameters in the same order. Gathering would hang otherwise.
- One parameter can be renamed and cut without the others. This fails for a model that has several parameters where its
  files have one tensor. tests/test_families.py covers the families for which it holds.
- Tied parameters are sent once, under their first name. The engine ties its own copies.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from transformers.core_model_loading import revert_weight_conversion

ADAPTERS = ("lora_a", "lora_b")  # names of LoRA's parameters (common/trainer/lora.py)

NamedTensors = list[tuple[str, torch.Tensor]]  # (name, full tensor): what one parameter becomes in the engine


class TensorInfo(NamedTuple):
    """One tensor that will be sent."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]  # the full tensor's


class FullParameters:
    """The weights to send: iterating over it yields (name, full tensor) pairs.

    Each iteration gathers the weights as they are now: all parameters, and the buffers that are saved with the model.
    vLLM's NCCL sender takes this object as its "weight source", and asks it for metadata() first. Collective: every
    rank iterates to the end.
    """

    def __init__(self, policy: nn.Module, dtype: torch.dtype, saved_names: bool = False):
        """dtype: data type of the engine's weights. saved_names: use the names and shapes of the model's files, as vLLM
        does. Without it they are those of the transformers model.
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

    def gather_each(self) -> Iterator[NamedTensors]:
        """One item for each parameter: the tensors that it becomes in the engine. Collective: every rank iterates."""
        for name, parameter in self.parameters_and_buffers():
            tensor = self.gather_full(name, parameter)
            yield self.to_engine_names(name, tensor)

    def metadata(self) -> list[TensorInfo]:
        """List what an iteration will yield, without gathering anything. A server makes room for these tensors."""
        infos = []
        for name, parameter in self.parameters_and_buffers():
            # A tensor on the meta device has a shape and no data. Renaming it tells how the real one will be cut.
            empty = torch.empty(parameter.shape, dtype=self.wire_dtype(parameter), device="meta")
            for engine_name, tensor in self.to_engine_names(name, empty):
                infos.append(TensorInfo(engine_name, tensor.dtype, tuple(tensor.shape)))
        return infos

    def parameters_and_buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        """This rank's shards, with transformers' names. Adapters are left out, because gather_full merges them."""
        for name, parameter in self.policy.named_parameters():
            if not name.endswith(ADAPTERS):
                yield name, parameter
        saved = self.policy.state_dict().keys()
        for name, buffer in self.policy.named_buffers():
            if name in saved:
                yield name, buffer

    def wire_dtype(self, tensor: torch.Tensor) -> torch.dtype:
        """The dtype in which a tensor is sent: the engine's. A buffer, such as a router's biases, keeps its own dtype,
        because the engine keeps it in that dtype, too.
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
        """The tensor under the name that the engine knows, or the tensors into which the model's files cut it."""
        if not self.saved_names:
            return [(name, tensor)]
        # transformers joins tensors of the files when it loads a model. This undoes it.
        return list(revert_weight_conversion(self.policy, {name: tensor}).items())


def gather(parameter: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The full tensor of a sharded parameter, in this dtype. Collective: every rank calls it."""
    # First to the GPU, if --offload keeps the shard in host memory: NCCL needs it there, and the GPU casts faster.
    # Then to the dtype: bfloat16 shards are half as many bytes to send. Only then do the shards travel.
    shard = parameter.detach().to(device_type(parameter), non_blocking=True)
    shard = shard.to(dtype)
    return shard.full_tensor() if isinstance(shard, DTensor) else shard


def device_type(parameter: torch.Tensor) -> str:
    """Where a parameter is used, "cuda" or "cpu". With --offload it is stored elsewhere."""
    return parameter.device_mesh.device_type if isinstance(parameter, DTensor) else parameter.device.type


def gather_ahead(parameters: Iterator[NamedTensors]) -> Iterator[tuple[str, torch.Tensor]]:
    """The (name, tensor) pairs of all parameters, on a GPU. The next parameter is gathered while one is loaded.

    Gathering has a CUDA stream of its own, so it runs beside the caller's work:

        gathering stream     gather 0   gather 1   gather 2   gather 3
        caller's stream                 load 0     load 1     load 2     load 3        load i waits for gather i

    At most two full parameters are in memory: the one that is loaded, and the next.
    """
    gathering = torch.cuda.Stream()
    gathering.wait_stream(torch.cuda.current_stream())  # the optimizer must have finished its update

    def gather_next() -> tuple[NamedTensors | None, torch.cuda.Event]:
        """The next parameter, or None after the last, and an event: its tensors are ready once this has happened."""
        with torch.cuda.stream(gathering):
            tensors = next(parameters, None)
            return tensors, gathering.record_event()

    tensors, ready = gather_next()
    while tensors is not None:
        upcoming = gather_next()  # starts now; the caller loads `tensors` in the meantime
        for name, tensor in tensors:
            caller = torch.cuda.current_stream()  # ask for every tensor: vLLM's sender switches between two streams
            caller.wait_event(ready)
            tensor.record_stream(caller)  # otherwise a later gather could reuse this memory before it has been read
            yield name, tensor
        tensors, ready = upcoming


def push(policy: nn.Module, engine) -> None:
    """Give the engine the policy's current weights. Collective: every rank calls it."""
    engine.load_weights(FullParameters(policy, engine.wire_dtype, engine.saved_names))
