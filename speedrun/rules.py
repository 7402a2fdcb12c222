"""What an entry's file and flags may contain, as far as a program can tell. Nothing is run here.

A file of Python can hide anything from a program. These checks stop accidents. Whoever wants to get past them has to
write code that looks like a trick to the person who reads the diff that verify.py prints.
"""

import ast
import codecs
import difflib
import functools
import importlib
import inspect
import io
import re
import tokenize
from pathlib import Path

import torch
import tyro

from common.preflight.flags import Flags
from common.run import directory

ROOT = Path(__file__).resolve().parents[1]
LONGEST = 64 * 1024  # bytes of the file: no room for a table of answers, or for weights
NEARLY = 0.95  # of the greatest similarity: a sibling that is as good to compare with, if the file names it
LONGEST_LINE = 200  # characters: a person would not read the rest of a longer line
CURES = "what to write instead: speedrun/README.md, What is refused in a file"
# Functions of torch with names like these: products that the clock does not see, and files.
UNSEEN = ("fbgemm", "from_file")
# Module that an entry may import -> what it may name there, besides modules of this table. Whatever else a module
# shows is refused: most have imported others, and with them files, processes, numpy or the answers. A module of common/
# has functions that load weights or start an engine without the checks of entrant.py, so only what files of algos/ and
# records use is named. ALL: what a module of torch shows that is no module.
ALL = None
MODULES = {
    "collections": {"Counter", "OrderedDict", "defaultdict", "deque"},
    "collections.abc": {"Callable", "Iterable", "Iterator", "Mapping", "Sequence"},
    "copy": {"copy", "deepcopy"},
    "dataclasses": {"dataclass", "field", "fields", "replace", "KW_ONLY"},
    "functools": {"cache", "lru_cache", "partial", "reduce"},
    "itertools": {
        *("accumulate", "chain", "combinations", "compress", "count", "cycle", "dropwhile", "groupby"),
        *("islice", "pairwise", "permutations", "product", "repeat", "starmap", "takewhile", "tee", "zip_longest"),
    },
    "math": {  # without sumprod and dist, which are products of vectors
        *("ceil", "comb", "copysign", "cos", "e", "erf", "exp", "expm1", "factorial", "floor", "fsum", "gcd", "inf"),
        *("isclose", "isfinite", "isinf", "isnan", "isqrt", "lcm", "lgamma", "log", "log10", "log1p", "log2", "nan"),
        *("perm", "pi", "pow", "prod", "sin", "sqrt", "tan", "tanh", "trunc"),
    },
    "random": {"Random"},  # without its functions, whose numbers don't depend on --seed
    "re": {"compile", "findall", "finditer", "fullmatch", "match", "search", "split", "sub", "IGNORECASE", "MULTILINE"},
    "statistics": {"fmean", "mean", "median", "pstdev", "pvariance", "quantiles", "stdev", "variance"},
    "typing": {
        *("Annotated", "Any", "Callable", "ClassVar", "Final", "Iterable", "Iterator", "Literal", "NamedTuple"),
        *("Optional", "Self", "Sequence", "Union"),
    },
    "pydantic": {"Field", "NonNegativeFloat", "NonNegativeInt", "PositiveFloat", "PositiveInt"},
    "torch": {
        *(name for name in dir(torch._C._VariableFunctions) if not name.startswith(UNSEEN)),  # functions of tensors
        *torch.functional.__all__,
        *(name for name in dir(torch) if isinstance(getattr(torch, name), torch.dtype)),
        *("Generator", "Size", "Tensor", "device", "dtype", "e", "enable_grad", "finfo", "get_rng_state", "iinfo"),
        *("inf", "inference_mode", "is_grad_enabled", "is_tensor", "manual_seed", "nan", "no_grad", "pi"),
        *("set_grad_enabled", "set_rng_state"),
    },
    "torch.autograd": {"Function", "grad"},
    "torch.distributions": ALL,
    "torch.linalg": ALL,
    "torch.nn": ALL,
    "torch.nn.functional": ALL,
    "torch.nn.init": ALL,
    "torch.nn.utils": ALL,
    "torch.nn.utils.rnn": {"pad_sequence", "unpad_sequence"},
    "torch.optim": ALL,
    "torch.optim.lr_scheduler": ALL,
    "torch.optim.swa_utils": ALL,
    "torch.special": ALL,
    "torch.utils": set(),
    "torch.utils.checkpoint": {"checkpoint"},
    "common": set(),
    "common.errors": {"BadInput", "RunFailed", "say", "warn"},
    "common.placement": {"World", "init"},
    "common.preflight": set(),
    "common.preflight.flags": {"EMBEDDED", "Flags", "launch"},
    "common.preflight.prepare": {"prepare"},
    "common.preflight.ranges": {"Fraction", "LearningRate", "PositiveFraction", "Temperature", "WeightCap"},
    "common.rollout": set(),
    "common.rollout.engines": {"start"},
    "common.run": set(),
    "common.run.guards": {"stop_unless_finite"},
    "common.run.job": {"nothing_to_do", "start"},
    "common.run.sampling": {"Batch", "PromptSampler"},
    "common.trainer": set(),
    "common.trainer.batching": {"Compute", "MicroBatch", "after_prompts_of", "common_beginning", "pack", "split"},
    "common.trainer.model": {
        *("frozen_logprobs", "frozen_values", "load", "load_reference", "reshard", "response_logprobs"),
        "response_values",
    },
    "common.weight_sync": {"push"},
}
# Functions that lead out of the file.
NAMES = {"eval", "exec", "compile", "open", "globals", "locals", "vars", "getattr", "setattr", "delattr"}
NAMES |= {"type", "breakpoint"}
# Attributes that do, of any object. MODULES closes the ways through modules, and these names are a second lock.
LEADS_OUT = {
    # modules that other modules have imported: of the system, of files, of processes and of threads
    *("builtins", "ctypes", "gc", "importlib", "inspect", "io", "json", "multiprocessing", "numpy", "os", "pathlib"),
    *("pickle", "shutil", "socket", "subprocess", "sys", "tempfile", "threading", "zipfile", "Thread", "ThreadPool"),
    # files
    *("Path", "read_text", "read_bytes", "write_text", "write_bytes", "from_file", "from_pretrained", "serialization"),
    *("hub", "load_state_dict", "save_pretrained", "checkpoint", "package", "open", "unlink", "touch", "iterdir"),
    *("rename", "rmdir", "mkdir", "walk"),
    *("glob", "rglob", "symlink_to", "hardlink_to", "run_dir", "metrics_file", "outcomes", "json_lines", "folders"),
    *("load", "saver"),  # of a run: they load checkpoints
    # the answers; asdict and astuple have them with the other fields of a prompt
    *("answer", "solution", "meta", "data", "tasks", "arithmetic", "sources", "rewards", "evaluation"),
    *("asdict", "astuple"),
    # it can return arrays of numpy, whose products the clock does not see
    "tokenizer",
    # code that is a string, is compiled, or runs where the clock does not count
    *("ForwardRef", "get_type_hints", "compile", "jit", "library", "overrides", "ops", "fx", "cpp_extension"),
    # processes that torch starts
    *("collect_env", "launcher", "elastic"),
    # threads
    *("Prefetcher", "prefetcher", "sampling"),
    # tensors whose shape is only claimed, and classes and functions that are made of strings
    *("from_local", "make_dataclass", "format", "format_map"),
    # vLLM itself, which would sample without a report
    "llm",
    # they copy attributes by the names in strings
    *("update_wrapper", "wraps"),
    # of a generator, an error or a frame: the names of others
    *(f"{kind}_{what}" for kind in ("gi", "cr", "ag") for what in ("await", "code", "frame", "origin", "yieldfrom")),
    *("tb_frame", "tb_next", "f_back", "f_builtins", "f_code", "f_globals", "f_locals", "f_trace"),
}
DUNDERS = {"__name__", "__doc__"}  # all that an entry needs of names like these, besides methods of FRESH
FRESH = {"__init__", "__post_init__"}  # methods whose `self` is new, and so the file's own
SAME = {"self", "super", "Literal", "Field"}  # names on which the checks rely, so an entry gives them no other meaning
# The shared flags that an entry may set. The speedrun sets the others.
OPEN_FLAGS = {"token-budget", "packing", "activation-checkpointing", "no-activation-checkpointing", "lora-rank"}
OPEN_FLAGS |= {"max-logprob-gap"}
# With another value of these an entry would get answers, or start from another model. It must not set them in code.
FIXED_FIELDS = {"model", "dataset", "eval_dataset", "reward", "environment"}
# Attributes of other objects that an entry may set: the mask and the baseline of a batch.
MAY_SET = {"response_mask", "baseline"}


