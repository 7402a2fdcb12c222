"""A control: rewards that know nothing of the answer (arXiv:2506.10947). They must not make a model better."""

import random


def score(items, lengths, truncated):
    """0 or 1 for each response. Prompt and responses seed the coin, so runs with other seeds have other flips."""
    coin = random.Random(repr([(item.prompt, item.response) for item in items]))
    return [float(coin.random() < 0.5) for _ in items]
