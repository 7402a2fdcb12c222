"""Reward models: what they read, and that neither padding nor neighbours change a score."""

import json
import math
import shutil

import pytest
import torch
from conftest import ROOT, launch
from helpers import load
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForSequenceClassification, BertConfig

from common import rewards
from common.data import arithmetic as embedded
from common.data.prompts import Prompt
from common.errors import BadInput, RunFailed
from common.rewards import Item
from common.rewards.model import RewardModel, RewardModelOnCPU, conversation, load_on_cpu


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    """A sequence classifier of the embedded architecture with random weights."""
    folder = tmp_path_factory.mktemp("reward-model")
    config = embedded.config()
    config.num_labels = 1
    torch.manual_seed(0)
    AutoModelForSequenceClassification.from_config(config, dtype=torch.float32).save_pretrained(folder)
    embedded.tokenizer().save_pretrained(folder)
    return str(folder)


ITEMS = [Item(f"{a}+{b}=", embedded.solution(a, b), str(a + b)) for a, b in ((11, 22), (47, 38), (99, 99), (10, 10))]


def score(model, items, truncated=False) -> list[float]:
    return [result.score for result in model(items, [0] * len(items), [truncated] * len(items))]


def test_a_score_is_the_classifiers_own_logit(folder):
    model = rewards.load_one(f"model:{folder}")
    ids = conversation(model.tokenizer, ITEMS[1].prompt, ITEMS[1].response, ended=True)
    reference = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    expected = reference(torch.tensor([ids])).logits.item()
    assert score(model, [ITEMS[1]]) == pytest.approx([expected], abs=1e-5)


def test_neighbours_and_order_change_nothing(folder, monkeypatch):
    model = RewardModel(folder)
    together = score(model, ITEMS)
    assert together == pytest.approx([score(model, [item])[0] for item in ITEMS], abs=1e-5)
    assert score(model, ITEMS[::-1]) == pytest.approx(together[::-1], abs=1e-5)
    monkeypatch.setattr("common.rewards.model.MAX_BATCH_TOKENS", 1)  # one at a time
    assert score(model, ITEMS) == pytest.approx(together, abs=1e-5)


def test_the_end_token_belongs_to_what_ended(folder):
    model = RewardModel(folder)
    eos = model.tokenizer.eos_token_id
    whole, cut = (conversation(model.tokenizer, "1+1=", "2", ended) for ended in (True, False))
    assert whole == [*cut, eos] and score(model, ITEMS, truncated=True) != score(model, ITEMS)


def test_the_raw_prompt_goes_through_the_reward_models_own_template(folder):
    model = RewardModel(folder)
    model.tokenizer.chat_template = "{% for m in messages %}{{ m['role'] + ' ' + m['content'] + '\n' }}{% endfor %}"
    ids = conversation(model.tokenizer, "1+1=", "2", ended=True)
    assert model.tokenizer.decode(ids) == "user 1+1=\nassistant 2\n"
    asked = Item("<policy's template>1+1=", "2", "2", meta={"question": "1+1="})
    assert score(model, [asked]) == score(model, [Item("1+1=", "2", "2")])


def test_a_worker_on_the_cpu_reads_the_date_of_the_run_too(folder, tmp_path):
    dated = str(shutil.copytree(folder, tmp_path / "dated"))
    tokenizer = embedded.tokenizer()
    tokenizer.chat_template = "{{ strftime_now('%d') }}{% for m in messages %}{{ m['content'] }}{% endfor %}"
    tokenizer.save_pretrained(dated)
    found = []
    for day in ("2026-05-01", "2026-05-12"):
        ((given, *_),) = load_on_cpu(dated, day).answer([[vars(ITEMS[0])], [9], [False]])
        assert [given] == pytest.approx(score(RewardModel(dated, date=day), ITEMS[:1]), abs=1e-6)
        found.append(given)
    assert abs(found[0] - found[1]) > 1e-4


def test_a_template_that_refuses_a_conversation_is_an_error_in_one_line(folder):
    model = RewardModel(folder)
    model.tokenizer.chat_template = "{{ raise_exception('System role not supported') }}"
    with pytest.raises(BadInput, match="system, assistant: System role not supported"):
        conversation(model.tokenizer, [{"role": "system", "content": "1+1="}], "2", ended=True)


