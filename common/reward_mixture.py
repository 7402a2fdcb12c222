"""Several rewards as one: the weighted sum, its weights file, and what happens to a row nobody could grade.

score = sum_k weight_k score_k,    acc = acc of the first reward named
"""

import dataclasses
import hashlib
import json
import math
import re
import statistics
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch.distributed as dist

from common.errors import BadInput, RunFailed, raise_together, refuse_all, say, warn
from common.grading import Item, Result, Reward, parse_gold
from common.json_lines import is_number, read_value
from common.math_grading import parse_math_gold
from common.placement import World
from common.reward_ahead import Ahead, graded

CERTAIN_STEPS = 3  # a reward that fails in the first steps of a run was never set up right
DROPPED_AT_MOST = 0.2  # of a step's responses
NUMBERS = ("gsm8k", "gsm8k-strict", "dapo-lenient")  # rewards whose reference answers must be numbers


def read_weights(file: Path, names: set[str] | None) -> dict[str, float]:
    """The weights of a file, checked; names: those it must have. Raises BadInput with file and line."""
    if not file.is_file():
        raise BadInput(f"--reward {file}: file not found")
    content = read_value(file)
    weights = content.get("weights") if isinstance(content, dict) else None
    if not isinstance(weights, dict):
        raise BadInput(f'{file}: expected an object with "weights", an object of names and numbers')
    check_weights(str(file), weights, names)
    return {name: float(weight) for name, weight in weights.items()}


def check_weights(where: str, weights: dict, names: set[str] | None) -> None:
    """Finite numbers, not all 0, and the names the run began with. Raises BadInput."""
    if names is not None and set(weights) != names:
        raise BadInput(f"{where}: has weights of {sorted(weights)}, the run has the rewards {sorted(names)}")
    for name, weight in weights.items():
        if not is_number(weight) or not math.isfinite(weight):
            raise BadInput(f'{where}: the weight of "{name}" is {json.dumps(weight)[:80]}, expected a finite number')
    if not any(weights.values()):
        raise BadInput(f"{where}: no reward has a weight other than 0")


def collected(begun: Ahead | None, name: str, *given) -> tuple[list[Result], float]:
    """graded(), of what was begun while sampling where all of it was."""
    return (begun and begun.results(name)) or graded(name, *given)


