"""scripts/staleness.py: batches that wait are exactly as old as it says, and its tables say what the CSVs do."""

import json
import math
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT, launch
from helpers import load, metrics, same, weights

from common.errors import BadInput
from common.placement import Layout
from common.rollout.rollout import collate
from common.run.tracking import Metrics

staleness = load("scripts/staleness.py")
STEPS = 4
PROMPTS = 4
SHORT = f"--rollout-backend hf --steps {STEPS} --prompts-per-step {PROMPTS} --group-size 4 --mini-batches 2 "
SHORT += "--eval-prompts 8 --eval-every 1 --learning-rate 2e-3 --rollouts-every 1 --save-every 2 --max-logprob-gap 100"


def own(row: dict) -> dict:
    """A line of metrics.jsonl without what the script adds to it."""
    return {name: value for name, value in row.items() if not name.startswith(("masked/", "overlapped/"))}


def prompts_of(run_dir, step: int) -> list[str]:
    (file,) = (run_dir / "rollouts").glob(f"*{step:06d}*")
    return [json.loads(line)["prompt"] for line in file.read_text().splitlines()]


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> dict:
    """Run directories: of algos/grpo.py by itself, and with a staleness of 0 and 2."""
    folder = tmp_path_factory.mktemp("runs")
    folders = {"plain": folder / "plain", 0: folder / "0", 2: folder / "2"}
    launch(ROOT / "algos/grpo.py", *SHORT.split(), "--run-dir", folders["plain"])
    for k in (0, 2):
        launch(ROOT / "tests/workers/staleness.py", k, *SHORT.split(), "--run-dir", folders[k])
    return folders


def test_without_staleness_it_is_the_plain_run(runs):
    plain = metrics(runs["plain"])
    assert [own(row) for row in metrics(runs[0])] == plain and len(plain) == STEPS + 1
    assert same(weights(runs[0], STEPS), weights(runs["plain"], STEPS))


def test_tokens_are_as_old_as_the_staleness_once_so_many_steps_have_passed(runs):
    rows = metrics(runs[2])[1:]
    for age in ("mismatch/staleness", "mismatch/staleness_max"):
        assert [row[age] for row in rows] == [0, 1, 2, 2]
    gaps = [row["mismatch/logprob_abs_mean"] for row in rows]
    assert gaps[0] < 1e-5 and min(gaps[1:]) > 1e-3, "the weights have changed since then"


def test_a_batch_that_waits_has_its_own_metrics_and_prompts(runs):
    """The first step is the same for every staleness: its responses, its update, and the evaluation after it. Later
    steps have the same prompts. Their responses are of other weights.
    """
    now, waited = metrics(runs["plain"]), [own(row) for row in metrics(runs[2])]
    assert waited[:2] == now[:2] and waited[2] != now[2]
    for step in range(1, STEPS + 1):
        assert prompts_of(runs[2], step) == prompts_of(runs["plain"], step)


def test_a_checkpoint_goes_on_with_the_next_prompts_although_later_ones_are_drawn(runs):
    for step in (2, STEPS):
        state = runs[2] / "checkpoints" / f"step_{step:06d}" / "state.json"
        assert json.loads(state.read_text())["position"] == step * PROMPTS


@pytest.mark.parametrize(
    "k, sampled",
    [
        (0, [(1, 0), (2, 1), (3, 2), (4, 3), (5, 4)]),
        (2, [(1, 0), (2, 0), (3, 0), (4, 1), (5, 2)]),
        (8, [(1, 0), (2, 0), (3, 0), (4, 0), (5, 0)]),
    ],
)
def test_each_step_is_sampled_once_under_its_own_number(world, k, sampled):
    """sampled: each step of five, and how many updates its weights have had."""
    engine = SimpleNamespace(weight_version=0)
    loader = SimpleNamespace(in_flight=None)
    tracker = Metrics(world)
    calls = []

    def sample(step, sampler):
        calls.append((step, engine.weight_version))
        assert sampler.step == sampler.metrics.step == step
        sampler.drawn_until = 10 * step
        sampler.metrics.mean("reward/mean", step)
        return collate([[1]], [[5, step]], [[-1.0, -1.0]], [True], engine.weight_version, torch.device("cpu"))

    early = staleness.Early(sample, loader, None, None, world, tracker, Layout(), engine)
    early.staleness = k
    for step in range(1, 6):
        batch = early.get(step, last_step=5)
        assert batch.response_ids == [[5, step]] and tracker.sampled is batch
        assert loader.trained_until == 10 * step
        assert tracker.sums.pop("reward/mean") == [(step, 1)]
        engine.weight_version += 1
    assert calls == sampled


