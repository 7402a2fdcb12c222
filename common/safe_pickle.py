"""Checkpoints and weights without pickles that run code as they are read, unless --trust-pickle.

torch's distributed checkpoints hold a pickle of what lies where, `.metadata`, and each tensor and number as torch.save
writes it. The first is read here by an unpickler that knows the few classes it needs, the others by torch's own
(weights_only). Weights of a model come from safetensors.
"""

import dataclasses
import io
import pickle
import re
from pathlib import Path, PosixPath

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint.api import CheckpointException as Failed  # what it raises on all ranks
from torch.serialization import _get_layout

from common.errors import BadInput, OneLine, RunFailed, raise_together

CLASSES = (
    metadata.Metadata, metadata.MetadataIndex, metadata.StorageMeta, metadata.TensorProperties,
    metadata.TensorStorageMetadata, metadata.BytesStorageMetadata, metadata.ChunkStorageMetadata,
    metadata._MEM_FORMAT_ENCODING, filesystem._StorageInfo, torch.Size, _get_layout,
)  # fmt: skip
KNOWN = {  # (module, name) in a pickle -> what it stands for. Objects, not names to be looked up: nothing is imported.
    **{(known.__module__, known.__qualname__): known for known in CLASSES},
    **{("torch", name): value for name, value in vars(torch).items() if isinstance(value, torch.dtype)},
    **dict.fromkeys((("pathlib", "PosixPath"), ("pathlib._local", "PosixPath")), PosixPath),  # Python 3.11, 3.13
}
# What an unpickler and the classes above raise of bytes that no save wrote.
DAMAGED = (
    pickle.UnpicklingError, EOFError, OSError, AttributeError, LookupError, TypeError, ValueError, OverflowError,
    MemoryError, RecursionError,
)  # fmt: skip


def refused(file: Path, name: str) -> RunFailed:
    return RunFailed(
        f"{file}: is a pickle with {name}, which may run code as it is read; --trust-pickle loads it, if you trust who "
        "wrote it",
        code="pickle-refused",
    )


class Unpickler(pickle.Unpickler):
    """Knows KNOWN. Raises RunFailed of anything else."""

    def __init__(self, path: Path):
        super().__init__(io.BytesIO(path.read_bytes()))
        self.path = path

    def find_class(self, module: str, name: str):
        if (module, name) not in KNOWN:
            raise refused(self.path, f"{module}.{name}")
        return KNOWN[module, name]


class Reader(dcp.FileSystemReader):
    """Reads .metadata when it is made: what is wrong with it is said before any collective. Raises RunFailed."""

    def __init__(self, folder: Path):
        super().__init__(folder)
        path = folder / ".metadata"
        try:
            self.found = Unpickler(path).load()
            places = self.found.storage_data.values()
            outside = [place.relative_path for place in places if Path(place.relative_path).name != place.relative_path]
            self.found.storage_meta = metadata.StorageMeta()
        except DAMAGED as error:
            raise unreadable(path, error) from None
        if outside:
            raise RunFailed(f"{path}: names a file outside of its folder, {outside[0]!r}", code="checkpoint-damaged")

    def read_metadata(self) -> metadata.Metadata:
        return self.found

    def read_data(self, plan: dcp.LoadPlan, planner: dcp.LoadPlanner):
        """One file after the other, so that a refusal names it."""
        items: dict[str, list] = {}
        for item in plan.items:
            items.setdefault(self.storage_data[item.storage_index].relative_path, []).append(item)
        done = super().read_data(dataclasses.replace(plan, items=[]), planner)
        for name, group in items.items():
            try:
                done = super().read_data(dataclasses.replace(plan, items=group), planner)
            except pickle.UnpicklingError as error:
                unknown = re.search(r"GLOBAL (\S+)", str(error))
                raise refused(Path(self.path) / name, unknown[1] if unknown else "more than tensors") from None
        return done


class Planner(dcp.DefaultLoadPlanner):
    """Reads what is no tensor as torch reads tensors: numbers, texts, lists and objects of them."""

    def load_bytes(self, read_item: dcp.ReadItem, value: io.BytesIO) -> None:
        checked = io.BytesIO()
        torch.save(torch.load(value, weights_only=True), checked)  # the planner unpickles what this wrote, no more
        checked.seek(0)
        super().load_bytes(read_item, checked)


def load(state: dict, folder: Path, trust_pickle: bool) -> None:
    """dcp.load into `state`. Collective. Raises RunFailed on all ranks."""
    reader = error = None
    try:
        reader = dcp.FileSystemReader(folder) if trust_pickle else Reader(folder)
    except RunFailed as failed:
        error = failed
    raise_together(error)
    try:
        dcp.load(state, storage_reader=reader, planner=None if trust_pickle else Planner())
    except Failed as failed:  # with what each rank met
        errors = [error for error, _ in failed.failures.values()]
        raise next((error for error in errors if isinstance(error, OneLine)), unreadable(folder, errors[0])) from None


def unreadable(path: Path, error: BaseException) -> RunFailed:
    first = (str(error).strip() or "no more is known").split("\n")[0]
    return RunFailed(f"{path}: cannot be read: {type(error).__name__}: {first}", code="checkpoint-damaged")


def has_safetensors(model_path: str) -> bool:
    """Whether transformers and vLLM are to read safetensors and nothing else: but for a folder without any.

    A name on a hub is never read as a pickle.
    """
    folder = Path(model_path)
    names = ("model.safetensors", "model.safetensors.index.json")
    return not folder.is_dir() or any((folder / name).is_file() for name in names)


def check_weights(model_path: str, trust_pickle: bool, given: str = "") -> None:
    """Refuse a folder whose weights are a pickle, unless it is trusted. given: how it was named. Raises BadInput."""
    if trust_pickle or has_safetensors(model_path):
        return
    pickles = [path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in sorted(Path(model_path).glob(pattern))]
    if pickles:
        given = given or f"--model {model_path}"
        raise BadInput(
            f"{given}: its weights are a pickle, {pickles[0]}, with no model.safetensors beside it; --trust-pickle "
            "loads them, if you trust who wrote them",
            code="pickle-refused",
        )
