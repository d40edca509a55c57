"""Closed forms of ∂y/∂x as operators, and their spectra.

    J = (I − U Vᵀ)/s per group (``normjax.factors``), with eigenvalues
    (1 − αₘ)/s on the common offset, ρ/s on the radial direction c, 1/s on the rest

For the plain centred map with ε inside the root: 0, ε/s³ and 1/s.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
from jax import Array

from normjax.arguments import Params, prepare
from normjax.factors import Factors, factors
from normjax.layout import Layout
from normjax.operators import Diagonal, GroupedLowRank, LinearOperator, Product
from normjax.program import Inputs, Program
from normjax.spec import NormSpec
from normjax.statistics import Moments, Statistics, counts


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Spectrum:
    """The eigenvalues of ∂x̂/∂x, one set for each group (of its valid entries).

    Attributes:
        offset: on the common offset: 0 if the input's own mean is subtracted.
        radial: on c = x − m̄: suppressed by ε.
        tangential: 1/s on everything else.
        count: number of valid entries N (the sum of the weights).
        size: number of entries n of a group.
        centered: whether something is subtracted.
    """

    offset: Array
    radial: Array
    tangential: Array
    count: Array
    size: int = field(metadata={"static": True})
    centered: bool = field(metadata={"static": True})

    @property
    def multiplicities(self) -> tuple[int, int, int]:
        """How often each occurs without a mask; under one the last is N − 2."""
        if self.size == 1:
            return (1, 0, 0) if self.centered else (0, 1, 0)
        return (1, 1, self.size - 2)


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
        ``J.as_matrix()``.

    Raises:
        ValueError: as ``normalize``.

    Example:
        >>> import jax.numpy as jnp, normjax as nj
        >>> J = nj.input_jacobian(nj.layer_norm(), jnp.array([1.0, 2.0, 3.0, 4.0]))
        >>> print(J.as_matrix()[0].round(5))
        [ 0.26833 -0.35777 -0.08944  0.17888]
    """
    layout, program, inputs = prepare(spec, x, params, mask, moments, reference)
    check_one_device(program)
    found = factors(program, inputs)
    u, v, core = _columns(program, found)
    outside = outside_rows(program, inputs)
    if outside is not None:
        u = tuple(jnp.where(outside, 0, column) for column in u)
    scale, gain = inputs.scale, found.gain
    if scale is not None and all(scale.shape[i] == 1 for i in layout.reduced):
        gain, scale = gain * scale, None  # constant within a group: still closed
    inside = counts(layout.reduced, layout.view_shape, inputs.weights, gain.dtype)
    operator = GroupedLowRank(
        jnp.broadcast_to(gain, layout.keep_shape),
        u,
        v,
        core,
        outside,
        inside,
        layout.shape,
        layout.view_shape,
        layout.reduced,
        outside_gain=1.0 if spec.masked_output == "passthrough" else 0.0,
        symmetric=_symmetric(program, inputs, outside),
        triangular=not (program.source == "blend" and len(u) == 2),
    )
    if scale is None:
        return operator
    if outside is not None:
        scale = jnp.where(outside, 1, scale)
    values = jnp.broadcast_to(scale, layout.view_shape).reshape(layout.shape)
    return Product(Diagonal(values), operator)


def check_one_device(program: Program) -> None:
    """Refuse a derivative that couples devices: one of them has only a block of it.

    Raises:
        ValueError: if the statistics are taken across named axes.
    """
    if program.own and program.spec.axis_names:
        raise ValueError(
            f"axis_names is {program.spec.axis_names!r}: this derivative couples "
            "devices; ask for it on the whole batch, with axis_names=()"
        )


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


def spectrum(
    spec: NormSpec,
    x: Array,
    *,
    mask: Array | None = None,
    moments: Moments | Statistics | None = None,
    reference: Statistics | None = None,
) -> Spectrum:
    """The eigenvalues of ∂x̂/∂x in O(n), without the affine part.

    Args:
        spec: the layer.
        x: the input.
        mask: as for ``normalize``.
        moments: as for ``normalize``.
        reference: as for ``normalize``.

    Returns:
        A ``Spectrum`` whose arrays have the shape of the mapped axes.

    Raises:
        ValueError: as ``normalize``, and for ``statistics="blend"``, whose eigenvalues
            are those of ``input_jacobian``.

    Example:
        >>> import jax, jax.numpy as jnp, normjax as nj
        >>> xs = jnp.array([[1.0, 2.0, 3.0], [10.0, 20.0, 30.0]])
        >>> many = jax.vmap(lambda x: nj.spectrum(nj.layer_norm(epsilon=1.0), x))(xs)
        >>> print(many.tangential.round(4), many.multiplicities)
        [0.7746 0.1216] (1, 1, 1)
    """
    layout, found, count = _per_group(spec, x, mask, moments, reference)
    return Spectrum(
        found.core[0] * found.gain,
        found.core[3] * found.gain,
        found.gain,
        count,
        size=layout.group_size,
        centered=spec.center,
    )


def _per_group(
    spec: NormSpec, x: Array, mask, moments, reference
) -> tuple[Layout, Factors, Array]:
    """Factors without the activations, and N, in the shape of the mapped axes."""
    if spec.statistics == "blend" and moments is None:
        raise ValueError(
            "a blend has no fixed offset and radial direction: use "
            "eigenvalues(input_jacobian(...))"
        )
    layout, program, inputs = prepare(spec, x, None, mask, moments, reference)
    check_one_device(program)
    found = factors(program, inputs)
    empty = jnp.zeros(layout.keep_shape, found.c.dtype)
    found = found._replace(c=empty, a=empty, b=empty)
    count = counts(layout.reduced, layout.view_shape, inputs.weights, empty.dtype)

    def per_group(array: Array) -> Array:
        return jnp.broadcast_to(array, layout.keep_shape).reshape(layout.mapped_shape)

    return layout, jax.tree.map(per_group, found), per_group(count)


def stabilizer_share(
    spec: NormSpec,
    x: Array,
    *,
    mask: Array | None = None,
    moments: Moments | Statistics | None = None,
    reference: Statistics | None = None,
) -> Array:
    """ρ, the radial over the tangential gain of every group.

    ρ = ε/(σ² + ε) for ε inside the root: 0 is exact local scale invariance, 1 means
    that the layer is linear in this direction.

    Args:
        spec: the layer.
        x: the input.
        mask: as for ``normalize``.
        moments: as for ``normalize``.
        reference: as for ``normalize``.

    Returns:
        An array in the shape of the mapped axes.

    Raises:
        ValueError: as ``spectrum``.

    Example:
        >>> import jax.numpy as jnp, normjax as nj
        >>> x = jnp.array([[0.0, 2.0]])
        >>> nj.stabilizer_share(nj.layer_norm(epsilon=1.0), x).tolist()
        [0.5]
    """
    return _per_group(spec, x, mask, moments, reference)[1].core[3]
