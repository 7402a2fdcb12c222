"""Rewards for tests: --reward rewards.py:FUNCTION"""


def constant(items, lengths, truncated):
    return [1.0] * len(items)
