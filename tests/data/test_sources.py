"""Where rows come from: files, --columns, and the two hubs, whose clients are replaced by fakes."""

import contextlib
import json
import math
import random
import re
import sys
import types
from collections import Counter
from pathlib import Path

import datasets
import pyarrow
import pytest
from pyarrow import parquet

from common.data import arithmetic, sources, tasks
from common.data.prompts import INSTRUCTIONS, Prompt, Source, TrainSource, load_eval
from common.data.prompts import load as load_prompts
from common.data.tokenizer import load_tokenizer, resolve_model
from common.errors import BadInput

TOKENIZER = arithmetic.tokenizer()
GOOD = b'{"question": "1+1=", "answer": "2"}'


def load(dataset: str, split: str = "train", limit: int = 999, **source) -> list[Prompt]:
    return load_prompts((dataset,), Source(**source), split, TOKENIZER, limit)


BAD = [  # content of rows.jsonl -> the whole message; tests/preflight/test_refusals.py has more of them
    (b"{}", 'missing key "prompt" (found: nothing); --columns prompt=COLUMN if another column holds it'),
    (b'{"prompt": 7, "answer": "2"}', '"prompt" must be a non-empty string, got 7'),
    (b'{"prompt": [], "answer": 2}', '"prompt" must be messages with role and content, got []'),
    (
        b'{"prompt": [{"text": "x"}], "answer": 2}',
        '"prompt", message 1: expected a text in "role", got {"text": "x"}',
    ),
    (b'{"question": "x", "answer": true}', '"answer" must be a string or a number, got true'),
    (b'{"question": "x", "answer": NaN}', '"answer" must be a string or a number, got NaN'),
    (b'{"question": "x", "answer": -1e999}', '"answer" must be a string or a number, got -Infinity'),
    (b'{"question": "x", "solution": 2}', '"solution" must be a string, or turns, got 2'),
    (
        b'{"question": "\\ud800", "answer": "2"}',
        r"'utf-8' codec can't encode character '\ud800' in position 14: surrogates not allowed",
    ),
    (
        b'{"question": "x", "answer": ' + b"9" * 5000 + b"}",
        "invalid JSON: Exceeds the limit (4300 digits) for integer string conversion: value has 5000 "
        "digits; use sys.set_int_max_str_digits() to increase the limit",
    ),
]


@pytest.mark.parametrize("content, message", BAD)
def test_bad_rows_are_refused_in_these_words(tmp_path, monkeypatch, content, message):
    monkeypatch.chdir(tmp_path)
    Path("rows.jsonl").write_bytes(content)
    with pytest.raises(BadInput) as error:
        load("rows.jsonl")
    assert str(error.value) == f"rows.jsonl:1: {message}"


def test_bom_crlf_blank_lines_and_unusual_separators_are_accepted(tmp_path):
    path = tmp_path / "rows.jsonl"
    lines = b"\xef\xbb\xbf" + GOOD + b"\r\n\r\n" + '{"id": null, "prompt": "1\u2028+1\x85", "answer": 3}\n'.encode()
    path.write_bytes(lines + b'{"id": null, "prompt": "1 \\ud83d\\ude00", "answer": 4.5}')
    prompts = load(str(path))
    assert [p.id.rpartition(":")[2] for p in prompts] == ["1", "3", "4"]
    assert [p.answer for p in prompts] == ["2", "3", "4.5"]


