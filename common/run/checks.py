"""Checks before anything is loaded: ranks and devices, and what a user brings, model and rewards."""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections import Counter
from pathlib import Path

import torch
from safetensors import SafetensorError
from transformers import AutoConfig, PreTrainedTokenizerBase
from transformers.utils import logging

from common.data.prompts import Prompt
from common.data.tokenizer import causal_class, image_tokens, load_tokenizer
from common.errors import BadInput, refuse_all
from common.placement import Layout, Sharding
from common.rewards.grading import Item
from common.rewards.mixture import Rewards, grade
from common.trainer import batching, model


def check_world(rollout_tp: int, layout=Layout(), backend: str = "vllm", sharding=Sharding()) -> int:
    """Number of ranks that torchrun started (1 without it), before they are joined. Raises BadInput."""
    check_gpus()
    size, local_size = (int(os.environ.get(name, "1")) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"))
    together = {"rollout-tp": size if layout.split and rollout_tp > 0 else rollout_tp}
    together |= {"sequence-parallel": sharding.sequence_parallel, "shard-size": sharding.shard_size or size}
    for flag, ranks in together.items():
        if ranks < 1 or size % ranks:
            raise BadInput(f"--{flag} {ranks} does not divide the {size} ranks")
    if torch.cuda.is_available() and local_size + len(layout.rollout_devices) > torch.cuda.device_count():
        servers = f" and {len(layout.rollout_devices)} --rollout-devices" if layout.rollout_devices else ""
        raise BadInput(f"{local_size} ranks{servers} on this node, which has {torch.cuda.device_count()} GPUs")
    check_layout(layout, rollout_tp, backend)
    return size


def check_gpus() -> None:
    """Refuse GPUs that torch or Triton cannot use: the run would train on the CPU, or end after minutes of loading.

    CUDA_VISIBLE_DEVICES="" asks for the CPU. Raises BadInput.
    """
    if torch.cuda.is_available() and (lacks := triton_lacks()):
        raise BadInput(f"Triton compiles kernels for vLLM and for the trainer's logit head, and finds {lacks}")
    wants_cpu = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    if torch.cuda.is_available() or wants_cpu or not shutil.which("nvidia-smi"):
        return
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True).stdout
    if "GPU " in listed:
        build = "is a CPU build: MACHINE=gpu bash scripts/install.sh"
        old = f"needs a driver for CUDA {torch.version.cuda}: 580 or newer for CUDA 13"
        raise BadInput(
            f"nvidia-smi lists GPUs and torch sees none: torch {torch.__version__} "
            f'{old if torch.version.cuda else build}; CUDA_VISIBLE_DEVICES="" runs on the CPU'
        )


def triton_lacks() -> str:
    """The first of the things that Triton compiles with and this machine lacks, or ""."""
    named = os.environ.get("CC", "").split()[:1]
    if not any(map(shutil.which, named or ("gcc", "clang"))):  # where Triton looks, too
        return f"no C compiler{' ' + named[0] if named else ''}: install gcc, or name a compiler in CC"
    headers = Path(sysconfig.get_path("include", "posix_prefix"))
    if not (headers / "Python.h").exists():
        return f"no Python.h in {headers}: install python{sys.version_info.major}.{sys.version_info.minor}-dev"
    return ""


def check_layout(layout: Layout, rollout_tp: int, backend: str) -> None:
    """Refuse flags that contradict each other. Raises BadInput."""
    devices, urls = layout.rollout_devices, layout.rollout_urls
    if layout.max_inflight_batches not in (1, 2):
        raise BadInput(f"--max-inflight-batches {layout.max_inflight_batches}: expected 1, or 2 for one batch ahead")
    if not layout.split:
        if devices or urls or layout.max_inflight_batches > 1:
            raise BadInput(
                "--rollout-devices, --rollout-urls and --max-inflight-batches 2 need --rollout-placement split"
            )
        return
    if bad := [url for url in urls if not re.fullmatch(r"https?://[^/?#@]+/?", url)]:
        raise BadInput(f"--rollout-urls {re.split('[?#]', bad[0])[0]}: expected http://HOST:PORT")
    if backend != "vllm":
        raise BadInput(f"--rollout-placement split needs vLLM's servers; --rollout-backend {backend} has none")
    if bool(devices) == bool(urls):
        raise BadInput("--rollout-placement split needs --rollout-devices or --rollout-urls, and not both")
    cuda = torch.cuda.is_available()
    kind = "GPUs" if cuda else "cores"
    there = list(range(torch.cuda.device_count())) if cuda else sorted(os.sched_getaffinity(0))
    if len(set(devices)) < len(devices) or not set(devices) <= set(there):
        raise BadInput(f"--rollout-devices {devices}: expected different ones of this node's {kind}, {there}")
    if devices and os.environ.get("LOCAL_WORLD_SIZE") != os.environ.get("WORLD_SIZE"):
        raise BadInput(
            "--rollout-devices works on one node; on several, start servers with scripts/serve_rollout.sh and pass "
            "--rollout-urls"
        )
    if set(devices) == set(there):
        raise BadInput(f"--rollout-devices {devices}: none of this node's {len(there)} {kind} is left for the trainer")
    if len(devices) % rollout_tp:
        raise BadInput(f"--rollout-tp {rollout_tp} does not divide the {len(devices)} --rollout-devices")


