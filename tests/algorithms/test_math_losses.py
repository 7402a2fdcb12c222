"""policy_loss of all algorithms: against a slow loop over the paper's formula, and what no loss may depend on."""

import importlib
import inspect
import math

import cases
import pytest
import torch
from by_hand import BY_TOKEN, MEANS_OF_RESPONSES, SUMS_OF_TOKENS

from algos import cispo, grpo, gspo

CLIP = {"clip_low": 0.2, "clip_high": 0.28}


def described(name: str) -> tuple:
    """(module, keywords of its loss beside the clip, its advantages are (n, T), it has a KL term)"""
    module = importlib.import_module(f"algos.{name}")
    known = inspect.signature(module.policy_loss).parameters
    keywords = {keyword: value for keyword, value in {"kl_coef": 0.04, "clip_dual": 3.0}.items() if keyword in known}
    return module, keywords, name in BY_TOKEN, "ref_logprobs" in known


ALGORITHMS = {name: described(name) for name in cases.ALGORITHMS}
names = pytest.mark.parametrize("name", ALGORITHMS)
of_known_kinds = pytest.mark.parametrize("name", MEANS_OF_RESPONSES + SUMS_OF_TOKENS)
# The value of CISPO's loss means nothing; its gradient is what counts.
clipping = pytest.mark.parametrize("name", [name for name in MEANS_OF_RESPONSES + SUMS_OF_TOKENS if name != "cispo"])


def random_batch(name: str, seed: int, n: int = 6, t: int = 7):
    """Log-probs now, old and reference (n, T), advantages of the algorithm's shape, and a mask with holes."""
    generator = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)
    mask = torch.rand(n, t, generator=generator) < 0.7
    mask[:, 0] = True
    old = draw(n, t) - 2
    advantages = draw(n, t) if ALGORITHMS[name][2] else draw(n)
    return old + 0.5 * draw(n, t), old, old + 0.3 * draw(n, t), advantages, mask


def loss_of(name: str, logprobs, old, ref, advantages, mask, denominator=10.0, **changed):
    module, keywords, _, has_kl = ALGORITHMS[name]
    keywords = {**CLIP, **keywords, **changed, "denominator": denominator}
    return module.policy_loss(logprobs, old, *([ref] if has_kl else []), advantages, mask, **keywords)


def slow_loss(name: str, logprobs, old, ref, advantages, mask, denominator=10.0) -> float:
    """One token at a time, as the papers write it."""
    keywords, total = ALGORITHMS[name][1], 0.0
    for i in range(len(mask)):
        tokens = [t for t in range(mask.shape[1]) if mask[i, t]]
        row, mean = 0.0, sum(float(logprobs[i, t] - old[i, t]) for t in tokens) / len(tokens)
        for t in tokens:
            advantage = float(advantages[i, t] if advantages.dim() == 2 else advantages[i])
            ratio = math.exp(mean if name == "gspo" else logprobs[i, t] - old[i, t])
            objective = min(ratio * advantage, min(max(ratio, 0.8), 1.28) * advantage)
            if name == "cispo":
                objective = min(max(ratio, 0.8), 1.28) * advantage * float(logprobs[i, t])
            if name == "dapo" and advantage < 0:
                objective = max(objective, 3.0 * advantage)
            row -= objective
            if "kl_coef" in keywords:
                log_r = float(ref[i, t] - logprobs[i, t])
                row += keywords["kl_coef"] * (math.exp(log_r) - log_r - 1)
        total += row / len(tokens) if name in MEANS_OF_RESPONSES else row
    return total / denominator


@of_known_kinds
def test_loss_matches_the_slow_reference(name):
    for seed in range(100):
        batch = random_batch(name, seed)
        assert loss_of(name, *batch).item() == pytest.approx(slow_loss(name, *batch), rel=1e-9), seed


@pytest.mark.parametrize(
    "ratio, positive, positive_grad, negative, negative_grad, dual, dual_grad",
    [
        (0.50, -0.50, -0.50, 0.80, 0.0, 0.80, 0.0),
        (1.00, -1.00, -1.00, 1.00, 1.0, 1.00, 1.0),
        (1.25, -1.25, -1.25, 1.25, 1.25, 1.25, 1.25),
        (1.50, -1.28, 0.0, 1.50, 1.50, 1.50, 1.50),
        (5.00, -1.28, 0.0, 5.00, 5.00, 3.00, 0.0),  # without dual clip it is not bounded
    ],
)
@clipping
def test_clip_table(name, ratio, positive, positive_grad, negative, negative_grad, dual, dual_grad):
    module, _, token_level, has_kl = ALGORITHMS[name]
    if name == "dapo":
        negative, negative_grad = dual, dual_grad
    for advantage, value, slope in ((1.0, positive, positive_grad), (-1.0, negative, negative_grad)):
        logprobs = torch.full((1, 1), math.log(ratio), dtype=torch.float64, requires_grad=True)
        advantages = torch.full((1, 1) if token_level else (1,), advantage)
        given = (torch.zeros(1, 1), *([None] if has_kl else []), advantages, torch.ones(1, 1, dtype=torch.bool))
        keywords = {**CLIP, **ALGORITHMS[name][1]}
        loss = module.policy_loss(logprobs, *given, **keywords, denominator=1)
        loss.backward()
        assert loss.item() == pytest.approx(value) and logprobs.grad.item() == pytest.approx(slope)
        counted = module.clipped_tokens(
            logprobs, given[0], advantages, given[-1], **{k: v for k, v in keywords.items() if k != "kl_coef"}
        )
        assert counted == (slope == 0)


