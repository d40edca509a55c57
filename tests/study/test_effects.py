"""Shares and factorial effects: against permutations, regression and by hand."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from normjax.study import effects

pytestmark = pytest.mark.jax_defaults


def game(k: int, seeds: int = 7) -> np.ndarray:
    return np.random.default_rng(k).normal(3.0, 2.0, (2**k, seeds))


def over_all_orders(v: np.ndarray) -> np.ndarray:
    """The definition: walk every order of changing the properties."""
    k = len(v).bit_length() - 1
    orders = list(itertools.permutations(range(k)))
    found = np.zeros((k, *v.shape[1:]))
    for order in orders:
        mask = 0
        for i in order:
            found[i] += v[mask | 1 << i] - v[mask]
            mask |= 1 << i
    return found / len(orders)


@pytest.mark.parametrize("k", [1, 2, 3, 4, 5])
def test_shapley_is_the_mean_over_all_orders_and_sums_to_the_whole(k: int):
    v = game(k)
    found = effects.shapley(v)
    # Sums of at most 2^k terms of size 10 in float64.
    tolerance = 2**k * 10 * np.finfo(float).eps
    np.testing.assert_allclose(found, over_all_orders(v), rtol=0, atol=tolerance)
    np.testing.assert_allclose(found.sum(0), v[-1] - v[0], rtol=0, atol=tolerance)


def test_the_sum_shows_a_weight_that_is_wrong(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(effects, "factorial", lambda n: max(n, 1))
    v = game(4)
    assert np.abs(effects.shapley(v).sum(0) - (v[-1] - v[0])).max() > 1e-3


def test_a_large_offset_cancels():
    v = game(3)
    shifted = effects.shapley(v + 1e9)
    # Each value is rounded to eps × 1e9 before any difference is taken.
    bound = 2**3 * 1e9 * np.finfo(float).eps
    np.testing.assert_allclose(shifted, effects.shapley(v), rtol=0, atol=bound)


def test_a_property_that_does_nothing_has_no_share():
    v = np.repeat(game(2), 2, axis=0)  # bit 0 changes nothing
    assert not effects.shapley(v)[0].any()
    # Four numbers near 3 cancel: a few roundings of float64 are left.
    for pair, found in effects.interactions(v).items():
        assert 0 not in pair or np.abs(found).max() < 1e-14


def test_interactions_of_products():
    """Of 5ab + 7abc, a and b share 5 and half of 7, the other pairs half of 7."""
    bits = np.array([[mask >> i & 1 for i in range(3)] for mask in range(8)])
    a, b, c = bits.T
    found = effects.interactions((5 * a * b + 7 * a * b * c + 2 * c).astype(float))
    expected = {(0, 1): 8.5, (0, 2): 3.5, (1, 2): 3.5}
    assert {pair: float(x) for pair, x in found.items()} == pytest.approx(expected)


@pytest.mark.parametrize("k", [2, 3, 5])
def test_factorial_contrasts_are_twice_the_coefficients_of_a_regression(k: int):
    v = game(k)
    signs = np.array([[2 * (m >> i & 1) - 1 for i in range(k)] for m in range(2**k)])
    found = effects.contrasts(v)
    assert len(found) == 2**k - 1
    design = np.stack([signs[:, list(t)].prod(1) for t in found], 1)
    design = np.concatenate([np.ones((2**k, 1)), design], 1)
    fitted = np.linalg.lstsq(design, v, rcond=None)[0][1:]
    np.testing.assert_allclose(np.stack(list(found.values())), 2 * fitted, atol=1e-12)


def test_a_main_effect_is_on_minus_off():
    v = game(3)
    on = [m for m in range(8) if m & 2]
    off = [m for m in range(8) if not m & 2]
    np.testing.assert_allclose(
        effects.contrasts(v)[1,], v[on].mean(0) - v[off].mean(0), atol=1e-13
    )


def test_a_lost_combination_is_lost_and_nothing_else():
    v = game(2)
    v[1, 3] = np.nan
    assert np.isnan(effects.shapley(v)[:, 3]).all()
    assert np.isfinite(np.delete(effects.shapley(v), 3, axis=1)).all()


@pytest.mark.parametrize("n", [0, 1, 3, 6])
def test_what_is_no_lattice_is_refused(n: int):
    message = rf"^game: expected 2\^k combinations, got {n}$"
    with pytest.raises(ValueError, match=message):
        effects.shapley(np.zeros(n))
