"""HTTP requests to rollout servers: for responses to prompts, and for updates of their weights.

What a request says and how a reply reads depends on the server: vllm_api.py and sglang_api.py both implement `Api`.
Every failure becomes one RunFailed that names the server. Its code is "server-gone" if restarting servers may help.
"""

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import accumulate
from typing import ClassVar, Protocol, TypeVar

import httpx
import torch
from pydantic import BaseModel, NonNegativeInt

from common.errors import RunFailed
from common.rollout.rollout import Done, Response
from common.rollout.servers.process import ANSWER_SECONDS, healthy, is_local
from common.rollout.servers.weights import SingleIteration
from common.rollout.turns import REPLIES_AT_ONCE

UPDATE_SECONDS = 300.0  # for one request of a weight update; over NCCL one request takes all weights, and has longer
# Three failed checks in a row mean that a server hangs. So that is found within 3 * (this + its api's HEALTH_SECONDS).
HEALTH_EVERY_SECONDS = 4.0
CONNECTIONS = 256  # open at once on a rank; further requests of a large step wait for one
# vLLM closes a connection that is idle for 5 s, perhaps while the next request is on its way. So we close it earlier.
IDLE_SECONDS = 1.0

Answer = TypeVar("Answer", bound=BaseModel)


class VersionSpan(BaseModel):
    """Tokens [start, end) of a response, which the same weights sampled. Both kinds of servers report these."""

    version: str  # number of the weights
    start: NonNegativeInt
    end: NonNegativeInt


@dataclass
class Choice:
    """One response in a server's reply."""

    token_ids: list[int]
    logprobs: list[float]
    truncated: bool  # True if the length limit ended it
    spans: list[VersionSpan]


class Api(Protocol):
    """Interface of a module for one kind of server."""

    NAME: str  # in error messages
    GENERATE: str  # route for responses
    HEALTH_SECONDS: float  # how long an answer of /health may take

    def request_body(self, ids: list[int], settings: dict, seed: int) -> dict:
        """A request for responses to these tokens. settings: of vllm_engine.sampling_settings(), and `n`."""

    def read_choices(self, reply: bytes, n: int) -> list[Choice]:
        """The n responses of a reply, in order. Raises ValueError if one is missing or not whole: see check_whole()."""


def check_whole(choice: Choice, index: int) -> None:
    """Raises ValueError if a log-prob or version is missing: later ones would belong to the wrong tokens."""
    tokens = len(choice.token_ids)
    if len(choice.logprobs) != tokens:
        raise ValueError(f"{tokens} tokens and {len(choice.logprobs)} log-probs in response {index}")
    # The spans of the versions follow each other, and cover all tokens.
    covered = 0
    for span in choice.spans:
        if span.start != covered or span.end < span.start:
            raise ValueError(f"a version of tokens {span.start} to {span.end}, after {covered}, in response {index}")
        covered = span.end
    if covered != tokens:
        raise ValueError(f"{tokens} tokens and versions of {covered} in response {index}")


@contextlib.contextmanager
def named_errors(url: str, path: str, name: str, health: str = "/health") -> Iterator[None]:
    """Turn a failed request or an unreadable reply into a RunFailed that names the server.

    name: the NAME of the server's api. health: a route that the server answers as long as its engine lives.
    """
    try:
        yield
    except httpx.HTTPStatusError as error:
        status = error.response.status_code
        message = f"rollout server {url} refused {path} ({status}): {error.response.text[:300]}"
        if status == 404:
            message += "; scripts/serve_rollout.sh starts a server that has this route"
        # A front end whose engine has died answers with an error, too. Only its health tells.
        code = "server-refused" if healthy(url, health) else "server-gone"
        raise RunFailed(message, code=code) from None
    except httpx.HTTPError as error:
        # There is no connection, or it broke before the reply was complete.
        message = f"rollout server {url} is gone: {path}: {type(error).__name__}: {error}"
        raise RunFailed(message, code="server-gone") from None
    except ValueError as error:
        # The page of a proxy, another service at this port, or another version of the server. pydantic's errors have
        # several lines.
        reason = " ".join(str(error).split())[:300]
        raise RunFailed(
            f"rollout server {url} answered {path} unlike {name}: {reason}", code="server-refused"
        ) from None


