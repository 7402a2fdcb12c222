"""A short run of ppo, dapo or prime, on responses that transformers' generate samples: siblings.py NAME RUN_DIR"""

import importlib
import json
import sys
from pathlib import Path

from common import errors
from common.data import arithmetic
from common.data import prompts as data
from common.run import checkpoint, report

FLAGS = {
    "rollout_backend": "hf",
    "steps": 3,
    "rollouts_every": 1,
    "source": data.TrainSource(eval_prompts=0),
    "schedule": "constant",
    "learning_rate": 2e-4,
    "warmup_steps": 1,
}
OWN = {  # DAPO and PRIME draw more prompts than they keep.
    "ppo": {"prompts_per_step": 32, "kl_coef": 0.01, "lam": 0.95, "learning_rate": 5e-4, "steps": 6},
    "dapo": {"prompts_per_step": 8, "gen_prompts": 32},
    "prime": {"prompts_per_step": 8, "gen_prompts": 32},
}


def main(name: str, run_dir: str) -> None:
    checkpoint.Saver.save = report.write = lambda *given: None  # tested elsewhere, and slower than the steps
    problems = Path(f"{run_dir}.jsonl")  # to tokenize all of them takes longer than some steps take
    problems.write_text("".join(json.dumps(row) + "\n" for row in arithmetic.problems("train")[:200]))
    algorithm = importlib.import_module(f"algos.{name}")
    flags = {**algorithm.EMBEDDED, **FLAGS, **OWN[name], "dataset": (str(problems),)}
    args = algorithm.Args(**flags, run_dir=run_dir)
    errors.launch(algorithm.main, args)


main(*sys.argv[1:])
