"""scripts/claims.py: its verdicts follow the rule, and its page says what the committed runs do."""

import json
import math
import os
import re
import statistics
import subprocess
import tempfile
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import ROOT
from helpers import load

from common.errors import BadInput, check_given_once

claims = load("scripts/claims.py")
study = claims.study


def estimate(low: float, high: float):
    return study.Estimate((low + high) / 2, low, high)


def claim(expected: str, **changes):
    return claims.Claim("a paper", "rloo", "grpo", "sampled", expected, **changes)


@pytest.mark.parametrize(
    "expected, low, high, verdict",
    [
        ("more", 0.001, 0.05, "confirmed"),
        ("more", 0.001, 0.015, "confirmed"),  # smaller than the margin, but certain
        ("more", -0.05, 0.019, "refuted here"),
        ("more", -0.05, 0.021, "unresolved"),
        ("less", -0.05, -0.001, "confirmed"),
        ("less", -0.019, 0.05, "refuted here"),
        ("less", -0.021, 0.05, "unresolved"),
        ("equal", -0.019, 0.019, "confirmed"),
        ("equal", 0.001, 0.019, "confirmed"),  # certain, but smaller than the margin
        ("equal", 0.001, 0.021, "refuted here"),
        ("equal", -0.05, -0.03, "refuted here"),
        ("equal", -0.021, 0.001, "unresolved"),
    ],
)
def test_a_verdict_follows_from_the_interval_and_the_margin(expected, low, high, verdict):
    assert claims.verdict(claim(expected), estimate(low, high), seeds=5) == verdict


def test_a_verdict_waits_for_all_seeds():
    """Whoever looks after each seed and stops when it pleases finds something in most of the claims."""
    assert claims.verdict(claim("more"), estimate(0.1, 0.2), seeds=4) == "4 of 5 seeds"
    assert claims.verdict(claim("more", task="sums"), estimate(0.1, 0.2), seeds=3) == "confirmed"
    assert claims.verdict(claim("more"), None, seeds=0) == "0 of 5 seeds"


def finished(
    folder, arm: str, sampled: dict[int, float], task: str = "arithmetic", above=(0.0, 0.0), **columns: list[float]
) -> None:
    """The files of runs with these shares of right samples, and for the columns a number for each step from 0.

    Greedy accuracy is 10 points below the share of right samples, and pass@8 10 points above it. above: what is added.
    """
    for seed, share in sampled.items():
        steps = range(len(next(iter(columns.values()), [0, 1])))
        names = {"accuracy": "eval/accuracy", "entropy": "train/entropy", "length": "response/length_mean"}
        names["grad_norm"] = "train/grad_norm"
        rows = [{"step": step} | {names[name]: values[step] for name, values in columns.items()} for step in steps]
        evaluation = {"sampled": share, "greedy": share - 0.1 + above[0], "pass@8": share + 0.1 + above[1]}
        about = {"seed": seed, "evaluation": evaluation}
        study.write_run(claims.Cell(task, arm, seed).file(folder), rows, about, claims.COLUMNS)


def line(folder, name: str) -> dict[str, str]:
    """Column -> what a claim's line has there."""
    columns, _, fields = [row.strip("| ").split(" | ") for row in claims.table(folder, (name,)).splitlines()]
    return dict(zip(columns, fields, strict=True))


def test_a_row_compares_the_seeds_that_both_arms_have(tmp_path):
    """Seeds 0, 1 and 2 differ by 1, 2 and 3 points: 2 +- 4.303 / sqrt(3). Seed 3 has no control yet."""
    finished(tmp_path, "temperature", {0: 0.81, 1: 0.92, 2: 0.73, 3: 0.1}, task="sums")
    finished(tmp_path, "grpo", {0: 0.80, 1: 0.90, 2: 0.70}, task="sums")
    found = line(tmp_path, "temperature-sums")
    assert found["seeds"] == "3" and found["verdict"] == "**unresolved**"
    assert (found["arm"], found["control"]) == ("82.0", "80.0"), "means of the same three seeds, which differ by 2.0"
    assert found["difference"] == "2.0 [-0.5, 4.5]" and found["p"] == "0.074", "t is 3.46, with two degrees of freedom"
    finished(tmp_path, "grpo", {0: 0.80, 1: 0.91, 2: 0.72, 3: 0.09}, task="sums")
    found = line(tmp_path, "temperature-sums")
    assert found["difference"] == "1.0" and found["verdict"] == "**unresolved**", "equal seeds have no interval"
    assert found["p"] == ""


def test_the_page_shows_no_number_of_a_row_until_all_its_seeds_have_run(tmp_path):
    for arm, share in (("no-std", 0.9), ("grpo", 0.8)):
        finished(tmp_path, arm, dict.fromkeys(range(4), share))
    found = line(tmp_path, "std")
    assert (found["verdict"], found["seeds"]) == ("**4 of 5 seeds**", "4")
    assert (found["arm"], found["control"], found["difference"]) == ("90.0", "80.0", "10.0")
    on_page = claims.table(tmp_path, ("std",), unfinished=False)
    assert "4 of 5 seeds" in on_page and "90.0" not in on_page and "10.0" not in on_page
    assert "[std]" not in claims.measures_table(tmp_path) and "Of 29 rows, 0 have" in claims.summary(tmp_path)


