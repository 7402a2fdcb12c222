"""Several rewards as one: their weighted sum, and the prompts that leave a step because nobody could grade them.

score = sum_k weight_k * score_k,    acc = acc of the reward that is named first
"""

import dataclasses
import itertools
import math
import re
import time
from concurrent.futures import Future, ThreadPoolExecutor

from common.errors import BadInput, RunFailed, raise_together, refuse_all, say
from common.placement import World
from common.rewards.grading import Item, Result, Reward, parse_gold

GradedPart = tuple[list[Result], float]  # results of one reward, and the seconds that it took
CALLS_AT_ONCE = 16  # calls of one reward in progress at the same time: their threads mostly wait
SETUP_STEPS = 3  # a reward that fails in the first steps of a run was never set up right
MAX_UNGRADED_SHARE = 0.2  # share of the responses of one step
NUMERIC_REWARDS = ("gsm8k", "gsm8k-strict", "dapo-lenient")  # rewards whose reference answers must be numbers
COMPARING_REWARDS = (*NUMERIC_REWARDS, "dapo", "math", "math-flexible")  # rewards that need a reference answer


def grade(name: str, reward: Reward, items: list[Item], lengths: list[int], truncated: list[bool]) -> GradedPart:
    """Call one reward and check what it returns. Raises BadInput on a wrong count, NaN or infinity."""
    began = time.perf_counter()
    results = list(reward(items, lengths, truncated))
    if len(results) != len(items):
        raise BadInput(f'reward "{name}" returned {len(results)} results for {len(items)} items')
    for row, result in enumerate(results):
        if result.score is not None:
            if not math.isfinite(result.score):
                raise BadInput(f'reward "{name}": row {row} is {result.score}, for prompt {items[row].prompt[:200]!r}')
            acc = float(result.score > 0 if result.acc is None else result.acc)
            results[row] = dataclasses.replace(result, score=float(result.score), acc=acc)
    return results, time.perf_counter() - began


class Ahead:
    """Grades the responses to one prompt while the engine samples others, with the rewards that wait.

    engine.generate(done=...) calls it, from any thread, for each prompt whose responses are complete.
    """

    def __init__(self, rewards: dict[str, Reward], prompts: list, tokenizer, reply=None):
        """reply: what answers a turn, for engine.generate(reply=...); None: responses have one turn."""
        self.reply = reply
        self.rewards, self.prompts, self.tokenizer = rewards, prompts, tokenizer
        self.threads = {name: ThreadPoolExecutor(CALLS_AT_ONCE, f"grading {name}") for name in rewards}
        self.futures: dict[str, dict[int, Future]] = {name: {} for name in rewards}  # by index of the prompt

    def __call__(self, index: int, response_ids: list[list[int]], truncated: list[bool]) -> None:
        """Start to grade the responses to prompts[index]. A second call for a prompt replaces the first."""
        if not self.rewards:
            return
        prompt, texts = self.prompts[index], self.tokenizer.batch_decode(response_ids, skip_special_tokens=True)
        items = [Item(prompt.text, text, prompt.answer, prompt.meta, ids) for text, ids in zip(texts, response_ids)]
        lengths = [len(ids) for ids in response_ids]
        for name, reward in self.rewards.items():
            self.futures[name][index] = self.threads[name].submit(grade, name, reward, items, lengths, truncated)

    def results(self, name: str) -> GradedPart | None:
        """Results for all prompts in their order; None if any prompt was not started. Raises what the reward raised."""
        futures = self.futures.get(name, {})
        if len(futures) < len(self.prompts):
            return None
        self.threads[name].shutdown(wait=False)
        parts = [futures[index].result() for index in range(len(self.prompts))]
        return [result for results, _ in parts for result in results], sum(seconds for _, seconds in parts)


