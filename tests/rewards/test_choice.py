"""--reward choice: which forms of an answer count, which rows fit, and that prompt and reward agree on the letters."""

import json
import random
import time

import pytest
from conftest import ROOT, SHORT, launch

from common import rewards
from common.data import arithmetic, choices
from common.data.prompts import Prompt, Source
from common.data.prompts import load as load_prompts
from common.data.templates import Fields
from common.errors import BadInput
from common.rewards.choice import final_letter
from common.rewards.grading import Item, Result
from common.rewards.mixture import Rewards

CITIES = ["Rome", "Paris", "the capital of Norway", "12"]
CHAT = arithmetic.tokenizer()
CHAT.chat_template = "{% for m in messages %}({{ m.role }}){{ m.content }}{% endfor %}="

# What counts. Responses to a question with the options CITIES, and the letter they give.
FORMS = [
    (r"\boxed{B}", "B"),
    (r"So \boxed{\text{B}}.", "B"),
    (r"$\boxed{(B)}$", "B"),
    (r"\boxed{\textbf{(B)}\ Paris}", "B"),
    (r"\boxed{B) Paris}", "B"),
    (r"\boxed{Paris}", "B"),
    (r"\boxed{\text{the capital of Norway}}", "C"),
    (r"\boxed{12}", "D"),
    (r"\boxed{b}", "B"),
    ("Answer: B", "B"),
    ("Answer: B.", "B"),
    ("answer: (b)", "B"),
    ("ANSWER: b", "B"),
    ("Answer: a", "A"),
    ("Final answer: **B**", "B"),
    ("**Answer:** B", "B"),
    ("**Answer**: B", "B"),
    ("**Answer: B) Paris**", "B"),
    ("**Answer:**\n\n**B**", "B"),
    ("Answer:\nB", "B"),
    ("Answer：B", "B"),
    ("Answer: $B$", "B"),
    (r"Answer: \(B\)", "B"),
    ("Answer: option B", "B"),
    ("Answer: B. Paris", "B"),
    ("Answer: B - Paris", "B"),
    ("Answer: B Paris", "B"),
    ("Answer: B because Rome is elsewhere.", "B"),
    ("Answer: A because I know it.", "A"),
    ("Answer: A, which is old.", "A"),
    ("Answer: A is correct", "A"),
    ("Answer: A was first", "A"),
    ("Answer: B is correct", "B"),
    *(
        (f"Answer: B {praise}", "B")
        for praise in ("is not wrong", "is not only right", "cannot be wrong", "can't be beaten")
    ),
    ("Answer: B) Paris is not wrong", "B"),
    ("Answer: B - a", "B"),
    ("Answer: B | Paris", "B"),
    (r"\boxed{B\quad\text{Paris}}", "B"),
    ("Answer: A Rome", "A"),
    ("Answer: paris.", "B"),
    ("Answer: The capital of Norway", "C"),
    ("Answer: Paris, because it is.", "B"),
    ("Answer: 12", "D"),
    ("<answer>B</answer>", "B"),
    ("<answer>\n(B) Paris\n</answer>", "B"),
    ("<answer>Paris</answer> I am sure.", "B"),
    ("The answer is (B)", "B"),
    ("The answer is B.", "B"),
    ("The correct answer is: **B**", "B"),
    ("So the right option is B, not A.", "B"),
    ("The best choice is B) Paris.", "B"),
    ("The answer is Paris.", "B"),
    ("The answer is A.", "A"),
    ("The answer is A, of course", "A"),
    ("The answer is (b) Paris.", "B"),
    ("The correct answer is option C, the capital of Norway.", "C"),
    ("It must be **B**", "B"),
    ("**B**\n\nRome is older.", "B"),
    ("**(B)**.\nRome is older.", "B"),
    ("So: **B) Paris**\nThat is all.", "B"),
    ("I think\n\nso **B** is right.", "B"),
    ("B", "B"),
    ("B.", "B"),
    ("B)", "B"),
    ("(B)", "B"),
    ("  **B.**  \n", "B"),
    ("A", "A"),
    ("Rome is in Italy.\n\nB", "B"),
    ("Rome is in Italy.\nB. Paris", "B"),
    ("(B) Paris", "B"),
    ("B) paris.", "B"),
    ("- B) Paris", "B"),
]
LAST = [  # the last mark counts
    ("Answer: A\nNo.\nAnswer: B", "B"),
    (r"\boxed{A} and then \boxed{B}", "B"),
    (r"The answer is A. Wait: \boxed{B}", "B"),
    (r"\boxed{A}. Wait, the answer is B.", "B"),
    ("**A**\n\nNo.\n\nB", "B"),
    ("Answer: A\n\nB", "B"),
    ("Answer: B\n\nThe answer is not clear to everybody.", "B"),
    ("Answer: B\n\n**Note**\nA good day!", "B"),
    ("Answer: B\n\n- **A) Rome** is elsewhere.\n- **D) 12** is a number.", "B"),
    ("**A) Rome**\nIn Italy.\n\n**B) Paris**\nIn France.\n\nThe answer is B.", "B"),
    ("Answer: B\n\nBut **A** is older.\nThat is all.", "B"),
    ("Answer: B" + " and so on" * 5000, "B"),
]
NOT = [  # no letter, or more than one
    "",
    "Paris",
    "I do not know.",
    "A good idea is to begin with Rome.",
    "The answer is A good idea.",
    "Answer: A good idea",
    "The answer is a",
    "The answer is a capital",
    "The answer is not B",
    "Answer: B is not right",
    "Answer: B was wrong, A is right",
    "Answer: B isn't right",
    "Answer: B cannot be right",
    "Answer: B) Paris is wrong",
    "Answer: B is NOT right",
    "Answer: B can not be right",
    "Answer: B, is wrong",
    "Answer: B is not only wrong but absurd",
    "Answer: B can't be excluded, but A is right",
    "Answer: B) is not right",
    "Answer: B is never right",
    "Answer: B option a",
    "Answer: (A) option (b)",
    "A city in France is the answer",
    "the best of them is b",
    "b",
    "Vitamin B",
    "Answer: E",
    r"\boxed{E}",
    "E",
    "**E**",
    "The answer is (E)",
    "Answer: B\nAnswer: E",
    "Answer: B\nAnswer: I am not sure",
    r"Answer: B. No: \boxed{13}",
    "Answer: BC",
    "Answer: B12",
    "Answer: A or B",
    "Answer: A and B",
    "Answer: B, C",
    "Answer: B/C",
    "Answer: (A) or (B)",
    "Answer: A) Rome, B) Paris",
    "Answer: B or maybe C",
    "Answer: either A or B",
    "The answer is A or B.",
    r"\boxed{A, B}",
    r"\boxed{A,\ B}",
    r"\boxed{A,\,B}",
    r"\boxed{A,~B}",
    r"\boxed{A|B}",
    r"\boxed{A \lor B}",
    r"\boxed{A \& B}",
    r"\boxed{A \\ B}",
    "Answer: A|B",
    "Answer: (A)(B)",
    "Answer: A) B)",
    "Answer: A, AND B",
    "Answer: A, or else B",
    "Answer: A、B",
    "Answer: A → B",
    "Answer: A vs. B",
    r"\boxed{AB}",
    "Answer: B) Rome",
    "B) Rome",
    "(B) something else",
    "It is **A** or **B**",
    "A) Rome\nB) Paris\nC) the capital of Norway\nD) 12",
    "**A) Rome**\nIn Italy.\n**B) Paris**\nIn France.",
    "A\nB",
    r"\boxed{",
    "Answer:",
    "<answer></answer>",
]
THINKING = [
    ("<think>Answer: A</think>Answer: B", "B"),
    ("<think>Answer: A</think>I do not know.", None),
    ("<think>Answer: A", None),
    ("Answer: A</think>", None),
    ("Answer: B <think>or A? Answer: A", "B"),
    ("<think>x</think>Answer: B<think>Answer: A</think>", "B"),
]


