"""What fits on which GPUs? The memory of a run in each layout, by the rules that a run applies to itself.

    python scripts/plan.py --model Qwen/Qwen2.5-7B-Instruct --gpus 8                 # every layout on 8 GPUs of 80 GB
    python scripts/plan.py --model Qwen/Qwen2.5-0.5B-Instruct --gpus 1 2 4 --memory 24e9
    python scripts/plan.py --model FOLDER --gpus 8 --lora-rank 32 --activation-checkpointing

Only the model's config.json is read: a folder with nothing else in it will do. No GPU is needed, and nothing here was
measured on one. common/preflight/memory.py has the rules.
"""

import dataclasses
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
import tyro
from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt
from transformers import AutoConfig

from common import errors
from common.errors import BadInput
from common.placement import Layout
from common.preflight import checks, ranges
from common.preflight.docstrings import help_text
from common.preflight.memory import GIB, MemoryPlan, count_parameters, text_config
from common.rollout.engines import MOST_SEQUENCES
from common.trainer.batching import SHARED_PROMPT_MIN_TOKENS, Compute


@dataclass(frozen=True)
class Args:
    model: str  # Folder or Hub name. Only config.json is read.
    gpus: tuple[PositiveInt, ...] = (8,)  # Numbers of GPUs.
    memory: PositiveFloat = 80e9  # Bytes of one GPU: A100 and H100 80e9, H200 141e9, B200 180e9.
    gpus_per_node: PositiveInt = 8  # An engine stays inside a node.
    # The work of one step, as in algos/.
    prompts_per_step: PositiveInt = 64
    group_size: PositiveInt = 8
    prompt_mean: Annotated[float, Field(ge=1)] = 200  # Tokens of a prompt on average.
    response_mean: Annotated[float, Field(ge=1)] = 400  # Tokens of a response on average.
    max_response_tokens: PositiveInt = 1024
    mini_batches: PositiveInt = 4
    # The run, as in algos/.
    reference: bool = False  # Whether a reference policy is loaded, as --kl-coef > 0 does.
    teacher: str = ""  # The model of opd's --teacher.
    lora_rank: NonNegativeInt = 0
    activation_checkpointing: bool = False
    token_budget: NonNegativeInt = 0  # Tokens of one forward; 0 takes as many as memory allows.
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    rollout_memory: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Share of a GPU's memory that an engine takes; 0 takes what it needs, or what is left."""

    @property
    def longest(self) -> float:
        """Tokens of the longest response and its prompt."""
        return self.prompt_mean + self.max_response_tokens

    def trained_tokens(self, prompts: float) -> float:
        """Tokens in the trainer's forward for these prompts and their responses."""
        # A short prompt is computed again for each response to it.
        copies = 1 if self.prompt_mean >= SHARED_PROMPT_MIN_TOKENS else self.group_size
        return prompts * (copies * self.prompt_mean + self.group_size * self.response_mean)


@dataclass(frozen=True)
class Row:
    """One layout and what it takes, in bytes of each GPU."""

    gpus: int
    rollout_tp: int
    token_budget: int = 0
    update: float = 0.0
    rollout: float = 0.0
    refusal: str = ""  # why it cannot run


def check_model(path: str, flag: str = "--model") -> None:
    """Raises BadInput for a model that is not there, or whose config.json has not the sizes of a decoder."""
    try:
        AutoConfig.from_pretrained(path)
        count_parameters(path)
        MemoryPlan(model=path, dtype=torch.bfloat16, size=1, memory=80e9, gpu=True).update(1)
    except (OSError, ValueError, AttributeError) as error:
        raise BadInput(f"{flag} {path}: {str(error).splitlines()[0]}") from error


def plan_of(args: Args, gpus: int, rollout_tp: int) -> MemoryPlan:
    """The memory of a rank in a colocated run on these GPUs."""
    return MemoryPlan(
        model=args.model,
        dtype=getattr(torch, args.dtype),
        size=gpus,
        compute=Compute(
            token_budget=args.token_budget,
            activation_checkpointing=args.activation_checkpointing,
            lora_rank=args.lora_rank,
        ),
        models=("policy", "reference") if args.reference else ("policy",),
        others={"teacher": args.teacher} if args.teacher else {},
        backend="vllm",
        rollout_tp=rollout_tp,
        layout=Layout(rollout_memory=args.rollout_memory),
        memory=args.memory,
        gpu=True,
    )


def row_of(args: Args, gpus: int, rollout_tp: int) -> Row:
    """What a layout takes, or why it cannot run."""
    plan = plan_of(args, gpus, rollout_tp)
    row = Row(gpus, rollout_tp)
    prompts = args.prompts_per_step / gpus / args.mini_batches  # of a rank, in one optimizer step
    if prompts % 1:
        return dataclasses.replace(
            row, refusal=f"{args.prompts_per_step} prompts is no multiple of {args.mini_batches} mini-batches x {gpus}"
        )
    budget = args.token_budget or plan.token_budget()
    # The longest row is a forward of its own if it is longer than the budget.
    forward = max(args.longest, min(budget, args.trained_tokens(prompts)))
    responses = args.prompts_per_step * args.group_size * rollout_tp / gpus
    share = args.rollout_memory or plan.engine_share(args.longest * min(responses, MOST_SEQUENCES))
    try:
        checks.check_engine_heads(args.model, rollout_tp)
        plan.check_update(forward)
        plan.check_engine(args.longest, share)
    except BadInput as error:
        return dataclasses.replace(row, refusal=str(error))
    return dataclasses.replace(
        row, token_budget=budget, update=plan.update(forward), rollout=share * args.memory + plan.states
    )


def main(args: Args) -> None:
    ranges.check(args)
    check_model(args.model)
    if args.teacher:
        check_model(args.teacher, "--teacher")
    if args.response_mean > args.max_response_tokens:
        raise BadInput(
            f"--response-mean {args.response_mean:g} is over --max-response-tokens {args.max_response_tokens}"
        )
    layers = text_config(args.model).num_hidden_layers
    usable = 0.9 * args.memory / GIB
    print(f"{count_parameters(args.model) / 1e9:.3g} B parameters in {layers} layers; of {args.memory / GIB:.0f} GiB")
    print(f"{usable:.0f} can be used. Computed, not measured.\n")
    print("| GPUs | rollout tp | tokens a forward | GiB in the update | GiB in the rollout | |")
    print("|---" * 6 + "|")
    for gpus in args.gpus:
        for tp in (1, 2, 4, 8):
            if gpus % tp or tp > args.gpus_per_node:
                continue
            row = row_of(args, gpus, tp)
            sizes = "- | - | -"
            if not row.refusal:
                sizes = f"{row.token_budget:,} | {row.update / GIB:.1f} | {row.rollout / GIB:.1f}"
            print(f"| {gpus} | {tp} | {sizes} | {row.refusal} |")


if __name__ == "__main__":
    errors.launch(main, tyro.cli(Args, description=help_text(__doc__)))
