"""Faults put in on purpose: each ends the run with its own code, before more than one step is lost, and in time."""

import ast
import asyncio
import json
import pickle
import re
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT, launch

from algos import grpo
from common import errors
from common.errors import BadInput, RunFailed
from common.preflight import folders
from common.rollout.servers import vllm_api
from common.rollout.servers.client import ask_all
from common.run.guards import SILENT_STEPS, TRUNCATED_STEPS, Trends
from common.run.tracking import Tracker

# name of the fault in workers/faulty.py: (exit code, error code, what the line says, the last step there may be)
FAULTS = {
    "stale_head": (3, "logprob-gap", "trainer and engine disagree by", 3),
    "one_layer_not_synced": (3, "logprob-gap", "trainer and engine disagree by", 3),
    "syncs_lost": (3, "stale-weights", "the engine had not got the trainer's weights", 3),
    "wrong_temperature": (3, "logprob-gap", r"that the engine samples at --temperature 1\.3", 1),
    "nan_gradient": (3, "non-finite", "grad_norm is nan; this update was not applied; its responses are in", None),
    "infinite_loss": (3, "non-finite", "loss/policy is inf; its responses are in", 1),
    "nan_reward": (2, "bad-input", "nan", None),
    "infinite_reward": (2, "bad-input", "inf", None),
    "killed_reward_worker": (3, "reward-failed", "died", None),
    "constant_reward": (3, "no-signal", r"no response has had an advantage for 3 steps \(mean reward 1\)", 3),
    "all_truncated": (3, "all-truncated", "step 5: every response .*raise that flag", 5),
    "out_of_memory": (3, "out-of-memory", "rank 0 in step 1: logprobs: .*lower --token-budget", None),
    "disk_full_while_writing": (3, "disk-full", "No space left on device", None),
    "disk_full_before_a_checkpoint": (3, "disk-full", "a checkpoint needs", None),
    "killed_rank": (3, "rank-lost", r"rank 0 in step 2: update: lost another rank .*hang or are dead: \[1\]", 1),
    "hung_collective": (
        3,
        "collective-timeout",
        r"rank 0 in step 2: update: waited in vain for another rank .*hang or are dead: \[1\]",
        1,
    ),
    "truncated_checkpoint": (2, "checkpoint-damaged", r"safetensors: has \d+ bytes of \d+; .*step_000002 is older", 4),
    "lost_checkpoint_file": (2, "checkpoint-damaged", "model.safetensors: is missing", 4),
    "torn_state": (2, "checkpoint-damaged", "step_000004/state.json: ", 4),
    "corrupt_metrics": (2, "metrics-corrupt", r"metrics\.jsonl:2: invalid JSON .*; remove the line", None),
    "changed_data": (2, "data-changed", "a file of --dataset has changed", 4),
    "changed_flag": (2, "run-changed", "--clip-high 0.2, now 0.28", 4),
}
LONGEST = 180.0  # seconds until any of them is over


@pytest.fixture(scope="module")
def faults(tmp_path_factory):
    """All of them in one process that imports once."""
    folder = tmp_path_factory.mktemp("faults")
    launch(ROOT / "tests/workers/faulty.py", folder, "nothing", *FAULTS)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_ends_the_run_with_its_own_code(faults, name):
    code, error, said, last = FAULTS[name]
    log = (faults / f"{name}.log").read_text()
    found, seconds = log.rsplit("\n", 1)[1].split()
    lines = re.findall(r"error\[.*", log)
    assert lines and re.match(rf"error\[{error}\]: .*{said}", lines[0]), log[-2000:]
    assert len(lines) == 1 and "Traceback" not in log, log[-2000:]
    assert int(found) == code and float(seconds) < LONGEST
    if last is not None:
        rows = (faults / name / "run/metrics.jsonl").read_text().splitlines()
        assert json.loads(rows[-1])["step"] <= last


