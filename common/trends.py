"""What only several steps together show: a reward that teaches nothing, entropy that is gone, a reward being gamed."""

from collections import deque

from common.errors import RunFailed, warn

SILENT_STEPS = 20  # steps in a row without one group of unequal rewards
COLLAPSED = 0.05  # of the entropy of the first steps
WINDOW = 10  # steps that are averaged
DRIFT = 0.1  # by so much of its best the accuracy falls while the reward is at its highest


class Trends:
    """Every rank feeds it the reduced metrics of each step: all come to the same conclusion."""

    def __init__(self, heard: bool = False):
        """heard: whether there have been groups of unequal rewards before, in the run that is resumed."""
        self.silent, self.heard = 0, heard
        self.entropies: list[float] = []  # of the first steps
        self.rewards, self.accuracies = deque(maxlen=WINDOW), deque(maxlen=WINDOW)
        self.best = {"reward": -float("inf"), "accuracy": -float("inf")}
        self.warned: set[str] = set()

    def check(self, metrics: dict[str, float]) -> None:
        """Raises RunFailed where no step ever had a signal; else warns, on rank 0."""
        if "reward/mean" in metrics:  # a step, not an evaluation
            self.check_signal(metrics)
            self.check_entropy(metrics)
            self.check_drift(metrics)

    def check_signal(self, metrics: dict[str, float]) -> None:
        """Groups of equal rewards teach nothing; nor does a step without any gradient."""
        if metrics.get("group/zero_std_frac", 0.0) < 1 and "train/grad_norm" in metrics:
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
            raise RunFailed(f"{said}, from the start: look at rollouts/ and at what --reward gives", code="no-signal")
        warn(f"{said}: there is nothing more to learn from these prompts", "no-signal")

    def check_entropy(self, metrics: dict[str, float]) -> None:
        entropy = metrics.get("train/entropy")
        if entropy is None:
            return
        if len(self.entropies) < WINDOW:
            self.entropies.append(entropy)
        start = sum(self.entropies) / len(self.entropies)
        if entropy < COLLAPSED * start:
            self.once(
                "entropy-collapse",
                f"step {metrics['step']}: entropy is {entropy:.3g} nats a token, {start:.3g} in the first steps: "
                "responses are all alike; lower --learning-rate, add --kl-coef, or raise --clip-high",
            )

    def check_drift(self, metrics: dict[str, float]) -> None:
        """Of several rewards: their sum is at its highest while the first one's accuracy falls."""
        if "reward/accuracy" not in metrics:
            return
        self.rewards.append(metrics["reward/mean"])
        self.accuracies.append(metrics["reward/accuracy"])
        if len(self.rewards) < WINDOW:
            return
        reward, accuracy = sum(self.rewards) / WINDOW, sum(self.accuracies) / WINDOW
        highest = reward >= self.best["reward"]
        self.best = {"reward": max(reward, self.best["reward"]), "accuracy": max(accuracy, self.best["accuracy"])}
        if highest and accuracy < (1 - DRIFT) * self.best["accuracy"]:
            parts = {name: value for name, value in metrics.items() if name.endswith("/contribution")}
            self.once(
                "reward-drift",
                f"step {metrics['step']}: the reward is at its highest, {reward:.3g}, and the accuracy has fallen from "
                f"{self.best['accuracy']:.3g} to {accuracy:.3g}; most of it is from "
                f"{max(parts, key=parts.get, default='?')}: is that one being gamed?",
            )

    def once(self, code: str, message: str) -> None:
        if code not in self.warned:
            self.warned.add(code)
            warn(message, code)
