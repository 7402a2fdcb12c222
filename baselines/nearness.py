"""The reward of the task `reverse`: how near a response comes to the reference answer."""

from difflib import SequenceMatcher

from common.rewards import Result


def score(items, lengths, truncated):
    """2 M / T for each response, where M of the T characters of both texts match. It is right if they are equal."""
    results = []
    for item in items:
        said = item.response.strip()
        ratio = SequenceMatcher(None, said, item.answer, autojunk=False).ratio()
        results.append(Result(ratio, float(said == item.answer), said))
    return results
