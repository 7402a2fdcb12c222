"""Sampling ahead: what runs when, with whose prompts and metrics, which weights go in, and how an error comes out."""

import threading
import time
from functools import partial

import pytest
import torch

from common.data.prompts import Prompt, PromptLoader
from common.errors import RunFailed
from common.placement import Layout
from common.rollout.servers.engine import CallGate, ServerEngine
from common.run import sampling
from common.run.sampling import InOrder, Prefetcher
from common.run.tracking import Metrics

SECONDS = 60  # a test that waits longer has found a deadlock


def layout(inflight: int, updates: str = "none") -> Layout:
    return Layout(rollout_placement="split", max_inflight_batches=inflight, inflight_updates=updates)


class Engine:
    """ServerEngine's rules for updates, with a count of what is sent instead of servers."""

    def __init__(self, world, updates: str = "none"):
        self.world = world
        self.inflight_updates = updates
        self.weight_version = 0
        self.served_version = 0
        self.sending = False
        self.calls = CallGate()
        self.sent = []  # versions that the servers got
        self.abandoned = False
        for name in ("send_if_behind", "wait_for_step_or_idle", "wake", "load_weights", "versions"):
            setattr(self, name, partial(getattr(ServerEngine, name), self))

    behind = ServerEngine.behind

    def use_group(self, group) -> None:
        """Its collectives are those of the world."""

    def send_or_restart(self) -> None:
        self.sent.append(self.weight_version)
        self.served_version = self.weight_version

    def abandon(self) -> None:
        self.abandoned = True


class Batch:
    """The weights that sampled a step's tokens, and the prompts that it drew."""

    def __init__(self, version: int, prompts: list[str]):
        self.weight_versions = torch.tensor([[version]])
        self.response_mask = torch.tensor([[True]])
        self.version, self.prompts = version, prompts


class Run:
    """Samples steps that end when the test lets them."""

    def __init__(self, world, inflight: int, updates: str = "none", prompts: int = 2, first_step: int = 1):
        self.engine = Engine(world, updates)
        self.loader = PromptLoader([Prompt(f"{i}", f"{i}", [i], "1") for i in range(100)], 0)
        self.tracker = Metrics(world)
        self.count = prompts
        self.begun = []
        self.held = {}  # step -> its sampling ends when this is set
        self.main = threading.current_thread()
        self.in_main = []
        self.prefetcher = Prefetcher(
            self.sample,
            self.loader,
            None,
            None,
            world,
            self.tracker,
            layout(inflight, updates) if inflight > 1 else Layout(),
            self.engine,
            first_step=first_step,
        )

    def sample(self, step: int, sampler):
        prompts = [prompt.text for prompt in sampler.prompts(self.count)]
        with self.engine.calls.under_way():
            version = self.engine.versions().start
            self.begun.append(step)  # a test may push new weights as soon as it sees this
            self.in_main.append(threading.current_thread() is self.main)
            if step in self.held:
                assert self.held[step].wait(SECONDS)
        sampler.metrics.mean("reward/mean", step)
        return Batch(version, prompts)

    def hold(self, *steps: int) -> None:
        self.held |= {step: threading.Event() for step in steps}

    def get(self, step: int, last_step: int = 99):
        return self.prefetcher.get(step, last_step)

    def push(self) -> None:
        self.engine.load_weights("weights")

    def wait_for_begun(self, *steps: int) -> None:
        deadline = time.monotonic() + SECONDS
        while set(self.begun) != set(steps):
            assert time.monotonic() < deadline, self.begun
            time.sleep(0.005)


def wait_for_all(run: Run) -> None:
    for step in run.prefetcher.in_flight.values():
        assert step.ended.wait(SECONDS)


def in_the_walk(run: Run, first: int, count: int) -> list[str]:
    return [run.loader.prompt_at(position).text for position in range(first, first + count)]


def test_without_overlap_it_is_a_plain_call(world):
    run = Run(world, 1)
    assert [run.get(1).prompts, run.get(2).prompts] == [in_the_walk(run, 0, 2), in_the_walk(run, 2, 2)]
    assert run.in_main == [True, True] and run.loader.resume_at == 4
    assert "time/wait" not in run.tracker.sums


