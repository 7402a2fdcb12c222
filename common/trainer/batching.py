"""Micro-batches: rows of a rollout laid end to end in one packed row, within a token budget.

Micro-batches only limit memory. The loss is divided by a denominator of the whole optimizer mini-batch on all ranks,
so the gradient does not depend on how the mini-batch is cut. Three words for what is put together:

    bin      the rows of one micro-batch, at most `token_budget` tokens
    group    the rows of a bin that share a prompt: its tokens stand in the packed row once
    unit     rows that must not be separated: one response, or the two responses of a DPO pair

A bin of two groups: b and c answer prompt a, and e answers prompt d. (Real prompts are longer: one of 3 tokens is not
worth sharing.)

    input_ids      a0  a1  a2 | b0  b1 | c0  c1 | d0  d1  e0  e1  e2     (1, L = 12)
    position_ids    0   1   2 |  3   4 |  3   4 |  0   1   2   3   4     a response continues its prompt
    attends to     a          | a, b   | a, c   | d, e                   never to a later token
    predicts             b0 c0  b1       c1           e0  e1  e2         a2 predicts both b0 and c0

The model makes a logit row for each place in `predictors`. It predicts the token in `targets`, and its log-prob goes to
place `scatter` of the flattened (n, T) result, here (3, 3):

    targets        b0  b1  c0  c1  e0  e1  e2
    predictors      2   3   2   5   8   9  10
    scatter         0   1   3   4   6   7   8
"""

from dataclasses import dataclass, field

import torch
import torch.distributed as dist
import tyro
from pydantic import NonNegativeInt

from common.placement import Sharding, World
from common.rollout.rollout import Rollout
from common.trainer.attention import Spans, spans
from common.trainer.kernels import Kernels

SHARED_PROMPT_MIN_TOKENS = 32  # for a shorter prompt, the extra attention call costs more than sharing saves
Text = tuple[list[int], list[list[int]]]  # token ids of a prompt, and of the responses to it


@dataclass(frozen=True)
class Compute(Sharding):
    """Settings of the trainer's forward and backward. All but the last three change results only by rounding."""

    token_budget: NonNegativeInt = 0  # Tokens in one forward on one rank. 0 derives them from the size of the memory.
    shared_prompts: tyro.conf.Suppress[bool] = True  # For tests: False computes a prompt again for each response.
    activation_checkpointing: bool = False  # Recompute layers in the backward: less memory, a third more work.
    kernels: Kernels = "eager"  # Kernels of the layers: transformers' own, or torch.compile.
    lora_rank: NonNegativeInt = 0
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
    micro_batches: list[MicroBatch]  # those of its rows that have a gradient; every rank has equally many micro-batches


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


@dataclass
class Bin:
    """The rows of one micro-batch, by the prompts that they share."""

    groups: list[list[int]] = field(default_factory=list)  # rows of the rollout; those of a group share their prompt
    tokens: int = 0  # a group's prompt counts once


def pack(rollout: Rollout, rows: torch.Tensor, compute: Compute, world: World, unit_size: int = 1) -> list[MicroBatch]:
    """Cut `rows` of the rollout into micro-batches of at most `token_budget` tokens, or of one longer row.

    unit_size: keep this many consecutive rows in one micro-batch, such as the two of a DPO pair. They share a prompt.
    Every forward and backward of an FSDP model is a collective, so a rank with fewer micro-batches than the fullest
    one gets dummies: real rows whose mask is all False. With --sequence-parallel K a micro-batch may be K times as
    long, and each of the K ranks of a group gets a slice of all their micro-batches. Collective: every rank calls it.
    """
    bins = fill_bins(rollout, rows, compute, unit_size)
    real = len(bins)
    # A rank computes a slice of each micro-batch of its sequence-parallel group, so the group's sum counts.
    forwards = torch.tensor(real)
    if world.sp_group is not None:
        dist.all_reduce(forwards, group=world.sp_group)
    missing = int(world.max(forwards)) - int(forwards)
    # The first rank of a group adds the dummies for all of them.
    if world.rank % compute.sequence_parallel == 0:
        dummy_rows = rows[:unit_size].tolist() or list(range(unit_size))
        bins += [Bin([dummy_rows])] * missing
    micro_batches = [pack_groups(rollout, bin_.groups) for bin_ in bins]
    for dummy in micro_batches[real:]:
        dummy.response_mask.zero_()
    if world.sp_group is not None:
        texts = [texts_of(rollout, bin_.groups) for bin_ in bins]
        micro_batches = slices_of_all(micro_batches, texts, rollout.response_mask, world.sp_group)
    # Every rank has equally many, so all ranks reduce their gradients in the same backward.
    for micro in micro_batches[:-1]:
        micro.last = False
    return micro_batches


