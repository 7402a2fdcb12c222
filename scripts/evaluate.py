"""Measure the accuracy of a model or a checkpoint: greedy, sampled, and pass@k.

    python scripts/evaluate.py --model runs/grpo/checkpoints/step_000045/model
    python scripts/evaluate.py --model HuggingFaceTB/SmolLM2-135M-Instruct --dataset gsm8k --max-response-tokens 256
    torchrun --nproc-per-node 8 scripts/evaluate.py --model MODEL      (each rank takes its share of the prompts)

Rejection sampling: keep the right responses to training problems, and train on them.

    python scripts/evaluate.py --model MODEL --dataset sums --split train --n 4 --save-right right.jsonl
    python algos/sft.py --model MODEL --dataset right.jsonl --learning-rate 2e-5

Pairs for algos/dpo.py: a right and a wrong response to each training problem that has both.

    python scripts/evaluate.py --model MODEL --dataset sums --split train --n 8 --save-pairs pairs.jsonl

pass@k is the unbiased estimate of Chen et al. 2021 (arXiv:2107.03374, eq. 1) from n samples with c correct:
1 - C(n - c, k) / C(n, k). The script prints one JSON object: "greedy" and "sampled" are accuracies, "greedy_reward" and
"sampled_reward" mean scores, which say more with a reward model. Quote the reward (the grader) with the number.
"""

import base64
import dataclasses
import json
import math
from pathlib import Path
from typing import Annotated, Any, Literal

import torch.distributed as dist
import tyro
from pydantic import NonNegativeInt, PositiveInt

from common import errors, placement, rewards
from common.data.prompts import INSTRUCTIONS, Prompt, Source, load
from common.data.sources import kind
from common.data.tokenizer import load_tokenizer, resolve_model
from common.preflight import checks, machine, precision, ranges
from common.preflight.ranges import Seed, Temperature
from common.rollout import engines
from common.rollout.environments import episodes
from common.run import evaluation
from common.run.tracking import Metrics
from common.trainer.batching import Compute


@dataclasses.dataclass
class Args:
    model: str  # Folder, Hub name or modelscope:OWNER/NAME.
    dataset: tuple[str, ...] = ("arithmetic",)  # Data sets: arithmetic, gsm8k, math, FILE, OWNER/NAME, ...
    source: Annotated[Source, tyro.conf.OmitArgPrefixes] = Source()
    split: str = "test"  # Split of the data set: test or train.
    environment: str = ""  # Answers the policy between its turns: calculator, guess, FILE.py:CLASS or openenv:URL.
    reward: tuple[str, ...] = ()
    """Graders: gsm8k, math, FILE.py:FUNCTION, ... The first one decides. Default: the environment's or gsm8k."""
    prompts: NonNegativeInt = 0  # Number of prompts. 0: all.
    n: NonNegativeInt = 0  # Sampled responses per prompt. 0: greedy decoding only.
    temperature: Temperature = 1.0  # Temperature of the sampled responses.
    max_prompt_tokens: PositiveInt = 512  # Longest prompt in tokens. Longer ones are dropped.
    max_response_tokens: PositiveInt = 48  # Longest response in tokens.
    rollout_backend: Literal["vllm", "hf"] = "vllm"  # Engine that generates the responses.
    rollout_tp: PositiveInt = 1  # Ranks that hold one engine together (tensor parallelism).
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"  # Data type of the engine.
    seed: Seed = 0  # Seed of the sampled responses.
    save_right: str = ""  # JSON lines file for the right ones of the sampled responses, as --dataset of algos/sft.py.
    save_pairs: str = ""  # JSON lines file for a right and a wrong response to each problem, for algos/dpo.py.


def pass_at_k(n: int, correct: int, k: int) -> float:
    """Probability that k of n responses, drawn without replacement, contain one of the `correct` correct ones."""
    return 1.0 - math.comb(n - correct, k) / math.comb(n, k)


Graded = list[tuple[str, float]]  # responses to a prompt, and whether each is right


def question(prompt: Prompt, template: str = "") -> dict[str, Any]:
    """The part of a row of data that all responses to the prompt share. template: --template, which goes without the
    instruction of gsm8k and math.
    """
    content = prompt.meta["prompt"]
    if isinstance(content, str) and not template:
        content += INSTRUCTIONS.get(kind(prompt.dataset), "")
    row = {"prompt": content} | ({} if prompt.answer is None else {"answer": prompt.answer})
    if hasattr(prompt.ids, "images"):
        row["images"] = [f"data:image;base64,{base64.b64encode(image).decode()}" for image in prompt.ids.images]
    return row


def ended(responses: evaluation.Graded) -> Graded:
    """The responses that were not cut off: with an end token after it, half a sentence would teach something else.

    The engine knows. The text doesn't: it can have other tokens than the ones that were sampled.
    """
    return [(response.text, response.acc) for response in responses if not response.truncated]


