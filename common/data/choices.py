"""Questions with lettered options (MMLU, ARC, GPQA): the options of a row, their letters, and which one is right.

With --reward choice, prompts.py shows the options by letter(), and the reward reads them again by read(). Both give the
same letters, because the row then has them in its "choices" in their order.

A row's options are the first of these that it has:

    "choices" or "options"   a list of texts, an object {"A": text, ...}, ARC's {"text": [...], "label": [...]},
                             or a list of {"label": ..., "text": ...}
    "Correct Answer"         with "Incorrect Answer 1", ...: GPQA's, in an order that depends on the texts alone
    "A", "B", ...            a column for each
    the prompt               its last lines "A) ...", "B. ..." or "(C) ...", or the same on one line in brackets

The right one is a letter, a label, an index from 0 (MMLU), or the text of an option. GPQA's rows need no answer.
"""

import dataclasses
import hashlib
import json
import re
import string
from typing import Any

from common.data.json_lines import is_count, is_number

LETTERS = string.ascii_uppercase
RIGHT = "Correct Answer"
WRONG = "Incorrect Answer "
NEEDED = '"choices", "options", "A" and "B", "Correct Answer", or lines "A) ..." in the prompt'
# Where an option begins in a prompt: A) or A. or (A) at the start of a line, or only (A) within one.
LINE_MARK = re.compile(r"^[ \t>*-]*\(?([A-Z])[).:]\**[ \t]+(?=\S)", re.MULTILINE)
INLINE_MARK = re.compile(r"(?<!\S)\(([A-Z])\)\s+(?=\S)")
LETTER = re.compile(r"\(?([A-Za-z])[).]?")
LETTER_AND_TEXT = re.compile(r"\(?([A-Z])[).:]\s*(\S.*)", re.DOTALL)
GOES_ON = re.compile(r"\w|[.,][0-9]")  # behind 12 in 125 and 12.5
LATEX_SPACE = re.compile(r"\\(?:[ ,;:!\\]|q?quad(?![a-zA-Z]))")
LATEX_OR = re.compile(r"\\(?:lor|vee)(?![a-zA-Z])")
WRAPPER = re.compile(r"\\(?:text|textbf|textit|mathrm|mathbf|boxed|fbox)\s*\{([^{}]*)\}")


@dataclasses.dataclass(frozen=True)
class Question:
    options: list[str]  # in the order of their letters
    right: int  # place of the right one
    shown: bool  # whether the prompt shows them with these letters


def read(row: dict, content: str | list[dict], answer: Any) -> Question:
    """The options of a row, and the right one. content: the prompt. answer: the reference. Raises ValueError."""
    text = content if isinstance(content, str) else text_of_user(content)
    options, labels = columns_of(row)
    if answer is None:
        answer = row.get(RIGHT)
    if is_number(answer) and any(map(is_number, numbers_in(row))):
        answer = str(answer)  # among numbers it may be one of them, and not an index
    if options:
        order = order_in(text, options)
        if order is not None and order != sorted(order):
            # An index, and a letter perhaps, would mean another option than the one that it means in the column.
            if not is_one_of(answer, options):
                raise ValueError(
                    "the prompt shows the options in another order than the column; give the text as answer"
                )
            options = [options[place] for place in order]
        shown = order is not None
    else:
        options = shown_in(text)
        shown = True
    if not 2 <= len(options) <= len(LETTERS):
        raise ValueError(f"{len(options)} options, expected 2 to {len(LETTERS)}: {NEEDED}")
    if answer is None:
        raise ValueError(f'no "answer", which names one of the {len(options)} options')
    return Question(options, place_of(answer, options, labels), shown)


def letter(row: dict, found: Any, answer: Any) -> tuple[dict, Any]:
    """The row and its templates.Fields, with lettered options in the prompt and the letter of the right one as answer.

    answer: the reference as the row has it. Without options that can be read, both stay as they are: check_answers()
    of the rewards says what is wrong with the row.
    """
    try:
        question = read(row, found.content, answer)
    except ValueError:
        return row, found
    content = found.content
    if not question.shown:
        content = with_options(content, question.options)
    row = {**row, "choices": question.options}
    return row, dataclasses.replace(found, content=content, answer=LETTERS[question.right])


