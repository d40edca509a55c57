"""What is computed badly, or differentiated wrongly, is named; what is right is not."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import normjax as nj

pytestmark = pytest.mark.jax_defaults
SHAPE = (3, 7)


def layer(x, variance, xp=jnp):
    mean = x.mean(-1, keepdims=True)
    return (x - mean) / xp.sqrt(variance(x, mean) + np.float32(1e-5))


def two_pass(x, mean):
    return ((x - mean) ** 2).mean(-1, keepdims=True)


def one_pass(x, mean):
    return (x**2).mean(-1, keepdims=True) - mean**2


def clamped(x, mean):
    return np.maximum(one_pass(x, mean), np.float32(0))


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(
    ("variance", "word"),
    [
        (two_pass, "stable"),
        (one_pass, "ONE-PASS, NaN where it is negative"),
        (clamped, "ONE-PASS, clamped at 0"),
    ],
)
def test_the_variance_of_a_numpy_layer(variance, word: str, dtype: str):
    with np.errstate(invalid="ignore"):
        found = nj.audit(lambda x: layer(x, variance, np), SHAPE, dtype)
    assert found["variance"].value == word
    assert found["variance"].defect == (word != "stable")


def test_flax_layer_norm_is_one_pass_and_ours_is_not():
    """±1500 in place of ±1.34 on 1e4 + (0, 1, 2, 3) is what it costs."""
    theirs, ours = nn.LayerNorm(), nj.linen.LayerNorm()
    assert nj.audit(theirs, (4, 6))["variance"].value == "ONE-PASS, clamped at 0"
    found = nj.audit(ours, (4, 6))
    assert (found["variance"].value, found.defects) == ("stable", ())
    assert found["derivative"].value == "right"
    x = jnp.float32(1e4) + jnp.arange(4.0)[None]
    right = np.array([-1.5, -0.5, 0.5, 1.5]) / np.sqrt(1.25)
    wrong, _ = theirs.init_with_output(jax.random.key(0), x)
    assert np.abs(wrong).max() > 1000
    better, _ = ours.init_with_output(jax.random.key(0), x)
    np.testing.assert_allclose(better[0], right, atol=1e-5)


def stopped(mean: bool, scale: bool):
    """A layer norm whose derivative leaves out what is said."""

    def function(x):
        average = x.mean(-1, keepdims=True)
        divisor = jnp.sqrt(two_pass(x, average) + 1e-5)
        average = jax.lax.stop_gradient(average) if mean else average
        divisor = jax.lax.stop_gradient(divisor) if scale else divisor
        return (x - average) / divisor

    return function


@pytest.mark.parametrize(
    ("mean", "scale", "word"),
    [
        (False, False, "right"),
        (True, False, "MEAN TERM MISSING"),
        (False, True, "SCALE TERM MISSING"),
        (True, True, "MEAN AND SCALE TERMS MISSING"),
    ],
)
def test_the_derivative(mean: bool, scale: bool, word: str):
    found = nj.audit(stopped(mean, scale), SHAPE)
    assert found["derivative"].value == word
    assert found["derivative"].defect == (word != "right")


def test_a_derivative_that_is_nan_at_a_constant_input():
    @jax.custom_jvp
    def function(x):
        return layer(x, two_pass)

    @function.defjvp
    def _(primals, tangents):
        y, dy = jax.jvp(lambda x: layer(x, two_pass), primals, tangents)
        spread = primals[0].std(-1, keepdims=True)
        return y, dy * (spread / spread)

    found = nj.audit(function, SHAPE)
    assert found["derivative"].value == "right; NaN AT CONSTANT INPUT"
    assert found["derivative"].defect


def test_without_a_variance_or_a_derivative_nothing_is_claimed():
    def rms(x):
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + np.float32(1e-5))

    names = {finding.name for finding in nj.audit(rms, SHAPE).findings}
    assert names.isdisjoint({"variance", "derivative"})


def applied(form: str):
    """NumPy, float32: how the same numbers are put together."""

    def function(x):
        mean = x.mean(-1, keepdims=True)
        a = 1 / np.sqrt(two_pass(x, mean) + np.float32(1e-5))
        if form == "centered":
            return (x - mean) * a
        if form == "folded":
            return x * a + (-mean * a)
        wide = np.float64
        rounded = (-mean * a).astype(np.float32)
        return (x.astype(wide) * a.astype(wide) + rounded).astype(np.float32)

    return function


@pytest.mark.parametrize(
    ("form", "word"),
    [
        ("centered", "centered"),
        ("folded", "FOLDED: x·a + (b − m·a)"),
        ("fused", "folded, in one fused rounding"),
    ],
)
def test_planted_folded_application(form: str, word: str):
    found = nj.audit(applied(form), (4, 6))
    assert found["application"].value == word
    assert found["application"].defect == (form == "folded")
    assert found.spec is not None
    expected = "centered" if form == "centered" else "folded"
    assert found.spec.precision.apply == expected


def masking(fault: str = "", output: str = "keep"):
    """A layer norm of the valid elements, or one with a planted fault."""

    def function(x, mask=None):
        valid = jnp.ones_like(x) if mask is None else mask.astype(x.dtype)
        count = valid.sum(-1, keepdims=True)
        inner = x if fault == "gradient" else jnp.where(valid > 0, x, 0)
        used = jnp.where(valid > 0, inner, 0) if fault != "product" else x * valid
        mean = used.sum(-1, keepdims=True) / count
        seen = jnp.ones_like(valid) if fault == "variance" else valid
        square = jnp.where(seen > 0, (inner - mean) ** 2, 0).sum(-1, keepdims=True)
        divisor = jnp.sqrt(square / count + 1e-5)
        if mask is None or output == "keep":
            return (x - mean) / divisor
        return jnp.where(mask, (inner - mean) / divisor, 0 if output == "zero" else x)

    return function


def ignoring(x, mask=None):
    del mask
    return layer(x, two_pass)


@pytest.mark.parametrize("output", ["keep", "zero", "passthrough"])
def test_a_mask_that_is_honored(output: str):
    # NaN − mean, times a derivative of 0, is NaN: "keep" needs a rule of its own.
    own = masking(output=output)
    found = nj.audit(nj.linen.LayerNorm() if output == "keep" else own, (4, 8))
    mask = found["mask"]
    assert mask.value.startswith("honored")
    assert mask.facts["output"] == output
    assert (mask.defect, mask.facts["nan_safe"]) == (False, True)
    assert mask.facts["gradient_safe"] is True
    assert found.spec is not None
    assert found.spec.masked_output == output


@pytest.mark.parametrize(
    ("function", "says"),
    [
        (ignoring, "IGNORED"),
        (masking("variance"), "NOT PROPERLY HONORED"),
        (masking("product"), "NaN PASSES IT"),
        (masking("gradient", "zero"), "GRADIENT NaN UNDER IT"),
    ],
)
def test_planted_faults_of_a_mask(function, says: str):
    found = nj.audit(function, (4, 8))["mask"]
    assert says in found.value
    assert found.defect


def test_an_example_that_depends_on_the_size_of_its_batch():
    found = nj.audit(lambda x: layer(x, two_pass), (4, 8))
    assert found["batch"].facts["invariance"] in ("bitwise", "rounding")

    def sized(x):
        return layer(x, two_pass) * (1 + 0.01 * (len(x) > 8))

    found = nj.audit(sized, (4, 8))
    assert found["batch"].value == "DEPENDS ON THE SIZE OF THE BATCH"
    assert found["batch"].defect
    assert found["batch"].facts["difference"] == pytest.approx(0.01, rel=1e-3)
