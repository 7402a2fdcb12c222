"""Runs of algos/grpo.py with one rank on each of two nodes, and what may happen to their network: two_nodes.py FOLDER

Each run is a fork of this process, which has imported everything already. FOLDER/NAME/rank0.log and rank1.log have what
the ranks wrote. Prints, as JSON, the exit codes of each run's ranks (null: it had to be killed), and how many seconds
the last one lived after the first.
"""

import dataclasses
import json
import multiprocessing
import os
import signal
import sys
import threading
import time
from contextlib import ExitStack
from functools import partial
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))
import faulty
from nodes import INTERFACE, Node, two_nodes

from algos import grpo
from common import errors, placement
from common.data import arithmetic as embedded
from common.preflight.flags import Saving
from common.run import tracking

SECONDS = 20  # how long ranks wait for each other in runs that lose a node
CUT_SECONDS = 2.0
STORE_SECONDS = 8.0


def at_update_of_step_2(event) -> None:
    """Let this rank call event() when it begins to train on the second batch."""
    write, begin = tracking.Tracker.write, grpo.policy_loss
    steps = []

    def count(tracker, step, *rest):
        steps.append(step)
        return write(tracker, step, *rest)

    def loss(**given):
        if steps == [1]:
            steps.append(None)
            event()
        return begin(**given)

    tracking.Tracker.write, grpo.policy_loss = count, loss


def nothing(nodes: list[Node], rank: int) -> None:
    """Both nodes stay, and so does their network."""


def cut_for_a_while(nodes: list[Node], rank: int) -> None:
    def cut():
        nodes[1].cable("down")
        threading.Timer(CUT_SECONDS, nodes[1].cable, ["up"]).start()

    if rank == 1:
        at_update_of_step_2(cut)


def node_is_gone(nodes: list[Node], rank: int, gone: int) -> None:
    """No packet of it arrives any more, not even the last ones of its connections."""

    def vanish():
        nodes[gone].cable("down")
        os.kill(os.getpid(), signal.SIGKILL)

    placement.COLLECTIVE_TIMEOUT_SECONDS = SECONDS
    errors.STORE_SECONDS = STORE_SECONDS
    if rank == gone:
        at_update_of_step_2(vanish)


def node_0_is_gone(nodes: list[Node], rank: int) -> None:
    node_is_gone(nodes, rank, gone=0)


def node_1_is_gone(nodes: list[Node], rank: int) -> None:
    node_is_gone(nodes, rank, gone=1)


def no_such_interface(nodes: list[Node], rank: int) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "ib7"


def loopback(nodes: list[Node], rank: int) -> None:
    """One rank finds nobody at the other's address, which is its own. The other one waits to be asked: it is killed."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"


class Run:
    """Both ranks of a run."""

    def __init__(self, folder: Path, name: str, event, resume: str = "", patience: float = 60.0):
        self.name = name
        self.folder = folder / name
        self.folder.mkdir(exist_ok=True)
        self.resume = resume
        self.patience = patience  # seconds that the second rank may live after the first
        self.ended: dict[int, float] = {}  # when a rank has ended
        self.problems = faulty.dataset(self.folder)
        self.stack = ExitStack()
        nodes = self.stack.enter_context(two_nodes())
        fork = multiprocessing.get_context("fork")
        self.ranks = [fork.Process(target=self.rank, args=(nodes, event, rank)) for rank in range(2)]
        for rank in self.ranks:
            rank.start()

    def rank(self, nodes: list[Node], event, rank: int) -> None:
        """What the process of a rank does."""
        nodes[rank].enter()
        log = os.open(self.folder / f"rank{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(log, 1)
        os.dup2(log, 2)
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[rank % len(cores)]})  # one thread on each rank
        os.environ.update(MASTER_ADDR=nodes[0].address, MASTER_PORT="29500", RANK=str(rank), WORLD_SIZE="2")
        os.environ.update(LOCAL_RANK="0", LOCAL_WORLD_SIZE="1", GLOO_SOCKET_IFNAME=INTERFACE)
        event(nodes, rank)
        flags = {"dataset": self.problems, "reward": faulty.UNEVEN, "steps": 3}
        flags["saving"] = Saving(save_every=1, resume=self.resume)
        errors.launch(grpo.main, dataclasses.replace(faulty.SMALL, run_dir=str(self.folder / "run"), **flags))

    def is_over(self) -> bool:
        """Whether both ranks have ended, or one has and the other takes too long. It is asked again and again."""
        now = time.monotonic()
        for number, rank in enumerate(self.ranks):
            if rank.exitcode is not None:
                self.ended.setdefault(number, now)
        return len(self.ended) == 2 or (len(self.ended) == 1 and now - min(self.ended.values()) > self.patience)

    def result(self) -> dict:
        codes = [rank.exitcode for rank in self.ranks]
        for rank in self.ranks:
            rank.kill()
            rank.join()
        self.stack.close()
        return {"codes": codes, "seconds": max(self.ended.values()) - min(self.ended.values())}


def results_of(*runs: Run) -> dict[str, dict]:
    while not all([run.is_over() for run in runs]):
        time.sleep(0.05)
    return {run.name: run.result() for run in runs}


def main(folder: Path) -> None:
    embedded.warm_start()
    start = partial(Run, folder)
    results = results_of(start("nothing", nothing))
    results |= results_of(start("cut_for_a_while", cut_for_a_while))
    # These wait most of their time.
    results |= results_of(
        start("node_0_is_gone", node_0_is_gone),
        start("node_1_is_gone", node_1_is_gone),
        start("no_such_interface", no_such_interface),
        start("loopback", loopback, patience=0.0),
    )
    results["resumed"] = results_of(start("node_1_is_gone", nothing, resume="auto"))["node_1_is_gone"]
    print(json.dumps(results), flush=True)


main(Path(sys.argv[1]))
