"""Running statistics: averages, entries that are left alone, and how states pool."""

from __future__ import annotations

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compare import FACTOR, jit, unit_roundoff, wide

import normjax as nj
from normjax import running

pytestmark = pytest.mark.x32

find_moments = jit(nj.moments)
update = jit(running.update)
normalize = jit(nj.normalize)
VECTOR = np.array([[1.0], [2.0], [3.0], [4.0]], np.float32)


def follow(spec: nj.NormSpec, batches, masks=None):
    """The state after these batches."""
    state = running.init(spec, batches[0].shape)
    masks = [None] * len(batches) if masks is None else masks
    for x, mask in zip(batches, masks, strict=True):
        state = update(spec, state, find_moments(spec, x, mask))
    return state


def declared(**fields) -> nj.NormSpec:
    return nj.batch_norm(running=nj.Running(**fields))


def bound(n: int) -> float:
    return FACTOR * unit_roundoff(np.float32) * n


def test_decay_is_the_share_that_is_kept():
    """N21: 0.1 of new statistics from 0 on a batch of tens is 1, 0.9 of them is 9."""
    tens = np.full((4, 1), 10, np.float32)
    for decay, mean in ((0.9, 1.0), (0.1, 9.0)):
        state = follow(declared(decay=decay), [tens])
        np.testing.assert_allclose(state.mean, [mean], rtol=bound(1))


@pytest.mark.parametrize(("ddof", "variance"), [(0, 1.025), (1, 0.9 + 0.1 * 5 / 3)])
def test_ddof_of_what_is_stored(ddof: int, variance: float):
    """N22: normalizing and storing have their own."""
    spec = declared(decay=0.9, ddof=ddof)
    state = follow(spec, [VECTOR])
    np.testing.assert_allclose(state.variance, [variance], rtol=bound(4))
    y = wide(normalize(spec, VECTOR))[:, 0]
    right = np.array([-1.5, -0.5, 0.5, 1.5]) / np.sqrt(1.25 + 1e-5)
    np.testing.assert_allclose(y, right, rtol=bound(4))


def test_first_update():
    """N23: mixed with the start, debiased, or the first batch itself."""
    tens = np.full((4, 1), 10, np.float32)
    state = follow(declared(decay=0.99), [tens])
    np.testing.assert_allclose(state.mean, [0.1], rtol=bound(1) * 100)  # 1 − decay
    np.testing.assert_allclose(state.variance, [0.99], rtol=bound(1))
    debiased = declared(decay=0.99, debias=True, initial=(0, 0))
    read = running.read(debiased, follow(debiased, [tens]))
    np.testing.assert_allclose(read.mean, [10], rtol=bound(1))
    assert read.variance.tolist() == [0.0]
    cumulative = declared(average="cumulative")
    state = follow(cumulative, [tens])
    assert (state.mean.tolist(), state.variance.tolist()) == ([10.0], [0.0])


def test_hundred_steps_with_and_without_debiasing():
    """N23: from 1 to a variance of 4, 2.901903 after 100 steps at 0.99; debiased 4."""
    twos = np.array([[-2.0], [2.0]], np.float32)
    state = follow(declared(decay=0.99), [twos] * 100)
    np.testing.assert_allclose(state.variance, [2.901903], atol=5e-7, rtol=bound(1))
    spec = declared(decay=0.99, debias=True, initial=(0, 0))
    state = follow(spec, [twos] * 100)
    np.testing.assert_allclose(
        running.read(spec, state).variance, [4.0], rtol=bound(100)
    )
    share = running.effective_weight(spec, state)
    np.testing.assert_allclose(share, [1 - 0.99**100], rtol=bound(100))


def test_reading_before_any_update():
    """N24: x/√(1 + ε), with and without debiasing; never a division by 0."""
    for spec in (declared(), declared(debias=True, initial=(0, 0))):
        state = running.init(spec, VECTOR.shape)
        y = normalize(spec, VECTOR, moments=running.read(spec, state))
        np.testing.assert_allclose(y, VECTOR / np.sqrt(1 + 1e-5), rtol=bound(1))
        assert running.effective_weight(spec, state).tolist() == [0.0]


