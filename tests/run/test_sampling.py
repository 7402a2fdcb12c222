"""Batches of a step: scores and correctness, the ranks' shares of the prompts, and dynamic sampling."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from common.data import arithmetic
from common.data.prompts import Prompt
from common.errors import RunFailed
from common.rewards.grading import Result
from common.rewards.mixture import Rewards
from common.rollout.rollout import Rollout, collate
from common.run.sampling import Batch, Gates, PromptSampler
from common.run.sampling import InOrder as InOrderGate
from common.run.tracking import Metrics

TOKENIZER = arithmetic.tokenizer()


def reward(items, lengths, truncated) -> list[Result]:
    """Right is "yes", with a score below that of any other response. Nobody can grade "bad"."""
    results = []
    for item in items:
        if item.response == "bad":
            results.append(Result(None, None, None, {"why": "down"}))
        else:
            right = item.response == "yes"
            results.append(Result(-0.5 if right else 0.25, float(right)))
    return results


class InOrder:
    """A loader that gives prompts p0, p1, p2, ..., whose tokens are [10], [11], [12], ..."""

    seed = 0

    def __init__(self):
        self.position = 0

    def take(self, count: int) -> list[Prompt]:
        places = range(self.position, self.position + count)
        self.position += count
        return [Prompt(f"p{place}", f"p{place}", [10 + place], "1") for place in places]


def a_sampler(world, step: int = 9) -> PromptSampler:
    """One in a late step of a run, in which some responses may stay without a grade."""
    rewards = Rewards({"r": reward}, {"r": 1.0})
    rewards.first_step = 1
    return PromptSampler(world, Metrics(world), InOrder(), rewards, TOKENIZER, step)


def rollout_of(prompts: list[Prompt], texts: list[str]) -> Rollout:
    """The same number of responses to each prompt, group-major."""
    ids = [[*TOKENIZER(text)["input_ids"], 1] for text in texts]
    group_size = len(texts) // len(prompts)
    prompt_ids = [prompt.ids for prompt in prompts for _ in range(group_size)]
    return collate(prompt_ids, ids, [[-1.0] * len(row) for row in ids], [False] * len(ids), 3, torch.device("cpu"))


def test_scores_and_correctness_are_two_things():
    """A reward model, a penalty or a weight gives a right response a low score, and a wrong one a high score."""
    results = [Result(0.75, 0.0), Result(-1.0, 1.0), Result(0.0, 1.0), Result(0.5, 0.5)]
    prompts = [Prompt("p", "p", [10], "1")]
    batch = Batch.of(rollout_of(prompts, ["a"] * 4), prompts, ["a"] * 4, results)
    assert batch.scores.tolist() == [0.75, -1.0, 0.0, 0.5]
    assert batch.correct.tolist() == [0.0, 1.0, 1.0, 1.0]


def test_graded_responses_stay_in_their_rows(world):
    sampler = a_sampler(world)
    prompts = sampler.prompts(2)
    texts = ["yes", "no", "no", "yes"]
    batch = sampler.grade(prompts, rollout_of(prompts, texts))
    assert batch.responses == texts and batch.prompts == prompts
    assert batch.scores.tolist() == [-0.5, 0.25, 0.25, -0.5] and batch.correct.tolist() == [1, 0, 0, 1]
    assert sampler.metrics.sums["reward/mean"] == [(-0.5, 4)]


def test_the_ranks_share_the_prompts_of_a_step(world):
    """Every size-th prompt: a mini-batch, which is a part of each rank's share, has the same ones for any size."""
    shares = []
    for rank in range(2):
        sampler = a_sampler(replace(world, rank=rank, size=2))
        shares.append([[prompt.id for prompt in sampler.prompts(4)] for _ in range(2)])
        assert sampler.loader.position == 8, "each rank moves past the prompts of all"
    assert shares == [[["p0", "p2"], ["p4", "p6"]], [["p1", "p3"], ["p5", "p7"]]]


@pytest.mark.parametrize("texts, refused", [(["no", "yes"], True), (["yes", "yes"], True), (["no", "no"], False)])
def test_a_score_that_is_too_low_for_an_algorithm_ends_the_run(world, texts, refused):
    sampler = a_sampler(world)
    prompts = sampler.prompts(1)
    if not refused:
        sampler.grade(prompts, rollout_of(prompts, texts), at_least=0.25)
        return
    with pytest.raises(RunFailed) as failed:
        sampler.grade(prompts, rollout_of(prompts, texts), at_least=0.25)
    assert failed.value.code == "reward-failed"


def test_a_response_without_a_grade_has_no_score_that_could_be_too_low(world):
    sampler = a_sampler(world)
    prompts = sampler.prompts(20)
    batch = sampler.grade(prompts, rollout_of(prompts, ["no", "bad", *["no"] * 38]), at_least=0.25)
    assert batch.scores.tolist() == [0.0, 0.0, *[0.25] * 38]


