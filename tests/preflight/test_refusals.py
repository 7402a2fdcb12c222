"""Every refusal of bad input: what is typed, and what the message has to name.

A row of the table is a command line. Its script runs in this process as `python SCRIPT FLAGS` would, in a folder that
holds the row's files. It has to end with exit code 2 and one message, before a model is loaded or a process group
exists, and leave nothing behind. The message carries the row's code and names the flags, files and keys that are wrong.
How it says so is up to whoever writes it.
"""

import importlib
import inspect
import json
import os
import re
import runpy
import shlex
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow
import pytest
import torch
import transformers
import uvicorn
from cases import ALGORITHM_FILES, ALGORITHMS
from conftest import ROOT, save_model
from helpers import checkpoint_state
from pyarrow import parquet
from safetensors.torch import load_file, save_file

from common import placement
from common.data import arithmetic
from common.rewards.workers import UserReward
from common.rollout import engines
from common.run import traces
from common.trainer import model

SECRET = "s3cret"  # never in a message
HARMFUL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202e\ud800-\udfff]")  # to a terminal
Make = Callable[[Path], object]  # makes a file or a folder


@dataclass(frozen=True)
class Refusal:
    command: str  # a script and its flags; "grpo" is algos/grpo.py
    names: tuple[str, ...]  # what the message must name
    files: dict[str, bytes | Make] = field(default_factory=dict)
    code: str = "bad-input"
    variables: dict[str, str] = field(default_factory=dict)  # of the environment
    lines: int = 1  # of the message; 0: any number, because it quotes a traceback


TABLE: list[Refusal] = []


def refused(command: str, *names: str, files: dict | None = None, **more) -> None:
    """Add a row to the table. The file rows.jsonl is there, and is in order, unless the row has another one."""
    TABLE.append(Refusal(command, names, {"rows.jsonl": ROWS} | (files or {}), **more))


# What rows are made of.

GOOD = {"question": "1+1=", "answer": "2", "solution": "2"}
PAIR = {"prompt": "1+1=", "chosen": "2", "rejected": "3"}
PAIR_FILE = "dpo --dataset pairs.jsonl"
TWO_RANKS = {"variables": {"WORLD_SIZE": "2"}}


def jsonl(*rows) -> bytes:
    """The bytes of a JSONL file; a row is an object, or a line as it stands."""
    return b"".join((row if isinstance(row, bytes) else json.dumps(row).encode()) + b"\n" for row in rows)


ROWS = jsonl(GOOD)


def table(*rows: dict) -> bytes:
    """The bytes of a Parquet file."""
    sink = pyarrow.BufferOutputStream()
    parquet.write_table(pyarrow.Table.from_pylist(list(rows)), sink)
    return sink.getvalue().to_pybytes()


def model_folder(change: Callable[[Path], object] = lambda folder: None) -> Make:
    """A copy of the embedded model, and then a change to it."""

    def make(folder: Path) -> None:
        shutil.copytree(arithmetic.WARM_START, folder)
        change(folder)

    return make


def without(pattern: str, keep: int | None = None) -> Make:
    """A model in whose files of this name only the first `keep` bytes are left. None: without these files."""

    def change(folder: Path) -> None:
        for path in folder.glob(pattern):
            if keep is None:
                path.unlink()
            else:
                os.truncate(path, keep)

    return model_folder(change)


def with_tensors(change: Callable[[dict], object]) -> Make:
    """A model after a change to its dict of tensors."""

    def edit(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})

    return model_folder(edit)


def with_config(config: transformers.PreTrainedConfig) -> Make:
    """A model with another config.json."""
    config.eos_token_id = 1
    return model_folder(config.save_pretrained)


def pickled(folder: Path) -> None:
    """A model whose weights are a pickle alone. Nobody may read it, so its bytes are none."""
    without("model.safetensors")(folder)
    (folder / "pytorch_model.bin").write_bytes(b"cos\nsystem\n.")


def folder_with(**files: bytes) -> Make:
    """A folder with these files."""

    def make(folder: Path) -> None:
        folder.mkdir()
        for name, content in files.items():
            (folder / name.replace("__", ".")).write_bytes(content)

    return make


def checkpoint_of(step: int, **changes) -> bytes:
    """state.json of a checkpoint without tensors."""
    return json.dumps(json.loads(checkpoint_state(step)) | changes).encode()


def run_json(algorithm: str = "grpo", **args) -> bytes:
    return json.dumps({"algorithm": algorithm, "args": args}).encode()


def compares_a_group(algorithm: str) -> bool:
    """Whether its advantages subtract the mean of a group, which a group of one always equals."""
    module = importlib.import_module(f"algos.{algorithm}")
    parameters = inspect.signature(getattr(module, "compute_advantages", lambda: None)).parameters
    return "group_size" in parameters and "baseline" not in parameters


# Flags that do not fit each other or the ranks.

for name in ALGORITHM_FILES:
    refused(f"{name} --seed -1", "--seed")
for name in ALGORITHMS:
    needed = {"opd": "--teacher x", "sdpo": "--no-full-vocabulary"}.get(name, "")
    split = "--rollout-placement split --rollout-devices 0 --max-inflight-batches 2"
    refused(f"{name} {needed} {split}", "--max-inflight-batches", "--tis-cap")
    if compares_a_group(name):
        refused(f"{name} --group-size 1", "--group-size")

for word in ("learning-rate 2", "temperature 0", "temperature 0.001", "clip-low 1.5", "max-grad-norm 0", "steps 0"):
    refused(f"grpo --{word}", f"--{word.split()[0]}")
for word in ("rollouts-every 0", "rollout-memory 40", "max-inflight-batches 3", "group-size 0", "seed 999999999999"):
    refused(f"grpo --{word}", f"--{word.split()[0]}")
