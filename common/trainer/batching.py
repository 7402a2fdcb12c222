"""Micro-batches: rows of a rollout laid end to end in one packed row, within a token budget.

Micro-batches only limit memory. The loss is divided by a denominator of the whole optimizer mini-batch on all ranks,
so the gradient does not depend on how the mini-batch is cut. Responses to one prompt share it: its tokens stand in the
row once. In this example b and c answer prompt a, and e answers prompt d.

    input_ids      a0  a1  a2 | b0  b1 | c0  c1 | d0  d1  e0  e1  e2     (1, L = 12)
    position_ids    0   1   2 |  3   4 |  3   4 |  0   1   2   3   4     a response continues its prompt
    attends to     a          | a, b   | a, c   | d, e                   never to a later token
    predicts             b0 c0  b1       c1           e0  e1  e2         a2 predicts both b0 and c0
    predictors = [2, 3, 2, 5, 8, 9, 10], targets = [b0, b1, c0, c1, e0, e1, e2], scatter = [0, 1, 3, 4, 6, 7, 8]
"""

from dataclasses import dataclass, field

import torch
import torch.distributed as dist
import tyro

from common.placement import Sharding, World
from common.rollout.rollout import Rollout
from common.trainer.attention import Spans, spans
from common.trainer.kernels import Kernels

SHARED_PROMPT_MIN_TOKENS = 32  # for a shorter prompt, the extra attention call costs more than sharing saves


@dataclass(frozen=True)
class Compute(Sharding):
    """Settings of the trainer's forward and backward. All but the last three change results only by rounding."""

    token_budget: int = 0  # Tokens in one forward on one rank. 0 derives them from the size of the memory.
    shared_prompts: tyro.conf.Suppress[bool] = True  # For tests: False computes a prompt again for each response.
    activation_checkpointing: bool = False  # Recompute layers in the backward: less memory, a third more work.
    kernels: Kernels = "eager"  # Kernels of the layers: transformers' own, or torch.compile.
    lora_rank: int = 0
    """Train adapters of this rank (LoRA); raise learning rates tenfold (Schulman, 2025). 0 trains all weights."""
    train_vision: bool = False  # Train the part of the model that sees images, too.
    freeze_router: bool = False  # Keep what chooses experts in a mixture-of-experts model as it is.


@dataclass
class MicroBatch:
    """n responses and their prompts in one packed row of L tokens, or a slice of it. R tokens are response tokens."""

    rows: torch.Tensor  # (n,) indices into the rollout; n is 0 in a slice of another rank's micro-batch
    input_ids: torch.Tensor  # (1, L)
    position_ids: torch.Tensor  # (1, L); (4, 1, L) if images have rows and columns of their own
    spans: Spans  # which tokens attend to which
    predictors: torch.Tensor  # (R,) place in the row whose logits predict each response token
    targets: torch.Tensor  # (R,) the response tokens
    scatter: torch.Tensor  # (R,) their places in a flattened (n, T), which is (3, 3) in the example above
    response_mask: torch.Tensor  # (n, T) bool; all False in a dummy, which only keeps the ranks in step
    images: dict = field(default_factory=dict)  # the model's further arguments, if prompts have images
    last: bool = True  # the optimizer step follows, so the backward reduces gradients over the ranks


@dataclass
class MiniBatch:
    """The rows of one optimizer step on this rank, and the micro-batches that compute its gradient."""

    rows: torch.Tensor  # indices into the rollout of all its rows; a denominator counts these
    micro_batches: list[MicroBatch]  # its rows that have a gradient; every rank has equally many micro-batches


def split(rollout: Rollout, count: int, has_gradient: torch.Tensor, compute: Compute, world: World) -> list[MiniBatch]:
    """Cut a rollout into `count` mini-batches of equally many consecutive rows, and pack each. Collective.

    has_gradient: (N,) bool. Other rows skip the forward, but they stay in `rows` and so in the denominator. Groups
    stay whole, because the number of prompts on each rank is a multiple of `count` (the start of a run checks it).
    """
    mini_batches = []
    for rows in torch.arange(len(rollout), device=has_gradient.device).chunk(count):
        trained = rows[has_gradient[rows]]
        mini_batches.append(MiniBatch(rows, pack(rollout, trained, compute, world)))
    return mini_batches


