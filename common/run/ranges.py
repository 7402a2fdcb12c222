"""The range of every numeric flag. A number outside it is refused before anything is loaded.

An interval is written as in mathematics: "(0, 1]" excludes 0 and includes 1. A flag that is not listed, as a fork may
add one, must be finite.
"""

import dataclasses
import re
from collections.abc import Iterator

from common.errors import BadInput

RANGES = {
    # sampling
    "steps": "[1, inf)",
    "prompts_per_step": "[1, inf)",
    "group_size": "[1, inf)",
    "gen_prompts": "[0, inf)",
    "max_gen_batches": "[1, inf)",
    "max_prompt_tokens": "[1, inf)",
    "max_tokens": "[1, inf)",
    "max_response_tokens": "[1, inf)",
    "temperature": "[0.01, inf)",  # vLLM samples at 0.01 where less is asked
    "overlong_cache": "[0, inf)",
    "accuracy_range": "[0, 1]",
    # loss
    "clip": "(0, 1)",
    "clip_low": "(0, 1]",
    "clip_high": "(0, inf)",
    "clip_dual": "(1, inf)",
    "value_clip": "(0, inf)",
    "tis_cap": "[0, inf)",
    "kl_coef": "[0, inf)",
    "lam": "[0, 1]",
    "beta": "(0, inf)",
    "c_process": "[0, inf)",
    "label_smoothing": "[0, 0.5)",
    # optimization
    "mini_batches": "[1, inf)",
    "epochs": "[1, inf)",
    "batch_size": "[1, inf)",
    "learning_rate": "[0, 1)",
    "critic_learning_rate": "[0, 1)",
    "prm_learning_rate": "[0, 1)",
    "warmup_steps": "[0, inf)",
    "critic_warmup_steps": "[0, inf)",
    "weight_decay": "[0, inf)",
    "max_grad_norm": "(0, inf)",
    # computing
    "rollout_tp": "[1, inf)",
    "rollout_memory": "[0, 1]",
    "max_inflight_batches": "[1, 2]",
    "sequence_parallel": "[1, inf)",
    "shard_size": "[0, inf)",
    "token_budget": "[0, inf)",
    "lora_rank": "[0, inf)",
    # bookkeeping
    "seed": "[0, 1000000000]",  # the engine's seeds are seed x 2^20 + step, in 64 bits
    "eval_prompts": "[0, inf)",
    "eval_every": "[0, inf)",
    "save_every": "[0, inf)",
    "keep_checkpoints": "[0, inf)",
    "rollouts_every": "[1, inf)",
    "max_logprob_gap": "[0, inf)",
    # scripts
    "n": "[0, inf)",
    "prompts": "[0, inf)",
    "pairs_per_forward": "[1, inf)",
    "held_out": "[1, inf)",
}


def check(args) -> None:
    """Refuse the first flag whose number is outside its range. args: a dataclass, perhaps of dataclasses.

    Raises BadInput.
    """
    for name, number in numbers(args):
        interval = RANGES.get(name, "(-inf, inf)")
        if not inside(number, interval):
            raise BadInput(f"--{name.replace('_', '-')} {number}: must be a number in {interval}")


def numbers(args) -> Iterator[tuple[str, float]]:
    """(name, value) of each number in a dataclass, its dataclasses and its tuples."""
    for field in dataclasses.fields(args):
        value = getattr(args, field.name)
        if dataclasses.is_dataclass(value):
            yield from numbers(value)
        for number in value if isinstance(value, tuple) else (value,):
            if isinstance(number, (int, float)) and not isinstance(number, bool):
                yield field.name, number


def inside(number: float, interval: str) -> bool:
    """Whether an interval like "[0, 1)" holds the number. No interval holds NaN."""
    opening, low, high, closing = re.fullmatch(r"([\[(])(\S+), (\S+)([\])])", interval).groups()
    low, high = float(low), float(high)
    return (low < number or (opening == "[" and low == number)) and (
        number < high or (closing == "]" and number == high)
    )
