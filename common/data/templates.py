"""From a row to the text and the token ids that a model sees: fields, --template, chat template, cut on the left."""

import json
import math
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from common.data.json_lines import read_value
from common.data.sources import lookup
from common.errors import BadInput

Messages = list[dict[str, str]]
Template = str | Messages | None
CONVERSATIONS = ("messages", "conversations")  # columns with a whole conversation, in OpenAI's and in ShareGPT's form


def fields(where: str, row: dict, columns: dict[str, str]) -> tuple[str | Messages, str | None, str | None]:
    """Prompt, answer and solution of a row. `columns` names columns that are not the usual ones. Raises BadInput.

    Usual are "prompt" or "question", a string or a list of chat messages; "answer"; and "solution" or "response", a
    worked solution. Answer and solution are None where a row has none, or null: some rewards do without an answer.
    "messages", "conversations" or "chosen" stand for both a prompt and, if their last is the assistant's, its solution.
    """
    conversations = (*CONVERSATIONS, columns.get("chosen", "chosen"))
    usual = {
        "prompt": max(("prompt", "question", *conversations), key=lambda k: (row.get(k) is not None, k in row)),
        "answer": "answer",
        "solution": "solution" if "solution" in row else "response",
    }
    names, absent = {**usual, **columns}, object()
    solution = lookup(row, names["solution"])
    for name, column in names.items():
        if lookup(row, column, absent) is absent and (name in columns or name == "prompt"):
            from common.data.formats import missing

            raise missing(where, row, column, is_usual=name not in columns)
    content, answer = lookup(row, names["prompt"]), lookup(row, names["answer"])
    is_text = names["prompt"] not in conversations
    if not is_text:
        from common.data.formats import split_conversation

        content, solution = split_conversation(content, solution)
    is_number = type(answer) in (int, float) and abs(answer) < math.inf  # False for NaN
    is_filled = isinstance(content, list) or (isinstance(content, str) and content.strip())
    for name, valid, expected in (
        ("prompt", is_filled or not is_text, "a non-empty string"),
        ("prompt", is_chat(content) or (is_text and isinstance(content, str)), "messages with role and content"),
        ("answer", answer is None or isinstance(answer, str) or is_number, "a string or a number"),
        ("solution", isinstance(solution, str | None) or is_dialogue(solution), "a string, or turns"),
    ):
        if not valid:
            value = json.dumps(lookup(row, names[name]), default=str)[:80]
            raise BadInput(f'{where}: "{names[name]}" must be {expected}, got {value}')
    answer = int(answer) if is_number and int(answer) == answer else answer  # A table with nulls has only floats: 34.0
    return content, None if answer is None else str(answer), solution


def is_dialogue(solution: Any) -> bool:
    """True for turns of policy and tools as texts, of which the policy has the first and the last."""
    return isinstance(solution, list) and len(solution) % 2 == 1 and all(isinstance(text, str) for text in solution)


def read_template(path: str, tokenizer: PreTrainedTokenizerBase) -> Template:
    """The messages of a .json file, the text of any other file, or None for "". Raises BadInput."""
    if not path:
        return None
    file, is_json = Path(path), path.endswith(".json")
    if not file.is_file():
        raise BadInput(f"--template {path}: file not found")
    try:
        # The last line end of a text is removed: editors add it, and the model would see it.
        template = read_value(file) if is_json else file.read_text("utf-8-sig").removesuffix("\n")
    except UnicodeDecodeError as error:
        raise BadInput(f"{path}: not valid UTF-8 at byte {error.start + 1}") from None
    if is_json and not is_chat(template):
        raise BadInput(f'{path}: expected a list of {{"role": ..., "content": ...}} messages')
    if is_json and not tokenizer.chat_template:
        raise BadInput(f"--template {path}: messages, and --model has no chat template; give it a text file")
    texts = [message["content"] for message in template] if is_json else [template]
    if not any("{prompt}" in text for text in texts):
        raise BadInput(f"{path}: {{prompt}} is nowhere in it, where each prompt goes")
    return template


def is_chat(value: Any) -> bool:
    """True for a list of messages that have a role and a text each."""
    is_message = lambda m: isinstance(m, dict) and isinstance(m.get("role"), str) and isinstance(m.get("content"), str)
    return isinstance(value, list) and bool(value) and all(map(is_message, value))


def render(
    where: str, content: str | Messages, tokenizer: PreTrainedTokenizerBase, template: Template = None,
    tools: list[dict] | None = None, images=None,
) -> tuple[str, list[int]]:  # fmt: skip
    """Text and ids of a prompt. --template is applied first, then the tokenizer's chat template. Raises BadInput.

    tools: schemas of the functions that the model may call. images: images.RowImages of the row, or None.
    """
    if template:
        if isinstance(content, list) and len(content) > 1:
            said = f"--template takes one text, and this prompt is a conversation of {len(content)} messages"
            raise BadInput(f"{where}: {said}")
        own = content if isinstance(content, str) else content[0]["content"]
        fill = lambda text: text.replace("{prompt}", own)  # str.format would trip over the braces of LaTeX
        chat = isinstance(template, list)
        content = [{**m, "content": fill(m["content"])} for m in template] if chat else fill(template)
    if tokenizer.chat_template:
        from common.data.suffix import write_chat  # the embedded task has no chat template

        messages = [{"role": "user", "content": content}] if isinstance(content, str) else content
        messages = images.as_parts(messages) if images else messages
        text = write_chat(where, messages, tokenizer, tools)
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]  # the chat template has written the BOS
    else:
        text = content if isinstance(content, str) else "".join(message["content"] + "\n" for message in content)
        ids = tokenizer(text)["input_ids"]
    if tokenizer.bos_token_id is not None and ids[:2] == [tokenizer.bos_token_id] * 2:
        writer = "chat template" if tokenizer.chat_template else "tokenizer"
        raise BadInput(
            f"{where}: begins with two {tokenizer.bos_token}; the {writer} of --model {tokenizer.name_or_path} writes "
            "one, so --template and the prompts must have none",
            code="double-bos",
        )
    return text, images.expand(text, ids) if images else ids
