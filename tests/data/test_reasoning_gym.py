"""--dataset "reasoning-gym:TASK?parameter=value" and --reward reasoning-gym, compared with the library itself."""

import datetime
import importlib.util
import json
import os
import sys

import pytest

from common import rewards
from common.data import arithmetic, prompts, reasoning_gym, sources
from common.data.rows import split_weight
from common.errors import BadInput
from common.rewards.grading import Item, Result

IS_INSTALLED = importlib.util.find_spec("reasoning_gym") is not None
installed = pytest.mark.skipif(not IS_INSTALLED, reason="reasoning-gym is not installed; pip install reasoning-gym")
HANOI = "reasoning-gym:tower_of_hanoi?size=120"  # a task with few problems: some of the 120 are in the test split


@pytest.mark.parametrize(
    "entry, name, weight",
    [
        ("reasoning-gym:chain_sum", "reasoning-gym:chain_sum", 1.0),
        ("reasoning-gym:chain_sum=3", "reasoning-gym:chain_sum", 3.0),
        ("reasoning-gym:chain_sum?max_terms=3", "reasoning-gym:chain_sum?max_terms=3", 1.0),
        ("reasoning-gym:chain_sum?max_terms=3=0.5", "reasoning-gym:chain_sum?max_terms=3", 0.5),
        ("reasoning-gym:a?b=1&c=2", "reasoning-gym:a?b=1&c=2", 1.0),
        ("reasoning-gym:a?b=1&c=2=2", "reasoning-gym:a?b=1&c=2", 2.0),
        ('reasoning-gym:a?b=["+","-"]=2', 'reasoning-gym:a?b=["+","-"]', 2.0),
        ("reasoning-gym:a?b=-1e-3=.5", "reasoning-gym:a?b=-1e-3", 0.5),
        ("http://host:8001/score?model=2", "http://host:8001/score?model=2", 1.0),
        ("which?.jsonl=2", "which?.jsonl", 2.0),
        ("lr=3/rows.jsonl=2", "lr=3/rows.jsonl", 2.0),
    ],
)
def test_a_number_after_a_parameter_is_its_value_and_a_second_one_is_the_weight(entry, name, weight):
    assert split_weight(entry) == (name, weight)


def test_without_the_library_one_line_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    cure = "reasoning-gym is not installed; pip install reasoning-gym"
    with pytest.raises(BadInput, match=f"^--eval-dataset reasoning-gym:chain_sum: {cure}$"):
        sources.read("reasoning-gym:chain_sum", "test", "--eval-dataset")
    with pytest.raises(BadInput, match=f"^--reward reasoning-gym: {cure}$"):
        rewards.load_one("reasoning-gym")


@installed
def test_the_same_rows_in_every_process_and_with_any_number_of_them(monkeypatch):
    """The rows of ransom_note would depend on PYTHONHASHSEED; list_functions draws from Python's global generator."""
    rows = []
    for cores, salt in ((1, "1"), (2, "2")):
        monkeypatch.setattr(os, "sched_getaffinity", lambda process, cores=cores: set(range(cores)))
        monkeypatch.setenv("PYTHONHASHSEED", salt)
        reasoning_gym.generate.cache_clear()
        rows.append(reasoning_gym.generate("ransom_note?size=41", "train"))
    assert rows[0] == rows[1] and len({row["question"] for row in rows[0]}) == 41
    dataset = reasoning_gym.create("list_functions")
    make = lambda: [reasoning_gym.make_row("list_functions", dataset, number) for number in range(50)]
    assert make() == make()


@installed
def test_the_splits_share_no_question(capsys):
    train, test = sources.read(HANOI, "train"), sources.read(HANOI, "test")
    assert len(test) == 256 and 0 < len(train) < 120
    assert not {row["question"] for _, row in train} & {row["question"] for _, row in test}
    said = f"{HANOI}: left out {120 - len(train)} of 120 problems: they are in the test split\n"
    assert capsys.readouterr().out == said
    place, row = test[3]
    assert place == f"{HANOI}/test:3" and row["task"] == "tower_of_hanoi?size=120"
    assert row["solution"] == f"<answer>{row['answer']}</answer>"


