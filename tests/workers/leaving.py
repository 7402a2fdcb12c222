"""End a run of two ranks whose gloo threads get a core only when nothing else wants it: leaving.py WAY

WAY is "finish", or "fail" to raise an error on both ranks together.
"""

import os
import sys
from pathlib import Path

import torch.distributed as dist

from common import placement
from common.errors import RunFailed, launch, raise_together

KEPT = []  # holds the mesh, as the caches of DTensor do


def main(way: str) -> None:
    placement.EXIT_PAUSE_SECONDS = 5.0  # on a core that other tests fill, such threads wait for more than the usual
    world = placement.init(seed=0)
    dist.barrier()
    cores = sorted(os.sched_getaffinity(0))
    for thread in Path("/proc/self/task").iterdir():
        os.sched_setaffinity(int(thread.name), {cores[world.rank % len(cores)]})
        if "gloo_runloop" in (thread / "comm").read_text():
            os.sched_setscheduler(int(thread.name), os.SCHED_IDLE, os.sched_param(0))
            print("slowed down", flush=True)
    KEPT.append(world.mesh)
    everyone = [None] * world.size
    dist.all_gather_object(everyone, "a tensor to let go of")
    if way == "fail":
        raise_together(RunFailed("on purpose", code="reward-failed"))
    placement.finish(world)


if __name__ == "__main__":
    launch(main, sys.argv[1])
