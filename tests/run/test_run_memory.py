"""scripts/bench/run_memory.py counts what a command and its children hold, and starts what a baseline would start."""

import pytest

from scripts.bench import run_memory
from scripts.bench.run_memory import Args, commands, peak_of

MB = 2**20
HOLD = "import time; held = b'x' * ({} * 2**20); time.sleep(2.5)"
PARENT = "import subprocess, sys; subprocess.run([sys.executable, '-c', {!r}])"


def test_it_counts_a_process_and_its_children():
    small = peak_of(["-c", HOLD.format(1)])
    assert 190 * MB <= peak_of(["-c", HOLD.format(200)]) - small <= 210 * MB
    assert 190 * MB <= peak_of(["-c", PARENT.format(HOLD.format(200))]) - small <= 240 * MB


def test_a_command_that_fails_has_no_peak():
    with pytest.raises(SystemExit, match="exit code 3"):
        peak_of(["-c", "raise SystemExit(3)"])


def test_the_last_flags_are_those_of_the_measurement():
    (words,) = commands(Args("ppo", flags=("--token-budget=512",)), "folder")
    assert words[0] == "algos/ppo.py" and words[-2:] == ["--run-dir", "folder/run"]
    last = {words[place]: words[place + 1] for place in range(len(words) - 1) if words[place].startswith("--")}
    assert last["--steps"] == "2" and last["--eval-every"] == "1" and "--token-budget=512" in words


def test_a_baseline_of_several_commands_is_shortened_in_each():
    *before, training = commands(Args("rejection"), "folder")
    assert [words[-2:] for words in before] == [["--prompts", "640"]] * len(before) and before
    assert training[0] == "algos/sft.py" and training[training.index("--warmup-steps") - 2 :][:2] == ["--steps", "2"]


def test_baselines_with_flags_of_their_own_are_refused():
    offline = run_memory.baselines.OFFLINE.keys() - run_memory.baselines.CONTROLS.keys()
    for task, run in offline:
        with pytest.raises(SystemExit, match=run):
            commands(Args(run, task=task), "folder")
    assert offline
