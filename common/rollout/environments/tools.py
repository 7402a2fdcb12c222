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
from collections.abc import Collection
from typing import Any

from pydantic import AliasChoices, BaseModel, ConfigDict, Field, TypeAdapter, ValidationError
from pydantic_core import ArgsKwargs

from common.errors import BadInput
from common.rollout.environments import Environment, Problem, Step

DECODER = json.JSONDecoder()
SEPARATOR = re.compile(r"(?<=\})\s*;\s*(?=\{)")  # between two calls of Llama 3
# Keys next to a call's name and arguments that tell nothing about what to do, as APIs of chat models have them.
BOOKKEEPING = {"id", "call_id", "index", "type"}


class ToolCall(BaseModel):
    """A call as models write it in JSON, or as a line of Python, which may have positional arguments."""

    model_config = ConfigDict(extra="allow")

    name: str
    arguments: dict[str, Any] = Field({}, validation_alias=AliasChoices("arguments", "parameters"))
    positional: list = []

    def lost(self, parameters: Collection[str]) -> list[str]:
        """Keys of the call that may hold arguments, and that nothing reads.

        parameters: names of the tool's parameters.
        """
        return [key for key, value in self.model_extra.items() if self.may_hold_arguments(key, value, parameters)]

    def may_hold_arguments(self, key: str, value: Any, parameters: Collection[str]) -> bool:
        if key == "parameters":
            # The model gave both, and "arguments" was read.
            return value not in ({}, None, self.arguments)
        if key in parameters:
            return True
        if key in BOOKKEEPING:
            return False
        if "arguments" not in self.model_fields_set:
            return True
        # {"arguments": {}, "args": {"item": "pen"}}
        return not self.arguments and isinstance(value, dict) and bool(value)


TAKEN = ("answer", "call", "error", "format", "problem", "turns")  # attributes of Tools, so no names for tools


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

    def call(self, call: ToolCall | None) -> tuple[str, bool]:
        """(what the model reads, whether the call failed). None is a call that cannot be parsed."""
        if call is None:
            form = f'a call is a JSON object with "name" and "{arguments_key(self.format)}", and nothing else'
            return self.error(form), True
        names = tool_names(type(self))
        if call.name not in names:
            return self.error(f"no tool is named {call.name}; there are {', '.join(names)}"), True
        tool = checked_tool(self, call.name)
        if call.model_extra:
            lost = call.lost(tool.json_schema()["properties"])
            if lost:
                # Without them the tool might do something else than the model asked for.
                keys = ", ".join(json.dumps(key) for key in lost)
                place = f'a call has its arguments in the object "{arguments_key(self.format)}"'
                return self.error(f"{keys} would be lost; {place}"), True
        try:
            value = tool.validate_python(ArgsKwargs(tuple(call.positional), call.arguments))
            return (value if isinstance(value, str) else json.dumps(value, default=str)), False
        except ValidationError as error:
            reasons = []
            for detail in error.errors():
                # loc is the position of an argument, counted from 0, or its name. Empty: the tool itself raised this.
                place = f"argument {detail['loc'][0]}: " if detail["loc"] else ""
                reasons.append(place + detail["msg"])
            return self.error("; ".join(reasons)), True
        except Exception as error:
            # A tool may raise anything. The model reads it and may try again.
            return self.error(f"{type(error).__name__}: {error}"), True

    def error(self, message: str) -> str:
        """An error as the model reads it."""
        return f"error: {message}" if self.format == "plain" else json.dumps({"error": message})


def arguments_key(call_format: str) -> str:
    """The key under which a model was trained to write arguments."""
    return "parameters" if call_format == "llama" else "arguments"


def tool_names(kind: type[Tools]) -> list[str]:
    """Names of the public methods that a class adds to those of Tools."""
    added = [name for name in dir(kind) if not name.startswith("_") and not hasattr(Tools, name)]
    return [name for name in added if inspect.isroutine(getattr(kind, name))]


def checked_tool(tools: Tools, name: str) -> TypeAdapter:
    """A method that checks its arguments. Strict: "3" and True are no whole numbers, but a whole number is a float."""
    return TypeAdapter(getattr(tools, name), config=ConfigDict(strict=True))


