"""Sampled responses, as every engine returns them: token ids, and the log-probs they were sampled with."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from common.placement import World

# Called with the place of a prompt as soon as all responses to it are there: their token ids, and which were cut off.
Done = Callable[[int, list[list[int]], list[bool]], None]


@dataclass
class Rollout:
    """N sampled responses, group-major: rows i*G ... i*G+G-1 answer prompt i. T = longest response."""

    prompt_ids: list[list[int]]  # N, as the engine took them
    response_ids: list[list[int]]  # N, as the engine returned them, with the end token it sampled
    response_mask: torch.Tensor  # (N, T) bool, True on a token the policy sampled
    rollout_logprobs: torch.Tensor  # (N, T) float32 as the engine reports them, 0 where the mask is False
    truncated: torch.Tensor  # (N,) bool: stopped by the length limit, not by an end token
    weight_versions: torch.Tensor  # (N, T) how many pushes the weights had seen that sampled each token

    def __len__(self) -> int:
        return len(self.response_ids)


def collate(prompt_ids, response_ids, logprobs, truncated, weight_version, device) -> Rollout:
    """Pad N lists to (N, T). The mask comes from the lengths: a pad token may well be an end token.

    logprobs: None for demonstrations, which nobody sampled; weight_version: a number, or N lists of them.
    """
    lengths = torch.tensor([len(ids) for ids in response_ids])
    width = int(lengths.max()) if len(lengths) else 0
    mask = torch.arange(width)[None, :] < lengths[:, None]  # (N, T)
    padded = torch.zeros(len(response_ids), width)
    if logprobs is not None:
        padded[mask] = torch.tensor([x for row in logprobs for x in row], dtype=torch.float32)
    truncated = torch.tensor(truncated, dtype=torch.bool, device=device)
    versions = torch.full(mask.shape, weight_version if isinstance(weight_version, int) else 0)
    if not isinstance(weight_version, int):
        versions[mask] = torch.tensor([x for row in weight_version for x in row], dtype=torch.long)
    return Rollout(prompt_ids, response_ids, mask.to(device), padded.to(device), truncated, versions.to(device))


def select(parts: list[tuple[Rollout, Iterable[int]]]) -> Rollout:
    """The chosen rows of several rollouts as one rollout, in this order, padded anew."""
    chosen = [(rollout, row) for rollout, rows in parts for row in rows]
    return collate(
        [rollout.prompt_ids[row] for rollout, row in chosen],
        [rollout.response_ids[row] for rollout, row in chosen],
        [rollout.rollout_logprobs[row, : len(rollout.response_ids[row])].tolist() for rollout, row in chosen],
        [rollout.truncated[row].item() for rollout, row in chosen],
        [rollout.weight_versions[row, : len(rollout.response_ids[row])].tolist() for rollout, row in chosen],
        parts[0][0].response_mask.device,
    )


def gather_prompts(prompt_ids: list[list[int]], world: World) -> tuple[list[list[int]], int]:
    """Ranks that share an engine must feed it the same prompts: all of theirs. Returns them and where ours start."""
    if world.tp_group is None:
        return prompt_ids, 0
    everyone: list = [None] * world.rollout_tp
    dist.all_gather_object(everyone, prompt_ids, group=world.tp_group)
    before = everyone[: world.rank % world.rollout_tp]
    return [ids for share in everyone for ids in share], sum(len(share) for share in before)
