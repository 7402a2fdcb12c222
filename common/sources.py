"""Rows of --dataset: the embedded task, JSONL and Parquet files, data sets on the Hugging Face Hub or ModelScope.

A row is (where, object). `where` is its place, and becomes the prompt's id: "train.jsonl:17" is a line of the file,
"train.parquet:row 17" and "owner/name/train:row 17" count rows from 1. What is wrong with a row is said with it.
"""

import importlib.util
import json
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from httpx2 import HTTPError  # what huggingface_hub raises without a connection
from huggingface_hub import dataset_info
from huggingface_hub.errors import HfHubHTTPError

from common import embedded, json_lines
from common.errors import BadInput, refuse_all, say
from common.grading import last_box

Row = tuple[str, dict]

FORMS = "arithmetic, gsm8k, gsm8k:FOLDER, math, dapo, a .jsonl or .parquet file, or owner/name[:CONFIG][@SPLIT]"
ON_HUB = {  # built-in name and split -> where it is on the Hugging Face Hub, and on ModelScope
    ("gsm8k", "train"): ("openai/gsm8k:main", "AI-ModelScope/gsm8k:main"),
    ("gsm8k", "test"): ("openai/gsm8k:main", "AI-ModelScope/gsm8k:main"),
    ("math", "train"): ("DigitalLearningGmbH/MATH-lighteval", "AI-ModelScope/MATH-lighteval"),  # 7500 problems
    ("math", "test"): ("HuggingFaceH4/MATH-500", "AI-ModelScope/MATH-500"),  # none of them among the 7500
    ("dapo", "train"): ("BytedTsinghua-SIA/DAPO-Math-17k", "AI-ModelScope/DAPO-Math-17k"),
}
BUILT_IN = {  # name -> which of its columns hold the fields, where they have another name
    "arithmetic": {},
    "gsm8k": {},
    "math": {"prompt": "problem"},
    "dapo": {"answer": "reward_model.ground_truth"},
}
FIELDS = ("prompt", "answer", "solution", "id")


def kind(spec: str) -> str:
    """The built-in name of a SPEC, "" for a file or a name on the Hub."""
    name, _, folder = spec.partition(":")
    return name if name in BUILT_IN and (name == "gsm8k" or not folder) else ""


def has_test(spec: str) -> bool:
    """Whether the data set has a test split that is known without a look at it."""
    return spec == "arithmetic" or (kind(spec), "test") in ON_HUB


def columns(spec: str, flags: tuple[str, ...]) -> dict[str, str]:
    """Field -> column of a SPEC: its own for a built-in name, else what --columns says. Raises BadInput."""
    if kind(spec):
        return BUILT_IN[kind(spec)]
    given: dict[str, str] = {}
    for flag in flags:
        field, _, column = flag.partition("=")
        if field not in FIELDS or not column or field in given:
            names = ", ".join(f"{field}=COLUMN" for field in FIELDS)
            raise BadInput(f'--columns "{flag}": expected {names}, each once at most')
        given[field] = column
    return given


def read(spec: str, split: str, hub: str, flag: str = "--dataset") -> list[Row]:
    """All rows of a SPEC (FORMS says which there are); a file is a split of its own. Raises BadInput."""
    if spec == "arithmetic":
        return [(f"arithmetic/{split}:{i}", row) for i, row in enumerate(embedded.problems(split))]
    if spec.endswith((".jsonl", ".parquet")):
        return read_jsonl(Path(spec)) if spec.endswith(".jsonl") else read_parquet(Path(spec))
    if spec.startswith("gsm8k:"):
        return collect(read_jsonl(Path(spec.removeprefix("gsm8k:")) / f"{split}.jsonl"), gsm8k_row)
    name = spec
    if kind(spec):
        if (spec, split) not in ON_HUB:
            known = ", ".join(other for name, other in ON_HUB if name == spec)
            raise BadInput(f'{flag} {spec}: has no split "{split}" (it has: {known})')
        name = ON_HUB[spec, split][hub == "modelscope"]
    parts = re.fullmatch(r"([\w.-]+/[\w.-]+)(?::([\w.-]+))?(?:@([\w.:%\[\]+-]+))?", name)
    if not parts or Path(spec).exists():
        raise BadInput(f'{flag} "{spec}": expected {FORMS}')
    rows = read_hub(parts[1], parts[2], parts[3] or split, hub, flag)
    if spec == "gsm8k":
        return collect(rows, gsm8k_row)
    return {"math": boxed_answers, "dapo": without_repeats}.get(spec, list)(rows)


def collect(rows: Iterable[Row], make: Callable[[str, dict], Any]) -> list:
    """make(where, row) of all rows; what is wrong with the first five bad ones becomes one BadInput."""
    made, errors = [], []
    for where, row in rows:
        try:
            made.append(make(where, row))
        except BadInput as error:
            if error.code != "bad-input":  # not about this row alone
                raise
            errors.append(str(error))
    refuse_all(errors)
    return made


def gsm8k_row(where: str, row: dict) -> Row:
    """A raw GSM8K row: the answer is what follows ####; calculator marks <<...>> leave the solution."""
    working = row.get("answer")
    if not isinstance(working, str):
        return where, row  # refused as in any other data set
    if "####" not in working:
        raise BadInput(f'{where}: no "####" in "answer"')
    answer = working.rpartition("####")[2].strip()
    # Each mark ends before the next begins: searched for beyond it, a row of nothing but "<<" takes hours.
    return where, {**row, "answer": answer, "solution": re.sub(r"<<[^<\n]*?>>", "", working)}


