"""The loss of a rollout server, played with fake servers: when a run restarts them, and what it repeats."""

import asyncio
import re
import resource
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT, launch
from safetensors.torch import load_file

from common.errors import RunFailed
from common.placement import Layout
from common.rollout.rollout import Response
from common.rollout.servers import client, engine, process, vllm_api, weights
from common.rollout.vllm_engine import EngineConfig
from common.weight_sync import TensorInfo

OWN = Layout("split", (1,))
TENSORS = {name: torch.full((4,), float(i)) for i, name in enumerate("abcd")}


class Weights:
    """Stands for FullParameters. Every tensor that is gathered is an event."""

    def __init__(self, events: list):
        self.events = events

    def metadata(self) -> list[TensorInfo]:
        return [TensorInfo(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in TENSORS.items()]

    def __iter__(self):
        for name, tensor in TENSORS.items():
            self.events.append(name)
            yield name, tensor


class Servers:
    """Records all events in order. losses: event -> (calls that still succeed, calls that fail after them)."""

    def __init__(self):
        self.events, self.losses, self.started, self.version = [], {}, 0, "0"

    def happen(self, event: str, code: str = "server-gone") -> None:
        self.events.append(event)
        wait, count = self.losses.get(event, (0, 0))
        if count:
            self.losses[event] = (wait - 1, count) if wait else (0, count - 1)
        if count and not wait:
            raise RunFailed(f"rollout server http://own{self.started} is gone: {event}", code=code)

    def start(self, config) -> list:
        self.started, self.version = self.started + 1, "0"
        self.events.append("start")
        return [Server(f"http://own{self.started}", self)]

    def control(self, urls: list[str], inflight_updates: str):
        control = Control(urls, inflight_updates)
        control.servers, control.got = self, {}
        self.urls, self.control_now = urls, control
        return control

    async def ask_all(self, requests: list, versions, done, follow, api, salted: bool) -> list:
        self.happen(f"ask {requests[0][0]}" if requests[0][0] == "http://theirs" else "ask")
        (version,) = versions()
        assert self.version == str(version), "the servers have other weights than the run believes"
        assert {url for url, _ in requests} == {self.urls[0]}, "a stopped server is asked"
        assert all(body["sampling_params"]["logit_bias"] == {4: -100.0} for _, body in requests), "never a placeholder"
        response = Response([7], [-0.5], False, [version])
        return [[response] * body["sampling_params"]["n"] for _, body in requests]


class Server:
    def __init__(self, url: str, all_of_them: Servers):
        self.url, self.servers = url, all_of_them

    def last_words(self) -> str:
        return "SomeError: out of everything"

    def stop(self) -> None:
        self.servers.events.append(f"stop {self.url}")


class Control(vllm_api.Control):
    """Every route is an event. A part of the weights is read at once, because the sender removes its file."""

    def check(self, used: bool) -> None:
        self.servers.happen("check used servers" if used else "check")

    def tell_each(self, route: str) -> None:
        self.servers.events.append(f"tell {route}")

    def request(self, method: str, path: str, bodies=None) -> list[bytes]:
        if path == vllm_api.EMPTY_CACHE:
            return []
        if path == "/finish_weight_update":
            self.servers.version = bodies["weight_version"]
        self.servers.happen(path.removeprefix("/"))
        if path == "/update_weights":
            self.got |= load_file(bodies["update_info"]["path"])
        return []


@pytest.fixture
def fake(monkeypatch) -> Servers:
    found = Servers()
    monkeypatch.setattr(process, "start", found.start)
    monkeypatch.setattr(vllm_api, "Control", found.control)
    sees_images = SimpleNamespace(vision_config={}, image_token_id=4)
    monkeypatch.setattr(engine.AutoConfig, "from_pretrained", lambda path: sees_images)
    monkeypatch.setattr(client, "ask_all", found.ask_all)
    monkeypatch.setattr(weights, "FILE_BYTES", TENSORS["a"].nbytes)  # a file for each tensor
    return found


def make(world, layout: Layout = OWN) -> engine.ServerEngine:
    config = EngineConfig(
        model_path="model", dtype=torch.float32, tensor_parallel=1, layout=layout, max_model_len=64, max_num_seqs=8
    )
    return engine.ServerEngine(config, [1], world)


def generate(made):
    return made.generate([[5], [6]], n=1, temperature=1.0, max_tokens=1, seed=0)


def test_lost_responses_are_asked_for_again_with_the_weights_they_had(world, fake, capfd):
    made = make(world)
    for _ in range(3):
        made.load_weights(Weights(fake.events))
    fake.events.clear()
    fake.losses["ask"] = (0, 1)
    batch = generate(made)
    sent = ["start_weight_update", *["update_weights"] * 4, "finish_weight_update"]
    assert [event for event in fake.events if event not in TENSORS] == (
        ["ask", "stop http://own1", "start", "check", *sent, "ask"]
    )
    assert all(torch.equal(fake.control_now.got[name], tensor) for name, tensor in TENSORS.items())
    assert batch.weight_versions.tolist() == [[3], [3]] and made.weight_version == 3
    said = re.findall(r"warning\[server-restarted\]: .*", capfd.readouterr().err)
    assert len(said) == 1 and "http://own1 is gone" in said[0] and "SomeError: out of everything" in said[0]
    made.load_weights(Weights(fake.events))
    assert generate(made).weight_versions.tolist() == [[4], [4]]


@pytest.mark.parametrize("episodes", [False, True], ids=["one turn", "episodes"])
def test_new_servers_are_asked_what_the_lost_ones_were(world, fake, monkeypatch, episodes):
    """The same prompts, seeds and limits, as if nothing had happened. An episode begins again from its first turn."""
    asked = []  # for each try, its requests without the address of the server
    reported = []

    async def ask_all(requests, versions, done, follow, api, salted):
        bodies = [body for _, body in requests]
        asked.append(bodies)
        answers = []
        for i, body in enumerate(bodies):
            responses = [Response([7, i], [-0.5, -0.25], False, [1, 1])] * body["sampling_params"]["n"]
            answers.append(responses)
            if done is not None:
                done(i, [response.token_ids for response in responses], [False] * len(responses))
            if follow is not None:
                follow(i, responses[0])
            if len(asked) == 1:  # the others are lost
                raise RunFailed("rollout server http://own1 is gone", code="server-gone")
        return answers

    monkeypatch.setattr(client, "ask_all", ask_all)
    made = make(world)
    made.load_weights(Weights(fake.events))
    reply = (lambda prompt, turns: None) if episodes else None
    note = lambda *given: reported.append(given)
    rollout = made.generate([[5], [6, 6]], n=2, temperature=0.7, max_tokens=9, seed=11, done=note, reply=reply)
    first, second = asked
    assert first == second and [body["token_ids"] for body in first] == (
        [[5], [5], [6, 6], [6, 6]] if episodes else [[5], [6, 6]]
    )
    for body in first:
        sampling = body["sampling_params"]
        assert (sampling["temperature"], sampling["max_tokens"], sampling["n"]) == (0.7, 9, 1 if episodes else 2)
    assert len({body["sampling_params"]["seed"] for body in first}) == len(first)
    assert rollout.response_ids == ([[7, 0], [7, 1], [7, 2], [7, 3]] if episodes else [[7, 0]] * 2 + [[7, 1]] * 2)
    if not episodes:
        assert [place for place, *_ in reported] == [0, 0, 1], "a reward grades what the new servers have sampled"


@pytest.mark.parametrize("event", ["ask", "start_weight_update", "finish_weight_update"])
def test_the_second_loss_ends_the_run(world, fake, event):
    made = make(world)
    made.load_weights(Weights(fake.events))
    fake.losses["ask"] = (0, 1)
    generate(made)
    fake.losses[event] = (0, 1)
    with pytest.raises(RunFailed, match="http://own2.*out of everything") as raised:
        made.load_weights(Weights(fake.events))
        generate(made)
    assert raised.value.code == "server-gone" and fake.started == 2


def test_a_loss_while_the_weights_are_sent_again_is_the_second(world, fake):
    made = make(world)
    made.load_weights(Weights(fake.events))
    fake.losses |= {"ask": (0, 1), "update_weights": (1, 1)}
    with pytest.raises(RunFailed, match="http://own2"):
        generate(made)
    assert fake.started == 2


def test_before_the_first_update_they_have_what_they_read(world, fake):
    made = make(world)
    fake.losses["ask"] = (0, 1)
    assert generate(made).weight_versions.tolist() == [[0], [0]]
    assert "start_weight_update" not in fake.events


def test_a_lost_update_is_sent_again_whole(world, fake):
    """The tensors are gathered to the end first, because the other ranks are in the midst of that."""
    made = make(world)
    made.load_weights(Weights(fake.events))
    fake.events.clear()
    fake.losses["update_weights"] = (1, 1)
    made.load_weights(Weights(fake.events))
    gathered = [event for event in fake.events if event in (*TENSORS, "start")]
    assert gathered == [*TENSORS, "start", *TENSORS]
    assert made.weight_version == 2 and fake.version == "2" and fake.control_now.got.keys() == TENSORS.keys()
    assert generate(made).weight_versions.tolist() == [[2], [2]]
    assert fake.events.count("finish_weight_update") == 1, "sent once more than needed"


def test_a_sender_over_nccl_is_made_anew(world, fake, monkeypatch):
    senders = []

    class Sender:
        model_update_group = None

        def __init__(self, source, control):
            senders.append(self)
            self.over = False

        def send_weights(self) -> None:
            for name, _ in self.source:
                if name == "b" and len(senders) == 1 and fake.events.count("a") == 2:
                    raise RunFailed("rollout server http://own1 is gone", code="server-gone")
            fake.version = fake.control_now.version

        def shutdown(self) -> None:
            self.over = True

    monkeypatch.setattr(vllm_api, "nccl_sender", Sender)
    made = make(replace(world, device=torch.device("cuda")))
    for _ in range(3):
        made.load_weights(Weights(fake.events))
    gathered = [event for event in fake.events if event in (*TENSORS, "start")]
    assert gathered == ["start", *TENSORS, *TENSORS, "start", *TENSORS, *TENSORS]
    assert [sender.over for sender in senders] == [True, False] and made.weight_version == 3


@pytest.mark.parametrize(
    "layout, message",
    [
        (Layout("split", rollout_urls=("http://theirs",)), "is gone: ask http://theirs$"),
        (replace(OWN, max_inflight_batches=2), "--max-inflight-batches > 1 servers are not restarted"),
    ],
)
def test_servers_that_are_not_restarted(world, fake, layout, message):
    made = make(world, layout)
    made.load_weights(Weights(fake.events))
    fake.losses |= {"ask": (0, 1), "ask http://theirs": (0, 1)}
    started = fake.started
    with pytest.raises(RunFailed, match=message) as raised:
        generate(made)
    assert raised.value.code == "server-gone" and fake.started == started


def test_servers_of_others_are_left_as_they_were(world, fake):
    made = make(world, Layout("split", rollout_urls=("http://theirs",)))
    assert fake.events == ["check used servers"]
    fake.losses["update_weights"] = (1, 1)
    fake.events.clear()
    with pytest.raises(RunFailed, match="is gone"):
        made.load_weights(Weights(fake.events))
    assert [event for event in fake.events if event not in TENSORS][-2:] == [
        "update_weights",
        "tell /finish_weight_update",
    ], "they would refuse the updates of the next run"
    assert fake.started == 0 and not any(event.startswith("stop") for event in fake.events)


def test_what_new_servers_do_not_mend_ends_the_run(world, fake, monkeypatch):
    made = make(world)

    async def refuse(requests, versions, done, follow, api, salted):
        raise RunFailed("rollout server http://own1 refused a request (400): too long", code="server-refused")

    monkeypatch.setattr(client, "ask_all", refuse)
    with pytest.raises(RunFailed, match="too long"):
        generate(made)
    assert fake.started == 1


@pytest.mark.parametrize("status, code", [(200, "server-refused"), (503, "server-gone"), (None, "server-gone")])
def test_an_error_of_a_dead_engine_is_a_loss(status, code):
    """The front end answers 500 to what was under way; only its health tells a bad request from a dead engine."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            if status:  # without a status it closes the connection
                self.send_response(status if self.path == "/health" else 404)
                self.end_headers()

        def do_POST(self):
            self.send_response(500)
            self.end_headers()

        def log_message(self, *args):
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        for request in (
            lambda: asyncio.run(client.ask_all([(url, {})], lambda: range(1), None, api=vllm_api)),
            lambda: vllm_api.Control([url]).request("POST", "/start_weight_update"),
        ):
            with pytest.raises(RunFailed) as raised:
                request()
            assert raised.value.code == code
        server.shutdown()


@pytest.mark.slow
def test_ranks_restart_together():
    """The loss is seen by the rank alone whose request it was."""
    result = launch(ROOT / "tests/workers/restart.py", ranks=2, engine=False)
    assert result.stdout.count("goes on with version 1 at http://own2") == 2, result.stdout
    assert result.stdout.count("ended: server-gone") == 2 and result.stderr.count("warning[server-restarted]") == 1


def test_weights_for_which_there_is_no_room_end_the_run_like_any_loss(world, fake, monkeypatch):
    """/dev/shm of a container has 64 MiB by default. What can be saved is saved."""

    def full(tensors, path) -> None:
        raise weights.SafetensorError("No space left on device")

    made, saved = make(world), []
    made.before_failing = lambda: saved.append("checkpoint")
    monkeypatch.setattr(weights, "save_file", full)
    with pytest.raises(RunFailed, match="no room for") as failed:
        made.load_weights(Weights(fake.events))
    assert failed.value.code == "disk-full" and saved == ["checkpoint"]


def test_a_run_may_open_a_connection_for_each_request(world, fake):
    """Steps in flight have hundreds of them, and the usual limit is 1024 files."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (512, before[1]))
        make(world)
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == min(before[1], 2**16)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
