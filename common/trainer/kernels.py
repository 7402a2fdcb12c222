"""Kernels of the decoder layers: as transformers writes them, or compiled. They differ by rounding only.

Between its matrix products a layer makes many small passes over memory, which compiled kernels save. On a CPU
compiling gains nothing: most of its time goes into the products, and those stay the same.
"""

import os
import shutil
from typing import Literal

import torch
from torch import nn

from common.errors import BadInput
from common.trainer.parts import layers_of

Kernels = Literal["eager", "compile"]


def check_kernels(kernels: Kernels) -> None:
    """Refuse kernels that this machine cannot run. Raises BadInput."""
    compiler = os.environ.get("CXX", "g++")
    if kernels == "compile" and not torch.cuda.is_available() and shutil.which(compiler) is None:
        raise BadInput(f"--kernels compile: torch.compile needs a C++ compiler here, and {compiler} is not installed")


def use_kernels(model: nn.Module, kernels: Kernels) -> None:
    """Replace the code that computes the layers. Parameters, their names and FSDP's hooks stay as they are."""
    if kernels == "compile":
        # torch.compile makes one graph for forwards without gradient (the old log-probs) and one for training. With
        # this option both round to bfloat16 where the eager layers do. Without it, the first update's ratios differ
        # from 1 by up to 20 %.
        options = {"emulate_precision_casts": True}
        for layer in layers_of(model):
            layer.forward = torch.compile(layer.forward, dynamic=True, options=options)
