"""The promises about the shape of the repository: reading budget, flags, layering, no side effects."""

import ast
import subprocess
import sys

import pytest
from conftest import ROOT

ALGORITHMS = sorted(path for path in (ROOT / "algos").glob("*.py") if path.name != "__init__.py")
COMMON = sorted(path for path in (ROOT / "common").glob("*.py") if path.name != "__init__.py")


def lines(path) -> int:
    return len(path.read_text().splitlines())


@pytest.mark.parametrize("path", ALGORITHMS, ids=lambda path: path.name)
def test_algorithm_file(path):
    source = path.read_text()
    tree = ast.parse(source)
    assert lines(path) <= 450
    (args,) = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "Args"]
    flags = [node.target.id for node in args.body if isinstance(node, ast.AnnAssign)]
    assert len(flags) <= 40
    unread = [flag for flag in flags if f"args.{flag}" not in source and f'"{flag}"' not in source]
    assert not unread, f"flags that do nothing: {unread}"
    imported = [node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    assert not [name for name in imported if name.startswith("algos")], "one file is one algorithm"


@pytest.mark.parametrize("path", COMMON, ids=lambda path: path.name)
def test_common_module(path):
    source = path.read_text()
    assert lines(path) <= 250
    assert "import algos" not in source and "from algos" not in source
    names = {algorithm.stem for algorithm in ALGORITHMS} - {"sft", "dapo"}  # dapo is a grader and a data set, too
    words = {node.value for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Constant)}
    assert not names & {word for word in words if isinstance(word, str)}, "common knows no algorithm's name"


@pytest.mark.parametrize("path", [*ALGORITHMS, *COMMON], ids=lambda path: path.name)
def test_no_swallowed_errors(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ExceptHandler):
            assert node.type is not None and "Exception" not in ast.unparse(node.type)


def test_importing_an_algorithm_has_no_side_effect():
    check = "import os, sys; before = dict(os.environ); import torch.distributed as dist\n"
    for path in ALGORITHMS:
        check += f"import algos.{path.stem}\n"
        check += "assert dict(os.environ) == before and not dist.is_initialized() and 'vllm' not in sys.modules\n"
    result = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def test_following_grpo_takes_at_most_3600_lines():
    """Everything that works in a default run of algos/grpo.py; other data, rewards and files are beside its path."""
    beside = {"math_grading", "rendering", "report", "reward_model", "reward_service", "sources", "text_rewards"}
    beside |= {
        "diagnosis",
        "errors",
        "folders",
        "hf_engine",
        "json_lines",
        "layers",
        "plan",
        "reward_ahead",
        "reward_reply",
        "safe_pickle",
        "selftest",
        "server_control",
        "server_engine",
        "server_main",
        "server_requests",
        "server_restart",
        "server_weights",
        "sequence_parallel",
        "servers",
        "traces",
        "worker_main",
        "workers",
    }
    path = [module for module in COMMON if module.stem not in beside]
    assert len(path) == len(COMMON) - len(beside)
    assert lines(ROOT / "algos/grpo.py") + sum(map(lines, path)) <= 3600