@pytest.mark.parametrize("inflight", [2, 3, 5])
def test_so_many_steps_are_under_way_while_one_trains(world, inflight):
    run = Run(world, inflight)
    for step in range(1, 4):
        run.get(step)
        wait_for_all(run)
        assert sorted(run.begun) == list(range(1, step + inflight)) and not any(run.in_main)
        run.push()
    assert [total for total, _ in run.tracker.sums["reward/mean"]] == [1, 2, 3], "metrics of step 2 are step 2's"


def test_a_step_draws_the_prompts_of_its_place_whichever_thread_is_faster(world, monkeypatch):
    """The ranks of a run would else train on different prompts, and a resumed run on others than this one."""
    run = Run(world, 4)
    enter = InOrder.enter

    def late(gate, step):
        time.sleep(0.02 * (4 - step) if step < 4 else 0)  # step 1 is the slowest
        enter(gate, step)

    monkeypatch.setattr(InOrder, "enter", late)
    for step in range(1, 4):
        assert run.get(step).prompts == in_the_walk(run, 2 * (step - 1), 2)


def test_training_does_not_wait_for_later_steps(world):
    run = Run(world, 3)
    run.hold(2, 3)
    run.get(1)
    run.wait_for_begun(1, 2, 3)
    assert not run.prefetcher.in_flight[2].ended.is_set()
    run.held[3].set()
    run.held[2].set()
    assert run.get(2).version == 0


def test_nothing_is_sampled_after_the_last_step(world):
    run = Run(world, 4)
    run.get(1, last_step=2)
    wait_for_all(run)
    assert sorted(run.begun) == [1, 2]


def test_a_resumed_run_begins_with_its_own_step(world):
    run = Run(world, 3, first_step=8)
    assert run.get(8).prompts == in_the_walk(run, 0, 2)
    wait_for_all(run)
    assert sorted(run.begun) == [8, 9, 10]


def test_a_checkpoint_resumes_with_the_first_prompts_that_were_not_trained_on(world):
    """Whatever is in flight, and although the threads are faster than the trainer."""
    run = Run(world, 4)
    for step in range(1, 4):
        run.get(step)
        wait_for_all(run)
        assert run.loader.resume_at == 2 * step and run.loader.position == 2 * (step + 3)
        run.push()


# Which weights go in, and when


def test_two_batches_never_wait_with_an_update_for_more_than_the_next_batch(world):
    """With K = 2 the update waits for the responses of the next step, and nothing new begins before it is in."""
    run = Run(world, 2)
    run.hold(2, 3)
    run.get(1)
    run.wait_for_begun(1, 2)
    run.push()
    assert run.engine.sent == [] and run.engine.behind == 1
    run.held[2].set()
    assert run.get(2).version == 0
    assert run.engine.sent == [1] and run.engine.behind == 0
    run.held[3].set()
    assert run.get(3).version == 1


def test_an_update_goes_in_when_the_responses_are_there_although_they_are_not_graded(world, monkeypatch):
    """A slow grader would else leave the servers without work."""
    run, graded = Run(world, 2), threading.Event()
    sample = run.prefetcher.sample

    def graded_late(step, sampler):
        batch = sample(step, sampler)
        assert step != 2 or graded.wait(SECONDS)
        return batch

    run.prefetcher.sample = graded_late
    run.get(1)
    run.wait_for_begun(1, 2)
    begin = Prefetcher._begin

    def begin_and_grade(prefetcher, step):
        graded.set()  # step 3 has begun before step 2 is graded
        return begin(prefetcher, step)

    monkeypatch.setattr(Prefetcher, "_begin", begin_and_grade)
    run.push()
    run.get(2)
    run.wait_for_begun(1, 2, 3)


def test_the_trainer_goes_on_while_a_long_response_holds_the_update_up(world):
    """It trains on what is sampled, and the update waits. So many fewer steps may begin."""
    run = Run(world, 3)
    run.hold(3)
    run.get(1)
    run.wait_for_begun(1, 2, 3)
    run.push()
    run.get(2)  # step 3 has a long response
    assert run.engine.behind == 1 and run.engine.sent == [] and sorted(run.begun) == [1, 2, 3]
    run.push()
    assert run.engine.behind == 2
    run.held[3].set()
    assert run.get(3).version == 0  # 2 pushes old: as old as it may be
    assert run.engine.sent == [2] and run.engine.behind == 0
    run.wait_for_begun(1, 2, 3, 4, 5)
    assert run.get(4).version == 2


