"""Generated tasks for small pretrained models: short answers, graded by the last number (--reward gsm8k).

SmolLM2-135M solves each of them sometimes, so that reinforcement learning has something to reinforce
(baselines/README.md has the curves). A task lists all its problems once. Two problems that differ only in the order of
their numbers are one, so none of the held-out problems is trained on in another form.
"""

import math
import random
from collections.abc import Iterator

HELD_OUT = 256  # problems of each task
Row = dict[str, str]  # "question" and "answer"


def sums(draw: random.Random) -> Iterator[Row]:
    """9,900 problems: a + b and a - b for numbers from 1 to 99, with a >= b in a difference."""
    for a in range(1, 100):
        for b in range(1, a + 1):
            x, y = draw.sample((a, b), 2)
            for text, result in ((f"{x} + {y}", a + b), (f"{a} - {b}", a - b)):
                yield {"question": f"Compute {text}. Reply with the number only.", "answer": str(result)}


def gcd(draw: random.Random) -> Iterator[Row]:
    """1,770 problems: the greatest common divisor of two numbers from 2 to 60."""
    for a in range(2, 61):
        for b in range(2, a + 1):
            x, y = draw.sample((a, b), 2)
            question = f"Find the greatest common divisor of {x} and {y}. End with the number."
            yield {"question": question, "answer": str(math.gcd(a, b))}


TASKS = {"sums": sums, "gcd": gcd}


def problems(name: str, split: str) -> list[Row]:
    """All problems of a task in an order that is the same on every machine: the first HELD_OUT are the "test" split."""
    draw = random.Random(name)
    rows = list(TASKS[name](draw))
    draw.shuffle(rows)
    return rows[:HELD_OUT] if split == "test" else rows[HELD_OUT:]
