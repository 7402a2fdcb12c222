"""Where rows come from: JSONL, Parquet, --columns, and the hubs, whose clients are stood in for."""

import importlib
import json
import sys
from pathlib import Path

import datasets
import httpx2
import pyarrow
import pytest
from pyarrow import parquet

from common import data, embedded, sources
from common.errors import BadInput

TOKENIZER = embedded.tokenizer()
GOOD = b'{"question": "1+1=", "answer": "2"}'


def load(dataset: str, split: str = "train", limit: int = 999, **source) -> list[data.Prompt]:
    return data.load((dataset,), data.Source(**source), split, TOKENIZER, limit)


BAD = [  # content of rows.jsonl -> the whole message; tests/test_bad_input.py has those of a command line
    (b"{}", 'missing key "prompt" (found: nothing)'),
    (b'{"prompt": 7, "answer": "2"}', '"prompt" must be a non-empty string, got 7'),
    (b'{"prompt": [], "answer": 2}', '"prompt" must be messages with role and content, got []'),
    (b'{"prompt": [{"text": "x"}], "answer": 2}',
     '"prompt" must be messages with role and content, got [{"text": "x"}]'),
    (b'{"question": "x", "answer": null}', '"answer" must be a string or a number, got null'),
    (b'{"question": "x", "answer": true}', '"answer" must be a string or a number, got true'),
    (b'{"question": "x", "answer": NaN}', '"answer" must be a string or a number, got NaN'),
    (b'{"question": "x", "answer": -1e999}', '"answer" must be a string or a number, got -Infinity'),
    (b'{"question": "x", "solution": 2}', '"solution" must be a string, got 2'),
    (b'{"question": "x", "solution": null}', 'missing key "answer" (found: question, solution)'),
    (b'{"question": "\\ud800", "answer": "2"}',
     r"invalid JSON: 'utf-8' codec can't encode character '\ud800' in position 14: surrogates not allowed"),
    (b'{"question": "x", "answer": ' + b"9" * 5000 + b"}",
     "invalid JSON: Exceeds the limit (4300 digits) for integer string conversion: value has 5000 "
     "digits; use sys.set_int_max_str_digits() to increase the limit"),
]  # fmt: skip


@pytest.mark.parametrize("content, message", BAD)
def test_bad_rows_are_refused_in_these_words(tmp_path, monkeypatch, content, message):
    monkeypatch.chdir(tmp_path)
    Path("rows.jsonl").write_bytes(content)
    with pytest.raises(BadInput) as error:
        load("rows.jsonl")
    assert str(error.value) == f"rows.jsonl:1: {message}"


def test_deep_json_is_refused_as_any_other(tmp_path):
    (tmp_path / "rows.jsonl").write_text("[" * 100_000)
    with pytest.raises(BadInput, match="rows.jsonl:1: invalid JSON: maximum recursion depth"):
        load(str(tmp_path / "rows.jsonl"))


def test_bom_crlf_blank_lines_and_unusual_separators_are_accepted(tmp_path):
    path = tmp_path / "rows.jsonl"
    lines = b"\xef\xbb\xbf" + GOOD + b"\r\n\r\n" + '{"id": null, "prompt": "a\u2028b\x85", "answer": 3}\n'.encode()
    path.write_bytes(lines + b'{"id": null, "prompt": "\\ud83d\\ude00", "answer": 4.5}')
    prompts = load(str(path))
    assert [p.id.rpartition(":")[2] for p in prompts] == ["1", "3", "4"]
    assert [p.answer for p in prompts] == ["2", "3", "4.5"]


