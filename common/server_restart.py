"""When a rollout server of this run is lost: all of the run's are started again, once, and it goes on."""

from collections.abc import Callable
from typing import Any

from common.errors import RunFailed, warn


def again_if_lost(engine, work: Callable[[], Any]) -> Any:
    """work(), and once in a run again, on new servers, where a server is lost that the run itself started.

    All of them are started anew: the others may have half an update, or wait in NCCL for the one that is gone. They
    have the weights of the model's files (engine.fresh): work() has to send them the run's. Collective: work() raises
    the same on all ranks. Raises RunFailed.
    """
    while True:
        try:
            return work()
        except RunFailed as failed:
            lost = engine.explained(failed)
        refuse(lost, engine)
        engine.restarted = True
        warn(
            f"{lost}; the run's servers are started again, and what was asked of them is asked again; "
            "the next loss ends the run",
            code="server-restarted",
        )
        if engine.sender is not None:
            engine.sender.shutdown()
        engine.shutdown()
        engine.connect()


def refuse(lost: RunFailed, engine) -> None:
    """Raise what new servers do not mend, and say why not. By what every rank knows, so that all do the same."""
    if lost.code != "server-gone" or engine.layout.rollout_urls:
        raise lost
    if engine.restarted:
        raise RunFailed(f"{lost}; the run's servers were restarted before, and once is all", code=lost.code)
    if engine.layout.max_inflight_batches > 1:
        raise RunFailed(
            f"{lost}; with --max-inflight-batches {engine.layout.max_inflight_batches} servers are not restarted: the "
            "trainer has changed the weights they had",
            code=lost.code,
        )