for word in ("learning-rate nan", "temperature inf", "kl-coef -1", "kl-coef nan", "max-logprob-gap -inf"):
    refused(f"grpo --{word}", f"--{word.split()[0]}")
refused("evaluate --model x --seed -1", "--seed")
refused("train_reward_model --seed -1", "--seed")
refused("selftest --temperature -1", "--temperature")

refused("grpo --prompts-per-step 10", "--prompts-per-step", "--mini-batches")
refused("grpo --rollout-tp 3", "--rollout-tp")
for command in ("grpo", "evaluate --model model"):
    refused(f"{command} --rollout-backend hf --rollout-tp 2", "--rollout-tp", "--rollout-backend", **TWO_RANKS)
refused("grpo --sequence-parallel 2", "--sequence-parallel")
refused("grpo --tis-cap 0.5", "--tis-cap 0.5", "1 or more")
refused("grpo --shard-size 2", "--shard-size")
for flag in ("--rollout-tp", "--sequence-parallel"):
    # The embedded model has 4 heads.
    refused(f"grpo --dataset rows.jsonl {flag} 8", flag, "--model", variables={"WORLD_SIZE": "8"})
refused("grpo --dataset rows.jsonl --train-vision", "--train-vision")
refused("grpo --dataset rows.jsonl --max-response-tokens 300", "--max-response-tokens", "--model")
refused("grpo --dataset rows.jsonl --eval-dataset one.jsonl", "2 ranks", files={"one.jsonl": ROWS}, **TWO_RANKS)
refused("reinforce_pp --group-size 1 --baseline group", "--group-size", "--baseline")
refused("opd --teacher ''", "--teacher")
refused("opd --teacher x --full-vocabulary --tis-cap 2", "--tis-cap", "--full-vocabulary")
refused("opd --teacher x --full-vocabulary --clip-low 0.1", "--clip-low", "--full-vocabulary")
refused("opd --dataset rows.jsonl --teacher ./absent", "--teacher")
refused("prime --accuracy-range 0.6 0.7 --group-size 4", "--accuracy-range", "4 responses")
refused("sdpo --group-size 1", "--group-size")
refused("sdpo --hint-template {prompt}", "--hint-template", "{hint}")
refused("sdpo --environment calculator", "--environment")
refused("sdpo --lora-rank 4", "--lora-rank", "--teacher-rate")
refused("sdpo --tis-cap 2", "--tis-cap", "--full-vocabulary")
refused("sdpo --clip-high 0.3", "--clip-high", "--full-vocabulary")
refused("sdpo --dataset rows.jsonl --reward gsm8k=0 dapo=0.5", "--reward", "dapo", "--hint peer")
refused("sdpo --sequence-parallel 2", "--sequence-parallel", "--no-full-vocabulary")
refused("sdpo --teacher-rate 1.5", "--teacher-rate")
refused("sdpo --dataset rows.jsonl --max-response-tokens 250", "--max-response-tokens", "positions")
WITHOUT_ANSWER = {"rows.jsonl": jsonl({"question": "1+1="})}
refused("sdpo --dataset rows.jsonl --hint answer --reward format", "--hint answer", files=WITHOUT_ANSWER)
refused("sdpo --dataset rows.jsonl --hint solution --reward format", "--hint solution", files=WITHOUT_ANSWER)
refused("dapo --overlong-cache 49", "--overlong-cache", "--max-response-tokens")
refused("dapo --clip-dual 1.1", "--clip-dual", "--clip-high")
refused("dapo --dataset rows.jsonl --reward dapo=1", "--reward", "dapo")
refused("prime --accuracy-range 0.9 0.1", "--accuracy-range")
refused("prime --dataset rows.jsonl --reward gsm8k=0 dapo=0.5", "--reward", "dapo")
refused("ppo --critic-warmup-steps 50", "--critic-warmup-steps", "--steps")
for name in ("dapo", "prime"):
    refused(f"{name} --mini-batches 2 --gen-prompts 31", "31 prompts", "2 ranks", **TWO_RANKS)
    refused(f"{name} --gen-prompts 4 --max-gen-batches 2", "4 prompts", "--prompts-per-step")
for script in ("sft", "dpo", "train_reward_model"):
    refused(f"{script} --batch-size 3", "--batch-size", **TWO_RANKS)
refused("sft --lora-rank 2", "--lora-rank", "--model")

refused("grpo --rollout-placement split", "--rollout-devices", "--rollout-urls")
for flags in ("--rollout-devices 0 --rollout-urls http://a", "--rollout-devices 0 --rollout-backend hf"):
    refused(f"grpo --rollout-placement split {flags}", "--rollout-placement")
for flags in ("--rollout-devices 99", "--rollout-devices 1 1", "--rollout-devices 0 1 2"):
    refused(f"grpo --rollout-placement split {flags}", "--rollout-devices")
refused("grpo --rollout-placement split --rollout-devices 1 --rollout-tp 2", "--rollout-tp", "--rollout-devices")
nodes = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1"}  # a device's number means nothing on another node
refused("grpo --rollout-placement split --rollout-devices 1", "--rollout-devices", "--rollout-urls", variables=nodes)
for flags in ("--max-inflight-batches 2 --tis-cap 2", "--rollout-urls http://a", "--rollout-devices 0"):
    refused(f"grpo {flags}", "--rollout-placement")
SGLANG = "--rollout-backend sglang --rollout-placement"
refused("grpo --rollout-backend sglang", "--rollout-backend", "--rollout-placement", "--rollout-urls")
refused(f"grpo {SGLANG} split --rollout-devices 1", "--rollout-devices", "--rollout-urls")
refused(f"grpo {SGLANG} split", "--rollout-devices", "--rollout-urls")
flags = "--rollout-urls http://127.0.0.1:9 --max-inflight-batches 2 --tis-cap 2"
refused(f"grpo {SGLANG} split {flags} --inflight-updates keep", "--inflight-updates", "sglang")
refused(f"grpo {SGLANG} split {flags}", "--rollout-urls", "http://127.0.0.1:9", code="server-gone")
for url in (f"http://user:{SECRET}@h:1", f"http://h:1?key={SECRET}", f"http://h:1#{SECRET}", "h:1"):
    refused(f"grpo --rollout-placement split --rollout-urls {url}", "--rollout-urls")

