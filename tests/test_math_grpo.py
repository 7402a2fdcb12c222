"""GRPO's mathematics against numbers worked out by hand and a slow reference written from the paper."""

import math

import pytest
import torch

from algos.grpo import clipped_tokens, compute_advantages, kl_to_reference, policy_loss

CLIP = {"clip_low": 0.2, "clip_high": 0.28}


def loss_of(logprobs, old, ref, advantages, mask, kl_coef=0.0, denominator=None, **clip):
    denominator = len(mask) if denominator is None else denominator
    return policy_loss(logprobs, old, ref, advantages, mask, kl_coef=kl_coef, denominator=denominator, **(clip or CLIP))


def random_batch(seed, n=6, t=7):
    generator = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)
    mask = torch.rand(n, t, generator=generator) < 0.7  # with holes
    mask[:, 0] = True
    old = draw(n, t) - 2
    return old + 0.3 * draw(n, t), old, old + 0.3 * draw(n, t), draw(n), mask


def slow_loss(logprobs, old, ref, advantages, mask, clip_low, clip_high, kl_coef):
    """Equation 3, one token at a time."""
    total = 0.0
    for i in range(len(mask)):
        tokens = [t for t in range(mask.shape[1]) if mask[i, t]]
        row = 0.0
        for t in tokens:
            ratio = math.exp(logprobs[i, t] - old[i, t])
            clipped = min(max(ratio, 1 - clip_low), 1 + clip_high)
            surrogate = min(ratio * advantages[i], clipped * advantages[i])
            log_r = float(ref[i, t] - logprobs[i, t])
            row += -surrogate + kl_coef * (math.exp(log_r) - log_r - 1)
        total += row / len(tokens)
    return float(total) / len(mask)


@pytest.mark.parametrize(
    "rewards, expected",
    [
        ([1, 0, 0, 0], [1.499997, -0.499999, -0.499999, -0.499999]),
        ([1, 1, 0, 0], [0.866024, 0.866024, -0.866024, -0.866024]),
        ([2, 0.5, -1, 0.5], [1.224744, 0.0, -1.224744, 0.0]),
        ([1, 1, 1, 1], [0.0, 0.0, 0.0, 0.0]),
    ],
)
def test_advantages_by_hand(rewards, expected):
    advantages = compute_advantages(torch.tensor(rewards, dtype=torch.float32), group_size=4)
    assert torch.allclose(advantages, torch.tensor(expected), atol=1e-5)


def test_advantages_with_a_larger_eps():  # eps 1e-4, as some peers take it
    advantages = compute_advantages(torch.tensor([1.0, 0, 0, 0]), 4, eps=1e-4)
    assert torch.allclose(advantages, torch.tensor([1.4997, -0.4999, -0.4999, -0.4999]), atol=1e-5)


@pytest.mark.parametrize("size", [12, 16])
def test_equal_rewards_give_exactly_zero(size):
    """0.7 has a rounding error: by mean and std alone |A| would be 0.06 to 0.11."""
    assert (compute_advantages(torch.full((size,), 0.7), size) == 0).all()


def test_binary_rewards_have_a_closed_form():
    for size in (2, 5, 8):
        for right in range(1, size):
            rewards = torch.tensor([1.0] * right + [0.0] * (size - right))
            p, bessel = right / size, math.sqrt((size - 1) / size)
            advantages = compute_advantages(rewards, size)
            assert advantages[0].item() == pytest.approx(math.sqrt((1 - p) / p) * bessel, rel=1e-5)
            assert advantages[-1].item() == pytest.approx(-math.sqrt(p / (1 - p)) * bessel, rel=1e-5)


