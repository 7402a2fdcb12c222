"""On-policy distillation: advantages by hand, and the divergence over the vocabulary against a dense computation."""

import math

import pytest
import torch
import torch.nn.functional as F

from algos.opd import Args, check_args, compute_advantages, policy_loss, vocabulary_loss
from common.errors import BadInput
from common.trainer import logits
from common.trainer.distillation import ChunkedKL
from common.trainer.logits import LogitShape

PLAIN = LogitShape()
SEES = LogitShape(0.7, 3.0, (2, 5))  # two placeholders of images


def test_advantages_by_hand():
    """The teacher finds the first token twice as likely as the policy, and the second half as likely."""
    old = torch.tensor([[math.log(0.4), math.log(0.2), torch.nan]])
    teacher = torch.tensor([[math.log(0.8), math.log(0.1), torch.nan]])
    mask = torch.tensor([[True, True, False]])
    found = compute_advantages(old, teacher, mask)
    assert torch.allclose(found, torch.tensor([[math.log(2), -math.log(2), 0.0]]))


def test_the_expected_gradient_of_a_sampled_token_is_that_of_the_reverse_kl():
    """Summed over all tokens with their probabilities: - sum p A d log p is the gradient of KL(p || q)."""
    generator = torch.Generator().manual_seed(0)
    z, w = torch.randn(2, 7, generator=generator, dtype=torch.float64)
    z.requires_grad_()
    log_p, log_q = z.log_softmax(0), w.log_softmax(0)
    (expected,) = torch.autograd.grad((log_p.exp() * (log_p - log_q)).sum(), z, retain_graph=True)
    found = torch.zeros(7, dtype=torch.float64)
    for v in range(7):
        one = torch.ones(1, 1, dtype=torch.bool)
        advantages = compute_advantages(log_p[v].detach().view(1, 1), log_q[v].view(1, 1), one)
        loss = policy_loss(
            log_p[v].view(1, 1),
            log_p[v].detach().view(1, 1),
            advantages,
            one,
            clip_low=0.2,
            clip_high=0.2,
            denominator=1,
        )
        (gradient,) = torch.autograd.grad(loss, z, retain_graph=True)
        found += log_p[v].exp().detach() * gradient
    assert torch.allclose(found, expected)


def dense(hidden, head, temperature, cap, never=()):
    z = hidden @ head.t() / temperature
    z = z if cap is None else cap * torch.tanh(z / cap)
    return z.index_fill(1, torch.tensor(never, dtype=torch.long), logits.NEVER)


@pytest.mark.parametrize("rows_in_a_chunk", [1, 3, 100])
@pytest.mark.parametrize("vocabularies", [(11, 11), (11, 13), (13, 11)])
@pytest.mark.parametrize(
    "shape, their_shape",
    [
        (PLAIN, PLAIN),
        (LogitShape(0.7), LogitShape(1.3, 4.0)),
        (LogitShape(0.7, 3.0), LogitShape(0.7)),
        (SEES, SEES),
    ],
)
def test_the_chunked_divergence_is_the_dense_one(monkeypatch, rows_in_a_chunk, vocabularies, shape, their_shape):
    """Over the tokens that both know; the models' widths differ as well. In float64 with its gradients."""
    monkeypatch.setattr(logits, "LOGITS_PER_CHUNK", rows_in_a_chunk * max(vocabularies))
    generator = torch.Generator().manual_seed(1)
    draw = lambda *size: torch.randn(*size, generator=generator)
    hidden, head = draw(8, 5).requires_grad_(), draw(vocabularies[0], 5).requires_grad_()
    their_hidden, their_head, known = draw(8, 6), draw(vocabularies[1], 6), min(vocabularies)
    grad = draw(8)

    log_p = dense(hidden, head, *shape)[:, :known].log_softmax(1)
    log_q = dense(their_hidden, their_head, *their_shape)[:, :known].log_softmax(1)
    kl = F.kl_div(log_q, log_p, log_target=True, reduction="none").sum(1)
    expected = torch.autograd.grad(kl, (hidden, head), grad, retain_graph=True)

    found, entropy = ChunkedKL.apply(hidden, head, shape, their_hidden, their_head, their_shape)
    gradients = torch.autograd.grad(found, (hidden, head), grad)
    assert torch.allclose(found, kl, atol=1e-5) and (found >= -1e-6).all()
    whole = dense(hidden, head, *shape).log_softmax(1)  # as in every other forward of the policy
    assert torch.allclose(entropy, -(whole.exp() * whole).sum(1), atol=1e-5)
    assert not entropy.requires_grad
    for one, other in zip(gradients, expected):
        assert torch.allclose(one, other, atol=1e-5)


def test_a_policy_that_is_its_teacher_has_no_divergence_and_no_gradient():
    generator = torch.Generator().manual_seed(2)
    hidden, head = torch.randn(4, 5, generator=generator).requires_grad_(), torch.randn(9, 5, generator=generator)
    kl, *_ = ChunkedKL.apply(hidden, head, PLAIN, hidden.detach(), head, PLAIN)
    (gradient,) = torch.autograd.grad(kl.sum(), hidden)
    assert kl.abs().max() < 1e-6 and gradient.abs().max() < 1e-6


def test_the_vocabulary_loss_is_a_masked_sum():
    divergences = torch.tensor([[1.0, torch.nan], [2.0, 4.0]])
    mask = torch.tensor([[True, False], [True, True]])
    assert vocabulary_loss(divergences, mask, denominator=10.0).item() == pytest.approx(0.7)


def test_weights_of_sampled_tokens_are_refused_where_the_loss_does_not_depend_on_them():
    with pytest.raises(BadInput, match="^--tis-cap: .*full-vocabulary"):
        check_args(Args(teacher="folder", full_vocabulary=True, tis_cap=2.0))
