"""A run on two nodes with their own addresses (tests/nodes.py): training, servers, and a network that fails."""

import contextlib
import json
import os
import re
import subprocess
import sys
import time

import pytest
from conftest import ARITHMETIC, CORES, ROOT, launch
from helpers import metrics, same, weights
from nodes import INTERFACE, Node, two_nodes

from common.placement import TORCHRUN_VARIABLES

pytestmark = pytest.mark.slow
SMALL = [*ARITHMETIC, "--reward", f"{ROOT}/tests/workers/rewards.py:uneven", "--steps", 2, "--prompts-per-step", 4]
SMALL += ["--group-size", 4, "--mini-batches", 2, "--max-response-tokens", 16, "--eval-prompts", 0]


@contextlib.contextmanager
def allowed():
    """two_nodes(), or a skipped test."""
    with contextlib.ExitStack() as stack:
        try:
            nodes = stack.enter_context(two_nodes())
        except OSError as error:
            pytest.skip(f"this machine allows no network namespaces: {error}")
        yield nodes


@pytest.fixture
def nodes():
    with allowed() as nodes:
        yield nodes


def environment(**given: str) -> dict[str, str]:
    """This one without the variables of another launch."""
    return {name: value for name, value in os.environ.items() if name not in TORCHRUN_VARIABLES} | given


def test_torchrun_on_two_nodes_gives_what_one_node_gives(nodes, models, tmp_path):
    """Two ranks, two steps, bit for bit. Each rank has one core, and so one thread, in both runs."""
    flags = [*SMALL, "--model", models["untied"]]
    launch(ROOT / "algos/grpo.py", *flags, "--run-dir", tmp_path / "one", ranks=2)
    command = ["bash", "scripts/launch/torchrun.sh", "algos/grpo.py", *flags, "--run-dir", tmp_path / "two"]
    cores = sorted(CORES)
    running = []
    for node in nodes:
        variables = {"NNODES": "2", "NODE_RANK": str(node.number), "NPROC_PER_NODE": "1", "PYTHON": sys.executable}
        variables |= {"MASTER_ADDR": nodes[0].address, "LOCAL_ADDR": node.address, "INTERFACE": INTERFACE}
        command_on_core = ["taskset", "-c", cores[node.number % len(cores)], *command]
        settings = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        running.append(node.start(command_on_core, cwd=ROOT, env=environment(**variables), **settings))
    printed = [process.communicate(timeout=600)[0] for process in running]
    assert [process.returncode for process in running] == [0, 0], printed
    one, two = metrics(tmp_path / "one"), metrics(tmp_path / "two")
    assert one == two and len(one) == 2 and one[0]["train/grad_norm"] > 0
    assert same(weights(tmp_path / "one", 2), weights(tmp_path / "two", 2))


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The folder of the runs of tests/workers/two_nodes.py, and their results."""
    with allowed():
        pass
    folder = tmp_path_factory.mktemp("nodes")
    printed = launch(ROOT / "tests/workers/two_nodes.py", folder, engine=False).stdout
    return folder, json.loads(printed.splitlines()[-1])


def errors_of(folder, name: str, rank: int) -> list[str]:
    """Lines with an error in a rank's log, which has no traceback."""
    log = (folder / name / f"rank{rank}.log").read_text()
    assert "Traceback" not in log, log[-3000:]
    return re.findall(r"error\[.*", log)


@pytest.mark.nightly
def test_a_network_that_is_away_for_a_while_changes_nothing(runs):
    folder, results = runs
    assert results["nothing"]["codes"] == results["cut_for_a_while"]["codes"] == [0, 0]
    assert metrics(folder / "cut_for_a_while/run") == metrics(folder / "nothing/run")


