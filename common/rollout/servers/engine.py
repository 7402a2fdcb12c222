"""The engine behind `--rollout-placement split`: vLLM's servers, beside the trainer.

Every rank asks the servers for responses to its own prompts. Rank 0 starts the servers and sends them the weights, over
NCCL on GPUs and through shared memory on a CPU.
"""

import asyncio
import contextlib
import threading
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from transformers import AutoConfig

from common.data.tokenizer import image_tokens
from common.errors import RunFailed, raise_together, warn
from common.placement import Layout, World
from common.rollout.rollout import Done, Rollout, collate
from common.rollout.servers import client, process, weights
from common.rollout.turns import Reply, Turns, collate_turns, open_turns, turn_seed
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
        self.never = image_tokens(AutoConfig.from_pretrained(model_path))
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
        done: Done | None = None, reply: Reply | None = None,
    ) -> Rollout:  # fmt: skip
        """n responses to each prompt, in submission order. Collective. Raises RunFailed on all ranks.

        Prompt i of rank r is number i * world.size + r of the step. The number gives its seed and its server.
        """
        settings = sampling_settings(temperature, max_tokens, self.stop_token_ids, self.never)
        numbers = [i * self.world.size + self.world.rank for i in range(len(prompt_ids))]
        rows, follow = [], None
        if reply is None:
            seeds = [{"seed": request_seed(seed, number, n)} if temperature > 0 else {} for number in numbers]
            asked = [{**settings, "n": n, **own} for own in seeds]
            bodies = [{"token_ids": ids, "sampling_params": each} for ids, each in zip(prompt_ids, asked)]
        else:
            rows = open_turns(prompt_ids, n, max_tokens)
            done = None  # It takes whole responses, and an episode is whole when its last turn has ended.
            numbers = [number * n + sample for number in numbers for sample in range(n)]
            bodies, follow = converse(rows, settings, numbers, seed, lambda row: reply(row // n, rows[row]))
        urls = [self.urls[number // (n if rows else 1) % len(self.urls)] for number in numbers]
        try:
            with self.exclusive(self.group), together(self.group):
                version = self.weight_version
                answers = asyncio.run(client.ask_all(list(zip(urls, bodies)), version, done, follow))
        except RunFailed as failed:
            self.restart(failed)
            return self.generate(prompt_ids, n, temperature, max_tokens, seed, done, reply)
        if reply is not None:
            return collate_turns(rows, version, self.world.device)
        responses = [response for answer in answers for response in answer]
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


def converse(rows: list[Turns], settings: dict, numbers: list[int], seed: int, reply: Callable):
    """The first requests of responses with several turns, and client.ask_all's follow().

    numbers: of the responses in the step. reply(row) gives the ids that follow the latest turn, or None.
    """

    def body(row: int) -> dict:
        drawn = {"seed": turn_seed(seed, numbers[row], rows[row])} if settings["temperature"] > 0 else {}
        limits = {**settings, "n": 1, "max_tokens": rows[row].room, **drawn}
        return {"token_ids": rows[row].prompt, "sampling_params": limits}

    def follow(row: int, response: client.Response) -> dict | None:
        rows[row].add(response.token_ids, response.logprobs, response.truncated)
        ids = reply(row)
        if ids is None:
            return None
        rows[row].observe(ids)
        return body(row)

    return [body(row) for row in range(len(rows))], follow


@contextlib.contextmanager
def together(group: dist.ProcessGroup | None = None):
    """If what is inside raises RunFailed on any rank, all ranks raise the first one. Collective over `group`."""
    error = None
    try:
        yield
    except RunFailed as failed:
        error = failed
    raise_together(error, group)