def row(options=CITIES, **columns) -> dict:
    return {"prompt": "Which city?", "choices": options, **columns}


def grade(response: str, meta: dict, answer: str | None = "B", prompt: str = "Which city?") -> Result:
    (result,) = rewards.load_one("choice")([Item(prompt, response, answer, {"prompt": prompt, **meta})], [9], [False])
    return result


@pytest.mark.parametrize("response, letter", FORMS + LAST)
def test_forms_that_count(response, letter):
    assert final_letter(response, CITIES) == letter
    result = grade(response, row(), "B")
    assert result == Result(float(letter == "B"), float(letter == "B"), letter)


@pytest.mark.parametrize("response", NOT)
def test_forms_that_do_not_count(response):
    assert final_letter(response, CITIES) is None
    assert grade(response, row(), "A") == grade(response, row(), "B") == Result(0.0, 0.0)


@pytest.mark.parametrize("response, letter", THINKING)
def test_nothing_inside_of_thinking_counts(response, letter):
    assert grade(response, row()).extracted == letter
    # The chat template may have written the first tag.
    assert grade(f"Answer: A</think>{response}", row(), prompt="Which city?<think>\n").extracted == letter


def test_letters_beyond_the_options_do_not_count():
    assert final_letter("Answer: C", CITIES[:2]) is None and final_letter("Answer: C", CITIES) == "C"
    ten = [str(number) for number in range(100, 110)]
    assert final_letter("Answer: J", ten) == "J" and final_letter("I. It is hard.", ten) is None
    assert final_letter("Answer: I think so", ten) is None and final_letter("Answer: I", ten) == "I"


