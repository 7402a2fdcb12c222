"""The engine's side of weight sync: backends of vLLM's weight-transfer API.

`register` is this package's vllm.general_plugins entry point (pyproject.toml): vLLM calls it in every process of an
engine, a server's workers included. On GPUs servers use vLLM's own "nccl".
"""

import os
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from vllm.distributed.weight_transfer import WeightTransferEngine, WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from common.logits import rounded_products
from common.weight_sync import checksum


@dataclass
class NoInit(WeightTransferInitInfo):
    """Nothing to agree on."""


@dataclass
class InProcessUpdate(WeightTransferUpdateInfo):
    weights: Iterable[tuple[str, torch.Tensor]] = field(default_factory=list)


class Float32Head(UnquantizedEmbeddingMethod):
    """Logits in float32 from a CPU's bfloat16 weights, as the trainer's. vLLM itself casts the head for each token."""

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        if not hasattr(layer, "float32_weight"):
            layer.float32_weight = torch.empty_like(layer.weight, dtype=torch.float32)
        layer.float32_weight.copy_(layer.weight)  # in place: a second one would be most of an update's memory

    def apply(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        with rounded_products():
            return F.linear(x.float(), layer.float32_weight, bias)


class InProcessTransfer(WeightTransferEngine[NoInit, InProcessUpdate]):
    """Loads (name, full tensor) pairs as they are gathered; vLLM finishes each layer as soon as it is complete."""

    init_info_cls = NoInit
    update_info_cls = InProcessUpdate

    def __init__(self, config, vllm_config, device: torch.device, model: torch.nn.Module):
        super().__init__(config, vllm_config, device, model)
        if device.type == "cpu" and self.model_config.dtype == torch.bfloat16:
            model.lm_head.quant_method = Float32Head()
            model.lm_head.quant_method.process_weights_after_loading(model.lm_head)

    def init_transfer_engine(self, init_info: NoInit) -> None:
        """No connection to open."""

    def start_weight_update(self) -> None:
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict) -> None:
        # Not the base class's: it ends with torch.accelerator.synchronize(), which a CPU does not have.
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def receive_weights(self, update_info: InProcessUpdate) -> None:
        self.model.load_weights(iter(update_info.weights))

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)
        if self.device.type == "cpu" and self.model_config.hf_text_config.tie_word_embeddings:
            # The reload repacks the embedding; the head that shares it keeps its old packed copy. Without
            # this line log-probs drift 8e-2 away in the first update, 2e-1 by the third, and nothing fails.
            head = self.model.lm_head
            head.quant_method.process_weights_after_loading(head)

    def shutdown(self) -> None:
        """No connection to close."""


@dataclass
class FileUpdate(WeightTransferUpdateInfo):
    path: str  # safetensors, in memory both sides see; the sender removes it
    checksums: dict[str, int] = field(default_factory=dict)  # name -> checksum(); empty: not asked for this time


class SharedMemoryTransfer(InProcessTransfer):
    """Between processes of one machine without a GPU: some layers at a time, in a file in shared memory."""

    update_info_cls = FileUpdate

    def receive_weights(self, update_info: FileUpdate) -> None:
        if not os.path.exists(update_info.path):
            raise FileNotFoundError(f"{update_info.path}: a CPU's rollout server and its trainer share one machine")
        tensors = load_file(update_info.path)
        bad = [name for name, expected in update_info.checksums.items() if checksum(tensors[name]) != expected]
        if bad:
            raise ValueError(f"weights arrived damaged: {bad[0]} and {len(bad) - 1} more")
        self.model.load_weights(iter(tensors.items()))


def register() -> None:
    """Make the backends known to vLLM in this process; a second call changes nothing."""
    for name, engine in (("in_process", InProcessTransfer), ("shared_memory", SharedMemoryTransfer)):
        if name not in WeightTransferEngineFactory._registry:
            WeightTransferEngineFactory.register_engine(name, engine)
