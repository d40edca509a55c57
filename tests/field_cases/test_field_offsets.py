"""Field cases of variance algorithms: large offsets, in value and in gradient.

The kind: everything that centres, at offsets up to the last bit of the dtype. Of the
same theme elsewhere: overflow of squares in test_field_precision.py; moments alone in
tests/test_statistics.py.
"""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compare import jit, wide
from kinds import (
    CENTERED,
    DIVIDING,
    ONE_EACH,
    STANDARD,
    agree,
    bound,
    by_hand,
    forward_and_backward,
    slope_by_jax,
    steps,
)

import normjax as nj

# Bases and steps whose sums are values of the dtype.
OFFSETS = {
    "float16": [(1000.0, 0.5), (2048.0, 2.0), (16384.0, 16.0)],
    "bfloat16": [(9.0, 0.0625), (33.0, 0.25), (100.0, 0.5), (-(2.0**14), 128.0)],
    "float32": [(1e4, 1.0), (1e5, 1.0), (-1e6, 1.0), (2.0**24, 2.0)],
    "float64": [(1e9, 1.0), (2.0**53, 2.0)],
}
EACH = [name for name, case in DIVIDING.items() if case.spec.center]
KINDS = [
    *((name, dtype) for name in EACH for dtype in ("float32", "float16", "bfloat16")),
    *((name, "float32") for name in ("layer_first", "batch_first", "group_first")),
    *((name, "float64") for name in ("layer_norm", "batch_norm")),
]


def case_of(name: str):
    return CENTERED.get(name) or ONE_EACH[name]


@pytest.mark.parametrize(("name", "dtype"), KINDS)
def test_n01_n73_offset_of_everything_that_centres(name: str, dtype: str):
    """N01, N73: value and gradient do not depend on the offset, in any dtype.

    The bound has no κ: 64·u·n, and the rounding of the result.
    """
    case = case_of(name)
    bar = case.rng("bar").integers(-4, 5, case.frame.shape).astype(float)
    for base, step in OFFSETS[dtype]:
        x = steps(case, base, step, dtype)
        y, slope = forward_and_backward(
            case.spec, jnp.asarray(x, dtype), jnp.asarray(bar, dtype)
        )
        assert y.dtype == slope.dtype == jnp.dtype(dtype)
        agree(case, x, y, by_hand(case.spec, case.frame, x), dtype)
        agree(case, x, slope, slope_by_jax(case, x - base, bar), dtype)


@pytest.mark.parametrize("name", ["layer_norm", "batch_norm", "group_norm"])
def test_n01_offset_without_jit(name: str):
    """N01: eagerly as well, where XLA cannot reorder anything."""
    case = ONE_EACH[name]
    for base, step in OFFSETS["float32"]:
        x = steps(case, base, step, "float32")
        y = nj.normalize(case.spec, jnp.asarray(x, jnp.float32))
        agree(case, x, y, by_hand(case.spec, case.frame, x), "float32")


def four(base: float, step: float = 1.0) -> jax.Array:
    return jnp.array([base, base + step, base + 2 * step, base + 3 * step], jnp.float32)


@pytest.mark.jax_defaults
@pytest.mark.parametrize("base", [1e4, 1e5])
def test_n01_flax_default_is_still_wrong(base: float):
    """N01: the control: Flax's one-pass variance is clamped to 0, d/√1e-6 comes out.

    With the exact variance Flax is right, so the input is not to blame.
    """
    x = four(base)
    right = np.array([-1.5, -0.5, 0.5, 1.5]) / np.sqrt(1.25 + 1e-6)
    ours = jit(nj.normalize)(nj.layer_norm(epsilon=1e-6), x)
    np.testing.assert_allclose(ours, right, rtol=bound(4))
    fast: Any = nn.LayerNorm().init_with_output(jax.random.key(0), x)[0]
    assert np.max(abs(wide(fast) - right)) > 100
    slow: Any = nn.LayerNorm(use_fast_variance=False)
    y = slow.init_with_output(jax.random.key(0), x)[0]
    np.testing.assert_allclose(y, right, rtol=bound(4))


