"""Which answer a grader reads: in the reference, in a response, in an expression, and in what a reward returns."""

import json
from decimal import Decimal

import pytest
import torch

from common import rewards
from common.data.prompts import Prompt
from common.data.templates import fields
from common.errors import BadInput
from common.rewards.grading import Item, Result, grade_gsm8k, parse_gold
from common.rewards.math_grading import grade_math
from common.rewards.mixture import Rewards, grade
from common.rewards.workers import to_rows

NUMBERS = [  # reference answer, the number it is
    ("18", 18),
    ("-5", -5),
    ("+5", 5),
    ("\u22125", -5),
    ("(-3)", -3),
    ("1,234", 1234),
    ("1{,}080", 1080),
    ("$18", 18),
    (r"\$18", 18),
    ("-$5", -5),
    ("-$ 5", -5),
    ("-€ 5", -5),
    ("$-5$", -5),
    ("18.", 18),
    ("50%", 50),
    (r"50\%", 50),
    (".5", 0.5),
    ("1e3", 1000),
    ("2 1/2", 2.5),
    (r"-\frac{3}{4}", -0.75),
    (r"90^\circ", 90),
    ("18 dollars", 18),
    ("60 miles per hour", 60),
    ("60 km/h", 60),
    ("5 cm^2", 5),
    (r"5\text{ m}", 5),
    (r"\boxed{18}", 18),
    ("x = 7", 7),
    ("1,200 + 5 = 1,205", 1205),
    ("She has 3 and 4.\n#### 7", 7),
    ("#### 9*2 = 18", 18),
    ("#### 18\nDone.", 18),
    ("x =\n- 5", -5),
]
NO_NUMBERS = [
    "",
    "about five",
    "5 apples",
    "5 dozen",
    "5 million",
    "5x",
    "5m",
    r"2\pi",
    r"5\sqrt{3}",
    "10^5",
    "2^{10}",
    "10_2",
    "3!",
    "3 or 4",
    "3, 4",
    "(1,2)",
    "7 (or 8)",
    "x = 3, y = 4",
    "x = 3 or x = 4",
    "x >= 5",
    "10-12",
    "3:30",
    "12,34",
    "1 200",
    "3/-4",
    "1/2/3",
    "1.2.3",
    "5 feet 3 inches",
    r"\boxed{3} \boxed{4}",
    r"2*9 is \boxed{18}",
    "She has 3 and 4, which makes 7",
    "#### five",
]
NUMERIC = ["gsm8k", "gsm8k-strict", "dapo-lenient"]


@pytest.mark.parametrize("answer, number", NUMBERS)
def test_a_reference_that_is_a_number(answer, number):
    assert parse_gold(answer) == number
    if number == int(number):
        right, wrong = f"Answer: {number}\n#### {number}", f"Answer: {number + 1}\n#### {number + 1}"
        for name in NUMERIC:
            results = rewards.load_one(name)([Item("", text, answer) for text in (right, wrong)], [9] * 2, [False] * 2)
            assert [result.acc for result in results] == [1, 0], name


@pytest.mark.parametrize("answer", NO_NUMBERS)
def test_a_reference_that_is_more_than_a_number_is_refused(answer):
    """Its first number, or its last, would be another answer."""
    for name in NUMERIC:
        with pytest.raises(BadInput, match=r"^d:7: .*is not a number.* math ") as refusal:
            Rewards({name: rewards.load_one(name)}, {name: 1.0}).check_answers([Prompt("d:7", "p", [3], answer)])
        assert "math-flexible" in str(refusal.value) and "dapo " in str(refusal.value)


def test_every_reward_must_be_able_to_read_the_references():
    """One that could not would grade all responses as wrong, also if it is not named first."""
    mixture = Rewards({"mine": None, "gsm8k": None}, {"mine": 1.0, "gsm8k": 1.0})
    mixture.check_answers([Prompt("d:1", "p", [3], "7")])
    with pytest.raises(BadInput, match="is not a number"):
        mixture.check_answers([Prompt("d:1", "p", [3], r"2\pi")])


