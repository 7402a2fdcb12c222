"""The trainer's side of sending weights to vLLM's servers; common/weight_transfer.py is theirs."""

import os
import socket
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from common.errors import RunFailed
from common.server_control import Control
from common.weight_sync import FullParameters, Parameter, checksum

PART = 64 * 2**20  # bytes of weights in shared memory at a time, at least one tensor


@dataclass
class UnderWay:
    """One iteration of the weights as a source of vLLM's trainer engines, to go on with where they break it off."""

    weights: FullParameters
    stream: Iterator[tuple[str, torch.Tensor]]

    def metadata(self) -> list[Parameter]:
        return self.weights.metadata()

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return self.stream


def parts(weights: Iterator[tuple[str, torch.Tensor]], check: bool) -> Iterator[dict]:
    """The weights as files in shared memory, one at a time: what SharedMemoryTransfer takes."""
    folder = Path("/dev/shm") if os.access("/dev/shm", os.W_OK) else Path(tempfile.gettempdir())
    for tensors in cut(weights, PART):
        with tempfile.NamedTemporaryFile(dir=folder, suffix=".safetensors") as file:
            try:
                save_file(tensors, file.name)
            except (OSError, SafetensorError) as failed:
                raise RunFailed(
                    f"{folder}: no room for {PART >> 20} MiB of weights or a tensor: {failed}", code="disk-full"
                ) from None
            sums = {name: checksum(tensor) for name, tensor in tensors.items()} if check else {}
            yield {"path": file.name, "checksums": sums}


def cut(weights: Iterator[tuple[str, torch.Tensor]], size: int) -> Iterator[dict[str, torch.Tensor]]:
    """Consecutive tensors of together at most `size` bytes, or a single larger one."""
    part, room = {}, size
    for name, tensor in weights:
        if part and tensor.nbytes > room:
            yield part
            part, room = {}, size
        part[name] = tensor.contiguous()
        room -= tensor.nbytes
    yield part


def nccl_sender(control: Control, source: UnderWay):
    """vLLM's trainer side of its NCCL backend, for rank 0: one group of it and all workers of the servers."""
    from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory
    from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

    with socket.socket() as probe:
        probe.bind(("", 0))
        port = probe.getsockname()[1]
    info = NCCLTrainerInitInfo(
        master_address=address_towards(control.urls[0]),
        master_port=port,
        world_size=1 + control.workers,
        rank=0,
    )
    return WeightTransferTrainerFactory.trainer_init(info, client=control, source=source)


def address_towards(url: str) -> str:
    """This machine's address as the server sees it. Nothing is sent."""
    parsed = httpx.URL(url)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((parsed.host, parsed.port or 80))
        return probe.getsockname()[0]
