"""Attention inside a packed row: a token sees its own sequence and the prompt it answers, and no neighbour.

A packed row is a list of groups (P, [L_1 ... L_n]): a prompt of P tokens, then n responses to it. Response i attends
to the prompt and to its own earlier tokens, so the prompt is computed once for all n responses (batching.py has a
picture). A group with a single response is one ordinary sequence of P + L tokens.
"""

import inspect
from dataclasses import dataclass
from itertools import accumulate, groupby
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch.nn.attention.varlen import varlen_attn

from common.errors import BadInput

Group = tuple[int, list[int]]  # length of a prompt, and lengths of the responses to it
PADDING_PER_CALL = 256  # tokens
ASKS_GQA = "enable_gqa" in inspect.signature(varlen_attn).parameters  # torch 2.11's kernel has it without asking
WRITTEN_OUT_MAX_KEYS = 512  # for longer sequences, written-out weights take more memory than they save time


class Scores(NamedTuple):
    """How a layer gets from query key^T to weights. transformers passes what its family needs."""

    scale: float | None = None  # factor of the products; None is 1 / sqrt(width of a query)
    window: int | None = None  # a token sees itself and the window - 1 tokens before it (Mistral, Gemma)
    cap: float | None = None  # scores become cap tanh(score / cap) (Gemma 2)
    sinks: torch.Tensor | None = None  # (heads,) score of one more key, whose value is 0 (gpt-oss)


class Sequence(NamedTuple):
    """Tokens of a packed row that attend causally to one another and, if they have a context, to all tokens of it."""

    start: int  # place of the first token in the row
    length: int  # tokens
    context_start: int = 0  # place of the context, which is a shared prompt
    context: int = 0  # tokens of the context; 0 without one


@dataclass
class Spans:
    """Which tokens of a packed row of S sequences attend to which. Every layer reads the same one."""

    runs: list[list[Sequence]]  # all S in order; the sequences of a run share their context and one padded call
    query_ends: torch.Tensor | None = None  # CUDA only: (S + 1,) int32, cumulative number of queries
    key_ends: torch.Tensor | None = None  # (S + 1,) int32, cumulative number of keys, with those of the contexts
    keys: torch.Tensor | None = None  # their places in the row, a context before its sequence; None: all, in order
    longest: tuple[int, int] = (0, 0)  # most queries and most keys of one sequence

    def to_owner(self, values: torch.Tensor) -> torch.Tensor:
        """Results (R,) on the rank that trains on them: this one, unless it holds a slice of a row."""
        return values


def spans(groups: list[Group], device: torch.device) -> Spans:
    """Spans of the packed row in which these groups stand one after the other."""
    sequences, end = [], 0  # end: tokens of the groups so far
    for prompt, responses in groups:
        if len(responses) == 1:
            sequences.append(Sequence(end, prompt + responses[0]))
        else:
            sequences.append(Sequence(end, prompt))
            starts = accumulate([end + prompt, *responses])
            sequences += [Sequence(start, length, end, prompt) for start, length in zip(starts, responses)]
        end += prompt + sum(responses)
    by_context = [list(run) for _, run in groupby(sequences, lambda s: (s.context_start, s.context))]
    runs = [run for same_context in by_context for run in similar_lengths(same_context)]
    if device.type != "cuda":
        return Spans(runs)
    lengths = torch.tensor([[s.length, s.context + s.length] for s in sequences])  # (S, 2), queries and keys
    ends = F.pad(lengths.cumsum(0, dtype=torch.int32), (0, 0, 1, 0)).to(device).unbind(1)  # 2 x (S + 1,)
    keys = None
    if any(s.context for s in sequences):
        ranges = [((s.context_start, s.context), (s.start, s.length)) for s in sequences]
        keys = torch.cat([torch.arange(start, start + n) for pair in ranges for start, n in pair]).to(device)
    return Spans(runs, ends[0].contiguous(), ends[1].contiguous(), keys, tuple(lengths.amax(0).tolist()))


def packed_attention(
    module, query, key, value, attention_mask, scaling=None, dropout=0.0, spans=None, sliding_window=None,
    softcap=None, s_aux=None, **kwargs,
):  # fmt: skip
    """Causal attention inside each sequence of a packed row. transformers calls it in every layer.

    query (1, heads, L, d), key (1, key heads, L, d), value (1, key heads, L, v) -> (1, L, heads, v). CUDA computes the
    row in one variable-length kernel. Elsewhere, in float32, and for layers that the kernel does not know, neighbours
    of similar length share one padded call. The padding stands on the right, where a causal mask already hides it: no
    token sees a later one.
    """
    if attention_mask is not None or spans is None:
        raise BadInput(f"{module.config.model_type} models are not supported, because of a mask of their own")
    scores = Scores(scaling, sliding_window, softcap, s_aux)
    gqa = query.shape[1] != key.shape[1]  # grouped-query attention: several query heads share keys and values
    written_out = softcap is not None or s_aux is not None
    if query.is_cuda and query.dtype != torch.float32 and not written_out and query.shape[-1] == value.shape[-1]:
        flat = [x[0].transpose(0, 1) for x in (query, key, value)]  # (L, heads, d)
        if spans.keys is not None:
            flat[1:] = [x.index_select(0, spans.keys) for x in flat[1:]]
        # The kernel aligns the ends of queries and keys for its mask, so a query sees the context that it should.
        ends = (spans.query_ends, spans.key_ends, *spans.longest)
        before = -1 if sliding_window is None else sliding_window - 1  # tokens that a token sees before itself
        grouped = {"enable_gqa": gqa} if ASKS_GQA else {}
        return varlen_attn(*flat, *ends, scale=scaling, window_size=(before, 0), **grouped)[None], None
    outputs, prompts, prompts_start = [], [], 0  # prompts: keys and values of the latest prompts, for their responses
    # Split the row once: the backward of a slice is as long as the whole row, so one slice a run would be slow.
    sizes = [sum(s.length for s in run) for run in spans.runs]
    pieces = zip(*(x.squeeze(0).split(sizes, dim=1) for x in (query, key, value)))  # (heads, tokens of the run, d)
    for run, piece in zip(spans.runs, pieces):
        rows = [padded(x, run) for x in piece]  # (n, heads, longest, d)
        if context := run[0].context:
            first = run[0].context_start - prompts_start
            contexts = [x[None, :, first : first + context].expand(len(run), -1, -1, -1) for x in prompts]
            rows[1:] = [torch.cat(pair, dim=2) for pair in zip(contexts, rows[1:])]  # (n, heads, context + longest, d)
        else:
            prompts, prompts_start = piece[1:], run[0].start
        if written_out or rows[1].shape[2] <= WRITTEN_OUT_MAX_KEYS:
            out = written_out_attention(*rows, context, scores)
        else:
            masked = context or sliding_window
            mask = causal_mask(rows[0].shape[2], context, sliding_window, query.device) if masked else None
            out = F.scaled_dot_product_attention(*rows, mask, is_causal=mask is None, scale=scaling, enable_gqa=gqa)
        outputs.append(unpadded(out, run))
    return torch.cat(outputs)[None], None


