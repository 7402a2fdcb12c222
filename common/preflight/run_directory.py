"""The contents of --run-dir before a run starts: the checkpoint it resumes, and flags that must be as they were.

Also reads the files that a run has left there, run.json and metrics.jsonl.
"""

import dataclasses
import hashlib
import inspect
import json
import re
import tempfile
from datetime import date
from pathlib import Path
from typing import Any

from common.data.json_lines import is_count, is_number, read, read_object
from common.errors import BadInput, redacted, say, warn
from common.preflight import folders

# Flags that may change when a run is resumed. All others must stay, the flags of a fork too.
MAY_DIFFER = {
    "steps",  # but see check_configuration()
    "run_dir",  # one directory can have several names
    # These concern only how the run starts.
    "resume",
    "dry_run",
    # These are about files, not about training.
    "save_every",
    "keep_checkpoints",
    "async_save",
    "eval_every",
    "rollouts_every",
    "track",
    "max_logprob_gap",  # only stops the run
    # These lay out the work: metrics differ by rounding, and by which rank samples which response.
    "token_budget",
    "shared_prompts",
    "packing",
    "longest",  # of the longest row; what decides it is compared by itself
    "activation_checkpointing",
    "offload",
    "rollout_tp",
    "rollout_memory",
    "rollout_placement",
    "rollout_devices",
    "rollout_urls",
    "sequence_parallel",
    "shard_size",
}


def name_of(args) -> str:
    """The name of the algorithm's file, which defines the class of its flags, without .py."""
    return Path(inspect.getfile(type(args))).stem


def check_directory(run_dir: str, resume: str) -> Path | None:
    """The checkpoint to resume, or None.

    Raises BadInput if a run in run_dir would be overwritten, if nothing can be written there, or if there is something
    wrong with the checkpoint.
    """
    # A folder that cannot be written to is found now. Saver.check_space() looks for room before each save.
    check_writable(run_dir)
    if resume == "auto" and not run_dir:
        raise BadInput("--resume auto: needs --run-dir, the run to resume")
    metrics = Path(run_dir) / "metrics.jsonl"
    if run_dir and not resume and metrics.exists():
        raise BadInput(
            f"--run-dir {run_dir}: holds a run already; --resume auto goes on with it, another --run-dir keeps it"
        )
    checkpoint = find_checkpoint(resume, Path(run_dir))
    if checkpoint is None:
        if resume == "auto":  # a name with a typo would otherwise begin anew without a word
            say(f"--resume auto: {run_dir} has no checkpoint, so the run starts at step 1")
        return None
    folders.check(checkpoint)
    if not run_dir:
        return checkpoint
    if metrics.is_file():
        rows = read_metrics(Path(run_dir))  # finds errors before the model is loaded
        # The rows up to the checkpoint would count as the past of this run. A second attempt has none of them.
        # samefile() follows links: checkpoints/ may lie on another disk.
        own = [folder for folder in (Path(run_dir) / "checkpoints").glob("*") if folder.exists()]
        is_elsewhere = not any(folder.samefile(checkpoint) for folder in own)
        if is_elsewhere and rows and rows[0]["step"] <= saved_step(checkpoint):
            raise BadInput(
                f"--run-dir {run_dir}: holds steps of another run than --resume {resume}; name a new --run-dir"
            )
    # Going on from an older checkpoint would mix its steps with those of the newer one.
    saved = folders.complete(Path(run_dir))
    if saved and saved_step(saved[-1]) > saved_step(checkpoint):
        raise BadInput(
            f"--resume {resume}: --run-dir {run_dir} has the newer {saved[-1].name}; --resume auto goes on with that "
            "one, another --run-dir keeps both"
        )
    return checkpoint


