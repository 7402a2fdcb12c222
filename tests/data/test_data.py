"""Prompts: how rows become token ids, what happens to long ones, templates, and an order that can be resumed."""

import json
import shutil

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import Phi3Config, PhimoeConfig, PreTrainedTokenizerFast

from common.data import arithmetic, demonstrations, pairs, templates
from common.data.prompts import INSTRUCTIONS, Prompt, PromptLoader, Source, TrainSource, load_eval, parse, turns
from common.data.prompts import load as load_prompts
from common.data.rows import collect
from common.data.tokenizer import has_safetensors, load_tokenizer
from common.errors import BadInput, refuse_all
from common.preflight import checks

TOKENIZER = arithmetic.tokenizer()
CHAT = arithmetic.tokenizer()
CHAT.chat_template = "{% for m in messages %}({{ m.role }}){{ m.content }}{% endfor %}="


def load(dataset: str, split: str = "train", limit: int = 64, tokenizer=TOKENIZER, **source) -> list[Prompt]:
    return load_prompts((dataset,), Source(**source), split, tokenizer, limit)


def test_arithmetic_is_complete_and_held_out():
    train, test = (load("arithmetic", split) for split in ("train", "test"))
    assert len(train) + len(test) == 90 * 90 and len(test) == arithmetic.HELD_OUT
    assert not {p.text for p in train} & {p.text for p in test}
    for prompt in test:
        a, b = map(int, prompt.text.rstrip("=").split("+"))
        assert prompt.answer == str(a + b)
    assert arithmetic.solution(47, 38) == "7+8=15,4+3+1=8\n#### 85"
    assert arithmetic.solution(47, 38, with_carry=False) == "7+8=15,4+3=7\n#### 75"
    assert arithmetic.solution(92, 37) == "2+7=9,9+3=12\n#### 129"


def test_the_teacher_is_wrong_as_often_as_it_says():
    rows = arithmetic.problems("train")
    carries = [row for row in rows if sum(int(n) % 10 for n in row["question"][:-1].split("+")) >= 10]
    wrong = [row for row in rows if not row["solution"].endswith(f"#### {row['answer']}")]
    assert all(row in carries for row in wrong)
    assert abs(len(wrong) / len(carries) - arithmetic.FORGETS_CARRY) < 0.03


def test_tokenizer_round_trip():
    text = "47+38=7+8=15,4+3+1=8\n#### 85"
    assert TOKENIZER.decode(TOKENIZER(text)["input_ids"]) == text
    assert TOKENIZER.decode([*TOKENIZER(text)["input_ids"], TOKENIZER.eos_token_id], skip_special_tokens=True) == text


OVERLONG = ['{"question": "12345678", "answer": "1"}', '{"question": "1+1=", "answer": "2"}'] * 7


@pytest.fixture
def rows(tmp_path):
    """A function that writes lines to a file and returns its name."""

    def write(*lines: str, name: str = "rows.jsonl") -> str:
        (tmp_path / name).write_text("\n".join(lines) + "\n")
        return str(tmp_path / name)

    return write


def test_long_prompts_are_dropped_and_counted_never_cut(rows, capsys):
    path = rows(*OVERLONG)
    kept = load(path, limit=7)
    assert [prompt.text for prompt in kept] == ["1+1="] * 7
    assert capsys.readouterr().out == f"{path}: dropped 7 of 14 prompts over 7 tokens (--max-prompt-tokens)\n"
    with pytest.raises(BadInput, match="14 prompts .*--max-prompt-tokens 2"):
        load(path, limit=2)


def test_characters_that_the_model_never_sees_are_named(rows, capsys):
    """The embedded tokenizer has small letters. One of bytes has everything, and no one misses a space."""
    path = rows('{"prompt": "What is 1+1?"}', '{"prompt": "what is 1+1?"}', '{"prompt": "W\\u00e4 "}')
    load(path, limit=50)
    said = capsys.readouterr().err
    assert said.startswith("warning[characters-lost]") and "for W \u00e4, so 2 of 3 prompts" in said
    load(rows('{"prompt": "what is 1+1?"}'), limit=50)
    assert capsys.readouterr().err == ""


