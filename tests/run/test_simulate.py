"""The simulated loop: against closed forms, against the loop's own rules, and beside scripts/bench/tails.py."""

import asyncio
import json
import random
import statistics
from dataclasses import replace
from types import SimpleNamespace

import pytest
from conftest import ROOT
from helpers import load

from common.rollout import engines
from common.rollout.rollout import Response
from common.run.sampling import Prefetcher

model = load("scripts/loop_model.py")
simulate = load("scripts/simulate.py")
tails = load("scripts/bench/tails.py")
MEASURED = ROOT / "baselines/performance/tails.json"
UPDATES = ("none", "recompute", "keep")
LOOPS = [model.Loop(), *(model.Loop(inflight, updates) for inflight in (2, 3, 4) for updates in UPDATES)]
STEPS = 20
# Sampling 8 responses of 100 tokens takes 100 s, and so does training on them.
COSTS = model.Costs(servers=1, places=8, decode=lambda count: 1.0, train=lambda tokens: tokens / 8)


def constant(step: int) -> list[int]:
    return [100] * 8


def tailed(step: int) -> list[int]:
    draw = random.Random(step)
    return [draw.choice([10, 10, 10, 200]) for _ in range(12)]


def trained(loop, lengths=tailed, **changes):
    return model.Run(replace(COSTS, **changes), loop, lengths, STEPS).go()


@pytest.mark.parametrize("loop", LOOPS, ids=str)
@pytest.mark.parametrize("servers", [1, 3])
def test_every_token_is_trained_on_once_and_in_order(loop, servers):
    steps = trained(loop, servers=servers, places=3)
    assert [step.step for step in steps] == list(range(1, STEPS + 1))
    assert [step.tokens for step in steps] == [sum(tailed(step)) for step in range(1, STEPS + 1)]
    moments = [step.at for step in steps]
    assert moments == sorted(moments)


@pytest.mark.parametrize("inflight", [1, 4])
def test_every_token_is_trained_on_once_in_a_run_that_loses_servers(inflight):
    loop = model.Loop(inflight, lost=0.3, save_every=4)
    steps = trained(loop, restart=1000.0)
    assert [step.tokens for step in steps] == [sum(tailed(step)) for step in range(1, STEPS + 1)]
    assert steps[-1].at > trained(replace(loop, lost=0.0))[-1].at + 1000
    assert steps == trained(loop, restart=1000.0), "the same seed gives the same run"


@pytest.mark.parametrize("inflight, again", [(1, [7]), (2, [5, 6, 7, 8])])
def test_a_run_that_loses_a_server_in_its_seventh_step_repeats_what_it_has_to(inflight, again):
    """In turns, that step. With a batch in flight, all that was begun since the checkpoint of step 4."""
    begun = []

    def lengths(step: int) -> list[int]:
        begun.append(step)
        return [9]

    run = model.Run(COSTS, model.Loop(inflight, "keep", lost=0.5, save_every=4), lengths, 8)
    draws = iter([1, 1, 1, 1, 1, 1, 0, 1, 1, 1, 1])
    run.random = SimpleNamespace(random=lambda: next(draws))
    run.go()
    assert begun == [*range(1, 7 + inflight), *again, *range(7 + inflight, 9)]


def test_free_places_go_to_those_that_have_waited_longest():
    server = model.Server(replace(COSTS, places=2), now=0.0, version=0)
    server.add(1, [5, 2])
    server.add(2, [4])
    server.add(3, [1])
    server.advance()
    # Step 2 begins at 2, when the shorter response of step 1 ends, and step 3 at 5.
    assert server.ended == {1: 5.0, 2: 6.0, 3: 6.0}


@pytest.mark.parametrize("servers, places", [(1, 8), (2, 4), (2, 2)])
def test_synchronous_time_is_the_closed_form(servers, places):
    """8 responses of 100 tokens. Where a server has places for half of its share, it samples twice."""
    rounds = 8 / servers / places
    costs = {"servers": servers, "places": places, "decode": lambda count: 0.1 + 0.01 * count}
    steps = trained(model.Loop(), constant, **costs, update=3.0, grade=2.0)
    each = rounds * 100 * (0.1 + 0.01 * places) + 2.0 + 100.0 + 3.0
    assert [step.at for step in steps] == pytest.approx([each * step for step in range(1, STEPS + 1)])
    assert not any(step.age for step in steps)


def test_a_tail_takes_its_time_alone():
    """Seven of eight end after 10 tokens. From then on a token takes 1 s, not 8."""
    lengths = lambda step: [10] * 7 + [50]
    steps = trained(model.Loop(), lengths, decode=float, train=lambda tokens: 0.0)
    assert steps[0].at == pytest.approx(10 * 8 + 40 * 1)