BFLOAT16 = [
    ([100, 100.5, 101, 101.5], -64.0, 0.3125),
    ([9, 9.0625, 9.125, 9.1875], -0.5, 0.0048828125),
    ([33, 33.25, 33.5, 33.75], -8.0, 0.078125),
]


@pytest.mark.parametrize(("vector", "wrong", "variance"), BFLOAT16)
def test_n02_one_pass_in_bfloat16_is_negative(vector, wrong: float, variance: float):
    """N02: E[x²] − E[x]² in bfloat16 is below 0 at ordinary magnitudes.

    The control is that arithmetic itself; batch norm in training is right for rows of
    the same numbers, and so is what it stores.
    """
    x = jnp.array(vector, jnp.bfloat16)
    square = jnp.mean((x * x).astype(jnp.float32)).astype(jnp.bfloat16)
    mean = jnp.mean(x.astype(jnp.float32)).astype(jnp.bfloat16)
    assert float(square - mean * mean) == wrong
    column = jnp.broadcast_to(x[:, None], (4, 2))
    y = jit(nj.normalize)(nj.batch_norm(), column)
    right = (np.array(vector) - np.mean(vector)) / np.sqrt(variance + 1e-5)
    np.testing.assert_allclose(wide(y)[:, 1], right, rtol=2.0**-8)
    spec = nj.batch_norm(running=nj.Running(decay=0.0))
    state = nj.running.init(spec, column.shape)
    state = nj.running.update(spec, state, jit(nj.moments)(spec, column))
    assert state.variance.tolist() == [variance, variance]


def test_n04_the_mean_is_no_float32():
    """N04: at 2²⁴ the mean 2²⁴ + 3 lies between two float32; two passes miss it.

    The kind: the last bits of any dtype, offsets of either sign, any order.
    """
    spec = nj.layer_norm()
    two_pass = nj.layer_norm(precision=nj.Precision(algorithm="two_pass"))
    call = jit(nj.normalize)
    for sign in (1.0, -1.0):
        x = sign * four(2.0**24, 2.0)
        y = sign * wide(call(spec, x))
        right = np.array([-3.0, -1.0, 1.0, 3.0]) / np.sqrt(5 + 1e-5)
        np.testing.assert_allclose(y, right, rtol=bound(4))
        np.testing.assert_allclose(abs(y[:2]), [1.3416, 0.4472], atol=5e-5)
        assert np.max(abs(sign * wide(call(two_pass, x)) - right)) > 0.1
    for order in ([0, 1, 2, 3], [3, 2, 1, 0], [2, 0, 3, 1]):
        y = call(spec, four(2.0**24, 2.0)[jnp.array(order)])
        np.testing.assert_allclose(y, right[order], rtol=bound(4))


@pytest.mark.jax_defaults
def test_n04_flax_has_no_setting_that_is_right():
    """N04: the control: neither of Flax's two variances."""
    x = four(2.0**24, 2.0)
    right = np.array([-3.0, -1.0, 1.0, 3.0]) / np.sqrt(5)
    for fast in (True, False):
        layer: Any = nn.LayerNorm(use_fast_variance=fast)
        y = layer.init_with_output(jax.random.key(0), x)[0]
        assert np.max(abs(wide(y) - right)) > 0.3


def precise(**fields) -> nj.NormSpec:
    return nj.layer_norm(epsilon=1e-6, precision=nj.Precision(**fields))


def test_n01_each_algorithm_does_what_it_says():
    """N01, N04: one_pass errs by κ²u, two_pass by (κu)², shifted at no offset."""
    call = jit(nj.normalize)
    for algorithm in ("shifted", "two_pass", "one_pass"):
        errors = []
        for base, step in ((1e2, 1.0), (1e4, 1.0), (2.0**24, 2.0)):
            d = step * np.array([-1.5, -0.5, 0.5, 1.5])
            right = d / np.sqrt(1.25 * step**2 + 1e-6)
            y = call(precise(algorithm=algorithm), four(base, step))
            errors.append(np.max(abs(wide(y) - right)))
        if algorithm == "shifted":
            assert max(errors) <= bound(4)
        elif algorithm == "two_pass":
            assert max(errors[:2]) <= bound(4)
            assert errors[2] > 0.1
        else:
            assert errors[0] <= 1e-2
            assert errors[1] > 1e3


