"""Bad input is refused in words that name it, with exit code 2, in seconds, before a model is loaded."""

import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import time

import pyarrow
import pytest
import torch
import transformers
from conftest import ROOT, launch, save_model
from helpers import checkpoint_state
from pyarrow import parquet
from safetensors.torch import load_file, save_file

from algos import cispo, dapo, dr_grpo, grpo, gspo, max_rl, opd, ppo, prime, reinforce_pp, rloo, sft
from common import errors, placement
from common.data import arithmetic
from common.data import prompts as data
from common.preflight import checks
from common.preflight.flags import Saving
from common.rewards.workers import UserReward
from common.trainer import model
from common.trainer.batching import Compute

CASES = [  # flags of grpo.Args -> what the message must say, in one line
    ({"group_size": 1}, "--group-size 1: a group of one"),
    ({"prompts_per_step": 10}, "--prompts-per-step 10 is not a multiple of --mini-batches 4 x 1 ranks = 4"),
    ({"rollout_tp": 3}, "--rollout-tp 3 does not divide the 1 ranks"),
    ({"compute": Compute(sequence_parallel=2)}, "--sequence-parallel 2 does not divide the 1 ranks"),
    ({"compute": Compute(shard_size=2)}, "--shard-size 2 does not divide the 1 ranks"),
    ({"reward": ("gsm8",)}, 'unknown reward "gsm8" (did you mean gsm8k?)'),
    ({"reward": ("absent.py:score",)}, "absent.py: file not found"),
    ({"model": "./no/such/folder"}, "--model ./no/such/folder: no such folder"),
    ({"model": "no-such-org/no-such-model"}, "--model no-such-org/no-such-model: neither a folder nor loadable from"),
    ({"model": "empty"}, "--model empty: the folder has no config.json"),
    ({"saving": Saving(resume="empty")}, "no complete checkpoint there (state.json is missing)"),
    ({"saving": Saving(resume="auto")}, "--resume auto: needs --run-dir"),
    ({"run_dir": "run"}, "holds a run already; --resume auto goes on with it"),
    ({"max_response_tokens": 300}, "--max-response-tokens 300: with prompts of up to 6 tokens that is 306"),
]

GOOD = {"question": "1+1=", "answer": "2"}
CURE = "; --columns prompt=COLUMN if another column holds it"


def lines(*rows) -> bytes:
    """The bytes of a JSONL file; a row is an object, or a line as it stands."""
    return b"".join((row if isinstance(row, bytes) else json.dumps(row).encode()) + b"\n" for row in rows)


def table(*rows: dict) -> bytes:
    """The bytes of a Parquet file."""
    sink = pyarrow.BufferOutputStream()
    parquet.write_table(pyarrow.Table.from_pylist(list(rows)), sink)
    return sink.getvalue().to_pybytes()


JSONL = [  # content of rows.jsonl -> all of the message
    (b"", "rows.jsonl: contains no rows"),
    (b"\r\n\n", "rows.jsonl: contains no rows"),
    (lines(GOOD, b"", b'{"question": "1'), "rows.jsonl:3: invalid JSON at column 14: Unterminated string starting at"),
    (lines(GOOD, b"[1]"), "rows.jsonl:2: expected an object, got list"),
    (
        lines({"text": "1=", "answer": 2}),
        'rows.jsonl:1: missing key "prompt" (found: text, answer); --columns prompt=COLUMN if another column holds it',
    ),
    (lines(GOOD, {**GOOD, "question": None}), 'rows.jsonl:2: "question" must be a non-empty string, got null'),
    (lines(GOOD, {**GOOD, "question": ""}), 'rows.jsonl:2: "question" must be a non-empty string, got ""'),
    (lines({**GOOD, "question": "ABC"}), "rows.jsonl:1: the prompt has no token that the tokenizer knows"),
    (lines(GOOD, {**GOOD, "answer": [2]}), 'rows.jsonl:2: "answer" must be a string or a number, got [2]'),
    (lines(GOOD, {**GOOD, "answer": "about five"}), 'rows.jsonl:2: gold answer "about five" is not a number'),
    (lines(GOOD, b'{"\xff'), "rows.jsonl:2: not valid UTF-8 at byte 3"),
    ("\ufeff".encode("utf-16"), "rows.jsonl:1: not valid UTF-8 at byte 1"),
    (
        lines(*[{"answer": 2}] * 9),
        "\n".join(f'rows.jsonl:{n}: missing key "prompt" (found: answer){CURE}' for n in range(1, 6))
        + "\n... and 4 more",
    ),
]

