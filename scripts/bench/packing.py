"""What one sequence a row costs: the same update with packing on and off, and a hybrid that has to do without.

python scripts/bench/packing.py
python scripts/bench/packing.py --budgets 4096 --dtype bfloat16        # on a GPU
python scripts/bench/packing.py --beginning 200                        # all prompts with the same system prompt

Models have random weights. The Llama has SmolLM2-135M's sizes. The hybrid has the same width and depth, and Qwen3.5's
layers: three of gated DeltaNet, one of attention, and so on. Prompts and responses have GSM8K's lengths, 8 responses a
prompt. An update is forward, backward and optimizer step over all of them. The rows run in turns; figures are medians.
"""

import dataclasses
import statistics
import tempfile
from functools import partial
from itertools import product
from typing import Literal

import torch
import tyro
from pydantic import NonNegativeInt
from transformers import AutoModelForCausalLM, Qwen3_5TextConfig
from update_mfu import SIZES, random_rollout, seconds

from common import errors, placement
from common.preflight import precision
from common.trainer import batching, model

LLAMA = SIZES["smollm2-135m"]
HYBRID = Qwen3_5TextConfig(
    hidden_size=LLAMA.hidden_size,
    intermediate_size=LLAMA.intermediate_size,
    num_hidden_layers=28,  # every fourth one is attention
    num_attention_heads=LLAMA.num_attention_heads,
    num_key_value_heads=LLAMA.num_key_value_heads,
    head_dim=64,
    linear_num_key_heads=4,
    linear_num_value_heads=8,
    linear_key_head_dim=64,
    linear_value_head_dim=64,
    vocab_size=LLAMA.vocab_size,
    tie_word_embeddings=True,
)
ROWS = (("llama", LLAMA, "on", "shared"), ("llama", LLAMA, "on", "repeated"), ("llama", LLAMA, "off", "repeated"))
ROWS += (("hybrid", HYBRID, "off", "repeated"),)
BEGINNING_REPEATED = ("llama", LLAMA, "on", "shared, but each with the beginning")  # as if none were found


@dataclasses.dataclass
class Args:
    prompts: int = 4
    beginning: NonNegativeInt = 0  # Tokens before each prompt, the same for all. Then only this is measured.
    budgets: tuple[int, ...] = (4096,)
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    steps: int = 5  # Updates that are measured, after one of warm-up.


def main(args: Args) -> None:
    world = placement.init(seed=0)
    batch = random_rollout(args.prompts, LLAMA.vocab_size, world.device)
    system_prompt = torch.arange(args.beginning).tolist()
    batch.prompt_ids = [system_prompt + ids for ids in batch.prompt_ids]
    table = (ROWS[0], BEGINNING_REPEATED) if args.beginning else ROWS
    rows = torch.arange(len(batch))
    trained = sum(map(len, batch.response_ids))
    policies = {}
    for name, config, packing, _ in table:
        if (name, packing) not in policies:
            with tempfile.TemporaryDirectory() as folder:
                AutoModelForCausalLM.from_config(config).save_pretrained(folder)
                dtype = precision.choose(args.dtype, folder)
                policy = model.load(folder, world, dtype, batching.Compute(packing=packing))
            policies[name, packing] = policy, torch.optim.AdamW(policy.parameters(), lr=1e-6, fused=True)

    def packed(budget: int, packing: str, prompts: str) -> list[batching.MicroBatch]:
        compute = batching.Compute(token_budget=budget, shared_prompts=prompts != "repeated", packing=packing)
        beginning = None if prompts == "shared" else 0
        return batching.pack(batch, rows, compute, world, beginning=beginning)

    def update(policy, optimizer, *layout) -> None:
        """One optimizer step over all rows."""
        for micro in packed(*layout):
            logprobs, _ = model.response_logprobs(policy, micro, 1.0)
            (logprobs * micro.response_mask).mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    def tokens_of(policy, *layout) -> int:
        """The tokens that an update computes, padding included."""
        tokens = 0
        for micro in packed(*layout):
            longest = max(prompt + length for prompt, lengths in micro.group_lengths for length in lengths)
            tokens += micro.input_ids.numel() if policy.packed else len(micro.rows) * longest
        return tokens

    cases = list(product(table, args.budgets))
    results = {case: [] for case in range(len(cases))}  # (tokens, seconds) of each update
    for step in range(args.steps + 1):
        for case, ((name, _, packing, prompts), budget) in enumerate(cases):
            policy, optimizer = policies[name, packing]
            layout = (budget, packing, prompts)
            spent = seconds(partial(update, policy, optimizer, *layout), world.device)
            if step:
                results[case].append((tokens_of(policy, *layout), spent))
    print(f"{trained} response tokens in {len(batch)} rows, {str(dtype).removeprefix('torch.')}\n")
    print("| model | packing | prompts | token budget | tokens computed | s | times the first row |")
    print("|---" * 7 + "|")
    first = {}  # token budget -> seconds of the first row
    for case, ((name, _, packing, prompts), budget) in enumerate(cases):
        tokens, spent = (statistics.median(values) for values in zip(*results[case]))
        first.setdefault(budget, spent)
        figures = f"{tokens:,.0f} | {spent:.2f} | {spent / first[budget]:.2f}"
        print(f"| {name} | {packing} | {prompts} | {budget} | {figures} |")
    placement.finish(world)


if __name__ == "__main__":
    errors.launch(main, tyro.cli(Args, description=__doc__))
