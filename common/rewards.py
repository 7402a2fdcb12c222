"""Text in, score out: the GSM8K grader, and the one interface every reward has.

    reward(items, lengths, truncated) -> list[Result]      same order, same length

`score` is what training uses, `acc` plain correctness (0 or 1). A response that cannot be parsed is wrong,
never missing. Graders are deterministic, bounded in time, and raise on no string.
"""

import difflib
import importlib.util
import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

from common.placement import BadInput, refuse_all


@dataclass(frozen=True)
class Item:
    prompt: str
    response: str  # decoded from response tokens alone, without special tokens
    answer: str  # the reference ("gold") answer
    meta: dict[str, Any] = field(default_factory=dict)  # the data set's other columns


@dataclass(frozen=True)
class Result:
    score: float
    acc: float
    extracted: str | None = None  # "marker", "last-number" or None: how an answer was found
    info: dict[str, Any] = field(default_factory=dict)


Reward = Callable[[list[Item], list[int], list[bool]], list[Result]]

CLIP = 2000  # characters at the end of a response in which an answer is looked for
_NUMBER = re.compile(
    r"""(?: (?<!\w)(?<!\w\.)                                   # not x2, not the end of 1.2.3
            (?P<whole>[0-9]+)\s+(?P<over>[0-9]+)/(?P<under>[0-9]+)   # mixed: 2 1/2
          | (?<!\w)(?<!\w\.)
            (?P<digits>(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?)
            (?P<exponent>[eE][+-]?[0-9]+(?!\w))? (?:\s*/\s*(?P<divisor>[0-9]+))?
          | (?<![\w.]) (?P<decimal>\.[0-9]+) )""",
    re.VERBOSE,
)


def grade_gsm8k(response: str, answer: str, mode: str = "flexible") -> float:
    """1.0 if the number the response gives equals the reference answer exactly, else 0.0. Never raises on a response.

    mode "strict": the first number after the last `####`, on its line. "flexible": the last `\\boxed{}` or
    `####` line, whichever starts later; only without either, the last number in the text. The answer may be
    a number or a GSM8K solution ending in `#### number`. Numbers are exact fractions: 0.333 is not 1/3.
    """
    found, _ = extract(response, mode)
    return float(found is not None and found == parse_gold(answer))


def parse_gold(answer: str) -> Fraction | None:
    """The reference answer as a number; None if it holds none."""
    numbers = find_numbers(answer.rpartition("####")[2])
    return numbers[0] if numbers else None


def extract(response: str, mode: str = "flexible") -> tuple[Fraction | None, str | None]:
    """The number a response gives as its answer, and how it was found."""
    text = response[-CLIP:]
    marker = text.rfind("####")
    line = (marker, text[marker + 4 :].split("\n", 1)[0]) if marker >= 0 else None
    box = last_box(text) if mode == "flexible" else None
    candidates = sorted((c for c in (line, box) if c is not None), reverse=True)  # the later one first
    for _, candidate in candidates:
        numbers = find_numbers(candidate)
        if numbers:
            return numbers[0], "marker"
    if candidates or mode == "strict":
        return None, None
    numbers = find_numbers(text)
    return (numbers[-1], "last-number") if numbers else (None, None)


def last_box(text: str) -> tuple[int, str] | None:
    """(start, content after its last "=") of the last `\\boxed{...}` with balanced braces, or of `\\boxed5`."""
    best, opened = None, []
    for i, character in enumerate(text):
        if character == "{":
            opened.append(i)
        elif character == "}" and opened:
            start = opened.pop()
            if text.endswith(r"\boxed", 0, start) and (best is None or start > best[0]):
                best = (start, text[start + 1 : i])
    for bare in re.finditer(r"\\boxed\s*(-?[0-9][0-9,.]*)", text):
        if best is None or bare.start(1) > best[0]:
            best = (bare.start(1), bare.group(1))
    return best and (best[0], best[1].rpartition("=")[2])


def find_numbers(text: str) -> list[Fraction | None]:
    """All numbers of a text in order; None stands for one too long or too large to be an answer, or over 0."""
    text = _clean(text)
    return [_value(match, _is_negative(text, match.start())) for match in _NUMBER.finditer(text)]


