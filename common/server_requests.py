"""Asking vLLM's servers for responses: token ids in; ids, log-probs and weight versions out."""

import asyncio
from collections.abc import Callable

import httpx

from common.errors import RunFailed
from common.json_lines import is_count, is_number, parse
from common.servers import healthy, is_local

HEALTH_EVERY, HEALTH_WITHIN = 4.0, 5.0  # seconds: a server that hangs is found within three times their sum
CONNECTIONS = 256  # of a rank
LOWEST = -9998.0  # what vLLM gives for a log-prob that is no number is below


async def ask_all(
    asked: list[tuple[str, dict]], told: Callable[[int, list[dict]], None] = lambda request, choices: None
) -> list[list[dict]]:  # fmt: skip
    """The responses to each (server, request), in this order, all asked at once. Raises RunFailed naming a server.

    told: called with the number of a request and its responses as soon as they are there.
    """
    urls = {url for url, _ in asked}
    local = all(map(is_local, urls))
    timeout = httpx.Timeout(None)  # a busy server accepts late, long responses take their time: watch() finds the dead
    limits = httpx.Limits(max_connections=CONNECTIONS)  # the rest of a large step waits here
    async with httpx.AsyncClient(timeout=timeout, limits=limits, trust_env=not local) as client:

        async def one(request: int, url: str, body: dict) -> list[dict]:
            choices = await ask(client, url, body)
            told(request, choices)
            return choices

        work = asyncio.gather(*(one(request, url, body) for request, (url, body) in enumerate(asked)))
        watches = [asyncio.ensure_future(watch(url)) for url in urls]
        done, _ = await asyncio.wait([work, *watches], return_when=asyncio.FIRST_COMPLETED)
        for task in (work, *watches):
            task.cancel()
        await asyncio.gather(work, *watches, return_exceptions=True)
        for task in done:
            if task is not work:
                task.result()  # raises
        return work.result()


async def ask(client: httpx.AsyncClient, url: str, body: dict) -> list[dict]:
    """The responses to one request. Raises RunFailed."""
    try:
        reply = await client.post(f"{url}/inference/v1/generate", json=body)
    except httpx.HTTPError as error:
        raise RunFailed(f"rollout server {url} is gone: {type(error).__name__}: {error}", code="server-gone") from None
    if reply.status_code != 200:  # also how a server answers in the moment its engine is lost
        code = "server-refused" if await asyncio.to_thread(healthy, url) else "server-gone"
        raise RunFailed(f"rollout server {url} refused a request ({reply.status_code}): {reply.text[:300]}", code=code)
    return check_reply(url, reply.content, body["sampling_params"]["n"])


def check_reply(url: str, reply: bytes, n: int) -> list[dict]:
    """The n responses of a reply, each whole: a missing one would shift all that follow. Raises RunFailed."""
    try:
        found = sorted(parse(reply)["choices"], key=lambda choice: choice["index"])
        whole = [is_whole(choice) for choice in found]
    except (LookupError, TypeError, ValueError) as error:
        said = f"rollout server {url} gave what is no reply of vLLM's: {type(error).__name__}: {error}"
        raise RunFailed(said, code="server-refused") from None
    if len(found) != n or not all(whole):
        raise RunFailed(
            f"rollout server {url} gave {sum(whole)} whole responses where {n} were asked for", code="server-refused"
        )
    return found


def is_whole(response: dict) -> bool:
    """Whether it came to its end, with a log-prob and a weight version of each token."""
    ids, logprobs = response["token_ids"], [token["logprob"] for token in response["logprobs"]["content"]]
    spans = response.get("weight_versions") or []
    return (
        response["finish_reason"] in ("stop", "length")
        and all(0 <= span["start"] <= span["end"] <= len(ids) for span in spans)
        and len(ids) == len(logprobs) == len(versions(response)) > 0
        and all(map(is_count, ids))
        and all(is_number(logprob) and logprob > LOWEST for logprob in logprobs)
    )


async def watch(url: str) -> None:
    """Ends, with RunFailed, when the server is not healthy: its engine is dead, or it missed three questions."""
    missed = 0
    async with httpx.AsyncClient(timeout=HEALTH_WITHIN, trust_env=not is_local(url)) as client:
        while missed < 3:
            await asyncio.sleep(HEALTH_EVERY)
            try:
                reply = await client.get(f"{url}/health")
                if reply.status_code != 200:
                    raise RunFailed(
                        f"rollout server {url} is gone: engine dead (health {reply.status_code})", code="server-gone"
                    )
                missed = 0
            except httpx.HTTPError:
                missed += 1
    raise RunFailed(
        f"rollout server {url} does not answer: no health in {3 * (HEALTH_EVERY + HEALTH_WITHIN):.0f} s",
        code="server-gone",
    )


def versions(response: dict) -> list[int]:
    """The weight version that sampled each token: every update has a number."""
    spans = response.get("weight_versions") or []
    return [int(span["version"]) for span in spans for _ in range(span["start"], span["end"])]
