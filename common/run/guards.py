"""Checks of the metrics. They stop a run that cannot be right, and warn of one that looks wrong."""

from collections.abc import Callable

import torch

from common.errors import RunFailed, warn

SILENT_STEPS = 20  # steps in a row in which no response had an advantage
COLLAPSED_SHARE = 0.05  # warn when the entropy is below this share of its mean in the first WINDOW_STEPS
WINDOW_STEPS = 10
TRUNCATED_STEPS = 5  # steps in a row in which every response was cut off
ENOUGH_TOKENS = 1000  # of current weights, on all ranks, for a mean gap
STALE_GAP = 0.5  # the gap allowed for tokens of older weights: it includes what was learned since


def stop_unless_finite(tracker, name: str, value: torch.Tensor) -> None:
    """Stop the run before an optimizer step with this gradient norm would write NaN into the weights. Raises RunFailed.

    value: a norm over all shards, so every rank sees the same value and stops. Collective if it is not finite.
    """
    if torch.isfinite(value):
        return
    responses = tracker.save_refused(tracker.step)  # collective
    message = f"step {tracker.step}: {name} is {float(value)}; this update was not applied{responses}"
    tracker.before_failing()
    raise RunFailed(message, code="non-finite")


class Trends:
    """Checks that look at many steps: has any response had an advantage, does any response end, is there entropy left?

    Every rank calls check() with the reduced metrics, so all ranks come to the same conclusion.
    """

    def __init__(self, had_signal: bool = False):
        """had_signal: whether some advantage was not 0 before the first step that this object sees."""
        self.had_signal = had_signal
        self.steps_without_signal = 0  # in a row
        self.truncated_steps = 0  # in a row
        self.first_entropies: list[float] = []  # at most WINDOW_STEPS of them
        self.warned: set[str] = set()

    @classmethod
    def after(cls, rows: list[dict[str, float]]) -> "Trends":
        """What a resumed run knows from its metrics before the checkpoint. Otherwise a program that restarts it would
        give it SILENT_STEPS more each time. Without rows (another --run-dir) we assume that it was taught before.
        """
        trends = cls(had_signal=not rows)
        for metrics in rows:
            if "advantage/abs_max" in metrics:
                trends.count(metrics)
        return trends

    def check(self, metrics: dict[str, float]) -> None:
        """Raises RunFailed if no step so far had an advantage, or if all responses of many steps in a row were cut off.

        Otherwise it may warn, on rank 0.
        """
        # It is missing before the first step, in SFT and DPO, and in a step that ended in its push.
        if "advantage/abs_max" not in metrics:
            return
        self.count(metrics)
        self.check_signal(metrics)
        self.check_truncation(metrics)
        self.check_entropy(metrics)

    def count(self, metrics: dict[str, float]) -> None:
        """Take a step into account."""
        silent = metrics["advantage/abs_max"] == 0
        self.had_signal = self.had_signal or not silent
        self.steps_without_signal = self.steps_without_signal + 1 if silent else 0
        all_truncated = metrics.get("response/truncated_frac") == 1.0
        self.truncated_steps = self.truncated_steps + 1 if all_truncated else 0
        if "train/entropy" in metrics and len(self.first_entropies) < WINDOW_STEPS:
            self.first_entropies.append(metrics["train/entropy"])

    def check_signal(self, metrics: dict[str, float]) -> None:
        """Warn or stop after SILENT_STEPS steps in which all advantages are 0.

        A run that never had a signal is set up wrongly, so it stops. Later it means that the prompts are solved, or
        that the policy has collapsed.
        """
        if self.steps_without_signal < SILENT_STEPS:
            return
        # There is no mean if nothing could be graded.
        mean = f" (mean reward {metrics['reward/mean']:.3g})" if "reward/mean" in metrics else ""
        message = (
            f"step {metrics['step']}: no response has had an advantage for {self.steps_without_signal} steps{mean}"
        )
        if not self.had_signal:  # in a resumed run more than SILENT_STEPS may have been silent
            raise RunFailed(f"{message}, from the start: look at rollouts/ and at --reward's scores", code="no-signal")
        if self.steps_without_signal % SILENT_STEPS == 0:
            warn(f"{message}: by now, the responses to each prompt may be all right or all wrong", "no-signal")

    def check_truncation(self, metrics: dict[str, float]) -> None:
        """Warn when every response of a step was cut off, and stop after TRUNCATED_STEPS such steps in a row."""
        if self.truncated_steps == 0:
            return
        message = f"step {metrics['step']}: every response hit --max-response-tokens"
        if self.truncated_steps >= TRUNCATED_STEPS:
            before = f"as in the {self.truncated_steps - 1} steps before"
            raise RunFailed(f"{message}, {before}; raise that flag", code="all-truncated")
        self.warn_once("all-truncated", f"{message}; after {TRUNCATED_STEPS} such steps in a row the run stops")

    def check_entropy(self, metrics: dict[str, float]) -> None:
        """Warn when entropy falls below COLLAPSED_SHARE of the entropy of the first steps."""
        entropy = metrics.get("train/entropy")
        if entropy is None:
            return
        start = sum(self.first_entropies) / len(self.first_entropies)
        if entropy < COLLAPSED_SHARE * start:
            self.warn_once(
                "entropy-collapse",
                f"step {metrics['step']}: entropy is {entropy:.3g} nats a token, {start:.3g} in the first steps: "
                "responses are all alike; a lower --learning-rate keeps it up for longer",
            )

    def warn_once(self, code: str, message: str) -> None:
        """Warn, unless a warning with this code has been given."""
        if code not in self.warned:
            self.warned.add(code)
            warn(message, code)


def check_logprob_gap(
    metrics: dict[str, float], max_logprob_gap: float, explain: Callable[[float], tuple[str, str]]
) -> None:
    """Raises RunFailed if trainer and engine disagree in this step. Every rank calls it with the reduced metrics.

    explain(max_logprob_gap): (error code, sentence) that say why the gap is too large; see diagnosis.explain_gap.
    """
    gap, bound = gap_and_bound(metrics, max_logprob_gap)
    if gap > bound:
        code, reason = explain(max_logprob_gap)
        raise RunFailed(
            f"step {metrics['step']}: trainer and engine disagree by {gap:.3g} per token, and --max-logprob-gap allows "
            f"{bound:g}; {reason}",
            code=code,
        )


def gap_and_bound(metrics: dict[str, float], max_logprob_gap: float) -> tuple[float, float]:
    """The mean gap between trainer and engine by which a step is judged, and the largest that it may have."""
    gap = metrics.get("mismatch/logprob_abs_mean", 0.0)
    if metrics.get("mismatch/staleness", 0.0) == 0:
        return gap, max_logprob_gap
    # The gap of tokens of current weights is rounding. The mean of a few is no measure: one of them may be rare.
    rounding = metrics.get("mismatch/rounding_abs_mean", 0.0)
    if rounding > max_logprob_gap and metrics["mismatch/current_tokens"] >= ENOUGH_TOKENS:
        return rounding, max_logprob_gap
    # The gap of tokens of older weights holds what the policy has learned since.
    return gap, max(10 * max_logprob_gap, STALE_GAP)