PRONOUNS = [
    ("I was unable to decide", None),
    ("I as a model cannot say", None),
    ("I because it fits", "I"),
    ("I is correct", "I"),
]


@pytest.mark.parametrize("said, letter", PRONOUNS)
def test_the_pronoun_i_is_no_letter(said, letter):
    assert final_letter(f"Answer: {said}", [str(number) for number in range(100, 110)]) == letter


@pytest.mark.parametrize("said", ["B - a", "B a"])
def test_a_lower_case_letter_behind_a_choice_is_no_second_one(said):
    assert final_letter(f"Answer: {said}", CITIES) == "B"


def test_a_letter_is_read_before_a_text_that_is_a_letter():
    assert final_letter("Answer: B", ["B", "A"]) == "B" and final_letter("Answer: X", ["W", "X"]) == "B"


def test_an_option_in_latex_is_found_as_it_is_written():
    options = ["x", r"$p \lor q$", r"$1\,000$"]
    assert final_letter(r"\boxed{p \lor q}", options) == "B" and final_letter(r"Answer: $1\,000$", options) == "C"
    assert final_letter(r"Answer: B) $p \vee q$", options) == "B" and final_letter("Answer: A) y", ["x", "y"]) is None


def test_an_option_with_the_text_of_the_right_one_is_right():
    assert grade("Answer: C", row(["x", "y", "y"]), "B").score == 1


@pytest.mark.parametrize(
    "text",
    [
        "9" * 1_000_000,
        "Answer:" * 100_000,
        "Answer: " + "B" * 1_000_000,
        "the answer is " * 70_000,
        "**A**" * 200_000,
        "**A**\n" * 150_000,
        "*" * 1_000_000,
        "A) " * 300_000,
        "A) x\n" * 200_000,
        r"\boxed{" * 100_000,
        r"\text{" * 100_000,
        "<think>" * 100_000,
        "</think>" * 100_000,
        "(" * 1_000_000,
        "\n" * 1_000_000,
        " " * 1_000_000 + "B",
        "B" + "." * 1_000_000,
        "\ud800" * 100_000,
    ],
    ids=lambda text: ascii(text[:12]),
)
def test_no_response_raises_or_takes_long(text):
    def seconds() -> float:
        began = time.perf_counter()
        assert grade(text, row()).score in (0.0, 1.0)
        return time.perf_counter() - began

    assert any(seconds() < 3 for _ in range(3)), "three times"


# Rows of data sets

