"""--reward code: which text is the program, what its tests are, and that no program passes but by being right."""

# ruff: noqa: E501

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import ROOT, launch

from common.errors import BadInput
from common.processes import sandbox as sandboxes
from common.processes.pool import Failure
from common.processes.sandbox import (
    DEVICES,
    KEYRING_CALLS,
    SYSTEM,
    WORK,
    Sandbox,
    SandboxFailed,
    descendants,
    python_folders,
)
from common.rewards import code
from common.rewards.code import CodeReward, program_of, run, same_output
from common.rewards.grading import Item

HUMANEVAL = ROOT.parent / "shared" / "data" / "humaneval" / "HumanEval.jsonl"
ADD = {
    "test": "def check(candidate):\n    assert candidate(1, 2) == 3\n    assert candidate(2, 2) == 4\n",
    "entry_point": "add",
}
RIGHT = "def add(a, b):\n    return a + b\n"


@pytest.fixture(scope="module")
def reward():
    made = CodeReward("code", workers=2)
    yield made
    made.pool.close()


@pytest.fixture(scope="module", params=["namespaces", "bubblewrap", "limits"])
def sandbox(request):
    try:
        made = Sandbox(["common.rewards.code_roles"], kinds=(request.param,))
    except RuntimeError as error:
        if request.param == "limits":  # which every kernel has
            raise
        pytest.skip(str(error))
    yield made
    made.close()


def graded(reward, program: str, meta: dict, answer: str | None = None):
    (result,) = reward([Item("", f"```python\n{program}\n```", answer, meta)], [1], [False])
    return result


def tried(sandbox, program: str, tests: code.Tests | None = None, stop: bool = True) -> dict:
    return run(sandbox, program, {**vars(tests or code.tests_of(None, ADD)), "stop": stop})


def wait_until(condition) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


# The program


@pytest.mark.parametrize(
    ("response", "program"),
    [
        ("```python\na = 1\n```", "a = 1\n"),
        ("Sure:\n```\na = 1\n```\nDone.", "a = 1\n"),
        ("```python\na = 1\n```\nbetter:\n```python\na = 2\n```", "a = 2\n"),
        ("```python\na = 1\n```\nprints\n```text\n1\n```", "a = 1\n"),
        ("```bash\npip\n```\n```\na = 2\n```", "a = 2\n"),
        ("1. so\n   ```py\n   a = 1\n   ```", "a = 1\n"),
        ("<think>```python\na = 1\n```</think>```python\na = 2\n```", "a = 2\n"),
        ("<think>```python\na = 1\n```\n</think>\n```python\na = 2\n```", "a = 2\n"),
        ("<think>\n```python\na = 1\n```", None),
        ("```python\na = 1\n```\n```python\na = ", None),
        ("a = 1", None),
        ("", None),
        ("```python\r\na = 1\r\n```\r\n", "a = 1\n"),
        ("~~~python\na = 1\n~~~", "a = 1\n"),
        ('````python\na = """\n```\n"""\n````', 'a = """\n```\n"""\n'),
        ("```Python3 title='x'\na = 1\n```\n```\n1\n```", "a = 1\n"),
        ("```{.python .numberLines}\na = 1\n```\n```\n1\n```", "a = 1\n"),
        (
            '```python\ndef f():\n    """\n    ```\n    f()\n    ```"""\n```',
            'def f():\n    """\n    ```\n    f()\n    ```"""\n',
        ),
        ("Use ```a``` here:\n```python\na = 1\n```", "a = 1\n"),
    ],
)
def test_the_program_is_the_last_block_in_fences(response, program):
    assert program_of(response, {}) == program


def test_hostile_text_takes_no_time():
    """Both are read outside the sandbox. With patterns that backtrack they take minutes."""
    began = time.monotonic()
    assert program_of("```x\n" * 40_000, {}) is None
    assert not same_output("1" * 200_000 + "x", "0.5")
    assert time.monotonic() - began < 5


PROMPT = 'import math\n\ndef twice(x):\n    return 2 * x\n\ndef f(x):\n    """Doubles x."""\n'


@pytest.mark.parametrize(
    "response",
    [
        "```python\ndef f(x):\n    return twice(x)\n```",  # without the helper of the prompt
        "```python\n    return twice(x)\n```",  # the body alone
        f"```python\n{PROMPT}    return twice(x)\n```",
        "    return twice(x)\n\nprint(f(2))\nassert False",  # a base model goes on and on
        "    y = math.floor(x)\n\n    return twice(y)",
        "```python\nfrom __future__ import annotations\ndef f(x: T) -> T:\n    return twice(x)\n```",
    ],
)
def test_a_prompt_of_code_gives_the_program_its_helpers(response):
    namespace: dict = {}
    exec(program_of(response, {"prompt": PROMPT, "entry_point": "f"}), namespace)
    assert namespace["f"](3) == 6


# The tests


ROWS = {
    "HumanEval": (ADD, RIGHT),
    "KodCode": ({"test": "from solution import add\n\ndef test_one():\n    assert add(1, 2) == 3\n"}, RIGHT),
    "MBPP": ({"test_list": ["assert add(1, 2) == 3", "assert add(2, 2) == 4"], "test_setup_code": ""}, RIGHT),
    "MBPP with an import": (
        {"test_list": ["assert math.isclose(add(1, 2), 3)"], "test_imports": ["import math"]},
        RIGHT,
    ),
    "APPS, standard input": (
        {"input_output": json.dumps({"inputs": ["1 2\n", "2 2\n"], "outputs": ["3\n", "4\n"]})},
        "print(sum(map(int, input().split())))",
    ),
    "APPS, a function": (
        {"input_output": json.dumps({"fn_name": "add", "inputs": [[1, 2], [2, 2]], "outputs": [[3], [4]]})},
        "class Solution:\n    def add(self, a, b):\n        return a + b",
    ),
    "DeepCoder": (
        {"tests": [{"input": "1\n2", "output": "3", "type": "functional", "metadata": {"func_name": "add"}}]},
        RIGHT,
    ),
    "PrimeIntellect": (
        {"tests": [{"fn_name": "add", "input": [1, 2], "output": 3, "type": "function_call"}]},
        RIGHT,
    ),
    "Codeforces": (
        {"official_tests": [{"input": "1 2", "output": "3"}]},
        "a, b = map(int, open(0).read().split())\nprint(a + b)",
    ),
}


@pytest.mark.parametrize("form", ROWS)
def test_rows_of_each_form_pass_and_fail(reward, form):
    meta, right = ROWS[form]
    assert graded(reward, right, meta).score == 1.0
    wrong = right.replace("a + b", "a - b").replace("sum(", "max(")
    result = graded(reward, wrong, meta)
    assert (result.score, result.acc) == (0.0, 0.0) and result.info["failure"]
    assert result.extracted.strip() == wrong.strip()


def test_a_result_is_a_list_only_where_one_is_expected(sandbox):
    two = code.Tests(function="f", cases=[([], [3, 4])])
    assert not tried(sandbox, "def f(): return (3, 4)", two)["failure"]
    for wrong in ("3", "[3]", "[3, 4, 5]", "None"):
        assert tried(sandbox, f"def f(): return {wrong}", two)["failure"]


