"""A Bradley-Terry reward model from pairs of responses, for `--reward model:FOLDER`.

    L = - mean over pairs of log sigmoid(r(chosen) - r(rejected))

python scripts/train_reward_model.py                                  # embedded: right additions against wrong ones
python scripts/train_reward_model.py --model Qwen/Qwen2.5-0.5B-Instruct --dataset pairs.jsonl --learning-rate 1e-5
python algos/ppo.py --reward model:runs/reward-model                  # what it is for

A row of pairs.jsonl has "prompt" (a string or chat messages), "chosen" and "rejected". The last --held-out pairs are
not trained on; the accuracy printed is the share of them ranked right. The model is the policy's architecture with a
head of one output in place of the vocabulary, saved as a Hugging Face sequence classifier.

What is ranked right on held-out pairs may still be gamed. Trained without pairs that answer another problem, this
ranked 97.7 % right; PPO then raised its score from 2.3 to 5.1 and lost the task, 52.7 to 0.4 % greedy: it solved
easier problems than the one asked. With them (embedded.pairs), 89.1 % are ranked right, and
`python algos/ppo.py --reward model:runs/reward-model --kl-coef 0.02` goes from 52.7 to 64.5 % greedy in 30 steps, then
back to 56.3 % at 50: the score is no longer the task. Watch eval/accuracy, and stop at its best.
"""

import dataclasses
import json
import random
from pathlib import Path

import torch
import torch.nn.functional as F
import tyro
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from tqdm import trange
from transformers import AutoModelForSequenceClassification

from common import batching, data, embedded, errors, model, placement, roles, rollout, sources
from common.reward_model import conversation


@dataclasses.dataclass
class Args:
    model: str = "embedded"  # folder or Hub name; "embedded": the warm-started arithmetic model
    dataset: str = "arithmetic"  # arithmetic | pairs.jsonl
    steps: int = 800
    batch_size: int = 64  # pairs per optimizer step, all ranks together
    pairs_per_forward: int = 64  # per rank; memory only, never the gradient
    learning_rate: float = 1e-3  # for the embedded model; 1e-5 is usual for a pretrained one
    warmup_steps: int = 20
    max_grad_norm: float = 1.0
    held_out: int = 256
    dtype: str = "auto"  # auto | float32 | bfloat16
    activation_checkpointing: bool = False
    seed: int = 0
    trust_pickle: bool = False  # read weights that are a pickle: it may run code of who wrote it
    output: str = "runs/reward-model"


def pair_loss(chosen: torch.Tensor, rejected: torch.Tensor, denominator: float) -> torch.Tensor:
    """Scalar: - sum of log sigmoid(chosen - rejected), both (n,), over `denominator` (pairs of the whole batch)."""
    return -F.logsigmoid(chosen - rejected).sum() / denominator


def load_pairs(dataset: str) -> list[dict]:
    """Rows with "prompt", "chosen" and "rejected". Raises BadInput, naming lines."""
    if dataset == "arithmetic":
        return embedded.pairs()
    rows, bad = sources.read_jsonl(Path(dataset)), []
    for where, row in rows:
        missing = [key for key in ("prompt", "chosen", "rejected") if not row.get(key)]
        if missing:
            bad.append(f'{where}: missing key "{missing[0]}" (found: {", ".join(row) or "nothing"})')
    errors.refuse_all(bad)
    return [row for _, row in rows]


def main(args: Args) -> None:
    size = roles.check_world(rollout_tp=1)
    if args.batch_size % size or min(args.batch_size, args.steps, args.pairs_per_forward, args.held_out) < 1:
        raise errors.BadInput(f"--batch-size {args.batch_size} must be a multiple of the {size} ranks, the rest >= 1")
    pairs = load_pairs(args.dataset)
    if len(pairs) - args.held_out < args.batch_size:
        raise errors.BadInput(
            f"--held-out {args.held_out} of {len(pairs)} pairs leaves fewer than one --batch-size {args.batch_size}"
        )
    if args.model == "embedded":
        args.model = embedded.warm_start()
    tokenizer, _ = data.load_tokenizer(args.model, args.trust_pickle)
    random.Random(args.seed).shuffle(pairs)
    world, dtype = placement.init(args.seed), placement.compute_dtype(args.dtype, args.model)
    compute = batching.Compute(activation_checkpointing=args.activation_checkpointing)
    reward_model = model.load(args.model, world, dtype, compute, value_head=True)
    optimizer = torch.optim.AdamW(reward_model.parameters(), lr=args.learning_rate, betas=(0.9, 0.95), fused=True)

    def scores(pairs: list[dict]) -> tuple[torch.Tensor, torch.Tensor]:
        """Chosen (n,), rejected (n,). Collective: every rank gives as many pairs."""
        sides = [
            conversation(tokenizer, pair["prompt"], pair[side], ended=True)
            for side in ("chosen", "rejected")
            for pair in pairs
        ]
        # One more token each: the value before it is the value after the conversation's last.
        rows = rollout.collate(
            sides, [[tokenizer.eos_token_id]] * len(sides), None, [False] * len(sides), 0, world.device
        )
        values = model.response_values(
            reward_model, batching.pack_groups(rows, [[i] for i in range(len(sides))])
        )  # (2 n, 1)
        return values.squeeze(1).chunk(2)

    train, held_out = pairs[: len(pairs) - args.held_out], pairs[len(pairs) - args.held_out :]
    draw = random.Random(args.seed)  # the same on every rank
    progress = trange(args.steps, desc="reward model", disable=not world.is_main, dynamic_ncols=True)
    for step in progress:
        mine = draw.sample(train, args.batch_size)[world.rank :: world.size]
        total, right = 0.0, 0
        for first in range(0, len(mine), args.pairs_per_forward):
            chosen, rejected = scores(mine[first : first + args.pairs_per_forward])
            loss = pair_loss(chosen, rejected, len(mine) * world.size)
            (loss * world.size).backward()  # FSDP averages over ranks; the sum is wanted
            total, right = total + loss.item(), right + (chosen > rejected).sum().item()
        torch.nn.utils.clip_grad_norm_(reward_model.parameters(), args.max_grad_norm)
        for group in optimizer.param_groups:
            group["lr"] = args.learning_rate * min(1 - step / args.steps, (step + 1) / max(1, args.warmup_steps))
        optimizer.step()
        optimizer.zero_grad()
        progress.set_postfix(
            loss=f"{world.sum(total):.3f}", accuracy=f"{world.sum(right) / len(mine) / world.size:.3f}"
        )

    right, margin = 0, 0.0
    with torch.no_grad():  # every rank scores all of them: the same number of forwards
        for first in range(0, len(held_out), args.pairs_per_forward):
            chosen, rejected = scores(held_out[first : first + args.pairs_per_forward])
            right, margin = right + (chosen > rejected).sum().item(), margin + (chosen - rejected).sum().item()
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    state = get_model_state_dict(reward_model, options=options)
    if world.is_main:
        state.pop("score.bias")  # zero still: it cancels in every difference
        classifier = AutoModelForSequenceClassification.from_config(reward_model.config, dtype=torch.float32)
        classifier.load_state_dict(state)
        classifier.to(dtype).save_pretrained(args.output)
        tokenizer.save_pretrained(args.output)
        figures = {"accuracy": right / len(held_out), "margin": margin / len(held_out), "held_out": len(held_out)}
        print(json.dumps({"output": args.output, **figures}))
    placement.finish(world)


if __name__ == "__main__":
    errors.launch(main, tyro.cli(Args, description=__doc__))
