"""What a caller gives, checked and brought to the group view of its pattern."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from normjax.layout import Layout
from normjax.program import Given, Inputs, Numbers, Program, apart, root
from normjax.spec import LEAVES, NormSpec, check_numbers
from normjax.statistics import Moments, Statistics, at_least, select

Params = dict[str, Array]


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
    if spec.single == "error" and layout.reduced and layout.group_size == 1:
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
    layout, x, dtype, weights = checked(spec, x, mask)
    given, other = _elsewhere(spec, layout, dtype, moments, reference)
    blends = spec.statistics == "blend"
    source = "given" if moments is not None else "blend" if blends else "input"
    renorm = spec.statistics == "renorm" and not isinstance(moments, Statistics)
    leaves = {name: jnp.asarray(getattr(spec, name), dtype) for name in LEAVES}
    one = jnp.ones((), dtype)
    numbers = Numbers(**leaves, unit=one, least=one, given=given, reference=other)
    if source != "given":
        check_taken(spec, layout)
    scale, bias = _affine(spec, layout, dtype, params)
    static = jax.tree.map(lambda _: 0.0, spec)
    program = Program(static, layout.view_shape, layout.reduced, source, renorm)
    inputs = Inputs(x, scale, bias, numbers, weights)
    if spec.precision.rescale and program.own:
        inputs = inputs._replace(numbers=_rescaled(program, inputs))
    return layout, program, inputs


def _rescaled(program: Program, inputs: Inputs) -> Numbers:
    """All numbers in units of a power of two, of the largest one of each group.

    It is exact, and carries no gradient: x̂ does not depend on it. Where the dtype has
    room, the largest number becomes 2^((exponents − 32)/3) and not 1: its square and
    the sum of 2³⁰ such squares are finite, and a small ε keeps its square.
    """
    numbers, placement = inputs.numbers, program.spec.epsilon_placement
    wide = select(inputs.weights, program.widen(inputs.x, numbers))
    squared = placement in ("inside_sqrt", "floor_var")
    stabilizer = root(numbers.epsilon) if squared else numbers.epsilon
    other = numbers.reference
    largest = jnp.max(jnp.abs(wide), program.axes, keepdims=True, initial=0)
    for number in (stabilizer, jnp.abs(other.mean), root(other.variance)):
        largest = jnp.maximum(largest, number)
    largest = jax.lax.stop_gradient(largest)
    if program.spec.axis_names:
        largest = jax.lax.pmax(largest, program.spec.axis_names)
    _, exponent = jnp.frexp(jnp.where(jnp.isfinite(largest), largest, 1))
    exponents = jnp.finfo(largest.dtype).maxexp
    most, room = exponents - 2, max(0, (exponents - 32) // 3)
    power = jnp.clip(room - exponent, -most, most)
    unit = jnp.ldexp(jnp.ones_like(largest), power)
    return numbers._replace(
        epsilon=numbers.epsilon * unit * (unit if squared else 1),
        least=stabilizer * unit,
        unit=unit,
        reference=Given(
            other.mean * unit, other.mean_low * unit, other.variance * unit * unit
        ),
    )


def check_taken(spec: NormSpec, layout: Layout) -> None:
    """Refuse to take statistics of nothing, or across axes that are not bound here.

    Raises:
        ValueError: if the pattern reduces no axis of the shape, or with the axis name.
    """
    if not layout.reduced:
        raise ValueError(
            f"pattern '{spec.pattern}' reduces no axis of shape {layout.shape}: put "
            "brackets around an axis that the tensor has, or pass moments="
        )
    for name in spec.axis_names:
        try:
            jax.lax.axis_size(name)
        except NameError:
            raise ValueError(
                f"axis_names has {name!r}, which is not bound here: call this inside "
                f"jax.shard_map or jax.vmap(..., axis_name={name!r}), pass moments=, "
                "or use axis_names=() for one device"
            ) from None


def checked(spec: NormSpec, x: Array, mask: Array | None):
    """Layout, x as an array, the accumulation dtype, and weights for the view.

    Raises:
        ValueError: as ``normalize``.
    """
    x = _float("x", x)
    accumulate = at_least(x.dtype, spec.precision.accumulate)
    layout = bind(spec, x.shape)
    weights = _weights(layout, mask, accumulate)
    return layout, x, accumulate, weights


def _float(name: str, value: Any) -> Array:
    """As an array; integers and complex numbers are refused, not cast."""
    # jnp.asarray copies a traced array, and the copy would be kept beside the input.
    array = value if isinstance(value, jax.Array) else jnp.asarray(value)
    check_float(name, array.dtype)
    return array


def check_float(name: str, dtype: Any) -> None:
    """Refuse a dtype that is no real float.

    Raises:
        ValueError: with the name and the dtype.
    """
    if not jnp.issubdtype(dtype, jnp.floating):
        raise ValueError(
            f"{name} has dtype {dtype}, expected a float dtype: cast it first, for "
            "instance .astype('float32')"
        )


def _weights(layout: Layout, mask: Array | None, dtype) -> Array | None:
    """The mask as it broadcasts to the view: booleans stay, numbers are weights."""
    if mask is None:
        return None
    shape = layout.shape
    mask = full_rank(mask, shape)
    if mask.dtype != jnp.bool_:
        mask = mask.astype(dtype)
    view = [
        1 if mask.shape[owner] == 1 and shape[owner] != 1 else size
        for size, owner in zip(layout.view_shape, layout.owner, strict=True)
    ]
    return mask.reshape(view)


def full_rank(mask: Array, shape: tuple[int, ...]) -> Array:
    """A mask or weights with an axis for each of x's, without a derivative.

    Args:
        mask: boolean or real; the leading axes of x, or all with size 1 to broadcast.
        shape: of x.

    Returns:
        Of ``len(shape)`` axes.

    Raises:
        ValueError: if the mask does not fit, or is complex.

    Example:
        >>> import jax.numpy as jnp
        >>> full_rank(jnp.array([[True, False]]), (1, 2, 3)).shape
        (1, 2, 1)
    """
    mask = jax.lax.stop_gradient(jnp.asarray(mask))
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
    return mask.reshape(padded)


def _elsewhere(
    spec: NormSpec, layout: Layout, dtype, moments, reference
) -> tuple[Given, Given]:
    """Given and reference statistics in view form; given ``Moments`` are blended."""
    kind = spec.statistics
    needed = kind != "input" and not isinstance(moments, Statistics)
    if reference is not None and not needed:
        raise ValueError(
            "reference is only used with statistics='blend' or 'renorm', and not "
            "beside Statistics, which are used as they are; to normalize with given "
            "statistics pass moments="
        )
    if needed and reference is None:
        raise ValueError(
            f"statistics={kind!r} needs reference=Statistics(mean, variance)"
        )
    given = other = Given(*[jnp.zeros((), dtype)] * 3)
    if moments is not None:
        given = _as_given(spec, layout, dtype, "moments", moments)
    if reference is not None:
        other = _as_given(spec, layout, dtype, "reference", reference)
    if kind == "blend" and moments is not None and reference is not None:
        mean_rest = jnp.asarray(1 - spec.mean_weight, dtype)
        variance_rest = jnp.asarray(1 - spec.variance_weight, dtype)
        given = Given(
            given.mean,
            given.mean_low + mean_rest * apart(other, given),
            given.variance + variance_rest * (other.variance - given.variance),
        )
    return given, other


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
