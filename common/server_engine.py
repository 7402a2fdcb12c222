"""The engine behind `--rollout-placement split`: vLLM servers, token ids in, token ids and log-probs out.

Every rank asks for its own prompts; rank 0 starts the servers and sends them the weights, over NCCL on GPUs and
through shared memory on a CPU.
"""

import asyncio
import contextlib
import os
import socket
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import httpx
import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import save_file

from common import servers
from common.errors import RunFailed, raise_together
from common.placement import Layout, World
from common.rollout import Rollout, collate
from common.server_requests import ask_all, versions
from common.weight_sync import FullParameters, checksum

CHECK_EVERY = 10  # weight updates between two with checksums, the first one included
PART = 64 * 2**20  # bytes of weights in shared memory at a time, at least one tensor


class ServerEngine:
    """The four methods of common/rollout.py over HTTP; generate() may run in a thread beside the trainer's."""

    def __init__(
        self, model_path: str, stop_token_ids: list[int], world: World, dtype: torch.dtype, rollout_tp: int,
        layout: Layout, environment: dict[str, str], *, max_model_len: int, max_num_seqs: int,
    ):  # fmt: skip
        """Start the layout's servers, or find the ones it names. Collective. Raises RunFailed on all ranks."""
        self.stop_token_ids, self.world, self.layout, self.weight_version = stop_token_ids, world, layout, 0
        self.wire_dtype = dtype  # the engine's: no need to send more
        # Of generate(), which may run beside other collectives.
        self.group = dist.new_group(backend="gloo", timeout=world.timeout)
        self.lock = threading.Lock()  # rank 0's: responses are under way, or an update is
        self.most = max_num_seqs
        self.owned, self.sender, error = [], None, None
        urls = [url.rstrip("/") for url in layout.rollout_urls]
        if world.is_main:
            try:
                if not urls:
                    limits = {"max_model_len": max_model_len, "max_num_seqs": max_num_seqs}
                    self.owned = servers.start(model_path, dtype, rollout_tp, layout, environment, **limits)
                    urls = [server.url for server in self.owned]
                self.control = servers.Control(urls)
                self.control.check()
            except RunFailed as failed:
                error = failed
        raise_together(error)
        told = [urls]
        dist.broadcast_object_list(told, src=0)
        self.urls = told[0]

    def generate(self, prompt_ids: list[list[int]], n: int, temperature: float, max_tokens: int, seed: int) -> Rollout:
        """n responses to each prompt, in submission order. Collective. Raises RunFailed naming the server.

        Prompt i of rank r is the step's prompt i * size + r: it has a seed and a server of its own by that number.
        """
        sampling = {
            "temperature": temperature,
            "top_p": 1.0,  # top-p, top-k and penalties would sample from another policy than the one trained
            "top_k": 0,
            "max_tokens": max_tokens,
            "stop_token_ids": self.stop_token_ids,
            "logprobs": 0,  # the sampled token's alone
            "detokenize": False,
        }
        asked = []
        for i, ids in enumerate(prompt_ids):
            index = i * self.world.size + self.world.rank
            for first in range(0, n, self.most):  # a server takes no more in one request than it works on at once
                own = {"n": min(self.most, n - first)}
                if temperature > 0:
                    own["seed"] = ((seed << 12) + index) * n + first
                body = {"token_ids": ids, "sampling_params": {**sampling, **own}}
                asked.append((self.urls[index % len(self.urls)], body))
        with self.no_update():
            replies, error = [], None
            try:
                replies = asyncio.run(ask_all(asked))
            except RunFailed as failed:
                error = self.explained(failed)
            raise_together(error, self.group)
        responses = [choice for reply in replies for choice in reply]
        return collate(
            [ids for ids in prompt_ids for _ in range(n)],
            [response["token_ids"] for response in responses],
            [[token["logprob"] for token in response["logprobs"]["content"]] for response in responses],
            [response["finish_reason"] == "length" for response in responses],
            [versions(response) for response in responses],
            self.world.device,
        )

    @contextlib.contextmanager
    def no_update(self):
        """Rank 0 holds the lock for all: were it each rank's own, a thread here and an update there would wait for
        each other. Collective, in the thread that generates.
        """
        locked = self.world.is_main and not self.layout.inflight_updates
        with self.lock if locked else contextlib.nullcontext():
            dist.barrier(self.group)
            yield

    def load_weights(self, weights: FullParameters) -> None:
        """Send the weights to all servers, after the responses that are under way, or with --inflight-updates into
        their midst. Collective. Raises RunFailed on all ranks.
        """
        main = self.world.is_main
        with self.lock if main and not self.layout.inflight_updates else contextlib.nullcontext():
            dist.barrier()
            try:
                self.send(weights)
            except RunFailed:
                if main:  # servers of others live on
                    with contextlib.suppress(RunFailed):
                        self.control.resume()
                raise
        self.weight_version += 1

    def send(self, weights: FullParameters) -> None:
        """A whole update and its checks. Every rank iterates the weights to the end, whatever happens on rank 0."""
        check = self.weight_version % CHECK_EVERY == 0
        stream, cpu = iter(weights), self.world.device.type == "cpu"

        def begin() -> None:
            self.control.version = str(self.weight_version + 1)
            self.control.pause()
            if cpu:
                self.control.start_weight_update()

        def finish() -> None:
            if cpu:
                for body in parts(stream, check):
                    self.control.update_weights(body)
                self.control.finish_weight_update()
            self.control.check_version()
            if check:
                self.control.check_alike()
            self.control.resume()

        self.on_main(begin)
        if not cpu:
            self.sender = self.sender or nccl_sender(self, weights)
            self.sender.send_weights()
        self.on_main(finish, drain=stream if cpu else ())

    def on_main(self, work: Callable[[], None], drain: Iterable = ()) -> None:
        """work() on rank 0; its RunFailed on all ranks, after all have iterated `drain`. Collective."""
        error = None
        if self.world.is_main:
            try:
                work()
            except RunFailed as failed:
                error = self.explained(failed)
        for _ in drain:
            pass
        raise_together(error)

    def explained(self, error: RunFailed) -> RunFailed:
        """The same with what the server wrote, where this rank started it."""
        said = [f"; it wrote: {server.last_words()}" for server in self.owned if f"{server.url} " in f"{error} "]
        return RunFailed(f"{error}{''.join(said)}", code=error.code)

    def sleep(self) -> None:
        """Nothing to give back: the servers' memory is their own."""

    def shutdown(self) -> None:
        """End the servers this run started."""
        for server in self.owned:
            server.stop()


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


def nccl_sender(engine: ServerEngine, weights: FullParameters):
    """vLLM's trainer side of its NCCL backend: one group of rank 0 and all workers of the servers."""
    from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory
    from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

    main = engine.world.is_main
    with socket.socket() as probe:
        probe.bind(("", 0))
        port = probe.getsockname()[1]
    info = NCCLTrainerInitInfo(
        master_address=address_towards(engine.urls[0]),
        master_port=port,
        world_size=1 + (engine.control.workers if main else 0),
        rank=engine.world.rank,
    )
    client = engine.control if main else servers.Control([])
    return WeightTransferTrainerFactory.trainer_init(info, client=client, source=weights)


def address_towards(url: str) -> str:
    """This machine's address as the server sees it. Nothing is sent."""
    parsed = httpx.URL(url)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((parsed.host, parsed.port or 80))
        return probe.getsockname()[0]