def test_a_result_is_as_exact_as_what_is_expected(sandbox):
    """A float near a large whole number is not that number, and digits in a string are no number."""
    large = code.Tests(function="f", cases=[([], 1_000_000_000), ([], 2)])
    assert not tried(sandbox, "x = iter([1e9, 2 + 1e-9])\ndef f(): return next(x)", large)["failure"]
    assert tried(sandbox, "x = iter([1e9 - 1, 2])\ndef f(): return next(x)", large)["failure"]
    # A whole number may stand where a float is expected, also inside of a dictionary.
    floats = code.Tests(function="f", cases=[([], 2.9999999), ([], {"a": [0.3333333]})])
    assert not tried(sandbox, "x = iter([3, {'a': (1 / 3,)}])\ndef f(): return next(x)", floats)["failure"]
    for wrong in ("4", "10**400", "None", "[2.9999999]"):
        assert tried(sandbox, f"def f(): return {wrong}", code.Tests(function="f", cases=[([], 2.9999999)]))["failure"]
    for wrong in ("{'a': [0.3]}", "{}", "{'a': [0.3333333], 'b': 1}"):
        case = ([], {"a": [0.3333333]})
        assert tried(sandbox, f"def f(): return {wrong}", code.Tests(function="f", cases=[case]))["failure"]
    # JSON has no other keys than texts.
    keys = code.Tests(function="f", cases=[([], {"2": "a", "true": "b", "null": {"2.5": "c"}})])
    assert not tried(sandbox, "def f(): return {2: 'a', True: 'b', None: {2.5: 'c'}}", keys)["failure"]
    digits = code.tests_of(None, {"tests": {"fn_name": "f", "inputs": [["1"]], "outputs": ["100"]}})
    assert not tried(sandbox, "def f(x): return '100'", digits)["failure"]
    assert tried(sandbox, "def f(x): return 100", digits)["failure"]
    # Some data sets put each result into a list. One that does so with some results means lists.
    lists = code.Tests(function="f", cases=[([1], [1]), ([2], [1, 2])])
    assert tried(sandbox, "def f(n): return [1, 2] if n == 2 else 1", lists)["failure"]


def test_each_case_gets_a_new_solution(sandbox):
    program = "class Solution:\n    def __init__(self): self.seen = []\n    def f(self, x): self.seen.append(x); return self.seen\n"
    assert not tried(sandbox, program, code.Tests(function="f", cases=[([1], [[1]]), ([2], [[2]])]))["failure"]


def test_tests_may_stand_in_the_reference_answer(reward):
    answer = json.dumps({"inputs": ["3"], "outputs": ["9"]})
    assert graded(reward, "print(int(input()) ** 2)", {"prompt": "Square it."}, answer).score == 1.0


@pytest.mark.parametrize(
    "meta",
    [
        {},
        {"test": "def check(candidate):\n    pass"},
        {"test": "def check(candidate:", "entry_point": "f"},
        {"test": "import unittest\nclass TestCases(unittest.TestCase): pass", "entry_point": "f"},
        {"test_list": ["assert f("]},
        {"input_output": "{"},
        {"input_output": {"inputs": ["1"], "outputs": []}},
        {"tests": [{"input": "1"}]},
        {"tests": [1]},
        {"test_list": [1]},
        {"answer": 5},
        # The examples of the task, which a program could have by heart.
        {"public_tests": {"input": ["1"], "output": ["1"]}},
        {"test": "def test_a(tmp_path):\n    assert True"},
        # Set-up that would not run.
        {"test": "class TestA:\n    def setup_class(self): self.a = 1\n    def test_a(self):\n        assert self.a"},
        {"test": "import pytest\n@pytest.fixture(autouse=True)\ndef make(): pass\ndef test_a():\n    assert True"},
        {"test": "@pytest.mark.parametrize('a', argvalues=[1])\ndef test_a(a):\n    assert a"},
        # A call of these runs nothing, so every program would pass.
        {"test": "async def test_a():\n    assert False"},
        {"test": "def test_a():\n    assert False\n    yield"},
        {"test": "class TestA:\n    async def test_a(self):\n        assert False"},
        {"test": "async def check(candidate):\n    assert False", "entry_point": "f"},
        {"test": "def check(candidate):\n    assert False\n    yield", "entry_point": "f"},
    ],
)
def test_rows_without_tests_that_can_be_run_are_refused(meta):
    with pytest.raises(BadInput):
        code.tests_of(None, meta)


def test_no_program_passes_a_test_that_a_call_does_not_run(sandbox):
    """The reader of the row does not see these."""
    hidden = [
        "if True:\n    async def test_a():\n        assert False\n",
        "class TestA:\n    if True:\n        def test_a(self):\n            yield\n",
    ]
    for test in hidden:
        assert tried(sandbox, RIGHT, code.tests_of(None, {"test": test}))["failure"]
    inner = "def test_a():\n    def numbers():\n        yield 3\n    assert add(1, 2) in numbers()\n"
    assert not tried(sandbox, RIGHT, code.tests_of(None, {"test": inner}))["failure"]


def test_fractions_count_assertions_and_cases(sandbox):
    half = "def add(a, b):\n    return 3"
    assert tried(sandbox, half, stop=False) | {"failure": ""} == {"passed": 1, "total": 2, "failure": ""}
    runs = code.tests_of(None, ROWS["APPS, standard input"][0])
    assert tried(sandbox, "print(3)", runs, stop=False) | {"failure": ""} == {"passed": 1, "total": 2, "failure": ""}
    # What stands behind an error is not run, and counts as failed.
    check = "def check(f):\n    assert f(1, 2) == 3\n    f()\n    assert f(2, 1) == 3\n    assert f(0, 3) == 3\n"
    stopped = tried(sandbox, half, code.Tests(parts=[check], entry_point="add"), stop=False)
    assert (stopped["passed"], stopped["total"]) == (1, 3)
    calls = code.tests_of(None, ROWS["APPS, a function"][0])
    assert tried(sandbox, half, calls, stop=False) | {"failure": ""} == {"passed": 1, "total": 2, "failure": ""}


def test_a_failed_raises_of_pytest_is_one_failed_test(sandbox):
    """It is no Exception. The tests behind it still run."""
    test = "import pytest\nfrom solution import add\n"
    test += "def test_a():\n    with pytest.raises(ValueError):\n        add(1, 2)\n"
    test += "def test_b():\n    pytest.fail('no')\ndef test_c():\n    assert add(1, 2) == 3\n"
    verdict = tried(sandbox, RIGHT, code.tests_of(None, {"test": test}), stop=False)
    assert (verdict["passed"], verdict["total"]) == (1, 3) and "DID NOT RAISE" in verdict["failure"]