def test_exponential_average_of_many_batches():
    """Against the recursion in float64, mean and variance, for each channel."""
    rng = np.random.default_rng(0)
    batches = [
        (rng.normal(size=(8, 3)) * s + s).astype(np.float32)
        for s in rng.uniform(1, 5, 30)
    ]
    spec = declared(decay=0.8, ddof=1)
    state = follow(spec, batches)
    mean, variance = np.zeros(3), np.ones(3)
    for batch in map(wide, batches):
        mean = 0.8 * mean + 0.2 * batch.mean(0)
        variance = 0.8 * variance + 0.2 * batch.var(0, ddof=1)
    np.testing.assert_allclose(state.mean, mean, rtol=bound(8))
    np.testing.assert_allclose(state.variance, variance, rtol=bound(8))
    assert state.count.tolist() == [30] * 3
    assert state.count.dtype == jnp.int32


def test_cumulative_average():
    """The mean of all updates, whatever the start."""
    rng = np.random.default_rng(1)
    batches = [rng.normal(size=(8, 2)).astype(np.float32) + 2 for _ in range(10)]
    spec = declared(average="cumulative", initial=(5.0, 7.0))
    state = follow(spec, batches)
    means = np.mean([wide(batch).mean(0) for batch in batches], axis=0)
    variances = np.mean([wide(batch).var(0) for batch in batches], axis=0)
    np.testing.assert_allclose(state.mean, means, rtol=bound(10))
    np.testing.assert_allclose(state.variance, variances, rtol=bound(10))
    assert running.effective_weight(spec, state).tolist() == [1.0, 1.0]


def test_decay_is_a_leaf():
    """A sweep compiles once, by jit and by vmap, and its ends are 0 and 1."""
    traces = []
    state = running.init(declared(), VECTOR.shape)
    found = find_moments(declared(), VECTOR)

    @jit
    def step(spec, state, moments):
        traces.append(None)
        return running.update(spec, state, moments)

    decays = np.array([0.0, 0.5, 0.9, 1.0], np.float32)
    loop = [float(step(declared(decay=float(d)), state, found).mean[0]) for d in decays]
    assert len(traces) == 1
    np.testing.assert_allclose(loop, 2.5 * (1 - decays), rtol=bound(1))
    swept = jax.vmap(
        lambda decay: (
            running.update(
                declared().replace(**{"running.decay": decay}), state, found
            ).mean
        )
    )(decays)
    np.testing.assert_allclose(swept[:, 0], loop, rtol=bound(1))
    spec = declared(decay=0.0, debias=True, initial=(0, 0))
    read = running.read(spec, follow(spec, [VECTOR]))
    assert read.mean.tolist() == [2.5]


def test_nonfinite_updates():
    """Propagated by default; skipped for the entries concerned where asked for."""
    bad = np.array([[1.0, np.nan], [3.0, 1.0]], np.float32)
    good = np.array([[1.0, 2.0], [3.0, 4.0]], np.float32)
    state = follow(declared(decay=0.5), [good, bad])
    assert np.isnan(state.mean[1])
    assert np.isnan(state.variance[1])
    skipped = follow(declared(decay=0.5, nonfinite="skip"), [good, bad])
    once = follow(declared(decay=0.5), [good])
    assert skipped.mean.tolist() == [1.5, float(once.mean[1])]
    assert skipped.variance[1] == once.variance[1]
    assert skipped.count.tolist() == [2, 1]


@pytest.mark.parametrize("ddof", [0, 1])
def test_groups_with_too_few_entries_are_left_alone(ddof: int):
    """N26: a channel with N ≤ ddof keeps its state and its count of updates."""
    spec = declared(decay=0.5, ddof=ddof)
    x = np.array([[1.0, 2.0], [5.0, 4.0]], np.float32)
    masks = [np.ones((2, 2), bool), np.array([[1, 0], [1, ddof]], bool)]
    state = follow(spec, [x, x], masks)
    once = follow(spec, [x])
    for name in ("mean", "variance"):
        assert getattr(state, name)[1] == getattr(once, name)[1]
        assert getattr(state, name)[0] != getattr(once, name)[0]
    assert state.count.tolist() == [2, 1]


