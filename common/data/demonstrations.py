"""Solutions to imitate, as token ids: the data of algos/sft.py.

A solution is one turn, or a list of turns: policy, tool, policy, tool ... policy. Each of the policy's turns ends as
the chat template ends it. The column "role" says who speaks between them, if it is not a tool but the "user".
"""

from functools import cache

from transformers import PreTrainedTokenizerBase

from common.data.prompts import Prompt
from common.data.responses import Responses
from common.data.suffix import Suffix
from common.errors import BadInput, say


def that_fit(prompts: list[Prompt], tokenizer: PreTrainedTokenizerBase, limit: int) -> tuple[list[Prompt], int]:
    """The prompts that have at most `limit` tokens together with their solution, and the most tokens of one of them.

    A printed line counts the others: one row longer than memory allows would end every attempt to resume. Raises
    BadInput if none is left.
    """
    solutions, _ = demonstrations(prompts, tokenizer)
    fitting = []
    # The memory of a step is planned for it.
    longest = 0
    for prompt, ids in zip(prompts, solutions):
        length = len(prompt.ids) + len(ids)
        if length <= limit:
            fitting.append(prompt)
            longest = max(longest, length)
    if not fitting:
        raise BadInput(f"all {len(prompts)} rows have more than {limit} tokens with their solution")
    if len(fitting) < len(prompts):
        say(f"left out {len(prompts) - len(fitting)} of {len(prompts)} rows with more than {limit} tokens")
    return fitting, longest


def demonstrations(
    prompts: list[Prompt], tokenizer: PreTrainedTokenizerBase
) -> tuple[list[list[int]], list[list[bool]]]:
    """The solutions of prompts as token ids, and for each token whether the policy would say it."""
    encoder = Responses(tokenizer)

    # Making one renders the chat template, so each role has one.
    @cache
    def suffix_of(role: str) -> Suffix:
        return Suffix(tokenizer, encoder.end[-1:], role)

    responses = []
    masks = []
    for prompt in prompts:
        turns = prompt.solution if isinstance(prompt.solution, list) else [prompt.solution]
        ids = []
        mask = []
        for i, text in enumerate(turns):
            # The policy has the first turn, the third, and so on.
            is_policy = i % 2 == 0
            if i == 0:
                turn = encoder.ids(prompt.id, prompt, text)
            elif is_policy:
                turn = encoder.ids_of_text(text)
            else:
                turn = suffix_of(prompt.meta.get("role", "tool")).ids([text])
            ids += turn
            mask += [is_policy] * len(turn)
        responses.append(ids)
        masks.append(mask)
    return responses, masks
