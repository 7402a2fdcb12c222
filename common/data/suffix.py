"""Texts that the model's chat template writes: a prompt, and the token ids that stand between two turns of the policy,
which are the observation in the template's form.

A conversation is prompt ids + sampled ids + suffix ids + sampled ids ... The chat template is asked only for the part
behind a turn. Rendering the whole conversation again could change what was sampled: templates remove thinking from
earlier turns, and the same text can have other tokens.
"""

from functools import cache, lru_cache, partial

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from common.errors import BadInput, say

TURN, THOUGHT, HEARD = "a5f1-turn", "b7c2-thought", "c9d3-heard"  # to find again behind a template


def write_chat(where: str, messages: list[dict], tokenizer: PreTrainedTokenizerBase, tools: list[dict] | None) -> str:
    """The text of a prompt whose contents are texts or lists of parts. Raises BadInput if the template refuses it."""
    try:
        return chat_text(messages, tokenizer, tools)
    except (TemplateError, ValueError, TypeError, IndexError) as error:
        # Many templates refuse a system prompt, or two messages of one role in a row.
        raise BadInput(f"{where}: refused by the chat template: {error}") from None


def chat_text(messages: list[dict], tokenizer: PreTrainedTokenizerBase, tools: list[dict] | None = None) -> str:
    """The text that the chat template writes, up to where the policy's next turn begins. Raises TemplateError."""
    if all(isinstance(message["content"], str) for message in messages):
        roles = tuple(message["role"] for message in messages)
        template = tokenizer.get_chat_template(tools=tools or None)  # some models have several
        messages = as_parts(messages) if takes_parts(tokenizer, template, roles) else messages
    return tokenizer.apply_chat_template(messages, tools or None, tokenize=False, add_generation_prompt=True)


def as_parts(messages: list[dict]) -> list[dict]:
    """The messages with each content as a list of one part."""
    return [{**message, "content": [{"type": "text", "text": message["content"]}]} for message in messages]


@lru_cache(maxsize=1000)
def takes_parts(tokenizer: PreTrainedTokenizerBase, template: str, roles: tuple[str, ...]) -> bool:
    """Whether the chat template shows messages of these roles only if their contents are lists of parts.

    Templates of some models that see images do: they walk a text by its characters, and write none of it. Raises
    TemplateError for a template that shows neither form. What the assistant said before may be left out.
    """
    texts = [f"{HEARD}-{i}-" for i in range(len(roles))]
    messages = [{"role": role, "content": text} for role, text in zip(roles, texts)]

    def lost(messages: list[dict]) -> str:
        """A role whose text the template does not write, "refused" if it takes no such messages, otherwise ""."""
        try:
            written = tokenizer.apply_chat_template(messages, chat_template=template, tokenize=False)
        except (TemplateError, ValueError, TypeError, IndexError):
            return "refused"
        asked = ((role, text) for role, text in zip(roles, texts) if role in ("system", "user"))
        return next((role for role, text in asked if text not in written), "")

    found = lost(messages)
    if found and not lost(as_parts(messages)):
        return True
    if found not in ("", "refused"):  # where it refuses, the messages themselves will show why
        raise TemplateError(f'it does not show what the role "{found}" says')
    return False


class Suffix:
    """Token ids that follow a turn: its end where the template has more than the end token, the observation, and the
    start of the next turn. Without a chat template they are the observation and a line end.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stop_token_ids: list[int], role: str):
        """Raises BadInput if the template cannot show an observation of this role."""
        self.tokenizer, self.stop_token_ids, self.role = tokenizer, stop_token_ids, role
        if not tokenizer.chat_template:
            return
        name = f"--model {tokenizer.name_or_path}: its chat template"
        try:
            suffix = self.render([HEARD])
        except TemplateError as error:
            raise BadInput(f'{name} refuses an observation of the role "{role}": {error}') from None
        if HEARD not in suffix:
            raise BadInput(f'{name} does not show what the role "{role}" says; set role = "user" in the environment')
        before = partial(self.text, f"<think>\n{THOUGHT}\n</think>\n\n{TURN}")
        if before([]).partition(TURN)[0] != before([HEARD]).partition(TURN)[0]:
            say(f"{name} rewrites earlier turns; each episode keeps them as they were sampled")

    def text(self, turn: str, observations: list[str]) -> str:
        """The conversation of a question, a turn and the observations as the chat template writes it."""
        messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": turn}]
        messages += [{"role": self.role, "content": said} for said in observations]
        return chat_text(messages, self.tokenizer)

    def render(self, observations: list[str]) -> str:
        """The text that the chat template writes behind a turn."""
        suffix = self.text(TURN, observations).partition(TURN)[2]
        if not suffix:
            name = self.tokenizer.name_or_path
            raise BadInput(f"--model {name}: its chat template drops a turn before an observation of {self.role}")
        return suffix

    def ids(self, observations: list[str]) -> list[int]:
        """The ids that follow a turn which ended with an end token."""
        if not self.tokenizer.chat_template:
            return self.tokenizer("\n".join(observations) + "\n", add_special_tokens=False)["input_ids"]
        ids = self.tokenizer(self.render(observations), add_special_tokens=False)["input_ids"]
        return ids[1:] if ids[0] in self.stop_token_ids else ids  # the policy has sampled an end token itself


def that_fit(prompts: list, tokenizer: PreTrainedTokenizerBase, limit: int) -> tuple[list, int]:
    """The prompts that have at most `limit` tokens together with their solution, and the most tokens of one of them.
    The others are counted. Raises BadInput if none is left.
    """
    solutions, _ = demonstrations(prompts, tokenizer)
    lengths = [len(prompt.ids) + len(ids) for prompt, ids in zip(prompts, solutions)]
    kept = [prompt for prompt, length in zip(prompts, lengths) if length <= limit]
    if not kept:
        raise BadInput(f"all {len(prompts)} rows have more than {limit} tokens with their solution")
    if len(kept) < len(prompts):
        say(f"left out {len(prompts) - len(kept)} of {len(prompts)} rows with more than {limit} tokens")
    return kept, max(length for length in lengths if length <= limit)


def demonstrations(prompts: list, tokenizer: PreTrainedTokenizerBase) -> tuple[list[list[int]], list[list[bool]]]:
    """The solutions of prompts as token ids, and for each token whether the policy would say it.

    A solution is one text, or a list of turns: policy, tool, policy, tool ... policy. Each of the policy's turns ends
    with the tokenizer's end token. The column "role" says who speaks between them, if it is not a tool but the "user".
    """
    suffix = cache(lambda role: Suffix(tokenizer, [tokenizer.eos_token_id], role))
    responses, masks = [], []
    for prompt in prompts:
        ids, mask = [], []
        for i, text in enumerate([prompt.solution] if isinstance(prompt.solution, str) else prompt.solution):
            turn = tokenizer(text, add_special_tokens=False)["input_ids"] + [tokenizer.eos_token_id]
            ids += turn if i % 2 == 0 else suffix(prompt.meta.get("role", "tool")).ids([text])
            mask += [i % 2 == 0] * (len(ids) - len(mask))
        responses.append(ids)
        masks.append(mask)
    return responses, masks
