"""The speedrun's entries 0002 to 0004: what they compute is what their files say."""

import itertools
import math
import random

import pytest
import torch
from conftest import relative_difference
from helpers import load

from common.rollout.rollout import collate
from common.run.sampling import Batch
from common.trainer import batching, model
from common.trainer.batching import Compute

settled = load("speedrun/records/0002-settled/train.py")
beginnings = load("speedrun/records/0003-beginnings/train.py")
asked_once = load("speedrun/records/0004-asked-once/train.py")
grpo = load("algos/grpo.py")
BOUNDS = {"clip_low": 0.2, "clip_high": 0.2}


def test_a_prompt_is_settled_if_all_its_first_responses_are_right():
    correct = torch.tensor([1.0, 1, 1, 1, 0, 1, 0, 0, 0, 1, 1, 1, 1, 1, 0])
    assert settled.asked_again(correct, first=3, multiple=1) == [1, 2, 4]
    assert settled.asked_again(correct, first=3, multiple=2) == [0, 1, 2, 4], "filled up with a settled one"
    assert settled.asked_again(torch.ones(12), first=3, multiple=2) == [0, 1], "a step needs a batch"


def batch_of(numbers: list[int], n: int, call: int) -> Batch:
    """n responses to each of these prompts. The first token of each response tells where it comes from."""
    draw = random.Random(call)
    prompts = [[100 + number, number] for number in numbers for _ in range(n)]
    responses = [[1000 * call + 10 * number + i] for number in numbers for i in range(n)]
    responses = [ids + [7] * draw.randint(0, 4) for ids in responses]
    logprobs = [[-0.1 * ids[0]] * len(ids) for ids in responses]
    rollout = collate(prompts, responses, logprobs, [False] * len(responses), call, torch.device("cpu"))
    return Batch.of(rollout, numbers, [str(ids[0]) for ids in responses], [ids[0] for ids in responses])


