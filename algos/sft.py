"""SFT -- supervised fine-tuning on worked solutions: the warm start that reinforcement learning begins from.

    L = - sum_i sum_t m_it log p(y_it | x_i, y_i,<t) / sum_it m_it        over all response tokens of the mini-batch

Response tokens alone carry loss, prompts none. Without --model this trains the embedded arithmetic model from
random weights, a minute on two cores. Its teacher forgets carries on purpose (common/embedded.py): the warm start
must leave something for reinforcement learning to do.

Run:    python algos/sft.py
        torchrun --nproc-per-node 8 algos/sft.py --model Qwen/Qwen2.5-0.5B --dataset gsm8k --learning-rate 1e-5
Result: embedded model, seed 0: 52.7 % greedy accuracy on 256 held-out problems (CPU, float32).
"""

import dataclasses
from pathlib import Path
from typing import Annotated, Literal

import torch
import tyro
from tqdm import trange

from common import batching, checkpoint, data, embedded, errors, model, placement, roles, rollout


@dataclasses.dataclass
class Args:
    # what
    model: str = ""  # folder or Hub name; empty: a new embedded model
    dataset: tuple[str, ...] = ("arithmetic",)  # arithmetic | gsm8k | FILE | owner/name | ..., with solutions
    source: Annotated[data.Source, tyro.conf.OmitArgPrefixes] = data.Source()  # columns, template, hub
    max_prompt_tokens: int = 512
    # optimization
    steps: int = 260
    batch_size: int = 64  # sequences per optimizer step, all ranks together
    learning_rate: float = 2e-3  # for the embedded model; 1e-5 is usual for a pretrained one
    warmup_steps: int = 20
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    compute: Annotated[batching.Compute, tyro.conf.OmitArgPrefixes] = batching.Compute()  # token budget, ...
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"  # of computing; master weights are float32
    # bookkeeping
    seed: int = 0
    trust_pickle: bool = False  # read weights that are a pickle: it may run code of who wrote it
    output: str = "runs/sft"  # the trained model, as a Hugging Face folder


def sft_loss(logprobs: torch.Tensor, response_mask: torch.Tensor, denominator: float) -> torch.Tensor:
    """Scalar: - sum of the response tokens' log-probs (n, T) / denominator (tokens of the whole mini-batch)."""
    return -torch.where(response_mask, logprobs, 0.0).sum() / denominator


def main(args: Args) -> None:
    size = roles.check_world(1, sharding=args.compute)
    if args.batch_size % size:
        raise errors.BadInput(f"--batch-size {args.batch_size} is not a multiple of the {size} ranks")
    if args.model:
        args.model = data.resolve_model(args.model, args.source.hub)
        tokenizer, _ = data.load_tokenizer(args.model, args.trust_pickle)
    else:
        tokenizer = embedded.tokenizer()
    prompts = data.load(args.dataset, args.source, "train", tokenizer, args.max_prompt_tokens)
    unsolved = next((prompt.id for prompt in prompts if not prompt.solution), None)
    if unsolved:
        raise errors.BadInput(f'{unsolved}: no "solution" or "response" to learn from')
    world = placement.init(args.seed, sharding=args.compute)
    start = args.model or embedded.new_model(Path(args.output), args.seed, world)
    dtype = placement.compute_dtype(args.dtype, start)
    args.compute = batching.plan(args.compute, start, dtype)
    policy = model.load(start, world, dtype, args.compute)
    optimizer = torch.optim.AdamW(
        policy.parameters(), lr=args.learning_rate, betas=(0.9, 0.95), weight_decay=args.weight_decay, fused=True
    )
    loader = data.PromptLoader(prompts, args.seed)
    progress = trange(args.steps, desc="sft", disable=not world.is_main, dynamic_ncols=True)
    for step in progress:
        mine = loader.take(args.batch_size)[world.rank :: world.size]
        end = [tokenizer.eos_token_id]
        solutions = [tokenizer(p.solution, add_special_tokens=False)["input_ids"] + end for p in mine]
        batch = rollout.collate([p.ids for p in mine], solutions, None, [False] * len(mine), 0, world.device)
        tokens = world.sum(batch.response_mask.sum())  # all ranks, the whole mini-batch

        total = 0.0
        micro_batches = batching.pack(batch, torch.arange(len(batch)), args.compute, world)
        for micro in micro_batches:
            model.accumulate(policy, last=micro is micro_batches[-1])
            logprobs, _ = model.response_logprobs(policy, micro, temperature=1.0)  # (n, T)
            loss = sft_loss(logprobs, micro.response_mask, tokens)
            (loss * world.size).backward()  # FSDP averages over ranks; the sum is wanted
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(policy.parameters(), args.max_grad_norm)
        for group in optimizer.param_groups:
            group["lr"] = args.learning_rate * min(1.0, (step + 1) / max(1, args.warmup_steps))
        optimizer.step()
        optimizer.zero_grad()
        progress.set_postfix(loss=f"{world.sum(total):.3f}")
    checkpoint.export(policy, tokenizer, Path(args.output), dtype, world)
    placement.finish(world)


if __name__ == "__main__":
    errors.launch(main, tyro.cli(Args))
