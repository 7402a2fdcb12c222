"""Intervals of accuracies: how often they contain the truth, and what they say in cases that are worked out by hand.

The synthetic models answer a problem of difficulty p right with probability p. The problems of a data set are drawn
like p = U ** (1 / a), so that the mean accuracy is a / (a + 1) and pass@k has a closed form. Of 200 data sets, 95 %
should have an interval that contains the truth. The standard error of that share is 1.5 points, so each setting may
miss by TOLERANCE, and all of them together by TOLERANCE_OF_ALL.
"""

import math

import numpy as np
import pytest

from common.run.estimates import difference, interval, ks, pass_at_k, student

DATA_SETS = 200
TOLERANCE = 0.04  # of one setting
TOLERANCE_OF_ALL = 0.015
SETTINGS = [  # problems, responses to each, a: the mean accuracy is a / (a + 1)
    (30, 32, 1.0),
    (40, 8, 0.25),
    (256, 8, 0.2),
    (256, 4, 3.0),
    (500, 1, 0.5),
    (1319, 1, 4.0),
]


def draw(problems: int, a: float, seed: int) -> tuple[np.random.Generator, np.ndarray]:
    """A generator, and the chance of success on each problem of each data set: (DATA_SETS, problems)."""
    generator = np.random.default_rng(seed)
    return generator, generator.random((DATA_SETS, problems)) ** (1 / a)


def true_pass_at_k(a: float, k: int) -> float:
    """1 - E[(1 - p)^k] for a density a p^(a - 1) on [0, 1]: 1 - a B(a, k + 1)."""
    return 1 - a * math.exp(math.lgamma(a) + math.lgamma(k + 1) - math.lgamma(a + k + 1))


def covered(low: np.ndarray, high: np.ndarray, truth: float) -> np.ndarray:
    return (low <= truth) & (truth <= high)


def check(shares: dict) -> None:
    for setting, share in shares.items():
        assert abs(share - 0.95) <= TOLERANCE, (setting, shares)
    assert abs(np.mean([*shares.values()]) - 0.95) <= TOLERANCE_OF_ALL, shares


def test_the_interval_of_mean_at_n_covers_as_often_as_it_says():
    shares = {}
    for number, (problems, n, a) in enumerate(SETTINGS):
        generator, chances = draw(problems, a, number)
        values = pass_at_k(n, generator.binomial(n, chances), 1)
        shares[problems, n, a] = covered(*interval(values, n), a / (a + 1)).mean()
    check(shares)


