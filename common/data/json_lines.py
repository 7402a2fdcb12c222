"""JSON of files and services, whoever wrote it. Whatever is wrong with it becomes one line that says where."""

import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

from common.errors import BadInput, refuse_all


def parse(data: bytes | str) -> Any:
    """The value of a JSON text. Raises ValueError."""
    try:
        text = data if isinstance(data, str) else data.decode("utf-8-sig")
        return json.loads(text)
    except UnicodeDecodeError as error:
        raise ValueError(f"not valid UTF-8 at byte {error.start + 1}") from None
    except json.JSONDecodeError as error:
        line = f"line {error.lineno}, " if error.lineno > 1 else ""
        raise ValueError(f"invalid JSON at {line}column {error.colno}: {error.msg}") from None
    # A number of 5000 digits, or 100,000 brackets.
    except (ValueError, RecursionError) as error:
        raise ValueError(f"invalid JSON: {error}") from None


def parse_text(data: bytes) -> Any:
    """parse() for values whose texts go to a tokenizer, which takes no half of a surrogate pair. Raises ValueError."""
    value = parse(data)
    json.dumps(value, ensure_ascii=False).encode()
    return value


def read(
    path: Path, hint: str = "", torn: bool = False, code: str = "bad-input", names: Collection[str] | None = None
) -> list[tuple[int, dict]]:
    """(line number, object) of each line. Only "\\n" ends a line. Blank lines are skipped but counted.

    hint: text that follows the message about a line that is not JSON. torn: ignore a last line without an end, which
    a crash has cut off. names: the values to keep, None keeps all; only one line at a time is in memory whole. Raises
    BadInput, which quotes the first five errors.
    """
    if not path.is_file():
        raise BadInput(f"{path}: file not found")
    rows = []
    errors = []
    # In binary mode, because a text file would also split at a lone carriage return.
    with open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip() or (torn and not line.endswith(b"\n")):
                continue
            try:
                row = parse_text(line.removesuffix(b"\n"))
            except ValueError as error:
                errors.append((f"{path}:{number}", f"{error}{hint}"))
                continue
            if not isinstance(row, dict):
                errors.append((f"{path}:{number}", f"expected an object, got {type(row).__name__}"))
            elif names is not None:
                row = {name: row[name] for name in names if name in row}
            rows.append((number, row))
    refuse_all(errors, code)
    return rows


def read_value(path: Path) -> Any:
    """The value that a whole file holds. Raises BadInput."""
    try:
        return parse(path.read_bytes())
    except (OSError, ValueError) as error:
        raise BadInput(f"{path}: {error}") from None


def read_object(path: Path) -> dict:
    """The object that a whole file holds. Raises BadInput."""
    value = read_value(path)
    if not isinstance(value, dict):
        raise BadInput(f"{path}: expected an object, got {type(value).__name__}")
    return value


def is_number(value: Any) -> bool:
    """True for a number that arithmetic can take: not a bool, and not an integer above 2^53."""
    return isinstance(value, float) or (type(value) is int and is_count(abs(value)))


def is_count(value: Any) -> bool:
    """True for a whole number from 0 to 2^53. A float holds each of them exactly."""
    return type(value) is int and 0 <= value <= 2**53


def objects_in(text: str) -> list[dict]:
    """All JSON objects in a text that are not inside another one."""
    decoder = json.JSONDecoder()
    found = []
    start = text.find("{")
    while start >= 0:
        try:
            value, end = decoder.raw_decode(text, start)
            found.append(value)
        except ValueError:
            end = start + 1
        except RecursionError:
            # Nested a thousand times. Each of its parts would be, too.
            break
        start = text.find("{", end)
    return found
