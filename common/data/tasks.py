"""Generated tasks with short answers, for small pretrained models and for the embedded one.

SmolLM2-135M sometimes solves `sums` and `gcd`, so reinforcement learning has something to reinforce
(baselines/README.md has the curves). The default reward, gsm8k, compares the last number. The model never solves
`reverse`. That task needs some steps of algos/sft.py first, and a reward for answers that are nearly right.

In `sums` and `gcd`, two problems that differ only in the order of their numbers count as one, so no held-out problem is
trained on in another form. In `calculator` a few are. In `guess` all questions are the same, and the environment draws
the number.

Published results depend on the problems: the order of the random draws in each function must not change.
"""

import math
import random
from collections.abc import Iterator

from common.data import squares
from common.data.functions import functions

HELD_OUT = 256  # problems of each task
DRAWN = 8192  # problems of `reverse`, `calculator` and `maze`, of which there could be more
SIDE = 4  # cells of a side of a `maze`
MOVES = {"8": (0, -1), "2": (0, 1), "4": (-1, 0), "6": (1, 0)}  # keys of a numeric keypad: up, down, left, right
INTERVAL = range(10, 25)  # numbers of `guess`
GAMES = 1024
Row = dict[str, str | list[str]]  # "question", "answer", and for algos/sft.py "solution" and "role"


def row(question: str, answer: int | str, solution: str | list[str] = "") -> Row:
    """solution: alternating turns of policy and environment, for the tasks with an environment."""
    return {"question": question, "answer": str(answer), "solution": solution or str(answer)}


def sums(draw: random.Random) -> Iterator[Row]:
    """9,900 problems: a + b and a - b for numbers from 1 to 99, with a >= b in a difference."""
    for a in range(1, 100):
        for b in range(1, a + 1):
            # Either 3 + 5 or 5 + 3. With both, one could be held out and the other trained on.
            x, y = draw.sample((a, b), 2)
            yield row(f"Compute {x} + {y}. Reply with the number only.", a + b)
            yield row(f"Compute {a} - {b}. Reply with the number only.", a - b)


def gcd(draw: random.Random) -> Iterator[Row]:
    """854 problems: the greatest common divisor, if it is larger than 1, of two different numbers from 2 to 99.

    The answer of 41 % of all such pairs is 2, and a model could learn to say it always. So no answer has more than 100
    problems.
    """
    # Answer -> the pairs that have it.
    pairs: dict[int, list[tuple[int, int]]] = {}
    for a in range(2, 100):
        for b in range(2, a):
            if math.gcd(a, b) > 1:
                pairs.setdefault(math.gcd(a, b), []).append((a, b))
    for answer, of_answer in pairs.items():
        for pair in draw.sample(of_answer, min(len(of_answer), 100)):
            x, y = draw.sample(pair, 2)
            yield row(f"Compute the gcd of {x} and {y}. Reply with the number only.", answer)


def reverse(draw: random.Random) -> Iterator[Row]:
    """DRAWN problems: two or three invented words, such as "lomi tarune", written backwards."""
    syllables = [consonant + vowel for consonant in "bdfgklmnprstvz" for vowel in "aeiou"]
    texts: dict[str, None] = {}  # each once, in the order in which they are drawn
    while len(texts) < DRAWN:
        words = []
        for _ in range(draw.randint(2, 3)):
            words.append("".join(draw.choices(syllables, k=draw.randint(2, 3))))
        texts[" ".join(words)] = None
    for text in texts:
        yield row(f'Write "{text}" backwards, letter by letter. Reply with the reversed text only.', text[::-1])


def maze(draw: random.Random) -> Iterator[Row]:
    """DRAWN mazes. The answer is the only way from s to g, in MOVES: 268 in this one, whose SIDE is 2.

    s#g      Cells have even coordinates. Between two of them it is open (.), or there is a wall (#).
    .#.
    ...
    """
    # Picture -> moves from s to g. A maze that is drawn twice counts once.
    mazes: dict[str, str] = {}
    while len(mazes) < DRAWN:
        picture, moves = draw_maze(draw)
        mazes[picture] = moves
    for picture, moves in mazes.items():
        yield row(f"{picture}\n", moves)


def draw_maze(draw: random.Random) -> tuple[str, str]:
    """A maze as a picture, and the moves from s to g.

    A random cell that is not yet part of the maze is joined to one that is, until all are. Then exactly one way leads
    from any cell to any other.
    """
    # The cell (x, y) is at (2x, 2y) in the picture. Between two cells there is a place for a wall.
    cells = [(x, y) for y in range(SIDE) for x in range(SIDE)]
    start, goal = draw.sample(cells, 2)
    moves_to = {start: ""}  # cell of the maze -> the moves from the start
    marks = {(2 * x, 2 * y): "." for x, y in cells}  # place in the picture -> character
    while len(moves_to) < len(cells):
        x, y = draw.choice(list(moves_to))
        move, (right, down) = draw.choice(list(MOVES.items()))
        neighbour = (x + right, y + down)
        # Joining it twice would make a second way.
        if neighbour in cells and neighbour not in moves_to:
            moves_to[neighbour] = moves_to[x, y] + move
            marks[2 * x + right, 2 * y + down] = "."
    marks[2 * start[0], 2 * start[1]] = "s"
    marks[2 * goal[0], 2 * goal[1]] = "g"
    width = range(2 * SIDE - 1)
    lines = ["".join(marks.get((x, y), "#") for x in width) for y in width]
    return "\n".join(lines), moves_to[goal]


def calculator(draw: random.Random) -> Iterator[Row]:
    """8,192 problems: products of numbers from 320 to 999. The teacher forgets its calculator in 7 cases of 10."""
    for pair in draw.sample(range(680 * 680), DRAWN):
        a = 320 + pair // 680
        b = 320 + pair % 680
        # Without the calculator the answer is a guess, and almost always wrong.
        if draw.random() < 0.3:
            solution = [f"mul({a},{b})", str(a * b), str(a * b)]
        else:
            solution = f"about {draw.randint(100_000, 999_999)}"
        yield row(f"{a}*{b}=", a * b, solution)


def guess(draw: random.Random) -> Iterator[Row]:
    """1,024 games: "10 to 24?". The environment draws the number to find, another one in each step.

    The teacher guesses any number that is still possible, which takes 4.1 turns on average. Halving takes 3.3.
    """
    for _ in range(GAMES):
        possible = list(INTERVAL)
        secret = draw.choice(INTERVAL)
        turns = []
        while True:
            number = draw.choice(possible)
            turns.append(str(number))
            if number == secret:
                break
            if number < secret:
                turns.append("more")
                possible = [n for n in possible if n > number]
            else:
                turns.append("less")
                possible = [n for n in possible if n < number]
        # The role of the environment's turns, as in rollout/environments/built_in.py.
        yield row(f"{INTERVAL[0]} to {INTERVAL[-1]}?", "", turns) | {"role": "user"}


TASKS = {
    "sums": sums,
    "gcd": gcd,
    "reverse": reverse,
    "maze": maze,
    "calculator": calculator,
    "guess": guess,
    "functions": functions,
}
NAMES = (*TASKS, "squares")


def problems(name: str, split: str) -> list[Row]:
    """All problems of a task in an order that is the same on every machine: the first HELD_OUT are the "test" split."""
    if name == "squares":
        return squares.problems(split)
    draw = random.Random(name)
    rows = list(TASKS[name](draw))
    draw.shuffle(rows)
    return rows[:HELD_OUT] if split == "test" else rows[HELD_OUT:]
