"""What docs/migrating.md says about our flags: they exist, and their defaults are the numbers behind them."""

import dataclasses
import re

import pytest
from conftest import ROOT

from algos import grpo

PAGE = (ROOT / "docs/migrating.md").read_text()


def defaults(args) -> dict[str, object]:
    """Flag -> its default, also of the groups."""
    found = {}
    for field in dataclasses.fields(args):
        value = getattr(args, field.name)
        if dataclasses.is_dataclass(value):
            found |= defaults(value)
        else:
            found["--" + field.name.replace("_", "-")] = value
    return found


def ours() -> list[tuple[str, list[str], list[str]]]:
    """(column "here", its flags, the values behind them) of each row of the tables."""
    rows = []
    for _, here, *_ in (row.strip("|").split(" | ") for row in PAGE.splitlines() if row.startswith("| `")):
        flags = re.findall(r"(--[a-z-]+)", here)
        values = re.sub("`[^`]*`", "", here).replace(",", " ").split()
        if "torchrun" not in here and flags:
            rows.append((here, flags, values))
    return rows


@pytest.mark.parametrize("here, flags, values", ours(), ids=[row[0] for row in ours()])
def test_a_flag_on_the_page_has_the_default_on_the_page(here, flags, values):
    known = defaults(grpo.Args())
    assert set(flags) <= known.keys()
    if values:
        assert values == [shown(known[flag]) for flag in flags]


def shown(default) -> str:
    """A default as the page writes it: off for False, 1e-6 for 1e-06, and 1 for 1.0."""
    if isinstance(default, bool):
        return "on" if default else "off"
    if isinstance(default, float):
        return f"{default:g}".replace("e-0", "e-")
    return str(default)


def test_the_page_has_many_flags():
    assert len(ours()) > 60 and sum(bool(values) for _, _, values in ours()) > 40
