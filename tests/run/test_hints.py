"""Prompts with a hint: what a teacher reads in the place of the student's prompt."""

from dataclasses import dataclass, field, replace
from types import SimpleNamespace

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from common.data import arithmetic
from common.data.prompts import Prompt, TrainSource
from common.errors import BadInput
from common.rollout.rollout import collate
from common.run.hints import Hinter
from common.run.sampling import Batch
from common.run.tracking import Metrics
from common.trainer import batching

CHAT = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}</{{ m.role }}>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@dataclass(frozen=True)
class Setup:
    """What a Hinter needs of Settings."""

    tokenizer: PreTrainedTokenizerFast
    prompts: list[Prompt]
    model: str = str(arithmetic.WARM_START)
    compute: batching.Compute = batching.Compute()
    args: SimpleNamespace = field(default_factory=lambda: SimpleNamespace(source=TrainSource(), max_response_tokens=40))


def write(text: str, hint: str) -> str:
    return f"{hint},{text}"


def tokenizer_with_chat() -> PreTrainedTokenizerFast:
    tokenizer = arithmetic.tokenizer()
    tokenizer.add_tokens(["<user>", "</user>", "<system>", "</system>", "<assistant>", "</assistant>"])
    tokenizer.chat_template = CHAT
    return tokenizer


def plain(text: str, tokenizer) -> Prompt:
    return Prompt("rows:1", text, tokenizer(text)["input_ids"], None)


def chat(messages: list[dict], tokenizer) -> Prompt:
    return Prompt("rows:1", "", [1], None, messages=messages)


def batch_of(prompts: list[Prompt], responses: list[list[int]], group_size: int, ungraded=()) -> Batch:
    ids = [prompt.ids for prompt in prompts for _ in range(group_size)]
    rollout = collate(ids, responses, None, [False] * len(responses), 0, "cpu")
    rollout.response_mask[list(ungraded)] = False
    return Batch.of(rollout, prompts, [""] * len(responses), [])


def test_without_a_chat_template_the_hint_goes_into_the_whole_prompt():
    tokenizer = arithmetic.tokenizer()
    prompt = plain("1+2=", tokenizer)
    hinter = Hinter(Setup(tokenizer, [prompt]), write)
    assert tokenizer.decode(hinter.ids(prompt, "3")) == "3,1+2="


def test_the_hint_goes_into_what_the_user_said_last():
    tokenizer = tokenizer_with_chat()
    said = [("system", "add"), ("user", "1+1="), ("assistant", "2"), ("user", "1+2=")]
    prompt = chat([{"role": role, "content": content} for role, content in said], tokenizer)
    hinter = Hinter(Setup(tokenizer, [prompt]), write)
    text = tokenizer.decode(hinter.ids(prompt, "3")).replace(" ", "")
    assert text == "<system>add</system><user>1+1=</user><assistant>2</assistant><user>3,1+2=</user><assistant>"
    assert prompt.messages[-1]["content"] == "1+2=", "the student's prompt has changed"


def test_the_policy_goes_on_with_a_start_that_the_prompt_gives_it():
    tokenizer = tokenizer_with_chat()
    prompt = chat([{"role": "user", "content": "1+2="}, {"role": "assistant", "content": "1+2"}], tokenizer)
    hinter = Hinter(Setup(tokenizer, [prompt]), write)
    assert tokenizer.decode(hinter.ids(prompt, "3")).replace(" ", "") == "<user>3,1+2=</user><assistant>1+2"


def test_rows_without_a_hint_keep_their_prompt_and_have_no_teacher(world):
    tokenizer = arithmetic.tokenizer()
    prompts = [plain("1+2=", tokenizer), plain("4+5=", tokenizer)]
    batch = batch_of(prompts, [[5], [6, 7], [8], [9]], 2, ungraded=[3])
    metrics = Metrics(world)
    before = [list(ids) for ids in batch.prompt_ids]
    hinted, has_hint = Hinter(Setup(tokenizer, prompts), write).batch(batch, ["3", None, "9", "9"], metrics)
    assert has_hint.tolist() == [True, False, True, False]
    texts = [tokenizer.decode(ids) for ids in hinted.prompt_ids]
    assert texts == ["3,1+2=", "1+2=", "9,4+5=", "4+5="]  # each after its own prompt
    assert batch.prompt_ids == before, "the hint is in the student's prompt"
    assert hinted.response_ids == batch.response_ids
    ((taught, graded),) = metrics.sums["teacher/hinted"]
    assert (int(taught), int(graded)) == (2, 3)


def test_a_hint_that_does_not_fit_into_the_model_is_counted_and_left_out(world):
    tokenizer = arithmetic.tokenizer()
    prompts = [plain("1+2=", tokenizer)]
    metrics = Metrics(world)
    hinter = Hinter(Setup(tokenizer, prompts), write)
    fits = hinter.positions - len(prompts[0].ids) - 1 - 2  # a comma, and the response
    batch = batch_of(prompts, [[5, 6], [5, 6]], 2)
    _, has_hint = hinter.batch(batch, ["1" * fits, "1" * (fits + 1)], metrics)
    assert has_hint.tolist() == [True, False]
    assert metrics.sums["teacher/too_long"] == [(1, None)]


def test_hints_that_are_known_and_do_not_fit_are_refused_at_the_start():
    tokenizer = arithmetic.tokenizer()
    prompts = [plain("1+2=", tokenizer), plain("4+5=", tokenizer)]
    hinter = Hinter(Setup(tokenizer, prompts), write)
    room = hinter.positions - 40 - len(prompts[0].ids) - 1
    hinter.check(prompts, ["3", "1" * room])
    with pytest.raises(BadInput, match="^--max-response-tokens 40: "):
        hinter.check(prompts, ["3", "1" * (room + 1)])


