"""Field cases of narrow dtypes: squares, epsilon, casts, output dtypes, integers.

The kind: every preset, both narrow dtypes. Of the same theme elsewhere: the sizes of
the errors in tests/test_standardize_dtypes.py, stored statistics in
test_field_running.py.
"""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compare import jit, wide
from flax import nnx
from kinds import (
    DIVIDING,
    ONE_EACH,
    agree,
    bound,
    by_hand,
    forward_and_backward,
    random,
    slope_by_jax,
)
from small import refuse

import normjax as nj

KEY = jax.random.key(0)
NARROW = ("float16", "bfloat16")
normalize = jit(nj.normalize)
# Just above √65504 and near 65504; bfloat16 has float32's range.
LARGE = {"float16": (257.0, 300.0, 60000.0), "bfloat16": (300.0, 2.0**59)}


@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("name", DIVIDING)
def test_n06_squares_beyond_the_dtype(name: str, dtype: str):
    """N06: x² overflows float16 above 255, the result does not: value and gradient."""
    case = ONE_EACH[name]
    rng = case.rng("large")
    unit = rng.choice([-1.0, -0.5, 0.5, 1.0], case.frame.shape)
    bar = rng.integers(-4, 5, case.frame.shape).astype(float)
    for size in LARGE[dtype]:
        x = wide(jnp.asarray(unit * size, dtype))
        with np.errstate(over="ignore"):
            assert np.isinf((x * x).astype(np.float16)).any()
        y, slope = forward_and_backward(
            case.spec, jnp.asarray(x, dtype), jnp.asarray(bar, dtype)
        )
        agree(case, x, y, by_hand(case.spec, case.frame, x), dtype)
        agree(case, x, slope, slope_by_jax(case, x, bar), dtype)


@pytest.mark.jax_defaults
def test_n06_flax_in_float16_is_still_zero():
    """N06: the control: Flax with reductions in float16 gives 0 where ±1 is right."""
    x = jnp.array([300, -300, 300, 300], jnp.float16)
    assert normalize(nj.rms_norm(), x).tolist() == [1, -1, 1, 1]
    layer: Any = nn.RMSNorm(force_float32_reductions=False, dtype=jnp.float16)
    assert not layer.init_with_output(KEY, x)[0].any()


@pytest.mark.parametrize(
    ("name", "dtype"),
    [*((name, "float32") for name in DIVIDING), ("rms_norm", "bfloat16")],
)
def test_n06_squares_beyond_float32(name: str, dtype: str):
    """N06: beyond 1.8e19 float32 cannot square either: NaN, or right with rescale.

    Never 0. At ordinary sizes a power of two changes no more than the rounding; squares
    that vanish are right as well, where no ε is above them.
    """
    case = DIVIDING[name]
    rng = case.rng("large")
    unit = rng.choice([-1.0, -0.5, 0.5, 1.0], case.frame.shape)
    bar = rng.integers(-4, 5, case.frame.shape).astype(float)
    rescaled = case.spec.replace(precision=nj.Precision(rescale=True))
    for size in (2.0**70, 2.0**120, 2.0**-20, 1.0):
        x = jnp.asarray(unit * size, dtype)
        if size > 1e19:
            plain = normalize(case.spec, x)
            assert np.isnan(plain).any()
            assert plain.any()
        y, slope = forward_and_backward(rescaled, x, jnp.asarray(bar, dtype))
        agree(case, x, y, by_hand(case.spec, case.frame, unit * size), dtype)
        agree(case, x, slope, slope_by_jax(case, unit * size, bar), dtype)
    exact, x = rescaled.replace(epsilon=0.0), jnp.asarray(unit * 2.0**-80, dtype)
    y, _ = forward_and_backward(exact, x, jnp.asarray(bar, dtype))
    agree(case, x, y, by_hand(exact, case.frame, unit * 2.0**-80), dtype)


