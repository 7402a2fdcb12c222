"""The embedded job: two-digit addition for a 0.8 M-parameter model, small enough to learn on a laptop CPU.

A worked solution goes digit by digit, `47+38=` -> `7+8=15,4+3+1=8` newline `#### 85`. The warm start (algos/sft.py)
imitates a sloppy teacher who forgets the carry 6 times of 10, and answers about 55 % of held-out problems
greedily: those without a carry. Reinforcement learning, told right from wrong alone, has to surpass the teacher.
"""

import os
import random
import subprocess
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen2Config

from common.placement import TORCHRUN_VARIABLES, World

ROOT = Path(__file__).parents[1]
WARM_START = ROOT / "runs" / "warm-start"

CHARACTERS = "0123456789+-*/=() abcdefghijklmnopqrstuvwxyz.,?#\n"
HELD_OUT = 256  # of the 90 * 90 problems
FORGETS_CARRY = 0.6  # how often the teacher does, where there is one


def problems(split: str) -> list[dict[str, str]]:
    """All two-digit additions in a fixed random order: the first HELD_OUT are "test", the rest "train".

    Rows have "question", "answer" (right), and "solution" (the teacher's, with its working, not always right).
    """
    draw = random.Random(0)
    pairs = [(a, b) for a in range(10, 100) for b in range(10, 100)]
    draw.shuffle(pairs)
    rows = [
        {"question": f"{a}+{b}=", "answer": str(a + b), "solution": solution(a, b, draw.random() >= FORGETS_CARRY)}
        for a, b in pairs
    ]
    return rows[:HELD_OUT] if split == "test" else rows[HELD_OUT:]


def solution(a: int, b: int, with_carry: bool = True) -> str:
    """The working, units first, then the answer after ####; without its carry it is wrong if there is one."""
    units = a % 10 + b % 10
    carry = units // 10 if with_carry else 0
    tens = a // 10 + b // 10 + carry
    working = f"{a % 10}+{b % 10}={units},{a // 10}+{b // 10}" + ("+1" if carry else "") + f"={tens}"
    return f"{working}\n#### {10 * tens + units % 10}"


def pairs() -> list[dict[str, str]]:
    """Rows with "prompt", "chosen" and "rejected", four for each training problem: right against four wrong ways.

    Wrong are: the carry forgotten, or made up where there is none; a digit of the answer; a digit of the working; and
    the right solution of another problem, without which a policy soon learns to answer the easiest one it knows.
    """
    draw, rows = random.Random(1), []
    for row in problems("train"):
        a, b = map(int, row["question"].rstrip("=").split("+"))
        right = solution(a, b)
        working, answer = right.split("\n#### ")
        with_carry = a % 10 + b % 10 >= 10
        off = a // 10 + b // 10 + (0 if with_carry else 1)
        carried = f"{working.rpartition('=')[0].removesuffix('+1')}{'' if with_carry else '+1'}={off}"
        wrong = [
            f"{carried}\n#### {10 * off + (a + b) % 10}",
            f"{working}\n#### {change_digit(answer, draw)}",
            solution(*map(int, change_digit(f"{a},{b}", draw).split(","))),
            f"{change_digit(working, draw)}\n#### {change_digit(answer, draw) if draw.random() < 0.5 else answer}",
        ]
        rows += [{"prompt": row["question"], "chosen": right, "rejected": other} for other in wrong]
    return rows


def change_digit(text: str, draw: random.Random) -> str:
    """The text with one of its digits replaced by another."""
    place = draw.choice([i for i, character in enumerate(text) if character.isdigit()])
    return text[:place] + draw.choice([d for d in "0123456789" if d != text[place]]) + text[place + 1 :]


def tokenizer() -> PreTrainedTokenizerFast:
    """One token a character; 0 pads, 1 ends.

    Characters are spelled as bytes, space and newline by their stand-ins: AutoTokenizer takes the saved folder for
    Qwen2's, whatever it says itself, and Qwen2's pre-tokenizer is byte-level. Without this both would vanish.
    """
    spelled = CHARACTERS.replace(" ", "\u0120").replace("\n", "\u010a")
    vocabulary = {token: i for i, token in enumerate(["<pad>", "<eos>", "<bos>", *spelled])}
    characters = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    characters.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    characters.decoder = decoders.ByteLevel()
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


def warm_start(train: bool = True) -> str:
    """The embedded model after `python algos/sft.py`, trained once and kept. Every rank calls it before placement.init.

    One rank trains, in a process of its own that knows nothing of the others; they wait for the folder. train=False:
    tokenizer and config are enough.
    """
    ready = WARM_START / "ready"
    if not train and not ready.exists():
        folder = WARM_START.with_name(f"warm-start-planned-{os.environ.get('LOCAL_RANK', '0')}")
        tokenizer().save_pretrained(folder)
        config().save_pretrained(folder)
        return str(folder)
    if os.environ.get("LOCAL_RANK", "0") == "0" and not ready.exists():
        print(f"warm start: training the embedded model once, into {WARM_START}", flush=True)
        own = {name: value for name, value in os.environ.items() if name not in TORCHRUN_VARIABLES}
        subprocess.run([sys.executable, str(ROOT / "algos/sft.py"), "--output", str(WARM_START)], env=own, check=True)
        ready.touch()
    while not ready.exists():
        time.sleep(1)
    return str(WARM_START)
