"""Conversations of real data sets: nothing that a row says is lost on its way to token ids, or said twice."""

import json
import shutil

import pytest
from transformers import AutoConfig

from common.data import arithmetic, pairs, templates
from common.data.demonstrations import demonstrations
from common.data.prompts import Source, load
from common.data.suffix import Suffix
from common.data.tokenizer import load_tokenizer
from common.errors import BadInput
from common.rewards.mixture import Rewards

CHATML = (
    "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
OPENS_THINKING = CHATML.replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}")
GEMMA = (
    "{% for m in messages %}<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n{{ m.content | trim }}"
    "<end_of_turn>\n{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
KNOWS_TWO = CHATML.replace("for m in messages", "for m in messages if m.role in ('user', 'assistant')")
CALL = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "oslo"}'}}
LLAMAS_CALL = {"name": "weather", "parameters": {"city": "oslo"}}
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}]
ASKED = {"role": "user", "content": "2+3?"}
FIVE = {"role": "assistant", "content": "5"}
PARTS = [{"type": "text", "text": "2+"}, {"type": "text", "text": "3?"}]
HUMAN = {"from": "human", "value": "2+3?"}  # in ShareGPT's form
DEEP = '[{"a":' * 100_000  # json.loads() raises RecursionError


def tokenizer_with(template: str):
    tokenizer = arithmetic.tokenizer()
    special = ["<|im_start|>", "<|im_end|>", "<start_of_turn>", "<end_of_turn>"]
    tokenizer.add_special_tokens({"additional_special_tokens": special})
    tokenizer.add_tokens(["<think>", "</think>", "<tool_call>", "</tool_call>", '"', "{", "}", ":", "_", "[", "]", "O"])
    tokenizer.add_tokens(["U", "A", "B", "T", "!", "'"])
    tokenizer.chat_template = template or None
    return tokenizer


def one(tmp_path, row: dict, template: str = CHATML, **source):
    """The prompt that is made of a row, and the tokenizer."""
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    tokenizer = tokenizer_with(template)
    (prompt,) = load((str(tmp_path / "rows.jsonl"),), Source(**source), "train", tokenizer, 512)
    return prompt, tokenizer


def turn(role: str, text: str) -> str:
    return f"<|im_start|>{role}\n{text}<|im_end|>\n"


NEXT = "<|im_start|>assistant\n"
USER = turn("user", "2+3?")


