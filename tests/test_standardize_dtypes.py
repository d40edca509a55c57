"""float32, float16 and bfloat16 beside float64 of the rounded input; output dtypes."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import CASES
from compare import (
    Measured,
    batched,
    jit,
    measure,
    operator,
    rows,
    unit_roundoff,
    wide,
)
from frames import Case, inputs

import normjax as nj

# How far the mean may be from 0 in standard deviations, so that rounding the input
# leaves a spread; the result must neither overflow nor vanish in the narrow dtype.
RANGE = {
    "float32": {"kappa": 1e4, "spread": 2.0},
    "float16": {"kappa": 100.0, "spread": 1.0},
    "bfloat16": {"kappa": 10.0, "spread": 1.0},
}
WIDE_CASES = [
    "layer",
    "batch_space",
    "group_first",
    "center_std_outside_sqrt",
    "plain_rms_floor_std",
    "blend_batch",
    "mask_passthrough",
]
NARROW_CASES = ["layer", "batch_space", "l2", "mask_zero"]


def narrow(case: Case, dtype: str, count: int = 200):
    """Inputs rounded to a dtype, as float64, and the oracle's value and derivative."""
    x = inputs(case, count, **RANGE[dtype])
    x = wide(jnp.asarray(x.astype(np.float32), dtype))
    settings = case.arguments(np.float32)  # what the narrow computation is given
    changes = {}
    if case.affine:
        view = case.frame.affine_view
        params = settings["params"]
        changes = {name: wide(value).reshape(view) for name, value in params.items()}
    if case.given_numbers() is not None:
        pair = (array.astype(np.float32) for array in case.given_numbers() or ())
        changes["given"] = tuple(map(wide, pair))
    plain = partial(case.oracle, **changes)
    both = batched(lambda x: (plain(x), jax.jacfwd(plain)(x)), exact=True)
    return x, *both(x)


def stored(case: Case, expected: np.ndarray, dtype: str) -> float:
    """Normwise error of rounding every entry to a narrow dtype, subnormals included."""
    found = rows(case.frame, expected)
    size = np.linalg.norm(found, axis=-1)
    smallest = float(jnp.finfo(dtype).smallest_subnormal) / 2
    absolute = smallest * np.sqrt(found.shape[-1]) / np.where(size > 0, size, 1)
    return unit_roundoff(dtype) + float(absolute.max())


@pytest.mark.x32
@pytest.mark.parametrize("name", WIDE_CASES)
def test_float32(name: str):
    """Value, both modes and operator, and no digit is lost to an offset of 10⁴ std.

    A blend subtracts another mean too, and its rule keeps x̂, so there κ counts.
    """
    case = CASES[name]
    x, value, derivative = narrow(case, "float32")
    found = batched(
        lambda x: (
            case.call(x),
            jax.jacfwd(case.call)(x),
            jax.jacrev(case.call)(x),
            operator(case, x).as_matrix(),
        ),
        jnp.float32,
    )(x)
    assert all(array.dtype == jnp.float32 for array in found)
    steady = case.spec.statistics == "input"
    measure(case, x, found[0], value, np.float32, any_offset=steady).check()
    for J in found[1:]:
        measure(case, x, J, derivative, np.float32, any_offset=steady).check()


@pytest.mark.x32
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", NARROW_CASES)
def test_narrow(name: str, dtype: str):
    """As in float32, and rounded once: half an ulp of the narrow dtype."""
    case = CASES[name]
    x, value, derivative = narrow(case, dtype)
    found = batched(
        lambda x: (case.call(x), jax.jacfwd(case.call)(x), jax.jacrev(case.call)(x)),
        dtype,
    )(x)
    assert all(array.dtype == jnp.dtype(dtype) for array in found)
    entry = stored(case, value, dtype)
    measure(case, x, found[0], value, np.float32, entry=entry).check()
    entry = stored(case, derivative, dtype)
    for J in found[1:]:
        measure(case, x, J, derivative, np.float32, entry=entry).check()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_narrow_operator(dtype: str):
    """The closed form of a narrow input is float32 and not rounded."""
    case = CASES["layer_space"]
    x, _, derivative = narrow(case, dtype)
    found = batched(lambda x: operator(case, x).as_matrix(), dtype)(x)
    assert found.dtype == jnp.float32
    measure(case, x, found, derivative, np.float32).check()


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_planted_errors_are_rejected(dtype: str):
    """Every group of the largest structure, in every dtype."""
    case = CASES["layer_space"]
    x, value, derivative = narrow(case, dtype)
    shape = derivative.shape
    size = int(np.prod(case.frame.shape))
    matrix = derivative.reshape(len(x), size, size)
    diagonal = matrix * np.eye(size)

    def check(found: np.ndarray, right: np.ndarray) -> Measured:
        entry = stored(case, right, dtype) if dtype != "float32" else 0.0
        return measure(case, x, found, right, np.float32, entry=entry)

    check(derivative, derivative).check()
    for wrong in (0 * matrix, -matrix, diagonal, 2 * diagonal - matrix):
        check(wrong.reshape(shape), derivative).refute()
    for wrong in (0 * value, -value, value + 0.1 * np.abs(value).max()):
        check(wrong, value).refute()


