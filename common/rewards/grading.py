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
    # Responses with the same number are to one row of the data. Two rows may have the same prompt, and other answers.
    group: int | None = None


@dataclass(frozen=True)
class Result:
    score: float | None  # number that training uses. None: the response could not be graded, which is not wrong
    acc: float | None  # plain correctness, 0 or 1
    extracted: str | None = None  # the answer that was found in the response. None: there is none
    info: dict[str, Any] = field(default_factory=dict)


Reward = Callable[[list[Item], list[int], list[bool]], list[Result]]

TAIL_CHARACTERS = 2000  # graders look for an answer in the end of a response only
# In this order: a mixed number (2 1/2); a number with an exponent or a divisor, if it has one (1,234.5, 1e3, 3/4); .5.
_NUMBER = re.compile(
    r"""(?: (?<!\w)(?<!\w\.)                                   # neither x2 nor the end of 1.2.3
            (?P<whole>[0-9]+)\s+(?P<over>[0-9]+)/(?P<under>[0-9]+)   # mixed: 2 1/2
          | (?<!\w)(?<!\w\.)
            (?P<digits>(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?)
            (?P<exponent>[eE][+-]?[0-9]+(?!\w))? (?:\s*/\s*(?P<divisor>[0-9]+))?
          | (?<![\w.]) (?P<decimal>\.[0-9]+) )""",
    re.VERBOSE,
)
# \frac{1}{2} matches with the two groups in braces, \frac12 with the two digits.
_FRACTION = r"\\[dt]?frac\s*(?:\{([^{}]*)\}\s*\{([^{}]*)\}|([0-9])\s*([0-9]))"


def grade_gsm8k(response: str, answer: str, mode: str = "flexible") -> float:
    """1.0 if the number in the response equals the reference answer exactly, otherwise 0.0. Raises on no response.

    Mode "strict" reads the first number after the last `####`, on its line. Mode "flexible" reads the last `\\boxed{}`
    or `####` line, whichever starts later, and only without either the last number in the text. The answer is a number
    or a GSM8K solution that ends in `#### number`. Numbers are exact fractions: 0.333 is not 1/3.
    """
    (result,) = gsm8k_reward([Item("", response, answer)], [], [], mode)
    return result.acc


def gsm8k_reward(items: list[Item], lengths: list[int], truncated: list[bool], mode: str) -> list[Result]:
    """grade_gsm8k as a reward, with score = acc."""
    results = []
    for item in items:
        number = extract(item.response, mode)
        if number is None:
            results.append(Result(0.0, 0.0))
        else:
            acc = float(number == parse_gold(item.answer))
            results.append(Result(acc, acc, str(number)))
    return results


def parse_gold(answer: str) -> Fraction | None:
    """The reference answer as a number, or None if it holds no number."""
    numbers = find_numbers(answer.rpartition("####")[2])
    return numbers[0] if numbers else None


def extract(response: str, mode: str = "flexible") -> Fraction | None:
    """The number that a response gives as its answer. None if there is none, or if nobody can compute with it."""
    text = response[-TAIL_CHARACTERS:]
    candidates = []  # (start, text) of the places that are marked as the answer
    marker = text.rfind("####")
    if marker >= 0:
        candidates.append((marker, text[marker + 4 :].split("\n", 1)[0]))
    box = last_box(text) if mode == "flexible" else None
    if box:
        start, content = box
        candidates.append((start, content.rpartition("=")[2]))  # the 7 of x = 7
    for _, candidate in sorted(candidates, reverse=True):  # the later one first
        numbers = find_numbers(candidate)
        if numbers:
            return numbers[0]
    # A mark without a number, as in "#### five", is an answer, too. No other number of the text takes its place.
    if candidates or mode == "strict":
        return None
    numbers = find_numbers(text)
    return numbers[-1] if numbers else None


def find_numbers(text: str) -> list[Fraction | None]:
    """All numbers of a text in order. None stands for a number that is too long or too large, or divided by 0."""
    text = _clean(text)
    return [_value(match, _is_negative(text, match.start())) for match in _NUMBER.finditer(text)]


def _clean(text: str) -> str:
    """The text without the LaTeX and Markdown that stands inside or around numbers, and with one minus sign."""
    text = text.replace("\u2212", "-").replace("\u2013", "-").replace("{,}", ",").replace("**", "")
    text = re.sub(r"\\[,!()]", "", text).replace(r"\$", "$")
    text = re.sub(r"\\text\s*\{([^{}]*)\}", r" \1", text)
    # A digit before a fraction makes it a mixed number. Those come first.
    text = re.sub(r"([0-9])\s*" + _FRACTION, _as_quotient, text)
    return re.sub("()" + _FRACTION, _as_quotient, text)


def _as_quotient(fraction: re.Match) -> str:
    r"""`2\frac{1}{2}` as "2 1/2", `\frac12` as "1/2"."""
    whole, top, bottom, top_digit, bottom_digit = fraction.groups()
    quotient = f"{(top or top_digit or '').strip()}/{(bottom or bottom_digit or '').strip()}"
    return f"{whole} {quotient}" if whole else quotient


def _is_negative(text: str, start: int) -> bool:
    """Whether a minus before `start` is a sign, as in -$5 or $-5, and not an operator, as in 10-12 or 5 - 3."""
    before = text[:start]
    if before.endswith(("$", "£", "€")):
        before = before[:-1]
    glued = before.endswith("-")
    before = before.rstrip()
    if not before.endswith("-"):
        return False
    # Where something that can be subtracted from stands on the left, the minus is an operator. In "was 5 -3" it is not:
    # spaces are kept if the minus touches its number.
    left = before[:-1]
    if not glued:
        left = left.rstrip()
    return not left or not (left[-1].isalnum() or left[-1] in ")%")


def _value(match: re.Match, negative: bool) -> Fraction | None:
    """The exact value. None if it is divided by 0, has over 100 characters, or has an exponent beyond 30."""
    parts = match.groupdict()
    # These limits come first: int() refuses thousands of digits, and 10**999999999 takes all memory.
    exponent = parts["exponent"] or ""
    if len(match[0]) > 100 or abs(int(exponent[1:7] or 0)) > 30:
        return None
    divisor = int(parts["under"] or parts["divisor"] or 1)
    if divisor == 0:
        return None
    if parts["whole"]:
        value = int(parts["whole"]) + Fraction(int(parts["over"]), divisor)
    else:
        digits = (parts["digits"] or parts["decimal"]).replace(",", "")
        value = Fraction(digits + exponent) / divisor
    return -value if negative else value
