"""README.md of an exported model: what it was trained from, how, and how far it came, ready for a hub."""

import json
import shlex
from pathlib import Path

from common.preflight.run_directory import described, read_metrics

ROWS = 12  # steps in the table

# Title of a column -> metric.
COLUMNS = {
    "reward": "reward/mean",
    "greedy accuracy": "eval/accuracy",
    "response length": "response/length_mean",
    "training loss": "train/loss",
    "share right": "reward/accuracy",
    "gradient norm": "train/grad_norm",
    "entropy": "train/entropy",
}


def text(run_dir: Path, step: int) -> str:
    """The card of the policy after `step`, made from run.json and metrics.jsonl. Folders lose their path."""
    run, metrics = described(run_dir / "run.json"), [row for row in read_metrics(run_dir) if row["step"] <= step]
    args, algorithm = run["args"], run["algorithm"]
    base = Path(args["model"]).name if Path(args["model"]).is_dir() else args["model"]
    base = base or "random weights"  # SFT without --model
    about = ["library_name: transformers", "pipeline_tag: text-generation"]
    about += [f"base_model: {json.dumps(base)}"] * (base == args["model"])  # a hub knows only names of its own
    short = lambda word: Path(word).name if Path(word).is_absolute() else word
    file = short(run.get("file", f"algos/{algorithm}.py"))
    rewarded = f", reward: `{' '.join(args['reward'])}`" if "reward" in args else ""
    about += ["tags:", *["- reinforcement-learning"] * bool(rewarded), f"- {algorithm}"]
    versions = ", ".join(f"{name} {number}" for name, number in run["versions"].items())
    hardware = f"{run['hardware']['ranks']} rank(s) on {run['hardware']['device']}"
    return "\n".join(
        [
            "---", *about, "---",
            f"# {base}, trained with {algorithm}",
            "",
            f"- base model: `{base}`",
            f"- algorithm: `{file}` at commit `{run['commit'] or 'unknown'}`",
            f"- data: `{' '.join(map(short, args['dataset']))}`" + rewarded,
            f"- steps: {step} of {args['steps']}, seed {args['seed']}, {hardware}",
            f"- versions: {versions}",
            "",
            "```",
            shlex.join(["python", *map(short, run["argv"])]),
            "```",
            "",
            *table(metrics),
            "",
        ]
    )  # fmt: skip


def table(metrics: list[dict]) -> list[str]:
    """About ROWS of the rows of metrics.jsonl as lines of Markdown, the first and the last among them."""
    columns = {title: name for title, name in COLUMNS.items() if any(name in row for row in metrics)}
    every = max(1, -(-(len(metrics) - 1) // ROWS))
    kept = [row for place, row in enumerate(metrics) if (len(metrics) - 1 - place) % every == 0 or place == 0]
    lines = [f"| step | {' | '.join(columns)} |", f"|---|{'---|' * len(columns)}"]
    for row in kept:
        cells = [f"{row[name]:.3f}" if name in row else "" for name in columns.values()]
        lines.append(f"| {row['step']} | {' | '.join(cells)} |")
    return lines
