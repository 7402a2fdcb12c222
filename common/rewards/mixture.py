"""Several rewards as one: their weighted sum, and the prompts that leave a step because nobody could grade them.

score = sum_k weight_k * score_k,    acc = acc of the reward that is named first

Rewards.score() grades the responses of a step:

1. begin_step      read the weights again, if they are in a file
2. grade_all       call every reward
3. log             metrics of each reward
4. mix             one score for each response
5. drop_ungraded   prompts with a response without a score leave the step

Some rewards wait for a service or for other processes. EarlyGrading calls them while the engine still samples, and
grade_all() takes its results.
"""

import dataclasses
import itertools
import math
import re
import time
from dataclasses import dataclass
from multiprocessing.pool import AsyncResult, ThreadPool

from common.errors import BadInput, RunFailed, first_of_ranks, raise_together, refuse_all, say
from common.placement import World
from common.rewards.grading import BETTER_GRADERS, NOT_APPLIED, Item, Result, Reward, as_list, parse_gold
from common.rewards.text import normalize_dapo

CALLS_AT_ONCE = 32  # calls of rewards in progress while the engine samples: their threads mostly wait
SETUP_STEPS = 3  # a reward that fails in the first steps of a run was never set up right
MAX_UNGRADED_SHARE = 0.2  # share of the responses of one step
NUMERIC_REWARDS = ("gsm8k", "gsm8k-strict", "dapo-lenient")  # rewards whose reference answers must be numbers
COMPARING_REWARDS = (*NUMERIC_REWARDS, "dapo", "math", "math-flexible")  # rewards that need a reference answer


@dataclass
class Graded:
    """The results of one reward for a batch."""

    results: list[Result]
    seconds: float  # time that the reward took


def grade(name: str, reward: Reward, items: list[Item], lengths: list[int], truncated: list[bool]) -> Graded:
    """Call one reward and check what it returns.

    Raises BadInput on a wrong type or count, NaN or infinity, and on an acc that is not from 0 to 1.
    """
    began = time.perf_counter()
    returned = reward(items, lengths, truncated)
    try:
        results = as_list(returned, len(items))
    except BadInput as wrong:
        raise BadInput(f'reward "{name}": {wrong}') from None
    if len(results) != len(items):
        raise BadInput(f'reward "{name}" returned {len(results)} results for {len(items)} items')
    for row, result in enumerate(results):
        if not isinstance(result, Result):
            found = f"{str(result)[:200]!r}, {type(result).__name__}"
            raise BadInput(f'reward "{name}": row {row} is {found}, expected a Result')
        if result.score is None:
            continue
        if not math.isfinite(result.score):
            raise BadInput(f'reward "{name}": row {row} is {result.score}, for prompt {items[row].prompt[:200]!r}')
        # A reward that knows no right and wrong, such as a model's score, counts as right above 0.
        acc = float(result.score > 0 if result.acc is None else result.acc)
        # NaN fails this comparison, too.
        if not 0 <= acc <= 1:
            raise BadInput(f'reward "{name}": row {row} has the acc {acc}, expected 0 to 1')
        results[row] = dataclasses.replace(result, score=float(result.score), acc=acc)
    return Graded(results, time.perf_counter() - began)


def to_items(prompts: list, responses: list[str], response_ids: list[list[int]], first_group: int = 0) -> list[Item]:
    """N items: each prompt with its G responses, which follow each other. first_group: number of the first prompt."""
    group_size = len(responses) // len(prompts)
    items = []
    for row, (response, ids) in enumerate(zip(responses, response_ids)):
        place = row // group_size
        prompt = prompts[place]
        items.append(Item(prompt.text, response, prompt.answer, prompt.meta, ids, first_group + place))
    return items


