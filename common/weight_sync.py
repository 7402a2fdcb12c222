"""Weight sync: after every step the engine gets the policy's new weights.

The engine is the program that samples, and it has its own copy of the model: a vLLM engine in each process, servers of
vLLM or SGLang, or transformers' generate. FSDP2 shards the policy over the ranks, but an engine wants full tensors,
under the names that it knows. So we walk through the policy, one parameter at a time:

    gather    the ranks exchange their shards, and each rank then has the full tensor (an all-gather)
    merge     with LoRA, the layer's adapters are added to its weight
    rename    for vLLM and SGLang, which expect the names in the model's files. A parameter can become several tensors:
                  transformers       layers.1.mlp.experts.down_proj, all experts stacked
                  the model's files  layers.1.mlp.experts.0.down_proj.weight, and so on for each expert
    load      the engine copies the tensors into its own weights, and then we free them

Every rank gathers, because gathering is a collective: a function that all ranks must call, or they hang. An engine in
the process loads what its rank has gathered. With servers, rank 0 sends it to them and the other ranks drop theirs.

The trainer never assembles a full copy of the model. In addition to the shards, a rank holds one full parameter, or two
on a GPU (see gather_ahead), and with LoRA the terms of the sum. The largest parameter is often a layer's experts. With
servers, rank 0 also holds the tensors that it collects for one message, up to some 256 MiB, and packed copies of them.

vLLM first collects a layer's tensors and makes a second copy of the layer. So for a moment it holds its largest layer,
often one with experts, twice more.

What we rely on:
- Every rank walks through the same parameters in the same order. Gathering would hang otherwise.
- Each parameter can be renamed on its own. It may become several tensors of the files. Two parameters that are parts of
  one tensor in the files are not supported: they would keep names that the engine doesn't know. vLLM refuses these.
- Tied parameters are sent once, under their first name. The engine ties its own copies.
tests/trainer/test_families.py checks all of this for the supported families.
"""

from collections.abc import Iterator
from functools import cache
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
    """The weights to send: iterating over it yields (name, full tensor) pairs. The thread that trains makes it.

    Each pass over it gathers the weights as they are then: all parameters, with adapters merged, and the buffers that
    are saved with the model. Collective: every rank iterates to the end. Servers may get them after load_weights() has
    returned, or get the next ones in their place (ServerEngine.send_if_behind).
    """

    def __init__(self, policy: nn.Module, dtype: torch.dtype, saved_names: bool = False):
        """dtype: data type of the engine's weights. saved_names: True for vLLM and SGLang, which use the names and
        shapes of the model's files; False for an engine that uses those of the transformers model.
        """
        self.policy = policy
        self.dtype = dtype
        self.saved_names = saved_names
        self.on_gpu = device_type(next(policy.parameters())) == "cuda"
        # The optimizer's kernels are queued on this stream. It is not always the default one: once vLLM's
        # current_stream() has been called in a thread, that thread stays on another stream.
        self.trainer_stream = torch.cuda.current_stream() if self.on_gpu else None

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        if self.on_gpu:
            yield from gather_ahead(self.gather_each(), self.trainer_stream)
        else:
            for tensors in self.gather_each():
                yield from tensors
                tensors.clear()  # the next gather would otherwise find these still in memory

    def gather_each(self) -> Iterator[NamedTensors]:
        """Yields, for each parameter and buffer, the tensors to send. Collective: every rank iterates to the end."""
        for name, parameter in self.parameters_and_buffers():
            # No local name for the gathered tensor: it would stay alive while the next one is gathered.
            yield self.to_engine_names(name, self.gather_full(name, parameter))

    def metadata(self) -> list[TensorInfo]:
        """What an iteration will yield. A vLLM server allocates its receive buffers from this list.

        Nothing is gathered: a sharded parameter knows its full shape.
        """
        infos = []
        for name, parameter in self.parameters_and_buffers():
            # A tensor on the meta device has a shape but no data. Renaming it shows how the real one will be split.
            empty = torch.empty(parameter.shape, dtype=self.dtype_to_send(parameter), device="meta")
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

    def dtype_to_send(self, tensor: torch.Tensor) -> torch.dtype:
        """Parameters are sent in the engine's dtype. Buffers, such as a router's biases, are sent in their own, which
        the engine uses for them too.
        """
        if isinstance(tensor, nn.Parameter):
            return self.dtype
        return tensor.dtype

    def gather_full(self, name: str, parameter: torch.Tensor) -> torch.Tensor:
        """The full tensor of a parameter or buffer, with its layer's adapters added. Collective."""
        layer_name, _, leaf = name.rpartition(".")
        layer = self.policy.get_submodule(layer_name)
        if leaf == "weight" and hasattr(layer, "lora_a"):
            # Weight and adapters are gathered as they are. merged() adds them in float32, and the sum is rounded once.
            # Rounding the adapters before the sum as well could lose a small update.
            weight = gather(parameter, parameter.dtype)
            lora_a = gather(layer.lora_a, layer.lora_a.dtype)
            lora_b = gather(layer.lora_b, layer.lora_b.dtype)
            return layer.merged(weight, lora_a, lora_b).to(self.dtype)
        return gather(parameter, self.dtype_to_send(parameter))

    def to_engine_names(self, name: str, tensor: torch.Tensor) -> NamedTensors:
        """The tensor under the engine's name, or the tensors that the model's files have in its place."""
        if not self.saved_names:
            return [(name, tensor)]
        # When transformers loads a model, it fuses some tensors of the files into one parameter. This reverses it.
        return list(revert_weight_conversion(self.policy, {name: tensor}).items())


