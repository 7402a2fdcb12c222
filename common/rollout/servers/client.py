"""HTTP requests to vLLM's servers: for responses to prompts, and for updates of their weights.

Every failure becomes one RunFailed that names the server. Its code is "server-gone" if restarted servers may help.
"""

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import httpx

from common.data.json_lines import is_count, is_number, parse
from common.errors import RunFailed
from common.rollout.rollout import Done
from common.rollout.servers.process import ANSWER_SECONDS, healthy, is_local
from common.rollout.turns import REPLIES_AT_ONCE

GENERATE = "/inference/v1/generate"
UPDATE_SECONDS = 300.0  # for one part of a weight update
HEALTH_EVERY_SECONDS, HEALTH_ANSWER_SECONDS = 4.0, 5.0  # a server that hangs is found within three times their sum
CONNECTIONS = 256  # open at once on a rank; further requests of a large step wait for one
IDLE_SECONDS = 1.0  # vLLM closes a connection that is idle for 5 s, perhaps while the next request is on its way
LOWEST_LOGPROB = -9998.0  # vLLM reports -9999 for a log-prob that is not a number


@dataclass
class Response:
    """One sampled response."""

    token_ids: list[int]
    logprobs: list[float]
    truncated: bool  # True if the length limit ended it
    weight_version: str


@contextlib.contextmanager
def named_errors(url: str, path: str) -> Iterator[None]:
    """Turn a failed request or an unreadable reply into a RunFailed that names the server."""
    try:
        yield
    except httpx.HTTPStatusError as error:
        status, text = error.response.status_code, error.response.text[:300]
        hint = "; scripts/serve_rollout.sh starts a server that has this route" if status == 404 else ""
        code = "server-refused" if healthy(url) else "server-gone"  # a dying engine is answered with an error, too
        raise RunFailed(f"rollout server {url} refused {path} ({status}): {text}{hint}", code=code) from None
    except httpx.HTTPError as error:
        said = f"rollout server {url} is gone: {path}: {type(error).__name__}: {error}"
        raise RunFailed(said, code="server-gone") from None
    except (LookupError, TypeError, ValueError) as error:
        said = f"rollout server {url} answered {path} unlike vLLM: {type(error).__name__}: {error}"
        raise RunFailed(said, code="server-refused") from None


async def ask_all(
    requests: list[tuple[str, dict]], version: int, done: Done | None, follow: Callable | None = None
) -> list[list[Response]]:
    """Send all requests (server, body) at once and return their responses in the same order. Raises RunFailed.

    version: number of the weights that must have sampled them. done is called as soon as a request is answered.
    follow(i, response) gives the body that continues the conversation of request i; None ends it. Threads call it.
    """
    threads = ThreadPoolExecutor(REPLIES_AT_ONCE, "environment")
    urls = {url for url, _ in requests}
    client = httpx.AsyncClient(
        timeout=None,  # a long response takes its time; watch() finds a server that hangs
        limits=httpx.Limits(max_connections=CONNECTIONS, keepalive_expiry=IDLE_SECONDS),
        trust_env=not all(map(is_local, urls)),
    )

    async def ask(i: int, url: str, body: dict | None) -> list[Response]:
        while body is not None:
            with named_errors(url, GENERATE):
                reply = (await client.post(url + GENERATE, json=body)).raise_for_status()
                responses = read_responses(parse(reply.content), body["sampling_params"]["n"])
            for response in responses:
                if response.weight_version != str(version):
                    said = f"rollout server {url} has weights of version {response.weight_version}, not {version}"
                    raise RunFailed(said, code="weight-version")
            body = follow and await asyncio.get_running_loop().run_in_executor(threads, follow, i, responses[0])
        if done is not None:
            done(i, [response.token_ids for response in responses], [response.truncated for response in responses])
        return responses

    try:
        async with client, asyncio.TaskGroup() as group:  # the first error cancels all other tasks
            watches = [group.create_task(watch(url)) for url in urls]
            answers = [group.create_task(ask(i, url, body)) for i, (url, body) in enumerate(requests)]
            await asyncio.gather(*answers, return_exceptions=True)
            for task in watches:
                task.cancel()
    except ExceptionGroup as failed:
        raise failed.exceptions[0] from None
    finally:
        threads.shutdown(wait=False, cancel_futures=True)
    return [task.result() for task in answers]