class EarlyGrading:
    """Grades the responses to one prompt while the engine samples others, with the rewards that wait.

    engine.generate(done=...) calls it, from any thread, for each prompt whose responses are complete.
    """

    def __init__(self, rewards: dict[str, Reward], prompts: list, tokenizer, reply=None):
        """reply: the environment's answer to a turn, for engine.generate(reply=...). None: responses have one turn."""
        self.rewards = rewards
        self.prompts = prompts
        self.tokenizer = tokenizer
        self.reply = reply
        # Its threads are daemons, so a run that fails can end while they wait for a service.
        self.threads = ThreadPool(CALLS_AT_ONCE) if rewards else None
        self.calls: dict[tuple[str, int], AsyncResult] = {}  # (name of the reward, index of the prompt) -> its Graded

    def __call__(self, index: int, response_ids: list[list[int]], truncated: list[bool]) -> None:
        """Start to grade the responses to prompts[index]. A second call for a prompt replaces the first."""
        # Without a reward that waits, decoding here would only slow the sampling down.
        if not self.rewards:
            return
        responses = self.tokenizer.batch_decode(response_ids, skip_special_tokens=True)
        items = to_items([self.prompts[index]], responses, response_ids, first_group=index)
        lengths = [len(ids) for ids in response_ids]
        for name, reward in self.rewards.items():
            self.calls[name, index] = self.threads.apply_async(grade, (name, reward, items, lengths, truncated))

    def results(self, name: str) -> Graded | None:
        """One reward's results for all prompts, in their order. None if it was not called for each of them.

        Raises what the reward raised.
        """
        # A prompt is missing if the engine does not call done(). Then score() grades all of them.
        calls = [self.calls.get((name, index)) for index in range(len(self.prompts))]
        if None in calls:
            return None
        self.threads.close()
        whole = Graded([], 0.0)
        for call in calls:
            part = call.get()
            whole.results += part.results
            whole.seconds += part.seconds
        return whole