def test_the_second_table_has_all_measures_of_a_row_with_all_its_seeds(tmp_path):
    """Seeds are paired: the arm's are in another order. A row without a control has no difference to show."""
    shares = {0: 0.5, 1: 0.6, 2: 0.7, 3: 0.8, 4: 0.9}
    finished(tmp_path, "no-std", {seed: share + 0.05 for seed, share in reversed(shares.items())}, above=(0.03, 0.02))
    assert "[std]" not in claims.measures_table(tmp_path), "the control has no runs"
    finished(tmp_path, "grpo", {seed: share for seed, share in shares.items() if seed})
    assert "[std]" not in claims.measures_table(tmp_path), "the control lacks a seed"
    finished(tmp_path, "grpo", shares)
    finished(tmp_path, "random-reward", shares, accuracy=[0.5, 0.1])
    found = claims.measures_table(tmp_path).split("\n\n")[0].splitlines()[2:]
    assert found == ["| [std](#std) | 8.0 | 5.0 | 7.0 | ?, ? |"]
    finished(tmp_path, "no-std", shares, grad_norm=[1.5, 0.2, 1.01, 1.0])
    assert "| 50, ? |\n\n" in claims.measures_table(tmp_path), "a norm of 1 isn't clipped"


def test_the_intervals_that_decide_nothing_are_counted():
    """Read off the page: all but those by the measure of the row's verdict, which has another table."""
    names, _, *rows = [line.split(" | ") for line in claims.table(claims.COMMITTED).splitlines()]
    deciding = {row[0]: row[names.index("measure")] for row in rows}
    table, said = claims.measures_table(claims.COMMITTED).split("\n\n")
    head, _, *rows = [line.split(" | ") for line in table.splitlines()]
    unplanned = [
        [float(end) for end in re.search(r"\[(.+), (.+)\]", field).groups()]
        for row in rows
        for measure, field in zip(head[1:4], row[1:4])
        if measure != deciding[row[0]]
    ]
    excluding = [low > 0 or high < 0 for low, high in unplanned]
    assert said.startswith(f"{len(unplanned)} of these intervals decide no verdict. {sum(excluding)} of them exclude 0")


def test_the_summary_counts_the_verdicts_and_tests_the_rows_together(tmp_path):
    """Alone both differences exclude 0. Together the less certain one, of 0.3 to 3.7 points, does not."""
    finished(tmp_path, "grpo", dict.fromkeys(range(5), 0.5))
    finished(tmp_path, "no-std", {seed: 0.6 + seed / 1000 for seed in range(5)})
    finished(tmp_path, "token-mean", {seed: 0.52 + (seed - 2) / 115 for seed in range(5)})
    finished(tmp_path, "delight-gate", {seed: 0.5 + (seed - 2) / 1000 for seed in range(5)})
    said = claims.summary(tmp_path)
    assert "Of 29 rows, 3 have a verdict: 2 confirmed, 1 refuted here, 0 unresolved." in said
    assert "2 intervals exclude 0" in said and "1 ([std](#std)) of these differences remain" in said
    assert "The next one, [token-mean](#token-mean), has p = 0.0313, and would need 0.025." in said
    assert "3 rows expect" in said and "In 1 ([delight](#delight)) of them, a change" in said


@pytest.mark.parametrize("expected, sign", [("more", 1), ("less", -1)])
def test_a_gain_is_tested_against_the_margin_on_the_side_that_the_claim_expects(expected, sign):
    """At the margin it is as likely as not. 2.776 standard errors below, the one-sided p of five seeds is 2.5 %."""
    at_margin = {seed: sign * (0.02 + (seed - 2) / 100) for seed in range(5)}
    control = dict.fromkeys(range(5), 0.0)
    assert claims.p_of_margin(claim(expected), at_margin, control) == pytest.approx(0.5)
    quantile = 2.77645 * statistics.stdev(at_margin.values()) / 5**0.5
    below = {seed: value - sign * quantile for seed, value in at_margin.items()}
    above = {seed: value + sign * quantile for seed, value in at_margin.items()}
    assert claims.p_of_margin(claim(expected), below, control) == pytest.approx(0.025, abs=1e-5)
    assert claims.p_of_margin(claim(expected), above, control) == pytest.approx(0.975, abs=1e-5)


@pytest.mark.parametrize("count, quantile", [(2, 12.7062), (3, 4.30265), (4, 3.18245), (5, 2.77645), (12, 2.20099)])
def test_a_p_value_is_five_percent_where_the_interval_begins_at_zero(count, quantile):
    """The quantiles are those of tables of Student's t."""
    for mean in (quantile, -quantile):
        assert study.p_value(mean, count**0.5, count) == pytest.approx(0.05, abs=1e-5)
    assert study.p_value(0.0, 1.0, count) == pytest.approx(1.0)


@pytest.mark.parametrize("values", [[0.5], [0.5, 0.5, 0.5], [0.7 - 0.1, 0.6, 0.6]])
def test_equal_seeds_have_no_interval(values):
    """They would have one of width 0, a p-value of 0, and the first place of all tests."""
    found = study.over_seeds(values)
    assert found.mean == pytest.approx(values[0]) and all(map(math.isnan, (found.low, found.high, found.p)))
    assert not found.excludes_zero


