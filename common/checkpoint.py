"""Checkpoints: the trainer's state by torch DCP, and the policy as a Hugging Face folder.

checkpoints/step_000010/model/      config, tokenizer, safetensors: AutoModelForCausalLM and vLLM load it
checkpoints/step_000010/trainer/    float32 masters and optimizer state, sharded
checkpoints/step_000010/state.json  step and place in the data; written last: without it, it is not complete
"""

import json
import shutil
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from transformers import PreTrainedTokenizerBase

from common.data import PromptLoader
from common.placement import World

Trained = dict[str, tuple[nn.Module, torch.optim.Optimizer]]  # "policy", and what is trained beside it


def export(
    policy: nn.Module, tokenizer: PreTrainedTokenizerBase, folder: Path, dtype: torch.dtype, world: World
) -> None:
    """Write the policy as a Hugging Face folder in `dtype`. Collective: every rank calls it; rank 0 writes."""
    state = get_model_state_dict(policy, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if world.is_main:
        if policy.config.tie_word_embeddings:
            state.pop("lm_head.weight", None)  # a second name for the embedding
        state = {name: tensor.to(dtype) for name, tensor in state.items()}
        policy.config.dtype = dtype
        policy.save_pretrained(folder, state_dict=state)
        tokenizer.save_pretrained(folder)
    dist.barrier()


def save(
    run_dir: Path,
    step: int,
    trained: Trained,
    loader: PromptLoader,
    tokenizer: PreTrainedTokenizerBase,
    dtype: torch.dtype,
    world: World,
) -> Path:
    """Write checkpoints/step_NNNNNN under a temporary name and rename it when complete. Collective.

    Of the trained models, "policy" is exported for Hugging Face and vLLM, too.
    """
    folder = run_dir / "checkpoints" / f"step_{step:06d}"
    unfinished = folder.with_suffix(".unfinished")
    if world.is_main:
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
    dist.barrier()
    new = fresh(trained)
    dcp.save(states(trained, new), checkpoint_id=unfinished / "trainer")
    export(trained["policy"][0], tokenizer, unfinished / "model", dtype, world)
    if world.is_main:
        state = {"step": step, "position": loader.position, "fresh": new}
        (unfinished / "state.json").write_text(json.dumps(state) + "\n")
        shutil.rmtree(folder, ignore_errors=True)
        unfinished.rename(folder)
    dist.barrier()
    return folder


def load(folder: Path | None, trained: Trained, loader: PromptLoader) -> int:
    """Restore the trained models and the place in the data; returns the steps done, 0 without a folder. Collective."""
    if folder is None:
        return 0
    saved = json.loads((folder / "state.json").read_text())
    state = states(trained, saved["fresh"])
    dcp.load(state, checkpoint_id=folder / "trainer")
    for name, (model, optimizer) in trained.items():
        if name in saved["fresh"]:
            set_model_state_dict(model, state[name]["model"])
        else:
            loaded = state[name]
            set_state_dict(model, optimizer, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"])
    loader.position = saved["position"]
    return saved["step"]


def fresh(trained: Trained) -> list[str]:
    """Names of those whose optimizer has not stepped yet: PPO's policy while the critic warms up."""
    return [name for name, (_, optimizer) in trained.items() if not optimizer.state]


def states(trained: Trained, fresh: list[str]) -> dict:
    """name -> {"model", "optimizer"}, sharded; of a fresh one the model alone. Collective.

    Asked for the state of an optimizer without one, torch makes it step on zeros: its next step would be its second.
    """
    out = {}
    for name, (model, optimizer) in trained.items():
        if name in fresh:
            out[name] = {"model": get_model_state_dict(model)}
        else:
            out[name] = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer)))
    return out
