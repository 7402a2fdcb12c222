"""Functions written for TRL, verl and OpenRLHF give the scores that they give there, also on the command line."""

import asyncio
import functools
import json
import re

import pytest
import torch
from conftest import ROOT, launch

from common.data import arithmetic
from common.data.prompts import Prompt, Source, load
from common.errors import BadInput, RunFailed
from common.rewards.grading import NOT_APPLIED, Item, Result
from common.rewards.mixture import Rewards
from common.rewards.signatures import adapt
from common.rewards.workers import UserReward, to_rows
from common.rollout.rollout import collate

CHAT = [{"role": "user", "content": "2+3?"}]
TRUTH = {"style": "rule", "ground_truth": "5"}
OF_VERL = {"prompt": CHAT, "data_source": "sums", "reward_model": TRUTH, "extra_info": {"index": 7}}


def graded(function, *items: Item) -> list[Result]:
    """What a worker process would answer."""
    grade, _ = adapt(function)
    batch = list(items)
    lengths = [len(item.response_ids) for item in batch]
    return [Result(*row) for row in to_rows(grade(batch, lengths, [False] * len(batch)), len(batch))]


def scores(function, *items: Item) -> list[float | None]:
    return [result.score for result in graded(function, *items)]


def item(response: str = "5", reference: str | None = "5", ids=(8, 1), **row) -> Item:
    return Item("<user>2+3?", response, reference, {"prompt": "2+3?", **row}, list(ids))


def refused(function, *items: Item) -> str:
    with pytest.raises(BadInput) as error:
        graded(function, *(items or [item()]))
    return str(error.value)


class Scorer:
    def __call__(self, completions, **kwargs):
        return [1.0] * len(completions)


def logged(function):
    """A decorator, as rewards often have one."""

    @functools.wraps(function)
    def call(*given, **named):
        return function(*given, **named)

    return call


RECOGNIZED = [
    (lambda items, lengths, truncated: [1.0] * len(items), "onefile-rl"),
    (lambda items, *rest: [1.0] * len(items), "onefile-rl"),
    (lambda completions, **kwargs: [1.0] * len(completions), "TRL"),
    (lambda completion_ids, **kwargs: [1.0] * len(completion_ids), "TRL"),
    (lambda prompts, completions: [1.0] * len(prompts), "TRL"),
    # A column of the data may be named like a parameter of another signature.
    (lambda completions, queries=None, items=None, **kwargs: [1.0] * len(completions), "TRL"),
    (Scorer(), "TRL"),
    (logged(lambda completions, **kwargs: [1.0] * len(completions)), "TRL"),
    (functools.partial(lambda completions, weight, **kwargs: [weight] * len(completions), weight=1.0), "TRL"),
    (lambda data_source, solution_str, ground_truth, extra_info=None: 1.0, "verl"),
    (lambda solution_str, ground_truth, method="strict", score=1.0: score, "verl"),
    (lambda solution_str, **kwargs: 1.0, "verl"),
    (lambda queries, prompts, labels: [1.0], "OpenRLHF"),
    (lambda queries, prompts, **kwargs: [1.0], "OpenRLHF"),
]


@pytest.mark.parametrize("function, owner", RECOGNIZED)
def test_the_names_of_the_parameters_say_how_a_function_is_called(function, owner):
    assert adapt(function)[1].startswith(owner)
    assert scores(function, item(), item()) == [1.0, 1.0]


@pytest.mark.parametrize("function", [lambda a, b, c: [], lambda: [], lambda **kwargs: [], lambda response, answer: 1])
def test_any_other_signature_is_refused_with_the_four_that_are_known(function):
    message = refused(function)
    assert all(owner in message for owner in ("onefile-rl", "TRL", "verl", "OpenRLHF"))
    assert all(name in message for name in ("items", "completions", "solution_str", "queries"))


# TRL


