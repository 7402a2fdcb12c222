"""Data: what is read, what is refused and with which words, and an order that can be resumed."""

import json
from pathlib import Path

import pytest

from common import data, embedded
from common.placement import BadInput

GSM8K = Path(__file__).parents[2] / "shared" / "data" / "gsm8k"
TOKENIZER = embedded.tokenizer()
GOOD = b'{"question": "1+1=", "answer": "2"}'


def test_arithmetic_is_complete_and_held_out():
    train, test = (data.load("arithmetic", split, TOKENIZER, 64) for split in ("train", "test"))
    assert len(train) + len(test) == 90 * 90 and len(test) == embedded.HELD_OUT
    assert not {p.text for p in train} & {p.text for p in test}
    for prompt in test:
        a, b = map(int, prompt.text.rstrip("=").split("+"))
        assert prompt.answer == str(a + b)
    assert embedded.solution(47, 38) == "7+8=15,4+3+1=8\n#### 85"
    assert embedded.solution(47, 38, with_carry=False) == "7+8=15,4+3=7\n#### 75"
    assert embedded.solution(92, 37) == "2+7=9,9+3=12\n#### 129"


def test_the_teacher_is_wrong_as_often_as_it_says():
    rows = embedded.problems("train")
    carries = [row for row in rows if sum(int(n) % 10 for n in row["question"][:-1].split("+")) >= 10]
    wrong = [row for row in rows if not row["solution"].endswith(f"#### {row['answer']}")]
    assert all(row in carries for row in wrong)
    assert abs(len(wrong) / len(carries) - embedded.FORGETS_CARRY) < 0.03


def test_tokenizer_round_trip():
    text = "47+38=7+8=15,4+3+1=8\n#### 85"
    assert TOKENIZER.decode(TOKENIZER(text)["input_ids"]) == text
    assert TOKENIZER.decode([*TOKENIZER(text)["input_ids"], TOKENIZER.eos_token_id], skip_special_tokens=True) == text


BAD = [
    (b"", r"rows.jsonl: contains no rows"),
    (b"\n\n", r"rows.jsonl: contains no rows"),
    (GOOD + b'\n{"question": "1+1=", "answer', r"rows.jsonl:2: invalid JSON at column 22: "),
    (GOOD + b"\n\n[1]", r"rows.jsonl:3: expected an object, got list"),
    (b'{"id": 1, "question": "x"}', r'rows.jsonl:1: missing key "answer" \(found: id, question\)'),
    (b'{"answer": "2"}', r'rows.jsonl:1: missing key "prompt" \(found: answer\)'),
    (b'{"question": null, "answer": "2"}', r'rows.jsonl:1: "question" must be a non-empty string, got null'),
    (b'{"question": " ", "answer": "2"}', r'rows.jsonl:1: "question" must be a non-empty string, got " "'),
    (b'{"question": "x", "answer": null}', r'rows.jsonl:1: "answer" must be a string or a number, got null'),
    (GOOD + b"\n" + b'{"question": "\xff"}', r"rows.jsonl:2: not valid UTF-8 at byte 15"),
    (b"\n".join([b"["] * 8), r"(?s)rows.jsonl:1: .*rows.jsonl:5: .*\.\.\. and 3 more"),
]


@pytest.mark.parametrize("content, message", BAD)
def test_bad_jsonl_is_named_by_line(tmp_path, content, message):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(content)
    with pytest.raises(BadInput, match=message):
        data.load(str(path), "train", TOKENIZER, 64)


def test_bom_crlf_blank_lines_and_unusual_separators_are_accepted(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + GOOD + b"\r\n\r\n" + '{"prompt": "a\u2028b", "answer": 3}'.encode() + b"\n")
    prompts = data.load(str(path), "train", TOKENIZER, 64)
    assert [p.id.rpartition(":")[2] for p in prompts] == ["1", "3"]
    assert [p.answer for p in prompts] == ["2", "3"]


def test_missing_file_and_unknown_name(tmp_path):
    with pytest.raises(BadInput, match="absent.jsonl: file not found"):
        data.load(str(tmp_path / "absent.jsonl"), "train", TOKENIZER, 64)
    with pytest.raises(BadInput, match='--dataset "arithmatic": expected arithmetic, gsm8k'):
        data.load("arithmatic", "train", TOKENIZER, 64)


def test_long_prompts_are_dropped_and_counted_never_cut(tmp_path, capsys):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"question": "12345678", "answer": "1"}\n' + GOOD.decode() + "\n")
    (kept,) = data.load(str(path), "train", TOKENIZER, 6)
    assert kept.text == "1+1=" and "dropped 1 of 2 prompts over 6 tokens: " in capsys.readouterr().out
    with pytest.raises(BadInput, match="all 2 prompts are longer than --max-prompt-tokens 2"):
        data.load(str(path), "train", TOKENIZER, 2)


def test_raw_gsm8k(tmp_path):
    row = {"question": "How many?", "answer": "9*2 = <<9*2=18>>18\n#### 1,018"}
    (tmp_path / "train.jsonl").write_text(json.dumps(row) + "\n")
    (prompt,) = data.load(f"gsm8k:{tmp_path}", "train", TOKENIZER, 500)
    assert prompt.answer == "1,018" and prompt.solution == "9*2 = 18\n#### 1,018"
    assert prompt.text.startswith("How many?") and "####" in prompt.text
    (tmp_path / "train.jsonl").write_text('{"question": "How many?", "answer": "18"}\n')
    with pytest.raises(BadInput, match='train.jsonl:1: no "####" in "answer"'):
        data.load(f"gsm8k:{tmp_path}", "train", TOKENIZER, 500)


@pytest.mark.skipif(not GSM8K.is_dir(), reason="GSM8K is not at ../shared/data/gsm8k")
def test_gsm8k_has_its_size():
    assert len(data.load(f"gsm8k:{GSM8K}", "test", TOKENIZER, 100_000)) == 1319


def test_chat_template_is_used_once():
    tokenizer = embedded.tokenizer()
    tokenizer.chat_template = "{% for m in messages %}<bos>{{ m.content }}{% endfor %}="
    text, ids = data.render("1+1", tokenizer)
    assert text == "<bos>1+1=" and ids.count(tokenizer.bos_token_id) == 1


def test_loader_order_is_a_function_of_seed_and_epoch():
    prompts = data.load("arithmetic", "test", TOKENIZER, 64)
    whole = data.PromptLoader(prompts, seed=1)
    first_epoch = whole.take(len(prompts))
    assert sorted(p.id for p in first_epoch) == sorted(p.id for p in prompts)
    across = data.PromptLoader(prompts, seed=1)
    across.take(len(prompts) - 5)
    resumed = data.PromptLoader(prompts, seed=1)
    resumed.position = across.position
    assert across.take(20) == resumed.take(20)  # over the end of the epoch
    assert data.PromptLoader(prompts, seed=2).take(20) != first_epoch[:20]


def test_the_embedded_tokenizer_survives_saving(tmp_path):
    """AutoTokenizer makes a Qwen2 tokenizer of it: spaces and newlines must not vanish."""
    embedded.config().save_pretrained(tmp_path)
    made = embedded.tokenizer()
    made.save_pretrained(tmp_path)
    loaded, _ = data.load_tokenizer(str(tmp_path))
    text = embedded.solution(47, 38) + " and 1 + 1 = 2?\n\n"
    assert made(text)["input_ids"] == loaded(text)["input_ids"] and len(made(text)["input_ids"]) == len(text)
    assert made.decode(made(text)["input_ids"]) == loaded.decode(made(text)["input_ids"]) == text
