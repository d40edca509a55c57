"""The tangent map where statistics and parameters are both the same along some axes.

There a parameter and its group need the same sums on the way back, and here they share
them: Σ ȳ and Σ ȳ z over those axes, once, in place of four sums over the activations.
``standardize`` has the map for every other case.
"""

from __future__ import annotations

from math import prod

import jax
import jax.numpy as jnp
from jax import Array

from normjax.program import Inputs, Own, Program, inverse
from normjax.statistics import divide_or_zero


def shared_axes(program: Program, known: Inputs, moving: Inputs) -> tuple[int, ...]:
    """Axes of the view along which statistics and parameters do not vary.

    Batch, group and instance norm have such axes, the examples or the positions.

    Args:
        program: the static part.
        known: the inputs.
        moving: their tangents, None where they are zero by construction.

    Returns:
        The axes; none unless a parameter moves too, and for what is not the plain map:
        statistics that are given, detached, masked or split over devices.
    """
    spec = program.spec
    learned = [part for part in (moving.scale, moving.bias) if part is not None]
    special = program.renorm or spec.detach or spec.axis_names
    if special or program.source != "input" or known.weights is not None:
        return ()
    if not (spec.center and spec.divide == "std" and learned) or moving.x is None:
        return ()
    parts = learned if known.scale is None else [*learned, known.scale]
    return tuple(
        axis for axis in program.axes if all(part.shape[axis] == 1 for part in parts)
    )


def push_statistics(
    program: Program, shared: tuple[int, ...], own: Own, z: Array, inv: Array, t: Array
) -> Own:
    """Tangents of the statistics, from sums over the shared axes.

    Σ z t is taken without the mean of t: Σ z is 0, to u √n beside the size of t.

    Args:
        program: the static part.
        shared: from ``shared_axes``.
        own: the statistics.
        z: (x − m)/s.
        inv: 1/s.
        t: the tangent of x.

    Returns:
        Own, of which the count does not move.
    """

    def both(values: Array) -> Array:
        part = jnp.sum(values, shared, keepdims=True)
        part = jax.lax.optimization_barrier(part)  # or XLA makes one slow sum of both
        return jnp.sum(part, program.axes, keepdims=True)

    none = Own(*map(jnp.zeros_like, own))
    mean_dot = divide_or_zero(both(t), own.count)
    return none._replace(mean=mean_dot, squares=2 * inverse(inv) * both(z * t))


def push_value(
    shared: tuple[int, ...], known: Inputs, moving: Inputs, z: Array, t: Array, numbers
) -> Array:
    """y˙ = t · a + z · B + A, each of a, A and B small beside t and repeated once.

        a = scale/s      B = scale · s (1/s)˙ + scale˙      A = bias˙ − a · ṁ

    Args:
        shared: from ``shared_axes``.
        known: the inputs.
        moving: their tangents.
        z: (x − m)/s.
        t: the tangent of x.
        numbers: 1/s, s (1/s)˙ and ṁ.

    Returns:
        y˙ with neighbouring axes that are alike made one.
    """
    inv, ratio, mean_dot = numbers
    scale = jnp.ones_like(inv) if known.scale is None else known.scale
    a = inv * scale
    slope, level = ratio * scale, -(mean_dot * a)
    if moving.scale is not None:
        slope = slope + moving.scale
    if moving.bias is not None:
        level = level + moving.bias
    small = [1 if axis in shared else size for axis, size in enumerate(t.shape)]
    # Inner loops then have the length of all channels, not of those of a group.
    starts = [i for i in range(t.ndim) if not i or (i in shared) != (i - 1 in shared)]
    ends = [*starts[1:], t.ndim]

    def merged(array: Array) -> Array:
        shape = [prod(array.shape[i:j]) for i, j in zip(starts, ends, strict=True)]
        return array.reshape(shape)

    def spread(array: Array) -> Array:
        return merged(jax.lax.optimization_barrier(jnp.broadcast_to(array, small)))

    return merged(t) * spread(a) + merged(z) * spread(slope) + spread(level)
