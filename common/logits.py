"""Log-probs of chosen tokens without the (tokens, vocabulary) matrix they come from."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

LOGITS_PER_CHUNK = 2**25  # float32 elements: (tokens, vocabulary) logits exist 128 MiB at a time


class ChunkedLogprobs(torch.autograd.Function):
    """hidden (R, d), head (V, d), targets (R,) -> log-softmax(hidden head^T / temperature) at the targets; entropies.

    Logits exist a chunk of rows at a time, in the backward once more: never (R, V). They are float32 whatever the
    weights are, as in the engine: a logit of 20 rounded to bfloat16 is up to 0.06 off, which would be the largest
    part of the gap between trainer and engine. Entropies (R,) carry no gradient; zeros unless asked for.
    """

    @staticmethod
    def forward(ctx, hidden, head, targets, temperature: float, with_entropy: bool):
        logprobs, log_z, entropy = (hidden.new_zeros(len(targets), dtype=torch.float32) for _ in range(3))
        for rows, z in logits_in_chunks(hidden, head):
            z.div_(temperature)  # (r, V)
            top = z.amax(1, keepdim=True)
            z -= top
            p = z.exp()
            total = p.sum(1)
            log_z[rows] = total.log() + top[:, 0]
            logprobs[rows] = z.gather(1, targets[rows, None])[:, 0] - total.log()
            if with_entropy:
                entropy[rows] = total.log() - p.mul_(z).sum(1) / total
        ctx.save_for_backward(hidden, head, targets, log_z)
        ctx.temperature = temperature
        ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    def backward(ctx, grad, _):
        hidden, head, targets, log_z = ctx.saved_tensors
        grad = grad / ctx.temperature
        grad_hidden, grad_head = torch.empty_like(hidden), torch.zeros_like(head)
        for rows, z in logits_in_chunks(hidden, head):
            z.div_(ctx.temperature).sub_(log_z[rows, None])
            grad_z = z.exp_().mul_(-grad[rows, None])  # d logprob / d logits = one-hot - softmax
            grad_z.scatter_add_(1, targets[rows, None], grad[rows, None])
            grad_z = grad_z.to(hidden.dtype)
            torch.mm(grad_z, head, out=grad_hidden[rows])
            grad_head.addmm_(grad_z.t(), hidden[rows])
        return grad_hidden, grad_head, None, None, None


def chunks(rows: int, vocabulary: int) -> list[slice]:
    """Cut rows into slices of at most LOGITS_PER_CHUNK logits."""
    size = max(1, LOGITS_PER_CHUNK // vocabulary)
    return [slice(first, min(first + size, rows)) for first in range(0, rows, size)]


def logits_in_chunks(hidden: torch.Tensor, head: torch.Tensor) -> Iterator[tuple[slice, torch.Tensor]]:
    """Slices of rows, and their logits (r, V) in float32."""
    half = hidden.dtype != torch.float32
    directly = {"out_dtype": torch.float32} if half and hidden.is_cuda else {}
    if not directly:
        hidden, head = hidden.float(), head.float()  # once, not a chunk
    for rows in chunks(len(hidden), len(head)):
        with rounded_products(half and not directly):
            z = torch.mm(hidden[rows], head.t(), **directly)
        yield rows, z


@contextmanager
def rounded_products(rounded: bool = True) -> Iterator[None]:
    """CPU products of float32 matrices may round both to bfloat16 first, and add up in float32, where that is faster.

    Of matrices that were bfloat16 nothing is lost. Where oneDNN has no such kernel it takes its float32 one, on an AMD
    processor twice as fast as MKL's.
    """
    matmul = torch.backends.mkldnn.matmul
    before = matmul.fp32_precision
    matmul.fp32_precision = "bf16" if rounded else before
    try:
        yield
    finally:
        matmul.fp32_precision = before
