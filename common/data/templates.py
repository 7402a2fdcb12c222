"""From a row to the text and the token ids that a model sees: the row's fields, --template, and the chat template."""

import json
import math
from functools import lru_cache
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from common.data import dates
from common.data.json_lines import read_value
from common.data.rows import CONVERSATIONS, is_chat, lookup, missing, split_conversation
from common.errors import BadInput

Messages = list[dict[str, Any]]
Template = str | Messages | None
# A chat template raises these for messages that it cannot show.
REFUSALS = (TemplateError, ValueError, TypeError, IndexError)
# Stands for a column that a row does not have. None may be the value of a column.
ABSENT = object()


def check_columns(where: str, row: dict, columns: dict[str, str]) -> None:
    """Raise BadInput if the row lacks a column that --columns names."""
    for column in columns.values():
        if lookup(row, column, ABSENT) is ABSENT:
            raise missing(where, row, column)


def prompt_column(row: dict, columns: dict[str, str]) -> str:
    """The column that --columns names, or the first of the usual ones that has a value, or that is there at all."""
    usual = ("prompt", "question", *CONVERSATIONS, columns.get("chosen", "chosen"))
    present = [name for name in usual if name in row]
    with_value = [name for name in present if row[name] is not None]
    return columns.get("prompt") or [*with_value, *present, "prompt"][0]


def solution_column(row: dict, columns: dict[str, str]) -> str:
    return columns.get("solution", "solution" if "solution" in row else "response")


def fields(where: str, row: dict, columns: dict[str, str]) -> tuple[str | Messages, str | None, str | list | None]:
    """Prompt, answer and solution of a row. `columns` names columns that are not the usual ones. Raises BadInput.

    Usual are "prompt" or "question", a text or chat messages; "answer"; and "solution" or "response", a worked
    solution. Answer and solution are None if a row has none: some rewards do without an answer. "messages",
    "conversations" or "chosen" are the prompt, except for a last message of the assistant, which is the solution.
    """
    # The prompt, and with a conversation perhaps the solution.
    column = prompt_column(row, columns)
    content = lookup(row, column, ABSENT)
    if content is ABSENT:
        raise missing(where, row, column, cure="; --columns prompt=COLUMN if another column holds it")
    solution = lookup(row, solution_column(row, columns))
    is_conversation = column in (*CONVERSATIONS, columns.get("chosen", "chosen"))
    if is_conversation:
        content, response = split_conversation(content)
        # A solution of its own goes before the assistant's last message.
        solution = response if solution is None else solution
    if is_conversation or isinstance(content, list):
        if not is_chat(content):
            raise wrong(where, row, column, "messages with role and content")
    elif not isinstance(content, str) or not content.strip():
        raise wrong(where, row, column, "a non-empty string")

    if not isinstance(solution, str | None) and not is_dialogue(solution):
        raise wrong(where, row, solution_column(row, columns), "a string, or turns")

    column = columns.get("answer", "answer")
    answer = lookup(row, column)
    if type(answer) in (int, float) and abs(answer) < math.inf:  # False for NaN
        # A table with nulls has only floats: 34.0 is 34.
        answer = str(int(answer) if int(answer) == answer else answer)
    if not isinstance(answer, str | None):
        raise wrong(where, row, column, "a string or a number")
    return content, answer, solution


def wrong(where: str, row: dict, column: str, expected: str) -> BadInput:
    """The error for a column that holds something else."""
    value = json.dumps(lookup(row, column), default=str)[:80]
    return BadInput(f'{where}: "{column}" must be {expected}, got {value}')


def is_dialogue(solution: Any) -> bool:
    """True for turns of policy and tools as texts, in turn, from a first to a last one of the policy."""
    return isinstance(solution, list) and len(solution) % 2 == 1 and all(isinstance(text, str) for text in solution)


def read_template(path: str, tokenizer: PreTrainedTokenizerBase) -> Template:
    """The messages of a .json file, the text of any other file, or None for "". Raises BadInput."""
    if not path:
        return None
    file = Path(path)
    if not file.is_file():
        raise BadInput(f"--template {path}: file not found")
    if file.suffix == ".json":
        template = read_value(file)
        if not is_chat(template):
            raise BadInput(f'{path}: expected a list of {{"role": ..., "content": ...}} messages')
        if not tokenizer.chat_template:
            raise BadInput(f"--template {path}: messages, and --model has no chat template; give it a text file")
        texts = [message["content"] for message in template]
    else:
        try:
            # Without the last line end, which editors add: the model would see it.
            template = file.read_text("utf-8-sig").removesuffix("\n")
        except UnicodeDecodeError as error:
            raise BadInput(f"{path}: not valid UTF-8 at byte {error.start + 1}") from None
        texts = [template]
    if not any("{prompt}" in text for text in texts):
        raise BadInput(f"{path}: {{prompt}} is nowhere in it, where each prompt goes")
    return template


