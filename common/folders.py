"""Checkpoints as folders on disk: which are complete, and which are kept.

checkpoints/step_000010/             complete: written under the next name, flushed to the disk, then renamed
checkpoints/step_000010.unfinished/  being written, or deleted; what a killed run leaves of it the next save removes
checkpoints/step_000010.replaced/    complete, too: out of the way of a new step_000010 that is about to be renamed
checkpoints/best.json                which of those that are there has the best eval/accuracy
"""

import json
import os
import re
import shutil
from pathlib import Path

from common.errors import BadInput
from common.json_lines import is_count, is_number, read_object

COMPLETE = re.compile(r"step_(\d{6,})(\.replaced)?")
FACTS = {  # of state.json: what a save writes
    "step": is_count,
    "position": is_count,
    "data": lambda digest: isinstance(digest, str),
    "ranks": is_count,
    "weight_version": is_count,
    "fresh": lambda names: isinstance(names, list) and all(isinstance(name, str) for name in names),
    "reward": lambda reward: (
        isinstance(reward, dict)
        and isinstance(reward.get("weights"), dict)
        and all(map(is_number, reward["weights"].values()))
        and (reward.get("first_step", "") is None or is_count(reward.get("first_step")))
    ),
    "eval/accuracy": lambda accuracy: accuracy is None or is_number(accuracy),
    "files": lambda files: isinstance(files, dict) and all(map(is_count, files.values())),
}


def complete(run_dir: Path) -> list[Path]:
    """Complete checkpoints of a run, oldest first."""
    found = []
    for state in run_dir.glob("checkpoints/step_*/state.json"):
        match = COMPLETE.fullmatch(state.parent.name)
        if match:
            found.append((int(match[1]), not match[2], state.parent))
    return [folder for *_, folder in sorted(found)]


def state(folder: Path, needed: tuple[str, ...] = ("step",)) -> dict:
    """What state.json of a complete checkpoint says, `needed` at least. Raises BadInput for what no save writes."""
    file = folder / "state.json"
    facts = read_object(file, code="checkpoint-damaged")
    for name in (*needed, *(FACTS.keys() & facts.keys())):
        if name not in facts or not FACTS[name](facts[name]):
            raise BadInput(
                f'{file}: "{name}" is {facts.get(name)!r:.80}: not written by a save, or damaged since',
                code="checkpoint-damaged",
            )
    return facts


def check(folder: Path) -> None:
    """Whether a complete checkpoint is still what was written. Raises BadInput naming the first file that is not."""
    older = [other for other in complete(folder.parent.parent) if other.name < folder.name]
    cure = f"{older[-1]} is older: --resume it, with another --run-dir" if older else "there is no older one"
    try:
        files = state(folder).get("files", {})
    except BadInput as failed:
        raise BadInput(f"{failed}; {cure}", code=failed.code) from None
    for name, count in files.items():
        path = folder / name
        found = path.stat().st_size if path.is_file() else -1
        if found != count:
            said = f"has {found} bytes of {count}" if found >= 0 else "is missing"
            raise BadInput(f"{path}: {said}; {cure}", code="checkpoint-damaged")


def sizes(folder: Path) -> dict[str, int]:
    """Bytes of each file under it."""
    return {str(path.relative_to(folder)): path.stat().st_size for path in sorted(folder.rglob("*")) if path.is_file()}


def begin(folder: Path) -> Path:
    """The empty folder in which the checkpoint `folder` is to be written. Removes what killed saves have left."""
    for leftover in folder.parent.glob("step_*.unfinished"):
        shutil.rmtree(leftover)
    for replaced in folder.parent.glob("step_*.replaced"):
        whole = replaced.with_suffix("")
        if (whole / "state.json").is_file():
            remove(replaced)
        else:
            replaced.rename(whole)
    unfinished = folder.with_suffix(".unfinished")
    unfinished.mkdir(parents=True)
    return unfinished


def finish(folder: Path) -> None:
    """What begin() returned gets its name, when all of it is on the disk: after a power cut, too, a name means whole.

    A folder of that name is there, or its .replaced, at every moment.
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
    """Delete a complete checkpoint; killed in the middle, what is left has a name that says so."""
    unfinished = folder.with_suffix(".unfinished")
    folder.rename(unfinished)
    shutil.rmtree(unfinished)


def rotate(run_dir: Path, keep: int) -> None:
    """Write best.json, and delete all complete checkpoints but the newest `keep` and the best; keep 0: none."""
    folders = complete(run_dir)
    states = {folder: state(folder) for folder in folders}
    evaluated = [folder for folder in folders if states[folder].get("eval/accuracy") is not None]
    best = max(evaluated, key=lambda folder: states[folder]["eval/accuracy"], default=None)  # of equals the first
    if best:
        said = {"folder": best.name, **{key: states[best][key] for key in ("step", "eval/accuracy")}}
        write(run_dir / "checkpoints/best.json", json.dumps(said) + "\n")
    for folder in folders[:-keep] if keep else []:
        if folder != best:
            remove(folder)


def size(count: float) -> str:
    """Bytes in words."""
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"


def write(path: Path, text: str) -> None:
    """Replace a file at one moment: a process killed here leaves the old text or the new."""
    scratch = path.with_name(path.name + ".new")
    scratch.write_text(text, encoding="utf-8")
    flush(scratch)
    scratch.replace(path)


def flush(path: Path) -> None:
    """A file's contents, or a folder's names, from the system's memory to the disk."""
    handle = os.open(path, os.O_RDONLY)
    os.fsync(handle)
    os.close(handle)