def test_max_rl_stops_at_scores_whose_mean_is_no_probability(tmp_path):
    """Not before it has saved what it has learned: the third step is the first with a negative score."""
    reward = tmp_path / "reward.py"
    reward.write_text(
        "from pathlib import Path\n"
        "def score(items, lengths, truncated):\n"
        f"    done = Path({str(tmp_path / 'run')!r}, 'metrics.jsonl')\n"
        "    late = done.exists() and len(done.read_text().splitlines()) == 2\n"
        "    return [i % 2 - 1.5 * late for i, _ in enumerate(items)]\n"
    )
    flags = ("--rollout-backend", "hf", "--reward", f"{reward}:score", "--eval-prompts", 0, "--prompts-per-step", 4)
    run = tmp_path / "run"
    result = launch(ROOT / "algos/max_rl.py", *flags, "--run-dir", run, check=False, engine=False)
    assert result.returncode == 3
    assert "error[reward-failed]: step 3: a response scored -1.5, and this algorithm needs 0 or more" in result.stderr
    assert [folder.name for folder in folders.complete(run)] == ["step_000002"]


TOGETHER = (
    "stale_head",
    "syncs_lost",
    "wrong_temperature",
    "nan_gradient",
    "killed_reward_worker",
    "constant_reward",
    "all_truncated",
)


@pytest.mark.slow
@pytest.mark.parametrize("name", TOGETHER)
def test_a_run_that_fails_on_all_ranks_has_saved_its_last_good_state_and_a_report(faults, name):
    run = faults / name / "run"
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()] or [{"step": 0}]
    saved = folders.complete(run)
    assert [path.name for path in saved[-1:]] == [f"step_{row['step']:06d}" for row in rows[-1:] if row["step"]]
    assert (run / "report.html").is_file() or not rows[-1]["step"]
    log = (faults / f"{name}.log").read_text()
    assert (f"saved after step {rows[-1]['step']}; to go on: " in log) == bool(saved), log[-2000:]


@pytest.mark.slow
def test_without_a_fault_it_runs_to_its_end(faults):
    log = (faults / "nothing.log").read_text()
    assert "error" not in log and log.rsplit("\n", 1)[1].startswith("0 "), log[-2000:]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["nan_gradient", "infinite_loss"])
def test_what_was_refused_is_there_to_look_at(faults, name):
    (path,) = (faults / name / "run/rollouts").glob("refused_000001.jsonl")
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(rows) == 16 and rows[0]["response_ids"] and rows[0]["score"] is not None and rows[0]["advantage"] is None
    assert "| advantage none |" in launch(ROOT / "scripts/view_rollouts.py", path, "--limit", 1).stdout


@pytest.mark.parametrize(
    "error, environment, code, said",
    [
        (BadInput("no file"), {"RANK": "8", "LOCAL_RANK": "0"}, 2, "error[bad-input]: no file\n"),
        (BadInput("no file"), {"RANK": "9", "LOCAL_RANK": "1"}, 2, ""),
        (RunFailed("no room", code="engine-memory"), {"RANK": "3"}, 3, "error[engine-memory]: no room\n"),
    ],
)
def test_what_one_rank_alone_meets_is_printed(monkeypatch, capsys, error, environment, code, said):
    """Once for each node before the ranks are joined, and a failure wherever it is."""
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: False)
    monkeypatch.setattr(torch.distributed.distributed_c10d, "_get_default_store", none_yet)

    def fails(args):
        raise error

    with pytest.raises(SystemExit) as ended:
        errors.launch(fails, None)
    assert ended.value.code == code and capsys.readouterr().err == said


def test_a_node_that_is_gone_is_not_asked_for_ever(monkeypatch):
    """Its store closes no connection, and answers nothing."""
    monkeypatch.setattr(errors, "STORE_SECONDS", 0.1)
    over = threading.Event()
    gone = SimpleNamespace(append=lambda name, value: over.wait(60), get=lambda name: b"")
    began = time.monotonic()
    assert errors.failed_ranks(gone, 1, pause=0.1) == [] and time.monotonic() - began < 30
    over.set()  # its thread ends, too


def none_yet():
    raise ValueError("Default process group has not been initialized")


