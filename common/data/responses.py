"""Turns of the assistant to learn, as token ids: the same for SFT, for both responses of a DPO pair, and for dialogues.

A turn is a text, whose ids are its own and then the end of a turn; or a message with calls of tools or reasoning, whose
ids are those of what the chat template writes for it.
"""

import re
from functools import cached_property

from transformers import PreTrainedTokenizerBase

from common.data import templates
from common.data.conversations import SPOKEN_KEYS, Message, shown
from common.data.prompts import Prompt
from common.errors import BadInput

THINK = "<think>"


class Responses:
    """Makes token ids of turns."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        self.tokenizer = tokenizer

    @cached_property
    def end(self) -> list[int]:
        """The ids that end a turn."""
        return templates.turn_end(self.tokenizer)

    @cached_property
    def end_texts(self) -> list[str]:
        """How a text may spell the end of a turn."""
        return [self.tokenizer.decode(self.end[-1:]), self.tokenizer.eos_token]

    def ids(self, where: str, prompt: Prompt, turn: str | Message) -> list[int]:
        """The token ids of a turn that answers a prompt, with the end of a turn. Raises BadInput."""
        if isinstance(turn, str):
            text = turn
        else:
            text = self.text_of_message(where, prompt, turn)
        # What the template has opened where the policy's turn begins is not said twice.
        opened = re.search(rf"{THINK}(\n*)$", prompt.text)
        if opened and text.lstrip().startswith(THINK):
            text = text.lstrip().removeprefix(THINK).removeprefix(opened[1])
        return self.ids_of_text(text)

    def ids_of_text(self, text: str) -> list[int]:
        """The token ids of a text, with the end of a turn."""
        return self.tokenizer(self.without_end(text), add_special_tokens=False)["input_ids"] + self.end

    def without_end(self, text: str) -> str:
        """The text without the end of a turn, which some data sets have in it already."""
        for end in self.end_texts:
            if text.endswith(end):
                return text.removesuffix(end)
        return text

    def text_of_message(self, where: str, prompt: Prompt, turn: Message) -> str:
        """What the chat template writes for a turn with calls or reasoning. Raises BadInput."""
        said = [key for key in SPOKEN_KEYS if turn.get(key)]
        if not self.tokenizer.chat_template:
            raise BadInput(f'{where}: the last turn has "{said[0]}", and --model has no chat template to show it')
        try:
            whole = templates.chat_text([*prompt.messages, turn], self.tokenizer, prompt.tools, ended=True)
        except templates.REFUSALS as error:
            raise BadInput(f"{where}: refused by the chat template: {error}") from None
        if not whole.startswith(prompt.text):
            raise BadInput(
                f"{where}: once the last turn is there, the chat template writes what is before it in another way, so "
                f'the text of the turn is unknown; leave out "{said[0]}", or write it into the content'
            )
        text = whole.removeprefix(prompt.text).rstrip()
        for key in said:
            value = turn[key]
            texts = [value] if isinstance(value, str) else [call["function"]["name"] for call in value]
            if not all(templates.is_in(each.strip(), text) for each in texts):
                raise BadInput(f'{where}: the chat template leaves out "{key}" of the last turn: {shown(value)}')
        templates.check_shown(where, [turn], None, text)
        return text