def test_empty_batch_leaves_the_state_unchanged():
    """N28: mean, variance and counter."""
    spec = declared(decay=0.5)
    before = follow(spec, [VECTOR])
    after = update(spec, before, find_moments(spec, np.zeros((0, 1), np.float32)))
    jax.tree.map(np.testing.assert_array_equal, after, before)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_narrow_inputs_move_a_float32_state(dtype: str):
    """N13, N14: from 100 to a batch mean of 101 in 1000 steps, 100.99996."""
    spec = declared(decay=0.99, initial=(100.0, 1.0))
    x = jnp.full((4, 1), 101, dtype)
    found = find_moments(spec, x)
    state = running.init(spec, x.shape)

    def step(state, _):
        return running.update(spec, state, found), None

    state, _ = jit(partial(jax.lax.scan, step, length=1000))(state)
    assert state.mean.dtype == state.variance.dtype == jnp.float32
    # Each step rounds once more, and the average forgets with 1 − decay.
    steps = 100 * unit_roundoff(np.float32) * 100
    np.testing.assert_allclose(state.mean, [100.99996], rtol=0, atol=steps)
    assert normalize(spec, x, moments=running.read(spec, state)).dtype == x.dtype


def test_scan_carries_the_state():
    """N33, N36: three batches of means 1, 2, 3 at 0.9 are 0.561 and 0.9³."""
    spec = declared(decay=0.9)
    batches = np.repeat([1.0, 2.0, 3.0], 4).reshape(3, 4, 1).astype(np.float32)

    def step(state, x):
        return running.update(spec, state, nj.moments(spec, x)), None

    start = running.init(spec, (4, 1))
    state, _ = jit(partial(jax.lax.scan, step))(start, batches)
    np.testing.assert_allclose(state.mean, [0.561], rtol=bound(3))
    np.testing.assert_allclose(state.variance, [0.729], rtol=bound(3))


def test_merge_pools_what_separate_states_saw():
    """N38: means 0 and 4 with variance 1 each pool to mean 2, variance 5."""
    start = running.init(declared(), (4, 1))
    first = dataclasses.replace(start, count=start.count + 3)
    second = dataclasses.replace(first, mean=first.mean + 4)
    pooled = running.merge([first, second])
    assert (pooled.mean.tolist(), pooled.variance.tolist()) == ([2.0], [5.0])
    assert pooled.count.tolist() == [6]
    lopsided = running.merge([first, second], weights=[3, 1])
    assert (lopsided.mean.tolist(), lopsided.variance.tolist()) == ([1.0], [4.0])
    alone = running.merge([first, second], weights=[0, 1])
    assert (alone.mean.tolist(), alone.variance.tolist()) == ([4.0], [1.0])


def test_ghosts_pool_into_one_state():
    """The state of a ghost norm is that of the whole batch: variance between, too."""
    rng = np.random.default_rng(2)
    apart = np.repeat([0.0, 5.0], 3)[:, None, None]
    x = (rng.normal(size=(6, 3, 2)) + apart).astype(np.float32)
    spec = nj.ghost_batch_norm(ghosts=2, running=nj.Running(decay=0.0))
    ghosts = follow(spec, [x])
    assert ghosts.mean.shape == (2,)
    whole = wide(x)
    np.testing.assert_allclose(ghosts.mean, whole.mean((0, 1)), rtol=bound(18))
    np.testing.assert_allclose(ghosts.variance, whole.var((0, 1)), rtol=bound(18))


def test_instance_norm_with_running_statistics():
    """N42: declared on purpose, it pools the examples and is a batch norm when read."""
    x = np.random.default_rng(3).normal(size=(4, 5, 3)).astype(np.float32)
    spec = nj.instance_norm(running=nj.Running(decay=0.0))
    state = follow(spec, [x])
    np.testing.assert_allclose(
        state.mean, wide(x).mean((0, 1)), rtol=bound(20), atol=bound(1)
    )
    np.testing.assert_allclose(state.variance, wide(x).var((0, 1)), rtol=bound(20))
    read = running.read(spec, state)
    y = wide(normalize(spec, x, moments=read))
    one = wide(normalize(nj.batch_norm(), x, moments=read))
    np.testing.assert_allclose(y, one, rtol=bound(1))


