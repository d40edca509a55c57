"""Field cases of stored statistics: decay, ddof, starts, narrow dtypes, pooling.

The kind: every spec that stores statistics, every average. Of the same theme elsewhere:
train, eval and update as switches in test_field_modes.py; the averages themselves in
tests/test_running.py.
"""

from __future__ import annotations

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compare import jit, wide
from kinds import STANDARD, VECTOR, bound
from small import refuse

import normjax as nj
from normjax import running

find_moments = jit(nj.moments)
update = jit(running.update)
normalize = jit(nj.normalize)

COLUMN = VECTOR[:, None].astype(np.float32)
# What can store statistics: shape (4, 2, 1), examples first, one stored channel.
STORING = {
    "batch": nj.batch_norm,
    "ghost": partial(nj.ghost_batch_norm, ghosts=2),
    "instance": nj.instance_norm,
}


def storing(name: str = "batch", **fields) -> nj.NormSpec:
    return STORING[name](running=nj.Running(**fields))


def follow(spec: nj.NormSpec, *batches, state=None) -> running.State:
    state = running.init(spec, batches[0].shape) if state is None else state
    for x in batches:
        state = update(spec, state, find_moments(spec, x))
    return state


def pairs(*values: float, dtype="float32"):
    """Examples of two equal positions and one channel."""
    return jnp.asarray(np.repeat(values, 2).reshape(-1, 2, 1), dtype)


def cast(state: running.State, dtype) -> running.State:
    half = {name: getattr(state, name).astype(dtype) for name in ("mean", "variance")}
    return dataclasses.replace(state, **half)


@jit
def many(spec: nj.NormSpec, state: running.State, x, count: int) -> running.State:
    found = nj.moments(spec, x)
    step = lambda _, state: running.update(spec, state, found)  # noqa: E731
    return jax.lax.fori_loop(0, count, step, state)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("decay", [0.9, 0.99, 0.999])
def test_n13_narrow_inputs_move_the_statistics(dtype: str, decay: float):
    """N13: from 100 towards a batch mean of 101: 101 − decay¹⁰⁰⁰."""
    for name in STORING:
        spec = storing(name, decay=decay, initial=(100.0, 1.0))
        x = pairs(101, 101, 101, 101, dtype=dtype)
        state = running.init(spec, x.shape, dtype)
        assert state.mean.dtype == state.variance.dtype == jnp.float32
        state = many(spec, state, x, 1000)
        assert state.mean.dtype == jnp.float32
        # Every step rounds 100 once more, and the average forgets with 1 − decay.
        rounding = 100 * 2.0**-24 * 4 / (1 - decay)
        np.testing.assert_allclose(
            state.mean, [101 - decay**1000], rtol=0, atol=rounding
        )


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_n13_a_state_that_was_cast_is_updated_in_float32(dtype: str):
    """N13: what `.half()` on a whole model does: the next update is not lost.

    Its own digits are gone, but 0.01 · (101 − 100) is added: "statistics are kept in at
    least float32".
    """
    spec = storing(decay=0.99, initial=(100.0, 1.0))
    x = np.full((4, 1), 101, np.float32)
    half = cast(running.init(spec, x.shape), dtype)
    state = update(spec, half, find_moments(spec, x))
    assert state.mean.dtype == state.variance.dtype == jnp.float32
    np.testing.assert_allclose(state.mean, [100.01], rtol=bound(1))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("decay", [0.9, 0.99, 0.999, 0.9999])
def test_n14_decay_is_not_rounded_to_the_input(dtype: str, decay: float):
    """N14: bfloat16(0.999) is 1 and would give 0/0; debiased it is the batch."""
    spec = storing(decay=decay, debias=True, initial=(0, 0))
    state = follow(spec, jnp.asarray(COLUMN, dtype))
    read = running.read(spec, state)
    # 1 − decay is rounded in float32, in the update and again when it is divided out.
    close = bound(4) / (1 - decay)
    np.testing.assert_allclose(read.mean, [2.5], rtol=close)
    np.testing.assert_allclose(read.variance, [1.25], rtol=close)
    assert float(jnp.bfloat16(0.999)) == 1.0
    plain = follow(storing(decay=decay), jnp.asarray(COLUMN, dtype))
    np.testing.assert_allclose(plain.mean, [2.5 * (1 - decay)], rtol=close)


