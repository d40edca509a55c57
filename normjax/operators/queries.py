"""Eigenvalues and singular values, from structure; new types register answers.

Each answers in O(n) where a closed form exists, and says so where there is none: a
scale that varies within a group has none for these two. ``numerical=True`` then takes
the dense matrix.
"""

from __future__ import annotations

from functools import singledispatch
from math import prod

import jax.numpy as jnp
from jax import Array

from normjax.operators.base import LinearOperator
from normjax.operators.blocks import core_eigenvalues
from normjax.operators.grouped import GroupedLowRank
from normjax.operators.simple import Diagonal


def no_closed_form(operator: LinearOperator, what: str) -> ValueError:
    """The error of a query that has only its numerical form."""
    return ValueError(
        f"a {type(operator).__name__} has no closed-form {what} (a scale that varies "
        "within a group has none): numerical=True takes the numerical form"
    )


def eigenvalues(operator: LinearOperator, *, numerical: bool = False) -> Array:
    """Eigenvalues in closed form, ascending.

    ``GroupedLowRank``: for a group of n entries gain · (1, ..., 1, eigenvalues of
    I_k − VᵀU), in O(n), in the shape of the mapped axes followed by n. They are real if
    the core is triangular, else complex and unsorted. ``Diagonal``: its values, flat.

    Args:
        operator: a square map.
        numerical: take those of the dense matrix, of any map: complex, flat, unsorted,
            in O(size³).

    Raises:
        ValueError: where only the numerical form exists, and it is not asked for.

    Example:
        >>> import jax.numpy as jnp, normjax as nj
        >>> J = nj.input_jacobian(nj.layer_norm(), jnp.array([1.0, 2.0, 3.0, 4.0]))
        >>> [f"{value:.3g}" for value in nj.eigenvalues(J)]
        ['0', '7.16e-06', '0.894', '0.894']
    """
    if numerical:
        return jnp.linalg.eigvals(operator.as_matrix())
    return _eigenvalues(operator)


def singular_values(operator: LinearOperator, *, numerical: bool = False) -> Array:
    """Singular values in O(n), descending.

    ``GroupedLowRank``: |λ| where the map is symmetric. Otherwise, with Q an orthonormal
    basis of what the k columns of U and of V span, gain times

        1, ..., 1 and the singular values of I − (QᵀU)(VᵀQ), at most 2k numbers

    never through a Gram matrix, whose square root floors at √u. The absolute error is
    about 8 u gain. In the shape of the mapped axes followed by n; entries outside have
    their own gain. ``Diagonal``: its absolute values, flat.

    Args:
        operator: any map.
        numerical: take those of the dense matrix: flat, in O(size³).

    Raises:
        ValueError: where only the numerical form exists, and it is not asked for.

    Example:
        >>> import jax.numpy as jnp, normjax as nj
        >>> J = nj.input_jacobian(nj.rms_norm(epsilon=0.0), jnp.array([1.0, -1.0, 1.0]))
        >>> nj.singular_values(J).tolist()
        [1.0, 1.0, 0.0]
    """
    if numerical:
        return jnp.linalg.svd(operator.as_matrix(), compute_uv=False)
    return _singular_values(operator)


@singledispatch
def _eigenvalues(operator: LinearOperator) -> Array:
    raise no_closed_form(operator, "eigenvalues")


@singledispatch
def _singular_values(operator: LinearOperator) -> Array:
    raise no_closed_form(operator, "singular values")


@_eigenvalues.register
def _(operator: Diagonal) -> Array:
    return jnp.sort(operator.values.ravel())


@_singular_values.register
def _(operator: Diagonal) -> Array:
    return jnp.sort(jnp.abs(operator.values).ravel(), descending=True)


@_singular_values.register
def _(operator: GroupedLowRank) -> Array:
    if operator.symmetric or not operator.u:
        return jnp.sort(jnp.abs(_eigenvalues(operator)), descending=True)
    operator.check_whole()
    inside = _rows(operator, operator.inside)
    gain = jnp.abs(_rows(operator, operator.gain))
    n, k = inside.shape[-1], len(operator.u)
    columns = jnp.stack([_rows(operator, c) for c in (*operator.u, *operator.v)], -1)
    narrow = jnp.finfo(columns.dtype).bits < 32  # LAPACK takes no less
    wide = jnp.dtype(jnp.float32) if narrow else columns.dtype
    size = jnp.linalg.norm(columns.astype(wide), axis=-2, keepdims=True)
    unit = columns.astype(wide) / jnp.where(size > 0, size, 1)
    q = jnp.linalg.qr(unit)[0]
    seen = jnp.matrix_transpose(q) @ unit * size
    middle = seen[..., :k] @ jnp.matrix_transpose(seen[..., k:])
    identity = jnp.broadcast_to(jnp.eye(q.shape[-1], dtype=wide), middle.shape)
    few = jnp.linalg.svd(identity - middle, compute_uv=False)
    ones = jnp.ones((*few.shape[:-1], n - few.shape[-1]), wide)
    found = jnp.concatenate([few, ones], -1).astype(gain.dtype)
    # Entries outside are ones here: of the basis, where it is larger than the group.
    order = jnp.argsort(jnp.abs(found - 1), axis=-1)
    found = gain * jnp.take_along_axis(found, order, axis=-1)
    missing = (~inside).sum(-1, keepdims=True)
    place = jnp.arange(n).reshape((1,) * (found.ndim - 1) + (n,))
    found = jnp.where(place < missing, abs(operator.outside_gain), found)
    return jnp.sort(found, descending=True)


@_eigenvalues.register
def _(operator: GroupedLowRank) -> Array:
    operator.check_whole()
    inside = _rows(operator, operator.inside)
    gain = _rows(operator, operator.gain)
    special = [
        _rows(operator, value * operator.gain.astype(value.dtype))
        for value in core_eigenvalues(operator)
    ]
    values = gain.astype(special[0].dtype if special else gain.dtype)
    place = jnp.cumsum(inside, axis=-1) - 1
    for j, value in enumerate(special):
        values = jnp.where(place == j, value, values)
    values = jnp.where(inside, values, operator.outside_gain)
    return jnp.sort(values, axis=-1) if operator.triangular else values


def _rows(operator: GroupedLowRank, array: Array) -> Array:
    """One row for each group, in the shape of the mapped axes followed by n."""
    axes, ndim = operator.axes, len(operator.view)
    order = [axis for axis in range(ndim) if axis not in axes] + list(axes)
    full = jnp.transpose(jnp.broadcast_to(array, operator.view), order)
    n = prod(operator.view[axis] for axis in axes)
    return full.reshape(*full.shape[: ndim - len(axes)], n)
