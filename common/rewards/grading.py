"""The grader of GSM8K, and the types that all rewards share. Pure functions of strings; no import of torch.

A response that cannot be parsed is wrong, never ungraded. Graders are deterministic, take bounded time, and raise on
no string.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

from common.data.rows import last_box


@dataclass(frozen=True)
class Item:
    prompt: str
    response: str  # text of the response tokens alone, without special tokens
    answer: str | None  # reference ("gold") answer; None where the data has none
    meta: dict[str, Any] = field(default_factory=dict)  # other columns of the data set
    response_ids: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Result:
    score: float | None  # number that training uses. None: the response could not be graded, which is not wrong
    acc: float | None  # plain correctness, 0 or 1
    extracted: str | None = None  # the answer that was found in the response. None: there is none
    info: dict[str, Any] = field(default_factory=dict)


Reward = Callable[[list[Item], list[int], list[bool]], list[Result]]

TAIL_CHARACTERS = 2000  # graders look for an answer in the end of a response only
_NUMBER = re.compile(
    r"""(?: (?<!\w)(?<!\w\.)                                   # neither x2 nor the end of 1.2.3
            (?P<whole>[0-9]+)\s+(?P<over>[0-9]+)/(?P<under>[0-9]+)   # mixed: 2 1/2
          | (?<!\w)(?<!\w\.)
            (?P<digits>(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?)
            (?P<exponent>[eE][+-]?[0-9]+(?!\w))? (?:\s*/\s*(?P<divisor>[0-9]+))?
          | (?<![\w.]) (?P<decimal>\.[0-9]+) )""",
    re.VERBOSE,
)


def grade_gsm8k(response: str, answer: str, mode: str = "flexible") -> float:
    """1.0 if the number in the response equals the reference answer exactly, otherwise 0.0. Raises on no response.

    Mode "strict" reads the first number after the last `####`, on its line. Mode "flexible" reads the last `\\boxed{}`
    or `####` line, whichever starts later, and only without either the last number in the text. The answer is a number
    or a GSM8K solution that ends in `#### number`. Numbers are exact fractions: 0.333 is not 1/3.
    """
    return _grade(response, answer, mode)[0]


def _grade(response: str, answer: str, mode: str) -> tuple[float, str | None]:
    """(1.0 or 0.0, the number in the response)."""
    number, _ = extract(response, mode)
    return float(number is not None and number == parse_gold(answer)), None if number is None else str(number)


def parse_gold(answer: str) -> Fraction | None:
    """The reference answer as a number, or None if it holds no number."""
    numbers = find_numbers(answer.rpartition("####")[2])
    return numbers[0] if numbers else None


def extract(response: str, mode: str = "flexible") -> tuple[Fraction | None, str | None]:
    """The number that a response gives as its answer, and how it was found: "marker", "last-number" or None."""
    text = response[-TAIL_CHARACTERS:]
    marker = text.rfind("####")
    line = (marker, text[marker + 4 :].split("\n", 1)[0]) if marker >= 0 else None
    box = last_box(text) if mode == "flexible" else None
    box = box and (box[0], box[1].rpartition("=")[2])  # the 7 of x = 7
    candidates = sorted((c for c in (line, box) if c is not None), reverse=True)  # the later one first
    for _, candidate in candidates:
        numbers = find_numbers(candidate)
        if numbers:
            return numbers[0], "marker"
    if candidates or mode == "strict":
        return None, None
    numbers = find_numbers(text)
    return (numbers[-1], "last-number") if numbers else (None, None)


def find_numbers(text: str) -> list[Fraction | None]:
    """All numbers of a text in order. None stands for a number that is too long or too large, or divided by 0."""
    text = _clean(text)
    return [_value(match, _is_negative(text, match.start())) for match in _NUMBER.finditer(text)]


def _clean(text: str) -> str:
    """The text without the LaTeX and Markdown that stands inside or around numbers, and with one minus sign."""
    text = text.replace("\u2212", "-").replace("\u2013", "-").replace("{,}", ",").replace("**", "")
    text = re.sub(r"\\[,!()]", "", text).replace(r"\$", "$")
    text = re.sub(r"\\text\s*\{([^{}]*)\}", r" \1", text)
    fraction = r"\\[dt]?frac\s*(?:\{([^{}]*)\}\s*\{([^{}]*)\}|([0-9])\s*([0-9]))"
    part = lambda *groups: next(filter(None, groups), "").strip()
    text = re.sub(r"([0-9])\s*" + fraction, lambda m: f"{m[1]} {part(m[2], m[4])}/{part(m[3], m[5])}", text)
    return re.sub(fraction, lambda m: f"{part(m[1], m[3])}/{part(m[2], m[4])}", text)


def _is_negative(text: str, start: int) -> bool:
    """Whether a minus before `start` is a sign, as in -$5 or $-5$, and not an operator, as in 10-12 or 5 - 3."""
    before = text[:start]
    if before.endswith(("$", "£", "€")):
        before = before[:-1]
    glued = before.endswith("-")
    before = before.rstrip()
    if not before.endswith("-"):
        return False
    left = before[:-1] if glued else before[:-1].rstrip()
    return not left or not (left[-1].isalnum() or left[-1] in ")%")


def _value(match: re.Match, negative: bool) -> Fraction | None:
    """The exact value. None if it is divided by 0, has over 100 characters, or has an exponent beyond 30."""
    parts = match.groupdict()
    if len(match[0]) > 100 or abs(int((parts["exponent"] or "e0")[1:][:6])) > 30:
        return None
    divisor = int(parts["under"] or parts["divisor"] or 1)
    if divisor == 0:
        return None
    if parts["whole"]:
        value = int(parts["whole"]) + Fraction(int(parts["over"]), divisor)
    else:
        digits = (parts["digits"] or parts["decimal"]).replace(",", "")
        value = Fraction(digits + (parts["exponent"] or "")) / divisor
    return -value if negative else value


def gsm8k_reward(items: list[Item], lengths: list[int], truncated: list[bool], mode: str) -> list[Result]:
    """grade_gsm8k as a reward, with score = acc."""
    results = []
    for item in items:
        acc, number = _grade(item.response, item.answer, mode)
        results.append(Result(acc, acc, number))
    return results