class Refused(Exception):
    """An entry or a record that does not count. The message says why."""


def check_file(file: Path) -> None:
    """Refuse a file that imports or names what an entry has no use for. Raises Refused."""
    try:
        check_source(file)
    except (RecursionError, MemoryError):
        raise Refused(f"{file.name}: an expression is nested too deeply to be read") from None


def check_source(file: Path) -> None:
    """check_file(), but too deep an expression raises RecursionError or MemoryError."""
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
    modules = modules_of(tree, file)
    own, self_parameters = own_selves(tree)
    things = [node for node in ast.walk(tree) if not isinstance(node, ast.ClassDef | ast.alias)]
    variables = {name for node in things for name in bound(node)}
    for node in ast.walk(tree):
        if node in harmless:
            continue
        problem = problem_of_import(node) or problem_of_name(node, modules) or problem_of_change(node, own)
        problem = problem or problem_of_class(node, modules) or problem_of_annotation(node, modules, variables)
        reserved = SAME if isinstance(node, ast.alias) else {*SAME, *modules}
        if not problem and node not in self_parameters and (taken := reserved & bound(node)):
            problem = f"gives {min(taken)} another meaning; name your own things otherwise"
        if problem:
            raise Refused(f"{file.name}:{node.lineno}: {problem} ({CURES})")
        for child in ast.iter_child_nodes(node):
            if problem := problem_of_child(child, node, modules):
                raise Refused(f"{file.name}:{child.lineno}: {problem} ({CURES})")
    lines = source.decode(encoding).splitlines()
    if too_long := [number for number, line in enumerate(lines, 1) if len(line) > LONGEST_LINE]:
        raise Refused(f"{file.name}:{too_long[0]}: more than {LONGEST_LINE} characters; break the line")


