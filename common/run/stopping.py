"""Stopping on request: SIGTERM and Ctrl-C let the step end and be saved; a second signal leaves at once.

As long as nothing has been trained there is nothing to save, and the first signal leaves at once.
"""

import os
import shlex
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

ONE_REQUEST_SECONDS = 1.0  # a second signal within this time is the first one: terminal and launcher both deliver it


class StopSignals:
    """Between install() and remove() a SIGTERM or SIGINT is remembered instead of obeyed.

    Python has signal handlers only in the main thread. In other threads install() does nothing.
    """

    def __init__(self):
        self.asked, self.since = "", 0.0  # name of the signal that came, and when it came
        self.before: dict[int, object] = {}
        self.trained = False  # whether a step of this process is done
        self.doing: Callable[[], str] = lambda: "this step"  # a text: the step that has to end first

    def install(self) -> None:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                self.before[number] = signal.signal(number, self.note)

    def remove(self) -> None:
        """Put back the handlers that install() found."""
        for number, handler in self.before.items():
            signal.signal(number, handler or signal.SIG_DFL)
        self.before = {}

    def note(self, number: int, frame) -> None:
        """The signal handler. Raises KeyboardInterrupt if nothing has been trained."""
        if not self.trained:
            raise KeyboardInterrupt
        if not self.asked:
            self.asked, self.since = signal.Signals(number).name, time.monotonic()
            if os.environ.get("RANK", "0") == "0":  # print() may be what was interrupted, so os.write() speaks
                said = f"\n{self.asked}: waiting for the end of {self.doing()}, then saving; once more leaves at once\n"
                os.write(2, said.encode())
        elif time.monotonic() - self.since > ONE_REQUEST_SECONDS:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)


def command(run_dir: Path) -> str:
    """The command that goes on with the run: the one of this process, with --run-dir and --resume auto."""
    flags, words = [], iter(sys.argv[1:])
    for word in words:
        name, given, _ = word.replace("_", "-").partition("=")
        if name not in ("--run-dir", "--resume"):
            flags.append(word)
        elif not given:
            next(words, None)  # skip the value of the flag
    launcher = [*sys.orig_argv[: -len(sys.argv)]] or [sys.executable]
    if "TORCHELASTIC_RUN_ID" in os.environ:
        local = int(os.environ["LOCAL_WORLD_SIZE"])
        nodes = int(os.environ["WORLD_SIZE"]) // local
        launcher = ["torchrun", "--nproc-per-node", str(local)]
        if nodes > 1:  # Neither the number of this node nor the address where they met is known here.
            each = f"NNODES={nodes} NODE_RANK=... MASTER_ADDR=... NPROC_PER_NODE={local}"
            launcher = [*each.split(), "bash", "scripts/launch/torchrun.sh"]
    return shlex.join([*launcher, sys.argv[0], *flags, "--run-dir", str(run_dir), "--resume", "auto"])
