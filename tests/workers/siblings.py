"""A short run of an algorithm, right or with the advantage's sign flipped: siblings.py NAME right|flipped RUN_DIR

transformers' generate samples.
"""

import importlib
import sys

from common import errors
from common.data import prompts as data
from common.run import checkpoint, report

FLAGS = {
    "rollout_backend": "hf", "steps": 6, "rollouts_every": 1, "source": data.TrainSource(eval_prompts=0),
    "schedule": "constant", "learning_rate": 2e-4, "warmup_steps": 1, "prompts_per_step": 16,
}  # fmt: skip
OWN = {  # DAPO and PRIME draw more prompts than they keep.
    "grpo": {},
    "dr_grpo": {},
    "max_rl": {"learning_rate": 5e-4},
    "gspo": {},
    "cispo": {"learning_rate": 1e-4, "prompts_per_step": 32},  # without a clip it breaks down at 2e-4
    "rloo": {"kl_coef": 0.01},
    "reinforce_pp": {"kl_coef": 0.01},
    "remax": {"kl_coef": 0.01},
    "ppo": {"prompts_per_step": 32, "kl_coef": 0.01, "lam_actor": 0.95, "learning_rate": 5e-4},
    "dapo": {"prompts_per_step": 8, "gen_prompts": 32},
    "prime": {"prompts_per_step": 8, "gen_prompts": 32},
    "opd": {},
}


def main(name: str, kind: str, run_dir: str) -> None:
    checkpoint.Saver.save = report.write = lambda *given: None  # tested elsewhere, and slower than the steps
    algorithm = importlib.import_module(f"algos.{name}")
    compute_advantages = algorithm.compute_advantages

    def flipped(**given):
        out = compute_advantages(**given)
        return (-out[0], out[1]) if isinstance(out, tuple) else -out

    if kind == "flipped":
        algorithm.compute_advantages = flipped
    args = algorithm.Args(**{**algorithm.EMBEDDED, **FLAGS, **OWN[name]}, run_dir=run_dir)
    errors.launch(algorithm.main, args)


main(*sys.argv[1:])
