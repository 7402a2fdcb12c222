"""The shape of the repository: layers, no import circle, no side effects, flags that are read, small sibling diffs."""

import ast
import dataclasses
import functools
import importlib
import inspect
import itertools
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import tyro
from cases import ALGORITHMS
from conftest import ROOT

from common.preflight.flags import Flags

FILES = sorted((ROOT / "algos").glob("[!_]*.py"))
COMMON = sorted((ROOT / "common").rglob("*.py"))
TREES = {path: ast.parse(path.read_text()) for path in [*FILES, *COMMON]}
# Imports run one way: a module imports from its own layer or from those before it.
LAYERS = [
    ("cores", "errors", "placement"),
    ("processes",),
    ("data", "rewards"),
    ("rollout", "trainer", "weight_sync"),
    ("preflight",),
    ("run",),
]
LAYER_OF = {name: number for number, names in enumerate(LAYERS) for name in names}
# The statements that a file adds to its sibling (scripts/sibling_diffs.py). A diff is read like the paper, so keep it.
MOST_ADDED = {"dr_grpo": 5, "max_rl": 3, "rloo": 13, "dapo": 40, "gspo": 12, "cispo": 10, "ppo": 92}


def module_of(path: Path) -> str:
    """common/run/job.py -> "common.run.job"; common/run/__init__.py -> "common.run"."""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


MODULES = {module_of(path): path for path in COMMON}


def imports_of(path: Path) -> Iterator[str]:
    """Modules of common/ and algos/ that a file imports, inside functions too."""
    for node in ast.walk(TREES[path]):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            # A name that is imported from a package may be one of its modules.
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            names = [name if name in MODULES else node.module for name in names]
        else:
            continue
        yield from (name for name in names if name.split(".")[0] in ("common", "algos"))


def test_imports_run_one_way():
    for path in COMMON:
        module = module_of(path)
        if module == "common":
            continue
        for imported in imports_of(path):
            assert imported.split(".")[0] == "common", f"{module} imports {imported}: common/ imports no algorithm"
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


def test_one_file_is_one_algorithm():
    assert not [(path.name, name) for path in FILES for name in imports_of(path) if name.startswith("algos")]


def test_common_knows_no_algorithm():
    """Neither a name nor a flag that only some of the files have."""
    flags = [set(flags_of(name)) for name in ALGORITHMS]
    of_some = set.union(*flags) - set.intersection(*flags)
    names = {path.stem for path in FILES} - {"sft", "dapo"}  # dapo is a grader and a data set, too
    for path in COMMON:
        for node in ast.walk(TREES[path]):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                assert node.value not in names, f"{path}:{node.lineno}"
            if isinstance(node, ast.Attribute) and holder_of(node) == "args":
                assert node.attr not in of_some, f"{path}:{node.lineno}: args.{node.attr}"
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "getattr":
                given = {getattr(argument, "value", None) for argument in node.args}
                assert not of_some & given, f"{path}:{node.lineno}"


def flags_of(name: str) -> dict[str, str]:
    """Flags of an algorithm file by their names on the command line, with underscores -> their help."""
    parser = tyro.extras.get_parser(importlib.import_module(f"algos.{name}").Args)
    helps = {action.option_strings[0][2:].replace("-", "_"): str(action.help) for action in parser._actions}
    return {flag: text for flag, text in helps.items() if flag not in ("", "help")}


def holder_of(node: ast.Attribute) -> str:
    """Of what an attribute is read, by its last name: "args" for args.seed and for self.args.seed."""
    if isinstance(node.value, ast.Attribute):
        return node.value.attr
    return node.value.id if isinstance(node.value, ast.Name) else ""


class Reads(ast.NodeVisitor):
    """What code reads: ("args", "seed") for args.seed. A check or an error that shows a flag does not use it."""

    def __init__(self, *trees: ast.AST):
        self.found: set[tuple[str, str]] = set()
        for tree in trees:
            self.visit(tree)

    def visit_FunctionDef(self, node):
        if not node.name.startswith(("check", "show")):
            self.generic_visit(node)

    def visit_Raise(self, node):
        pass

    def visit_Attribute(self, node):
        if isinstance(node.ctx, ast.Load):
            self.found.add((holder_of(node), node.attr))
        self.generic_visit(node)


