"""SGLang's servers, played by a fake one that answers what a real one has answered."""

import copy
import json
import multiprocessing
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from conftest import ROOT, save_model
from fake_sglang import REPLIES, SAMPLING_FIELDS, FakeSGLang
from safetensors.torch import load_file
from workers import sglang_worker

from common.data import arithmetic
from common.errors import BadInput, RunFailed
from common.placement import Layout
from common.rollout.servers import client, sglang_api, weights
from common.rollout.servers.engine import ServerEngine
from common.rollout.vllm_engine import EngineConfig, sampling_settings
from common.weight_sync import TensorInfo

MODEL = str(arithmetic.WARM_START)
PROMPT = [6, 8, 13, 4, 4, 17]  # of the recorded replies
STOPPED = REPLIES["stopped"]["reply"]


class Weights:
    """Stands for FullParameters: the tensors of the model's file, times a factor."""

    def __init__(self, factor: float = 1.0):
        self.tensors = {name: tensor * factor for name, tensor in load_file(f"{MODEL}/model.safetensors").items()}

    def metadata(self) -> list[TensorInfo]:
        return [TensorInfo(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in self.tensors.items()]

    def __iter__(self):
        yield from self.tensors.items()


@pytest.fixture(autouse=True)
def no_health_checks(monkeypatch):
    """A request has them beside it if it takes seconds, as on a busy machine, and `routes` would show them."""
    monkeypatch.setattr(client, "HEALTH_EVERY_SECONDS", 600.0)


@pytest.fixture
def server():
    with FakeSGLang(MODEL) as running:
        yield running


@pytest.fixture
def connect(world):
    def make(*servers: FakeSGLang, updates: str = "none") -> ServerEngine:
        layout = Layout("split", rollout_urls=tuple(f"{server.url}/" for server in servers), inflight_updates=updates)
        config = EngineConfig(
            backend="sglang",
            model_path=MODEL,
            dtype=torch.float32,
            tensor_parallel=1,
            layout=layout,
            max_model_len=64,
            max_num_seqs=8,
        )
        return ServerEngine(config, [1], world)

    return make


def generate(engine: ServerEngine, n: int = 1, **given):
    return engine.generate([PROMPT], n=n, temperature=1.0, max_tokens=60, seed=0, **given)


def routes(server: FakeSGLang) -> list[str]:
    return [path for path, _ in server.asked]


@pytest.mark.parametrize("n", [1, 3])
def test_a_rollout_has_what_the_server_sampled(connect, server, n):
    engine = connect(server)
    engine.load_weights(Weights())
    rollout = generate(engine, n)
    tokens = STOPPED["output_ids"]
    assert rollout.response_ids == [tokens] * n and tokens[-1] == 1
    reported = torch.tensor([logprob for logprob, _, _ in STOPPED["meta_info"]["output_token_logprobs"]])
    assert torch.equal(rollout.rollout_logprobs, reported.expand(n, -1))
    assert not rollout.truncated.any() and (rollout.weight_versions == 1).all()
    server.answer = "one"
    server.replies["one"]["reply"]["meta_info"]["weight_versions"][0]["version"] = "1"
    assert generate(engine).truncated.tolist() == [True]


def test_it_is_asked_for_the_policy_and_for_nothing_else(connect, server):
    """The model's folder may have defaults for sampling, which are another policy. A seed would be ignored."""
    engine = connect(server)
    engine.never = (4,)
    engine.load_weights(Weights())
    generate(engine, n=2)
    path, body = server.asked[-1]
    assert path == "/generate" and body.pop("input_ids") == PROMPT and body.pop("return_logprob") is True
    sampling = body.pop("sampling_params")
    assert not body and sampling == {
        "n": 2,
        "temperature": 1.0,
        "max_new_tokens": 60,
        "stop_token_ids": [1],
        "skip_special_tokens": False,
        "top_p": 1.0,
        "top_k": -1,
        "min_p": 0.0,
        "frequency_penalty": 0.0,
        "presence_penalty": 0.0,
        "repetition_penalty": 1.0,
        "logit_bias": {"4": -100.0},
    }


def test_each_turn_of_an_episode_is_a_request_with_all_before_it(connect, server):
    engine = connect(server)
    engine.load_weights(Weights())
    observation = [7, 7]
    reply = lambda index, turns: observation if len(turns.starts) == 1 else None
    rollout = generate(engine, reply=reply)
    _, second = [body for path, body in server.asked if path == "/generate"]
    tokens = STOPPED["output_ids"]
    assert second["input_ids"] == PROMPT + tokens + observation
    assert second["sampling_params"]["max_new_tokens"] == 60 - len(tokens + observation)
    assert rollout.response_ids == [tokens + observation + tokens]
    assert rollout.response_mask.int().tolist() == [[1] * len(tokens) + [0, 0] + [1] * len(tokens)]


@pytest.mark.parametrize("updates", ["none", "recompute"])
def test_a_push_pauses_the_server_and_compares_what_arrived(connect, server, updates):
    """Also without responses under way: a request of /health would keep the cache from being emptied."""
    engine = connect(server, updates=updates)
    server.asked.clear()
    engine.load_weights(Weights(2.0))
    assert routes(server) == [
        "/pause_generation",
        "/update_weights_from_disk",
        "/model_info",
        "/continue_generation",
    ]
    assert server.version == "1" and not server.is_paused
    wanted = Weights(2.0).tensors
    assert all(torch.equal(server.tensors[name], tensor) for name, tensor in wanted.items())
    (folder,) = [body["model_path"] for path, body in server.asked if path == "/update_weights_from_disk"]
    assert not (ROOT / folder).exists(), "the weights stay in memory"


def test_a_server_that_another_run_has_used_is_as_a_new_one(connect, server):
    """That run may have ended during an update, with responses under way. A new version ends them."""
    server.version, server.is_paused = "7", True
    engine = connect(server)
    assert server.version == "0" and not server.is_paused
    engine.load_weights(Weights())
    assert (generate(engine).weight_versions == 1).all()


def test_tokens_have_the_version_that_sampled_them(connect, server):
    """A response that was under way when the second weights came."""
    engine = connect(server, updates="recompute")
    engine.load_weights(Weights())
    server.answer = "amid retract"
    spans = server.replies["amid retract"]["reply"]["meta_info"]["weight_versions"]
    server.faults["/generate"] = lambda body: push_and_answer(engine, server, body)
    rollout = generate(engine)
    expected = [int(span["version"]) for span in spans for _ in range(span["start"], span["end"])]
    assert rollout.weight_versions.tolist() == [expected] and set(expected) == {1, 2}


def push_and_answer(engine: ServerEngine, server: FakeSGLang, body: dict):
    engine.weight_version = engine.served_version = 2  # what load_weights does in the trainer's thread
    return server.respond("/generate", body)


def reply_with(**changed) -> dict:
    """The recorded reply, with parts of its meta_info replaced."""
    reply = copy.deepcopy(STOPPED)
    reply["meta_info"] |= changed
    return reply


LOGPROBS = STOPPED["meta_info"]["output_token_logprobs"]
NO_RESPONSES = {
    "aborted": REPLIES["aborted"]["reply"],
    "one log-prob less": reply_with(output_token_logprobs=LOGPROBS[:-1]),
    "other tokens": reply_with(output_token_logprobs=[[value, token + 1, None] for value, token, _ in LOGPROBS]),
    "not a number": reply_with(output_token_logprobs=[[None, token, None] for _, token, _ in LOGPROBS]),
    "no versions": reply_with(weight_versions=[]),
    "versions of fewer tokens": reply_with(weight_versions=[{"version": "1", "start": 0, "end": 3}]),
    "a gap between versions": reply_with(weight_versions=[{"version": "1", "start": 1, "end": len(LOGPROBS)}]),
    "other weights": reply_with(weight_versions=[{"version": "5", "start": 0, "end": len(LOGPROBS)}]),
    "no tokens": {**reply_with(output_token_logprobs=[], weight_versions=[]), "output_ids": []},
    "two responses": [STOPPED, STOPPED],
    "an error": REPLIES["too long"]["reply"],
    "nothing": None,
}


@pytest.mark.parametrize("reply", NO_RESPONSES.values(), ids=NO_RESPONSES.keys())
def test_a_response_that_is_not_whole_ends_the_run(connect, server, reply):
    """Any of these would shift the rows that follow, or train on a value that is not a number."""
    engine = connect(server)
    engine.load_weights(Weights())
    server.faults["/generate"] = lambda body: (200, reply)
    with pytest.raises(RunFailed, match=f"{server.url} .*(unlike SGLang|version 5, not 1)"):
        generate(engine)


def test_what_the_server_refuses_is_quoted(connect, server):
    engine = connect(server)
    engine.load_weights(Weights())
    server.answer = "too long"
    with pytest.raises(RunFailed, match="longer than the model's context length") as failed:
        generate(engine)
    assert failed.value.code == "server-refused"


def test_a_server_that_dies_ends_the_run(connect, server):
    """Its owner has started it, so the run does not."""
    engine = connect(server)
    engine.load_weights(Weights())
    server.faults["/generate"] = server.die
    with pytest.raises(RunFailed, match=f"{server.url} is gone") as failed:
        generate(engine)
    assert failed.value.code == "server-gone"
    with pytest.raises(RunFailed, match=f"{server.url} is gone") as failed:
        engine.load_weights(Weights())
    assert failed.value.code == "server-gone"


def test_a_server_that_hangs_is_found(connect, server, monkeypatch):
    monkeypatch.setattr(client, "HEALTH_EVERY_SECONDS", 0.05)
    monkeypatch.setattr(sglang_api, "HEALTH_SECONDS", 0.1)
    engine = connect(server)
    server.faults = {"/generate": server.hang, "/health": server.hang}
    with pytest.raises(RunFailed, match=f"{server.url} does not answer"):
        generate(engine)
    server.faults |= {"/update_weights_from_disk": server.hang, "/model_info": server.hang}
    monkeypatch.setattr(sglang_api.Control, "health_seconds", 0.1)
    with pytest.raises(RunFailed, match=f"{server.url} does not answer"):
        engine.load_weights(Weights())
    assert routes(server)[-1] == "/continue_generation", "the server may belong to someone who wants it back"


def test_a_server_that_is_paused_for_long_is_not_taken_for_dead(connect, server, monkeypatch):
    """Its health is a token that it samples, and it samples none. A response is under way meanwhile."""
    monkeypatch.setattr(client, "HEALTH_EVERY_SECONDS", 0.02)
    monkeypatch.setattr(sglang_api, "HEALTH_SECONDS", 0.3)
    engine = connect(server, updates="recompute")
    engine.load_weights(Weights())
    pushed = threading.Event()

    def slow_update(body):
        time.sleep(2.0)  # several health checks
        return server.respond("/update_weights_from_disk", body)

    def answer_after_update(body):
        pushed.wait()
        return server.respond("/generate", body)

    server.faults = {"/update_weights_from_disk": slow_update, "/generate": answer_after_update}
    with ThreadPoolExecutor(1) as thread:
        response = thread.submit(generate, engine)
        time.sleep(0.1)
        engine.load_weights(Weights(2.0))
        pushed.set()
        assert (response.result().weight_versions == 2).all()


def test_an_update_after_which_old_keys_stay_ends_the_run(connect, server):
    """SGLang answers 400 although the weights have changed. What it samples then belongs to no weights."""
    engine = connect(server)
    recorded = REPLIES["update in_place"]
    assert recorded["status"] == 400
    server.faults["/update_weights_from_disk"] = lambda body: (recorded["status"], recorded["reply"])
    with pytest.raises(RunFailed, match="cache was not flushed") as failed:
        engine.load_weights(Weights())
    assert failed.value.code == "server-refused" and not server.is_paused


def test_a_server_that_keeps_its_version_has_not_taken_the_weights(connect, server):
    engine = connect(server)
    server.faults["/update_weights_from_disk"] = lambda body: (200, REPLIES["update"]["reply"])
    with pytest.raises(RunFailed, match=f"{server.url} has weights of version 0 after a push of 1") as failed:
        engine.load_weights(Weights())
    assert failed.value.code == "weight-version"


# Broadcasts, to servers that are not on this machine.


@pytest.fixture
def elsewhere(server, monkeypatch):
    """The fake server with a worker, which joins the trainer's group from a process of its own."""
    monkeypatch.setattr(sglang_api, "is_local", lambda url: False)
    monkeypatch.setattr(sglang_api, "address_for", lambda urls: "127.0.0.1")
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    worker = context.Process(target=sglang_worker.serve, args=(theirs,), daemon=True)
    worker.start()
    assert ours.poll(300) and ours.recv() == "ready"  # it has imported torch

    def ask(route: str):
        def answer(body):
            ours.send((route, body))
            if not ours.poll(60):
                return 500, {"message": "the worker does not answer"}
            for name, tensor in ours.recv().items():
                server.tensors[name] = tensor
            server.version = body.get("weight_version", server.version)
            return 200, {"success": True}

        return answer

    routes = ("/init_weights_update_group", "/update_weights_from_distributed", "/destroy_weights_update_group")
    server.faults |= {route: ask(route) for route in routes}
    server.worker = ask
    yield server
    worker.kill()
    worker.join()


def test_a_broadcast_brings_all_weights(connect, elsewhere, monkeypatch):
    """In parts, whose tensors have several data types: each begins where its own may begin."""
    monkeypatch.setattr(weights, "BROADCAST_BYTES", 300_000)
    engine = connect(elsewhere)
    sent = Weights(2.0)
    sent.tensors = {"odd": torch.arange(3, dtype=torch.uint8), **sent.tensors, "half": torch.ones(3).bfloat16()}
    elsewhere.asked.clear()
    engine.load_weights(sent)
    assert all(torch.equal(elsewhere.tensors[name], tensor) for name, tensor in sent.tensors.items())
    asked = routes(elsewhere)
    parts = asked.count("/update_weights_from_distributed")
    assert parts > 2 and asked == [
        "/init_weights_update_group",
        "/pause_generation",
        "/begin_weight_update",
        *["/update_weights_from_distributed"] * parts,
        "/end_weight_update",
        "/continue_generation",
        "/model_info",
    ]
    engine.load_weights(Weights(3.0))
    assert elsewhere.version == "2" and asked.count("/init_weights_update_group") == 1
    engine.shutdown()
    assert routes(elsewhere)[-1] == "/destroy_weights_update_group", "the next run joins a group of its own"


@pytest.mark.parametrize(
    "route", ["/init_weights_update_group", "/begin_weight_update", "/update_weights_from_distributed"]
)
def test_a_refused_broadcast_leaves_the_server_as_it_was(connect, elsewhere, monkeypatch, route):
    """Not paused, and without the session that would refuse the next run's weights. Nobody receives what is sent."""
    if route == "/init_weights_update_group":
        monkeypatch.setattr(sglang_api, "BROADCAST_SECONDS", 1.0)  # gloo waits so long for a worker
    engine = connect(elsewhere)
    refused = []

    def refuse(body):
        refused.append((time.monotonic(), body))
        return 400, {"success": False, "message": "no such thing"}

    elsewhere.faults[route] = refuse
    with pytest.raises(RunFailed, match=f"{elsewhere.url} refused {route} .*no such thing") as raised:
        engine.load_weights(Weights())
    assert raised.value.code == "server-refused"
    assert not elsewhere.is_paused and not elsewhere.is_open
    ((when, body),) = refused
    assert time.monotonic() < when + 20, "what nobody receives is not waited for"
    if route == "/update_weights_from_distributed":
        elsewhere.worker(route)(body)  # or gloo would wait for it when this process ends


def test_a_session_that_a_killed_run_has_left_open_is_closed(connect, elsewhere):
    elsewhere.is_open = elsewhere.is_paused = True
    connect(elsewhere).load_weights(Weights())
    assert elsewhere.version == "1"


def test_the_address_of_this_machine_is_one_that_the_server_reaches():
    assert sglang_api.address_for(["http://127.0.0.1:1", "http://localhost:2"]) == "127.0.0.1"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 1))
        assert sglang_api.address_for(["http://127.0.0.1:1", "http://192.0.2.1:2"]) == probe.getsockname()[0]