# The model.

for name in ("./no/such/folder", "no-such-org/no-such-model", "empty"):
    refused(f"grpo --model {name}", f"--model {name}", files={"empty": Path.mkdir})
refused(f"grpo --model http://user:{SECRET}@h/x", "--model")
refused("grpo --model model", "scripts/merge_lora.py", files={"model": folder_with(adapter_config__json=b"{}")})

OWN = "--model model --max-response-tokens 48"
UP, NORM = "model.layers.0.mlp.up_proj.weight", "model.norm.weight"
MORE = "model.layers.9.mlp.up_proj.weight"
ONLY_NORMS = {"lines": 6}  # five are quoted, the rest is counted


def drop_all_but_norms(tensors: dict) -> None:
    for key in [key for key in tensors if "norm" not in key]:
        del tensors[key]


for change, named, more in (
    (lambda tensors: tensors.pop(UP), UP, {}),
    (lambda tensors: tensors.pop("lm_head.weight"), "lm_head.weight", {}),
    (lambda tensors: tensors.update({MORE: tensors[UP].clone()}), MORE, {}),
    (lambda tensors: tensors.update({NORM: torch.zeros(7)}), NORM, {}),
    (drop_all_but_norms, UP.replace("up", "down"), ONLY_NORMS),
):
    files = {"model": with_tensors(change)}
    refused(f"grpo --dataset rows.jsonl {OWN}", "--model model", named, files=files, **more)


def with_json(file: str, **changes) -> Make:
    """A model after a change to one of its JSON files, which need not be there."""

    def change(folder: Path) -> None:
        path = folder / file
        path.write_text(json.dumps((json.loads(path.read_text()) if path.is_file() else {}) | changes))

    return model_folder(change)


def quantized(method: str, **settings) -> Make:
    return with_json("config.json", quantization_config={"quant_method": method, "bits": 4, **settings})


# Adapters to the embedded model, as peft and --lora-rank write them.
LAYER = "base_model.model.model.layers.0.mlp.up_proj"
PAIR_OF_TENSORS = {
    f"{LAYER}.lora_A.weight": torch.ones(2, 128),
    f"{LAYER}.lora_B.weight": torch.ones(512, 2),
}


def adapters_with(tensors: dict, keep: int | None = None, **settings) -> Make:
    """Adapters of which only the first `keep` bytes are left. None: all of them."""

    def make(folder: Path) -> None:
        folder.mkdir()
        config = {"base_model_name_or_path": "model", "r": 2, "lora_alpha": 4} | settings
        (folder / "adapter_config.json").write_text(json.dumps(config))
        save_file(PAIR_OF_TENSORS | tensors, folder / "adapter_model.safetensors", {"format": "pt"})
        if keep is not None:
            os.truncate(folder / "adapter_model.safetensors", keep)

    return make


# What all that train, and merging, say of a model that transformers would read with a warning, or not at all.
WHOLE_RUNS = (f"grpo --dataset rows.jsonl {OWN}", "sft --dataset rows.jsonl --model model")
WHOLE_RUNS += ("dpo --dataset pairs.jsonl --model model --max-response-tokens 48", "merge_lora adapters out")
PAIRS = {"pairs.jsonl": jsonl(PAIR), "adapters": adapters_with({})}
BEYOND = {"eos_token_id": [1, 999]}
for make, *named in (
    (quantized("fp8", weight_block_size=[128, 128]), "config.json", "quantization_config", "fp8"),
    (quantized("gptq"), "config.json", "gptq"),
    (quantized("awq"), "config.json", "awq"),
    (quantized("bitsandbytes", load_in_4bit=True), "config.json", "bitsandbytes"),
    (with_json("config.json", quantization_config={"load_in_8bit": True}), "config.json", "bitsandbytes"),
    (quantized("unheard-of"), "config.json", "unheard-of"),
    (with_json("config.json", compression_config={"quant_method": "x"}), "config.json", "compression_config"),
    (with_tensors(lambda tensors: tensors.update({UP: tensors[UP].to(torch.int8)})), "model.safetensors", UP, "I8"),
    (with_json("config.json", tie_word_embeddings=True), "config.json", "lm_head.weight", '"tie_word_embeddings"'),
    (with_tensors(lambda tensors: tensors.pop(UP)), UP),
    (with_tensors(lambda tensors: tensors.update({MORE: tensors[UP].clone()})), MORE),
    (with_json("config.json", **BEYOND), "config.json", "999", "51"),
    (with_json("generation_config.json", **BEYOND), "generation_config.json", "999", "51"),
    (with_json("generation_config.json", eos_token_id="a"), "generation_config.json", "'a'"),
    (with_json("generation_config.json", num_return_sequences=4), "generation_config.json", "num_return_sequences"),
):
    for command in WHOLE_RUNS:
        flag = "--base" if "merge" in command else "--model"
        refused(command, f"{flag} model", *named, files=PAIRS | {"model": make})
for content in (b'{"eos_token_id": [1', b"[]"):
    files = {
        "model": model_folder(lambda folder, content=content: (folder / "generation_config.json").write_bytes(content))
    }
    refused(WHOLE_RUNS[0], "--model model", "generation_config.json", files=files)
refused(
    "evaluate --rollout-backend hf --dataset rows.jsonl --model model --max-response-tokens 48",
    "--model model",
    "awq",
    files={"model": quantized("awq")},
)

