"""Diagonal, trace, determinant, rank, condition and null space, from structure.

What a map that consists of groups has for each of them comes in the shape of the mapped
axes. With k columns in U and V and C = I_k − VᵀU (k ≤ 2), a group of n entries has

    trace = gain (n − k + tr C)        det = gainⁿ det C        rank = n − k + rank C
    null space = U null(C)

A scale that varies within a group, ``Diagonal @ GroupedLowRank``, keeps diagonal, trace
and determinant closed; rank, condition and null space are then numerical.
"""

from __future__ import annotations

from functools import singledispatch

import jax.numpy as jnp
from jax import Array

from normjax.operators.base import LinearOperator, Product, Sum
from normjax.operators.blocks import (
    block_diagonal,
    block_null_space,
    block_rank,
    block_slogdet,
    block_trace,
    core_eigenvalues,
    per_group,
)
from normjax.operators.grouped import GroupedLowRank
from normjax.operators.queries import no_closed_form, singular_values
from normjax.operators.simple import Diagonal


def diagonal(operator: LinearOperator, *, numerical: bool = False) -> Array:
    """The diagonal of the matrix, in the shape of the arrays.

    Args:
        operator: a square map.
        numerical: take it from the dense matrix, of any map.

    Raises:
        ValueError: where only the numerical form exists, and it is not asked for.

    Example:
        >>> import jax.numpy as jnp, normjax as nj
        >>> J = nj.input_jacobian(nj.center_only(), jnp.array([[1.0, 2.0, 4.0, 5.0]]))
        >>> nj.operators.diagonal(J).tolist()
        [[0.75, 0.75, 0.75, 0.75]]
    """
    if numerical:
        return jnp.diagonal(operator.as_matrix()).reshape(operator.shape)
    return _diagonal(operator)


def trace(operator: LinearOperator, *, numerical: bool = False) -> Array:
    """The trace: of each group, where the map has groups, otherwise of all.

    Args:
        operator: a square map.
        numerical: take that of the dense matrix, one number for all groups.

    Raises:
        ValueError: where only the numerical form exists, and it is not asked for.

    Example:
        >>> import jax.numpy as jnp, normjax as nj
        >>> J = nj.input_jacobian(nj.center_only(), jnp.array([[1.0, 2.0, 4.0, 5.0]]))
        >>> nj.operators.trace(J).tolist()
        [3.0]
    """
    if numerical:
        return jnp.trace(operator.as_matrix())
    return _trace(operator)


def slogdet(
    operator: LinearOperator, *, numerical: bool = False
) -> tuple[Array, Array]:
    """Sign and logarithm of the determinant: of each group, or of all.

    s⁻ⁿ leaves every dtype for a long group; its logarithm does not.

    Args:
        operator: a square map.
        numerical: take that of the dense matrix, one number for all groups.

    Returns:
        (sign, log|det|); 0 and −inf for a singular map.

    Raises:
        ValueError: where only the numerical form exists, and it is not asked for.

    Example:
        >>> import jax.numpy as jnp, normjax as nj
        >>> x = jnp.array([[1.0, -1.0, 1.0, -1.0]])
        >>> J = nj.input_jacobian(nj.rms_norm(epsilon=1.0), x)
        >>> sign, log = nj.operators.slogdet(J)  # s = √2, ρ = 1/2
        >>> print(sign, jnp.exp(log).round(6))
        [1.] [0.125]
    """
    if numerical:
        return tuple(jnp.linalg.slogdet(operator.as_matrix()))
    return _slogdet(operator)


def determinant(operator: LinearOperator, *, numerical: bool = False) -> Array:
    """sign · exp(log|det|), as ``slogdet`` has them; it may leave the dtype.

    Example:
        >>> import jax.numpy as jnp, normjax as nj
        >>> J = nj.input_jacobian(nj.layer_norm(), jnp.array([1.0, 2.0, 4.0]))
        >>> nj.operators.determinant(J).tolist()
        0.0
    """
    sign, logarithm = slogdet(operator, numerical=numerical)
    return sign * jnp.exp(logarithm)


