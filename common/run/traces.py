"""Rollout files: every response of a step, with its log-probs, its grade and its advantage.

People look at them with scripts/view_rollouts.py; scripts/replay.py computes the step again from them.
"""

import json
from collections.abc import Collection, Iterator
from itertools import compress
from pathlib import Path

import torch
import torch.distributed as dist

from common.data import json_lines
from common.data.prompts import Prompt
from common.errors import BadInput
from common.placement import World
from common.preflight import folders

# Every row has these. Rows of a critic, of environments and of ReMax's greedy baseline have a few more.
KEYS = (
    "index",
    "id",
    "prompt",
    "response",
    "answer",
    "prompt_ids",
    "response_ids",
    "rollout_logprobs",
    "old_logprobs",
    "score",
    "acc",
    "extracted",
    "info",
    "advantage",
    "dropped",
    "finish_reason",
    "weight_versions",
)


def write(
    path: Path,
    world: World,
    batch,
    advantages: torch.Tensor | None = None,
    old_logprobs: torch.Tensor | None = None,
    had_forward: torch.Tensor | None = None,
    *,
    values: torch.Tensor | None = None,
) -> None:
    """Write one JSON object for each response of all ranks, in the order of the step's prompts.

    batch: a sampling.Batch. advantages: (N,) or (N, T). old_logprobs: (N, T). Both are None in refused_NNNNNN.jsonl,
    which has only what was sampled and graded. had_forward: (N,) bool, the rows that have old_logprobs; None: all have
    them. values: (N, T), the critic's values. Collective: every rank calls it, with the same number of prompts.
    """

    def lines_of(place: int) -> list[str]:
        """The lines of one prompt's responses."""
        group_size = batch.group_size
        lines = []
        for row in range(place * group_size, (place + 1) * group_size):
            # A row that is not trained on has no old log-probs.
            has_old = had_forward is None or had_forward[row]
            fields = sampled_fields(batch, row, batch.prompts[place])
            fields["index"] = place * world.size + world.rank  # rank r has prompts r, r + size, ...
            length = len(batch.response_ids[row])
            fields["old_logprobs"] = entry(old_logprobs if has_old else None, row, length)
            fields["advantage"] = entry(advantages, row, length)
            if values is not None:
                fields["values"] = entry(values, row, length)
            if batch.baseline is not None and not lines:
                fields |= baseline_fields(batch.baseline, place)
            lines.append(json.dumps(fields, default=str) + "\n")  # info may hold objects that JSON lacks
        return lines

    lines = gathered(map(lines_of, range(len(batch.prompts))), world)
    if world.is_main:
        folders.write(path, lines)
    else:
        for _ in lines:
            pass  # nothing comes here, but reading it to the end sends this rank's lines


def gathered(groups: Iterator[list[str]], world: World) -> Iterator[str]:
    """The lines of all ranks on rank 0, and nothing on others.

    It gathers one prompt of each rank at a time, because a step of long responses has gigabytes. Collective: every rank
    reads it to its end.
    """
    # Every rank has the same number of prompts, so each call of gather_object finds all ranks.
    for group in groups:
        everyone = [None] * world.size if world.is_main else None
        dist.gather_object(group, everyone)
        for lines in everyone or []:
            yield from lines


def sampled_fields(batch, row: int, prompt: Prompt) -> dict:
    """The response in a row, and how it was graded."""
    length = len(batch.response_ids[row])
    result = batch.results[row]
    # The keys of a row stand in the order of KEYS. write() fills in those that are still None.
    fields = dict.fromkeys(KEYS) | {
        "id": prompt.id,
        "prompt": prompt.text,
        "response": batch.responses[row],
        "answer": prompt.answer,
        "prompt_ids": batch.prompt_ids[row],
        "response_ids": batch.response_ids[row],
        "rollout_logprobs": entry(batch.rollout_logprobs, row, length),
        "score": result.score,
        "acc": result.acc,
        "extracted": result.extracted,
        "info": result.info,
        "dropped": not batch.response_mask[row].any().item(),  # not trained on; info or baseline_info says why
        "finish_reason": finish_reason(batch, row),
        "weight_versions": entry(batch.weight_versions, row, length),
    }
    if batch.episodes is not None:
        fields["sampled"] = sampled_tokens(batch, row)
    return fields


