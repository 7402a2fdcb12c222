"""What sending weights to servers has in common, whichever servers they are. Rank 0 sends."""

import contextlib
import fcntl
import os
import re
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from common.errors import RunFailed
from common.weight_sync import FullParameters, TensorInfo

BROADCAST_BYTES = 2**28  # weights that are broadcast at once; a larger tensor goes alone
FILE_BYTES = 64 * 2**20  # weights in a file; a larger tensor has a file to itself
FOLDER = re.compile(r"weights-(\d+)-\w+")  # the process that made it


class SingleIteration:
    """The weights to send, whose iterations continue where the last one stopped.

    Gathering is collective. If sending fails on rank 0, it still has to gather the remaining tensors with the others.
    """

    def __init__(self, parameters: FullParameters):
        self.parameters = parameters
        self.pairs = iter(parameters)

    def metadata(self) -> list[TensorInfo]:
        return self.parameters.metadata()

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return self.pairs


@contextlib.contextmanager
def shared_folder() -> Iterator[str]:
    """A folder in memory for weights, which is removed at the end. First, folders of killed runs are removed."""
    # Files in /dev/shm are in memory. Containers may not have it.
    parent = "/dev/shm" if os.access("/dev/shm", os.W_OK) else tempfile.gettempdir()
    remove_left_behind(Path(parent))
    with tempfile.TemporaryDirectory(dir=parent, prefix=f"weights-{os.getpid()}-") as folder, locked(folder):
        yield folder


@contextlib.contextmanager
def locked(folder: str | Path) -> Iterator[None]:
    """The folder is in use inside. The kernel unlocks it when this process ends. Raises BlockingIOError if it is in use
    already.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)


def remove_left_behind(parent: Path) -> None:
    """Remove this user's folders whose process is gone: after SIGKILL they would fill the machine's memory.

    The lock tells of processes that this one cannot see: containers may share /dev/shm.
    """
    for folder in parent.glob("weights-*"):
        found = FOLDER.fullmatch(folder.name)
        # OSError: another process has it, or has just removed it.
        with contextlib.suppress(OSError):
            if not found or folder.lstat().st_uid != os.getuid() or Path(f"/proc/{found[1]}").exists():
                continue
            with locked(folder):
                shutil.rmtree(folder)


def write(tensors: dict[str, torch.Tensor], path: str) -> None:
    """Save tensors as a file. Raises RunFailed if there is no room."""
    try:
        save_file(tensors, path)
    except (OSError, SafetensorError) as error:
        size = sum(tensor.nbytes for tensor in tensors.values()) >> 20
        raise RunFailed(f"{path}: no room for {size} MiB of weights: {error}", code="disk-full") from None


def cut(pairs: Iterable[tuple[str, torch.Tensor]], size: int) -> Iterator[dict[str, torch.Tensor]]:
    """Consecutive tensors of together at most `size` bytes, or a single larger one."""
    part = {}
    room = size
    for name, tensor in pairs:
        if part and tensor.nbytes > room:
            yield part
            part = {}
            room = size
        part[name] = tensor.contiguous()
        room -= tensor.nbytes
    yield part
