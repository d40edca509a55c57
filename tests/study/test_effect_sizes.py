"""Effect sizes, exact p and numbers of seeds: by enumeration, SciPy, statsmodels."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from samples import REPEATS, by_seed, draws
from scipy import stats

from normjax.study.effect_sizes import (
    difference_power,
    effect_size,
    equivalence_power,
    seeds_needed,
    sign_flip,
)
from normjax.study.inference import holm, pair

pytestmark = pytest.mark.jax_defaults


@pytest.mark.parametrize("n", [2, 5, 10])
def test_the_exact_p_counts_all_sign_flips(n: int):
    d = np.random.default_rng(n).normal(0.4, 1, n)
    flips = np.array(list(itertools.product([-1, 1], repeat=n)))
    means = np.abs(flips @ d)
    expected = np.mean(means >= means[-1] * (1 - 1e-12))
    assert sign_flip(tuple(d)) == pytest.approx(float(expected), rel=1e-12)


def test_the_exact_p_has_a_floor_and_draws_agree_with_t():
    assert sign_flip((1.0,) * 5) == 2 / 2**5
    assert sign_flip((0.0,) * 4) == 1.0
    d = np.random.default_rng(1).normal(0.3, 1, 40)
    p = sign_flip(tuple(d))
    assert p == sign_flip(tuple(d))
    theirs: Any = stats.ttest_1samp(d, 0)
    # 10^5 draws: four standard errors, and the t test's own approximation at n = 40.
    assert p == pytest.approx(theirs.pvalue, abs=0.01)


def test_sizes_by_hand():
    d = [3.0, -1.0, 2.0, 0.0]
    found = effect_size(pair("a", "b", by_seed([0] * 4), by_seed(d)), None)
    assert found.d_z == pytest.approx(1 / np.std(d, ddof=1))
    assert found.superiority == 0.625
    walsh = [(d[i] + d[j]) / 2 for i in range(4) for j in range(i, 4)]
    assert found.hodges_lehmann == np.median(walsh)
    assert (found.seeds_for_difference, found.seeds_for_equivalence) == (None, None)


def test_one_outlier_is_skewed_and_leaves_the_median():
    d = [*np.random.default_rng(0).normal(1, 0.1, 15), 50.0]
    found = effect_size(pair("a", "b", by_seed([0] * 16), by_seed(d)), 0.5)
    assert found.skewed
    assert found.hodges_lehmann == pytest.approx(1, abs=0.15)
    even = effect_size(pair("a", "b", *draws(3, n=16)), 0.5)
    assert not even.skewed


@pytest.mark.parametrize("values", [[], [1.0], [2.0, 2.0, 2.0]])
def test_degenerate_samples_have_no_size(values: list[float]):
    same = by_seed(values)
    found = effect_size(pair("a", "b", same, same), 0.1)
    assert found.d_z is None
    if len(values) == 3:
        assert (found.p_exact, found.superiority) == (1.0, 0.5)
        assert (found.seeds_for_difference, found.seeds_for_equivalence) == (2, 2)


def test_the_power_of_equivalence_is_what_simulation_says():
    rng = np.random.default_rng(0)
    for n, ratio in ((10, 1.0), (20, 0.5), (32, 0.5)):
        d = rng.normal(0, 1, (20_000, n))
        half = stats.t.ppf(0.95, n - 1) * d.std(axis=1, ddof=1) / n**0.5
        simulated = np.mean(np.abs(d.mean(axis=1)) + half < ratio)
        # Four standard errors of 20 000 repeats.
        assert equivalence_power(n, ratio) == pytest.approx(simulated, abs=0.0142)


@pytest.mark.parametrize("power", [difference_power, equivalence_power])
@pytest.mark.parametrize("ratio", [0.05, 0.5, 1.0, 10.0])
def test_seeds_needed_is_the_first_number_that_is_enough(power: Any, ratio: float):
    n = seeds_needed(power, 3 * ratio, 3.0)
    assert n is not None
    assert power(n, ratio) >= 0.8
    assert n == 2 or power(n - 1, ratio) < 0.8


def test_what_takes_too_many_seeds_has_no_number():
    assert seeds_needed(difference_power, 1e-6, 1.0) is None


def test_statsmodels_agrees():
    api = pytest.importorskip("statsmodels.stats.api")
    for n, ratio in ((5, 0.3), (20, 0.5), (64, 1.0)):
        theirs = api.TTestPower().power(ratio, n, 0.05)
        assert difference_power(n, ratio) == pytest.approx(theirs, rel=1e-6)
    p = np.random.default_rng(2).uniform(0, 0.1, 12)
    theirs = api.multipletests(p, method="holm")[1]
    np.testing.assert_allclose(holm(list(p)), theirs, rtol=1e-12)
    for seed in range(5):
        before, after = draws(seed, shift=0.1)
        found = pair("a", "b", before, after)
        x, y = (np.array(list(v.values())) for v in (before, after))
        theirs = api.ttost_paired(y, x, -0.4, 0.4)[0]
        ours = max(found.above(-0.4), found.below(0.4))
        assert ours == pytest.approx(theirs, rel=1e-9)


def test_an_a_a_comparison_has_a_uniform_exact_p():
    p = [
        sign_flip(pair("a", "b", *draws(5000 + s, n=8)).differences)
        for s in range(REPEATS)
    ]
    low, high = stats.binom.interval(0.999, REPEATS, 12 / 256)
    assert low <= sum(x <= 0.05 for x in p) <= high
