"""The report of a run: its numbers are those of the run, and problems are counted by what became of them."""

import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure

from common.errors import BadInput
from common.run import charts, estimates, guards, outcomes, report
from common.run.outcomes import Outcome

MARKUP = "</pre><script>alert(1)</script><img src=https://example.org/x.png onerror=alert(2)>"


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


def outcome(index: int, acc: float, response: str = "", **changes) -> Outcome:
    given = {"index": index, "id": f"test:{index}", "dataset": "arithmetic", "prompt": f"prompt {index}", "answer": "4"}
    return Outcome(**given | {"response": response or f"response {index}", "acc": acc, "truncated": False} | changes)


def save(run_dir: Path, metrics: list[dict], evaluations: dict[int, list[Outcome]], **args) -> Path:
    """A run directory. evaluations: step -> outcomes."""
    run_dir.mkdir(exist_ok=True)
    args = {"model": "org/model", "dataset": ["gsm8k"], "steps": metrics[-1]["step"] if metrics else 5} | args
    run = {"algorithm": "grpo", "argv": ["algos/grpo.py", "--seed", "3"], "args": args}
    (run_dir / "run.json").write_text(json.dumps(run))
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in metrics))
    (run_dir / "evaluations").mkdir(exist_ok=True)
    for step, found in evaluations.items():
        lines = [json.dumps(each.model_dump()) + "\n" for each in found]
        outcomes.path_of(run_dir, step).write_text("".join(lines))
    return run_dir


@pytest.mark.parametrize(
    "launcher, ranks, words",
    [
        (["/home/jane/lm/.venv/bin/python", "-u"], 1, "python -u algos/grpo.py --seed 3"),
        (["torchrun", "--nproc-per-node", "2"], 2, "torchrun --nproc-per-node 2 algos/grpo.py --seed 3"),
        ([], 2, "torchrun --nproc-per-node 2 algos/grpo.py --seed 3"),  # a run of an older version
        ([], 1, "python algos/grpo.py --seed 3"),
    ],
)
def test_a_report_has_the_command_without_the_folder_of_python(launcher, ranks, words):
    run = {"launcher": launcher, "argv": ["algos/grpo.py", "--seed", "3"], "hardware": {"ranks": ranks}}
    assert f"<pre>{words}</pre>" in report.command(run)


def test_a_command_has_no_folder_of_its_user():
    argv = ["/home/jane/lm/mine.py", "--model=/data/secret/Qwen3", "--output", "/home/jane/my runs/x"]
    said = report.command({"launcher": ["python"], "argv": argv, "hardware": "H100"})
    assert "<pre>python mine.py --model=Qwen3 --output x</pre>" in said
    assert "/no_think in km/h" in report.command({"argv": ["algos/grpo.py", "--system-prompt", "/no_think in km/h"]})


class Page(HTMLParser):
    """What a browser finds in a page: its tags with their attributes, and its text without the style."""

    def __init__(self, text: str):
        super().__init__()
        self.tags: list[tuple[str, dict]] = []
        self.texts: list[str] = []
        self.inside = ""  # the tag that began last
        self.feed(text)
        self.text = " ".join(" ".join(self.texts).split())

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        self.inside = tag

    def handle_data(self, text):
        if self.inside != "style":
            self.texts.append(text)


def page(run_dir: Path) -> Page:
    return Page(report.write(run_dir).read_text(encoding="utf-8"))


def main_card(found: Page) -> str:
    """The text between the sentence about the run and the checks."""
    return re.search(r"on gsm8k \. (.*?) Checks", found.text)[1]


# What was learned


@pytest.mark.parametrize("accuracies", [(0.2, 0.9, 0.5), (0.6, 0.1, 0.9, 0.7), (0.5,)])
def test_the_accuracy_of_a_run_is_its_last_one_and_not_its_best(accuracies, tmp_path):
    said = main_card(page(save(tmp_path, evaluated(*accuracies), {})))
    numbers = [f"{accuracies[0]:.1%}", f"{accuracies[-1]:.1%}"][: len(accuracies)]
    assert re.findall(r"[0-9.]+%", said) == numbers
    assert re.search(r"step 0 to (\d+)|step 0", said)[1] == (f"{10 * len(accuracies) - 10}" if numbers[1:] else None)


