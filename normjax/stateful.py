"""What the linen and nnx layers share: one call of a layer, and Flax's own rules.

The layers hold arrays and hand them in here; nothing below knows of linen or nnx.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from normjax import functional, running
from normjax.arguments import Params, bind
from normjax.interop.flax import LAYERS
from normjax.pattern import ELLIPSIS
from normjax.spec import NormSpec, Precision
from normjax.statistics import Statistics

_AXES = ("axis", "reduction_axes", "feature_axes")


def forward(
    spec: NormSpec,
    x: Array,
    params: Params | None,
    state: running.State | None = None,
    *,
    mask: Array | None = None,
    stored: bool = False,
    update: bool | None = None,
    reference: Statistics | None = None,
) -> tuple[Array, running.State | None]:
    """One call of a layer: normalize, and take the batch in at most once.

    Args:
        spec: the layer.
        x: the input.
        params: as for ``nj.normalize``.
        state: of the stored statistics, if the spec stores any.
        mask: as for ``nj.normalize``.
        stored: normalize with the stored statistics.
        update: whether they take this batch in, after they were used; None: unless they
            are what it is normalized with.
        reference: as for ``nj.normalize``; None: the stored statistics, where the spec
            blends or renormalizes.

    Returns:
        y, and the new state, None where it stays as it is.

    Raises:
        ValueError: if an update is asked of a spec that stores nothing.

    Example:
        >>> import jax.numpy as jnp, normjax as nj
        >>> spec, x = nj.batch_norm(), jnp.arange(12.0).reshape(4, 3)
        >>> y, state = forward(spec, x, None, nj.running.init(spec, x.shape))
        >>> state.count.tolist()
        [1, 1, 1]
    """
    if spec.running is None or state is None:
        if update:
            raise ValueError(
                f"update=True, but {spec!r} stores no statistics: give it "
                "running=Running(...)"
            )
        y = functional.normalize(spec, x, params, mask=mask, reference=reference)
        return y, None
    new = None
    if not stored if update is None else update:
        new = running.update(spec, state, functional.moments(spec, x, mask))
    given = running.statistics(spec, state, stored, reference)
    return functional.normalize(spec, x, params, mask=mask, **given), new


def flax_spec(kind: str, layer: Any, ndim: int, **changes: Any) -> NormSpec:
    """The spec of one of Flax's layers, computed right, for inputs of ``ndim`` axes.

    Args:
        kind: for instance ``"LayerNorm"``.
        layer: has the arguments of its constructor as attributes.
        ndim: of the input.
        changes: in place of such attributes.

    Returns:
        The spec of ``nj.interop.convention`` with the default ``Precision``. A position
        from the front is counted from the end: both ends may name one axis.

    Raises:
        ValueError: on an axis that the input does not have, ``axis_index_groups``, or
            what the convention refuses.

    Example:
        >>> import flax.linen as nn
        >>> flax_spec("LayerNorm", nn.LayerNorm(reduction_axes=(1, 2)), 3).pattern
        '... [w c]'
    """
    known = LAYERS[f"flax.linen.{kind}"]
    values = {name: getattr(layer, name) for name in known.arguments} | changes
    if values["axis_name"] is not None and layer.axis_index_groups is not None:
        raise ValueError(
            f"axis_index_groups is {layer.axis_index_groups!r}, expected None: "
            "statistics are merged over the whole of axis_name. Split the mesh axis in "
            "two and give the inner one as axis_name"
        )
    for name in _AXES:
        if values.get(name) is not None:
            values[name] = _from_end(name, values[name], ndim)
    if kind == "InstanceNorm" and -ndim in values["feature_axes"]:
        raise ValueError(
            "feature_axes has the leading axis, which holds the examples of an "
            "InstanceNorm: name others"
        )
    spec = known.build(**{**values, "dtype": None})
    # The stored statistics are those of all kept axes, also where one is the first.
    return spec.replace(example=None, precision=Precision())


def parameter_shape(spec: NormSpec, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Shape of scale and bias; () where the spec has neither.

    Example:
        >>> import normjax as nj
        >>> parameter_shape(nj.group_norm(groups=2), (8, 5, 6))
        (6,)
    """
    if spec.affine is None:
        return ()
    return bind(spec, shape).parameter(spec.affine.axes).shape


def flax_forward(
    spec: NormSpec,
    x: Array,
    params: Params,
    output: Any,
    state: running.State | None = None,
    *,
    mask: Array | None = None,
    stored: bool = False,
) -> tuple[Array, running.State | None]:
    """``forward`` by Flax's rules for dtypes, masks, and groups of one element.

    Args:
        spec: from ``flax_spec``.
        x: the input; whole numbers and booleans count as float32.
        params: the arrays that there are.
        output: dtype of y; float64 accumulates in float64.
        state: as for ``forward``.
        mask: boolean, broadcast to x from the right, as NumPy does.
        stored: as for ``forward``.

    Returns:
        As ``forward``. Where the spec reduces no axis of x, x is its own mean.

    Raises:
        ValueError: as ``nj.normalize``, or if the mask does not broadcast.

    Example:
        >>> import flax.linen as nn, jax.numpy as jnp
        >>> bare = nn.LayerNorm(use_scale=False, use_bias=False)
        >>> spec = flax_spec("LayerNorm", bare, 1)
        >>> y, _ = flax_forward(spec, jnp.arange(4), {}, jnp.bfloat16)
        >>> y.dtype.name
        'bfloat16'
    """
    x = x if isinstance(x, jax.Array) else jnp.asarray(x)
    shape = x.shape
    if not jnp.issubdtype(x.dtype, jnp.inexact):
        x = x.astype(jnp.float32)
    if mask is not None:
        mask = _from_right(mask, shape)
    output = jnp.dtype(output).name
    wide = "float64" if output == "float64" else "float32"
    spec = spec.replace(precision=Precision(accumulate=wide, output=output))
    if not bind(spec, shape).reduced:
        at = [axis.name for axis in spec.parsed.dimensions].index(ELLIPSIS)
        x = jnp.expand_dims(x, at)
        mask = None if mask is None else jnp.expand_dims(mask, at)
    y, new = forward(spec, x, params, state, mask=mask, stored=stored)
    return y.reshape(shape), new


def _from_end(name: str, axes: Any, ndim: int) -> tuple[int, ...]:
    several = np.ravel(axes).tolist()
    if not all(-ndim <= axis < ndim for axis in several):
        raise ValueError(
            f"{name} is {axes!r}, and the input has {ndim} axes: expected numbers from "
            f"{-ndim} to {ndim - 1}"
        )
    return tuple(axis - ndim if axis >= 0 else axis for axis in several)


def _from_right(mask: Array, shape: tuple[int, ...]) -> Array:
    mask = jnp.asarray(mask, bool)
    try:
        fits = np.broadcast_shapes(mask.shape, shape) == shape
    except ValueError:
        fits = False
    if not fits:
        raise ValueError(
            f"mask has shape {mask.shape}, x has {shape}: expected one that broadcasts "
            "to it from the right, for instance mask[..., None] without channels"
        )
    return mask.reshape((1,) * (len(shape) - mask.ndim) + mask.shape)