GPQA = {"Question": "Which city?", "Correct Answer": "Paris\n"}
GPQA |= {f"Incorrect Answer {n}": text for n, text in enumerate(["Rome", "Oslo", "Bern"], 1)}
ROWS = {  # columns, reference answer -> the options in their order, the right one
    "MMLU": (row(["0", "4", "2", "6"]), 1, ["0", "4", "2", "6"], "4"),
    "MMLU-Pro": ({"question": "q", "options": ["a", "b", "c"], "answer_index": 2}, "C", ["a", "b", "c"], "c"),
    "ARC": (row({"text": ["x", "y"], "label": ["A", "B"]}), "B", ["x", "y"], "y"),
    "ARC with numbers": (row({"text": ["x", "y", "z"], "label": ["1", "2", "3"]}), "2", ["x", "y", "z"], "y"),
    "ARC in rows": (row([{"label": "1", "text": "x"}, {"label": "2", "text": "y"}]), "2", ["x", "y"], "y"),
    "one label": (row([{"text": "x"}, {"label": "B", "text": "y"}]), "B", ["x", "y"], "y"),
    "one label in ARC": (row({"text": ["x", "y"], "label": ["B"]}), "B", ["x", "y"], "y"),
    "texts alone": (row([{"text": "x"}, {"text": "y"}]), "B", ["x", "y"], "y"),
    "MedQA": ({"question": "q", "options": {"A": "x", "B": "y"}}, "B", ["x", "y"], "y"),
    "AQuA": ({"question": "q", "options": ["A)21", "B) 7", "C)3"]}, "C", ["21", "7", "3"], "3"),
    "columns": ({"question": "q", "A": "x", "B": "y", "C": 3, "D": None}, "C", ["x", "y", "3"], "3"),
    "columns of a table": ({"question": "q", "A": "x", "B": "y", "C": "", "D": ""}, "B", ["x", "y"], "y"),
    "a text": (row(), "the capital of Norway.", CITIES, "the capital of Norway"),
    "a letter and its text": (row(), "B) Paris", CITIES, "Paris"),
    "a letter in brackets": (row(), "(b)", CITIES, "Paris"),
    "an index in a table": (row(), "3", CITIES, "12"),
    "an index with decimals": (row(), 3.0, CITIES, "12"),
    "numbers": (row([2, 3, 5]), 5, ["2", "3", "5"], "5"),
    "numbers in columns": ({"question": "q", "A": 1, "B": 2, "C": 3}, 3, ["1", "2", "3"], "3"),
    "numbers with letters": ({"question": "q", "options": {"A": 1, "B": 2, "C": 3}}, 3, ["1", "2", "3"], "3"),
    "numbers in ARC": (row({"text": [1, 2, 3], "label": ["A", "B", "C"]}), 3, ["1", "2", "3"], "3"),
    "numbers in rows": (row([{"label": "A", "text": 1}, {"label": "B", "text": 2}]), 2, ["1", "2"], "2"),
    "numbers beside a null": ({"question": "q", "choices": None, "options": [1, 2, 3]}, 3, ["1", "2", "3"], "3"),
    "in the prompt": ({"prompt": "Which?\nA. x\nB. y\n\nGive a letter."}, "B", ["x", "y"], "y"),
    "in the prompt in brackets": ({"prompt": "Which? (A) x (B) y (C) z"}, "C", ["x", "y", "z"], "z"),
    "the last of two lists": ({"prompt": "A) p\nB) q\nWhich?\nA) x\nB) y"}, "B", ["x", "y"], "y"),
}


def read(columns: dict, answer):
    return choices.read(columns, columns.get("prompt", columns.get("question", "q")), answer)


@pytest.mark.parametrize("name", ROWS)
def test_rows_that_fit(name):
    columns, answer, options, right = ROWS[name]
    question = read(columns, answer)
    assert question.options == options and options[question.right] == right


@pytest.mark.parametrize(
    "columns, answer, says",
    [
        ({"prompt": "2+3?"}, "B", '0 options.*"choices"'),
        (row(["x"]), "A", "1 options"),
        (row([str(n) for n in range(27)]), "A", "27 options"),
        (row([{"value": "x"}, {"value": "y"}]), "A", 'choices: expected a text for each option, got {"value": "x"}'),
        ({"prompt": "Which?\nA) x\nB) y", "options": [{"n": 1}, {"n": 2}]}, "A", "options: expected a text for each"),
        (row([["x"], ["y"]]), "A", "expected a text for each option"),
        (row({"text": ["x", "y", ""], "label": ["A", "B", "C"]}), "C", '"C" names none'),
        (row(), None, 'no "answer"'),
        (row(), 4, '"4" names none'),
        (row(), "E", '"E" names none'),
        (row(), "London", '"London" names none of the 4 options: Rome, Paris'),
        (row(["0", "1", "2"]), "1", None),
        (row(["1", "2", "3"]), "1", '"1" is the text of one option and the index of another'),
        (row([1, 2, 3]), 1, '"1" is the text of one option and the index of another'),
        ({"prompt": "q", "A": 1, "B": 2, "C": 3}, 2, '"2" is the text of one option and the index of another'),
        ({"prompt": "Which?\nA) red\nB) blue", "choices": ["blue", "red"]}, "A", "another order"),
        ({"prompt": "Which?\nA) red\nB) blue", "choices": ["blue", "red"]}, "blue", None),
    ],
)
def test_rows_that_do_not_fit_are_refused_with_their_place(tmp_path, columns, answer, says):
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps({"prompt": "fits", "choices": CITIES, "answer": 1}) + "\n")
    with file.open("a") as lines:
        lines.write(json.dumps({**columns, "answer": answer}) + "\n")
    prompts = load(str(file))
    check = lambda: Rewards({"choice": rewards.load_one("choice")}, {"choice": 1.0}).check_answers(prompts)
    if says is None:
        check()
        return
    with pytest.raises(BadInput, match=f"^{file}:2: .*{says}") as caught:
        check()
    assert "\n" not in str(caught.value)
    result = grade("Answer: A", columns, None if answer is None else str(answer), columns["prompt"])
    assert result.score is None and result.info["error"], "a service grades without a check before the run"


