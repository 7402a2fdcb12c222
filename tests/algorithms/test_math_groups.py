"""Advantages inside a group -- GRPO, Dr. GRPO, RLOO, DAPO -- and the KL terms, against numbers worked out by hand."""

import itertools
import math
import statistics

import pytest
import torch

from algos import cispo, dapo, dr_grpo, grpo, gspo, max_rl, rloo
from algos.grpo import kl_to_reference

MODULES = {"grpo": grpo, "dr_grpo": dr_grpo, "max_rl": max_rl, "gspo": gspo, "cispo": cispo, "rloo": rloo, "dapo": dapo}
names = pytest.mark.parametrize("name", MODULES)


def slow_advantages(name: str, rewards: list[float], size: int) -> list[float]:
    """One response at a time, as the papers write it."""
    out = []
    for i, reward in enumerate(rewards):
        group = rewards[i // size * size : (i // size + 1) * size]
        others = [x for j, x in enumerate(group) if j != i % size]
        if max(group) == min(group):
            out.append(0.0)
        elif name == "rloo":
            out.append(reward - sum(others) / len(others))
        else:
            unit = {"dr_grpo": 1.0, "max_rl": statistics.mean(group)}.get(name, statistics.stdev(group) + 1e-6)
            out.append((reward - statistics.mean(group)) / unit)
    return out


@pytest.mark.parametrize(
    "name, rewards, expected",
    [
        ("grpo", [1, 0, 0, 0], [1.499997, -0.499999, -0.499999, -0.499999]),
        ("grpo", [1, 1, 0, 0], [0.866024, 0.866024, -0.866024, -0.866024]),
        ("grpo", [2, 0.5, -1, 0.5], [1.224744, 0.0, -1.224744, 0.0]),
        ("dr_grpo", [1, 0, 0, 0], [0.75, -0.25, -0.25, -0.25]),
        ("dr_grpo", [1, 1, 0, 0], [0.5, 0.5, -0.5, -0.5]),
        ("dr_grpo", [2, 0.5, -1, 0.5], [1.5, 0.0, -1.5, 0.0]),
        ("max_rl", [1, 0, 0, 0], [3.0, -1.0, -1.0, -1.0]),
        ("max_rl", [1, 1, 1, 0], [1 / 3, 1 / 3, 1 / 3, -1.0]),
        ("max_rl", [1, -1, -1, -1], [0.0, 0.0, 0.0, 0.0]),  # the mean of negative rewards is no probability
        ("rloo", [1, 0, 0, 0], [1.0, -1 / 3, -1 / 3, -1 / 3]),
        ("rloo", [1, 1, 0, 0], [2 / 3, 2 / 3, -2 / 3, -2 / 3]),
        ("rloo", [2, 0.5, -1, 0.5], [2.0, 0.0, -2.0, 0.0]),
        ("dapo", [1, -1, -1, -1], [1.499997, -0.499999, -0.499999, -0.499999]),
    ],
)
def test_advantages_by_hand(name, rewards, expected):
    advantages = MODULES[name].compute_advantages(torch.tensor(rewards, dtype=torch.float32), group_size=4)
    assert torch.allclose(advantages, torch.tensor(expected), atol=1e-5)


def test_max_rl_follows_the_likelihood_of_being_right():
    """Over all draws of G rewards from a policy that is right with probability p = sigmoid(z), the expected gradient is
    that of the first G - 1 terms of log p = - sum_k (1 - p)^k / k. Dr. GRPO's is (G - 1) / G of that of p.
    """
    size, p = 5, 0.3
    for module, slope in ((max_rl, sum((1 - p) ** k for k in range(size - 1))), (dr_grpo, (size - 1) / size)):
        expected = 0.0
        for draw in itertools.product((0.0, 1.0), repeat=size):
            chance = math.prod(p if right else 1 - p for right in draw)
            advantages = module.compute_advantages(torch.tensor(draw, dtype=torch.float64), size)
            scores = torch.tensor([1 - p if right else -p for right in draw], dtype=torch.float64)  # d log P(draw) / dz
            expected += chance * (advantages * scores).mean().item()
        assert expected == pytest.approx(slope * p * (1 - p), abs=1e-12), module.__name__  # d p / dz = p (1 - p)


@names
def test_advantages_match_the_slow_reference(name):
    for seed in range(100):
        generator = torch.Generator().manual_seed(seed)
        size = 2 + seed % 7
        rewards = torch.rand(5 * size, generator=generator, dtype=torch.float64).round(decimals=seed % 3)  # with ties
        advantages = MODULES[name].compute_advantages(rewards, size)
        assert advantages.tolist() == pytest.approx(slow_advantages(name, rewards.tolist(), size), abs=1e-9), seed


@names
@pytest.mark.parametrize("size", [2, 12, 16])
def test_equal_rewards_give_exactly_zero(name, size):
    """In float32 the mean of sixteen times 0.7 is not 0.7; with mean and std alone |A| would be 0.06 to 0.11."""
    assert (MODULES[name].compute_advantages(torch.full((size,), 0.7), size) == 0).all()


@names
def test_advantage_properties(name):
    compute_advantages = MODULES[name].compute_advantages
    rewards = torch.randn(40, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    if name == "max_rl":
        rewards = rewards.abs()
    advantages = compute_advantages(rewards, 8)
    assert advantages.view(-1, 8).sum(1).abs().max() < 1e-9
    same = torch.allclose(compute_advantages(rewards + 3, 8), advantages)
    assert same == (name != "max_rl")  # a mean that is a probability cannot be shifted
    scale = 7 if name in ("dr_grpo", "rloo") else 1
    assert torch.allclose(compute_advantages(rewards * 7, 8), advantages * scale, atol=1e-5)
    order = torch.randperm(8, generator=torch.Generator().manual_seed(1))
    shuffled = rewards.view(-1, 8)[:, order].reshape(-1)
    assert torch.allclose(compute_advantages(shuffled, 8), advantages.view(-1, 8)[:, order].reshape(-1))
    groups = torch.tensor([3, 1, 4, 0, 2])
    assert torch.allclose(
        compute_advantages(rewards.view(-1, 8)[groups].reshape(-1), 8), advantages.view(-1, 8)[groups].reshape(-1)
    )


def test_the_three_differ_by_a_factor():
    rewards = torch.randn(24, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    centred = dr_grpo.compute_advantages(rewards, 4)
    assert torch.allclose(rloo.compute_advantages(rewards, 4), centred * 4 / 3)
    std = rewards.view(-1, 4).std(1).repeat_interleave(4)
    assert torch.allclose(grpo.compute_advantages(rewards, 4), centred / std, atol=1e-5)


def test_grpo_with_a_larger_eps():  # eps 1e-4, as some peers take it
    advantages = grpo.compute_advantages(torch.tensor([1.0, 0, 0, 0]), 4, eps=1e-4)
    assert torch.allclose(advantages, torch.tensor([1.4997, -0.4999, -0.4999, -0.4999]), atol=1e-5)


def test_binary_rewards_have_a_closed_form():
    for size in (2, 5, 8):
        for right in range(1, size):
            rewards = torch.tensor([1.0] * right + [0.0] * (size - right))
            p, bessel = right / size, math.sqrt((size - 1) / size)
            advantages = grpo.compute_advantages(rewards, size)
            assert advantages[0].item() == pytest.approx(math.sqrt((1 - p) / p) * bessel, rel=1e-5)
            assert advantages[-1].item() == pytest.approx(-math.sqrt(p / (1 - p)) * bessel, rel=1e-5)


@pytest.mark.parametrize(
    "length, penalty",
    [(16384, 0.0), (16385, -0.000244), (17408, -0.25), (18432, -0.5), (20480, -1.0), (30000, -1.0)],
)
def test_overlong_penalty_by_hand(length, penalty):
    out = dapo.overlong_penalty(torch.tensor([length]), max_len=20480, cache_len=4096)
    assert out.item() == pytest.approx(penalty, abs=1e-6)


def test_overlong_penalty_without_a_cache_is_a_step_and_scales():
    assert dapo.overlong_penalty(torch.tensor([9, 10]), 10, 0, factor=0.5).tolist() == [0.0, -0.5]


def test_kept_groups_have_right_and_wrong_responses():
    correct = torch.tensor([[1, 1, 0, 0], [1, 1, 1, 1], [0, 0, 0, 0]], dtype=torch.bool)
    assert dapo.keep_groups(correct).tolist() == [True, False, False]


def test_a_group_of_right_answers_is_dropped_though_its_lengths_differ():
    lengths = torch.tensor([100, 100, 100, 20480])
    shaped = 1 + dapo.overlong_penalty(lengths, 20480, 4096)
    assert shaped.tolist() == [1, 1, 1, 0] and not dapo.keep_groups(torch.ones(1, 4, dtype=torch.bool)).item()


# KL to a reference: p = (.5, .3, .2) from logits, q = (.4, .4, .2); exact expectations over the three tokens.
P, Q = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64), torch.tensor([0.4, 0.4, 0.2], dtype=torch.float64)


def test_k3_in_the_loss_has_the_gradient_of_the_reverse_kl():
    logits = P.log().clone().requires_grad_()
    logprobs = logits.log_softmax(-1)
    kl = kl_to_reference(logprobs[None], Q.log()[None], torch.ones(1, 3, dtype=torch.bool))[0]
    assert (P * kl.detach()).sum().item() == pytest.approx(0.025267, abs=1e-6)  # its value is KL(p|q)
    (P * kl).sum().backward()
    assert torch.allclose(logits.grad, torch.tensor([0.1, -0.1, 0.0], dtype=torch.float64), atol=1e-6)  # not its slope


def test_k1_in_the_reward_has_the_gradient_of_the_kl():
    """REINFORCE with -kl as reward: the gradient of the loss is that of KL(p|q), exactly."""
    logits = P.log().clone().requires_grad_()
    logprobs = logits.log_softmax(-1)
    mask = torch.ones(3, 1, dtype=torch.bool)
    kl = rloo.sequence_kl(logprobs.detach()[:, None], Q.log()[:, None], mask)  # (3,), one token each
    assert (P * kl).sum().item() == pytest.approx(0.025267, abs=1e-6)
    (P * kl * logprobs).sum().backward()
    assert torch.allclose(logits.grad, torch.tensor([0.098938, -0.093885, -0.005053], dtype=torch.float64), atol=1e-6)


def test_sequence_kl_is_a_sum_over_the_response():
    old, ref = torch.tensor([[-1.0, -2.0, 5.0]]), torch.tensor([[-1.5, -1.0, torch.nan]])
    assert rloo.sequence_kl(old, ref, torch.tensor([[True, True, False]])).tolist() == [-0.5]


def test_kl_to_reference_is_never_negative_and_blind_outside_the_mask():
    ref = torch.tensor([[-1.0, -2.0, torch.nan]])
    kl = kl_to_reference(torch.tensor([[-1.0, -1.0, -1.0]]), ref, torch.tensor([[True, True, False]]))
    assert torch.allclose(kl, torch.tensor([[0.0, math.exp(-1), 0.0]]))


@pytest.mark.parametrize(
    "ref, value, slope", [(-1000.0, 998.0, 1.0), (-26.0, 24.0, 1.0), (200.0, math.exp(20) - 21, 0.0)]
)
def test_kl_to_reference_pulls_on_tokens_that_the_reference_hardly_knows(ref, value, slope):
    """And it stays finite if the reference is far above, where exp() would not."""
    logprobs = torch.tensor([[-1.0]], requires_grad=True)
    kl = kl_to_reference(logprobs, torch.tensor([[ref]]), torch.tensor([[True]]))
    kl.sum().backward()
    assert kl.item() == pytest.approx(value, rel=1e-6) and logprobs.grad.item() == pytest.approx(slope)
