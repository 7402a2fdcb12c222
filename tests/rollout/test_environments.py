"""Environments and tools: turns as token ids, calls, workers that hang or die, and runs with episodes."""

import asyncio
import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import httpx
import pytest
import torch
from conftest import CORES, ROOT, SHORT, launch, save_model
from helpers import gaps_of, metrics, nightly, same, weights
from transformers import AutoModelForCausalLM

from algos import grpo
from common import rewards
from common.data import arithmetic, tasks
from common.data.demonstrations import demonstrations
from common.data.prompts import Prompt, PromptLoader, TrainSource, load
from common.data.suffix import Suffix
from common.data.templates import chat_text, turn_end
from common.data.tokenizer import load_tokenizer
from common.errors import BadInput, RunFailed
from common.processes.pool import Failure
from common.rewards.grading import Result
from common.rewards.mixture import Rewards
from common.rollout import vllm_turns
from common.rollout.environments import Problem as EnvironmentProblem
from common.rollout.environments import built_in, tools
from common.rollout.environments.episodes import Environments, attach, problem_of
from common.rollout.environments.workers import THREADS, EnvironmentPool
from common.rollout.hf_engine import HFEngine
from common.rollout.rollout import Response, collate
from common.rollout.servers import client, vllm_api
from common.rollout.servers import engine as servers
from common.rollout.turns import Replies, collate_turns, open_turns
from common.run import sampling
from common.run.tracking import Metrics
from common.trainer import batching, model

TURNS = ROOT / "tests" / "workers" / "turns.py"
LETTERS = '''
import random
from common.rollout.environments import Environment, Result, Step

class Letters(Environment):
    """Says how many letters each turn has. The number of turns is drawn from the seed."""

    def reset(self, problem):
        self.turns, self.most = 0, random.Random(problem.seed).randint(1, 5)

    def step(self, text):
        self.turns += 1
        if self.turns == self.most:
            return Step(done=True)
        return Step(f"{self.turns - 1}: {len(text)} letters")

    def score(self):
        return Result(float(self.turns), 1.0, None, {"finished": self.turns == self.most})
'''


@pytest.fixture(scope="module")
def letters(tmp_path_factory) -> str:
    file = tmp_path_factory.mktemp("environment") / "letters.py"
    file.write_text(LETTERS)
    return f"{file}:Letters"


