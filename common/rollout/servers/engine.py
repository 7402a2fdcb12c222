"""The engine behind `--rollout-placement split`: servers of vLLM or SGLang, on devices of their own.

Every rank asks the servers for responses to its own prompts. Rank 0 sends them the weights, over NCCL on GPUs; from a
CPU through shared memory or, to SGLang's servers elsewhere, over gloo. It also starts vLLM's servers, unless the user
has. SGLang's are always the user's.

If a server is lost, all servers of this run are restarted, once. All of them, because an update may have reached only
some of them, and on GPUs the others may wait in NCCL for the lost one. The new servers read the model's files, get the
latest weights under the number these had, and the responses or the update that failed are repeated. The second loss
ends the run. Two kinds of servers are never restarted: servers that the user has started (--rollout-urls), and servers
that sample ahead of the trainer (--max-inflight-batches 2 or more), because the weights they had are gone.

With --max-inflight-batches 2 or more, threads are in generate() when the trainer pushes new weights. What happens then:

--inflight-updates none       The update waits until no response is under way. The trainer does not wait for that: it
                              trains on batches that are complete, and `behind` counts the updates that servers miss.
--inflight-updates recompute  The servers pause between two tokens, take the weights and go on. Responses under way have
                              tokens of several versions. Their keys and values are computed again, so each log-prob is
                              that of the weights that its version names.
--inflight-updates keep       The same, but their keys and values stay those of older weights.
"""

import asyncio
import contextlib
import resource
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain

import torch.distributed as dist
from transformers import AutoConfig

from common.data.tokenizer import image_tokens
from common.errors import RunFailed, raise_together, say, warn
from common.placement import World
from common.rollout.rollout import Done, Response, Rollout, collate_responses
from common.rollout.servers import client, process, sglang_api, vllm_api, weights
from common.rollout.turns import Reply, Turns, collate_turns, open_turns, turn_seed
from common.rollout.vllm_engine import EngineConfig, request_seed, sampling_settings
from common.weight_sync import FullParameters

APIS = {"vllm": vllm_api, "sglang": sglang_api}  # --rollout-backend -> what speaks to its servers


