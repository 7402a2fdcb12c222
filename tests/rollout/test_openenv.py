"""--environment openenv:URL: with a small server of the same protocol, and with openenv-core's if it is installed."""

import contextlib
import importlib.util
import json
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import httpx
import pytest
from conftest import ROOT, free_port, launch
from helpers import metrics
from websockets.sync.server import serve

from common import errors
from common.data import arithmetic, openenv, sources
from common.data.prompts import TrainSource, load, load_eval
from common.errors import BadInput
from common.preflight import flags
from common.processes.pool import Failure
from common.rewards.grading import Result
from common.rollout import environments
from common.rollout.environments import Problem, built_in
from common.rollout.environments.openenv import PATIENCE as OWN_PATIENCE
from common.rollout.environments.openenv import OpenEnv, class_of
from common.rollout.environments.workers import EnvironmentPool

IS_INSTALLED = importlib.util.find_spec("openenv") is not None
real = pytest.mark.skipif(not IS_INSTALLED, reason="openenv-core is not installed; pip install openenv-core")


def schema_of(required: list[str], **fields) -> dict:
    """The schema of an action as pydantic writes it for a class of openenv-core."""
    properties = {"metadata": {"type": "object", "title": "Metadata"}, **fields}
    shape = {"additionalProperties": False, "properties": properties, "required": required, "type": "object"}
    return {"title": "Move", "description": "What the player does next.", **shape}


STRING, INTEGER = {"type": "string"}, {"type": "integer"}
TEXT = schema_of(["message"], message=STRING)
PAIR = schema_of(["low", "high"], low=INTEGER, high=INTEGER)


# A server of the same protocol

Play = Callable[[SimpleNamespace, str], dict | str | None]


def observation(text: str, reward=None, done=False) -> dict:
    return {"type": "observation", "data": {"observation": {"text": text}, "reward": reward, "done": done}}


def error(code: str, message: str, **more) -> dict:
    return {"type": "error", "data": {"code": code, "message": message, **more}}


def count(session: SimpleNamespace, text: str) -> dict | str | None:
    """Counts the turns, and adds them to the seed. The reward is the number at the end of a turn."""
    session.turns += 1
    kind, _, number = text.partition(" ")
    return observation(f"{session.seed + session.turns}", float(number or 0), done=kind == "end")


def guess(session: SimpleNamespace, text: str) -> dict:
    """The game of built_in.Guess."""
    if session.turns == 0:
        session.game = built_in.Guess()
        session.game.reset(Problem("", None, {"prompt": "10 to 24?"}, session.seed))
    session.turns += 1
    step = session.game.step(text)
    return observation(step.observation or "", session.game.score().score if step.done else None, step.done)


class Server:
    """play(session, text) answers a step. A str is sent as it is, and None closes the connection."""

    def __init__(self, play: Play = count, sessions: int = 999, schema=TEXT, first: Callable = "seed {}".format):
        self.play, self.limit, self.schema, self.first = play, sessions, schema, first
        self.log: list[list[dict]] = []  # the messages of each session
        self.open = 0
        self.lock = threading.Lock()
        self.start(0)

    def start(self, port: int) -> None:
        self.server = serve(self.serve_session, "127.0.0.1", port, process_request=self.serve_page)
        self.port = self.server.socket.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def stop(self) -> None:
        self.server.shutdown()

    def serve_page(self, connection, request):
        if request.path == "/ws":
            return None
        found = request.path == "/schema" and self.schema is not None
        return connection.respond(200 if found else 404, json.dumps({"action": self.schema}) if found else "no page")

    def serve_session(self, connection) -> None:
        with self.lock:
            is_full = self.open >= self.limit
            self.open += not is_full
        if is_full:
            connection.send(json.dumps(error("CAPACITY_REACHED", f"{self.limit}/{self.limit} sessions active")))
            return
        session, messages = SimpleNamespace(turns=0, seed=None), []
        self.log.append(messages)
        try:
            for raw in connection:
                message = json.loads(raw)
                messages.append(message)
                if message["type"] == "reset":
                    session.seed = message["data"]["seed"]
                    shown = self.first(session.seed)
                    answer = shown if isinstance(shown, dict) else observation(shown)
                else:
                    answer = self.play(session, message["data"].get("message", ""))
                if answer is None:
                    return
                connection.send(answer if isinstance(answer, str) else json.dumps(answer))
        finally:
            with self.lock:
                self.open -= 1


