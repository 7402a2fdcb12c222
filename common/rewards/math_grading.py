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
from common.rewards.grading import TAIL_CHARACTERS, UNIT, Result, behind_equals, final_box

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
BASE_WORDS = {
    "two": "2",
    "three": "3",
    "four": "4",
    "five": "5",
    "six": "6",
    "seven": "7",
    "eight": "8",
    "nine": "9",
    "ten": "10",
    "eleven": "11",
    "twelve": "12",
    "sixteen": "16",
}
_DIGITS = "[0-9][0-9A-F]{0,50}"
_BASE = rf"[0-9]{{1,2}}(?![0-9])|{'|'.join(BASE_WORDS)}"
# A number with a base: 10_2, 1A_{16}, (10)_2, 10_{\text{two}}
BASED = re.compile(
    rf"(?<![\w.}}\\])(?:\((?P<inside>{_DIGITS})\)|(?P<digits>{_DIGITS}))_\s*"
    rf"(?:(?P<bare>{_BASE})|\{{\s*(?P<braced>{_BASE})\s*\}}|\{{\s*\\(?:text|mathrm)\s*\{{\s*(?P<word>{_BASE})\s*\}}\s*\}})"
)
INEQUALITY = re.compile(r"[<>\u2264\u2265]|\\(?:[lg]eq?|[lg]t|leqslant|geqslant|neq?)(?![a-zA-Z])")
OR_SIGN = re.compile(r"\\(?:lor|vee)(?![a-zA-Z])")
AND_SIGN = re.compile(r"\\(?:land|wedge)(?![a-zA-Z])")
# The comma of a list such as 1, 200, which is not the comma of 1,200.
LIST_COMMA = re.compile(r"(?<![0-9])([0-9]{1,3}),\s+(?=[0-9]{3}(?![0-9]))")
# 1 000, 1\;000 and 1~000, but not the mixed number 2 100/3.
SPACED_THOUSANDS = re.compile(r"(?<![\w.,^])[1-9][0-9]{0,2}(?:(?:\\[ ;:]|~|[^\S\n])[0-9]{3})+(?![0-9/])")
# Commands after which a number begins. In \sqrt2,100 the command belongs to the first of two numbers.
_SIGNS = "le|leq|ge|geq|lt|gt|ne|neq|leqslant|geqslant|approx|equiv|times|cdot|div|pm|mp|to|lfloor|lceil|lvert"
_BEHIND_SIGN = "|".join(rf"(?<=\\{sign})" for sign in _SIGNS.split("|"))  # a lookbehind has one length
# In a list such as 1,000, 2,000, math-verify would read 1, 0, 2, 0. But in 1/2,100 and x_{1,200} two things are listed,
# and in 2,100,x three: no space, no currency and no word before another such number stands behind its commas.
COMMA_THOUSANDS = re.compile(
    rf"(?:(?<![\w.,/^])(?<!_\{{)|{_BEHIND_SIGN})[1-9][0-9]{{0,2}}(?:,[0-9]{{3}})+"
    r"(?![0-9]|,(?!~|\\(?:[ ,;:$]|q?quad|(?:text|mathrm)\s*\{[^{}]*\}\s*(?:[0-9]{1,3},|[0-9])[0-9]{3}))\S)"
)
LAST_UNIT = re.compile(rf"(?<=[0-9])\s+{UNIT}$", re.IGNORECASE)
_NUMBER = r"-?[0-9]+(?:,[0-9]{3})*(?:\.[0-9]+)?"
PLAIN_NUMBER = re.compile(rf"{_NUMBER}!?")
# A formula without dollars: numbers, signs, commands and single letters, but no words.
FORMULA = re.compile(
    r"(?!.*\([^()]*=)(?:\\(?:[a-zA-Z]+(?![a-zA-Z])|[{},;:! ])|(?<![a-zA-Z])[a-zA-Z](?![a-zA-Z])"
    r"|[-\u22120-9\s+*/^_=<>(){}\[\],.:|!])+"
)
# The (C) of (C) 12 names an option.
OPTION = re.compile(r"(?:\([A-Z]\)|[A-Z][).:])\s+(?=[-0-9a-zA-Z(\\])")
_UNIT_LETTERS = r"(?:[ACFHJKLNTVW]|[gm](?=[/^]))(?:/[ghmsK])?(?:\^\{?[23]\}?)?"  # math-verify knows m and s
_BRACKET = (
    r"(?:(?P<value>\((?:[^()a-zA-Z\\]|\\(?:times|cdot|div|approx|[dt]?frac)(?![a-zA-Z]))*\))"  # 18 (9*2)
    r"|\([a-zA-Z](?:/[a-z])?(?:\^\{?[23]\}?)?\)"  # 12 (C), 60 (m/s)
    r"|\[[^\[\]a-zA-Z\\]*\])"  # 12 [1]
)
# A number, and what may stand behind it without a change of its value: 18 = x, 12 L, 12L, 60 m/s, 18 (9*2).
REMARKED = re.compile(
    rf"(?P<number>{_NUMBER}(?:(?:\s+[0-9]+)?/[0-9]+)?!?)"
    rf"(?:\s*=\s*[a-zA-Z]|(?:\s+{_UNIT_LETTERS}|[LVW])?(?:\s+{_BRACKET})?)"
)
LABEL = re.compile(r"\(?[0-9a-zA-Z]{1,2}\)|[A-Z]")  # of a heading: #### (a), #### 1), #### B


