"""Rollout files: every response of a step with all that was computed of it, for people (scripts/view_rollouts.py) and
for scripts/replay.py, which computes the step again from it.
"""

import json
from pathlib import Path

import torch
import torch.distributed as dist

from common.errors import BadInput
from common.placement import World
from common.rollout import Rollout


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


def find(run_dir: Path, step: int = 0) -> Path:
    """The file of a step, or of the last one saved. Raises BadInput."""
    saved = sorted(run_dir.glob("rollouts/step_*.jsonl"))
    steps = [int(path.stem.removeprefix("step_")) for path in saved]
    if not saved:
        raise BadInput(f"{run_dir}: no rollouts/step_*.jsonl; is this the directory of a run?")
    if step and step not in steps:
        named = ", ".join(map(str, steps[:20])) + (" ..." if len(steps) > 20 else "")
        raise BadInput(f"--step {step}: {run_dir} has the steps {named}; --rollouts-every 1 saves all of them")
    return saved[steps.index(step)] if step else saved[-1]


def read(path: Path) -> list[dict]:
    """The responses of a file. Raises BadInput."""
    if not path.is_file():
        raise BadInput(f"{path}: file not found")
    rows = []
    for number, line in enumerate(path.read_text(encoding="utf-8").split("\n"), start=1):
        try:
            rows += [json.loads(line)] if line else []
        except json.JSONDecodeError as error:
            raise BadInput(f"{path}:{number}: invalid JSON ({error.msg}); was the run stopped while writing?") from None
    if not rows or "index" not in rows[0]:
        raise BadInput(f'{path}: holds no responses with an "index"; it is empty or not a file of this version')
    return rows
