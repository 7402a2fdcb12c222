"""The processor cores of this process. Nothing here imports torch, because worker processes import this file, too."""

import os


def usable_cores() -> list[int]:
    """The numbers of the cores that this process may use. On macOS a process can't be bound, so it may use all."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count()))


def cores_of_this_rank() -> int:
    """The number of cores in this rank's share of its node."""
    ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return max(1, len(usable_cores()) // ranks_here)
