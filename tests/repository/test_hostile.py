"""Texts, names and replies of others do no harm: to a page, a terminal, a folder, or the time of a run.

tests/preflight/test_refusals.py has the files that are refused.
"""

import gzip
import html.parser
import json
import math
import re
import threading
import time
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from helpers import checkpoint_state, load

from common import errors
from common.data import arithmetic, sources
from common.errors import RunFailed
from common.preflight import folders
from common.rewards.grading import Item, Result
from common.rewards.service import MAX_REPLY_BYTES, RewardService
from common.run import outcomes, report, traces

view = load("scripts/view_rollouts.py")
MARKUP = "</pre></script><script>alert(1)</script>\"'><img src=x onerror=alert(2)>&lt;\u2028\u202e\0\x1b]0;t\x07"
HARMFUL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202e\ud800-\udfff]")
MIB = 2**20


def test_control_characters_are_printed_as_escapes():
    asked = "".join(map(chr, [*range(32), *range(0x7F, 0xA0), 0x2028, *range(0x202A, 0x202F), 0x2066, 0xD800]))
    said = errors.visible(asked)
    assert not HARMFUL.search(said) and "\\x1b" in said and "\\x9b" in said and "\\u202e" in said


# Pages


class Page(html.parser.HTMLParser):
    """The tags, attributes and text that a browser would find in a page."""

    def __init__(self, text: str):
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: set[str] = set()
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attributes}

    def handle_data(self, text):
        self.text += text


def a_row(**changes) -> dict:
    """A row of a rollout file."""
    row = dict.fromkeys(traces.KEYS) | {"index": 0, "id": "a", "prompt": "1+1=", "response": "2", "answer": "2"}
    row |= {"prompt_ids": [5, 6], "response_ids": [7, 1], "weight_versions": [0, 0], "values": [0.5, 0.25]}
    row |= {"rollout_logprobs": [-1.0, -0.5], "old_logprobs": [-1.0, -0.25], "score": 1.0, "acc": 1.0, "info": {}}
    return row | {"advantage": 0.5, "dropped": False, "finish_reason": "stop"} | changes


def write_rows(path: Path, *rows: dict) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def evil_run(tmp_path) -> Path:
    """A run directory in which every text is markup."""
    folder = tmp_path / MARKUP.replace("/", "").replace("\0", "")[:100]
    texts = dict.fromkeys(("id", "prompt", "response", "answer", "extracted", "finish_reason"), MARKUP)
    info = {MARKUP: MARKUP, "ungraded": MARKUP, "parts": {MARKUP: MARKUP}}
    write_rows(folder / "rollouts/step_000001.jsonl", a_row(**texts, info=info), a_row(score=None))
    problem = dict.fromkeys(("id", "dataset", "prompt", "answer", "response"), MARKUP)
    for step in (0, 2):
        path = outcomes.path_of(folder, step)
        write_rows(path, problem | {"index": 0, "acc": 1.0, "truncated": False})
    metrics = [{"step": step, MARKUP: 1.0, "reward/mean": 0.5, "eval/accuracy": math.nan} for step in range(3)]
    write_rows(folder / "metrics.jsonl", *metrics)
    args = {"model": str(arithmetic.WARM_START), MARKUP: MARKUP}
    (folder / "run.json").write_text(json.dumps({"algorithm": MARKUP, "argv": [MARKUP], "args": args}))
    return folder


def test_the_report_shows_markup_as_text(evil_run):
    page = report.write(evil_run).read_text(encoding="utf-8")
    found = Page(page)
    assert not {"script", "img", "iframe", "object", "a", "form"} & found.tags
    assert not [name for name in found.attributes if name.startswith("on") or name in ("src", "srcset", "formaction")]
    # The prompt, the response, what was found, the reference, the end, why it was not graded; the algorithm; the
    # command; four times in run.json; and for the held-out problem its id, reference and prompt, and two responses.
    assert found.text.count("<script>alert(1)</script>") == 17
    assert "default-src 'none'" in page, "a page that loads nothing"


def test_a_step_shows_markup_as_text(evil_run, tmp_path, capsys):
    view.main(view.Args(evil_run, html=str(tmp_path / "page.html")))
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    found = Page(page)
    assert found.tags <= {"html", "meta", "title", "style", "p", "pre", "span", "i"}
    assert found.attributes <= {"lang", "charset", "name", "http-equiv", "content", "class", "title", "style"}
    capsys.readouterr()
    view.main(view.Args(evil_run))
    terminal = capsys.readouterr().out
    assert "<script>alert(1)</script>" in found.text and "<script>alert(1)</script>" in terminal
    assert not HARMFUL.search(page) and not HARMFUL.search(terminal)


def test_unusual_rows_are_shown(tmp_path, capsys):
    """A user's grader may return anything. And a run.json that names no model is no reason to show nothing."""
    numbers = {"score": math.nan, "advantage": [math.inf, -math.inf], "values": [math.nan, 1e300], "acc": 0.5}
    empty = {key: [] for key in ("response_ids", "rollout_logprobs", "weight_versions", "values", "advantage")}
    infos = [a_row(info=info, extracted=4) for info in ({"parts": [1], "x": "y" * MIB}, [[1]], None)]
    path = write_rows(tmp_path / "rollouts/step_1.jsonl", a_row(**numbers), *infos, a_row(**empty, old_logprobs=None))
    (tmp_path / "run.json").write_text('{"args": {"model": ["\\u001b[2J"]}}')
    for color in ("advantage", "value", "mismatch"):
        view.main(view.Args(path, color=color))
        view.main(view.Args(path, color=color, html=str(tmp_path / "page.html")))
    printed = capsys.readouterr()
    assert len(printed.out) < 10_000 and not HARMFUL.search(printed.out + printed.err)


