"""Data as others have it: JSON lines, JSON arrays, CSV, Parquet, folders of such files, and conversations in rows.

What is not read is refused with the command or the flag that makes it readable. The built-in data sets do without this
module, so it is imported where it is needed.
"""

import csv
import json
from pathlib import Path
from typing import Any

from pyarrow import ArrowInvalid, parquet

from common.data import json_lines
from common.data.sources import FILES, Row, first_line
from common.data.templates import is_chat
from common.errors import BadInput, refuse_all

PRINT = 'import json; [print(json.dumps({"prompt": line.strip()})) for line in open("PATH") if line.strip()]'
COMMANDS = {  # ending of a file that is not read -> the command that makes one that is
    ".txt": f"python -c '{PRINT}' > rows.jsonl makes each line a prompt",
    ".arrow": """python -c 'import datasets; datasets.load_from_disk("FOLDER").to_parquet("rows.parquet")'""",
    ".gz": "gunzip PATH",
    ".zst": "unzstd PATH",
    ".zip": "unzip PATH",
    ".xlsx": "save it as .csv",
}
SPLITS = ("train", "test", "valid", "dev", "eval")  # a file whose name begins with one holds that split
# Columns that --columns is proposed for where a row has no prompt.
PROPOSED = {"prompt": ("problem", "instruction", "query", "input", "text"), "solution": ("output", "completion")}


def read(path: Path, split: str) -> list[Row]:
    """(file:line, object) of each JSON line, (file:row N, object) of any other row. Raises BadInput.

    Of a folder the files for the split are read, in the order of their names, or all files if no name begins with one.
    """
    if path.is_dir():
        return [row for file in files_of(path, split) for row in read(file, split)]
    if not path.is_file():
        raise BadInput(f"{path}: file not found")
    if path.suffix not in FILES:
        command = COMMANDS.get(path.suffix, f"expected {', '.join(FILES)}").replace("PATH", str(path))
        raise BadInput(f"{path}: is not read as it is; {command.replace('FOLDER', str(path.parent))}")
    try:
        if path.suffix == ".parquet":
            values = list(map(without_nulls, parquet.ParquetFile(path).read().to_pylist()))
        elif path.suffix in (".csv", ".tsv"):
            values = read_table(path)
        else:
            values = read_array(path)
    except (ArrowInvalid, OSError, ValueError, csv.Error) as error:
        kind = {".csv": "CSV in UTF-8", ".tsv": "TSV in UTF-8", ".parquet": "Parquet"}.get(path.suffix, "JSON")
        cure = f"; iconv -f WINDOWS-1252 -t UTF-8 {path} > utf8.csv" if isinstance(error, UnicodeDecodeError) else ""
        raise BadInput(f"{path}: cannot be read as {kind}: {first_line(error)}{cure}") from None
    if values is None:
        hint = "; expected an array of objects, or one object a line" if path.suffix == ".json" else ""
        rows = [(f"{path}:{number}", row) for number, row in json_lines.read(path, hint)]
    else:
        rows = [(f"{path}:row {number}", row) for number, row in enumerate(values, start=1)]
        refuse_all([f"{at}: expected an object, got {type(row).__name__}" for at, row in rows if type(row) is not dict])
    if not rows:
        raise BadInput(f"{path}: contains no rows")
    return rows


def without_nulls(row: dict) -> dict:
    """The row without null keys of its messages: in a table each has all keys that any has, such as "tool_calls"."""
    is_message = lambda item: isinstance(item, dict) and "role" in item
    there = lambda item: {k: v for k, v in item.items() if v is not None} if is_message(item) else item
    return {name: [*map(there, value)] if isinstance(value, list) else value for name, value in row.items()}


def files_of(folder: Path, split: str) -> list[Path]:
    """The files in a folder that hold rows of the split. Raises BadInput."""
    inside = sorted(folder.iterdir())
    if any(path.suffix == ".arrow" for path in inside):  # a data set that save_to_disk wrote
        return [next(path for path in inside if path.suffix == ".arrow")]  # read() refuses it
    files = [path for path in inside if path.suffix in FILES and not path.name.startswith("dataset_")]
    named = any(path.name.startswith(SPLITS) for path in files)
    chosen = [path for path in files if not named or path.name.startswith(split)]
    if len({path.suffix for path in chosen}) != 1:
        wanted = f"files of one kind ({', '.join(FILES)}){f' for {split}' if named else ''}"
        found = ", ".join(path.name + "/" * path.is_dir() for path in inside[:8]) or "nothing"
        raise BadInput(f"{folder}: expected {wanted}, found {found}; name a file, or a folder inside")
    return chosen


def read_array(path: Path) -> list | None:
    """The array that a JSON file holds, or None if it does not begin like one. Raises ValueError."""
    data = path.read_bytes()
    if not data.lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"["):
        return None
    array = json_lines.parse(data)
    json.dumps(array, ensure_ascii=False).encode()  # refuses half a surrogate pair, which no tokenizer takes
    return array


def read_table(path: Path) -> list[dict]:
    """Rows of texts. The header shows what separates columns: comma, tab or semicolon. Raises ValueError, csv.Error."""
    csv.field_size_limit(2**31 - 1)  # a text may be longer than the module's 131,072 characters
    with open(path, encoding="utf-8-sig", newline="") as file:
        separator = max(",\t;", key=file.readline().count)
        file.seek(0)
        table, rows = csv.DictReader(file, delimiter=separator, strict=True), []
        for number, row in enumerate(table, start=1):
            if None in row or None in row.values():
                raise ValueError(f"row {number}: expected {len(table.fieldnames)} values, as in the header")
            rows.append(row)
        return rows


def missing(where: str, row: dict, column: str, is_usual: bool) -> BadInput:
    """The error for a row without a column. If is_usual, no --columns named it, and the message proposes some."""
    cure, chosen = "", {field: next((n for n in names if row.get(n)), None) for field, names in PROPOSED.items()}
    if is_usual and chosen["prompt"]:
        cure = "; --columns " + " ".join(f"{field}={name}" for field, name in chosen.items() if name)
        cure += ', which leaves out "input"' if chosen["prompt"] == "instruction" and row.get("input") else ""
    return BadInput(f'{where}: missing key "{column}" (found: {", ".join(row) or "nothing"}){cure}')


def split_conversation(turns: Any, solution: Any) -> tuple[Any, Any]:
    """Prompt and solution: if the assistant's message is last, the messages before it and its text.

    Otherwise, and for the solution if the row has one of its own, what was given.
    """
    roles = {"human": "user", "gpt": "assistant"}
    if isinstance(turns, list) and all(isinstance(turn, dict) and {"from", "value"} <= turn.keys() for turn in turns):
        turns = [{"role": roles.get(str(turn["from"]), turn["from"]), "content": turn["value"]} for turn in turns]
    if is_chat(turns) and turns[-1]["role"] == "assistant":
        return turns[:-1], turns[-1]["content"] if solution is None else solution
    return turns, solution


def keep_files(feature: Any) -> None:
    """Let a data set of the Hub give its images as files, also those in lists and objects, instead of decoding all."""
    if isinstance(feature, dict | list | tuple):
        for inner in feature.values() if isinstance(feature, dict) else feature:
            keep_files(inner)
    elif hasattr(feature, "feature"):  # a list
        keep_files(feature.feature)
    elif type(feature).__name__ == "Image":
        feature.decode = False