@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("name", DIVIDING)
def test_n08_epsilon_below_the_dtype(name: str, dtype: str):
    """N08: ε that float16 rounds to 0: zeros stay 0, the gradient finite, ε counts.

    The second input has σ² of the size of ε, in float16's subnormals.
    """
    assert float(np.float16(1e-12)) == float(np.float16(1e-8)) == 0
    case = ONE_EACH[name]
    bar = jnp.asarray(random(case, 1e-3), dtype)
    for epsilon in (1e-12, 1e-8):
        spec = case.spec.replace(epsilon=epsilon)
        zeros = jnp.zeros(case.frame.shape, dtype)
        y, slope = forward_and_backward(spec, zeros, bar)
        assert not y.any()
        assert np.isfinite(slope).all()
        assert slope.any()
    tiny = case.rng("tiny").integers(-16, 17, case.frame.shape) * 2.0**-24
    spec = case.spec.replace(epsilon=1e-12)
    y = normalize(spec, jnp.asarray(tiny, dtype))
    right = by_hand(spec, case.frame, tiny)
    agree(case, tiny, y, right, dtype)
    without = by_hand(spec.replace(epsilon=0.0), case.frame, tiny)
    assert np.max(abs(without - right)) > 0.1


@pytest.mark.parametrize("name", ["layer_norm", "l2_norm", "batch_norm"])
def test_n08_epsilon_that_vanishes_is_zero_and_not_nan(name: str):
    """N08: accumulated in float16 on purpose, ε = 1e-12 is 0: x̂ and J are 0 there."""
    case = ONE_EACH[name]
    spec = case.spec.replace(
        epsilon=1e-12, precision=nj.Precision(accumulate="float16")
    )
    zeros = jnp.zeros(case.frame.shape, jnp.float16)
    y, slope = forward_and_backward(spec, zeros, jnp.ones_like(zeros))
    assert not y.any()
    assert not slope.any()


@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("name", DIVIDING)
def test_n09_epsilon_is_not_rounded_to_the_input(name: str, dtype: str):
    """N09: where ε is most of σ² + ε, float32's digits of it are in the result."""
    case = ONE_EACH[name]
    spec = case.spec.replace(precision=nj.Precision(output="float32"), epsilon=1e-5)
    rounded = float(jnp.asarray(1e-5, dtype))
    x = case.rng("small").integers(-8, 9, case.frame.shape) * 2.0**-14
    y = normalize(spec, jnp.asarray(x, dtype))
    agree(case, x, y, by_hand(spec, case.frame, x), "float32")
    other = by_hand(spec.replace(epsilon=rounded), case.frame, x)
    assert np.max(abs(wide(y) - other)) > 1e-6


def test_n09_epsilon_is_a_number():
    """N09: the numbers of the report; None never means "that of the dtype"."""
    x = jnp.full(4, 0.058, jnp.bfloat16)
    for epsilon, right in ((2.0**-23, 0.9999823), (2.0**-7, 0.5493211)):
        precision = nj.Precision(output="float32")
        y = normalize(nj.rms_norm(epsilon=epsilon, precision=precision), x)
        np.testing.assert_allclose(y, right, rtol=bound(1))
    with refuse("epsilon is None, expected a number"):
        nj.normalize(nj.rms_norm(epsilon=None), x)
    with refuse("epsilon is 'auto', expected a number"):
        nj.normalize(nj.rms_norm(epsilon="auto"), x)


OUTPUTS = [
    *((name, "float32", "float16", 7e4) for name in DIVIDING),
    ("layer_norm", "float32", "float16", 1e15),
    ("batch_norm", "bfloat16", "float16", 7e4),
    ("rms_norm", "float64", "float32", 1e50),
]


