"""Chat templates that print the date: a run has one date, whichever day it is resumed on."""

import json
import shutil
from datetime import datetime, timedelta, timezone

import pytest
from conftest import ROOT, launch

from algos import grpo
from common.data import arithmetic, dates
from common.data.prompts import PromptLoader, Source, load
from common.data.templates import chat_text
from common.data.tokenizer import load_tokenizer
from common.errors import BadInput
from common.preflight import run_directory
from common.rewards.model import conversation
from common.run import directory

ASKED = [{"role": "user", "content": "1+1="}]
BODY = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
# As Llama 3.1 has it.
LLAMA = (
    "{%- if not date_string is defined %}{%- if strftime_now is defined %}"
    "{%- set date_string = strftime_now('%d %b %Y') %}{%- else %}{%- set date_string = '26 Jul 2024' %}"
    "{%- endif %}{%- endif %}{{ date_string }} "
)
TEMPLATES = [  # what it prints on the 1st of May 2026
    ("{{ strftime_now('%Y-%m-%d') }} " + BODY, "2026-05-01 1+1="),
    (LLAMA + BODY, "01 May 2026 1+1="),
    ("{% set today = strftime_now('%B %d, %Y') %}{{ today }} " + BODY, "May 01, 2026 1+1="),
    ("{% macro day() %}{{ strftime_now('%A') }}{% endmacro %}{{ day() }} " + BODY, "Friday 1+1="),
    ("{{ strftime_now('%H:%M:%S') }} " + BODY, "00:00:00 1+1="),
    ("{{ strftime_now('%d')|int + 1 }} " + BODY, "2 1+1="),
    # Nothing changes for a template without the date.
    (BODY, "1+1="),
    ("{{ bos_token }}" + BODY, "1+1="),
    ("{% if date_string is defined %}{{ date_string }}{% endif %}" + BODY, "1+1="),
    ("{{ 'now' }} " + BODY, "now 1+1="),
]


def with_template(template: str, day: str = ""):
    tokenizer = arithmetic.tokenizer()
    tokenizer.chat_template = template
    dates.set_date(tokenizer, day)
    return tokenizer


@pytest.mark.parametrize("template, expected", TEMPLATES)
def test_a_template_prints_the_date_of_the_run(template, expected):
    tokenizer = with_template(template, "2026-05-01")
    assert chat_text(ASKED, tokenizer).removeprefix(tokenizer.bos_token or "") == expected
    prints_it = "strftime_now" in template
    assert (dates.variables(tokenizer, template) != {}) == prints_it


def test_a_run_that_goes_on_after_midnight_keeps_its_date(monkeypatch):
    tokenizer = with_template(TEMPLATES[0][0])
    before = chat_text(ASKED, tokenizer)
    monkeypatch.setattr(dates, "today", lambda: "2031-01-01")
    assert chat_text(ASKED, tokenizer) == before and dates.date_of(tokenizer) != "2031-01-01"
    assert chat_text(ASKED, with_template(TEMPLATES[0][0])) == "2031-01-01 1+1="


def test_today_is_the_date_in_utc(monkeypatch):
    """Half an hour before midnight in New York, where this node may be."""

    class Clock(datetime):
        @classmethod
        def now(cls, tz=None):
            there = datetime(2026, 5, 1, 23, 30, tzinfo=timezone(timedelta(hours=-4)))
            return there.astimezone(tz) if tz else there.replace(tzinfo=None)

    monkeypatch.setattr(dates, "datetime", Clock)
    assert dates.today() == "2026-05-02"


@pytest.mark.parametrize("given, expected", [("2026-05-01", "2026-05-01"), ("", "2031-01-01")])
def test_run_json_has_the_date_that_it_is_given_or_todays(given, expected, world, monkeypatch):
    monkeypatch.setattr(dates, "today", lambda: "2031-01-01")
    assert directory.describe(grpo.Args(), "grpo", world, given)["date"] == expected
    tokenizer = with_template(BODY)
    del tokenizer.chat_date
    assert dates.date_of(tokenizer) == "2031-01-01"


def test_a_reward_model_reads_the_date_of_the_run():
    texts = [
        conversation(with_template("{{ strftime_now('%d') }}" + BODY, day), "1+1=", "2", True)
        for day in ("2026-05-01", "2026-05-02", "2026-05-01")
    ]
    assert texts[0] == texts[2] != texts[1]


@pytest.fixture
def dated_model(models, tmp_path):
    """A model whose chat template prints the date."""
    folder = tmp_path / "dated"
    shutil.copytree(models["untied"], folder)
    with_template("{{ strftime_now('%d') }}{% for m in messages %}{{ m['content'] }}{% endfor %}").save_pretrained(
        folder
    )
    return str(folder)


