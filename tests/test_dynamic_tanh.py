"""Dynamic tanh: the comparator that has no statistics."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compare import unit_roundoff
from small import ones, refuse

import normjax as nj

SCALE, BIAS = np.array([1.0, -2.0, 0.5]), np.array([0.0, 3.0, -1.0])


def parameters(dtype: Any = jnp.float64, alpha: float = 0.7) -> dict[str, Any]:
    values = {"alpha": alpha, "scale": SCALE, "bias": BIAS}
    return {name: jnp.asarray(value, dtype) for name, value in values.items()}


def draw(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).normal(0.3, 2.0, shape)


@pytest.mark.parametrize("shape", [(3,), (4, 3), (2, 5, 3), (0, 3)])
def test_value(shape: tuple[int, ...]):
    x = draw(*shape)
    expected = SCALE * np.tanh(0.7 * x) + BIAS
    actual = nj.dynamic_tanh(jnp.asarray(x), parameters())
    np.testing.assert_allclose(actual, expected, rtol=1e-14, atol=1e-15)


def test_gradients():
    x, params, bar = draw(4, 3), parameters(), draw(4, 3)[::-1]
    t = np.tanh(0.7 * x)

    def loss(x, params):
        return jnp.sum(jnp.asarray(bar) * nj.dynamic_tanh(x, params))

    dx, dp = jax.grad(loss, (0, 1))(jnp.asarray(x), params)
    np.testing.assert_allclose(dx, bar * SCALE * 0.7 * (1 - t**2), rtol=1e-12)
    np.testing.assert_allclose(dp["alpha"], (bar * SCALE * x * (1 - t**2)).sum())
    np.testing.assert_allclose(dp["scale"], (bar * t).sum(0), rtol=1e-12)
    np.testing.assert_allclose(dp["bias"], bar.sum(0), rtol=1e-12)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_narrow_dtypes_are_computed_wide(dtype: str):
    """Only what comes in and goes out is rounded; alpha x may leave the dtype."""
    x = jnp.asarray(draw(50, 3), dtype)
    y = nj.dynamic_tanh(x, parameters(dtype))
    wide = {k: v.astype(jnp.float64) for k, v in parameters(dtype).items()}
    expected = nj.dynamic_tanh(x.astype(jnp.float64), wide)
    assert y.dtype == x.dtype
    bound = 2 * unit_roundoff(dtype) * (np.abs(SCALE) + np.abs(BIAS))
    assert (np.abs(np.asarray(y, np.float64) - expected) <= bound).all()
    large = jnp.full((3,), 6e4, dtype)
    ends = nj.dynamic_tanh(large, parameters(dtype, alpha=100.0))
    np.testing.assert_array_equal(np.asarray(ends, np.float64), SCALE + BIAS)


def test_large_inputs_saturate_with_no_gradient():
    x = jnp.array([-3e38, 1e4, 3e38], jnp.float32)
    params = nj.init_dynamic_tanh(3)
    assert nj.dynamic_tanh(x, params).tolist() == [-1.0, 1.0, 1.0]
    slope = jax.grad(lambda x: jnp.sum(nj.dynamic_tanh(x, params)))(x)
    assert slope.tolist() == [0.0, 0.0, 0.0]


def test_init_is_alpha_times_x_near_zero():
    params = nj.init_dynamic_tanh(3, alpha=0.25, dtype=jnp.bfloat16)
    assert {k: (v.shape, str(v.dtype)) for k, v in params.items()} == {
        "alpha": ((), "bfloat16"),
        "scale": ((3,), "bfloat16"),
        "bias": ((3,), "bfloat16"),
    }
    y = nj.dynamic_tanh(jnp.full((3,), 1e-3, jnp.float32), params)
    np.testing.assert_allclose(y, 2.5e-4, rtol=1e-6)


FINE = nj.init_dynamic_tanh(3)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: nj.dynamic_tanh(ones(3), []), "params is [], expected a dict with"),  # type: ignore[arg-type]
        (
            lambda: nj.dynamic_tanh(ones(2, 4), FINE),
            "params is {'alpha': (), 'scale': (3,), 'bias': (3,)}, expected a dict "
            "with arrays of shape {'alpha': (), 'bias': (4,), 'scale': (4,)}, as nj.in",
        ),
        (
            lambda: nj.dynamic_tanh(ones(3, dtype="int32"), FINE),
            "x has dtype int32, expected a float dtype",
        ),
        (lambda: nj.init_dynamic_tanh(3.0), "features is 3.0, expected a whole number"),  # type: ignore[arg-type]
        (lambda: nj.init_dynamic_tanh(3, float("nan")), "alpha is nan, expected a fin"),
        (
            lambda: nj.init_dynamic_tanh(3, dtype="int32"),
            "init_dynamic_tanh has dtype int32, expected a float dtype",
        ),
    ],
)
def test_wrong_input_is_one_clear_line(call, message: str):
    with refuse(message):
        call()
