"""Prints what the speedrun's clock counts while vLLM answers one prompt: speedrun_clock.py PROMPT_TOKENS MAX_TOKENS"""

import sys

import torch
from helpers import load

from common import placement
from common.data import arithmetic
from common.rollout import engines

length, most = map(int, sys.argv[1:])
world = placement.init(0)
model = str(arithmetic.WARM_START)
engine = engines.start("vllm", model, [1], world, torch.float32, max_model_len=64, sequences=4)
with load("speedrun/clock.py").Clock() as clock:
    rollout = engine.generate([list(range(3, 3 + length))], 1, 1.0, most, seed=0)
print(f"flops {clock.flops} tokens {len(rollout.response_ids[0])}")
placement.finish(world, engine)
