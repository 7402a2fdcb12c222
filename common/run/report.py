"""Write one HTML file that shows a run: curves, times of the phases, sample responses, and how to run it again."""

import csv
import html
import io
import json
import math
import re
import statistics
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure

from common.data import arithmetic
from common.errors import BadInput
from common.preflight.run_directory import described, read_metrics
from common.run import traces

PHASES = {  # phase of a step -> ways to make it faster
    "rollout": "shorter responses (--max-response-tokens), more memory for the engine (--rollout-memory)",
    "wait": "more --rollout-devices or --rollout-urls, because responses take longer than training",
    "reward": "more workers, or a service on another machine (docs/rewards.md)",
    "logprobs": "a larger --token-budget; fewer --mini-batches, as the first needs none without KL in the reward",
    "prm": "a larger --token-budget, no --activation-checkpointing or --offload if memory allows",
    "update": "a larger --token-budget, no --activation-checkpointing or --offload if memory allows",
    "sync": "more prompts a step (--prompts-per-step); with --max-inflight-batches 2 it waits for responses in flight",
    "eval": "a larger --eval-every, fewer --eval-prompts",
    "save": "a larger --save-every, --async-save",
}
SHOWN_GROUPS, SHOWN_RESPONSES = 4, 4
COMPARED = ("reward/mean", "eval/accuracy", "response/length_mean")  # curves behind which the committed ones are drawn
STYLE = """body{font:15px/1.5 system-ui,sans-serif;max-width:1000px;margin:2em auto;padding:0 1em;color:#222}
svg{width:100%;height:auto}table{border-collapse:collapse}td,th{padding:.2em .8em;border-bottom:1px solid #ddd;
text-align:left;vertical-align:top}pre{white-space:pre-wrap;background:#f6f6f6;padding:.5em;margin:0}
.right{color:#087f23}.wrong{color:#b00020}"""


def write(run_dir: Path) -> Path:
    """Render run_dir/report.html from run.json, metrics.jsonl and the last file of rollouts/. Raises BadInput.

    A file of rollouts/ that cannot be read is named in the report and raises nothing, because runs call this, too.
    """
    run = described(run_dir / "run.json")
    metrics = read_metrics(run_dir)
    rollouts, complaint = [], ""
    try:
        rollouts = traces.read(traces.find(run_dir)) if traces.saved(run_dir) else []
    except BadInput as error:
        complaint = f"<p>not readable: {html.escape(str(error))}</p>"
    parts = [
        f'<!doctype html><meta charset=utf-8><meta http-equiv="Content-Security-Policy" content="{traces.POLICY}">',
        f"<title>{html.escape(run_dir.name)}</title><style>{STYLE}</style>",
        f"<h1>{html.escape(run_dir.name)}</h1>",
        summary(metrics),
        draw(metrics, committed(run)),
        "<h2>Responses of the last saved step</h2>",
        complaint or responses(rollouts),
        "<h2>Run</h2>",
        f"<pre>{html.escape(json.dumps(run, indent=2))}</pre>",
    ]
    path = run_dir / "report.html"
    # A half of a surrogate pair cannot be encoded, so it is escaped.
    path.write_text("\n".join(parts), encoding="utf-8", errors="backslashreplace")
    return path


def summary(metrics: list[dict]) -> str:
    """Sentences about the accuracy before and after, and about the phase that takes most of the time."""
    lines = []
    accuracies = [(row["step"], row["eval/accuracy"]) for row in metrics if "eval/accuracy" in row]
    if accuracies:
        (first, before), (last, after) = accuracies[0], accuracies[-1]
        lines.append(f"Greedy accuracy {before:.1%} at step {first}, <b>{after:.1%}</b> at step {last}.")
    totals = {phase: sum(row.get(f"time/{phase}", 0.0) for row in metrics) for phase in PHASES}
    whole = sum(row.get("time/step", 0.0) for row in metrics)
    if whole and any(totals.values()):  # SFT and DPO have a single phase.
        shares = ", ".join(f"{phase} {seconds / whole:.0%}" for phase, seconds in totals.items() if seconds)
        slowest = max(totals, key=totals.get)
        lines.append(f"{whole:.0f} s in {sum('time/step' in row for row in metrics)} steps: {shares}.")
        lines.append(f"Most of it is {slowest}. Ways to make it faster: {PHASES[slowest]}.")
    return "<p>" + " ".join(lines) + "</p>"


