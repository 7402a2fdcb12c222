"""Micro-batches: rows of a rollout laid end to end in one packed sequence, within a token budget.

Micro-batches exist only to limit memory. The loss is divided by a denominator that counts the whole mini-batch, on all
ranks, so the gradient does not depend on how the mini-batch is cut. The terms, from small to large:

    row          one response of the rollout, together with its prompt. Each rank has a rollout of its own
    unit         rows that must not be separated: one, or the two of a DPO pair
    group        rows for which a prompt is computed once. Rows with a short prompt are not grouped with others
    bin          the plan for a micro-batch: groups, or parts of groups, of at most `token_budget` tokens. A single unit
                 may be longer. A group that is spread over two bins has its prompt in both
    micro-batch  the tensors of a bin, for one forward and backward
    mini-batch   this rank's micro-batches for one optimizer step

A bin of two groups: b and c answer prompt a, and e answers prompt d. (Real prompts are longer. Sharing a prompt of 3
tokens would not pay.)

    input_ids      a0  a1  a2 | b0  b1 | c0  c1 | d0  d1  e0  e1  e2     (1, L = 12)
    position_ids    0   1   2 |  3   4 |  3   4 |  0   1   2   3   4     a response continues its prompt
    attends to     a          | a, b   | a, c   | d, e                   never to a later token
    predicts             b0 c0  b1       c1           e0  e1  e2         a2 predicts both b0 and c0

The bars separate segments, which are the sequences that attention computes. A prompt with only one response forms one
segment with it. If all prompts that are packed begin with the same 32 or more tokens, such as a system prompt, a
micro-batch of several groups has these once at its start, as one more segment. The model computes logits at every
position in `predictors`, for a2 twice. The logits of entry i predict `targets[i]`, whose log-prob is stored at index
`scatter[i]` of the flattened (n, T) result. n is the number of rows, T the length of the longest response of the
rollout; here (3, 3):

    targets        b0  b1  c0  c1  e0  e1  e2
    predictors      2   3   2   5   8   9  10
    scatter         0   1   3   4   6   7   8
"""

from dataclasses import dataclass, field
from typing import Literal

import torch
import torch.distributed as dist
import tyro
from pydantic import NonNegativeInt

from common.placement import Sharding, World
from common.rollout.rollout import Rollout
from common.trainer.attention import Group, Spans, spans
from common.trainer.kernels import Kernels

# A shared prompt is a segment of its own, which costs one more call of attention. Below this length it saves less.
SHARED_PROMPT_MIN_TOKENS = 32
PromptWithResponses = tuple[list[int], list[list[int]]]  # token ids of a prompt, and of each response to it


@dataclass(frozen=True)
class Compute(Sharding):
    """Settings of the trainer's forward and backward. Those down to --kernels change results only by rounding."""

    token_budget: NonNegativeInt = 0  # Most tokens in one forward on one rank. 0: as many as fit into the memory.
    shared_prompts: tyro.conf.Suppress[bool] = True  # Set by prepare(). False computes a prompt for each response.
    packing: Literal["auto", "on", "off"] = "auto"
    """Lay sequences end to end (on), or give each a row of its own (off). auto: off for models that need it."""
    activation_checkpointing: bool = False  # Recompute layers in the backward: less memory, a third more work.
    kernels: Kernels = "eager"  # Kernels of the layers: transformers' own, or torch.compile.
    lora_rank: NonNegativeInt = 0
    """Train adapters of this rank (LoRA). Choose a five to ten times larger --learning-rate. 0: all weights."""
    longest: tyro.conf.Suppress[NonNegativeInt] = 0  # Set by prepare(): tokens of the longest row, for longrope.
    train_vision: bool = False  # Also train the vision encoder.
    freeze_router: bool = False  # Do not train the router of a mixture-of-experts model.


@dataclass
class MicroBatch:
    """n rows packed into one sequence of L tokens, R of which are response tokens.

    With sequence parallelism it is a slice of such a sequence: L is the slice's length, and `predictors` and `targets`
    have only the response tokens that this slice predicts. `group_lengths`, `beginning` and `spans` describe the whole
    sequence.
    The rank that owns the rows gets all log-probs in the end, so its `scatter` has the tokens of all slices, slice
    after slice. A slice of another rank's sequence has no rows (n is 0) and an empty `scatter`.
    """

    rows: torch.Tensor  # (n,) indices into the rollout
    input_ids: torch.Tensor  # (1, L)
    position_ids: torch.Tensor  # (1, L); with M-RoPE (4, 1, L): of text, and time, height and width in an image
    group_lengths: list[Group]  # lengths of each prompt, without the beginning, and of the responses to it, in order
    spans: Spans  # which tokens attend to which
    predictors: torch.Tensor  # (R,) position in the packed sequence whose logits predict each response token
    targets: torch.Tensor  # (R,) the response tokens
    scatter: torch.Tensor  # (R,) their indices in a flattened (n, T)
    response_mask: torch.Tensor  # (n, T) bool, True on tokens that the policy sampled and that were graded
    beginning: int = 0  # tokens at the start of the sequence that all prompts begin with
    images: dict = field(default_factory=dict)  # extra inputs of the model, if prompts have images; in host memory
    last: bool = True  # the last of its list: after its backward, gradients are summed over all ranks