@pytest.mark.parametrize("make", [RewardModel, RewardModelOnCPU])
def test_prompts_that_a_template_refuses_are_found_before_the_run(folder, tmp_path, make):
    """With model-sharded, the rank that has such a prompt would leave the others waiting."""
    strict = shutil.copytree(folder, tmp_path / "strict")
    refuses = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    (strict / "chat_template.jinja").write_text(refuses + "{% for m in messages %}{{ m.content }}{% endfor %}")
    model = make(str(strict))
    system, user = ({"role": role, "content": "1+1="} for role in ("system", "user"))
    prompt = lambda content: Prompt("rows:1", "1+1=", [1], None, None, {"prompt": content})
    assert model.fault_of(prompt("1+1=")) == model.fault_of(prompt([user])) == ""
    assert "system, user, assistant: no system" in model.fault_of(prompt([system, user]))


def test_correctness_is_the_graders(folder):
    model = RewardModel(folder)
    right, wrong = ITEMS[0], Item("11+22=", "#### 34", "33")
    assert [result.acc for result in model([right, wrong], [0, 0], [False, False])] == [1.0, 0.0]


def test_what_is_not_a_reward_model_is_refused(folder, models, tmp_path):
    with pytest.raises(BadInput, match="--reward"):
        rewards.load_one("model:/nowhere")
    two = AutoModelForSequenceClassification.from_config(embedded.config(), dtype=torch.float32)  # two outputs
    two.save_pretrained(tmp_path)
    embedded.tokenizer().save_pretrained(tmp_path)
    with pytest.raises(BadInput, match="--reward .* 2 outputs"):
        rewards.load_one(f"model:{tmp_path}")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "id2label": {"0": "x"}, "label2id": {"x": 0}}))
    policy = AutoModelForSequenceClassification.from_pretrained(folder)
    policy.model.save_pretrained(tmp_path)  # a body without a head
    with pytest.raises(BadInput, match="--reward .*score.weight"):
        score(rewards.load_one(f"model:{tmp_path}"), ITEMS)
    torch.save(policy.state_dict(), tmp_path / "pytorch_model.bin")
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(BadInput, match="--reward .*pytorch_model.bin") as error:
        rewards.load_one(f"model-cpu:{tmp_path}")
    assert error.value.code == "pickle-refused"
    small = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8}
    BertConfig(**small, num_labels=1).save_pretrained(tmp_path / "bert")
    embedded.tokenizer().save_pretrained(tmp_path / "bert")
    with pytest.raises(BadInput, match="--reward .*bert .*score"):
        rewards.load_one(f"model:{tmp_path / 'bert'}")
    model = RewardModel(folder)
    with pytest.raises(BadInput, match="--reward .*256 positions"):
        score(model, [Item("1+1=", "1" * 300, "2")])


FAULTS = [  # change to the tensors of a reward model, what the refusal names
    (lambda tensors: tensors.pop("model.norm.weight"), "model.norm.weight"),
    (lambda tensors: tensors.pop("score.weight"), "score.weight"),
    (lambda tensors: tensors.update({"lm_head.weight": torch.zeros(51, 128)}), "lm_head.weight"),
    (lambda tensors: tensors.update({"model.norm.bias": torch.zeros(128)}), "model.norm.bias"),
    (lambda tensors: tensors.update({"score.weight": torch.zeros(2, 128)}), r"score.weight is \(2, 128\)"),
    (lambda tensors: tensors.update({"model.norm.weight": torch.zeros(7)}), r"model.norm.weight is \(7,\)"),
    (lambda tensors: tensors.update({"score.weight": tensors["score.weight"].to(torch.int8)}), "score.weight is I8"),
]


@pytest.mark.parametrize("change, named", FAULTS, ids=[named for _, named in FAULTS])
@pytest.mark.parametrize("kind", ["model", "model-cpu", "model-sharded"])
def test_weights_that_are_not_those_of_the_model_are_refused_before_the_run(folder, tmp_path, kind, change, named):
    """transformers would start the missing ones at random, and leave the others out."""
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    tensors = load_file(copy / "model.safetensors")
    change(tensors)
    save_file(tensors, copy / "model.safetensors", {"format": "pt"})
    with pytest.raises(BadInput, match=f"--reward model:.*{named}"):
        rewards.load_one(f"{kind}:{copy}")


@pytest.mark.parametrize("template", [None, "{% for m in messages %}{{ m.role }} {{ m.content }}\n{% endfor %}"])
def test_a_response_that_the_prompt_begins_is_one_message(template):
    tokenizer = embedded.tokenizer()
    tokenizer.chat_template = template
    asked = {"role": "user", "content": "1+1="}
    begun = [asked, {"role": "assistant", "content": "1+"}]
    assert conversation(tokenizer, begun, "1", True) == conversation(tokenizer, [asked], "1+1", True)
    assert begun[1]["content"] == "1+"


def test_a_template_that_shows_parts_alone_gets_parts():
    tokenizer = embedded.tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}{% for part in m.content %}{{ part.text }}{% endfor %},{% endfor %}"
    )
    assert tokenizer.decode(conversation(tokenizer, "1+1=", "2", True)) == "1+1=,2,"