OTHERS = [  # files, --dataset, fields of data.TrainSource -> all of the message, or its beginning up to "..."
    ({}, "rows.jsonl", {}, "rows.jsonl: file not found"),
    ({}, "rows.parquet", {}, "rows.parquet: file not found"),
    ({}, "gsm8k:folder", {}, "folder/train.jsonl: file not found"),
    ({"folder/train.jsonl": lines(GOOD)}, "gsm8k:folder", {}, 'folder/train.jsonl:1: no "####" in "answer"'),
    (
        {"r.parquet": table(GOOD, {"answer": "2"})},
        "r.parquet",
        {},
        'r.parquet:row 2: "question" must be a non-empty string, got null',
    ),
    (
        {"r.parquet": table({"answer": "2"})},
        "r.parquet",
        {},
        f'r.parquet:row 1: missing key "prompt" (found: answer){CURE}',
    ),
    ({"r.parquet": table()}, "r.parquet", {}, "r.parquet: contains no rows"),
    ({"r.parquet": b"PAR1" * 3}, "r.parquet", {}, "r.parquet: cannot be read as PARQUET: ..."),
    (
        {},
        "arithmatic",
        {},
        '--dataset "arithmatic": expected arithmetic, sums, gcd, reverse, maze, calculator, guess, '
        "squares, gsm8k, gsm8k:FOLDER, math, dapo, geo3k, reasoning-gym:TASK, "
        "a .jsonl, .json, .csv, .tsv, .parquet file or a folder of them, or owner/name[:CONFIG][@SPLIT]",
    ),
    ({}, "arithmetic=0", {}, '--dataset "arithmetic=0": expected a weight > 0'),
    ({}, "arithmetic arithmetic=2", {}, '--dataset: "arithmetic" is named twice'),
    ({}, "", {}, "--dataset: names no data set"),
    ({}, "arithmetic", {"columns": ("prompt=x",)}, "--columns: arithmetic is built in, and its columns are known"),
    (
        {"r.jsonl": lines(GOOD)},
        "r.jsonl",
        {"columns": ("gold=x",)},
        '--columns "gold=x": expected prompt=COLUMN, answer=COLUMN, solution=COLUMN, images=COLUMN, '
        "chosen=COLUMN, rejected=COLUMN, each once",
    ),
    (
        {"r.jsonl": lines(GOOD)},
        "r.jsonl",
        {"columns": ("answer=meta.gold",)},
        'r.jsonl:1: missing key "meta.gold" (found: question, answer)',
    ),
    ({}, "arithmetic", {"template": "t.txt"}, "--template t.txt: file not found"),
    (
        {"t.txt": b"add"},
        "arithmetic",
        {"template": "t.txt"},
        "t.txt: {prompt} is nowhere in it, where each prompt goes",
    ),
    ({"t.txt": b"\xff"}, "arithmetic", {"template": "t.txt"}, "t.txt: not valid UTF-8 at byte 1"),
    ({"t.json": b"[\n{]"}, "arithmetic", {"template": "t.json"}, "t.json: invalid JSON at line 2, column 2: ..."),
    (
        {"t.json": b'[{"role": "user"}]'},
        "arithmetic",
        {"template": "t.json"},
        't.json: expected a list of {"role": ..., "content": ...} messages',
    ),
    (
        {"t.json": b'[{"role": "user", "content": "{prompt}"}]'},
        "arithmetic",
        {"template": "t.json"},
        "--template t.json: messages, and --model has no chat template; give it a text file",
    ),
    (
        {"r.jsonl": lines({**GOOD, "question": "1" * 70})},
        "r.jsonl",
        {},
        "r.jsonl: all 1 prompts are longer than --max-prompt-tokens 64",
    ),
    ({}, "arithmetic", {"eval_dataset": "e.jsonl"}, "e.jsonl: file not found"),
    ({}, "arithmetic", {"eval_dataset": "maths"}, '--eval-dataset "maths": expected arithmetic, ...'),
    (
        {"e.jsonl": lines({**GOOD, "answer": "two"})},
        "arithmetic",
        {"eval_dataset": "e.jsonl"},
        'e.jsonl:1: gold answer "two" is not a number',
    ),
]
DATA_CASES = [({"rows.jsonl": content}, "rows.jsonl", {}, message) for content, message in JSONL] + OTHERS


