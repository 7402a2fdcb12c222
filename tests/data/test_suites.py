"""Public test sets: rows in the form of each data set become prompts and answers, from the Hub and from files."""

import json
import random

import datasets
import pytest
from conftest import ROOT

from common.data import arithmetic, sources, suites
from common.data.prompts import Source, TrainSource, load, load_eval
from common.errors import BadInput

SHARED = ROOT.parent / "shared/data"
TOKENIZER = arithmetic.tokenizer()
ADD = "def add(a, b):\n    '''The sum.'''\n"
# One row in the form of each data set, with the columns that the Hub shows for it.
ROWS = {
    "gsm8k": {"question": "1+1?", "answer": "It is <<1+1=2>>2.\n#### 2"},
    "math500": {
        "problem": "1+1?",
        "solution": r"\boxed{2}",
        "answer": "2",
        "subject": "Algebra",
        "level": 1,
        "unique_id": "test/algebra/1.json",
    },
    "amc23": {"id": 0, "question": "1+1?", "answer": "2.0", "url": "https://example.org"},
    "aime24": {
        "id": 60,
        "problem": "1+1?",
        "solution": "Two.",
        "answer": "002",
        "url": "https://example.org",
        "year": "2024",
    },
    "aime25": {"problem": "1+1?", "answer": "2", "id": "0"},
    "humaneval": {
        "task_id": "HumanEval/0",
        "prompt": ADD,
        "canonical_solution": "    return a + b\n",
        "test": "def check(candidate):\n    assert candidate(1, 1) == 2\n",
        "entry_point": "add",
    },
    "mbpp": {
        "task_id": 11,
        "text": "Write a function that adds.",
        "code": "def add(a, b): return a + b",
        "test_list": ["assert add(1, 1) == 2", "assert add(1, 2) == 3", "assert add(0, 0) == 0"],
        "test_setup_code": "",
        "challenge_test_list": [],
    },
    "gpqa-diamond": {
        "Question": "1+1?\n",
        "Correct Answer": "2",
        "Incorrect Answer 1": "3\n",
        "Incorrect Answer 2": "4",
        "Incorrect Answer 3": "5",
        "Explanation": "Count.",
    },
    "mmlu": {"question": "1+1?", "subject": "arithmetic", "choices": ["3", "4", "2", "5"], "answer": 2},
}
BOXED = "1+1?\nPlease reason step by step, and put your final answer within \\boxed{}."
CHOICE = "Think step by step before answering.\n\n1+1?\n\nA) "
EXPECTED = {  # name -> how the prompt ends, the answer
    "gsm8k": (BOXED, "2"),
    "math500": (BOXED, "2"),
    "amc23": (BOXED, "2.0"),
    "aime24": (BOXED, "002"),
    "aime25": (BOXED, "2"),
    "humaneval": ("Your response should only contain the code for this function.\n" + ADD, None),
    "mbpp": (
        "here is your task:\nWrite a function that adds.\nYour code should pass these tests:\n"
        "assert add(1, 1) == 2\nassert add(1, 2) == 3\nassert add(0, 0) == 0",
        None,
    ),
    "mmlu": (CHOICE + "3\nB) 4\nC) 2\nD) 5", "C"),
}


def read(name: str, rows: list[dict], tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return load((f"suite:{name}:{file}",), Source(), "test", TOKENIZER, 9999)


def test_the_table_has_a_row_to_try_each_entry_with():
    assert ROWS.keys() == suites.BENCHMARKS.keys()
    assert sorted(name for group in suites.GROUPS.values() for name in group) == sorted(suites.BENCHMARKS)
    for benchmark in suites.BENCHMARKS.values():
        assert benchmark.prompt.count("{prompt}") == 1


@pytest.mark.parametrize("name", EXPECTED)
def test_a_row_becomes_a_prompt_and_an_answer(tmp_path, name):
    (prompt,) = read(name, [ROWS[name]], tmp_path)
    end, answer = EXPECTED[name]
    assert prompt.text.endswith(end) and prompt.answer == answer
    # Graders find the row as it was published, and the question without the text around it.
    kept = {column: value for column, value in ROWS[name].items() if column not in ("answer", "solution", "prompt")}
    assert kept.items() <= prompt.meta.items() and prompt.meta["prompt"] in prompt.text


@pytest.mark.parametrize("name", suites.BENCHMARKS)
def test_the_hub_is_asked_for_the_data_set_of_the_table(monkeypatch, tmp_path, name):
    asked = []

    def load_dataset(path, config, split):
        asked.append((path, config, split))
        return datasets.Dataset.from_list([ROWS[name]])

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    (prompt,) = load((f"suite:{name}",), Source(), "test", TOKENIZER, 9999)
    ((path, config, split),) = asked
    spec = path + (f":{config}" if config else "") + f"@{split}"
    assert spec == suites.BENCHMARKS[name].dataset
    (from_file,) = read(name, [ROWS[name]], tmp_path)
    assert (prompt.text, prompt.answer) == (from_file.text, from_file.answer)


def test_the_answers_of_gpqa_are_shuffled_as_in_simple_evals(tmp_path):
    """Its first permutations, in which random.Random(0) draws for one question after another."""
    prompts = read("gpqa-diamond", [ROWS["gpqa-diamond"]] * 20, tmp_path)
    draw = random.Random(0)
    answers = ["2", "3", "4", "5"]
    letters = []
    for prompt in prompts:
        order = draw.sample(range(4), 4)
        shown = [f"{letter}) {answers[i]}" for letter, i in zip("ABCD", order)]
        assert prompt.text.endswith("1+1?\n\n" + "\n".join(shown))
        assert f"{prompt.answer}) 2" in prompt.text, "the letter of the right answer"
        assert prompt.meta["choices"] == [answers[i] for i in order], "graders read the options in this order"
        letters.append(prompt.answer)
    assert set(letters) == set("ABCD")
    assert read("gpqa-diamond", [ROWS["gpqa-diamond"]] * 20, tmp_path) == prompts


def test_a_template_replaces_the_prompt_of_the_table(tmp_path):
    (tmp_path / "t.txt").write_text("Q: {prompt} A:")
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps(ROWS["aime25"]))
    (prompt,) = load((f"suite:aime25:{file}",), Source(template=str(tmp_path / "t.txt")), "test", TOKENIZER, 999)
    assert prompt.text == "Q: 1+1? A:"


