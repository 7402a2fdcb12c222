"""PRIME: implicit process rewards, their model's loss, and the advantages made of both; by hand and by slow loops."""

import math

import pytest
import torch

from algos.prime import (
    compute_advantages,
    implicit_rewards,
    keep_groups,
    normalize,
    prm_loss,
    ranked_pairs,
    whiten,
)

BETA = 0.05
MASK = torch.tensor([[1, 1, 1], [1, 1, 0]], dtype=torch.bool)
PRM = torch.tensor([[-1.0, -0.5, -0.2], [-2.0, -1.0, torch.nan]], dtype=torch.float64)
REF = torch.tensor([[-1.4, -0.3, -0.6], [-1.0, -1.5, torch.nan]], dtype=torch.float64)
CORRECT = torch.tensor([1.0, 0.0], dtype=torch.float64)


def close(tensor, *expected) -> bool:
    return torch.allclose(tensor, torch.tensor(expected, dtype=torch.float64), atol=1e-5)


def test_implicit_rewards_and_loss_by_hand():
    rewards = implicit_rewards(PRM, REF, MASK, BETA)
    assert close(rewards / BETA, [0.4, -0.2, 0.4], [-1.0, 0.5, 0.0])
    assert close(rewards.sum(1), 0.03, -0.025) and close(rewards.sum(1).sigmoid(), 0.507499, 0.493750)
    assert prm_loss(PRM, REF, MASK, BETA, CORRECT).mean().item() == pytest.approx(0.679492, abs=1e-6)


def test_advantages_by_hand():
    rewards = implicit_rewards(PRM, REF, MASK, BETA)
    process = compute_advantages(rewards, torch.zeros(2), MASK, 2, 1.0, 0.0)
    assert close(process, [0.0675, 0.035, 0.0325], [-0.045, 0.015, 0.0])
    both = compute_advantages(rewards, CORRECT, MASK, 2, 5.0, 5.0)
    assert close(both, [5.3375, 5.175, 5.1625], [-5.225, -4.925, 0.0])
    scaled = normalize(rewards, MASK)
    process = compute_advantages(scaled, torch.zeros(2), MASK, 2, 1.0, 0.0)
    assert close(process, [2.249925, 1.166628, 1.083297], [-1.49995, 0.499983, 0.0])
    both = compute_advantages(scaled, CORRECT, MASK, 2, 5.0, 5.0)
    assert close(both, [16.249625, 10.833139, 10.416486], [-12.49975, -2.500083, 0.0])
    assert close(whiten(both, MASK), [1.000966, 0.539533, 0.504038], [-1.448207, -0.596331, 0.0])
    assert torch.allclose(whiten(compute_advantages(scaled, CORRECT, MASK, 2), MASK), whiten(both, MASK), atol=1e-6)