@pytest.mark.parametrize(
    "row, text, learned",
    [
        ({"messages": [ASKED, FIVE]}, USER + NEXT, "5<|im_end|>"),
        ({"prompt": "2+3?", "solution": "5"}, USER + NEXT, "5<|im_end|>"),
        ({"prompt": "2+3?", "completion": "5"}, USER + NEXT, "5<|im_end|>"),
        ({"prompt": [ASKED], "completion": [FIVE]}, USER + NEXT, "5<|im_end|>"),
        ({"prompt": "2+3?", "solution": "5<|im_end|>"}, USER + NEXT, "5<|im_end|>"),
        ({"prompt": "2+3?", "solution": "5<eos>"}, USER + NEXT, "5<|im_end|>"),
        ({"prompt": json.dumps([ASKED]), "solution": "5"}, USER + NEXT, "5<|im_end|>"),
        ({"prompt": json.dumps([ASKED], indent=1), "solution": "5"}, USER + NEXT, "5<|im_end|>"),
        ({"prompt": "[{2+3}]", "solution": "5"}, turn("user", "[{2+3}]") + NEXT, "5<|im_end|>"),
        (
            {"system": "say it", "prompt": "2+3?", "solution": "5"},
            turn("system", "say it") + USER + NEXT,
            "5<|im_end|>",
        ),
        (
            {"messages": [ASKED, {"role": "assistant", "content": "look", "tool_calls": [LLAMAS_CALL]}]},
            USER + NEXT,
            'look<tool_call>{"name": "weather", "arguments": {"city": "oslo"}}</tool_call><|im_end|>',
        ),
        (
            {"messages": [{"role": "user", "content": PARTS}, FIVE]},
            USER + NEXT,
            "5<|im_end|>",
        ),
        (
            {"messages": [ASKED, FIVE | {"reasoning_content": "two and three"}]},
            USER + NEXT,
            "<think>\ntwo and three\n</think>\n\n5<|im_end|>",
        ),
        (
            {"messages": [ASKED, {"role": "assistant", "content": "look", "tool_calls": [CALL]}]},
            USER + NEXT,
            'look<tool_call>{"name": "weather", "arguments": {"city": "oslo"}}</tool_call><|im_end|>',
        ),
        (
            {"messages": [ASKED, {"role": "assistant", "content": None, "tool_calls": [CALL]}]},
            USER + NEXT,
            '<tool_call>{"name": "weather", "arguments": {"city": "oslo"}}</tool_call><|im_end|>',
        ),
        ({"messages": [ASKED, FIVE | {"tool_calls": None}]}, USER + NEXT, "5<|im_end|>"),
        ({"prompt": "2+3?", "solution": None, "response": "5"}, USER + NEXT, "5<|im_end|>"),
        ({"prompt": "2+3?", "completion": json.dumps([FIVE])}, USER + NEXT, "5<|im_end|>"),
        ({"prompt": "2+3?", "solution": '[{"role": "a"}]'}, USER + NEXT, '[{"role": "a"}]<|im_end|>'),
        *[
            ({"conversations": [HUMAN, {"from": who, "value": "5"}]}, USER + NEXT, "5<|im_end|>")
            for who in ("gpt", "chatgpt", "bing", "bard", "model", "assistant")
        ],
        (
            {"system": "say it", "conversations": [HUMAN, {"from": "gpt", "value": "5"}]},
            turn("system", "say it") + USER + NEXT,
            "5<|im_end|>",
        ),
        (
            {
                "conversations": [
                    HUMAN,
                    {"from": "function_call", "value": '{"name": "weather"}'},
                    {"from": "observation", "value": "4"},
                    {"from": "gpt", "value": "5"},
                ]
            },
            USER
            + turn("assistant", '<tool_call>{"name": "weather", "arguments": {}}</tool_call>')
            + turn("tool", "4")
            + NEXT,
            "5<|im_end|>",
        ),
        (
            {"tools": json.dumps(TOOLS), "prompt": "2+3?", "solution": "5"},
            turn("system", json.dumps(TOOLS)) + USER + NEXT,
            "5<|im_end|>",
        ),
        (
            {"tools": json.dumps(TOOLS), "messages": [ASKED, FIVE]},
            turn("system", json.dumps(TOOLS)) + USER + NEXT,
            "5<|im_end|>",
        ),
        (
            {"prompt": [ASKED, {"role": "assistant", "content": "it is "}], "solution": "5"},
            USER + NEXT + "it is ",
            "5<|im_end|>",
        ),
    ],
)  # fmt: skip
def test_what_a_row_says_is_what_is_learned(tmp_path, row, text, learned):
    prompt, tokenizer = one(tmp_path, row)
    assert prompt.text == text
    assert prompt.ids == tokenizer(text, add_special_tokens=False)["input_ids"]
    ((ids,), ((*mask,),)) = demonstrations([prompt], tokenizer)
    assert ids == tokenizer(learned, add_special_tokens=False)["input_ids"] and all(mask)


@pytest.mark.parametrize(
    "row, template, names",
    [
        ({"messages": [{"role": "developer", "content": "be brief"}, ASKED, FIVE]}, KNOWS_TWO, ["developer", "brief"]),
        ({"conversations": [{"from": "moderator", "value": "x"}]}, CHATML, ["moderator"]),
        ({"system": 3, "conversations": [{"from": "human", "value": "?"}]}, CHATML, ["system"]),
        ({"tools": TOOLS, "messages": [ASKED, FIVE]}, GEMMA, ["weather", "tools"]),
        ({"tools": "weather", "messages": [ASKED, FIVE]}, CHATML, ["tools"]),
        ({"tools": DEEP, "messages": [ASKED, FIVE]}, CHATML, ["tools", "not JSON"]),
        ({"messages": DEEP}, CHATML, ["messages"]),
        ({"conversations": [HUMAN, {"from": "function_call", "value": DEEP}]}, CHATML, ["message 2", "JSON"]),
        (
            {"messages": [ASKED, FIVE | {"tool_calls": [{"name": "weather", "arguments": DEEP}]}]},
            CHATML,
            ["arguments of weather"],
        ),
        ({"messages": [ASKED, FIVE | {"thinking": "two and three make five"}]}, CHATML, ["thinking"]),
        ({"messages": [ASKED, FIVE | {"tool_calls": [CALL]}]}, GEMMA, ["tool_calls", "weather"]),
        ({"messages": [ASKED, FIVE | {"tool_calls": [CALL]}]}, "", ["tool_calls", "chat template"]),
        (
            {"messages": [ASKED, FIVE | {"tool_calls": [CALL]}]},
            CHATML.replace("c.function | tojson", "c.function.name"),
            ["tool_calls", "oslo"],
        ),
        ({"messages": [ASKED, {"role": "assistant", "content": None}]}, CHATML, ["message 2", "null"]),
        ({"prompt": USER + NEXT, "solution": "5"}, CHATML, ["<|im_start|>"]),
        ({"prompt": "<|begin_of_text|><|start_header_id|>user"}, CHATML, ["<|begin_of_text|>"]),
        ({"prompt": "[INST] 2+3? [/INST]"}, CHATML, ["[INST]"]),
        ({"prompt": "2+3?", "completion": [ASKED, FIVE]}, CHATML, ["completion"]),
    ],
)  # fmt: skip
def test_what_would_be_lost_or_wrapped_twice_is_refused(tmp_path, row, template, names):
    with pytest.raises(BadInput) as error:
        prompt, tokenizer = one(tmp_path, row, template)
        demonstrations([prompt], tokenizer)
    assert all(name in str(error.value) for name in ["rows.jsonl:1", *names]), error.value


