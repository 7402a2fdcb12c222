"""REINFORCE++: the rewards to come, with and without the group's mean, whitened over the batch."""

import pytest
import torch

from algos import ppo
from algos.reinforce_pp import compute_advantages, reward_tokens, whiten

ALL = torch.ones(2, 2, dtype=torch.bool)


def test_by_hand():
    rewards = torch.tensor([[0.0, 1.0], [-0.1, 0.0]])
    advantages = compute_advantages(rewards, torch.tensor([1.0, -0.1]), ALL, 1, "none")
    assert torch.allclose(advantages, torch.tensor([[1.0, 1.0], [-0.1, 0.0]]))
    expected = torch.tensor([[0.864068, 0.864068], [-0.946360, -0.781776]])
    assert torch.allclose(whiten(advantages, ALL), expected, atol=1e-6)


def test_the_group_baseline_by_hand():
    """Two prompts, an easy and a hard one: without their means the wrong answer to the easy one is the average."""
    scores, mask = torch.tensor([1.0, 0.0, 0.0, 0.0]), torch.ones(4, 1, dtype=torch.bool)
    rewards = reward_tokens(scores, torch.zeros(4, 1), None, mask, 0.0)
    plain = compute_advantages(rewards, scores, mask, 2, "none")
    group = compute_advantages(rewards, scores, mask, 2, "group")
    assert plain.flatten().tolist() == [1.0, 0.0, 0.0, 0.0]
    assert group.flatten().tolist() == [0.5, -0.5, 0.0, 0.0]
    # mean 1/4 and variance 1/4; mean 0 and variance 1/6
    assert torch.allclose(whiten(plain, mask).flatten(), torch.tensor([1.5, -0.5, -0.5, -0.5]), atol=1e-6)
    assert torch.allclose(whiten(group, mask).flatten(), 1.5**0.5 * torch.tensor([1.0, -1.0, 0.0, 0.0]), atol=1e-6)


def slow(scores, old, ref, mask, kl_coef, group_size, baseline):
    """One token at a time."""
    out = torch.zeros_like(old)
    for i in range(len(mask)):
        first = i // group_size * group_size
        mean = sum(map(float, scores[first : first + group_size])) / group_size
        tokens = [t for t in range(mask.shape[1]) if mask[i, t]]
        for place, t in enumerate(tokens):
            penalty = sum(kl_coef * float(old[i, s] - ref[i, s]) for s in tokens[place:])
            out[i, t] = float(scores[i]) - penalty - mean * (baseline == "group")
    chosen = [float(out[i, t]) for i in range(len(mask)) for t in range(mask.shape[1]) if mask[i, t]]
    mean = sum(chosen) / len(chosen)
    variance = sum((x - mean) ** 2 for x in chosen) / (len(chosen) - 1)
    return torch.where(mask, (out - mean) / (variance + 1e-8) ** 0.5, 0.0)


@pytest.mark.parametrize("baseline", ["none", "group"])
def test_advantages_match_the_slow_reference(baseline):
    for seed in range(100):
        generator = torch.Generator().manual_seed(seed)
        old, ref = torch.randn(2, 6, 7, generator=generator, dtype=torch.float64)
        scores = torch.rand(6, generator=generator, dtype=torch.float64)
        mask = torch.rand(6, 7, generator=generator) < 0.6  # with holes, and rows without a token
        rewards = reward_tokens(scores, old, ref, mask, 0.3)
        found = whiten(compute_advantages(rewards, scores, mask, 3, baseline), mask)
        assert torch.allclose(found, slow(scores, old, ref, mask, 0.3, 3, baseline)), seed


def test_nothing_outside_the_mask_matters():
    mask = torch.tensor([[True, False, True], [True, True, False]])
    rewards = torch.tensor([[0.0, 9.0, 1.0], [0.0, 0.5, 9.0]])
    dirty = torch.where(mask, rewards, torch.nan)
    scores = torch.tensor([1.0, 0.5])
    clean = compute_advantages(rewards, scores, mask, 2, "group")
    assert torch.equal(compute_advantages(dirty, scores, mask, 2, "group"), clean)
    assert torch.allclose(clean, torch.tensor([[0.25, 0.0, 0.25], [-0.25, -0.25, 0.0]]))


def test_whitening_makes_scale_and_a_constant_of_the_reward_irrelevant():
    generator = torch.Generator().manual_seed(0)
    scores, mask = torch.rand(8, generator=generator), torch.rand(8, 5, generator=generator) < 0.7
    mask[:, 0] = True

    def white(scores: torch.Tensor) -> torch.Tensor:
        rewards = reward_tokens(scores, torch.zeros(8, 5), None, mask, 0.0)
        return whiten(compute_advantages(rewards, scores, mask, 1, "none"), mask)

    assert torch.allclose(white(scores), white(7 * scores - 3), atol=1e-4)


@pytest.mark.parametrize("baseline", ["none", "group"])
@pytest.mark.parametrize("score", [0.0, 0.1, 0.7, 1 / 3, 1.0])
def test_equal_rewards_give_exactly_zero(score, baseline):
    """The sum of 40,000 times 0.7 is rounded; divided by a standard deviation near 0 that would be a step of noise."""
    scores, mask = torch.full((800,), score), torch.ones(800, 50, dtype=torch.bool)
    rewards = reward_tokens(scores, torch.zeros(800, 50), None, mask, 0.0)
    assert (whiten(compute_advantages(rewards, scores, mask, 8, baseline), mask) == 0).all()


def test_without_a_baseline_it_is_ppo_whose_critic_says_zero():
    generator = torch.Generator().manual_seed(1)
    old, ref = torch.randn(2, 6, 7, generator=generator, dtype=torch.float64)
    scores, mask = torch.rand(6, generator=generator), torch.rand(6, 7, generator=generator) < 0.6
    rewards = reward_tokens(scores, old, ref, mask, 0.3)
    theirs, _ = ppo.compute_advantages(rewards, torch.zeros(6, 7).double(), mask, 1.0, 1.0)
    assert torch.allclose(compute_advantages(rewards, scores, mask, 1, "none"), theirs)


def test_equal_scores_of_a_group_are_exactly_zero():
    """In float32 the mean of sixteen scores of 100.7 is not 100.7, and whitening would enlarge the rounding."""
    mask, scores = torch.ones(32, 1, dtype=torch.bool), torch.tensor([100.7, 30.3]).repeat_interleave(16)
    advantages = compute_advantages(reward_tokens(scores, None, None, mask, 0.0), scores, mask, 16, "group")
    assert not advantages.any()
