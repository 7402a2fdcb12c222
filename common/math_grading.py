"""The MATH grader: whether two LaTeX expressions are equal, by math-verify (which asks sympy).

math-verify bounds its time with SIGALRM, so grade_math runs in the main thread of a process, and an expression can
still eat all memory or hang in C. Training therefore grades through common.workers.MathReward. Known false positives
of math-verify: units and percent signs are dropped, 11:30 is 11/30, and 2^{3} counts as 8.
"""

import re
import threading

from common.grading import CLIP, Result, last_box

SECONDS = 5  # for reading one expression, and for comparing two
SYMPY_ERRORS = (  # what it raises on expressions it does not know, as opposed to what a broken install does
    ArithmeticError, AssertionError, AttributeError, LookupError, MemoryError, RuntimeError, SyntaxError, TypeError,
    ValueError,
)  # fmt: skip
TAIL = 500  # characters at the end of a response in which mode "flexible" looks for an answer without a box


def grade_math(response: str, answer: str, mode: str = "boxed") -> Result:
    """Whether a response's answer equals the reference answer. Raises on no string; main thread only.

    mode "boxed": the last `\\boxed{}`, and nothing else. "flexible": without one, the last formula or number.
    score and acc are None if the reference answer cannot be read at all.
    """
    return grade_by_string(response, answer, mode) or grade_by_algebra(last_answer(response), answer)


def last_answer(response: str) -> str:
    """The part of a response that is graded: its last box, or its end if there is none."""
    box = last_box(response[-CLIP:])
    return rf"\boxed{{{box[1]}}}" if box else response[-TAIL:]


def grade_by_string(response: str, answer: str, mode: str) -> Result | None:
    """The result if it takes no algebra: no answer at all, or the same string. Else None."""
    box = last_box(response[-CLIP:])
    if box is None and (mode == "boxed" or not response[-TAIL:].strip()):
        return Result(0.0, 0.0)
    said = box and plain(box[1])
    if said == "":
        return Result(0.0, 0.0, "")
    return Result(1.0, 1.0, box[1].strip()) if said and said == plain(unwrap(answer)) else None


def grade_by_algebra(said: str, answer: str) -> Result:
    """What math-verify says of last_answer(response)."""
    if threading.current_thread() is not threading.main_thread():
        raise RuntimeError("grade_math needs the main thread, for SIGALRM; common.workers.MathReward works in any")
    # Imported here: sympy takes a second, which only the workers need to pay.
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify
    from math_verify.errors import TimeoutException as TimedOut
    from sympy.polys.polyerrors import BasePolynomialError

    box = last_box(said)
    extracted = box and box[1].strip()
    text = rf"\boxed{{{clean(box[1])}}}" if box else clean(said)  # all boxes of a text would be united into a set
    configs = [LatexExtractionConfig()] if box else [LatexExtractionConfig(), ExprExtractionConfig()]
    limits = {"raise_on_error": True}
    try:
        gold = parse(delimited(answer), configs[:1], parsing_timeout=SECONDS, **limits)
        if not gold:
            return Result(None, None, extracted, {"error": f"gold answer {answer[:60]!r} cannot be parsed"})
        found = parse(text, configs, parsing_timeout=SECONDS, **limits)
        if box is None and found and isinstance(found[-1], str):
            extracted = found[-1]
        same = any(verify(g, f, timeout_seconds=SECONDS, **limits) for g in gold for f in found)
    except TimedOut:  # a BaseException
        return Result(0.0, 0.0, extracted, {"timeout": 1})
    except (*SYMPY_ERRORS, BasePolynomialError) as error:
        return Result(0.0, 0.0, extracted, {"error": type(error).__name__})
    return Result(float(same), float(same), extracted)


def parse_math_gold(answer: str) -> bool:
    """Whether a reference answer can be read. Main thread only; 5 to 100 ms, but for plain numbers and fractions."""
    if re.fullmatch(r"-?[0-9]{1,99}(?:\.[0-9]{1,99})?|-?\\d?frac\{[0-9]{1,99}\}\{[1-9][0-9]{0,99}\}", answer.strip()):
        return True
    from math_verify import LatexExtractionConfig, parse

    # Without a fallback: by default what cannot be read comes back as a string.
    config = [LatexExtractionConfig()]
    return bool(parse(delimited(answer), config, fallback_mode="no_fallback", parsing_timeout=SECONDS))


def delimited(answer: str) -> str:
    """A reference answer as math-verify finds it: between dollars, unless there are delimiters inside."""
    answer = clean(unwrap(answer))
    inside = re.search(r"(?<!\\)\$.*(?<!\\)\$|\\\(.*\\\)|\\\[.*\\\]", answer, re.DOTALL)
    return answer if inside else f"${answer}$"


def unwrap(answer: str) -> str:
    """A reference answer without its box, or the delimiters around the whole."""
    box = last_box(answer)
    whole = re.fullmatch(r"\s*(?:\$+([^$]+)\$+|\\[(\[]((?:(?!\\[)\]]).)+)\\[)\]])\s*", answer, re.DOTALL)
    return box[1] if box else (whole[1] or whole[2]) if whole else answer


def clean(text: str) -> str:
    """Without thin spaces and braced commas between digits, which math-verify reads as products: 10\\,000 is 10000."""
    text = re.sub(r"(?<=[0-9])(?:\\[,!]|\{,\})(?=[0-9])", "", text.replace(r",\!", ",").strip())
    text = re.sub(r"([0-9])\s+([0-9]+)/([0-9]+)", r"\1\\frac{\2}{\3}", text)  # 2 1/2 would be 3/2
    return re.sub(r"(?<!\\right)\.$", "", text)


def plain(text: str) -> str:
    """A form in which the same expression is often the same string."""
    text = clean(text).replace(r"\left", "").replace(r"\right", "").replace("dfrac", "frac").replace("tfrac", "frac")
    text = re.sub(r"\\[()\[\],;:! ]|\$", " ", text)
    return re.sub(r"(?<![0-9a-zA-Z])\s+|\s+(?![0-9a-zA-Z])", "", text)  # 2 1/2 is not 21/2, \pi r not \pir
