"""What vLLM's servers are asked and answer: responses, and updates of their weights.

Rank 0 sends the weights over NCCL with vLLM's own sender or, from a CPU, through shared memory.
common/rollout/vllm_weights.py receives them there.
"""

import contextlib
import os
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from pydantic import BaseModel, Field, NonNegativeInt, PositiveInt

from common.errors import BadInput, RunFailed
from common.placement import COLLECTIVE_TIMEOUT_SECONDS
from common.rollout.servers import client, weights
from common.rollout.servers.client import VersionSpan
from common.rollout.servers.process import is_local
from common.rollout.servers.weights import SingleIteration
from common.weight_sync import TensorInfo

NAME = "vLLM"
GENERATE = "/inference/v1/generate"
HEALTH_SECONDS = 5.0  # its front end answers, whatever the engine computes
INFO_SECONDS = 60.0  # what a server says about itself; the first time it runs programs such as pip and nvidia-smi
# A request to a server that dies fails at once. Ranks that fail together should say so within errors.GIVE_UP_SECONDS.
LOSS_SECONDS = 2.0
EMPTY_CACHE = "/reset_prefix_cache?reset_running_requests=true"
START_UPDATE = "/start_weight_update"
FINISH_UPDATE = "/finish_weight_update"
LEAVE = "/shutdown_weight_transfer_engine"
SERVER_INFO = "/server_info?config_format=json"
# Parts of what a server answers to FINISH_UPDATE: no update is open; it was started without --weight-transfer-config.
NO_UPDATE = "without a matching start_weight_update"
NO_TRANSFER = "not configured"
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


class Generated(BaseModel):
    choices: list[Sampled]


class WorldSize(BaseModel):
    world_size: int


class ModelConfig(BaseModel):
    dtype: str
    max_model_len: PositiveInt
    logprobs_mode: str


class WeightTransferConfig(BaseModel):
    backend: str


class VllmConfig(BaseModel):
    model: ModelConfig = Field(alias="model_config")  # pydantic uses this name itself
    weight_transfer_config: WeightTransferConfig | None


class ServerInfo(BaseModel):
    vllm_config: VllmConfig


def request_body(ids: list[int], settings: dict, seed: int) -> dict:
    """A request for responses to these tokens. A greedy response needs no seed."""
    sampling = {**settings, "seed": seed} if settings["temperature"] > 0 else settings
    return {"token_ids": ids, "sampling_params": sampling}


def read_choices(reply: bytes, n: int) -> list[client.Choice]:
    """The n responses of a reply, in order. Raises ValueError if a response is missing or not whole."""
    found = Generated.model_validate_json(reply, strict=True).choices
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


def check_servers(urls: tuple[str, ...], max_model_len: int, dtype: torch.dtype) -> None:
    """Refuse the user's servers that cannot sample for this trainer, or take no weights from it. Raises BadInput.

    max_model_len: tokens of the longest prompt and its response. dtype: the trainer's. Another model than the trainer's
    shows at the first push.
    """
    control = Control([url.rstrip("/") for url in urls], patience=INFO_SECONDS)
    try:
        # A server has this route if it has those for weights.
        infos = control.read(SERVER_INFO, ServerInfo)
    except RunFailed as failed:
        raise BadInput(f"--rollout-urls: {failed}", code=failed.code) from None
    wanted = str(dtype).removeprefix("torch.")
    backend = transfer_backend()
    for url, info in zip(control.urls, infos):
        model, transfer = info.vllm_config.model, info.vllm_config.weight_transfer_config
        problems = []
        served = model.dtype.removeprefix("torch.")
        if served != wanted:
            problems.append(f"it has {served} and the trainer {wanted}: start it with --dtype {wanted}")
        if model.max_model_len < max_model_len:
            problems.append(
                f"its prompts and responses have up to {model.max_model_len} tokens together, and this run's up to "
                f"{max_model_len}: start it with --max-model-len {max_model_len}"
            )
        if model.logprobs_mode != "processed_logprobs":
            problems.append(
                f"its log-probs are {model.logprobs_mode}, and the trainer's are those after the temperature: start it "
                "with --logprobs-mode processed_logprobs"
            )
        if transfer is None or transfer.backend != backend:
            problems.append(f"it takes no weights over {backend}: {start_with(backend)}")
        if problems:
            raise BadInput(f"--rollout-urls {url}: {'; '.join(problems)}")


def transfer_backend() -> str:
    """How this trainer sends weights, as vLLM calls it."""
    return "nccl" if torch.cuda.is_available() else "shared_memory"


