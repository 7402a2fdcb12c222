"""Pairs of responses to one prompt, the first of which is preferred: the data of algos/dpo.py.

A row has "prompt", "chosen" and "rejected". The responses are texts, or chat messages that end with the response. A row
without a prompt has it in the messages of "chosen".
"""

from typing import Any

from transformers import PreTrainedTokenizerBase

from common.data import conversations, sources
from common.data.conversations import Message
from common.data.prompts import Prompt, Source, load
from common.data.responses import Responses
from common.data.rows import collect, lookup
from common.data.templates import as_messages, spoken
from common.errors import BadInput, say

Pairs = dict[tuple[str, str], list[list[int]]]  # key of a prompt -> ids of the chosen, the rejected response


def load_pairs(
    dataset: tuple[str, ...],
    source: Source,
    tokenizer: PreTrainedTokenizerBase,
    max_prompt_tokens: int,
    max_response_tokens: int,
) -> tuple[list[Prompt], Pairs]:
    """Prompts of --dataset, and the responses to each with their end tokens.

    Pairs of equal responses, and pairs with a response over the limit, are left out and counted. Raises BadInput.
    """
    prompts = load(dataset, source, "train", tokenizer, max_prompt_tokens)

    encoder = Responses(tokenizer)

    def make(where: str, prompt: Prompt) -> list[list[int]]:
        columns = sources.columns(prompt.dataset, source.columns)
        return [encoder.ids(where, prompt, turn) for turn in turns(where, prompt, columns)]  # chosen, rejected

    responses = collect([(prompt.id, prompt) for prompt in prompts], make)
    # Two equal responses have a gradient of 0. A response that is cut would teach where not to stop.
    usable = []
    pairs = {}
    for prompt, (chosen, rejected) in zip(prompts, responses):
        longest = max(len(chosen), len(rejected))
        if chosen != rejected and longest <= max_response_tokens:
            usable.append(prompt)
            pairs[prompt.key] = [chosen, rejected]
    reason = f"equal responses, or one over --max-response-tokens {max_response_tokens}"
    if not usable:
        raise BadInput(f"--dataset {' '.join(dataset)}: no pair is left: all have two {reason}")
    if len(usable) < len(prompts):
        say(f"left out {len(prompts) - len(usable)} of {len(prompts)} pairs with two {reason}")
    return usable, pairs


def turns(where: str, prompt: Prompt, columns: dict[str, str]) -> list[str | Message]:
    """The chosen and the rejected response of a row. Raises BadInput."""
    # Without --template and instruction, which the messages of a pair do not have.
    asked = as_messages(prompt.meta["prompt"])
    responses = []
    for name in ("chosen", "rejected"):
        column = columns.get(name, name)
        before, turn = split_response(where, column, lookup(prompt.meta, column))
        if before:
            before = conversations.with_system(where, prompt.meta, before)
        # Otherwise the pair would answer another question than the one that the policy sees.
        if before and before != asked:
            raise BadInput(f'{where}: the messages before the response in "{column}" are not the row\'s prompt')
        responses.append(turn)
    return responses


def split_response(where: str, column: str, value: Any) -> tuple[list[Message], str | Message]:
    """The messages before a response, and the response. Raises BadInput."""
    if isinstance(value, str):
        value = conversations.from_response(value)  # some tables store messages as JSON
    if isinstance(value, str):
        return [], value
    if conversations.looks_like(value):
        messages = conversations.read(where, column, value)
        if messages[-1]["role"] == "assistant":
            return messages[:-1], spoken(messages[-1])
    raise BadInput(
        f'{where}: "{column}" must be a text, or messages of which the assistant\'s is last, '
        f"got {conversations.shown(value)}"
    )
