"""Enter a record: run a file for each seed of the speedrun, and write speedrun/records/NAME.

    python speedrun/run.py --try algos/mine.py --steps 2 --warmup-steps 1       a trial in minutes; it writes nothing
    python speedrun/run.py 0042-mine algos/mine.py --steps 160 --learning-rate 2e-5

The words after the file are its flags. The folder gets train.py (a copy of the file), record.json, and a CSV for each
seed. Until all seeds are done it is called NAME.unfinished, and the same command goes on with what is missing. A run
that misses the target gets a record, too: verify.py says whether it counts. A trial is one seed. It keeps 512 training
problems out of training, and is evaluated on them, so the held-out problems judge records alone.
"""

import contextlib
import csv
import fcntl
import hashlib
import io
import json
import os
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import referee
import torch
from referee import ROOT, SPEEDRUN, Job, Outcome
from rules import Refused

from common import errors
from common.preflight import folders
from common.run import directory

RECORDS = ROOT / "speedrun/records"
TRIAL = "--try"  # in the place of the record's name
CODE = ("common", "scripts", ":(glob)speedrun/*.py")  # what git must not show changes in
SO_FAR = "so_far.json"  # in NAME.unfinished: what record.json will have, with the seeds so far


def machine(job: Job) -> dict:
    """What a replay depends on: commit, versions, processor, start model. Raises Refused."""
    referee.check_machine(job)
    place = SimpleNamespace(size=1, device=torch.device("cpu"))
    about = directory.code_and_machine(place, CODE)
    about["hardware"] = {"processor": about["hardware"]["device"], "cores": job.cores}
    return about | {"start_model": referee.digest_of(job.model)}


def check_committed(about: dict) -> None:
    """Raises Refused if verify.py would refuse the record for the code that it ran: better now than after hours."""
    if not about["commit"]:
        raise Refused("this is no git checkout, and a record names the commit that it ran; clone the repository")
    if about["uncommitted_changes"]:
        changed = directory.git("status", "--porcelain", "--", *CODE).split("\n")
        raise Refused(
            f"git status shows changes in common/, scripts/ or speedrun/*.py: {', '.join(map(str.strip, changed))}. "
            "Stash them, or commit and publish them. Your own file belongs into algos/"
        )
    if directory.git("remote") and not directory.git("branch", "-r", "--contains", about["commit"]):
        errors.say(f"no branch of a remote has commit {about['commit']}; push it, or nobody can check the record")


def enter(job: Job, folder: Path, file: Path, flags: list[str]) -> dict:
    """Play the seeds and write the record. Returns record.json. Raises Refused.

    A seed takes an hour or more. So its rows and weights are in NAME.unfinished as soon as it is trained, and the
    weights stay there until they are evaluated.
    """
    about = machine(job)
    try:
        source = file.read_bytes()
    except OSError as error:
        raise Refused(f"{file}: {error.strerror}") from None
    unfinished = folder.with_name(f"{folder.name}.unfinished")
    begun = {"train.py": hashlib.sha256(source).hexdigest(), "flags": flags, **about}
    with alone_in(unfinished):
        seeds = seeds_so_far(unfinished, begun)
        # A copy: the file may be edited while it runs, and all seeds must run the same.
        (unfinished / "train.py").write_bytes(source)
        for seed in job.seeds:
            complete_seed(job, unfinished, begun, seeds, seed)
        flops = max(claims["flops"] for claims in seeds.values())
        record = begun | {"flops": flops, "seeds": seeds}
        folders.write(unfinished / "record.json", json.dumps(record, indent=2) + "\n")
        unfinished.rename(folder)
    (folder / SO_FAR).unlink()
    return record


def complete_seed(job: Job, unfinished: Path, begun: dict, seeds: dict[str, dict], seed: int) -> None:
    """Train and evaluate a seed, or what of it an earlier call has not done. Its claims are then in `seeds` and on the
    disk. begun, seeds: as in seeds_so_far. Raises Refused.
    """
    name, weights = str(seed), unfinished / f"seed{seed}.weights"  # the weights stay until they are evaluated
    claims = seeds.get(name, {})
    evaluated = "right" in claims
    trained = bool(claims) and weights.is_dir() and referee.digest_of(weights) == claims["weights"]
    if evaluated:
        errors.say(f"seed {seed} is done already; {unfinished} has it")
    elif trained:
        errors.say(f"seed {seed} is trained already; {weights} has its weights")
    else:
        errors.say(f"seed {seed}")
        remove(weights)  # of a training whose claims were not kept
        outcome = referee.train(job, unfinished / "train.py", begun["flags"], seed, weights)
        check_unchanged(job, begun)
        write_csv(unfinished / f"seed{seed}.csv", outcome)
        seeds[name] = outcome.claims
        keep_seeds(unfinished, begun, seeds)
    if not evaluated:
        measured = referee.examine(job, weights)
        check_unchanged(job, begun)
        seeds[name] = seeds[name] | measured
        keep_seeds(unfinished, begun, seeds)
    remove(weights)  # also if a call that was cut off has left them


