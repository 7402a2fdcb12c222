"""Memory of this process, for the other files of this folder."""

import ctypes
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import torch

from common.placement import M_MMAP_MAX, M_TRIM_THRESHOLD

M_MMAP_THRESHOLD = -3  # of malloc.h


def resident(what: str) -> float:
    """MiB of memory: "VmRSS" is resident, "VmHWM" is the peak since reset_peak(). On a GPU: allocated memory."""
    if torch.cuda.is_available():
        return {"VmRSS": torch.cuda.memory_allocated, "VmHWM": torch.cuda.max_memory_allocated}[what]() / 2**20
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(what)]
    return int(line.split()[1]) / 2**10


def reset_peak() -> None:
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    else:
        Path("/proc/self/clear_refs").write_text("5")  # Linux: starts VmHWM again at VmRSS


def in_own_process(function, *given):
    """What the function returns in a new process, which ends afterwards: no other case has left memory in it."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, *given).result()


def return_memory() -> None:
    """Undo placement.keep_memory: give glibc's malloc the thresholds that it would reach by itself."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):  # only glibc has it
        libc.mallopt(M_MMAP_MAX, 2**16)
        libc.mallopt(M_MMAP_THRESHOLD, 2**25)
        libc.mallopt(M_TRIM_THRESHOLD, 2**26)
        libc.malloc_trim(0)
