"""The fork server, from which launches of tests come: what it must leave behind, and what not."""

import os
import subprocess
import time
from multiprocessing.connection import Connection
from pathlib import Path

import psutil
import pytest
import torch
from conftest import shared, start_fork_server
from forkserver import connect, give_up, request_launch

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="launches are not forked")
SLEEPS = """import subprocess, sys
running = subprocess.Popen(["sleep", "60"])
open(sys.argv[1], "w").write(f"{running.pid}\\n")
running.wait()
"""


@pytest.fixture
def connections() -> list[Connection]:
    """Two of them, as of two pytest workers."""
    address = shared.get("address") or start_fork_server()
    return [connect(address), connect(address)]


def settings(folder: Path) -> dict:
    own = {"cores": os.sched_getaffinity(0), "stdout": str(folder / "out"), "stderr": str(folder / "err")}
    return {"cwd": str(folder), **own}


def sleeping(connection: Connection, folder: Path) -> psutil.Process:
    """Launch a script that sleeps in a process of its own, which is returned."""
    folder.mkdir()
    (folder / "sleeps.py").write_text(SLEEPS)
    given = {"command": [str(folder / "sleeps.py"), "pid"], "environments": [dict(os.environ)]}
    connection.send({**given, **settings(folder)})
    deadline = time.monotonic() + 60  # the server may still be importing
    while not (folder / "pid").exists() or not (folder / "pid").read_text().endswith("\n"):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return psutil.Process(int((folder / "pid").read_text()))


def test_a_pytest_worker_that_dies_takes_its_launch_with_it_and_no_other(connections, tmp_path):
    first, second = (sleeping(connection, tmp_path / str(i)) for i, connection in enumerate(connections))
    connections[0].close()
    first.wait(10)  # raises where it still runs
    assert second.is_running() and second.status() != psutil.STATUS_ZOMBIE
    give_up(connections[1])
    second.wait(10)


def test_a_launch_that_takes_too_long_is_killed_and_the_next_one_is_answered(connections, tmp_path):
    (tmp_path / "next.py").write_text("import sys\nassert sys.stdin.read() == ''\n")
    own = {"environments": [dict(os.environ)] * 2, **settings(tmp_path)}
    (tmp_path / "sleeps.py").write_text("import time\ntime.sleep(60)\n")
    with pytest.raises(subprocess.TimeoutExpired):
        request_launch(connections[0], [str(tmp_path / "sleeps.py")], timeout=0.5, **own)
    assert request_launch(connections[0], [str(tmp_path / "next.py")], timeout=30, **own) == [0, 0]
