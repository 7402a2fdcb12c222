"""Weight sync from trainer to engine: seconds of a push and the extra memory it takes, for models of several sizes.

python scripts/bench/sync.py

The models have random weights, float32 masters and tied embeddings. Each runs in a process of its own.
One copy of all weights in memory is the least that a push can take. Extra memory is the peak of resident memory (on a
GPU, of allocated memory) during a push, minus what was there before. Times are medians of five.
"""

import statistics
import tempfile
import time

import torch
import tyro
from measure import in_own_process, reset_peak, resident, return_memory
from transformers import AutoModelForCausalLM, Qwen2Config

from common import placement, weight_sync
from common.rollout import engines
from common.trainer import model

SIZES = {  # width, layers, vocabulary
    "6 M": (256, 4, 8_192),
    "27 M": (512, 8, 16_384),
    "135 M": (576, 30, 49_152),
    "300 M": (1024, 20, 49_152),
}


def figures_of(name: str) -> dict[str, float]:
    """A row of the table: numbers of parameters, seconds and MiB."""
    width, layers, vocabulary = SIZES[name]
    heads = width // 64
    config = Qwen2Config(
        hidden_size=width,
        intermediate_size=8 * width // 3 // 64 * 64,
        num_hidden_layers=layers,
        vocab_size=vocabulary,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        tie_word_embeddings=True,
        max_position_embeddings=2048,
    )
    world = placement.init(seed=0)
    return_memory()  # otherwise memory that a push frees would still be resident before the next one
    with tempfile.TemporaryDirectory() as folder:
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
        policy = model.load(folder, world, torch.float32)
        engine = engines.start("vllm", folder, [0], world, torch.float32, max_model_len=64, sequences=8)
    weight_sync.push(policy, engine)  # the first push also allocates buffers that later ones reuse
    times, extras = [], []
    for _ in range(5):
        engine.sleep()
        before = resident("VmRSS")
        reset_peak()
        began = time.perf_counter()
        weight_sync.push(policy, engine)
        times.append(time.perf_counter() - began)
        extras.append(resident("VmHWM") - before)
    sizes = {name: parameter.numel() * 4 / 2**20 for name, parameter in policy.named_parameters()}
    whole = torch.empty(round(sum(sizes.values()) * 2**18))
    copy = []
    for _ in range(5):
        began = time.perf_counter()
        whole.clone()
        copy.append(time.perf_counter() - began)
    figures = {
        "parameters": sum(sizes.values()) / 4 * 2**20,
        "seconds": statistics.median(times),
        "copy": statistics.median(copy),
        "extra": statistics.median(extras),
        "layer": sum(size for name, size in sizes.items() if ".layers.0." in name),
        "embedding": max(sizes.values()),
    }
    placement.finish(world, engine)
    return figures


def main() -> None:
    print("| parameters | push, s | one copy, s | extra memory, MiB | a layer, MiB | the embedding, MiB |")
    print("|---" * 6 + "|", flush=True)
    for name in SIZES:
        row = in_own_process(figures_of, name)
        figures = " | ".join(f"{row[key]:.2f}" for key in ("seconds", "copy"))
        sizes = " | ".join(f"{row[key]:.1f}" for key in ("extra", "layer", "embedding"))
        print(f"| {row['parameters'] / 1e6:.0f} M | {figures} | {sizes} |", flush=True)


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
