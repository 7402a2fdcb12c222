"""What an entry's file and flags may contain, as far as a program can tell. Nothing is run here.

A file of Python can hide anything from a program. These checks stop accidents and make a trick look like one; a person
reads the file's diff to its nearest algorithm, which verify.py prints.
"""

import ast
import codecs
import difflib
import functools
import importlib
import inspect
import io
import tokenize
from pathlib import Path

import tyro

from common.preflight.flags import Flags

ROOT = Path(__file__).resolve().parents[1]
LONGEST = 64 * 1024  # bytes of the file: no room for a table of answers, or for weights
# An entry may import all that these packages show. Numpy is not among them, because the clock does not see it.
PACKAGES = (
    *("collections", "copy", "dataclasses", "functools", "itertools", "math", "random", "re", "statistics", "torch"),
    "typing",
)
# Of other packages it may import these names alone. Whoever may import any name of common/run/job.py gets the modules
# that it imports, too, and with them the answers.
IMPORTS = {
    *(f"pydantic.{name}" for name in ("Field", "NonNegativeFloat", "NonNegativeInt", "PositiveFloat", "PositiveInt")),
    *("common.errors", "common.placement", "common.weight_sync", "common.preflight.flags", "common.preflight.ranges"),
    *("common.preflight.prepare.prepare", "common.rollout.engines", "common.run.guards", "common.run.job"),
    *("common.run.sampling.Batch", "common.run.sampling.PromptSampler", "common.trainer.batching"),
    *("common.trainer.distillation", "common.trainer.model"),
}
# Standard modules that those of PACKAGES have imported, such as the operator of typing: an entry has no use for them.
INSIDE = {
    name
    for package in PACKAGES
    if package != "torch"
    for name, value in vars(importlib.import_module(package)).items()
    if inspect.ismodule(value)
} - {*PACKAGES, "abc"}
# Functions that lead out of the file.
NAMES = {"eval", "exec", "compile", "open", "globals", "locals", "vars", "getattr", "setattr", "delattr"}
NAMES |= {"type", "breakpoint"}
# Names that do, as an attribute or in an import.
LEADS_OUT = {
    # modules that other modules have imported: of the system, of files, of processes and of threads
    *("builtins", "ctypes", "gc", "importlib", "inspect", "io", "json", "multiprocessing", "numpy", "os", "pathlib"),
    *("pickle", "shutil", "socket", "subprocess", "sys", "tempfile", "threading", "zipfile", "Thread", "ThreadPool"),
    # files
    *("Path", "read_text", "read_bytes", "write_text", "write_bytes", "from_file", "from_pretrained", "serialization"),
    *("hub", "load_state_dict", "save_pretrained", "checkpoint", "package", "open", "unlink", "touch", "iterdir"),
    *("glob", "rglob", "symlink_to", "hardlink_to", "run_dir", "metrics_file", "outcomes", "json_lines", "folders"),
    # the answers; asdict and astuple have them with the other fields of a prompt
    *("answer", "solution", "meta", "data", "tasks", "arithmetic", "sources", "rewards", "evaluation"),
    *("asdict", "astuple"),
    # code that is a string, is compiled, or runs where the clock does not count
    *("ForwardRef", "get_type_hints", "compile", "jit", "library", "overrides", "ops", "fx", "cpp_extension"),
    # processes that torch starts
    *("collect_env", "launcher", "elastic"),
    # threads, in which the clock counts nothing
    *("Prefetcher", "sampling"),
    # tensors whose shape is only claimed, and classes and functions that are made of strings
    *("from_local", "make_dataclass", "format", "format_map"),
    # vLLM itself, which would sample without a report
    "llm",
    # they copy attributes by the names in strings
    *("update_wrapper", "wraps"),
}
LEADS_OUT |= INSIDE
# What torch.load and torch.save do, common.trainer.model.load does for the start model alone.
FILES_OF_TORCH = {"torch.load", "torch.save"}
UNSEEN = "fbgemm"  # torch's products of these names compute before the clock is called
DUNDERS = {"__name__", "__doc__", "__init__", "__post_init__"}  # all that an entry needs of names like these
# The shared flags that an entry may set. The speedrun sets the others.
OPEN_FLAGS = {"token-budget", "packing", "activation-checkpointing", "no-activation-checkpointing", "lora-rank"}
OPEN_FLAGS |= {"max-logprob-gap"}
# With another value of these an entry would get answers, or start from another model. It must not set them in code.
FIXED_FIELDS = {"model", "dataset", "eval_dataset", "reward", "environment"}
# Attributes of other objects that an entry may set: the mask and the baseline of a batch. Its own objects are `self`.
MAY_SET = {"response_mask", "baseline"}


