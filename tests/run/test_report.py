"""The report of a run: its numbers are those of the run, in the order in which they came."""

import re

import pytest
from matplotlib.figure import Figure

from common.run import report


def evaluated(*accuracies: float) -> list[dict]:
    """Rows of metrics.jsonl. Step 0 and every tenth step have an accuracy."""
    rows = []
    for step in range(10 * len(accuracies) - 9):
        row = {"step": step}
        if step:
            row["reward/mean"] = 0.5
        if step % 10 == 0:
            row["eval/accuracy"] = accuracies[step // 10]
        rows.append(row)
    return rows


@pytest.mark.parametrize("accuracies", [(0.2, 0.9, 0.5), (0.6, 0.1, 0.9, 0.7), (0.5,)])
def test_the_accuracy_of_a_run_is_its_last_one_and_not_its_best(accuracies):
    said = report.summary(evaluated(*accuracies))
    assert re.findall(r"[0-9.]+%", said) == [f"{accuracies[0]:.1%}", f"{accuracies[-1]:.1%}"]
    assert re.findall(r"step ([0-9]+)", said) == ["0", f"{10 * (len(accuracies) - 1)}"]


def test_the_share_of_a_phase_is_that_of_the_whole_run():
    rows = [
        {"step": 1, "time/step": 5.0, "time/rollout": 1.0, "time/update": 4.0},
        {"step": 2, "time/step": 5.0, "time/rollout": 3.0, "time/update": 2.0},
    ]
    said = report.summary(rows)
    assert dict(re.findall(r"(\w+) ([0-9]+)%", said)) == {"rollout": "40", "update": "60"}
    assert re.search(r"Most of it is (\w+)", said)[1] == "update"


def test_a_curve_has_every_value_at_its_step():
    """Up and down as it was, and only where it was measured."""
    rows = evaluated(0.2, 0.9, 0.5)
    axis = Figure().add_subplot()
    report.draw_curves(axis, rows, ["eval/accuracy", "reward/mean"])
    accuracy, reward = axis.get_lines()
    assert accuracy.get_xdata().tolist() == [0, 10, 20] and accuracy.get_ydata().tolist() == [0.2, 0.9, 0.5]
    assert reward.get_xdata().tolist() == list(range(1, 21)), "step 0 is before the first one"


def test_phases_lie_on_each_other_step_by_step():
    rows = [{"step": 0, "eval/accuracy": 0.5}]
    rows += [{"step": 1, "time/step": 9.0, "time/rollout": 1.0, "time/update": 2.0}]
    rows += [{"step": 2, "time/step": 9.0, "time/rollout": 4.0}]
    axis = Figure().add_subplot()
    report.draw_phases(axis, rows, ["time/rollout", "time/update"])
    corners = [corner for area in axis.collections for path in area.get_paths() for corner in path.vertices.tolist()]
    heights = {step: max(y for x, y in corners if x == step) for step in {x for x, _ in corners}}
    assert heights == {1: 3.0, 2: 4.0}


def test_a_response_is_marked_as_right_by_its_correctness():
    """A right one may have a score of 0, for example with a penalty, and a wrong one a high score."""
    given = {"prompt": "1+1=", "answer": "2", "extracted": "2", "advantage": 0.0, "finish_reason": "stop", "index": 0}
    given["info"] = {}
    rows = [{**given, "response": "first", "score": 0.0, "acc": 1.0}]
    rows += [{**given, "response": "second", "score": -0.75, "acc": 0.0}]
    marks = dict(re.findall(r"<pre>(first|second)</pre>.*?<td class=(\w+)>", report.responses(rows)))
    assert marks == {"first": "right", "second": "wrong"}


def test_a_program_shows_the_first_test_that_it_fails():
    row = {"prompt": "", "response": "", "answer": None, "extracted": "f", "advantage": 0.0, "finish_reason": "stop"}
    row |= {"index": 0, "score": 0.0, "acc": 0.0}
    info = {"passed": 1, "tests": 4, "failure": "f(2) < 3"}
    shown = report.responses([row | {"info": info}])
    assert "1 of 4" in shown and "f(2) &lt; 3" in shown
