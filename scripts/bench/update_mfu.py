"""The update: FLOP/s of its forwards and backwards, as a share of what one large matrix product reaches.

python scripts/bench/update_mfu.py
python scripts/bench/update_mfu.py --kernels eager compile
python scripts/bench/update_mfu.py --memory returned kept     # what placement.keep_memory is worth
python scripts/bench/update_mfu.py --size qwen2.5-0.5b --budgets 4096 --dtype bfloat16   # on a GPU

The model has random weights of a known architecture, prompts and responses have GSM8K's lengths, 8 responses a prompt.
FLOPs are 6 x parameters x tokens that were computed: a shared prompt counts once, attention's own products and logits
that are computed again do not count. The time includes the optimizer step. The peak is that of one large product in the
same precision, before and after each update, because a shared machine changes its speed. Figures are medians.
"""

import dataclasses
import math
import statistics
import tempfile
import time
from itertools import product
from typing import Literal

import torch
import tyro
from measure import return_memory
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config

from common import errors, placement
from common.preflight import precision
from common.rollout import rollout
from common.trainer import batching, model
from common.trainer.kernels import Kernels

SIZES = {
    "smollm2-135m": LlamaConfig(
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        vocab_size=49152,
        tie_word_embeddings=True,
        max_position_embeddings=8192,
    ),
    "qwen2.5-0.5b": Qwen2Config(
        hidden_size=896,
        intermediate_size=4864,
        num_hidden_layers=24,
        num_attention_heads=14,
        num_key_value_heads=2,
        vocab_size=151936,
        tie_word_embeddings=True,
        max_position_embeddings=32768,
    ),
    "qwen2.5-1.5b": Qwen2Config(
        hidden_size=1536,
        intermediate_size=8960,
        num_hidden_layers=28,
        num_attention_heads=12,
        num_key_value_heads=2,
        vocab_size=151936,
        tie_word_embeddings=True,
        max_position_embeddings=32768,
    ),
}


@dataclasses.dataclass
class Args:
    size: Literal["smollm2-135m", "qwen2.5-0.5b", "qwen2.5-1.5b"] = "smollm2-135m"
    prompts: int = 4
    budgets: tuple[int, ...] = (1024, 2048, 4096)
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    kernels: tuple[Kernels, ...] = ("eager",)
    memory: tuple[Literal["kept", "returned"], ...] = ("kept",)  # On a CPU: does freed memory stay?
    steps: int = 3  # Steps that are measured, after one of warm-up.


def random_rollout(prompts: int, vocabulary: int, device: torch.device) -> rollout.Rollout:
    """Prompts of 60 to 160 tokens, 8 responses of 60 to 192 tokens to each."""
    generator = torch.Generator().manual_seed(0)
    draw = lambda low, high: torch.randint(low, high, (), generator=generator).item()
    tokens = lambda count: torch.randint(0, vocabulary, (count,), generator=generator).tolist()
    asked = [tokens(draw(60, 161)) for _ in range(prompts)]
    responses = [tokens(draw(60, 193)) for _ in range(8 * prompts)]
    return rollout.collate(
        [ids for ids in asked for _ in range(8)], responses, None, [False] * len(responses), 0, device
    )


def peak(dtype: torch.dtype, device: torch.device) -> float:
    """FLOP/s of a large matrix product, the median of nine."""
    size = 8192 if device.type == "cuda" else 2048
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    return 2 * size**3 / statistics.median(seconds(lambda: a @ b, device) for _ in range(9))


def seconds(work, device: torch.device) -> float:
    began = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - began


def main(args: Args) -> None:
    world = placement.init(seed=0)
    config = SIZES[args.size]
    batch = random_rollout(args.prompts, config.vocab_size, world.device)
    rows = torch.arange(len(batch))
    with tempfile.TemporaryDirectory() as folder:
        with world.device:  # a CPU would take half a minute for the random numbers of a large model
            AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
        dtype = precision.choose(args.dtype, folder)
        policies = {kind: model.load(folder, world, dtype, batching.Compute(kernels=kind)) for kind in args.kernels}
    optimizers = {
        kind: torch.optim.AdamW(policy.parameters(), lr=1e-6, fused=True) for kind, policy in policies.items()
    }
    parameters = sum(parameter.numel() for parameter in policies[args.kernels[0]].parameters())

    def update(compute: batching.Compute) -> int:
        """One optimizer step over all rows. Returns the tokens computed."""
        policy, optimizer = policies[compute.kernels], optimizers[compute.kernels]
        micro_batches = batching.pack(batch, rows, compute, world)
        for micro in micro_batches:
            logprobs, _ = model.response_logprobs(policy, micro, 1.0)
            (logprobs * micro.response_mask).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        return sum(micro.input_ids.numel() for micro in micro_batches)

    # Only precisions that matter here: without bfloat16 units one bfloat16 product may take a minute.
    fastest = torch.bfloat16 if precision.has_bfloat16() else torch.float32
    peaks = {other: [] for other in dict.fromkeys((torch.float32, dtype, fastest))}
    cases = {case: [] for case in product(args.kernels, args.memory, (False, True), args.budgets)}
    for step in range(args.steps + 1):
        for (kind, memory, share, budget), results in cases.items():
            compute, tokens = batching.Compute(token_budget=budget, shared_prompts=share, kernels=kind), []
            if len(args.memory) > 1:
                {"kept": placement.keep_memory, "returned": return_memory}[memory]()
                update(compute)  # after a change the heap has to grow again
            before = peak(dtype, world.device)
            if world.device.type == "cuda":
                torch.cuda.reset_peak_memory_stats()
            spent = seconds(lambda compute=compute, tokens=tokens: tokens.append(update(compute)), world.device)
            around = (before + peak(dtype, world.device)) / 2
            if step:
                memory_used = torch.cuda.max_memory_allocated() if world.device.type == "cuda" else math.nan
                results.append((spent, tokens[0], 6 * parameters * tokens[0] / spent, around, memory_used))
        for other, values in peaks.items():
            values.append(peak(other, world.device))
    table = [
        "| layers | freed memory | prompts | token budget | tokens computed | s | GFLOP/s | tokens/s | GPU, GiB "
        "| product then | share |",
        "|---" * 11 + "|",
    ]
    for (kind, memory, share, budget), results in cases.items():
        spent, tokens, rate, around, used = (statistics.median(column) for column in zip(*results))
        ratio = statistics.median(result[2] / result[3] for result in results)
        name = "shared" if share else "repeated"
        gib = "" if math.isnan(used) else f"{used / 2**30:.1f}"
        figures = f"{tokens:.0f} | {spent:.2f} | {rate / 1e9:.0f} | {tokens / spent:.0f} | {gib} | {around / 1e9:.0f}"
        figures += f" | {ratio:.0%}"
        table.append(f"| {kind} | {memory} | {name} | {budget} | {figures} |")
    print(f"{args.size}, {parameters / 1e6:.0f} M parameters, {str(dtype).removeprefix('torch.')}")
    print("\n".join(table))
    print("matrix product:", ", ".join(f"{d} {statistics.median(v) / 1e9:.0f} GFLOP/s" for d, v in peaks.items()))
    placement.finish(world)


if __name__ == "__main__":
    errors.launch(main, tyro.cli(Args, description=__doc__))
