"""Write one HTML file that shows a run: curves, times of the phases, sample responses, and how to run it again."""

import html
import io
import json
import statistics
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure

from common.run import traces
from common.run.directory import described, read_metrics

PHASES = {  # phase of a step -> ways to make it faster
    "rollout": "shorter responses (--max-response-tokens), more memory for the engine (--rollout-memory)",
    "wait": "more --rollout-devices, because responses take longer than training",
    "reward": "more workers, or a service on another machine (docs/rewards.md)",
    "logprobs": "--mini-batches 1, which needs no forward for old log-probs; a larger --token-budget",
    "prm": "a larger --token-budget, no --activation-checkpointing or --offload if memory allows",
    "update": "a larger --token-budget, no --activation-checkpointing or --offload if memory allows",
    "sync": "more prompts a step (--prompts-per-step); with --max-inflight-batches 2 it waits for responses in flight",
    "eval": "a larger --eval-every, fewer --eval-prompts",
    "save": "a larger --save-every, --async-save",
}
STYLE = """body{font:15px/1.5 system-ui,sans-serif;max-width:1000px;margin:2em auto;padding:0 1em;color:#222}
svg{width:100%;height:auto}table{border-collapse:collapse}td,th{padding:.2em .8em;border-bottom:1px solid #ddd;
text-align:left;vertical-align:top}pre{white-space:pre-wrap;background:#f6f6f6;padding:.5em;margin:0}
.right{color:#087f23}.wrong{color:#b00020}"""


def write(run_dir: Path) -> Path:
    """Render run_dir/report.html from run.json, metrics.jsonl and the last file of rollouts/. Raises BadInput."""
    run = described(run_dir / "run.json")
    metrics = read_metrics(run_dir)
    steps = [row for row in metrics if "reward/mean" in row]
    rollouts = traces.read(traces.find(run_dir))[:8] if traces.saved(run_dir) else []
    parts = [
        f'<!doctype html><meta charset=utf-8><meta http-equiv="Content-Security-Policy" content="{traces.POLICY}">',
        f"<title>{html.escape(run_dir.name)}</title><style>{STYLE}</style>",
        f"<h1>{html.escape(run_dir.name)}</h1>",
        summary(metrics),
        draw(steps, metrics),
        "<h2>Responses of the last saved step</h2>",
        responses(rollouts),
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
    if whole:
        shares = ", ".join(f"{phase} {seconds / whole:.0%}" for phase, seconds in totals.items() if seconds)
        slowest = max(totals, key=totals.get)
        lines.append(f"{whole:.0f} s in {sum('time/step' in row for row in metrics)} steps: {shares}.")
        lines.append(f"Most of it is {slowest}. Ways to make it faster: {PHASES[slowest]}.")
    return "<p>" + " ".join(lines) + "</p>"


def draw(steps: list[dict], metrics: list[dict]) -> str:
    """Six panels of curves as one inline SVG. steps: the rows of training steps; metrics: all rows."""
    figure = Figure(figsize=(11, 6.5), layout="constrained")
    axes = figure.subplots(2, 3).flat
    x = [row["step"] for row in steps]

    def curve(axis, title: str, *names: str) -> None:
        for name in names:
            axis.plot(x, [row.get(name, float("nan")) for row in steps], label=name.split("/")[-1])
        axis.set_title(title)
        axis.set_xlabel("step")
        if len(names) > 1:
            axis.legend(fontsize="small")

    curve(axes[0], "reward (sampled)", "reward/mean")
    evaluated = [row for row in metrics if "eval/accuracy" in row]
    axes[1].plot([row["step"] for row in evaluated], [row["eval/accuracy"] for row in evaluated], "o-")
    axes[1].set_title("greedy accuracy, held out")
    axes[1].set_xlabel("step")
    curve(axes[2], "response length, tokens", "response/length_mean")
    axes[3].stackplot(x, *[[row.get(f"time/{phase}", 0.0) for row in steps] for phase in PHASES], labels=[*PHASES])
    axes[3].set_title("seconds a step")
    axes[3].set_xlabel("step")
    axes[3].legend(fontsize="small", loc="lower left")
    curve(axes[4], "trainer - engine, |log-prob|", "mismatch/logprob_abs_mean", "mismatch/logprob_abs_max")
    if any(row.get("mismatch/logprob_abs_max", 0) > 0 for row in steps):
        axes[4].set_yscale("log")
    curve(axes[5], "entropy, nats a token", "train/entropy")
    buffer = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": "0"}):  # the same run gives the same file
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    return buffer.getvalue().partition("<!DOCTYPE")[2].partition(">")[2]


def responses(rollouts: list[dict]) -> str:
    """An HTML table with one row for each response."""
    rows = ["<table><tr><th>prompt<th>response<th>score<th>advantage<th>end"]
    for row in rollouts:
        mark = "right" if row["acc"] else "wrong"
        score = "could not be graded" if row["score"] is None else f"{row['score']:g}"
        each = row["advantage"] if isinstance(row["advantage"], list) else [row["advantage"]]
        advantage, end = statistics.fmean(each or [0.0]), html.escape(row["finish_reason"])
        rows.append(
            f"<tr><td><pre>{html.escape(row['prompt'])}</pre><td><pre>{html.escape(row['response'])}</pre>"
            f"<td class={mark}>{score}<td>{advantage:+.2f}<td>{end}"
        )
    return "\n".join([*rows, "</table>"])