def test_an_assertion_that_a_test_expects_to_fail_is_no_test_of_its_own(sandbox):
    """A right program would get a half for it."""
    expected = "try:\n    assert add(1, 2) == 4\nexcept AssertionError:\n    pass\n"
    tests = code.Tests(parts=[expected + "assert add(1, 2) == 3"])
    assert tried(sandbox, RIGHT, tests, stop=False) == {"passed": 1, "total": 1, "failure": ""}
    raises = "import pytest\nwith pytest.raises(AssertionError):\n    assert add(1, 2) == 4\nassert add(1, 2) == 3"
    assert tried(sandbox, RIGHT, code.Tests(parts=[raises]), stop=False)["total"] == 1


def test_an_assertion_in_a_branch_that_is_not_taken_is_no_test(sandbox):
    branches = "r = add(1, 2)\nif isinstance(r, tuple):\n    assert r == (3,)\nelse:\n    assert r == 3\n"
    verdict = tried(sandbox, RIGHT, code.Tests(parts=[branches]), stop=False)
    assert (verdict["passed"], verdict["total"]) == (1, 1)


@pytest.mark.parametrize(
    "raised, expected",
    [
        ("__import__('json').loads('{')", "ValueError"),
        ("int.from_bytes(b'x', 'middle')", "ValueError"),
        ("b'\\xff'.decode()", "UnicodeDecodeError"),
        ("__import__('decimal').Decimal('abc')", "ArithmeticError"),
        ("exit(3)", "SystemExit"),
    ],
)
def test_an_exception_is_one_of_its_class(sandbox, raised, expected):
    """A subclass is caught as what it is a subclass of."""
    program = f"def f():\n    return {raised}"
    tests = code.Tests(parts=[f"import pytest\nwith pytest.raises({expected}):\n    f()\nassert True"])
    assert tried(sandbox, program, tests)["failure"] == ""
    other = code.Tests(parts=["import pytest\nwith pytest.raises(KeyError):\n    f()\nassert True"])
    assert expected[:5] in tried(sandbox, program, other)["failure"]


def test_parameters_of_pytest_may_be_wrapped(sandbox):
    mark = "@pytest.mark.parametrize('x', [pytest.param(1), 2])"
    test = f"import pytest\n{mark}\ndef test_f(x):\n    assert add(x, 2) == x + 2"
    assert tried(sandbox, RIGHT, code.Tests(parts=[test])) == {"passed": 2, "total": 2, "failure": ""}


def test_a_fixture_beside_parameters_is_refused():
    mark = "@pytest.mark.parametrize('x, y', [(1, 2)])"
    tests = f"import pytest\n{mark}\ndef test_f(x, y, tmp_path):\n    assert add(x, y) == 3"
    with pytest.raises(BadInput, match="fixtures of pytest: tmp_path"):
        code.require_plain_pytest(tests)
    code.require_plain_pytest(tests.replace(", tmp_path", ""))


def test_a_program_in_unfinished_thinking_is_none(reward):
    """Also where the chat template has written the tag."""
    item = Item("Add.\n<think>\n", f"Let me try\n```python\n{RIGHT}\n```\nno wait", None, ADD)
    (result,) = reward([item], [1], [False])
    assert result.info == {"failure": "no program"}


def test_a_program_that_passes_some_of_its_tests_is_not_right():
    fraction = CodeReward("code-fraction", workers=1)
    result = graded(fraction, "def add(a, b):\n    return 3", ADD)
    fraction.pool.close()
    assert (result.score, result.acc) == (0.5, 0.0)
    assert (result.info["passed"], result.info["tests"]) == (1, 2) and "candidate(2, 2)" in result.info["failure"]


@pytest.mark.parametrize(
    ("printed", "expected", "same"),
    [
        ("3\n", "3", True),
        ("3  \n\n", "3", True),
        ("1 2", "1  2", True),
        ("1\n2", "1 2", True),
        ("3", "4", False),
        ("", "3", False),
        ("3 4", "3", False),
        ("yes", "YES", False),
        ("0.3333333", "0.33333333", True),
        ("0.333", "0.33333333", False),
        ("1e3", "1000.0", True),
        ("3.0", "3", False),  # a whole number is expected as one
        ("nan", "0.5", False),
        ("1000000.1", "1000000.5", True),
        ("3", "1e999", False),  # too large for a float
        ("1e999", "1e999", True),
    ],
)
def test_what_counts_as_the_same_output(printed, expected, same):
    assert same_output(printed, expected) is same


# Values that pass between the processes


@pytest.mark.parametrize(
    "value",
    [
        "None", "True", "2**200", "-5", "1.5", "float('inf')", "1j", "'\\ud800 é'", "b'x'", "[1, [2]]", "(1, (2,))",
        "{1, 2}", "frozenset({1})", "{(1, 2): [3], None: {}}", "range(3)", "__import__('decimal').Decimal('1.10')",
        "__import__('fractions').Fraction(1, 3)", "__import__('collections').deque([1])", "10**5000",
    ],
)  # fmt: skip
def test_plain_values_arrive_as_they_are(sandbox, value):
    tests = code.Tests(parts=[f"x = {value}\nassert same(x) == x and type(same(x)) is type(x)"])
    assert tried(sandbox, "def same(x): return x", tests) == {"passed": 1, "total": 1, "failure": ""}


def test_tests_use_objects_callbacks_and_changes_in_place(sandbox):
    program = (
        "class Stack:\n"
        "    limit = 7\n"
        "    def __init__(self): self.items = []\n"
        "    def push(self, x): self.items.append(x); return self\n"
        "    def top(self): return self.items[-1]\n"
        "def sort(values): values.sort()\n"
        "def apply(f, x): return f(f(x))\n"
        "def squares(n): yield from (i * i for i in range(n))\n"
        "def fail(x): raise ValueError('no ' + x)\n"
    )
    test = (
        "stack = Stack()\nassert stack.push(3).push(4).top() == 4\nassert stack.limit == 7\n"
        "values = [3, 1, 2]\nsort(values)\nassert values == [1, 2, 3]\n"
        "assert apply(lambda x: x + [1], []) == [1, 1]\n"
        "assert list(squares(4)) == [0, 1, 4, 9]\n"
        "try:\n    fail('way')\nexcept ValueError as error:\n    message = str(error)\n"
        "assert message == 'no way'\n"
    )
    assert tried(sandbox, program, code.Tests(parts=[test])) == {"passed": 6, "total": 6, "failure": ""}


def test_a_program_may_call_what_a_test_gives_it_and_nothing_behind_it(sandbox):
    """The attributes of a function lead to all that the test knows."""
    program = "def apply(f):\n    f._channel.call(f._name, ['__globals__'], {}, 'getattr')\n    return 'in'\n"
    verdict = tried(sandbox, program, code.Tests(parts=["assert apply(lambda: 1) != 'in'"]))
    assert "not given" in verdict["failure"]


