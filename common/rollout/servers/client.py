"""HTTP requests to vLLM's servers: for responses to prompts, and for updates of their weights.

Every failure becomes one RunFailed that names the server. Its code is "server-gone" if restarted servers may help.
"""

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Literal

import httpx
from pydantic import BaseModel, Field, NonNegativeInt

from common.errors import RunFailed
from common.rollout.rollout import Done, Response
from common.rollout.servers.process import ANSWER_SECONDS, healthy, is_local
from common.rollout.turns import REPLIES_AT_ONCE

GENERATE = "/inference/v1/generate"
EMPTY_CACHE = "/reset_prefix_cache?reset_running_requests=true"
UPDATE_SECONDS = 300.0  # for one part of a weight update
# A server that hangs fails three health checks in a row, so it is found within three times the sum of these.
HEALTH_EVERY_SECONDS = 4.0
HEALTH_ANSWER_SECONDS = 5.0
CONNECTIONS = 256  # open at once on a rank; further requests of a large step wait for one
# vLLM closes a connection that is idle for 5 s, perhaps while the next request is on its way. So we close it earlier.
IDLE_SECONDS = 1.0
# vLLM reports -9999 for a log-prob that is not a number.
LOWEST_LOGPROB = -9998.0


# The parts of vLLM's replies that we read. vLLM has classes for them, too, but they take 8 s to import, and they accept
# a reply without log-probs.
class TokenLogprob(BaseModel):
    logprob: float = Field(gt=LOWEST_LOGPROB)  # refuses NaN, too


class Logprobs(BaseModel):
    content: list[TokenLogprob]


class VersionSpan(BaseModel):
    version: str  # number of the weights that sampled these of the response's tokens
    start: NonNegativeInt
    end: NonNegativeInt


class Choice(BaseModel):
    index: int
    token_ids: list[NonNegativeInt] = Field(min_length=1)
    logprobs: Logprobs
    finish_reason: Literal["stop", "length"]
    weight_versions: list[VersionSpan]


class Reply(BaseModel):
    choices: list[Choice]


class WorldSize(BaseModel):
    world_size: int


@contextlib.contextmanager
def named_errors(url: str, path: str) -> Iterator[None]:
    """Turn a failed request or an unreadable reply into a RunFailed that names the server."""
    try:
        yield
    except httpx.HTTPStatusError as error:
        status = error.response.status_code
        message = f"rollout server {url} refused {path} ({status}): {error.response.text[:300]}"
        if status == 404:
            message += "; scripts/serve_rollout.sh starts a server that has this route"
        # A front end whose engine has died answers with an error, too. Only its health tells.
        code = "server-refused" if healthy(url) else "server-gone"
        raise RunFailed(message, code=code) from None
    except httpx.HTTPError as error:
        # There is no connection, or it broke before the reply was complete.
        message = f"rollout server {url} is gone: {path}: {type(error).__name__}: {error}"
        raise RunFailed(message, code="server-gone") from None
    except ValueError as error:
        # The page of a proxy, another service at this port, or another version of vLLM. pydantic's errors have several
        # lines.
        reason = " ".join(str(error).split())[:300]
        raise RunFailed(f"rollout server {url} answered {path} unlike vLLM: {reason}", code="server-refused") from None


async def ask_all(
    requests: list[tuple[str, dict]],
    versions: Callable[[], range],
    done: Done | None,
    follow: Callable | None = None,
    *,
    salted: bool = False,
) -> list[list[Response]]:
    """Send all requests (server, body) at once and return their responses in the same order. Raises RunFailed.

    versions(): numbers of the weights that the servers may have now. done is called as soon as a request is answered.
    follow(i, response) gives the body that continues the conversation of request i; None ends it. Threads call it.
    salted: no response reads a prompt from the cache that older weights have computed.
    """
    urls = {url for url, _ in requests}
    threads = ThreadPoolExecutor(REPLIES_AT_ONCE, "environment")
    client = connect(
        urls,
        # A long response takes its time, so there is no timeout. watch() finds a server that hangs.
        timeout=None,
        limits=httpx.Limits(max_connections=CONNECTIONS, keepalive_expiry=IDLE_SECONDS),
    )

    async def converse(i: int, url: str, body: dict | None) -> list[Response]:
        """The responses to request i or, with an environment, to the last one of its conversation."""
        while body is not None:
            if salted:
                # Requests made during an update have a cache of their own: they may be computed before or after it.
                now = versions()
                body = body | {"cache_salt": f"{now.start} to {now.stop - 1}"}
            responses = await ask(client, url, body, versions)
            if follow is None:
                break
            # An environment may take seconds. In a thread it does not hold up the other requests.
            body = await asyncio.get_running_loop().run_in_executor(threads, follow, i, responses[0])
        if done is not None:
            done(i, [response.token_ids for response in responses], [response.truncated for response in responses])
        return responses

    try:
        async with client:
            return await watched(urls, [converse(i, url, body) for i, (url, body) in enumerate(requests)])
    finally:
        threads.shutdown(wait=False, cancel_futures=True)