class Rewards:
    """The rewards of a run and their weights."""

    def __init__(self, rewards: dict[str, Reward], weights: dict[str, float], file=None):
        """file: a weights_file.WeightsFile, from which the weights are read again before each step."""
        self.rewards, self.weights, self.file = rewards, weights, file
        self.environment = None  # an environments.episodes.Environments
        # Rewards that wait for a service or for other processes. Threads call them; models run where score() does.
        self.waiting = {name: reward for name, reward in rewards.items() if getattr(reward, "waits", False)}
        self.first_step = self.step = None

    def state(self) -> dict:
        """Facts about earlier steps that a resumed run needs."""
        return {"weights": self.weights, "first_step": self.first_step}

    def restore(self, state: dict) -> None:
        """Go on from state(). A run with other rewards only starts from a checkpoint, so it ignores the state."""
        if set(state["weights"]) == set(self.weights):
            self.first_step = state["first_step"]
            self.weights = state["weights"] if self.file else self.weights

    def check_answers(self, prompts: list) -> None:
        """Refuse reference answers that are missing or that the first reward cannot read. Raises BadInput."""
        if "environment" in self.rewards and not self.environment:
            raise BadInput("--reward environment: the run has no --environment")
        for name in set(self.rewards).intersection(COMPARING_REWARDS):
            cure = f"which --reward {name} compares with; --columns answer=COLUMN if another column holds it"
            refuse_all(
                [f'{p.id}: no "answer" (found: {", ".join(p.meta)}), {cure}' for p in prompts if p.answer is None]
            )
        name, unreadable, fault = next(iter(self.rewards)), set(), "is not a number"
        answers = {prompt.answer for prompt in prompts}  # many prompts have the same one
        if name in NUMERIC_REWARDS:
            unreadable = {answer for answer in answers if parse_gold(answer) is None}
        elif name.startswith("math"):
            from common.rewards.math_grading import unreadable_golds

            unreadable, fault = unreadable_golds(answers), "cannot be parsed as LaTeX"
        refuse_all([f'{p.id}: gold answer "{p.answer[:60]}" {fault}' for p in prompts if p.answer in unreadable])

    def ahead(self, prompts: list, tokenizer, step: int = 0, seed: int = 0) -> Ahead:
        """Pass it to engine.generate(done=...) and its reply to reply=..., then to score(begun=...)."""
        reply = self.environment and self.environment.replies(prompts, step, seed)
        return Ahead(self.waiting, prompts, tokenizer, reply)

    def score(
        self, prompts: list, responses: list[str], rollout, world: World, step: int | None = None,
        metrics=None, begun: Ahead | None = None,
    ) -> list[Result]:  # fmt: skip
        """Grade N responses, G to each of B prompts (group-major). Collective: every rank calls it.

        If a response could not be graded, its prompt leaves the step with all its responses: score 0, acc 0, the reason
        in info["ungraded"], and no token in rollout.response_mask, so that no mean, std or loss counts them.
        step: None in an evaluation. metrics: tracking.Metrics. begun: from ahead(). Raises BadInput or RunFailed on all
        ranks.
        """
        if step is not None:
            if self.file and step != self.step:  # once a step: all draws of a step have the same weights
                self.weights = self.file.refresh(self.weights, world)
            self.step, self.first_step = step, step if self.first_step is None else self.first_step
        group_size = len(responses) // len(prompts)
        repeated = [prompt for prompt in prompts for _ in range(group_size)]
        sampled, rewards = rollout.response_ids, self.rewards
        if self.environment:  # Rewards read what the policy has written, and not what it was answered.
            responses = ["\n".join(turns.said) for turns in rollout.episodes]
            sampled = [list(itertools.compress(turns.ids, turns.sampled)) for turns in rollout.episodes]
            results = self.environment.results(rollout.episodes, world)
            rewards = {**rewards, "environment": lambda *batch: results}
        rows = zip(repeated, responses, sampled)
        items = [Item(prompt.text, response, prompt.answer, prompt.meta, ids) for prompt, response, ids in rows]
        batch = items, [len(ids) for ids in rollout.response_ids], rollout.truncated.tolist()
        call = lambda name: (begun and begun.results(name)) or grade(name, rewards[name], *batch)
        parts, error = {}, None
        with ThreadPoolExecutor(len(self.rewards)) as threads:
            futures = {name: threads.submit(call, name) for name in self.waiting}
            for name in self.rewards:  # the collectives of models need one order on all ranks
                try:
                    parts[name] = futures[name].result() if name in futures else call(name)
                except (BadInput, RunFailed) as failure:
                    error = error or failure
        raise_together(error, world.group)
        if metrics is not None:
            self.log(parts, metrics, world)
        return self.drop_ungraded(self.mix(parts), rollout, group_size, world, step)

    def mix(self, parts: dict[str, GradedPart]) -> list[Result]:
        """The weighted sum of each row, or None if a reward with a weight has no score. info["parts"]: all scores."""
        mixed = []
        for row in zip(*(results for results, _ in parts.values())):
            results = dict(zip(parts, row))
            counted = {name: result for name, result in results.items() if self.weights[name]}
            # Without the first reward there is no acc, whatever its weight is.
            failed = [result for result in (*counted.values(), row[0]) if result.score is None]
            score = None if failed else sum(self.weights[name] * result.score for name, result in counted.items())
            info = {**row[0].info, "ungraded": failed[0].info or "no score"} if failed else row[0].info
            if len(results) > 1:
                info = {**info, "parts": {name: result.score for name, result in results.items()}}
            mixed.append(dataclasses.replace(row[0], score=score, info=info))
        return mixed

    def log(self, parts: dict[str, GradedPart], metrics, world: World) -> None:
        """reward/NAME/{mean, std, weight, contribution}, time/reward/NAME, reward/accuracy of the first. Collective."""
        if self.file:
            metrics.mean("reward/weights_stale", float(bool(self.file.complaint)))
        if len(parts) < 2:
            return
        for name, (results, seconds) in parts.items():
            short = re.sub(r"\W+", "-", name).strip("-")
            scores = [result.score for result in results if result.score is not None]
            metrics.mean(f"reward/{short}/mean", sum(scores), len(scores))
            count, total, squares = map(world.sum, (len(scores), sum(scores), sum(score**2 for score in scores)))
            variance = max(0.0, squares / count - (total / count) ** 2) if count else 0.0  # over all ranks
            metrics.mean(f"reward/{short}/std", variance**0.5 * len(scores), len(scores))
            metrics.mean(f"reward/{short}/weight", self.weights[name])
            metrics.mean(f"reward/{short}/contribution", self.weights[name] * sum(scores), len(scores))
            metrics.sum(f"time/reward/{short}", seconds / world.size)  # a sum over the draws of a step, as time/reward
        accs = [result.acc for result in next(iter(parts.values()))[0] if result.acc is not None]
        metrics.mean("reward/accuracy", sum(accs), len(accs))

    def drop_ungraded(self, results: list[Result], rollout, group_size: int, world: World, step) -> list[Result]:
        """Take prompts with an ungraded response out of the step. Collective: every rank calls it. Raises RunFailed."""
        missing = [row for row, result in enumerate(results) if result.score is None]
        total, count = world.sum(len(missing)), world.sum(len(results))
        if not total:
            return results
        reason = f": {results[missing[0]].info['ungraded']}" if missing else ""
        message = f"{total:.0f} of {count:.0f} responses could not be graded{reason}"
        message = f"{'evaluation' if step is None else f'step {step}'}: {message}"
        if step is not None and (step - self.first_step < SETUP_STEPS or total > MAX_UNGRADED_SHARE * count):
            allowed = f"at most {MAX_UNGRADED_SHARE:.0%} of a step, and none in the first {SETUP_STEPS} steps of a run"
            raise RunFailed(f"{message}; allowed are {allowed}", code="reward-failed")
        say(message)
        for group in {row // group_size for row in missing}:
            rows = slice(group * group_size, (group + 1) * group_size)
            rollout.response_mask[rows] = False
            why = {"ungraded": next(r.info["ungraded"] for r in results[rows] if r.score is None)}
            results[rows] = [dataclasses.replace(r, score=0.0, acc=0.0, info={**r.info, **why}) for r in results[rows]]
        return results
