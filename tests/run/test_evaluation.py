"""Evaluation: what the engine is asked for, which responses count, and how accuracy and reward are counted."""

import dataclasses
import hashlib
import json
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers import load

from common.data import arithmetic, suites
from common.data.prompts import Prompt
from common.errors import BadInput, RunFailed
from common.rewards.grading import Result
from common.rewards.mixture import Rewards
from common.rollout.rollout import collate
from common.run import estimates, evaluation
from common.run.evaluation import Evaluator
from common.run.tracking import Metrics

results = load("scripts/results.py")

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
        for index in range(len(prompt_ids)):
            done(index, [], [])
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


def test_an_evaluation_that_takes_long_says_how_far_it_is(monkeypatch, capsys):
    """Once a minute, and a prompt that the engine names twice is one."""
    now = iter([0.0, 59.0, 61.0, 90.0, 121.0])
    monkeypatch.setattr(evaluation.time, "monotonic", lambda: next(now))
    done = evaluation.Progress(2560)
    for index in (7, 8, 8, 3):
        done(index, [[1]], [False])
    said = capsys.readouterr().out.splitlines()
    assert said == ["evaluation: 2 of 2,560 prompts", "evaluation: 3 of 2,560 prompts"]


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


def test_a_file_gets_the_outcome_of_each_graded_prompt(world, tmp_path):
    """Each at its place in the data, also after one that nobody could grade."""
    evaluator, prompts = prepared(world, ["yes"], ["bad"], ["no"], ["yes"])
    # Two data sets may name their rows alike.
    prompts[2] = replace(prompts[2], id="p:3", dataset="other")
    file = tmp_path / "evaluations/step_000010.jsonl"
    evaluator.greedy_accuracy(prompts, file=file)
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert [(row["index"], row["id"], row["dataset"], row["acc"]) for row in rows] == [
        (0, "p:0", "", 1.0),
        (2, "p:3", "other", 0.0),
        (3, "p:3", "", 1.0),
    ]
    assert rows[0]["prompt"] == "p0" and rows[0]["answer"] == "1" and rows[0]["response"] == "yes"
    assert [row["truncated"] for row in rows] == [False] * 3


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
    environment = SimpleNamespace(
        replies=lambda prompts, step: None, results=lambda episodes, world: [Result(0.0, 0.0)] * 2
    )
    evaluator.reward.environment = environment
    metrics = Metrics(world)
    evaluator.evaluate(prompts, metrics=metrics)
    assert metrics.sums["eval/turns"] == [(4, 2)]


def test_each_data_set_has_its_own_accuracy(world):
    """Two of three and none of one are right. A data set that nobody could grade has none."""
    evaluator, prompts = prepared(world, ["yes"], ["no"], ["yes"], ["no"], ["bad"])
    for place, dataset in enumerate(("a/test.jsonl", "a/test.jsonl", "a/test.jsonl", "suite:aime24", "arithmetic")):
        prompts[place] = replace(prompts[place], dataset=dataset)
    metrics = Metrics(world)
    assert evaluator.greedy_accuracy(prompts, metrics) == 0.5
    assert metrics.sums["eval/arithmetic/accuracy"] == [(0, 0)], "a mean of nothing, which Tracker leaves out"
    assert metrics.sums["eval/test/accuracy"] == [(2, 3)] and metrics.sums["eval/aime24/accuracy"] == [(0, 1)]


def test_a_rank_without_prompts_of_a_data_set_records_its_accuracy_too(world):
    """The ranks add up their metrics in the order of their names, so all have to have the same ones."""

    class TwoRanks(type(world)):
        def sum(self, value):
            return value or 1  # the other rank has one

    beside = TwoRanks(**{**vars(world), "rank": 1, "size": 2})
    evaluator, prompts = prepared(beside, ["yes"], ["yes"], ["yes"], ["no"])
    prompts = [replace(prompt, dataset="xyxx"[place]) for place, prompt in enumerate(prompts)]
    metrics = Metrics(beside)
    evaluator.greedy_accuracy(prompts[::-1], metrics)  # this rank has prompts 2 and 0, both of x
    assert metrics.sums["eval/y/accuracy"] == [(0, 0)] and metrics.sums["eval/x/accuracy"] == [(2, 2)]