def check(server: FakeSGLang, model: str = MODEL, max_model_len: int = 112, dtype=torch.float32) -> None:
    sglang_api.check_servers((server.url,), model, max_model_len, dtype)


def test_a_server_that_fits_is_taken(server, capsys):
    check(server)
    assert "without seeds" in capsys.readouterr().out, "who wants to repeat the run is told"
    limit = server.replies["/server_info"]["reply"]["max_req_input_len"]
    check(server, max_model_len=limit)  # the longest prompt leaves room for a token
    with pytest.raises(BadInput, match=f"fewer than {limit} tokens.*up to {limit}.*--context-length"):
        check(server, max_model_len=limit + 1)


def test_a_server_that_does_not_fit_is_refused_before_anything_is_loaded(server, tmp_path):
    with pytest.raises(BadInput, match="float32 and the trainer bfloat16.*--dtype bfloat16"):
        check(server, dtype=torch.bfloat16)
    for replicas in ("dp_size", "pp_size"):
        server.replies["/server_info"]["reply"][replicas] = 2
        with pytest.raises(BadInput, match="--dp-size must be 1"):
            check(server)
        server.replies["/server_info"]["reply"][replicas] = 1
    config = arithmetic.config()
    config.vocab_size = 60
    with pytest.raises(BadInput, match="vocab_size is 52 there and 60"):
        check(server, save_model(tmp_path / "larger", config, 0.05))
    server.replies["/model_info"]["reply"] |= {"model_type": "llama"}
    with pytest.raises(BadInput, match="a llama, and --model a qwen2"):
        check(server)
    server.faults["/server_info"] = lambda body: (200, {"what": "another service"})
    with pytest.raises(BadInput, match=f"{server.url} answered /server_info unlike SGLang"):
        check(server)