def lettered(options: list[str]) -> str:
    """A line for each option."""
    return "\n".join(f"{letter}) {option}" for letter, option in zip(LETTERS, options))


def with_options(content: str | list[dict], options: list[str]) -> str | list[dict]:
    """A prompt with the options behind it: at the end of what the user says last."""
    if isinstance(content, str):
        return f"{content.rstrip()}\n\n{lettered(options)}"
    messages = list(content)
    for place in reversed(range(len(messages))):
        message = messages[place]
        if message["role"] == "user":
            messages[place] = {**message, "content": with_options(message["content"], options)}
            break
    return messages


def text_of_user(messages: list[dict]) -> str:
    """What the user says last."""
    said = [message["content"] for message in messages if message["role"] == "user"]
    return said[-1] if said else ""


def with_words(text: str) -> str:
    """The text with spaces and the word "or" in place of LaTeX's commands for them."""
    return LATEX_OR.sub(" or ", LATEX_SPACE.sub(" ", text))


def plain(text: str) -> str:
    """A form in which two spellings of the same option are equal."""
    for _ in range(3):
        text = WRAPPER.sub(r"\1", text)
    text = re.sub(r"\\[()\[\]]|[$*`]", "", with_words(text))
    return " ".join(text.split()).strip("\"'“”‘’").removesuffix(".").strip().casefold()


# Columns


def columns_of(row: dict) -> tuple[list[str], list[str]]:
    """The options in the columns of a row, and their labels if they have some. Both are empty without such columns."""
    for column in ("choices", "options"):
        value = row.get(column)
        if isinstance(value, list) and value and all(isinstance(option, dict) for option in value):
            # [{"label": "A", "text": "red"}, ...] in ARC's form. An option without a text stays, and is refused.
            labels = [option.get("label") for option in value]
            value = {"text": [option.get("text", option) for option in value], "label": labels}
        if isinstance(value, dict) and isinstance(value.get("text"), list):
            options = as_texts(value["text"], column)
            labels = value.get("label") or []
            # Labels of only some options would be taken for those of the first ones.
            all_labelled = len(labels) == len(value["text"]) and None not in labels
            return options, [str(label) for label in labels[: len(options)]] if all_labelled else []
        if isinstance(value, dict) and list(value) == list(LETTERS[: len(value)]):
            return as_texts(list(value.values()), column), []
        if isinstance(value, list):
            return without_marks(as_texts(value, column)), []
    wrong = [value for name, value in row.items() if name.startswith(WRONG)]
    if row.get(RIGHT) is not None and wrong:
        return shuffled(as_texts([row[RIGHT], *wrong], RIGHT)), []
    columns = []
    for name in LETTERS:
        if row.get(name) is None:
            break
        columns.append(row[name])
    return (as_texts(columns, LETTERS[0]), []) if len(columns) > 1 else ([], [])


def numbers_in(row: dict) -> list:
    """The options of a row, in whatever columns they are, before they become texts."""
    value = row.get("choices")
    value = row.get("options") if value is None else value
    if isinstance(value, dict):
        value = value["text"] if isinstance(value.get("text"), list) else list(value.values())
    if isinstance(value, list):
        return [option.get("text") if isinstance(option, dict) else option for option in value]
    return [value for name, value in row.items() if name in (*LETTERS, RIGHT) or name.startswith(WRONG)]


def as_texts(values: list, column: str) -> list[str]:
    """The values as texts, without empty ones at the end: tables have as many columns as their longest row needs.

    Raises ValueError for a list or an object, naming the column.
    """
    for value in values:
        if isinstance(value, list | dict):
            raise ValueError(f"{column}: expected a text for each option, got {json.dumps(value, default=str)[:60]}")
    texts = ["" if value is None else str(value).strip() for value in values]
    while texts and not texts[-1]:
        texts.pop()
    return texts