@pytest.mark.parametrize("name", STORING)
def test_n21_decay_is_the_share_that_is_kept(name: str):
    """N21: on a batch of tens from 0: 1 with decay 0.9, 9 with 0.1, 0.1 by default."""
    tens = pairs(10, 10, 10, 10)
    for decay, mean in ((0.9, 1.0), (0.1, 9.0)):
        state = follow(storing(name, decay=decay), tens)
        np.testing.assert_allclose(state.mean, [mean], rtol=bound(10))
    state = follow(STORING[name](running=nj.Running()), tens)
    np.testing.assert_allclose(state.mean, [0.1], rtol=bound(100))


def test_n21_no_bare_momentum():
    """N21: the word that means opposite things is no field."""
    with pytest.raises(TypeError, match="momentum"):
        nj.Running(momentum=0.1)  # pyright: ignore[reportCallIssue]
    with refuse("Running has no field 'momentum'"):
        storing().replace(**{"running.momentum": 0.1})
    with refuse("Running has no field 'momentum'"):
        nj.NormSpec.from_dict({"pattern": "[b] c", "running": {"momentum": 0.1}})


@pytest.mark.parametrize(
    ("convention", "momentum", "mean"),
    [
        ("torch", 0.1, 1.0),
        ("mlx", 0.1, 1.0),
        ("update_rate", 0.1, 1.0),
        ("flax", 0.1, 9.0),
        ("keras", 0.1, 9.0),
        ("equinox", 0.1, 9.0),
        ("haiku", 0.1, 9.0),
        ("keep", 0.1, 9.0),
        ("torch", 0.9, 9.0),
        ("flax", 0.99, 0.1),
    ],
)
def test_n21_momentum_by_the_name_of_a_convention(convention, momentum, mean):
    """N21: new weight or kept share, on a batch of tens from 0."""
    decay = running.decay(momentum, convention)
    state = follow(storing(decay=decay), pairs(10, 10, 10, 10))
    np.testing.assert_allclose(state.mean, [mean], rtol=bound(100))


def test_n21_a_convention_has_a_name():
    """N21: neither the convention nor the range is guessed."""
    with refuse("convention is 'pytorch-lightning'"):
        running.decay(0.1, "pytorch-lightning")
    with refuse("momentum is 1.1"):
        running.decay(1.1, "torch")


@pytest.mark.parametrize("store", [0, 1])
@pytest.mark.parametrize("norm", [0, 1])
def test_n22_ddof_of_normalizing_and_of_storing(norm: int, store: int):
    """N22: each decides its own: 1.025 or 1.0667 stored, ±1.3416 or ±1.1619 put out."""
    spec = nj.batch_norm(ddof=norm, running=nj.Running(decay=0.9, ddof=store))
    right = {0: 1.025, 1: 0.9 + 0.1 * 5 / 3}[store]
    np.testing.assert_allclose(follow(spec, COLUMN).variance, [right], rtol=bound(4))
    train = wide(normalize(spec, COLUMN))[:, 0]
    right = (VECTOR - 2.5) / np.sqrt(5 / (4 - norm) + 1e-5)
    np.testing.assert_allclose(train, right, rtol=bound(4))
    state = many(spec, running.init(spec, COLUMN.shape), COLUMN, 500)
    after = normalize(spec, COLUMN, moments=running.read(spec, state))
    right = (VECTOR - 2.5) / np.sqrt(5 / (4 - store) + 1e-5)
    np.testing.assert_allclose(wide(after)[:, 0], right, rtol=bound(40))


@pytest.mark.parametrize("n", [2, 4, 8, 32])
def test_n22_the_ratio_is_that_of_the_count(n: int):
    """N22: n/(n − 1), for any batch; under a mask n is the number of valid entries."""
    x = np.random.default_rng(n).normal(size=(40, 1)).astype(np.float32)
    mask = np.arange(40) < n
    found = {}
    for ddof in (0, 1):
        spec = storing(decay=0.0, ddof=ddof)
        state = running.init(spec, x.shape)
        masked = update(spec, state, find_moments(spec, x, mask))
        alone = update(spec, state, find_moments(spec, x[:n]))
        np.testing.assert_allclose(masked.variance, alone.variance, rtol=bound(n))
        found[ddof] = float(masked.variance[0])
    np.testing.assert_allclose(found[1] / found[0], n / (n - 1), rtol=bound(1))


@pytest.mark.parametrize("name", STORING)
def test_n23_first_update(name: str):
    """N23: (0.1, 0.99) mixed with the start, (10, 0) debiased or cumulative."""
    tens = pairs(10, 10, 10, 10)
    state = follow(storing(name, decay=0.99), tens)
    np.testing.assert_allclose(state.mean, [0.1], rtol=bound(100))
    np.testing.assert_allclose(state.variance, [0.99], rtol=bound(1))
    for fields in ({"debias": True, "initial": (0, 0)}, {"average": "cumulative"}):
        spec = storing(name, **fields)
        read = running.read(spec, follow(spec, tens))
        np.testing.assert_allclose(read.mean, [10], rtol=bound(100))
        np.testing.assert_allclose(read.variance, [0], atol=bound(1))


