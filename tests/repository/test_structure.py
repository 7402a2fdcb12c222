"""The shape of the repository: layers, no import circle, no side effects, small sibling diffs."""

import ast
import importlib
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import tyro
from conftest import ROOT

ALGORITHMS = sorted(path for path in (ROOT / "algos").glob("*.py") if path.name != "__init__.py")
TRAINED_BY_REWARDS = [path for path in ALGORITHMS if path.stem not in ("dpo", "sft")]
COMMON = sorted(path for path in (ROOT / "common").rglob("*.py") if path.name != "__init__.py")
# Imports run one way: a module imports from its own layer or from those before it.
LAYERS = [
    ("errors", "placement"),
    ("processes",),
    ("data", "rewards"),
    ("rollout", "trainer", "weight_sync"),
    ("preflight",),
    ("run",),
]
LAYER_OF = {name: number for number, names in enumerate(LAYERS) for name in names}
LINES_IN = {  # see scripts/sibling_diffs.py
    "dr_grpo": 8,
    "max_rl": 8,
    "gspo": 15,
    "cispo": 15,
    "rloo": 15,
    "reinforce_pp": 30,
    "dpo": 80,
    "dapo": 75,
    "remax": 40,
    "ppo": 115,
    "prime": 150,
    "opd": 50,
}


def module_of(path: Path) -> str:
    """common/run/job.py -> "common.run.job"; common/run/__init__.py -> "common.run"."""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


MODULES = {module_of(path): path for path in (ROOT / "common").rglob("*.py")}


def imports_of(path: Path) -> Iterator[str]:
    """Modules of common/ and algos/ that a file imports, inside functions too."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            # A name that is imported from a package may be one of its modules.
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            names = [name if name in MODULES else node.module for name in names]
        else:
            continue
        yield from (name for name in names if name.split(".")[0] in ("common", "algos"))


@pytest.mark.parametrize("path", COMMON, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_run_one_way(path):
    module = module_of(path)
    for imported in imports_of(path):
        assert imported.split(".")[0] == "common", "common/ imports no algorithm"
        if imported == "common":
            continue
        of, layer = imported.split(".")[1], LAYER_OF[module.split(".")[1]]
        assert LAYER_OF[of] <= layer, f"{module} imports {imported}, which is above it"
        if module.startswith("common.trainer.") and of == "rollout":
            assert imported == "common.rollout.rollout", "of the rollout, the trainer knows the sampled batch alone"
        assert not (module.startswith("common.rollout.") and of == "trainer"), f"{module} imports {imported}"


def test_no_import_circle():
    """Not even one that an import inside a function would hide. A package imports what its __init__.py imports."""
    graph = {name: set(imports_of(path)) - {name} for name, path in MODULES.items()}
    done: set[str] = set()

    def walk(module: str, way: list[str]) -> None:
        assert module not in way, " -> ".join([*way[way.index(module) :], module])
        if module not in done:
            for imported in sorted(graph.get(module, ())):
                walk(imported, [*way, module])
            done.add(module)

    for module in sorted(graph):
        walk(module, [])


@pytest.mark.parametrize("path", ALGORITHMS, ids=lambda path: path.name)
def test_one_file_is_one_algorithm(path):
    assert not [name for name in imports_of(path) if name.startswith("algos")]


@pytest.mark.parametrize("path", COMMON, ids=lambda path: str(path.relative_to(ROOT)))
def test_common_knows_no_algorithm(path):
    """Neither a name nor a flag that only some of the files have."""
    flags = [set(flags_of(algorithm)) for algorithm in TRAINED_BY_REWARDS]
    of_some = set.union(*flags) - set.intersection(*flags)
    names = {algorithm.stem for algorithm in ALGORITHMS} - {"sft", "dapo"}  # dapo is a grader and a data set, too
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            assert node.value not in names, f"{path}:{node.lineno}"
        if isinstance(node, ast.Attribute) and ast.unparse(node.value).split(".")[-1] == "args":
            assert node.attr not in of_some, f"{path}:{node.lineno}: args.{node.attr}"
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "getattr":
            assert not of_some & {getattr(argument, "value", None) for argument in node.args}, f"{path}:{node.lineno}"


def flags_of(path: Path) -> dict[str, str]:
    """Flags of an algorithm file by their names on the command line, with underscores -> their help."""
    parser = tyro.extras.get_parser(importlib.import_module(f"algos.{path.stem}").Args)
    helps = {action.option_strings[0][2:].replace("-", "_"): str(action.help) for action in parser._actions}
    return {flag: text for flag, text in helps.items() if flag not in ("", "help")}


@pytest.mark.parametrize("path", TRAINED_BY_REWARDS, ids=lambda path: path.name)
def test_each_flag_does_something_and_says_what(path):
    helps = flags_of(path)
    assert len(helps) > 40
    silent = [flag for flag, text in helps.items() if len(text.split(" (default")[0]) < 5]
    assert not silent, f"flags without a word: {silent}"
    source = path.read_text() + "".join(other.read_text() for other in COMMON)
    unread = [flag for flag in helps if not re.search(rf'(\.|"){flag}\b', source)]
    assert not unread, f"flags that do nothing: {unread}"


@pytest.mark.parametrize("name, most", LINES_IN.items())
def test_a_sibling_adds_few_lines(name, most):
    sys.path.append(str(ROOT / "scripts"))
    siblings = importlib.import_module("sibling_diffs")
    assert sum(line.startswith("+") for line in siblings.changes(name)[2:]) <= most


@pytest.mark.parametrize("path", [*ALGORITHMS, *COMMON], ids=lambda path: path.name)
def test_no_swallowed_errors(path):
    """A handler names what it expects; one that catches everything raises it again, or says it to the model."""
    if path == ROOT / "common" / "rollout" / "environments" / "tools.py":
        return  # a tool may raise anything, and the model reads it
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ExceptHandler):
            caught = "" if node.type is None else ast.unparse(node.type)
            again = any(isinstance(inner, ast.Raise) for inner in ast.walk(node))
            assert again or caught not in ("", "Exception", "BaseException"), f"{path}:{node.lineno}"


def test_importing_an_algorithm_has_no_side_effect():
    check = "import os, sys; before = dict(os.environ); import torch.distributed as dist\n"
    for path in ALGORITHMS:
        check += f"import algos.{path.stem}\n"
        check += "assert dict(os.environ) == before and not dist.is_initialized() and 'vllm' not in sys.modules\n"
    result = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
