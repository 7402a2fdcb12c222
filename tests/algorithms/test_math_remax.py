"""ReMax: token rewards and their sums to come, minus the greedy response's score."""

import pytest
import torch

from algos import ppo
from algos.remax import compute_advantages, reward_tokens

ALL = torch.ones(1, 3, dtype=torch.bool)


def test_without_kl_by_hand():
    rewards = reward_tokens(torch.tensor([1.0]), torch.zeros(1, 3), None, ALL, 0.0)
    assert rewards.tolist() == [[0, 0, 1]]
    assert compute_advantages(rewards, torch.tensor([0.0]), ALL).tolist() == [[1, 1, 1]]
    assert compute_advantages(rewards, torch.tensor([1.0]), ALL).tolist() == [[0, 0, 0]]


def test_with_kl_by_hand():
    k1 = torch.tensor([[0.1, -0.2, 0.3]])
    rewards = reward_tokens(torch.tensor([1.0]), k1 - 1, torch.full((1, 3), -1.0), ALL, 0.5)
    assert torch.allclose(rewards, torch.tensor([[-0.05, 0.1, 0.85]]))
    advantages = compute_advantages(rewards, torch.tensor([0.5]), ALL)
    assert torch.allclose(advantages, torch.tensor([[0.4, 0.45, 0.35]]))


def slow(scores, greedy, old, ref, mask, kl_coef):
    out = torch.zeros_like(old)
    for i in range(len(mask)):
        tokens = [t for t in range(mask.shape[1]) if mask[i, t]]
        for place, t in enumerate(tokens):
            penalty = sum(kl_coef * float(old[i, s] - ref[i, s]) for s in tokens[place:])
            out[i, t] = float(scores[i]) - penalty - float(greedy[i])
    return out


def test_advantages_match_the_slow_reference():
    for seed in range(100):
        generator = torch.Generator().manual_seed(seed)
        old, ref = torch.randn(2, 6, 7, generator=generator, dtype=torch.float64)
        scores, greedy = torch.rand(2, 6, generator=generator, dtype=torch.float64).round()
        mask = torch.rand(6, 7, generator=generator) < 0.6  # with holes, and rows without a token
        rewards = reward_tokens(scores, old, ref, mask, 0.3)
        expected = slow(scores, greedy, old, ref, mask, 0.3)
        assert torch.allclose(compute_advantages(rewards, greedy, mask), expected), seed


@pytest.mark.parametrize("mask, last", [([1, 0, 1, 0], 2), ([1, 1, 0, 0], 1), ([0, 0, 0, 1], 3), ([0, 0, 0, 0], None)])
def test_the_score_stands_on_the_last_chosen_token(mask, last):
    mask = torch.tensor([mask], dtype=torch.bool)
    rewards = reward_tokens(torch.tensor([2.0]), torch.full((1, 4), torch.nan), None, mask, 0.1)
    assert rewards.tolist() == [[2.0 if t == last else 0.0 for t in range(4)]]


def test_equal_scores_give_exactly_zero():
    rewards = reward_tokens(torch.full((3,), 0.7), torch.zeros(3, 50), None, torch.ones(3, 50, dtype=torch.bool), 0.0)
    assert (compute_advantages(rewards, torch.full((3,), 0.7), torch.ones(3, 50, dtype=torch.bool)) == 0).all()


def test_nothing_outside_the_mask_matters():
    mask = torch.tensor([[True, False, True]])
    old = torch.tensor([[-1.0, torch.nan, -2.0]])
    rewards = reward_tokens(torch.tensor([1.0]), old, old - 0.5, mask, 0.1)
    assert torch.allclose(rewards, torch.tensor([[-0.05, 0.0, 0.95]]))
    dirty = torch.where(mask, rewards, torch.nan)
    assert torch.allclose(
        compute_advantages(dirty, torch.zeros(1), mask), compute_advantages(rewards, torch.zeros(1), mask)
    )


def test_ppo_rewards_tokens_alike():
    k1 = torch.tensor([[0.5, 0.25, 0.8]]).log() - torch.tensor([[0.4, 0.5, 0.8]]).log()
    rewards = ppo.reward_tokens(torch.tensor([1.0]), k1, torch.zeros(1, 3), ALL, 0.05)
    assert torch.allclose(rewards, torch.tensor([[-0.011157, 0.034657, 1.0]]), atol=1e-6)
    advantages, _ = ppo.compute_advantages(rewards, torch.tensor([[0.2, 0.4, 0.6]]), ALL, 1.0, 0.95)
    assert torch.allclose(advantages, torch.tensor([[0.772767, 0.614657, 0.4]]), atol=1e-6)