OWN_CASES = [  # algorithm, its own flags -> what the message must say
    (dr_grpo, {"group_size": 1}, "--group-size 1: a group of one"),
    (max_rl, {"group_size": 1}, "--group-size 1: a group of one"),
    (gspo, {"group_size": 1}, "--group-size 1: a group of one"),
    (cispo, {"group_size": 1}, "--group-size 1: a group of one"),
    (reinforce_pp, {"group_size": 1, "baseline": "group"}, "--baseline group needs >= 2"),
    (opd, {"teacher": ""}, "--teacher: name a model to learn from"),
    (rloo, {"group_size": 1}, "--group-size 1: a group of one"),
    (dapo, {"group_size": 1}, "--group-size 1: a group of one"),
    (dapo, {"overlong_cache": 49}, "--overlong-cache 49 must be in [0, --max-response-tokens 48]"),
    (dapo, {"clip_dual": 1.1}, "--clip-dual 1.1 must be above 1 + --clip-high 0.28"),
    (dapo, {"reward": ("dapo=1",)}, "--reward dapo: its scores of -1 and 1 would become R = -3 and 1; use dapo=0.5"),
    (prime, {"reward": ("gsm8k=0", "dapo=0.5")}, "--reward dapo: PRIME learns from the first reward's right or wrong"),
    (ppo, {"critic_warmup_steps": 50}, "--critic-warmup-steps 50 leaves nothing of --steps 50"),
    (prime, {"group_size": 1}, "--group-size 1: a group of one"),
    (prime, {"accuracy_range": (0.9, 0.1)}, "--accuracy-range 0.9 0.1: the first is larger than the second"),
    (grpo, {"reward": ("model:/nowhere",)}, "--reward model:/nowhere: cannot be loaded"),
]


@pytest.fixture
def refused(tmp_path, monkeypatch, capsys):
    """Calls an algorithm as its command line does, in an empty folder; returns what it says as it leaves."""
    monkeypatch.chdir(tmp_path)
    for module, name in ((placement, "init"), (model, "load")):
        monkeypatch.setattr(module, name, lambda *a, **k: pytest.fail("went on to load a model"))

    def call(algorithm, **flags) -> str:
        began = time.perf_counter()
        with pytest.raises(SystemExit) as left:
            errors.launch(algorithm.main, algorithm.Args(**{**getattr(algorithm, "EMBEDDED", {}), **flags}))
        assert left.value.code == 2 and time.perf_counter() - began < 8
        said = capsys.readouterr().err
        assert said.startswith("error[bad-input]: ") and said.endswith("\n")
        return said[len("error[bad-input]: ") : -1]

    return call


@pytest.mark.parametrize("flags, message", CASES)
def test_refused_before_a_model_is_loaded(flags, message, tmp_path, models, refused):
    (tmp_path / "empty").mkdir()
    (tmp_path / "run").mkdir()
    (tmp_path / "run/metrics.jsonl").touch()
    said = refused(grpo, **{"model": models["untied"], **flags})
    assert message in said and "\n" not in said


@pytest.mark.parametrize("files, dataset, source, message", DATA_CASES, ids=[case[-1][:60] for case in DATA_CASES])
def test_bad_data_is_refused_in_these_words(files, dataset, source, message, tmp_path, models, refused):
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    said = refused(grpo, model=models["untied"], dataset=tuple(dataset.split()), source=data.TrainSource(**source))
    assert said.startswith(message[:-3]) if message.endswith(" ...") else said == message


@pytest.mark.parametrize("algorithm, flags, message", OWN_CASES)
def test_each_algorithm_refuses_its_own_flags(algorithm, flags, message, models, refused):
    said = refused(algorithm, model=models["untied"], **flags)
    assert message in said and "\n" not in said


