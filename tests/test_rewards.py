"""The GSM8K grader: every tricky case seen in the wild, the reference solutions, and hostile strings."""

import json
import random
import time
from pathlib import Path

import pytest
import torch

from common.data import Prompt
from common.grading import extract, grade_gsm8k
from common.placement import BadInput
from common.rewards import Result, load, score
from common.rollout import collate

GSM8K = Path(__file__).parents[2] / "shared" / "data" / "gsm8k"

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
    (58, "#### " + "9" * 5000, "9", 0),
    (59, "#### 12 000", "12000", 0),
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


def test_extraction_is_named():
    assert extract("#### 5")[1] == "marker"
    assert extract("it is 5")[1] == "last-number"
    assert extract("no idea")[1] is None


@pytest.mark.skipif(not GSM8K.is_dir(), reason="GSM8K is not at ../shared/data/gsm8k")
def test_reference_solutions_grade_themselves():
    rows = [json.loads(line) for split in ("train", "test") for line in (GSM8K / f"{split}.jsonl").open()]
    assert len(rows) == 8792
    for mode in ("flexible", "strict"):
        assert all(grade_gsm8k(row["answer"], row["answer"].split("####")[1], mode) for row in rows)


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
]
HOSTILE = [
    "9" * 1_000_000, "{" * 100_000, r"\boxed{" * 100_000, "####" * 100_000, r"\frac" * 100_000, "1/" * 100_000,
    "1 " * 100_000, "-" * 100_000, "1," * 100_000, r"\text{" * 100_000, "$" * 100_000, "1e" * 100_000, "\0" * 1000,
]  # fmt: skip


def test_no_string_raises_or_takes_long():
    draw = random.Random(0)
    for text in [*HOSTILE, *("".join(draw.choices(PIECES, k=draw.randrange(3000))) for _ in range(300))]:
        limit = 0.05 if len(text) <= 10_000 else 1.0
        assert any(seconds(text) < limit for _ in range(3)), f"{text[:40]!r} took too long, three times"


def seconds(text: str) -> float:
    start = time.perf_counter()
    assert grade_gsm8k(text, "5") in (0.0, 1.0)
    return time.perf_counter() - start


def test_user_reward(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text("def length(items, lengths, truncated):\n    return [float(n) for n in lengths]\n"
                    "def short(items, lengths, truncated):\n    return [1.0]\n"
                    "def broken(items, lengths, truncated):\n    return [1.0, float('nan')]\n"
                    "from common.rewards import Result\n"
                    "def whole(items, lengths, truncated):\n    return [Result(1, 1)] * len(items)\n")  # fmt: skip
    prompts = [Prompt("a", "p", [5], "1"), Prompt("b", "p", [5], "1")]
    rollout = collate([[5], [5]], [[6], [6, 7]], None, [False, False], 0, torch.device("cpu"))
    graded = lambda function: score(load(f"{path}:{function}"), prompts, ["a", "bb"], rollout)
    assert [r.score for r in graded("length")] == [1.0, 2.0]
    assert graded("whole") == [Result(1.0, 1.0), Result(1.0, 1.0)] and isinstance(graded("whole")[0].score, float)
    with pytest.raises(BadInput, match="returned 1 results for 2 items"):
        graded("short")
    with pytest.raises(BadInput, match="the reward of row 1 is nan, for prompt 'p'"):
        graded("broken")
    with pytest.raises(BadInput, match='no function "absent"'):
        load(f"{path}:absent")
    with pytest.raises(BadInput, match="did you mean gsm8k"):
        load("gsm8")
