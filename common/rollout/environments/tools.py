"""Tools: an environment whose methods the policy calls, in the format of its model.

    class Shop(Tools):
        def price(self, item: str, count: int = 1) -> float:
            \"\"\"Price of an item in euros.\"\"\"

    <tool_call>{"name": "price", "arguments": {"item": "pen"}}</tool_call>      hermes: Qwen, SmolLM3, Hermes
    {"name": "price", "parameters": {"item": "pen"}}                            llama: Llama 3
    price("pen", count=2)                                                       plain: the last line of a turn

A turn without a call is the final answer. What a method returns, or the error that it raises, is the observation.

pydantic writes the schema of a method and checks the arguments of a call. Two other libraries were tried:
- transformers.utils.get_json_schema refuses a method without a Google-style description of each argument.
- vllm.tool_parsers need seconds to import in each worker. They take a call that cannot be parsed for plain text, which
  would end the episode. Here the model reads what is wrong and may try again.
"""

import ast
import inspect
import json
import re
from dataclasses import dataclass, field
from typing import Any

from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic_core import ArgsKwargs

from common.errors import BadInput
from common.rollout.environments import Environment, Problem, Step


@dataclass(frozen=True)
class ToolCall:
    name: str | None  # None: the call cannot be parsed
    arguments: list = field(default_factory=list)
    named_arguments: dict[str, Any] = field(default_factory=dict)


class Tools(Environment):
    """Public methods of a subclass are tools. They need type annotations; the docstring is what the model reads."""

    role = "tool"
    max_calls = 16  # turns with calls, after which the episode ends
    format = "plain"  # the worker sets it to the model's

    def reset(self, problem: Problem) -> None:
        """A subclass that overrides it must call it."""
        super().reset(problem)
        self.turns = 0
        self.answer = ""

    def step(self, text: str) -> Step:
        """Run the calls of a turn. Without one, the text is self.answer, and the episode ends."""
        calls = PARSERS[self.format](text)
        if not calls:
            self.answer = text
            return Step(done=True)
        self.turns += 1
        observations = []
        errors = 0
        for call in calls:
            observation, failed = self.call(call)
            observations.append(observation)
            errors += failed
        return Step(observations, done=self.turns >= self.max_calls, calls=len(calls), errors=errors)

    def call(self, call: ToolCall) -> tuple[str, bool]:
        """(what the model reads, whether the call failed)."""
        if call.name is None:
            return self.error('a call is a JSON object with "name" and "arguments", and nothing else'), True
        names = tool_names(type(self))
        if call.name not in names:
            return self.error(f"no tool is named {call.name}; there are {', '.join(names)}"), True
        tool = checked_tool(self, call.name)
        try:
            value = tool.validate_python(ArgsKwargs(tuple(call.arguments), call.named_arguments))
            return (value if isinstance(value, str) else json.dumps(value, default=str)), False
        except ValidationError as error:
            reasons = [f"argument {detail['loc'][0]}: {detail['msg']}" for detail in error.errors()]
            return self.error("; ".join(reasons)), True
        except Exception as error:  # a tool may raise anything; the model reads it and may try again
            return self.error(f"{type(error).__name__}: {error}"), True

    def error(self, message: str) -> str:
        """An error as the model reads it."""
        return f"error: {message}" if self.format == "plain" else json.dumps({"error": message})


def tool_names(kind: type[Tools]) -> list[str]:
    """Names of the public methods that a class adds to those of Tools."""
    added = [name for name in dir(kind) if not name.startswith("_") and not hasattr(Tools, name)]
    return [name for name in added if inspect.isroutine(getattr(kind, name))]


def checked_tool(tools: Tools, name: str) -> TypeAdapter:
    """A method that checks its arguments. Strict: "3" and True are no whole numbers, but a whole number is a float."""
    return TypeAdapter(getattr(tools, name), config=ConfigDict(strict=True))


def schemas(kind: type[Tools]) -> list[dict]:
    """The tools in the JSON form that chat templates take. Raises BadInput for a parameter without a type."""
    tools = []
    for name in tool_names(kind):
        # A schema needs methods without self, and so an object. Its __init__ may do anything, and is not called.
        schema = checked_tool(kind.__new__(kind), name).json_schema()
        for parameter, description in schema["properties"].items():
            # Models have seen neither of them in the schemas that they were trained with.
            description.pop("title", None)
            description.pop("default", None)
            if not description:
                raise BadInput(f'tool {name}: parameter "{parameter}" has no type')
        parameters = {"required": []} | schema
        del parameters["additionalProperties"]
        documentation = inspect.getdoc(getattr(kind, name)) or ""
        function = {"name": name, "description": documentation, "parameters": parameters}
        tools.append({"type": "function", "function": function})
    return tools


def format_of(chat_template: str | dict[str, str] | None) -> str:
    """The format of calls that a model was trained with, as far as its chat template says; "" for an unknown one."""
    if isinstance(chat_template, dict):  # several templates, one of them for tools
        chat_template = chat_template.get("tool_use") or chat_template["default"]
    if not chat_template:
        return "plain"
    if "<function=" in chat_template or "<arg_key>" in chat_template:
        return ""
    if "<tool_call>" in chat_template:
        return "hermes"
    return "llama" if "ipython" in chat_template else "plain"


def hermes(text: str) -> list[ToolCall]:
    """All calls between <tool_call> and </tool_call> or the end of the turn."""
    marked = re.findall(r"<tool_call>(.*?)(?:</tool_call>|$)", text, re.DOTALL)
    return [parse_json(call, "arguments") for call in marked]


def llama(text: str) -> list[ToolCall]:
    """A turn that is a call and nothing else, as Llama 3 writes it. Several are separated by ";"."""
    text = text.strip().removeprefix("<|python_tag|>")
    if not text.startswith("{"):
        return []
    calls = [parse_json(call, "parameters") for call in re.split(r"(?<=\})\s*;\s*(?=\{)", text)]
    return [call for call in calls if call.name is not None]


def parse_json(text: str, key: str) -> ToolCall:
    """The call of a JSON object with a name and, under `key`, named arguments. Any other text is one without a name."""
    try:
        call = json.loads(text)
    except (ValueError, RecursionError):
        return ToolCall(None)
    if not isinstance(call, dict):
        return ToolCall(None)
    name = call.get("name")
    named_arguments = call.get(key, {})
    if not isinstance(name, str) or not isinstance(named_arguments, dict):
        return ToolCall(None)
    return ToolCall(name, named_arguments=named_arguments)


def plain(text: str) -> list[ToolCall]:
    """The last line, if it is NAME(ARGUMENTS) with plain values. Any other line is not a call."""
    line = text.strip().rpartition("\n")[2]
    if not re.fullmatch(r"[a-z_]\w*\(.{0,1000}\)", line):
        return []
    try:
        call = ast.parse(line, mode="eval").body
        arguments = [ast.literal_eval(value) for value in call.args]
        named_arguments = {keyword.arg: ast.literal_eval(keyword.value) for keyword in call.keywords}
        return [ToolCall(call.func.id, arguments, named_arguments)]
    except (SyntaxError, ValueError, AttributeError, MemoryError, RecursionError):
        return []


PARSERS = {"hermes": hermes, "llama": llama, "plain": plain}
