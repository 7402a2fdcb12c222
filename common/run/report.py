"""Write one HTML file that shows a run: what it has learned, checks, curves, problems before and after, responses.

The file is complete in itself: no script, no font, no image from elsewhere.
"""

import html
import json
import math
import shlex
import statistics
from collections import Counter
from itertools import groupby
from pathlib import Path

import numpy as np

from common.errors import BadInput
from common.preflight import folders
from common.preflight.run_directory import command_of, described, flat, read_metrics
from common.run import charts, estimates, guards, html_page, outcomes, traces
from common.run.charts import Rows
from common.run.outcomes import Change, Outcome
from common.run.response_table import shortened

SHOWN_GROUPS = 4
SHOWN_RESPONSES = 4
SHOWN_EXAMPLES = 8  # of each kind of problem
SHOWN_VALUES = (  # of rollouts/; ids and log-probs would need too much memory beside a run
    "index",
    "prompt",
    "response",
    "answer",
    "score",
    "acc",
    "extracted",
    "info",
    "advantage",
    "finish_reason",
)
LONGEST_TEXT = 4000  # characters of a prompt or a response
KINDS = {  # kind of outcomes.Change -> (title, what it means)
    "kept": ("still solved", "solved before and after"),
    "learned": ("learned", "unsolved before, solved after"),
    "forgotten": ("forgotten", "solved before, unsolved after"),
    "unsolved": ("still unsolved", "solved neither before nor after"),
}
STYLE = Path(__file__).with_name("report.css")


def write(run_dir: Path) -> Path:
    """Render run_dir/report.html from run.json, metrics.jsonl, evaluations/ and the last file of rollouts/.

    Raises BadInput. A file of evaluations/ or rollouts/ that cannot be read is named in the report and raises nothing,
    because runs write reports, too.
    """
    run = described(run_dir / "run.json")
    metrics = read_metrics(run_dir)
    unreadable = []
    # Somebody may have changed or cut such a file. A run writes reports, too, and must not end for it.
    try:
        evaluated = read_evaluations(run_dir, metrics)
    except BadInput as error:
        evaluated = {}
        unreadable.append(str(error))
    try:
        rollouts = []
        if traces.saved(run_dir):
            rollouts = traces.read(traces.find(run_dir), SHOWN_VALUES, optional=("sampled",))
        shown = responses(rollouts)
    except BadInput as error:
        shown = ""
        unreadable.append(str(error))
    parts = [
        html_page.head(run_dir.name, STYLE.read_text(encoding="utf-8")),
        header(run_dir.name, run, metrics, evaluated),
        checks(run, metrics, unreadable),
        problems(evaluated),
        section("Curves", charts.draw(metrics)),
        section("Where the time goes", times(metrics)),
        section("Responses of the last saved step", shown),
        "<h2>The run</h2>",
        command(run),
        f"<details><summary>run.json</summary><pre>{html.escape(json.dumps(run, indent=2))}</pre></details>",
    ]
    path = run_dir / "report.html"
    # A half of a surrogate pair cannot be encoded, so it is escaped.
    encoded = ("\n".join(parts) + "\n").encode("utf-8", "backslashreplace")
    folders.write(path, encoded.decode())
    return path


def section(title: str, contents: str) -> str:
    """A heading and what is below it; nothing if that is empty."""
    return f"<h2>{title}</h2>\n{contents}" if contents else ""


def read_evaluations(run_dir: Path, metrics: Rows) -> dict[int, list[Outcome]]:
    """Step -> outcomes, of the first and the last evaluation that are in the metrics, too. Raises BadInput."""
    measured = {row["step"] for row in metrics if "eval/accuracy" in row}
    files = {step: file for step, file in outcomes.saved(run_dir).items() if step in measured}
    if not files:
        return {}
    return {step: outcomes.read(files[step]) for step in sorted({min(files), max(files)})}


# The top of the page


