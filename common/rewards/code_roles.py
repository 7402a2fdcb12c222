"""What runs inside the sandbox (common/processes/sandbox.py): a program, and tests that are programs themselves.

    run_script()    a program that reads standard input and prints
    serve_calls()   a program whose functions are called from another process
    run_tests()     tests that call those functions; only they know the verdict

The tests have a process of their own, so a program cannot read them, change what they compare with, or speak for them.
"""

import ast
import atexit
import builtins
import contextlib
import functools
import importlib
import json
import math
import os
import sys
import threading
import traceback
import types
from collections.abc import Callable, Iterator
from typing import Any

from common.rewards.code_values import Channel, Ended, Remote

OUT_OF_MEMORY = 137  # exit status, as of a process that the kernel has killed for its memory


def read_all(fd: int) -> str:
    with os.fdopen(fd, "rb") as file:
        return file.read().decode(errors="surrogateescape")


def new_module(name: str) -> types.ModuleType:
    module = types.ModuleType(name)
    sys.modules[name] = module
    return module


def run_script(source_fd: int, stdin_fd: int, stdout_fd: int, stderr_fd: int) -> int:
    """Run a program as `python program.py` would. Returns its exit status."""
    source = read_all(source_fd)
    for number, fd in enumerate((stdin_fd, stdout_fd, stderr_fd)):
        os.dup2(fd, number)
        os.close(fd)
    sys.argv = ["program.py"]
    main = new_module("__main__")
    code = 0
    try:
        exec(compile(source, "program.py", "exec"), vars(main))
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except MemoryError:
        code = OUT_OF_MEMORY
    except BaseException:
        traceback.print_exc()
        code = 1
    # What Python does at the end of a script. Many programs leave their output to it.
    threading._shutdown()  # waits for threads
    atexit._run_exitfuncs()
    flushed = flush(sys.stdout)
    vars(main).clear()  # writes what files still hold
    flushed = flush(sys.__stdout__) and flushed
    return code or int(not flushed)


def flush(stream: Any) -> bool:
    """False if it cannot be written. The program may have closed it, or put anything in its place."""
    try:
        stream.flush()
    except OSError:
        return False
    except Exception:
        pass
    return True


def serve_calls(source_fd: int, channel_fd: int) -> int:
    """Run a program, and answer calls of its functions until the other side hangs up."""
    source = read_all(source_fd)
    program = new_module("program")
    channel = Channel(channel_fd, vars(program))
    try:
        exec(compile(source, "program.py", "exec"), vars(program))
        ready: dict = {"value": sorted(name for name in vars(program) if not name.startswith("__"))}
    except BaseException as error:
        ready = {"error": [type(error).__name__, message_and_line(error)]}
    try:
        channel.send(ready)
        while True:
            channel.answer(channel.receive())
    except Ended:
        return 0


def message_and_line(error: BaseException) -> str:
    """What went wrong, and in which line of the program."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == "program.py"]
    where = f" (line {lines[-1]})" if lines else ""
    return f"{error}"[:300] + where


# What counts the tests


class Stop(BaseException):
    """The first failure has ended the tests. No `except Exception` of a test hides it."""


class Tally:
    """Counts assertions, and test functions that have none."""

    def __init__(self, stop: bool):
        self.stop = stop
        self.expected = 0  # assertions in the code of the tests that count when they run
        self.passed = 0
        self.failures: list[str] = []

    @contextlib.contextmanager
    def one(self, source: str, counts: bool = True) -> Iterator[None]:
        """Around an assertion or a test function. counts: whether it is a test if there is no assertion in it."""
        counted = self.passed + len(self.failures)
        try:
            yield
        except (Stop, Ended):
            raise
        except BaseException as error:  # pytest.fail() and pytest.raises() raise one that is no Exception
            self.failures.append(f"{source}: {described(error)}")
            if self.stop:
                raise Stop from None
        else:
            # A test function with assertions has been counted by them.
            if counts and self.passed + len(self.failures) == counted:
                self.passed += 1


def described(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:300].removesuffix(": ")


# The code of the tests


def first_line(tree: ast.AST) -> str:
    return ast.unparse(tree).strip().split("\n")[0][:300]


def bound_names(tree: ast.AST) -> set[str]:
    """All names that code binds anywhere."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            names.add(node.id)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.arg):
            names.add(node.arg)
        elif isinstance(node, ast.alias):
            names.add((node.asname or node.name).partition(".")[0])
        elif isinstance(node, ast.ExceptHandler) and node.name:
            names.add(node.name)
    return names