class Refused(Exception):
    """An entry or a record that does not count. The message says why, in one line."""


def check_file(file: Path) -> None:
    """Refuse a file that imports or names what an entry has no use for. Raises Refused."""
    try:
        source = file.read_bytes()
        # Of bytes Python reads the encoding in the first lines, as it does when it runs the file.
        tree = ast.parse(source)
        encoding, _ = tokenize.detect_encoding(io.BytesIO(source).readline)
    except (OSError, ValueError, SyntaxError) as error:  # no such file; not a text; not Python
        raise Refused(f"{file.name}: {error}") from None
    if codecs.lookup(encoding).name not in ("utf-8", "utf-8-sig"):
        raise Refused(f"{file.name}: its encoding is {encoding}; a person reads it as utf-8")
    size = len(source)
    if size > LONGEST:
        raise Refused(f"{file.name}: {size} bytes, and the most is {LONGEST}")
    harmless = docstrings(tree)
    own = own_selves(tree)
    for node in ast.walk(tree):
        if node in harmless:
            continue
        problem = problem_of_import(node) or problem_of_name(node) or problem_of_change(node, own)
        if problem:
            raise Refused(f"{file.name}:{node.lineno}: {problem}")
        for child in ast.iter_child_nodes(node):
            if problem := problem_of_child(child, node):
                raise Refused(f"{file.name}:{child.lineno}: {problem}")


def docstrings(tree: ast.AST) -> set[ast.AST]:
    """Texts that are statements. They may hold any words."""
    alone = (node.value for node in ast.walk(tree) if isinstance(node, ast.Expr))
    return {value for value in alone if isinstance(value, ast.Constant)}


def own_selves(tree: ast.AST) -> set[ast.AST]:
    """The uses of `self` in methods that have it as their first parameter: there it is an object of the file's own."""
    own = set()
    for owner in ast.walk(tree):
        if isinstance(owner, ast.ClassDef):
            methods = [node for node in owner.body if isinstance(node, ast.FunctionDef)]
            inside = [node for method in methods if names_of(method.args)[:1] == ["self"] for node in ast.walk(method)]
            own |= {node for node in inside if isinstance(node, ast.Name) and node.id == "self"}
    return own


def names_of(arguments: ast.arguments) -> list[str]:
    return [argument.arg for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]


