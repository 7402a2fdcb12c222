"""What is trusted: no pickle that runs code, no remote code, no server beyond loopback, no secret on the disk.

tests/preflight/test_refusals.py has more: weights that are pickles are refused, and no message has a URL's password.
"""

import ast
import json
import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
import uvicorn
from conftest import ROOT, launch
from helpers import executable, load
from transformers import AutoConfig

from algos import grpo
from common import errors, placement, rewards
from common.data import arithmetic
from common.errors import RunFailed
from common.preflight import run_directory
from common.rollout.servers import process as servers
from common.rollout.vllm_engine import EngineConfig, engine_settings
from common.run import checkpoint, tracking
from common.trainer import model

# Checkpoints and weights


class Evil:
    """A pickle of it makes a folder when it is read."""

    def __init__(self, marker: Path):
        self.marker = marker

    def __reduce__(self):
        return os.mkdir, (str(self.marker),)


def restore(folder: Path, **more: torch.Tensor) -> dict[str, torch.Tensor]:
    tensors = {"weight": torch.zeros(6), "step": torch.zeros(())} | more
    checkpoint.read_tensors(tensors, folder)
    return tensors


def test_a_hostile_or_damaged_checkpoint_runs_nothing_and_is_one_line(world, tmp_path):
    """Pickles in the place of torch's own format, and in the place of a file of tensors."""
    folder, marker = tmp_path / "trainer", tmp_path / "ran"
    saved = {"weight": torch.arange(6.0), "step": torch.tensor(3.0)}
    dcp.save(saved, storage_writer=checkpoint.writer_for(saved, folder))
    (file,) = folder.iterdir()
    content = file.read_bytes()
    evil = pickle.dumps(Evil(marker))
    for name in ("x.distcp", "x.pt"):
        (folder / name).write_bytes(evil)
    restored = restore(folder)
    assert all(torch.equal(restored[name], saved[name]) for name in saved)

    def refusal(folder: Path, **more) -> str:
        """The code with which the checkpoint is refused."""
        with pytest.raises(RunFailed) as failed:
            restore(folder, **more)
        assert "\n" not in str(failed.value) and str(folder) in str(failed.value) and not marker.exists()
        return failed.value.code

    assert refusal(folder, weight=torch.zeros(7)) == refusal(folder, critic=torch.zeros(6)) == "checkpoint-damaged"
    (folder / ".metadata").write_bytes(evil)
    assert refusal(folder) == "pickle-refused"
    (folder / ".metadata").unlink()
    for damaged in (
        evil,
        b"",
        content[: len(content) // 2],
        b"\xff" * 100,
        b"(" * 10**6,
        content.replace(b"saved_offsets", b"other_offsets"),
        content.replace(b"[6]", b"[7]"),
    ):
        file.write_bytes(damaged)
        assert refusal(folder) == "checkpoint-damaged"
    assert refusal(tmp_path / "nothing") == "checkpoint-damaged"


def test_beside_safetensors_a_pickle_is_not_read(models, world, tmp_path):
    shutil.copytree(models["untied"], tmp_path / "model")
    marker = tmp_path / "ran"
    for name in ("pytorch_model.bin", "weights.pt"):
        (tmp_path / "model" / name).write_bytes(pickle.dumps(Evil(marker)))
    model.load(str(tmp_path / "model"), world, torch.float32)
    assert not marker.exists()


def test_no_file_trusts_code_or_pickles():
    files = [path for folder in ("common", "algos", "scripts", "speedrun") for path in (ROOT / folder).rglob("*.*")]
    unsafe_calls = {"pickle.load", "pickle.loads", "joblib.load", "marshal.loads", "shelve.open"}
    unsafe_words = ("trust_remote_code", "trust-remote-code", "weights_only=False", "allow_pickle", "INSECURE_SERIAL")
    found = []
    for path in files:
        if path.suffix not in (".py", ".sh", ".sbatch", ".yaml"):
            continue
        text = path.read_text()
        found += [f"{path}: {words}" for words in unsafe_words if words in text]
        nodes = ast.walk(ast.parse(text)) if path.suffix == ".py" else []
        calls = {ast.unparse(node.func) for node in nodes if isinstance(node, ast.Call)}
        found += [f"{path}: {call}" for call in calls & unsafe_calls]
    assert not found and len(files) > 100


# Servers


def value_of(flag: str, words: list[str]) -> str:
    """The value of a flag. If it is given twice the last one counts."""
    return words[len(words) - words[::-1].index(flag)]


@pytest.mark.parametrize("path", [str(arithmetic.WARM_START), "owner/name"])
def test_engines_read_safetensors_alone_and_listen_on_loopback(path, monkeypatch):
    monkeypatch.setattr(AutoConfig, "from_pretrained", lambda path: arithmetic.config())  # not from the Hub
    sizes = {"dtype": torch.float32, "tensor_parallel": 1, "max_model_len": 64, "max_num_seqs": 8}
    config = EngineConfig(model_path=path, layout=placement.Layout(), **sizes)
    words = servers.command(config, 8000)
    assert value_of("--load-format", words) == engine_settings(config)["load_format"] == "safetensors"
    assert words.count("--host") == 1 and value_of("--host", words) == "127.0.0.1"


def test_scripts_listen_on_loopback_unless_told_otherwise(monkeypatch, tmp_path, capsys):
    served = []
    monkeypatch.setattr(uvicorn, "run", lambda app, host, port, **more: served.append(host))
    monkeypatch.delenv("REWARD_TOKEN", raising=False)
    serve_reward = load("scripts/serve_reward.py")
    serve_reward.main(serve_reward.Args())
    assert served == ["127.0.0.1"] and capsys.readouterr().out == ""
    serve_reward.main(serve_reward.Args(host="0.0.0.0"))
    assert served[1] == "0.0.0.0" and "REWARD_TOKEN" in capsys.readouterr().out, "a warning"
    # scripts/serve_rollout.sh, with a Python that prints its arguments.
    (tmp_path / ".venv/bin").mkdir(parents=True)
    program = "import json, sys; print(json.dumps(sys.argv))"
    executable(tmp_path / ".venv/bin/python", f"#!/bin/sh\nexec {sys.executable} -c '{program}' \"$@\"\n")
    (tmp_path / "scripts").mkdir()
    script = shutil.copy(ROOT / "scripts/serve_rollout.sh", tmp_path / "scripts")
    for flags, host in (([], "127.0.0.1"), (["--host", "0.0.0.0"], "0.0.0.0")):
        for variables in ({}, {"SGLANG": str(tmp_path / ".venv")}):
            command = ["bash", script, "model", *flags]
            result = subprocess.run(command, capture_output=True, text=True, check=True, env=os.environ | variables)
            assert value_of("--host", json.loads(result.stdout)) == host


LISTENING = """
import os
from pathlib import Path
from common import placement
world = placement.init(0)
assert world.sum(2) == 2
mine = {os.readlink(path) for path in Path("/proc/self/fd").iterdir() if path.is_symlink()}
for kind in ("tcp", "tcp6"):
    for row in Path(f"/proc/self/net/{kind}").read_text().splitlines()[1:]:
        words = row.split()
        if words[3] == "0A" and f"socket:[{words[9]}]" in mine:
            print(words[1])
"""


def test_a_run_of_one_process_opens_no_port_beyond_loopback(tmp_path):
    (tmp_path / "one.py").write_text(LISTENING)
    listening = launch(tmp_path / "one.py").stdout.split()
    loopback = ("0100007F:", "00000000000000000000000001000000:")  # gloo's, of its own choice
    assert all(address.startswith(loopback) for address in listening), listening


# Secrets

URL = "http://user:s3cret-pass/word@example.org:8001"


@pytest.fixture
def secrets(monkeypatch) -> list[str]:
    values = {name: f"value-of-{name.lower()}" for name in errors.SECRETS}
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    return [*values.values(), "s3cret"]


def test_no_secret_is_in_the_run_directory(world, tmp_path, monkeypatch, secrets):
    monkeypatch.setattr(sys, "argv", ["algos/grpo.py", "--reward", URL, *secrets[:-1]])
    args = grpo.Args(run_dir=str(tmp_path / "run"), reward=(URL, secrets[0]), model=f"m{secrets[1]}")
    tracker = tracking.Tracker(args, "grpo", world)
    tracker.mean("eval/accuracy", 0.5)
    tracker.write(0)
    tracker.close()
    files = [path for path in (tmp_path / "run").rglob("*") if path.is_file()]
    assert {path.name for path in files} == {"run.json", "metrics.jsonl", "report.html"}
    for path in files:
        assert not [secret for secret in secrets if secret in path.read_text()], path
    began = json.loads((tmp_path / "run/run.json").read_text())
    assert began["argv"][1:3] == ["--reward", "http://...@example.org:8001"] and "$REWARD_TOKEN" in began["argv"]
    run_directory.check_configuration(args, "grpo")  # the same flags are still the same


def test_what_is_printed_is_redacted(secrets, capsys):
    errors.say(f"{secrets[:-1]} {URL}")
    errors.warn(" ".join(secrets[:-1]), "x")
    with pytest.raises(SystemExit):
        errors.launch(lambda args: rewards.load((f"{URL}{secrets[2]}",)), None)
    said = "".join(capsys.readouterr())
    assert not [secret for secret in secrets if secret in said] and "$HF_TOKEN" in said


def test_a_secret_that_json_escapes_is_redacted(monkeypatch):
    secret = 'se"cret\\t\u00f6ken'
    monkeypatch.setenv("WANDB_API_KEY", secret)
    written = errors.redacted(json.dumps({"flag": f"--x={secret}"}))
    assert json.loads(written) == {"flag": "--x=$WANDB_API_KEY"}
