"""A reward over HTTP: --reward http://HOST:PORT. scripts/serve_reward.py serves any of our graders this way.

    POST URL/score   {"version": 1, "request_id": "<uuid>", "items": [{"id": "17", "prompt": "...",
                      "response": "...", "answer": "..." | null, "meta": {...}}, ...]}
    gives            {"version": 1, "request_id": "<the same>", "results": [{"id": "17", "score": 0.73,
                      "acc": 1.0 | null, "error": null | "why there is no score", "info": {...}}, ...]}
    GET URL/health   gives {"status": "ok", "name": "...", "version": "..."}

Items whose ids agree up to a dot, such as "3.0" and "3.1", are responses to one row of the data. They come in one
request, unless a row has more than 64 responses.

"meta" holds the other columns of the data set, "length" (tokens of the response) and "truncated". Token ids stay in the
trainer. The environment variable REWARD_TOKEN is sent as a bearer token.

Without a reply, or with one that breaks off or has status 408, 429 or 5xx, a request is sent again, with pauses of
about a minute in all. After the last try its rows have no score. Any other status, or a reply that breaks the contract,
ends the run at once.
"""

import json
import math
import os
import re
import sys
import time
import uuid
from itertools import groupby
from multiprocessing.pool import ThreadPool
from typing import Any, Literal

import requests
from pydantic import BaseModel, ConfigDict, FiniteFloat
from requests.exceptions import RetryError
from urllib3 import BaseHTTPResponse, Retry
from urllib3.exceptions import HTTPError, InvalidHeader, MaxRetryError

from common.data import json_lines
from common.errors import BadInput, RunFailed, visible
from common.rewards.grading import Item, Result
from common.rewards.schema import Form, parse_as

VERSION = 1
MAX_ITEMS = 64  # items of one request
MAX_REQUEST_BYTES = 64 * 2**20  # the most that our own server reads
MAX_REPLY_BYTES = 16 * 2**20  # a compressed reply counts unpacked
REQUESTS_AT_ONCE = 8  # requests of one call in progress at the same time
CONNECT_SECONDS = 5.0
HEALTH_SECONDS = 4.0
ADVICE = "--reward takes the address without /score, redirects are not followed, REWARD_TOKEN must be the service's"


class Refused(ValueError):
    """The status of a reply says that another try would not help."""

    def __init__(self, message: str, status: int):
        super().__init__(message)
        self.status = status


class Health(BaseModel):
    status: Literal["ok"]


# Strict: "0.5" and true are no scores. A service that sends them has a bug.
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
    results: list[Entry]


