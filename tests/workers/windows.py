"""Prints how far trainer and engine differ, for a model whose layers all have a window: windows.py MODEL.

A prompt is asked again, and vLLM no longer has what lies behind its window. Others begin with the same tokens.
"""

import sys

import torch

from common import placement
from common.rollout import engines
from common.trainer import batching, model

BEGINNING = [3 + 7 * i % 120 for i in range(12)]
LONG = BEGINNING + [5 + 11 * i % 120 for i in range(60)]  # two whole blocks, of which a window of 16 tokens needs one

world = placement.init(0)
policy = model.load(sys.argv[1], world, torch.float32)
engine = engines.start("vllm", sys.argv[1], [2], world, torch.float32, max_model_len=96, sequences=8)
engine.generate([LONG], n=1, temperature=1.0, max_tokens=1, seed=0)
prompts = [LONG, *([*BEGINNING, *range(first, first + 10)] for first in (20, 40))]
batch = engine.generate(prompts, n=1, temperature=1.0, max_tokens=8, seed=1)
micro_batches = batching.pack(batch, torch.arange(len(batch)), batching.Compute(400), world)
logprobs = model.frozen_logprobs(policy, batch, micro_batches, temperature=1.0)
print(f"gap {(logprobs - batch.rollout_logprobs)[batch.response_mask].abs().max():.3e}", flush=True)
placement.finish(world, engine)
