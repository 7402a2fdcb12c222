"""Runs that train, stop and go on: all algorithms, bit for bit; killed ranks; the scripts that supervise and kill."""

import json
import os
import signal
import statistics
import subprocess
from types import SimpleNamespace

import pytest
import torch
from cases import ALGORITHMS
from conftest import ROOT, launch
from helpers import executable, metrics, same, weights

from common.errors import RunFailed
from common.preflight import folders
from common.run import directory

WORKERS = ROOT / "tests/workers"
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Folder of the runs of tests/workers/resume.py, and what they printed."""
    folder = tmp_path_factory.mktemp("resume")
    return folder, launch(WORKERS / "resume.py", folder).stdout


@pytest.mark.parametrize("name", [*ALGORITHMS, "ppo-guess", "remax-calculator", "dapo-guess"])
def test_the_fourth_step_is_the_same_after_a_resume(runs, name):
    """From a checkpoint of the same run, or of one that a signal has stopped."""
    whole, parts = (runs[0] / f"{name}-{kind}" for kind in ("whole", "parts"))
    signalled = name in ("grpo", "remax", "ppo-guess")
    rows = metrics(whole)
    assert [row["step"] for row in rows] == list(range(name != "grpo", 5))
    assert metrics(parts) == (rows if signalled else rows[-1:])  # bit for bit
    assert same(weights(whole, 4), weights(parts, 4))
    for step in range(1 if signalled else 4, 5):
        file = f"rollouts/step_{step:06d}.jsonl"
        assert (whole / file).read_text() == (parts / file).read_text()
    assert [path.name for path in folders.complete(whole)][-1] == "step_000004"
    assert [path.name for path in folders.complete(parts)] == ["step_000003", "step_000004"]
    assert any(not torch.equal(tensor, weights(parts, 4)[key]) for key, tensor in weights(parts, 3).items())
    said = [line for line in runs[1].splitlines() if f"--run-dir {name}-parts" in line]
    assert len(said) == signalled and all(line.startswith("stopped after step 3 of 4; to go on: ") for line in said)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_it_trains_on_its_own_samples(runs, name):
    rows = metrics(runs[0] / f"{name}-whole")
    updates = [row for row in rows if "train/grad_norm" in row]  # PPO's critic warms up first
    assert len(updates) == (1 if name == "ppo" else 4)
    assert all(row["train/grad_norm"] > 0 for row in updates)
    assert 0 < statistics.mean(row["reward/mean"] for row in rows if "reward/mean" in row) < 1
    assert max(row["mismatch/logprob_abs_max"] for row in updates) < 5e-4


@pytest.mark.parametrize("name", ("rloo", "reinforce_pp", "remax"))
def test_the_kl_term_is_measured(runs, name):
    kl = [row["reward/kl"] for row in metrics(runs[0] / f"{name}-whole")]
    assert abs(kl[0]) < 1e-4 < abs(kl[-1])  # the policy starts as its reference


def test_greedy_responses_carry_no_loss(runs):
    run = runs[0] / "remax-whole"
    assert 0 < statistics.mean(row["reward/greedy_mean"] for row in metrics(run)) < 1
    responses = (run / "rollouts/step_000001.jsonl").read_text().splitlines()
    assert len(responses) == 4 * 4  # the greedy ones are not among them


def test_ten_prompts_end_an_epoch_in_three_steps(runs):
    ids = []
    for step in (1, 2, 3):
        rows = (runs[0] / f"grpo-whole/rollouts/step_{step:06d}.jsonl").read_text().splitlines()
        ids += [json.loads(row)["id"] for row in rows[::4]]
    assert len(ids) == 12 and len(set(ids)) == 10


def test_a_crashed_rank_is_restarted_and_a_signal_to_one_rank_stops_both(tmp_path):
    """Two ranks; then one goes on alone."""
    flags = [tmp_path / "run", "--steps", 6]
    restart = ["--max-restarts", "1"]
    result = launch(WORKERS / "crash.py", *flags, ranks=2, launcher_flags=restart, engine=False)
    assert [row["step"] for row in metrics(tmp_path / "run")] == [1, 2, 3, 4, 5]
    assert (tmp_path / "run/crashed").exists() and "resumed after step 2" in result.stdout
    assert f"stopped after step 5 of 6; to go on: torchrun --nproc-per-node 2 {WORKERS}/crash.py" in result.stdout
    assert [path.name for path in folders.complete(tmp_path / "run")] == ["step_000002", "step_000004", "step_000005"]
    result = launch(WORKERS / "crash.py", *flags)
    assert "saved by 2 ranks (cpu), now 1 (cpu): it goes on, but not bit for bit" in result.stdout
    assert [row["step"] for row in metrics(tmp_path / "run")] == [1, 2, 3, 4, 5, 6]


def test_killed_in_a_save_it_goes_on_as_if_nothing_had_happened():
    result = launch(ROOT / "scripts/kill_test.py", "--kills", 2, "--phases", "save", "--steps", 3)
    assert "2 of 2 killed runs ended as the uninterrupted one" in result.stdout


def test_nodes_without_a_common_file_system_are_told_at_the_start(world, tmp_path, monkeypatch):
    """Each would keep its own part of a checkpoint, which nobody could resume."""
    monkeypatch.setattr(directory, "SHARED_SECONDS", 0.2)
    elsewhere = SimpleNamespace(is_main=False, min=world.min)
    with pytest.raises(RunFailed, match="--run-dir ") as failed:
        directory.check_shared(tmp_path, elsewhere)
    assert failed.value.code == "not-shared"
    directory.check_shared(tmp_path, world)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("script, steps", [("kill_test.py", 1), ("bench/soak.py", 51)])
def test_too_few_steps_are_refused_before_anything_runs(script, steps):
    result = launch(ROOT / "scripts" / script, "--steps", steps, check=False, engine=False)
    assert result.returncode == 1 and f"error: --steps {steps}: " in result.stderr


def supervise(script: str, tmp_path, **settings) -> subprocess.Popen:
    (tmp_path / "command.sh").write_text(script)
    command = ["bash", ROOT / "scripts/supervise.sh", "bash", tmp_path / "command.sh", "--run-dir", "runs/x"]
    environment = {**os.environ, "DELAY": "0", **settings}
    return subprocess.Popen(command, cwd=tmp_path, env=environment, stderr=subprocess.PIPE, text=True)


@pytest.mark.parametrize(
    "codes, runs, left",
    [((3, 1, 0), 3, 0), ((1, 2), 2, 2), ((0,), 1, 0), ((1, 1, 1, 1), 3, 1)],
    ids=["crashes", "bad input", "done", "gives up"],
)
def test_supervise_restarts_after_crashes(tmp_path, codes, runs, left):
    script = f"codes=({' '.join(map(str, codes))})\nn=$(cat n 2> /dev/null || echo 0)\necho $((n + 1)) > n\n"
    process = supervise(f'{script}echo "$*" >> said\nexit "${{codes[$n]}}"\n', tmp_path, RESTARTS="2")
    said = process.communicate(timeout=120)[1]
    assert process.returncode == left and (tmp_path / "n").read_text() == f"{runs}\n", said
    assert (tmp_path / "said").read_text() == "--run-dir runs/x --resume auto\n" * runs


@pytest.mark.parametrize("flag", ["--resume runs/old/checkpoints/step_000002", "--resume=old"])
def test_supervise_begins_where_the_command_says_and_goes_on_from_its_own_checkpoint(tmp_path, flag):
    save = "mkdir -p runs/x/checkpoints/step_000004; touch runs/x/checkpoints/step_000004/state.json"
    script = f'echo "$*" >> said\n[ "$(wc -l < said)" = 1 ] && exit 3\n[ -d runs/x ] && exit 0\n{save}\nexit 3\n'
    (tmp_path / "command.sh").write_text(script)
    command = ["bash", ROOT / "scripts/supervise.sh", "bash", tmp_path / "command.sh", "--run-dir", "runs/x"]
    subprocess.run([*command, *flag.split()], cwd=tmp_path, env={**os.environ, "DELAY": "0"}, check=True)
    own = f"--run-dir runs/x {flag}\n"
    assert (tmp_path / "said").read_text() == 2 * own + own.replace("\n", " --resume auto\n")


def test_supervise_waits_twice_as_long_after_each_further_crash(tmp_path):
    (tmp_path / "bin").mkdir()
    executable(tmp_path / "bin/sleep", f'#!/bin/sh\necho "$1" >> {tmp_path}/slept\n')
    path = f"{tmp_path / 'bin'}:{os.environ['PATH']}"
    process = supervise("exit 1\n", tmp_path, RESTARTS="3", DELAY="7", PATH=path)
    assert process.wait(timeout=120) == 1
    assert (tmp_path / "slept").read_text().split() == ["7", "14", "28"]


@pytest.mark.parametrize("flag, left", [("--run_dir=x", 0), ("--run-dir=x", 0), ("--runs=x", 2)])
def test_supervise_needs_the_run_to_go_on_with(flag, left):
    command = ["bash", ROOT / "scripts/supervise.sh", "true", "--track=none", flag]
    assert subprocess.run(command, capture_output=True).returncode == left


def test_supervise_passes_a_signal_on_and_stops(tmp_path):
    script = 'trap "echo asked; sleep 0.3; echo saved; exit 1" TERM\necho ready\nwhile :; do sleep 0.05; done\n'
    process = supervise(f"exec > said\n{script}", tmp_path)
    while not (tmp_path / "said").exists() or "ready" not in (tmp_path / "said").read_text():
        assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=120) == 1 and (tmp_path / "said").read_text() == "ready\nasked\nsaved\n"


def test_supervise_wants_a_run_to_go_on_with(tmp_path):
    command = ["bash", ROOT / "scripts/supervise.sh", "python", "algos/grpo.py"]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 2 and "needs --run-dir" in result.stderr
