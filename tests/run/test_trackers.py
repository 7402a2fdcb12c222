"""--track with the real packages, each in its own process with an empty home directory; what was logged is read back.

mlflow, trackio and swanlab are not among the requirements: without them their tests are skipped.
"""

import glob
import importlib.util
import json
import os
import sqlite3
import struct
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT, launch

from algos import grpo
from common.errors import BadInput
from common.preflight import machine, run_directory
from common.preflight.flags import Flags
from common.run import trackers

NAMES = ("wandb", "tensorboard", "mlflow", "trackio", "swanlab")
LOGGED = {0: {"loss/policy": 0.25, "eval/accuracy": 0.5}, 1: {"loss/policy": -2.0}, 7: {"reward/a-b/mean": 1.0}}
FLAGS = run_directory.flags(grpo.Args(reward=("http://user:password@host/score",)))
PROGRAM = f"""
import socket, sys
from pathlib import Path

lookup, connect = socket.getaddrinfo, socket.socket.connect

def noted_lookup(*given, **named):
    print("NETWORK", given, flush=True)
    return lookup(*given, **named)

def noted_connect(self, address):
    if self.family != socket.AF_UNIX and address[0] != "127.0.0.1":
        print("NETWORK", address, flush=True)
    return connect(self, address)

socket.getaddrinfo, socket.socket.connect = noted_lookup, noted_connect
from common.preflight.machine import check_tracker
from common.run import trackers

run_dir = Path("runs/first")
run_dir.mkdir(parents=True)
check_tracker(sys.argv[1])
sink = trackers.Sink(sys.argv[1], run_dir, {FLAGS})
for step, metrics in {LOGGED}.items():
    sink.log(step, {{"step": step, **metrics}})
sink.close()
sink.close()
"""
ONLINE = ("WANDB_", "MLFLOW_", "TRACKIO_", "SWANLAB_")  # variables of the developer's own account


def run(track: str, home: Path, program: str = PROGRAM, **variables) -> subprocess.CompletedProcess:
    """Run the program with a home directory, and without variables that would take a tracker online."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(ONLINE)}
    kept |= {"HOME": str(home), "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    for name in ("XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME", "HF_HOME", "NETRC"):
        kept.pop(name, None)
    command = [sys.executable, "-c", program, track]
    return subprocess.run(command, cwd=home.parent, env=kept | variables, capture_output=True, text=True, timeout=120)


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """Folder and result of PROGRAM for a tracker, which runs once. Skips the test if the tracker is not installed."""
    found = {}

    def call(track: str) -> tuple[Path, subprocess.CompletedProcess]:
        if importlib.util.find_spec(track) is None:
            pytest.skip(f"{track} is not installed")
        if track not in found:
            folder = tmp_path_factory.mktemp(track)
            (folder / "home").mkdir()
            found[track] = folder, run(track, folder / "home")
        return found[track]

    return call


def records(pattern: str) -> list[bytes]:
    """The records of a small file in LevelDB's log format, as wandb and swanlab write it."""
    (file,) = glob.glob(pattern)
    data, place, found = Path(file).read_bytes(), 7, []
    assert len(data) < 32768  # one block, in which each record is whole
    while place < len(data):
        _, length, kind = struct.unpack_from("<IHB", data, place)
        assert kind == 1
        found.append(data[place + 7 : place + 7 + length])
        place += 7 + length
    return found


def read_wandb(run_dir: Path) -> tuple[dict, dict]:
    from wandb.proto.wandb_internal_pb2 import Record

    steps, flags = {}, {}
    for record in map(Record.FromString, records(f"{run_dir}/wandb/offline-run-*/run-*.wandb")):
        if record.HasField("run"):
            flags = {item.key: json.loads(item.value_json) for item in record.run.config.update}
        if record.HasField("history"):
            row = {item.key or item.nested_key[0]: json.loads(item.value_json) for item in record.history.item}
            steps[row["_step"]] = {name: value for name, value in row.items() if not name.startswith("_")}
    return steps, flags


def read_tensorboard(run_dir: Path) -> tuple[dict, dict]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events, steps = EventAccumulator(str(run_dir / "tensorboard")).Reload(), {}
    for name in events.Tags()["scalars"]:
        for event in events.Scalars(name):
            steps.setdefault(event.step, {})[name] = event.value
    return steps, {}


