"""vLLM servers, started and ended with the run."""

import atexit
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import httpx
import torch

from common.errors import RunFailed, say
from common.placement import TORCHRUN_VARIABLES, Layout
from common.safe_pickle import has_safetensors

START_WITHIN = 600.0  # seconds: a large model is read from a slow disk
ANSWER_WITHIN = 10.0  # seconds, of what a living server answers at once


def is_local(url: str) -> bool:
    """Whether HTTP_PROXY must be ignored: a proxy cannot reach this machine's loopback."""
    host = httpx.URL(url).host
    return host in ("localhost", "::1") or host.startswith("127.")


@dataclass
class Server:
    """One process group: vLLM's front end and its engine."""

    url: str
    process: subprocess.Popen
    log: object  # an unnamed file, read when the server fails

    def stop(self) -> None:
        """End the whole group, the engine too; a second call does nothing."""
        if self.log.closed:
            return
        for sign, seconds in ((signal.SIGTERM, 5.0), (signal.SIGKILL, 5.0)):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, sign)
            deadline = time.monotonic() + seconds
            while time.monotonic() < deadline and self.alive():
                self.process.poll()
                time.sleep(0.05)
        self.process.stdin.close()
        self.log.close()

    def alive(self) -> bool:
        """Whether any process of the group is there."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, 0)
            return True
        return False

    def last_words(self) -> str:
        """Its first line with an error, the cause of those that follow; else its last line."""
        self.log.seek(0)
        lines = [line.strip() for line in self.log.read(2**20).decode(errors="replace").splitlines() if line.strip()]
        errors = [line for line in lines if "Error:" in line]
        return (errors[:1] or lines[-1:] or ["it wrote nothing"])[0][-500:]


def command(model_path: str, dtype: torch.dtype, tp: int, layout: Layout, port: int, **limits) -> list[str]:
    """Arguments of vLLM's server for one engine; the same settings as the engine of common/vllm_engine.py."""
    cuda = torch.cuda.is_available()
    flags = {
        "model": model_path,
        "load-format": "safetensors" if has_safetensors(model_path) else "auto",
        "host": "127.0.0.1",
        "port": port,
        "dtype": str(dtype).removeprefix("torch."),
        "tensor-parallel-size": tp,
        "max-model-len": limits["max_model_len"],
        "max-num-seqs": limits["max_num_seqs"],
        "generation-config": "vllm",
        "logprobs-mode": "processed_logprobs",
        "weight-transfer-config": json.dumps({"backend": "nccl" if cuda else "shared_memory"}),
        "seed": 0,
    }
    if cuda:
        flags["hf-overrides"] = json.dumps({"head_dtype": "float32"})
        flags["gpu-memory-utilization"] = layout.rollout_memory or 0.9
    elif limits["max_model_len"] > 128:
        flags["block-size"] = 32
    if layout.rollout_batched_tokens:
        flags["max-num-batched-tokens"] = layout.rollout_batched_tokens
    given = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    # vLLM 0.32 cannot rewind a CPU generator after a part of a prompt: seeds of requests need prompts in one piece.
    on_cpu = ["--enforce-eager", "--no-enable-chunked-prefill"]
    fixed = ["--skip-tokenizer-init", "--enable-scale-out", "--disable-uvicorn-access-log"]
    return [*given, *fixed, *([] if cuda else on_cpu)]


def start(model_path: str, dtype: torch.dtype, tp: int, layout: Layout, environment: dict, **limits) -> list[Server]:
    """One server on each `tp` of the layout's rollout devices, on ports that are free. Rank 0 calls it.

    Returns when all answer. Raises RunFailed with the last words of one that ends. They are ended at exit.
    """
    servers, cuda = [], torch.cuda.is_available()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES") if cuda else None  # our device i is the i-th of these
    names = visible.split(",") if visible else {i: str(i) for i in layout.rollout_devices}
    inherited = {name: value for name, value in os.environ.items() if name not in TORCHRUN_VARIABLES}
    model_path = str(Path(model_path).resolve()) if Path(model_path).is_dir() else model_path
    firsts = range(0, len(layout.rollout_devices), tp)
    for first, port in zip(firsts, free_ports(len(firsts))):
        devices = ",".join(names[i] for i in layout.rollout_devices[first : first + tp])
        own = {"CUDA_VISIBLE_DEVICES": devices} if cuda else {"OMP_NUM_THREADS": "1"}  # a worker a core
        program = [sys.executable, "-m", "common.server_main", "-" if cuda else devices]
        log = tempfile.TemporaryFile()  # noqa: SIM115 -- it lives as long as the server
        process = subprocess.Popen(
            [*program, *command(model_path, dtype, tp, layout, port, **limits)],
            env=inherited | environment | own, stdin=subprocess.PIPE, stdout=log, stderr=log, start_new_session=True,
        )  # fmt: skip
        servers.append(Server(f"http://127.0.0.1:{port}", process, log))
        atexit.register(servers[-1].stop)
    say(f"rollout: starting {len(servers)} vLLM server(s) on {layout.rollout_devices}")
    for server in servers:
        wait_until_ready(server)
    return servers


def free_ports(count: int) -> list[int]:
    """Different ports of the loopback that nobody listens on now."""
    with contextlib.ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in probes]


def wait_until_ready(server: Server) -> None:
    """Raises RunFailed."""
    deadline = time.monotonic() + START_WITHIN
    while time.monotonic() < deadline:
        if server.process.poll() is not None:
            raise RunFailed(
                f"rollout server {server.url} ended while it started: {server.last_words()}", code="server-start"
            )
        if healthy(server.url):
            return
        time.sleep(0.2)
    raise RunFailed(
        f"rollout server {server.url} did not answer within {START_WITHIN:.0f} s: {server.last_words()}",
        code="server-start",
    )


def healthy(url: str) -> bool:
    """Whether the server answers and its engine lives."""
    with contextlib.suppress(httpx.TransportError):
        return httpx.get(f"{url}/health", timeout=ANSWER_WITHIN, trust_env=not is_local(url)).status_code == 200
    return False