def test_the_set_up_and_the_tests_use_the_programs_names(sandbox):
    """As in MBPP: trees in the set-up, functions as arguments, and functions named like one of Python's."""
    tree = "class Node:\n    def __init__(self, x): self.x, self.left = x, None\ndef depth(n): return n and 1 + (depth(n.left) or 0)\n"
    tests = code.Tests(setup="root = Node(1)\nroot.left = Node(2)", parts=["assert depth(root) == 2"])
    assert not tried(sandbox, tree, tests)["failure"]
    apply = "def square(x): return x * x\ndef apply(f, x): return f(x)\n"
    assert not tried(sandbox, apply, code.Tests(parts=["assert apply(square, 3) == 9"]))["failure"]
    sums = code.Tests(parts=["assert sum(1, 2) == 3", "assert sum(2, 2) == 4"])
    assert not tried(sandbox, "def sum(a, b): return a + b", sums)["failure"]


def test_no_program_replaces_a_function_of_python_in_its_tests(sandbox):
    cheat = "def abs(x): return 0\ndef len(x): return 3\ndef all(x): return True\ndef f(): return 9\n"
    for test in ("assert abs(f() - 3) < 1", "assert len([f()]) == 3", "assert all(x == 3 for x in [f()])"):
        assert tried(sandbox, cheat, code.Tests(parts=[test, test]))["failure"]
    close = code.Tests(parts=["assert math.isclose(f(), 3)"])
    module = "class math:\n    isclose = staticmethod(lambda *given: True)\n"
    assert tried(sandbox, module + cheat, close)["failure"]
    assert not tried(sandbox, "def f(): return 3", close)["failure"], "MBPP does not always import it"
    imported = "from solution import f\ndef test_f():\n    assert abs(f() - 3) < 1\n"
    assert tried(sandbox, cheat, code.Tests(parts=[imported]))["failure"]
    assert not tried(sandbox, "def f(): return 3", code.Tests(parts=[imported]))["failure"]


PYTEST = {
    "parametrize": "@pytest.mark.parametrize('a, b', [(1, 3), pytest.param(2, 4)])\ndef test_f(a, b):\n    assert f(a, 2) == b\n",
    "parametrize by one name": "@pytest.mark.parametrize('a', [1, 2])\ndef test_f(a):\n    assert f(a, 2) == a + 2\n",
    "a class": "class TestF:\n    def setup_method(self, method): self.a = 1\n    def test_f(self):\n        assert f(self.a, 2) == 3\n",
    "raises": "def test_f():\n    with pytest.raises(AssertionError):\n        assert f(1, 2) == 4\n    assert f(1, 2) == 3\n",
    "all names": "from solution import *\ndef test_f():\n    assert f(1, 2) == 3\n",
}  # fmt: skip


@pytest.mark.parametrize("name", PYTEST)
def test_what_tests_need_of_pytest(sandbox, name):
    test = f"import pytest\nfrom solution import f, test_name\n{PYTEST[name]}"
    tests = code.tests_of(None, {"test": test})
    other = "def test_name(x): pass\n"
    assert tried(sandbox, f"def f(a, b): return a + b\n{other}", tests)["failure"] == ""
    assert tried(sandbox, f"def f(a, b): return a - b\n{other}", tests)["failure"]


def test_a_test_without_an_assertion_counts(sandbox):
    tests = code.Tests(parts=["import math\nmath.sqrt(f())"])
    assert tried(sandbox, "def f(): return 4", tests) == {"passed": 1, "total": 1, "failure": ""}
    assert tried(sandbox, "def f(): return -4", tests)["failure"]
    assert tried(sandbox, "def f(): return 4", code.Tests(parts=["x = 1"]))["failure"] == "no test has run"


# HumanEval


def humaneval() -> list[dict]:
    if not HUMANEVAL.is_file():
        pytest.skip("needs ../shared/data/humaneval")
    return [json.loads(line) for line in HUMANEVAL.read_text().splitlines()]


def test_every_solution_of_humaneval_passes_and_every_broken_one_fails(reward):
    """A broken one returns the right value in a list, or, where that is a list, in a tuple."""
    right, broken = [], []
    for row in humaneval():
        meta = {key: row[key] for key in ("prompt", "test", "entry_point")}
        name = row["entry_point"]
        solution = row["prompt"] + row["canonical_solution"]
        wrapped = f"{solution}\n_right = {name}\ndef {name}(*given):\n    return (_right(*given), 0)\n"
        right.append(Item("", f"```python\n{solution}\n```", None, meta))
        broken.append(Item("", f"```python\n{wrapped}\n```", None, meta))
    for items, expected in ((right, 1.0), (broken, 0.0)):
        results = reward(items, [1] * 164, [False] * 164)
        odd = [
            (item.meta["entry_point"], result.info) for item, result in zip(items, results) if result.score != expected
        ]
        assert len(results) == 164 and not odd


def test_a_base_models_continuation_of_a_humaneval_prompt_is_graded(reward):
    row = humaneval()[0]
    result = reward([Item("", row["canonical_solution"] + "\n\nprint('and more')", None, row)], [1], [False])[0]
    assert result.score == 1.0


# Hostile programs: none may pass, none may do harm.

