"""The date that a chat template prints. A run has one date, from its first step to its last.

Some templates write today's date into each prompt, by a function strftime_now(form) that transformers gives them. A run
that is resumed on another day would then have other prompts. So run.json records the date on which a run began, and
load_tokenizer() gives it to the tokenizer.
"""

from datetime import UTC, date, datetime
from typing import Any


def today() -> str:
    """The date as run.json has it, such as 2026-05-01. UTC, because the nodes of a run may be in several time zones."""
    return datetime.now(UTC).date().isoformat()


def set_date(tokenizer: Any, day: str) -> None:
    """Let this tokenizer's chat template print that date. "": today's, which then stays the same at midnight."""
    tokenizer.chat_date = day or today()


def date_of(tokenizer: Any) -> str:
    """The date that the tokenizer's chat template prints; today's for a tokenizer that has none."""
    return getattr(tokenizer, "chat_date", "") or today()


def variables(tokenizer: Any, template: Any) -> dict[str, Any]:
    """Arguments for apply_chat_template() with which a template prints the tokenizer's date.

    Empty for a template that prints none: some tokenizers refuse arguments that they don't know.
    """
    if "strftime_now" not in str(template):
        return {}
    midnight = datetime.combine(date.fromisoformat(date_of(tokenizer)), datetime.min.time())
    # A variable goes before transformers' own function of the same name.
    return {"strftime_now": midnight.strftime}
