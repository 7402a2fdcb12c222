"""What a start says before a model is loaded: a whole prompt, that a run is done, one line for bad input or Ctrl-C."""

import json
import resource
import shutil
import signal
import subprocess
import sys

import pytest
from conftest import ROOT, launch
from helpers import checkpoint_state

from algos import grpo
from common import placement
from common.data import arithmetic
from common.data.prompts import TrainSource
from common.errors import BadInput
from common.preflight import run_directory
from common.preflight.flags import Saving
from common.run import job
from common.trainer import model
from common.trainer.batching import Compute

GRPO = ROOT / "algos/grpo.py"


@pytest.mark.parametrize("layout", ["plain", "chat"])
def test_a_dry_run_shows_a_whole_prompt(layout, tmp_path, capsys):
    folder = shutil.copytree(arithmetic.WARM_START, tmp_path / "model")
    if layout == "chat":
        template = "{% for m in messages %}{{ m.role }} {{ m.content }}\n{% endfor %}"
        template += "{% if add_generation_prompt %}a{% endif %}"
        (folder / "chat_template.jinja").write_text(template)
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"prompt": "1+1=", "answer": "2"}))
    flags = {"model": str(folder), "dataset": (str(rows),), "saving": Saving(dry_run=True)}
    grpo.main(grpo.Args(**{**grpo.EMBEDDED, **flags}))
    expected = {"plain": "1+1=", "chat": "user 1+1=\na"}[layout]
    shown = capsys.readouterr().out
    assert f"\n{expected}\n" in shown and f"{rows}:1" in shown
    assert "a response ends with <eos> (1)" in shown


@pytest.mark.parametrize("last", [{}, {"eval/accuracy": 0.5}, None])
def test_a_run_that_is_done_says_so(tmp_path, monkeypatch, capsys, last):
    """Nothing is loaded, and main() returns: the exit code is 0. It says if the last evaluation is missing."""
    for module, name in ((placement, "init"), (model, "load")):
        monkeypatch.setattr(module, name, lambda *a, **k: pytest.fail("went on to load a model"))
    checkpoint = tmp_path / "run/checkpoints/step_000052"
    checkpoint.mkdir(parents=True)
    (checkpoint / "state.json").write_text(checkpoint_state(52))
    (tmp_path / "run/report.html").touch()
    resumed = {**grpo.EMBEDDED, "run_dir": str(tmp_path / "run"), "saving": Saving(resume="auto")}
    if last is not None:
        (tmp_path / "run/metrics.jsonl").write_text(json.dumps({"step": 52} | last) + "\n")
    grpo.main(grpo.Args(**resumed))
    said = capsys.readouterr().out
    assert f"{checkpoint}/model" in said
    assert ("not evaluated at its end" in said) == (last == {})


@pytest.mark.parametrize(
    "changes, words",
    [
        ({}, "evaluate.py --model m --dataset arithmetic --max-response-tokens 48"),
        (
            {"dataset": ("gsm8k=2", "mine.jsonl"), "reward": ("math=0.5", "mine.py:f"), "max_response_tokens": 512},
            "evaluate.py --model m --dataset gsm8k --reward math=0.5 mine.py:f --max-response-tokens 512",
        ),
        (
            {"source": TrainSource(eval_dataset=("a.jsonl", "b.jsonl"))},
            "evaluate.py --model m --dataset a.jsonl b.jsonl",
        ),
        ({"compute": Compute(lora_rank=4)}, "merge_lora.py m MERGED && python scripts/evaluate.py --model MERGED"),
        ({"environment": "guess"}, "--environment guess"),
    ],
)
def test_the_command_that_evaluates_a_run_measures_what_the_run_did(changes, words):
    assert words in job.evaluation_command(grpo.Args(**{**grpo.EMBEDDED, **changes}), "m")


@pytest.mark.parametrize("held_out, warned", [("a.jsonl", True), ("b.jsonl", False), ("arithmetic", False)])
def test_evaluation_on_rows_that_are_trained_on_is_a_warning(tmp_path, monkeypatch, capsys, held_out, warned):
    """Also if the texts are equal but the rows are not: in some tasks all questions are. A built-in has splits."""
    monkeypatch.chdir(tmp_path)
    for name in ("a.jsonl", "b.jsonl"):
        (tmp_path / name).write_text(json.dumps({"prompt": "1+1=", "answer": "2"}) + "\n")
    source = TrainSource(eval_dataset=(held_out,), eval_prompts=4)
    dataset = ("arithmetic",) if held_out == "arithmetic" else ("a.jsonl",)
    flags = {"dataset": dataset, "source": source, "saving": Saving(dry_run=True)}
    grpo.main(grpo.Args(**{**grpo.EMBEDDED, **flags}))
    assert ("warning[trained-on-evaluation]: 1 of 1" in capsys.readouterr().err) == warned


@pytest.mark.slow
def test_the_command_line_says_bad_input_in_one_line_and_at_once(tmp_path):
    """As a process of its own. The table of test_refusals.py has what is refused."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    result = launch(GRPO, "--dataset", tmp_path / "absent.jsonl", check=False)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    # Of the processor: a busy machine takes longer by the clock.
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 15
    assert result.returncode == 2 and "absent.jsonl" in result.stderr and "Traceback" not in result.stderr
    assert len([line for line in result.stderr.splitlines() if line.startswith("error")]) == 1


@pytest.mark.slow
def test_ctrl_c_before_anything_is_trained_leaves_at_once(tmp_path):
    """While it imports Python may still print a traceback of its own; from the first line on there is none."""
    command = [sys.executable, GRPO, "--rollout-backend", "hf", "--steps", "100000", "--run-dir", tmp_path / "run"]
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell's background jobs ignore it
    ) as run:
        assert run.stdout.readline()
        run.send_signal(signal.SIGINT)
        _, said = run.communicate(timeout=120)  # a second, unless the machine is busy with something else
    assert run.returncode == 130
    assert said.strip() and "Traceback" not in said


@pytest.mark.parametrize(
    "before, now, goes_on",
    [
        ("", (), True),
        ("e.jsonl", ("e.jsonl",), True),
        (["e.jsonl"], ("e.jsonl",), True),
        ("e.jsonl", (), False),
        ("e.jsonl", ("e.jsonl", "f.jsonl"), False),
        (["f.jsonl", "e.jsonl"], ("e.jsonl", "f.jsonl"), False),
    ],
)
def test_a_run_goes_on_that_began_when_a_flag_took_one_value(tmp_path, before, now, goes_on):
    """--eval-dataset was one text, and is several today. The first of them may mean the same."""
    recorded = {"algorithm": "grpo", "args": {"source": {"eval_dataset": before}}}
    (tmp_path / "run.json").write_text(json.dumps(recorded))
    args = grpo.Args(run_dir=str(tmp_path), source=TrainSource(eval_dataset=now))
    if goes_on:
        run_directory.check_configuration(args, "grpo")
    else:
        with pytest.raises(BadInput, match="--eval-dataset") as error:
            run_directory.check_configuration(args, "grpo")
        assert error.value.code == "run-changed"