def docstrings(tree: ast.AST) -> set[ast.AST]:
    """Texts that are statements. They may hold any words."""
    alone = (node.value for node in ast.walk(tree) if isinstance(node, ast.Expr))
    return {value for value in alone if isinstance(value, ast.Constant)}


def modules_of(tree: ast.AST, file: Path) -> dict[str, str]:
    """Name in the file -> the module that an import gives to it. Raises Refused if there are two."""
    modules = {}
    for node in ast.walk(tree):
        for alias, full in zip(getattr(node, "names", ()), imports_of(node)):
            if isinstance(node, ast.Import) and not alias.asname:
                full = full.partition(".")[0]  # import torch.nn binds torch
            name = alias.asname or full.rpartition(".")[2]
            if full in MODULES and modules.setdefault(name, full) != full:
                raise Refused(f"{file.name}:{node.lineno}: {name} is {modules[name]} and {full}; give them two names")
    return modules


def module_of(node: ast.AST, modules: dict[str, str]) -> str:
    """The module that a name such as job, or torch.nn, stands for. "" if it is none."""
    if isinstance(node, ast.Name):
        return modules.get(node.id, "")
    if isinstance(node, ast.Attribute):
        full = f"{module_of(node.value, modules)}.{node.attr}"
        return full if full in MODULES else ""
    return ""


@functools.cache
def names_in(module: str) -> set[str]:
    """What an entry may name in a module of MODULES, without the modules in it."""
    names = MODULES[module]
    if names is ALL:
        found = importlib.import_module(module)
        shown = getattr(found, "__all__", dir(found))
        names = {name for name in shown if not inspect.ismodule(getattr(found, name))} - LEADS_OUT
    return {name for name in names if not name.startswith("_")}


def may_name(module: str, name: str) -> bool:
    """Whether an entry may name this in a module of MODULES."""
    return name in names_in(module) or f"{module}.{name}" in MODULES


def bound(node: ast.AST) -> set[str]:
    """Names to which this node itself gives a meaning: variables, arguments, functions, classes, "as" and patterns."""
    if isinstance(node, ast.Name):
        return set() if isinstance(node.ctx, ast.Load) else {node.id}
    if isinstance(node, ast.Global | ast.Nonlocal):
        return set(node.names)
    # An alias has the imported name as its `name`, and a keyword of a call binds nothing.
    fields = {ast.alias: ("asname",), ast.keyword: ()}.get(node.__class__, ("name", "asname", "rest", "arg"))
    return {name for field in fields if isinstance(name := getattr(node, field, None), str)}


