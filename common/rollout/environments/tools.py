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
import functools
import inspect
import json
import re
from dataclasses import dataclass, field
from typing import Any

from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic_core import ArgsKwargs

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
        tools = tools_of(type(self))
        if call.name is None:
            return self.error('a call is a JSON object with "name" and "arguments", and nothing else'), True
        if call.name not in tools:
            return self.error(f"no tool is named {call.name}; there are {', '.join(tools)}"), True
        try:
            value = tools[call.name].validate_python(ArgsKwargs((self, *call.arguments), call.named_arguments))
            observation = value if isinstance(value, str) else json.dumps(value, default=str)
        except ValidationError as error:
            method = getattr(type(self), call.name)
            return self.error(f"TypeError: {explained(error, method)}"), True
        except Exception as error:  # a tool may raise anything; the model reads it and may try again
            return self.error(f"{type(error).__name__}: {error}"), True
        return observation, False

    def error(self, message: str) -> str:
        """An error as the model reads it."""
        return f"error: {message}" if self.format == "plain" else json.dumps({"error": message})


@functools.cache
def tools_of(kind: type[Tools]) -> dict[str, TypeAdapter]:
    """Name -> what checks the arguments and calls the method, for the public methods that a class adds to Tools.

    Raises TypeError for a static method, because its first argument would be taken for self.
    """
    tools = {}
    for name in dir(kind):
        method = getattr(kind, name)
        if name.startswith("_") or hasattr(Tools, name) or not inspect.isfunction(method):
            continue
        if isinstance(inspect.getattr_static(kind, name), staticmethod):
            raise TypeError(f"tool {name}: is a staticmethod; give it self")
        # Strict: "3" and True are no whole numbers. A whole number is a float, as in JSON.
        tools[name] = TypeAdapter(method, config=ConfigDict(strict=True))
    return tools


def schemas(kind: type[Tools]) -> list[dict]:
    """The tools in the JSON form that chat templates take. Raises TypeError for a parameter without a type."""
    tools = []
    for name, adapter in tools_of(kind).items():
        schema = adapter.json_schema()
        properties = schema["properties"]
        first_parameter, *_ = properties
        del properties[first_parameter]  # self
        for parameter, description in properties.items():
            # Models have seen neither of them in the schemas that they were trained with.
            description.pop("title", None)
            description.pop("default", None)
            if not description:
                raise TypeError(f'tool {name}: parameter "{parameter}" has no type')
        required = [parameter for parameter in schema["required"] if parameter in properties]
        parameters = {"type": "object", "properties": properties, "required": required}
        if "$defs" in schema:
            parameters["$defs"] = schema["$defs"]
        documentation = inspect.getdoc(getattr(kind, name)) or ""
        function = {"name": name, "description": documentation, "parameters": parameters}
        tools.append({"type": "function", "function": function})
    return tools


def explained(error: ValidationError, method: Any) -> str:
    """What is wrong with the arguments of a call, in one line."""
    parameters = list(inspect.signature(method).parameters)
    reasons = []
    for detail in error.errors(include_url=False):
        place, *_ = detail["loc"] or ("",)  # a position or a name
        if isinstance(place, int) and place < len(parameters):
            place = parameters[place]
        reasons.append(f"{place}: {detail['msg']}")
    return "; ".join(reasons)


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
