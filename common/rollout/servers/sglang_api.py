"""Requests to SGLang's servers, and how their replies read: responses, and updates of weights.

The user starts the servers (scripts/serve_rollout.sh), because SGLang needs another version of torch than the trainer.
Measured with SGLang 0.5.23 on a CPU; it has never run over NCCL.

A push pauses the servers in "retract" mode. Unfinished responses keep their tokens and return to the queue, and the
cache is emptied, so their keys and values are computed again under the new weights. Each log-prob is then that of the
weights its version names. SGLang's other mode, "in_place", would go on with the old weights' keys and values, even for
later requests.
"""

import contextlib
import socket
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Literal

import httpx
import torch
import torch.distributed as dist
from pydantic import BaseModel, Field, NonNegativeInt, PositiveInt, TypeAdapter
from torch.distributed import distributed_c10d
from torch.distributed.elastic.utils.distributed import get_free_port
from transformers import AutoConfig

from common.errors import BadInput, RunFailed, say
from common.rollout.servers import client, weights
from common.rollout.servers.client import VersionSpan
from common.rollout.servers.process import is_local
from common.rollout.servers.weights import SingleIteration

NAME = "SGLang"
GENERATE = "/generate"
# /health samples a token, or waits for the next token of any response. The server itself gives up after 20 s.
HEALTH_SECONDS = 25.0
ANSWER_SECONDS = 30.0  # for what a server says about itself
JOIN_SECONDS = 30.0  # for servers to join the trainer's group
BROADCAST_SECONDS = 60.0  # for a part of the weights
# Keys that may differ between two config.json of the same model.
IGNORED_CONFIG_KEYS = {"_name_or_path", "transformers_version", "dtype", "use_cache", "architectures"}


# The parts of the replies that we read.
class FinishReason(BaseModel):
    type: Literal["stop", "length"]  # "abort" is refused: such a response is not whole


class MetaInfo(BaseModel):
    finish_reason: FinishReason
    output_token_logprobs: list[tuple[float, int, None]]  # log-prob, token, text
    weight_versions: list[VersionSpan]


class Sampled(BaseModel):
    output_ids: list[NonNegativeInt] = Field(min_length=1)
    meta_info: MetaInfo


class ModelInfo(BaseModel):
    model_type: str
    tokenizer_path: str  # where the model is; model_path changes with every push from a folder
    weight_version: str


class ServerInfo(BaseModel):
    dtype: str
    tp_size: PositiveInt
    pp_size: PositiveInt
    dp_size: PositiveInt
    max_req_input_len: PositiveInt  # a prompt has fewer tokens


GENERATED = TypeAdapter(list[Sampled] | Sampled)


def request_body(ids: list[int], settings: dict, seed: int) -> dict:
    """A request for responses to these tokens.

    Outside its deterministic mode SGLang takes a seed and ignores it, and in that mode all n responses to a prompt
    would be equal. So none is sent, and a run is not repeatable.
    """
    sampling = {
        "n": settings["n"],
        "temperature": settings["temperature"],
        "max_new_tokens": settings["max_tokens"],
        "stop_token_ids": settings["stop_token_ids"],
        "skip_special_tokens": False,
        # Without these the model's generation_config.json decides.
        "top_p": 1.0,
        "top_k": -1,
        "min_p": 0.0,
        "frequency_penalty": 0.0,
        "presence_penalty": 0.0,
        "repetition_penalty": 1.0,
    }
    if bias := settings.get("logit_bias"):
        sampling["logit_bias"] = {str(token): value for token, value in bias.items()}
    return {"input_ids": ids, "sampling_params": sampling, "return_logprob": True}


def read_choices(reply: bytes, n: int) -> list[client.Choice]:
    """The n responses of a reply, in order. Raises ValueError if a response is missing or not whole."""
    found = GENERATED.validate_json(reply, strict=True)
    if isinstance(found, Sampled):
        found = [found]
    if len(found) != n:
        raise ValueError(f"{len(found)} responses, {n} were requested")
    choices = []
    for index, sampled in enumerate(found):
        meta = sampled.meta_info
        if [token for _, token, _ in meta.output_token_logprobs] != sampled.output_ids:
            raise ValueError(f"log-probs of other tokens than those of response {index}")
        logprobs = [logprob for logprob, _, _ in meta.output_token_logprobs]
        truncated = meta.finish_reason.type == "length"
        choice = client.Choice(sampled.output_ids, logprobs, truncated, meta.weight_versions)
        client.check_whole(choice, index)
        choices.append(choice)
    return choices


