"""DPO -- Direct Preference Optimization (arXiv:2305.18290, eq. 7), on pairs of responses of which one is preferred.

    r(y)  = beta (log pi(y | x) - log ref(y | x))                       log-probs are sums over the response's tokens
    L     = - 1/P sum [ (1 - eps) log sigma(r(y_w) - r(y_l)) + eps log sigma(r(y_l) - r(y_w)) ]   over a step's P pairs

y_w is the chosen response to prompt x, and y_l the rejected one. r is the reward for which pi would be the optimum with
a KL penalty of weight beta. L is the negative log-likelihood of the preferences under it (Bradley-Terry), so no reward
model is trained. eps is the share of pairs that we assume to be labelled the wrong way round (label_smoothing; the
authors' note on conservative DPO). A rank has B of the P pairs. n is the number of pairs in a micro-batch, each of
which is two rows, and T the length of the longest response in tokens.

ref is the policy before its first update. It computes the log-probs of all pairs of the run once, at the start, so that
no second model is held. Nothing is sampled: scripts/evaluate.py measures the model before and after.

Differs from sft.py: two responses to each prompt, whose log-probs are summed; the reference; the loss.

Run:    python algos/dpo.py                                             (pairs of the embedded task, on two cores)
        torchrun --nproc-per-node 8 algos/dpo.py --model Qwen/Qwen2.5-0.5B-Instruct        (UltraFeedback)
Result: embedded arithmetic, greedy, mean of three seeds: 79.2 % from 53.5 %. On GPUs: not yet run.
"""

import dataclasses
from pathlib import Path
from typing import Annotated, Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
import tyro
from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from common import errors, placement
from common.data import arithmetic, preview
from common.data.pairs import Pairs, load_pairs
from common.data.prompts import PromptLoader, Source
from common.data.tokenizer import load_tokenizer, resolve_model
from common.preflight import checks, flags, folders, machine, ranges, run_directory
from common.preflight.offline import settle
from common.rollout import rollout
from common.run import checkpoint, guards, job, offline
from common.trainer import batching, model


@dataclasses.dataclass
class Args:
    # model and data
    model: str = "embedded"  # Folder or Hub name. "embedded" is the small arithmetic model that is committed here.
    dataset: tuple[str, ...] = ("trl-lib/ultrafeedback_binarized",)  # Pairs: FILE or OWNER/NAME, rows as in pairs.py.
    source: Annotated[Source, tyro.conf.OmitArgPrefixes] = Source()
    max_prompt_tokens: PositiveInt = 512  # Longest prompt in tokens. Longer ones are dropped.
    max_response_tokens: PositiveInt = 1024  # Pairs with a longer response are dropped.

    # algorithm
    beta: PositiveFloat = 0.1  # Weight of the KL penalty; the smaller it is, the further the policy may go.
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = 0.0
    """eps: the share of pairs that are assumed to be labelled the wrong way round."""

    # optimization
    steps: PositiveInt = 900  # Optimizer steps.
    batch_size: PositiveInt = 64  # Pairs per optimizer step, all ranks together.
    learning_rate: ranges.LearningRate = 5e-7  # Peak learning rate.
    warmup_steps: NonNegativeInt = 20  # Steps until the learning rate reaches its peak.
    weight_decay: NonNegativeFloat = 0.0  # Weight decay of AdamW.
    max_grad_norm: PositiveFloat = 1.0  # The gradient is scaled down to this norm.
    compute: Annotated[batching.Compute, tyro.conf.OmitArgPrefixes] = batching.Compute()
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"  # Data type of the forward and backward.

    # bookkeeping
    seed: ranges.Seed = 0  # Seed of the order of the data, and of new adapters.
    output: str = "runs/dpo"  # Folder for the trained model in Hugging Face format, or with --lora-rank for adapters.
    run_dir: str = ""  # Folder for metrics, checkpoints and the report. Default: runs/dpo-DATE-TIME.
    saving: Annotated[flags.Saving, tyro.conf.OmitArgPrefixes] = flags.Saving()
    track: Literal["none", "wandb", "tensorboard", "mlflow", "trackio", "swanlab"] = "none"
    """Tracker for metrics, in addition to metrics.jsonl. It stays offline unless its own variables say otherwise."""