@pytest.mark.parametrize("updates", ["recompute", "keep"])
def test_updates_amid_responses_wait_for_nothing(world, updates):
    run = Run(world, 3, updates)
    run.hold(2, 3)
    run.get(1)
    run.wait_for_begun(1, 2, 3)
    run.push()
    assert run.engine.sent == [1] and run.engine.behind == 0
    run.held[2].set()
    run.get(2)
    run.wait_for_begun(1, 2, 3, 4)
    run.push()
    assert run.engine.sent == [1, 2]
    run.held[3].set()
    assert [run.get(step).version for step in (3, 4)] == [0, 1]


@pytest.mark.parametrize("inflight", [2, 3, 5, 9])
@pytest.mark.parametrize("updates", ["none", "recompute"])
def test_no_token_is_ever_older_than_allowed(world, inflight, updates, monkeypatch):
    """Whatever is slow, sampling or training. The bound is used: else the trainer would wait for nothing."""
    run = Run(world, inflight, updates)
    sample = run.prefetcher.sample

    def slow(step, sampler):
        time.sleep(0.002 * (step % 5))
        return sample(step, sampler)

    run.prefetcher.sample = slow
    ages = []
    for step in range(1, 40):
        batch = run.get(step, last_step=39)
        ages.append(run.engine.weight_version - batch.version)
        time.sleep(0.001 * (step % 7))
        run.push()
    assert max(ages) == inflight - 1 and min(ages) >= 0
    assert sorted(run.begun) == list(range(1, 40)), "every step is sampled once"


def test_a_token_that_is_too_old_is_noticed(world):
    run = Run(world, 2)
    run.get(1)
    wait_for_all(run)
    run.engine.weight_version += 2
    with pytest.raises(AssertionError, match="2 pushes old"):
        run.get(2)


def test_an_evaluation_has_the_latest_weights_and_no_company(world):
    run = Run(world, 3)
    run.hold(2, 3)
    run.get(1)
    run.wait_for_begun(1, 2, 3)
    run.push()
    threading.Timer(0.05, lambda: [event.set() for event in run.held.values()]).start()
    run.prefetcher.settle()
    assert run.engine.sent == [1] and run.engine.calls.count == 0


def test_no_response_begins_during_an_update(world):
    calls, begun = CallGate(), threading.Event()

    def call() -> None:
        with calls.under_way():
            begun.set()

    with calls.closed():
        threading.Thread(target=call, daemon=True).start()
        assert not begun.wait(0.1)
    assert begun.wait(SECONDS)


# Errors, collectives, and the order of grading


@pytest.mark.parametrize("inflight", [2, 4])
def test_an_error_beside_is_raised_where_its_batch_is_wanted(world, inflight):
    run = Run(world, inflight)
    sample = run.prefetcher.sample

    def fails(step, sampler):
        if step == 2:
            raise RunFailed("the server is gone", code="server-gone")
        return sample(step, sampler)

    run.prefetcher.sample = fails
    run.get(1)
    wait_for_all(run)  # not here, and later steps don't wait for the one that failed
    with pytest.raises(RunFailed, match="the server is gone"):
        run.get(2)
    assert run.loader.resume_at == 2, "its prompts are drawn again"


def test_a_run_that_is_stopped_ends_its_batches_in_flight(world, monkeypatch):
    """Nobody will train on them, and long responses take their time. Their errors are no errors of the run."""
    run = Run(world, 3)
    run.hold(2, 3)
    run.get(1)
    monkeypatch.setattr(run.engine, "abandon", lambda: [event.set() for event in run.held.values()])
    run.prefetcher.abandon()
    assert all(step.ended.is_set() for step in run.prefetcher.in_flight.values())