def test_trl_gets_texts_for_a_text_and_messages_for_messages():
    given = []

    def keep(prompts, completions, completion_ids, **kwargs):
        given.append((prompts, completions, completion_ids))
        return [0.0] * len(prompts)

    graded(keep, item("5", ids=[8, 1]), item("6", ids=[9]))
    graded(keep, item("5", prompt=CHAT), item("6", prompt=CHAT))
    said = [[{"role": "assistant", "content": text}] for text in "56"]
    assert given == [
        (["2+3?", "2+3?"], ["5", "6"], [[8, 1], [9]]),
        ([CHAT, CHAT], said, [[8, 1], [8, 1]]),
    ]


def test_trl_gets_the_columns_of_the_row_as_the_data_has_them():
    row = {"task": "math", "solution": 5, "tags": ["a"], "completion": "x", "odd name": None}

    def check(completions, task, solution, tags, answer, **kwargs):
        assert (task, solution, tags, answer) == (["math"] * 2, [5] * 2, [["a"]] * 2, ["5"] * 2)
        # Neither the prompt nor a completion of the data, but a null as it is.
        assert not {"prompt", "completion"} & kwargs.keys() and kwargs["odd name"] == [None] * 2
        return [1.0, 0.5]

    assert scores(check, item(**row), item(**row)) == [1.0, 0.5]


@pytest.mark.parametrize(
    "row, answer, expected",
    [
        ({"answer": "5 apples"}, "5", ["5 apples", "5"]),  # --columns answer=COLUMN names another one
        ({}, "5", ["5", "5"]),
        ({"answer": ["5", "five"]}, None, [["5", "five"], ["5", "five"]]),
        ({"ground_truth": "five"}, "5", ["5", "five"]),
    ],
)
def test_trl_finds_the_reference_also_under_the_name_that_a_row_lacks(row, answer, expected):
    def keep(completions, answer, ground_truth, log_extra):
        log_extra("found", [[answer[0], ground_truth[0]]])
        return [0.0]

    assert graded(keep, item(reference=answer, **row))[0].info == {"found": expected}


def test_what_trl_logs_is_in_the_info_of_each_response():
    def tell(completions, log_extra, log_metric=None, **kwargs):
        log_extra("read", [completion.upper() for completion in completions])
        log_metric("mean", torch.tensor(0.5))
        return torch.tensor([1.0, -1.0])

    results = graded(tell, item("a"), item("b"))
    # As JSON, because that is how a worker answers.
    assert [json.loads(json.dumps(result.info, default=str)) for result in results] == [
        {"read": "A", "mean": 0.5},
        {"read": "B", "mean": 0.5},
    ]
    assert [result.score for result in results] == [1.0, -1.0]


def test_what_only_a_trainer_of_theirs_has_is_refused_if_it_is_needed():
    for name in ("trainer_state", "environments"):
        scope = {}
        exec(f"def needs(completions, {name}): return [1.0]\ndef may(completions, {name}=3): return [{name}]", scope)
        assert name in refused(scope["needs"]) and scores(scope["may"], item()) == [3]
    message = refused(lambda completions, difficulty, **kwargs: [1.0], item(task="sums"))
    assert '"difficulty"' in message and '"task"' in message


@pytest.mark.parametrize(
    "returned, said",
    [
        ([1.0], "returned 1 results for 2 items"),
        ([1.0] * 3, "returned 3 results for 2 items"),
        (1.0, "one for each response, got float"),
        (["1", 1.0], "result 0: expected a number or None, got '1', str"),
        (torch.zeros(2, 1), "of shape"),
    ],
)
def test_trl_must_return_a_number_or_none_for_each(returned, said):
    assert said in refused(lambda completions, **kwargs: returned, item(), item())


# verl


def test_verl_is_called_for_each_response_with_the_row_as_it_is():
    calls = []

    def compute_score(data_source, solution_str, ground_truth, extra_info=None):
        calls.append([data_source, solution_str, ground_truth, dict(extra_info)])
        return float(solution_str == ground_truth)

    assert scores(compute_score, item("5", **OF_VERL), item("6", **OF_VERL)) == [1.0, 0.0]
    assert calls == [["sums", "5", "5", {"index": 7}], ["sums", "6", "5", {"index": 7}]]
    # Data that is not verl's has a reference all the same.
    assert scores(compute_score, item("5"), item("6", extra_info=None)) == [1.0, 0.0]
    assert calls[2:] == [["", "5", "5", {}], ["", "6", "5", {}]]


