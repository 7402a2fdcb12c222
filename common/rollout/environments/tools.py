"""Tools: an environment whose methods the policy calls, in the format of its model.

    class Shop(Tools):
        def price(self, item: str, count: int = 1) -> float:
            \"\"\"Price of an item in euros.\"\"\"

    <tool_call>{"name": "price", "arguments": {"item": "pen"}}</tool_call>      hermes: Qwen, SmolLM3, Hermes
    {"name": "price", "parameters": {"item": "pen"}}                            llama: Llama 3
    price("pen", count=2)                                                       plain: the last line of a turn

A turn without a call is the final answer. What a method returns, or the error that it raises, is the observation.
"""

import ast
import inspect
import json
import re
import types
import typing
from typing import Any

from common.rollout.environments import Environment, Problem, Step

JSON_TYPES = {int: "integer", float: "number", str: "string", bool: "boolean", list: "array", dict: "object"}
Call = tuple[str | None, list, dict]  # name, positional arguments, named arguments; no name: it cannot be read


class Tools(Environment):
    """Public methods of a subclass are tools. They need type annotations; the docstring is what the model reads."""

    role = "tool"
    max_calls = 16  # turns with calls, after which the episode ends
    format = "plain"  # the worker sets it to the model's

    def reset(self, problem: Problem) -> None:
        """A subclass that overrides it must call it."""
        super().reset(problem)
        self.turns, self.answer = 0, ""

    def step(self, text: str) -> Step:
        """Run the calls of a turn. Without one, the text is self.answer, and the episode ends."""
        calls = PARSERS[self.format](text)
        if not calls:
            self.answer = text
            return Step(done=True)
        self.turns += 1
        outcomes = [self.call(*call) for call in calls]
        errors = sum(failed for _, failed in outcomes)
        observations = [said for said, _ in outcomes]
        return Step(observations, self.turns >= self.max_calls, calls=len(calls), errors=errors)

    def call(self, name: str | None, given: list, named: dict) -> tuple[str, bool]:
        """(what the model reads, whether the call failed)."""
        if name is None:
            return self.error('a call is a JSON object with "name" and "arguments", and nothing else'), True
        method = tools_of(type(self)).get(name)
        if method is None:
            return self.error(f"no tool is named {name}; there are {', '.join(tools_of(type(self)))}"), True
        try:
            bound = inspect.signature(method).bind(self, *given, **named)
            for key, value in list(bound.arguments.items())[1:]:
                bound.arguments[key] = fit(key, value, typing.get_type_hints(method).get(key, Any))
            value = method(*bound.args, **bound.kwargs)
            return value if isinstance(value, str) else json.dumps(value, default=str), False
        except Exception as error:  # whatever a tool raises is said to the model, which may try again
            return self.error(f"{type(error).__name__}: {error}"), True

    def error(self, said: str) -> str:
        """An error as the model reads it."""
        return f"error: {said}" if self.format == "plain" else json.dumps({"error": said})


def tools_of(kind: type) -> dict[str, typing.Callable]:
    """Name -> method, for the public methods that the class adds to those of Tools. TypeError for a static one."""
    named = {name: getattr(kind, name) for name in dir(kind) if not name.startswith("_") and not hasattr(Tools, name)}
    if static := [name for name in named if isinstance(inspect.getattr_static(kind, name), staticmethod)]:
        raise TypeError(f"tool {static[0]}: is a staticmethod; give it self")
    return {name: method for name, method in named.items() if inspect.isfunction(method)}


def schemas(kind: type) -> list[dict]:
    """The tools in the JSON form that chat templates take. Raises TypeError for a parameter without a type."""
    found = []
    for name, method in tools_of(kind).items():
        hints, properties, required = typing.get_type_hints(method), {}, []
        for key, parameter in list(inspect.signature(method).parameters.items())[1:]:
            if key not in hints:
                raise TypeError(f'tool {name}: parameter "{key}" has no type')
            properties[key] = {"type": JSON_TYPES.get(plain_type(hints[key]), "string")}
            required += [key] if parameter.default is inspect.Parameter.empty else []
        parameters = {"type": "object", "properties": properties, "required": required}
        function = {"name": name, "description": inspect.getdoc(method) or "", "parameters": parameters}
        found.append({"type": "function", "function": function})
    return found


def plain_type(hint: Any) -> Any:
    """list of list[int], int of int | None, and any other type itself."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return plain_type(next(part for part in typing.get_args(hint) if part is not type(None)))
    return typing.get_origin(hint) or hint


def fit(key: str, value: Any, hint: Any) -> Any:
    """The value, as a float where that is expected of a whole number. Raises TypeError if its type is another."""
    kind = plain_type(hint)
    if value is None and type(None) in typing.get_args(hint):
        return None
    if kind is float and type(value) is int:
        return float(value)
    if kind in JSON_TYPES and (not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool)):
        raise TypeError(f"{key} must be {kind.__name__}, not {type(value).__name__}")
    return value


def format_of(chat_template: str | dict[str, str] | None) -> str:
    """The format of calls that a model was trained with, as far as its chat template says; "" for an unknown one."""
    if isinstance(chat_template, dict):  # several templates, one of them for tools
        chat_template = chat_template.get("tool_use") or chat_template["default"]
    if not chat_template:
        return "plain"
    if "<function=" in chat_template or "<arg_key>" in chat_template:
        return ""
    return "hermes" if "<tool_call>" in chat_template else "llama" if "ipython" in chat_template else "plain"


def hermes(text: str) -> list[Call]:
    """All calls between <tool_call> and </tool_call> or the end of the turn. One that cannot be read has no name."""
    marked = re.findall(r"<tool_call>(.*?)(?:</tool_call>|$)", text, re.DOTALL)
    return [read_json(call, "arguments") or (None, [], {}) for call in marked]


def llama(text: str) -> list[Call]:
    """A turn that is a call and nothing else, as Llama 3 writes it. Several are separated by ";"."""
    text = text.strip().removeprefix("<|python_tag|>")
    calls = re.split(r"(?<=\})\s*;\s*(?=\{)", text) if text.startswith("{") else []
    return [found for call in calls if (found := read_json(call, "parameters"))]


def read_json(text: str, key: str) -> Call | None:
    """The call of a JSON object with a name and, under `key`, named arguments; None for any other text."""
    try:
        call = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(call, dict) or not isinstance(call.get("name"), str) or not isinstance(call.get(key, {}), dict):
        return None
    return call["name"], [], call.get(key, {})


def plain(text: str) -> list[Call]:
    """The last line, if it is NAME(ARGUMENTS) with plain values. Any other line is not a call."""
    line = text.strip().rpartition("\n")[2]
    if not re.fullmatch(r"[a-z_]\w*\(.{0,1000}\)", line):
        return []
    try:
        call = ast.parse(line, mode="eval").body
        named = {keyword.arg: ast.literal_eval(keyword.value) for keyword in call.keywords}
        return [(call.func.id, [ast.literal_eval(value) for value in call.args], named)]
    except (SyntaxError, ValueError, AttributeError, MemoryError, RecursionError):
        return []


PARSERS = {"hermes": hermes, "llama": llama, "plain": plain}
