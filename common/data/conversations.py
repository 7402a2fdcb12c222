"""Conversations, as data sets have them, in one form: messages with a role and a text, as OpenAI has them.

    {"role": "user", "content": "2+3?"}                               as it is
    {"from": "human", "value": "2+3?"}                                ShareGPT's form; SENDERS has the names it uses
    {"role": "user", "content": [{"type": "text", "text": "2+3?"}]}   parts of text are joined
    {"role": "assistant", "content": null, "tool_calls": [...]}       the calls are all that it says: its text is ""

Nothing that is said is dropped. A message that can't be read is refused, and the error names its place, its key and its
value.
"""

import json
import re
from typing import Any

from common.errors import BadInput

Message = dict[str, Any]

# Who speaks in ShareGPT's form -> the role that chat templates know.
SENDERS = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "model": "assistant",
    "assistant": "assistant",
    "function_call": "assistant",
    "tool_call": "assistant",
    "observation": "tool",
    "function_response": "tool",
    "tool_response": "tool",
    "tool": "tool",
}
CALLS = ("function_call", "tool_call")  # senders whose value is the JSON of a call
MESSAGE_KEYS = ({"role", "content"}, {"from", "value"})
# What a message may say besides its content. A chat template that shows none of it would lose it.
SPOKEN_KEYS = ("tool_calls", "reasoning_content", "reasoning", "thinking")


def looks_like(value: Any) -> bool:
    """True for a list that is meant as messages, whether they can be read or not."""
    return isinstance(value, list) and any(
        isinstance(entry, dict) and ({"role", "content"} & entry.keys() or {"from", "value"} <= entry.keys())
        for entry in value
    )


def from_text(text: str) -> Any:
    """The messages in a text that is JSON, as some tables store them. Any other text stays."""
    if not re.match(r"\s*\[\s*\{", text):
        return text
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return value if looks_like(value) else text


def from_response(text: str) -> Any:
    """from_text() for a response, which may be JSON for other reasons: every entry has to be a message."""
    value = from_text(text)
    is_message = lambda entry: isinstance(entry, dict) and any(keys <= entry.keys() for keys in MESSAGE_KEYS)
    return value if isinstance(value, list) and all(map(is_message, value)) else text


def read(where: str, column: str, value: list) -> list[Message]:
    """The messages of a column. Raises BadInput for one that can't be read."""
    return [read_message(f'{where}: "{column}", message {n}', entry) for n, entry in enumerate(value, 1)]


def read_message(where: str, entry: Any) -> Message:
    """One message in OpenAI's form. Its other keys stay: a chat template may show them. Raises BadInput."""
    if not isinstance(entry, dict):
        raise BadInput(f"{where}: expected an object with role and content, got {shown(entry)}")
    if {"from", "value"} <= entry.keys():
        return read_sharegpt(where, entry)
    role = entry.get("role")
    if not isinstance(role, str):
        raise BadInput(f'{where}: expected a text in "role", got {shown(entry)}')
    says_more = any(entry.get(key) for key in SPOKEN_KEYS)
    content = entry.get("content")
    if content is None and says_more:
        content = ""
    elif is_text_parts(content):
        content = "".join(part["text"] for part in content)
    if not isinstance(content, str):
        raise BadInput(f'{where} ({role}): expected a text in "content", got {shown(content)}')
    # Tables, and dumps of OpenAI's client, give every message all keys. A template would take a null for a value.
    message = {key: said for key, said in entry.items() if said is not None} | {"content": content}
    if calls := message.pop("tool_calls", None):
        message["tool_calls"] = [read_call(where, call) for call in calls]
    return message


def read_sharegpt(where: str, entry: Message) -> Message:
    """{"from": "human", "value": ...} as {"role": "user", "content": ...}."""
    sender, value = entry["from"], entry["value"]
    if not isinstance(sender, str) or sender not in SENDERS:
        raise BadInput(f'{where}: unknown sender "{sender}"; in "from", use one of {", ".join(SENDERS)}')
    if not isinstance(value, str):
        raise BadInput(f'{where} ({sender}): expected a text in "value", got {shown(value)}')
    if sender not in CALLS:
        return {"role": SENDERS[sender], "content": value}
    try:
        calls = json.loads(value)
    except (ValueError, RecursionError):
        raise BadInput(f'{where} ({sender}): expected the JSON of a call in "value", got {shown(value)}') from None
    calls = calls if isinstance(calls, list) else [calls]
    return {"role": "assistant", "content": "", "tool_calls": [read_call(where, call) for call in calls]}


def read_call(where: str, call: Any) -> Message:
    """{"type": "function", "function": {"name": ..., "arguments": {...}}} of a call in any of its usual forms.

    Arguments may be an object or its JSON, and Llama calls them "parameters". JSON is parsed, because a template writes
    an object and a text differently.
    """
    function = call.get("function", call) if isinstance(call, dict) else call
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise BadInput(f"{where}: expected a call with the name of a function, got {shown(call)}")
    function = dict(function)
    arguments = function.pop("arguments", function.pop("parameters", {}))
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            raise BadInput(f"{where}: the arguments of {function['name']} are not JSON: {shown(arguments)}") from None
    if not isinstance(arguments, dict):
        raise BadInput(f"{where}: the arguments of {function['name']} must be an object, got {shown(arguments)}")
    outer = call if "function" in call else {}
    return {**outer, "type": "function", "function": {**function, "arguments": arguments}}


def is_text_parts(content: Any) -> bool:
    """True for a list of parts that are all text."""
    return (
        isinstance(content, list)
        and len(content) > 0
        and all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in content)
    )


def with_system(where: str, row: dict, messages: list[Message]) -> list[Message]:
    """The messages after the row's column "system", which ShareGPT's data has beside them. Raises BadInput."""
    system = row.get("system")
    if not system:
        return messages
    if not isinstance(system, str):
        raise BadInput(f'{where}: "system" must be a text, got {shown(system)}')
    if messages and messages[0]["role"] == "system":
        if messages[0]["content"] == system:
            return messages
        raise BadInput(f'{where}: "system" and the first message are two different system prompts')
    return [{"role": "system", "content": system}, *messages]


def tools_beside(where: str, row: dict) -> list[dict] | None:
    """The schemas in the row's column "tools", or in its JSON. None if it has none. Raises BadInput."""
    tools = row.get("tools")
    if isinstance(tools, str) and tools.strip():
        try:
            tools = json.loads(tools)
        except (ValueError, RecursionError):
            raise BadInput(f'{where}: "tools" is not JSON: {shown(tools)}') from None
    if not tools:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) and tool_name(tool) for tool in tools):
        raise BadInput(f'{where}: "tools" must be a list of schemas with the name of a function, got {shown(tools)}')
    return tools


def tool_name(tool: dict) -> str:
    """The name of the function in a schema, with or without {"type": "function", "function": ...} around it."""
    function = tool.get("function", tool)
    return function.get("name", "") if isinstance(function, dict) else ""


def last_response(messages: list) -> Any:
    """What the assistant says in a last message of any form. None if somebody else has the last word."""
    last = messages[-1] if messages and isinstance(messages[-1], dict) else {}
    sender = last.get("role", last.get("from"))
    is_assistant = isinstance(sender, str) and SENDERS.get(sender) == "assistant"
    return last.get("content", last.get("value")) if is_assistant else None


def shown(value: Any) -> str:
    """The start of a value, for an error."""
    return json.dumps(value, default=str, ensure_ascii=False)[:80]
