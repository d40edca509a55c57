"""What is computed badly, or differentiated wrongly, is named; what is right is not."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import normjax as nj

pytestmark = pytest.mark.jax_defaults
SHAPE = (3, 7)


def layer(x, variance, xp=jnp):
    mean = x.mean(-1, keepdims=True)
    return (x - mean) / xp.sqrt(variance(x, mean) + np.float32(1e-5))


def two_pass(x, mean):
    return ((x - mean) ** 2).mean(-1, keepdims=True)


def one_pass(x, mean):
    return (x**2).mean(-1, keepdims=True) - mean**2


def clamped(x, mean):
    return np.maximum(one_pass(x, mean), np.float32(0))


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(
    ("variance", "word"),
    [
        (two_pass, "stable"),
        (one_pass, "ONE-PASS, NaN where it is negative"),
        (clamped, "ONE-PASS, clamped at 0"),
    ],
)
def test_the_variance_of_a_numpy_layer(variance, word: str, dtype: str):
    with np.errstate(invalid="ignore"):
        found = nj.audit(lambda x: layer(x, variance, np), SHAPE, dtype)
    assert found["variance"].value == word
    assert found["variance"].defect == (word != "stable")


def test_flax_layer_norm_is_one_pass_and_ours_is_not():
    """±1500 in place of ±1.34 on 1e4 + (0, 1, 2, 3) is what it costs."""
    theirs, ours = nn.LayerNorm(), nj.linen.LayerNorm()
    assert nj.audit(theirs, (4, 6))["variance"].value == "ONE-PASS, clamped at 0"
    found = nj.audit(ours, (4, 6))
    assert (found["variance"].value, found.defects) == ("stable", ())
    assert found["derivative"].value == "right"
    x = jnp.float32(1e4) + jnp.arange(4.0)[None]
    right = np.array([-1.5, -0.5, 0.5, 1.5]) / np.sqrt(1.25)
    wrong, _ = theirs.init_with_output(jax.random.key(0), x)
    assert np.abs(wrong).max() > 1000
    better, _ = ours.init_with_output(jax.random.key(0), x)
    np.testing.assert_allclose(better[0], right, atol=1e-5)


def stopped(mean: bool, scale: bool):
    """A layer norm whose derivative leaves out what is said."""

    def function(x):
        average = x.mean(-1, keepdims=True)
        divisor = jnp.sqrt(two_pass(x, average) + 1e-5)
        average = jax.lax.stop_gradient(average) if mean else average
        divisor = jax.lax.stop_gradient(divisor) if scale else divisor
        return (x - average) / divisor

    return function


@pytest.mark.parametrize(
    ("mean", "scale", "word"),
    [
        (False, False, "right"),
        (True, False, "MEAN TERM MISSING"),
        (False, True, "SCALE TERM MISSING"),
        (True, True, "MEAN AND SCALE TERMS MISSING"),
    ],
)
def test_the_derivative(mean: bool, scale: bool, word: str):
    found = nj.audit(stopped(mean, scale), SHAPE)
    assert found["derivative"].value == word
    assert found["derivative"].defect == (word != "right")


def test_a_derivative_that_is_nan_at_a_constant_input():
    @jax.custom_jvp
    def function(x):
        return layer(x, two_pass)

    @function.defjvp
    def _(primals, tangents):
        y, dy = jax.jvp(lambda x: layer(x, two_pass), primals, tangents)
        spread = primals[0].std(-1, keepdims=True)
        return y, dy * (spread / spread)

    found = nj.audit(function, SHAPE)
    assert found["derivative"].value == "right; NaN AT CONSTANT INPUT"
    assert found["derivative"].defect


def test_without_a_variance_or_a_derivative_nothing_is_claimed():
    def rms(x):
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + np.float32(1e-5))

    names = {finding.name for finding in nj.audit(rms, SHAPE).findings}
    assert names.isdisjoint({"variance", "derivative"})
