"""Flax's own linen layers, computed right.

They are Flax's classes with another ``__call__``: constructor arguments, defaults,
variables, initializers and their metadata are Flax's, a Flax checkpoint loads as it is,
and ``isinstance`` still holds. What differs:

- the variance is the shifted one, in at least float32, whatever ``use_fast_variance``
  and ``force_float32_reductions`` say; the output has the dtype that Flax gives it;
- with ``axis_name`` statistics merge by their counts, so uneven masks and devices
  without a valid entry are right; ``axis_index_groups`` is refused;
- a group without a valid entry gives the bias, and its stored statistics stay, where
  Flax gives NaN; these are kept in at least float32;
- an axis that the input does not have is an error, and so are complex inputs.
"""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.linen.dtypes import canonicalize_dtype
from jax import Array

from normjax import running
from normjax.flax_rules import flax_forward, flax_spec
from normjax.linen import stored
from normjax.stateful import parameter_shape


class BatchNorm(nn.BatchNorm):
    """``flax.linen.BatchNorm``: each feature over all other axes.

    The stored statistics change in every call that uses the batch's own, except the one
    that initializes. A checkpoint without them is an error, and so is a training call
    in which ``batch_stats`` is immutable. Where ``nn.scan`` carries them they must be
    there before the loop, as every carry: let init call the module once outside of it.

    Example:
        >>> import jax, jax.numpy as jnp, normjax as nj
        >>> x = jnp.arange(12.0).reshape(4, 3)
        >>> layer = nj.linen.BatchNorm(use_running_average=False, momentum=0.9)
        >>> variables = layer.init(jax.random.key(0), x)
        >>> y, state = layer.apply(variables, x, mutable=["batch_stats"])
        >>> {name: v.round(3).tolist() for name, v in state["batch_stats"].items()}
        {'mean': [0.45, 0.55, 0.65], 'var': [2.025, 2.025, 2.025]}
    """

    @nn.compact
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
            use_running_average: normalize with the stored statistics; given here or in
                the constructor.
            mask: True where valid, broadcast to x from the right.

        Returns:
            y in x's shape.

        Raises:
            ValueError: as ``nj.linen.Norm``, or if the mask does not broadcast.
        """
        average = nn.merge_param(
            "use_running_average", self.use_running_average, use_running_average
        )
        return _call(self, "BatchNorm", x, mask, average)


class LayerNorm(nn.LayerNorm):
    """``flax.linen.LayerNorm``: each example over ``reduction_axes``.

    Example:
        >>> import jax, jax.numpy as jnp, normjax as nj
        >>> x = jnp.array([[1e4, 1e4 + 1, 1e4 + 2, 1e4 + 3]], jnp.float32)
        >>> layer = nj.linen.LayerNorm()  # flax.linen.LayerNorm() gives ±1500, ±500
        >>> print(layer.apply(layer.init(jax.random.key(0), x), x).round(4))
        [[-1.3416 -0.4472 0.4472 1.3416]]
    """

    @nn.compact
    def __call__(self, x: Array, *, mask: Array | None = None) -> Array:
        """Normalize; the mask is True where valid, broadcast to x from the right."""
        return _call(self, "LayerNorm", x, mask)


class RMSNorm(nn.RMSNorm):
    """``flax.linen.RMSNorm``: each example by the root mean square.

    Example:
        >>> import jax, jax.numpy as jnp, normjax as nj
        >>> x = jnp.array([[3.0, 4.0]])
        >>> y, _ = nj.linen.RMSNorm().init_with_output(jax.random.key(0), x)
        >>> y.ravel().tolist()
        [0.8485, 1.1314]
    """

    @nn.compact
    def __call__(self, x: Array, *, mask: Array | None = None) -> Array:
        """Normalize; the mask is True where valid, broadcast to x from the right."""
        return _call(self, "RMSNorm", x, mask)


class GroupNorm(nn.GroupNorm):
    """``flax.linen.GroupNorm``: groups of consecutive channels with all positions.

    Example:
        >>> import jax, jax.numpy as jnp, normjax as nj
        >>> layer = nj.linen.GroupNorm(num_groups=2)
        >>> variables = layer.init(jax.random.key(0), jnp.ones((8, 5, 6)))
        >>> jax.tree.map(jnp.shape, variables["params"])
        {'bias': (6,), 'scale': (6,)}
    """

    @nn.compact
    def __call__(self, x: Array, *, mask: Array | None = None) -> Array:
        """Normalize; the mask is True where valid, broadcast to x from the right."""
        return _call(self, "GroupNorm", x, mask)


class InstanceNorm(nn.InstanceNorm):
    """``flax.linen.InstanceNorm``: each feature of each example over its positions.

    Example:
        >>> import jax, jax.numpy as jnp, normjax as nj
        >>> x = jnp.array([[[1.0], [3.0]]])
        >>> y, _ = nj.linen.InstanceNorm().init_with_output(jax.random.key(0), x)
        >>> print(y.ravel().round(4))
        [-1. 1.]
    """

    @nn.compact
    def __call__(self, x: Array, *, mask: Array | None = None) -> Array:
        """Normalize; the mask is True where valid, broadcast to x from the right."""
        return _call(self, "InstanceNorm", x, mask)


def _call(
    layer: Any, kind: str, x: Array, mask: Array | None, average: bool = False
) -> Array:
    """Variables as Flax makes them, and the arithmetic of the core."""
    # Outside of the transformation that names the axes.
    alone = {"axis_name": None} if average or layer.is_initializing() else {}
    spec = flax_spec(kind, layer, len(x.shape), **alone)
    shape = parameter_shape(spec, x.shape)
    state, held = None, {}
    if spec.running is not None:
        forced = layer.force_float32_reductions
        fresh = running.init(spec, x.shape, "float32" if forced else layer.param_dtype)
        held = stored.variables(layer, {"mean": fresh.mean, "var": fresh.variance})
        state = running.State(held["mean"].value, held["var"].value, fresh.count)
    params = {
        name: stored.parameter(
            layer, name, getattr(layer, f"{name}_init"), shape, layer.param_dtype
        )
        for name in ("scale", "bias")
        if getattr(layer, f"use_{name}", False)
    }
    output = canonicalize_dtype(x, *params.values(), dtype=layer.dtype)
    own = jnp.result_type(x) if layer.dtype is None else layer.dtype
    with jax.numpy_dtype_promotion("standard"):  # Flax's rule, in strict mode too
        kept = jnp.promote_types(own, jnp.float32).name
    y, new = flax_forward(
        spec, x, params, output, state, kept=kept, mask=mask, stored=average
    )
    if new is not None:
        stored.overwrite(layer, held, [new.mean, new.variance])
    return y
