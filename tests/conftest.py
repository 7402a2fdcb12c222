"""Shared fixtures: tiny models on disk, a world of one, and a way to start workers as a user starts scripts."""

import os
import subprocess
import sys
import tempfile
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import pytest
import torch
from filelock import FileLock
from transformers import AutoModelForCausalLM, Qwen2Config

from common import embedded, placement

ROOT = Path(__file__).parents[1]
CORES = os.sched_getaffinity(0)
WORKERS = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))


def pytest_configure(config) -> None:
    """Under pytest -n N each worker, and what it launches, keeps to its share of the cores: sharing them is slower."""
    if hasattr(config, "workerinput") and len(CORES) >= WORKERS:
        mine = int(config.workerinput["workerid"].removeprefix("gw"))
        os.sched_setaffinity(0, sorted(CORES)[mine::WORKERS])


def save_model(folder: Path, config: Qwen2Config, spread: float = 0.0) -> str:
    """A model with random weights; `spread` adds noise so that log-probs are not all alike."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * spread)
    model.save_pretrained(folder)
    embedded.tokenizer().save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="session")
def models(tmp_path_factory) -> dict[str, str]:
    """Folders of the embedded architecture: untied and tied embeddings, grouped-query attention, both."""
    folder = tmp_path_factory.mktemp("models")
    grouped, both = embedded.config(), embedded.config(tie_word_embeddings=True)
    grouped.num_key_value_heads = both.num_key_value_heads = 2
    return {
        "untied": save_model(folder / "untied", embedded.config(), 0.05),
        "tied": save_model(folder / "tied", embedded.config(tie_word_embeddings=True), 0.05),
        "grouped": save_model(folder / "grouped", grouped, 0.05),
        "tied and grouped": save_model(folder / "both", both, 0.05),
    }


@pytest.fixture(scope="session")
def world():
    """A world of one rank in this process, for tests that start no vLLM engine (that one takes the group down)."""
    world = placement.init(seed=0)
    yield world
    placement.finish(world)


def launch(
    *command,
    ranks: int = 1,
    timeout: int = 600,
    check: bool = True,
    cwd=None,
    servers: bool = False,
    launcher_flags=(),
) -> subprocess.CompletedProcess:
    """Run a script as a user would: plain python, or torchrun with more than one rank, on all cores.

    Several ranks run one launch at a time: two engines of tensor parallelism would meet in vLLM's shared memory.
    servers: the run starts rollout servers, which want a core of their own.
    """
    launcher = [sys.executable]
    if torch.cuda.is_available() and ranks > torch.cuda.device_count():
        pytest.skip(f"{ranks} ranks need as many GPUs")
    if ranks > 1:
        launcher += ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks), "--master-port", "0"]
        launcher += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", *launcher_flags]
    inherited = {name: value for name, value in os.environ.items() if name not in embedded.TORCHRUN_VARIABLES}
    alone = ranks > 1 or servers
    one_at_a_time = FileLock(Path(tempfile.gettempdir()) / "onefile-rl-tests.lock") if alone else nullcontext()
    spread = partial(os.sched_setaffinity, 0, CORES) if alone else None
    with one_at_a_time:
        result = subprocess.run(
            [*launcher, *map(str, command)],
            env=inherited, cwd=cwd, timeout=timeout, capture_output=True, text=True, preexec_fn=spread,
        )  # fmt: skip
    if check:
        assert result.returncode == 0, f"{command} failed:\n{result.stdout[-3000:]}\n{result.stderr[-3000:]}"
    return result


def relative_difference(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """|one - other| / |one| over all tensors together."""
    assert one.keys() == other.keys()
    difference = sum((one[name] - other[name]).double().square().sum() for name in one)
    return (difference / sum(tensor.double().square().sum() for tensor in one.values())).sqrt().item()
