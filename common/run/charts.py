"""The curves of a report: panels as HTML with a small inline SVG each, in the colours of the page.

matplotlib draws axes and curves. Titles, explanations and legends are HTML, which wraps, so that no text can leave its
panel. The SVGs name variables of the page's style instead of colours, so they follow its dark mode.
"""

import html
import io
import math
import re
from dataclasses import dataclass

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

Rows = list[dict[str, float]]  # metrics.jsonl

PHASES = {  # phase of a step -> ways to make it faster
    "rollout": "shorter responses (--max-response-tokens), more memory for the engine (--rollout-memory)",
    "wait": "more rollout servers, because responses take longer than training",
    "reward": "more workers, or a service on another machine (docs/rewards.md)",
    "logprobs": "a larger --token-budget",
    "update": "a larger --token-budget, no --activation-checkpointing or --offload if memory allows",
    "sync": "more prompts a step (--prompts-per-step)",
    "eval": "a larger --eval-every, fewer --eval-prompts",
    "save": "a larger --save-every, --async-save",
}
NO_PHASES = {"step", "environment"}  # the whole step, and a part of the rollout
PHASE = "time/[^/]+"  # pattern of the metrics of phases
SHARE = "%"


@dataclass(frozen=True)
class Panel:
    """Curves that share a scale."""

    title: str
    metrics: str  # pattern of the metrics in it
    unit: str  # of the vertical axis; SHARE: the values are shares, shown in percent
    meaning: str
    log: bool = False  # a logarithmic scale, if all values are above 0
    stacked: bool = False  # the phases of a step, on top of each other


SECTIONS = {  # heading -> its panels
    "Learning": (
        Panel("Held-out accuracy", "eval/accuracy", SHARE, "Problems that training never shows, answered greedily."),
        Panel("Accuracy on each held-out set", "eval/[^/]+/accuracy", SHARE, "The same, for each data set alone."),
        Panel("Held-out reward", "eval/reward", "score", "Mean score of the greedy answers."),
        Panel(
            "Reward while sampling",
            "reward/mean",
            "score",
            "Mean score of all graded responses, filtered ones too.",
        ),
        Panel("Each reward", "reward/[^/]+/mean", "score", "Mean of each reward, before its weight."),
        Panel("Share right", "reward/accuracy", SHARE, "Right responses, or pairs with the chosen one ahead."),
        Panel("Training loss", "train/loss", "loss", "Of the step's mini-batches. Lower is better."),
        Panel("Implicit rewards", "reward/(chosen|rejected)", "reward", "Of the pairs. Their gap should grow."),
    ),
    "Responses": (
        Panel("Length", "response/length_mean", "tokens", "Mean length of a sampled response."),
        Panel("Cut off", "response/truncated_frac", SHARE, "Responses that hit the limit. A rise is a bad sign."),
        Panel("Groups without a signal", "group/zero_std_frac", SHARE, "Prompts whose responses all scored alike."),
        Panel("Turns", "(environment|eval)/turns", "turns", "How often the policy speaks in an episode."),
        Panel("Tool calls", "environment/(calls|errors)", "calls", "All calls of an episode, and those that failed."),
        Panel(
            "Failed environments", "environment/failed_frac", SHARE, "Episodes whose environment hung, died or raised."
        ),
    ),
    "Updates": (
        Panel("Gradient norm", ".*grad_norm", "norm", "Before clipping. Spikes mean unstable updates."),
        Panel(
            "Clipped tokens",
            "train/clip_frac",
            SHARE,
            "Tokens that the clip left no gradient. CISPO: those with a clipped weight.",
        ),
        Panel("Entropy", "train/entropy", "nats a token", "How undecided the policy is. Near 0 it no longer explores."),
        Panel("KL to another model", "(?!mismatch/).*/kl", "nats", "Distance to the reference or the teacher."),
        Panel(
            "Critic's explained variance",
            "critic/explained_variance",
            "share",
            "1 is perfect, 0 is no better than a constant.",
        ),
        Panel("Critic's loss", "loss/value", "loss", "Error of the predicted returns."),
        Panel("Right pairs", "prm/pair_accuracy", SHARE, "Ranked by the process reward model. Chance is 50 %."),
    ),
    "Engine and time": (
        Panel(
            "Trainer against engine",
            "mismatch/logprob_abs_(mean|max)",
            "nats",
            "Log-probs of the same tokens: rounding error.",
            log=True,
        ),
        Panel("Age of the weights", "mismatch/staleness(_max)?", "steps", "How far the sampling policy is behind."),
        Panel("Seconds of a step", PHASE, "seconds", "Its phases, on top of each other.", stacked=True),
        Panel(
            "Sampled tokens", "throughput/tokens_per_s", "tokens a second", "Over the whole step, training included."
        ),
        Panel("Waiting for environments", "(time|overlapped)/environment", "seconds", "Of an episode, on average."),
    ),
}