for make, *named in (
    (adapters_with({}, keep=100), "adapter_model.safetensors"),
    (adapters_with({"base_model.model.lm_head.weight": torch.ones(52, 128)}), "base_model.model.lm_head.weight"),
    (adapters_with({f"{MORE}.lora_A.weight": torch.ones(2, 128)}), f"{MORE}.lora_A.weight"),
    (adapters_with({f"{LAYER}.lora_A.weight": torch.ones(2, 64)}), "--base model", "model.layers.0.mlp.up_proj", "64"),
    (adapters_with({}, use_rslora=True), "adapter_config.json", "use_rslora"),
    (adapters_with({}, use_dora=True), "adapter_config.json", "use_dora"),
    (adapters_with({}, alpha_pattern={"up_proj": 8}), "adapter_config.json", "alpha_pattern"),
    (adapters_with({}, base_model_name_or_path=None), "--base", "adapter_config.json"),
):
    refused("merge_lora adapters out", *named, files={"adapters": make, "model": model_folder()})

for pattern, keep in (
    ("model.safetensors", 100_000),
    ("model.safetensors", 50),
    ("model.safetensors", 0),
    ("model.safetensors", None),
    ("config.json", 100),
    ("config.json", None),
    ("tokenizer.json", 100),
    ("tokenizer.json", None),
    ("tokenizer*.json", None),
):
    refused(f"grpo --dataset rows.jsonl {OWN}", "--model model", files={"model": without(pattern, keep)})

TINY = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 64, "intermediate_size": 32}
for config in (
    transformers.BertConfig(**TINY),
    transformers.ModernBertConfig(**TINY),
    transformers.T5Config(d_model=32, num_layers=1),
    transformers.BartConfig(d_model=32, encoder_layers=1, decoder_layers=1),
):
    files = {"model": with_config(config)}
    refused(f"grpo --dataset rows.jsonl {OWN}", "--model model", config.model_type, files=files)
few = arithmetic.config()
few.vocab_size = 8
files = {"model": lambda folder: save_model(folder, few)}
refused(f"grpo --dataset rows.jsonl {OWN}", "--model model", "config.json", files=files)

for command in ("grpo --model model", "sft --model model", "dpo --model model", "evaluate --model model"):
    refused(command, "--model model", "pytorch_model.bin", files={"model": pickled}, code="pickle-refused")
for kind in ("model", "model-cpu", "model-sharded"):
    command = f"grpo --reward {kind}:model"
    refused(command, "--reward", "pytorch_model.bin", files={"model": pickled}, code="pickle-refused")
refused("train_reward_model --model model", "--model model", files={"model": pickled}, code="pickle-refused")

# A second model is refused under its own flag.
files = {"model": without("model.safetensors", 50)}
refused("opd --dataset rows.jsonl --teacher model", "--teacher model", files=files)


def other_tokens(folder: Path) -> None:
    """A model whose tokenizer has two of its tokens the other way round."""
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["0"], vocabulary["1"] = vocabulary["1"], vocabulary["0"]
    path.write_text(json.dumps(tokenizer))


files = {"model": model_folder(other_tokens)}
refused("opd --dataset rows.jsonl --teacher model", "--teacher model", "--model", "'0'", files=files)
refused("grpo --reward model:model", "--reward model:model", files={"model": model_folder()})  # it ranks nothing

# Data.


def bad_rows(content: bytes, *names: str, **more) -> None:
    refused("grpo --dataset rows.jsonl", *names, files={"rows.jsonl": content}, **more)


bad_rows(b"", "rows.jsonl")
bad_rows(b"\r\n\n", "rows.jsonl")
bad_rows(jsonl(GOOD, b"", b'{"question": "1'), "rows.jsonl:3", "column 14")
bad_rows(jsonl(GOOD, b"[1]"), "rows.jsonl:2", "list")
bad_rows(jsonl({"text": "1=", "answer": 2}), "rows.jsonl:1", '"prompt"', "text, answer", "--columns")
bad_rows(jsonl(GOOD, {**GOOD, "question": ""}), "rows.jsonl:2", '"question"')
bad_rows(jsonl({**GOOD, "question": "ABC"}), "rows.jsonl:1", "prompt")
bad_rows(jsonl(GOOD, {**GOOD, "answer": "about five"}), "rows.jsonl:2", '"about five"')
bad_rows(jsonl(GOOD, b'{"\xff'), "rows.jsonl:2", "byte 3")
bad_rows("\ufeff".encode("utf-16"), "rows.jsonl:1", "byte 1")
bad_rows(jsonl({**GOOD, "question": "1" * 70}), "rows.jsonl", "--max-prompt-tokens")
# Rows of one error are one line with three places. Of several errors the first five are quoted.
bad_rows(jsonl(*[{"answer": 2}] * 9), "rows.jsonl:1", "rows.jsonl:3", "6 more", lines=1)
bad_rows(jsonl(*[{f"other{n}": 2} for n in range(9)]), *(f"rows.jsonl:{n}" for n in range(1, 6)), "4 more", lines=6)
for value in ("\ud800", {"a": 1}, 3, None):
    bad_rows(jsonl(GOOD, {**GOOD, "question": value}), "rows.jsonl:2")
for value in ("x\ud800", [1], {}, None, True, "\x1b[J"):
    bad_rows(jsonl(GOOD, {**GOOD, "answer": value}), "rows.jsonl:2")

refused("grpo --dataset", "--dataset")
refused("grpo --dataset absent.jsonl", "absent.jsonl")
refused("grpo --dataset absent.parquet", "absent.parquet")
refused("grpo --dataset gsm8k:folder", "folder/train.jsonl")
refused("grpo --dataset arithmatic", "--dataset", "arithmatic", "arithmetic")
refused("grpo --dataset arithmetic=0", "--dataset", "arithmetic=0")
refused("grpo --dataset arithmetic arithmetic=2", "--dataset", "arithmetic")
refused(f"grpo --dataset http://user:{SECRET}@h/x", "--dataset")
folder = folder_with(train__jsonl=ROWS)
refused("grpo --dataset gsm8k:folder", "folder/train.jsonl:1", '"answer"', files={"folder": folder})
for rows, named in (
    ([GOOD, {"answer": "2"}], ("r.parquet:row 2", '"question"')),
    ([{"answer": "2"}], ("r.parquet:row 1", '"prompt"', "--columns")),
    ([], ("r.parquet",)),
):
    refused("grpo --dataset r.parquet", *named, files={"r.parquet": table(*rows)})