@pytest.fixture
def start() -> Iterator[Callable[..., Server]]:
    """Start servers that end with the test."""
    with contextlib.ExitStack() as exits:
        # The system may give the port of an ended server to the next test's, which can have another schema.
        exits.callback(openenv.server_at.cache_clear)

        def started(*given, **named) -> Server:
            server = Server(*given, **named)
            exits.callback(server.stop)
            return server

        yield started


def begin(server: Server, seed: int = 7, prompt: str = "", query: str = "", seconds: float = 6.0, **meta) -> OpenEnv:
    """An episode in this process."""
    environment = class_of(f"openenv:{server.url}{query}")()
    environment.seconds = seconds
    environment.reset(Problem(prompt, None, {"prompt": prompt, **meta}, seed))
    return environment


def wait_until(condition: Callable[[], bool]) -> bool:
    """A server closes a session a moment after its client."""
    for _ in range(500):
        if condition():
            return True
        time.sleep(0.01)
    return False


# The SPEC and the schema


@pytest.mark.parametrize(
    "spec, message",
    [
        ("openenv:", "expected openenv:http://HOST:PORT"),
        ("openenv:127.0.0.1:8000", "expected openenv:http://HOST:PORT"),
        ("openenv:http://h?prompt=3", 'unknown parameter "prompt"; known: prompts, action'),
        ("openenv:http://h?prompts=0", "prompts=0: expected a number > 0"),
        ("openenv:http://h?prompts=many", "prompts=many: expected a number > 0"),
        ("openenv:http://h?action=text", "action=text: expected json"),
    ],
)
def test_a_wrong_spec_is_refused(spec, message):
    for flag, read in (
        ("--environment", environments.check),
        ("--dataset", lambda spec: sources.read(spec, "train")),
    ):
        with pytest.raises(BadInput) as refused:
            read(spec)
        assert str(refused.value) == f"{flag} {spec}: {message}"


def test_addresses_may_be_those_of_openenvs_own_client():
    assert openenv.parse("openenv:ws://h:1/", "--environment") == openenv.Spec("http://h:1")
    assert openenv.parse("openenv:wss://h/a?prompts=3&action=json", "--dataset") == openenv.Spec("https://h/a", 3, True)


CALL = schema_of(["tool_name"], type={"const": "call_tool"}, tool_name=STRING, arguments={"type": "object"})


@pytest.mark.parametrize(
    "schema, text, action",
    [
        (TEXT, "hello", {"message": "hello"}),
        (TEXT, "", {"message": ""}),
        (TEXT, 'so: {"message": "hi"}', {"message": "hi"}),
        (TEXT, '{"message": "a"} or {"message": "b"}', {"message": "b"}),
        (TEXT, '{"message": 3}', {"message": '{"message": 3}'}),
        (TEXT, '{"message": "a", "extra": 1}', {"message": '{"message": "a", "extra": 1}'}),
        (TEXT, "x = {1: {2}}", {"message": "x = {1: {2}}"}),
        (TEXT, '{"a":' * 5000, {"message": '{"a":' * 5000}),
        (schema_of(["code"], code=STRING, timeout=INTEGER), "print(1)", {"code": "print(1)"}),
        (schema_of(["code"], code=STRING, timeout=INTEGER), '{"code": "1", "timeout": 2}', {"code": "1", "timeout": 2}),
        (PAIR, 'from {"low": 1, "high": 3}.', {"low": 1, "high": 3}),
        (PAIR, '{"low": 1}', None),
        (PAIR, "1 to 3", None),
        (CALL, '{"tool_name": "add", "arguments": {"a": 1}}', {"tool_name": "add", "arguments": {"a": 1}}),
        (CALL, "add", None),
    ],
)
def test_the_action_is_the_last_object_that_fits_or_the_text_in_the_only_required_field(schema, text, action):
    assert openenv.Actions(schema, only_json=schema in (PAIR, CALL)).of(text) == action


