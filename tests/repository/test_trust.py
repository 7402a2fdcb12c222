"""What is trusted: no pickle that runs code, no remote code, no server beyond loopback, no secret on the disk."""

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
from helpers import load
from transformers import AutoConfig, AutoModelForCausalLM

from algos import grpo, sft
from common import errors, placement, rewards
from common.data import prompts as data
from common.data.tokenizer import has_safetensors, load_tokenizer
from common.errors import BadInput, RunFailed
from common.preflight import machine, run_directory
from common.rollout.servers import process as servers
from common.rollout.vllm_engine import EngineConfig, engine_settings
from common.run import checkpoint, tracking
from common.trainer import model

SOURCES = sorted(path for folder in ("common", "algos", "scripts") for path in (ROOT / folder).rglob("*.*"))
SOURCES = [path for path in SOURCES if path.suffix in (".py", ".sh", ".sbatch", ".yaml")]


class Evil:
    """A pickle of it makes a folder when it is read."""

    def __init__(self, marker: Path):
        self.marker = marker

    def __reduce__(self):
        return os.mkdir, (str(self.marker),)


def save(folder: Path) -> Path:
    tensors = {"policy.weight": torch.arange(6.0), "policy.step": torch.tensor(3.0)}
    dcp.save(tensors, storage_writer=checkpoint.writer_for(tensors, folder))
    return folder


def restore(folder: Path, **more: torch.Tensor) -> dict:
    tensors = {"policy.weight": torch.zeros(6), "policy.step": torch.zeros(())} | more
    checkpoint.read_tensors(tensors, folder)
    return tensors


def refused(code: str, folder: Path, **more) -> str:
    with pytest.raises(RunFailed) as failed:
        restore(folder, **more)
    assert failed.value.code == code and "\n" not in str(failed.value)
    return str(failed.value)


def test_what_a_checkpoint_holds_comes_back(world, tmp_path):
    tensors = restore(save(tmp_path / "trainer"))
    assert torch.equal(tensors["policy.weight"], torch.arange(6.0)) and tensors["policy.step"] == 3


def test_a_hostile_checkpoint_runs_nothing(world, tmp_path):
    """A pickle in the place of torch's own format, and one in the place of a file of tensors."""
    marker = tmp_path / "ran"
    folder = save(tmp_path / "trainer")
    (folder / "x.distcp").write_bytes(pickle.dumps(Evil(marker)))
    (folder / "x.pt").write_bytes(pickle.dumps(Evil(marker)))
    assert torch.equal(restore(folder)["policy.weight"], torch.arange(6.0))
    (folder / ".metadata").write_bytes(pickle.dumps(Evil(marker)))
    assert "holds pickles, which could run code" in refused("pickle-refused", folder)
    (folder / ".metadata").unlink()
    for file in folder.glob("*.safetensors"):
        file.write_bytes(pickle.dumps(Evil(marker)))
    refused("checkpoint-damaged", folder)
    assert not marker.exists()


