"""--reward code: the program in a response, run against the tests of its row.

code            1 if all tests pass, otherwise 0
code-fraction   the share of the tests that pass; acc is that of `code`

The program is the last block in fences, outside <think>. The tests are columns of the row: see tests_of(). Programs are
hostile until proven otherwise: they run in common/processes/sandbox.py, and their tests in another process, so that no
program can read its tests, change them, or announce that it has passed. `info` has "passed", "tests" and "failure".
"""

import ast
import importlib.util
import inspect
import json
import math
import os
import re
import socket
import tempfile
import textwrap
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import CodeType
from typing import Any

from common.data.rows import lookup
from common.errors import BadInput, say
from common.processes import sandbox
from common.processes.child import Handler
from common.processes.pool import START_SECONDS, Failure
from common.processes.sandbox import KINDS, Sandbox, SandboxFailed
from common.rewards.grading import Item, Result
from common.rewards.text import with_think, without_thinking
from common.rewards.workers import Graders, refused_as_input

PROGRAM_SECONDS = 10.0  # for all tests of a function together, or for one run with standard input
RUNS_SECONDS = 60.0  # for all runs with standard input together
FUTURE = re.compile(r"^from __future__ import .*\n?", re.MULTILINE)
FENCE = re.compile(r"([ \t]*)(`{3,}(?=[^`]*$)|~{3,})(.*)")
LANGUAGE = re.compile(r"[{. \t]*(\w*)")  # ```python, ```{.python}, ```Python title="a"
PYTHON = ("python", "python3", "py")
# A long word matches in one way only. Otherwise a program could print a word that takes hours.
NUMBER = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d{1,3})?", re.ASCII)
LONGEST_NUMBER = 1000  # characters
NOT_RUN_BY_A_CALL = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR
FORMS = (
    'a "test" with check(candidate) and "entry_point"; a "test" with functions test_*(); "test_list"; or inputs and '
    'outputs in "input_output", "tests", "test_cases", "official_tests" or the answer'
)


@dataclass(frozen=True)
class Tests:
    """The tests of a row, in one of three forms: code, calls of a function, or runs with standard input."""

    # Code: each part is run in the same module, after the set-up.
    setup: str = ""
    parts: list[str] = field(default_factory=list)
    entry_point: str = ""  # the function that check() gets
    # Calls of a function, or runs: (arguments or standard input, what is expected).
    cases: list[tuple[Any, Any]] = field(default_factory=list)
    function: str = ""  # name of the function; "" means runs


def tests_of(answer: str | None, meta: Mapping[str, Any]) -> Tests:
    """The tests of a row. Raises BadInput if there are none, or none of a known form.

    test + entry_point          check(candidate), as in HumanEval; the prompt's own helper functions are there
    test                        functions test_*(), which import the program as `solution`, as in KodCode
    test_list                   assertions, as in MBPP, after test_setup_code and test_imports
    input_output, tests, ...    {"inputs": [...], "outputs": [...], "fn_name": a name or nothing}, as in APPS and TACO,
                                or [{"input": ..., "output": ...}, ...], as in DeepCoder and Codeforces. Both may be
                                JSON. The reference answer may hold the same, as in PRIME's data.
    """
    test = meta.get("test")
    if isinstance(test, str) and test.strip():
        if "unittest" in test:
            raise BadInput('"test" uses unittest; expected functions check(candidate) or test_*()')
        if re.search(r"^(async )?def check\(", test, re.MULTILINE):
            entry_point = meta.get("entry_point")
            if not isinstance(entry_point, str) or not entry_point.isidentifier():
                raise BadInput('"test" has check(candidate), and "entry_point" names no function')
            for node in ast.parse(require_python(test)).body:
                if getattr(node, "name", "") == "check":
                    require_plain_function(node)
            return Tests(setup=code_of(meta.get("prompt")), parts=[test], entry_point=entry_point)
        return Tests(parts=[require_plain_pytest(require_python(test))])
    test_list = meta.get("test_list")
    if test_list:
        if isinstance(test_list, str):
            test_list = read_json("test_list", test_list)
        setup = meta.get("test_setup_code") or ""
        imports = meta.get("test_imports") or ""
        imports = imports if isinstance(imports, str) else "\n".join(imports)
        return Tests(setup=require_python(f"{imports}\n{setup}"), parts=[require_python(part) for part in test_list])
    for name in ("input_output", "tests", "test_cases", "official_tests"):
        value = lookup(dict(meta), name)
        if value:
            return cases_of(name, value, meta)
    value = meta.get("answer") if answer is None else answer
    if isinstance(value, list | dict) or (isinstance(value, str) and value.strip().startswith(("{", "["))):
        return cases_of("answer", value, meta)
    raise BadInput(f"no tests (found: {', '.join(meta)}); expected {FORMS}")