@pytest.mark.parametrize("truth", [5, 0.5, ["5", "five"], {"target": ["5"], "note": None}, "5"])
def test_verl_gets_a_ground_truth_of_any_type(truth):
    seen = []
    row = OF_VERL | {"reward_model": TRUTH | {"ground_truth": truth}}
    graded(lambda solution_str, ground_truth: seen.append(ground_truth) or 0, item(reference=None, **row))
    assert seen == [truth]


@pytest.mark.parametrize(
    "returned, expected",
    [
        (1, Result(1.0, 1.0)),
        (-1.0, Result(-1.0, 0.0)),
        (True, Result(1.0, 1.0)),
        (torch.tensor(0.5).numpy(), Result(0.5, 1.0)),
        ({"score": -1.0, "acc": True, "pred": "5"}, Result(-1.0, 1.0, None, {"pred": "5"})),
        ({"score": 0.1, "acc": 0}, Result(0.1, 0.0)),
        ({"score": 0.1, "parts": torch.ones(2)}, Result(0.1, None, None, {"parts": [1.0, 1.0]})),
    ],
)
def test_verl_returns_a_number_or_an_object_with_a_score(returned, expected):
    assert graded(lambda solution_str, **kwargs: returned, item()) == [expected]


@pytest.mark.parametrize(
    "returned, said",
    [({"acc": 1.0}, '"score"'), (None, "'None', NoneType"), ("1", "'1', str"), ({"score": "1"}, "'1', str")],
)
def test_verl_must_return_a_score(returned, said):
    assert said in refused(lambda solution_str, **kwargs: returned)


def test_verls_router_is_refused_by_name():
    assert "reward_router_address" in refused(lambda solution_str, reward_router_address: 1.0)
    assert scores(lambda solution_str, reward_router_address=None: 1.0, item()) == [1.0]


# OpenRLHF


def test_openrlhf_is_called_with_lists_of_one():
    calls = []

    def reward_func(queries, prompts, labels, **kwargs):
        calls.append([queries, prompts, labels])
        return torch.tensor([float(queries[0].endswith(labels[0]))])

    assert scores(reward_func, item("5"), item("6")) == [1.0, 0.0]
    assert calls == [[["<user>2+3?" + text], ["<user>2+3?"], ["5"]] for text in "56"]


@pytest.mark.parametrize(
    "answer, row, label",
    [(None, {}, ""), (None, {"answer": ["5", "five"]}, ["5", "five"]), ("5", {"reward_model": TRUTH}, "5")],
)
def test_openrlhf_gets_the_reference_as_its_label(answer, row, label):
    seen = []
    graded(lambda queries, labels: seen.append(labels) or [0.0], item(reference=answer, **row))
    assert seen == [[label]]


@pytest.mark.parametrize(
    "returned, expected",
    [
        ([0.5], Result(0.5, 1.0)),
        (torch.tensor([0.5]), Result(0.5, 1.0)),
        (torch.tensor(0.5), Result(0.5, 1.0)),
        (0.5, Result(0.5, 1.0)),
        ({"rewards": torch.tensor([0.5])}, Result(0.5, None)),
        ({"rewards": [2.0], "scores": torch.tensor([0.0])}, Result(2.0, 0.0)),
        (
            {"rewards": 2.0, "scores": 1.0, "extra_logs": {"digits": torch.tensor([3]), "why": ["x"]}},
            Result(2.0, 1.0, None, {"digits": 3, "why": "x"}),
        ),
    ],
)
def test_openrlhf_returns_a_list_of_one_or_an_object_with_rewards(returned, expected):
    assert graded(lambda queries, prompts, labels: returned, item()) == [expected]


@pytest.mark.parametrize("returned, said", [({"scores": [1.0]}, '"rewards"'), ([1.0, 2.0], "list"), ([], "list")])
def test_openrlhf_must_return_one_reward(returned, said):
    assert said in refused(lambda queries, prompts, labels: returned)


