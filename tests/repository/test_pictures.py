"""The pictures of scripts/baselines.py say what the CSVs do, for any number of runs and seeds."""

import json
import statistics

import pytest
from helpers import load
from matplotlib.collections import PolyCollection
from numpy.testing import assert_allclose

baselines = load("scripts/baselines.py")
EVERY = 100  # responses between two evaluations of `write`


@pytest.fixture
def drawn(monkeypatch, tmp_path):
    """Baselines are read from an empty folder, and the figure of each picture is kept in a list."""
    figures = []
    monkeypatch.setattr(baselines, "BASELINES", tmp_path)
    monkeypatch.setattr(baselines.pictures, "save", lambda figure, path: figures.append(figure))
    return figures


def write(folder, task: str, run: str, *seeds: list[float]) -> None:
    """A run with these accuracies, a list for each seed."""
    (folder / task / run).mkdir(parents=True)
    for seed, accuracies in enumerate(seeds):
        rows = [f"{step},{accuracy}\n" for step, accuracy in enumerate(accuracies)]
        (folder / task / run / f"seed{seed}.csv").write_text("step,eval/accuracy\n" + "".join(rows))
        about = {"args": {"seed": seed, "prompts_per_step": EVERY // 4, "group_size": 4}, "seed": seed}
        (folder / task / run / f"seed{seed}.json").write_text(json.dumps(about))


def panels(figure) -> dict:
    """{name of a run: its panel}"""
    return {axis.get_title(loc="left"): axis for axis in figure.axes}


def lines(axis) -> list[list[tuple[float, float]]]:
    """Points of the lines, from the one behind to the one in front."""
    return [list(zip(*line.get_data())) for line in sorted(axis.lines, key=lambda line: line.get_zorder())]


def bands(axis) -> list[set[tuple[float, float]]]:
    """Corners of the bands, from the one behind to the one in front."""
    found = [artist for artist in axis.collections if isinstance(artist, PolyCollection)]
    found.sort(key=lambda band: band.get_zorder())
    return [{tuple(point) for path in band.get_paths() for point in path.vertices.tolist()} for band in found]


def test_a_panel_has_the_mean_of_its_run_the_band_of_its_seeds_and_grpo_behind_it(drawn, tmp_path):
    write(tmp_path, "task", "dapo", [0.1, 0.3, 0.5], [0.3, 0.5, 0.9, 1.0])
    write(tmp_path, "task", "grpo", [0.2, 0.4, 0.6], [0.2, 0.5, 0.8], [0.2, 0.6, 0.7])
    baselines.draw("task")
    shown = panels(drawn[0])
    assert list(shown) == ["grpo", "dapo"]
    x = [0, EVERY, 2 * EVERY]
    grpo, dapo = (
        [0.2, 0.5, 0.7],
        [0.2, 0.4, 0.7],
    )  # the second seed's further evaluation has nothing to be averaged with
    assert_allclose(lines(shown["dapo"]), [list(zip(x, grpo)), list(zip(x, dapo))])
    assert_allclose(lines(shown["grpo"]), [list(zip(x, grpo))])  # of the same shape, too
    behind, own = bands(shown["dapo"])
    assert {(0, 0.2), (EVERY, 0.4), (EVERY, 0.6), (2 * EVERY, 0.6), (2 * EVERY, 0.8)} <= behind
    assert {(0, 0.1), (0, 0.3), (2 * EVERY, 0.5), (2 * EVERY, 0.9)} <= own
    every_line, every_band = shown["dapo"].lines, shown["dapo"].collections
    of_grpo, of_dapo = (
        [artist for artist in (*every_line, *every_band) if artist.get_zorder() == zorder] for zorder in (1, 2)
    )
    assert len(of_grpo) == len(of_dapo) == 2, "grpo's line is behind the band of dapo, too"


def test_the_last_mean_stands_at_the_end_of_the_line(drawn, tmp_path):
    write(tmp_path, "task", "rloo", [0.1, 0.3, 0.5], [0.3, 0.5, 0.9])
    write(tmp_path, "task", "remax", [0.1, 0.3, 0.5, 0.25])
    baselines.draw("task")
    for name, number, end in (("rloo", "70", (2 * EVERY, 0.7)), ("remax", "25", (3 * EVERY, 0.25))):
        (text,) = panels(drawn[0])[name].texts
        assert number in text.get_text() and text.xy == pytest.approx(end)


def test_a_task_without_grpo_has_nothing_behind_its_runs(drawn, tmp_path):
    write(tmp_path, "task", "rloo", [0.1, 0.3, 0.5])
    write(tmp_path, "task", "ppo", [0.1, 0.2, 0.3])
    baselines.draw("task")
    assert all(len(axis.lines) == 1 for axis in panels(drawn[0]).values())


@pytest.mark.parametrize("number", [1, 2, 3, 4, 5, 13, 20])
def test_runs_with_a_curve_have_panels_with_the_same_axes(drawn, tmp_path, number):
    """Numbers stand below the lowest panel of each column. No panel or title covers another."""
    for run in range(number):
        write(tmp_path, "task", f"run{run:02}", [0, 0, 0.01 * run], [0, 0, 0.04 * run + 0.05])
    write(tmp_path, "task", "sft", [0, 0.5])
    baselines.draw("task")
    (figure,) = drawn
    shown = panels(figure)
    assert list(shown) == [f"run{run:02}" for run in range(number)], "sft has no curve"
    assert len({(axis.get_xlim(), axis.get_ylim()) for axis in shown.values()}) == 1
    low, high = figure.axes[0].get_ylim()
    assert low == 0 and high >= 0.04 * (number - 1) + 0.05, "no band is cut off"
    figure.canvas.draw()
    boxes = [axis.get_tightbbox() for axis in shown.values()]
    for place, box in enumerate(boxes):
        assert not any(box.overlaps(other) for other in boxes[:place])
        assert figure.bbox.x0 <= box.x0 and box.x1 <= figure.bbox.x1
    lowest = {axis.get_position().x0: axis for axis in figure.axes}  # rows come from above
    for axis in figure.axes:
        numbered = any(tick.label1.get_visible() for tick in axis.xaxis.get_major_ticks())
        assert numbered == (axis in lowest.values())


def test_a_task_whose_runs_have_no_curve_has_no_picture(drawn, tmp_path):
    write(tmp_path, "task", "sft", [0, 0.5])
    baselines.draw("task")
    assert not drawn


def test_the_readmes_first_picture_is_right_that_grpo_learns_and_coin_flips_teach_nothing(monkeypatch):
    """A gain is one if it is above two standard errors of 256 problems."""
    figures = []
    monkeypatch.setattr(baselines.pictures, "save", lambda figure, path: figures.append(figure))
    baselines.draw_front()
    (axis,) = figures[0].axes
    ends = {text.get_text().split()[0]: text.xy for text in axis.texts}
    assert len(ends) == 2 and ends.keys() == {"GRPO", "random"}
    for name, run, learns in (("GRPO", "grpo", True), ("random", "grpo-random", False)):
        seeds = baselines.curves("sums")[run]
        accuracies = [[row["eval/accuracy"] for row in rows if "eval/accuracy" in row] for rows in seeds]
        before, after = (statistics.mean(values[place] for values in accuracies) for place in (0, -1))
        assert ends[name][1] == pytest.approx(after)
        assert f"{100 * after:.0f} %" in "".join(text.get_text() for text in axis.texts)
        error = (2 * before * (1 - before) / (256 * len(seeds))) ** 0.5
        assert (after - before > 2 * error) == learns