def test_a_prompt_that_hides_its_options_is_refused():
    """The policy would have to guess letters that it has never seen."""
    prompt = Prompt("rows.jsonl:7", "Which city?", [3], "B", meta=row())
    with pytest.raises(BadInput, match="^rows.jsonl:7: the prompt does not show the options"):
        Rewards({"choice": rewards.load_one("choice")}, {"choice": 1.0}).check_answers([prompt])


# Prompts


def load(path: str, tokenizer=None, **source) -> list[Prompt]:
    source = Source(lettered=True, **source)
    return load_prompts((path,), source, "train", tokenizer or arithmetic.tokenizer(), 9999)


@pytest.fixture
def one(tmp_path):
    """The prompt of a row: one(values, **flags)."""

    def make(values: dict, tokenizer=None, **source) -> Prompt:
        file = tmp_path / "rows.jsonl"
        file.write_text(json.dumps(values) + "\n")
        (prompt,) = load(str(file), tokenizer, **source)
        return prompt

    return make


SHOWN = "Which city?\n\nA) Rome\nB) Paris\nC) the capital of Norway\nD) 12"


def test_a_prompt_shows_the_options_of_its_row(one):
    prompt = one({"question": "Which city? ", "choices": CITIES, "answer": 1})
    assert prompt.text == prompt.meta["prompt"] == SHOWN and prompt.answer == "B"
    assert one({"prompt": "Which city?", "choices": CITIES, "right": "Paris"}, columns=("answer=right",)).answer == "B"


def test_a_prompt_that_shows_its_options_stays_as_it_is(one):
    for text in (SHOWN, f"{SHOWN}\n\nGive the letter.", SHOWN.replace("\n", "\n(").replace("(\n", "\n")):
        prompt = one({"prompt": text, "choices": CITIES, "answer": 1})
        assert prompt.text == text and prompt.answer == "B"
    text = "Which?\nA. x\nB. y\nGive a letter."
    prompt = one({"prompt": text, "answer": "B"})
    assert prompt.text == text and prompt.meta["choices"] == ["x", "y"]


def test_other_options_in_a_prompt_are_a_part_of_the_question(one):
    prompt = one({"prompt": "A) is red.\nB) is blue.\nWhich is true?", "choices": ["both", "none"], "answer": "A"})
    assert prompt.text.endswith("Which is true?\n\nA) both\nB) none") and prompt.answer == "A"
    for last in ("125", "12.5"):
        for mark in (")", "."):  # with ours, and with another one
            prompt = one({"prompt": f"A{mark} 1\nB{mark} {last}", "choices": ["1", "12"], "answer": "A"})
            assert prompt.text.endswith("\n\nA) 1\nB) 12")


def test_an_order_of_the_prompts_own_is_kept(one):
    prompt = one({"prompt": "Which?\nA) red\nB) blue", "choices": ["blue", "red"], "answer": "blue"})
    assert prompt.text == "Which?\nA) red\nB) blue" and prompt.answer == "B"
    assert grade("Answer: B", prompt.meta, prompt.answer, prompt.text).score == 1


def test_options_in_a_conversation_and_a_template(one, tmp_path):
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Which city?"}]
    prompt = one({"prompt": messages, "choices": CITIES, "answer": 1}, CHAT)
    assert prompt.text == f"(system)Be brief.(user){SHOWN}="
    (tmp_path / "shot.txt").write_text("Question: {prompt}\nEnd with 'Answer: LETTER'.")
    prompt = one({"prompt": "Which city?", "choices": CITIES, "answer": 1}, template=str(tmp_path / "shot.txt"))
    assert prompt.text == f"Question: {SHOWN}\nEnd with 'Answer: LETTER'."
    assert prompt.meta["prompt"] == SHOWN


