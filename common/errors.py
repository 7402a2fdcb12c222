"""What ends a run, or should be looked at: one line with a stable code, explained in docs/errors.md."""

import contextlib
import errno
import json
import os
import re
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch.distributed.checkpoint import CheckpointException as SaveFailed

# What gloo, NCCL and torch's store say when another rank does not come, or is gone.
LATE = ("timed out", "timeout")
GONE = ("closed by peer", "reset by peer", "broken pipe", "refused", "connection was likely closed", "remote process")
GIVE_UP_TOGETHER = 3.0  # seconds: ranks that wait for the same one run out of patience at about the same time
FULL = (os.strerror(errno.ENOSPC).lower(), os.strerror(errno.EDQUOT).lower())


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


def refuse_all(errors: list[str], code: str = "bad-input") -> None:
    """Raise one BadInput that says the first five of the errors and counts the rest; nothing without errors."""
    if errors:
        more = [f"... and {len(errors) - 5} more"] if len(errors) > 5 else []
        raise BadInput("\n".join(errors[:5] + more), code=code)


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
            print(visible(f"error[{error.code}] on rank {dist.get_rank()}: {error}"), file=sys.stderr, flush=True)
        sys.exit(2 if isinstance(error, BadInput) else 3)
    except (RuntimeError, OSError, MemoryError, SafetensorError, SaveFailed) as error:
        found = recognized(error)
        if found is None:
            raise
        if first_to_tell():  # of the ranks that are left: rank 0 may be the one that is not
            print(visible(f"error[{found.code}]: {found}"), file=sys.stderr, flush=True)
        sys.stdout.flush()
        os._exit(3)  # threads and destructors would wait for the other ranks


def recognized(error: BaseException) -> RunFailed | None:
    """What a library's error means, where that is known: another rank, the memory, the disk."""
    said = f"{error}".lower()
    short = f"{type(error).__name__}: {error}".split("\n")[0][:300]
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "can't allocate memory" in said:
        return RunFailed(f"out of memory, {here()}: {short}; {memory()}", code="out-of-memory")
    if any(words in said for words in FULL):
        return RunFailed(f"{here()}: {short}; make room, then --resume auto goes on", code="disk-full")
    if isinstance(error, dist.DistError) or "gloo" in said or "nccl" in said:
        if any(words in said for words in LATE):
            return RunFailed(f"{here()}, waited in vain for {missing()} ({short})", code="collective-timeout")
        if any(words in said for words in GONE):
            return RunFailed(f"{here()}, lost {missing()} ({short})", code="rank-lost")
    return None


def here() -> str:
    """This rank and its phase."""
    if not dist.is_initialized():
        return "at the start"
    return f"rank {dist.get_rank()} in {note(dist.get_rank())[0]}"


def note(rank: int) -> tuple[str, float]:
    """What World.enter() left of a rank: its phase, and for how many seconds it has been in it."""
    with contextlib.suppress(RuntimeError):  # the store may have died with the rank or the agent that kept it
        store = dist.distributed_c10d._get_default_store()
        if store.check([f"phase/{rank}"]):
            began, _, phase = store.get(f"phase/{rank}").decode().partition(" ")
            return phase, time.time() - float(began)
    return "its start", 0.0


def missing() -> str:
    """The ranks that do not fail as this one does: those that hang, or are dead. Called by each that fails."""
    if not dist.is_initialized():
        return "the other ranks"
    found = []
    with contextlib.suppress(RuntimeError):
        store = dist.distributed_c10d._get_default_store()
        store.set(f"gave-up/{dist.get_rank()}", "")
        time.sleep(GIVE_UP_TOGETHER)
        found = [rank for rank in range(dist.get_world_size()) if not store.check([f"gave-up/{rank}"])]
    said = [f"rank {rank}, in {phase} for {seconds:.0f} s" for rank in found[:4] for phase, seconds in [note(rank)]]
    return "; ".join(said) + (f" and {len(found) - 4} more" if len(found) > 4 else "") or "another rank"


def memory() -> str:
    """What is taken, and the flags that lower it, from the one that costs least."""
    if torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
    else:
        free, total = (os.sysconf(name) * os.sysconf("SC_PAGE_SIZE") for name in ("SC_AVPHYS_PAGES", "SC_PHYS_PAGES"))
    return (
        f"{(total - free) / 2**30:.1f} of {total / 2**30:.1f} GiB are taken, and the table at the start has each "
        "role's share: lower --token-budget or --rollout-memory, then --activation-checkpointing, --offload all"
    )


def first_to_tell() -> bool:
    """Whether no other rank has said why the run ends."""
    with contextlib.suppress(RuntimeError, ValueError):  # no store any more, or none yet
        return dist.distributed_c10d._get_default_store().add("told", 1) == 1
    return True
