"""Input that does harm if it is trusted: markup in texts, paths in names, broken JSON, a reward service without end."""

import dataclasses
import gzip
import html.parser
import json
import math
import re
import socket
import threading
import time
from pathlib import Path

import pytest
from helpers import load

from common import errors
from common import rewards as rewards_module
from common.data import arithmetic, sources
from common.data.prompts import Source
from common.data.prompts import load as load_prompts
from common.errors import RunFailed
from common.preflight import folders, run_directory
from common.rewards import grading
from common.rewards.service import MAX_REPLY_BYTES as LARGEST
from common.rewards.service import RewardService
from common.run import report, traces

view, replay = load("scripts/view_rollouts.py"), load("scripts/replay.py")
MARKUP = "</pre></script><script>alert(1)</script>\"'><img src=x onerror=alert(2)>&lt;\u2028\u202e\0\x1b]0;t\x07"
HARMFUL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202e\ud800-\udfff]")
MIB = 2**20


def assert_one_line(call, *names: str, seconds: float = 5.0) -> str:
    """The message that a call is refused with: at once, in one short line that does no harm to a terminal."""
    began = time.monotonic()
    with pytest.raises(errors.OneLine) as caught:
        call()
    said = str(caught.value)
    assert time.monotonic() - began < seconds and len(said) < 3000 and not HARMFUL.search(said), said[:500]
    assert "\n" not in said and all(name in said for name in names), said
    return said


def test_control_characters_are_printed_as_escapes():
    asked = "".join(map(chr, [*range(32), *range(0x7F, 0xA0), 0x2028, *range(0x202A, 0x202F), 0x2066, 0xD800]))
    said = errors.visible(asked)
    assert not HARMFUL.search(said.replace("\n", "")) and "\\x1b" in said and "\\x9b" in said and "\\u202e" in said


# Pages


class Page(html.parser.HTMLParser):
    """The tags, attributes and text that a browser would find in a page."""

    def __init__(self, text: str):
        super().__init__()
        self.tags, self.attributes, self.text = set(), set(), ""
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attributes}

    def handle_data(self, text):
        self.text += text


def a_row(**changes) -> dict:
    """A row of a rollout file."""
    row = {
        "index": 0,
        "id": "a",
        "prompt": "1+1=",
        "response": "2",
        "answer": "2",
        "prompt_ids": [5, 6],
        "response_ids": [7, 1],
        "rollout_logprobs": [-1.0, -0.5],
        "old_logprobs": [-1.0, -0.25],
        "score": 1.0,
        "acc": 1.0,
        "extracted": None,
        "info": {},
        "advantage": 0.5,
        "dropped": False,
        "finish_reason": "stop",
        "weight_versions": [0, 0],
        "values": [0.5, 0.25],
    }
    return row | changes