def test_one_ahead_takes_the_longer_of_both_where_one_batch_is_a_while():
    """Training takes 60 s, sampling 100. Weights go in between two batches: both wait for each other once a step."""
    steps = trained(model.Loop(2), constant, train=lambda tokens: 60.0, update=5.0)
    assert steps[9].at - steps[8].at == pytest.approx(105.0)


def test_with_many_batches_in_flight_and_equal_rates_it_comes_close_to_the_bound_and_never_above():
    """A step of `tailed` has as many tokens as the server samples in the time that training takes."""
    lengths = lambda step: [25] * 30 + [250]
    tokens = sum(lengths(1))
    alone = tokens / 8  # a full server has 8 tokens a second
    rates = {}
    for inflight in (1, 2, 4, 8):
        steps = trained(model.Loop(inflight, "keep"), lengths)
        rates[inflight] = model.rate(steps, 5, STEPS - 8) / (tokens / alone)
    assert rates[1] < 0.5 and rates[1] < rates[2] < rates[4]
    assert 0.97 < rates[8] <= 1 + 1e-9


@pytest.mark.parametrize("loop", LOOPS, ids=str)
@pytest.mark.parametrize("seconds", [0.01, 0.1, 1.0])
def test_no_token_is_more_than_k_minus_1_updates_old(loop, seconds):
    """However fast the trainer is. With several batches in flight some tokens are as old as that."""
    steps = trained(loop, train=lambda tokens: seconds * tokens, places=6)
    ages = [step.oldest for step in steps]
    assert max(ages) == loop.inflight - 1
    assert all(0 <= step.age <= step.oldest for step in steps)


def test_ages_of_batches_whose_weights_go_in_between_responses_by_hand():
    """K = 4. Four batches are sampled with the first weights, and the servers get new ones when all four have ended,
    before the fourth trains. By then three updates are missing. From then on three batches share their weights.
    """
    steps = trained(model.Loop(4), constant, train=lambda tokens: 0.001)
    assert [step.oldest for step in steps[:10]] == [0, 1, 2, 3, 1, 2, 3, 1, 2, 3]
    assert [step.age for step in steps] == pytest.approx([step.oldest for step in steps])


def test_weights_that_go_in_amid_responses_make_their_later_tokens_younger():
    """Both batches begin with the first weights. Step 1 has trained at 150, when step 2 has 150 of its 200 tokens."""
    costs = {"places": 16, "train": lambda tokens: 50.0}
    lengths = lambda step: [100] * 8 if step == 1 else [200] * 8
    steps = trained(model.Loop(2, "keep"), lengths, **costs)
    assert (steps[1].age, steps[1].oldest) == (pytest.approx(0.75), 1)


def test_recomputing_takes_the_servers_time_for_each_token_under_way():
    lengths = lambda step: [100] * 8 if step == 1 else [200] * 8
    costs = {"places": 16, "train": lambda tokens: 50.0, "update": 10.0}
    keep = trained(model.Loop(2, "keep"), lengths, **costs)
    recompute = trained(model.Loop(2, "recompute"), lengths, recompute=0.01, **costs)
    # The first update comes at 150, when eight responses have 150 of their 200 tokens.
    assert keep[1].at == pytest.approx(150 + 10 + 50 + 50 + 10)
    assert recompute[1].at - keep[1].at == pytest.approx(0.01 * 8 * 150)


def test_beside_a_trainer_that_works_a_token_takes_longer():
    lengths = lambda step: [100] * 8 if step == 1 else [200] * 8
    steps = trained(model.Loop(2, "keep"), lengths, places=16, train=lambda tokens: 50.0, slower=2.0)
    # Step 1 trains from 100 to 150. Meanwhile step 2 gets 25 tokens, and 75 are missing.
    assert steps[1].at == pytest.approx(150 + 75 + 50)


@pytest.mark.parametrize("inflight", [2, 3, 5])
def test_the_steps_that_may_begin_are_those_of_the_loop(inflight):
    """The same calls of both admission rules. The servers are `behind` by some updates."""
    run = model.Run(COSTS, model.Loop(inflight), constant, STEPS)
    real = object.__new__(Prefetcher)
    real.limit, real.begun, real.in_flight, real.engine = inflight, 0, {}, SimpleNamespace()
    real._begin = lambda step: None
    for step in range(1, STEPS + 1):
        for behind in range(inflight, -1, -1):
            run.behind = real.engine.behind = behind
            run.begin_until(step)
            real._begin_until(step, STEPS)
            assert run.begun == real.begun
    assert run.begun == STEPS