@pytest.mark.parametrize(("name", "dtype", "output", "size"), OUTPUTS)
def test_n10_values_beyond_the_output_dtype(name, dtype: str, output: str, size: float):
    """N10: x is normalized in its own dtype, and only the result is cast."""
    case = ONE_EACH[name]
    spec = case.spec.replace(precision=nj.Precision(output=output))
    x = wide(jnp.asarray((1 + 0.2 * random(case)) * size, dtype))
    assert abs(x).max() > float(jnp.finfo(output).max)
    y = normalize(spec, jnp.asarray(x, dtype))
    assert y.dtype == jnp.dtype(output)
    agree(case, x, y, by_hand(spec, case.frame, x), output)


@pytest.mark.parametrize("spec", [nj.layer_norm(), nj.rms_norm()], ids=repr)
def test_n10_numbers_of_the_report(spec):
    """N10: [70000, 60000] gives [1, −1], for RMS [1.0738, 0.9204]; in layers too."""
    x = jnp.array([70000.0, 60000.0], jnp.float32)
    half = spec.replace(precision=nj.Precision(output="float16"))
    right = [1, -1] if spec.center else [1.0738, 0.9204]
    linen = nj.linen.Norm(half)
    for y in (
        normalize(half, x),
        linen.apply(linen.init(KEY, x), x),
        nj.nnx.Norm(half, x.shape)(x),
    ):
        assert y.dtype == jnp.float16
        np.testing.assert_allclose(wide(y), right, atol=2.0**-11)


@pytest.mark.parametrize(
    ("dtype", "jitted"), [("bfloat16", False), ("bfloat16", True), ("float16", True)]
)
def test_n16_cast_before_or_after_the_scale(dtype: str, jitted: bool):
    """N16: the two orders differ, and each is what it says, bit for bit.

    x̂ in float32 is the same for both; the two products are made of it here.
    """
    x = jnp.asarray(np.random.default_rng(0).normal(size=(8, 32)), dtype)
    scale = jnp.asarray(np.random.default_rng(1).uniform(0.5, 2, 32), dtype)
    exact = nj.rms_norm(epsilon=1e-6, precision=nj.Precision(output="float32"))
    x_hat = nj.normalize(exact, x)
    rows = jnp.broadcast_to(scale, x.shape)
    expected = {
        "before": (x_hat.astype(dtype) * rows),
        "after": (x_hat * rows.astype(jnp.float32)).astype(dtype),
    }
    assert not np.array_equal(expected["before"], expected["after"])
    call = jax.jit(nj.normalize) if jitted else nj.normalize
    for cast, right in expected.items():
        affine = nj.Affine("c", bias=False, cast=cast)
        y = call(nj.rms_norm(epsilon=1e-6, affine=affine), x, {"scale": scale})
        assert np.array_equal(y, right), cast


def test_n16_numbers_of_the_report():
    """N16: gain bfloat16(1.3), [1, 2, 3, 4]: Llama's and Gemma's digits."""
    x = jnp.array([1.0, 2, 3, 4], jnp.bfloat16)
    params = {"scale": jnp.full(4, 1.3, jnp.bfloat16)}
    digits = {
        "before": [0.474609, 0.949219, 1.421875, 1.898438],
        "after": [0.472656, 0.945313, 1.421875, 1.890625],
    }
    exact = [0.473552, 0.947104, 1.420655, 1.894207]
    for cast, right in digits.items():
        affine = nj.Affine("c", bias=False, cast=cast)
        spec = nj.rms_norm(epsilon=1e-6, affine=affine)
        np.testing.assert_allclose(
            wide(normalize(spec, x, params)), right, rtol=0, atol=5.1e-7
        )
        spec = spec.replace(precision=nj.Precision(output="float32"))
        if cast == "after":
            found = normalize(spec, x, params)
            np.testing.assert_allclose(found, exact, rtol=0, atol=5.1e-7)


