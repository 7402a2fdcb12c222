"""The embedded job with images: count the squares of one colour, for a 0.85 M-parameter model that learns it on a CPU.

An image has 32 x 32 pixels, sixteen places of which some hold a coloured square. The teacher of the warm start
overlooks a square more often than not, so its pupil's greedy answers are mostly one too few, and reinforcement learning
has something to correct. baselines/squares_model.py writes the model with random weights.
"""

import random
from io import BytesIO

from PIL import Image, ImageDraw

COLOURS = {"red": (230, 40, 40), "green": (40, 200, 60), "blue": (50, 80, 230), "yellow": (240, 220, 50)}
SIDE = 32  # pixels of a row and of a column
PLACES = 4  # places for squares in a row and in a column
MOST = 4  # squares of the colour in question; from 0 on, all numbers are equally frequent
HELD_OUT = 256  # problems
TRAIN = 4096  # problems
OVERLOOKS = 0.7  # share of the images in which the teacher overlooks a square, if there is one


def problems(split: str) -> list[dict]:
    """Rows with "question", "answer", which is right, "solution", the teacher's answer, and "images"."""
    draw = random.Random("squares")
    # Each problem once: an image without squares comes often.
    by_content = {}
    while len(by_content) < HELD_OUT + TRAIN:
        row = problem(draw)
        by_content[row["question"], row["images"][0]] = row
    rows = list(by_content.values())
    return rows[:HELD_OUT] if split == "test" else rows[HELD_OUT:]


def problem(draw: random.Random) -> dict:
    """A row. The order of the draws decides the images, so it must not change."""
    colour = draw.choice(list(COLOURS))
    count = draw.randint(0, MOST)
    other_colours = [other for other in COLOURS if other != colour]
    others = [draw.choice(other_colours) for _ in range(draw.randint(0, PLACES**2 - MOST))]
    places = draw.sample(range(PLACES**2), count + len(others))
    # The teacher of the warm start. The draw comes only if there is a square to overlook.
    counted_by_teacher = count
    if count > 0 and draw.random() < OVERLOOKS:
        counted_by_teacher -= 1
    return {
        "question": f"{colour} squares?<image>",
        "answer": str(count),
        "solution": str(counted_by_teacher),
        "images": [picture(dict(zip(places, [colour] * count + others)))],
    }


def picture(squares: dict[int, str]) -> bytes:
    """A PNG file. squares: place -> colour."""
    image = Image.new("RGB", (SIDE, SIDE), (128, 128, 128))
    pen = ImageDraw.Draw(image)
    size = SIDE // PLACES  # pixels of a place
    for place, colour in squares.items():
        # A margin of one pixel on each side keeps neighbours of one colour apart.
        x = place % PLACES * size
        y = place // PLACES * size
        pen.rectangle((x + 1, y + 1, x + size - 2, y + size - 2), fill=COLOURS[colour])
    file = BytesIO()
    image.save(file, format="PNG")
    return file.getvalue()