@pytest.mark.parametrize("answer", ["", " ", "units", "$", "a = ", "$$5$$"])
def test_dapo_refuses_a_reference_that_its_rules_leave_nothing_of(answer):
    """An empty answer, such as "Answer: units", would be right."""
    with pytest.raises(BadInput, match="^d:7: gold answer .* is empty by the rules of --reward dapo.* double dollars"):
        Rewards({"dapo": None}, {"dapo": 1.0}).check_answers([Prompt("d:7", "p", [3], answer)])
    Rewards({"dapo": None}, {"dapo": 1.0}).check_answers([Prompt("d:7", "p", [3], "five units")])


def test_math_refuses_a_reference_with_the_reward_that_would_do():
    with pytest.raises(BadInput, match="cannot be parsed as LaTeX, which --reward math needs; --reward dapo"):
        Rewards({"math": None}, {"math": 1.0}).check_answers([Prompt("d:7", "p", [3], "???")])


def test_a_response_is_not_wrong_because_of_its_reference():
    """A service grades without a check before the run."""
    (result,) = rewards.load_one("gsm8k")([Item("", "#### 2", r"2\pi")], [9], [False])
    assert result.score is None and result.acc is None and "is not a number" in result.info["error"]
    with pytest.raises(ValueError, match="is not a number"):
        grade_gsm8k("#### 2", r"2\pi")


JSON_NUMBERS = [  # in the file, what the graders get
    ("34", "34"),
    ("34.0", "34"),
    ("-7", "-7"),
    ("0", "0"),
    ("-0.0", "0"),
    ("0.5", "0.5"),
    ("1200.0", "1200"),
    ("0.00001", "0.00001"),
    ("1e-05", "0.00001"),
    ("-2.5e-7", "-0.00000025"),
    ("1.5e3", "1500"),
    ("1e22", "10000000000000000000000"),
    ("1e25", "10000000000000000000000000"),
    ("0.1", "0.1"),
    ("123456789012345678901234567890123", "123456789012345678901234567890123"),
    ('"1e-05"', "1e-05"),
    ('"34.0"', "34.0"),
]


@pytest.mark.parametrize("written, read", JSON_NUMBERS)
def test_a_number_in_json_keeps_its_meaning(written, read):
    row = json.loads(f'{{"prompt": "x", "answer": {written}}}')
    answer = fields("d:1", row, {}).answer
    assert answer == read


@pytest.mark.parametrize("written, read", [("5.00", "5"), ("-0.50", "-0.5"), ("100", "100"), ("0." + "1" * 35, None)])
def test_a_decimal_of_a_table_keeps_all_digits(written, read):
    answer = fields("d:1", {"prompt": "x", "answer": Decimal(written)}, {}).answer
    assert answer == (read or written)


def test_a_small_number_in_json_is_graded_as_that_number():
    answer = fields("d:1", json.loads('{"prompt": "x", "answer": 0.00001}'), {}).answer
    assert grade_math(r"\boxed{10^{-5}}", answer).acc == 1 and grade_math(r"\boxed{e-5}", answer).acc == 0


