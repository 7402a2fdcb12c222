"""Errors and warnings that end a run or deserve a look: one line with a stable code, which docs/errors.md explains.

torch is imported inside the functions that need it: worker processes of rewards import this file and do without torch.
"""

import contextlib
import dataclasses
import errno
import itertools
import json
import os
import re
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

# Words in errors of gloo, NCCL and torch's store when another rank does not arrive, and when it is gone.
LATE = ("timed out", "timeout")
GONE = ("closed by peer", "reset by peer", "broken pipe", "refused", "connection was likely closed", "remote process")
# Words in errors of gloo when no interface has that name, and when ranks don't reach each other's addresses.
UNREACHABLE = ("unable to find address for", "connectfullmesh failed")
FULL = (os.strerror(errno.ENOSPC).lower(), os.strerror(errno.EDQUOT).lower())
GIVE_UP_SECONDS = 3.0  # ranks that wait for the same rank give up within about this time of each other
STORE_SECONDS = 10.0  # torch's store answers at once, unless the node of rank 0 is gone
# Environment variables whose values are never written, neither into run.json nor into a message.
SECRETS = (
    "REWARD_TOKEN",
    "JUDGE_API_KEY",
    "OPENAI_API_KEY",
    "HF_TOKEN",
    "HUGGING_FACE_HUB_TOKEN",
    "WANDB_API_KEY",
    "SWANLAB_API_KEY",
    "TRACKIO_WRITE_TOKEN",
    "MLFLOW_TRACKING_TOKEN",
    "MLFLOW_TRACKING_PASSWORD",
)
LONGEST = 2000  # characters of a printed line; a message may quote megabytes
# Control characters, characters that turn a line around, and halves of surrogate pairs.
INVISIBLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def redacted(text: str) -> str:
    """The text, which may be JSON, without the values of SECRETS and without the user and password of any URL."""
    for name in SECRETS:
        value = os.environ.get(name, "").strip()
        # A shorter value is no secret, and may be a part of ordinary words.
        if len(value) > 5:
            text = text.replace(value, f"${name}")
            # JSON writes some characters as escapes.
            text = text.replace(json.dumps(value)[1:-1], f"${name}")
    return re.sub(r"://[^\s\"'<>]*@", "://...@", text)


def visible(text: str) -> str:
    """The text as it may be printed: redacted, with short lines, and with control characters as escapes."""
    lines = []
    for line in text.split("\n"):
        # First redact, then cut at LONGEST: the cut might fall into a password and hide it from redacted().
        line = redacted(line[: 2 * LONGEST])
        lines.append(line if len(line) <= LONGEST else line[: LONGEST - 3] + "...")
    return escaped("\n".join(lines))


def escaped(text: str) -> str:
    """The text with control characters, and others that a terminal doesn't show, as escapes."""
    return INVISIBLE.sub(lambda match: ascii(match[0])[1:-1], text)


class OneLine(Exception):
    """One line: what is there, what was expected, what to do. `code` is its heading in docs/errors.md."""

    def __init__(self, message: str, code: str = "bad-input"):
        super().__init__(visible(message), code)
        self.code = code

    def __str__(self) -> str:
        return self.args[0]


class BadInput(OneLine, ValueError):
    """Something the user gave is wrong: a flag, a file, or the reply of a service."""


class RunFailed(OneLine, RuntimeError):
    """Training cannot go on. Raised on all ranks together."""


