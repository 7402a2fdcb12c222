"""How far the engine's log-probs are from the trainer's on fresh responses, and why, if that is too far.

Before a run `--selftest` asks how far; after a step over --max-logprob-gap run.check asks why.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from common import batching, model, weight_sync
from common.data import Prompt
from common.placement import World
from common.rollout import Rollout

PROMPTS, RESPONSES = 4, 4  # of a rank, and to each of them
LONGEST = 256  # tokens of a response: more would only take longer


@dataclass(frozen=True)
class Gap:
    """|trainer - engine| of the log-probs of sampled tokens, in nats, over the tokens of all ranks."""

    mean: float
    largest: float
    first: float  # mean over the first token of each response, which the prompt alone predicts
    rest: float  # mean over the others
    wide: float  # share of the tokens that are off by more than the largest mean allowed


@dataclass(frozen=True)
class Probe:
    """What a run samples with and what it computes log-probs with. All methods are collective."""

    policy: nn.Module
    engine: Any
    prompts: list[Prompt]
    temperature: float
    max_tokens: int
    compute: batching.Compute
    world: World

    def sample(self, prompt_ids: list[list[int]], seed: int) -> Rollout:
        """Fresh responses to a few of this rank's prompts, at the run's temperature."""
        tokens = min(self.max_tokens, LONGEST)
        return self.engine.generate(prompt_ids[:PROMPTS], RESPONSES, self.temperature, tokens, seed)

    def some_prompts(self) -> list[list[int]]:
        """A few prompts for this rank, as token ids: every size-th one, from the start again where they are too few."""
        places = (self.world.rank + i * self.world.size for i in range(PROMPTS))
        return [self.prompts[place % len(self.prompts)].ids for place in places]

    def gap(self, batch: Rollout, temperature: float | None = None, bound: float = 0.0) -> Gap:
        """The trainer's log-probs of these responses, as it is now, against those they were sampled with.

        temperature: of the trainer's log-probs; None: the run's. bound: what counts as wide.
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
    """Why trainer and engine disagree, as (code, sentence), found by trying. Collective; the run is over afterwards.

    asked: prompts whose responses were off, so that an engine has seen them under older weights; settle(): returns
    when nothing else asks the engine any more; bound: the largest mean gap that is allowed. The codes:

        stale-cache        prompts it was asked before are off, the same tokens in another order are not
        stale-weights      sending the weights once more ends it
        wrong-temperature  the trainer's log-probs at another temperature than the run's fit
        logprob-gap        none of these
    """
    settle()
    ids = [prompt.ids for prompt in asked]
    measure = lambda turn, seed: probe.gap(probe.sample([turned(row, turn) for row in ids], seed), bound=bound)
    ends = lambda before, after: after.mean <= min(bound, before.mean / 2)  # noise alone halves nothing
    again, other = measure(0, 1), measure(1, 2)
    if ends(again, other) and other.largest <= bound:  # not one token is off: old weights are small for some by chance
        return "stale-cache", (
            f"it still is {again.mean:.3g} for prompts the engine was asked before and {other.mean:.3g} for new ones: "
            "it kept keys and values of older weights; load_weights must reset its prefix cache"
        )
    weight_sync.push(probe.policy, probe.engine)
    batch = probe.sample([turned(row, 2) for row in ids], 3)
    pushed = probe.gap(batch, bound=bound)
    if ends(other, pushed):
        return "stale-weights", (
            f"it was {other.mean:.3g} for new responses, and {pushed.mean:.3g} when the weights had been sent once "
            "more: the engine had not got the trainer's weights"
        )
    temperature, fitted = fit_temperature(probe, batch)
    if ends(pushed, fitted):
        return "wrong-temperature", (
            f"it is {fitted.mean:.3g} for the trainer's log-probs at temperature {temperature:.3g}: the engine does "
            f"not sample at --temperature {probe.temperature:g}, or reports log-probs of another one"
        )
    if pushed.mean <= bound:
        return "logprob-gap", (
            f"for new responses it is {pushed.mean:.3g}: this step's were sampled with other weights than the trainer "
            "took for theirs, or their log-probs were computed in another way, or the bound is too close"
        )
    return "logprob-gap", (
        f"for new responses, with weights sent once more, it is {pushed.first:.3g} at the first token and "
        f"{pushed.rest:.3g} after it, and {pushed.wide:.0%} of the tokens are off by more: the engine's model code, "
        "--dtype, weights that arrive in part, or other prompt tokens"
    )


def turned(ids: list[int], count: int) -> list[int]:
    """The same tokens, the first `count` of them at the end: as a prompt it shares no beginning with the old one."""
    count %= len(ids)
    return ids[count:] + ids[:count]


def fit_temperature(probe: Probe, batch: Rollout) -> tuple[float, Gap]:
    """The temperature, from a quarter to four times the run's, at which the trainer is nearest to the engine.

    Exact where it is 1 or the run's squared (one that is applied twice), else to half a percent.
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