@pytest.mark.parametrize("versions, holds", [([[5, 5]], True), ([[5, 6]], False), ([[4, 5]], False)])
def test_one_token_of_another_age_ends_the_run(versions, holds):
    """In step 8 the engine has had 7 updates. A staleness of 2 asks for weights after 5."""
    early = staleness.Early.__new__(staleness.Early)
    early.staleness, early.engine = 2, SimpleNamespace(weight_version=7)
    batch = collate([[1]], [[5, 6]], [[-1.0, -1.0]], [True], versions, torch.device("cpu"))
    if holds:
        early.check_ages(batch, 8)
    else:
        with pytest.raises(AssertionError, match="step 8"):
            early.check_ages(batch, 8)


def test_shares_that_the_masks_leave_out(world):
    """Weights of two responses: 6, 0.4 and 1; 0.9 and 4. Their products: 2.4 and 3.6. The third is not trained on."""
    old = [[math.log(6), math.log(0.4), 0.0], [math.log(0.9), math.log(4), 0.0], [9.0, 9.0, 9.0]]
    batch = collate([[1]] * 3, [[5, 6, 7], [5, 6], [5]], [[0.0] * 3, [0.0] * 2, [0.0]], [True] * 3, 0, "cpu")
    metrics = Metrics(world)
    staleness.record_masks(metrics, torch.tensor(old), batch, torch.tensor([True, True, False]))
    assert metrics.sums == {"masked/icepop": [(2, 5)], "masked/sequence": [(1, 2)]}


def finished(folder, correction: str, k: int, accuracies: dict[int, float], kl: float = 0.5, ended_by=None) -> None:
    """The files of runs of one staleness and correction, with these final accuracies."""
    for seed, accuracy in accuracies.items():
        rows = [
            {"step": 0, "eval/accuracy": 0.5},
            {"step": 1, "mismatch/kl": 0.0, "masked/icepop": 0.0, "masked/sequence": 0.0},
            {"step": 2, "mismatch/kl": 2 * kl, "masked/icepop": 0.5, "masked/sequence": 1.0, "eval/accuracy": accuracy},
        ]
        file = staleness.Cell("arithmetic", correction, k, seed).file(folder)
        staleness.study.write_run(file, rows, {"ended_by": ended_by}, staleness.COLUMNS)


