"""Who runs where: ranks, devices and the mesh that every role shares.

Single program, multiple data: each rank runs the same script from top to bottom, on its own share of
the prompts. Plain `python algos/X.py` is a world of one; `torchrun --nproc-per-node N` a world of N.
Layout "colocate": a rank holds its shard of the trainer *and* an engine; with rollout_tp = k, each k
consecutive ranks hold one engine together. "split": the engines are vLLM servers on devices of their own.
"""

import atexit
import ctypes
import os
import re
import socket
import time
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Literal

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from transformers import AutoConfig

M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # of malloc.h
NARROW = 512  # hidden size
LET_GO = 0.2  # seconds
# What a process that torchrun started must not hand on to one that is no rank.
TORCHRUN_VARIABLES = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "OMP_NUM_THREADS",
)


def split_weight(entry: str) -> tuple[str, float]:
    """SPEC=WEIGHT as (SPEC, WEIGHT); anything else weighs 1, as it is: a folder's name or a URL may hold a "="."""
    spec, _, number = entry.rpartition("=")
    if spec and re.fullmatch(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", number):
        return spec, float(number)
    return entry, 1.0


@dataclass(frozen=True, kw_only=True)
class Sharding:
    """How the trainer is laid over the ranks."""

    sequence_parallel: int = 1  # ranks that compute one row together: a sequence this many times as long fits a rank
    shard_size: int = 0  # ranks that hold one sharded copy of the weights, such as those of a node; 0: all


@dataclass(frozen=True)
class Layout:
    """Where responses are generated, and what the engine may take."""

    rollout_placement: Literal["colocate", "split"] = "colocate"  # split: by vLLM servers, beside the trainer
    rollout_devices: tuple[int, ...] = ()  # split: GPUs of this node, or cores of a CPU, for servers this run starts
    rollout_urls: tuple[str, ...] = ()  # split: servers that are running, scripts/serve_rollout.sh
    max_inflight_batches: int = 1  # 2: the next step's responses are sampled while this one trains; split alone
    inflight_updates: bool = False  # new weights reach responses half done; their tokens are of two versions
    rollout_memory: float = 0.0  # share of a GPU's memory the engine may take; 0: 0.4, or 0.9 of one of its own
    rollout_max_seqs: int = 0  # responses it works on at once; 0: all of a step's, at most 512
    rollout_batched_tokens: int = 0  # tokens of one forward of it; 0: vLLM's own choice
    collective_timeout: float = 1800.0  # seconds that ranks wait for each other before the run ends

    @property
    def split(self) -> bool:
        return self.rollout_placement == "split"


@dataclass(frozen=True)
class World:
    rank: int
    size: int
    device: torch.device
    mesh: DeviceMesh  # (ranks,), or (copies, shards): parameters are sharded over the last, gradients averaged over all
    rollout_tp: int  # ranks that share one engine
    tp_group: dist.ProcessGroup | None  # those ranks; None when each rank has its own engine
    sp_group: dist.ProcessGroup | None = None  # ranks that compute one row together; None when each has its own
    group: dist.ProcessGroup | None = None  # all ranks, for numbers; None: torch's default group
    noted: bool = True  # whether enter() leaves notes: those of a second thread would overwrite the first's
    timeout: timedelta | None = None  # of collectives; None: torch's own

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    @property
    def engine_index(self) -> int:
        """Which engine this rank belongs to, 0 ... size / rollout_tp - 1."""
        return self.rank // self.rollout_tp

    def beside(self) -> "World":
        """The same world for a second thread: its collectives do not mix with the first's. Collective."""
        return replace(self, group=dist.new_group(backend="gloo", timeout=self.timeout), noted=False)

    def enter(self, phase: str) -> None:
        """Leave a note of what this rank does now: when a collective fails, errors.note() reads them."""
        if self.noted:
            store = dist.distributed_c10d._get_default_store()  # held by nobody: it must go before the interpreter does
            store.set(f"phase/{self.rank}", f"{time.time():.0f} {phase}")

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
        tensor = torch.tensor(float(value), dtype=torch.float64)  # on CPU: gloo, exact for counts
        dist.all_reduce(tensor, op, group=self.group)
        return tensor.item()


def finish(world: World, engine=None) -> None:
    """End a run: no rank leaves while another still talks to it. Collective: every rank calls it."""
    dist.barrier()
    if engine is not None:
        engine.shutdown()  # first: vLLM's groups live inside ours, and it may take ours down with them
    if dist.is_initialized():
        dist.destroy_process_group()


def init(seed: int, rollout_tp: int = 1, layout: Layout = Layout(), sharding: Sharding = Sharding()) -> World:
    """Join the process group: NCCL for CUDA tensors, gloo for CPU tensors. Collective: every rank calls it.

    A split layout's rollout devices are left to the servers: its ranks take what remains, in order.
    """
    rollout_tp = 1 if layout.split else rollout_tp
    if "RANK" not in os.environ:  # plain python: a world of one, by the same variables torchrun sets
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        os.environ.update(
            RANK="0",
            WORLD_SIZE="1",
            LOCAL_RANK="0",
            LOCAL_WORLD_SIZE="1",
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(port),
        )
    cuda = torch.cuda.is_available()
    device = torch.device("cpu")
    if cuda:
        left = [i for i in range(torch.cuda.device_count()) if i not in layout.rollout_devices]
        device = torch.device("cuda", left[int(os.environ["LOCAL_RANK"])])
        torch.cuda.set_device(device)
    elif layout.rollout_devices:
        os.sched_setaffinity(0, os.sched_getaffinity(0) - set(layout.rollout_devices))
    if os.environ["WORLD_SIZE"] == "1":  # nobody to meet: torch's store would listen on all of this machine's addresses
        store, rank, size = dist.HashStore(), 0, 1
    else:
        store, rank, size = next(dist.rendezvous("env://"))
    # After torchrun --max-restarts its store still has the addresses of the ranks that died: gloo would wait for them.
    store = dist.PrefixStore(f"attempt-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
    timeout = timedelta(seconds=layout.collective_timeout)
    backends = "cpu:gloo,cuda:nccl" if cuda else "gloo"
    dist.init_process_group(backends, store=store, rank=rank, world_size=size, timeout=timeout)
    # A thread of gloo may still hold the last collective's tensors when the ranks have gone on. To drop them it needs
    # the interpreter: if that is ending, the process aborts. DTensor's caches keep the threads, so none can be joined.
    atexit.register(time.sleep, LET_GO)
    use_cores()
    if not cuda:
        keep_memory()
    torch.manual_seed(seed)
    tp_group = dist.new_subgroups(rollout_tp, backend="gloo", timeout=timeout)[0] if rollout_tp > 1 else None
    sp = sharding.sequence_parallel
    sp_group = dist.new_subgroups(sp, timeout=timeout)[0] if sp > 1 else None
    shards = sharding.shard_size or size
    sizes, names = ((size,), ("ranks",)) if shards == size else ((size // shards, shards), ("copies", "shards"))
    mesh = init_device_mesh(device.type, sizes, mesh_dim_names=names)
    return World(rank, size, device, mesh, rollout_tp, tp_group, sp_group, timeout=timeout)


def use_cores() -> None:
    """Give this rank its share of the cores. Two ranks with all cores each would fight: 0.3 s becomes 13 s."""
    local_size = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // local_size))


def keep_memory() -> None:
    """Freed tensors stay with this process. glibc hands large ones back to the kernel, which clears each page anew.

    It costs memory: a tensor may not quite fit the gap that one as large has left.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):  # only glibc has it, and only glibc needs it
        libc.mallopt(M_MMAP_MAX, 0)  # nothing outside the heap,
        libc.mallopt(M_TRIM_THRESHOLD, -1)  # which never shrinks


def compute_dtype(name: str, model_path: str) -> torch.dtype:
    """--dtype: "auto" is native_dtype(), but float32 for models narrower than NARROW.

    Those gain little by it, and what the embedded job reaches must not depend on the kind of machine.
    """
    if name != "auto":
        return {"float32": torch.float32, "bfloat16": torch.bfloat16}[name]
    narrow = AutoConfig.from_pretrained(model_path).get_text_config().hidden_size < NARROW
    return torch.float32 if narrow else native_dtype()


def native_dtype() -> torch.dtype:
    """bfloat16 where the hardware multiplies it natively, float32 elsewhere."""
    if torch.cuda.is_available():
        return torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float32
    native = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return torch.bfloat16 if native else torch.float32
