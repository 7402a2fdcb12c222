"""The graders that read strings: GSM8K's tricky cases, DAPO's table, shaping rewards, and hostile strings."""

import json
import random
import runpy
import time
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT

from algos.dapo import overlong_penalty
from common import rewards
from common.data import arithmetic
from common.data.prompts import Prompt
from common.preflight import checks
from common.rewards.grading import Item, Result, grade_gsm8k, gsm8k_reward
from common.rewards.math_grading import grade_by_string
from common.rewards.text import (
    dapo_lenient_reward,
    dapo_reward,
    format_boxed_reward,
    format_reward,
    missing_eos_reward,
    overlong_reward,
    repetition_reward,
)

GSM8K = ROOT.parent / "shared" / "data" / "gsm8k"

CASES = [  # number, response, reference answer, accuracy (flexible mode)
    (1, "So she makes 9*2 = $18.\n#### 18", "18", 1),
    (2, "#### 18.", "18", 1),
    (3, "####18", "18", 1),
    (4, "#### $18", "18", 1),
    (5, "#### 1,234", "1234", 1),
    (6, "#### 1234", "1,234", 1),
    (7, "The total is 70,000.", "70000", 1),
    (8, "#### -5", "-5", 1),
    (9, "#### 5", "-5", 0),
    (10, "The change is -$5.", "-5", 1),
    (11, "The change is \u22125.", "-5", 1),
    (12, "He has 10-12", "12", 1),
    (13, "was 5 -3", "-3", 1),
    (14, "costs 5 - 3 = 2", "2", 1),
    (15, "#### 18.00", "18", 1),
    (16, "#### 18.50", "37/2", 1),
    (17, r"\boxed{\frac{1}{2}}", "0.5", 1),
    (18, r"\boxed{1/2}", "0.5", 1),
    (19, r"\boxed{2 1/2}", "2.5", 1),
    (20, r"\boxed{-\frac{3}{4}}", "-0.75", 1),
    (21, r"\boxed{0.333}", "1/3", 0),
    (22, r"\boxed{50\%}", "50", 1),
    (23, "#### 50%", "0.5", 0),
    (24, r"\boxed{\$18}", "18", 1),
    (25, r"\boxed{18\text{ dollars}}", "18", 1),
    (26, r"\boxed{1{,}080}", "1080", 1),
    (27, r"\boxed{1\,080}", "1080", 1),
    (28, r"\boxed{x = 7}", "7", 1),
    (29, r"\boxed{7", "7", 1),
    (30, r"First \boxed{3}, corrected: \boxed{4}", "4", 1),
    (31, r"First \boxed{3}, corrected: \boxed{4}", "3", 0),
    (32, "#### 3\nWait.\n#### 4", "4", 1),
    (33, "\\boxed{4}\n#### 5", "5", 1),
    (34, "", "5", 0),
    (35, "I do not know", "5", 0),
    (36, "#### five", "5", 0),
    (37, "#### 5 apples and 3 pears", "5", 1),
    (38, "The answer is 18 (see step 2)", "18", 0),
    (39, "The answer is **$1,234.50**.", "1234.5", 1),
    (40, "#### 1e3", "1000", 1),
    (41, "#### .5", "0.5", 1),
    (42, "#### 18 #### 20", "20", 1),
    (43, "x2 = ? so y", "2", 0),
    (44, "12,34", "1234", 0),
    (45, "#### 007", "7", 1),
    (46, r"\boxed{}", "7", 0),
    (47, "#### 18\n\nHuman: next question 99", "18", 1),
    (48, "#### 2/4", "0.5", 1),
    (49, "#### 1/0", "0", 0),
    (50, "Answer: 42\nCheck: 42/7=6", "42", 0),
    (51, "#### " + "9" * 400, "9", 0),
    (52, "#### 100,000,000", "100000000", 1),
    (53, "The answer is $-5$.", "-5", 1),
    (54, "#### $-5", "-5", 1),
    (55, "so x = - 3", "-3", 1),
    (56, "The result is (-3)", "-3", 1),
    (57, "#### 1e999999999", "1", 0),
    (57, "#### 1e000000999999999", "1", 0),  # for hours, and with all of the memory
    (57, "#### 1e-000000999999999", "1", 0),
    (57, "#### 1e0000002", "100", 1),
    (58, "#### " + "9" * 5000, "9", 0),
    (59, "#### 12 000", "12000", 0),
    (60, "The change is -$ 5.", "-5", 1),
    (61, "#### - $ 5", "-5", 1),
    (62, "#### -€ 5", "-5", 1),
    (63, "The change is (-$ 5)", "-5", 1),
    (64, r"\boxed{-\$ 5}", "-5", 1),
    (65, "costs 5 - $ 3", "3", 1),
    (66, r"#### \frac1{12}", "1/12", 1),
    (67, r"#### \frac{11}2", "5.5", 1),
    (68, r"#### \frac{1}{-2}", "-0.5", 1),
    (69, r"#### \frac{-1}{-2}", "0.5", 1),
    (70, r"\boxed{\cfrac{7}{2}}", "3.5", 1),
    (71, "#### 18 ####", "18", 1),
    (72, "#### 18\n########", "18", 1),
    (73, "#### 18\n#### ", "18", 1),
    (74, "#### five\n####", "5", 0),
    (75, r"\boxed{18 = x}", "18", 1),
]


