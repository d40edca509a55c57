"""Outcomes against NumPy, and at the values where they are known."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import normjax as nj
from normjax.study import metrics
from normjax.study.norm_setting import NormSetting
from normjax.study.validation import parse

pytestmark = pytest.mark.jax_defaults

RANDOM = np.random.default_rng(0)
Y: Any = RANDOM.normal(2.0, 3.0, 50).astype(np.float32)
NEAR: Any = Y + RANDOM.normal(0, 1.0, 50).astype(np.float32)


def test_r2_is_one_minus_the_share_that_is_left():
    wide = Y.astype(np.float64)
    expected = 1 - np.mean((wide - NEAR) ** 2) / wide.var()
    np.testing.assert_allclose(metrics.r2(jnp.asarray(NEAR), Y), expected, rtol=1e-5)
    assert 0.5 < expected < 0.99


def test_r2_at_its_landmarks():
    y = jnp.asarray(Y)
    assert metrics.r2(y, y) == 1
    np.testing.assert_allclose(metrics.r2(jnp.full(50, Y.mean()), y), 0, atol=1e-6)
    assert metrics.r2(-y, y) < 0
    np.testing.assert_allclose(
        metrics.r2(jnp.asarray(NEAR) * 10, y * 10), metrics.r2(jnp.asarray(NEAR), y),
        rtol=1e-5,
    )  # fmt: skip


def test_r2_is_not_symmetric():
    """A planted swap of prediction and target would be seen."""
    there = float(metrics.r2(jnp.asarray(NEAR), Y))
    assert abs(there - float(metrics.r2(jnp.asarray(Y), NEAR))) > 1e-3


def test_norm_is_over_all_leaves_together():
    tree = {"a": jnp.array([3.0, 0.0]), "b": {"c": jnp.array([[4.0]], jnp.bfloat16)}}
    np.testing.assert_allclose(metrics.norm(tree), 5.0, rtol=1e-6)
    leaves = [RANDOM.normal(size=s).astype(np.float32) for s in ((3, 4), (5,), ())]
    expected = np.linalg.norm(np.concatenate([leaf.ravel() for leaf in leaves]))
    np.testing.assert_allclose(metrics.norm(leaves), expected, rtol=1e-6)


def test_correlation_is_numpys():
    expected = np.corrcoef(NEAR, Y)[0, 1]
    np.testing.assert_allclose(metrics.correlation(NEAR, Y), expected, rtol=1e-5)
    np.testing.assert_allclose(metrics.correlation(-3 * Y + 1, Y), -1, rtol=1e-6)


def probe(x: Any, y: Any, ridge: float = 1e-4) -> float:
    """The probe, trained on the first half."""
    half = len(y) // 2
    return float(metrics.linear_probe(x[:half], y[:half], x[half:], y[half:], ridge))


def test_a_probe_is_ridge_regression():
    x = RANDOM.normal(1.0, 2.0, (60, 5)).astype(np.float32)
    y = (x @ [1.0, -2.0, 0.5, 0.0, 3.0] + RANDOM.normal(0, 2, 60) + 4).astype("f4")
    ridge = 0.05
    a, b = x[:30].astype(np.float64), y[:30].astype(np.float64)
    centred = a - a.mean(0)
    gram = centred.T @ centred / 30
    strength = ridge * np.trace(gram) / 5
    weights = np.linalg.solve(
        gram + strength * np.eye(5), centred.T @ (b - b.mean()) / 30
    )
    prediction = (x[30:] - a.mean(0)) @ weights + b.mean()
    expected = 1 - np.sum((y[30:] - prediction) ** 2) / np.sum(
        (y[30:] - y[30:].mean()) ** 2
    )
    np.testing.assert_allclose(probe(x, y, ridge=ridge), expected, rtol=1e-4)


def test_a_probe_reads_what_is_linear_and_nothing_else():
    x = RANDOM.normal(size=(80, 3)).astype(np.float32)
    assert probe(x, x @ np.array([1, 2, 3], "f4") + 7) > 0.999
    assert probe(x, RANDOM.normal(size=80).astype("f4")) < 0.3
    centred = x - x.mean(1, keepdims=True)
    assert probe(centred, x.mean(1)) < 0.3
    assert probe(x, x.mean(1)) > 0.999


def test_a_probe_of_dead_units_is_finite():
    y = RANDOM.normal(size=40).astype(np.float32)
    assert abs(probe(np.zeros((40, 3), np.float32), y)) < 0.3


@pytest.mark.parametrize("preset", ["layer_norm", "rms_norm", "batch_norm"])
def test_the_share_is_the_mean_over_groups(preset: str):
    x = RANDOM.normal(0.3, 1.0, (6, 5)).astype(np.float64)
    setting = parse(NormSetting, {"preset": preset, "epsilon": 0.5})
    axis = 0 if preset == "batch_norm" else 1
    square = (x**2).mean(axis) if preset == "rms_norm" else x.var(axis)
    found = metrics.mean_stabilizer_share(setting, jnp.asarray(x, jnp.float32))
    assert found is not None
    np.testing.assert_allclose(found, np.mean(0.5 / (square + 0.5)), rtol=1e-5)
    whole = nj.stabilizer_share(setting.spec, jnp.asarray(x, jnp.float32))
    np.testing.assert_allclose(found, whole.mean(), rtol=1e-6)


def test_there_is_no_share_without_a_layer():
    assert metrics.mean_stabilizer_share(None, jnp.ones((2, 3))) is None
    setting = parse(NormSetting, {"preset": "layer_norm"})
    assert metrics.mean_stabilizer_share(setting, None) is None