TAIL = "\nI am sure of it, because each step was checked." * 100  # five thousand characters
RESPONSES = [  # response, {reward: the reference that it is right for}
    ("#### 9*2 = 18", {"gsm8k": "18", "gsm8k-strict": "18"}),
    ("#### x = 3 + 4 = 7", {"gsm8k": "7", "gsm8k-strict": "7"}),
    ("#### 18 (9*2 = 18, so 9 = 3*3)", {"gsm8k": "18", "gsm8k-strict": "18"}),
    ("#### 18 = x", {"gsm8k": "18", "gsm8k-strict": "18"}),
    ("#### 18 ####", {"gsm8k": "18", "gsm8k-strict": "18"}),
    ("#### 18\nDone.\n####", {"gsm8k": "18", "gsm8k-strict": "18"}),
    ("It is 18.\n####", {"gsm8k": "18", "gsm8k-strict": None}),
    ("#### 18\nWait, it is 4\n####\n4", {"gsm8k": "18", "gsm8k-strict": "18"}),
    ("####\n18", {"gsm8k": "18", "gsm8k-strict": None}),
    ("#### **\n18", {"gsm8k": "18", "gsm8k-strict": None}),
    ("#### 18 #### ####", {"gsm8k": "18", "gsm8k-strict": "18"}),
    ("#### 4 #### 18", {"gsm8k": "18", "gsm8k-strict": "18"}),
    ("#### 18 ####\nThat took 4 steps.", {"gsm8k": "18", "gsm8k-strict": "18"}),
    ("#### 18 ####\n####", {"gsm8k": "18", "gsm8k-strict": "18"}),
    ("#### 18\nSo she makes $18.\n####", {"gsm8k": "18", "gsm8k-strict": "18"}),
    ("#### 5 apples and 3 pears ####", {"gsm8k": "5", "gsm8k-strict": "5"}),
    ("#### 18 apples\n####", {"gsm8k": "18", "gsm8k-strict": "18"}),
    ("#### 18 = x\n####", {"gsm8k": "18", "gsm8k-strict": "18"}),
    ("#### 18 (= 9*2)\n####", {"gsm8k": "18", "gsm8k-strict": "18"}),
    ("#### 5 boxes of 14\n####", {"gsm8k": "5", "gsm8k-strict": "5"}),
    ("It is not 4.\n#### four\n####", {"gsm8k": None, "gsm8k-strict": None}),
    ("#### 1e99\nIt is 4.\n####", {"gsm8k": None, "gsm8k-strict": None}),
    (r"\boxed{18 = x}", {"gsm8k": "18"}),
    (r"\boxed{18 = x = y}", {"gsm8k": "18"}),
    (r"\boxed{18\text{ apples} = x}", {"gsm8k": "18"}),
    (r"\boxed{18 red apples = n}", {"gsm8k": "18"}),
    *((rf"\boxed{{{said}}}", {"gsm8k": "18"}) for said in ("x = 18 = y", "x=18=", r"n = 18\text{ dollars} = ?")),
    *((rf"\boxed{{{said} = x}}", {"gsm8k": None}) for said in ("4 plus three", "4 times two", "18 dozen", "4 pi")),
    (r"\boxed{4 + 3 = ?}", {"gsm8k": None}),
    (r"\boxed{4 + 3 = seven}", {"gsm8k": None}),
    (r"\boxed{4x = y}", {"gsm8k": None}),
    (r"So we get:" + "\n- $$5$$", {"gsm8k": "5"}),  # the bullet of a list
    ("So we get:\n- $ 5", {"gsm8k": "5"}),
    ("- $ 5", {"gsm8k": "5"}),
    ("So we get:\n- -10/2", {"gsm8k": None}),
    ("So we get\n$$\n- 5\n$$", {"gsm8k": None}),  # a sign, because a formula goes on
    ("So we get\n\\[\n- 5\n\\]", {"gsm8k": None}),
    ("So x =\n- 5", {"gsm8k": None}),
    ("So x = \\\n- 5", {"gsm8k": None}),
    ("So\n\\begin{equation}\n- 5\n\\end{equation}", {"gsm8k": None}),
    ("\\boxed{x =\n- 5}", {"gsm8k": None}),
    ("\\boxed{\n- 5\n}", {"gsm8k": None}),
    ("-3 - -1/2 is less, so 4 - -10/2", {"gsm8k": None}),
    ("so it is n - -10/2", {"gsm8k": None}),
    ("so it is 1 --10/2", {"gsm8k": None}),
    *((f"{label}-\\frac{{-10}}{{2}}", {"gsm8k": "5"}) for label in ("so (a) ", "so (1) ", "Q1 ", "for x\n", "10%\n")),
    ("Use \\begin{x} here:\n- 5 apples", {"gsm8k": "5"}),
    ("The cost =$\n- 5", {"gsm8k": "5"}),
    (r"\boxed{-\frac{10}{-2}}", {"gsm8k": "5"}),
    (r"\boxed{-\frac{-10.0}{2}}", {"gsm8k": "5"}),
    ("#### 5 apples and 3 pears", {"gsm8k": "5", "gsm8k-strict": "5"}),
    ("Answer: 9*2 = 18", {"dapo-lenient": "18", "math-flexible": "18"}),
    ("Answer: 10/2=5", {"dapo": "5", "dapo-lenient": "5", "math-flexible": "5"}),
    ("Answer: $y = 2x + 1$", {"math-flexible": "y=2x+1"}),
    ("Answer: y = 2x + 1", {"math-flexible": "y=2x+1"}),
    ("**Answer:** 5 + 2x - 2x.", {"math-flexible": "5"}),
    ("Answer: 18 (9*2 = 18)", {"math-flexible": "18"}),
    ("Answer: 5 apples", {"math-flexible": "5"}),
    ("Answer: 5 m", {"math-flexible": "5"}),
    ("Answer: 5!", {"math-flexible": "5"}),
    *((f"Answer: 18{unit}", {"math-flexible": "18"}) for unit in (" L", "L", " m/s", " m^2", " m/s^2", " K", " N")),
    *((f"Answer: 18 {why}", {"math-flexible": "18"}) for why in ("(9*2)", "(18)", "(C)", "[1]", "[9*2]", "= x")),
    *((f"Answer: {name} 18", {"math-flexible": "18"}) for name in ("(C)", "C:", "C.")),
    *((f"Answer: {gap}\nIt is 18.", {"math-flexible": "18"}) for gap in ("____", "-", ":", "[ ]")),
    *((f"#### {heading}\nThe value is 18.", {"math-flexible": "18"}) for heading in ("(a)", "4)", "B", "(4)")),
    (r"Answer: 18 (9 \times 2)", {"math-flexible": "18"}),
    ("Answer: 18 (m/s)", {"math-flexible": "18"}),
    ("Answer: 18 L\nThe final answer is $4$.", {"math-flexible": "4"}),
    ("Answer: 4x", {"math-flexible": None}),
    *(
        (f"Answer: 4{factor}", {"math-flexible": None})
        for factor in (" (x+1)", r" (\pi+1)", "x^2 (x+1)", " i", " a", "A")
    ),
    ("Answer: (C) 4x", {"math-flexible": None}),
    ("#### 4x\nDone.", {"math-flexible": None}),
    ("#### 4\\pi\nI am sure.", {"math-flexible": None}),
    ("Answer: 3, 4", {"math-flexible": None}),
    ("Answer: 3\nThe final answer is $4$.", {"math-flexible": "4"}),
    (r"\boxed{2x = 14}", {"gsm8k": "14"}),
    (r"\boxed{3}, or rather \boxed{4", {"gsm8k": "4", "math": None, "math-flexible": "4"}),
    (r"\boxed{3}, or rather \boxed{\frac{8}{2}", {"math": None, "math-flexible": "4"}),
    (r"\boxed{3}, or rather \boxed {4}", {"gsm8k": "4", "math": "4", "math-flexible": "4"}),
    (r"\boxed{3}; I wrote it in \boxed", {"gsm8k": "3", "math": "3", "math-flexible": "3"}),
    (r"\boxed{\boxed{4}}", {"gsm8k": "4", "math": "4", "math-flexible": "4"}),
    (r"\boxed{4}" + TAIL, {"gsm8k": "4", "math": "4", "math-flexible": "4"}),
    ("#### 4" + TAIL, {"gsm8k": "4", "gsm8k-strict": "4"}),
    ("#### 4 ####" + TAIL, {"gsm8k": "4", "gsm8k-strict": "4"}),
    ("Answer: 4" + TAIL, {"dapo-lenient": "4", "dapo": None}),  # DAPO's own limit is 300 characters
    ("#### Step 2: add" + TAIL + " It is 42.", {"gsm8k": "42", "gsm8k-strict": None}),  # a heading of Markdown
    (r"\boxed{3}" + TAIL + "\n#### 4", {"gsm8k": "4", "gsm8k-strict": "4", "math": "3"}),
]