def slices_of_all(
    micro_batches: list[MicroBatch], texts: list[list[Text]], response_mask: torch.Tensor, group: dist.ProcessGroup
) -> list[MicroBatch]:
    """This rank's slices of the micro-batches of all ranks of its sequence-parallel group, in the same order on each
    rank. texts: what this rank's micro-batches consist of. Collective over the group.
    """
    from common.trainer.sequence_parallel import cut

    texts_of_ranks = [None] * dist.get_world_size(group)
    dist.all_gather_object(texts_of_ranks, texts, group=group)
    slices = []
    for owner, texts_of_owner in enumerate(texts_of_ranks):
        for number, its_texts in enumerate(texts_of_owner):
            if owner == dist.get_rank(group):
                whole = micro_batches[number]
            else:
                # None of its rows is this rank's. This rank computes a part of the tokens, and the owner has the loss.
                whole = lay_out(its_texts, [], response_mask)
            slices.append(cut(whole, owner, group))
    return slices


def fill_bins(rollout: Rollout, rows: torch.Tensor, compute: Compute, unit_size: int) -> list[Bin]:
    """The rows of each micro-batch.

    Groups are sorted by their longest row, so that neighbours have similar lengths: attention without a variable-length
    kernel then pads little. A group that does not fit into a bin goes on in the next one, with its prompt again.
    """

    def response_tokens(unit: list[int]) -> int:
        return sum(len(rollout.response_ids[row]) for row in unit)

    def tokens_of(unit: list[int]) -> int:
        return len(rollout.prompt_ids[unit[0]]) + response_tokens(unit)

    def longest(units: list[list[int]]) -> int:
        return max(map(tokens_of, units))

    # K ranks compute a row together, so it may be K times as long.
    budget = compute.token_budget * compute.sequence_parallel
    bins = []
    for units in sorted(units_by_prompt(rollout, rows, compute, unit_size), key=longest):
        group = None  # the rows of this prompt that are in the last bin; None: the bin hasn't got the prompt
        for unit in sorted(units, key=tokens_of):
            added = tokens_of(unit) if group is None else response_tokens(unit)
            if not bins or bins[-1].tokens + added > budget:
                bins.append(Bin())
                group = None
                added = tokens_of(unit)
            # The first unit of a prompt in a bin brings the prompt along.
            if group is None:
                group = []
                bins[-1].groups.append(group)
            group += unit
            bins[-1].tokens += added
    return bins


def units_by_prompt(rollout: Rollout, rows: torch.Tensor, compute: Compute, unit_size: int) -> list[list[list[int]]]:
    """Units that will share a prompt, or a single one. Prompts are in the order in which they come first."""
    units = {}
    for unit in rows.view(-1, unit_size).tolist():
        prompt = rollout.prompt_ids[unit[0]]
        key = unit[0]  # a number of its own: shared with no other unit
        if compute.shared_prompts and hasattr(prompt, "images"):
            # However short the prompt is, encoding its images again would cost more.
            key = prompt.key
        elif compute.shared_prompts and len(prompt) >= SHARED_PROMPT_MIN_TOKENS:
            key = tuple(prompt)
        units.setdefault(key, []).append(unit)
    return list(units.values())


def pack_groups(rollout: Rollout, groups: list[list[int]]) -> MicroBatch:
    """One micro-batch with these groups of rows. Rows of a group have the same prompt."""
    rows = [row for group in groups for row in group]
    return lay_out(texts_of(rollout, groups), rows, rollout.response_mask)


def texts_of(rollout: Rollout, groups: list[list[int]]) -> list[Text]:
    """The prompt and the responses of each group."""
    return [(rollout.prompt_ids[group[0]], [rollout.response_ids[row] for row in group]) for group in groups]


def lay_out(texts: list[Text], rows: list[int], response_mask: torch.Tensor) -> MicroBatch:
    """Lay texts end to end in one packed row. They are `rows` of the rollout with this response_mask (N, T).

    This is the only place that shifts by one token: a token's logits come from the place before it.
    """
    tokens = []
    positions = []
    predictors = []
    targets = []
    scatter = []
    first_of_row = 0  # place of the response's token 0 in the flattened (n, T)
    for prompt, responses in texts:
        tokens += prompt
        positions += range(len(prompt))
        last_of_prompt = len(tokens) - 1
        for response in responses:
            # The prompt's last token predicts the response's first, and each token of the response the one after it.
            # The last one predicts nothing.
            places = [last_of_prompt, *range(len(tokens), len(tokens) + len(response))]
            predictors += places[:-1]
            targets += response
            tokens += response
            positions += range(len(prompt), len(prompt) + len(response))
            scatter += range(first_of_row, first_of_row + len(response))
            first_of_row += response_mask.shape[1]  # T

    device = response_mask.device
    position_ids, images = [positions], {}
    if any(hasattr(prompt, "images") for prompt, _ in texts):
        from common.trainer import vision

        position_ids, images = vision.lay_out(texts, positions, device)
    lengths = [(len(prompt), list(map(len, responses))) for prompt, responses in texts]

    def as_tensor(values: list) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.long, device=device)

    return MicroBatch(
        rows=as_tensor(rows),
        input_ids=as_tensor([tokens]),
        position_ids=as_tensor(position_ids),
        spans=spans(lengths, device),
        predictors=as_tensor(predictors),
        targets=as_tensor(targets),
        scatter=as_tensor(scatter),
        response_mask=response_mask[as_tensor(rows)],
        images=images,
    )
