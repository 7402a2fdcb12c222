"""Run algos/grpo.py with --resume auto. Its last rank is killed once in step 3 and gets a SIGTERM once in step 5:
crash.py RUN_DIR [flags]
"""

import os
import signal
import sys
from pathlib import Path

import tyro

from algos import grpo
from common import errors
from common.run import tracking

run_dir, *flags = sys.argv[1:]
begin = tracking.Tracker.begin


def begin_step(tracker, step: int) -> None:
    for at, name, number in ((3, "crashed", signal.SIGKILL), (5, "asked", signal.SIGTERM)):
        mark = Path(run_dir) / name
        if step == at and tracker.world.rank == tracker.world.size - 1 and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), number)
    begin(tracker, step)


tracking.Tracker.begin = begin_step
small = ["--rollout-backend", "hf", "--prompts-per-step", "8", "--group-size", "4", "--mini-batches", "2"]
small += ["--eval-prompts", "0", "--schedule", "constant", "--save-every", "2"]
args = tyro.cli(
    grpo.Args, args=["--run-dir", run_dir, "--resume", "auto", *small, *flags], default=grpo.Args(**grpo.EMBEDDED)
)
errors.launch(grpo.main, args)
