"""The table of roles: what each of them takes, and the refusal of what cannot fit. Where freed memory goes."""

import ctypes
import os
import resource
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT
from transformers import AutoModelForCausalLM

from common import placement
from common.data import arithmetic
from common.errors import BadInput
from common.placement import Layout
from common.preflight import precision, roles
from common.preflight.memory import MemoryPlan
from common.preflight.roles import Role
from common.rewards.grading import gsm8k_reward
from common.rewards.model import RewardModel
from common.trainer import model


@pytest.fixture
def table(models):
    """Prints the table of a run on two ranks and returns its rows."""

    def make(names: list[str], rewards=None, **changes) -> list[Role]:
        settings = {"dtype": torch.float32, "size": 2, "backend": "hf", **changes}
        plan = MemoryPlan(model=models["tied"], models=tuple(names), **settings)
        reward_roles = [roles.reward_role(name, reward, plan.size) for name, reward in (rewards or {}).items()]
        rows = [*roles.model_roles(plan), roles.rollout_role(plan), *reward_roles]
        roles.check_fit(plan, rows)
        roles.show(rows)
        return rows

    return make


def test_the_table_names_every_role_and_its_memory(table, models, capsys):
    count = sum(p.numel() for p in AutoModelForCausalLM.from_pretrained(models["tied"]).parameters())
    found = table(["policy", "critic", "reference"], {"gsm8k": gsm8k_reward})
    assert [role.name for role in found] == ["policy", "critic", "reference", "rollout", "reward gsm8k"]
    assert [role.device for role in found] == [8 * count, 8 * count, 2 * count, 4 * count, 0]
    printed = capsys.readouterr().out
    assert "sharded over 2 rank(s)" in printed and "every rank, by hf" in printed and printed.startswith("role ")


@pytest.mark.parametrize(
    "offload, aside", [("none", []), ("others", ["prm", "reference"]), ("all", ["policy", "prm", "reference"])]
)
def test_offloaded_roles_live_in_host_memory(table, offload, aside):
    found = table(["policy", "prm", "reference"], offload=offload)
    assert [role.name for role in found if role.host and not role.device] == aside


@pytest.mark.skipif(torch.cuda.is_available(), reason="devices are cores here")
@pytest.mark.parametrize(
    "layout, tp, said",
    [
        (Layout("split", (1,)), 1, "cores (1,), 1 a server"),
        (Layout("split", rollout_urls=("http://a:1",)), 1, "http://a:1"),
        (Layout(), 2, "2 ranks share one, by vllm"),
    ],
)
def test_the_rollout_says_where_it_runs(table, capsys, layout, tp, said):
    table(["policy"], layout=layout, backend="vllm", rollout_tp=tp)
    assert said in capsys.readouterr().out


def test_the_trainer_leaves_the_devices_of_servers_alone(monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "1")
    cores, gpu = [], []
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3})
    monkeypatch.setattr(os, "sched_setaffinity", lambda _, left: cores.append(left))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for layout in (Layout(), Layout("split", (1, 3))):
        assert placement.take_device(layout).type == "cpu"
    assert cores == [{0, 2}]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "set_device", gpu.append)
    taken = [placement.take_device(layout) for layout in (Layout(), Layout("split", (0, 1)))]
    assert taken == gpu == [torch.device("cuda", 1), torch.device("cuda", 3)]


def test_what_cannot_fit_is_refused_before_anything_is_loaded(table, monkeypatch):
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", None)
    with pytest.raises(BadInput, match="policy"):
        table(["policy"], memory=2**20)


def test_what_does_not_fit_into_the_host_of_a_gpu_is_refused(table, monkeypatch):
    """The kernel would kill the run while it loads."""
    monkeypatch.setattr(placement, "host_memory", lambda: 2**20)
    table(["policy"], gpu=True, memory=80e9)
    with pytest.raises(BadInput, match="host memory"):
        table(["policy"], gpu=True, memory=80e9, offload="all")


@pytest.mark.parametrize(
    "size, tp, layout, engines",
    [
        (8, 2, Layout(), 4),
        (8, 1, Layout("split", (8, 9)), 2),
        (1, 2, Layout("split", (1, 2)), 1),
        (4, 1, Layout("split", rollout_urls=("http://a:1", "http://b:1")), 2),
    ],
)
def test_an_engine_takes_its_share_of_the_responses(size, tp, layout, engines):
    """Those of servers are no matter of the number of ranks."""
    assert placement.engine_count(size, tp, layout) == engines