def row(step: int, **figures) -> dict:
    names = {"alike": "group/zero_std_frac", "entropy": "train/entropy", "advantage": "advantage/abs_max"}
    return {"step": step, "reward/mean": 0.5, "advantage/abs_max": 1.0, **{names[k]: v for k, v in figures.items()}}


def test_a_reward_that_once_taught_something_is_a_warning(capsys):
    trends = Trends()
    trends.check(row(1))
    for step in range(2, 2 + 2 * SILENT_STEPS):
        trends.check(row(step, advantage=0.0))
    assert capsys.readouterr().err.count("warning[no-signal]: step ") == 2
    trends = Trends()
    with pytest.raises(RunFailed, match=f"{SILENT_STEPS} steps") as failed:
        for step in range(1, 1 + SILENT_STEPS):
            trends.check(row(step, advantage=0.0))
    assert step == SILENT_STEPS and failed.value.code == "no-signal"


def test_groups_that_score_alike_teach_where_something_else_does(capsys):
    """A teacher (OPD), a critic that warms up, or a mean over other prompts (REINFORCE++) gives advantages as well."""
    trends = Trends()
    for step in range(1, 1 + 2 * SILENT_STEPS):
        trends.check(row(step, alike=1.0))
    assert not capsys.readouterr().err


def test_entropy_that_is_gone_is_said_once(capsys):
    trends = Trends()
    for step in range(1, 40):
        trends.check(row(step, entropy=0.5 if step < 20 else 0.02))
    assert capsys.readouterr().err.count("warning[entropy-collapse]: step 20: ") == 1
    trends = Trends()
    for step in range(1, 40):
        trends.check(row(step, entropy=0.5 * 0.95**step))  # learning takes entropy, too
    assert "entropy" not in capsys.readouterr().err
    trends = Trends()  # the first steps count together, not the last of them alone
    for step, entropy in enumerate([1.0] * 9 + [0.1, 0.04], 1):
        trends.check(row(step, entropy=entropy))
    assert capsys.readouterr().err.count("warning[entropy-collapse]: step 11: ") == 1


def test_a_resumed_run_has_been_taught_before(capsys, world, tmp_path):
    tracker = Tracker(grpo.Args(run_dir=str(tmp_path)), "grpo", world, start=5)
    for step in range(6, 6 + SILENT_STEPS):
        tracker.trends.check(row(step, advantage=0.0))
    assert capsys.readouterr().err.count("warning[no-signal]: step ") == 1


@pytest.mark.parametrize("before", [3, SILENT_STEPS, SILENT_STEPS + 5])
def test_a_run_that_was_never_taught_gets_no_second_try_by_a_restart(world, tmp_path, before):
    """What was before the checkpoint counts, also if the guard had ended the run and saved it there."""
    rows = [{"step": 0, "eval/accuracy": 0.0}, *(row(step, advantage=0.0) for step in range(1, 1 + before))]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in rows))
    tracker = Tracker(grpo.Args(run_dir=str(tmp_path)), "grpo", world, start=before)
    left = max(1, SILENT_STEPS - before)
    with pytest.raises(RunFailed, match="from the start") as failed:
        for step in range(before + 1, before + 1 + left):
            tracker.trends.check(row(step, advantage=0.0))
    assert step == before + left and failed.value.code == "no-signal"
    tracker.trends.check(row(step + 1))  # a reward that has been mended


def test_steps_before_a_checkpoint_count_as_cut_off_too():
    cut_off = {"response/truncated_frac": 1.0}
    trends = Trends.after([row(step) | cut_off for step in range(1, TRUNCATED_STEPS + 1)])
    with pytest.raises(RunFailed, match=f"{TRUNCATED_STEPS} steps before"):
        trends.check(row(TRUNCATED_STEPS + 1) | cut_off)
    trends.check(row(TRUNCATED_STEPS + 2))


def test_a_fresh_run_that_is_never_taught_anything_stops(world, tmp_path):
    tracker = Tracker(grpo.Args(run_dir=str(tmp_path)), "grpo", world)
    with pytest.raises(RunFailed) as failed:
        for step in range(1, 1 + SILENT_STEPS):
            tracker.trends.check(row(step, advantage=0.0))
    assert failed.value.code == "no-signal"