def check_images(prompts: list[Prompt], compute: batching.Compute, environment="", layout=Layout()) -> None:
    """Refuse what prompts with images, or without, cannot be combined with. Raises BadInput."""
    refused = {
        "--environment": environment,
        "--rollout-placement split": layout.split,
        "--sequence-parallel": compute.sequence_parallel > 1,
    }
    with_images = any(hasattr(prompt.ids, "images") for prompt in prompts)
    if other := [flag for flag, given in refused.items() if given and with_images]:
        raise BadInput(f"{other[0]}: prompts with images do not go together with it")
    if compute.train_vision and (compute.lora_rank or not with_images):
        raise BadInput(f"--train-vision: {'--lora-rank freezes it' if with_images else 'no prompt has an image'}")


def check_model(
    model_path: str, tokenizer: PreTrainedTokenizerBase, prompts: list[Prompt], value_head: bool = False
) -> None:
    """Refuse an architecture that cannot be packed, weights that are not those of the architecture, and prompts with
    tokens that the model has no embedding for. The weights of a name on the Hub are checked when they are there.

    Raises BadInput.
    """
    config = AutoConfig.from_pretrained(model_path)
    for head in {False, value_head}:
        model.skeleton(config, model_path, value_head=head)
    if Path(model_path).is_dir():
        check_weights(model_path)
    largest, known = max(max(prompt.ids) for prompt in prompts), config.get_text_config().vocab_size
    if largest >= known:
        raise BadInput(
            f"--model {model_path}: its tokenizer has {len(tokenizer)} tokens, config.json says {known}, "
            f"and token {largest} is in a prompt"
        )


def positions_of(model_path: str, trains: bool = True) -> int:
    """Positions of the model, or those that a run can train on. With longrope these are those of its short frequencies:
    transformers takes the long ones for a whole packed row as soon as one of its sequences needs them, and vLLM for
    all sequences if the longest could need them.
    """
    config = AutoConfig.from_pretrained(model_path).get_text_config()
    rope = getattr(config, "rope_parameters", None) or {}
    if trains and rope.get("rope_type") == "longrope":
        return rope["original_max_position_embeddings"]
    return getattr(config, "max_position_embeddings", sys.maxsize)


def total_tokens(
    model_path: str, prompts: list[Prompt], max_response_tokens: int, flag: str = "--model", trains: bool = True
) -> int:
    """Tokens of the longest prompt plus the longest response. Raises BadInput if the model has fewer positions.

    trains: False for an engine alone, which can use all positions.
    """
    total = max(len(prompt.ids) for prompt in prompts) + max_response_tokens
    positions, there = positions_of(model_path, trains), positions_of(model_path, trains=False)
    if total > positions:
        short = f" to train on (longrope: of its {there}, those of its short frequencies)" if positions < there else ""
        raise BadInput(
            f"--max-response-tokens {max_response_tokens}: with prompts of up to {total - max_response_tokens} tokens "
            f"that is {total}, and {flag} has {positions} positions{short}"
        )
    return total


