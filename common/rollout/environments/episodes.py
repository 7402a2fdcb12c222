"""The trainer's side of an environment: it answers the engine's turns with token ids, and keeps count.

The next prompt is prompt ids + sampled ids + suffix ids (common/data/suffix.py), and never text that was decoded and
encoded again.
"""

import dataclasses
import itertools
import threading
import time
import zlib
from collections import Counter

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from common.data.prompts import Prompt, Source
from common.data.suffix import Suffix
from common.errors import BadInput, RunFailed, warn
from common.placement import World
from common.rewards.grading import Result
from common.rewards.mixture import Rewards
from common.rewards.workers import Failure
from common.rollout.environments import check
from common.rollout.environments.tools import format_of
from common.rollout.environments.workers import WorkerPool
from common.rollout.turns import Reply, Turns

MAX_FAILED_SHARE = 0.5  # share of a step's episodes: above it the environment is broken, and not the policy's turns


class Environments:
    """The environment of a run on this rank, with one episode for each response."""

    def __init__(self, spec: str, tokenizer: PreTrainedTokenizerBase, stop_token_ids: list[int]):
        """Starts one worker to see whether the class can be loaded. Raises BadInput."""
        if complaint := check(spec):
            raise BadInput(complaint)
        self.spec, self.tokenizer, self.stop_token_ids = spec, tokenizer, stop_token_ids
        self.pool = WorkerPool(spec, format_of(tokenizer.chat_template) or "plain")
        self.facts = self.pool.facts
        if self.facts.tools and not format_of(tokenizer.chat_template):
            raise BadInput(f"--model {tokenizer.name_or_path}: the form of its calls of tools is not known here")
        self.suffix = Suffix(tokenizer, stop_token_ids, self.facts.role)
        self.numbers = itertools.count()
        self.tokenizing = threading.Lock()  # replies come from many threads
        self.reported: set[str] = set()  # kinds of failures that were reported
        self.first_failure = ""

    def replies(self, prompts: list[Prompt], step: int, seed: int = 0) -> Reply:
        """The `reply` of engine.generate() for these prompts. seed: of the run."""
        problems = [problem_of(prompt, step, seed) for prompt in prompts]
        return lambda index, turns: self.reply(problems[index], turns)

    def reply(self, problem: dict, turns: Turns) -> list[int] | None:
        """The ids that follow the latest turn; None ends the episode, and turns.result has its score.

        A turn that the length limit cut off is the last one. So is a turn whose observation leaves no room for a token.
        It raises nothing, because other ranks would wait for this one: results() says on all ranks what has failed.
        """
        turns.number = next(self.numbers) if turns.number is None else turns.number
        began, latest = time.perf_counter(), turns.latest
        ended = latest[-1] in self.stop_token_ids
        with self.tokenizing:
            turns.said.append(self.tokenizer.decode(latest[:-1] if ended else latest, skip_special_tokens=True))
        answer = self.pool.ask(turns.number, problem, turns.said, turns.truncated)
        suffix = None
        if not isinstance(answer, Failure) and answer["observation"] is not None:
            heard = answer["observation"]
            heard = [heard] if isinstance(heard, str) else heard
            heard = [text.encode("utf-8", "replace").decode() for text in heard]
            try:
                with self.tokenizing:
                    suffix = self.suffix.ids(heard)
            except (BadInput, TemplateError) as error:  # several messages, where the template wants turns to alternate
                answer = Failure("wrong", f"observed what the chat template refuses: {error}")
            if suffix is not None and len(suffix) >= turns.room:
                suffix, answer = None, self.pool.ask(turns.number, problem, turns.said, True)
                turns.truncated = True
            elif suffix is not None:
                turns.heard.append("\n".join(heard))
        turns.seconds += time.perf_counter() - began
        if suffix is None:
            self.end(turns, answer)
        return suffix

    def end(self, turns: Turns, answer: dict | Failure) -> None:
        """Keep the score of an episode. One whose environment failed has `failed_score`, and a code in its info."""
        if isinstance(answer, Failure):
            turns.facts = {"calls": 0, "errors": 0, "failed": answer.kind}
            turns.result = Result(self.facts.failed_score, 0.0, None, {"environment": answer.kind})
            if answer.kind not in self.reported:
                self.reported.add(answer.kind)
                shown = f"after {turns.said[-1][:200]!r}: {answer.message[-2000:]}"
                self.first_failure = self.first_failure or f"{answer.kind} {shown}"
                warn(f'environment "{self.spec}" {answer.kind} {shown}', "environment-failed")
            return
        turns.facts = {"calls": answer["calls"], "errors": answer["errors"]}
        if answer["result"] is not None:
            turns.result = Result(*answer["result"])

    def results(self, episodes: list[Turns], world: World) -> list[Result]:
        """The score of each episode. Collective. Raises RunFailed if more than half of all ranks' episodes failed."""
        kinds = Counter(turns.facts["failed"] for turns in episodes if "failed" in turns.facts)
        failed, count = world.sum(kinds.total()), world.sum(len(episodes))
        if failed > MAX_FAILED_SHARE * count:
            said = f'environment "{self.spec}" failed in {failed:.0f} of {count:.0f} episodes'
            here = f", on this rank {dict(kinds)}: {self.first_failure}" if kinds else ""
            raise RunFailed(said + here, code="environment-failed")
        return [turns.result for turns in episodes]

    def log(self, episodes: list[Turns], metrics) -> None:
        """environment/{turns, calls, errors, failed_frac}, and time/environment: seconds that an episode waited."""
        count = len(episodes)
        metrics.mean("environment/turns", sum(len(turns.said) for turns in episodes), count)
        metrics.mean("environment/calls", sum(turns.facts["calls"] for turns in episodes), count)
        metrics.mean("environment/errors", sum(turns.facts["errors"] for turns in episodes), count)
        metrics.mean("environment/failed_frac", sum("failed" in turns.facts for turns in episodes), count)
        metrics.mean("time/environment", sum(turns.seconds for turns in episodes), count)

    def try_out(self, prompt: Prompt) -> None:
        """Play an episode of one empty turn before a model is loaded. Raises BadInput if the environment fails."""
        answer = self.pool.ask(next(self.numbers), problem_of(prompt, 0), [""], True)
        if isinstance(answer, Failure):
            said = f"after an empty turn to the prompt {prompt.id}: {answer.message}"
            raise BadInput(f"--environment {self.spec}: {answer.kind} {said}")


def attach(spec: str, reward: Rewards, source: Source, tokenizer, stop_token_ids: list[int]) -> Source:
    """Give the reward the environment of --environment. Returns the source, whose prompts now show its tools.

    Raises BadInput if the environment cannot be loaded, or if it has no score() and --reward names no other.
    """
    reward.environment = Environments(spec, tokenizer, stop_token_ids)
    facts = reward.environment.facts
    if "environment" in reward.rewards and not facts.scores:
        raise BadInput(f"--environment {spec}: the class has no score(); name a --reward")
    return dataclasses.replace(source, tools=facts.tools)


def problem_of(prompt: Prompt, step: int, seed: int = 0) -> dict:
    """The fields of Problem. Its seed is the same for all responses to a prompt in a step of a run with this seed."""
    drawn = zlib.crc32(f"{prompt.id}/{step}".encode(), seed)
    return {"prompt": prompt.text, "answer": prompt.answer, "meta": prompt.meta, "seed": drawn}