def right(prompt: Prompt, graded: Graded, template: str = "") -> list[dict[str, Any]]:
    """Rows for algos/sft.py: each right response as a solution."""
    return [{**question(prompt, template), "solution": text} for text, acc in graded if acc > 0]


def pair(prompt: Prompt, graded: Graded, template: str = "") -> list[dict[str, Any]]:
    """A row for algos/dpo.py: the first right response and the first wrong one, if there are both."""
    good, bad = ([text for text, acc in graded if (acc > 0) == wanted] for wanted in (True, False))
    return [{**question(prompt, template), "chosen": good[0], "rejected": bad[0]}] if good and bad else []


def save(file: str, own_rows: list[dict[str, str]], world: placement.World) -> int:
    """Write the rows of all ranks as JSON lines, and return their number. Collective: every rank calls it."""
    everyone: list = [None] * world.size
    dist.all_gather_object(everyone, own_rows)
    lines = [json.dumps(row) + "\n" for rows in everyone for row in rows]
    if world.is_main:
        Path(file).write_text("".join(lines))
    return len(lines)


def main(args: Args) -> None:
    ranges.check(args)
    size = machine.check_world(args.rollout_tp)
    if (args.save_right or args.save_pairs) and not args.n:
        raise errors.BadInput("--save-right and --save-pairs keep sampled responses: give --n as well")
    for file in filter(None, (args.save_right, args.save_pairs)):
        if not Path(file).parent.is_dir():  # A run would find out after it has sampled everything.
            raise errors.BadInput(f"{file}: there is no folder {Path(file).parent}")
    args.model = resolve_model(args.model)
    tokenizer, stop_token_ids = load_tokenizer(args.model)
    args.reward = args.reward or (("environment",) if args.environment else ("gsm8k",))
    reward, source = rewards.load(args.reward), args.source
    if args.environment and (args.save_right or args.save_pairs):
        raise errors.BadInput("--save-right and --save-pairs: they keep one text, and episodes have several turns")
    if args.environment:
        source = episodes.attach(args.environment, reward, source, tokenizer, stop_token_ids)
    prompts = load(args.dataset, source, args.split, tokenizer, args.max_prompt_tokens)
    prompts = prompts[: args.prompts or None]
    checks.check_held_out(prompts, size)
    reward.check_answers(prompts)
    checks.try_rewards(reward, prompts, tokenizer)
    if reward.environment:
        reward.environment.try_out(prompts[0])
    checks.check_model(args.model, tokenizer, prompts, quantized=args.rollout_backend == "vllm")
    engines.check_family(args.rollout_backend, args.model)
    checks.check_engine_heads(args.model, args.rollout_tp)
    checks.check_images(prompts, Compute(), args.environment)
    max_model_len = checks.total_tokens(args.model, prompts, args.max_response_tokens, trains=False)

    world, dtype = placement.init(args.seed, args.rollout_tp), precision.choose(args.dtype, args.model)
    engine = engines.start(
        args.rollout_backend,
        args.model,
        stop_token_ids,
        world,
        dtype,
        max_model_len=max_model_len,
        sequences=256,
        layout=placement.Layout(rollout_memory=0.9),
    )
    result = {"model": args.model, "dataset": args.dataset, "reward": args.reward, "prompts": len(prompts)}

    evaluator = evaluation.Evaluator(engine, reward, tokenizer, world, args.max_response_tokens)
    greedy, sampled = Metrics(world), Metrics(world)
    result["greedy"] = evaluator.greedy_accuracy(prompts, greedy)
    if args.n:
        graded = evaluator.evaluate(prompts, args.n, args.temperature, args.seed, sampled)
        correct = [int(sum(response.acc for response in row)) for _, row in graded]  # for each prompt of this rank
        for k in [2**i for i in range(args.n.bit_length()) if 2**i <= args.n]:
            name = "sampled" if k == 1 else f"pass@{k}"
            result[name] = world.sum(sum(pass_at_k(args.n, c, k) for c in correct)) / world.sum(len(correct))
        whole = [(prompt, ended(given)) for prompt, given in graded]
        for kept, file, rows_of in (("saved", args.save_right, right), ("pairs", args.save_pairs, pair)):
            if file:
                rows = [row for given in whole for row in rows_of(*given, args.source.template)]
                result[kept] = save(file, rows, world)
    for how, metrics in (("greedy_", greedy), ("sampled_", sampled)):
        for name, ((total, count),) in metrics.sums.items():  # eval/reward, the mean score, and eval/turns
            result[name.replace("eval/", how)] = world.sum(total) / world.sum(count)
    if world.is_main:
        print(json.dumps(result))
    placement.finish(world, engine)


if __name__ == "__main__":
    errors.launch(main, tyro.cli(Args, description=__doc__))