def test_pairs_are_right_against_wrong():
    rows = load("scripts/train_reward_model.py").arithmetic_pairs()
    assert len(rows) == 4 * (8100 - embedded.HELD_OUT)
    for row in rows[:300]:
        a, b = map(int, row["prompt"].rstrip("=").split("+"))
        assert row["chosen"] == embedded.solution(a, b) != row["rejected"]
    assert sum(rewards.grade_gsm8k(row["rejected"], str(eval(row["prompt"][:-1]))) for row in rows) / len(rows) < 0.25


def test_pairs_may_be_conversations(tmp_path):
    """As algos/dpo.py reads them: the messages before the response are the prompt."""
    load_pairs, file = load("scripts/train_reward_model.py").load_pairs, tmp_path / "pairs.jsonl"
    asked, said = {"role": "user", "content": "1+1="}, lambda text: {"role": "assistant", "content": text}
    file.write_text(json.dumps({"chosen": [asked, said("2")], "rejected": [asked, said("3")]}))
    tokenizer = embedded.tokenizer()
    assert load_pairs(str(file), tokenizer) == [{"prompt": [asked], "chosen": "2", "rejected": "3"}]
    file.write_text(json.dumps({"prompt": "1+1=", "chosen": {"text": "2"}, "rejected": "3"}))
    with pytest.raises(BadInput, match='pairs.jsonl:1: "chosen" '):
        load_pairs(str(file), tokenizer)


FITS = [  # prompt, chosen, rejected, limit, whether the pair is kept; a token a character, and the end token
    ("1+1=", "2", "3", 6, True),
    ("1+1=", "2", "3", 5, False),
    ("1+1=", "22", "3", 6, False),
    ("1+1=", "2", "33", 6, False),
    ("1+1=", "22", "33", 7, True),
]


@pytest.mark.parametrize("prompt, chosen, rejected, limit, kept", FITS)
def test_pairs_over_the_limit_are_left_out_and_counted(prompt, chosen, rejected, limit, kept, capsys):
    short = {"prompt": "1", "chosen": "2", "rejected": "3"}
    pair = {"prompt": prompt, "chosen": chosen, "rejected": rejected}
    fitting = load("scripts/train_reward_model.py").that_fit([pair, short], embedded.tokenizer(), limit)
    assert fitting == ([pair, short] if kept else [short])
    said = f"left out 1 of 2 pairs with more than {limit} tokens"
    assert (said in "".join(capsys.readouterr())) != kept


def test_without_any_pair_that_fits_there_is_nothing_to_train():
    pair = {"prompt": "1+1=", "chosen": "2", "rejected": "3"}
    with pytest.raises(BadInput, match="all 1 pairs have more than 5 tokens"):
        load("scripts/train_reward_model.py").that_fit([pair], embedded.tokenizer(), 5)


@pytest.mark.parametrize("given, limit", [(0, None), (5, 5), (10**6, None)])
def test_the_limit_is_the_flags_or_the_models_positions(given, limit, models, tmp_path):
    """A token is added to each conversation, and needs a position, too."""
    script = load("scripts/train_reward_model.py")
    limit = limit or AutoConfig.from_pretrained(models["untied"]).max_position_embeddings - 1
    response = "1" * (limit - 1)  # with prompt and end token one more than the limit
    file = tmp_path / "pairs.jsonl"
    file.write_text(json.dumps({"prompt": "1", "chosen": response, "rejected": "2"}) + "\n")
    with pytest.raises(BadInput, match=f"all 1 pairs have more than {limit} tokens"):
        script.main(script.Args(model=models["untied"], dataset=str(file), max_tokens=given))
    file.write_text(json.dumps({"prompt": "1", "chosen": response[1:], "rejected": "2"}) + "\n")
    with pytest.raises(BadInput, match="leaves fewer than one --batch-size"):
        script.main(script.Args(model=models["untied"], dataset=str(file), max_tokens=given))