def check_writable(named: str, flag: str = "--run-dir") -> None:
    """Refuse a folder that is a file or below one, or in which no file can be made. Raises BadInput."""
    folder = Path(named or "runs").absolute()
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    if not existing.is_dir():
        raise BadInput(f"{flag} {named or 'runs'}: {existing} is a file")
    try:
        with tempfile.TemporaryFile(dir=existing):
            pass
    except OSError as error:
        raise BadInput(f"{flag} {named or 'runs'}: {existing} cannot be written to: {error.strerror}") from None


def date_of(run_dir: str, resume: str) -> str:
    """The date on which the run to resume began, for the chat template; "" if none is recorded. Raises BadInput.

    resume: --resume. A checkpoint that is named by its folder lies in RUN/checkpoints/, below that run's run.json.
    """
    if not resume:
        return ""
    # The run's own file comes first: a run that began from another run's checkpoint has recorded that run's date.
    folders_of_runs = [Path(run_dir)] if run_dir else []
    if resume != "auto":
        folders_of_runs.append(Path(resume).absolute().parent.parent)
    for folder in folders_of_runs:
        file = folder / "run.json"
        if not file.is_file():
            continue
        day = described(file).get("date", "")
        if day and not is_date(day):
            raise BadInput(f'{file}: "date" must be a date such as "2026-05-01", got {day!r:.80}')
        return day
    return ""


def is_date(text: Any) -> bool:
    try:
        return date.fromisoformat(text).isoformat() == text
    except (TypeError, ValueError):
        return False


def find_checkpoint(resume: str, run_dir: Path) -> Path | None:
    """The checkpoint that --resume names: none, the newest complete one in run_dir ("auto"), or a folder.

    Raises BadInput.
    """
    if not resume:
        return None
    if resume == "auto":
        saved = folders.complete(run_dir)
        return saved[-1] if saved else None
    if not (Path(resume) / "state.json").is_file():
        raise BadInput(f"--resume {resume}: no complete checkpoint there (state.json is missing)")
    if resume.rstrip("/").endswith(".unfinished"):
        raise BadInput(f"--resume {resume}: no complete checkpoint; writing or deleting it was interrupted")
    return Path(resume)


def saved_step(checkpoint: Path) -> int:
    """The step after which a checkpoint was saved."""
    return folders.state(checkpoint).step


def check_steps_left(args, resume: Path | None) -> None:
    """Refuse a checkpoint that leaves no step to do. With --resume auto that is not an error: the run is done.

    Raises BadInput.
    """
    if resume is None or args.saving.resume == "auto" or args.saving.dry_run:
        return
    done = saved_step(resume)
    if done >= args.steps:
        raise BadInput(f"--steps {args.steps}: --resume {resume} has done {done} already; raise --steps")


def check_configuration(args, name: str) -> None:
    """Compare the flags with those in run.json of --run-dir. Raises BadInput if one differs that must stay.

    args: flags with their settled values. name: the name of the algorithm's file without .py.
    """
    file = Path(args.run_dir) / "run.json"
    if not args.run_dir or not file.is_file():
        return
    run = described(file)
    if run.get("algorithm") != name:
        raise BadInput(
            f"--run-dir {args.run_dir}: is a run of {run.get('algorithm')}.py, not of {name}.py", code="run-changed"
        )
    before = flat(run["args"])
    now = flags(args)
    changed = []
    for flag in sorted(before):
        may_differ = flag in MAY_DIFFER
        if flag == "steps" and now.get("schedule") == "linear":
            # The learning rate of each step depends on the last one.
            may_differ = False
        if not may_differ and comparable(before[flag]) != comparable(now.get(flag)):
            why = " (with --schedule linear it decides each learning rate)" if flag == "steps" else ""
            changed.append(f"--{flag.replace('_', '-')} {before[flag]!r}, now {now.get(flag)!r}{why}")
    if changed:
        raise BadInput(
            f"--run-dir {args.run_dir}: its run began with {'; '.join(changed)}. Use the flags it began with. With "
            f"others, give a new --run-dir; to go on from this run, also --resume {args.run_dir}/checkpoints/step_...",
            code="run-changed",
        )


