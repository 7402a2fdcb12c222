"""What vLLM's servers are asked and answer: responses, and updates of their weights.

Rank 0 sends the weights over NCCL with vLLM's own sender or, from a CPU, through shared memory.
common/rollout/vllm_weights.py receives them there.
"""

import contextlib
import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import torch
from pydantic import BaseModel, Field, NonNegativeInt

from common.rollout.servers import client, weights
from common.rollout.servers.client import VersionSpan
from common.rollout.servers.process import is_local
from common.rollout.servers.weights import SingleIteration

NAME = "vLLM"
GENERATE = "/inference/v1/generate"
HEALTH_SECONDS = 5.0  # its front end answers, whatever the engine computes
EMPTY_CACHE = "/reset_prefix_cache?reset_running_requests=true"
# vLLM reports -9999 for a log-prob that is not a number.
LOWEST_LOGPROB = -9998.0


# The parts of the replies that we read. vLLM has classes for them, too, but they take 8 s to import, and they accept a
# reply without log-probs.
class TokenLogprob(BaseModel):
    logprob: float = Field(gt=LOWEST_LOGPROB)  # refuses NaN, too


class Logprobs(BaseModel):
    content: list[TokenLogprob]


class Sampled(BaseModel):
    index: int
    token_ids: list[NonNegativeInt] = Field(min_length=1)
    logprobs: Logprobs
    finish_reason: Literal["stop", "length"]
    weight_versions: list[VersionSpan]


class Reply(BaseModel):
    choices: list[Sampled]


class WorldSize(BaseModel):
    world_size: int


def request_body(ids: list[int], settings: dict, seed: int) -> dict:
    """A request for responses to these tokens. A greedy response needs no seed."""
    sampling = {**settings, "seed": seed} if settings["temperature"] > 0 else settings
    return {"token_ids": ids, "sampling_params": sampling}


def read_choices(reply: bytes, n: int) -> list[client.Choice]:
    """The n responses of a reply, in order. Raises ValueError if a response is missing or not whole."""
    found = Reply.model_validate_json(reply, strict=True).choices
    if len(found) != n:
        raise ValueError(f"{len(found)} responses, {n} were requested")
    choices = []
    for sampled in sorted(found, key=lambda sampled: sampled.index):
        logprobs = [token.logprob for token in sampled.logprobs.content]
        truncated = sampled.finish_reason == "length"
        choice = client.Choice(sampled.token_ids, logprobs, truncated, sampled.weight_versions)
        client.check_whole(choice, sampled.index)
        choices.append(choice)
    return choices


@dataclass
class Control(client.Control):
    """vLLM's NCCL sender calls the methods from init_weight_transfer_engine() to finish_weight_update().

    vLLM's own HTTPVLLMWeightSyncClient has them too, but it knows a single server, and its errors do not say what the
    server answered. VLLM_SERVER_DEV_MODE=1 opens the routes.
    """

    name = NAME
    health = "/health"
    health_seconds = HEALTH_SECONDS
    version: str = "0"  # number of the weights that are being sent
    sender: object = None  # with GPUs: vLLM's sender over NCCL

    def check(self) -> None:
        # Another run may have used the server. Then it has that run's version; it is paused, if the run ended during an
        # update; and its cache has keys and values of other weights, perhaps under the same salts.
        self.request("POST", "/update_weight_version", {"new_version": "0"})
        self.request("POST", "/resume")
        self.request("POST", EMPTY_CACHE)
        self.workers = [server.world_size for server in self.read("/get_world_size", WorldSize)]

    def send(self, source: SingleIteration, version: int, device: torch.device) -> None:
        """Give all servers the weights under this number: from a CPU in files, from a GPU over NCCL."""
        self.version = str(version)
        amid_responses = self.inflight_updates != "none"
        pause = self.paused("/pause?mode=keep&clear_cache=false", "/resume")
        with pause if amid_responses else contextlib.nullcontext():
            if device.type == "cpu":
                send_in_files(source, self)
                return
            if self.sender is None:
                self.sender = nccl_sender(source, self)
            self.sender.source = source
            self.sender.send_weights()

    def init_weight_transfer_engine(self, init_info: dict) -> None:
        """Give each server's workers NCCL ranks of their own. vLLM's sender calls it, and knows one server only."""
        bodies = [{"init_info": {**init_info, "rank_offset": rank}} for rank in self.first_ranks()]
        self.request("POST", "/init_weight_transfer_engine", bodies)

    def start_weight_update(self) -> None:
        self.request("POST", "/start_weight_update")

    def update_weights(self, update_info: dict) -> None:
        self.request("POST", "/update_weights", {"update_info": update_info})

    def finish_weight_update(self) -> None:
        self.request("POST", "/finish_weight_update", {"weight_version": self.version})
        # The old weights computed the keys and values in this cache. What belongs to responses under way is computed
        # again when they go on.
        if self.inflight_updates != "keep":
            self.request("POST", EMPTY_CACHE)

    def abort(self) -> None:
        self.request("POST", "/abort_requests", {})

    def drop(self) -> None:
        if self.sender is not None:
            self.sender.shutdown()

    def leave(self) -> None:
        """The next run gives the servers another NCCL group."""


def send_in_files(source: Iterable[tuple[str, torch.Tensor]], control: Control) -> None:
    """Send the weights as files in shared memory, one file at a time, to SharedMemoryTransfer. Raises RunFailed."""
    control.start_weight_update()
    with weights.shared_folder() as folder:
        path = f"{folder}/part.safetensors"
        for tensors in weights.cut(source, weights.FILE_BYTES):
            weights.write(tensors, path)
            control.update_weights({"path": path})
            os.remove(path)  # the servers have loaded it
    control.finish_weight_update()


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
        packed_buffer_size_bytes=weights.BROADCAST_BYTES,  # two buffers at both ends; vLLM's default is 1 GiB
    )
    return WeightTransferTrainerFactory.trainer_init(info, client=control, source=source)
