"""A reward over HTTP: `--reward http://host:8001`. scripts/serve_reward.py serves any of our graders this way.

    POST URL/score   {"version": 1, "request_id": "<uuid>", "items": [{"id": "17", "prompt": "...",
                      "response": "...", "answer": "..." | null, "meta": {...}}, ...]}
    gives            {"version": 1, "request_id": "<the same>", "results": [{"id": "17", "score": 0.73,
                      "acc": 1.0 | null, "error": null | "why there is no score", "info": {...}}, ...]}
    GET URL/health   gives {"status": "ok", "name": "...", "version": "..."}

"meta" holds the data set's other columns and, for graders that look at them, "length" (tokens of the response) and
"truncated". Token ids stay here. The environment variable REWARD_TOKEN is sent as a bearer token.
"""

import asyncio
import json
import math
import os
import random
import re
import sys
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from typing import Any, ClassVar

import httpx
from tqdm import tqdm

from common import json_lines
from common.errors import BadInput, RunFailed, visible
from common.grading import Item, Result
from common.reward_reply import VERSION, parse
from common.servers import is_local

ITEMS, BYTES = 64, 4 * 2**20  # at most, in a request
LARGEST = 16 * 2**20  # bytes of a reply: a service that never ends one would fill the memory
SLOWEST = 2  # times read_timeout: how long a reply may take that comes byte by byte, from asking to its end
IN_FLIGHT = 8  # requests of one call at the same time
PATIENCE = 300.0  # seconds: a service that asks for a longer pause is asked again after this one
HINTS = dict.fromkeys(range(300, 400), "; redirects are not followed: give the address they lead to")
HINTS |= dict.fromkeys((401, 403), "; REWARD_TOKEN must be the service's")
HINTS[404] = "; --reward takes what stands before /score"


