"""algos/grpo.py with faults, one process after the other: faulty.py FOLDER NAME ...

Each fault is a function that breaks something and returns the flags of its run, in a fork of this process, which has
imported everything already. FOLDER/NAME.log has what it wrote, its last line the exit code and the seconds it took.
"""

import dataclasses
import errno
import json
import multiprocessing
import os
import shutil
import signal
import socket
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import torch

from algos import grpo
from common import errors, placement
from common.data import arithmetic as embedded
from common.data import prompts as data
from common.rollout import hf_engine
from common.run import checkpoint, traces, tracking
from common.run import guards as trends
from common.trainer import model

SMALL = grpo.Args(
    **{
        **grpo.EMBEDDED,
        "dtype": "float32",
        "prompts_per_step": 4,
        "group_size": 4,
        "mini_batches": 2,
        "temperature": 1.3,
        "max_response_tokens": 40,
        "steps": 4,
        "rollouts_every": 1,
        "rollout_backend": "hf",
        "max_logprob_gap": 1e-3,
        "schedule": "constant",
        "source": data.TrainSource(eval_prompts=0),
    }
)
UNEVEN = (f"{Path(__file__).with_name('rewards.py')}:uneven",)  # every step trains on all rows
REWARD = "def score(items, lengths, truncated):\n    {}\n"


def skip_in_sync(part: str) -> dict:
    """The engine keeps the weights whose names hold `part` as they were."""
    load = hf_engine.HFEngine.load_weights
    keep = lambda weights: ((name, tensor) for name, tensor in weights if part not in name)
    hf_engine.HFEngine.load_weights = lambda engine, weights: load(engine, keep(weights))
    return {"learning_rate": 2e-3, "reward": UNEVEN, "max_logprob_gap": 1e-4}


def stale_head(folder: Path) -> dict:
    return skip_in_sync("embed_tokens")


def one_layer_not_synced(folder: Path) -> dict:
    return skip_in_sync(".layers.1.")


def syncs_lost(folder: Path) -> dict:
    """The engine counts versions whose weights it never got."""
    load = hf_engine.HFEngine.load_weights

    def lossy(engine, weights):
        if engine.weight_version < 2:
            weights = [(name, tensor) for name, tensor in weights if not name]  # gathered, not copied
        load(engine, weights)

    hf_engine.HFEngine.load_weights = lossy
    return {"learning_rate": 2e-3, "reward": UNEVEN, "max_logprob_gap": 1e-4}


def wrong_temperature(folder: Path) -> dict:
    generate = hf_engine.HFEngine.generate
    hf_engine.HFEngine.generate = lambda engine, ids, n, temperature, *rest, **more: generate(
        engine, ids, n, 0.7, *rest, **more
    )
    return {"reward": UNEVEN}


def nan_gradient(folder: Path) -> dict:
    advantages = grpo.compute_advantages
    grpo.compute_advantages = lambda **given: advantages(**given) * torch.nan
    return {"reward": UNEVEN}


def infinite_loss(folder: Path) -> dict:
    """With a finite gradient: only the figures of the step show it."""
    loss = grpo.policy_loss
    grpo.policy_loss = lambda **given: loss(**given) + torch.inf
    return {"reward": UNEVEN}


def reward_file(folder: Path, line: str) -> dict:
    path = folder / "reward.py"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(REWARD.format(line))
    return {"reward": (f"{path}:score",)}


def nan_reward(folder: Path) -> dict:
    return reward_file(folder, "return [float('nan')] * len(items)")


def infinite_reward(folder: Path) -> dict:
    return reward_file(folder, "return [float('inf')] * len(items)")


def killed_reward_worker(folder: Path) -> dict:
    return reward_file(folder, "import os; return [1.0, 0.0] if len(items) == 2 else os.kill(os.getpid(), 9)")


def constant_reward(folder: Path) -> dict:
    trends.SILENT_STEPS = 3
    return {**reward_file(folder, "return [1.0] * len(items)"), "steps": 6}


def all_truncated(folder: Path) -> dict:
    return {"max_response_tokens": 2, "steps": 8}


def out_of_memory(folder: Path) -> dict:
    def too_much(*given, **more):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")

    model.frozen_logprobs = too_much
    return {}


def disk_full_while_writing(folder: Path) -> dict:
    def full(*given, **more):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "rollouts/step_000001.jsonl")

    traces.write = full
    return {}


