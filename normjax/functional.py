"""The pure entry point: ``init``, ``normalize`` and ``moments`` of a declared layer."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from normjax.arguments import Params, bind, check_float, check_taken, checked, prepare
from normjax.records import check_count, check_number
from normjax.spec import NormSpec, check_numbers
from normjax.standardize import standardize
from normjax.statistics import (
    Moments,
    Statistics,
    at_least,
    deviations,
    gathered,
    merge,
)


def init(spec: NormSpec, shape: tuple[int, ...], dtype: Any = jnp.float32) -> Params:
    """Parameters of the affine part at the identity.

    Args:
        spec: the layer.
        shape: shape of the input.
        dtype: dtype of the parameters.

    Returns:
        ``{"scale": ..., "bias": ...}``, each over the axes that ``affine`` names; the
        scale is 1 (0 where it is stored as ``"1+w"``), the bias 0. Parts that the spec
        does not have are left out.

    Raises:
        ValueError: if the pattern does not fit the shape, or a number of the spec is
            none.

    Example:
        >>> import normjax as nj
        >>> params = nj.init(nj.group_norm(groups=2), (8, 5, 6))
        >>> {name: value.shape for name, value in params.items()}
        {'scale': (6,), 'bias': (6,)}
    """
    check_numbers(spec)
    check_float("init", dtype)
    layout = bind(spec, shape)
    if spec.affine is None:
        return {}
    params: Params = {}
    stored = layout.parameter(spec.affine.axes).shape
    if spec.affine.scale:
        value = 0.0 if spec.affine.stored == "1+w" else 1.0
        params["scale"] = jnp.full(stored, value, dtype)
    if spec.affine.bias:
        params["bias"] = jnp.zeros(stored, dtype)
    return params


def normalize(
    spec: NormSpec,
    x: Array,
    params: Params | None = None,
    *,
    mask: Array | None = None,
    moments: Moments | Statistics | None = None,
    reference: Statistics | None = None,
) -> Array:
    """Apply a normalization layer: y = scale · (x − m)/S(σ²) + bias.

    Args:
        spec: the layer.
        x: the input, any float dtype; its shape must fit the pattern.
        params: from ``init``; None leaves the affine part out.
        mask: True (1) where valid, or weights, of full rank with size 1 for
            broadcasting, or of lower rank, matching the leading axes. It carries no
            gradient.
        moments: use these and not those of x: ``Moments`` (ddof applies) or
            ``Statistics`` (as they are). Gradients flow through them.
        reference: the stored statistics that ``statistics="blend"`` mixes in, and that
            ``"renorm"`` corrects towards.

    Returns:
        y in x's shape, and in x's dtype unless the spec says otherwise.

    Raises:
        ValueError: on a shape, dtype, mask or parameter that does not fit; never
            because of values.

    Example:
        >>> import jax.numpy as jnp, normjax as nj
        >>> x = jnp.array([1e4, 1e4 + 1, 1e4 + 2, 1e4 + 3], jnp.float32)
        >>> print(nj.normalize(nj.layer_norm(), x).round(4))
        [-1.3416 -0.4472  0.4472  1.3416]
    """
    layout, program, inputs = prepare(spec, x, params, mask, moments, reference)
    y = standardize(program, inputs)
    if inputs.weights is None or spec.masked_output == "keep":
        return y

    def declared(weights: Array, y: Array, x: Array) -> Array:
        valid = jnp.broadcast_to(weights.astype(jnp.bool_), layout.view_shape)
        other = jnp.zeros_like(y) if spec.masked_output == "zero" else x.astype(y.dtype)
        return jnp.where(valid.reshape(y.shape), y, other)

    # Recomputed on the way back, or the broadcast mask would be kept.
    return jax.checkpoint(declared, prevent_cse=False)(inputs.weights, y, inputs.x)


def moments(spec: NormSpec, x: Array, mask: Array | None = None) -> Moments:
    """Count, mean (as a pair) and sum of squared deviations of every group.

    Args:
        spec: the layer; its pattern, accumulation dtype and algorithm are used.
        x: the input.
        mask: as for ``normalize``.

    Returns:
        Moments in the shape of the mapped axes. ``normalize(x, moments=moments(x))`` is
        ``normalize(x)`` to rounding, also after ``merge``.

    Raises:
        ValueError: as ``normalize``.

    Example:
        >>> import jax.numpy as jnp, normjax as nj
        >>> m = nj.moments(nj.batch_norm(), jnp.array([[0.0, 1.0], [2.0, 5.0]]))
        >>> m.mean.tolist(), m.variance().tolist(), m.variance(ddof=1).tolist()
        ([1.0, 3.0], [1.0, 4.0], [2.0, 8.0])
    """
    layout, x, dtype, weights = checked(spec, x, mask)
    check_taken(spec, layout)
    wide = x.reshape(layout.view_shape).astype(dtype)
    _, found = deviations(wide, layout.reduced, weights, spec.precision.algorithm)
    if spec.axis_names:
        parts = gathered(spec.axis_names, jax.tree.leaves(found))
        found = merge(Moments(*parts))
    return jax.tree.map(lambda array: array.reshape(layout.mapped_shape), found)


def dynamic_tanh(x: Array, params: Params) -> Array:
    """The comparator without statistics: y = scale · tanh(alpha · x) + bias.

    Args:
        x: the input, any float dtype; it is computed in at least float32.
        params: from ``init_dynamic_tanh``: ``{"alpha": (), "scale": (C,),
            "bias": (C,)}`` with C the size of x's last axis.

    Returns:
        y in x's shape and dtype. The Jacobian is diagonal: nothing is coupled.

    Raises:
        ValueError: on a dtype or parameter that does not fit.

    Example:
        >>> import jax.numpy as jnp, normjax as nj
        >>> x = jnp.array([-100.0, 0.0, 1.0])
        >>> print(nj.dynamic_tanh(x, nj.init_dynamic_tanh(3)).round(4))
        [-1. 0. 0.4621]

    Reference: Zhu, Chen, He, LeCun, Liu, "Transformers without Normalization" (2025),
    arXiv:2503.10622.
    """
    x = x if isinstance(x, jax.Array) else jnp.asarray(x)
    check_float("x", x.dtype)
    shapes = {"alpha": (), "bias": x.shape[-1:], "scale": x.shape[-1:]}
    got = params
    if isinstance(params, Mapping):
        got = {name: jnp.shape(value) for name, value in params.items()}
    if got != shapes:
        raise ValueError(
            f"params is {got}, expected a dict with arrays of shape {shapes}, as "
            "nj.init_dynamic_tanh gives it"
        )
    dtype = at_least(x.dtype, "float32")
    wide = {name: jnp.asarray(value).astype(dtype) for name, value in params.items()}
    row = (1,) * (x.ndim - 1) + (-1,)
    scale, bias = (wide[name].reshape(row) for name in ("scale", "bias"))
    return (scale * jnp.tanh(wide["alpha"] * x.astype(dtype)) + bias).astype(x.dtype)


def init_dynamic_tanh(
    features: int, alpha: float = 0.5, dtype: Any = jnp.float32
) -> Params:
    """Parameters of ``dynamic_tanh``: the given alpha, scale 1 and bias 0.

    Args:
        features: the size of the input's last axis.
        alpha: the slope at zero before training.
        dtype: dtype of the parameters.

    Returns:
        ``{"alpha": (), "scale": (features,), "bias": (features,)}``.

    Raises:
        ValueError: if features is no whole number, or alpha no finite number.

    Example:
        >>> {name: value.shape for name, value in init_dynamic_tanh(6).items()}
        {'alpha': (), 'scale': (6,), 'bias': (6,)}
    """
    check_count("features", features)
    check_number("alpha", alpha, least=-math.inf)
    check_float("init_dynamic_tanh", dtype)
    ones = jnp.ones((features,), dtype)
    return {"alpha": jnp.asarray(alpha, dtype), "scale": ones, "bias": 0 * ones}
