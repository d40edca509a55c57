"""References that share no code with what they check.

``reference`` is plain jnp on integers and strings, differentiated by JAX itself; it
imports nothing else from normjax and has no custom rule. ``numpy_reference`` is the
same map in NumPy float64, ``mpmath_reference`` and ``mpmath_jacobian`` in 50 digits,
the latter by central differences.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array


def reference(
    x: Array,
    axes: tuple[int, ...],
    *,
    epsilon: float | Array,
    center: bool = True,
    divide: str = "std",
    placement: str = "inside_sqrt",
    ddof: int = 0,
    weights: Array | None = None,
    given: tuple | None = None,
    share: tuple = (1.0, 1.0),
    detach: tuple[str, ...] = (),
) -> Array:
    """The map of one reduction, written once more from its definition.

    Args:
        x: the group view.
        axes: its reduced axes.
        epsilon: the stabilizer.
        center: subtract the mean.
        divide: ``"std"``, ``"rms"``, ``"l2"`` or ``"none"``.
        placement: of epsilon.
        ddof: N − ddof divides the squares.
        weights: 0 where masked.
        given: a mean and a variance that broadcast to the view.
        share: how much of the mean and the variance is x's own; the rest is ``given``.
        detach: parts without gradient.

    Returns:
        x̂ in x's shape, without an affine part.
    """
    w = jnp.ones_like(x) if weights is None else jnp.broadcast_to(weights, x.shape)
    valid = jnp.where(w.astype(bool), x, 0)
    w = w.astype(x.dtype)
    count = jnp.sum(w, axes, keepdims=True)
    mean = jnp.sum(w * valid, axes, keepdims=True) / count
    about = mean if divide == "std" else 0
    divisor = 1 if divide == "l2" else count - ddof
    variance = jnp.sum(w * (valid - about) ** 2, axes, keepdims=True) / divisor
    if "mean" in detach:
        mean = jax.lax.stop_gradient(mean)
    if "variance" in detach:
        variance = jax.lax.stop_gradient(variance)
    if given is not None:
        mean = share[0] * mean + (1 - share[0]) * given[0]
        variance = share[1] * variance + (1 - share[1]) * given[1]
    c = x - mean if center else x
    if divide == "none":
        return c
    divisors = {
        "inside_sqrt": lambda: jnp.sqrt(variance + epsilon),
        "outside_sqrt": lambda: jnp.sqrt(variance) + epsilon,
        "floor_var": lambda: jnp.sqrt(jnp.where(variance > epsilon, variance, epsilon)),
        "floor_std": lambda: jnp.where(
            variance > epsilon**2, jnp.sqrt(variance), epsilon
        ),
    }
    return c / divisors[placement]()
