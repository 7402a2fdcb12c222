"""From a row to the text and ids that a model sees: its fields, --template, the chat template, a cut on the left."""

import json
import math
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from common.errors import BadInput
from common.json_lines import read_value
from common.sources import lookup

Messages = list[dict[str, str]]
Template = str | Messages | None


def fields(where: str, row: dict, columns: dict[str, str]) -> tuple[str | Messages, str, str | None]:
    """Prompt, answer and solution of a row, from `columns` or the usual ones. Raises BadInput.

    Usual are "prompt" or "question", a string or a list of chat messages; "answer"; and perhaps a worked "solution" or
    "response", beside which fine-tuning needs no answer.
    """
    usual = {
        "prompt": "question" if "question" in row and "prompt" not in row else "prompt",
        "answer": "answer",
        "solution": "solution" if "solution" in row else "response",
    }
    names, absent = {**usual, **columns}, object()
    solution = lookup(row, names["solution"])
    for name, column in names.items():
        optional = name == "solution" or (name == "answer" and solution is not None)
        if lookup(row, column, absent) is absent and (name in columns or not optional):
            raise BadInput(f'{where}: missing key "{column}" (found: {", ".join(row) or "nothing"})')
    content, answer = lookup(row, names["prompt"]), lookup(row, names["answer"], "")
    expected = {}
    if not (isinstance(content, str) and content.strip()) and not is_chat(content):
        expected["prompt"] = "messages with role and content" if isinstance(content, list) else "a non-empty string"
    numeric = isinstance(answer, (int, float)) and not isinstance(answer, bool) and abs(answer) < math.inf  # not NaN
    if not isinstance(answer, str) and not numeric:
        expected["answer"] = "a string or a number"
    if solution is not None and not isinstance(solution, str):
        expected["solution"] = "a string"
    for name, what in expected.items():
        got = json.dumps(lookup(row, names[name]), default=str)[:80]
        raise BadInput(f'{where}: "{names[name]}" must be {what}, got {got}')
    return content, str(answer), solution


def read_template(path: str, tokenizer: PreTrainedTokenizerBase) -> Template:
    """--template: the messages of a .json file, the text of any other, None of "". Raises BadInput.

    A text is without its last line end, which editors add and a model would see.
    """
    if not path:
        return None
    if not Path(path).is_file():
        raise BadInput(f"--template {path}: file not found")
    file = Path(path)
    try:
        template = read_value(file) if path.endswith(".json") else file.read_text("utf-8-sig").removesuffix("\n")
    except UnicodeDecodeError as error:
        raise BadInput(f"{path}: not valid UTF-8 at byte {error.start + 1}") from None
    if not isinstance(template, str) and not is_chat(template):
        raise BadInput(f'{path}: expected a list of {{"role": ..., "content": ...}} messages')
    if not isinstance(template, str) and not tokenizer.chat_template:
        raise BadInput(f"--template {path}: messages, and --model has no chat template; give it a text file")
    if not any("{prompt}" in text for text in ([template] if isinstance(template, str) else contents(template))):
        raise BadInput(f"{path}: {{prompt}} is nowhere in it, where each prompt goes")
    return template


def is_chat(value: Any) -> bool:
    """Whether it is a conversation: messages with a role and a text each."""
    strings = lambda message: isinstance(message.get("role"), str) and isinstance(message.get("content"), str)
    return isinstance(value, list) and bool(value) and all(isinstance(m, dict) and strings(m) for m in value)


def contents(messages: Messages) -> list[str]:
    """The texts of the messages."""
    return [message["content"] for message in messages]


def tail(content: str | Messages, characters: int) -> str | Messages:
    """The last characters of a text, or of each message."""
    if isinstance(content, str):
        return content[-characters:]
    return [{**message, "content": message["content"][-characters:]} for message in content]


def render(
    where: str, content: str | Messages, tokenizer: PreTrainedTokenizerBase, template: Template = None
) -> tuple[str, list[int]]:
    """Text and ids of a prompt: --template first, then the chat template if the tokenizer has one. Raises BadInput."""
    if template:
        content = fill(template, own_text(where, content, "--template takes"))
    if tokenizer.chat_template:
        messages = [{"role": "user", "content": content}] if isinstance(content, str) else content
        try:
            text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        except TemplateError as error:  # many refuse a system prompt, or two messages of one role
            raise BadInput(f"{where}: refused by the chat template: {error}") from None
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]  # the template wrote the BOS
    else:
        text = content if isinstance(content, str) else "\n".join(contents(content)) + "\n"
        ids = tokenizer(text)["input_ids"]
    if tokenizer.bos_token_id is not None and ids[:2] == [tokenizer.bos_token_id] * 2:
        writer = "chat template" if tokenizer.chat_template else "tokenizer"
        raise BadInput(
            f"{where}: begins with two {tokenizer.bos_token}; the {writer} of --model {tokenizer.name_or_path} writes "
            "one, so --template and the prompts must have none",
            code="double-bos",
        )
    return text, ids


def fill(template: str | Messages, text: str) -> str | Messages:
    """The template with a prompt's text in it."""
    if isinstance(template, str):
        return template.replace("{prompt}", text)  # not str.format: LaTeX is full of braces
    return [{**message, "content": message["content"].replace("{prompt}", text)} for message in template]


def own_text(where: str, content: str | Messages, who: str) -> str:
    """The one text of a prompt. Raises BadInput for a conversation of several messages."""
    if isinstance(content, list) and len(content) > 1:
        raise BadInput(f"{where}: {who} one text, and this prompt is a conversation of {len(content)} messages")
    return content if isinstance(content, str) else content[0]["content"]


def cut_left(
    where: str, content: str | Messages, tokenizer: PreTrainedTokenizerBase, template: Template, limit: int
) -> tuple[str, list[int]]:
    """Text and ids of at most `limit` tokens: the start of the row's own text goes, of both templates nothing.

    Raises BadInput if they alone are longer.
    """
    own = own_text(where, content, "--overlong-prompts truncate-left cuts")
    words = tokenizer(own, add_special_tokens=False)["input_ids"]
    text, ids = render(where, content, tokenizer, template)
    keep = len(words)
    while len(ids) > limit:
        keep -= len(ids) - limit
        if keep <= 0:
            raise BadInput(f"{where}: nothing of its own text fits beside the template in --max-prompt-tokens {limit}")
        rest = tokenizer.decode(words[-keep:]).lstrip("\ufffd")  # half a character, where the cut went through one
        shorter = rest if isinstance(content, str) else [{**content[0], "content": rest}]
        text, ids = render(where, shorter, tokenizer, template)  # its tokens may be a few more than were kept
    return text, ids
