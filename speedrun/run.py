"""Enter a record: run a file for each seed of the speedrun, and write speedrun/records/NAME.

    python speedrun/run.py 0002-mine algos/mine.py --steps 60 --learning-rate 3e-5

The words after the file are its flags. The folder gets train.py (a copy of the file), record.json, and a CSV for each
seed. It is written at the end, also for a run that misses the target: verify.py says whether it counts.
"""

import csv
import hashlib
import json
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import referee
import torch
from referee import ROOT, SPEEDRUN, Job, Outcome
from rules import Refused

from common import errors
from common.run import directory

RECORDS = ROOT / "speedrun/records"
USAGE = "python speedrun/run.py NAME FILE.py [flags of the file]"


def machine(job: Job) -> dict:
    """What a replay depends on: commit, versions, processor, start model."""
    place = SimpleNamespace(size=1, device=torch.device("cpu"))
    about = directory.code_and_machine(place, ("common", "scripts", ":(glob)speedrun/*.py"))
    about["hardware"] = {"processor": about["hardware"]["device"], "cores": job.cores}
    return about | {"start_model": referee.digest_of(job.model)}


def enter(job: Job, folder: Path, file: Path, flags: list[str]) -> dict:
    """Play all seeds and write the record. Raises Refused."""
    about = machine(job)
    outcomes = {seed: referee.play(job, file, flags, seed) for seed in job.seeds}
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(file, folder / "train.py")
    for seed, outcome in outcomes.items():
        write_csv(folder / f"seed{seed}.csv", outcome)
    record = {
        "train.py": hashlib.sha256(file.read_bytes()).hexdigest(),
        "flags": flags,
        **about,
        "flops": max(outcome.claims["flops"] for outcome in outcomes.values()),
        "seeds": {str(seed): outcome.claims for seed, outcome in outcomes.items()},
    }
    (folder / "record.json").write_text(json.dumps(record, indent=2) + "\n")
    return record


def write_csv(file: Path, outcome: Outcome) -> None:
    with open(file, "w", newline="") as out:
        writer = csv.DictWriter(out, referee.COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(outcome.rows)


def main(words: list[str]) -> None:
    if len(words) < 2 or words[0].startswith("-") or not words[1].endswith(".py"):
        sys.exit(f"usage: {USAGE}")
    name, file, *flags = words
    folder = RECORDS / name
    if folder.exists():
        sys.exit(f"error: {folder} exists; take another name")
    try:
        record = enter(SPEEDRUN, folder, Path(file), flags)
    except Refused as refused:
        sys.exit(f"refused: {refused}")
    for seed, claims in record["seeds"].items():
        errors.say(f"seed {seed}: {claims['accuracy']:.1%} ({claims['low']:.1%} or more), {claims['flops']:,} FLOPs")
    errors.say(f"written to {folder}; the next step is speedrun/verify.py on it, first with --check")


if __name__ == "__main__":
    main(sys.argv[1:])