@pytest.fixture(scope="module")
def chat_model(tmp_path_factory) -> str:
    """The embedded model with the special tokens of two chat templates, and two ways to write some numbers."""
    folder, tokenizer = tmp_path_factory.mktemp("chat") / "model", arithmetic.tokenizer()
    config = arithmetic.config(tie_word_embeddings=True)
    special = ["<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
    tokenizer.add_special_tokens({"additional_special_tokens": special})
    tokenizer.add_tokens(["<think>", "</think>", *(f"{number:02}" for number in range(20))])
    config.vocab_size = len(tokenizer)
    save_model(folder, config, 0.05)
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize("backend, tp", [("vllm", 2), ("hf", 1), nightly("servers", 1)])
def test_the_loss_has_the_ids_that_were_sampled(chat_model, letters, backend, tp):
    """In four forms of a conversation, with the trainer's log-probs equal to the engine's on every sampled token. Two
    ranks that share an engine have environments of their own. Two servers have followed five updates before.
    """
    if backend == "servers" and len(CORES) < 2:
        pytest.skip("a server wants a core of its own")
    result = launch(TURNS, chat_model, letters, tp, backend, ranks=tp, servers=backend == "servers")
    followed = gaps_of(result.stdout)
    assert len(followed) == 6 * (backend == "servers") and max(followed, default=0) <= 1e-5, followed
    gaps = [line.split()[1:] for line in result.stdout.splitlines() if re.match(r"gap [a-z]", line)]
    assert [form for form, _ in gaps] == [form for form in ("plain", "chatml", "llama", "thinking") for _ in range(2)]
    assert max(float(gap) for _, gap in gaps) < 1e-5, gaps


def test_servers_grade_no_single_turn_ahead(world, monkeypatch):
    """An episode is graded as a whole when it has ended, also where the reward takes responses one by one."""
    given = []

    async def ask_all(requests, versions, done, follow, api, salted):
        given.append((len(requests), done))
        raise BadInput("enough")

    monkeypatch.setattr(client, "ask_all", ask_all)
    engine = object.__new__(servers.ServerEngine)
    engine.world, engine.stop_token_ids, engine.never, engine.urls = world, [1], (), ["http://a"]
    engine.inflight_updates, engine.calls, engine.of_thread = "none", servers.CallGate(), threading.local()
    engine.api = vllm_api
    with pytest.raises(BadInput, match="enough"):
        engine.generate([[5], [6]], 4, 1.0, 8, 0, done=lambda *row: None, reply=lambda prompt, turns: None)
    assert given == [(8, None)]


def test_an_observation_that_the_template_refuses_ends_its_episode_alone(chat_model, tmp_path):
    """Two messages in a row, where the template wants user and assistant to alternate: the other ranks do not wait."""
    file = tmp_path / "twice.py"
    said = LETTERS.replace('f"{self.turns - 1}: {len(text)} letters"', '["one", "two"]')
    file.write_text(said.replace("randint(1, 5)", "randint(2, 5)"))
    tokenizer = load_tokenizer(chat_model)[0]
    tokenizer.chat_template = (
        "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('roles must alternate') }}{% endif %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"
    )
    environment = Environments(f"{file}:Letters", tokenizer, [1])
    environment.suffix = Suffix(tokenizer, [1], "user")
    ask, ended = environment.pool.ask, []

    def noted(number, problem, texts, ends, again=False):
        ended.append((ends, again))
        return ask(number, problem, texts, ends, again)

    environment.pool.ask = noted
    (turns,) = open_turns([[5]], 1, 64)
    turns.add([7, 1], [0.0, 0.0], False)
    assert environment.reply(problem_of(Prompt("p:1", "?", [5], ""), 1), turns) is None
    assert ended == [(False, False), (True, True)], "the worker keeps no environment of an episode that has ended"
    assert turns.failure == "wrong" and "roles must alternate" in environment.first_failures["wrong"]


def test_a_model_with_several_chat_templates(chat_model):
    tokenizer = load_tokenizer(chat_model)[0]
    plain = "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"
    tokenizer.chat_template = {"default": plain, "tool_use": "TOOLS " + plain}
    asked = [{"role": "user", "content": "?"}]
    assert chat_text(asked, tokenizer) == "<|im_start|>?<|im_end|>"
    assert chat_text(asked, tokenizer, [{"name": "f"}]).startswith("TOOLS ")


def test_a_seed_follows_from_the_prompt_the_step_and_the_seed_of_the_run():
    """Whatever process asks, and whenever: a resumed run and a replay play the same episodes."""
    prompt = Prompt("words.jsonl:3", "?", [5], "noon", None, {"prompt": "?"})
    expected = {"prompt": "?", "answer": "noon", "meta": {"prompt": "?"}, "seed": 3156606954}
    assert problem_of(prompt, 7) == expected != problem_of(prompt, 8)
    assert problem_of(prompt, 7, seed=1)["seed"] not in (expected["seed"], problem_of(prompt, 7, seed=2)["seed"])


def test_draws_of_a_step_hand_the_seed_of_the_run_to_the_environment():
    class Recorder:
        def begin_early(self, *given):
            return given

    draw = sampling.PromptSampler(None, SimpleNamespace(time=None), PromptLoader([], 5), Recorder(), "tokenizer")
    draw.step = 3
    assert draw.grade_early(["prompt"]) == (["prompt"], "tokenizer", 3, 5)


# Suffixes


class Tokenizer:
    """The embedded tokenizer with a chat template and the special tokens of ChatML."""

    def __new__(cls, template: str):
        tokenizer = arithmetic.tokenizer()
        tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
        tokenizer.chat_template = template
        return tokenizer


TURN_OF = "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
CHATML = (
    "{% for m in messages %}" + TURN_OF + "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def test_a_suffix_is_the_part_of_the_template_behind_a_turn():
    """The end token of the turn was sampled, so that only what stands behind it is added."""
    tokenizer = Tokenizer(CHATML)
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    suffix = Suffix(tokenizer, [1, end], "tool")
    expected = "\n<|im_start|>tool\nup<|im_end|>\n<|im_start|>tool\n12<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.decode(suffix.ids(["up", "12"])) == expected
    assert Suffix(tokenizer, [1], "tool").ids(["up"])[0] == end, "no end token of the model: the template writes it"
    plain = arithmetic.tokenizer()
    assert plain.decode(Suffix(plain, [1], "user").ids(["a", "b"])) == "a\nb\n"


def test_a_template_that_rewrites_earlier_turns_does_not_touch_them():
    thought = CHATML.replace("m.content }}", "m.content.split('</think>')[-1] if not loop.last else m.content }}")
    tokenizer = Tokenizer(thought)
    ids = Suffix(tokenizer, [tokenizer.convert_tokens_to_ids("<|im_end|>")], "user").ids(["up"])
    assert tokenizer.decode(ids) == "\n<|im_start|>user\nup<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize(
    "template, message",
    [
        (
            CHATML.replace(
                "{% for",
                "{% for m in messages if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endfor %}{% for",
            ),
            'refuses an observation of the role "tool": no tools',
        ),
        ("{% for m in messages if m.role != 'tool' %}" + TURN_OF + "{% endfor %}", 'not show what the role "tool"'),
        ("{% for m in messages if m.role != 'assistant' %}" + TURN_OF + "{% endfor %}", "drops a turn"),
    ],
)
def test_a_template_without_observations_is_refused(template, message):
    with pytest.raises(BadInput, match=message):
        Suffix(Tokenizer(template), [1], "tool")


def test_demonstrations_have_the_policys_turns_in_the_loss_alone():
    tokenizer = arithmetic.tokenizer()
    prompt = lambda solution: Prompt("x:1", "", [], None, solution)
    (ids,), (mask,) = demonstrations([prompt(["mul(3,4)", "12", "12"])], tokenizer)
    assert tokenizer.decode(ids) == "mul(3,4)<eos>12\n12<eos>"
    assert tokenizer.decode([t for t, own in zip(ids, mask) if not own]) == "12\n"
    assert demonstrations([prompt("7")], tokenizer) == ([[*tokenizer("7")["input_ids"], 1]], [[True] * 2])


def test_a_demonstration_has_the_suffix_that_an_episode_would_have():
    tokenizer = Tokenizer(CHATML)
    for kind in (built_in.Calculator, built_in.Guess):
        played = [row for row in tasks.problems(kind.__name__.lower(), "train") if isinstance(row["solution"], list)]
        row = next(row for row in played if len(row["solution"]) > 1)
        said = row["solution"][1]
        (ids,), (mask,) = demonstrations([Prompt("x:1", "", [], None, row["solution"][:3], row)], tokenizer)
        heard = [token for token, own in zip(ids, mask) if not own]
        ends = turn_end(tokenizer)
        assert heard == Suffix(tokenizer, ends, kind.role).ids([said])
        assert heard != Suffix(tokenizer, ends, "user" if kind.role == "tool" else "tool").ids([said])


# Calls


class Shop(tools.Tools):
    """Its tools are price and lookup."""

    def price(self, item: str, count: int = 1, tax: float = 0.0) -> float:
        """Price in euros."""
        return 2 * count * (1 + tax) if item == "pen" else 1 / 0

    def lookup(self, ids: list[int] | None) -> str:
        return f"found {ids}"

    def _hidden(self) -> None:
        """No tool."""


def turn(format: str, text: str):
    shop = Shop()
    shop.format = format
    shop.reset(None)
    return shop.step(text), shop


@pytest.mark.parametrize(
    "format, text, said",
    [
        ("hermes", 'so <tool_call>\n{"name": "price", "arguments": {"item": "pen"}}\n</tool_call>', ["2.0"]),
        (
            "hermes",
            '<tool_call>{"name": "price", "arguments": {"item": "pen", "tax": 1}}</tool_call>\n'
            '<tool_call>{"name": "lookup", "arguments": {"ids": null}}</tool_call>',
            ["4.0", "found None"],
        ),
        ("hermes", '<tool_call>{"name": "price", "arguments": {"item": "pen"}}', ["2.0"]),
        ("llama", '{"name": "price", "parameters": {"item": "pen", "count": 3}}', ["6.0"]),
        (
            "llama",
            '{"name": "price", "parameters": {"item": "pen"}}; {"name": "lookup", "parameters": {"ids": [1]}}',
            ["2.0", "found [1]"],
        ),
        ("plain", 'let me see\nprice("pen", count=2)', ["4.0"]),
        ("plain", "lookup([1, 2])", ["found [1, 2]"]),
    ],
)
def test_calls_are_read_in_the_models_format(format, text, said):
    step, _ = turn(format, text)
    assert step.observation == said and not step.done and (step.calls, step.errors) == (len(said), 0)


@pytest.mark.parametrize(
    "format, text, said",
    [
        ("hermes", '<tool_call>{"name": "steal", "arguments": {}}</tool_call>', "no tool is named steal"),
        ("hermes", '<tool_call>{"name": "_hidden", "arguments": {}}</tool_call>', "no tool is named _hidden"),
        ("hermes", '<tool_call>{"name": "reset", "arguments": {}}</tool_call>', "no tool is named reset"),
        ("hermes", "<tool_call>price(pen)</tool_call>", 'a call is a JSON object with \\"name\\" and'),
        ("hermes", '<tool_call>{"name": "price", "arguments": {"item": "pen"}', "a call is a JSON object"),
        ("hermes", '<tool_call>["price"]</tool_call>', "a call is a JSON object"),
        ("hermes", "<tool_call>" + "[" * 100_000, "a call is a JSON object"),
        ("plain", "price('cup')", "error: ZeroDivisionError: division by zero"),
        ("plain", "price(3)", "error: argument 0: Input should be a valid string"),
        ("plain", "price('pen', True)", "error: argument 1: Input should be a valid integer"),
        ("plain", "price('pen', '2', 0, 4)", "argument 3: Unexpected positional argument"),
        ("plain", "price('pen', cuont=2)", "error: argument cuont: Unexpected keyword argument"),
        ("plain", "lookup()", "error: argument ids: Missing required argument"),
    ],
)
def test_a_call_that_fails_is_said_to_the_model(format, text, said):
    step, _ = turn(format, text)
    assert said in step.observation[0] and (step.calls, step.errors, step.done) == (1, 1, False)
    assert format == "plain" or set(json.loads(step.observation[0])) == {"error"}


@pytest.mark.parametrize(
    "format, text",
    [
        ("hermes", '{"name": "price", "arguments": {"item": "pen"}}'),
        ("llama", '{"name": 3, "parameters": {}}'),
        ("llama", 'I would call {"name": "price"}'),
        ("plain", "price(pen)"),  # a name is no plain value
        ("plain", "price('pen').real"),
        ("plain", "price('pen') it is"),
        ("plain", "__import__('os').system('ls')"),
        ("plain", "price(" + "(" * 500 + ")" * 500 + ")"),
        ("plain", ""),
    ],
)
def test_a_turn_without_a_readable_call_is_the_answer(format, text):
    step, shop = turn(format, text)
    assert step.done and step.calls == 0 and shop.answer == text


def test_the_schemas_are_those_of_transformers():
    from transformers.utils import get_json_schema

    def price(item: str, count: int = 1, tax: float = 0.0) -> float:
        """
        Price in euros.

        Args:
            item: a
            count: b
            tax: c
        """

    expected = get_json_schema(price)["function"]
    (found,) = [tool["function"] for tool in tools.schemas(Shop) if tool["function"]["name"] == "price"]
    for parameter in expected["parameters"]["properties"].values():
        del parameter["description"]
    assert found["parameters"] == expected["parameters"] and found["description"] == "Price in euros."
    assert {tool["function"]["name"] for tool in tools.schemas(Shop)} == {"price", "lookup"}
    with pytest.raises(BadInput, match='guess: .*"x"'):
        tools.schemas(type("Untyped", (tools.Tools,), {"guess": lambda self, x: x}))
    static = type("Static", (tools.Tools,), {"add": staticmethod(lambda a, b: a + b)})
    assert static().call(tools.ToolCall(name="add", positional=[1, 2])) == ("3", False)


def test_a_tools_value_that_is_no_json_is_an_error_that_the_model_reads():
    kind = type("Odd", (tools.Tools,), {"odd": lambda self: {(1, 2): 3}})
    said, failed = kind().call(tools.ToolCall(name="odd"))
    assert failed and said.startswith("error: TypeError")


@pytest.mark.parametrize(
    "template, expected",
    [(None, "plain"), ("<tool_call>", "hermes"), ("<|start_header_id|>ipython", "llama"), ("{{ m }}", "plain")],
)
def test_the_format_follows_from_the_chat_template(template, expected):
    assert tools.format_of(template) == expected


def test_the_prompt_shows_the_tools_and_calls_have_the_models_form(tmp_path):
    shown = "{% if tools %}{% for t in tools %}{{ t.function.name }} {{ t.function.parameters.required }}{% endfor %}"
    tokenizer = Tokenizer("{# <tool_call> #}" + shown + "{% endif %}" + CHATML)
    reward = Rewards({"environment": None}, {"environment": 1.0})
    source = attach("calculator", reward, TrainSource(), tokenizer, [1])
    (tmp_path / "rows.jsonl").write_text('{"prompt": "12*34?", "answer": "408"}')
    (prompt,) = load((str(tmp_path / "rows.jsonl"),), source, "train", tokenizer, 400)
    asked = "<|im_start|>user\n12*34?<|im_end|>\n<|im_start|>assistant\n"
    assert prompt.text == "mul ['a', 'b']" + asked
    call = '<tool_call>{"name": "mul", "arguments": {"a": 12, "b": 34}}</tool_call>'
    assert reward.environment.pool.ask(0, problem_of(prompt, 1), [call], False)["observation"] == ["408"]
    reward.environment.pool.close()
    with pytest.raises(BadInput, match="--model"):
        attach("calculator", reward, TrainSource(), Tokenizer("{# <function= #}" + CHATML), [1])


# The loss


def test_the_gradient_is_that_of_a_loss_over_the_sampled_tokens_alone(models, world):
    """Whatever stands at an observation's tokens: they are read, and nothing is learned from them."""
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(3, 50, (4,), generator=generator).tolist() for _ in range(3)]
    responses = [torch.randint(3, 50, (length,), generator=generator).tolist() for length in (9, 6, 3)]
    sampled = [[t not in holes for t in range(len(ids))] for ids, holes in zip(responses, ([2, 3, 6], [4], []))]
    batch = collate(prompts, responses, None, [False] * 3, 0, world.device, sampled)
    advantages, mask = torch.tensor([1.0, -0.5, 0.25], dtype=torch.float64), batch.response_mask
    (micro,) = batching.pack(batch, torch.arange(3), batching.Compute(1000), world)
    policy = model.load(models["untied"], world, torch.float64, batching.Compute())
    logprobs, _ = model.response_logprobs(policy, micro, 1.0)
    old = torch.where(micro.response_mask, logprobs.detach(), torch.nan)
    order = micro.rows
    grpo.policy_loss(
        logprobs=logprobs,
        old_logprobs=old,
        ref_logprobs=None,
        advantages=advantages[order],
        response_mask=mask[order],
        clip_low=0.2,
        clip_high=0.2,
        kl_coef=0.0,
        denominator=3,
    ).backward()
    plain = AutoModelForCausalLM.from_pretrained(models["untied"], dtype=torch.float64)
    for prompt, response, own, advantage in zip(prompts, responses, sampled, advantages):
        places = [t for t, kept in enumerate(own) if kept]
        logits = plain(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        chosen = logits[places, [response[t] for t in places]]
        (-advantage * chosen.mean() / 3).backward()
    expected = dict(plain.named_parameters())
    for name, parameter in policy.named_parameters():
        given = parameter.grad.full_tensor().double()
        torch.testing.assert_close(given, expected[name].grad, atol=1e-6, rtol=1e-5)


# Workers

BAD = """
import ctypes, os, re, sys, time
from common.rollout.environments import Environment, Result, Step

class Bad(Environment):
    seconds, memory_gib = 1.5, 0.5

    def reset(self, problem):
        self.said = []

    def step(self, text):
        self.said.append(text)
        kind = text.rpartition(" ")[2]
        if kind == "hang":
            time.sleep(60)
        if kind == "spin":
            while True:
                pass
        if kind == "lock":
            re.match("(a+)+$", "a" * 40 + "b")
        if kind == "wait":
            time.sleep(0.5)
        if kind == "exit":
            os._exit(7)
        if kind == "segfault":
            ctypes.string_at(0)
        if kind == "quit":
            sys.exit(3)
        if kind == "memory":
            bytearray(2**31)
        if kind == "raise":
            raise KeyError("no such door")
        if kind == "print":
            print("x" * 2**20)
            input()
        return {"long": Step("x" * 2**20), "bytes": Step(b"no text"), "none": None}.get(kind, Step(" ".join(self.said)))

    def score(self):
        return len(self.said)

class NoStep:
    pass

class Typo(Environment):
    def stp(self, text):
        return Step(done=True)

class Raises(Environment):
    def __init__(self):
        raise OSError("no display")

    def step(self, text):
        return Step(done=True)
"""


@pytest.fixture(scope="module")
def bad(tmp_path_factory) -> str:
    file = tmp_path_factory.mktemp("environment") / "bad.py"
    file.write_text(BAD)
    return str(file)


PROBLEM = {"prompt": "", "answer": None, "meta": {}, "seed": 0}


def failure(pool: EnvironmentPool, *texts: str, key: int = 0) -> tuple[str, str]:
    found = pool.ask(key, PROBLEM, list(texts), False)
    assert isinstance(found, Failure), found
    return found.kind, found.message


def test_a_bad_turn_is_an_outcome_with_a_code_and_the_next_episode_goes_on(bad):
    pool = EnvironmentPool(f"{bad}:Bad", "plain")
    good = {"observation": "fine", "result": None, "calls": 0, "errors": 0}  # and "places"
    cases = [
        ("hang", "timeout", "no answer within 3 s"),
        ("spin", "timeout", "no answer within 3 s"),
        ("exit", "died", "exit status 7"),
        ("segfault", "died", "exit status -11"),
        ("memory", "died", "ran out of memory"),
        ("raise", "raised", "KeyError: 'no such door'"),
        ("quit", "raised", "SystemExit: 3"),
        ("print", "raised", "EOFError: EOF when reading a line"),
        ("long", "wrong", "an observation of 1048576 characters; at most 100000 are allowed"),
        ("bytes", "wrong", "an observation is no text: b'no text'"),
        ("none", "wrong", "step() returned NoneType, expected Step"),
    ]
    for number, (kind, code, message) in enumerate(cases):
        found, said = failure(pool, kind, key=2 * number)
        assert (found, said.rpartition("\n")[2][-len(message) :]) == (code, message), kind
        assert pool.ask(2 * number, PROBLEM, ["fine"], False).items() >= good.items(), kind
    pool.close()


def test_an_episode_that_ends_with_turns_that_were_answered_is_not_played_again(tmp_path):
    """As when the observation leaves no room: a tool with effects would have them twice."""
    file = tmp_path / "log.py"
    log = tmp_path / "log.txt"
    file.write_text(f"""
from common.rollout.environments import Environment, Step
def note(word):
    with open({str(log)!r}, "a") as file:
        file.write(word + " ")
class Log(Environment):
    def reset(self, problem):
        note("reset")
    def step(self, text):
        note(text)
        return Step("on")
    def score(self):
        return 1.0
""")
    pool = EnvironmentPool(f"{file}:Log", "plain")
    for texts in (["a"], ["b", "c"]):
        key = len(texts)
        for turn in range(len(texts)):
            assert pool.ask(key, PROBLEM, texts[: turn + 1], False)["observation"] == "on"
        assert pool.ask(key, PROBLEM, texts, True, again=True)["result"][0] == 1.0
    assert log.read_text().split() == ["reset", "a", "reset", "b", "c"]
    pool.close()


@pytest.mark.parametrize("name", ["answer", "call", "error", "format", "problem", "turns"])
def test_a_tool_has_no_name_that_tools_has_for_something_else(name):
    with pytest.raises(BadInput, match=f"tool {name}: "):
        tools.schemas(type("Mine", (tools.Tools,), {name: lambda self: "said"}))


def test_a_process_that_is_out_of_memory_is_replaced(bad):
    """Other episodes of it may hold the memory. Without a new process all later ones would fail as well."""
    pool = EnvironmentPool(f"{bad}:Bad", "plain")
    pool.workers = pool.workers[:1]
    pool.ask(0, PROBLEM, ["fine"], False)
    before = pool.workers[0].child
    assert failure(pool, "memory", key=1)[0] == "died"
    assert pool.ask(2, PROBLEM, ["fine"], False)["observation"] == "fine" and pool.workers[0].child is not before
    pool.close()


@pytest.mark.parametrize("kind, code", [("hang", "timeout"), ("exit", "died")])
def test_episodes_beside_a_bad_one_take_their_turns_again(bad, kind, code):
    """All of one worker: those that had finished turns, those that were waiting, and only the guilty one fails."""
    pool = EnvironmentPool(f"{bad}:Bad", "plain")
    pool.workers = pool.workers[:1]
    for key in range(4):
        assert pool.ask(key, PROBLEM, [f"{key}"], False)["observation"] == f"{key}"
    with ThreadPoolExecutor(8) as threads:
        waiting = {key: threads.submit(pool.ask, key, PROBLEM, [f"{key}", "wait"], False) for key in range(3)}
        guilty = threads.submit(failure, pool, "3", kind, key=3)
    assert guilty.result()[0] == code
    assert [answer.result()["observation"] for answer in waiting.values()] == ["0 wait", "1 wait", "2 wait"]
    assert pool.ask(0, PROBLEM, ["0", "wait", "more"], True)["result"] == [3.0, 1.0, None, {}]
    pool.close()


def test_waiting_environments_wait_at_the_same_time(bad):
    pool = EnvironmentPool(f"{bad}:Bad", "plain")
    pool.workers = pool.workers[:1]
    pool.ask(THREADS, PROBLEM, ["fine"], False)  # the process has started
    began = time.monotonic()
    with ThreadPoolExecutor(THREADS) as threads:
        list(threads.map(lambda key: pool.ask(key, PROBLEM, ["wait"], False), range(THREADS)))
    assert time.monotonic() - began < 10, "one after the other would take 64 s"
    pool.close()


COMPUTES = """
import time
from common.rollout.environments import Environment, Step, workers

workers.COMPUTING = 0.01  # of a limit that a busy machine keeps, too

class Computes(Environment):
    # Its observation is how many steps compute at that moment.
    seconds = 30
    at_once = []

    def reset(self, problem):
        pass

    def step(self, text):
        self.at_once.append(self)
        began = time.thread_time()
        while time.thread_time() - began < 0.3:
            pass
        found = str(len(self.at_once))
        self.at_once.remove(self)
        return Step(found)

    def score(self):
        return 0
"""


def test_environments_that_compute_share_a_core_and_none_is_killed_for_being_late(tmp_path):
    """All together they compute for at most a share of the time limit, which is one step of 0.3 s here. Before anyone
    knows how long a step takes, it is four.
    """
    (tmp_path / "computes.py").write_text(COMPUTES)
    pool = EnvironmentPool(f"{tmp_path}/computes.py:Computes", "plain")
    (worker,) = pool.workers = pool.workers[:1]
    pool.ask(0, PROBLEM, ["a"], False)
    child = worker.child
    with ThreadPoolExecutor(8) as threads:
        answers = list(threads.map(lambda key: pool.ask(key, PROBLEM, ["a"], False), range(1, 9)))
    assert [answer["observation"] for answer in answers] == ["1"] * 8
    assert worker.child is child
    pool.close()


def test_an_engine_waits_a_moment_for_replies_and_goes_on_without_slow_ones(monkeypatch):
    monkeypatch.setattr("common.rollout.turns.PATIENCE", 2.0)
    release = threading.Event()

    def reply(row: int) -> list[int]:
        if row == 1:
            release.wait(60)
        return [row]

    replies = Replies(reply)
    for row in (3, 1, 2):
        replies.ask(row)
    assert replies.take(idle=False) == [(2, [2]), (3, [3])], "in the order of their rows"
    replies.ask(4)
    time.sleep(3.0)  # a forward of the engine, in which the environment has answered
    began = time.monotonic()
    assert replies.take(idle=False) == [(4, [4])]
    assert replies.take(idle=False) == [], "patience with slow ones has ended"
    assert time.monotonic() - began < 1.9
    release.set()
    assert replies.take(idle=True) == [(1, [1])]


class StepLoop:
    """vLLM's engine, which finishes every request in the next step with the token 7."""

    def __init__(self):
        scheduler = SimpleNamespace(max_num_batched_tokens=99, enable_chunked_prefill=True)
        self.vllm_config, self.waiting, self.asked = SimpleNamespace(scheduler_config=scheduler), [], 0

    def enqueue(self, prompts: list[dict], sampling, use_tqdm: bool) -> list[str]:
        self.asked += 1
        self.waiting.append(f"{self.asked}")
        return [f"{self.asked}-x"]

    def step(self) -> list:
        sampled = SimpleNamespace(token_ids=[7], logprobs=SimpleNamespace(logprobs=[-1.0]), finish_reason="stop")
        names, self.waiting = self.waiting, []
        return [SimpleNamespace(request_id=name, finished=True, outputs=[sampled]) for name in names]


def in_one_process(reply, world, monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(SamplingParams=SimpleNamespace))
    loop = StepLoop()
    llm = SimpleNamespace(llm_engine=loop, enqueue=loop.enqueue)
    own = SimpleNamespace(size=1, rollout_tp=1, engine_index=0, tp_group=None, device=world.device)
    engine = SimpleNamespace(llm=llm, world=own, longest=99, weight_version=0)
    settings = {"n": 1, "max_tokens": 9, "temperature": 1.0}
    return vllm_turns.converse(engine, [[5], [5], [5]], settings, 0, reply)


def on_a_server(reply, world, monkeypatch):
    choice = {"index": 0, "token_ids": [7], "logprobs": {"content": [{"logprob": -1.0}]}, "finish_reason": "stop"}
    found = {"choices": [{**choice, "weight_versions": [{"version": "4", "start": 0, "end": 1}]}]}
    transport = httpx.MockTransport(lambda request: httpx.Response(200, json=found))
    monkeypatch.setattr(httpx.AsyncHTTPTransport, "handle_async_request", transport.handle_async_request)
    rows = open_turns([[5], [5], [5]], 1, 9)
    settings = {"n": 1, "max_tokens": 9, "temperature": 1.0, "stop_token_ids": [1]}
    conversations = servers.Conversations(vllm_api, rows, [0, 1, 2], settings, 0, reply)
    bodies = [conversations.body(row) for row in range(3)]
    requests = [("http://a", body) for body in bodies]
    asyncio.run(client.ask_all(requests, lambda: range(4, 5), None, conversations.follow, api=vllm_api))
    batch = collate_turns(rows, None, world.device)
    assert torch.equal(batch.weight_versions, 4 * batch.response_mask)  # an observation has no version
    return batch


@pytest.mark.parametrize("play", [in_one_process, on_a_server])
def test_nobody_waits_for_a_slow_environment(play, world, monkeypatch):
    """The first response has its answer when the others have ended, after three turns each."""
    ended, waited = threading.Semaphore(0), []

    def reply(index: int, turns) -> list[int] | None:
        if index == 0 and len(turns.starts) == 1:
            waited.extend(ended.acquire(timeout=60) for _ in range(2))
            return [9, 9]
        if len(turns.starts) < 3:
            return [9]
        if index:
            ended.release()
        return None

    batch = play(reply, world, monkeypatch)
    assert waited == [True, True]
    assert batch.response_ids == [[7, 9, 9, 7, 9, 7], [7, 9, 7, 9, 7], [7, 9, 7, 9, 7]]
    assert batch.response_mask.int().tolist() == [[1, 0, 0, 1, 0, 1], *[[1, 0, 1, 0, 1, 0]] * 2]
    assert torch.equal(batch.rollout_logprobs, -batch.response_mask.float())


def test_the_hf_engine_cuts_a_turn_off_at_the_room_of_its_own_response():
    """All turns of a forward share the largest limit. The second response has heard more, so less room is left."""
    engine = object.__new__(HFEngine)
    engine.world, engine.weight_version = SimpleNamespace(device=torch.device("cpu")), 0
    limits = []

    def sample(prompts, temperature, limit):
        limits.append(limit)
        turn = [7, 1] if len(limits) == 1 else [5, 6, 7, 1]
        return [Response(turn, [-1.0] * len(turn), False) for _ in prompts]

    def reply(index: int, turns) -> list[int] | None:
        return [9] * (2 + 2 * index) if len(turns.starts) == 1 else None

    engine.sample = sample
    rollout = engine.converse([[20], [21]], 1, 1.0, 9, reply)
    assert limits == [9, 5]
    assert rollout.response_ids == [[7, 1, 9, 9, 5, 6, 7, 1], [7, 1, 9, 9, 9, 9, 5, 6, 7]]
    assert rollout.truncated.tolist() == [False, True]
    assert rollout.response_mask.sum(1).tolist() == [6, 5]


ROOM = 9


def asked_in_one_process(prompts: list[int], rank: int, size: int, seed: int, reply, monkeypatch) -> list[dict]:
    """The requests for all turns of two responses to each prompt, from an engine in a rank's process."""
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(SamplingParams=SimpleNamespace))
    loop, requests = StepLoop(), []

    def enqueue(prompts, sampling, use_tqdm):
        (prompt,) = prompts
        requests.append({"ids": prompt["prompt_token_ids"], "seed": sampling.seed, "room": sampling.max_tokens})
        return loop.enqueue(prompts, sampling, use_tqdm)

    llm = SimpleNamespace(llm_engine=loop, enqueue=enqueue)
    own = SimpleNamespace(size=size, rollout_tp=1, engine_index=rank, tp_group=None, device=torch.device("cpu"))
    engine = SimpleNamespace(llm=llm, world=own, longest=99, weight_version=0)
    settings = {"n": 2, "max_tokens": ROOM, "temperature": 1.0}
    vllm_turns.converse(engine, [[prompt] for prompt in prompts], settings, seed, reply)
    return requests


