"""Sequence parallelism (Ulysses, arXiv:2309.14509): K ranks compute one packed row together, each a slice of it.

Rank k of a group holds tokens k * size ... (k + 1) * size - 1 of a row of L. All layers except attention work on single
tokens. Before attention an all-to-all turns (all heads, a slice) into (1 / K of the heads, the whole row), and after it
another one turns this back:

    before     rank 0: heads 0 1 2 3 of tokens 0 ... 4     rank 1: heads 0 1 2 3 of tokens 5 ... 9
    attention  rank 0: heads 0 1 of tokens 0 ... 9         rank 1: heads 2 3 of tokens 0 ... 9

Each row has an owner, the rank whose responses it holds. The owner gets their log-probs and alone has a loss on them;
for the other ranks the micro-batch has no rows. The gradient of each token arises on one rank, as without slices.
"""

from dataclasses import replace

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed._functional_collectives import all_to_all_single  # torch.distributed's own has no gradient

from common.trainer.attention import Spans, packed_attention


class SlicedSpans(Spans):
    """Spans of a whole packed row of which this rank holds a slice."""

    def __init__(
        self, whole: Spans, *, group: dist.ProcessGroup | None, length: int, size: int, owner: int, counts: list[int]
    ):
        super().__init__(**vars(whole))  # Spans keeps each argument under its name
        self.group = group
        self.length = length  # L, tokens of the row
        self.size = size  # tokens of a slice; the last slice is padded
        self.owner = owner  # rank in the group whose responses the row holds
        self.counts = counts  # response tokens predicted in each rank's slice

    def to_owner(self, values: torch.Tensor) -> torch.Tensor:
        """(R_k,) of each slice -> (R,) of all slices on the owner, (0,) on the others. Collective over the group."""
        nothing = [0] * len(self.counts)
        sent = nothing.copy()
        sent[self.owner] = len(values)
        received = self.counts if dist.get_rank(self.group) == self.owner else nothing
        return all_to_all_single(values, received, sent, self.group)


def cut(micro, owner: int, group: dist.ProcessGroup):
    """This rank's slice of a micro-batch that every rank of the group holds whole. Only the owner's slice has rows."""
    ranks = dist.get_world_size(group)
    rank = dist.get_rank(group)
    length = micro.input_ids.shape[1]
    size = -(-length // ranks)  # rounded up

    # An all-to-all wants slices of equal length, so the last one is padded.
    def slice_of(ids: torch.Tensor) -> torch.Tensor:
        return F.pad(ids, (0, ranks * size - length)).chunk(ranks, dim=1)[rank]  # (1, size)

    holder = micro.predictors // size  # (R,) rank whose slice predicts each response token
    counts = holder.bincount(minlength=ranks).tolist()
    # to_owner() returns log-probs slice by slice. Other ranks get none, so they have nowhere to put them.
    order = holder.argsort(stable=True) if rank == owner else slice(0)
    return replace(
        micro,
        input_ids=slice_of(micro.input_ids),
        position_ids=slice_of(micro.position_ids),
        spans=SlicedSpans(micro.spans, group=group, length=length, size=size, owner=owner, counts=counts),
        predictors=micro.predictors[holder == rank] - rank * size,
        targets=micro.targets[holder == rank],
        scatter=micro.scatter[order],
    )


def sliced_attention(module, query, key, value, attention_mask, *, spans=None, s_aux=None, **settings):
    """packed_attention of a row or, collective over the group, of a slice: (1, heads, size, d) -> (1, size, heads, d).

    Query, key and value heads are dealt in blocks, so query heads find their keys, values and sinks in the same block.
    """
    if not isinstance(spans, SlicedSpans):
        return packed_attention(module, query, key, value, attention_mask, spans=spans, s_aux=s_aux, **settings)
    # Every rank now attends over the whole row, with the spans of the whole row, for its own block of heads.
    row = (whole_row(x[0], spans)[None] for x in (query, key, value))  # (1, heads / K, L, d)
    if s_aux is not None:
        s_aux = s_aux.chunk(len(spans.counts))[dist.get_rank(spans.group)]  # (heads / K,)
    out, _ = packed_attention(module, *row, attention_mask, spans=spans, s_aux=s_aux, **settings)
    return own_slice(out[0], spans)[None], None


def whole_row(x: torch.Tensor, spans: SlicedSpans) -> torch.Tensor:
    """(heads, size, d) -> (heads / K, L, d): from all heads of a slice to one block of heads of the whole row."""
    blocks = x.unflatten(0, (len(spans.counts), -1))  # (K, heads / K, size, d), one block of heads for each rank
    slices = exchange(blocks, spans)  # the same shape, one slice from each rank
    return slices.transpose(0, 1).flatten(1, 2)[:, : spans.length]


def own_slice(x: torch.Tensor, spans: SlicedSpans) -> torch.Tensor:
    """(L, heads / K, d) -> (size, heads, d): undo whole_row(). Padding is 0."""
    ranks = len(spans.counts)
    slices = F.pad(x, (0, 0, 0, 0, 0, ranks * spans.size - spans.length)).unflatten(0, (ranks, spans.size))
    blocks = exchange(slices, spans)  # (K, size, heads / K, d), one block of heads from each rank
    return blocks.transpose(0, 1).flatten(1, 2)


def exchange(pieces: torch.Tensor, spans: SlicedSpans) -> torch.Tensor:
    """(K, ...): piece k goes to rank k of the group, and piece k of the result comes from rank k. So do gradients."""
    return all_to_all_single(pieces.contiguous(), None, None, spans.group)