def test_the_fingerprint_of_the_data_does_not_depend_on_the_day(dated_model, tmp_path, monkeypatch):
    (tmp_path / "data.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n')
    prints = []
    for today, given in (("2026-05-01", ""), ("2026-05-02", "2026-05-01"), ("2026-05-02", "")):
        monkeypatch.setattr(dates, "today", lambda today=today: today)
        tokenizer, _ = load_tokenizer(dated_model, date=given)
        prompts = load((str(tmp_path / "data.jsonl"),), Source(), "train", tokenizer, 64)
        prints.append(PromptLoader(prompts, 0).fingerprint())
    assert prints[0] == prints[1] != prints[2]


RESUMED = [  # --run-dir, --resume, the date
    ("run", "auto", "2026-05-01"),
    ("run", "run/checkpoints/step_000001", "2026-05-01"),
    ("new", "run/checkpoints/step_000001", "2026-05-01"),
    ("", "run/checkpoints/step_000001", "2026-05-01"),
    ("fork", "run/checkpoints/step_000001", "2026-06-01"),
    ("run", "", ""),
    ("", "", ""),
    ("new", "auto", ""),
    ("old", "auto", ""),
]


@pytest.mark.parametrize("run_dir, resume, expected", RESUMED)
def test_the_date_of_a_resumed_run_is_in_its_run_json(run_dir, resume, expected, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, content in (("run", {"date": "2026-05-01"}), ("fork", {"date": "2026-06-01"}), ("old", {})):
        (tmp_path / name).mkdir()
        (tmp_path / name / "run.json").write_text(json.dumps({"args": {}, **content}))
    assert run_directory.date_of(run_dir, resume) == expected


@pytest.mark.parametrize("day", ["yesterday", 20260501, "2026-13-01", "20260501", ["2026-05-01"]])
def test_a_date_that_is_none_is_refused(day, tmp_path):
    (tmp_path / "run.json").write_text(json.dumps({"args": {}, "date": day}))
    with pytest.raises(BadInput, match='run.json: "date" must be a date'):
        run_directory.date_of(str(tmp_path), "auto")


ON_A_DAY = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv.pop(1))
day, name = sys.argv.pop(1), sys.argv.pop(1)

import importlib
import tyro
from common import errors
from common.data import dates

dates.today = lambda: day
algorithm = importlib.import_module(f"algos.{name}")
errors.launch(algorithm.main, tyro.cli(algorithm.Args))
"""


@pytest.mark.slow
def test_a_run_that_samples_is_resumed_on_another_day(dated_model, tmp_path):
    script = tmp_path / "on_a_day.py"
    script.write_text(ON_A_DAY)
    data = tmp_path / "data.jsonl"
    data.write_text("".join(f'{{"prompt": "{i}+1=", "answer": "{i + 1}"}}\n' for i in range(4)))
    flags = ["--model", dated_model, "--dataset", data, "--eval-prompts", 0, "--rollout-backend", "hf", "--dtype"]
    flags += ["float32", "--prompts-per-step", 2, "--group-size", 2, "--mini-batches", 1, "--max-response-tokens", 4]
    flags += ["--save-every", 1, "--schedule", "constant", "--run-dir", tmp_path / "run"]
    launch(script, ROOT, "2026-05-01", "grpo", *flags, "--steps", 1)
    launch(script, ROOT, "2026-05-02", "grpo", *flags, "--steps", 2, "--resume", "auto")
    assert json.loads((tmp_path / "run/run.json").read_text())["date"] == "2026-05-01"


def test_a_run_is_resumed_on_another_day(dated_model, tmp_path):
    script = tmp_path / "on_a_day.py"
    script.write_text(ON_A_DAY)
    data = tmp_path / "data.jsonl"
    data.write_text("".join(f'{{"prompt": "{i}+1=", "solution": "{i + 1}"}}\n' for i in range(4)))
    flags = ["--model", dated_model, "--dataset", data, "--batch-size", 2, "--run-dir", tmp_path / "run"]
    flags += ["--output", tmp_path / "out", "--save-every", 1]
    launch(script, ROOT, "2026-05-01", "sft", *flags, "--steps", 1)
    described = json.loads((tmp_path / "run/run.json").read_text())
    assert described["date"] == "2026-05-01"
    launch(script, ROOT, "2026-05-02", "sft", *flags, "--steps", 2, "--resume", "auto")
    assert json.loads((tmp_path / "run/run.json").read_text())["date"] == "2026-05-01"
    # A run of an older version has no date. The error says what may differ, and what to do.
    del described["date"]
    (tmp_path / "run/run.json").write_text(json.dumps(described))
    result = launch(script, ROOT, "2026-05-03", "sft", *flags, "--steps", 3, "--resume", "auto", check=False)
    assert result.returncode == 2 and "error[data-changed]" in result.stderr
    assert "the date that the chat template prints" in result.stderr
