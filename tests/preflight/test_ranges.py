"""Every numeric flag has a range, and a number outside it ends the program before anything is loaded."""

import dataclasses
import importlib
import math
import sys
from collections.abc import Iterator
from typing import Annotated, get_origin, get_type_hints

import pytest
import tyro
from cases import ALGORITHMS
from pydantic import Field, NonNegativeInt, PositiveFloat

from common import errors
from common.errors import BadInput
from common.preflight import machine, ranges

NAMES = (*ALGORITHMS, "dpo", "sft")
PAIRS = ("accuracy_range",)  # flags of two numbers


def numbers(args) -> Iterator[tuple[str, float, object]]:
    """(name, value, type) of each numeric flag, those of nested dataclasses and tuples too."""
    types = get_type_hints(type(args), include_extras=True)
    for field in dataclasses.fields(args):
        value = getattr(args, field.name)
        if dataclasses.is_dataclass(value):
            yield from numbers(value)
            continue
        first = value[0] if isinstance(value, tuple) and value else value
        if isinstance(first, (int, float)) and not isinstance(first, bool):
            yield field.name, first, types[field.name]


def command_line(monkeypatch, capsys, name: str, *words: str) -> str:
    """What `python algos/NAME.py WORDS` prints on stderr before it ends with exit code 2."""
    algorithm = importlib.import_module(f"algos.{name}")
    monkeypatch.setattr(machine, "check_world", lambda *a, **k: pytest.fail("went on"))
    with pytest.raises(SystemExit) as left:
        errors.launch(algorithm.main, tyro.cli(algorithm.Args, args=words, default=with_needed(algorithm)))
    assert left.value.code == 2
    return capsys.readouterr().err


def with_needed(algorithm):
    """The defaults of a file, with those of the embedded job."""
    return algorithm.Args(**getattr(algorithm, "EMBEDDED", {}))


@pytest.mark.parametrize("name", NAMES)
def test_every_numeric_flag_has_a_range_and_is_held_to_it(name, monkeypatch, capsys):
    algorithm = importlib.import_module(f"algos.{name}")
    for flag, number, kind in numbers(with_needed(algorithm)):
        assert get_origin(kind) in (Annotated, tuple), f"--{flag} has no range in its type"
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
    said = command_line(monkeypatch, capsys, "grpo", "--tis-cap", "2", f"--{name}", word)
    assert said.startswith(f"error[bad-input]: --{name} ") and said.count("\n") == 1


def test_the_defaults_are_inside():
    for name in NAMES:
        algorithm = importlib.import_module(f"algos.{name}")
        ranges.check(algorithm.Args())
        ranges.check(with_needed(algorithm))


@dataclasses.dataclass(frozen=True)
class Inner:
    share: Annotated[float, Field(ge=0, lt=1)] = 0.5  # Share.


@dataclasses.dataclass
class Fork:
    """Flags of a file that is not in this repository."""

    weight: float = 1.0  # Without a range.
    count: NonNegativeInt = 0  # Count.
    both: tuple[PositiveFloat, PositiveFloat] = (1.0, 2.0)  # Both.
    inner: Annotated[Inner, tyro.conf.OmitArgPrefixes] = Inner()


@pytest.mark.parametrize(
    "flags, message",
    [
        ({}, ""),
        ({"weight": -3.0, "count": 5, "inner": Inner(0.0)}, ""),
        ({"weight": math.nan}, "--weight nan: must be a finite number"),
        ({"weight": math.inf}, "--weight inf: must be a finite number"),
        ({"count": -1}, "--count -1: must be greater than or equal to 0"),
        ({"both": (1.0, 0.0)}, "--both 0.0: must be greater than 0"),
        ({"inner": Inner(1.0)}, "--share 1.0: must be less than 1"),
    ],
)
def test_a_fork_writes_a_range_beside_its_flag(flags, message):
    if not message:
        return ranges.check(Fork(**flags))
    with pytest.raises(BadInput) as error:
        ranges.check(Fork(**flags))
    assert str(error.value) == message


def test_the_help_shows_the_type_and_the_comment(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "1000")
    monkeypatch.setattr(sys, "argv", ["fork.py"])
    with pytest.raises(SystemExit):
        tyro.cli(Fork, args=["--help"])
    out = capsys.readouterr().out
    assert "--count INT" in out and "Count. (default: 0)" in out
    assert "--both FLOAT FLOAT" in out and "--share FLOAT" in out
