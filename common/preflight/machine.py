"""Checks of this machine and of how a run is laid out on it, before the ranks are joined."""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from importlib.util import find_spec
from pathlib import Path

import torch

from common.cores import usable_cores
from common.errors import BadInput
from common.placement import Layout, Sharding


def world_size() -> int:
    """Number of ranks that torchrun started, 1 without it. It is known before they are joined."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def check_world(rollout_tp: int, layout=Layout(), backend: str = "vllm", sharding=Sharding()) -> int:
    """The number of ranks, after checking that the layout fits them and this machine. Raises BadInput."""
    check_gpus()
    size = world_size()
    # Each of these numbers of ranks works on something together, so it has to divide them all.
    sharers = {"sequence-parallel": sharding.sequence_parallel, "shard-size": sharding.shard_size or size}
    if not layout.split:
        # In a split layout the engines are not on the ranks.
        sharers["rollout-tp"] = rollout_tp
    for flag, ranks in sharers.items():
        if size % ranks:
            raise BadInput(f"--{flag} {ranks} does not divide the {size} ranks")
    if torch.cuda.is_available():
        local_size = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        servers = len(layout.rollout_devices)
        gpus = torch.cuda.device_count()
        if local_size + servers > gpus:
            needed = f"{local_size} ranks" + (f" and {servers} --rollout-devices" if servers else "")
            raise BadInput(f"{needed} on this node, which has {gpus} GPUs")
    check_layout(layout, rollout_tp, backend)
    return size


def check_gpus() -> None:
    """Refuse GPUs that torch or Triton cannot use: the run would train on the CPU, or end after minutes of loading.

    CUDA_VISIBLE_DEVICES="" asks for the CPU. Raises BadInput.
    """
    if torch.cuda.is_available():
        if missing := triton_lacks():
            raise BadInput(f"Triton compiles kernels for vLLM and for the trainer's logit head, and finds {missing}")
        return
    # torch sees no GPU. Is there one?
    wants_cpu = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    if wants_cpu or not shutil.which("nvidia-smi"):
        return
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True).stdout
    if "GPU " not in listed:
        return
    if torch.version.cuda:
        why = f"needs a driver for CUDA {torch.version.cuda}: 580 or newer for CUDA 13"
    else:
        why = "is a CPU build: MACHINE=gpu bash scripts/install.sh"
    raise BadInput(
        f"nvidia-smi lists GPUs and torch sees none: torch {torch.__version__} {why}; "
        'CUDA_VISIBLE_DEVICES="" runs on the CPU'
    )


def triton_lacks() -> str:
    """The first thing that Triton needs to compile and that this machine lacks, or ""."""
    named = os.environ.get("CC", "").split()[:1]
    compilers = named or ["gcc", "clang"]  # where Triton looks, too
    if not any(map(shutil.which, compilers)):
        return f"no C compiler{' ' + named[0] if named else ''}: install gcc, or name a compiler in CC"
    headers = Path(sysconfig.get_path("include", "posix_prefix"))
    if not (headers / "Python.h").exists():
        return f"no Python.h in {headers}: install python{sys.version_info.major}.{sys.version_info.minor}-dev"
    return ""


def check_layout(layout: Layout, rollout_tp: int, backend: str) -> None:
    """Refuse flags of the rollout's placement that contradict each other. Raises BadInput."""
    devices = layout.rollout_devices
    urls = layout.rollout_urls
    if not layout.split and (devices or urls or layout.max_inflight_batches > 1):
        raise BadInput(
            "--rollout-devices, --rollout-urls and --max-inflight-batches > 1 need --rollout-placement split"
        )
    if layout.inflight_updates != "none" and layout.max_inflight_batches == 1:
        raise BadInput(
            f"--inflight-updates {layout.inflight_updates} needs --max-inflight-batches 2 or more: with 1 no response "
            "is under way when new weights come"
        )
    if backend == "vllm" and not urls and find_spec("vllm") is None:
        raise BadInput("--rollout-backend vllm: not installed (there is no vLLM for macOS); use --rollout-backend hf")
    if backend == "hf" and rollout_tp > 1:
        raise BadInput(f"--rollout-tp {rollout_tp}: --rollout-backend hf holds a whole copy on each rank; leave it out")
    if not layout.split:
        if backend == "sglang":
            raise BadInput("--rollout-backend sglang needs --rollout-placement split and --rollout-urls")
        return
    for url in urls:
        if not re.fullmatch(r"https?://[^/?#@]+/?", url):
            # The rest of the URL may hold a secret.
            shown = re.split("[?#]", url)[0]
            raise BadInput(f"--rollout-urls {shown}: expected http://HOST:PORT")
    if backend == "hf":
        raise BadInput(f"--rollout-placement split needs servers; --rollout-backend {backend} has none")
    if backend == "sglang":
        if devices:
            raise BadInput("--rollout-devices starts vLLM's servers; start SGLang's yourself and pass --rollout-urls")
        if layout.inflight_updates == "keep":
            raise BadInput(
                "--inflight-updates keep with --rollout-backend sglang: later requests would read the old keys and "
                "values, too; use recompute"
            )
    if bool(devices) == bool(urls):
        raise BadInput("--rollout-placement split needs --rollout-devices or --rollout-urls, and not both")
    if devices:
        check_devices(devices, rollout_tp)