# async def


class Together:
    """Counts how many coroutines wait at the same time, and on which event loops."""

    def __init__(self):
        self.now = 0
        self.most = 0
        self.loops = set()

    async def wait(self, value):
        self.loops.add(asyncio.get_running_loop())
        self.now += 1
        self.most = max(self.most, self.now)
        await asyncio.sleep(0.01)
        self.now -= 1
        return value


def test_each_signature_may_be_asynchronous():
    at = Together()

    async def ours(items, lengths, truncated):
        return await at.wait([float(len(item.response)) for item in items])

    async def trl(completions, **kwargs):
        return await at.wait([float(len(text)) for text in completions])

    async def verl(solution_str, **kwargs):
        return await at.wait(len(solution_str))

    async def openrlhf(queries, prompts, labels):
        return await at.wait([len(queries[0]) - len(prompts[0])])

    for function, most in ((ours, 1), (trl, 1), (verl, 3), (openrlhf, 3)):
        at.most = 0
        assert scores(function, item("5"), item("55"), item("555")) == [1.0, 2.0, 3.0]
        assert at.most == most, "responses of a batch wait for each other only if they have to"


def test_an_asynchronous_function_keeps_its_event_loop():
    """An HTTP session that it keeps from batch to batch belongs to one loop."""
    at = Together()
    grade, _ = adapt(lambda completions: at.wait([1.0]))
    for _ in range(3):
        assert grade([item()], [1], [False])[0].score == 1.0
    assert len(at.loops) == 1


# In a worker process


def test_a_worker_runs_them_and_the_start_says_which_it_is(tmp_path, capsys):
    (tmp_path / "mine.py").write_text(
        "async def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs):\n"
        "    return {'score': float(solution_str == ground_truth['value']), 'said': solution_str}\n"
        "def unknown(a, b): pass\n"
        "def needs(completions, trainer_state): pass\n"
        "def raises(completions, answer, **kwargs): return [1 / 0]\n"
    )
    path = str(tmp_path / "mine.py")
    reward = UserReward(path, "compute_score", workers=1)
    assert f'reward "{path}:compute_score"' in (said := capsys.readouterr().out) and "verl" in said
    row = OF_VERL | {"reward_model": {"ground_truth": {"value": "5"}}}
    results = reward([item("5", **row), item("6", **row)], [1, 1], [False, False])
    reward.pool.close()
    assert results == [Result(1.0, None, None, {"said": "5"}), Result(0.0, None, None, {"said": "6"})]
    for function, named in (("unknown", "OpenRLHF"), ("needs", "trainer_state")):
        with pytest.raises(BadInput, match=f"--reward: .*mine.py:{function}.*{named}"):
            UserReward(path, function)
    raising = UserReward(path, "raises", workers=1)
    with pytest.raises(BadInput, match="(?s)mine.py:raises.*raised an error for prompt.*ZeroDivisionError"):
        raising.try_out([item()], [1], [False])
    raising.pool.close()


# None of TRL: the reward does not apply


def of_trl(function):
    """A reward of a mixture, from TRL's list of numbers and None."""
    return lambda items, *_: graded(lambda completions: list(map(function, completions)), *items)