@pytest.mark.parametrize("response, right", RESPONSES)
def test_the_answer_of_a_response(response, right):
    """None: nothing is read."""
    for name, answer in right.items():
        for reference in ("3", "4", "5", "7", "9", "10", "14", "18", "42", "y=2x+1"):
            if name.startswith("math"):
                acc = grade_math(response, reference, "boxed" if name == "math" else "flexible").acc
            elif parse_gold(reference) is not None and reference != "y=2x+1":
                (result,) = rewards.load_one(name)([Item("", response, reference)], [9], [False])
                acc = result.acc
            else:
                continue
            assert acc == (reference == answer), (name, reference)


EXPRESSIONS = [  # in the box, reference answer, whether they are equal
    (r"\frac{1}{2^{99}}", r"\frac{1}{2^{98}}", 0),
    (r"\frac{2001}{10^{20}}", r"\frac{2002}{10^{20}}", 0),
    (r"2^{-99}", r"\frac{1}{2^{99}}", 1),
    (r"(2^{-99},1)", r"(2^{-98},1)", 0),
    (r"e^{-100}", r"e^{-101}", 0),
    ("0.0000001", "0.0000002", 0),
    (r"3\times 10^{-9}", "0.000000003", 1),
    (r"3\times 10^{-9}", "0.000000004", 0),
    ("0.012346", r"\frac{1}{81}", 1),
    ("0.001235", r"\frac{1}{810}", 1),
    ("0.333333", r"\frac13", 1),
    (r"9\%", "9", 1),
    (r"9\%", "0.09", 1),
    (r"\sqrt{2}+\sqrt{3}-\sqrt{5+2\sqrt{6}}", "0", 1),
    ("1, 200", "1,200", 0),
    ("1,200", "1, 200", 0),
    (r"1,\ 200", "1,200", 0),
    ("1, 200", "1,  200", 1),
    ("1, 200", "200, 1", 1),
    ("(1, 200)", "(1,200)", 1),
    (r"\{1, 200\}", r"\{1,200\}", 1),
    ("1, 2", "1,2", 1),
    ("10_2", "10_{10}", 0),
    ("10_2", "10_3", 0),
    ("10_2", "10", 0),
    ("10", "10_2", 1),  # the question says which base
    ("10_{10}", "10", 1),
    ("10_{2}", "10_2", 1),
    ("(10)_2", "10_2", 1),
    (r"101_{\text{two}}", "101_2", 1),
    ("11_2, 10_2", "10_2,11_2", 1),
    (r"\log_2 8", "3", 1),
    ("x_2", "x_3", 0),
    (r"\sqrt{50x^3}", r"5x\sqrt{2x}", 1),
    (r"\sqrt{a^2b}", r"a\sqrt{b}", 1),
    (r"\sqrt{x}\sqrt{y}", r"\sqrt{xy}", 1),
    (r"\sqrt{x^2}", "x", 0),
    (r"\sqrt{x^2}", "|x|", 1),
    (r"\sqrt{a^2+b^2}", "a+b", 0),
    (r"\sqrt{50x^3}", r"4x\sqrt{2x}", 0),
    (r"\sqrt[3]{x^3y}", r"x\sqrt[3]{y}", 1),
    (r"\sqrt{x^{-2}}", r"\frac{1}{x}", 0),
    (r"x\sqrt{x^2}", r"|x|\sqrt{x^2}", 0),
    (r"\sqrt{x}", r"-\sqrt{x}", 0),
    ("1<x<2", "(1,2)", 1),
    ("(1,2)", "1<x<2", 1),
    (r"1\le x<2", "(1,2)", 0),
    (r"x \ge 3", r"[3,\infty)", 1),
    (r"x > 3", r"[3,\infty)", 0),
    (r"x \neq 3", r"(-\infty,3)\cup(3,\infty)", 1),
    (r"x<1\text{ or }x>2", r"(-\infty,1)\cup(2,\infty)", 1),
    (r"(-\infty,1)\cup(2,\infty)", r"x<1\text{ or }x>2", 1),
    (r"x>1\text{ and }x<2", "(1,2)", 1),
    (r"x<1 \lor x>2", r"(-\infty,1)\cup(2,\infty)", 1),
    (r"x<1 \vee x>2", r"(-\infty,1)\cup(2,\infty)", 1),
    (r"x>1 \land x<2", "(1,2)", 1),
    (r"x \ge 1 \wedge x \le 2", "[1,2]", 1),
    (r"p \lor q", r"p \lor q", 1),
    (r"p \lor q", r"p \land q", None),  # no expression that can be compared: ungraded
    (r"x<1\text{ or }x>2", r"(-\infty,1)\cap(2,\infty)", 0),
    (r"x<1\text{ or }x>2", "(1,2)", 0),
    ("x<3", "x>3", 0),
    ("x<3", r"x\le 3", 0),
    (r"x \in (1,2)", "1<x<2", 1),
    (r"x=1\text{ or }x=2", r"\{1,2\}", 1),
    (r"x=1\text{ or }x=2", "1,2", 1),
    ("5", "x<5", 0),
    (r"0\le x\le 1", r"x \in [0,1]", 1),
    ("2,5", "2<x<5", 0),
    ("1<x<2", r"\{1,2\}", 0),
]


