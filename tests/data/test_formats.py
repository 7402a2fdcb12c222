"""Data as others have it is read, or refused with the flag or the command that makes it readable."""

import gzip
import json
import re
from pathlib import Path

import datasets
import pytest
from test_sources import TOKENIZER, load, write

from common.data.formats import FILES
from common.data.prompts import TrainSource, load_eval
from common.errors import BadInput

USER = {"role": "user", "content": "1+1="}
MORE = {"role": "user", "content": "and 1+2=?"}
SYSTEM = {"role": "system", "content": "Add."}
GPT = {"role": "assistant", "content": "2"}
HUMAN = {"from": "human", "value": "1+1="}


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def said(dataset: str, **source) -> str:
    """The message with which a data set is refused."""
    with pytest.raises(BadInput) as error:
        load(dataset, **source)
    return str(error.value)


def put(name: str, *rows) -> str:
    """Write rows as JSON lines, or a text as it stands."""
    Path(name).parent.mkdir(parents=True, exist_ok=True)
    content = [row if isinstance(row, str) else json.dumps(row) + "\n" for row in rows]
    Path(name).write_text("".join(content), encoding="utf-8")
    return name


CONVERSATIONS = [  # row -> text of the prompt, solution
    ({"messages": [USER, GPT]}, "1+1=\n", "2"),
    ({"messages": [SYSTEM, USER, GPT, MORE, GPT]}, "Add.\n1+1=\n2\nand 1+2=?\n", "2"),
    ({"messages": [USER]}, "1+1=\n", None),
    ({"prompt": [USER, {"role": "assistant", "content": "it is "}]}, "1+1=\nit is ", None),
    ({"messages": [USER, GPT, MORE]}, "1+1=\n2\nand 1+2=?\n", None),
    ({"messages": [USER, GPT], "solution": "two"}, "1+1=\n", "two"),
    ({"messages": [USER, GPT], "prompt": "1+3="}, "1+3=", None),
    ({"conversations": [HUMAN, {"from": "gpt", "value": "2"}]}, "1+1=\n", "2"),
    ({"conversations": [{"from": "system", "value": "Add."}, HUMAN]}, "Add.\n1+1=\n", None),
    ({"conversations": [USER, GPT]}, "1+1=\n", "2"),
    ({"conversations": [HUMAN, GPT]}, "1+1=\n", "2"),  # in a table both messages have all four keys
]


@pytest.mark.parametrize("row, text, solution", CONVERSATIONS)
@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_conversations_are_read(row, text, solution, kind):
    row = {**row, "answer": "2"}
    name = put("rows.jsonl", row) if kind == "jsonl" else write(Path("rows.parquet"), [row])
    (prompt,) = load(name)
    assert (prompt.text, prompt.solution, prompt.answer) == (text, solution, "2")


def test_columns_choose_the_conversation():
    put("rows.jsonl", {"prompt": "1+3=", "messages": [USER, GPT], "chat": [USER]})
    (prompt,) = load("rows.jsonl", columns=("prompt=messages",))
    assert (prompt.text, prompt.solution, prompt.answer) == ("1+1=\n", "2", None)
    (prompt,) = load("rows.jsonl", columns=("prompt=chat",))
    assert (prompt.text, prompt.solution) == ("1+1=\n", None)


BAD_CONVERSATIONS = [  # the column of a conversation -> what the error shows of it
    ([], "[]"),
    ([GPT], "begin before the assistant's"),
    (None, "null"),
    ("1+1=", '"1+1="'),
    ([{"role": "user"}], "message 1 (user)"),
    ([USER, {"role": "tool", "content": {"a": 1}}], '{"a": 1}'),
    ([{"from": "human"}], '{"from": "human"}'),
    ([{"from": ["human"], "value": "x"}], "human"),
    ([{"from": "moderator", "value": "x"}], "moderator"),
    ([{"from": "gpt", "value": None}], "null"),
    ([USER, {"from": "function_call", "value": "weather"}], "weather"),
    ([USER, {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}], "{"),
]


@pytest.mark.parametrize("turns, shown", BAD_CONVERSATIONS)
def test_bad_conversations_are_refused(turns, shown):
    for name in ("messages", "conversations"):
        put("rows.jsonl", {name: turns})
        error = said("rows.jsonl")
        assert error.startswith(f'rows.jsonl:1: "{name}"') and shown in error