@dataclass
class MiniBatch:
    """This rank's share of one optimizer step."""

    rows: torch.Tensor  # indices into the rollout: all rows, also those without a gradient; a denominator counts them
    micro_batches: list[MicroBatch]  # of the rows that have a gradient; the same number on every rank


def split(
    rollout: Rollout,
    count: int,
    has_gradient: torch.Tensor,
    compute: Compute,
    world: World,
    beginning: int | None = None,
) -> list[MiniBatch]:
    """Cut a rollout into `count` mini-batches of the same number of consecutive rows, and pack each.

    has_gradient: (N,) bool. Rows without one, such as those with advantage 0, skip the forward, but they stay in `rows`
    and so in the denominator. A prompt's G responses are consecutive rows. They stay together, because the number of
    prompts on each rank is a multiple of `count` (prepare() checks it). beginning: as in pack(). Collective: every rank
    calls it.
    """
    mini_batches = []
    for rows in torch.arange(len(rollout), device=has_gradient.device).chunk(count):
        trained = rows[has_gradient[rows]]
        mini_batches.append(MiniBatch(rows, pack(rollout, trained, compute, world, beginning=beginning)))
    return mini_batches


@dataclass
class Bin:
    """The plan for a micro-batch: which rows it will have, and which of them share a prompt."""

    groups: list[list[int]] = field(default_factory=list)  # indices into the rollout; rows of a group share a prompt
    tokens: int = 0  # in all; a shared prompt counts once. Not counted without packing


def pack(
    rollout: Rollout,
    rows: torch.Tensor,
    compute: Compute,
    world: World,
    unit_size: int = 1,
    beginning: int | None = None,
) -> list[MicroBatch]:
    """Pack `rows` of the rollout into micro-batches of at most `token_budget` tokens. A longer unit gets its own.

    The list may be empty, and then it is empty on all ranks. compute: as prepare() returns it, with a token budget.
    unit_size: keep this many consecutive rows together, such as the two of a DPO pair. It divides len(rows).
    beginning: length of the common beginning that each micro-batch computes once. None: find it, and use it where it
    pays. Raises ValueError if the prompts don't begin alike.
    Every forward and backward of an FSDP model is a collective, so a rank with fewer micro-batches than the fullest
    one gets dummies: real rows whose mask is all False. With --sequence-parallel K, K ranks form a sequence-parallel
    (SP) group. A micro-batch may then be K times as long, and every rank of the group gets one slice of each of the
    group's micro-batches. Collective: every rank calls it.
    """
    fill = fill_padded_bins if compute.packing == "off" else fill_bins
    bins = fill(rollout, rows, compute, unit_size)
    beginnings = beginnings_of(bins, rollout, rows, compute, beginning)
    real = len(bins)
    # A rank runs one forward for each micro-batch of its whole SP group, so these are counted over the group. Groups
    # with fewer than the fullest one are filled up.
    forwards = torch.tensor(real)
    if world.sp_group is not None:
        dist.all_reduce(forwards, group=world.sp_group)
    missing = int(world.max(forwards)) - int(forwards)
    # The first rank of an SP group adds the dummies for all of its ranks.
    if world.rank % compute.sequence_parallel == 0:
        dummy_rows = rows[:unit_size].tolist() or list(range(unit_size))  # if this rank has none: the rollout's first
        bins += [Bin([dummy_rows])] * missing
        beginnings += [0] * missing
    if not compute.shared_prompts:
        bins = [Bin([[row] for group in bin_.groups for row in group]) for bin_ in bins]
    micro_batches = [pack_groups(rollout, bin_.groups, length) for bin_, length in zip(bins, beginnings)]
    for dummy in micro_batches[real:]:
        dummy.response_mask.zero_()  # a copy: the rollout keeps its mask
    if world.sp_group is not None:
        contents = [(contents_of(rollout, bin_.groups), length) for bin_, length in zip(bins, beginnings)]
        micro_batches = slices_of_all(micro_batches, contents, rollout.response_mask, world.sp_group)
    # Every rank has the same number, so all ranks reduce their gradients in the same backward.
    for micro in micro_batches[:-1]:
        micro.last = False
    return micro_batches