def cases_of(name: str, value: Any, meta: Mapping[str, Any]) -> Tests:
    """Tests of inputs and outputs. Raises BadInput."""
    value = read_json(name, value) if isinstance(value, str) else value
    function = meta.get("fn_name") or meta.get("func_name") or ""
    if isinstance(value, Mapping):
        inputs = value.get("inputs", value.get("input"))
        outputs = value.get("outputs", value.get("output"))
        function = value.get("fn_name") or function
        if not isinstance(inputs, list) or not isinstance(outputs, list) or len(inputs) != len(outputs) or not inputs:
            raise BadInput(f'"{name}": expected as many "inputs" as "outputs", and at least one')
        cases = list(zip(inputs, outputs))
    elif isinstance(value, list) and value and all(isinstance(case, Mapping) for case in value):
        cases = []
        for case in value:
            if "input" not in case or "output" not in case:
                raise BadInput(f'"{name}": expected "input" and "output" in each test (found: {", ".join(case)})')
            # In LiveCodeBench's and PrimeIntellect's forms, both in DeepCoder, each test names its function.
            metadata = case.get("metadata")
            named = metadata.get("func_name") if isinstance(metadata, Mapping) else None
            function = case.get("fn_name") or named or function
            cases.append((case["input"], case["output"]))
    else:
        raise BadInput(f'"{name}": expected {{"inputs": [...], "outputs": [...]}} or [{{"input": ..., "output": ...}}]')
    if function:
        return Tests(function=str(function), cases=[call_of(given, out) for given, out in cases])
    return Tests(cases=[(text_of(given), text_of(out)) for given, out in cases])


def read_json(name: str, text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadInput(f'"{name}" is not JSON: {error}') from None


def call_of(given: Any, expected: Any) -> tuple[list, Any]:
    """The arguments of a call and its result.

    given: a list of the arguments, or a text with one JSON value on each line. Where it is a text, so is the result.
    Next to a list, a result such as "100" is a string.
    """
    if isinstance(given, str):
        return [value_of(line) for line in given.splitlines() if line.strip()], value_of(expected)
    return (given if isinstance(given, list) else [given]), expected


def value_of(text: Any) -> Any:
    """A JSON value, or the text if it is none."""
    if not isinstance(text, str):
        return text
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def text_of(value: Any) -> str:
    """What a program reads or prints. A list has the lines."""
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)


def require_python(code: str) -> str:
    """The code of tests. Raises BadInput if it is not valid Python."""
    try:
        ast.parse(code)
    except (SyntaxError, ValueError, TypeError, RecursionError) as error:
        raise BadInput(f"the tests are not valid Python: {error}") from None
    return code


def require_plain_pytest(code: str) -> str:
    """The code of tests. Raises BadInput if they need more of pytest than parametrize and raises."""
    tree = ast.parse(code)
    bodies = [tree.body, *(node.body for node in tree.body if isinstance(node, ast.ClassDef))]
    for node in [node for body in bodies for node in body]:
        decorators = " ".join(map(ast.unparse, getattr(node, "decorator_list", [])))
        is_set_up = getattr(node, "name", "") in ("setup_class", "setup_module", "setup_function")
        if is_set_up or ("fixture" in decorators and "autouse" in decorators):
            raise BadInput(f'"test": {node.name}() would not be called; expected setup_method(), or no set-up')
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or not node.name.startswith("test_"):
            continue
        require_plain_function(node)
        required = node.args.args[: len(node.args.args) - len(node.args.defaults)]
        marks = [ast.unparse(mark.args[0]) for mark in node.decorator_list if is_parametrize(mark)]
        given = {name for mark in marks for name in re.findall(r"\w+", mark)}
        fixtures = [argument.arg for argument in required if argument.arg not in {"self", *given}]
        if fixtures:
            raise BadInput(f'"test": {node.name}() needs fixtures of pytest: {", ".join(fixtures)}')
    if re.search(r"^\s*(import|from) pytest\b", code, re.MULTILINE) and importlib.util.find_spec("pytest") is None:
        raise BadInput('"test" imports pytest, which is not installed')
    return code


