"""vLLM servers: started and ended with the run, and the HTTP they answer besides generating."""

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
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import torch

from common.errors import RunFailed, say
from common.placement import TORCHRUN_VARIABLES, Layout
from common.safe_pickle import has_safetensors

START_WITHIN = 600.0  # seconds: a large model is read from a slow disk
ANSWER_WITHIN = 10.0  # seconds, of what a living server answers at once
UPDATE_WITHIN = 300.0  # seconds, of one part of a weight update


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
        "hf-overrides": json.dumps({"head_dtype": "float32"}),
        "logprobs-mode": "processed_logprobs",
        "weight-transfer-config": json.dumps({"backend": "nccl" if cuda else "shared_memory"}),
        "seed": 0,
    }
    if cuda:
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


@dataclass
class Control:
    """The weight-transfer routes of all servers at once: the client that vLLM's trainer engines want.

    Raises RunFailed naming the server that failed. vLLM opens these routes with VLLM_SERVER_DEV_MODE=1.
    """

    urls: list[str]
    offsets: list[int] = field(default_factory=list)  # NCCL rank of each server's first worker
    workers: int = 0  # of all servers
    version: str = "0"  # of the weights that are being sent

    def everywhere(self, path: str, bodies: list[dict] | dict | None = None) -> list[dict]:
        """POST to all servers at the same time; bodies: one for each, or one for all."""
        bodies = bodies if isinstance(bodies, list) else [bodies] * len(self.urls)
        with ThreadPoolExecutor(len(self.urls)) as pool:
            return list(pool.map(lambda url, body: self.request("POST", url, path, body), self.urls, bodies))

    def request(self, method: str, url: str, path: str, body: dict | None = None) -> dict:
        """One request; the reply's JSON."""
        timeout = httpx.Timeout(ANSWER_WITHIN if method == "GET" else UPDATE_WITHIN, connect=ANSWER_WITHIN)
        try:
            reply = httpx.request(method, url + path, json=body, timeout=timeout, trust_env=not is_local(url))
        except httpx.HTTPError as error:
            said = f"rollout server {url} is gone: {path}: {type(error).__name__}: {error}"
            raise RunFailed(said, code="server-gone") from None
        if reply.status_code == 404:
            said = f"rollout server {url} has no {path}: scripts/serve_rollout.sh starts one that has"
            raise RunFailed(said, code="server-refused")
        if "arrived damaged" in reply.text:  # by SharedMemoryTransfer
            raise RunFailed(f"rollout server {url}: {reply.text[:300]}", code="weight-checksum")
        if reply.status_code != 200:  # also how a server answers in the moment its engine is lost
            code = "server-refused" if healthy(url) else "server-gone"
            raise RunFailed(f"rollout server {url} refused {path} ({reply.status_code}): {reply.text[:300]}", code=code)
        return reply.json()

    def check(self) -> None:
        """Whether all answer, have the routes, and how many workers each has. Raises RunFailed."""
        self.offsets, self.workers = [], 0
        self.resume()  # a run that was killed during an update has left them paused
        self.everywhere("/update_weight_version", {"new_version": "0"})  # and numbered: this run counts its own
        for url in self.urls:
            self.offsets.append(1 + self.workers)
            self.workers += self.request("GET", url, "/get_world_size")["world_size"]

    def init_weight_transfer_engine(self, init_info: dict) -> None:
        """vLLM's trainer knows one server: its offset is right for the first one's workers alone."""
        bodies = [{"init_info": {**init_info, "rank_offset": offset}} for offset in self.offsets]
        self.everywhere("/init_weight_transfer_engine", bodies)

    def start_weight_update(self) -> None:
        self.everywhere("/start_weight_update")

    def update_weights(self, update_info: dict) -> None:
        self.everywhere("/update_weights", {"update_info": update_info})

    def finish_weight_update(self) -> None:
        self.everywhere("/finish_weight_update", {"weight_version": self.version})

    def pause(self) -> None:
        """Responses half done stay until resume(), and are then continued from keys and values computed anew: a pause
        clears the cache, so that nothing is continued from older weights'.
        """
        self.everywhere("/pause?mode=keep")

    def resume(self) -> None:
        self.everywhere("/resume")

    def check_version(self) -> None:
        """Raises RunFailed naming a server whose weights are of another version."""
        for url in self.urls:
            found = self.request("GET", url, "/weight_info")["weight_version"]
            if found != self.version:
                raise RunFailed(
                    f"rollout server {url} has weights of version {found}, not {self.version}", code="weight-version"
                )

    def check_alike(self) -> None:
        """Raises RunFailed naming a server whose weights are not those of the first."""
        checksums = [reply["checksums"] for reply in self.everywhere("/weight_checker", {"action": "checksum"})]
        for url, found in zip(self.urls, checksums):
            if found != checksums[0]:
                raise RunFailed(
                    f"rollout servers {self.urls[0]} and {url} hold different weights", code="weight-checksum"
                )