def gather(parameter: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The full tensor of a sharded parameter, in this dtype. Collective: every rank calls it."""
    # With --offload the shard is in host memory. Move it first: NCCL needs it on the GPU, and the GPU casts faster.
    # Cast before the all-gather, because a bfloat16 shard has half the bytes of a float32 one.
    shard = parameter.detach().to(device_type(parameter), non_blocking=True)
    shard = shard.to(dtype)
    return shard.full_tensor() if isinstance(shard, DTensor) else shard


def device_type(parameter: torch.Tensor) -> str:
    """Where a parameter is used, "cuda" or "cpu". With --offload it is used on the GPU, but stored in host memory."""
    return parameter.device_mesh.device_type if isinstance(parameter, DTensor) else parameter.device.type


@cache
def gathering_stream(device: int) -> torch.cuda.Stream:
    """The CUDA stream of all gathers on a GPU.

    Memory that is freed stays with the stream that it was allocated on. With a new stream for each push, none could use
    what the earlier ones have left, and a rank would lose two full parameters of memory a push.
    """
    return torch.cuda.Stream(device)


def gather_ahead(
    parameters: Iterator[NamedTensors], trainer_stream: torch.cuda.Stream
) -> Iterator[tuple[str, torch.Tensor]]:
    """The (name, tensor) pairs of all parameters, on a GPU. The next parameter is gathered while one is loaded.

    Gathering has its own CUDA stream, so it runs at the same time as the consumer's work:

        gathering stream     gather 0   gather 1   gather 2   gather 3
        consumer's stream               load 0     load 1     load 2     load 3        load i waits for gather i

    Gather i + 1 is queued just before the consumer gets parameter i, and only after load i - 1 has ended. So two full
    parameters are in memory: the one that is being loaded, and the next. Nothing reads a shard any more when the loop
    ends, so the optimizer may change it, on the GPU or, with --offload, in host memory.

    trainer_stream: where the optimizer writes the shards. The current stream may be one of vLLM's sender.
    """
    gathering = gathering_stream(torch.cuda.current_device())
    gathering.wait_stream(trainer_stream)

    def gather_next() -> tuple[NamedTensors | None, torch.cuda.Event]:
        """The next parameter's tensors (None after the last), and an event recorded after their gather."""
        with torch.cuda.stream(gathering):
            tensors = next(parameters, None)
            return tensors, gathering.record_event()

    tensors, gathered = gather_next()
    while tensors is not None:
        upcoming = gather_next()  # queued now; the consumer loads `tensors` in the meantime
        loaded = []
        while tensors:
            name, tensor = tensors.pop(0)  # popped and deleted: nothing here may keep a loaded tensor alive
            consumer = torch.cuda.current_stream()  # which reads this tensor; vLLM's sender has two, in turns
            consumer.wait_event(gathered)
            tensor.record_stream(consumer)  # otherwise a later gather could reuse this memory before it has been read
            yield name, tensor
            del tensor
            loaded.append(consumer.record_event())
        # Without this wait the host would run ahead and queue gathers for which there is no memory yet.
        for event in loaded:
            event.synchronize()
        tensors, gathered = upcoming


def push(policy: nn.Module, engine) -> None:
    """Give the engine the policy's current weights. Collective: every rank calls it.

    Servers that are in the middle of responses get them later, or skip them for newer ones (--inflight-updates none).
    """
    engine.load_weights(FullParameters(policy, engine.wire_dtype, engine.saved_names))