TABLES = [  # name, content -> texts, answers
    ("rows.csv", "prompt,answer\n1+1=,2\n1+2=,3\n", ["1+1=", "1+2="], ["2", "3"]),
    ("rows.csv", "\ufeffquestion,answer\r\n1+1=,2\r\n\r\n1+2=,3\r\n", ["1+1=", "1+2="], ["2", "3"]),
    ("rows.csv", 'answer,prompt\n007,"one, ""two""\nand 3"', ['one, "two"\nand 3'], ["007"]),
    ("rows.csv", "prompt;answer\n1,5 + 1=;2,5\n", ["1,5 + 1="], ["2,5"]),
    ("rows.csv", "id,prompt,answer,note\n1, 1+1=,2,\n", [" 1+1="], ["2"]),
    ("rows.tsv", "prompt\tanswer\n1, 2 and 3; sum\t6\n", ["1, 2 and 3; sum"], ["6"]),
    ("rows.tsv", "prompt,answer\n1+1=,2\n", ["1+1="], ["2"]),
    ("rows.csv", "prompt\n1+1=\n", ["1+1="], [None]),
    ("rows.csv", "prompt,answer,,\n1+1=,2,,\n", ["1+1="], ["2"]),
    ("rows.tsv", 'prompt\tanswer\n"one ""two""\nand 3"\t5\n', ['one "two"\nand 3'], ["5"]),
    # Tools that quote nothing leave quotes as they are.
    ("rows.tsv", 'prompt\tanswer\n"one" and 2\t3\na 2" and 1"\t3\n', ['"one" and 2', 'a 2" and 1"'], ["3", "3"]),
    ("rows.tsv", 'prompt\tanswer\n"one and 2\t3\n1+1=\t2\n', ['"one and 2', "1+1="], ["3", "2"]),
]


@pytest.mark.parametrize("name, content, texts, answers", TABLES)
def test_tables_are_read_as_texts(name, content, texts, answers):
    prompts = load(put(name, content))
    assert [prompt.text for prompt in prompts] == texts and [prompt.answer for prompt in prompts] == answers
    assert [prompt.id for prompt in prompts] == [f"{name}:row {n + 1}" for n in range(len(texts))]


CURE = "; --columns prompt=COLUMN if another column holds it"
QUOTES = '; write a text with quotes as "a ""quoted"" word"'
BAD_TABLES = [  # content of rows.csv -> the whole message
    ("", "rows.csv: contains no rows"),
    ("prompt,answer\n", "rows.csv: contains no rows"),
    ("a,b\n1,2\n", f'rows.csv:row 1: missing key "prompt" (found: a, b){CURE}'),
    ("prompt,id\n1,2\n1,2,3\n", "rows.csv: cannot be read as CSV: row 2: expected 2 values, as in the header"),
    (
        "prompt,answer,answer\n1,2,3\n",
        'rows.csv: cannot be read as CSV: the header names the column "answer" 2 times',
    ),
    ("prompt,answer\n1\n", "rows.csv: cannot be read as CSV: row 1: expected 2 values, as in the header"),
    ('prompt,answer\n"1,2\n', f"rows.csv: cannot be read as CSV: line 2: unexpected end of data{QUOTES}"),
    ('prompt,answer\n1,2\n"1" a,2\n', f"rows.csv: cannot be read as CSV: line 3: ',' expected after '\"'{QUOTES}"),
    # A writer has put quotes around the second text, so the first one was damaged.
    (
        'prompt\tanswer\n"1" a\t2\n"say ""1"""\t3\n',
        f"rows.csv: cannot be read as CSV: line 2: '\t' expected after '\"'{QUOTES}"
        "; some fields of the file are quoted, and others have quotes in them",
    ),
    ('prompt\tanswer\n"1" a\t2\n1\n', "rows.csv: cannot be read as CSV: row 2: expected 2 values, as in the header"),
    ("prompt,answer\n,2\n", 'rows.csv:row 1: "prompt" must be a non-empty string, got ""'),
    (f"prompt,answer\n{'1' * 200_000},2\n", "rows.csv: all 1 prompts are longer than --max-prompt-tokens 999"),
]


@pytest.mark.parametrize("content, message", BAD_TABLES, ids=[message[:60] for _, message in BAD_TABLES])
def test_bad_tables_are_refused(content, message):
    assert said(put("rows.csv", content)) == message


def test_a_table_in_another_encoding_is_refused():
    Path("rows.csv").write_bytes("prompt,answer\nwie groß ist 1+1?,2\n".encode("cp1252"))
    message = said("rows.csv")
    assert message.startswith("rows.csv: cannot be read as CSV: 'utf-8' codec can't decode byte 0xdf in ")


ROW = {"prompt": "1+1=", "answer": 2}


@pytest.mark.parametrize("name", ["rows.json", "rows.jsonl"])
@pytest.mark.parametrize("indent", [None, 2])
def test_an_array_is_read_under_either_ending(name, indent):
    prompts = load(put(name, "\ufeff \n" + json.dumps([ROW, ROW], indent=indent)))
    assert [(p.id, p.text, p.answer) for p in prompts] == [(f"{name}:row {n}", "1+1=", "2") for n in (1, 2)]


@pytest.mark.parametrize("name", ["rows.json", "rows.jsonl"])
def test_json_lines_are_read_under_either_ending(name):
    assert [prompt.id for prompt in load(put(name, ROW, "\n", ROW))] == [f"{name}:1", f"{name}:3"]


