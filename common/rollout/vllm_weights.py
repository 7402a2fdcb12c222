"""How vLLM receives the trainer's weights: two backends of its weight-transfer API.

"in_process" serves VLLMEngine, "shared_memory" a server without a GPU. Servers with GPUs use vLLM's own "nccl".
`register` is this package's vllm.general_plugins entry point (pyproject.toml): vLLM calls it in each of its processes.
"""

import os
from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from vllm.distributed.weight_transfer import WeightTransferEngine, WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.models import registry

from common.placement import rounded_products


@dataclass
class InProcessUpdate(WeightTransferUpdateInfo):
    weights: Iterable[tuple[str, torch.Tensor]]  # no default: an update without weights would be silently ignored


class Float32Head(UnquantizedEmbeddingMethod):
    """Float32 logits from a CPU's bfloat16 weights, as in the trainer.

    vLLM's own head_dtype would cast the head again for every token.
    """

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        if not hasattr(layer, "float32_weight"):
            layer.float32_weight = torch.empty_like(layer.weight, dtype=torch.float32)
        layer.float32_weight.copy_(layer.weight)  # in place: a second copy would double an update's memory

    def apply(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        with rounded_products():
            return F.linear(x.float(), layer.float32_weight, bias)


class InProcessTransfer(WeightTransferEngine[WeightTransferInitInfo, InProcessUpdate]):
    """Loads (name, full tensor) pairs as they are gathered. vLLM finishes each layer as soon as it is complete."""

    init_info_cls = WeightTransferInitInfo
    update_info_cls = InProcessUpdate

    def __init__(self, config, vllm_config, device: torch.device, model: torch.nn.Module):
        super().__init__(config, vllm_config, device, model)
        decoder = getattr(model, "language_model", model)  # a model that sees images has its decoder inside
        # Gemma 2 has no separate head: its embedding computes the logits.
        self.head = decoder.lm_head if hasattr(decoder, "lm_head") else decoder.model.embed_tokens
        if device.type == "cpu" and self.model_config.dtype == torch.bfloat16:
            self.head.quant_method = Float32Head()
            self.head.quant_method.process_weights_after_loading(self.head)

    def init_transfer_engine(self, init_info: WeightTransferInitInfo) -> None:
        """There is no connection to open."""

    def start_weight_update(self) -> None:
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict) -> None:
        # The base class ends its own update_weights with torch.accelerator.synchronize(), which a CPU does not have.
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def receive_weights(self, update_info: InProcessUpdate) -> None:
        self.model.load_weights(iter(update_info.weights))

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)
        if self.device.type != "cpu":
            return
        if self.is_tied():
            # The reload packs the embedding anew, but the head that shares it keeps its old packed copy. Without this
            # line log-probs are off by 8e-2 after the first update and by 2e-1 after the third, and nothing fails.
            self.head.quant_method.process_weights_after_loading(self.head)
        for layer in self.model.modules():
            # Experts keep the copy that was packed first, too. Log-probs would be off by 2 to 4, and nothing fails.
            kernel = getattr(getattr(layer, "quant_method", None), "moe_kernel", None)
            if kernel is not None:
                kernel.fused_experts.process_weights_after_loading(layer)
            # Mamba 2 reads its convolution through a view of the first weights. In bfloat16 the reload packs the new
            # ones elsewhere. Log-probs would drift by 0.1 to 0.4 an update, and nothing fails.
            unpacked = getattr(getattr(layer, "conv1d", None), "_cpu_unpacked_conv_weight", None)
            if unpacked is not None and hasattr(layer, "conv_weights"):
                layer.conv_weights.copy_(unpacked)

    def is_tied(self) -> bool:
        """Whether the head may share the embedding's weight."""
        config = self.model_config
        # A tied model's files may hold the head as well. vLLM then says "untied", and ties it after loading.
        return getattr(config.hf_config, "tie_word_embeddings", False) or config.word_embeddings_untied_by_checkpoint

    def shutdown(self) -> None:
        """There is no connection to close."""


@dataclass
class FileUpdate(WeightTransferUpdateInfo):
    path: str  # a safetensors file in shared memory; the sender removes it


class SharedMemoryTransfer(InProcessTransfer):
    """Loads weights that another process of this machine has written to a file in shared memory, some at a time."""

    update_info_cls = FileUpdate

    def receive_weights(self, update_info: FileUpdate) -> None:
        if not os.path.exists(update_info.path):
            raise FileNotFoundError(
                f"{update_info.path} is not here: without a GPU, trainer and server must run on one machine, with one "
                "/dev/shm"
            )
        self.model.load_weights(iter(load_file(update_info.path).items()))


def register() -> None:
    """Make the backends known to vLLM in this process. A second call changes nothing."""
    if not torch.cuda.is_available():
        # Before vLLM loads a family for the first time, it looks at the model's class in a fresh interpreter, to keep
        # CUDA out of this process. Without CUDA it can look here, which saves 9 s.
        registry._run_in_subprocess = lambda function: function()
    if "in_process" not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine("in_process", InProcessTransfer)
        WeightTransferEngineFactory.register_engine("shared_memory", SharedMemoryTransfer)