@pytest.mark.parametrize("newline", ["\n", "\r\n"])
@pytest.mark.parametrize("number, response, answer, accuracy", CASES)
def test_case(number, response, answer, accuracy, newline):
    assert grade_gsm8k(response.replace("\n", newline), answer) == accuracy


def test_strict_wants_the_marker():
    assert grade_gsm8k("#### 18", "18", "strict") == 1
    assert grade_gsm8k(r"so \boxed{18}", "18", "strict") == 0
    assert grade_gsm8k("the answer is 18", "18", "strict") == 0
    assert grade_gsm8k("#### 18\n\\boxed{20}", "18", "strict") == 1


def test_the_number_after_the_last_equals_sign_of_a_box():
    assert grade_gsm8k(r"\boxed{3 \times 6 = 18}", "18") == 1 and grade_gsm8k(r"\boxed{3 \times 6 = 18}", "3") == 0


REASONING = "We add them one by one, and we take care. " * 300  # twelve thousand characters without a number
ANSWERS = [  # reward, how a response gives its answer
    ("gsm8k", "#### {}"),
    ("gsm8k", r"\boxed{{{}}}"),
    ("gsm8k", "It is {}"),
    ("gsm8k-strict", "#### {}"),
    ("dapo", "Answer: {}"),
    ("dapo-lenient", "**Answer: {}.**"),
]


@pytest.mark.parametrize("name, answer", ANSWERS)
def test_the_end_of_a_long_response_is_graded(name, answer):
    """Not its beginning, where another answer may have been tried."""
    response = f"{answer.format(7)}\n{REASONING}\n{answer.format(8)}"
    reward = rewards.load_one(name)
    results = reward([Item("", response, "8"), Item("", response, "7")], [9] * 2, [False] * 2)
    assert [result.acc for result in results] == [1, 0]


THOUGHT = "<think>so</think> "
NAMED = [  # reward, a response on which rewards of a similar name differ, score
    ("gsm8k", "it is 34", 1),
    ("gsm8k-strict", "it is 34", 0),
    ("dapo", "Answer: 34.", -1),
    ("dapo-lenient", "Answer: 34.", 1),
    ("format", THOUGHT + "<answer>34</answer>", 1),
    ("format", THOUGHT + r"\boxed{34}", 0),
    ("format-boxed", THOUGHT + "<answer>34</answer>", 0),
    ("format-boxed", THOUGHT + r"\boxed{34}", 1),
    ("repetition", "34", -0.25),
    ("missing-eos", "34", -1),
    ("overlong:9:2", "34", -1),
    ("overlong:11:4", "34", -0.5),
]