def asked_of_servers(prompts: list[int], rank: int, size: int, seed: int, reply, monkeypatch) -> list[dict]:
    """The same from a rank that asks two servers. Without a reply a request is for both responses to a prompt."""
    engine, requests = object.__new__(servers.ServerEngine), []
    engine.world = SimpleNamespace(size=size, rank=rank, device=torch.device("cpu"))
    engine.urls, engine.stop_token_ids, engine.never = ["http://a", "http://b"], [1], ()
    engine.api = vllm_api

    def ask(bodies, done=None, follow=None):
        answers = []
        for i, (url, body) in enumerate(bodies):
            while body is not None:
                sampling = body["sampling_params"]
                request = {"ids": body["token_ids"], "seed": sampling["seed"], "room": sampling["max_tokens"]}
                requests.append({**request, "url": url})
                answers.append([Response([7], [-1.0], False, [0])] * sampling["n"])
                body = follow(i, answers[-1][0]) if follow else None
        return answers

    monkeypatch.setattr(engine, "ask", ask)
    engine.generate([[prompt] for prompt in prompts], 2, 1.0, ROOM, seed, reply=reply)
    return requests


@pytest.mark.parametrize("asked", [asked_in_one_process, asked_of_servers])
def test_every_turn_has_a_seed_of_its_own(asked, monkeypatch):
    """With that of another turn it would be sampled by the same noise. Four prompts on two ranks, three turns each."""
    replied = []

    def reply(index: int, turns) -> list[int] | None:
        replied.append((index, turns.prompt_ids))
        return [9, 9] if len(turns.starts) < 3 else None

    def of_step(seed: int) -> list[list[dict]]:
        return [asked([20 + rank, 22 + rank], rank, 2, seed, reply, monkeypatch) for rank in (0, 1)]

    step = [request for rank in of_step(5) for request in rank]
    assert {(index, ids[0] % 2, ids[0]) for index, ids in replied} == {(0, 0, 20), (1, 0, 22), (0, 1, 21), (1, 1, 23)}
    seeds = {request["seed"] for request in step}
    assert len(seeds) == len(step) == 4 * 2 * 3
    again, other = ([request for rank in of_step(seed) for request in rank] for seed in (5, 6))
    by_ids = lambda requests: sorted((*request["ids"], request["seed"]) for request in requests)
    assert by_ids(again) == by_ids(step), "a step that is repeated is the same step"
    assert seeds.isdisjoint(request["seed"] for request in other)
    for request in step:
        turns_before = request["ids"].count(7)
        assert request["ids"] == [request["ids"][0], *[7, 9, 9] * turns_before]
        assert request["room"] == ROOM - 3 * turns_before, "the limit is that of the whole episode"