refused("grpo --dataset r.parquet", "r.parquet", "PARQUET", files={"r.parquet": b"PAR1" * 3})
refused("grpo --dataset rows.jsonl.gz", "rows.jsonl.gz")
refused("grpo --dataset r.json", "r.json", "str", files={"r.json": b'["1+1="]'})
refused("grpo --dataset folder", "folder", "README.md", files={"folder": folder_with(README__md=b"")})
files = {"folder": folder_with(state__json=b"{}", data__arrow=b"")}
refused("grpo --dataset folder", "folder", "save_to_disk", files=files)
refused("grpo --columns prompt=x", "--columns", "arithmetic")
refused("grpo --dataset rows.jsonl --columns gold=x", "--columns", "gold=x", "answer=COLUMN")
refused("grpo --dataset rows.jsonl --columns answer=meta.gold", "rows.jsonl:1", '"meta.gold"', "question")
refused("grpo --dataset rows.jsonl --eval-dataset e.jsonl", "e.jsonl")
refused("grpo --dataset rows.jsonl --eval-dataset maths", "--eval-dataset", "maths")
refused("grpo --dataset rows.jsonl --eval-dataset rows.jsonl e.jsonl", "e.jsonl")
refused("grpo --dataset rows.jsonl --eval-dataset rows.jsonl rows.jsonl", "--eval-dataset", "rows.jsonl")
refused("grpo --dataset rows.jsonl --eval-dataset a-b/r.jsonl a/b/r.jsonl", "a-b/r.jsonl", "a/b/r.jsonl")
refused("grpo --dataset suite:aime24", "--dataset suite:aime24", "test")
files = {"e.jsonl": jsonl({**GOOD, "answer": "two"})}
refused("grpo --dataset rows.jsonl --eval-dataset e.jsonl", "e.jsonl:1", "two", files=files)

refused("grpo --template t.txt", "--template", "t.txt")
for name, content, named in (
    ("t.txt", b"add", "{prompt}"),
    ("t.txt", b"\xff", "byte 1"),
    ("t.json", b"[\n{]", "line 2, column 2"),
    ("t.json", b'[{"role": "user"}]', "content"),
    ("t.json", b'[{"role": "user", "content": "{prompt}"}]', "--model"),  # it has no chat template
):
    refused(f"grpo --template {name}", name, named, files={name: content})
chat = jsonl({"prompt": [{"role": "system", "content": "Add."}, {"role": "user", "content": "1+1="}], "answer": "2"})
files = {"rows.jsonl": chat, "t.txt": b"{prompt}"}
refused("grpo --dataset rows.jsonl --template t.txt", "rows.jsonl:1", "--template", files=files)

unsolved = {"rows.jsonl": jsonl(GOOD, {"prompt": "1+1=", "answer": "2"})}
refused("sft --dataset rows.jsonl", "rows.jsonl:2", '"solution"', '"response"', files=unsolved)
refused("sft --dataset rows.jsonl --max-tokens 3", "3 tokens")
USER = {"role": "user", "content": "1+1="}
REPLY = {"role": "assistant", "content": "2"}
for row, column in (
    ({"prompt": "1+1=", "chosen": "2"}, "rejected"),
    ({**PAIR, "chosen": 2}, "chosen"),
    ({**PAIR, "chosen": [USER]}, "chosen"),
    ({**PAIR, "rejected": [{"role": "system", "content": "Add."}, USER, REPLY]}, "rejected"),
    ({"prompt": "2+2=", "chosen": [USER, REPLY], "rejected": [USER, REPLY]}, "chosen"),
    ({"chosen": "2", "rejected": "3"}, "chosen"),
):
    refused(PAIR_FILE, "pairs.jsonl:2", f'"{column}"', files={"pairs.jsonl": jsonl(PAIR, row)})
refused(PAIR_FILE, "--dataset pairs.jsonl", files={"pairs.jsonl": jsonl({**PAIR, "rejected": "2"})})
for row, column in (({"prompt": "1"}, "chosen"), ({**PAIR, "rejected": 2}, "rejected")):
    files = {"pairs.jsonl": jsonl(row)}
    refused("train_reward_model --dataset pairs.jsonl", "pairs.jsonl:1", f'"{column}"', files=files)
refused("train_reward_model --held-out 99999", "--held-out", "--batch-size")

# Rewards.

refused("grpo --reward gsm8", "--reward", '"gsm8"', "gsm8k")
refused("grpo --reward gsm8k=1 gsm8k=2", "--reward", "gsm8k")
refused("grpo --reward gsm8k=0 format=0", "--reward")
refused("grpo --reward gsm8k format --reward repetition", "--reward", "2 times")
refused("grpo --dataset arithmetic --eval-dataset=rows.jsonl --eval_dataset arithmetic", "--eval-dataset", "2 times")
refused("sft --dataset rows.jsonl --dataset arithmetic", "--dataset", "2 times")
refused("grpo --reward gsm8k,format", "--reward", "gsm8k format")
refused("grpo --reward mine.py", "--reward mine.py", "mine.py:score", files={"mine.py": b""})
refused("grpo --reward overlong:16:48", "--reward", "overlong:MAX:CACHE")
refused("grpo --dataset rows.jsonl --reward environment", "--reward environment", "--environment")
for name in ("absent.py:score", "absent.json"):
    refused(f"grpo --reward {name}", "--reward", name.split(":")[0])
