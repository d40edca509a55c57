"""Moments of reduction groups: how they are computed, and how they merge.

The mean is kept as an unevaluated pair ``mean + mean_low``, since one float32 cannot
hold the mean of [2²⁴, 2²⁴+2, 2²⁴+4, 2²⁴+6]. Relative error of the variance, with u the
unit roundoff of the accumulation dtype and κ = |mean|/std:

    one_pass   max(E[x²] − E[x]², 0)             κ² u log₂n: all of it at κ² u ≥ 1
    two_pass   mean((x − mean(x))²)              u log₂n + (κ u log₂n)²
    shifted    d = x − x₀, mean((d − mean(d))²)  u log₂n at any offset (the default)

x₀ is one element of the group, without gradient: it cancels, so this is exact to every
order. Source: Chan, Golub, LeVeque, "Algorithms for computing the sample variance"
(1983).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Moments:
    """Count, mean and sum of squared deviations of each group.

    Attributes:
        count: N = Σw, the number of valid elements (the sum of the weights).
        mean: the mean, rounded.
        mean_low: what rounding took from the mean: mean + mean_low is the mean.
        m2: Σ w (x − mean)².
    """

    count: Array
    mean: Array
    mean_low: Array
    m2: Array

    def variance(self, ddof: int = 0) -> Array:
        """m2 / (N − ddof), and 0 where N ≤ ddof."""
        return divide_or_zero(self.m2, self.count - ddof)

    def mean_square(self, ddof: int = 0) -> Array:
        """Σ w x² / (N − ddof), and 0 where N ≤ ddof."""
        mean = self.mean + self.mean_low
        return divide_or_zero(self.m2 + self.count * mean * mean, self.count - ddof)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Statistics:
    """A mean and a variance, used as they are.

    Attributes:
        mean: what is subtracted.
        variance: what is divided by, before epsilon; with ``divide="rms"`` the mean
            square, with ``"l2"`` the sum of squares.
    """

    mean: Array
    variance: Array


def divide_or_zero(numerator: Array, count: Array) -> Array:
    """Numerator / count where count > 0, else 0: never 0/0, in value and gradient."""
    valid = count > 0
    one = jnp.ones_like(count)
    quotient = numerator / jnp.where(valid, count, one)
    return jnp.where(valid, quotient, jnp.zeros_like(quotient))


def select(weights: Array | None, values: Array) -> Array:
    """``values`` with 0 where the weight is 0: before any arithmetic (0·NaN = NaN)."""
    if weights is None:
        return values
    return jnp.where(weights.astype(jnp.bool_), values, jnp.zeros_like(values))


def weighted(weights: Array | None, values: Array) -> Array:
    """w · values, with 0 where the weight is 0; a boolean mask only selects."""
    values = select(weights, values)
    if weights is None or weights.dtype == jnp.bool_:
        return values
    return weights.astype(values.dtype) * values


def total(axes: tuple[int, ...], values: Array) -> Array:
    """Sum over the reduced axes, which stay with size 1.

    Where mapped axes stand between the last axis and others, as in group norm, its sum
    comes last, on what is small by then: XLA walks all of them together eight times as
    slowly, and puts the two sums together again unless a barrier parts them.
    """
    last = values.ndim - 1
    rest = tuple(axis for axis in axes if axis != last)
    if last in axes and rest and last - 1 not in axes:
        columns = jnp.sum(values, axis=rest, keepdims=True)
        values, axes = jax.lax.optimization_barrier(columns), (last,)
    return jnp.sum(values, axis=axes, keepdims=True)


def counts(axes: tuple[int, ...], shape: tuple[int, ...], weights: Array | None, dtype):
    """N of every group, reduced axes kept; without weights it is a static number."""
    if weights is None:
        keep = [1 if axis in axes else size for axis, size in enumerate(shape)]
        return jnp.full(keep, prod(shape[axis] for axis in axes), dtype)
    full = jnp.broadcast_to(weights, shape)
    return total(axes, full.astype(dtype))


def deviations(
    x: Array, axes: tuple[int, ...], weights: Array | None, algorithm: str
) -> tuple[Array, Moments]:
    """Deviations from the mean, and the moments, of every group.

    Args:
        x: the group view, in the accumulation dtype.
        axes: the reduced axes.
        weights: None, a mask (bool), or weights, broadcastable to x.
        algorithm: ``"shifted"``, ``"two_pass"`` or ``"one_pass"``.

    Returns:
        x − mean (also where masked), and Moments with the reduced axes kept.
    """
    count = counts(axes, x.shape, weights, x.dtype)
    if algorithm == "shifted":
        anchor = _anchor(x, axes, weights, count)
        shifted = x - anchor
        rest = divide_or_zero(total(axes, weighted(weights, shifted)), count)
        deviation = shifted - rest
        mean, mean_low = two_sum(anchor, rest)
    else:
        mean = divide_or_zero(total(axes, weighted(weights, x)), count)
        mean_low = jnp.zeros_like(mean)
        deviation = x - mean
    if algorithm == "one_pass":
        valid = select(weights, x)
        squares = total(axes, weighted(weights, valid * valid))
        # A difference of means, as Flax takes it: fused, that of sums is another one.
        spread = divide_or_zero(squares, count) - mean * mean
        m2 = count * jnp.maximum(spread, 0)
        return deviation, Moments(count, mean, mean_low, m2)
    valid = select(weights, deviation)
    m2 = total(axes, weighted(weights, valid * valid))
    return deviation, Moments(count, mean, mean_low, m2)


def _anchor(x: Array, axes, weights: Array | None, count: Array) -> Array:
    """One element of each group: the first, or with weights the first heaviest one."""
    if 0 in x.shape:
        return jnp.zeros(count.shape, x.dtype)
    if weights is None:
        index = [slice(0, 1) if axis in axes else slice(None) for axis in range(x.ndim)]
        return jax.lax.stop_gradient(x[tuple(index)])
    order = [axis for axis in range(x.ndim) if axis not in axes] + list(axes)
    outer = x.ndim - len(axes)

    def rows(array: Array) -> Array:
        moved = jnp.transpose(jnp.broadcast_to(array, x.shape), order)
        return moved.reshape(*moved.shape[:outer], -1)

    first = jnp.argmax(rows(weights), axis=-1, keepdims=True)
    anchor = jnp.take_along_axis(rows(x), first, axis=-1).reshape(count.shape)
    return jax.lax.stop_gradient(jnp.where(count > 0, anchor, jnp.zeros_like(anchor)))


def two_sum(a: Array, b: Array) -> tuple[Array, Array]:
    """a + b as an unevaluated pair (rounded sum, its exact error), for any order.

    Source: Knuth, TAOCP vol. 2, section 4.2.2, theorem B.
    """
    a, b = jnp.broadcast_arrays(a, b)
    # A product in b that a compiler contracts with one of these sums, and not with the
    # others, would make them sums of different numbers: none passes through a choice.
    b = jnp.where(jnp.isfinite(b), b, b + b)
    high = a + b
    part = high - a
    low = (a - (high - part)) + (b - part)
    return high, jnp.where(jnp.isfinite(high), low, jnp.zeros_like(low))


def merge(parts: Moments, axis: int | tuple[int, ...] = 0, keepdims: bool = False):
    """Merge the moments of disjoint groups along an axis of the statistics.

    Means do not average: with δ the distance from the heaviest part's mean,

        N = Σ Nₖ     mean = meanₕ + Σ Nₖ δₖ / N     M2 = Σ M2ₖ + Σ Nₖ (δₖ − δ̄)²

    Empty parts are skipped before the arithmetic; all empty gives zeros.

    Args:
        parts: Moments whose arrays have the axis.
        axis: the axis or axes to merge.
        keepdims: keep the merged axes with size 1.

    Returns:
        Moments of the union.

    Example:
        >>> import jax.numpy as jnp
        >>> columns = [2.0, 6.0], [1.0, 10.0], [0.0, 0.0], [2.0, 0.0]
        >>> both = merge(Moments(*map(jnp.array, columns)))
        >>> float(both.count), float(both.mean), float(both.variance())
        (8.0, 7.75, 15.4375)
    """
    axes = (axis,) if isinstance(axis, int) else tuple(axis)
    axes = tuple(a % parts.count.ndim for a in axes)
    count = total(axes, parts.count)
    full = parts.count > 0
    anchor = _anchor(parts.mean, axes, parts.count, count)
    anchor_low = _anchor(parts.mean_low, axes, parts.count, count)
    delta = select(full, (parts.mean - anchor) + (parts.mean_low - anchor_low))
    rest = divide_or_zero(total(axes, parts.count * delta), count)
    spread = select(full, delta - rest)
    m2 = total(axes, select(full, parts.m2) + parts.count * spread * spread)
    mean, mean_low = two_sum(anchor, anchor_low + rest)
    merged = (count, mean, mean_low, m2)
    if not keepdims:
        merged = tuple(jnp.squeeze(array, axes) for array in merged)
    return Moments(*merged)


def gathered(names: tuple[str, ...], arrays: Iterable[Array]) -> list[Array]:
    """Arrays of all devices along named axes, stacked first, by one collective.

    Each device adds its own to its place in a sum of zeros: exact, and the same on all.

    Args:
        names: axes of ``jax.shard_map``, ``jax.vmap`` or ``jax.pmap``.
        arrays: of one shape and dtype.

    Returns:
        The arrays, each with a first axis of devices.
    """
    local = jnp.stack(list(arrays))
    places = jnp.zeros((jax.lax.axis_size(names), *local.shape), local.dtype)
    places = places.at[jax.lax.axis_index(names)].set(local)
    return list(jnp.moveaxis(jax.lax.psum(places, names), 1, 0))


def varying(names: tuple[str, ...], array: Array) -> Array:
    """A sum over devices as a number of each of them: one collective transposes it.

    Under ``jax.shard_map`` every use of the sum would add a collective of its own; the
    axes of ``jax.vmap`` and ``jax.pmap`` know no such difference.
    """
    manual = jax.sharding.get_abstract_mesh().manual_axes
    names = tuple(name for name in names if name in manual)
    if not names:
        return array
    if hasattr(jax.lax, "pcast"):
        return jax.lax.pcast(array, names, to="varying")
    pvary: Any = vars(jax.lax)["pvary"]  # until JAX 0.9
    return pvary(array, names)


def at_least(dtype, accumulate: str) -> np.dtype:
    """The wider one of an input's dtype and the accumulation dtype.

    float16 and bfloat16 do not contain each other: float32 contains both.
    """
    first, second = jnp.dtype(dtype), jnp.dtype(accumulate)
    bits = jnp.finfo(first).bits - jnp.finfo(second).bits
    if bits == 0 and first != second:
        return jnp.dtype(jnp.float32)
    return second if bits < 0 else first
