"""A reward over HTTP: --reward http://HOST:PORT. scripts/serve_reward.py serves any of our graders this way.

    POST URL/score   {"version": 1, "request_id": "<uuid>", "items": [{"id": "17", "prompt": "...",
                      "response": "...", "answer": "..." | null, "meta": {...}}, ...]}
    gives            {"version": 1, "request_id": "<the same>", "results": [{"id": "17", "score": 0.73,
                      "acc": 1.0 | null, "error": null | "why there is no score", "info": {...}}, ...]}
    GET URL/health   gives {"status": "ok", "name": "...", "version": "..."}

"meta" holds the other columns of the data set, "length" (tokens of the response) and "truncated". Token ids stay in the
trainer. The environment variable REWARD_TOKEN is sent as a bearer token.
"""

import asyncio
import json
import os
import random
import re
import sys
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from typing import Any, ClassVar, Literal

import httpx
from pydantic import BaseModel, ConfigDict, FiniteFloat, ValidationError

from common.data import json_lines
from common.errors import BadInput, RunFailed, visible
from common.rewards.grading import Item, Result

VERSION = 1
MAX_ITEMS, MAX_REQUEST_BYTES, MAX_REPLY_BYTES = 64, 4 * 2**20, 16 * 2**20
ENVELOPE_BYTES = 256  # enough for what stands around the items of a request, and the commas between them
REQUESTS_AT_ONCE = 8  # requests of one call in progress at the same time
MAX_PAUSE_SECONDS = 300.0  # longest pause that Retry-After may ask for
HINTS = dict.fromkeys(range(300, 400), "; redirects are not followed: give the address they lead to")
HINTS |= dict.fromkeys((401, 403), "; REWARD_TOKEN must be that of the service")
HINTS[404] = "; --reward takes the address without /score"


class Health(BaseModel):
    status: Literal["ok"]


class Entry(BaseModel):
    model_config = ConfigDict(strict=True)
    id: str
    score: FiniteFloat | None = None
    acc: FiniteFloat | None = None
    error: str | None = None
    info: dict[str, Any] | None = None


class Reply(BaseModel):
    version: Literal[1]
    request_id: str
    results: list[dict[str, Any]]  # each an Entry


class TryAgain(Exception):
    """No usable reply, but another try may bring one: (reason, seconds that the service asks to wait)."""