def refuse_all(errors: list[tuple[str, str]], code: str = "bad-input") -> None:
    """Raise one BadInput that quotes the first five errors and counts the rest. Without errors nothing happens.

    errors: (place, what is wrong). Those that say the same are one line with several places. The place "" isn't named.
    """
    places: dict[str, list[str]] = {}  # what is wrong -> where
    for place, wrong in errors:
        places.setdefault(wrong, []).append(place)
    lines = []
    for wrong, where in itertools.islice(places.items(), 5):
        named = list(dict.fromkeys(filter(None, where)))
        others = f" and {len(named) - 3} more" if len(named) > 3 else ""
        lines.append(f"{', '.join(named[:3])}{others}: {wrong}" if named else wrong)
    if len(places) > 5:
        left = sum(map(len, itertools.islice(places.values(), 5, None)))
        kinds = len(places) - 5
        lines.append(f"... and {left} more" + (f", which say {kinds} other things" if kinds < left else ""))
    if lines:
        raise BadInput("\n".join(lines), code=code)


def raise_together(error: OneLine | None, group=None) -> None:
    """If any rank has an error, raise the first rank's on all ranks. Collective: every rank of `group` calls it."""
    first = first_of_ranks(error, group)
    if first is not None:
        raise first


def first_of_ranks(own: Any, group=None) -> Any:
    """What the first rank has that has something; None has nothing. Collective: every rank of `group` calls it."""
    import torch.distributed as dist

    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, own, group=group)
    return next((each for each in everyone if each is not None), None)


def say(line: str, file=None) -> None:
    """Print visible(line) on rank 0 only. It also works before the ranks are joined."""
    if os.environ.get("RANK", "0") == "0":
        print(visible(line), file=file, flush=True)


def warn(message: str, code: str) -> None:
    """Say on rank 0 that something deserves a look. The run goes on."""
    say(f"warning[{code}]: {message}", file=sys.stderr)


@contextlib.contextmanager
def in_phase(name: str) -> Iterator[None]:
    """Add the name of the phase to every exception that leaves the block. recognized() reads it."""
    try:
        yield
    except BaseException as error:
        error.add_note(f"in {name}")
        raise


def launch(main: Callable[[Any], None], args: Any) -> None:
    """Call main(args). Bad input (exit code 2) and a failed run (3) become one line on stderr, not a traceback."""
    import torch.distributed as dist
    from safetensors import SafetensorError
    from torch.distributed.checkpoint import CheckpointException

    try:
        check_given_once(args, sys.argv[1:])
        main(args)
    except KeyboardInterrupt:
        say("\ninterrupted; nothing has been trained since the last checkpoint", file=sys.stderr)
        os._exit(130)  # 128 + SIGINT, as in a shell; sys.exit would run destructors, which wait for the other ranks
    except BadInput as error:
        # The wrong input may be in the rows of one rank. Before the ranks are joined it can only be in the files of a
        # node, and then one rank of each node prints it.
        rank = dist.get_rank() if dist.is_initialized() else 0
        if dist.is_initialized() or os.environ.get("LOCAL_RANK", "0") == "0":
            where = f" on rank {rank}" if rank else ""
            print(f"error[{error.code}]{where}: {error}", file=sys.stderr, flush=True)
        sys.exit(2)
    except RunFailed as error:
        print_once(error)
        sys.exit(3)
    except (RuntimeError, OSError, MemoryError, SafetensorError, CheckpointException) as error:
        failure = recognized(error)
        if failure is None:
            raise
        print_once(failure)
        sys.stdout.flush()
        os._exit(3)  # sys.exit would run destructors, which wait for the other ranks


def check_given_once(args: Any, words: list[str]) -> None:
    """Refuse a second `--reward`: tyro would take its values and forget those of the first. Raises BadInput.

    A flag with one value may be repeated, as in a script that ends with "$@". The last one counts.
    """
    typed = [word.partition("=")[0].replace("_", "-") for word in words if word.startswith("--")]
    for name in flags_with_several_values(args):
        if typed.count(name) > 1:
            raise BadInput(f"{name}: given {typed.count(name)} times; write all its values after one: {name} ONE TWO")


def flags_with_several_values(args: Any) -> Iterator[str]:
    """Names of the flags, those of nested dataclasses included, whose value is a tuple."""
    for field in dataclasses.fields(args) if dataclasses.is_dataclass(args) else ():
        value = getattr(args, field.name)
        if isinstance(value, tuple):
            yield f"--{field.name.replace('_', '-')}"
        yield from flags_with_several_values(value)


