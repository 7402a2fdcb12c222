"""Checkpoints as folders on disk: which are complete, what each state.json says, and which are kept.

checkpoints/step_000010/             complete: written under the next name, flushed to the disk, then renamed
checkpoints/step_000010.unfinished/  being written or deleted; the next save removes what a killed run leaves of it
checkpoints/best.json                names the checkpoint with the best eval/accuracy
"""

import contextlib
import json
import os
import re
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from common.errors import BadInput, warn

COMPLETE = re.compile(r"step_\d{6,}")
WEIGHTS = re.compile(
    r"model(-\d+-of-\d+)?\.safetensors(\.index\.json)?"
)  # files of a model, as transformers names them
Count = Annotated[int, Field(ge=0, le=2**53)]  # a whole number that a float holds exactly
STRICT = ConfigDict(strict=True, extra="forbid", validate_by_name=True, serialize_by_alias=True)


# The models below are strict and know all their keys: a state.json that does not fit them was not written by a save.


class AdapterInfo(BaseModel):
    """The model that LoRA was added to, and how."""

    model_config = STRICT
    base: str
    rank: Count
    alpha: float

    def __str__(self) -> str:
        return f"adapters of rank {self.rank} and alpha {self.alpha:g} to {self.base}"


class RewardState(BaseModel):
    """The result of Rewards.state()."""

    model_config = STRICT
    weights: dict[str, float]
    first_step: int | None = None


class SavedState(BaseModel):
    """The contents of state.json: all facts of a checkpoint that are not tensors."""

    model_config = STRICT
    step: Count
    position: Count  # place in the data where the next step's prompts begin
    in_flight: Count = 0  # prompts from there on that were being sampled, or waited to be trained on
    data: str  # fingerprint of the prompts
    models: list[str] = []  # whose weights are in it; checkpoints from before this field have an empty list
    fresh: list[str]  # models whose optimizer had not stepped yet
    lora: AdapterInfo | None
    trained: Count  # number of the policy's parameters that are not frozen
    ranks: Count
    device: str
    weight_version: Count
    reward: RewardState
    accuracy: float | None = Field(alias="eval/accuracy")
    files: dict[str, Count]  # path in the folder -> bytes


def complete(run_dir: Path) -> list[Path]:
    """Complete checkpoints of a run, oldest first."""
    folders = [file.parent for file in run_dir.glob("checkpoints/step_*/state.json")]
    return sorted((folder for folder in folders if COMPLETE.fullmatch(folder.name)), key=step_of)


def step_of(folder: Path) -> int:
    """The step in the name of a complete checkpoint."""
    return int(folder.name.removeprefix("step_"))


def state(folder: Path) -> SavedState:
    """Read state.json of a complete checkpoint. Raises BadInput for one that no save has written."""
    file = folder / "state.json"
    try:
        return SavedState.model_validate_json(file.read_bytes())
    except ValidationError as error:
        problem = error.errors()[0]
        field = ".".join(map(str, problem["loc"]))
        raise BadInput(
            f"{file}: {field[:80]!r}: {problem['msg']}; the file was not written by a save, or damaged since",
            code="checkpoint-damaged",
        ) from None


def check(folder: Path) -> None:
    """Raise BadInput if a file of a complete checkpoint is missing or has another size than when it was saved."""
    # A user who is told that a checkpoint is damaged wants to know which one to take instead.
    is_named = COMPLETE.fullmatch(folder.name)  # and not a copy that somebody made
    older = [other for other in complete(folder.parent.parent) if is_named and step_of(other) < step_of(folder)]
    cure = f"{older[-1]} is older: --resume it, with another --run-dir" if older else "there is no older one"
    try:
        saved_sizes = state(folder).files
    except BadInput as failed:
        raise BadInput(f"{failed}; {cure}", code=failed.code) from None
    sizes_now = sizes(folder)
    for name, saved_size in saved_sizes.items():
        size_now = sizes_now.get(name)
        if size_now != saved_size:
            problem = "is missing" if size_now is None else f"has {size_now} bytes of {saved_size}"
            raise BadInput(f"{folder / name}: {problem}; {cure}", code="checkpoint-damaged")


def sizes(folder: Path) -> dict[str, int]:
    """Bytes of each file in a folder and its subfolders, by its path in the folder."""
    return {str(path.relative_to(folder)): path.stat().st_size for path in sorted(folder.rglob("*")) if path.is_file()}


