"""Write one HTML file that shows a run: curves, times of the phases, sample responses, and how to run it again."""

import html
import io
import json
import math
import re
import statistics
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from common.errors import BadInput
from common.preflight.run_directory import described, read_metrics
from common.run import html_page, traces

Rows = list[dict[str, float]]  # metrics.jsonl

TRAINING = "a larger --token-budget, no --activation-checkpointing or --offload if memory allows"
PHASES = {  # phase of a step -> ways to make it faster
    "rollout": "shorter responses (--max-response-tokens), more memory for the engine (--rollout-memory)",
    "wait": "more rollout servers, because responses take longer than training",
    "reward": "more workers, or a service on another machine (docs/rewards.md)",
    "logprobs": "a larger --token-budget",
    "update": TRAINING,
    "sync": "more prompts a step (--prompts-per-step)",
    "eval": "a larger --eval-every, fewer --eval-prompts",
    "save": "a larger --save-every, --async-save",
}
NO_PHASES = {"step", "environment"}  # the whole step, and a part of the rollout
SECONDS = "seconds a step"
PANELS = {  # title -> pattern of the metrics in it
    "training loss": "train/loss",
    "implicit rewards of the pairs": "reward/(chosen|rejected)",
    "share right": "reward/accuracy",
    "reward (sampled)": "reward/mean",
    "mean of each reward": "reward/[^/]+/mean",
    "greedy accuracy, held out": "eval/accuracy",
    "greedy accuracy of each data set, held out": "eval/[^/]+/accuracy",
    "reward of greedy responses, held out": "eval/reward",
    "turns of an episode": "(environment|eval)/turns",
    "calls of tools in an episode": "environment/(calls|errors)",
    "share of episodes whose environment failed": "environment/failed_frac",
    "seconds of an episode in its environment": "time/environment",
    "response length, tokens": "response/length_mean",
    "share of truncated responses": "response/truncated_frac",
    "share of groups with equal rewards": "group/zero_std_frac",
    "gradient norm": ".*grad_norm",
    "share of clipped tokens": "train/clip_frac",
    "entropy, nats a token": "train/entropy",
    "KL to another model, nats": "(?!mismatch/).*/kl",
    "trainer - engine, |log-prob|": "mismatch/logprob_abs_(mean|max)",
    SECONDS: "time/[^/]+",
}
SHOWN_GROUPS = 4
SHOWN_RESPONSES = 4
STYLE = """body{font:15px/1.5 system-ui,sans-serif;max-width:1000px;margin:2em auto;padding:0 1em;color:#222}
svg{width:100%;height:auto}table{border-collapse:collapse}td,th{padding:.2em .8em;border-bottom:1px solid #ddd;
text-align:left;vertical-align:top}pre{white-space:pre-wrap;background:#f6f6f6;padding:.5em;margin:0}
.right{color:#087f23}.wrong{color:#b00020}"""


def write(run_dir: Path) -> Path:
    """Render run_dir/report.html from run.json, metrics.jsonl and the last file of rollouts/. Raises BadInput.

    A file of rollouts/ that cannot be read is named in the report and raises nothing, because runs write reports, too.
    """
    run = described(run_dir / "run.json")
    metrics = read_metrics(run_dir)
    # A run that was killed while it wrote a rollout file goes on, and its report must not end it then.
    try:
        rollouts = traces.read(traces.find(run_dir)) if traces.saved(run_dir) else []
        shown = responses(rollouts)
    except BadInput as error:
        shown = f"<p>not readable: {html.escape(str(error))}</p>"
    parts = [
        html_page.head(run_dir.name, STYLE),
        f"<h1>{html.escape(run_dir.name)}</h1>",
        summary(metrics),
        draw(metrics),
        "<h2>Responses of the last saved step</h2>",
        shown,
        "<h2>Run</h2>",
        f"<pre>{html.escape(json.dumps(run, indent=2))}</pre>",
    ]
    path = run_dir / "report.html"
    # A half of a surrogate pair cannot be encoded, so it is escaped.
    path.write_text("\n".join(parts), encoding="utf-8", errors="backslashreplace")
    return path


def summary(metrics: Rows) -> str:
    """Sentences about the accuracy before and after, and about the phase that takes most of the time."""
    sentences = []
    evaluated = [row for row in metrics if "eval/accuracy" in row]
    if evaluated:
        first = evaluated[0]
        last = evaluated[-1]
        sentences.append(
            f"Greedy accuracy {first['eval/accuracy']:.1%} at step {first['step']}, "
            f"<b>{last['eval/accuracy']:.1%}</b> at step {last['step']}."
        )
    seconds = {phase: sum(row.get(f"time/{phase}", 0.0) for row in metrics) for phase in phases(metrics)}
    steps = [row["time/step"] for row in metrics if "time/step" in row]
    whole = sum(steps)
    if whole and any(seconds.values()):  # SFT and DPO have a single phase.
        shares = ", ".join(f"{html.escape(phase)} {spent / whole:.0%}" for phase, spent in seconds.items() if spent)
        slowest = max(seconds, key=seconds.get)
        sentences.append(f"{whole:.0f} s in {len(steps)} steps: {shares}.")
        sentences.append(
            f"Most of it is {html.escape(slowest)}. Ways to make it faster: {PHASES.get(slowest, TRAINING)}."
        )
    return "<p>" + " ".join(sentences) + "</p>"


def phases(rows: Rows) -> list[str]:
    """The phases whose time was measured: those of PHASES in their order, then those that only one algorithm has."""
    timed = {name.removeprefix("time/") for name in matching(rows, PANELS[SECONDS])} - NO_PHASES
    return [phase for phase in PHASES if phase in timed] + sorted(timed - PHASES.keys())


