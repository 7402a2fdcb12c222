"""Micro-batches: rows of a rollout laid end to end in one packed row, cut to a token budget.

A micro-batch is a matter of memory only. The loss is divided by a denominator taken over the whole
optimizer mini-batch and all ranks, so any cut gives the same gradient.
"""

from dataclasses import dataclass

import torch

from common.placement import World
from common.rollout import Rollout


@dataclass
class MicroBatch:
    """n sequences (prompt + response) in one row of L tokens, R of which are response tokens."""

    rows: torch.Tensor  # (n,) which rows of the rollout
    input_ids: torch.Tensor  # (1, L)
    position_ids: torch.Tensor  # (1, L), starting again at 0 for each sequence
    seqlens: list[int]  # n lengths, sum L
    predictors: torch.Tensor  # (R,) place in the row whose logits predict each response token: one before it
    targets: torch.Tensor  # (R,) the response tokens
    scatter: torch.Tensor  # (R,) where they stand in a flattened (n, T)
    response_mask: torch.Tensor  # (n, T) bool; all False in a dummy, which only keeps ranks in step


def pack(rollout: Rollout, rows: torch.Tensor, token_budget: int, world: World) -> list[MicroBatch]:
    """Cut `rows` of the rollout into micro-batches of at most `token_budget` tokens (at least one sequence each).

    Rows are taken in order of length, so that neighbours have similar lengths. Every forward and backward
    of an FSDP model is a collective, so ranks with fewer micro-batches than the fullest one run dummies
    (one real row, mask all False). Collective: every rank calls it.
    """
    lengths = [len(rollout.prompt_ids[row]) + len(rollout.response_ids[row]) for row in rows.tolist()]
    bins: list[list[int]] = []
    for i in sorted(range(len(lengths)), key=lengths.__getitem__):
        if not bins or sum(lengths[j] for j in bins[-1]) + lengths[i] > token_budget:
            bins.append([])
        bins[-1].append(i)
    micro_batches = [pack_rows(rollout, rows[indices]) for indices in bins]
    for _ in range(int(world.max(len(bins))) - len(bins)):
        dummy = pack_rows(rollout, rows[:1] if len(rows) else torch.zeros(1, dtype=torch.long))
        dummy.response_mask = torch.zeros_like(dummy.response_mask)
        micro_batches.append(dummy)
    return micro_batches


def pack_rows(rollout: Rollout, rows: torch.Tensor) -> MicroBatch:
    """Lay the given rows (n,) of the rollout end to end. The one shift of the whole repository is here."""
    device, width = rollout.response_mask.device, rollout.response_mask.shape[1]
    tokens, positions, seqlens, predictors, targets, scatter = [], [], [], [], [], []
    for i, row in enumerate(rows.tolist()):
        prompt, response = rollout.prompt_ids[row], rollout.response_ids[row]
        first = len(tokens) + len(prompt) - 1  # the logits at the last prompt token predict response token 0
        predictors += range(first, first + len(response))
        targets += response
        scatter += range(i * width, i * width + len(response))
        tokens += prompt + response
        positions += range(len(prompt) + len(response))
        seqlens.append(len(prompt) + len(response))
    as_tensor = lambda values: torch.tensor(values, dtype=torch.long, device=device)
    return MicroBatch(
        rows=rows.to(device),
        input_ids=as_tensor([tokens]),
        position_ids=as_tensor([positions]),
        seqlens=seqlens,
        predictors=as_tensor(predictors),
        targets=as_tensor(targets),
        scatter=as_tensor(scatter),
        response_mask=rollout.response_mask[rows.to(device)],
    )
