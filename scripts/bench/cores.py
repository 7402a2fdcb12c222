"""Runs beside each other, each on a core of its own."""

import os
import queue
from collections.abc import Callable
from multiprocessing.pool import ThreadPool


def on_each_core(work: Callable, given: list[tuple]) -> list:
    """[work(*arguments) for arguments in given], one at a time on each core, which what a call starts keeps to."""
    free = queue.Queue()
    for core in os.sched_getaffinity(0):
        free.put(core)
    with ThreadPool(free.qsize(), lambda: os.sched_setaffinity(0, {free.get()})) as pool:
        return pool.starmap(work, given, chunksize=1)
