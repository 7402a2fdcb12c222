"""Rewards over HTTP: a real server that misbehaves in each way, and scripts/serve_reward.py killed in mid-run."""

import datetime
import email.utils
import json
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx
import pytest
import uvicorn
from conftest import ARITHMETIC, ROOT, free_port, launch
from helpers import load

from common.errors import BadInput, RunFailed
from common.rewards.grading import Item, Result, gsm8k_reward
from common.rewards.service import RewardService

serve_reward = load("scripts/serve_reward.py")
MIB = 2**20


class FakeService(ThreadingHTTPServer):
    """Scores each response with the number it is. answer(asked, attempt, reply) -> (status, body, headers)."""

    daemon_threads, request_queue_size = True, 64

    def __init__(self, answer):
        super().__init__(("127.0.0.1", 0), Handler)
        self.url, self.answer, self.lock = f"http://127.0.0.1:{self.server_port}", answer, threading.Lock()
        self.posts: list[dict] = []  # requests: asked, bytes, headers, time
        self.running = self.peak = 0
        self.health = (200, {"status": "ok", "name": "fake", "version": "1"})

    def handle_error(self, *given):
        pass  # a client that waited long enough has gone


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: FakeService

    def log_message(self, *args):
        pass

    def send(self, status, body, headers):
        body = body if isinstance(body, bytes) else json.dumps(body).encode()
        headers = {"Content-Length": len(body), **headers}
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)
        self.close_connection = int(headers["Content-Length"]) != len(body)

    def do_GET(self):
        assert self.path == "/health"
        self.server.headers = self.headers
        self.send(*self.server.health, {})

    def do_POST(self):
        assert self.path == "/score"
        raw = self.rfile.read(int(self.headers["Content-Length"]))
        asked = json.loads(raw)
        with self.server.lock:
            attempt = sum(post["asked"]["request_id"] == asked["request_id"] for post in self.server.posts)
            post = {"asked": asked, "bytes": len(raw), "headers": self.headers, "time": time.monotonic()}
            self.server.posts.append(post)
            self.server.running += 1
            self.server.peak = max(self.server.peak, self.server.running)
        entry = lambda item: {"id": item["id"], "score": float(item["response"]), "acc": 1.0, "error": None, "info": {}}
        reply = {"version": 1, "request_id": asked["request_id"], "results": [entry(item) for item in asked["items"]]}
        answer = self.server.answer(asked, attempt, reply)
        with self.server.lock:  # before the answer: the client may send its next request at once
            self.server.running -= 1
        if answer is None:
            self.close_connection = True  # gone without a word
        else:
            self.send(*answer)


def right(asked, attempt, reply):
    return 200, reply, {}


@pytest.fixture
def fake():
    """Start a fake service: fake(answer)."""
    started = []

    def start(answer=right) -> FakeService:
        started.append(FakeService(answer))
        threading.Thread(target=started[-1].serve_forever, args=(0.01,), daemon=True).start()
        return started[-1]

    yield start
    for server in started:
        server.shutdown()
        server.server_close()


def ask(service, count: int = 3, responses=None) -> list[Result]:
    """Rows 0 ... count - 1; the score of row i is i."""
    items = [Item("p", response, "1") for response in responses or map(str, range(count))]
    return service(items, [1] * len(items), [False] * len(items))


def scores(results: list[Result]) -> list[float]:
    return [result.score for result in results]


def quick(url: str, **settings) -> RewardService:
    return RewardService(url, **{"backoff": 0.01, **settings})


# A service that keeps the contract


def test_rows_come_back_in_their_order_from_requests_of_at_most_64(fake):
    def shuffled(asked, attempt, reply):
        random.shuffle(reply["results"])
        return right(asked, attempt, reply)

    server = fake(shuffled)
    assert scores(ask(RewardService(server.url), 150)) == list(range(150))
    assert sorted(len(post["asked"]["items"]) for post in server.posts) == [22, 64, 64]
    assert len({post["asked"]["request_id"] for post in server.posts}) == 3
    assert {post["asked"]["version"] for post in server.posts} == {1}
    assert RewardService(server.url)([], [], []) == [] and len(server.posts) == 3, "no items, no request"