@names
def test_a_float_mask_of_zeros_and_ones_is_as_good_as_a_bool_mask(name):
    """Code for verl or TRL has float masks."""
    logprobs, old, ref, advantages, mask = random_batch(name, 3)
    assert not mask.all()
    loss = loss_of(name, logprobs, old, ref, advantages, mask)
    assert torch.equal(loss_of(name, logprobs, old, ref, advantages, mask.float()), loss)
    module = ALGORITHMS[name][0]
    weights = [module.rollout_weights(old, logprobs, each, 2.0) for each in (mask, mask.float())]
    assert torch.equal(*weights)


@of_known_kinds
def test_first_update_is_reinforce(name):
    logprobs, _, _, advantages, mask = random_batch(name, 3)
    logprobs.requires_grad_()
    loss_of(name, logprobs, logprobs.detach(), logprobs.detach(), advantages, mask).backward()
    weights = advantages if advantages.dim() == 2 else advantages[:, None]
    lengths = mask.sum(1, keepdim=True) if name in MEANS_OF_RESPONSES else 1
    assert torch.allclose(logprobs.grad, -weights * mask / lengths / 10)


@clipping
def test_raising_a_good_token_lowers_the_loss(name):
    logprobs, _, _, advantages, mask = random_batch(name, 4)
    good = int((advantages[:, 0] if advantages.dim() == 2 else advantages).argmax())
    raised = logprobs.clone()
    raised[good, 0] += 0.01
    assert loss_of(name, raised, logprobs, logprobs, advantages, mask) < loss_of(
        name, logprobs, logprobs, logprobs, advantages, mask
    )


@names
def test_nothing_outside_the_mask_matters(name):
    logprobs, old, ref, advantages, mask = random_batch(name, 5)
    logprobs.requires_grad_()
    loss_of(name, logprobs, old, ref, advantages, mask).backward()
    pad = torch.full((len(mask), 3), float("nan"), dtype=torch.float64)
    wide = [torch.cat([torch.where(mask, x.detach(), torch.nan), pad], 1) for x in (logprobs, old, ref)]
    wide[0].requires_grad_()
    wide_mask = torch.cat([mask, torch.zeros(len(mask), 3, dtype=torch.bool)], 1)
    if advantages.dim() == 2:
        advantages = torch.cat([torch.where(mask, advantages, 9.0), torch.full_like(pad, 9.0)], 1)
    loss_of(name, *wide, advantages, wide_mask).backward()
    assert torch.equal(wide[0].grad[:, : mask.shape[1]], logprobs.grad)
    assert (wide[0].grad[~wide_mask] == 0).all()


@names
def test_an_empty_row_has_no_loss(name):
    batch = random_batch(name, 6)
    batch[-1][2] = False
    keep = torch.tensor([0, 1, 3, 4, 5])
    assert loss_of(name, *batch).item() == pytest.approx(loss_of(name, *(x[keep] for x in batch)).item())


@names
def test_no_ratio_is_too_large_or_too_small_to_train_on(name):
    """In float32 exp(200) is infinite, and infinity times an advantage of 0 is NaN."""
    far = torch.tensor([[200.0, 200.0], [-200.0, -200.0]]).repeat(3, 1)
    old = torch.full_like(far, -300.0)
    logprobs = (old + far).requires_grad_()
    advantages = torch.tensor([0.0, 0.0, 1.0, 1.0, -1.0, -1.0])
    if ALGORITHMS[name][2]:
        advantages = advantages[:, None].expand_as(far)
    mask = torch.ones_like(far, dtype=torch.bool)
    loss = loss_of(name, logprobs, old, old, advantages, mask)
    loss.backward()
    assert loss.isfinite() and logprobs.grad.isfinite().all()
    weights = ALGORITHMS[name][0].rollout_weights(old + far, old, mask, 1e9)
    assert weights.isfinite().all()