HOSTILE = {
    "an endless loop": "while True: pass",
    "an endless loop in the function": "def add(a, b):\n    while True: pass",
    "sleep": "import time\ntime.sleep(1000)",
    "waiting for input": "input()",
    "a fork bomb": "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass",
    "a thread bomb": "import threading, time\nwhile True: threading.Thread(target=time.sleep, args=(100,)).start()",
    "40 threads": "import threading, time\nfor _ in range(40): threading.Thread(target=time.sleep, args=(1,)).start()\n" + RIGHT,
    "40 processes": "import os, time\nfor _ in range(40): os.fork() or (time.sleep(9), os._exit(0))\n" + RIGHT,
    "3 GB": "import mmap\nx = mmap.mmap(-1, 3 * 2**30)\n" + RIGHT,
    "10 GB": "x = bytearray(10 * 2**30)\n" + RIGHT,
    "10 GB in the function": "def add(a, b):\n    return [0] * (10 * 2**30)",
    "1 GB of output": "for _ in range(1024): print('x' * 2**20)\n" + RIGHT.replace("a + b", "0"),
    "a file of 20 MB": "with open('big', 'wb') as f: f.write(bytes(20 * 2**20))\n" + RIGHT,
    "many open files": "files = [open('/dev/null') for _ in range(100)]\n" + RIGHT,
    "leaving early": "import os\nos._exit(0)",
    "leaving early in the function": "def add(a, b):\n    import os\n    os._exit(0)",
    "sys.exit(0)": "import sys\nsys.exit(0)",
    "sys.exit(0) in the function": "def add(a, b):\n    import sys\n    sys.exit(0)",
    "StopIteration": "def add(a, b): raise StopIteration",
    "printing the verdict": 'print(\'{"passed": 2, "total": 2, "failure": ""}\')\ndef add(a, b): return 0',
    "writing the verdict into every file": (
        "import os\nfor fd in range(3, 200):\n    try: os.write(fd, b'{\"passed\": 2, \"total\": 2, \"failure\": \"\"}')\n"
        "    except OSError: pass\ndef add(a, b): return 0"
    ),
    "an object that equals everything": (
        "class Yes:\n    def __eq__(self, other): return True\n    __hash__ = None\ndef add(a, b): return Yes()"
    ),
    "a number that equals everything": (
        "class Yes(int):\n    def __eq__(self, other): return True\n    __hash__ = int.__hash__\ndef add(a, b): return Yes(9)"
    ),
    "patched built-ins": (
        "import builtins\nbuiltins.AssertionError = ValueError\nbuiltins.__build_class__ = None\n"
        "builtins.isinstance = lambda *a: True\nbuiltins.abs = lambda x: 0\ndef add(a, b): return 0"
    ),
    "a patched checker": (
        "import gc, sys\nfor o in gc.get_objects():\n"
        "    if isinstance(o, dict) and 'check' in o: o['check'] = lambda c: None\n"
        "sys.modules['tests'] = None\ndef check(candidate): return True\ndef add(a, b): return 0"
    ),
    "patched equality of our own code": (
        "import sys\nfor module in list(sys.modules.values()):\n    try: module.run_tests = module.equal = lambda *a: 0\n"
        "    except Exception: pass\ndef add(a, b): return 0"
    ),
    "answers before they are asked": (
        "import sys, socket\nf = sys._getframe()\nwhile f:\n    channel = f.f_locals.get('channel')\n"
        "    if channel: [channel.send({'value': 3}) for _ in range(5)]\n    f = f.f_back\ndef add(a, b): return 0"
    ),
    "nonsense to the tests": (
        "import sys\nf = sys._getframe()\nwhile f:\n    channel = f.f_locals.get('channel')\n"
        "    if channel: channel.socket.sendall(b'\\xff' * 100)\n    f = f.f_back\ndef add(a, b): return 0"
    ),
    "a call into the tests": (
        "import sys\nf = sys._getframe()\nwhile f:\n    channel = f.f_locals.get('channel')\n"
        "    if channel: channel.send({'call': 'exit', 'method': '', 'arguments': ['list', [['list', []], ['dict', []]]]})\n"
        "    f = f.f_back\ndef add(a, b): return 0"
    ),
    "reading the tests in memory": (
        "import gc\nassert 'candidate(1, 2)' in ''.join(o for o in gc.get_objects() if isinstance(o, str))\n" + RIGHT
    ),
    "reading the tests in files": (
        "import os\nfound = ''\nfor fd in range(200):\n    try:\n        os.lseek(fd, 0, 0); found += os.read(fd, 10**6).decode()\n"
        "    except Exception: pass\nassert 'candidate(1, 2)' in found\n" + RIGHT
    ),
    "a signal to its parent": "import os, signal\nos.kill(os.getppid(), signal.SIGKILL)\ndef add(a, b): return 0",
    "signals to everybody": (
        "import os, signal\nfor pid in range(2, 100000):\n    try: os.kill(pid, signal.SIGKILL)\n    except OSError: pass\n"
        "def add(a, b): return 0"
    ),
    "deep recursion": "import sys\nsys.setrecursionlimit(10**9)\ndef add(a, b): return add(a, b)",
    "deep values": "def add(a, b):\n    x = []\n    for _ in range(10**5): x = [x]\n    return x",
    "no program": ")(",
    "a null byte": "\0",
    "a crash": "import ctypes\nctypes.string_at(0)",
}  # fmt: skip


def test_no_exception_ends_a_test_early(sandbox):
    tests = code.Tests(parts=["assert all(map(lambda x: f(x) == x, range(3)))"])
    assert tried(sandbox, "def f(x): raise StopIteration", tests)["failure"]


ENDS = {
    "a thread that goes on": "import threading, time\ndef f(): time.sleep(0.2); print(3)\nthreading.Thread(target=f).start()",
    "a thread that goes on behind sys.exit": "import sys, threading, time\ndef f(): time.sleep(0.2); print(3)\nthreading.Thread(target=f).start()\nsys.exit()",
    "atexit": "import atexit\natexit.register(lambda: print(3))",
    "standard output that is closed": "import sys\nprint(3)\nsys.stdout.close()",
    "another standard output": "import sys, io\nsys.stdout = io.StringIO()\nprint(3)\nsys.__stdout__.write(sys.stdout.getvalue())",
    "a standard output of its own": (
        "import io, os, sys\nclass Out(io.IOBase):\n    def __init__(self): self.kept = []\n    def write(self, x): self.kept.append(x)\n"
        "    def flush(self): os.write(1, ''.join(self.kept).encode()); self.kept = []\nsys.stdout = Out()\nprint(3)"
    ),
    "a file that is open": "out = open(1, 'w')\nout.write('3')",
}  # fmt: skip


@pytest.mark.parametrize("name", ENDS)
def test_a_script_ends_as_in_python(sandbox, name):
    verdict = tried(sandbox, ENDS[name], code.Tests(cases=[("", "3")]))
    assert verdict["failure"] == ""


def test_programs_share_no_memory_and_get_no_namespace(sandbox):
    if sandbox.kind != "namespaces":
        pytest.skip("needs namespaces for each program")
    segment = "import ctypes\nassert ctypes.CDLL(None).shmget(4242, 4096, {flags}) {found} 0\n"
    assert not tried(sandbox, segment.format(flags="0o1666", found=">=") + RIGHT)["failure"]
    assert not tried(sandbox, segment.format(flags="0o666", found="<") + RIGHT)["failure"]
    namespace = "import ctypes\nassert ctypes.CDLL(None).unshare(0x10000000) != 0\n"
    assert not tried(sandbox, namespace + RIGHT)["failure"]


def test_programs_have_no_keyrings(sandbox):
    """They outlive a program, and the user's own may hold secrets."""
    if os.uname().machine not in KEYRING_CALLS:
        pytest.skip("no filter for this processor")
    _, first, last = KEYRING_CALLS[os.uname().machine]
    program = (
        "import ctypes, errno\nlib = ctypes.CDLL(None, use_errno=True)\n"
        f"assert lib.syscall({first}, b'user', b'left', b'x', 1, -4) == -1 and ctypes.get_errno() == errno.ENOSYS\n"
        f"assert lib.syscall({last}, 0, -3, 0) == -1 and ctypes.get_errno() == errno.ENOSYS\n"
        f"assert lib.syscall({last + 1}, 0, 0, 0) != -1 or ctypes.get_errno() != errno.ENOSYS\n"
    )
    assert tried(sandbox, program + RIGHT) == {"passed": 2, "total": 2, "failure": ""}


def test_files_in_memory_without_memfd(monkeypatch):
    """Pythons of Conda, and older ones of uv, lack the function."""
    monkeypatch.delattr(os, "memfd_create")
    fd = code.in_memory(b"x")
    assert code.read(fd) == "x"
    code.close(fd)


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_programs_are_wrong(sandbox, name, monkeypatch):
    if sandbox.kind == "limits" and name == "signals to everybody" and os.geteuid():
        pytest.skip("without namespaces it may reach other processes of this user")
    if sandbox.kind == "bubblewrap" and name.startswith("40 ") and not os.geteuid():
        pytest.skip("the kernel does not count root's processes, also in bubblewrap")
    began, before = time.monotonic(), descendants(os.getpid())
    with monkeypatch.context() as patch:
        patch.setattr(code, "PROGRAM_SECONDS", 1.0)
        verdict = tried(sandbox, HOSTILE[name])
    assert verdict["failure"] and verdict["passed"] < 2, verdict
    assert time.monotonic() - began < 30
    # Nothing is left, and the next program finds the sandbox as it was.
    if sandbox.process.poll() is None:
        wait_until(lambda: descendants(sandbox.process.pid) <= before)
    assert tried(sandbox, RIGHT) == {"passed": 2, "total": 2, "failure": ""}