def header(name: str, run: dict, metrics: Rows, evaluated: dict[int, list[Outcome]]) -> str:
    """What was trained, on what, how far it came, and how long it took."""
    args = flat(run["args"])
    trained = f"<b>{html.escape(str(run.get('algorithm', '?')))}</b> trained <b>{short_name(args.get('model'))}</b>"
    if args.get("dataset"):
        names = args["dataset"] if isinstance(args["dataset"], list) else [args["dataset"]]
        trained += f" on <b>{', '.join(map(short_name, names))}</b>"
    cards = [result(metrics, evaluated), *numbers(args, metrics)]
    return "\n".join(
        [
            f"<header><h1>{html.escape(name)}</h1><p>{trained}.</p>",
            f"<div class=cards>{''.join(cards)}</div></header>",
        ]
    )


def short_name(value) -> str:
    """A model or a data set, escaped. A folder of this machine is named without the way to it."""
    text = str(value or "a new model")
    return html.escape(Path(text).name if text.startswith("/") else text)


def result(metrics: Rows, evaluated: dict[int, list[Outcome]]) -> str:
    """The card of what was learned: the accuracy before and after, or else the reward or the loss."""
    rows = [row for row in metrics if "eval/accuracy" in row]
    if rows:
        return accuracies(rows, evaluated)
    for name, title, sign in (("reward/mean", "reward while sampling", 1), ("train/loss", "training loss", -1)):
        rows = [row for row in metrics if name in row]
        if rows:
            first = rows[0]
            last = rows[-1]
            worse = sign * last[name] < sign * first[name]
            values = from_to(f"{first[name]:.3g}", f"{last[name]:.3g}", len(rows), worse)
            about = f"{title}, {at_steps(first['step'], last['step'])}<br><small>nothing was evaluated</small>"
            return f"<div class='card main'><b>{values}</b>{about}</div>"
    return "<div class='card main'><b>nothing yet</b>no step has ended</div>"


def from_to(first: str, last: str, count: int, worse: bool) -> str:
    """Two values with an arrow, or one value if there was one measurement."""
    if count < 2:
        return first
    return f"{first} → <span class={'worse' if worse else 'better'}>{last}</span>"


def accuracies(rows: Rows, evaluated: dict[int, list[Outcome]]) -> str:
    """The card of the accuracy. rows: those with an evaluation. The intervals need the outcomes of the problems."""
    first = rows[0]
    last = rows[-1]
    worse = last["eval/accuracy"] < first["eval/accuracy"]
    values = from_to(f"{first['eval/accuracy']:.1%}", f"{last['eval/accuracy']:.1%}", len(rows), worse)
    title = f"greedy accuracy on held-out problems, {at_steps(first['step'], last['step'])}"
    note = ""
    compared = [*evaluated.values()]
    if len(compared) == 2:
        changes = outcomes.compare(*compared)
        if changes:
            note = gain(changes)
    elif compared and compared[0]:
        low, high = estimates.interval(np.array([outcome.acc for outcome in compared[0]]))
        note = f"95% interval {low:.1%} to {high:.1%}, {len(compared[0])} problems"
    return f"<div class='card main'><b>{values}</b>{title}<br><small>{note}</small></div>"


def at_steps(first: int, last: int) -> str:
    return f"step {first}" if first == last else f"step {first} to {last}"


def gain(changes: list[Change]) -> str:
    """The difference of two evaluations and the accuracy after, with their 95 % confidence intervals."""
    before = np.array([change.before.acc for change in changes])
    after = np.array([change.after.acc for change in changes])
    low, high = estimates.difference(after, before)
    change = 100 * (after.mean() - before.mean())
    after_low, after_high = estimates.interval(after)
    return (
        f"change {change:+.1f} points, 95% interval {100 * low:+.1f} to {100 * high:+.1f}<br>"
        f"after: 95% interval {after_low:.1%} to {after_high:.1%}, {len(changes)} problems"
    )


def numbers(args: dict, metrics: Rows) -> list[str]:
    """The cards of steps, time and tokens."""
    steps = [row for row in metrics if row["step"] > 0]
    done = max((row["step"] for row in steps), default=0)
    wanted = args.get("steps")
    cards = [f"<div class=card><b>{done:,}</b>{f'of {wanted:,} ' if isinstance(wanted, int) else ''}steps</div>"]
    seconds = sum(row.get("time/step", 0.0) for row in steps)
    if seconds:
        cards.append(
            f"<div class=card><b>{duration(seconds)}</b>in these steps<br>"
            f"<small>{seconds / len(steps):.3g} s a step, without loading</small></div>"
        )
    tokens = sum(row.get("throughput/tokens_per_s", 0.0) * row.get("time/step", 0.0) for row in steps)
    if math.isfinite(tokens) and tokens > 0:
        cards.append(f"<div class=card><b>{large(tokens)}</b>tokens sampled</div>")
    return cards


