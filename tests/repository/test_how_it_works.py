"""docs/how-it-works.md: its code is the repository's, its numbers are what the script and the runs give."""

import json
import re
import subprocess
import sys

import pytest
import torch
from conftest import ROOT
from helpers import load

from common.errors import BadInput

walkthrough = load("scripts/walkthrough.py")
one_batch = walkthrough.one_batch
variants = walkthrough.variants
PAGE = walkthrough.PAGE.read_text()
DIFFS = walkthrough.diffs(PAGE)
# Blocks of the walk without numbers that depend on the processor.
EXACT = ("walk-prompt", "walk-sample", "walk-grade", "walk-push")


@pytest.mark.parametrize("name", DIFFS)
def test_a_diff_breaks_a_file_that_is_here(name):
    diff = DIFFS[name]
    file = variants.base(diff)
    broken = walkthrough.broken_source(diff)
    assert broken != (ROOT / file).read_text()
    compile(broken, file, "exec")


def test_a_diff_that_no_longer_fits_is_an_error():
    with pytest.raises(BadInput, match="0 places"):
        walkthrough.broken_source("--- algos/grpo.py\n@@\n-    no such line\n+    another\n")


def test_quoted_lines_are_in_the_file_that_is_named():
    quotes = re.findall(r"^```python\n# (\S+)\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    assert len(quotes) == len(re.findall(r"^```python", PAGE, re.MULTILINE)) >= 4
    for file, code in quotes:
        assert (ROOT / file).read_text().count(code) == 1, f"{file}:\n{code}"


def test_the_page_is_what_the_script_writes():
    assert walkthrough.filled(PAGE, walkthrough.texts(walkthrough.FOLDER)) == PAGE


def test_the_runs_were_made_with_the_bugs_that_the_page_shows():
    for file in (walkthrough.FOLDER / "learning").glob("*/seed*.json"):
        about = json.loads(file.read_text())
        assert about["diff"] == DIFFS[file.parent.name], file
        control = walkthrough.claims.COMMITTED / "arithmetic/grpo" / file.name
        assert about["flags"] == json.loads(control.read_text())["flags"], file
        assert about["commit"] and not about["uncommitted_changes"], file


def test_every_ablation_is_on_the_page_and_every_mark_has_a_text():
    marks = walkthrough.marked(PAGE)
    assert len(marks) == len(set(marks)) == PAGE.count("<!-- /measured -->")
    assert set(walkthrough.CASES) | set(walkthrough.LEARNED) <= set(DIFFS)
    assert set(walkthrough.OTHERS) - {"walk"} <= set(marks)
    empty = [name for name, text in walkthrough.texts(walkthrough.FOLDER).items() if not text]
    assert not empty


def test_links_to_sections_exist():
    for file, anchor in re.findall(r"\]\((?!http)([^)#]*)#([^)]+)\)", PAGE):
        target = walkthrough.PAGE.parent / file if file else walkthrough.PAGE
        headings = re.findall(r"^#+ (.+)$", target.read_text(), re.MULTILINE)
        assert anchor in map(walkthrough.anchor, headings), f"{file}#{anchor}"


@pytest.mark.slow
def test_the_batch_still_gives_these_numbers(tmp_path):
    """The walk, one broken line in algos/ and one in common/. Other processors round differently, so not all digits."""
    (tmp_path / "folder").mkdir()
    words = f"scripts/walkthrough.py measure walk groups neighbours --folder {tmp_path}/folder".split()
    ended = subprocess.run([sys.executable, *words], cwd=ROOT, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    now = json.loads((tmp_path / "folder" / walkthrough.MEASURED).read_text())
    committed = json.loads((walkthrough.FOLDER / walkthrough.MEASURED).read_text())
    for name, text in committed["walk"].items():
        if name in EXACT:
            assert now["walk"][name] == text
            continue
        for before, after in zip(text.split(), now["walk"][name].split(), strict=True):
            if re.fullmatch(r"[-+]?\d+(\.\d+)?", before):
                assert abs(float(before) - float(after)) <= 0.05 * abs(float(before)) + 0.002, (name, before, after)
            else:
                assert before == after, name
    for name in ("groups", "neighbours"):
        for before, after in zip(committed[name], now[name], strict=True):
            for key in ("difference", "length", "cosine", "gap", "tokens"):
                assert after[key] == pytest.approx(before[key], rel=0.01, abs=1e-5), (name, key)


def traced(gradient: list[float], moved: list[float]) -> dict:
    """A trace of one optimizer step: its gradient, and the weights after it. Those before it are 0."""
    ratio = {
        "logprobs": torch.tensor([[-1.0, -9.0]]),
        "old_logprobs": torch.tensor([[-1.0, -1.0]]),
        "response_mask": torch.tensor([[True, False]]),
    }
    return {
        "gradients": [torch.tensor(gradient)],
        "weights": [torch.zeros(2), torch.tensor(moved)],
        "metrics": {"mismatch/logprob_abs_mean": 0.0, "train/clip_frac": 0.0},
        "losses": [ratio],
        "micro_batches": [[7]],
    }


def test_a_comparison_tells_length_from_direction():
    right = traced([3.0, 4.0], [1.0, 0.0])
    longer = walkthrough.compare(right, traced([6.0, 8.0], [2.0, 0.0]))
    turned = walkthrough.compare(right, traced([4.0, -3.0], [0.0, 1.0]))
    assert (longer["length"], longer["cosine"], longer["move_cosine"]) == pytest.approx((2, 1, 1))
    assert (turned["length"], turned["cosine"], turned["move_cosine"]) == pytest.approx((1, 0, 0))
    assert longer["difference"] == pytest.approx(1) and turned["difference"] == pytest.approx(2**0.5)
    assert longer["largest_ratio"] == 0, "a token outside the mask has no ratio"


def test_a_gradient_is_kept_as_it_was_before_it_is_clipped():
    parameter = torch.nn.Parameter(torch.zeros(2))
    parameter.grad = torch.tensor([30.0, 40.0])
    recorder = one_batch.Recorder()
    recorder.clip(torch.nn.utils.clip_grad_norm_, [parameter], 1.0)
    (kept,) = recorder.kept["gradients"]
    assert kept.tolist() == [30, 40] and parameter.grad.norm() == pytest.approx(1, rel=1e-4)


def test_a_run_of_a_seed_is_compared_with_the_control_of_that_seed(tmp_path, monkeypatch):
    monkeypatch.setattr(walkthrough.claims, "COMMITTED", tmp_path / "claims")

    def write(file, accuracy: float) -> None:
        rows = [{"step": 0, "eval/accuracy": 0.5}, {"step": 52, "eval/accuracy": accuracy}]
        walkthrough.study.write_run(file, rows, {}, ("step", "eval/accuracy"))

    for seed, accuracy in enumerate((0.9, 0.8, 0.7)):
        write(tmp_path / f"claims/arithmetic/grpo/seed{seed}.csv", accuracy)
    assert "not yet" in walkthrough.learned("noise", tmp_path)
    assert walkthrough.learned_difference("noise", tmp_path) == ""
    write(tmp_path / "learning/noise/seed1.csv", 0.7)
    text = walkthrough.learned("noise", tmp_path)
    assert "1 seed:" in text and "is 70.0%. The control has 80.0%." in text
    assert walkthrough.learned_difference("noise", tmp_path) == "-10.0 (1 seed)"
    write(tmp_path / "learning/noise/seed2.csv", 0.64)
    text = walkthrough.learned("noise", tmp_path)
    # -10 and -6: Student's quantile for two seeds is 12.706, so half of the interval is 12.706 x 2.
    assert "70.0%, 64.0%. The control has 80.0%, 70.0%. The difference is -8.0 [-33.4, 17.4] points." in text


def test_half_an_interval_is_students():
    assert 100 * walkthrough.study.half_width(0.03, 3) == pytest.approx(3 * 4.30265 / 3**0.5)
    assert 100 * walkthrough.study.half_width(0.03, 10) == pytest.approx(3 * 2.262 / 10**0.5, rel=1e-3)


def test_a_recorded_batch_is_what_the_engine_returned(tmp_path):
    rows = one_batch.read_batch(walkthrough.FOLDER / "calculator.jsonl.gz")
    (tmp_path / "step.jsonl").write_text("".join(json.dumps(row | {"advantage": 1.0}) + "\n" for row in rows))
    one_batch.write_batch(tmp_path / "step.jsonl", tmp_path / "batch.gz")
    assert one_batch.read_batch(tmp_path / "batch.gz") == rows
    assert (tmp_path / "batch.gz").read_bytes()[4:8] == bytes(4), "the time would make other bytes of the same rows"
    assert not all(all(row["sampled"]) for row in rows), "an environment wrote some of its tokens"