def read_mlflow(run_dir: Path) -> tuple[dict, dict]:
    steps = {}
    with sqlite3.connect(run_dir / "mlflow.db") as database:
        for name, value, step in database.execute("select key, value, step from metrics"):
            steps.setdefault(step, {})[name] = value
        assert database.execute("select name, status from runs").fetchall() == [("first", "FINISHED")]
        return steps, dict(database.execute("select key, value from params"))


def read_trackio(run_dir: Path) -> tuple[dict, dict]:
    with sqlite3.connect(run_dir / "trackio/onefile-rl.db") as database:
        rows = database.execute("select step, metrics, run_name from metrics").fetchall()
        ((flags,),) = database.execute("select config from configs").fetchall()
    assert {name for *_, name in rows} == {"first"}
    return {step: json.loads(metrics) for step, metrics, _ in rows}, json.loads(flags)


def read_swanlab(run_dir: Path) -> tuple[dict, dict]:
    import yaml
    from swanlab.proto.swanlab.record.v1.record_pb2 import Record

    steps = {}
    for record in map(Record.FromString, records(f"{run_dir}/swanlab/run-*/run-*.swanlab")):
        if record.HasField("scalar"):
            steps.setdefault(record.scalar.step, {})[record.scalar.key] = record.scalar.value.number
    (config,) = glob.glob(f"{run_dir}/swanlab/run-*/files/config.yaml")
    return steps, {name: entry["value"] for name, entry in yaml.safe_load(Path(config).read_text()).items()}


READERS = [read_wandb, read_tensorboard, read_mlflow, read_trackio, read_swanlab]


@pytest.mark.parametrize("track, read", zip(NAMES, READERS), ids=NAMES)
def test_a_tracker_gets_every_step_and_the_flags(track, read, done):
    folder, result = done(track)
    assert result.returncode == 0, result.stderr[-2000:]
    steps, flags = read(folder / "runs/first")
    assert steps == LOGGED
    if track != "tensorboard":  # it has no place for flags
        assert str(flags["seed"]) == "0" and flags["rollout_backend"] == "vllm" and "token_budget" in flags
        assert "host/score" in str(flags["reward"]) and "password" not in str(flags)


@pytest.mark.parametrize("track", NAMES)
def test_a_tracker_writes_only_below_the_run_directory_and_stays_offline(track, done):
    folder, result = done(track)
    assert sorted(path.name for path in folder.iterdir()) == ["home", "runs"]
    assert not [path for path in (folder / "home").rglob("*") if path.is_file()]
    assert "NETWORK" not in result.stdout and "warning[" not in result.stderr


def test_a_tracker_that_is_not_installed_is_refused(monkeypatch):
    monkeypatch.setattr(machine, "find_spec", lambda name: None)
    for track in NAMES:
        with pytest.raises(BadInput) as error:
            machine.check_tracker(track)
        assert f"--track {track}: " in str(error.value) and f"pip install {track}" in str(error.value)


NO_KEY = [  # variables -> what is said about them
    ({"WANDB_MODE": "online"}, "--track wandb: no API key for https://"),
    ({"WANDB_MODE": "shared"}, "--track wandb: no API key for https://"),
    ({"WANDB_MODE": "online", "WANDB_BASE_URL": "https://wandb.here"}, "no API key for https://wandb.here"),
    ({"WANDB_API_KEY": "too-short"}, "--track wandb: WANDB_API_KEY invalid: API key must have 40+ characters"),
    ({"WANDB_MODE": "on line"}, "--track wandb: 1 validation error for Settings mode Input should be 'online'"),
]
CHECK = "import sys; from common.preflight import machine; machine.check_tracker(sys.argv[1])"


@pytest.mark.parametrize("variables, message", NO_KEY)
def test_wandb_online_without_a_key_is_refused(variables, message, tmp_path):
    (tmp_path / "home").mkdir()
    said = run("wandb", tmp_path / "home", CHECK, **variables).stderr.splitlines()[-1]
    assert said.startswith("common.errors.BadInput: --track wandb: ") and message in said
    assert said.endswith("; run wandb login, set WANDB_API_KEY, or set WANDB_MODE=offline")


