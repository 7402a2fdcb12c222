"""What runs inside the sandbox (common/processes/sandbox.py): a program, and tests that are programs themselves.

    run_script()    a program that reads standard input and prints
    serve_calls()   a program whose functions are called from another process
    run_tests()     tests that call those functions; only they know the verdict

The tests have a process of their own, so a program cannot read them, change what they compare with, or speak for them.
"""

import ast
import builtins
import contextlib
import json
import math
import os
import sys
import traceback
import types
from collections.abc import Iterator
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
    try:
        exec(compile(source, "program.py", "exec"), vars(new_module("__main__")))
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except MemoryError:
        code = OUT_OF_MEMORY
    except BaseException:
        traceback.print_exc()
        code = 1
    try:
        sys.stdout.flush()
    except OSError:
        code = code or 1
    return code


def serve_calls(source_fd: int, channel_fd: int) -> int:
    """Run a program, and answer calls of its functions until the other side hangs up."""
    source = read_all(source_fd)
    program = new_module("program")
    channel = Channel(channel_fd, vars(program))
    try:
        exec(compile(source, "program.py", "exec"), vars(program))
        ready: dict = {"value": sorted(name for name in vars(program) if not name.startswith("__"))}
    except BaseException as error:
        ready = {"error": [type(error).__name__, last_line(error)]}
    try:
        channel.send(ready)
        while True:
            channel.answer(channel.receive())
    except Ended:
        return 0


def last_line(error: BaseException) -> str:
    """What went wrong, and in which line of the program."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == "program.py"]
    where = f" (line {lines[-1]})" if lines else ""
    return f"{error}"[:300] + where


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
    total = max(tally.expected, tally.passed + len(tally.failures))
    failure = tally.failures[0] if tally.failures else ""
    with os.fdopen(verdict_fd, "w") as file:
        json.dump({"passed": tally.passed, "total": total, "failure": failure}, file)
    return 0


class Stop(BaseException):
    """The first failure has ended the tests. No `except Exception` of a test hides it."""


class Tally:
    """Counts assertions, and test functions that have none."""

    def __init__(self, stop: bool):
        self.stop = stop
        self.expected = 0  # assertions that the code of the tests has
        self.passed = 0
        self.failures: list[str] = []

    @contextlib.contextmanager
    def one(self, source: str, counts: bool = True) -> Iterator[None]:
        """Around an assertion or a test function. counts: whether it is a test if there is no assertion in it."""
        counted = self.passed + len(self.failures)
        try:
            yield
        except Exception as error:
            self.failures.append(f"{source}: {described(error)}")
            if self.stop:
                raise Stop from None
        else:
            # A test function with assertions has been counted by them.
            if counts and self.passed + len(self.failures) == counted:
                self.passed += 1


def described(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:300].removesuffix(": ")


def run_cases(tests: dict, channel: Channel, tally: Tally, names: list) -> None:
    """Call a function of the program, or a method of its class Solution, with each case's arguments."""
    name = tests["function"]
    function = Remote(channel, name)
    if name not in names and "Solution" in names:
        function = getattr(Remote(channel, "Solution")(), name)
    tally.expected = len(tests["cases"])
    for arguments, expected in tests["cases"]:
        with tally.one(f"{name}({', '.join(map(repr, arguments))})"[:300]):
            result = function(*arguments)
            # Some data sets put each result into a list of its own.
            wrapped = isinstance(expected, list) and len(expected) == 1 and equal(result, expected[0])
            if not wrapped and not equal(result, expected):
                raise AssertionError(f"{result!r:.100}, expected {expected!r:.100}")


def equal(result: Any, expected: Any) -> bool:
    """Whether values agree, as JSON would have them: tuples are lists, and floats agree to a millionth."""
    if isinstance(result, float) and isinstance(expected, int | float):
        return math.isclose(result, expected, rel_tol=1e-6, abs_tol=1e-6)
    if isinstance(result, list | tuple) and isinstance(expected, list | tuple):
        return len(result) == len(expected) and all(map(equal, result, expected))
    return result == expected


def run_code(tests: dict, channel: Channel, tally: Tally) -> None:
    """Run the code of the tests, and the functions that it defines: check(candidate), or each test_*()."""
    # KodCode's tests begin with `from solution import add`.
    solution = new_module("solution")
    solution.__getattr__ = lambda name: Remote(channel, name)
    namespace: dict[str, Any] = vars(new_module("tests"))
    exec(compile(tests["setup"], "setup.py", "exec"), namespace)
    parts = [ast.parse(part) for part in tests["parts"]]
    tally.expected = sum(isinstance(node, ast.Assert) for part in parts for node in ast.walk(part))
    # A name that the tests neither define nor find in Python is one of the program's.
    known = {*namespace, *vars(builtins)}.union(*map(bound_names, parts))
    names = {node.id for part in parts for node in ast.walk(part) if isinstance(node, ast.Name)}
    for name in {*(names - known), tests["entry_point"]}:
        namespace[name] = Remote(channel, name)

    namespace["__one__"] = tally.one
    for part in parts:
        guarded = ast.fix_missing_locations(Guard().visit(part))
        with tally.one(first_line(part), counts=False):
            exec(compile(guarded, "tests.py", "exec"), namespace)
    if tests["entry_point"]:
        functions = ["check"]
        arguments = [namespace[tests["entry_point"]]]
    else:
        functions = [name for name in namespace if name.startswith("test_")]
        arguments = []
    for name in functions:
        with tally.one(name):
            namespace[name](*arguments)


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


class Guard(ast.NodeTransformer):
    """Puts each assertion into `with __one__(source):`, which counts it and lets the next one run."""

    def visit_Assert(self, node: ast.Assert) -> ast.With:
        call = ast.Call(ast.Name("__one__", ast.Load()), [ast.Constant(first_line(node))], [])
        return ast.copy_location(ast.With([ast.withitem(call)], [node]), node)

    def visit_Try(self, node: ast.Try) -> ast.Try:
        return node  # a test that expects an assertion to fail
