"""A reward over HTTP: `--reward http://host:8001`. scripts/serve_reward.py serves any of our graders this way.

    POST URL/score   {"version": 1, "request_id": "<uuid>", "items": [{"id": "17", "prompt": "...",
                      "response": "...", "answer": "..." | null, "meta": {...}}, ...]}
    gives            {"version": 1, "request_id": "<the same>", "results": [{"id": "17", "score": 0.73,
                      "acc": 1.0 | null, "error": null | "why there is no score", "info": {...}}, ...]}
    GET URL/health   gives {"status": "ok", "name": "...", "version": "..."}

"meta" holds the data set's other columns and, for graders that look at them, "length" (tokens of the response) and
"truncated". Token ids stay here. The environment variable REWARD_TOKEN is sent as a bearer token.
"""

import json
import math
import os
import random
import re
import sys
import threading
import time
import uuid
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from typing import Any, ClassVar

import httpx
from tqdm import tqdm

from common.errors import BadInput, RunFailed
from common.grading import Item, Result
from common.servers import is_local

VERSION = 1
ITEMS, BYTES = 64, 4 * 2**20  # at most, in a request
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
            raise BadInput(f"--reward {self.url}: expected http://HOST:PORT or https://HOST/PATH, no ? and no #")
        self.url = self.url.rstrip("/")
        # A proxy cannot reach this machine's loopback, and few set NO_PROXY. Elsewhere HTTP_PROXY etc. count.
        self.trust_env = not is_local(self.url)

    def client(self) -> httpx.Client:
        """Raises BadInput for a token that is no header."""
        token = os.environ.get("REWARD_TOKEN", "").strip()
        if not (token.isascii() and token.isprintable()):
            raise BadInput("REWARD_TOKEN: expected printable ASCII characters")
        return httpx.Client(
            headers={"Authorization": f"Bearer {token}"} if token else {},
            timeout=httpx.Timeout(self.read_timeout, connect=self.connect_timeout),
            trust_env=self.trust_env,
            follow_redirects=False,
        )

    def check(self) -> None:
        """Ask the service whether it is there, once. Raises BadInput, within seconds."""
        try:
            with self.client() as client:
                reply = client.get(f"{self.url}/health", timeout=4.0)
        except httpx.RequestError as error:
            raise BadInput(f"--reward {self.url}: no answer to GET /health ({error}); is the service up?") from None
        try:
            healthy = reply.status_code == 200 and reply.json()["status"] == "ok"
        except (ValueError, TypeError, KeyError, RecursionError):
            healthy = False
        if not healthy:
            raise BadInput(f"--reward {self.url}: GET /health is not a reward service's: {self.describe(reply)}")

    def __call__(self, items: list[Item], lengths: list[int], truncated: list[bool]) -> list[Result]:
        """Rows that could not be graded have no score and the reason in info["error"].

        Raises RunFailed, on this rank alone, if the service breaks the contract or refuses a request.
        """
        results: dict[int, Result] = {}
        parts = [encode(row, *given) for row, given in enumerate(zip(items, lengths, truncated))]
        stop = threading.Event()  # one request was refused: the others need not be sent
        bar = tqdm(
            total=len(items), desc="reward service", unit="row", delay=3, leave=False, dynamic_ncols=True,
            disable=os.environ.get("RANK", "0") != "0",
        )  # fmt: skip
        with bar, self.client() as client, ThreadPoolExecutor(IN_FLIGHT) as pool:
            futures = [pool.submit(self.grade, client, batch, stop) for batch in split(parts)]
            try:
                for future in as_completed(futures):
                    results |= future.result()
                    bar.update(len(results) - bar.n)
            finally:
                stop.set()
        lost = [result.info["error"] for result in results.values() if result.score is None]
        if lost:  # from every rank: only its own rows are known here
            where = f"reward service {self.url}, rank {os.environ.get('RANK', '0')}"
            print(f"{where}: {len(lost)} of {len(items)} rows not graded: {lost[0]}", file=sys.stderr, flush=True)
        return [results[row] for row in range(len(items))]

    def grade(self, client: httpx.Client, batch: dict[int, bytes], stop: threading.Event) -> dict[int, Result]:
        """Results of one request, by row; no scores if the service stays away. Raises RunFailed."""
        request_id = str(uuid.uuid4())  # the same in each try, so that a service may answer from memory
        body = envelope(request_id) + b",".join(batch.values()) + b"]}"
        if len(body) > BYTES:  # one item: split() made it a batch of its own
            return ungraded(batch, f"a request of {len(body)} bytes for one item, {BYTES} is the most")
        reason = "another request failed"
        for attempt in range(self.tries):
            if stop.is_set():
                break
            pause = self.draw.uniform(0, min(self.cap, self.backoff * 2**attempt))
            try:
                reply = client.post(f"{self.url}/score", content=body, headers={"Content-Type": "application/json"})
            except httpx.TransportError as error:  # nobody there, too slow, or gone in the middle of the reply
                reason = f"{type(error).__name__}: {error}"
            except httpx.DecodingError as error:
                raise RunFailed(
                    f"--reward {self.url}: POST /score: Content-Encoding: {error}", code="reward-service"
                ) from None
            else:
                if reply.status_code not in (408, 429) and reply.status_code < 500:
                    return self.read(reply, request_id, batch)
                reason = self.describe(reply)
                pause = max(pause, retry_after(reply))
            if attempt + 1 < self.tries:
                stop.wait(pause)
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
        return f"status {reply.status_code}, {reply.content[:500]!r}{HINTS.get(reply.status_code, '')}"


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


def parse(body: bytes, request_id: str, batch: dict[int, bytes]) -> dict[int, Result]:
    """Results by row, whatever their order. Raises ValueError, saying what breaks the contract."""
    reply = json.loads(body, parse_constant=refuse)
    if not isinstance(reply, dict) or not isinstance(reply.get("results"), list):
        raise ValueError('expected an object with a list "results"')
    for key, expected in (("version", VERSION), ("request_id", request_id)):
        if reply.get(key) != expected:
            raise ValueError(f'"{key}" is {reply.get(key)!r:.50}, expected {expected!r}')
    entries = [entry if isinstance(entry, dict) else {} for entry in reply["results"]]
    ids = Counter(repr(entry.get("id")) for entry in entries)  # repr: 17 is not "17", and a list can be counted
    asked = Counter(repr(str(row)) for row in batch)
    if ids != asked:
        some = lambda ids: ", ".join(list(ids)[:3])[:100] or "none"
        raise ValueError(f"ids missing: {some(asked - ids)}; unknown or repeated: {some(ids - asked)}")
    return {int(entry["id"]): parse_result(entry) for entry in entries}


def refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


def parse_result(entry: dict) -> Result:
    """Raises ValueError."""
    score, acc, error = entry.get("score"), entry.get("acc"), entry.get("error")
    if error is not None:
        return Result(None, None, None, {"error": " ".join(str(error).split())[:500]})
    for key, value in (("score", score), ("acc", 0.0 if acc is None else acc)):
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not number or abs(value) > sys.float_info.max:  # 1e999 is inf, and an int may be larger than any float
            raise ValueError(f'"{key}" of id {entry["id"]} is {value!r:.50}, expected a finite number')
    info = {} if entry.get("info") is None else entry["info"]
    if not isinstance(info, dict):
        raise ValueError(f'"info" of id {entry["id"]} is {info!r:.50}, expected an object')
    extracted = info.pop("extracted", None)
    return Result(float(score), None if acc is None else float(acc), extracted and str(extracted), info)
