"""The table of responses that a tracker gets: which part of a step's file it has, and that no text is markup."""

import html.parser
import json
import math
import re

import pytest
from tensorboard import plugin_util

from common.run import response_table, traces
from common.run.response_table import CELL, ROWS, Table

ROW = dict.fromkeys(traces.KEYS) | {
    "prompt": "1+1=",
    "response": "It is 2",
    "answer": "2",
    "extracted": "2",
    "score": 1.1,
    "advantage": 0.5,
    "info": {"parts": {"gsm8k": 1.0, "format": 0.5}},
    "finish_reason": "stop",
    "weight_versions": [4, 4, 5],
}
LARGE = 10**9  # characters that no table reaches


def write(folder, *rows: dict):
    path = folder / "step_000012.jsonl"
    path.write_text("".join(json.dumps({**ROW, **row}) + "\n" for row in rows))
    return path


def rows_of(table: Table) -> list[dict]:
    return [dict(zip(table.columns, row, strict=True)) for row in table.rows]


def read(folder, *rows: dict, characters: int = LARGE) -> list[dict]:
    return rows_of(response_table.read(write(folder, *rows), 12, len(rows), characters))


def test_a_row_by_hand(tmp_path):
    table = response_table.read(write(tmp_path, {}), 12, 1, LARGE)
    assert table.columns == [
        "step",
        "prompt",
        "response",
        "extracted",
        "reference",
        "reward/gsm8k",
        "reward/format",
        "score",
        "advantage",
        "finish_reason",
        "weight_version",
    ]
    assert table.rows == [[12, "1+1=", "It is 2", "2", "2", 1.0, 0.5, 1.1, 0.5, "stop", 4]]


CELLS = [  # keys of a row in rollouts/, cells of its row in the table
    ({"advantage": [1.0, 2.0, 6.0]}, {"advantage": 3.0}),
    ({"advantage": [1.0, 2.0, 0.0], "sampled": [1, 1, 0]}, {"advantage": 1.5}),  # the environment has no advantage
    ({"advantage": [], "weight_versions": []}, {"advantage": None, "weight_version": None}),
    ({"advantage": None, "score": None}, {"advantage": None, "score": None}),
    ({"score": 0.0, "info": {"ungraded": "the judge is down"}}, {"score": None}),
    ({"advantage": math.nan, "score": math.inf}, {"advantage": None, "score": None}),
    ({"score": 1}, {"score": 1.0}),
    ({"extracted": None, "answer": None}, {"extracted": None, "reference": None}),
    ({"extracted": 3.5, "answer": ["a"]}, {"extracted": "3.5", "reference": "['a']"}),
    ({"response": "half \ud83d"}, {"response": "half \\ud83d"}),
    ({"info": {"parts": {"rewards/my.py:f": 0.25, "b": None}}}, {"reward/rewards-my-py-f": 0.25}),
    # What a user's reward may have written there.
    ({"info": {"parts": ["a"]}}, {"score": 1.1}),
    ({"info": {"parts": {"a": True, "b": "text"}}}, {"score": 1.1}),
    ({"info": None}, {"score": 1.1}),
]


@pytest.mark.parametrize("keys, cells", CELLS)
def test_what_becomes_of_a_value(keys, cells, tmp_path):
    (row,) = read(tmp_path, keys)
    assert {name: row[name] for name in cells} == cells
    assert all(isinstance(value, str | int | float | None) for value in row.values())
    assert [name for name in row if name.startswith("reward/")] == (
        ["reward/gsm8k", "reward/format"] if "info" not in keys else [name for name in cells if "reward/" in name]
    )


def test_a_reward_that_scored_only_some_responses_is_a_column_of_all(tmp_path):
    first, second = read(tmp_path, {"info": {"parts": {"a": 1.0}}}, {"info": {"parts": {"b": 2.0}}})
    assert (first["reward/a"], first["reward/b"]) == (1.0, None)
    assert (second["reward/a"], second["reward/b"]) == (None, 2.0)


