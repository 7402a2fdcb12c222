"""vLLM's servers as processes that start and end with the run.

python -m common.rollout.servers.process CORES FLAGS OF vLLM'S SERVER     CORES: 0,1 or, with GPUs, -

This command is vLLM's server in a process that cannot outlive the run: its standard input closes however the run ends,
and then it kills its own process group, engine included.
"""

import atexit
import contextlib
import ctypes
import gc
import json
import multiprocessing
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from functools import partial
from multiprocessing.context import BaseContext
from typing import BinaryIO

import httpx
import torch

from common.errors import RunFailed, say
from common.placement import TORCHRUN_VARIABLES, Layout
from common.rollout.engines import MEMORY_CURE
from common.rollout.vllm_engine import engine_settings

START_SECONDS = 600.0  # a large model may come from a slow disk
STOP_SECONDS = 5.0
PR_SET_PDEATHSIG = 1  # option of prctl(2): a signal for this process when its parent dies
ANSWER_SECONDS = 10.0  # for requests that a living server answers at once


def is_local(url: str) -> bool:
    """Whether the URL is on this machine's loopback, which a proxy from HTTP_PROXY cannot reach."""
    host = httpx.URL(url).host
    return host in ("localhost", "::1") or host.startswith("127.")


def healthy(url: str) -> bool:
    """Whether the server answers and its engine lives."""
    with contextlib.suppress(httpx.TransportError):
        return httpx.get(f"{url}/health", timeout=ANSWER_SECONDS, trust_env=not is_local(url)).status_code == 200
    return False


@dataclass
class Server:
    """A server that this run started: a process group of vLLM's front end and its engine."""

    url: str
    process: subprocess.Popen
    log: BinaryIO  # an unnamed file with everything that the server printed

    def wait_until_ready(self) -> None:
        """Raises RunFailed with the last words of a server that ends or does not answer within START_SECONDS."""
        deadline = time.monotonic() + START_SECONDS
        while not healthy(self.url):
            if self.process.poll() is not None or time.monotonic() > deadline:
                said = f"rollout server {self.url} did not start: {self.last_words()}"
                if "memory" in said.lower():
                    raise RunFailed(f"{said}; {MEMORY_CURE}", code="engine-memory")
                raise RunFailed(said, code="server-start")
            time.sleep(0.2)

    def last_words(self) -> str:
        """The first line with an error, which caused those that follow; without one, the last line."""
        self.log.seek(0)
        lines = [line.strip() for line in self.log.read(2**20).decode(errors="replace").splitlines() if line.strip()]
        errors = [line for line in lines if "Error:" in line]
        return (errors[:1] or lines[-1:] or ["it wrote nothing"])[0][-500:]

    def stop(self) -> None:
        """End the process group. A second call does nothing."""
        if not self.log.closed:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(STOP_SECONDS)  # the front end ends after its engine
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.stdin.close()
            self.log.close()


def start(
    model_path: str, dtype: torch.dtype, tp: int, layout: Layout, environment: dict[str, str], **limits: int
) -> list[Server]:
    """Start one server on every `tp` of the layout's devices and return when all of them answer. Rank 0 calls it.

    They are stopped when this process exits. Raises RunFailed with the last words of a server that ends.
    """
    servers, cuda = [], torch.cuda.is_available()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES") if cuda else None
    names = visible.split(",") if visible else {i: str(i) for i in layout.rollout_devices}  # name of device i
    inherited = {name: value for name, value in os.environ.items() if name not in TORCHRUN_VARIABLES}
    firsts = range(0, len(layout.rollout_devices), tp)
    probes = [socket.create_server(("127.0.0.1", 0)) for _ in firsts]  # open together, so that their ports differ
    for first, probe in zip(firsts, probes):
        port = probe.getsockname()[1]
        probe.close()
        devices = ",".join(names[i] for i in layout.rollout_devices[first : first + tp])
        own = {"CUDA_VISIBLE_DEVICES": devices} if cuda else {"OMP_NUM_THREADS": "1"}  # one worker per core
        program = [sys.executable, "-m", "common.rollout.servers.process", "-" if cuda else devices]
        log = tempfile.TemporaryFile()  # noqa: SIM115 -- it lives as long as the server
        process = subprocess.Popen(
            [*program, *command(model_path, dtype, tp, layout, port, **limits)],
            env=inherited | environment | own, stdin=subprocess.PIPE, stdout=log, stderr=log, start_new_session=True,
        )  # fmt: skip
        servers.append(Server(f"http://127.0.0.1:{port}", process, log))
        atexit.register(servers[-1].stop)
    say(f"rollout: starting {len(servers)} vLLM server(s) on {layout.rollout_devices}")
    for server in servers:
        server.wait_until_ready()
    return servers


def command(model_path: str, dtype: torch.dtype, tp: int, layout: Layout, port: int, **limits: int) -> list[str]:
    """Flags of vLLM's server for one engine."""
    flags = engine_settings(model_path, dtype, tp, layout, **limits)
    flags |= {"host": "127.0.0.1", "port": port, "enable_scale_out": True, "disable_uvicorn_access_log": True}
    if not torch.cuda.is_available():  # vLLM 0.32 cannot rewind the generator of a request on a CPU between two chunks
        flags["enable_chunked_prefill"] = False
    words = []
    for name, value in flags.items():
        name = name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{name}" if value else f"--no-{name}")
        else:
            words += [f"--{name}", json.dumps(value) if isinstance(value, dict) else str(value)]
    return words


def end_with_starter() -> None:
    """Wait until standard input closes, then kill this process group."""
    os.read(0, 1)  # sys.stdin has a lock that Python takes while it ends
    os.killpg(os.getpgrp(), signal.SIGKILL)


def fork_engine() -> None:
    """Make vLLM fork its engine on a CPU. There it starts a new interpreter, which takes 10 s to import vLLM again.

    A fork has one thread, so this process may have no pool of OpenMP threads: start() sets OMP_NUM_THREADS to 1.
    """
    from vllm.utils import system_utils

    server, vllms_own = os.getpid(), system_utils.get_mp_context

    def get_mp_context() -> BaseContext:
        return multiprocessing.get_context("fork") if os.getpid() == server else vllms_own()  # workers of an engine

    # Garbage is collected five times while an engine starts. That would copy the pages of all objects, if not frozen.
    # An engine has the socket at which the server listens: if it outlived the server, that would seem to be alive.
    die = partial(ctypes.CDLL(None).prctl, PR_SET_PDEATHSIG, signal.SIGKILL)
    os.register_at_fork(before=gc.freeze, after_in_child=die)
    system_utils.get_mp_context = get_mp_context  # other modules of vLLM import it later


if __name__ == "__main__":
    threading.Thread(target=end_with_starter, daemon=True).start()
    cores = sys.argv.pop(1)
    if cores != "-":
        os.sched_setaffinity(0, {int(core) for core in cores.split(",")})
        fork_engine()
    runpy.run_module("vllm.entrypoints.launchers.api_server.entry", run_name="__main__", alter_sys=True)
