"""Shared fixtures: tiny models on disk, a world of one, and a way to start workers as a user starts scripts."""

import atexit
import collections
import functools
import os
import signal
import socket
import subprocess
import sys
import tempfile
from contextlib import nullcontext
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch
from filelock import FileLock
from forkserver import ALONE, ForkServer, connect, request_launch
from transformers import AutoModelForCausalLM, Qwen2Config

from common import placement
from common.data import arithmetic as embedded

ROOT = Path(__file__).parents[1]
# Flags of the embedded job for a script that is given another --model, whose defaults are those of real models. SHORT
# is for another dataset: --dataset may only be given once.
SHORT = ["--max-prompt-tokens", "64", "--max-response-tokens", "48"]
SHORT += ["--learning-rate", "2e-4", "--schedule", "linear", "--warmup-steps", "2"]
ARITHMETIC = ["--dataset", "arithmetic", *SHORT]
ENVIRONMENT = dict(os.environ)
FORK_SERVER = "fork server"  # what pytest tells its workers: {"address": that of the server}
shared: dict[str, str] = {}  # what this worker was told
CORES = os.sched_getaffinity(0)
WORKERS = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))


def pytest_configure(config) -> None:
    """Under pytest -n N each worker, and what it launches, keeps to its share of the cores: sharing them is slower.

    With more workers than cores each has one core, which it shares: while one waits, another one computes.
    """
    if hasattr(config, "workerinput"):
        shared.update(config.workerinput.get(FORK_SERVER, {}))
        mine, cores = int(config.workerinput["workerid"].removeprefix("gw")), sorted(CORES)
        os.sched_setaffinity(0, cores[mine::WORKERS] or [cores[mine % len(cores)]])


# Files that take longest, in the order in which two workers take them. Launches of several ranks and of servers wait
# for each other (see launch), so that a file with many of them has files with few of them beside it.
LONGEST = (
    "test_split",
    "test_siblings",
    "test_resume",
    "test_images",
    "test_distributed",
    "test_selftest",
    "test_two_nodes",
    "test_dpo",
    "test_faults",
    "test_journeys",
    "test_reward_service",
    "test_traces",
    "test_variants",
    "test_speedrun",
    "test_environments",
    "test_workers",
    "test_gpu_check",
    "test_main",
    "test_refusals",
    "test_main_plain",
    "test_packing",
    "test_install",
    "test_site",
    "test_ranges",
    "test_reward_mixture",
    "test_learns",
    "test_families",
    "test_lora",
    "test_launch",
)


# Where the quick tests are: all without a mark of NOT_QUICK in these folders and files. Under two minutes on two cores.
QUICK = ("algorithms", "preflight", "repository/test_readme.py", "repository/test_structure.py")
NOT_QUICK = {"slow", "nightly", "journey"}


@pytest.hookimpl(tryfirst=True)  # before pytest looks at the marks
def pytest_collection_modifyitems(items) -> None:
    quick = tuple(str(ROOT / "tests" / where) for where in QUICK)
    for item in items:
        if str(item.path).startswith(quick) and NOT_QUICK.isdisjoint(mark.name for mark in item.iter_markers()):
            item.add_marker("quick")
    place = {name: number for number, name in enumerate(LONGEST)}
    items.sort(key=lambda item: place.get(Path(item.fspath).stem, len(LONGEST)))


