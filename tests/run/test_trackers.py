"""--track with the real packages, each in its own process with an empty home directory; what was logged is read back.

mlflow, trackio and swanlab are not among the requirements: without them their tests are skipped.
"""

import dataclasses
import glob
import html
import importlib.util
import json
import os
import re
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
from common.run import response_table, traces, trackers

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
from common.run import response_table, trackers

def send_table(sink, step):
    if sink.wants_table(step):
        file = run_dir / f"rollouts/step_{{step:06d}}.jsonl"
        sink.table(response_table.read(file, step, len(file.read_text().splitlines()), 10**6))

run_dir = Path("runs/first")
check_tracker(sys.argv[1])
sink = trackers.Sink(sys.argv[1], run_dir, {FLAGS})
for step, metrics in {LOGGED}.items():
    if step:
        send_table(sink, step)
    sink.log(step, {{"step": step, **metrics}})
sink.file(run_dir / "report.html")
sink.close()
sink.close()
"""
RESPONSES = {1: 3, 7: response_table.ROWS + 4}  # step -> responses in its file
REPORT = "<p>the report of this run</p>" * 10
ONLINE = ("WANDB_", "MLFLOW_", "TRACKIO_", "SWANLAB_")  # variables of the developer's own account


def save_rollouts(run_dir: Path, step: int, count: int, name: str = "") -> None:
    """Write responses as a run does. Some are long, and some look like a number or a date."""
    (run_dir / "rollouts").mkdir(parents=True, exist_ok=True)
    texts = [
        f"{name}007",
        f"{name}1e5 | *\u00e9*\n<b>\U0001f600",
        f"{name}None",
        "x" * 3000 + name,
        "2026-11-26",
        "true",
    ]
    rows = []
    for number in range(count):
        text = texts[number % len(texts)]
        rows.append(
            dict.fromkeys(traces.KEYS)
            | {
                "prompt": f"{number // 2} + {step} =",
                "response": f"{text}{number}",
                "answer": "012",
                "extracted": text[:9] if number % 3 else None,
                "score": number / 8,
                "advantage": -number / 4,
                "info": {"parts": {"gsm8k": number / 16, "my.py:f": 1.0}},
                "finish_reason": "length" if number % 2 else "stop",
                "weight_versions": [step, step + 1],
            }
        )
    file = run_dir / f"rollouts/step_{step:06d}.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def shown(run_dir: Path, step: int) -> list[dict]:
    """The responses in rollouts/ as a tracker's table has them, without a row that counts those left out."""
    rows = [json.loads(line) for line in (run_dir / f"rollouts/step_{step:06d}.jsonl").read_text().splitlines()]
    return [
        {
            "step": step,
            "prompt": row["prompt"],
            "response": row["response"],
            "extracted": row["extracted"],
            "reference": row["answer"],
            "reward/gsm8k": row["info"]["parts"]["gsm8k"],
            "reward/my-py-f": row["info"]["parts"]["my.py:f"],
            "score": row["score"],
            "advantage": row["advantage"],
            "finish_reason": row["finish_reason"],
            "weight_version": row["weight_versions"][0],
        }
        for row in rows[: response_table.ROWS]
    ]


def check_tables(tables: dict[int, list[dict]], run_dir: Path, steps: list[int]) -> None:
    """Compare what a tracker has with rollouts/."""
    assert sorted(tables) == steps
    for step in steps:
        expected = shown(run_dir, step)
        rows = tables[step]
        for row, right in zip(rows, expected):
            assert list(row) == list(right)
            # A long text has lost its middle.
            if len(right["response"]) > response_table.CELL:
                start, end = right["response"][:1000], right["response"][-1000:]
                assert row["response"].startswith(start) and row["response"].endswith(end)
                right["response"] = row["response"]
            assert row == right
            assert {name: type(value) for name, value in row.items() if isinstance(value, str)} == {
                name: type(value) for name, value in right.items() if isinstance(value, str)
            }
        left_out = len((run_dir / f"rollouts/step_{step:06d}.jsonl").read_text().splitlines()) - len(expected)
        assert len(rows) == len(expected) + (left_out > 0)
        if left_out:
            assert rows[-1]["prompt"].startswith(f"{left_out} of ") and rows[-1]["response"] in (None, "")


