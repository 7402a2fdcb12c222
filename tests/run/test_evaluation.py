"""Evaluation: what the engine is asked for, which responses count, and how accuracy and reward are counted."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from helpers import load

from common.data import arithmetic
from common.data.prompts import Prompt
from common.errors import RunFailed
from common.rewards.grading import Result
from common.rewards.mixture import Rewards
from common.rollout.rollout import collate
from common.run.evaluation import Evaluator
from common.run.tracking import Metrics

evaluate = load("scripts/evaluate.py")
TOKENIZER = arithmetic.tokenizer()
MAX_TOKENS = 7


class Engine:
    """Gives each prompt its canned responses, and notes what it was asked for."""

    def __init__(self, responses: dict[int, list[str]]):
        """responses: first token of a prompt -> texts."""
        self.responses = responses
        self.asked = []

    def generate(self, prompt_ids, n, temperature, max_tokens, seed, done=None, reply=None):
        self.asked.append(
            {"prompts": prompt_ids, "n": n, "temperature": temperature, "tokens": max_tokens, "seed": seed}
        )
        texts = [self.responses[ids[0]][sample] for ids in prompt_ids for sample in range(n)]
        ids = [[*TOKENIZER(text)["input_ids"], 1] for text in texts]
        prompts = [prompt for prompt in prompt_ids for _ in range(n)]
        return collate(prompts, ids, None, [False] * len(ids), 0, torch.device("cpu"))


def reward(items, lengths, truncated) -> list[Result]:
    """Right is "yes". Nobody can grade "bad". The score is no 0 or 1, and is not above 0 for a right response."""
    results = []
    for item in items:
        acc = float(item.response == "yes")
        ungraded = "bad" in item.response
        results.append(Result(None, None) if ungraded else Result(-1.5 if acc else 0.25, acc))
    return results


def prepared(world, *responses: list[str]) -> tuple[Evaluator, list[Prompt]]:
    """An evaluator, and as many prompts as there are lists of responses. Their tokens are [10], [11], ..."""
    engine = Engine({10 + i: texts for i, texts in enumerate(responses)})
    prompts = [Prompt(f"p:{i}", f"p{i}", [10 + i], "1") for i in range(len(responses))]
    return Evaluator(engine, Rewards({"r": reward}, {"r": 1.0}), TOKENIZER, world, MAX_TOKENS), prompts


def test_greedy_accuracy_asks_for_one_response_at_temperature_0(world):
    evaluator, prompts = prepared(world, ["yes"], ["no"], ["yes"], ["no"])
    assert evaluator.greedy_accuracy(prompts) == 0.5
    (asked,) = evaluator.engine.asked
    assert asked == {"prompts": [[10], [11], [12], [13]], "n": 1, "temperature": 0.0, "tokens": MAX_TOKENS, "seed": 0}


def test_a_prompt_that_cannot_be_graded_is_neither_right_nor_wrong(world):
    evaluator, prompts = prepared(world, ["yes"], ["bad"], ["no"], ["yes"])
    metrics = Metrics(world)
    assert evaluator.greedy_accuracy(prompts, metrics) == pytest.approx(2 / 3)
    assert metrics.sums == {"eval/reward": [(-1.5 + 0.25 - 1.5, 3)]}


def test_without_any_graded_prompt_there_is_no_accuracy(world):
    evaluator, prompts = prepared(world, ["bad"], ["bad"])
    with pytest.raises(RunFailed) as failed:
        evaluator.greedy_accuracy(prompts)
    assert failed.value.code == "reward-failed"


def test_sampled_responses_come_with_their_prompt_and_their_accuracy(world):
    """A prompt leaves with all its responses if one of them cannot be graded."""
    evaluator, prompts = prepared(world, ["yes", "no"], ["yes", "bad"], ["no", "yes"])
    metrics = Metrics(world)
    graded = evaluator.evaluate(prompts, n=2, temperature=0.7, seed=5, metrics=metrics)
    yes, no = ("yes", 1.0, False), ("no", 0.0, False)
    assert graded == [(prompts[0], [yes, no]), (prompts[2], [no, yes])]
    (asked,) = evaluator.engine.asked
    assert (asked["n"], asked["temperature"], asked["seed"]) == (2, 0.7, 5)
    assert metrics.sums == {"eval/reward": [(2 * (0.25 - 1.5), 4)]}


def test_the_ranks_evaluate_each_prompt_once(world):
    asked = []
    for rank in range(3):
        evaluator, prompts = prepared(replace(world, rank=rank, size=3), *[["yes"]] * 7)
        evaluator.evaluate(prompts)
        asked += evaluator.engine.asked[0]["prompts"]
    assert sorted(asked) == [prompt.ids for prompt in prompts]


def test_turns_of_an_episode_are_counted_and_not_its_tokens(world):
    evaluator, prompts = prepared(world, ["yes"], ["no"])
    generate = evaluator.engine.generate

    def with_episodes(*given, **named):
        rollout = generate(*given, **named)
        rollout.episodes = [
            SimpleNamespace(texts=texts, transcript="", ids=[5] * 9, sampled=[True] * 9)
            for texts in (["a", "b", "yes"], ["no"])
        ]
        return rollout

    evaluator.engine.generate = with_episodes
    environment = SimpleNamespace(replies=lambda *given: None, results=lambda episodes, world: [Result(0.0, 0.0)] * 2)
    evaluator.reward.environment = environment
    metrics = Metrics(world)
    evaluator.evaluate(prompts, metrics=metrics)
    assert metrics.sums["eval/turns"] == [(4, 2)]


def test_pass_at_k_by_hand():
    """Two of four responses are right. Of the six pairs of responses, one has no right one."""
    pass_at_k = evaluate.pass_at_k
    assert [pass_at_k(4, 2, k) for k in (1, 2, 3, 4)] == pytest.approx([1 / 2, 5 / 6, 1, 1])
    assert [pass_at_k(4, correct, 2) for correct in (0, 1, 4)] == pytest.approx([0, 1 / 2, 1])


def test_the_script_says_greedy_and_sampled_accuracy_and_pass_at_k(models, world, tmp_path, monkeypatch, capsys):
    """Of four responses to each of three problems, four, one and none are right. The greedy one is the first."""
    (tmp_path / "problems.jsonl").write_text("".join(f'{{"prompt": "{i}=", "answer": "{i}"}}\n' for i in (7, 8, 9)))
    right = {7: [True] * 4, 8: [False, False, True, False], 9: [False] * 4}
    texts = {i: [f"#### {i}" if each else "#### 1" for each in row] for i, row in right.items()}
    engine = Engine({TOKENIZER(f"{i}")["input_ids"][0]: row for i, row in texts.items()})
    monkeypatch.setattr(evaluate.placement, "init", lambda *given: world)
    monkeypatch.setattr(evaluate.placement, "finish", lambda *given: None)
    monkeypatch.setattr(evaluate.engines, "start", lambda *given, **named: engine)
    dataset = (str(tmp_path / "problems.jsonl"),)
    evaluate.main(evaluate.Args(models["untied"], dataset, reward=("gsm8k=2",), n=4, temperature=0.7, seed=3))
    said = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (said["prompts"], said["greedy"], said["greedy_reward"]) == pytest.approx((3, 1 / 3, 2 / 3))
    assert (said["sampled"], said["sampled_reward"]) == pytest.approx((5 / 12, 10 / 12))
    assert (said["pass@2"], said["pass@4"]) == pytest.approx(((1 + 1 / 2) / 3, 2 / 3))
    asked = [(each["n"], each["temperature"], each["seed"], each["tokens"]) for each in engine.asked]
    assert asked == [(1, 0.0, 0, 48), (4, 0.7, 3, 48)]
