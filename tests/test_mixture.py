"""Mixtures of specs against a plain formula in float64 that shares no code."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compare import jit, unit_roundoff
from mixtures import (
    BOUND,
    MIXTURES,
    SHAPE,
    apply,
    arrays,
    draw,
    every,
    gap,
    parameters,
    plain,
)

import normjax as nj
from normjax.mixture import init, normalize

BAR = draw(*SHAPE, seed=9)


def evaluated(function, x, params) -> dict:
    """Value, gradients by x and every parameter, and a second derivative along BAR."""

    @jit
    def everything(x, params):
        def loss(x, params):
            return jnp.sum(BAR * function(x, params))

        def curve(x):
            return jax.grad(lambda x: jnp.sum(function(x, params) ** 3))(x)

        dx, dp = jax.grad(loss, (0, 1))(x, params)
        second = jax.jvp(curve, (x,), (jnp.asarray(BAR),))[1]
        return {"value": function(x, params), "x": dx, "second": second} | dp

    return everything(x, params)


@every
@pytest.mark.parametrize("lead", [(), (3,), (3, 4, 5)], ids=["one", "example", "place"])
def test_value_and_derivatives_are_those_of_the_formula(name: str, lead):
    mixture, axes = MIXTURES[name]
    x, params = jnp.asarray(draw(*SHAPE)), arrays(parameters(mixture, lead))
    found = evaluated(lambda x, p: normalize(mixture, x, p), x, params)
    expected = evaluated(lambda x, p: plain(mixture, axes, x, p), x, params)
    assert set(found) == {"value", "x", "second", *init(mixture, SHAPE)}
    errors = {key: gap(found[key], value) for key, value in expected.items()}
    print(errors)
    assert max(errors.values()) <= BOUND, errors
    fixed = [nj.moments(spec, x) for spec in mixture.specs]
    slope = jax.grad(
        lambda x: jnp.sum(BAR * normalize(mixture, x, params, moments=fixed))
    )(x)
    assert gap(slope, expected["x"]) > 1e-3  # a derivative without the moments' part


PLANTED = {
    "one softmax for both": lambda p: p | {"variance_logits": p["mean_logits"]},
    "logits scaled": lambda p: p | {"mean_logits": p["mean_logits"] * 1.1},
    "members swapped": lambda p: p | {"mean_logits": p["mean_logits"][::-1]},
    "no bias": lambda p: p | {"bias": 0 * p["bias"]},
    "scale doubled": lambda p: p | {"scale": 2 * p["scale"]},
}


@pytest.mark.parametrize("name", PLANTED)
def test_the_comparison_rejects_a_planted_error(name: str):
    mixture, axes = MIXTURES["switchable"]
    x, params = jnp.asarray(draw(*SHAPE)), arrays(parameters(mixture))
    y = apply(mixture, x, params)
    assert gap(y, plain(mixture, axes, x, PLANTED[name](params))) > 1e-3
    assert gap(y, plain(mixture, axes[::-1], x, params)) > 1e-3


REMOVES_OFFSET = ["switchable", "with groups", "nothing in common", "centre only"]


@pytest.mark.parametrize("name", REMOVES_OFFSET)
@pytest.mark.parametrize("offset", [1e4, -3e5])
def test_a_large_offset_in_float32(name: str, offset: float):
    """The offset rounds in x, and nowhere after that."""
    mixture, axes = MIXTURES[name]
    x = draw(*SHAPE, offset=offset).astype(np.float32)
    params = parameters(mixture) | {"bias": np.zeros(6), "scale": np.ones(6)}
    params = {key: params[key] for key in init(mixture, SHAPE)}
    expected = plain(mixture, axes, jnp.asarray(x, jnp.float64), params)
    actual = apply(mixture, jnp.asarray(x), arrays(params, jnp.float32))
    assert actual.dtype == jnp.float32
    assert gap(actual, expected) <= 64 * unit_roundoff(np.float32)


def test_a_mean_that_is_no_pair_fails_there():
    """Σ pₖ mₖ rounded to one float32 errs by κ u: what the pair is for."""
    mixture, axes = MIXTURES["switchable"]
    x = draw(*SHAPE, offset=3e5).astype(np.float32)
    expected = plain(mixture, axes, jnp.asarray(x, jnp.float64))
    m = [x.astype(np.float64).mean(a, keepdims=True).astype(np.float32) for a in axes]
    v = [x.astype(np.float64).var(a, keepdims=True).astype(np.float32) for a in axes]
    naive = (x - sum(np.float32(1 / 3) * a for a in m)) / np.sqrt(sum(v) / 3 + 1e-5)
    assert gap(naive, expected) > 1e-3


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_narrow_dtypes_have_wide_statistics(dtype: str):
    mixture, axes = MIXTURES["switchable"]
    x = jnp.asarray(draw(*SHAPE, offset=100.0), dtype)
    y = apply(mixture, x, arrays(parameters(mixture), dtype))
    assert y.dtype == x.dtype
    rounded = arrays(arrays(parameters(mixture), dtype))
    expected = plain(mixture, axes, x.astype(jnp.float64), rounded)
    assert gap(y, expected) <= 2 * unit_roundoff(dtype)
    big = jnp.asarray(300 * draw(*SHAPE), jnp.float16)  # squares overflow float16
    assert np.isfinite(np.asarray(apply(mixture, big), np.float32)).all()