def test_holm_stops_at_the_first_difference_that_chance_could_make():
    """With three tests the limits are 1.67, 2.5 and 5 %: "b" fails at 2.5 %, so "c" isn't looked at."""
    assert study.holm({"c": 0.03, "a": 0.01, "b": 0.026}) == ["a"]
    assert study.holm({"c": 0.03, "a": 0.01, "b": 0.024}) == ["a", "b", "c"]
    assert study.holm({"a": 0.02, "b": 0.02, "c": 0.02}) == study.holm({}) == []
    assert study.holm({"nan": math.nan, "a": 0.01, "b": 0.02, "c": 0.9}) == ["a"], "NaN counts as a test"
    assert study.holm({"nan": math.nan, "a": 0.02, "b": 0.9}) == []


def test_a_row_without_runs_says_so(tmp_path):
    found = line(tmp_path, "std")
    assert found["verdict"] == "**0 of 5 seeds**" and found["measure"] == "mean@8, %"
    assert found["arm"] == found["control"] == found["difference"] == ""


def test_a_gain_is_greedy_accuracy_over_that_of_the_first_row(tmp_path):
    """After training 70 and 80 % are right at temperature 0 (0.8 and 0.9 of the samples). Before, it was 50 %."""
    finished(tmp_path, "random-reward", {0: 0.8, 1: 0.9, 2: 0.8, 3: 0.9, 4: 0.85}, accuracy=[0.5, 0.1])
    found = line(tmp_path, "random-reward")
    assert (found["arm"], found["control"]) == ("75.0", "50.0") and found["difference"].startswith("25.0 [")


def test_entropy_is_of_the_second_half_and_length_of_the_last_fifth(tmp_path):
    """The first row, of step 0, has neither."""
    ten = list(range(10))
    finished(tmp_path, "grpo", {0: 0.5}, accuracy=ten, entropy=ten, length=ten)
    (run,) = claims.read_runs(tmp_path, "arithmetic", "grpo").values()
    assert claims.MEASURES["entropy"].of(run) == 7  # 5 to 9
    assert claims.MEASURES["length"].of(run) == 8.5  # 8 and 9


def test_pass_at_8_has_a_measure_of_its_own(tmp_path):
    finished(tmp_path, "max_rl", dict.fromkeys(range(5), 0.6), task="maze")
    finished(tmp_path, "grpo", dict.fromkeys(range(5), 0.4), task="maze")
    found = line(tmp_path, "max-rl")
    assert (found["arm"], found["control"], found["difference"]) == ("70.0", "50.0", "20.0")


def test_entropies_are_those_of_the_seeds_that_differ_most(tmp_path):
    """In step 15 it is the seed's number over 10. From step 21 on it is half of that. Step 20 isn't counted."""
    for seed in range(3):
        entropy = [9.0] * 15 + [seed / 10] + [9.0] * 5 + [seed / 20] * 20
        finished(tmp_path, "grpo", {seed: 0.5}, task="sums", accuracy=[0.1] * 41, entropy=entropy)
    assert claims.entropy_table(tmp_path).splitlines()[2:] == ["| `grpo.py` | 0.00 to 0.20 | 0.00 to 0.10 |"]


def test_an_arm_that_a_guard_ended_early_has_no_late_entropy(tmp_path):
    finished(tmp_path, "grpo", dict.fromkeys(range(3), 0.5), task="sums", accuracy=[0.1] * 11, entropy=[1.0] * 11)
    assert claims.entropy_table(tmp_path).splitlines()[2:] == ["| `grpo.py` | none | none |"]


@pytest.mark.parametrize(
    "source, link",
    [
        ("TPO, 2604.06159, 3.6", "[TPO](https://arxiv.org/abs/2604.06159), 3.6"),
        ("A blog, https://a.b/c/, its end", "[A blog](https://a.b/c/), its end"),
        ("ours", "ours"),
    ],
)
def test_a_source_is_a_link(source, link):
    assert claims.linked(source) == link


def test_the_picture_has_a_line_for_each_row_in_points_with_all_its_seeds(monkeypatch, tmp_path):
    """`length` is in tokens. An interval at 59 points is beyond the edge, and an arrow there."""
    drawn = []
    monkeypatch.setattr(claims.pictures, "save", lambda figure, file: drawn.append(figure))
    for seed in range(5):
        finished(tmp_path, "grpo", {seed: 0.2}, length=[1.0, 2.0])
        finished(tmp_path, "no-std", {seed: 0.79 + seed / 1000}, length=[1.0, 2.0])
        finished(tmp_path, "dr_grpo", {seed: 0.2}, length=[1.0, 2.0 + seed])
        finished(tmp_path, "delight-gate", {seed: 0.1 + seed / 1000})
    finished(tmp_path, "token-mean", {0: 0.5})
    claims.draw(tmp_path, tmp_path / "picture.svg")
    (axis,) = drawn[0].axes
    assert [label.get_text() for label in axis.get_yticklabels()] == ["std", "delight"]
    _, std, _, arrow, delight, dot = axis.lines  # the first is at 0, and the dot of std is beyond the edge
    assert std.get_color() == claims.COLORS["confirmed"] and delight.get_color() == claims.COLORS["refuted here"]
    assert arrow.get_marker() == ">" and list(arrow.get_xdata()) == [claims.EDGE]
    assert list(dot.get_xdata()) == pytest.approx([-9.8]) and list(dot.get_ydata()) == [1]
    assert list(delight.get_xdata()) == pytest.approx([-9.8 - 0.196, -9.8 + 0.196], abs=1e-3)
    assert [text.get_text() for text in axis.texts] == ["+59.2", "-9.8"]


