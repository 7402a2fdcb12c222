"""Verify records of the speedrun. Anyone can: it needs the record's folder and a machine of its kind.

    python speedrun/verify.py speedrun/records/0001-merged            checks, shows the file's diff, then replays it
    python speedrun/verify.py speedrun/records/0001-merged --check    shows the diff, without a replay, in seconds
    python speedrun/verify.py                                         --check for all records, and is the table right?
    python speedrun/verify.py speedrun/records/0001-merged --seeds 7  trains with a seed of yours: how far does it get?
    python speedrun/verify.py --table                                 writes the table into speedrun/README.md

A replay trains again, with the record's file, flags and seeds, and compares what the referee has seen: all prompts,
sampled tokens and rewards, the FLOPs after each rollout, the trained weights, and which problems they solve. It ends
with exit code 1 at the first difference. Another kind of processor rounds differently, so its replay differs, too.
"""

import csv
import dataclasses
import hashlib
import json
import re
import sys
from pathlib import Path
from typing import Any

import referee
import rules
import run
import tyro
from referee import SPEEDRUN, Job
from rules import ROOT, Refused

from common import errors
from common.run import directory

BEGIN, END = "<!-- speedrun -->", "<!-- /speedrun -->"  # the table between them is generated
PAGE = ROOT / "speedrun/README.md"


@dataclasses.dataclass
class Args:
    records: tyro.conf.Positional[tuple[Path, ...]] = ()  # Folders of records. Without one: --check for all.
    check: bool = False  # Replay nothing.
    seeds: tuple[int, ...] = ()  # Seeds to replay. Default: the record's.
    table: bool = False  # Write the table.


# What run.py writes into record.json, and of each seed into its "seeds".
OF_A_RECORD = {"train.py": str, "flags": list, "flops": int, "seeds": dict, "hardware": dict, "start_model": str}
OF_A_RECORD |= {"versions": dict, "uncommitted_changes": bool}
OF_A_SEED = dict.fromkeys(("flops", "right", "rollouts", "responses", "tokens"), int)
OF_A_SEED |= dict.fromkeys(("low", "high", "accuracy", "seconds"), float)
OF_A_SEED |= dict.fromkeys(("digest", "weights", "solved"), str)
IN_JSON = {str: "a string", int: "a whole number", float: "a number", list: "a list", dict: "an object"}
IN_JSON |= {bool: "true or false"}


def check_kinds(contents: Any, kinds: dict[str, type], what: str) -> None:
    """Refuse contents of record.json that lack something. what: it is, for the message. Raises Refused."""
    if not isinstance(contents, dict):
        raise Refused(f"record.json: {what} is not an object")
    for name, kind in kinds.items():
        if not isinstance(contents.get(name), int | float if kind is float else kind):
            raise Refused(f'record.json: "{name}" of {what} must be {IN_JSON[kind]}, and is {contents.get(name)!r}')


def read(folder: Path) -> dict:
    """record.json. Raises Refused if it lacks something that run.py writes."""
    try:
        record = json.loads((folder / "record.json").read_text())
    except (OSError, ValueError) as error:
        raise Refused(f"record.json: {error}") from None
    check_kinds(record, OF_A_RECORD, "the record")
    if not all(isinstance(word, str) for word in record["flags"]):
        raise Refused("record.json: a flag is not a string")
    for seed, claims in record["seeds"].items():
        check_kinds(claims, OF_A_SEED, f"seed {seed}")
    return record


def read_csv(file: Path) -> list[dict]:
    """Rows of a CSV, with numbers where it has some. Raises Refused."""
    try:
        with open(file, newline="") as lines:
            rows = [dict(row) for row in csv.DictReader(lines)]
        for row in rows:
            if set(row) != set(referee.COLUMNS):
                raise ValueError(f"its columns are not {', '.join(referee.COLUMNS)}")
            row |= {name: int(row[name]) for name in ("rollout", "prompts", "responses", "tokens", "flops")}
            row |= {name: float(row[name]) for name in ("reward", "seconds")}
    except (OSError, ValueError, TypeError) as error:
        raise Refused(f"{file.name}: {error}") from None
    if not rows:
        raise Refused(f"{file.name}: has no rows")
    return rows


