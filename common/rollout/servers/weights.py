"""How rank 0 sends weights to vLLM's servers. common/rollout/vllm_weights.py receives them there."""

import os
import tempfile
from collections.abc import Iterable, Iterator

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from common.errors import RunFailed
from common.rollout.servers.client import Control
from common.rollout.servers.process import is_local
from common.weight_sync import FullParameters, TensorInfo

# Size of each of the two buffers at both ends, which may hold one tensor more. vLLM's default is 1 GiB.
NCCL_BUFFER_BYTES = 2**28
# Weights that are in shared memory at the same time. A larger tensor has a file to itself.
FILE_BYTES = 64 * 2**20


class SingleIteration:
    """A weight source for vLLM's senders, whose iterations continue where the last one stopped.

    Gathering is collective. If sending fails on rank 0, it still has to gather the remaining tensors with the others.
    """

    def __init__(self, parameters: FullParameters):
        self.parameters = parameters
        self.pairs = iter(parameters)

    def metadata(self) -> list[TensorInfo]:
        return self.parameters.metadata()

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return self.pairs


def send_in_files(source: Iterable[tuple[str, torch.Tensor]], control: Control) -> None:
    """Send the weights as files in shared memory, one file at a time, to SharedMemoryTransfer. Raises RunFailed."""
    # Files in /dev/shm are in memory. Containers may not have it.
    folder = "/dev/shm" if os.access("/dev/shm", os.W_OK) else tempfile.gettempdir()
    control.start_weight_update()
    for tensors in cut(source, FILE_BYTES):
        # The file is removed when the servers have loaded it.
        with tempfile.NamedTemporaryFile(dir=folder, suffix=".safetensors") as file:
            try:
                save_file(tensors, file.name)
            except (OSError, SafetensorError) as error:
                message = f"{folder}: no room for {FILE_BYTES >> 20} MiB of weights or a tensor: {error}"
                raise RunFailed(message, code="disk-full") from None
            control.update_weights({"path": file.name})
    control.finish_weight_update()


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


def nccl_sender(source: SingleIteration, control: Control):
    """vLLM's own sender over NCCL, for rank 0, in one group with all workers of the servers."""
    from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory
    from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo
    from vllm.utils.network_utils import get_ip, get_open_port

    info = NCCLTrainerInitInfo(
        master_address="127.0.0.1" if all(map(is_local, control.urls)) else get_ip(),  # get_ip() obeys VLLM_HOST_IP
        master_port=get_open_port(),
        world_size=1 + sum(control.workers),
        rank=0,
        packed_buffer_size_bytes=NCCL_BUFFER_BYTES,  # a larger tensor goes alone, with a warning of vLLM's
    )
    return WeightTransferTrainerFactory.trainer_init(info, client=control, source=source)