def test_each_run_is_made_once_and_a_seed_of_all_comes_before_the_next():
    cells = claims.cells(("std", "clip-higher", "random-reward"), (0, 1))
    assert [(cell.seed, cell.arm) for cell in cells] == [
        (seed, arm) for seed in (0, 1) for arm in ("no-std", "grpo", "clip-higher", "random-reward")
    ]


def test_sums_has_three_seeds_and_the_embedded_tasks_have_five_unless_seeds_are_named():
    cells = claims.cells(("std", "delight-sums"), ())
    assert [cell.seed for cell in cells if cell.arm == "no-std"] == [0, 1, 2, 3, 4]
    assert [cell.seed for cell in cells if cell.task == "sums" and cell.arm == "grpo"] == [0, 1, 2]
    assert {cell.seed for cell in claims.cells(("std", "delight-sums"), (7,))} == {7}


def test_rows_are_claims_or_all_of_a_kind_of_task():
    assert claims.check_claims(("std", "lora")) == ("std", "lora")
    embedded, sums = claims.check_claims(("embedded",)), claims.check_claims(("sums",))
    assert embedded + sums == tuple(claims.CLAIMS) and "kl" in embedded and "rate-sums" in sums
    with pytest.raises(BadInput, match='"kal" is not a claim; use embedded, sums, or leave-one-out, std'):
        claims.check_claims(("std", "kal"))


