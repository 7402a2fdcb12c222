"""A process that has imported what a run needs, and from which the ranks of launches are forked.

Importing torch, transformers and vLLM takes longer than most tests train. The server imports them, and forks an
attendant for each connection: one for each pytest worker. The attendant forks a rank's process for each rank of a
launch, and waits for them. A rank begins as a fresh interpreter would, with the arguments, environment, folder, cores
and output files of its launch, but these modules are loaded. A fork copies one thread alone, so the server starts no
other, and it is for machines without a GPU. tests/algorithms/test_learns.py compares a forked run with one of a fresh
interpreter, bit for bit.
"""

import atexit
import contextlib
import ctypes
import faulthandler
import gc
import importlib
import os
import random
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import warnings
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import NoReturn

# What an algorithm imports, also late in a run.
MODULES = (
    "torch",
    "torch.distributed.checkpoint._fsspec_filesystem",
    "transformers.models.qwen2.modeling_qwen2",
    "tyro._backends._tyro_backend",
    "algos.grpo",
    "common.rewards.model",
    "common.rewards.service",
    "common.rewards.weights_file",
    "common.run.report",
    "matplotlib.backends.backend_agg",
    "matplotlib.backends.backend_svg",
)
# What vLLM's engine imports, and what engines.start sets before: vLLM reads both at its import.
ENGINE_MODULES = (
    "common.rollout.vllm_engine",
    "common.rollout.vllm_prefixes",
    "common.rollout.vllm_weights",
    "vllm.entrypoints.llm",
    "vllm.entrypoints.launchers.cli_args",
    "vllm.v1.executor.uniproc_executor",
    "vllm.v1.worker.cpu_worker",
    "vllm.v1.core.sched.scheduler",
    "vllm.v1.attention.backends.cpu_attn",
    "vllm.model_executor.models.qwen2",
    "vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors",
    "vllm.model_executor.layers.quantization.online.base",
    "vllm.distributed.elastic_ep.elastic_execute",
)
ENGINE_ENVIRONMENT = {"VLLM_LOGGING_LEVEL": "ERROR", "TORCHDYNAMO_DISABLE": "1"}

# numpy's OpenBLAS and the allocator of pyarrow, which datasets imports, would start threads at their import.
ONE_THREAD = {"OPENBLAS_NUM_THREADS": "1", "JE_ARROW_MALLOC_CONF": "background_thread:false"}
# Environment variable of a launch beside which no other one has a vLLM engine of several ranks.
ALONE = "TESTS_LAUNCH_ALONE"
PR_SET_PDEATHSIG = 1  # of prctl(2): the signal that a process gets when its parent dies


class ForkServer:
    """The side of the tests that starts the server and ends it. Whoever knows its address can connect()."""

    def __init__(self, environment: dict[str, str]):
        """environment: of the imports; a launch brings its own."""
        self.folder = tempfile.TemporaryDirectory()
        self.address = f"{self.folder.name}/socket"
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(self.address)
            listener.listen()
            self.process = subprocess.Popen(
                [sys.executable, __file__, str(listener.fileno())],
                pass_fds=[listener.fileno()],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                env=environment | ONE_THREAD,
            )

    def stop(self) -> None:
        """End the server. Attendants end with their connections. If this process is killed, the server's input ends."""
        self.process.kill()
        self.process.wait()
        self.folder.cleanup()


def request_launch(
    connection: Connection, command: list[str], environments: list[dict], timeout: float, **settings
) -> list[int]:
    """Exit codes of the ranks, of which each has its environment; command: a script and its arguments.

    connection: what connect() has returned; it takes one launch at a time. settings: cwd, cores, stdout and stderr,
    which are files. Raises subprocess.TimeoutExpired.
    """
    connection.send({"command": command, "environments": environments, **settings})
    try:
        in_time = connection.poll(timeout)
    except BaseException:
        give_up(connection)  # the next launch would be given these codes
        raise
    if not in_time:
        give_up(connection)
        raise subprocess.TimeoutExpired(command, timeout)
    return connection.recv()


def give_up(connection: Connection) -> None:
    """Let the attendant kill the ranks of a launch, and take its answer."""
    connection.send(None)
    connection.recv()


def connect(address: str) -> Connection:
    """A connection to the server at this address, which answers when it has imported everything."""
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(address)
        return Connection(client.detach())


