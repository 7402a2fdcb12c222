"""README.md of an exported model: what it was trained from, how, and how far it came, ready for a hub."""

import shlex
from pathlib import Path

from huggingface_hub import ModelCardData

from common.preflight.run_directory import command_of, described, read_metrics, without_path

ROWS = 12  # steps in the table
COLUMNS = {  # title -> metric
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
    run = described(run_dir / "run.json")
    metrics = [row for row in read_metrics(run_dir) if row["step"] <= step]
    args = run["args"]
    algorithm = run["algorithm"]
    is_folder = Path(args["model"]).is_dir()
    base = Path(args["model"]).name if is_folder else args["model"]
    tags = [algorithm]
    data = f"`{' '.join(map(without_path, args['dataset']))}`"
    if "reward" in args:
        tags.insert(0, "reinforcement-learning")
        data += f", reward: `{' '.join(args['reward'])}`"
    front_matter = ModelCardData(
        library_name="transformers",
        pipeline_tag="text-generation",
        base_model=None if is_folder else base,  # a hub knows only its own names
        tags=tags,
    )
    base = base or "random weights"  # SFT without --model
    commit = f"`{run['commit'] or 'unknown'}`"
    if run.get("uncommitted_changes"):
        commit += ", with uncommitted changes"
    versions = ", ".join(f"{name} {number}" for name, number in run["versions"].items())
    hardware = f"{run['hardware']['ranks']} rank(s) on {run['hardware']['device']}"
    return f"""---
{front_matter.to_yaml()}
---
# {base}, trained with {algorithm}

- base model: `{base}`
- algorithm: `{without_path(run.get("file", f"algos/{algorithm}.py"))}` at commit {commit}
- data: {data}
- steps: {step} of {args["steps"]}, seed {args["seed"]}, {hardware}
- versions: {versions}

```
{shlex.join(command_of(run))}
```

{table(metrics)}
"""


def table(metrics: list[dict]) -> str:
    """Rows of metrics.jsonl as Markdown: about ROWS, the first and the last among them, and those with an evaluation,
    unless they are more than ROWS.
    """
    columns = {title: name for title, name in COLUMNS.items() if any(name in row for row in metrics)}
    # Counted from the end, so the last step is there. The first one is added if it is not.
    every = 1 + len(metrics) // ROWS
    evaluated = [row for row in metrics if "eval/accuracy" in row]
    wanted = {row["step"] for row in (*metrics[:1], *metrics[::-every])}
    if len(evaluated) <= ROWS:
        wanted |= {row["step"] for row in evaluated}
    shown = [row for row in metrics if row["step"] in wanted]
    lines = [f"| step | {' | '.join(columns)} |", f"|---|{'---|' * len(columns)}"]
    for row in shown:
        cells = [f"{row[name]:.3f}" if name in row else "" for name in columns.values()]
        lines.append(f"| {row['step']} | {' | '.join(cells)} |")
    return "\n".join(lines)
