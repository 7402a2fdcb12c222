"""Micro-batches: rows of a rollout laid end to end in one packed row, cut to a token budget.

A micro-batch is a matter of memory only. The loss is divided by a denominator taken over the whole
optimizer mini-batch and all ranks, so any cut gives the same gradient.
"""

import dataclasses
import os
from dataclasses import dataclass

import torch
import torch.distributed as dist
from transformers import AutoConfig

from common.attention import Spans, spans
from common.errors import BadInput, say
from common.layers import Kernels, check_kernels
from common.placement import Sharding, World
from common.rollout import Rollout
from common.sequence_parallel import check_heads, cut, take_turns

SHORT_PROMPT = 32  # tokens; the attention of a shared prompt is a call of its own, which costs more than so few tokens
SHARE = 0.2  # of a rank's memory that the activations of one micro-batch may take
MOST = 16384  # tokens: beyond it a larger micro-batch is no faster


@dataclass(frozen=True)
class Compute(Sharding):
    token_budget: int = 0  # tokens per forward and rank; 0: as many as memory allows
    shared_prompts: bool = True  # compute a prompt once for all its responses in a micro-batch
    activation_checkpointing: bool = False  # recompute layers in the backward: less memory, a third more work
    kernels: Kernels = "eager"  # of the layers; compile: by torch.compile; liger: of pip's liger-kernel, on GPUs


@dataclass
class MicroBatch:
    """n responses and their prompts in one row of L tokens, R of which are response tokens; or a slice of the row."""

    rows: torch.Tensor  # (n,) which rows of the rollout; none, of another rank's turn of a sequence-parallel group
    input_ids: torch.Tensor  # (1, L)
    position_ids: torch.Tensor  # (1, L), starting again at 0 for each prompt, at the prompt's length for each response
    spans: Spans  # which tokens attend to which
    predictors: torch.Tensor  # (R,) place in the row whose logits predict each response token: one before it
    targets: torch.Tensor  # (R,) the response tokens
    scatter: torch.Tensor  # (R,) where they stand in a flattened (n, T)
    response_mask: torch.Tensor  # (n, T) bool; all False in a dummy, which only keeps ranks in step


def pack(rollout: Rollout, rows: torch.Tensor, compute: Compute, world: World) -> list[MicroBatch]:
    """Cut `rows` of the rollout into micro-batches of at most `token_budget` tokens (at least one sequence each).

    With sequence parallelism of K times as many: each is one rank's of the group, and all of it compute it together.
    With shared prompts, responses to one prompt that meet in a micro-batch have it computed once for all of them.
    Groups are taken in order of their longest row, so that neighbours have similar lengths. Every forward and
    backward of an FSDP model is a collective, so ranks with fewer micro-batches than the fullest one run dummies
    (one real row, mask all False). Collective: every rank calls it.
    """
    units: dict[tuple, list[int]] = {}  # rows that may share a prompt
    for row in rows.tolist():
        prompt = tuple(rollout.prompt_ids[row])
        units.setdefault(prompt if compute.shared_prompts and len(prompt) >= SHORT_PROMPT else (row,), []).append(row)
    length = lambda row: len(rollout.prompt_ids[row]) + len(rollout.response_ids[row])
    bins, room = [], 0
    for unit in sorted(units.values(), key=lambda unit: max(map(length, unit))):
        joined = False  # whether the newest micro-batch has this prompt already
        for row in sorted(unit, key=length):
            if (len(rollout.response_ids[row]) if joined else length(row)) > room:
                bins.append([])
                room, joined = compute.token_budget * compute.sequence_parallel, False
            if not joined:
                bins[-1].append([])
                room -= len(rollout.prompt_ids[row])
                joined = True
            bins[-1][-1].append(row)
            room -= len(rollout.response_ids[row])
    micro_batches = pack_bins(rollout, bins, world)
    missing = int(world.max(len(micro_batches))) - len(micro_batches)
    missing *= world.rank % compute.sequence_parallel == 0  # the first rank of a group has its dummies
    for dummy in pack_bins(rollout, [[rows[:1].tolist() or [0]]] * missing, world):
        dummy.response_mask = torch.zeros_like(dummy.response_mask)
        micro_batches.append(dummy)
    return micro_batches