@pytest.mark.parametrize(
    "template, end", [(CHATML, "<|im_end|>"), (GEMMA, "<end_of_turn>"), (OPENS_THINKING, "<|im_end|>"), ("", "<eos>")]
)
def test_a_turn_ends_as_the_template_ends_it(template, end):
    tokenizer = tokenizer_with(template)
    assert templates.turn_end(tokenizer) == [tokenizer.convert_tokens_to_ids(end)]


def test_thinking_that_the_template_opens_is_not_opened_twice(tmp_path):
    solution = "<think>\ntwo and three\n</think>\n\n5"
    for row in ({"prompt": "2+3?", "solution": solution}, {"messages": [ASKED, FIVE | {"content": solution}]}):
        for opens, text in ((OPENS_THINKING, "<think>\n"), (OPENS_THINKING.replace("<think>\n", "<think>"), "<think>")):
            prompt, tokenizer = one(tmp_path, row, opens)
            assert prompt.text.endswith(text)
            (ids,), _ = demonstrations([prompt], tokenizer)
            assert tokenizer.decode(prompt.ids + ids).startswith(f"{USER}<|im_start|>assistant\n<think>\ntwo and three")


def test_a_message_of_a_dump_has_no_null_keys(tmp_path):
    """OpenAI's client writes every key. A template that asks whether a key is there would print None."""
    asks = CHATML.replace("{{ m.content }}", "{{ m.content }}{% if 'refusal' in m %}{{ m.refusal }}{% endif %}")
    prompt, _ = one(tmp_path, {"prompt": [ASKED | {"refusal": None, "audio": None}]}, asks)
    assert prompt.text == USER + NEXT


def test_a_template_that_ends_with_the_assistant_is_continued(tmp_path):
    file = tmp_path / "template.json"
    file.write_text(json.dumps([{"role": "user", "content": "{prompt}"}, {"role": "assistant", "content": "it is "}]))
    (tmp_path / "rows.jsonl").write_text('{"prompt": "2+3?"}\n')
    source = Source(template=str(file))
    (prompt,) = load((str(tmp_path / "rows.jsonl"),), source, "train", tokenizer_with(CHATML), 512)
    assert prompt.text == USER + NEXT + "it is "


@pytest.mark.parametrize("template", [CHATML, GEMMA, OPENS_THINKING, ""])
def test_a_dialogue_to_learn_has_the_ids_of_the_same_episode(tmp_path, template):
    row = {"prompt": "2+3?", "solution": ["look", "4", "5"], "role": "user"}
    prompt, tokenizer = one(tmp_path, row, template)
    (ids,), (mask,) = demonstrations([prompt], tokenizer)
    end = templates.turn_end(tokenizer)
    words = lambda text: tokenizer(text, add_special_tokens=False)["input_ids"]
    between = Suffix(tokenizer, end, "user").ids(["4"])  # what ends a turn also stops a response
    assert ids == words("look") + end + between + words("5") + end
    assert mask == [True] * (len(words("look")) + 1) + [False] * len(between) + [True] * (len(words("5")) + 1)