def test_what_a_data_set_can_be(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for spec in ("math:folder", "dapo@test", "a/b/c", "rows.xls", "gsm8k=x", "modelscope:arithmetic", "r.jsonl.gz"):
        with pytest.raises(
            BadInput,
            match=f'^--dataset "{spec}": ',
        ):
            load(spec)
    with pytest.raises(BadInput, match='--dataset dapo: .*"test"'):
        load("dapo", "test")


def write(path: Path, rows: list[dict], **options) -> str:
    parquet.write_table(pyarrow.Table.from_pylist(rows), path, **options)
    return str(path)


def test_parquet(tmp_path):
    """Rows count from 1 over row groups; structs and lists of structs arrive as objects and messages."""
    messages = [{"role": "user", "content": "1+1="}]
    rows = [{"prompt": messages, "reward_model": {"ground_truth": str(i)}, "id": i} for i in range(5)]
    path = write(tmp_path / "rows.parquet", rows, row_group_size=2)
    prompts = load(path, columns=("answer=reward_model.ground_truth",))
    assert [p.id for p in prompts] == [f"{path}:row {n}" for n in range(1, 6)]
    assert [p.answer for p in prompts] == list("01234") and prompts[0].text == "1+1=\n" and prompts[4].meta["id"] == 4


def test_bad_parquet_is_named_by_row(tmp_path):
    good = {"question": "1+1=", "answer": 2}
    path = write(tmp_path / "rows.parquet", [good, {"question": None, "answer": 2}])
    with pytest.raises(BadInput) as error:
        load(path)
    assert str(error.value).startswith(f'{path}:row 2: "question" ')


def test_null_stands_for_a_column_that_a_row_of_a_table_lacks(tmp_path):
    """A table has all columns, and all keys of a message, in every row; with nulls its whole numbers are floats."""
    asked = [{"role": "user", "content": "1+1=", "name": None}, {"role": "assistant", "content": "2", "name": "x"}]
    rows = [{"prompt": None, "question": "1+1=", "answer": 34.0}, {"prompt": "2+2=", "question": None, "answer": None}]
    first, second = load(write(tmp_path / "rows.parquet", rows))
    assert (first.meta["prompt"], first.answer) == ("1+1=", "34") and (second.meta["prompt"], second.answer) == (
        "2+2=",
        None,
    )
    (chat,) = load(write(tmp_path / "chat.parquet", [{"messages": asked}]))
    assert chat.meta["prompt"] == [{"role": "user", "content": "1+1="}] and chat.solution == "2"
    calls = [{"function": {"name": "f", "arguments": arguments}} for arguments in ({"city": "oslo"}, {"unit": "c"})]
    said = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "", "tool_calls": calls}]
    (chat,) = load(write(tmp_path / "calls.parquet", [{"messages": said}]))
    assert [call["function"]["arguments"] for call in chat.solution["tool_calls"]] == [{"city": "oslo"}, {"unit": "c"}]
    tools = [{"name": name, "parameters": {"properties": {name: {"type": "string"}}}} for name in ("city", "unit")]
    (chat,) = load(write(tmp_path / "tools.parquet", [{"messages": asked, "tools": tools}]))
    assert chat.tools == tools, "no tool has the other one's parameters"


def test_a_damaged_parquet_file_is_refused(tmp_path):
    path = write(tmp_path / "rows.parquet", [{"question": "1+1=", "answer": i} for i in range(1000)])
    whole = Path(path).read_bytes()
    middle = len(whole) // 2
    for damaged in (b"", b"PAR1", whole[:middle], whole[:8] + bytes(middle) + whole[middle + 8 :], GOOD):
        Path(path).write_bytes(damaged)
        with pytest.raises(BadInput, match="rows.parquet: ") as error:
            load(path)
        assert "\n" not in str(error.value)


def test_columns(tmp_path):
    path = tmp_path / "rows.jsonl"
    row = {"prompt": "no", "problem": "1+1=", "meta": {"gold": {"value": 2}}, "x.y": "x", "x": {"y": "no"}, "id": 1}
    path.write_text(json.dumps(row))
    (prompt,) = load(str(path), columns=("prompt=problem", "answer=meta.gold.value", "solution=x.y"))
    assert (prompt.text, prompt.answer, prompt.solution) == ("1+1=", "2", "x")
    assert prompt.meta == row | {"prompt": "1+1="}  # rewards find the prompt there under its usual name