refused("grpo --reward model:/nowhere", "--reward model:/nowhere")
refused("grpo --reward http://127.0.0.1:9", "--reward http://127.0.0.1:9")
refused("grpo --reward http://127.0.0.1:9", "REWARD_TOKEN", variables={"REWARD_TOKEN": "\u00f6"})
refused("grpo --reward w.json", "w.json", "gsm8k", files={"w.json": b'{"gsm8k": "x"}'})
for url in (f"http://u:{SECRET}@h:1", f"htp://u:{SECRET}@h:1", f"http://h:9/?key={SECRET}", f"http://h:9#{SECRET}"):
    refused(f"grpo --reward {url}", "--reward")
twice = f"http://u:{SECRET}@h:1"
refused(f"grpo --reward {twice} {twice}", "--reward")
for name in ("gsm8k", "gsm8k-strict", "math", "math-flexible", "dapo", "dapo-lenient"):
    flags = f"format=0.1 {name}" if name == "math" else name
    files = {"rows.jsonl": jsonl({"prompt": "1+1=", "label": 2})}
    refused(f"grpo --dataset rows.jsonl --reward {flags}", "rows.jsonl:1", '"answer"', f"--reward {name}", files=files)

MINE = "grpo --prompts-per-step 4 --reward mine.py:score"
UNANSWERED = jsonl({"prompt": "1+1="}, {"prompt": "2+2="})
for body, named in (
    ("return [float(item.answer == item.response) / 0 for item in items]", ("ZeroDivisionError", "line 2")),
    ("return [item.text for item in items]", ("AttributeError", "line 2")),
    ("return [float(item.answer.strip() == item.response) for item in items]", ("'NoneType'", "line 2")),
    ("import time; time.sleep(1000)", ("timeout",)),
    ("import os; os._exit(0)", ("exit status 0",)),
    ("return 1.0", ("float",)),
    ("return [1.0]", ("1 results",)),
    ("return ['right' for item in items]", ("'right'",)),
    ("return [None for item in items]", ("'None'",)),
    ("return [float('nan') for item in items]", ("nan",)),
):
    code = f"def score(items, lengths, truncated):\n    {body}\n".encode()
    files = {"mine.py": code, "rows.jsonl": UNANSWERED}
    refused(f"{MINE} --dataset rows.jsonl", "mine.py:score", *named, files=files, lines=0)
refused(f"{MINE} --dataset rows.jsonl --dry-run", "mine.py:score", "nan", files=files, lines=0)
for source, named in (
    ("def score(items): return [1.0] * len(items)", "3"),
    ("def score(*, items): return []", "3"),
    ("def grade(items, lengths, truncated): return []", '"score"'),
    ("score = 5", '"score"'),
    ("def score(items, lengths, truncated) return []", "SyntaxError"),
    ("import a_module_that_is_missing", "a_module_that_is_missing"),
):
    files = {"mine.py": source.encode()}
    refused(f"{MINE} --dataset rows.jsonl", "--reward", "mine.py", named, files=files, lines=0)

for name in ("calculater", "gone.py:Game", "letters.py"):
    refused(f"grpo --environment {name}", "--environment", name.split(":")[0])
plain = b"""from common.rollout.environments import Environment, Step
class Plain(Environment):
    def step(self, text):
        return Step(done=True)
class Breaks(Environment):
    def step(self, text):
        return 1 / 0
"""
for flags, named in (
    ("plain.py:Plain", ("--environment", "--reward")),  # nothing scores
    ("plain.py:Breaks --reward gsm8k", ("--environment", "ZeroDivisionError")),
    ("plain.py:Gone --reward gsm8k", ("plain.py", '"Gone"')),
):
    files = {"plain.py": plain}
    refused(f"grpo --dataset rows.jsonl --environment {flags}", *named, files=files, lines=0)

# The run directory.

for run_dir in ("file", "file/below", "file/far/below", "/proc/run", "/proc/self/fd/run/deep"):
    refused(f"grpo --run-dir {run_dir}", f"--run-dir {run_dir}", files={"file": b""})
refused("grpo --run-dir file --dry-run", "--run-dir file", files={"file": b""})
refused("grpo --run-dir run", "--run-dir", "--resume auto", files={"run": folder_with(metrics__jsonl=b"")})
refused("grpo --resume auto", "--resume auto", "--run-dir")
for resume in ("empty", f"http://user:{SECRET}@h"):
    refused(f"grpo --resume {resume}", "--resume", "state.json", files={"empty": Path.mkdir})

TWO, TEN = "run/checkpoints/step_000002", "run/checkpoints/step_000010"
saved = {f"{TWO}/state.json": checkpoint_of(2)}
both = saved | {f"{TEN}/state.json": checkpoint_of(10)}
refused(f"grpo --run-dir run --resume {TWO}", "--resume", "--run-dir", "step_000010", files=both)
unfinished = {f"{TWO}.unfinished/state.json": checkpoint_of(2)}
refused(f"grpo --resume {TWO}.unfinished", "--resume", files=unfinished)
refused(f"grpo --steps 2 --warmup-steps 1 --resume {TWO}", "--steps", "--resume", files=saved)
lost = both | {f"{TEN}/state.json": checkpoint_of(10, files={"model/config.json": 5})}
refused("grpo --run-dir run --resume auto", "model/config.json", "step_000002", files=lost, code="checkpoint-damaged")
short = lost | {f"{TEN}/model/config.json": b"{}"}
refused("grpo --run-dir run --resume auto", "model/config.json", "5", files=short, code="checkpoint-damaged")

of_run = {f"{TWO}/model/config.json": b"{}", f"{TEN}/model/config.json": b"{}"}
refused("grpo --model run", "--model run", "config.json", f"{TEN}/model", files=of_run)  # a run in place of its model