def own_selves(tree: ast.AST) -> tuple[set[ast.AST], set[ast.AST]]:
    """Two sets of nodes.

    First: uses of `self` in __init__ and __post_init__, where it is a new object, whose attributes the file may set.
    Second: parameters named `self` that come first in a method, the only places where the file may give this name a
    meaning. In other methods `self` may be anybody's object, as in Mine.method(engine).
    """
    own, parameters = set(), set()
    for owner in ast.walk(tree):
        for method in owner.body if isinstance(owner, ast.ClassDef) else ():
            if not isinstance(method, ast.FunctionDef):
                continue
            first = [*method.args.posonlyargs, *method.args.args][:1]
            if [each.arg for each in first] == ["self"]:
                parameters |= set(first)
                if method.name in FRESH and not method.decorator_list:
                    own |= {node for node in ast.walk(method) if isinstance(node, ast.Name) and node.id == "self"}
    return own, parameters


def imports_of(node: ast.AST) -> list[str]:
    """The full names of what a statement imports: from common.run import job gives common.run.job."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        return [f"{'.' * node.level}{node.module or ''}.{alias.name}" for alias in node.names]
    return []


def problem_of_import(node: ast.AST) -> str:
    """Why an entry may not import this. "" if it may, or if the node is no import."""
    for full in imports_of(node):
        module, _, name = full.rpartition(".")
        if full in MODULES:
            continue
        if module not in MODULES:
            return f"imports {full}; an entry may import {', '.join(MODULES)}"
        if isinstance(node, ast.Import) or not may_name(module, name):
            shown = f"; of {module} it may name {', '.join(sorted(MODULES[module]))}" if MODULES[module] else ""
            return f"imports {full}; an entry has no use for {name}" + (shown if module != "torch" else "")
    return ""


def problem_of_name(node: ast.AST, modules: dict[str, str]) -> str:
    """Why an entry may not use this name or attribute, or define this function. "" if it may."""
    # A function, too: the clock does not see what __torch_dispatch__ of a tensor computes.
    is_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    name = node.name if is_function else getattr(node, "id", "")
    if name in NAMES or (name.startswith("__") and name not in (FRESH if is_function else DUNDERS)):
        return f"an entry has no use for {name}"
    if isinstance(node, ast.Attribute):
        module = module_of(node.value, modules)
        if module and not may_name(module, node.attr):
            return f"an entry has no use for .{node.attr} of {module}"
        private = node.attr.startswith("_") and node.attr not in DUNDERS
        # Called by another name than super(), __init__ would change the object that it is given.
        private = private and not (node.attr in FRESH and ast.unparse(node.value) == "super()")
        if not module and (private or node.attr in LEADS_OUT):
            return f"an entry has no use for .{node.attr}"
    if isinstance(node, ast.MatchClass):  # case object(answer=a) reads an attribute
        return "an entry has no use for a match by class"
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        # As in dataclasses.replace(args, **{"reward": ...}), or in the names of the attributes of a new class.
        dunder = "__" in node.value and node.value != "__main__"
        if dunder or node.value in FIXED_FIELDS - {"model"}:
            return f"an entry has no use for the string {node.value!r}"
    return ""


def problem_of_child(node: ast.AST, parent: ast.AST, modules: dict[str, str]) -> str:
    """Why this stands in a place where it makes an object pass for another. "" if it doesn't."""
    # A module by another name, or in a list, could not be told from any other object.
    if (module := module_of(node, modules)) and not isinstance(parent, ast.Attribute):
        return f"hands {module} on; write {ast.unparse(node)} only before a dot, and name your own things otherwise"
    # A property of this name could change between a check and its use.
    if isinstance(parent, ast.ClassDef) and node in parent.body and (taken := defined(node) & FIXED_FIELDS):
        return f"defines {min(taken)}, which the speedrun sets"
    return ""


def defined(statement: ast.AST) -> set[str]:
    """All names to which a statement gives a meaning where it stands: not those inside of a function or a class."""
    names = set()
    waiting = [statement]
    while waiting:
        node = waiting.pop()
        names |= {node.asname or node.name} if isinstance(node, ast.alias) else bound(node)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda):
            # Computed outside of it, where it stands
            waiting += [*getattr(node, "decorator_list", ()), *getattr(node, "bases", ())]
            waiting += getattr(node, "keywords", ())
            if arguments := getattr(node, "args", None):
                waiting += [*arguments.defaults, *filter(None, arguments.kw_defaults)]
        elif not isinstance(node, ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp):
            waiting += ast.iter_child_nodes(node)
    return names