@pytest.fixture(scope="module")
def evil_run(models, tmp_path_factory) -> Path:
    """A run directory in which every text is markup."""
    folder = tmp_path_factory.mktemp("x") / MARKUP.replace("/", "").replace("\0", "")[:100]
    (folder / "rollouts").mkdir(parents=True)
    run_json = {"algorithm": MARKUP, "argv": [MARKUP], "args": {"model": models["untied"], MARKUP: MARKUP}}
    (folder / "run.json").write_text(json.dumps(run_json))
    rows = [{"step": step, MARKUP: 1.0, "reward/mean": 0.5, "eval/accuracy": math.nan} for step in range(3)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    texts = dict.fromkeys(("id", "prompt", "response", "answer", "extracted", "finish_reason"), MARKUP)
    rows = [a_row(**texts, info={MARKUP: MARKUP, "ungraded": MARKUP, "parts": {MARKUP: MARKUP}}), a_row(score=None)]
    (folder / "rollouts/step_000001.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def test_the_report_shows_markup_as_text(evil_run):
    page = report.write(evil_run).read_text(encoding="utf-8")
    found = Page(page)
    assert not {"script", "img", "iframe", "object", "a", "form"} & found.tags
    assert not [name for name in found.attributes if name.startswith("on") or name in ("src", "srcset", "formaction")]
    assert (
        found.text.count("<script>alert(1)</script>") == 9
    )  # prompt, response, found, reference, end, four in run.json
    assert "default-src 'none'" in page and "could not be graded" in page


def test_a_step_shows_markup_as_text(evil_run, tmp_path, capsys):
    view.main(view.Args(evil_run, html=str(tmp_path / "page.html")))
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    found = Page(page)
    assert found.tags <= {"meta", "title", "style", "p", "pre", "span", "i"}
    assert found.attributes <= {"charset", "http-equiv", "content", "class", "title", "style"}
    capsys.readouterr()
    view.main(view.Args(evil_run))
    terminal = capsys.readouterr().out
    assert "<script>alert(1)</script>" in found.text and "<script>alert(1)</script>" in terminal
    assert not HARMFUL.search(page.replace("\n", "")) and not HARMFUL.search(terminal)


# Paths


def test_files_that_no_run_has_named_are_no_steps(tmp_path):
    (tmp_path / "rollouts").mkdir()
    for name in ("step_x", "step_0", "step_-00001", "step_000002", "step_" + "9" * 50, "step_000001.."):
        (tmp_path / f"rollouts/{name}.jsonl").write_text(json.dumps(a_row()) + "\n")
    assert traces.find(tmp_path).name == "step_000002.jsonl" and list(traces.saved(tmp_path)) == [2]


@pytest.mark.parametrize("argv", [["/tmp/evil.py"], ["../algos/../evil.py"], ["algos/grpo/../x.py"], "grpo", [], [3]])
def test_a_replay_runs_the_files_of_algos_alone(tmp_path, argv):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    file = argv[0] if argv else None
    for named in ({"argv": argv}, {"argv": ["algos/grpo.py"], "file": file}):
        (tmp_path / "run.json").write_text(json.dumps({**named, "args": {}}))
        assert_one_line(lambda: replay.load_run(tmp_path, 1), "run.json: the run was made by", "not in algos/")


STATES = [
    b'{"step": "../../x"}',
    b'{"step": -1}',
    b'{"step": true}',
    b'{"step": NaN}',
    b'{"step": 1e400}',
    b'{"step": null}',
    b'{"step": ' + b"9" * 5000 + b"}",
    b"{}",
    b"[2]",
    b"",
    b"[" * 100_000,
    b"\xff",
    b'{"step": "\\u001b[2J"}',
    b'{"step": 2, "fresh": "policy"}',
    b'{"step": 2, "ranks": "1"}',
    b'{"step": 2, "position": -3}',
    b'{"step": 2, "reward": {"weights": {"gsm8k": "x"}, "first_step": 1}}',
    b'{"step": 2, "eval/accuracy": "best"}',
    b'{"step": 2, "weight_version": [1]}',
    b'{"step": 2, "data": 5}',
]


@pytest.mark.parametrize("content", STATES, ids=lambda content: repr(content[:40]))
def test_a_hostile_state_is_refused(tmp_path, content):
    folder = tmp_path / "run/checkpoints/step_000002"
    folder.mkdir(parents=True)
    (folder / "state.json").write_bytes(content)
    for resume in ("auto", str(folder)):
        assert_one_line(lambda resume=resume: run_directory.check_directory(f"{tmp_path}/run", resume), "state.json")
    assert_one_line(lambda: folders.rotate(tmp_path / "run", 1), "state.json")
    assert [path.name for path in tmp_path.rglob("*")] == ["run", "checkpoints", "step_000002", "state.json"]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"[]",
        b"{}",
        b'{"args": []}',
        b"[" * 100_000,
        b'{"args": {"model": ["x"]}}',
        b'{"algorithm": "\\u001b[2J", "args": {}}',
    ],
)
def test_a_hostile_run_json_is_refused(tmp_path, content, capsys):
    (tmp_path / "run.json").write_bytes(content)
    args = dataclasses.make_dataclass("Args", [("steps", int), ("run_dir", str)])(3, str(tmp_path))
    assert_one_line(lambda: run_directory.check_configuration(args, "grpo"), str(tmp_path))
    assert view.load_tokenizer(tmp_path / "rollouts/step_000001.jsonl") is None
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and not HARMFUL.search(said.replace("\n", ""))


# JSON lines
LINES = {
    "control character": b'{"a": "\0"}',
    "escape sequence in a key": b'{"\\u001b]0;title\\u0007": []}',
    "10 MB text": b'{"step": "' + b"x" * 10 * MIB + b'"}',
    "list in list": b"[" * 100_000,
    "lone surrogate": b'{"a": "\\ud800", "step": []}',
    "5000 digits": b'{"step": ' + b"9" * 5000 + b"}",
    "-Infinity": b'{"step": -Infinity}',
    "UTF-16": '{"step": 1}'.encode("utf-16"),
}