class Rewards:
    """The rewards of a run and their weights."""

    def __init__(self, rewards: dict[str, Reward], weights: dict[str, float], file=None):
        """file: a weights_file.WeightsFile, from which the weights are read again before each step."""
        self.rewards = rewards
        self.weights = weights
        self.file = file
        self.environment = None  # an environments.episodes.Environments
        # Threads call the rewards that wait. The others compute in this process, once sampling is over.
        self.waiting = {name: reward for name, reward in rewards.items() if getattr(reward, "waits", False)}
        self.first_step: int | None = None
        self.step: int | None = None

    def state(self) -> dict:
        """Facts about earlier steps that a resumed run needs."""
        return {"weights": self.weights, "first_step": self.first_step}

    def restore(self, state: dict) -> None:
        """Go on from state(). A run with other rewards only starts from a checkpoint, so it ignores the state."""
        if set(state["weights"]) != set(self.weights):
            return
        self.first_step = state["first_step"]
        # Without a file, the command line of the resumed run has the weights.
        if self.file:
            self.weights = state["weights"]

    def check_answers(self, prompts: list) -> None:
        """Refuse rows whose responses a reward cannot grade, such as those without an answer. Raises BadInput."""
        if "environment" in self.rewards and not self.environment:
            raise BadInput("--reward environment: the run has no --environment")
        for name in self.rewards:
            if name in COMPARING_REWARDS:
                cure = f"which --reward {name} compares with; --columns answer=COLUMN if another column holds it"
                refuse_all([(p.id, f"{no_answer(p)}, {cure}") for p in prompts if p.answer is None])
        for reward in self.rewards.values():
            # Some rewards need more of a row than its answer.
            if hasattr(reward, "fault_of"):
                refuse_all([(p.id, fault) for p in prompts if (fault := reward.fault_of(p))])
        answers = {prompt.answer for prompt in prompts}  # many prompts have the same one
        for name in self.rewards:
            if name in NUMERIC_REWARDS:
                unreadable = {answer for answer in answers if parse_gold(answer) is None}
                fault = f"is not a number, which --reward {name} needs; {BETTER_GRADERS}"
            elif name in ("math", "math-flexible"):
                from common.rewards.math_grading import unreadable_golds

                unreadable = unreadable_golds(answers)
                fault = f"cannot be parsed as LaTeX, which --reward {name} needs; --reward dapo compares texts"
            elif name == "dapo":
                unreadable = {answer for answer in answers if not normalize_dapo(answer)}
                fault = (
                    f"is empty by the rules of --reward {name}, so units alone would be right; give it without units "
                    "and double dollars, or remove the row"
                )
            else:
                continue
            # All at once, and the number of them, because one cure often helps all.
            refuse_all([(p.id, f'gold answer "{p.answer[:60]}" {fault}') for p in prompts if p.answer in unreadable])

    def begin_early(self, prompts: list, tokenizer, step: int = 0, seed: int = 0) -> EarlyGrading:
        """Pass it to engine.generate(done=...) and its reply to reply=..., then to score(early=...)."""
        reply = self.environment.replies(prompts, step, seed) if self.environment else None
        return EarlyGrading(self.waiting, prompts, tokenizer, reply)

    def score(
        self,
        prompts: list,
        responses: list[str],
        rollout,
        world: World,
        step: int | None = None,
        metrics=None,
        early: EarlyGrading | None = None,
    ) -> list[Result]:
        """Grade N responses, G to each of B prompts (group-major). Collective: every rank calls it.

        If a response could not be graded, its prompt leaves the step with all its responses: score 0, acc 0, the reason
        in info["ungraded"], and no token in rollout.response_mask, so no mean, std or loss counts them.
        step: None in an evaluation. metrics: a tracking.Metrics. early: from begin_early().
        Raises BadInput or RunFailed on all ranks.
        """
        if step is not None:
            self.begin_step(step, world)
        grades = self.grade_all(prompts, responses, rollout, world, early)
        if metrics is not None:
            self.log(grades, metrics, world)
        group_size = len(responses) // len(prompts)
        return self.drop_ungraded(self.mix(grades), rollout, group_size, world, step)

    def begin_step(self, step: int, world: World) -> None:
        """Read the weights once a step, so all draws of a step have the same ones. Collective."""
        if self.file and step != self.step:
            self.weights = self.file.refresh(self.weights, world)
        self.step = step
        if self.first_step is None:
            self.first_step = step

    def grade_all(
        self,
        prompts: list,
        responses: list[str],
        rollout,
        world: World,
        early: EarlyGrading | None,
    ) -> dict[str, Graded]:
        """The results of each reward, by name. Collective. Raises the first error of any rank on all ranks."""
        response_ids = rollout.response_ids
        rewards = dict(self.rewards)
        if self.environment:
            # Rewards read what the policy has written, and not the environment's answers.
            responses = ["\n".join(turns.texts) for turns in rollout.episodes]
            response_ids = [list(itertools.compress(turns.ids, turns.sampled)) for turns in rollout.episodes]
            results = self.environment.results(rollout.episodes, world)
            rewards["environment"] = lambda *batch: results
        items = to_items(prompts, responses, response_ids)
        lengths = [len(ids) for ids in rollout.response_ids]
        grades = {}
        error = None
        # In one order on all ranks, and each reward whatever has failed: a sharded model runs collectives.
        for name in self.rewards:
            try:
                graded = early.results(name) if early else None
                grades[name] = graded or grade(name, rewards[name], items, lengths, rollout.truncated.tolist())
            except (BadInput, RunFailed) as failure:
                error = error or failure
        raise_together(error, world.group)
        return grades

    def mix(self, grades: dict[str, Graded]) -> list[Result]:
        """The weighted sum of each row, or None if a reward with a weight has no score. info["parts"]: all scores.

        A reward that does not apply to a response is left out of its sum. The first that applies has its acc.
        """
        mixed = []
        for row in zip(*(graded.results for graded in grades.values())):
            weights = [self.weights[name] for name in grades]
            applied = [(weight, result) for weight, result in zip(weights, row) if NOT_APPLIED not in result.info]
            first = applied[0][1] if applied else row[0]
            # Without the first reward there is no acc, whatever its weight is.
            failed = [result for weight, result in applied if result.score is None and (weight or result is first)]
            info = dict(first.info)
            if failed:
                score = None
                info["ungraded"] = failed[0].info or "no score"
            elif not any(weight for weight, _ in applied):
                score = None
                info[NOT_APPLIED] = next(result.info[NOT_APPLIED] for result in row if NOT_APPLIED in result.info)
                info["ungraded"] = f"no reward with a weight applies: {info[NOT_APPLIED]}"
            else:
                score = sum(weight * result.score for weight, result in applied if weight)
            if len(row) > 1:
                info["parts"] = {name: result.score for name, result in zip(grades, row)}
            mixed.append(dataclasses.replace(first, score=score, info=info))
        return mixed

    def log(self, grades: dict[str, Graded], metrics, world: World) -> None:
        """reward/NAME/{mean, std, weight, contribution}, time/reward/NAME, reward/accuracy of the first. Collective."""
        if self.file:
            metrics.mean("reward/weights_stale", float(bool(self.file.complaint)))
        # With one reward these metrics would repeat reward/mean and its like.
        if len(grades) < 2:
            return
        for name, graded in grades.items():
            prefix = "reward/" + re.sub(r"\W+", "-", name).strip("-")
            scores = [result.score for result in graded.results if result.score is not None]
            total = sum(scores)
            metrics.mean(f"{prefix}/mean", total, len(scores))
            metrics.mean(f"{prefix}/std", std_over_ranks(scores, world) * len(scores), len(scores))
            metrics.mean(f"{prefix}/weight", self.weights[name])
            metrics.mean(f"{prefix}/contribution", self.weights[name] * total, len(scores))
            metrics.sum(f"time/{prefix}", graded.seconds / world.size)  # over the draws of a step, as time/reward
        first = next(iter(grades.values()))
        accs = [result.acc for result in first.results if result.acc is not None]
        metrics.mean("reward/accuracy", sum(accs), len(accs))

    def drop_ungraded(self, results: list[Result], rollout, group_size: int, world: World, step) -> list[Result]:
        """Take prompts with an ungraded response out of the step. Collective: every rank calls it. Raises RunFailed."""
        missing = [row for row, result in enumerate(results) if result.score is None]
        # Where no reward applies, nothing has failed.
        failed = [row for row in missing if NOT_APPLIED not in results[row].info]
        total = world.sum(len(missing))
        failures = world.sum(len(failed))
        count = world.sum(len(results))
        if not total:
            return results
        when = "evaluation" if step is None else f"step {step}"
        # If anything has failed, on whatever rank, say why it did.
        own = failed if failures else missing
        reason = reason_of(results[own[0]]) if own else None
        reason = first_of_ranks(reason, world.group)
        message = f"{when}: {total:.0f} of {count:.0f} responses could not be graded: {reason}"
        if step is not None and total == count and not failures:
            raise RunFailed(f"{message}; at least one reward must apply to some of them", code="reward-failed")
        is_setup = step is not None and step - self.first_step < SETUP_STEPS
        if step is not None and failures and (is_setup or failures > MAX_UNGRADED_SHARE * count):
            allowed = f"at most {MAX_UNGRADED_SHARE:.0%} of a step, and none in the first {SETUP_STEPS} steps of a run"
            raise RunFailed(f"{message}; allowed are {allowed}", code="reward-failed")
        say(message)
        # A group has a baseline only as a whole, so its other responses leave, too.
        for group in {row // group_size for row in missing}:
            rows = range(group * group_size, (group + 1) * group_size)
            reason = next(results[row].info["ungraded"] for row in rows if results[row].score is None)
            for row in rows:
                rollout.response_mask[row] = False
                info = {**results[row].info, "ungraded": reason}
                results[row] = dataclasses.replace(results[row], score=0.0, acc=0.0, info=info)
        return results


def reason_of(result: Result) -> str:
    """Why a response has no score: a text, or a reward's own info, of which "error" says most."""
    why = result.info["ungraded"]
    return str(why.get("error", why) if isinstance(why, dict) else why)


def no_answer(prompt) -> str:
    """What a prompt without a reference answer has in its place."""
    if prompt.meta.get("answer") is not None:
        kind = type(prompt.meta["answer"]).__name__
        return f"the reference answer is a {kind}, and not a text or a number"
    if "answer" in prompt.meta:
        return 'the "answer" is empty'
    if isinstance(prompt.meta.get("solution"), str):
        return 'no "answer", and no \\boxed{} or #### in the "solution"'
    # Every prompt has "prompt" there, whatever its column is called.
    others = [column for column in prompt.meta if column != "prompt"]
    return f'no "answer" (found besides the prompt: {", ".join(others) or "nothing"})'


def std_over_ranks(scores: list[float], world: World) -> float:
    """Population standard deviation of the scores of all ranks. Collective."""
    count = world.sum(len(scores))
    total = world.sum(sum(scores))
    squares = world.sum(sum(score**2 for score in scores))
    if not count:
        return 0.0
    # Rounding may bring the difference of two equal numbers below 0.
    return max(0.0, squares / count - (total / count) ** 2) ** 0.5
