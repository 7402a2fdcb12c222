"""Sampled responses as every engine returns them: token ids, and the log-probs they were sampled with."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import chain

import torch
import torch.distributed as dist
import torch.nn.functional as F

from common.placement import World

# An engine may call it with the index of a prompt once all its responses are complete: the token ids of each response,
# and for each whether the length limit cut it off. It may also call it twice for a prompt, or never.
Done = Callable[[int, list[list[int]], list[bool]], None]


def spread_seed(seed: int) -> int:
    """The seed with its upper bits mixed into the lower 32, which are all that torch's generator reads on a CPU.

    A run's own seed stands in the upper bits, so without this all runs on a CPU would sample with the same noise.
    Different seeds stay different numbers of 64 bits. Those below 2**32 stay as they are.
    """
    golden_ratio = 0x9E3779B1  # Knuth's multiplier: neighbours end far apart
    return seed ^ ((seed >> 32) * golden_ratio % 2**32)


@dataclass
class Rollout:
    """N sampled responses, group-major: rows i*G ... i*G+G-1 answer prompt i. T = tokens of the longest response.

    Grading sets response_mask to False on all of a group that cannot be graded.
    """

    prompt_ids: list[list[int]]  # N prompts, as the engine took them
    response_ids: list[list[int]]  # N responses, as the engine returned them; an end token that it sampled is included
    response_mask: torch.Tensor  # (N, T) bool, True on a token that the policy sampled; holes: an environment's tokens
    rollout_logprobs: torch.Tensor  # (N, T) float32 as the engine reports them, 0 where nothing was sampled
    truncated: torch.Tensor  # (N,) bool, True if the length limit ended the response instead of an end token
    weight_versions: torch.Tensor  # (N, T) number of the push whose weights sampled the token; 0 where nothing was
    episodes: list | None = field(default=None, kw_only=True)  # N turns.Turns, if the run has an environment

    def __len__(self) -> int:
        return len(self.response_ids)

    @property
    def lengths(self) -> torch.Tensor:
        """(N,) tokens of each response, an environment's included: what the length limit counts."""
        return torch.tensor([len(ids) for ids in self.response_ids], device=self.response_mask.device)


@dataclass
class Response:
    """One sampled response, as an engine returns it."""

    token_ids: list[int]
    logprobs: list[float]  # one for each token
    truncated: bool  # True if the length limit ended it
    versions: list[int] | None = None  # number of the push, for each token; None: the engine's current one


def collate_responses(
    prompt_ids: list[list[int]], n: int, responses: list[Response], weight_version: int | list[list[int]], device
) -> Rollout:
    """The rollout of n responses to each prompt, group-major. weight_version: as in collate()."""
    return collate(
        [ids for ids in prompt_ids for _ in range(n)],
        [response.token_ids for response in responses],
        [response.logprobs for response in responses],
        [response.truncated for response in responses],
        weight_version,
        device,
    )


def collate(prompt_ids, response_ids, logprobs, truncated, weight_version, device, sampled=None) -> Rollout:
    """The rollout of N responses. Its tensors are padded to (N, T); token ids stay lists of their own lengths.

    logprobs: N lists, or None for demonstrations, which no engine sampled.
    weight_version: one number for all tokens, or N lists with one for each.
    sampled: N lists, False on an environment's tokens; None: the policy sampled all tokens.
    """
    lengths = torch.tensor([len(ids) for ids in response_ids])  # (N,)
    width = int(lengths.max()) if len(lengths) else 0
    in_response = torch.arange(width)[None, :] < lengths[:, None]  # (N, T) False on padding
    padded_logprobs = torch.zeros(len(response_ids), width)  # (N, T)
    # A mask takes values row by row, so the lists can be joined.
    if logprobs is not None:
        padded_logprobs[in_response] = torch.tensor(list(chain(*logprobs)), dtype=torch.float32)
    mask = in_response.clone()
    if sampled is not None:
        mask[in_response] = torch.tensor(list(chain(*sampled)), dtype=torch.bool)
    versions = torch.zeros(len(response_ids), width, dtype=torch.long)  # (N, T)
    if isinstance(weight_version, int):
        versions[mask] = weight_version
    else:
        versions[in_response] = torch.tensor(list(chain(*weight_version)), dtype=torch.long)
        versions = versions * mask
    return Rollout(
        prompt_ids=prompt_ids,
        response_ids=response_ids,
        response_mask=mask.to(device),
        rollout_logprobs=padded_logprobs.to(device),
        truncated=torch.tensor(truncated, dtype=torch.bool, device=device),
        weight_versions=versions.to(device),
    )


def select(parts: list[tuple[Rollout, Iterable[int]]]) -> Rollout:
    """Join these rows (at least one) of several rollouts, in this order, and pad them to their longest response."""
    picked = [(rollout, row) for rollout, rows in parts for row in rows]
    response_ids = [rollout.response_ids[row] for rollout, row in picked]
    width = max(len(ids) for ids in response_ids)

    def padded(name: str) -> torch.Tensor:
        """The picked rows of a field of shape (N, T). A field has zeros behind a response, so a cut loses nothing."""
        rows = [getattr(rollout, name)[row, :width] for rollout, row in picked]
        return torch.stack([F.pad(values, (0, width - len(values))) for values in rows])

    selected = Rollout(
        prompt_ids=[rollout.prompt_ids[row] for rollout, row in picked],
        response_ids=response_ids,
        response_mask=padded("response_mask"),
        rollout_logprobs=padded("rollout_logprobs"),
        truncated=torch.stack([rollout.truncated[row] for rollout, row in picked]),
        weight_versions=padded("weight_versions"),
    )
    if parts[0][0].episodes is not None:
        selected.episodes = [rollout.episodes[row] for rollout, row in picked]
    return selected


def gather(items: list, world: World) -> tuple[list, int]:
    """Prompts, or replies, of all ranks that share this rank's engine, and the index of this rank's first among them.

    These ranks must ask their engine for the same, in the same order. Collective over them (world.tp_group).
    """
    if world.tp_group is None:
        return items, 0
    shares: list = [None] * world.rollout_tp
    dist.all_gather_object(shares, items, group=world.tp_group)
    before = shares[: world.rank % world.rollout_tp]
    return list(chain(*shares)), len(list(chain(*before)))