@dataclass
class RewardService:
    """One of the rewards of common/rewards/__init__.py. Only check() and calls use the network."""

    url: str
    tries: int = 10  # about a minute of pauses in all: our own server takes ten seconds to restart
    backoff: float = 0.5  # seconds; the longest pause before the second try, doubled for each later one ...
    cap: float = 30.0  # ... up to this many seconds
    read_timeout: float = 60.0  # seconds without a byte; a whole reply may take twice as long
    waits: ClassVar[bool] = True  # mixture.py calls it in a thread, because it waits for another process
    draw: random.Random = field(default_factory=random.Random)  # pauses must not change a seeded run

    def __post_init__(self):
        """Raises BadInput."""
        try:
            host = httpx.URL(self.url).host
        except httpx.InvalidURL:
            host = ""
        if not host or not re.fullmatch("https?://[^@?#]+", self.url):
            shown = re.split("[?#]", self.url)[0]  # a key may follow
            expected = "http://HOST:PORT or https://HOST/PATH, with no user, no password, no ? and no #"
            raise BadInput(f"--reward {shown}: expected {expected}; a token goes into REWARD_TOKEN")
        self.url = self.url.rstrip("/")
        # A proxy cannot reach the loopback of this machine. Elsewhere HTTP_PROXY and its like count.
        self.trust_env = host not in ("localhost", "::1") and not host.startswith("127.")

    def client(self) -> httpx.AsyncClient:
        """Raises BadInput for a token that no header can hold."""
        token = os.environ.get("REWARD_TOKEN", "").strip()
        if not (token.isascii() and token.isprintable()):
            raise BadInput("REWARD_TOKEN: expected printable ASCII characters")
        headers = {"Accept-Encoding": "identity"}  # a compressed kilobyte could become a gigabyte
        headers |= {"Authorization": f"Bearer {token}"} if token else {}
        timeout = httpx.Timeout(self.read_timeout, connect=5.0)
        return httpx.AsyncClient(headers=headers, timeout=timeout, trust_env=self.trust_env, follow_redirects=False)

    async def exchange(self, client, method: str, path: str, read: Callable, seconds: float, **content) -> Any:
        """read(JSON of the reply). Raises TryAgain, or ValueError if another try would not help."""
        try:
            async with asyncio.timeout(seconds), client.stream(method, self.url + path, **content) as reply:
                encoding, body = reply.headers.get("Content-Encoding", "identity"), bytearray()
                if encoding != "identity":
                    raise ValueError(f"Content-Encoding: {encoding[:50]!r}, expected none")
                async for part in reply.aiter_raw():
                    body += part
                    if len(body) > MAX_REPLY_BYTES:
                        raise ValueError(f"a reply of more than {MAX_REPLY_BYTES >> 20} MiB")
        except TimeoutError:  # although each byte may have come in time
            raise TryAgain(f"no whole reply within {seconds:g} s", 0.0) from None
        except httpx.TransportError as error:  # nobody is there, or too slow, or gone in the middle of the reply
            raise TryAgain(f"{type(error).__name__}: {error}", 0.0) from None
        said = f"status {reply.status_code}, {bytes(body[:500])!r}{HINTS.get(reply.status_code, '')}"
        if reply.status_code in (408, 429) or reply.status_code >= 500:
            raise TryAgain(said, retry_after(reply.headers.get("Retry-After", "")))
        try:
            if reply.status_code != 200:
                raise ValueError("refused")
            return read(json_lines.parse(bytes(body)))
        except ValueError as error:
            raise ValueError(f"{complaint(error)}: {said}") from None

    def check(self) -> None:
        """Ask the service whether it is there, once. Raises BadInput, within seconds."""

        async def ask() -> None:
            async with self.client() as client:
                await self.exchange(client, "GET", "/health", Health.model_validate, 8.0, timeout=4.0)

        try:
            asyncio.run(ask())
        except TryAgain as error:
            raise BadInput(f"--reward {self.url}: GET /health: {error.args[0]}; is the service up?") from None
        except ValueError as error:
            raise BadInput(f"--reward {self.url}: GET /health: {error}") from None

    def __call__(self, items: list[Item], lengths: list[int], truncated: list[bool]) -> list[Result]:
        """A row that could not be graded has no score, and the reason in info["error"].

        Raises RunFailed, on this rank alone, if the service breaks the contract or refuses a request.
        """
        parts = [encode(row, *columns) for row, columns in enumerate(zip(items, lengths, truncated))]
        results = asyncio.run(self.grade_all(parts))
        lost = [result.info["error"] for result in results.values() if result.score is None]
        if lost:  # printed by every rank, because each one knows only its own rows
            where = f"reward service {self.url}, rank {os.environ.get('RANK', '0')}"
            print(f"{where}: {len(lost)} of {len(items)} rows not graded: {lost[0]}", file=sys.stderr, flush=True)
        return [results[row] for row in range(len(items))]

    async def grade_all(self, parts: list[bytes]) -> dict[int, Result]:
        """Results by row. One request that is refused ends the others."""
        turn = asyncio.Semaphore(REQUESTS_AT_ONCE)
        async with self.client() as client:
            graded = await asyncio.gather(*[self.grade(client, turn, batch) for batch in split(parts)])
        return {row: result for results in graded for row, result in results.items()}

    async def grade(self, client, turn: asyncio.Semaphore, batch: dict[int, bytes]) -> dict[int, Result]:
        """Results of one request by row, without scores if the service stays away. Raises RunFailed."""
        request_id = str(uuid.uuid4())  # the same in each try, so that a service may answer from memory
        body = f'{{"version": {VERSION}, "request_id": "{request_id}", "items": ['.encode()
        body += b",".join(batch.values()) + b"]}"
        if len(body) > MAX_REQUEST_BYTES:  # a batch of one item
            return ungraded(batch, f"a request of {len(body)} bytes for one item, {MAX_REQUEST_BYTES} is the most")
        content = {"content": body, "headers": {"Content-Type": "application/json"}}
        read = lambda reply: to_results(Reply.model_validate(reply), request_id, batch)
        async with turn:
            for attempt in range(self.tries):
                pause = self.draw.uniform(0, min(self.cap, self.backoff * 2**attempt))
                try:
                    return await self.exchange(client, "POST", "/score", read, 2 * self.read_timeout, **content)
                except ValueError as error:
                    raise RunFailed(f"--reward {self.url}: POST /score: {error}", code="reward-service") from None
                except TryAgain as error:
                    reason, asked = error.args
                if attempt + 1 < self.tries:
                    await asyncio.sleep(max(pause, asked))
        return ungraded(batch, visible(f"{reason} (after {self.tries} tries)"))


