"""An entropy has the gradient of the whole table's entropy if a loss asks for it, and otherwise none."""

import pytest
import torch
from conftest import relative_difference
from transformers import AutoModelForCausalLM

from common.rollout.rollout import collate
from common.trainer import batching, logits, model
from common.trainer.batching import Compute

TEMPERATURE = 0.7
VOCABULARY = 50


def leaves() -> tuple[torch.Tensor, torch.Tensor]:
    """Hidden states (20, 16) and a head (50, 16)."""
    generator = torch.Generator().manual_seed(0)
    hidden, head = (torch.randn(n, 16, generator=generator) for n in (20, VOCABULARY))
    return (0.3 * hidden).requires_grad_(), head.requires_grad_()


def whole_table(hidden, head, shape: logits.LogitShape) -> torch.Tensor:
    """Log-probs (20, 50) in float64."""
    z = hidden.double() @ head.double().t() / shape.temperature
    if shape.cap is not None:
        z = shape.cap * torch.tanh(z / shape.cap)
    never = torch.zeros(VOCABULARY, dtype=torch.bool)
    never[list(shape.never)] = True
    return z.masked_fill(never, logits.NEVER).log_softmax(-1)


def distance(ours, theirs) -> float:
    """The largest relative distance of two lists of gradients."""
    return max(((a.double() - b.double()).norm() / b.double().norm()).item() for a, b in zip(ours, theirs))


TARGETS = torch.arange(20) % 6
OF_LOGPROBS = torch.linspace(-1, 1, 20)  # weights in the loss
OF_ENTROPIES = torch.linspace(2, -1, 20)


@pytest.mark.parametrize("rows_per_chunk", [1, 7, 100])
@pytest.mark.parametrize("cap, never", [(None, ()), (2.0, ()), (None, (7, 49))])
def test_the_gradient_is_that_of_the_whole_vocabulary(monkeypatch, rows_per_chunk, cap, never):
    monkeypatch.setattr(logits, "LOGITS_PER_CHUNK", rows_per_chunk * VOCABULARY + 1)
    hidden, head = leaves()
    shape = logits.LogitShape(TEMPERATURE, cap, never)
    logprobs, entropy = logits.ChunkedLogprobs.apply(hidden, head, TARGETS, shape, True, True)
    table = whole_table(hidden, head, shape)
    expected = -(table.exp() * table).sum(-1)
    assert (entropy - expected).abs().max() <= 1e-6 * expected.max()

    ours = torch.autograd.grad((entropy * OF_ENTROPIES).sum(), (hidden, head), retain_graph=True)
    theirs = torch.autograd.grad((expected * OF_ENTROPIES).sum(), (hidden, head), retain_graph=True)
    assert distance(ours, theirs) <= 1e-6

    both = (logprobs * OF_LOGPROBS + entropy * OF_ENTROPIES).sum()
    both_expected = (table[range(20), TARGETS] * OF_LOGPROBS + expected * OF_ENTROPIES).sum()
    ours = torch.autograd.grad(both, (hidden, head))
    theirs = torch.autograd.grad(both_expected, (hidden, head))
    assert distance(ours, theirs) <= 1e-6


def test_a_head_that_is_not_trained_changes_nothing():
    hidden, head = leaves()
    shape = logits.LogitShape(TEMPERATURE)
    gradients = []
    for trained in (head, head.detach()):
        _, entropy = logits.ChunkedLogprobs.apply(hidden, trained, TARGETS, shape, True, True)
        gradients.append(torch.autograd.grad(entropy.sum(), hidden)[0])
    assert torch.equal(*gradients)


def test_without_the_keyword_nothing_more_is_computed(monkeypatch):
    """The log-probs' gradient is then made by the same function as ever, and a loss that asks for more is an error."""

    def never_called(*arguments):
        raise AssertionError("the gradient of entropies costs time")

    monkeypatch.setattr(logits, "logit_gradient_with_entropy", never_called)
    hidden, head = leaves()
    logprobs, entropy = logits.ChunkedLogprobs.apply(hidden, head, TARGETS, logits.LogitShape(), True)
    logprobs.sum().backward()
    assert not entropy.requires_grad and hidden.grad.abs().sum() > 0


def random_rollout():
    """12 responses to 12 prompts, of random lengths."""
    generator = torch.Generator().manual_seed(1)

    def tokens(most: int) -> list[int]:
        length = int(torch.randint(1, most, (), generator=generator))
        return torch.randint(3, VOCABULARY, (length,), generator=generator).tolist()

    prompts = [tokens(9) for _ in range(12)]
    responses = [tokens(15) for _ in range(12)]
    return collate(prompts, responses, None, [False] * 12, 0, torch.device("cpu"))


def weights_of(rollout) -> torch.Tensor:
    """(N, T): one for each token."""
    return torch.linspace(-1, 1, rollout.response_mask.numel()).view_as(rollout.response_mask)


def gradient(policy, rollout, compute: Compute, world) -> dict[str, torch.Tensor]:
    """Gradient of a weighted sum of entropies, and of log-probs, too, so that neither is mistaken for the other."""
    weights = weights_of(rollout)
    for micro in batching.pack(rollout, torch.arange(len(rollout)), compute, world):
        logprobs, entropy = model.response_logprobs(policy, micro, TEMPERATURE, entropy_gradient=True)
        per_token = weights[micro.rows] * entropy + 0.1 * logprobs
        ((per_token * micro.response_mask).sum() / 100).backward()
    gradients = {name: parameter.grad.full_tensor().clone() for name, parameter in policy.named_parameters()}
    policy.zero_grad()
    return gradients


def gradient_by_transformers(folder: str, rollout) -> dict[str, torch.Tensor]:
    """The same from transformers' own forward, one sequence at a time."""
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    weights = weights_of(rollout)
    for row, (prompt, response) in enumerate(zip(rollout.prompt_ids, rollout.response_ids)):
        first = len(prompt) - 1
        z = plain(torch.tensor([prompt + response])).logits[0, first : first + len(response)]
        table = (z / TEMPERATURE).log_softmax(-1)
        entropy = -(table.exp() * table).sum(-1)
        logprobs = table[range(len(response)), response]
        ((weights[row, : len(response)] * entropy + 0.1 * logprobs).sum() / 100).backward()
    return {name: parameter.grad for name, parameter in plain.named_parameters()}


@pytest.mark.parametrize("knows_logits", [True, False], ids=["products with the head", "the model's own forward"])
def test_a_policy_has_the_gradient_of_transformers_in_one_and_in_several_micro_batches(models, world, knows_logits):
    rollout = random_rollout()
    policy = model.load(models["untied"], world, torch.float32)
    policy.knows_logits = knows_logits
    expected = gradient_by_transformers(models["untied"], rollout)
    for budget in (10_000, 40, 1):
        ours = gradient(policy, rollout, Compute(budget), world)
        assert relative_difference(expected, ours) <= 2e-6
