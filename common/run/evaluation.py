"""Accuracy of an engine's responses."""

from common.data.prompts import Prompt
from common.errors import RunFailed
from common.placement import World
from common.rewards.mixture import Rewards
from common.run.sampling import texts_of

Graded = list[tuple[str, float]]  # the text of each response to one prompt, and its accuracy


def evaluate(
    engine, prompts: list[Prompt], reward: Rewards, tokenizer, world: World, max_tokens: int,
    n: int = 1, temperature: float = 0.0, seed: int = 0, metrics=None,
) -> list[tuple[Prompt, Graded]]:  # fmt: skip
    """n graded responses to each of this rank's prompts, which are every size-th one. Greedy by default.

    Prompts that could not be graded are left out. metrics: gets eval/reward (the mean score) and, with an environment,
    eval/turns. Raises RunFailed if no prompt could be graded. Collective: every rank calls it.
    """
    own_prompts = prompts[world.rank :: world.size]
    grading = reward.begin_early(own_prompts, tokenizer)
    ids = [prompt.ids for prompt in own_prompts]
    rollout = engine.generate(ids, n, temperature, max_tokens, seed, reply=grading.reply)
    responses = texts_of(rollout, tokenizer)
    results = reward.score(own_prompts, responses, rollout, world)
    graded = rollout.response_mask.any(1).view(-1, n)[:, 0].tolist()
    if not world.sum(sum(graded)):
        raise RunFailed(f"none of {len(prompts)} held-out prompts could be graded", code="reward-failed")
    if metrics is not None:
        total = sum(result.score for i, result in enumerate(results) if graded[i // n])
        metrics.mean("eval/reward", total, n * sum(graded))
        if rollout.episodes is not None:
            metrics.mean("eval/turns", sum(len(turns.texts) for turns in rollout.episodes), len(rollout.episodes))
    pairs = [(text, result.acc) for text, result in zip(responses, results)]
    return [(prompt, pairs[i * n : (i + 1) * n]) for i, prompt in enumerate(own_prompts) if graded[i]]


def greedy_accuracy(
    engine, prompts: list[Prompt], reward: Rewards, tokenizer, world: World, max_tokens: int,
    metrics=None,
) -> float:  # fmt: skip
    """Share of the graded prompts whose answer at temperature 0 is right. Collective: every rank calls it."""
    graded = evaluate(engine, prompts, reward, tokenizer, world, max_tokens, metrics=metrics)
    return world.sum(sum(acc for _, ((_, acc),) in graded)) / world.sum(len(graded))