def ungraded(batch: dict[int, bytes], reason: str) -> dict[int, Result]:
    return dict.fromkeys(batch, Result(None, None, None, {"error": reason}))


def encode(row: int, item: Item, length: int, truncated: bool) -> bytes:
    """An item of a request. Lone surrogates become ASCII escapes, because UTF-8 cannot hold them."""
    meta = {**plain(item.meta), "length": length, "truncated": truncated}
    fields = {"id": str(row), "prompt": item.prompt, "response": item.response, "answer": item.answer, "meta": meta}
    return json.dumps(fields, allow_nan=False).encode()


def plain(value: dict) -> dict:
    """The value as strict JSON can hold it: dates, NaN and other objects become text."""
    return json.loads(json.dumps(value, default=str), parse_constant=str)


def split(parts: list[bytes]) -> Iterator[dict[int, bytes]]:
    """Batches of rows that fit into a request, in order. An item too large for any is a batch of its own."""
    batch, size = {}, ENVELOPE_BYTES
    for row, part in enumerate(parts):
        if batch and (len(batch) == MAX_ITEMS or size + len(part) > MAX_REQUEST_BYTES):
            yield batch
            batch, size = {}, ENVELOPE_BYTES
        batch[row] = part
        size += len(part)
    if batch:
        yield batch


def complaint(error: ValueError) -> str:
    """An error in one line. The first one of pydantic gives field, value and expectation."""
    if not isinstance(error, ValidationError):
        return str(error)
    first = error.errors()[0]
    return f'"{".".join(map(str, first["loc"]))}" is {first["input"]!r:.50}: {first["msg"]}'


def to_results(reply: Reply, request_id: str, rows: dict[int, bytes]) -> dict[int, Result]:
    """Results by row, whatever their order. Raises ValueError, which says what breaks the contract."""
    if reply.request_id != request_id:
        raise ValueError(f'"request_id" is {reply.request_id!r:.50}, expected {request_id!r}')
    ids, expected = Counter(repr(entry.get("id")) for entry in reply.results), Counter(repr(str(row)) for row in rows)
    if ids != expected:
        some = lambda ids: ", ".join(list(ids)[:3])[:100] or "none"
        raise ValueError(f"ids missing: {some(expected - ids)}; unknown or repeated: {some(ids - expected)}")
    return {int(entry["id"]): to_result(entry) for entry in reply.results}


def to_result(content: dict) -> Result:
    """Raises ValueError, which names id, field and value."""
    try:
        entry = Entry.model_validate(content)
    except ValidationError as error:
        raise ValueError(f"id {content['id']}: {complaint(error)}") from None
    if entry.error is not None:
        return Result(None, None, None, {"error": visible(" ".join(entry.error[:2000].split()))[:500]})
    if entry.score is None:
        raise ValueError(f'id {entry.id}: neither a "score" nor an "error"')
    info = entry.info or {}
    extracted = info.pop("extracted", None)
    return Result(entry.score, entry.acc, extracted and str(extracted), info)


def retry_after(value: str) -> float:
    """Seconds that the header Retry-After asks to wait, as a number or a date. 0 if it does not say."""
    try:
        number = re.fullmatch(r"[0-9]{1,9}", value.strip())
        seconds = float(value) if number else parsedate_to_datetime(value).timestamp() - time.time()
    except (ValueError, OverflowError):
        return 0.0
    return min(max(seconds, 0.0), MAX_PAUSE_SECONDS)
