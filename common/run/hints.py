"""The prompts of a batch once more, each with a hint that only a teacher sees.

The hint goes into the last thing that the prompt's user says. Chat template, system prompt and tools stay as they are.
For a model without a chat template the whole prompt is what the user says.
"""

import dataclasses
from collections.abc import Callable, Sequence

import torch

from common.data import families, templates
from common.data.prompts import Prompt, SpelledTokens
from common.errors import BadInput
from common.preflight.checks import positions_of
from common.preflight.memory import text_config
from common.preflight.prepare import Settings
from common.run.sampling import Batch
from common.run.tracking import Tracker

Write = Callable[[str, str], str]  # (what the user says, hint) -> what the user says to the teacher


class Hinter:
    """Writes hints into prompts."""

    def __init__(self, settings: Settings, write: Write):
        """Raises BadInput if a prompt has images, or no words of a user."""
        self.tokenizer = settings.tokenizer
        self.spelled = SpelledTokens(self.tokenizer, settings.args.source.control_tokens)
        # With --control-tokens text a chat template's control tokens become text wherever a message spells them.
        are_text = settings.args.source.control_tokens == "text" and self.tokenizer.chat_template
        self.control_tokens = set() if are_text else set(templates.control_tokens(self.tokenizer).values())
        self.max_response_tokens = settings.args.max_response_tokens
        self.write = write
        self.positions = positions_of(settings.model)
        # The model has been given the frequencies that suit its own prompts.
        limit = families.longrope_limit(text_config(settings.model))
        if limit and settings.compute.longest <= limit:
            self.positions = min(self.positions, limit)
        for prompt in settings.prompts:
            if hasattr(prompt.ids, "images"):
                raise BadInput(f"{prompt.id}: has images, and a prompt with images cannot be given a hint")
            if self.tokenizer.chat_template and not any(turn["role"] == "user" for turn in prompt.messages):
                raise BadInput(f"{prompt.id}: has no message of a user that a hint could go into")

    def check(self, prompts: Sequence[Prompt], hints: Sequence[str]) -> None:
        """Refuse hints that are known before the run if one does not fit into the model. Raises BadInput."""
        room = self.positions - self.max_response_tokens
        for place, (prompt, hint) in enumerate(zip(prompts, hints)):
            # A tokenizer makes at most one token of a byte, and twice that leaves room for what normalizing adds. So
            # most hints fit for certain, and only the others take the time to be tokenized. The first is tokenized in
            # any case: a chat template that can't render it would otherwise fail in the middle of the run.
            if place and len(prompt.ids) + 2 * len(self.write(self.said(prompt), hint).encode()) <= room:
                continue
            tokens = len(self.ids(prompt, hint))
            if tokens > room:
                raise BadInput(
                    f"--max-response-tokens {self.max_response_tokens}: the prompt {prompt.id} has {tokens} tokens "
                    f"with its hint, and --model has {self.positions} positions; lower it, or --max-prompt-tokens, "
                    "which drops longer prompts"
                )

    def spells_control_token(self, hint: str) -> bool:
        """Whether it would end the user's turn in the prompt: a policy can write <|im_end|> in ordinary tokens."""
        return any(token in hint for token in self.control_tokens)

    def last_turn(self, prompt: Prompt) -> int:
        """Place of the last message of the user."""
        return max(place for place, turn in enumerate(prompt.messages) if turn["role"] == "user")

    def said(self, prompt: Prompt) -> str:
        """What the user says, where the hint goes."""
        return prompt.messages[self.last_turn(prompt)]["content"] if self.tokenizer.chat_template else prompt.text

    def ids(self, prompt: Prompt, hint: str) -> list[int]:
        """Token ids of a prompt with a hint in it."""
        said = self.write(self.said(prompt), hint)
        if not self.tokenizer.chat_template:
            return templates.tokenize(prompt.id, said, self.tokenizer)
        messages = list(prompt.messages)
        last = self.last_turn(prompt)
        messages[last] = {**messages[last], "content": said}
        continues = messages[-1]["role"] == "assistant"
        text = templates.chat_text(messages, self.tokenizer, prompt.tools, continues=continues)
        quoted = self.spelled.found(prompt.id, [message["content"] for message in messages])
        return templates.tokenize(prompt.id, text, self.tokenizer, quoted)

    def batch(self, batch: Batch, hints: Sequence[str | None], tracker: Tracker) -> tuple[Batch, torch.Tensor]:
        """(the batch after prompts with hints, (N,) bool: True for graded rows that have a hint).

        hints: one for each of the N rows, or None. A row whose hint does not fit into the model goes without, and so
        does one whose hint spells a control token. Both are counted.
        """
        graded = batch.response_mask.any(1)  # (N,)
        prompt_ids = list(batch.prompt_ids)
        has_hint = torch.zeros_like(graded)  # (N,)
        too_long = spelled = 0
        for row in graded.nonzero().flatten().tolist():
            if hints[row] is None:
                continue
            if self.spells_control_token(hints[row]):
                spelled += 1
                continue
            ids = self.ids(batch.prompts[row // batch.group_size], hints[row])
            if len(ids) + len(batch.response_ids[row]) > self.positions:
                too_long += 1
                continue
            prompt_ids[row] = ids
            has_hint[row] = True
        tracker.mean("teacher/hinted", has_hint.sum(), graded.sum())
        tracker.sum("teacher/too_long", too_long)
        tracker.sum("teacher/control_token", spelled)
        return dataclasses.replace(batch, prompt_ids=prompt_ids), has_hint