for content in (
    b'{"step": "../../x"}',
    b'{"step": -1}',
    b'{"step": NaN}',
    b'{"step": ' + b"9" * 5000 + b"}",
    b"{}",
    b"[2]",
    b"",
    b"[" * 100_000,
    b"\xff",
    b'{"step": "\\u001b[2J"}',
    checkpoint_of(2, fresh="policy"),
    checkpoint_of(2, ranks="1"),
    checkpoint_of(2, position=-3),
    checkpoint_of(2, reward={"weights": {"gsm8k": "x"}, "first_step": 1}),
    checkpoint_of(2, **{"eval/accuracy": "best"}),
    checkpoint_of(2, weight_version=[1]),
    checkpoint_of(2, data=5),
    checkpoint_of(2, unknown=1),
):
    files = {f"{TWO}/state.json": content}
    refused("grpo --run-dir run --resume auto", f"{TWO}/state.json", files=files, code="checkpoint-damaged")

for content in (
    b"",
    b"[]",
    b"{}",
    b'{"args": []}',
    b"[" * 100_000,
    b'{"args": {"model": ["x"]}}',
    b'{"algorithm": "\\u001b[2J", "args": ',
):
    refused("grpo --dataset rows.jsonl --run-dir run", "run/run.json", files={"run/run.json": content})
for content, named in (
    (run_json("rloo"), "rloo.py"),
    (run_json("\x1b[2J"), "grpo.py"),
    (run_json(seed=1), "--seed"),
    (run_json(source={"template": "t"}), "--template"),
    (run_json(schedule="linear", steps=3), "--steps"),  # the learning rate of each step depends on the last one
    (run_json(old_flag=1), "--old-flag"),
):
    files = {"run/run.json": content}
    refused("grpo --dataset rows.jsonl --run-dir run", "--run-dir run", named, files=files, code="run-changed")
for command in ("sft --dataset rows.jsonl", "dpo --dataset pairs.jsonl"):
    files = PAIRS | {"run/run.json": run_json(command.split()[0], seed=1)}
    refused(f"{command} --run-dir run", "--run-dir run", "--seed", files=files, code="run-changed")

# The model has 256 positions. Each of these has one prompt that leaves too few of them.
longer = {"e.jsonl": jsonl({**GOOD, "question": "11111+1="})}
refused(
    "grpo --dataset rows.jsonl --eval-dataset e.jsonl --max-response-tokens 250", "--max-response-tokens", files=longer
)
refused("dpo --dataset pairs.jsonl --max-response-tokens 300", "--max-response-tokens", files=PAIRS)

# JSON lines, whoever reads them.

ROLLOUT = dict.fromkeys(traces.KEYS, "")
for bad in (
    b'{"a": "\0"}',
    b'{"\\u001b]0;title\\u0007": []}',
    b'{"step": "' + b"x" * 10 * 2**20 + b'"}',
    b"[" * 100_000,
    b'{"a": "\\ud800", "step": []}',
    b'{"step": ' + b"9" * 5000 + b"}",
    b'{"step": -Infinity}',
    '{"step": 1}'.encode("utf-16"),
):
    bad_rows(jsonl(GOOD, bad), "rows.jsonl:2")
    refused("view_rollouts step.jsonl", "step.jsonl:2", files={"step.jsonl": jsonl(ROLLOUT, bad)})
    files = saved | {"run/metrics.jsonl": jsonl({"step": 1}, bad, {"step": 3})}
    refused("grpo --run-dir run --resume auto", "run/metrics.jsonl:2", files=files, code="metrics-corrupt")

# The folders and files of other scripts.

MODEL = {"model": model_folder()}
adapters = folder_with(adapter_config__json=b"{}")
for output, flags, files in (
    ("file/deep", "", {"file": b""}),
    ("model", "--model model", MODEL),
    ("adapters", "", {"adapters": adapters}),
    ("model", f"--model {arithmetic.WARM_START} --lora-rank 2", MODEL),
):
    refused(f"sft --dataset rows.jsonl --output {output} {flags}", f"--output {output}", files=files)

refused("plan --model model --response-mean 2000", "--response-mean", "--max-response-tokens", files=MODEL)
refused("plan --model x --group-size 0", "--group-size")
refused("plan --model no/such/model", "--model no/such/model")
refused("plan --model model --teacher no/such/model", "--teacher no/such/model", files=MODEL)
refused("merge_lora model out", "model", "adapter_config.json", files={"model": Path.mkdir})
refused("merge_lora model out", "out", files={"model": adapters, "out": Path.mkdir})
for flag in ("--save-right", "--save-pairs"):
    refused(f"evaluate --model x {flag} rows", flag, "--n")
    refused(f"evaluate --model x --n 2 {flag} absent/rows", "absent/rows")
    refused(f"evaluate --model {arithmetic.WARM_START} --n 2 {flag} rows --environment calculator", flag)
refused("evaluate", "--model", "--compare")
refused("evaluate --model x --compare a b", "--model", "--compare")
refused("evaluate --compare a.json b.json", "a.json")
refused("evaluate --model x --output absent/rows", "absent/rows")
refused("evaluate --model x --suite aime23", "--suite aime23", "aime24", files=MODEL)
refused("evaluate --model model --suite aime24:absent.jsonl", "absent.jsonl", files=MODEL)
for flags, named in (
    ("--dataset gsm8k", "--dataset"),
    ("--split train", "--split"),
    ("--columns answer=a", "--columns"),
    ("--environment calculator", "--environment"),
    ("--n 2 --save-right rows", "--save-right"),
    ("--n 2 --save-pairs rows", "--save-pairs"),
):
    refused(f"evaluate --model x --suite math {flags}", "--suite", named)
for flags, named in (
    ("--reward gsm9k", "gsm8k"),
    ("--threads 0", "--threads"),
    ("--port 70000", "--port"),
    ("--reward repetition", "--reward repetition"),
    ("--reward environment", "--reward environment"),
    ("--reward model-sharded:x", "--reward model-sharded:x"),
):
    refused(f"serve_reward {flags}", named)
