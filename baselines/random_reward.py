"""A control: rewards that know nothing of the answer (arXiv:2506.10947). They must not make a model better."""

import random

draw = random.Random(0)


def score(items, lengths, truncated):
    """0 or 1 for each response, drawn anew."""
    return [float(draw.random() < 0.5) for _ in items]
