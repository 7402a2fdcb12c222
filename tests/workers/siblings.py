"""Six short runs of each algorithm but GRPO, right and with the advantage's sign flipped: siblings.py RUNS_DIR

One process for all: importing torch six times would take longer than training. transformers' generate samples.
"""

import importlib
import sys
from pathlib import Path

from common import placement

FLAGS = {"rollout_backend": "hf", "steps": 6, "eval_prompts": 0, "schedule": "constant", "learning_rate": 5e-4}
ALGORITHMS = {  # algorithm: (B, G); the last two draw more prompts than they keep
    "dr_grpo": (32, 8),
    "rloo": (32, 8),
    "remax": (32, 8),
    "ppo": (64, 4),
    "dapo": (16, 8),
    "prime": (16, 8),
}


def main(runs: Path) -> None:
    for name, (prompts, group_size) in ALGORITHMS.items():
        algorithm = importlib.import_module(f"algos.{name}")
        compute_advantages = algorithm.compute_advantages

        def flipped(*given, compute_advantages=compute_advantages):
            out = compute_advantages(*given)
            return (-out[0], out[1]) if isinstance(out, tuple) else -out

        for kind, function in (("right", compute_advantages), ("flipped", flipped)):
            algorithm.compute_advantages = function
            size = {"prompts_per_step": prompts, "group_size": group_size, "run_dir": str(runs / f"{name}-{kind}")}
            placement.launch(algorithm.main, algorithm.Args(**FLAGS, **size))


main(Path(sys.argv[1]))
