"""The numbers of a step in metrics.jsonl: what they are means of, and that nothing of another step is in them."""

import errno
import json
import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from algos import grpo
from common.data.prompts import Prompt
from common.errors import BadInput, RunFailed
from common.rewards.grading import Result
from common.rollout.rollout import Rollout, collate
from common.run import report, response_table, tracking
from common.run.sampling import Batch
from common.run.tracking import Metrics, Tracker


@pytest.fixture
def tracker(world, tmp_path):
    made = Tracker(grpo.Args(run_dir=str(tmp_path), steps=5), "grpo", world)
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
    tracker.mean("eval/accuracy", 0.25)
    tracker.write(0)
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
    assert metrics.sums["time/rollout"] == [(2.0, None), (0.5, None)]


def test_a_step_takes_the_seconds_since_the_one_before(tracker, monkeypatch):
    tracker.step_began = 100.0
    monkeypatch.setattr(tracking.time, "perf_counter", iter([103.0, 110.0, 115.0]).__next__)
    tracker.mean("eval/accuracy", 0.25)
    tracker.write(0)  # an evaluation is no step
    assert [tracker.write(step)["time/step"] for step in (1, 2)] == [7.0, 5.0]


def test_a_mean_of_nothing_is_left_out_and_a_sum_of_nothing_is_0(tracker):
    """A KL of 0 would read as a teacher that agrees."""
    tracker.mean("teacher/kl", 0.0, 0)
    tracker.mean("train/entropy", 0.0, 4)
    tracker.sum("teacher/too_long", 0)
    metrics = tracker.write(1)
    assert "teacher/kl" not in metrics and (metrics["train/entropy"], metrics["teacher/too_long"]) == (0.0, 0.0)


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
    assert step.sums == {"reward/mean": [(2.0, 4)], "overlapped/rollout": [(7.0, None)]}


class Sink:
    """Notes what a tracker gets."""

    def __init__(self, has_tables: tuple[int, ...] = (), fails: bool = False):
        self.got = []
        self.tables = []
        self.has_tables = has_tables
        self.fails = fails

    def log(self, step: int, metrics: dict) -> None:
        self.got.append(f"metrics of {step}")

    def wants_table(self, step: int) -> bool:
        return step not in self.has_tables

    def table(self, table) -> None:
        self.tables.append(table)

    def file(self, path) -> None:
        self.got.append(path.read_text())

    def close(self) -> None:
        self.got.append("closed")


def responses(world, count: int = 2) -> Batch:
    ids = [[5, 1]] * count
    rollout = collate([[9]] * count, ids, [[-1.0] * 2] * count, [False] * count, 3, "cpu")
    results = [Result(float(number), 1.0, str(number)) for number in range(count)]
    return Batch.of(
        rollout, [Prompt("a", "1+1=", [9], "2")], [f"response {number}" for number in range(count)], results
    )


def test_a_tracker_gets_a_table_of_what_was_written_to_rollouts(tracker, world):
    tracker.sink = Sink()
    tracker.save_rollouts(4, responses(world), torch.tensor([-0.5, 0.5]))
    (table,) = tracker.sink.tables
    assert table.step == 4
    assert [dict(zip(table.columns, row)) for row in table.rows] == [
        {
            "step": 4,
            "prompt": "1+1=",
            "response": f"response {number}",
            "extracted": str(number),
            "reference": "2",
            "score": float(number),
            "advantage": number - 0.5,
            "finish_reason": "stop",
            "weight_version": 3,
        }
        for number in range(2)
    ]


def test_responses_of_all_ranks_count_as_left_out(tracker, world, monkeypatch):
    """Rank 0 has a file with the responses of both ranks; the table has room for one."""
    tracker.sink = Sink()
    monkeypatch.setattr(response_table, "ROWS", 1)
    monkeypatch.setattr(tracker, "world", replace(world, size=2))
    monkeypatch.setattr(
        tracking.traces, "gathered", lambda groups, world: [line for lines in groups for line in lines] * 2
    )
    tracker.save_rollouts(4, responses(world), torch.zeros(2))
    assert tracker.sink.tables[0].rows[-1][1].startswith("3 of 4 responses ")


