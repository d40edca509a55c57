"""Closed forms of the derivatives of y as operators.

By the input J = (I − U Vᵀ)/s per group (``normjax.factors``); by scale, bias, ε and the
statistics, entries that are repeated over the axes which share a number.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from normjax import functional
from normjax.arguments import Params, prepare
from normjax.factors import Factors, factors
from normjax.layout import Layout
from normjax.operators import Broadcast, Diagonal, GroupedLowRank, LinearOperator
from normjax.program import Inputs, Program, finite_under_mask
from normjax.spec import NormSpec
from normjax.statistics import Moments, Statistics


def input_jacobian(
    spec: NormSpec,
    x: Array,
    params: Params | None = None,
    *,
    mask: Array | None = None,
    moments: Moments | Statistics | None = None,
    reference: Statistics | None = None,
) -> LinearOperator:
    """∂y/∂x in closed form: diag(scale) (I − U Vᵀ)/s on every group.

    Given statistics are treated as constants. Masked rows are rows of J (``keep``),
    zero, or rows of the identity (``passthrough``).

    Args:
        spec: the layer.
        x: the input.
        params: from ``init``; None leaves the affine part out.
        mask: as for ``normalize``.
        moments: as for ``normalize``.
        reference: as for ``normalize``.

    Returns:
        An operator on arrays of x's shape: ``J.mv(t)``, ``J.T.mv(t)``,
        ``J.as_matrix()``. With ``axis_names`` on one device's part of them: ``mv`` sums
        over devices once, the matrix is refused.

    Raises:
        ValueError: as ``normalize``.

    Example:
        >>> import jax.numpy as jnp, normjax as nj
        >>> J = nj.input_jacobian(nj.layer_norm(), jnp.array([1.0, 2.0, 3.0, 4.0]))
        >>> print(J.as_matrix()[0].round(5))
        [ 0.26833 -0.35777 -0.08944  0.17888]
    """
    found = _closed(spec, x, params, mask, moments, reference)
    layout, program, inputs, factor, outside = found
    u, v, core = _columns(program, factor)
    if outside is not None:
        u = tuple(jnp.where(outside, 0, column) for column in u)
    scale, gain = inputs.scale, factor.gain
    if scale is not None and all(scale.shape[i] == 1 for i in layout.reduced):
        gain, scale = gain * scale, None  # constant within a group: still closed
    operator = GroupedLowRank(
        jnp.broadcast_to(gain, layout.keep_shape),
        u,
        v,
        core,
        outside,
        layout.shape,
        layout.view_shape,
        layout.reduced,
        outside_gain=1.0 if spec.masked_output == "passthrough" else 0.0,
        symmetric=_symmetric(program, inputs, outside),
        triangular=not (program.source == "blend" and len(u) == 2),
        axis_names=spec.axis_names if u else (),
    )
    if scale is None:
        return operator
    if outside is not None:
        scale = jnp.where(outside, 1, scale)
    values = jnp.broadcast_to(scale, layout.view_shape).reshape(layout.shape)
    return Diagonal(values) @ operator


class StatisticsJacobian(NamedTuple):
    """Maps from one number for each group to y: by the mean, and by the variance."""

    mean: LinearOperator
    variance: LinearOperator


def statistics_jacobian(
    spec: NormSpec,
    x: Array,
    params: Params | None = None,
    *,
    mask: Array | None = None,
    moments: Moments | Statistics | None = None,
    reference: Statistics | None = None,
) -> StatisticsJacobian:
    """∂y/∂m̄ = −scale/s and ∂y/∂σ² = −scale · x̂ S′(σ²)/s, x held fixed.

    By the mean that is subtracted and the variance that is divided by (the mean square
    for ``rms``, the sum of squares for ``l2``), whoever computed them.

    Args:
        spec: the layer.
        x: the input.
        params: from ``init``; None leaves the affine part out.
        mask: as for ``normalize``.
        moments: as for ``normalize``.
        reference: as for ``normalize``.

    Returns:
        Two operators from the shape of the mapped axes to x's; that by the mean is 0
        where nothing is subtracted, that by the variance where nothing is divided.

    Raises:
        ValueError: as ``normalize``.

    Example:
        >>> import jax.numpy as jnp, normjax as nj
        >>> x = jnp.array([[0.0, 2.0], [3.0, 3.0]])
        >>> J = nj.jacobian.statistics_jacobian(nj.layer_norm(epsilon=1.0), x)
        >>> print(J.mean.mv(jnp.ones(2)).round(4)[0], J.mean.shape, J.mean.out_shape)
        [-0.7071 -0.7071] (2,) (2, 2)
    """
    found = _closed(spec, x, params, mask, moments, reference)
    factor, unit = found.factors, found.inputs.numbers.unit
    moved = -factor.gain if spec.center else jnp.zeros_like(factor.gain)
    slope = -factor.c * factor.gain * factor.slope * unit
    layout = found.layout
    place = layout.mapped_shape, layout.keep_shape
    return StatisticsJacobian(found.row(moved, *place), found.row(slope, *place))


def epsilon_jacobian(
    spec: NormSpec,
    x: Array,
    params: Params | None = None,
    *,
    mask: Array | None = None,
    moments: Moments | Statistics | None = None,
    reference: Statistics | None = None,
) -> LinearOperator:
    """∂y/∂ε = −scale · x̂ (∂s/∂ε)/s.

    x̂/(2 s²) inside the root, x̂/s outside; the same for a floor on the variance and on
    the standard deviation where it divides, else 0.

    Args:
        spec: the layer.
        x: the input.
        params: from ``init``; None leaves the affine part out.
        mask: as for ``normalize``.
        moments: as for ``normalize``.
        reference: as for ``normalize``.

    Returns:
        An operator from one number to x's shape.

    Raises:
        ValueError: as ``normalize``.

    Example:
        >>> import jax.numpy as jnp, normjax as nj
        >>> x = jnp.array([[0.0, 2.0]])
        >>> J = nj.jacobian.epsilon_jacobian(nj.layer_norm(epsilon=1.0), x)
        >>> print(J.mv(1.0).round(4))  # ±1/(2·2^(3/2))
        [[ 0.1768 -0.1768]]
    """
    found = _closed(spec, x, params, mask, moments, reference)
    factor, unit, inv = found.factors, found.inputs.numbers.unit, found.factors.inv
    squared = spec.epsilon_placement in ("inside_sqrt", "floor_var")
    rate = inv * inv * unit / 2 if squared else inv  # of ε in units, over one unit
    if spec.divide == "none":
        rate = jnp.zeros_like(inv)
    elif spec.epsilon_placement.startswith("floor"):
        rate = jnp.where(factor.slope == 0, rate, 0)  # S′ = 0 where the floor divides
    return found.row(-factor.c * factor.gain * rate, (), (1,) * factor.c.ndim)


def scale_jacobian(
    spec: NormSpec,
    x: Array,
    *,
    mask: Array | None = None,
    moments: Moments | Statistics | None = None,
    reference: Statistics | None = None,
) -> LinearOperator:
    """∂y/∂scale: t ↦ x̂ · t, and the sum of x̂ · t over what shares a number back.

    Args:
        spec: the layer, with a scale.
        x: the input.
        mask: as for ``normalize``.
        moments: as for ``normalize``.
        reference: as for ``normalize``.

    Returns:
        An operator from the shape of ``params["scale"]`` to x's.

    Raises:
        ValueError: if the spec has no scale, and as ``normalize``.

    Example:
        >>> import jax.numpy as jnp, normjax as nj
        >>> x = jnp.array([[0.0, 2.0], [2.0, 0.0]])
        >>> J = nj.jacobian.scale_jacobian(nj.layer_norm(), x)
        >>> print(J.T.mv(x).round(4))
        [2. 2.]
    """
    found = _closed(spec, x, None, mask, moments, reference)
    bare = spec.replace(affine=None, masked_output="keep")
    wide = found.factors.c.dtype
    bare = bare.replace(**{"precision.output": str(wide)})
    given = {"mask": mask, "moments": moments, "reference": reference}
    x_hat = functional.normalize(bare, x, **given).reshape(found.layout.view_shape)
    x_hat = finite_under_mask(found.inputs.weights, x_hat)
    return found.row(x_hat, *_parameter(spec, found.layout, "scale"))


def bias_jacobian(
    spec: NormSpec, x: Array, *, mask: Array | None = None
) -> LinearOperator:
    """∂y/∂bias: every number is repeated over the entries that share it.

    Args:
        spec: the layer, with a bias.
        x: the input; only its shape and dtype matter.
        mask: as for ``normalize``; masked rows are 0 unless they are kept.

    Returns:
        An operator from the shape of ``params["bias"]`` to x's.

    Raises:
        ValueError: if the spec has no bias, and as ``normalize``.

    Example:
        >>> import jax.numpy as jnp, normjax as nj
        >>> J = nj.jacobian.bias_jacobian(nj.layer_norm(), jnp.zeros((4, 2)))
        >>> J.T.mv(jnp.ones((4, 2))).tolist()
        [4.0, 4.0]
    """
    spec_alone = spec.replace(statistics="input", axis_names=())
    found = _closed(spec_alone, x, None, mask, None, None)
    ones = jnp.ones_like(found.factors.gain)
    return found.row(ones, *_parameter(spec, found.layout, "bias"))


class _Closed(NamedTuple):
    """What every derivative is read from."""

    layout: Layout
    program: Program
    inputs: Inputs
    factors: Factors
    outside: Array | None

    def row(self, values: Array, shape, view) -> Broadcast:
        """scale · values on t of ``shape``, 0 in masked rows that are not kept."""
        if self.inputs.scale is not None:
            values = values * self.inputs.scale
        if self.outside is not None:
            values = jnp.where(self.outside, 0, values)
        layout = self.layout
        return Broadcast(values, shape, view, layout.view_shape, layout.shape)


def _closed(spec: NormSpec, x: Array, *given) -> _Closed:
    layout, program, inputs = prepare(spec, x, *given)
    found = factors(program, inputs)
    return _Closed(layout, program, inputs, found, outside_rows(program, inputs))


def _parameter(spec: NormSpec, layout: Layout, name: str):
    """The stored shape of a parameter, and the one that broadcasts to the view.

    Raises:
        ValueError: if the spec does not have it.
    """
    if spec.affine is None or not getattr(spec.affine, name):
        raise ValueError(
            f"affine is {spec.affine!r}: this layer has no {name} to differentiate by"
        )
    return layout.parameter(spec.affine.axes)


def _columns(program: Program, found: Factors):
    """U, V and core without the columns that are zero by construction."""
    one = jnp.ones((1,) * found.c.ndim, found.c.dtype)
    (p, q), (r, s) = found.core[:2], found.core[2:]
    if not program.own:
        return (), (), ()
    if program.spec.center:
        return (one, found.c), (found.a, found.b), ((p, q), (r, s))
    return (found.c,), (found.b,), ((s,),)


def outside_rows(program: Program, inputs: Inputs) -> Array | None:
    """Masked entries whose rows are not those of the formula."""
    if inputs.weights is None or program.spec.masked_output == "keep":
        return None
    return ~jnp.broadcast_to(inputs.weights.astype(jnp.bool_), program.view)


def _symmetric(program: Program, inputs: Inputs, outside: Array | None) -> bool:
    """Whether J is symmetric whatever the values are."""
    spec = program.spec
    no_variance = spec.divide == "none" or "variance" in spec.detach
    no_mean = not spec.center or "mean" in spec.detach
    if not program.own or (no_variance and no_mean):
        return True
    equal = inputs.weights is None or (
        inputs.weights.dtype == jnp.bool_ and outside is not None
    )
    own_mean = program.source == "input" or not spec.center
    parallel = spec.center == program.about_mean and own_mean
    return equal and (parallel or no_variance)
