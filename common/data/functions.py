"""The task `functions`: write a short Python function. SmolLM2-135M sometimes can.

    Write a Python function f(xs) that returns the number of values in the list xs that are greater than 4. Reply with
    the code only.

Each row has the tests of --reward code: "test_list" with five assertions, made by running the right program, which is
its "answer" and, in fences, the "solution" of algos/sft.py. Arguments are drawn until the tests of a row refute the
right programs of all other rows, so a program for another problem never passes.
"""

import random
from collections.abc import Callable, Iterator

TESTS = 5  # assertions of a row
LETTERS = "abcdegimnoprstu"
WORDS = (
    "apple banana cherry orange lemon melon grape peach tomato potato pepper carrot onion garlic ginger cabbage mango "
    "papaya pineapple coconut almond walnut peanut raisin spinach celery radish turnip pumpkin cucumber"
)
# Kind of argument -> its name in the program.
NAMES = {"number": "x", "numbers": "x, y", "list": "xs", "string": "s"}
# (kind of argument, what is returned, the expression). {a} and {b} are small numbers, {c} is a letter.
KINDS = (
    ("number", "x plus {a}", "x + {a}"),
    ("number", "x minus {a}", "x - {a}"),
    ("number", "{a} minus x", "{a} - x"),
    ("number", "x times {a}", "x * {a}"),
    ("number", "x times {a} plus {b}", "x * {a} + {b}"),
    ("number", "x times {a} minus {b}", "x * {a} - {b}"),
    ("number", "the square of x plus {a}", "x ** 2 + {a}"),
    ("number", "the square of x minus {a}", "x ** 2 - {a}"),
    ("number", "the remainder of x divided by {a}", "x % {a}"),
    ("number", "True if x is greater than {a}, and False otherwise", "x > {a}"),
    ("number", "True if x is divisible by {a}, and False otherwise", "x % {a} == 0"),
    ("number", "the larger of x and {a}", "max(x, {a})"),
    ("number", "the smaller of x and {a}", "min(x, {a})"),
    ("numbers", "the sum of x and y plus {a}", "x + y + {a}"),
    ("numbers", "the product of x and y plus {a}", "x * y + {a}"),
    ("numbers", "the product of x and y minus {a}", "x * y - {a}"),
    ("numbers", "x times {a} plus y", "x * {a} + y"),
    ("numbers", "x plus {a} times y", "x + {a} * y"),
    ("numbers", "the larger of x and y plus {a}", "max(x, y) + {a}"),
    ("list", "the sum of the list xs plus {a}", "sum(xs) + {a}"),
    ("list", "the length of the list xs plus {a}", "len(xs) + {a}"),
    ("list", "the largest value in the list xs plus {a}", "max(xs) + {a}"),
    ("list", "the smallest value in the list xs minus {a}", "min(xs) - {a}"),
    ("list", "the number of values in the list xs that are greater than {a}", "sum(v > {a} for v in xs)"),
    ("list", "the values of the list xs that are smaller than {a}", "[v for v in xs if v < {a}]"),
    ("list", "a list of the values of the list xs plus {a}", "[v + {a} for v in xs]"),
    ("list", "a list of the values of the list xs times {a}", "[v * {a} for v in xs]"),
    ("list", "True if {a} is in the list xs, and False otherwise", "{a} in xs"),
    ("string", "the string s repeated {a} times", "s * {a}"),
    ("string", "the first {a} characters of the string s", "s[:{a}]"),
    ("string", "the length of the string s plus {a}", "len(s) + {a}"),
    ("string", "the string s followed by the letter {c}", "s + '{c}'"),
    ("string", "the letter {c} followed by the string s", "'{c}' + s"),
    ("string", "the number of times that the letter {c} occurs in the string s", "s.count('{c}')"),
    ("string", "the string s without the letter {c}", "s.replace('{c}', '')"),
    ("string", "True if the string s contains the letter {c}, and False otherwise", "'{c}' in s"),
)


def functions(draw: random.Random) -> Iterator[dict]:
    """1,493 problems: each of KINDS with numbers from 2 to 50 (texts: 9) or each of LETTERS; 60 with two numbers."""
    problems = []
    for kind, text, expression in KINDS:
        for choice in draw_choices(draw, kind, text):
            problems.append((kind, text.format(**choice), expression.format(**choice), choice))
    # Kind of argument -> the functions of all its problems.
    callables: dict[str, dict[str, Callable]] = {kind: {} for kind in NAMES}
    for kind, _, expression, _ in problems:
        callables[kind][expression] = eval(f"lambda {NAMES[kind]}: {expression}")
    for kind, text, expression, choice in problems:
        code = f"def f({NAMES[kind]}):\n    return {expression}\n"
        question = f"Write a Python function f({NAMES[kind]}) that returns {text}. Reply with the code only."
        tests = draw_tests(draw, kind, choice, expression, callables[kind])
        yield {"question": question, "answer": code, "solution": f"```python\n{code}```", "test_list": tests}


def draw_choices(draw: random.Random, kind: str, text: str) -> list[dict]:
    """What takes the places of {a}, {b} and {c} in the problems of one kind."""
    if "{c}" in text:
        return [{"c": letter} for letter in LETTERS]
    if "{b}" in text:
        return draw.sample([{"a": a, "b": b} for a in range(2, 13) for b in range(1, 21)], 60)
    return [{"a": a} for a in range(2, 10 if kind == "string" else 51)]


def draw_tests(
    draw: random.Random, kind: str, choice: dict, expression: str, callables: dict[str, Callable]
) -> list[str]:
    """Assertions that hold for this program, and not for that of any other problem with such arguments."""
    program = callables[expression]
    others = [function for other, function in callables.items() if other != expression]
    while True:
        arguments = [draw_arguments(draw, kind, choice) for _ in range(TESTS)]
        results = [program(*given) for given in arguments]
        # A program that always returns the same is told apart, too.
        if len(set(map(repr, arguments))) < TESTS or len(set(map(repr, results))) == 1:
            continue
        rivals = others
        for given, result in zip(arguments, results):
            rivals = [rival for rival in rivals if passes(rival(*given), result)]
        if not rivals:
            return [assertion(given, result) for given, result in zip(arguments, results)]


def passes(found: object, expected: object) -> bool:
    """Whether an assertion holds: True equals 1, but it is not 1."""
    return found is expected if isinstance(expected, bool) else found == expected


def assertion(arguments: tuple, result: object) -> str:
    relation = "is" if isinstance(result, bool) else "=="
    return f"assert f({', '.join(map(repr, arguments))}) {relation} {result!r}"


def draw_arguments(draw: random.Random, kind: str, choice: dict) -> tuple:
    near = choice.get("a", 10)
    # Comparisons with {a} are told apart by numbers next to it, and divisions by its multiples and parts.
    number = lambda: draw.choice(
        [draw.randint(-20, 60), near, near + 1, near - 1, 2 * near, near // 2, near // 3, near // 5]
    )
    if kind == "number":
        return (number(),)
    if kind == "numbers":
        return (number(), draw.randint(-9, 30))
    if kind == "list":
        return ([number() for _ in range(draw.randint(2, 5))],)
    words = [draw.choice(WORDS.split()) for _ in range(draw.randint(1, 2))]
    if "c" in choice and draw.random() < 0.7:
        words.append(draw.choice([word for word in WORDS.split() if choice["c"] in word]))
    return (" ".join(words),)