BAD_COLUMNS = [  # a second entry of --columns -> its message; tests/preflight/test_refusals.py has more of them
    ("prompt=", '--columns "prompt=question answer=question prompt=": expected prompt=COLUMN'),
    ("prompt=b", '--columns "prompt=question answer=question prompt=b": expected prompt=COLUMN'),
    ("answer=question.x", 'rows.jsonl:1: missing key "question.x" (found: question, meta)'),
    ("solution=worked", 'rows.jsonl:1: missing key "worked" (found: question, meta)'),
]


@pytest.mark.parametrize("column, message", BAD_COLUMNS)
def test_bad_columns(tmp_path, column, message):
    (tmp_path / "rows.jsonl").write_text('{"question": "1+1=", "meta": {}}')
    columns = ("prompt=question", *(["answer=question"] if not column.startswith("answer") else []), column)
    with pytest.raises(BadInput) as error:
        load(str(tmp_path / "rows.jsonl"), columns=columns)
    assert message in str(error.value)


def test_columns_of_a_built_in_data_set_are_refused(tmp_path):
    with pytest.raises(BadInput, match="--columns: arithmetic"):
        load("arithmetic", columns=("answer=solution",))
    (tmp_path / "rows.jsonl").write_text('{"q": "1+1=", "a": "2"}')
    source = TrainSource(columns=("prompt=q", "answer=a"), eval_dataset=str(tmp_path / "rows.jsonl"))
    assert len(load_prompts(("arithmetic",), source, "train", TOKENIZER, 64)) == 7844  # --columns is for --eval-dataset
    assert len(load_eval(("arithmetic",), source, TOKENIZER, 64)) == 1


QUESTION = [{"content": "Last line: Answer: $Answer\n\n1+1?", "role": "user"}]
GOLD = {"ground_truth": "2", "style": "rule-lighteval/MATH_v2"}
DAPO = {"data_source": "math_dapo", "prompt": QUESTION, "reward_model": GOLD, "extra_info": {"index": "9a9b"}}
ON_HUB = {
    ("openai/gsm8k", "main", "train"): [{"question": "1+1?", "answer": "<<1+1=2>>2\n#### 2"}],
    ("DigitalLearningGmbH/MATH-lighteval", None, "train"): [
        {"problem": "1+1?", "level": "Level 1", "solution": r"$1$, \boxed{\frac{4}{2}}", "type": "Algebra"},
        {"problem": "1+2?", "level": "Level 1", "solution": r"It is \fbox{3}.", "type": "Algebra"},
        {"problem": "1+3?", "level": "Level 1", "solution": "4", "type": "Algebra"},
    ],
    ("HuggingFaceH4/MATH-500", None, "test"): [
        {
            "problem": "1+1?",
            "solution": "No box.",
            "answer": "2",
            "subject": "Algebra",
            "level": 1,
            "unique_id": "test/algebra/1.json",
        },
    ],
    ("BytedTsinghua-SIA/DAPO-Math-17k", None, "train"): [DAPO, DAPO | {"prompt": [QUESTION[0] | {"content": "1+2?"}]}]
    * 100,
    ("someone/sums", "small", "train[:1]"): [{"prompt": "1+1?", "answer": 2}],
    ("someone/nothing", None, "train"): [],
}


@pytest.fixture
def hub(monkeypatch):
    """The Hugging Face Hub, with the data sets above in the shapes they have there."""

    def load_dataset(name, config, split):
        if (name, config, split) not in ON_HUB:
            raise ValueError(f"Unknown split {split} of {name}\nand more")
        return datasets.Dataset.from_list(ON_HUB[name, config, split])

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)


def test_gsm8k_from_the_hub(hub):
    (prompt,) = load("gsm8k")
    assert (prompt.id, prompt.answer, prompt.solution) == ("openai/gsm8k:main/train:row 1", "2", "2\n#### 2")
    assert prompt.text == "1+1?" + INSTRUCTIONS["gsm8k"]