def rank(operator: LinearOperator, *, numerical: bool = False) -> Array:
    """The rank of each group: n − 1 for an offset that is removed, n − 2 at ρ = 0.

    It counts the exact zeros of the closed form, without a tolerance: ε = 1e-30 leaves
    the radial direction, ε = 0 does not. Two shares that meet in a core that is not
    triangular (a blend) count as zero within 8 u.

    Args:
        operator: a map with groups, or a diagonal one.
        numerical: ``jnp.linalg.matrix_rank`` of the dense matrix, with its tolerance.

    Raises:
        ValueError: where only the numerical form exists, and it is not asked for.

    Example:
        >>> import jax.numpy as jnp, normjax as nj
        >>> x = jnp.array([1.0, 2.0, 4.0, 5.0])
        >>> for epsilon in (1e-5, 0.0):
        ...     J = nj.input_jacobian(nj.layer_norm(epsilon=epsilon), x)
        ...     print(nj.operators.rank(J))
        3
        2
    """
    if numerical:
        return jnp.linalg.matrix_rank(operator.as_matrix())
    return _rank(operator)


def condition(operator: LinearOperator, *, numerical: bool = False) -> Array:
    """‖J‖ ‖J⁺‖, largest over smallest nonzero singular value, of each group.

    J⁺ is the pseudoinverse: what is removed for good does not count. 1/ρ for a plain
    layer, 0 for a map that is 0. Of a map that is not symmetric it is right as far as
    its singular values are, up to about 1/(8 u).

    Args:
        operator: a map with groups, or a diagonal one.
        numerical: from the singular values of the dense matrix, those below
            size · u · largest counting as zero.

    Raises:
        ValueError: where only the numerical form exists, and it is not asked for.

    Example:
        >>> import jax.numpy as jnp, normjax as nj
        >>> J = nj.input_jacobian(nj.layer_norm(epsilon=1.0), jnp.array([[0.0, 2.0]]))
        >>> J3 = nj.input_jacobian(nj.layer_norm(epsilon=1.0), jnp.array([-3.0, 0, 3]))
        >>> print(nj.operators.condition(J), nj.operators.condition(J3))
        [1.] 7.0
    """
    if numerical:
        values = singular_values(operator, numerical=True)
        least = values[0] * len(values) * jnp.finfo(values.dtype).eps
        return _ratio(values, values > least)
    return _condition(operator)


def null_space(operator: LinearOperator, *, numerical: bool = False) -> Array:
    """An orthonormal basis of what is mapped to 0, within every group.

    Args:
        operator: a map with groups.
        numerical: right singular vectors of the dense matrix, as many as there are:
            not under ``jit``.

    Returns:
        An array (k, ...shape), k ≤ 2 and fixed by the structure: basis vectors of each
        group, 0 where a group has fewer (``rank`` counts them). Entries outside a
        group, and groups that are mapped to 0 altogether, are not listed.

    Raises:
        ValueError: where only the numerical form exists, and it is not asked for.

    Example:
        >>> import jax.numpy as jnp, normjax as nj
        >>> x = jnp.array([1.0, 2.0, 4.0, 5.0])
        >>> J = nj.input_jacobian(nj.layer_norm(), x)
        >>> nj.operators.null_space(J).tolist()
        [[0.5, 0.5, 0.5, 0.5], [0.0, 0.0, 0.0, 0.0]]
    """
    if numerical:
        _, values, right = jnp.linalg.svd(operator.as_matrix())
        least = values[0] * operator.size * jnp.finfo(values.dtype).eps
        kept = int((values > least).sum())
        return right[kept:].reshape(-1, *operator.shape)
    return _null_space(operator)


def _ratio(values: Array, counted: Array, axis: int = 0) -> Array:
    """Largest over smallest of those that count; 0 where none does."""
    largest = jnp.max(jnp.where(counted, values, 0), axis)
    smallest = jnp.min(jnp.where(counted, values, jnp.inf), axis)
    return jnp.where(largest > 0, largest / smallest, 0)