@pytest.mark.parametrize(
    "schema",
    [
        PAIR,
        CALL,
        schema_of([], message=STRING),
        schema_of(["a", "b"], a=STRING, b=STRING),
        schema_of(["move"], move=INTEGER),
        schema_of(["move"], move={"type": "string", "enum": ["left", "right"]}),
        {"anyOf": [{"type": "object"}]},
    ],
)
def test_a_schema_without_a_place_for_a_text_is_refused_in_one_line_that_shows_it(start, schema):
    server = start(schema=schema)
    with pytest.raises(BadInput) as refused:
        environments.check(f"openenv:{server.url}")
    line = str(refused.value)
    assert line.startswith(f"--environment openenv:{server.url}: ") and "\n" not in line and "?action=json" in line
    assert all(f'"{name}"' in line for name in schema.get("properties", {}) if name != "metadata")
    assert "player" not in line and "etadata" not in line, "the policy reads it, too"
    environments.check(f"openenv:{server.url}?action=json")


@pytest.mark.parametrize("schema", [None, "text", {"type": "nothing"}])
def test_a_server_that_is_no_openenv_is_refused_in_one_line(start, schema):
    server = start(schema=schema)
    with pytest.raises(BadInput) as refused:
        environments.check(f"openenv:{server.url}")
    assert f"--environment openenv:{server.url}: GET {server.url}/schema: " in str(refused.value)
    assert "\n" not in str(refused.value)


def test_an_absent_server_is_one_line_before_a_model_is_loaded():
    spec = f"openenv:http://127.0.0.1:{free_port()}"
    result = launch(ROOT / "algos/grpo.py", "--environment", spec, check=False)
    (line,) = [line for line in result.stderr.splitlines() if line.startswith("error[")]
    assert result.returncode == 2 and line.startswith(f"error[bad-input]: --environment {spec}: GET ")
    assert "Connection refused" in line and "Traceback" not in result.stderr


@pytest.mark.parametrize(
    "given, text",
    [
        ({"text": "more"}, "more"),
        ({"text": "more", "done": False, "reward": 1, "metadata": {"a": 1}}, "more"),
        ({"text": "é", "left": 2}, '{"text":"é","left":2}'),
        ({"left": 2}, '{"left":2}'),
        ({}, ""),
    ],
)
def test_an_observation_is_its_only_text_or_compact_json(given, text):
    assert openenv.text_of(given) == text


# Episodes


def test_an_episode_is_a_session_of_its_own_from_reset_to_the_end(start, monkeypatch):
    """A proxy that stands in the way is not asked for an address of this machine."""
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    server = start()
    one, other = begin(server, seed=2**32 - 1), begin(server, seed=5)
    assert one.step("a").observation.endswith("2147483648") and other.step("a").observation.endswith("6")
    assert one.step("b").observation == "2147483649" and server.open == 2
    step = one.step("end 1")
    assert step.done and step.observation is None
    assert wait_until(lambda: server.open == 1), "an episode that is over frees its place"
    first, second = server.log
    assert [message["type"] for message in first] == ["reset", "step", "step", "step"]
    assert [message["data"] for message in first[1:]] == [{"message": "a"}, {"message": "b"}, {"message": "end 1"}]
    seeds = [messages[0]["data"]["seed"] for messages in (first, second)]
    assert seeds == [2**31 - 1, 5], "some servers have 31 bits for it"
    assert len({messages[0]["data"]["episode_id"] for messages in (first, second)}) == 2
    other.score()
    assert wait_until(lambda: server.open == 0), "also one that the length limit has ended"
    failed = begin(server)
    del failed
    assert wait_until(lambda: server.open == 0), "also one that nobody scores"


def test_arguments_of_a_row_go_to_its_reset(start):
    server = start()
    begin(server, seed=7, reset={"seed": 3, "level": "hard"})
    data = server.log[0][0]["data"]
    assert (data["seed"], data["level"]) == (3, "hard")
    with pytest.raises(BadInput, match="expected an object"):
        begin(server, reset=3)


def test_the_reset_is_shown_before_the_first_answer_unless_the_prompt_has_it(start):
    server = start()
    unread = begin(server, prompt="Count!")
    assert [unread.step("a").observation, unread.step("a").observation] == ["seed 7\n8", "9"]
    assert begin(server, prompt="Count from seed 7 please").step("a").observation == "8"
    silent = start(first=lambda seed: "")
    assert begin(silent, prompt="Count!").step("a").observation == "8"


def test_an_error_that_comes_first_shows_the_reset_too(start):
    server = start(schema=PAIR)
    environment = begin(server, prompt="?", query="?action=json")
    step = environment.step("no object")
    assert step.observation.startswith("seed 7\nerror: an action is a JSON object") and '"low"' in step.observation
    assert (step.errors, step.done, len(server.log[0])) == (1, False, 1)
    assert environment.step('{"low": 1, "high": 2}').observation == "8"


