"""Every numeric flag has a range, beside it in its type. test_refusals.py types some numbers outside of theirs."""

import dataclasses
import importlib
import math
import sys
from collections.abc import Iterator
from typing import Annotated, get_origin, get_type_hints

import pytest
import tyro
from cases import ALGORITHM_FILES
from pydantic import Field, NonNegativeInt, PositiveFloat

from common.errors import BadInput
from common.preflight import ranges


def numbers(args) -> Iterator[tuple[str, object, object]]:
    """(name, value, type) of each numeric flag, those of nested dataclasses and pairs of numbers too."""
    types = get_type_hints(type(args), include_extras=True)
    for field in dataclasses.fields(args):
        value = getattr(args, field.name)
        if dataclasses.is_dataclass(value):
            yield from numbers(value)
            continue
        first = value[0] if isinstance(value, tuple) and value else value
        if isinstance(first, (int, float)) and not isinstance(first, bool):
            yield field.name, value, types[field.name]


def changed(args, name: str, value):
    """The flags with another value of one, which may be in a nested dataclass."""
    if hasattr(args, name):
        return dataclasses.replace(args, **{name: value})
    for field in dataclasses.fields(args):
        inner = getattr(args, field.name)
        if dataclasses.is_dataclass(inner) and hasattr(inner, name):
            return dataclasses.replace(args, **{field.name: changed(inner, name, value)})
    raise AssertionError(name)


@pytest.mark.parametrize("name", ALGORITHM_FILES)
def test_every_numeric_flag_has_a_range_and_is_held_to_it(name):
    algorithm = importlib.import_module(f"algos.{name}")
    args = algorithm.Args(**getattr(algorithm, "EMBEDDED", {}))
    ranges.check(algorithm.Args())
    ranges.check(args)
    assert len([*numbers(args)]) > 10
    for flag, value, kind in numbers(args):
        assert get_origin(kind) in (Annotated, tuple), f"--{flag} has no range in its type"
        first = value[0] if isinstance(value, tuple) else value
        for bad in (-1, *[math.nan, math.inf, -math.inf] * isinstance(first, float)):
            outside = (bad, *value[1:]) if isinstance(value, tuple) else bad
            with pytest.raises(BadInput) as error:
                ranges.check(changed(args, flag, outside))
            assert f"--{flag.replace('_', '-')} {bad}" in str(error.value)


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
    "flags, named",
    [
        ({}, ""),
        ({"weight": -3.0, "count": 5, "inner": Inner(0.0)}, ""),
        ({"weight": math.nan}, "--weight nan"),
        ({"weight": math.inf}, "--weight inf"),
        ({"count": -1}, "--count -1"),
        ({"both": (1.0, 0.0)}, "--both 0.0"),
        ({"inner": Inner(1.0)}, "--share 1.0"),
    ],
)
def test_a_fork_writes_a_range_beside_its_flag(flags, named):
    if not named:
        return ranges.check(Fork(**flags))
    with pytest.raises(BadInput) as error:
        ranges.check(Fork(**flags))
    assert named in str(error.value) and "\n" not in str(error.value)


def test_the_help_shows_the_type_and_the_comment(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "1000")
    monkeypatch.setattr(sys, "argv", ["fork.py"])
    with pytest.raises(SystemExit):
        tyro.cli(Fork, args=["--help"])
    out = capsys.readouterr().out
    assert "--count INT" in out and "Count. (default: 0)" in out
    assert "--both FLOAT FLOAT" in out and "--share FLOAT" in out