def check_companion(
    flag: str, model_path: str, tokenizer, prompts: list[Prompt], max_response_tokens: int, ranks: int = 1
) -> None:
    """Refuse a model that is to read the policy's tokens and has another tokenizer, or fewer positions, or cannot be
    packed, or whose heads cannot be shared among so many ranks of sequence parallelism. Raises BadInput.
    """
    theirs, ours = load_tokenizer(model_path, flag)[0].get_vocab(), tokenizer.get_vocab()
    other = next((token for token in sorted(ours, key=ours.get) if theirs.get(token) != ours[token]), None)
    if other is not None:
        found = "is unknown there" if other not in theirs else f"is {theirs[other]} there"
        said = f"its tokenizer is not that of --model: token {ours[other]}, {other!r}, {found}"
        raise BadInput(f"{flag} {model_path}: {said}")
    config = AutoConfig.from_pretrained(model_path)
    seen = next((prompt.ids for prompt in prompts if hasattr(prompt.ids, "images")), None)
    if seen and not image_tokens(config):
        raise BadInput(f"{flag} {model_path}: sees no images, and prompts have some")
    total_tokens(model_path, prompts, max_response_tokens, flag)
    try:
        check_heads(config, ranks, model_path)
        check_model(model_path, tokenizer, prompts)
        if seen:
            from common.data import images

            images.check_same(model_path, seen)
    except BadInput as error:
        raise BadInput(str(error).replace(f"--model {model_path}", f"{flag} {model_path}"), code=error.code) from None


def try_rewards(reward: Rewards, prompts: list[Prompt], tokenizer: PreTrainedTokenizerBase) -> None:
    """Call each function of a user with two responses to each of the first two prompts of each data set.

    The responses are the row's own solution or answer, and a wrong one. Raises BadInput if a call fails.
    """
    items, of_set = [], Counter()
    for prompt in prompts:
        of_set[prompt.dataset] += 1
        if of_set[prompt.dataset] > 2:
            continue
        solution = prompt.solution[-1] if isinstance(prompt.solution, list) else prompt.solution
        for response in (solution or prompt.answer or "", "I do not know."):
            ids = tokenizer.encode(response, add_special_tokens=False)
            items.append(Item(prompt.text, response, prompt.answer, prompt.meta, ids))
    for name, function in reward.rewards.items():
        if hasattr(function, "try_out"):
            grade(name, function.try_out, items, [len(item.response_ids) for item in items], [False] * len(items))


def check_weights(folder: str) -> None:
    """Compare the headers of a folder's weights with the model of its config.json. Raises BadInput naming tensors."""
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()  # transformers would print a table of what is said below
    logging.disable_progress_bar()
    try:
        _, found = causal_class(AutoConfig.from_pretrained(folder)).from_pretrained(
            folder, device_map="meta", output_loading_info=True, ignore_mismatched_sizes=True
        )
    except (OSError, SafetensorError) as error:
        raise BadInput(f"--model {folder}: its weights cannot be read, perhaps a copy was cut short: {error}") from None
    finally:
        logging.set_verbosity(verbosity)
    shapes = [f"{name} is {tuple(has)} and should be {tuple(wants)}" for name, has, wants in found["mismatched_keys"]]
    refuse_all(
        [f"--model {folder}: its weights have no {name}" for name in sorted(found["missing_keys"])]
        + [f"--model {folder}: config.json describes no {name}" for name in sorted(found["unexpected_keys"])]
        + [f"--model {folder}: {said}" for said in shapes]
    )


def heads_of(config) -> tuple[int, int]:
    """Numbers of query heads, and of key and value heads, in a layer."""
    config = config.get_text_config()
    return config.num_attention_heads, getattr(config, "num_key_value_heads", None) or config.num_attention_heads


def engine_heads_refusal(heads: tuple[int, int], ranks: int) -> str:
    """Why vLLM cannot deal these heads to so many ranks, or "". It repeats key and value heads that are too few."""
    queries, keys = heads
    if queries % ranks or (keys % ranks and ranks % keys):
        return f"--rollout-tp {ranks} does not divide the {queries} query heads and {keys} key and value heads"
    return ""


def check_engine_heads(model_path: str, ranks: int) -> None:
    """Refuse a model whose heads cannot be dealt to the ranks of an engine. Raises BadInput."""
    if refusal := engine_heads_refusal(heads_of(AutoConfig.from_pretrained(model_path)), ranks):
        raise BadInput(f"{refusal} of --model {model_path}")


def check_heads(config, ranks: int, model_path: str) -> None:
    """Refuse a model whose attention cannot be dealt to so many ranks. Raises BadInput."""
    queries, keys = heads_of(config)
    config = config.get_text_config()
    if ranks < 1 or queries % ranks or keys % ranks:
        raise BadInput(
            f"--sequence-parallel {ranks} does not divide the {queries} query heads and {keys} key and value heads of "
            f"--model {model_path}"
        )
    if ranks > 1 and (getattr(config, "rope_parameters", None) or {}).get("rope_type") in ("dynamic", "longrope"):
        raise BadInput(
            f"--sequence-parallel {ranks}: a slice does not see the longest position of its row, on which the "
            f"rotary frequencies of --model {model_path} depend"
        )
