"""Log-probs of chosen tokens without the (tokens, vocabulary) matrix of logits that they come from.

torch 2.13 has F.linear_cross_entropy, which also works in chunks, but it cannot be used here: it has neither a
temperature nor entropies, and it returns losses in the dtype of `hidden`. A log-prob of -20 in bfloat16 is up to 0.06
off, far more than what one update changes.
"""

from collections.abc import Callable, Iterator
from functools import cache
from typing import NamedTuple

import torch

from common.placement import rounded_products

LOGITS_PER_CHUNK = 2**25  # float32 elements, so (tokens, vocabulary) logits exist 128 MiB at a time,
GPU_LOGITS_PER_CHUNK = 2**28  # or 1 GiB on a GPU, where fewer and larger products are faster

NEVER = -1e4  # logit of a token that is never sampled: its probability rounds to 0, and products with it stay finite
FUSED_MIN_ROWS = 256  # torch.compile tunes itself on its first call. Skip small inputs: those of packing_check.py.


class LogitShape(NamedTuple):
    """How logits follow from the products of hidden states and head: z / temperature, capped, without some tokens."""

    temperature: float = 1.0
    cap: float | None = None  # logits become cap tanh(z / temperature / cap) (Gemma 2)
    never: tuple[int, ...] = ()  # ids of tokens that are never sampled: placeholders of images


class ChunkedLogprobs(torch.autograd.Function):
    """Log-probs of the targets and entropies, (R,) float32 each. Entropies carry a gradient only with entropy_gradient.

    hidden (R, d), head (V, d), targets (R,) int64. Logits exist for a chunk of rows at a time and are computed again in
    the backward. They are float32 whatever the dtype of the weights, as in the engine: rounded to bfloat16, a logit of
    20 would be up to 0.06 off, the largest part of the gap between trainer and engine. Without with_entropy, entropies
    are zeros.
    """

    @staticmethod
    def forward(ctx, hidden, head, targets, shape: LogitShape, with_entropy: bool, entropy_gradient: bool = False):
        logprobs = hidden.new_zeros(len(targets), dtype=torch.float32)  # (R,)
        entropy = torch.zeros_like(logprobs)
        log_z = torch.zeros_like(logprobs)
        for rows, z in logits_in_chunks(hidden, head):
            statistics = fused(row_statistics, z, targets[rows], shape, with_entropy)
            log_z[rows], logprobs[rows], entropy[rows] = statistics
        ctx.save_for_backward(hidden, head, targets, log_z, entropy if entropy_gradient else None)
        ctx.shape = shape
        if not entropy_gradient:
            ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    def backward(ctx, grad, grad_entropy):
        hidden, head, targets, log_z, entropy = ctx.saved_tensors
        grad = grad / ctx.shape.temperature  # (R,)
        if entropy is not None:
            grad_entropy = grad_entropy / ctx.shape.temperature  # (R,)

        # One chunk after another: neither the logits nor their gradients exist as a whole.
        def gradients():
            for rows, z in logits_in_chunks(hidden, head):
                of_logprobs = targets[rows], log_z[rows], grad[rows]
                if entropy is None:
                    yield rows, fused(logit_gradient, z, *of_logprobs, ctx.shape)
                else:
                    of_entropies = entropy[rows], grad_entropy[rows]
                    yield rows, fused(logit_gradient_with_entropy, z, *of_logprobs, *of_entropies, ctx.shape)

        grad_hidden, grad_head = backward_through_head(hidden, head, gradients(), ctx.needs_input_grad[1])
        return grad_hidden, grad_head, None, None, None, None


