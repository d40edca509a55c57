"""What no fold gives, narrow dtypes, and the same norm with other parameters."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import normjax as nj
from normjax.interop import absorb_epsilon, fold, store_scale


def norm_of(features: int, dtype: Any = np.float64):
    generator = np.random.default_rng(1)
    params = {
        name: jnp.asarray(generator.normal(1, 0.5, features).astype(dtype))
        for name in ("scale", "bias")
    }
    mean = jnp.asarray(generator.normal(0, 3, features).astype(np.float32))
    variance = jnp.asarray(generator.uniform(0.01, 2, features).astype(np.float32))
    return params, nj.Statistics(mean, variance)


def kernel(*shape: int, dtype: Any = np.float64) -> jax.Array:
    generator = np.random.default_rng(0)
    array = generator.normal(size=shape) / np.sqrt(shape[0])
    return jnp.asarray(array.astype(dtype))


BAD: dict[str, tuple[nj.NormSpec, dict[str, Any], str]] = {
    "its own statistics": (nj.layer_norm(), {"state": None}, "reads its statistics"),
    "no stored ones": (nj.batch_norm(), {"state": None}, "part='affine'"),
    "affine after": (nj.layer_norm(), {"part": "affine"}, "order='before'"),
    "nothing to fold": (
        nj.layer_norm(affine=None),
        {"part": "affine", "order": "before", "params": None}, "nothing to fold",
    ),
    "a bias that the norm has not": (
        nj.rms_norm(), {"part": "affine", "order": "before"}, r"expected \['scale'\]",
    ),
    "for each example": (
        nj.adaptive_layer_norm(),
        {"part": "affine", "order": "before"}, "not its last axes",
    ),
    "for each position": (
        nj.NormSpec("[b] w c", affine="c", running=nj.Running()), {},
        "statistics for each w",
    ),
    "the other side": (nj.batch_norm(), {"order": "before"}, r"\(6,\), and the kernel"),
    "groups": (nj.batch_norm(), {"groups": 4}, "does not divide the 6 outputs"),
    "layout": (nj.batch_norm(), {"layout": "i o o"}, "kernel with 2 axes"),
    "order": (nj.batch_norm(), {"order": "behind"}, "'after', 'before'"),
    "kind of state": (nj.batch_norm(), {"state": {"mean": 0}}, "state is a dict"),
    "negative": (
        nj.batch_norm(),
        {"state": nj.Statistics(jnp.zeros(6), jnp.full(6, -5e-6))},
        "variance of -5e-06",
    ),
    "spoiled": (
        nj.batch_norm(),
        {"state": nj.Statistics(jnp.full(6, jnp.nan), jnp.ones(6))}, "not finite",
    ),
    "missing part": (
        nj.batch_norm(), {"params": {"scale": jnp.ones(6)}}, r"expected \['bias'",
    ),
    "weight": (
        nj.batch_norm(), {"layer": {"weight": kernel(4, 6)}}, "a dict with kernel",
    ),
    "list": (nj.batch_norm(), {"layer": {"kernel": [[1.0]]}}, "kernel is a list"),
    "whole numbers": (
        nj.batch_norm(), {"layer": {"kernel": np.ones((4, 6), int)}}, "dtype int64",
    ),
    "bias": (
        nj.batch_norm(),
        {"layer": {"kernel": kernel(4, 6), "bias": jnp.ones(4)}}, "bias has shape",
    ),
    "no function": (
        nj.batch_norm(), {"layer": {"kernel": kernel(3, 4, 6)}, "x": 1.0}, "apply=",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_what_is_not_exact_or_does_not_fit_is_refused(case: str):
    spec, changes, text = BAD[case]
    params, stored = norm_of(6)
    words: Any = {
        "layer": {"kernel": kernel(4, 6)},
        "params": params,
        "state": stored,
        **changes,
    }
    with pytest.raises(ValueError, match=text) as caught:
        fold(words.pop("layer"), spec, **words)
    assert "\n" not in str(caught.value)


def test_an_offset_before_a_transposed_convolution_is_refused():
    params, stored = norm_of(4)
    words: Any = {"order": "before", "transposed": True, "padding": "VALID"}
    with pytest.raises(ValueError, match="different numbers of terms"):
        fold({"kernel": kernel(3, 4, 6)}, nj.batch_norm(), params, stored, **words)


@pytest.mark.parametrize("drop", ["bias", "scale"])
def test_a_wrong_fold_is_out_of_bounds(drop: str):
    """A converter that loses the shift, or a kernel that is off by one part in 10³."""
    params, stored = norm_of(6, np.float32)
    layer = {"kernel": kernel(4, 6, dtype=np.float32)}
    x = kernel(32, 4, dtype=np.float32)

    def apply(layer: Any, x: jax.Array) -> jax.Array:
        if "bias" not in layer:
            return x @ layer["kernel"]
        if drop == "bias":
            return x @ layer["kernel"]
        return x @ (layer["kernel"] * np.float32(1.001)) + layer["bias"][None]

    folded = fold(layer, nj.batch_norm(), params, stored, x=x, apply=apply)
    assert folded.ok is False
    assert fold(layer, nj.batch_norm(), params, stored, x=x).ok


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16", "float16"])
@pytest.mark.parametrize("fan_in", [1, 64])
def test_the_bound_holds_and_is_of_the_size_of_the_error(dtype: str, fan_in: int):
    """A variance of 1e-8 with ε 1e-10 amplifies by 1e4: the bound has 1/S in it."""
    params, stored = norm_of(6, np.float32)
    layer = {
        "kernel": kernel(fan_in, 6).astype(dtype),
        "bias": kernel(6).astype(dtype),
    }
    x = kernel(64, fan_in).astype(dtype)
    params = {name: value.astype(dtype) for name, value in params.items()}
    spec = nj.batch_norm(epsilon=1e-10)
    folded = fold(layer, spec, params, stored, x=x)
    assert folded.params["kernel"].dtype == dtype
    assert folded.ok
    assert folded.error is not None
    assert 0 < folded.error > folded.bound / (40 * fan_in + 100)
    assert folded.relative is not None
    assert folded.ulps is not None
    assert 0.5 < folded.ulps * float(jnp.finfo(dtype).eps) / folded.relative < 2
    if dtype != "float16":
        narrow = nj.Statistics(stored.mean, stored.variance.at[2].set(1e-8))
        close = fold(layer, spec, params, narrow, x=x)
        assert close.ok
        assert close.amplification > 1e3
        assert close.bound > 10 * folded.bound


def test_a_large_offset_costs_digits_and_the_bound_says_so():
    """N05: mean 10⁵, std 1: the fold cancels x·a and m·a, the norm subtracts first."""
    params, _ = norm_of(6, np.float32)
    layer = {"kernel": jnp.eye(6, dtype=jnp.float32)}
    x = kernel(64, 6, dtype=np.float32)
    stored = nj.Statistics(jnp.full(6, 1e5, jnp.float32), jnp.ones(6, jnp.float32))
    near = fold(layer, nj.batch_norm(), params, stored, x=x)
    far = fold(layer, nj.batch_norm(), params, stored, x=x + np.float32(1e5))
    assert near.ok
    assert far.ok
    assert far.error is not None
    assert 1e-3 < far.error < far.bound < 1
    empty = fold(layer, nj.batch_norm(), params, stored, x=x[:0])
    assert empty.error == 0


def test_half_precision_keeps_what_it_can_hold():
    """N32: f16(1e-8) is 0; with ε 1e-5 the gain is 316.23, and 1e-12 leaves float16."""
    layer = {"kernel": jnp.ones((1, 1), jnp.float16)}
    stored = nj.Statistics(jnp.zeros(1), jnp.full(1, 1e-8))
    folded = fold(layer, nj.batch_norm(affine=None), None, stored)
    np.testing.assert_allclose(folded.params["kernel"].item(), 316.07, rtol=2.0**-11)
    zero = nj.Statistics(jnp.zeros(1), jnp.zeros(1))
    folded = fold(layer, nj.batch_norm(affine=None), None, zero)
    np.testing.assert_allclose(folded.params["kernel"].item(), 316.23, rtol=2.0**-11)
    with pytest.raises(ValueError, match=r"up to 1e\+06, beyond the largest float16"):
        fold(layer, nj.batch_norm(affine=None, epsilon=1e-12), None, zero)
    # Where the divisor is 0 the layer gives the bias, and so does the fold.
    folded = fold(layer, nj.batch_norm(affine=None, epsilon=0.0), None, zero)
    assert [value.item() for value in folded.params.values()] == [0, 0]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_baking_the_one_changes_no_output(dtype: str):
    """N78: 1 + w in float32, 16.8125 for 15.8125; a second time is refused."""
    spec = nj.rms_norm(affine=nj.Affine("c", bias=False, stored="1+w"))
    w = jnp.asarray([15.8125, 0.1, -0.9, 1e-4], dtype)
    baked = store_scale(spec, {"scale": w}, "w")
    assert baked.params["scale"].dtype == jnp.float32
    assert baked.params["scale"][0] == 16.8125
    x = kernel(3, 4).astype(dtype)
    before = nj.normalize(spec, x, {"scale": w})
    np.testing.assert_array_equal(
        nj.normalize(baked.spec, x, baked.params), before, strict=True
    )
    assert baked.error <= 2.0**-24
    with pytest.raises(ValueError, match="added twice"):
        store_scale(baked.spec, baked.params, "w")
    back = store_scale(baked.spec, baked.params, "1+w")
    assert back.spec == spec
    with pytest.raises(ValueError, match="subtracted twice"):
        store_scale(spec, {"scale": w}, "1+w")
    # w − 1 is exact from 1/2 to 2; elsewhere the error says what is lost.
    assert back.error <= 2.0**-24 / 0.1
    near = store_scale(baked.spec, {"scale": jnp.float32([0.5, 1.3, 2.0])}, "1+w")
    assert near.error == 0
    with pytest.raises(ValueError, match="no scale"):
        store_scale(nj.layer_norm(affine=None), {}, "w")


@pytest.mark.parametrize("stored_as", ["w", "1+w"])
def test_another_epsilon_becomes_another_scale(stored_as: str):
    """N75: 1.048285 for a variance of 0.01, 1e-5 → 1e-3; only with stored ones."""
    spec = nj.batch_norm(affine=nj.Affine("c", stored=stored_as))
    stored = nj.Statistics(jnp.asarray([0.5, -1.0]), jnp.asarray([0.01, 2.0]))
    params = nj.init(spec, (3, 2), jnp.float64)
    new = absorb_epsilon(spec, params, stored, 1e-3)
    factor = new.params["scale"] + (0.0 if stored_as == "w" else 1.0)
    np.testing.assert_allclose(factor[0], 1.048285, atol=1e-6)
    x = kernel(3, 2)
    was = nj.normalize(spec, x, params, moments=stored)
    now = nj.normalize(new.spec, x, new.params, moments=stored)
    np.testing.assert_allclose(now, was, rtol=1e-13)
    assert new.error < 1e-15
    with pytest.raises(ValueError, match="only with stored"):
        absorb_epsilon(spec, params, None, 1e-3)  # type: ignore[arg-type]
    zero = nj.Statistics(stored.mean, jnp.zeros(2))
    with pytest.raises(ValueError, match="divides by 0"):
        absorb_epsilon(spec, params, zero, 0.0)
    with pytest.raises(ValueError, match="take up another"):
        absorb_epsilon(nj.batch_norm(affine=None), {}, stored, 1e-3)