def programs_names(setup: ast.AST, parts: list[ast.AST]) -> set[str]:
    """Names in tests that they neither define nor find in Python: they are the program's.

    If there are none, the function may have the name of a built-in one: MBPP has a `sum`. It is the only built-in
    function that all parts use. The program has no say in this: it must not replace the tests' abs() or all().
    """
    codes = [setup, *parts]
    bound = set().union(*map(bound_names, codes))
    used = [{node.id for node in ast.walk(code) if isinstance(node, ast.Name)} for code in codes]
    missing = {name for name in set().union(*used) - bound - set(vars(builtins)) if not name.startswith("__")}
    if missing or bound or not parts:
        return missing
    in_all = set.intersection(*used[1:])
    functions = {name for name in in_all if isinstance(getattr(builtins, name), types.BuiltinFunctionType)}
    return functions if len(functions) == 1 else set()


class Guard(ast.NodeTransformer):
    """Puts each assertion into `with __one__(source):`, which counts it and lets the next one run."""

    def __init__(self):
        self.assertions = 0  # those that are counted when they run

    def visit_Assert(self, node: ast.Assert) -> ast.With:
        self.assertions += 1
        call = ast.Call(ast.Name("__one__", ast.Load()), [ast.Constant(first_line(node))], [])
        return ast.copy_location(ast.With([ast.withitem(call)], [node]), node)

    def visit_Try(self, node: ast.Try) -> ast.Try:
        return node  # a test that expects an assertion to fail

    def visit_With(self, node: ast.With) -> ast.With:
        if any("raises(" in ast.unparse(item.context_expr) for item in node.items):
            return node  # pytest.raises(AssertionError)
        return self.generic_visit(node)


# Running the tests


def run_tests(tests_fd: int, channel_fd: int, verdict_fd: int) -> int:
    """Run tests against the program at the other end of the channel. Writes a verdict as JSON to verdict_fd.

    tests: the fields of a code.Tests, and "stop": whether the first failure ends them.
    """
    tests = json.loads(read_all(tests_fd))
    tally = Tally(tests["stop"])
    try:
        channel = Channel(channel_fd)
        ready = channel.receive()
        if "error" in ready:
            name, message = ready["error"]
            tally.failures.append(f"{str(name)[:50]}: {str(message)[:300]}")
        elif tests["function"]:
            run_cases(tests, channel, tally, ready["value"])
        else:
            run_code(tests, channel, tally)
    except Stop:
        pass
    except Ended as end:
        tally.failures.append(f"the program has ended {end}".strip())
    except BaseException as error:
        tally.failures.append(described(error))
    counted = tally.passed + len(tally.failures)
    # Without a failure, an assertion that did not run is in a branch that nobody needed.
    total = max(tally.expected, counted) if tally.failures else counted
    failure = tally.failures[0] if tally.failures else ""
    if not failure and not tally.passed:
        failure = "no test has run"
    with os.fdopen(verdict_fd, "w") as file:
        json.dump({"passed": tally.passed, "total": total, "failure": failure}, file)
    return 0


def run_cases(tests: dict, channel: Channel, tally: Tally, names: list) -> None:
    """Call a function of the program, or a method of its class Solution, with each case's arguments."""
    name = tests["function"]
    is_method = name not in names and "Solution" in names
    tally.expected = len(tests["cases"])
    # Some data sets put each result into a list of its own.
    may_be_wrapped = all(isinstance(expected, list) and len(expected) == 1 for _, expected in tests["cases"])
    for arguments, expected in tests["cases"]:
        with tally.one(f"{name}({', '.join(map(repr, arguments))})"[:300]):
            # A new Solution each time: its constructor sets up one call.
            function = getattr(Remote(channel, "Solution")(), name) if is_method else Remote(channel, name)
            result = function(*arguments)
            is_wrapped = may_be_wrapped and equal(result, expected[0])
            if not is_wrapped and not equal(result, expected):
                raise AssertionError(f"{result!r:.100}, expected {expected!r:.100}")


def equal(result: Any, expected: Any) -> bool:
    """Whether values agree, as JSON would have them: tuples are lists, and floats agree to a millionth.

    A float in place of a whole number has to be as close, however large the number is.
    """
    if isinstance(result, list | tuple) and isinstance(expected, list | tuple):
        return len(result) == len(expected) and all(map(equal, result, expected))
    if isinstance(result, dict) and isinstance(expected, dict):
        named = {json_key(key): value for key, value in result.items()}
        same_keys = len(named) == len(result) and named.keys() == expected.keys()
        return same_keys and all(equal(named[key], expected[key]) for key in expected)
    are_numbers = isinstance(result, int | float) and isinstance(expected, int | float)
    if are_numbers and (isinstance(result, float) or isinstance(expected, float)):
        rel_tol = 1e-6 if isinstance(expected, float) else 0.0
        with contextlib.suppress(OverflowError):  # a whole number that is too large for a float
            return math.isclose(result, expected, rel_tol=rel_tol, abs_tol=1e-6)
    return result == expected


