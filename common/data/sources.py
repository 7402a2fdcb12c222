"""Rows of --dataset: the embedded task, files (see formats.py), data sets of the Hugging Face Hub and of ModelScope.

A row is (where, object). `where` names its place and becomes the prompt's id: "train.jsonl:17" is a line of the file,
"train.parquet:row 17" and "owner/name/train:row 17" count rows from 1. An error message begins with the place.
"""

import json
import os
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from huggingface_hub.errors import HTTPError  # raised without a connection; it is httpx's or httpx2's

from common.data import arithmetic
from common.errors import BadInput, refuse_all, say
from common.rewards.grading import last_box

Row = tuple[str, dict]
GENERATED = ("sums", "gcd", "reverse", "maze", "calculator", "guess", "squares")  # tasks.py has their problems
WITH_TEST_SPLIT = ("arithmetic", "gsm8k", "math", "geo3k", "reasoning-gym", *GENERATED)
FILES = (".jsonl", ".json", ".csv", ".tsv", ".parquet")  # endings of the files that can be read
FORMS = f"arithmetic, {', '.join(GENERATED)}, gsm8k, gsm8k:FOLDER, math, dapo, geo3k, reasoning-gym:TASK, "
FORMS += f"a {', '.join(FILES)} file or a folder of them, or owner/name[:CONFIG][@SPLIT]"
COLUMN_NAMES = {"prompt", "answer", "solution", "images", "chosen", "rejected", "id"}
MODELSCOPE = "modelscope:"  # prefix of a name that comes from ModelScope
ON_HUB = {  # built-in name and split -> its name on the Hugging Face Hub, and on ModelScope
    ("gsm8k", "train"): ("openai/gsm8k:main", "AI-ModelScope/gsm8k:main"),
    ("gsm8k", "test"): ("openai/gsm8k:main", "AI-ModelScope/gsm8k:main"),
    ("math", "train"): ("DigitalLearningGmbH/MATH-lighteval", "AI-ModelScope/MATH-lighteval"),  # 7500 problems
    ("math", "test"): ("HuggingFaceH4/MATH-500", "AI-ModelScope/MATH-500"),  # none of them among the 7500
    ("geo3k", "train"): ("hiyouga/geometry3k", "hiyouga/geometry3k"),  # 2101 problems, each with an image
    ("geo3k", "test"): ("hiyouga/geometry3k", "hiyouga/geometry3k"),
    ("dapo", "train"): ("BytedTsinghua-SIA/DAPO-Math-17k", "AI-ModelScope/DAPO-Math-17k"),
}
COLUMNS = {  # built-in name -> columns
    "math": {"prompt": "problem"}, "geo3k": {"prompt": "problem"}, "dapo": {"answer": "reward_model.ground_truth"},
}  # fmt: skip


def kind(spec: str) -> str:
    """Name of the built-in data set that a SPEC stands for, or "" for a file or another name on a hub."""
    if spec in ("arithmetic", *GENERATED) or spec.startswith(("gsm8k:", "reasoning-gym:")):
        return spec.partition(":")[0]
    name = spec.removeprefix(MODELSCOPE)
    return name if (name, "train") in ON_HUB else ""


def columns(spec: str, flags: tuple[str, ...]) -> dict[str, str]:
    """Field -> column of a SPEC. A built-in data set has its own, any other has those of --columns. Raises BadInput."""
    if kind(spec):
        return COLUMNS.get(kind(spec), {})
    chosen = dict(flag.partition("=")[::2] for flag in flags)
    if not all(chosen.values()) or len(chosen) < len(flags) or chosen.keys() - COLUMN_NAMES:
        expected = "prompt=COLUMN, answer=COLUMN, solution=COLUMN, images=COLUMN, chosen=COLUMN, rejected=COLUMN, "
        raise BadInput(f'--columns "{" ".join(flags)}": expected {expected}id=COLUMN, each once')
    return chosen


def read(spec: str, split: str, flag: str = "--dataset") -> list[Row]:
    """All rows of a SPEC (see FORMS; a name on a hub may have the prefix modelscope:). Raises BadInput."""
    if spec == "arithmetic":
        return [(f"arithmetic/{split}:{i}", row) for i, row in enumerate(arithmetic.problems(split))]
    if spec in GENERATED:
        from common.data import tasks  # the embedded job does without it

        return [(f"{spec}/{split}:{i}", row) for i, row in enumerate(tasks.problems(spec, split))]
    if kind(spec) == "reasoning-gym":
        from common.data import reasoning_gym

        return [(f"{spec}/{split}:{i}", row) for i, row in enumerate(reasoning_gym.problems(spec, split, flag))]
    if not kind(spec) and (spec.endswith(FILES) or os.path.exists(spec)):
        return read_file(Path(spec), split)
    in_folder, folder = spec.startswith("gsm8k:"), Path(spec.removeprefix("gsm8k:"))
    rows = read_file(folder / f"{split}.jsonl") if in_folder else read_hub(spec, split, flag)
    clean = {"gsm8k": lambda rows: collect(rows, gsm8k_row), "math": boxed_answers, "dapo": without_repeats}
    return clean.get(kind(spec), list)(rows)


def collect(rows: Iterable[Row], make: Callable[[str, dict], Any]) -> list:
    """make(where, row) of all rows. Raises a single BadInput that names the first five bad rows."""
    made, errors = [], []
    for where, row in rows:
        try:
            made.append(make(where, row))
        except BadInput as error:
            if error.code != "bad-input":  # the error concerns more than this row
                raise
            errors.append(str(error))
    refuse_all(errors)
    return made


