"""Accuracy of what an engine samples now."""

from common import rewards
from common.data import Prompt
from common.placement import BadInput, World


def evaluate(
    engine, prompts: list[Prompt], reward: rewards.Reward, tokenizer, world: World, max_tokens: int,
    n: int = 1, temperature: float = 0.0, seed: int = 0,
) -> list[list[float]]:  # fmt: skip
    """Accuracies (B, n) of n responses to each of this rank's prompts, every size-th one. Greedy by default.

    Collective over the ranks that share an engine. Raises BadInput with fewer prompts than ranks.
    """
    if len(prompts) < world.size:
        raise BadInput(f"{len(prompts)} prompts to evaluate on {world.size} ranks: each needs at least one")
    mine = prompts[world.rank :: world.size]
    rollout = engine.generate([prompt.ids for prompt in mine], n, temperature, max_tokens, seed)
    responses = tokenizer.batch_decode(rollout.response_ids, skip_special_tokens=True)
    results = rewards.score(reward, mine, responses, rollout)
    return [[result.acc for result in results[i * n : (i + 1) * n]] for i in range(len(mine))]


def greedy_accuracy(
    engine, prompts: list[Prompt], reward: rewards.Reward, tokenizer, world: World, max_tokens: int
) -> float:
    """Share of the prompts answered correctly at temperature 0. Collective: every rank calls it."""
    accuracies = evaluate(engine, prompts, reward, tokenizer, world, max_tokens)
    return world.sum(sum(row[0] for row in accuracies)) / len(prompts)
