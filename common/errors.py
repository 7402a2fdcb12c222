"""What ends a run, or should be looked at: one line with a stable code, explained in docs/errors.md."""

import json
import os
import re
import sys
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

# What the libraries below say when another rank is gone or does not come.
LATE = ("timed out", "timeout", "Timed out")
GONE = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "Connection refused")


# Environment variables whose values are written nowhere: not into run.json, not into a message.
SECRETS = ("REWARD_TOKEN", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "WANDB_API_KEY")
LONGEST = 2000  # characters of a line that is printed: some of what it quotes has megabytes
# What a terminal obeys instead of showing it, what turns a line around, and halves of surrogate pairs.
UNSEEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def redacted(text: str) -> str:
    """The text, which may be JSON, without the values of SECRETS and without the user and password of any URL."""
    for name in SECRETS:
        value = os.environ.get(name, "").strip()
        if len(value) > 5:  # a shorter one is no secret, and would be in every second word
            text = text.replace(value, f"${name}").replace(json.dumps(value)[1:-1], f"${name}")
    return re.sub(r"://[^\s\"'<>]*@", "://...@", text)


def visible(text: str) -> str:
    """The text as it may be printed: lines of at most LONGEST characters, redacted, control characters as escapes."""
    lines = []
    for line in text.split("\n"):
        line = redacted(line[: 2 * LONGEST])  # cut first: of megabytes; not at LONGEST, perhaps in mid-password
        lines.append(line if len(line) <= LONGEST else line[: LONGEST - 3] + "...")
    return UNSEEN.sub(lambda found: ascii(found[0])[1:-1], "\n".join(lines))


class OneLine(Exception):
    """A message of one line: what was found, what was expected, what to do; `code` is its heading in docs/errors.md."""

    code: str

    def __init__(self, message: str, code: str):
        super().__init__(visible(message), code)
        self.code = code

    def __str__(self) -> str:
        return self.args[0]


class BadInput(OneLine, ValueError):
    """Something the user gave is wrong: a flag, a file, what came from a service."""

    def __init__(self, message: str, code: str = "bad-input"):
        super().__init__(message, code)


class RunFailed(OneLine, RuntimeError):
    """Training cannot go on. Raised on all ranks together."""


def refuse_all(errors: list[str]) -> None:
    """Raise one BadInput that says the first five of the errors and counts the rest; nothing without errors."""
    if errors:
        more = [f"... and {len(errors) - 5} more"] if len(errors) > 5 else []
        raise BadInput("\n".join(errors[:5] + more))


def raise_together(error: OneLine | None, group: dist.ProcessGroup | None = None) -> None:
    """If any rank has an error, raise the first rank's on all of them. Collective: every rank calls it."""
    errors: list[OneLine | None] = [None] * dist.get_world_size()
    dist.all_gather_object(errors, error, group=group)
    for found in errors:
        if found:
            raise found


def say(line: str, file=None) -> None:
    """Print on rank 0 alone, visible(); works before init, too."""
    if os.environ.get("RANK", "0") == "0":
        print(visible(line), file=file, flush=True)


def warn(message: str, code: str) -> None:
    """Something to look at that does not end the run, on rank 0."""
    say(f"warning[{code}]: {message}", file=sys.stderr)


def launch(main: Callable[[Any], None], args: Any) -> None:
    """Call main(args); bad input (exit code 2) and a failed run (3) become one line on stderr, not a traceback."""
    try:
        main(args)
    except OneLine as error:
        say(f"error[{error.code}]: {error}", file=sys.stderr)
        if dist.is_initialized() and dist.get_rank() and isinstance(error, BadInput):  # perhaps this rank's rows alone
            print(f"error[{error.code}] on rank {dist.get_rank()}: {error}", file=sys.stderr, flush=True)
        sys.exit(2 if isinstance(error, BadInput) else 3)