def test_without_the_reward_no_options_are_added(tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps(row(answer=1)) + "\n")
    (prompt,) = load_prompts((str(file),), Source(), "train", arithmetic.tokenizer(), 99)
    assert prompt.text == "Which city?" and prompt.answer == "1" and prompt.meta["choices"] == CITIES


def test_gpqa_is_shuffled_by_its_texts_alone(one):
    prompt = one(GPQA, columns=("prompt=Question",))
    assert sorted(prompt.meta["choices"]) == ["Bern", "Oslo", "Paris", "Rome"]
    assert prompt.meta["choices"][choices.LETTERS.index(prompt.answer)] == "Paris"
    backwards = {key: GPQA[key] for key in reversed(GPQA)}
    again = one(backwards, columns=("prompt=Question",))
    assert (again.text, again.answer) == (prompt.text, prompt.answer)


def test_the_right_letter_of_gpqa_is_balanced():
    counts = dict.fromkeys("ABCD", 0)
    for number in range(4000):
        columns = {"Correct Answer": f"right {number}"}
        columns |= {f"Incorrect Answer {n}": f"wrong {number} {n}" for n in (1, 2, 3)}
        counts["ABCD"[choices.read(columns, "q", None).right]] += 1
    # 1000 each, and a standard deviation of 27.
    assert all(abs(count - 1000) < 110 for count in counts.values()), counts


def test_prompt_and_reward_agree_on_the_letters(one):
    """Whatever form a row has: the letter in front of the right text, as the policy sees it, is right, and no other."""
    forms = {**ROWS, "GPQA": ({**GPQA, "prompt": "Which city?"}, None, None, "Paris")}
    for name, (columns, answer, _, right) in forms.items():
        prompt = one(columns if answer is None else {**columns, "answer": answer})
        lines = prompt.text.replace(" (", "\n(").split("\n")
        letters = {
            letter
            for letter in "ABCDEFGH"
            for line in lines
            if line.lstrip("(").startswith((f"{letter})", f"{letter}."))
        }
        right_letters = set()
        for letter in letters:
            item = Item(prompt.text, f"Answer: {letter}", prompt.answer, prompt.meta)
            (result,) = rewards.load_one("choice")([item], [9], [False])
            if result.score:
                right_letters.add(letter)
        (letter,) = right_letters
        shown = [line for line in lines if line.lstrip("(").startswith((f"{letter})", f"{letter}."))]
        assert shown[-1].endswith(right), name


def test_random_rows_keep_their_right_option():
    draw = random.Random(0)
    for _ in range(60):
        count = draw.randrange(2, 11)
        options = [f"{draw.choice(['x', 'y', 'The z', '1.5', '$n$'])} {number}" for number in range(count)]
        right = draw.randrange(count)
        for answer in (right, choices.LETTERS[right], options[right]):
            columns, found = choices.letter(row(options), Fields("Which city?", None, None), answer)
            assert found.answer == choices.LETTERS[right]
            assert choices.read(columns, found.content, found.answer).shown
            for place, option in enumerate(options):
                for response in (
                    f"Answer: {choices.LETTERS[place]}",
                    f"The answer is {option}.",
                    f"({choices.LETTERS[place]}) {option}",
                ):
                    assert grade(response, columns, found.answer).score == (place == right), response


# A run and an evaluation


@pytest.fixture
def questions(tmp_path):
    file = tmp_path / "train.jsonl"
    rows = [{"question": f"{n}+1=", "choices": [str(n + 1), str(n + 2)], "answer": 0} for n in range(10, 42)]
    file.write_text("".join(json.dumps(columns) + "\n" for columns in rows))
    return file


@pytest.mark.slow
def test_a_run_with_this_reward_shows_the_options(questions, tmp_path):
    """Otherwise it would be refused, because its prompts hide them."""
    flags = [*SHORT, "--dataset", questions, "--eval-dataset", questions, "--reward", "choice", "--dry-run"]
    run = launch(ROOT / "algos/grpo.py", *flags, engine=False)
    assert "10+1=" in run.stdout and ") 11" in run.stdout


@pytest.mark.slow
def test_an_evaluation_with_this_reward_shows_the_options(questions):
    flags = ["--model", ROOT / "baselines/warm-start", "--dataset", questions, "--split", "train", "--reward", "choice"]
    run = launch(ROOT / "scripts/evaluate.py", *flags, "--rollout-backend", "hf", "--max-response-tokens", 4)
    assert json.loads(run.stdout[run.stdout.index("{") :])["prompts"] == 32