@pytest.mark.jax_defaults
@pytest.mark.parametrize(
    ("name", "dtype"),
    [*((name, "bfloat16") for name in ONE_EACH), ("layer_norm", "float16")],
)
def test_n18_output_dtype_is_the_input_dtype(name: str, dtype: str):
    """N18: with float32 parameters, masks and statistics, by every entry point."""
    case = ONE_EACH[name]
    spec, x = case.spec, jnp.ones(case.frame.shape, dtype)
    mask = jnp.ones(case.frame.shape, jnp.float32)
    params = nj.init(spec, x.shape)
    read = nj.Statistics(*[jnp.ones(case.frame.mapped_shape, jnp.float32)] * 2)
    layer = nj.linen.Norm(spec)
    mode = {} if spec.running is None else {"use_running_average": True}

    def linen(x):
        return layer.apply(layer.init(KEY, x, **mode), x, **mode)

    for found in (
        jax.eval_shape(lambda x: nj.normalize(spec, x, params), x),
        jax.eval_shape(lambda x: nj.normalize(spec, x, params, mask=mask), x),
        jax.eval_shape(lambda x: nj.normalize(spec, x, params, moments=read), x),
        jax.eval_shape(linen, x),
        nnx.eval_shape(lambda x: nj.nnx.Norm(spec, x.shape)(x), x),
    ):
        assert (found.shape, found.dtype) == (x.shape, x.dtype)


@pytest.mark.jax_defaults
def test_n18_flax_widens():
    """N18: the control: Flax's default layer norm turns bfloat16 into float32."""
    found: Any = nn.LayerNorm().init_with_output(KEY, jnp.ones((1, 4), jnp.bfloat16))[0]
    assert found.dtype == jnp.float32


X: Any = np.array([[1, 2, 3, 4]])
REAL: Any = X.astype(np.float32)
ENTRIES: dict[str, Any] = {
    "normalize": lambda x: nj.normalize(nj.layer_norm(), x),
    "batch": lambda x: nj.normalize(nj.batch_norm(), x),
    "moments": lambda x: nj.moments(nj.batch_norm(), x),
    "input_jacobian": lambda x: nj.input_jacobian(nj.layer_norm(), x),
    "spectrum": lambda x: nj.spectrum(nj.layer_norm(), x),
    "stabilizer_share": lambda x: nj.stabilizer_share(nj.layer_norm(), x),
    "influence": lambda x: nj.influence(nj.batch_norm(), x),
    "linen": lambda x: nj.linen.Norm(nj.layer_norm()).init(KEY, x),
    "nnx": lambda x: nj.nnx.Norm(nj.layer_norm(), (1, 4))(x),
    "jit": lambda x: jax.jit(nj.normalize)(nj.layer_norm(), x),
    "scale": lambda x: nj.normalize(
        nj.rms_norm(), REAL, {"scale": jnp.asarray(x).reshape(4)}
    ),
    "statistics": lambda x: nj.normalize(
        nj.batch_norm(), REAL, moments=nj.Statistics(x[0], REAL[0])
    ),
}


@pytest.mark.parametrize("dtype", ["int32", "uint8", "bool", "complex64"])
@pytest.mark.parametrize("name", ENTRIES)
def test_n19_integers_are_refused(name: str, dtype: str):
    """N19: by every entry point, naming the dtype; never integer outputs or gains."""
    with refuse(f"has dtype {dtype}, expected a float dtype: cast it first"):
        ENTRIES[name](X.astype(dtype))


@pytest.mark.jax_defaults
@pytest.mark.parametrize("dtype", ["int32", "bool", "complex64"])
def test_n19_no_integer_parameters(dtype: str):
    """N19: nor are gains created in such a dtype."""
    with refuse(f"has dtype {dtype}, expected a float dtype"):
        nj.init(nj.layer_norm(), (1, 4), dtype)
    with refuse(f"has dtype {dtype}, expected a float dtype"):
        nj.nnx.Norm(nj.layer_norm(), (1, 4), param_dtype=dtype)
    assert normalize(nj.layer_norm(), X.astype(np.float32)).dtype == jnp.float32