# The defaults without --model: pairs of a right and a wrong sum, both sampled by the model that is trained.
EMBEDDED = {
    "dataset": (str(arithmetic.PAIRS),),
    "max_prompt_tokens": 64,
    "max_response_tokens": 48,
    "beta": 2.0,
    "steps": 60,
    "learning_rate": 2e-4,
    "warmup_steps": 2,
}


def implicit_rewards(logprobs, ref_logprobs, response_mask, beta: float) -> torch.Tensor:
    """(n, 2): r of each pair's chosen and rejected response, whose rows alternate in logprobs and mask (2n, T).

    ref_logprobs: (n, 2), sums over each response.
    """
    return beta * (torch.where(response_mask.bool(), logprobs, 0.0).sum(1).view(-1, 2) - ref_logprobs)


def dpo_loss(rewards: torch.Tensor, label_smoothing: float) -> torch.Tensor:
    """(n, 2) -> (n,): the loss of each pair, ln 2 where both rewards are equal."""
    margin = rewards[:, 0] - rewards[:, 1]
    return -(1 - label_smoothing) * F.logsigmoid(margin) - label_smoothing * F.logsigmoid(-margin)


def collate(prompts: list, pairs: Pairs, world: placement.World) -> rollout.Rollout:
    """B prompts -> (2B, T): the chosen and the rejected response to each of them, alternating."""
    prompt_ids = [prompt.ids for prompt in prompts for _ in range(2)]
    responses = [ids for prompt in prompts for ids in pairs[prompt.key]]
    return rollout.collate(
        prompt_ids, responses, logprobs=None, truncated=[False] * len(responses), weight_version=0, device=world.device
    )


def reference_logprobs(
    policy, prompts: list, needed: set[tuple], pairs: Pairs, batch_size: int, compute, world
) -> dict[tuple, list]:
    """Key of each prompt -> sums of its two responses' log-probs, by the policy as it is. Collective: every rank.

    Batches without a key in `needed` are left out. The others are the same whatever is needed, because other
    neighbours in a batch would change the rounding.
    """
    sums_of_this_rank = {}
    for first in range(0, len(prompts), batch_size):
        # The last batch starts over with the first prompts, so that all ranks get equally many.
        taken = [prompts[i % len(prompts)] for i in range(first, first + batch_size)]
        if not any(prompt.key in needed for prompt in taken):
            continue
        mine = taken[world.rank :: world.size]
        batch = collate(mine, pairs, world)
        micro_batches = batching.pack(batch, torch.arange(len(batch)), compute, world, unit_size=2)
        logprobs = model.frozen_logprobs(policy, batch, micro_batches, temperature=1.0)  # (2B, T)
        sums = logprobs.sum(1).view(-1, 2)  # (B, 2)
        for prompt, sums_of_pair in zip(mine, sums.tolist()):
            sums_of_this_rank[prompt.key] = sums_of_pair
    sums_of_ranks = [None] * world.size
    dist.all_gather_object(sums_of_ranks, sums_of_this_rank)
    return {key: pair for sums in sums_of_ranks for key, pair in sums.items()}