def test_a_rate_from_the_first_step_on_begins_with_the_run():
    """10 tokens by second 4, and 20 more by second 10."""
    steps = [model.Trained(1, 10, 4.0, 0, 0), model.Trained(2, 20, 10.0, 0, 0)]
    assert model.rate(steps, 0, 2) == 3.0
    assert model.rate(steps, 0, 1) == 2.5
    assert model.rate(steps, 1, 2) == pytest.approx(20 / 6)


def made_up(seconds: dict[str, float]) -> dict:
    """What tails.py writes. A step has 15 responses of 16 tokens and one of 80, and a token takes 0.1 s."""
    rows = {}
    for name, (inflight, _) in tails.ROWS.items():
        step = {"tokens_per_s": 320 / seconds[name], "steps": [seconds[name]] * 3, "training": 9.0, "sync": 0.5}
        rows[name] = [step | {"rest": 0.25, "reward": 0.25, "staleness": (inflight - 1) / 2, "staleness_max": 1.0}]
    pace = {"1": 0.1, "16": 0.1}
    return {
        "lengths": [16] * 15 + [80],
        "places": 16,
        "epochs": 2,
        "rates": {"alone": pace, "beside": pace, "prefill_token": 0.0},
        "sampling_alone": 2.0,
        "training_alone": 9.0,
        "steps": 12,
        "warmup": 4,
        "draining": 3,
        "loops": tails.ROWS,
        "rows": rows,
    }


def test_a_synchronous_row_is_predicted_from_its_parts():
    data = made_up(dict.fromkeys(tails.ROWS, 18.0))
    # 80 tokens of 0.1 s, grading, training with what surrounds it, sync.
    assert simulate.predicted(data, "synchronous") == pytest.approx(320 / (8 + 0.25 + 9 + 0.25 + 0.5))
    ahead = simulate.predicted(data, "one ahead")
    assert ahead == pytest.approx(320 / (9 + 0.25 + 0.5), rel=0.06)
    page = simulate.beside_measured(data)
    ratio = 18 / (320 / ahead)
    assert f"| one ahead | 1.00 | {ratio:.2f} | {ratio:.2f} |" in page


def test_updates_amid_responses_take_what_they_took_in_their_own_row():
    """Where weights go in between responses, not every step has an update: it takes as long as in turns."""
    data = made_up(dict.fromkeys(tails.ROWS, 18.0))
    before = {name: simulate.predicted(data, name) for name in tails.ROWS}
    for name in tails.ROWS:
        if name != "synchronous":
            data["rows"][name][0]["sync"] = 5.0
    slower = [name for name in tails.ROWS if simulate.predicted(data, name) < before[name]]
    assert slower == ["K = 4, recompute", "K = 4, keep"]


def test_a_row_without_warmup_counts_all_steps_but_the_draining_ones():
    """A synchronous run is as fast in each step."""
    data = made_up(dict.fromkeys(tails.ROWS, 18.0))
    expected = simulate.predicted(data, "synchronous")
    assert simulate.predicted(data | {"warmup": 0}, "synchronous") == pytest.approx(expected)


def test_between_measured_numbers_of_responses_the_pace_is_interpolated():
    decode = simulate.interpolated({"64": 0.05, "4": 0.02, "1": 0.01})
    assert [decode(count) for count in (1, 4, 34, 64)] == pytest.approx([0.01, 0.02, 0.035, 0.05])
    assert decode(70) == 0.05


@pytest.mark.skipif(not MEASURED.is_file(), reason="nothing is measured yet")
def test_the_measured_ratios_are_reproduced():
    """Each row over the synchronous one, to 15 %."""
    data = json.loads(MEASURED.read_text())
    measured = {name: statistics.mean(run["tokens_per_s"] for run in runs) for name, runs in data["rows"].items()}
    simulated = {name: simulate.predicted(data, name) for name in measured}
    for name in measured:
        there = measured[name] / measured["synchronous"]
        assert simulated[name] / simulated["synchronous"] == pytest.approx(there, rel=0.15), name


def test_lengths_of_a_step_are_long_tailed_and_the_same_for_all_rows():
    args = simulate.Args()
    lengths = simulate.long_tailed(args, 4001, 3)
    assert lengths == simulate.long_tailed(args, 4001, 3) != simulate.long_tailed(args, 4001, 4)
    assert statistics.median(lengths) == pytest.approx(args.median, rel=0.1)
    assert max(lengths) == args.longest and min(lengths) >= 1


