"""Rewards for tests: --reward rewards.py:FUNCTION"""


def constant(items, lengths, truncated):
    return [1.0] * len(items)


def uneven(items, lengths, truncated):
    """Never alike for all: there is something to train on whatever a model of random weights says."""
    return [float(i % 2 + len(item.response) % 3) for i, item in enumerate(items)]