RIGHT = {7: [True] * 4, 8: [False, False, True, False], 9: [False] * 4}  # problem -> its four responses


@pytest.fixture
def script(models, world, tmp_path, monkeypatch, capsys):
    """run(right, **flags) measures a model with these responses to the problems 7, 8 and 9. Returns what was printed.

    run.engine: the engine of the last run. run.started: what it was started with.
    """
    (tmp_path / "problems.jsonl").write_text("".join(f'{{"prompt": "{i}=", "answer": "{i}"}}\n' for i in RIGHT))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(evaluate.placement, "init", lambda *given: world)
    monkeypatch.setattr(evaluate.placement, "finish", lambda *given: None)

    def started(*given, **named):
        run.started = named
        return run.engine

    monkeypatch.setattr(evaluate.engines, "start", started)

    def run(right=RIGHT, **flags) -> list[str]:
        texts = {i: [f"#### {i}" if each else "#### 1" for each in row] for i, row in right.items()}
        run.engine = Engine({TOKENIZER(f"{i}")["input_ids"][0]: row for i, row in texts.items()})
        flags = {"dataset": ("problems.jsonl",), "n": 4} | flags
        evaluate.main(evaluate.Args(models["untied"], **flags))
        return capsys.readouterr().out.splitlines()

    return run


def test_the_script_says_greedy_and_sampled_accuracy_and_pass_at_k(script):
    """Of four responses to each of three problems, four, one and none are right. The greedy one is the first."""
    words, said = script(reward=("gsm8k=2",), temperature=0.7, seed=3)
    said = json.loads(said)
    assert (said["prompts"], said["greedy"], said["greedy_reward"]) == pytest.approx((3, 1 / 3, 2 / 3))
    assert (said["sampled"], said["sampled_reward"]) == pytest.approx((5 / 12, 10 / 12))
    assert (said["pass@2"], said["pass@4"]) == pytest.approx(((1 + 1 / 2) / 3, 2 / 3))
    asked = [(each["n"], each["temperature"], each["seed"], each["tokens"]) for each in script.engine.asked]
    assert asked == [(1, 0.0, 0, 48), (4, 0.7, 3, 48)]
    for number in ("problems: greedy 33.3 %", "mean@4 41.7 %", "pass@2 50.0 %", "pass@4 66.7 %", "3 problems"):
        assert number in words


def test_prompts_are_counted_for_each_data_set(script):
    """Otherwise the first one would use them all up."""
    rows = {
        name: [{"prompt": f"{i}", "answer": f"{i}"} for i in numbers]
        for name, numbers in (("a", (0, 1)), ("b", (2, 3)))
    }
    for name, problems in rows.items():
        Path(f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in problems))
    _, said = script(right={i: [1] * 5 for i in range(4)}, dataset=("a.jsonl", "b.jsonl"), prompts=1, output="all.json")
    assert json.loads(said)["prompts"] == 2
    (result,) = json.loads(Path("all.json").read_text())["results"]
    assert [name.partition(":")[0] for name in result["problems"]["id"]] == ["a.jsonl", "b.jsonl"]
    with pytest.raises(BadInput, match="--dataset a.jsonl=0.5: .*leave out the weight"):
        script(right={0: [1]}, dataset=("a.jsonl=0.5", "b.jsonl"))


@pytest.mark.parametrize(
    "files, says",
    [
        ({"output": "gone/a.json"}, "--output gone/a.json: there is no folder"),
        ({"output": "results"}, "--output results: is a folder"),
        (
            {"save_right": "rows.jsonl", "save_pairs": "./rows.jsonl"},
            "--save-right and --save-pairs: each needs a file",
        ),
    ],
)
def test_a_file_that_cannot_be_written_is_refused_before_anything_is_sampled(script, files, says):
    Path("results").mkdir()
    with pytest.raises(BadInput, match=says):
        script(**files)
    assert not script.engine.asked