def connect(urls: Iterable[str], **settings) -> httpx.AsyncClient:
    """A client for these servers. Certificates, which take longer to load than a request on a LAN, only for https."""
    encrypted = any(url.startswith("https:") for url in urls)
    return httpx.AsyncClient(verify=encrypted, trust_env=not all(map(is_local, urls)), **settings)


async def watched(urls: Iterable[str], requests: list[Coroutine]) -> list:
    """What the requests return, in their order. Raises the first error, also that of a server that does not answer."""
    try:
        # The first error in a group cancels its other tasks.
        async with asyncio.TaskGroup() as group:
            watches = [group.create_task(watch(url)) for url in urls]
            answers = [group.create_task(request) for request in requests]
            await asyncio.gather(*answers, return_exceptions=True)
            for task in watches:
                task.cancel()
    except ExceptionGroup as failed:
        raise failed.exceptions[0] from None
    return [task.result() for task in answers]


async def ask(client: httpx.AsyncClient, url: str, body: dict, versions: Callable[[], range]) -> list[Response]:
    """The responses to one request, in order. Raises RunFailed if other weights sampled them."""
    oldest = versions().start
    with named_errors(url, GENERATE):
        reply = await client.post(url + GENERATE, json=body)
        reply.raise_for_status()
        choices = read_choices(reply.content, body["sampling_params"]["n"])
    # Updates may have come while the responses were under way.
    allowed = {str(version): version for version in range(oldest, versions().stop)}
    return [to_response(choice, allowed, url) for choice in choices]


def to_response(choice: Choice, allowed: dict[str, int], url: str) -> Response:
    """A choice with the version of each token. Raises RunFailed for a version that is not in `allowed`."""
    versions = []
    for span in choice.weight_versions:
        if span.version not in allowed:
            # Someone else has updated the server, or its owner has restarted it.
            expected = " or ".join(allowed)
            message = f"rollout server {url} has weights of version {span.version}, not {expected}"
            raise RunFailed(message, code="weight-version")
        versions += [allowed[span.version]] * (span.end - span.start)
    logprobs = [token.logprob for token in choice.logprobs.content]
    return Response(choice.token_ids, logprobs, choice.finish_reason == "length", versions)


async def watch(url: str) -> None:
    """Raise RunFailed when three health checks of the server have failed in a row."""
    failures = 0
    async with connect([url], timeout=HEALTH_ANSWER_SECONDS) as client:
        while failures < 3:
            await asyncio.sleep(HEALTH_EVERY_SECONDS)
            try:
                (await client.get(f"{url}/health")).raise_for_status()
                failures = 0
            except httpx.HTTPError:
                failures += 1
    raise RunFailed(f"rollout server {url} does not answer: three health checks have failed", code="server-gone")


def read_choices(reply: bytes, n: int) -> list[Choice]:
    """The n responses of a reply, in order.

    Raises ValueError if a response is not complete: a missing response, token or version would shift all that follow.
    """
    choices = Reply.model_validate_json(reply, strict=True).choices
    if len(choices) != n:
        raise ValueError(f"{len(choices)} responses, {n} were requested")
    for choice in choices:
        tokens = len(choice.token_ids)
        if len(choice.logprobs.content) != tokens:
            raise ValueError(f"{tokens} tokens and {len(choice.logprobs.content)} log-probs in response {choice.index}")
        # The spans of the versions follow each other, and cover all tokens.
        covered = 0
        for span in choice.weight_versions:
            if span.start != covered or span.end < span.start:
                raise ValueError(f"a version from token {span.start}, after {covered}, in response {choice.index}")
            covered = span.end
        if covered != tokens:
            raise ValueError(f"{tokens} tokens and versions of {covered} in response {choice.index}")
    return sorted(choices, key=lambda choice: choice.index)