def test_a_task_whose_problems_are_all_in_the_test_split_is_refused(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: True)
    monkeypatch.setattr(reasoning_gym, "generate", lambda task, split: [{"question": "Heads or tails?"}] * 9)
    said = "all 9 training problems are in the test split; choose parameters that allow more problems"
    with pytest.raises(BadInput, match=f"^--dataset reasoning-gym:coin: {said}$"):
        sources.read("reasoning-gym:coin", "train")


@installed
def test_prompts_in_a_mixture_with_evaluation():
    dataset, tokenizer = (f"{HANOI}=3", "arithmetic"), arithmetic.tokenizer()
    first = prompts.load(dataset, prompts.Source(), "train", tokenizer, 9999)[0]
    assert (first.dataset, first.weight) == (HANOI, 3.0)
    assert first.text == first.meta["question"] + prompts.INSTRUCTIONS["reasoning-gym"]
    assert first.answer == first.meta["answer"] and first.meta["metadata"]["source_dataset"] == "tower_of_hanoi"
    held_out = prompts.load_eval(dataset, prompts.TrainSource(eval_prompts=10), tokenizer, 9999)
    assert [prompt.dataset for prompt in held_out] == [HANOI] * 5 + ["arithmetic"] * 5


BAD = [
    ("chain_sun", 'unknown task "chain_sun" (did you mean chain_sum?); known: ab, '),
    ("", 'unknown task ""; known: ab, acre, '),
    ("composite", 'the task "composite" cannot be used: name several data sets after --dataset instead'),
    ("codeio?size=5", 'the task "codeio" cannot be used: its problems are outputs of programs, '),
    ("game_of_life_halting", 'the task "game_of_life_halting" cannot be used: its verifier accepts every answer'),
    ("chain_sum?max_trems=3", 'unknown parameter "max_trems" (did you mean max_terms?); known: min_terms, max_terms, '),
    ("chain_sum?seed=3", 'unknown parameter "seed"; known: '),
    ("chain_sum?max_terms", "max_terms=: Input should be a valid integer"),
    ("chain_sum?max_terms=2.5", "max_terms=2.5: Input should be a valid integer"),
    ("chain_sum?max_terms=3=x", "max_terms=3=x: Input should be a valid integer"),
    ("chain_sum?min_terms=9", "refused by its generator: max_terms must be >= min_terms"),
    ("chain_sum?size=0", "size=0: expected a number > 0"),
    ("chain_sum?allow_negation=maybe", "allow_negation=maybe: Input should be a valid boolean"),
    ("basic_arithmetic?whitespace=none", "whitespace=none: Input should be 'no_space', 'single' or 'random'"),
    ("countdown?operators=+", "operators=+: Input should be a valid array"),
    ('countdown?operators="+"', 'operators="+": Input should be a valid array'),
    ("time_intervals?min_date=2000", "min_date=2000: "),
    ("word_sorting?transformation=upper", "transformation=upper: Input should be 'lowercase'"),
    ("rearc?board_format_opts=x", "board_format_opts=x: "),
]


@installed
@pytest.mark.parametrize("task, message", BAD)
def test_bad_tasks_and_parameters_are_refused_in_these_words(task, message):
    with pytest.raises(BadInput) as error:
        reasoning_gym.create(task)
    assert str(error.value).startswith(message) and "\n" not in str(error.value)


@installed
def test_the_flag_and_the_spec_are_named_where_the_generator_is_another_process():
    with pytest.raises(BadInput) as error:
        sources.read("reasoning-gym:chain_sum?max_terms=1", "test", "--eval-dataset")
    said = "cannot be loaded: refused by its generator: max_terms must be >= min_terms"
    assert str(error.value) == f"--eval-dataset reasoning-gym:chain_sum?max_terms=1 {said}"


@installed
@pytest.mark.parametrize(
    "task, name, value",
    [
        ("chain_sum?max_terms=7", "max_terms", 7),
        ("chain_sum?allow_negation=true", "allow_negation", True),
        ("number_sorting?min_value=-2.5", "min_value", -2.5),
        ('countdown?operators=["+","-"]', "operators", ("+", "-")),
        ('family_relationships?male_names=["Al","Bo"]', "male_names", ["Al", "Bo"]),
        ("basic_arithmetic?format_style=natural", "format_style", "natural"),
        ("word_sorting?transformation=uppercase", "transformation", "uppercase"),
        ("figlet_font?static_word=hey", "static_word", "hey"),
        ("time_intervals?min_date=2000-01-02", "min_date", datetime.date(2000, 1, 2)),
    ],
)
def test_parameters_have_the_types_of_the_configuration(task, name, value):
    found = getattr(reasoning_gym.create(task).config, name)
    assert found == value and isinstance(found, type(value))


