"""What ends a run, or should be looked at: one line with a stable code, explained in docs/errors.md."""

import os
import sys
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

# What the libraries below say when another rank is gone or does not come.
LATE = ("timed out", "timeout", "Timed out")
GONE = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "Connection refused")


class OneLine(Exception):
    """A message of one line: what was found, what was expected, what to do; `code` is its heading in docs/errors.md."""

    code: str

    def __init__(self, message: str, code: str):
        super().__init__(message, code)
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
    """Print on rank 0 alone; works before init, too."""
    if os.environ.get("RANK", "0") == "0":
        print(line, file=file, flush=True)


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