@pytest.mark.parametrize("name, response, score", NAMED)
def test_a_name_stands_for_its_reward(name, response, score):
    """The length limit has cut the response off after nine tokens. The 3-gram 5 5 5 stands in it twice."""
    item = Item("", response, "34", response_ids=[5, 5, 5, 5, 6, 6])
    (result,) = rewards.load_one(name)([item], [9], [True])
    assert result.score == score


@pytest.mark.skipif(not GSM8K.is_dir(), reason="GSM8K is not at ../shared/data/gsm8k")
def test_reference_solutions_grade_themselves():
    """With either marker, and 1,024 of them in a fifth of a second of one core."""
    rows = [json.loads(line) for split in ("train", "test") for line in (GSM8K / f"{split}.jsonl").open()]
    assert len(rows) == 8792
    boxed = lambda solution: solution.replace("#### ", r"The answer is \boxed{") + "}"
    for mode, change in (("flexible", str), ("strict", str), ("flexible", boxed)):
        items = [Item("", change(row["answer"]), row["answer"].split("####")[1]) for row in rows]
        assert all(result.acc == 1 for result in gsm8k_reward(items, [], [], mode))
    assert min(seconds(lambda: gsm8k_reward(items[:1024], [], [], "flexible")) for _ in range(3)) < 0.2


def seconds(function) -> float:
    start = time.process_time()
    function()
    return time.process_time() - start


DAPO_CASES = [  # response, reference answer, right for dapo, right for dapo-lenient
    ("Answer: 34", "34", 1, 1),
    ("answer : 34", "34", 1, 1),
    ("Answer: $34$", "34", 1, 1),
    (r"Answer: \boxed{34}", "34", 1, 1),
    ("Answer: x = 34", "34", 1, 1),
    ("Answer: 34 degrees", "34", 1, 1),
    ("Answer: 34 units", "34", 1, 1),
    ("Answer:\n34", "34", 1, 1),
    ("Answer: $34$ because", "34", 1, 1),
    ("Answer: $34.$", "34", 1, 1),
    ("Answer: 1,234", "1234", 1, 1),
    ("Answer: 34\nAnswer: 35", "35", 1, 1),
    ("Answer: 34\nAnswer: 35", "34", 0, 0),
    (r"Answer: \frac12", r"\frac{1}{2}", 1, 1),
    ("Answer: 34.", "34", 0, 1),
    ("Answer: 34.0", "34", 0, 1),
    ("Answer: 34.5", "34", 0, 0),
    ("Answer: 034", "34", 0, 1),
    ("Answer: an integer 34", "34", 0, 0),
    ("Answer: 1/2", r"\frac{1}{2}", 0, 0),
    ("**Answer:** 34", "34", 0, 1),
    ("**Answer: 34.**", "34", 0, 1),
    ("*Answer: 34*", "34", 0, 1),
    (r"\boxed{34}", "34", 0, 0),
    ("The answer is 34", "34", 0, 0),
    ("Answer: 34" + " " * 300, "34", 0, 1),
    ("Answer: -34", "34", 0, 0),
    (r"Answer: 90^\circ", "90", 1, 1),
    (r"Answer: 5 \text{ cm}", "5", 1, 1),
]


@pytest.mark.parametrize("newline", ["\n", "\r\n"])
@pytest.mark.parametrize("response, answer, strict, lenient", DAPO_CASES)
def test_dapo_case(response, answer, strict, lenient, newline):
    items = [Item("", response.replace("\n", newline), answer)]
    for reward, right in ((dapo_reward, strict), (dapo_lenient_reward, lenient)):
        (result,) = reward(items, [9], [False])
        assert (result.score, result.acc) == (2 * right - 1, right)


def test_dapo_says_what_it_read():
    graded = lambda text: dapo_reward([Item("", text, "34")], [9], [False])[0].extracted
    assert graded("Answer: x = 35 units") == "35" and graded("no idea") is None


