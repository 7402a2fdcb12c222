"""Servers beside the trainer: they follow it, it learns, and what goes wrong is said once and leaves nothing behind."""

import asyncio
import contextlib
import dataclasses
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from types import SimpleNamespace
from unittest import mock

import httpx
import psutil
import pytest
import torch
from conftest import ARITHMETIC, CORES, ROOT, free_port, launch
from helpers import executable, gaps_of
from pydantic import TypeAdapter

from common.data import arithmetic
from common.data.prompts import PromptLoader, TrainSource, load
from common.data.tokenizer import load_tokenizer
from common.errors import BadInput, RunFailed
from common.placement import COLLECTIVE_TIMEOUT_SECONDS, TORCHRUN_VARIABLES, Layout
from common.preflight.folders import complete, step_of
from common.rollout import engines, vllm_engine
from common.rollout.servers import client, process, vllm_api, weights
from common.rollout.servers.vllm_api import Control
from common.rollout.servers.weights import cut
from common.rollout.vllm_engine import EngineConfig
from common.weight_sync import TensorInfo

GRPO = ROOT / "algos/grpo.py"
BEHIND = ROOT / "tests/workers/behind.py"
CORE = max(CORES)
SPLIT = ["--rollout-placement", "split", "--rollout-devices", CORE]
needs_two_cores = pytest.mark.skipif(len(CORES) < 2, reason="a server wants a core of its own")


def rows(run_dir) -> list[dict]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def marked(mark: str) -> list[int]:
    """Processes that inherited MARK from a run: it, its ranks, its servers and their engines."""
    found = []
    for running in psutil.process_iter():
        try:
            if running.environ().get("MARK") == mark and running.status() != psutil.STATUS_ZOMBIE:
                found.append(running.pid)
        except (psutil.AccessDenied, psutil.NoSuchProcess):
            continue
    return found


@pytest.fixture
def mark(monkeypatch):
    """Every process started in the test must be gone at its end."""
    name = str(uuid.uuid4())
    monkeypatch.setenv("MARK", name)
    yield name
    deadline = time.monotonic() + 60  # a server that is importing torch dies after that
    while marked(name) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert marked(name) == []


@needs_two_cores
@pytest.mark.slow
def test_it_goes_on_without_its_server_once_and_ends_with_it(started):
    """A server's engine is killed, and the run goes on with a new one. It ends when that one's front end is killed."""
    run, log, found = started(GRPO, "--prompts-per-step", 8, "--eval-prompts", 0)
    wait_for(lambda: len(found()) >= 2, run, log)
    engine_of(run).kill()
    wait_for(lambda: "warning[server-restarted]" in log.read_text(), run, log)
    seen = len(found())
    wait_for(lambda: len(found()) > seen, run, log)
    (server,) = filter(is_server, psutil.Process(run.pid).children())
    server.kill()  # its engine, which has its socket, must not seem to be the server
    assert run.wait(timeout=300) == 3
    said = re.findall(r"error\[.*", log.read_text())  # behind the progress bar
    assert len(said) == 1 and "rollout server http://127.0.0.1:" in said[0], log.read_text()[-2000:]
    assert "health checks" not in said[0], "it waited for the third of them, 27 s"
    assert len(re.findall(r"warning\[server-restarted\]", log.read_text())) == 1
    assert max(row["mismatch/logprob_abs_max"] for row in found()) <= 1e-4
    assert not any(row["mismatch/staleness"] for row in found())


@needs_two_cores
@pytest.mark.slow
def test_it_learns_from_older_weights_until_it_is_interrupted(started):
    """Each token's log-prob is that of the weights that its version names."""
    ahead = ["--max-inflight-batches", 2, "--tis-cap", 2, "--prompts-per-step", 32]
    run, log, found = started(BEHIND, *ahead, "--eval-every", 8, "--eval-prompts", 128)
    wait_for(lambda: len(found()) >= 9, run, log)
    run.send_signal(signal.SIGINT)
    assert run.wait(timeout=300) == 0 and "to go on: " in log.read_text(), log.read_text()[-2000:]
    gaps, mixed = compared(log)
    assert len(gaps) >= 8 and max(gaps) <= 1e-4 and mixed == 0, gaps
    rows = found()[:9]
    assert rows[8]["eval/accuracy"] > rows[0]["eval/accuracy"] + 0.05, rows
    assert [row["mismatch/staleness_max"] for row in rows[1:]] == [0] + [1] * 7
    assert rows[1]["mismatch/rounding_abs_mean"] <= 1e-6
    assert max(row.get("mismatch/rounding_abs_mean", 0.0) for row in rows[2:]) <= 1e-6  # some have stale tokens alone
    assert all(row["overlapped/rollout"] > 0 and "time/rollout" not in row for row in rows[1:])


