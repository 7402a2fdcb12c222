"""--dry-run: what a run would do, in a table, from its flags, its data and the model's config. Loads no weights.

Who runs where stands above it: common/roles.py.
"""

import dataclasses
from pathlib import Path

import torch
from transformers import AutoConfig

from common import folders
from common.data import Prompt
from common.errors import say
from common.placement import compute_dtype
from common.roles import parameters


def show(args, size: int, prompts: list[Prompt], held_out: list[Prompt], resume: Path | None) -> None:
    """Print the plan of a checked run on `size` ranks, which would go on with the checkpoint `resume`, if any."""
    flags = dataclasses.asdict(args)
    rows = [*the_model(flags, size), *the_data(flags, prompts, held_out), *the_steps(flags, size, len(prompts), resume)]
    width = max(len(name) for name, _ in rows)
    say("\n".join(f"{name:<{width}}  {what}" for name, what in rows))


def the_model(flags: dict, size: int) -> list[tuple[str, str]]:
    config = AutoConfig.from_pretrained(flags["model"])
    count = parameters(flags["model"])
    dtype = compute_dtype(flags["dtype"], flags["model"])
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    each = folders.size((12 + dtype.itemsize) * count)
    every = flags["saving"]["save_every"]
    return [
        ("model", f"{flags['model']}: {config.model_type}, {count / 1e6:,.1f} M parameters, {dtype}"),
        ("ranks", f"{size} on {device}"),
        ("checkpoints", f"{f'every {every} steps' if every else 'at the end'}, each {each} or more"),
    ]


def the_data(flags: dict, prompts: list[Prompt], held_out: list[Prompt]) -> list[tuple[str, str]]:
    longest = max(len(prompt.ids) for prompt in prompts + held_out)
    first = " ".join(prompts[0].text.split())
    return [
        ("prompts", f"{len(prompts):,} to train on, {len(held_out):,} held out; up to {longest} tokens"),
        ("the first", first[:100] + ("..." if len(first) > 100 else "")),
        ("rewards", " ".join(flags["reward"])),
    ]


def the_steps(flags: dict, size: int, count: int, resume: Path | None) -> list[tuple[str, str]]:
    drawn, group = flags["prompts_per_step"], flags["group_size"]
    responses, updates = drawn * group, flags["mini_batches"] * flags.get("epochs", 1)
    budget = flags["compute"]["token_budget"]
    step = f"{drawn} prompts x {group} = {responses} responses of up to {flags['max_response_tokens']} tokens"
    if "gen_prompts" in flags:
        drawn = flags["gen_prompts"] or drawn
        step += f", from {drawn} to {drawn * flags['max_gen_batches']} prompts drawn"
    passes = flags["steps"] * drawn / count
    return [
        ("a step", f"{step}; {responses // size} a rank"),
        ("its updates", f"{updates} of {responses // flags['mini_batches']} responses, {budget} tokens a forward"),
        ("steps", f"{flags['steps']}: {passes:.2g} passes over the prompts{' or more' * ('gen_prompts' in flags)}"),
        ("starts", f"from {resume}" if resume else "anew"),
        ("run directory", flags["run_dir"] or "runs/NAME-DATE-TIME"),
    ]