def test_a_server_that_is_gone_has_a_code():
    with pytest.raises(RunFailed, match="http://127.0.0.1:9") as failed:
        asyncio.run(ask_all([("http://127.0.0.1:9", {})], lambda: range(1), None, api=vllm_api))
    assert failed.value.code == "server-gone"


def codes_in_source() -> set[str]:
    """Literals given to RunFailed, BadInput and warn."""
    found = {"bad-input"}
    for folder in ("algos", "common", "scripts"):
        for path in (ROOT / folder).rglob("*.py"):
            text = path.read_text()
            found |= set(re.findall(r'code="([^"]+)"', text))
            found |= codes_of_warnings(text)
            found |= set(re.findall(r'return "([a-z-]+)", \(', text)) if path.name == "diagnosis.py" else set()
            found |= set(re.findall(r'self\.warn_once\(\s*"([a-z-]+)"', text))
    return found


def codes_of_warnings(text: str) -> set[str]:
    """The codes of errors.warn(message, code) in a source, whatever the message computes."""
    calls = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)]
    of_warn = [call for call in calls if getattr(call.func, "id", getattr(call.func, "attr", "")) == "warn"]
    return {literal.value for call in of_warn for literal in call.args[1:] if isinstance(literal, ast.Constant)}


def test_every_code_has_a_section_in_the_docs_and_no_other_has():
    text = (ROOT / "docs/errors.md").read_text()
    sections = dict(re.findall(r"^### `([a-z-]+)`.*\n+((?:(?!^#).*\n)*)", text, re.MULTILINE))
    assert set(sections) == codes_in_source()
    for code, section in sections.items():
        assert "**Cause**" in section and "**Cure**" in section, code


def test_every_failure_has_a_code():
    for folder in ("algos", "common", "scripts"):
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] == "RunFailed":
                    assert any(keyword.arg == "code" for keyword in node.keywords), f"{path}:{node.lineno}"


def test_errors_keep_their_code_between_ranks():
    for error in (RunFailed("a", code="non-finite"), BadInput("b"), BadInput("c", code="data-changed")):
        copy = pickle.loads(pickle.dumps(error))
        assert (type(copy), str(copy), copy.code) == (type(error), str(error), error.code)


@pytest.mark.parametrize(
    "error, code",
    [
        (RuntimeError("[gloo/unbound_buffer.cc:81] Timed out waiting 6000ms for recv"), "collective-timeout"),
        (RuntimeError("[gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:1"), "rank-lost"),
        (RuntimeError("ifa != nullptr. Unable to find address for: eth9"), "no-network"),
        (RuntimeError("Gloo connectFullMesh failed with timed out connecting: Connection refused"), "no-network"),
        (MemoryError(), "out-of-memory"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"), "out-of-memory"),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB"), "out-of-memory"),
        # what vLLM's allocator says when an engine wakes and the trainer's states have its room
        (RuntimeError("CUDA Error: out of memory at cumem_allocator.cpp:145"), "out-of-memory"),
        (OSError(28, "No space left on device"), "disk-full"),
        (RuntimeError("shape mismatch, and the request timed out"), None),  # a bug keeps its traceback
        (ConnectionRefusedError("refused"), None),
    ],
)
def test_what_a_library_says_is_recognized(error, code):
    found = errors.recognized(error)
    assert (found and found.code) == code


def test_errors_are_imported_without_torch():
    """Worker processes of rewards import them."""
    script = "import sys; import common.errors; print('torch' in sys.modules)"
    said = subprocess.run([sys.executable, "-c", script], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    assert said.strip() == "False"


def test_an_error_carries_the_innermost_phase_it_was_raised_in():
    with pytest.raises(MemoryError) as raised, errors.in_phase("step 3: update"), errors.in_phase("step 3: logprobs"):
        raise MemoryError
    assert str(errors.recognized(raised.value)).startswith("rank 0 in step 3: logprobs: out of memory")
