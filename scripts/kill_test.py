"""Kill a run at random moments, resume it, and compare with a run that was never killed.

    python scripts/kill_test.py --kills 20

Each kill has a run of its own: SIGKILL comes at a random moment of a rollout, an update, a sync or a save, in turns.
After each round through the phases, --async-save changes. Then the newest checkpoint must be whole, whatever lies next
to it, and --resume auto must end in the metrics and weights of the uninterrupted run, bit for bit. The script exits
with 1 if one run does not.
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
from common import errors
from common.data import arithmetic
from common.data.prompts import TrainSource
from common.preflight import folders
from common.run import checkpoint, tracking

FLAGS = {
    "dtype": "float32",
    "prompts_per_step": 4,
    "group_size": 4,
    "mini_batches": 2,
    "max_response_tokens": 24,
    "temperature": 1.3,
    "rollouts_every": 1,
    "source": TrainSource(eval_prompts=0),
}
PHASES = ("rollout", "update", "sync", "save")


@dataclasses.dataclass
class Args:
    kills: int = 20
    phases: tuple[Literal["rollout", "update", "sync", "save"], ...] = PHASES  # where runs are killed, in turns
    steps: int = 6
    backend: Literal["vllm", "hf"] = "hf"  # vllm takes 20 s more for each kill
    seed: int = 0  # seed of the random moments


@dataclasses.dataclass
class Moment:
    step: int
    phase: str
    delay: float  # seconds into the phase


def train(args: Args, run_dir: Path, asynchronous: bool, resume: str, moment: Moment | None) -> None:
    """Run the training in this process. If a moment is given, it is killed then."""
    log = os.open(run_dir.with_suffix(".log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    begin, timed = tracking.Tracker.begin, tracking.Tracker.time
    now = [0]

    def begin_step(tracker, step: int) -> None:
        now[0] = step
        begin(tracker, step)

    @contextmanager
    def timed_phase(tracker, phase: str):
        if moment and (now[0], phase) == (moment.step, moment.phase):
            subprocess.Popen(["sh", "-c", f"sleep {moment.delay:.4f}; kill -9 {os.getpid()}"])
        with timed(tracker, phase):
            yield

    tracking.Tracker.begin, tracking.Tracker.time = begin_step, timed_phase
    saving = checkpoint.Saving(resume=resume, save_every=1, keep_checkpoints=2, async_save=asynchronous)
    own = {"steps": args.steps, "rollout_backend": args.backend, "dataset": (str(run_dir.parent / "problems.jsonl"),)}
    errors.launch(grpo.main, grpo.Args(**{**grpo.EMBEDDED, **FLAGS, **own}, run_dir=str(run_dir), saving=saving))


def run(*given) -> int:
    """Exit code of train() in a process of its own. It is a fork, which has imported everything already."""
    process = multiprocessing.get_context("fork").Process(target=train, args=given)
    process.start()
    process.join()
    return process.exitcode


def figures(run_dir: Path) -> tuple[list[dict], bytes, dict]:
    """Metrics without times, and the model and the facts of the last checkpoint."""
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    rows = [{k: v for k, v in row.items() if not k.startswith(("time/", "throughput/"))} for row in rows]
    last = folders.complete(run_dir)[-1]
    state = json.loads((last / "state.json").read_text())
    state.pop("files")  # sizes of files, in which the name of the folder counts
    return rows, (last / "model/model.safetensors").read_bytes(), state


def read(newest: Path) -> None:
    """Read the whole model of a checkpoint. The run that goes on will read the state of the trainer."""
    json.loads((newest / "state.json").read_text())
    with safe_open(newest / "model/model.safetensors", "np") as tensors:
        for name in tensors.keys():  # noqa: SIM118 -- not a dict
            tensors.get_tensor(name)


def durations(run_dir: Path) -> dict[str, float]:
    """Seconds of each phase, the longest after the first step. The save of a step is in the row of the next step."""
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()][1:]
    return {phase: max(row.get(f"time/{phase}", 0.0) for row in rows) for phase in PHASES}


def main(args: Args) -> None:
    if args.steps < 2:
        sys.exit(f"error: --steps {args.steps}: the last step is left to the run that goes on; use >= 2")
    arithmetic.warm_start()
    draw, equal = random.Random(args.seed), 0
    with tempfile.TemporaryDirectory() as scratch:
        rows = arithmetic.problems("train")[:10]
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
            while code == 0 and moment.delay > 0.001:
                # The phase took longer in the uninterrupted run, so the kill came after the end.
                shutil.rmtree(killed)
                moment.delay /= 2
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
