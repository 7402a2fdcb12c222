"""Rollout files: every response of a step, with its log-probs, its grade and its advantage.

People look at them with scripts/view_rollouts.py; scripts/replay.py computes the step again from them.
"""

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from common.data import json_lines
from common.data.json_lines import is_count, is_number
from common.errors import BadInput, refuse_all
from common.placement import World
from common.preflight import folders

# Content security policy of an HTML page that shows rollouts. Responses are escaped already; in addition to that, the
# browser runs no script and loads nothing.
POLICY = "default-src 'none'; style-src 'unsafe-inline'"


def every(fits: Callable[[Any], bool]) -> Callable[[Any], bool]:
    """A function that is True for a list in which every entry fits."""
    return lambda value: isinstance(value, list) and all(map(fits, value))


is_text = lambda value: isinstance(value, str)
are_ids = every(lambda value: is_count(value) and value < 2**31)
FIELDS = {  # key of a row -> (function that is True for a valid value, the same in words)
    "index": (is_count, "a number"),
    **dict.fromkeys(("id", "prompt", "response", "finish_reason"), (is_text, "a string")),
    "answer": (lambda value: value is None or is_text(value), "a string, or null"),
    **dict.fromkeys(("prompt_ids", "response_ids", "baseline_response_ids"), (are_ids, "token ids")),
    **dict.fromkeys(("rollout_logprobs", "values"), (every(is_number), "a list of numbers")),
    "old_logprobs": (lambda value: value is None or every(is_number)(value), "a list of numbers, or null"),
    "weight_versions": (every(is_count), "a list of whole numbers"),
    **dict.fromkeys(("sampled", "baseline_sampled"), (every(lambda value: value in (0, 1)), "a list of 0 and 1")),
    **dict.fromkeys(("score", "acc"), (lambda value: value is None or is_number(value), "a number, or null")),
    **dict.fromkeys(("extracted", "info"), (lambda value: True, "anything")),  # a grader chooses them
    "advantage": (  # null in a step that failed before there were advantages
        lambda value: value is None or is_number(value) or every(is_number)(value),
        "a number, one for each token, or null",
    ),
    "dropped": (lambda value: isinstance(value, bool), "true or false"),
    "baseline_finish_reason": (is_text, "a string"),
}
OPTIONAL = ("values", "sampled", "baseline_response_ids", "baseline_sampled", "baseline_finish_reason")
PER_TOKEN = ("rollout_logprobs", "old_logprobs", "weight_versions", "sampled", "values", "advantage")


def write(path: Path, world: World, *given, **optional) -> None:
    """Write one JSON object for each response of all ranks, in the order of the step's prompts.

    given, optional: the arguments of rows(). Collective: every rank calls it, with the same number of prompts.
    """
    lines = gathered(rows(world, *given, **optional), world)
    if world.is_main:
        folders.write(path, lines)
    else:
        for _ in lines:  # nothing comes, but the gathering runs
            pass


def gathered(groups: Iterator[list[str]], world: World) -> Iterator[str]:
    """The lines of all ranks on rank 0, and nothing on others. One prompt of each rank at a time: a step of long
    responses has gigabytes. Collective: every rank reads it to its end.
    """
    for group in groups:
        everyone = [None] * world.size if world.is_main else None
        dist.gather_object(group, everyone)
        for share in everyone or []:
            yield from share


def rows(world: World, batch, advantages=None, old_logprobs=None, needed=None, *, values=None) -> Iterator[list[str]]:
    """For each of this rank's prompts the lines of its responses.

    batch: a sampling.Batch. advantages: (N,) or (N, T). old_logprobs: (N, T). Both are None for a step that failed
    before they were computed. needed: (N,) bool, True for rows that have old_logprobs; None: all rows have them.
    values: (N, T), the critic's values.
    """
    baseline, group_size = batch.baseline, len(batch.responses) // len(batch.prompts)
    for place, prompt in enumerate(batch.prompts):
        lines = []
        for i in range(place * group_size, (place + 1) * group_size):
            result, length = batch.results[i], len(batch.response_ids[i])
            has_old = old_logprobs is not None and (needed is None or bool(needed[i]))
            row = {
                "index": place * world.size + world.rank,  # rank r has prompts r, r + size, ...
                "id": prompt.id,
                "prompt": prompt.text,
                "response": batch.responses[i],
                "answer": prompt.answer,
                "prompt_ids": batch.prompt_ids[i],
                "response_ids": batch.response_ids[i],
                "rollout_logprobs": batch.rollout_logprobs[i, :length].tolist(),
                "old_logprobs": old_logprobs[i, :length].tolist() if has_old else None,
                "score": result.score,
                "acc": result.acc,
                "extracted": result.extracted,
                "info": result.info,
                "advantage": None if advantages is None else advantage(advantages[i], length),
                "dropped": not batch.response_mask[i].any().item(),  # not trained on; info says why
                "finish_reason": "length" if batch.truncated[i] else "stop",
                "weight_versions": batch.weight_versions[i, :length].tolist(),
            }
            if batch.episodes is not None:
                row["sampled"] = [int(sampled) for sampled in batch.episodes[i].sampled]  # 0 on an environment's tokens
            if values is not None:
                row["values"] = values[i, :length].tolist()
            if baseline is not None and not lines:
                row["baseline_response_ids"] = baseline.response_ids[place]
                if baseline.episodes is not None:
                    row["baseline_sampled"] = [int(sampled) for sampled in baseline.episodes[place].sampled]
                row["baseline_finish_reason"] = "length" if baseline.truncated[place] else "stop"
            lines.append(json.dumps(row, default=str) + "\n")  # info may hold objects that JSON lacks
        yield lines


def advantage(value: torch.Tensor, length: int) -> float | list[float]:
    """The advantage of one response: one number, or one for each of `length` tokens."""
    return value.item() if value.dim() == 0 else value[:length].tolist()


def saved(run_dir: Path) -> dict[int, Path]:
    """Step -> file, for all steps that are saved, oldest first."""
    files = {path: re.fullmatch(r"step_(\d{6,18})", path.stem) for path in run_dir.glob("rollouts/step_*.jsonl")}
    return dict(sorted((int(step[1]), path) for path, step in files.items() if step))


def find(run_dir: Path, step: int = 0) -> Path:
    """The file of a step; step 0 means the last step that is saved. Raises BadInput."""
    files = saved(run_dir)
    if not files:
        raise BadInput(f"{run_dir}: no rollouts/step_*.jsonl; is this the directory of a run?")
    if step and step not in files:
        named = ", ".join(map(str, [*files][:20])) + (" ..." if len(files) > 20 else "")
        raise BadInput(f"--step {step}: {run_dir} has the steps {named}; --rollouts-every 1 saves all of them")
    return files[step or max(files)]


def read(path: Path) -> list[dict]:
    """The rows of a file that write() wrote. Raises BadInput."""
    rows, errors = json_lines.read(path, hint="; was the run stopped while writing?"), []
    for number, row in rows:
        found = wrong(row)
        errors += [f"{path}:{number}: {found}"] if found else []
    refuse_all(errors)
    if not rows:
        raise BadInput(f"{path}: holds no responses; it is empty or not a file of this version")
    return [row for _, row in rows]


def info(row: dict) -> dict:
    """The notes of the grader on a row; {} if they are not a dictionary."""
    return row["info"] if isinstance(row["info"], dict) else {}


def wrong(row: dict) -> str:
    """Why write() cannot have written this row; "" if it can."""
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
