"""Paired intervals and contrasts: against SciPy, by hand, by simulation."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from samples import REPEATS, binomial_range, by_seed, draws
from scipy import stats

from normjax.study.inference import Paired, contrast, pair

pytestmark = pytest.mark.jax_defaults


@pytest.mark.parametrize("n", [2, 3, 10, 32])
@pytest.mark.parametrize("level", [0.9, 0.95, 0.99])
def test_the_interval_is_scipys(n: int, level: float):
    before, after = draws(n, shift=0.7, n=n)
    found = pair("a.x", "b.x", before, after)
    test = stats.ttest_rel(list(after.values()), list(before.values()))
    expected = test.confidence_interval(level)
    np.testing.assert_allclose(found.interval(level), expected, rtol=1e-10)
    if level == 0.95:
        stored: Any = (found.low, found.high)
        np.testing.assert_allclose(stored, expected, rtol=1e-10)
    assert found.p is not None
    np.testing.assert_allclose(found.p, test.pvalue, rtol=1e-8)


def test_a_pair_says_what_was_compared():
    found = pair("a.x", "b.x", {0: 1.0, 1: 2.0, 2: 4.0}, {0: 2.0, 1: 2.5, 2: 6.0})
    assert (found.first, found.second, found.seeds) == ("a.x", "b.x", 3)
    assert found.differences == (1.0, 0.5, 2.0)
    assert found.first_mean == pytest.approx(7 / 3)
    assert found.second_mean == pytest.approx(3.5)
    assert found.mean == pytest.approx(7 / 6)
    assert found.sd == pytest.approx(np.std([1, 0.5, 2], ddof=1))
    assert found.correlation == pytest.approx(np.corrcoef([1, 2, 4], [2, 2.5, 6])[0, 1])


def test_pairs_are_matched_by_seed_and_not_by_order():
    before = {2: 4.0, 0: 1.0, 1: 2.0}
    found = pair("a", "b", before, {1: 2.5, 2: 6.0, 0: 2.0})
    assert found.differences == (1.0, 0.5, 2.0)


@pytest.mark.parametrize("bound", [-0.5, 0.0, 0.4, 2.0])
def test_one_sided_tests_are_scipys(bound: float):
    before, after = draws(7, shift=0.4)
    found = pair("a", "b", before, after)
    d = [after[s] - before[s] for s in before]
    for side, p in (("greater", found.above(bound)), ("less", found.below(bound))):
        test: Any = stats.ttest_1samp(d, bound, alternative=side)
        np.testing.assert_allclose(p, test.pvalue, rtol=1e-9)
    assert found.above(bound) + found.below(bound) == pytest.approx(1)


def test_intervals_cover_the_truth():
    hits = 0
    for seed in range(REPEATS):
        found = pair("a", "b", *draws(seed, shift=0.3, n=8))
        assert found.low is not None
        assert found.high is not None
        hits += found.low < 0.3 < found.high
    low, high = binomial_range(0.95)
    assert low <= hits <= high
    # A planted error would be seen: intervals from the normal distribution cover less.
    assert REPEATS * (2 * float(stats.t.cdf(1.96, 7)) - 1) < low


def test_an_a_a_comparison_finds_a_difference_as_often_as_it_says():
    words = [
        contrast(pair("a", "b", *draws(1000 + seed)), "higher", None)
        for seed in range(REPEATS)
    ]
    low, high = binomial_range(0.05)
    assert low <= words.count("better") + words.count("worse") <= high
    assert words.count("equivalent") == 0


def test_lost_seeds_are_counted_by_side_and_never_used():
    nan, inf = math.nan, math.inf
    before = {0: 1.0, 1: nan, 2: 3.0, 3: inf, 4: 5.0, 5: nan}
    after = {0: 2.0, 1: 2.0, 2: nan, 3: 2.0, 4: 7.0, 5: nan, 6: 1.0}
    found = pair("a", "b", before, after)
    assert found.lost == (3, 1, 1)  # first only (one seed is absent), second only, both
    assert found.seeds == 2
    assert found.differences == (1.0, 2.0)
    assert found.low is not None


@pytest.mark.parametrize("n", [0, 1])
def test_too_few_seeds_give_no_interval_and_no_verdict(n: int):
    found = pair("a", "b", by_seed([1.0] * n), by_seed([2.0] * n))
    assert (found.low, found.high, found.p, found.sd) == (None, None, None, None)
    assert found.mean == (1.0 if n else None)
    assert found.interval(0.95) == (-math.inf, math.inf)
    assert (found.above(0.0), found.below(0.0)) == (1.0, 1.0)
    assert contrast(found, "higher", 10.0) == "undecided"


def test_identical_arms():
    values = by_seed([1.0, 2.0, 3.0])
    found = pair("a", "b", values, values)
    assert (found.mean, found.sd, found.low, found.high, found.p) == (0, 0, 0, 0, 1)
    assert found.correlation == pytest.approx(1)
    assert contrast(found, "higher", None) == "equivalent"
    assert contrast(found, "higher", 0.1) == "equivalent"
    nearly = pair("a", "b", values, by_seed([1.0, 2.0, 3.0 + 1e-9]))
    assert contrast(nearly, "higher", None) == "undecided"


def test_constant_difference_and_constant_arms():
    found = pair("a", "b", by_seed([1.0, 1.0, 1.0]), by_seed([1.5, 1.5, 1.5]))
    assert (found.sd, found.low, found.high, found.p) == (0, 0.5, 0.5, 0)
    assert found.correlation is None
    assert (found.above(0.4), found.above(0.5)) == (0.0, 1.0)
    assert (found.below(0.6), found.below(0.5)) == (0.0, 1.0)
    assert contrast(found, "higher", None) == "better"
    assert contrast(found, "lower", None) == "worse"


@pytest.mark.parametrize(
    ("shift", "better", "within", "word"),
    [
        (2.0, "higher", None, "better"),
        (2.0, "lower", None, "worse"),
        (-2.0, "higher", None, "worse"),
        (-2.0, "lower", None, "better"),
        (2.0, "higher", 0.5, "better"),
        (0.0, "higher", 2.0, "equivalent"),
        (0.0, "higher", 0.01, "undecided"),
        (0.0, "lower", None, "undecided"),
        (0.5, "higher", 5.0, "equivalent"),
    ],
)
def test_four_words(shift: float, better: str, within: float | None, word: str):
    found = pair("a", "b", *draws(3, shift, n=20, sd=0.5))
    assert contrast(found, better, within) == word


def test_equivalence_is_two_one_sided_tests():
    """At 5 % each, which is a 90 % interval within the margin."""
    found = pair("a", "b", *draws(5))
    low, high = found.interval(0.9)
    edge = max(-low, high)
    for margin, word in ((edge * 1.001, "equivalent"), (edge * 0.999, "undecided")):
        assert contrast(found, "higher", margin) == word
        p = max(found.above(-margin), found.below(margin))
        assert (p < 0.05) == (word == "equivalent")


def lost_in(first: int, second: int, n: int = 12) -> Paired:
    before, after = draws(9, shift=5.0, n=n)
    before |= dict.fromkeys(range(first), math.nan)
    after |= dict.fromkeys(range(n - second, n), math.nan)
    return pair("a", "b", before, after)


@pytest.mark.parametrize(
    ("first", "second", "word"),
    [
        (0, 0, "better"),
        (0, 5, "better"),  # p = 2/32 is not enough, so the values decide
        (0, 6, "worse"),  # p = 2/64
        (6, 0, "better"),
        (1, 6, "better"),  # p = 16/128
        (0, 12, "worse"),
        (12, 0, "better"),
    ],
)
def test_an_arm_that_loses_seeds_is_worse_by_the_sign_test(first, second, word):
    """Whatever its surviving values say, and whichever direction is better."""
    found = lost_in(first, second)
    assert found.lost == (first, second, 0)
    assert contrast(found, "higher", None) == word
    if word == "worse":
        assert contrast(found, "lower", None) == "worse"