def check_servers(urls: tuple[str, ...], model_path: str, max_model_len: int, dtype: torch.dtype) -> None:
    """Refuse servers that cannot sample for this trainer. It needs no weights. Raises BadInput.

    max_model_len: tokens of the longest prompt and its response. dtype: the trainer's.
    """
    control = Control([url.rstrip("/") for url in urls], patience=ANSWER_SECONDS)
    try:
        models = control.read("/model_info", ModelInfo)
        servers = control.read("/server_info", ServerInfo)
    except RunFailed as failed:
        raise BadInput(f"--rollout-urls: {failed}", code=failed.code) from None
    wanted = str(dtype).removeprefix("torch.")
    for url, model, server in zip(control.urls, models, servers):
        problems = []
        if found := difference(model_path, model):
            problems.append(found)
        if server.dtype != wanted:
            problems.append(f"it has {server.dtype} and the trainer {wanted}: start it with --dtype {wanted}")
        if server.pp_size > 1 or server.dp_size > 1:
            problems.append("its --pp-size and --dp-size must be 1: start more servers instead")
        # With an environment, a conversation may grow until its prompt leaves room for one more token.
        longest = max_model_len - 1
        if server.max_req_input_len <= longest:
            problems.append(
                f"its prompts have fewer than {server.max_req_input_len} tokens, and this run's up to {longest}: "
                f"see its --context-length and --max-total-tokens"
            )
        if problems:
            raise BadInput(f"--rollout-urls {url}: {'; '.join(problems)}")
    say("rollout: SGLang samples without seeds, so the same command will give other responses")


def difference(model_path: str, served: ModelInfo) -> str:
    """How a server's model differs from the trainer's, or "". Of a model that is not here only the family is known."""
    ours = AutoConfig.from_pretrained(model_path)
    if served.model_type != ours.model_type:
        return f"its model is a {served.model_type}, and --model a {ours.model_type}"
    try:
        theirs = AutoConfig.from_pretrained(served.tokenizer_path, local_files_only=True).to_dict()
    except (OSError, ValueError):
        return ""
    for name, value in ours.to_dict().items():
        if name not in IGNORED_CONFIG_KEYS and theirs.get(name) != value:
            return f"its model is not --model: {name} is {theirs.get(name)} there and {value} in {model_path}"
    return ""


