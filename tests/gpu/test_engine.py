"""vLLM on a GPU, beside a trainer: its settings, seeds that repeat, and memory that it gives back."""

import json
import os
import statistics
from pathlib import Path

import pytest
import torch
from conftest import ROOT, launch
from helpers import load

from common.preflight import memory

GIB = memory.GIB


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> dict:
    """What workers/gpu_engine.py prints for a model of 0.5 B."""
    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    pytest.importorskip("vllm")
    gpu_check = load("scripts/gpu_check.py")
    folder = Path(os.environ.get("GPU_CHECK_MODELS") or tmp_path_factory.mktemp("models"))
    path = gpu_check.write_model(folder, gpu_check.QWEN_05B)
    printed = launch(ROOT / "tests/workers/gpu_engine.py", path).stdout.splitlines()
    return json.loads([line for line in printed if line.startswith("{")][-1])


def test_vllm_takes_our_settings_as_they_are_meant(found, record_property):
    record_property("measured", f"started in {found['start_s']:.0f} s")
    assert found["settings"] == {
        "second runner": True,
        "scheduled ahead": True,
        "graphs": True,
        "head": "torch.float32",
        "log-probs": "processed_logprobs",
        "shared prefixes": True,
        "weights by": "in_process",
        "share of memory": True,
    }
    assert found["start_s"] <= 240


def test_seeds_repeat_and_no_two_responses_are_alike(found):
    assert found["again"] == found["first"]
    different = sum(one != two for one, two in zip(found["other"], found["first"])) / len(found["first"])
    assert different >= 0.9
    assert len(set(map(tuple, found["first"]))) >= 0.9 * len(found["first"])


def test_the_engine_takes_what_was_planned_and_gives_it_back(found, record_property):
    """Beside its weights and its KV cache, awake and asleep, and after six pushes."""
    beside, asleep = found["awake"] - found["held"], found["asleep"]
    drift = max(found["after cycles"][1:]) - min(found["after cycles"][1:])
    words = f"beside weights and cache {beside / GIB:.1f} GiB, asleep {asleep / GIB:.1f} GiB"
    seconds = f"waking and a push {statistics.median(found['push_s']):.2f} s"
    record_property("measured", f"{words}, drift {drift / 2**20:.0f} MiB, {seconds}")
    assert found["cache tokens"] >= 0.9 * 1024 * 256
    assert found["awake"] - asleep >= 0.95 * found["held"]
    assert beside <= memory.ENGINE_WORKSPACE and asleep <= memory.ENGINE_ASLEEP
    assert drift <= 64 * 2**20