def problem_of_class(node: ast.AST, modules: dict[str, str]) -> str:
    """Why this statement could make something else than a class, such as a string in an annotation. "" if it can't."""
    if not isinstance(node, ast.ClassDef):
        return ""
    if node.keywords:
        return f"class {node.name} has a keyword, {ast.unparse(node.keywords[0])}; leave it out"
    for decorator in node.decorator_list:
        maker = decorator.func if isinstance(decorator, ast.Call) else decorator
        is_attribute = isinstance(maker, ast.Attribute) and maker.attr == "dataclass"
        if not is_attribute or module_of(maker.value, modules) != "dataclasses":
            return f"class {node.name} is decorated with {ast.unparse(maker)}; only @dataclasses.dataclass may be"
    return ""


def problem_of_annotation(node: ast.AST, modules: dict[str, str], variables: set[str]) -> str:
    """Why this annotation, or base of a class, is refused: tyro and pydantic run the strings in it as code. "" if not.

    variables: names of the file that could hold a string, or what was made of one.
    """
    waiting = [getattr(node, "annotation", None), getattr(node, "returns", None), *getattr(node, "bases", ())]
    while waiting:
        part = waiting.pop()
        if isinstance(part, ast.Attribute) and not module_of(part.value, modules):
            return f"an annotation with {ast.unparse(part)}, which is not of a module"
        if isinstance(part, ast.Name) and part.id in variables:
            return f"an annotation with {part.id}, which is a variable"
        if isinstance(part, ast.Constant) and isinstance(part.value, str):
            return f"an annotation with the string {part.value!r}, which would be run as code"
        if isinstance(part, ast.Subscript):
            # The strings of Literal are values, and so are the arguments of Field.
            waiting.append(part.value)
            waiting += [] if ast.unparse(part.value) in ("Literal", "typing.Literal") else [part.slice]
        elif isinstance(part, ast.BinOp | ast.Tuple | ast.List):
            waiting += [each for each in ast.iter_child_nodes(part) if isinstance(each, ast.expr)]
        elif isinstance(part, ast.Call) and ast.unparse(part.func) == "Field":
            waiting.append(part.func)
        elif not isinstance(part, ast.Attribute | ast.Name | ast.Constant | None):
            return f"an annotation with {ast.unparse(part)}, which is computed"
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
        in_method = "; set it in __init__, or keep it in a list" if ast.unparse(node.value) == "self" else ""
        return f"changes {ast.unparse(node)}, which is not the file's own{in_method}"
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
            raise Refused(f"--{name}: leave it out; the speedrun sets it, or has no use for it")


def called(name: str) -> str:
    """algos/grpo.py -> grpo.py, speedrun/records/0001-merged/train.py -> 0001-merged."""
    path = Path(name)
    return path.parent.name if path.name == "train.py" else path.name


def nearest_diff(file: Path, commit: str) -> str:
    """The diff of a record's file to what it is nearest to, which a person reads: an algorithm or a record's file.

    Of several that are nearly as near, it is one that the docstring names, as in "It differs from grpo.py". Both are
    those of the commit that the record names. Otherwise two new records could hide behind each other: each diff would
    show only how they differ.
    """
    lines = file.read_text().splitlines()
    known = directory.git("ls-tree", "-r", "--name-only", commit, "algos/", "speedrun/records/").split()
    known = [name for name in known if re.fullmatch(r"algos/[^/]+\.py|speedrun/records/[^/]+/train\.py", name)]
    siblings = {name: directory.git("show", f"{commit}:{name}") for name in known}
    if not siblings:  # no full git clone
        paths = sorted([*ROOT.glob("algos/[!_]*.py"), *ROOT.glob("speedrun/records/*/train.py")])
        siblings = {str(path.relative_to(ROOT)): path.read_text() for path in paths}
    siblings.pop(f"speedrun/records/{file.resolve().parent.name}/train.py", None)  # the record itself
    siblings = {name: text.splitlines() for name, text in siblings.items()}
    similarity = {
        name: difflib.SequenceMatcher(None, text, lines, autojunk=False).ratio() for name, text in siblings.items()
    }
    near = [name for name in siblings if similarity[name] >= NEARLY * max(similarity.values())]
    docstring = ast.get_docstring(ast.parse("\n".join(lines))) or ""
    named = [name for name in near if re.search(rf"\b{re.escape(called(name))}\b", docstring)]
    nearest = max(named or near, key=similarity.get)
    diff = difflib.unified_diff(siblings[nearest], lines, nearest, file.name, lineterm="", n=1)
    return "\n".join(diff) or f"{file.name} is {nearest}"
