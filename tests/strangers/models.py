"""A ResNet and a transformer encoder as a user of Flax writes them.

They follow Flax's own examples (imagenet, lm1b), small enough for a test. Nothing here
knows of normjax: test_strangers.py runs this text as it is, and once more with
``normjax.linen`` in the line that imports the norms.
"""

from functools import partial
from typing import Any

import jax.numpy as jnp
from flax import linen as nn
from flax.linen import BatchNorm, LayerNorm


class ResNetBlock(nn.Module):
    filters: int
    conv: Any
    norm: Any
    strides: tuple[int, int] = (1, 1)

    @nn.compact
    def __call__(self, x):
        residual = x
        y = self.conv(self.filters, (3, 3), self.strides)(x)
        y = nn.relu(self.norm()(y))
        y = self.conv(self.filters, (3, 3))(y)
        y = self.norm(scale_init=nn.initializers.zeros_init())(y)
        if residual.shape != y.shape:
            residual = self.conv(
                self.filters, (1, 1), self.strides, name="conv_proj"
            )(residual)  # fmt: skip
            residual = self.norm(name="norm_proj")(residual)
        return nn.relu(residual + y)


class ResNet(nn.Module):
    stage_sizes: tuple[int, ...] = (1,)
    num_classes: int = 10
    num_filters: int = 8

    @nn.compact
    def __call__(self, x, train: bool = True):
        conv = partial(nn.Conv, use_bias=False)
        norm = partial(
            BatchNorm, use_running_average=not train, momentum=0.9, epsilon=1e-5
        )
        x = conv(self.num_filters, (3, 3), padding="VALID", name="conv_init")(x)
        x = nn.relu(norm(name="bn_init")(x))
        for i, block_size in enumerate(self.stage_sizes):
            for j in range(block_size):
                x = ResNetBlock(
                    self.num_filters * 2**i,
                    conv=conv,
                    norm=norm,
                    strides=(2, 2) if j == 0 else (1, 1),
                )(x)
        x = jnp.mean(x, axis=(1, 2))
        return nn.Dense(self.num_classes)(x)


class MlpBlock(nn.Module):
    mlp_dim: int

    @nn.compact
    def __call__(self, inputs):
        x = nn.gelu(nn.Dense(self.mlp_dim)(inputs))
        return nn.Dense(inputs.shape[-1])(x)


class Encoder1DBlock(nn.Module):
    num_heads: int
    mlp_dim: int

    @nn.compact
    def __call__(self, inputs, encoder_mask=None):
        x = LayerNorm()(inputs)
        x = nn.MultiHeadDotProductAttention(self.num_heads)(x, mask=encoder_mask)
        x = x + inputs
        y = LayerNorm()(x)
        return x + MlpBlock(self.mlp_dim)(y)


class Transformer(nn.Module):
    num_layers: int = 1
    num_classes: int = 10
    emb_dim: int = 16
    num_heads: int = 2

    @nn.compact
    def __call__(self, x, train: bool = True):
        del train
        valid = jnp.any(x > 0, axis=-1)
        encoder_mask = nn.make_attention_mask(valid, valid)
        x = nn.Dense(self.emb_dim, name="embed")(x)
        shape = (1, *x.shape[1:])
        x = x + self.param("pos_embedding", nn.initializers.normal(0.02), shape)
        for _ in range(self.num_layers):
            x = Encoder1DBlock(self.num_heads, 2 * self.emb_dim)(x, encoder_mask)
        x = LayerNorm(name="encoder_norm")(x)
        x = jnp.mean(x, axis=1, where=valid[..., None])
        return nn.Dense(self.num_classes)(x)