@contextlib.contextmanager
def alone_in(unfinished: Path):
    """Make the folder if there is none, and keep other calls of run.py out of it. Raises Refused."""
    unfinished.mkdir(parents=True, exist_ok=True)
    handle = os.open(unfinished, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Refused(f"another run.py is writing {unfinished}; wait for it, or take another name") from None
        yield
    finally:
        os.close(handle)


def remove(folder: Path) -> None:
    if folder.exists():
        shutil.rmtree(folder)


def check_unchanged(job: Job, begun: dict) -> None:
    """Raises Refused if code or machine are no longer those that the run began with."""
    changed = [f"{name} was {begun[name]}, and is {now}" for name, now in machine(job).items() if now != begun[name]]
    if changed:
        raise Refused(f"changed while it ran: {'; '.join(changed)}. Restore it, and run the same command again")


def keep_seeds(unfinished: Path, begun: dict, seeds: dict[str, dict]) -> None:
    """Write so_far.json. Claims without `right` are of a seed that is trained and not evaluated yet."""
    folders.write(unfinished / SO_FAR, json.dumps(begun | {"seeds": seeds}, indent=2) + "\n")


def seeds_so_far(unfinished: Path, begun: dict) -> dict[str, dict]:
    """The seeds that an earlier call has trained.

    begun: file, flags, code and machine. Those of the folder must be the same: all seeds of a record run alike. Raises
    Refused.
    """
    if not (unfinished / SO_FAR).is_file():  # also if the earlier call has not trained its first seed
        return {}
    so_far = json.loads((unfinished / SO_FAR).read_text())
    seeds = so_far.pop("seeds")
    differs = [name for name in begun if so_far.get(name) != begun[name]]
    if differs:
        raise Refused(
            f"{unfinished} has seed {', '.join(seeds)} of another {' and '.join(differs)}. To go on with it, restore "
            f"what {SO_FAR} names (git checkout {so_far.get('commit')}, file, flags). To start again, delete the folder"
        )
    return seeds


def write_csv(file: Path, outcome: Outcome) -> None:
    """A row for each call of the engine. It is on the disk when this returns, because so_far.json vouches for it."""
    text = io.StringIO()
    writer = csv.DictWriter(text, referee.COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(outcome.rows)
    folders.write(file, text.getvalue())


def say_result(seed: int | str, claims: dict) -> None:
    """Print what a seed has reached."""
    solved = f"{claims['right']:,} problems solved, {claims['accuracy']:.1%}"
    interval = f"95 % interval: {claims['low']:.1%} to {claims['high']:.1%}"
    cost = f"{claims['flops'] / 1e12:.4g} TFLOPs, {claims['seconds']} s"
    errors.say(f"seed {seed}: {solved} ({interval}); {cost}")


def main(words: list[str], job: Job = SPEEDRUN) -> None:
    if words in (["-h"], ["--help"]):
        print(__doc__)
        return
    if len(words) < 2 or not words[1].endswith(".py"):
        sys.exit(
            "The first word is the record's name, or --try, and the second is the entry's file, as in\n"
            "    python speedrun/run.py 0042-mine algos/mine.py --steps 160\n--help says more"
        )
    name, file, *flags = words
    folder = RECORDS / name
    try:
        if name == TRIAL:
            trial = job.trial()
            (seed,) = trial.seeds
            say_result(seed, referee.play(trial, Path(file), flags, seed).claims)
            errors.say("A trial, not a record: evaluated on training problems that it left out. Nothing was written.")
            return
        if name.startswith("-") or Path(name).name != name:
            raise Refused(f"{name}: the first word is the name of a folder in speedrun/records, such as 0042-mine")
        if folder.exists():
            raise Refused(f"{folder} exists; take another name")
        check_committed(machine(job))
        record = enter(job, folder, Path(file), flags)
    except Refused as refused:
        sys.exit(f"refused: {refused}")
    except KeyboardInterrupt:
        sys.exit("interrupted. For a record, run the same command again: a trained seed is not trained again")
    for seed, claims in record["seeds"].items():
        say_result(seed, claims)
    errors.say(f"written to {folder}; next: python speedrun/verify.py {folder} --check")


if __name__ == "__main__":
    referee.leave_when_asked()
    main(sys.argv[1:])