def test_the_intervals_are_those_of_the_problems(tmp_path):
    before = [0.0, 0.0, 1.0, 1.0, 0.0, 1.0, 0.0, 0.0]
    after = [1.0, 1.0, 1.0, 0.0, 1.0, 1.0, 1.0, 0.0]
    found = {0: [*map(outcome, range(8), before)], 10: [*map(outcome, range(8), after)]}
    said = main_card(page(save(tmp_path, evaluated(0.375, 0.75), found)))
    low, high = estimates.difference(np.array(after), np.array(before))
    assert f"change +37.5 points, 95% interval {100 * low:+.1f} to {100 * high:+.1f}" in said
    low, high = estimates.interval(np.array(after))
    assert f"95% interval {low:.1%} to {high:.1%}, 8 problems" in said


def test_without_an_evaluation_the_reward_or_the_loss_is_shown(tmp_path):
    rows = [{"step": step, "reward/mean": 0.25 * step, "time/step": 90.0} for step in (1, 2, 3)]
    found = page(save(tmp_path, rows, {}, steps=9, eval_every=0))
    assert "0.25 → 0.75 reward while sampling, step 1 to 3 nothing was evaluated" in main_card(found)
    assert "3 of 9 steps 4 min 30 s" in main_card(found) and "Held-out problems" not in found.text
    assert "warn" in {attributes.get("class") for _, attributes in found.tags}
    rows = [{"step": 1, "train/loss": 2.0}, {"step": 2, "train/loss": 3.0}]
    found = page(save(tmp_path, rows, {}))
    assert "warn" not in {attributes.get("class") for _, attributes in found.tags}, "DPO and SFT evaluate nothing"
    assert "2 → 3 training loss" in main_card(found) and ("span", {"class": "worse"}) in found.tags


def test_a_run_that_ended_before_its_first_step_has_a_report(tmp_path):
    found = page(save(tmp_path, [], {}, steps=5))
    assert "nothing yet" in found.text and "0 of 5 steps are done" in found.text


# Problems before and after

BEFORE = {0: 1, 2: 1, 3: 0, 4: 0, 5: 0, 6: 0, 7: 1, 8: 0, 9: 1}
AFTER = {0: 1, 1: 1, 2: 0, 3: 1, 4: 1, 5: 1, 6: 0, 8: 0, 9: 1}  # 1 and 7 could be graded once only
KINDS = {"still solved": 2, "learned": 3, "forgotten": 1, "still unsolved": 2}


def both() -> dict[int, list[Outcome]]:
    first = [outcome(index, acc, f"first {index}") for index, acc in BEFORE.items()]
    return {0: first, 20: [outcome(index, acc, f"last {index}") for index, acc in AFTER.items()]}


def test_problems_are_counted_by_whether_they_were_solved_before_and_after(tmp_path):
    found = page(save(tmp_path, evaluated(0.4, 0.5, 0.6), both()))
    section = re.search(r"Held-out problems before and after (.*?) Curves", found.text)[1]
    for title, count in KINDS.items():
        assert f"{title} {count}" in section and f"{title}: {count} " in section
    table = re.search(r"solved after step 20 unsolved after step 20 all (.*?) learned:", section)[1]
    rows = re.findall(r"(un)?solved before training|all", table)
    counts = [int(count) for count in re.findall(r"(\d+) [0-9.]+%", table)]
    assert len(rows) == 3 and counts == [2, 1, 3, 3, 2, 5, 5, 3, 8]
    assert "2 further problems" in section


def test_an_example_shows_both_responses_of_its_kind(tmp_path):
    found = page(save(tmp_path, evaluated(0.4, 0.5, 0.6), both()))
    learned = re.search(r"learned: 3 (.*?) forgotten: 1", found.text)[1]
    for index in (3, 4, 5):
        assert f"prompt {index} before training: wrong first {index} after step 20: right last {index}" in learned
    assert len(re.findall("prompt", learned)) == 3
    forgotten = re.search(r"forgotten: 1 (.*?) still unsolved", found.text)[1]
    assert "before training: right first 2 after step 20: wrong last 2" in forgotten


def test_many_examples_are_sampled_and_counted(tmp_path):
    """From all over the data, each once."""
    count = 10 * report.SHOWN_EXAMPLES
    found = {0: [outcome(i, 0.0) for i in range(count)], 10: [outcome(i, 1.0) for i in range(count)]}
    text = page(save(tmp_path, evaluated(0.0, 1.0), found)).text
    assert f"learned: {count} unsolved before, solved after, {report.SHOWN_EXAMPLES} of {count} shown" in text
    shown = [int(index) for index in re.findall(r"prompt (\d+)", text)]
    assert shown == [10 * place for place in range(report.SHOWN_EXAMPLES)]