def load_data(path: Path) -> list:
    return load_prompts(str(path), Source(), "train", arithmetic.tokenizer(), 64)


READERS = {
    "rows.jsonl": (load_data, {"question": "1+1=", "answer": "2"}),
    "step_000001.jsonl": (traces.read, a_row()),
    "metrics.jsonl": (lambda path: run_directory.read_metrics(path.parent), {"step": 1}),
}


@pytest.mark.parametrize("name", READERS)
@pytest.mark.parametrize("kind", LINES)
def test_a_hostile_line_is_refused_by_name_and_number(tmp_path, name, kind):
    reader, good = READERS[name]
    (tmp_path / name).write_bytes(json.dumps(good).encode() + b"\n" + LINES[kind] + b"\n")
    assert_one_line(lambda: reader(tmp_path / name), f"{name}:2: ")


VALUES = {  # column -> values that are refused there
    "answer": ["x\ud800", [1], {}, None, True, "\x1b[J"],
    "question": ["", "\ud800", {"a": 1}, 3, None],
}


@pytest.mark.parametrize("column, value", [(c, value) for c, values in VALUES.items() for value in values])
def test_a_hostile_value_is_refused_by_name_and_number(tmp_path, column, value):
    row = {"question": "1+1=", "answer": "2"}
    rows = [row, row | {column: value}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    reward = rewards_module.load(("gsm8k",))
    assert_one_line(lambda: reward.check_answers(load_data(tmp_path / "rows.jsonl")), "rows.jsonl:2: ")


def test_marks_without_an_end_take_no_hours():
    row = {"question": "q", "answer": "<<" * MIB + "<<1+1=2>>2 #### 2"}
    began = time.monotonic()
    assert sources.gsm8k_row("x:1", row)[1]["solution"] == "<<" * MIB + "2 #### 2" and time.monotonic() - began < 5


def test_a_row_that_no_run_writes_is_refused(tmp_path):
    rows = [a_row(), {key: value for key, value in a_row().items() if key != "advantage"}]
    (tmp_path / "step.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert_one_line(lambda: view.main(view.Args(tmp_path / "step.jsonl")), "step.jsonl:2: ", "'advantage'")


def test_unusual_rows_are_shown(tmp_path, capsys):
    numbers = {"score": math.nan, "advantage": [math.inf, -math.inf], "values": [math.nan, 1e300], "acc": 0.5}
    empty = {key: [] for key in ("response_ids", "rollout_logprobs", "weight_versions", "values", "advantage")}
    infos = [{"parts": [1], "x": "y" * MIB}, [[1]], None]  # a user's grader may return anything
    rows = [a_row(**numbers), *(a_row(info=info, extracted=4) for info in infos), a_row(**empty, old_logprobs=None)]
    (tmp_path / "step.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for color in ("advantage", "value", "mismatch"):
        view.main(view.Args(tmp_path / "step.jsonl", color=color))
        view.main(view.Args(tmp_path / "step.jsonl", color=color, html=str(tmp_path / "page.html")))
    assert len(capsys.readouterr().out) < 10_000


# A reward service

OK = b"HTTP/1.1 200 OK\r\n"


class Service:
    """A server whose reply to a request is the bytes that answer(JSON of the request) yields."""

    def __init__(self, answer):
        self.answer, self.heads, self.sent = answer, [], 0
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.socket.getsockname()[1]}"
        threading.Thread(target=self.serve, daemon=True).start()

    def serve(self):
        while True:
            try:
                connection, _ = self.socket.accept()
            except OSError:
                return
            threading.Thread(target=self.one, args=(connection,), daemon=True).start()

    def one(self, connection):
        with connection:
            got = b""
            while b"\r\n\r\n" not in got:
                got += connection.recv(2**16)
            head, _, body = got.partition(b"\r\n\r\n")
            self.heads.append(head)
            length = re.search(rb"(?i)content-length: (\d+)", head)
            while length and len(body) < int(length[1]):
                body += connection.recv(2**16)
            try:
                for part in self.answer(json.loads(body) if body else None):
                    connection.sendall(part)
                    self.sent += len(part)
            except OSError:
                return  # the client has gone


@pytest.fixture
def serve():
    started = []
    yield lambda answer: started.append(Service(answer)) or started[-1]
    for service in started:
        service.socket.close()


def ask(service: Service, **settings) -> grading.Result:
    client = RewardService(service.url, **{"tries": 1, "read_timeout": 0.3, **settings})
    (result,) = client([grading.Item("p", "r", "1")], [1], [False])
    return result


def whole(body: bytes, *headers: bytes, status: bytes = OK) -> bytes:
    lines = b"".join(header + b"\r\n" for header in (*headers, b"Content-Length: %d" % len(body)))
    return status + lines + b"\r\n" + body


def reply(asked: dict, **result) -> bytes:
    results = [{"id": "0", "score": 1.0, "acc": None, "error": None, "info": {}, **result}]
    return json.dumps({"version": 1, "request_id": asked["request_id"], "results": results}).encode()


def endless(asked):
    yield OK + b"Transfer-Encoding: chunked\r\n\r\n"
    while True:
        yield b"100000\r\n" + b" " * MIB + b"\r\n"


def test_a_reply_without_end(serve):
    service = serve(endless)
    assert f"a reply of more than {LARGEST // MIB} MiB" in assert_one_line(
        lambda: ask(service, read_timeout=20), service.url, seconds=20
    )
    assert_one_line(lambda: RewardService(service.url).check(), service.url, "GET /health", seconds=10)
    assert service.sent < 6 * LARGEST


def test_a_reply_that_unpacks_to_gigabytes(serve):
    bomb = gzip.compress(bytes(64 * MIB))
    service = serve(lambda asked: [whole(bomb, b"Content-Encoding: gzip")])
    assert_one_line(lambda: ask(service), service.url, f"a reply of more than {LARGEST // MIB} MiB")


def drip(first: bytes, byte: bytes):
    def answer(asked):
        yield first
        for _ in range(200):
            time.sleep(0.05)
            yield byte

    return answer


@pytest.mark.parametrize("head", [b"Content-Length: 100000\r\n\r\n", b"\r\n"])
def test_a_reply_that_comes_byte_by_byte(serve, head):
    began = time.monotonic()
    result = ask(serve(drip(OK + head, b" ")))
    assert result.score is None and time.monotonic() - began < 3
    said = ("no whole reply within 0.6 s", "ProtocolError", "ReadTimeout")  # the last if this machine is busy
    assert any(reason in result.info["error"] for reason in said)


def one_line_or_error(call) -> str:
    try:
        return call().info["error"]
    except RunFailed as error:
        return str(error)


def test_texts_of_a_service_reach_no_terminal_and_no_page(serve, capsys, tmp_path):
    error = MARKUP + "\x1b[2J\r" + "x" * 5000
    result = ask(serve(lambda asked: [whole(reply(asked, score=None, error=error))]))
    said = capsys.readouterr().err
    assert not HARMFUL.search(said.replace("\n", "")) and said.count("\n") == 1 and len(said) < 1000
    assert not HARMFUL.search(result.info["error"]) and "<script>" in result.info["error"]
    marked = view.to_html(a_row(info={"ungraded": result.info}, score=None), [], True)
    assert "script" not in Page(marked).tags
    for status in (b"500 \x1b[2J", b"400 " + b"x" * 1000):
        service = serve(lambda asked, status=status: [whole(error.encode(), status=b"HTTP/1.1 " + status + b"\r\n")])
        assert not HARMFUL.search(one_line_or_error(lambda service=service: ask(service)))
    assert not HARMFUL.search(capsys.readouterr().err.replace("\n", ""))


def test_a_service_cannot_make_the_token_known(serve, monkeypatch, capsys):
    monkeypatch.setenv("REWARD_TOKEN", "s3cret-token")
    heads = b"you said: Bearer s3cret-token"
    for answer in (
        lambda asked: [whole(heads, status=b"HTTP/1.1 403 no\r\n")],
        lambda asked: [whole(heads, status=b"HTTP/1.1 500 no\r\n")],
        lambda asked: [whole(reply(asked, score=None, error=heads.decode()))],
        lambda asked: [whole(json.dumps({"request_id": heads.decode()}).encode())],
    ):
        said = one_line_or_error(lambda answer=answer: ask(serve(answer)))
        assert "s3cret" not in said + capsys.readouterr().err and "$REWARD_TOKEN" in said