def slices_of_all(
    micro_batches: list[MicroBatch],
    contents: list[tuple[list[PromptWithResponses], int]],
    response_mask: torch.Tensor,
    sp_group: dist.ProcessGroup,
) -> list[MicroBatch]:
    """This rank's slices of the micro-batches of all ranks of its SP group, in the same order on each rank.

    contents: for each of this rank's micro-batches its prompts and responses, and the length of its beginning.
    Collective over the SP group.
    """
    from common.trainer.sequence_parallel import cut

    contents_of_ranks = [None] * dist.get_world_size(sp_group)
    dist.all_gather_object(contents_of_ranks, contents, group=sp_group)
    slices = []
    for owner, contents_of_owner in enumerate(contents_of_ranks):
        for number, (content, beginning) in enumerate(contents_of_owner):
            if owner == dist.get_rank(sp_group):
                whole = micro_batches[number]
            else:
                # Another rank owns these rows and computes their loss. This rank runs its slice through the model.
                whole = lay_out(content, [], response_mask, beginning)
            slices.append(cut(whole, owner, sp_group))
    return slices


def beginnings_of(
    bins: list[Bin], rollout: Rollout, rows: torch.Tensor, compute: Compute, beginning: int | None
) -> list[int]:
    """For each bin of these rows the length of the beginning that its micro-batch computes once. beginning: as in
    pack().
    """
    if compute.packing == "off" or not compute.shared_prompts:
        return [0] * len(bins)
    if beginning is None:
        found = common_beginning(rollout, rows)
        pays = found >= SHARED_PROMPT_MIN_TOKENS
        return [found if pays and len(bin_.groups) > 1 else 0 for bin_ in bins]
    prompts = [list(rollout.prompt_ids[row]) for row in rows.tolist()]
    if any(len(ids) <= beginning or ids[:beginning] != prompts[0][:beginning] for ids in prompts):
        raise ValueError(f"beginning={beginning}: not all prompts begin with the same {beginning} tokens and go on")
    return [beginning] * len(bins)


def common_beginning(rollout: Rollout, rows: torch.Tensor) -> int:
    """How many tokens the prompts of these rows have in common at their start. 0 if they are all the same prompt.

    Each keeps at least one token, which predicts the first token of its responses. A prompt with images can't be cut,
    so it is 0 if one has images.
    """
    prompts = [rollout.prompt_ids[row] for row in rows.tolist()]
    if not prompts or any(hasattr(prompt, "images") for prompt in prompts):
        return 0
    first, last = min(prompts), max(prompts)  # lists are compared token by token: what these two share, all share
    if first == last:
        return 0
    length = 0
    while length < len(first) - 1 and first[length] == last[length]:
        length += 1
    return length


def fill_bins(rollout: Rollout, rows: torch.Tensor, compute: Compute, unit_size: int) -> list[Bin]:
    """Fill one bin after the other: a unit that doesn't fit opens the next.

    Groups are sorted by their longest unit, and the units of a group by their length. Neighbours then have similar
    lengths. Attention without a variable-length kernel pads neighbours to one length, so it wastes little. If a group
    does not fit into a bin, the rest of it goes into the next one, with its prompt again.

    Each prompt counts in full, even if its beginning is computed only once. Otherwise a bin could have many more
    responses, and attention keeps a copy of the beginning's keys and values for each.
    """

    def response_tokens(unit: list[int]) -> int:
        return sum(len(rollout.response_ids[row]) for row in unit)

    def tokens_of(unit: list[int]) -> int:
        prompts = 1 if compute.shared_prompts else len(unit)
        return prompts * len(rollout.prompt_ids[unit[0]]) + response_tokens(unit)

    def longest(units: list[list[int]]) -> int:
        return max(map(tokens_of, units))

    # The K ranks of an SP group share one packed sequence, so it may be K times as long.
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


def fill_padded_bins(rollout: Rollout, rows: torch.Tensor, compute: Compute, unit_size: int) -> list[Bin]:
    """The same for a model that is not packed: it pads the rows of a bin to the longest one and shares no prompt."""

    def longest_row(unit: list[int]) -> int:
        return max(len(rollout.prompt_ids[row]) + len(rollout.response_ids[row]) for row in unit)

    bins = []
    for unit in sorted(rows.view(-1, unit_size).tolist(), key=longest_row):
        # Units come in the order of their length, so all rows of the bin would be padded to this one.
        rows_in_bin = sum(map(len, bins[-1].groups)) if bins else 0
        if not bins or (rows_in_bin + len(unit)) * longest_row(unit) > compute.token_budget:
            bins.append(Bin())
        bins[-1].groups.append(unit)
    return bins