@pytest.mark.parametrize("count, size", [(2000, 1), (10, 10 * 2**20)])
def test_the_folder_of_a_program_is_small(sandbox, count, size):
    if sandbox.kind == "limits":
        pytest.skip("without namespaces a program writes to the disk")
    program = f"for i in range({count}):\n    with open(str(i), 'wb') as f: f.write(bytes({size}))\n"
    assert "No space left" in tried(sandbox, program + RIGHT)["failure"]


def test_a_late_program_is_called_late(sandbox, monkeypatch):
    monkeypatch.setattr(code, "PROGRAM_SECONDS", 0.5)
    assert "timeout" in tried(sandbox, HOSTILE["an endless loop in the function"])["failure"]
    runs = code.tests_of(None, ROWS["APPS, standard input"][0])
    began = time.monotonic()
    assert "timeout" in tried(sandbox, "while True: pass", runs)["failure"]
    assert time.monotonic() - began < 20


def test_all_inputs_of_a_program_have_one_limit(sandbox, monkeypatch):
    """Otherwise a slow program would exceed the worker's limit, which leaves it ungraded instead of wrong."""
    monkeypatch.setattr(code, "RUNS_SECONDS", 0.6)
    runs = code.Tests(cases=[("", "3")] * 20)
    verdict = tried(sandbox, "import time; time.sleep(0.2); print(3)", runs, stop=False)
    assert verdict["passed"] < 20 and re.search("timeout|no time left", verdict["failure"])


def test_a_worker_keeps_no_file_of_a_program_open(sandbox):
    before = os.listdir("/proc/self/fd")
    tried(sandbox, RIGHT)
    tried(sandbox, "print(3)", code.Tests(cases=[("", "3")] * 3))
    assert len(os.listdir("/proc/self/fd")) == len(before)


@pytest.mark.parametrize("program", ["print(3); import os; os._exit(1)", "print(3)\nraise ValueError", "print(3, 4)"])
def test_a_script_is_judged_by_its_output_and_its_end(sandbox, program):
    runs = code.Tests(cases=[("1 2", "3")])
    assert tried(sandbox, program, runs)["failure"]
    assert not tried(sandbox, "print(3)\nimport sys\nsys.exit()", runs)["failure"]


def test_nothing_outlives_its_program(sandbox):
    """Neither a process that has left the group, nor a file."""
    mark = f"left-{sandbox.kind[0]}-{os.getpid()}"  # at most 15 characters
    program = (
        f"import ctypes, os, time\nopen({mark!r}, 'w').write('x')\nready, tell = os.pipe()\n"
        "if os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0:\n"
        f"        ctypes.CDLL(None).prctl(15, {mark!r}.encode(), 0, 0, 0)\n"
        "        os.write(tell, b'x')\n        time.sleep(60)\n    os._exit(0)\n"
        "os.read(ready, 1)\n" + RIGHT
    )
    assert tried(sandbox, program) == {"passed": 2, "total": 2, "failure": ""}
    wait_until(lambda: not processes_with(mark))
    where = tried(sandbox, "import os\nraise ValueError(f'<{os.getcwd()}>')")["failure"]
    folder = Path(re.search("<(.*)>", where)[1])
    assert folder.is_absolute()
    wait_until(lambda: not folder.exists() or folder == Path(WORK))
    again = f"import os\nassert not os.path.exists({mark!r}) and os.listdir('.') == []\n" + RIGHT
    assert not tried(sandbox, again)["failure"]


def test_the_children_of_a_process_are_found_in_both_ways():
    child = subprocess.Popen(["sleep", "60"])
    assert child.pid in sandboxes.children_by_parent(os.getpid()) and child.pid in descendants(os.getpid())
    assert child.pid not in sandboxes.children_by_parent(child.pid)
    child.kill()
    child.wait()


def test_an_orphan_that_is_not_found_holds_up_nobody(monkeypatch):
    """The kernel may not tell who the children of a process are."""
    monkeypatch.setattr(sandboxes, "descendants", lambda process: set())
    monkeypatch.setattr(sandboxes, "CLEAN_UP_SECONDS", 0.3)
    keeper = os.fork()
    if keeper == 0:
        orphan = subprocess.Popen(["sleep", "20"])
        sandboxes.end_descendants()
        orphan.kill()
        os._exit(0)
    began = time.monotonic()
    assert os.waitpid(keeper, 0)[1] == 0
    assert 0.2 < time.monotonic() - began < 10


def processes_with(mark: str) -> list[str]:
    found = []
    for path in Path("/proc").glob("[0-9]*/comm"):
        with contextlib.suppress(OSError):
            if path.read_text().strip() == mark:
                found.append(path.parent.name)
    return found


def test_programs_see_neither_the_network_nor_the_users_files_nor_secrets(sandbox, tmp_path, monkeypatch):
    (tmp_path / "secret").write_text("x")
    server = socket.create_server(("127.0.0.1", 0))
    reach = {
        "network": f"import socket\nsocket.create_connection(('127.0.0.1', {server.getsockname()[1]}), 2)",
        "file": f"open({str(tmp_path / 'secret')!r}).read()",
        "repository": f"open({str(ROOT / 'README.md')!r}).read()",
        "Python": "import sys\nopen(sys.prefix + '/sandbox-was-here', 'w')",
        "system": "open('/usr/sandbox-was-here', 'w')",
    }
    if sandbox.kind == "limits":
        assert "network" in sandbox.missing and "files" in sandbox.missing
        reads_all = not os.geteuid() and bool(sandboxes.permitted_capabilities() & sandboxes.READS_ALL)
        assert ("every file" in sandbox.missing) == reads_all
        if not os.geteuid():  # pytest makes its folders for one user
            assert reads_all == (not tried(sandbox, f"{reach['file']}\n{RIGHT}")["failure"])
        return
    # The kernel does not count the processes of root, and bubblewrap has no other user.
    assert ("root's processes" in sandbox.missing) == (sandbox.kind == "bubblewrap" and not os.geteuid())
    assert "," not in sandbox.missing, "nothing else is missing"
    for name, program in reach.items():
        assert tried(sandbox, f"{program}\n{RIGHT}")["failure"], name
    shown = {Path(path).parts[1] for path in (*SYSTEM, *DEVICES, *python_folders(), WORK, "/proc", str(ROOT))}
    assert not tried(sandbox, f"import os\nassert {{*os.listdir('/')}} <= {shown}\n{RIGHT}")["failure"]
    mounted = "import os, sys\nassert all(os.statvfs(path).f_flag & os.ST_RDONLY for path in ('/usr', sys.prefix))\n"
    assert not tried(sandbox, mounted + RIGHT)["failure"]


