"""Questions to operators, answered from structure; new types register answers."""

from __future__ import annotations

from functools import singledispatch
from math import prod

import jax.numpy as jnp
from jax import Array

from normjax.operators.base import LinearOperator
from normjax.operators.grouped import GroupedLowRank
from normjax.operators.simple import Diagonal

_NUMERICAL = "jnp.linalg.{} of its as_matrix() is the numerical form"


@singledispatch
def eigenvalues(operator: LinearOperator) -> Array:
    """Eigenvalues in closed form, ascending.

    ``GroupedLowRank``: for a group of n entries gain · (1, ..., 1, eigenvalues of
    I_k − VᵀU), in O(n), in the shape of the mapped axes followed by n. They are real if
    the core is triangular, else complex and unsorted. ``Diagonal``: its values, flat.

    Raises:
        ValueError: where only the numerical form exists.

    Example:
        >>> import jax.numpy as jnp, normjax as nj
        >>> J = nj.input_jacobian(nj.layer_norm(), jnp.array([1.0, 2.0, 3.0, 4.0]))
        >>> [f"{value:.3g}" for value in nj.eigenvalues(J)]
        ['0', '7.16e-06', '0.894', '0.894']
    """
    raise ValueError(
        f"a {type(operator).__name__} has no closed-form eigenvalues (a scale that "
        f"varies within a group has none): {_NUMERICAL.format('eigvals')}"
    )


@singledispatch
def singular_values(operator: LinearOperator) -> Array:
    """Singular values in O(n), descending.

    ``GroupedLowRank``: |λ| where the map is symmetric. Otherwise, with Q an orthonormal
    basis of what the k columns of U and of V span, gain times

        1, ..., 1 and the singular values of I − (QᵀU)(VᵀQ), at most 2k numbers

    never through a Gram matrix, whose square root floors at √u. The absolute error is
    about 8 u gain. In the shape of the mapped axes followed by n; entries outside have
    their own gain. ``Diagonal``: its absolute values, flat.

    Raises:
        ValueError: where only the numerical form exists.

    Example:
        >>> import jax.numpy as jnp, normjax as nj
        >>> J = nj.input_jacobian(nj.rms_norm(epsilon=0.0), jnp.array([1.0, -1.0, 1.0]))
        >>> nj.singular_values(J).tolist()
        [1.0, 1.0, 0.0]
    """
    raise ValueError(
        f"a {type(operator).__name__} has no closed-form singular values: "
        f"{_NUMERICAL.format('svd')}"
    )


@eigenvalues.register
def _(operator: Diagonal) -> Array:
    return jnp.sort(operator.values.ravel())


@singular_values.register
def _(operator: Diagonal) -> Array:
    return jnp.sort(jnp.abs(operator.values).ravel(), descending=True)


@singular_values.register
def _(operator: GroupedLowRank) -> Array:
    if operator.symmetric or not operator.u:
        return jnp.sort(jnp.abs(eigenvalues(operator)), descending=True)
    inside = _rows(operator, _inside(operator))
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


@eigenvalues.register
def _(operator: GroupedLowRank) -> Array:
    inside = _rows(operator, _inside(operator))
    gain = _rows(operator, operator.gain)
    special = [
        _rows(operator, value * operator.gain.astype(value.dtype))
        for value in _core_eigenvalues(operator)
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


def _inside(operator: GroupedLowRank) -> Array:
    if operator.outside is None:
        return jnp.ones(operator.view, bool)
    return ~jnp.broadcast_to(operator.outside, operator.view)


def _core_eigenvalues(operator: GroupedLowRank) -> list[Array]:
    """Eigenvalues of I_k − VᵀU, k ≤ 2; a group of one entry has only their product."""
    core = operator.core
    if operator.triangular:
        found = [core[j][j] for j in range(len(core))]
    else:
        (p, q), (r, s) = core
        half, spread = (p + s) / 2, (p - s) / 2
        kind = jnp.dtype(f"complex{2 * jnp.finfo(half.dtype).bits}")
        root = jnp.sqrt((spread * spread + q * r).astype(kind))
        found = [half.astype(kind) - root, half.astype(kind) + root]
    if len(found) == 2:
        alone = operator.size_inside == 1
        found[0] = jnp.where(alone, found[0] * found[1], found[0])
    return found
