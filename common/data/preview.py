"""What --dry-run shows of the data: one row of each data set as the model sees it, made from its token ids."""

import os
import sys
from itertools import groupby

from transformers import PreTrainedTokenizerBase

from common.data import templates
from common.data.demonstrations import demonstrations
from common.data.pairs import Pairs
from common.data.prompts import Prompt
from common.data.templates import turn_end
from common.errors import visible

GREEN, PLAIN = "\x1b[32m", "\x1b[0m"


def show(prompts: list[Prompt], tokenizer: PreTrainedTokenizerBase, stop_token_ids: list[int]) -> None:
    """Print the first prompt of each data set, and the tokens that end a response.

    Control tokens stand in 【 】. A control token that is encoded as text does not.
    """
    for prompt in first_of_each(prompts):
        show_prompt(prompt, tokenizer)
    show_ends(stop_token_ids, tokenizer)


def show_solutions(prompts: list[Prompt], tokenizer: PreTrainedTokenizerBase) -> None:
    """show(), with the solution to each prompt. What is learned is green in a terminal, and in ⟦ ⟧ elsewhere."""
    for prompt in first_of_each(prompts):
        show_prompt(prompt, tokenizer)
        (ids,), (mask,) = demonstrations([prompt], tokenizer)
        show_response("solution", ids, mask, tokenizer)
    show_ends(turn_end(tokenizer)[-1:], tokenizer)


def show_pairs(prompts: list[Prompt], pairs: Pairs, tokenizer: PreTrainedTokenizerBase) -> None:
    """show(), with both responses to each prompt."""
    for prompt in first_of_each(prompts):
        show_prompt(prompt, tokenizer)
        for name, ids in zip(("chosen", "rejected"), pairs[prompt.key]):
            show_response(name, ids, [True] * len(ids), tokenizer)
    show_ends(turn_end(tokenizer)[-1:], tokenizer)


def first_of_each(prompts: list[Prompt]) -> list[Prompt]:
    """The first prompt of each data set."""
    first = {}
    for prompt in prompts:
        first.setdefault(prompt.dataset, prompt)
    return list(first.values())


def show_prompt(prompt: Prompt, tokenizer: PreTrainedTokenizerBase) -> None:
    write(visible(f"{prompt.id} as the model sees it, {len(prompt.ids)} tokens:"))
    write(marked(prompt.ids, tokenizer))


def show_response(name: str, ids: list[int], mask: list[bool], tokenizer: PreTrainedTokenizerBase) -> None:
    write(visible(f"its {name}, {len(ids)} tokens, {sum(mask)} of them learned:"))
    before, after = (GREEN, PLAIN) if sys.stdout.isatty() else ("⟦", "⟧")
    pieces = []
    for learned, pairs in groupby(zip(ids, mask), key=lambda pair: pair[1]):
        text = marked([token for token, _ in pairs], tokenizer)
        pieces.append(f"{before}{text}{after}" if learned else text)
    write("".join(pieces))


def show_ends(token_ids: list[int], tokenizer: PreTrainedTokenizerBase) -> None:
    ends = ", ".join(f"{tokenizer.decode([token])} ({token})" for token in token_ids)
    write(visible(f"a response ends with {ends}"))


def marked(ids: list[int], tokenizer: PreTrainedTokenizerBase) -> str:
    """The text of token ids, with each control token in 【 】."""
    control = templates.control_tokens(tokenizer)
    text = ""
    for is_control, run in groupby(ids, key=control.__contains__):
        if is_control:
            text += "".join(f"【{control[token]}】" for token in run)
        else:
            text += tokenizer.decode(list(run))
    return visible(text)


def write(text: str) -> None:
    """Print a text on rank 0. errors.say would escape the colours."""
    if os.environ.get("RANK", "0") == "0":
        print(text, flush=True)
