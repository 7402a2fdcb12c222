"""scripts/gpu_check.py: what it runs, what it reports, and that nothing outlives its limits."""

import json
import signal
import sys
import time

import psutil
import pytest
import torch
from helpers import load

from common.errors import BadInput

# In the place of the script that runs one check, whose name is the last argument.
CHILD = """
import sys, time
print('finding: ["a number", true]', flush=True)
if sys.argv[-1] == "wrong":
    print('finding: ["too much", false]', flush=True)
if sys.argv[-1] == "crashes":
    raise OSError("gone")
if sys.argv[-1] == "hangs":
    time.sleep(60)
"""
TESTS = """
import pytest
def test_right(record_property):
    record_property("measured", "3 GiB")
def test_wrong():
    assert "as planned" == "more"
@pytest.mark.skip
def test_left_out(): ...
"""


@pytest.fixture
def check():
    return load("scripts/gpu_check.py")


@pytest.fixture
def ends(check, tmp_path, monkeypatch, capsys):
    """Runs checks of these names, each with a limit in seconds. Returns (exit code, printed lines, report)."""
    script = tmp_path / "child.py"
    script.write_text(CHILD)
    monkeypatch.setattr(check, "__file__", str(script))
    monkeypatch.setattr(check, "missing", lambda it: ", ".join(it.needs))

    def ends(minutes: float, **limits: float):
        for name, limit in limits.items():
            needs = ("2 GPUs",) if name == "lacking" else ()
            monkeypatch.setitem(check.CHECKS, name, check.Check(check.machine, "", limit, needs))
        code = check.main(check.Args(only=tuple(limits), minutes=minutes, output=str(tmp_path)))
        return code, capsys.readouterr().out.splitlines(), (tmp_path / "README.md").read_text()

    return ends


def test_it_lists_its_checks_and_runs_those_that_this_machine_can(check, tmp_path, capsys):
    """The kernels' tests run on a CPU as well."""
    assert check.main(check.Args(list=True)) == 0
    *listed, together, here = capsys.readouterr().out.splitlines() + [""] * check.CUDA
    assert len(listed) == len(check.CHECKS) and all("at most" in line for line in [*listed, together])
    assert check.CUDA or here.startswith("no GPU here")
    with pytest.raises(BadInput, match="--only nothing"):
        check.main(check.Args(only=("nothing",)))
    assert check.main(check.Args(only=("kernels", "split"), output=str(tmp_path))) == 0
    report = json.loads((tmp_path / "gpu_check.json").read_text())
    assert report["about"]["torch"] == torch.__version__ and report["checks"]["kernels"]["passed"]
    assert any("gradients" in measured for measured, _ in report["checks"]["kernels"]["findings"])
    if torch.cuda.device_count() < 2:
        assert report["checks"]["split"] == {"left out": "needs 2 GPUs"}
        assert "| split | left out: needs 2 GPUs | | |" in (tmp_path / "README.md").read_text()


def test_a_test_is_a_finding_with_what_it_measured(check, tmp_path, capfd, monkeypatch):
    """One that is skipped is none."""
    file = tmp_path / "test_some.py"
    file.write_text(TESTS)
    monkeypatch.setattr(check, "ROOT", tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GPU_CHECK_MODELS", "")
    [last] = check.tests(tmp_path, files=(str(file),))
    printed = capfd.readouterr().out.splitlines()
    right, wrong = [json.loads(line[9:]) for line in printed if line.startswith("finding: ")]
    assert right == ["test_right: 3 GiB", True]
    assert wrong[0].startswith("test_wrong: ") and "as planned" in wrong[0] and not wrong[1]
    assert not last[1]


def test_it_ends_with_1_and_names_what_failed(ends):
    """A check that does not hold, one that crashes, and one that never ends."""
    code, said, report = ends(5, passes=60, wrong=60, crashes=60, hangs=1.0)
    assert code == 1 and said[-1] == "failed: wrong, crashes, hangs"
    assert any(line.startswith("passes: passed") for line in said) and "    FAILED too much" in said
    assert any("OSError: gone" in line for line in said) and "no end within 1 s" in report


def test_it_ends_when_its_minutes_are_over_and_names_what_it_did_not_reach(ends):
    """Limits of single checks add up to more. A check that hangs takes what is left, and not what it may take alone."""
    began = time.monotonic()
    code, said, report = ends(2 / 60, hangs=60, later=60, lacking=60)
    assert code == 1 and time.monotonic() - began < 10
    assert said[-2] == "failed: hangs" and said[-1].startswith("not reached in") and "--only later runs" in said[-1]
    assert "    FAILED no end within 2 s, all that was left for this check" in said
    assert "lacking: left out, needs 2 GPUs" in said and "| later | not reached: no time was left | | |" in report
    assert ends(1e-9, later=60)[0] == 1, "nothing passed"


def test_nothing_that_a_check_started_outlives_its_limit(check, monkeypatch):
    """Ranks of torchrun have sessions of their own: killing the check's process would leave them on the GPU."""
    seconds = "45.25"  # a number that no other process sleeps
    start = f"import subprocess; subprocess.Popen(['sleep', '{seconds}'], start_new_session=True).wait()"
    began = time.monotonic()
    assert check.finish([sys.executable, "-c", start], 1.0)[0] is None
    assert time.monotonic() - began < 20, "it has waited for what the command started"
    running = lambda: [p for p in psutil.process_iter(["cmdline"]) if seconds in (p.info["cmdline"] or [])]
    deadline = time.monotonic() + 10
    while running() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not running()
    # The script is asked to end while a check runs.
    stop = f"import os, signal; os.kill(os.getppid(), signal.SIGTERM)\n{start}"
    with pytest.raises(SystemExit):
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
        try:
            check.finish([sys.executable, "-c", stop], 30.0)
        finally:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
    time.sleep(0.3)
    assert not running()
    # The commands that a check starts by the same function keep the mark by which the check is found.
    monkeypatch.setenv("GPU_CHECK", "outer-")
    inner = check.finish([sys.executable, "-c", "import os; print(os.environ['GPU_CHECK'])"], 20.0)[1]
    assert inner.startswith("outer-") and inner.strip() != "outer-"
