"""Rewards that read the text or the tokens of a response: DAPO's "Answer:" grader, and the shaping rewards.

A shaping reward does not know what is correct: acc is 0, or equals the score of the format. It counts only if that
reward is named first.
"""

import functools
import re
from collections.abc import Callable

from common.rewards.grading import TAIL_CHARACTERS, Item, Result, Reward, parse_gold

DAPO_TAIL_CHARACTERS = 300  # DAPO's code reads the end of a response only
_ANSWER = re.compile(r"(?i)Answer\s*:\s*([^\n]+)")
_WORDS = re.compile(
    "dollars|cents|pounds|inches|feet|meters|mph|km|cm|gm|degrees|minutes|hours|square"
    "|units|points|integers|digits|ways|edges|students|meals|multiples"
    r"|\^\\circ|\^\{\\circ\}|\\text\{[ms.]?\}(?:\^[23])?|\\mathrm\{th\}|\\l?dots|\\;|,\\!|\{,\}|\""
)
_INTEGER = re.compile(r"([+-]?[0-9]{1,300})(?:\.0*)?")
_FORMAT = re.compile(r"<think>.*</think>\s*<answer>.*</answer>\s*", re.DOTALL)


def normalize_dapo(answer: str, lenient: bool = False) -> str:
    """The string that DAPO's grader compares: no left side of "=", no articles, units, spaces or LaTeX wrappers.

    lenient: no Markdown stars, no period at the end, and 34 for 034, +34 and 34.0.
    """
    if lenient:
        answer = answer.strip().strip("*").removesuffix(".").strip("*")
    answer = answer.rpartition("=")[2].replace("an ", "").replace("a ", "").replace(".$", "$").replace(r"\$", "")
    answer = answer.replace(r"\ ", "").replace(" ", "").replace("mbox", "text")
    answer = re.sub(r",?\\text\{and\}", ",", answer)
    answer = _WORDS.sub("", answer)
    if answer.count("$") > 1:
        answer = answer.split("$")[1]  # the first inline formula, without the words around it
    answer = re.sub(r"\\(?:text|textbf|overline)\{(.*?)\}", r"\1", answer)
    answer = re.sub(r"\\boxed\{(.*)\}", r"\1", answer)
    answer = re.sub(r"frac([^{])(.)", r"frac{\1}{\2}", answer)
    answer = re.sub(r"sqrt([^{])", r"sqrt{\1}", answer).replace("$", "")
    without_commas = answer.replace(",", "")
    answer = without_commas if without_commas.isdigit() else answer.strip()
    integer = _INTEGER.fullmatch(answer) if lenient else None
    return str(int(integer[1])) if integer else answer


def of_each(grade: Callable[..., Result]) -> Reward:
    """A reward from a function that grades one response: grade(item, length, truncated) -> Result."""

    @functools.wraps(grade)
    def reward(items: list[Item], lengths: list[int], truncated: list[bool], **settings) -> list[Result]:
        return [grade(*row, **settings) for row in zip(items, lengths, truncated)]

    return reward


@of_each
def dapo_reward(item: Item, length: int, truncated: bool, lenient: bool = False) -> Result:
    """+1 if the last line "Answer: ..." equals the reference answer as a string, otherwise -1.

    The rules are those of DAPO's own grader: neither "34." nor "34.0" is 34, and it reads the last 300 characters only.
    """
    text = item.response.replace("**", "") if lenient else item.response[-DAPO_TAIL_CHARACTERS:]
    lines = _ANSWER.findall(text)
    if not lines:
        return Result(-1.0, 0.0)
    line = normalize_dapo(lines[-1][:TAIL_CHARACTERS], lenient)
    right = line == normalize_dapo(item.answer, lenient)
    if lenient and not right:
        # The reference may be a whole GSM8K solution, or have a currency or a unit that DAPO's code does not know.
        gold = parse_gold(item.answer)
        right = gold is not None and gold.denominator == 1 and line == str(gold)
    return Result(1.0 if right else -1.0, float(right), line)


# Accepts Markdown, a period at the end, any spelling of an integer, and a tail of any length behind the answer.
dapo_lenient_reward = functools.partial(dapo_reward, lenient=True)


def with_think(item: Item) -> str:
    """The response, with its first tag where the chat template wrote that at the end of the prompt."""
    return "<think>" + item.response if item.prompt.rstrip().endswith("<think>") else item.response


def without_thinking(text: str) -> str:
    """The text outside of <think>...</think>. A tag that is never closed hides all that follows it.

    Without an opening tag, all before </think> is thinking: the chat template has written the tag.
    """
    *thoughts, rest = text.split("</think>")
    said = [before for before, tag, _ in (piece.partition("<think>") for piece in thoughts) if tag]
    return "".join([*said, rest.partition("<think>")[0]])


@of_each
def format_reward(item: Item, length: int, truncated: bool) -> Result:
    """1 if the whole response is `<think>...</think> <answer>...</answer>`, each tag once, otherwise 0."""
    text = with_think(item)
    once = all(text.count(tag) == 1 for tag in ("<think>", "</think>", "<answer>", "</answer>"))
    score = float(once and _FORMAT.fullmatch(text) is not None)
    return Result(score, score)


@of_each
def format_boxed_reward(item: Item, length: int, truncated: bool) -> Result:
    """1 if the whole response is `<think>...</think> ... \\boxed{...} ...`, otherwise 0: verl's for geo3k."""
    text = with_think(item)
    # Not a regular expression: that could take minutes.
    _, _, after_thinking = text.partition("</think>")
    _, _, after_box = after_thinking.partition("\\boxed{")
    score = float(text.startswith("<think>") and "}" in after_box)
    return Result(score, score)


@of_each
def overlong_reward(item: Item, length: int, truncated: bool, *, max_length: int, cache_length: int) -> Result:
    """0 up to max_length - cache_length tokens, then linearly down to -1 at max_length (DAPO, eq. 13).

    With cache_length 0 the score drops from 0 to -1 at max_length. Expects 0 <= cache_length <= max_length.
    """
    over = length - (max_length - cache_length)
    share = over / cache_length if cache_length else float(over >= 0)
    # 0.0 - share, because -share would be -0.0 for a short response.
    return Result(0.0 - min(max(share, 0.0), 1.0), 0.0)


@of_each
def repetition_reward(item: Item, length: int, truncated: bool) -> Result:
    """-(1 - distinct/all) over the 3-grams of the response tokens; 0 for a response of fewer than 3 tokens."""
    ids = item.response_ids
    grams = list(zip(ids, ids[1:], ids[2:]))
    return Result(len(set(grams)) / len(grams) - 1 if grams else 0.0, 0.0)


@of_each
def missing_eos_reward(item: Item, length: int, truncated: bool) -> Result:
    """-1 for a response that was cut off, 0 for one that ended."""
    return Result(-1.0 if truncated else 0.0, 0.0)
