"""Attention inside a packed row: each token sees its own sequence, and no neighbour.

A packed row is a list of groups (P, [L_1 ... L_n]): a prompt of P tokens, then n responses to it. Response i attends
to the prompt and to its own earlier tokens: the prompt is computed once for all n. A group of one response is an
ordinary sequence of P + L tokens.
"""

from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch.nn.attention.varlen import varlen_attn

Group = tuple[int, list[int]]
SHORT = 512  # keys; beyond it the attention weights of a row would take more memory than they save time


class Sequence(NamedTuple):
    """`length` tokens from `start` on that attend to each other, and to `context` tokens from `context_start` on."""

    start: int
    length: int
    context_start: int = 0
    context: int = 0


@dataclass
class Spans:
    """Which tokens of one packed row attend to which; made once, read by every layer."""

    runs: list[list[Sequence]]  # S sequences; those of one run share their context and one padded call
    query_ends: torch.Tensor | None = None  # CUDA only: (S + 1,) int32
    key_ends: torch.Tensor | None = None  # (S + 1,) int32, a context's keys standing before each sequence's own
    keys: torch.Tensor | None = None  # which tokens these keys are; None: every token once
    longest: tuple[int, int] = (0, 0)  # most queries and most keys of one sequence


def spans(groups: list[Group], device: torch.device) -> Spans:
    """Spans of the packed row in which these groups stand one after the other."""
    sequences, first = [], 0
    for prompt, responses in groups:
        if len(responses) == 1:
            sequences.append(Sequence(first, prompt + responses[0]))
        else:
            sequences.append(Sequence(first, prompt))
            starts = torch.tensor([prompt, *responses]).cumsum(0).tolist()
            sequences += [Sequence(first + at, length, first, prompt) for at, length in zip(starts, responses)]
        first += prompt + sum(responses)
    by_context = [list(run) for _, run in groupby(sequences, lambda s: (s.context_start, s.context))]
    runs = [run for same in by_context for run in similar_lengths(same)]
    if device.type != "cuda":
        return Spans(runs)
    lengths = torch.tensor([[s.length, s.context + s.length] for s in sequences])  # (S, 2)
    ends = F.pad(lengths.cumsum(0, dtype=torch.int32), (0, 0, 1, 0)).to(device).unbind(1)
    keys = None
    if any(s.context for s in sequences):
        ranges = [((s.context_start, s.context), (s.start, s.length)) for s in sequences]
        keys = torch.cat([torch.arange(at, at + n) for pair in ranges for at, n in pair]).to(device)
    return Spans(runs, ends[0].contiguous(), ends[1].contiguous(), keys, tuple(lengths.amax(0).tolist()))


def packed_attention(module, query, key, value, attention_mask, scaling=None, dropout=0.0, spans=None, **kwargs):
    """Causal attention inside each sequence of a packed row: (1, heads, L, d) -> (1, L, heads, d).

    On CUDA one variable-length kernel; elsewhere neighbours of similar length share one padded call. Padding
    stands on the right, so a causal mask alone keeps it out: no token sees a later one.
    """
    gqa = query.shape[1] != key.shape[1]  # grouped-query attention
    if query.is_cuda and query.dtype != torch.float32:
        flat = [x[0].transpose(0, 1) for x in (query, key, value)]  # (L, heads, d)
        if spans.keys is not None:
            flat[1:] = [x.index_select(0, spans.keys) for x in flat[1:]]
        # The kernel aligns its causal mask to the end of queries and keys: a context is seen whole.
        ends = (spans.query_ends, spans.key_ends, *spans.longest)
        out = varlen_attn(*flat, *ends, scale=scaling, window_size=(-1, 0), enable_gqa=gqa)
        return out[None], None
    outputs, prompts, prompts_start = [], (), 0  # the newest run without a context: prompts of those that have one
    # One split in place of a slice a run, each of whose backwards would be as long as the whole row.
    sizes = [sum(s.length for s in run) for run in spans.runs]
    pieces = zip(*(x.squeeze(0).split(sizes, dim=1) for x in (query, key, value)))
    for run, piece in zip(spans.runs, pieces):
        rows = [padded(x, run) for x in piece]  # (n, heads, longest, d)
        context = run[0].context
        if context:  # it stands in the run before all those that share it
            first = run[0].context_start - prompts_start
            contexts = [x[None, :, first : first + context].expand(len(run), -1, -1, -1) for x in prompts]
            rows[1:] = [torch.cat(pair, dim=2) for pair in zip(contexts, rows[1:])]
        else:
            prompts, prompts_start = piece[1:], run[0].start
        if rows[1].shape[2] <= SHORT:
            out = two_products(*rows, context, scaling)
        else:
            mask = causal_mask(rows[0].shape[2], context, query.device) if context else None
            settings = {"attn_mask": mask, "is_causal": mask is None, "scale": scaling, "enable_gqa": gqa}
            out = F.scaled_dot_product_attention(*rows, **settings)
        outputs.append(unpadded(out, run))
    return torch.cat(outputs)[None], None


