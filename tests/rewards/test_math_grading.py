"""The MATH grader, in this process: what math-verify takes for equal, and what we do before asking it."""

import subprocess
import sys
import threading

import pytest
from conftest import ROOT

from common.rewards import math_grading
from common.rewards.grading import Item, Result
from common.rewards.math_grading import clean, grade_by_string, grade_math, parse_math_gold
from common.rewards.workers import MathReward

CASES = [  # in the box, reference answer, accuracy
    ("1/2", r"\frac{1}{2}", 1),
    ("0.5", r"\frac{1}{2}", 1),
    (r"\frac12", r"\frac{1}{2}", 1),
    (r"50\%", "50", 1),
    (r"50\%", "0.5", 1),  # both: percent is ambiguous
    ("50", "0.5", 0),
    ("1,234", "1234", 1),
    ("100", "0,100", 0),
    ("0,125", "125", 0),
    ("1/2, 100", "1/2,100", 1),
    ("1/2,100", "1/2, 100", 1),
    (r"\sqrt2,100", r"\sqrt2, 100", 1),
    (r"\pi/2,100", r"\pi/2, 100", 1),
    ("2,100,x", "2, 100, x", 1),
    ("2,100,-3", "2, 100, -3", 1),
    (r"1,000,\ 2,000", "1000, 2000", 1),
    ("a_1,200", "a_1, 200", 1),
    ("x_{1,200}", "x_{1, 200}", 1),
    ("1{,}234", "1234", 1),
    (r"10\,000", "10000", 1),  # math-verify alone reads 10 * 0
    (r"12\,345\,678", "12345678", 1),
    (r"1,\!234", "1234", 1),
    ("7200", r"7,\! 200", 1),
    ("1000", "1 000", 1),  # math-verify alone reads 1 * 0
    ("0", "1 000", 0),
    ("1000", r"1\;000", 1),
    ("1000", "1~000", 1),
    (r"10\ 000\ 000", "10000000", 1),
    ("2 100/3", r"\frac{106}{3}", 1),
    ("1000, 2000", "1,000, 2,000", 1),  # math-verify alone reads 0, 1, 2
    ("0, 1, 2", "1,000, 2,000", 0),
    (r"1,000\text{ and }2,000", "1000, 2000", 1),
    ("(1,200)", "(1, 200)", 1),
    (r"x\ge1,000", r"x\ge 1000", 1),
    (r"2\times1,200", "2400", 1),
    (r"\pm1,200", r"\pm 1200", 1),
    (r"1,200,\text{ and }2,400", "1200, 2400", 1),
    (r"2,100,\text{or }3", "2,100,3", 1),
    (r"\$1,200,\$1,500", "1200, 1500", 1),
    ("5", "5 dollars", 1),
    ("5 points.", "5", 1),
    ("5 km/h", "5", 1),
    ("5 people", r"5\text{ people}", 1),
    ("6 people", "5 people", 0),
    ("5 dozen", "5", 0),
    (r"\$18", "18", 1),
    ("3.", "3", 1),  # math-verify alone cannot read it
    ("3", "3.", 1),
    (r"90^\circ", "90", 1),
    (r"5\text{ cm}", "5", 1),
    (r"3 \text{ feet}", r"3 \text{ inches}", 1),  # units are never compared
    ("x=5", "5", 1),
    ("5", "x=5", 1),
    ("y=5", "x=5", 0),
    ("(2,1)", "(1,2)", 0),
    ("x>3 and x<1", "x<1 or x>3", 0),
    ("x>3 or x<1", "x<1 or x>3", 1),
    ("x<1 or x>2", "x<1 and x>2", 0),
    (r"A \rightarrow B", r"A \leftarrow B", 0),
    (r"\{1,2\}", r"\{2,1\}", 1),
    ("1,2", "2,1", 1),
    ("(0,1)", "[0,1)", 0),
    (r"x \in [0,1]", "[0,1]", 1),
    ("x<3", r"(-\infty,3)", 1),  # math-verify alone allows it only the other way round
    (r"3 \le x", r"x \ge 3", 1),
    (r"\sqrt{8}", r"2\sqrt{2}", 1),
    ("2.828", r"2\sqrt2", 0),
    ("1/3", "0.333333", 1),
    ("1/3", "0.33", 0),
    ("0.333", r"\frac13", 0),
    (r"2\pi", "6.283185", 1),
    (r"\pi", "3.14159", 0),
    ("x^2+2x+1", "(x+1)^2", 1),
    (r"1\frac{1}{2}", r"\frac32", 1),
    ("2 1/2", r"\frac52", 1),  # math-verify alone reads 3/2
    ("2 1/2", r"\frac32", 0),
    ("2 1/2", r"\frac{21}{2}", 0),
    (r"1.5\times 10^3", "1500", 1),
    ("1.5e3", "1500", 0),  # e is Euler's number
    ("5!", "120", 1),
    (r"\binom{5}{2}", "10", 1),
    (r"\log_2 8", "3", 1),
    (r"\text{(A)}", "A", 1),
    (r"\text{Tuesday}", r"\text{Monday}", 0),
    ("11:30", "11/30", 1),  # a false positive: a clock time is a ratio
    ("2^{3}", "8", 1),  # another: not computed
    ("i", r"\sqrt{-1}", 0),
    ("36_8", "30", 0),
    ("", "7", 0),
    (r"\left(1, 2\right)", "(1,2)", 1),
    (r"\dfrac{3}{4}", r"\tfrac{3}{4}", 1),
    (r"\left\{1,2\right\}", r"\{2,1\}", 1),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", 1),
]


