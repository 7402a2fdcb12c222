"""The reverse KL of a policy to a teacher at each token, over the whole vocabulary, without matrices of logits.

    KL = sum_v p(v) (log p(v) - log q(v)),    d KL / d z(v) = p(v) (log p(v) - log q(v) - KL)

p is the softmax of the policy's logits z, q that of the teacher's, both over the tokens that both models know: heads
are often padded to different sizes.
"""

from dataclasses import replace
from types import MethodType

import torch
from torch import nn
from torch.distributed.fsdp import register_fsdp_forward_method

from common.data.tokenizer import image_tokens, resolve_model
from common.placement import World
from common.trainer import model
from common.trainer.batching import Compute, MicroBatch
from common.trainer.logits import backward_through_head, logits_in_chunks, scaled

Shape = tuple  # temperature, cap and never: arguments of logits.scaled


def load_teacher(
    model_path: str, policy: nn.Module, world: World, dtype: torch.dtype, compute: Compute, *, offload: bool
) -> nn.Module:
    """A frozen model that has no adapters. frozen_logprobs() and divergences() take it. Collective: every rank."""
    model_path = resolve_model(model_path)
    teacher = (
        model.load(model_path, world, dtype, replace(compute, lora_rank=0, freeze_router=False), offload=offload)
        .requires_grad_(False)
        .eval()
    )
    for owner, forward in ((teacher, hidden_and_head), (policy, token_divergences)):
        setattr(owner, forward.__name__, MethodType(forward, owner))
        register_fsdp_forward_method(owner, forward.__name__)
    return teacher


def divergences(
    policy: nn.Module, teacher: nn.Module, micro: MicroBatch, temperature: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """KL, log-probs and entropies (n, T) of a micro-batch's response tokens. The KL is 0 outside the mask.

    Only the KL has a gradient. The teacher's head stays gathered until model.reshard(teacher). Collective: every rank
    calls it equally often.
    """
    with torch.no_grad():
        theirs = teacher.hidden_and_head(micro)
    model.reduce_gradients_after(micro, policy)
    shape = *model.logit_shape(teacher.config, temperature), image_tokens(teacher.config)
    found = policy.token_divergences(micro, temperature, *theirs, shape)
    kl, logprobs, entropy = [model.place(values, micro) for values in found]
    # Tokens of a micro-batch that only keeps the ranks in step have a divergence, too.
    return torch.where(micro.response_mask, kl, 0.0), logprobs, entropy


def hidden_and_head(self, micro: MicroBatch) -> tuple[torch.Tensor, torch.Tensor]:
    """Hidden states (R, d) before R response tokens, and the head (V, d), in the compute dtype."""
    return model.hidden_states(self, micro), self.get_output_embeddings().weight


def token_divergences(
    self, micro: MicroBatch, temperature: float, their_hidden, their_head, their_shape: Shape
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """KL to the teacher, log-prob of the target and entropy, (R,) float32 each, at R places of one packed row."""
    hidden, head = hidden_and_head(self, micro)
    shape = *model.logit_shape(self.config, temperature), image_tokens(self.config)
    return ChunkedKL.apply(hidden, head, micro.targets, shape, their_hidden, their_head, their_shape)


class ChunkedKL(torch.autograd.Function):
    """KL, log-probs of the targets and entropies (R,) float32. hidden (R, d), head (V, d), targets (R,) int64; the
    teacher's hidden states and head may have another width, and its head another number of rows.

    Logits exist for a chunk of rows at a time and are computed again in the backward. Only the KL carries a gradient.
    """

    @staticmethod
    def forward(ctx, hidden, head, targets, shape: Shape, their_hidden, their_head, their_shape: Shape):
        kl, logprobs, entropy = (hidden.new_zeros(len(targets), dtype=torch.float32) for _ in range(3))  # (R,)
        for rows, z, w in both(hidden, head, their_hidden, their_head):
            # Log-probs and entropies are those of all other forwards: over the policy's whole head.
            whole = scaled(z.clone(), *shape).log_softmax(1) if len(head) > len(their_head) else None
            log_p, log_q = log_softmaxes(z, shape, w, their_shape)
            kl[rows] = (log_p.exp() * (log_p - log_q)).sum(1)
            whole = log_p if whole is None else whole
            entropy[rows] = -(whole.exp() * whole).sum(1)
            logprobs[rows] = whole.gather(1, targets[rows, None])[:, 0]
        ctx.save_for_backward(hidden, head, their_hidden, their_head, kl)
        ctx.shapes = shape, their_shape
        ctx.mark_non_differentiable(logprobs, entropy)
        return kl, logprobs, entropy

    @staticmethod
    def backward(ctx, grad, *_):
        hidden, head, their_hidden, their_head, kl = ctx.saved_tensors
        shape, their_shape = ctx.shapes
        temperature, cap = shape[:2]

        def gradients():
            for rows, z, w in both(hidden, head, their_hidden, their_head):
                slope = 1.0 if cap is None else 1 - (z / temperature / cap).tanh()[:, : len(their_head)] ** 2
                log_p, log_q = log_softmaxes(z, shape, w, their_shape)
                grad_z = torch.zeros_like(z)  # also for tokens that the teacher does not know
                own = log_p.exp() * (log_p - log_q - kl[rows, None]) * slope * (grad[rows, None] / temperature)
                grad_z[:, : own.shape[1]] = own
                yield rows, grad_z

        grad_hidden, grad_head = backward_through_head(hidden, head, gradients(), ctx.needs_input_grad[1])
        return grad_hidden, grad_head, None, None, None, None, None


def both(hidden, head, their_hidden, their_head):
    """Slices of rows, each with the products (r, V) of the policy and of the teacher in float32."""
    widest = 3 * max(len(head), len(their_head))  # a chunk takes the memory of six, where log-probs take that of two
    pairs = zip(logits_in_chunks(hidden, head, widest), logits_in_chunks(their_hidden, their_head, widest))
    for (rows, z), (_, w) in pairs:
        yield rows, z, w


def log_softmaxes(z, shape: Shape, w, their_shape: Shape) -> tuple[torch.Tensor, torch.Tensor]:
    """log p and log q (r, v) over the v tokens that both models know. z and w may be overwritten."""
    known = min(z.shape[1], w.shape[1])
    z = z if shape[1] is None else z.clone()  # needed again for the slope of the cap
    return scaled(z, *shape)[:, :known].log_softmax(1), scaled(w, *their_shape)[:, :known].log_softmax(1)