def backward_through_head(hidden, head, gradients, is_trained: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Gradients of hidden (R, d) and head (V, d), or None for a frozen head.

    gradients: pairs of a slice of rows and the gradient at their products (r, V).
    """
    # The head's gradient is a sum of many chunks, which would lose digits in bfloat16. CUDA's addmm also leaves the
    # products unrounded that it adds up.
    sum_dtype = torch.promote_types(head.dtype, torch.float32)
    grad_hidden = torch.empty_like(hidden)
    grad_head = torch.zeros_like(head, dtype=sum_dtype) if is_trained else None
    for rows, grad_z in gradients:
        grad_z = grad_z.to(hidden.dtype)
        torch.mm(grad_z, head, out=grad_hidden[rows])
        if grad_head is None:
            continue
        if sum_dtype == head.dtype:
            grad_head.addmm_(grad_z.t(), hidden[rows])
        elif not head.is_cuda:
            grad_head += grad_z.t() @ hidden[rows]
        else:
            torch.addmm(grad_head, grad_z.t(), hidden[rows], out_dtype=sum_dtype, out=grad_head)
    return grad_hidden, None if grad_head is None else grad_head.to(head.dtype)


def scaled(z: torch.Tensor, shape: LogitShape) -> torch.Tensor:
    """Logits (r, V) from the products z of hidden states and head. A CPU's z is overwritten."""
    # A GPU's z is left as it is: in a compiled kernel, writing it back would be one more pass over memory.
    z = z / shape.temperature if z.is_cuda else z.div_(shape.temperature)
    if shape.cap is not None:
        z = z.div_(shape.cap).tanh_().mul_(shape.cap)
    for token in shape.never:
        z[:, token] = NEVER
    return z


def row_statistics(z, targets, shape: LogitShape, with_entropy: bool) -> tuple[torch.Tensor, ...]:
    """log Z, the target's log-prob and the entropy (r,) of each row of products z (r, V). A CPU's z is overwritten."""
    z = scaled(z, shape)
    # Subtract the largest logit, so that exp cannot overflow.
    top = z.amax(1, keepdim=True)  # (r, 1)
    z -= top
    p = z.exp()  # (r, V), not normalized
    total = p.sum(1)  # (r,)
    log_total = total.log()
    logprob = z.gather(1, targets[:, None])[:, 0] - log_total
    entropy = log_total - p.mul_(z).sum(1) / total if with_entropy else torch.zeros_like(total)
    return log_total + top[:, 0], logprob, entropy


def logit_gradient(z, targets, log_z, grad, shape: LogitShape) -> torch.Tensor:
    """(r, V): the gradient at the products z. The caller has divided `grad` by the temperature.

    It is grad (r,) times d logprob / d logits, that is one-hot - softmax, times the slope of the cap.
    """
    z = scaled(z, shape)
    slope = None if shape.cap is None else 1 - (z / shape.cap) ** 2  # (r, V)
    softmax = z.sub_(log_z[:, None]).exp_()
    grad_z = softmax.mul_(-grad[:, None]).scatter_add_(1, targets[:, None], grad[:, None])
    return grad_z if slope is None else grad_z.mul_(slope)


def logit_gradient_with_entropy(z, targets, log_z, grad, entropy, grad_entropy, shape: LogitShape) -> torch.Tensor:
    """(r, V): the same, plus grad_entropy (r,) times d entropy / d logits, that is -softmax (log softmax + entropy)."""
    z = scaled(z, shape)
    slope = None if shape.cap is None else 1 - (z / shape.cap) ** 2  # (r, V)
    log_softmax = z.sub_(log_z[:, None])
    softmax = log_softmax.exp()
    # Both terms have a factor of softmax: -softmax (grad + grad_entropy (log softmax + entropy)).
    factor = log_softmax.add_(entropy[:, None]).mul_(grad_entropy[:, None]).add_(grad[:, None])
    grad_z = softmax.mul_(factor.neg_()).scatter_add_(1, targets[:, None], grad[:, None])
    return grad_z if slope is None else grad_z.mul_(slope)


def fused(function: Callable, z: torch.Tensor, *arguments):
    """function(z, ...). On a GPU it is compiled: a few kernels, which write no other matrix as large as z (r, V)."""
    if z.is_cuda and len(z) >= FUSED_MIN_ROWS:
        function = compiled(function)
    return function(z, *arguments)


@cache
def compiled(function: Callable) -> Callable:
    return torch.compile(function, dynamic=True)


def logits_in_chunks(
    hidden: torch.Tensor, head: torch.Tensor, vocabulary: int = 0
) -> Iterator[tuple[slice, torch.Tensor]]:
    """Slices of rows, each with its products (r, V) in float32. vocabulary: count a row as that many logits, not V."""
    is_half = hidden.dtype == torch.bfloat16
    can_widen = is_half and hidden.is_cuda  # only CUDA has a product of bfloat16 matrices in float32
    if not can_widen:
        hidden, head = hidden.float(), head.float()  # once, and not for every chunk
    most = GPU_LOGITS_PER_CHUNK if hidden.is_cuda else LOGITS_PER_CHUNK
    size = max(1, most // (vocabulary or len(head)))
    for first in range(0, len(hidden), size):
        rows = slice(first, first + size)
        if can_widen:
            z = torch.mm(hidden[rows], head.t(), out_dtype=torch.float32)
        else:
            # Values that were bfloat16 lose nothing when the product rounds them to bfloat16 again.
            with rounded_products(is_half):
                z = torch.mm(hidden[rows], head.t())  # (r, V)
        yield rows, z