def score(rewards: dict, weights: dict, texts: list[str], world, step: int | None = 1):
    """The results of prompts with two responses each, and whether each response is trained on."""
    prompts = [Prompt(f"p:{i}", f"p{i}", [3], "1", meta={"prompt": f"p{i}"}) for i in range(len(texts) // 2)]
    ids = [[4, 5]] * len(texts)
    rows = collate([[3]] * len(texts), ids, [[0.0, 0.0]] * len(texts), [False] * len(texts), 0, torch.device("cpu"))
    results = Rewards(rewards, weights).score(prompts, texts, rows, world, step)
    return results, rows.response_mask.any(1).tolist()


def math(text: str) -> float | None:
    return None if text.startswith("code") else float("right" in text)


def code(text: str) -> float | None:
    return 2.0 * ("right" in text) if text.startswith("code") else None


def test_a_reward_that_does_not_apply_is_left_out_of_the_sum(world):
    rewards = {"math": of_trl(math), "code": of_trl(code), "length": of_trl(lambda text: 10.0)}
    texts = ["math right", "math wrong", "code right", "code wrong"]
    results, trained = score(rewards, {"math": 1.0, "code": 1.0, "length": 0.5}, texts, world)
    assert [result.score for result in results] == [6.0, 5.0, 7.0, 5.0] and all(trained)
    assert [result.acc for result in results] == [1.0, 0.0, 1.0, 0.0], "acc is that of the first reward that applies"
    assert results[2].info["parts"] == {"math": None, "code": 2.0, "length": 10.0}


def test_a_response_to_which_no_reward_applies_leaves_with_its_prompt_and_the_run_goes_on(world, capsys):
    texts = ["math right", "math wrong", "code right", "code wrong"]
    results, trained = score({"math": of_trl(math)}, {"math": 1.0}, texts, world)
    assert trained == [True, True, False, False]
    assert [result.score for result in results] == [1.0, 0.0, 0.0, 0.0]
    assert "None" in results[2].info["ungraded"] and NOT_APPLIED in results[2].info
    assert "2 of 4 responses" in capsys.readouterr().out


def test_a_reward_that_is_only_measured_does_not_stand_in_for_one_that_does_not_apply(world):
    """With a score of 0 the responses about code would be trained as wrong ones."""
    rewards = {"math": of_trl(math), "length": of_trl(lambda text: 10.0)}
    texts = ["math right", "math wrong", "code right", "code wrong"]
    results, trained = score(rewards, {"math": 1.0, "length": 0.0}, texts, world)
    assert trained == [True, True, False, False]
    assert NOT_APPLIED in results[2].info and results[2].info["parts"] == {"math": None, "length": 10.0}


def test_a_step_to_which_no_reward_applies_stops_the_run(world):
    with pytest.raises(RunFailed, match="2 of 2 responses .*at least one reward must apply"):
        score({"math": of_trl(math)}, {"math": 1.0}, ["code right", "code"], world)
    _, trained = score({"math": of_trl(math)}, {"math": 1.0}, ["code right", "code"], world, step=None)
    assert trained == [False, False], "an evaluation does not stop it"


def test_a_reward_that_fails_still_stops_the_run_beside_one_that_does_not_apply(world):
    rewards = {"math": of_trl(math), "broken": lambda items, *_: [Result(None, None, None, {"died": "x"})] * 4}
    with pytest.raises(RunFailed, match="4 of 4 responses could not be graded.*died"):
        score(rewards, {"math": 1.0, "broken": 1.0}, ["math", "math", "code", "code"], world)


# Runs on the command line, with the embedded model

REWARDS = """
import asyncio, json

def ours(items, lengths, truncated):
    return [float(len(item.response)) for item in items]

async def trl(prompts, completions, completion_ids, ability=None, **kwargs):
    await asyncio.sleep(0)
    assert all(prompt[-1]["role"] == "user" and prompt[-1]["content"].endswith("=") for prompt in prompts)
    assert len(completion_ids) == len(completions) and ability in (None, ["math"] * len(prompts))
    return [len(completion[0]["content"]) + 0.25 for completion in completions]

async def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
    await asyncio.sleep(0)
    number = ground_truth["number"] if isinstance(ground_truth, dict) else int(ground_truth)
    return {"score": len(solution_str) + number / 1000, "acc": "5" in solution_str, "source": data_source}

def reward_func(queries, prompts, labels, **kwargs):
    assert len(queries) == len(labels) == 1 and queries[0].startswith(prompts[0])
    return {"rewards": [len(queries[0]) - len(prompts[0]) + 0.5], "extra_logs": {"label": [json.dumps(labels[0])]}}

def sometimes(completions, **kwargs):
    return [None for _ in completions]
"""
NAMES = ("ours", "trl", "compute_score", "reward_func", "sometimes")


def rows_of(form: str) -> list[dict]:
    problems = [(a, b) for a in range(10, 14) for b in range(20, 22)]
    rows = []
    for number, (a, b) in enumerate(problems):
        prompt = [{"role": "user", "content": f"{a}+{b}="}]
        if form == "trl":
            rows.append({"prompt": prompt, "solution": f"${a + b}$"})
            continue
        truth = {"style": "rule", "ground_truth": {"number": a + b}} if form == "objects" else str(a + b)
        truth = truth if isinstance(truth, dict) else {"style": "rule", "ground_truth": truth}
        row = {"data_source": "sums", "prompt": prompt, "ability": "math", "reward_model": truth}
        rows.append(row | {"extra_info": {"index": number}})
    return rows


def short_run(tmp_path, rows: str, *rewards: str) -> tuple[str, list[dict]]:
    """What a run of one step prints, and its responses."""
    (tmp_path / "mine.py").write_text(REWARDS)
    flags = ["--rollout-backend", "hf", "--steps", 1, "--prompts-per-step", 4, "--group-size", 2, "--mini-batches", 2]
    flags += ["--max-response-tokens", 12, "--eval-prompts", 0, "--run-dir", "run", "--rollouts-every", 1]
    result = launch(ROOT / "algos/grpo.py", "--dataset", rows, "--reward", *rewards, *flags, cwd=tmp_path, engine=False)
    lines = (tmp_path / "run/rollouts/step_000001.jsonl").read_text().splitlines()
    assert len(lines) == 8
    return result.stdout, [json.loads(line) for line in lines]


MINE = [f"mine.py:{name}" for name in NAMES]


@pytest.mark.slow
@pytest.mark.parametrize("form", ["texts", "objects"])
def test_four_signatures_on_rows_of_verl(tmp_path, form):
    from pyarrow import Table, parquet

    parquet.write_table(Table.from_pylist(rows_of(form)), tmp_path / "train.parquet")
    # A built-in grader reads the same rows. It cannot compare with an object.
    graders = ["gsm8k=0"] if form == "texts" else []
    said, lines = short_run(tmp_path, "train.parquet", *MINE, *graders)
    for name, owner in zip(NAMES, ("onefile-rl", "TRL", "verl", "OpenRLHF", "TRL")):
        assert re.search(rf'reward "mine.py:{name}" has {owner}', said)
    for line in lines:
        length = len(line["response"])
        sum_of = sum(map(int, re.findall(r"\d+", line["prompt"])))
        parts = [line["info"]["parts"][name] for name in MINE]
        assert parts == pytest.approx([length, length + 0.25, length + sum_of / 1000, length + 0.5, None])
        assert line["score"] == pytest.approx(sum(parts[:4]))
        assert line["answer"] == (str(sum_of) if form == "texts" else None)


@pytest.mark.slow
def test_rows_of_trl_without_a_flag(tmp_path):
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows_of("trl")))
    _, lines = short_run(tmp_path, "train.jsonl", "mine.py:trl", "gsm8k=0", "mine.py:reward_func=0")
    for line in lines:
        sum_of = sum(map(int, re.findall(r"\d+", line["prompt"])))
        assert line["score"] == len(line["response"]) + 0.25 and line["answer"] == str(sum_of)


@pytest.mark.slow
def test_prompts_without_anything_else_and_a_reward_that_reads_the_response_alone(tmp_path):
    rows = [{"prompt": row["prompt"]} for row in rows_of("trl")]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    _, lines = short_run(tmp_path, "train.jsonl", "mine.py:trl")
    assert all(line["score"] == len(line["response"]) + 0.25 and line["answer"] is None for line in lines)


def test_the_answer_of_a_built_in_data_set_reaches_all_of_them():
    (prompt, *_) = load(("arithmetic",), Source(), "train", arithmetic.tokenizer(), 64)
    one = Item(prompt.text, "#### " + prompt.answer, prompt.answer, prompt.meta)
    assert scores(lambda completions, answer: [float(answer[0] in completions[0])], one) == [1.0]
    assert scores(lambda solution_str, ground_truth: float(ground_truth in solution_str), one) == [1.0]
    assert scores(lambda queries, labels: [float(queries[0].endswith(labels[0]))], one) == [1.0]
