"""The trainer's side of an environment: it answers the engine's turns with token ids, and counts what happens.

The next prompt is prompt ids + sampled ids + suffix ids (common/data/suffix.py), and never text that was decoded and
encoded again.
"""

import dataclasses
import functools
import itertools
import threading
import time
import zlib
from collections import Counter

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from common.data.prompts import Prompt, Source
from common.data.suffix import Suffix
from common.errors import BadInput, RunFailed, first_of_ranks, warn
from common.placement import World
from common.processes.pool import Failure
from common.rewards.grading import Result
from common.rewards.mixture import Rewards
from common.rollout.environments import check
from common.rollout.environments.tools import format_of
from common.rollout.environments.workers import EnvironmentPool
from common.rollout.turns import Reply, Turns

# Share of a step's episodes. If more of them fail, the environment is broken, and not the policy's turns.
MAX_FAILED_SHARE = 0.5


class Environments:
    """The environment of a run on this rank, with one episode for each response."""

    def __init__(self, spec: str, tokenizer: PreTrainedTokenizerBase, stop_token_ids: list[int]):
        """Starts one worker to see whether the class can be loaded. Raises BadInput."""
        check(spec)
        self.spec = spec
        self.tokenizer = tokenizer
        self.stop_token_ids = stop_token_ids
        call_format = format_of(tokenizer.chat_template)
        self.pool = EnvironmentPool(spec, call_format or "plain")
        self.info = self.pool.info
        if self.info.tools and not call_format:
            raise BadInput(f"--model {tokenizer.name_or_path}: the form of its calls of tools is not known here")
        self.suffix = Suffix(tokenizer, stop_token_ids, self.info.role)
        self.episode_numbers = itertools.count()
        # Replies come from many threads, and a tokenizer serves one at a time.
        self.tokenizing = threading.Lock()
        self.first_failures: dict[str, str] = {}  # kind of a failure -> the first one

    def replies(self, prompts: list[Prompt], step: int, seed: int = 0) -> Reply:
        """The `reply` of engine.generate() for these prompts. seed: of the run."""
        problems = [problem_of(prompt, step, seed) for prompt in prompts]

        def reply(index: int, turns: Turns) -> list[int] | None:
            return self.reply(problems[index], turns)

        return reply

    def reply(self, problem: dict, turns: Turns) -> list[int] | None:
        """The ids that follow the latest turn; None ends the episode, and turns.result has its score.

        A turn that the length limit cut off is the last one. So is a turn whose observation leaves no room for a token.
        It raises nothing, because other ranks would wait for this one: results() says on all ranks what has failed.
        """
        began = time.perf_counter()
        if turns.number is None:
            turns.number = next(self.episode_numbers)
        turns.texts.append(self.latest_text(turns))
        ask = functools.partial(self.pool.ask, turns.number, problem, turns.texts)
        answer = ask(turns.truncated)
        suffix = None
        if not isinstance(answer, Failure) and answer["observation"] is not None:
            observations = messages_of(answer["observation"])
            try:
                with self.tokenizing:
                    suffix = self.suffix.ids(observations)
            except (BadInput, TemplateError) as error:
                # For example several messages, where the template wants the roles to alternate.
                ask(True, again=True)  # or the worker would keep the environment open
                answer = Failure("wrong", f"observed what the chat template refuses: {error}")
        # No room for another turn: ask for the score of the turns so far.
        if suffix is not None and len(suffix) >= turns.room:
            suffix = None
            turns.truncated = True
            answer = ask(True, again=True)
        if suffix is None:
            self.end(turns, answer)
        else:
            turns.observations.append("\n".join(observations))
        turns.seconds += time.perf_counter() - began
        return suffix

    def latest_text(self, turns: Turns) -> str:
        """The latest turn without its end token and other special tokens."""
        ids = turns.latest
        if ids[-1] in self.stop_token_ids:
            ids = ids[:-1]
        with self.tokenizing:
            return self.tokenizer.decode(ids, skip_special_tokens=True)

    def end(self, turns: Turns, answer: dict | Failure) -> None:
        """Note the score of an episode. One whose environment failed has `failed_score`, and a code in its info."""
        if not isinstance(answer, Failure):
            turns.calls = answer["calls"]
            turns.errors = answer["errors"]
            if answer["result"] is not None:
                turns.result = Result(*answer["result"])
            return
        turns.failure = answer.kind
        turns.result = Result(self.info.failed_score, 0.0, None, {"environment": answer.kind})
        # One warning for each kind: a broken environment would fill the terminal.
        if answer.kind not in self.first_failures:
            message = f"{answer.kind} after {turns.texts[-1][:200]!r}: {answer.message[-2000:]}"
            self.first_failures[answer.kind] = message
            warn(f'environment "{self.spec}" {message}', "environment-failed")

    def results(self, episodes: list[Turns], world: World) -> list[Result]:
        """The score of each episode. Collective. Raises RunFailed if more than half of all ranks' episodes failed."""
        kinds = Counter(turns.failure for turns in episodes if turns.failure)
        failed = world.sum(kinds.total())
        count = world.sum(len(episodes))
        if failed > MAX_FAILED_SHARE * count:
            why = None
            if kinds:
                ((kind, _),) = kinds.most_common(1)
                first = f"the first of the kind {kind!r}: {self.first_failures[kind]}"
                why = f"{dict(kinds)} on rank {world.rank}; {first}"
            why = first_of_ranks(why, world.group)
            message = f'environment "{self.spec}" failed in {failed:.0f} of {count:.0f} episodes: {why}'
            raise RunFailed(message, code="environment-failed")
        return [turns.result for turns in episodes]

    def log(self, episodes: list[Turns], metrics) -> None:
        """environment/{turns, calls, errors, failed_frac}, and time/environment: seconds that an episode waited."""
        count = len(episodes)
        metrics.mean("environment/turns", sum(len(turns.texts) for turns in episodes), count)
        metrics.mean("environment/calls", sum(turns.calls for turns in episodes), count)
        metrics.mean("environment/errors", sum(turns.errors for turns in episodes), count)
        metrics.mean("environment/failed_frac", sum(bool(turns.failure) for turns in episodes), count)
        metrics.mean("time/environment", sum(turns.seconds for turns in episodes), count)

    def try_out(self, prompt: Prompt) -> None:
        """Play an episode of one empty turn before a model is loaded. Raises BadInput if the environment fails."""
        answer = self.pool.ask(next(self.episode_numbers), problem_of(prompt, 0), [""], True)
        if isinstance(answer, Failure):
            where = f"after an empty turn to the prompt {prompt.id}"
            raise BadInput(f"--environment {self.spec}: {answer.kind} {where}: {answer.message}")


def attach(spec: str, reward: Rewards, source: Source, tokenizer, stop_token_ids: list[int]) -> Source:
    """Give the reward the environment of --environment. Returns the source, whose prompts now show its tools.

    Raises BadInput if the environment cannot be loaded, or if it has no score() and --reward names no other.
    """
    reward.environment = Environments(spec, tokenizer, stop_token_ids)
    info = reward.environment.info
    if "environment" in reward.rewards and not info.has_score:
        raise BadInput(f"--environment {spec}: the class has no score(); name a --reward")
    return dataclasses.replace(source, tools=info.tools)


def problem_of(prompt: Prompt, step: int, seed: int = 0) -> dict:
    """The fields of Problem. Its seed is the same for all responses to a prompt in a step of a run with this seed."""
    problem_seed = zlib.crc32(f"{prompt.id}/{step}".encode(), seed)
    return {"prompt": prompt.text, "answer": prompt.answer, "meta": prompt.meta, "seed": problem_seed}


def messages_of(observation: str | list[str]) -> list[str]:
    """The texts of an observation. Halves of surrogate pairs become "?", because tokenizers refuse them."""
    texts = [observation] if isinstance(observation, str) else observation
    return [text.encode("utf-8", "replace").decode() for text in texts]