def pack(rollout: Rollout, rows: torch.Tensor, compute: Compute, world: World, together: int = 1) -> list[MicroBatch]:
    """Cut `rows` of the rollout into micro-batches of at most `token_budget` tokens, or of one longer row.

    together: so many rows in succession, which answer one prompt, stay in one micro-batch, in this order.
    Every forward and backward of an FSDP model is a collective, so a rank with fewer micro-batches than the fullest
    one gets dummies: real rows whose mask is all False. With --sequence-parallel K a micro-batch may be K times as
    long, and each of the K ranks of a group gets a slice of all their micro-batches. Collective: every rank calls it.
    """
    bins = fill_bins(rollout, rows, compute, together)
    real, forwards = len(bins), torch.tensor(len(bins))
    if world.sp_group is not None:
        dist.all_reduce(forwards, group=world.sp_group)  # each rank computes slices for all K ranks of its group
    missing = int(world.max(forwards)) - int(forwards)
    if world.rank % compute.sequence_parallel == 0:  # the first rank of a sequence-parallel group adds its dummies
        bins += [[rows[:together].tolist() or [*range(together)]]] * missing
    micro_batches = [pack_groups(rollout, groups) for groups in bins]
    for dummy in micro_batches[real:]:
        dummy.response_mask.zero_()
    if world.sp_group is None:
        return mark_last(micro_batches)
    from common.trainer.sequence_parallel import cut, take_turns

    turns = take_turns([texts_of(rollout, groups) for groups in bins], world.sp_group)
    whole = lambda own, texts: lay_out(texts, [], rollout.response_mask) if own is None else micro_batches[own]
    return mark_last([cut(whole(own, texts), owner, world.sp_group) for owner, own, texts in turns])


def mark_last(micro_batches: list[MicroBatch]) -> list[MicroBatch]:
    """Set `last` of each. Every rank has equally many, so all ranks reduce their gradients in the same backward."""
    for micro in micro_batches:
        micro.last = micro is micro_batches[-1]
    return micro_batches


def fill_bins(rollout: Rollout, rows: torch.Tensor, compute: Compute, together: int) -> list[list[list[int]]]:
    """The rows of each micro-batch, as a list of groups that share a prompt. Groups are sorted by their longest row, so
    that neighbours have similar lengths: attention without a variable-length kernel then pads little.
    """
    own = lambda unit: sum(len(rollout.response_ids[row]) for row in unit)  # unit: rows that stay together
    length = lambda unit: len(rollout.prompt_ids[unit[0]]) + own(unit)
    same_prompt: dict[tuple | int, list[list[int]]] = {}
    for unit in rows.view(-1, together).tolist():
        prompt = rollout.prompt_ids[unit[0]]
        key = getattr(prompt, "key", None)  # a prompt with images has one, and is shared at any length
        shared = compute.shared_prompts and (key or len(prompt) >= SHARED_PROMPT_MIN_TOKENS)
        same_prompt.setdefault((key or tuple(prompt)) if shared else unit[0], []).append(unit)
    bins, room = [], 0  # room: number of tokens that still fit in the last bin
    for group in sorted(same_prompt.values(), key=lambda units: max(map(length, units))):
        has_prompt = False  # True if the last bin holds this group's prompt
        for unit in sorted(group, key=length):
            needed = own(unit) if has_prompt else length(unit)
            if needed > room:
                bins.append([[]])
                room, needed = compute.token_budget * compute.sequence_parallel, length(unit)
            elif not has_prompt:
                bins[-1].append([])
            bins[-1][-1] += unit
            room, has_prompt = room - needed, True
    return bins


def pack_groups(rollout: Rollout, groups: list[list[int]]) -> MicroBatch:
    """One micro-batch with these groups of rows. Rows of a group have the same prompt."""
    return lay_out(texts_of(rollout, groups), [row for group in groups for row in group], rollout.response_mask)


def texts_of(rollout: Rollout, groups: list[list[int]]) -> list[tuple[list[int], list[list[int]]]]:
    """The prompt and the responses of each group, as token ids."""
    return [(rollout.prompt_ids[group[0]], [rollout.response_ids[row] for row in group]) for group in groups]


def lay_out(texts: list[tuple[list[int], list[list[int]]]], rows: list[int], response_mask: torch.Tensor) -> MicroBatch:
    """Lay texts end to end in one packed row. They are `rows` of the rollout with this response_mask (N, T). This is
    the only place that shifts by one token: the last prompt token predicts response token 0.
    """
    tokens, positions, predictors, targets, scatter, next_row = [], [], [], [], [], 0
    for prompt, responses in texts:
        tokens += prompt
        positions += range(len(prompt))
        last_of_prompt = len(tokens) - 1
        for response in responses:
            predictors += [last_of_prompt, *range(len(tokens), len(tokens) + len(response))][:-1]
            targets += response
            tokens += response
            positions += range(len(prompt), len(prompt) + len(response))
            scatter += range(next_row, next_row + len(response))
            next_row += response_mask.shape[1]  # T
    position_ids, images = [positions], {}
    if any(hasattr(prompt, "images") for prompt, _ in texts):
        from common.trainer import vision

        position_ids, images = vision.lay_out(texts, positions, response_mask.device)
    lengths = [(len(prompt), list(map(len, responses))) for prompt, responses in texts]
    as_tensor = lambda values: torch.tensor(values, dtype=torch.long, device=response_mask.device)
    return MicroBatch(
        rows=as_tensor(rows),
        input_ids=as_tensor([tokens]),
        position_ids=as_tensor(position_ids),
        spans=spans(lengths, response_mask.device),
        predictors=as_tensor(predictors),
        targets=as_tensor(targets),
        scatter=as_tensor(scatter),
        response_mask=response_mask[as_tensor(rows)],
        images=images,
    )
