"""What test files of several folders use."""

import importlib.util
import json
import re
import sys
from pathlib import Path

import pytest
import torch
from conftest import ROOT
from transformers import AutoModelForCausalLM


def nightly(*values):
    """Parameters of a test that runs every night, and not for each push."""
    return pytest.param(*values, marks=pytest.mark.nightly)


def load(script: str):
    """The module that a script of this repository is, such as load("scripts/plan.py")."""
    spec = importlib.util.spec_from_file_location(script.replace("/", "_")[:-3], ROOT / script)
    module = importlib.util.module_from_spec(spec)
    if str((ROOT / script).parent) not in sys.path:
        sys.path.append(str((ROOT / script).parent))  # as python has it, for scripts/bench/measure.py
    sys.modules[spec.name] = module  # tyro looks the comments of a nested dataclass up there
    spec.loader.exec_module(module)
    return module


def metrics(run_dir) -> list[dict]:
    """The lines of metrics.jsonl without what depends on the clock."""
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if not k.startswith(("time/", "throughput/"))} for row in rows]


def weights(run_dir, step: int) -> dict[str, torch.Tensor]:
    folder = run_dir / "checkpoints" / f"step_{step:06d}" / "model"
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict()


def same(a: dict, b: dict) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def gaps_of(printed: str) -> list[float]:
    """The numbers that a worker printed as `gap NUMBER`, perhaps behind a progress bar."""
    return [float(number) for number in re.findall(r"\bgap (\d\.\d+e-\d\d|nan|inf)\b", printed)]


def executable(path: Path, text: str) -> Path:
    path.write_text(text)
    path.chmod(0o755)
    return path


def checkpoint_state(step: int, accuracy: float | None = None) -> str:
    """The text of a state.json."""
    facts = {"step": step, "position": 0, "data": "", "fresh": [], "lora": None, "trained": 1, "ranks": 1}
    facts |= {"device": "cpu", "weight_version": 0, "reward": {"weights": {}}, "files": {}}
    return json.dumps(facts | {"eval/accuracy": accuracy})
