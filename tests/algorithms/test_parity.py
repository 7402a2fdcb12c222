"""What verl and TRL return on the recorded batch is what we return, or differs as scripts/parity.py says."""

import pytest
from conftest import ROOT
from helpers import load

parity = load("scripts/parity.py")


@pytest.mark.parametrize("row", parity.differences(), ids=lambda row: f"{row.peer}: {row.line} ({row.called})")
def test_equal_or_a_named_difference(row):
    if row.why:
        assert row.difference > 1e-4
    else:
        assert row.difference < 1e-6


def test_the_batch_reaches_the_dual_clip():
    mine = parity.ours()
    assert (mine["dapo loss"] - mine["dapo loss, no dual clip"]).abs().max() > 1e-3


def test_the_readme_counts_the_lines():
    rows = parity.differences()
    by_peer = [[row for row in rows if row.peer == peer] for peer in ("verl", "TRL")]
    verl, trl = map(len, by_peer)
    equal = [sum(not row.why for row in rows) for rows in by_peer]
    of_variants = sum(row.line.startswith("variant ") for row in rows)
    text = " ".join((ROOT / "README.md").read_text().split())
    assert f"{verl} advantages, losses and gradients with verl 0.9.1 and {trl} with TRL 1.16" in text
    assert f"{equal[0]} and {equal[1]} agree to 1e-6, and the other {len(rows) - sum(equal)} are" in text
    assert f"{of_variants} of the {len(rows)} belong to" in text