def duration(seconds: float) -> str:
    """A time for people, in its two largest units."""
    if not math.isfinite(seconds):
        return "?"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"


def large(number: float) -> str:
    """A large number with two or three digits."""
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return f"{number:.0f}"


# Checks


def checks(run: dict, metrics: Rows, unreadable: list[str]) -> str:
    """The section of what may be wrong with the run, warnings first, with what was found to be right below."""
    warnings = [f"not readable: {html.escape(message)}" for message in unreadable]
    passed: list[str] = []
    args = flat(run["args"])
    for check in (check_end, check_numbers, check_gap, check_signal, check_responses, check_entropy, check_accuracy):
        for fine, sentence in check(args, metrics):
            (passed if fine else warnings).append(html.escape(sentence))
    if run.get("uncommitted_changes"):
        warnings.append("The code had changes that were not committed.")
    lines = [f"<li class=warn>{sentence}</li>" for sentence in warnings]
    lines += [f"<li>{sentence}</li>" for sentence in passed]
    return section("Checks", f"<div class=box><ul class=checks>{''.join(lines)}</ul></div>" if lines else "")


Found = list[tuple[bool, str]]  # whether it is fine, and a sentence


def check_end(args: dict, metrics: Rows) -> Found:
    done = max((row["step"] for row in metrics), default=0)
    wanted = args.get("steps")
    if not isinstance(wanted, int):
        return []
    if done >= wanted:
        first = min((row["step"] for row in metrics if row["step"] > 0), default=0)
        if first > 1:  # it went on from a checkpoint of another run
            return [(True, f"Steps {first:,} to {wanted:,} are done. Earlier ones are in another folder.")]
        return [(True, f"All {wanted:,} steps are done.")]
    return [(False, f"{done:,} of {wanted:,} steps are done: the run is under way, or it ended early.")]


def check_numbers(args: dict, metrics: Rows) -> Found:
    broken = {name: row["step"] for row in metrics for name, value in row.items() if not math.isfinite(value)}
    return [(False, f"{name} is not finite in step {step}.") for name, step in broken.items()]


def check_gap(args: dict, metrics: Rows) -> Found:
    allowed = args.get("max_logprob_gap")
    rows = [row for row in metrics if "mismatch/logprob_abs_mean" in row]
    if not rows or not allowed:
        return []
    gaps = [(*guards.gap_and_bound(row, allowed), row["step"]) for row in rows]
    beyond = [found for found in gaps if found[0] > found[1]]
    gap, bound, step = max(beyond or gaps)
    limit = f"{bound:g} nats (--max-logprob-gap)"
    if beyond:
        return [(False, f"Trainer and engine disagree by {gap:.2g} per token in step {step}; the limit is {limit}.")]
    return [
        (True, f"Trainer and engine agree: the mean difference per token is at most {gap:.1g}; the limit is {limit}.")
    ]


def check_signal(args: dict, metrics: Rows) -> Found:
    largest = [row["advantage/abs_max"] for row in metrics if "advantage/abs_max" in row]
    if not largest:
        return []
    silent = sum(value == 0 for value in largest)
    if not silent:
        return [(True, "Every step had an advantage to learn from.")]
    longest = max(len([*run]) for is_silent, run in groupby(largest, lambda value: value == 0) if is_silent)
    fine = longest < guards.SILENT_STEPS and silent < len(largest)
    return [(fine, f"In {silent:,} of {len(largest):,} steps no response had an advantage.")]


