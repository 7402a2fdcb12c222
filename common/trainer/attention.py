"""Attention inside a packed row: a token sees itself, earlier tokens of its sequence, and the sequence's context.

A packed row is a list of groups (P, [R_1 ... R_n]): a prompt of P tokens, then n responses to it. Response i attends
to the prompt and to its own earlier tokens, so the model computes the prompt once for all n responses (batching.py has
a picture). A group with a single response is one ordinary sequence of P + R tokens. If all prompts begin with the same
tokens, such as a system prompt, these may stand once at the start of the row. Then P counts the rest of a prompt.

The *context* is what a sequence continues: earlier parts of the row. On a GPU, one variable-length kernel computes the
whole row, for layers that it supports. Otherwise it is computed by *runs*: adjacent sequences of similar length, with
the same context or none. A run is padded to its longest sequence and computed in one call. The groups (40, [5, 6]) and
(33, [9]) make four sequences and three runs:

    tokens       run             a token sees, up to and including itself
     0 ... 39    [40]             0 ... 39
    40 ... 44    [5, 6]           0 ... 39 and 40 ... 44
    45 ... 50    the same         0 ... 39 and 45 ... 50
    51 ... 92    [42]            51 ... 92

Both ways copy a context's keys and values for each sequence. Autograd adds up the gradients of the copies.
"""

import bisect
import inspect
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch.nn.attention.varlen import varlen_attn

from common.errors import BadInput

Group = tuple[int, list[int]]  # length of a prompt, and lengths of the responses to it
Context = tuple[tuple[int, int], ...]  # (start, length) of each part of a row that a sequence continues
MAX_PADDING = 0.15  # most padding tokens in a run, divided by its real tokens
EXTRA_PADDING = 256  # padding tokens that a run with a context may have on top of that; another call would cost more
KERNEL_MAX_WIDTH = 256  # of a head; FlashAttention, which is behind varlen_attn, refuses wider ones
TAKES_GQA = "enable_gqa" in inspect.signature(varlen_attn).parameters  # torch 2.11 takes fewer key heads unasked
WRITTEN_OUT_MAX_KEYS = 512  # on a CPU, with at most these keys (the context's included) weights in memory are faster


class NotPackable(BadInput):
    """This family's attention needs what packed rows can't give. choose_forward() finds out before the first step."""


class ScoreOptions(NamedTuple):
    """How a layer gets from query key^T to attention weights. transformers passes what the model family needs."""

    scale: float | None = None  # multiplier of query key^T; None is 1 / sqrt(width of a query)
    window: int | None = None  # a token sees itself and the window - 1 tokens before it (Mistral, Gemma)
    cap: float | None = None  # scores become cap tanh(score / cap) (Gemma 2)
    sinks: torch.Tensor | None = None  # (heads,) score of one more key, whose value is 0 (gpt-oss)

    @property
    def written_out(self) -> bool:
        """Whether the attention weights must be held in memory: varlen_attn and SDPA support neither caps nor sinks."""
        return self.cap is not None or self.sinks is not None


@dataclass
class Run:
    """Adjacent sequences of a packed row. Each attends causally to itself, and to all tokens of its context that are
    within the layer's window.
    """

    start: int  # position in the row of the run's first token
    lengths: list[int]  # length of each sequence
    context: Context = ()  # what each of them continues: what all prompts begin with, then the rest of a shared prompt
    _places: torch.Tensor | None = field(default=None, repr=False, compare=False)

    @property
    def context_length(self) -> int:
        return sum(length for _, length in self.context)

    def places(self, device: torch.device) -> torch.Tensor:
        """(tokens of the run,) the place of each one among n sequences that are padded to the longest.

        Made once for all layers, because a GPU would wait for the list each time.
        """
        if self._places is None:
            longest = max(self.lengths)
            places = [n * longest + i for n, length in enumerate(self.lengths) for i in range(length)]
            self._places = torch.tensor(places, device=device)
        return self._places