GROUPS = {  # a prompt -> its two responses
    "p0": ["yes", "no"],
    "p1": ["yes", "yes"],
    "p2": ["no", "bad"],
    "p3": ["no", "no"],
    "p4": ["no", "yes"],
    "p5": ["no", "yes"],
    "p6": ["no", "yes"],
    "p7": ["no", "yes"],
    "p8": ["no", "yes"],
}


def sampled(prompts: list[Prompt], draw: int, grading) -> Rollout:
    return rollout_of(prompts, [text for prompt in prompts for text in GROUPS[prompt.id]])


def not_all_right(correct: torch.Tensor) -> torch.Tensor:
    return ~correct.all(1)


def fill(sampler: PromptSampler, generate: Callable = sampled, **changes) -> Batch:
    settings = {"wanted": 3, "prompts_per_draw": 3, "max_draws": 4, "filter_in_words": "left"} | changes
    return sampler.until_full(generate, not_all_right, **settings)


def test_dynamic_sampling_takes_the_first_groups_that_pass(world):
    """p1 does not pass, and p2 has a response that nobody could grade. The first of the others fill the step."""
    sampler = a_sampler(world)
    batch = fill(sampler)
    assert [prompt.id for prompt in batch.prompts] == ["p0", "p3", "p4"]
    assert batch.responses == ["yes", "no", "no", "no", "no", "yes"]
    assert batch.prompt_ids == [[10], [10], [13], [13], [14], [14]]
    assert batch.correct.tolist() == [1, 0, 0, 0, 0, 1] and batch.scores.tolist() == [-0.5, *[0.25] * 4, -0.5]
    assert TOKENIZER.batch_decode(batch.response_ids, skip_special_tokens=True) == batch.responses
    assert batch.response_mask.any(1).all()
    assert sampler.loader.position == 6, "no draw more than necessary"
    assert sampler.metrics.sums["sampling/prompts_generated"] == [(3, None), (3, None)]
    assert sampler.metrics.sums["sampling/prompts_kept"] == [(4, None)]


def test_a_draw_has_its_number_and_its_own_prompts(world):
    """The number is a part of the seed: equal ones would sample the same noise twice."""
    draws = []

    def generate(prompts, draw, grading):
        draws.append((draw, [prompt.id for prompt in prompts], grading.prompts == prompts))
        return sampled(prompts, draw, grading)

    fill(a_sampler(world), generate, wanted=6)
    assert draws == [(0, ["p0", "p1", "p2"], True), (1, ["p3", "p4", "p5"], True), (2, ["p6", "p7", "p8"], True)]


def test_with_batches_in_flight_a_step_draws_until_it_is_full(world):
    """Only then it is another step's turn."""
    sampler = a_sampler(world, step=9)
    sampler.gates = Gates(InOrderGate(9), InOrderGate(9))
    assert len(fill(sampler).prompts) == 3 and sampler.loader.position == 6, "it took two draws"


def test_what_was_graded_while_the_engine_sampled_is_not_graded_again(world):
    asked = []

    def waits(items, lengths, truncated):
        asked.append(len(items))
        return reward(items, lengths, truncated)

    waits.waits = True
    sampler = a_sampler(world)
    sampler.reward = Rewards({"r": waits}, {"r": 1.0})
    prompts = sampler.prompts(2)
    rollout = rollout_of(prompts, ["yes", "no", "no", "yes"])
    grading = sampler.grade_early(prompts)
    for place in range(2):
        grading(place, rollout.response_ids[2 * place : 2 * place + 2], [False, False])
    assert sampler.grade(prompts, rollout, grading).correct.tolist() == [1, 0, 0, 1] and asked == [2, 2]


def test_a_rank_draws_on_until_the_others_are_full(world):
    """All ranks make the same number of draws, because sampling and grading are collectives."""

    class Others(type(world)):
        """The other rank has found nothing in the first draw, and enough in the second."""

        def min(self, value):
            return min(value, others.pop(0))

    others = [0, 5]
    sampler = a_sampler(Others(**{**vars(world), "size": 2}))
    mixed = lambda prompts, draw, grading: rollout_of(prompts, ["no", "yes"] * len(prompts))
    batch = fill(sampler, mixed, wanted=2, prompts_per_draw=2)
    assert sampler.loader.position == 4 and others == []
    assert [prompt.id for prompt in batch.prompts] == ["p0"], "its share of two is one"


def test_too_few_groups_after_the_last_draw_end_the_run(world):
    with pytest.raises(RunFailed) as failed:
        fill(a_sampler(world), wanted=3, max_draws=1)
    assert failed.value.code == "no-signal"