@pytest.mark.parametrize(
    "texts, result",
    [
        (["a 0.5", "a 0.25", "end 1"], Result(1.75, 1.0, None, {"rewards": [0.5, 0.25, 1.0], "done": True})),
        (["a 3", "end 0"], Result(3.0, 0.0, None, {"rewards": [3.0, 0.0], "done": True})),
        (["end -1"], Result(-1.0, 0.0, None, {"rewards": [-1.0], "done": True})),
        (["a 3"], Result(3.0, 0.0, None, {"rewards": [3.0], "done": False})),
        ([], Result(0, 0.0, None, {"rewards": [], "done": False})),
    ],
)
def test_the_score_is_the_sum_of_rewards_and_acc_a_reward_at_the_servers_end(start, texts, result):
    environment = begin(start())
    for text in texts:
        environment.step(text)
    assert environment.score() == result


def test_a_reward_may_be_missing_or_true(start):
    rewards = [None, True, False, 2]
    environment = begin(start(lambda session, text: observation("", rewards[int(text)])))
    for number in range(4):
        environment.step(f"{number}")
    assert environment.score().info["rewards"] == [0.0, 1.0, 0.0, 2.0]


def test_an_action_that_the_server_rejects_is_an_error_that_the_policy_reads(start):
    def play(session, text):
        details = [{"loc": ["message"], "msg": "too long"}]
        return error("VALIDATION_ERROR", "Invalid message", errors=details) if text == "bad" else count(session, text)

    server = start(play)
    environment = begin(server, prompt="seed 7")
    assert environment.step("a").observation == "8"
    step = environment.step("bad")
    assert (step.observation, step.errors) == ("error: Invalid message; message: too long", 1) and not step.done
    assert environment.step("a 1").observation == "9" and len(server.log) == 1
    assert environment.score().info["rewards"] == [0.0, 1.0]


def test_the_page_about_environments_has_a_subclass_that_runs(start, tmp_path):
    """Chess of docs/environments.md, as a file of a user."""
    *_, chess = re.findall(r"```python\n(.*?)```", (ROOT / "docs/environments.md").read_text(), re.DOTALL)

    def with_board(answer: dict, board: str) -> dict:
        answer["data"]["observation"]["board"] = board
        return answer

    play = lambda session, text: with_board(count(session, text), "e4 e5")
    server = start(play, first=lambda seed: with_board(observation(""), "e4"))
    names = {}
    exec(chess.replace("http://127.0.0.1:8000", server.url), names)
    environment = names["Chess"]()
    environment.reset(Problem("White begins", None, {}, 7))
    assert environment.step("a 3").observation == "e4\ne4 e5"
    assert environment.step("end 1").done and environment.score() == Result(1.0, 1.0)
    assert names["Chess"].seconds == 300


# Servers in trouble


@pytest.mark.parametrize(
    "answer, expected, message",
    [
        (error("EXECUTION_ERROR", "no such door"), openenv.ServerError, "EXECUTION_ERROR: no such door"),
        ("no json", BadInput, "expected an observation, got 'no json'"),
        ("[]", BadInput, "expected an observation"),
        ({"type": "observation", "data": {"observation": "up", "done": False}}, BadInput, "expected an observation"),
        ({"type": "observation", "data": {"observation": {}}}, BadInput, "expected an observation"),
        (observation("up", float("nan")), BadInput, "expected a number as reward, got nan"),
        (observation("up", "high"), BadInput, "expected a number as reward, got 'high'"),
    ],
)
def test_an_error_or_a_strange_answer_fails_its_episode_and_frees_its_place(start, answer, expected, message):
    server = start(lambda session, text: answer if text == "bad" else count(session, text))
    environment, other = begin(server), begin(server, prompt="seed 7")
    with pytest.raises(expected, match=re.escape(message)):
        environment.step("bad")
    assert wait_until(lambda: server.open == 1) and len(server.log) == 2
    assert other.step("a").observation == "8"