@needs_two_cores
@pytest.mark.nightly
def test_a_run_with_batches_in_flight_is_killed_goes_on_and_ends_with_its_server(started):
    """It trains on each prompt once: what was in flight is sampled again, and the resumed run says how much that was.

    Updates come amid responses, and each token's log-prob is that of the weights that its version names.
    """
    flags = ["--max-inflight-batches", 4, "--inflight-updates", "recompute", "--tis-cap", 2, "--prompts-per-step", 16]
    flags += ["--eval-prompts", 0, "--save-every", 3, "--rollouts-every", 1]
    run, log, found = started(BEHIND, *flags)
    wait_for(lambda: len(found()) >= 5, run, log)
    run.kill()
    run.wait()
    run, log, found = started(BEHIND, *flags, "--resume", "auto")
    wait_for(lambda: "mismatch/staleness" in found()[-1] and found()[-1]["step"] >= 8, run, log)
    # An update meets responses that are being written if the engine is slower than the trainer, and a batch is three
    # pushes old if the trainer is. Which of them is slower depends on the machine, so each is held up once.
    with held_up(engine_of(run)):
        wait_for(lambda: compared(log)[1] > 0, run, log)
    with held_up(run):
        wait_for(lambda: any(row.get("mismatch/staleness_max") == 3 for row in found()), run, log)
    rows = found()
    first = next(row for row in rows if row["step"] % 3 == 1 and "sampling/prompts_again" in row)
    assert f"{first['sampling/prompts_again']:.0f} prompts had been drawn" in log.read_text()
    assert 0 < first["sampling/prompts_again"] <= 3 * 16 and first["mismatch/staleness_max"] == 0
    assert sum("sampling/prompts_again" in row for row in rows) == 1
    assert max(row["mismatch/staleness_max"] for row in rows) == 3
    gaps, mixed = compared(log)
    assert len(gaps) >= 4 and max(gaps) <= 1e-4 and mixed > 0, (gaps, mixed)
    trained = []
    for step in range(1, 9):
        lines = (log.parent / f"run/rollouts/step_{step:06d}.jsonl").read_text().splitlines()
        trained += dict.fromkeys(json.loads(line)["id"] for line in lines)
    tokenizer, _ = load_tokenizer(str(arithmetic.WARM_START))
    loader = PromptLoader(load("arithmetic", TrainSource(), "train", tokenizer, 64), 0)
    assert trained == [prompt.id for prompt in loader.take(8 * 16)]

    def stands_still_with_steps_to_rescue() -> bool:
        run.send_signal(signal.SIGSTOP)
        if found()[-1]["step"] % 3 == 1:
            return True
        run.send_signal(signal.SIGCONT)
        return False

    wait_for(stands_still_with_steps_to_rescue, run, log)
    engine_of(run).kill()
    run.send_signal(signal.SIGCONT)
    assert run.wait(timeout=300) == 3
    said = re.findall(r"error\[.*", log.read_text())
    assert len(said) == 1 and said[0].startswith("error[server-gone]"), log.read_text()[-2000:]
    assert re.search(r"saved after step \d+; to go on: ", log.read_text()), log.read_text()[-2000:]
    assert step_of(complete(log.parent / "run")[-1]) >= found()[-1]["step"], "the last steps are not saved"


def compared(log) -> tuple[list[float], int]:
    """What BEHIND printed: gaps to the weights that the versions name, and responses with tokens of several weights."""
    printed = log.read_text()
    return gaps_of(printed), sum(map(int, re.findall(r"\bmixed (\d+)", printed)))


@pytest.fixture
def started(tmp_path, mark):
    """Starts a script on a server, for more steps than the test waits for: its process, its log, and its metrics."""
    running = []

    def start(script, *flags):
        log, run_dir = tmp_path / "log", tmp_path / "run"
        command = [sys.executable, script, *SPLIT, *flags, "--steps", 1000, "--run-dir", run_dir]
        own = {name: value for name, value in os.environ.items() if name not in TORCHRUN_VARIABLES}
        with open(log, "w") as file:
            spread = lambda: os.sched_setaffinity(0, CORES)
            run = subprocess.Popen(list(map(str, command)), stdout=file, stderr=file, preexec_fn=spread, env=own)
        running.append(run)
        return run, log, lambda: rows(run_dir)

    yield start
    for run in running:
        run.kill()
        run.wait()


def is_server(child: psutil.Process) -> bool:
    try:
        return "common.rollout.servers.process" in child.cmdline()
    except psutil.ZombieProcess:  # the server that was replaced, if nobody has asked for its exit code yet
        return False


def engine_of(run: subprocess.Popen) -> psutil.Process:
    """The server's engine, which computes in its own process: a worker beside it would take 10 s more to start."""
    names = {process.name(): process for process in psutil.Process(run.pid).children(recursive=True)}
    assert not [name for name in names if "Worker" in name], names
    (engine,) = [process for name, process in names.items() if "EngineCor" in name]
    return engine


@contextlib.contextmanager
def held_up(process):
    """The process stands still for most of the time, so what it works with is faster."""
    done = threading.Event()

    def stop_and_go() -> None:
        while not done.is_set():
            process.send_signal(signal.SIGSTOP)
            done.wait(4)
            process.send_signal(signal.SIGCONT)
            done.wait(0.5)

    holding = threading.Thread(target=stop_and_go)
    holding.start()
    try:
        yield
    finally:
        done.set()
        holding.join()