@pytest.mark.slow
@pytest.mark.parametrize("track", NAMES)
def test_the_command_line_refuses_a_tracker_in_one_line(track, tmp_path, monkeypatch):
    if track != "wandb" and importlib.util.find_spec(track):
        pytest.skip(f"{track} is installed")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("WANDB_MODE", "online")
    for name in ("WANDB_API_KEY", "NETRC"):
        monkeypatch.delenv(name, raising=False)
    result = launch(ROOT / "algos/grpo.py", "--track", track, "--run-dir", tmp_path / "run", check=False)
    errors = [line for line in result.stderr.splitlines() if line.startswith("error")]
    message = "no API key for " if track == "wandb" else f"not installed; pip install {track}"
    assert result.returncode == 2 and len(errors) == 1 and "Traceback" not in result.stderr
    assert errors[0].startswith(f"error[bad-input]: --track {track}: {message}")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("source", ["variable", "netrc"])
def test_wandb_takes_a_key_from_where_its_login_puts_it(source, tmp_path):
    (tmp_path / "home").mkdir()
    variables = {"WANDB_MODE": "online", "WANDB_BASE_URL": "https://wandb.here"}
    if source == "variable":
        variables["WANDB_API_KEY"] = "k" * 40
    else:
        (tmp_path / "home/.netrc").write_text(f"machine wandb.here login user password {'k' * 40}\n")
        (tmp_path / "home/.netrc").chmod(0o600)
    result = run("wandb", tmp_path / "home", CHECK, **variables)
    assert result.returncode == 0, result.stderr[-2000:]
    assert "k" * 40 not in result.stdout + result.stderr


FAILING = """
import sys
from pathlib import Path
from common.run import trackers

def opened(run_dir, flags, resumed):
    def log(metrics, step):
        if step == 2 or step == 3:
            raise OSError(28, "No space left on device\\nsecond line")
        print("logged", step, metrics)
    return trackers.Opened(log, lambda: print("finished"))

trackers.open_tensorboard = opened
sink = trackers.Sink("tensorboard", Path("."), {})
for step in range(1, 5):
    sink.log(step, {"step": step, "a": 1.0})
sink.close()
sink.close()
"""


def test_a_tracker_that_fails_is_a_warning_and_the_run_goes_on(tmp_path):
    (tmp_path / "home").mkdir()
    result = run("tensorboard", tmp_path / "home", FAILING)
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines() == ["logged 1 {'a': 1.0}", "logged 4 {'a': 1.0}", "finished"]
    said = "[Errno 28] No space left on device second line; metrics.jsonl has all steps"
    assert result.stderr == f"warning[tracker-failed]: --track tensorboard failed at step 2: {said}\n"


def test_a_lost_database_of_mlflow_is_a_warning(tmp_path):
    pytest.importorskip("mlflow")
    (tmp_path / "home").mkdir()
    lost = PROGRAM.replace("for step, metrics", "(run_dir / 'mlflow.db').write_bytes(b'lost')\nfor step, metrics")
    result = run("mlflow", tmp_path / "home", lost)
    assert result.returncode == 0 and result.stderr.count("warning[tracker-failed]: --track mlflow failed at step") == 1


@pytest.mark.parametrize(
    "track, variables",
    [("mlflow", {"MLFLOW_TRACKING_URI": "nonsense://host"}), ("swanlab", {"SWANLAB_MODE": "sideways"})],
)
def test_a_tracker_that_cannot_be_opened_is_refused(track, variables, tmp_path):
    pytest.importorskip(track)
    (tmp_path / "home").mkdir()
    result = run(track, tmp_path / "home", PROGRAM, **variables)
    assert f"BadInput: --track {track}: cannot be opened: " in result.stderr.splitlines()[-1]


def test_every_tracker_can_be_chosen_and_opened():
    chosen = Flags.__dataclass_fields__["track"].type.__args__
    assert set(chosen) == {"none", *NAMES} and grpo.Args().track == "none"
    assert all(callable(getattr(trackers, f"open_{name}")) for name in NAMES)


