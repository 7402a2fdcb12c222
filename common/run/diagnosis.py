"""Measures the gap between the engine's and the trainer's log-probs on fresh responses, and explains a large one.

scripts/selftest.py measures it. After a step whose gap is over --max-logprob-gap, guards.check_logprob_gap asks for
the reason.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from common import weight_sync
from common.data.prompts import Prompt
from common.placement import World
from common.rollout.rollout import Rollout
from common.trainer import batching, model

PROMPTS_PER_RANK = 4
RESPONSES_PER_PROMPT = 4
MAX_RESPONSE_TOKENS = 256  # enough to measure a gap; longer responses would only take longer


@dataclass(frozen=True)
class Gap:
    """|trainer's - engine's log-prob| of the sampled tokens of all ranks, in nats."""

    mean: float
    largest: float


@dataclass(frozen=True)
class GapProbe:
    """The engine and the policy of a run, to measure their gap. All methods are collective: every rank calls them."""

    policy: nn.Module
    engine: Any
    prompts: list[Prompt]
    temperature: float
    max_tokens: int
    compute: batching.Compute
    world: World

    def sample(self, prompt_ids: list[list[int]], seed: int) -> Rollout:
        """Sample responses to the first PROMPTS_PER_RANK of these prompts, at the run's temperature."""
        tokens = min(self.max_tokens, MAX_RESPONSE_TOKENS)
        return self.engine.generate(prompt_ids[:PROMPTS_PER_RANK], RESPONSES_PER_PROMPT, self.temperature, tokens, seed)

    def some_prompts(self) -> list[list[int]]:
        """Token ids of PROMPTS_PER_RANK prompts for this rank: every size-th prompt, starting over after the last."""
        # The engines of all ranks have to sample, even if there are fewer prompts than ranks.
        places = (self.world.rank + i * self.world.size for i in range(PROMPTS_PER_RANK))
        return [self.prompts[place % len(self.prompts)].ids for place in places]

    def gap(self, batch: Rollout) -> Gap:
        """The gap between the log-probs that the trainer computes for these responses and those of the engine."""
        micro_batches = batching.pack(batch, torch.arange(len(batch)), self.compute, self.world)
        logprobs = model.frozen_logprobs(self.policy, batch, micro_batches, self.temperature)  # (N, T)
        # A log-prob that is NaN on one side must not look like agreement.
        gaps = (logprobs - batch.rollout_logprobs).abs().nan_to_num(nan=torch.inf).double()  # (N, T)
        gaps = gaps[batch.response_mask]  # one for each sampled token of this rank
        tokens = self.world.sum(len(gaps))
        return Gap(
            mean=self.world.sum(gaps.sum()) / max(1.0, tokens),
            largest=self.world.max(gaps.max() if len(gaps) else 0.0),
        )


def explain_gap(probe: GapProbe, prompts: list[Prompt], settle: Callable[[], None], max_gap: float) -> tuple[str, str]:
    """Find out why trainer and engine disagree: send the weights once more, and measure again.

    Returns (error code, sentence): "stale-weights" if that closes the gap, otherwise "logprob-gap". The run cannot
    continue afterwards, because the engine has got weights in the middle of a step. Collective: every rank calls it.

    prompts: those of the step. settle(): returns when nothing else uses the engine. max_gap: the largest mean gap that
    is allowed, in nats.
    """
    # With --max-inflight-batches 2 or more, threads may be sampling later steps.
    settle()
    prompt_ids = [prompt.ids for prompt in prompts]
    sampled = probe.sample(prompt_ids, seed=1)
    probe.engine.sleep()  # the trainer's forward needs its memory; the push wakes it
    before = probe.gap(sampled)
    weight_sync.push(probe.policy, probe.engine)
    sampled = probe.sample(prompt_ids, seed=2)
    probe.engine.sleep()
    after = probe.gap(sampled)
    # These are other responses than before, and noise alone does not halve a gap.
    if before.mean > max_gap and after.mean <= min(max_gap, before.mean / 2):
        return "stale-weights", (
            f"the gap was {before.mean:.3g} for new responses, and {after.mean:.3g} after the weights were sent once "
            "more: the engine had not got the trainer's weights"
        )
    if after.mean <= max_gap:
        return "logprob-gap", (
            f"for new responses it is {after.mean:.3g}: this step's were sampled with other weights than the trainer "
            "assumes, or their log-probs were computed in another way, or the bound is too tight"
        )
    return "logprob-gap", (
        f"for new responses, after the weights were sent once more, it is {after.mean:.3g}: check that all weights "
        f"arrive, that the engine samples at --temperature {probe.temperature:g} and resets its prefix cache with "
        "every update, its model code, --dtype, and whether both see the same prompt tokens"
    )