FORMAT_CASES = [  # prompt, response, score
    ("p", "<think>a</think><answer>b</answer>", 1),
    ("p", "<think>a\nb</think>\n\n<answer>b</answer>\n", 1),
    ("p", "<think></think><answer></answer>", 1),
    ("...<think>\n", "a</think> <answer>b</answer>", 1),  # the template wrote the opening tag
    ("...<think>\n", "<think>a</think> <answer>b</answer>", 0),
    ("p", "a</think> <answer>b</answer>", 0),
    ("p", "well <think>a</think><answer>b</answer>", 0),
    ("p", "<think>a</think><answer>b</answer> I hope", 0),
    ("p", "<think>a</think> so <answer>b</answer>", 0),
    ("p", "<answer>b</answer><think>a</think>", 0),
    ("p", "<think>a<answer>b</think></answer>", 0),
    ("p", "<think>a<think>b</think></think><answer>b</answer>", 0),
    ("p", "<think>a</think><answer>b</answer><answer>c</answer>", 0),
    ("p", "<think>a</think><answer><answer>c</answer>", 0),
    ("p", "<think>a</think><answer>b", 0),
    ("p", "", 0),
]


@pytest.mark.parametrize("prompt, response, score", FORMAT_CASES)
def test_format(prompt, response, score):
    assert format_reward([Item(prompt, response, "5")], [9], [False]) == [Result(score, score)]


def test_overlong_by_hand():
    items = [Item("", "", "5")] * 6
    lengths = [16384, 16385, 17408, 18432, 20480, 30000]
    results = overlong_reward(items, lengths, [False] * 6, max_length=20480, cache_length=4096)
    assert [round(result.score, 6) for result in results] == [0, -0.000244, -0.25, -0.5, -1, -1]
    assert all(result.acc == 0 for result in results)
    hard = overlong_reward(items, [99, 100, 101, 1, 1, 1], [False] * 6, max_length=100, cache_length=0)
    assert [result.score for result in hard] == [0, -1, -1, 0, 0, 0]


@pytest.mark.parametrize("longest, cache", [(20, 0), (20, 7), (20, 20), (1, 1)])
def test_overlong_is_the_penalty_of_dapo(longest, cache):
    lengths = list(range(1, 30))
    items = [Item("", "", "5")] * len(lengths)
    results = overlong_reward(items, lengths, [False] * len(lengths), max_length=longest, cache_length=cache)
    expected = overlong_penalty(torch.tensor(lengths), longest, cache)
    assert torch.allclose(torch.tensor([result.score for result in results]), expected)


def test_repetition_and_missing_eos():
    ids = [[1, 2], [], [1, 2, 3], [1, 1, 1, 1, 1], [1, 2, 3, 1, 2, 3]]  # 3-grams: none, none, 1, 3 alike, 3 of 4
    items = [Item("", "", "5", response_ids=row) for row in ids]
    results = repetition_reward(items, [len(row) for row in ids], [False] * 5)
    assert [(r.score, r.acc) for r in results] == [(0, 0), (0, 0), (0, 0), (1 / 3 - 1, 0), (-0.25, 0)]
    results = missing_eos_reward(items[:2], [4, 4], [True, False])
    assert [(r.score, r.acc) for r in results] == [(-1, 0), (0, 0)]


