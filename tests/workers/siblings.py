"""Short runs of every algorithm but GRPO, right and with the advantage's sign flipped: siblings.py RUNS_DIR

One process for all: importing torch six times would take longer than training. transformers' generate samples.
"""

import importlib
import sys
from pathlib import Path

from common import checkpoint, data, errors, report

FLAGS = {
    "rollout_backend": "hf", "steps": 6, "rollouts_every": 1, "source": data.TrainSource(eval_prompts=0),
    "schedule": "constant", "learning_rate": 2e-4, "warmup_steps": 1,
}  # fmt: skip
ALGORITHMS = {  # algorithm: its sizes; DAPO and PRIME draw more prompts than they keep
    "dr_grpo": {"prompts_per_step": 16},
    "rloo": {"prompts_per_step": 16, "kl_coef": 0.01},
    "remax": {"prompts_per_step": 16, "kl_coef": 0.01},
    "ppo": {"prompts_per_step": 64, "kl_coef": 0.01, "lam_actor": 0.95, "learning_rate": 5e-4},
    "dapo": {"prompts_per_step": 8, "gen_prompts": 32},
    "prime": {"prompts_per_step": 8, "gen_prompts": 32},
}


def main(runs: Path) -> None:
    checkpoint.Saver.save = report.write = lambda *given: None  # tested elsewhere, and slower than the steps
    for name, sizes in ALGORITHMS.items():
        algorithm = importlib.import_module(f"algos.{name}")
        compute_advantages = algorithm.compute_advantages

        def flipped(*given, compute_advantages=compute_advantages):
            out = compute_advantages(*given)
            return (-out[0], out[1]) if isinstance(out, tuple) else -out

        for kind, function in (("right", compute_advantages), ("flipped", flipped)):
            algorithm.compute_advantages = function
            args = algorithm.Args(**{**FLAGS, **sizes}, run_dir=str(runs / f"{name}-{kind}"))
            errors.launch(algorithm.main, args)


main(Path(sys.argv[1]))
