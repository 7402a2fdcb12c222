"""The table of roles: what each of them takes, and the refusal of what cannot fit. Where freed memory goes."""

import ctypes
import os
import resource
import subprocess
import sys

import pytest
import torch
from conftest import ROOT
from transformers import AutoModelForCausalLM

from common import placement
from common.data import arithmetic
from common.errors import BadInput
from common.placement import Layout
from common.rewards.grading import gsm8k_reward
from common.rewards.model import RewardModel
from common.rollout import hf_engine
from common.run import plan


@pytest.fixture
def roles(models):
    """Prints the table of a run on two ranks and returns its rows."""
    given = {"size": 2, "layout": Layout(), "backend": "hf", "rollout_tp": 1, "dtype": torch.float32, "offload": "none"}
    return lambda trained, frozen=(), rewards={}, **changes: plan.show_roles(
        models["tied"], [*trained], [*frozen], rewards, **{**given, **changes}
    )


def test_the_table_names_every_role_and_its_memory(roles, models, capsys):
    count = sum(p.numel() for p in AutoModelForCausalLM.from_pretrained(models["tied"]).parameters())
    found = roles(["policy", "critic"], ["reference"], {"gsm8k": gsm8k_reward})
    assert [role.name for role in found] == ["policy", "critic", "reference", "rollout", "reward gsm8k"]
    assert [role.device for role in found] == [8 * count, 8 * count, 2 * count, 4 * count, 0]
    printed = capsys.readouterr().out
    assert "sharded over 2 rank(s)" in printed and "every rank, by hf" in printed and printed.startswith("role ")


@pytest.mark.parametrize(
    "offload, aside", [("none", []), ("others", ["prm", "reference"]), ("all", ["policy", "prm", "reference"])]
)
def test_offloaded_roles_live_in_host_memory(roles, offload, aside):
    found = roles(["policy", "prm"], ["reference"], offload=offload)
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
def test_the_rollout_says_where_it_runs(roles, capsys, layout, tp, said):
    roles(["policy"], layout=layout, backend="vllm", rollout_tp=tp)
    assert said in capsys.readouterr().out


def test_what_cannot_fit_is_refused_before_anything_is_loaded(roles, monkeypatch):
    monkeypatch.setattr(plan, "rank_memory", lambda: 2**20)
    monkeypatch.setattr(hf_engine.AutoModelForCausalLM, "from_pretrained", None)
    with pytest.raises(BadInput, match=r"need 0\.0 GiB .* has 0\.0; most of it is the policy's"):
        roles(["policy"])


def test_a_reward_model_counts(roles, models):
    reward = object.__new__(RewardModel)
    reward.path, reward.sharded = models["untied"], True
    *_, found = roles(["policy"], rewards={"model:x": reward})
    assert found.device == plan.count_parameters(models["untied"]) * (2 if torch.cuda.is_available() else 4) / 2


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


def test_narrow_models_compute_in_float32_on_every_machine(models, monkeypatch, tmp_path):
    monkeypatch.setattr(placement, "native_dtype", lambda: torch.bfloat16)
    wide = arithmetic.config()
    wide.hidden_size = 512
    wide.save_pretrained(tmp_path)
    assert placement.compute_dtype("auto", models["tied"]) == torch.float32
    assert placement.compute_dtype("auto", str(tmp_path)) == torch.bfloat16
    assert placement.compute_dtype("bfloat16", models["tied"]) == torch.bfloat16
    assert placement.compute_dtype("float32", str(tmp_path)) == torch.float32
