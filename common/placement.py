"""Who runs where: ranks, devices, and the mesh that every role shares.

Single program, multiple data: each rank runs the same script from top to bottom, on its own share of the prompts.
Plain `python algos/X.py` is a world of one rank; `torchrun --nproc-per-node N` makes a world of N.
Placement "colocate": a rank holds its shard of the trainer and an engine; with rollout_tp = k, each k consecutive ranks
hold one engine together. Placement "split": the engines are servers of vLLM or SGLang, on devices of their own.
"""

import atexit
import ctypes
import mmap
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Literal

import torch
import torch.distributed as dist
from pydantic import Field, NonNegativeInt, PositiveInt
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.elastic.utils.distributed import get_free_port

from common.cores import cores_of_this_rank, usable_cores

COLLECTIVE_TIMEOUT_SECONDS = 1800  # how long ranks wait for each other before the run ends
EXIT_PAUSE_SECONDS = 0.2
CONTAINER_LIMIT = Path("/sys/fs/cgroup/memory.max")  # bytes that a container may use (cgroup v2), or "max"
HOLE_BYTES = 2 * 2**30
# Option numbers of mallopt, from malloc.h.
M_TRIM_THRESHOLD = -1
M_MMAP_MAX = -4
# The variables of torchrun that would make a child process take itself for a rank. Its environment leaves them out.
TORCHRUN_VARIABLES = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "TORCHELASTIC_USE_AGENT_STORE",
    "OMP_NUM_THREADS",
)


@dataclass(frozen=True, kw_only=True)
class Sharding:
    """How the trainer is laid over the ranks."""

    sequence_parallel: PositiveInt = 1
    """Ranks that compute one row together. A sequence this many times as long then fits a rank."""
    shard_size: NonNegativeInt = 0
    """Ranks that hold one sharded copy of the weights, such as those of a node. 0: all."""


@dataclass(frozen=True)
class Layout:
    """Where responses are generated, and what the engine may take."""

    rollout_placement: Literal["colocate", "split"] = "colocate"
    """Where the engines are: on the trainer's devices, or as servers on devices of their own (split)."""
    rollout_devices: tuple[NonNegativeInt, ...] = ()
    """With split, on one node: its GPUs (or CPU cores) for servers that this run starts."""
    rollout_urls: tuple[str, ...] = ()  # With split: running servers to use instead (scripts/serve_rollout.sh).
    max_inflight_batches: PositiveInt = 1
    """K > 1: later steps are sampled while one trains, with weights up to K - 1 steps old. Needs split."""
    inflight_updates: Literal["none", "recompute", "keep"] = "none"
    """New weights go in amid responses, whose keys and values are recomputed or kept. none: between responses."""
    rollout_memory: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Share of a GPU's memory for the engine. 0: as much as its responses need."""

    @property
    def split(self) -> bool:
        return self.rollout_placement == "split"


@dataclass(frozen=True)
class World:
    """This rank, its device, and its process groups. init() makes it.

    sum(), min() and max() take a number, or a tensor of one, and return a float that is the same on all ranks.
    """

    rank: int
    size: int
    device: torch.device
    mesh: DeviceMesh  # (ranks,), or (copies, shards): parameters are sharded over the last, gradients summed over all
    rollout_tp: int  # ranks that share one engine
    tp_group: dist.ProcessGroup | None  # the ranks of this rank's engine; None when each rank has its own engine
    sp_group: dist.ProcessGroup | None = None  # ranks that compute one row together; None when each has its own
    group: dist.ProcessGroup | None = None  # all ranks, for numbers; None means torch's default group
    timeout: timedelta | None = None  # how long a collective waits; None means torch's default

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    @property
    def engine_index(self) -> int:
        """Which engine this rank belongs to, 0 ... size / rollout_tp - 1."""
        return self.rank // self.rollout_tp

    def beside(self) -> "World":
        """The same world for a second thread: its sum, min and max use a group of their own. Collective."""
        return replace(self, group=dist.new_group(backend="gloo", timeout=self.timeout))

    def sum(self, value: float) -> float:
        """Sum of a number over the ranks. Collective: every rank calls it."""
        return self._reduce(value, dist.ReduceOp.SUM)

    def min(self, value: float) -> float:
        """Smallest of a number over the ranks. Collective: every rank calls it."""
        return self._reduce(value, dist.ReduceOp.MIN)

    def max(self, value: float) -> float:
        """Largest of a number over the ranks. Collective: every rank calls it."""
        return self._reduce(value, dist.ReduceOp.MAX)

    def _reduce(self, value: float, op) -> float:
        tensor = torch.tensor(float(value), dtype=torch.float64)  # on the CPU: gloo adds counts exactly
        dist.all_reduce(tensor, op, group=self.group)
        return tensor.item()