WIDTH = 4.0  # inches; the page scales the chart to the width of its panel
HEIGHT = 2.3
MOST_STEPS = 1000  # of a stack. matplotlib thins out long lines by itself, but not areas.
# matplotlib needs colours. Nothing else in a chart has these, so they can be replaced by variables of the page.
INK = "#0c0c00"
GRID = "#0c0c01"
LINES = [f"#0c0c{number:02x}" for number in range(16, 26)]
VARIABLES = {INK: "var(--ink)", GRID: "var(--grid)"}
VARIABLES |= {line: f"var(--line-{number})" for number, line in enumerate(LINES)}
RC = {
    "svg.hashsalt": "0",  # no random names, because the same run must give the same file
    "svg.fonttype": "none",  # texts stay texts, in the font of the page
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": GRID,
    "xtick.color": INK,
    "ytick.color": INK,
    "grid.color": GRID,
    "axes.prop_cycle": matplotlib.cycler(color=LINES),
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "font.size": 8.5,
}


def draw(rows: Rows) -> str:
    """All panels for which there are metrics, under their headings."""
    parts = []
    for heading, panels in SECTIONS.items():
        figures = [figure(panel, rows, names) for panel in panels if (names := shown(panel, rows))]
        if figures:
            parts.append(f"<h3>{heading}</h3><div class=panels>{''.join(figures)}</div>")
    return "\n".join(parts)


def shown(panel: Panel, rows: Rows) -> list[str]:
    """The metrics of a panel. Weights that are never old have no panel."""
    if panel.stacked:
        return [f"time/{phase}" for phase in phases(rows)]
    names = matching(rows, panel.metrics)
    if "mismatch/staleness" in names and not any(row.get("mismatch/staleness") for row in rows):
        return []
    return names


def phases(rows: Rows) -> list[str]:
    """The phases whose time was measured: those of PHASES in their order, then those that only one algorithm has."""
    timed = {name.removeprefix("time/") for name in matching(rows, PHASE)} - NO_PHASES
    return [phase for phase in PHASES if phase in timed] + sorted(timed - PHASES.keys())


def matching(rows: Rows, pattern: str) -> list[str]:
    """The names of the metrics in these rows that a pattern describes, sorted."""
    names = {name for row in rows for name in row}
    return sorted(name for name in names if re.fullmatch(pattern, name))


def figure(panel: Panel, rows: Rows, names: list[str]) -> str:
    """A panel with its title, what it means, the last value of each curve, and the curves."""
    last_values = []
    for number, name in enumerate(names):
        last = [row[name] for row in rows if name in row][-1]
        color = f"var(--line-{number % len(LINES)})"
        text = html.escape(label(name, names))
        last_values.append(f"<li><i style='background:{color}'></i>{text} <b>{in_unit(last, panel.unit)}</b>")
    return "\n".join(
        [
            f"<figure><h4>{html.escape(panel.title)}</h4><p>{html.escape(panel.meaning)}</p>",
            f"<ul class=legend>{''.join(last_values)}</ul>",
            svg(panel, rows, names),
            "</figure>",
        ]
    )


