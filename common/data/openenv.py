"""Servers of OpenEnv (github.com/meta-pytorch/OpenEnv): what they say, and --dataset openenv:URL.

GET URL/schema gives {"action": a JSON schema, ...}. A WebSocket at URL/ws is a session with an environment of its own:

    {"type": "reset", "data": {"seed": 7, "episode_id": "5f0c"}}     ->
    {"type": "step", "data": {"message": "12"}}                      ->
                            <-    {"type": "observation", "data": {"observation": {...}, "reward": 1.0, "done": true}}
                            <-    {"type": "error", "data": {"message": "...", "code": "EXECUTION_ERROR"}}

There are also POST URL/reset and POST URL/step. They are of no use here: in openenv-core 0.3.0 each such request gets a
new environment, which is closed after it. That package is not needed here, only its protocol.

The other half is common/rollout/environments/openenv.py. This file needs no torch.
"""

import contextlib
import functools
import json
import math
import threading
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import httpx
import jsonschema
from websockets.exceptions import ConnectionClosed, WebSocketException
from websockets.sync.client import connect

from common.data import json_lines
from common.errors import BadInput

PREFIX = "openenv:"
TRAINED_ON = 256  # prompts of the training split, unless the parameter `prompts` says otherwise
HELD_OUT = 64  # prompts of the test split
SEEDS = {"train": 0, "test": 2**30}  # prompt i is the reset with this seed + i
DRAWN_AT_ONCE = 8  # resets for a data set
SCHEMA_SECONDS = 10.0
RESET_SECONDS = 60.0  # for one prompt of a data set
CLOSE_SECONDS = 1.0
# A full server is asked again after this time.
PAUSE_SECONDS = 0.05
# Sessions of a process between two turns. Each has a thread and a file, and a process may have 1024 files.
MOST_IDLE = 256
MAX_MESSAGE_BYTES = 16 * 2**20
NOT_SHOWN = ("done", "reward", "metadata")  # fields of an observation that are no text for the policy
# Codes of a ServerError. The first two are OpenEnv's, the others are ours.
FULL = "CAPACITY_REACHED"
REJECTED = "VALIDATION_ERROR"
LOST = "LOST"
LATE = "LATE"


class ServerError(Exception):
    """The server can't be reached, is late, has gone away, or answers with an error. The code may be the server's."""

    def __init__(self, message: str, code: str = "", said: str = ""):
        super().__init__(message)
        self.code = code
        self.said = said  # the server's own words, without its address


@dataclass(frozen=True)
class Answer:
    """A server's answer to a reset or a step."""

    observation: dict[str, Any]
    reward: float  # 0 where the server gives none
    done: bool


# The SPEC of --environment and --dataset


@dataclass(frozen=True)
class Spec:
    url: str  # http://HOST:PORT, without a slash at the end
    prompts: int = TRAINED_ON
    only_json: bool = False  # every action is a JSON object that the policy writes


def parse(spec: str, flag: str) -> Spec:
    """openenv:URL?prompts=N&action=json. Raises BadInput."""
    address, _, query = spec.removeprefix(PREFIX).partition("?")
    # Clients of OpenEnv take ws:// as well.
    for scheme in ("ws", "wss"):
        if address.startswith(f"{scheme}://"):
            address = address.replace("ws", "http", 1)
    if urlsplit(address).scheme not in ("http", "https") or not urlsplit(address).hostname:
        raise BadInput(f"{flag} {spec}: expected {PREFIX}http://HOST:PORT")
    given = dict(pair.partition("=")[::2] for pair in query.split("&") if pair)
    unknown = given.keys() - {"prompts", "action"}
    if unknown:
        raise BadInput(f'{flag} {spec}: unknown parameter "{min(unknown)}"; known: prompts, action')
    prompts = given.get("prompts", str(TRAINED_ON))
    if not prompts.isdecimal() or not 0 < int(prompts) <= SEEDS["test"]:
        raise BadInput(f"{flag} {spec}: prompts={prompts}: expected a number > 0")
    if given.get("action", "json") != "json":
        raise BadInput(f"{flag} {spec}: action={given['action']}: expected json")
    return Spec(address.rstrip("/"), int(prompts), "action" in given)


def check(spec: str) -> None:
    """Ask the server for its schema. Raises BadInput if there is no server, or if a text can't be an action."""
    parsed = parse(spec, "--environment")
    try:
        Actions(server_at(parsed.url).action_schema, parsed.only_json)
    except (BadInput, ServerError) as error:
        raise BadInput(f"--environment {spec}: {error}") from None


# Actions and observations


