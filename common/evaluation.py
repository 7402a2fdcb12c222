"""Accuracy of what an engine samples now."""

from common.data import Prompt
from common.errors import BadInput, RunFailed
from common.placement import World
from common.reward_mixture import Rewards


def evaluate(
    engine, prompts: list[Prompt], reward: Rewards, tokenizer, world: World, max_tokens: int,
    n: int = 1, temperature: float = 0.0, seed: int = 0,
) -> list[list[float]]:  # fmt: skip
    """Accuracies (B, n) of n responses to each of this rank's prompts, every size-th one. Greedy by default.

    Prompts that could not be graded are left out. Collective: every rank calls it. Raises BadInput with fewer
    prompts than ranks, RunFailed if none was graded.
    """
    if len(prompts) < world.size:
        raise BadInput(f"{len(prompts)} prompts to evaluate on {world.size} ranks: each needs at least one")
    mine = prompts[world.rank :: world.size]
    rollout = engine.generate([prompt.ids for prompt in mine], n, temperature, max_tokens, seed)
    responses = tokenizer.batch_decode(rollout.response_ids, skip_special_tokens=True)
    results = reward.score(mine, responses, rollout, world)
    graded = rollout.response_mask.any(1).view(-1, n)[:, 0].tolist()
    if not world.sum(sum(graded)):
        raise RunFailed(f"none of {len(prompts)} held-out prompts could be graded", code="reward-failed")
    return [[result.acc for result in results[i * n : (i + 1) * n]] for i in range(len(mine)) if graded[i]]


def greedy_accuracy(engine, prompts: list[Prompt], reward: Rewards, tokenizer, world: World, max_tokens: int) -> float:
    """Share of the graded prompts answered correctly at temperature 0. Collective: every rank calls it."""
    accuracies = evaluate(engine, prompts, reward, tokenizer, world, max_tokens)
    return world.sum(sum(row[0] for row in accuracies)) / world.sum(len(accuracies))
