"""vLLM's servers as processes that start and end with the run.

python -m common.rollout.servers.process CORES FLAGS OF vLLM'S SERVER     CORES: 0,1 or, with GPUs, -

This command is vLLM's server in a process that cannot outlive the run: its standard input closes however the run ends,
and then it kills its own process group, engine included.
"""

import atexit
import contextlib
import functools
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
from multiprocessing.context import BaseContext
from typing import BinaryIO

import httpx
import torch

from common.errors import RunFailed, say
from common.placement import TORCHRUN_VARIABLES
from common.processes import sandbox
from common.rollout.vllm_engine import EngineConfig, engine_settings, is_about_memory, memory_cure

START_SECONDS = 600.0  # a large model may come from a slow disk
STOP_SECONDS = 5.0
ANSWER_SECONDS = 10.0  # for requests that a living server answers at once


def is_local(url: str) -> bool:
    """Whether the URL is on this machine's loopback. A proxy that HTTP_PROXY names could not reach it."""
    host = httpx.URL(url).host
    return host in ("localhost", "::1") or host.startswith("127.")


def healthy(url: str, route: str = "/health") -> bool:
    """Whether the server answers and its engine lives."""
    try:
        return httpx.get(f"{url}{route}", timeout=ANSWER_SECONDS, trust_env=not is_local(url)).status_code == 200
    except httpx.TransportError:
        return False


@dataclass
class Server:
    """A server that this run started: a process group of vLLM's front end and its engine."""

    url: str
    process: subprocess.Popen
    log: BinaryIO  # an unnamed file with everything that the server printed
    port: socket.socket | None = None  # see hold_port()

    def wait_until_ready(self, deadline: float | None = None) -> None:
        """Raises RunFailed with the last words of a server that ends, or that does not answer by the deadline.

        deadline: on the clock time.monotonic(). None: START_SECONDS from now.
        """
        if deadline is None:
            deadline = time.monotonic() + START_SECONDS
        # Another server may answer at the port of one that has ended.
        while self.process.poll() is not None or not healthy(self.url):
            # It has ended, for example because its model does not fit, or it takes too long.
            if self.process.poll() is not None or time.monotonic() > deadline:
                message = f"rollout server {self.url} did not start: {self.last_words()}"
                if is_about_memory(message):
                    raise RunFailed(f"{message}; {memory_cure()}", code="engine-memory")
                raise RunFailed(message, code="server-start")
            time.sleep(0.2)

    def last_words(self) -> str:
        """The last MiB's first line with an error, because the others follow from it. Without one, the last line."""
        file = self.log.fileno()
        start = max(0, os.fstat(file).st_size - 2**20)
        # seek() would move the place at which a server that still runs writes.
        text = os.pread(file, 2**20, start).decode(errors="replace")
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        errors = [line for line in lines if "Error:" in line]
        if errors:
            return errors[0][-500:]
        return lines[-1][-500:] if lines else "it wrote nothing"

    def stop(self) -> None:
        """End the process group. A second call does nothing."""
        if self.log.closed:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(STOP_SECONDS)
        # The front end ends after its engine. If it has been killed, its engine may still be there.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.stdin.close()
        self.log.close()
        if self.port is not None:
            self.port.close()


def hold_port() -> socket.socket:
    """A socket that is bound to a free port of the loopback. As long as it is open, no other run is given this port.

    A server takes many seconds until it listens. If another run's server listened there first, it would pass for ours.
    Ours may listen beside this socket, because both set SO_REUSEADDR and this one does not listen.
    """
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(("127.0.0.1", 0))
    return held


def start(config: EngineConfig) -> list[Server]:
    """Start one server on every `tensor_parallel` of the layout's devices. Return when all answer. Rank 0 calls it.

    They are stopped when this process exits. Raises RunFailed with the last words of a server that ends.
    """
    cuda = torch.cuda.is_available()
    devices = config.layout.rollout_devices
    servers = []
    for first in range(0, len(devices), config.tensor_parallel):
        held = hold_port()
        port = held.getsockname()[1]
        names = ",".join(device_name(device) for device in devices[first : first + config.tensor_parallel])
        # vLLM would take torchrun's variables for its own.
        environment = {name: value for name, value in os.environ.items() if name not in TORCHRUN_VARIABLES}
        environment["VLLM_SERVER_DEV_MODE"] = "1"  # opens the routes for weights
        if cuda:
            environment["CUDA_VISIBLE_DEVICES"] = names
        else:
            # A CPU's engine has a worker for each core. See also fork_engine().
            environment["OMP_NUM_THREADS"] = "1"
        program = [sys.executable, "-m", "common.rollout.servers.process", "-" if cuda else names]
        log = tempfile.TemporaryFile()  # noqa: SIM115 -- it lives as long as the server
        process = subprocess.Popen(
            [*program, *command(config, port)],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            start_new_session=True,  # a process group of its own, which stop() can end
        )
        servers.append(Server(f"http://127.0.0.1:{port}", process, log, held))
        atexit.register(servers[-1].stop)
    say(f"rollout: starting {len(servers)} vLLM server(s) on {devices}")
    # One deadline for all of them: other ranks are waiting.
    deadline = time.monotonic() + START_SECONDS
    for server in servers:
        server.wait_until_ready(deadline)
    return servers


def device_name(device: int) -> str:
    """A device as CUDA_VISIBLE_DEVICES of a new process calls it: this process may see some of the node's GPUs only."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if torch.cuda.is_available() and visible:
        return visible.split(",")[device]
    return str(device)


def command(config: EngineConfig, port: int) -> list[str]:
    """Flags of vLLM's server for one engine."""
    flags = engine_settings(config)
    flags |= {"host": "127.0.0.1", "port": port, "enable_scale_out": True, "disable_uvicorn_access_log": True}
    if not torch.cuda.is_available():
        # On a CPU vLLM 0.32 cannot rewind the random generator of a request after it has computed a part of a prompt.
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
    # os.read, because sys.stdin has a lock that Python also takes while it ends.
    os.read(0, 1)
    os.killpg(os.getpgrp(), signal.SIGKILL)


def fork_engine() -> None:
    """Make vLLM fork its engine from this process, on a CPU. By itself it starts a new interpreter there, which imports
    vLLM once more: 10 s and 500 MB for each server.

    A fork has only the thread that forked it. With a pool of OpenMP threads it would wait for threads that are not
    there, so start() sets OMP_NUM_THREADS to 1.
    """
    from vllm.utils import system_utils

    server = os.getpid()
    vllm_context = system_utils.get_mp_context

    def get_mp_context() -> BaseContext:
        if os.getpid() == server:
            return multiprocessing.get_context("fork")
        return vllm_context()  # in the engine, for its workers

    # The engine collects garbage five times while it starts. It would touch, and so copy, every page of this process.
    # A forked engine inherits the server's listening socket. If it outlived the server, that would seem to be alive.
    os.register_at_fork(before=gc.freeze, after_in_child=functools.partial(sandbox.set_death_signal, None))
    # vLLM's other modules import this function later.
    system_utils.get_mp_context = get_mp_context


if __name__ == "__main__":
    threading.Thread(target=end_with_starter, daemon=True).start()
    cores = sys.argv.pop(1)
    if cores != "-":
        os.sched_setaffinity(0, {int(core) for core in cores.split(",")})
        fork_engine()
    runpy.run_module("vllm.entrypoints.launchers.api_server.entry", run_name="__main__", alter_sys=True)