def test_a_long_response_keeps_its_ends(tmp_path):
    text = "begin" + "x" * 50_000 + "end"
    found = {0: [outcome(0, 0.0, text)], 10: [outcome(0, 1.0)]}
    save(tmp_path, evaluated(0.0, 1.0), found)
    left_out = len(text) - report.LONGEST_TEXT
    written = report.write(tmp_path).read_text()
    assert len(written) < 100_000 + len(report.STYLE.read_text())
    assert "beginxx" in written and "xxend" in written and f"{left_out} characters left out" in written


def test_each_data_set_has_its_own_counts(tmp_path):
    accs = [(0, 1), (0, 0), (1, 0), (1, 1), (0, 1)]
    names = ["/home/me/a.jsonl", "/home/me/a.jsonl", "suite:aime24", "suite:aime24", "suite:aime24"]
    found = {0: [], 10: []}
    for index, (pair, name) in enumerate(zip(accs, names)):
        for step, acc in zip(found, pair):
            found[step].append(outcome(index, acc, dataset=name))
    text = page(save(tmp_path, evaluated(0.4, 0.6), found)).text
    # still solved, learned, forgotten, still unsolved, before, after
    assert "a.jsonl 0 1 0 1 0.0% 50.0%" in text and "suite:aime24 1 1 1 0 66.7% 66.7%" in text
    assert "/home/me" not in text.partition("run.json")[0]


def test_a_run_that_went_on_from_another_one_compares_its_own_evaluations(tmp_path):
    """A run that --resume forks begins at a later step. What was before is unknown, and the page says so."""
    rows = [{"step": step, "eval/accuracy": 0.1 * (step - 30)} for step in (31, 32, 33)]
    found = {step: [outcome(0, step > 31)] for step in (31, 32, 33)}
    text = page(save(tmp_path, rows, found)).text
    assert "solved after step 33" in text and "solved after step 31" in text and "before training" not in text
    assert "The first evaluation is after step 31" in text


def test_an_evaluation_that_the_metrics_lack_is_not_compared(tmp_path):
    """The run was killed between the two files."""
    found = {0: [outcome(0, 0.0)], 10: [outcome(0, 1.0)], 20: [outcome(0, 0.0)]}
    text = page(save(tmp_path, evaluated(0.0, 1.0), found)).text
    assert "solved after step 10" in text and "step 20" not in text


def test_one_evaluation_is_shown_without_a_comparison(tmp_path):
    found = {0: [outcome(0, 1.0), outcome(1, 0.0), outcome(2, 0.0)]}
    text = page(save(tmp_path, evaluated(1 / 3), found)).text
    assert "solved: 1 " in text and "unsolved: 2 " in text and "learned" not in text
    low, high = estimates.interval(np.array([1.0, 0.0, 0.0]))
    assert f"{low:.1%} to {high:.1%}, 3 problems" in text


def test_a_damaged_evaluation_is_named_and_ends_no_run(tmp_path):
    save(tmp_path, evaluated(0.0, 1.0), {0: [outcome(0, 0.0)], 10: [outcome(0, 1.0)]})
    path = outcomes.path_of(tmp_path, 10)
    path.write_text('{"index": 0, "acc": "right"}\n')
    found = page(tmp_path)
    assert "not readable" in found.text and f"{path}:1" in found.text and "Held-out accuracy" in found.text
    with pytest.raises(BadInput, match="step_000010.jsonl:1"):
        outcomes.read(path)


# The page


def test_nothing_is_loaded_and_no_text_is_markup(tmp_path):
    texts = {"id": MARKUP, "prompt": MARKUP, "answer": MARKUP, "response": MARKUP}
    found = {step: [outcome(0, step > 0, **texts, dataset=MARKUP), outcome(1, 1.0)] for step in (0, 10)}
    rows = [row | {f"time/{MARKUP}": 1.0, "time/step": 2.0} for row in evaluated(0.5, 1.0)]
    save(tmp_path, rows, found, dataset=[MARKUP], model=MARKUP)
    shown = page(tmp_path)
    assert {tag for tag, _ in shown.tags}.isdisjoint({"script", "img", "link", "iframe", "object", "embed", "image"})
    for tag, attributes in shown.tags:
        for name, value in attributes.items():
            assert not name.startswith("on") and name not in ("src", "srcset"), (tag, name)
            assert not name.endswith("href") or value.startswith("#"), "a part of the page itself"
            assert "//" not in (value or ""), (tag, name, value)
    style = report.STYLE.read_text()
    assert "url(" not in style and "@import" not in style
    # The prompt, the id, the reference and both responses; the model and the data set above.
    assert shown.text.partition("run.json")[0].count("alert(1)") >= 7


