"""The derivative of a mixture: a lazy sum over what every member's statistics move."""

from __future__ import annotations

from collections.abc import Sequence

import jax.numpy as jnp
from jax import Array

from normjax import jacobian
from normjax.arguments import Params, prepare
from normjax.mixture.apply import mixed_statistics
from normjax.mixture.members import Mixture
from normjax.operators import Broadcast, Diagonal, LinearOperator
from normjax.operators.base import Sum
from normjax.program import own_statistics
from normjax.spec import NormSpec
from normjax.statistics import Moments, Statistics, divide_or_zero, weighted


def input_jacobian(
    mixture: Mixture,
    x: Array,
    params: Params | None = None,
    *,
    mask: Array | None = None,
    moments: Sequence[Moments | Statistics | None] | None = None,
) -> Sum:
    """∂y/∂x = diag(scale/s) (I − Σ pₖ 1 aₖᵀ − x̂ S′ Σ qₖ vₖᵀ), a sum of lazy terms.

    aₖ = w/N and vₖ = 2 w∘(x − mₖ)/(N − ddof) on the groups of member k; a member with
    given statistics has none. The members' groups differ, so that singular values and
    eigenvalues are numerical only.

    Args:
        mixture: of K members.
        x: the input.
        params: as for ``normalize``.
        mask: as for ``normalize``.
        moments: as for ``normalize``; treated as constants.

    Returns:
        An operator on arrays of x's shape: two terms for each member, and a diagonal.

    Raises:
        ValueError: for a member with ``axis_names``, and as ``normalize``.

    Example:
        >>> import jax.numpy as jnp, normjax as nj
        >>> x = jnp.array([[[1.0], [3.0]], [[5.0], [7.0]]])
        >>> J = nj.mixture.input_jacobian(nj.mixture.switchable_norm(), x)
        >>> print(J.mv(jnp.ones_like(x)).round(6).reshape(4))  # a common level is lost
        [0. 0. 0. 0.]
    """
    mixed = mixed_statistics(mixture, x, params, mask, moments)
    shape = jnp.shape(x)
    given = {"mask": mixed.mask, "moments": mixed.moments}
    own = jacobian.input_jacobian(mixed.carrier, mixed.x, mixed.affine, **given)
    by = jacobian.statistics_jacobian(mixed.carrier, mixed.x, mixed.affine, **given)
    # Each row holds one number: given one, every map says what its rows multiply.
    rows = []
    for operator in (own, by.mean, by.variance):
        row = operator.mv(jnp.ones(operator.shape, operator.dtype)).reshape(shape)
        rows.append(row if mixed.empty is None else jnp.where(mixed.empty, 0, row))
    terms: list[LinearOperator] = [Diagonal(rows[0])]
    elsewhere = [None] * len(mixture.specs) if moments is None else moments
    for k, spec in enumerate(mixture.specs):
        if elsewhere[k] is None:
            shares = (part[k] for part in mixed.shares)
            terms += _member(spec, x, mask, rows[1:], shares)
    return Sum(tuple(terms))


def _member(spec: NormSpec, x: Array, mask, rows, shares) -> list[LinearOperator]:
    """What the mean and the variance of one member move: rows · share · column ᵀ."""
    if spec.axis_names:
        raise ValueError(
            f"axis_names is {spec.axis_names!r}: the derivative of a mixture is that "
            "of the whole batch, with axis_names=()"
        )
    layout, program, inputs = prepare(spec, x, None, mask)
    values = program.widen(inputs.x, inputs.numbers)
    deviation, own = own_statistics(program, inputs.weights, values)
    assert own is not None  # no statistics were given
    about = deviation if program.about_mean else values
    per_entry = divide_or_zero(jnp.ones_like(own.count), program.freedom(own.count))
    columns = (
        divide_or_zero(weighted(inputs.weights, jnp.ones_like(values)), own.count),
        2 * weighted(inputs.weights, about) * per_entry,
    )
    used = spec.center, spec.divide != "none"

    def on_groups(array: Array) -> Broadcast:
        view = jnp.broadcast_to(array, layout.view_shape)
        places = layout.mapped_shape, layout.keep_shape, layout.view_shape, layout.shape
        return Broadcast(view, *places)

    return [
        on_groups((row * share).reshape(layout.view_shape)) @ on_groups(column).T
        for row, share, column, use in zip(rows, shares, columns, used, strict=True)
        if use
    ]
