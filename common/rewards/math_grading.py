"""The MATH grader: are two LaTeX expressions equal? math-verify answers with the help of sympy.

math-verify bounds its time with SIGALRM, so grade_math needs the main thread of a process, and an expression can still
eat all memory or hang in C. Training therefore grades through workers.MathReward. Known false positives of math-verify:
it drops units and percent signs, it reads 11:30 as 11/30, and it accepts 2^{3} for 8.
"""

import functools
import itertools
import re
import threading

from common.data.rows import last_box
from common.rewards.grading import TAIL_CHARACTERS, Result

TIMEOUT_SECONDS = 5  # for reading one expression, and again for comparing two
CHECKED_GOLDS = 2000  # answers that are read before a run; an answer of a formula takes up to a tenth of a second
FLEXIBLE_TAIL_CHARACTERS = 500  # mode "flexible" looks for an answer without a box in the end of a response
# Expressions that sympy does not know raise these. Errors of a broken installation are different ones.
SYMPY_ERRORS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    MemoryError,
    RuntimeError,
    SyntaxError,
    TypeError,
    ValueError,
)


def grade_math(response: str, answer: str, mode: str = "boxed") -> Result:
    """Whether the answer in a response equals the reference answer. Raises on no string. Main thread only.

    Mode "boxed" reads the last `\\boxed{}` and nothing else. Without a box, mode "flexible" reads the last formula or
    number. score and acc are None if the reference answer cannot be read.
    """
    return grade_by_string(response, answer, mode) or grade_by_algebra(last_answer(response), answer)


def last_answer(response: str) -> str:
    """The part of a response that is graded: its last box, or its end if there is none."""
    box = last_box(response[-TAIL_CHARACTERS:])
    return rf"\boxed{{{box[1]}}}" if box else response[-FLEXIBLE_TAIL_CHARACTERS:]


def grade_by_string(response: str, answer: str, mode: str) -> Result | None:
    """The result where no algebra is needed: there is no answer, or it is the same string. Otherwise None."""
    box = last_box(response[-TAIL_CHARACTERS:])
    if box is None:
        nothing_to_read = mode == "boxed" or not response[-FLEXIBLE_TAIL_CHARACTERS:].strip()
        return Result(0.0, 0.0) if nothing_to_read else None
    # Most right answers are the same string, and sympy takes milliseconds for each.
    content = plain(box[1])
    if not content:
        return Result(0.0, 0.0, "")
    return Result(1.0, 1.0, box[1].strip()) if content == plain(unwrap(answer)) else None


def grade_by_algebra(text: str, answer: str) -> Result:
    """The verdict of math-verify on the last_answer() of a response."""
    if threading.current_thread() is not threading.main_thread():
        raise RuntimeError("grade_math needs the main thread, for SIGALRM; workers.MathReward works in any")
    # Imported here because sympy takes a second, which only the workers need to pay.
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify
    from math_verify.errors import TimeoutException
    from sympy.polys.polyerrors import BasePolynomialError

    read = functools.partial(parse, parsing_timeout=TIMEOUT_SECONDS, raise_on_error=True)
    latex = LatexExtractionConfig()
    box = last_box(text)
    if box:
        # math-verify would unite all boxes of a text into a set, so it sees the last one alone.
        text = rf"\boxed{{{clean(box[1])}}}"
        extracted = box[1].strip()
        configs = [latex]
    else:
        text = clean(text)
        extracted = None
        configs = [latex, ExprExtractionConfig()]
    try:
        golds = read(delimited(answer), [latex])
        if not golds:
            return Result(None, None, extracted, {"error": f"gold answer {answer[:60]!r} cannot be parsed"})
        answers = read(text, configs)
        if box is None and answers and isinstance(answers[-1], str):
            extracted = answers[-1]
        pairs = itertools.product(golds, answers)
        equal = any(verify(*pair, timeout_seconds=TIMEOUT_SECONDS, raise_on_error=True) for pair in pairs)
    except TimeoutException:  # a BaseException
        return Result(0.0, 0.0, extracted, {"timeout": 1})
    except (*SYMPY_ERRORS, BasePolynomialError) as error:
        return Result(0.0, 0.0, extracted, {"error": type(error).__name__})
    return Result(float(equal), float(equal), extracted)


def unreadable_golds(answers: set[str]) -> set[str]:
    """Those that cannot be read, of all answers or of about CHECKED_GOLDS. The prompts of others will not be graded."""
    checked = sorted(answers)[:: max(1, len(answers) // CHECKED_GOLDS)]
    return {answer for answer in checked if not parse_math_gold(answer)}


def parse_math_gold(answer: str) -> bool:
    """Whether a reference answer can be read. Main thread only. Takes 5 to 100 ms unless it is a plain number."""
    if re.fullmatch(r"-?[0-9]{1,99}(?:\.[0-9]{1,99})?|-?\\d?frac\{[0-9]{1,99}\}\{[1-9][0-9]{0,99}\}", answer.strip()):
        return True
    from math_verify import LatexExtractionConfig, parse

    # By default math-verify falls back to a string where it can read nothing.
    config = [LatexExtractionConfig()]
    return bool(parse(delimited(answer), config, fallback_mode="no_fallback", parsing_timeout=TIMEOUT_SECONDS))


def delimited(answer: str) -> str:
    """A reference answer between dollars, where math-verify finds it, unless it has delimiters inside."""
    answer = clean(unwrap(answer))
    inside = re.search(r"(?<!\\)\$.*(?<!\\)\$|\\\(.*\\\)|\\\[.*\\\]", answer, re.DOTALL)
    return answer if inside else f"${answer}$"


def unwrap(answer: str) -> str:
    """A reference answer without its box, or without the delimiters around the whole."""
    box = last_box(answer)
    if box:
        return box[1]
    whole = re.fullmatch(r"\s*(?:\$+([^$]+)\$+|\\[(\[]((?:(?!\\[)\]]).)+)\\[)\]])\s*", answer, re.DOTALL)
    return whole[1] or whole[2] if whole else answer


def clean(text: str) -> str:
    """The text without thin spaces and braced commas between digits: math-verify would read 10\\,000 as 10 * 0."""
    text = re.sub(r"(?<=[0-9])(?:\\[,!]|\{,\})(?=[0-9])", "", text.replace(r",\!", ",").strip())
    text = re.sub(r"([0-9])\s+([0-9]+)/([0-9]+)", r"\1\\frac{\2}{\3}", text)  # 2 1/2 would be read as 3/2
    return re.sub(r"(?<!\\right)\.$", "", text)


def plain(text: str) -> str:
    """A form in which the same expression is often the same string."""
    text = clean(text).replace(r"\left", "").replace(r"\right", "")
    text = text.replace("dfrac", "frac").replace("tfrac", "frac")
    text = re.sub(r"\\[()\[\],;:! ]|\$", " ", text)
    return re.sub(r"(?<![0-9a-zA-Z])\s+|\s+(?![0-9a-zA-Z])", "", text)  # 2 1/2 is not 21/2, \pi r is not \pir