@pytest.fixture
def ended(monkeypatch):
    """run() starts no process: this stands in for its algorithm's file and for the evaluation."""
    state = SimpleNamespace(exit_code=0, printed="", last_step=3, checkpoints=1, file="", flags=[], evaluated="")

    def start(words, **named):
        if "merge_lora" in words[1]:
            state.merged, state.merged_dtype = words[2], words[words.index("--dtype") + 1]
            return subprocess.CompletedProcess(words, 0)
        state.file = claims.Path(words[1]).read_text()
        state.flags = words[2:-2]
        run_dir = claims.Path(words[-1])
        run_dir.mkdir()
        if state.checkpoints:
            (run_dir / "checkpoints/step_000003/model").mkdir(parents=True)
            (run_dir / "checkpoints/step_000003/state.json").write_text("{}")
        about = {"commit": "c", "uncommitted_changes": False, "versions": {}, "hardware": {}, "args": {"steps": 3}}
        (run_dir / "run.json").write_text(json.dumps(about))
        rows = [{"step": step, "eval/accuracy": step / 4} for step in range(state.last_step + 1)]
        (run_dir / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        return subprocess.CompletedProcess(words, state.exit_code, state.printed)

    def evaluate(task, model, dataset, recipe):
        state.evaluated = str(model)
        assert recipe == claims.TASKS[task] and bool(dataset) == (task == "reversal")
        return {"sampled": 0.5}

    monkeypatch.setattr(claims.subprocess, "run", start)
    monkeypatch.setattr(claims.baselines, "evaluate", evaluate)
    return state


def test_a_run_trains_its_file_and_evaluates_the_last_checkpoint(ended, tmp_path):
    cell = claims.Cell("arithmetic", "clip-higher", 2)
    claims.run(cell, tmp_path)
    assert ended.file == (ROOT / "algos/grpo.py").read_text()
    assert " ".join(ended.flags) == f"{claims.TASKS['arithmetic']} --clip-high 0.28 --seed 2"
    assert ended.evaluated.endswith("step_000003/model")
    (run,) = claims.read_runs(tmp_path, "arithmetic", "clip-higher").values()
    assert [row["eval/accuracy"] for row in run.rows] == [0, 0.25, 0.5, 0.75]
    assert run.about["evaluation"] == {"sampled": 0.5} and run.about["flags"] == cell.flags()


def test_a_variant_is_the_file_with_its_lines(ended, tmp_path):
    claims.run(claims.Cell("arithmetic", "delight-gate", 0), tmp_path)
    assert ended.file == claims.variants.source("delight-gate")


def test_adapters_are_merged_before_they_are_evaluated(ended, tmp_path):
    claims.run(claims.Cell("arithmetic", "lora-1", 0), tmp_path)
    assert ended.merged.endswith("step_000003/model") and ended.evaluated.endswith("/merged")
    assert ended.merged_dtype == "float32", "as the control's weights"


def test_a_run_that_was_stopped_is_not_kept(ended, tmp_path):
    ended.last_step = 2
    with pytest.raises(RuntimeError, match="step 2"):
        claims.run(claims.Cell("arithmetic", "grpo", 0), tmp_path)
    assert not claims.read_runs(tmp_path, "arithmetic", "grpo")


def test_a_run_that_collapsed_counts_with_its_last_checkpoint(ended, tmp_path):
    ended.exit_code, ended.printed, ended.last_step = 3, "error[no-signal]: nothing to learn", 2
    claims.run(claims.Cell("arithmetic", "grpo", 0), tmp_path)
    assert claims.read_runs(tmp_path, "arithmetic", "grpo")[0].about["ended_by"] == "no-signal"


@pytest.mark.parametrize("last_step", [0, -1])
def test_a_run_that_collapsed_before_its_first_checkpoint_fails_alone(ended, tmp_path, capsys, last_step):
    """There is no model to evaluate, and with last_step -1 not even a row. The other runs go on."""
    ended.exit_code, ended.printed, ended.last_step, ended.checkpoints = 3, "error[no-signal]: at once", last_step, 0
    cells = [claims.Cell("arithmetic", "grpo", seed) for seed in (0, 1)]
    assert study.run_all(cells, lambda cell: claims.run(cell, tmp_path), jobs=1) == 2
    assert "seed 1: error: " in capsys.readouterr().out
    assert not claims.read_runs(tmp_path, "arithmetic", "grpo")


def test_a_model_that_cannot_be_evaluated_fails_alone(ended, monkeypatch, tmp_path, capsys):
    def evaluate(*given):
        raise subprocess.CalledProcessError(2, "scripts/evaluate.py")

    monkeypatch.setattr(claims.baselines, "evaluate", evaluate)
    cells = [claims.Cell("arithmetic", "grpo", seed) for seed in (0, 1)]
    assert study.run_all(cells, lambda cell: claims.run(cell, tmp_path), jobs=1) == 2
    assert "evaluate.py" in capsys.readouterr().out


def test_a_baseline_of_sums_is_read_where_it_is_and_made_by_its_own_script(ended, tmp_path):
    committed = claims.Cell("sums", "grpo", 0).file(claims.COMMITTED)
    assert committed == ROOT / "baselines/sums/grpo/seed0.csv" and committed.is_file()
    assert 0 in claims.read_runs(claims.COMMITTED, "sums", "grpo")
    with pytest.raises(BadInput, match="python scripts/baselines.py --task sums --run grpo --seeds 7$"):
        claims.main(claims.Args(claims=("groups-sums",), seeds=(7,), folder=str(claims.COMMITTED)))
    claims.run(claims.Cell("sums", "grpo", 7), tmp_path)
    assert list(claims.read_runs(tmp_path, "sums", "grpo")) == [7], "from scratch, it is a run as any other"


def test_seeds_beyond_those_fixed_before_change_no_verdict_on_the_page(monkeypatch, tmp_path):
    """Seven seeds, of which 5 and 6 were added later. In a folder of one's own, all count."""
    finished(tmp_path, "grpo", dict.fromkeys(range(7), 0.5))
    finished(tmp_path, "no-std", {seed: 0.5 + (seed - 2) / 100 for seed in range(7)})
    assert line(tmp_path, "std")["seeds"] == "7"
    monkeypatch.setattr(claims, "COMMITTED", tmp_path)
    found = line(tmp_path, "std")
    assert found["seeds"] == "5" and found["arm"] == "50.0", "the mean of seeds 0 to 4"
    assert list(claims.read_runs(tmp_path, "arithmetic", "no-std")) == [*range(5)]


def test_a_baseline_that_is_not_written_to_its_end_has_no_curve(monkeypatch, tmp_path):
    """Its JSON comes first: a curve without one would be read as a run that is done."""
    baselines = claims.baselines
    monkeypatch.setattr(baselines, "BASELINES", tmp_path)
    rows = [{"step": 0, "eval/accuracy": 0.5}, {"step": 5, "eval/accuracy": 2 / 3, "not/kept": 1.0}]
    baselines.keep("sums", "grpo", {"seed": 3}, rows)
    file = tmp_path / "sums/grpo/seed3.csv"
    assert [row["eval/accuracy"] for row in baselines.read_curve(file)] == [0.5, 0.666667]
    assert json.loads(file.with_suffix(".json").read_text()) == {"seed": 3}
    before = file.read_text()
    with pytest.raises(ValueError):
        baselines.keep("sums", "grpo", {"seed": 3, "commit": "another"}, [rows[0], {"step": "five"}])
    assert file.read_text() == before
    assert json.loads(file.with_suffix(".json").read_text()) == {"seed": 3}, "the JSON of the curve that is there"


def test_a_run_that_replaces_another_is_never_a_new_json_beside_an_old_curve(monkeypatch, tmp_path):
    """Whoever is stopped between the two has no curve, and so no run."""
    file = tmp_path / "seed0.csv"
    study.write_run(file, [{"step": 1}], {"commit": "old"}, ["step"])
    replace = Path.replace

    def stopped(path, target):
        if target == file:
            raise KeyboardInterrupt
        return replace(path, target)

    monkeypatch.setattr(Path, "replace", stopped)
    with pytest.raises(KeyboardInterrupt):
        study.write_run(file, [{"step": 2}], {"commit": "new"}, ["step"])
    assert "new" in file.with_suffix(".json").read_text() and not file.exists()


def test_a_study_needs_a_system_that_binds_cores(monkeypatch):
    monkeypatch.delattr(os, "sched_setaffinity")
    with pytest.raises(BadInput, match="needs Linux"):
        study.check_jobs(1)


@pytest.mark.parametrize("args", [{"seeds": (0,)}, {"folder": "runs/mine"}])
def test_flags_of_a_repetition_need_a_claim(args):
    """What is shown without one is what is committed."""
    with pytest.raises(BadInput, match="--seeds and --folder are for claims"):
        claims.main(claims.Args(**args))


@pytest.mark.parametrize(
    "args, says",
    [
        ({"task": "foo", "flags": "grpo"}, "--task foo: use one of arithmetic, "),
        ({"run": ("gpro",)}, "--run gpro: --task arithmetic has .*grpo, grpo-lora"),
        ({"task": "sums", "flags": "grpo-lora"}, "--flags grpo-lora: --task sums has .*rejection"),
        ({"task": "sums", "flags": "start"}, "--flags start: --task sums has "),
        ({"task": "sums", "run": ("strat",)}, "--run strat: --task sums has .*start"),
        ({"task": "sums", "add": ("runs/x",), "name": "grpo-lnog"}, "--name grpo-lnog: --task sums has .*grpo-long"),
        ({"task": "sums", "name": "grpo-long"}, "--name grpo-long: is for --add"),
        ({"task": "gcd", "flags": "gpro"}, "--flags gpro: --task gcd has .*grpo"),
        ({"run": ("start",)}, "--run start: is for sums"),
        ({"task": "sums", "run": ("grpo-avx2",)}, "--run grpo-avx2: it is grpo on a CPU without"),
    ],
)
def test_a_baseline_that_does_not_exist_is_refused_with_those_that_do(args, says):
    with pytest.raises(BadInput, match=says):
        claims.baselines.main(claims.baselines.Args(**args))


COMMITTED = {(file.parts[-3], file.parts[-2]) for file in claims.baselines.BASELINES.glob("*/*/seed*.csv")}
COMMITTED = sorted((task, run) for task, run in COMMITTED if task in claims.baselines.RECIPES)


@pytest.mark.parametrize("task, flags", [*COMMITTED, ("arithmetic", "rloo"), ("hybrid", "grpo")])
def test_the_flags_of_a_baseline_are_printed(capsys, task, flags):
    claims.baselines.main(claims.baselines.Args(task=task, flags=flags))
    commands = claims.baselines.CONTROLS.get((task, flags), [claims.baselines.flags(task, flags)])
    assert capsys.readouterr().out == "\n".join(commands) + "\n"


RAN = {"algorithm": "grpo", "seed": 0, "args": {"steps": 2, "seed": 0}}


@pytest.mark.parametrize(
    "task, name, argv, last, says",
    [
        ("arithmetic", "grpo", ["--eval-every", "5", "--learning-rate", "1e-3"], 2, "ran algos/grpo.py .*1e-3"),
        (
            "arithmetic",
            "grpo",
            ["--eval-every", "5", "--resume", "elsewhere/step_000001"],
            2,
            "ran algos/grpo.py .*--resume",
        ),
        ("arithmetic", "rloo", ["--eval-every", "5"], 2, "the baseline rloo of arithmetic is algos/rloo.py"),
        ("hybrid", "grpo", ["--eval-every", "5"], 2, "the baseline grpo of hybrid is"),
        ("arithmetic", "grpo", ["--eval-every", "5"], 1, "was stopped after step 1 of 2"),
        ("arithmetic", "grpo", ["--eval-every", "5"], -1, "was stopped after step 0 of 2"),  # before its first row
        ("arithmetic", "grpo", ["--eval-every", "5"], 2, "has no complete checkpoint"),
        ("sums", "dpo", [], 2, "dpo of sums is made by several commands; use --run dpo"),
        # The guard's exit code, but after three steps: the memory was full.
        ("calculator", "grpo-off", claims.baselines.flags("calculator", "grpo-off").split(), 3, "after step 3 of 20"),
    ],
)
def test_a_run_with_other_flags_becomes_no_baseline(monkeypatch, tmp_path, task, name, argv, last, says):
    """Its JSON would have the command of the recipe, which is not the one that ran."""
    monkeypatch.setattr(claims.baselines, "BASELINES", tmp_path / "baselines")
    run = RAN | {"argv": ["algos/grpo.py", *argv, "--seed", "0", "--run-dir", str(tmp_path)]}
    (tmp_path / "run.json").write_text(json.dumps(run))
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps({"step": step}) + "\n" for step in range(last + 1)))
    with pytest.raises(BadInput, match=says):
        claims.baselines.add(tmp_path, task, name)
    assert not (tmp_path / "baselines").exists()