def test_sft_refuses_data_without_solutions(tmp_path, refused):
    (tmp_path / "rows.jsonl").write_bytes(lines(GOOD))
    assert refused(sft, dataset=("rows.jsonl",)) == 'rows.jsonl:1: no "solution" or "response" to learn from'


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags, message",
    [
        (
            ["--dataset", "{rows}=2", "arithmetic", "--columns", "prompt=problem", "--model", "{untied}"],
            'rows.jsonl:1: missing key "problem" (found: question, answer)\n',
        ),
        (["--model", "no-such-org/no-such-model"], "--model no-such-org/no-such-model: neither a folder nor"),
        (["--group-size", "1"], "--group-size 1: a group of one"),
    ],
)
def test_the_command_line_says_it_in_one_line(flags, message, tmp_path, models):
    (tmp_path / "rows.jsonl").write_bytes(lines(GOOD))
    flags = [flag.format(rows=tmp_path / "rows.jsonl", **models) for flag in flags]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    result = launch(ROOT / "algos/grpo.py", *flags, check=False)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    # Of the processor: a busy machine takes longer by the clock. That nothing waits is measured in this process, above.
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 15
    assert result.returncode == 2 and message in result.stderr and "Traceback" not in result.stderr
    assert len([line for line in result.stderr.splitlines() if line.startswith("error")]) == 1


REWARDS = {  # body of score() in a user's file -> what is said
    "return [float(item.answer == item.response) / 0 for item in items]": "ZeroDivisionError: float division by zero",
    "return [item.text for item in items]": "AttributeError: 'Item' object has no attribute 'text'",
    "import time; time.sleep(1000)": "timeout: no answer within 4 s",
    "import os; os._exit(0)": "died: exit status 0",
    "return 1.0": "expected 2 results, got float",
    "return [1.0]": "returned 1 results for 2 items",
    "return ['right' for item in items]": "expected a number or a Result, got 'right', str",
    "return [None for item in items]": "expected a number or a Result, got 'None', NoneType",
    "return [float('nan') for item in items]": " is nan, for prompt",
    "return [float(item.answer.strip() == item.response) for item in items]": "'NoneType' object has no attribute",
}


@pytest.mark.parametrize("body, message", REWARDS.items())
@pytest.mark.parametrize("dry_run", [False, True])
def test_a_reward_is_tried_before_a_model_is_loaded(body, message, dry_run, tmp_path, refused, monkeypatch):
    """On two prompts, of which the last of these rewards reads answers that the data does not have."""
    monkeypatch.setattr(UserReward.__init__, "__defaults__", (0, 2.0))  # seconds a response; a user would wait for 20 s
    (tmp_path / "mine.py").write_text(f"def score(items, lengths, truncated):\n    {body}\n")
    (tmp_path / "rows.jsonl").write_bytes(lines({"prompt": "1+1="}, {"prompt": "2+2="}))
    began = time.perf_counter()
    flags = {"dataset": ("rows.jsonl",), "reward": ("mine.py:score",), "saving": Saving(dry_run=dry_run)}
    said = refused(grpo, **flags, prompts_per_step=4)
    assert message in said and "mine.py:score" in said and time.perf_counter() - began < 8
    if "Error" in message:
        assert f'File "{tmp_path}/mine.py", line 2' in said or 'mine.py", line 2, in score' in said
    assert len(re.findall("^Traceback", said, re.MULTILINE)) <= 1


@pytest.mark.parametrize(
    "file, message",
    [
        ("def score(items): return [1.0] * len(items)", "score() takes 1 positional argument but 3 were given"),
        ("def score(*, items): return []", "score() takes 0 positional arguments but 3"),
        ("def grade(items, lengths, truncated): return []", 'has no function "score"'),
        ("score = 5", 'has no function "score"'),
        ("def score(items, lengths, truncated) return []", "SyntaxError"),
        ("import a_module_that_is_missing", "ModuleNotFoundError: No module named 'a_module_that_is_missing'"),
    ],
)
def test_a_file_that_holds_no_reward_is_refused(file, message, tmp_path, refused):
    (tmp_path / "mine.py").write_text(file + "\n")
    assert message in refused(grpo, reward=("mine.py:score",))


@pytest.mark.parametrize("reward", ["gsm8k", "gsm8k-strict", "math", "dapo", "dapo-lenient"])
@pytest.mark.parametrize("more", [(), ("format=0.1",)])
def test_a_reward_that_compares_needs_answers(reward, more, tmp_path, refused):
    (tmp_path / "rows.jsonl").write_bytes(lines({"prompt": "1+1=", "label": 2}))
    said = refused(grpo, dataset=("rows.jsonl",), reward=(*more, reward))
    assert said.startswith(f'rows.jsonl:1: no "answer" (found: prompt, label), which --reward {reward} compares with')


def without(name: str):
    return lambda tensors: {key: tensor for key, tensor in tensors.items() if key != name}