def test_the_page_fits_phones_and_has_a_dark_mode(tmp_path):
    """Each colour of a curve is a variable of the style, in both modes."""
    rows = evaluated(0.5, 1.0)
    written = report.write(save(tmp_path, rows, {})).read_text()
    assert 'name=viewport content="width=device-width' in written
    light, dark = report.STYLE.read_text().split("prefers-color-scheme: dark")
    used = set(re.findall(r"var\((--[\w-]+)\)", written)) | {f"--line-{number}" for number in range(len(charts.LINES))}
    for name in used:
        assert f"{name}:" in light and f"{name}:" in dark, name
    drawn = charts.draw(rows)
    assert not re.findall(r"#[0-9a-f]{6}\b", drawn), "a colour that no mode changes"


def test_a_title_is_text_outside_of_its_drawing():
    """There it wraps. In a drawing, a long one would be cut off."""
    drawn = charts.draw(evaluated(0.5, 1.0))
    titles = [panel.title for panels in charts.SECTIONS.values() for panel in panels]
    inside = re.sub(r"<figure><h4>.*?</h4>", "", drawn)
    assert "<h4>Held-out accuracy</h4>" in drawn
    assert not [title for title in titles if f">{title}<" in inside]


def test_the_same_run_gives_the_same_page(tmp_path):
    save(tmp_path, evaluated(0.5, 1.0), both())
    assert report.write(tmp_path).read_text() == report.write(tmp_path).read_text()


# Checks


def warnings(tmp_path, *rows: dict, **args) -> str:
    """The warnings on the page of a run with these metrics in its steps."""
    metrics = [{"step": step, "eval/accuracy": 0.5} | row for step, row in enumerate(rows)]
    written = report.write(save(tmp_path, metrics, {}, **args)).read_text()
    return " ".join(re.findall("<li class=warn>(.*?)</li>", written))


def test_a_run_in_which_all_is_well_has_no_warning(tmp_path):
    row = {"advantage/abs_max": 1.0, "mismatch/logprob_abs_mean": 1e-4, "train/entropy": 0.5}
    row |= {"response/truncated_frac": 0.5, "reward/ungraded_frac": 0.0}
    assert warnings(tmp_path, *[row] * 30, max_logprob_gap=0.001) == ""


@pytest.mark.parametrize("first, said", [(1, "All 8 steps are done"), (5, "Steps 5 to 8 are done. Earlier ones")])
def test_a_run_that_went_on_from_another_claims_its_own_steps(tmp_path, first, said):
    rows = [{"step": 0}] * (first == 1) + [{"step": step} for step in range(first, 9)]
    assert said in report.write(save(tmp_path, rows, {})).read_text()


@pytest.mark.parametrize(
    "rows, args, said",
    [
        ([{}] * 3, {"steps": 9}, "2 of 9 steps"),
        ([{"loss/policy": math.nan}], {}, "loss/policy is not finite in step 0"),
        (
            [{"mismatch/logprob_abs_mean": 0.002}, {}],
            {"max_logprob_gap": 0.001},
            "disagree by 0.002 per token in step 0",
        ),
        ([{"advantage/abs_max": 0.0}] * 3, {}, "In 3 of 3 steps no response had an advantage"),
        (
            [{"advantage/abs_max": 1.0}, *[{"advantage/abs_max": 0.0}] * guards.SILENT_STEPS],
            {},
            "no response had an advantage",
        ),
        ([{"response/truncated_frac": 1.0}, {}], {}, "100.0% in a step"),
        ([{"reward/ungraded_frac": 0.25}, {"reward/ungraded_frac": 0.0}], {}, "12.50% of the responses"),
        ([{"environment/failed_frac": 0.5}], {}, "lost their environment"),
        ([{"train/entropy": 1.0}] * guards.WINDOW_STEPS + [{"train/entropy": 0.01}], {}, "entropy fell from 1 to 0.01"),
        ([{"eval/accuracy": 0.9}, {"eval/accuracy": 0.4}], {}, "best accuracy was 90.0% after step 0"),
    ],
)
def test_what_may_be_wrong_is_a_warning(rows, args, said, tmp_path):
    assert said in warnings(tmp_path, *rows, **args)


