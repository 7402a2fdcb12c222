"""Rows of --dataset: the built-in tasks, files (formats.py), data sets of the Hugging Face Hub and of ModelScope."""

import json
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from huggingface_hub.errors import HTTPError  # raised without a connection; it is httpx's or httpx2's

from common.data import arithmetic, formats, suites, tasks
from common.data.rows import Row, collect, first_line, last_box, numbered
from common.data.suites import gsm8k_row
from common.errors import BadInput, say

GENERATED = tasks.NAMES
WITH_TEST_SPLIT = ("arithmetic", "gsm8k", "math", "geo3k", "reasoning-gym", "openenv", *GENERATED)
FORMS = (
    f"arithmetic, {', '.join(GENERATED)}, gsm8k, gsm8k:FOLDER, math, dapo, geo3k, reasoning-gym:TASK, "
    f"suite:NAME, openenv:URL, a {', '.join(formats.FILES)} file or a folder of them, or owner/name[:CONFIG][@SPLIT]"
)
COLUMN_NAMES = ("prompt", "answer", "solution", "images", "chosen", "rejected")
MODELSCOPE = "modelscope:"  # prefix of a name that comes from ModelScope
# Built-in name and split -> its name on the Hugging Face Hub, and on ModelScope.
ON_HUB = {
    ("gsm8k", "train"): ("openai/gsm8k:main", "AI-ModelScope/gsm8k:main"),
    ("gsm8k", "test"): ("openai/gsm8k:main", "AI-ModelScope/gsm8k:main"),
    ("math", "train"): ("DigitalLearningGmbH/MATH-lighteval", "AI-ModelScope/MATH-lighteval"),  # 7500 problems
    ("math", "test"): ("HuggingFaceH4/MATH-500", "AI-ModelScope/MATH-500"),  # none of them among the 7500
    ("geo3k", "train"): ("hiyouga/geometry3k", "hiyouga/geometry3k"),  # 2101 problems, each with an image
    ("geo3k", "test"): ("hiyouga/geometry3k", "hiyouga/geometry3k"),
    ("dapo", "train"): ("BytedTsinghua-SIA/DAPO-Math-17k", "AI-ModelScope/DAPO-Math-17k"),
}
# Built-in name -> columns that do not have the usual names.
COLUMNS = {
    "math": {"prompt": "problem"},
    "geo3k": {"prompt": "problem"},
    "dapo": {"answer": "reward_model.ground_truth"},
}


def kind(spec: str) -> str:
    """Name of the built-in data set that a SPEC stands for, or "" for a file or another name on a hub."""
    if spec in ("arithmetic", *GENERATED):
        return spec
    if spec.startswith(("gsm8k:", "reasoning-gym:", "openenv:")):
        return spec.partition(":")[0]
    if suites.is_known(spec):
        return "suite"
    name = spec.removeprefix(MODELSCOPE)
    return name if (name, "train") in ON_HUB else ""


def short_names(specs: list[str]) -> dict[str, str]:
    """SPEC -> its name in metrics, such as aime24 for suite:aime24 and test for data/test.jsonl. Raises BadInput."""
    short = {}
    for spec in specs:
        name = spec
        if kind(spec) == "suite":
            name, _ = suites.split(spec)
        elif kind(spec) == "gsm8k":
            name = "gsm8k"
        elif not kind(spec) and spec.endswith(formats.FILES):
            name = Path(spec).stem
        short[spec] = name
    # Files in different folders may have the same name. Then their whole paths tell them apart.
    count = Counter(short.values())
    names = {spec: slug(name if count[name] == 1 else spec) for spec, name in short.items()}
    if len(set(names.values())) < len(names):
        raise BadInput(f"{', '.join(specs)}: two of them have the same name in metrics; rename a file")
    return names


def slug(name: str) -> str:
    """Only letters, digits and _ stay. All else becomes a hyphen."""
    return re.sub(r"\W+", "-", name).strip("-")


def columns(spec: str, flags: tuple[str, ...]) -> dict[str, str]:
    """Field -> column of a SPEC. A built-in data set has its own, any other has those of --columns. Raises BadInput."""
    if kind(spec) == "suite":
        return suites.find(spec).columns
    if kind(spec):
        return COLUMNS.get(kind(spec), {})
    by_field = {}
    for flag in flags:
        field, _, column = flag.partition("=")
        if field not in COLUMN_NAMES or field in by_field or not column:
            expected = ", ".join(f"{name}=COLUMN" for name in COLUMN_NAMES)
            raise BadInput(f'--columns "{" ".join(flags)}": expected {expected}, each once')
        by_field[field] = column
    return by_field


