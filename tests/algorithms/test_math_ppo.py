"""PPO: GAE that skips holes, whitening, value clipping, explained variance; by hand and against slow loops."""

import pytest
import torch

from algos.ppo import compute_advantages, explained_variance, value_loss, whiten


def rows(*values) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


ALL = torch.ones(1, 3, dtype=torch.bool)


@pytest.mark.parametrize(
    "gamma, lam, advantages, returns",
    [
        (1, 1, [0.8, 0.6, 0.4], [1, 1, 1]),
        (1, 0.95, [0.751, 0.58, 0.4], [0.951, 0.98, 1]),
        (0.99, 0.95, [0.732273, 0.5702, 0.4], [0.932273, 0.9702, 1]),
        (1, 0, [0.2, 0.2, 0.4], [0.4, 0.6, 1]),
    ],
)
def test_gae_by_hand(gamma, lam, advantages, returns):
    out = compute_advantages(rows([0, 0, 1.0]), rows([0.2, 0.4, 0.6]), ALL, gamma, lam)
    assert torch.allclose(out[0], rows(advantages), atol=1e-6) and torch.allclose(out[1], rows(returns), atol=1e-6)


TWO = {
    "token_rewards": rows([0, 1.0, 0, 0], [0, 0, 0, 1.0]),
    "values": rows([0.5, 0.25, 9, 9], [0.1, 0.2, 0.3, 0.4]),
    "response_mask": torch.tensor([[1, 1, 0, 0], [1, 1, 1, 1]], dtype=torch.bool),
}


def test_two_rows_and_whitening_by_hand():
    """The 9s on padding must not matter."""
    advantages, returns = compute_advantages(**TWO, gamma=1.0, lam=0.95)
    assert torch.allclose(advantages, rows([0.4625, 0.75, 0, 0], [0.799675, 0.7365, 0.67, 0.6]), atol=1e-6)
    assert torch.allclose(returns, rows([0.9625, 1, 0, 0], [0.899675, 0.9365, 0.97, 1]), atol=1e-6)
    white = whiten(advantages, TWO["response_mask"])
    expected = rows([-1.685766, 0.652422, 0, 0], [1.056421, 0.542629, 0.001796, -0.567502])
    assert torch.allclose(white, expected, atol=1e-5)


def test_a_hole_is_skipped_and_changes_nothing_outside_itself():
    mask = torch.tensor([[1, 0, 0, 1]], dtype=torch.bool)
    advantages, _ = compute_advantages(rows([0, 0, 0, 1.0]), rows([0.1, 0.2, 0.3, 0.4]), mask, 1.0, 0.95)
    assert torch.allclose(advantages, rows([0.87, 0, 0, 0.6]), atol=1e-6)  # not .775425 at t = 0
    dirty = rows([0.1, torch.nan, torch.nan, 0.4])
    again, returns = compute_advantages(rows([0, torch.nan, torch.nan, 1.0]), dirty, mask, 1.0, 0.95)
    assert torch.equal(again, advantages) and torch.equal(returns[:, 1:3], torch.zeros(1, 2, dtype=torch.float64))
    without, _ = compute_advantages(rows([0, 1.0]), rows([0.1, 0.4]), torch.ones(1, 2, dtype=torch.bool), 1.0, 0.95)
    assert torch.equal(without, advantages[:, [0, 3]])


def test_bootstrap_by_hand():
    values = rows([0.2, 0.4, 0.6])
    ended, _ = compute_advantages(torch.zeros_like(values), values, ALL, 1.0, 1.0)
    cut, returns = compute_advantages(torch.zeros_like(values), values, ALL, 1.0, 1.0, torch.tensor([0.7]).double())
    assert torch.allclose(ended, rows([-0.2, -0.4, -0.6])) and torch.allclose(cut, rows([0.5, 0.3, 0.1]))
    assert torch.allclose(returns, rows([0.7, 0.7, 0.7]))


def random_batch(seed: int):
    generator = torch.Generator().manual_seed(seed)
    rewards, values = torch.randn(2, 5, 9, generator=generator, dtype=torch.float64)
    return rewards, values, torch.rand(5, 9, generator=generator) < 0.6


def slow_gae(rewards, values, mask, gamma, lam):
    """The defining sum over the chosen tokens: A_k = sum_j (gamma lam)^j delta_{k+j}."""
    out = torch.zeros_like(values)
    for i in range(len(mask)):
        tokens = [t for t in range(mask.shape[1]) if mask[i, t]]
        value = [float(values[i, t]) for t in tokens] + [0.0]
        deltas = [float(rewards[i, t]) + gamma * value[k + 1] - value[k] for k, t in enumerate(tokens)]
        for k, t in enumerate(tokens):
            out[i, t] = sum((gamma * lam) ** j * delta for j, delta in enumerate(deltas[k:]))
    return out