@pytest.mark.parametrize("more", [[], ["--resume", "auto"], ["--output", "runs/model"]])
def test_the_order_of_a_runs_flags_and_a_stop_do_not_matter(tmp_path, more):
    argv = ["/elsewhere/algos/grpo.py", "--seed", "0", "--run-dir", "runs/x", "--eval-every", "5", *more]
    claims.baselines.check_ran(tmp_path, RAN | {"argv": argv}, [{"step": 2}], "arithmetic", "grpo")


@pytest.mark.parametrize(
    "words, wanted, same",
    [
        ("--a 1 --b 2 3", "--b 2 3 --a=1", True),
        ("--a 32 --b 8", "--a 8 --b 32", False),
        ("--a 2 --a 1", "--a 1", True),  # the last one counts
        ("--a 2 --a 1", "--a 1 --a 2", False),
        ("--b 2 3", "--b 3 2", False),
        ("--a", "--a 1", False),
    ],
)
def test_commands_are_compared_flag_by_flag(words, wanted, same):
    assert (claims.baselines.by_flag(words.split()) == claims.baselines.by_flag(wanted.split())) == same


@pytest.mark.parametrize("task, run", sorted(claims.baselines.RUNS))
def test_a_baselines_command_is_one_that_its_file_takes(task, run):
    words = claims.baselines.command(task, run, seed=0)
    check_given_once(load(words[0]).Args(), words[1:])


def test_a_trained_model_stays_until_its_results_are_kept(monkeypatch, tmp_path, capsys):
    """Its evaluation may be killed after hours of training."""

    def killed(*given):
        raise RuntimeError("killed")

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(claims.baselines.subprocess, "run", lambda *given, **named: SimpleNamespace(returncode=0))
    monkeypatch.setattr(claims.baselines, "add", killed)
    with pytest.raises(RuntimeError, match="killed"):
        claims.baselines.train("arithmetic", "grpo", 0)
    (folder,) = tmp_path.iterdir()
    assert str(folder / "run") in capsys.readouterr().out
    monkeypatch.setattr(claims.baselines, "add", lambda *given: None)
    claims.baselines.train("arithmetic", "grpo", 0)
    assert list(tmp_path.iterdir()) == [folder]