def test_a_changed_grader_is_another_grader(tmp_path, monkeypatch):
    """The environment's file, and a judge's settings and its template."""
    monkeypatch.chdir(tmp_path)
    files = {
        "mine.py": "",
        "judge.json": '{"url": "http://127.0.0.1:1", "template": "judge.txt"}',
        "judge.txt": "{response}",
    }
    for name, text in files.items():
        Path(name).write_text(text)
    graders = ("gsm8k", "judge:judge.json", "mine.py:Game", "judge:http://127.0.0.1:1")
    before = results.file_hashes(graders)
    assert before.keys() == {"judge:judge.json", "mine.py:Game"}
    for name, changed in (
        ("judge.txt", "judge:judge.json"),
        ("judge.json", "judge:judge.json"),
        ("mine.py", "mine.py:Game"),
    ):
        Path(name).write_text(files[name] + " ")
        after = results.file_hashes(graders)
        assert {grader for grader in after if after[grader] != before[grader]} == {changed}
        before = after


def test_each_accuracy_has_the_interval_of_its_values(script):
    said = json.loads(script()[-1])
    values = {"greedy": [1, 0, 0], "sampled": [1, 1 / 4, 0], "pass@2": [1, 1 / 2, 0], "pass@4": [1, 1, 0]}
    independent = {"greedy": 1, "sampled": 4, "pass@2": 2, "pass@4": 1}
    assert said["interval"].keys() == values.keys()
    for name, interval in said["interval"].items():
        expected = estimates.interval(np.array(values[name], dtype=float), independent[name])
        assert interval == pytest.approx(expected, abs=1e-4) and interval[0] < said[name] < interval[1]


def test_a_value_stands_for_the_answers_that_are_independent():
    """Of ten responses, pass@4 can be taken from two fours that share none, and pass@8 from one eight."""
    problems = results.Problems(id=["a", "b"], greedy=[1, 0], right=[3, None])
    measured = results.measures(problems, 10)
    independent = {"greedy": 1, "sampled": 10, "pass@2": 5, "pass@4": 2, "pass@8": 1, "pass@10": 1}
    assert {name: each.independent for name, each in measured.items()} == independent
    assert measured["sampled"].mean == pytest.approx(0.3) and measured["pass@10"].mean == 1


def test_a_result_says_what_it_depends_on(script, models, tmp_path):
    (tmp_path / "t.txt").write_text("{prompt}")
    (tmp_path / "mine.py").write_text("def score(items, lengths, truncated):\n    return [0.5] * len(items)\n")
    said = json.loads(script(seed=3, source=evaluate.Source(template="t.txt"), reward=("gsm8k", "mine.py:score"))[-1])
    settings = {"split": "test", "environment": "", "template": ["{prompt}"], "n": 4, "temperature": 1.0}
    settings |= {"max_prompt_tokens": 512, "max_response_tokens": 48, "seed": 3}
    assert said["settings"] == settings
    assert said["model"] == models["untied"] and said["reward"] == ["gsm8k", "mine.py:score"]
    content = (tmp_path / "mine.py").read_bytes()
    assert said["reward_files"] == {"mine.py:score": hashlib.sha256(content).hexdigest()}
    assert said["truncated"] == {"greedy": 0, "sampled": 0} and said["ungraded"] == {"greedy": 0, "sampled": 0}
    assert len(said["data"]) == 64 and (said["dtype"], said["backend"]) == ("float32", "vllm")
    assert {"commit", "uncommitted_changes", "versions", "hardware", "chat_template"} <= said.keys()


@pytest.fixture
def first_is_cut_off(monkeypatch) -> None:
    """The engine cuts off the first response to each prompt."""
    generate = Engine.generate

    def cut_off(self, prompt_ids, n, *given, **named):
        rollout = generate(self, prompt_ids, n, *given, **named)
        rollout.truncated[::n] = True
        return rollout

    monkeypatch.setattr(Engine, "generate", cut_off)


def test_the_share_of_responses_that_were_cut_off_is_told(script, first_is_cut_off):
    """The first response to each prompt: three of three, and three of twelve."""
    words, said = script()
    assert json.loads(said)["truncated"] == {"greedy": 1, "sampled": 0.25}
    assert "100.0 % of responses cut off" in words


def test_a_response_that_the_engine_cut_off_is_not_saved(script, tmp_path, first_is_cut_off):
    """The first of each four was cut off, though its text is as long as the others'."""
    right = {7: [True] * 4, 8: [True, False, False, False], 9: [False, True, False, False]}
    script(right, save_right="right.jsonl", save_pairs="pairs.jsonl")

    saved, pairs = (
        [json.loads(line) for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()]
        for name in ("right", "pairs")
    )
    assert [row["answer"] for row in saved] == ["7", "7", "7", "9"]
    assert [row["answer"] for row in pairs] == ["9"]