def check_names(kind: type[Tools]) -> None:
    """Refuse tools with a name that Tools has for something else. Raises BadInput."""
    for name in TAKEN:
        method = getattr(kind, name, None)
        if inspect.isroutine(method) and method is not getattr(Tools, name, None):
            raise BadInput(f"tool {name}: Tools has this name for something else; choose another one")


def schemas(kind: type[Tools]) -> list[dict]:
    """The tools in the JSON form that chat templates take. Raises BadInput for a parameter without a type."""
    check_names(kind)
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
    # A model may have several templates, one of them for tools.
    if isinstance(chat_template, dict):
        chat_template = chat_template.get("tool_use") or chat_template["default"]
    if not chat_template:
        return "plain"
    # Formats that are not written here, such as Qwen3-Coder's and GLM's.
    if "<function=" in chat_template or "<arg_key>" in chat_template:
        return ""
    if "<tool_call>" in chat_template:
        return "hermes"
    return "llama" if "ipython" in chat_template else "plain"


def hermes(text: str) -> list[ToolCall | None]:
    """All calls between <tool_call> and </tool_call> or the end of the turn."""
    calls = []
    _, opening, rest = text.partition("<tool_call>")
    while opening:
        # A string in the arguments may hold the closing tag. So if there is an object, the tag behind it counts.
        end = end_of_object(rest)
        behind = rest[end:].lstrip()
        if behind and not behind.startswith("</tool_call>"):
            end = 0
        inside, _, behind = rest[end:].partition("</tool_call>")
        calls.append(parse_json(rest[:end] + inside))
        _, opening, rest = behind.partition("<tool_call>")
    return calls


def end_of_object(text: str) -> int:
    """The place behind the JSON object that the text begins with; 0 if it begins with none."""
    start = len(text) - len(text.lstrip())
    if not text.startswith("{", start):
        return 0
    try:
        return DECODER.raw_decode(text, start)[1]
    except (ValueError, RecursionError):
        return 0


def llama(text: str) -> list[ToolCall | None]:
    """A turn that is a call and nothing else, as Llama 3 writes it. Several are separated by ";"."""
    text = text.strip().removeprefix("<|python_tag|>")
    # Llama 3 calls tools in a turn of their own. JSON behind other words is no call, and other JSON is an answer.
    if not text.startswith("{"):
        return []
    calls = []
    for part in split_objects(text):
        call = parse_json(part)
        # An object that has a name and arguments of a wrong form was meant as a call, too.
        if call or names_a_call(part):
            calls.append(call)
    return calls


def split_objects(text: str) -> list[str]:
    """The JSON objects of a text that separates them by ";". A string in one of them may hold "};{"."""
    parts = []
    while separator := SEPARATOR.search(text, end_of_object(text)):
        parts.append(text[: separator.start()])
        text = text[separator.end() :]
    return [*parts, text]


def names_a_call(text: str) -> bool:
    """Whether the text is a JSON object with a name, and with arguments that parse_json() cannot read."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return False
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return False
    return "arguments" in value or "parameters" in value


def parse_json(text: str) -> ToolCall | None:
    try:
        return ToolCall.model_validate_json(text)
    except ValidationError:
        return None


def plain(text: str) -> list[ToolCall | None]:
    """The last line, if it is NAME(ARGUMENTS) with plain values. Any other line is not a call."""
    line = text.strip().rpartition("\n")[2]
    if not re.fullmatch(r"[a-z_]\w*\(.{0,1000}\)", line):
        return []
    # literal_eval() takes values only: no names, no attributes, no calls.
    try:
        call = ast.parse(line, mode="eval").body
        positional = [ast.literal_eval(value) for value in call.args]
        arguments = {keyword.arg: ast.literal_eval(keyword.value) for keyword in call.keywords}
        return [ToolCall(name=call.func.id, arguments=arguments, positional=positional)]
    except (SyntaxError, TypeError, ValueError, AttributeError, MemoryError, RecursionError):
        return []


PARSERS = {"hermes": hermes, "llama": llama, "plain": plain}