def test_at_scale_each_layout_stays_below_its_bound_and_colocated_gpus_do_both():
    args = simulate.Args(steps=10, inflight=(4,), responses=(64,), update=0.0, sigma=0.0)
    full = replace(args, full=16)
    # All responses are equally long, and each server has 16: sampling and training take 64 x 1000 / 4 s each.
    second = simulate.speed(full)
    split = simulate.tokens_per_gpu(full, 8, 64, model.Loop(), False)
    assert split == pytest.approx(second / 4)
    colocated = simulate.tokens_per_gpu(replace(full, full=8), 8, 64, model.Loop(), True)
    assert colocated == pytest.approx(simulate.speed(replace(full, full=8)) / 2)
    ahead = simulate.tokens_per_gpu(full, 8, 64, model.Loop(4, "keep"), False)
    assert split < ahead <= second / 2 * (1 + 1e-9)


def test_with_one_batch_in_flight_all_steps_count():
    args = simulate.Args(steps=4, inflight=(1,), responses=(64,), update=0.0, sigma=0.0, full=16)
    assert simulate.tokens_per_gpu(args, 8, 64, model.Loop(), False) == pytest.approx(simulate.speed(args) / 4)


@pytest.mark.parametrize(
    "changes, says",
    [
        ({"steps": 30}, "--steps 30: with --inflight 16 use 31 or more"),  # 15 at each end do not count
        ({"inflight": ()}, "--inflight"),
        ({"inflight": (0,)}, "--inflight"),
        ({"gpus": (8, 1)}, "--gpus"),
        ({"responses": (0,)}, "--responses"),
        ({"lost": 1.0}, "--lost 1.0"),
    ],
)
def test_numbers_that_no_run_can_have_are_refused(changes, says):
    simulate.check_args(simulate.Args(steps=31))
    with pytest.raises(SystemExit, match=says):
        simulate.check_args(simulate.Args(**changes))


def test_at_scale_a_server_works_on_no_more_responses_than_in_a_run(monkeypatch):
    """Four servers for 64 responses of the same length, of which each has places for 8: they sample twice."""
    assert simulate.MOST_SEQUENCES == engines.MOST_SEQUENCES
    monkeypatch.setattr(simulate, "MOST_SEQUENCES", 8)
    args = simulate.Args(steps=10, inflight=(4,), update=0.0, sigma=0.0, full=8)
    # The trainer takes as long.
    expected = simulate.speed(args) / 4
    assert simulate.tokens_per_gpu(args, 8, 64, model.Loop(), False) == pytest.approx(expected)


def test_the_page_has_the_table_that_the_script_prints():
    assert simulate.at_scale(simulate.Args()) in (ROOT / "docs/scaling.md").read_text()


def test_a_group_has_a_long_response_whose_seed_is_its_own():
    """The last of sixteen. Responses keep their order and count as complete."""
    asked = []

    async def ask(http, url, body, versions, api):
        sampling = body["sampling_params"]
        asked.append(sampling)
        tokens = [sampling["max_tokens"]] * sampling["max_tokens"]
        return [Response(tokens, [0.0] * len(tokens), True, []) for _ in range(sampling["n"])]

    body = {"token_ids": [5], "sampling_params": {"n": 16, "seed": 70, "max_tokens": 80, "stop_token_ids": [1]}}
    responses = asyncio.run(tails.with_lengths(ask)(None, "url", body, None, None))
    assert [len(response.token_ids) for response in responses] == [10] * 15 + [80]
    assert not any(response.truncated for response in responses)
    assert [(sampling["n"], sampling["seed"]) for sampling in asked] == [(15, 70), (1, 85)]
    assert all(sampling["ignore_eos"] and sampling["stop_token_ids"] == [] for sampling in asked)
    assert body["sampling_params"]["n"] == 16, "the caller checks that it got so many"


def test_the_table_compares_with_the_synchronous_row_and_with_the_slower_side():
    seconds = dict.fromkeys(tails.ROWS, 12.0) | {"synchronous": 18.0}
    data = made_up(seconds)
    # Alone the trainer has 320 / 9 tokens a second, fewer than the server.
    page = tails.table(data)
    assert "| synchronous | 18 | 1.00 (1.00 to 1.00) | 0.50 | 18.00 | 0.00, 1 |" in page
    assert "| K = 4, keep | 27 | 1.50 (1.50 to 1.50) | 0.75 | 12.00 | 1.50, 1 |" in page


def test_a_round_is_compared_with_the_synchronous_row_of_the_same_round():
    """In the second one the machine has half its speed."""
    data = made_up(dict.fromkeys(tails.ROWS, 12.0) | {"synchronous": 18.0})
    for runs in data["rows"].values():
        runs.append(runs[0] | {"tokens_per_s": runs[0]["tokens_per_s"] / 2, "staleness_max": 3.0})
    assert "| K = 4, keep | 20 | 1.50 (1.50 to 1.50) | 0.56 | 12.00 | 1.50, 3 |" in tails.table(data)
