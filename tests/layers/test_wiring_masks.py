"""Residual layers on sequences of several lengths: padding is not seen."""

from __future__ import annotations

from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from flax_layers import KEY, draw
from small import refuse

import normjax as nj
from normjax.layers.wiring import PLACEMENTS

pytestmark = pytest.mark.jax_defaults

X = draw((3, 6, 4))
LENGTHS = (2, 6, 2)
MASK = jnp.arange(6) < jnp.array(LENGTHS)[:, None]
# What stands where nothing is valid.
PADDINGS = (0.0, -7.0, 1e30, jnp.nan, jnp.inf)


def padded(value: float) -> jax.Array:
    return jnp.where(MASK[..., None], X, value)


class Mixer(nn.Module):
    """Each position sees its neighbors, as a convolution does."""

    @nn.compact
    def __call__(self, x):
        return nn.Conv(x.shape[-1], (3,))(nn.relu(nn.Conv(8, (3,))(x)))


def check_nothing_leaks(function) -> jax.Array:
    """Values and gradients by all that is learned and by x, for every padding.

    Args:
        function: of x; returns y and its new statistics, with gradients of Σ sin(y).
    """
    outputs = [function(padded(value)) for value in PADDINGS]
    for other in outputs[1:]:
        jax.tree.map(np.testing.assert_array_equal, other, outputs[0])
    (y, _), slopes = outputs[0]
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(outputs[0]))
    assert not np.asarray(y)[~np.asarray(MASK)].any()
    assert not np.asarray(slopes[1])[~np.asarray(MASK)].any()
    assert np.asarray(slopes[1])[np.asarray(MASK)].any()
    return y


SPEC, THEIRS, OURS = nj.batch_norm(), nn.BatchNorm, nj.linen.BatchNorm


@pytest.mark.parametrize(
    ("placement", "norm"),
    [*((each, SPEC) for each in PLACEMENTS), ("sandwich", THEIRS), ("post", OURS)],
)
def test_padding_is_not_seen(placement, norm):
    """Statistics over all positions, and a block that mixes neighbors."""
    layer: Any = nj.layers.linen.Residual(Mixer(), norm, placement)
    call = {"mask": MASK, "use_running_average": False}
    variables = layer.init(KEY, X, **call)

    @jax.jit
    @partial(jax.value_and_grad, argnums=(0, 1), has_aux=True)
    def run(params, x):
        held = {**variables, "params": params}
        y, changed = layer.apply(held, x, mutable=["batch_stats"], **call)
        return jnp.sum(jnp.sin(y)), (y, changed)

    def function(x):
        (_, aux), slopes = run(variables["params"], x)
        return aux, slopes

    check_nothing_leaks(function)


def test_the_check_finds_a_leak():
    """The mean over all positions, in a layer that is told of no mask."""
    leaky = nj.layers.linen.Residual(
        lambda v: v.mean(1, keepdims=True) + v, None, "none"
    )

    def function(x):
        y = jnp.where(MASK[..., None], leaky.apply({}, x), 0)
        return (y, {}), (0.0, jnp.where(MASK[..., None], 1.0, 0.0))

    with pytest.raises(AssertionError, match="not equal"):
        check_nothing_leaks(function)


@pytest.mark.parametrize("placement", ["pre", "post", "sandwich"])
def test_a_padded_sequence_is_the_short_sequence(placement):
    """Transformer blocks of linen: the oracle is the sequence without its padding."""
    block: Any = nj.layers.linen.TransformerBlock(
        2, 8, nj.layer_norm(), placement, qk_norm=nj.qk_norm()
    )
    variables = block.init(KEY, X)
    apply = jax.jit(partial(block.apply, variables))
    y = apply(padded(jnp.nan), mask=MASK)
    for row, length in enumerate(LENGTHS):
        alone = apply(X[row : row + 1, :length])[0]
        np.testing.assert_allclose(y[row, :length], alone, rtol=0, atol=64 * 2.0**-24)
        assert not y[row, length:].any()


def test_nnx_does_the_same():
    """N45: values and gradients with NaN under the mask, by a block of nnx."""
    block = nj.layers.nnx.TransformerBlock(
        2, 4, 8, placement="sandwich", qk_norm=nj.qk_norm(), rngs=nnx.Rngs(0)
    )
    graph, params = nnx.split(block)

    @jax.jit
    @partial(jax.value_and_grad, argnums=(0, 1), has_aux=True)
    def run(params, x):
        y = nnx.merge(graph, params)(x, mask=MASK)
        return jnp.sum(jnp.sin(y)), (y, {})

    def function(x):
        (_, aux), slopes = run(params, x)
        return aux, slopes

    y = check_nothing_leaks(function)
    alone = block(X[:1, :2])[0]
    np.testing.assert_allclose(y[0, :2], alone, rtol=0, atol=64 * 2.0**-24)


@pytest.mark.parametrize("framework", ["linen", "nnx"])
def test_causal_attention_does_not_see_later_positions(framework):
    later = X.at[:, 4:].set(0.0)
    if framework == "linen":
        block: Any = nj.layers.linen.TransformerBlock(2, 8, causal=True)
        call = partial(block.apply, block.init(KEY, X))
    else:
        call = nj.layers.nnx.TransformerBlock(2, 4, 8, causal=True, rngs=nnx.Rngs(0))
    y, other = call(X), call(later)
    np.testing.assert_allclose(y[:, :4], other[:, :4], rtol=0, atol=8 * 2.0**-24)
    assert np.abs(np.asarray(y - other)[:, 4:]).max() > 0.1


def test_an_attention_whose_mask_means_pairs():
    """(b, t) broadcasts to (b, heads, t, t) where b is t, and means another thing."""
    text = "mask is one of positions, and the block is Flax's {}, whose mask is one of"
    plain: Any = nn.MultiHeadDotProductAttention(2)
    with refuse(text.format("MultiHeadDotProductAttention")):
        nj.layers.linen.Residual(plain, nj.layer_norm()).init(KEY, X, mask=MASK)
    attend = nnx.MultiHeadAttention(2, 4, decode=False, rngs=nnx.Rngs(0))
    layer = nj.layers.nnx.Residual(attend, nj.layer_norm(), (1, 1, 4))
    with refuse(text.format("MultiHeadAttention")):
        layer(X, mask=MASK)
    assert layer(X).shape == X.shape
