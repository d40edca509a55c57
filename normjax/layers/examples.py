"""Small residual models to copy and change: each is its formula, line by line."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax.numpy as jnp
from jax import Array

from normjax.layers.linen import Residual, TransformerBlock
from normjax.linen import Norm
from normjax.presets import batch_norm, layer_norm
from normjax.spec import NormSpec


class ResidualMLP(nn.Module):
    """Perceptrons with residual connections.

    Attributes:
        features: of the output.
        width: of every hidden layer.
        depth: how many residual blocks.
        norm: of every block, and before the head.
        placement: as in ``Residual``.

    Example:
        >>> import jax, jax.numpy as jnp, normjax as nj
        >>> model = nj.layers.examples.ResidualMLP(features=3, norm=nj.rms_norm())
        >>> model.init_with_output(jax.random.key(0), jnp.ones((8, 5)))[0].shape
        (8, 3)
    """

    features: int
    width: int = 32
    depth: int = 3
    norm: NormSpec = layer_norm()
    placement: str = "pre"

    @nn.compact
    def __call__(self, x: Array, use_running_average: bool | None = None) -> Array:
        """Map (..., inputs) to (..., features)."""
        mode: Any = {"use_running_average": use_running_average}

        def block(value: Array) -> Array:
            return nn.Dense(self.width)(nn.relu(nn.Dense(self.width)(value)))

        x = nn.Dense(self.width)(x)
        for _ in range(self.depth):
            x = Residual(block, self.norm, self.placement)(x, **mode)
        return nn.Dense(self.features)(Norm(self.norm)(x, **mode))


class ResidualCNN(nn.Module):
    """Convolutions with residual connections, at half the resolution in each stage.

    Attributes:
        features: of the output.
        widths: channels of each stage.
        depth: how many residual blocks in each stage.
        norm: of every block, and before the head.
        placement: as in ``Residual``.

    Example:
        >>> import jax, jax.numpy as jnp, normjax as nj
        >>> model = nj.layers.examples.ResidualCNN(features=10, widths=(4, 8))
        >>> images, mode = jnp.ones((2, 8, 8, 1)), {"use_running_average": False}
        >>> init = jax.jit(lambda key: model.init(key, images, **mode))
        >>> sorted(jax.eval_shape(init, jax.random.key(0))["batch_stats"])
        ['Norm_0', 'Residual_0', 'Residual_1']
    """

    features: int
    widths: tuple[int, ...] = (16, 32)
    depth: int = 1
    norm: NormSpec = batch_norm()
    placement: str = "pre"

    @nn.compact
    def __call__(self, x: Array, use_running_average: bool | None = None) -> Array:
        """Map (examples, height, width, channels) to (examples, features)."""
        mode: Any = {"use_running_average": use_running_average}

        def block(value: Array) -> Array:
            width = value.shape[-1]
            value = nn.relu(nn.Conv(width, (3, 3))(value))
            return nn.Conv(width, (3, 3))(value)

        for width in self.widths:
            x = nn.Conv(width, (3, 3), strides=2)(x)
            for _ in range(self.depth):
                x = Residual(block, self.norm, self.placement)(x, **mode)
        x = nn.relu(Norm(self.norm)(x, **mode))
        return nn.Dense(self.features)(jnp.mean(x, axis=(1, 2)))


class Encoder(nn.Module):
    """A transformer encoder of sequences of several lengths; pools what is valid.

    Attributes:
        features: of the output.
        width: of every position.
        depth: how many blocks.
        num_heads: of each attention.
        norm: of every block, and before the head.
        placement: as in ``Residual``.
        qk_norm: as in ``TransformerBlock``.

    Example:
        >>> import jax, jax.numpy as jnp, normjax as nj
        >>> model = nj.layers.examples.Encoder(features=3, qk_norm=nj.qk_norm())
        >>> x, mask = jnp.ones((2, 5, 4)), jnp.arange(5) < jnp.array([[2], [5]])
        >>> jax.eval_shape(model.init_with_output, jax.random.key(0), x, mask)[0].shape
        (2, 3)
    """

    features: int
    width: int = 32
    depth: int = 2
    num_heads: int = 2
    norm: NormSpec = layer_norm()
    placement: str = "pre"
    qk_norm: NormSpec | None = None

    @nn.compact
    def __call__(self, x: Array, mask: Array) -> Array:
        """Map (examples, positions, inputs) and a mask to (examples, features)."""
        valid = mask[..., None]
        x = nn.Dense(self.width)(jnp.where(valid, x, 0))
        place = nn.initializers.normal(0.02)
        x = x + self.param("positions", place, x.shape[-2:])
        for _ in range(self.depth):
            x = TransformerBlock(
                self.num_heads,
                4 * self.width,
                self.norm,
                self.placement,
                self.qk_norm,
            )(x, mask=mask)
        x = Norm(self.norm)(x, mask=mask)
        return nn.Dense(self.features)(jnp.mean(x, axis=-2, where=valid))
