"""The table of roles: what each takes, and the refusal of what cannot fit."""

import ctypes
import json
import os
import resource
import subprocess
import sys

import pytest
import torch
from conftest import ROOT
from transformers import AutoModelForCausalLM

from common import embedded, hf_engine, placement, roles
from common.errors import BadInput
from common.grading import gsm8k_reward
from common.placement import Layout

GIVEN = {"size": 2, "layout": Layout(), "backend": "hf", "rollout_tp": 1, "dtype": torch.float32, "offload": "none"}


def test_the_table_names_every_role_and_its_memory(models, capsys):
    count = sum(p.numel() for p in AutoModelForCausalLM.from_pretrained(models["tied"]).parameters())
    found = roles.show(models["tied"], ["policy", "critic"], ["reference"], {"gsm8k": gsm8k_reward}, **GIVEN)
    assert [role.name for role in found] == ["policy", "critic", "reference", "rollout", "reward gsm8k"]
    assert [role.device for role in found] == [8 * count, 8 * count, 2 * count, 4 * count, 0]
    printed = capsys.readouterr().out
    assert "sharded over 2 rank(s)" in printed and "every rank, by hf" in printed and printed.startswith("role ")


def test_offloaded_roles_live_in_host_memory(models):
    aside = lambda offload: [
        role.name
        for role in roles.show(models["tied"], ["policy", "prm"], ["reference"], {}, **{**GIVEN, "offload": offload})
        if role.host and not role.device
    ]
    assert (aside("none"), aside("others"), aside("all")) == (
        [],
        ["prm", "reference"],
        ["policy", "prm", "reference"],
    )


@pytest.mark.parametrize(
    "layout, said",
    [
        (Layout("split", (1,)), "cores (1,), 1 a server"),
        (Layout("split", rollout_urls=("http://a:1",)), "http://a:1"),
        (Layout(), "2 ranks share one, by vllm"),
    ],
)
def test_the_rollout_says_where_it_runs(models, capsys, layout, said):
    tp = 1 if layout.split else 2
    roles.show(models["tied"], ["policy"], [], {}, **{**GIVEN, "layout": layout, "backend": "vllm", "rollout_tp": tp})
    if not torch.cuda.is_available():
        assert said in capsys.readouterr().out


def test_what_cannot_fit_is_refused_before_anything_is_loaded(models, monkeypatch):
    monkeypatch.setattr(roles, "rank_memory", lambda: 2**20)
    monkeypatch.setattr(hf_engine.AutoModelForCausalLM, "from_pretrained", None)
    with pytest.raises(BadInput, match=r"need 0\.0 GiB .* has 0\.0; most of it is the policy's"):
        roles.show(models["tied"], ["policy"], [], {}, **GIVEN)


def test_a_reward_model_counts(models, tmp_path, capsys):
    """Its folder is read for its size alone."""
    config = json.loads((tmp_path.__class__(models["tied"]) / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_labels": 1}))
    reward = object.__new__(roles.RewardModel)
    reward.path, reward.sharded = str(tmp_path), True
    found = roles.show(models["tied"], ["policy"], [], {"model:x": reward}, **GIVEN)
    assert found[-1].device == roles.parameters(models["tied"]) * (2 if torch.cuda.is_available() else 4) / 2


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
    wide = embedded.config()
    wide.hidden_size = 512
    wide.save_pretrained(tmp_path)
    assert placement.compute_dtype("auto", models["tied"]) == torch.float32
    assert placement.compute_dtype("auto", str(tmp_path)) == torch.bfloat16
    assert placement.compute_dtype("bfloat16", models["tied"]) == torch.bfloat16
    assert placement.compute_dtype("float32", str(tmp_path)) == torch.float32