def test_gae_matches_the_slow_reference():
    for seed in range(100):
        batch = random_batch(seed)
        gamma, lam = [(1.0, 1.0), (1.0, 0.95), (0.9, 0.5), (1.0, 0.0)][seed % 4]
        advantages, returns = compute_advantages(*batch, gamma, lam)
        expected = slow_gae(*batch, gamma, lam)
        assert torch.allclose(advantages, expected), seed
        assert torch.allclose(returns, torch.where(batch[2], expected + batch[1], 0.0)), seed


def test_the_ends_of_lambda():
    rewards, values, mask = random_batch(1)
    to_go = (rewards * mask).flip(1).cumsum(1).flip(1)
    _, returns = compute_advantages(rewards, values, mask, 1.0, 1.0)
    assert torch.allclose(returns, to_go * mask)  # Monte Carlo, whatever the critic says
    advantages, _ = compute_advantages(rewards, torch.zeros_like(values), mask, 1.0, 1.0)
    assert torch.allclose(advantages, to_go * mask)  # REINFORCE


def test_a_response_of_one_token():
    advantages, returns = compute_advantages(rows([1.0]), rows([0.3]), torch.ones(1, 1, dtype=torch.bool), 1.0, 0.95)
    assert advantages.item() == pytest.approx(0.7) and returns.item() == pytest.approx(1.0)


def test_whitening():
    generator = torch.Generator().manual_seed(0)
    advantages, mask = torch.randn(6, 8, generator=generator) * 3 + 5, torch.rand(6, 8, generator=generator) < 0.5
    white = whiten(advantages, mask)
    assert white[mask].mean().abs() < 1e-6 and white[mask].std() == pytest.approx(1.0, abs=1e-5)
    assert (white[~mask] == 0).all()
    assert torch.equal(white, whiten(torch.where(mask, advantages, torch.nan), mask))
    one = torch.zeros(1, 2, dtype=torch.bool)
    one[0, 0] = True
    assert (whiten(torch.ones(1, 2), one) == 0).all()
    halves = [whiten(advantages[rows], mask[rows], both(advantages, mask, rows)) for rows in (slice(0, 4), slice(4, 6))]
    assert torch.allclose(torch.cat(halves), white, atol=1e-6)  # 4 rows on one rank, 2 on the other


def both(advantages, mask, mine):
    """World.sum of two ranks, as seen by the one that holds rows `mine`: counts, sums and centred squares in turn."""
    chosen = advantages[mask].double()
    answers = iter([len(chosen), chosen.sum(), (chosen - chosen.mean()).square().sum()])
    return lambda mine: float(next(answers))


def slow_value_loss(values, old_values, returns, mask, clip, denominator):
    total = 0.0
    for i, t in mask.nonzero().tolist():
        value, old, target = (float(x[i, t]) for x in (values, old_values, returns))
        near = min(max(value, old - clip), old + clip)
        total += 0.5 * max((value - target) ** 2, (near - target) ** 2)
    return total / denominator


def test_value_loss_matches_the_slow_reference():
    for seed in range(100):
        values, returns, mask = random_batch(seed)
        old = random_batch(seed + 1000)[0]
        given = (values, old, returns, mask)
        expected = slow_value_loss(*given, 0.2, 7.0)
        assert value_loss(*given, clip=0.2, denominator=7.0).item() == pytest.approx(expected), seed
        dirty = [torch.where(mask, x, torch.nan) for x in given[:3]]
        assert value_loss(*dirty, mask, clip=0.2, denominator=7.0).item() == pytest.approx(expected), seed


def test_value_clip_by_hand():
    """V 1.0, V_old 0, return 0, clip 0.2: the far error counts; return 2: the clipped one, and its gradient is gone."""
    for target, loss, slope in ((0.0, 0.5, 1.0), (2.0, 0.5 * 1.8**2, 0.0)):
        value = rows([1.0]).requires_grad_()
        out = value_loss(value, rows([0.0]), rows([target]), torch.tensor([[True]]), clip=0.2, denominator=1)
        out.backward()
        assert out.item() == pytest.approx(loss) and value.grad.item() == pytest.approx(slope)


def test_value_loss_adds_up_over_micro_batches():
    values, returns, mask = random_batch(3)
    old = values - 0.1
    whole = value_loss(values, old, returns, mask, clip=0.2, denominator=9.0)
    parts = [
        value_loss(values[i], old[i], returns[i], mask[i], clip=0.2, denominator=9.0)
        for i in torch.arange(5).split([1, 3, 1])
    ]
    assert sum(parts).item() == pytest.approx(whole.item())


def test_explained_variance():
    mask = torch.tensor([[1, 1, 1, 0]], dtype=torch.bool)
    returns = rows([1.0, 2.0, 3.0, torch.nan])
    assert explained_variance(returns, returns, mask) == pytest.approx(1.0)
    assert explained_variance(rows([5.0, 5.0, 5.0, 0.0]), returns, mask) == pytest.approx(0.0)
    assert explained_variance(rows([1.0, 2.0, 2.0, 0.0]), returns, mask) == pytest.approx(1 - (2 / 9) / (2 / 3))
    assert explained_variance(returns, torch.ones_like(returns), mask) == 0.0  # nothing to explain