BAD_ARRAYS = [  # content of rows.json -> the whole message
    ("", "rows.json: contains no rows"),
    ("[]", "rows.json: contains no rows"),
    ("[1, {}]", "rows.json:row 1: expected an object, got int"),
    ('[{"prompt": "1+1="},\n]', "rows.json: cannot be read as JSON: invalid JSON at line 2, column 1: Expecting value"),
    (
        '["\\ud800"]',
        "rows.json: cannot be read as JSON: 'utf-8' codec can't encode character '\\ud800' in position 2: "
        "surrogates not allowed",
    ),
    ("[1]\n[2]\n", "rows.json: cannot be read as JSON: invalid JSON at line 2, column 1: Extra data"),
    (
        '{"prompt":\n',
        "rows.json:1: invalid JSON at column 11: Expecting value; expected an array of objects, or one object a line",
    ),
    ("7", "rows.json:1: expected an object, got int"),
]


@pytest.mark.parametrize("content, message", BAD_ARRAYS, ids=[message[:60] for _, message in BAD_ARRAYS])
def test_bad_arrays_are_refused(content, message):
    assert said(put("rows.json", content)) == message


def test_a_folder_is_read_in_the_order_of_names():
    for name in ("b", "a"):
        put(f"folder/{name}.jsonl", {**ROW, "id": name})
    put("folder/README.md", "# Sums")
    assert [prompt.id for prompt in load("folder")] == ["folder/a.jsonl:1", "folder/b.jsonl:1"]
    assert len(load("folder/")) == 2


def test_a_folder_of_parquet_files_has_splits():
    Path("folder/data").mkdir(parents=True)
    for name, count in (("train-00000-of-00002", 2), ("train-00001-of-00002", 1), ("test-00000-of-00001", 1)):
        write(Path(f"folder/data/{name}.parquet"), [ROW] * count)
    assert len(load("folder/data")) == 3
    (prompt,) = load_eval(("folder/data",), TrainSource(eval_dataset="folder/data"), TOKENIZER, 999)
    assert prompt.id == "folder/data/test-00000-of-00001.parquet:row 1"


KINDS = "(.jsonl, .json, .csv, .tsv, .parquet)"
BAD_FOLDERS = [  # names in a folder -> what is said about it
    ([], f"folder: expected files of one kind {KINDS}, found nothing; name a file, or a folder inside"),
    (["x.md"], f"folder: expected files of one kind {KINDS}, found x.md; name a file, or a folder inside"),
    (
        ["a.csv", "a.jsonl"],
        f"folder: expected files of one kind {KINDS}, found a.csv, a.jsonl; name a file, or a folder inside",
    ),
    (
        ["test.jsonl"],
        f"folder: expected files of one kind {KINDS} for train, found test.jsonl; name a file, or a folder inside",
    ),
    (["a.jsonl"], "folder/a.jsonl: contains no rows"),
]


@pytest.mark.parametrize("names, message", BAD_FOLDERS, ids=[message[:70] for _, message in BAD_FOLDERS])
def test_bad_folders_are_refused(names, message):
    Path("folder").mkdir()
    for name in names:
        put(f"folder/{name}", "")
    assert said("folder") == message


def test_a_folder_in_a_folder_is_named():
    put("folder/data/train.jsonl", ROW)
    assert "found data; name a file, or a folder inside" in said("folder")


def test_the_error_for_a_saved_data_set_has_the_call_that_makes_it_readable():
    datasets.Dataset.from_list([ROW, ROW]).save_to_disk("saved")
    exec("import datasets\n" + re.search(r"datasets\..*?\)\.to_parquet\(.*?\)", said("saved"))[0])
    assert len(load("rows.parquet")) == 2


@pytest.mark.parametrize("name", ["rows.jsonl.gz", "rows.zip", "rows.xlsx", "rows.txt", "rows.yaml", "rows"])
def test_other_files_are_refused_with_the_kinds_that_are_read(name):
    Path(name).write_bytes(gzip.compress(b"{}"))
    assert said(name).startswith(f"{name}: ") and said(name).endswith(", ".join(FILES))


@pytest.mark.parametrize("name", ["rows.csv", "rows.json", "rows.tsv", "rows.jsonl", "rows.parquet", "no/rows.csv"])
def test_a_missing_file_is_named(name):
    assert said(name) == f"{name}: file not found"


@pytest.mark.parametrize("name", ["data/trian.jsonl", "data/train.jsnl", "data/train"])
def test_a_misspelt_file_is_not_sought_on_the_hub(name):
    put("data/train.jsonl", {"prompt": "1+1="})
    assert said(name).endswith(f"{name}: file not found (did you mean train.jsonl?)")


def test_a_row_without_a_prompt_is_refused_with_its_columns_and_the_flag():
    put("rows.jsonl", {"problem": "1+1=", "answer": 2})
    assert said("rows.jsonl").startswith(
        'rows.jsonl:1: missing key "prompt" (found: problem, answer) (did you mean problem?); --columns prompt='
    )


def test_columns_that_are_missing_are_not_proposed_again():
    put("rows.jsonl", {"problem": "1+1="})
    expected = 'rows.jsonl:1: missing key "probelm" (found: problem) (did you mean problem?)'
    assert said("rows.jsonl", columns=("prompt=probelm",)) == expected