class ServerEngine:
    """The four methods of common/rollout/engines.py over HTTP. generate() may run in a thread beside the trainer."""

    saved_names = True  # vLLM's loaders know the names in a model's files

    def __init__(self, config: EngineConfig, stop_token_ids: list[int], world: World):
        """Start the layout's servers, or connect to those that it names. Collective. Raises RunFailed on all ranks."""
        self.config = config
        self.api = APIS[config.backend]
        self.inflight_updates = config.layout.inflight_updates
        self.stop_token_ids = stop_token_ids
        self.world = world
        self.wire_dtype = config.dtype  # the servers' dtype; sending float32 would take twice as long
        self.never = image_tokens(AutoConfig.from_pretrained(config.model_path))
        self.weight_version = 0  # updates of the trainer, whether the servers have them or not
        self.served_version = 0  # the latest of them that the servers have
        self.sending = False  # an update is being sent
        self.before_failing: Callable[[], None] = lambda: None  # saves what can be saved; every rank calls it
        self.calls = CallGate()
        self.of_thread = threading.local()  # its `group`: see use_group()
        self.restarted = False
        self.parameters: FullParameters | None = None  # the source of the latest weight update
        raise_limit_of_open_files()
        self.connect()

    def connect(self) -> None:
        """Start the layout's servers, or connect to those that it names. Collective. Raises RunFailed on all ranks."""
        self.started: list[process.Server] = []  # on rank 0: the servers that this run started
        urls = [url.rstrip("/") for url in self.config.layout.rollout_urls]
        with failing_together():
            if self.world.is_main:
                if not urls:
                    self.started = process.start(self.config)
                    urls = [server.url for server in self.started]
                self.control = self.api.Control(urls, self.inflight_updates)
                self.control.check(used=not self.started)
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
            body = self.api.request_body(ids, settings, request_seed(seed, number, n))
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
        conversations = Conversations(self.api, turns, response_numbers, settings, seed, reply)
        requests = []
        for row, number in enumerate(response_numbers):
            requests.append((self.server_of(number // n), conversations.body(row)))
        self.ask(requests, follow=conversations.follow)
        return collate_turns(turns, None, self.world.device)

    def ask(
        self, requests: list[tuple[str, dict]], done: Done | None = None, follow: Callable | None = None
    ) -> list[list[Response]]:
        """client.ask_all(). Collective. Raises RunFailed on all ranks."""
        # Only with `keep` may the servers have keys and values of older weights in their caches.
        salted = self.inflight_updates == "keep"
        # A call stops counting before it waits for the other ranks' calls. send_if_behind() needs a moment in which no
        # rank counts one. With several steps in flight there would be none if a finished call counted until the slowest
        # rank was done.
        with failing_together(self.group), self.calls.under_way():
            return asyncio.run(client.ask_all(requests, self.versions, done, follow, api=self.api, salted=salted))

    @property
    def behind(self) -> int:
        """How many of the trainer's updates the servers do not have. Equal on all ranks."""
        return self.weight_version - self.served_version

    def versions(self) -> range:
        """Numbers of the weights that the servers may have at this moment. More than one during an update.

        Any thread may call it. The order of reading matters: sending ends after served_version has changed.
        """
        sending = self.sending
        oldest = self.served_version
        return range(oldest, (self.weight_version if sending else oldest) + 1)

    @property
    def group(self) -> dist.ProcessGroup | None:
        """Process group of this thread. None is torch's default group, which the trainer's thread uses."""
        return getattr(self.of_thread, "group", None)

    def use_group(self, group: dist.ProcessGroup) -> None:
        """Let the collectives of generate() use this group in the calling thread, so as not to mix with others'."""
        self.of_thread.group = group

    def server_of(self, number: int) -> str:
        """The server that samples responses to this prompt of the step: they take prompts in turns."""
        return self.urls[number % len(self.urls)]

    def load_weights(self, parameters: FullParameters) -> None:
        """Send the weights to all servers, now or when send_if_behind() can. Collective: the trainer's thread of every
        rank. Raises RunFailed on all ranks, after before_failing().
        """
        self.parameters = parameters
        self.weight_version += 1
        try:
            self.send_if_behind()
        except RunFailed:
            self.before_failing()
            raise

    def send_if_behind(self) -> None:
        """Send the latest weights if the servers lack them. Collective: the trainer's thread of every rank. Raises
        RunFailed on all ranks.

        With --inflight-updates none this does nothing as long as a response is under way on any rank.
        """
        if not self.behind:
            return
        if self.inflight_updates != "none":
            self.send_or_restart()
            return
        with self.calls.closed():
            if self.world.max(self.calls.count) == 0:
                self.send_or_restart()

    def wait_for_step_or_idle(self, ended: Callable[[], bool]) -> None:
        """Wait until ended(), or until this rank has no response under way and the servers lack weights. The trainer's
        thread calls it; see wake().
        """
        with self.calls.changed:
            self.calls.changed.wait_for(lambda: ended() or (self.behind and not self.calls.count))

    def wake(self) -> None:
        """Let wait_for_step_or_idle() ask ended() again. Any thread may call it."""
        with self.calls.changed:
            self.calls.changed.notify_all()

    def abandon(self) -> None:
        """End the responses under way, because nobody will train on them: their generate() raises. Rank 0 does it."""
        if self.world.is_main:
            with contextlib.suppress(RunFailed):  # a server that is gone has none
                self.control.abort()

    def send_or_restart(self) -> None:
        """Send the latest weights; if a server is lost, to new servers. Collective. Raises RunFailed on all ranks."""
        self.sending = True
        # A response of the new weights may end at any rank as soon as rank 0 has sent them. versions() then allows it.
        dist.barrier()
        try:
            self.send()
        except RunFailed as failed:
            self.restart(failed)  # it sends them again
        self.served_version = self.weight_version
        self.sending = False

    def send(self) -> None:
        """Send self.parameters as self.weight_version to all servers. Collective. Raises RunFailed on all ranks."""
        source = weights.SingleIteration(self.parameters)
        with failing_together():
            try:
                if self.world.is_main:
                    self.control.send(source, self.weight_version, self.world.device)
            finally:
                # Ranks other than 0 only gather. Rank 0 gathers what is left, if sending failed.
                for pair in source:
                    del pair  # or it would stay while the next one is gathered

    def restart(self, failed: RunFailed) -> None:
        """Replace the servers after the loss of one, or raise RunFailed with the reason why not. Collective.

        Every rank decides the same, because the decision depends only on what all ranks know.
        """
        # Add the last words of the server that the message names. Only rank 0 has started servers and knows them.
        message = str(failed)
        for server in self.started:
            if f"{server.url} " in message:
                wrote = server.last_words()
                message += f"; it wrote: {wrote}"
                if self.world.size > 1:  # another rank may be the first to raise its error, and so print that
                    say(f"rollout server {server.url} wrote: {wrote}")
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
        if self.world.is_main:
            self.control.drop()
        self.stop_servers()
        self.connect()
        # Before the first update they have the weights of the model's files, as the lost ones had.
        if self.parameters is not None:
            self.send()

    def sleep(self) -> None:
        """The servers' memory is not the trainer's: nothing needs to be freed."""

    def shutdown(self) -> None:
        """Leave the servers, and end those that this run started."""
        if self.world.is_main:
            self.control.leave()
        self.stop_servers()

    def stop_servers(self) -> None:
        """End the servers that this run started."""
        for server in self.started:
            server.stop()


class CallGate:
    """Counts the generate() calls under way on this rank. Closed, it keeps new ones waiting, for an update."""

    def __init__(self):
        self.changed = threading.Condition()
        self.count = 0
        self.is_closed = False

    @contextlib.contextmanager
    def under_way(self) -> Iterator[None]:
        """A call is under way inside. It begins when the gate is open."""
        with self.changed:
            self.changed.wait_for(lambda: not self.is_closed)
            self.count += 1
        try:
            yield
        finally:
            with self.changed:
                self.count -= 1
                self.changed.notify_all()

    @contextlib.contextmanager
    def closed(self) -> Iterator[None]:
        """No call may begin inside. Those that are under way go on."""
        with self.changed:
            self.is_closed = True
        try:
            yield
        finally:
            with self.changed:
                self.is_closed = False
                self.changed.notify_all()


def raise_limit_of_open_files() -> None:
    """Allow as many open files as the system does: each step in flight has up to client.CONNECTIONS connections."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = 2**16  # macOS and some containers have no limit, and take no infinity
    wanted = most if hard == resource.RLIM_INFINITY else min(hard, most)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, wanted), hard))


@dataclass
class Conversations:
    """The requests of responses with several turns."""

    api: client.Api
    turns: list[Turns]  # one for each response
    numbers: list[int]  # each response's number in the step
    settings: dict  # for sampling; n: responses to each prompt
    seed: int
    reply: Reply

    def body(self, row: int) -> dict:
        """The request for the next turn of a response."""
        turns = self.turns[row]
        settings = {**self.settings, "n": 1, "max_tokens": turns.room}
        return self.api.request_body(turns.prompt, settings, turn_seed(self.seed, self.numbers[row], turns))

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