def _clean(text: str) -> str:
    """Strip the LaTeX and Markdown that stands inside or around numbers; unify minus signs."""
    text = text.replace("\u2212", "-").replace("\u2013", "-").replace("{,}", ",").replace("**", "")
    text = re.sub(r"\\[,!()]", "", text).replace(r"\$", "$")
    text = re.sub(r"\\text\s*\{([^{}]*)\}", r" \1", text)
    fraction = r"\\[dt]?frac\s*(?:\{\s*([^{}]*?)\s*\}\s*\{\s*([^{}]*?)\s*\}|([0-9])\s*([0-9]))"
    mixed = re.compile(r"([0-9])\s*" + fraction)
    text = mixed.sub(lambda m: f"{m[1]} {m[2] or m[4]}/{m[3] or m[5]}", text)
    return re.sub(fraction, lambda m: f"{m[1] or m[3]}/{m[2] or m[4]}", text)


def _is_negative(text: str, start: int) -> bool:
    """Whether the number at `start` has a minus sign, not a minus operator (rewards of -$5, $-5$, 10-12, 5 - 3)."""
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
    """Exact value; None if it is over 0, longer than 100 characters, or its exponent beyond 30."""
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
    """grade_gsm8k as a reward: score = acc."""
    results = []
    for item in items:
        acc = grade_gsm8k(item.response, item.answer, mode)
        results.append(Result(acc, acc, extract(item.response, mode)[1]))
    return results


BUILT_IN: dict[str, Reward] = {
    "gsm8k": partial(gsm8k_reward, mode="flexible"),
    "gsm8k-strict": partial(gsm8k_reward, mode="strict"),
}


def load(spec: str) -> Reward:
    """--reward: a built-in name or `file.py:function`, a function (items, lengths, truncated) -> Results or floats."""
    if spec in BUILT_IN:
        return BUILT_IN[spec]
    path, _, function = spec.rpartition(":")
    if not path.endswith(".py"):
        near = difflib.get_close_matches(spec, BUILT_IN, 1)
        hint = f" (did you mean {near[0]}?)" if near else ""
        raise BadInput(f'--reward: unknown reward "{spec}"{hint}; known: {", ".join(BUILT_IN)}, or file.py:function')
    if not Path(path).is_file():
        raise BadInput(f"--reward: {path}: file not found")
    module_spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    module = importlib.util.module_from_spec(module_spec)
    module_spec.loader.exec_module(module)
    if not callable(getattr(module, function, None)):
        raise BadInput(f'--reward: {path} has no function "{function}"')
    return partial(call_user_reward, getattr(module, function), spec)


def call_user_reward(function, name: str, items: list[Item], lengths: list[int], truncated: list[bool]) -> list[Result]:
    """Call a user's function; a plain number n becomes Result(score=n, acc=n > 0). Raises BadInput on bad output."""
    results = function(items, lengths, truncated)
    if len(results) != len(items):
        raise BadInput(f'reward "{name}" returned {len(results)} results for {len(items)} items')
    results = [r if isinstance(r, Result) else Result(float(r), float(r > 0)) for r in results]
    for row, result in enumerate(results):
        if not math.isfinite(result.score):
            raise BadInput(f'reward "{name}" row {row}: {result.score} for prompt {items[row].prompt[:200]!r}')
    return results


def score(reward: Reward, prompts: list, responses: list[str], rollout) -> list[Result]:
    """Grade N responses, G to each of B prompts (group-major)."""
    group_size = len(responses) // len(prompts)
    asked = [prompt for prompt in prompts for _ in range(group_size)]
    items = [Item(prompt.text, response, prompt.answer, prompt.meta) for prompt, response in zip(asked, responses)]
    return reward(items, [len(ids) for ids in rollout.response_ids], rollout.truncated.tolist())


def check_answers(spec: str, prompts: list) -> None:
    """Refuse reference answers the reward cannot grade against, naming their lines. Raises BadInput."""
    bad = [prompt for prompt in prompts if spec in BUILT_IN and parse_gold(prompt.answer) is None]
    refuse_all([f'{prompt.id}: gold answer "{prompt.answer[:60]}" is not a number' for prompt in bad])