def grade_math(response: str, answer: str, mode: str = "boxed") -> Result:
    """Whether the answer in a response equals the reference answer. Raises on no string. Main thread only.

    Mode "boxed" reads the last `\\boxed{}` and nothing else. Without a box, mode "flexible" reads the last formula or
    number. score and acc are None if the reference answer cannot be read.
    """
    result = grade_by_string(response, answer, mode)
    if result is not None:
        return result
    for text in readings(last_answer(response)):
        result = grade_by_algebra(text, answer)
        if result.acc != 0 or "timeout" in result.info:  # right, or the reference answer can't be read
            break
    return result


def last_answer(response: str) -> str:
    """The part of a response that is graded: its last box, or its end if there is none."""
    box = answer_box(response)
    if box is not None:
        return rf"\boxed{{{box}}}"
    # A box that was never closed is none, but what stands in it comes after all others.
    text = response[response.rfind(r"\boxed{") + 1 :].removeprefix("boxed{")
    text = text[-FLEXIBLE_TAIL_CHARACTERS:]
    # math-verify would read 10 as the answer in "Answer: 10/2=5", and 2 in "Answer: 2x+1". It knows what to do with
    # formulas between dollars.
    marks = list(re.finditer(r"(?i)(?:####|\banswer\s*:)([^\n]*)", text))
    line = marks[-1][1].replace("\u2212", "-") if marks else ""
    if line and not re.search(r"\$|\\[(\[]", line):
        before, after = text[: marks[-1].start(1)], text[marks[-1].end() :]
        right = behind_equals(line)
        formula = right.strip(" \t\r*").rstrip(" *.")
        # Of a formula, readings() tries both. Behind a number, a later one may be the answer.
        bare = without_remark(without_option(formula))
        if not FORMULA.fullmatch(formula) or (PLAIN_NUMBER.fullmatch(bare) and re.search("[0-9]", after)):
            formula = bare
        is_plain = PLAIN_NUMBER.fullmatch(formula)
        is_blank = not re.search(r"[0-9a-zA-Z]", formula)  # ____, a line to fill in
        is_heading = before.endswith("#") and after.strip() and LABEL.fullmatch(formula)
        if FORMULA.fullmatch(formula) and not (is_plain or is_blank or is_heading):
            return f"${formula}$"
        if right != line:
            return f"Answer: {formula if is_plain else right.strip()}"
        if is_plain:
            return f"{before} {formula}{after}"
    return text


def readings(text: str) -> list[str]:
    """What a last_answer() may mean: "12 N" is 12 newton or 12 times N, and "(A) x" is option A or A times x. The
    reference answer tells which. Each form has other letters, so no answer is paid for two numbers.
    """
    if not (text.startswith("$") and text.endswith("$")):
        return [text]
    formula = text[1:-1]
    bare = without_option(formula)
    forms = [without_remark(bare), bare, formula]
    found = REMARKED.fullmatch(bare)
    if found and found["value"]:
        # 18 (9*2) is 18, because the bracket says the same. 10 (2^3) is 80. Nobody can tell for a bracket that takes
        # too long, and a product with it would take as long again.
        same = grade_by_algebra(f"${found['value'][1:-1]}$", found["number"])
        forms = [found["number"] if same.acc == 1 or "timeout" in same.info else bare]
    return [f"${form}$" for form in dict.fromkeys(forms)]


def without_option(formula: str) -> str:
    return OPTION.sub("", formula, count=1)


def without_remark(formula: str) -> str:
    found = REMARKED.fullmatch(formula)
    return found["number"] if found else formula


def answer_box(response: str) -> str | None:
    """The content of the last box. None if there is none, if it is not closed, or if it is longer than any answer."""
    box = final_box(response)
    return box[1] if box and len(box[1]) <= TAIL_CHARACTERS else None


def grade_by_string(response: str, answer: str, mode: str) -> Result | None:
    """The result where no algebra is needed: there is no answer, or it is the same string. Otherwise None."""
    box = answer_box(response)
    if box is None:
        nothing_to_read = mode == "boxed" or not last_answer(response).strip()
        return Result(0.0, 0.0) if nothing_to_read else None
    # Most right answers are the same string, and sympy takes milliseconds for each.
    content = plain(box)
    if not content:
        return Result(0.0, 0.0, "")
    return Result(1.0, 1.0, box.strip()) if content == plain(unwrap(answer)) else None


