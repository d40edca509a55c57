"""Histograms and flagged rows: exact, and the same however the stream is cut."""

from __future__ import annotations

import numpy as np
import pytest

from normjax.analysis import Extreme, Flagged, Histogram
from normjax.analysis.tally import EDGES

pytestmark = pytest.mark.jax_defaults

SPECIAL = [0.0, np.inf, 1e-39, 0.5, 1.0, 10.0, 1e38, 3e38, 1e300]


def sample(size: int = 400) -> np.ndarray:
    rng = np.random.default_rng(0)
    values = np.exp(rng.normal(0, 5, size))
    values[: len(SPECIAL)] = SPECIAL
    values[50:60] = values[60:70]  # ties
    return values


def places(count: int) -> np.ndarray:
    row = np.arange(count) // 7
    return np.stack([row, row + 3], axis=1)


def added(values: np.ndarray, cuts: list[int]) -> Histogram:
    found = Histogram()
    index = places(len(values))
    for part, where in zip(np.split(values, cuts), np.split(index, cuts), strict=True):
        found = found + Histogram.of(part, where)
    return found


def same(first: Histogram, second: Histogram) -> bool:
    counts = np.array_equal(first.counts, second.counts)
    rest = [{**vars(h), "counts": None} for h in (first, second)]
    return counts and rest[0] == rest[1]


def test_counts_are_those_of_numpy():
    values = sample()
    found = added(values, [])
    right, _ = np.histogram(values, EDGES)
    assert np.array_equal(found.counts[1:-1], right)
    assert (found.zero, found.infinite, found.undefined) == (1, 1, 0)
    assert (found.counts[0], found.counts[-1]) == (1, 2)
    assert found.total == len(values)
    assert found.lowest == Extreme(0.0, (0, 3))
    assert found.highest == Extreme(np.inf, (0, 3))


@pytest.mark.parametrize("cuts", [[], [1], [3, 3, 200], list(range(0, 400, 7))])
def test_parts_add_up_exactly(cuts: list[int]):
    values = sample()
    assert same(added(values, cuts), added(values, [137]))
    assert not same(added(values[:-1], []), added(values, []))  # it can fail


def test_not_a_number_is_in_no_other_count():
    found = Histogram.of(np.array([np.nan, 2.0, np.nan]), places(3))
    assert (found.undefined, found.total) == (2, 1)
    assert found.lowest == found.highest == Extreme(2.0, (0, 3))
    nothing = Histogram.of(np.array([np.nan]), places(1))
    assert same(nothing + found, found + nothing)
    assert np.isnan(nothing.quantile(0.5)).all()


@pytest.mark.parametrize("q", [0.0, 0.01, 0.3, 0.5, 0.99, 1.0])
def test_a_quantile_lies_between_its_edges(q: float):
    values = sample()
    low, high = added(values, [100]).quantile(q)
    right = np.sort(values)[max(0, int(np.ceil(q * len(values))) - 1)]
    assert low <= right <= high
    if 1e-38 < right < 1e38:
        assert high / low < 10 ** (1 / 16) * (1 + 1e-12)


def test_the_worst_rows_do_not_depend_on_the_cut():
    values, index = sample(), places(400)
    chosen = values > 0.01
    order = np.lexsort([index[:, 1], index[:, 0], -values])
    right = [i for i in order if chosen[i]][:20]
    for cut in (0, 1, 55, 399):
        parts = [
            Flagged.of(chosen[s], values[s], index[s], keep=20, highest=True)
            for s in (slice(0, cut), slice(cut, None))
        ]
        found = parts[0].plus(parts[1], keep=20, highest=True)
        assert found.count == chosen.sum()
        assert np.array_equal(found.values, values[right])
        assert np.array_equal(found.index, index[right])
    least = Flagged.of(chosen, values, index, keep=3, highest=False)
    assert np.array_equal(least.values, np.sort(values[chosen])[:3])


def test_the_edges_are_fixed():
    """Histograms of two runs are comparable only if these never move."""
    assert len(EDGES) == 2 * 38 * 16 + 1
    ends = [10 ** (-38 + 1 / 32), 10 ** (1 / 32), 10 ** (38 + 1 / 32)]
    np.testing.assert_allclose(EDGES[[0, 38 * 16, -1]], ends, rtol=1e-14)