@pytest.mark.parametrize("reply", [None, lambda index, turns: None], ids=["one turn", "episodes"])
def test_seed_and_server_of_a_prompt_do_not_depend_on_the_number_of_ranks(reply, monkeypatch):
    def asked(prompts: list[int], rank: int, size: int) -> list[tuple]:
        requests = asked_of_servers(prompts, rank, size, 5, reply, monkeypatch)
        return [(request["ids"][0], request["seed"], request["url"]) for request in requests]

    prompts = list(range(20, 28))
    alone = asked(prompts, 0, 1)
    shared = [entry for rank in range(4) for entry in asked(prompts[rank::4], rank, 4)]
    assert sorted(alone) == sorted(shared)
    assert len({seed for _, seed, _ in alone}) == len(alone)
    assert {url for *_, url in alone} == {"http://a", "http://b"}


@pytest.mark.parametrize(
    "name, message",
    [
        ("Missing", 'has no subclass of Environment with the name "Missing"'),
        ("NoStep", 'has no subclass of Environment with the name "NoStep"'),
        ("Typo", "Typo has no method step(self, text)"),
    ],
)
def test_a_class_that_is_no_environment_is_refused(bad, name, message):
    with pytest.raises(BadInput, match=re.escape(message)):
        EnvironmentPool(f"{bad}:{name}", "plain")
    assert "no display" in failure(EnvironmentPool(f"{bad}:Raises", "plain"), "fine")[1]


