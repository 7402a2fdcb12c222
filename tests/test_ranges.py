"""Every numeric flag has a range, and a number outside it ends the program before anything is loaded."""

import dataclasses
import importlib
import math
import sys

import pytest
import tyro
from conftest import ALGORITHMS

from common import errors
from common.errors import BadInput
from common.run import checks, job, ranges

NAMES = (*ALGORITHMS, "dpo", "sft")
PAIRS = ("lam", "accuracy_range")  # flags of two numbers


def flags(name: str) -> dict[str, float]:
    """Numeric flags of an algorithm, with a number of each one's type."""
    args = importlib.import_module(f"algos.{name}").Args()
    return dict(ranges.numbers(args))


def command_line(monkeypatch, capsys, name: str, *words: str) -> str:
    """What `python algos/NAME.py WORDS` prints on stderr before it ends with exit code 2."""
    algorithm = importlib.import_module(f"algos.{name}")
    monkeypatch.setattr(sys, "argv", [f"algos/{name}.py", *words])
    monkeypatch.setattr(checks, "check_world", lambda *a, **k: pytest.fail("went on"))
    with pytest.raises(SystemExit) as left:
        if name in ("dpo", "sft"):
            errors.launch(algorithm.main, tyro.cli(algorithm.Args))
        else:
            job.launch(algorithm.main, algorithm.Args, algorithm.EMBEDDED, algorithm.__doc__)
    assert left.value.code == 2
    return capsys.readouterr().err


@pytest.mark.parametrize("name", NAMES)
def test_every_numeric_flag_has_a_range_and_is_held_to_it(name, monkeypatch, capsys):
    for flag, number in flags(name).items():
        assert flag in ranges.RANGES, f"--{flag} has no line in RANGES"
        for word in ("-1", *["nan", "inf", "-inf"] * isinstance(number, float)):
            words = [word, "0"] if flag in PAIRS else [word]
            said = command_line(monkeypatch, capsys, name, f"--{flag.replace('_', '-')}", *words)
            assert f"--{flag.replace('_', '-')} {float(word) if isinstance(number, float) else word}" in said


@pytest.mark.parametrize(
    "name, word",
    [
        ("learning-rate", "2"),  # 2e-6 was meant
        ("temperature", "0"),
        ("temperature", "0.001"),  # vLLM would sample at 0.01
        ("clip-low", "1.5"),
        ("max-grad-norm", "0"),
        ("rollouts-every", "0"),
        ("rollout-memory", "40"),  # 0.4 was meant
        ("max-inflight-batches", "3"),
        ("group-size", "0"),
        ("seed", "9" * 12),
    ],
)
def test_numbers_at_the_ends(name, word, monkeypatch, capsys):
    said = command_line(monkeypatch, capsys, "grpo", f"--{name}", word)
    assert said.startswith(f"error[bad-input]: --{name} ") and said.count("\n") == 1


def test_the_defaults_are_inside():
    for name in NAMES:
        algorithm = importlib.import_module(f"algos.{name}")
        for args in (algorithm.Args(), algorithm.Args(**getattr(algorithm, "EMBEDDED", {}))):
            outside = [name for name, number in ranges.numbers(args) if not ranges.inside(number, ranges.RANGES[name])]
            assert not outside


def test_a_forks_own_flag_must_be_finite():
    args = dataclasses.make_dataclass("Args", [("my_weight", float)])
    ranges.check(args(-3.0))
    with pytest.raises(BadInput, match="--my-weight nan"):
        ranges.check(args(math.nan))


@pytest.mark.parametrize(
    "interval, within, without",
    [
        ("[0, 1)", (0, 0.999), (-1e-9, 1, math.nan)),
        ("(0, 1]", (1e-9, 1), (0, 1.001)),
        ("[1, inf)", (1, 1e300), (math.inf, 0.5)),
        ("(-inf, inf)", (-1e9, 0, 1e9), (math.inf, -math.inf, math.nan)),
    ],
)
def test_intervals(interval, within, without):
    assert all(ranges.inside(number, interval) for number in within)
    assert not any(ranges.inside(number, interval) for number in without)