@dataclass
class Control(client.Control):
    """Pushes weights: through a folder in shared memory to servers on this machine, if the trainer has no GPU;
    otherwise by broadcast in a process group with all of their workers, over NCCL or, without a GPU, gloo.
    """

    name = NAME
    health = "/model_info"  # a paused server has no token for /health
    health_seconds = HEALTH_SECONDS
    group: dist.ProcessGroup | None = None  # with the servers' workers, for broadcasts
    group_name: str = field(default_factory=lambda: f"trainer-{uuid.uuid4().hex}")  # its own: servers may hold others

    def check(self, used: bool = True) -> None:
        # An earlier run may have left the server amid a push: paused, with unfinished responses, in a session for
        # weights. Setting a version aborts the responses.
        self.request("POST", "/update_weight_version", {"new_version": "0"})
        self.tell_each("/end_weight_update")
        self.request("POST", "/continue_generation", {})
        self.workers = [server.tp_size for server in self.read("/server_info", ServerInfo)]

    def send(self, source: SingleIteration, version: int, device: torch.device) -> None:
        if device.type == "cpu" and all(map(is_local, self.urls)):
            self.send_folder(source, version)
        else:
            self.send_broadcasts(source, version, device)

    def pause(self) -> contextlib.AbstractContextManager:
        """Pause the servers for a push.

        Even idle ones need it: while any request is running, be it one of /health, a server that is not paused cannot
        empty its cache, and answers 400 although it has loaded the new weights.
        """
        return self.paused("/pause_generation", "/continue_generation", {"mode": "retract"})

    def send_folder(self, source: SingleIteration, version: int) -> None:
        """Send the weights as files in shared memory."""
        with weights.shared_folder() as folder:
            for number, tensors in enumerate(weights.cut(source, weights.FILE_BYTES)):
                weights.write(tensors, f"{folder}/model-{number:05d}.safetensors")
            with self.pause():
                update = {"model_path": folder, "weight_version": str(version)}
                self.request("POST", "/update_weights_from_disk", update)
                self.compare_versions(version)

    def compare_versions(self, version: int) -> None:
        """Raises RunFailed if a server names another version than the one that it was sent.

        A server that skips tensors, because it doesn't know their names, names the new version all the same. Then the
        gap between its log-probs and the trainer's grows (mismatch/, and --max-logprob-gap ends the run).
        """
        for url, model in zip(self.urls, self.read("/model_info", ModelInfo)):
            if model.weight_version != str(version):
                found = model.weight_version
                message = f"rollout server {url} has weights of version {found} after a push of {version}"
                raise RunFailed(message, code="weight-version")

    def send_broadcasts(self, source: SingleIteration, version: int, device: torch.device) -> None:
        """Send the weights in flat parts to all workers at once."""
        if self.group is None:
            self.group = self.join(device)
        with self.pause(), self.update_session():
            for tensors in weights.cut(source, weights.BROADCAST_BYTES):
                self.broadcast(tensors, version)
        self.compare_versions(version)

    @contextlib.contextmanager
    def update_session(self) -> Iterator[None]:
        """Servers take broadcasts inside. A session that stays open would refuse those of the next run, too."""
        try:
            self.request("POST", "/begin_weight_update", {})
            yield
            self.request("POST", "/end_weight_update", {})
        except RunFailed:
            self.tell_each("/end_weight_update")
            raise

    def broadcast(self, tensors: dict[str, torch.Tensor], version: int) -> None:
        """Send one part: all tensors as bytes, one after the other."""
        # The widest data types first, so that each tensor begins at a multiple of its element's size.
        ordered = sorted(tensors.items(), key=lambda item: -item[1].element_size())
        part = {
            "names": [name for name, _ in ordered],
            "dtypes": [str(tensor.dtype).removeprefix("torch.") for _, tensor in ordered],
            "shapes": [list(tensor.shape) for _, tensor in ordered],
            "group_name": self.group_name,
            "load_format": "flattened_bucket",
            "weight_version": str(version),
        }
        flat = torch.cat([tensor.flatten().view(torch.uint8) for _, tensor in ordered])
        with self.asked_meanwhile("/update_weights_from_distributed", part) as asked:
            work = dist.broadcast(flat, src=0, group=self.group, async_op=True)
            # work.wait() would not end if the servers refuse the part.
            while not work.is_completed() and not failed(asked):
                time.sleep(0.001)
            if not failed(asked):
                work.wait()  # raises what has ended the broadcast

    @contextlib.contextmanager
    def asked_meanwhile(self, path: str, bodies: list[dict] | dict) -> Iterator[Future]:
        """Send a request in a thread while the `with` block does the trainer's part: servers answer only after it."""
        with ThreadPoolExecutor(1, "push") as thread:
            asked = thread.submit(self.request, "POST", path, bodies)
            try:
                yield asked
            except RuntimeError as error:
                # A server that has refused tells more than the group that has lost it.
                if not failed(asked):
                    message = f"process group with the workers of {', '.join(self.urls)}: {path}: {error}"
                    if torch.cuda.is_available():
                        message += " (in the first push: do both load the same NCCL? See docs/placement.md)"
                    raise RunFailed(message, code="server-gone") from None
            asked.result()

    def join(self, device: torch.device) -> dist.ProcessGroup:
        """A process group of the trainer, which is rank 0, and all workers of all servers."""
        backend = "nccl" if device.type == "cuda" else "gloo"
        address, port = address_for(self.urls), get_free_port()
        size = 1 + sum(self.workers)
        body = {"master_address": address, "master_port": port, "world_size": size}
        body |= {"group_name": self.group_name, "backend": backend}
        bodies = [body | {"rank_offset": rank} for rank in self.first_ranks()]
        patience = timedelta(seconds=JOIN_SECONDS)
        with self.asked_meanwhile("/init_weights_update_group", bodies):
            store = dist.TCPStore(address, port, size, is_master=True, timeout=patience, wait_for_workers=False)
            # torch has no public function for a group with processes outside the default group. SGLang's workers use
            # this one, and both ends must use the same keys of the store.
            group, _ = distributed_c10d._new_process_group_helper(
                size,
                0,
                [],
                dist.Backend(backend),
                dist.PrefixStore(self.group_name, store),
                group_name=self.group_name,
                backend_options=None,
                timeout=timedelta(seconds=BROADCAST_SECONDS),
            )
        distributed_c10d._world.pg_group_ranks[group] = {rank: rank for rank in range(size)}  # broadcast() looks here
        return group

    def abort(self) -> None:
        self.request("POST", "/abort_request", {"abort_all": True})

    def drop(self) -> None:
        """Servers that are lost end the run: they are the user's."""

    def leave(self) -> None:
        if self.group is None:
            return
        leaving = self.asked_meanwhile("/destroy_weights_update_group", {"group_name": self.group_name})
        with contextlib.suppress(RunFailed), leaving:  # a server that is gone has nothing to leave
            dist.destroy_process_group(self.group)


def failed(asked: Future) -> bool:
    return asked.done() and asked.exception() is not None


def address_for(urls: list[str]) -> str:
    """This machine's address as the servers reach it. connect() of a UDP socket picks a route, and sends nothing."""
    remote = [url for url in urls if not is_local(url)]
    if not remote:
        return "127.0.0.1"
    there = httpx.URL(remote[0])
    family, kind, _, _, address = socket.getaddrinfo(there.host, there.port or 80, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)
        return probe.getsockname()[0]
