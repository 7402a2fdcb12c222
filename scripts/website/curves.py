"""The committed CSVs of an algorithm's baselines as figures that show their numbers when hovered.

A page holds the data as JSON, and assets/curves.js draws them with Plotly. Without JavaScript the committed picture of
all curves takes their place.
"""

import csv
import html
import json
from pathlib import Path

ROOT = Path(__file__).parents[2]
SHOWN = {  # column: how the figure names it
    "eval/accuracy": "held-out accuracy",
    "reward/mean": "reward while training",
    "train/loss": "loss",
}
TITLES = {  # task: the heading of its figure, in the order of the page
    "arithmetic": "Embedded arithmetic, a model of 0.8 M parameters",
    "sums": "Sums and differences, SmolLM2-135M",
    "gcd": "Greatest common divisors, SmolLM2-135M",
    "functions": "Short Python functions, SmolLM2-135M",
    "reverse": "Words backwards, SmolLM2-135M",
    "maze": "Mazes, the embedded model",
    "calculator": "Products with a calculator, several turns",
    "guess": "A guessing game, several turns",
    "squares": "Squares in images",
    "hybrid": "Embedded arithmetic, a hybrid model",
}


def seeds(task: str, name: str) -> dict[str, dict[str, list]]:
    """Seed -> column -> its points [step, value], from baselines/TASK/NAME/seed*.csv."""
    found = {}
    for path in sorted((ROOT / "baselines" / task / name).glob("seed*.csv")):
        with path.open() as file:
            rows = list(csv.DictReader(file))
        found[path.stem] = {
            column: [[int(row["step"]), float(row[column])] for row in rows if row.get(column)] for column in SHOWN
        }
    return found


def tasks(name: str) -> list[str]:
    """Tasks with a baseline of the algorithm, those of TITLES first."""
    found = {path.parents[1].name for path in (ROOT / "baselines").glob(f"*/{name}/seed*.csv")}
    return [task for task in TITLES if task in found] + sorted(found - TITLES.keys())


def figure(name: str) -> str:
    """HTML of all figures of an algorithm, for algorithms/NAME/ of the site."""
    parts = ["Thick: accuracy on held-out prompts. Thin: the reward while training. Each seed has its colour."]
    for task in tasks(name):
        data = {"title": TITLES.get(task, task), "names": SHOWN, "seeds": seeds(task, name)}
        alt = f"{name}: accuracy on {task} against responses, among all runs"
        parts.append(
            f'<figure class="curve" data-task="{task}"><figcaption>{html.escape(data["title"])}</figcaption>'
            f'<script type="application/json">{json.dumps(data)}</script>'
            f'<div class="plot"></div>'
            f'<noscript><img src="../../baselines/{task}/curves.svg" alt="{alt}"></noscript></figure>'
        )
    return "\n\n".join(parts)
