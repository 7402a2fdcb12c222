"""Kernels of the decoder layers: as transformers writes them, compiled, or Liger's. They differ by rounding only.

Between its matrix products a layer makes many small passes over memory, which the other kernels save. On a CPU
compiling gains nothing: most of its time goes into the products, and those stay the same.
"""

import importlib.util
import os
import shutil
from typing import Literal

import torch
from torch import nn

from common.errors import BadInput

Kernels = Literal["eager", "compile", "liger"]


def check_kernels(kernels: Kernels, model_type: str) -> None:
    """Refuse kernels that this machine cannot run, or that there are not for this model. Raises BadInput."""
    cuda, compiler = torch.cuda.is_available(), os.environ.get("CXX", "g++")
    if kernels == "compile" and not cuda and shutil.which(compiler) is None:
        raise BadInput(f"--kernels compile: torch.compile needs a C++ compiler here, and {compiler} is not installed")
    if kernels == "liger" and not cuda:
        raise BadInput("--kernels liger: Liger's kernels are written for GPUs; use --kernels eager here")
    if kernels == "liger" and importlib.util.find_spec("liger_kernel") is None:
        raise BadInput("--kernels liger: liger-kernel is not installed; run pip install liger-kernel")
    if kernels == "liger":
        from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN

        if model_type not in MODEL_TYPE_TO_APPLY_LIGER_FN:  # Liger itself would only log it and go on without kernels
            raise BadInput(
                f"--kernels liger: it has no kernels for {model_type} models; use --kernels compile or eager"
            )


def decoder_of(model: nn.Module) -> nn.Module:
    """The part of a model that has decoder layers: all but its head, or the language model beside what sees images."""
    return model.base_model.get_decoder() if hasattr(model.config, "vision_config") else model.base_model


def use_kernels(model: nn.Module, kernels: Kernels) -> None:
    """Replace the code that computes the layers. Parameters, their names and FSDP's hooks stay as they are."""
    if kernels == "compile":
        for layer in decoder_of(model).layers:
            layer.forward = torch.compile(layer.forward, dynamic=True)
    elif kernels == "liger":
        from liger_kernel.transformers import _apply_liger_kernel_to_instance  # an extra that only this flag needs

        # Take norms and feed-forwards. Liger replaces their classes for all models of this kind in the process. The
        # losses do not return log-probs of single tokens.
        _apply_liger_kernel_to_instance(model, rope=False, cross_entropy=False, fused_linear_cross_entropy=False)
