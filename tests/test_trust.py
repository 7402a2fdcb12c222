"""What is trusted: no pickle without --trust-pickle, no remote code, no server beyond loopback, no secret on disk."""

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
from test_readme import load
from transformers import AutoModelForCausalLM

from algos import dapo, dr_grpo, grpo, ppo, prime, remax, rloo, sft
from common import (
    checkpoint,
    data,
    errors,
    model,
    placement,
    rewards,
    roles,
    run,
    safe_pickle,
    servers,
    tracking,
)  # fmt: skip
from common.errors import BadInput, RunFailed
from common.hf_engine import HFEngine
from common.reward_model import RewardModel, RewardModelOnCPU

ALGORITHMS = (grpo, dr_grpo, rloo, remax, dapo, ppo, prime)
SOURCES = sorted(path for folder in ("common", "algos", "scripts") for path in (ROOT / folder).rglob("*.*"))
SOURCES = [path for path in SOURCES if path.suffix in (".py", ".sh", ".sbatch", ".yaml")]


class Evil:
    """A pickle of it makes a folder when it is read."""

    def __init__(self, marker: Path):
        self.marker = marker

    def __reduce__(self):
        return os.mkdir, (str(self.marker),)


def save(folder: Path, **more) -> Path:
    dcp.save({"policy": {"weight": torch.arange(6.0), "lr": 0.5, "betas": (0.9, 0.95)}, **more}, checkpoint_id=folder)
    return folder


def restore(folder: Path, trust_pickle: bool = False, **more) -> dict:
    state = {"policy": {"weight": torch.zeros(6), "lr": 0.0, "betas": None}, **more}
    safe_pickle.load(state, folder, trust_pickle)
    return state


@pytest.mark.parametrize("trust_pickle", [False, True])
def test_what_a_checkpoint_holds_comes_back(world, tmp_path, trust_pickle):
    state = restore(save(tmp_path / "trainer"), trust_pickle)["policy"]
    assert torch.equal(state["weight"], torch.arange(6.0)) and (state["lr"], state["betas"]) == (0.5, (0.9, 0.95))


def test_a_hostile_metadata_file_runs_nothing(world, tmp_path):
    folder, marker = save(tmp_path / "trainer"), tmp_path / "ran"
    (folder / ".metadata").write_bytes(pickle.dumps(Evil(marker)))
    with pytest.raises(RunFailed, match=r"\.metadata: is a pickle with posix\.mkdir, .*; --trust-pickle") as refused:
        restore(folder)
    assert refused.value.code == "pickle-refused" and "\n" not in str(refused.value) and not marker.exists()
    with pytest.raises(RunFailed) as unreadable:  # it was read, and was no metadata
        restore(folder, trust_pickle=True)
    assert unreadable.value.code == "checkpoint-damaged" and marker.exists()


def test_a_hostile_entry_runs_nothing(world, tmp_path):
    marker = tmp_path / "ran"
    folder = save(tmp_path / "trainer", policy2={"lr": Evil(marker)})
    with pytest.raises(RunFailed, match=r"__0_0\.distcp: is a pickle with posix\.mkdir, .*; --trust-pickle") as refused:
        restore(folder, policy2={"lr": 0.0})
    assert refused.value.code == "pickle-refused" and "\n" not in str(refused.value) and not marker.exists()
    restore(folder, trust_pickle=True, policy2={"lr": 0.0})
    assert marker.exists()


@pytest.mark.parametrize("name", [
    "os.system", "posix.system", "builtins.eval", "builtins.getattr", "torch.load", "torch.serialization.load",
    "torch.hub.load", "pathlib.Path", "torch.distributed.checkpoint.metadata.os.system", "functools.partial",
])  # fmt: skip
def test_the_unpickler_knows_no_function_that_does_anything(tmp_path, name):
    module, _, attribute = name.rpartition(".")
    if "metadata.os" in name:  # a dotted name within a module that is known
        module, attribute = "torch.distributed.checkpoint.metadata", "os.system"
    (tmp_path / "p").write_bytes(b"\x80\x04\x8c" + bytes([len(module)]) + module.encode() + b"\x8c"
                                 + bytes([len(attribute)]) + attribute.encode() + b"\x93.")  # fmt: skip
    with pytest.raises(RunFailed, match="is a pickle with"):
        safe_pickle.Unpickler(tmp_path / "p").load()
    assert len(safe_pickle.CLASSES) == 11 and all(isinstance(known, (type, torch.dtype)) or
               known is torch.serialization._get_layout for known in safe_pickle.KNOWN.values())  # fmt: skip


