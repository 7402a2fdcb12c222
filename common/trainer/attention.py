"""Attention inside a packed row: a token sees earlier tokens of its own sequence and of its shared prompt, no others.

A packed row is a list of groups (P, [L_1 ... L_n]): a prompt of P tokens, then n responses to it. Response i attends
to the prompt and to its own earlier tokens, so the prompt is computed once for all n responses (batching.py has a
picture). A group with a single response is one ordinary sequence of P + L tokens.

There are two ways to compute it. One variable-length kernel computes the whole row, on a GPU and for layers that the
kernel supports. Otherwise, adjacent sequences of similar length that have the same shared prompt, or none, are a run.
They are padded to the longest of them and computed in one call. The groups (40, [5, 6]) and (33, [9]) make three runs:

    tokens           0 ... 39    40 ... 44   45 ... 50     51 ... 92
    run, by lengths  [40]        [5,         6]            [42]
    a token sees     0 ... 39    0 ... 44    0 ... 39 and  51 ... 92     up to and including itself
                                             45 ... 50

Both ways copy a shared prompt's keys and values for each response. Autograd adds up the gradients of the copies.
"""

from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch.nn.attention.varlen import varlen_attn

from common.errors import BadInput

Group = tuple[int, list[int]]  # length of a prompt, and lengths of the responses to it
MAX_PADDING = 0.15  # largest share of padding in a run, relative to its real tokens
PADDING_PER_CALL = 256  # more padding tokens that a run of responses may have, because they cost less than another call
WRITTEN_OUT_MAX_KEYS = 512  # with more keys, the prompt's included, explicit weights take too much memory


class Scores(NamedTuple):
    """How a layer gets from query key^T to weights. transformers passes what its family needs."""

    scale: float | None = None  # multiplier of query key^T; None is 1 / sqrt(width of a query)
    window: int | None = None  # a token sees itself and the window - 1 tokens before it (Mistral, Gemma)
    cap: float | None = None  # scores become cap tanh(score / cap) (Gemma 2)
    sinks: torch.Tensor | None = None  # (heads,) score of one more key, whose value is 0 (gpt-oss)

    @property
    def need_weights(self) -> bool:
        """Whether the weights must be computed explicitly, because fused kernels support neither caps nor sinks."""
        return self.cap is not None or self.sinks is not None


@dataclass
class Run:
    """Adjacent sequences of a packed row. Each attends causally to itself and, if it answers a shared prompt, to all
    tokens of that prompt that are within the layer's window.
    """

    start: int  # position of the first token in the row
    lengths: list[int]  # length of each sequence
    prompt_start: int = 0  # position of the shared prompt in the row
    prompt_length: int = 0  # tokens of the shared prompt; 0 without one


@dataclass
class Spans:
    """The layout of a packed row of S sequences: which tokens attend to which. All layers share it."""

    runs: list[Run]
    # The rest is for the variable-length kernel.
    query_ends: torch.Tensor | None = None  # (S + 1,) int32, offsets: cumulative number of queries
    key_ends: torch.Tensor | None = None  # (S + 1,) int32, the same of keys; a shared prompt counts for each response
    key_places: torch.Tensor | None = None  # positions of these keys in the row; None: every token once, in order
    longest: tuple[int, int] = (0, 0)  # most queries and most keys of one sequence

    def to_owner(self, values: torch.Tensor) -> torch.Tensor:
        """Move results (R,) to the rank that trains on them. Does nothing here; slices of a row override it."""
        return values


def spans(groups: list[Group], device: torch.device) -> Spans:
    """The layout of the packed row in which these groups follow one another."""
    runs: list[Run] = []
    start = 0
    for prompt, responses in groups:
        if len(responses) == 1:  # nothing to share: prompt and response are one ordinary sequence
            add_sequence(runs, Run(start, [prompt + responses[0]]))
        else:
            add_sequence(runs, Run(start, [prompt]))
            for before, length in zip(accumulate(responses, initial=prompt), responses):
                add_sequence(runs, Run(start + before, [length], prompt_start=start, prompt_length=prompt))
        start += prompt + sum(responses)
    return Spans(runs) if device.type != "cuda" else kernel_spans(runs, device)


def add_sequence(runs: list[Run], sequence: Run) -> None:
    """Merge a run of one sequence into the last run, unless the prompt differs or the padding would cost too much."""
    if runs:
        last = runs[-1]
        lengths = last.lengths + sequence.lengths
        allowed = (1 + MAX_PADDING) * sum(lengths)
        if last.prompt_length:
            # A call for a response has the prompt's keys and values to handle too, so saving one is worth more.
            allowed += PADDING_PER_CALL
        same_prompt = (last.prompt_start, last.prompt_length) == (sequence.prompt_start, sequence.prompt_length)
        if same_prompt and max(lengths) * len(lengths) <= allowed:
            last.lengths = lengths
            return
    runs.append(sequence)


