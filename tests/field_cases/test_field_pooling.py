"""Field cases of statistics from several places: merge, accumulate, reset, restore.

Of the same theme elsewhere: any partition of the data in tests/test_properties.py; real
devices come with the distributed layers (N49 and N51 in full).
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compare import jit, wide
from kinds import bound

import normjax as nj
from normjax import running
from normjax.statistics import merge

find_moments = jit(nj.moments)
update = jit(running.update)
normalize = jit(nj.normalize)
SPEC = nj.batch_norm(running=nj.Running(decay=0.9))


def column(*values: float) -> np.ndarray:
    return np.array(values, np.float32)[:, None]


def stack(parts) -> nj.Moments:
    return jax.tree.map(lambda *arrays: jnp.stack(arrays), *parts)


def pooled(spec: nj.NormSpec, parts, masks=None) -> nj.Moments:
    masks = [None] * len(parts) if masks is None else masks
    return merge(
        stack([nj.moments(spec, x, m) for x, m in zip(parts, masks, strict=True)])
    )


find_pooled = jit(partial(pooled, SPEC))


def follow(spec, *batches, state=None) -> running.State:
    state = running.init(spec, (2, 1)) if state is None else state
    for x in batches:
        state = update(spec, state, find_moments(spec, x))
    return state


def test_n38_averaging_weights_leaves_statistics_behind():
    """N38: data of means 0 and 4, variance 1 each: pooled 2 and 5, averaged 2 and 1.

    Copy, average, pooled average and recomputing are different acts; none changes the
    states it starts from, and the order does not matter.
    """
    first, second = column(-1, 1), column(3, 5)
    exact = nj.batch_norm(running=nj.Running(decay=0.0))
    states = [follow(exact, x) for x in (first, second)]
    before = jax.tree.map(np.array, states)
    for order in (states, states[::-1]):
        found = running.merge(order)
        assert (found.mean.tolist(), found.variance.tolist()) == ([2.0], [5.0])
    average = jax.tree.map(lambda a, b: (a + b) / 2, *states)
    assert (average.mean.tolist(), average.variance.tolist()) == ([2.0], [1.0])
    both = find_pooled([first, second])
    recomputed = update(exact, running.init(exact, (2, 1)), both)
    assert recomputed.mean.tolist() == [2.0]
    assert recomputed.variance.tolist() == [5.0]
    jax.tree.map(np.testing.assert_array_equal, states, before)


def test_n38_pooling_by_count_and_at_an_offset():
    """N38: shares are weights, and the distance of the means survives an offset."""
    start = running.init(SPEC, (2, 1))
    for base in (0.0, 1e4, 1e6):
        near = dataclasses.replace(start, mean=start.mean + np.float32(base))
        far = dataclasses.replace(near, mean=near.mean + 4)
        found = running.merge([near, far], weights=[3, 1])
        np.testing.assert_allclose(wide(found.mean), [base + 1], rtol=2.0**-23)
        np.testing.assert_allclose(found.variance, [4.0], rtol=bound(1))


MICRO = [column(0, 2), column(4, 6)]
WHOLE = np.concatenate(MICRO)


def cubed(spec: nj.NormSpec, parts, merged: bool):
    """Σ y³ over micro-batches, with their own statistics or the merged ones."""
    given = pooled(spec, parts) if merged else None
    outputs = [nj.normalize(spec, x, moments=given) for x in parts]
    return sum(jnp.sum(y**3) for y in outputs)


slope_of_parts = jit(jax.grad(lambda parts: cubed(SPEC, parts, merged=True)))
slope_of_whole = jit(jax.grad(lambda x: cubed(SPEC, [x], merged=False)))


def test_n39_accumulated_micro_batches_are_the_large_batch():
    """N39: merge, then normalize and update once: mean 3, variance 5, 0.3 and 1.4.

    Two updates give 0.59 and 1.0, and the gradient of each pair alone vanishes.
    """
    found = find_pooled(MICRO)
    assert float(found.mean[0]) == 3.0
    assert float(found.variance()[0]) == 5.0
    once = update(SPEC, running.init(SPEC, (2, 1)), found)
    np.testing.assert_allclose(once.mean, [0.3], rtol=bound(10))
    np.testing.assert_allclose(once.variance, [1.4], rtol=bound(10))
    twice = follow(SPEC, *MICRO)
    np.testing.assert_allclose(twice.mean, [0.59], rtol=bound(10))
    np.testing.assert_allclose(twice.variance, [1.0], rtol=bound(10))
    c, s = np.array([-3.0, -1.0, 1.0, 3.0]), np.sqrt(5 + 1e-5)
    J = (np.eye(4) - 0.25) / s - np.outer(c, c) / (4 * s**3)
    right = J @ (3 * (c / s) ** 2)
    np.testing.assert_allclose(right, [1.0733, -1.0733, -1.0733, 1.0733], atol=5e-5)
    alone = jit(jax.grad(lambda parts: cubed(SPEC, parts, merged=False)))(MICRO)
    for slope in (slope_of_whole(WHOLE), np.concatenate(slope_of_parts(MICRO))):
        np.testing.assert_allclose(wide(slope)[:, 0], right, rtol=bound(4))
    # Each pair is ±1 up to ε/2: what is left is ε/s³ along it.
    assert np.max(abs(np.concatenate(alone))) < 1e-4


@pytest.mark.parametrize("cuts", [[1], [1, 2, 3], [0, 2, 2]])
def test_n48_uneven_and_empty_shards(cuts: list[int]):
    """N48, N49: any cut of the data, empty parts too, is the whole.

    Value and gradient; an empty part holds nothing, so its gradient has no entries.
    """
    for base in (0.0, 1e4, 1e6):
        x = WHOLE + np.float32(base)
        parts = np.split(x, cuts)
        found = find_pooled(parts)
        assert found.count.tolist() == [4.0]
        assert float(found.mean[0]) + float(found.mean_low[0]) == base + 3
        assert found.m2.tolist() == [20.0]
        exact, whole = np.concatenate(slope_of_parts(parts)), slope_of_whole(x)
        np.testing.assert_allclose(exact, whole, rtol=bound(4), atol=bound(4))


SHARDS = np.array([[0, 2, 0, 0, 0, 0], [10] * 6], np.float32)[..., None]
VALID = np.array([[1, 1, 0, 0, 0, 0], [1] * 6], bool)


def test_n48_numbers_of_the_report():
    """N48: [0, 2] and six tens: 7.75, 15.4375, with ddof 1 17.642857."""
    found = find_pooled(list(SHARDS), list(VALID))
    assert (found.count.tolist(), found.mean.tolist()) == ([8.0], [7.75])
    assert found.m2.tolist() == [123.5]
    assert found.variance().tolist() == [15.4375]
    np.testing.assert_allclose(found.variance(ddof=1), [17.642857], rtol=bound(1))


def test_n49_a_fully_masked_shard():
    """N49: mean 10 whatever it holds; its gradient is 0, that of others unchanged."""
    masks = [jnp.zeros(2, bool), jnp.ones(3, bool)]
    full, weights = np.array([[9.0], [11.0], [10.0]]), np.array([[1.0], [2.0], [4.0]])

    @jit
    def slopes(parts):
        def loss(parts):
            given = pooled(SPEC, parts, masks)
            y = nj.normalize(SPEC, parts[1], mask=masks[1], moments=given)
            return jnp.sum(jnp.asarray(weights) * y), given

        return jax.grad(loss, has_aux=True)(parts)

    expected = None
    for hidden in (0.0, np.nan, np.inf):
        (empty, other), found = slopes([np.full((2, 1), hidden), full])
        assert (found.count.tolist(), found.mean.tolist()) == ([3.0], [10.0])
        assert found.m2.tolist() == [2.0]
        assert not empty.any()
        assert np.isfinite(other).all()
        expected = other if expected is None else expected
        assert np.array_equal(other, expected)


@pytest.mark.jax_defaults
def test_n48_n49_flax_averages_means():
    """N48, N49: the control: Flax over a named axis with a mask: 5.5 and 20.75; NaN."""
    layer: Any = nn.BatchNorm(use_running_average=False, momentum=0.0, axis_name="d")
    variables = layer.init(jax.random.key(0), SHARDS[0])

    @partial(jax.vmap, axis_name="d")
    def run(x, mask):
        _, changed = layer.apply(variables, x, mask=mask, mutable=["batch_stats"])
        return changed["batch_stats"]

    found = run(SHARDS, VALID[..., None])
    np.testing.assert_allclose(found["mean"], 5.5)
    np.testing.assert_allclose(found["var"], 20.75, rtol=1e-5)
    nothing = np.array([[0] * 6, [1] * 6], bool)[..., None]
    assert np.isnan(run(SHARDS, nothing)["mean"]).all()


def test_n52_two_forward_passes_and_two_lanes():
    """N52, N86: means 1 and 3 at 0.9: 0.1 then 0.39; one pooled update gives 0.2.

    A state is a value: the first is still there after the second.
    """
    ones, threes = column(1, 1), column(3, 3)
    first = follow(SPEC, ones)
    kept = np.array(first.mean)
    second = follow(SPEC, threes, state=first)
    np.testing.assert_allclose(first.mean, [0.1], rtol=bound(10))
    np.testing.assert_allclose(second.mean, [0.39], rtol=bound(10))
    assert np.array_equal(first.mean, kept)
    lanes = jax.vmap(partial(nj.moments, SPEC))(jnp.stack([ones, threes]))
    once = update(SPEC, running.init(SPEC, (2, 1)), merge(lanes))
    np.testing.assert_allclose(once.mean, [0.2], rtol=bound(10))
    # Lanes of different sizes count by size.
    parts = stack([find_moments(SPEC, x) for x in (column(1), column(3, 3, 3))])
    np.testing.assert_allclose(merge(parts).mean, [2.5])


def test_n86_an_extra_forward_pass_commits_nothing():
    """N86: normalizing and computing moments leave the state as it was."""
    state = follow(SPEC, column(1, 1))
    before = jax.tree.map(np.array, state)
    normalize(SPEC, column(3, 3))
    normalize(SPEC, column(3, 3), moments=running.read(SPEC, state))
    find_moments(SPEC, column(3, 3))
    jax.tree.map(np.testing.assert_array_equal, state, before)


def test_n89_reset_recalibrate_restore():
    """N89: {10, 12} read with stale (0, 1): 10 and 12; recalibrated: ±1."""
    new = column(10, 12)
    stale = running.init(SPEC, new.shape)
    y = normalize(SPEC, new, moments=running.read(SPEC, stale))
    np.testing.assert_allclose(y, new / np.sqrt(1 + 1e-5), rtol=bound(1))
    cumulative = nj.batch_norm(running=nj.Running(average="cumulative"))
    fresh = follow(cumulative, new, state=running.init(cumulative, new.shape))
    y = normalize(SPEC, new, moments=running.read(cumulative, fresh))
    np.testing.assert_allclose(wide(y), [[-1], [1]], rtol=bound(2) + 1e-5)
    # Batch by batch an average of variances misses the distance of the means.
    apart = follow(cumulative, column(10, 10), column(12, 12))
    assert (apart.mean.tolist(), apart.variance.tolist()) == ([11.0], [0.0])
    merged = find_pooled([column(10, 10), column(12, 12)])
    exact = update(cumulative, running.init(cumulative, (2, 1)), merged)
    assert (exact.mean.tolist(), exact.variance.tolist()) == ([11.0], [1.0])
    # A snapshot is the state itself; restoring it is using it again.
    snapshot = jax.tree.map(np.array, stale)
    follow(SPEC, new, state=stale)
    again = follow(SPEC, new, state=jax.tree.map(jnp.asarray, snapshot))
    expected = follow(SPEC, new, state=stale)
    jax.tree.map(np.testing.assert_array_equal, again, expected)