def in_unit(value: float, unit: str) -> str:
    """A value as a text; a share in percent."""
    if unit == SHARE:
        return f"{value:.1%}"
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"


def svg(panel: Panel, rows: Rows, names: list[str]) -> str:
    """The curves of a panel as an inline SVG without a size, a name or a colour of its own."""
    with matplotlib.rc_context(RC):
        chart = Figure(figsize=(WIDTH, HEIGHT))
        # A layout engine would find the margins, too, but it draws everything twice.
        axis = chart.add_axes((0.16, 0.19, 0.81, 0.74))
        if panel.stacked:
            draw_phases(axis, rows, names)
        else:
            draw_curves(axis, rows, names, log=panel.log)
        axis.set_xlabel("step")
        axis.set_ylabel(panel.unit)
        axis.locator_params(axis="x", integer=True, nbins=6)
        if axis.get_yscale() == "linear":
            axis.locator_params(axis="y", nbins=5)
            axis.ticklabel_format(axis="y", scilimits=(-3, 4))
        if panel.unit == SHARE:
            # Shares of 0 throughout would get an axis from -5 % to 5 %.
            low, high = axis.get_ylim()
            axis.set_ylim(max(low, -0.05 * high), high if high > 0.01 else 0.01)
            axis.yaxis.set_major_formatter(FuncFormatter(percent))
        axis.minorticks_off()  # a logarithmic scale has some
        axis.tick_params(length=0)
        axis.grid(linewidth=0.7)
        axis.set_axisbelow(True)
        buffer = io.StringIO()
        nothing = {"Date": None, "Creator": None, "Format": None, "Type": None}
        chart.savefig(buffer, format="svg", metadata=nothing, transparent=True)
    drawn = re.search(r'viewBox="([^"]+)".*?>\n(.*)</svg>', buffer.getvalue(), re.DOTALL)
    title = html.escape(f"{panel.title}: curves over the steps")
    # In HTML the declarations of namespaces and types are not needed, and neither are the names of groups, which the
    # next panel has again.
    inside = re.sub(r'<g id="[^"]*">', "<g>", drawn[2])
    inside = re.sub(r' type="text/css"|<metadata>.*?</metadata>', "", inside, flags=re.DOTALL)
    for color, variable in VARIABLES.items():
        inside = inside.replace(color, variable)
    return f'<svg viewBox="{drawn[1]}" role=img aria-label="{title}">{inside}</svg>'


def percent(value: float, place: int) -> str:
    """The label of a tick for a share."""
    return f"{100 * value:.4g}"


def draw_phases(axis: Axes, rows: Rows, names: list[str]) -> None:
    """The seconds of a step's phases on top of each other."""
    timed = [row for row in rows if "time/step" in row]
    timed = timed[:: 1 + len(timed) // MOST_STEPS]
    steps = [row["step"] for row in timed]
    seconds = [[row.get(name, 0.0) for row in timed] for name in names]
    axis.stackplot(steps, *seconds, colors=LINES, alpha=0.85)


def draw_curves(axis: Axes, rows: Rows, names: list[str], log: bool = False) -> None:
    """The curves of one panel, each where its metric was measured."""
    lowest = math.inf
    for name in names:
        measured = [row for row in rows if name in row]
        values = [row[name] for row in measured]
        # A metric that is measured now and then, or only once, has dots.
        style = "o-" if name.startswith("eval/") or len(values) == 1 else "-"
        axis.plot([row["step"] for row in measured], values, style, linewidth=1.6, markersize=4, clip_on=False)
        lowest = min([lowest, *values])
    if log and lowest > 0:
        axis.set_yscale("log")


def label(name: str, names: list[str]) -> str:
    """The parts of a metric's name that tell it from the others of its panel: "gsm8k" for reward/gsm8k/mean.

    A metric that is alone in its panel needs no name.
    """
    if len(names) == 1:
        return "last"
    columns = zip(*[other.split("/") for other in names])
    return "/".join(part for part, column in zip(name.split("/"), columns) if len({*column}) > 1)
