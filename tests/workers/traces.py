"""Runs of the algorithms' own mains, and replays of their second step, some from a damaged file: traces.py RUNS_DIR

One process for all, on one rank. With torchrun DAPO alone, whose ranks keep different numbers of prompts and compute
each row together; its run is in RUNS_DIR/ranks, and is replayed on one rank, too. What the replays say goes to
replays-RANKS.json.
"""

import base64
import importlib
import json
import os
import sys
from dataclasses import astuple
from pathlib import Path

import torch.distributed as dist
from cases import ALGORITHMS, short_run

from common import placement
from common.data import arithmetic as embedded
from common.data import prompts as data
from common.data import squares
from common.processes.child import import_algorithm
from common.run import checkpoint, report
from common.trainer.batching import Compute

ROOT = Path(__file__).parents[2]
FLAGS = {
    "rollout_backend": "hf",
    "dtype": "float32",
    "steps": 2,
    "rollouts_every": 1,
    "prompts_per_step": 4,
    "group_size": 4,
    "mini_batches": 2,
    "max_response_tokens": 24,
    "temperature": 1.3,
    "warmup_steps": 1,
    "source": data.TrainSource(eval_prompts=0),
    "saving": checkpoint.Saving(save_every=1),
}
OWN = {name: short_run(name) for name in ALGORITHMS} | {
    "remax": {},  # without a KL term only some rows have a forward, and which depends on the baselines
    "opd-full": {"full_vocabulary": True},
    "sdpo-sampled": {"full_vocabulary": False, "teacher_rate": 0.5},
    "fork": {},
    "ppo-guess": {"environment": "guess", "dataset": ("guess",), "max_response_tokens": 48, "lam": 0.95},
    "remax-calculator": {"environment": "calculator", "dataset": ("calculator",), "max_response_tokens": 48},
    "grpo-squares": {"model": str(embedded.IMAGES_START), "max_response_tokens": 4},
}


def fork(runs: Path) -> Path:
    """An algorithm's file outside algos/, whose advantages are half of GRPO's. It has the name of another one."""
    text = (ROOT / "algos/grpo.py").read_text()
    file = runs / "elsewhere/rloo.py"
    file.parent.mkdir(exist_ok=True)
    file.write_text(text.replace("advantages = centred / (", "advantages = centred / 2 / ("))
    return file


def damage(run: Path, change) -> None:
    """Change the rows of the second step's file."""
    path = run / "rollouts/step_000002.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    change(rows)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def other_token(rows: list[dict]) -> None:
    """The first digit of a response that was trained on is another one; its answer is what it was."""
    row = next(row for row in rows if row["old_logprobs"])
    row["response_ids"][0] = 3 + (row["response_ids"][0] - 2) % 10


def other_advantage(rows: list[dict]) -> None:
    rows[0]["advantage"] = [x + 1e-3 for x in rows[0]["advantage"]]


def no_baselines(rows: list[dict]) -> None:
    """All greedy responses are empty, so none is right."""
    for row in rows:
        row["baseline_response_ids"] = [1]


def as_if_with_sglang(run: Path) -> None:
    """The run's flags name servers of SGLang, which a replay has not."""
    about = json.loads((run / "run.json").read_text())
    about["args"]["rollout_backend"] = "sglang"
    about["args"]["layout"] |= {"rollout_placement": "split", "rollout_urls": ["http://127.0.0.1:9"]}
    (run / "run.json").write_text(json.dumps(about))


def train(runs: Path, names: list[str], compute: Compute) -> None:
    """Two steps of each algorithm."""
    runs.mkdir(exist_ok=True)
    problems = embedded.problems("train")[:40]  # all of them would take a second to tokenize, twice a run
    (runs / "problems.jsonl").write_text("".join(json.dumps(row) + "\n" for row in problems))
    as_text = lambda image: "data:image/png;base64," + base64.b64encode(image).decode()
    seen = [row | {"images": list(map(as_text, row["images"]))} for row in squares.problems("test")[:40]]
    (runs / "squares.jsonl").write_text("".join(json.dumps(row) + "\n" for row in seen))
    for name in names:
        algorithm = (
            import_algorithm(fork(runs))
            if name == "fork"
            else importlib.import_module(f"algos.{name.partition('-')[0]}")
        )
        flags = {
            **algorithm.EMBEDDED,
            **FLAGS,
            "dataset": (str(runs / "problems.jsonl"),),
            "compute": compute,
            **OWN[name],
        }
        if name == "grpo-squares":
            flags["dataset"] = (str(runs / "squares.jsonl"),)
        algorithm.main(algorithm.Args(**flags, run_dir=str(runs / name)))


def main(runs: Path) -> None:
    sys.path.insert(0, str(ROOT / "scripts"))
    import replay

    report.write = lambda *given: None  # tested elsewhere
    compute = Compute(sequence_parallel=int(os.environ.get("WORLD_SIZE", "1")))
    world, finish, destroy = placement.init(0, sharding=compute), placement.finish, dist.destroy_process_group
    placement.init = lambda *given, **named: world  # one process group for all
    placement.finish = dist.destroy_process_group = lambda *given: None
    tables = {}
    if world.size > 1:
        train(runs / "ranks", ["dapo"], compute)
        tables["2 ranks"] = replay.replay(runs / "ranks/dapo", 2)
    else:
        train(runs, list(OWN), compute)
        for name in OWN:
            tables[name] = replay.replay(runs / name, 2, fork(runs) if name == "fork" else None)
        tables["another file"] = replay.replay(runs / "fork", 2, ROOT / "algos/grpo.py")
        tables["2 ranks on 1"] = replay.replay(runs / "ranks/dapo", 2)
        as_if_with_sglang(runs / "rloo")
        tables["SGLang"] = replay.replay(runs / "rloo", 2)
        for name, change in (("grpo", other_token), ("ppo", other_advantage), ("remax", no_baselines)):
            damage(runs / name, change)
            tables[change.__name__] = replay.replay(runs / name, 2)
    if world.is_main:
        as_rows = {name: [astuple(row) for row in comparisons] for name, comparisons in tables.items()}
        (runs / f"replays-{world.size}.json").write_text(json.dumps(as_rows))
    dist.destroy_process_group = destroy
    finish(world)


main(Path(sys.argv[1]))
