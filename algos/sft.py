"""SFT -- supervised fine-tuning on worked solutions, which gives reinforcement learning its warm start.

    L = - sum_i sum_t m_it log p(y_it | x_i, y_i,<t) / sum_it m_it        sums over the batch of all ranks

m_it is 1 on the tokens that the policy is to write. Prompts carry no loss, and neither do the turns of a tool or a user
in a solution. Without --model this trains the embedded arithmetic model from random weights, in about a minute on two
cores. Its solutions forget carries on purpose (common/data/arithmetic.py), which leaves something for reinforcement
learning to do.

Run:    python algos/sft.py
        torchrun --nproc-per-node 8 algos/sft.py --model Qwen/Qwen2.5-0.5B                          (GSM8K)
Result: embedded model, seed 0: 53.5 % greedy accuracy on 256 held-out problems (CPU, float32).
"""

import dataclasses
import shutil
from pathlib import Path
from typing import Annotated, Literal

import torch
import tyro
from pydantic import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from common import errors, placement
from common.data import arithmetic, preview
from common.data.demonstrations import demonstrations, that_fit
from common.data.prompts import PromptLoader, Source, load
from common.data.tokenizer import load_tokenizer, resolve_model
from common.preflight import checks, flags, machine, ranges, run_directory
from common.preflight.offline import settle
from common.rollout import rollout
from common.run import checkpoint, guards, job, offline
from common.trainer import batching, model


@dataclasses.dataclass
class Args:
    # model and data
    model: str = ""  # Folder, Hub name or modelscope:OWNER/NAME. Default: an embedded model with random weights.
    dataset: tuple[str, ...] = ("gsm8k",)  # Data with solutions: arithmetic, gsm8k, math, FILE, OWNER/NAME, ...
    source: Annotated[Source, tyro.conf.OmitArgPrefixes] = Source()
    max_prompt_tokens: PositiveInt = 512  # Longest prompt in tokens. Longer ones are dropped.
    max_tokens: PositiveInt = 4096  # Longest prompt and solution together, in tokens. Longer rows are left out.

    # optimization
    steps: PositiveInt = 260  # Optimizer steps.
    batch_size: PositiveInt = 64  # Sequences per optimizer step, all ranks together.
    learning_rate: ranges.LearningRate = 1e-5  # Peak learning rate.
    warmup_steps: NonNegativeInt = 20  # Steps until the learning rate reaches its peak.
    weight_decay: NonNegativeFloat = 0.0  # Weight decay of AdamW.
    max_grad_norm: PositiveFloat = 1.0  # The gradient is scaled down to this norm.
    compute: Annotated[batching.Compute, tyro.conf.OmitArgPrefixes] = batching.Compute()
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"  # Data type of the forward and backward.

    # bookkeeping
    seed: ranges.Seed = 0  # Seed of initial weights and of the order of the data.
    output: str = "runs/sft"  # Folder for the trained model in Hugging Face format, or with --lora-rank for adapters.
    run_dir: str = ""  # Folder for metrics, checkpoints and the report. Default: runs/sft-DATE-TIME.
    saving: Annotated[flags.Saving, tyro.conf.OmitArgPrefixes] = flags.Saving()
    track: Literal["none", "wandb", "tensorboard", "mlflow", "trackio", "swanlab"] = "none"
    """Tracker for metrics, in addition to metrics.jsonl. It stays offline unless its own variables say otherwise."""


# The defaults without --model: the embedded model, from random weights.
EMBEDDED = {"dataset": ("arithmetic",), "learning_rate": 2e-3}


def sft_loss(logprobs: torch.Tensor, response_mask: torch.Tensor, denominator: float) -> torch.Tensor:
    """Scalar: - sum_it m_it log p_it / denominator. logprobs and mask are (n, T); denominator: tokens of all ranks."""
    return -torch.where(response_mask.bool(), logprobs, 0.0).sum() / denominator


