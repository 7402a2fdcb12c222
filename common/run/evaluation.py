"""Accuracy of an engine's responses."""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from common.data import sources
from common.data.prompts import Prompt
from common.errors import RunFailed, say
from common.placement import World
from common.rewards.mixture import Rewards
from common.run import outcomes
from common.run.sampling import texts_of

PROGRESS_SECONDS = 60.0  # between two lines about an evaluation that takes long


class Response(NamedTuple):
    """A graded response."""

    text: str
    acc: float
    truncated: bool  # the engine cut it off at the length limit


Graded = list[Response]  # the responses to one prompt
GradedPrompts = list[tuple[Prompt, Graded]]


class Progress:
    """The `done` of engine.generate(): it says once a minute how many prompts have all their responses.

    On a CPU thousands of responses take an hour. vLLM and servers call it for this rank's prompts. The hf engine never
    calls it, and none does with an environment.
    """

    def __init__(self, prompts: int):
        """prompts: of this rank; rank 0 speaks of its own."""
        self.prompts = prompts
        self.answered = set()  # indices: an engine may name a prompt twice
        self.said = time.monotonic()

    def __call__(self, index: int, response_ids: list, truncated: list[bool]) -> None:
        self.answered.add(index)
        now = time.monotonic()
        if now - self.said >= PROGRESS_SECONDS:
            self.said = now
            say(f"evaluation: {len(self.answered):,} of {self.prompts:,} prompts")


@dataclass(frozen=True)
class Evaluator:
    """Samples and grades responses that nobody trains on. Collective: every rank calls every method."""

    engine: Any
    reward: Rewards
    tokenizer: Any
    world: World
    max_tokens: int

    def evaluate(
        self,
        prompts: list[Prompt],
        n: int = 1,
        temperature: float = 0.0,
        seed: int = 0,
        metrics=None,
    ) -> GradedPrompts:
        """n graded responses to each of this rank's prompts, which are every size-th one. Greedy by default.

        Prompts that could not be graded are left out. metrics: gets eval/reward (the mean score) and, with an
        environment, eval/turns. Raises RunFailed if no prompt could be graded.
        """
        prompts_here = prompts[self.world.rank :: self.world.size]
        reply = self.reward.environment.replies(prompts_here, step=0) if self.reward.environment else None
        ids = [prompt.ids for prompt in prompts_here]
        done = Progress(len(ids))
        rollout = self.engine.generate(ids, n, temperature, self.max_tokens, seed, done=done, reply=reply)
        texts = texts_of(rollout, self.tokenizer)
        results = self.reward.score(prompts_here, texts, rollout, self.world)

        # The rows of a prompt are next to each other: 0 ... n - 1 for the first, n ... 2n - 1 for the second.
        cut_off = rollout.truncated.tolist()
        graded = []
        scores = []
        for place, prompt in enumerate(prompts_here):
            rows = range(place * n, (place + 1) * n)
            # score() clears the mask of responses that could not be graded, with all others to the same prompt.
            if rollout.response_mask[rows[0]].any():
                graded.append((prompt, [Response(texts[row], results[row].acc, cut_off[row]) for row in rows]))
                scores += [results[row].score for row in rows]
        if not self.world.sum(len(graded)):
            raise RunFailed(
                f"none of {len(prompts)} held-out prompts could be graded; the line above says why",
                code="reward-failed",
            )
        if metrics is not None:
            metrics.mean("eval/reward", sum(scores), len(scores))
            if rollout.episodes is not None:
                metrics.mean("eval/turns", sum(len(turns.texts) for turns in rollout.episodes), len(rollout.episodes))
        return graded

    def greedy_accuracy(self, prompts: list[Prompt], metrics=None, file: Path | None = None) -> float:
        """Mean acc of the graded prompts of all ranks at temperature 0: the share that is right, if acc is 0 or 1.

        metrics: gets eval/NAME/accuracy as well, if the prompts come from several data sets. file: gets the outcome of
        each graded prompt.
        """
        graded = self.evaluate(prompts, metrics=metrics)
        if file is not None:
            outcomes.write(file, outcomes_of(prompts, graded), self.world)
        if metrics is not None:
            self.log_each(prompts, graded, metrics)
        accuracies = [responses[0].acc for _, responses in graded]
        return self.world.sum(sum(accuracies)) / self.world.sum(len(accuracies))

    def log_each(self, prompts: list[Prompt], graded: GradedPrompts, metrics) -> None:
        """Record the accuracy of each data set, if there are several.

        prompts: those of all ranks. A rank may have none of a data set, and all ranks have to record the same names.
        """
        names = sources.short_names(list(dict.fromkeys(prompt.dataset for prompt in prompts)))
        if len(names) < 2:
            return
        for spec, name in names.items():
            accuracies = [responses[0].acc for prompt, responses in graded if prompt.dataset == spec]
            metrics.mean(f"eval/{name}/accuracy", sum(accuracies), len(accuracies))


def outcomes_of(prompts: list[Prompt], graded: GradedPrompts) -> list[outcomes.Outcome]:
    """The outcome of each graded prompt, whose first response counts. prompts: those of all ranks."""
    # The prompts that could not be graded are missing, so a place in `graded` is not the place of a prompt.
    places = {prompt.key: place for place, prompt in enumerate(prompts)}
    found = []
    for prompt, (response, *_) in graded:
        found.append(
            outcomes.Outcome(
                index=places[prompt.key],
                id=prompt.id,
                dataset=prompt.dataset,
                prompt=prompt.text,
                answer=prompt.answer,
                response=response.text,
                acc=response.acc,
                truncated=response.truncated,
            )
        )
    return found