@pytest.mark.parametrize(
    "spec, message",
    [
        ("calculater", "expected calculator, guess or file.py:Class"),
        ("gone.py:Game", "gone.py: file not found"),
        ("letters.py", "expected calculator, guess or file.py:Class"),
    ],
)
def test_a_name_that_is_no_environment_is_refused(spec, message):
    with pytest.raises(BadInput, match=re.escape(message)):
        Environments(spec, arithmetic.tokenizer(), [1])


def test_the_page_about_environments_has_code_that_runs(tmp_path):
    """Shop and Hangman of docs/environments.md, as files of a user."""
    shop, by_hand, hangman, _ = re.findall(
        r"```python\n(.*?)```", (ROOT / "docs/environments.md").read_text(), re.DOTALL
    )
    assert len(hangman.split("class Hangman")[1].strip().splitlines()) <= 15
    (tmp_path / "hangman.py").write_text(hangman)
    (tmp_path / "shop.py").write_text(shop)
    played = subprocess.run(
        [sys.executable, "-c", by_hand], cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True
    )
    assert played.stdout.decode().strip() == by_hand.rpartition("# ")[2].strip(), played.stderr
    pool = EnvironmentPool(f"{tmp_path}/hangman.py:Hangman", "plain")
    word = {**PROBLEM, "answer": "noon"}
    assert pool.ask(0, word, ["n"], False)["observation"] == "n__n"
    assert pool.ask(0, word, ["n", "x"], False)["observation"] == "n__n"
    assert pool.ask(0, word, ["n", "x", "o"], False)["result"] == [7 / 8, 1.0, None, {}]
    pool.close()
    pool = EnvironmentPool(f"{tmp_path}/shop.py:Shop", "plain")
    assert pool.ask(0, PROBLEM, ['price("pen", 3)'], False)["observation"] == ["6.0"] and not pool.info.has_score
    pool.close()