def boxed_answers(rows: Iterable[Row]) -> list[Row]:
    """MATH: without an "answer" it is in the last box of the solution. Rows without either leave, and are counted."""
    kept, total = [], 0
    for where, row in rows:
        box = last_box(row.get("solution", "").replace(r"\fbox", r"\boxed"))
        if "answer" in row or box:
            kept.append((where, row if "answer" in row else {**row, "answer": box[1]}))
        total += 1
    if len(kept) < total:
        say(f"math: left out {total - len(kept)} of {total} problems: no answer in a box")
    return kept


def without_repeats(rows: Iterable[Row]) -> list[Row]:
    """DAPO-Math-17k: its 17 thousand prompts were uploaded a hundred times over, 1.8 million rows; the first stay."""
    first, total = {}, 0
    for where, row in rows:
        first.setdefault(json.dumps(row.get("prompt")), (where, row))
        total += 1
    if len(first) < total:
        say(f"dapo: left out {total - len(first)} of {total} rows that repeat another one's prompt")
    return list(first.values())


def lookup(row: dict, column: str, missing: Any = None) -> Any:
    """row["a"]["b"] for the column "a.b", unless there is one of that very name; `missing` where there is none."""
    outer, _, inner = column.partition(".")
    if column in row or not isinstance(row.get(outer), dict):
        return row.get(column, missing)
    return lookup(row[outer], inner, missing)


def refuse_repeated_ids(rows: list[Row], column: str) -> None:
    """Rows that have an id have one of their own. Raises BadInput."""
    first, errors = {}, []
    for where, row in rows:
        place = where.rpartition(":")[2]
        place = place if place.startswith("row") else f"line {place}"
        own = lookup(row, column)
        if own is not None and first.setdefault(str(own), place) != place:
            errors.append(f'{where}: duplicate id "{own}" (first at {first[str(own)]})')
    refuse_all(errors)


def read_jsonl(path: Path) -> list[Row]:
    """(file:line, object) of each row. Raises BadInput."""
    rows, errors = [], []
    for number, row in json_lines.read(path):
        try:
            json.dumps(row, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:  # half of a surrogate pair is valid JSON, and no text for a tokenizer
            errors.append(f"{path}:{number}: invalid JSON: {first_line(error)}")
        rows.append((f"{path}:{number}", row))
    refuse_all(errors)
    if not rows:
        raise BadInput(f"{path}: contains no rows")
    return rows


def read_parquet(path: Path) -> list[Row]:
    """(file:row N, object) of each row, from row 1."""
    import pyarrow  # half a second to import, and only this source needs it
    from pyarrow import parquet

    if not path.is_file():
        raise BadInput(f"{path}: file not found")
    try:
        rows = [row for batch in parquet.ParquetFile(path).iter_batches() for row in batch.to_pylist()]
    except (pyarrow.ArrowInvalid, OSError) as error:
        raise BadInput(f"{path}: cannot be read as Parquet: {first_line(error)}") from None
    if not rows:
        raise BadInput(f"{path}: contains no rows")
    return [(f"{path}:row {number}", row) for number, row in enumerate(rows, start=1)]


def read_hub(name: str, config: str | None, split: str, hub: str, flag: str) -> Iterator[Row]:
    """(name/split:row N, object) of each row of a data set on a hub."""
    import datasets  # a second to import, and only this source needs it

    found = download(name, "dataset", flag) if hub == "modelscope" else name
    cached = Path(datasets.config.HF_DATASETS_CACHE, name.replace("/", "___")).is_dir()
    try:
        if hub == "huggingface" and not cached:
            dataset_info(name, timeout=5)  # one request; load_dataset would retry for half a minute
        table = datasets.load_dataset(found, config, split=split)
    except (OSError, ValueError, HTTPError, HfHubHTTPError, datasets.exceptions.DatasetsError) as error:
        raise BadInput(f"{flag} {name}: cannot be loaded from the Hub: {first_line(error)}") from None
    number = 0
    for batch in table.iter(batch_size=1000):  # fifteen times as fast as row by row
        for values in zip(*batch.values()):
            number += 1
            yield f"{name}/{split}:row {number}", dict(zip(batch, values))
    if not number:
        raise BadInput(f"{flag} {name}: contains no rows")


def download(name: str, what: str, flag: str) -> str:
    """The folder of a "model" or "dataset" of ModelScope, downloaded if it is not there yet. Raises BadInput."""
    if importlib.util.find_spec("modelscope") is None:
        raise BadInput("--hub modelscope: not installed; pip install modelscope")
    import modelscope  # optional
    from modelscope.hub.errors import HubError

    fetch = modelscope.snapshot_download if what == "model" else modelscope.dataset_snapshot_download
    try:
        return fetch(name)
    except (OSError, ValueError, HubError) as error:
        raise BadInput(f"{flag} {name}: cannot be downloaded from ModelScope: {first_line(error)}") from None


def first_line(error: BaseException) -> str:
    """What an exception says, in one line."""
    return str(error).strip().split("\n")[0]
