"""The engine behind `--rollout-placement split`: vLLM's servers, beside the trainer.

Every rank asks the servers for responses to its own prompts. Rank 0 starts the servers and sends them the weights, over
NCCL on GPUs and through shared memory on a CPU.
"""

import asyncio
import contextlib
import threading
from functools import partial

import torch
import torch.distributed as dist

from common.errors import RunFailed, raise_together, warn
from common.placement import Layout, World
from common.rollout.rollout import Done, Rollout, collate
from common.rollout.servers import client, process, weights
from common.rollout.vllm_engine import request_seed, sampling_settings
from common.weight_sync import FullParameters


class ServerEngine:
    """The four methods of common/rollout/engines.py over HTTP. generate() may run in a thread beside the trainer."""

    saved_names = True  # vLLM's loaders know the names in a model's files

    def __init__(
        self, model_path: str, stop_token_ids: list[int], world: World, dtype: torch.dtype, rollout_tp: int,
        layout: Layout, environment: dict[str, str], **limits: int,
    ):  # fmt: skip
        """Start the layout's servers, or find those that it names. Collective. Raises RunFailed on all ranks.

        limits: max_model_len and max_num_seqs of each server.
        """
        self.stop_token_ids, self.world, self.layout, self.weight_version = stop_token_ids, world, layout, 0
        self.wire_dtype = dtype  # the servers' own; sending float32 would take twice as long
        # generate() may run beside the trainer's collectives and must not mix with them.
        self.group = dist.new_group(backend="gloo", timeout=world.timeout)
        self.lock = threading.Lock()  # see exclusive()
        self.start = partial(process.start, model_path, dtype, rollout_tp, layout, environment, **limits)
        self.restarted = False
        self.parameters: FullParameters | None = None  # the source of the latest weight update
        self.connect()

    def connect(self) -> None:
        """Start the layout's servers, or find those that it names. Collective. Raises RunFailed on all ranks."""
        self.owned: list[process.Server] = []  # on rank 0: the servers that this run started
        self.sender = None  # on rank 0 with GPUs: vLLM's sender over NCCL
        urls = [url.rstrip("/") for url in self.layout.rollout_urls]
        with together():
            if self.world.is_main:
                self.owned = [] if urls else self.start()
                urls = urls or [server.url for server in self.owned]
                self.control = client.Control(urls)
                self.control.check()
        message = [urls]
        dist.broadcast_object_list(message, src=0)
        self.urls = message[0]

    def generate(
        self, prompt_ids: list[list[int]], n: int, temperature: float, max_tokens: int, seed: int,
        done: Done | None = None,
    ) -> Rollout:  # fmt: skip
        """n responses to each prompt, in submission order. Collective. Raises RunFailed on all ranks.

        Prompt i of rank r is number i * world.size + r of the step. The number gives its seed and its server.
        """
        settings = sampling_settings(temperature, max_tokens, self.stop_token_ids)
        requests = []
        for i, ids in enumerate(prompt_ids):
            number = i * self.world.size + self.world.rank
            seeds = {"seed": request_seed(seed, number, n)} if temperature > 0 else {}
            body = {"token_ids": ids, "sampling_params": {**settings, "n": n, **seeds}}
            requests.append((self.urls[number % len(self.urls)], body))
        try:
            with self.exclusive(self.group), together(self.group):
                version = self.weight_version
                replies = asyncio.run(client.ask_all(requests, version, done))
        except RunFailed as failed:
            self.restart(failed)
            return self.generate(prompt_ids, n, temperature, max_tokens, seed, done)
        responses = [response for reply in replies for response in reply]
        return collate(
            [ids for ids in prompt_ids for _ in range(n)],
            [response.token_ids for response in responses],
            [response.logprobs for response in responses],
            [response.truncated for response in responses],
            version,
            self.world.device,
        )

    @contextlib.contextmanager
    def exclusive(self, group: dist.ProcessGroup | None = None):
        """Keep responses and weight updates apart. Collective over `group`.

        Rank 0 holds the lock for all ranks. With a lock on each rank, one rank could enter generate() and another the
        update, and both would wait for the other ranks.
        """
        with self.lock if self.world.is_main else contextlib.nullcontext():
            dist.barrier(group)
            yield

    def load_weights(self, parameters: FullParameters) -> None:
        """Send the weights to all servers when no responses are in progress. Collective. Raises RunFailed together."""
        try:
            with self.exclusive():
                self.parameters, self.weight_version = parameters, self.weight_version + 1
                self.send()
        except RunFailed as failed:
            self.restart(failed)  # it sends them again

    def send(self) -> None:
        """Send self.parameters as self.weight_version to all servers. Collective. Raises RunFailed on all ranks."""
        source = weights.SingleIteration(self.parameters)
        with together():
            try:
                if self.world.is_main:
                    self.control.version = str(self.weight_version)
                    if self.world.device.type == "cpu":
                        weights.send_in_files(source, self.control)
                    else:
                        self.sender = self.sender or weights.nccl_sender(source, self.control)
                        self.sender.source = source
                        self.sender.send_weights()
            finally:
                for _ in source:  # gathering is collective: every rank iterates to the end, whatever happens on rank 0
                    pass

    def restart(self, failed: RunFailed) -> None:
        """Replace the servers after the loss of one, once in a run, or say why not. Collective. Raises RunFailed.

        All are replaced: the others may have half an update, or wait in NCCL for the one that is lost. Every rank
        takes the same decision, because it depends only on what all ranks know.
        """
        words = [f"; it wrote: {server.last_words()}" for server in self.owned if f"{server.url} " in str(failed)]
        said, code = f"{failed}{''.join(words)}", failed.code
        if code != "server-gone" or self.layout.rollout_urls:
            raise RunFailed(said, code=code)
        if self.restarted:
            raise RunFailed(f"{said}; the run has restarted its servers before, and does so only once", code=code)
        if self.layout.max_inflight_batches > 1:
            reason = "the trainer has changed the weights that they had"
            raise RunFailed(f"{said}; with --max-inflight-batches 2 servers are not restarted: {reason}", code=code)
        warn(f"{said}; the run restarts its servers, once, and repeats what was lost", code="server-restarted")
        self.restarted = True
        if self.sender is not None:
            self.sender.shutdown()
        self.shutdown()
        self.connect()
        if self.parameters is not None:
            self.send()

    def sleep(self) -> None:
        """The servers' memory is not the trainer's: nothing needs to be freed."""

    def shutdown(self) -> None:
        """End the servers that this run started."""
        for server in self.owned:
            server.stop()


@contextlib.contextmanager
def together(group: dist.ProcessGroup | None = None):
    """If what is inside raises RunFailed on any rank, all ranks raise the first one. Collective over `group`."""
    error = None
    try:
        yield
    except RunFailed as failed:
        error = failed
    raise_together(error, group)
