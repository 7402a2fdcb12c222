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


def check_kernels(kernels: Kernels) -> None:
    """Refuse kernels that this machine cannot run. Raises BadInput."""
    cuda, compiler = torch.cuda.is_available(), os.environ.get("CXX", "g++")
    if kernels == "compile" and not cuda and shutil.which(compiler) is None:
        raise BadInput(f"--kernels compile: torch.compile needs a C++ compiler here, and {compiler} is not installed")
    if kernels == "liger" and not cuda:
        raise BadInput("--kernels liger: Liger's kernels are written for GPUs; use --kernels eager here")
    if kernels == "liger" and importlib.util.find_spec("liger_kernel") is None:
        raise BadInput("--kernels liger: liger-kernel is not installed; run pip install liger-kernel")


def use_kernels(model: nn.Module, kernels: Kernels) -> None:
    """Replace the code that computes the layers. Parameters, their names and FSDP's hooks stay as they are."""
    if kernels == "compile":
        for layer in model.base_model.layers:
            layer.forward = torch.compile(layer.forward, dynamic=True)
    elif kernels == "liger":
        from liger_kernel.transformers import _apply_liger_kernel_to_instance  # an extra that only this flag needs

        # Take norms and feed-forwards. The rotary embedding would replace transformers' in the whole process, and the
        # losses do not return log-probs of single tokens.
        _apply_liger_kernel_to_instance(model, rope=False, cross_entropy=False, fused_linear_cross_entropy=False)