class Spans:
    """The layout of a packed row of S sequences, those in contexts included: which tokens attend to which.

    All layers use it. It is an argument of the model's forward, which transformers hands down to them.

    Not a dataclass: FSDP takes those apart to cast the tensors in them, and would copy all runs before each layer.
    """

    def __init__(
        self,
        runs: list[Run],
        query_offsets: torch.Tensor | None = None,
        key_offsets: torch.Tensor | None = None,
        key_positions: torch.Tensor | None = None,
        longest: tuple[int, int] = (0, 0),
    ):
        self.runs = runs
        # The rest is for the variable-length kernel.
        self.query_offsets = query_offsets  # (S + 1,) int32: where each sequence's queries begin, and the total
        self.key_offsets = key_offsets  # (S + 1,) int32: the same of keys, those of a context before a sequence's own
        self.key_positions = key_positions  # positions of these keys in the row; None: every token once, in order
        self.longest = longest  # most queries and most keys of one sequence

    def to_owner(self, values: torch.Tensor) -> torch.Tensor:
        """Log-probs (R,) of this rank's response tokens -> (R,) on the rank that computes the loss of the row.

        Here, with the whole row on one rank, they are there already. sequence_parallel.SlicedSpans sends them.
        """
        return values


def spans(groups: list[Group], device: torch.device, beginning: int = 0) -> Spans:
    """The layout of the packed row in which these groups follow one another.

    beginning: length of what stands first in the row and is continued by all prompts.
    """
    runs: list[Run] = []
    common: Context = ((0, beginning),) if beginning else ()
    if beginning:
        add_sequence(runs, Run(0, [beginning]))
    start = beginning
    for prompt, responses in groups:
        if len(responses) == 1:  # nothing to share: prompt and response are one ordinary sequence
            add_sequence(runs, Run(start, [prompt + responses[0]], common))
            start += prompt + responses[0]
            continue
        add_sequence(runs, Run(start, [prompt], common))
        with_prompt: Context = (*common, (start, prompt))
        start += prompt
        for length in responses:
            add_sequence(runs, Run(start, [length], with_prompt))
            start += length
    return Spans(runs) if device.type != "cuda" else kernel_spans(runs, device)


def add_sequence(runs: list[Run], sequence: Run) -> None:
    """Append a run of one sequence, or merge it into the last run if the context is the same and the padding pays."""
    if runs:
        last = runs[-1]
        lengths = last.lengths + sequence.lengths
        allowed = (1 + MAX_PADDING) * sum(lengths)
        if last.context:
            # Each such call copies the context's keys and values, too, so avoiding a call saves more.
            allowed += EXTRA_PADDING
        if last.context == sequence.context and max(lengths) * len(lengths) <= allowed:
            last.lengths = lengths
            return
    runs.append(sequence)


