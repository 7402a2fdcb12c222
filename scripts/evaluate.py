"""Accuracy of a model or checkpoint: greedy, sampled, and pass@k.

    python scripts/evaluate.py --model runs/grpo/checkpoints/step_000045/model
    python scripts/evaluate.py --model HuggingFaceTB/SmolLM2-135M-Instruct --dataset gsm8k --max-response-tokens 256
    torchrun --nproc-per-node 8 scripts/evaluate.py --model MODEL      (each rank takes its share of the prompts)

pass@k is the unbiased estimate of Chen et al. 2021 (arXiv:2107.03374, eq. 1) from n samples with c correct:
1 - C(n - c, k) / C(n, k). Prints one JSON object; quote the reward (the grader) beside the number.
"""

import dataclasses
import json
import math
from typing import Annotated

import tyro

from common import data, engines, errors, evaluation, placement, rewards, roles


@dataclasses.dataclass
class Args:
    model: str  # folder or Hub name
    dataset: tuple[str, ...] = ("arithmetic",)  # arithmetic | gsm8k | math | FILE | owner/name | ...
    source: Annotated[data.Source, tyro.conf.OmitArgPrefixes] = data.Source()  # columns, template, hub
    split: str = "test"
    reward: tuple[str, ...] = ("gsm8k",)  # gsm8k | math | file.py:function | ...; the first one's acc counts
    prompts: int = 0  # how many; 0: all
    n: int = 0  # sampled responses per prompt; 0: greedy only
    temperature: float = 1.0
    max_prompt_tokens: int = 512
    max_response_tokens: int = 48
    rollout_backend: str = "vllm"  # vllm | hf
    rollout_tp: int = 1
    dtype: str = "auto"  # auto | float32 | bfloat16
    seed: int = 0
    trust_pickle: bool = False  # read weights that are a pickle: it may run code of who wrote it


def pass_at_k(n: int, correct: int, k: int) -> float:
    """Probability that k of n responses, drawn without replacement, hold a correct one."""
    return 1.0 - math.comb(n - correct, k) / math.comb(n, k)


def main(args: Args) -> None:
    roles.check_world(args.rollout_tp)
    if args.n < 0 or args.temperature <= 0:
        raise errors.BadInput(f"--n {args.n} must be >= 0 and --temperature {args.temperature} > 0")
    args.model = data.resolve_model(args.model, args.source.hub)
    tokenizer, stop_token_ids = data.load_tokenizer(args.model, args.trust_pickle)
    reward = rewards.load(args.reward, trust_pickle=args.trust_pickle)
    prompts = data.load(args.dataset, args.source, args.split, tokenizer, args.max_prompt_tokens)
    prompts = prompts[: args.prompts or None]
    reward.check_answers(prompts)
    max_model_len = data.total_tokens(args.model, prompts, args.max_response_tokens)

    world, dtype = placement.init(args.seed, args.rollout_tp), placement.compute_dtype(args.dtype, args.model)
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
    result["greedy"] = evaluation.greedy_accuracy(engine, prompts, reward, tokenizer, world, args.max_response_tokens)
    if args.n:
        rows = evaluation.evaluate(
            engine, prompts, reward, tokenizer, world, args.max_response_tokens, args.n, args.temperature, args.seed
        )
        correct = [int(sum(row)) for row in rows]  # this rank's prompts
        for k in [2**i for i in range(args.n.bit_length()) if 2**i <= args.n]:
            name = "sampled" if k == 1 else f"pass@{k}"
            result[name] = world.sum(sum(pass_at_k(args.n, c, k) for c in correct)) / world.sum(len(correct))
    if world.is_main:
        print(json.dumps(result))
    placement.finish(world, engine)


if __name__ == "__main__":
    errors.launch(main, tyro.cli(Args, description=__doc__))