@dataclass
class RewardService:
    """One of the rewards of common/rewards.py. Making one does not touch the network; check() does."""

    url: str
    tries: int = 10  # with a minute of pauses, on average: our own server takes ten seconds to restart
    backoff: float = 0.5  # seconds: the longest pause before the second try, twice that before the third ...
    cap: float = 30.0  # ... and never more than this
    connect_timeout: float = 5.0
    read_timeout: float = 60.0  # the longest silence of the service
    waits: ClassVar[bool] = True  # for other processes: common/reward_mixture.py calls it in a thread
    draw: random.Random = field(default_factory=random.Random)  # its own: a failure must not change a seeded run

    def __post_init__(self):
        """Raises BadInput."""
        if "@" in self.url:  # not repeated: messages end up in logs
            safe = self.url.rpartition("@")[2]
            raise BadInput(f"--reward http://...@{safe}: no user or password in a URL; set REWARD_TOKEN instead")
        try:
            url = httpx.URL(self.url)
        except httpx.InvalidURL as error:
            raise BadInput(f"--reward {self.url}: not a URL: {error}") from None
        if url.scheme not in ("http", "https") or not url.host or "?" in self.url or "#" in self.url:
            shown = re.split("[?#]", self.url)[0]  # what follows may be a key
            raise BadInput(f"--reward {shown}: expected http://HOST:PORT or https://HOST/PATH, no ? and no #")
        self.url = self.url.rstrip("/")
        # A proxy cannot reach this machine's loopback, and few set NO_PROXY. Elsewhere HTTP_PROXY etc. count.
        self.trust_env = not is_local(self.url)

    def client(self) -> httpx.AsyncClient:
        """Raises BadInput for a token that is no header."""
        token = os.environ.get("REWARD_TOKEN", "").strip()
        if not (token.isascii() and token.isprintable()):
            raise BadInput("REWARD_TOKEN: expected printable ASCII characters")
        return httpx.AsyncClient(
            # Not compressed: a kilobyte could become a gigabyte.
            headers={"Accept-Encoding": "identity"} | ({"Authorization": f"Bearer {token}"} if token else {}),
            timeout=httpx.Timeout(self.read_timeout, connect=self.connect_timeout),
            trust_env=self.trust_env,
            follow_redirects=False,  # nor would the token be for whoever is there
        )

    async def exchange(self, client: httpx.AsyncClient, method: str, path: str, seconds: float, **given):
        """The reply, read to its end. Raises httpx.RequestError where none came whole, ValueError for a hostile one."""
        try:
            async with asyncio.timeout(seconds), client.stream(method, self.url + path, **given) as reply:
                encoding, body = reply.headers.get("Content-Encoding", "identity"), bytearray()
                if encoding != "identity":
                    raise ValueError(f"Content-Encoding: {encoding[:50]!r}, and it was asked for none")
                async for part in reply.aiter_raw():
                    body += part
                    if len(body) > LARGEST:
                        raise ValueError(f"a reply of more than {LARGEST >> 20} MiB")
        except TimeoutError:  # each of its bytes may have come in time
            raise httpx.ReadTimeout(f"no whole reply within {seconds:g} s") from None
        return httpx.Response(reply.status_code, headers=reply.headers, content=bytes(body))

    def check(self) -> None:
        """Ask the service whether it is there, once. Raises BadInput, within seconds."""

        async def ask() -> httpx.Response:
            async with self.client() as client:
                return await self.exchange(client, "GET", "/health", 8.0, timeout=4.0)

        try:
            reply = asyncio.run(ask())
        except httpx.RequestError as error:
            raise BadInput(f"--reward {self.url}: no answer to GET /health ({error}); is the service up?") from None
        except ValueError as error:
            raise BadInput(f"--reward {self.url}: GET /health: {error}") from None
        try:
            healthy = reply.status_code == 200 and json_lines.parse(reply.content)["status"] == "ok"
        except (ValueError, TypeError, KeyError):
            healthy = False
        if not healthy:
            raise BadInput(f"--reward {self.url}: GET /health is not a reward service's: {self.describe(reply)}")

    def __call__(self, items: list[Item], lengths: list[int], truncated: list[bool]) -> list[Result]:
        """Rows that could not be graded have no score and the reason in info["error"].

        Raises RunFailed, on this rank alone, if the service breaks the contract or refuses a request.
        """
        parts = [encode(row, *given) for row, given in enumerate(zip(items, lengths, truncated))]
        results = asyncio.run(self.grade_all(parts))
        lost = [result.info["error"] for result in results.values() if result.score is None]
        if lost:  # from every rank: only its own rows are known here
            where = f"reward service {self.url}, rank {os.environ.get('RANK', '0')}"
            print(f"{where}: {len(lost)} of {len(items)} rows not graded: {lost[0]}", file=sys.stderr, flush=True)
        return [results[row] for row in range(len(items))]

    async def grade_all(self, parts: list[bytes]) -> dict[int, Result]:
        """Results by row. One request that is refused ends the others."""
        results: dict[int, Result] = {}
        bar = tqdm(
            total=len(parts), desc="reward service", unit="row", delay=3, leave=False, dynamic_ncols=True,
            disable=os.environ.get("RANK", "0") != "0",
        )  # fmt: skip
        turn = asyncio.Semaphore(IN_FLIGHT)

        async def grade(batch: dict[int, bytes]) -> None:
            async with turn:
                results.update(await self.grade(client, batch))
            bar.update(len(batch))

        with bar:
            async with self.client() as client:
                await asyncio.gather(*map(grade, split(parts)))  # the first that raises; asyncio.run ends the rest
        return results

    async def grade(self, client: httpx.AsyncClient, batch: dict[int, bytes]) -> dict[int, Result]:
        """Results of one request, by row; no scores if the service stays away. Raises RunFailed."""
        request_id = str(uuid.uuid4())  # the same in each try, so that a service may answer from memory
        body = envelope(request_id) + b",".join(batch.values()) + b"]}"
        if len(body) > BYTES:  # one item: split() made it a batch of its own
            return ungraded(batch, f"a request of {len(body)} bytes for one item, {BYTES} is the most")
        given = {"content": body, "headers": {"Content-Type": "application/json"}}
        for attempt in range(self.tries):
            pause = self.draw.uniform(0, min(self.cap, self.backoff * 2**attempt))
            try:
                reply = await self.exchange(client, "POST", "/score", SLOWEST * self.read_timeout, **given)
            except httpx.TransportError as error:  # nobody there, too slow, or gone in the middle of the reply
                reason = visible(f"{type(error).__name__}: {error}")
            except ValueError as error:
                raise RunFailed(f"--reward {self.url}: POST /score: {error}", code="reward-service") from None
            else:
                if reply.status_code not in (408, 429) and reply.status_code < 500:
                    return self.read(reply, request_id, batch)
                reason = self.describe(reply)
                pause = max(pause, retry_after(reply))
            if attempt + 1 < self.tries:
                await asyncio.sleep(pause)
        return ungraded(batch, f"{reason} (after {self.tries} tries)")

    def read(self, reply: httpx.Response, request_id: str, batch: dict[int, bytes]) -> dict[int, Result]:
        if reply.status_code != 200:
            raise RunFailed(
                f"--reward {self.url}: POST /score was refused: {self.describe(reply)}", code="reward-service"
            )
        try:
            return parse(reply.content, request_id, batch)
        except (ValueError, RecursionError) as error:
            raise RunFailed(
                f"--reward {self.url}: POST /score: {error}: {self.describe(reply)}", code="reward-service"
            ) from None

    def describe(self, reply: httpx.Response) -> str:
        return visible(f"status {reply.status_code}, {reply.content[:500]!r}{HINTS.get(reply.status_code, '')}")