def test_advantage_properties():
    rewards = torch.randn(40, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    advantages = compute_advantages(rewards, 8)
    assert advantages.view(-1, 8).sum(1).abs().max() < 1e-9
    assert torch.allclose(compute_advantages(rewards + 3, 8), advantages)
    assert torch.allclose(compute_advantages(rewards * 7, 8), advantages, atol=1e-5)
    order = torch.randperm(8, generator=torch.Generator().manual_seed(1))
    shuffled = rewards.view(-1, 8)[:, order].reshape(-1)
    assert torch.allclose(compute_advantages(shuffled, 8), advantages.view(-1, 8)[:, order].reshape(-1))
    groups = torch.tensor([3, 1, 4, 0, 2])
    assert torch.allclose(
        compute_advantages(rewards.view(-1, 8)[groups].reshape(-1), 8), advantages.view(-1, 8)[groups].reshape(-1)
    )


@pytest.mark.parametrize(
    "ratio, positive, positive_grad, negative, negative_grad",
    [
        (0.50, -0.50, -0.50, 0.80, 0.0),
        (1.00, -1.00, -1.00, 1.00, 1.0),
        (1.25, -1.25, -1.25, 1.25, 1.25),
        (1.50, -1.28, 0.0, 1.50, 1.50),
        (5.00, -1.28, 0.0, 5.00, 5.00),  # without dual clip the last one is not bounded
    ],
)
def test_clip_table(ratio, positive, positive_grad, negative, negative_grad):
    for advantage, value, slope in ((1.0, positive, positive_grad), (-1.0, negative, negative_grad)):
        logprobs = torch.full((1, 1), math.log(ratio), dtype=torch.float64, requires_grad=True)
        loss = loss_of(logprobs, torch.zeros(1, 1), None, torch.tensor([advantage]), torch.ones(1, 1, dtype=torch.bool))
        loss.backward()
        assert loss.item() == pytest.approx(value) and logprobs.grad.item() == pytest.approx(slope)


def test_loss_matches_the_slow_reference():
    for seed in range(100):
        batch = random_batch(seed)
        fast = loss_of(*batch, kl_coef=0.04)
        assert fast.item() == pytest.approx(slow_loss(*batch, **CLIP, kl_coef=0.04), rel=1e-9), seed


def test_mean_is_over_sequences_of_token_means():  # losses 1, 2 and 3, 3, 3, 3: (1.5 + 3) / 2
    per_token = torch.tensor([[1.0, 2.0, 0, 0], [3.0, 3.0, 3.0, 3.0]])
    mask = torch.tensor([[1, 1, 0, 0], [1, 1, 1, 1]], dtype=torch.bool)
    logprobs = per_token.log().nan_to_num(neginf=0.0)
    loss = loss_of(logprobs, torch.zeros(2, 4), None, torch.tensor([-1.0, -1.0]), mask, clip_low=0.2, clip_high=9.0)
    assert loss.item() == pytest.approx(2.25)


def test_kl_is_k3_and_its_gradient():
    """k3 = exp(ref - p) - (ref - p) - 1; its slope in p is 1 - exp(ref - p)."""
    logprobs = torch.tensor([[-1.0]], dtype=torch.float64, requires_grad=True)
    ref = torch.tensor([[-1.5]], dtype=torch.float64)
    loss = loss_of(logprobs, logprobs.detach(), ref, torch.zeros(1), torch.ones(1, 1, dtype=torch.bool), kl_coef=0.1)
    loss.backward()
    assert loss.item() == pytest.approx(0.1 * (math.exp(-0.5) + 0.5 - 1))
    assert logprobs.grad.item() == pytest.approx(0.1 * (1 - math.exp(-0.5)))


def test_first_update_is_reinforce():
    logprobs, _, _, advantages, mask = random_batch(3)
    logprobs.requires_grad_()
    loss_of(logprobs, logprobs.detach(), None, advantages, mask).backward()
    lengths = mask.sum(1, keepdim=True)
    assert torch.allclose(logprobs.grad, -advantages[:, None] * mask / lengths / len(mask))


def test_raising_a_good_token_lowers_the_loss():
    logprobs, _, _, advantages, mask = random_batch(4)
    good = int(advantages.argmax())
    raised = logprobs.clone()
    raised[good, 0] += 0.01
    before, after = (loss_of(x, logprobs, None, advantages, mask) for x in (logprobs, raised))
    assert advantages[good] > 0 and after < before


def test_nothing_outside_the_mask_matters():
    logprobs, old, ref, advantages, mask = random_batch(5)
    logprobs.requires_grad_()
    loss_of(logprobs, old, ref, advantages, mask, kl_coef=0.1).backward()
    pad = torch.full((len(mask), 3), float("nan"), dtype=torch.float64)
    wide = [torch.cat([torch.where(mask, x.detach(), torch.nan), pad], 1) for x in (logprobs, old, ref)]
    wide[0].requires_grad_()
    wide_mask = torch.cat([mask, torch.zeros(len(mask), 3, dtype=torch.bool)], 1)
    loss = loss_of(*wide, advantages, wide_mask, kl_coef=0.1)
    loss.backward()
    assert torch.equal(wide[0].grad[:, : mask.shape[1]], logprobs.grad)
    assert (wide[0].grad[~wide_mask] == 0).all()


def test_an_empty_row_has_no_loss():
    logprobs, old, ref, advantages, mask = random_batch(6)
    mask[2] = False
    with_row = loss_of(logprobs, old, ref, advantages, mask, kl_coef=0.1, denominator=5)
    keep = torch.tensor([0, 1, 3, 4, 5])
    without = loss_of(logprobs[keep], old[keep], ref[keep], advantages[keep], mask[keep], kl_coef=0.1, denominator=5)
    assert with_row.item() == pytest.approx(without.item())


@pytest.mark.parametrize("cuts", [[8], [4, 4], [1, 7], [1] * 8])
def test_micro_batches_add_up(cuts):
    logprobs, old, ref, advantages, mask = random_batch(7, n=8)
    logprobs.requires_grad_()
    loss_of(logprobs, old, ref, advantages, mask, kl_coef=0.04).backward()
    whole, logprobs.grad = logprobs.grad, None
    for rows in torch.arange(8).split(cuts):
        part = (logprobs[rows], old[rows], ref[rows], advantages[rows], mask[rows])
        loss_of(*part, kl_coef=0.04, denominator=8).backward()
    assert torch.allclose(logprobs.grad, whole, rtol=1e-12)


def test_clipped_tokens_are_those_without_gradient():
    ratio = torch.tensor([[0.5, 1.5, 1.0], [0.5, 1.5, 1.5]])
    mask = torch.tensor([[1, 1, 1], [1, 1, 0]], dtype=torch.bool)
    clipped = clipped_tokens(ratio.log(), torch.zeros(2, 3), torch.tensor([1.0, -1.0]), mask, **CLIP)
    assert clipped == 2  # 1.5 with A > 0, 0.5 with A < 0


def test_kl_to_reference_is_never_negative_and_blind_outside_the_mask():
    ref = torch.tensor([[-1.0, -2.0, torch.nan]])
    kl = kl_to_reference(torch.tensor([[-1.0, -1.0, -1.0]]), ref, torch.tensor([[True, True, False]]))
    assert torch.allclose(kl, torch.tensor([[0.0, math.exp(-1), 0.0]]))


def test_inputs_are_not_changed():
    batch = random_batch(8)
    copies = [x.clone() for x in batch]
    loss_of(*batch, kl_coef=0.1)
    assert all(torch.equal(x, y) for x, y in zip(batch, copies))