def slow_advantages(process, correct, mask, size, c_process, c_outcome):
    out = torch.zeros_like(process)
    tokens = [[t for t in range(mask.shape[1]) if mask[i, t]] for i in range(len(mask))]
    mean = [sum(float(process[i, t]) for t in tokens[i]) / max(1, len(tokens[i])) for i in range(len(mask))]
    for i in range(len(mask)):
        others = [j for j in range(i // size * size, i // size * size + size) if j != i]
        baseline = sum(mean[j] for j in others) / (size - 1)
        outcome = float(correct[i]) - sum(float(correct[j]) for j in others) / (size - 1)
        for place, t in enumerate(tokens[i]):
            to_come = sum(float(process[i, s]) - baseline for s in tokens[i][place:])
            out[i, t] = c_process * to_come + c_outcome * outcome
    return out


def random_batch(seed: int, size: int):
    generator = torch.Generator().manual_seed(seed)
    prm, ref = torch.randn(2, 3 * size, 7, generator=generator, dtype=torch.float64)
    correct = torch.rand(3 * size, generator=generator, dtype=torch.float64).round()
    return prm, ref, torch.rand(3 * size, 7, generator=generator) < 0.7, correct


def test_everything_matches_the_slow_reference():
    for seed in range(100):
        size = 2 + seed % 4
        prm, ref, mask, correct = random_batch(seed, size)
        rewards = implicit_rewards(prm, ref, mask, BETA)
        losses = prm_loss(prm, ref, mask, BETA, correct)
        largest = 0.0
        for i in range(len(mask)):
            tokens = [t for t in range(7) if mask[i, t]]
            terms = [BETA * float(prm[i, t] - ref[i, t]) for t in tokens]
            right = 1 / (1 + math.exp(-sum(terms)))
            expected = -math.log(right if correct[i] else 1 - right) if tokens else 0.0
            assert losses[i].item() == pytest.approx(expected), seed
            largest = max([largest, *(abs(sum(terms[k:])) for k in range(len(terms)))])
        scaled = normalize(rewards, mask)
        assert torch.allclose(scaled, rewards / (largest + 1e-6)), seed
        advantages = compute_advantages(scaled, correct, mask, size, 2.0, 3.0)
        assert torch.allclose(advantages, slow_advantages(scaled, correct, mask, size, 2.0, 3.0)), seed


def test_a_model_that_knows_nothing_rewards_nothing():
    """phi = ref: process rewards 0, cross entropy ln 2, advantages those of whitened leave-one-out."""
    _, ref, mask, correct = random_batch(0, 4)
    mask[:, 0] = True
    rewards = implicit_rewards(ref, ref, mask, BETA)
    assert (rewards == 0).all() and (normalize(rewards, mask) == 0).all()
    assert prm_loss(ref, ref, mask, BETA, correct).tolist() == pytest.approx([math.log(2)] * len(mask))
    groups = correct.view(-1, 4)
    leave_one_out = ((groups - groups.mean(1, keepdim=True)) * 4 / 3).view(-1, 1) * mask
    expected = whiten(leave_one_out, mask)
    assert torch.allclose(whiten(compute_advantages(rewards, correct, mask, 4), mask), expected)


def test_nothing_outside_the_mask_matters():
    prm, ref, mask, correct = random_batch(1, 3)
    dirty = torch.where(mask, prm, torch.nan)
    assert torch.equal(prm_loss(dirty, ref, mask, BETA, correct), prm_loss(prm, ref, mask, BETA, correct))
    rewards = implicit_rewards(prm, ref, mask, BETA)
    dirty = torch.where(mask, rewards, torch.nan)
    assert torch.equal(compute_advantages(dirty, correct, mask, 3), compute_advantages(rewards, correct, mask, 3))
    assert torch.equal(normalize(dirty, mask)[mask], normalize(rewards, mask)[mask])


def test_the_largest_is_over_all_ranks():
    rewards = implicit_rewards(PRM, REF, MASK, BETA)  # here the largest is .03; another rank says .06
    assert torch.allclose(normalize(rewards, MASK, largest=lambda mine: 0.06), rewards / 0.060001)


@pytest.mark.parametrize(
    "size, bounds, kept",
    [
        (4, (0.2, 0.8), [1, 2, 3]),
        (5, (0.2, 0.8), [1, 2, 3, 4]),
        (8, (0.1, 0.9), [*range(1, 8)]),
        (2, (0, 1), [0, 1, 2]),
        (25, (0.28, 0.72), [*range(7, 19)]),  # 0.28 * 25 is 7.000000000000001
    ],
)
def test_the_filter_counts_and_includes_its_bounds(size, bounds, kept):
    correct = torch.arange(size)[None] < torch.arange(size + 1)[:, None]  # 0 ... size right responses
    assert keep_groups(correct, *bounds).nonzero().flatten().tolist() == kept


def test_ranked_pairs():
    ranked, pairs = ranked_pairs(torch.tensor([0.3, 0.1, 0.2, 0.5]), torch.tensor([1.0, 0, 1, 1]), 4)
    assert (ranked.item(), pairs.item()) == (3, 3)
    ranked, pairs = ranked_pairs(torch.tensor([0.3, 0.1, 0.2, 0.5]), torch.tensor([1.0, 0, 0, 0]), 2)
    assert (ranked.item(), pairs.item()) == (1, 1)
    ranked, pairs = ranked_pairs(torch.zeros(4), torch.tensor([1.0, 0, 0, 0]), 4)  # phi is the reference at first
    assert (ranked.item(), pairs.item()) == (1.5, 3)


def test_the_token_that_decides_is_singled_out():
    """Responses of 6 random tokens of 8; right if token 3 occurs. A table of log-probs learns from outcomes alone.

    In the end r = .90 for token 3 and -.15 to -.39 for the seven others.
    """
    generator = torch.Generator().manual_seed(0)
    table = torch.zeros(8, dtype=torch.float64, requires_grad=True)  # log phi; log ref is uniform
    optimizer = torch.optim.Adam([table], lr=0.2)
    ref, mask = torch.full((256, 6), -math.log(8), dtype=torch.float64), torch.ones(256, 6, dtype=torch.bool)
    for _ in range(200):
        ids = torch.randint(8, (256, 6), generator=generator)
        correct = (ids == 3).any(1).double()
        prm_loss(table.log_softmax(0)[ids], ref, mask, 1.0, correct).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    learned = table.detach().log_softmax(0)[None]
    rewards = implicit_rewards(learned, torch.full_like(learned, -math.log(8)), torch.ones(1, 8).bool(), 1.0)[0]
    others = rewards[torch.arange(8) != 3]
    assert rewards[3] > 0.5 and others.max() < 0, rewards
    assert rewards[3] - others.max() > 4 * (others.max() - others.min()), rewards
