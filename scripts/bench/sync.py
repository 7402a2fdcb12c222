"""Trainer -> engine: seconds of a push and the memory it takes beyond what was there, against the model's size.

python scripts/bench/sync.py        # --only SIZE: that one, in this process

Random weights, float32 masters, tied embeddings; each size in a process of its own. The floor is one copy of all
weights in memory; the peak is the resident set's (a GPU's: allocated memory) during a push. Medians of five.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time

import torch
import tyro
from measure import reset_peak, resident, return_memory
from transformers import AutoModelForCausalLM, Qwen2Config

from common import engines, model, placement, weight_sync

SIZES = {  # width, layers, vocabulary
    "6 M": (256, 4, 8_192),
    "27 M": (512, 8, 16_384),
    "135 M": (576, 30, 49_152),
    "300 M": (1024, 20, 49_152),
}


def one(name: str) -> None:
    width, layers, vocabulary = SIZES[name]
    heads = width // 64
    config = Qwen2Config(
        hidden_size=width, intermediate_size=8 * width // 3 // 64 * 64, num_hidden_layers=layers, vocab_size=vocabulary,
        num_attention_heads=heads, num_key_value_heads=heads, tie_word_embeddings=True, max_position_embeddings=2048,
    )  # fmt: skip
    world = placement.init(seed=0)
    return_memory()  # else what a push frees would be resident before the next
    with tempfile.TemporaryDirectory() as folder:
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
        policy = model.load(folder, world, torch.float32)
        engine = engines.start("vllm", folder, [0], world, torch.float32, max_model_len=64, sequences=8)
    weight_sync.push(policy, engine)  # the first also makes what later ones reuse
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
    os.write(1, b"FIGURES" + json.dumps(figures).encode() + b"\n")
    placement.finish(world, engine)


def main(only: str = "") -> None:
    if only:
        return one(only)
    print("| parameters | push, s | one copy, s | extra memory, MiB | a layer, MiB | the embedding, MiB |")
    print("|---" * 6 + "|", flush=True)
    for name in SIZES:
        command = [sys.executable, __file__, "--only", name]
        output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        (line,) = [line for line in output.splitlines() if line.startswith("FIGURES")]
        row = json.loads(line.removeprefix("FIGURES"))
        figures = " | ".join(f"{row[key]:.2f}" for key in ("seconds", "copy"))
        sizes = " | ".join(f"{row[key]:.1f}" for key in ("extra", "layer", "embedding"))
        print(f"| {row['parameters'] / 1e6:.0f} M | {figures} | {sizes} |", flush=True)


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
