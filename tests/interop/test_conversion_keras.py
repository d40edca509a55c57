"""A Keras model in Flax: the same output from the same bits, and back."""

from __future__ import annotations

import os
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import normjax as nj
from normjax.interop import from_keras, to_keras

pytestmark = pytest.mark.jax_defaults


@pytest.fixture(scope="module")
def keras() -> Any:
    """Keras, if this process has it on JAX."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(os.environ, "KERAS_BACKEND", "jax")
        keras = pytest.importorskip("keras", reason="Keras is not installed")
    if keras.backend.backend() != "jax":
        pytest.skip(f"this process has Keras on {keras.backend.backend()}, not on JAX")
    return keras


class Model(nn.Module):
    """Keras's layers by Flax's; the transposed kernel is square."""

    @nn.compact
    def __call__(self, x: jax.Array, words: jax.Array) -> jax.Array:
        x = nn.Conv(4, (3, 3), padding="VALID")(x)
        x = nj.linen.BatchNorm(True, epsilon=1e-3)(x)
        x = nn.Conv(8, (2, 2), padding="VALID", feature_group_count=4)(x)
        x = nn.ConvTranspose(8, (2, 3), (2, 2), padding="VALID", name="up")(x)
        x = x.reshape(len(x), 4, -1) + nn.Embed(7, 144)(words)
        x = nj.linen.LayerNorm(epsilon=1e-3)(x)
        x = nn.MultiHeadDotProductAttention(2, qkv_features=4)(x)
        x = nj.linen.RMSNorm()(x)
        return nn.Dense(3)(nj.linen.GroupNorm(num_groups=4, epsilon=1e-3)(x))


NAMES = {
    "Conv_0": "conv2d",
    "BatchNorm_0": "batch_normalization",
    "Conv_1": "depthwise_conv2d",
    "up": "up",
    "Embed_0": "embedding",
    "LayerNorm_0": "layer_normalization",
    "MultiHeadDotProductAttention_0": "multi_head_attention",
    "RMSNorm_0": "rms_normalization",
    "GroupNorm_0": "group_normalization",
    "Dense_0": "dense",
}


def theirs(keras: Any) -> Any:
    keras.backend.clear_session()
    layers = keras.layers
    zeros = {"kernel_initializer": "zeros"}  # random ones compile for every shape
    image, words = keras.Input((7, 7, 3)), keras.Input((4,), dtype="int32")
    x = layers.BatchNormalization()(layers.Conv2D(4, 3, **zeros)(image))
    depthwise: Any = {"depth_multiplier": 2, "depthwise_initializer": "zeros"}
    x = layers.DepthwiseConv2D(2, **depthwise)(x)
    x = layers.Conv2DTranspose(8, (2, 3), 2, name="up", **zeros)(x)
    x = layers.Reshape((4, -1))(x)
    embed = layers.Embedding(7, x.shape[-1], embeddings_initializer="zeros")
    x = layers.LayerNormalization()(layers.Add()([x, embed(words)]))
    x = layers.MultiHeadAttention(2, 2, **zeros)(x, x)
    x = layers.GroupNormalization(4)(layers.RMSNormalization()(x))
    model = keras.Model([image, words], layers.Dense(3, **zeros)(x))
    random = np.random.default_rng(0)
    for weight in model.weights:
        value = random.normal(0.2, 0.2, weight.shape)
        positive = "variance" in weight.path
        weight.assign(np.abs(value) + 0.5 if positive else value)
    return model


def test_a_model_there_and_back(keras: Any):
    model = theirs(keras)
    x = np.random.default_rng(1).normal(size=(2, 7, 7, 3)).astype(np.float32)
    words = np.array([[0, 1, 2, 3], [6, 5, 4, 3]], np.int32)
    shapes = jax.eval_shape(Model().init, jax.random.key(0), x, words)
    # The model knows that it is transposed, and Flax has two such kernels.
    with pytest.raises(ValueError, match=r"up .* fit conv_transpose, conv_transpose_k"):
        from_keras(model, shapes, names=NAMES)
    said: Any = {"names": NAMES, "kinds": {"up": "conv_transpose"}}
    variables = from_keras(model, shapes, **said)
    assert jax.tree.structure(variables) == jax.tree.structure(shapes)
    expected = np.asarray(jax.jit(lambda *inputs: model([*inputs]))(x, words))
    got: Any = jax.jit(Model().apply)(variables, jnp.asarray(x), jnp.asarray(words))
    # 64 u times the fan-in of 144, of ten layers.
    size = np.abs(expected).max()
    np.testing.assert_allclose(got, expected, rtol=0, atol=64 * 2.0**-24 * 144 * size)
    # From arrays alone only names that Keras gives say what a kernel is.
    arrays = {weight.path: np.asarray(weight.value) for weight in model.weights}
    with pytest.raises(ValueError, match=r"up .* fit dense, conv, conv_transpose"):
        from_keras(arrays, shapes, names=NAMES)
    again = from_keras(arrays, shapes, **said)
    jax.tree.map(np.testing.assert_array_equal, again, variables)
    other = {name: np.zeros_like(value) for name, value in arrays.items()}
    back = to_keras(variables, other, **said)
    assert set(back) == set(arrays)
    for name, value in back.items():
        np.testing.assert_array_equal(value, arrays[name], strict=True)
    with pytest.raises(ValueError, match="left over: dense/kernel, dense/bias"):
        from_keras(arrays, {"params": {}}, ignore=["[!d]*", "depthwise*"])