async def ask_all(
    requests: list[tuple[str, dict]],
    versions: Callable[[], range],
    done: Done | None,
    follow: Callable | None = None,
    *,
    api: Api,
    salted: bool = False,
) -> list[list[Response]]:
    """Send all requests (server, body) at once and return their responses in the same order. Raises RunFailed.

    versions(): numbers of the weights that the servers may have now, several during an update. done is called as soon
    as a request, or its whole conversation, has ended. follow(i, response) gives the body that continues conversation
    i; None ends it. Worker threads call it. salted: a request that is sent after an update reads nothing that was
    cached before it. One that waits at the server during the update may.
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
            responses = await ask(client, url, body, versions, api)
            if follow is None:
                break
            # An environment may take seconds. In a thread it does not hold up the other requests.
            body = await asyncio.get_running_loop().run_in_executor(threads, follow, i, responses[0])
        if done is not None:
            done(i, [response.token_ids for response in responses], [response.truncated for response in responses])
        return responses

    try:
        async with client:
            conversations = [converse(i, url, body) for i, (url, body) in enumerate(requests)]
            # A server that is paused for an update may not sample the token that shows its health. Control.request()
            # watches it meanwhile.
            updating = lambda: len(versions()) > 1
            watches = [watch(f"{url}/health", api.HEALTH_SECONDS, updating) for url in urls]
            return await watched(watches, conversations)
    finally:
        threads.shutdown(wait=False, cancel_futures=True)


def connect(urls: Iterable[str], **settings) -> httpx.AsyncClient:
    """A client for these servers. Certificates, which take longer to load than a request on a LAN, only for https."""
    encrypted = any(url.startswith("https:") for url in urls)
    remote = [url for url in urls if not is_local(url)]
    # A proxy that the environment names is asked for remote servers only. None: without a proxy.
    direct = {f"all://{httpx.URL(url).netloc.decode()}": None for url in urls if is_local(url)}
    return httpx.AsyncClient(verify=encrypted, trust_env=bool(remote), mounts=direct, **settings)


async def watched(watches: list[Coroutine], requests: list[Coroutine]) -> list:
    """What the requests return, in their order. Raises the first error, also that of a watch()."""
    try:
        # The first error in a group cancels its other tasks.
        async with asyncio.TaskGroup() as group:
            watching = [group.create_task(watch) for watch in watches]
            answers = [group.create_task(request) for request in requests]
            await asyncio.gather(*answers, return_exceptions=True)
            for task in watching:
                task.cancel()
    except ExceptionGroup as failed:
        raise failed.exceptions[0] from None
    return [task.result() for task in answers]


async def ask(
    client: httpx.AsyncClient, url: str, body: dict, versions: Callable[[], range], api: Api
) -> list[Response]:
    """The responses to one request, in order. Raises RunFailed if other weights sampled them."""
    oldest = versions().start
    with named_errors(url, api.GENERATE, api.NAME):
        reply = await client.post(url + api.GENERATE, json=body)
        reply.raise_for_status()
        choices = api.read_choices(reply.content, body["sampling_params"]["n"])
    # Updates may have come while the responses were under way.
    allowed = {str(version): version for version in range(oldest, versions().stop)}
    return [to_response(choice, allowed, url, body["sampling_params"]["stop_token_ids"]) for choice in choices]


def to_response(choice: Choice, allowed: dict[str, int], url: str, stop_token_ids: list[int]) -> Response:
    """A choice with the version of each token. Raises RunFailed for a version that is not in `allowed`.

    A response whose last allowed token ends it isn't cut off. SGLang calls it so, because it looks at the length first.
    """
    versions = []
    for span in choice.spans:
        if span.version not in allowed:
            # Someone else has updated the server, or its owner has restarted it.
            expected = " or ".join(allowed)
            message = f"rollout server {url} has weights of version {span.version}, not {expected}"
            raise RunFailed(message, code="weight-version")
        versions += [allowed[span.version]] * (span.end - span.start)
    truncated = choice.truncated and choice.token_ids[-1] not in stop_token_ids
    return Response(choice.token_ids, choice.logprobs, truncated, versions)


async def watch(route: str, seconds: float, is_excused: Callable[[], bool] = lambda: False) -> None:
    """Ask a server's route until three requests in a row have failed, then raise RunFailed. It never returns.

    seconds: for an answer. If is_excused() after a failure, counting starts again.
    """
    url, _, _ = route.rpartition("/")
    failures = 0
    async with connect([url], timeout=seconds) as client:
        while failures < 3:
            await asyncio.sleep(HEALTH_EVERY_SECONDS)
            try:
                (await client.get(route)).raise_for_status()
                failures = 0
            except httpx.HTTPError:
                failures = 0 if is_excused() else failures + 1
    raise RunFailed(f"rollout server {url} does not answer: three health checks have failed", code="server-gone")


@dataclass
class Control:
    """Requests to all servers at once about their weights. Only rank 0 has one. Every method raises RunFailed.

    Each api has a class of its own, with the methods that only raise NotImplementedError here.
    """

    name: ClassVar[str]  # the api's NAME
    health: ClassVar[str]  # route that a server answers during an update
    health_seconds: ClassVar[float]  # how long the answer may take
    urls: list[str]
    inflight_updates: str = "none"  # as in placement.Layout
    patience: float = UPDATE_SECONDS  # how long a request may wait for data, if it says nothing else
    workers: list[int] = field(default_factory=list)  # number of workers of each server, which check() finds out

    def check(self, used: bool = True) -> None:
        """Find out whether all servers have the routes. used: make them forget an earlier run, which may have used
        them. The run's own servers are new.
        """
        raise NotImplementedError

    def send(self, source: SingleIteration, version: int, device: torch.device) -> None:
        """Give all servers the weights under this number. device: the trainer's.

        After a failure some servers may have the old weights.
        """
        raise NotImplementedError

    def abort(self) -> None:
        """End all responses under way."""
        raise NotImplementedError

    def drop(self) -> None:
        """Forget servers that have been lost, before others take their place."""
        raise NotImplementedError

    def leave(self) -> None:
        """The run is over, and the servers may go on."""
        raise NotImplementedError

    def request(
        self, method: str, path: str, bodies: list[dict] | dict | None = None, patience: float | None = None
    ) -> list[bytes]:
        """Send a request to every server and return what they reply.

        bodies: one for each server, or one for all. patience: how long it may wait for data.
        """
        if not isinstance(bodies, list):
            bodies = [bodies] * len(self.urls)

        async def send(url: str, body: dict | None) -> bytes:
            timeout = httpx.Timeout(patience or self.patience, connect=ANSWER_SECONDS)
            async with connect([url], timeout=timeout) as http:
                with named_errors(url, path, self.name, self.health):
                    reply = await http.request(method, url + path, json=body)
                    return reply.raise_for_status().content

        async def send_all() -> list[bytes]:
            # All at once: to join a group, or to receive a broadcast, each server waits for the others.
            requests = [send(url, body) for url, body in zip(self.urls, bodies)]
            watches = [watch(url + self.health, self.health_seconds) for url in self.urls]
            return await watched(watches, requests)

        return asyncio.run(send_all())

    def read(self, path: str, kind: type[Answer]) -> list[Answer]:
        """What each server answers to GET."""
        answers = []
        for url, reply in zip(self.urls, self.request("GET", path)):
            with named_errors(url, path, self.name, self.health):
                answers.append(kind.model_validate_json(reply, strict=True))
        return answers

    def first_ranks(self) -> list[int]:
        """Rank of each server's first worker in a group of them all with the trainer, which has rank 0."""
        return list(accumulate(self.workers[:-1], initial=1))

    @contextlib.contextmanager
    def paused(self, pause: str, resume: str, body: dict | None = None) -> Iterator[None]:
        """Pause all servers between two tokens while the `with` block runs. They go on even if it fails.

        Unfinished responses continue afterwards, and new requests wait. pause, resume: routes. body: sent to `pause`.
        """
        complete = resumed = False
        try:
            self.request("POST", pause, body)
            yield
            complete = True
        finally:
            try:
                if complete:
                    self.request("POST", resume, {})
                    resumed = True
            finally:
                # One lost server cancels the requests to the others.
                if not resumed:
                    self.tell_each(resume)

    def tell_each(self, route: str) -> None:
        """Ask servers one by one to end or undo something, whatever they answer: one may be gone, and others may belong
        to the user.
        """
        for url in self.urls:
            with contextlib.suppress(httpx.HTTPError):
                httpx.post(f"{url}{route}", json={}, timeout=ANSWER_SECONDS, trust_env=not is_local(url))