def test_the_optimal_player_of_guess_needs_49_fifteenths_turns():
    """Every number of the interval, found by halving: one turn for the middle, four for every second number."""
    turns = []
    for secret in tasks.INTERVAL:
        game = built_in.Guess()
        game.reset(EnvironmentProblem("", None, {"prompt": "10 to 24?"}, seed=0))
        game.secret, low, high, step = secret, 10, 24, None
        while not game.found:
            guess = (low + high) // 2
            step = game.step(f"{guess}")
            low, high = (guess + 1, high) if step.observation == "more" else (low, guess - 1)
        assert step.done and (game.score().score, game.score().acc) == (1, 1)
        turns.append(game.turns)
    assert sum(turns) == 49 and sorted(turns) == [1] + [2] * 2 + [3] * 4 + [4] * 8


def test_a_longer_game_of_guess_earns_less():
    """Counting up from 10 finds 14 in the fifth turn and 15 in the sixth. A seventh turn is not played."""
    for secret, score in ((13, 1), (14, 2 / 3), (15, 1 / 3), (16, 0)):
        game = built_in.Guess()
        game.reset(EnvironmentProblem("", None, {"prompt": "10 to 24?"}, seed=0))
        game.secret = secret
        for guess in range(10, 16):
            if game.step(f"{guess}").done:
                break
        assert game.score().score == pytest.approx(score) and game.score().acc == (score == 1)


