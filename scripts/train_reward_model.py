"""Train a Bradley-Terry reward model on pairs of responses, for `--reward model:FOLDER`.

    L = - mean over pairs of log sigmoid(r(chosen) - r(rejected))

    python scripts/train_reward_model.py                              # right and wrong additions
    python scripts/train_reward_model.py --model Qwen/Qwen2.5-0.5B-Instruct --dataset pairs.jsonl --learning-rate 1e-5
    python algos/ppo.py --reward model:runs/reward-model              # trains a policy on its scores

A row of pairs.jsonl has "prompt" (a string or chat messages), "chosen" and "rejected", as algos/dpo.py reads them.
`--held-out` pairs, drawn by prompt, are not trained on. The accuracy that is printed is the share of held-out pairs in
which the chosen response scores higher.
The model has the policy's architecture, with a head of one output in place of the vocabulary. It is saved as a Hugging
Face sequence classifier.

Result: on the embedded task it ranks 97.7 % of the held-out pairs right (seed 0). `python algos/ppo.py --reward
model:runs/reward-model gsm8k=0 --kl-coef 0.02` then goes from 53.5 to 75.8 % greedy, and with the grader as the reward
PPO ends at 85.5 %.

A policy can game a model that ranks well. An earlier version had no pairs that answer another problem. PPO raised its
score from 2.3 to 5.1 and lost the task (52.7 to 0.4 % greedy), because it solved easier problems than the one in the
prompt. So watch eval/accuracy, and stop at its best.
"""

import dataclasses
import json
import random
import sys
from pathlib import Path
from typing import Literal

import torch
import torch.nn.functional as F
import tyro
from pydantic import NonNegativeInt, PositiveFloat, PositiveInt
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from tqdm import trange
from transformers import AutoModelForSequenceClassification

from common import errors, placement
from common.data import arithmetic, conversations, sources
from common.data.pairs import turns
from common.data.prompts import Prompt, Source, load
from common.data.responses import Responses
from common.data.rows import collect
from common.data.tokenizer import load_tokenizer, resolve_model
from common.preflight import checks, folders, machine, precision, ranges
from common.preflight.docstrings import help_text
from common.preflight.offline import check_output
from common.preflight.ranges import LearningRate, Seed
from common.rewards.model import conversation
from common.rollout import rollout
from common.trainer import batching, model


