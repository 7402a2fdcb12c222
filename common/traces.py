"""Rollout files: every response of a step with all that was computed of it, for people (scripts/view_rollouts.py) and
for scripts/replay.py, which computes the step again from it.
"""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from common import json_lines
from common.errors import BadInput, refuse_all
from common.json_lines import is_count, is_number
from common.placement import World
from common.rollout import Rollout

# Of a page made of rollouts: a second wall, it runs nothing and fetches nothing.
POLICY = "default-src 'none'; style-src 'unsafe-inline'"


def every(fits: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list) and all(map(fits, value))


is_text = lambda value: isinstance(value, str)
are_ids = every(lambda value: is_count(value) and value < 2**31)
FIELDS = {  # of a row: what each entry may be
    "index": (is_count, "a number"),
    **dict.fromkeys(("id", "prompt", "response", "answer", "finish_reason"), (is_text, "a string")),
    **dict.fromkeys(("prompt_ids", "response_ids", "baseline_response_ids"), (are_ids, "token ids")),
    **dict.fromkeys(("rollout_logprobs", "values"), (every(is_number), "a list of numbers")),
    "old_logprobs": (lambda value: value is None or every(is_number)(value), "a list of numbers, or null"),
    "weight_versions": (every(is_count), "a list of whole numbers"),
    **dict.fromkeys(("score", "acc"), (lambda value: value is None or is_number(value), "a number, or null")),
    **dict.fromkeys(("extracted", "info"), (lambda value: True, "anything")),  # of a user's grader
    "advantage": (lambda value: is_number(value) or every(is_number)(value), "a number, or one for each token"),
    "dropped": (lambda value: isinstance(value, bool), "true or false"),
    "baseline_finish_reason": (is_text, "a string"),
}
OPTIONAL = ("values", "baseline_response_ids", "baseline_finish_reason")
PER_TOKEN = ("rollout_logprobs", "old_logprobs", "weight_versions", "values", "advantage")


def write(
    path: Path, world: World, prompts, responses, results, batch: Rollout, advantages, old_logprobs, needed=None,
    *, values=None, baseline: Rollout | None = None,
) -> None:  # fmt: skip
    """One JSON object a response, of all ranks, in the order of the step's prompts. Collective: every rank calls it.

    advantages: (N,) or (N, T); needed: (N,) rows with old_logprobs, None if all have them; both None of a step that was
    refused before it had them; values: (N, T), a critic's;
    baseline: one greedy response to each prompt, kept on its first row.
    """
    group_size = len(responses) // len(prompts)
    has_old = [old_logprobs is not None and (needed is None or bool(needed[i])) for i in range(len(responses))]
    rows = []
    for i, (response, result) in enumerate(zip(responses, results)):
        prompt, length = prompts[i // group_size], len(batch.response_ids[i])
        row = {
            "index": i // group_size * world.size + world.rank,  # rank r has prompts r, r + size, ... of the step
            "id": prompt.id,
            "prompt": prompt.text,
            "response": response,
            "answer": prompt.answer,
            "prompt_ids": batch.prompt_ids[i],
            "response_ids": batch.response_ids[i],
            "rollout_logprobs": batch.rollout_logprobs[i, :length].tolist(),
            "old_logprobs": old_logprobs[i, :length].tolist() if has_old[i] else None,
            "score": result.score,
            "acc": result.acc,
            "extracted": result.extracted,
            "info": result.info,
            "advantage": None if advantages is None else advantage(advantages[i], length),
            "dropped": not batch.response_mask[i].any().item(),  # nothing was learned from it: see info
            "finish_reason": "length" if batch.truncated[i] else "stop",
            "weight_versions": batch.weight_versions[i, :length].tolist(),
        }
        if values is not None:
            row["values"] = values[i, :length].tolist()
        if baseline is not None and i % group_size == 0:
            row["baseline_response_ids"] = baseline.response_ids[i // group_size]
            row["baseline_finish_reason"] = "length" if baseline.truncated[i // group_size] else "stop"
        rows.append((row["index"], json.dumps(row, default=str)))  # info is the user's: whatever it holds, go on
    everyone = [None] * world.size if world.is_main else None
    dist.gather_object(rows, everyone)
    if world.is_main:
        lines = sorted((row for share in everyone for row in share), key=lambda row: row[0])
        path.write_text("".join(line + "\n" for _, line in lines), encoding="utf-8")


def advantage(value: torch.Tensor, length: int) -> float | list[float]:
    """Of one response, or of each of its tokens."""
    return value.item() if value.dim() == 0 else value[:length].tolist()


def saved(run_dir: Path) -> dict[int, Path]:
    """Step -> file of all that are saved, oldest first."""
    files = {path: re.fullmatch(r"step_(\d{6,18})", path.stem) for path in run_dir.glob("rollouts/step_*.jsonl")}
    return dict(sorted((int(step[1]), path) for path, step in files.items() if step))


def find(run_dir: Path, step: int = 0) -> Path:
    """The file of a step, or of the last one saved. Raises BadInput."""
    files = saved(run_dir)
    if not files:
        raise BadInput(f"{run_dir}: no rollouts/step_*.jsonl; is this the directory of a run?")
    if step and step not in files:
        named = ", ".join(map(str, [*files][:20])) + (" ..." if len(files) > 20 else "")
        raise BadInput(f"--step {step}: {run_dir} has the steps {named}; --rollouts-every 1 saves all of them")
    return files[step or max(files)]


def read(path: Path) -> list[dict]:
    """The responses of a file, each as write() wrote it. Raises BadInput."""
    rows, errors = json_lines.read(path, hint="; was the run stopped while writing?"), []
    for number, row in rows:
        found = wrong(row)
        errors += [f"{path}:{number}: {found}"] if found else []
    refuse_all(errors)
    if not rows:
        raise BadInput(f"{path}: holds no responses; it is empty or not a file of this version")
    return [row for _, row in rows]


def info(row: dict) -> dict:
    """What the reward noted of a row."""
    return row["info"] if isinstance(row["info"], dict) else {}


def wrong(row: dict) -> str:
    """What in a row write() cannot have written; "" if nothing."""
    for name, (fits, expected) in FIELDS.items():
        if name not in row and name not in OPTIONAL:
            return f'missing key "{name}"; it is not a file of this version'
        if name in row and not fits(row[name]):
            return f'"{name}" is {row[name]!r:.80}, expected {expected}'
    tokens = len(row["response_ids"])
    for name in PER_TOKEN:
        if isinstance(row.get(name), list) and len(row[name]) != tokens:
            return f'"{name}" has {len(row[name])} entries, and the response {tokens} tokens'
    return ""