def test_tokens_of_older_weights_may_differ_more(tmp_path):
    row = {"mismatch/logprob_abs_mean": 0.1, "mismatch/staleness": 1.0}
    assert warnings(tmp_path, row, max_logprob_gap=0.001) == ""
    assert "disagree" in warnings(tmp_path, row | {"mismatch/logprob_abs_mean": 0.6}, max_logprob_gap=0.001)
    rounding = {"mismatch/rounding_abs_mean": 0.01, "mismatch/current_tokens": 5000}  # guards.py stops such a run
    assert "disagree by 0.01 per token" in warnings(tmp_path, row | rounding, max_logprob_gap=0.001)


# Curves and times


def test_the_share_of_a_phase_is_that_of_the_whole_run():
    rows = [
        {"step": 1, "time/step": 5.0, "time/rollout": 1.0, "time/update": 4.0},
        {"step": 2, "time/step": 5.0, "time/rollout": 3.0, "time/update": 2.0},
    ]
    said = Page(report.times(rows)).text
    assert dict(re.findall(r"(\w+) ([0-9]+)%", said)) == {"rollout": "40", "update": "60"}
    assert re.search(r"The longest phase is (\w+)", said)[1] == "update"


def test_a_curve_has_every_value_at_its_step():
    """Up and down as it was, and only where it was measured."""
    rows = evaluated(0.2, 0.9, 0.5)
    axis = Figure().add_subplot()
    charts.draw_curves(axis, rows, ["eval/accuracy", "reward/mean"])
    accuracy, reward = axis.get_lines()
    assert accuracy.get_xdata().tolist() == [0, 10, 20] and accuracy.get_ydata().tolist() == [0.2, 0.9, 0.5]
    assert reward.get_xdata().tolist() == list(range(1, 21)), "step 0 is before the first one"


def test_phases_lie_on_each_other_step_by_step():
    rows = [{"step": 0, "eval/accuracy": 0.5}]
    rows += [{"step": 1, "time/step": 9.0, "time/rollout": 1.0, "time/update": 2.0}]
    rows += [{"step": 2, "time/step": 9.0, "time/rollout": 4.0}]
    axis = Figure().add_subplot()
    charts.draw_phases(axis, rows, ["time/rollout", "time/update"])
    corners = [corner for area in axis.collections for path in area.get_paths() for corner in path.vertices.tolist()]
    heights = {step: max(y for x, y in corners if x == step) for step in {x for x, _ in corners}}
    assert heights == {1: 3.0, 2: 4.0}


def test_a_panel_names_its_curves_and_their_last_values():
    rows = [{"step": 1, "eval/gsm8k/accuracy": 0.1, "eval/math/accuracy": 0.2}, {"step": 2, "eval/math/accuracy": 0.3}]
    said = Page(charts.draw(rows)).text
    assert "gsm8k 10.0%" in said and "math 30.0%" in said


# Responses


def test_a_response_is_marked_as_right_by_its_correctness():
    """A right one may have a score of 0, for example with a penalty, and a wrong one a high score."""
    given = {"prompt": "1+1=", "answer": "2", "extracted": "2", "advantage": 0.0, "finish_reason": "stop", "index": 0}
    given["info"] = {}
    rows = [{**given, "response": "first", "score": 0.0, "acc": 1.0}]
    rows += [{**given, "response": "second", "score": -0.75, "acc": 0.0}]
    marks = re.findall(r"<span class=(\w+)>.*?<pre>(first|second)</pre>", report.responses(rows))
    assert {text: mark for mark, text in marks} == {"first": "right", "second": "wrong"}


def test_a_program_shows_the_first_test_that_it_fails():
    row = {"prompt": "", "response": "", "answer": None, "extracted": "f", "advantage": 0.0, "finish_reason": "stop"}
    row |= {"index": 0, "score": 0.0, "acc": 0.0}
    info = {"passed": 1, "tests": 4, "failure": "f(2) < 3"}
    shown = report.responses([row | {"info": info}])
    assert "1 of 4" in shown and "f(2) &lt; 3" in shown


def test_a_response_that_nobody_graded_is_not_called_wrong():
    """The file has 0 for it, as for all responses of a prompt that has left the step."""
    row = {"prompt": "", "response": "", "answer": "2", "extracted": None, "advantage": 0.0, "finish_reason": "stop"}
    row |= {"index": 0, "score": 0.0, "acc": 0.0, "info": {"ungraded": "the judge is down"}}
    shown = report.responses([row])
    assert "left the step, not graded" in shown and "the judge is down" in shown
    assert "score 0" not in shown and "class=wrong" not in shown
