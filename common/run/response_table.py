"""The table of responses that --track gets: a part of each file in rollouts/, short enough for a tracker's page."""

import itertools
import json
import math
import re
from dataclasses import dataclass
from pathlib import Path

from common.data.json_lines import is_number
from common.run import traces

ROWS = 64  # responses of a step
CELL = 2000  # characters of a text
TOTAL = 20_000_000  # characters of the texts of all tables of a run

TEXTS = ("prompt", "response", "extracted", "reference")  # columns whose texts may be long
BEFORE_REWARDS = ("step", *TEXTS)
AFTER_REWARDS = ("score", "advantage", "finish_reason", "weight_version")
MARKDOWN = re.compile(r"[\\`*_{}\[\]<>&|!#~$^]")  # characters that Markdown or HTML may take for their own

Cell = str | int | float | None


@dataclass(frozen=True)
class Table:
    """Responses of one step."""

    step: int
    columns: list[str]
    rows: list[list[Cell]]  # all cells of a column are texts, or all are numbers; or they are None


def characters_of_each(tables: int) -> int:
    """How many characters each of a run's tables may have. Long runs have short tables, and none is left out."""
    return TOTAL // max(1, tables)


def read(path: Path, step: int, responses: int, characters: int) -> Table:
    """The table of a step, from its file in rollouts/: the first responses, and a last row that counts those left out.

    responses: how many the file has. characters: how many all texts of the table may have together, without the notes
    about what is left out.
    """
    longest = min(CELL, characters // len(TEXTS))  # so that one row fits in any case
    left = characters
    rows = []
    with open(path, encoding="utf-8") as file:
        # The rest is not read, because a step of long responses has gigabytes.
        for line in itertools.islice(file, ROWS):
            row = cells(json.loads(line))
            left -= sum(min(longest, len(row[name])) for name in TEXTS if row[name] is not None)
            if left < 0:
                break
            for name in TEXTS:
                row[name] = shortened(row[name], longest)
            rows.append(row)
    rewards = dict.fromkeys(name for row in rows for name in row if name.startswith("reward/"))
    columns = [*BEFORE_REWARDS, *rewards, *AFTER_REWARDS]
    if len(rows) < responses:
        rows.append({"prompt": f"{responses - len(rows)} of {responses} responses are only in rollouts/{path.name}"})
    for row in rows:
        row["step"] = step
    return Table(step, columns, [[row.get(name) for name in columns] for row in rows])


def cells(row: dict) -> dict[str, Cell]:
    """The cells of a row of rollouts/ by their columns. Texts have their full length."""
    shown = {
        "prompt": text(row["prompt"]),
        "response": text(row["response"]),
        "extracted": text(row["extracted"]),
        "reference": text(row["answer"]),
        "score": number(traces.score(row)),
        "advantage": number(traces.advantage(row)),
        "finish_reason": row["finish_reason"],
        # The oldest weights: the engine may get new ones while it samples a response.
        "weight_version": min(row["weight_versions"], default=None),
    }
    parts = traces.info(row).get("parts")
    # A user's reward may have written parts of its own.
    for name, score in parts.items() if isinstance(parts, dict) else ():
        if is_number(score):
            # Named as its metrics are. Some trackers read a dot in the name of a column as a path.
            shown["reward/" + re.sub(r"\W+", "-", name).strip("-")] = number(score)
    return shown


def number(value: float | None) -> float | None:
    """A number for a cell. NaN and infinity are no JSON, and pages of trackers cannot read them."""
    return float(value) if value is not None and math.isfinite(value) else None


def text(value) -> str | None:
    """A text, or the value of a grader, without halves of surrogate pairs, which cannot be encoded."""
    if value is None:
        return None
    return str(value).encode("utf-8", "backslashreplace").decode()


def shortened(value: str | None, longest: int) -> str | None:
    """A text without its middle if it is too long. Its end stays, because that is where the answer of a response is."""
    if value is None or len(value) <= longest:
        return value
    half = longest // 2
    left_out = len(value) - 2 * half
    return f"{value[:half]} [... {left_out} characters left out ...] {value[len(value) - half :]}"


def markdown(table: Table) -> str:
    """The table in Markdown. Nothing in a cell is markup."""
    lines = [table.columns, ["---"] * len(table.columns)]
    lines += [[markdown_cell(value) for value in row] for row in table.rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def markdown_cell(value: Cell) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.6g}"
    escaped = MARKDOWN.sub(lambda match: f"&#{ord(match[0])};", str(value))
    # A line end would end the row.
    return re.sub(r"\r\n|\r|\n", "<br>", escaped)