# Runs

SMALL = ["--prompts-per-step", 8, "--mini-batches", 2, "--eval-prompts", 16, "--rollouts-every", 1]
SMALL += ["--dtype", "float32"]


def rows(folder, step: int) -> list[dict]:
    return [json.loads(line) for line in (folder / f"rollouts/step_{step:06d}.jsonl").read_text().splitlines()]


def unmeasured(row: dict) -> dict:
    """A row of the metrics without those of the engine's log-probs."""
    return {name: value for name, value in row.items() if not name.startswith("mismatch/")}


@pytest.fixture(scope="module")
def played(tmp_path_factory):
    """Four steps of GRPO with vLLM, and of a run that stops after two of them and goes on."""
    folder, flags = tmp_path_factory.mktemp("played"), ["--environment", "calculator", "--steps", 4, *SMALL]
    launch(ROOT / "algos/grpo.py", *flags, "--save-every", 2, "--run-dir", folder / "whole")
    shutil.copytree(folder / "whole/checkpoints/step_000002", folder / "parts/checkpoints/step_000002")
    launch(ROOT / "algos/grpo.py", *flags, "--run-dir", folder / "parts", "--resume", "auto")
    return folder


@pytest.mark.slow
def test_a_run_with_episodes_goes_on_bit_for_bit(played):
    """With vLLM, whose requests are sent as soon as environments have answered. Which responses share a forward depends
    on the machine's load, and the engine's log-probs on that, by rounding; nothing is computed from them.
    """
    whole, parts = ([unmeasured(row) for row in metrics(played / name)] for name in ("whole", "parts"))
    assert parts == whole[3:]  # without step 0, 1 and 2
    assert same(weights(played / "whole", 4), weights(played / "parts", 4))
    for step in (3, 4):
        one, other = (rows(played / name, step) for name in ("whole", "parts"))
        for row in one + other:
            row.pop("rollout_logprobs")
        assert one == other


@pytest.mark.slow
def test_rollout_files_metrics_and_the_viewer_show_turns(played):
    step, given = metrics(played / "whole")[-1], rows(played / "whole", 4)
    turns = [row["response"].split("\n> ") for row in given]
    assert step["environment/turns"] == sum(map(len, turns)) / len(given) > 1
    assert step["environment/calls"] == step["environment/turns"] - 1 and step["environment/failed_frac"] == 0
    assert step["response/length_mean"] == sum(sum(row["sampled"]) for row in given) / len(given)
    for row, (said, *heard) in zip(given, turns):
        holes = [not own for own in row["sampled"]]
        assert any(holes) == bool(heard) == said.startswith("mul(")
        assert all(x == 0 for x, hole in zip(row["rollout_logprobs"], holes) if hole)
        assert row["old_logprobs"] is None or all(x == 0 for x, hole in zip(row["old_logprobs"], holes) if hole)
        assert not heard or row["acc"] == (heard[0].split("\n")[-1].strip() == row["answer"])
    page = played / "page.html"
    launch(ROOT / "scripts/view_rollouts.py", played / "whole", "--html", page, "--limit", 0)
    assert page.read_text().count("from the environment") == sum(row["sampled"].count(0) for row in given)


AHEAD = ["--rollout-placement", "split", "--rollout-devices", max(CORES), "--max-inflight-batches", 2, "--tis-cap", 2]


@pytest.mark.slow
@pytest.mark.parametrize("ahead", [[], nightly(AHEAD)], ids=["here", "ahead"])
def test_a_slow_environment_changes_no_token_of_the_first_step(played, tmp_path, ahead):
    """A late answer makes other responses share its next forward. ahead: on a server, with two batches on their way."""
    if ahead and len(CORES) < 2:
        pytest.skip("a server wants a core of its own")
    (tmp_path / "late.py").write_text(
        "import time\n"
        "from common.rollout.environments.built_in import Calculator\n"
        "class Late(Calculator):\n"
        "    def step(self, text):\n"
        "        time.sleep(self.problem.seed % 3 / 20)\n"
        "        return super().step(text)\n"
    )
    flags = ["--environment", f"{tmp_path}/late.py:Late", "--dataset", "calculator", "--steps", 2, *SMALL]
    start = ["--model", arithmetic.warm_start("calculator"), *SHORT]
    launch(ROOT / "algos/grpo.py", *start, *flags, *ahead, "--run-dir", tmp_path / "run", servers=bool(ahead))
    fast, late = rows(played / "whole", 1), rows(tmp_path / "run", 1)
    assert [row["response_ids"] for row in late] == [row["response_ids"] for row in fast]
    assert [row["score"] for row in late] == [row["score"] for row in fast]
    steps = metrics(tmp_path / "run")[1:]
    assert len(steps) == 2 and all(step["environment/failed_frac"] == 0 for step in steps)
    assert [step["mismatch/staleness"] for step in steps] == ([0, 1] if ahead else [0, 0])


@pytest.mark.slow
def test_a_slow_or_broken_environment_does_not_end_the_run(tmp_path):
    """Of 16 prompts two have slow episodes, one has some that hang, one has some that die, and one says no text: codes,
    and a score of -1.
    """
    (tmp_path / "moody.py").write_text(
        "import os, time\n"
        "from common.rollout.environments import Step\n"
        "from common.rollout.environments.built_in import Calculator\n"
        "class Moody(Calculator):\n"
        "    seconds, failed_score = 2.0, -1.0\n"
        "    def step(self, text):\n"
        "        kind = self.problem.seed % 20\n"
        "        if kind in (1, 2):\n"
        "            time.sleep(0.5)\n"
        "        if kind == 18 and text:\n"
        "            time.sleep(60)\n"
        "        if kind == 4 and text:\n"
        "            os._exit(1)\n"
        "        return Step(b'12') if kind == 5 else super().step(text)\n"
    )
    flags = ["--environment", f"{tmp_path}/moody.py:Moody", "--dataset", "calculator", "--steps", 2, *SMALL]
    start = ["--model", arithmetic.warm_start("calculator"), *SHORT]
    result = launch(ROOT / "algos/grpo.py", *start, *flags, "--group-size", 4, "--run-dir", tmp_path / "run")
    given = rows(tmp_path / "run", 1) + rows(tmp_path / "run", 2)
    codes = {row["info"].get("environment") for row in given}
    assert codes == {None, "timeout", "died", "wrong"}
    assert all(row["score"] == -1 and row["acc"] == 0 for row in given if "environment" in row["info"])
    failed = [step["environment/failed_frac"] for step in metrics(tmp_path / "run")[1:]]
    assert sum(failed) / 2 == pytest.approx(sum("environment" in row["info"] for row in given) / len(given))
    printed = result.stderr + result.stdout
    assert printed.count("environment-failed") == 3  # one for each kind


