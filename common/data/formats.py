"""Files of rows: JSON lines, JSON arrays, CSV, Parquet, and folders of such files.

Why not datasets.load_dataset("json", "csv" or "parquet")? The errors of version 5.2 do not name the line. It turns
texts that look like dates into datetimes, large integers into floats, and 007 in a CSV file into 7. It also copies each
file into a cache in the home folder. sources.py uses it for the Hub.
"""

import csv
import os
from collections import Counter
from pathlib import Path
from typing import Any

from common.data import json_lines
from common.data.conversations import looks_like
from common.data.rows import Row, collect, did_you_mean, first_line, numbered
from common.errors import BadInput

FILES = (".jsonl", ".json", ".csv", ".tsv", ".parquet")  # endings of the files that can be read
SPLITS = ("train", "test", "valid", "dev", "eval")  # a file whose name begins with one holds that split


def read(path: Path, split: str = "train") -> list[Row]:
    """Rows of a file, or of the files for the split in a folder, in the order of their names. Raises BadInput."""
    if path.is_dir():
        return [row for file in files_for(path, split) for row in read_file(file)]
    return read_file(path)


def files_for(folder: Path, split: str) -> list[Path]:
    """The files in a folder that hold rows of the split: all of them if no name begins with a split."""
    inside = sorted(folder.iterdir())
    # Reading these files alone would lose what the folder's state.json says about their order.
    if any(path.suffix == ".arrow" for path in inside):
        convert = f'datasets.load_from_disk("{folder}").to_parquet("rows.parquet")'
        raise BadInput(f"{folder}: a data set of save_to_disk cannot be read; {convert} makes a file that can")
    files = [path for path in inside if path.suffix in FILES]
    has_splits = any(path.name.startswith(SPLITS) for path in files)
    if has_splits:
        files = [path for path in files if path.name.startswith(split)]
    # rows.csv beside rows.jsonl may be the same rows again.
    if len({path.suffix for path in files}) != 1:
        wanted = f"files of one kind ({', '.join(FILES)})"
        if has_splits:
            wanted += f" for {split}"
        names = ", ".join(path.name for path in inside[:8]) or "nothing"
        raise BadInput(f"{folder}: expected {wanted}, found {names}; name a file, or a folder inside")
    return files


def read_file(path: Path) -> list[Row]:
    """(file:line, object) of each JSON line, (file:row N, object) of any other row. Raises BadInput."""
    if not path.is_file():
        raise BadInput(f"{path}: file not found{similar_file(path)}")
    if path.suffix not in FILES:
        raise BadInput(f"{path}: this kind of file cannot be read; expected {', '.join(FILES)}")
    try:
        values = read_values(path)
    except (OSError, ValueError, csv.Error) as error:  # Arrow's errors are ValueErrors
        raise BadInput(f"{path}: cannot be read as {path.suffix[1:].upper()}: {first_line(error)}") from None
    # Errors name a line where there is one, and otherwise count the rows.
    if values is None:
        hint = "; expected an array of objects, or one object a line" if path.suffix == ".json" else ""
        rows = [(f"{path}:{number}", row) for number, row in json_lines.read(path, hint)]
    else:
        rows = collect(numbered(f"{path}:row ", values), as_object)
    if not rows:
        raise BadInput(f"{path}: contains no rows")
    return rows


def as_object(where: str, value: Any) -> Row:
    """A row of a JSON array. Raises BadInput if it is something else."""
    if not isinstance(value, dict):
        raise BadInput(f"{where}: expected an object, got {type(value).__name__}")
    return where, value


def similar_file(path: Path) -> str:
    """A question for the end of an error about a path that is not there: the name in its folder that it resembles."""
    return did_you_mean(path.name, os.listdir(path.parent)) if path.parent.is_dir() else ""


def read_values(path: Path) -> list | None:
    """The rows of a table, or the values of a JSON array. None for a file of JSON lines, whatever its ending."""
    if path.suffix == ".parquet":
        # Imported here because it takes 0.3 s, and only this format needs it.
        from pyarrow import parquet

        return [without_nulls(row) for row in parquet.ParquetFile(path).read().to_pylist()]
    if path.suffix in (".csv", ".tsv"):
        return read_table(path)
    # Many files of JSON lines end in .json, and some arrays in .jsonl, so the first character decides.
    data = path.read_bytes()
    if not data.removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"["):
        return None
    return json_lines.parse_text(data)


def read_table(path: Path) -> list[dict]:
    """Rows whose values are all texts. The header shows what separates columns: comma, tab or semicolon."""
    # A text may be longer than the 131,072 characters that the module allows.
    csv.field_size_limit(2**31 - 1)
    with open(path, encoding="utf-8-sig", newline="") as file:
        separator = max(",\t;", key=file.readline().count)
        file.seek(0)
        table = csv.DictReader(file, delimiter=separator, strict=True)
        try:
            return table_rows(table)
        except csv.Error as error:
            wrong = f'line {table.reader.line_num}: {error}; write a text with quotes as "a ""quoted"" word"'
        if separator != "\t":
            raise ValueError(wrong)
        # Many tools quote nothing between tabs, and there a quote is a character like any other. csv and pandas, which
        # are not strict, would take the quotes out of the text.
        file.seek(0)
        rows = table_rows(csv.DictReader(file, delimiter=separator, quoting=csv.QUOTE_NONE))
        if any(is_quoted(text) for row in rows for text in [*row, *row.values()]):
            raise ValueError(f"{wrong}; some fields of the file are quoted, and others have quotes in them")
        return rows


def table_rows(table: csv.DictReader) -> list[dict]:
    """All rows of a table.

    Raises ValueError for a row with more or fewer values than the header, and for a header that names a column twice.
    """
    # Some spreadsheets write empty columns behind the last one. Nobody can ask for those.
    for name, count in Counter(table.fieldnames or []).items():
        if name and count > 1:
            raise ValueError(f'the header names the column "{name}" {count} times')
    rows = []
    for number, row in enumerate(table, start=1):
        # DictReader gives surplus values the key None, and absent ones the value None.
        if None in row or None in row.values():
            raise ValueError(f"row {number}: expected {len(table.fieldnames)} values, as in the header")
        rows.append(row)
    return rows


def is_quoted(text: str) -> bool:
    """Whether a field looks as if a writer that quotes had put it between quotes."""
    return len(text) > 1 and text.startswith('"') and text.endswith('"')


def without_nulls(row: dict) -> dict:
    """The row without the null keys in its messages and tools, at any depth.

    In a table each object has all the keys that any object of the column has: a call, the arguments of all tools. A
    chat template would take a null for a value.
    """
    return {name: pruned(value) if name == "tools" or looks_like(value) else value for name, value in row.items()}


def pruned(value: Any) -> Any:
    """The value without null keys of its objects."""
    if isinstance(value, dict):
        return {key: pruned(inner) for key, inner in value.items() if inner is not None}
    return [pruned(entry) for entry in value] if isinstance(value, list) else value