def encode(row: int, item: Item, length: int, truncated: bool) -> bytes:
    """An item of a request. Lone surrogates become ASCII escapes, which UTF-8 could not hold."""
    meta = {**plain(item.meta), "length": length, "truncated": truncated}
    fields = {"id": str(row), "prompt": item.prompt, "response": item.response, "answer": item.answer, "meta": meta}
    return json.dumps(fields, allow_nan=False).encode()


def plain(value: Any) -> Any:
    """The value as JSON can hold it: what it cannot (dates, NaN, keys that are no strings) as text."""
    if isinstance(value, dict):
        return {str(key): plain(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(entry) for entry in value]
    if value is None or isinstance(value, (str, int)) or (isinstance(value, float) and math.isfinite(value)):
        return value
    return str(value)


def envelope(request_id: str) -> bytes:
    return json.dumps({"version": VERSION, "request_id": request_id, "items": []})[:-2].encode()


def split(parts: list[bytes]) -> Iterator[dict[int, bytes]]:
    """Batches of rows that fit into a request, in order; an item too large for any is a batch of its own."""
    batch, empty = {}, len(envelope(str(uuid.uuid4()))) + len(b"]}")
    size = empty
    for row, part in enumerate(parts):
        if batch and (len(batch) == ITEMS or size + len(part) > BYTES):
            yield batch
            batch, size = {}, empty
        batch[row] = part
        size += len(part) + 1  # and a comma
    if batch:
        yield batch


def ungraded(batch: dict[int, bytes], reason: str) -> dict[int, Result]:
    return {row: Result(None, None, None, {"error": reason}) for row in batch}


def retry_after(reply: httpx.Response) -> float:
    """Seconds the service asks to wait, as a number or a date; 0 if it does not say."""
    value = reply.headers.get("Retry-After", "").strip()
    if re.fullmatch(r"[0-9]{1,9}", value):
        return min(float(value), PATIENCE)
    try:
        seconds = parsedate_to_datetime(value).timestamp() - time.time()
    except (ValueError, OverflowError):
        return 0.0
    return min(max(seconds, 0.0), PATIENCE)