def without_marks(options: list[str]) -> list[str]:
    """The options without letters that stand in front of all of them: ["A) 21", "B) 7"] (AQuA)."""
    found = [LETTER_AND_TEXT.fullmatch(option) for option in options]
    if all(found) and [match[1] for match in found] == list(LETTERS[: len(options)]):
        return [match[2] for match in found]
    return options


def shuffled(options: list[str]) -> list[str]:
    """The options in an order that their texts decide, so the right one may have any letter, and always the same."""
    seed = "\0".join(sorted(options))
    return sorted(options, key=lambda option: hashlib.sha256(f"{seed}\0\0{option}".encode("utf-8", "replace")).digest())


# Prompts


def shown_in(text: str) -> list[str]:
    """The options that a prompt shows: the last run of marks A, B, C ... The last one ends with its line."""
    pieces = run_of_marks(text)
    if pieces:
        pieces[-1] = pieces[-1].split("\n")[0]
    return [piece.strip() for piece in pieces]


def order_in(text: str, options: list[str]) -> list[int] | None:
    """For each letter in a prompt the place of its option. None if the prompt does not show just these options."""
    _, block, behind = text.rpartition(lettered(options))
    if block and not GOES_ON.match(behind):
        return list(range(len(options)))
    pieces = run_of_marks(text)
    if len(pieces) != len(options):
        return None
    order = []
    for number, piece in enumerate(pieces, 1):
        # Behind the last one, other words may follow.
        same = begins_with if number == len(pieces) else is_same
        places = [place for place, option in enumerate(options) if place not in order and same(piece, option)]
        if not places:
            return None
        # Of "1" and "1 m" the longer one.
        order.append(max(places, key=lambda place: len(options[place])))
    return order


def is_same(piece: str, option: str) -> bool:
    return plain(piece) == plain(option)


def begins_with(piece: str, option: str) -> bool:
    piece = plain(piece)
    option = plain(option)
    return piece.startswith(option) and not GOES_ON.match(piece, len(option))


def run_of_marks(text: str) -> list[str]:
    """What stands behind each mark of the last run A, B, C ... of a text, up to the next mark."""
    for pattern in (LINE_MARK, INLINE_MARK):
        run = []
        last = []
        for mark in pattern.finditer(text):
            if mark[1] == "A":
                run = []
            if mark[1] == LETTERS[len(run) % len(LETTERS)]:
                run.append(mark)
                last = run if len(run) > 1 else last
            else:
                run = []
        if last:
            ends = [mark.start() for mark in last[1:]] + [len(text)]
            return [text[mark.end() : end] for mark, end in zip(last, ends)]
    return []


# References


def is_one_of(answer: Any, options: list[str]) -> bool:
    """Whether a reference is the text of an option, and no letter or index."""
    if not isinstance(answer, str) or LETTER.fullmatch(answer.strip()):
        return False
    return plain(answer) in map(plain, options)


def place_of(answer: Any, options: list[str], labels: list[str]) -> int:
    """Place of the option that a reference answer names. Raises ValueError."""
    if isinstance(answer, float) and answer.is_integer():
        answer = int(answer)  # a table with nulls has only floats
    text = str(answer).strip()
    if text in labels:
        return labels.index(text)
    if is_count(answer) and answer < len(options):
        return answer
    alone = LETTER.fullmatch(text)
    if alone and alone[1].upper() in LETTERS[: len(options)]:
        return LETTERS.index(alone[1].upper())
    places = {place for place, option in enumerate(options) if plain(option) == plain(text)}
    both = LETTER_AND_TEXT.fullmatch(text)
    if both and both[1] in LETTERS[: len(options)] and plain(both[2]) == plain(options[LETTERS.index(both[1])]):
        places.add(LETTERS.index(both[1]))
    index = int(text) if re.fullmatch(r"[0-9]{1,2}", text) else len(options)
    if index < len(options):
        # 2 may be an index, and the text of another option.
        if places and index not in places:
            raise ValueError(f'the answer "{text}" is the text of one option and the index of another; give its letter')
        places = {index}
    if not places:
        raise ValueError(
            f'the answer "{text[:60]}" names none of the {len(options)} options: {", ".join(options)[:80]}'
        )
    return min(places)
