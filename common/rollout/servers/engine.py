"""The engine behind `--rollout-placement split`: vLLM's servers, on devices of their own.

Every rank asks the servers for responses to its own prompts. Rank 0 starts the servers and sends them the weights, over
NCCL on GPUs and through shared memory on a CPU.

If a server is lost, all servers of this run are restarted, once. All of them, because an update may have reached only
some of them, and on GPUs the others may wait in NCCL for the lost one. The new servers read the model's files, get the
latest weights under the number these had, and the responses or the update that failed are repeated. The second loss
ends the run. Two kinds of servers are never restarted: servers that the user has started (--rollout-urls), and servers
that sample ahead of the trainer (--max-inflight-batches 2 or more), because the weights they had are gone.

With --max-inflight-batches 2 or more, threads are in generate() when the trainer pushes new weights. What happens then:

--inflight-updates none       The update waits until no response is under way. The trainer does not wait for that: it
                              may train on further batches, and `behind` counts the updates that the servers miss.
--inflight-updates recompute  The servers pause between two tokens, take the weights and go on. Responses under way have
                              tokens of several versions. Their keys and values are computed again, so each log-prob is
                              exactly that of the weights that its version names.
--inflight-updates keep       The same, but their keys and values stay those of older weights.
"""

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain

import torch.distributed as dist
from transformers import AutoConfig

from common.data.tokenizer import image_tokens
from common.errors import RunFailed, raise_together, warn
from common.placement import World
from common.rollout.rollout import Done, Response, Rollout, collate_responses
from common.rollout.servers import client, process, weights
from common.rollout.turns import Reply, Turns, collate_turns, open_turns, turn_seed
from common.rollout.vllm_engine import EngineConfig, request_seed, sampling_settings
from common.weight_sync import FullParameters