def imports_of(node: ast.AST) -> list[str]:
    """The full names of what a statement imports: from common.run import job gives common.run.job."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        return [f"{'.' * node.level}{node.module or ''}.{alias.name}" for alias in node.names]
    return []


def problem_of_import(node: ast.AST) -> str:
    """Why an entry may not import this. "" if it may, or if the node is no import."""
    for name in imports_of(node):
        if name.endswith(".*"):
            return f"imports {name}; an entry names what it imports"
        package, *rest = name.split(".")
        if package not in PACKAGES and name not in IMPORTS:
            return f"imports {name}; an entry may import {', '.join([*PACKAGES, *sorted(IMPORTS)])}"
        for part in rest if package in PACKAGES else ():
            if part.startswith(("_", UNSEEN)) or part in LEADS_OUT or name in FILES_OF_TORCH:
                return f"imports {name}; an entry has no use for {part}"
    return ""


def problem_of_name(node: ast.AST) -> str:
    """Why an entry may not use this name or attribute, or define this function. "" if it may."""
    name = ""
    if isinstance(node, ast.Name):
        name = node.id
    elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        # The clock does not see what __torch_dispatch__ of a tensor computes.
        name = node.name
    if name in NAMES or (name.startswith("__") and name not in DUNDERS):
        return f"an entry has no use for {name}"
    if isinstance(node, ast.Attribute):
        private = node.attr.startswith("_") and node.attr not in DUNDERS
        if private or node.attr.startswith(UNSEEN) or node.attr in LEADS_OUT or ast.unparse(node) in FILES_OF_TORCH:
            return f"an entry has no use for .{node.attr}"
    if isinstance(node, ast.MatchClass):  # case object(answer=a) reads an attribute
        return "an entry has no use for a match by class"
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        # As in dataclasses.replace(args, **{"reward": ...}), or in the names of the attributes of a new class.
        dunder = "__" in node.value and node.value != "__main__"
        if dunder or node.value in FIXED_FIELDS - {"model"}:
            return f"an entry has no use for the string {node.value!r}"
    return ""


def problem_of_child(node: ast.AST, parent: ast.AST) -> str:
    """Why this stands in a place where it makes an object pass for another. "" if it doesn't."""
    # With another name, torch.load() would be somebody's load(), and with the name self its functions could be set.
    if isinstance(node, ast.Name) and node.id == "torch" and not isinstance(parent, ast.Attribute):
        return "hands torch on; write torch before a dot"
    if isinstance(node, ast.alias) and node.name == "torch" and node.asname:
        return f"imports torch as {node.asname}; write torch before a dot"
    is_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
    if is_function and not isinstance(parent, ast.ClassDef) and "self" in names_of(node.args):
        return "an entry has no use for self outside of a method"
    # A property of this name could change between a check and its use.
    if isinstance(parent, ast.ClassDef):
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        names = {getattr(node, "name", ""), *(target.id for target in targets if isinstance(target, ast.Name))}
        if taken := names & FIXED_FIELDS:
            return f"defines {min(taken)}, which the speedrun sets"
    return ""


def problem_of_change(node: ast.AST, own: set[ast.AST]) -> str:
    """Why an entry may not make this change: it is to what is not its own, or what the speedrun sets. "" if it may.

    own: the names that are objects of the file's own.
    """
    if isinstance(node, ast.keyword) and node.arg in FIXED_FIELDS:
        return f"sets {node.arg}, which the speedrun sets"
    if not isinstance(node, ast.Attribute) or not isinstance(node.ctx, ast.Store | ast.Del):
        return ""
    if node.attr in FIXED_FIELDS:
        return f"sets .{node.attr}, which the speedrun sets"
    if node.value not in own and node.attr not in MAY_SET:
        return f"changes {ast.unparse(node)}, which is not the file's own"
    return ""


@functools.cache
def refused_flags() -> set[str]:
    """The flags that all algorithm files share, without the open ones and without the dashes before them."""
    options = [name for action in tyro.extras.get_parser(Flags)._actions for name in action.option_strings]
    return {name.lstrip("-") for name in options} - OPEN_FLAGS


def check_flags(flags: list[str]) -> None:
    """Refuse flags that the speedrun sets itself. Raises Refused."""
    for word in flags:
        name = word.lstrip("-").partition("=")[0].replace("_", "-")
        if word.startswith("-") and name in refused_flags():
            raise Refused(f"--{name}: the speedrun sets it, or has no use for it")


def nearest_diff(file: Path) -> str:
    """The diff of a file to the algorithm that it is nearest to, which a person reads."""
    lines = file.read_text().splitlines()
    siblings = {path: path.read_text().splitlines() for path in sorted((ROOT / "algos").glob("[!_]*.py"))}

    def similarity(path: Path) -> float:
        return difflib.SequenceMatcher(None, siblings[path], lines, autojunk=False).ratio()

    nearest = max(siblings, key=similarity)
    diff = difflib.unified_diff(siblings[nearest], lines, f"algos/{nearest.name}", file.name, lineterm="", n=1)
    return "\n".join(diff) or f"{file.name} is algos/{nearest.name}"