@singledispatch
def _diagonal(operator: LinearOperator) -> Array:
    raise no_closed_form(operator, "diagonal")


@singledispatch
def _trace(operator: LinearOperator) -> Array:
    raise no_closed_form(operator, "trace")


@singledispatch
def _slogdet(operator: LinearOperator) -> tuple[Array, Array]:
    raise no_closed_form(operator, "determinant")


@singledispatch
def _rank(operator: LinearOperator) -> Array:
    raise no_closed_form(operator, "rank")


@singledispatch
def _condition(operator: LinearOperator) -> Array:
    raise no_closed_form(operator, "condition number")


@singledispatch
def _null_space(operator: LinearOperator) -> Array:
    raise no_closed_form(operator, "null space")


@_diagonal.register
def _(operator: Diagonal) -> Array:
    return operator.values


@_trace.register
def _(operator: Diagonal) -> Array:
    return operator.values.sum()


@_slogdet.register
def _(operator: Diagonal) -> tuple[Array, Array]:
    values = operator.values
    return jnp.sign(values).prod(), jnp.log(jnp.abs(values)).sum()


@_rank.register
def _(operator: Diagonal) -> Array:
    return (operator.values != 0).sum()


@_condition.register
def _(operator: Diagonal) -> Array:
    values = jnp.abs(operator.values).ravel()
    return _ratio(values, values > 0)


@_diagonal.register
def _(operator: Sum) -> Array:
    first, *rest = map(_diagonal, operator.terms)
    return sum(rest, first)


@_trace.register
def _(operator: Sum) -> Array:
    return _diagonal(operator).sum()


_trace.register(GroupedLowRank, block_trace)
_slogdet.register(GroupedLowRank, block_slogdet)
_rank.register(GroupedLowRank, block_rank)
_null_space.register(GroupedLowRank, block_null_space)


@_diagonal.register
def _(operator: GroupedLowRank) -> Array:
    return block_diagonal(operator).reshape(operator.shape)


@_condition.register
def _(operator: GroupedLowRank) -> Array:
    operator.check_whole()
    if not (operator.symmetric or not operator.u):
        values = singular_values(operator)
        count = block_rank(operator)[..., None]
        place = jnp.cumsum(jnp.ones_like(values, count.dtype), -1)
        return _ratio(values, place <= count, -1)
    n, k = operator.size_inside, len(operator.u)
    found = [jnp.abs(value) for value in core_eigenvalues(operator)]
    there = [(n > j) & (value > 0) for j, value in enumerate(found)]
    found, there = [*found, jnp.ones_like(operator.gain)], [*there, n > k]
    found = [value * operator.gain for value in found]
    if operator.outside_gain:
        found.append(jnp.full_like(operator.gain, abs(operator.outside_gain)))
        there.append(jnp.any(~operator.inside, operator.axes, keepdims=True))
    each = [
        jnp.stack([per_group(operator, a) for a in part]) for part in (found, there)
    ]
    return _ratio(each[0], each[1] & (each[0] > 0))


def _in_front(operator: Product, what: str) -> tuple[GroupedLowRank, Array]:
    """The groups and the scale of a product of the two, in either order."""
    left, right = operator.left, operator.right
    if isinstance(right, Diagonal):
        left, right = right, left
    if isinstance(left, Diagonal) and isinstance(right, GroupedLowRank):
        return right, left.values.reshape(right.view)
    raise no_closed_form(operator, what)


@_diagonal.register
def _(operator: Product) -> Array:
    groups, scale = _in_front(operator, "diagonal")
    return (scale * block_diagonal(groups)).reshape(operator.shape)


@_trace.register
def _(operator: Product) -> Array:
    return block_trace(*_in_front(operator, "trace"))


@_slogdet.register
def _(operator: Product) -> tuple[Array, Array]:
    return block_slogdet(*_in_front(operator, "determinant"))
