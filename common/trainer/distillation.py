"""The reverse KL of a policy to a teacher at each token, over the whole vocabulary, without matrices of logits.

    KL = sum_v p(v) (log p(v) - log q(v)),    d KL / d z(v) = p(v) (log p(v) - log q(v) - KL)

p is the softmax of the policy's logits z, q that of the teacher's, both over the tokens that both models know: heads
are often padded to different sizes.
"""

from collections.abc import Iterator
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import nn

from common.data.tokenizer import resolve_model
from common.errors import BadInput
from common.placement import World
from common.trainer import model
from common.trainer.batching import Compute, MicroBatch
from common.trainer.forward import factors, hidden_states, logit_shape, place
from common.trainer.logits import LogitShape, backward_through_head, logits_in_chunks, scaled


def load_teacher(
    model_path: str,
    policy: nn.Module,
    world: World,
    dtype: torch.dtype,
    compute: Compute,
    *,
    offload: bool,
    moves: bool = False,
) -> nn.Module:
    """A model without gradients and adapters. frozen_logprobs() and divergences() take it. Collective: every rank.

    moves: its weights will be changed, so they are float32. Otherwise they are kept in dtype.
    """
    compute = replace(compute, lora_rank=0, freeze_router=False)
    teacher = model.load(resolve_model(model_path), world, dtype, compute, offload=offload, frozen=not moves)
    model.add_forward(teacher, hidden_and_head)
    model.add_forward(policy, token_divergences)
    return teacher.requires_grad_(False).eval()


def own_teacher(policy: nn.Module) -> nn.Module:
    """The policy as a teacher of itself, which takes no memory. divergences() gives it prompts of its own."""
    model.add_forward(policy, hidden_and_head)
    model.add_forward(policy, token_divergences)
    return policy


def check_heads(policy: nn.Module, teacher: nn.Module) -> None:
    """Raises BadInput for a model whose logits are not products with its head: divergences() could not compute them."""
    for flag, loaded in (("--model", policy), ("--teacher", teacher)):
        if not loaded.knows_logits:
            raise BadInput(
                f"--full-vocabulary: {flag} is a {loaded.config.model_type} model, whose logits are not products with "
                "its head; turn --full-vocabulary off"
            )


def divergences(
    policy: nn.Module,
    teacher: nn.Module,
    micro: MicroBatch,
    temperature: float,
    for_teacher: MicroBatch | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """KL and entropies (n, T) of a micro-batch's response tokens. The KL is 0 outside the mask.

    for_teacher: the same responses in the same order, after the prompts that the teacher reads. None: the policy's.
    Only the KL has a gradient. The teacher's head stays gathered until model.reshard(teacher). The backward must come
    before the next call, as for model.response_logprobs(). Collective: every rank calls it equally often. check_heads()
    must have accepted both models.
    """
    with torch.no_grad():
        teacher_hidden, teacher_head = teacher.hidden_and_head(for_teacher or micro)
    # A head that is a parameter in training would make FSDP reduce the policy's gradients before they are complete.
    teacher_head = teacher_head.detach()
    model.plan_gradient_reduction(policy, micro)
    teacher_shape = logit_shape(teacher.config, temperature)
    packed = policy.token_divergences(micro, temperature, teacher_hidden, teacher_head, teacher_shape)
    kl, entropy = (place(values, micro) for values in packed)
    # The tokens of a dummy have a divergence, too, which must not count.
    return torch.where(micro.response_mask, kl, 0.0), entropy


def hidden_and_head(self, micro: MicroBatch) -> tuple[torch.Tensor, torch.Tensor]:
    """Hidden states (R, d) before R response tokens, and the head (V, d): products of both make the logits."""
    return factors(self, hidden_states(self, micro))


def token_divergences(
    self, micro: MicroBatch, temperature: float, teacher_hidden, teacher_head, teacher_shape: LogitShape
) -> tuple[torch.Tensor, torch.Tensor]:
    """KL to the teacher and entropy, (R,) float32 each, at R places of one packed row."""
    hidden, head = hidden_and_head(self, micro)
    shape = logit_shape(self.config, temperature)
    return ChunkedKL.apply(hidden, head, shape, teacher_hidden, teacher_head, teacher_shape)


class ChunkedKL(torch.autograd.Function):
    """KL and entropies (R,) float32. hidden (R, d), head (V, d); the teacher's hidden states and head may have another
    width, and its head another number of rows.

    Logits exist for a chunk of rows at a time and are computed again in the backward. Only the KL carries a gradient.
    """

    @staticmethod
    def forward(ctx, hidden, head, shape, teacher_hidden, teacher_head, teacher_shape):
        kl = hidden.new_zeros(len(hidden), dtype=torch.float32)  # (R,)
        entropy = torch.zeros_like(kl)
        for rows, z, teacher_z in products_of_both(hidden, head, teacher_hidden, teacher_head):
            z = scaled(z, shape)
            log_p, log_q = log_softmaxes(z, scaled(teacher_z, teacher_shape))
            kl[rows] = (log_p.exp() * (log_p - log_q)).sum(1)
            # Entropies are those of all other forwards: over the policy's whole head.
            whole = log_p if log_p.shape == z.shape else z.log_softmax(1)
            entropy[rows] = -(whole.exp() * whole).sum(1)
        ctx.save_for_backward(hidden, head, teacher_hidden, teacher_head, kl)
        ctx.shapes = shape, teacher_shape
        ctx.mark_non_differentiable(entropy)
        return kl, entropy

    @staticmethod
    def backward(ctx, grad, *_):
        hidden, head, teacher_hidden, teacher_head, kl = ctx.saved_tensors
        shape, teacher_shape = ctx.shapes

        def gradients():
            for rows, z, teacher_z in products_of_both(hidden, head, teacher_hidden, teacher_head):
                slope = None
                if shape.cap is not None:
                    slope = 1 - (z / shape.temperature / shape.cap).tanh()[:, : len(teacher_head)] ** 2
                log_p, log_q = log_softmaxes(scaled(z, shape), scaled(teacher_z, teacher_shape))
                grad_z = log_p.exp() * (log_p - log_q - kl[rows, None])
                if slope is not None:
                    grad_z = grad_z * slope
                grad_z = grad_z * (grad[rows, None] / shape.temperature)
                # Tokens that the teacher does not know have a gradient of 0.
                yield rows, F.pad(grad_z, (0, len(head) - grad_z.shape[1]))

        grad_hidden, grad_head = backward_through_head(hidden, head, gradients(), ctx.needs_input_grad[1])
        return grad_hidden, grad_head, None, None, None, None


def products_of_both(hidden, head, teacher_hidden, teacher_head) -> Iterator[tuple[slice, torch.Tensor, torch.Tensor]]:
    """Slices of rows, each with the products (r, V) of the policy and of the teacher in float32."""
    # A row takes the memory of up to ten rows of logits here; log-probs alone take two or three.
    logits_of_a_row = 4 * max(len(head), len(teacher_head))
    policy_chunks = logits_in_chunks(hidden, head, logits_of_a_row)
    teacher_chunks = logits_in_chunks(teacher_hidden, teacher_head, logits_of_a_row)
    for (rows, z), (_, teacher_z) in zip(policy_chunks, teacher_chunks):
        yield rows, z, teacher_z


def log_softmaxes(z: torch.Tensor, teacher_z: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """log p and log q (r, v) over the v tokens that both models know, from their logits."""
    known = min(z.shape[1], teacher_z.shape[1])
    return z[:, :known].log_softmax(1), teacher_z[:, :known].log_softmax(1)