def init(seed: int, rollout_tp: int = 1, layout: Layout = Layout(), sharding: Sharding = Sharding()) -> World:
    """Join the process group and take a device. Collective: every rank calls it.

    A split layout leaves its rollout devices to the servers: the ranks take the remaining devices in order.
    """
    # Plain python is a world of one, with the same variables that torchrun sets.
    if "RANK" not in os.environ:
        os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(get_free_port()))
    device = take_device(layout)
    join(device)
    use_cores()
    if device.type == "cpu":
        keep_memory()
    torch.manual_seed(seed)

    timeout = timedelta(seconds=COLLECTIVE_TIMEOUT_SECONDS)
    size = dist.get_world_size()
    # With servers no ranks share an engine.
    rollout_tp = 1 if layout.split else rollout_tp
    tp_group = None
    if rollout_tp > 1:
        tp_group, _ = dist.new_subgroups(rollout_tp, backend="gloo", timeout=timeout)
    sp_group = None
    if sharding.sequence_parallel > 1:
        sp_group, _ = dist.new_subgroups(sharding.sequence_parallel, timeout=timeout)
    shards = sharding.shard_size or size
    if shards == size:
        mesh = init_device_mesh(device.type, (size,), mesh_dim_names=("ranks",))
    else:
        mesh = init_device_mesh(device.type, (size // shards, shards), mesh_dim_names=("copies", "shards"))
    return World(dist.get_rank(), size, device, mesh, rollout_tp, tp_group, sp_group, timeout=timeout)


def take_device(layout: Layout) -> torch.device:
    """This rank's GPU, or the CPU. On a CPU this process gives up the cores that belong to servers."""
    if torch.cuda.is_available():
        remaining = [i for i in range(torch.cuda.device_count()) if i not in layout.rollout_devices]
        device = torch.device("cuda", remaining[int(os.environ["LOCAL_RANK"])])
        torch.cuda.set_device(device)
        return device
    if layout.rollout_devices:
        os.sched_setaffinity(0, set(usable_cores()) - set(layout.rollout_devices))
    return torch.device("cpu")


def join(device: torch.device) -> None:
    """Join torch's process group: NCCL for CUDA tensors, gloo for CPU tensors. Collective: every rank calls it."""
    if os.environ["WORLD_SIZE"] == "1":
        # One rank needs no rendezvous. HashStore also avoids TCPStore, which listens on every network interface.
        store, rank, size = dist.HashStore(), 0, 1
    else:
        store, rank, size = next(dist.rendezvous("env://"))
    # After a restart by torchrun the store still has the addresses of the ranks that died. gloo would wait for them.
    store = dist.PrefixStore(f"attempt-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
        store=store,
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=COLLECTIVE_TIMEOUT_SECONDS),
    )
    # A thread of gloo may still hold tensors of the last collective at exit. It needs the interpreter to drop them, and
    # aborts the process if the interpreter is ending. DTensor's caches keep these threads alive: none can be joined.
    atexit.register(time.sleep, EXIT_PAUSE_SECONDS)


def finish(world: World, engine=None) -> None:
    """End a run: no rank leaves while another still talks to it. Collective: every rank calls it."""
    dist.barrier()
    if engine is not None:
        engine.shutdown()  # vLLM's groups live inside ours, and its shutdown may end ours, too
    if dist.is_initialized():
        dist.destroy_process_group()


def engine_count(size: int, rollout_tp: int, layout: Layout) -> int:
    """Number of engines that share the prompts of a step."""
    if layout.rollout_urls:
        return len(layout.rollout_urls)
    devices = len(layout.rollout_devices) if layout.split else size
    return devices // rollout_tp


def use_cores() -> None:
    """Give this rank its share of the cores. Two ranks with all cores each would wait for each other."""
    torch.set_num_threads(cores_of_this_rank())


def rank_memory() -> float:
    """Bytes of this rank's GPU (before init() of the first one), or its share of the machine's memory."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
    return host_memory()


def host_memory() -> float:
    """This rank's share of the memory that the machine has, or that its container may use, in bytes."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if CONTAINER_LIMIT.is_file():
        limit = CONTAINER_LIMIT.read_text().strip()
        memory = memory if limit == "max" else min(memory, int(limit))
    return memory / int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def keep_memory() -> None:
    """Keep freed tensors in this process. Otherwise glibc returns large ones to the kernel, which clears every page
    again: an update on a CPU took 1.04 to 1.10 times as long. The price is fragmentation.
    """
    libc = ctypes.CDLL(None)
    # Only glibc has this function, and only glibc needs it.
    if hasattr(libc, "mallopt"):
        # Put every tensor on the heap, and never shrink the heap.
        libc.mallopt(M_MMAP_MAX, 0)
        libc.mallopt(M_TRIM_THRESHOLD, -1)


class MallocInfo(ctypes.Structure):
    """struct mallinfo2 of malloc.h: ten numbers, of which one is read here."""

    _fields_ = [
        ("others", ctypes.c_size_t * 8),
        ("fordblks", ctypes.c_size_t),  # free bytes of the heap
        ("keepcost", ctypes.c_size_t),
    ]


def return_holes() -> None:
    """Return the free parts of the heap to the kernel, if they are HOLE_BYTES or more.

    It is called before and after sampling, that of an evaluation included. keep_memory() keeps the holes that sampling
    and training leave in the heap, and neither can use those of the other, so the heap would grow to the sum of both.
    With SmolLM2 on `sums` the peak of five steps was 9.7 GiB instead of 10.9. A page that is needed again is cleared
    again, so small heaps are left as they are.
    """
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mallinfo2"):  # glibc has it since 2.33
        return
    libc.mallinfo2.restype = MallocInfo
    if libc.mallinfo2().fordblks >= HOLE_BYTES:
        libc.malloc_trim(0)


def drop_pages(tensor: torch.Tensor) -> None:
    """Return the memory of a CPU tensor's whole storage to the kernel, so of all tensors that share it.

    They can be used as before, but their values are lost: whoever reads a page again finds zeros. (Values in a part of
    a page, at both ends, stay.) Writing to the pages again takes 0.6 s a GiB. The storage must come from torch's CPU
    allocator, not from a file. Linux only, as vLLM.
    """
    libc = ctypes.CDLL(None)
    storage = tensor.untyped_storage()
    # Whole pages only: other tensors may lie in what is left of the first page and of the last one.
    begin = -(-storage.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (storage.data_ptr() + storage.nbytes()) // mmap.PAGESIZE * mmap.PAGESIZE
    if end > begin:
        libc.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), mmap.MADV_DONTNEED)


@contextmanager
def rounded_products(rounded: bool = True) -> Iterator[None]:
    """Let the CPU round the factors of float32 matrix products to bfloat16, where that is faster. It adds in float32.

    Matrices that were bfloat16 lose nothing by it. On a CPU without bfloat16 products this selects oneDNN's float32
    kernel, which is twice as fast as MKL's on AMD processors.
    """
    matmul = torch.backends.mkldnn.matmul
    before = matmul.fp32_precision
    if rounded:
        matmul.fp32_precision = "bf16"
    try:
        yield
    finally:
        matmul.fp32_precision = before