def test_a_late_answer_fails_its_episode_alone_and_no_process_is_killed(start, tmp_path):
    server = start(lambda session, text: time.sleep(3 * (text == "late")) or count(session, text))
    (tmp_path / "hasty.py").write_text(
        "from common.rollout.environments import openenv\n"
        "openenv.PATIENCE = 0.3  # it gives up after 1.8 s, and would be killed after 6\n"
        f'class Hasty(openenv.OpenEnv):\n    url, seconds = "{server.url}", 6.0\n'
        '    def text_of(self, observation):\n        return "heard " + observation["text"]\n'
    )
    pool = EnvironmentPool(f"{tmp_path}/hasty.py:Hasty", "plain")
    pool.workers = pool.workers[:1]
    problem = {"prompt": "seed 7", "answer": None, "meta": {"prompt": "seed 7"}, "seed": 7}
    assert pool.ask(0, problem, ["a"], False)["observation"] == "heard seed 7\nheard 8", "the class has its own words"
    assert pool.ask(1, problem, ["a"], False)["observation"]
    child = pool.workers[0].child
    failed = pool.ask(1, problem, ["a", "late"], False)
    assert isinstance(failed, Failure) and failed.kind == "raised"
    assert failed.message.endswith(f"ServerError: {server.url} has not answered a step in time")
    assert pool.ask(0, problem, ["a", "b"], False)["observation"] == "heard 9"
    assert pool.workers[0].child is child
    assert OWN_PATIENCE < 1, "beyond its time limit the process would be killed with all its episodes"
    assert wait_until(lambda: server.open == 1), "a late answer would be that of the next step"
    pool.close()


def test_a_session_that_is_lost_is_played_again_from_its_reset(start):
    """For example the server has been restarted. It is the same episode for the policy."""
    dropped = []

    def play(session, text):
        if text == "drop 2" and not dropped:
            dropped.append(text)
            return None
        return count(session, text)

    server = start(play)
    environment = begin(server, prompt="seed 7", reset={"level": 3})
    assert environment.step("a 1").observation == "8"
    assert environment.step("drop 2").observation == "9"
    assert environment.step("end 4").done and environment.score().score == 7.0
    lost, again = server.log
    assert [message["data"].get("message") for message in again] == [None, "a 1", "drop 2", "end 4"]
    for messages in (lost, again):
        del messages[0]["data"]["episode_id"]
    assert lost[0] == again[0]


def test_a_server_that_stays_away_fails_the_episode_at_once(start):
    server = start()
    environment = begin(server, seconds=60.0)
    environment.step("a")
    server.stop()
    began = time.monotonic()
    with pytest.raises(openenv.ServerError, match="cannot be opened"):
        environment.step("b")
    assert time.monotonic() - began < 20, "trying again until the deadline would take 54 s"
    server.start(server.port)
    assert begin(server, prompt="seed 7").step("a").observation == "8", "the next episode goes on"


def test_a_server_that_closes_each_session_has_one_more_try(start):
    server = start(lambda session, text: None if text == "drop" else count(session, text))
    environment = begin(server)
    with pytest.raises(openenv.ServerError, match="has closed the connection"):
        environment.step("drop")
    assert len(server.log) == 2


def test_a_reset_that_is_rejected_fails_the_episode_and_frees_its_place(start):
    server = start(first=lambda seed: error("VALIDATION_ERROR", "no such level"))
    with pytest.raises(openenv.ServerError, match="VALIDATION_ERROR: no such level"):
        begin(server)
    assert wait_until(lambda: server.open == 0)


def test_an_action_that_is_rejected_only_when_it_is_repeated_fails_the_episode(start):
    """It is no fault of the policy's latest turn, which would read it."""
    played = []

    def play(session, text):
        played.append(text)
        if text == "drop":
            return None
        return error("VALIDATION_ERROR", "no") if played.count(text) > 1 else count(session, text)

    server = start(play)
    environment = begin(server)
    environment.step("a")
    with pytest.raises(BadInput, match="^turn 1 was answered by .*VALIDATION_ERROR: no"):
        environment.step("drop")
    assert wait_until(lambda: server.open == 0)


@pytest.mark.parametrize("which", ["reset", "turn 1"])
def test_a_server_that_does_not_repeat_itself_is_found_out(start, which):
    """Otherwise the rest of the episode would belong to another one."""
    draw = random.Random(0)

    def play(session, text):
        if text == "drop":
            return None
        return observation("up" if which == "reset" else f"{draw.random()}")

    first = (lambda seed: f"{draw.random()}") if which == "reset" else "seed {}".format
    environment = begin(start(play, first=first))
    environment.step("a")
    with pytest.raises(BadInput, match=f"^{which} was answered by .*, and by .* when it was repeated"):
        environment.step("drop")