def start_with(backend: str) -> str:
    """What the user should do about a server that takes no weights."""
    config = f'{{"backend": "{backend}"}}'
    return f"start it with scripts/serve_rollout.sh, or with --weight-transfer-config '{config}'"


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
    lost: RunFailed | None = None  # why the update over NCCL cannot go on
    answered: threading.Event = field(default_factory=threading.Event)  # the update's request over NCCL has ended
    ending: threading.Lock = field(default_factory=threading.Lock)  # held while the NCCL group is ended

    def check(self, used: bool = True) -> None:
        # Another run may have used the server. Then it has that run's version; if the run ended during an update, it is
        # paused and the update is still open; and its cache has keys and values of other weights, perhaps under the
        # same salts.
        self.request("POST", "/update_weight_version", {"new_version": "0"})
        if used:
            # A new server has no update to end. It would print an error, and last_words() would quote that.
            self.end_update()
        self.request("POST", "/resume")
        self.request("POST", EMPTY_CACHE)
        self.workers = [server.world_size for server in self.read("/get_world_size", WorldSize)]

    def end_update(self) -> None:
        """End an update that an earlier run has left open: the server would refuse every later one.

        A server without one answers with an error. One that takes no weights at all says so, too. Raises RunFailed.
        """
        for url in self.urls:
            try:
                replace(self, urls=[url]).request("POST", FINISH_UPDATE)
            except RunFailed as failed:
                if NO_TRANSFER in str(failed):
                    message = f"rollout server {url} takes no weights: {start_with(transfer_backend())}"
                    raise RunFailed(message, code="server-refused") from None
                if NO_UPDATE not in str(failed):
                    raise

    def send(self, source: SingleIteration, version: int, device: torch.device) -> None:
        """Give all servers the weights under this number: from a CPU in files, from a GPU over NCCL."""
        self.version = str(version)
        amid_responses = self.inflight_updates != "none"
        pause = self.paused("/pause?mode=keep&clear_cache=false", "/resume")
        with pause if amid_responses else contextlib.nullcontext():
            try:
                if device.type == "cpu":
                    send_in_files(source, self)
                else:
                    self.send_over_nccl(source)
            except BaseException:
                self.abort_broadcast()  # the server's request would wait for the rest, and this process for the request
                self.tell_each(FINISH_UPDATE)  # the user's servers would refuse the updates of the next run
                raise

    def send_over_nccl(self, source: SingleIteration) -> None:
        """Send the weights with vLLM's sender, which calls update_weights() in a thread of its own. Raises RunFailed
        if a server is lost.
        """
        source = UntilLost(source, self)
        try:
            if self.sender is None:
                self.sender = nccl_sender(source, self)
            self.sender.source = source
            self.sender.send_weights()
        except RunFailed:
            raise
        except (RuntimeError, OSError) as error:
            # NCCL does not say which server it has lost. The request in the other thread does, perhaps a moment later.
            self.answered.wait(LOSS_SECONDS)
            if self.lost is None:
                raise
            raise self.lost from error

    @contextlib.contextmanager
    def beside_nccl(self) -> Iterator[None]:
        """A request inside, in a thread of vLLM's sender. The other thread waits in NCCL for the same servers."""
        self.answered.clear()
        try:
            yield
        except RunFailed as failed:
            self.lost = failed
            raise
        finally:
            self.answered.set()

    def init_weight_transfer_engine(self, init_info: dict) -> None:
        """Give each server's workers NCCL ranks of their own. vLLM's sender calls it, and knows one server only."""
        bodies = [{"init_info": {**init_info, "rank_offset": rank}} for rank in self.first_ranks()]
        with self.beside_nccl():
            self.request("POST", "/init_weight_transfer_engine", bodies)

    def start_weight_update(self) -> None:
        self.request("POST", START_UPDATE)

    def update_weights(self, update_info: dict) -> None:
        body = {"update_info": update_info}
        if self.sender is None:
            self.request("POST", "/update_weights", body)
            return
        try:
            with self.beside_nccl():
                # One request takes all weights, and gathering them may take as long as any other collective.
                self.request("POST", "/update_weights", body, patience=COLLECTIVE_TIMEOUT_SECONDS)
        except RunFailed:
            self.abort_broadcast()  # it would wait for the server
            raise

    def abort_broadcast(self) -> None:
        """End the NCCL group at once, for both ends. No update can follow. Any thread may call it, more than once."""
        with self.ending:  # vLLM notes only afterwards that a group is ended, and NCCL must not end it twice
            if self.sender is not None and self.sender.model_update_group is not None:
                self.sender.model_update_group.destroy()

    def finish_weight_update(self) -> None:
        self.request("POST", FINISH_UPDATE, {"weight_version": self.version})
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
        """End the NCCL group with the servers, whose memory both ends hold. The next run makes another one."""
        if self.sender is not None:
            self.tell_each(LEAVE)
            self.sender.shutdown()


@dataclass
class UntilLost:
    """The weights to send over NCCL, until a server is lost: then iterating raises its error.

    After an abort the group must not be used any more, and NCCL's threads may still be ending it.
    """

    source: SingleIteration
    control: Control

    def metadata(self) -> list[TensorInfo]:
        return self.source.metadata()

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for pair in self.source:
            self.raise_if_lost()
            yield pair
        self.raise_if_lost()  # the sender still has tensors that it has collected

    def raise_if_lost(self) -> None:
        if self.control.lost is not None:
            raise self.control.lost


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


def nccl_sender(source: UntilLost, control: Control):
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