refused("variants nothing mine.py", '"nothing"', "sapo")
refused("variants sapo mine.py", '"mine.py"', files={"mine.py": b""})
refused("variants sapo mine.py absent.py", "absent.py")
refused("report run", "metrics.jsonl", files={"run": Path.mkdir})
refused("selftest --dtype auto algos/mine.py", "algos/mine.py")
refused("selftest mine.py", "mine.py", "Flags", files={"mine.py": (ROOT / "algos/sft.py").read_bytes()})
for source in (b"Args = 3\n", b"def main(args): pass\n"):
    refused("selftest mine.py", "mine.py", "Args", "main", files={"mine.py": source})
refused("selftest absent.py", "absent.py")

STEPS = {"run/rollouts/step_000007.jsonl": jsonl(ROLLOUT)}
lacks = {key: value for key, value in ROLLOUT.items() if key != "advantage"}
refused("view_rollouts run", "rollouts", files={"run": Path.mkdir})
refused("view_rollouts run --step 3", "--step", "7", "--rollouts-every", files=STEPS)
refused("view_rollouts run --html absent/page.html", "--html", "absent", files=STEPS)
refused("view_rollouts run --color value", "--color", "step_000007.jsonl", files=STEPS)
refused("view_rollouts step.jsonl", "step.jsonl", files={"step.jsonl": b""})
refused("view_rollouts step.jsonl", "step.jsonl:2", "'advantage'", files={"step.jsonl": jsonl(ROLLOUT, lacks)})
refused("replay run --step 0", "--step", files={"run": Path.mkdir})
refused("replay run --step 1", "run.json", files={"run": Path.mkdir})
METRICS = {"run/metrics.jsonl": jsonl({"step": 1})}
refused("replay run --step 9", "--step", files=METRICS | {"run/run.json": b'{"file": "algos/grpo.py", "args": {}}'})
refused("gpu_check --only nothing", "--only", "nothing", "engine")


def from_elsewhere(path: Path) -> None:
    """A run.json that names a file beside the run, which would leave a trace if it ran."""
    evil = path.parent / "evil.py"
    evil.write_text(f"open({str(path.parent / 'ran')!r}, 'w')\n")
    path.write_text(json.dumps({"file": str(evil), "args": {}}))


def from_file(name: str) -> bytes:
    return json.dumps({"file": name, "args": {}}).encode()


for content in (from_elsewhere, from_file("algos/../scripts/report.py"), from_file("algos/absent.py")):
    files = METRICS | {"run/run.json": content}
    refused("replay run --step 1", "run/run.json", "algos/", "--file", files=files)


def files_in(folder: Path) -> set[Path]:
    """All files, except for those that Python makes when it imports one."""
    return {path for path in folder.rglob("*") if "__pycache__" not in path.parts}


def label(row: Refusal) -> str:
    return f"{row.command[:70]}: {row.names[-1]}"


@pytest.mark.parametrize("row", TABLE, ids=label)
def test_bad_input_is_refused_by_name(row, start, tmp_path, monkeypatch, capsys):
    for name, content in row.files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if callable(content):
            content(path)
        else:
            path.write_bytes(content)
    for name, value in row.variables.items():
        monkeypatch.setenv(name, value)
    capsys.readouterr()  # the progress bar of a saved model

    began = time.perf_counter()
    exit_code = start(row.command)
    seconds = time.perf_counter() - began

    code, said = re.fullmatch(r"error\[([\w-]+)\]: (.*)\n", capsys.readouterr().err, re.DOTALL).groups()
    assert (exit_code, code) == (2, row.code)
    for name in row.names:
        assert re.search(rf"(?<![\w-]){re.escape(name)}(?![\w-])", said), f"{name} is not named: {said}"
    assert not row.lines or said.count("\n") + 1 == row.lines
    assert SECRET not in said and len(said) < 5000 and not HARMFUL.search(said)
    assert seconds < 120  # nothing hangs; a worker process on a busy machine takes 15 s to start


@pytest.fixture
def start(tmp_path, monkeypatch):
    """Run a command line in this process and in an empty folder; returns its exit code. It may load no model, and may
    not leave a file behind.
    """
    monkeypatch.chdir(tmp_path)
    for module, function in ((placement, "init"), (model, "load"), (engines, "start"), (uvicorn, "run")):
        monkeypatch.setattr(module, function, lambda *a, **k: pytest.fail("went on"))
    # The same on every machine: three cores, no GPU. And a user's reward has 3 s for a response, not 20.
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1, 2})
    monkeypatch.setattr(UserReward.__init__, "__defaults__", (0, 3.0))

    def start(command: str) -> int:
        script, *flags = shlex.split(command)
        path = ROOT / ("algos" if script in ALGORITHM_FILES else "scripts") / f"{script}.py"
        monkeypatch.setattr(sys, "argv", [str(path), *flags])
        monkeypatch.syspath_prepend(path.parent)  # scripts import each other
        before = files_in(tmp_path)
        exit_code = 0
        try:
            runpy.run_path(str(path), run_name="__main__")
        except SystemExit as left:
            exit_code = left.code
        assert files_in(tmp_path) == before
        return exit_code

    return start


@pytest.mark.parametrize("command", [*ALGORITHM_FILES, f"grpo {OWN}", MINE])
def test_a_dry_run_of_what_the_rows_change_is_in_order(command, start, tmp_path, capsys):
    """A row that is refused for another reason than its own would prove nothing."""
    (tmp_path / "rows.jsonl").write_bytes(jsonl(GOOD | PAIR))
    (tmp_path / "mine.py").write_text("def score(items, lengths, truncated):\n    return [1.0 for item in items]\n")
    model_folder()(tmp_path / "model")
    assert start(f"{command} --dataset rows.jsonl --dry-run") == 0
    assert capsys.readouterr().out