def apply(spec: nj.NormSpec, x, params=None):
    return jax.jit(nj.normalize)(spec, x, params)


@pytest.mark.x32
def test_squares_that_overflow_float16():
    """N06: ±300 squared is above 65504; the answer is ±1."""
    x = jnp.array([300, -300, 300, 300], jnp.float16)
    assert apply(nj.rms_norm(), x).tolist() == [1, -1, 1, 1]
    rows = jnp.array([[300.0], [-300.0]], jnp.float16)
    assert apply(nj.batch_norm(), rows).tolist() == [[1], [-1]]


def test_small_epsilon_in_float16():
    """N08: ε = 1e-12 does not become 0, and nothing becomes NaN."""
    for spec in (nj.layer_norm(epsilon=1e-12), nj.l2_norm(epsilon=1e-12)):
        x = jnp.zeros(4, jnp.float16)
        assert apply(spec, x).tolist() == [0.0] * 4
        _, pull = jax.vjp(partial(apply, spec), x)
        assert np.isfinite(pull(jnp.full(4, 1e-3, x.dtype))[0]).all()
        J = jit(lambda x, s=spec: nj.input_jacobian(s, x).as_matrix())(x)  # up to 1e6
        assert np.isfinite(J).all()
        assert J.any()


@pytest.mark.x32
def test_epsilon_is_not_rounded_to_the_input():
    """N09: with ε = 2⁻²³ the answer is 0.9999823, with bfloat16's it would be 0.549."""
    wide_output = nj.Precision(output="float32")
    spec = nj.rms_norm(epsilon=2.0**-23, precision=wide_output)
    y = apply(spec, jnp.full(4, 0.058, jnp.bfloat16))
    np.testing.assert_allclose(y, 0.9999823, atol=5e-8 + 2**-24)


def test_values_above_float16():
    """N10: float32 input is normalized in float32, whatever comes out."""
    x = jnp.array([70000.0, 60000.0], jnp.float32)
    output = nj.Precision(output="float16")
    assert apply(nj.layer_norm(precision=output), x).tolist() == [1, -1]
    np.testing.assert_allclose(
        apply(nj.rms_norm(precision=output), x), [1.0738, 0.9204], atol=2**-11
    )


@pytest.mark.x32
def test_cast_before_or_after_the_scale():
    """N16: the two orders that released models use, bit for bit."""
    x = jnp.array([1.0, 2, 3, 4], jnp.bfloat16)
    params = {"scale": jnp.full(4, 1.3, jnp.bfloat16)}
    digits = {
        "before": [0.474609, 0.949219, 1.421875, 1.898438],
        "after": [0.472656, 0.945313, 1.421875, 1.890625],
    }
    for cast, right in digits.items():
        affine = nj.Affine("c", bias=False, cast=cast)
        y = apply(nj.rms_norm(epsilon=1e-6, affine=affine), x, params)
        assert y.dtype == jnp.bfloat16
        np.testing.assert_allclose(wide(y), right, rtol=0, atol=5.1e-7)


@pytest.mark.x32
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("output", ["input", "float16", "bfloat16", "float32"])
def test_output_dtype(dtype: str, output: str):
    """N18: the declared one, also with wider parameters, and for gradients x's own."""
    spec = nj.layer_norm(precision=nj.Precision(output=output))
    x = jnp.arange(8.0, dtype=dtype).reshape(2, 4)
    params = nj.init(spec, x.shape)

    def backward(x, params):
        y, pull = jax.vjp(partial(nj.normalize, spec), x, params)
        return y, *pull(y)

    y, x_bar, params_bar = jax.eval_shape(backward, x, params)
    assert y.dtype == (dtype if output == "input" else output)
    assert x_bar.dtype == x.dtype
    assert {leaf.dtype for leaf in jax.tree.leaves(params_bar)} == {np.dtype("float32")}


def test_moments_of_narrow_inputs_are_float32():
    for dtype in ("float16", "bfloat16", "float32"):
        found = nj.moments(nj.batch_norm(), jnp.ones((3, 2), dtype))
        assert {leaf.dtype for leaf in jax.tree.leaves(found)} == {np.dtype("float32")}


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_accumulation_in_float64(dtype: str):
    """Where it is asked for, what is left is one rounding to the output, at any κ."""
    precise = {"precision": nj.Precision(accumulate="float64")}
    case = Case("accumulate", CASES["layer"].frame, precise)
    x, value, derivative = narrow(case, dtype)
    y, J = batched(lambda x: (case.call(x), jax.jacrev(case.call)(x)), dtype)(x)
    assert y.dtype == J.dtype == jnp.dtype(dtype)
    measure(case, x, y, value, entry=stored(case, value, dtype)).check()
    measure(case, x, J, derivative, entry=stored(case, derivative, dtype)).check()
