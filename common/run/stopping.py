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

SIGNALS = (signal.SIGTERM, signal.SIGINT)
ONE_REQUEST_SECONDS = 1.0  # a second signal within this time is the first one: terminal and launcher both deliver it


class StopSignals:
    """Between install() and remove() a SIGTERM or SIGINT is remembered instead of obeyed.

    Python has signal handlers only in the main thread. In other threads install() does nothing.
    """

    def __init__(self):
        self.asked = ""  # name of the signal that came
        self.since = 0.0  # when it came
        self.trained = False  # whether a step of this process is done
        self.doing: Callable[[], str] = lambda: "this step"  # a text: the step that has to end first
        self.previous_handlers: dict[int, object] = {}

    def install(self) -> None:
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                self.previous_handlers[number] = signal.signal(number, self.note)

    def remove(self) -> None:
        """Put back the handlers that install() found."""
        for number, handler in self.previous_handlers.items():
            signal.signal(number, handler or signal.SIG_DFL)
        self.previous_handlers = {}

    def note(self, number: int, frame) -> None:
        """The signal handler. Raises KeyboardInterrupt if nothing has been trained."""
        if not self.trained:
            raise KeyboardInterrupt
        # The first request is remembered, and Saver.step_done() looks for it. A second one is obeyed at once.
        if not self.asked:
            self.asked = signal.Signals(number).name
            self.since = time.monotonic()
            if os.environ.get("RANK", "0") == "0":
                # The signal may have interrupted a print(), so this does not use one.
                message = f"{self.asked}: finishing {self.doing()}, then saving; again ends the run at once, unsaved"
                os.write(2, f"\n{message}\n".encode())
        elif time.monotonic() - self.since > ONE_REQUEST_SECONDS:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)


def command(run_dir: Path) -> str:
    """The command that goes on with the run: the one of this process, with --run-dir and --resume auto."""
    # Drop --run-dir and --resume in both spellings: "--run-dir X" and "--run_dir=X".
    flags = []
    words = iter(sys.argv[1:])
    for word in words:
        flag, equals, _ = word.replace("_", "-").partition("=")
        if flag not in ("--run-dir", "--resume"):
            flags.append(word)
        elif not equals:
            next(words, None)  # skip the value of the flag
    return shlex.join([*launcher(), sys.argv[0], *flags, "--run-dir", str(run_dir), "--resume", "auto"])


def launcher() -> list[str]:
    """The words of the command before the script."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return sys.orig_argv[: -len(sys.argv)] or [sys.executable]
    ranks_here = int(os.environ["LOCAL_WORLD_SIZE"])
    nodes = int(os.environ["WORLD_SIZE"]) // ranks_here
    if nodes == 1:
        return ["torchrun", "--nproc-per-node", str(ranks_here)]
    # This process knows neither the number of its node nor the address where the nodes meet.
    settings = [f"NNODES={nodes}", "NODE_RANK=...", "MASTER_ADDR=...", f"NPROC_PER_NODE={ranks_here}"]
    return [*settings, "bash", "scripts/launch/torchrun.sh"]