@pytest.mark.parametrize(
    "flag, one_experiment", [("clip_high", False), ("token_budget", True), ("resume", True), ("seed", True)]
)
def test_seeds_of_a_row_have_the_same_flags(monkeypatch, tmp_path, flag, one_experiment):
    """Except those that change a result by rounding alone."""
    monkeypatch.setattr(claims.baselines, "BASELINES", tmp_path)
    for seed in (0, 1):
        args = {"clip_high": 0.2, "token_budget": 2048, "resume": "", "seed": 0} | {flag: seed}
        claims.baselines.keep("sums", "grpo", {"seed": seed, "args": args}, [{"step": 0, "eval/accuracy": 0.5}])
    if one_experiment:
        assert len(claims.baselines.described("sums", "grpo")) == 2
    else:
        with pytest.raises(SystemExit, match="different flags: clip_high$"):
            claims.baselines.described("sums", "grpo")


@pytest.mark.parametrize("lam, one_experiment", [([1.0, 1.0], True), ([0.9, 1.0], False), ([1.0, 0.9], False)])
def test_a_setting_that_was_split_is_compared_with_its_parts(monkeypatch, tmp_path, lam, one_experiment):
    monkeypatch.setattr(claims.baselines, "BASELINES", tmp_path)
    for seed, args in enumerate(({"lam": lam}, {"lam": 1.0, "critic_lam": 1.0})):
        claims.baselines.keep("sums", "ppo", {"seed": seed, "args": args}, [{"step": 0, "eval/accuracy": 0.5}])
    with nullcontext() if one_experiment else pytest.raises(SystemExit, match="different flags"):
        claims.baselines.described("sums", "ppo")


def test_a_seed_that_is_not_done_is_in_no_table(monkeypatch, tmp_path):
    """Its CSV is missing. The JSON would pair it with the curve of another seed."""
    monkeypatch.setattr(claims.baselines, "BASELINES", tmp_path)
    for seed in (0, 1):
        claims.baselines.keep("sums", "grpo", {"seed": seed, "args": {}}, [{"step": 0, "eval/accuracy": 0.5}])
    (tmp_path / "sums/grpo/seed0.csv").unlink()
    assert [each["seed"] for each in claims.baselines.described("sums", "grpo")] == [1]


def test_an_accuracy_of_ungraded_responses_is_none(monkeypatch):
    said = {"greedy": 0.5, "ungraded": {"greedy": 2}}
    answer = SimpleNamespace(stdout=json.dumps(said) + "\n")
    monkeypatch.setattr(claims.baselines.subprocess, "run", lambda *given, **named: answer)
    with pytest.raises(RuntimeError, match="could not be graded"):
        claims.baselines.evaluate("sums", "model")


def test_a_model_that_is_made_first_can_be_made_again(monkeypatch, tmp_path):
    """After an interruption: the run directory is another one each time."""
    commands = []
    monkeypatch.setattr(claims.baselines, "ROOT", tmp_path)
    monkeypatch.setattr(claims.baselines.subprocess, "run", lambda words, **named: commands.append(words))
    for _ in range(2):
        claims.baselines.prepare("sums", "opd")
    first, second = (words[words.index("--run-dir") + 1] for words in commands)
    assert first != second and commands[0].count("--run-dir") == 1


@pytest.mark.parametrize("error", [RuntimeError("exit code 1"), OSError("exit code 1")])
def test_a_failure_of_one_run_leaves_the_others_and_is_counted(capsys, error):
    def run(cell):
        if cell == "second":
            raise error
        return "fine"

    assert study.run_all(["first", "second", "third"], run, jobs=1) == 1
    printed = capsys.readouterr().out
    assert "2 of 3: second: error: exit code 1" in printed and "3 of 3: third: fine" in printed


def test_the_one_problem_has_a_carry_and_fills_a_step(monkeypatch, tmp_path):
    monkeypatch.setattr(claims, "ROOT", tmp_path)
    claims.write_one_problem()
    lines = (tmp_path / claims.ONE_PROBLEM).read_text().splitlines()
    (row,) = {line: json.loads(line) for line in lines}.values()
    first, second = map(int, row["question"].rstrip("=").split("+"))
    assert len(lines) == 64 and first % 10 + second % 10 > 9 and row["answer"] == str(first + second)
    assert row["question"] in {each["question"] for each in claims.arithmetic.problems("train")}


def test_a_problem_of_reversal_is_its_digits_backwards_and_is_shown_with_random_ones(monkeypatch, tmp_path):
    """64 demonstrations of each of 64 problems: about one in 64 is right."""
    monkeypatch.setattr(claims, "ROOT", tmp_path)
    claims.write_reversal()
    folder = tmp_path / claims.REVERSAL
    problems, shown = (
        [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]
        for name in ("problems", "demonstrations")
    )
    assert len(problems) == len({row["question"] for row in problems}) == 2**claims.REVERSED
    assert {"question": "reverse 112212=", "answer": "212211"} in problems
    assert len(shown) == 64 * len(problems) and all(len(row["solution"]) == claims.REVERSED for row in shown)
    assert 30 < sum(row["solution"] == row["answer"] for row in shown) < 100
    assert (ROOT / claims.baselines.REVERSAL_START / "model.safetensors").is_file()


