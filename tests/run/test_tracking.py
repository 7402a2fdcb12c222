"""The numbers of a step in metrics.jsonl: what they are means of, and that nothing of another step is in them."""

import json
import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from algos import grpo
from common.errors import RunFailed
from common.rollout.rollout import Rollout, collate
from common.run import tracking
from common.run.tracking import Metrics, Tracker


@pytest.fixture
def tracker(world, tmp_path):
    made = Tracker(str(tmp_path), "grpo", grpo.Args(), world, "none", 0, 5)
    yield made
    made.bar.close()


def graded(lengths: list[int], truncated: list[bool], ungraded: tuple[int, ...] = ()) -> Rollout:
    """A rollout of responses of these lengths, some of which could not be graded."""
    ids = [[5] * length for length in lengths]
    batch = collate([[9]] * len(ids), ids, [[-1.0] * length for length in lengths], truncated, 0, torch.device("cpu"))
    batch.response_mask[list(ungraded)] = False
    return batch


def test_metrics_of_rewards_and_groups_by_hand(tracker):
    """Groups of scores (0, 1), (3, 3) and (5, 5), and one that could not be graded. It has lengths all the same."""
    batch = graded([1, 2, 3, 4, 5, 6, 7, 8], [True, False, False, True, False, False, False, True], ungraded=(6, 7))
    tracker.rollout(torch.tensor([0.0, 1.0, 3.0, 3.0, 5.0, 5.0, 0.0, 0.0]), 2, batch)
    tracker.max("advantage/abs_max", 1.0)
    metrics = tracker.write(1)
    assert metrics["reward/mean"] == pytest.approx(17 / 6)
    assert metrics["reward/std"] == pytest.approx(math.sqrt(1 / 2) / 3), "within a group, over n - 1"
    assert metrics["group/zero_std_frac"] == pytest.approx(2 / 3)
    assert metrics["reward/ungraded_frac"] == 2 / 8
    assert metrics["response/length_mean"] == 36 / 8
    assert metrics["response/truncated_frac"] == 3 / 8
    assert metrics["throughput/tokens_per_s"] == pytest.approx(36 / metrics["time/step"])


def test_a_group_of_one_has_no_spread(tracker):
    tracker.rollout(torch.tensor([0.0, 1.0]), 1, graded([2, 2], [False, False]))
    assert {"reward/std", "group/zero_std_frac"}.isdisjoint(tracker.sums) and "reward/mean" in tracker.sums


def test_tokens_of_an_environment_are_no_part_of_a_length(tracker):
    batch = graded([4, 2], [False, False])
    batch.episodes = [SimpleNamespace(ids=[5] * 4, sampled=[True, False, False, True])]
    batch.episodes.append(SimpleNamespace(ids=[5] * 2, sampled=[True, True]))
    tracker.rollout(torch.tensor([0.0, 1.0]), 2, batch)
    assert tracker.sums["response/length_mean"] == [(4, 2)]


def test_parts_of_a_step_add_up(tracker):
    """A mean is over all items together: 6 over two of them and 2 over six of them are 8 over eight."""
    for total, count, peak in ((6, 2, 5.0), (2, 6, -7.0)):
        tracker.mean("train/mean", torch.tensor(total), torch.tensor(count))
        tracker.sum("train/sum", total)
        tracker.max("train/largest", torch.tensor(peak))
    metrics = tracker.write(1)
    assert (metrics["train/mean"], metrics["train/sum"], metrics["train/largest"]) == (1.0, 8.0, 5.0)


def test_a_loss_is_the_mean_over_the_optimizer_steps(tracker):
    """Two mini-batches of two micro-batches each, whose shares add up to the losses 1 and 3."""
    for share, last in ((0.25, False), (0.75, True), (1.0, False), (2.0, True)):
        tracker.loss("loss/policy", torch.tensor(share), SimpleNamespace(last=last))
    assert tracker.write(1)["loss/policy"] == 2.0


