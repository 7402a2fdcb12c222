"""algos/grpo.py with one thing broken on purpose: patched.py BREAK RUN_DIR [flags]

none            nothing
wrong_rollout   transformers' engine reports wrong log-probs: they are measured, never trained on, so nothing may change
share           nothing: even short prompts are computed once for all their responses
stale           the engine never gets new weights
nan             an advantage is NaN
"""

import sys
import types

import torch
import tyro

from algos import grpo
from common import errors
from common.rollout import hf_engine
from common.trainer import batching

broken, run_dir, *flags = sys.argv[1:]
compute_advantages, collate_responses = grpo.compute_advantages, hf_engine.collate_responses


def wrong_logprobs(prompts, n, responses, *rest):
    for response in responses:
        response.logprobs = [x - 0.01 for x in response.logprobs]
    return collate_responses(prompts, n, responses, *rest)


if broken == "wrong_rollout":
    hf_engine.collate_responses = wrong_logprobs
if broken == "share":
    batching.SHARED_PROMPT_MIN_TOKENS = 1
if broken == "stale":
    grpo.weight_sync = types.SimpleNamespace(push=lambda policy, engine: None)  # main's alone
if broken == "nan":
    grpo.compute_advantages = lambda **given: compute_advantages(**given) * torch.nan
errors.launch(grpo.main, tyro.cli(grpo.Args, args=["--run-dir", run_dir, *flags], default=grpo.Args(**grpo.EMBEDDED)))