def test_a_reward_model_counts(table):
    reward = object.__new__(RewardModel)
    reward.parameters, reward.sharded = 1000, True
    *_, found = table(["policy"], {"model:x": reward})
    assert found.device == 1000 * (2 if torch.cuda.is_available() else 4) / 2


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="its malloc is not glibc's")
def test_freed_memory_stays_with_the_process():
    """Pages that the kernel clears for forty tensors of 64 MiB, one after the other: most find the room of one before.

    Not all: a small block may have taken the edge of that room.
    """
    script = """
import resource, torch
from common import placement
world, before = placement.init(seed=0), resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(40):
    torch.empty(2**24).fill_(1.0)
print("pages:", resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
placement.finish(world)
"""
    blind = os.environ | {"CUDA_VISIBLE_DEVICES": ""}  # with a GPU there is nothing to keep
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=ROOT, env=blind
    )
    assert int(result.stdout.partition("pages: ")[2]) < 40 * 2**26 / resource.getpagesize() / 2


def test_holes_in_the_memory_go_back_to_the_kernel_if_they_are_large():
    """Every second of 400 tensors of 1 MiB stays, so the holes are not at the end of the heap."""
    script = """
import torch
from common import placement

def resident() -> int:
    (line,) = [line for line in open("/proc/self/status") if line.startswith("VmRSS")]
    return int(line.split()[1]) // 2**10

world = placement.init(seed=0)
before = resident()
tensors = [torch.empty(2**18).fill_(1.0) for _ in range(400)]
kept = tensors[::2]
del tensors
placement.return_holes()
with_holes = resident() - before
placement.HOLE_BYTES = 2**27
placement.return_holes()
print("MiB:", with_holes, resident() - before, sum(map(torch.sum, kept)).item())
placement.finish(world)
"""
    blind = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=ROOT, env=blind
    )
    with_holes, after, total = map(float, result.stdout.partition("MiB: ")[2].split())
    assert with_holes > 380, "small ones are left alone"
    assert after < 250 and total == 200 * 2**18, "what is in use stays"


def wide_model(folder) -> str:
    """A config of 512, the width from which --dtype auto is open."""
    wide = arithmetic.config()
    wide.hidden_size = 512
    wide.save_pretrained(folder)
    return str(folder)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU's dtype is not measured")
def test_auto_is_the_dtype_that_this_cpu_is_clearly_faster_with(models, monkeypatch, tmp_path, capsys):
    wide = wide_model(tmp_path / "wide")
    monkeypatch.setattr(precision, "has_bfloat16", lambda: True)
    for speed, dtype in ((2.0, torch.bfloat16), (1.1, torch.float32), (0.5, torch.float32)):
        monkeypatch.setattr(precision, "speed_of_bfloat16", lambda speed=speed: speed)
        assert precision.choose("auto", wide) == dtype
        said = capsys.readouterr().out
        assert str(dtype)[6:] in said and f"{1 / speed:.2f}" in said
    monkeypatch.setattr(precision, "speed_of_bfloat16", lambda: pytest.fail("measured in vain"))
    assert precision.choose("auto", models["tied"]) == torch.float32, "narrow models are the same on every machine"
    assert [precision.choose(name, wide) for name in ("bfloat16", "float32")] == [torch.bfloat16, torch.float32]
    checkpoint = tmp_path / "run" / "checkpoints" / "step_000004"
    checkpoint.mkdir(parents=True)
    for name in ("bfloat16", "float32"):
        (tmp_path / "run" / "run.json").write_text(f'{{"args": {{"dtype": "{name}"}}}}')
        assert precision.choose("auto", wide, checkpoint) == getattr(torch, name), "a resumed run keeps its dtype"
    monkeypatch.chdir(checkpoint.parent)
    assert precision.choose("auto", wide, Path(checkpoint.name)) == torch.float32, "the same by its name alone"
    monkeypatch.setattr(precision, "has_bfloat16", lambda: False)
    assert precision.choose("auto", wide) == torch.float32


def test_ranks_that_measured_different_dtypes_do_not_start(models):
    differ = SimpleNamespace(min=lambda value: 2.0, max=lambda value: 4.0)
    with pytest.raises(BadInput, match="--dtype"):
        model.load(models["tied"], differ, torch.bfloat16)


def test_choosing_takes_no_time(tmp_path):
    """Without instructions for bfloat16, nothing is measured: on such a CPU the products take twelve seconds."""
    wide, begin = wide_model(tmp_path), time.perf_counter()
    dtype = precision.choose("auto", wide)
    assert time.perf_counter() - begin < 10  # 0.2 s with such instructions
    assert precision.has_bfloat16() or dtype == torch.float32