def test_math_from_the_hub(hub, capsys):
    """The answer is in the last box of a training problem, and in a column of a test problem."""
    boxed, framed = load("math")
    assert (boxed.answer, framed.answer) == (r"\frac{4}{2}", "3") and boxed.solution.startswith("$1$")
    assert capsys.readouterr().out == "math: left out 1 of 3 problems: no answer in a box\n"
    assert boxed.text == "1+1?\nReason step by step, and put your final answer within \\boxed{}."
    (test,) = load("math", "test")
    assert test.answer == "2" and test.id == "HuggingFaceH4/MATH-500/test:row 1"


def test_dapo_from_the_hub(hub, capsys):
    """Chat messages, an answer in a struct, and each prompt a hundred times over."""
    first, second = load("dapo")
    assert (first.text, first.answer) == (QUESTION[0]["content"] + "\n", "2") and second.text == "1+2?\n"
    assert capsys.readouterr().out == "dapo: left out 198 rows that repeat another one's prompt\n"


def test_any_name_on_the_hub(hub):
    (prompt,) = load("someone/sums:small@train[:1]", "test")
    assert (prompt.id, prompt.answer) == ("someone/sums:small/train[:1]:row 1", "2")
    with pytest.raises(BadInput, match="^--dataset someone/sums: .*Unknown split train"):
        load("someone/sums:small")
    with pytest.raises(BadInput, match="^--dataset someone/nothing: "):
        load("someone/nothing")


README = """---
configs:
- config_name: main
  data_files: [{split: train, path: main/train-*}, {split: test, path: main/test-*}]
---
"""


@pytest.fixture
def modelscope(tmp_path, monkeypatch):
    """The part of modelscope 1.40.2 that is used, replaced by a fake that has a folder as its hub."""

    class HubError(Exception):
        pass

    def snapshot_download(name: str) -> str:
        if not (tmp_path / name).is_dir():
            raise HubError(f"no {name} here\nand more")
        return str(tmp_path / name)

    fake = types.SimpleNamespace(snapshot_download=snapshot_download, dataset_snapshot_download=snapshot_download)
    hub = types.SimpleNamespace(HubError=HubError)
    for name, module in (("modelscope", fake), ("modelscope.hub", hub), ("modelscope.hub.errors", hub)):
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    return tmp_path


def test_data_sets_from_modelscope(modelscope):
    folder = modelscope / "AI-ModelScope/gsm8k/main"
    folder.mkdir(parents=True)
    (folder.parent / "README.md").write_text(README)
    for split, answer in (("train", "2"), ("test", "3")):
        write(folder / f"{split}-00000-of-00001.parquet", [{"question": "1+1?", "answer": f"#### {answer}"}])
    for name in ("modelscope:gsm8k", "modelscope:AI-ModelScope/gsm8k:main=2"):
        (prompt,) = load(name)
        assert prompt.id == "AI-ModelScope/gsm8k:main/train:row 1" and prompt.answer.endswith("2")
    (prompt,) = load_eval("modelscope:gsm8k", TrainSource(), TOKENIZER, 999)
    assert (prompt.id, prompt.answer) == ("AI-ModelScope/gsm8k:main/test:row 1", "3")
    assert prompt.text == "1+1?" + INSTRUCTIONS["gsm8k"]


def test_models_from_modelscope(modelscope):
    model = modelscope / "some/model"
    arithmetic.config().save_pretrained(model)
    arithmetic.tokenizer().save_pretrained(model)
    assert resolve_model("modelscope:some/model") == str(model) == resolve_model(str(model))
    assert load_tokenizer(resolve_model("modelscope:some/model"))[1] == [1]
    assert resolve_model("some/model") == "some/model"
    message = "^--model modelscope:no/model: cannot be downloaded from ModelScope: no no/model here$"
    with pytest.raises(BadInput, match=message):
        resolve_model("modelscope:no/model")


def test_modelscope_is_named_where_it_is_not_installed(monkeypatch):
    monkeypatch.setitem(sys.modules, "modelscope", None)  # an import then fails like that of a missing package
    with pytest.raises(BadInput, match="^--model modelscope:a/b: .*pip install modelscope"):
        resolve_model("modelscope:a/b")
    with pytest.raises(BadInput, match="^--dataset modelscope:AI-ModelScope/gsm8k: .*pip install"):
        load("modelscope:gsm8k")