@pytest.mark.parametrize("said, answer, accuracy", CASES)
def test_case(said, answer, accuracy):
    for gold in (answer, f"${answer}$", rf"\({answer}\)", rf"so \boxed{{{answer}}}"):
        result = grade_math(rf"Thus it is \boxed{{{said}}}.", gold)
        assert (result.score, result.acc, result.extracted, result.info) == (accuracy, accuracy, said, {})


REASONING = "We add them one by one, and we take care. " * 300  # twelve thousand characters without a number
RESPONSES = [  # response, mode, reference answer, accuracy
    (rf"\boxed{{7}} {REASONING} \boxed{{8}}", "boxed", "8", 1),
    (rf"\boxed{{7}} {REASONING} \boxed{{8}}", "boxed", "7", 0),
    (rf"\boxed{{7}} {REASONING} \boxed{{\frac{{16}}{{2}}}}", "boxed", "8", 1),  # by algebra
    (rf"\boxed{{8}} {REASONING} \boxed{{\frac{{14}}{{2}}}}", "boxed", "8", 0),
    (f"It is $7$. {REASONING} No, it is $8$.", "flexible", "8", 1),
    (f"It is $7$. {REASONING} No, it is $8$.", "flexible", "7", 0),
    (r"\boxed{1} and then \boxed{2}", "boxed", "2", 1),  # math-verify alone makes a set of both
    (r"\boxed{1} and then \boxed{2}", "boxed", "1", 0),
    (r"\boxed{1} and then \boxed{2", "boxed", "1", 0),  # it has taken the first one back
    (r"\boxed{7", "boxed", "7", 0),
    (r"\boxed7", "boxed", "7", 1),
    (r"\boxed{x = \frac{14}{2}}", "boxed", "7", 1),
    (r"so it is $7$", "boxed", "7", 0),
    (r"so it is $7$", "flexible", "7", 1),
    (r"the final answer is $\frac{14}{2}$.", "flexible", "7", 1),
    ("so we get 8 apples", "flexible", "8", 1),
    ("so it is \u22128", "flexible", "-8", 1),
    ("Answer: 2x+1", "flexible", "2x+1", 1),
    ("Answer: 2x+1", "flexible", "2", 0),
    (r"Answer: 3\sqrt{2}", "flexible", r"3\sqrt{2}", 1),
    (r"**Answer: 2\pi**", "flexible", r"2\pi", 1),
    (r"Answer: x = \pi", "flexible", r"\pi", 1),
    ("#### (1,2)", "flexible", "(1,2)", 1),
    (r"Answer: \sqrt{2}.", "flexible", r"\sqrt{2}", 1),
    ("Answer: x>5", "flexible", "x>5", 1),
    ("Answer: 2 (x+1)", "flexible", "2x+2", 1),
    ("Answer: 2 r", "flexible", "2r", 1),
    ("Answer: 2A", "flexible", "2A", 1),
    ("Answer: x^2 + y^2 = r", "flexible", "x^2+y^2=r", 1),
    ("Answer: (C) (1,2)", "flexible", "(1,2)", 1),
    ("Answer: \u221212 C", "flexible", "-12", 1),
    ("Answer: 2 1/2 L", "flexible", "5/2", 1),
    ("Answer: 3/4 (0.75)", "flexible", "3/4", 1),
    *((f"Answer: {said}", "flexible", said, 1) for said in ("60 m/s", "12 m^2", "5 N", "5 J/K", "2V", "3 T^2")),
    ("Answer: 5 N", "flexible", "6 N", 0),
    ("Answer: 5 N\nThat is all.", "flexible", "5 N", 1),
    ("Answer: 5 N\nOr rather 6.", "flexible", "5 N", 0),
    ("Answer: 10 (2^3)", "flexible", "80", 1),
    ("Answer: 10 (2^3)", "flexible", "10", 0),
    ("Answer: 8 (2^3)", "flexible", "8", 1),
    ("Answer: 8 (2^3)", "flexible", "64", 0),
    ("Answer: (C) 12 (9+3)", "flexible", "12", 1),
    ("Answer: (C) 12 (9+3)", "flexible", "144", 0),
    ("Answer: 2 1/2 (5/2)", "flexible", "5/2", 1),
    ("Answer: 4 (-2)", "flexible", "-8", 1),
    ("Answer: (A) - 1", "flexible", "A-1", 1),
    ("Answer: (X) (Y)", "flexible", "XY", 1),
    ("#### 2x+1\nDone.", "flexible", "2x+1", 1),
    ("#### x\nDone.", "flexible", "x", 1),
    (r"Thus x = 10\,000.", "flexible", "10000", 1),
    (r"$5$ so \boxed{7} and $8$", "flexible", "7", 1),
    (r"it is $7$" + " and so on" * 60, "flexible", "7", 0),  # before the last 500 characters
    ("I do not know", "flexible", "7", 0),
    ("", "flexible", "7", 0),
    ("", "boxed", "7", 0),
    (r"\boxed{7} \boxed{\left\{ 8 \right.}", "boxed", "7", 0),  # an escaped brace needs no partner
]


