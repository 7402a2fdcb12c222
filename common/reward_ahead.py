"""Grading the responses to one prompt while the engine samples those to others."""

import dataclasses
import math
import time
from concurrent.futures import ThreadPoolExecutor

from transformers import PreTrainedTokenizerBase

from common.errors import BadInput
from common.grading import Item, Result, Reward

CALLS = 16  # at once, of a reward: most of the time of a service is its own


def graded(name: str, reward: Reward, items: list[Item], lengths, truncated) -> tuple[list[Result], float]:
    """What a reward says, checked, and the seconds it took. Raises BadInput on a wrong count, NaN or infinity."""
    began = time.perf_counter()
    results = reward(items, lengths, truncated)
    if len(results) != len(items):
        raise BadInput(f'reward "{name}" returned {len(results)} results for {len(items)} items')
    for row, (item, result) in enumerate(zip(items, results)):
        if result.score is not None and not math.isfinite(result.score):
            raise BadInput(f'reward "{name}": row {row} is {result.score}, for prompt {item.prompt[:200]!r}')
    plain = lambda score, acc: {"score": float(score), "acc": float(score > 0 if acc is None else acc)}
    results = [r if r.score is None else dataclasses.replace(r, **plain(r.score, r.acc)) for r in results]
    return results, time.perf_counter() - began


class Ahead:
    """What engine.generate(done=...) calls with a prompt whose responses are all there, from any thread.

    Only of rewards that wait for a service or for other processes (`waits`): this process is busy sampling.
    """

    def __init__(self, rewards: dict[str, Reward], prompts: list, tokenizer: PreTrainedTokenizerBase):
        self.rewards = {name: reward for name, reward in rewards.items() if getattr(reward, "waits", False)}
        self.prompts, self.tokenizer = prompts, tokenizer
        self.threads = {name: ThreadPoolExecutor(CALLS, f"grading {name}") for name in self.rewards}
        self.begun: dict[str, dict] = {name: {} for name in self.rewards}  # name -> place of the prompt -> its results

    def __call__(self, place: int, response_ids: list[list[int]], truncated: list[bool]) -> None:
        """Begin with the responses to prompt `place`. A second call for it takes the place of the first."""
        if not self.rewards:
            return
        prompt, texts = self.prompts[place], self.tokenizer.batch_decode(response_ids, skip_special_tokens=True)
        items = [Item(prompt.text, text, prompt.answer, prompt.meta, ids) for text, ids in zip(texts, response_ids)]
        for name, reward in self.rewards.items():
            given = (name, reward, items, [len(ids) for ids in response_ids], truncated)
            self.begun[name][place] = self.threads[name].submit(graded, *given)

    def results(self, name: str) -> tuple[list[Result], float] | None:
        """Of all prompts, in their order, and the seconds all calls took together; None if any was not begun.

        Raises what the reward raised.
        """
        waiting = self.begun.get(name, {})
        if len(waiting) < len(self.prompts):
            return None
        self.threads[name].shutdown(wait=False)
        found = [waiting[place].result() for place in range(len(self.prompts))]
        return [result for results, _ in found for result in results], sum(seconds for _, seconds in found)
