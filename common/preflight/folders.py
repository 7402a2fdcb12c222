"""Checkpoints as folders on disk: which are complete, and which are kept.

checkpoints/step_000010/             complete: written under the next name, flushed to the disk, then renamed
checkpoints/step_000010.unfinished/  being written or deleted; the next save removes what a killed run leaves of it
checkpoints/step_000010.replaced/    complete, too: moved away for a new step_000010 that is about to be renamed
checkpoints/best.json                which of the checkpoints that are there has the best eval/accuracy
"""

import json
import os
import re
import shutil
from collections.abc import Iterable
from pathlib import Path

from common.data.json_lines import is_count, is_number, read_object
from common.errors import BadInput

COMPLETE = re.compile(r"step_(\d{6,})(\.replaced)?")
FACTS = {  # each fact of state.json -> whether a value is one that a save writes
    "step": is_count,
    "position": is_count,
    "data": lambda digest: isinstance(digest, str),
    "ranks": is_count,
    "weight_version": is_count,
    "fresh": lambda names: isinstance(names, list) and all(isinstance(name, str) for name in names),
    "reward": lambda reward: isinstance(reward, dict) and all(map(is_number, reward["weights"].values())),
    "eval/accuracy": lambda accuracy: accuracy is None or is_number(accuracy),
    "lora": lambda lora: lora is None or lora.keys() == {"base", "rank", "alpha"},
    "files": lambda files: all(map(is_count, files.values())),
}
LATER = {"trained": is_count}  # facts that checkpoints of older versions lack


def complete(run_dir: Path) -> list[Path]:
    """Complete checkpoints of a run, oldest first."""
    found = []
    for path in run_dir.glob("checkpoints/step_*/state.json"):
        if match := COMPLETE.fullmatch(path.parent.name):
            found.append((int(match[1]), not match[2], path.parent))
    return [folder for *_, folder in sorted(found)]


def state(folder: Path, needed: tuple[str, ...] = ("step",)) -> dict:
    """The facts in state.json of a complete checkpoint. Raises BadInput if one of `needed` is missing, or is none."""
    file = folder / "state.json"
    facts = read_object(file, code="checkpoint-damaged")
    known = FACTS | LATER
    for name in (*needed, *(known.keys() & facts.keys())):
        try:
            sound = known[name](facts[name])
        except (KeyError, TypeError, AttributeError):
            sound = False
        if not sound:
            said = f'{file}: "{name}" is {facts.get(name)!r:.80}: not written by a save, or damaged since'
            raise BadInput(said, code="checkpoint-damaged")
    return facts


def check(folder: Path) -> None:
    """Raise BadInput for the first file of a complete checkpoint that is missing or has another size than it had."""
    older = [other for other in complete(folder.parent.parent) if other.name < folder.name]
    cure = f"{older[-1]} is older: --resume it, with another --run-dir" if older else "there is no older one"
    try:
        sizes_then, sizes_now = state(folder).get("files", {}), sizes(folder)
    except BadInput as failed:
        raise BadInput(f"{failed}; {cure}", code=failed.code) from None
    for name, count in sizes_then.items():
        if sizes_now.get(name) != count:
            said = f"has {sizes_now[name]} bytes of {count}" if name in sizes_now else "is missing"
            raise BadInput(f"{folder / name}: {said}; {cure}", code="checkpoint-damaged")


def sizes(folder: Path) -> dict[str, int]:
    """Bytes of each file in a folder and its subfolders, by its path in the folder."""
    return {str(path.relative_to(folder)): path.stat().st_size for path in sorted(folder.rglob("*")) if path.is_file()}


def begin(folder: Path) -> None:
    """Make the empty .unfinished folder of a checkpoint, and remove what killed saves have left."""
    for leftover in folder.parent.glob("step_*.unfinished"):
        shutil.rmtree(leftover)
    for replaced in folder.parent.glob("step_*.replaced"):
        if (replaced.with_suffix("") / "state.json").is_file():
            remove(replaced)
        else:
            replaced.rename(replaced.with_suffix(""))
    folder.with_suffix(".unfinished").mkdir(parents=True)


def finish(folder: Path) -> None:
    """Give the .unfinished folder its name, after all of it is on the disk: the name means whole, even after a power
    cut. At every moment there is a folder of that name, or its .replaced.
    """
    unfinished, replaced = folder.with_suffix(".unfinished"), folder.with_suffix(".replaced")
    for path in (*unfinished.rglob("*"), unfinished):
        flush(path)
    if folder.exists():
        folder.rename(replaced)
    unfinished.rename(folder)
    flush(folder.parent)
    if replaced.exists():
        remove(replaced)


def remove(folder: Path) -> None:
    """Delete a complete checkpoint. If the process is killed meanwhile, the name of what is left says so."""
    unfinished = folder.with_suffix(".unfinished")
    folder.rename(unfinished)
    shutil.rmtree(unfinished)


def rotate(run_dir: Path, keep: int) -> None:
    """Write best.json, and delete complete checkpoints except the newest `keep` and the best. keep = 0 keeps all."""
    folders = complete(run_dir)
    states = {folder: state(folder) for folder in folders}
    evaluated = [folder for folder in folders if states[folder].get("eval/accuracy") is not None]
    best = max(evaluated, key=lambda folder: states[folder]["eval/accuracy"], default=None)  # the first of equal ones
    if best:
        said = {"folder": best.name, **{key: states[best][key] for key in ("step", "eval/accuracy")}}
        write(run_dir / "checkpoints/best.json", json.dumps(said) + "\n")
    for folder in folders[:-keep] if keep else []:
        if folder != best:
            remove(folder)


def size(count: float) -> str:
    """A number of bytes in words."""
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"


def write(path: Path, text: str | Iterable[str]) -> None:
    """Replace a file in one moment: a process that is killed here leaves the old text or the new text.

    text: one string, or lines that need not fit into memory together.
    """
    scratch = path.with_name(path.name + ".new")
    with open(scratch, "w", encoding="utf-8") as file:
        file.writelines([text] if isinstance(text, str) else text)
    flush(scratch)
    scratch.replace(path)


def flush(path: Path) -> None:
    """Move a file's contents, or a folder's names, from the system's memory to the disk."""
    handle = os.open(path, os.O_RDONLY)
    os.fsync(handle)
    os.close(handle)