def grade_by_algebra(text: str, answer: str) -> Result:
    """The verdict of math-verify on the last_answer() of a response."""
    if threading.current_thread() is not threading.main_thread():
        raise RuntimeError("grade_math needs the main thread, for SIGALRM; workers.MathReward works in any")
    # Imported here because sympy takes a second, which only the workers need to pay.
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse
    from math_verify.errors import TimeoutException
    from sympy.polys.polyerrors import BasePolynomialError

    from common.rewards.math_equality import equal

    read = functools.partial(parse, parsing_timeout=TIMEOUT_SECONDS, raise_on_error=True)
    latex = LatexExtractionConfig()
    box = answer_box(text)
    if box is not None:
        # math-verify would unite all boxes of a text into a set, so it sees the last one alone.
        text = rf"\boxed{{{clean(box)}}}"
        extracted = box.strip()
        configs = [latex]
    else:
        text = clean(text)
        extracted = None
        configs = [latex, ExprExtractionConfig()]
    gold_text = delimited(answer)
    if based(text) != text:
        text, gold_text = based(text), based(gold_text)
    try:
        golds = read(gold_text, [latex])
    except (TimeoutException, *SYMPY_ERRORS, BasePolynomialError):
        golds = []
    if all(isinstance(gold, str) for gold in golds):  # what cannot be read comes back as a text
        return Result(None, None, extracted, {"error": f"gold answer {answer[:60]!r} cannot be parsed"})
    try:
        answers = read(text, configs)
        if box is None and answers and isinstance(answers[-1], str):
            extracted = answers[-1]
        pairs = itertools.product(golds, answers)
        right = any(equal(*pair, gold_text, text, TIMEOUT_SECONDS) for pair in pairs)
    except TimeoutException:  # a BaseException
        return Result(0.0, 0.0, extracted, {"timeout": 1})
    except (*SYMPY_ERRORS, BasePolynomialError) as error:
        return Result(0.0, 0.0, extracted, {"error": type(error).__name__})
    return Result(float(right), float(right), extracted)


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


def based(text: str) -> str:
    """The text with a letter of its own for each number in another base than ten: math-verify reads 10_2 as 10.

    So 10_2 equals neither 10_3 nor 10 nor 2, and 10_{10} is 10.
    """

    def symbol(number: re.Match) -> str:
        digits = number["inside"] or number["digits"]
        base = number["bare"] or number["braced"] or number["word"]
        base = int(BASE_WORDS.get(base, base))
        # Letters are digits only where the base has so many: 5C_2 is a binomial coefficient.
        if not digits.isdigit() and max(int(digit, 36) for digit in digits) >= base:
            return number[0]
        return digits if base == 10 else rf"\theta_{{{int(digits, 36)}0{base:02}}}"

    return BASED.sub(symbol, text)


def clean(text: str) -> str:
    """The text in a form that math-verify reads right. It would take 10\\,000 for 10 * 0, and 5 people for letters."""
    text = re.sub(r",\\!\s*", ",", text.replace("\u2212", "-")).strip()
    text = re.sub(r"(?<=[0-9])(?:\\[,!]|\{,\})(?=[0-9])", "", text)
    text = SPACED_THOUSANDS.sub(digits_of, text)
    # In brackets, (1,200) may be two numbers.
    if not re.search(r"[(\[]|\\\{", text):
        text = COMMA_THOUSANDS.sub(digits_of, text)
    text = re.sub(r"([0-9])\s+([0-9]+)/([0-9]+)", r"\1\\frac{\2}{\3}", text)  # 2 1/2 would be read as 3/2
    # Between inequalities, math-verify reads the words and not the signs. p \lor q stays a text.
    if INEQUALITY.search(text):
        text = OR_SIGN.sub(r"\\text{ or }", text)
        text = AND_SIGN.sub(r"\\text{ and }", text)
    text = re.sub(r"(?<!\\right)\.$", "", text)
    return LAST_UNIT.sub("", text)


def digits_of(number: re.Match) -> str:
    return re.sub(r"[^0-9]", "", number[0])


def as_semicolon(comma: re.Match) -> str:
    """`1, 200` as `1;200`, because 1,200 is another answer. In brackets, where no thousands are, as it is."""
    before = comma.string[: comma.start()]
    depth = sum(map(before.count, "([{")) - sum(map(before.count, ")]}"))
    return comma[0] if depth > 0 else f"{comma[1]};"


def plain(text: str) -> str:
    """A form in which the same expression is often the same string."""
    text = re.sub(r"\\(?:left|right)(?![a-zA-Z])", "", clean(text))  # and not \leftarrow
    text = text.replace("dfrac", "frac").replace("tfrac", "frac")
    text = re.sub(r"\\[()\[\],;:! ]|\$", " ", text)
    text = LIST_COMMA.sub(as_semicolon, text)
    return re.sub(r"(?<![0-9a-zA-Z])\s+|\s+(?![0-9a-zA-Z])", "", text)  # 2 1/2 is not 21/2, \pi r is not \pir
