"""Moments: their accuracy at any offset, their weights, and how they merge."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import CASES
from compare import FACTOR, batched, jit, rows, unit_roundoff, wide
from frames import Case, inputs

import normjax as nj
from normjax.statistics import Moments, divide_or_zero, merge, two_sum

pytestmark = pytest.mark.x32

find_moments = jit(nj.moments)
find_merged = jit(merge)

MOMENT_CASES = [
    "layer",
    "batch_space",
    "ghost_first",
    "group",
    "instance",
    "mask_positions",
    "mask_ghost",
    "weights_keep",
    "weights_ddof",
]


def exact_moments(case: Case, x: np.ndarray):
    """Count, mean and M2 of every group in float64, about an element of the group."""
    values = rows(case.frame, x)
    weights = np.ones_like(values)
    if case.weights is not None:
        full = np.broadcast_to(case.in_view(case.weights), (1, *case.frame.view))
        weights = weights * rows(case.frame, full)
    count = weights.sum(-1)
    d = values - values[..., :1]
    rest = (weights * d).sum(-1) / count
    m2 = (weights * (d - rest[..., None]) ** 2).sum(-1)
    return count, values[..., 0] + rest, m2


@pytest.mark.parametrize("name", MOMENT_CASES)
def test_moments_in_float32(name: str):
    """The variance errs by n·u, the mean pair by n·u·std, at up to 10⁶ std from 0."""
    case = CASES[name]
    x = inputs(case, 1000).astype(np.float32)
    mask = case.arguments(np.float32).get("mask")
    found = batched(partial(nj.moments, case.spec, mask=mask), jnp.float32)(x)
    assert found.mean.shape == (1000, *case.frame.mapped_shape)
    flat = jax.tree.map(lambda array: wide(array).reshape(1000, -1), found)
    count, mean, m2 = exact_moments(case, x.astype(np.float64))
    assert np.array_equal(flat.count, count)
    bound = FACTOR * unit_roundoff(np.float32) * case.frame.group_size
    assert np.max(abs(flat.m2 - m2) / m2) <= bound
    std = np.sqrt(m2 / count)
    assert np.max(abs(flat.mean + flat.mean_low - mean) / std) <= bound
    assert np.max(abs(flat.mean_low) / abs(flat.mean)) <= unit_roundoff(np.float32)
    # A mean in one float32 could not keep this promise, nor could the plain two passes.
    assert np.max(abs(flat.mean - mean) / std) > bound
    two_pass = case.spec.replace(precision=nj.Precision(algorithm="two_pass"))
    worse = batched(partial(nj.moments, two_pass, mask=mask), jnp.float32)(x)
    assert np.max(abs(worse.m2.reshape(1000, -1) - m2) / m2) > bound


@pytest.mark.parametrize(
    ("vector", "variance", "mean"),
    [
        ([1e4, 1e4 + 1, 1e4 + 2, 1e4 + 3], 1.25, 10001.5),
        ([1e5, 1e5 + 1, 1e5 + 2, 1e5 + 3], 1.25, 100001.5),
        ([2.0**24, 2.0**24 + 2, 2.0**24 + 4, 2.0**24 + 6], 5.0, 2.0**24 + 3),
    ],
)
def test_moments_at_an_offset(vector, variance, mean):
    """N01, N04: exact, since every sum here is."""
    found = find_moments(nj.layer_norm(), jnp.array(vector, jnp.float32))
    assert float(found.m2) == 4 * variance
    assert float(found.mean) + float(found.mean_low) == mean


def test_moments_in_bfloat16():
    """N02: the variance of what bfloat16 stores, accumulated in float32."""
    rows = [
        ([100, 100.5, 101, 101.5], 0.3125),
        ([9, 9.0625, 9.125, 9.1875], 0.0048828125),
        ([33, 33.25, 33.5, 33.75], 0.078125),
    ]
    for vector, variance in rows:
        x = jnp.array(vector, jnp.bfloat16)[:, None]
        found = find_moments(nj.batch_norm(), x)
        assert found.m2.dtype == jnp.float32
        assert found.m2.tolist() == [4 * variance]


def test_variance_and_mean_square_never_divide_by_zero():
    m = nj.moments(nj.layer_norm(), jnp.array([[3.0], [5.0]], jnp.float32))
    assert m.variance(ddof=1).tolist() == [0.0, 0.0]
    assert m.mean_square(ddof=1).tolist() == [0.0, 0.0]
    assert m.mean_square().tolist() == [9.0, 25.0]
    slope = jax.grad(lambda n: divide_or_zero(n, jnp.zeros_like(n)))(jnp.float32(1))
    assert float(slope) == 0


def test_weights_are_repetitions():
    """Integer weights give what the repeated elements give."""
    rng = np.random.default_rng(0)
    weights = rng.integers(0, 4, 40)
    bound = FACTOR * unit_roundoff(np.float32) * weights.sum()
    for mean in (0.0, 5.0, 1e5):
        x = (rng.normal(size=(40, 2)) + mean).astype(np.float32)
        few = wide(find_moments(nj.batch_norm(), x, weights))
        many = wide(find_moments(nj.batch_norm(), np.repeat(x, weights, axis=0)))
        assert np.array_equal(few.count, many.count)
        np.testing.assert_allclose(few.m2, many.m2, rtol=bound)
        gap = (few.mean - many.mean) + (few.mean_low - many.mean_low)
        assert np.max(abs(gap) / np.sqrt(many.m2 / many.count)) <= bound


@pytest.mark.parametrize("kind", [np.int32, np.float32])
def test_kinds_of_masks_agree_bit_for_bit(kind):
    rng = np.random.default_rng(1)
    x = (rng.normal(size=(4, 3, 2)) + 10).astype(np.float32)
    mask = rng.random((4, 3)) < 0.6
    expected = find_moments(nj.batch_norm(), x, mask)
    found = find_moments(nj.batch_norm(), x, mask.astype(kind))
    jax.tree.map(np.testing.assert_array_equal, found, expected)


def test_padding_never_counts():
    """N43: mean 4 and variance 4 whatever stands under the mask."""
    for padding in (-10.0, 1e30, np.nan, np.inf):
        p = padding
        x = jnp.array([[1, 2, 3, p, p], [4, 5, 6, 7, p]], jnp.float32)[..., None]
        mask = jnp.array([[1, 1, 1, 0, 0], [1, 1, 1, 1, 0]], bool)
        found = find_moments(nj.batch_norm(), x, mask)
        assert (found.count.tolist(), found.mean.tolist()) == ([7.0], [4.0])
        assert found.m2.tolist() == [28.0]


def test_two_sum_is_exact():
    """Beside float64, which holds these sums of two float32 exactly."""
    rng = np.random.default_rng(2)
    a = (rng.normal(size=1000) * 2.0 ** rng.integers(-10, 10, 1000)).astype(np.float32)
    b = (rng.normal(size=1000) * 2.0 ** rng.integers(-10, 10, 1000)).astype(np.float32)
    high, low = wide(jit(two_sum)(a, b))
    exact = wide(a) + wide(b)
    assert np.array_equal(high + low, exact)
    assert np.array_equal(high, exact.astype(np.float32))
    assert np.any(low != 0)


def test_two_sum_of_an_infinity_has_no_low_part():
    high, low = two_sum(jnp.float32(jnp.inf), jnp.float32(1))
    assert (float(high), float(low)) == (np.inf, 0.0)


def _parts(spec, x: np.ndarray, cuts, mask=None):
    """Moments of consecutive pieces of the examples, stacked."""
    pieces = np.split(x, cuts)
    masks = [None] * len(pieces) if mask is None else np.split(mask, cuts)
    found = [
        find_moments(spec, piece, m) for piece, m in zip(pieces, masks, strict=True)
    ]
    return jax.tree.map(lambda *arrays: np.stack(arrays), *found)


@pytest.mark.parametrize("masked", [False, True])
def test_merged_parts_are_the_whole(masked: bool):
    """Uneven, single, empty and fully masked parts, in any order, at any offset."""
    rng = np.random.default_rng(3)
    mask = None
    if masked:
        mask = rng.random(60) < 0.6
        mask[20:33] = False
    spec, cuts = nj.batch_norm(), [0, 1, 20, 33, 33]
    for offset in (0.0, 1e4, 1e6):
        x = (rng.normal(size=(60, 3)) + offset).astype(np.float32)
        parts = _parts(spec, x, cuts, mask)
        valid = wide(x if mask is None else x[mask])
        std, bound = valid.std(0), FACTOR * unit_roundoff(np.float32) * len(x)
        for order in (slice(None), slice(None, None, -1)):
            ordered = jax.tree.map(lambda a, order=order: a[order], parts)
            found = wide(find_merged(ordered))
            assert np.array_equal(found.count, [len(valid)] * 3)
            mean = found.mean + found.mean_low
            assert np.max(abs(mean - valid.mean(0)) / std) <= bound
            np.testing.assert_allclose(found.m2 / found.count, std**2, rtol=bound)
        # What an average of variances would give is far away.
        average = (parts.m2 / np.maximum(parts.count, 1)).mean(0)
        assert np.all(abs(average - std**2) > bound * std**2)


def test_merge_uneven_shards():
    """N48: n 8, mean 7.75, variance 15.4375 and 17.642857."""
    columns = [2.0, 6.0], [1.0, 10.0], [0.0, 0.0], [2.0, 0.0]
    found = find_merged(Moments(*(jnp.array(c, jnp.float32) for c in columns)))
    assert (float(found.count), float(found.mean)) == (8.0, 7.75)
    assert float(found.m2) == 123.5
    assert float(found.variance(ddof=1)) == np.float32(123.5 / 7)


def test_merge_skips_empty_parts():
    """N49: an empty shard changes nothing, even where it holds NaN."""
    columns = [0.0, 6.0], [jnp.nan, 10.0], [jnp.inf, 0.0], [jnp.nan, 0.0]
    found = find_merged(Moments(*(jnp.array(c, jnp.float32) for c in columns)))
    assert [float(a) for a in jax.tree.leaves(found)] == [6.0, 10.0, 0.0, 0.0]
    nothing = find_merged(Moments(*(jnp.zeros((3, 2), jnp.float32),) * 4))
    assert all(np.array_equal(a, [0, 0]) for a in jax.tree.leaves(nothing))


def test_merge_over_several_axes():
    rng = np.random.default_rng(4)
    x = rng.normal(size=(4, 5, 6)).astype(np.float32)
    parts = find_moments(nj.layer_norm(), x)
    kept = jit(lambda parts: merge(parts, (0, -1), keepdims=True))(parts)
    found = jit(lambda parts: merge(parts, (0, -1)))(parts)
    assert kept.mean.shape == (1, 1)
    assert found.mean.shape == ()
    bound = FACTOR * unit_roundoff(np.float32) * x.size
    np.testing.assert_allclose(found.variance(), x.astype(np.float64).var(), rtol=bound)
    one = jit(jax.vmap(merge))(parts)
    np.testing.assert_allclose(
        one.variance(), x.astype(np.float64).var((1, 2)), rtol=bound
    )


def test_gradient_through_merge():
    """The gradient of the merged variance is that of the whole, and finite."""
    rng = np.random.default_rng(5)
    x = jnp.asarray(rng.normal(size=(6, 2)) + 100, jnp.float32)
    mask = jnp.array([1, 1, 1, 1, 0, 0], bool)

    def merged(x):
        spec = nj.batch_norm()
        parts = [nj.moments(spec, x[i : i + 2], mask[i : i + 2]) for i in (0, 2, 4)]
        stacked = jax.tree.map(lambda *a: jnp.stack(a), *parts)
        found = merge(stacked)
        return jnp.sum(found.variance()) + jnp.sum(found.mean + found.mean_low)

    valid = wide(x)[:4]
    expected = np.zeros((6, 2))
    expected[:4] = 2 * (valid - valid.mean(0)) / 4 + 1 / 4
    gap = np.linalg.norm(wide(jit(jax.grad(merged))(x)) - expected)
    bound = FACTOR * unit_roundoff(np.float32) * 4
    assert gap <= bound * np.linalg.norm(expected)


@pytest.mark.parametrize("size", [6, 8, 100])
def test_a_mean_pair_is_exact_in_a_compiled_program(size: int):
    """A product that is contracted with one of the sums of the pair, and not with the
    others, would put it off by a unit of the mean: 2⁻¹⁰ here, ten thousand times more.
    """
    x = np.random.default_rng(0).normal(1e4, 1, (400, size, 16)).astype(np.float32)
    moments = jax.jit(jax.vmap(lambda x: nj.moments(nj.batch_norm(), x)))
    found = moments(jnp.asarray(x))
    one_by_one = jax.jit(lambda x: nj.moments(nj.batch_norm(), x))
    single = [one_by_one(jnp.asarray(part)) for part in x[:50]]
    right = x.astype(np.float64).mean(1)
    for mean, low, expected in (
        (found.mean, found.mean_low, right),
        (
            jnp.stack([one.mean for one in single]),
            jnp.stack([one.mean_low for one in single]),
            right[:50],
        ),
    ):
        pair = np.asarray(mean, np.float64) + np.asarray(low, np.float64)
        # r = mean(x − x₀) is at most some deviations, in float32.
        assert np.abs(pair - expected).max() < 64 * 2.0**-24
