"""Two steps of algos/grpo.py for each layout of the trainer over the ranks, in one process each: layouts.py RUNS_DIR

transformers' generate samples. The last run resumes the first one's checkpoint after a step, in another layout.
"""

import dataclasses
import sys
from pathlib import Path

import torch.distributed as dist

from algos import grpo
from common import placement
from common.data import prompts as data
from common.run import checkpoint, report
from common.trainer import model
from common.trainer.batching import Compute

ARGS = grpo.Args(
    **{
        **grpo.EMBEDDED,
        "rollout_backend": "hf",
        "dtype": "float32",
        "steps": 2,
        "prompts_per_step": 8,
        "group_size": 4,
        "mini_batches": 2,
        "epochs": 2,
        "temperature": 1.3,
        "warmup_steps": 1,
        "kl_coef": 0.1,
        "eval_every": 1,
        "source": data.TrainSource(eval_prompts=16),
    }
)
LAYOUTS = {
    "plain": Compute(120),
    "slices": Compute(120, sequence_parallel=2),
    "copies": Compute(120, shard_size=1),
    "resumed": Compute(120, sequence_parallel=2, shard_size=1),
}


def main(runs: Path) -> None:
    report.write = lambda *given: None  # tested elsewhere
    finish, placement.finish = placement.finish, lambda *given: None
    rank_memory = model.rank_memory
    for name, compute in LAYOUTS.items():
        resume = str(runs / "plain/checkpoints/step_000001") if name == "resumed" else ""
        saving = checkpoint.Saving(resume=resume, save_every=1)
        # No room for whole gradients: each backward of "copies" reduces its own, the last one over the copies.
        model.rank_memory = (lambda: 1e6) if name == "copies" else rank_memory
        grpo.main(dataclasses.replace(ARGS, run_dir=str(runs / name), compute=compute, saving=saving))
        dist.init_process_group = lambda *given, **named: None  # once is enough
    finish(None)


main(Path(sys.argv[1]))