def is_parametrize(decorator: ast.expr) -> bool:
    """Whether it is a call of pytest.mark.parametrize with the names of the parameters and their values."""
    is_call = isinstance(decorator, ast.Call) and len(decorator.args) > 1
    return is_call and ast.unparse(decorator.func).endswith("parametrize")


def require_plain_function(function: ast.stmt) -> None:
    """Raises BadInput if it is a coroutine or a generator.

    A call of one runs nothing, and so raises nothing: every program would pass.
    """
    try:
        constants = compile(ast.Module([function], []), "tests.py", "exec").co_consts
    except (SyntaxError, ValueError, RecursionError) as error:  # such as `await` in a plain function
        raise BadInput(f"the tests are not valid Python: {error}") from None
    bodies = [constant for constant in constants if isinstance(constant, CodeType)]
    if any(body.co_name == function.name and body.co_flags & NOT_RUN_BY_A_CALL for body in bodies):
        raise BadInput(f'"test": {function.name}() is a coroutine or a generator; expected a plain function')


# The program


def program_of(response: str, meta: Mapping[str, Any]) -> str | None:
    """The program in a response, or None.

    It is the last block in fences, or the last that says python, if one does. A row whose prompt is code, as in
    HumanEval, gives it the imports and functions of the prompt. There a block may also hold the body of the function
    alone, and a response without fences is read as what follows the prompt.
    """
    text = without_thinking(response)
    prompt = code_of(meta.get("prompt"))
    name = meta.get("entry_point")
    blocks, is_closed = blocks_of(text)
    if not is_closed:
        return None
    if not blocks:
        return continuation(prompt, text, name) if prompt and name else None
    marked = [block for language, block in blocks if language in PYTHON]
    block = (marked or [block for _, block in blocks])[-1]
    if not prompt or not name:
        return textwrap.dedent(block)
    if block.startswith((" ", "\t")) and name not in defined(textwrap.dedent(block)):
        return prompt + block
    return with_helpers(prompt, name, textwrap.dedent(block))


def blocks_of(text: str) -> tuple[list[tuple[str, str]], bool]:
    """The language and the content of each block in fences, and whether the last block has an end.

    As in Markdown, a block ends with at least as many ` or ~ as it begins with, indented by less than four more spaces.
    So fences in the docstring of a function do not end it. Each line is read once: responses may be hostile, too.
    """
    blocks = []
    language = ""
    opening: re.Match | None = None
    content: list[str] = []
    for line in re.split("\r?\n", text):
        fence = FENCE.fullmatch(line)
        if opening is None:
            if fence:
                language = LANGUAGE.match(fence[3])[1].lower()
                opening = fence
                content = []
        elif fence and ends(fence, opening):
            blocks.append((language, "".join(content)))
            opening = None
        else:
            content.append(f"{line}\n")
    return blocks, opening is None


def ends(fence: re.Match, opening: re.Match) -> bool:
    is_bare = not fence[3].strip()
    is_as_long = fence[2].startswith(opening[2])
    deeper = len(fence[1].expandtabs()) - len(opening[1].expandtabs())
    return is_bare and is_as_long and deeper < 4


def code_of(prompt: Any) -> str:
    """The prompt if it is Python that defines a function, otherwise an empty text."""
    return prompt if isinstance(prompt, str) and defined(prompt) else ""


def defined(code: str) -> set[str]:
    """Names of the functions that code defines. Empty if it is not valid Python."""
    try:
        tree = ast.parse(code)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return set()
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


def with_helpers(prompt: str, name: str, program: str) -> str:
    """The program behind the prompt's imports and helpers. Imports from __future__ must come first."""
    return "".join(FUTURE.findall(program)) + before(prompt, name) + FUTURE.sub("", program)


def before(prompt: str, name: str) -> str:
    """The prompt's imports and helper functions: all but the function that is to be written."""
    kept = [ast.unparse(node) for node in ast.parse(prompt).body if getattr(node, "name", None) != name]
    return "".join(f"{part}\n" for part in kept)