def units_by_prompt(rollout: Rollout, rows: torch.Tensor, compute: Compute, unit_size: int) -> list[list[list[int]]]:
    """Lists of units: those that share a prompt, or one unit alone. Lists are in the order of their first unit."""
    units = {}
    for unit in rows.view(-1, unit_size).tolist():
        prompt = rollout.prompt_ids[unit[0]]
        key = unit[0]  # no other unit has it, so this one stays alone even if its prompt appears elsewhere
        if compute.shared_prompts and hasattr(prompt, "images"):
            # A prompt with images (a list subclass of data/images.py). However short it is, encoding its images again
            # would cost more.
            key = prompt.key
        elif compute.shared_prompts and len(prompt) >= SHARED_PROMPT_MIN_TOKENS:
            key = tuple(prompt)
        units.setdefault(key, []).append(unit)
    return list(units.values())


def pack_groups(rollout: Rollout, groups: list[list[int]], beginning: int = 0) -> MicroBatch:
    """One micro-batch with these groups of rows. Rows of a group have the same prompt. beginning: as in lay_out()."""
    rows = [row for group in groups for row in group]
    return lay_out(contents_of(rollout, groups), rows, rollout.response_mask, beginning)


def after_prompts_of(rollout: Rollout, micro: MicroBatch, compute: Compute) -> MicroBatch:
    """A micro-batch's responses in the same order, after the prompts that they have in another rollout.

    For a forward without gradient: it may be longer than the token budget. Not for slices of sequence parallelism. Its
    mask is not that of a dummy, even if `micro` is one.
    """
    shares = compute.shared_prompts and compute.packing != "off"
    groups = []
    for row in micro.rows.tolist():
        if shares and groups and rollout.prompt_ids[groups[-1][0]] == rollout.prompt_ids[row]:
            groups[-1].append(row)
        else:
            groups.append([row])
    return pack_groups(rollout, groups)


def contents_of(rollout: Rollout, groups: list[list[int]]) -> list[PromptWithResponses]:
    """The prompt and the responses of each group."""
    return [(rollout.prompt_ids[group[0]], [rollout.response_ids[row] for row in group]) for group in groups]


def lay_out(
    contents: list[PromptWithResponses], rows: list[int], response_mask: torch.Tensor, beginning: int = 0
) -> MicroBatch:
    """Lay prompts and responses end to end in one packed sequence.

    rows: index in the rollout of each response, in order; empty if another rank owns them.
    response_mask: (N, T), of the whole rollout.
    beginning: tokens that all prompts begin with, laid out once. Each prompt has at least one more.
    The logits of a token come from the position before it. For training, only this function and unpacked.rows_of
    apply that shift.
    """
    tokens = list(contents[0][0])[:beginning]  # a list of its own: an ImageIds can't be cut
    positions = list(range(beginning))
    predictors = []
    targets = []
    scatter = []
    first_of_row = 0  # index of the response's token 0 in the flattened (n, T)
    for prompt, responses in contents:
        tokens += list(prompt)[beginning:]
        positions += range(beginning, len(prompt))
        last_of_prompt = len(tokens) - 1
        for response in responses:
            # The prompt's last token predicts the first response token, and each response token predicts the next. The
            # last response token predicts nothing.
            places = [last_of_prompt, *range(len(tokens), len(tokens) + len(response))]
            predictors += places[:-1]
            targets += response
            tokens += response
            positions += range(len(prompt), len(prompt) + len(response))
            scatter += range(first_of_row, first_of_row + len(response))
            first_of_row += response_mask.shape[1]  # T

    device = response_mask.device
    position_ids, images = [positions], {}
    if any(hasattr(prompt, "images") for prompt, _ in contents):
        from common.trainer import vision

        position_ids, images = vision.lay_out(contents, positions)
    lengths = [(len(prompt) - beginning, list(map(len, responses))) for prompt, responses in contents]

    def as_tensor(values: list) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.long, device=device)

    return MicroBatch(
        rows=as_tensor(rows),
        input_ids=as_tensor([tokens]),
        position_ids=as_tensor(position_ids),
        group_lengths=lengths,
        beginning=beginning,
        spans=spans(lengths, device, beginning),
        predictors=as_tensor(predictors),
        targets=as_tensor(targets),
        scatter=as_tensor(scatter),
        response_mask=response_mask[as_tensor(rows)],
        images=images,
    )