UP, NORM = "model.layers.0.mlp.up_proj.weight", "model.norm.weight"
WEIGHTS = [  # what is done to the tensors of a model's folder -> the message
    (without(UP), f"its weights have no {UP}"),
    (without("lm_head.weight"), "its weights have no lm_head.weight"),
    (
        lambda tensors: {**tensors, "model.layers.9.mlp.up_proj.weight": tensors[UP].clone()},
        "config.json describes no model.layers.9.mlp.up_proj.weight",
    ),
    (lambda tensors: {**tensors, NORM: torch.zeros(7)}, f"{NORM} is (7,) and should be (128,)"),
    (lambda tensors: {key: tensor for key, tensor in tensors.items() if "norm" in key}, "\n... and "),
]


@pytest.mark.parametrize("change, message", WEIGHTS)
def test_weights_that_are_not_the_models_are_named(change, message, tmp_path, models, refused):
    """transformers would initialize a missing tensor at random, and the run would train it."""
    folder = shutil.copytree(models["untied"], tmp_path / "model")
    save_file(change(load_file(folder / "model.safetensors")), folder / "model.safetensors", {"format": "pt"})
    said = refused(grpo, model=str(folder))
    assert said.startswith(f"--model {folder}: ") and message in said


@pytest.mark.parametrize(
    "file, size, message",
    [
        ("model.safetensors", 100_000, "its weights cannot be read, perhaps a copy was cut short: "),
        ("model.safetensors", 50, "its weights cannot be read, perhaps a copy was cut short: "),
        ("model.safetensors", 0, "its weights cannot be read, perhaps a copy was cut short: "),
        ("model.safetensors", None, "its weights cannot be read, perhaps a copy was cut short: Error no file named"),
        ("config.json", 100, "its files cannot be read: "),
        ("config.json", None, "the folder has no config.json"),
        ("tokenizer.json", 100, "its files cannot be read: "),
        ("tokenizer.json", None, "has no tokenizer"),
        ("tokenizer*.json", None, "has no tokenizer"),
    ],
)
def test_a_folder_with_a_broken_file_is_refused(file, size, message, tmp_path, models, refused):
    """size: bytes that are left of the file; None removes it."""
    folder = shutil.copytree(models["untied"], tmp_path / "model")
    for path in folder.glob(file):
        path.unlink() if size is None else os.truncate(path, size)
    said = refused(grpo, model=str(folder))
    assert said.startswith(f"--model {folder}: {message}") and "\n" not in said


TINY = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 64, "intermediate_size": 32}


@pytest.mark.parametrize(
    "config, why",
    [
        (transformers.GPT2Config(n_embd=32, n_layer=1, n_head=2), "layers unlike Llama's"),
        (
            transformers.OPTConfig(hidden_size=24, word_embed_proj_dim=24, ffn_dim=32, num_hidden_layers=1),
            "layers unlike Llama's",
        ),
        (transformers.BertConfig(**TINY), "layers unlike Llama's"),
        (transformers.ModernBertConfig(**TINY), "their encoder"),
        (transformers.T5Config(d_model=32, num_layers=1), "their encoder"),
        (transformers.MambaConfig(hidden_size=32, num_hidden_layers=1, state_size=4), "layers unlike Llama's"),
        (transformers.PhiConfig(**TINY), "a head with a bias"),
    ],
    ids=lambda value: getattr(value, "model_type", ""),
)
def test_an_architecture_that_cannot_be_packed_is_refused(config, why, tmp_path, models, refused):
    """In one line, before anything is loaded."""
    folder = shutil.copytree(models["untied"], tmp_path / "model")
    config.eos_token_id = 1
    config.save_pretrained(folder)
    said = refused(grpo, model=str(folder))
    assert f"{config.model_type} models are not supported, because of {why}" in said and "docs/models.md" in said
    assert "\n" not in said


def test_a_tokenizer_with_more_tokens_than_the_weights_is_refused(tmp_path, refused, capsys):
    config = arithmetic.config()
    config.vocab_size = 8
    folder = save_model(tmp_path / "model", config)
    capsys.readouterr()  # the progress bar of saving
    assert f"--model {folder}: its tokenizer has" in refused(grpo, model=folder)


RUN_DIRS = [  # --run-dir -> the message, where "file" is a file, and "closed" a folder that cannot be written to
    ("file", "file is a file"),
    ("file/below", "file is a file"),
    ("file/far/below", "file is a file"),
    ("/proc/run", "/proc cannot be written to"),
    ("/proc/self/fd/run/deep", "cannot be written to"),
]