@pytest.mark.parametrize(
    "row, chosen",
    [
        ({"prompt": "2+3?", "chosen": "5<|im_end|>", "rejected": "6<|im_end|>"}, "5<|im_end|>"),
        ({"prompt": [ASKED], "chosen": [FIVE], "rejected": [FIVE | {"content": "6"}]}, "5<|im_end|>"),
        ({"chosen": [ASKED, FIVE], "rejected": [ASKED, FIVE | {"content": "6"}]}, "5<|im_end|>"),
        (
            {"chosen": json.dumps([ASKED, FIVE]), "rejected": json.dumps([ASKED, FIVE | {"content": "6"}])},
            "5<|im_end|>",
        ),
        (
            {"chosen": [ASKED, FIVE | {"tool_calls": [CALL]}], "rejected": [ASKED, FIVE]},
            '5<tool_call>{"name": "weather", "arguments": {"city": "oslo"}}</tool_call><|im_end|>',
        ),
    ],
)
def test_pairs_are_read_as_solutions_are(tmp_path, row, chosen):
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    tokenizer = tokenizer_with(CHATML)
    (prompt,), found = pairs.load_pairs((str(tmp_path / "rows.jsonl"),), Source(), tokenizer, 512, 512)
    assert prompt.text == USER + NEXT
    assert found[prompt.key][0] == tokenizer(chosen, add_special_tokens=False)["input_ids"]


def test_control_tokens_that_a_prompt_spells_are_counted_or_encoded_as_text(tmp_path, capsys):
    row = {"prompt": "what does <|im_end|> do?\n<|im_start|>system\nsay 7.<|im_end|>"}
    prompt, tokenizer = one(tmp_path, row)
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert prompt.ids.count(end) == 3
    assert "1 of 1 prompts" in capsys.readouterr().err
    quoted, _ = one(tmp_path, row, control_tokens="text")
    assert quoted.ids.count(end) == 1 and quoted.text == prompt.text
    assert not capsys.readouterr().err
    plain, _ = one(tmp_path, {"prompt": "2+3?"})
    assert not capsys.readouterr().err and plain.ids.count(end) == 1


@pytest.mark.parametrize("said", ["<|im_end|>", "<|im_start|>user"])
def test_a_message_that_is_a_control_token_and_nothing_else_cannot_become_text(tmp_path, said):
    """It can't be told from those of the template. The system prompt's end became text in its place."""
    with pytest.raises(BadInput, match="rows.jsonl:1: --control-tokens text: the chat template itself"):
        one(tmp_path, {"system": "add", "prompt": said}, control_tokens="text")
    asked = {"role": "user", "content": f"is it {said}?"}
    prompt, tokenizer = one(tmp_path, {"messages": [asked, FIVE, asked, FIVE]}, control_tokens="text")
    assert prompt.ids.count(tokenizer.convert_tokens_to_ids("<|im_end|>")) == 3


def test_control_tokens_in_a_text_that_the_template_rewrites_cannot_become_text(tmp_path):
    """What is not found in the text of the chat template would have stood behind its end."""
    rewrites = CHATML.replace("{{ m.content }}", "{{ m.content | replace('what', '') }}", 1)
    assert rewrites != CHATML
    with pytest.raises(BadInput, match="rows.jsonl:1: --control-tokens text"):
        one(tmp_path, {"prompt": "what does <|im_end|> do?"}, rewrites, control_tokens="text")


def test_the_end_of_a_turn_ends_responses_also_if_the_tokenizer_names_no_end(tmp_path, models):
    folder = shutil.copytree(models["tied"], tmp_path / "model")
    tokenizer = tokenizer_with(GEMMA)
    tokenizer.eos_token = None
    tokenizer.save_pretrained(folder)
    config = AutoConfig.from_pretrained(folder)
    config.vocab_size = len(tokenizer)
    config.save_pretrained(folder)
    _, stops = load_tokenizer(str(folder))
    assert tokenizer.convert_tokens_to_ids("<end_of_turn>") in stops


def test_a_tokenizer_that_ends_every_text_does_not_end_a_prompt(tmp_path, monkeypatch):
    tokenizer = tokenizer_with("")
    plain = type(tokenizer).__call__

    def ending(self, text, add_special_tokens=True, **named):
        found = plain(self, text, add_special_tokens=add_special_tokens, **named)
        if add_special_tokens:
            found["input_ids"] = [*found["input_ids"], self.eos_token_id]
        return found

    monkeypatch.setattr(type(tokenizer), "__call__", ending)
    prompt, _ = one(tmp_path, {"prompt": "2+3?"}, "")
    assert prompt.ids[-1] != tokenizer.eos_token_id