class Actions:
    """The policy's text as an action of the server."""

    def __init__(self, schema: dict, only_json: bool):
        """Raises BadInput if the schema has no field for a text, and the policy is not meant to write JSON."""
        self.schema = schema
        self.validator = jsonschema.validators.validator_for(schema)(schema)
        self.text_field = None if only_json else text_field(schema)
        if self.text_field is None and not only_json:
            raise BadInput(
                "an action has not exactly one required field with a text; if the prompts tell the policy to write "
                f"such JSON, add ?action=json; its schema is {self.shown}"
            )

    @property
    def shown(self) -> str:
        """The schema in one line, as short as it can be: the policy may read it, too."""
        schema = without_words(self.schema)
        if "properties" in schema:
            fields = schema["properties"].items()
            schema["properties"] = {name: without_words(field) for name, field in fields if name not in NOT_SHOWN}
        return json.dumps(schema, ensure_ascii=False)

    def of(self, text: str) -> dict | None:
        """The last JSON object in the text that fits the schema; otherwise the text in its field; otherwise None."""
        for value in reversed(json_lines.objects_in(text)):
            if self.validator.is_valid(value):
                return value
        return {self.text_field: text} if self.text_field else None


def without_words(schema: dict) -> dict:
    """The schema without what pydantic writes for people, and without what all actions have."""
    words = ("title", "description", "additionalProperties")
    return {key: value for key, value in schema.items() if key not in words}


def text_field(schema: dict) -> str | None:
    """Name of the only required field, if it takes any text.

    A schema with a constant, such as {"type": "call_tool", "tool_name": ...}, is one of several kinds of objects. Its
    required field is a name, and no place for a text.
    """
    fields = schema.get("properties", {})
    required = schema.get("required", [])
    if len(required) != 1 or any("const" in field for field in fields.values()):
        return None
    field = fields.get(required[0], {})
    if field.get("type") != "string" or "enum" in field:
        return None
    return required[0]


def text_of(observation: dict[str, Any]) -> str:
    """An observation for the policy: its only field, if that is a text, otherwise its fields as JSON."""
    fields = {name: value for name, value in observation.items() if name not in NOT_SHOWN}
    if not fields:
        return ""
    if len(fields) == 1:
        (value,) = fields.values()
        if isinstance(value, str):
            return value
    return json.dumps(fields, ensure_ascii=False, separators=(",", ":"))


# Sessions


class Session:
    """One connection, and so one environment of the server. Any error but a step that is REJECTED closes it."""

    def __init__(self, url: str, until: float):
        """until: when the server is late, as time.monotonic() counts. Raises ServerError."""
        self.url = url
        # Leaving it closes the connection.
        self.exits = contextlib.ExitStack()
        try:
            connection = connect(
                f"{url.replace('http', 'ws', 1)}/ws",
                open_timeout=seconds_left(until),
                close_timeout=CLOSE_SECONDS,
                # The server pings. Pings from here would take another thread for each session.
                ping_interval=None,
                max_size=MAX_MESSAGE_BYTES,
                proxy=None if is_local(url) else True,
            )
            self.socket = self.exits.enter_context(connection)
        except TimeoutError:
            raise ServerError(f"{url}/ws does not answer", LATE) from None
        except (OSError, WebSocketException) as error:
            raise ServerError(f"{url}/ws cannot be opened: {error}") from None

    def ask(self, kind: str, data: dict, until: float) -> Answer:
        """The answer to a "reset" or a "step". Raises ServerError, and BadInput for an answer in another form."""
        try:
            # If the server has closed the connection, its last words may still be there to read.
            with contextlib.suppress(ConnectionClosed):
                self.socket.send(json.dumps({"type": kind, "data": data}))
            return read_answer(self.url, self.socket.recv(seconds_left(until)))
        except ServerError as error:
            if kind != "step" or error.code != REJECTED:
                self.close()
            raise
        except TimeoutError:
            # A late answer would be taken for that of the next step.
            self.close()
            raise ServerError(f"{self.url} has not answered a {kind} in time", LATE) from None
        except ConnectionClosed as error:
            self.close()
            raise ServerError(f"{self.url} has closed the connection: {error}", LOST) from None
        except BadInput:
            self.close()
            raise

    def close(self) -> None:
        """The server closes its environment, too. Closing twice is fine."""
        self.exits.close()


def seconds_left(until: float) -> float:
    return max(0.0, until - time.monotonic())


def is_local(url: str) -> bool:
    """Whether the URL is on this machine's loopback. A proxy that HTTP_PROXY names could not reach it."""
    host = urlsplit(url).hostname
    return host in ("localhost", "::1") or host.startswith("127.")