MORE = f"""sink.close()
flags = {{**{FLAGS}, "steps": 9, "resume": "auto"}}
resumed = trackers.Sink(sys.argv[1], run_dir, flags, 1)
resumed.log(2, {{"step": 2, "loss/policy": 3.0}})
resumed.close()
"""
RESUMED = PROGRAM.replace("sink.close()\nsink.close()\n", MORE)


def test_a_resumed_run_goes_on_with_the_same_run_of_its_tracker(tmp_path):
    """wandb keeps a file for each start, both with one id."""
    (tmp_path / "home").mkdir()
    result = run("wandb", tmp_path / "home", RESUMED)
    assert result.returncode == 0, result.stderr[-2000:]
    (kept,) = json.loads((tmp_path / "runs/first/tracker.json").read_text()).items()
    files = glob.glob(f"{tmp_path}/runs/first/wandb/offline-run-*/run-*.wandb")
    assert kept[0] == "wandb" and {Path(file).name for file in files} == {f"run-{kept[1]}.wandb"}
    assert "warning[" not in result.stderr and "error" not in result.stderr.lower()


def test_a_resumed_run_hides_the_steps_that_it_repeats_from_tensorboard(tmp_path):
    (tmp_path / "home").mkdir()
    result = run("tensorboard", tmp_path / "home", RESUMED)
    assert result.returncode == 0, result.stderr[-2000:]
    steps, _ = read_tensorboard(tmp_path / "runs/first")
    assert sorted(steps) == [0, 1, 2] and steps[2] == {"loss/policy": 3.0}


@pytest.mark.parametrize("track", ["mlflow", "trackio", "swanlab"])
def test_the_other_trackers_go_on_with_the_same_run(track, tmp_path):
    pytest.importorskip(track)
    (tmp_path / "home").mkdir()
    result = run(track, tmp_path / "home", RESUMED)
    assert result.returncode == 0, result.stderr[-2000:]
    if track == "mlflow":
        with sqlite3.connect(tmp_path / "runs/first/mlflow.db") as database:
            assert len(database.execute("select name from runs").fetchall()) == 1
    if track == "trackio":
        steps, _ = read_trackio(tmp_path / "runs/first")
        assert set(steps) == {0, 1, 2, 7}


KEPT = [  # what a run directory holds, steps done, the id that the tracker is opened with
    ({"wandb": "abc"}, 3, "abc"),
    ({"wandb": "abc", "mlflow": "def"}, 3, "abc"),
    ({"mlflow": "def"}, 3, ""),
    (None, 3, ""),
    # A run that starts again at step 1 has forgotten its metrics, and so makes another run.
    ({"wandb": "abc"}, 0, ""),
]


@pytest.mark.parametrize("kept, start, expected", KEPT)
def test_the_id_of_a_trackers_run_is_kept_in_the_run_directory(kept, start, expected, tmp_path, monkeypatch):
    given = []

    def opened(run_dir, flags, resumed):
        given.append(resumed)
        return trackers.Opened(lambda metrics, step: None, lambda: None, resumed.id or "new")

    monkeypatch.setattr(trackers, "open_wandb", opened)
    monkeypatch.setattr(trackers, "VARIABLES", {})
    if kept is not None:
        (tmp_path / "tracker.json").write_text(json.dumps(kept))
    trackers.Sink("wandb", tmp_path, {}, start).close()
    assert given == [trackers.Resumed(start, expected)]
    now = json.loads((tmp_path / "tracker.json").read_text())
    assert now == {**(kept or {}), "wandb": expected or "new"}


def test_a_broken_id_of_a_tracker_is_refused(tmp_path):
    (tmp_path / "tracker.json").write_text('{"wandb": 3}')
    with pytest.raises(BadInput, match=r'tracker.json: "wandb" must be the id'):
        trackers.Sink("wandb", tmp_path, {}, 1)


def test_a_run_that_fails_ends_its_trackers_run_once(tmp_path, monkeypatch):
    """It closes the tracker when it saves what it has, and again at its end. A second end may upload once more."""
    ended = []
    opened = trackers.Opened(log=lambda metrics, step: None, finish=lambda: ended.append(True))
    monkeypatch.setattr(trackers, "open_tracker", lambda *given: opened)
    sink = trackers.Sink("tensorboard", tmp_path, FLAGS)
    for _ in range(2):
        sink.close()
    assert ended == [True]