def check_devices(devices: tuple[int, ...], rollout_tp: int) -> None:
    """Refuse GPUs or cores for servers that this node does not have, or that leave none for the trainer."""
    if torch.cuda.is_available():
        kind = "GPUs"
        present = list(range(torch.cuda.device_count()))
    else:
        kind = "cores"
        if not hasattr(os, "sched_setaffinity"):
            raise BadInput("--rollout-devices: only Linux binds servers to cores; start servers, pass --rollout-urls")
        present = usable_cores()
    if len(set(devices)) < len(devices) or not set(devices) <= set(present):
        raise BadInput(f"--rollout-devices {devices}: expected different ones of this node's {kind}, {present}")
    # A device's number means nothing on another node.
    if os.environ.get("LOCAL_WORLD_SIZE") != os.environ.get("WORLD_SIZE"):
        raise BadInput(
            "--rollout-devices works on one node; on several, start servers with scripts/serve_rollout.sh and pass "
            "--rollout-urls"
        )
    if len(devices) == len(present):
        raise BadInput(
            f"--rollout-devices {devices}: none of this node's {len(present)} {kind} is left for the trainer"
        )
    if len(devices) % rollout_tp:
        raise BadInput(f"--rollout-tp {rollout_tp} does not divide the {len(devices)} --rollout-devices")


def check_tracker(track: str) -> None:
    """Refuse a tracker that is not installed, and wandb online without a key. Raises BadInput."""
    if track != "none" and find_spec(track) is None:
        raise BadInput(f"--track {track}: not installed; pip install {track}")
    if track != "wandb" or wandb_mode() in ("offline", "dryrun", "disabled"):
        return
    # wandb itself looks for the key, in its files and variables, without asking for it.
    import wandb
    from wandb.sdk.lib import wbauth

    cure = "run wandb login, set WANDB_API_KEY, or set WANDB_MODE=offline"
    try:
        host = wandb.setup().settings.base_url
        key = wbauth.authenticate_session(host=host, source="--track", prompt=False, update_session=False)
    except (ValueError, wandb.errors.Error) as error:
        reason = " ".join(str(error).split())[:300]
        raise BadInput(f"--track wandb: {reason}; {cure}") from None
    if key is None:
        raise BadInput(f"--track wandb: no API key for {host}; {cure}")


def wandb_mode() -> str:
    """WANDB_MODE. The default is online with WANDB_API_KEY, and offline without it."""
    return os.environ.get("WANDB_MODE") or ("online" if os.environ.get("WANDB_API_KEY") else "offline")