def test_what_an_item_holds(fake):
    """Token ids stay here; dates and NaN become text; lone surrogates arrive, and come back."""

    def echo(asked, attempt, reply):
        return 200, {**reply, "results": [{"id": "0", "score": 1, "info": {"text": asked["items"][0]["prompt"]}}]}, {}

    server = fake(echo)
    meta = {"level": 3, "when": datetime.date(2024, 5, 1), "nan": float("nan"), 7: [1, ("a", None)]}
    service = RewardService(server.url + "/")
    assert service.url == server.url
    results = service([Item("2+3 \ud800 é \0", "5", None, meta, [4, 5])], [17], [True])
    assert results == [Result(1.0, None, None, {"text": "2+3 \ud800 é \0"})]
    (item,) = server.posts[0]["asked"]["items"]
    meta = {"level": 3, "when": "2024-05-01", "nan": "NaN", "7": [1, ["a", None]], "length": 17, "truncated": True}
    assert item == {"id": "0", "prompt": "2+3 \ud800 é \0", "response": "5", "answer": None, "meta": meta}


def test_at_most_eight_requests_at_once(fake):
    def slow(asked, attempt, reply):
        deadline = time.monotonic() + 30
        while server.peak < 8 and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.3)  # a ninth would come meanwhile
        return 200, reply, {}

    server = fake(slow)
    assert scores(ask(RewardService(server.url), 20 * 64)) == list(range(20 * 64))
    assert server.peak == 8


def test_an_items_error_is_that_rows_alone(fake, capfd):
    def partly(asked, attempt, reply):
        reply["results"][1].update(score=None, acc=None, error="gold answer\nis not a number" + "x" * 1000)
        return 200, reply, {}

    server = fake(partly)
    results = ask(RewardService(server.url), 3)
    assert scores(results) == [0, None, 2] and results[1].acc is None
    assert results[1].info["error"].startswith("gold answer is not a number") and len(results[1].info["error"]) == 500
    said = capfd.readouterr().err
    assert said.count("\n") == 1 and "1 of 3 rows not graded: gold answer is not" in said
    assert len(server.posts) == 1


def test_the_bearer_token_comes_from_the_environment(fake, monkeypatch):
    server = fake()
    ask(RewardService(server.url))
    assert server.posts[-1]["headers"]["Authorization"] is None
    monkeypatch.setenv("REWARD_TOKEN", "se-cret\n")
    RewardService(server.url).check()
    ask(RewardService(server.url))
    assert server.headers["Authorization"] == server.posts[-1]["headers"]["Authorization"] == "Bearer se-cret"
    monkeypatch.setenv("REWARD_TOKEN", "två\nrader")
    with pytest.raises(BadInput, match="REWARD_TOKEN"):
        RewardService(server.url).check()


def test_no_proxy_stands_before_loopback(fake, monkeypatch):
    server = fake()
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")  # nobody there
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    RewardService(server.url).check()
    assert scores(ask(RewardService(server.url))) == [0, 1, 2]
    assert RewardService("http://reward.example:8001").session.trust_env


# Replies after which the client tries again


def slow(asked, attempt, reply):
    time.sleep(10)
    return 200, reply, {}


def status(number):
    return lambda asked, attempt, reply: (number, b"busy", {})


AGAIN = {
    "slow": slow,
    "gone": lambda asked, attempt, reply: None,
    "cut off": lambda asked, attempt, reply: (200, json.dumps(reply).encode()[:50], {"Content-Length": 999}),
    **{str(number): status(number) for number in (408, 429, 500, 503)},
}


@pytest.mark.parametrize("name", AGAIN)
def test_tried_again(fake, capfd, name):
    server = fake(lambda *given: AGAIN[name](*given) if given[1] == 0 else right(*given))
    before = random.getstate()
    assert scores(ask(quick(server.url, read_timeout=3 if name == "slow" else 60))) == [0, 1, 2]
    assert len(server.posts) == 2
    assert len({post["asked"]["request_id"] for post in server.posts}) == 1, "a service could not know it is the same"
    assert random.getstate() == before, "a failure must not change a seeded run"
    assert capfd.readouterr().err == ""


def http_date(seconds_from_now: float) -> str:
    return email.utils.formatdate(time.time() + seconds_from_now, usegmt=True)  # of whole seconds


@pytest.mark.parametrize(
    "value, least",
    [(lambda: "1", 1.0), (lambda: http_date(3), 1.5), (lambda: http_date(-9999), 0.0)],
)
def test_retry_after(fake, value, least):
    server = fake(lambda *given: (429, b"", {"Retry-After": value()}) if given[1] == 0 else right(*given))
    assert scores(ask(quick(server.url))) == [0, 1, 2]
    assert least <= server.posts[1]["time"] - server.posts[0]["time"] < 30