def begin(folder: Path) -> Path:
    """Make and return the empty .unfinished folder of a checkpoint, and remove what killed saves have left."""
    # Rank 0 calls this before any rank writes, so no other save is going on.
    for leftover in folder.parent.glob("step_*.unfinished"):
        shutil.rmtree(leftover)
    if folder.exists():
        # Only a run directory that somebody has edited holds a checkpoint of a step that is still to come.
        remove(folder)
    unfinished = folder.with_suffix(".unfinished")
    unfinished.mkdir(parents=True)
    return unfinished


def finish(folder: Path) -> None:
    """Give the .unfinished folder its final name.

    All of its contents are flushed first, so the name means that the checkpoint is whole, even after a power cut.
    """
    unfinished = folder.with_suffix(".unfinished")
    for path in (*unfinished.rglob("*"), unfinished):
        flush(path)
    unfinished.rename(folder)
    # The new name is a change of the parent folder.
    flush(folder.parent)


def remove(folder: Path) -> None:
    """Delete a complete checkpoint. It loses its name first, in case the process is killed halfway."""
    unfinished = folder.with_suffix(".unfinished")
    folder.rename(unfinished)
    shutil.rmtree(unfinished)


def rotate(run_dir: Path, keep: int) -> None:
    """Write best.json, and delete all checkpoints except the newest `keep` and the best. keep = 0 keeps all.

    Does neither, and warns, if one of them is damaged.
    """
    try:
        states = {folder: state(folder) for folder in complete(run_dir)}
    except BadInput as error:  # of another version, or damaged: it may be the best one, so all stay
        warn(f"no old checkpoint is deleted: {error}", error.code)
        return
    evaluated = [folder for folder in states if states[folder].accuracy is not None]
    best = max(evaluated, key=lambda folder: states[folder].accuracy, default=None)  # the first of equal ones
    if best:
        description = {"folder": best.name, "step": states[best].step, "eval/accuracy": states[best].accuracy}
        write(run_dir / "checkpoints/best.json", json.dumps(description) + "\n")
    for folder in [*states][:-keep] if keep else []:
        if folder != best:
            remove(folder)


@contextlib.contextmanager
def written_whole(folder: Path) -> Iterator[Path]:
    """A new folder to write a model into. At the end of the block it becomes `folder`, whole or not at all.

    If `folder` is there already, the new files replace those of the same name one by one, and the weights of an older
    model go.
    """
    is_new = not folder.exists()
    # A folder that is there may be a disk of its own, on which the files have to be written to be renamed.
    unfinished = folder.with_name(f"{folder.name}.unfinished") if is_new else folder / ".unfinished"
    if unfinished.exists():
        shutil.rmtree(unfinished)
    unfinished.mkdir(parents=True)
    try:
        yield unfinished
        for path in (*unfinished.rglob("*"), unfinished):
            flush(path)
    except BaseException:
        shutil.rmtree(unfinished)
        raise
    if is_new:
        unfinished.rename(folder)
    else:
        written = {path.name for path in unfinished.iterdir()}
        # An old index beside new weights, or old shards, would be read in their place.
        stale = [path for path in folder.iterdir() if WEIGHTS.fullmatch(path.name) and path.name not in written]
        for path in unfinished.iterdir():
            path.replace(folder / path.name)
        for path in stale:
            path.unlink()
        unfinished.rmdir()
    flush(folder.parent if is_new else folder)


def in_words(count: float) -> str:
    """A number of bytes in words."""
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"


def write(path: Path, text: str | Iterable[str]) -> None:
    """Replace a file atomically: if the process is killed, the file has either the old text or the new one.

    text: one string, or lines that need not fit into memory together.
    """
    scratch = path.with_name(path.name + ".new")
    with open(scratch, "w", encoding="utf-8") as file:
        file.writelines([text] if isinstance(text, str) else text)
    flush(scratch)
    scratch.replace(path)


def files_of_steps(folder: Path) -> dict[int, Path]:
    """Step -> file, for all step_000010.jsonl in a folder of a run, oldest first. {} without the folder."""
    # Files of other names are not meant, such as a copy that somebody made.
    files = {}
    for path in folder.glob("step_*.jsonl"):
        if step := re.fullmatch(r"step_(\d{6,18})", path.stem):
            files[int(step[1])] = path
    return dict(sorted(files.items()))


def flush(path: Path) -> None:
    """Move a file's contents, or a folder's names, from the system's memory to the disk."""
    handle = os.open(path, os.O_RDONLY)
    os.fsync(handle)
    os.close(handle)
