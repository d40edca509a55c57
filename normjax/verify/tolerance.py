"""One tolerance, from dtype, size and conditioning, and one way to measure an error."""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np


@dataclass(frozen=True)
class Check:
    """One measured fact beside what was predicted.

    Attributes:
        name: what was checked.
        subject: the inputs, spec and conventions that it was checked on.
        measured: the measured value, as text.
        predicted: the predicted one.
        error: their distance.
        tolerance: the largest error that counts as agreement.
        reason: where the tolerance comes from.
    """

    name: str
    subject: str
    measured: str
    predicted: str
    error: float
    tolerance: float
    reason: str

    @property
    def ok(self) -> bool:
        """Whether the error is within the tolerance; NaN is not."""
        return bool(self.error <= self.tolerance)


def unit_roundoff(dtype) -> float:
    """Half the distance from 1 to the next number: 2⁻²⁴ for float32."""
    return float(jnp.finfo(dtype).eps) / 2


def rounding_tolerance(dtype, n: float, kappa: float = 0.0, *, output=None) -> float:
    """64 u (n + κ) + 2 u_out: the normwise relative error of rounding.

    n bounds the error of a sum of n terms, κ = |mean|/s that of removing an offset; 64
    covers the handful of operations and sums of a derivative. A result that is cast to
    a narrower dtype is rounded once more.

    Args:
        dtype: of the accumulation, whose unit roundoff is u.
        n: elements of one reduction group.
        kappa: largest |mean|/s of a group.
        output: dtype of the result, if it is narrower.

    Returns:
        The bound, at most 1/2: beyond that no digit is claimed.
    """
    bound = 64 * unit_roundoff(dtype) * (n + kappa)
    if output is not None and jnp.finfo(output).bits < jnp.finfo(dtype).bits:
        bound += 2 * unit_roundoff(output)
    return min(0.5, bound)


def difference_tolerance(dtype, n: int, kappa: float = 0.0) -> float:
    """8 u^(2/3) (√n + κ): the error of central differences, relative to √n/s.

    With the step h = u^(1/3) s along a t with entries of size 1 truncation leaves h²/s²
    and rounding of the value u s/h in every entry, both u^(2/3), and a rounded mean √n
    of that in all of them. Measured errors stay below a fifth of it for n from 3 to
    2048.

    Args:
        dtype: of the value, whose unit roundoff is u.
        n: elements of one reduction group.
        kappa: largest |mean|/s of a group.

    Returns:
        The bound, at most 1/2.
    """
    return min(0.5, 8 * unit_roundoff(dtype) ** (2 / 3) * (n**0.5 + kappa))


def normwise(actual: np.ndarray, expected: np.ndarray, least=0.0) -> float:
    """Largest ‖actual − expected‖/max(‖expected‖, least) over rows, in the 2-norm.

    A norm of a whole group needs no absolute slack for entries that are zero, and does
    not grow with the number of groups, unlike a tolerance that is multiplied by size.

    Args:
        actual: one row for each group.
        expected: the same shape.
        least: for each row, or for all, the size of the terms that ``expected`` is the
            difference of: 1/s for a derivative (I − U Vᵀ)/s that nearly vanishes.

    Returns:
        The error; the absolute one where both sizes are 0; inf where NaN and infinities
        do not coincide.
    """
    actual = np.asarray(actual, np.float64)
    expected = np.asarray(expected, np.float64)
    if actual.size == 0:
        return 0.0
    actual, expected = (a.reshape(a.shape[0], -1) for a in (actual, expected))
    if not np.isfinite(actual).all() or not np.isfinite(expected).all():
        return 0.0 if np.array_equal(actual, expected, equal_nan=True) else np.inf
    gap = np.linalg.norm(actual - expected, axis=1)
    size = np.maximum(np.linalg.norm(expected, axis=1), least)
    return float(np.max(gap / np.where(size > 0, size, 1)))
