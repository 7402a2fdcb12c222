"""Run main() of each algorithm: four steps at once in RUNS/NAME-whole, and the last one in RUNS/NAME-parts, from a
checkpoint after three: resume.py RUNS

The checkpoint is of the whole run, or for those in SIGNALLED of a run with three steps and a SIGTERM. Of the ten
prompts a step takes at least four, so that it comes after the end of an epoch, within another one. All runs share one
process: to import torch for each of them would take longer than the steps.
"""

import importlib
import json
import os
import shutil
import signal
import sys
from pathlib import Path

import torch
from cases import ALGORITHMS, once, short_run

from common import placement
from common.data import arithmetic, prompts
from common.data.prompts import TrainSource
from common.run import checkpoint, report, tracking

FLAGS = {
    "rollout_backend": "hf",
    "dtype": "float32",
    "steps": 4,
    "rollouts_every": 1,
    "prompts_per_step": 4,
    "group_size": 4,
    "mini_batches": 2,
    "max_response_tokens": 24,
    "temperature": 1.3,
    "warmup_steps": 1,
}
OWN = {name: short_run(name) for name in ALGORITHMS}
# Something that a checkpoint must not lose.
OWN["grpo"] |= {"eval_every": 2, "source": TrainSource(eval_dataset=("problems.jsonl",))}
OWN["dr_grpo"] |= {"schedule": "constant"}
OWN["rloo"] |= {"reward": ("weights.json",)}
OWN["ppo"] |= {"critic_warmup_steps": 3}
OWN["opd"] |= {"full_vocabulary": True}
OWN["sdpo"] |= {"teacher_rate": 0.5}
EPISODES = {  # algorithm -> what it plays besides; ReMax plays an episode for its baseline, too
    "ppo": {"environment": "guess", "lam": 0.95},
    "remax": {"environment": "calculator", "kl_coef": 0.1},
    "dapo": {"environment": "guess", "gen_prompts": 8, "max_gen_batches": 40, "overlong_cache": 4},
}
SIGNALLED = ("grpo", "remax", "ppo-guess")


def main(runs: Path) -> None:
    runs.mkdir(exist_ok=True)
    os.chdir(runs)
    rows = arithmetic.problems("train")[:10]
    Path("problems.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    world, finish, begin = placement.init(seed=0), placement.finish, tracking.Tracker.begin
    placement.init = lambda *given, **named: world  # all runs share one process group
    placement.finish = report.write = lambda *given: None
    prompts.load = once(prompts.load)

    def begin_step(tracker, step: int) -> None:
        weights = {"gsm8k": 1.0, "repetition": 0.1 * min(step, 3)}
        Path("weights.json").write_text(json.dumps({"weights": weights}))
        if step == 3 and tracker.run_dir.name.endswith("-parts"):
            os.kill(os.getpid(), signal.SIGTERM)
        torch.rand(step)  # nothing may depend on the state of the generators
        begin(tracker, step)

    tracking.Tracker.begin = begin_step
    plays = [(name, name, {**own, "dataset": ("problems.jsonl",)}) for name, own in OWN.items()]
    for name, own in EPISODES.items():
        plays += [
            (f"{name}-{own['environment']}", name, {**own, "dataset": (own["environment"],), "max_response_tokens": 48})
        ]
    for name, file, own in plays:
        algorithm = importlib.import_module(f"algos.{file}")
        flags = {**algorithm.EMBEDDED, **FLAGS, "source": TrainSource(eval_prompts=0), **own}
        whole, parts, signalled = f"{name}-whole", f"{name}-parts", name in SIGNALLED
        for folder, resume in ((whole, ""), *[(parts, "")] * signalled, (parts, "auto")):
            if resume and not signalled:
                shutil.copytree(f"{whole}/checkpoints/step_000003", f"{parts}/checkpoints/step_000003")
            Path("weights.json").write_text(json.dumps({"weights": {"gsm8k": 1.0, "repetition": 0.3}}))
            save_every = 0 if signalled else 3
            saving = checkpoint.Saving(resume=resume, async_save=name == "remax", save_every=save_every)
            before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
            algorithm.main(algorithm.Args(**flags, run_dir=folder, saving=saving))
            assert before == [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    finish(world)


main(Path(sys.argv[1]))