def test_nobody_waits_for_hours(fake, monkeypatch):
    """On several ranks the others give up after half an hour."""
    slept = []
    monkeypatch.setattr("urllib3.util.retry.time.sleep", slept.append)
    server = fake(lambda *given: (429, b"", {"Retry-After": "86400"}) if given[1] == 0 else right(*given))
    assert scores(ask(quick(server.url))) == [0, 1, 2] and slept == [300]


@pytest.mark.parametrize("value", ["soon", "-500", "nan"])
def test_a_retry_after_that_nobody_can_read(fake, value):
    server = fake(lambda asked, attempt, reply: (429, b"", {"Retry-After": value}))
    results = ask(quick(server.url))
    assert scores(results) == [None] * 3 and "Retry-After" in results[0].info["error"]


def test_nobody_waits_after_the_last_try(fake):
    server = fake(lambda asked, attempt, reply: (429, b"", {"Retry-After": "30"}))
    began = time.monotonic()
    assert scores(ask(quick(server.url, tries=1))) == [None] * 3
    assert time.monotonic() - began < 20


def test_nobody_waits_beyond_the_patience(fake):
    """A judge's is six minutes. With Retry-After: 300 it asked again after ten."""
    server = fake(lambda asked, attempt, reply: (429, b"", {"Retry-After": "30"}))
    service = quick(server.url)
    service.patience = 5
    began = time.monotonic()
    assert scores(ask(service)) == [None] * 3
    assert time.monotonic() - began < 20


def test_ten_tries_take_about_a_minute():
    retries = RewardService("http://127.0.0.1:8001").retries
    pauses = []
    while retries.total:
        retries = retries.increment()
        pauses.append(retries.get_backoff_time())
    assert pauses == [0, 0.5, 1, 2, 4, 8, 15, 15, 15]


def test_a_seeded_run_draws_the_same_numbers_after_a_pause(fake):
    """urllib3 would take its jitter from the global generator."""
    server = fake(lambda *given: (503, b"", {}) if given[1] < 3 else right(*given))
    before = random.getstate()
    assert scores(ask(quick(server.url))) == [0, 1, 2]
    assert random.getstate() == before and len(server.posts) == 4


def test_not_graded_after_ten_tries_and_said_once(fake, capfd):
    """Only the rows of the requests that fail: the others keep their scores."""

    def answer(asked, attempt, reply):
        return (200, reply, {}) if asked["items"][0]["id"] == "64" else (500, b"down" * 1000, {})

    server = fake(answer)
    results = ask(quick(server.url), 150)
    assert scores(results) == [row if 64 <= row < 128 else None for row in range(150)]
    assert results[0].acc is None and "status 500" in results[0].info["error"]
    assert len(server.posts) == 10 + 1 + 10
    said = capfd.readouterr().err
    assert said.count("\n") == 1 and "86 of 150 rows not graded" in said and server.url in said and len(said) < 1000


# Replies that end the run at once


def results_of(change):
    return lambda reply: {**reply, "results": change(reply["results"])}


def with_entry(**changes):
    return results_of(lambda results: [{**results[0], **changes}, *results[1:]])