def test_what_cannot_be_graded_is_no_value(script, tmp_path):
    """8 is nothing that this reward grades. Its problem has no value, and the mean is that of the others."""
    (tmp_path / "mine.py").write_text(
        "from common.rewards import Result\n\n"
        "def score(items, lengths, truncated):\n"
        "    accs = [None if item.answer == '8' else float(item.answer in item.response) for item in items]\n"
        "    return [Result(acc, acc) for acc in accs]\n"
    )
    said = json.loads(script(reward=("mine.py:score",), output="a.json")[-1])
    assert (said["greedy"], said["sampled"], said["ungraded"]) == (0.5, 0.5, {"greedy": 1, "sampled": 1})
    (written,) = json.loads((tmp_path / "a.json").read_text())["results"]
    assert written["problems"]["greedy"] == [1, None, 0] and written["problems"]["right"] == [4, None, 0]
    (row,) = results.compare(("a.json", "a.json"))
    assert row["problems"] == 2 and row["greedy"]["first"][0] == 0.5


def test_a_line_to_quote_says_how_many_problems_nobody_could_grade():
    problems = results.Problems(id=list("abcd"), greedy=[1, 0, None, None], right=[])
    measured = results.measures(problems, 0)
    result = {
        "settings": {"n": 0},
        "prompts": 4,
        "greedy": measured["greedy"].mean,
        "interval": {"greedy": measured["greedy"].interval()},
        "truncated": {"greedy": 0.0},
        "ungraded": {"greedy": 2},
    }
    assert results.in_words("x", result).endswith("cut off, 2 left out, as they could not be graded")
    result["ungraded"] = {"greedy": 0}
    assert results.in_words("x", result).endswith("cut off")


def test_a_comparison_takes_the_problems_that_both_have_grades_for_in_all_measures(script, tmp_path):
    """The second problem has no grade for one model's greedy response, and the third none for its sampled ones."""
    script(BETTER, output="a.json")
    written = json.loads((tmp_path / "a.json").read_text())
    problems = written["results"][0]["problems"]
    problems["greedy"][1], problems["right"][2] = None, None
    (tmp_path / "b.json").write_text(json.dumps(written))
    (row,) = results.compare(("a.json", "b.json"))
    assert row["problems"] == 1
    assert {name: row[name]["first"][0] for name in ("greedy", "sampled", "pass@4")} == dict.fromkeys(
        ("greedy", "sampled", "pass@4"), 1.0
    )


def test_responses_that_are_right_in_part_are_refused(script, tmp_path):
    """Their sum would be cut to a whole number."""
    (tmp_path / "part.py").write_text(
        "from common.rewards import Result\n\n"
        "def score(items, lengths, truncated):\n    return [Result(0.9, 0.9) for _ in items]\n"
    )
    with pytest.raises(BadInput, match=r"a reward gave the acc 0\.9, .* with --n 0"):
        script(reward=("part.py:score",))
    assert json.loads(script(reward=("part.py:score",), n=0)[-1])["greedy"] == pytest.approx(0.9)


@pytest.mark.parametrize(
    "flag, named",
    [
        ({"output": "c.json"}, "--output"),
        ({"suite": ("math",)}, "--suite"),
        ({"save_right": "r"}, "--save-right"),
        ({"n": 4}, "--n"),
        ({"dataset": ("sums",)}, "--dataset"),
        ({"source": evaluate.Source(columns=("a=b",))}, "--columns"),
    ],
)
def test_a_comparison_refuses_flags_of_a_measurement(flag, named):
    with pytest.raises(BadInput, match=f"--compare: {named} does not"):
        evaluate.main(evaluate.Args(compare=("a.json", "b.json"), **flag))


BETTER = {7: [True] * 4, 8: [True, False, True, True], 9: [False, True, False, False]}