def json_key(key: Any) -> Any:
    """The key of a dictionary as JSON has it: 1 is "1", True is "true" and None is "null"."""
    return json.dumps(key) if key is None or isinstance(key, int | float) else key


def module_of_python(name: str, codes: list[ast.AST]) -> types.ModuleType | None:
    """The module of Python's own that the tests mean by `math` in math.isclose(), without an import. None: no module.

    From the program it would be whatever the program calls `math`.
    """
    nodes = [node for code in codes for node in ast.walk(code) if isinstance(node, ast.Attribute)]
    owners = {node.value.id for node in nodes if isinstance(node.value, ast.Name)}
    if name not in owners or name not in sys.stdlib_module_names:
        return None
    return importlib.import_module(name)


def run_code(tests: dict, channel: Channel, tally: Tally) -> None:
    """Run the code of the tests, and the functions that it defines: check(candidate), or each test_*()."""
    # KodCode's tests begin with `from solution import add`.
    solution = new_module("solution")
    solution.__getattr__ = lambda name: remote_attribute(channel, name)
    namespace: dict[str, Any] = vars(new_module("tests"))
    setup = ast.parse(tests["setup"])
    parts = [ast.parse(part) for part in tests["parts"]]
    for name in {*programs_names(setup, parts), tests["entry_point"]} - {""}:
        namespace[name] = module_of_python(name, [setup, *parts]) or Remote(channel, name)
    exec(compile(setup, "setup.py", "exec"), namespace)
    # The set-up may be the prompt, which can have a first version of the function.
    if tests["entry_point"]:
        namespace[tests["entry_point"]] = Remote(channel, tests["entry_point"])

    namespace["__one__"] = tally.one
    guard = Guard()
    guarded_parts = [ast.fix_missing_locations(guard.visit(part)) for part in parts]
    tally.expected = guard.assertions
    for part in guarded_parts:
        # A part such as `np.testing.assert_equal(f(), 3)` is a test. Definitions and imports are none.
        calls = any(isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) for node in part.body)
        with tally.one(first_line(part), counts=calls):
            exec(compile(part, "tests.py", "exec"), namespace)
    if tests["entry_point"]:
        candidate = namespace[tests["entry_point"]]
        functions = [("check", functools.partial(namespace["check"], candidate))]
    else:
        functions = list(test_functions(namespace))
    for name, function in functions:
        with tally.one(name):
            # tests_of() has refused most such tests. It does not see one inside of an `if`, or behind a decorator.
            if isinstance(function(), types.CoroutineType | types.GeneratorType | types.AsyncGeneratorType):
                raise TypeError("the test is a coroutine or a generator, which a call does not run")


def remote_attribute(channel: Channel, name: str) -> Remote:
    """What `from solution import name` imports."""
    if name.startswith("__"):  # `import *` asks for __all__; all other names are found by programs_names()
        raise AttributeError(name)
    return Remote(channel, name)


def test_functions(namespace: dict[str, Any]) -> Iterator[tuple[str, Callable]]:
    """The name and a call of each test function, and of each method of a test class, as pytest finds them."""
    for name, value in list(namespace.items()):
        if name.startswith("test_") and isinstance(value, types.FunctionType):
            for arguments in parameters_of(value):
                yield name, functools.partial(value, **arguments)
        if name.startswith("Test") and isinstance(value, type):
            for method, function in list(vars(value).items()):
                if method.startswith("test_"):
                    for arguments in parameters_of(function):
                        yield method, functools.partial(call_method, value, method, arguments)


def call_method(kind: type, method: str, arguments: dict[str, Any]) -> Any:
    """Each method of a test class gets an object of its own."""
    instance = kind()
    setup = getattr(instance, "setup_method", None)
    if setup is not None:
        setup(*[method] * (setup.__code__.co_argcount - 1))
    return getattr(instance, method)(**arguments)


def parameters_of(function: Any) -> list[dict[str, Any]]:
    """The arguments of each call, from pytest.mark.parametrize."""
    calls: list[dict[str, Any]] = [{}]
    for mark in getattr(function, "pytestmark", ()):
        if mark.name != "parametrize":
            continue
        names, rows = mark.args[:2]
        several = not isinstance(names, str) or "," in names
        names = [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)
        is_param = [type(row).__name__ == "ParameterSet" for row in rows]  # pytest.param(...)
        rows = [row.values if param else row if several else [row] for row, param in zip(rows, is_param)]
        calls = [{**call, **dict(zip(names, row))} for row in rows for call in calls]
    return calls