def counts(job: Job, record: dict) -> bool:
    """Whether the lower end of the interval is over the target, for all seeds of the speedrun."""
    seeds = record["seeds"]
    return all(str(seed) in seeds and seeds[str(seed)]["low"] > job.target for seed in job.seeds)


def check(job: Job, folder: Path) -> dict:
    """Everything that takes no training. Returns record.json. Raises Refused."""
    record = read(folder)
    rules.check_file(folder / "train.py")
    rules.check_flags(record["flags"])
    if hashlib.sha256((folder / "train.py").read_bytes()).hexdigest() != record["train.py"]:
        raise Refused("train.py: it is not the file that record.json names; it was changed after the run")
    if list(record["seeds"]) != [str(seed) for seed in job.seeds]:
        found, wanted = ", ".join(record["seeds"]) or "none", ", ".join(map(str, job.seeds))
        raise Refused(f"record.json has seeds {found}; a record has {wanted}")
    for seed, claims in record["seeds"].items():
        rows = read_csv(folder / f"seed{seed}.csv")
        if not 0 <= claims["right"] <= job.held_out:
            raise Refused(f"seed {seed}: record.json says right {claims['right']}, of {job.held_out} problems")
        summed = referee.totals(rows) | referee.interval(claims["right"], job.held_out)
        for name, value in summed.items():
            if claims[name] != value:
                raise Refused(f"seed {seed}: record.json says {name} {claims[name]}, its files give {value}")
        if claims["flops"] < rows[-1]["flops"]:
            raise Refused(f"seed {seed}: record.json has fewer FLOPs than the last row of seed{seed}.csv")
    if len({claims["digest"] for claims in record["seeds"].values()}) < len(job.seeds):
        raise Refused("record.json: two seeds have the same digest, so the file does not heed --seed")
    if record["flops"] != max(claims["flops"] for claims in record["seeds"].values()):
        raise Refused("record.json: its FLOPs are not those of the seed that took the most")
    if not record.get("commit") or record["uncommitted_changes"]:
        raise Refused("record.json: the code that ran was not committed; commit or stash it, and run the record again")
    check_commit(record["commit"])
    return record


def check_commit(commit) -> None:
    """Refuse a commit that this repository does not have. Raises Refused."""
    if not isinstance(commit, str) or not re.fullmatch("[0-9a-f]{40}", commit):
        raise Refused(f"record.json: {commit!r} is not the full name of a commit")
    if directory.git("cat-file", "-t", commit) == "commit":
        return
    # An archive without .git, or a shallow clone, can't tell whether the commit exists.
    if directory.git("rev-parse", "--is-shallow-repository") != "false":
        errors.say(f"commit {commit} was not looked for: this is no full git clone")
        return
    raise Refused(
        f"record.json: commit {commit} is not in this repository; git fetch, or the run's code was never published"
    )


def replay(job: Job, folder: Path, record: dict, seeds: tuple[int, ...]) -> None:
    """Train again and compare. seeds: to train with; none: the record's. Raises Refused."""
    here = run.machine(job)
    if here["start_model"] != record["start_model"]:
        raise Refused(f"the start model is {here['start_model']}, the record's {record['start_model']}")
    for name in ("commit", "versions", "hardware"):
        if here[name] != record[name]:
            errors.say(f"{name}: {here[name]} here, {record[name]} in the record; so the replay may differ")
    for seed in seeds or job.seeds:
        # A seed of the reader's own has nothing to be compared with.
        recorded = record["seeds"].get(str(seed))
        expected = read_csv(folder / f"seed{seed}.csv") if recorded else None
        try:
            claims = referee.play(job, folder / "train.py", record["flags"], seed, expected).claims
        except Refused as refused:
            raise Refused(f"seed {seed}: {refused}") from None
        run.say_result(seed, claims)
        if not recorded and claims["digest"] in [other["digest"] for other in record["seeds"].values()]:
            raise Refused(f"seed {seed}: it repeats another seed, so the file does not heed --seed")
        for name, now in claims.items():
            if recorded and name != referee.NOT_REPEATED and recorded[name] != now:
                raise Refused(f"seed {seed}: {name} {recorded[name]} (replay: {now})")


