"""LoRA (arXiv:2106.09685): a linear layer becomes y = W x + (alpha / rank) B A x, of which only A and B are trained.

The layer changes its class and W keeps its name, so checkpoints and the engine see the names of the model itself.
Adapters are added on the meta device, before FSDP2 shards the model. The engine gets W + (alpha / rank) B A. Each push
computes this sum in float32 and never in place, so no rounding error stays in W.
"""

import contextlib
import json
import math
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import nn
from transformers.pytorch_utils import Conv1D

from common.errors import BadInput
from common.trainer.batching import Compute
from common.trainer.parts import layers_of
from common.weight_sync import ADAPTERS

ALPHA = 32.0  # the same for every --lora-rank; only --learning-rate sets how fast adapters learn


class Adapted(nn.Module):
    """A linear layer whose weight and bias are frozen. lora_a (rank, in) and lora_b (out, rank) are trained."""

    alpha = ALPHA
    on = True  # False while the adapters are switched off

    @property
    def scaling(self) -> float:
        return self.alpha / self.lora_a.shape[0]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        base = super().forward(x)
        if not self.on:
            return base
        # Scale the narrow product: (tokens, rank), not (tokens, out).
        return base + F.linear(self.scaling * F.linear(x, self.lora_a), self.lora_b)


class LoraLinear(Adapted, nn.Linear):
    """torch's linear layer: weight (out, in)."""

    def merged(self, weight: torch.Tensor, lora_a: torch.Tensor, lora_b: torch.Tensor) -> torch.Tensor:
        """W + (alpha / rank) B A in float32, from full tensors."""
        return torch.addmm(weight.float(), lora_b.float(), lora_a.float(), alpha=self.scaling)


class LoraConv1D(Adapted, Conv1D):
    """GPT-2's linear layer: weight (in, out). transformers calls it a convolution, which it isn't."""

    def merged(self, weight: torch.Tensor, lora_a: torch.Tensor, lora_b: torch.Tensor) -> torch.Tensor:
        return torch.addmm(weight.float(), lora_a.float().T, lora_b.float().T, alpha=self.scaling)


ADAPTED = {nn.Linear: LoraLinear, Conv1D: LoraConv1D}  # class of a layer -> the one that it gets


def freeze(model: nn.Module, compute: Compute, frozen_dtype: torch.dtype) -> None:
    """Freeze all but adapters (--lora-rank), or only the routers (--freeze-router). Raises BadInput."""
    if compute.lora_rank and compute.freeze_router:
        raise BadInput("--freeze-router: --lora-rank freezes the routers, too")
    if compute.lora_rank:
        insert(model, compute.lora_rank, frozen_dtype)
    else:
        freeze_routers(model)


def freeze_routers(model: nn.Module) -> None:
    """Freeze the routers of the experts. Raises BadInput for a model without any."""
    routers = [part for part in model.modules() if type(part).__name__.endswith("Router")]
    if not routers:
        raise BadInput(f"--freeze-router: a {model.config.model_type} model has no router")
    for router in routers:
        router.requires_grad_(False)


def insert(model: nn.Module, rank: int, frozen_dtype: torch.dtype) -> None:
    """Freeze the model, and give each trained linear layer of its decoder adapters. A value head is trained as a whole.

    frozen_dtype: data type in which frozen weights are kept. The forward would cast them to its own anyway. Raises
    BadInput for a decoder without linear layers. Experts, which are no linear layers in transformers, get none.
    """
    linears = [module for layer in layers_of(model) for module in layer.modules() if type(module) in ADAPTED]
    linears = [linear for linear in linears if linear.weight.requires_grad]
    model.requires_grad_(False)
    if not linears:
        raise BadInput(f"--lora-rank {rank}: layers of {model.config.model_type} have no linear layers to adapt")
    for linear in linears:
        out_features, in_features = linear.weight.shape
        if isinstance(linear, Conv1D):
            in_features, out_features = linear.weight.shape
        # Another class in place of a wrapper: the names of all other parameters stay as they are.
        linear.__class__ = ADAPTED[type(linear)]
        device = linear.weight.device
        linear.lora_a = nn.Parameter(torch.empty(rank, in_features, device=device))
        linear.lora_b = nn.Parameter(torch.empty(out_features, rank, device=device))
    # A value head has one row, so all of it is trained.
    if hasattr(model, "score"):
        model.score.requires_grad_(True)
    for parameter in model.parameters():
        if not parameter.requires_grad:
            parameter.data = parameter.data.to(frozen_dtype)


def initial(model: nn.Module) -> dict[str, torch.Tensor]:
    """The adapters before training: A uniform in +- 1 / sqrt(in), and B zero, so that they add nothing yet.

    The run's seed, which placement.init has set, decides A.
    """
    generator = torch.Generator().manual_seed(torch.initial_seed())
    state = {}
    for name, layer in adapted(model):
        draws = torch.rand(layer.lora_a.shape, generator=generator)
        state[f"{name}.lora_a"] = (2 * draws - 1) / math.sqrt(draws.shape[1])
        state[f"{name}.lora_b"] = torch.zeros(layer.lora_b.shape)
    return state


def adapted(model: nn.Module) -> list[tuple[str, Adapted]]:
    """The layers that have adapters, and their names."""
    return [(name, module) for name, module in model.named_modules() if isinstance(module, Adapted)]


class WithoutAdapters:
    """A policy with its adapters switched off, in the place of a second copy of its base."""

    def __init__(self, policy: nn.Module):
        self.policy = policy
        self.modules = policy.modules  # model.reshard() asks for them

    def token_logprobs(self, *args) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Like the policy's, for forwards without gradient. Collective: every rank calls it."""
        with switched_off(self.policy):
            return self.policy.token_logprobs(*args)


@contextlib.contextmanager
def switched_off(model: nn.Module) -> Iterator[None]:
    """The model computes as its base inside."""
    layers = adapted(model)
    try:
        for _, layer in layers:
            layer.on = False
        yield
    finally:
        for _, layer in layers:
            layer.on = True


def write_adapter(model: nn.Module, weights: dict[str, torch.Tensor], folder: Path) -> None:
    """Write a folder that peft loads on top of the base model. weights: full tensors of the adapters by name."""
    layers = dict(adapted(model))
    ends = {last_part(name) for name in layers}
    # peft adapts every layer whose name ends like a target. If the vision tower has such layers too, it needs whole
    # names.
    others = [name for name, module in model.named_modules() if type(module) in ADAPTED]
    targets = layers if ends & set(map(last_part, others)) else ends
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": model.config._name_or_path,
        "r": next(iter(layers.values())).lora_a.shape[0],
        "lora_alpha": ALPHA,
        "target_modules": sorted(targets),
        "fan_in_fan_out": any(isinstance(layer, Conv1D) for layer in layers.values()),  # weights are (in, out)
        "inference_mode": True,
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")
    names = [f"{name}.{kind}" for name in layers for kind in ADAPTERS]
    tensors = {peft_name(name): weights[name].contiguous() for name in names}
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})


def last_part(name: str) -> str:
    return name.rpartition(".")[2]


def peft_name(name: str) -> str:
    """peft's name of an adapter: base_model.model.LAYER.lora_A.weight for LAYER.lora_a."""
    layer, _, kind = name.rpartition(".")
    return f"base_model.model.{layer}.lora_{kind[-1].upper()}.weight"
