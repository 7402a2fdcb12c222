"""The data type of forward and backward: the one that --dtype names, or the one that this machine is faster with."""

import statistics
import time
from pathlib import Path

import torch
from transformers import AutoConfig

from common import placement
from common.errors import say
from common.preflight.run_directory import described

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
NARROW_HIDDEN_SIZE = 512  # "auto" computes narrower models in float32
WORTH_IT = 1.2  # on a CPU, bfloat16 products have to be this many times as fast as float32 ones
PRODUCT = (512, 1024, 1024)  # sizes of the measured product: tokens, and the width before and after a layer
REPEATS = 9


def choose(name: str, model_path: str, resume: Path | None = None) -> torch.dtype:
    """The dtype that --dtype names. A GPU's "auto" is bfloat16 if the GPU has it, and a CPU's is measured.

    The embedded model and others under NARROW_HIDDEN_SIZE stay in float32: they gain little by bfloat16, and what they
    reach must not depend on the machine. resume: a checkpoint; its run goes on in the dtype that it began with.
    """
    if resume and name == "auto":
        run_json = resume.absolute().parents[1] / "run.json"
        if run_json.is_file():
            name = str(described(run_json)["args"].get("dtype", name))
    if name in DTYPES:
        return DTYPES[name]
    # "auto"
    narrow = AutoConfig.from_pretrained(model_path).get_text_config().hidden_size < NARROW_HIDDEN_SIZE
    if narrow or not has_bfloat16():
        return torch.float32
    if torch.cuda.is_available():
        return torch.bfloat16
    ratio = speed_of_bfloat16()
    dtype = torch.bfloat16 if ratio >= WORTH_IT else torch.float32
    name = str(dtype).removeprefix("torch.")
    say(f"dtype: {name}, because products in bfloat16 take {1 / ratio:.2f} times as long as in float32 here")
    return dtype


def has_bfloat16() -> bool:
    """True if this GPU or CPU has instructions for bfloat16. A CPU's may be slower than those for float32."""
    if torch.cuda.is_available():
        return torch.cuda.is_bf16_supported(including_emulation=False)
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()


def speed_of_bfloat16() -> float:
    """How many times as many products this CPU computes in bfloat16 as in float32: the median of measured pairs."""
    placement.use_cores()
    ratios = []
    for _ in range(REPEATS + 1):
        ratios.append(seconds_of_product(torch.float32) / seconds_of_product(torch.bfloat16))
    return statistics.median(ratios[1:])  # The first product of each kind allocates memory and chooses kernels.


def seconds_of_product(dtype: torch.dtype) -> float:
    """Seconds of one matrix product of the size of a layer's."""
    tokens, before, after = PRODUCT
    left = torch.ones(tokens, before, dtype=dtype)
    right = torch.ones(before, after, dtype=dtype)
    began = time.perf_counter()
    torch.mm(left, right)
    return time.perf_counter() - began