def continuation(prompt: str, text: str, name: str) -> str:
    """The prompt and the body that a base model has written after it, up to the next line that is not indented."""
    if name in defined(text):
        return with_helpers(prompt, name, text)
    body = []
    for line in text.split("\n"):
        if body and line.strip() and not line.startswith((" ", "\t", ")")):
            break
        body.append(line)
    return prompt + "\n".join(body)


def same_output(printed: str, expected: str) -> bool:
    """Whether a program has printed what was expected.

    Only words count, not the spaces and the ends of lines between them. Where the expected number has a point or an
    exponent, it may differ by a millionth.
    """
    printed_words, words = printed.split(), expected.split()
    return len(printed_words) == len(words) and all(map(same_word, printed_words, words))


def same_word(printed: str, expected: str) -> bool:
    if printed == expected:
        return True
    if len(printed) > LONGEST_NUMBER:
        return False
    # A whole number, such as 1000, is expected as it is.
    if not (NUMBER.fullmatch(printed) and NUMBER.fullmatch(expected) and re.search("[.eE]", expected)):
        return False
    value = float(expected)
    # 1e999 is infinite as a float, and any number is less than a millionth of that away.
    return math.isfinite(value) and abs(float(printed) - value) <= 1e-6 * max(1.0, abs(value))


# The reward


class ProgramGraders(Graders):
    """Workers with a sandbox each. A program whose worker is lost has no score: its worker is not its fault."""

    def verdict(self, item: Item) -> Result:
        outcome = self.grade([item], [0], [False])
        if not isinstance(outcome, Failure):
            return outcome[0]
        last_line = outcome.message.rpartition("\n")[2]
        return Result(None, None, None, {"error": f"{outcome.kind}: {last_line}"})


class CodeReward:
    """The reward, in worker processes with a sandbox each. spec: code, code-fraction."""

    # mixture.py calls it in a thread, because it waits for other processes.
    waits = True

    def __init__(self, spec: str = "code", workers: int = 0):
        """Raises BadInput if no sandbox starts."""
        self.spec = spec
        self.stop = spec == "code"  # the first failure decides
        # The kind of the first worker's sandbox. No later worker may fall back to a weaker one: nobody would be told.
        kinds: list[str] = []
        self.pool = ProgramGraders(
            spec,
            "common.rewards.code:load_sandbox",
            [kinds],
            item_seconds=RUNS_SECONDS + 30,
            workers=workers,
            start_seconds=START_SECONDS + len(KINDS) * (sandbox.START_SECONDS + sandbox.SAMPLE_SECONDS),
        )
        with refused_as_input():
            facts = self.pool.start()
        kinds.append(facts["kind"])
        if facts["missing"]:
            say(f"--reward {spec}: the sandbox is weaker here: {facts['missing']}")

    def fault_of(self, prompt) -> str:
        """Why a row has no tests that can be run, or nothing."""
        try:
            tests_of(prompt.answer, prompt.meta)
        except BadInput as error:
            return f"--reward {self.spec}: {error}"
        return ""

    def __call__(self, items: list[Item], lengths: list[int], truncated: list[bool]) -> list[Result]:
        """A program that the sandbox did not run has no score, and the reason in info["error"].

        Raises RunFailed if no worker can be started.
        """
        results: dict[int, Result] = {}
        questions: dict[int, tuple[str, str]] = {}
        for row, item in enumerate(items):
            program = program_of(with_think(item), item.meta)
            if program is None:
                results[row] = Result(0.0, 0.0, None, {"failure": "no program"})
            else:
                tests = {**vars(tests_of(item.answer, item.meta)), "stop": self.stop}
                questions[row] = (program, json.dumps(tests))
        results |= self.pool.verdicts_on(questions)
        in_order = [results[row] for row in range(len(items))]
        # Not at the top: workers import this module, too, and this one takes a quarter of a second.
        from common.rewards.service import print_ungraded

        print_ungraded(f"reward {self.spec}", in_order)
        return in_order


# Inside a worker