def kernel_spans(runs: list[Run], device: torch.device) -> Spans:
    """The layout as the variable-length kernel expects it: a copy of a context's keys before each sequence's own."""
    query_lengths: list[int] = []
    key_lengths: list[int] = []
    positions: list[int] = []
    for run in runs:
        start = run.start
        for length in run.lengths:
            query_lengths.append(length)
            key_lengths.append(run.context_length + length)
            for part_start, part in run.context:
                positions += range(part_start, part_start + part)
            positions += range(start, start + length)
            start += length
    return Spans(
        runs,
        query_offsets=torch.tensor([0, *accumulate(query_lengths)], dtype=torch.int32).to(device),
        key_offsets=torch.tensor([0, *accumulate(key_lengths)], dtype=torch.int32).to(device),
        key_positions=torch.tensor(positions).to(device) if any(run.context for run in runs) else None,
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

    query (1, heads, L, d), key (1, key heads, L, d), value (1, key heads, L, v) -> (1, L, heads, v), for a row of L
    tokens. Grouped-query attention has fewer key heads than heads. Raises NotPackable for a family that makes its own
    attention mask or doesn't hand the spans down to its layers.
    """
    if attention_mask is not None:
        raise NotPackable(f"a mask that {module.config.model_type} models make themselves")
    if spans is None:
        raise NotPackable(f"layers of {module.config.model_type} models, which do not get the layout of a packed row")
    options = ScoreOptions(scaling, sliding_window, softcap, s_aux)
    row = (query.squeeze(0), key.squeeze(0), value.squeeze(0))
    if query.is_cuda and kernel_fits(query, value, options):
        out = variable_length_attention(*row, spans, options)
    else:
        out = padded_attention(*row, spans.runs, options)
    return out[None], None  # transformers expects the output and, if somebody asked for them, attention weights


def kernel_fits(query: torch.Tensor, value: torch.Tensor, options: ScoreOptions) -> bool:
    """Whether the variable-length kernel of a GPU can compute a layer. Otherwise padded_attention() does."""
    width = query.shape[-1]
    if width != value.shape[-1]:  # DeepSeek
        return False
    if width > KERNEL_MAX_WIDTH or width % 8 != 0:  # Gemma 4's layers without a window have 512
        return False
    return query.dtype != torch.float32 and not options.written_out


def variable_length_attention(query, key, value, spans: Spans, options: ScoreOptions) -> torch.Tensor:
    """(heads, L, d) -> (L, heads, d) in one kernel on a GPU."""
    query, key, value = (x.transpose(0, 1) for x in (query, key, value))  # (L, heads, d)
    # Copy a context's keys and values before those of each sequence that continues it.
    if spans.key_positions is not None:
        key = copies(key, spans.key_positions)
        value = copies(value, spans.key_positions)
    tokens_before = -1 if options.window is None else options.window - 1  # -1: all
    tokens_after = 0  # causal
    # The kernel aligns the last query with the last key, so a sequence's first query sees all keys of its context.
    return varlen_attn(
        query,
        key,
        value,
        spans.query_offsets,
        spans.key_offsets,
        *spans.longest,
        scale=options.scale,
        window_size=(tokens_before, tokens_after),
        **({"enable_gqa": query.shape[1] != key.shape[1]} if TAKES_GQA else {}),
    )


def copies(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """(L, heads, d) -> the tokens at these positions. In the backward, gradients of copies add up in float32."""
    return wide(x).index_select(0, positions).to(x.dtype)


def padded_attention(query, key, value, runs: list[Run], options: ScoreOptions) -> torch.Tensor:
    """(heads, L, d) -> (L, heads, v), one padded call for each run."""
    # Split the row once. A slice for each run would be slow: each slice's backward makes a gradient of the whole row.
    sizes = [sum(run.lengths) for run in runs]
    keys, values = key.split(sizes, 1), value.split(sizes, 1)
    starts = [run.start for run in runs]
    parts = {}  # (start, length) -> keys and values of this part of the row, for all runs that continue it
    outputs = []
    for run, q, k, v in zip(runs, query.split(sizes, 1), keys, values):
        for start, length in run.context:
            if (start, length) not in parts:
                number = bisect.bisect_right(starts, start) - 1  # of the run that has it
                first = start - starts[number]
                parts[start, length] = [wide(x[number][:, first : first + length]) for x in (keys, values)]
        k = after_context([parts[part][0] for part in run.context], padded(k, run))
        v = after_context([parts[part][1] for part in run.context], padded(v, run))
        outputs.append(unpadded(causal_attention(padded(q, run), k, v, run.context_length, options), run))
    return torch.cat(outputs)


def wide(x: torch.Tensor) -> torch.Tensor:
    """In float32 or wider. If copies are made of it, their gradients add up without losing digits."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def after_context(context: list[torch.Tensor], own: torch.Tensor) -> torch.Tensor:
    """The keys or values of a context before those of each of n sequences.

    context: (key heads, length, d) for each of its parts, which may be wide(). own: (n, key heads, longest, d).
    """
    if not context:
        return own
    copies_of_parts = (part.expand(len(own), -1, -1, -1).to(own.dtype) for part in context)
    return torch.cat([*copies_of_parts, own], dim=2)


def causal_attention(query, key, value, before: int, options: ScoreOptions) -> torch.Tensor:
    """Attention of n sequences, each after `before` tokens of a context: queries (n, heads, longest, d), keys and
    values (n, key heads, before + longest, d or v) -> (n, heads, longest, v).

    Padding is on the right, where the causal mask hides it: no token sees a later one. What padding sees is discarded.
    """
    if options.written_out or (not query.is_cuda and key.shape[2] <= WRITTEN_OUT_MAX_KEYS):
        return written_out_attention(query, key, value, before, options)
    # SDPA's is_causal aligns the first query with the first key, which is wrong after a context.
    mask = None
    if before or options.window is not None:
        mask = causal_mask(query.shape[2], before, options.window, query.device)
    gqa = query.shape[1] != key.shape[1]
    return F.scaled_dot_product_attention(
        query, key, value, mask, is_causal=mask is None, scale=options.scale, enable_gqa=gqa
    )


def written_out_attention(query, key, value, before: int, options: ScoreOptions) -> torch.Tensor:
    """softmax(scale query key^T + causal mask) value, with the weights in memory. Shapes as in causal_attention.

    For short sequences on a CPU it is 1.6 times as fast as the fused kernel, forward and backward together. On a GPU
    only layers with caps or sinks come here.
    """
    n, heads, longest, width = query.shape
    key_heads = key.shape[1]
    # With a cap or sinks vLLM computes in float32. In bfloat16 our log-probs would be far from those it sampled with.
    if options.written_out:
        query, key = wide(query), wide(key)
    # Query heads that share a key head are stacked as rows of one product: (n key_heads, heads / key_heads longest, d).
    query = (query * (options.scale or width**-0.5)).reshape(n * key_heads, -1, width)
    key = key.flatten(0, 1)
    value = value.flatten(0, 1)
    # Adding -inf before the softmax makes the weight of a hidden key exactly 0.
    bias = torch.zeros(longest, before + longest, dtype=query.dtype, device=query.device)
    bias.masked_fill_(~causal_mask(longest, before, options.window, query.device), -torch.inf)
    bias = bias.repeat(heads // key_heads, 1)
    if options.cap is None:
        products = torch.baddbmm(bias, query, key.transpose(1, 2))
    else:
        products = torch.bmm(query, key.transpose(1, 2)).div(options.cap).tanh().mul(options.cap) + bias
    # A sink takes a share of the softmax and adds nothing to the result: its column is cut off after the softmax.
    if options.sinks is not None:
        sinks = options.sinks.to(products.dtype).view(1, key_heads, -1, 1).expand(n, -1, -1, longest)
        products = torch.cat([products, sinks.reshape(n * key_heads, -1, 1)], dim=-1)
    weights = products.softmax(-1)[..., : before + longest].to(value.dtype)
    return torch.bmm(weights, value).view(n, heads, longest, -1)


def causal_mask(queries: int, before: int, window: int | None, device: torch.device) -> torch.Tensor:
    """(queries, before + queries) bool, True where a query may see a key: the context, earlier tokens, itself. With a
    window only the nearest `window` of these, itself included.
    """
    # Query i is token before + i of the keys.
    mask = torch.ones(queries, before + queries, dtype=torch.bool, device=device).tril(before)
    return mask if window is None else mask.triu(before - window + 1)


def padded(x: torch.Tensor, run: Run) -> torch.Tensor:
    """(heads, tokens of the run, d) -> (n, heads, longest, d) with zeros on the right."""
    if len(set(run.lengths)) == 1:  # equal lengths need no copy
        return x.unflatten(1, (len(run.lengths), -1)).transpose(0, 1)
    n, longest = len(run.lengths), max(run.lengths)
    out = x.new_zeros(x.shape[0], n * longest, x.shape[2]).index_copy(1, run.places(x.device), x)
    return out.unflatten(1, (n, longest)).transpose(0, 1)


def unpadded(x: torch.Tensor, run: Run) -> torch.Tensor:
    """(n, heads, longest, d) -> (tokens of the run, heads, d): undo padded()."""
    x = x.transpose(1, 2).flatten(0, 1)  # (n longest, heads, d)
    if len(set(run.lengths)) == 1:
        return x
    return x.index_select(0, run.places(x.device))