def pack_bins(rollout: Rollout, bins: list[list[list[int]]], world: World) -> list[MicroBatch]:
    """A micro-batch of each bin of groups. Collective.

    With sequence parallelism slices: of this rank's bins and, in their turns and without rows, of the other ranks'.
    """
    if world.sp_group is None:
        return [pack_groups(rollout, groups) for groups in bins]
    micro_batches = []
    for rank, i, texts in take_turns([texts_of(rollout, groups) for groups in bins], world.sp_group):
        rows = [row for group in bins[i] for row in group] if rank == dist.get_rank(world.sp_group) else []
        micro_batches.append(cut(lay_out(texts, rows, rollout.response_mask), rank, world.sp_group))
    return micro_batches


def pack_groups(rollout: Rollout, groups: list[list[int]]) -> MicroBatch:
    """Lay rows of the rollout end to end, those of one group behind one prompt."""
    return lay_out(texts_of(rollout, groups), [row for group in groups for row in group], rollout.response_mask)


def texts_of(rollout: Rollout, groups: list[list[int]]) -> list[tuple[list[int], list[list[int]]]]:
    """The prompt and the responses of each group, as token ids."""
    return [(rollout.prompt_ids[group[0]], [rollout.response_ids[row] for row in group]) for group in groups]


def lay_out(texts: list[tuple[list[int], list[list[int]]]], rows: list[int], response_mask: torch.Tensor) -> MicroBatch:
    """Texts end to end; response_mask (N, T) is the rollout's, of which they are `rows`.

    The one shift of the whole repository is here: the last prompt token predicts response token 0.
    """
    device, width = response_mask.device, response_mask.shape[1]
    tokens, positions, predictors, targets, scatter = [], [], [], [], []
    for prompt, responses in texts:
        tokens += prompt
        positions += range(len(prompt))
        last_of_prompt = len(tokens) - 1
        for response in responses:
            predictors += [last_of_prompt, *range(len(tokens), len(tokens) + len(response) - 1)][: len(response)]
            targets += response
            tokens += response
            positions += range(len(prompt), len(prompt) + len(response))
    lengths = [(len(prompt), [len(response) for response in responses]) for prompt, responses in texts]
    for i, length in enumerate(length for _, of_prompt in lengths for length in of_prompt):
        scatter += range(i * width, i * width + length)
    as_tensor = lambda values: torch.tensor(values, dtype=torch.long, device=device)
    return MicroBatch(
        rows=as_tensor(rows),
        input_ids=as_tensor([tokens]),
        position_ids=as_tensor([positions]),
        spans=spans(lengths, device),
        predictors=as_tensor(predictors),
        targets=as_tensor(targets),
        scatter=as_tensor(scatter),
        response_mask=response_mask[as_tensor(rows)],
    )


def plan(compute: Compute, model_path: str, dtype: torch.dtype) -> Compute:
    """The same with a token budget, printed. From the machine's whole memory, not from what is free: the same command
    cuts the same micro-batches each time. Raises BadInput.
    """
    if compute.token_budget < 0:
        raise BadInput(f"--token-budget {compute.token_budget}: must be at least 1, or 0 to choose it from memory")
    check_kernels(compute.kernels)
    config = AutoConfig.from_pretrained(model_path)
    check_heads(config, compute.sequence_parallel, model_path)
    if compute.token_budget:
        return compute
    per_token = activation_bytes(config, dtype, compute.activation_checkpointing)
    budget = 1024
    while budget < MOST and 2 * budget * per_token <= SHARE * rank_memory():
        budget *= 2
    say(f"token budget: {budget} a forward and rank ({per_token * budget / 2**30:.2g} GiB of activations)")
    return dataclasses.replace(compute, token_budget=budget)


def activation_bytes(config, dtype: torch.dtype, checkpointing: bool) -> int:
    """What a backward keeps of one token, about: of each layer two norms and residuals in float32, queries to output,
    and four of the width of the feed-forward; with checkpointing the input of each layer, and all of one layer.
    """
    layer = 4 * 4 * config.hidden_size + (5 * config.hidden_size + 4 * config.intermediate_size) * dtype.itemsize
    layers = config.num_hidden_layers
    return layers * config.hidden_size * dtype.itemsize + layer if checkpointing else layers * layer


def rank_memory() -> float:
    """Bytes of this rank's GPU, or its share of the machine's memory."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_properties(0).total_memory
    local_size = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / local_size
