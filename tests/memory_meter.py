"""How much memory is in use, and how large the tensors are that a computation makes."""

import ctypes

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# The fields of glibc's struct mallinfo2, each a size_t.
MALLINFO2 = ["arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"]


class MallInfo(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in MALLINFO2]


def bytes_in_use() -> int:
    """Bytes of the GPU's tensors. Without a GPU: all that this process has allocated, what autograd keeps included."""
    if torch.cuda.is_available():
        return torch.cuda.memory_allocated()
    mallinfo2 = ctypes.CDLL(None).mallinfo2
    mallinfo2.restype = MallInfo
    info = mallinfo2()
    return info.uordblks + info.hblkhd


class LargestTensor(TorchDispatchMode):
    """Elements of the largest tensor of this dtype (None: of any) that an operation inside has returned."""

    def __init__(self, dtype: torch.dtype | None = None):
        super().__init__()
        self.dtype = dtype
        self.elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, DTensor):
                tensor = tensor.to_local()
            if isinstance(tensor, torch.Tensor) and self.dtype in (None, tensor.dtype):
                self.elements = max(self.elements, tensor.numel())
        return result