def load_sandbox(kinds: Sequence[str] = ()) -> Handler:
    """kinds: of sandboxes that are tried. Without any: all of them, the strictest first."""
    own = Sandbox(["common.rewards.code_roles"], tuple(kinds) or KINDS)

    def answer(request: list) -> list[list]:
        (item,), _, _ = request
        tests = json.loads(item["answer"])
        try:
            verdict = run(own, item["response"], tests)
        except SandboxFailed as failure:
            return [[None, None, item["response"], {"error": f"the sandbox: {failure}"}]]
        acc = float(not verdict["failure"] and verdict["passed"] > 0)
        score = acc if tests["stop"] else verdict["passed"] / max(1, verdict["total"])
        info = {"passed": verdict["passed"], "tests": verdict["total"]}
        if verdict["failure"]:
            info["failure"] = verdict["failure"]
        return [[score, acc, item["response"], info]]

    return Handler(answer, facts={"kind": own.kind, "missing": own.missing})


def run(sandbox: Sandbox, program: str, tests: dict) -> dict:
    """{"passed": number, "total": number, "failure": the first one, or ""}. Raises SandboxFailed."""
    if tests["cases"] and not tests["function"]:
        return run_with_inputs(sandbox, program, tests)
    tests_end, program_end = socket.socketpair()
    source, content, verdict_fd = map(in_memory, (to_bytes(program), json.dumps(tests).encode(), b""))
    roles = "common.rewards.code_roles"
    try:
        with tests_end, program_end:
            # The tests outlive the program, so that they can say that it was late.
            tested = sandbox.start(f"{roles}:serve_calls", [source, program_end.fileno()], PROGRAM_SECONDS)
            testing = sandbox.start(
                f"{roles}:run_tests", [content, tests_end.fileno(), verdict_fd], PROGRAM_SECONDS + 1
            )
        ended = testing.wait()
        written = read(verdict_fd)
    finally:
        close(source, content, verdict_fd)
    try:
        verdict = json.loads(written)
    except ValueError:
        verdict = {"passed": 0, "total": len(tests["parts"]) or len(tests["cases"]), "failure": f"the tests: {ended}"}
    if verdict["failure"].startswith("the program has ended"):
        verdict["failure"] += f": {tested.wait()}"
    else:
        tested.stop()
    return verdict


def run_with_inputs(sandbox: Sandbox, program: str, tests: dict) -> dict:
    """One run for each input. Raises SandboxFailed."""
    until = time.monotonic() + RUNS_SECONDS
    verdict = {"passed": 0, "total": len(tests["cases"]), "failure": ""}
    for number, (given, expected) in enumerate(tests["cases"], start=1):
        left = until - time.monotonic()
        failure = "no time left"
        if left > 0:
            failure = run_once(sandbox, program, given, expected, min(PROGRAM_SECONDS, left))
        if not failure:
            verdict["passed"] += 1
            continue
        verdict["failure"] = verdict["failure"] or f"test {number}: {failure}"
        if tests["stop"]:
            break
    return verdict


def run_once(sandbox: Sandbox, program: str, given: str, expected: str, seconds: float) -> str:
    """Why a run has failed, or nothing. Raises SandboxFailed."""
    files = [in_memory(data) for data in (to_bytes(program), to_bytes(given), b"", b"")]
    _, _, stdout, stderr = files
    try:
        ended = sandbox.start("common.rewards.code_roles:run_script", files, seconds).wait()
        printed, errors = read(stdout), read(stderr)
    finally:
        close(*files)
    if ended != "exit 0":
        last = errors.strip().rpartition("\n")[2]
        return f"{ended}: {last}"[:300] if last else ended
    if same_output(printed, expected):
        return ""
    return f"printed {printed[:100]!r}, expected {expected[:100]!r}"


def to_bytes(text: str) -> bytes:
    return text.encode(errors="surrogatepass")


def in_memory(data: bytes) -> int:
    """A file without a name, at its beginning."""
    fd = memory_file()
    with os.fdopen(os.dup(fd), "wb") as file:
        file.write(data)
    os.lseek(fd, 0, os.SEEK_SET)
    return fd


def memory_file() -> int:
    """A new file in memory, open for reading and writing."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("")
    # Pythons built for old systems, as in Conda, lack the function although the kernel has it.
    with tempfile.TemporaryFile(buffering=0, dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as file:
        return os.dup(file.fileno())


def read(fd: int) -> str:
    """What another process has written."""
    with os.fdopen(fd, "rb", closefd=False) as file:
        file.seek(0)
        return file.read().decode(errors="replace")


def close(*fds: int) -> None:
    for fd in fds:
        os.close(fd)
