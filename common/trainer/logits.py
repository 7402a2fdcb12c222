"""Log-probs of chosen tokens without the (tokens, vocabulary) matrix of logits that they come from.

torch 2.13 has F.linear_cross_entropy, which also works in chunks, but it cannot be used here: it has neither a
temperature nor entropies, and it returns losses in the dtype of `hidden`. A log-prob of -20 in bfloat16 is up to 0.06
off, far more than what one update changes.
"""

from collections.abc import Iterator

import torch

from common.placement import rounded_products

LOGITS_PER_CHUNK = 2**25  # float32 elements, so (tokens, vocabulary) logits exist 128 MiB at a time


class ChunkedLogprobs(torch.autograd.Function):
    """logprobs = log_softmax(hidden head^T / temperature) at the targets (R,) float32, and entropies (R,) float32.

    hidden (R, d), head (V, d), targets (R,) int64. Logits exist for a chunk of rows at a time and are computed again in
    the backward. They are float32 whatever the dtype of the weights, as in the engine: rounded to bfloat16, a logit of
    20 would be up to 0.06 off, the largest part of the gap between trainer and engine. Entropies carry no gradient, and
    are zeros without with_entropy.
    """

    @staticmethod
    def forward(ctx, hidden, head, targets, temperature: float, with_entropy: bool):
        logprobs, log_z, entropy = (hidden.new_zeros(len(targets), dtype=torch.float32) for _ in range(3))  # (R,)
        for rows, z in logits_in_chunks(hidden, head):  # z: (r, V)
            z.div_(temperature)
            top = z.amax(1, keepdim=True)  # (r, 1)
            z -= top
            p = z.exp()  # (r, V), not normalized
            total = p.sum(1)  # (r,)
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
        grad = grad / ctx.temperature  # (R,)
        grad_hidden, grad_head = torch.empty_like(hidden), torch.zeros_like(head)  # (R, d), (V, d)
        for rows, z in logits_in_chunks(hidden, head):
            z.div_(ctx.temperature).sub_(log_z[rows, None])
            grad_z = z.exp_().mul_(-grad[rows, None])  # d logprob / d logits = one-hot - softmax
            grad_z.scatter_add_(1, targets[rows, None], grad[rows, None])
            grad_z = grad_z.to(hidden.dtype)
            torch.mm(grad_z, head, out=grad_hidden[rows])
            grad_head.addmm_(grad_z.t(), hidden[rows])
        return grad_hidden, grad_head, None, None, None


def chunks(rows: int, vocabulary: int) -> list[slice]:
    """Slices of the rows, each with at most LOGITS_PER_CHUNK logits but at least one row."""
    size = max(1, LOGITS_PER_CHUNK // vocabulary)
    return [slice(first, min(first + size, rows)) for first in range(0, rows, size)]


def logits_in_chunks(hidden: torch.Tensor, head: torch.Tensor) -> Iterator[tuple[slice, torch.Tensor]]:
    """Slices of rows, each with its logits (r, V) in float32."""
    half = hidden.dtype != torch.float32
    out_dtype = {"out_dtype": torch.float32} if half and hidden.is_cuda else {}  # only CUDA's product can widen
    if not out_dtype:
        hidden, head = hidden.float(), head.float()  # once, and not for every chunk
    for rows in chunks(len(hidden), len(head)):
        # Values that were bfloat16 lose nothing when the product rounds them to bfloat16 again.
        with rounded_products(half and not out_dtype):
            z = torch.mm(hidden[rows], head.t(), **out_dtype)  # (r, V)
        yield rows, z