def test_two_models_are_compared_problem_by_problem(script):
    script(BETTER, output="a.json")
    script(RIGHT, output="b.json", seed=7)
    (row,) = results.compare(("a.json", "b.json"))
    values = {  # of both models
        "greedy": ([1, 1, 0], [1, 0, 0], 1),
        "sampled": ([1, 3 / 4, 1 / 4], [1, 1 / 4, 0], 4),
        "pass@2": ([1, 1, 1 / 2], [1, 1 / 2, 0], 2),
        "pass@4": ([1, 1, 1], [1, 1, 0], 1),
    }
    assert row["problems"] == 3
    for name, (first, second, independent) in values.items():
        first, second = np.array(first, dtype=float), np.array(second, dtype=float)
        mean, low, high = row[name]["difference"]
        assert mean == pytest.approx(np.mean(first - second), abs=1e-4)
        assert (low, high) == pytest.approx(estimates.difference(first, second, independent), abs=1e-4)
        assert row[name]["first"][0] == pytest.approx(first.mean(), abs=1e-4)
        assert row[name]["second"][0] == pytest.approx(second.mean(), abs=1e-4)


def test_the_comparison_is_printed(script, capsys):
    script(BETTER, output="a.json")
    script(RIGHT, output="b.json")
    capsys.readouterr()
    evaluate.main(evaluate.Args(compare=("a.json", "b.json")))
    *table, last = capsys.readouterr().out.splitlines()
    assert json.loads(last) == results.compare(("a.json", "b.json"))
    assert "mean@4" in "\n".join(table) and "66.7" in "\n".join(table)


DIFFERENT = {  # what another result has been measured with -> what the refusal names
    "n": ({"n": 2}, "n 4 and 2"),
    "temperature": ({"temperature": 0.5}, "temperature 1.0 and 0.5"),
    "length": ({"max_response_tokens": 40}, "max_response_tokens 48 and 40"),
    "grader": ({"reward": ("gsm8k-strict",)}, "reward"),
    "fewer problems": ({"prompts": 2}, "the problems"),
    "other problems": ({"dataset": ("others/problems.jsonl",)}, "the problems"),
    "other answers": ({"dataset": ("answers/problems.jsonl",)}, "the problems"),
    "prompt": ({"source": evaluate.Source(template="t.txt")}, "template"),
}


@pytest.mark.parametrize("change", DIFFERENT)
def test_results_that_are_not_of_one_kind_are_not_compared(script, tmp_path, change):
    flags, named = DIFFERENT[change]
    (tmp_path / "t.txt").write_text("{prompt}?")
    for folder, row in (("others", {"prompt": "9=?", "answer": "9"}), ("answers", {"prompt": "9=", "answer": "8"})):
        rows = [{"prompt": "7=", "answer": "7"}, {"prompt": "8=", "answer": "8"}, row]
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "problems.jsonl").write_text("".join(json.dumps(each) + "\n" for each in rows))
    script(output="a.json")
    script(output="b.json", **flags)
    with pytest.raises(BadInput, match=f"a.json and b.json cannot be compared: problems differs in .*{named}"):
        results.compare(("a.json", "b.json"))