@pytest.mark.parametrize("sessions", [1, 2])
def test_episodes_share_a_server_that_has_too_few_sessions(start, sessions):
    """An idle session is closed for another episode, and its own one begins again later."""
    server = start(sessions=sessions)
    episodes = [begin(server, seed, prompt=f"seed {seed}") for seed in (10, 20, 30)]
    for turn in (1, 2, 3):
        assert [episode.step(f"a {turn}").observation for episode in episodes] == [f"{s + turn}" for s in (10, 20, 30)]
    assert [episode.score().score for episode in episodes] == [6.0] * 3
    del episodes
    assert wait_until(lambda: server.open == 0)


def test_many_threads_share_a_server_that_has_two_sessions(start):
    server = start(sessions=2)
    finished = []

    def play(seed: int) -> None:
        episode = begin(server, seed, prompt=f"seed {seed}", seconds=30.0)
        finished.append([episode.step("a").observation for _ in range(3)] == [f"{seed + 1 + i}" for i in range(3)])

    threads = [threading.Thread(target=play, args=[seed]) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert finished == [True] * 8


def test_a_busy_session_is_not_closed_for_another_episode(start):
    server = start(lambda session, text: time.sleep(0.5 * (text == "slow")) or count(session, text), sessions=1)
    one = begin(server, 10, prompt="seed 10")
    asked = lambda: [message["data"].get("message") for messages in server.log for message in messages].count("slow")
    with ThreadPoolExecutor(1) as threads:
        slow = threads.submit(one.step, "slow")
        assert wait_until(lambda: asked() == 1)
        other = begin(server, 20, prompt="seed 20")
    assert slow.result().observation == "11" and asked() == 1
    assert other.step("a").observation == "21"


def test_a_server_that_stays_full_fails_the_episode_with_its_own_words(start):
    server = start(sessions=0)
    began = time.monotonic()
    with pytest.raises(openenv.ServerError, match="CAPACITY_REACHED: 0/0 sessions active"):
        begin(server, seconds=3.0)
    assert 1.5 < time.monotonic() - began < 20


def test_a_server_that_was_full_until_the_end_is_called_full_and_not_late(monkeypatch):
    """The last try may have had only a moment."""
    tries = iter([openenv.ServerError("no place", openenv.FULL)])

    def session(url, until):
        raise next(tries, openenv.ServerError("too late", openenv.LATE))

    monkeypatch.setattr(openenv, "Session", session)
    with pytest.raises(openenv.ServerError, match="no place"):
        openenv.Server("http://h").begin({}, time.monotonic() + 0.3)


def test_a_process_keeps_no_more_idle_sessions_than_it_has_files_for(start, monkeypatch):
    monkeypatch.setattr(openenv, "MOST_IDLE", 2)
    server = start()
    episodes = [begin(server, seed, prompt=f"seed {seed}") for seed in (10, 20, 30)]
    assert wait_until(lambda: server.open == 2)
    assert [episode.step("a").observation for episode in episodes] == ["11", "21", "31"]


# --dataset openenv:URL


def test_prompts_are_resets_and_the_episode_of_a_row_has_its_seed(start):
    server = start(first=lambda seed: f"room {seed % 1000}")
    spec = f"openenv:{server.url}?prompts=5"
    tokenizer = arithmetic.tokenizer()
    train = load((f"{spec}=2",), TrainSource(), "train", tokenizer, 400)
    held_out = load_eval((spec,), TrainSource(eval_prompts=3), tokenizer, 400)
    assert [prompt.text for prompt in train] == [f"room {seed}" for seed in range(5)]
    assert [prompt.meta["reset"]["seed"] for prompt in held_out] == [2**30, 2**30 + 1, 2**30 + 2]
    assert wait_until(lambda: server.open == 0)
    prompt = train[3]
    environment = begin(server, seed=99, **{**prompt.meta, "prompt": prompt.text})
    assert server.log[-1][0]["data"]["seed"] == 3 and environment.step("a").observation == "4"


def test_a_reset_that_shows_something_else_than_the_prompt_fails(start):
    """The server has to follow the seed. Otherwise the policy would answer a question that nobody asked."""
    rooms = iter(range(99))
    server = start(first=lambda seed: f"room {next(rooms)}")
    row = openenv.problems(f"openenv:{server.url}?prompts=1", "train")[0]
    with pytest.raises(BadInput, match="reset with the seed 0 showed 'room 0', and now 'room 1'"):
        begin(server, **row)
    assert wait_until(lambda: server.open == 0)


def test_a_data_set_of_a_server_that_is_absent_or_silent_is_refused(start):
    spec = f"openenv:http://127.0.0.1:{free_port()}"
    with pytest.raises(BadInput, match=f"^--eval-dataset {spec}: reset with the seed [0-9]+: .* cannot be opened"):
        sources.read(spec, "test", "--eval-dataset")
    silent = start(first=lambda seed: " ")
    with pytest.raises(BadInput, match="shows no text; take the prompts from a file"):
        sources.read(f"openenv:{silent.url}?prompts=1", "train")


@pytest.mark.parametrize(
    "typed, dataset",
    [
        (["--environment", "openenv:http://h"], ("openenv:http://h",)),
        (["--environment", "openenv:http://h", "--dataset", "rows.jsonl"], ("rows.jsonl",)),
        (["--environment", "game.py:Game"], ("arithmetic",)),
    ],
)
def test_a_server_brings_its_prompts_unless_others_are_named(monkeypatch, typed, dataset):
    parsed = []
    monkeypatch.setattr(errors, "launch", lambda main, args: parsed.append(args))
    monkeypatch.setattr(sys, "argv", ["grpo.py", *typed])
    flags.launch(print, flags.Flags, {"dataset": ("arithmetic",)}, "")
    assert parsed[0].dataset == dataset


# A run


@contextlib.contextmanager
def real_server(kind: str, sessions: int, port: int = 0) -> Iterator[str]:
    """The URL of a server of openenv-core."""
    port = port or free_port()
    command = [sys.executable, ROOT / "tests/workers/openenv_server.py", kind, f"{port}", f"{sessions}"]
    process = subprocess.Popen(command)
    url = f"http://127.0.0.1:{port}"
    try:
        for _ in range(600):
            assert process.poll() is None, "the server has ended"
            with contextlib.suppress(httpx.HTTPError):
                httpx.get(f"{url}/health", trust_env=False)
                break
            time.sleep(0.1)
        yield url
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()


@pytest.mark.slow
@pytest.mark.parametrize("server", ["small", pytest.param("openenv-core", marks=real)])
def test_a_run_of_grpo_plays_the_servers_episodes(start, tmp_path, server):
    """Each response of the run is played again here, with the game itself: same answers, same score."""
    with contextlib.ExitStack() as exits:
        if server == "small":
            url = start(guess, first=lambda seed: "10 to 24?").url
        else:
            url = exits.enter_context(real_server("Guess", 99))
        flags = ["--environment", f"openenv:{url}?prompts=24", "--steps", 2, "--prompts-per-step", 8]
        flags += ["--mini-batches", 2, "--group-size", 4, "--eval-prompts", 16, "--rollouts-every", 1]
        flags += ["--max-prompt-tokens", 64, "--max-response-tokens", 48, "--learning-rate", 2e-4, "--dtype", "float32"]
        model = ["--model", arithmetic.warm_start("guess")]
        launch(ROOT / "algos/grpo.py", *model, *flags, "--run-dir", tmp_path / "run")
    scores = set()
    for step in (1, 2):
        for line in (tmp_path / f"run/rollouts/step_{step:06d}.jsonl").read_text().splitlines():
            row = json.loads(line)
            assert row["prompt"] == "10 to 24?"
            # The seed of a row is its number.
            game = built_in.Guess()
            game.reset(Problem("", None, {"prompt": "10 to 24?"}, int(row["id"].rpartition(":")[2])))
            turns = re.split(r"\n> (more|less)\n", row["response"])
            heard = [game.step(text).observation for text in turns[::2]]
            assert heard[:-1] == turns[1::2]
            ended = heard[-1] is None
            assert row["score"] == pytest.approx(game.score().score if ended else 0.0)
            assert row["acc"] == (ended and row["score"] > 0)
            scores.add(round(row["score"], 2))
    assert len(scores) > 1
    for step in metrics(tmp_path / "run")[1:]:
        assert step["environment/turns"] > 1.5 and step["environment/failed_frac"] == 0


# openenv-core itself


@pytest.fixture(scope="module")
def echo() -> Iterator[str]:
    with real_server("Echo", 99) as url:
        yield url


@real
def test_openenv_core_keeps_no_state_between_plain_requests(echo):
    """Why an episode is a WebSocket. The environment of this step has never been reset."""
    post = lambda path, body: httpx.post(f"{echo}{path}", json=body, trust_env=False)
    assert post("/reset", {"seed": 5}).json()["observation"]["text"] == "seed 5"
    assert post("/step", {"action": {"message": "a"}}).status_code == 500


@real
def test_an_episode_of_openenv_core(echo):
    environments.check(f"openenv:{echo}")
    pool = EnvironmentPool(f"openenv:{echo}", "plain")
    problem = {"prompt": '{"text":"seed 7","turns":0}', "answer": None, "meta": {"prompt": "?"}, "seed": 7}
    assert pool.ask(0, problem, ["ab"], False)["observation"] == '{"text":"7 32 ab","turns":1}'
    assert pool.ask(1, problem, ["x"], False)["observation"] == '{"text":"7 32 x","turns":1}'
    assert pool.ask(0, problem, ["ab", "c"], False)["observation"] == '{"text":"7 32 c","turns":2}'
    end = pool.ask(0, problem, ["ab", "c", "def"], False)
    assert end["observation"] is None
    assert end["result"] == [6.0, 1.0, None, {"rewards": [2.0, 1.0, 3.0], "done": True}]
    failed = pool.ask(1, problem, ["x", "raise"], False)
    assert isinstance(failed, Failure) and "EXECUTION_ERROR: 'no such door'" in failed.message
    assert pool.ask(2, problem, ["fine"], True)["result"][0] == 4.0
    pool.close()


@real
def test_openenv_core_rejects_an_action_and_the_session_lives_on(echo):
    until = time.monotonic() + 10
    session, first = openenv.Server(echo).begin({"seed": 3}, until)
    assert first == openenv.Answer({"text": "seed 3", "turns": 0}, 0.0, False)
    with pytest.raises(openenv.ServerError, match="Invalid message; message: Field required") as rejected:
        session.ask("step", {}, until)
    assert rejected.value.code == openenv.REJECTED
    assert session.ask("step", {"message": "a"}, until).observation["turns"] == 1
    session.close()


@real
@pytest.mark.parametrize("sessions", [1, 3])
def test_openenv_core_with_few_sessions_plays_all_episodes(sessions):
    """1 is its default."""
    with real_server("Guess", sessions) as url:
        rows = openenv.problems(f"openenv:{url}?prompts=6", "train")
        pool = EnvironmentPool(f"openenv:{url}", "plain")
        pool.workers = pool.workers[:1]
        problems = [{"prompt": row["prompt"], "answer": None, "meta": row, "seed": 0} for row in rows]
        games = []
        for row in rows:
            games.append(built_in.Guess())
            games[-1].reset(Problem("", None, {"prompt": "10 to 24?"}, row["reset"]["seed"]))
        texts = ["3", "99", "4"]
        for turn in (1, 2, 3):
            answers = [pool.ask(key, problem, texts[:turn], False) for key, problem in enumerate(problems)]
            expected = [game.step(texts[turn - 1]).observation for game in games]
            assert [answer["observation"] for answer in answers] == expected
        pool.close()


@real
def test_an_episode_goes_on_after_a_restart_of_openenv_core():
    port = free_port()
    with real_server("Echo", 9, port) as url:
        environment = class_of(f"openenv:{url}")()
        environment.reset(Problem("seed 4", None, {}, 4))
        environment.step("a")
    with real_server("Echo", 9, port):
        assert environment.step("b").observation == '{"text":"4 32 b","turns":2}'


@real
def test_openenv_core_with_an_action_of_two_numbers():
    with real_server("Range", 9) as url:
        with pytest.raises(BadInput, match='"low".*"high"'):
            environments.check(f"openenv:{url}")
        environment = class_of(f"openenv:{url}?action=json")()
        environment.reset(Problem('{"text":"seed 4","turns":0}', None, {}, 4))
        assert environment.step("two").errors == 1
        assert environment.step('I take {"low": 9, "high": 2}').observation == '{"text":"-7","turns":0}'
        assert environment.step('{"low": 2, "high": 9}').done and environment.score().score == 2.0