MALFORMED = {
    "missing id": (results_of(lambda results: results[1:]), r"ids \['1', '2'\], expected \['0', '1', '2'\]"),
    "duplicate id": (results_of(lambda results: [*results, results[1]]), "ids .*'2', '1'"),
    "one for another": (results_of(lambda results: [*results[1:], results[1]]), "ids .*'2', '1'"),
    "unknown id": (results_of(lambda results: [*results, {**results[0], "id": "9"}]), "ids .*'9'"),
    "id no string": (with_entry(id=0), '"results.0.id" is 0: Input should be a valid string'),
    "id a list": (with_entry(id=["0"]), '"results.0.id" is .*: Input should be a valid string'),
    "no objects": (results_of(lambda results: [1, 2, 3]), '"results.0" is 1: Input should be a valid dictionary'),
    "wrong request_id": (lambda reply: {**reply, "request_id": "0"}, "\"request_id\" is '0'"),
    "wrong version": (lambda reply: {**reply, "version": 2}, '"version" is 2: Input should be 1'),
    "no version": (lambda reply: {key: reply[key] for key in ("request_id", "results")}, '"version" .* required'),
    "NaN": (with_entry(score=float("nan")), '"results.0.score" is nan: Input should be a finite number'),
    "1e999": (lambda reply: json.dumps(reply).replace("1.0", "1e999", 1).encode(), "is inf: .*a finite number"),
    "10^400": (with_entry(score=10**400), '"results.0.score" is 10+: Input should be a valid number'),
    "a string": (with_entry(score="0.5"), "\"results.0.score\" is '0.5': Input should be a valid number"),
    "true": (with_entry(score=True), "is True: Input should be a valid number"),
    "null": (with_entry(score=None), 'id 0: neither a "score" nor an "error"'),
    "acc a string": (with_entry(acc="yes"), "\"results.0.acc\" is 'yes'"),
    "info a list": (with_entry(info=[1]), r'"results.0.info" is \[1\]'),
    "truncated": (lambda reply: json.dumps(reply).encode()[:-20], "Expecting|Unterminated"),
    "empty": (lambda reply: b"", "Expecting value"),
    "no object": (lambda reply: [reply], "Input should be a valid dictionary"),
    "no results": (lambda reply: {**reply, "results": {}}, '"results" is {}: Input should be a valid list'),
    "deep": (lambda reply: b"[" * 100_000, "recursion"),
    "not UTF-8": (lambda reply: b"\xff" * 1000, "not valid UTF-8"),
    "long": (lambda reply: b"a" * 500 + b"b" * 500, "status 200, 'a{500}'$"),  # 500 bytes are quoted
}


@pytest.mark.parametrize("name", MALFORMED)
def test_malformed(fake, name):
    change, says = MALFORMED[name]
    server = fake(lambda asked, attempt, reply: (200, change(reply), {}))
    with pytest.raises(RunFailed, match=says) as caught:
        ask(quick(server.url))
    assert server.url in str(caught.value) and "\n" not in str(caught.value)
    assert caught.value.code == "reward-service" and len(server.posts) == 1


@pytest.mark.parametrize("status", [404, 401, 422, 302, 307, 204])
def test_refused(fake, status):
    elsewhere = fake()
    headers = {"Location": f"{elsewhere.url}/score"}
    server = fake(lambda asked, attempt, reply: (status, b"" if status == 204 else b"no such thing", headers))
    with pytest.raises(RunFailed, match=f"status {status}") as caught:
        ask(quick(server.url))
    assert server.url in str(caught.value) and "REWARD_TOKEN" in str(caught.value)
    assert len(server.posts) == 1 and not elsewhere.posts


def test_one_refusal_ends_the_call_at_once(fake):
    """The other requests do not wait a minute to be tried again, nor are those sent that still wait for their turn."""

    def answer(asked, attempt, reply):
        if asked["items"][0]["id"] != "64":
            return 503, b"", {"Retry-After": "60"}
        time.sleep(1)  # until the others wait
        return 404, b"", {}

    server, began = fake(answer), time.monotonic()
    with pytest.raises(RunFailed, match="404"):
        ask(quick(server.url), 30 * 64)
    assert time.monotonic() - began < 30
    assert len(server.posts) <= 9  # the next one may have had its turn already


@pytest.mark.parametrize(
    "url",
    [
        "http://user:s3cret@127.0.0.1:8001",
        "http://s3cret@127.0.0.1:8001",
        "http://user:s3cret@127.0.0.1:port",
        "http://127.0.0.1:port",
        "http://",
        "ftp://127.0.0.1",
        "http://127.0.0.1:8001/?key=s3cret",
        "http://h:1/#s3cret",
    ],
)
def test_bad_url(url):
    with pytest.raises(BadInput, match="--reward .*http://HOST:PORT.* REWARD_TOKEN") as caught:
        RewardService(url)
    assert "s3cret" not in str(caught.value)


# Is it there?


def test_health(fake):
    server = fake()
    RewardService(server.url).check()
    assert not server.posts
    for status, body in [
        (404, {}),
        (302, {}),
        (500, {"status": "ok"}),
        (200, {"status": "loading"}),
        (200, [1]),
        (200, b"<html>"),
        (200, b"\xff"),
        (200, {}),
    ]:
        server.health = (status, body)
        with pytest.raises(BadInput, match=f"--reward {server.url}: GET /health: .*status {status}"):
            RewardService(server.url).check()


