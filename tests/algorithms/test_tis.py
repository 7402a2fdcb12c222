"""Truncated importance sampling is the same in every algorithm. Its metrics are logged even when it is off."""

import importlib
import inspect
import math
from types import SimpleNamespace

import pytest
import torch
from by_hand import BY_TOKEN, MEANS_OF_RESPONSES, SUMS_OF_TOKENS
from cases import ALGORITHMS

from common.rollout.rollout import collate
from common.run.tracking import Metrics

OLD, SAMPLED = (0.9, 0.3, 0.05), (0.8, 0.1, 0.1)  # the trainer's and the engine's probabilities of three tokens


def tensors() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Log-probs (1, 4) of both sides, NaN outside the mask, and the mask."""
    old, sampled = (torch.tensor([[*map(math.log, chances), math.nan]]) for chances in (OLD, SAMPLED))
    return old, sampled, torch.tensor([[True, True, True, False]])


@pytest.mark.parametrize("name", ALGORITHMS)
def test_weights_are_the_ratio_up_to_the_cap(name):
    weights = importlib.import_module(f"algos.{name}").rollout_weights
    assert weights(*tensors(), 2.0).tolist() == [pytest.approx([1.125, 2.0, 0.5, 1.0])]
    assert weights(*tensors(), 5.0).tolist() == [pytest.approx([1.125, 3.0, 0.5, 1.0])]


@pytest.mark.parametrize("name", MEANS_OF_RESPONSES + SUMS_OF_TOKENS)
def test_weights_multiply_each_token_of_the_policy_loss_but_not_the_kl(name):
    module = importlib.import_module(f"algos.{name}")
    logprobs = torch.tensor([[-1.0, -2.0]], requires_grad=True)
    mask = torch.tensor([[True, True]])
    advantages = torch.ones(1, 2) if name in BY_TOKEN else torch.ones(1)
    settings = {"clip_low": 0.2, "clip_high": 0.2, "denominator": 1.0}
    known = inspect.signature(module.policy_loss).parameters
    settings |= {keyword: value for keyword, value in {"clip_dual": 3.0, "kl_coef": 0.5}.items() if keyword in known}
    references = (logprobs.detach() + 0.1,) if "ref_logprobs" in known else ()

    def gradient(**weights) -> torch.Tensor:
        loss = module.policy_loss(logprobs, logprobs.detach(), *references, advantages, mask, **settings, **weights)
        return torch.autograd.grad(loss, logprobs)[0]

    plain, weighed = gradient(), gradient(token_weights=torch.tensor([[0.5, 2.0]]))
    policy = torch.full(
        (1, 2), -1.0 / (2 if name in MEANS_OF_RESPONSES else 1)
    )  # the mean over the response's two tokens
    torch.testing.assert_close(weighed - plain, policy * torch.tensor([[-0.5, 1.0]]))


def test_metrics_of_the_gap(world):
    """KL is the mean of e^d - 1 - d. One of three weights is over 2. The effective size is (sum w)^2 / sum w^2."""
    old, sampled, _ = tensors()
    batch = collate([[1]], [[5, 6, 7]], [sampled[0, :3].tolist()], [True], 4, torch.device("cpu"))
    metrics = Metrics(world)
    metrics.mismatch(old[:, :3], batch, 6)
    total = {name: sum(float(a) for a, _ in entries) for name, entries in metrics.sums.items()}
    ratios = [1.125, 3.0, 0.5]
    assert total["mismatch/kl"] == pytest.approx(sum(w - 1 - math.log(w) for w in ratios), rel=1e-5)
    assert total["mismatch/weight_over_2_frac"] == 1 and total["mismatch/staleness"] == 2 * 3
    assert total["mismatch/effective_frac"] == pytest.approx(sum(ratios) ** 2 / sum(w * w for w in ratios), rel=1e-5)


@pytest.mark.parametrize("exact", [True, False])
def test_the_gap_of_stale_tokens_is_told_from_rounding(world, exact):
    """The second token is an update old, and the third an environment's. The second row had no forward."""
    logprobs = [[-1.0, -2.0, 0.0, -3.0], [-1.0]]
    versions = [[7, 6, 0, 7], [7]]
    batch = collate(
        [[1]] * 2, [[5] * 4, [5]], logprobs, [True] * 2, versions, "cpu", [[True, True, False, True], [True]]
    )
    old = torch.tensor([[-1.25, -4.0, -9.0, -3.5], [9.0, 0.0, 0.0, 0.0]])
    metrics = Metrics(world)
    metrics.mismatch_by_age(old, batch, 7, torch.tensor([True, False]), exact=exact)
    recorded = {name: entry for name, (entry,) in metrics.sums.items()}
    assert recorded["mismatch/stale_abs_mean"] == (2.0, 1)
    rounding = {"mismatch/rounding_abs_mean": (0.25 + 0.5, 2), "mismatch/current_tokens": (2, None)}
    assert {name: recorded[name] for name in recorded.keys() & rounding.keys()} == (rounding if exact else {})


@pytest.mark.parametrize(
    "versions, missing", [([6, 6], "mismatch/rounding_abs_mean"), ([7, 7], "mismatch/stale_abs_mean")]
)
def test_a_step_without_tokens_of_an_age_has_no_gap_of_that_age(world, versions, missing):
    """0 would look like perfect agreement."""
    batch = collate([[1]], [[5, 5]], [[-1.0, -2.0]], [True], [versions], "cpu")
    metrics = Metrics(world)
    metrics.mismatch_by_age(torch.tensor([[-1.25, -4.0]]), batch, 7, None, exact=True)
    assert metrics.sums[missing] == [(0, 0)], "a mean of nothing, which Tracker leaves out"


def test_the_effective_size_is_that_of_all_ranks_together():
    """100 weights of 1 here and 100 of 2 on the other rank: (100 + 200)^2 / (100 + 400) / 200 = 0.9."""
    others = iter([100.0, 200.0, 400.0])
    metrics = Metrics(SimpleNamespace(size=2, sum=lambda own: float(own) + next(others)))
    batch = collate([[1]], [[5] * 100], [[-1.0] * 100], [True], 0, torch.device("cpu"))
    metrics.mismatch(torch.full((1, 100), -1.0), batch, 0)
    ((own, count),) = metrics.sums["mismatch/effective_frac"]
    assert 2 * own / (2 * int(count)) == pytest.approx(0.9)


def test_a_step_that_trained_on_nothing_has_no_gap(world):
    """0 would read as a perfect agreement of trainer and engine."""
    batch = collate([[1], [2]], [[5], [6]], [[-1.0], [-2.0]], [True, True], [[1], [2]], torch.device("cpu"))
    metrics = Metrics(world)
    metrics.mismatch(torch.zeros(2, 1), batch, 3, torch.tensor([False, False]))
    assert list(metrics.sums) == ["mismatch/staleness"] and list(metrics.maxima) == ["mismatch/staleness_max"]


def test_metrics_of_rows_that_were_not_trained_on_are_left_out(world):
    batch = collate([[1], [2]], [[5], [6]], [[-1.0], [-2.0]], [True, True], [[1], [2]], torch.device("cpu"))
    metrics = Metrics(world)
    metrics.mismatch(torch.tensor([[-1.5], [9.0]]), batch, 3, torch.tensor([True, False]))
    total = {name: sum(float(a) for a, _ in entries) for name, entries in metrics.sums.items()}
    assert total["mismatch/logprob_abs_mean"] == 0.5
    assert total["mismatch/staleness"] == 2 + 1  # all rows count: it is known before any is trained on