def recognized(error: BaseException) -> RunFailed | None:
    """The failure behind a library's error, if it is about memory, the disk or another rank. Otherwise None."""
    import torch.distributed as dist

    text = str(error).lower()
    first_line = f"{type(error).__name__}: {error}".split("\n")[0][:300]
    phase = getattr(error, "__notes__", ["at the start"])[0]  # in_phase has added it
    here = f"rank {os.environ.get('RANK', '0')} {phase}"
    if isinstance(error, MemoryError) or "out of memory" in text or "can't allocate memory" in text:
        cure = "lower --token-budget or --rollout-memory, then --activation-checkpointing, --offload all"
        return RunFailed(f"{here}: out of memory ({first_line}); {cure}", code="out-of-memory")
    if any(words in text for words in FULL):
        return RunFailed(f"{here}: {first_line}; make room, then --resume auto goes on", code="disk-full")
    if any(words in text for words in UNREACHABLE):
        problem = f"no connection to other ranks over {tried_interface()} ({first_line})"
        return RunFailed(f"{here}: {problem}; {other_interfaces()}", code="no-network")
    if isinstance(error, dist.DistError) or "gloo" in text or "nccl" in text:
        if any(words in text for words in LATE):
            return RunFailed(f"{here}: waited in vain for another rank ({first_line})", code="collective-timeout")
        if any(words in text for words in GONE):
            lost = f"{here}: lost another rank ({first_line})"
            if phase == "at the start":  # so it looks, too, if the other rank finds first that they can't connect
                lost += f" over {tried_interface()}; if no rank has failed, {other_interfaces()}"
            return RunFailed(lost, code="rank-lost")
    return None


def tried_interface() -> str:
    """Over what gloo tries to reach the other nodes."""
    name = os.environ.get("GLOO_SOCKET_IFNAME")
    return f"GLOO_SOCKET_IFNAME={name}" if name else "the address of this node's host name"


def other_interfaces() -> str:
    """What to do if that is the wrong one."""
    names = ", ".join(name for _, name in socket.if_nameindex())
    variable = "GLOO_SOCKET_IFNAME, or INTERFACE for scripts/launch/torchrun.sh,"
    return f"set {variable} to the interface that other nodes reach; this node has {names}"


def print_once(failure: RunFailed) -> None:
    """Print the failure on the first rank that fails. If ranks wait for others, add which ranks never arrived."""
    from torch.distributed import distributed_c10d as c10d

    line = f"error[{failure.code}]: {failure}"
    waited = failure.code in ("collective-timeout", "rank-lost")
    with contextlib.suppress(ValueError):  # there may be no store yet
        store = c10d._get_default_store()
        rank = c10d.get_rank()
        # The other ranks that wait give up, too.
        failed = failed_ranks(store, rank, GIVE_UP_SECONDS if waited else 0.0)
        if failed and failed[0] != rank:
            return
        if waited and failed:
            missing = set(range(c10d.get_world_size())) - set(failed)
            line += f"; ranks that hang or are dead: {sorted(missing)[:8] or 'unknown'}"
        if waited and not failed:
            line += "; the node of rank 0 does not answer"
    print(line, file=sys.stderr, flush=True)


def failed_ranks(store: Any, rank: int, pause: float) -> list[int]:
    """Ranks that fail within the pause, in the order in which they fail, this one included. They enter their numbers
    in torch's store. Empty if the store's process is dead or its node is gone.
    """
    found: list[int] = []

    def ask() -> None:
        with contextlib.suppress(RuntimeError):
            store.append("failed", f"{rank} ")
            time.sleep(pause)
            found.extend(int(number) for number in store.get("failed").split())

    # A node that is gone closes no connection, and then the store's own timeout does not end get().
    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(pause + STORE_SECONDS)
    return list(found)