def test_a_checkpoint_does_not_name_files_outside_of_its_folder(world, tmp_path):
    folder = save(tmp_path / "trainer")
    metadata = safe_pickle.Unpickler(folder / ".metadata").load()
    for path in ("../other.distcp", "/etc/passwd"):
        next(iter(metadata.storage_data.values())).relative_path = path
        (folder / ".metadata").write_bytes(pickle.dumps(metadata))
        with pytest.raises(RunFailed, match=f"names a file outside of its folder, '{path}'"):
            restore(folder)


@pytest.mark.parametrize("damage", [
    lambda whole: b"", lambda whole: whole[: len(whole) // 2], lambda whole: b"\xff" * 100, lambda whole: b"(" * 10**6,
    lambda whole: pickle.dumps(3), lambda whole: pickle.dumps([[]]), lambda whole: pickle.dumps(torch.Size([1])),
    lambda whole: b"\x80\x05\x96" + (2**62).to_bytes(8, "little") + b".",
], ids=range(8))  # fmt: skip
def test_a_damaged_checkpoint_is_one_line(world, tmp_path, damage):
    folder = save(tmp_path / "trainer")
    (folder / ".metadata").write_bytes(damage((folder / ".metadata").read_bytes()))
    with pytest.raises(RunFailed, match="cannot be read") as failed:
        restore(folder)
    assert failed.value.code == "checkpoint-damaged" and "\n" not in str(failed.value)


def test_a_checkpoint_of_another_model_is_one_line(world, tmp_path):
    folder = save(tmp_path / "trainer")
    for more in ({"policy": {"weight": torch.zeros(7)}}, {"critic": {"weight": torch.zeros(6)}}):
        with pytest.raises(RunFailed, match="trainer: cannot be read") as failed:
            safe_pickle.load(more, folder, False)
        assert failed.value.code == "checkpoint-damaged" and "\n" not in str(failed.value)


@pytest.mark.slow
def test_a_refusal_ends_all_ranks(tmp_path):
    """Rank 1's is hostile alone: its folder is on a disk of its own."""
    script = tmp_path / "ranks.py"
    script.write_text(
        "import os, sys\nfrom pathlib import Path\nimport torch\nimport torch.distributed.checkpoint as dcp\n"
        "from common import errors, placement, safe_pickle\nplacement.init(0)\n"
        f"folder = Path({str(tmp_path)!r}) / os.environ['RANK']\n"
        "dcp.save({'w': torch.ones(2)}, checkpoint_id=folder, no_dist=True)\n"
        "if os.environ['RANK'] == '1':\n    (folder / '.metadata').write_bytes(b'cos\\nsystem\\n.')\n"
        "def main(args):\n"
        "    try:\n        safe_pickle.load({'w': torch.zeros(2)}, folder, False)\n"
        "    except errors.RunFailed as error:\n        (folder / 'said').write_text(str(error))\n        raise\n"
        "errors.launch(main, None)\n"
    )
    result = launch(script, ranks=2, check=False, timeout=120)
    said = [(tmp_path / str(rank) / "said").read_text() for rank in range(2)]
    assert said[0] == said[1] and "1/.metadata: is a pickle with os.system" in said[0]
    assert "error[pickle-refused]: " in result.stderr


# Weights


@pytest.fixture(scope="module")
def pickled(models, tmp_path_factory) -> str:
    """A model's folder whose weights are a pickle."""
    folder = tmp_path_factory.mktemp("pickled") / "model"
    shutil.copytree(models["untied"], folder)
    weights = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    torch.save(weights, folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    return str(folder)


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=lambda algorithm: algorithm.__name__)
def test_weights_that_are_a_pickle_are_refused_unless_trusted(pickled, capsys, algorithm):
    for trust_pickle in (False, True):
        saving = checkpoint.Saving(dry_run=True, trust_pickle=trust_pickle)
        args = algorithm.Args(model=pickled, dtype="float32", saving=saving)
        if trust_pickle:
            errors.launch(algorithm.main, args)
            continue
        with pytest.raises(SystemExit) as left:
            errors.launch(algorithm.main, args)
        said = capsys.readouterr().err
        assert left.value.code == 2 and said.count("\n") == 1
        assert said.startswith(f"error[pickle-refused]: --model {pickled}: its weights are a pickle, pytorch_model.bin")
        assert "--trust-pickle" in said


def test_other_commands_refuse_them_too(pickled, tmp_path):
    with pytest.raises(BadInput, match="its weights are a pickle"):
        sft.main(sft.Args(model=pickled))
    for kind in ("model", "model-cpu", "model-sharded"):
        with pytest.raises(BadInput, match=f"--reward model:{pickled}: its weights are a pickle"):
            rewards.load((f"{kind}:{pickled}",))
    for reward in (RewardModel, RewardModelOnCPU):  # trusted, and refused for another reason: not one output
        with pytest.raises(BadInput, match="has 2 outputs"):
            reward(pickled, trust_pickle=True)
    for script in ("evaluate", "train_reward_model"):
        module = load(f"scripts/{script}.py")
        with pytest.raises(BadInput, match="its weights are a pickle"):
            module.main(module.Args(model=pickled))


def test_trusted_weights_are_the_same(models, pickled, world):
    trusted, plain = (model.load(path, world, torch.float32).state_dict() for path in (pickled, models["untied"]))
    assert all(torch.equal(trusted[name].full_tensor(), plain[name].full_tensor()) for name in plain)
    engine = HFEngine(pickled, [1], world, torch.float32)
    assert torch.equal(engine.model.lm_head.weight, plain["lm_head.weight"].full_tensor())


def test_beside_safetensors_a_pickle_is_not_looked_at(models, world, tmp_path):
    shutil.copytree(models["untied"], tmp_path / "model")
    for name in ("pytorch_model.bin", "weights.pt"):
        (tmp_path / "model" / name).write_bytes(b"cos\nsystem\n.")
    data.load_tokenizer(str(tmp_path / "model"))
    model.load(str(tmp_path / "model"), world, torch.float32)
    assert safe_pickle.has_safetensors(str(tmp_path / "model")) and safe_pickle.has_safetensors("owner/name")


def test_the_engines_read_safetensors_alone(models, pickled):
    limits = {"max_model_len": 64, "max_num_seqs": 8}
    for path, expected in ((models["untied"], "safetensors"), ("owner/name", "safetensors"), (pickled, "auto")):
        words = servers.command(path, torch.float32, 1, placement.Layout(), 8000, **limits)
        assert words[words.index("--load-format") + 1] == expected
    for call in calls(ROOT / "common/vllm_engine.py"):
        if ast.unparse(call.func) == "LLM":
            assert "'safetensors' if has_safetensors(model_path)" in keywords(call)["load_format"]


def calls(path: Path) -> list[ast.Call]:
    return [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]


def keywords(call: ast.Call) -> dict[str, str]:
    return {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_file_trusts_code_or_pickles(path):
    text = path.read_text()
    for words in ("trust_remote_code", "trust-remote-code", "weights_only=False", "allow_pickle", "INSECURE_SERIAL"):
        assert words not in text
    for call in calls(path) if path.suffix == ".py" else []:
        name, given = ast.unparse(call.func), keywords(call)
        assert name not in ("pickle.load", "pickle.loads", "joblib.load", "marshal.loads", "shelve.open"), name
        reads_weights = name.endswith(".from_pretrained") and (name.startswith("AutoModel") or name.startswith("kind."))
        if reads_weights and "gguf_file" not in given:
            assert given.get("use_safetensors", "") not in ("", "None", "False"), f"line {call.lineno}"


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
    words = servers.command("m", torch.float32, 1, placement.Layout(), 8000, max_model_len=64, max_num_seqs=8)
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
    run.check_configuration(args, "grpo")  # the same flags are still the same


@pytest.mark.parametrize("refuse", [
    lambda: rewards.load((URL,)),
    lambda: rewards.load((URL, URL)),
    lambda: rewards.load((URL.replace("http", "htp"),)),
    lambda: rewards.load((f"http://127.0.0.1:9/?key={SECRET}",)),
    lambda: rewards.load((f"http://127.0.0.1:9#{SECRET}",)),
    lambda: roles.check_layout(placement.Layout("split", rollout_urls=(URL,)), 1, "vllm"),
    lambda: roles.check_layout(placement.Layout("split", rollout_urls=(f"http://h:1?key={SECRET}",)), 1, "vllm"),
    lambda: data.load_tokenizer(URL),
    lambda: data.load(URL, data.Source(), "train", None, 64),
    lambda: run.check_directory("", URL, "none"),
], ids=range(10))  # fmt: skip
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
