"""Calls of tools: every one that can be read is run with its arguments, and none without them."""

import json

import pytest
from pydantic import TypeAdapter

from common.rollout.environments import tools

TAG = "</tool_call>"


class Notes(tools.Tools):
    """What it is asked to write is what it says."""

    def write(self, text: str = "nothing", times: int = 1) -> str:
        return text * times

    def kind(self, type: str = "none") -> str:
        return type

    def count(self) -> int:
        return 7

    def reads(self) -> str:
        """A tool that uses pydantic itself."""
        return TypeAdapter(int).validate_json("{")


def played(form: str, text: str):
    notes = Notes()
    notes.format = form
    notes.reset(None)
    return notes.step(text), notes


def hermes(*calls: dict | str) -> str:
    return "\n".join(f"<tool_call>\n{c if isinstance(c, str) else json.dumps(c)}\n{TAG}" for c in calls)


def write(key: str = "arguments", /, **arguments) -> dict:
    return {"name": "write", key: arguments}


RUN = [
    # a string that holds what ends or separates calls
    ("hermes", hermes(write(text=f"a{TAG}b")), [f"a{TAG}b"]),
    ("hermes", hermes(write(text=TAG), write(text="c")), [TAG, "c"]),
    ("hermes", hermes(write(text=f"<tool_call>{{}}{TAG}")), [f"<tool_call>{{}}{TAG}"]),
    ("hermes", f"so {hermes(write(text=TAG))} done {TAG}", [TAG]),
    ("hermes", hermes(write(text=f"end {TAG}")).rpartition("\n")[0], [f"end {TAG}"]),
    ("hermes", hermes(write(text=f'"{TAG}\\')), [f'"{TAG}\\']),
    ("llama", json.dumps(write("parameters", text="}; {")), ["}; {"]),
    (
        "llama",
        f"{json.dumps(write('parameters', text='};{'))} ; {json.dumps(write('parameters', text='c'))}",
        ["};{", "c"],
    ),
    # either name of the arguments
    ("llama", json.dumps(write("arguments", text="a", times=2)), ["aa"]),
    ("llama", "<|python_tag|>" + json.dumps(write("arguments", text="a")), ["a"]),
    ("hermes", hermes(write("parameters", text="a")), ["a"]),
    ("hermes", hermes({**write(text="a"), "parameters": {"text": "a"}}), ["a"]),
    ("hermes", hermes({**write(text="a"), "parameters": {}}), ["a"]),
    # nothing is lost: no arguments were given, or the other keys hold none
    ("hermes", hermes({"name": "count"}), ["7"]),
    ("hermes", hermes({"name": "count", "id": "call_1", "type": "function"}), ["7"]),
    ("hermes", hermes({**write(text="a"), "thought": "x"}), ["a"]),
    ("llama", json.dumps({"type": "function", **write("parameters", text="a")}), ["a"]),
    ("plain", 'write("a", times=2)', ["aa"]),
]


@pytest.mark.parametrize("form, text, said", RUN)
def test_a_call_is_run_with_its_arguments(form, text, said):
    step, _ = played(form, text)
    assert (step.observation, step.calls, step.errors, step.done) == (said, len(said), 0, False)


LOST = [
    ("hermes", hermes({"name": "write", "args": {"text": "a"}}), '"args" would be lost'),
    ("hermes", hermes({"name": "write", "text": "a"}), '"text" would be lost'),
    ("hermes", hermes({"name": "kind", "type": "a"}), '"type" would be lost'),
    ("hermes", hermes({**write(text="a"), "times": 2}), '"times" would be lost'),
    ("hermes", hermes({**write(), "parameters": {"text": "a"}}), '"parameters" would be lost'),
    ("hermes", hermes({**write(text="a"), "parameters": {"text": "b"}}), '"parameters" would be lost'),
    ("hermes", hermes({**write(), "args": {"text": "a"}}), '"args" would be lost'),
    ("llama", json.dumps({"name": "write", "input": {"text": "a"}}), 'in the object "parameters"'),
    ("llama", json.dumps({"name": "write", "arguments": '{"text": "a"}'}), '"name" and "parameters"'),
    ("llama", json.dumps({"name": "write", "parameters": None}), '"name" and "parameters"'),
    ("hermes", hermes({"name": "write", "arguments": ["a"]}), '"name" and "arguments"'),
    ("hermes", "I call <tool_call>", '"name" and "arguments"'),
    ("hermes", hermes(f'{{"name": "write", "arguments": {{"text": "a{TAG}'), '"name" and "arguments"'),
]


@pytest.mark.parametrize("form, text, said", LOST)
def test_a_call_that_would_run_without_its_arguments_is_an_error_that_the_policy_reads(form, text, said):
    step, _ = played(form, text)
    (observation,) = step.observation
    assert said in json.loads(observation)["error"] and (step.calls, step.errors, step.done) == (1, 1, False)


ANSWERS = [
    ("hermes", "no call"),
    ("hermes", TAG),
    ("llama", '{"answer": 5}'),
    ("llama", '{"name": 3, "parameters": {}}'),
    ("llama", "I say " + json.dumps(write("parameters", text="a"))),
    ("plain", "write(text)"),
]


def test_an_episode_ends_after_as_many_turns_with_calls_as_it_may_have():
    notes = Notes()
    notes.format, notes.max_calls = "hermes", 3
    notes.reset(None)
    assert [notes.step(hermes(write(), write())).done for _ in range(3)] == [False, False, True]
    notes.reset(None)  # another episode
    assert not notes.step(hermes(write())).done


@pytest.mark.parametrize("form, text", ANSWERS)
def test_a_turn_without_a_call_is_still_the_answer(form, text):
    step, notes = played(form, text)
    assert step.done and step.calls == 0 and notes.answer == text


def test_one_bad_call_does_not_take_its_neighbours_along():
    bad = '{"name": "write", "arguments": {"text": "a}'
    step, _ = played("hermes", hermes(bad, write(text=TAG), {"name": "write", "args": {}}))
    assert step.observation[1] == TAG and (step.calls, step.errors) == (3, 2)


def test_a_long_turn_of_open_tags_takes_no_time():
    step, _ = played("hermes", '<tool_call>{"name": "' * 5000)
    assert step.errors == step.calls > 0


def test_a_tool_that_raises_pydantics_error_is_an_error_that_the_model_reads():
    step, _ = played("plain", "reads()")
    assert step.errors == 1 and step.observation[0].startswith("error: Invalid JSON")


def test_a_line_that_is_no_value_is_no_call():
    step, notes = played("plain", "write({[]: 1})")
    assert step.done and notes.answer == "write({[]: 1})"