LEAVE = (
    "import os\nfor folder in ('/', '/dev', '/dev/shm', '/dev/pts', '/proc', '/tmp', '/run', '/root', '/root/root'):\n"
    "    try: open(folder + '/left', 'w')\n    except OSError: continue\n    raise ValueError(folder)\n"
)


def test_programs_write_to_their_folder_alone_and_see_no_processes(sandbox):
    if sandbox.kind == "limits":
        pytest.skip("without namespaces a program writes to the disk")
    assert tried(sandbox, LEAVE + RIGHT) == {"passed": 2, "total": 2, "failure": ""}
    seen = "import os\nassert not os.path.exists('/proc') or not os.listdir('/proc')\n"
    assert not tried(sandbox, seen + RIGHT)["failure"]


def test_bubblewrap_without_namespaces_for_each_program_says_so(monkeypatch):
    """As where its profile, such as Ubuntu's, forbids namespaces inside of it."""
    try:
        Sandbox(["common.rewards.code_roles"], kinds=("bubblewrap",)).close()
    except RuntimeError as error:
        pytest.skip(str(error))
    command = [{"--cap-add": "--cap-drop"}.get(word, word) for word in sandboxes.bubblewrap()]
    monkeypatch.setattr(sandboxes, "bubblewrap", lambda: command)
    made = Sandbox(["common.rewards.code_roles"], kinds=("bubblewrap",))
    assert "files" in made.missing and "processes" in made.missing and not made.has_own_namespaces
    assert tried(made, LEAVE + RIGHT) == {"passed": 2, "total": 2, "failure": ""}
    killer = HOSTILE["a signal to its parent"]
    assert tried(made, killer)["failure"], "a program that can kill its keeper does not get away with it"
    assert not tried(made, RIGHT)["failure"]
    made.close()


# When the sandbox itself fails


def test_root_that_may_not_read_everything_runs_programs_or_is_refused():
    """As in Docker, whose root lacks that right. Programs lost it in vain, and all of them were wrong."""
    if os.geteuid():
        pytest.skip("only root loses a right")
    script = (
        "from common.processes.sandbox import Sandbox\nfrom common.rewards import code\n"
        "try:\n    sandbox = Sandbox(['common.rewards.code_roles'], ('limits',))\n"
        f"    tests = {{**vars(code.tests_of(None, {ADD!r})), 'stop': True}}\n"
        f"    print(sandbox.missing, code.run(sandbox, {RIGHT!r}, tests))\n"
        "except RuntimeError as error:\n    print(f'refused: {error}')\n"
    )
    # PR_CAPBSET_DROP: the Python that follows lacks CAP_DAC_READ_SEARCH.
    drop = "import ctypes, os, sys\nassert ctypes.CDLL(None).prctl(24, 2, 0, 0, 0) == 0\nos.execv(sys.argv[1], sys.argv[1:])"
    command = [sys.executable, "-c", drop, sys.executable, "-c", script]
    said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    # This Python may be where only root reads.
    is_refused = said.startswith("refused: ") and "No module named 'colorsys'" in said and "every user" in said
    assert is_refused or ("'passed': 2" in said and "every file" not in said), said


def test_root_keeps_only_the_rights_that_it_has(tmp_path):
    if os.geteuid():
        pytest.skip("only root loses a right")
    child = os.fork()
    if child == 0:
        header = (sandboxes.ctypes.c_uint32 * 2)(sandboxes.CAPABILITY_VERSION, 0)
        rights = sandboxes.permitted_capabilities() & ~sandboxes.READS_ALL
        sandboxes.call("capset", header, (sandboxes.ctypes.c_uint32 * 6)(rights, rights, 0, 0, 0, 0))
        with contextlib.suppress(OSError):
            sandboxes.give_up_rights(str(tmp_path), 60000)
            os._exit(0)
        os._exit(1)
    assert os.waitpid(child, 0)[1] == 0


@pytest.mark.parametrize("kind", ["namespaces", "limits"])
def test_a_sandbox_that_calls_right_programs_wrong_does_not_start(monkeypatch, kind):
    monkeypatch.setattr(sandboxes, "import_path", lambda: [])
    with pytest.raises(RuntimeError, match="does not start .*sample program.*(No module named|not permitted)"):
        Sandbox(["common.rewards.code_roles"], kinds=(kind,))


def test_the_last_words_of_a_nursery_are_told():
    with pytest.raises(RuntimeError, match="ended at once: ModuleNotFoundError: No module named 'absent'"):
        Sandbox(["absent"], kinds=("limits",))


def test_a_program_whose_keeper_is_killed_is_not_called_wrong(sandbox):
    """As when memory runs out. Where the program itself can do it, it is wrong."""
    mark = f"sleeps-{sandbox.kind[0]}-{os.getpid()}"
    program = f"import ctypes, time\nctypes.CDLL(None).prctl(15, {mark!r}.encode(), 0, 0, 0)\ntime.sleep(60)"
    files = [code.in_memory(data) for data in (program.encode(), b"", b"", b"")]
    running = sandbox.start("common.rewards.code_roles:run_script", files, 60)
    code.close(*files)
    wait_until(lambda: processes_with(mark))
    (sleeper,) = map(int, processes_with(mark))
    (keeper,) = (process for process in descendants(sandbox.process.pid) if sleeper in sandboxes.children_of(process))
    os.kill(keeper, signal.SIGKILL)
    if sandbox.kind == "limits" and os.geteuid():
        assert running.wait() == "signal 9"
    else:
        with pytest.raises(SandboxFailed, match="killed"):
            running.wait()
    wait_until(lambda: not processes_with(mark))
    assert not tried(sandbox, RIGHT)["failure"]


def test_a_program_that_could_not_be_limited_is_not_run(monkeypatch):
    """Its failure is not the program's either."""

    def fail(*given):
        raise PermissionError("no such right")

    monkeypatch.setattr(sandboxes, "give_up_rights", fail)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if os.fork() == 0:
        sandboxes.keeper_main(os.abort, theirs.fileno(), [], 5.0, False, False)
    theirs.close()
    with pytest.raises(SandboxFailed, match="PermissionError: no such right"):
        sandboxes.Running(ours, keeper_in_reach=True).wait()


def test_no_later_worker_has_a_weaker_sandbox_than_the_first():
    """Only the first one's weakness is told."""
    assert code.load_sandbox(["limits"]).facts["kind"] == "limits", "a worker takes what it is told"
    reward = CodeReward("code", workers=2)
    (kinds,) = reward.pool.program.arguments
    assert kinds == [code.load_sandbox().facts["kind"]]
    reward.pool.close()


