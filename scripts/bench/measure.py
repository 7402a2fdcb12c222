"""Memory of this process, as the other files here measure it."""

import ctypes
from pathlib import Path

import torch

from common.placement import M_MMAP_MAX, M_TRIM_THRESHOLD

M_MMAP_THRESHOLD = -3  # of malloc.h


def resident(what: str) -> float:
    """MiB: VmRSS, what is resident; VmHWM, the most since the last reset."""
    if torch.cuda.is_available():
        return {"VmRSS": torch.cuda.memory_allocated, "VmHWM": torch.cuda.max_memory_allocated}[what]() / 2**20
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(what)]
    return int(line.split()[1]) / 2**10


def reset_peak() -> None:
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    else:
        Path("/proc/self/clear_refs").write_text("5")  # Linux: starts VmHWM again at VmRSS


def return_memory() -> None:
    """Undo placement.keep_memory: glibc's malloc as it comes, with the thresholds that it reaches by itself."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):  # as there
        libc.mallopt(M_MMAP_MAX, 2**16)
        libc.mallopt(M_MMAP_THRESHOLD, 2**25)
        libc.mallopt(M_TRIM_THRESHOLD, 2**26)
        libc.malloc_trim(0)
