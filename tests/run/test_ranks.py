"""Several ranks do the books of one: shares of prompts, engines in common, metrics, evaluation, rollout files."""

import json
import math

import pytest
from conftest import ROOT, launch

from common.run import outcomes, traces


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """The directory of a run on four ranks with two engines, and what tests/workers/ranks.py says of each rank."""
    folder = tmp_path_factory.mktemp("ranks")
    printed = launch(ROOT / "tests/workers/ranks.py", folder, ranks=4, engine=False).stdout
    return folder, json.loads(next(line for line in printed.splitlines() if line.startswith("[")))


@pytest.mark.slow
def test_ranks_that_share_an_engine_get_the_responses_to_their_own_prompts(ranks):
    """A response begins with its prompt's token. The rest is noise, which no two responses share."""
    assert [rank["engine"] for rank in ranks[1]] == [0, 0, 1, 1]
    for number, rank in enumerate(ranks[1]):
        expected = [prompt for prompt in range(number, 24, 4) for _ in range(2)]
        assert [ids[0] for ids in rank["sampled"]] == expected
    assert len({tuple(ids[1:]) for rank in ranks[1] for ids in rank["sampled"]}) == 48


@pytest.mark.slow
def test_metrics_are_those_of_all_ranks_together(ranks):
    """Prompts 0 ... 23 score their number and one more. Prompt 3 was not graded, on one of the ranks."""
    metrics = ranks[1][0]["metrics"]
    assert all(rank["metrics"] == metrics for rank in ranks[1])
    graded = [number for number in range(24) if number != 3]
    assert metrics["reward/mean"] == pytest.approx(sum(graded) / 23 + 0.5)
    assert metrics["reward/std"] == pytest.approx(math.sqrt(1 / 2)) and metrics["group/zero_std_frac"] == 0
    assert metrics["reward/ungraded_frac"] == pytest.approx(1 / 24)
    assert metrics["response/length_mean"] == 5 and metrics["advantage/abs_max"] == 24
    assert metrics["throughput/tokens_per_s"] == pytest.approx(48 * 5 / metrics["time/step"])
    # Right are 0, 6 and 9 of the ten held-out prompts. Nobody graded 3.
    assert metrics["eval/accuracy"] == pytest.approx(3 / 9)
    # 0 to 7 are of one data set, 8 and 9 of the other one.
    assert metrics["eval/a/accuracy"] == pytest.approx(2 / 7) and metrics["eval/b/accuracy"] == 1 / 2
    rows = (ranks[0] / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(row) for row in rows] == [metrics, ranks[1][0]["drawing"]]


@pytest.mark.slow
def test_a_rollout_file_has_the_prompts_of_all_ranks_in_their_order(ranks):
    rows = traces.read(traces.find(ranks[0], 1))
    assert [row["index"] for row in rows] == [number for number in range(24) for _ in range(2)]
    assert all(row["id"] == f"{row['index']}" and row["response_ids"][0] == row["index"] for row in rows)
    assert [row["index"] for row in rows if row["dropped"]] == [3, 3]


@pytest.mark.slow
def test_an_evaluation_file_has_the_prompts_of_all_ranks_in_their_order(ranks):
    found = outcomes.read(outcomes.path_of(ranks[0], 1))
    assert [outcome.index for outcome in found] == [0, 1, 2, 4, 5, 6, 7, 8, 9], "nobody graded 3"
    assert all(outcome.id == outcome.prompt == f"{outcome.index}" for outcome in found)
    assert [outcome.index for outcome in found if outcome.solved] == [0, 6, 9]
    assert [outcome.dataset for outcome in found] == ["a.jsonl"] * 7 + ["b.jsonl"] * 2


@pytest.mark.slow
def test_ranks_draw_until_all_of_them_have_their_share(ranks):
    """Rank r finds its first prompt in draw r. Those that the others have found meanwhile are surplus."""
    assert [rank["kept"] for rank in ranks[1]] == [["0"], ["5"], ["10"], ["15"]]
    assert [rank["drawn"] for rank in ranks[1]] == [16] * 4
    drawing = ranks[1][0]["drawing"]
    # Rank 0 keeps all four of its prompts, rank 3 the last one.
    assert (drawing["sampling/prompts_generated"], drawing["sampling/prompts_kept"]) == (16, 4 + 3 + 2 + 1)
