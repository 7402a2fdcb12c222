"""Rows of data: what all their readers share. The rewards use some of these functions, too.

Worker processes of rewards import this file, so it imports no torch.
"""

import difflib
import re
from collections.abc import Callable, Iterable
from typing import Any

from common.errors import BadInput, refuse_all

# The place of a row, and the row. The place becomes the prompt's id, and an error message begins with it. It is
# "train.jsonl:17" for a line of a file. "train.parquet:row 17" and "owner/name/train:row 17" count rows from 1.
Row = tuple[str, dict]

# Columns with a whole conversation, as OpenAI and ShareGPT name them.
CONVERSATIONS = ("messages", "conversations")
NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")
ENDS_WITH_PARAMETERS = re.compile(r"\?(?:\w+=[^=&]*&)*\w+=[^=&]*$")


def collect(rows: Iterable[Row], make: Callable[[str, dict], Any]) -> list:
    """make(where, row) of all rows. Raises a single BadInput that names the first bad rows."""
    made = []
    errors = []
    for where, row in rows:
        try:
            made.append(make(where, row))
        except BadInput as error:
            # An error with another code concerns more than this row, such as a chat template.
            if error.code != "bad-input":
                raise
            errors.append(divided(where, str(error)))
    refuse_all(errors)
    return made


def divided(where: str, error: str) -> tuple[str, str]:
    """(place, what is wrong) of an error about the row at `where`. It may name a place in the row, or the row not."""
    found = re.match(rf"({re.escape(where)}(?:, \w+ \d+)?): ", error)  # d:1, or d:1, message 2
    return (found[1], error[found.end() :]) if found else ("", error)


def numbered(prefix: str, values: Iterable, start: int = 1) -> list[Row]:
    """Rows whose places are the prefix and a number."""
    return [(f"{prefix}{number}", value) for number, value in enumerate(values, start)]


def lookup(row: dict, column: str, default: Any = None) -> Any:
    """row["a.b"] if there is such a column, otherwise row["a"]["b"], otherwise the default."""
    outer, _, inner = column.partition(".")
    if column in row or not isinstance(row.get(outer), dict):
        return row.get(column, default)
    return lookup(row[outer], inner, default)


def missing(where: str, row: dict, column: str, cure: str = "") -> BadInput:
    """The error for a row without a column."""
    columns = ", ".join(row) or "nothing"
    return BadInput(f'{where}: missing key "{column}" (found: {columns}){did_you_mean(column, row)}{cure}')


def unknown(kind: str, name: str, known: Iterable[str]) -> BadInput:
    """The error for a name that is not known, with the one that it resembles."""
    return BadInput(f'unknown {kind} "{name}"{did_you_mean(name, known)}; known: {", ".join(known)}')


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """A question for the end of an error about an unknown name, or "" if it resembles none that is known."""
    near = difflib.get_close_matches(name, list(known), 1)
    return f" (did you mean {near[0]}?)" if near else ""


def is_chat(value: Any) -> bool:
    """True for a list of messages that have a role and a text each."""
    return isinstance(value, list) and len(value) > 0 and all(is_message(entry) for entry in value)


def is_message(value: Any) -> bool:
    return isinstance(value, dict) and isinstance(value.get("role"), str) and isinstance(value.get("content"), str)


def first_line(text: object) -> str:
    """The first line of a text, or of an exception's message."""
    return str(text).strip().split("\n")[0]


def split_weight(entry: str) -> tuple[str, float]:
    """NAME=WEIGHT as (NAME, WEIGHT). Any other text is a name of weight 1: a folder or a URL may hold a "=".

    A name may end in parameters, as in NAME?key=1&key=2. A number after a key is its value, and a weight comes after
    the value: NAME?key=2=0.5 has the parameter 2 and the weight 0.5.
    """
    # runs/lr=0.1/a.jsonl has a "=", but no number after the last one.
    name, _, number = entry.rpartition("=")
    if name and NUMBER.fullmatch(number) and not ENDS_WITH_PARAMETERS.search(entry):
        return name, float(number)
    return entry, 1.0


def last_box(text: str) -> tuple[int, str] | None:
    """(start, content) of the last `\\boxed{...}` with balanced braces, or of `\\boxed5`."""
    if r"\boxed" not in text:
        return None
    last = None
    # Places of the braces that are open. A box ends where its own brace is closed, as in \boxed{\frac{1}{2}}.
    opened = []
    for brace in re.finditer(r"\\[\\{}]|[{}]", text):  # matches \{ and \} too, which are text and need no partner
        if brace[0] == "{":
            opened.append(brace.start())
        elif brace[0] == "}" and opened:
            start = opened.pop()
            # An inner box closes before the outer one, so the box that closes last need not be the last to start.
            if text.endswith(r"\boxed", 0, start) and (last is None or start > last[0]):
                last = (start, text[start + 1 : brace.start()])
    # TeX takes a number without braces, too.
    for bare in re.finditer(r"\\boxed\s*(-?[0-9][0-9,.]*)", text):
        if last is None or bare.start(1) > last[0]:
            last = (bare.start(1), bare[1])
    return last
