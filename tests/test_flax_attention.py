"""Normalized queries and keys in Flax's own attention layers."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from flax_layers import KEY, draw

import normjax as nj

pytestmark = pytest.mark.jax_defaults

X = draw((2, 5, 8))
SPECS = {
    "each head": (nj.qk_norm(), (4,)),
    "all heads": (nj.qk_norm("h d"), (2, 4)),
    "one number each": (nj.qk_norm(scale="h"), (2,)),
}


def attended(spec: nj.NormSpec, q, k, v, scales) -> np.ndarray:
    """By NumPy in float64."""
    q, k, v = (np.asarray(a, np.float64) for a in (q, k, v))
    axes = (-2, -1) if "[h d]" in spec.pattern else (-1,)
    view = (2, 1) if np.shape(scales[0]) == (2,) else np.shape(scales[0])
    q, k = (
        a / np.sqrt((a**2).mean(axes, keepdims=True) + 1e-5) * np.reshape(s, view)
        for a, s in ((q, scales[0]), (k, scales[1]))
    )
    logits = np.einsum("bqhd,bkhd->bhqk", q, k) / np.sqrt(q.shape[-1])
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    return np.einsum("bhqk,bkhd->bqhd", weights, v)


@pytest.mark.parametrize("name", SPECS)
def test_queries_and_keys_are_normalized_and_values_are_not(name):
    spec, shape = SPECS[name]
    q, k, v = jax.random.normal(KEY, (3, 2, 5, 2, 4))
    layer = nj.linen.QKNormAttention(spec)
    variables: Any = layer.init(KEY, q, k, v)
    params = variables["params"]
    assert params["query_norm"]["scale"].shape == shape
    scales = [1 + jnp.arange(np.prod(shape)).reshape(shape) * s for s in (0.5, 0.25)]
    params = {"query_norm": {"scale": scales[0]}, "key_norm": {"scale": scales[1]}}
    found = layer.apply({"params": params}, q, k, v)
    right = attended(spec, q, k, v, scales)
    # Logits of size up to 20 are rounded before exp.
    np.testing.assert_allclose(found, right, rtol=0, atol=64 * 2.0**-24 * 20)
    twin = nj.nnx.QKNormAttention((2, 4), spec=spec)
    twin.query_norm.scale.set_value(scales[0])
    twin.key_norm.scale.set_value(scales[1])
    np.testing.assert_allclose(twin(q, k, v), right, rtol=0, atol=64 * 2.0**-24 * 20)


def test_linen_attention_takes_it_with_dropout_and_a_mask():
    attend = nj.linen.QKNormAttention()
    layer: Any = nn.MultiHeadDotProductAttention(
        num_heads=2, attention_fn=attend, dropout_rate=0.5
    )
    causal: Any = nn.make_causal_mask(X[..., 0])
    variables = layer.init(KEY, X, mask=causal, deterministic=True)
    assert set(variables["params"]["attention_fn"]) == {"query_norm", "key_norm"}

    @jax.jit
    def apply(variables, x):
        return layer.apply(variables, x, mask=causal, deterministic=True)

    # The mask arrives: what comes later has no effect.
    y, later = apply(variables, X), apply(variables, X.at[:, -1].set(0.0))
    np.testing.assert_array_equal(y[:, :-1], later[:, :-1])
    # So does dropout.
    first, second = (
        layer.apply(variables, X, deterministic=False, rngs={"dropout": key})
        for key in jax.random.split(KEY)
    )
    assert not np.array_equal(first, second)
    # Larger queries and keys change nothing but what epsilon does.
    grown = dict(variables["params"])
    for name in ("query", "key"):
        grown[name] = jax.tree.map(lambda a: 100 * a, grown[name])
    np.testing.assert_allclose(apply({"params": grown}, X), y, rtol=0, atol=1e-4)


def test_nnx_attention_takes_it():
    attend = nj.nnx.QKNormAttention((2, 4))
    layer = nnx.MultiHeadAttention(
        num_heads=2, in_features=8, decode=False, attention_fn=attend, rngs=nnx.Rngs(0)
    )
    gradients = nnx.grad(lambda layer: jnp.sum(layer(X) ** 2))(layer)
    slope = gradients["attention_fn"]["query_norm"]["scale"].get_value()
    assert slope.shape == (4,)
    assert bool((jnp.abs(slope) > 0).all())