def fill(where: str, template: Template, content: str | Messages) -> str | Messages:
    """The template with a prompt in it. Raises BadInput for a conversation."""
    if isinstance(content, list):
        if len(content) > 1:
            raise BadInput(
                f"{where}: --template takes one text, and this prompt is a conversation of {len(content)} messages"
            )
        content = content[0]["content"]
    # str.format would trip over the braces of LaTeX.
    if isinstance(template, str):
        return template.replace("{prompt}", content)
    return [{**message, "content": message["content"].replace("{prompt}", content)} for message in template]


def render(
    where: str,
    content: str | Messages,
    tokenizer: PreTrainedTokenizerBase,
    template: Template = None,
    tools: list[dict] | None = None,
    images=None,
) -> str:
    """Text of a prompt. --template is applied first, then the tokenizer's chat template. Raises BadInput.

    tools: schemas of the functions that the model may call. images: images.RowImages of the row, or None.
    """
    if template:
        content = fill(where, template, content)
    if not tokenizer.chat_template:
        return content if isinstance(content, str) else "".join(message["content"] + "\n" for message in content)
    messages = [{"role": "user", "content": content}] if isinstance(content, str) else content
    if images:
        messages = images.as_parts(messages)
    # Many templates refuse a system prompt, or two messages of one role in a row.
    try:
        return chat_text(messages, tokenizer, tools)
    except REFUSALS as error:
        raise BadInput(f"{where}: refused by the chat template: {error}") from None


def tokenize(where: str, text: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Token ids of a prompt, with one BOS, which either the chat template has written or the tokenizer adds."""
    ids = tokenizer(text, add_special_tokens=not tokenizer.chat_template)["input_ids"]
    if not ids:
        raise BadInput(f"{where}: the prompt has no token that the tokenizer knows")
    # Models that never saw two of them in a row answer worse, and nothing else would show it.
    if tokenizer.bos_token_id is not None and ids[:2] == [tokenizer.bos_token_id] * 2:
        writer = "chat template" if tokenizer.chat_template else "tokenizer"
        raise BadInput(
            f"{where}: begins with two {tokenizer.bos_token}; the {writer} of --model {tokenizer.name_or_path} writes "
            "one, so --template and the prompts must have none",
            code="double-bos",
        )
    return ids


def chat_text(messages: Messages, tokenizer: PreTrainedTokenizerBase, tools: list[dict] | None = None) -> str:
    """The text that the chat template writes, up to where the policy's next turn begins. Raises TemplateError."""
    template = tokenizer.get_chat_template(tools=tools or None)  # some models have several
    # With images, the contents are lists of parts already.
    if is_chat(messages) and takes_parts(tokenizer, template, tuple(message["role"] for message in messages)):
        messages = as_parts(messages)
    date = dates.variables(tokenizer, template)
    return tokenizer.apply_chat_template(messages, tools or None, tokenize=False, add_generation_prompt=True, **date)


def as_parts(messages: Messages) -> Messages:
    """The messages with each content as a list of one part."""
    return [{**message, "content": [{"type": "text", "text": message["content"]}]} for message in messages]


@lru_cache(maxsize=1000)
def takes_parts(tokenizer: PreTrainedTokenizerBase, template: str, roles: tuple[str, ...]) -> bool:
    """Whether the chat template shows messages of these roles only if their contents are lists of parts.

    Templates of some models that see images loop over the parts of a content. They walk a text by its characters, and
    write none of it. Raises TemplateError for a template that shows a message in neither form.
    """
    messages = [{"role": role, "content": f"c9d3-{i}-text"} for i, role in enumerate(roles)]
    # A template may leave out the assistant: many drop the thinking of earlier turns.
    to_show = [message for message in messages if message["role"] in ("system", "user")]
    hidden = []
    for form in (messages, as_parts(messages)):
        try:
            text = tokenizer.apply_chat_template(form, chat_template=template, tokenize=False)
        except REFUSALS:
            continue
        hidden = [message["role"] for message in to_show if message["content"] not in text]
        if not hidden:
            return form is not messages
    if hidden:
        raise TemplateError(f'it does not show what the role "{hidden[0]}" says')
    return False  # it refuses both forms, and the messages themselves will show why