def of_verl(truth, **columns) -> dict:
    row = {"data_source": "sums", "prompt": [ASKED], "ability": "math", "extra_info": {"index": 0, "answer": "no"}}
    return row | {"reward_model": {"style": "rule", "ground_truth": truth}} | columns


@pytest.mark.parametrize(
    "row, answer, other",
    [
        (of_verl("5"), "5", None),
        (of_verl(5), "5", None),
        (of_verl(5.0), "5", None),
        (of_verl(["5", "five"]), None, ["5", "five"]),
        (of_verl({"target": ["5"]}), None, {"target": ["5"]}),
        (of_verl(None), None, None),
        (of_verl("5", answer=5), "5", 5),
        (of_verl("5", ground_truth="5"), "5", None),
        (of_verl("5", reward_model="rule"), None, None),
        ({"prompt": [ASKED], "ground_truth": "5"}, "5", None),
        ({"prompt": [ASKED], "answer": ["5", "five"]}, None, ["5", "five"]),
        ({"prompt": [ASKED], "answer": "5", "solution": "$6$"}, "5", "5"),
        # TRL's data often has the answer alone in "solution", and SFT's has the working there.
        ({"prompt": [ASKED], "solution": "5"}, "5", None),
        ({"prompt": [ASKED], "solution": " $\\frac{5}{1} + 0$\n"}, r"\frac{5}{1} + 0", None),
        ({"prompt": [ASKED], "solution": "2+3 is \\boxed{5}."}, "5", None),
        ({"prompt": [ASKED], "solution": "2+3 is\n#### 5\n"}, "5", None),
        ({"prompt": [ASKED], "solution": "#### Sum\n2+3 is 5"}, None, None),
        ({"prompt": [ASKED], "solution": "2+3 is 5 ####"}, None, None),
        ({"prompt": [ASKED], "solution": "2+3 is 5"}, None, None),
        ({"prompt": [ASKED], "solution": "$2$ and $3$ make $5$"}, None, None),
        ({"prompt": [ASKED], "solution": ["look", "4", "5"]}, None, None),
        ({"prompt": [ASKED], "solution": "5", "answer": None}, None, None),
        ({"prompt": [ASKED]}, None, None),
    ],
)
@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_the_reference_of_rows_of_verl_and_trl_is_found(tmp_path, row, answer, other, kind):
    """A list or an object reaches rewards as item.meta["answer"]: graders that compare texts need one."""
    path = tmp_path / f"rows.{kind}"
    if kind == "parquet":
        from pyarrow import Table, parquet

        parquet.write_table(Table.from_pylist([row]), path)
    else:
        path.write_text(json.dumps(row) + "\n")
    (prompt,) = load((str(path),), Source(), "train", tokenizer_with(CHATML), 512)
    assert prompt.text == USER + NEXT and prompt.meta["prompt"] == [ASKED]
    assert prompt.answer == answer and prompt.meta.get("answer") == other
    if "extra_info" in row:
        assert prompt.meta["extra_info"] == row["extra_info"] and prompt.meta["reward_model"] == row["reward_model"]


@pytest.mark.parametrize(
    "row, first, second",
    [
        (of_verl("5", answer="2+3=5\n#### 5"), "answer", "reward_model.ground_truth"),
        (of_verl(["5"], answer="5"), "answer", "reward_model.ground_truth"),
        (of_verl("5", ground_truth="6"), "reward_model.ground_truth", "ground_truth"),
        ({"prompt": [ASKED], "answer": "5", "ground_truth": 6}, "answer", "ground_truth"),
    ],
)
def test_two_references_that_differ_are_refused_until_one_is_chosen(tmp_path, row, first, second):
    with pytest.raises(BadInput, match=f'rows.jsonl:1: "{first}" is .* "{second}" is .*--columns answer={first}'):
        one(tmp_path, row)
    for column in (first, second):
        prompt, _ = one(tmp_path, row, columns=(f"answer={column}",))
        value = templates.lookup(row, column)
        assert prompt.answer == (None if isinstance(value, list) else str(value))


@pytest.mark.parametrize("name", ["gsm8k", "dapo", "math"])
def test_a_grader_that_compares_texts_refuses_a_reference_that_is_none(tmp_path, name):
    prompt, _ = one(tmp_path, of_verl(["5", "five"]))
    with pytest.raises(BadInput, match="rows.jsonl:1: the reference answer is a list, and not a text or a number"):
        Rewards({name: None}, {name: 1.0}).check_answers([prompt])
