"""Kill a run at random moments, let it go on, and compare with one that was never killed.

    python scripts/kill_test.py --kills 20

Each kill is a run of its own: SIGKILL at a random moment of a rollout, an update, a sync or a save, in turns, every
other run with --async-save. Then the newest checkpoint must be whole, no matter what lies beside it, and --resume auto
must end in the metrics and weights of the uninterrupted run, bit for bit. Exits with 1 if one does not.
"""

import dataclasses
import json
import multiprocessing
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import tyro
from safetensors import safe_open

from algos import grpo
from common import checkpoint, data, embedded, errors, folders, tracking

FLAGS = {
    "dtype": "float32", "prompts_per_step": 4, "group_size": 4, "mini_batches": 2, "max_response_tokens": 24,
    "temperature": 1.3, "rollouts_every": 1, "source": data.TrainSource(eval_prompts=0),
}  # fmt: skip
PHASES = ("rollout", "update", "sync", "save")


@dataclasses.dataclass
class Args:
    kills: int = 20
    phases: tuple[Literal["rollout", "update", "sync", "save"], ...] = PHASES  # in which, in turns
    steps: int = 6
    backend: Literal["vllm", "hf"] = "hf"  # vllm: 20 s more a kill
    seed: int = 0  # of the moments


@dataclasses.dataclass
class Moment:
    step: int
    phase: str
    delay: float  # seconds into the phase


def train(args: Args, run_dir: Path, asynchronous: bool, resume: str, moment: Moment | None) -> None:
    """A run, in this process; killed at the moment, if one is given."""
    log = os.open(run_dir.with_suffix(".log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    begin, timed = tracking.Tracker.begin, tracking.Tracker.time
    now = [0]

    def begin_step(tracker, step: int, profiled) -> None:
        now[0] = step
        begin(tracker, step, profiled)

    @contextmanager
    def timed_phase(tracker, phase: str):
        if moment and (now[0], phase) == (moment.step, moment.phase):
            subprocess.Popen(["sh", "-c", f"sleep {moment.delay:.4f}; kill -9 {os.getpid()}"])
        with timed(tracker, phase):
            yield

    tracking.Tracker.begin, tracking.Tracker.time = begin_step, timed_phase
    saving = checkpoint.Saving(resume=resume, save_every=1, keep_checkpoints=2, async_save=asynchronous)
    own = {"steps": args.steps, "rollout_backend": args.backend, "dataset": (str(run_dir.parent / "problems.jsonl"),)}
    errors.launch(grpo.main, grpo.Args(**{**FLAGS, **own}, run_dir=str(run_dir), saving=saving))


def run(*given) -> int:
    """The exit code of train() in a process of its own: a fork, which has imported everything already."""
    process = multiprocessing.get_context("fork").Process(target=train, args=given)
    process.start()
    process.join()
    return process.exitcode


def figures(run_dir: Path) -> tuple[list[dict], bytes, dict]:
    """Metrics without times, and what the last checkpoint holds."""
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    rows = [{k: v for k, v in row.items() if not k.startswith(("time/", "throughput/"))} for row in rows]
    last = folders.complete(run_dir)[-1]
    state = json.loads((last / "state.json").read_text())
    state.pop("files")  # their sizes: the trainer's hold the folder's name
    return rows, (last / "model/model.safetensors").read_bytes(), state


def read(newest: Path) -> None:
    """Read all of a checkpoint's model; what the trainer needs of it the run that goes on will read."""
    json.loads((newest / "state.json").read_text())
    with safe_open(newest / "model/model.safetensors", "np") as tensors:
        for name in tensors.keys():  # noqa: SIM118 -- it is no dict
            tensors.get_tensor(name)


def durations(run_dir: Path) -> dict[str, float]:
    """Seconds of each phase, the longest after the first step. A step's save is in the figures of the next."""
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()][1:]
    return {phase: max(row.get(f"time/{phase}", 0.0) for row in rows) for phase in PHASES}


def main(args: Args) -> None:
    embedded.warm_start()
    draw, equal = random.Random(args.seed), 0
    with tempfile.TemporaryDirectory() as scratch:
        rows = embedded.problems("train")[:10]
        (Path(scratch) / "problems.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        whole = Path(scratch) / "whole"
        if run(args, whole, False, "", None):
            sys.exit(f"the uninterrupted run failed:\n{whole.with_suffix('.log').read_text()[-2000:]}")
        expected, seconds = figures(whole), durations(whole)
        for number in range(args.kills):
            killed = Path(scratch) / f"killed-{number}"
            phase = args.phases[number % len(args.phases)]
            moment = Moment(draw.randrange(1, args.steps), phase, draw.uniform(0, seconds[phase]))
            asynchronous = number // len(args.phases) % 2 == 1
            code = run(args, killed, asynchronous, "", moment)
            newest = next(reversed(folders.complete(killed)), None)
            left = sorted(path.name for path in killed.glob("checkpoints/*.*") if path.is_dir())
            if newest:
                read(newest)
            began = time.perf_counter()
            resumed = run(args, killed, asynchronous, "auto", None)
            same = code == -9 and resumed == 0 and figures(killed) == expected
            equal += same
            print(
                f"kill {number + 1:2d}: {moment.delay:.3f} s into {phase} of step {moment.step}"
                f"{' (async)' if asynchronous else ''}: newest {newest.name if newest else 'none'}, beside it "
                f"{', '.join(left) or 'nothing'}; went on in {time.perf_counter() - began:.1f} s: "
                f"{'equal' if same else f'NOT EQUAL (exit codes {code}, {resumed})'}",
                flush=True,
            )
            if not same:
                print(killed.with_suffix(".log").read_text()[-2000:])
            shutil.rmtree(killed)
    print(f"{equal} of {args.kills} killed runs ended as the uninterrupted one")
    sys.exit(equal != args.kills)


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
