"""The prefetching rollout object: what runs when, with whose metrics, and how an error comes out."""

import threading
import time

import pytest

from common.data.prompts import PromptLoader
from common.errors import RunFailed
from common.placement import Layout
from common.run.sampling import Prefetcher
from common.run.tracking import Metrics

AHEAD = Layout(rollout_placement="split", max_inflight_batches=2)


class Loader(PromptLoader):
    """Of the data, only the place in it."""

    def __init__(self):
        self.position, self.in_flight = 0, None


def prefetcher(sample, loader, world, metrics, layout):
    """One that neither grades nor decodes."""
    return Prefetcher(sample, loader, None, None, world, metrics, layout)


def recorder(calls: list, **events):
    def sample(step, sampler):
        calls.append((step, threading.current_thread() is threading.main_thread()))
        with sampler.time("rollout"):
            events.get("hold", lambda: None)()
        sampler.metrics.mean("reward/mean", step)
        return f"batch {step}"

    return sample


def test_without_overlap_it_is_a_plain_call(world):
    calls, tracker = [], Metrics(world)
    rollouts = prefetcher(recorder(calls), Loader(), world, tracker, Layout())
    assert [rollouts.get(1), rollouts.get(2)] == ["batch 1", "batch 2"]
    assert calls == [(1, True), (2, True)] and rollouts.world is world
    assert len(tracker.sums["time/rollout"]) == 2 and "time/wait" not in tracker.sums


def test_ahead_the_next_step_is_under_way_while_one_trains(world):
    calls, tracker = [], Metrics(world)
    rollouts = prefetcher(recorder(calls), Loader(), world, tracker, AHEAD)
    assert rollouts.get(1) == "batch 1"
    rollouts.wait()
    assert calls == [(1, False), (2, False)]
    assert [total for total, _ in tracker.sums["reward/mean"]] == [1], "metrics of step 2 are step 2's"
    assert rollouts.get(2, prefetch=False) == "batch 2"
    assert [total for total, _ in tracker.sums["reward/mean"]] == [1, 2]
    rollouts.wait()
    assert calls == [(1, False), (2, False)], "nothing is in flight after a checkpoint"
    assert rollouts.get(3) == "batch 3"
    assert set(tracker.sums) == {"time/wait", "overlapped/rollout", "reward/mean"}


def test_training_does_not_wait_for_the_next_batch(world):
    trained, samples_then = threading.Event(), []

    def sample(step, sampler):
        if step == 2:
            samples_then.append(trained.wait(timeout=10))
        return step

    rollouts = prefetcher(sample, Loader(), world, Metrics(world), AHEAD)
    rollouts.get(1)
    trained.set()
    assert rollouts.get(2, prefetch=False) == 2 and samples_then == [True]


def test_a_run_that_is_stopped_waits_for_its_batch_in_flight(world):
    """Else the servers are ended under it, and a run that was asked to stop ends with an error."""
    ended = []
    hold = lambda: (time.sleep(0.2), ended.append(True))
    rollouts = prefetcher(recorder([], hold=hold), Loader(), world, Metrics(world), AHEAD)
    rollouts.get(1)
    rollouts.wait()
    assert len(ended) == 2


def test_an_error_beside_is_raised_where_its_batch_is_wanted(world):
    def sample(step, sampler):
        if step == 2:
            raise RunFailed("the server is gone", code="server-gone")
        return step

    rollouts = prefetcher(sample, Loader(), world, Metrics(world), AHEAD)
    assert rollouts.get(1) == 1
    rollouts.wait()  # not here
    with pytest.raises(RunFailed, match="the server is gone"):
        rollouts.get(2)


def test_its_collectives_are_its_own(world):
    rollouts = prefetcher(recorder([]), Loader(), world, Metrics(world), AHEAD)
    assert rollouts.world.group is not None and world.group is None
    assert rollouts.world.sum(2) == 2.0


@pytest.mark.parametrize("layout", [AHEAD, Layout()])
def test_a_checkpoint_knows_what_was_trained_on_not_what_is_in_flight(world, layout):
    loader = Loader()

    def sample(step, sampler):
        loader.position += 8

    rollouts = prefetcher(sample, loader, world, Metrics(world), layout)
    rollouts.get(1)
    rollouts.wait()
    assert loader.resume_at == 8 and loader.position == (16 if layout is AHEAD else 8)


def test_prompts_that_are_drawn_at_once_are_in_flight_too(world, monkeypatch):
    """The thread may be faster than the one that started it."""
    loader = Loader()

    def sample(step, sampler):
        loader.position += 8

    rollouts = prefetcher(sample, loader, world, Metrics(world), AHEAD)
    apply_async = rollouts.thread.apply_async

    def at_once(*given):
        begun = apply_async(*given)
        begun.wait()
        return begun

    monkeypatch.setattr(rollouts.thread, "apply_async", at_once)
    rollouts.get(1)
    assert (loader.position, loader.resume_at) == (16, 8)