def written_out_attention(query, key, value, context: int, scores: Scores) -> torch.Tensor:
    """softmax(scale query key^T + causal mask) value, with the weights in memory. Shapes as in packed_attention's call.

    For short sequences on a CPU it is 1.6 times as fast as the fused kernel, forward and backward together.
    """
    n, heads, longest, width = query.shape
    key_heads = key.shape[1]  # each serves `heads / key_heads` query heads, which become rows of one product
    if scores.cap is not None or scores.sinks is not None:  # rounded to bfloat16, these scores would be far off vLLM's
        query, key = (x.to(torch.promote_types(x.dtype, torch.float32)) for x in (query, key))
    query = (query * (scores.scale or width**-0.5)).reshape(n * key_heads, -1, width)
    bias = torch.zeros(longest, context + longest, dtype=query.dtype, device=query.device)
    bias.masked_fill_(~causal_mask(longest, context, scores.window, query.device), -torch.inf)
    bias = bias.repeat(heads // key_heads, 1)
    key, value = (x.reshape(n * key_heads, context + longest, -1) for x in (key, value))
    if scores.cap is None:
        products = torch.baddbmm(bias, query, key.transpose(1, 2))
    else:
        products = torch.bmm(query, key.transpose(1, 2)).div(scores.cap).tanh().mul(scores.cap) + bias
    if scores.sinks is not None:
        sinks = scores.sinks.to(products.dtype).view(1, key_heads, -1, 1).expand(n, -1, -1, longest)
        products = torch.cat([products, sinks.reshape(n * key_heads, -1, 1)], dim=-1)
    weights = products.softmax(-1)[..., : context + longest].to(value.dtype)
    return torch.bmm(weights, value).view(n, heads, longest, -1)


def causal_mask(queries: int, context: int, window: int | None, device: torch.device) -> torch.Tensor:
    """(queries, context + queries) bool, True where a token may look: at the context, at itself and before itself. With
    a window these are the nearest `window` tokens, itself among them.
    """
    mask = torch.ones(queries, context + queries, dtype=torch.bool, device=device).tril(context)
    return mask if window is None else mask.triu(context - window + 1)


def padded(x: torch.Tensor, run: list[Sequence]) -> torch.Tensor:
    """(heads, sum of lengths, d) -> (n, heads, longest, d) with zeros on the right. Equal lengths need no copy."""
    longest = max(s.length for s in run)
    if all(s.length == longest for s in run):
        return x.unflatten(1, (len(run), -1)).transpose(0, 1)
    out = x.new_zeros(len(run), longest, x.shape[0], x.shape[2])
    out[real_tokens(run, x.device)] = x.transpose(0, 1)
    return out.transpose(1, 2)


def unpadded(x: torch.Tensor, run: list[Sequence]) -> torch.Tensor:
    """(n, heads, longest, d) -> (sum of lengths, heads, d): undo padded()."""
    x = x.transpose(1, 2)
    return x.flatten(0, 1) if len({s.length for s in run}) == 1 else x[real_tokens(run, x.device)]


def real_tokens(run: list[Sequence], device: torch.device) -> torch.Tensor:
    """(n, longest) bool, True on tokens and False on padding."""
    lengths = torch.tensor([s.length for s in run], device=device)
    return torch.arange(int(lengths.max()), device=device)[None] < lengths[:, None]


def similar_lengths(sequences: list[Sequence], max_padding: float = 0.15) -> list[list[Sequence]]:
    """Cut a list of sequences into runs, whose padding to the longest adds at most this share of their tokens.

    Responses to a shared prompt may be padded by PADDING_PER_CALL tokens more, which is less work than another call.
    """
    runs: list[list[Sequence]] = []
    allowed = PADDING_PER_CALL if sequences[0].context else 0
    for sequence in sequences:
        run = [*runs[-1], sequence] if runs else []
        tokens = sum(s.length for s in run)
        if runs and max(s.length for s in run) * len(run) <= (1 + max_padding) * tokens + allowed:
            runs[-1] = run
        else:
            runs.append([sequence])
    return runs
