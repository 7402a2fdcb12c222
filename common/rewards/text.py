"""Rewards that read the text or the tokens of a response: DAPO's "Answer:" grader, and the shaping rewards.

A shaping reward does not know what is correct: acc is 0, or equals the score of the format. It counts only if that
reward is named first.
"""

import re

from common.rewards.grading import Item, Result

DAPO_TAIL_CHARACTERS = 300  # DAPO's code reads the end of a response only
_ANSWER = re.compile(r"(?i)Answer\s*:\s*([^\n]+)")
_WORDS = re.compile(
    "dollars|cents|pounds|inches|feet|meters|mph|km|cm|gm|degrees|minutes|hours|square"
    "|units|points|integers|digits|ways|edges|students|meals|multiples"
    r"|\^\\circ|\^\{\\circ\}|\\text\{[ms.]?\}(?:\^[23])?|\\mathrm\{th\}|\\l?dots|\\;|,\\!|\{,\}|\""
)
_INTEGER = re.compile(r"([+-]?[0-9]{1,300})(?:\.0*)?")
_FORMAT = re.compile(r"<think>.*</think>\s*<answer>.*</answer>\s*", re.DOTALL)


def normalize_dapo(answer: str) -> str:
    """The string that DAPO's grader compares: no left side of "=", no articles, units, spaces or LaTeX wrappers."""
    answer = answer.rpartition("=")[2].replace("an ", "").replace("a ", "").replace(".$", "$").replace(r"\$", "")
    answer = answer.replace(r"\ ", "").replace(" ", "").replace("mbox", "text")
    answer = _WORDS.sub("", re.sub(r",?\\text\{and\}", ",", answer))
    if answer.count("$") > 1:  # keep the first inline formula and drop the words around it
        answer = answer.split("$")[1]
    answer = re.sub(r"\\(?:text|textbf|overline)\{(.*?)\}", r"\1", answer)
    answer = re.sub(r"\\boxed\{(.*)\}", r"\1", answer)
    answer = re.sub(r"frac([^{])(.)", r"frac{\1}{\2}", answer)
    answer = re.sub(r"sqrt([^{])", r"sqrt{\1}", answer).replace("$", "")
    without_commas = answer.replace(",", "")
    return (without_commas if without_commas.isdigit() else answer).strip()


def grade_dapo(response: str, answer: str, lenient: bool = False) -> tuple[bool, str | None]:
    """Whether the last line "Answer: ..." equals the reference answer as a string, and its text (None without a line).

    lenient: Markdown stars and one period at the end do not count, and integers are compared as numbers.
    """
    text = response[-DAPO_TAIL_CHARACTERS:]
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
    """+1 for right and -1 for wrong, by the rules of DAPO's own grader: neither "34." nor "34.0" is 34."""
    grades = [grade_dapo(item.response, item.answer, lenient) for item in items]
    return [Result(2.0 * right - 1, float(right), said) for right, said in grades]


def dapo_lenient_reward(items: list[Item], lengths: list[int], truncated: list[bool]) -> list[Result]:
    """dapo_reward that accepts Markdown, a period at the end, and any spelling of an integer."""
    return dapo_reward(items, lengths, truncated, lenient=True)


def format_reward(items: list[Item], lengths: list[int], truncated: list[bool]) -> list[Result]:
    """1 if the whole response is `<think>...</think> <answer>...</answer>`, each tag once, otherwise 0."""
    results = []
    for item in items:
        text = with_think(item)
        once = all(text.count(tag) == 1 for tag in ("<think>", "</think>", "<answer>", "</answer>"))
        score = float(once and _FORMAT.fullmatch(text) is not None)
        results.append(Result(score, score))
    return results


def with_think(item: Item) -> str:
    """The response, with its first tag where the chat template wrote that at the end of the prompt."""
    return "<think>" * item.prompt.rstrip().endswith("<think>") + item.response


def format_boxed_reward(items: list[Item], lengths: list[int], truncated: list[bool]) -> list[Result]:
    """1 if the whole response is `<think>...</think> ... \\boxed{...} ...`, otherwise 0: verl's for geo3k."""
    results = []
    for text in map(with_think, items):
        place = 0 if text.startswith("<think>") else -1
        for mark in ("</think>", "\\boxed{", "}"):  # one after the other; a regular expression could take minutes
            place = text.find(mark, place) if place >= 0 else -1
        results.append(Result(float(place >= 0), float(place >= 0)))
    return results


def overlong_reward(
    items: list[Item], lengths: list[int], truncated: list[bool], *, max_length: int, cache_length: int
) -> list[Result]:
    """0 up to max_length - cache_length tokens, then linearly down to -1 at max_length (DAPO, eq. 13).

    With cache_length 0 the score drops from 0 to -1 at max_length. Expects 0 <= cache_length <= max_length.
    """
    results = []
    for length in lengths:
        over = length - (max_length - cache_length)
        share = over / cache_length if cache_length else float(over >= 0)
        results.append(Result(0.0 - min(max(share, 0.0), 1.0), 0.0))
    return results


def repetition_reward(items: list[Item], lengths: list[int], truncated: list[bool], n: int = 3) -> list[Result]:
    """-(1 - distinct/all) over the n-grams of the response tokens; 0 for a response of fewer than n tokens."""
    results = []
    for item in items:
        grams = list(zip(*(item.response_ids[i:] for i in range(n))))
        results.append(Result(len(set(grams)) / len(grams) - 1 if grams else 0.0, 0.0))
    return results


def missing_eos_reward(items: list[Item], lengths: list[int], truncated: list[bool]) -> list[Result]:
    """-1 for a response that was cut off, 0 for one that ended."""
    return [Result(-1.0 if cut else 0.0, 0.0) for cut in truncated]
