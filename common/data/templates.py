"""From a row to the text and the token ids that a model sees: the row's fields, --template, and the chat template.

The rule: a prompt or a response is what the chat template writes. What it leaves out of a message is an error, except
for half of its words, and for thinking in earlier turns. What we add, such as the token that ends a turn, is added only
if it is not there.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from functools import lru_cache
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from common.data import conversations, dates
from common.data.conversations import SPOKEN_KEYS, Message
from common.data.json_lines import read_value
from common.data.rows import CONVERSATIONS, is_chat, last_box, lookup, missing
from common.errors import BadInput

Messages = list[Message]
Template = str | Messages | None
Solution = str | list[str] | Message | None  # a text, alternating turns, or a turn that says more than a text
# A chat template raises these for messages that it cannot show.
REFUSALS = (TemplateError, ValueError, TypeError, IndexError)
# Stands for a column that a row does not have. None may be the value of a column.
ABSENT = object()
SOLUTIONS = ("solution", "response", "completion")  # columns of a worked solution; the first that a row has
# Columns of a reference answer. verl's data has the second one. If a row has several, they must agree.
ANSWERS = ("answer", "reward_model.ground_truth", "ground_truth")
FORMULA = re.compile(r"\s*(\$+)([^$]+)\1\s*")  # one formula between dollars, and nothing else
# How prompts begin that have been through a chat template already.
RENDERED = re.compile(
    r"\s*(<\|im_start\|>|<\|begin_of_text\|>|<\|start_header_id\|>|<start_of_turn>|\[INST\]|<\|(?:system|user)\|>"
    r"|<｜begin▁of▁sentence｜>|<｜User｜>)"
)
TURN = "a5f1-turn"  # a text to find again in what a template writes
THINKING = re.compile(r"<think>.*?</think>", re.DOTALL)


@dataclass(frozen=True)
class Fields:
    """What a row says."""

    content: str | Messages  # the prompt
    answer: str | None  # the reference answer as a text; some rewards do without
    solution: Solution  # the response to learn
    tools: list[dict] | None = None  # schemas beside the messages
    continues: bool = False  # the prompt ends with words of the assistant, which the policy continues
    other_answer: list | dict | None = None  # a reference answer that is no text


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
    """The column that --columns names, or the first of the usual ones that has a value, or that is there at all."""
    present = [name for name in SOLUTIONS if name in row]
    with_value = [name for name in present if row[name] is not None]
    return columns.get("solution") or [*with_value, *present, "response"][0]


def fields(where: str, row: dict, columns: dict[str, str]) -> Fields:
    """Prompt, answer and solution of a row. `columns` names columns that are not the usual ones. Raises BadInput.

    Usual are "prompt" or "question", a text or chat messages; ANSWERS; and "solution", "response" or "completion", a
    worked solution. "messages", "conversations" or "chosen" are the prompt, except for a last message of the assistant,
    which is the solution. Such a message at the end of "prompt" is a start that the policy continues.
    """
    column = prompt_column(row, columns)
    content = lookup(row, column, ABSENT)
    if content is ABSENT:
        raise missing(where, row, column, cure="; --columns prompt=COLUMN if another column holds it")
    is_conversation = column in (*CONVERSATIONS, columns.get("chosen", "chosen"))
    if isinstance(content, str):
        content = conversations.from_text(content)
    if isinstance(content, str) and content.strip() and not is_conversation and (row.get("system") or row.get("tools")):
        content = as_messages(content)
    turn = None
    tools = None
    continues = False
    if isinstance(content, list) and content:
        content = conversations.read(where, column, content)
        content = conversations.with_system(where, row, content)
        tools = conversations.tools_beside(where, row)
        if content[-1]["role"] == "assistant":
            continues = not is_conversation
            if is_conversation:
                turn = spoken(content.pop())
        if not content:
            raise wrong(where, row, column, "messages that begin before the assistant's")
    elif is_conversation or isinstance(content, list):
        raise wrong(where, row, column, "messages with role and content")
    elif not isinstance(content, str) or not content.strip():
        raise wrong(where, row, column, "a non-empty string")

    # A column with a solution counts more than the assistant's last message.
    column = solution_column(row, columns)
    solution = lookup(row, column)
    if isinstance(solution, str):
        solution = conversations.from_response(solution)
    if solution is None:
        solution = turn
    elif conversations.looks_like(solution):
        messages = conversations.read(where, column, solution)
        if len(messages) != 1 or messages[0]["role"] != "assistant":
            raise wrong(where, row, column, "one message of the assistant, a string, or turns")
        solution = spoken(messages[0])
    elif not isinstance(solution, str) and not is_dialogue(solution):
        raise wrong(where, row, column, "a string, or turns")

    answer = read_answer(where, row, columns)
    other_answer = None
    if isinstance(answer, list | dict):
        answer, other_answer = None, answer
    return Fields(content, answer, solution, tools, continues, other_answer)


def read_answer(where: str, row: dict, columns: dict[str, str]) -> str | list | dict | None:
    """The reference answer of a row. A number is its digits. Raises BadInput if the row has two that differ."""
    usual = [columns["answer"]] if "answer" in columns else ANSWERS
    # A null in one of these columns says that the row has no answer.
    if all(lookup(row, column, ABSENT) is ABSENT for column in usual):
        return answer_of_solution(lookup(row, columns.get("solution", "solution")))
    found = {}
    for column in usual:
        answer = as_answer(where, row, column)
        if answer is not None:
            found[column] = answer
    if not found:
        return None
    (first, answer), *others = found.items()
    for column, other in others:
        if other != answer:
            raise BadInput(
                f'{where}: "{first}" is {conversations.shown(answer)} and "{column}" is {conversations.shown(other)}; '
                f"choose the reference answer with --columns answer={first} or answer={column}"
            )
    return answer


def as_answer(where: str, row: dict, column: str) -> str | list | dict | None:
    """The value of a column as a reference answer. Raises BadInput if it is none."""
    answer = lookup(row, column)
    if type(answer) is int:
        return str(answer)
    if type(answer) is float:
        answer = Decimal(repr(answer + 0.0))  # and so -0.0 is 0
    if isinstance(answer, Decimal) and answer.is_finite():
        # Digits alone: a grader would read 1e-05 as 1*e - 05. And 34.0 is 34: a table with nulls has only floats.
        digits = format(answer, "f")
        return digits.rstrip("0").rstrip(".") if "." in digits else digits
    if not isinstance(answer, str | list | dict | None):
        raise wrong(where, row, column, "a string or a number")
    return answer


def answer_of_solution(solution: Any) -> str | None:
    """The reference answer in a column "solution", where TRL's data often has it.

    It is the content of the last box; or what follows #### in the last line, as in GSM8K; or the whole text if that is
    nothing but one word or one formula. Another text is a worked solution, and is not taken for an answer.
    """
    if not isinstance(solution, str):
        return None
    box = last_box(solution)
    if box:
        return box[1]
    _, marker, behind = solution.rpartition("####")
    # Followed by more lines it is a heading, as in "#### Step 2".
    if marker and behind.strip() and "\n" not in behind.strip():
        return behind.strip()
    formula = FORMULA.fullmatch(solution)
    if formula:
        return formula[2].strip()
    return solution.strip() if len(solution.split()) == 1 else None


def spoken(turn: Message) -> str | Message:
    """A turn of the assistant as its text, if it says nothing else. Calls and reasoning stay with it."""
    return turn if any(turn.get(key) for key in SPOKEN_KEYS) else turn["content"]


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
        template = conversations.read(path, "--template", template)
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
    tools: list[dict] | None = None,
    images=None,
    *,
    continues: bool = False,
) -> str:
    """Text of a prompt, as the tokenizer's chat template writes it. Raises BadInput.

    tools: schemas of the functions that the model may call. images: images.RowImages of the row, or None. continues:
    the last message is the assistant's, and the policy continues it.
    """
    if not tokenizer.chat_template:
        return without_template(where, content, continues)
    refuse_rendered(where, content)
    messages = as_messages(content)
    if images:
        messages = images.as_parts(messages)
    # Many templates refuse a system prompt, or two messages of one role in a row.
    try:
        text = chat_text(messages, tokenizer, tools, continues=continues)
    except REFUSALS as error:
        raise BadInput(f"{where}: refused by the chat template: {error}") from None
    check_shown(where, messages, tools, text)
    return text


def as_messages(content: str | Messages) -> Messages:
    """A prompt as messages: a text is what the user says."""
    return [{"role": "user", "content": content}] if isinstance(content, str) else content


def without_template(where: str, content: str | Messages, continues: bool) -> str:
    """The text of a prompt for a model without a chat template: a text as it is, or contents, one a line."""
    if isinstance(content, str):
        return content
    for number, message in enumerate(content, 1):
        said = [key for key in SPOKEN_KEYS if message.get(key)]
        if said:
            raise BadInput(f'{where}: message {number} has "{said[0]}", and --model has no chat template to show it')
    text = "".join(message["content"] + "\n" for message in content)
    return text.removesuffix("\n") if continues else text


def refuse_rendered(where: str, content: str | Messages) -> None:
    """Raise BadInput for a text that has been through a chat template: this one would wrap it again."""
    begins = RENDERED.match(content) if isinstance(content, str) else None
    if begins:
        raise BadInput(
            f"{where}: the prompt begins with {begins[1]}, so it has been through a chat template already, and that of "
            "--model would wrap it again; give the messages themselves"
        )


def check_shown(where: str, messages: Messages, tools: list[dict] | None, text: str) -> None:
    """Raise BadInput if the chat template has left out what a message says, or the name of a tool."""
    for number, message in enumerate(messages, 1):
        role = message.get("role")
        for key, said in all_said(message):
            if not is_in(said, text):
                raise BadInput(
                    f"{where}: the chat template leaves out the {key} of message {number} ({role}): "
                    f"{conversations.shown(said)}"
                )
    for tool in tools or []:
        name = conversations.tool_name(tool)
        if name and name not in text:
            raise BadInput(
                f"{where}: the chat template leaves out the tool {name}; take a model whose template shows tools, or "
                'do without the column "tools" or the --environment that has it'
            )


def all_said(message: Message) -> list[tuple[str, str]]:
    """(key, text) of all that a message says and a template has to show."""
    content = message["content"]
    texts = [content] if isinstance(content, str) else [part.get("text", "") for part in content]
    # Many templates drop the thinking of earlier turns, which is what the model has been trained with.
    if message.get("role") == "assistant":
        texts = [THINKING.sub("", text) for text in texts]
    said = [("content", text.strip()) for text in texts]
    for call in message.get("tool_calls") or []:
        function = call["function"]
        values = [value for value in function["arguments"].values() if isinstance(value, str)]
        said += [("tool_calls", text.strip()) for text in (function["name"], *values)]
    return said


def is_in(said: str, text: str) -> bool:
    """Whether a template has written this: as it is, as JSON, or at least half of its words.

    Templates write what tools say as JSON, and some rewrite a text a little: Qwen's take out the word /think.
    """
    # Nearly always the first is true, and each message of each row is asked for.
    if said in text or json.dumps(said)[1:-1] in text or json.dumps(said, ensure_ascii=False)[1:-1] in text:
        return True
    words = said.split()
    return 2 * sum(word in text for word in words) >= len(words)


def tokenize(where: str, text: str, tokenizer: PreTrainedTokenizerBase, quoted: Sequence[str] = ()) -> list[int]:
    """Token ids of a prompt, with at most one BOS, which either the chat template has written or the tokenizer adds.

    quoted: parts of the text, in their order, whose control tokens are encoded as text. Raises BadInput.
    """
    if quoted:
        ids = with_quotes(where, text, tokenizer, quoted)
    else:
        ids = tokenizer(text, add_special_tokens=not tokenizer.chat_template)["input_ids"]
    # Some tokenizers end every text. The policy would answer behind the end.
    if not tokenizer.chat_template and ids[-1:] == [tokenizer.eos_token_id] and not text.endswith(tokenizer.eos_token):
        ids = ids[:-1]
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


def with_quotes(where: str, text: str, tokenizer: PreTrainedTokenizerBase, quoted: Sequence[str]) -> list[int]:
    """Token ids of a text in which the quoted parts have no control tokens.

    Raises BadInput if one is not in it, or if its place can't be told, because the template writes the same: a message
    that says nothing but <|im_end|>.
    """

    def refused(quote: str, why: str) -> BadInput:
        cure = "remove the row, reword it, or use --control-tokens keep"
        return BadInput(
            f"{where}: --control-tokens text: the chat template {why}: {conversations.shown(quote)}; {cure}"
        )

    quoted = [quote.strip() for quote in quoted]
    for quote in quoted:
        if text.count(quote) > sum(other.count(quote) for other in quoted):
            raise refused(quote, "itself writes what this says")
    ids = []
    for quote in quoted:
        before, found, text = text.partition(quote)
        if not found:
            raise refused(quote, "does not write this as it is")
        ids += tokenizer(before, add_special_tokens=False)["input_ids"]
        ids += tokenizer(quote, add_special_tokens=False, split_special_tokens=True)["input_ids"]
    return ids + tokenizer(text, add_special_tokens=False)["input_ids"]


def chat_text(
    messages: Messages,
    tokenizer: PreTrainedTokenizerBase,
    tools: list[dict] | None = None,
    *,
    continues: bool = False,
    ended: bool = False,
) -> str:
    """The text that the chat template writes, up to where the policy's next turn begins. Raises one of REFUSALS.

    continues: up to the end of the last message's words, which the policy continues. ended: the conversation as it is,
    without the beginning of another turn.
    """
    template = tokenizer.get_chat_template(tools=tools or None)  # some models have several
    # With images, the contents are lists of parts already.
    if is_chat(messages) and takes_parts(tokenizer, template, tuple(message["role"] for message in messages)):
        messages = as_parts(messages)
    return tokenizer.apply_chat_template(
        messages,
        tools or None,
        tokenize=False,
        add_generation_prompt=not (continues or ended),
        continue_final_message=continues,
        **dates.variables(tokenizer, template),
    )


def control_tokens(tokenizer: PreTrainedTokenizerBase) -> dict[int, str]:
    """Ids and texts of the control tokens: those of the tokenizer itself, and added ones that are marked as special."""
    added = {token: entry.content for token, entry in tokenizer.added_tokens_decoder.items() if entry.special}
    return added | dict(zip(tokenizer.all_special_ids, tokenizer.all_special_tokens))


def turn_end(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The ids with which the chat template ends a turn of the assistant; the end token where it writes none.

    It is not always the tokenizer's: Gemma's turns end with <end_of_turn>, and a base model with a ChatML template has
    <|endoftext|> as its end token.
    """
    end = [tokenizer.eos_token_id]
    if not tokenizer.chat_template:
        return end
    messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": TURN}]
    try:
        _, _, after = chat_text(messages, tokenizer, ended=True).partition(TURN)
    except REFUSALS:
        return end  # it wants other messages first
    ids = tokenizer(after, add_special_tokens=False)["input_ids"]
    control = control_tokens(tokenizer)
    for place, token in enumerate(ids):
        if token in control:
            # Behind other words it would be the start of the next turn.
            return ids[: place + 1] if not tokenizer.decode(ids[:place]).strip() else end
    return end


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
