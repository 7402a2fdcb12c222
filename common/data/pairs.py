"""Pairs of responses to one prompt, the first of which is preferred: the data of algos/dpo.py.

A row has "prompt", "chosen" and "rejected". The responses are texts, or chat messages that end with the response. A row
without a prompt has it in the messages of "chosen".
"""

import json
from typing import Any

from transformers import PreTrainedTokenizerBase

from common.data import sources
from common.data.formats import split_conversation
from common.data.prompts import Prompt, Source, load
from common.errors import BadInput, say

Pairs = dict[str, list[list[int]]]  # id of the prompt -> token ids of the chosen response and of the rejected one


def load_pairs(
    dataset: tuple[str, ...], source: Source, tokenizer: PreTrainedTokenizerBase, max_prompt_tokens: int,
    max_response_tokens: int,
) -> tuple[list[Prompt], Pairs]:  # fmt: skip
    """Prompts of --dataset, and the responses to each with their end tokens.

    Pairs of equal responses, and pairs with a response over the limit, are left out and counted. Raises BadInput.
    """
    prompts = load(dataset, source, "train", tokenizer, max_prompt_tokens)
    found = dict(sources.collect([(prompt.id, prompt) for prompt in prompts], lambda where, prompt: (
        where, pair(where, prompt, sources.columns(prompt.dataset, source.columns), tokenizer)
    )))  # fmt: skip
    equal = {where for where, (chosen, rejected) in found.items() if chosen == rejected}
    overlong = {where for where, both in found.items() if max(map(len, both)) > max_response_tokens} - equal
    if equal:
        say(f"left out {len(equal)} of {len(prompts)} pairs: chosen and rejected are the same text")
    if overlong:
        say(f"left out {len(overlong)} of {len(prompts)} pairs with a response over {max_response_tokens} tokens")
    kept = [prompt for prompt in prompts if prompt.id not in equal | overlong]
    if not kept:
        raise BadInput(
            f"--dataset {' '.join(dataset)}: no pair is left: all have two equal responses, or one that is longer than "
            f"--max-response-tokens {max_response_tokens}"
        )
    return kept, found


def pair(where: str, prompt: Prompt, columns: dict[str, str], tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    """Token ids of the chosen and the rejected response of a row. Raises BadInput."""
    own = [columns.get(name, name) for name in ("chosen", "rejected")]
    values = [sources.lookup(prompt.meta, column) for column in own]
    before, texts = zip(*map(split_response, values))
    for column, value, text in zip(own, values, texts):
        if not isinstance(text, str):
            shown = json.dumps(value, default=str)[:80]
            raise BadInput(
                f'{where}: "{column}" must be a text, or messages of which the assistant\'s is last, got {shown}'
            )
    own_prompt = prompt.meta["prompt"]
    if isinstance(own_prompt, str):
        own_prompt = [{"role": "user", "content": own_prompt}]
    if before[0] and before[0] != own_prompt:
        raise BadInput(f'{where}: the messages before the response in "{own[0]}" are not the row\'s prompt')
    if before[0] != before[1]:
        raise BadInput(f'{where}: the messages before the response differ in "{own[0]}" and "{own[1]}"')
    return [tokenizer(text, add_special_tokens=False)["input_ids"] + [tokenizer.eos_token_id] for text in texts]


def split_response(value: Any) -> tuple[Any, Any]:
    """The messages before a response, and its text; None and the value itself if it is not a list of messages."""
    if not isinstance(value, list):
        return None, value
    before, text = split_conversation(value, None)
    return before, text