def test_metadata_survives_json():
    value = {"a": (1, [(2,), {"b": None}]), "edges": {1: (0, 2), (3, 4): "x"}, "empty": ((), {}, [])}
    packed = json.loads(json.dumps(reasoning_gym.pack(value)))
    assert reasoning_gym.unpack(packed) == value
    assert reasoning_gym.pack({"plain": [1, {"b": "c"}]}) == {"plain": [1, {"b": "c"}]}


# Numbers, text, lists, grids, moves; metadata with tuples or with numbers as keys; no reference answer; partial scores.
TASKS = [
    "chain_sum",
    "spell_backward",
    "number_sorting",
    "group_anagrams",
    "rotate_matrix",
    "mini_sudoku",
    "tower_of_hanoi",
    "rearc",
    "graph_color",
    "advanced_geometry",
    "countdown",
    "polynomial_equations",
    "prime_factorization",
    "knights_knaves",
    "course_schedule",
]


def answers_to(problem: dict) -> list[str]:
    """Answers that are right, nearly right and wrong."""
    answer = problem["answer"] or json.dumps(problem["metadata"]["possible_answer"])
    return [answer, f" {answer}\n", answer[:-1], answer[::-1], f"{answer} units", "17", "[1, 2]", ""]


@installed
@pytest.mark.parametrize("task", TASKS)
def test_scores_are_those_of_the_library(task):
    """The library has the problem itself, and the reward a row that has been JSON."""
    from reasoning_gym.utils import extract_answer

    from common.rewards.reasoning_gym import reward

    dataset, scores = reasoning_gym.create(task), set()
    for number in range(3):
        problem, row = dataset[number], reasoning_gym.make_row(task, dataset, number)
        row = json.loads(json.dumps(row))
        said = ["no tags", *(f"Thus <answer>{answer}</answer>." for answer in answers_to(problem))]
        for text, result in zip(said, reward([Item("", text, None, row) for text in said], [], [])):
            try:
                expected = dataset.score_answer(extract_answer(text), problem)
            except (ValueError, KeyError, TypeError) as error:
                assert result.score == 0 and type(error).__name__ in result.info["error"]
                continue
            assert result == Result(expected, float(expected >= 1), extract_answer(text))
            scores.add(result.acc)
    assert scores == {0.0, 1.0}


@installed
def test_the_workers_survive_verifiers_that_raise_hang_or_die(capsys):
    grade = rewards.load_one("reasoning-gym")
    assert grade.waits and split_weight("reasoning-gym=0.5") == ("reasoning-gym", 0.5)
    rows = {
        name: reasoning_gym.make_row(name, reasoning_gym.create(name), 0)
        for name in ("chain_sum", "prime_factorization", "binary_matrix")
    }
    item = lambda name, answer: Item("p", f"<answer>{answer}</answer>", None, rows[name])
    right = [item(name, row["answer"]) for name, row in rows.items()]
    assert [result.acc for result in grade.try_out(right, [1] * 3, [False] * 3)] == [1.0, 1.0, 1.0]
    with pytest.raises(BadInput, match='^--reward reasoning-gym: needs rows of --dataset "reasoning-gym:TASK"; '):
        grade([Item("1+1=", "2", "2", {"question": "1+1=", "answer": "2"})], [1], [False])

    grade.pool.item_seconds = 2.0
    batch = [
        right[0],
        item("prime_factorization", "two"),
        item("binary_matrix", "sum(iter(int, 1))"),
        item("binary_matrix", "__import__('os')._exit(3)"),
        right[1],
    ]
    results = grade(batch, [1] * 5, [False] * 5)
    assert [result.acc for result in results] == [1.0, 0.0, 0.0, 0.0, 1.0]
    assert [result.score for result in results] == [1.0, 0.0, 0.0, 0.0, 1.0]
    assert [sorted(result.info) for result in results] == [[], ["error"], ["timeout"], ["died"], []]
    assert 'reward "reasoning-gym" took too long on 1 of 5 responses' in capsys.readouterr().err
    grade.pool.close()