# Names and paths


def test_files_that_no_run_has_named_are_no_steps(tmp_path):
    for name in ("step_x", "step_0", "step_-00001", "step_000002", "step_" + "9" * 50, "step_000001.."):
        write_rows(tmp_path / f"rollouts/{name}.jsonl", a_row())
    assert traces.find(tmp_path).name == "step_000002.jsonl" and list(traces.saved(tmp_path)) == [2]


def test_beside_a_damaged_checkpoint_none_is_deleted(tmp_path):
    for step, text in ((1, '{"step": "../../x"}'), (2, checkpoint_state(2)), (3, checkpoint_state(3))):
        folder = tmp_path / f"checkpoints/step_00000{step}"
        folder.mkdir(parents=True)
        (folder / "state.json").write_text(text)
    before = sorted(tmp_path.rglob("*"))
    folders.rotate(tmp_path, 1)
    assert sorted(tmp_path.rglob("*")) == before


def test_marks_without_an_end_take_no_hours():
    row = {"question": "q", "answer": "<<" * MIB + "<<1+1=2>>2 #### 2"}
    began = time.monotonic()
    assert sources.gsm8k_row("x:1", row)[1]["solution"] == "<<" * MIB + "2 #### 2" and time.monotonic() - began < 5


# A reward service


class Reply(BaseHTTPRequestHandler):
    """Answers with the bytes that server.answer(JSON of the request) yields."""

    def do_POST(self):
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        with suppress(OSError):  # the client has gone
            for part in self.server.answer(json.loads(body or "null")):
                self.wfile.write(part)
                self.server.sent += len(part)

    do_GET = do_POST

    def log_message(self, *given):
        pass


@pytest.fixture
def ask():
    """Asks a service that gives this answer about one response; returns the result, or the message of a refusal."""
    servers = []

    def ask(answer, **settings) -> Result | str:
        server = ThreadingHTTPServer(("127.0.0.1", 0), Reply)
        server.daemon_threads = True
        server.answer, server.sent = answer, 0
        servers.append(server)
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        try:
            (result,) = RewardService(url, tries=1, **settings)([Item("p", "r", "1")], [1], [False])
        except RunFailed as error:
            assert url in str(error) and "\n" not in str(error) and server.sent < 6 * MAX_REPLY_BYTES
            return str(error)
        return result

    yield ask
    for server in servers:
        server.shutdown()
        server.server_close()


OK = b"HTTP/1.1 200 OK\r\n"


def whole(body: bytes, header: bytes = b"", status: bytes = OK) -> list[bytes]:
    return [status + header + b"Content-Length: %d\r\n\r\n" % len(body) + body]


def failed(asked: dict, error: str) -> list[bytes]:
    """A reply in which the response could not be graded."""
    results = [{"id": "0", "score": None, "acc": None, "error": error, "info": {}}]
    return whole(json.dumps({"version": 1, "request_id": asked["request_id"], "results": results}).encode())


def endless(asked):
    yield OK + b"Transfer-Encoding: chunked\r\n\r\n"
    while True:
        yield b"100000\r\n" + b" " * MIB + b"\r\n"


def test_a_reply_without_end_or_that_unpacks_to_gigabytes_is_cut_off(ask):
    bomb = gzip.compress(bytes(2 * MAX_REPLY_BYTES))
    for answer in (endless, lambda asked: whole(bomb, b"Content-Encoding: gzip\r\n")):
        assert f"{MAX_REPLY_BYTES // MIB} MiB" in ask(answer, read_timeout=20)


@pytest.mark.parametrize("head", [b"Content-Length: 100000\r\n\r\n", b"\r\n"])
def test_a_reply_that_comes_byte_by_byte_is_not_waited_for(ask, head):
    def drip(asked):
        yield OK + head
        for _ in range(200):
            time.sleep(0.05)
            yield b" "

    began = time.monotonic()
    assert ask(drip, read_timeout=0.3).score is None and time.monotonic() - began < 8  # all of it takes 10


def test_texts_of_a_service_do_no_harm_and_make_no_token_known(ask, monkeypatch, capsys):
    monkeypatch.setenv("REWARD_TOKEN", "s3cret-token")
    text = f"\x1b[2J\rBearer s3cret-token {MARKUP}" + "x" * 5000
    for answer in (
        lambda asked: failed(asked, text),
        lambda asked: whole(text.encode(), status=b"HTTP/1.1 403 no\r\n"),
        lambda asked: whole(text.encode(), status=b"HTTP/1.1 500 \x1b[2J\r\n"),
        lambda asked: whole(json.dumps({"request_id": text}).encode()),
    ):
        result = ask(answer)
        reason = result if isinstance(result, str) else result.info["error"]
        warning = capsys.readouterr().err
        assert "$REWARD_TOKEN" in reason and "s3cret" not in reason + warning
        assert not HARMFUL.search(reason + warning) and warning.count("\n") <= 1 and len(warning) < 1000
        page = view.to_html(a_row(info={"ungraded": reason}, score=None), [], True)
        assert "script" not in Page(page).tags and "Bearer" in Page(page).text
