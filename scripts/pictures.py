"""What the pictures of scripts/baselines.py and scripts/staleness.py share: small panels that a telephone shows, too.

All panels of a picture have the same axes. A panel has one line in BLUE with its last value at its end, and behind it
in grey what it is to be compared with. The background is white, on a dark page as well. Letters are drawn as shapes
and nothing is dated, so a picture is the same bytes each time.
"""

import math
from pathlib import Path

import matplotlib
from matplotlib import patheffects, ticker
from matplotlib.axes import Axes
from matplotlib.figure import Figure

BLUE, PALE = "#0b62c4", "#a9cbf2"  # the line of a panel; its band or its points
GREY, BEHIND = "0.4", "0.8"  # words beside it, and what is behind it
WIDTH = 6  # inches, which are 576 pixels on a page. A telephone has two thirds of that for the same letters.
LEFT, GAP, RIGHT = 0.65, 0.6, 0.55  # inches: for the numbers of the vertical axis, and for those at the ends of lines
TOP, PANEL, TITLE, BOTTOM = 0.6, 1.1, 0.35, 0.6
STYLE = {
    "font.size": 11,
    "figure.facecolor": "white",
    "axes.titlelocation": "left",
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.spines.left": False,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": GREY,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "grid.color": "0.9",
    "xtick.color": GREY,
    "ytick.color": GREY,
    "ytick.left": False,
    "svg.hashsalt": "0",
}
styled = matplotlib.rc_context(STYLE)  # decorates a function that draws


def panels(names: list[str], caption: str, below: str) -> list[Axes]:
    """One panel for each name, in rows. caption: above them all; below: what the horizontal axis is."""
    columns = 2 if len(names) == 4 else min(len(names), 3)
    rows = math.ceil(len(names) / columns)
    height = TOP + rows * PANEL + (rows - 1) * TITLE + BOTTOM
    figure = Figure(figsize=(WIDTH, height))
    width = (WIDTH - LEFT - RIGHT - (columns - 1) * GAP) / columns
    figure.subplots_adjust(
        left=LEFT / WIDTH,
        right=1 - RIGHT / WIDTH,
        top=1 - TOP / height,
        bottom=BOTTOM / height,
        wspace=GAP / width,
        hspace=TITLE / PANEL,
    )
    cells = list(figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False).flat)
    for axis, name in zip(cells, names):
        axis.set_title(name)
    for axis in cells[len(names) :]:
        axis.remove()
    for axis in cells[: len(names)][-columns:]:
        axis.tick_params(labelbottom=True)  # also above an empty place
    figure.text(0.1 / WIDTH, 1 - 0.1 / height, caption, va="top", size=10, color=GREY)
    figure.text(LEFT / WIDTH, 0.1 / height, below, size=10, color=GREY)
    return cells[: len(names)]


def percent_axis(axis: Axes, highest: float) -> None:
    """From 0 to the quarter above the highest value."""
    top = max(math.ceil(4 * highest), 1)
    quarters = range(top + 1)
    axis.set_ylim(0, top / 4)
    axis.set_yticks([quarter / 4 for quarter in quarters], [f"{25 * quarter} %" for quarter in quarters])


def count_axis(axis: Axes, longest: float) -> None:
    """From 0 to the longest count, with one round number between."""
    axis.set_xlim(0, longest)
    axis.xaxis.set_major_locator(ticker.MaxNLocator(2, steps=[1, 2, 5, 10]))
    axis.xaxis.set_major_formatter("{x:,.0f}")


def label_end(axis: Axes, x: float, y: float, text: str, color: str = BLUE) -> None:
    """Write a text to the right of a line's end. Its white edge keeps it apart from a band."""
    edge = [patheffects.withStroke(linewidth=3, foreground="white")]
    axis.annotate(text, (x, y), xytext=(5, 0), textcoords="offset points", va="center", color=color, path_effects=edge)


def save(figure: Figure, path: Path) -> None:
    """Write an SVG without the date."""
    figure.savefig(path, metadata={"Date": None})