@pytest.mark.jax_defaults
@pytest.mark.parametrize("base", [1e2, 3e3, 1e4, 1e5])
def test_n01_n73_one_pass_is_what_flax_computes(base: float):
    """N01, N73: declared on purpose it reproduces Flax, the clamp at 0 included.

    Sums of four have one order, so what is left of the cancelled variance is the same.
    """
    x = four(base)
    layer: Any = nn.LayerNorm()
    theirs = wide(layer.apply(layer.init(jax.random.key(0), x), x))
    ours = wide(jit(nj.normalize)(precise(algorithm="one_pass"), x))
    np.testing.assert_allclose(ours, theirs, rtol=bound(4))


@pytest.mark.parametrize("name", ["layer_norm", "batch_norm", "group_norm"])
def test_n05_folded_application_loses_the_offset(name: str):
    """N05: x·a + (b − m·a) errs by up to κ·u, (x − m)·a does not; both with one σ².

    The kind: any preset, own and stored statistics, with scale and bias.
    """
    case = ONE_EACH[name]
    folded = case.spec.replace(precision=nj.Precision(apply="folded"))
    params = {"scale": 1.5, "bias": -0.25}
    given = {
        key: jnp.full(value.shape, params[key], jnp.float32)
        for key, value in nj.init(case.spec, case.frame.shape).items()
    }
    call = jit(nj.normalize)
    for base in (1e4, 1e6):
        x = steps(case, base, 1.0, "float32")
        narrow = jnp.asarray(x, jnp.float32)
        right = 1.5 * by_hand(case.spec, case.frame, x) - 0.25
        close, kappa = bound(case.frame.group_size), 2 * base * 2.0**-24
        found = jit(nj.moments)(case.spec, narrow)
        for moments in (None, found):
            centered = wide(call(case.spec, narrow, given, moments=moments))
            assert np.max(abs(centered - right)) <= close
            y = wide(call(folded, narrow, given, moments=moments))
            assert np.max(abs(y - right)) <= 8 * kappa + close
            if base == 1e6:
                assert np.max(abs(y - right)) > kappa / 16
    # Near 0 the two forms agree.
    x = jnp.asarray(steps(case, 0.0, 1.0, "float32"), jnp.float32)
    gap = wide(call(folded, x, given)) - wide(call(case.spec, x, given))
    assert np.max(abs(gap)) <= bound(1)


def test_n05_numbers_of_the_report():
    """N05: 1e6 + [0, 1, 2, 3]: centred ±1.34164, ±0.44721; folded to about 0.06."""
    x = four(1e6)
    y = wide(jit(nj.normalize)(nj.layer_norm(), x))
    np.testing.assert_allclose(y, STANDARD, rtol=bound(4))
    folded = wide(jit(nj.normalize)(precise(apply="folded"), x))
    error = np.max(abs(folded - STANDARD))
    assert 1e-3 < error < 0.13  # two roundings of m/s = 894427, whose ulp is 0.0625


@pytest.mark.jax_defaults
def test_n73_flax_default_gradient_is_wrong_by_orders():
    """N73, N73b: ∂y/∂x of the N01 vector beside Flax's, whose clamp hides a NaN."""
    x = four(1e4)
    right = [0.2683303, -0.3577684, -0.0894434, 0.1788815]
    spec = nj.layer_norm()
    rows = [
        jit(jax.jacfwd(nj.normalize, 1))(spec, x)[0],
        jit(jax.jacrev(nj.normalize, 1))(spec, x)[0],
        nj.input_jacobian(spec, x).as_matrix()[0],
    ]
    for row in rows:
        np.testing.assert_allclose(row, right, rtol=bound(4), atol=1e-7)
    layer: Any = nn.LayerNorm()
    variables = layer.init(jax.random.key(0), x)
    wrong = jit(jax.jacrev(lambda x: layer.apply(variables, x)))(x)[0]
    assert np.max(abs(wide(wrong))) > 1e7
