"""The embedded job: two-digit addition for a 0.8 M-parameter model, small enough to learn on a laptop CPU.

A worked solution carries digit by digit, `47+38=` -> `7+8=15,4+3+1=8` newline `#### 85`. The warm-started
model (algos/sft.py) answers about 55 % of held-out problems greedily; reinforcement learning does the rest.
"""

import os
import random
import subprocess
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from tokenizers import Tokenizer, decoders, models
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen2Config

from common.placement import World

ROOT = Path(__file__).parents[1]
WARM_START = ROOT / "runs" / "warm-start"

TORCHRUN_VARIABLES = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "OMP_NUM_THREADS",
)
CHARACTERS = "0123456789+-*/=() abcdefghijklmnopqrstuvwxyz.,?#\n"
HELD_OUT = 256  # of the 90 * 90 problems


def problems(split: str) -> list[dict[str, str]]:
    """All two-digit additions in a fixed random order: the first HELD_OUT are "test", the rest "train".

    Rows have "question", "solution" (with its working) and "answer".
    """
    pairs = [(a, b) for a in range(10, 100) for b in range(10, 100)]
    random.Random(0).shuffle(pairs)
    pairs = pairs[:HELD_OUT] if split == "test" else pairs[HELD_OUT:]
    return [{"question": f"{a}+{b}=", "solution": solution(a, b), "answer": str(a + b)} for a, b in pairs]


def solution(a: int, b: int) -> str:
    """The working, units first, each line with its carry, then the answer after ####."""
    steps, carry = [], 0
    for x, y in ((a % 10, b % 10), (a // 10, b // 10)):
        steps.append(f"{x}+{y}" + (f"+{carry}" if carry else "") + f"={x + y + carry}")
        carry = (x + y + carry) // 10
    return ",".join(steps) + f"\n#### {a + b}"


def tokenizer() -> PreTrainedTokenizerFast:
    """One token a character; 0 pads, 1 ends."""
    vocabulary = {token: i for i, token in enumerate(["<pad>", "<eos>", "<bos>", *CHARACTERS])}
    characters = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    characters.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=characters, pad_token="<pad>", eos_token="<eos>", bos_token="<bos>")


def config(tie_word_embeddings: bool = False) -> Qwen2Config:
    """Qwen2, 128 wide, 3 layers, 4 heads."""
    return Qwen2Config(
        vocab_size=len(CHARACTERS) + 3,
        hidden_size=128,
        intermediate_size=512,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=256,
        tie_word_embeddings=tie_word_embeddings,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=2,
    )


def new_model(folder: Path, seed: int, world: World) -> str:
    """Write the embedded model with random weights to `folder` and return its name. Collective; rank 0 writes."""
    if world.is_main:
        torch.manual_seed(seed)
        AutoModelForCausalLM.from_config(config(), dtype=torch.float32).save_pretrained(folder)
        tokenizer().save_pretrained(folder)
    dist.barrier()
    return str(folder)


def warm_start() -> str:
    """The embedded model after `python algos/sft.py`, trained once and kept. Every rank calls it before placement.init.

    One rank trains, in a process of its own that knows nothing of the others; they wait for the folder.
    """
    ready = WARM_START / "ready"
    if os.environ.get("LOCAL_RANK", "0") == "0" and not ready.exists():
        print(f"warm start: training the embedded model once, into {WARM_START}", flush=True)
        own = {name: value for name, value in os.environ.items() if name not in TORCHRUN_VARIABLES}
        subprocess.run([sys.executable, str(ROOT / "algos/sft.py"), "--output", str(WARM_START)], env=own, check=True)
        ready.touch()
    while not ready.exists():
        time.sleep(1)
    return str(WARM_START)