@pytest.mark.parametrize(
    ("pattern", "order"),
    [("b [t] c", (0, 1, 2)), ("[t] b c", (1, 0, 2)), ("c [t] b", (2, 1, 0))],
)
def test_the_example_axis_may_stand_anywhere(pattern: str, order: tuple):
    """The same state from the same numbers, with the example named."""
    x = np.random.default_rng(4).normal(size=(4, 5, 3)).astype(np.float32) + 1
    moved = x.transpose(order)
    spec = nj.NormSpec(pattern, example="b", running=nj.Running(decay=0.0))
    state = follow(spec, [moved])
    np.testing.assert_allclose(state.mean, wide(x).mean((0, 1)), rtol=bound(20))
    np.testing.assert_allclose(state.variance, wide(x).var((0, 1)), rtol=bound(20))
    y = wide(normalize(spec, moved, moments=running.read(spec, state)))
    own = wide(normalize(nj.NormSpec("[b t] c"), x)).transpose(order)
    assert np.linalg.norm(y - own) <= bound(20) * np.linalg.norm(own)


@pytest.mark.parametrize("divide", ["rms", "l2"])
def test_what_is_stored_without_a_variance(divide: str):
    """rms stores the mean square, l2 the sum of squares: what reading divides by."""
    spec = nj.NormSpec(
        "[b] c", center=False, divide=divide, running=nj.Running(decay=0.0)
    )
    state = follow(spec, [VECTOR])
    right = 30.0 / 4 if divide == "rms" else 30.0
    np.testing.assert_allclose(state.variance, [right], rtol=bound(4))
    y = normalize(spec, VECTOR, moments=running.read(spec, state))
    np.testing.assert_allclose(y, normalize(spec, VECTOR), rtol=bound(4))


def test_reading_twice_and_normalizing_change_nothing():
    """N30, N86: an update is an act of its own, and two of them are two."""
    spec = declared(decay=0.9)
    state = follow(spec, [VECTOR])
    before = jax.tree.map(np.array, state)
    for _ in range(2):
        normalize(spec, VECTOR, moments=running.read(spec, state))
        normalize(spec, VECTOR)
    jax.tree.map(np.testing.assert_array_equal, state, before)
    ones, threes = np.full((2, 1), 1, np.float32), np.full((2, 1), 3, np.float32)
    means = [follow(spec, batches).mean[0] for batches in ([ones], [ones, threes])]
    np.testing.assert_allclose(means, [0.1, 0.39], rtol=bound(10))


def test_a_debiased_average_that_keeps_everything_stays_at_its_start():
    """With decay 1 nothing was averaged: mean 0 and variance 1, never 0/0."""
    spec = declared(decay=1.0, debias=True, initial=(0, 0))
    read = running.read(spec, follow(spec, [np.array([[1.0], [3.0]])]))
    np.testing.assert_array_equal(read.mean, 0)
    np.testing.assert_array_equal(read.variance, 1)


@pytest.mark.parametrize("decay", [0.99, 0.999, 0.9999])
def test_the_share_of_the_new_has_all_its_digits(decay: float):
    """In float32, 1 − 0.9999 of a rounded 0.9999 would err by 3e-4 of itself."""
    spec = nj.batch_norm(running=nj.Running(decay=decay, initial=(0, 0), debias=True))
    moments = nj.moments(spec, jnp.asarray([[1.0], [3.0]], jnp.float32))
    state = nj.running.init(spec, (2, 1))
    state = jax.jit(lambda s: nj.running.update(spec, s, moments))(state)
    assert float(state.mean[0]) == pytest.approx(2 * (1 - decay), rel=2.0**-22)
    read = nj.running.read(spec, state)
    np.testing.assert_allclose([read.mean[0], read.variance[0]], [2, 1], rtol=2.0**-20)
