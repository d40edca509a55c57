from __future__ import annotations

from dataclasses import replace

import jax
import numpy as np
import pytest

import normjax as nj
from normjax.auditing.formula import DIVISORS, MEASURES, PLACEMENTS, Formula

RNG = np.random.default_rng(0)
X = RNG.normal(size=(3, 4)) * 2 + 1
ROWS = np.repeat(np.arange(3)[:, None], 4, axis=1)
SCALE, BIAS = RNG.uniform(0.5, 1.5, X.shape), RNG.normal(size=X.shape)


@pytest.mark.parametrize("placement", ["inside", "outside", "clamp", "none"])
@pytest.mark.parametrize("ddof", [0, 1])
def test_the_reference_is_what_the_spec_computes(placement: str, ddof: int):
    epsilon = 0.0 if placement == "none" else 0.3
    words = {"inside": "inside_sqrt", "outside": "outside_sqrt", "clamp": "floor_var"}
    spec = nj.layer_norm(
        epsilon=epsilon,
        epsilon_placement=words.get(placement, "inside_sqrt"),
        ddof=ddof,
        affine=None,
    )
    formula = Formula(
        ROWS, epsilon=epsilon, placement=placement, divisor=("n", "n-1")[ddof]
    )
    expected = np.asarray(nj.normalize(spec, jax.numpy.asarray(X)))
    np.testing.assert_allclose(formula.reference(X), expected, rtol=1e-13)


def test_a_sum_in_place_of_the_mean_is_the_l2_norm():
    formula = Formula(ROWS, 0, "rms", epsilon=0.1, divisor="1")
    expected = X / np.sqrt((X**2).sum(1, keepdims=True) + 0.1)
    np.testing.assert_allclose(formula.reference(X), expected, rtol=1e-14)


def test_scale_bias_and_elements_in_no_group():
    groups = np.where(np.arange(4) == 3, -1, ROWS)
    formula = Formula(groups, scale=SCALE, bias=BIAS)
    y = formula.reference(X)
    np.testing.assert_array_equal(y[:, 3], BIAS[:, 3])
    part = X[:, :3]
    z = (part - part.mean(1, keepdims=True)) / np.sqrt(part.var(1) + 1e-5)[:, None]
    np.testing.assert_allclose(y[:, :3], SCALE[:, :3] * z + BIAS[:, :3], rtol=1e-13)
    assert not formula.jacobian(X)[3].any()


def test_statistics_of_the_valid_elements():
    mask = np.array([[1, 1, 0, 1], [1, 0, 0, 0], [0, 0, 0, 0]], bool)
    found = Formula(ROWS).statistics(X, mask)
    np.testing.assert_array_equal(found.count, [3, 1, 0])
    np.testing.assert_allclose(found.mean[:2], [X[0, mask[0]].mean(), X[1, 0]])
    np.testing.assert_allclose(found.variance[0], X[0, mask[0]].var())
    y = Formula(ROWS).reference(X, mask)
    z = (X[0] - X[0, mask[0]].mean()) / np.sqrt(X[0, mask[0]].var() + 1e-5)
    np.testing.assert_allclose(y[0], z)
    assert np.isnan(y[2]).all()


@pytest.mark.parametrize("measure", MEASURES)
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_the_jacobian_is_the_slope_of_the_reference(measure: str, placement: str):
    alpha = int(measure not in ("rms", "mean_abs", "max_abs"))
    base = Formula(
        ROWS, alpha, measure, epsilon=0.2, placement=placement, scale=SCALE, bias=BIAS
    )
    for power, divisor in zip((0.5, 0.5, 2.0), DIVISORS, strict=True):
        formula = replace(base, power=power, divisor=divisor)
        step = 1e-6  # central differences err by step² and by 1e-16 / step
        slopes = [
            (formula.reference(X + d) - formula.reference(X - d)).ravel() / (2 * step)
            for d in step * np.eye(X.size).reshape(-1, *X.shape)
        ]
        whole = np.stack(slopes, axis=1)
        found = formula.jacobian(X)
        np.testing.assert_allclose(found, whole, atol=3e-8 * np.abs(whole).max())


def test_a_dropped_term_is_what_a_detached_statistic_gives():
    def layer(x, *, mean: bool, scale: bool):
        stop = jax.lax.stop_gradient
        m = x.mean(1, keepdims=True)
        v = x.var(1, keepdims=True)
        return (x - (m if mean else stop(m))) / jax.numpy.sqrt(
            (v if scale else stop(v)) + 1e-5
        )

    formula = Formula(ROWS)
    for mean, scale in ((True, True), (False, True), (True, False), (False, False)):
        expected = jax.jacobian(lambda x, m=mean, s=scale: layer(x, mean=m, scale=s))
        found = formula.jacobian(X, mean_term=mean, scale_term=scale)
        whole = np.asarray(expected(jax.numpy.asarray(X))).reshape(X.size, X.size)
        np.testing.assert_allclose(found, whole, atol=1e-13)