def test_what_a_data_set_can_be(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder/name").mkdir(parents=True)
    with pytest.raises(BadInput, match="^absent.jsonl: file not found$"):
        load("absent.jsonl")
    with pytest.raises(BadInput, match="^absent.parquet: file not found$"):
        load("absent.parquet")
    with pytest.raises(BadInput, match="^nowhere/train.jsonl: file not found$"):
        load("gsm8k:nowhere")
    for spec in ("arithmatic", "math:folder", "dapo@test", "folder/name", "a/b/c", "rows.csv", "gsm8k=x"):
        with pytest.raises(
            BadInput, match=f'^--dataset "{spec}": expected arithmetic, gsm8k, gsm8k:FOLDER, math, dapo, '
        ):
            load(spec)
    with pytest.raises(BadInput, match=r'--dataset dapo: has no split "test" \(it has: train\)'):
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
    cases = [
        ([good, {"question": None, "answer": 2}], 'row 2: "question" must be a non-empty string, got null'),
        ([good, {"question": "x", "answer": None}], 'row 2: "answer" must be a string or a number, got null'),
        ([{"question": "x", "id": 1}], 'row 1: missing key "answer" (found: question, id)'),
        ([good | {"id": 7}] * 2, 'row 2: duplicate id "7" (first at row 1)'),
    ]
    for rows, message in cases:
        path = write(tmp_path / "rows.parquet", rows)
        with pytest.raises(BadInput) as error:
            load(path)
        assert str(error.value) == f"{path}:{message}"
    parquet.write_table(pyarrow.table({"question": pyarrow.array([], pyarrow.string())}), path)
    with pytest.raises(BadInput, match="rows.parquet: contains no rows$"):
        load(path)


def test_a_damaged_parquet_file_is_refused(tmp_path):
    path = write(tmp_path / "rows.parquet", [{"question": "1+1=", "answer": i} for i in range(1000)])
    whole = Path(path).read_bytes()
    middle = len(whole) // 2
    for damaged in (b"", b"PAR1", whole[:middle], whole[:8] + bytes(middle) + whole[middle + 8 :], GOOD):
        Path(path).write_bytes(damaged)
        with pytest.raises(BadInput, match="rows.parquet: cannot be read as Parquet: .") as error:
            load(path)
        assert "\n" not in str(error.value)


def test_columns(tmp_path):
    path = tmp_path / "rows.jsonl"
    row = {
        "prompt": "no",
        "problem": "1+1=",
        "meta": {"gold": {"value": 2}},
        "x.y": "x",
        "x": {"y": "no"},
        "id": 1,
        "uid": "a",
    }
    path.write_text(f"{json.dumps(row)}\n{json.dumps(row | {'uid': 'b'})}\n")
    with pytest.raises(BadInput, match=r'rows.jsonl:2: duplicate id "1" \(first at line 1\)$'):
        load(str(path), columns=("answer=uid",))
    columns = ("prompt=problem", "answer=meta.gold.value", "solution=x.y", "id=uid")
    prompt, _ = load(str(path), columns=columns)
    assert (prompt.text, prompt.answer, prompt.solution) == ("1+1=", "2", "x")
    assert prompt.meta == row | {"prompt": "1+1="}  # rewards find the prompt there by its usual name


BAD_COLUMNS = [
    (
        "prompt",
        '--columns "prompt": expected prompt=COLUMN, answer=COLUMN, solution=COLUMN, id=COLUMN, each once at most',
    ),
    ("question=x", '--columns "question=x": expected prompt=COLUMN'),
    ("prompt=", '--columns "prompt=": expected prompt=COLUMN'),
    ("prompt=b", '--columns "prompt=b": expected prompt=COLUMN'),  # twice
    ("answer=meta.gold", 'rows.jsonl:1: missing key "meta.gold" (found: question, meta)'),
    ("answer=question.x", 'rows.jsonl:1: missing key "question.x" (found: question, meta)'),
    ("id=uid", 'rows.jsonl:1: missing key "uid" (found: question, meta)'),
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
    with pytest.raises(BadInput, match="--columns: arithmetic is built in, and its columns are known"):
        load("arithmetic", columns=("answer=solution",))
    (tmp_path / "rows.jsonl").write_text('{"q": "1+1=", "a": "2"}')
    source = data.TrainSource(columns=("prompt=q", "answer=a"), eval_dataset=str(tmp_path / "rows.jsonl"))
    assert len(data.load(("arithmetic",), source, "train", TOKENIZER, 64)) == 7844  # they are for the other one
    assert len(data.load_eval(("arithmetic",), source, TOKENIZER, 64)) == 1


QUESTION = [{"content": "Last line: Answer: $Answer\n\n1+1?", "role": "user"}]
DAPO = {
    "data_source": "math_dapo",
    "prompt": QUESTION,
    "ability": "MATH",
    "reward_model": {"ground_truth": "2", "style": "rule-lighteval/MATH_v2"},
    "extra_info": {"index": "9a9b"},
}
ON_HUB = {
    ("openai/gsm8k", "main", "train"): [{"question": "1+1?", "answer": "<<1+1=2>>2\n#### 2"}],
    ("DigitalLearningGmbH/MATH-lighteval", None, "train"): [
        {"problem": "1+1?", "level": "Level 1", "solution": r"$1$, \boxed{\frac{4}{2}}", "type": "Algebra"},
        {"problem": "1+2?", "level": "Level 1", "solution": r"It is \fbox{3}.", "type": "Algebra"},
        {"problem": "1+3?", "level": "Level 1", "solution": "4", "type": "Algebra"},
    ],
    ("HuggingFaceH4/MATH-500", None, "test"): [
        {"problem": "1+1?", "solution": "No box.", "answer": "2", "subject": "Algebra", "level": 1,
         "unique_id": "test/algebra/1.json"},
    ],
    ("BytedTsinghua-SIA/DAPO-Math-17k", None, "train"):
        [DAPO, DAPO | {"prompt": [QUESTION[0] | {"content": "1+2?"}]}] * 100,
    ("someone/sums", "small", "train[:1]"): [{"prompt": "1+1?", "answer": 2}],
    ("someone/nothing", None, "train"): [],
}  # fmt: skip


@pytest.fixture
def hub(monkeypatch):
    """The Hugging Face Hub, with the data sets above in the shapes they have there."""

    def load_dataset(name, config, split):
        if (name, config, split) not in ON_HUB:
            raise ValueError(f"Unknown split {split} of {name}\nand more")
        return datasets.Dataset.from_list(ON_HUB[name, config, split])

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    monkeypatch.setattr(sources, "dataset_info", lambda name, timeout: None)


def test_gsm8k_from_the_hub(hub):
    (prompt,) = load("gsm8k")
    assert (prompt.id, prompt.answer, prompt.solution) == ("openai/gsm8k/train:row 1", "2", "2\n#### 2")
    assert prompt.text == "1+1?" + data.INSTRUCTIONS["gsm8k"]


def test_math_from_the_hub(hub, capsys):
    """The answer is in the last box of the training problems, and in a column of the test problems."""
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
    assert capsys.readouterr().out == "dapo: left out 198 of 200 rows that repeat another one's prompt\n"


def test_any_name_on_the_hub(hub):
    (prompt,) = load("someone/sums:small@train[:1]", "test")
    assert (prompt.id, prompt.answer) == ("someone/sums/train[:1]:row 1", "2")
    with pytest.raises(
        BadInput, match="^--dataset someone/sums: cannot be loaded from the Hub: Unknown split train of"
    ):
        load("someone/sums:small")
    with pytest.raises(BadInput, match="^--dataset someone/nothing: contains no rows$"):
        load("someone/nothing")


def test_no_connection_is_said_at_once(monkeypatch):
    """load_dataset would try for half a minute; what is in its cache it may have, whatever the connection."""
    asked = []

    def dataset_info(name, timeout):
        asked.append(name)
        raise httpx2.ConnectError("Name or service not known\nand more")

    monkeypatch.setattr(sources, "dataset_info", dataset_info)
    monkeypatch.setattr(datasets, "load_dataset", lambda *given, **more: pytest.fail("went on to load it"))
    with pytest.raises(BadInput, match="^--dataset openai/gsm8k: cannot be loaded from the Hub: Name or service not k"):
        load("gsm8k")
    assert asked == ["openai/gsm8k"]


def test_what_is_cached_needs_no_connection(hub, monkeypatch, tmp_path):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path)
    monkeypatch.setattr(sources, "dataset_info", lambda name, timeout: pytest.fail("asked the Hub"))
    (tmp_path / "openai___gsm8k").mkdir()
    assert len(load("gsm8k")) == 1


MODELSCOPE = {  # the part of modelscope 1.40.2 that is used
    "__init__.py": """
from pathlib import Path
from modelscope.hub.errors import HubError
def snapshot_download(model_id=None, revision=None, cache_dir=None):
    folder = Path(__file__).parent / "models" / model_id
    if not folder.is_dir():
        raise HubError(f"no {model_id} here\\nand more")
    return str(folder)
def dataset_snapshot_download(dataset_id=None, revision=None, cache_dir=None):
    return str(Path(__file__).parent / "datasets" / dataset_id)
""",
    "hub/__init__.py": "",
    "hub/errors.py": "class HubError(Exception):\n    pass\n",
    "datasets/AI-ModelScope/gsm8k/README.md": """---
configs:
- config_name: main
  data_files: [{split: train, path: main/train-*}, {split: test, path: main/test-*}]
---
""",
}


@pytest.fixture
def modelscope(tmp_path, monkeypatch):
    """A package of that name on the path, with a folder as its hub; gone afterwards."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    for name in [name for name in sys.modules if name.partition(".")[0] == "modelscope"]:
        monkeypatch.delitem(sys.modules, name)
    for name, text in MODELSCOPE.items():
        path = tmp_path / "modelscope" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    importlib.invalidate_caches()
    yield tmp_path / "modelscope"
    for name in [name for name in sys.modules if name.partition(".")[0] == "modelscope"]:
        del sys.modules[name]


def test_data_sets_from_modelscope(modelscope):
    folder = modelscope / "datasets/AI-ModelScope/gsm8k/main"
    folder.mkdir()
    for split, answer in (("train", "2"), ("test", "3")):
        write(folder / f"{split}-00000-of-00001.parquet", [{"question": "1+1?", "answer": f"#### {answer}"}])
    for split, answer in (("train", "2"), ("test", "3")):
        (prompt,) = load("gsm8k", split, hub="modelscope")
        assert (prompt.id, prompt.answer) == (f"AI-ModelScope/gsm8k/{split}:row 1", answer)


def test_models_from_modelscope(modelscope, tmp_path):
    model = modelscope / "models/some/model"
    embedded.config().save_pretrained(model)
    embedded.tokenizer().save_pretrained(model)
    assert data.resolve_model("some/model", "modelscope") == str(model)
    assert data.load_tokenizer(data.resolve_model("some/model", "modelscope"))[1] == [1]
    assert data.resolve_model(str(tmp_path), "modelscope") == str(tmp_path)  # a folder is one already
    assert data.resolve_model("embedded", "modelscope") == "embedded"
    assert data.resolve_model("some/model", "huggingface") == "some/model"
    with pytest.raises(BadInput, match="^--model no/model: cannot be downloaded from ModelScope: no no/model here$"):
        data.resolve_model("no/model", "modelscope")


@pytest.mark.skipif(importlib.util.find_spec("modelscope") is not None, reason="modelscope is installed here")
def test_modelscope_is_asked_for_where_it_is_not_installed():
    with pytest.raises(BadInput, match="^--hub modelscope: not installed; pip install modelscope$"):
        data.resolve_model("some/model", "modelscope")
    with pytest.raises(BadInput, match="^--hub modelscope: not installed; pip install modelscope$"):
        load("gsm8k", hub="modelscope")