def test_nothing_of_a_step_is_in_the_next_one(tracker):
    tracker.mean("train/entropy", 3.0)
    tracker.max("train/largest", 3.0)
    tracker.write(1)
    tracker.mean("train/entropy", 1.0)
    rows = [tracker.write(2), json.loads(tracker.metrics_file.read_text().splitlines()[-1])]
    for row in rows:
        assert row["train/entropy"] == 1.0 and "train/largest" not in row and row["step"] == 2


def test_counts_are_exact(tracker, world):
    """float32 would make 16,777,216 of it."""
    count = 2**24 + 1
    tracker.sum("tokens", count)
    tracker.max("largest", count)
    metrics = tracker.write(1)
    assert metrics["tokens"] == metrics["largest"] == world.sum(count) == world.min(count) == world.max(count) == count


def test_the_accuracy_before_training_is_that_of_step_0(tracker):
    tracker.first(0.25)
    assert json.loads(tracker.metrics_file.read_text()) == {"step": 0, "eval/accuracy": 0.25}


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_metric_that_is_no_number_ends_the_run_and_is_in_the_file(tracker, value):
    tracker.mean("loss/policy", value)
    with pytest.raises(RunFailed) as failed:
        tracker.write(1)
    assert failed.value.code == "non-finite" and "loss/policy" in str(failed.value)
    (row,) = map(json.loads, tracker.metrics_file.read_text().splitlines())
    assert row["loss/policy"] == pytest.approx(value, nan_ok=True)


def test_the_seconds_of_a_phase_are_the_mean_over_the_ranks(world, monkeypatch):
    metrics = Metrics(replace(world, size=2))
    monkeypatch.setattr(tracking.time, "perf_counter", iter([10.0, 14.0, 20.0, 21.0]).__next__)
    for _ in range(2):
        with metrics.time("rollout"):
            pass
    assert metrics.sums["time/rollout"] == [(2.0, 0), (0.5, 0)]


def test_a_step_takes_the_seconds_since_the_one_before(tracker, monkeypatch):
    tracker.step_began = 100.0
    monkeypatch.setattr(tracking.time, "perf_counter", iter([103.0, 110.0, 115.0]).__next__)
    tracker.first(0.25)  # an evaluation is no step
    assert [tracker.write(step)["time/step"] for step in (1, 2)] == [7.0, 5.0]


def test_the_line_of_a_step_has_the_numbers_that_the_readme_explains():
    names = ["reward/mean", "response/length_mean", "train/grad_norm", "train/clip_frac", "mismatch/logprob_abs_mean"]
    names += ["time/rollout", "time/update", "time/step", "eval/accuracy"]
    metrics = {"step": 7, "mismatch/logprob_abs_max": 50.0, "time/reward": 60.0, "loss/policy": 70.0}
    metrics |= {name: float(number) for number, name in enumerate(names, 1)}
    assert tracking.console_line(metrics) == (
        "step    7 | greedy accuracy 9.000 | reward 1.000 | length 2.0 | grad 3.00 | clip 4.000 | gap 5e+00 "
        "| rollout s 6.0 | update s 7.0 | step s 8.0"
    )
    assert tracking.console_line({"step": 0, "eval/accuracy": 0.25}) == "step    0 | greedy accuracy 0.250"


def test_what_a_thread_has_measured_joins_the_step_that_trains_on_it(world):
    step, beside = Metrics(world), Metrics(world)
    step.max("response/longest", 3.0)
    beside.max("response/longest", 5.0)
    beside.mean("reward/mean", 2.0, 4)
    beside.sum("time/rollout", 7.0)
    step.merge(beside)
    assert step.maxima == {"response/longest": [3.0, 5.0]}
    assert step.sums == {"reward/mean": [(2.0, 4)], "overlapped/rollout": [(7.0, 0)]}