@pytest.mark.parametrize("response, mode, answer, accuracy", RESPONSES)
def test_which_part_of_the_response_counts(response, mode, answer, accuracy):
    assert grade_math(response, answer, mode).acc == accuracy


def test_each_reward_of_math_grades_in_its_own_mode():
    """Only math-flexible reads an answer without a box. It needs a worker for that."""
    items = [Item("", r"so it is $\frac{14}{2}$", "7"), Item("", r"so it is \boxed{7}", "7")]
    for name, expected in (("math", [0, 1]), ("math-flexible", [1, 1])):
        results = MathReward(name, workers=1)(items, [9] * 2, [False] * 2)
        assert [result.acc for result in results] == expected


def test_a_period_goes_but_not_that_of_right():
    assert clean("3. ") == "3" and clean(r"\left\{ x \right.") == r"\left\{ x \right."


def test_equal_strings_need_no_algebra():
    easy = [("7", "7"), ("$7$", "7"), (r"\dfrac{1}{2}", r"\frac{1}{2}"), (r"\left(1, 2\right)", "(1,2)"), ("x^", "x^")]
    for said, answer in easy:
        assert grade_by_string(rf"\boxed{{{said}}}", answer, "boxed") == Result(1.0, 1.0, said)
    for said, answer in [("2 1/2", "21/2"), ("8", "7"), (r"\pi r", r"\pir"), ("(0,1)", "[0,1)")]:
        assert grade_by_string(rf"\boxed{{{said}}}", answer, "boxed") is None


@pytest.mark.parametrize("answer", ["7", "-12", r"\frac{1}{2}", r"$\pi$", r"\boxed{7}", "(1,2)", r"\text{Monday}", "A"])
def test_gold_that_can_be_read(answer):
    assert parse_math_gold(answer)


@pytest.mark.parametrize("answer", ["", r"\frac{1}{", "{", r"\left(", "x^", "\\", "???"])
def test_gold_that_cannot_be_read(answer):
    assert not parse_math_gold(answer)


@pytest.mark.parametrize("answer", ["", r"\frac{1}{"])
def test_an_unreadable_gold_grades_nobody(answer):
    result = grade_math(r"\boxed{7}", answer)
    assert result.score is None and "cannot be parsed" in result.info["error"]


def test_a_poisoned_expression_is_wrong_and_says_so():
    assert grade_math(r"\boxed{99^{99^{99}}}", "7") == Result(0.0, 0.0, "99^{99^{99}}", {"timeout": 1})
    assert grade_math(r"\boxed{\sqrt{8}}", r"2\sqrt{2}").acc == 1


@pytest.mark.parametrize(
    "text", ["{" * 100_000, "9" * 1_000_000, "\0", "\ud800", "(" * 60, r"\frac{" * 300 + "}" * 600]
)
def test_no_string_raises(text):
    for mode in ("boxed", "flexible"):
        for response in (text, rf"\boxed{{{text[-1000:]}}}"):
            assert grade_math(response, "7", mode).acc == 0


def test_only_the_main_thread_may_ask():
    raised = []

    def grade():
        with pytest.raises(RuntimeError, match="main thread"):
            grade_math(r"\boxed{8}", "7")
        raised.append(True)

    thread = threading.Thread(target=grade)
    thread.start()
    thread.join()
    assert raised


@pytest.mark.parametrize(
    "modules, absent",
    [
        ("common.rewards, common.rewards.math_grading", "torch sympy math_verify requests"),
        ("common.rewards.workers, common.processes.child", "torch sympy math_verify requests pydantic"),
        ("common.rewards.mixture", "math_verify requests common.rewards.model common.rewards.service"),
        ("common.rewards.mixture", "common.rewards.workers"),
    ],
)
def test_an_import_loads_no_more_than_it_needs(modules, absent):
    check = f"import sys, {modules}; assert not (found := {set(absent.split())} & set(sys.modules)), found"
    result = subprocess.run([sys.executable, "-c", check], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def test_a_large_data_set_is_checked_in_part(monkeypatch):
    """Each answer takes up to a tenth of a second, so that half a million would take hours before a run."""
    parsed = []
    monkeypatch.setattr(math_grading, "parse_math_gold", lambda answer: parsed.append(answer) or answer != "x9")
    assert math_grading.unreadable_golds({"1", "x9"}) == {"x9"} and len(parsed) == 2
    parsed.clear()
    monkeypatch.setattr(math_grading, "CHECKED_GOLDS", 10)
    math_grading.unreadable_golds({str(number) for number in range(105)})
    assert len(parsed) == 11 and len({answer[0] for answer in parsed}) > 5, "evenly spread"