def panels(rows: list[dict]) -> list[tuple[str, list[str]]]:
    """(title, metrics) of each panel of curves that these rows of metrics.jsonl have."""
    names = {name for row in rows for name in row}
    wanted = [
        ("training loss", ["train/loss"]),
        ("implicit rewards of the pairs", ["reward/chosen", "reward/rejected"]),
        (
            f"share {'of pairs ranked right' if 'reward/chosen' in names else 'right by the first reward'}",
            ["reward/accuracy"],
        ),
        ("reward (sampled)", ["reward/mean"]),
        ("mean of each reward", sorted(name for name in names if re.fullmatch("reward/[^/]+/mean", name))),
        ("greedy accuracy, held out", ["eval/accuracy"]),
        ("reward of greedy responses, held out", ["eval/reward"]),
        ("turns of an episode", ["environment/turns", "eval/turns"]),
        ("calls of tools in an episode", ["environment/calls", "environment/errors"]),
        ("share of episodes whose environment failed", ["environment/failed_frac"]),
        ("seconds of an episode in its environment", ["time/environment"]),
        ("response length, tokens", ["response/length_mean"]),
        ("share of truncated responses", ["response/truncated_frac"]),
        ("share of groups with equal rewards", ["group/zero_std_frac"]),
        ("gradient norm", sorted(name for name in names if name.endswith("grad_norm"))),
        ("share of clipped tokens", ["train/clip_frac"]),
        ("entropy, nats a token", ["train/entropy"]),
        ("KL to the reference, nats", ["loss/kl", "reward/kl"]),
        ("KL to the teacher, nats a token", ["teacher/kl"]),
        ("trainer - engine, |log-prob|", ["mismatch/logprob_abs_mean", "mismatch/logprob_abs_max"]),
        ("seconds a step", [f"time/{phase}" for phase in PHASES]),
    ]
    return [(title, have) for title, given in wanted if (have := [name for name in given if name in names])]


def committed(run: dict) -> list[list[dict[str, float]]]:
    """The curves, a list of rows for each seed, of the baseline with a run's algorithm, data and model."""
    args = run["args"]
    names = [*args.get("dataset", []), run.get("algorithm")]
    if len(names) != 2 or not all(isinstance(name, str) and name.isidentifier() for name in names):
        return []
    folder, model = arithmetic.ROOT.joinpath("baselines", *names), Path(args.get("model", ""))
    first = folder / "seed0.json"
    starts = (arithmetic.WARM_START, arithmetic.ENVIRONMENTS_START, arithmetic.IMAGES_START)
    name = "embedded" if model in starts else model.name
    if not first.is_file() or Path(described(first)["args"].get("model", "")).name != name:  # A control has no args.
        return []
    return [read_curve(path) for path in sorted(folder.glob("seed*.csv"))]


def read_curve(path: Path) -> list[dict[str, float]]:
    """Rows of a baseline's CSV, without its empty fields."""
    with open(path, newline="") as file:
        return [{name: float(value) for name, value in row.items() if value} for row in csv.DictReader(file)]