def read_answer(url: str, message: str | bytes) -> Answer:
    """Raises ServerError if the message is an error, and BadInput if it is anything but an observation."""
    try:
        value = json.loads(message)
        data = value["data"]
        if value["type"] == "error":
            code, said = data.get("code") or "", error_text(data)
            raise ServerError(f"{url} says {code}: {said}", code, said)
        observation, reward, done = data["observation"], data.get("reward"), data.get("done")
        is_answer = isinstance(observation, dict) and isinstance(done, bool)
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        is_answer = False
    if not is_answer:
        raise BadInput(f"{url}: expected an observation, got {message[:300]!r}")
    if reward is None:
        reward = 0.0
    # true is 1, as in Python. NaN is no JSON, but Python writes it.
    if not isinstance(reward, int | float) or not math.isfinite(reward):
        raise BadInput(f"{url}: expected a number as reward, got {reward!r:.100}")
    return Answer(observation, float(reward), done)


def error_text(data: dict) -> str:
    """The message of an error, and which fields of an action are wrong."""
    details = [f"{'.'.join(map(str, detail['loc']))}: {detail['msg']}" for detail in data.get("errors", [])]
    return "; ".join([str(data.get("message")), *details])


class Server:
    """The sessions of this process on one server. Any thread may call the methods.

    A session is idle while the engine samples the next turn of its episode. The number of sessions may be too small for
    all episodes: openenv-core's default is 1. Then an idle session is closed, and its episode will begin again and
    repeat its turns. So a full server makes a run slower. A process can only close its own sessions, so with fewer
    sessions than worker processes (one a core) some episodes fail.
    """

    def __init__(self, url: str):
        self.url = url
        self.lock = threading.Lock()
        # A dict keeps the order: the first one has been idle for the longest time.
        self.idle: dict[Session, None] = {}

    @functools.cached_property
    def action_schema(self) -> dict:
        """The schema that the server publishes. Raises ServerError."""
        try:
            trust_env = not is_local(self.url)
            reply = httpx.get(f"{self.url}/schema", timeout=SCHEMA_SECONDS, trust_env=trust_env, follow_redirects=True)
            schema = reply.raise_for_status().json()["action"]
            jsonschema.validators.validator_for(schema).check_schema(schema)
            return schema
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise ServerError(f"GET {self.url}/schema: {error or type(error).__name__}".split("\n")[0]) from None
        except (ValueError, LookupError, TypeError, AttributeError, jsonschema.SchemaError):
            raise ServerError(f'GET {self.url}/schema: expected {{"action": a JSON schema}}; is it OpenEnv?') from None

    def begin(self, arguments: dict, until: float) -> tuple[Session, Answer]:
        """A new session, and the answer to its reset. Waits while the server is full. Raises ServerError, BadInput."""
        # Servers may name folders after an episode, so no two have the same id.
        arguments = {"episode_id": uuid.uuid4().hex, **arguments}
        full = ""
        while not full or seconds_left(until) > 0:
            try:
                session = Session(self.url, until)
                return session, session.ask("reset", arguments, until)
            except ServerError as error:
                if error.code == FULL:
                    full = str(error)
                elif error.code != LATE or not full:
                    raise
            self.close_an_idle_session()
            # The server needs a moment to close it.
            time.sleep(PAUSE_SECONDS)
        raise ServerError(full, FULL)

    def keep(self, session: Session) -> None:
        """The session is idle from now on, and may be closed for another episode."""
        with self.lock:
            self.idle[session] = None
            too_many = len(self.idle) > MOST_IDLE
        if too_many:
            self.close_an_idle_session()

    def take(self, session: Session) -> bool:
        """Whether the session is still there. It is no longer idle."""
        with self.lock:
            if session not in self.idle:
                return False
            del self.idle[session]
            return True

    def close_an_idle_session(self) -> None:
        """Close the one that has been idle for the longest time, if there is any."""
        with self.lock:
            if not self.idle:
                return
            session = next(iter(self.idle))
            del self.idle[session]
        session.close()


@functools.cache
def server_at(url: str) -> Server:
    """The server of this process for a URL."""
    return Server(url)


# --dataset


def problems(spec: str, split: str, flag: str = "--dataset") -> list[dict[str, Any]]:
    """Rows whose prompts are the first observations of resets, each with the seed of its reset. Raises BadInput."""
    parsed = parse(spec, flag)
    server = server_at(parsed.url)
    first_seed = SEEDS[split]
    count = parsed.prompts if split == "train" else HELD_OUT

    def draw(seed: int) -> dict[str, Any]:
        try:
            session, answer = server.begin({"seed": seed}, time.monotonic() + RESET_SECONDS)
        except (ServerError, BadInput) as error:
            raise BadInput(f"{flag} {spec}: reset with the seed {seed}: {error}") from None
        session.close()
        text = text_of(answer.observation)
        if not text.strip():
            raise BadInput(f"{flag} {spec}: reset with the seed {seed} shows no text; take the prompts from a file")
        return {"prompt": text, "reset": {"seed": seed}, "from_reset": True}

    with ThreadPoolExecutor(DRAWN_AT_ONCE) as threads:
        return list(threads.map(draw, range(first_seed, first_seed + count)))