def test_the_place_of_the_file_and_the_seed_may_differ(script, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    shutil.copy(tmp_path / "problems.jsonl", tmp_path / "elsewhere")
    script(output="a.json")
    script(output="b.json", dataset=("elsewhere/problems.jsonl",), seed=9)
    assert [row["name"] for row in results.compare(("a.json", "b.json"))] == ["problems"]


def test_the_temperature_of_greedy_results_is_no_difference(script):
    script(output="a.json", n=0)
    script(output="b.json", n=0, temperature=0.5)
    (row,) = results.compare(("a.json", "b.json"))
    assert row["greedy"]["difference"][0] == 0 and "sampled" not in row


@pytest.mark.parametrize(
    "content, named", [('{"results": [{"name": "a"}]}', "model"), ("{}", "results"), ('{"results": 1}', "a.json")]
)
def test_another_file_is_no_result(tmp_path, content, named):
    (tmp_path / "a.json").write_text(content)
    with pytest.raises(BadInput, match=named):
        results.compare((str(tmp_path / "a.json"), str(tmp_path / "a.json")))


def test_results_of_other_data_sets_are_not_compared(script, tmp_path):
    shutil.copy(tmp_path / "problems.jsonl", tmp_path / "others.jsonl")
    script(output="a.json")
    script(output="b.json", dataset=("others.jsonl",))
    with pytest.raises(BadInput, match="a.json has problems, and b.json has others"):
        results.compare(("a.json", "b.json"))


def test_a_suite_chooses_prompt_grader_length_and_sampling(script, tmp_path, monkeypatch):
    """A flag that is given goes before. Each test set has a result of its own, and one file has all."""
    small = dataclasses.replace(suites.BENCHMARKS["amc23"], max_response_tokens=60, n=2, reward="gsm8k-strict")
    monkeypatch.setitem(suites.BENCHMARKS, "amc23", small)
    short = dataclasses.replace(suites.BENCHMARKS["gsm8k"], max_response_tokens=64)
    monkeypatch.setitem(suites.BENCHMARKS, "gsm8k", short)
    (tmp_path / "amc.jsonl").write_text("".join(f'{{"question": "{i}=", "answer": "{i}.0"}}\n' for i in RIGHT))
    (tmp_path / "gsm.jsonl").write_text("".join(f'{{"question": "{i}=", "answer": "#### {i}"}}\n' for i in RIGHT))
    printed = script(dataset=("arithmetic",), suite=("amc23:amc.jsonl", "gsm8k:gsm.jsonl"), n=None, output="a.json")
    first, second = (json.loads(line) for line in printed if line.startswith("{"))
    assert (first["name"], first["reward"], first["settings"]["temperature"]) == ("amc23", ["gsm8k-strict"], 0.6)
    assert first["settings"]["template"] == [suites.BOXED] and "pass@2" in first
    assert (second["name"], second["reward"], "sampled" in second) == ("gsm8k", ["gsm8k"], False)
    asked = [(each["n"], each["temperature"], each["tokens"]) for each in script.engine.asked]
    assert asked == [(1, 0.0, 60), (2, 0.6, 60), (1, 0.0, 64)]
    longest_prompt = max(len(ids) for each in script.engine.asked for ids in each["prompts"])
    assert script.started["max_model_len"] >= longest_prompt + 64, "one engine writes the longest response of all"
    assert [each["name"] for each in json.loads((tmp_path / "a.json").read_text())["results"]] == ["amc23", "gsm8k"]
    given = {"n": 1, "temperature": 0.5, "max_response_tokens": 50, "reward": ("gsm8k",)}
    said = json.loads(script(dataset=("arithmetic",), suite=("amc23:amc.jsonl",), **given)[-1])
    assert said["reward"] == ["gsm8k"] and said["settings"]["max_response_tokens"] == 50
    asked = [(each["n"], each["temperature"], each["tokens"]) for each in script.engine.asked]
    assert asked == [(1, 0.0, 50), (1, 0.5, 50)]


def test_rows_of_two_data_sets_may_have_one_id(world):
    prompts = [Prompt("a.jsonl:1", text, [1], "1", dataset=name) for name, text in (("gsm8k", "3-2="), ("own", "3-1="))]
    graded = [(prompt, [prompt.text]) for prompt in prompts]
    found = evaluate.gather(graded, world)
    assert [found[prompt.key] for prompt in prompts] == [["3-2="], ["3-1="]]


def test_rows_of_all_ranks_are_kept(world, tmp_path, monkeypatch):
    def gathered(everyone, own) -> None:
        everyone[:] = [own, [{"prompt": "2"}]]

    monkeypatch.setattr(evaluate.dist, "all_gather_object", gathered)
    file = tmp_path / "rows.jsonl"
    assert evaluate.save(str(file), [{"prompt": "1"}], replace(world, size=2)) == 2
    assert file.read_text() == '{"prompt": "1"}\n{"prompt": "2"}\n'


def test_a_test_set_that_is_not_whole_is_warned_of(script, tmp_path, monkeypatch):
    """40 problems are expected. Nobody is told if he has asked for fewer."""
    (tmp_path / "amc.jsonl").write_text("".join(f'{{"question": "{i}=", "answer": "{i}"}}\n' for i in RIGHT))
    flags = {"dataset": ("arithmetic",), "suite": ("amc23:amc.jsonl",), "n": 0, "max_response_tokens": 48}
    said = []
    monkeypatch.setattr(evaluate.errors, "warn", lambda message, code: said.append((message, code)))
    script(reward=("gsm8k",), **flags)
    ((message, code),) = said
    assert code == "incomplete-suite" and "amc23: 3 problems" in message
    script(reward=("gsm8k",), prompts=2, **flags)
    assert len(said) == 1