def table(job: Job, folder: Path = run.RECORDS) -> str:
    """A line for each record, the fewest FLOPs first. Those that miss the target stand at the end."""
    lines = [
        "| record | PFLOPs | accuracy, each seed (95 % interval) | responses | minutes a seed | counts |",
        "|---|" + "---|" * 5,
    ]
    records = []
    for path in sorted(folder.glob("*/record.json")):
        try:
            records.append((path.parent, read(path.parent)))
        except Refused as refused:
            raise Refused(f"{path.parent.name}: {refused}") from None
    # False comes before True.
    records.sort(key=lambda each: (not counts(job, each[1]), each[1]["flops"]))
    for path, record in records:
        seeds = record["seeds"].values()
        accuracies = [
            f"{claims['right'] / job.held_out:.1%} ({claims['low']:.1%} to {claims['high']:.1%})" for claims in seeds
        ]
        fields = (
            f"[{path.name}](records/{path.name}/train.py)",
            f"{record['flops'] / 1e15:.3f}",
            ", ".join(accuracies),
            f"{max(claims['responses'] for claims in seeds):,}",
            f"{max(claims['seconds'] for claims in seeds) / 60:.0f}",
            "yes" if counts(job, record) else "no",
        )
        lines.append(f"| {' | '.join(fields)} |")
    return "\n".join([BEGIN, *lines, END])


def main(args: Args, job: Job = SPEEDRUN) -> None:
    if args.seeds and not args.records:
        raise errors.BadInput("--seeds needs the folder of a record, which it trains with these seeds")
    failed = False
    if args.table:
        before, rest = PAGE.read_text().split(BEGIN)
        try:
            PAGE.write_text(before + table(job) + rest.split(END)[1])
        except Refused as refused:
            errors.say(f"the table was not written: {refused}")
            failed = True
    for folder in args.records or sorted(path.parent for path in run.RECORDS.glob("*/record.json")):
        try:
            errors.say(f"{folder.name}: {verified(job, folder, args)}")
        except Refused as refused:
            errors.say(f"{folder.name}: refused: {refused}")
            failed = True
    # The table has a line for each record, so it can be compared only if all of them can be read.
    if not args.records and not failed and table(job) not in PAGE.read_text():
        errors.say("speedrun/README.md: the table is not up to date; python speedrun/verify.py --table")
        failed = True
    sys.exit(failed)


def verified(job: Job, folder: Path, args: Args) -> str:
    """Check a record and, if that was asked for, replay it. Returns what is now known. Raises Refused."""
    record = check(job, folder)
    verdict = if_replayed = "it misses the target"
    if counts(job, record):
        verdict, if_replayed = "it counts", "if a replay agrees, it counts"
    if args.records:
        # Not say(): it would shorten what looks like a URL's password, and so could hide code.
        print(errors.escaped(rules.nearest_diff(folder / "train.py", record["commit"])), flush=True)
    if not args.records or args.check:
        return f"its files agree. Nothing was replayed; {if_replayed}"
    replay(job, folder, record, args.seeds)
    not_replayed = set(job.seeds) - set(args.seeds or job.seeds)
    if not_replayed == set(job.seeds):
        return f"its files agree. None of its seeds was replayed; {if_replayed}"
    if not_replayed:
        return f"verified, except for seed {', '.join(map(str, sorted(not_replayed)))}, not replayed; {verdict}"
    return f"verified; {verdict}"


if __name__ == "__main__":
    referee.leave_when_asked()
    errors.launch(main, tyro.cli(Args, description=__doc__))