@pytest.mark.parametrize(
    "damage",
    [
        lambda whole: b"",
        lambda whole: whole[: len(whole) // 2],
        lambda whole: b"\xff" * 100,
        lambda whole: b"(" * 10**6,
        lambda whole: pickle.dumps(3),
        lambda whole: whole.replace(b"saved_offsets", b"other_offsets"),
        lambda whole: whole.replace(b"[6]", b"[7]"),
    ],
    ids=range(7),
)
def test_a_damaged_checkpoint_is_one_line(world, tmp_path, damage):
    folder = save(tmp_path / "trainer")
    (file,) = folder.iterdir()
    file.write_bytes(damage(file.read_bytes()))
    assert "trainer: cannot be read: " in refused("checkpoint-damaged", folder)


def test_a_checkpoint_of_another_model_is_one_line(world, tmp_path):
    folder = save(tmp_path / "trainer")
    for more in ({"policy.weight": torch.zeros(7)}, {"critic.weight": torch.zeros(6)}):
        assert "trainer: cannot be read: " in refused("checkpoint-damaged", folder, **more)
    assert "nothing: cannot be read: " in refused("checkpoint-damaged", tmp_path / "nothing")


# Weights


@pytest.fixture(scope="module")
def pickled(models, tmp_path_factory) -> str:
    """A model's folder whose weights are a pickle."""
    folder = tmp_path_factory.mktemp("pickled") / "model"
    shutil.copytree(models["untied"], folder)
    torch.save(AutoModelForCausalLM.from_pretrained(folder).state_dict(), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    return str(folder)


def test_weights_that_are_a_pickle_are_refused(pickled, capsys):
    with pytest.raises(SystemExit) as left:
        errors.launch(grpo.main, grpo.Args(model=pickled, saving=checkpoint.Saving(dry_run=True)))
    said = capsys.readouterr().err
    assert left.value.code == 2 and said.count("\n") == 1
    assert said.startswith(f"error[pickle-refused]: --model {pickled}: its weights are a pickle, pytorch_model.bin")
    for kind in ("model", "model-cpu", "model-sharded"):
        with pytest.raises(BadInput, match=f"--reward model:{pickled}: its weights are a pickle"):
            rewards.load((f"{kind}:{pickled}",))
    for module in (sft, load("scripts/evaluate.py"), load("scripts/train_reward_model.py")):
        with pytest.raises(BadInput, match="its weights are a pickle"):
            module.main(module.Args(model=pickled))


def test_beside_safetensors_a_pickle_is_not_looked_at(models, world, tmp_path):
    shutil.copytree(models["untied"], tmp_path / "model")
    for name in ("pytorch_model.bin", "weights.pt"):
        (tmp_path / "model" / name).write_bytes(b"cos\nsystem\n.")
    load_tokenizer(str(tmp_path / "model"))
    model.load(str(tmp_path / "model"), world, torch.float32)
    assert has_safetensors(str(tmp_path / "model")) and has_safetensors("owner/name")


def test_the_engines_read_safetensors_alone(models, monkeypatch):
    monkeypatch.setattr(AutoConfig, "from_pretrained", lambda path: object())  # not from the Hub
    sizes = {"dtype": torch.float32, "tensor_parallel": 1, "max_model_len": 64, "max_num_seqs": 8}
    for path in (models["untied"], "owner/name"):
        config = EngineConfig(model_path=path, layout=placement.Layout(), **sizes)
        words = servers.command(config, 8000)
        assert words[words.index("--load-format") + 1] == "safetensors"
        assert engine_settings(config)["load_format"] == "safetensors"


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_file_trusts_code_or_pickles(path):
    text = path.read_text()
    for words in ("trust_remote_code", "trust-remote-code", "weights_only=False", "allow_pickle", "INSECURE_SERIAL"):
        assert words not in text
    calls = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)] if path.suffix == ".py" else []
    unsafe = {"pickle.load", "pickle.loads", "joblib.load", "marshal.loads", "shelve.open"}
    assert unsafe.isdisjoint(ast.unparse(call.func) for call in calls)


# Servers


def test_servers_listen_on_loopback_unless_told_otherwise(monkeypatch, tmp_path, capsys):
    served = []
    monkeypatch.setattr(uvicorn, "run", lambda app, host, port, **more: served.append(host))
    monkeypatch.delenv("REWARD_TOKEN", raising=False)
    serve_reward = load("scripts/serve_reward.py")
    serve_reward.main(serve_reward.Args())
    assert served == ["127.0.0.1"] and capsys.readouterr().out == ""
    serve_reward.main(serve_reward.Args(host="0.0.0.0"))
    assert served[1] == "0.0.0.0" and "without REWARD_TOKEN" in capsys.readouterr().out
    monkeypatch.setattr(AutoConfig, "from_pretrained", lambda path: object())
    sizes = {"dtype": torch.float32, "tensor_parallel": 1, "max_model_len": 64, "max_num_seqs": 8}
    words = servers.command(EngineConfig(model_path="m", layout=placement.Layout(), **sizes), 8000)
    assert words.count("--host") == 1 and words[words.index("--host") + 1] == "127.0.0.1"
    for flags, host in (([], "127.0.0.1"), (["--host", "0.0.0.0"], "0.0.0.0")):
        assert serve_rollout(tmp_path, *flags) == host


def test_a_run_of_one_process_opens_no_port_beyond_loopback(tmp_path):
    script = tmp_path / "one.py"
    script.write_text(
        "import os\nfrom pathlib import Path\nfrom common import placement\nworld = placement.init(0)\n"
        "assert world.sum(2) == 2\n"
        "mine = {os.readlink(path) for path in Path('/proc/self/fd').iterdir() if path.is_symlink()}\n"
        "for kind in ('tcp', 'tcp6'):\n"
        "    for row in Path(f'/proc/self/net/{kind}').read_text().splitlines()[1:]:\n"
        "        words = row.split()\n"
        "        if words[3] == '0A' and f'socket:[{words[9]}]' in mine:\n            print(words[1])\n"
    )
    listening = launch(script, timeout=60).stdout.split()
    loopback = ("0100007F:", "00000000000000000000000001000000:")  # gloo's, of its own choice
    assert all(address.startswith(loopback) for address in listening), listening