def draw(rows: list[dict], behind: list[list[dict]] = ()) -> str:
    """All panels as one inline SVG. behind: curves of other runs, which are drawn in grey."""
    chosen = panels(rows)
    lines = max(1, math.ceil(len(chosen) / 3))
    figure = Figure(figsize=(11, 2.6 * lines))
    margins = {"bottom": 0.5 / (2.6 * lines), "top": 1 - 0.3 / (2.6 * lines)}  # a layout engine would draw all twice
    grid = figure.add_gridspec(lines, 3, left=0.06, right=0.99, wspace=0.3, hspace=0.55, **margins)
    for place, (title, names) in enumerate(chosen):
        axis = figure.add_subplot(grid[place])
        axis.set_title(title)
        axis.set_xlabel("step")
        axis.locator_params(axis="x", integer=True)
        if title == "seconds a step":
            steps = [row for row in rows if "time/step" in row]
            axis.stackplot(
                [row["step"] for row in steps],
                *[[row.get(name, 0.0) for row in steps] for name in names],
                labels=[label(name, names) for name in names],
            )
        for name in names if title != "seconds a step" else []:
            for seed, curve in enumerate(behind if name in COMPARED else []):
                known = [(row["step"], row[name]) for row in curve if name in row]
                axis.plot(*zip(*known), color="0.8", label=None if seed else "baseline")
            found = [(row["step"], row[name]) for row in rows if name in row]
            own = label(name, names) or "this run"
            axis.plot(*zip(*found), "o-" if name.startswith("eval/") else "-", label=own)
            if name.startswith("mismatch/") and all(value > 0 for _, value in found):
                axis.set_yscale("log")
        if len(names) > 1 or (behind and names[0] in COMPARED):
            axis.legend(fontsize="small")
    buffer = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": "0"}):  # the same run gives the same file
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    return buffer.getvalue().partition("<!DOCTYPE")[2].partition(">")[2]


def label(name: str, names: list[str]) -> str:
    """The parts of a metric's name that tell it from the others of its panel: "gsm8k" for reward/gsm8k/mean."""
    columns = zip(*[other.split("/") for other in names])
    return "/".join(part for part, column in zip(name.split("/"), columns) if len({*column}) > 1)


def choose(rollouts: list[dict]) -> list[list[dict]]:
    """The first SHOWN_GROUPS groups, those with unequal scores before the others, and SHOWN_RESPONSES of each: the
    highest scores and the lowest.
    """
    groups: dict[int, list[dict]] = {}
    for row in rollouts:
        groups.setdefault(row["index"], []).append(row)
    alike = lambda rows: len({row["score"] for row in rows}) == 1
    chosen = sorted(groups.values(), key=alike)[:SHOWN_GROUPS]
    rank = lambda row: math.inf if row["score"] is None else -row["score"]
    ranked, half = [sorted(rows, key=rank) for rows in chosen], SHOWN_RESPONSES // 2
    return [rows if len(rows) <= SHOWN_RESPONSES else rows[:half] + rows[-half:] for rows in ranked]


def responses(rollouts: list[dict]) -> str:
    """An HTML table: each prompt once, and a row for each of its chosen responses."""
    lines = ["<table><tr><th>prompt<th>response<th>found<th>reference<th>score<th>advantage<th>end"]
    shown = lambda value: html.escape("none" if value is None else str(value)[:200])
    for group in choose(rollouts):
        for place, row in enumerate(group):
            mark = "right" if row["acc"] else "wrong"
            score = "could not be graded" if row["score"] is None else f"{row['score']:g}"
            each = row["advantage"] if isinstance(row["advantage"], list) else [row["advantage"] or 0.0]
            prompt = f"<td rowspan={len(group)}><pre>{html.escape(row['prompt'])}</pre>" if place == 0 else ""
            lines.append(
                f"<tr>{prompt}<td><pre>{html.escape(row['response'])}</pre><td>{shown(row['extracted'])}"
                f"<td>{shown(row['answer'])}<td class={mark}>{score}<td>{statistics.fmean(each or [0.0]):+.2f}"
                f"<td>{html.escape(row['finish_reason'])}"
            )
    return "\n".join([*lines, "</table>"])