def test_the_first_responses_are_shown_and_the_others_counted(tmp_path):
    rows = read(tmp_path, *[{"response": str(number)} for number in range(ROWS + 7)])
    assert [row["response"] for row in rows] == [*map(str, range(ROWS)), None]
    assert rows[-1]["step"] == 12 and rows[-1]["score"] is None
    assert re.fullmatch(rf"7 of {ROWS + 7} responses .*rollouts/step_000012.jsonl", rows[-1]["prompt"])
    # As many as there is room for, and none is left out.
    assert [row["response"] for row in read(tmp_path, *[{"response": "a"}] * ROWS)] == ["a"] * ROWS


def test_the_rest_of_a_large_file_is_not_read(tmp_path):
    path = write(tmp_path, *[{}] * ROWS)
    with open(path, "a") as file:
        file.write("not JSON\n")
    assert len(response_table.read(path, 12, ROWS + 1, LARGE).rows) == ROWS + 1


@pytest.mark.parametrize(
    "column, key", [(name, name) for name in ("prompt", "response", "extracted")] + [("reference", "answer")]
)
def test_a_long_text_loses_its_middle(column, key, tmp_path):
    text = "".join(chr(ord("a") + number % 26) for number in range(CELL + 11))
    (row,) = read(tmp_path, {key: text})
    start, left_out, end = re.fullmatch(
        r"([a-z]+) \[\.\.\. (\d+) characters left out \.\.\.\] ([a-z]+)", row[column]
    ).groups()
    assert text.startswith(start) and text.endswith(end)
    assert len(start) == len(end) == CELL // 2 and int(left_out) == 11
    (row,) = read(tmp_path, {key: text[:CELL]})
    assert row[column] == text[:CELL]


def test_a_table_has_as_many_rows_as_its_characters_allow(tmp_path):
    """Each row has 100 characters of text in its four columns."""
    row = {"prompt": "p" * 40, "response": "r" * 50, "extracted": "e" * 9, "answer": "a"}
    for characters, shown in ((1000, 10), (999, 9), (200, 2)):
        rows = read(tmp_path, *[row] * 12, characters=characters)
        assert [row["response"] for row in rows[:-1]] == ["r" * 50] * shown
        assert rows[-1]["prompt"].startswith(f"{12 - shown} of 12 ")


def test_one_row_fits_however_few_characters_there_are(tmp_path):
    row = {"prompt": "p" * 400, "response": "r" * 500, "extracted": "e" * 99, "answer": "a" * 300}
    first, last = read(tmp_path, row, row, characters=40)
    assert first["response"].startswith("rrrrr [... 490 ") and last["prompt"].startswith("1 of 2 ")


@pytest.mark.parametrize("tables", [0, 1, 3, 1000, 10**9])
def test_all_tables_of_a_run_have_a_bound_together(tables):
    assert tables * response_table.characters_of_each(tables) <= response_table.TOTAL
    assert response_table.characters_of_each(1) == response_table.TOTAL


class Cells(html.parser.HTMLParser):
    """The texts of the cells of an HTML table, row by row."""

    def __init__(self, page: str):
        super().__init__()
        self.rows = []
        self.tags = set()
        self.feed(page)

    def handle_starttag(self, tag, attributes):
        self.tags.add(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")
        if tag == "br":
            self.rows[-1][-1] += "\n"

    def handle_data(self, data):
        if self.rows and self.rows[-1] and data != "\n":
            self.rows[-1][-1] += data


HOSTILE = (
    "a | b",
    "`code` and ``more``",
    "**bold** _it_ __x__ *y*",
    "<script>alert(1)</script> <b>",
    "[link](http://host) ![image](http://host/x.png)",
    "&amp; &#42; &lt;",
    "\\frac{1}{2} \\| $x$ ~~gone~~",
    "one\ntwo\n\n# three\n| --- | --- |",
    "<http://host> http://host",
    "\u00e9\U0001f600\u2028x",
)


@pytest.mark.parametrize("text", HOSTILE)
def test_nothing_in_a_text_is_markup(text):
    """As TensorBoard renders it."""
    table = Table(3, ["prompt", "response", "score"], [[text, "plain", 0.5], ["plain", text, None]])
    shown = Cells(plugin_util.markdown_to_safe_html(response_table.markdown(table)))
    assert shown.rows == [["prompt", "response", "score"], [text, "plain", "0.5"], ["plain", text, ""]]
    assert shown.tags <= {"table", "thead", "tbody", "tr", "th", "td", "br"}
