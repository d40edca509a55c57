"""The rules of Flax's own layers: axes, dtypes, masks and kernels.

What a layer of linen and one of nnx do alike stands here once; nothing below knows of
either.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from normjax.arguments import Params, bind
from normjax.interop.flax import LAYERS
from normjax.pattern import ELLIPSIS
from normjax.presets import weight_standardization
from normjax.running import State
from normjax.spec import NormSpec, Precision
from normjax.stateful import forward
from normjax.statistics import at_least

_AXES = ("axis", "reduction_axes", "feature_axes")


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


def flax_forward(
    spec: NormSpec,
    x: Array,
    params: Params,
    output: Any,
    state: State | None = None,
    *,
    kept: str = "float32",
    mask: Array | None = None,
    stored: bool = False,
) -> tuple[Array, State | None]:
    """``forward`` by Flax's rules for dtypes, masks, and groups of one element.

    Args:
        spec: from ``flax_spec``.
        x: the input; whole numbers and booleans count as float32.
        params: the arrays that there are.
        output: dtype of y; float64 accumulates in float64.
        state: as for ``forward``.
        kept: dtype that the new state has at least.
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
        mask = from_right(mask, shape)
    output = jnp.dtype(output).name
    wide = "float64" if output == "float64" else "float32"
    wide = at_least(wide, spec.precision.accumulate).name
    spec = spec.replace(
        precision=spec.precision.replace(accumulate=wide, output=output)
    )
    if not bind(spec, shape).reduced:
        at = [axis.name for axis in spec.parsed.dimensions].index(ELLIPSIS)
        x = jnp.expand_dims(x, at)
        mask = None if mask is None else jnp.expand_dims(mask, at)
    if state is not None:
        mean, variance = (
            array.astype(at_least(array.dtype, kept))
            for array in (state.mean, state.variance)
        )
        state = State(mean, variance, state.count)
    y, new = forward(spec, x, params, state, mask=mask, stored=stored)
    return y.reshape(shape), new


def kernel_spec(layer: Any, spec: NormSpec | None) -> NormSpec:
    """How the kernel of one of Flax's layers is standardized.

    Args:
        layer: with ``transpose_kernel`` its kernel ends with the input channels.
        spec: in place of what fits the layer.

    Returns:
        A spec.

    Example:
        >>> import flax.linen as nn
        >>> kernel_spec(nn.Dense(3), None).pattern
        '[... i] o'
    """
    if spec is not None:
        return spec
    turned = getattr(layer, "transpose_kernel", False)
    return weight_standardization("... o i" if turned else "... i")


def is_kernel(path: tuple[Any, ...]) -> bool:
    """Whether a path in a tree of parameters is one of a kernel."""
    return any(getattr(entry, "key", entry) == "kernel" for entry in path)


def one_kernel(
    spec: NormSpec, shapes: list[tuple[tuple[Any, ...], tuple[int, ...]]]
) -> tuple[int, ...]:
    """Shape of the first kernel among a layer's parameters.

    Args:
        spec: of the kernel.
        shapes: a path and a shape of each parameter.

    Returns:
        A shape.

    Raises:
        ValueError: if there is none, or several and the spec has an affine part.

    Example:
        >>> import normjax as nj
        >>> shapes = [(("bias",), (3,)), (("kernel",), (4, 3))]
        >>> one_kernel(nj.weight_standardization("i"), shapes)
        (4, 3)
    """
    kernels = [shape for path, shape in shapes if is_kernel(path)]
    if not kernels or (spec.affine is not None and len(kernels) > 1):
        raise ValueError(
            f"the layer has {len(kernels)} parameters named kernel, expected one, or "
            "several and a spec without an affine part"
        )
    return kernels[0]


def _from_end(name: str, axes: Any, ndim: int) -> tuple[int, ...]:
    several = np.ravel(axes).tolist()
    if not all(isinstance(axis, int) for axis in several):
        raise ValueError(f"{name} is {axes!r}, expected whole numbers, for instance -1")
    if not ndim:
        raise ValueError(
            f"the input is one number, and {name} is {axes!r}: it has none"
        )
    if not all(-ndim <= axis < ndim for axis in several):
        raise ValueError(
            f"{name} is {axes!r}, and the input has {ndim} axes: expected numbers from "
            f"{-ndim} to {ndim - 1}"
        )
    return tuple(axis - ndim if axis >= 0 else axis for axis in several)


def from_right(mask: Array, shape: tuple[int, ...]) -> Array:
    """Flax's mask as the core takes one: of full rank.

    Raises:
        ValueError: if it does not broadcast from the right.

    Example:
        >>> from_right([True, False], (4, 2)).shape
        (1, 2)
    """
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