class Client:
    """Sends requests to one address, and sends them again where that may help. Any thread may call exchange()."""

    def __init__(
        self,
        url: str,
        token_name: str,
        tries: int,
        backoff: float,
        read_timeout: float,
        patience: float = math.inf,
        advice: str = ADVICE,
    ):
        """Raises BadInput for an address or a token that cannot be sent.

        token_name: the environment variable with the bearer token, if it is set.
        backoff: the second try follows at once, the third after twice these seconds. Then pauses double, up to 15 s.
        read_timeout: seconds without a byte. A whole reply may take twice as long.
        patience: after this many seconds a request is not sent again, however few tries there were.
        advice: what a refused request may have wrong.
        """
        address = re.fullmatch(r"https?://([\w.-]+|\[[\da-fA-F:]+\])(:\d+)?(/[^@?#]*)?", url)
        if not address:
            without_key = re.split("[?#]", url)[0]
            expected = "http://HOST:PORT or https://HOST/PATH, with no user, no password, no ? and no #"
            raise BadInput(f"--reward {without_key}: expected {expected}; a token goes into {token_name}")
        token = os.environ.get(token_name, "").strip()
        if not (token.isascii() and token.isprintable()):
            raise BadInput(f"{token_name}: expected printable ASCII characters")

        def send_token(request: requests.PreparedRequest) -> requests.PreparedRequest:
            if token:
                request.headers["Authorization"] = f"Bearer {token}"
            return request

        self.url = url.rstrip("/")
        self.read_timeout = read_timeout
        self.patience = patience
        self.advice = advice
        # Without jitter: urllib3 would draw it from Python's global generator, and so change a seeded run.
        self.retries = Retry(
            total=tries - 1,
            backoff_factor=backoff,
            backoff_max=15.0,
            retry_after_max=300,
            status_forcelist=[408, 429, *range(500, 600)],
            allowed_methods=None,
        )
        self.session = requests.Session()
        # A header of the session would lose against an entry in ~/.netrc.
        self.session.auth = send_token
        # A proxy cannot reach the loopback of this machine. Elsewhere HTTP_PROXY and its like count.
        self.session.trust_env = not re.match(r"localhost$|127\.|\[::1\]", address[1])

    def exchange(
        self,
        path: str,
        form: type[Form],
        retries: Retry,
        read_timeout: float,
        content: bytes | None = None,
    ) -> Form:
        """The reply as a `form`. Raises RetryError after the last try, ValueError if another try would not help.

        The loop is ours because an adapter with max_retries neither tries a reply again that breaks off in its body nor
        bounds the body of an error.
        """
        method = "GET" if content is None else "POST"
        began = time.monotonic()
        answered = ""  # the last reply that asked for another try, for the message
        while True:
            raw = None
            try:
                with self.session.request(
                    method,
                    self.url + path,
                    data=content,
                    headers={"Content-Type": "application/json"},
                    timeout=(CONNECT_SECONDS, read_timeout),
                    allow_redirects=False,
                    stream=True,
                ) as reply:
                    raw = reply.raw
                    body = read_body(raw, 2 * read_timeout)
            except (requests.RequestException, HTTPError) as error:
                # A server that fails may close the connection after its reply. Its reply says more than the closed
                # connection that the next try finds.
                problem = f"{type(error).__name__}: {error}{answered}"
            else:
                said = visible(body[:2000].decode(errors="replace"))  # redacted first: a cut may hide a part of a token
                problem = f"status {raw.status}, {said[:500]!r}"
                if not retries.is_retry(method, raw.status):
                    break
                answered = f"; before that {problem}"
            # increment() counts the try and raises after the last one. The pause is as long as Retry-After says, or
            # twice as long as the one before.
            try:
                retries = retries.increment()
            except MaxRetryError:
                raise RetryError(problem) from None
            pause = (retries.get_retry_after(raw) if raw is not None else None) or retries.get_backoff_time()
            if time.monotonic() - began + pause > self.patience:
                raise RetryError(problem)
            time.sleep(pause)
        if raw.status != 200:
            raise Refused(f"refused: {problem}; {self.advice}", raw.status)
        try:
            return parse_as(form, json_lines.parse(body))
        except ValueError as error:
            raise ValueError(f"{error}: {problem}") from None


class RewardService(Client):
    """One of the rewards of common/rewards/__init__.py. Only check() and calls use the network."""

    waits = True  # mixture.py calls it in a thread, because it waits for another process

    def __init__(self, url: str, tries: int = 10, backoff: float = 0.25, read_timeout: float = 60.0):
        """See Client. Ten tries take about a minute. Raises BadInput."""
        super().__init__(url, "REWARD_TOKEN", tries, backoff, read_timeout)

    def check(self) -> None:
        """Ask the service whether it is there, once. Raises BadInput, within seconds."""
        try:
            self.exchange("/health", Health, Retry(0), HEALTH_SECONDS)
        except (RetryError, ValueError) as error:
            raise BadInput(f"--reward {self.url}: GET /health: {error}; is the service up?") from None

    def __call__(self, items: list[Item], lengths: list[int], truncated: list[bool]) -> list[Result]:
        """A row that could not be graded has no score, and the reason in info["error"].

        Raises RunFailed, on this rank alone, if the service breaks the contract or refuses a request.
        """
        rows = [encode(row, *columns) for row, columns in enumerate(zip(items, lengths, truncated))]
        batches = make_batches(rows, [item.group for item in items])
        results: dict[str, Result] = {}
        # The threads are daemons, and leaving the block doesn't wait for them: one refused request ends the call.
        with ThreadPool(min(REQUESTS_AT_ONCE, len(batches) or 1)) as threads:
            for graded in threads.imap_unordered(self.grade, batches):
                results.update(graded)
        print_ungraded(f"reward service {self.url}", list(results.values()))
        return [results[row["id"]] for row in rows]

    def grade(self, batch: list[dict]) -> dict[str, Result]:
        """Results of one request by id, without scores if the service stays away. Raises RunFailed."""
        ids = [row["id"] for row in batch]
        request_id = str(uuid.uuid4())  # the same in each try, so that a service may answer from memory
        request = {"version": VERSION, "request_id": request_id, "items": batch}
        # ASCII, because UTF-8 cannot hold a lone surrogate of a response. An escape can.
        content = json.dumps(request, allow_nan=False).encode()
        try:
            reply = self.exchange("/score", Reply, self.retries, self.read_timeout, content)
            return to_results(reply, request_id, ids)
        except (RetryError, InvalidHeader) as error:  # InvalidHeader: nobody can read its Retry-After
            reason = visible(f"{error} (after {self.retries.total + 1} tries)")
            return dict.fromkeys(ids, Result(None, None, None, {"error": reason}))
        except ValueError as error:
            raise RunFailed(f"--reward {self.url}: POST /score: {error}", code="reward-service") from None