def main(args: Args) -> None:
    ranges.check(args)
    size = machine.check_world(rollout_tp=1, sharding=args.compute)
    if args.batch_size % size:
        raise errors.BadInput(f"--batch-size {args.batch_size} is not a multiple of the {size} ranks")
    model_path = arithmetic.warm_start() if args.model == "embedded" else resolve_model(args.model)
    date = run_directory.date_of(args.run_dir, args.saving.resume)  # which some chat templates print
    tokenizer, _ = load_tokenizer(model_path, date=date)
    prompts, pairs = load_pairs(args.dataset, args.source, tokenizer, args.max_prompt_tokens, args.max_response_tokens)
    checks.total_tokens(model_path, prompts, args.max_response_tokens)
    longest = max(len(prompt.ids) + max(map(len, pairs[prompt.key])) for prompt in prompts)
    longest_pair = max(len(prompt.ids) + sum(map(len, pairs[prompt.key])) for prompt in prompts)  # one forward
    checks.check_model(model_path, tokenizer, prompts)
    checks.check_images(prompts, args.compute)
    settings = settle(args, model_path, prompts, size, longest, longest_pair)
    if args.saving.dry_run:
        errors.say(f"dry run: flags and data are in order, {len(prompts)} pairs")
        preview.show_pairs(prompts, pairs, tokenizer)
    if job.nothing_to_do(settings):  # a dry run, or a run whose last step is done
        return
    world = placement.init(args.seed, sharding=settings.compute)
    policy = model.load(settings.model, world, settings.dtype, settings.compute)
    optimizer = torch.optim.AdamW(
        policy.parameters(), lr=args.learning_rate, betas=(0.9, 0.95), weight_decay=args.weight_decay, fused=True
    )
    # A second loader lists the pairs that the whole run draws. A resumed run begins where its checkpoint says, and only
    # the pairs of its remaining steps need a reference.
    position = steps_done = 0
    if settings.resume:
        saved = folders.state(settings.resume)
        position, steps_done = saved.position, saved.step
    drawn = PromptLoader(prompts, args.seed).take(position + (args.steps - steps_done) * args.batch_size)
    needed = {prompt.key for prompt in drawn[position:]}
    drawn = list({prompt.key: prompt for prompt in drawn}.values())  # each once, though there may be several epochs
    # The reference is the policy before offline.Run, below, loads a checkpoint into it.
    reference = reference_logprobs(policy, drawn, needed, pairs, args.batch_size, settings.compute, world)
    # also: a resumed run must find the same responses, not only the same prompts
    loader = PromptLoader(prompts, args.seed, also=[pairs[prompt.key] for prompt in prompts])
    run = offline.Run(settings, {"policy": (policy, optimizer)}, loader, tokenizer, world)
    tracker = run.tracker
    for step in run.steps():
        own_prompts = loader.take(args.batch_size)[world.rank :: world.size]
        batch = collate(own_prompts, pairs, world)
        ref_logprobs = torch.tensor([reference[prompt.key] for prompt in own_prompts], device=world.device)  # (B, 2)

        micro_batches = batching.pack(batch, torch.arange(len(batch)), settings.compute, world, unit_size=2)
        for micro in micro_batches:
            logprobs, _ = model.response_logprobs(policy, micro, temperature=1.0, with_entropy=False)  # (2n, T)
            rewards = implicit_rewards(
                logprobs=logprobs,
                ref_logprobs=ref_logprobs[micro.rows[::2] // 2],  # rows 2k and 2k + 1 are pair k
                response_mask=micro.response_mask,
                beta=args.beta,
            )  # (n, 2)
            real = micro.response_mask.any(1)[::2]  # (n,) False in a dummy, which only keeps the ranks in step
            loss = (dpo_loss(rewards=rewards, label_smoothing=args.label_smoothing) * real).sum() / args.batch_size
            loss.backward()  # gradients add up over micro-batches and, in the last one, over the ranks
            tracker.loss("train/loss", loss, micro)
            chosen, rejected = rewards.detach().unbind(1)  # (n,) each
            tracker.mean("reward/chosen", (chosen * real).sum(), real.sum())
            tracker.mean("reward/rejected", (rejected * real).sum(), real.sum())
            tracker.mean("reward/accuracy", ((chosen > rejected) * real).sum(), real.sum())
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


if __name__ == "__main__":
    flags.launch(main, Args, EMBEDDED, __doc__)