@pytest.mark.nightly
@pytest.mark.parametrize("gone", [0, 1])
def test_a_run_ends_when_the_other_node_is_gone(runs, gone):
    """No connection is closed, so a rank notices when its collective has taken too long: here after 20 seconds."""
    folder, results = runs
    result = results[f"node_{gone}_is_gone"]
    assert result["codes"][gone] == -9 and result["codes"][1 - gone] == 3
    assert 2 < result["seconds"] < 120
    (line,) = errors_of(folder, f"node_{gone}_is_gone", 1 - gone)
    assert line.startswith(f"error[collective-timeout]: rank {1 - gone} in step 2: update: ")
    # Torch's store says who else has failed. Node 0 has the store.
    assert "dead: [1]" in line if gone == 1 else "the node of rank 0 does not answer" in line


@pytest.mark.nightly
def test_a_run_that_lost_a_node_goes_on_as_if_nothing_had_happened(runs):
    folder, results = runs
    assert results["resumed"]["codes"] == [0, 0]
    assert metrics(folder / "node_1_is_gone/run") == metrics(folder / "nothing/run")


@pytest.mark.nightly
@pytest.mark.parametrize("name, interface", [("no_such_interface", "ib7"), ("loopback", "lo")])
def test_an_interface_that_reaches_no_other_node_is_named(runs, name, interface):
    folder, results = runs
    codes = results[name]["codes"]
    assert 3 in codes and set(codes) <= {3, None}
    for rank in range(2):
        if codes[rank] == 3:
            (line,) = errors_of(folder, name, rank)
            # The other rank may find out first, and close the connection.
            assert line.startswith(("error[no-network]: ", "error[rank-lost]: "))
            assert f"GLOO_SOCKET_IFNAME={interface}" in line and "INTERFACE" in line
            assert f"has lo, {INTERFACE}" in line


@pytest.fixture
def server(nodes, models, tmp_path):
    """URL of a rollout server on the second node."""
    url = f"http://{nodes[1].address}:8000"
    command = ["bash", "scripts/serve_rollout.sh", models["untied"], "--host", nodes[1].address, "--dtype", "float32"]
    command += ["--port", 8000, "--max-model-len", 128, "--max-num-seqs", 16, "--gpu-memory-utilization", 0.05]
    log = tmp_path / "server.log"
    with open(log, "w") as file:
        process = nodes[1].start(command, cwd=ROOT, env=environment(), stdout=file, stderr=file)
    ask = [sys.executable, "-c", f"import urllib.request; urllib.request.urlopen('{url}/health', timeout=3)"]
    deadline = time.monotonic() + 600
    try:
        while nodes[0].start(ask, stderr=subprocess.DEVNULL).wait():
            assert process.poll() is None and time.monotonic() < deadline, log.read_text()[-3000:]
            time.sleep(0.5)
        yield url
    finally:
        process.terminate()
        process.wait(timeout=60)


def train_on(node: Node, *flags, own_memory: bool = False) -> subprocess.CompletedProcess:
    process = node.start(
        [sys.executable, "algos/grpo.py", *SMALL, "--dtype", "float32", *flags],
        own_memory,
        cwd=ROOT,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    printed, errors = process.communicate(timeout=600)
    return subprocess.CompletedProcess(process.args, process.returncode, printed, errors)


@pytest.mark.nightly
def test_a_server_on_the_other_node_follows_the_trainer(nodes, server, models, tmp_path):
    """Without a GPU both need the same /dev/shm. A trainer with another one learns that, and harms no server."""
    split = ["--rollout-placement", "split", "--rollout-urls", server, "--model", models["untied"]]
    refused = train_on(nodes[0], *split, "--run-dir", tmp_path / "refused", own_memory=True)
    assert refused.returncode == 3, refused.stderr
    (line,) = re.findall(r"error\[.*", refused.stderr)
    assert server in line and "one machine" in line
    result = train_on(nodes[0], *split, "--run-dir", tmp_path / "run")
    assert result.returncode == 0, result.stderr
    rows = metrics(tmp_path / "run")
    assert len(rows) == 2 and max(row["mismatch/logprob_abs_max"] for row in rows) <= 1e-4
