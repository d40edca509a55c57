"""The pure entry point: ``init``, ``normalize`` and ``moments`` of a declared layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from normjax.layout import Layout
from normjax.spec import NormSpec, check_numbers
from normjax.standardize import Given, Inputs, Numbers, Program, standardize
from normjax.statistics import Moments, Statistics, at_least, deviations

Params = dict[str, Array]


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
    _check_float("init", dtype)
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
        reference: the statistics that ``statistics="blend"`` mixes in.

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
    layout, x, dtype, weights = _checked(spec, x, mask)
    wide = x.reshape(layout.view_shape).astype(dtype)
    _, found = deviations(wide, layout.reduced, weights, spec.precision.algorithm)
    return jax.tree.map(lambda array: array.reshape(layout.mapped_shape), found)


def bind(spec: NormSpec, shape: tuple[int, ...]) -> Layout:
    """Bind a spec's pattern to a shape and check what depends on both.

    Raises:
        ValueError: if the shape does not fit, ``single="error"`` meets groups of one,
            or float64 is asked for where JAX does not have it.
    """
    if not isinstance(shape, Sequence):
        raise ValueError(
            f"shape is a {type(shape).__name__}, expected a tuple, for instance x.shape"
        )
    layout = Layout.bind(spec.parsed, tuple(shape), spec.sizes)
    if spec.single == "error" and layout.group_size == 1:
        raise ValueError(
            f"pattern '{spec.pattern}' on shape {layout.shape} has groups of one "
            "element and the spec says single='error': reduce over more axes, or "
            "use single='zero'"
        )
    for name in ("accumulate", "output"):
        dtype = getattr(spec.precision, name)
        if dtype == "float64" != jax.dtypes.canonicalize_dtype("float64"):
            raise ValueError(
                f"precision.{name} is 'float64', which JAX only has with "
                "jax_enable_x64: jax.config.update('jax_enable_x64', True)"
            )
    return layout


def prepare(
    spec: NormSpec, x: Array, params=None, mask=None, moments=None, reference=None
) -> tuple[Layout, Program, Inputs]:
    """Validate, and turn everything into what the mathematics sees.

    Raises:
        ValueError: as ``normalize``.
    """
    check_numbers(spec)
    layout, x, dtype, weights = _checked(spec, x, mask)
    given = _given(spec, layout, dtype, moments, reference)
    source = "given" if moments is not None else spec.statistics
    leaves = (spec.epsilon, spec.mean_weight, spec.variance_weight)
    epsilon, mean_weight, variance_weight = (
        jnp.asarray(leaf, dtype) for leaf in leaves
    )
    numbers = Numbers(epsilon, mean_weight, variance_weight, given)
    scale, bias = _affine(spec, layout, dtype, params)
    static = jax.tree.map(lambda _: 0.0, spec)
    program = Program(static, layout.view_shape, layout.reduced, source)
    return layout, program, Inputs(x, scale, bias, numbers, weights)


def _checked(spec: NormSpec, x: Array, mask: Array | None):
    """Layout, x as an array, the accumulation dtype, and weights for the view."""
    x = _float("x", x)
    accumulate = at_least(x.dtype, spec.precision.accumulate)
    layout = bind(spec, x.shape)
    weights = _weights(layout, mask, accumulate)
    return layout, x, accumulate, weights


def _float(name: str, value: Any) -> Array:
    """As an array; integers and complex numbers are refused, not cast."""
    # jnp.asarray copies a traced array, and the copy would be kept beside the input.
    array = value if isinstance(value, jax.Array) else jnp.asarray(value)
    _check_float(name, array.dtype)
    return array


def _check_float(name: str, dtype: Any) -> None:
    if not jnp.issubdtype(dtype, jnp.floating):
        raise ValueError(
            f"{name} has dtype {dtype}, expected a float dtype: cast it first, for "
            "instance .astype('float32')"
        )


def _weights(layout: Layout, mask: Array | None, dtype) -> Array | None:
    """The mask as it broadcasts to the view: booleans stay, numbers are weights."""
    if mask is None:
        return None
    mask = jax.lax.stop_gradient(jnp.asarray(mask))
    shape = layout.shape
    padded = mask.shape + (1,) * (len(shape) - mask.ndim)
    fits = len(padded) == len(shape) and all(
        size in (1, full) for size, full in zip(padded, shape, strict=True)
    )
    if not fits:
        raise ValueError(
            f"mask has shape {mask.shape}, x has {shape}: expected full rank with size "
            "1 for broadcasting, or the leading axes of x"
        )
    if jnp.issubdtype(mask.dtype, jnp.complexfloating):
        raise ValueError(f"mask has dtype {mask.dtype}, expected bool or real weights")
    if mask.dtype != jnp.bool_:
        mask = mask.astype(dtype)
    view = [
        1 if padded[owner] == 1 and shape[owner] != 1 else size
        for size, owner in zip(layout.view_shape, layout.owner, strict=True)
    ]
    return mask.reshape(view)


def _given(spec: NormSpec, layout: Layout, dtype, moments, reference) -> Given:
    """Statistics from elsewhere in view form; ``Moments`` are blended here."""
    blends = spec.statistics == "blend" and not isinstance(moments, Statistics)
    if reference is not None and not blends:
        raise ValueError(
            "reference is only used with statistics='blend', and not beside "
            "Statistics, which are used as they are; to normalize with given "
            "statistics pass moments="
        )
    if blends and reference is None:
        raise ValueError(
            "statistics='blend' needs reference=Statistics(mean, variance)"
        )
    if moments is None and reference is None:
        return Given(*[jnp.zeros((), dtype)] * 3)
    if moments is None or reference is None:
        one = ("reference", reference) if moments is None else ("moments", moments)
        return _as_given(spec, layout, dtype, *one)
    first = _as_given(spec, layout, dtype, "moments", moments)
    other = _as_given(spec, layout, dtype, "reference", reference)
    mean_rest, variance_rest = 1 - spec.mean_weight, 1 - spec.variance_weight
    gap = (other.mean - first.mean) + (other.mean_low - first.mean_low)
    return Given(
        first.mean,
        first.mean_low + jnp.asarray(mean_rest, dtype) * gap,
        first.variance
        + jnp.asarray(variance_rest, dtype) * (other.variance - first.variance),
    )


def _as_given(spec: NormSpec, layout: Layout, dtype, given: str, source) -> Given:
    """One record of statistics, reduced axes kept; stored ones lack example axes."""
    example = layout.example_axes(spec.example)
    full = layout.mapped_shape
    stored = tuple(layout.view_shape[i] for i in layout.mapped if i not in example)
    ones = tuple(1 if i in example else layout.view_shape[i] for i in layout.mapped)

    def keep(name: str, array: Array) -> Array:
        array = _float(f"{given}.{name}", array)
        if array.shape not in (full, stored):
            raise ValueError(
                f"{given}.{name} has shape {array.shape}, expected {full}: the mapped "
                f"axes of '{spec.pattern}'"
            )
        if array.shape != full:
            array = jnp.broadcast_to(array.reshape(ones), full)
        return array.reshape(layout.keep_shape).astype(dtype)

    if isinstance(source, Statistics):
        mean = keep("mean", source.mean)
        return Given(mean, jnp.zeros_like(mean), keep("variance", source.variance))
    if isinstance(source, Moments):
        return Given(
            keep("mean", source.mean),
            keep("mean_low", source.mean_low),
            keep("m2", second_moment(spec, source)),
        )
    raise ValueError(
        f"{given} is a {type(source).__name__}, expected Moments (nj.moments) or "
        "Statistics (nj.running.read)"
    )


def second_moment(spec: NormSpec, moments: Moments, ddof: int | None = None) -> Array:
    """What a spec divides by: variance, mean square, or sum of squares.

    Args:
        spec: the layer; ``divide`` decides.
        moments: of the groups.
        ddof: in place of the spec's own.

    Returns:
        An array in the shape of ``moments.m2``.
    """
    ddof = spec.ddof if ddof is None else ddof
    if spec.divide == "rms":
        return moments.mean_square(ddof)
    if spec.divide == "l2":
        return moments.mean_square() * moments.count
    return moments.variance(ddof)


def _affine(spec: NormSpec, layout: Layout, dtype, params: Params | None):
    """Scale and bias as they broadcast to the view; 1 + w in at least float32."""
    if params is None:
        return None, None
    if not isinstance(params, Mapping):
        raise ValueError(
            f"params is a {type(params).__name__}, expected a dict as nj.init gives it"
        )
    affine = spec.affine
    expected = [name for name in ("bias", "scale") if getattr(affine, name, False)]
    if sorted(params) != expected:
        raise ValueError(
            f"params has {sorted(params)}, expected {expected}: the spec says "
            f"affine={affine!r}; nj.init gives them, None leaves them out"
        )
    if affine is None:
        return None, None
    shape, view_shape = layout.parameter(affine.axes)
    values = []
    for name in ("scale", "bias"):
        value = params.get(name)
        if value is not None:
            value = _float(f"params.{name}", value)
            if value.shape != shape:
                raise ValueError(
                    f"params.{name} has shape {value.shape}, expected {shape}: the "
                    f"axes '{affine.axes}' of '{spec.pattern}'"
                )
            value = value.reshape(view_shape).astype(dtype)
            if name == "scale" and affine.stored == "1+w":
                value = 1 + value.astype(at_least(dtype, "float32"))
        values.append(value)
    return tuple(values)
