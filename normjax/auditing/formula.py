"""The formula that an audit fits to a callable, evaluated in float64.

Per group g of n elements, with mean μ and a size measure s(x) ≥ 0, S = s²:

    y = w (x − α μ) / D + b       D = (κ S + ε)^p          inside
                                      (√(κ S) + ε)^2p      outside
                                      max(κ S, ε)^p        clamp
                                      (κ S)^p              none

κ is 1, n/(n−1) or n: what divides the sum is n, n − 1 or 1.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


# s of the values and of their deviations from the mean.
MEASURES: dict[str, Callable[[Floats, Floats], Any]] = {
    "std": lambda _, d: np.sqrt(np.mean(d**2)),
    "rms": lambda x, _: np.sqrt(np.mean(x**2)),
    "mean_abs_dev": lambda _, d: np.mean(np.abs(d)),
    "mean_abs": lambda x, _: np.mean(np.abs(x)),
    "max_abs": lambda x, _: np.max(np.abs(x)),
    "max_abs_dev": lambda _, d: np.max(np.abs(d)),
    "range": lambda x, _: np.max(x) - np.min(x),
    "none": lambda *_: 1.0,
}
PLACEMENTS = ("inside", "outside", "clamp", "none")
DIVISORS = ("n", "n-1", "1")


class GroupStatistics(NamedTuple):
    """Mean, biased variance and count, for each group."""

    mean: Floats
    variance: Floats
    count: NDArray[np.int64]


@dataclass(frozen=True)
class Formula:
    """A normalization as numbers, tied to one shape.

    Attributes:
        groups: in x's shape: the group of each element; -1 is in none, y = bias there.
        alpha: 1 if the mean is subtracted, else 0.
        measure: a key of ``MEASURES``.
        power: p; 1/2 for every common layer.
        epsilon: ε.
        placement: one of ``PLACEMENTS``.
        divisor: one of ``DIVISORS``: what divides the sum of squares (or of the
            measure's own terms): n, n − 1 (ddof 1), or nothing.
        scale: w in x's shape; None is 1.
        bias: b in x's shape; None is 0.

    Example:
        >>> layer = Formula(np.zeros(4, int), epsilon=0.0)
        >>> print(layer.reference(np.arange(4.0)).round(4))
        [-1.3416 -0.4472  0.4472  1.3416]
    """

    groups: NDArray[np.int64]
    alpha: int = 1
    measure: str = "std"
    power: float = 0.5
    epsilon: float = 1e-5
    placement: str = "inside"
    divisor: str = "n"
    scale: Floats | None = field(default=None, repr=False)
    bias: Floats | None = field(default=None, repr=False)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of x."""
        return self.groups.shape

    @property
    def members(self) -> list[NDArray[np.int64]]:
        """The flat positions of each group's elements."""
        flat = self.groups.ravel()
        return [np.flatnonzero(flat == g) for g in np.unique(flat[flat >= 0])]

    @property
    def ddof(self) -> int | None:
        """0 or 1; None for a sum."""
        return {"n": 0, "n-1": 1, "1": None}[self.divisor]

    def kappa(self, count: int) -> float:
        """κ of a group of ``count`` elements."""
        return {"n": 1.0, "n-1": count / max(count - 1, 1), "1": float(count)}[
            self.divisor
        ]

    def size(self, values: Floats) -> float:
        """S = s² of one group's values."""
        return float(MEASURES[self.measure](values, values - values.mean()) ** 2)

    def denominator(self, size: float, count: int) -> float:
        """D of a group whose S is ``size``."""
        if self.measure == "none":
            return 1.0
        return self._power(self.kappa(count) * size)[0]

    def statistics(
        self, x: np.ndarray, mask: np.ndarray | None = None
    ) -> GroupStatistics:
        """Mean, biased variance and count of each group, in float64.

        Args:
            x: the input, any real dtype.
            mask: true where valid, in x's shape.

        Returns:
            One number for each group.
        """
        values = [group for _, group in self._valid(x, mask)]
        return GroupStatistics(
            np.array([v.mean() if v.size else np.nan for v in values]),
            np.array([v.var() if v.size else np.nan for v in values]),
            np.array([v.size for v in values]),
        )

    def reference(self, x: np.ndarray, mask: np.ndarray | None = None) -> Floats:
        """y in float64.

        Args:
            x: the input, any real dtype; its values as they are after casting.
            mask: true where valid, in x's shape: statistics are of these, every
                element is normalized with them.

        Returns:
            y in x's shape.
        """
        flat = np.asarray(x, np.float64).ravel()
        y = np.zeros(flat.size)
        with np.errstate(all="ignore"):
            for inside, values in self._valid(x, mask):
                count = max(values.size, 1)
                mean = values.mean() if values.size else np.nan
                size = self.size(values) if values.size else np.nan
                z = flat[inside] - self.alpha * mean
                y[inside] = z / self.denominator(size, count)
        return self._affine(y.reshape(self.shape))

    def sizes(self, x: np.ndarray) -> Floats:
        """S of the group of each element, in x's shape; NaN in no group."""
        flat = np.asarray(x, np.float64).ravel()
        spread = np.full(flat.size, np.nan)
        for inside in self.members:
            spread[inside] = self.size(flat[inside])
        return spread.reshape(self.shape)

    def jacobian(
        self, x: np.ndarray, *, mean_term: bool = True, scale_term: bool = True
    ) -> Floats:
        """∂y/∂x in float64; a dropped term is what a detached statistic gives.

        Args:
            x: the input.
            mean_term: with −α/n, the derivative through the mean.
            scale_term: with the derivative through D.

        Returns:
            An array (y.size, x.size), in C order.
        """
        flat = np.asarray(x, np.float64).ravel()
        whole = np.zeros((flat.size, flat.size))
        scale = np.ones(self.shape) if self.scale is None else self.scale
        with np.errstate(all="ignore"):
            for inside in self.members:
                values = flat[inside]
                count = values.size
                centered = values - self.alpha * values.mean()
                size = self.size(values)
                block = np.eye(count) - mean_term * self.alpha / count
                block = block / self.denominator(size, count)
                if scale_term and self.measure != "none":
                    kappa = self.kappa(count)
                    value, slope = self._power(kappa * size)
                    slopes = slope * kappa * self._size_slope(values)
                    block -= np.outer(centered, slopes) / value**2
                rows = scale.ravel()[inside][:, None]
                whole[np.ix_(inside, inside)] = rows * block
        return whole

    def _affine(self, z: Floats) -> Floats:
        y = z if self.scale is None else z * self.scale
        return y if self.bias is None else y + self.bias

    def _valid(self, x: np.ndarray, mask: np.ndarray | None):
        """Each group's positions, and its valid values in float64."""
        flat = np.asarray(x, np.float64).ravel()
        kept = np.ones(flat.size, bool)
        if mask is not None:
            kept = np.broadcast_to(mask, self.shape).ravel().astype(bool)
        return [(inside, flat[inside[kept[inside]]]) for inside in self.members]

    def _power(self, size: float) -> tuple[float, float]:
        """D of κS, and dD/d(κS)."""
        p, e = self.power, self.epsilon
        if self.placement == "inside":
            return (size + e) ** p, p * (size + e) ** (p - 1)
        if self.placement == "outside":
            root = np.sqrt(size)
            whole = root + e
            return whole ** (2 * p), p * whole ** (2 * p - 1) / root
        if self.placement == "clamp" and size < e:
            return e**p, 0.0
        return size**p, p * np.float64(size) ** (p - 1)

    def _size_slope(self, values: Floats) -> Floats:
        """dS/dx for one group: 2 s ds/dx; one of the slopes at a kink."""
        count = values.size
        deviations = values - values.mean()
        if self.measure == "std":
            return 2 * deviations / count
        if self.measure == "rms":
            return 2 * values / count
        about_mean = self.measure in ("mean_abs_dev", "max_abs_dev")
        terms = deviations if about_mean else values
        if self.measure.startswith("mean_abs"):
            slope = np.sign(terms) / count
        elif self.measure.startswith("max_abs"):
            top = np.argmax(np.abs(terms))
            slope = np.sign(terms[top]) * (np.arange(count) == top)
        else:
            place = np.arange(count)
            slope = 1.0 * (place == np.argmax(values)) - (place == np.argmin(values))
        if about_mean:
            slope = slope - slope.sum() / count
        return 2 * np.sqrt(self.size(values)) * slope
