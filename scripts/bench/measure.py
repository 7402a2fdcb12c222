"""Memory of this process, as the other files here measure it."""

from pathlib import Path

import torch


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
