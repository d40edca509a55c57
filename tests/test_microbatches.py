"""Gradient accumulation: exact with merged moments, and what it changes without."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compare import FACTOR, unit_roundoff, wide

import normjax as nj
from normjax.statistics import merge

pytestmark = pytest.mark.x32


def exact(spec: nj.NormSpec, parts, params=None):
    """Pass 1: the moments of all microbatches. Pass 2: normalize each with the merger.

    Both passes hold one microbatch at a time; the gradient goes through the merger.
    """
    moments = jax.lax.map(jax.checkpoint(partial(nj.moments, spec)), parts)
    merged = merge(moments)

    def normalized(part):
        return nj.normalize(spec, part, params, moments=merged)

    return jax.lax.map(jax.checkpoint(normalized), parts), merged


def apart(spec: nj.NormSpec, parts, params=None):
    """The usual way: every microbatch by its own statistics."""
    return jax.vmap(lambda part: nj.normalize(spec, part, params))(parts)


def relative(found, expected) -> float:
    found, expected = wide(found), wide(expected)
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))


def test_two_microbatches_of_two():
    """N39: the full batch's gradient; microbatches of two have none at all."""
    parts = jnp.asarray([[[0.0], [2.0]], [[4.0], [6.0]]])
    spec = nj.batch_norm(affine=None, running=nj.Running(decay=0.9))

    def loss(run, parts):
        return jnp.sum(run(parts) ** 3)

    found = jax.grad(partial(loss, lambda p: exact(spec, p)[0]))(parts)
    right = [1.0733, -1.0733, -1.0733, 1.0733]
    np.testing.assert_allclose(found.ravel(), right, atol=1e-4)
    lost = jax.grad(partial(loss, partial(apart, spec)))(parts)
    assert float(jnp.abs(lost).max()) < 1e-4
    merged = exact(spec, parts)[1]
    state = nj.running.update(spec, nj.running.init(spec, (4, 1)), merged)
    np.testing.assert_allclose(state.mean, [0.3], rtol=1e-6)
    np.testing.assert_allclose(state.variance, [1.4], rtol=1e-6)
    twice = nj.running.init(spec, (2, 1))
    for part in parts:
        twice = nj.running.update(spec, twice, nj.moments(spec, part))
    np.testing.assert_allclose(twice.mean, [0.59], rtol=1e-6)
    np.testing.assert_allclose(twice.variance, [1.0], rtol=1e-6)


@pytest.mark.parametrize("offset", [0.0, 1e4])
@pytest.mark.parametrize(
    "spec",
    [
        nj.batch_norm(),
        nj.batch_norm(ddof=1),
        nj.batch_norm(divide="rms", center=False),
        nj.batch_norm(epsilon_placement="floor_std", epsilon=0.1),
    ],
    ids=["batch", "ddof", "rms", "floor"],
)
def test_exact_accumulation_is_the_large_batch(spec: nj.NormSpec, offset: float):
    """Value and every gradient, to rounding at any offset."""
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(32, 3)) + offset, jnp.float32)
    bar = jnp.asarray(rng.normal(size=x.shape), jnp.float32)
    params = nj.init(spec, x.shape)

    def whole(x, params):
        return jnp.sum(nj.normalize(spec, x, params) * bar)

    def parts(x, params):
        y = exact(spec, x.reshape(8, 4, 3), params)[0]
        return jnp.sum(y.reshape(x.shape) * bar)

    u = unit_roundoff(np.float32)
    y = exact(spec, x.reshape(8, 4, 3), params)[0].reshape(x.shape)
    bound = FACTOR * u * (32 + offset)
    assert relative(y, nj.normalize(spec, x, params)) <= bound
    expected = jax.grad(whole, argnums=(0, 1))(x, params)
    found = jax.grad(parts, argnums=(0, 1))(x, params)
    assert relative(found[0], expected[0]) <= bound
    for name in params:
        assert relative(found[1][name], expected[1][name]) <= bound


@pytest.mark.parametrize("size", [2, 4, 8, 16])
def test_what_the_usual_way_changes(size: int):
    """A microbatch of m sees (m − 1)/m of the variance, and loses the difference.

    Over many draws the mean of its variances is that share of the large batch's, and
    the gradient differs by about as much as the statistics do: √(1/m) and more.
    """
    rng = np.random.default_rng(1)
    x = jnp.asarray(rng.normal(size=(4096, 8)), jnp.float32)
    bar = jnp.asarray(rng.normal(size=x.shape), jnp.float32)
    spec, parts = nj.batch_norm(affine=None), x.reshape(-1, size, 8)
    seen = jax.vmap(partial(nj.moments, spec))(parts).variance().mean()
    whole = nj.moments(spec, x).variance().mean()
    assert float(seen / whole) == pytest.approx((size - 1) / size, abs=0.02)

    def gradient(run):
        return jax.grad(lambda x: jnp.sum(run(x).reshape(x.shape) * bar))(x)

    right = gradient(partial(nj.normalize, spec))
    usual = gradient(lambda x: apart(spec, x.reshape(-1, size, 8)))
    merged = gradient(lambda x: exact(spec, x.reshape(-1, size, 8))[0])
    print(size, relative(usual, right), relative(merged, right))
    assert relative(usual, right) > 0.5 / np.sqrt(size)
    assert relative(merged, right) <= FACTOR * unit_roundoff(np.float32) * 4096


def test_ghosts_merge_into_the_batch_they_are_part_of():
    """Ghost and virtual batches from the same merge."""
    x = jnp.asarray(np.random.default_rng(2).normal(size=(12, 5)) + 100, jnp.float32)
    ghosts = nj.ghost_batch_norm(ghosts=3)
    parts = nj.moments(ghosts, x)
    assert parts.mean.shape == (3, 5)
    merged, whole = merge(parts), nj.moments(nj.batch_norm(), x)
    u = unit_roundoff(np.float32)
    for name in ("count", "mean", "m2"):
        found, expected = getattr(merged, name), getattr(whole, name)
        np.testing.assert_allclose(found, expected, rtol=FACTOR * u * 12)
    y = nj.normalize(nj.batch_norm(), x, moments=merged)
    assert relative(y, nj.normalize(nj.batch_norm(), x)) <= FACTOR * u * (12 + 100)