def test_the_interval_of_pass_at_k_covers_as_often_as_it_says():
    shares = {}
    for number, (problems, n, a) in enumerate(SETTINGS):
        for k in ks(n)[1:]:
            generator, chances = draw(problems, a, number)
            values = pass_at_k(n, generator.binomial(n, chances), k)
            shares[problems, n, a, k] = covered(*interval(values, n // k), true_pass_at_k(a, k)).mean()
    check(shares)


@pytest.mark.parametrize("measure", ["mean@n", "pass@k"])
def test_the_interval_of_a_paired_difference_covers_as_often_as_it_says(measure):
    """The second model fails more often on each problem: 1 - q = 0.8 (1 - p), with the same problems for both.

    If models differ by less than three problems, the interval is too wide, and never too narrow.
    """
    shares, too_wide = {}, {}
    for number, (problems, n, a) in enumerate(SETTINGS):
        for k in (1,) if measure == "mean@n" else ks(n)[1:]:
            generator, chances = draw(problems, a, number)
            better = 1 - 0.8 * (1 - chances)
            first, second = (pass_at_k(n, generator.binomial(n, each), k) for each in (better, chances))
            # The second one solves 1 - E[(1 - p)^k], and the first one 1 - 0.8^k E[(1 - p)^k].
            truth = (1 - 0.8**k) * (1 - true_pass_at_k(a, k))
            found = shares if problems * truth >= 3 else too_wide
            found[problems, n, a, k] = covered(*difference(first, second, n // k), truth).mean()
    check(shares)
    assert len(too_wide) <= 3 and all(share >= 0.95 - TOLERANCE for share in too_wide.values()), too_wide


@pytest.mark.parametrize(
    "a, k, share, of_bootstrap",
    [
        (0.05, 1, 0.87, 0.84),  # most problems are never solved, and the mean accuracy is 5 %
        (1.0, 16, 0.97, 0.82),  # most problems are solved in 16 responses
    ],
)
def test_thirty_problems_show_the_limits_of_the_interval_and_more_so_of_a_bootstrap(a, k, share, of_bootstrap):
    """The shares that estimates.py and docs/evaluation.md quote, to within two points."""
    truth = true_pass_at_k(a, k)
    ours, bootstraps = [], []
    for seed in range(10):
        generator, chances = draw(30, a, seed)
        values = pass_at_k(32, generator.binomial(32, chances), k)
        ours.append(covered(*interval(values, 32 // k), truth).mean())
        drawn = values[:, generator.integers(0, 30, (1000, 30))].mean(-1)  # (DATA_SETS, 1000)
        bootstraps.append(covered(*np.quantile(drawn, [0.025, 0.975], axis=1), truth).mean())
    assert np.mean(ours) == pytest.approx(share, abs=0.02)
    assert np.mean(bootstraps) == pytest.approx(of_bootstrap, abs=0.02)


def test_the_problem_is_the_unit_and_not_the_response():
    """A hundred equal responses to a problem say no more than one. They are no hundred answers."""
    solved = np.array([1.0] * 12 + [0.0] * 18)
    assert interval(solved, 100) == interval(solved, 1)
    low, high = interval(solved, 1)
    assert high - low > 0.3
    # Responses that differ, with problems that are alike, do say more.
    even = np.array([0.3, 0.5] * 15)
    low, high = interval(even, 100)
    assert 0.35 < low < 0.4 < high < 0.45


def test_intervals_of_no_and_of_all_problems_are_no_points():
    """With 30 problems the rule of three says 10 %. The more problems, the shorter."""
    low, high = interval(np.zeros(30), 32)
    assert low == 0 and 0.1 < high < 0.15
    low, high = interval(np.ones(30), 32)
    assert 0.85 < low < 0.9 and high == 1
    assert interval(np.zeros(500), 1)[1] < 0.01
    # All problems with one right response of two: there are no more than 60 answers.
    low, high = interval(np.full(30, 0.5), 2)
    assert low < 0.4 and high > 0.6
    assert tuple(map(float, interval(np.array([1.0])))) == (0.0, 1.0)


def test_models_that_agree_on_all_problems_may_differ_a_little():
    solved = np.array([1.0, 0.0] * 15)
    low, high = difference(solved, solved)
    assert -0.15 < low < 0 < high < 0.15 and low == pytest.approx(-high)
    low, high = difference(np.tile(solved, 20), np.tile(solved, 20))
    assert -0.01 < low < 0 < high < 0.01


def test_a_paired_difference_is_more_exact_than_two_intervals():
    """A second model that solves the same 60 of a hundred problems, and 15 more."""
    first = np.array([1.0] * 60 + [0.0] * 40)
    second = np.array([1.0] * 75 + [0.0] * 25)
    low, high = difference(second, first)
    assert 0 < low < 0.15 < high < 0.25
    assert interval(second)[0] < interval(first)[1], "the intervals overlap"
    assert difference(first, second) == pytest.approx((-high, -low))


def test_bonett_and_price_by_hand():
    """Nine problems that only the first model solves and two that only the second does, of 50."""
    first = np.array([1.0] * 9 + [0.0] * 2 + [1.0] * 39)
    second = np.array([0.0] * 9 + [1.0] * 2 + [1.0] * 39)
    one, other = 10 / 52, 3 / 52
    center = one - other
    half = student(51) * math.sqrt((one + other - center**2) / 51)
    assert difference(first, second) == pytest.approx((center - half, center + half))


TABLE = {1: 12.7062, 2: 4.3027, 3: 3.1824, 4: 2.7764, 5: 2.5706, 9: 2.2622, 29: 2.0452, 255: 1.9693, 10**6: 1.95997}


@pytest.mark.parametrize("degrees, quantile", TABLE.items())
def test_students_quantile_is_that_of_the_tables(degrees, quantile):
    assert student(degrees) == pytest.approx(quantile, abs=1e-3)


def test_pass_at_k_by_hand():
    """Two of four responses are right. Of the six pairs of responses, one has no right one."""
    assert [pass_at_k(4, 2, k) for k in (1, 2, 3, 4)] == pytest.approx([1 / 2, 5 / 6, 1, 1])
    assert pass_at_k(4, np.array([0, 1, 4]), 2) == pytest.approx([0, 1 / 2, 1])


def test_pass_at_k_is_reported_for_powers_of_two_and_for_all_responses():
    assert [ks(n) for n in (0, 1, 4, 10, 32)] == [[], [1], [1, 2, 4], [1, 2, 4, 8, 10], [1, 2, 4, 8, 16, 32]]