PIECES = [
    "{",
    "}",
    r"\boxed{",
    r"\frac",
    "####",
    "1",
    "9" * 50,
    ",",
    ".",
    "-",
    "$",
    "\0",
    "\ud800",
    "e",
    "/",
    " ",
    "\n",
    "x",
    "Answer:",
    "=",
    r"\text{",
    "**",
    "a ",
    "<think>",
    "</think>",
    "<answer>",
    "</answer>",
    r"\{",
    r"\,",
    r"\right",
    "²",
]
HOSTILE = [
    "9" * 1_000_000,
    "#### " + "9" * 1_000_000,
    "{" * 100_000,
    r"\boxed{" * 100_000,
    "####" * 100_000,
    "\\" * 100_000,
    r"\frac" * 100_000,
    "1/" * 100_000,
    "1 " * 100_000,
    "-" * 100_000,
    "1," * 100_000,
    r"\text{" * 100_000,
    "$" * 100_000,
    "1e" * 100_000,
    "#" * 1_000_000 + "x",
    "-$ " * 100_000 + "5",
    "\0" * 100_000,
    "\ud800" * 100_000,
    "Answer:" * 100_000,
    "Answer: " + "$" * 100_000,
    "<think>" * 100_000,
    "<think>" + " " * 1_000_000,
    "<think></think>" + "\n" * 1_000_000 + "<answer></answer>.",
    r"1\frac{" + " " * 5000,
    r"\frac{1}{" + " " * 5000,
    r"<think></think>\boxed{" * 10_000,
]
GRADERS = {
    "gsm8k": partial(gsm8k_reward, mode="flexible"),
    "gsm8k-strict": partial(gsm8k_reward, mode="strict"),
    "dapo": dapo_reward,
    "dapo-lenient": dapo_lenient_reward,
    "format": format_reward,
    "format-boxed": format_boxed_reward,
    "math": lambda items, *_: [grade_by_string(items[0].response, items[0].answer, "boxed") or Result(0, 0)],
    "math-flexible": lambda items, *_: [
        grade_by_string(items[0].response, items[0].answer, "flexible") or Result(0, 0)
    ],
}


def test_a_users_function_is_tried_with_rows_of_each_data_set():
    tried = []
    function = SimpleNamespace(try_out=lambda items, *_: tried.extend(items) or [Result(0.0, 0.0)] * len(items))
    prompts = [Prompt(f"{name}:{i}", f"{name}{i}", [3], "1", dataset=name) for name in "ab" for i in range(5)]
    checks.try_rewards(SimpleNamespace(rewards={"mine": function}), prompts, arithmetic.tokenizer())
    assert [item.prompt for item in tried] == ["a0", "a0", "a1", "a1", "b0", "b0", "b1", "b1"]


def test_a_first_tag_that_the_template_wrote_counts():
    for reward, rest in ((format_boxed_reward, r"a</think> \boxed{5}"), (format_reward, "a</think><answer>5</answer>")):
        score = lambda prompt, text, reward=reward: reward([Item(prompt, text, "5")], [9], [False])[0].score
        assert score("2+3?<think>\n", rest) == score("2+3?", f"<think>{rest}") == 1
        assert score("2+3?", rest) == 0
    assert format_boxed_reward([Item("p", r"<think>\boxed{5}</think>", "5")], [9], [False])[0].score == 0


@pytest.mark.parametrize("name", GRADERS)
def test_no_string_raises_or_takes_long(name):
    draw = random.Random(0)
    for text in [*HOSTILE, *("".join(draw.choices(PIECES, k=draw.randrange(3000))) for _ in range(200))]:
        limit = 0.05 if len(text) <= 10_000 else 1.0
        grade = lambda text=text: check(GRADERS[name]([Item("p", text, "5")], [9], [False]))
        assert any(seconds(grade) < limit for _ in range(3)), f"{text[:40]!r} took too long, three times"


def check(results: list[Result]) -> None:
    assert len(results) == 1 and results[0].acc in (0.0, 1.0) and results[0].score in (-1.0, 0.0, 1.0)


def test_rewards_of_the_baselines():
    nearness = runpy.run_path(str(ROOT / "baselines/nearness.py"))["score"]
    items = [Item("", response, "iban") for response in ("iban", " iban\n", "iba", "xyz", "")]
    found = nearness(items, [1] * 5, [False] * 5)
    assert [result.score for result in found] == [1, 1, pytest.approx(6 / 7), 0, 0]
    assert [result.acc for result in found] == [1, 1, 0, 0, 0]
    random_reward = runpy.run_path(str(ROOT / "baselines/random_reward.py"))["score"]
    scores = random_reward(items * 40, [1] * 200, [False] * 200)
    assert {*scores} == {0, 1} and 60 < sum(scores) < 140
    other_step = [Item("another prompt", item.response, "iban") for item in items]
    assert random_reward(other_step * 40, [1] * 200, [False] * 200) != scores, "each seed of a run has its own coins"