def test_an_arm_differs_from_its_control_in_one_thing():
    """The flags beyond the task's, the file and the variant. Only `length` and `delight` compare with a variant."""
    for name, each in claims.CLAIMS.items():
        if not each.control:
            continue
        arm, control = claims.ARMS[each.arm], claims.ARMS[each.control]
        assert arm != control, name
        if arm.algorithm == control.algorithm and arm.variant == control.variant:
            assert arm.flags.startswith(control.flags), name
        else:
            assert arm.flags == control.flags or each.arm == "entropy-bonus" or each.control == "snapshot-kl", name


def test_every_claim_has_a_section_on_the_page():
    titles = re.findall(r"^### (.+)$", claims.PAGE.read_text(), re.MULTILINE)
    assert titles == list(claims.CLAIMS)


def without_seed_0(name: str) -> str:
    """Difference and interval of a row, by the claim's own measure."""
    measure = claims.MEASURES[claims.CLAIMS[name].measure]
    arm, control = claims.compared(claims.COMMITTED, claims.CLAIMS[name], measure)
    return measure.text(study.paired({seed: arm[seed] for seed in arm if seed}, control))


def test_a_section_quotes_the_intervals_of_its_own_row():
    """A run that is repeated changes the tables, and would leave the text as it was."""
    tables = "\n".join(claims.page_parts(claims.COMMITTED).values()).splitlines()
    quoted = []
    for section in re.split(r"^### ", claims.PAGE.read_text(), flags=re.MULTILINE)[1:]:
        name, _, text = section.partition("\n")
        text = " ".join(text.split())
        known = [line for line in tables if line.startswith(f"| [{name}]")]
        known += [without_seed_0(name)] if re.search("ithout (it|seed 0)", text) else []
        known += ["[-27.9, -3.0]"] if name == "random-reward" else []  # of runs that were replaced
        found = re.findall(r"\[-?\d+\.\d+, -?\d+\.\d+\]", text)
        strange = [interval for interval in found if not any(interval in each for each in known)]
        assert not strange, f"{name}: {strange}"
        quoted += found
    assert len(quoted) > 40


def test_the_pages_count_the_verdicts_of_the_table():
    verdicts = re.findall(r"\*\*(confirmed|refuted here|unresolved)\*\*", claims.table(claims.COMMITTED))
    words = ["none", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven"]
    words += ["twelve", "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen", "twenty"]
    confirmed, refuted, unresolved = (
        words[verdicts.count(kind)] for kind in ("confirmed", "refuted here", "unresolved")
    )
    says = f"{confirmed} are confirmed, {refuted} refuted on these tasks, and {unresolved} unresolved"
    assert f"Of {len(verdicts)} rows, {says}" in (ROOT / "docs/evidence.md").read_text()


def test_the_committed_tables_are_what_the_runs_give():
    for name, text in claims.page_parts(claims.COMMITTED).items():
        assert claims.blocks.read(claims.PAGE, name) == text, name


def test_the_committed_differences_are_what_the_runs_give():
    text = claims.DIFFERENCES.read_text()
    assert text == claims.differences(claims.COMMITTED)
    rows = [line.split(",") for line in text.splitlines()[1:]]
    of_critic = [float(row[-1]) for row in rows if row[0] == "critic"]
    (line,) = (line for line in claims.table(claims.COMMITTED).splitlines() if "[critic]" in line)
    assert f"| {100 * statistics.mean(of_critic):.1f} [" in line


def test_the_committed_picture_is_what_the_runs_give(tmp_path):
    claims.draw(claims.COMMITTED, tmp_path / "intervals.svg")
    assert (tmp_path / "intervals.svg").read_text() == claims.PICTURE.read_text()


def test_the_pages_table_of_tasks_has_their_flags():
    """| task | problem | model | start | steps | prompts x responses | updates per step | learning rate | seeds |"""

    def flag(words: list[str], name: str) -> str:
        return words[words.index(f"--{name}") + 1] if f"--{name}" in words else "1"

    for task, flags in claims.TASKS.items():
        words = flags.split()
        (found,) = re.findall(rf"^\| `{task}` \| .+ \| .+ % \| (.+) \|$", claims.PAGE.read_text(), re.MULTILINE)
        updates = int(flag(words, "mini-batches")) * int(flag(words, "epochs"))
        sizes = f"{flag(words, 'prompts-per-step')} x {flag(words, 'group-size')}"
        expected = [flag(words, "steps"), sizes, str(updates), flag(words, "learning-rate"), str(claims.SEEDS[task])]
        assert found.split(" | ") == expected


# Its clone had a new file in algos/ that nothing imports. The section of docs/claims.md says so.
WITH_A_STRAY_FILE = claims.Cell("sums", "delight-gate", 2)


def test_the_committed_runs_are_of_committed_code_and_of_these_flags():
    for file in claims.COMMITTED.glob("*/*/*.json"):
        task, arm = file.parts[-3:-1]
        about = json.loads(file.read_text())
        cell = claims.Cell(task, arm, about["seed"])
        assert cell.file(claims.COMMITTED).with_suffix(".json") == file and about["flags"] == cell.flags()
        assert about["variant"] == claims.ARMS[arm].variant
        assert about["commit"] and about["uncommitted_changes"] == (cell == WITH_A_STRAY_FILE), file