def kernel_spans(runs: list[Run], device: torch.device) -> Spans:
    """The runs as the variable-length kernel takes them. The keys of a shared prompt come before each response."""
    query_lengths: list[int] = []
    key_lengths: list[int] = []
    places: list[int] = []
    for run in runs:
        start = run.start
        for length in run.lengths:
            query_lengths.append(length)
            key_lengths.append(run.prompt_length + length)
            places += range(run.prompt_start, run.prompt_start + run.prompt_length)
            places += range(start, start + length)
            start += length
    return Spans(
        runs,
        query_ends=torch.tensor([0, *accumulate(query_lengths)], dtype=torch.int32).to(device),
        key_ends=torch.tensor([0, *accumulate(key_lengths)], dtype=torch.int32).to(device),
        key_places=torch.tensor(places).to(device) if any(run.prompt_length for run in runs) else None,
        longest=(max(query_lengths), max(key_lengths)),
    )


def packed_attention(
    module,
    query,
    key,
    value,
    attention_mask,
    *,
    spans: Spans | None = None,
    scaling=None,
    sliding_window=None,
    softcap=None,
    s_aux=None,
    **_,
):
    """Causal attention inside each sequence of a packed row. transformers calls it in every layer.

    query (1, heads, L, d), key (1, key heads, L, d), value (1, key heads, L, v) -> (1, L, heads, v). Grouped-query
    attention has fewer key heads than heads. Raises BadInput for a family that makes its own attention mask.
    """
    if attention_mask is not None or spans is None:
        raise BadInput(f"{module.config.model_type} models are not supported, because of a mask of their own")
    scores = Scores(scaling, sliding_window, softcap, s_aux)
    row = (query.squeeze(0), key.squeeze(0), value.squeeze(0))
    # The kernel supports neither float32 nor values whose width differs from the keys' (DeepSeek).
    kernel_fits = query.shape[-1] == value.shape[-1] and not scores.need_weights
    if query.is_cuda and query.dtype != torch.float32 and kernel_fits:
        out = variable_length_attention(*row, spans, scores)
    else:
        out = padded_attention(*row, spans.runs, scores)
    return out[None], None


def variable_length_attention(query, key, value, spans: Spans, scores: Scores) -> torch.Tensor:
    """(heads, L, d) -> (L, heads, d) in one kernel on a GPU."""
    query, key, value = (x.transpose(0, 1) for x in (query, key, value))  # (L, heads, d)
    # Copy a shared prompt's keys and values before those of each response to it.
    if spans.key_places is not None:
        key = key.index_select(0, spans.key_places)
        value = value.index_select(0, spans.key_places)
    tokens_before = -1 if scores.window is None else scores.window - 1  # -1: all
    # The kernel aligns the last query with the last key, so each response also sees the prompt's keys before it.
    return varlen_attn(
        query,
        key,
        value,
        spans.query_ends,
        spans.key_ends,
        *spans.longest,
        scale=scores.scale,
        window_size=(tokens_before, 0),
        enable_gqa=query.shape[1] != key.shape[1],
    )


def padded_attention(query, key, value, runs: list[Run], scores: Scores) -> torch.Tensor:
    """(heads, L, d) -> (L, heads, v), one padded call for each run."""
    # Split the row once. The backward of a slice fills a gradient of the whole row, so a slice for each run is slow.
    sizes = [sum(run.lengths) for run in runs]
    outputs = []
    for run, q, k, v in zip(runs, query.split(sizes, 1), key.split(sizes, 1), value.split(sizes, 1)):
        if run.prompt_length == 0:
            outputs.append(attend_alone(q, k, v, run, scores))
            # Keep these keys and values: this run's last sequence may be the prompt of the responses that follow.
            kept_start, prompt_keys, prompt_values = run.start, k, v
        else:
            first = run.prompt_start - kept_start
            last = first + run.prompt_length
            shared = (prompt_keys[:, first:last], prompt_values[:, first:last])
            outputs.append(attend_after_prompt(q, k, v, run, scores, shared))
    return torch.cat(outputs)


def attend_alone(q, k, v, run: Run, scores: Scores) -> torch.Tensor:
    """Sequences that see only themselves. (heads, tokens of the run, d) -> (tokens of the run, heads, v)."""
    return unpadded(causal_attention(padded(q, run), padded(k, run), padded(v, run), 0, scores), run)