def save_model(folder: Path, config: Qwen2Config, spread: float = 0.0) -> str:
    """A model with random weights; `spread` adds noise so that log-probs are not all alike."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * spread)
    model.save_pretrained(folder)
    embedded.tokenizer().save_pretrained(folder)
    return str(folder)


@pytest.fixture(autouse=True)
def signal_handlers():
    """Put back the handlers of signals. A script that a test runs in this process may set them for its own.

    With the default for SIGPIPE, as view_rollouts.py has it, the next write of a thread to a connection that its client
    has closed would end this worker without a word.
    """
    numbers = (signal.SIGINT, signal.SIGPIPE, signal.SIGTERM)
    before = {number: signal.getsignal(number) for number in numbers}
    yield
    for number, handler in before.items():
        if handler is not None:  # None: it was not set from Python
            signal.signal(number, handler)


@pytest.fixture(scope="session")
def models(tmp_path_factory) -> dict[str, str]:
    """Folders of the embedded architecture: untied and tied embeddings, grouped-query attention, both in two layers."""
    folder = tmp_path_factory.mktemp("models")
    grouped, both = embedded.config(), embedded.config(tie_word_embeddings=True)
    grouped.num_key_value_heads = both.num_key_value_heads = 2
    both.num_hidden_layers, both.layer_types = 2, both.layer_types[:2]  # many tests compute its gradients
    return {
        "untied": save_model(folder / "untied", embedded.config(), 0.05),
        "tied": save_model(folder / "tied", embedded.config(tie_word_embeddings=True), 0.05),
        "grouped": save_model(folder / "grouped", grouped, 0.05),
        "tied and grouped": save_model(folder / "both", both, 0.05),
    }


@pytest.fixture(scope="session")
def world():
    """A world of one rank in this process, for tests that start no vLLM engine (that one takes the group down)."""
    world = placement.init(seed=0)
    yield world
    placement.finish(world)


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node) -> None:
    """Under pytest -n N: the process that starts the workers starts the fork server of all of them."""
    if not torch.cuda.is_available():  # a fork would have no use of CUDA
        node.workerinput[FORK_SERVER] = {"address": start_fork_server()}


@functools.cache
def start_fork_server() -> str:
    """Address of a fork server, which ends with this process."""
    server = ForkServer(ENVIRONMENT)
    atexit.register(server.stop)
    return server.address


@functools.cache
def server_connection() -> Connection:
    """The connection of this pytest worker to the server of all workers, or to one of its own where it has none."""
    return connect(shared.get("address") or start_fork_server())


def launch(
    *command,
    ranks: int = 1,
    timeout: float = 600,
    check: bool = True,
    cwd=None,
    servers: bool = False,
    engine: bool = True,
    launcher_flags=(),
    fresh: bool = False,
) -> subprocess.CompletedProcess:
    """Run a script as a user would with plain python, or with torchrun for more than one rank.

    The processes are forked from one that has imported torch and vLLM, which all pytest workers share. `fresh` starts
    interpreters instead, torchrun's for several ranks: for what happens at an import, and for what torchrun does when a
    rank dies.
    Several ranks run on all cores, and with vLLM one launch at a time: two engines of tensor parallelism would meet in
    its shared memory. engine: False for a worker without a vLLM engine. servers: the run starts rollout servers, which
    want a core of their own, so that it is alone as well.
    """
    if torch.cuda.is_available() and ranks > torch.cuda.device_count():
        pytest.skip(f"{ranks} ranks need as many GPUs")
    command = [str(word) for word in command]
    inherited = {name: value for name, value in os.environ.items() if name not in placement.TORCHRUN_VARIABLES}
    # Workers import tests/cases.py.
    inherited["PYTHONPATH"] = os.pathsep.join([str(ROOT / "tests"), *filter(None, [os.environ.get("PYTHONPATH")])])
    alone = servers or (ranks > 1 and engine and "hf" not in command)
    one_at_a_time = FileLock(Path(tempfile.gettempdir()) / "onefile-rl-tests.lock") if alone else nullcontext()
    cores = CORES if servers or ranks > 1 else os.sched_getaffinity(0)
    with one_at_a_time:
        if fresh or launcher_flags or torch.cuda.is_available():
            launcher = [sys.executable]
            if ranks > 1:
                launcher += ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks), "--master-port", "0"]
                launcher += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", *launcher_flags]
            result = subprocess.run(
                launcher + command,
                env=inherited,
                cwd=cwd,
                timeout=timeout,
                capture_output=True,
                text=True,
                preexec_fn=partial(os.sched_setaffinity, 0, cores),
            )
        else:
            inherited |= {ALONE: "1"} if alone else {}
            environments = [inherited | variables for variables in torchrun_variables(ranks)]
            result = fork(command, environments, timeout, cwd, cores)
    if check and result.returncode:  # the first rank that died stands at the start, those it took down at the end
        printed = "\n".join([result.stdout[-3000:], result.stderr[:3000], result.stderr[3000:][-3000:]])
        pytest.fail(f"{command} ended with {result.returncode}:\n{printed}")
    return result


HELD = collections.deque(maxlen=32)  # sockets that keep the latest ports of free_port()


def free_port() -> int:
    """A port that the system gives nobody else while its socket is bound. A server may listen on it all the same."""
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(("127.0.0.1", 0))
    HELD.append(held)
    return held.getsockname()[1]


def torchrun_variables(ranks: int) -> list[dict[str, str]]:
    """What torchrun would set for each rank; nothing for a single one, which is plain python."""
    if ranks == 1:
        return [{}]
    shared = {"WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    shared |= {"TORCHELASTIC_RUN_ID": "forked", "OMP_NUM_THREADS": 1}
    every = [shared | {"RANK": rank, "LOCAL_RANK": rank} for rank in range(ranks)]
    return [{name: str(value) for name, value in variables.items()} for variables in every]


def fork(command: list[str], environments: list[dict], timeout: float, cwd, cores) -> subprocess.CompletedProcess:
    """A launch by the fork server: all ranks write to the same two files. A rank's exit code is that of the launch."""
    with tempfile.TemporaryDirectory() as folder:
        out, err = Path(folder) / "stdout", Path(folder) / "stderr"
        settings = {"cwd": str(cwd or os.getcwd()), "cores": cores, "stdout": str(out), "stderr": str(err)}
        codes = request_launch(server_connection(), command, environments, timeout, **settings)
        # As with torchrun, the rank that failed counts, and not those that were ended because of it.
        code = next((code for code in codes if code > 0), min(codes))
        return subprocess.CompletedProcess(command, code, *[path.read_text() for path in (out, err)])


def relative_difference(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """|one - other| / |one| over all tensors together."""
    assert one.keys() == other.keys()
    difference = sum((one[name] - other[name]).double().square().sum() for name in one)
    return (difference / sum(tensor.double().square().sum() for tensor in one.values())).sqrt().item()