def test_a_server_does_not_outlive_who_started_it(mark):
    """However that ends: its end of the server's standard input closes."""
    starter = (
        "import subprocess, sys, time\n"
        f"command = [sys.executable, '-m', 'common.rollout.servers.process', '{CORE}', '--model', 'none']\n"
        "subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)\n"
        "print('started', flush=True)\n"
        "time.sleep(60)\n"
    )
    with subprocess.Popen([sys.executable, "-c", starter], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as run:
        run.stdout.readline()
        time.sleep(2)  # it is importing vLLM
        assert len(marked(mark)) == 2
        run.kill()


def wait_for(condition, run: subprocess.Popen, log, seconds: float = 400) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        assert run.poll() is None, log.read_text()[-3000:]
        try:
            if condition():
                return
        except FileNotFoundError:
            pass
        time.sleep(0.2)
    raise AssertionError(f"nothing within {seconds} s: {log.read_text()[-3000:]}")


def test_a_server_that_is_not_there_is_named():
    control = Control(["http://127.0.0.1:9"])
    with pytest.raises(RunFailed, match="http://127.0.0.1:9"):
        control.check()


# Routes that make a used server as a new one.
FRESH = ("/update_weight_version", "/finish_weight_update", "/resume", "/reset_prefix_cache")
UPDATE = ("/start_weight_update", "/update_weights", "/finish_weight_update")
WEIGHTS = [("weight", torch.ones(2))]


class Scripted:
    """Answers by path."""

    def __init__(self, replies: dict):
        self.replies, self.asked = replies, []

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        self.asked.append((str(request.url), request.content))
        status, body = self.replies[request.url.path]
        given = {"content": body} if isinstance(body, bytes) else {"json": body}
        return httpx.Response(status, **given)


@pytest.fixture
def scripted(monkeypatch):
    def install(replies: dict) -> Scripted:
        transport = Scripted(replies)
        answer = httpx.MockTransport(transport.handle_request).handle_async_request
        monkeypatch.setattr(httpx.AsyncHTTPTransport, "handle_async_request", lambda self, request: answer(request))
        monkeypatch.setattr(client, "healthy", lambda url, route: True)
        return transport

    return install


def test_each_server_gets_its_own_nccl_ranks(scripted):
    paths = ("/get_world_size", "/init_weight_transfer_engine", *FRESH)
    transport = scripted(dict.fromkeys(paths, (200, {"world_size": 2})))
    control = Control(["http://a", "http://b"])
    control.check()
    assert control.workers == [2, 2]
    control.init_weight_transfer_engine({"rank_offset": 1, "world_size": 5})
    sent = {url: json.loads(body)["init_info"] for url, body in transport.asked if "init" in url}
    assert {url[7]: info["rank_offset"] for url, info in sent.items()} == {"a": 1, "b": 3}
    assert all(info["world_size"] == 5 for info in sent.values())


def test_responses_that_nobody_will_train_on_are_ended_on_every_server(scripted):
    transport = scripted({"/abort_requests": (200, {})})
    Control(["http://a", "http://b"]).abort()
    assert sorted(url for url, _ in transport.asked) == ["http://a/abort_requests", "http://b/abort_requests"]


def test_only_health_checks_in_a_row_take_a_server_for_dead(monkeypatch):
    """Two fail, the third succeeds, and so on: a server that is slow now and then."""
    asked = []

    async def answer(self, request: httpx.Request) -> httpx.Response:
        asked.append(request.url.path)
        return httpx.Response(200 if len(asked) % 3 == 0 else 503)

    monkeypatch.setattr(httpx.AsyncHTTPTransport, "handle_async_request", answer)
    monkeypatch.setattr(client, "HEALTH_EVERY_SECONDS", 0.001)

    async def until_asked(times: int) -> str:
        while len(asked) < times:
            await asyncio.sleep(0.001)
        return "response"

    watching = client.watched([client.watch("http://a/health", 1)], [until_asked(12)])
    assert asyncio.run(watching) == ["response"]


def test_an_update_ends_with_an_empty_prefix_cache(scripted):
    """The old weights computed its keys and values."""
    transport = scripted(dict.fromkeys(("/finish_weight_update", "/reset_prefix_cache"), (200, {})))
    control = Control(["http://a"], version="3")
    control.finish_weight_update()
    (finish, body), (reset, _) = transport.asked
    assert finish.endswith("/finish_weight_update") and json.loads(body) == {"weight_version": "3"}
    assert reset.endswith("/reset_prefix_cache?reset_running_requests=true")


# What vLLM 0.32 answers with status 500. With several workers their executor adds words of its own.
NO_UPDATE = "Call to collective_rpc method failed: finish_weight_update called without a matching start_weight_update."
NO_TRANSFER = (
    "Call to collective_rpc method failed: Worker failed with error 'Weight transfer not configured. Please set "
    "weight_transfer_config to enable weight transfer.', please check the stack trace above for the root cause"
)


@pytest.mark.parametrize("reply", [(200, {}), (500, {"error": {"message": NO_UPDATE}})], ids=["open update", "none"])
def test_a_server_that_another_run_has_used_is_as_a_new_one(scripted, reply):
    """That run may have ended during an update, and its cache has keys and values of other weights."""
    replies = dict.fromkeys(FRESH, (200, {})) | {"/get_world_size": (200, {"world_size": 1})}
    transport = scripted(replies | {"/finish_weight_update": reply})
    Control(["http://a", "http://b"]).check()
    for url in ("http://a/", "http://b/"):
        asked = [each.removeprefix(url) for each, _ in transport.asked if each.startswith(url)]
        assert asked.index("finish_weight_update") < asked.index("resume")
        assert "reset_prefix_cache?reset_running_requests=true" in asked
    assert not any(body for url, body in transport.asked if url.endswith("finish_weight_update")), "it names no version"


def test_a_new_server_is_not_asked_for_an_error(scripted):
    """It would print it, and last_words() would take it for the cause of a later end."""
    transport = scripted(dict.fromkeys(FRESH, (200, {})) | {"/get_world_size": (200, {"world_size": 1})})
    Control(["http://a"]).check(used=False)
    assert "http://a/finish_weight_update" not in [url for url, _ in transport.asked]


@pytest.mark.parametrize(
    "said, shown",
    [
        (NO_TRANSFER, "http://b takes no weights: start it with scripts/serve_rollout.sh, or with --weight-transfer"),
        ("Call to collective_rpc method failed: out of luck", "http://b refused /finish_weight_update .*out of luck"),
    ],
)
def test_a_server_that_takes_no_weights_says_so_at_once(monkeypatch, said, shown):
    """Over NCCL the trainer would wait for it for 300 s, and then blame another rank."""
    asked = []

    async def answer(self, request: httpx.Request) -> httpx.Response:
        asked.append(request.url.path)
        if request.url.path != "/finish_weight_update":
            return httpx.Response(200, json={})
        said_here = said if request.url.host == "b" else NO_UPDATE
        return httpx.Response(500, json={"error": {"message": said_here}})

    monkeypatch.setattr(httpx.AsyncHTTPTransport, "handle_async_request", answer)
    monkeypatch.setattr(client, "healthy", lambda url, route: True)
    with pytest.raises(RunFailed, match=shown) as failed:
        Control(["http://a", "http://b"]).check()
    assert failed.value.code == "server-refused" and "/resume" not in asked


def server_info(**changes) -> dict:
    """What vLLM 0.32 says about itself, of the fields that are read."""
    model = {"dtype": "torch.bfloat16", "max_model_len": 112, "logprobs_mode": "processed_logprobs", "seed": 0}
    transfer = {"backend": "nccl" if torch.cuda.is_available() else "shared_memory"}
    model |= {name: value for name, value in changes.items() if name in model}
    settings = {"model_config": model, "weight_transfer_config": changes.get("transfer", transfer)}
    return {"vllm_config": settings, "vllm_env": {}, "system_env": {}}


def check_served(urls: tuple[str, ...] = ("http://a/",)) -> None:
    engines.check_servers("vllm", "model", 112, torch.bfloat16, Layout("split", rollout_urls=urls))


def test_a_server_that_samples_as_the_trainer_computes_is_taken(scripted):
    transport = scripted({"/server_info": (200, server_info())})
    check_served(("http://a/", "http://b"))
    assert {url for url, _ in transport.asked} == {
        "http://a/server_info?config_format=json",
        "http://b/server_info?config_format=json",
    }
    check_served(())  # the run starts its own
    scripted({"/server_info": (200, server_info(max_model_len=4096))})
    check_served()


@pytest.mark.parametrize(
    "change, flag",
    [
        ({"logprobs_mode": "raw_logprobs"}, "--logprobs-mode processed_logprobs"),
        ({"dtype": "torch.float16"}, "--dtype bfloat16"),
        ({"max_model_len": 111}, "--max-model-len 112"),
        ({"transfer": None}, "--weight-transfer-config"),
        ({"transfer": {"backend": "ipc"}}, "--weight-transfer-config"),
    ],
)
def test_a_server_with_other_settings_is_refused_before_anything_is_loaded(scripted, change, flag):
    """With vLLM's default logprobs_mode the rollout's log-probs would be wrong at every temperature but 1."""
    scripted({"/server_info": (200, server_info(**change))})
    with pytest.raises(BadInput, match=f"--rollout-urls http://a: .*{flag}"):
        check_served()


def test_vllm_has_the_settings_that_its_servers_are_asked_for(models):
    from vllm.config import ModelConfig, VllmConfig, WeightTransferConfig
    from vllm.engine.arg_utils import EngineArgs

    config = EngineArgs(model=models["tied"], skip_tokenizer_init=True, max_model_len=64).create_model_config()
    shown = TypeAdapter(ModelConfig).dump_python(config, mode="json", fallback=str)  # as /server_info
    read = vllm_api.ModelConfig.model_validate_json(json.dumps(shown), strict=True)
    assert read.dtype.startswith("torch.") and read.max_model_len == 64 and read.logprobs_mode == "raw_logprobs"
    for ours, theirs in ((vllm_api.VllmConfig, VllmConfig), (vllm_api.WeightTransferConfig, WeightTransferConfig)):
        names = {field.alias or name for name, field in ours.model_fields.items()}
        assert names <= {field.name for field in dataclasses.fields(theirs)}


@pytest.mark.parametrize("reply, shown", [((404, {}), r"serve_rollout\.sh"), ((200, {}), "unlike vLLM")])
def test_a_server_that_says_nothing_of_itself_is_refused(scripted, reply, shown):
    """It has this route if it has those for weights."""
    scripted({"/server_info": reply})
    with pytest.raises(BadInput, match=f"--rollout-urls: .*http://a .*{shown}"):
        check_served()


@pytest.mark.parametrize("updates", ["recompute", "keep"])
def test_an_update_amid_responses_stops_them_between_two_tokens(scripted, updates):
    """They go on afterwards. With `keep` nothing that they have computed is thrown away."""
    paths = ("/pause", "/resume", *UPDATE, "/reset_prefix_cache")
    transport = scripted(dict.fromkeys(paths, (200, {})))
    Control(["http://a"], updates).send(WEIGHTS, 3, torch.device("cpu"))
    asked = [url.removeprefix("http://a/") for url, _ in transport.asked]
    update = [path.removeprefix("/") for path in UPDATE]
    reset = [] if updates == "keep" else ["reset_prefix_cache?reset_running_requests=true"]
    assert asked == ["pause?mode=keep&clear_cache=false", *update, *reset, "resume"]


def test_a_server_goes_on_although_another_one_is_lost_when_they_are_to_resume(monkeypatch):
    """The first error cancels the requests to all others."""
    asked = []

    async def at_once(self, request):
        if request.url.path == "/resume":
            if request.url.host == "a":
                raise httpx.ConnectError("refused")
            await asyncio.sleep(5)  # it is cancelled
        return httpx.Response(200, json={})

    monkeypatch.setattr(httpx.AsyncHTTPTransport, "handle_async_request", at_once)
    monkeypatch.setattr(httpx, "post", lambda url, **given: asked.append(url))
    monkeypatch.setattr(client, "healthy", lambda url, route: True)
    with pytest.raises(RunFailed, match="http://a"), Control(["http://a", "http://b"]).paused("/pause", "/resume"):
        pass
    assert "http://b/resume" in asked


@pytest.mark.parametrize("lost_in", ["/pause", "an update"])
def test_after_a_failed_update_each_server_goes_on_that_is_there(lost_in, monkeypatch):
    """The first has been lost, and its error is the one that is told. The second may belong to the user."""
    asked = []

    def answer(request: httpx.Request) -> httpx.Response:
        if request.url.host == "a":
            raise httpx.ConnectError("refused")
        asked.append(request.url.path)
        return httpx.Response(200, json={})

    http = httpx.Client(transport=httpx.MockTransport(answer))
    monkeypatch.setattr(httpx, "post", lambda url, **given: http.post(url))
    monkeypatch.setattr(client, "healthy", lambda url, route: True)

    async def at_once(self, request):
        if request.url.path == "/pause" and lost_in != "/pause":
            return httpx.Response(200, json={})
        return answer(request)

    monkeypatch.setattr(httpx.AsyncHTTPTransport, "handle_async_request", at_once)
    with pytest.raises(RunFailed, match="http://a"):
        Control(["http://a", "http://b"], "recompute").send(WEIGHTS, 3, torch.device("cpu"))
    if lost_in == "/pause":
        assert "/finish_weight_update" not in asked
    else:
        assert asked[-2] == "/finish_weight_update", "the server would refuse every later update"
    assert asked[-1] == "/resume"


class Group:
    """A group over NCCL that has lost a server: a broadcast does not end until the group is aborted."""

    def __init__(self):
        self.aborted = threading.Event()
        self.broadcasts = 0

    def broadcast(self, tensor: torch.Tensor) -> None:
        assert not self.aborted.is_set(), "NCCL may have freed it"
        self.broadcasts += 1
        if not self.aborted.wait(30):
            raise AssertionError("the trainer waits for the server")

    def destroy(self) -> None:
        self.aborted.set()


@pytest.fixture
def over_nccl(monkeypatch, scripted):
    """A Control with vLLM's own sender, whose group is played, and the seconds that requests for weights may take."""
    import vllm.distributed.weight_transfer.nccl_engine as nccl

    def produce(iterator, group: Group, **settings) -> None:
        for _, tensor in iterator:
            group.broadcast(tensor)

    def make_sender(source, control):
        sender = nccl.NCCLTrainerWeightTransferEngine(client=control, source=source)
        control.group = sender.model_update_group = Group()
        return sender

    monkeypatch.setattr(nccl, "packed_nccl_broadcast_producer", produce)
    monkeypatch.setattr(vllm_api, "nccl_sender", make_sender)
    monkeypatch.setattr(httpx, "post", lambda url, **given: None)
    patience, timeout = {}, httpx.Timeout

    def note(seconds: float, **given) -> httpx.Timeout:
        patience[len(patience)] = seconds
        return timeout(seconds, **given)

    monkeypatch.setattr(httpx, "Timeout", note)
    scripted({"/start_weight_update": (200, {}), "/update_weights": (500, {"error": "it has lost its engine"})})
    return Control(["http://a"]), patience


class Source:
    """Stands for SingleIteration."""

    def __init__(self):
        self.pairs = iter([("a", torch.ones(2)), ("b", torch.ones(2))])

    def metadata(self) -> list[TensorInfo]:
        return [TensorInfo(name, torch.float32, (2,)) for name in "ab"]

    def __iter__(self):
        return self.pairs


def test_a_server_that_is_lost_in_a_broadcast_does_not_keep_the_trainer_waiting(over_nccl):
    control, patience = over_nccl
    source = Source()
    with pytest.raises(RunFailed, match="http://a refused /update_weights .*lost its engine"):
        control.send(source, 1, torch.device("cuda"))
    group = control.group
    assert group.aborted.is_set() and group.broadcasts <= 1
    assert list(patience.values()) == [client.UPDATE_SECONDS, COLLECTIVE_TIMEOUT_SECONDS]
    assert len(list(source)) in (0, 1, 2), "the trainer gathers what is left"


def test_two_threads_that_end_a_broadcast_end_its_group_once(over_nccl, monkeypatch):
    """As both do if the request and the broadcast fail at the same time."""
    control, _ = over_nccl
    ended = []

    def destroy(self) -> None:
        if not self.aborted.is_set():
            ended.append(self)
            time.sleep(0.2)  # vLLM waits up to 5 seconds for NCCL
            self.aborted.set()

    monkeypatch.setattr(Group, "destroy", destroy)
    control.sender = vllm_api.nccl_sender(Source(), control)
    threads = [threading.Thread(target=control.abort_broadcast) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    control.drop()
    assert ended == [control.group]


def test_an_error_of_nccl_names_the_server_that_is_lost(over_nccl, monkeypatch):
    control, _ = over_nccl

    def fail(self, tensor) -> None:
        self.aborted.wait(30)
        raise RuntimeError("NCCL error: remote process exited or there was a network error")

    monkeypatch.setattr(Group, "broadcast", fail)
    with pytest.raises(RunFailed, match="http://a refused /update_weights"):
        control.send(Source(), 1, torch.device("cuda"))


@pytest.mark.parametrize("error", [RuntimeError("inconsistent tensor size"), ValueError("other shapes")], ids=str)
def test_an_error_of_the_trainer_amid_a_broadcast_stays_what_it_is(over_nccl, monkeypatch, error):
    control, _ = over_nccl
    told = []
    monkeypatch.setattr(httpx, "post", lambda url, **given: told.append(url))

    def fail(self, tensor) -> None:
        raise error

    monkeypatch.setattr(vllm_api, "LOSS_SECONDS", 0.1)
    ended = threading.Event()

    def request(self, method: str, route: str, *given, **named) -> list:
        if route == "/update_weights":  # ends with the broadcast
            self.group.aborted.wait(30)
            ended.set()
        return []

    monkeypatch.setattr(Control, "request", request)
    monkeypatch.setattr(Group, "broadcast", fail)
    with pytest.raises(type(error), match=str(error)):
        control.send(Source(), 1, torch.device("cuda"))
    assert ended.wait(10), "Python would wait for the request's thread before it exits"
    assert told == ["http://a/finish_weight_update"]


def test_a_run_that_ends_leaves_the_group_with_the_users_servers(monkeypatch):
    """Both ends hold its memory, and the next run makes another one."""
    asked = []
    monkeypatch.setattr(httpx, "post", lambda url, **given: asked.append(url))
    Control(["http://a"]).leave()
    assert asked == [], "without a GPU there is no group"
    sender = mock.Mock()
    Control(["http://a", "http://b"], sender=sender).leave()
    assert asked == [f"http://{host}/shutdown_weight_transfer_engine" for host in "ab"]
    sender.shutdown.assert_called_once_with()


def test_a_local_server_is_not_asked_through_the_proxy_of_a_remote_one(monkeypatch):
    for name in ("HTTP_PROXY", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")  # nothing listens there
        monkeypatch.delenv(name.lower(), raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.delenv("no_proxy", raising=False)

    async def ask(urls: list[str], url: str) -> int:
        async with client.connect(urls) as http:
            return (await http.get(url)).status_code

    async def answer(reader, writer) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
        writer.close()

    async def play() -> None:
        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        local = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        assert await ask([local], local) == 200
        assert await ask([local, "http://[::1]:7", "http://remote.invalid"], local) == 200
        with pytest.raises(httpx.ConnectError) as failed:
            await ask([local, "http://remote.invalid"], "http://remote.invalid")
        assert "All connection attempts failed" in str(failed.value), "the proxy finds its address"

    asyncio.run(play())


@pytest.fixture
def starting(monkeypatch):
    """process.start() with processes that only sleep."""
    popen = subprocess.Popen
    sleep = lambda command, **given: popen(["sleep", "60"], **given)
    monkeypatch.setattr(process.subprocess, "Popen", sleep)
    monkeypatch.setattr(process.Server, "wait_until_ready", lambda self, deadline: None)
    monkeypatch.setattr(process, "command", lambda config, port: [])
    config = SimpleNamespace(layout=Layout("split", (CORE,)), tensor_parallel=1)
    servers = process.start(config)
    yield servers
    for server in servers:
        server.stop()


def test_no_other_run_takes_the_port_of_a_server_that_is_starting(starting):
    """That server would seem to be ours. Ours listens beside the socket that holds its port."""
    (server,) = starting
    port = httpx.URL(server.url).port
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind(("127.0.0.1", port))
    with socket.socket() as own:
        own.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as vLLM
        own.bind(("127.0.0.1", port))
        own.listen()
        with socket.create_connection(("127.0.0.1", port), timeout=5):
            own.accept()[0].close()
    server.stop()
    server.stop()
    assert server.port.fileno() == -1, "it is free again"


def test_the_last_words_of_a_server_that_has_said_much(starting):
    (server,) = starting
    server.log.write(b"OldError: before\n" + b"a step\n" * 2**18)
    server.log.write(b"ValueError: the cause\nRuntimeError: what follows from it\n")
    server.log.flush()
    assert server.last_words() == "ValueError: the cause"


def test_weights_of_a_run_that_was_killed_are_removed(tmp_path):
    """They would fill the machine's memory. Those of living runs stay, also of runs in another container."""
    ended = subprocess.Popen(["true"])
    ended.wait()
    left, used, living, foreign = (
        tmp_path / f"weights-{ended.pid}-left",
        tmp_path / f"weights-{ended.pid}-used",
        tmp_path / f"weights-{os.getpid()}-living",
        tmp_path / "weights-of-mine",
    )
    for folder in (left, used, living, foreign):
        folder.mkdir()
        (folder / "part.safetensors").write_bytes(b"weights")
    (tmp_path / f"weights-{ended.pid}-link").symlink_to(foreign)
    with weights.locked(used):
        weights.remove_left_behind(tmp_path)
    assert not left.exists()
    assert all((folder / "part.safetensors").exists() for folder in (used, living, foreign))


def test_weights_lie_in_a_folder_that_names_its_process(tmp_path, monkeypatch):
    monkeypatch.setattr(weights.os, "access", lambda *given: False)  # a container without /dev/shm
    monkeypatch.setattr(weights.tempfile, "gettempdir", lambda: str(tmp_path))
    with weights.shared_folder() as folder:
        name = weights.FOLDER.fullmatch(os.path.basename(folder))
        assert int(name[1]) == os.getpid()
        with pytest.raises(BlockingIOError), weights.locked(folder):
            pass
    assert list(tmp_path.iterdir()) == []


def test_a_server_without_the_routes_is_explained(scripted):
    scripted({"/update_weight_version": (404, {})})
    with pytest.raises(RunFailed, match=r"http://a refused .*serve_rollout\.sh"):
        Control(["http://a"]).check()


def good_reply() -> dict:
    content = [{"token_id": 7, "logprob": -0.5}, {"token_id": 1, "logprob": -0.1}]
    choice = {"token_ids": [7, 1], "logprobs": {"content": content}, "finish_reason": "stop"}
    spans = [{"version": "2", "start": 0, "end": 2}]
    return {"choices": [{**choice, "index": i, "weight_versions": spans} for i in (1, 0)]}


@pytest.fixture
def ask_one(monkeypatch):
    """The responses to one request for n responses, from a server that answers with given bytes.

    It has weights of version 2. With `updates` so many updates come while the request is under way.
    """

    def ask(reply: bytes, n: int, told: list | None = None, updates: int = 0) -> list:
        told = [] if told is None else told
        transport = httpx.MockTransport(lambda request: httpx.Response(200, content=reply))
        monkeypatch.setattr(httpx.AsyncHTTPTransport, "handle_async_request", transport.handle_async_request)
        done = lambda *given: told.append(given)
        versions = iter([range(2, 3), range(2 + updates, 3 + updates)])
        request = ("http://a", {"sampling_params": {"n": n, "stop_token_ids": [9]}})
        return asyncio.run(client.ask_all([request], lambda: next(versions), done, api=vllm_api))[0]

    return ask


def test_with_a_kept_cache_a_request_reads_no_prompt_that_older_weights_have_computed(monkeypatch):
    """vLLM shares the cache of requests with equal salts. During an update nobody knows which weights will compute."""
    salts = []

    def answer(request: httpx.Request) -> httpx.Response:
        salts.append(json.loads(request.content)["cache_salt"])
        return httpx.Response(200, json=good_reply())

    transport = httpx.MockTransport(answer)
    monkeypatch.setattr(httpx.AsyncHTTPTransport, "handle_async_request", transport.handle_async_request)
    requests = [("http://a", {"sampling_params": {"n": 2, "stop_token_ids": [9]}})]
    for versions in (range(2, 3), range(2, 4), range(2, 3)):
        asyncio.run(client.ask_all(requests, lambda now=versions: now, None, api=vllm_api, salted=True))
    assert salts[0] == salts[2] != salts[1]


def test_a_connection_that_was_idle_is_not_used_again(monkeypatch):
    """Between two turns of an episode a server may close it, and the request that was on its way would be lost."""
    monkeypatch.setattr(client, "HEALTH_EVERY_SECONDS", 60.0)  # a health check would be a connection, too
    reply = good_reply()
    del reply["choices"][1]
    reply["choices"][0]["index"] = 0
    body, connections = json.dumps(reply).encode(), []

    async def serve(reader, writer):
        connections.append([])
        with contextlib.suppress(asyncio.IncompleteReadError):  # the client closes the connection
            while head := await reader.readuntil(b"\r\n\r\n"):
                now = time.monotonic()
                if connections[-1] and now - connections[-1][-1] > 1.5:  # this server closes what is idle for longer
                    break
                await reader.readexactly(int(re.search(rb"content-length: (\d+)", head.lower())[1]))
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))
                connections[-1].append(now)
        writer.close()

    async def play():
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        turns = []

        def follow(i, response):
            turns.append(response)
            time.sleep(1.7)  # the environment answers
            return {"sampling_params": {"n": 1, "stop_token_ids": [9]}} if len(turns) < 2 else None

        request = (url, {"sampling_params": {"n": 1, "stop_token_ids": [9]}})
        return await client.ask_all([request], lambda: range(2, 3), None, follow, api=vllm_api)

    ((response,),) = asyncio.run(play())
    assert response.token_ids == [7, 1] and list(map(len, connections)) == [1, 1]


def test_responses_come_in_order_and_whole(ask_one):
    reply = good_reply()
    reply["choices"][0]["finish_reason"] = "length"  # this choice has index 1
    told = []
    found = ask_one(json.dumps(reply).encode(), 2, told)
    assert told == [(0, [[7, 1], [7, 1]], [False, True])], "a reward may grade them while others are sampled"
    assert [response.truncated for response in found] == [False, True]
    assert found[0].token_ids == [7, 1] and found[0].logprobs == [-0.5, -0.1]
    assert found[0].versions == [2, 2]


@pytest.mark.parametrize("stop_token_ids, truncated", [([1], False), ([7], True), ([], True)])
def test_a_response_that_ends_with_its_last_allowed_token_is_not_cut_off(stop_token_ids, truncated):
    """SGLang looks at the length first, and says that it is. vLLM and transformers look at the token."""
    choice = client.Choice([7, 1], [-0.5, -0.1], True, [client.VersionSpan(version="2", start=0, end=2)])
    assert client.to_response(choice, {"2": 2}, "http://a", stop_token_ids).truncated == truncated


@pytest.mark.parametrize(
    "message, is_about",
    [
        ("ValueError: No available memory for the cache blocks.", True),
        ("CUDA out of memory. Tried to allocate 2 GiB", True),
        ("Free memory on device (1/2 GiB) is less than desired", True),
        ("unknown backend shared_memory", False),
        ("/data/memory/model: no such folder", False),
    ],
)
def test_an_error_is_about_memory_if_it_says_so_and_not_by_a_name(message, is_about):
    assert vllm_engine.is_about_memory(message) == is_about


def test_each_token_has_the_version_of_its_weights(ask_one):
    """Two updates came while the responses were under way: one between their tokens, one before the second."""
    reply = good_reply()
    of_two = [{"version": "2", "start": 0, "end": 1}, {"version": "3", "start": 1, "end": 2}]
    reply["choices"][1]["weight_versions"] = of_two  # this choice has index 0
    reply["choices"][0]["weight_versions"] = [{"version": "4", "start": 0, "end": 2}]
    found = ask_one(json.dumps(reply).encode(), 2, updates=2)
    assert [response.versions for response in found] == [[2, 3], [4, 4]]
    with pytest.raises(RunFailed, match="version 4, not 2 or 3"):
        ask_one(json.dumps(reply).encode(), 2, updates=1)


@pytest.mark.parametrize(
    "change",
    [
        {"finish_reason": "abort"},
        {"token_ids": [7]},
        {"weight_versions": None},
        {"weight_versions": []},
        {"weight_versions": [{"version": "2", "start": 0, "end": 1}]},
        {"weight_versions": [{"version": "2", "start": 0, "end": 1}, {"version": "2", "start": 0, "end": 2}]},
        {"weight_versions": [{"version": "2", "start": 0, "end": 3}]},
        {"weight_versions": [{"version": "2"}]},
        {"logprobs": {"content": [{"token_id": 7, "logprob": -0.5}, {"token_id": 1, "logprob": -9999.0}]}},
        {"logprobs": {"content": [{"token_id": 7, "logprob": -0.5}, {"token_id": 1, "logprob": True}]}},
        {"token_ids": [7, -1]},
        {"token_ids": [7, "1"]},
    ],
)
def test_a_response_that_is_not_whole_ends_the_run(ask_one, change):
    """Any of these would shift the rows that follow, or train on a value that is not a number."""
    reply = good_reply()
    reply["choices"][0].update(change)
    with pytest.raises(RunFailed, match="http://a .*/inference/v1/generate"):
        ask_one(json.dumps(reply).encode(), 2)
    with pytest.raises(RunFailed, match="2 responses, 3"):
        ask_one(json.dumps(good_reply()).encode(), 3)


def test_responses_of_other_weights_end_the_run(ask_one):
    """Someone else has updated the server, or its owner has restarted it."""
    reply = good_reply()
    for choice in reply["choices"]:
        choice["weight_versions"][0]["version"] = "5"
    with pytest.raises(RunFailed, match="http://a .*5.*2") as failed:
        ask_one(json.dumps(reply).encode(), 2)
    assert failed.value.code == "weight-version"


NO_REPLIES = [
    b"",
    b"<html>",
    b"\xff",
    b"[]",
    b"{}",
    b"[" * 100_000,
    b'{"choices": 1}',
    b'{"choices": [1]}',
    b'{"choices": [{}]}',
    b'{"choices": [{"index": 0, "token_ids": 5, "logprobs": null}]}',
    b'{"choices": [], "choices": []}',
]


@pytest.mark.parametrize("reply", NO_REPLIES, ids=lambda reply: repr(reply[:40]))
def test_what_is_no_reply_is_one_line(scripted, ask_one, reply):
    """It may come from a proxy's page, another service at the port, or another version of vLLM."""
    with pytest.raises(RunFailed, match="http://a "):
        ask_one(reply, 1)
    scripted(dict.fromkeys(FRESH, (200, {})) | {"/get_world_size": (200, reply)})
    with pytest.raises(RunFailed, match="http://a .*/get_world_size"):
        Control(["http://a"]).check()


def test_weights_are_cut_into_parts_that_fit():
    tensors = [(name, torch.zeros(size)) for name, size in (("a", 10), ("b", 10), ("c", 30), ("d", 1))]
    assert [list(part) for part in cut(iter(tensors), 80)] == [["a", "b"], ["c"], ["d"]]


def test_a_server_that_hangs_is_found(monkeypatch):
    """It accepts connections and never answers: only its health, asked beside the requests, tells."""
    monkeypatch.setattr(client, "HEALTH_EVERY_SECONDS", 0.1)
    monkeypatch.setattr(vllm_api, "HEALTH_SECONDS", 0.2)
    monkeypatch.setattr(Control, "health_seconds", 0.2)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(RunFailed, match=url):
            asyncio.run(client.ask_all([(url, {})], lambda: range(1), None, api=vllm_api))
        # An update, too: the front end of an engine that has died may never answer.
        with pytest.raises(RunFailed, match=url):
            Control([url]).start_weight_update()


@pytest.mark.parametrize("cuda", [False, True])
def test_the_script_starts_servers_as_the_run_does(monkeypatch, models, cuda):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
    _, _, script = (ROOT / "scripts/serve_rollout.sh").read_text().partition("\nif has_gpu")
    on_a_gpu, _, script = script.partition("\nelse\n")
    on_a_cpu, _, everywhere = script.partition("\nfi\n")
    script = everywhere + (on_a_gpu if cuda else on_a_cpu)
    config = EngineConfig(
        model_path=models["tied"],
        dtype=torch.float32,
        tensor_parallel=1,
        layout=Layout("split"),
        max_model_len=64,
        max_num_seqs=8,
    )
    given = process.command(config, port=1)
    for flag in (
        "generation-config",
        "logprobs-mode",
        "weight-transfer-config",
        "skip-tokenizer-init",
        "enable-scale-out",
    ):
        assert f"--{flag}" in given and f"--{flag}" in script
    # On a CPU vLLM would cast the head for each token; Float32Head does what the flag says.
    assert ("--hf-overrides" in given) == ("--hf-overrides" in script) == cuda


@pytest.mark.parametrize("visible, gpu", [("", False), ("-1", False), ("0", True), (None, True)])
def test_the_script_starts_no_gpu_server_if_the_cpu_is_asked_for(monkeypatch, tmp_path, visible, gpu):
    for folder in ("bin", "scripts", ".venv/bin"):
        (tmp_path / folder).mkdir(parents=True)
    script = shutil.copy(ROOT / "scripts/serve_rollout.sh", tmp_path / "scripts")
    executable(tmp_path / ".venv/bin/python", '#!/bin/sh\necho "$@"\n')
    executable(tmp_path / "bin/nvidia-smi", "#!/bin/sh\n")
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    said = subprocess.run(["bash", script, "m"], capture_output=True, text=True, check=True)
    assert ('"backend": "nccl"' in said.stdout) == gpu


@pytest.fixture
def users_server(models):
    """URL of a server that scripts/serve_rollout.sh has started, as for --rollout-urls."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    command = ["bash", ROOT / "scripts/serve_rollout.sh", models["untied"], "--dtype", "float32", "--port", f"{port}"]
    command += ["--max-model-len", "128", "--max-num-seqs", "16", "--gpu-memory-utilization", "0.05"]
    log = tempfile.TemporaryFile()  # noqa: SIM115 -- Server.stop() closes it
    started = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=log, stderr=log, start_new_session=True)
    server = process.Server(url, started, log)
    try:
        server.wait_until_ready()
        yield url
    finally:
        server.stop()


@pytest.mark.slow
def test_a_users_server_follows_two_runs_one_after_the_other(users_server, models, tmp_path):
    """The second run finds the weights and the cache of the first."""
    flags = [*ARITHMETIC, "--model", models["untied"], "--rollout-placement", "split", "--rollout-urls", users_server]
    flags += ["--dtype", "float32", "--reward", f"{ROOT}/tests/workers/rewards.py:uneven", "--eval-prompts", 0]
    flags += ["--prompts-per-step", 4, "--group-size", 4, "--mini-batches", 2, "--max-response-tokens", 16]
    for name in ("first", "second"):
        launch(GRPO, *flags, "--steps", 2, "--run-dir", tmp_path / name, servers=True)
    first, second = rows(tmp_path / "first"), rows(tmp_path / "second")
    assert [row["step"] for row in first] == [1, 2] and first[0]["train/grad_norm"] > 0
    assert max(row["mismatch/logprob_abs_max"] for row in first + second) <= 1e-4
    assert [row["reward/mean"] for row in first] == [row["reward/mean"] for row in second]


@needs_two_cores
@pytest.mark.slow
def test_two_ranks_of_remax_train_one_step_behind(models, tmp_path, mark):
    """Two calls of generate() a step, in a thread on each rank, and updates between: each rank's own lock hangs."""
    flags = [*ARITHMETIC, "--model", models["grouped"], "--prompts-per-step", 4, "--mini-batches", 1]
    flags += ["--max-response-tokens", 8, "--group-size", 2, "--eval-prompts", 2, "--max-inflight-batches", 2]
    flags += ["--tis-cap", 2]
    flags += ["--steps", 6, "--max-logprob-gap", 5, "--reward", f"{ROOT}/tests/workers/rewards.py:uneven"]
    launch(ROOT / "algos/remax.py", *SPLIT, *flags, "--run-dir", tmp_path / "run", ranks=2)
    found = rows(tmp_path / "run")
    staleness = [row["mismatch/staleness"] for row in found[1:]]
    assert staleness[0] == 0 and len(staleness) == 6
    assert set(staleness[1:]) <= {0, 1} and 1 in staleness  # an update may come between the two calls: then it is 0