def run(track: str, home: Path, program: str = PROGRAM, **variables) -> subprocess.CompletedProcess:
    """Run the program with a home directory, and without variables that would take a tracker online."""
    run_dir = home.parent / "runs/first"
    for step, count in RESPONSES.items():
        save_rollouts(run_dir, step, count)
    (run_dir / "report.html").write_text(REPORT)
    kept = {name: value for name, value in os.environ.items() if not name.startswith(ONLINE)}
    kept |= {"HOME": str(home), "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    for name in ("XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME", "HF_HOME", "NETRC"):
        kept.pop(name, None)
    command = [sys.executable, "-c", program, track]
    return subprocess.run(command, cwd=home.parent, env=kept | variables, capture_output=True, text=True, timeout=300)


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


@dataclasses.dataclass
class Read:
    """What a tracker has of a run."""

    steps: dict[int, dict[str, float]] = dataclasses.field(default_factory=dict)
    flags: dict = dataclasses.field(default_factory=dict)
    tables: dict[int, list[dict]] = dataclasses.field(default_factory=dict)
    report: str = ""

    def add_table(self, step: int, columns: list[str], rows: list[list]) -> None:
        assert step not in self.tables, f"step {step} has two tables"
        self.tables[step] = [dict(zip(columns, row, strict=True)) for row in rows]


def read_wandb(run_dir: Path) -> Read:
    """All starts of the run, each of which has a folder."""
    from wandb.proto.wandb_internal_pb2 import Record

    found = Read()
    for folder in sorted((run_dir / "wandb").glob("offline-run-*")):
        for record in map(Record.FromString, records(f"{folder}/run-*.wandb")):
            if record.HasField("run"):
                found.flags = {item.key: json.loads(item.value_json) for item in record.run.config.update}
            if record.HasField("history"):
                row = {".".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
                step = row["_step"]
                if path := row.get("responses.path"):
                    table = json.loads((folder / "files" / path).read_text())
                    found.add_table(step, table["columns"], table["data"])
                row = {name: value for name, value in row.items() if not name.startswith(("_", "responses."))}
                found.steps[step] = row
        report = folder / "files/report.html"
        assert not report.is_symlink()
        found.report = report.read_text()
    return found


def read_tensorboard(run_dir: Path) -> Read:
    from tensorboard import plugin_util
    from tensorboard.backend.event_processing.plugin_event_accumulator import EventAccumulator

    # The class that its pages read with. It forgets the texts of steps that a resumed run repeats, too.
    events = EventAccumulator(str(run_dir / "tensorboard")).Reload()
    found = Read()
    texts = "responses/text_summary"
    for name in set(events.Tags()["tensors"]) - {texts}:
        for event in events.Tensors(name):
            found.steps.setdefault(event.step, {})[name] = event.tensor_proto.float_val[0]
    for event in events.Tensors(texts):
        page = plugin_util.markdown_to_safe_html(event.tensor_proto.string_val[0])
        columns, *rows = [
            [html.unescape(cell.replace("<br>", "\n")) for cell in re.findall("<t[hd]>(.*?)</t[hd]>", row, re.DOTALL)]
            for row in re.findall("<tr>(.*?)</tr>", page, re.DOTALL)
        ]
        numbers = {"step", "score", "advantage", "weight_version", "reward/gsm8k", "reward/my-py-f"}
        for row in rows:
            for place, name in enumerate(columns):
                if row[place] == "":
                    row[place] = None
                elif name in numbers:
                    row[place] = float(row[place])
        found.add_table(event.step, columns, rows)
    return found


def read_mlflow(run_dir: Path, not_listed: tuple[str, ...] = ()) -> Read:
    """Through its own functions, in a process of its own: they keep the address of the database."""
    program = """
import json, sys, mlflow
mlflow.set_tracking_uri("sqlite:///" + sys.argv[1] + "/mlflow.db")
(run,) = mlflow.search_runs(search_all_experiments=True, output_format="list")
client = mlflow.MlflowClient()
steps = {}
for name in run.data.metrics:
    for metric in client.get_metric_history(run.info.run_id, name):
        steps.setdefault(metric.step, {})[name] = metric.value
listed = [file["path"] for file in json.loads(run.data.tags["mlflow.loggedArtifacts"])]
uri = run.info.artifact_uri
files = [file.path for file in client.list_artifacts(run.info.run_id, "responses")]
tables = {path: mlflow.artifacts.load_dict(uri + "/" + path) for path in files}
report = mlflow.artifacts.load_text(uri + "/report.html")
print(json.dumps([run.info.run_name, run.info.status, steps, run.data.params, tables, listed, report]))
"""
    command = [sys.executable, "-c", program, str(run_dir.absolute())]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    name, status, steps, flags, tables, listed, report = json.loads(printed.splitlines()[-1])
    assert (name, status) == ("first", "FINISHED")
    assert sorted(listed) == sorted(tables.keys() - set(not_listed))
    found = Read({int(step): values for step, values in steps.items()}, flags, report=report)
    for path, table in tables.items():
        found.add_table(int(re.fullmatch(r"responses/step_(\d+).json", path)[1]), table["columns"], table["data"])
    return found


def read_trackio(run_dir: Path) -> Read:
    """Through the class that its dashboard reads with, in a process of its own: it keeps the folder."""
    program = """
import json
from trackio.sqlite_storage import SQLiteStorage
(run,) = SQLiteStorage.get_run_records("onefile-rl")
logs = SQLiteStorage.get_logs("onefile-rl", run["name"])
config = SQLiteStorage.get_run_config("onefile-rl", run["name"])
print(json.dumps([run["name"], logs, config]))
"""
    command = [sys.executable, "-c", program]
    environment = {**os.environ, "TRACKIO_DIR": str((run_dir / "trackio").absolute())}
    printed = subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout
    name, rows, flags = json.loads(printed.splitlines()[-1])
    assert name == "first"
    found = Read(flags=flags)
    for row in rows:
        step = row.pop("step")
        del row["timestamp"]
        if table := row.pop("responses", None):
            assert table["_type"] == "trackio.table"
            columns = list(table["_value"][0])
            found.add_table(step, columns, [list(line.values()) for line in table["_value"]])
        found.steps.setdefault(step, {}).update(row)
    (report,) = (run_dir / "trackio/artifacts").rglob("blobs/*/*/*")
    found.report = report.read_text()
    return found


def read_swanlab(run_dir: Path) -> Read:
    """All starts of the run, each of which has a folder."""
    import yaml
    from swanlab.proto.swanlab.record.v1.record_pb2 import Record

    found = Read()
    for folder in sorted((run_dir / "swanlab").glob("run-*")):
        for record in map(Record.FromString, records(f"{folder}/run-*.swanlab")):
            if record.HasField("scalar"):
                found.steps.setdefault(record.scalar.step, {})[record.scalar.key] = record.scalar.value.number
            if record.HasField("media"):
                (item,) = record.media.value.items
                table = json.loads((folder / "media/echarts" / item.filename).read_text())
                assert record.media.key == "responses" and table["_swanLab"] == "table"
                columns = [column["field"] for column in table["colDefs"]]
                found.add_table(record.media.step, columns, [list(row.values()) for row in table["rowData"]])
        config = yaml.safe_load((folder / "files/config.yaml").read_text())
        found.flags = {name: entry["value"] for name, entry in config.items()}
        found.report = (folder / "files/report.html").read_text()
    return found


READERS = dict(zip(NAMES, [read_wandb, read_tensorboard, read_mlflow, read_trackio, read_swanlab]))


@pytest.fixture(scope="module")
def read(done):
    """What a tracker has after PROGRAM, and the run directory."""
    found = {}

    def call(track: str) -> tuple[Read, Path]:
        folder, result = done(track)
        assert result.returncode == 0, result.stderr[-2000:]
        if track not in found:
            found[track] = READERS[track](folder / "runs/first")
        return found[track], folder / "runs/first"

    return call


@pytest.mark.parametrize("track", NAMES)
def test_a_tracker_gets_every_step_and_the_flags(track, read):
    found, _ = read(track)
    assert found.steps == LOGGED
    if track != "tensorboard":  # it has no place for flags
        flags = found.flags
        assert str(flags["seed"]) == "0" and flags["rollout_backend"] == "vllm" and "token_budget" in flags
        assert "host/score" in str(flags["reward"]) and "password" not in str(flags)


@pytest.mark.parametrize("track", NAMES)
def test_a_tracker_gets_the_responses_of_rollouts(track, read):
    found, run_dir = read(track)
    check_tables(found.tables, run_dir, [1, 7])


def test_tables_that_mlflow_cannot_list_are_files_like_the_others(tmp_path):
    """A list that grows too long would be cut off, and could not be read again."""
    pytest.importorskip("mlflow")
    (tmp_path / "home").mkdir()
    program = PROGRAM.replace("sink = ", "trackers.LISTED_TABLES = 1\nsink = ")
    result = run("mlflow", tmp_path / "home", program)
    assert result.returncode == 0 and "warning[" not in result.stderr, result.stderr[-2000:]
    found = read_mlflow(tmp_path / "runs/first", not_listed=("responses/step_000007.json",))
    check_tables(found.tables, tmp_path / "runs/first", [1, 7])


def test_as_many_tables_as_mlflow_lists_fit_into_its_tag():
    validation = pytest.importorskip("mlflow.utils.validation")
    files = [{"path": f"{trackers.TABLES}/step_{10**9}.json", "type": "table"}] * trackers.LISTED_TABLES
    assert len(json.dumps(files)) <= validation.MAX_TAG_VAL_LENGTH


@pytest.mark.parametrize("track", [name for name in NAMES if name != "tensorboard"])  # it has no place for files
def test_a_tracker_gets_the_report(track, read):
    assert read(track)[0].report == REPORT


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
from common.run.response_table import Table

def opened(run_dir, flags, resumed):
    def call(*given, step=0):
        given = [str(value) for value in given]
        if step in (2, 3):
            raise OSError(28, "No space left on device\\nsecond line")
        print(*given, step)
    return trackers.Opened(call, call, call, lambda: print("finished"))

trackers.open_tensorboard = opened
sink = trackers.Sink("tensorboard", Path("."), {})
for step in range(1, 5):
    if step == 4:
        sink.table(Table(step, [], []))
    sink.log(step, {"step": step, "a": 1.0})
sink.file(Path("folder/report.html"))
sink.close()
sink.table(Table(5, [], []))
sink.file(Path("late.html"))
sink.close()
"""


def test_a_tracker_that_fails_is_a_warning_and_the_run_goes_on(tmp_path):
    (tmp_path / "home").mkdir()
    result = run("tensorboard", tmp_path / "home", FAILING)
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines() == [
        "{'a': 1.0} 1",
        "Table(step=4, columns=[], rows=[]) 0",
        "{'a': 1.0} 4",
        "folder/report.html 0",
        "finished",
    ]
    said = "failed at step 2: OSError: [Errno 28] No space left on device second line; the run directory has everything"
    assert result.stderr == f"warning[tracker-failed]: --track tensorboard {said}\n"


def test_a_warning_quotes_the_beginning_of_a_long_message_in_one_line():
    assert trackers.one_line(ValueError("a\n  b\r\nc " + "d" * 400)) == "ValueError: a b c " + "d" * 282


NOTED = [  # what fails, what the warning says about it
    ("table", "with the responses of step 3"),
    ("file", "with report.html"),
    ("finish", "at the end"),
]


@pytest.mark.parametrize("fails, when", NOTED)
def test_the_warning_says_what_the_tracker_did_not_get(fails, when, tmp_path, monkeypatch, capsys):
    def refuse(*given):
        raise RuntimeError("no room")

    calls = dict.fromkeys(("log", "table", "file", "finish"), lambda *given, **named: None)
    monkeypatch.setattr(trackers, "open_tensorboard", lambda *given: trackers.Opened(**{**calls, fails: refuse}))
    sink = trackers.Sink("tensorboard", tmp_path, {})
    sink.table(response_table.Table(3, [], []))
    sink.file(tmp_path / "report.html")
    sink.close()
    said = f"--track tensorboard failed {when}: RuntimeError: no room; the run directory has everything"
    assert capsys.readouterr().err == f"warning[tracker-failed]: {said}\n"


class StoreError(Exception):
    """As boto3, azure and sqlite3 have them: of no class that the others share."""


def sink_that_fails(call: str, error: BaseException, tmp_path, monkeypatch) -> trackers.Sink:
    def fail(*given, **named):
        raise error

    calls = dict.fromkeys(("log", "table", "file", "finish"), lambda *given, **named: None)
    monkeypatch.setattr(trackers, "open_tensorboard", lambda *given: trackers.Opened(**{**calls, call: fail}))
    return trackers.Sink("tensorboard", tmp_path, {})


@pytest.mark.parametrize("call", ["log", "table", "file", "finish"])
def test_an_error_of_any_class_is_a_warning(call, tmp_path, monkeypatch, capsys):
    sink = sink_that_fails(call, StoreError("bucket is gone"), tmp_path, monkeypatch)
    sink.log(3, {"step": 3, "reward/mean": 0.5})
    sink.table(response_table.Table(3, [], []))
    sink.file(tmp_path / "report.html")
    sink.close()
    assert capsys.readouterr().err.count("bucket is gone") == 1


def test_an_error_of_any_class_at_the_start_is_a_refusal(tmp_path, monkeypatch):
    def fail(*given):
        raise StoreError("bucket is gone")

    monkeypatch.setattr(trackers, "open_tensorboard", fail)
    with pytest.raises(BadInput, match="--track tensorboard: cannot be opened: StoreError: bucket is gone"):
        trackers.Sink("tensorboard", tmp_path, {})


def test_an_interrupt_is_no_failure_of_the_tracker(tmp_path, monkeypatch):
    sink = sink_that_fails("log", KeyboardInterrupt(), tmp_path, monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        sink.log(3, {"step": 3})


LOST = {  # tracker -> what puts a file in place of its folder of files, so that nothing can be stored there
    "mlflow": "(run_dir / 'mlruns').write_text('')",
    "trackio": "(run_dir / 'trackio').mkdir(exist_ok=True); (run_dir / 'trackio/artifacts').write_text('')",
}


@pytest.mark.parametrize("track", LOST)
def test_a_lost_store_of_files_is_a_warning(track, tmp_path):
    pytest.importorskip(track)
    (tmp_path / "home").mkdir()
    lost = PROGRAM.replace("for step, metrics", f"{LOST[track]}\nfor step, metrics")
    result = run(track, tmp_path / "home", lost)
    assert result.returncode == 0, result.stderr[-2000:]
    assert result.stderr.count(f"warning[tracker-failed]: --track {track} failed with ") == 1


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


MORE = f"""sink.file(run_dir / "report.html")
sink.close()
report, moved = run_dir / "report.html", run_dir / "rollouts/step_000007.jsonl"
report.write_text(report.read_text() + "resumed")
moved.rename(run_dir / "rollouts/first_000007.jsonl")
(run_dir / "rollouts/again_000007.jsonl").rename(moved)
flags = {{**{FLAGS}, "steps": 9, "resume": "auto"}}
resumed = trackers.Sink(sys.argv[1], run_dir, flags, 1, {{7}})
for step in (2, 7):
    send_table(resumed, step)
    resumed.log(step, {{"step": step, "loss/policy": 3.0}})
resumed.file(report)
resumed.close()
"""
RESUMED = PROGRAM.partition("sink.file(")[0] + MORE


@pytest.mark.parametrize("track", NAMES)
def test_a_resumed_run_goes_on_with_the_same_run_of_its_tracker(track, tmp_path):
    """It has done step 1, and repeats step 7, which has other responses now."""
    if importlib.util.find_spec(track) is None:
        pytest.skip(f"{track} is not installed")
    (tmp_path / "home").mkdir()
    run_dir = tmp_path / "runs/first"
    save_rollouts(run_dir, 2, 4)
    save_rollouts(run_dir, 7, 5, "again ")
    (run_dir / "rollouts/step_000007.jsonl").rename(run_dir / "rollouts/again_000007.jsonl")
    result = run(track, tmp_path / "home", RESUMED)
    assert result.returncode == 0, result.stderr[-2000:]
    assert "warning[" not in result.stderr and "error" not in result.stderr.lower()
    # The readers find one run, and one table for each step.
    found = READERS[track](run_dir)
    if track == "tensorboard":  # shows the new steps
        new = {step: {"loss/policy": 3.0} for step in (2, 7)}
        assert found.steps == {0: LOGGED[0], 1: LOGGED[1], **new}
    else:
        assert found.report == REPORT + "resumed"
        assert set(found.steps) == {0, 1, 2, 7}
        (run_dir / "rollouts/first_000007.jsonl").rename(run_dir / "rollouts/step_000007.jsonl")
    check_tables(found.tables, run_dir, [1, 2, 7])
    if track == "wandb":  # keeps a file for each start, both with one id
        (kept,) = json.loads((run_dir / "tracker.json").read_text()).items()
        files = glob.glob(f"{run_dir}/wandb/offline-run-*/run-*.wandb")
        assert (
            kept[0] == "wandb" and len(files) == 2 and {Path(file).name for file in files} == {f"run-{kept[1]}.wandb"}
        )


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
        return trackers.Opened(print, print, print, lambda: None, resumed.id or "new")

    monkeypatch.setattr(trackers, "open_wandb", opened)
    monkeypatch.setattr(trackers, "VARIABLES", {})
    if kept is not None:
        (tmp_path / "tracker.json").write_text(json.dumps(kept))
    sink = trackers.Sink("wandb", tmp_path, {}, start, {4})
    # Only a run that goes on with the same one has sent the responses of step 4 to it.
    assert sink.wants_table(5) and sink.wants_table(4) == (expected == "")
    sink.close()
    assert not sink.wants_table(5)
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
    opened = trackers.Opened(log=print, table=print, file=print, finish=lambda: ended.append(True))
    monkeypatch.setattr(trackers, "open_tracker", lambda *given: opened)
    sink = trackers.Sink("tensorboard", tmp_path, FLAGS)
    for _ in range(2):
        sink.close()
    assert ended == [True]