@dataclass
class Control:
    """Requests to all servers at once about their weights. Rank 0 has one. Every method raises RunFailed.

    vLLM's NCCL sender calls the last four methods. vLLM's own HTTPVLLMWeightSyncClient has them too, but it knows a
    single server, and its errors do not say what the server answered. VLLM_SERVER_DEV_MODE=1 opens the routes.
    """

    urls: list[str]
    keeps_cache: bool = False  # responses under way keep the keys and values of older weights
    workers: list[int] = field(default_factory=list)  # number of workers for each server
    version: str = "0"  # number of the weights that are being sent

    def request(self, method: str, path: str, bodies: list[dict] | dict | None = None) -> list[bytes]:
        """Send a request to every server and return what they reply. bodies: one for each server, or one for all."""
        if not isinstance(bodies, list):
            bodies = [bodies] * len(self.urls)

        async def send(url: str, body: dict | None) -> bytes:
            timeout = httpx.Timeout(UPDATE_SECONDS, connect=ANSWER_SECONDS)
            async with connect([url], timeout=timeout) as http:
                with named_errors(url, path):
                    reply = await http.request(method, url + path, json=body)
                    return reply.raise_for_status().content

        async def send_all() -> list[bytes]:
            # All at once: to join NCCL, or to receive a broadcast, each server waits for the others.
            return await watched(self.urls, [send(url, body) for url, body in zip(self.urls, bodies)])

        return asyncio.run(send_all())

    def check(self) -> None:
        """Find out whether all servers answer and have the routes, and how many workers they have."""
        # Another run may have used the server. Then it has that run's version; it is paused, if the run ended during an
        # update; and its cache has keys and values of other weights, perhaps under the same salts.
        self.request("POST", "/update_weight_version", {"new_version": "0"})
        self.request("POST", "/resume")
        self.request("POST", EMPTY_CACHE)
        replies = self.request("GET", "/get_world_size")
        for url, reply in zip(self.urls, replies):
            with named_errors(url, "/get_world_size"):
                self.workers.append(WorldSize.model_validate_json(reply, strict=True).world_size)

    def init_weight_transfer_engine(self, init_info: dict) -> None:
        """Give each server's workers NCCL ranks of their own. vLLM's sender calls it, and knows one server only."""
        bodies = []
        next_rank = 1  # 0 is the trainer's
        for workers in self.workers:
            bodies.append({"init_info": {**init_info, "rank_offset": next_rank}})
            next_rank += workers
        self.request("POST", "/init_weight_transfer_engine", bodies)

    def start_weight_update(self) -> None:
        self.request("POST", "/start_weight_update")

    def update_weights(self, update_info: dict) -> None:
        self.request("POST", "/update_weights", {"update_info": update_info})

    def finish_weight_update(self) -> None:
        self.request("POST", "/finish_weight_update", {"weight_version": self.version})
        # The old weights computed the keys and values in this cache. What belongs to responses under way is computed
        # again when they go on.
        if not self.keeps_cache:
            self.request("POST", EMPTY_CACHE)

    def abort(self) -> None:
        """End all responses under way."""
        self.request("POST", "/abort_requests", {})

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Stop all servers between two tokens. Responses under way go on afterwards, and new requests wait."""
        complete = False
        try:
            self.request("POST", "/pause?mode=keep&clear_cache=false")
            yield
            complete = True
        finally:
            if complete:
                self.request("POST", "/resume")
            else:
                self.resume_each()

    def resume_each(self) -> None:
        """Let servers go on after a failed update, one by one: one may be gone, and others may belong to the user."""
        for url in self.urls:
            with contextlib.suppress(httpx.HTTPError):
                httpx.post(f"{url}/resume", timeout=ANSWER_SECONDS, trust_env=not is_local(url))
