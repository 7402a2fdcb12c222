"""One sequence a row: how a model that must not be packed computes a micro-batch.

Convolutions and recurrent layers carry a state from token to token, which in a packed row would run from one sequence
into the next. Other families express a window, a chunk or positions only in a mask that they make themselves. Such a
model takes the packed row apart again, into one row for each response, each with its prompt. Responses b and c to the
prompt a, and e to d:

    packed      a0  a1  a2 | b0  b1 | c0  c1 | d0  d1  e0  e1  e2

    unpacked    a0  a1  a2  b0  b1
                a0  a1  a2  c0  c1
                d0  d1  e0  e1  e2

Rows are padded on the right, with no attention mask and no position ids: no token sees a later one, so padding changes
nothing, and each family counts its positions itself. Padding on the left would need a mask in every kind of layer, and
GPT-2 and Llama 4 would count the padding as positions. packing_check.py compares padded rows with single ones.

It is still one forward for each micro-batch. Under FSDP every layer is a collective, so ranks that hold different
numbers of responses could not run one forward for each.
"""

import torch
from torch import nn

from common.errors import BadInput
from common.trainer.attention import Group
from common.trainer.batching import MicroBatch
from common.trainer.parts import body_of


def hidden_states(model: nn.Module, micro: MicroBatch) -> torch.Tensor:
    """The last hidden states, (R, hidden size), before the R response tokens of a micro-batch, each row on its own."""
    if micro.images:
        raise BadInput("packing is off, and prompts have images: only packed rows can have them")
    places, predictors = rows_of(micro.group_lengths, micro.input_ids.device, micro.beginning)
    hidden = body_of(model)(input_ids=micro.input_ids[0][places], use_cache=False).last_hidden_state  # (n, longest, d)
    return hidden.flatten(0, 1).index_select(0, predictors)


def rows_of(groups: list[Group], device: torch.device, beginning: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Where the tokens of a packed row go: places (n, longest) and predictors (R,).

    places: for each row the position in the packed row of its tokens, prompt and response. Padding repeats the row's
    first token. predictors: positions in the flattened (n, longest) whose logits predict the response tokens, in the
    order of MicroBatch.targets. With batching.lay_out it is the only place that shifts by one token.
    beginning: tokens at the start of the packed row that all prompts begin with.
    """
    longest = beginning + max(prompt + response for prompt, responses in groups for response in responses)
    places: list[list[int]] = []
    predictors: list[int] = []
    start = beginning  # position in the packed row
    for prompt, responses in groups:
        prompt_places = [*range(beginning), *range(start, start + prompt)]
        start += prompt
        for response in responses:
            before_first = len(places) * longest + len(prompt_places) - 1  # the prompt's last token, in this row
            predictors += range(before_first, before_first + response)
            padding = [prompt_places[0]] * (longest - len(prompt_places) - response)
            places.append([*prompt_places, *range(start, start + response), *padding])
            start += response
    return torch.tensor(places, device=device), torch.tensor(predictors, dtype=torch.long, device=device)
