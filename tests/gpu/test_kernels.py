"""Attention and the logit head against dense references in float64, on a CPU and, with its own kernels, on a GPU."""

import functools
import statistics
import time
from dataclasses import dataclass
from unittest import mock

import pytest
import torch
from torch._dynamo.utils import counters

from common.trainer import attention, logits

CUDA = torch.cuda.is_available()
needs_gpu = pytest.mark.skipif(not CUDA, reason="no GPU")
CPU_FLOAT32 = pytest.param("cpu", torch.float32, id="cpu-float32")
CPU_BFLOAT16 = pytest.param("cpu", torch.bfloat16, id="cpu-bfloat16")
ON_GPU = [pytest.param("cuda", dtype, id=f"cuda-{dtype}", marks=needs_gpu) for dtype in (torch.bfloat16, torch.float32)]
GROUPS = [(70, [40, 1, 33, 7]), (33, [12]), (64, [50] * 16), (5, [1])]  # a prompt's tokens, and its responses'


@dataclass(frozen=True)
class Layer:
    """What one attention layer has."""

    heads: int
    keys: int  # heads of keys and values
    width: int  # of a head
    window: int | None = None
    cap: float | None = None
    sinks: bool = False
    scores: float = 1.0  # their size; one of 20 that is rounded to bfloat16 changes a weight by up to 6 %


LAYERS = {
    "plain": Layer(14, 2, 64),
    "heads of 128": Layer(8, 8, 128),
    "heads of 512": Layer(2, 1, 512),
    "window": Layer(8, 2, 64, window=48),
    "window of 2": Layer(8, 2, 64, window=2),
    "cap": Layer(8, 2, 64, window=48, cap=50.0, scores=8.0),
    "sinks": Layer(8, 2, 64, window=48, sinks=True, scores=8.0),
}
WRITTEN_OUT = ("cap", "sinks")
BEGINNINGS = [0, 30]  # tokens that stand first in the row and that all prompts continue


def inputs(groups: list[attention.Group], layer: Layer, beginning: int) -> tuple[list[torch.Tensor], torch.Tensor]:
    """([queries, keys, values, sinks or nothing], gradient of the output), float32 numbers that bfloat16 has, too."""
    tokens = beginning + sum(prompt + sum(responses) for prompt, responses in groups)
    generator = torch.Generator().manual_seed(0)
    random = lambda *shape: torch.randn(shape, generator=generator).to(torch.bfloat16).float()
    qkv = [random(1, heads, tokens, layer.width) for heads in (layer.heads, layer.keys, layer.keys)]
    qkv[0] *= layer.scores
    sinks = [layer.scores * (2 + random(layer.heads))] if layer.sinks else []
    return qkv + sinks, random(1, tokens, layer.heads, layer.width)


