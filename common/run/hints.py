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
        """Refuse hints that are known before the run if the longest does not fit into the model. Raises BadInput."""
        sizes = [len(prompt.ids) + len(hint) for prompt, hint in zip(prompts, hints)]
        longest = sizes.index(max(sizes))
        tokens = len(self.ids(prompts[longest], hints[longest]))
        if tokens + self.max_response_tokens > self.positions:
            raise BadInput(
                f"--max-response-tokens {self.max_response_tokens}: the prompt {prompts[longest].id} has {tokens} "
                f"tokens with its hint, and --model has {self.positions} positions"
            )

    def ids(self, prompt: Prompt, hint: str) -> list[int]:
        """Token ids of a prompt with a hint in it."""
        messages = []
        if self.tokenizer.chat_template:
            messages = list(prompt.messages)
            last = max(place for place, turn in enumerate(messages) if turn["role"] == "user")
            messages[last] = {**messages[last], "content": self.write(messages[last]["content"], hint)}
            continues = messages[-1]["role"] == "assistant"
            text = templates.chat_text(messages, self.tokenizer, prompt.tools, continues=continues)
        else:
            text = self.write(prompt.text, hint)
        quoted = self.spelled.found(prompt.id, messages)
        return templates.tokenize(prompt.id, text, self.tokenizer, quoted)

    def batch(self, batch: Batch, hints: Sequence[str | None], tracker: Tracker) -> tuple[Batch, torch.Tensor]:
        """(the batch after prompts with hints, (N,) bool: True for graded rows that have a hint).

        hints: one for each of the N rows, or None. A row whose hint does not fit into the model goes without.
        """
        group_size = len(batch) // len(batch.prompts)
        graded = batch.response_mask.any(1)  # (N,)
        prompt_ids = list(batch.prompt_ids)
        has_hint = torch.zeros_like(graded)  # (N,)
        too_long = 0
        for row in graded.nonzero().flatten().tolist():
            if hints[row] is None:
                continue
            ids = self.ids(batch.prompts[row // group_size], hints[row])
            if len(ids) + len(batch.response_ids[row]) > self.positions:
                too_long += 1
                continue
            prompt_ids[row] = ids
            has_hint[row] = True
        tracker.mean("teacher/hinted", has_hint.sum(), graded.sum())
        tracker.sum("teacher/too_long", too_long)
        return dataclasses.replace(batch, prompt_ids=prompt_ids), has_hint
