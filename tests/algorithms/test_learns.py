"""Whole runs of algos/grpo.py: it learns, on one rank and two; the same command gives the same run; resume; guards."""

import json
import shutil
import statistics

import pytest
from conftest import ROOT, launch
from helpers import metrics, nightly, same, weights

from common.preflight import folders
from common.run.charts import PHASES

GRPO, PATCHED = ROOT / "algos/grpo.py", ROOT / "tests/workers/patched.py"
SMALL = ["--prompts-per-step", "8", "--mini-batches", "2", "--eval-prompts", "32"]
pytestmark = pytest.mark.slow


def times(run_dir) -> list[dict]:
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if k.startswith("time/")} for row in rows]


def rise(rows: list[dict]) -> float:
    """Mean reward of the last four steps minus that of the first two."""
    rewards = [row["reward/mean"] for row in rows if "reward/mean" in row]
    return sum(rewards[-4:]) / 4 - sum(rewards[:2]) / 2


# What is switched on by default off, and the other way round.
SWITCHED = ["--token-budget", 2048, "--activation-checkpointing", "--offload", "all"]
SWITCHED += ["--schedule", "constant", "--tis-cap", 2, "--kl-coef", 0.001]


@pytest.mark.parametrize("ranks, tp, flags", [(1, 1, []), (2, 1, SWITCHED), nightly(2, 2, [])])
def test_it_learns_on_any_layout(tmp_path, ranks, tp, flags):
    flags = ["--steps", 8, "--prompts-per-step", 32, "--rollout-tp", tp, *flags, "--run-dir", tmp_path / "run"]
    result = launch(GRPO, *flags, ranks=ranks)
    rows = metrics(tmp_path / "run")
    assert rise(rows) > 0.05, rows
    assert rows[-1]["eval/accuracy"] > rows[0]["eval/accuracy"] + 0.05
    assert max(row["mismatch/logprob_abs_max"] for row in rows[1:]) <= 5e-4  # float32, the bound of test_resume
    shares = [  # of a step, which its phases are all of; a busy machine may hold up one step between two of them
        sum(seconds for name, seconds in row.items() if name.removeprefix("time/") in PHASES) / row["time/step"]
        for row in times(tmp_path / "run")[2:]
    ]
    assert statistics.median(shares) == pytest.approx(1, rel=0.05)
    assert f"model: {folders.complete(tmp_path / 'run')[-1]}/model" in result.stdout
    assert "report: " in result.stdout and (tmp_path / "run/report.html").is_file()
    assert "Error" not in result.stderr and "Traceback" not in result.stderr


def test_the_same_command_gives_the_same_run_and_so_does_resuming(tmp_path):
    launch(GRPO, *SMALL, "--steps", 4, "--save-every", 2, "--run-dir", tmp_path / "a")
    launch(GRPO, *SMALL, "--steps", 4, "--run-dir", tmp_path / "b", fresh=True)  # "a" comes from the fork server
    assert metrics(tmp_path / "a") == metrics(tmp_path / "b")  # bit for bit
    assert same(weights(tmp_path / "a", 4), weights(tmp_path / "b", 4))
    shutil.copytree(tmp_path / "a/checkpoints/step_000002", tmp_path / "c/checkpoints/step_000002")
    launch(GRPO, *SMALL, "--steps", 4, "--run-dir", tmp_path / "c", "--resume", "auto")
    assert metrics(tmp_path / "c") == metrics(tmp_path / "a")[3:]
    assert same(weights(tmp_path / "a", 4), weights(tmp_path / "c", 4))


def test_rollout_logprobs_are_measured_and_never_trained_on(tmp_path):
    flags = [*SMALL, "--steps", 2, "--rollout-backend", "hf", "--kl-coef", "0.05", "--epochs", 2]
    flags += ["--track", "tensorboard", "--max-logprob-gap", 0.05]
    launch(PATCHED, "none", tmp_path / "right", *flags)
    launch(PATCHED, "wrong_rollout", tmp_path / "wrong", *flags)
    assert same(weights(tmp_path / "right", 2), weights(tmp_path / "wrong", 2))
    launch(PATCHED, "share", tmp_path / "share", *flags)  # a whole step with shared prompts
    keys = ("loss/kl", "loss/policy", "train/grad_norm", "train/entropy")
    right, share = ([metrics(tmp_path / name)[1][key] for key in keys] for name in ("right", "share"))
    assert right == pytest.approx(share, rel=1e-3, abs=1e-6) and right != share
    row = metrics(tmp_path / "wrong")[1]
    assert row["mismatch/logprob_abs_mean"] == pytest.approx(0.01, rel=1e-2)
    assert row["loss/kl"] > 0 and list((tmp_path / "wrong/tensorboard").iterdir())


@pytest.mark.parametrize(
    "broken, message",
    [
        ("stale", "the engine had not got the trainer's weights"),
        ("nan", "step 1: train/grad_norm is nan; this update was not applied"),
    ],
)
def test_a_run_that_cannot_be_right_stops_with_one_line(tmp_path, broken, message):
    flags = [*SMALL, "--steps", 30, "--learning-rate", "1e-3", "--max-logprob-gap", "0.02"]
    result = launch(PATCHED, broken, tmp_path / "run", *flags, check=False)
    assert "engine: 64 responses at once" in result.stdout
    assert result.returncode == 3 and message in result.stderr and "Traceback" not in result.stderr