def dense(query, key, value, layer: Layer, sinks=None) -> torch.Tensor:
    """Causal attention of one sequence: (tokens, heads, d) -> the same. The last query and key are of one token."""
    q, k, v = (x.transpose(0, 1) for x in (query, key, value))  # (heads, tokens, d)
    k, v = (x.repeat_interleave(layer.heads // layer.keys, 0) for x in (k, v))
    tokens = k.shape[1]
    # How far a key lies before a query.
    distance = torch.arange(tokens - q.shape[1], tokens)[:, None] - torch.arange(tokens)
    scores = q @ k.transpose(1, 2) * layer.width**-0.5
    if layer.cap:
        scores = layer.cap * (scores / layer.cap).tanh()
    scores = scores.masked_fill((distance < 0) | (distance >= (layer.window or tokens)), -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks.view(-1, 1, 1).expand(-1, len(query), 1)], dim=2)
    return (scores.softmax(2)[:, :, :tokens] @ v).transpose(0, 1)


def one_after_the_other(query, key, value, layer: Layer, sinks=None, beginning=0) -> torch.Tensor:
    """(1, heads, T, d) -> (1, T, heads, d), each response alone behind its prompt, the beginning included."""
    query, key, value = (x[0].transpose(0, 1) for x in (query, key, value))
    first = list(range(beginning))
    outputs, start = [dense(query[first], key[first], value[first], layer, sinks)] if beginning else [], beginning
    for prompt, responses in GROUPS:
        before = list(range(start, start + prompt))
        start += prompt
        for place, length in enumerate(responses):
            answer = list(range(start, start + length))
            queries = answer if place else before + answer  # a prompt's own output is computed once
            keys = first + before + answer
            outputs.append(dense(query[queries], key[keys], value[keys], layer, sinks))
            start += length
    return torch.cat(outputs)[None]


def packed(query, key, value, layer: Layer, sinks=None, groups=GROUPS, beginning=0) -> torch.Tensor:
    """The same as the trainer computes it."""
    out, _ = attention.packed_attention(
        None,
        query,
        key,
        value,
        None,
        scaling=layer.width**-0.5,
        spans=attention.spans(groups, query.device, beginning),
        sliding_window=layer.window,
        softcap=layer.cap,
        s_aux=sinks,
    )
    return out


def with_gradients(
    attend, layer: Layer, device: str, dtype: torch.dtype, groups=GROUPS, beginning: int = 0
) -> list[torch.Tensor]:
    """The output of attend(), and the gradients of all inputs."""
    tensors, gradient = inputs(groups, layer, beginning)
    tensors = [x.to(device, dtype).requires_grad_() for x in tensors]
    out = attend(*tensors[:3], layer, *tensors[3:], beginning=beginning)
    out.backward(gradient.to(device, dtype))
    return [out.detach(), *(x.grad for x in tensors)]


def relative(value: torch.Tensor, reference: torch.Tensor) -> float:
    return ((value.double() - reference.double()).norm() / reference.double().norm()).item()


@pytest.mark.parametrize("beginning", BEGINNINGS)
@pytest.mark.parametrize("device, dtype", [CPU_FLOAT32, CPU_BFLOAT16, *ON_GPU])
@pytest.mark.parametrize("name", LAYERS)
def test_a_packed_row_attends_as_each_sequence_does_alone(name, device, dtype, beginning, record_property):
    """Scores that are capped or share with sinks are float32 in bfloat16 layers, too, as vLLM's are."""
    layer = LAYERS[name]
    ours = with_gradients(packed, layer, device, dtype, beginning=beginning)
    exact = with_gradients(one_after_the_other, layer, "cpu", torch.float64, beginning=beginning)
    output, *gradients = [relative(one.cpu(), two) for one, two in zip(ours, exact)]
    record_property("measured", f"output {output:.1e}, gradients {max(gradients):.1e}")
    bound = 1e-5 if dtype == torch.float32 else 5e-3 if name in WRITTEN_OUT else 1e-2
    assert output <= bound and max(gradients[:3]) <= 2 * bound
    assert max(gradients) <= 5 * bound, "a sink's gradient adds up all queries"


def test_gradients_of_a_beginning_add_up_in_float32():
    """Each of many prompts has a part in them. Bfloat16 would lose the small ones."""
    layer = LAYERS["cap"]  # it has no kernel on a GPU either
    groups = [(4, [3, 2])] * 128
    compute = functools.partial(with_gradients, layer=layer, device="cpu", groups=groups, beginning=30)
    attend = functools.partial(packed, groups=groups)
    rounded, exact = (compute(attend, dtype=dtype) for dtype in (torch.bfloat16, torch.float64))
    for gradient, expected in zip(rounded[2:4], exact[2:4]):  # of keys and values, (1, heads, tokens, d)
        assert relative(gradient[:, :, :30], expected[:, :, :30]) < 5e-3


@pytest.mark.parametrize("beginning", BEGINNINGS)
@pytest.mark.parametrize("takes_gqa", [True, False], ids=["torch 2.13", "torch 2.11"])
@pytest.mark.parametrize("name", [name for name in LAYERS if name not in WRITTEN_OUT])
def test_the_kernel_of_a_gpu_is_asked_for_the_same(name, takes_gqa, beginning, monkeypatch):
    """Its arguments on a CPU: where sequences begin, copies of contexts, the window. `dense` computes in its place."""
    layer = LAYERS[name]

    def kernel(
        query, key, value, query_ends, key_ends, most_queries, most_keys, *, scale, window_size, enable_gqa=None
    ):
        assert query_ends.dtype == key_ends.dtype == torch.int32 and scale == layer.width**-0.5
        assert [int(ends.diff().max()) for ends in (query_ends, key_ends)] == [most_queries, most_keys]
        assert window_size == (-1 if layer.window is None else layer.window - 1, 0)
        assert enable_gqa == (layer.heads != layer.keys if attention.TAKES_GQA else None)
        cut = [query.split(query_ends.diff().tolist()), *(x.split(key_ends.diff().tolist()) for x in (key, value))]
        return torch.cat([dense(*sequence, layer) for sequence in zip(*cut)])

    # A stand-in that takes what the real one takes and refuses everything else.
    monkeypatch.setattr(attention, "TAKES_GQA", takes_gqa)
    monkeypatch.setattr(attention, "varlen_attn", mock.create_autospec(attention.varlen_attn, side_effect=kernel))

    def by_kernel(query, key, value, layer: Layer, beginning=0) -> torch.Tensor:
        cpu = torch.device("cpu")
        spans = attention.kernel_spans(attention.spans(GROUPS, cpu, beginning).runs, cpu)
        options = attention.ScoreOptions(layer.width**-0.5, layer.window)
        return attention.variable_length_attention(query[0], key[0], value[0], spans, options)[None]

    compute = functools.partial(with_gradients, layer=layer, device="cpu", dtype=torch.float64, beginning=beginning)
    asked, exact = compute(by_kernel), compute(one_after_the_other)
    assert max(relative(one, two) for one, two in zip(asked, exact)) <= 1e-12


@pytest.mark.parametrize(
    "fits, width, of_values, dtype, options",
    [
        (True, 256, 256, torch.bfloat16, {"window": 8}),
        (False, 256, 256, torch.float32, {}),
        (False, 192, 128, torch.bfloat16, {}),  # DeepSeek's
        (False, 512, 512, torch.bfloat16, {}),  # of Gemma 4's layers without a window
        (False, 60, 60, torch.bfloat16, {}),
        (False, 64, 64, torch.bfloat16, {"cap": 50.0}),
    ],
)
def test_the_kernel_gets_the_layers_that_it_can_compute(fits, width, of_values, dtype, options):
    query, value = (torch.empty(1, 1, columns, dtype=dtype) for columns in (width, of_values))
    assert attention.kernel_fits(query, value, attention.ScoreOptions(**options)) == fits


@needs_gpu
def test_memory_of_attention_is_linear_in_the_tokens(record_property):
    """At 4, 8 and 16 thousand tokens. With a mask or a matrix of weights it would double."""
    peaks = []
    for tokens in (4096, 8192, 16384):
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        groups = [(512, [512] * 7)] * (tokens // 4096)
        attend = functools.partial(packed, groups=groups)
        with_gradients(attend, LAYERS["plain"], "cuda", torch.bfloat16, groups)
        peaks.append((torch.cuda.max_memory_allocated() - before) / tokens)
    record_property("measured", ", ".join(f"{peak / 1024:.1f}" for peak in peaks) + " KiB a token")
    assert max(peaks) <= 1.1 * min(peaks)


@pytest.mark.parametrize("device, dtype", [CPU_FLOAT32, CPU_BFLOAT16, *ON_GPU])
def test_the_head_is_exact_and_compiles_once_for_any_number_of_rows(device, dtype, record_property):
    """Log-probs, entropies and gradients. The logits of row 0 would overflow if exp were taken of them as they are."""
    rows, width, vocabulary = (3000, 896, 151936) if device == "cuda" else (300, 64, 5000)
    generator = torch.Generator().manual_seed(0)
    hidden, head = (torch.randn(n, width, generator=generator).to(torch.bfloat16) for n in (rows, vocabulary))
    hidden[0] *= 5 if device == "cuda" else 20  # its largest logits are above 100
    targets = torch.randint(vocabulary, (rows,), generator=generator).to(device)
    weight = torch.randn(rows, generator=generator).to(device)
    own = [x.to(device, dtype).requires_grad_() for x in (hidden, 0.15 * head)]
    shape = logits.LogitShape(temperature=0.7)

    def forward_and_backward(count: int) -> tuple[torch.Tensor, torch.Tensor]:
        found = logits.ChunkedLogprobs.apply(own[0][:count], own[1], targets[:count], shape, True)
        (found[0] * weight[:count]).sum().backward()
        return found

    logprobs, entropy = forward_and_backward(rows)
    wide = [x.detach().double().requires_grad_() for x in own]
    expected, entropies = [], []
    for part in torch.arange(rows, device=device).split(500):  # float64 logits of all rows would take 4 GB
        z = (wide[0][part] @ wide[1].T / 0.7).log_softmax(-1)
        chosen = z.gather(1, targets[part, None])[:, 0]
        (chosen * weight[part]).sum().backward()
        expected.append(chosen.detach())
        entropies.append(-(z.detach().exp() * z.detach()).sum(1))
    values = [relative(one, torch.cat(two)) for one, two in ((logprobs, expected), (entropy, entropies))]
    gradients = [relative(x.grad, exact.grad) for x, exact in zip(own, wide)]
    measured = f"log-probs {values[0]:.1e}, entropies {values[1]:.1e}, gradients {max(gradients):.1e}"
    assert max(values) <= 1e-5 and max(gradients) <= (1e-5 if dtype == torch.float32 else 5e-3), measured
    if device == "cuda":
        graphs = counters["stats"]["unique_graphs"]
        assert graphs > 0
        forward_and_backward(700)
        assert counters["stats"]["unique_graphs"] == graphs
        measured += f", {1e6 * median_seconds(lambda: forward_and_backward(rows)) / rows:.1f} us a token"
    record_property("measured", measured)


def median_seconds(work) -> float:
    taken = []
    for _ in range(5):
        torch.cuda.synchronize()
        began = time.perf_counter()
        work()
        torch.cuda.synchronize()
        taken.append(time.perf_counter() - began)
    return statistics.median(taken)


@needs_gpu
def test_the_gradient_of_the_head_is_summed_in_float32():
    """Over 80 chunks of bfloat16: one rounding at the end, and not one for each chunk."""
    generator = torch.Generator().manual_seed(0)
    hidden, head = (torch.randn(n, 64, generator=generator).bfloat16().cuda() for n in (1600, 300))
    parts = torch.rand(1600, 300, generator=generator).cuda().split(20)
    chunks = [(slice(20 * number, 20 * number + 20), part) for number, part in enumerate(parts)]
    _, found = logits.backward_through_head(hidden, head, iter(chunks), True)
    exact = sum(part.bfloat16().double().T @ hidden[rows].double() for rows, part in chunks)
    assert found.dtype == torch.bfloat16 and relative(found, exact) <= 2**-9
