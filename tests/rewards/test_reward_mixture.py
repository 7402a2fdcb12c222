"""Several rewards as one: weights, the weights file, rows that cannot be graded, and ranks that agree."""

import json
import math
import os
import re
from contextlib import nullcontext

import pytest
import torch
from cases import ALGORITHMS
from conftest import ROOT, launch

from algos import dr_grpo, grpo
from common import rewards
from common.data import arithmetic
from common.data.prompts import Prompt
from common.errors import BadInput, RunFailed
from common.rewards import weights_file
from common.rewards.grading import Item, Result
from common.rewards.mixture import Rewards
from common.rollout import rollout
from common.run import sampling
from common.run.tracking import Metrics


def mixture(**parts) -> Rewards:
    """Rewards of name=(weight, function of an Item); a function returns a number or None."""

    def as_reward(function):
        scores = lambda items: [function(item) for item in items]
        return lambda items, *_: [Result(s, s and float(s > 0), None, {"why": "down"}) for s in scores(items)]

    functions = {name: as_reward(function) for name, (_, function) in parts.items()}
    return Rewards(functions, {name: weight for name, (weight, _) in parts.items()})


def batch(texts: list[str], group_size: int):
    """Prompts p0, p1, ... with their responses, and a rollout of two tokens a response."""
    prompts = [Prompt(f"p:{i}", f"p{i}", [3], "1") for i in range(len(texts) // group_size)]
    ids = [[4, 5]] * len(texts)
    rows = rollout.collate([[3]] * len(texts), ids, [[0.0, 0.0]] * len(texts), [False] * len(texts), 0, "cpu")
    return prompts, texts, rows


def test_the_score_is_the_weighted_sum_and_acc_the_first_rewards(world):
    reward = mixture(right=(1.0, lambda item: float(item.response)), style=(-0.5, lambda item: 4.0))
    metrics = Metrics(world)
    results = reward.score(*batch(["1", "0"], 2), world, 1, metrics)
    logged = {name: total for name, [(total, _)] in metrics.sums.items()}
    counts = {name: count for name, [(_, count)] in metrics.sums.items()}
    assert [(r.score, r.acc) for r in results] == [(-1.0, 1.0), (-2.0, 0.0)]
    assert results[0].info["parts"] == {"right": 1.0, "style": 4.0}
    assert logged["reward/right/mean"] == 1.0 and logged["reward/style/contribution"] == -4.0
    assert logged["reward/right/std"] == 0.5 * 2  # a total over two responses, as mean() wants it
    assert logged["reward/style/weight"] == -0.5 and logged["time/reward/right"] >= 0
    assert logged["reward/accuracy"] == 1.0, "the first reward alone says what is right"
    for name in ("right/mean", "right/std", "style/contribution", "accuracy"):
        assert counts[f"reward/{name}"] == 2, f"{name} is a mean over two responses"


def test_correctness_is_what_the_reward_says_and_without_a_word_a_score_above_zero(world):
    given = [Result(-1.0, 1.0), Result(2.0, 0.0), Result(0.5, None), Result(0.0, None), Result(-0.5, None)]
    reward = Rewards({"mine": lambda *_: given}, {"mine": 2.0})
    results = reward.score(*batch(["a"] * 5, 1), world, 1)
    assert [result.score for result in results] == [-2.0, 4.0, 1.0, 0.0, -1.0]
    assert [result.acc for result in results] == [1.0, 0.0, 1.0, 0.0, 0.0]


def test_a_response_is_graded_with_its_own_prompt(world):
    """Responses to one prompt follow each other."""
    reward = Rewards({"which": lambda items, *_: [Result(float(item.prompt[1:]), 0.0) for item in items]}, {"which": 1})
    results = reward.score(*batch(["a"] * 6, 2), world, 1)
    assert [result.score for result in results] == [0, 0, 1, 1, 2, 2]


def test_responses_that_are_not_trained_on_stay_out_of_the_metrics(world):
    """ReMax's greedy ones, with several rewards."""
    reward = mixture(right=(1.0, lambda item: 1.0), style=(1.0, lambda item: 1.0))
    sampler = sampling.PromptSampler(world, Metrics(world), None, reward, arithmetic.tokenizer())
    prompts, _, rows = batch(["", ""], 1)
    assert sampler.grade(prompts, rows, with_metrics=False).scores.tolist() == [2.0, 2.0]
    assert set(sampler.metrics.sums) == {"time/reward"}
    sampler.grade(prompts, rows)
    assert "reward/style/mean" in sampler.metrics.sums and "reward/mean" in sampler.metrics.sums


def test_a_weight_of_zero_computes_and_counts_for_nothing(world):
    reward = mixture(right=(1.0, lambda item: 1.0), broken=(0.0, lambda item: None))
    results = reward.score(*batch(["1", "0"], 2), world, 1)
    assert [r.score for r in results] == [1.0, 1.0] and results[0].info["parts"]["broken"] is None


def fails_on(word: str):
    return lambda item: None if word in item.response else float(item.response == "yes")


def test_an_ungraded_response_leaves_with_its_prompt(world):
    reward = mixture(r=(1.0, fails_on("bad")))
    assert reward.score(*batch(["yes", "no"], 2), world, 1)[0].score == 1.0  # the run has begun at step 1
    prompts, texts, rows = batch(["yes", "bad", "yes", "no"] + ["yes", "no"] * 3, 2)
    results = reward.score(prompts, texts, rows, world, 4)
    assert [r.score for r in results] == [0, 0, 1, 0, 1, 0, 1, 0, 1, 0]
    assert [r.acc for r in results] == [r.score for r in results], "one of the two was right, and it does not count"
    assert rows.response_mask.any(1).tolist() == [False] * 2 + [True] * 8
    assert results[0].info["ungraded"] == {"why": "down"}


@pytest.mark.parametrize(
    "step, bad, message",
    [
        (3, 1, "step 3: 1 of 10 responses could not be graded: .*none in the first 3 steps"),
        (9, 3, "step 9: 3 of 10 responses could not be graded: .*at most 20% of a step"),
        (9, 2, None),
        (None, 9, None),  # an evaluation
    ],
)
def test_when_ungraded_responses_stop_the_run(world, step, bad, message):
    reward = mixture(r=(1.0, fails_on("bad")))
    reward.score(*batch(["no", "no"], 2), world, 1)
    with pytest.raises(RunFailed, match=message) if message else nullcontext():
        reward.score(*batch(["bad"] * bad + ["no"] * (10 - bad), 2), world, step)


@pytest.mark.parametrize("here, elsewhere, stops", [(3, 0, False), (3, 2, True), (0, 5, True)])
def test_all_ranks_stop_for_the_ungraded_responses_of_all(world, here, elsewhere, stops):
    """Ten responses on each of two ranks. If only one of them stopped, the other would wait for it."""

    class Two(type(world)):
        def sum(self, value: float) -> float:
            return value + other.pop(0)

    reward = mixture(r=(1.0, fails_on("bad")))
    reward.score(*batch(["no", "no"], 2), world, 1)
    other = [elsewhere, elsewhere, 10]  # without a score, failed, all
    texts = ["bad"] * here + ["no"] * (10 - here)
    with pytest.raises(RunFailed, match=f"{here + elsewhere} of 20") if stops else nullcontext():
        reward.score(*batch(texts, 2), Two(**vars(world)), 9)


def test_a_run_that_stops_says_what_the_reward_said(world):
    fails = [Result(None, None, None, {"error": "the judge is down"})] * 2
    with pytest.raises(RunFailed, match="2 of 2 responses could not be graded: the judge is down; allowed are"):
        Rewards({"mine": lambda *_: fails}, {"mine": 1.0}).score(*batch(["a", "b"], 2), world, 1)


def test_an_evaluation_is_called_one(world, capsys):
    mixture(r=(1.0, fails_on("bad"))).score(*batch(["bad", "no"], 1), world)
    assert "evaluation: 1 of 2 responses could not be graded" in capsys.readouterr().out


@pytest.mark.parametrize("algorithm", [grpo, dr_grpo])
def test_the_loss_does_not_know_of_a_dropped_prompt(world, algorithm):
    """The same loss as if the prompt had never been drawn, denominator included."""
    reward = mixture(r=(1.0, fails_on("bad")))
    reward.score(*batch(["no", "no"], 2), world, 1)
    losses = []
    for texts in (["yes", "bad", "yes", "no"] + ["no"] * 6, ["yes", "no"] + ["no"] * 6):
        prompts, texts, rows = batch(texts, 2)
        scores = torch.tensor([r.score for r in reward.score(prompts, texts, rows, world, 9)])
        advantages = algorithm.compute_advantages(scores, 2)
        denominator = float(rows.response_mask.any(1).sum())
        old = torch.zeros(len(texts), 2)
        given = {"clip_low": 0.2, "clip_high": 0.2, "kl_coef": 0.0, "denominator": denominator}
        new = torch.full_like(old, 0.1) * torch.arange(len(texts) - 8, len(texts) - 8 + len(texts))[:, None].neg()
        new[-8:] = torch.linspace(0, 0.1, 16).view(8, 2)  # the rows both batches have
        losses.append(algorithm.policy_loss(new, old, None, advantages, rows.response_mask, **given).item())
    assert losses[0] == pytest.approx(losses[1], abs=1e-7) and losses[0] != 0


@pytest.mark.parametrize(
    "results, message",
    [
        ([Result(1.0, 1.0)], 'reward "mine" returned 1 results for 2 items'),
        ([Result(1.0, 1.0), Result(math.nan, 0.0)], "reward \"mine\": row 1 is nan, for prompt 'p0'"),
        ([Result(math.inf, 1.0), Result(1.0, 0.0)], 'reward "mine": row 0 is inf'),
        ([Result(1.0, 1.0), Result(1.0, math.nan)], 'reward "mine": row 1 has the acc nan, expected 0 to 1'),
        ([Result(1.0, 1.5), Result(1.0, 1.0)], 'reward "mine": row 0 has the acc 1.5, expected 0 to 1'),
        ([Result(1.0, -1.0), Result(1.0, 1.0)], 'reward "mine": row 0 has the acc -1.0, expected 0 to 1'),
    ],
)
def test_bad_results_are_refused(world, results, message):
    with pytest.raises(BadInput, match=message):
        Rewards({"mine": lambda *_: results}, {"mine": 1.0}).score(*batch(["a", "b"], 2), world, 1)


@pytest.mark.parametrize(
    "specs, weights",
    [
        (("gsm8k",), {"gsm8k": 1.0}),
        (("gsm8k=1.0", "format=.1", "repetition"), {"gsm8k": 1.0, "format": 0.1, "repetition": 1.0}),
        (("overlong:48:16=-1e-1",), {"overlong:48:16": -0.1}),
    ],
)
def test_names_and_weights(specs, weights):
    assert rewards.load(specs).weights == weights


@pytest.mark.parametrize(
    "specs, message",
    [
        (("gms8k",), 'unknown reward "gms8k" .did you mean gsm8k'),
        (("gsm8k=abc",), '--reward gsm8k=abc: the weight "abc" is no number'),
        (("gsm8k=1", "gsm8k=2"), "--reward gsm8k=1 gsm8k=2: a reward is named twice"),
        (("gsm8k=0", "format=0"), "no reward has a weight other than 0"),
        (("overlong:16:48",), "expected overlong:MAX:CACHE"),
        (("absent.json",), "absent.json: file not found"),
        (("http://127.0.0.1:9",), "http://127.0.0.1:9"),
    ],
)
def test_what_load_refuses(specs, message):
    with pytest.raises(BadInput, match=message):
        rewards.load(specs)


@pytest.mark.parametrize(
    "meta, said",
    [
        ({"question": "1+1=", "anwser": 2}, r"no .answer. \(found besides the prompt: question, anwser\)"),
        ({"answer": None}, "the .answer. is empty"),
        ({"solution": "It is two."}, r"no .answer., and no .boxed\{\} or #### in the .solution."),
        ({"answer": {"x": 1}}, "is a dict"),
    ],
)
def test_a_row_without_an_answer_is_told_what_it_has(meta, said):
    prompt = Prompt("rows.jsonl:7", "1+1=", [1], None, None, {**meta, "prompt": "1+1="}, "rows.jsonl")
    with pytest.raises(BadInput, match=f"rows.jsonl:7: .*{said}.*, which --reward gsm8k compares with"):
        rewards.load(("gsm8k",)).check_answers([prompt])


BROKEN = [  # contents of a weights file -> what is said of it
    ('{"version": 2, "weights": {"gsm8k": 1.0, "for', r"weights.json: invalid JSON at column 42"),
    ('{"weights": {"gsm8k": 1.0}}', r"weighs \['gsm8k'\], the run has the rewards \['format', 'gsm8k'\]"),
    ('{"weights": {"gsm8k": 1.0, "format": NaN}}', '"weights.format" is nan: .*finite number'),
    ('{"weights": {"gsm8k": 1.0, "format": true}}', '"weights.format" is True'),
    ('{"weights": {"gsm8k": 1.0, "format": "1"}}', "\"weights.format\" is '1'"),
    ('{"weights": {"gsm8k": 0, "format": 0}}', "no reward has a weight other than 0"),
    ('{"gsm8k": 1.0}', '"weights" .*required'),
    ("[1]", r"is \[1\]: .*dictionary"),
    (None, "file not found"),
]


def write(file, weights: dict) -> None:
    """As a user must: a new file, renamed over the old one."""
    new = file.with_suffix(".new")
    new.write_text(json.dumps({"version": 1, "weights": weights}))
    os.replace(new, file)


@pytest.mark.parametrize("content, message", BROKEN)
def test_a_broken_weights_file_keeps_the_old_weights_and_says_so(world, tmp_path, capsys, content, message):
    file = tmp_path / "weights.json"
    write(file, {"gsm8k": 1.0, "format": 0.25})
    reward = rewards.load((str(file),))
    file.write_text(content) if content is not None else file.unlink()
    metrics = Metrics(world)
    for step in (1, 2):
        reward.score(*batch(["1", "<think></think><answer></answer>"], 2), world, step, metrics)
    said = capsys.readouterr().err
    assert said.count("warning[reward-weights]: ") == 1  # once, not each step
    assert re.search(message, said) and "the weights stay {'gsm8k': 1.0, 'format': 0.25}" in said
    assert reward.weights == {"gsm8k": 1.0, "format": 0.25} and metrics.sums["reward/weights_stale"] == 2 * [(1.0, 1)]
    write(file, {"gsm8k": 1.0, "format": 0.5})
    reward.score(*batch(["1", "1"], 2), world, 3, metrics)
    assert reward.weights["format"] == 0.5 and metrics.sums["reward/weights_stale"][-1] == (0.0, 1)


def test_every_reward_is_computed_whatever_has_failed_before(world):
    """A sharded reward model runs collectives, and on the other ranks nothing has failed."""
    computed = []

    def fails(*given) -> list[Result]:
        raise BadInput("no such unit")

    def second(items, *given) -> list[Result]:
        computed.append(len(items))
        return [Result(1.0, 1.0)] * len(items)

    reward = Rewards({"first": fails, "second": second}, {"first": 1.0, "second": 1.0})
    with pytest.raises(BadInput, match="no such unit"):
        reward.score(*batch(["a", "b"], 2), world, 1)
    assert computed == [2]


def test_a_thread_gets_the_weights_through_a_group_of_its_own(world, tmp_path, monkeypatch):
    """With --max-inflight-batches, begin_step() runs beside the collectives of the trainer."""
    file = tmp_path / "weights.json"
    file.write_text('{"weights": {"gsm8k": 1.0, "format": 0.1}}')
    reward, beside, groups = rewards.load((str(file),)), world.beside(), []
    broadcast = weights_file.dist.broadcast_object_list

    def noted(*given, group=None, **named):
        groups.append(group)
        return broadcast(*given, group=group, **named)

    monkeypatch.setattr(weights_file.dist, "broadcast_object_list", noted)
    reward.begin_step(1, beside)
    assert groups == [beside.group] and beside.group is not None


def test_a_broken_weights_file_at_the_start_is_fatal(tmp_path):
    file = tmp_path / "weights.json"
    for content in ('{"weights": {"gsm8k"', '{"weights": {"gsm9k": 1.0}}', '{"weights": {"gsm8k": "1"}}'):
        file.write_text(content)
        with pytest.raises(BadInput):
            rewards.load((str(file),))


def test_new_weights_wait_for_the_next_step(world, tmp_path):
    """All draws of a step, and the evaluations after it, are weighed alike."""
    file = tmp_path / "weights.json"
    write(file, {"gsm8k": 1.0, "format": 0.0})
    reward = rewards.load((str(file),))
    score = lambda step: reward.score(*batch(["1", "1"], 2), world, step)[0].score
    assert score(1) == 1.0
    write(file, {"gsm8k": 3.0, "format": 0.0})
    assert score(1) == 1.0 and score(None) == 1.0 and score(2) == 3.0


@pytest.mark.slow
def test_two_ranks_agree(tmp_path):
    """Weights, dropped prompts, errors, and why a response or an episode has no score: what one rank sees, both do."""
    result = launch(ROOT / "tests/workers/agree.py", tmp_path, ranks=2, engine=False)
    said = json.loads(next(line for line in result.stdout.splitlines() if line.startswith("[")))
    assert len(said) == 2 and said[0] == said[1]
    assert said[0] == {
        "weights": [1.0, 5.0],
        "error": 'BadInput: reward "mine" returned 3 results for 4 items',
        "dropped": "RunFailed: step 9: 2 of 8 responses could not be graded",
        "environment": 'environment "mine" failed in 2 of 3 episodes: '
        "{'died': 2} on rank 1; the first of the kind 'died': out of memory",
    }
    assert "evaluation: 2 of 8 responses could not be graded: {'why': 'x'}" in result.stdout


def test_items_carry_ids_and_meta(world):
    seen: list[Item] = []

    def keep(items, lengths, truncated):
        seen.extend(items)
        return [Result(0.0, 0.0)] * len(items)

    prompts, texts, rows = batch(["a", "b"], 2)
    Rewards({"keep": keep}, {"keep": 1.0}).score(prompts, texts, rows, world)
    assert [item.response_ids for item in seen] == [[4, 5], [4, 5]] and seen[1].response == "b"


@pytest.mark.slow
def test_every_algorithm_goes_on_without_a_prompt_that_was_not_graded(models, tmp_path):
    launch(ROOT / "tests/workers/mains.py", models["untied"], tmp_path, "ungraded")
    for name in (*ALGORITHMS, "remax-free"):
        rows = [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        assert [row["reward/ungraded_frac"] > 0 for row in rows] == [False, False, False, True], name
        traces = (tmp_path / name / "rollouts/step_000004.jsonl").read_text().splitlines()
        left = [row for row in map(json.loads, traces) if "ungraded" in row["info"]]
        if name in ("dapo", "prime"):  # drawn again until enough prompts are left
            assert not left and rows[3]["sampling/prompts_generated"] > rows[2]["sampling/prompts_generated"]
        else:
            assert len(left) == 4 and len({row["prompt"] for row in left}) == 1
            assert all(row["score"] == 0 for row in left)
