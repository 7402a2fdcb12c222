"""A reward gets all responses to one row of the data in one call, also if another row has the same prompt."""

import importlib.util

import pytest
import torch
from conftest import ROOT

from common.data import arithmetic
from common.data.prompts import Prompt
from common.preflight import checks
from common.processes.pool import Failure
from common.rewards import mixture
from common.rewards.grading import Item, Result
from common.rewards.service import MAX_ITEMS, RewardService, group_of, item_id, make_batches
from common.rewards.workers import UserReward, by_row
from common.rollout.rollout import collate

# Items as (group, prompt), and the sizes of the calls.
CALLS = [
    ([(0, "p"), (0, "p"), (1, "p"), (1, "p")], [2, 2]),
    ([(0, "p"), (0, "p"), (1, "q")], [2, 1]),
    ([(0, "p"), (1, "p"), (2, "p")], [1, 1, 1]),
    ([(3, "p"), (3, "p")], [2]),
    ([(0, ""), (0, ""), (1, "")], [2, 1]),
    # Somebody's own items have no group, and are told apart by their prompts as before.
    ([(None, "p"), (None, "p"), (None, "q")], [2, 1]),
    ([(None, "p")], [1]),
    ([], []),
]


@pytest.mark.parametrize("rows, sizes", CALLS)
def test_a_call_has_the_responses_to_one_row(rows, sizes):
    items = [Item(prompt, str(place), "1", group=group) for place, (group, prompt) in enumerate(rows)]
    calls = by_row(items, list(range(len(items))), [False] * len(items))
    assert [len(call[0]) for call in calls] == sizes
    assert [item for call in calls for item in call[0]] == items
    assert [length for call in calls for length in call[1]] == list(range(len(items)))


class Calls(UserReward):
    """Notes its calls, and needs no process."""

    def __init__(self):
        self.name = "noted"
        self.calls = []
        self.pool = self
        self.first_loss = ""

    def map(self, function, batches):
        return map(function, batches)

    def grade(self, items, lengths=None, truncated=None):
        return UserReward.grade(self, items, lengths, truncated)

    def grade_row(self, batch) -> list[Result] | Failure:
        self.calls.append([(item.group, item.answer) for item in batch[0]])
        return [Result(1.0, 1.0)] * len(batch[0])


# Two rows ask the same and differ in their answers.
PROMPTS = [Prompt("a:1", "1+1=", [5], "2"), Prompt("a:2", "1+1=", [5], "3"), Prompt("a:3", "2+1=", [6], "3")]
EXPECTED = [[(0, "2")] * 2, [(1, "3")] * 2, [(2, "3")] * 2]


@pytest.mark.parametrize("early", [False, True])
def test_rows_with_one_prompt_have_a_call_each_before_and_after_sampling(early, world):
    reward = Calls()
    rewards = mixture.Rewards({"noted": reward}, {"noted": 1.0})
    ids = [[7, 1]] * 6
    grading = None
    if early:
        grading = rewards.begin_early(PROMPTS, arithmetic.tokenizer())
        for place in (1, 0, 2):
            grading(place, ids[:2], [False, False])
    prompts = [prompt.ids for prompt in PROMPTS for _ in range(2)]
    rollout = collate(prompts, ids, [[-1.0] * 2] * 6, [False] * 6, 0, torch.device("cpu"))
    rewards.score(PROMPTS, ["2"] * 6, rollout, world, 1, None, grading)
    assert sorted(reward.calls) == EXPECTED


def test_a_reward_is_tried_with_one_row_at_a_time():
    reward = Calls()
    checks.try_rewards(mixture.Rewards({"noted": reward}, {"noted": 1.0}), PROMPTS[:2], arithmetic.tokenizer())
    assert reward.calls == EXPECTED[:2]


# Sizes of the groups of a call, and of the requests. None: the items have no group.
REQUESTS = [
    ([8] * 16, [64, 64]),
    ([48, 48], [48, 48]),
    ([16, 40, 16], [56, 16]),
    ([60, 4, 4], [64, 4]),
    ([MAX_ITEMS], [64]),
    ([1] * 65, [64, 1]),
    # More than a request may hold.
    ([10, 70, 10], [10, 64, 16]),
    ([None] * 150, [64, 64, 22]),
    ([None] * 3, [3]),
    ([], []),
]


@pytest.mark.parametrize("groups, sizes", REQUESTS)
def test_a_request_has_whole_rows_where_they_fit(groups, sizes):
    numbers = []
    for group, size in enumerate(groups):
        numbers += [None] if size is None else [group] * size
    rows = [{"id": str(place)} for place in range(len(numbers))]
    batches = make_batches(rows, numbers)
    assert [len(batch) for batch in batches] == sizes
    assert [row for batch in batches for row in batch] == rows


@pytest.mark.parametrize(
    "given, group",
    [
        (item_id(17, 3), 3),
        (item_id(0, 0), 0),
        (item_id(17, None), None),
        ("a.b", None),
        ("1.2.3", None),
        ("-1.2", None),
    ],
)
def test_a_service_knows_the_row_by_the_id(given, group):
    assert group_of(given) == group


def test_a_served_reward_gets_the_rows_that_it_would_get_here():
    path = ROOT / "scripts/serve_reward.py"
    spec = importlib.util.spec_from_file_location("serve_reward", path)
    serve_reward = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(serve_reward)
    asked = []

    class Local(RewardService):
        def grade(self, batch):
            asked.append(batch)
            return {row["id"]: Result(1.0, 1.0, row["response"]) for row in batch}

    items = [Item("p", str(place), "1", group=place // 40) for place in range(80)]
    results = Local("http://127.0.0.1:1")(items, [1] * 80, [False] * 80)
    assert [result.extracted for result in results] == [str(place) for place in range(80)]
    reward = Calls()
    for batch in asked:
        request = serve_reward.Score(version=1, request_id="r", items=batch)
        serve_reward.grade(reward, request)
    assert sorted(reward.calls) == [[(0, "1")] * 40, [(1, "1")] * 40]
