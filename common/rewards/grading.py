"""The grader of GSM8K, and the types that all rewards share. Pure functions of strings; no import of torch.

A response that cannot be parsed is wrong, never ungraded. Graders are deterministic, take bounded time, and raise on
no string.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

from common.data.rows import last_box
from common.errors import BadInput


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
# A key of Result.info: the reward does not apply to this response. Then the score is None, and nothing has failed.
NOT_APPLIED = "not_applied"

TAIL_CHARACTERS = 2000  # graders look for a number without a mark in the end of a response only
BETTER_GRADERS = "--reward math or math-flexible compares expressions, and --reward dapo compares texts"
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
# Each part of a fraction is in braces or is one digit: \frac{1}{2}, \frac12, \frac1{12}.
_FRACTION = r"\\[dtc]?frac\s*(?:\{([^{}]*)\}|([0-9]))\s*(?:\{([^{}]*)\}|([0-9]))"
# Units that a reference answer may have behind its number. Another word could change the number, as in "5 dozen".
# No single letters, because 5m may be a product. \\text{m} and its like are units.
_UNIT = (
    "(?:dollar|cent|euro|pound|rupee|yuan|usd|inch|inche|foot|feet|yard|mile|meter|metre|centimeter|centimetre|kilometer"
    "|kilometre|millimeter|millimetre|mm|cm|km|in|ft|yd|mi|gram|kilogram|ounce|ton|gm|kg|mg|lb|oz|second|minute|hour"
    "|day|week|month|year|sec|min|hr|liter|litre|gallon|ml|mph|kph|degree|unit|point|integer|digit|way|edge|student"
    "|meal|multiple|people)s?"
)
# A unit as it may stand behind a number: dollars, square feet, km/h, miles per hour, cm^2.
UNIT = (
    rf"(?:(?:square|cubic|sq\.?)\s+)?{_UNIT}"
    rf"(?:\s*(?:/|\bper\b)\s*(?:{_UNIT}|[hs])\b)?"
    r"(?:\s*\^\s*\{?[23]\}?|[²³])?"
)
_LETTER_UNIT = re.compile(r"\\(?:text|mathrm|mbox)\s*\{\s*[mgshl]\s*\}")
_WRAPPED_UNIT = re.compile(r"\\(?:mathrm|mbox)\s*\{([^{}]*)\}|\\[ ;]|~")
# At the end of a text: what a minus behind it subtracts from.
_NUMBER_BEFORE = re.compile(r"(?<!\w)[0-9][0-9.,]*[ \t]+\Z")
_OPERAND = re.compile(r"(?:(?<!\w)[0-9][0-9.,]*|[)}%]|(?<![^\W_])[^\W\d_])[ \t]*\Z")
# What may stand before and behind the number of a reference answer: brackets, a sign, a currency, a unit, a period.
_BEFORE = re.compile(r"[\s$£€(]*[+-]?[\s$£€]*")
_BEHIND = re.compile(
    rf"""[\s$£€]* (?: \\?% | percent | \^?\{{?(?:\\circ|°)\}}? )?
        (?: \s* {UNIT} )? [\s$).]*""",
    re.VERBOSE | re.IGNORECASE,
)
_MARK = re.compile(r"####+(?P<line>[^\n]*?)(?=####|\n|\Z)")
# A number of things, such as 18 red apples. It is neither a formula in words nor a multiple.
_COUNTED = re.compile(
    r"[\s$£€]*[+-]?[0-9][0-9,.]*(?:\s+(?!(?:plus|minus|times|over|divided|and|or|pi|half|dozen|hundred|thousand"
    r"|million|billion)s?\b)[^\W\d_]{2,})+\s*"
)
_MATH_BEGINS = re.compile(r"\\begin\{(?:align|array|cases|eqnarray|equation|gather|multline|split)")
# "x = 5, y = 6" has two answers, so nothing like this may stand before the last "=".
_SEVERAL = re.compile(r"[;=<>!]\s*=|[<>;\n]|,(?![0-9]{3})|\b(?:or|and)\b")


def grade_gsm8k(response: str, answer: str, mode: str = "flexible") -> float:
    """1.0 if the number in the response equals the reference answer exactly, otherwise 0.0. Raises on no response.

    Mode "strict" reads the first number after the last `####`, on its line. Mode "flexible" reads the last `\\boxed{}`
    or `####` line, whichever starts later, and only without either the last number in the text. The answer is a number
    or a GSM8K solution that ends in `#### number`. Numbers are exact fractions: 0.333 is not 1/3. Raises ValueError if
    the reference answer is not a number.
    """
    (result,) = gsm8k_reward([Item("", response, answer)], [], [], mode)
    if result.acc is None:
        raise ValueError(result.info["error"])
    return result.acc


def gsm8k_reward(items: list[Item], lengths: list[int], truncated: list[bool], mode: str) -> list[Result]:
    """grade_gsm8k as a reward, with score = acc. Both are None if the reference answer is not a number."""
    results = []
    for item in items:
        number = extract(item.response, mode)
        gold = None if item.answer is None else parse_gold(item.answer)
        if gold is None:
            message = f'gold answer "{str(item.answer)[:60]}" is not a number; {BETTER_GRADERS}'
            results.append(Result(None, None, number and str(number), {"error": message}))
        elif number is None:
            results.append(Result(0.0, 0.0))
        else:
            acc = float(number == gold)
            results.append(Result(acc, acc, str(number)))
    return results


def parse_gold(answer: str) -> Fraction | None:
    """The reference answer as a number. None if it is anything else, or anything more: 2\\pi, 10^5, 3 or 4, 5 apples.

    It may have a sign, a currency, a percent sign and a unit of _UNIT, and stand behind `####`, in a box or behind "=".
    """
    _, marker, text = answer.rpartition("####")
    if marker:
        text = text.strip().split("\n", 1)[0]
    text = text.strip().strip("$").strip()
    box = last_box(text)
    if box and text.rstrip(" .") in (rf"\boxed{{{box[1]}}}", rf"\boxed{box[1]}"):  # and nothing around it
        text = box[1]
    text = _LETTER_UNIT.sub(" ", text)
    text = _clean(_WRAPPED_UNIT.sub(r" \1 ", text))
    left, equals, right = text.rpartition("=")
    if _SEVERAL.search(left + equals):
        return None
    right = right.strip()
    found = _NUMBER.search(right)
    if not found or not _BEFORE.fullmatch(right, 0, found.start()) or not _BEHIND.fullmatch(right, found.end()):
        return None
    return _value(found, _is_negative(right, found.start()))


def extract(response: str, mode: str = "flexible") -> Fraction | None:
    """The number that a response gives as its answer. None if there is none, or if nobody can compute with it."""
    text = response[-TAIL_CHARACTERS:]
    candidates = marked(text, mode)
    if not candidates and len(text) < len(response):
        candidates = marked_earlier(response, mode)
    for _, candidate in sorted(candidates, reverse=True):  # the later one first
        numbers = find_numbers(candidate.strip())  # a minus in its first line is no bullet
        if numbers:
            return numbers[0]
    # A mark without a number, as in "#### five", is an answer, too. No other number of the text takes its place.
    if candidates or mode == "strict":
        return None
    numbers = find_numbers(f"\n{text}")  # the first line may have a bullet, too
    return numbers[-1] if numbers else None


def marked(text: str, mode: str) -> list[tuple[int, str]]:
    """(start, text) of the places that are marked as the answer."""
    candidates = []
    # A mark with nothing behind it is none: it closes a line, as in #### 18 ####, or the text.
    lines = [mark for mark in _MARK.finditer(text) if mark["line"].strip(" \t\r*#")]
    if lines:
        candidates.append((lines[-1].start(), behind_equals(lines[-1]["line"])))
    box = final_box(text) if mode == "flexible" else None
    if box:
        start, content = box
        candidates.append((start, right_side(content)))  # the 7 of x = 7
    return candidates


def marked_earlier(response: str, mode: str) -> list[tuple[int, str]]:
    """marked() of a response with a long tail behind its answer.

    Far from the end, `####` is often a heading ("#### Step 2"), so there its line must be a number and nothing else.
    """
    candidates = []
    for start, text in marked(response, mode):
        is_line = response.startswith("####", start)
        if len(text) <= TAIL_CHARACTERS and not (is_line and parse_gold(text) is None):
            candidates.append((start, text))
    return candidates


def behind_equals(line: str) -> str:
    """The right side of the last equation of a line, as 18 of `9*2 = 18`. The line itself if no number is there.

    An equation in brackets behind the answer explains it: `18 (9*2 = 18, so 9 = 3*3)`.
    """
    right = line[last_equals(line) + 1 :]
    return right if _NUMBER.search(_clean(right)) else line


def right_side(box: str) -> str:
    """The right side of the last equation in a box. Without a number there, another side that is one: `18 = x`."""
    place = last_equals(box)
    left, right = box[: max(place, 0)], box[place + 1 :]
    if _NUMBER.search(_clean(right)):
        return right
    numbers = [side for side in left.split("=") if parse_gold(side) is not None or _COUNTED.fullmatch(_clean(side))]
    return numbers[-1] if numbers else right


def last_equals(line: str) -> int:
    """The place of the last "=" that is not in brackets behind an answer, or -1."""
    first = re.search(r"[^\s$*]", line)
    if first and first[0] != "(":
        line = re.sub(r"\([^()]*\)", lambda bracket: " " * len(bracket[0]), line)
    return line.rfind("=")


def final_box(text: str) -> tuple[int, str] | None:
    """last_box(), but None if a later box is never closed: then an earlier one is no longer the answer."""
    text = re.sub(r"\\boxed\s+\{", r"\\boxed{", text)
    box = last_box(text)
    opened = text.rfind(r"\boxed{")
    if box and opened + len(r"\boxed") > box[0]:
        return None
    return box


def as_list(results: Any, count: int) -> list:
    """What a reward has returned for `count` items, as a list. Raises BadInput if it is not one value for each item."""
    expected = f"expected a list of {count} results, one for each response"
    if results is None:
        raise BadInput(f"{expected}, got None; is a return missing?")
    # The keys of a dict and the letters of a text are values too, but no results. A set has no order.
    if isinstance(results, Mapping | AbstractSet | str | bytes) or not isinstance(results, Iterable):
        raise BadInput(f"{expected}, got {type(results).__name__}: {str(results)[:200]!r}")
    # Arrays and tensors. A column would be read row by row, as if each row were a result.
    shape = getattr(results, "shape", None)
    if shape is not None and len(shape) != 1:
        raise BadInput(f"{expected}, got {type(results).__name__} of shape {tuple(shape)}")
    return list(results)


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
    text = re.sub("()" + _FRACTION, _as_quotient, text)
    # The second minus of --1/2 was in the fraction. In 10--1/2 the first one is an operator.
    return re.sub(r"(?<![0-9a-zA-Z)])-([ \t]*)-(?=[0-9.,]+/)", _without_minuses, text)


def _without_minuses(two: re.Match) -> str:
    """Two signs are none. But the first one may be the bullet of a list with the item `- -1/2`, or an operator."""
    is_bullet = two[1] and _begins_item(two.string, two.start())
    # In 3 - -1/2 and n - -1/2 it is an operator. In 3 --1/2, too, because 3 1/2 is another number.
    operand = _OPERAND if two[1] else _NUMBER_BEFORE
    is_operator = operand.search(two.string[max(0, two.start() - 40) : two.start()])
    return two[0] if is_bullet or is_operator else ""


def _as_quotient(fraction: re.Match) -> str:
    r"""`2\frac{1}{2}` as "2 1/2", `\frac12` as "1/2", `\frac{1}{-2}` as "-1/2"."""
    whole, top, top_digit, bottom, bottom_digit = fraction.groups()
    top = (top or top_digit or "").strip()
    bottom = (bottom or bottom_digit or "").strip()
    # The sign goes to the front, where _is_negative() looks for it.
    if bottom.startswith("-"):
        top = top[1:] if top.startswith("-") else f"-{top}"
        bottom = bottom[1:].lstrip()
    quotient = f"{top}/{bottom}"
    return f"{whole} {quotient}" if whole else quotient


def _is_negative(text: str, start: int) -> bool:
    """Whether a minus before `start` is a sign, as in -$5, -$ 5 or $-5, and neither an operator, as in 10-12 or 5 - 3,
    nor the bullet of a line in a list.
    """
    before = text[:start]
    currency = before.rstrip()
    if currency.endswith(("$", "£", "€")):
        before = currency[:-1]
    glued = before.endswith("-")
    before = before.rstrip()
    if not before.endswith("-"):
        return False
    # Where something that can be subtracted from stands on the left, the minus is an operator. In "was 5 -3" it is not:
    # spaces are kept if the minus touches its number.
    left = before[:-1]
    if not glued:
        if _begins_item(text, len(left)):
            return False
        left = left.rstrip()
    return not left or not (left[-1].isalnum() or left[-1] in ")%")


def _begins_item(text: str, minus: int) -> bool:
    """Whether a minus that a space follows is the bullet of a line in a list."""
    before = text[max(0, minus - TAIL_CHARACTERS) : minus]
    if not before.rstrip(" \t").endswith("\n"):
        return False
    # In displayed math, and behind "=", the line goes on with a formula.
    in_formula = (
        before.count("$$") % 2 == 1
        or before.rfind(r"\[") > before.rfind(r"\]")
        or bool(_MATH_BEGINS.search(before, before.rfind(r"\end{") + 1))
    )
    return not in_formula and not before.rstrip("\\ \t\r\n").endswith("=")


def _value(match: re.Match, negative: bool) -> Fraction | None:
    """The exact value. None if it is divided by 0, has over 100 characters, or has an exponent beyond 30."""
    parts = match.groupdict()
    # These limits come first: int() refuses thousands of digits, and 10**999999999 takes all memory and hours.
    exponent = parts["exponent"] or ""
    if len(match[0]) > 100 or abs(int(exponent[1:] or 0)) > 30:
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