def test_a_prompt_that_cannot_be_written_with_its_hint_fails_before_the_run():
    """Also if it is short, and so needs no count of its tokens."""
    tokenizer = arithmetic.tokenizer()
    prompts = [plain("1+2=", tokenizer)]
    with pytest.raises(BadInput, match="rows:1: "):
        Hinter(Setup(tokenizer, prompts), lambda said, hint: "").check(prompts, [""])


def test_every_hint_that_is_known_is_looked_at():
    """The one with most characters has few tokens here: six equal digits are one."""
    tokenizer = arithmetic.tokenizer()
    tokenizer.add_tokens(["111111"])
    prompts = [plain("1+2=", tokenizer), plain("4+5=", tokenizer)]
    hinter = Hinter(Setup(tokenizer, prompts), write)
    room = hinter.positions - 40 - len(prompts[0].ids) - 1
    hinter.check(prompts, ["1" * 6 * room, "2" * room])
    with pytest.raises(BadInput, match="rows:1"):
        hinter.check(prompts, ["1" * 6 * room, "2" * (room + 1)])


@pytest.mark.parametrize("flag", ["keep", "text"])
@pytest.mark.parametrize("with_chat", [False, True])
def test_a_hint_that_spells_a_control_token_is_left_out(world, with_chat, flag):
    """It would end the turn of the user, or the prompt. With a chat template and --control-tokens text it is text."""
    tokenizer = tokenizer_with_chat() if with_chat else arithmetic.tokenizer()
    prompt = replace(plain("1+2=", tokenizer), messages=[{"role": "user", "content": "1+2="}])
    batch = batch_of([prompt], [[5], [6]], 2)
    args = SimpleNamespace(source=TrainSource(control_tokens=flag), max_response_tokens=40)
    metrics = Metrics(world)
    hints = [f"3{tokenizer.eos_token}", "3"]
    after, has_hint = Hinter(Setup(tokenizer, [prompt], args=args), write).batch(batch, hints, metrics)
    is_text = with_chat and flag == "text"
    assert has_hint.tolist() == [is_text, True] and metrics.sums["teacher/control_token"] == [(1 - is_text, None)]
    assert tokenizer.eos_token_id not in after.prompt_ids[0]
    assert is_text or after.prompt_ids[0] == batch.prompt_ids[0]


def test_a_tokenizer_without_control_tokens_leaves_no_hint_out(world, monkeypatch):
    tokenizer = arithmetic.tokenizer()
    prompt = plain("1+2=", tokenizer)
    monkeypatch.setattr("common.data.templates.control_tokens", lambda tokenizer: {})
    _, has_hint = Hinter(Setup(tokenizer, [prompt]), write).batch(batch_of([prompt], [[5]], 1), ["3"], Metrics(world))
    assert has_hint.tolist() == [True]


def test_prompts_that_cannot_take_a_hint_are_refused_at_the_start():
    tokenizer = tokenizer_with_chat()
    with pytest.raises(BadInput, match="^rows:1: has no message of a user"):
        Hinter(Setup(tokenizer, [chat([{"role": "system", "content": "1+2="}], tokenizer)]), write)

    class WithImages(list):
        images = ()

    prompt = replace(plain("1+2=", tokenizer), ids=WithImages([1]))
    with pytest.raises(BadInput, match="^rows:1: has images"):
        Hinter(Setup(arithmetic.tokenizer(), [prompt]), write)


# The same responses after other prompts


def groups_after(micro: batching.MicroBatch, rollout, **compute) -> list:
    return batching.after_prompts_of(rollout, micro, batching.Compute(**compute)).group_lengths


def test_the_same_tokens_are_predicted_after_a_longer_prompt(world):
    """Row for row, whatever shares a prompt there. The place before each token is that of the other prompt."""
    responses = [[11, 12, 13], [14], [15, 16]]
    student = collate([[3, 4]] * 3, responses, None, [False] * 3, 0, "cpu")
    teacher = replace(student, prompt_ids=[[3, 9, 9, 4], [3, 8, 4], [3, 8, 4]])
    (micro,) = batching.pack(student, torch.tensor([0, 1, 2]), batching.Compute(1000), world)
    other = batching.after_prompts_of(teacher, micro, batching.Compute(1000))
    assert torch.equal(other.targets, micro.targets) and torch.equal(other.scatter, micro.scatter)
    assert torch.equal(other.rows, micro.rows)
    first_of = {row: place for place, row in enumerate(other.rows.tolist())}
    assert len(other.group_lengths) <= 3 and len(first_of) == 3
    ids = other.input_ids[0].tolist()
    for predictor, target, place in zip(other.predictors.tolist(), other.targets.tolist(), other.scatter.tolist()):
        row = int(micro.rows[place // 3])
        at = place % 3
        expected = responses[row][at - 1] if at else teacher.prompt_ids[row][-1]
        assert ids[predictor] == expected and target == responses[row][at]


def test_rows_share_a_prompt_with_its_hint_only_where_the_model_allows_it(world):
    student = collate([[3, 4]] * 3, [[11], [12], [13]], None, [False] * 3, 0, "cpu")
    teacher = replace(student, prompt_ids=[[3, 9, 4], [3, 9, 4], [3, 8, 4]])
    (micro,) = batching.pack(student, torch.tensor([0, 1, 2]), batching.Compute(1000), world)
    assert groups_after(micro, teacher) == [(3, [1, 1]), (3, [1])]
    alone = [(3, [1]), (3, [1]), (3, [1])]
    assert groups_after(micro, teacher, shared_prompts=False) == alone
    assert groups_after(micro, teacher, packing="off") == alone
