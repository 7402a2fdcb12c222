"""The embedded job: two-digit addition for a 0.8 M-parameter model, small enough to learn on a laptop CPU.

A worked solution goes digit by digit: `47+38=` -> `7+8=15,4+3+1=8` newline `#### 85`. The warm start (algos/sft.py)
imitates a sloppy teacher who forgets 6 of 10 carries. Its greedy answers are right for about 55 % of the held-out
problems, those without a carry. Reinforcement learning is told only right from wrong, and has to surpass the teacher.
"""

import random
from pathlib import Path

import torch
import torch.distributed as dist
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen2Config

from common.errors import BadInput
from common.placement import World

ROOT = Path(__file__).parents[2]
# Made by `python algos/sft.py --output baselines/warm-start`.
WARM_START = ROOT / "baselines" / "warm-start"
# For --dataset squares: python algos/sft.py --model runs/squares --dataset squares --train-vision --steps 400
# --learning-rate 2e-3
IMAGES_START = ROOT / "baselines" / "images-start"
# For --environment calculator and guess: python algos/sft.py --dataset calculator guess --steps 500
ENVIRONMENTS_START = ROOT / "baselines" / "environments-start"
# For algos/opd.py: python algos/grpo.py --seed 1
TEACHER = ROOT / "baselines" / "teacher"
# For algos/sdpo.py: the warm start, taught to read a hint. baselines/hinted.py says how it was made.
HINTS_START = ROOT / "baselines" / "hints-start"
# Right and wrong responses of the warm start, for algos/dpo.py.
PAIRS = ROOT / "baselines" / "pairs.jsonl"

WITH_ENVIRONMENT = ("calculator", "guess")  # tasks that the embedded model plays with --environment
CHARACTERS = "0123456789+-*/=() abcdefghijklmnopqrstuvwxyz.,?#\n"
HELD_OUT = 256  # problems, out of 90 * 90
FORGETS_CARRY = 0.6  # share of the problems with a carry in which the teacher forgets it


def problems(split: str) -> list[dict[str, str]]:
    """All two-digit additions in a fixed random order: the first HELD_OUT are "test", the rest "train".

    Rows have "question", "answer", which is right, and "solution", the teacher's working, which is not always right.
    """
    draw = random.Random(0)
    pairs = [(a, b) for a in range(10, 100) for b in range(10, 100)]
    draw.shuffle(pairs)
    rows = []
    for a, b in pairs:
        with_carry = draw.random() >= FORGETS_CARRY
        rows.append({"question": f"{a}+{b}=", "answer": str(a + b), "solution": solution(a, b, with_carry)})
    return rows[:HELD_OUT] if split == "test" else rows[HELD_OUT:]


def solution(a: int, b: int, with_carry: bool = True) -> str:
    """The working, units first, then the answer after ####. It is wrong if there is a carry and with_carry is False."""
    units = a % 10 + b % 10
    tens = a // 10 + b // 10
    sum_of_tens = f"{a // 10}+{b // 10}"
    if with_carry and units > 9:
        tens += 1
        sum_of_tens += "+1"
    return f"{a % 10}+{b % 10}={units},{sum_of_tens}={tens}\n#### {10 * tens + units % 10}"


def tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer with one token a character. Token 0 pads, token 1 ends a response.

    AutoTokenizer takes the saved folder for a Qwen2 tokenizer, whatever the folder says, and that one works on bytes.
    So space and newline are written as the characters that stand for these bytes. Otherwise both would vanish.
    """
    spelled = CHARACTERS.replace(" ", "\u0120").replace("\n", "\u010a")
    vocabulary = {token: i for i, token in enumerate(["<pad>", "<eos>", "<bos>", *spelled])}
    characters = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    characters.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    characters.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=characters, pad_token="<pad>", eos_token="<eos>", bos_token="<bos>")


def config(tie_word_embeddings: bool = False) -> Qwen2Config:
    """The configuration of the embedded model: Qwen2, 128 wide, 3 layers, 4 heads."""
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
    """Write the embedded model with random weights to `folder` and return its name. Collective: every rank calls it."""
    if world.is_main:
        torch.manual_seed(seed)
        AutoModelForCausalLM.from_config(config(), dtype=torch.float32).save_pretrained(folder)
        tokenizer().save_pretrained(folder)
    dist.barrier()
    return str(folder)


def warm_start(environment: str = "", dataset: tuple[str, ...] = ()) -> str:
    """Folder of the committed model that the embedded job starts from. Raises BadInput if it is missing.

    environment: value of --environment. One model has learned the forms of both built-in environments.
    dataset: value of --dataset. Another model sees images.
    """
    folder = WARM_START
    if environment in WITH_ENVIRONMENT:
        folder = ENVIRONMENTS_START
    if "squares" in dataset:
        folder = IMAGES_START
    if not (folder / "model.safetensors").is_file():
        raise BadInput(f"{folder}: the embedded model is missing; check out the repository again")
    return str(folder)