@pytest.mark.parametrize("listening", [False, True])
def test_health_of_nobody(listening):
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        if listening:  # accepts, and never answers
            server.listen()
        began = time.monotonic()
        with pytest.raises(BadInput, match="--reward http://127.0.0.1:.*GET /health"):
            RewardService(f"http://127.0.0.1:{server.getsockname()[1]}").check()
        assert time.monotonic() - began < 10


# scripts/serve_reward.py


def test_a_service_has_no_weight(monkeypatch):
    """What follows a key in an address is none."""

    def load_one(name):
        raise LookupError(name)

    monkeypatch.setattr(serve_reward.rewards, "load_one", load_one)
    with pytest.raises(BadInput, match="--reward gsm8k=0.5: .*no weight.*=0.5"):
        serve_reward.main(serve_reward.Args("gsm8k=0.5"))
    with pytest.raises(LookupError, match="judge:http://127.0.0.1:1"):
        serve_reward.main(serve_reward.Args("judge:http://127.0.0.1:1/v1?version=1"))


def gsm8k(*given) -> list[Result]:
    return gsm8k_reward(*given, mode="flexible")


@pytest.fixture
def serve():
    """Serve a grader in this process: serve(grader, token, threads) -> URL."""
    started = []

    def start(reward, token: str = "", threads: int = 1) -> str:
        app = serve_reward.serve(reward, "mine", token, threads)
        server = uvicorn.Server(uvicorn.Config(app, port=free_port(), log_level="critical"))
        started.append((server, threading.Thread(target=server.run)))
        started[-1][1].start()
        while not server.started:
            assert started[-1][1].is_alive(), "somebody else has taken the port"
            time.sleep(0.01)
        return f"http://127.0.0.1:{server.config.port}"

    yield start
    for server, thread in started:
        server.should_exit = True
        thread.join()


GSM8K = [
    ("#### 18.", "18"),
    ("about 70,000", "70000"),
    ("", "5"),
    (r"\boxed{3}", "4"),
    ("\ud800 #### 7", "7"),
    ("#### 5\0", "5"),
    ("五 9", "9"),
    ("#### " + "9" * 5000, "9"),
]


def test_served_gsm8k_is_gsm8k(serve):
    items = [Item("p", response, answer, {"id": 3}) for response, answer in GSM8K * 20]
    given, url = (items, [7] * len(items), [True] * len(items)), serve(gsm8k, threads=4)
    RewardService(url).check()
    assert RewardService(url)(*given) == gsm8k(*given)


def test_a_served_grader_sees_what_it_would_see_here(serve):
    seen = []

    def grader(*given):
        seen.append(given)
        return [Result(1.0, None, "x", {"when": datetime.date(2024, 5, 1), "text": "\ud800"})] * len(given[0])

    given = [Item("p", "r", None, {"level": [3]}), Item("q", "\udfff", "7")], [5, 6], [True, False]
    results = RewardService(serve(grader))(*given)
    assert seen == [given]
    assert results == [Result(1.0, None, "x", {"when": "2024-05-01", "text": "\ud800"})] * 2


def test_a_result_without_a_score_is_that_rows_alone(serve):
    failed = [Result(None, None, None, {"error": "no gold"}), Result(float("nan"), 0.0)]
    failed.append(Result(None, None, None, {"timeout": 1}))
    results = ask(RewardService(serve(lambda *_: [*failed, Result(1, 1)])), 4)
    assert scores(results) == [None, None, None, 1]
    assert [result.info.get("error") for result in results] == [
        "no gold",
        "the grader's score is nan: {}",
        "the grader's score is None: {'timeout': 1}",
        None,
    ]


def test_a_grader_that_raises_once_is_asked_again(serve):
    calls = []

    def grader(items, lengths, truncated):
        calls.append(len(items))
        if len(calls) == 1:
            raise ValueError("cannot grade \ud800")
        return [Result(1.0, 1.0)] * (len(items) - (len(calls) == 2))  # then one too few

    assert scores(ask(quick(serve(grader)))) == [1, 1, 1]
    assert calls == [3, 3, 3]


def test_why_a_grader_fails_reaches_the_trainer(serve):
    def grader(items, lengths, truncated):
        raise RunFailed("the grader raised an error\nTraceback ...\nZeroDivisionError: \ud800", code="reward-failed")

    reason = ask(quick(serve(grader), tries=2))[0].info["error"]
    assert "status 500" in reason and re.search(r"ZeroDivisionError: \\+ud800", reason)