def serve_rollout(folder: Path, *flags) -> str:
    """The host that scripts/serve_rollout.sh gives to vLLM: the last one counts."""
    python = folder / ".venv/bin/python"
    python.parent.mkdir(parents=True, exist_ok=True)
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -c "import json, sys; print(json.dumps(sys.argv))" "$@"\n')
    python.chmod(0o755)
    (folder / "scripts").mkdir(exist_ok=True)
    shutil.copy(ROOT / "scripts/serve_rollout.sh", folder / "scripts")
    command = ["bash", folder / "scripts/serve_rollout.sh", "model", *flags]
    words = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    return words[len(words) - words[::-1].index("--host")]


# Secrets

SECRET = "s3cret-pass/word"
URL = f"http://user:{SECRET}@example.org:8001"


@pytest.fixture
def secrets(monkeypatch) -> list[str]:
    values = {name: f"value-of-{name.lower()}" for name in errors.SECRETS}
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    return [*values.values(), f"user:{SECRET}"]


def test_no_secret_is_in_the_run_directory(world, tmp_path, monkeypatch, secrets):
    monkeypatch.setattr(sys, "argv", ["algos/grpo.py", "--reward", URL, *secrets[:-1]])
    args = grpo.Args(run_dir=str(tmp_path / "run"), reward=(URL, secrets[0]), model=f"m{secrets[1]}")
    tracker = tracking.Tracker(args.run_dir, "grpo", args, world, "none", 0, 5)
    tracker.first(0.5)
    tracker.close()
    files = [path for path in (tmp_path / "run").rglob("*") if path.is_file()]
    assert {path.name for path in files} == {"run.json", "metrics.jsonl", "report.html"}
    for path in files:
        assert not [secret for secret in secrets if secret in path.read_text()], path
    began = json.loads((tmp_path / "run/run.json").read_text())
    assert began["argv"][1:3] == ["--reward", "http://...@example.org:8001"] and "$REWARD_TOKEN" in began["argv"]
    run_directory.check_configuration(args, "grpo")  # the same flags are still the same


@pytest.mark.parametrize(
    "refuse",
    [
        lambda: rewards.load((URL,)),
        lambda: rewards.load((URL, URL)),
        lambda: rewards.load((URL.replace("http", "htp"),)),
        lambda: rewards.load((f"http://127.0.0.1:9/?key={SECRET}",)),
        lambda: rewards.load((f"http://127.0.0.1:9#{SECRET}",)),
        lambda: machine.check_layout(placement.Layout("split", rollout_urls=(URL,)), 1, "vllm"),
        lambda: machine.check_layout(placement.Layout("split", rollout_urls=(f"http://h:1?key={SECRET}",)), 1, "vllm"),
        lambda: load_tokenizer(URL),
        lambda: data.load(URL, data.Source(), "train", None, 64),
        lambda: run_directory.check_directory("", URL),
    ],
    ids=range(10),
)
def test_no_password_of_a_url_is_in_a_message(refuse):
    with pytest.raises(BadInput) as error:
        refuse()
    assert SECRET not in str(error.value) and SECRET.split("/")[0] not in str(error.value)


def test_what_is_printed_is_redacted(secrets, capsys):
    errors.say(f"{secrets} {URL}")
    errors.warn(" ".join(secrets[:-1]), "x")
    with pytest.raises(SystemExit):
        errors.launch(lambda args: rewards.load((f"{URL}{secrets[2]}",)), None)
    said = "".join(capsys.readouterr())
    assert not [secret for secret in secrets[:-1] if secret in said] and "$HF_TOKEN" in said
    assert f"{URL}" not in said


def test_a_secret_that_json_escapes_is_redacted(monkeypatch):
    secret = 'se"cret\\t\u00f6ken'
    monkeypatch.setenv("WANDB_API_KEY", secret)
    written = errors.redacted(json.dumps({"flag": f"--x={secret}"}))
    assert json.loads(written) == {"flag": "--x=$WANDB_API_KEY"}
