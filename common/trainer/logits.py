"""Log-probs of chosen tokens without the (tokens, vocabulary) matrix of logits that they come from.

torch 2.13 has F.linear_cross_entropy, which also works in chunks, but it cannot be used here: it has neither a
temperature nor entropies, and it returns losses in the dtype of `hidden`. A log-prob of -20 in bfloat16 is up to 0.06
off, far more than what one update changes.
"""

from collections.abc import Callable, Iterator
from functools import cache

import torch

from common.placement import rounded_products

LOGITS_PER_CHUNK = 2**25  # float32 elements, so (tokens, vocabulary) logits exist 128 MiB at a time,
GPU_LOGITS_PER_CHUNK = 2**28  # or 1 GiB on a GPU, where fewer and larger products are faster

NEVER = -1e4  # logit of a token that is never sampled: its probability rounds to 0, and products with it stay finite
FUSED_MIN_ROWS = 256  # The first compilation sets how work is divided. The check at a start has 16 rows.


class ChunkedLogprobs(torch.autograd.Function):
    """logprobs = log_softmax(z) at the targets (R,) float32, and entropies (R,) float32. The logits z are
    hidden head^T / temperature, or with a cap, cap tanh(hidden head^T / temperature / cap).

    hidden (R, d), head (V, d), targets (R,) int64. Logits exist for a chunk of rows at a time and are computed again in
    the backward. They are float32 whatever the dtype of the weights, as in the engine: rounded to bfloat16, a logit of
    20 would be up to 0.06 off, the largest part of the gap between trainer and engine. Entropies carry no gradient, and
    are zeros without with_entropy. never: ids of tokens that are never sampled; their logits are NEVER.
    """

    @staticmethod
    def forward(ctx, hidden, head, targets, temperature: float, with_entropy: bool, cap=None, never=()):
        logprobs, log_z, entropy = (hidden.new_zeros(len(targets), dtype=torch.float32) for _ in range(3))  # (R,)
        for rows, z in logits_in_chunks(hidden, head):
            measure = fused(row_statistics, z)
            found = measure(z, targets[rows], temperature, with_entropy, cap, never)
            log_z[rows], logprobs[rows], entropy[rows] = found
        ctx.save_for_backward(hidden, head, targets, log_z)
        ctx.temperature, ctx.cap, ctx.never = temperature, cap, never
        ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    def backward(ctx, grad, _):
        hidden, head, targets, log_z = ctx.saved_tensors
        grad = grad / ctx.temperature  # (R,)

        def gradients():
            for rows, z in logits_in_chunks(hidden, head):
                differentiate = fused(logit_gradient, z)
                given = (targets[rows], log_z[rows], grad[rows])
                yield rows, differentiate(z, *given, ctx.temperature, ctx.cap, ctx.never)

        grad_hidden, grad_head = backward_through_head(hidden, head, gradients(), ctx.needs_input_grad[1])
        return grad_hidden, grad_head, None, None, None, None, None


def backward_through_head(hidden, head, gradients, is_trained: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Gradients of hidden (R, d) and head (V, d), or None, from (rows, gradient at their products (r, V)) in chunks."""
    wide = torch.float32 if head.is_cuda else head.dtype  # sums of many chunks would lose digits in bfloat16
    grad_hidden = torch.empty_like(hidden)
    grad_head = torch.zeros_like(head, dtype=wide) if is_trained else None
    for rows, grad_z in gradients:
        grad_z = grad_z.to(hidden.dtype)
        torch.mm(grad_z, head, out=grad_hidden[rows])
        if grad_head is not None and wide == head.dtype:
            grad_head.addmm_(grad_z.t(), hidden[rows])
        elif grad_head is not None:
            torch.addmm(grad_head, grad_z.t(), hidden[rows], out_dtype=wide, out=grad_head)
    return grad_hidden, None if grad_head is None else grad_head.to(head.dtype)


def scaled(z: torch.Tensor, temperature: float, cap: float | None, never: tuple[int, ...] = ()) -> torch.Tensor:
    """Logits (r, V) from the products z of hidden states and head. A CPU's z is overwritten."""
    z = z / temperature if z.is_cuda else z.div_(temperature)
    z = z if cap is None else z.div_(cap).tanh_().mul_(cap)
    for token in never:
        z[:, token] = NEVER
    return z


def row_statistics(
    z, targets, temperature: float, with_entropy: bool, cap: float | None = None, never: tuple[int, ...] = ()
) -> tuple[torch.Tensor, ...]:
    """log Z, the target's log-prob and the entropy (r,) of each row of products z (r, V). A CPU's z is overwritten."""
    z = scaled(z, temperature, cap, never)
    top = z.amax(1, keepdim=True)  # (r, 1)
    z -= top
    p = z.exp()  # (r, V), not normalized
    total = p.sum(1)  # (r,)
    logprob = z.gather(1, targets[:, None])[:, 0] - total.log()
    entropy = total.log() - p.mul_(z).sum(1) / total if with_entropy else torch.zeros_like(total)
    return total.log() + top[:, 0], logprob, entropy


def logit_gradient(
    z, targets, log_z, grad, temperature: float, cap: float | None = None, never: tuple[int, ...] = ()
) -> torch.Tensor:
    """(r, V): the gradient at the products z, except for the factor 1 / temperature. It is grad (r,) times
    d logprob / d logits, that is one-hot - softmax, times the slope of the cap.
    """
    z = scaled(z, temperature, cap, never)
    slope = None if cap is None else 1 - (z / cap) ** 2  # (r, V)
    grad_z = z.sub_(log_z[:, None]).exp_().mul_(-grad[:, None]).scatter_add_(1, targets[:, None], grad[:, None])
    return grad_z if slope is None else grad_z.mul_(slope)


def fused(function: Callable, z: torch.Tensor) -> Callable:
    """The function, on a GPU as few kernels that read the logits z (r, V) once. They are made for many rows."""
    return compiled(function) if z.is_cuda and len(z) >= FUSED_MIN_ROWS else function


@cache
def compiled(function: Callable) -> Callable:
    return torch.compile(function, dynamic=True)


def chunks(rows: int, vocabulary: int, logits: int) -> list[slice]:
    """Slices of the rows, each with at most that many logits but at least one row."""
    size = max(1, logits // vocabulary)
    return [slice(first, min(first + size, rows)) for first in range(0, rows, size)]


def logits_in_chunks(
    hidden: torch.Tensor, head: torch.Tensor, vocabulary: int = 0
) -> Iterator[tuple[slice, torch.Tensor]]:
    """Slices of rows, each with its logits (r, V) in float32. vocabulary: V of the widest head to keep in step with."""
    half = hidden.dtype != torch.float32
    out_dtype = {"out_dtype": torch.float32} if half and hidden.is_cuda else {}  # only CUDA's product can widen
    if not out_dtype:
        hidden, head = hidden.float(), head.float()  # once, and not for every chunk
    most = GPU_LOGITS_PER_CHUNK if hidden.is_cuda else LOGITS_PER_CHUNK
    for rows in chunks(len(hidden), vocabulary or len(head), most):
        # Values that were bfloat16 lose nothing when the product rounds them to bfloat16 again.
        with rounded_products(half and not out_dtype):
            z = torch.mm(hidden[rows], head.t(), **out_dtype)  # (r, V)
        yield rows, z
