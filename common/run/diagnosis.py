"""Measures the gap between the engine's and the trainer's log-probs on fresh responses, and explains a large one.

scripts/selftest.py measures it. After a step whose gap is over --max-logprob-gap, guards.check asks for the reason.
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

PROMPTS_PER_RANK, RESPONSES_PER_PROMPT = 4, 4
MAX_RESPONSE_TOKENS = 256  # enough to measure a gap; longer responses would only take longer


@dataclass(frozen=True)
class Gap:
    """|trainer's - engine's log-prob| of the sampled tokens of all ranks, in nats."""

    mean: float
    largest: float
    first: float  # mean over the first tokens of responses, which depend on the prompt alone
    rest: float  # mean over all other tokens
    wide: float  # share of the tokens whose gap is over the bound


@dataclass(frozen=True)
class Probe:
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
        places = (self.world.rank + i * self.world.size for i in range(PROMPTS_PER_RANK))
        return [self.prompts[place % len(self.prompts)].ids for place in places]

    def gap(self, batch: Rollout, temperature: float | None = None, bound: float = 0.0) -> Gap:
        """The gap between the log-probs that the trainer computes for these responses and those of the engine.

        temperature: the trainer's; None: the run's. bound: a token with a larger gap, in nats, counts as wide.
        """
        micro_batches = batching.pack(batch, torch.arange(len(batch)), self.compute, self.world)
        trainer = model.frozen_logprobs(self.policy, batch, micro_batches, temperature or self.temperature)  # (N, T)
        off = (trainer - batch.rollout_logprobs).abs().nan_to_num(nan=torch.inf).double()  # (N, T)
        first = batch.response_mask & (torch.arange(off.shape[1], device=off.device) == 0)
        rest = batch.response_mask & ~first

        def mean(values: torch.Tensor, mask: torch.Tensor) -> float:
            return self.world.sum(values[mask].sum()) / max(1.0, self.world.sum(mask.sum()))

        tokens = batch.response_mask
        largest = self.world.max(off[tokens].max() if tokens.any() else 0.0)
        return Gap(mean(off, tokens), largest, mean(off, first), mean(off, rest), mean((off > bound).double(), tokens))


def explain_gap(probe: Probe, asked: list[Prompt], settle: Callable[[], None], bound: float) -> tuple[str, str]:
    """Find out by experiments why trainer and engine disagree. Returns (error code, sentence).

    It pushes weights to the engine, so the run cannot continue afterwards. Collective: every rank calls it.
    asked: the prompts of the step, which the engine has also seen under older weights. settle(): returns when nothing
    else uses the engine. bound: the largest mean gap that is allowed, in nats. Prompts keep their images. The codes:

        stale-cache        the gap is large for these prompts, and not for the same tokens in another order
        stale-weights      the gap closes when the weights are pushed once more
        wrong-temperature  the gap closes when the trainer uses another temperature than the run's
        logprob-gap        none of these
    """
    settle()
    ids = [prompt.ids for prompt in asked]
    measure = lambda turn, seed: probe.gap(probe.sample([turned(row, turn) for row in ids], seed), bound=bound)
    ends = lambda before, after: after.mean <= min(bound, before.mean / 2)  # noise alone does not halve a gap
    again, other = measure(0, 1), measure(1, 2)
    # Every single token must fit: under old weights the mean gap of a few responses may be small by chance.
    if ends(again, other) and other.largest <= bound:
        return "stale-cache", (
            f"it still is {again.mean:.3g} for prompts that the engine knows, and {other.mean:.3g} for others: it kept "
            "keys and values of older weights; load_weights must reset its prefix cache"
        )
    weight_sync.push(probe.policy, probe.engine)
    batch = probe.sample([turned(row, 2) for row in ids], 3)
    pushed = probe.gap(batch, bound=bound)
    if ends(other, pushed):
        return "stale-weights", (
            f"it was {other.mean:.3g} for new responses, and {pushed.mean:.3g} after the weights were sent once more: "
            "the engine had not got the trainer's weights"
        )
    temperature, fitted = fit_temperature(probe, batch)
    if ends(pushed, fitted):
        return "wrong-temperature", (
            f"it is {fitted.mean:.3g} with the trainer's log-probs at temperature {temperature:.3g}: the engine does "
            f"not sample at --temperature {probe.temperature:g}, or reports log-probs at another temperature"
        )
    if pushed.mean <= bound:
        return "logprob-gap", (
            f"for new responses it is {pushed.mean:.3g}: this step's were sampled with other weights than the trainer "
            "assumes, or their log-probs were computed in another way, or the bound is too tight"
        )
    return "logprob-gap", (
        f"for new responses, after the weights were sent once more, it is {pushed.first:.3g} at the first token and "
        f"{pushed.rest:.3g} after it, and {pushed.wide:.0%} of the tokens are over the bound: check the engine's model "
        "code, --dtype, whether all weights arrive, and whether both see the same prompt tokens"
    )


def turned(ids: list[int], count: int) -> list[int]:
    """The tokens with the first `count` moved to the end: a prefix cache has no entry for such a prompt.

    A prompt with images stays as it is.
    """
    if hasattr(ids, "images"):
        return ids
    count %= len(ids)
    return ids[count:] + ids[:count] if count else ids


def fit_temperature(probe: Probe, batch: Rollout) -> tuple[float, Gap]:
    """(temperature, gap): from a quarter to four times the run's temperature, the one that makes the gap smallest.

    It is exact if it is 1 or the square of the run's (applied twice); otherwise it is found to half a percent.
    """
    tried: dict[float, Gap] = {}

    def best_of(temperatures: list[float]) -> float:
        tried.update({t: probe.gap(batch, t) for t in temperatures if t not in tried})
        return min(tried, key=lambda t: tried[t].mean)

    best, factor = probe.temperature, 4.0
    for _ in range(4):
        best = best_of([best * factor ** (i / 4) for i in range(-4, 5)])
        factor **= 0.25
    best = best_of([1.0, probe.temperature**2])
    return best, tried[best]