def test_a_task_lists_each_problem_once_and_holds_some_out():
    right = {
        "sums": lambda x, operator, y: int(x) + int(y) if operator == "+" else int(x) - int(y),
        "gcd": lambda x, word, y: math.gcd(int(x), int(y)),
    }
    for name, count in (("sums", 9900), ("gcd", 854)):
        test, train = (tasks.problems(name, split) for split in ("test", "train"))
        assert len(test) == tasks.HELD_OUT and len(test) + len(train) == count
        seen = set()
        for row in test + train:
            x, between, y = re.search(r"(\d+) (\+|-|and) (\d+)", row["question"]).groups()
            assert int(row["answer"]) == right[name](x, between, y) >= 0
            seen.add((between, *sorted((int(x), int(y)))))
        assert len(seen) == count, "a problem and its mirror image may be in different splits"
        assert tasks.problems(name, "test") == test
    reversed_texts = tasks.problems("reverse", "test") + tasks.problems("reverse", "train")
    assert len({row["question"] for row in reversed_texts}) == tasks.DRAWN
    assert all(f'"{row["answer"][::-1]}"' in row["question"] for row in reversed_texts)
    answers = Counter(row["answer"] for row in tasks.problems("gcd", "test"))
    assert max(answers.values()) < 0.13 * tasks.HELD_OUT, "a model that always says the same would look able"
    assert 0.4 < sum("+" in row["question"] for row in tasks.problems("sums", "test")) / tasks.HELD_OUT < 0.6
    assert [row for _, row in sources.read("sums", "test")] == tasks.problems("sums", "test")


def test_the_tests_of_a_function_accept_its_program_alone():
    """Also a program with True in the place of 1."""
    rows = tasks.problems("functions", "test") + tasks.problems("functions", "train")
    assert len(rows) == len({row["question"] for row in rows}) == 1493
    by_arguments: dict[str, dict] = {}
    for row in rows:
        namespace: dict = {}
        exec(row["answer"], namespace)
        arguments = row["answer"].partition(":")[0]
        by_arguments.setdefault(arguments, {})[row["question"]] = namespace["f"]
        assert row["solution"] == f"```python\n{row['answer']}```" and len(set(row["test_list"])) == 5
    for row in random.Random(0).sample(rows, 100):
        accepted = []
        for question, program in by_arguments[row["answer"].partition(":")[0]].items():
            with contextlib.suppress(AssertionError):
                exec("\n".join(row["test_list"]), {"f": program})
                accepted.append(question)
        assert accepted == [row["question"]]


def test_a_maze_has_one_way_and_the_answer_goes_it():
    mazes = tasks.problems("maze", "test") + tasks.problems("maze", "train")
    assert len({row["question"] for row in mazes}) == tasks.DRAWN
    lengths = set()
    for row in mazes:
        lines = row["question"].splitlines()
        width = 2 * tasks.SIDE - 1
        assert len(lines) == width and {len(line) for line in lines} == {width}
        mark = {(x, y): lines[y][x] for y in range(width) for x in range(width)}
        joined = sum(mark[x, y] == "." for x, y in mark if x % 2 != y % 2)
        assert joined == tasks.SIDE**2 - 1 and all(mark[x, y] == "#" for x, y in mark if x % 2 == y % 2 == 1)
        (place,) = (xy for xy, found in mark.items() if found == "s")
        been = {place}
        for move in row["answer"]:  # with one way less than cells and all cells reached, a way is the only one
            right, down = {"8": (0, -1), "2": (0, 1), "4": (-1, 0), "6": (1, 0)}[move]
            wall, place = (place[0] + right, place[1] + down), (place[0] + 2 * right, place[1] + 2 * down)
            assert mark[wall] == "." and place not in been
            been.add(place)
        assert mark[place] == "g"
        lengths.add(len(row["answer"]))
    assert {1, 2, 3, 4, 5, 6, 7, 8} <= lengths
