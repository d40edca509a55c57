"""Flax's own nnx layers, computed right.

They are Flax's classes with another ``__call__``: constructor arguments, defaults,
variables, initializers and their metadata are Flax's, a Flax state loads unchanged, and
``isinstance`` still holds. What ``normjax.linen.drop_in`` says of linen holds here; and
``dtype`` is that of the output alone: Flax's own ``promote_dtype`` rounds input,
parameters and stored statistics to it first. Another ``promote_dtype`` is called as
Flax calls it.
"""

from __future__ import annotations

from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.nnx.nn.dtypes import canonicalize_dtype, promote_dtype
from jax import Array

from normjax.flax_rules import flax_forward, flax_spec
from normjax.nnx.norm import mode
from normjax.running import State, init
from normjax.stateful import check_held, parameter_shape


class BatchNorm(nnx.BatchNorm):
    """``flax.nnx.BatchNorm``: each feature over all other axes.

    The stored statistics change in every call that uses the batch's own.

    Example:
        >>> import jax.numpy as jnp, normjax as nj
        >>> from flax import nnx
        >>> layer = nj.nnx.BatchNorm(3, momentum=0.9, rngs=nnx.Rngs(0))
        >>> y = layer(jnp.arange(12.0).reshape(4, 3))
        >>> layer.mean.get_value().round(3).tolist()
        [0.45, 0.55, 0.65]
    """

    def __call__(
        self,
        x: Array,
        use_running_average: bool | None = None,
        *,
        mask: Array | None = None,
    ) -> Array:
        """Normalize.

        Args:
            x: the input.
            use_running_average: in place of the attribute.
            mask: True where valid, broadcast to x from the right.

        Returns:
            y in x's shape.

        Raises:
            ValueError: if ``use_running_average`` is given nowhere, or something does
                not fit x.
        """
        return _call(self, "BatchNorm", x, mask, mode(self, use_running_average))


class LayerNorm(nnx.LayerNorm):
    """``flax.nnx.LayerNorm``: each example over ``reduction_axes``.

    Example:
        >>> import jax.numpy as jnp, normjax as nj
        >>> from flax import nnx
        >>> x = jnp.array([[1e4, 1e4 + 1, 1e4 + 2, 1e4 + 3]], jnp.float32)
        >>> print(nj.nnx.LayerNorm(4, rngs=nnx.Rngs(0))(x).round(4))
        [[-1.3416 -0.4472 0.4472 1.3416]]
    """

    def __call__(self, x: Array, *, mask: Array | None = None) -> Array:
        """Normalize; the mask is True where valid, broadcast to x from the right."""
        return _call(self, "LayerNorm", x, mask)


class RMSNorm(nnx.RMSNorm):
    """``flax.nnx.RMSNorm``: each example by the root mean square.

    Example:
        >>> import jax.numpy as jnp, normjax as nj
        >>> from flax import nnx
        >>> y = nj.nnx.RMSNorm(2, rngs=nnx.Rngs(0))(jnp.array([[3.0, 4.0]]))
        >>> y.ravel().tolist()
        [0.8485, 1.1314]
    """

    def __call__(self, x: Array, mask: Array | None = None) -> Array:
        """Normalize; the mask is True where valid, broadcast to x from the right."""
        return _call(self, "RMSNorm", x, mask)


class GroupNorm(nnx.GroupNorm):
    """``flax.nnx.GroupNorm``: groups of consecutive channels with all positions.

    ``reduction_axes`` are what linen computes; Flax's nnx repeats the statistics along
    axis 1, and not along the channels.

    Example:
        >>> import jax.numpy as jnp, normjax as nj
        >>> from flax import nnx
        >>> layer = nj.nnx.GroupNorm(6, num_groups=2, rngs=nnx.Rngs(0))
        >>> layer(jnp.ones((8, 5, 6))).shape
        (8, 5, 6)
    """

    def __call__(self, x: Array, *, mask: Array | None = None) -> Array:
        """Normalize; the mask is True where valid, broadcast to x from the right."""
        return _call(self, "GroupNorm", x, mask, group_size=None)


class InstanceNorm(nnx.InstanceNorm):
    """``flax.nnx.InstanceNorm``: each feature of each example over its positions.

    Example:
        >>> import jax.numpy as jnp, normjax as nj
        >>> from flax import nnx
        >>> layer = nj.nnx.InstanceNorm(1, rngs=nnx.Rngs(0))
        >>> print(layer(jnp.array([[[1.0], [3.0]]])).ravel().round(4))
        [-1. 1.]
    """

    def __call__(self, x: Array, *, mask: Array | None = None) -> Array:
        """Normalize; the mask is True where valid, broadcast to x from the right."""
        return _call(self, "InstanceNorm", x, mask)


def _call(
    layer: Any,
    kind: str,
    x: Array,
    mask: Array | None,
    stored: bool = False,
    **changes: Any,
) -> Array:
    """Variables as Flax holds them, and the arithmetic of the core."""
    if stored:
        changes["axis_name"] = None
    spec = flax_spec(kind, layer, len(x.shape), **changes)
    learned = ("scale",) if kind == "RMSNorm" else ("scale", "bias")
    kept = () if spec.running is None else ("mean", "var")
    variables = [getattr(layer, name) for name in (*kept, *learned)]
    held = [None if each is None else each.get_value() for each in variables]
    given = held
    if layer.promote_dtype is promote_dtype:
        output = canonicalize_dtype(x, *held, dtype=layer.dtype)
    else:
        x, *given = layer.promote_dtype((x, *held), dtype=layer.dtype)
        output = canonicalize_dtype(x, *given[len(kept) :], dtype=layer.dtype)
    state = None
    if kept:
        mean, variance = map(jnp.asarray, (given if stored else held)[:2])
        needed = init(spec, x.shape).mean.shape
        check_held(type(layer).__name__, "mean", mean.shape, needed)
        state = State(mean, variance, jnp.zeros(mean.shape, jnp.int32))
    shape = parameter_shape(spec, x.shape)
    for name, value in zip(learned, held[len(kept) :], strict=True):
        if value is not None and value.size != prod(shape):
            check_held(type(layer).__name__, name, value.shape, shape)
    params = {
        name: value.reshape(shape) if value.size == prod(shape) else value
        for name, value in zip(learned, given[len(kept) :], strict=True)
        if value is not None
    }
    # nnx writes into its variables, which keep their dtype.
    y, new = flax_forward(spec, x, params, output, state, mask=mask, stored=stored)
    if new is not None:
        new = jax.lax.stop_gradient(new)
        layer.mean.set_value(new.mean)
        layer.var.set_value(new.variance)
    return y