def test_n23_hundred_updates():
    """N23: from variance 1 to a true 4 at 0.99: 2.901903; debiased 4."""
    twos = np.array([[-2.0], [2.0]], np.float32)
    for spec, right in (
        (storing(decay=0.99), 4 - 3 * 0.99**100),
        (storing(decay=0.99, debias=True, initial=(0, 0)), 4.0),
    ):
        state = many(spec, running.init(spec, twos.shape), twos, 100)
        read = running.read(spec, state)
        np.testing.assert_allclose(read.variance, [right], rtol=bound(100))


@pytest.mark.parametrize("name", STORING)
@pytest.mark.parametrize(
    "fields", [{}, {"debias": True, "initial": (0, 0)}, {"average": "cumulative"}]
)
def test_n24_reading_before_any_update(name: str, fields: dict):
    """N24: x/√(1 + ε), and the state says that it has seen nothing."""
    spec = storing(name, **fields)
    x = pairs(1, 2, 3, 4)
    state = running.init(spec, x.shape)
    assert not state.count.any()
    assert not running.effective_weight(spec, state).any()
    y = normalize(spec, x, moments=running.read(spec, state))
    np.testing.assert_allclose(y, wide(x) / np.sqrt(1 + 1e-5), rtol=bound(1))


def test_n32_a_small_stored_variance_keeps_its_digits():
    """N32: 1e-8 is 0 in float16, but stored in float32: gain 1/√(1e-8 + ε).

    Without ε it is 1e4, and with float16's 0 it would be infinite.
    """
    tiny = np.array([[-1e-4], [1e-4]], np.float32)
    spec = storing(decay=0.0)
    state = follow(spec, tiny)
    np.testing.assert_allclose(state.variance, [1e-8], rtol=bound(2))
    ones = jnp.ones((3, 1), jnp.float16)
    for epsilon in (1e-5, 0.0):
        y = normalize(
            spec.replace(epsilon=epsilon), ones, moments=running.read(spec, state)
        )
        np.testing.assert_allclose(
            wide(y), 1 / np.sqrt(1e-8 + epsilon), rtol=2.0**-10, atol=0
        )


@pytest.mark.parametrize("placement", ["inside_sqrt", "outside_sqrt"])
def test_n32_a_negative_variance_is_nan_and_not_a_number(placement: str):
    """N32: 5e-6 − 1e-5 + … < 0 comes out as NaN; none can be declared as the start."""
    spec = nj.batch_norm(epsilon_placement=placement, epsilon=1e-6)
    given = nj.Statistics(jnp.zeros(1), jnp.full(1, 5e-6 - 1e-5))
    assert np.isnan(normalize(spec, COLUMN, moments=given)).all()
    with refuse("with a variance of 0 or more"):
        nj.Running(initial=(0.0, -5e-6))


def test_n34_drift_of_training_and_inference():
    """N34: PyTorch's defaults, one update, then read: [0.7262, …, 3.6309].

    What a drift report needs is in the records: distance of the means in standard
    deviations, ratio of the variances, and the share that comes from data.
    """
    spec = storing(decay=0.9, ddof=1)
    batch = find_moments(spec, COLUMN)
    state = follow(spec, COLUMN)
    read = running.read(spec, state)
    y = wide(normalize(spec, COLUMN, moments=read))[:, 0]
    right = (VECTOR - 0.25) / np.sqrt(0.9 + 0.1 * 5 / 3 + 1e-5)
    np.testing.assert_allclose(right, [0.7262, 1.6944, 2.6627, 3.6309], atol=5e-5)
    np.testing.assert_allclose(y, right, rtol=bound(10))
    own = wide(normalize(spec, COLUMN))[:, 0]
    np.testing.assert_allclose(own, STANDARD, rtol=bound(4))
    distance = wide(read.mean - batch.mean) / np.sqrt(wide(batch.variance()))
    np.testing.assert_allclose(distance, -2.25 / np.sqrt(1.25), rtol=bound(10))
    ratio = wide(read.variance) / wide(batch.variance(ddof=1))
    np.testing.assert_allclose(ratio, (0.9 + 0.1 * 5 / 3) / (5 / 3), rtol=bound(10))
    for n in (1, 10, 1000):
        seen = dataclasses.replace(state, count=jnp.array([n], jnp.int32))
        share = running.effective_weight(spec, seen)
        np.testing.assert_allclose(share, [1 - 0.9**n], rtol=bound(10))