@pytest.mark.parametrize("cuts", [[8], [4, 4], [1, 7], [1] * 8])
@names
def test_micro_batches_add_up(name, cuts):
    logprobs, *rest = random_batch(name, 7, n=8)
    logprobs.requires_grad_()
    loss_of(name, logprobs, *rest).backward()
    whole, logprobs.grad = logprobs.grad, None
    for rows in torch.arange(8).split(cuts):
        loss_of(name, logprobs[rows], *(x[rows] for x in rest)).backward()
    assert torch.allclose(logprobs.grad, whole, rtol=1e-12)


@names
def test_inputs_are_not_changed(name):
    batch = random_batch(name, 8)
    copies = [x.clone() for x in batch]
    loss_of(name, *batch)
    assert all(torch.equal(x, y) for x, y in zip(batch, copies))


@pytest.mark.parametrize(
    "name, denominator, expected",
    [
        ("grpo", 2, 2.25),
        ("dr_grpo", 2 * 4, 1.875),
        ("max_rl", 2 * 4, 1.875),
        ("rloo", 6, 2.5),
        ("dapo", 6, 2.5),
        ("ppo", 6, 2.5),
    ],
)
def test_four_ways_to_aggregate(name, denominator, expected):
    """Token losses 1, 2 and 3, 3, 3, 3, with K = 4: sequences, sequences times K, or tokens below the line."""
    per_token = torch.tensor([[1.0, 2.0, 1.0, 1.0], [3.0, 3.0, 3.0, 3.0]])
    mask = torch.tensor([[1, 1, 0, 0], [1, 1, 1, 1]], dtype=torch.bool)
    advantages = -torch.ones(2, 4) if ALGORITHMS[name][2] else -torch.ones(2)
    off = {"kl_coef": 0.0} if ALGORITHMS[name][3] else {"clip_dual": 99.0} if name == "dapo" else {}
    loss = loss_of(
        name, per_token.log(), torch.zeros(2, 4), torch.zeros(2, 4), advantages, mask, denominator, clip_high=9.0, **off
    )
    assert loss.item() == pytest.approx(expected)


def test_gspo_clips_a_response_as_a_whole():
    """Log-ratios 0.1, -0.3, 0.2 have mean 0: nothing is clipped, where GRPO clips the second token for A < 0. The
    gradient of a response's ratio goes to all its tokens alike.
    """
    old, mask = torch.zeros(1, 3, dtype=torch.float64), torch.ones(1, 3, dtype=torch.bool)
    logprobs = torch.tensor([[0.1, -0.3, 0.2]], dtype=torch.float64, requires_grad=True)
    advantages, settings = torch.tensor([-1.0]), {"kl_coef": 0.0, "denominator": 1.0}
    loss = gspo.policy_loss(logprobs, old, None, advantages, mask, clip_low=3e-4, clip_high=4e-4, **settings)
    loss.backward()
    assert loss.item() == pytest.approx(1.0) and torch.allclose(logprobs.grad, torch.full((1, 3), 1 / 3).double())
    of = {"advantages": advantages, "response_mask": mask, "clip_low": 0.2, "clip_high": 0.2}
    clipped = [module.clipped_tokens(logprobs.detach(), old, **of) for module in (gspo, grpo)]
    assert clipped == [0, 1]
    moved = (logprobs.detach() - 4e-4).requires_grad_()  # its mean is below 1 - 3e-4
    gspo.policy_loss(moved, old, None, advantages, mask, clip_low=3e-4, clip_high=4e-4, **settings).backward()
    assert (moved.grad == 0).all()
    assert gspo.clipped_tokens(moved.detach(), old, **of | {"clip_low": 3e-4, "clip_high": 4e-4}) == 3


def test_cispo_bounds_a_weight_and_keeps_the_gradient():
    """Ratios 0.5, 1 and 8 with a bound of 5 have weights 0.5, 1 and 5. GRPO would drop the last token."""
    old, mask = torch.zeros(1, 3, dtype=torch.float64), torch.ones(1, 3, dtype=torch.bool)
    logprobs = torch.tensor([[0.5, 1.0, 8.0]], dtype=torch.float64).log().requires_grad_()
    settings = {"clip_low": 1.0, "clip_high": 4.0}
    cispo.policy_loss(
        logprobs, old, None, torch.tensor([2.0]), mask, kl_coef=0.0, denominator=1.0, **settings
    ).backward()
    assert torch.allclose(logprobs.grad, -2 * torch.tensor([[0.5, 1.0, 5.0]], dtype=torch.float64))
    assert cispo.clipped_tokens(logprobs.detach(), old, mask, **settings) == 1
    assert cispo.clipped_tokens(logprobs.detach(), old, mask, clip_low=0.4, clip_high=4.0) == 2