def attend_after_prompt(q, k, v, run: Run, scores: Scores, shared: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Responses that also see a shared prompt, whose keys and values (key heads, P, d) come before those of each."""
    prompt_keys, prompt_values = (x.expand(len(run.lengths), -1, -1, -1) for x in shared)
    keys = torch.cat([prompt_keys, padded(k, run)], dim=2)  # (n, key heads, P + longest, d)
    values = torch.cat([prompt_values, padded(v, run)], dim=2)
    return unpadded(causal_attention(padded(q, run), keys, values, run.prompt_length, scores), run)


def causal_attention(query, key, value, prompt: int, scores: Scores) -> torch.Tensor:
    """Attention of n sequences, each after `prompt` tokens of a prompt: queries (n, heads, longest, d), keys and values
    (n, key heads, prompt + longest, d or v) -> (n, heads, longest, v).

    Padding is on the right, where the causal mask already hides it: no token sees a later one.
    """
    if scores.need_weights or key.shape[2] <= WRITTEN_OUT_MAX_KEYS:
        return written_out_attention(query, key, value, prompt, scores)
    mask = None
    if prompt or scores.window:
        mask = causal_mask(query.shape[2], prompt, scores.window, query.device)
    gqa = query.shape[1] != key.shape[1]
    return F.scaled_dot_product_attention(
        query, key, value, mask, is_causal=mask is None, scale=scores.scale, enable_gqa=gqa
    )


def written_out_attention(query, key, value, prompt: int, scores: Scores) -> torch.Tensor:
    """softmax(scale query key^T + causal mask) value, with the weights in memory. Shapes as in causal_attention.

    For short sequences on a CPU it is 1.6 times as fast as the fused kernel, forward and backward together.
    """
    n, heads, longest, width = query.shape
    key_heads = key.shape[1]
    if scores.need_weights:  # vLLM computes these scores in float32, and rounding to bfloat16 would be far off
        wide = torch.promote_types(query.dtype, torch.float32)
        query, key = query.to(wide), key.to(wide)
    # The heads / key_heads query heads that share a key head become rows of one product.
    query = (query * (scores.scale or width**-0.5)).reshape(n * key_heads, -1, width)
    key = key.flatten(0, 1)
    value = value.flatten(0, 1)
    # Adding -inf before the softmax makes the weight of a hidden key exactly 0.
    bias = torch.zeros(longest, prompt + longest, dtype=query.dtype, device=query.device)
    bias.masked_fill_(~causal_mask(longest, prompt, scores.window, query.device), -torch.inf)
    bias = bias.repeat(heads // key_heads, 1)
    if scores.cap is None:
        products = torch.baddbmm(bias, query, key.transpose(1, 2))
    else:
        products = torch.bmm(query, key.transpose(1, 2)).div(scores.cap).tanh().mul(scores.cap) + bias
    # A sink takes a share of the softmax and adds nothing to the result.
    if scores.sinks is not None:
        sinks = scores.sinks.to(products.dtype).view(1, key_heads, -1, 1).expand(n, -1, -1, longest)
        products = torch.cat([products, sinks.reshape(n * key_heads, -1, 1)], dim=-1)
    weights = products.softmax(-1)[..., : prompt + longest].to(value.dtype)
    return torch.bmm(weights, value).view(n, heads, longest, -1)


def causal_mask(queries: int, prompt: int, window: int | None, device: torch.device) -> torch.Tensor:
    """(queries, prompt + queries) bool, True where a token may look: at the prompt, at itself and before itself. With
    a window these are the nearest `window` tokens, itself among them.
    """
    mask = torch.ones(queries, prompt + queries, dtype=torch.bool, device=device).tril(prompt)
    return mask if window is None else mask.triu(prompt - window + 1)


def padded(x: torch.Tensor, run: Run) -> torch.Tensor:
    """(heads, tokens of the run, d) -> (n, heads, longest, d) with zeros on the right."""
    if len(set(run.lengths)) == 1:  # equal lengths need no copy
        return x.unflatten(1, (len(run.lengths), -1)).transpose(0, 1)
    real = real_tokens(run, x.device)
    out = x.new_zeros(*real.shape, x.shape[0], x.shape[2])
    out[real] = x.transpose(0, 1)
    return out.transpose(1, 2)


def unpadded(x: torch.Tensor, run: Run) -> torch.Tensor:
    """(n, heads, longest, d) -> (tokens of the run, heads, d): undo padded()."""
    x = x.transpose(1, 2)
    if len(set(run.lengths)) == 1:
        return x.flatten(0, 1)
    return x[real_tokens(run, x.device)]


def real_tokens(run: Run, device: torch.device) -> torch.Tensor:
    """(n, longest) bool, True on tokens and False on padding."""
    lengths = torch.tensor(run.lengths, device=device)
    return torch.arange(max(run.lengths), device=device)[None] < lengths[:, None]
