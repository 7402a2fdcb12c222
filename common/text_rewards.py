"""Rewards that read the text or the tokens of a response: DAPO's "Answer:" grader, and the shaping rewards.

Shaping rewards say nothing about correctness: their acc is 0, or the score itself for the format, and counts only if
one of them is named first.
"""

import re

from common.errors import BadInput
from common.grading import Item, Result

DAPO_CLIP = 300  # characters at the end of a response, as in DAPO's code
_ANSWER = re.compile(r"(?i)Answer\s*:\s*([^\n]+)")
_WORDS = re.compile(
    "dollars|cents|pounds|inches|feet|meters|mph|km|cm|gm|degrees|minutes|hours|square"
    "|units|points|integers|digits|ways|edges|students|meals|multiples"
    r"|\^\\circ|\^\{\\circ\}|\\text\{[ms.]?\}(?:\^[23])?|\\mathrm\{th\}|\\l?dots|\\;|,\\!|\{,\}|\""
)
_INTEGER = re.compile(r"([+-]?[0-9]{1,300})(?:\.0*)?")
_FORMAT = re.compile(r"<think>.*</think>\s*<answer>.*</answer>\s*", re.DOTALL)


def normalize_dapo(answer: str) -> str:
    """What DAPO's grader compares: an answer without its left side, articles, units, spaces and LaTeX wrappers."""
    answer = answer.rpartition("=")[2].replace("an ", "").replace("a ", "").replace(".$", "$").replace(r"\$", "")
    answer = answer.replace(r"\ ", "").replace(" ", "").replace("mbox", "text")
    answer = _WORDS.sub("", re.sub(r",?\\text\{and\}", ",", answer))
    if answer.count("$") > 1:  # what stands outside of the first inline formula goes
        answer = answer.split("$")[1]
    answer = re.sub(r"\\(?:text|textbf|overline)\{(.*?)\}", r"\1", answer)
    answer = re.sub(r"\\boxed\{(.*)\}", r"\1", answer)
    answer = re.sub(r"frac([^{])(.)", r"frac{\1}{\2}", answer)
    answer = re.sub(r"sqrt([^{])", r"sqrt{\1}", answer).replace("$", "")
    without_commas = answer.replace(",", "")
    return (without_commas if without_commas.isdigit() else answer).strip()


def grade_dapo(response: str, answer: str, lenient: bool = False) -> tuple[bool, str | None]:
    """Whether the last line "Answer: ..." equals the reference answer as a string, and what it says; no line: None.

    lenient: Markdown stars and one period at the end do not count, and integers are compared as numbers.
    """
    text = response[-DAPO_CLIP:]
    found = _ANSWER.findall(text.replace("**", "") if lenient else text)
    if not found:
        return False, None
    if not lenient:
        said, gold = normalize_dapo(found[-1]), normalize_dapo(answer)
        return said == gold, said
    said, gold = (normalize_dapo(text.strip().strip("*").removesuffix(".").strip("*")) for text in (found[-1], answer))
    numbers = [_INTEGER.fullmatch(text) for text in (said, gold)]
    return (int(numbers[0][1]) == int(numbers[1][1]) if all(numbers) else said == gold), said


def dapo_reward(items: list[Item], lengths: list[int], truncated: list[bool], lenient: bool = False) -> list[Result]:
    """+1 or -1 for right or wrong, as DAPO's own grader says it: "34." is not 34, nor is 34.0."""
    grades = [grade_dapo(item.response, item.answer, lenient) for item in items]
    return [Result(2.0 * right - 1, float(right), said) for right, said in grades]


def dapo_lenient_reward(items: list[Item], lengths: list[int], truncated: list[bool]) -> list[Result]:
    """dapo_reward that looks past Markdown, a period at the end, and how an integer is written."""
    return dapo_reward(items, lengths, truncated, lenient=True)


def format_reward(items: list[Item], lengths: list[int], truncated: list[bool]) -> list[Result]:
    """1 if the whole response is `<think>...</think> <answer>...</answer>`, each tag once, else 0."""
    results = []
    for item in items:
        opened = item.prompt.rstrip().endswith("<think>")  # the chat template wrote the first tag
        text = "<think>" + item.response if opened else item.response
        once = all(text.count(tag) == 1 for tag in ("<think>", "</think>", "<answer>", "</answer>"))
        score = float(once and _FORMAT.fullmatch(text) is not None)
        results.append(Result(score, score))
    return results


def overlong_reward(
    items: list[Item], lengths: list[int], truncated: list[bool], *, max_length: int, cache_length: int
) -> list[Result]:
    """0 up to max_length - cache_length tokens, then linearly down to -1 at max_length (DAPO, eq. 13).

    cache_length 0: -1 at max_length, 0 below. Raises BadInput if cache_length is larger than max_length.
    """
    if not 0 <= cache_length <= max_length:
        raise BadInput(f"overlong: a cache of {cache_length} tokens, expected 0 to {max_length}, the longest response")
    results = []
    for length in lengths:
        over = length - (max_length - cache_length)
        share = over / cache_length if cache_length else float(over >= 0)
        results.append(Result(0.0 - min(max(share, 0.0), 1.0), 0.0))
    return results


def repetition_reward(items: list[Item], lengths: list[int], truncated: list[bool], n: int = 3) -> list[Result]:
    """-(1 - distinct/all) over the n-grams of a response's tokens; 0 for a response of fewer than n tokens."""
    results = []
    for item in items:
        grams = list(zip(*(item.response_ids[i:] for i in range(n))))
        results.append(Result(len(set(grams)) / len(grams) - 1 if grams else 0.0, 0.0))
    return results


def missing_eos_reward(items: list[Item], lengths: list[int], truncated: list[bool]) -> list[Result]:
    """-1 for a response that was cut off, 0 for one that ended."""
    return [Result(-1.0 if cut else 0.0, 0.0) for cut in truncated]