def disk_full_before_a_checkpoint(folder: Path) -> dict:
    checkpoint.shutil.disk_usage = lambda path: type("Usage", (), {"free": 1000})()
    return {}


def in_update_of_step_2(fault) -> dict:
    """fault() on rank 1, as it begins to train on the second rollout."""
    begin, timed, now = tracking.Tracker.begin, tracking.Tracker.time, [0]

    def begin_step(tracker, step):
        now[0] = step
        begin(tracker, step)

    @contextmanager
    def timed_phase(tracker, phase):
        with timed(tracker, phase):
            if (now[0], phase, os.environ["RANK"]) == (2, "update", "1"):
                fault()
            yield

    tracking.Tracker.begin, tracking.Tracker.time = begin_step, timed_phase
    placement.COLLECTIVE_TIMEOUT_SECONDS = 15
    return {}


def killed_rank(folder: Path) -> dict:
    return in_update_of_step_2(lambda: os.kill(os.getpid(), signal.SIGKILL))


def hung_collective(folder: Path) -> dict:
    return in_update_of_step_2(lambda: time.sleep(120))


TWO_RANKS = (killed_rank, hung_collective)


def dataset(folder: Path, rows: int = 20) -> tuple[str]:
    """The file of all runs: a resumed run must have the flags of the first. Few problems take no time to tokenize."""
    path = folder.parent / "problems.jsonl"
    written = path.with_suffix(f".{folder.name}")
    written.write_text("".join(json.dumps(row) + "\n" for row in embedded.problems("train")[:rows]))
    written.replace(path)  # at once, because another run may be reading it
    return (str(path),)


def nothing(folder: Path) -> dict:
    return {"saving": checkpoint.Saving(save_every=2)}


def resumed(folder: Path, damage, **changed) -> dict:
    """--resume auto, after some damage to a copy of what nothing() left."""
    shutil.copytree(folder.parent / "nothing/run", folder / "run")
    given = {"saving": checkpoint.Saving(save_every=2, resume="auto"), "steps": 6}
    damage(folder)
    return {**given, **changed}


def truncated_checkpoint(folder: Path) -> dict:
    def damage(folder):
        path = next(folder.glob("run/checkpoints/step_000004/trainer/*.safetensors"))
        os.truncate(path, path.stat().st_size // 2)

    return resumed(folder, damage)


def lost_checkpoint_file(folder: Path) -> dict:
    return resumed(folder, lambda folder: (folder / "run/checkpoints/step_000004/model/model.safetensors").unlink())


def torn_state(folder: Path) -> dict:
    return resumed(folder, lambda folder: os.truncate(folder / "run/checkpoints/step_000004/state.json", 40))


def corrupt_metrics(folder: Path) -> dict:
    def damage(folder):
        path = folder / "run/metrics.jsonl"
        first, *rest = path.read_text().splitlines()
        path.write_text("\n".join([first, '{"step": 2, "rew', *rest]) + "\n")

    return resumed(folder, damage)


def changed_data(folder: Path) -> dict:
    return resumed(folder, lambda folder: dataset(folder, rows=19))


def changed_flag(folder: Path) -> dict:
    return resumed(folder, lambda folder: None, clip_high=0.28)


def start(fault, folder: Path, log: Path, ranks: int = 1) -> int:
    """Run it in a fork; the highest exit code of the ranks that were not killed on purpose."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    problems = dataset(folder)  # changed_data rewrites this file

    def run(rank: int) -> None:
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port, RANK=str(rank), WORLD_SIZE=str(ranks))
        os.environ.update(LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(ranks))
        flags = {"dataset": problems, **fault(folder)}
        errors.launch(grpo.main, dataclasses.replace(SMALL, run_dir=str(folder / "run"), **flags))

    processes = [multiprocessing.get_context("fork").Process(target=run, args=(rank,)) for rank in range(ranks)]
    for process in processes:
        process.start()
    processes[0].join(120)
    for process in processes:  # torchrun would end those that are left
        process.kill()
        process.join()
    return processes[0].exitcode


def main(folder: Path, *names: str) -> None:
    embedded.warm_start()
    for name in names:
        fault, log = globals()[name], folder / f"{name}.log"
        began = time.monotonic()
        code = start(fault, folder / name, log, ranks=2 if fault in TWO_RANKS else 1)
        with open(log, "a") as file:
            file.write(f"\n{code} {time.monotonic() - began:.1f}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