def test_a_character_that_becomes_the_unknown_token_is_lost_too(rows, capsys):
    letters = models.WordLevel({"<eos>": 0, "?": 1, "a": 2}, unk_token="?")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(letters), unk_token="?", eos_token="<eos>")
    load_prompts((rows('{"prompt": "a"}', '{"prompt": "\u00e4"}'),), Source(), "train", tokenizer, 50)
    assert "for \u00e4, so 1 of 2 prompts" in capsys.readouterr().err


@pytest.mark.parametrize("limit, kept", [(4, ["1+1="]), (7, ["1+1="]), (8, ["12345678", "1+1="])])
def test_a_prompt_of_exactly_the_limit_stays(rows, limit, kept):
    assert [prompt.text for prompt in load(rows(*OVERLONG[:2]), limit=limit)] == kept


def test_solutions_and_pairs_of_exactly_the_limit_stay(rows):
    """1+1= has four tokens. A response ends with an end token."""
    solved = rows('{"prompt": "1+1=", "solution": "2"}', '{"prompt": "1+1=", "solution": "two"}', name="solved.jsonl")
    prompts = load(solved)
    for limit, solutions, longest in ((6, ["2"], 6), (7, ["2"], 6), (8, ["2", "two"], 8)):
        fitting, tokens = demonstrations.that_fit(prompts, TOKENIZER, limit)
        assert [prompt.solution for prompt in fitting] == solutions and tokens == longest
    paired = rows('{"prompt": "1+1=", "chosen": "2", "rejected": "10"}', name="paired.jsonl")
    usable, responses = pairs.load_pairs((paired,), Source(), TOKENIZER, 4, 3)
    assert [[len(ids) for ids in responses[prompt.key]] for prompt in usable] == [[2, 3]]
    with pytest.raises(BadInput, match="--max-response-tokens 2"):
        pairs.load_pairs((paired,), Source(), TOKENIZER, 4, 2)


def test_raw_gsm8k(tmp_path, rows):
    path = rows('{"question": "How many?", "answer": "9*2 = <<9*2=18>>18\\n#### 1,018"}', name="train.jsonl")
    (prompt,) = load(f"gsm8k:{tmp_path}", limit=500)
    assert prompt.answer == "1,018" and prompt.solution == "9*2 = 18\n#### 1,018"
    assert prompt.text == "How many?" + INSTRUCTIONS["gsm8k"] and prompt.id == f"{path}:1"
    assert prompt.meta["prompt"] == "How many?"
    (prompt,) = load(f"gsm8k:{tmp_path}", limit=500, template=rows("q: {prompt} a:", name="shot.txt"))
    assert prompt.text == "q: How many? a:"  # instead of the instruction
    rows('{"question": "How many?", "answer": "18"}', name="train.jsonl")
    with pytest.raises(BadInput, match='train.jsonl:1: .*"####".*"answer"'):
        load(f"gsm8k:{tmp_path}", limit=500)