def check_responses(args: dict, metrics: Rows) -> Found:
    found = []
    for name, none, some, allowed in (
        ("response/truncated_frac", "No response was cut off.", "of the responses were cut off", 1.0),
        ("reward/ungraded_frac", "Every response could be graded.", "of the responses could not be graded", 0.0),
        ("environment/failed_frac", "No environment failed.", "of the episodes lost their environment", 0.0),
    ):
        shares = [row[name] for row in metrics if name in row]
        if any(shares):
            # Responses may be cut off now and then. A step without any other is a warning of the run, too.
            fine = max(shares) < allowed
            found.append((fine, f"{statistics.fmean(shares):.2%} {some}, at most {max(shares):.1%} in a step."))
        elif shares:
            found.append((True, none))
    return found


def check_entropy(args: dict, metrics: Rows) -> Found:
    entropies = [row["train/entropy"] for row in metrics if "train/entropy" in row]
    if len(entropies) <= guards.WINDOW_STEPS:
        return []
    start = statistics.fmean(entropies[: guards.WINDOW_STEPS])
    lowest = min(entropies)
    if lowest < guards.COLLAPSED_SHARE * start:
        return [(False, f"The entropy fell from {start:.3g} to {lowest:.3g} nats a token: responses are all alike.")]
    return [(True, f"The entropy was never below {lowest:.3g} nats a token; it began at {start:.3g}.")]


def check_accuracy(args: dict, metrics: Rows) -> Found:
    rows = [row for row in metrics if "eval/accuracy" in row]
    if not rows:
        # Training on a fixed data set has no evaluation, so there it is no warning.
        fine = "eval_every" not in args
        return [(fine, "Nothing was evaluated, so this page cannot say what was learned: scripts/evaluate.py can.")]
    found = []
    if rows[0]["step"] > 0:
        found.append(
            (False, f"The first evaluation is after step {rows[0]['step']}: what was there before is unknown.")
        )
    best = max(rows, key=lambda row: row["eval/accuracy"])
    last = rows[-1]
    if best["eval/accuracy"] > last["eval/accuracy"]:
        better = f"{best['eval/accuracy']:.1%} after step {best['step']}"
        # A few points are noise: of 256 problems, the standard error of a share is up to 3.
        fine = best["eval/accuracy"] - last["eval/accuracy"] < 0.05
        found.append((fine, f"The best accuracy was {better}, and the last is {last['eval/accuracy']:.1%}."))
    return found


# Held-out problems before and after


def problems(evaluated: dict[int, list[Outcome]]) -> str:
    """The section of held-out problems by whether they were solved in the first and in the last evaluation."""
    if not evaluated:
        return ""
    steps = [*evaluated]
    if len(steps) == 1:
        return section(f"Held-out problems after step {steps[0]}", once(evaluated[steps[0]]))
    before, after = evaluated.values()
    changes = outcomes.compare(before, after)
    names = [step_name(step) for step in steps]
    contents = ["<div class=box>", bar(changes), table(changes, names)]
    ungraded = len(before) + len(after) - 2 * len(changes)
    if ungraded:
        contents.append(f"<p class=soft>{ungraded:,} further problems could be graded in one of the two only.</p>")
    contents.append(by_dataset(changes))
    for kind in ("learned", "forgotten", "unsolved", "kept"):
        of_kind = [change for change in changes if change.kind == kind]
        examples = [example([(steps[0], change.before), (steps[1], change.after)]) for change in sample(of_kind)]
        contents.append(folded(*KINDS[kind], len(of_kind), examples))
    return section("Held-out problems before and after", "\n".join([*contents, "</div>"]))


def step_name(step: int) -> str:
    return "before training" if step == 0 else f"after step {step}"


