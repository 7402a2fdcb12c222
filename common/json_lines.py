"""JSON of files and services that may be broken or hostile: read in one place, refused in one line."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from common.errors import BadInput, refuse_all

DEEPEST = 100  # lists and objects inside each other: what is copied, compared or written later goes through all of them


def parse(data: bytes | str, constant: Callable[[str], Any] = float) -> Any:
    """The value. Raises ValueError, which says in a few words why there is none.

    Refused beside what is no JSON: a key that is there twice, for nobody knows which of both is meant, and values
    nested over DEEPEST. constant: what becomes of NaN and Infinity.
    """
    try:
        text = data if isinstance(data, str) else data.decode("utf-8")
        value = json.loads(text, object_pairs_hook=unique, parse_constant=constant)
    except UnicodeDecodeError as error:
        raise ValueError(f"not valid UTF-8 at byte {error.start + 1}") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"invalid JSON at {place(error)}: {error.msg}") from None
    except (ValueError, RecursionError) as error:  # a number of 5000 digits, 100,000 brackets
        raise ValueError(f"invalid JSON: {str(error).strip()}") from None
    if text.count("[") + text.count("{") > DEEPEST and deeper(value, DEEPEST):
        raise ValueError(f"invalid JSON: nested more than {DEEPEST} deep")
    return value


def place(error: json.JSONDecodeError) -> str:
    """Where it is wrong: the line is said of texts of several lines alone."""
    return f"line {error.lineno}, column {error.colno}" if error.lineno > 1 else f"column {error.colno}"


def unique(pairs: list[tuple[str, Any]]) -> dict:
    """The object of these keys and values. Raises ValueError."""
    made = dict(pairs)
    if len(made) < len(pairs):
        seen: set[str] = set()
        twice = next(name for name, _ in pairs if name in seen or seen.add(name))
        raise ValueError(f'the key "{twice[:80]}" is there twice')
    return made


def deeper(value: Any, levels: int) -> bool:
    """Whether the value has more levels of lists and objects than these. Not by recursion: that is what it guards."""
    level = [value]
    for _ in range(levels):
        level = [part for part in level if isinstance(part, (dict, list))]
        level = [part for whole in level for part in (whole.values() if isinstance(whole, dict) else whole)]
    return any(isinstance(part, (dict, list)) for part in level)


def read(path: Path, hint: str = "", torn: bool = False, code: str = "bad-input") -> list[tuple[int, dict]]:
    """(line number, object) of each line; they end at "\\n" alone, blank ones are skipped but counted.

    hint: follows what is said of a line that is no JSON. torn: a last line without an end was cut off, and is none.
    Raises BadInput, naming the first five bad lines.
    """
    if not path.is_file():
        raise BadInput(f"{path}: file not found")
    rows, errors = [], []
    lines = path.read_bytes().removeprefix(b"\xef\xbb\xbf").split(b"\n")
    for number, line in enumerate(lines[:-1] if torn else lines, start=1):
        try:
            row = parse(line) if line.strip() else None
        except ValueError as error:
            errors.append(f"{path}:{number}: {error}{hint}")
            continue
        if isinstance(row, dict):
            rows.append((number, row))
        elif line.strip():
            errors.append(f"{path}:{number}: expected an object, got {type(row).__name__}")
    refuse_all(errors, code)
    return rows


def read_value(path: Path, code: str = "bad-input") -> Any:
    """What a whole file holds. Raises BadInput."""
    try:
        return parse(path.read_bytes().removeprefix(b"\xef\xbb\xbf"))
    except (OSError, ValueError) as error:
        raise BadInput(f"{path}: {error}", code=code) from None


def read_object(path: Path, code: str = "bad-input") -> dict:
    """The object that a whole file holds. Raises BadInput."""
    found = read_value(path, code)
    if not isinstance(found, dict):
        raise BadInput(f"{path}: expected an object, got {type(found).__name__}", code=code)
    return found


def is_number(value: Any) -> bool:
    """Whether it is a number that arithmetic can take: no bool, and no integer that is larger than any float."""
    return isinstance(value, float) or is_count(abs(value) if type(value) is int else None)


def is_count(value: Any) -> bool:
    """Whether it is a whole number from 0 to 2^53, up to which a float holds each."""
    return type(value) is int and 0 <= value <= 2**53