async def watch(url: str) -> None:
    """Raise RunFailed when three health checks of the server have failed in a row."""
    failures = 0
    async with httpx.AsyncClient(timeout=HEALTH_ANSWER_SECONDS, trust_env=not is_local(url)) as client:
        while failures < 3:
            await asyncio.sleep(HEALTH_EVERY_SECONDS)
            try:
                (await client.get(f"{url}/health")).raise_for_status()
                failures = 0
            except httpx.HTTPError:
                failures += 1
    raise RunFailed(f"rollout server {url} does not answer: three health checks have failed", code="server-gone")


def read_responses(reply: Any, n: int) -> list[Response]:
    """The n responses of a reply, in order. Raises LookupError, TypeError or ValueError if one is not complete.

    A missing response or token would shift everything that follows it.
    """
    responses = []
    for choice in sorted(reply["choices"], key=lambda choice: choice["index"]):
        ids, logprobs = choice["token_ids"], [token["logprob"] for token in choice["logprobs"]["content"]]
        (version,) = {span["version"] for span in choice["weight_versions"]}  # no update comes between two tokens
        ended = choice["finish_reason"] in ("stop", "length") and len(ids) == len(logprobs) > 0
        numbers = all(map(is_count, ids)) and all(is_number(x) and x > LOWEST_LOGPROB for x in logprobs)
        if not ended or not numbers:
            raise ValueError(f"response {len(responses)} is not complete, or has a log-prob that is not a number")
        responses.append(Response(ids, logprobs, choice["finish_reason"] == "length", version))
    if len(responses) != n:
        raise ValueError(f"{len(responses)} responses, {n} were requested")
    return responses


@dataclass
class Control:
    """Requests to all servers at once about their weights. Rank 0 has one. Every method raises RunFailed.

    vLLM's NCCL sender calls the last four methods. HTTPVLLMWeightSyncClient of vLLM has them too, but it knows a single
    server, and its errors do not say what the server answered. The routes are open with VLLM_SERVER_DEV_MODE=1.
    """

    urls: list[str]
    workers: list[int] = field(default_factory=list)  # number of workers for each server
    version: str = "0"  # number of the weights that are being sent

    def request(self, method: str, path: str, bodies: list[dict] | dict | None = None, key: str = "") -> list:
        """Send a request to every server and return the replies, or what each reply has under `key`.

        bodies: one for each server, or one for all.
        """

        def send(url: str, body: dict | None) -> Any:
            timeout = httpx.Timeout(UPDATE_SECONDS, connect=ANSWER_SECONDS)
            with named_errors(url, path):
                reply = httpx.request(method, url + path, json=body, timeout=timeout, trust_env=not is_local(url))
                found = parse(reply.raise_for_status().content)
                return found[key] if key else found

        bodies = bodies if isinstance(bodies, list) else [bodies] * len(self.urls)
        with ThreadPoolExecutor(len(self.urls)) as pool:
            return list(pool.map(send, self.urls, bodies))

    def check(self) -> None:
        """Find out whether all servers answer and have the routes, and how many workers they have."""
        self.request("POST", "/update_weight_version", {"new_version": "0"})  # an earlier run may have counted further
        self.workers = self.request("GET", "/get_world_size", key="world_size")

    def init_weight_transfer_engine(self, init_info: dict) -> None:
        """Each server's workers get NCCL ranks of their own. vLLM's sender knows one server, and has rank 0 itself."""
        offsets = [1 + sum(self.workers[:i]) for i in range(len(self.urls))]
        bodies = [{"init_info": {**init_info, "rank_offset": offset}} for offset in offsets]
        self.request("POST", "/init_weight_transfer_engine", bodies)

    def start_weight_update(self) -> None:
        self.request("POST", "/start_weight_update")

    def update_weights(self, update_info: dict) -> None:
        self.request("POST", "/update_weights", {"update_info": update_info})

    def finish_weight_update(self) -> None:
        self.request("POST", "/finish_weight_update", {"weight_version": self.version})
        self.request("POST", "/reset_prefix_cache?reset_running_requests=true")  # the old weights computed it
