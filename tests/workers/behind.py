"""algos/grpo.py that prints, each step, how far its responses are from the weights said to have sampled each token, and
how many responses have tokens of several weights. With --inflight-updates keep the gap is what the cache remembers.
"""

import torch
import tyro

from algos import grpo
from common import errors, weight_sync
from common.trainer import model

push, frozen_logprobs = weight_sync.push, model.frozen_logprobs
sent: dict[int, list[torch.Tensor]] = {}  # weight version -> parameters


def parameters(policy) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in policy.parameters()]


@torch.no_grad()
def put(policy, values: list[torch.Tensor]) -> None:
    for parameter, value in zip(policy.parameters(), values):
        parameter.copy_(value)


def remembered(policy, engine) -> None:
    push(policy, engine)
    sent[engine.weight_version] = parameters(policy)


def compared(policy, batch, micro_batches, temperature) -> torch.Tensor:
    now, gaps = parameters(policy), [0.0]
    trained = torch.zeros_like(batch.response_mask)
    for micro in micro_batches:  # Rows that need no forward are not among them.
        trained[micro.rows] = True
    for version in batch.weight_versions[batch.response_mask].unique().tolist():
        put(policy, sent[version])
        of = batch.response_mask & trained & (batch.weight_versions == version)
        difference = frozen_logprobs(policy, batch, micro_batches, temperature) - batch.rollout_logprobs
        gaps += difference[of].abs().tolist()
    put(policy, now)
    print(f"gap {max(gaps):.2e} mean {sum(gaps) / len(gaps):.2e}", flush=True)
    versions = batch.weight_versions.masked_fill(~batch.response_mask, -1)
    newest = versions.amax(1, keepdim=True)
    mixed = (batch.response_mask & (versions < newest)).any(1)
    print(f"mixed {int(mixed.sum())}", flush=True)
    return frozen_logprobs(policy, batch, micro_batches, temperature)


weight_sync.push, model.frozen_logprobs = remembered, compared
errors.launch(grpo.main, tyro.cli(grpo.Args, default=grpo.Args(**grpo.EMBEDDED)))
