"""The numbers of each group of a ``GroupedLowRank``, from its core C = I_k − VᵀU.

An identity carries them: det(I_n − U Vᵀ) = det C, and U maps the null space of C onto
that of I_n − U Vᵀ.
"""

from __future__ import annotations

from functools import reduce

import jax.numpy as jnp
from jax import Array

from normjax.operators.grouped import GroupedLowRank


def per_group(operator: GroupedLowRank, array: Array) -> Array:
    """One number for each group, in the shape of the mapped axes."""
    shape = [1 if i in operator.axes else n for i, n in enumerate(operator.view)]
    mapped = [n for i, n in enumerate(operator.view) if i not in operator.axes]
    return jnp.broadcast_to(array, shape).reshape(mapped)


def _count(operator: GroupedLowRank, entries: Array) -> Array:
    """How many entries of each group, in the operator's dtype: no mixed arithmetic."""
    return jnp.sum(entries, operator.axes, keepdims=True, dtype=operator.dtype)


def core_eigenvalues(operator: GroupedLowRank) -> list[Array]:
    """Eigenvalues of C, k ≤ 2; a group of one entry has only their product."""
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


def core_determinant(operator: GroupedLowRank) -> Array:
    """det C; 0 where the two terms of a core that is not triangular meet within 8 u."""
    core = operator.core
    if len(core) < 2:
        return core[0][0] if core else jnp.ones_like(operator.gain)
    (p, q), (r, s) = core
    if operator.triangular:
        return p * s
    found, near = p * s - q * r, 4 * jnp.finfo(operator.dtype).eps
    return jnp.where(jnp.abs(found) <= near * (jnp.abs(p * s) + abs(q * r)), 0, found)


def core_rank(operator: GroupedLowRank) -> Array:
    """Rank of C, by its exact zeros."""
    full = core_determinant(operator) != 0
    if not operator.u:
        return jnp.zeros_like(operator.gain, operator.size_inside.dtype)
    entries = [entry != 0 for row in operator.core for entry in row]
    some = reduce(jnp.logical_or, entries)
    return jnp.where(full, len(operator.u), jnp.where(some, len(operator.u) - 1, 0))


def block_diagonal(operator: GroupedLowRank) -> Array:
    """gain · (1 − Σ u v), in the shape of the view."""
    shared = [u * v for u, v in zip(operator.u, operator.v, strict=True)]
    left = 1 - reduce(jnp.add, shared, jnp.zeros_like(operator.gain))
    # One entry alone: the determinant, which is not found by a subtraction.
    left = jnp.where(operator.size_inside == 1, core_determinant(operator), left)
    found = jnp.broadcast_to(operator.gain * left, operator.view)
    if operator.outside is not None:
        found = jnp.where(operator.outside, operator.outside_gain, found)
    return found


def block_trace(operator: GroupedLowRank, scale: Array | None = None) -> Array:
    """The trace of each group; with a scale on the diagonal in front, Σ scale · Jᵢᵢ."""
    operator.check_whole()
    if scale is not None:
        found = jnp.sum(scale * block_diagonal(operator), operator.axes, keepdims=True)
        return per_group(operator, found)
    n, k = _count(operator, operator.inside), len(operator.u)
    special = sum((row[j] for j, row in enumerate(operator.core)), 0 * operator.gain)
    inside = jnp.where(n == 1, core_determinant(operator), n - k + special)
    inside = jnp.where(n == 0, 0, inside)
    missing = _count(operator, ~operator.inside)
    found = operator.gain * inside + operator.outside_gain * missing
    return per_group(operator, found)


def block_slogdet(
    operator: GroupedLowRank, scale: Array | None = None
) -> tuple[Array, Array]:
    """Sign and log|det| of each group; with a scale, those of scale · J."""
    operator.check_whole()
    axes, n = operator.axes, _count(operator, operator.inside)
    special = jnp.where(n > 0, core_determinant(operator), 1)
    gain = jnp.where(n > 0, operator.gain, 1)
    missing = _count(operator, ~operator.inside)
    outside = jnp.where(missing > 0, operator.outside_gain, 1.0).astype(operator.dtype)
    sign = jnp.sign(special) * jnp.where(
        n % 2 == 1, jnp.sign(gain), jnp.sign(jnp.abs(gain))
    )
    sign = sign * jnp.sign(outside)
    logs = jnp.where(n > 0, n * jnp.log(jnp.abs(gain)), 0)
    logs = logs + jnp.log(jnp.abs(special))
    logs = logs + jnp.where(missing > 0, missing * jnp.log(jnp.abs(outside)), 0)
    if scale is not None:
        scale = jnp.broadcast_to(scale, operator.view)
        sign = sign * jnp.prod(jnp.sign(scale), axes, keepdims=True)
        logs = logs + jnp.sum(jnp.log(jnp.abs(scale)), axes, keepdims=True)
    return per_group(operator, sign), per_group(operator, logs)


def block_rank(operator: GroupedLowRank) -> Array:
    """n − k + rank C of the entries inside, and those outside that are kept."""
    operator.check_whole()
    n, k = operator.size_inside, len(operator.u)
    inside = jnp.where(operator.gain != 0, n - k + core_rank(operator), 0)
    inside = jnp.where(n > 0, inside, 0)
    if operator.outside_gain:
        inside = inside + jnp.sum(~operator.inside, operator.axes, keepdims=True)
    return per_group(operator, inside)


def block_null_space(operator: GroupedLowRank) -> Array:
    """U null(C), orthonormal in every group; 0 for vectors that are not in it."""
    operator.check_whole()
    axes = operator.axes

    def total(array: Array) -> Array:
        return jnp.sum(array, axes, keepdims=True)

    def unit(vector: Array, there: Array) -> Array:
        size = jnp.sqrt(total(vector * vector))
        there = there & (size > 0)
        return jnp.where(there, vector / jnp.where(there, size, 1), 0)

    u = [jnp.broadcast_to(column, operator.view) for column in operator.u]
    lost = len(u) - core_rank(operator)
    if len(u) < 2:
        found = [unit(column, lost > 0) for column in u]
    else:
        (p, q), (r, s) = operator.core
        first = (p != 0) | (q != 0)
        # Orthogonal to the row of C that is not 0.
        along = jnp.where(first, q, s), jnp.where(first, -p, -r)
        one = unit(along[0] * u[0] + along[1] * u[1], lost == 1)
        both = unit(u[0], lost == 2)
        found = [jnp.where(lost == 1, one, both)]
        rest = u[1] - found[0] * total(found[0] * u[1])
        found.append(unit(rest, lost == 2))
    vectors = jnp.stack([v.reshape(operator.shape) for v in found]) if found else None
    if vectors is None:
        return jnp.zeros((0, *operator.shape), operator.dtype)
    return vectors.astype(operator.dtype)