@pytest.mark.parametrize("run_dir, message", RUN_DIRS)
@pytest.mark.parametrize("dry_run", [False, True])
def test_a_run_directory_that_cannot_be_written_is_refused(run_dir, message, dry_run, tmp_path, refused):
    (tmp_path / "file").touch()
    said = refused(grpo, run_dir=run_dir, saving=Saving(dry_run=dry_run))
    assert said.startswith(f"--run-dir {run_dir}: ") and message in said


def test_an_output_that_would_be_lost_or_mixed_is_refused(tmp_path, models, refused):
    """Before, sft.py met a file in its last step, and had no checkpoint yet."""
    (tmp_path / "file").touch()
    (tmp_path / "adapters").mkdir()
    (tmp_path / "adapters/adapter_config.json").write_text("{}")
    start, lora = models["untied"], {"compute": Compute(lora_rank=2)}
    whole = shutil.copytree(start, tmp_path / "whole")
    for output, more, said in (
        ("file/deep", {}, "file is a file"),
        (start, {}, "is --model, which would be overwritten"),
        ("adapters", {}, "holds adapters, and this run writes a whole model"),
        (str(whole), lora, "holds a whole model, and this run writes adapters"),
    ):
        assert refused(sft, model=start, output=output, **more).startswith(f"--output {output}: ")
        assert said in refused(sft, model=start, output=output, **more)


def test_fewer_held_out_prompts_than_ranks_are_refused_before_anything_is_loaded():
    checks.check_held_out([], 2)
    checks.check_held_out(["a", "b"], 2)
    with pytest.raises(errors.BadInput, match="1 prompts to evaluate on 2 ranks"):
        checks.check_held_out(["a"], 2)


@pytest.mark.parametrize("layout", ["plain", "chat"])
def test_a_dry_run_shows_a_whole_prompt(layout, tmp_path, models, capsys):
    folder = shutil.copytree(models["untied"], tmp_path / "model")
    if layout == "chat":
        template = "{% for m in messages %}{{ m.role }} {{ m.content }}\n{% endfor %}"
        template += "{% if add_generation_prompt %}a{% endif %}"
        (folder / "chat_template.jinja").write_text(template)
    (tmp_path / "rows.jsonl").write_bytes(lines({"prompt": "1+1=", "answer": "2"}))
    flags = {"model": str(folder), "dataset": (str(tmp_path / "rows.jsonl"),), "saving": Saving(dry_run=True)}
    grpo.main(grpo.Args(**{**grpo.EMBEDDED, **flags}))
    said = capsys.readouterr().out
    expected = {"plain": "1+1=", "chat": "user 1+1=\na"}[layout]
    assert f"the first prompt as the model reads it, {tmp_path}/rows.jsonl:1:\n{expected}\n" in said


def test_a_run_that_is_done_says_so(tmp_path, monkeypatch, capsys):
    """Nothing is loaded, and main() returns: the exit code is 0."""
    for module, name in ((placement, "init"), (model, "load")):
        monkeypatch.setattr(module, name, lambda *a, **k: pytest.fail("went on to load a model"))
    checkpoint = tmp_path / "run/checkpoints/step_000052"
    checkpoint.mkdir(parents=True)
    (checkpoint / "state.json").write_text(checkpoint_state(52))
    (tmp_path / "run/report.html").touch()
    resumed = {**grpo.EMBEDDED, "run_dir": str(tmp_path / "run"), "saving": Saving(resume="auto")}
    grpo.main(grpo.Args(**resumed))
    assert "run is done: step 52 of 52" in capsys.readouterr().out


@pytest.mark.slow
def test_ctrl_c_before_anything_is_trained_leaves_at_once(tmp_path):
    """While it imports Python may still print a traceback of its own; from the first line on there is none."""
    command = [sys.executable, str(ROOT / "algos/grpo.py"), "--rollout-backend", "hf", "--steps", "100000"]
    command += ["--run-dir", str(tmp_path / "run")]
    heard = lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)  # a shell's background jobs ignore it
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **pipes, preexec_fn=heard) as run:
        assert run.stdout.readline()
        run.send_signal(signal.SIGINT)
        _, said = run.communicate(timeout=120)  # a second, unless the machine is busy with something else
    assert run.returncode == 130
    assert "interrupted; nothing has been trained" in said and "Traceback" not in said