def read(spec: str, split: str, flag: str = "--dataset") -> list[Row]:
    """All rows of a SPEC (see FORMS; a name on a hub may have the prefix modelscope:). Raises BadInput."""
    name = kind(spec)
    if name in ("arithmetic", "reasoning-gym", "openenv", *GENERATED):
        return numbered(f"{spec}/{split}:", problems(spec, split, flag), start=0)
    if name == "suite":
        return read_suite(spec, split, flag)
    if spec.startswith("gsm8k:"):
        rows = formats.read_file(Path(spec.removeprefix("gsm8k:")) / f"{split}.jsonl")
    elif not name and (spec.endswith(formats.FILES) or os.path.exists(spec)):
        rows = formats.read(Path(spec), split)
    else:
        # Before the Hub is asked: data/train.jsnl could be a name there, but not beside a file data/train.jsonl.
        hint = formats.similar_file(Path(spec)) if "/" in spec and not name else ""
        if hint:
            raise BadInput(f"{flag} {spec}: file not found{hint}")
        rows = read_hub(spec, split, flag)
    if name == "gsm8k":
        return collect(rows, gsm8k_row)
    if name == "math":
        return boxed_answers(rows)
    if name == "dapo":
        return without_repeats(rows)
    return list(rows)


def problems(spec: str, split: str, flag: str) -> list[dict]:
    """The rows of a task that makes its own problems."""
    if spec == "arithmetic":
        return arithmetic.problems(split)
    if spec in GENERATED:
        return tasks.problems(spec, split)
    # Imported here because they bring the code for WebSockets and for worker processes, and few runs need it.
    if kind(spec) == "openenv":
        from common.data import openenv

        return openenv.problems(spec, split, flag)
    from common.data import reasoning_gym

    return reasoning_gym.problems(spec, split, flag)


def read_suite(spec: str, split: str, flag: str) -> list[Row]:
    """The rows of suite:NAME from the Hub, or of suite:NAME:FILE from a file. Raises BadInput."""
    if split != "test":
        raise BadInput(f'{flag} {spec}: has no split "{split}", because it is a test set')
    benchmark = suites.find(spec)
    _, file = suites.split(spec)
    if file:
        rows = formats.read(Path(file), split)
    else:
        rows = read_hub(benchmark.dataset, split, flag)
    return benchmark.read(rows)


def boxed_answers(rows: Iterable[Row]) -> list[Row]:
    """MATH rows. Without an "answer", it is in the last box of the solution. Rows with neither are left out."""
    answered = []
    left_out = 0
    for where, row in rows:
        # Some solutions frame the answer with \fbox.
        box = last_box(row.get("solution", "").replace(r"\fbox", r"\boxed"))
        if "answer" in row:
            answered.append((where, row))
        elif box:
            answered.append((where, {**row, "answer": box[1]}))
        else:
            left_out += 1
    if left_out:
        say(f"math: left out {left_out} of {left_out + len(answered)} problems: no answer in a box")
    return answered


def without_repeats(rows: Iterable[Row]) -> list[Row]:
    """DAPO-Math-17k rows, each prompt once: the upload of 1.8 million rows repeats 17 thousand prompts 100 times."""
    # A dict keeps the order in which its keys came.
    first = {}
    count = 0
    for where, row in rows:
        first.setdefault(json.dumps(row.get("prompt")), (where, row))
        count += 1
    if len(first) < count:
        say(f"dapo: left out {count - len(first)} rows that repeat another one's prompt")
    return list(first.values())


def read_hub(spec: str, split: str, flag: str) -> Iterator[Row]:
    """(name/split:row N, object) of each row of a data set on the Hugging Face Hub, or on ModelScope."""
    # Imported here because it takes two seconds, and only this source needs it.
    import datasets

    name = spec.removeprefix(MODELSCOPE)
    on_modelscope = spec.startswith(MODELSCOPE)
    if kind(spec):
        if (name, split) not in ON_HUB:
            raise BadInput(f'{flag} {spec}: has no split "{split}"')
        name = ON_HUB[name, split][on_modelscope]
    # OWNER/NAME, then :CONFIG, then @SPLIT, which may be a slice such as train[:100].
    parts = re.fullmatch(r"([\w.-]+/[\w.-]+)(?::([\w.-]+))?(?:@([\w.:%\[\]+-]+))?", name)
    if not parts:
        raise BadInput(f'{flag} "{spec}": expected {FORMS}')
    name, config, named_split = parts.groups()
    split = named_split or split
    folder = download(MODELSCOPE + name, "dataset", flag) if on_modelscope else name
    try:
        table = datasets.load_dataset(folder, config, split=split)
    except (OSError, ValueError, HTTPError, datasets.exceptions.DatasetsError) as error:
        raise BadInput(f"{flag} {name}: cannot be loaded from the Hub: {first_line(error)}") from None
    if not len(table):
        raise BadInput(f"{flag} {name}: contains no rows")
    keep_files(table.info.features)
    # Batches are sixty times as fast as single rows.
    place = f"{name}:{config}/{split}" if config else f"{name}/{split}"
    number = 0
    for batch in table.iter(1000):
        for values in zip(*batch.values()):
            number += 1
            yield f"{place}:row {number}", formats.without_nulls(dict(zip(batch, values)))


def keep_files(feature: Any) -> None:
    """Let a data set of the Hub give its images as files, also those in lists and objects.

    Decoding all of them takes long, and a JPEG would come back as a PNG. The library's IterableDataset.decode(False)
    would leave columns of JSON undecoded as well.
    """
    if isinstance(feature, dict):
        for inner in feature.values():
            keep_files(inner)
    elif isinstance(feature, list):
        keep_files(feature[0])
    elif hasattr(feature, "feature"):  # a list, too
        keep_files(feature.feature)
    elif type(feature).__name__ == "Image":
        feature.decode = False


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
