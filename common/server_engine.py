"""The engine behind `--rollout-placement split`: vLLM servers, token ids in, token ids and log-probs out.

Every rank asks for its own prompts; rank 0 starts the servers and sends them the weights, over NCCL on GPUs and
through shared memory on a CPU. What follows the loss of a server: common/server_restart.py.
"""

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterable
from functools import partial

import torch
import torch.distributed as dist

from common import server_control, servers
from common.errors import RunFailed, raise_together
from common.placement import Layout, World
from common.rollout import Done, Rollout, collate
from common.server_requests import ask_all, versions
from common.server_restart import again_if_lost
from common.server_weights import UnderWay, nccl_sender, parts
from common.weight_sync import FullParameters

CHECK_EVERY = 10  # weight updates between two with checksums; a server's first one has them, too


class ServerEngine:
    """The four methods of common/engines.py over HTTP; generate() may run in a thread beside the trainer's."""

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
        limits = {"max_model_len": max_model_len, "max_num_seqs": max_num_seqs}
        self.start = partial(servers.start, model_path, dtype, rollout_tp, layout, environment, **limits)
        self.restarted = False
        self.weights: FullParameters | None = None  # that were sent last
        self.connect()

    def connect(self) -> None:
        """Start the layout's servers, or find the ones it names. Collective. Raises RunFailed on all ranks."""
        self.owned, self.sender, error = [], None, None
        self.fresh = True  # the servers have the weights of the model's files
        urls = [url.rstrip("/") for url in self.layout.rollout_urls]
        if self.world.is_main:
            try:
                if not urls:
                    self.owned = self.start()
                    urls = [server.url for server in self.owned]
                self.control = server_control.Control(urls)
                self.control.check()
            except RunFailed as failed:
                error = failed
        raise_together(error)
        told = [urls]
        dist.broadcast_object_list(told, src=0)
        self.urls = told[0]

    def generate(
        self, prompt_ids: list[list[int]], n: int, temperature: float, max_tokens: int, seed: int,
        done: Done | None = None,
    ) -> Rollout:  # fmt: skip
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
        replies = again_if_lost(self, lambda: self.ask(prompt_ids, n, sampling, seed, done))
        responses = [choice for reply in replies for choice in reply]
        return collate(
            [ids for ids in prompt_ids for _ in range(n)],
            [response["token_ids"] for response in responses],
            [[token["logprob"] for token in response["logprobs"]["content"]] for response in responses],
            [response["finish_reason"] == "length" for response in responses],
            [versions(response) for response in responses],
            self.world.device,
        )

    def ask(
        self, prompt_ids: list[list[int]], n: int, sampling: dict, seed: int, done: Done | None
    ) -> list[list[dict]]:  # fmt: skip
        """The replies to this rank's requests. Collective. Raises RunFailed on all ranks."""
        if self.fresh and self.weights is not None:
            self.send(self.weights, self.weight_version)  # nothing was trained since: they are still the same
        asked = []
        for i, ids in enumerate(prompt_ids):
            index = i * self.world.size + self.world.rank
            for first in range(0, n, self.most):  # a server takes no more in one request than it works on at once
                own = {"n": min(self.most, n - first)}
                if sampling["temperature"] > 0:
                    own["seed"] = ((seed << 12) + index) * n + first
                body = {"token_ids": ids, "sampling_params": {**sampling, **own}}
                asked.append((self.urls[index % len(self.urls)], body))
        parts_each, there = -(-n // self.most), {}

        def told(request: int, choices: list[dict]) -> None:
            there[request] = choices
            place = request // parts_each
            parts = [there.get(place * parts_each + i) for i in range(parts_each)]
            if done is not None and None not in parts:
                whole = [choice for part in parts for choice in part]
                ended = [choice["finish_reason"] == "length" for choice in whole]
                done(place, [choice["token_ids"] for choice in whole], ended)

        with self.no_update():
            replies, error = [], None
            try:
                replies = asyncio.run(ask_all(asked, told))
            except RunFailed as failed:
                error = failed
            raise_together(error, self.group)
        return replies

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
        again_if_lost(self, lambda: self.update(weights))
        self.weights = weights
        self.weight_version += 1

    def update(self, weights: FullParameters) -> None:
        """send() while no responses are under way, unless they may be. Collective. Raises RunFailed on all ranks."""
        main = self.world.is_main
        with self.lock if main and not self.layout.inflight_updates else contextlib.nullcontext():
            dist.barrier()
            try:
                self.send(weights, self.weight_version + 1)
            except RunFailed:
                if main and not self.owned:  # servers of others live on
                    with contextlib.suppress(RunFailed):
                        self.control.resume()
                raise

    def send(self, weights: FullParameters, version: int) -> None:
        """A whole update and its checks. Every rank iterates the weights to the end, whatever happens on rank 0."""
        check = self.fresh or version % CHECK_EVERY == 1
        source = UnderWay(weights, iter(weights))

        def work() -> None:
            self.control.version = str(version)
            self.control.pause()
            if self.world.device.type == "cpu":
                self.control.start_weight_update()
                for body in parts(source.stream, check):
                    self.control.update_weights(body)
                self.control.finish_weight_update()
            else:
                self.sender = self.sender or nccl_sender(self.control, source)
                self.sender.source = source
                self.sender.send_weights()
            self.control.check_version()
            if check:
                self.control.check_alike()
            self.control.resume()

        self.on_main(work, drain=source.stream)
        self.fresh = False

    def on_main(self, work: Callable[[], None], drain: Iterable) -> None:
        """work() on rank 0; its RunFailed on all ranks, after all have iterated `drain`. Collective."""
        error = None
        if self.world.is_main:
            try:
                work()
            except RunFailed as failed:
                error = failed
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