def test_groups_have_the_first_responses_and_then_the_later_ones():
    first, again = batch_of(list(range(6)), 3, call=1), [1, 2, 4, 5]
    second = batch_of(again, 5, call=2)
    batch = settled.join(first, second, again)
    assert batch.prompts == again and len(batch) == 4 * 8
    for row in range(len(batch)):
        prompt, place = again[row // 8], row % 8
        name = 1000 + 10 * prompt + place if place < 3 else 2000 + 10 * prompt + place - 3
        length = len(batch.response_ids[row])
        assert batch.prompt_ids[row] == [100 + prompt, prompt]
        assert batch.response_ids[row][0] == name == batch.results[row] == int(batch.responses[row])
        assert batch.response_mask[row].tolist() == [True] * length + [False] * (batch.response_mask.shape[1] - length)
        assert torch.allclose(batch.rollout_logprobs[row, :length], torch.tensor(-0.1 * name))
        assert batch.weight_versions[row, 0] == (1 if place < 3 else 2)


def test_a_beginning_is_as_long_as_it_can_be():
    """Of the responses that are trained on. The shortest keeps one token."""
    responses = [[1, 2, 3], [1, 2, 4], [1, 2], [9], [5, 6], [5, 6], [5, 7], [5]]
    assert settled.common_beginnings(responses, [True] * 3 + [False] + [True] * 4, 4) == [1] * 4 + [0] * 4
    assert settled.common_beginnings(responses, [True] * 2 + [False] * 2 + [True] * 3 + [False], 4) == [2] * 4 + [1] * 4
    assert settled.common_beginnings(responses, [False] * 8, 4) == [0] * 8


def gradients(policy) -> dict[str, torch.Tensor]:
    found = {name: p.grad.full_tensor().clone() for name, p in policy.named_parameters() if p.grad is not None}
    policy.zero_grad()
    return found


@pytest.mark.parametrize("settled", [settled, beginnings, asked_once], ids=["0002", "0003", "0004"])
@pytest.mark.parametrize("beginning", [0, 3])
@pytest.mark.parametrize("budget", [4096, 60])  # tokens; with 60, groups are cut
def test_the_gradient_is_that_of_grpo(models, world, beginning, budget, settled):
    """Also where tokens are clipped: some of the old log-probs are far from the policy's."""
    policy = model.load(models["grouped"], world, torch.float32)
    draw = random.Random(0)
    system = [draw.randrange(3, 50) for _ in range(26)]
    prompts = [system + [draw.randrange(3, 50) for _ in range(14)] for _ in range(4)]
    alike = [[draw.randrange(3, 50) for _ in range(beginning)] for _ in prompts]
    # Of two tokens, so that many are equal, to the end or in part.
    ends = [[draw.choice((5, 9)) for _ in range(draw.randint(1, 3))] for _ in range(32)]
    responses = [alike[row // 8] + end for row, end in enumerate(ends)]
    rows = [prompt for prompt in prompts for _ in range(8)]
    rollout = collate(rows, responses, None, [False] * 32, 0, torch.device("cpu"))
    batch = Batch.of(rollout, prompts, [], [])
    rewards = torch.tensor([float(sum(ids) % 3 == 0) for ids in responses])  # equal responses have equal rewards
    advantages = grpo.compute_advantages(rewards, 8)
    assert torch.equal(settled.compute_advantages(rewards, 8), advantages) and (advantages != 0).sum() > 8

    compute = Compute(token_budget=budget)
    everything = batching.pack(rollout, torch.arange(32), compute, world)
    frozen = model.frozen_logprobs(policy, rollout, everything, 1.0)
    # The old log-prob of a token depends on the tokens before it alone, as that of an engine does.
    shift = {}
    old = frozen.clone()
    for row, ids in enumerate(responses):
        for t in range(len(ids)):
            old[row, t] += shift.setdefault((row // 8, tuple(ids[: t + 1])), draw.choice((-0.5, 0.0, 0.5)))

    for micro in everything:
        logprobs, _ = model.response_logprobs(policy, micro, 1.0)
        given = (logprobs, old[micro.rows], None, advantages[micro.rows], micro.response_mask)
        grpo.policy_loss(*given, **BOUNDS, kl_coef=0.0, denominator=32).backward()
    plain = gradients(policy)

    positive, negative = settled.merge_beginnings(advantages, responses, batch.response_mask, 8)
    is_merged = (positive != 0) | (negative != 0)
    trained = is_merged.any(1)
    lengths = settled.common_beginnings(responses, trained.tolist(), 8)
    assert min(lengths) >= beginning
    shares_prompts = settled in (beginnings, asked_once)
    of_all_prompts = batching.common_beginning(batch, trained.nonzero().flatten()) if shares_prompts else None
    shorter = settled.lay_behind_prompts(batch, lengths)
    (mini_batch,) = batching.split(shorter, 1, trained, compute, world, of_all_prompts)
    tokens = clipped = 0
    for shortened in mini_batch.micro_batches:
        micro = settled.predict_merged(shortened, responses, is_merged, lengths)
        tokens += micro.input_ids.numel()
        logprobs, _ = model.response_logprobs(policy, micro, 1.0)
        given = (logprobs, old[micro.rows], positive[micro.rows], negative[micro.rows], micro.response_mask)
        settled.policy_loss(*given, **BOUNDS, denominator=32).backward()
        clipped += int(settled.clipped_tokens(*given, **BOUNDS))
    assert clipped > 0
    assert relative_difference(gradients(policy), plain) < 1e-5
    if budget == 4096:
        (whole,) = batching.pack(rollout, trained.nonzero().flatten(), compute, world)
        rows = trained.view(-1, 8).sum(1)  # of each group
        saved = ((rows - 1).clamp(min=0) * torch.tensor(lengths).view(-1, 8)[:, 0]).sum()
        if shares_prompts:
            saved += ((rows > 0).sum() - 1) * len(system)
        assert tokens == whole.input_ids.numel() - saved, "a beginning is there once"


def test_a_dummy_teaches_nothing(models, world):
    """A rank without rows of its own takes a row of the rollout, with a mask of False: all ranks have a forward."""
    policy = model.load(models["grouped"], world, torch.float32)
    responses = [[5, 9], [5, 7]]
    rollout = collate([[3] * 40] * 2, responses, None, [False] * 2, 0, torch.device("cpu"))
    (dummy,) = batching.pack(rollout, torch.arange(2), Compute(token_budget=4096), world)
    dummy.response_mask.zero_()
    for merged in (torch.tensor([[True, True], [False, True]]), torch.zeros(2, 2, dtype=torch.bool)):
        micro = settled.predict_merged(dummy, responses, merged, [0, 0])
        assert not micro.response_mask.any()
        logprobs, _ = model.response_logprobs(policy, micro, 1.0)
        ones = torch.ones(2, 2)
        settled.policy_loss(logprobs, ones, ones, -ones, micro.response_mask, **BOUNDS, denominator=2).backward()
        assert all(not gradient.any() for gradient in gradients(policy).values())


@pytest.mark.parametrize("right", range(9))
def test_a_prompt_is_trained_on_as_often_as_the_file_says(right):
    """Of all orders of `right` right responses among 8, the share in which one of the first 3 is wrong."""
    orders = [[float(i in chosen) for i in range(8)] for chosen in itertools.combinations(range(8), right)]
    # Beside a prompt that isn't settled: if all are, one of them is asked again.
    again = [settled.asked_again(torch.tensor([0.0, 0, 0, *order[:3]]), first=3, multiple=1) for order in orders]
    share = sum(1 in chosen for chosen in again) / len(orders)
    assert share == pytest.approx(1 - math.comb(right, 3) / math.comb(8, 3))
