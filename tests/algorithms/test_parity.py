"""What verl and TRL return on the recorded batch is what we return, or differs as scripts/parity.py says."""

import pytest
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