def sample(items: list) -> list:
    """SHOWN_EXAMPLES of them, spread over the data; fewer if there are no more."""
    count = min(SHOWN_EXAMPLES, len(items))
    return [items[number * len(items) // count] for number in range(count)]


def bar(changes: list[Change]) -> str:
    """A bar of the four kinds, and its legend."""
    counts = Counter(change.kind for change in changes)
    parts = [f"<i class={kind} style='flex:{counts[kind]}'></i>" for kind in KINDS if counts[kind]]
    legend = []
    for kind in KINDS:
        legend.append(f"<li><i class={kind}></i>{KINDS[kind][0]} <b>{counts[kind]:,}</b></li>")
    return f"<div class=bar aria-hidden=true>{''.join(parts)}</div><ul class=legend>{''.join(legend)}</ul>"


def table(changes: list[Change], names: list[str]) -> str:
    """Four counts with their sums. names: of the evaluations, such as "before training"."""
    counts = Counter((change.before.solved, change.after.solved) for change in changes)

    def cells(*kinds: tuple[bool, bool]) -> str:
        count = sum(counts[kind] for kind in kinds)
        return f"<td><b>{count:,}</b> <small>{count / max(1, len(changes)):.1%}</small></td>"

    later = f"<small>{names[1]}</small>"
    lines = [f"<thead><tr><th><th>solved{later}<th>unsolved{later}<th>all</thead><tbody>"]
    for solved, word in ((True, "solved"), (False, "unsolved")):
        row = [cells((solved, True)), cells((solved, False)), cells((solved, True), (solved, False))]
        lines.append(f"<tr><th>{word}<small>{names[0]}</small>{''.join(row)}")
    sums = [cells((True, True), (False, True)), cells((True, False), (False, False)), cells(*counts)]
    lines.append(f"<tr><th>all{''.join(sums)}")
    return f"<div class=scroll><table>{''.join(lines)}</table></div>"


def by_dataset(changes: list[Change]) -> str:
    """The counts of each data set, if there are several."""
    names = [*dict.fromkeys(change.after.dataset for change in changes)]
    if len(names) < 2:
        return ""
    titles = "".join(f"<th>{KINDS[kind][0]}" for kind in KINDS)
    lines = [f"<thead><tr><th>data set{titles}<th>before<th>after</thead><tbody>"]
    for name in names:
        own = [change for change in changes if change.after.dataset == name]
        counts = Counter(change.kind for change in own)
        cells = [f"<td>{counts[kind]:,}" for kind in KINDS]
        for solved in (counts["kept"] + counts["forgotten"], counts["kept"] + counts["learned"]):
            cells.append(f"<td>{solved / len(own):.1%}")
        lines.append(f"<tr><th>{short_name(name)}{''.join(cells)}")
    return f"<div class=scroll><table>{''.join(lines)}</table></div>"


def once(found: list[Outcome]) -> str:
    """What the only evaluation has solved."""
    contents = ["<div class=box><p class=soft>There is one evaluation, so nothing can be compared.</p>"]
    for solved, title in ((True, "solved"), (False, "unsolved")):
        own = [outcome for outcome in found if outcome.solved == solved]
        contents.append(folded(title, "", len(own), [example([(None, outcome)]) for outcome in sample(own)]))
    return "\n".join([*contents, "</div>"])


def folded(title: str, meaning: str, count: int, examples: list[str]) -> str:
    """Examples below a line that unfolds them."""
    if not count:
        return f"<details><summary>{title}: 0 <small>{meaning}</small></summary><p class=soft>none</p></details>"
    shown = f"{len(examples)} of {count:,} shown" if len(examples) < count else "all shown"
    about = ", ".join(filter(None, (meaning, shown)))
    return f"<details><summary>{title}: {count:,} <small>{about}</small></summary>{''.join(examples)}</details>"


def example(pairs: list[tuple[int | None, Outcome]]) -> str:
    """A problem with its responses. pairs: (step, outcome) of each evaluation."""
    problem = pairs[-1][1]
    shown = []
    for step, outcome in pairs:
        when = "" if step is None else f"{step_name(step)}: "
        mark = "<span class=right>right</span>" if outcome.solved else "<span class=wrong>wrong</span>"
        end = ", cut off" if outcome.truncated else ""
        shown.append(f"<div><small>{when}</small>{mark}<small>{end}</small>{pre(outcome.response)}</div>")
    reference = "" if problem.answer is None else f", reference <b>{short(problem.answer)}</b>"
    about = f"<small>{html.escape(problem.id)}{reference}</small>"
    return f"<div class=example>{about}{pre(problem.prompt)}<div class=pair>{''.join(shown)}</div></div>"


def pre(text: str) -> str:
    """A text of a model or of a data set, escaped, without its middle if it is long."""
    return f"<pre>{html.escape(shortened(text, LONGEST_TEXT))}</pre>"


# Time


def times(metrics: Rows) -> str:
    """The share of each phase, and how to make the slowest one faster."""
    seconds = {phase: sum(row.get(f"time/{phase}", 0.0) for row in metrics) for phase in charts.phases(metrics)}
    whole = sum(row["time/step"] for row in metrics if "time/step" in row)
    if not whole or not any(seconds.values()):  # SFT and DPO time no phases.
        return ""
    slowest = max(seconds, key=seconds.get)
    parts = []
    legend = []
    for number, (phase, spent) in enumerate(seconds.items()):
        color = f"var(--line-{number % len(charts.LINES)})"
        if spent > 0:
            parts.append(f"<i style='flex:{spent:.3f};background:{color}'></i>")
            legend.append(f"<li><i style='background:{color}'></i>{html.escape(phase)} <b>{spent / whole:.0%}</b></li>")
    advice = charts.PHASES.get(slowest, charts.PHASES["update"])
    return (
        f"<div class=box><div class=bar aria-hidden=true>{''.join(parts)}</div><ul class=legend>{''.join(legend)}</ul>"
        f"<p>The longest phase is {html.escape(slowest)}. Ways to make it shorter: {advice}.</p></div>"
    )


# Responses


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
    """Sorts the highest score first, and responses that left the step last."""
    score = traces.score(row)
    return math.inf if score is None else -score


def responses(rollouts: list[dict]) -> str:
    """Each prompt once, and below it its chosen responses."""
    if not rollouts:
        return ""
    groups = []
    for group in choose(rollouts):
        shown = [f"<div>{response_line(row)}{pre(row['response'])}</div>" for row in group]
        reference = group[0]["answer"]
        about = "" if reference is None else f"<small>reference <b>{short(reference)}</b></small>"
        groups.append(
            f"<div class=example>{about}{pre(group[0]['prompt'])}<div class=pair>{''.join(shown)}</div></div>"
        )
    count = f"{len(groups)} of {len({row['index'] for row in rollouts}):,} prompts"
    most = f"at most {SHOWN_RESPONSES} responses to each, the best and the worst"
    return f"<div class=box><p class=soft>{count}, {most}.</p>{''.join(groups)}</div>"


def response_line(row: dict) -> str:
    """How a response was graded and what training makes of it."""
    score = traces.score(row)
    if score is None:
        mark = "<span class=soft>left the step, not graded</span>"
    else:
        mark = f"<span class={'right' if row['acc'] else 'wrong'}>score {score:g}</span>"
    facts = [
        f"found {short(row['extracted'])}",
        f"advantage {traces.advantage(row) or 0.0:+.2f}",
        html.escape(str(row["finish_reason"])),
    ]
    return f"{mark} <small>{', '.join(facts)}{why_not(traces.info(row))}</small>"


def why_not(info: dict) -> str:
    """What the grader says about a response that is not right, such as the first test that a program has failed."""
    said = [str(info[name]) for name in ("ungraded", "failure", "error", "timeout", "died") if info.get(name)]
    if "tests" in info and "passed" in info:  # a user's reward may use one of the names for something else
        said.insert(0, f"{info['passed']} of {info['tests']} tests passed")
    return f"<br>{html.escape('; '.join(said)[:300])}" if said else ""


def short(value) -> str:
    """The beginning of a text or of a grader's value, escaped."""
    return html.escape("none" if value is None else str(value)[:200])


# The run


def command(run: dict) -> str:
    """The command with which the run began, or went on, and the machine that it ran on."""
    argv = run.get("argv")
    machine = run.get("hardware") if isinstance(run.get("hardware"), dict) else {}
    ranks = machine.get("ranks", 1)
    lines = []
    if isinstance(argv, list):
        lines.append(f"<pre>{html.escape(shlex.join(command_of(run)))}</pre>")
    facts = [f"commit {str(run['commit'])[:12]}"] if run.get("commit") else []
    if machine:
        facts.append(f"{ranks} rank{'s' if ranks != 1 else ''} on {machine.get('device', '?')}")
    facts += [f"{name} {version}" for name, version in (run.get("versions") or {}).items()]
    lines.append(f"<p class=soft>{html.escape('; '.join(facts))}</p>")
    return "\n".join(lines)
