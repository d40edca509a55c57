"""The law: normalize(x, moments=moments(x)) is normalize(x), alone and merged."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import CASES
from compare import FACTOR, batched, jit, rows, unit_roundoff, wide
from frames import inputs

import normjax as nj
from normjax.statistics import merge

pytestmark = pytest.mark.x32

OWN = [
    "layer",
    "batch_space",
    "ghost_first",
    "group",
    "rms",
    "l2",
    "center_rms",
    "plain_std_floor_var",
    "ddof_1_outside",
    "mask_keep",
    "mask_positions",
    "weights_ddof",
]


@pytest.mark.parametrize("name", OWN)
def test_own_moments(name: str):
    """In float32, at offsets up to 10⁶ standard deviations: n·u without a κ."""
    case = CASES[name]
    passed = case.arguments(np.float32)

    def both(x):
        found = nj.moments(case.spec, x, passed.get("mask"))
        return case.call(x), case.call(x, moments=found)

    x = inputs(case, 1000).astype(np.float32)
    direct, given = (rows(case.frame, y) for y in batched(both, jnp.float32)(x))
    gap = np.linalg.norm(direct - given, axis=-1)
    bound = FACTOR * unit_roundoff(np.float32) * case.frame.group_size
    assert np.max(gap / np.linalg.norm(direct, axis=-1)) <= bound


normalize = jit(nj.normalize)
find_moments = jit(nj.moments)


def test_merged_shards():
    """Uneven, empty and fully masked shards of a batch, then each shard alone."""
    rng = np.random.default_rng(0)
    spec, bound = nj.batch_norm(), FACTOR * unit_roundoff(np.float32) * np.log2(120)
    for offset in (0.0, 1e4, 1e6):
        x = (rng.normal(size=(40, 3, 2)) + offset).astype(np.float32)
        mask = rng.random((40, 3)) < 0.7
        mask[10:17] = False
        cuts = [0, 1, 10, 17, 17]
        shards = list(zip(np.split(x, cuts), np.split(mask, cuts), strict=True))
        parts = [find_moments(spec, *shard) for shard in shards]
        merged = jit(merge)(jax.tree.map(lambda *a: np.stack(a), *parts))
        whole = wide(normalize(spec, x, mask=mask))
        pieces = [normalize(spec, s, mask=m, moments=merged) for s, m in shards]
        gap = np.linalg.norm(whole - wide(np.concatenate(pieces)))
        assert gap <= bound * np.linalg.norm(whole)
        # The mean alone, without its low part, is not enough.
        lossy = nj.Moments(merged.count, merged.mean, 0 * merged.mean, merged.m2)
        worse = wide(normalize(spec, x, mask=mask, moments=lossy))
        if offset == 1e6:
            assert np.linalg.norm(whole - worse) > bound * np.linalg.norm(whole)


def test_microbatches():
    """N39: [0, 2] and [4, 6] merged are mean 3, variance 5; the gradient is theirs."""
    halves = jnp.array([[0.0, 2.0], [4.0, 6.0]], jnp.float32)
    spec = nj.batch_norm()

    def loss(halves):
        parts = jax.vmap(lambda half: nj.moments(spec, half[:, None]))(halves)
        whole = merge(parts)
        apply = jax.vmap(lambda half: nj.normalize(spec, half[:, None], moments=whole))
        return jnp.sum(apply(halves) ** 3), whole

    slope, whole = jit(jax.grad(loss, has_aux=True))(halves)
    assert (whole.mean.tolist(), (whole.m2 / whole.count).tolist()) == ([3.0], [5.0])
    right = [[1.0733, -1.0733], [-1.0733, 1.0733]]  # to the digits of the report
    np.testing.assert_allclose(slope, right, rtol=0, atol=5e-5)


@pytest.mark.parametrize("size", [3, 7, 100, 1000])
def test_constant_rows_are_exactly_zero(size: int):
    """From x, from its own moments, and from moments merged over two halves."""
    values = [0.1, 1e4 + 0.1, 1e10, 3.3e15, -0.3]
    spec = nj.layer_norm()

    def everything(x):
        own = nj.moments(spec, x)
        halves = [nj.moments(spec, part) for part in (x[:1], x[1:])]
        merged = merge(jax.tree.map(lambda *a: jnp.stack(a), *halves))
        outputs = [nj.normalize(spec, x, moments=m) for m in (None, own, merged)]
        return outputs, own.m2

    for dtype in (np.float32, np.float64):
        rows = np.array(values)[:, None] * np.ones((1, size))
        if dtype == np.float64 and not jax.config.read("jax_enable_x64"):
            continue
        outputs, m2 = batched(everything, dtype)(rows)
        for y in outputs:
            assert y.dtype == dtype
            assert not y.any()
        assert not m2.any()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_constant_rows_of_narrow_inputs(dtype: str):
    for value in (0.1, 300.0, 6e4):
        x = jnp.full((2, 100), value, dtype)
        found = find_moments(nj.layer_norm(), x)
        assert not wide(normalize(nj.layer_norm(), x)).any()
        assert not wide(normalize(nj.layer_norm(), x, moments=found)).any()


def test_hard_vectors():
    """N01, N04, N05: the same ±1.3416, ±0.4472 with and without moments."""
    vectors = [
        [1e4, 1e4 + 1, 1e4 + 2, 1e4 + 3],
        [1e6, 1e6 + 1, 1e6 + 2, 1e6 + 3],
        [2.0**24, 2.0**24 + 2, 2.0**24 + 4, 2.0**24 + 6],
    ]
    for vector in vectors:
        x = jnp.array(vector, jnp.float32)
        d = np.array(vector) - vector[0]
        right = (d - d.mean()) / np.sqrt(d.var() + 1e-5)
        found = find_moments(nj.layer_norm(), x)
        for y in (
            normalize(nj.layer_norm(), x),
            normalize(nj.layer_norm(), x, moments=found),
        ):
            bound = FACTOR * unit_roundoff(np.float32) * 4
            assert np.linalg.norm(wide(y) - right) <= bound * np.linalg.norm(right)


def test_one_ulp_among_a_thousand():
    x = np.full(1000, 1.0, np.float32)
    x[617] = np.nextafter(np.float32(1), np.float32(2))
    ulp = 2.0**-23
    right = np.full(1000, -1 / 1000) * ulp
    right[617] += ulp
    right /= np.sqrt(np.mean(right**2))
    spec = nj.layer_norm(epsilon=0.0)
    bound = FACTOR * unit_roundoff(np.float32) * np.log2(1000)
    for given in (None, find_moments(spec, x)):
        y = wide(normalize(spec, x, moments=given))
        assert np.linalg.norm(y - right) <= bound * np.linalg.norm(right)
    assert np.linalg.norm(right) > 1  # an output of zeros would be refused