def baseline_fields(baseline, place: int) -> dict:
    """The greedy response to a prompt, which stands in the row of the prompt's first response."""
    fields = {
        "baseline_response_ids": baseline.response_ids[place],
        "baseline_score": baseline.results[place].score,
        "baseline_info": baseline.results[place].info,
    }
    if baseline.episodes is not None:
        fields["baseline_sampled"] = sampled_tokens(baseline, place)
    fields["baseline_finish_reason"] = finish_reason(baseline, place)
    return fields


def entry(tensor: torch.Tensor | None, row: int, length: int) -> float | list | None:
    """A row's number in a tensor (N,), its `length` numbers in a tensor (N, T), or None without a tensor."""
    if tensor is None:
        return None
    return tensor[row].item() if tensor.dim() == 1 else tensor[row, :length].tolist()


def finish_reason(batch, row: int) -> str:
    return "length" if batch.truncated[row] else "stop"


def sampled_tokens(batch, row: int) -> list[int]:
    """1 for each token of the policy, 0 for each of the environment."""
    return [int(sampled) for sampled in batch.episodes[row].sampled]


def saved(run_dir: Path) -> dict[int, Path]:
    """Step -> file, for all steps that are saved, oldest first."""
    return folders.files_of_steps(run_dir / "rollouts")


def find(run_dir: Path, step: int = 0) -> Path:
    """The file of a step; step 0 means the last step that is saved. Raises BadInput."""
    files = saved(run_dir)
    if not files:
        raise BadInput(f"{run_dir}: no rollouts/step_*.jsonl; is this the directory of a run?")
    if step and step not in files:
        steps = ", ".join(map(str, [*files][:20])) + (" ..." if len(files) > 20 else "")
        raise BadInput(f"--step {step}: {run_dir} has the steps {steps}; --rollouts-every 1 saves all of them")
    return files[step or max(files)]


def read(path: Path, names: Collection[str] = (), optional: Collection[str] = ()) -> list[dict]:
    """The rows of a file that write() wrote. Raises BadInput, also if one of `names` is missing.

    names: the values to keep; () keeps all. A step of long responses has gigabytes, and as Python objects the values of
    its tokens take four times as much. optional: more to keep, where there are any: only episodes have "sampled".
    """
    rows = json_lines.read(
        path, hint="; runs write it whole, so it was changed or cut", names=[*names, *optional] if names else None
    )
    if not rows:
        raise BadInput(f"{path}: holds no responses")
    for number, row in rows:
        if missing := [key for key in names or KEYS if key not in row]:
            raise BadInput(f"{path}:{number}: missing key {missing[0]!r}; it is not a file of this version")
    return [row for _, row in rows]


def score(row: dict) -> float | None:
    """The score of a row; None if its prompt left the step because a response to it could not be graded.

    The file has 0 for such a row, and the reason in `info`.
    """
    return None if "ungraded" in info(row) else row["score"]


def sampled(row: dict, length: int) -> list[int]:
    """1 for each token of the policy, 0 for each of an environment. length: tokens of the response."""
    return row.get("sampled") or [1] * length


def of_policy(row: dict, values: list) -> list:
    """The values of the tokens that the policy sampled, of values of all tokens of the response."""
    return list(compress(values, sampled(row, len(values))))


def advantage(row: dict) -> float | None:
    """The advantage of a row, or the mean of those of the policy's tokens. None: it has none."""
    given = row["advantage"]
    if isinstance(given, list):
        given = of_policy(row, given)
        return sum(given) / len(given) if given else None
    return given


def info(row: dict) -> dict:
    """The notes of the grader on a row; {} if they are not a dictionary."""
    return row["info"] if isinstance(row["info"], dict) else {}