def test_an_environment_that_cannot_be_imported_is_refused_before_a_model_is_loaded(tmp_path):
    (tmp_path / "syntax.py").write_text("class Any:\n    def\n")
    result = launch(ROOT / "algos/grpo.py", "--environment", "syntax.py:Any", check=False, cwd=tmp_path)
    assert result.returncode == 2 and "SyntaxError" in result.stderr
    assert "Traceback" not in result.stderr.partition("error[")[0]


@pytest.mark.parametrize("after", [0, 1])
def test_a_process_that_holds_pythons_lock_is_killed_though_its_pipe_is_full(bad, after):
    """A regular expression that never ends: no other thread of the process runs, and 30 requests of 20 kB wait."""
    pool = EnvironmentPool(f"{bad}:Bad", "plain")
    pool.workers = pool.workers[:1]
    text = "x" * 20_000
    with ThreadPoolExecutor(31) as threads:
        guilty = [threads.submit(failure, pool, "lock", key=99)]
        time.sleep(0.2 * after)
        waiting = [threads.submit(pool.ask, key, PROBLEM, [text], False) for key in range(30)]
    assert guilty[0].result()[0] == "timeout" and all(answer.result()["observation"] == text for answer in waiting)
    pool.close()


@pytest.mark.parametrize(
    "score, said",
    [
        ("return None", "expected a number or a Result"),
        ("return Result(0.5, 1.0, None, {'a': {(1, 2): 3}})", "TypeError: keys must be str"),
        ("return Result('high', 1.0)", "expected a number or None, got 'high'"),
    ],
)
def test_a_score_that_is_none_is_an_outcome_with_a_code(tmp_path, score, said):
    (tmp_path / "game.py").write_text(
        "from common.rollout.environments import Environment, Result, Step\n"
        f"class Game(Environment):\n    def step(self, text):\n        return Step(done=True)\n"
        f"    def score(self):\n        {score}\n"
    )
    pool = EnvironmentPool(f"{tmp_path}/game.py:Game", "plain")
    kind, message = failure(pool, "x")
    assert kind == ("raised" if "TypeError" in said else "wrong") and said in message
    pool.close()


def test_metrics_of_episodes_by_hand(world):
    """Means over episodes. Two calls of the first failed, and the environment of the second."""
    first, second = open_turns([[5], [6]], 1, 9)
    first.texts, first.calls, first.errors, first.seconds = ["a", "b", "c"], 5, 2, 3.0
    second.texts, second.failure, second.seconds = ["d"], "timeout", 1.0
    recorded = Metrics(world)
    object.__new__(Environments).log([first, second], recorded)
    assert recorded.sums == {
        "environment/turns": [(4, 2)],
        "environment/calls": [(5, 2)],
        "environment/errors": [(2, 2)],
        "environment/failed_frac": [(1, 2)],
        "time/environment": [(4.0, 2)],
    }


@pytest.mark.parametrize("here, elsewhere, stops", [(3, 0, False), (2, 3, True), (0, 5, True)])
def test_the_episodes_of_all_ranks_decide_together_whether_too_many_failed(world, here, elsewhere, stops):
    """Three of this rank and five of another one. If only one of them stopped, the other would wait for it."""

    class Two(type(world)):
        def sum(self, value: float) -> float:
            return value + other.pop(0)

    other = [elsewhere, 5]
    environments = object.__new__(Environments)
    environments.spec, environments.first_failures = "mine", {"died": "died after ''"}
    episodes = open_turns([[5]] * 3, 1, 9)
    for turns in episodes[:here]:
        turns.failure = "died"
    with pytest.raises(RunFailed, match=f"{here + elsewhere} of 8") if stops else contextlib.nullcontext():
        environments.results(episodes, Two(**vars(world)))


def test_more_than_half_of_the_episodes_that_fail_end_the_run(bad, world, capfd):
    environments = Environments(f"{bad}:Bad", arithmetic.tokenizer(), [1])
    reward = Rewards(
        {"gsm8k": rewards.load_one("gsm8k")}, {"gsm8k": 1.0}
    )  # also where the environment's own score is not asked
    reward.environment = environments
    prompts = [Prompt(f"p:{i}", "", [5], "7") for i in range(3)]
    ids = arithmetic.tokenizer()("raise", add_special_tokens=False)["input_ids"]

    def play(raising: int):
        rows = open_turns([[5]] * 3, 1, 9)
        for i, turns in enumerate(rows):
            turns.add([*(ids if i < raising else [7, 8]), 1], [-1.0] * (1 + len(ids if i < raising else [7, 8])), False)
            environments.replies(prompts, 0)(i, turns)
        return reward.score(prompts, [""] * 3, collate_turns(rows, 0, world.device), world, 1)

    assert [result.score for result in play(1)] == [0.0] * 3
    with pytest.raises(RunFailed, match="2 of 3 .*'raised': 2.*'raise'"):
        play(2)
    assert capfd.readouterr().err.count("environment-failed") == 1  # the first of a kind is a warning
    environments.pool.close()


def test_lengths_count_what_the_limit_counts_and_texts_and_ids_only_what_the_policy_wrote(world):
    """An observation brings a response nearer to --max-response-tokens, and with it to DAPO's penalty."""
    seen = []

    def look(items, lengths, truncated):
        seen.extend([(item.response, item.response_ids) for item in items] + lengths)
        return [Result(0.0, 0.0)] * len(items)

    (turns,) = open_turns([[5]], 1, 9)
    turns.add([7, 8, 1], [-1.0] * 3, False)
    turns.observe([9, 9, 9])
    turns.add([6, 1], [-1.0] * 2, False)
    turns.texts = ["seven eight", "six"]
    reward = Rewards({"look": look}, {"look": 1.0})
    reward.environment = SimpleNamespace(results=lambda episodes, world: [Result(1.0, 1.0)])
    rollout = collate_turns([turns], 0, world.device)
    reward.score([Prompt("p:0", "", [5], "7")], [""], rollout, world, 1)
    assert seen == [("seven eight\nsix", [7, 8, 1, 6, 1]), 8]
    assert rollout.lengths.tolist() == [8] and rollout.response_mask.sum(1).tolist() == [5]