def two_products(query, key, value, context: int, scale: float | None) -> torch.Tensor:
    """softmax(query key^T scale) value with the weights written out, shapes as in packed_attention's padded call.

    For short sequences on a CPU 1.6 times as fast as its fused kernel, forward and backward together.
    """
    n, heads, longest, width = query.shape
    keys = key.shape[1]  # heads; each serves `heads / keys` queries' heads, which become rows of one product
    query = (query * (scale or width**-0.5)).reshape(n * keys, -1, width)
    bias = torch.zeros(longest, context + longest, dtype=query.dtype, device=query.device)
    bias.masked_fill_(~causal_mask(longest, context, query.device), -torch.inf)
    key, value = (x.reshape(n * keys, -1, width) for x in (key, value))
    weights = torch.baddbmm(bias.repeat(heads // keys, 1), query, key.transpose(1, 2)).softmax(-1)
    return torch.bmm(weights, value).view(n, heads, longest, width)


def causal_mask(queries: int, context: int, device: torch.device) -> torch.Tensor:
    """(queries, context + queries) bool: a token sees the whole context, itself and what stands before it."""
    return torch.ones(queries, context + queries, dtype=torch.bool, device=device).tril(context)


def padded(x: torch.Tensor, run: list[Sequence]) -> torch.Tensor:
    """(heads, sum of lengths, d) -> (n, heads, longest, d): zeros on the right. Of equal lengths: a view."""
    lengths = [s.length for s in run]
    if min(lengths) == max(lengths):
        return x.unflatten(1, (len(run), -1)).transpose(0, 1)
    out = x.new_zeros(len(run), max(lengths), x.shape[0], x.shape[2])
    out[real_tokens(run, x.device)] = x.transpose(0, 1)
    return out.transpose(1, 2)


def unpadded(x: torch.Tensor, run: list[Sequence]) -> torch.Tensor:
    """(n, heads, longest, d) -> (sum of lengths, heads, d), the inverse."""
    x = x.transpose(1, 2)
    equal = len({s.length for s in run}) == 1
    return x.flatten(0, 1) if equal else x[real_tokens(run, x.device)]


def real_tokens(run: list[Sequence], device: torch.device) -> torch.Tensor:
    """(n, longest) bool: True left of the padding."""
    lengths = torch.tensor([s.length for s in run], device=device)
    return torch.arange(int(lengths.max()), device=device)[None] < lengths[:, None]


def similar_lengths(sequences: list[Sequence], waste: float = 0.15) -> list[list[Sequence]]:
    """Cut a list of sequences into runs whose padded size exceeds the real one by at most `waste`."""
    runs: list[list[Sequence]] = []
    for sequence in sequences:
        run = [*runs[-1], sequence] if runs else []
        if runs and max(s.length for s in run) * len(run) <= (1 + waste) * sum(s.length for s in run):
            runs[-1] = run
        else:
            runs.append([sequence])
    return runs
