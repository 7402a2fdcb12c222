"""Decoder layers as transformers writes them, compiled, or with Liger's kernels: the same numbers but for rounding.

Between its matrix products a layer is many small passes over memory. On a CPU compiling gains nothing: the products
are most of the time, and they are the same ones.
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
        raise BadInput("--kernels liger: they are written for GPUs; here use --kernels eager")
    if kernels == "liger" and importlib.util.find_spec("liger_kernel") is None:
        raise BadInput("--kernels liger: pip install liger-kernel")


def use_kernels(model: nn.Module, kernels: Kernels) -> None:
    """Replace what computes the layers of a model; its parameters, their names and FSDP's hooks stay."""
    if kernels == "compile":
        for layer in model.base_model.layers:
            layer.forward = torch.compile(layer.forward, dynamic=True)
    elif kernels == "liger":
        from liger_kernel.transformers import _apply_liger_kernel_to_instance  # an extra, for this flag alone

        # Norms and feed-forwards. Not its rotary embedding, which would replace transformers' in the whole process, and
        # not its losses: they are no log-probs of single tokens.
        _apply_liger_kernel_to_instance(model, rope=False, cross_entropy=False, fused_linear_cross_entropy=False)
