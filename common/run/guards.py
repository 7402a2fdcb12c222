"""Checks that stop a run that cannot be right, after one step or over many.

Over many steps: a reward that teaches nothing, entropy that collapses, a reward that is being gamed.
"""

from collections import deque
from collections.abc import Callable

import torch

from common.errors import RunFailed, warn

SILENT_STEPS = 20  # steps in a row in which rewards, or a teacher, favoured no response
COLLAPSED_SHARE = 0.05  # entropy, as a share of the mean entropy of the first WINDOW_STEPS, below which to warn
WINDOW_STEPS = 10  # length of a moving average
TRUNCATED_STEPS = 5  # steps in a row in which every response was cut off
STALE_GAP = 0.5  # the gap allowed where the engine is one update behind: it includes what was learned since
DRIFT_SHARE = 0.1  # drop of accuracy, as a share of the best, at which to warn if the reward is at its highest


def stop_unless_finite(tracker, name: str, value: torch.Tensor) -> None:
    """Stop the run before an optimizer step with this gradient norm would write NaN into the weights. Raises RunFailed.

    value: a norm over all shards, so every rank sees the same value and stops. Collective if it is not finite.
    """
    if torch.isfinite(value):
        return
    message = f"step {tracker.step}: {name} is {float(value)}; this update was not applied"
    failure = RunFailed(message + tracker.blame(tracker.step), code="non-finite")
    tracker.before_failing()
    raise failure


class Trends:
    """Checks over many steps. Every rank calls check() with the reduced metrics, so that all ranks decide alike."""

    def __init__(self, heard: bool = False):
        """heard: True if the run has had an advantage before it was resumed."""
        self.silent, self.heard, self.cut_off = 0, heard, 0
        self.entropies: list[float] = []  # entropies of the first WINDOW_STEPS steps
        self.rewards, self.accuracies = deque(maxlen=WINDOW_STEPS), deque(maxlen=WINDOW_STEPS)
        self.best = {"reward": -float("inf"), "accuracy": -float("inf")}
        self.warned: set[str] = set()

    def check(self, metrics: dict[str, float]) -> None:
        """Raises RunFailed if no step has had a signal, or no response an end. Otherwise warns, on rank 0."""
        if "reward/mean" in metrics:  # False for the evaluation before the first step
            self.check_signal(metrics)
            self.check_truncation(metrics)
            self.check_entropy(metrics)
            self.check_drift(metrics)

    def check_signal(self, metrics: dict[str, float]) -> None:
        """Warn or stop after SILENT_STEPS steps in which all advantages are 0, but for a KL term in the rewards."""
        kl_alone = metrics.get("group/zero_std_frac") == 1 and "reward/kl" in metrics
        if metrics["advantage/abs_max"] and not kl_alone:
            self.silent, self.heard = 0, True
            return
        self.silent += 1
        if self.silent % SILENT_STEPS:
            return
        said = (
            f"step {metrics['step']}: for {self.silent} steps all responses to a prompt have scored alike, "
            f"{metrics['reward/mean']:.3g} on average"
        )
        if not self.heard:
            raise RunFailed(f"{said}, from the start: look at rollouts/ and at --reward's scores", code="no-signal")
        warn(f"{said}: there is nothing more to learn from these prompts", "no-signal")

    def check_truncation(self, metrics: dict[str, float]) -> None:
        """Warn when every response of a step was cut off, and stop after TRUNCATED_STEPS such steps in a row."""
        self.cut_off = self.cut_off + 1 if metrics.get("response/truncated_frac") == 1.0 else 0
        said = f"step {metrics['step']}: every response hit --max-response-tokens"
        if self.cut_off == TRUNCATED_STEPS:
            raise RunFailed(f"{said}, as in the {TRUNCATED_STEPS - 1} steps before; raise it", code="all-truncated")
        if self.cut_off:
            self.once("all-truncated", f"{said}; after {TRUNCATED_STEPS} such steps in a row the run stops")

    def check_entropy(self, metrics: dict[str, float]) -> None:
        """Warn when entropy falls below COLLAPSED_SHARE of the entropy of the first steps."""
        entropy = metrics.get("train/entropy")
        if entropy is None:
            return
        if len(self.entropies) < WINDOW_STEPS:
            self.entropies.append(entropy)
        start = sum(self.entropies) / len(self.entropies)
        if entropy < COLLAPSED_SHARE * start:
            self.once(
                "entropy-collapse",
                f"step {metrics['step']}: entropy is {entropy:.3g} nats a token, {start:.3g} in the first steps: "
                "responses are all alike; lower --learning-rate, add --kl-coef, or raise --clip-high",
            )

    def check_drift(self, metrics: dict[str, float]) -> None:
        """With several rewards, warn when their sum is at its highest while the accuracy of the first reward falls."""
        if "reward/accuracy" not in metrics:
            return
        self.rewards.append(metrics["reward/mean"])
        self.accuracies.append(metrics["reward/accuracy"])
        if len(self.rewards) < WINDOW_STEPS:
            return
        reward, accuracy = sum(self.rewards) / WINDOW_STEPS, sum(self.accuracies) / WINDOW_STEPS
        highest = reward >= self.best["reward"]
        self.best = {"reward": max(reward, self.best["reward"]), "accuracy": max(accuracy, self.best["accuracy"])}
        if highest and accuracy < (1 - DRIFT_SHARE) * self.best["accuracy"]:
            parts = {name: value for name, value in metrics.items() if name.endswith("/contribution")}
            self.once(
                "reward-drift",
                f"step {metrics['step']}: the reward is at its highest, {reward:.3g}, and the accuracy has fallen from "
                f"{self.best['accuracy']:.3g} to {accuracy:.3g}; most of it is from "
                f"{max(parts, key=parts.get, default='?')}: is that one being gamed?",
            )

    def once(self, code: str, message: str) -> None:
        """Warn, unless a warning with this code has been given."""
        if code not in self.warned:
            self.warned.add(code)
            warn(message, code)


def check(
    metrics: dict[str, float], max_logprob_gap: float, explain: Callable[[float], tuple[str, str]]
) -> None:  # fmt: skip
    """Raises RunFailed if one step shows that the run cannot be right. Every rank calls it with the reduced metrics.

    explain(max_logprob_gap): (error code, sentence) that say why the gap is too large; see diagnosis.explain_gap.
    """
    step = metrics["step"]
    gap = metrics.get("mismatch/logprob_abs_mean", 0.0)
    stale = metrics.get("mismatch/staleness", 0.0) > 0
    if gap > (max(10 * max_logprob_gap, STALE_GAP) if stale else max_logprob_gap):
        code, why = explain(max_logprob_gap)
        raise RunFailed(
            f"step {step}: trainer and engine disagree by {gap:.3g} per token, over --max-logprob-gap "
            f"{max_logprob_gap:g}; {why}",
            code=code,
        )
