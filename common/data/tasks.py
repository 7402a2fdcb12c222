"""Generated tasks with short answers, for small pretrained models and for the embedded one.

SmolLM2-135M solves `sums` and `gcd` sometimes, so that reinforcement learning has something to reinforce
(baselines/README.md has the curves). The default reward, gsm8k, compares the last number. It never solves `reverse`:
that one wants some steps of algos/sft.py first, and a reward for answers that are nearly right.

Each task lists all its problems once. Two problems that differ only in the order of their numbers are one, so none of
the held-out problems is trained on in another form.
"""

import math
import random
from collections.abc import Iterator

HELD_OUT = 256  # problems of each task
DRAWN = 8192  # problems of `reverse`, `calculator` and `maze`, of which there could be more
SIDE = 4  # cells of a side of a `maze`
MOVES = {"8": (0, -1), "2": (0, 1), "4": (-1, 0), "6": (1, 0)}  # keys of a numeric keypad: up, down, left, right
INTERVAL = range(10, 25)  # numbers of `guess`
GAMES = 1024
Row = dict[str, str | list[str]]  # "question", "answer", and for algos/sft.py "solution" and "role"


def row(question: str, answer: int | str, solution: list[str] | None = None) -> Row:
    """solution: alternating turns of policy and environment, for the tasks with an environment."""
    return {"question": question, "answer": str(answer), "solution": solution or str(answer)}


def sums(draw: random.Random) -> Iterator[Row]:
    """9,900 problems: a + b and a - b for numbers from 1 to 99, with a >= b in a difference."""
    for a in range(1, 100):
        for b in range(1, a + 1):
            x, y = draw.sample((a, b), 2)
            yield row(f"Compute {x} + {y}. Reply with the number only.", a + b)
            yield row(f"Compute {a} - {b}. Reply with the number only.", a - b)


def gcd(draw: random.Random) -> Iterator[Row]:
    """854 problems: the greatest common divisor of two different numbers from 2 to 99 that have one larger than 1.

    Of all such pairs 41 % have the answer 2, which a model could learn to say always. Here no answer has over 100.
    """
    pairs: dict[int, list[tuple[int, int]]] = {}  # answer: the pairs that have it
    for a in range(2, 100):
        for b in range(2, a):
            if math.gcd(a, b) > 1:
                pairs.setdefault(math.gcd(a, b), []).append((a, b))
    for answer, having in pairs.items():
        for pair in draw.sample(having, min(len(having), 100)):
            x, y = draw.sample(pair, 2)
            yield row(f"Compute the gcd of {x} and {y}. Reply with the number only.", answer)


def reverse(draw: random.Random) -> Iterator[Row]:
    """DRAWN problems: two or three invented words, such as "lomi tarune", written backwards."""
    syllables = [consonant + vowel for consonant in "bdfgklmnprstvz" for vowel in "aeiou"]
    texts: dict[str, None] = {}  # in the order in which they are drawn
    while len(texts) < DRAWN:
        words = ["".join(draw.choices(syllables, k=draw.randint(2, 3))) for _ in range(draw.randint(2, 3))]
        texts[" ".join(words)] = None
    for text in texts:
        yield row(f'Write "{text}" backwards, letter by letter. Reply with the reversed text only.', text[::-1])


def maze(draw: random.Random) -> Iterator[Row]:
    """DRAWN mazes: the only way from s to g, in MOVES. The answer to this one, of SIDE 2, is 268:

    s#g      Cells have even coordinates. Between two of them it is open (.), or there is a wall (#). They are joined
    .#.      one by one, each to a drawn one of those that are joined, so that one way leads from any to any other.
    ...
    """
    mazes: dict[str, str] = {}
    cells, width = [(x, y) for y in range(SIDE) for x in range(SIDE)], range(2 * SIDE - 1)
    while len(mazes) < DRAWN:
        start, goal = draw.sample(cells, 2)
        ways, marks = {start: ""}, {}  # ways: cell -> moves that lead there
        while len(ways) < len(cells):
            (x, y), (move, (right, down)) = draw.choice(list(ways)), draw.choice(list(MOVES.items()))
            cell = (x + right, y + down)
            if cell in cells and cell not in ways:
                ways[cell] = ways[x, y] + move
                marks[2 * x + right, 2 * y + down] = "."
        marks |= {(2 * x, 2 * y): "." for x, y in cells}
        marks |= {(2 * x, 2 * y): mark for (x, y), mark in ((start, "s"), (goal, "g"))}
        mazes["\n".join("".join(marks.get((x, y), "#") for x in width) for y in width)] = ways[goal]
    for drawn, way in mazes.items():
        yield row(f"{drawn}\n", way)


def calculator(draw: random.Random) -> Iterator[Row]:
    """8,192 problems: products of numbers from 320 to 999. The teacher forgets its calculator in 7 cases of 10."""
    for pair in draw.sample(range(680 * 680), DRAWN):
        a, b = 320 + pair // 680, 320 + pair % 680
        called = [f"mul({a},{b})", str(a * b), str(a * b)]
        yield row(f"{a}*{b}=", a * b, called if draw.random() < 0.3 else f"about {draw.randint(100_000, 999_999)}")


def guess(draw: random.Random) -> Iterator[Row]:
    """1,024 games: "10 to 24?", for which the environment draws the number to be found, another one in each step.

    The teacher guesses any number that is still possible, which takes 4.1 turns on average; halving takes 3.3.
    """
    for _ in range(GAMES):
        possible, turns, secret = list(INTERVAL), [], draw.choice(INTERVAL)
        while not turns or turns[-1] != str(secret):
            said = draw.choice(possible)
            turns += [str(said)] if said == secret else [str(said), "more" if said < secret else "less"]
            possible = [n for n in possible if (n > said if said < secret else n < said)]
        yield row(f"{INTERVAL[0]} to {INTERVAL[-1]}?", "", turns) | {"role": "user"}  # the role of its environment


TASKS = {"sums": sums, "gcd": gcd, "reverse": reverse, "maze": maze, "calculator": calculator, "guess": guess}


def problems(name: str, split: str) -> list[Row]:
    """All problems of a task in an order that is the same on every machine: the first HELD_OUT are the "test" split."""
    if name == "squares":
        from common.data import squares

        return squares.problems(split)
    draw = random.Random(name)
    rows = list(TASKS[name](draw))
    draw.shuffle(rows)
    return rows[:HELD_OUT] if split == "test" else rows[HELD_OUT:]