class Process:
    """Stands in for the process of a run of three steps: it writes what such a run would."""

    exitcode, printed, last_step = 0, "step 3\n", 3

    def __init__(self, target, args):
        _, file, self.flags, self.log = args
        Process.file = Path(file).read_text()

    def start(self):
        self.log.write_text(self.printed)
        run_dir = Path(self.flags[self.flags.index("--run-dir") + 1])
        run_dir.mkdir()
        about = {"commit": "c", "uncommitted_changes": False, "versions": {}, "hardware": {}, "args": {"steps": 3}}
        (run_dir / "run.json").write_text(json.dumps(about))
        rows = [{"step": step, "eval/accuracy": step / 4} for step in range(self.last_step + 1)]
        (run_dir / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def join(self):
        pass


@pytest.mark.parametrize(
    "exit_code, printed, last_step, ended_by",
    [
        (0, "step 3\n", 3, None),
        (3, "error[all-truncated]: step 2: every response ...\n", 2, "all-truncated"),
        (3, "error[engine-memory]: vLLM does not start ...\n", 2, "not kept"),
        (1, "error[all-truncated]: ...\nTraceback ...\n", 2, "not kept"),
        (0, "stopped by SIGTERM\n", 2, "not kept"),
    ],
)
def test_a_run_is_kept_if_it_is_whole_or_collapsed(monkeypatch, tmp_path, exit_code, printed, last_step, ended_by):
    """Any other failure is of this machine, and the same command repeats it."""
    changes = {"exitcode": exit_code, "printed": printed, "last_step": last_step}
    context = SimpleNamespace(Process=type("Other", (Process,), changes))
    monkeypatch.setattr(staleness.multiprocessing, "get_context", lambda kind: context)
    cell = staleness.Cell("arithmetic", "icepop", 4, 2)
    if ended_by == "not kept":
        with pytest.raises(RuntimeError):
            staleness.run(cell, tmp_path, 0)
        assert not staleness.read_runs(tmp_path, "arithmetic")
        return
    staleness.run(cell, tmp_path, 0)
    (rows,) = staleness.read_runs(tmp_path, "arithmetic")["icepop", 4].values()
    assert [row["step"] for row in rows] == list(range(last_step + 1))
    assert staleness.study.final_accuracy(rows) == last_step / 4
    about = json.loads(cell.file(tmp_path).with_suffix(".json").read_text())
    assert about["ended_by"] == ended_by and about["flags"] == cell.flags()
    assert Process.file == staleness.variants.source("icepop"), "it ran the variant"


def test_a_process_that_is_killed_before_its_first_word_fails_alone(monkeypatch, tmp_path, capsys):
    """It has not even opened its log."""
    process = SimpleNamespace(start=lambda: None, join=lambda: None, exitcode=-9)
    context = SimpleNamespace(Process=lambda target, args: process)
    monkeypatch.setattr(staleness.multiprocessing, "get_context", lambda kind: context)
    cells = [staleness.Cell("arithmetic", "none", 0, seed) for seed in (0, 1)]
    assert staleness.study.run_all(cells, lambda cell: staleness.run(cell, tmp_path, 0), jobs=1) == 2
    assert "seed 1: error: exit code -9" in capsys.readouterr().out


def test_runs_that_a_guard_has_ended_in_their_first_step_have_a_line(tmp_path):
    """Their one row is the evaluation before it, which has no KL and leaves nothing out."""
    cell = staleness.Cell("arithmetic", "icepop", 8, 0)
    rows = [{"step": 0, "eval/accuracy": 0.5}]
    staleness.study.write_run(cell.file(tmp_path), rows, {"ended_by": "non-finite"}, staleness.COLUMNS)
    (line,) = staleness.table(tmp_path, "arithmetic").splitlines()[2:]
    assert line == "| 8 | icepop | 1 (1 ended early) | 50.0 |  |  |  |  |"


def test_a_run_that_is_named_twice_is_made_once(tmp_path):
    """Two jobs would write the same files at the same time."""
    cells = staleness.missing(staleness.Args(ks=(0, 2, 0), corrections=("tis",), seeds=(0, 0)), tmp_path)
    assert [(cell.k, cell.seed) for cell in cells] == [(0, 0), (2, 0)]


@pytest.fixture
def study(tmp_path):
    """Three seeds of 80, 90 and 94 % without staleness. Then the accuracy falls by 10, 11 and 12 points."""
    finished(tmp_path, "none", 0, {0: 0.80, 1: 0.90, 2: 0.94})
    finished(tmp_path, "none", 4, {0: 0.70, 1: 0.79, 2: 0.82})
    finished(tmp_path, "icepop", 0, {0: 0.80, 1: 0.91, 2: 0.93})
    finished(tmp_path, "icepop", 4, {0: 0.75, 1: 0.70, 3: 0.99}, ended_by="all-truncated")
    return tmp_path


def cells(study) -> dict[tuple[str, str], list[str]]:
    """(k, correction) -> the other cells of its line."""
    lines = [line.strip("| ").split(" | ") for line in staleness.table(study, "arithmetic").splitlines()[2:]]
    return {(line[0], line[1]): line[2:] for line in lines}


def test_an_accuracy_has_students_interval_over_the_seeds(study):
    """The mean of 80, 90 and 94 is 88, the standard deviation 7.211. 4.303 x 7.211 / sqrt(3) = 17.91, up to 100."""
    assert cells(study)["0", "none"][1] == "88.0 [70.1, 100.0]"
    five = staleness.study.over_seeds([0.1, 0.2, 0.3, 0.4, 0.5])
    assert five.high - five.mean == pytest.approx(2.776 * math.sqrt(0.025) / math.sqrt(5), rel=1e-3)
    assert str(staleness.study.over_seeds([0.5])) == "50.0", "one seed has no interval"


def test_differences_are_of_equal_seeds_and_bold_where_the_interval_excludes_zero(study):
    """Falls of 10, 11 and 12 are 11 +- 4.303 / sqrt(3), although the seeds differ by 14 points.

    IcePop's run of seed 2 is missing. Seeds 0 and 1 differ by +5 and -9 from none, and by -5 and -21 from k = 0.
    """
    table = cells(study)
    assert table["4", "none"][2:4] == ["**-11.0 [-13.5, -8.5]**", ""]
    assert table["4", "icepop"][2:4] == ["-13.0 [-114.6, 88.6]", "-2.0 [-90.9, 86.9]"]
    assert table["0", "none"][2:4] == ["", ""]
    assert table["0", "icepop"][2:4] == ["", "0.0 [-2.5, 2.5]"]


def test_a_line_names_what_was_left_out_and_which_runs_ended_early(study):
    finished(study, "sequence-mask", 4, {0: 0.7})
    table = cells(study)
    assert table["4", "icepop"][0] == "3 (3 ended early)" and table["4", "none"][0] == "3"
    assert table["4", "icepop"][4:] == ["5.0e-01", "25.00% of tokens"]
    assert table["4", "sequence-mask"][4:] == ["5.0e-01", "50.00% of responses"]
    assert table["4", "sequence-mask"][2:4] == ["", "0.0"], "one seed is never bold"


def test_a_study_that_was_stopped_goes_on_with_what_is_missing(study):
    args = staleness.Args(ks=(0, 4), corrections=("none", "icepop"), seeds=(0, 2))
    assert staleness.missing(args, study) == [staleness.Cell("arithmetic", "icepop", 4, 2)]
    args = staleness.Args(ks=(1,), corrections=("none", "tis"), seeds=(0, 1))
    order = [(cell.seed, cell.correction) for cell in staleness.missing(args, study)]
    assert order == [(0, "none"), (0, "tis"), (1, "none"), (1, "tis")]


def test_rebuilding_writes_the_table_between_the_marks_and_the_same_figure_each_time(study):
    page = study / "README.md"
    page.write_text("before\n<!-- staleness arithmetic -->\nold\n<!-- /staleness arithmetic -->\nafter\n")
    staleness.rebuild(study)
    figure = (study / "arithmetic/accuracy.svg").read_bytes()
    text = page.read_text()
    assert text.startswith("before\n") and text.endswith("\nafter\n") and "old" not in text
    assert staleness.table(study, "arithmetic") in text
    staleness.rebuild(study)
    assert page.read_text() == text and (study / "arithmetic/accuracy.svg").read_bytes() == figure


def test_a_corrections_panel_has_a_dot_for_each_run_and_no_correction_behind_their_mean(study, monkeypatch):
    figures = []
    monkeypatch.setattr(staleness.pictures, "save", lambda figure, path: figures.append(figure))
    staleness.draw(study, "arithmetic")
    panels = {axis.get_title(loc="left"): axis for axis in figures[0].axes}
    runs = staleness.read_runs(study, "arithmetic")
    assert list(panels) == ["none", "icepop"] and {k for _, k in runs} == {0, 4}
    finals = {  # place of k -> accuracies
        name: [[staleness.study.final_accuracy(rows) for rows in runs[name, k].values()] for k in (0, 4)]
        for name in panels
    }
    means = {name: [sum(each) / len(each) for each in finals[name]] for name in panels}
    for name, axis in panels.items():
        dots = [tuple(line.get_ydata()) for line in axis.lines if line.get_linestyle() == "None"]
        assert dots == [tuple(each) for each in finals[name]]
        lines = [line for line in axis.lines if line.get_linestyle() == "-"]
        expected = [means["none"]] * (name != "none") + [means[name]]  # from the one behind to the one in front
        assert [pytest.approx(line.get_ydata()) for line in lines] == expected
        (text,) = axis.texts
        assert text.xy == pytest.approx((1, means[name][-1]))
        assert f"{100 * means[name][-1]:.0f} %" == text.get_text()


@pytest.mark.parametrize("task", staleness.TASKS)
def test_the_committed_figure_is_what_the_csvs_give(task, tmp_path):
    shutil.copytree(staleness.FOLDER / task, tmp_path / task, ignore=shutil.ignore_patterns("*.svg"))
    staleness.draw(tmp_path, task)
    assert (tmp_path / task / "accuracy.svg").read_bytes() == (staleness.FOLDER / task / "accuracy.svg").read_bytes()


@pytest.mark.parametrize("task", staleness.TASKS)
def test_the_committed_table_is_what_the_csvs_give(task):
    page = staleness.FOLDER / "README.md"
    assert staleness.blocks.read(page, f"staleness {task}") == staleness.block(staleness.FOLDER, task)


def test_the_committed_runs_are_of_one_recipe_and_of_committed_code():
    for file in staleness.FOLDER.glob("*/*/*.json"):
        task, correction = file.parts[-3:-1]
        about = json.loads(file.read_text())
        cell = staleness.Cell(task, correction, about["staleness"], about["seed"])
        assert cell.file(staleness.FOLDER).with_suffix(".json") == file and about["flags"] == cell.flags()
        assert about["commit"] and not about["uncommitted_changes"], file


@pytest.mark.parametrize(
    "changes, names",
    [
        ({"corrections": ("none", "mask")}, "icepop"),
        ({"task": "gcd"}, "sums"),
        ({"ks": (-1,)}, "--ks"),
        ({"steps": 4}, "--folder"),
        ({"jobs": 1000}, "--jobs"),
    ],
)
def test_a_study_that_cannot_be_is_refused(changes, names):
    with pytest.raises(BadInput, match=names):
        staleness.check_args(staleness.Args(**changes), staleness.FOLDER)


@pytest.mark.parametrize("correction", staleness.CORRECTIONS)
def test_only_staleness_widens_the_allowed_gap(correction):
    """Without staleness the gap is rounding, and a wide limit would hide an engine that samples something else."""
    fresh = staleness.Cell("arithmetic", correction, 0, 3).flags()
    old = staleness.Cell("arithmetic", correction, 8, 3).flags()
    assert "--max-logprob-gap" not in fresh and old == f"{fresh} --max-logprob-gap 100"
    assert "--seed 3" in fresh and "--eval-every 5" in fresh
