"""Grading while the engine samples: the same results, in the same order, sooner."""

import threading
import time
from types import SimpleNamespace

import pytest
import torch

from common.data import arithmetic as embedded
from common.data.prompts import Prompt
from common.errors import BadInput
from common.rewards import mixture as reward_mixture
from common.rewards.grading import Result
from common.rewards.mixture import EarlyGrading
from common.rollout.rollout import collate

PROMPTS = [Prompt(f"p{i}", f"{i}+1=", [5 + i], f"{i + 1}", {}) for i in range(3)]


class Length:
    """A reward that waits: its score is the length, and the prompt it is for is in what it noted."""

    waits = True

    def __init__(self, seconds: float = 0.0):
        self.seconds, self.calls = seconds, []

    def __call__(self, items, lengths, truncated):
        self.calls.append((threading.current_thread().name, [item.prompt for item in items]))
        time.sleep(self.seconds)
        pairs = zip(items, lengths, truncated)
        return [Result(float(n), 0.0, None, {"of": item.prompt, "cut": cut}) for item, n, cut in pairs]


def begun(reward, order=(2, 0, 1), tokenizer=None) -> EarlyGrading:
    early = EarlyGrading({"length": reward}, PROMPTS, tokenizer or embedded.tokenizer())
    for place in order:
        early(place, [[6] * (place + 1), [7] * 5], [False, True])
    return early


def sampled():
    ids = [row for place in range(3) for row in ([6] * (place + 1), [7] * 5)]
    prompts = [prompt.ids for prompt in PROMPTS for _ in range(2)]
    return collate(prompts, ids, [[-1.0] * len(row) for row in ids], [False, True] * 3, 0, torch.device("cpu"))


def test_what_was_begun_is_what_grading_afterwards_gives(world):
    responses, rollout = ["a", "b"] * 3, sampled()
    rewards = reward_mixture.Rewards({"length": Length()}, {"length": 1.0})
    after = rewards.score(PROMPTS, responses, rollout, world, 1)
    reward = Length()
    rewards = reward_mixture.Rewards({"length": reward}, {"length": 1.0})
    assert rewards.score(PROMPTS, responses, rollout, world, 1, None, begun(reward)) == after
    assert [result.score for result in after] == [1.0, 5.0, 2.0, 5.0, 3.0, 5.0]
    # In any order: threads grade them.
    assert sorted(prompts for _, prompts in reward.calls) == [["0+1="] * 2, ["1+1="] * 2, ["2+1="] * 2], "and only once"


def test_it_does_not_hold_up_who_samples():
    """All three prompts are graded at the same time: none ends before the last has begun, and that is after begun()."""
    together = threading.Barrier(4, timeout=60)

    class Waits(Length):
        def __call__(self, *given):
            together.wait()
            return super().__call__(*given)

    early = begun(Waits())
    together.wait()  # this thread is the fourth, so begun() has not waited for the other three
    assert len(early.results("length").results) == 6


def test_its_seconds_are_those_of_all_calls(monkeypatch):
    """As docs/metrics.md says of time/reward/NAME: calls at the same time count separately.

    Each thread has a clock that goes on by a second whenever it is read, so each of the three calls takes one.
    """
    own = threading.local()

    def perf_counter() -> float:
        own.now = getattr(own, "now", 0.0) + 1.0
        return own.now

    monkeypatch.setattr(reward_mixture, "time", SimpleNamespace(perf_counter=perf_counter))
    assert begun(Length()).results("length").seconds == 3.0


def test_where_a_prompt_is_missing_all_are_graded_afterwards(world):
    reward = Length()
    rewards = reward_mixture.Rewards({"length": reward}, {"length": 1.0})
    results = rewards.score(PROMPTS, ["a", "b"] * 3, sampled(), world, 1, None, begun(reward, order=(0, 2)))
    assert [result.info["of"] for result in results] == ["0+1="] * 2 + ["1+1="] * 2 + ["2+1="] * 2
    assert max(len(prompts) for _, prompts in reward.calls) == 6, "threads may note their calls after this one"


def test_a_reward_of_this_process_waits_until_sampling_is_over():
    reward = Length()
    reward.waits = False
    early = reward_mixture.Rewards({"length": reward}, {"length": 1.0}).begin_early(PROMPTS, embedded.tokenizer())
    early(0, [[6], [7]], [False, False])
    assert early.results("length") is None and reward.calls == []


def test_what_it_raises_is_raised_where_its_results_are_wanted():
    def wrong(items, lengths, truncated):
        return []

    wrong.waits = True
    with pytest.raises(BadInput, match='"length" .*0 .*2'):
        begun(wrong).results("length")


def test_a_second_answer_takes_the_place_of_the_first():
    """A rollout server was lost, and all prompts are asked for again."""
    reward = Length()
    early = begun(reward)
    early(1, [[6] * 9, [7] * 5], [False, False])
    assert [result.score for result in early.results("length").results] == [1.0, 5.0, 9.0, 5.0, 3.0, 5.0]
