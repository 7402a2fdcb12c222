"""Show the responses of a step, token by token: in the terminal, or as one HTML page that needs no other file.

    python scripts/view_rollouts.py runs/grpo --step 20 --sort score --limit 5
    python scripts/view_rollouts.py runs/grpo --html step.html --color mismatch --limit 0
    python scripts/view_rollouts.py runs/ppo/rollouts/step_000010.jsonl --color value --grep 85

Green is above zero, red below zero, orange the gap between trainer and engine, violet NaN. What an environment said is
grey.
"""

import dataclasses
import html
import math
import signal
import sys
from functools import partial
from pathlib import Path
from typing import Literal

import tyro
from pydantic import NonNegativeInt

from common import errors
from common.data.tokenizer import load_tokenizer as load_tokenizer_of
from common.preflight import ranges
from common.preflight.docstrings import help_text
from common.preflight.run_directory import described
from common.run import html_page, traces

STYLE = """body{font:15px/1.5 system-ui,sans-serif;max-width:1000px;margin:2em auto;padding:0 1em;color:#222}
pre{white-space:pre-wrap;overflow-wrap:anywhere;border:1px solid #ddd;padding:.5em;margin:.2em 0 1.5em}
pre.prompt{background:#f6f6f6;max-height:12em;overflow:auto;margin:0}i{opacity:.4;user-select:none}"""
GREEN, RED, ORANGE, VIOLET = (70, 190, 90), (240, 90, 80), (255, 160, 40), (190, 120, 255)
GREY = (215, 215, 215)
# Control characters of a response would move the cursor or rename the window: visible signs replace them.
VISIBLE = {code: chr(0x2400 + code) for code in range(32) if chr(code) not in "\n\t"}
VISIBLE |= {code: "\N{SYMBOL FOR DELETE}" for code in range(127, 160)}
# Replaced as well: marks that turn a line around, and halves of surrogate pairs, which cannot be written.
VISIBLE |= dict.fromkeys((*range(0x2028, 0x202F), *range(0x2066, 0x206A), *range(0xD800, 0xE000)), "\ufffd")


@dataclasses.dataclass
class Args:
    path: tyro.conf.Positional[Path]  # A run directory, or a file of its rollouts/.
    step: NonNegativeInt = 0  # Step of the run directory; 0 is the last one that was saved.
    html: str = ""  # Write this page instead of printing.
    color: Literal["advantage", "value", "mismatch"] = "advantage"  # mismatch is |trainer - engine| of the log-probs.
    sort: Literal["prompt", "score", "length", "mismatch"] = "prompt"  # First: lowest score, most tokens, largest gap.
    limit: NonNegativeInt = 20  # Number of responses that are shown; 0 shows all.
    grep: str = ""  # Show only responses with this text in prompt or response.


def pieces(ids: list[int], tokenizer) -> list[str]:
    """The text of each token. A token that ends inside a character has no text; the next one has the whole character.

    Each is decoded together with the one before it: alone, it may lose its leading space.
    """
    decode = partial(tokenizer.decode, clean_up_tokenization_spaces=False)
    texts, first, done = [], 0, 0  # ids[:done] have their text, ids[first:done] are the context of the next one
    for end in range(1, len(ids) + 1):
        before, text = decode(ids[first:done]), decode(ids[first:end])
        if text.endswith("\ufffd") and end - done < 4 and end < len(ids):  # no character has more than four bytes
            texts.append("")
        else:
            texts.append(text[len(before) :])
            first, done = done, end
    return texts


def numbers(row: dict, color: str) -> list[float] | None:
    """The number that colours each token; None if the row has no such numbers."""
    if color == "advantage":
        given = row["advantage"]
        return [given] * len(row["response_ids"]) if isinstance(given, int | float) else given
    if color == "value":
        return row.get("values")
    if row["old_logprobs"] is None:  # the row was not trained on
        return None
    return [abs(old - rollout) for old, rollout in zip(row["old_logprobs"], row["rollout_logprobs"])]


def tint(number: float, scale: float, color: str) -> tuple[int, int, int] | None:
    """Background of a token: white at 0, the full colour at `scale`. None where it would be white."""
    if math.isnan(number):
        return VIOLET
    strength = min(1.0, abs(number) / scale)
    full = ORANGE if color == "mismatch" else GREEN if number > 0 else RED
    return tuple(round(255 - strength * (255 - part)) for part in full) if strength > 0.01 else None


def headline(row: dict) -> str:
    """The figures of a response in one line."""
    sampled = traces.sampled(row, len(row["response_ids"]))
    gap = traces.of_policy(row, numbers(row, "mismatch") or [])
    versions = traces.of_policy(row, row["weight_versions"])
    given = traces.advantage(row)
    shown = {
        "score": "left the step, not graded" if traces.score(row) is None else f"{row['score']:g}",
        "right": {None: "?", 0: "no", 1: "yes"}.get(row["acc"], row["acc"]),
        "advantage": "none" if given is None else f"{given:+.3g}",
        "tokens": f"{sum(sampled)} ({row['finish_reason']})",
        **({"turns": sum(now > before for before, now in zip([0, *sampled], sampled))} if "sampled" in row else {}),
        "gap": f"{mean(gap):.1e}" if gap else "not trained on",
        "found": "nothing" if row["extracted"] is None else str(row["extracted"])[:200],
        "reference": "none" if row["answer"] is None else row["answer"][:200],
        "weights": f"version {' and '.join(map(str, sorted(set(versions))))}",
        **{name: str(value)[:200] for name, value in traces.info(row).items() if name != "parts"},
    }
    parts = traces.info(row).get("parts")
    shown |= parts if isinstance(parts, dict) else {}
    return " | ".join(f"{name} {value}" for name, value in shown.items())