def test_a_response_is_ungraded_if_the_sandbox_or_a_worker_fails(monkeypatch, capfd):
    def fail(*given):
        raise SandboxFailed("the keeper was killed")

    handler = code.load_sandbox()
    monkeypatch.setattr(code, "run", fail)
    item = {"response": RIGHT, "answer": json.dumps({**vars(code.tests_of(None, ADD)), "stop": True})}
    assert handler.answer([[item], [0], [False]]) == [
        [None, None, RIGHT, {"error": "the sandbox: the keeper was killed"}]
    ]

    lonely = CodeReward("code", workers=1)
    monkeypatch.setattr(lonely.pool, "ask", lambda *given: Failure("died", "exit status -9"))
    result = graded(lonely, RIGHT, ADD)
    assert (result.score, result.acc, result.info) == (None, None, {"error": "died: exit status -9"})
    assert "1 of 1 rows not graded: died" in capfd.readouterr().err
    lonely.pool.close()


# What a program sees


def test_mounts_below_what_programs_see_are_read_only_too():
    """Such as a volume in the folder of Python. A program that can write there could change what the trainer runs."""
    folder = next((path for path in ("/usr/games", "/usr/local/games", "/usr/share/doc") if os.path.isdir(path)), None)
    if os.geteuid() or folder is None:
        pytest.skip("only root may mount")
    program = f"try:\n    open('{folder}/x', 'w')\nexcept OSError as e:\n    print(e.errno)"
    script = (
        "from common.processes.sandbox import Sandbox\nfrom common.rewards import code\n"
        "sandbox = Sandbox(['common.rewards.code_roles'], ('namespaces',))\n"
        f"print(code.run_once(sandbox, {program!r}, '', '30', 10))"
    )
    inside = f'mount -t tmpfs -o mode=777 none {folder} && exec "$@"'
    command = ["unshare", "-m", "sh", "-c", inside, "sh", sys.executable, "-c", script]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if "Permission" in ran.stderr or "does not start" in ran.stderr:
        pytest.skip(ran.stderr)
    assert ran.stdout.strip() == "", ran


def test_pythons_own_libraries_are_found(monkeypatch):
    monkeypatch.setenv("LD_LIBRARY_PATH", "/opt/libraries")
    made = Sandbox(["common.rewards.code_roles"])
    program = "import os\nassert os.environ['LD_LIBRARY_PATH'] == '/opt/libraries'\n" + RIGHT
    assert not tried(made, program)["failure"]
    made.close()


def test_programs_of_root_are_not_root(sandbox):
    if os.geteuid() or sandbox.kind == "bubblewrap":
        pytest.skip("tests run as another user, or root has no other user to become")
    verdict = tried(sandbox, "import os\nassert os.getuid() and os.getgid() and not os.getgroups()\n" + RIGHT)
    assert not verdict["failure"]


def test_programs_have_an_environment_and_a_folder_of_their_own(sandbox, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "secret-123456")
    fresh = Sandbox(["common.rewards.code_roles"], kinds=(sandbox.kind,))
    program = (
        "import os\nassert 'secret-123456' not in str(os.environ) and 'PYTHONPATH' not in os.environ\n"
        "open('a', 'w').write('b')\nassert open('a').read() == 'b' and os.listdir('.') == ['a']\n"
        "import numpy, json\n" + RIGHT
    )
    assert not tried(fresh, program)["failure"]
    fresh.close()


def test_a_program_has_no_files_but_its_channel(sandbox):
    program = (
        "import os, stat\nfound = []\nfor fd in range(3, 64):\n"
        "    try: found.append(stat.S_ISSOCK(os.fstat(fd).st_mode))\n    except OSError: pass\n"
        "assert found == [True], found\n" + RIGHT
    )
    assert not tried(sandbox, program)["failure"]


def test_equal_programs_run_once(reward, monkeypatch):
    asked = []
    verdicts = reward.pool.verdicts
    monkeypatch.setattr(reward.pool, "verdicts", lambda items: asked.extend(items) or verdicts(items))
    items = [Item("", f"{n}:\n```python\n{RIGHT}\n```", None, ADD) for n in range(4)]
    items.append(Item("", "```python\ndef add(a, b): return 0\n```", None, ADD))
    results = reward(items, [1] * 5, [False] * 5)
    assert [result.score for result in results] == [1, 1, 1, 1, 0] and len(asked) == 2


def test_the_nursery_ends_with_its_worker():
    """Also if the worker is killed."""
    program = (
        "import sys, time\nfrom common.processes.sandbox import Sandbox, descendants\n"
        "print(Sandbox(['common.rewards.code_roles']).process.pid, flush=True)\ntime.sleep(60)"
    )
    worker = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    nursery = int(worker.stdout.readline())
    worker.send_signal(signal.SIGKILL)
    worker.wait()
    # A zombie has no command line.
    command = Path(f"/proc/{nursery}/cmdline")
    wait_until(lambda: not command.exists() or not command.read_bytes())


def test_a_program_ends_with_a_worker_whose_group_is_killed(tmp_path):
    """Also a program that has asked the kernel to let it live."""
    mark = f"left-k-{os.getpid()}"
    hostile = f"import ctypes, time\nlib = ctypes.CDLL(None)\nlib.prctl(1, 0, 0, 0, 0)\nlib.prctl(15, {mark!r}.encode(), 0, 0, 0)\ntime.sleep(40)"
    (tmp_path / "hostile.py").write_text(hostile)
    script = (
        "import os\nfrom common.processes.sandbox import Sandbox\n"
        f"fds = [os.open({str(tmp_path / 'hostile.py')!r}, os.O_RDONLY), *[os.open(os.devnull, os.O_RDWR) for _ in range(3)]]\n"
        "Sandbox(['common.rewards.code_roles']).start('common.rewards.code_roles:run_script', fds, 60).wait()"
    )
    worker = subprocess.Popen([sys.executable, "-c", script], cwd=ROOT, start_new_session=True)
    wait_until(lambda: processes_with(mark))
    os.killpg(worker.pid, signal.SIGKILL)
    worker.wait()
    wait_until(lambda: not processes_with(mark))


def test_a_run_with_programs_on_the_command_line(tmp_path):
    """The embedded model writes numbers and no programs. The rollouts say so, and rows without tests are refused."""
    rows = [{"prompt": f"{n}+5=", "answer": str(n + 5), "test_list": ["assert f() == 1"]} for n in range(10, 74)]
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = [
        "--dataset",
        data,
        "--reward",
        "gsm8k",
        "code=0.5",
        "--rollout-backend",
        "hf",
        "--steps",
        1,
        "--rollouts-every",
        1,
    ]
    launch(ROOT / "algos/grpo.py", *flags, "--run-dir", tmp_path / "run")
    (file,) = (tmp_path / "run" / "rollouts").iterdir()
    written = [json.loads(line) for line in file.read_text().splitlines()]
    assert written and {row["info"]["parts"]["code"] for row in written} == {0.0}

    data.write_text(json.dumps({"prompt": "10+5=", "answer": "15"}) + "\n")
    refused = launch(ROOT / "algos/grpo.py", *flags, "--run-dir", tmp_path / "other", check=False)
    assert refused.returncode == 2 and f"{data}:1" in refused.stderr and "--reward code" in refused.stderr