def matching(rows: Rows, pattern: str) -> list[str]:
    """The names of the metrics in these rows that a pattern describes, sorted."""
    names = {name for row in rows for name in row}
    return sorted(name for name in names if re.fullmatch(pattern, name))


def panels(rows: Rows) -> dict[str, list[str]]:
    """title -> metrics of each panel of curves for which there are metrics."""
    # The phases have an order of their own, and some times are no phases.
    found = {title: matching(rows, pattern) for title, pattern in PANELS.items()}
    found[SECONDS] = [f"time/{phase}" for phase in phases(rows)]
    return {title: names for title, names in found.items() if names}


def draw(rows: Rows) -> str:
    """All panels as one inline SVG."""
    chosen = panels(rows)
    lines = max(1, math.ceil(len(chosen) / 3))
    height = 2.6 * lines
    figure = Figure(figsize=(11, height))
    # A layout engine would find the margins, too, but it draws everything twice.
    grid = figure.add_gridspec(
        lines,
        3,
        left=0.06,
        right=0.99,
        bottom=0.5 / height,
        top=1 - 0.3 / height,
        wspace=0.3,
        hspace=0.55,
    )
    for cell, (title, names) in zip(grid, chosen.items()):
        axis = figure.add_subplot(cell)
        axis.set_title(title)
        axis.set_xlabel("step")
        axis.locator_params(axis="x", integer=True)
        if title == SECONDS:
            draw_phases(axis, rows, names)
        else:
            draw_curves(axis, rows, names)
    # The same run must give the same file: no date, and no random names in the SVG.
    buffer = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": "0"}):
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    # HTML takes an inline SVG without the XML and document type declarations above it.
    return buffer.getvalue().partition("<!DOCTYPE")[2].partition(">")[2]


def draw_phases(axis: Axes, rows: Rows, names: list[str]) -> None:
    """The seconds of a step's phases on top of each other."""
    timed = [row for row in rows if "time/step" in row]
    steps = [row["step"] for row in timed]
    seconds = [[row.get(name, 0.0) for row in timed] for name in names]
    axis.stackplot(steps, *seconds, labels=[label(name, names) for name in names])
    if len(names) > 1:
        axis.legend(fontsize="small")


def draw_curves(axis: Axes, rows: Rows, names: list[str]) -> None:
    """The curves of one panel, each where its metric was measured."""
    for name in names:
        measured = [row for row in rows if name in row]
        values = [row[name] for row in measured]
        style = "o-" if name.startswith("eval/") else "-"
        axis.plot([row["step"] for row in measured], values, style, label=label(name, names))
        if name.startswith("mismatch/") and min(values) > 0:
            axis.set_yscale("log")
    if len(names) > 1:
        axis.legend(fontsize="small")


def label(name: str, names: list[str]) -> str:
    """The parts of a metric's name that tell it from the others of its panel: "gsm8k" for reward/gsm8k/mean."""
    columns = zip(*[other.split("/") for other in names])
    return "/".join(part for part, column in zip(name.split("/"), columns) if len({*column}) > 1)


def choose(rollouts: list[dict]) -> list[list[dict]]:
    """The first SHOWN_GROUPS groups, those with unequal scores first, and SHOWN_RESPONSES of each: the highest scores
    and the lowest.
    """
    groups: dict[int, list[dict]] = {}
    for row in rollouts:
        groups.setdefault(row["index"], []).append(row)
    unequal_first = sorted(groups.values(), key=scores_are_equal)
    chosen = []
    for group in unequal_first[:SHOWN_GROUPS]:
        ranked = sorted(group, key=descending_score)
        if len(ranked) > SHOWN_RESPONSES:
            half = SHOWN_RESPONSES // 2
            ranked = ranked[:half] + ranked[-half:]
        chosen.append(ranked)
    return chosen


def scores_are_equal(group: list[dict]) -> bool:
    return len({row["score"] for row in group}) == 1


def descending_score(row: dict) -> float:
    """Sorts the highest score first, and responses that could not be graded last."""
    return math.inf if row["score"] is None else -row["score"]


def responses(rollouts: list[dict]) -> str:
    """An HTML table: each prompt once, and a row for each of its chosen responses."""
    lines = ["<table><tr><th>prompt<th>response<th>found<th>reference<th>score<th>advantage<th>end"]
    for group in choose(rollouts):
        # The prompt's cell stands in the first row of its group and spans all of them.
        prompt = f"<td rowspan={len(group)}><pre>{html.escape(group[0]['prompt'])}</pre>"
        for row in group:
            advantages = row["advantage"] if isinstance(row["advantage"], list) else [row["advantage"] or 0.0]
            cells = [
                prompt,
                f"<td><pre>{html.escape(row['response'])}</pre>",
                f"<td>{short(row['extracted'])}",
                f"<td>{short(row['answer'])}",
                f"<td class={'right' if row['acc'] else 'wrong'}>",
                "could not be graded" if row["score"] is None else f"{row['score']:g}",
                why_not(row["info"] or {}),
                f"<td>{statistics.fmean(advantages or [0.0]):+.2f}",
                f"<td>{html.escape(row['finish_reason'])}",
            ]
            lines.append("<tr>" + "".join(cells))
            prompt = ""
    return "\n".join([*lines, "</table>"])


def why_not(info: dict) -> str:
    """What the grader says about a response that is not right, such as the first test that a program has failed."""
    said = [str(info[key]) for key in ("failure", "error", "timeout", "died") if info.get(key)]
    if "tests" in info:
        said.insert(0, f"{info['passed']} of {info['tests']} tests passed")
    return f"<br><small>{html.escape('; '.join(said)[:300])}</small>" if said else ""


def short(value) -> str:
    """The beginning of a text or of a grader's value, escaped."""
    return html.escape("none" if value is None else str(value)[:200])
