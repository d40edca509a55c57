"""What the backward pass keeps, of every preset and of what it is compared with."""

from __future__ import annotations

from functools import partial

import flax.linen
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from residuals import kept

import normjax as nj
from normjax.presets import PRESETS

pytestmark = pytest.mark.jax_defaults

FITTING = {"group_norm": {"groups": 2}, "weight_standardization": {"axes": "h i"}}
SPECS = {name: make(**FITTING.get(name, {})) for name, make in PRESETS.items()}
SHAPE = (8, 256, 512)  # the smallest group has 256 entries


def start(spec: nj.NormSpec, dtype: str):
    """A layer's input and parameters, and what it has to be given besides."""
    x = jax.random.normal(jax.random.key(0), SHAPE).astype(dtype)
    given = {}
    if spec.statistics == "renorm":
        given["reference"] = nj.Statistics(jnp.zeros(512), jnp.ones(512))
    return partial(nj.normalize, spec, **given), x, nj.init(spec, SHAPE)


@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_float32_keeps_one_activation(spec: nj.NormSpec, jit: bool):
    """And none beyond x where nothing is subtracted from it."""
    layer, x, params = start(spec, "float32")
    large, share = kept(layer, x, params, jit=jit)
    assert large == spec.center
    assert share <= spec.center + 0.05


@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_narrow_inputs_keep_none(spec: nj.NormSpec, dtype: str, jit: bool):
    """x itself may stay: it is an input, and whoever made it holds it anyway."""
    layer, x, params = start(spec, dtype)
    large, share = kept(layer, x, params, jit=jit)
    assert large == 0
    assert share <= 0.05


@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
def test_flax_keeps_three(jit: bool):
    """The peer, measured in the same way: the count can tell one from three."""
    _, x, _ = start(nj.layer_norm(), "float32")
    layer = flax.linen.LayerNorm()
    params = layer.init(jax.random.key(0), x)
    large, share = kept(lambda x, p: layer.apply(p, x), x, params, jit=jit)
    assert large == 3
    assert share > 2.9


def test_autodiff_of_the_same_formula_keeps_more():
    """The control without Flax: the plain formula, differentiated by JAX."""

    def plain(x, params):
        c = x - x.mean(-1, keepdims=True)
        return c / jnp.sqrt((c * c).mean(-1, keepdims=True) + 1e-5) * params["scale"]

    _, x, params = start(nj.layer_norm(), "float32")
    assert kept(plain, x, params, jit=True)[0] >= 2


@pytest.mark.parametrize("output", ["keep", "zero", "passthrough"])
def test_masks_keep_one_activation(output: str):
    """A mask is an input; a broadcast copy of it would be a second activation."""
    spec = nj.batch_norm(masked_output=output)
    _, x, params = start(spec, "float32")
    mask = jnp.asarray(np.random.default_rng(0).random(SHAPE[:2]) < 0.7)
    large, share = kept(partial(nj.normalize, spec, mask=mask), x, params, jit=True)
    assert large == 1
    assert share <= 1.05


def test_given_statistics_keep_no_more():
    spec = nj.batch_norm()
    _, x, params = start(spec, "float32")
    given = nj.Statistics(jnp.zeros(SHAPE[-1]), jnp.ones(SHAPE[-1]))
    large, share = kept(partial(nj.normalize, spec, moments=given), x, params, jit=True)
    assert large <= 1
    assert share <= 1.05


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_wider_accumulation_keeps_the_input_and_no_wide_copy(dtype: str):
    """float64 statistics of a float32 input: z in float64 would be two activations."""
    spec = nj.layer_norm(precision=nj.Precision(accumulate="float64"))
    with jax.enable_x64(True):
        layer, x, params = start(spec, dtype)
        large, share = kept(layer, x, params, jit=True)
    assert large == 0
    assert share <= 0.05 * 64 / jnp.finfo(dtype).bits  # numbers per group in float64