def accept(listener: socket.socket) -> dict | None:
    """Fork an attendant for each connection. Returns in several processes.

    In the server None, when its standard input ends; in an attendant None, when its connection ends; in a rank the
    request of its launch.
    """
    while True:
        ready = wait([sys.stdin.fileno(), listener])
        if sys.stdin.fileno() in ready:
            return None
        client = listener.accept()[0]
        if os.fork() == 0:
            listener.close()
            return serve(Connection(client.detach()))
        client.close()


def serve(connection: Connection) -> dict | None:
    """Answer requests until the connection ends, then return None. In a rank: return its request and environment."""
    while True:
        try:
            request = connection.recv()
        except (EOFError, ConnectionResetError):
            return None
        if request is None:  # the tests gave up on a launch that had just ended
            continue
        children = []
        for environment in request.pop("environments"):
            child = os.fork()
            if child == 0:
                connection.close()
                return {**request, "environment": environment}
            children.append(child)
        codes = wait_for(children, connection)
        with contextlib.suppress(BrokenPipeError):
            connection.send(codes)


def wait_for(children: list[int], connection: Connection) -> list[int]:
    """Exit codes of the children. The first that fails ends the others with SIGTERM, as torchrun does.

    A message meanwhile, or the end of the connection, says that nobody waits any more: the children are killed.
    """
    running = {os.pidfd_open(child): child for child in children}
    codes = {}
    while running:
        for ready in wait([connection, *running]):
            if ready is connection:
                with contextlib.suppress(EOFError, ConnectionResetError):
                    connection.recv()
                for process, child in running.items():
                    with contextlib.suppress(ProcessLookupError):  # not yet a group of its own
                        os.killpg(child, signal.SIGKILL)
                    signal.pidfd_send_signal(process, signal.SIGKILL)
                continue
            child = running.pop(ready)
            os.close(ready)
            codes[child] = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            if codes[child]:
                for other in running:
                    signal.pidfd_send_signal(other, signal.SIGTERM)
    return [codes[child] for child in children]


def begin(request: dict) -> None:
    """Make this child what a fresh interpreter with the request's command would be."""
    import numpy
    import torch

    os.setsid()  # a group of its own, which can be killed with all that it starts
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # the attendant may be killed before it can do so
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for number, path in ((1, request["stdout"]), (2, request["stderr"])):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    faulthandler.enable()  # a crash in native code prints where Python was
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["cwd"])
    os.sched_setaffinity(0, request["cores"])
    sys.argv = request["command"]
    sys.path[0] = str(Path(sys.argv[0]).resolve().parent)
    sys.path[1:1] = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    random.seed()
    numpy.random.seed()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", len(request["cores"]))))


def run_script() -> int:
    """Run the command of this child; its exit code. An exception that would be printed passes through."""
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as left:
        if not isinstance(left.code, int | None):
            raise
        return left.code or 0
    return 0


def end(code: int) -> NoReturn:
    """End this child as an interpreter ends, except that it leaves its objects as they are.

    To take apart what the server has imported, it would copy all of those pages: two seconds.
    """
    threading._shutdown()  # waits for threads, those of executors included
    atexit._run_exitfuncs()
    if ALONE in os.environ:  # so that this memory is its own
        for memory in Path("/dev/shm").glob("*-cpushm_*"):  # vLLM removes it in a destructor
            memory.unlink(missing_ok=True)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def main() -> dict | None:
    """Import, then serve. Returns what accept returns."""
    import torch

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal; pytest's workers end, and so do their connections

    torch.set_num_threads(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in MODULES:
            importlib.import_module(name)
        os.environ.update(ENGINE_ENVIRONMENT)
        for name in ENGINE_MODULES:
            importlib.import_module(name)
    threads = [path.joinpath("comm").read_text().strip() for path in Path("/proc/self/task").iterdir()]
    assert len(threads) == 1, f"a fork would lose the threads that these imports start: {threads}"
    gc.freeze()  # a collector that walked these objects in a child would copy their pages
    return accept(socket.socket(fileno=int(sys.argv[1])))


if __name__ == "__main__":
    request = main()
    if request is None:
        os._exit(0)  # as at the end of a rank
    begin(request)
    end(run_script())