def test_a_request_sent_again_is_graded_once(serve):
    calls = []

    def grader(items, lengths, truncated):
        calls.append(len(items))
        time.sleep(1)
        return gsm8k(items, lengths, truncated)

    # A server that forgets would grade for a second at each of the tries, and never answer in time.
    assert scores(ask(quick(serve(grader), read_timeout=0.3, tries=15), responses=["1", "2"])) == [1, 0]
    assert calls == [2], "while it is graded, and after"


def test_health_answers_while_a_batch_is_graded(serve):
    release = threading.Event()
    url = serve(lambda *given: release.wait(10) and gsm8k(*given))
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(ask, RewardService(url))
        time.sleep(0.2)
        RewardService(url).check()
        assert not asked.done()
        release.set()
        assert scores(asked.result()) == [0, 1, 0]


def test_the_served_token(serve, monkeypatch):
    url = serve(gsm8k, token="se-cret")
    for token in ("", "wrong", "se-cre"):
        monkeypatch.setenv("REWARD_TOKEN", token)
        with pytest.raises(BadInput, match="status 401.*REWARD_TOKEN"):
            RewardService(url).check()
        with pytest.raises(RunFailed, match="status 401.*REWARD_TOKEN"):
            ask(RewardService(url))
    monkeypatch.setenv("REWARD_TOKEN", "se-cret")
    RewardService(url).check()
    assert scores(ask(RewardService(url))) == [0, 1, 0]


def test_bodies_the_server_refuses(serve):
    url = serve(gsm8k)
    row = {"id": "0", "prompt": "p", "response": "1", "answer": "1"}
    post = lambda content: httpx.post(f"{url}/score", content=content)
    body = lambda **changes: json.dumps({"version": 1, "request_id": "a", "items": [row], **changes})
    assert post(body()).json()["results"][0]["score"] == 1
    assert post(body(request_id="b", items=[])).json()["results"] == []
    for refused in (
        b"",
        b"{",
        b"\xff",
        b"[" * 100_000,
        b"[]",
        body(version=2),
        body(request_id=3),
        body(items=None),
        body(items=[row] * (64 + 1)),
        body(items=[{**row, "response": None}]),
        body(items=[{**row, "id": 0}]),
        body(items=[{**row, "meta": []}]),
    ):
        assert post(refused).status_code == 422
    large = body(items=[{**row, "response": "1" * 64 * MIB}])
    assert post(large).status_code == 413
    assert post(iter([large.encode()])).status_code == 413  # without a Content-Length
    assert post(body(request_id="c")).status_code == 200


@pytest.mark.nightly
def test_a_run_goes_on_when_its_service_is_killed_and_restarted(models, tmp_path):
    """On two ranks, and bit for bit as if the grader had been in the process: no row lost, none with a wrong score."""
    flags = [*ARITHMETIC, "--model", models["untied"], "--rollout-backend", "hf", "--steps", 6, "--prompts-per-step", 8]
    flags += ["--mini-batches", 2, "--eval-prompts", 0, "--run-dir"]
    (tmp_path / "mine.py").write_text("def grade(items, lengths, truncated):\n    return [n % 3 for n in lengths]\n")
    reward, metrics = ["--reward", f"{tmp_path}/mine.py:grade"], tmp_path / "served/metrics.jsonl"
    launch(ROOT / "algos/grpo.py", *flags, tmp_path / "inside", *reward, ranks=2)
    port = free_port()
    command = [sys.executable, ROOT / "scripts/serve_reward.py", "--port", str(port), *reward]
    start = lambda: subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    server, url = start(), f"http://127.0.0.1:{port}"
    try:
        with ThreadPoolExecutor(1) as pool:
            ask(RewardService(url, tries=20), 1)  # refused until the server is up
            command_line = [ROOT / "algos/grpo.py", *flags, tmp_path / "served", "--reward", url]
            running = pool.submit(launch, *command_line, ranks=2)
            while not metrics.is_file() or len(metrics.read_text().splitlines()) < 2:
                assert not running.done(), running.result().stderr[-2000:]
                time.sleep(0.02)
            server.send_signal(signal.SIGKILL)
            server.wait()
            assert not running.done(), "killed too late"
            server = start()
            running.result()
    finally:
        server.kill()
        server.wait()
    clock = lambda row: {key: value for key, value in row.items() if not key.startswith(("time/", "throughput/"))}
    inside, served = (
        [clock(json.loads(line)) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        for name in ("inside", "served")
    )
    assert inside == served and len(served) == 6 and any(row["train/grad_norm"] > 0 for row in served)