def print_ungraded(name: str, results: list[Result]) -> None:
    """One line on stderr if some results have no score. Every rank prints it, because each knows only its own rows."""
    errors = [result.info["error"] for result in results if result.score is None]
    if errors:
        where = f"{name}, rank {os.environ.get('RANK', '0')}"
        print(f"{where}: {len(errors)} of {len(results)} rows not graded: {errors[0]}", file=sys.stderr, flush=True)


def read_body(raw: BaseHTTPResponse, seconds: float) -> bytes:
    """The whole body. Raises ValueError if it is too large, Timeout if it is not there in time, though each byte is."""
    deadline = time.monotonic() + seconds
    body = bytearray()
    # read1() returns what is there. read() would wait for all 64 KiB, however slowly they come.
    while part := raw.read1(2**16, decode_content=True):
        body += part
        if len(body) > MAX_REPLY_BYTES:
            raise ValueError(f"a reply of more than {MAX_REPLY_BYTES >> 20} MiB")
        if time.monotonic() > deadline:
            raise requests.Timeout(f"no whole reply within {seconds:g} s")
    return bytes(body)


def make_batches(rows: list[dict], groups: list[int | None]) -> list[list[dict]]:
    """The items of each request, at most MAX_ITEMS. Responses to one row of the data stay together where they fit.

    groups: the row of the data that each item belongs to. Items without one are cut anywhere.
    """
    batches: list[list[dict]] = [[]]
    for group, members in groupby(zip(rows, groups), lambda pair: pair[1]):
        together = [row for row, _ in members]
        if group is not None and len(batches[-1]) + len(together) > MAX_ITEMS:
            batches.append([])
        for row in together:
            if len(batches[-1]) == MAX_ITEMS:
                batches.append([])
            batches[-1].append(row)
    return [batch for batch in batches if batch]


def item_id(row: int, group: int | None) -> str:
    """ "ROW", or "GROUP.ROW" for an item whose row of the data is known."""
    return str(row) if group is None else f"{group}.{row}"


def group_of(given: str) -> int | None:
    """The group of an item_id(); None for an id of another form."""
    form = re.fullmatch(r"(\d{1,9})\.\d+", given, re.ASCII)
    return int(form[1]) if form else None


def encode(row: int, item: Item, length: int, truncated: bool) -> dict:
    """An item of a request."""
    return {
        "id": item_id(row, item.group),
        "prompt": item.prompt,
        "response": item.response,
        "answer": item.answer,
        "meta": {**plain(item.meta), "length": length, "truncated": truncated},
    }


def plain(value: dict) -> dict:
    """The value as strict JSON can hold it: dates, NaN and other objects become text."""
    return json.loads(json.dumps(value, default=str), parse_constant=str)


def to_results(reply: Reply, request_id: str, ids: list[str]) -> dict[str, Result]:
    """Results by id, whatever their order. Raises ValueError, which says what breaks the contract."""
    if reply.request_id != request_id:
        raise ValueError(f'"request_id" is {reply.request_id!r:.50}, expected {request_id!r}')
    answered = [entry.id for entry in reply.results]
    if sorted(answered) != sorted(ids):
        raise ValueError(f"the results have the ids {answered!s:.500}, expected {ids}")
    return {entry.id: to_result(entry) for entry in reply.results}


def to_result(entry: Entry) -> Result:
    """Raises ValueError if the entry has neither a score nor an error."""
    if entry.error is not None:
        # visible() comes before the cut, which might otherwise hide a token from it.
        one_line = " ".join(entry.error[:2000].split())
        return Result(None, None, None, {"error": visible(one_line)[:500]})
    if entry.score is None:
        raise ValueError(f'id {entry.id}: neither a "score" nor an "error"')
    info = entry.info or {}
    extracted = info.pop("extracted", None)
    return Result(entry.score, entry.acc, extracted and str(extracted), info)