def test_held_out_pairs_are_measured_and_not_trained_on(models, world, tmp_path, monkeypatch, capsys):
    script = load("scripts/train_reward_model.py")
    file = tmp_path / "pairs.jsonl"
    file.write_text("".join(json.dumps({"prompt": f"{i}", "chosen": "aa", "rejected": "bb"}) + "\n" for i in range(24)))
    trained, measured = set(), set()
    load_model, conversation = script.model.load, script.conversation

    def loaded(*given, **named):
        trained.clear()  # until here, lengths have been looked at
        return load_model(*given, **named)

    def noted(tokenizer, prompt, *given, **named):
        (trained if torch.is_grad_enabled() else measured).add(prompt)
        return conversation(tokenizer, prompt, *given, **named)

    monkeypatch.setattr(script.model, "load", loaded)
    monkeypatch.setattr(script, "conversation", noted)
    monkeypatch.setattr(script.placement, "init", lambda seed: world)
    monkeypatch.setattr(script.placement, "finish", lambda world: None)
    sizes = {"steps": 12, "batch_size": 8, "held_out": 8, "pairs_per_forward": 3}
    script.main(script.Args(models["tied and grouped"], str(file), output=str(tmp_path / "out"), **sizes))
    assert len(measured) == 8 and len(trained) == 16 and not trained & measured
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["held_out"] == 8


def test_a_gradient_that_is_not_finite_ends_the_training_of_a_reward_model(models, world, tmp_path, monkeypatch):
    """Before the update, and before anything is written."""
    script = load("scripts/train_reward_model.py")
    monkeypatch.setattr(script, "pair_loss", lambda chosen, rejected, count: (chosen - rejected).sum() * math.inf)
    monkeypatch.setattr(script.placement, "init", lambda seed: world)
    with pytest.raises(RunFailed, match="step 1: the gradient's norm is nan") as failed:
        script.main(script.Args(models["untied"], output=str(tmp_path / "out"), steps=2, batch_size=4))
    assert failed.value.code == "non-finite" and not (tmp_path / "out").exists()


def test_a_reward_model_that_could_not_be_written_is_not_trained(models, tmp_path):
    script = load("scripts/train_reward_model.py")
    (tmp_path / "out").touch()
    with pytest.raises(BadInput, match="--output .*is a file"):
        script.main(script.Args(models["untied"], output=str(tmp_path / "out")))


def test_no_prompt_of_a_held_out_pair_is_trained_on():
    """The embedded pairs have four rows for each prompt, with the same chosen response."""
    script = load("scripts/train_reward_model.py")
    pairs = script.arithmetic_pairs()
    train, held_out = script.split(pairs, 254, seed=0)
    assert len(held_out) == 256 and len(train) == len(pairs) - 256
    assert not {pair["prompt"] for pair in train} & {pair["prompt"] for pair in held_out}
    assert script.split(pairs, 254, seed=1)[1] != held_out
    # Prompts may be messages.
    asked = [{"role": "user", "content": "1+1="}]
    rows = [{"prompt": asked, "chosen": "2", "rejected": wrong} for wrong in "34"]
    assert script.split(rows, 1, seed=0) == ([], rows)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_training_ranks_pairs(models, tmp_path, ranks):
    """From random weights, 40 steps: most pairs of JSONL are ranked right, and the folder is a reward model."""
    data = tmp_path / "pairs.jsonl"
    data.write_text(
        "".join(json.dumps({"prompt": f"{i % 7}", "chosen": "aa", "rejected": "bb"}) + "\n" for i in range(64))
    )
    out = tmp_path / "out"
    flags = ["--model", models["untied"], "--dataset", data, "--steps", 20, "--batch-size", 16, "--held-out", 16]
    result = launch(ROOT / "scripts/train_reward_model.py", *flags, "--output", out, ranks=ranks)
    assert json.loads(result.stdout.strip().splitlines()[-1])["accuracy"] == 1.0
    good, bad = score(rewards.load_one(f"model:{out}"), [Item("3", "aa", ""), Item("3", "bb", "")])
    assert good > bad


@pytest.mark.slow
def test_sharded_over_two_ranks_gives_the_same_scores(folder):
    """With five responses on one rank and one on the other; a conversation too long on one stops both."""
    items = [Item(f"{a}+38=", embedded.solution(a, 38), str(a + 38)) for a in (11, 22, 47, 58, 99)]
    expected = score(RewardModel(folder), items)
    result = launch(ROOT / "tests/workers/sharded_reward.py", folder, ranks=2, engine=False)
    five, one = json.loads(next(line for line in result.stdout.splitlines() if line.startswith("[")))
    assert five["scores"] == pytest.approx(expected, abs=1e-5)
    assert one["scores"] == pytest.approx(expected[:1], abs=1e-5)
    assert all("it has 256 positions" in row["said"] and row["kind"].startswith("FSDP") for row in (one, five))


@pytest.mark.slow
def test_in_a_process_on_the_cpu_gives_the_same_scores(folder):
    reward = rewards.load_one(f"model-cpu:{folder}")
    assert score(reward, ITEMS) == pytest.approx(score(RewardModel(folder), ITEMS), abs=1e-5)
    with pytest.raises(BadInput, match="--reward"):
        rewards.load_one("model-cpu:/nowhere")