def test_a_server_that_is_not_there_is_refused():
    with pytest.raises(BadInput, match="--rollout-urls: rollout server http://127.0.0.1:9 is gone"):
        sglang_api.check_servers(("http://127.0.0.1:9",), MODEL, 112, torch.float32)


def test_the_model_of_a_server_on_another_machine_is_known_by_its_family(server):
    """Its folder is not here, so its config cannot be compared."""
    server.replies["/model_info"]["reply"]["tokenizer_path"] = "/there/model"
    check(server)
    there = sglang_api.ModelInfo(model_type="qwen2", tokenizer_path="/there/model", weight_version="0")
    assert sglang_api.difference(MODEL, there) == ""
    there.model_type = "llama"
    assert "a llama" in sglang_api.difference(MODEL, there)


def test_the_requests_are_those_that_a_real_server_took():
    """It refuses an unknown setting (400), and takes any name beside them."""
    body = sglang_api.request_body(PROMPT, {**sampling_settings(0.0, 6, [1]), "n": 1}, seed=3)
    assert json.loads(json.dumps(body)) == body
    assert set(body["sampling_params"]) <= SAMPLING_FIELDS
    greedy = sglang_api.read_choices(json.dumps(REPLIES["greedy"]["reply"]).encode(), 1)
    assert greedy[0].token_ids == STOPPED["output_ids"][:6] and greedy[0].truncated
    two = sglang_api.read_choices(json.dumps(REPLIES["two"]["reply"]).encode(), 2)
    assert [len(choice.logprobs) for choice in two] == [6, 6]
    biased = sglang_api.read_choices(json.dumps(REPLIES["without token 5"]["reply"]).encode(), 1)
    assert 5 not in biased[0].token_ids


def test_responses_that_nobody_will_train_on_are_ended(server, connect):
    connect(server).abandon()
    assert server.asked[-1] == ("/abort_request", {"abort_all": True})