def code_of(args) -> dict[str, str]:
    """The user's Python files -> a checksum of each: the algorithm's, and those that --reward and --environment name.

    Modules that these files import are not among them.
    """
    named = flags(args)
    files = {f"{name_of(args)}.py": Path(inspect.getfile(type(args)))}
    for spec in (*named.get("reward", ()), named.get("environment", "")):
        path = spec.rpartition(":")[0]
        if path.endswith(".py"):
            files[path] = Path(path)
    return {path: hashlib.sha256(file.read_bytes()).hexdigest()[:16] for path, file in files.items() if file.is_file()}


def warn_of_changed_code(args, resume: Path | None) -> None:
    """Say which of the user's files are others than those that the run of --run-dir has last run with.

    resume: the checkpoint from which it goes on. A run that begins anew mixes nothing.
    """
    file = Path(args.run_dir) / "run.json"
    if resume is None or not args.run_dir or not file.is_file():
        return
    before = described(file).get("code")
    if not isinstance(before, dict):  # written by an older version
        return
    changed = [path for path, checksum in code_of(args).items() if before.get(path, checksum) != checksum]
    if changed:
        warn(
            f"--run-dir {args.run_dir}: since its last step {' and '.join(changed)} {'have' if changed[1:] else 'has'} "
            "changed; from here on its curve is another program's. To keep them apart: --resume CHECKPOINT with a new "
            "--run-dir",
            code="code-changed",
        )


def comparable(value: Any) -> Any:
    """A flag's value for a comparison. A flag that takes several values today may have taken one text before."""
    if isinstance(value, list) and len(value) < 2:
        return value[0] if value else ""
    return value


def flags(args) -> dict:
    """The flags of a run by their names on the command line, without secrets."""
    return flat(json.loads(redacted(json.dumps(dataclasses.asdict(args)))))


def flat(nested: dict) -> dict:
    """Flags by their names on the command line, which do not show that some are in a nested dataclass."""
    named = {}
    for name, value in nested.items():
        named |= value if isinstance(value, dict) else {name: value}
    return named


def described(file: Path) -> dict:
    """The contents of a run.json. Raises BadInput."""
    run = read_object(file)
    if not isinstance(run.get("args"), dict) or not isinstance(run["args"].get("model", ""), str):
        raise BadInput(f'{file}: has no "args" of a run')
    return run


def command_of(run: dict) -> list[str]:
    """The words of the command that began a run, from its run.json."""
    hardware = run.get("hardware")
    ranks = hardware.get("ranks", 1) if isinstance(hardware, dict) else 1
    usual = ["python"] if ranks == 1 else ["torchrun", "--nproc-per-node", ranks]  # older runs have no launcher
    return [without_path(str(word)) for word in (*(run.get("launcher") or usual), *run["argv"])]


def without_path(word: str) -> str:
    """A word of a command. An absolute path loses its folders, which are nobody's business.

    The text of a prompt may begin with a slash, too: /no_think.
    """
    path = re.fullmatch(r"(--[\w.-]+=)?(/[^/\s]+/.*)", word, re.DOTALL)
    return (path[1] or "") + Path(path[2]).name if path else word


def read_metrics(run_dir: Path) -> list[dict[str, float]]:
    """The rows of metrics.jsonl, except for a last row that was not written to its end. Raises BadInput."""
    file = run_dir / "metrics.jsonl"
    rows = []
    for number, row in read(file, hint="; remove the line, and the run goes on", torn=True, code="metrics-corrupt"):
        wrong = [name for name, value in row.items() if not is_number(value)]
        if not wrong and not is_count(row.get("step")):
            wrong = ["step"]
        if wrong:
            raise BadInput(
                f'{file}:{number}: "{wrong[0][:80]}" is {row.get(wrong[0])!r:.80}, expected a number',
                code="metrics-corrupt",
            )
        rows.append(row)
    return rows
