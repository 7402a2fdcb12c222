"""Does a long run leak? Prints resident memory, file handles, threads and child processes, step by step.

python scripts/bench/soak.py                     # 300 steps of the embedded job; all flags of algos/grpo.py work

Growth is the slope of a straight line through all steps after the first fifty.
"""

import statistics
import sys
import tempfile

import psutil
import tyro

from algos import grpo
from common import errors
from common.run import tracking

WARM_UP = 50  # steps


def main(args: grpo.Args) -> None:
    if args.steps < WARM_UP + 2:
        sys.exit(f"error: --steps {args.steps}: growth is measured after step {WARM_UP}; use >= {WARM_UP + 2}")
    write, me, rows = tracking.Tracker.write, psutil.Process(), []

    def write_and_look(tracker, step: int):
        metrics = write(tracker, step)
        counts = (me.num_fds(), me.num_threads(), len(me.children(recursive=True)))
        rows.append((step, me.memory_info().rss / 1e6, *counts))
        return metrics

    tracking.Tracker.write = write_and_look
    with tempfile.TemporaryDirectory() as scratch:
        args.run_dir = args.run_dir or scratch + "/run"
        errors.launch(grpo.main, args)
    print("| step | resident, MB | file handles | threads | child processes |\n" + "|---" * 5 + "|")
    for row in [row for row in rows if row[0] == 1 or row[0] % (args.steps // 10 or 1) == 0]:
        print("| {} | {:.1f} | {} | {} | {} |".format(*row))
    later = [row for row in rows if row[0] > WARM_UP]
    for i, what in enumerate(("MB", "file handles", "threads", "child processes"), start=1):
        slope = statistics.linear_regression([row[0] for row in later], [row[i] for row in later]).slope
        print(f"growth after step {WARM_UP}: {slope:+.4f} {what} a step")


if __name__ == "__main__":
    main(tyro.cli(grpo.Args, default=grpo.Args(**grpo.EMBEDDED | {"steps": 300}), description=__doc__))
