"""References that share no code with what they check.

``reference`` is plain jnp on integers and strings, differentiated by JAX itself; it
imports nothing else from normjax and has no custom rule. ``numpy_reference`` is the
same map in NumPy float64, ``mpmath_reference`` in 50 digits, and ``mpmath_jacobian``
its derivative by central differences with step 1e-18, whose error is below 1e-30.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import mpmath
import numpy as np
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
    renorm: tuple | None = None,
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
        renorm: a mean, a variance, r_max and d_max to correct with.

    Returns:
        x̂ in x's shape, without an affine part.
    """
    w = jnp.ones_like(x) if weights is None else jnp.broadcast_to(weights, x.shape)
    valid = jnp.where(w.astype(bool), x, 0)
    w = w.astype(x.dtype)
    count = jnp.sum(w, axes, keepdims=True)
    mean = jnp.sum(w * valid, axes, keepdims=True) / count
    about = mean if divide == "std" else 0
    freedom = 1 if divide == "l2" else count - ddof
    variance = jnp.sum(w * (valid - about) ** 2, axes, keepdims=True) / freedom
    if "mean" in detach:
        mean = jax.lax.stop_gradient(mean)
    if "variance" in detach:
        variance = jax.lax.stop_gradient(variance)
    if given is not None:
        mean = share[0] * mean + (1 - share[0]) * given[0]
        variance = share[1] * variance + (1 - share[1]) * given[1]
    c = x - mean if center else x
    divisor = {
        "inside_sqrt": lambda v: jnp.sqrt(v + epsilon),
        "outside_sqrt": lambda v: jnp.sqrt(v) + epsilon,
        "floor_var": lambda v: jnp.sqrt(jnp.where(v > epsilon, v, epsilon)),
        "floor_std": lambda v: jnp.where(v > epsilon**2, jnp.sqrt(v), epsilon),
    }[placement]
    s = 1 if divide == "none" else divisor(variance)
    if renorm is None:
        return c / s
    other_mean, other_variance, r_max, d_max = renorm
    other = 1 if divide == "none" else divisor(other_variance)
    r = jax.lax.stop_gradient(jnp.clip(s / other, 1 / r_max, r_max))
    d = jax.lax.stop_gradient(jnp.clip((mean - other_mean) / other, -d_max, d_max))
    return c / s * r + (d if center else 0)


def numpy_reference(
    x: np.ndarray,
    axes: tuple[int, ...],
    *,
    epsilon: float,
    center: bool = True,
    divide: str = "std",
    placement: str = "inside_sqrt",
    ddof: int = 0,
    mask: np.ndarray | None = None,
) -> np.ndarray:
    """The map in NumPy float64, group by group, with the mean taken twice.

    Args:
        x: the group view.
        axes: its reduced axes.
        epsilon: the stabilizer.
        center: subtract the mean.
        divide: ``"std"``, ``"rms"``, ``"l2"`` or ``"none"``.
        placement: of epsilon.
        ddof: N − ddof divides the squares.
        mask: True where valid; masked entries come out as NaN.

    Returns:
        x̂ in x's shape, float64.
    """
    order = [axis for axis in range(x.ndim) if axis not in axes] + list(axes)
    moved = np.transpose(np.asarray(x, np.float64), order)
    keep = np.ones(x.shape, bool) if mask is None else np.broadcast_to(mask, x.shape)
    keep = np.transpose(keep, order)
    size = int(np.prod([x.shape[axis] for axis in axes]))
    out = np.full(moved.shape, np.nan)
    groups = zip(
        moved.reshape(-1, size),
        keep.reshape(-1, size),
        out.reshape(-1, size),
        strict=True,
    )
    for values, valid, target in groups:
        target[valid] = _numpy_group(
            values[valid], epsilon, center, divide, placement, ddof
        )
    return np.transpose(out, np.argsort(order))


def _numpy_group(values, epsilon, center, divide, placement, ddof) -> np.ndarray:
    shifted = values - values[0]
    c = shifted - shifted.mean()
    squares = np.sum(c**2) if divide == "std" else np.sum(values**2)
    numerator = c if center else values
    if divide == "none":
        return numerator
    variance = squares / (1 if divide == "l2" else len(values) - ddof)
    return numerator / numpy_divisor(variance, epsilon, placement)


def numpy_divisor(variance, epsilon: float, placement: str):
    """S(σ²) in NumPy, for numbers or arrays.

    Args:
        variance: σ².
        epsilon: the stabilizer.
        placement: of epsilon.

    Returns:
        The divisor.
    """
    std = np.sqrt(variance)
    return {
        "inside_sqrt": np.sqrt(variance + epsilon),
        "outside_sqrt": std + epsilon,
        "floor_var": np.sqrt(np.maximum(variance, epsilon)),
        "floor_std": np.maximum(std, epsilon),
    }[placement]


def mpmath_reference(
    values: list,
    *,
    epsilon: float,
    center: bool = True,
    divide: str = "std",
    placement: str = "inside_sqrt",
    ddof: int = 0,
) -> list:
    """The map of one group in the working precision of mpmath.

    Args:
        values: the group, numbers that mpmath takes exactly.
        epsilon: the stabilizer.
        center: subtract the mean.
        divide: ``"std"``, ``"rms"``, ``"l2"`` or ``"none"``.
        placement: of epsilon.
        ddof: N − ddof divides the squares.

    Returns:
        x̂ as a list of ``mpf``.
    """
    n, eps = len(values), mpmath.mpf(epsilon)
    mean = mpmath.fsum(values) / n
    about = mean if divide == "std" else 0
    squares = mpmath.fsum((v - about) ** 2 for v in values)
    variance = squares / (1 if divide == "l2" else n - ddof)
    s = {
        "inside_sqrt": mpmath.sqrt(variance + eps),
        "outside_sqrt": mpmath.sqrt(variance) + eps,
        "floor_var": mpmath.sqrt(variance if variance > eps else eps),
        "floor_std": mpmath.sqrt(variance) if variance > eps**2 else eps,
    }[placement]
    s = mpmath.mpf(1) if divide == "none" else s
    return [(v - mean if center else v) / s for v in values]


def mpmath_jacobian(values: np.ndarray, **settings) -> np.ndarray:
    """∂x̂/∂x of one group, by central differences in 50 digits.

    Args:
        values: the group, in any float dtype; its entries are taken exactly.
        **settings: as for ``mpmath_reference``.

    Returns:
        A float64 matrix, n × n.
    """
    with mpmath.workdps(50):
        exact = [mpmath.mpf(float(value)) for value in values]
        step = mpmath.mpf(10) ** -18
        columns = []
        for j in range(len(exact)):
            up, down = list(exact), list(exact)
            up[j], down[j] = exact[j] + step, exact[j] - step
            high = mpmath_reference(up, **settings)
            low = mpmath_reference(down, **settings)
            columns.append(
                [float((a - b) / (2 * step)) for a, b in zip(high, low, strict=True)]
            )
    return np.array(columns).T
