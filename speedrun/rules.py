"""What an entry's file and flags may contain, as far as a program can tell. Nothing is run here.

A file of Python can hide anything from a program. These checks stop accidents and make a trick look like one; a person
reads the file's diff to its nearest algorithm, which verify.py prints.
"""

import ast
import difflib
import functools
from pathlib import Path

import tyro

from common.preflight.flags import Flags

ROOT = Path(__file__).resolve().parents[1]
LONGEST = 64 * 1024  # bytes of the file: no room for a table of answers, or for weights
# Neither numpy, which the clock does not see, nor modules that reach the answers, the clock or other processes.
IMPORTS = (
    *("collections", "copy", "dataclasses", "functools", "itertools", "math", "pydantic", "random", "statistics"),
    *("torch", "typing", "common.errors", "common.placement", "common.weight_sync", "common.preflight.flags"),
    *("common.preflight.prepare", "common.preflight.ranges", "common.rollout.engines", "common.run.guards"),
    *("common.run.job", "common.run.sampling", "common.trainer"),
)
# Functions that lead out of the file.
NAMES = {"eval", "exec", "compile", "open", "globals", "locals", "vars", "getattr", "setattr", "delattr"}
# Attributes that do: modules that other modules have imported, threads, files, compiled code.
ATTRIBUTES = {
    *("os", "sys", "gc", "inspect", "importlib", "ctypes", "threading", "multiprocessing", "subprocess", "numpy"),
    *("data", "tasks", "arithmetic", "sources", "rewards", "evaluation", "from_pretrained", "from_file", "hub"),
    *("load_state_dict", "compile", "jit", "ThreadPool", "Thread", "overrides", "library"),
}
# The shared flags that an entry may set. The speedrun sets the others.
OPEN_FLAGS = {"token-budget", "packing", "activation-checkpointing", "no-activation-checkpointing", "lora-rank"}
OPEN_FLAGS |= {"max-logprob-gap"}


class Refused(Exception):
    """An entry or a record that does not count. The message says why, in one line."""


def check_file(file: Path) -> None:
    """Refuse a file that imports or names what an entry has no use for. Raises Refused."""
    source = file.read_text()
    if len(source.encode()) > LONGEST:
        raise Refused(f"{file.name}: {len(source.encode())} bytes, and the most is {LONGEST}")
    try:
        tree = ast.parse(source)
    except SyntaxError as error:
        raise Refused(f"{file.name}: {error}") from None
    imported = set()
    for node in ast.walk(tree):
        where = f"{file.name}:{getattr(node, 'lineno', 0)}"
        for name in imports_of(node):
            if not name.startswith(tuple(f"{allowed}." for allowed in IMPORTS)):
                raise Refused(f"{where}: imports {name.rstrip('.')}; an entry may import {', '.join(IMPORTS)}")
        if isinstance(node, ast.Import | ast.ImportFrom):
            imported |= {alias.asname or alias.name.partition(".")[0] for alias in node.names}
        if isinstance(node, ast.Name) and node.id in NAMES | {"__import__", "__builtins__"}:
            raise Refused(f"{where}: an entry has no use for {node.id}")
        private = isinstance(node, ast.Attribute) and node.attr.startswith("_") and node.attr != "__init__"
        if private or (isinstance(node, ast.Attribute) and node.attr in ATTRIBUTES):
            raise Refused(f"{where}: an entry has no use for .{node.attr}")
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store | ast.Del):
            base = node.value
            while isinstance(base, ast.Attribute):
                base = base.value
            if isinstance(base, ast.Name) and base.id in imported:
                raise Refused(f"{file.name}:{node.lineno}: changes {ast.unparse(node)}, which is not the file's own")


def imports_of(node: ast.AST) -> list[str]:
    """What a statement imports, with a dot behind each name."""
    if isinstance(node, ast.Import):
        return [f"{alias.name}." for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        return [f"{'.' * node.level}{node.module or ''}.{alias.name}." for alias in node.names]
    return []


@functools.cache
def refused_flags() -> set[str]:
    """The flags that all algorithm files share, without the open ones."""
    options = [name for action in tyro.extras.get_parser(Flags)._actions for name in action.option_strings]
    return {name.lstrip("-") for name in options} - OPEN_FLAGS


def check_flags(flags: list[str]) -> None:
    """Refuse flags that the speedrun sets itself. Raises Refused."""
    for word in flags:
        name = word.lstrip("-").partition("=")[0].replace("_", "-")
        if word.startswith("-") and name in refused_flags():
            raise Refused(f"--{name}: the speedrun sets it, or has no use for it")


def nearest_diff(file: Path) -> str:
    """The diff of a file to the algorithm that it is nearest to."""
    lines = file.read_text().splitlines()
    siblings = {path: path.read_text().splitlines() for path in sorted((ROOT / "algos").glob("[!_]*.py"))}
    nearest = max(siblings, key=lambda path: difflib.SequenceMatcher(None, siblings[path], lines, False).ratio())
    diff = difflib.unified_diff(siblings[nearest], lines, f"algos/{nearest.name}", file.name, lineterm="", n=1)
    return "\n".join(diff) or f"{file.name} is algos/{nearest.name}"