def bytes_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer with one token a byte, which writes a BOS in front of each text."""
    vocabulary = {token: i for i, token in enumerate(["<bos>", *sorted(pre_tokenizers.ByteLevel.alphabet())])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 0)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<bos>")


def test_one_bos_whoever_writes_it():
    tokenizer = bytes_tokenizer()
    assert templates.tokenize("here", templates.render("here", "1+1", tokenizer), tokenizer).count(0) == 1
    tokenizer.chat_template = "<bos>{% for m in messages %}{{ m.content }}{% endfor %}="
    text = templates.render("here", "1+1", tokenizer)
    ids = templates.tokenize("here", text, tokenizer)
    assert text == "<bos>1+1=" and ids.count(0) == 1 and ids[0] == 0


def test_rows_that_are_refused_alike_are_one_line_and_all_are_counted():
    """Errors name their row, a place in it, or no row at all."""

    def make(where: str, number: int) -> None:
        kinds = {
            0: f"{where}: no answer",
            1: f"{where}, message 2: no text",
            2: "--model m: has no chat template",
            3: "it went wrong",
        }
        raise BadInput(kinds.get(number, f"{where}: number {number}"))

    rows = [(f"d:{i}", i % 4 if i < 16 else i // 4) for i in range(60)]
    with pytest.raises(BadInput) as refused:
        collect(rows, make)
    assert str(refused.value).splitlines() == [
        "d:0, d:4, d:8 and 1 more: no answer",
        "d:1, message 2, d:5, message 2, d:9, message 2 and 1 more: no text",
        "--model m: has no chat template",
        "it went wrong",
        "d:16, d:17, d:18 and 1 more: number 4",
        "... and 40 more, which say 10 other things",
    ]
    with pytest.raises(BadInput, match="\\.\\.\\. and 2 more$"):
        refuse_all([(f"d:{i}", f"wrong {i}") for i in range(7)])
    refuse_all([])


def test_two_bos_are_refused(rows):
    """The tokenizer writes one and the prompt has one; or the chat template writes one and --template has one."""
    tokenizer = bytes_tokenizer()
    path = rows('{"question": "1+1", "answer": 2}', '{"question": "<bos>1+2", "answer": 3}')
    with pytest.raises(BadInput, match="rows.jsonl:2: .*<bos>.* tokenizer of --model") as said:
        load(path, tokenizer=tokenizer)
    assert said.value.code == "double-bos"
    tokenizer.chat_template = "<bos>{% for m in messages %}{{ m.content }}{% endfor %}="
    with pytest.raises(BadInput, match="rows.jsonl:1: .*<bos>.* chat template of --model") as said:
        load(path, tokenizer=tokenizer, template=rows("<bos>{prompt}", name="text.txt"))
    assert said.value.code == "double-bos"
    prompt = load(path, tokenizer=tokenizer, template=rows("q<bos>{prompt}", name="text.txt"))[0]
    assert prompt.ids.count(0) == 2  # a BOS in any other place is what the user wants


def test_what_the_chat_template_refuses_is_named(rows):
    strict = arithmetic.tokenizer()
    strict.chat_template = "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}="
    path = rows('{"prompt": [{"role": "system", "content": "1"}], "answer": 2}')
    with pytest.raises(BadInput, match="rows.jsonl:1: .*no system role$"):
        load(path, tokenizer=strict)


def test_templates(rows):
    """A system prompt and an example for a chat model, text around the prompt for any model. Braces are text."""
    example = [{"role": "user", "content": "2+2"}, {"role": "assistant", "content": "4"}]
    chat = [{"role": "system", "content": "{x}"}, *example, {"role": "user", "content": "{prompt}?"}]
    path = rows('{"question": "1+{1}", "answer": "2"}')
    chat, text = rows(json.dumps(chat), name="chat.json"), rows("\ufeffq: {prompt} {}", "a:", name="text.txt")
    (prompt,) = load(path, tokenizer=CHAT, template=chat)
    assert prompt.text == "(system){x}(user)2+2(assistant)4(user)1+{1}?=" and prompt.meta["prompt"] == "1+{1}"
    (prompt,) = load(path, template=text)
    assert prompt.text == "q: 1+{1} {}\na:"  # the file ends with a line end, the prompt does not
    (prompt,) = load(path, tokenizer=CHAT, template=text)
    assert prompt.text == "(user)q: 1+{1} {}\na:="
    (single,) = load(rows('{"prompt": [{"role": "user", "content": "1+{1}"}], "answer": 2}'), template=text)
    assert single.text == "q: 1+{1} {}\na:"


def test_the_order_of_a_single_data_set_is_pinned():
    """Published results depend on it."""
    loader = PromptLoader(load("arithmetic"), seed=0)
    places = [int(prompt.id.partition(":")[2]) for prompt in loader.take(7845)]
    assert places[:5] == [6729, 4719, 7704, 7394, 6383]
    assert places[-2:] == [2807, 1791]  # the last prompt of epoch 0 and the first of epoch 1


def test_a_data_set_is_shuffled_once_an_epoch(monkeypatch):
    """A million rows take a second, and dynamic sampling draws several times in a step."""
    loader, calls = PromptLoader(load("arithmetic"), seed=0), []
    order = loader.order
    monkeypatch.setattr(loader, "order", lambda *of: calls.append(of) or order(*of))
    for _ in range(3):
        loader.take(3000)
    assert calls == [(0, 0), (0, 1)]


def mixture(rows, weights: dict[str, str], size: int = 10) -> list[Prompt]:
    """Prompts "a0" ... "a9", "b0" ... of as many files as there are weights."""
    files = {
        name: rows(*(f'{{"prompt": "{name}{i}", "answer": 1}}' for i in range(size)), name=f"{name}.jsonl")
        for name in weights
    }
    return load_prompts(tuple(files[name] + weight for name, weight in weights.items()), Source(), "", TOKENIZER, 9)


@pytest.mark.parametrize(
    "weights, counts",
    [
        ({"a": "=3", "b": "=1"}, {"a": 750, "b": 250}),
        ({"a": "=0.7", "b": "=.2", "c": "=1e-1"}, {"a": 700, "b": 200, "c": 100}),
        ({"a": "", "b": ""}, {"a": 500, "b": 500}),
        ({"a": "=3.14159", "b": "=2.71828"}, {"a": 536, "b": 464}),
        ({"a": "=1", "b": "=1e-12"}, {"a": 999, "b": 1}),
    ],
)
def test_a_mixture_has_its_proportions_everywhere(rows, weights, counts):
    drawn = [prompt.text[0] for prompt in PromptLoader(mixture(rows, weights), seed=1).take(1001)]
    assert set(drawn) == set(counts)
    for name, count in counts.items():
        assert abs(drawn.count(name) - count) <= 1
        for end in range(0, 1000, 50):  # evenly spread, not in blocks
            assert abs(drawn[:end].count(name) - count * end / 1000) <= 1.1


def test_the_files_of_a_folder_are_one_data_set():
    """Each row comes once an epoch, however many rows its file has."""
    places = ["a.jsonl:1", "a.jsonl:2", "a.jsonl:3", "b.jsonl:1"]
    loader = PromptLoader([Prompt(place, place, [1], "", dataset="folder") for place in places], seed=0)
    for _ in range(3):
        assert sorted(prompt.id for prompt in loader.take(4)) == places


def test_the_turns_of_a_mixture_are_pinned():
    """A run goes on with a mixture from its position alone, also with a later version."""
    assert turns([2.0, 1.0]) == [0, 1, 0] and turns([3.0, 1.0]) == [0, 0, 1, 0]
    assert turns([1.0, 1.0, 3.0]) == [2, 0, 1, 2, 2]


def test_each_data_set_of_a_mixture_is_walked_in_epochs(rows):
    drawn = [prompt.text for prompt in PromptLoader(mixture(rows, {"a": "=3", "b": "=1"}), seed=1).take(80)]
    for name, epochs in (("a", 6), ("b", 2)):
        own = [text for text in drawn if text[0] == name]
        orders = [own[10 * epoch : 10 * epoch + 10] for epoch in range(epochs)]
        assert all(len(set(order)) == 10 for order in orders) and orders[0] != orders[1]
    assert [t[1] for t in drawn if t[0] == "b"][:10] != [t[1] for t in drawn if t[0] == "a"][:10]  # the orders differ


def test_a_mixture_resumes_from_its_position_alone(rows):
    prompts = mixture(rows, {"a": "=0.61", "b": "=0.3", "c": "=0.09"})
    whole = PromptLoader(prompts, seed=1).take(400)
    stepwise = PromptLoader(prompts, seed=1)
    assert stepwise.take(7) + stepwise.take(5) + stepwise.take(388) == whole
    for position in (0, 7, 12, 100, 395):
        resumed = PromptLoader(prompts, seed=1)
        resumed.position = position
        assert resumed.take(5) == whole[position : position + 5]
    assert PromptLoader(prompts, seed=2).take(20) != whole[:20]


CHANGES = {  # of the second of two rows
    "nothing": {},
    "an answer": {"answer": "5"},
    "no answer": {"answer": None},
    "a prompt": {"prompt": "2+3="},
}


@pytest.mark.parametrize("change", CHANGES)
def test_data_that_has_changed_has_another_fingerprint(rows, change):
    """A run that is resumed would otherwise go on with other data, and nobody would notice."""

    def fingerprint(name: str, *content: dict, also=None) -> str:
        return PromptLoader(load(rows(*map(json.dumps, content), name=name)), 0, also).fingerprint()

    first, second = {"prompt": "1+1=", "answer": "2"}, {"prompt": "2+2=", "answer": "4"}
    changed = {name: value for name, value in {**second, **CHANGES[change]}.items() if value is not None}
    before, after = fingerprint("a.jsonl", first, second), fingerprint("b.jsonl", first, changed)
    assert (before == after) == (change == "nothing"), "the name of the file alone is no change"
    assert fingerprint("b.jsonl", second, first) != before, "the order decides which prompts a step takes"
    assert fingerprint("b.jsonl", first, second, also=[[5, 1]]) != fingerprint("b.jsonl", first, second, also=[[6, 1]])


def test_a_weight_is_what_follows_the_last_equals_sign():
    assert parse(("gsm8k=2", "runs/lr=0.1/a.jsonl", "runs/lr=0.1/b.jsonl=.5")) == {
        "gsm8k": 2.0,
        "runs/lr=0.1/a.jsonl": 1.0,
        "runs/lr=0.1/b.jsonl": 0.5,
    }


def test_held_out_prompts(tmp_path, rows):
    """They come from --eval-dataset, or in equal shares from the test splits; never more than --eval-prompts."""
    for split, letter in (("train", "t"), ("test", "e")):
        rows(*[json.dumps({"question": letter, "answer": "#### 1"})] * 20, name=f"{split}.jsonl")
    dataset, other = ("arithmetic=3", f"gsm8k:{tmp_path}", rows(OVERLONG[1])), rows(*[OVERLONG[1]] * 30, name="o.jsonl")

    def held_out(dataset, **source) -> list[str]:
        prompts = load_eval(dataset, TrainSource(**source), TOKENIZER, 200)
        return [prompt.id.rpartition("/")[2].partition(":")[0] for prompt in prompts]

    assert held_out(dataset, eval_prompts=9) == ["test"] * 5 + ["test.jsonl"] * 4
    assert len(held_out(("arithmetic",))) == 256 and held_out(dataset, eval_prompts=0) == []
    assert held_out(dataset, eval_dataset="absent.jsonl", eval_prompts=0) == []  # not even read
    whole = load("arithmetic", "test")
    assert load_eval(("arithmetic",), TrainSource(eval_prompts=9), TOKENIZER, 200) == whole[:9]
    assert held_out(dataset[2:]) == [] and held_out(dataset, eval_dataset=other, eval_prompts=12) == ["o.jsonl"] * 12
    with pytest.raises(
        BadInput,
        match='--eval-dataset "arithmatic": .*arithmetic, ',
    ):
        held_out(dataset, eval_dataset="arithmatic")
    # Several of them have equal shares, in the order in which they are named.
    several = {"eval_dataset": (other, "arithmetic")}
    assert held_out(dataset, eval_prompts=9, **several) == ["o.jsonl"] * 5 + ["test"] * 4
    assert held_out(dataset, eval_prompts=100, **several) == ["o.jsonl"] * 30 + ["test"] * 50
    more = {"eval_dataset": (other, *(rows(*[OVERLONG[1]] * 9, name=f"{n}.jsonl") for n in range(4)))}
    assert held_out(dataset, eval_prompts=6, **more) == ["o.jsonl"] * 2 + [f"{n}.jsonl" for n in range(4)]
    with pytest.raises(BadInput, match="--eval-prompts 4: --eval-dataset has 5 data sets"):
        held_out(dataset, eval_prompts=4, **more)
    with pytest.raises(BadInput, match='--eval-dataset: "arithmetic" is named twice'):
        held_out(dataset, eval_dataset=("arithmetic", "arithmetic"))


def test_the_embedded_tokenizer_survives_saving(tmp_path):
    """AutoTokenizer makes a Qwen2 tokenizer of the folder. Spaces and newlines must not vanish."""
    arithmetic.config().save_pretrained(tmp_path)
    made = arithmetic.tokenizer()
    made.save_pretrained(tmp_path)
    loaded, stop_token_ids = load_tokenizer(str(tmp_path))
    assert stop_token_ids == [1]
    text = arithmetic.solution(47, 38) + " and 1 + 1 = 2?\n\n"
    assert made(text)["input_ids"] == loaded(text)["input_ids"] and len(made(text)["input_ids"]) == len(text)
    assert made.decode(made(text)["input_ids"]) == loaded.decode(made(text)["input_ids"]) == text


def test_the_folder_of_a_run_names_its_last_model(tmp_path):
    for folder in ("step_000009/model", "step_000010/model", "step_000020.unfinished/model"):
        (tmp_path / "checkpoints" / folder).mkdir(parents=True)
    last = tmp_path / "checkpoints/step_000010/model"
    for folder in (tmp_path, last.parent):
        with pytest.raises(BadInput, match=f"{folder}: the folder has no config.json; its last model is {last}"):
            load_tokenizer(str(folder))


def test_every_end_token_ends_a_response(tmp_path):
    """Tokenizer, config.json and generation_config.json may name different ones."""
    arithmetic.tokenizer().save_pretrained(tmp_path)
    config = arithmetic.config()
    config.eos_token_id = [7, 5]
    config.save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 9}')
    assert load_tokenizer(str(tmp_path))[1] == [1, 5, 7, 9]


def test_prompt_and_response_must_fit_the_model(models):
    prompts = [Prompt("x", "", [1] * 6, "")]
    assert checks.total_tokens(models["untied"], prompts, 250) == 256  # the positions of the model
    with pytest.raises(BadInput, match="--max-response-tokens 251: .*257"):
        checks.total_tokens(models["untied"], prompts, 251)


def test_positions_of_longrope(models, tmp_path):
    """All of them, but for a family whose rotary layers choose their frequencies in each forward, in their own way."""
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 8, "long_factor": [4.0] * 8}
    rope |= {"short_mscale": 1.0, "long_mscale": 1.0}
    sizes = {"max_position_embeddings": 256, "original_max_position_embeddings": 64, "hidden_size": 64}
    for family in (Phi3Config, PhimoeConfig):
        config = family(num_attention_heads=4, rope_parameters=rope, **sizes)
        config.save_pretrained(tmp_path / config.model_type)
    assert (checks.positions_of(str(tmp_path / "phi3")), checks.positions_of(models["untied"])) == (256, 256)
    tmp_path = tmp_path / "phimoe"
    assert checks.positions_of(str(tmp_path)) == 64
    prompts = [Prompt("x", "", [1] * 6, "")]
    assert checks.total_tokens(str(tmp_path), prompts, 100, trains=False) == 106  # an engine alone uses all positions
    with pytest.raises(BadInput, match=r"106.* --model .*64 .*longrope.* 256"):
        checks.total_tokens(str(tmp_path), prompts, 100)


def test_pickled_weights_are_refused_unless_safetensors_are_there_too(models, tmp_path):
    shutil.copytree(models["untied"], tmp_path / "model")
    (tmp_path / "model/pytorch_model.bin").write_bytes(b"cos\nsystem\n.")
    assert load_tokenizer(str(tmp_path / "model"))[1] == [1] and has_safetensors(str(tmp_path / "model"))
    (tmp_path / "model/model.safetensors").unlink()
    assert not has_safetensors(str(tmp_path / "model")) and has_safetensors("owner/name")
    with pytest.raises(BadInput, match="--model .*pytorch_model.bin") as error:
        load_tokenizer(str(tmp_path / "model"))
    assert error.value.code == "pickle-refused" and "\n" not in str(error.value)