class ServerEngine:
    """The four methods of common/rollout/engines.py over HTTP. generate() may run in a thread beside the trainer."""

    saved_names = True  # vLLM's loaders know the names in a model's files

    def __init__(self, config: EngineConfig, stop_token_ids: list[int], world: World):
        """Start the layout's servers, or connect to those that it names. Collective. Raises RunFailed on all ranks."""
        self.config = config
        self.inflight_updates = config.layout.inflight_updates
        self.stop_token_ids = stop_token_ids
        self.world = world
        self.wire_dtype = config.dtype  # the servers' dtype; sending float32 would take twice as long
        self.never = image_tokens(AutoConfig.from_pretrained(config.model_path))
        self.weight_version = 0  # updates of the trainer, whether the servers have them or not
        self.behind = 0  # how many of the latest updates the servers do not have
        self.updating = False  # an update is being sent
        self.calls = Calls()
        self.thread = threading.local()  # its `group`: see use_group()
        self.restarted = False
        self.parameters: FullParameters | None = None  # the source of the latest weight update
        self.connect()

    def connect(self) -> None:
        """Start the layout's servers, or connect to those that it names. Collective. Raises RunFailed on all ranks."""
        self.started: list[process.Server] = []  # on rank 0: the servers that this run started
        self.sender = None  # on rank 0 with GPUs: vLLM's sender over NCCL
        urls = [url.rstrip("/") for url in self.config.layout.rollout_urls]
        with failing_together():
            if self.world.is_main:
                if not urls:
                    self.started = process.start(self.config)
                    urls = [server.url for server in self.started]
                self.control = client.Control(urls, keeps_cache=self.inflight_updates == "keep")
                self.control.check()
        # Only rank 0 knows the ports of servers that it has started.
        message = [urls]
        dist.broadcast_object_list(message, src=0)
        self.urls = message[0]

    def generate(
        self,
        prompt_ids: list[list[int]],
        n: int,
        temperature: float,
        max_tokens: int,
        seed: int,
        done: Done | None = None,
        reply: Reply | None = None,
    ) -> Rollout:
        """n responses to each prompt, in submission order. Collective. Raises RunFailed on all ranks.

        Prompt i of rank r is number i * world.size + r of the step. This number decides its seed and its server, which
        therefore do not depend on how many ranks there are.
        """
        settings = sampling_settings(temperature, max_tokens, self.stop_token_ids, self.never)
        settings["n"] = n
        numbers = [i * self.world.size + self.world.rank for i in range(len(prompt_ids))]
        try:
            if reply is None:
                return self.sample(prompt_ids, numbers, settings, seed, done)
            return self.converse(prompt_ids, numbers, settings, seed, reply)
        except RunFailed as failed:
            self.restart(failed)
            # With the same seeds the new servers sample the same responses, except for rounding.
            return self.generate(prompt_ids, n, temperature, max_tokens, seed, done, reply)

    def sample(
        self, prompt_ids: list[list[int]], numbers: list[int], settings: dict, seed: int, done: Done | None
    ) -> Rollout:
        """generate() without an environment: one request a prompt. numbers: the prompts' in the step. Collective."""
        n = settings["n"]
        requests = []
        for ids, number in zip(prompt_ids, numbers):
            body = request_body(ids, settings, request_seed(seed, number, n))
            requests.append((self.server_of(number), body))
        responses = list(chain(*self.ask(requests, done)))
        versions = [response.versions for response in responses]
        return collate_responses(prompt_ids, n, responses, versions, self.world.device)

    def converse(
        self, prompt_ids: list[list[int]], numbers: list[int], settings: dict, seed: int, reply: Reply
    ) -> Rollout:
        """generate() with an environment: each turn of a response is a request. Collective.

        A reward cannot grade before all have ended, because an answer of a server is only one turn of an episode.
        """
        n = settings["n"]
        turns = open_turns(prompt_ids, n, settings["max_tokens"])
        response_numbers = [number * n + sample for number in numbers for sample in range(n)]
        conversations = Conversations(turns, response_numbers, settings, seed, reply)
        requests = []
        for row, number in enumerate(response_numbers):
            requests.append((self.server_of(number // n), conversations.body(row)))
        self.ask(requests, follow=conversations.follow)
        return collate_turns(turns, None, self.world.device)

    def ask(
        self, requests: list[tuple[str, dict]], done: Done | None = None, follow: Callable | None = None
    ) -> list[list[Response]]:
        """client.ask_all(). Collective. Raises RunFailed on all ranks."""
        salted = self.inflight_updates == "keep"
        with failing_together(self.group), self.calls.one():
            return asyncio.run(client.ask_all(requests, self.versions, done, follow, salted=salted))

    def versions(self) -> range:
        """Numbers of the weights that the servers may have at this moment. Two of them during an update."""
        updating = self.updating  # read first: update() clears it last
        oldest = self.weight_version - self.behind
        return range(oldest, (self.weight_version if updating else oldest) + 1)

    @property
    def group(self) -> dist.ProcessGroup | None:
        """Process group of this thread. None is torch's default group, which the trainer uses."""
        return getattr(self.thread, "group", None)

    def use_group(self, group: dist.ProcessGroup) -> None:
        """Let the collectives of generate() use this group in the calling thread, so as not to mix with others'."""
        self.thread.group = group

    def server_of(self, number: int) -> str:
        """The server that samples responses to this prompt of the step: they take prompts in turns."""
        return self.urls[number % len(self.urls)]

    def load_weights(self, parameters: FullParameters) -> None:
        """Send the weights to all servers, now or when take_latest() can. Collective. Raises RunFailed on all ranks."""
        self.parameters = parameters
        self.behind += 1  # first: a thread that asks for versions() in between may get one too many, but never lack one
        self.weight_version += 1
        self.take_latest()

    def take_latest(self) -> None:
        """Send the latest weights if the servers lack them. Collective. Raises RunFailed on all ranks.

        Without --inflight-updates this does nothing as long as a response is under way on any rank.
        """
        if not self.behind:
            return
        if self.inflight_updates != "none":
            self.update()
            return
        with self.calls.none_may_begin():
            if self.world.max(self.calls.count) == 0:
                self.update()

    def wait_until(self, done: Callable[[], bool]) -> None:
        """Wait until done(), or until take_latest() can send weights that the servers lack. See wake()."""
        with self.calls.changed:
            self.calls.changed.wait_for(lambda: done() or (self.behind and not self.calls.count))

    def wake(self) -> None:
        """Let wait_until() ask done() again."""
        with self.calls.changed:
            self.calls.changed.notify_all()

    def update(self) -> None:
        """Send the latest weights; if a server is lost, to new servers. Collective. Raises RunFailed on all ranks."""
        self.updating = True
        try:
            self.send()
        except RunFailed as failed:
            self.restart(failed)  # it sends them again
        self.behind = 0
        self.updating = False

    def send(self) -> None:
        """Send self.parameters as self.weight_version to all servers. Collective. Raises RunFailed on all ranks."""
        source = weights.SingleIteration(self.parameters)
        with failing_together():
            try:
                if self.world.is_main:
                    self.control.version = str(self.weight_version)
                    self.send_from_main(source)
            finally:
                # Ranks other than 0 only gather. Rank 0 gathers what is left, if sending failed.
                for _ in source:
                    pass

    def send_from_main(self, source: weights.SingleIteration) -> None:
        """Send the weights from rank 0. Raises RunFailed on this rank."""
        amid_responses = self.inflight_updates != "none"
        with self.control.paused() if amid_responses else contextlib.nullcontext():
            if self.world.device.type == "cpu":
                weights.send_in_files(source, self.control)
                return
            if self.sender is None:
                self.sender = weights.nccl_sender(source, self.control)
            self.sender.source = source
            self.sender.send_weights()

    def restart(self, failed: RunFailed) -> None:
        """Replace the servers after the loss of one, or raise RunFailed with the reason why not. Collective.

        Every rank decides the same, because the decision depends only on what all ranks know.
        """
        # Add the last words of the server that the message names. Only rank 0 has started servers and knows them.
        message = str(failed)
        for server in self.started:
            if f"{server.url} " in message:
                message += f"; it wrote: {server.last_words()}"
        if failed.code != "server-gone" or self.config.layout.rollout_urls:
            raise RunFailed(message, code=failed.code)
        if self.restarted:
            message += "; the run has restarted its servers before, and does so only once"
            raise RunFailed(message, code=failed.code)
        if self.config.layout.max_inflight_batches > 1:
            message += "; with --max-inflight-batches > 1 servers are not restarted, because the trainer has changed "
            raise RunFailed(f"{message}the weights that they had", code=failed.code)
        warn(f"{message}; the run restarts its servers, once, and repeats what was lost", code="server-restarted")
        self.restarted = True
        if self.sender is not None:
            self.sender.shutdown()
        self.shutdown()
        self.connect()
        # Before the first update they have the weights of the model's files, as the lost ones had.
        if self.parameters is not None:
            self.send()

    def sleep(self) -> None:
        """The servers' memory is not the trainer's: nothing needs to be freed."""

    def shutdown(self) -> None:
        """End the servers that this run started."""
        for server in self.started:
            server.stop()


class Calls:
    """generate() calls under way on this rank, and a gate that keeps new ones waiting during an update."""

    def __init__(self):
        self.changed = threading.Condition()
        self.count = 0
        self.closed = False

    @contextlib.contextmanager
    def one(self) -> Iterator[None]:
        """A call is under way inside. It begins when the gate is open."""
        with self.changed:
            self.changed.wait_for(lambda: not self.closed)
            self.count += 1
        try:
            yield
        finally:
            with self.changed:
                self.count -= 1
                self.changed.notify_all()

    @contextlib.contextmanager
    def none_may_begin(self) -> Iterator[None]:
        """The gate is closed inside. Calls that are under way go on."""
        with self.changed:
            self.closed = True
        try:
            yield
        finally:
            with self.changed:
                self.closed = False
                self.changed.notify_all()


def request_body(ids: list[int], settings: dict, seed: int) -> dict:
    """A request for responses to these tokens. A greedy response needs no seed."""
    sampling = {**settings, "seed": seed} if settings["temperature"] > 0 else settings
    return {"token_ids": ids, "sampling_params": sampling}


@dataclass
class Conversations:
    """The requests of responses with several turns."""

    turns: list[Turns]  # one for each response
    numbers: list[int]  # each response's number in the step
    settings: dict  # for sampling; n: responses to each prompt
    seed: int
    reply: Reply

    def body(self, row: int) -> dict:
        """The request for the next turn of a response."""
        turns = self.turns[row]
        settings = {**self.settings, "n": 1, "max_tokens": turns.room}
        return request_body(turns.prompt, settings, turn_seed(self.seed, self.numbers[row], turns))

    def follow(self, row: int, response: Response) -> dict | None:
        """Add a turn to its response. Returns the request for the next turn, or None."""
        turns = self.turns[row]
        turns.add(response.token_ids, response.logprobs, response.truncated, response.versions)
        ids = self.reply(row // self.settings["n"], turns)
        if ids is None:
            return None
        turns.observe(ids)
        return self.body(row)


@contextlib.contextmanager
def failing_together(group: dist.ProcessGroup | None = None) -> Iterator[None]:
    """If what is inside raises RunFailed on any rank, all ranks raise the first one. Collective over `group`."""
    error = None
    try:
        yield
    except RunFailed as failed:
        error = failed
    raise_together(error, group)
