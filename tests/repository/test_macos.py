"""What macOS lacks: vLLM, binding to cores, a limit of addresses, namespaces. No Mac has run this."""

import os
import resource

import pytest
from conftest import ROOT, launch

from common import cores
from common.errors import BadInput
from common.placement import Layout
from common.preflight import machine
from common.processes import child, sandbox


@pytest.mark.slow
def test_the_embedded_job_trains_without_vllm(tmp_path):
    flags = ["--rollout-backend", "hf", "--steps", 1, "--prompts-per-step", 8, "--eval-prompts", 8, "--mini-batches", 1]
    without = [ROOT / "tests/workers/without_linux.py", ROOT / "algos/grpo.py", "--run-dir", tmp_path / "run"]
    done = launch(*without, *flags, fresh=True)
    assert "| update s" in done.stdout and (tmp_path / "run/report.html").exists()
    refused = launch(*without, "--dry-run", fresh=True, check=False)
    assert refused.returncode == 2 and "use --rollout-backend hf" in refused.stdout + refused.stderr


def test_all_cores_are_usable_where_no_process_can_be_bound(monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {5, 1, 3, 4, 6})
    assert cores.usable_cores() == [1, 3, 4, 5, 6] and cores.cores_of_this_rank() == 2
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.delattr(os, "sched_setaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    assert cores.usable_cores() == list(range(8)) and cores.cores_of_this_rank() == 4
    with pytest.raises(BadInput, match="--rollout-devices.*Linux.*--rollout-urls"):
        machine.check_layout(Layout("split", (1,)), 1, "vllm")


def test_workers_have_no_limit_of_memory_on_macos(monkeypatch):
    limits = []
    monkeypatch.setattr(resource, "setrlimit", lambda *limit: limits.append(limit))
    handler = child.Handler(lambda request: request, memory_gib=1.0)
    monkeypatch.setattr(child.sys, "platform", "darwin")
    child.limit_memory(handler)
    assert not limits
    monkeypatch.setattr(child.sys, "platform", "linux")
    child.limit_memory(handler)
    assert len(limits) == 1


def test_programs_are_refused_where_no_sandbox_can_hold_them(monkeypatch):
    monkeypatch.setattr(sandbox.sys, "platform", "darwin")
    with pytest.raises(sandbox.SandboxFailed, match="needs Linux"):
        sandbox.Sandbox(["common.rewards.code_roles"])