def gsm8k_row(where: str, row: dict) -> Row:
    """A row as GSM8K publishes it: the answer follows ####, and calculator marks <<...>> leave the solution."""
    working = str(row.get("answer"))
    if "####" not in working:
        raise BadInput(f'{where}: no "####" in "answer"')
    solution = re.sub(r"<<[^<\n]*?>>", "", working)
    return where, {**row, "answer": working.rpartition("####")[2].strip(), "solution": solution}


def boxed_answers(rows: Iterable[Row]) -> list[Row]:
    """MATH rows. Without an "answer", it is in the last box of the solution. Rows with neither are left out."""
    rows, kept = list(rows), []
    for where, row in rows:
        box = last_box(row.get("solution", "").replace(r"\fbox", r"\boxed"))
        if "answer" in row or box:
            kept.append((where, row if "answer" in row else {**row, "answer": box[1]}))
    if len(kept) < len(rows):
        say(f"math: left out {len(rows) - len(kept)} of {len(rows)} problems: no answer in a box")
    return kept


def without_repeats(rows: Iterable[Row]) -> list[Row]:
    """DAPO-Math-17k rows, each prompt once: the upload of 1.8 million rows repeats 17 thousand prompts 100 times."""
    first, repeats = {}, 0
    for where, row in rows:
        kept, _ = first.setdefault(json.dumps(row.get("prompt")), (where, row))
        repeats += kept != where
    if repeats:
        say(f"dapo: left out {repeats} rows that repeat another one's prompt")
    return list(first.values())


def lookup(row: dict, column: str, missing: Any = None) -> Any:
    """row["a"]["b"] for the column "a.b", or row["a.b"] if it exists. Returns `missing` where there is neither."""
    outer, _, inner = column.partition(".")
    if column in row or not isinstance(row.get(outer), dict):
        return row.get(column, missing)
    return lookup(row[outer], inner, missing)


def refuse_repeated_ids(rows: list[Row], column: str) -> None:
    """Raise BadInput if two rows have the same id. Rows without an id are allowed."""
    first, errors = {}, []
    for where, row in rows:
        own = lookup(row, column)
        before = where if own is None else first.setdefault(str(own), where)
        if before != where:
            file, _, place = before.rpartition(":")
            place = place if place.startswith("row") else f"line {place}"
            errors.append(f'{where}: duplicate id "{own}" (first at {place if where.startswith(file) else before})')
    refuse_all(errors)


def read_file(path: Path, split: str = "train") -> list[Row]:
    """Rows of a file, or of the files for the split in a folder. Raises BadInput."""
    from common.data import formats  # the built-in data sets do without it

    return formats.read(path, split)


def read_hub(spec: str, split: str, flag: str) -> Iterator[Row]:
    """(name/split:row N, object) of each row of a data set on the Hugging Face Hub, or on ModelScope."""
    import datasets  # takes a second, and only this source needs it

    from common.data import formats

    name, on_modelscope = spec.removeprefix(MODELSCOPE), spec.startswith(MODELSCOPE)
    if kind(spec):
        if (name, split) not in ON_HUB:
            raise BadInput(f'{flag} {spec}: has no split "{split}"')
        name = ON_HUB[name, split][on_modelscope]
    parts = re.fullmatch(r"([\w.-]+/[\w.-]+)(?::([\w.-]+))?(?:@([\w.:%\[\]+-]+))?", name)
    if not parts:
        raise BadInput(f'{flag} "{spec}": expected {FORMS}')
    name, config, split = parts[1], parts[2], parts[3] or split
    folder = download(MODELSCOPE + name, "dataset", flag) if on_modelscope else name
    try:
        table = datasets.load_dataset(folder, config, split=split)
    except (OSError, ValueError, HTTPError, datasets.exceptions.DatasetsError) as error:
        raise BadInput(f"{flag} {name}: cannot be loaded from the Hub: {first_line(error)}") from None
    if not len(table):
        raise BadInput(f"{flag} {name}: contains no rows")
    formats.keep_files(table.info.features)
    rows = (dict(zip(batch, values)) for batch in table.iter(1000) for values in zip(*batch.values()))
    for number, row in enumerate(rows, start=1):  # read in batches, which is sixty times as fast as row by row
        yield f"{':'.join(filter(None, (name, config)))}/{split}:row {number}", formats.without_nulls(row)


def download(spec: str, what: str, flag: str) -> str:
    """Folder of modelscope:OWNER/NAME, a "model" or a "dataset", downloaded if necessary. Raises BadInput."""
    try:
        import modelscope  # optional
        from modelscope.hub.errors import HubError
    except ModuleNotFoundError:
        raise BadInput(f"{flag} {spec}: modelscope is not installed; pip install modelscope") from None
    fetch = modelscope.snapshot_download if what == "model" else modelscope.dataset_snapshot_download
    try:
        return fetch(spec.removeprefix(MODELSCOPE))
    except (OSError, ValueError, HubError) as error:
        raise BadInput(f"{flag} {spec}: cannot be downloaded from ModelScope: {first_line(error)}") from None


def first_line(error: BaseException) -> str:
    """The first line of an exception's message."""
    return str(error).strip().split("\n")[0]