def test_a_run_that_is_stopped_draws_nothing_more(world, monkeypatch):
    """Dynamic sampling: step 2 is in its first draw, and steps 3 and 4 wait for it to be full."""
    run = Run(world, 4)
    draws, held = [], threading.Event()

    def draws_twice(step, sampler):
        sampler.draws_again = step > 1
        for _ in range(2 if step > 1 else 1):
            prompts = [prompt.text for prompt in sampler.prompts(1)]
            draws.append(step)
            if step > 1:
                assert held.wait(SECONDS)
        return Batch(0, prompts)

    run.prefetcher.sample = draws_twice
    run.get(1)
    deadline = time.monotonic() + SECONDS
    while draws != [1, 2]:
        assert time.monotonic() < deadline, draws
        time.sleep(0.005)
    monkeypatch.setattr(run.engine, "abandon", held.set)  # ends the requests that are under way, and none that follow
    run.prefetcher.abandon()
    assert draws == [1, 2]


def test_an_evaluation_does_not_wait_for_steps_behind_one_that_failed(world):
    """On another rank a later step may wait for ever for the one that failed here."""
    run = Run(world, 4)
    run.hold(3, 4)
    sample = run.prefetcher.sample

    def fails(step, sampler):
        if step == 2:
            raise ValueError("out of memory")
        return sample(step, sampler)

    run.prefetcher.sample = fails
    run.get(1)
    with pytest.raises(ValueError, match="out of memory"):
        run.prefetcher.settle()
    assert not run.prefetcher.in_flight[3].ended.is_set()
    run.held[3].set()
    run.held[4].set()


def test_a_push_that_fails_saves_what_the_run_has(world, monkeypatch):
    run, saved = Run(world, 2), []

    def lost():
        raise RunFailed("the server is gone", code="server-gone")

    run.engine.send_or_restart = lost
    run.engine.before_failing = lambda: saved.append(True)
    with pytest.raises(RunFailed, match="the server is gone"):
        run.push()
    assert saved == [True]


def test_steps_in_flight_have_collectives_of_their_own(world):
    groups = []
    run = Run(world, 3)
    sample = run.prefetcher.sample

    def noted(step, sampler):
        groups.append(sampler.world.group)
        assert sampler.world.sum(2) == 2.0
        return sample(step, sampler)

    run.prefetcher.sample = noted
    run.get(1)
    wait_for_all(run)
    assert None not in groups and len(set(map(id, groups))) == 3 and world.group is None


def test_batches_are_graded_in_the_order_of_their_steps(world, monkeypatch):
    """Two ranks that grade in different orders would wait for each other for ever."""
    graded = []
    run = Run(world, 3)
    monkeypatch.setattr(sampling, "texts_of", lambda rollout, tokenizer: graded.append(rollout))
    sample = run.prefetcher.sample

    class Graded(Exception):
        """The test needs no more of grade()."""

    def stop(*given, **named):
        raise Graded

    def grades(step, sampler):
        sample(step, sampler)
        time.sleep(0.05 * (4 - step) if step < 4 else 0)  # the first is sampled last
        sampler.reward = type("Reward", (), {"score": stop})
        try:
            sampler.grade([], step)
        except Graded:
            return Batch(0, [])

    run.prefetcher.sample = grades
    run.get(1)
    wait_for_all(run)
    assert graded == [1, 2, 3]


def test_a_second_draw_in_a_step_is_refused_and_until_full_may_draw_again(world):
    """It would get other prompts on each rank, because another step may draw in between."""
    run = Run(world, 2)

    def twice(step, sampler):
        sampler.prompts(2)
        sampler.prompts(2)

    run.prefetcher.sample = twice
    with pytest.raises(RunFailed, match="until_full") as failed:
        run.get(1)
    assert failed.value.code == "drawn-twice"

    run = Run(world, 3)
    drawn = {}

    def again(step, sampler):
        sampler.draws_again = True  # as until_full() says
        drawn[step] = [prompt.text for _ in range(2) for prompt in sampler.prompts(2)]
        return Batch(0, [])

    run.prefetcher.sample = again
    run.get(1)
    wait_for_all(run)
    assert [drawn[step] for step in (1, 2, 3)] == [in_the_walk(run, first, 4) for first in (0, 4, 8)]
    assert run.loader.resume_at == 4