def main(args: Args) -> None:
    ranges.check(args)
    size = machine.check_world(rollout_tp=1, sharding=args.compute)
    if args.batch_size % size:
        raise errors.BadInput(f"--batch-size {args.batch_size} is not a multiple of the {size} ranks")
    if args.compute.lora_rank and not args.model:
        raise errors.BadInput("--lora-rank: needs a --model, because adapters to random weights learn little")
    if args.model:
        model_path = resolve_model(args.model)
        date = run_directory.date_of(args.run_dir, args.saving.resume)  # which some chat templates print
        tokenizer, _ = load_tokenizer(model_path, date=date)
    else:
        model_path = str(arithmetic.WARM_START)  # the new model has the sizes of this one
        tokenizer = arithmetic.tokenizer()
    prompts = load(args.dataset, args.source, "train", tokenizer, args.max_prompt_tokens)
    unsolved = next((prompt.id for prompt in prompts if not prompt.solution), None)
    if unsolved:
        raise errors.BadInput(f'{unsolved}: no "solution", "response" or "completion" to learn from')
    positions = checks.positions_of(model_path)
    prompts, longest = that_fit(prompts, tokenizer, min(args.max_tokens, positions))
    if args.model:
        checks.check_model(model_path, tokenizer, prompts)
    checks.check_images(prompts, args.compute)
    settings = settle(args, model_path, prompts, size, longest)
    if args.saving.dry_run:
        errors.say(f"dry run: flags and data are in order, {len(prompts)} solutions")
        preview.show_solutions(prompts, tokenizer)
    if job.nothing_to_do(settings):  # a dry run, or a run whose last step is done
        return
    world = placement.init(args.seed, sharding=settings.compute)
    start = settings.model
    if not args.model:
        # Random weights go beside --output, which keeps an older model until the new one is trained.
        start = arithmetic.new_model(Path(f"{Path(args.output)}.start"), args.seed, world)
    policy = model.load(start, world, settings.dtype, settings.compute)
    optimizer = torch.optim.AdamW(
        policy.parameters(), lr=args.learning_rate, betas=(0.9, 0.95), weight_decay=args.weight_decay, fused=True
    )
    # also: a resumed run must find the same solutions, not only the same prompts
    loader = PromptLoader(prompts, args.seed, also=[prompt.solution for prompt in prompts])
    run = offline.Run(settings, {"policy": (policy, optimizer)}, loader, tokenizer, world)
    tracker = run.tracker
    for step in run.steps():
        own_prompts = loader.take(args.batch_size)[world.rank :: world.size]
        prompt_ids = [prompt.ids for prompt in own_prompts]
        solutions, by_policy = demonstrations(own_prompts, tokenizer)  # by_policy: False on turns of a tool or user
        batch = rollout.collate(
            prompt_ids,
            solutions,
            logprobs=None,
            truncated=[False] * len(solutions),
            weight_version=0,
            device=world.device,
            sampled=by_policy,
        )
        denominator = world.sum(batch.response_mask.sum())  # tokens that have a loss, in the batch of all ranks

        micro_batches = batching.pack(batch, torch.arange(len(batch)), settings.compute, world)
        for micro in micro_batches:
            logprobs, _ = model.response_logprobs(policy, micro, temperature=1.0, with_entropy=False)  # (n, T)
            loss = sft_loss(logprobs, micro.response_mask, denominator)
            loss.backward()  # gradients add up over micro-batches and, in the last one, over the ranks
            tracker.loss("train/loss", loss, micro)
        grad_norm = torch.nn.utils.clip_grad_norm_(policy.parameters(), args.max_grad_norm).full_tensor()
        guards.stop_unless_finite(tracker, "train/grad_norm", grad_norm)  # before NaN reaches the weights
        tracker.mean("train/grad_norm", grad_norm)
        for group in optimizer.param_groups:
            group["lr"] = args.learning_rate * min(1.0, step / max(1, args.warmup_steps))
        optimizer.step()
        optimizer.zero_grad()
        if step == args.steps:
            # Before the checkpoint: a run that has the last one is done.
            checkpoint.export(policy, tokenizer, Path(args.output), settings.dtype, world)
        run.end_step(step)
    run.close()
    if not args.model and world.is_main:
        shutil.rmtree(start)  # the random weights


if __name__ == "__main__":
    flags.launch(main, Args, EMBEDDED, __doc__)