def test_a_table_that_the_tracker_has_is_not_made_again(tracker, world, monkeypatch):
    tracker.sink = Sink(has_tables=(4,))
    monkeypatch.setattr(response_table, "read", None)
    tracker.save_rollouts(4, responses(world), torch.zeros(2))
    assert (tracker.run_dir / "rollouts/step_000004.jsonl").is_file() and not tracker.sink.tables


@pytest.mark.parametrize("steps, every, tables", [(5, 10, 2), (1000, 10, 102), (1000, 1, 1002)])
def test_the_tables_of_a_run_share_the_characters(steps, every, tables, world, tmp_path):
    args = grpo.Args(run_dir=str(tmp_path), steps=steps, rollouts_every=every)
    made = Tracker(args, "grpo", world)
    made.bar.close()
    assert made.table_characters == response_table.TOTAL // tables


def test_the_tracker_gets_the_report_before_it_is_closed(tracker, capsys):
    tracker.sink = Sink()
    tracker.mean("eval/accuracy", 0.5)
    tracker.write(1)
    tracker.close()
    metrics, report, closed = tracker.sink.got
    assert (metrics, closed) == ("metrics of 1", "closed")
    assert report == (tracker.run_dir / "report.html").read_text() and "50.0%" in report
    assert "report.html" in capsys.readouterr().out


def test_a_report_that_cannot_be_written_changes_nothing_about_how_a_run_ends(tracker, capsys):
    """It would hide the error that the run ends with, and leave the other ranks waiting."""
    tracker.sink = Sink()
    (tracker.run_dir / "run.json").write_text("{}")
    tracker.close()
    assert tracker.sink.got == ["closed"]
    said = capsys.readouterr()
    assert "no report" in said.err and "run.json" in said.err and "report:" not in said.out


@pytest.mark.parametrize("number, code", [(errno.ENOSPC, "disk-full"), (errno.EACCES, "bad-input")])
def test_a_report_that_cannot_be_stored_is_a_warning(tmp_path, monkeypatch, capsys, number, code):
    def fail(run_dir):
        raise OSError(number, "said by the system")

    monkeypatch.setattr(report, "write", fail)
    assert tracking.write_report(tmp_path) is None
    assert f"warning[{code}]: no report: [Errno {number}] said by the system" in capsys.readouterr().err


def test_a_tracker_that_cannot_be_opened_leaves_nothing_that_refuses_the_next_try(world, tmp_path, monkeypatch):
    def refuse(*given):
        raise BadInput("--track mlflow: no server")

    monkeypatch.setattr(tracking.trackers, "Sink", refuse)
    with pytest.raises(BadInput, match="no server"):
        Tracker(grpo.Args(run_dir=str(tmp_path)), "grpo", world)
    assert not (tmp_path / "metrics.jsonl").exists()


def test_a_resumed_run_tells_its_tracker_which_responses_it_has(world, tmp_path, monkeypatch):
    (tmp_path / "rollouts").mkdir()
    for name in ("step_000001", "step_000002", "step_000003", "step_000005", "refused_000006", "step_notes"):
        (tmp_path / f"rollouts/{name}.jsonl").write_text("")
    given = []
    monkeypatch.setattr(tracking.trackers, "Sink", lambda *arguments: given.append(arguments))
    Tracker(grpo.Args(run_dir=str(tmp_path), track="wandb", steps=9), "grpo", world, start=2).bar.close()
    ((track, folder, _, start, repeated),) = given
    assert (track, folder, start, repeated) == ("wandb", tmp_path, 2, {3, 5})
    left = sorted(file.stem for file in (tmp_path / "rollouts").iterdir())
    assert left == ["step_000001", "step_000002", "step_notes"]


def test_the_report_is_written_once_a_minute_and_takes_a_twentieth_of_the_run_at_most(tracker, monkeypatch):
    clock, written = [1000.0], []

    def write(run_dir) -> None:
        written.append(clock[0])
        clock[0] += 5.0  # a report of large files

    monkeypatch.setattr(tracking, "write_report", write)
    monkeypatch.setattr(tracking.time, "perf_counter", lambda: clock[0])
    tracker.report_written = clock[0]
    for _ in range(400):  # a step a second
        clock[0] += 1.0
        tracker.refresh_report()
    assert written == [1061.0, 1167.0, 1273.0, 1379.0]