class Rewards:
    """The rewards of a run and their weights."""

    def __init__(self, rewards: dict[str, Reward], weights: dict[str, float], file: Path | None, failure: str):
        self.rewards, self.weights, self.file, self.failure = rewards, weights, file, failure
        self.first_step, self.step, self.stale, self.complaint = None, None, False, ""

    def state(self) -> dict:
        """What a run that is resumed must know of the steps before it."""
        return {"weights": self.weights, "first_step": self.first_step}

    def restore(self, state: dict) -> None:
        """Go on from state(), unless these are other rewards: a run of its own that began from a checkpoint."""
        if set(state["weights"]) == set(self.weights):
            self.first_step = state["first_step"]
            self.weights = state["weights"] if self.file else self.weights

    def check_answers(self, prompts: list) -> None:
        """Refuse reference answers the first reward cannot grade against, naming their lines. Raises BadInput."""
        name = next(iter(self.rewards))
        if name in NUMBERS:
            bad = [(prompt, "is not a number") for prompt in prompts if parse_gold(prompt.answer) is None]
        elif name.startswith("math"):
            bad = [(prompt, "cannot be parsed as LaTeX") for prompt in prompts if not parse_math_gold(prompt.answer)]
        else:
            return
        refuse_all([f'{prompt.id}: gold answer "{prompt.answer[:60]}" {what}' for prompt, what in bad])

    def refresh(self, world: World) -> None:
        """Read the weights file again, on rank 0 alone, for all ranks; a bad file keeps the weights there are."""
        found = [self.weights, ""]
        if world.is_main:
            try:
                found[0] = read_weights(self.file, set(self.rewards))
            except BadInput as error:
                found[1] = str(error)
        dist.broadcast_object_list(found, src=0, group=world.group)
        weights, complaint = found
        if complaint and complaint != self.complaint:
            warn(f"{complaint}; the weights stay {self.weights}", "reward-weights")
        if weights != self.weights:
            digest = hashlib.sha256(json.dumps(weights).encode()).hexdigest()[:12]
            say(f"reward weights are now {weights} ({self.file}, sha256 {digest})")
        self.weights, self.stale, self.complaint = weights, bool(complaint), complaint

    def ahead(self, prompts: list, tokenizer) -> Ahead:
        """For engine.generate(done=...), then for score(): rewards that wait for others begin while it samples."""
        return Ahead(self.rewards, prompts, tokenizer)

    def score(
        self, prompts: list, responses: list[str], rollout, world: World, step=None, log=None,
        begun: Ahead | None = None,
    ) -> list[Result]:  # fmt: skip
        """Grade N responses, G to each of B prompts (group-major). Collective: every rank calls it.

        A prompt one of whose responses could not be graded leaves the step, with all its responses: score 0, acc 0,
        why in info["ungraded"], and no token left in rollout.response_mask; so no mean, std or loss knows of it.
        step: None in an evaluation; log: Tracker.add; begun: what ahead() gave. Raises BadInput or RunFailed, on all
        ranks together.
        """
        if self.file and step is not None and step != self.step:
            self.refresh(world)  # once a step: all draws of a step are weighed alike
        if step is not None:
            self.step, self.first_step = step, step if self.first_step is None else self.first_step
        group_size = len(responses) // len(prompts)
        asked = [prompt for prompt in prompts for _ in range(group_size)]
        items = [
            Item(prompt.text, response, prompt.answer, prompt.meta, ids)
            for prompt, response, ids in zip(asked, responses, rollout.response_ids)
        ]
        given = (items, [len(ids) for ids in rollout.response_ids], rollout.truncated.tolist())
        parts, error = {}, None
        with ThreadPoolExecutor(len(self.rewards)) as threads:
            waiting = {
                name: threads.submit(collected, begun, name, reward, *given)
                for name, reward in self.rewards.items()
                if getattr(reward, "waits", False)  # for a service or for other processes
            }
            for name, reward in self.rewards.items():  # models here: their collectives need one order on all ranks
                try:
                    parts[name] = waiting[name].result() if name in waiting else graded(name, reward, *given)
                except (BadInput, RunFailed) as failed:
                    error = error or failed
        raise_together(error, world.group)
        if log is not None:
            self.log(parts, log)
        return self.drop_ungraded(self.mix(parts, len(items)), rollout, group_size, world, step)

    def mix(self, parts: dict[str, tuple[list[Result], float]], count: int) -> list[Result]:
        """The weighted sum of each row, with the raw scores in info["parts"]; None if a part that counts is None."""
        mixed = []
        for row in range(count):
            results = {name: part[row] for name, (part, _) in parts.items()}
            first = next(iter(results.values()))
            counted = {name: result for name, result in results.items() if self.weights[name]}
            failed = {name: result for name, result in counted.items() if result.score is None}
            score, info = None, first.info
            if failed or first.score is None:  # without the first there is no acc
                info = {**info, "ungraded": next(iter(failed.values()), first).info or "no score"}
            else:
                score = sum(self.weights[name] * result.score for name, result in counted.items())
            if len(results) > 1:
                info = {**info, "parts": {name: result.score for name, result in results.items()}}
            mixed.append(dataclasses.replace(first, score=score, info=info))
        return mixed

    def log(self, parts: dict[str, tuple[list[Result], float]], log: Callable) -> None:
        """reward/NAME/mean, /std, /weight, /contribution, time/reward/NAME (seconds), accuracy of several rewards."""
        for name, (results, seconds) in parts.items() if len(parts) > 1 else ():
            short = re.sub(r"\W+", "-", name).strip("-")
            scores = [result.score for result in results if result.score is not None]
            log(f"reward/{short}/mean", sum(scores), len(scores))
            log(f"reward/{short}/std", statistics.pstdev(scores or [0.0]) * len(scores), len(scores))
            log(f"reward/{short}/weight", self.weights[name])
            log(f"reward/{short}/contribution", self.weights[name] * sum(scores), len(scores))
            log(f"time/reward/{short}", seconds)
        if len(parts) > 1:
            graded = [result.acc for result in next(iter(parts.values()))[0] if result.acc is not None]
            log("reward/accuracy", sum(graded), len(graded))
        if self.file:
            log("reward/weights_stale", float(self.stale))

    def drop_ungraded(self, results: list[Result], rollout, group_size: int, world: World, step) -> list[Result]:
        """--reward-failure, for rows whose score is None. Collective: every rank calls it. Raises RunFailed."""
        missing = [row for row, result in enumerate(results) if result.score is None]
        total, rows = world.sum(len(missing)), world.sum(len(results))
        if not total:
            return results
        reason = f": {results[missing[0]].info['ungraded']}" if missing else ""
        said = f"step {step}: {total:.0f} of {rows:.0f} responses could not be graded{reason}"
        if step is not None:
            if self.failure == "abort":
                raise RunFailed(f"{said}; --reward-failure abort", code="reward-failed")
            if self.failure == "drop" and step - self.first_step < CERTAIN_STEPS:
                raise RunFailed(
                    f"{said}; in the first {CERTAIN_STEPS} steps of a run that is an error in its set-up",
                    code="reward-failed",
                )
            if self.failure == "drop" and total > DROPPED_AT_MOST * rows:
                raise RunFailed(
                    f"{said}; --reward-failure drop leaves out at most {DROPPED_AT_MOST:.0%} of a step",
                    code="reward-failed",
                )
        say(said)
        if self.failure == "zero":
            return [dataclasses.replace(r, score=0.0, acc=0.0) if r.score is None else r for r in results]
        for group in {row // group_size for row in missing}:
            rows = slice(group * group_size, (group + 1) * group_size)
            rollout.response_mask[rows] = False
            why = {"ungraded": next(r.info["ungraded"] for r in results[rows] if r.score is None)}
            results[rows] = [dataclasses.replace(r, score=0.0, acc=0.0, info={**r.info, **why}) for r in results[rows]]
        return results