@dataclasses.dataclass
class Args:
    model: str = "embedded"  # Folder, Hub name or modelscope:OWNER/NAME. embedded: the warm-started arithmetic model.
    dataset: str = "arithmetic"  # A file pairs.jsonl or pairs.parquet, or arithmetic: pairs of the embedded task.
    max_tokens: NonNegativeInt = 0
    """Longest prompt and response together, in tokens. Longer pairs are left out. 0: the model's positions."""
    steps: PositiveInt = 800  # Optimizer steps.
    batch_size: PositiveInt = 64  # Pairs per optimizer step, all ranks together.
    pairs_per_forward: PositiveInt = 64  # Pairs per forward on each rank. It never changes the gradient.
    learning_rate: LearningRate = 1e-3  # Peak learning rate. The default suits the embedded model; 1e-5 a real one.
    warmup_steps: NonNegativeInt = 20  # Steps until the learning rate reaches its peak.
    max_grad_norm: PositiveFloat = 1.0  # The gradient is scaled down to this norm.
    held_out: PositiveInt = 256
    """Pairs that are measured at the end. None of their prompts is trained on, so there may be a few more of them."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"  # Data type of the forward and backward.
    activation_checkpointing: bool = False  # Compute activations a second time in the backward, to save memory.
    seed: Seed = 0  # Seed of the order of the pairs.
    output: str = "runs/reward-model"  # Folder that the reward model is written to.


def pair_loss(chosen: torch.Tensor, rejected: torch.Tensor, denominator: float) -> torch.Tensor:
    """Scalar: - sum log sigmoid(chosen - rejected) / denominator. Scores are (n,); denominator: pairs of all ranks."""
    return -F.logsigmoid(chosen - rejected).sum() / denominator


def load_pairs(dataset: str, tokenizer) -> list[dict]:
    """Rows with "prompt", "chosen" and "rejected", from a file as algos/dpo.py reads it. Raises BadInput that names the
    bad lines.

    A response is a text here, without the end of a turn: conversation() writes it. Pairs of equal responses are left
    out and counted.
    """
    if dataset == "arithmetic":
        return arithmetic_pairs()
    # Lengths are those of whole conversations: that_fit().
    prompts = load((dataset,), Source(), "train", tokenizer, max_prompt_tokens=sys.maxsize)
    columns = sources.columns(dataset, ())
    encoder = Responses(tokenizer)

    def check(where: str, prompt: Prompt) -> dict:
        # A reward model is asked about texts alone.
        for name, given in (("tools", prompt.tools), ("images", getattr(prompt.ids, "images", None))):
            if given:
                raise errors.BadInput(f'{where}: a reward model is not shown "{name}"; leave out the column')
        row = {"prompt": prompt.meta["prompt"]}
        for key, turn in zip(("chosen", "rejected"), turns(where, prompt, columns)):
            if not isinstance(turn, str):
                said = next(name for name in conversations.SPOKEN_KEYS if turn.get(name))
                raise errors.BadInput(f'{where}: "{key}" has "{said}", and a reward model reads a text')
            row[key] = encoder.without_end(turn)
            if not row[key]:
                raise errors.BadInput(f'{where}: "{key}" must be a non-empty text')
        return row

    rows = collect([(prompt.id, prompt) for prompt in prompts], check)
    pairs = [row for row in rows if row["chosen"] != row["rejected"]]
    if not pairs:
        raise errors.BadInput(f"--dataset {dataset}: all {len(rows)} pairs have two equal responses")
    if len(pairs) < len(rows):
        errors.say(f"left out {len(rows) - len(pairs)} of {len(rows)} pairs with two equal responses")
    return pairs


def that_fit(pairs: list[dict], tokenizer, limit: int) -> list[dict]:
    """The pairs whose two conversations have at most `limit` tokens each. A printed line counts the others.

    A conversation that is cut would be scored at a place where it has not ended. Raises BadInput if no pair is left.
    """
    fitting = []
    for pair in pairs:
        sides = (conversation(tokenizer, pair["prompt"], pair[side], ended=True) for side in ("chosen", "rejected"))
        if max(map(len, sides)) <= limit:
            fitting.append(pair)
    if not fitting:
        raise errors.BadInput(f"all {len(pairs)} pairs have more than {limit} tokens with their prompt")
    if len(fitting) < len(pairs):
        errors.say(f"left out {len(pairs) - len(fitting)} of {len(pairs)} pairs with more than {limit} tokens")
    return fitting


def arithmetic_pairs() -> list[dict[str, str]]:
    """Four rows for each training problem of the embedded task: the right solution against four wrong ones.

    The wrong ones are: a carry that was forgotten, or added where there is none; a wrong digit in the answer; the right
    solution of another problem, without which a policy soon learns to answer the easiest problem it knows; and a wrong
    digit in the working.
    """
    draw, rows = random.Random(1), []
    for row in arithmetic.problems("train"):
        a, b = map(int, row["question"].rstrip("=").split("+"))
        right = arithmetic.solution(a, b)
        working, answer = right.split("\n#### ")
        with_carry = a % 10 + b % 10 >= 10
        wrong_tens = a // 10 + b // 10 + (0 if with_carry else 1)
        wrong_carry = f"{working.rpartition('=')[0].removesuffix('+1')}{'' if with_carry else '+1'}={wrong_tens}"
        wrong = [
            f"{wrong_carry}\n#### {10 * wrong_tens + (a + b) % 10}",
            f"{working}\n#### {change_digit(answer, draw)}",
            arithmetic.solution(*map(int, change_digit(f"{a},{b}", draw).split(","))),
            f"{change_digit(working, draw)}\n#### {change_digit(answer, draw) if draw.random() < 0.5 else answer}",
        ]
        rows += [{"prompt": row["question"], "chosen": right, "rejected": other} for other in wrong]
    return rows


def change_digit(text: str, draw: random.Random) -> str:
    """The text with one of its digits replaced by another digit."""
    place = draw.choice([i for i, character in enumerate(text) if character.isdigit()])
    return text[:place] + draw.choice([d for d in "0123456789" if d != text[place]]) + text[place + 1 :]


def split(pairs: list[dict], count: int, seed: int) -> tuple[list[dict], list[dict]]:
    """(pairs to train on, held-out pairs). Whole prompts are held out, until `count` pairs are.

    Pairs of one prompt often share a response. Trained on one of them, a model would know the others.
    """
    by_prompt: dict[str, list[dict]] = {}
    for pair in pairs:
        by_prompt.setdefault(json.dumps(pair["prompt"]), []).append(pair)
    prompts = list(by_prompt)
    random.Random(seed).shuffle(prompts)
    train, held_out = [], []
    for prompt in prompts:
        side = held_out if len(held_out) < count else train
        side += by_prompt[prompt]
    return train, held_out


def main(args: Args) -> None:
    ranges.check(args)
    size = machine.check_world(rollout_tp=1)
    if args.batch_size % size:
        raise errors.BadInput(f"--batch-size {args.batch_size} is not a multiple of the {size} ranks")
    if args.model == "embedded":
        args.model = arithmetic.warm_start()
    args.model = resolve_model(args.model)
    check_output(args.output, args.model, adapts=False)
    tokenizer, _ = load_tokenizer(args.model)
    pairs = load_pairs(args.dataset, tokenizer)
    # scores() adds a token to each conversation, which needs a position, too.
    positions = checks.positions_of(args.model) - 1
    pairs = that_fit(pairs, tokenizer, min(args.max_tokens or positions, positions))
    train, held_out = split(pairs, args.held_out, args.seed)
    if len(train) < args.batch_size:
        raise errors.BadInput(
            f"--held-out {args.held_out} of {len(pairs)} pairs leaves fewer than one --batch-size {args.batch_size}: "
            f"{len(train)}, as whole prompts are held out"
        )
    world, dtype = placement.init(args.seed), precision.choose(args.dtype, args.model)
    compute = batching.Compute(activation_checkpointing=args.activation_checkpointing)
    reward_model = model.load(args.model, world, dtype, compute, value_head=True)
    optimizer = torch.optim.AdamW(reward_model.parameters(), lr=args.learning_rate, betas=(0.9, 0.95), fused=True)

    def scores(pairs: list[dict]) -> tuple[torch.Tensor, torch.Tensor]:
        """Scores of the chosen (n,) and of the rejected responses (n,). Collective: n is the same on every rank."""
        sides = [
            conversation(tokenizer, pair["prompt"], pair[side], ended=True)
            for side in ("chosen", "rejected")
            for pair in pairs
        ]
        # A value belongs to the position before a response token. So each conversation gets a response of one token,
        # and the value of that token is the score after the whole conversation.
        responses = [[tokenizer.eos_token_id]] * len(sides)
        rows = rollout.collate(sides, responses, None, [False] * len(sides), 0, world.device)
        packed = batching.pack_groups(rows, [[i] for i in range(len(sides))])
        values = model.response_values(reward_model, packed)  # (2 n, 1)
        return values.squeeze(1).chunk(2)

    draw = random.Random(args.seed)  # draws the same pairs on every rank
    progress = trange(args.steps, desc="reward model", disable=not world.is_main, dynamic_ncols=True)
    for step in progress:
        own_pairs = draw.sample(train, args.batch_size)[world.rank :: world.size]
        total, right = 0.0, 0
        for first in range(0, len(own_pairs), args.pairs_per_forward):
            chosen, rejected = scores(own_pairs[first : first + args.pairs_per_forward])
            loss = pair_loss(chosen, rejected, args.batch_size)
            loss.backward()  # FSDP sums the gradients over the ranks (model.load)
            total, right = total + loss.item(), right + (chosen > rejected).sum().item()
        grad_norm = torch.nn.utils.clip_grad_norm_(reward_model.parameters(), args.max_grad_norm).full_tensor()
        if not torch.isfinite(grad_norm):  # equal on all ranks; the update would write NaN into the weights
            raise errors.RunFailed(f"step {step + 1}: the gradient's norm is {grad_norm:g}", code="non-finite")
        for group in optimizer.param_groups:
            group["lr"] = args.learning_rate * min(1 - step / args.steps, (step + 1) / max(1, args.warmup_steps))
        optimizer.step()
        optimizer.zero_grad()
        progress.set_postfix(loss=f"{world.sum(total):.3f}", accuracy=f"{world.sum(right) / args.batch_size:.3f}")

    right, margin = 0, 0.0
    with torch.no_grad():  # every rank scores all held-out pairs, so that all make the same number of forwards
        for first in range(0, len(held_out), args.pairs_per_forward):
            chosen, rejected = scores(held_out[first : first + args.pairs_per_forward])
            right, margin = right + (chosen > rejected).sum().item(), margin + (chosen - rejected).sum().item()
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    state = get_model_state_dict(reward_model, options=options)
    if world.is_main:
        state.pop("score.bias")  # it is still zero, because it cancels in every difference of scores
        classifier = AutoModelForSequenceClassification.from_config(reward_model.config, dtype=torch.float32)
        classifier.load_state_dict(state)
        with folders.written_whole(Path(args.output)) as unfinished:
            classifier.to(dtype).save_pretrained(unfinished)
            tokenizer.save_pretrained(unfinished)
        figures = {"accuracy": right / len(held_out), "margin": margin / len(held_out), "held_out": len(held_out)}
        print(json.dumps({"output": args.output, **figures}))
    placement.finish(world)


if __name__ == "__main__":
    errors.launch(main, tyro.cli(Args, description=help_text(__doc__)))