@functools.cache
def reads_of(*paths: Path) -> set[tuple[str, str]]:
    return Reads(*(TREES[path] for path in paths)).found


def unread_in_group(group) -> list[str]:
    """Fields of a dataclass of flags that nothing in common/ reads."""
    reads = reads_of(*COMMON)
    # common/ hands a group around under the name of its class, or of a class that it extends.
    holders = {cls.__name__.lower() for cls in type(group).__mro__}
    own_methods = Reads(ast.parse(inspect.getsource(type(group)))).found
    unread = []
    for field in dataclasses.fields(group):
        outside = {(holder, field.name) for holder in holders} & reads
        if not outside and ("self", field.name) not in own_methods:
            unread.append(field.name)
    return unread


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_each_flag_is_read_and_says_what_it_does(path):
    args = importlib.import_module(f"algos.{path.stem}").Args
    # The frame around training reads flags that all files share. Only the file itself can use the others.
    frame = COMMON if issubclass(args, Flags) else [file for file in COMMON if file.name == "offline.py"]
    by_file = reads_of(path)
    by_frame = reads_of(*frame)
    shared = {field.name for field in dataclasses.fields(Flags)}
    unread = []
    for field in dataclasses.fields(args):
        readers = by_file | by_frame if field.name in shared else by_file
        if ("args", field.name) not in readers:
            unread.append(field.name)
        if dataclasses.is_dataclass(field.default):
            unread += unread_in_group(field.default)
    assert not unread, f"flags that nothing reads: {unread}"
    silent = [flag for flag, text in flags_of(path.stem).items() if len(text.split(" (default")[0]) < 5]
    assert not silent, f"flags without a word: {silent}"


def test_each_flag_of_a_script_is_read():
    for path in (ROOT / "scripts").rglob("*.py"):
        tree = ast.parse(path.read_text())
        reads = {name for holder, name in Reads(tree).found if holder in ("args", "self")}
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and node.name == "Args":
                flags = {field.target.id for field in node.body if isinstance(field, ast.AnnAssign)}
                assert flags <= reads, f"{path}: flags that nothing reads: {flags - reads}"


@pytest.mark.parametrize("name, most", MOST_ADDED.items())
def test_a_file_stays_close_to_its_sibling(name, most, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "scripts")
    siblings = importlib.import_module("sibling_diffs")
    added = [line for line in siblings.changes(name)[2:] if line.startswith("+")]
    assert len(added) <= most, "\n".join(added)


def test_no_swallowed_errors():
    """A handler names what it expects; one that catches everything raises it again, or tells who called it."""
    # A tool may raise anything, and the model reads it. So may a program, and its tests read it. So may a tracker's
    # package, and the user reads it.
    tell = ("rollout/environments/tools.py", "rewards/code_roles.py", "rewards/code_values.py", "run/trackers.py")
    for path, tree in TREES.items():
        if path in [ROOT / "common" / name for name in tell]:
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.ExceptHandler):
                caught = "" if node.type is None else ast.unparse(node.type)
                again = any(isinstance(inner, ast.Raise) for inner in ast.walk(node))
                assert again or caught not in ("", "Exception", "BaseException"), f"{path}:{node.lineno}"


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_each_gradient_norm_is_checked_before_the_optimizer_uses_it(path):
    """Otherwise NaN would be in the weights, and what is left of the run could not be saved."""
    clips = sum(isinstance(node, ast.Attribute) and node.attr == "clip_grad_norm_" for node in ast.walk(TREES[path]))
    checked = 0
    for loop in (node for node in ast.walk(TREES[path]) if isinstance(node, ast.For)):
        for statement, following in itertools.pairwise(loop.body):
            if isinstance(statement, ast.Assign) and "clip_grad_norm_(" in ast.unparse(statement):
                (name,) = statement.targets
                pattern = rf"guards\.stop_unless_finite\(tracker, \'\w+/grad_norm\', {name.id}\)"
                assert re.fullmatch(pattern, ast.unparse(following)), ast.unparse(following)
                checked += 1
    assert checked == clips >= 1


def test_importing_an_algorithm_has_no_side_effect():
    check = "import os, sys; before = dict(os.environ); import torch.distributed as dist\n"
    for path in FILES:
        check += f"import algos.{path.stem}\n"
        check += "assert dict(os.environ) == before and not dist.is_initialized() and 'vllm' not in sys.modules\n"
    result = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
