"""Self-distillation: which response is whose hint, what the teacher reads, and how its weights follow the policy's.

The losses are those of opd.py (test_math_opd.py). test_main.py has every gradient of whole runs by hand.
"""

import math

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from algos.sdpo import (
    Args,
    check_args,
    compute_advantages,
    follow,
    hint_of_row,
    right_peers,
    vocabulary_loss,
    with_hint,
)
from common.data.prompts import Prompt
from common.errors import BadInput


def test_a_hint_is_the_first_other_right_response_of_the_same_group():
    correct = torch.tensor([0.0, 1, 0, 1, 1, 0, 0, 0, 0, 0, 0, 0])  # three groups of four
    peers = right_peers(correct, 4)
    assert peers.tolist() == [1, 3, 1, 1, -1, 4, 4, 4, -1, -1, -1, -1]


def test_a_group_of_right_responses_learns_from_each_other():
    assert right_peers(torch.ones(4), 2).tolist() == [1, 0, 3, 2]


def test_a_response_alone_has_no_hint():
    assert right_peers(torch.ones(3), 1).tolist() == [-1, -1, -1]


def test_the_teacher_reads_prompt_and_hint_where_the_template_says():
    assert with_hint("1+1=", "2", "{hint}? {prompt}{hint}\n{prompt}") == "2? 1+1=2\n1+1="


def test_words_that_look_like_the_template_stay_as_they_are():
    """A response may spell {prompt}, and a prompt {hint} or LaTeX's braces."""
    assert with_hint(r"\frac{1}{2} {hint}", r"{prompt} \1", "{prompt}: {hint}") == r"\frac{1}{2} {hint}: {prompt} \1"


def test_only_taught_tokens_have_an_advantage():
    old = torch.tensor([[math.log(0.4), math.log(0.2)], [math.log(0.5), torch.nan]])
    theirs = torch.tensor([[math.log(0.8), math.log(0.1)], [0.0, torch.nan]])
    taught = torch.tensor([[True, True], [False, False]])
    found = compute_advantages(old, theirs, taught)
    assert torch.allclose(found, torch.tensor([[math.log(2), -math.log(2)], [0.0, 0.0]]))


def test_the_loss_is_a_mean_over_taught_tokens_however_it_is_cut():
    divergences = torch.tensor([[1.0, 3.0], [5.0, torch.nan]])
    taught = torch.tensor([[True, True], [True, False]])
    tokens = taught.sum()
    whole = vocabulary_loss(divergences, taught, denominator=tokens)
    parts = [vocabulary_loss(divergences[i : i + 1], taught[i : i + 1], denominator=tokens) for i in range(2)]
    assert whole.item() == pytest.approx(3.0) == sum(parts).item()


def sharded(value: float, world) -> nn.Module:
    layer = nn.Linear(1, 1, bias=False)
    tensor = DTensor.from_local(torch.full((1, 1), value), world.mesh)
    layer.weight = nn.Parameter(tensor)
    return layer


@pytest.mark.parametrize("rate, expected", [(0.0, 2.0), (0.25, 4.0), (1.0, 10.0)])
def test_the_teacher_moves_by_its_rate_and_the_policy_stays(world, rate, expected):
    teacher, policy = sharded(2.0, world), sharded(10.0, world)
    follow(teacher, policy, rate)
    assert teacher.weight.to_local().item() == pytest.approx(expected)
    assert policy.weight.to_local().item() == 10.0
    assert policy.weight.grad is None and teacher.weight.grad is None


@pytest.mark.parametrize(
    "flags, named",
    [
        ({"group_size": 1}, "--group-size 1"),
        ({"hint_template": "{hint}"}, "--hint-template"),
        ({"environment": "guess"}, "--environment"),
        ({"tis_cap": 2.0}, "--tis-cap"),
    ],
)
def test_flags_that_the_formulas_cannot_work_with_are_refused(flags, named):
    with pytest.raises(BadInput, match=f"^{named}"):
        check_args(Args(**flags))


@pytest.mark.parametrize(
    "answer, solution, hints",
    [
        ("3", "1+2=3", ("3", "1+2=3")),
        (None, None, (None, None)),
        ("", "", (None, None)),
        ("3", ["1+2", "3"], ("3", None)),  # turns of a tool
    ],
)
def test_a_hint_of_the_row_is_its_answer_or_its_solution(answer, solution, hints):
    prompt = Prompt("d:1", "1+2=", [5], answer, solution)
    assert (hint_of_row(prompt, "answer"), hint_of_row(prompt, "solution")) == hints


def test_an_answer_can_teach_a_response_alone():
    check_args(Args(hint="answer", group_size=1))