def mean(values: list[float]) -> float:
    return sum(values) / max(1, len(values))


def choose(rows: list[dict], args: Args) -> list[dict]:
    """--grep, --sort and --limit."""
    rows = [row for row in rows if args.grep in row["prompt"] or args.grep in row["response"]]
    keys = {
        "prompt": lambda row: row["index"],
        "score": lambda row: -math.inf if traces.score(row) is None else row["score"],
        "length": lambda row: -len(row["response_ids"]),
        "mismatch": lambda row: -mean(traces.of_policy(row, numbers(row, "mismatch") or [])),
    }
    return sorted(rows, key=keys[args.sort])[: args.limit or None]


def load_tokenizer(path: Path):
    """The tokenizer of the run that the file belongs to. Without one, None and a line that says why."""
    try:
        run = described(path.resolve().parent.parent / "run.json")
        return load_tokenizer_of(run["args"].get("model", ""))[0]
    except errors.BadInput as error:
        print(f"whole responses without colours, the tokenizer cannot be loaded: {error}", file=sys.stderr)
        return None


def tokens(row: dict, tokenizer, scale: float, color: str) -> list[tuple[str, tuple | None, str]]:
    """(text, background, numbers in words) of each token; without a tokenizer, of the whole response."""
    if tokenizer is None:
        return [(row["response"].translate(VISIBLE), None, "")]
    given = numbers(row, color)
    sampled = traces.sampled(row, len(row["response_ids"]))
    out = []
    for t, text in enumerate(pieces(row["response_ids"], tokenizer)):
        if not sampled[t]:
            out.append((text.translate(VISIBLE), GREY, f"token {row['response_ids'][t]}, from the environment"))
            continue
        said = f"token {row['response_ids'][t]}, engine {row['rollout_logprobs'][t]:.4f}"
        said += f", trainer {row['old_logprobs'][t]:.4f}" if row["old_logprobs"] else ""
        said += f", {color} {given[t]:+.4g}" if given else ""
        out.append((text.translate(VISIBLE), tint(given[t], scale, color) if given else None, said))
    return out


def to_terminal(row: dict, marked: list, color: bool) -> str:
    """The row as lines of text. color: with ANSI backgrounds."""
    text = ""
    for piece, background, _ in marked:
        if background and color:
            on, off = "\x1b[30;48;2;{};{};{}m".format(*background), "\x1b[0m"
            piece = on + piece.replace("\n", f"↵{off}\n{on}") + off
        text += piece
    return f"{headline(row).translate(VISIBLE)}\n{text}\n"


def to_html(row: dict, marked: list, with_prompt: bool) -> str:
    """The row as HTML; everything that a model or a data set wrote is escaped."""
    text = ""
    for piece, background, said in marked:
        style = " style='background:rgb({},{},{})'".format(*background) if background else ""
        shown = html.escape(piece).replace("\n", "<i>↵</i>\n")
        text += f'<span title="{html.escape(said)}"{style}>{shown}</span>'
    name = html.escape(f"prompt {row['index']} ({row['id']})".translate(VISIBLE))
    prompt = f"<p>{name}</p><pre class=prompt>{html.escape(row['prompt'].translate(VISIBLE))}</pre>"
    about = html.escape(headline(row).translate(VISIBLE))
    return f"{prompt if with_prompt else f'<p>{name}</p>'}<p>{about}</p><pre>{text}</pre>"


def main(args: Args) -> None:
    ranges.check(args)
    if args.html and not Path(args.html).parent.is_dir():
        raise errors.BadInput(f"--html {args.html}: there is no folder {Path(args.html).parent}")
    path = traces.find(args.path, args.step) if args.path.is_dir() else args.path
    everything = traces.read(path)
    rows = choose(everything, args)
    found = [abs(number) for row in rows for number in numbers(row, args.color) or []]
    if rows and args.color == "value" and not found:
        raise errors.BadInput(f"--color value: {path} has no values; a run with a critic (PPO) saves them")
    scale = max((number for number in found if math.isfinite(number)), default=0.0) or 1.0
    tokenizer = load_tokenizer(path)
    marked = [tokens(row, tokenizer, scale, args.color) for row in rows]
    indices = [row["index"] for row in rows]
    new = [index not in indices[:place] for place, index in enumerate(indices)]  # each prompt is shown once
    said = f"{path}: {len(rows)} of {len(everything)} responses, full colour at {args.color} {scale:.3g}"
    said = said.translate(VISIBLE)
    if args.html:
        page = [
            html_page.head(path.stem.translate(VISIBLE), STYLE),
            f"<p>{html.escape(said)}</p>",
            *map(to_html, rows, marked, new),
        ]
        Path(args.html).write_text("\n".join(page) + "\n", encoding="utf-8")
        print(args.html)
        return
    for row, parts, with_prompt in zip(rows, marked, new):
        name = f"--- prompt {row['index']} ({row['id']})"
        print((f"{name}\n{row['prompt']}\n" if with_prompt else name).translate(VISIBLE))
        print(to_terminal(row, parts, sys.stdout.isatty()))
    print(said)


if __name__ == "__main__":
    # Ends quietly when its reader has seen enough, as `| head` has.
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    errors.launch(main, tyro.cli(Args, description=help_text(__doc__)))
