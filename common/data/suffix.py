"""The token ids between two turns of the policy: an observation, in the form of the chat template.

A conversation is prompt ids + sampled ids + suffix ids + sampled ids ... The chat template is asked only for the part
behind a turn. Rendering the whole conversation again could change what was sampled: templates remove thinking from
earlier turns, and the same text can have other tokens.
"""

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from common.data.templates import REFUSALS, TURN, chat_text, turn_end
from common.errors import BadInput

# A text to find again in what the template writes.
OBSERVATION = "c9d3-observation"


class Suffix:
    """Token ids that follow a turn: the rest of its end, the observation, and the start of the next turn.

    Without a chat template they are the observation and a line end.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stop_token_ids: list[int], role: str):
        """Raises BadInput if the template cannot show an observation of this role."""
        self.tokenizer = tokenizer
        self.stop_token_ids = stop_token_ids
        self.turn_end = turn_end(tokenizer)
        self.role = role
        # Better a refusal now than in the middle of the first episode.
        if not tokenizer.chat_template:
            return
        name = f"--model {tokenizer.name_or_path}: its chat template"
        try:
            text = self.render([OBSERVATION])
        except REFUSALS as error:
            raise BadInput(f'{name} refuses an observation of the role "{role}": {error}') from None
        if OBSERVATION not in text:
            raise BadInput(f'{name} does not show what the role "{role}" says; set role = "user" in the environment')

    def render(self, observations: list[str]) -> str:
        """The text that the chat template writes behind a turn. Raises one of REFUSALS."""
        messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": TURN}]
        messages += [{"role": self.role, "content": text} for text in observations]
        _, turn, text = chat_text(messages, self.tokenizer).partition(TURN)
        if not turn:
            raise TemplateError("it drops a turn before an observation")
        return text

    def ids(self, observations: list[str]) -> list[int]:
        """The ids that follow a turn which ended with an end token. Raises one of REFUSALS."""
        if not self.tokenizer.chat_template:
            return self.tokenizer("\n".join(observations) + "\n", add_special_tokens=False)["input_ids"]
        ids = self.tokenizer(self.render(observations), add_special_tokens=False)["input_ids"]
        # The template ends the turn, but the policy has sampled the end already.
        ended = self.turn_end[-1] in self.stop_token_ids
        if ended and ids[: len(self.turn_end)] == self.turn_end:
            return ids[len(self.turn_end) :]
        if ids and ids[0] in self.stop_token_ids:
            return ids[1:]
        return ids