def test_nobody_trains_on_a_test_set(tmp_path):
    with pytest.raises(BadInput, match='--dataset suite:aime24: has no split "train"'):
        load(("suite:aime24",), Source(), "train", TOKENIZER, 999)


WRONG = [
    ("gsm8k", {"answer": "2"}, "####"),
    ("gsm8k", {"answer": None}, 'missing key "answer"'),
    ("math500", {"problem": None}, "problem"),
    ("mbpp", {"test_list": []}, "test_list"),
    ("mbpp", {"text": None}, "text"),
    ("mmlu", {"answer": 4}, "answer"),
    ("mmlu", {"answer": "C"}, "answer"),
    ("mmlu", {"choices": ["1", "2"]}, "choices"),
    ("gpqa-diamond", {"Incorrect Answer 3": None}, "Incorrect Answer 3"),
    ("gpqa-diamond", {"Question": None}, "Question"),
]


@pytest.mark.parametrize("name, change, named", WRONG)
def test_a_row_in_another_form_is_named(tmp_path, name, change, named):
    row = {column: value for column, value in {**ROWS[name], **change}.items() if value is not None}
    with pytest.raises(BadInput) as error:
        read(name, [ROWS[name], row], tmp_path)
    assert "rows.jsonl:2" in str(error.value) and named in str(error.value)


def test_groups_become_their_members():
    assert suites.expand(("code", "aime24")) == ["suite:humaneval", "suite:mbpp", "suite:aime24"]
    assert suites.expand(("humaneval:a/b:c.jsonl",)) == ["suite:humaneval:a/b:c.jsonl"]
    assert suites.split("suite:humaneval:a/b:c.jsonl") == ("humaneval", "a/b:c.jsonl")
    for names, message in (
        (("code", "mbpp:x.jsonl"), "mbpp is named twice"),
        (("aime23",), "--suite aime23: .*math.*aime24"),
        (("math:folder",), "--suite math:folder"),
    ):
        with pytest.raises(BadInput, match=message):
            suites.expand(names)
    with pytest.raises(BadInput, match='--eval-dataset "suite:aime23"'):
        load_eval(("arithmetic",), TrainSource(eval_dataset=("suite:aime23",)), TOKENIZER, 999)


@pytest.mark.parametrize(
    "specs, names",
    [
        (["suite:aime24", "suite:gpqa-diamond:x.csv"], ["aime24", "gpqa-diamond"]),
        (["arithmetic", "gsm8k:some/folder"], ["arithmetic", "gsm8k"]),
        (["gsm8k", "gsm8k:folder"], ["gsm8k", "gsm8k-folder"]),
        (["a/test.jsonl", "b/test.jsonl", "c/hard.csv"], ["a-test-jsonl", "b-test-jsonl", "hard"]),
        (["owner/name:config@test", "folder/data"], ["owner-name-config-test", "folder-data"]),
    ],
)
def test_names_in_metrics_are_short_and_tell_data_sets_apart(specs, names):
    assert list(sources.short_names(specs).values()) == names


def test_two_data_sets_with_one_name_in_metrics_are_refused(tmp_path):
    with pytest.raises(BadInput, match="same name"):
        sources.short_names(["a-b/test.jsonl", "a/b/test.jsonl"])


@pytest.mark.skipif(not SHARED.is_dir(), reason="no public data at ../shared/data")
@pytest.mark.parametrize("name, file", [("gsm8k", "gsm8k/test.jsonl"), ("humaneval", "humaneval/HumanEval.jsonl")])
def test_whole_data_sets_are_read(name, file):
    prompts = load((f"suite:{name}:{SHARED / file}",), Source(), "test", TOKENIZER, 9999)
    assert len(prompts) == suites.BENCHMARKS[name].problems
    question = suites.BENCHMARKS[name].prompt.replace("{prompt}", prompts[0].meta["prompt"])
    assert prompts[0].text == question
    if name == "gsm8k":
        assert [prompt.answer for prompt in prompts[:3]] == ["18", "3", "70000"]
    else:
        assert all(prompt.meta["entry_point"] in prompt.meta["prompt"] for prompt in prompts)


def test_the_page_has_the_settings_of_each_test_set():
    rows = [
        tuple(cell.strip(" `") for cell in line.strip("|").split("|"))
        for line in (ROOT / "docs/evaluation.md").read_text().splitlines()
        if line.split("`")[1:2] and line.split("`")[1] in suites.BENCHMARKS and line.count("|") == 8
    ]
    said = {name: (problems, grader, n, longest) for name, _, problems, _, grader, n, longest in rows}
    set_up = {
        name: (f"{each.problems:,}", each.reward, str(each.n or "greedy"), f"{each.max_response_tokens:,}")
        for name, each in suites.BENCHMARKS.items()
    }
    assert said == set_up