@pytest.mark.parametrize("said, answer, accuracy", EXPRESSIONS)
def test_expressions_that_are_equal_and_some_that_only_look_so(said, answer, accuracy):
    assert grade_math(rf"\boxed{{{said}}}", answer).acc == accuracy


WRONG_RETURNS = [  # what a reward returns for two items, what the message says
    ({"a": 1.0, "b": 0.0}, "dict"),
    ({0.5: "x", 1.0: "y"}, "dict"),
    ({0.5, 1.0}, "set"),
    ("10", "str"),
    (b"10", "bytes"),
    (1.0, "float"),
    (None, "got None"),
    (torch.zeros(2, 1), r"\(2, 1\)"),
    (torch.zeros(1, 2), r"\(1, 2\)"),
    (torch.tensor(1.0), r"\(\)"),
]
WRONG_RESULTS = ["1.0", None, [1.0], {"score": 1.0}, torch.zeros(3), torch.zeros(2, 2), 1j]


@pytest.mark.parametrize("returned, said", WRONG_RETURNS)
def test_a_return_value_of_another_type_is_refused(returned, said):
    with pytest.raises(BadInput, match=f"expected a list of 2 results.*{said}"):
        to_rows(returned, 2)
    with pytest.raises(BadInput, match=f'reward "mine": expected a list of 2 results.*{said}'):
        grade("mine", lambda *_: returned, [Item("", "", "1")] * 2, [1] * 2, [False] * 2)


@pytest.mark.parametrize("result", WRONG_RESULTS)
def test_a_result_of_another_type_is_refused(result):
    with pytest.raises(BadInput, match=f"result 1: expected a number or a Result, .*{type(result).__name__}"):
        to_rows([1.0, result], 2)
    with pytest.raises(BadInput, match='reward "mine": row 1 is .*, expected a Result'):
        grade("mine", lambda *_: [Result(1.0, 1.0), result], [Item("", "", "1")] * 2, [1] * 2, [False] * 2)


@pytest.mark.parametrize(
    "returned",
    [
        [0.5, True],
        (0.5, 1),
        iter([0.5, 1.0]),
        torch.tensor([0.5, 1.0]),
        torch.tensor([0.5, 1.0]).numpy(),
        [torch.tensor(0.5), torch.tensor([1.0])],
        [Result(0.5, None), Result(1.0, 1.0)],
        {"a": 0.5, "b": 1.0}.values(),
    ],
)
def test_a_right_return_value_is_taken(returned):
    assert [row[0] for row in to_rows(returned, 2)] == [0.5, 1.0]
