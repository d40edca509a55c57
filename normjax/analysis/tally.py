"""Distributions and flagged rows of a stream: parts merge exactly, in any cut."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

# Sixteen bins to a decade: a quantile is known to a factor of 10^(1/16) = 1.155. Powers
# of ten and their roots, where ρ = 1 and 1/√ε pile up, are the middles of bins.
PER_DECADE, DECADES = 16, 38
EDGES = 10.0 ** (
    (np.arange(-DECADES * PER_DECADE, DECADES * PER_DECADE + 1) + 0.5) / PER_DECADE
)


@dataclass(frozen=True)
class Extreme:
    """A smallest or largest number, exactly, and the first row that has it."""

    value: float
    index: tuple[int, ...]


@dataclass(frozen=True)
class Histogram:
    """Counts of numbers ≥ 0 between fixed edges, evenly spaced in the logarithm.

    Attributes:
        counts: how many lie in ``EDGES[i - 1] <= x < EDGES[i]``; the first entry has
            those below all edges that are not 0, the last the finite ones above.
        zero: how many are 0.
        infinite: how many are inf.
        undefined: how many are NaN; in no other count.
        lowest: the smallest number, None if there is none.
        highest: the largest number, inf included.
    """

    counts: np.ndarray = field(default_factory=lambda: np.zeros(len(EDGES) + 1, int))
    zero: int = 0
    infinite: int = 0
    undefined: int = 0
    lowest: Extreme | None = None
    highest: Extreme | None = None

    @classmethod
    def of(cls, values: np.ndarray, index: np.ndarray) -> Histogram:
        """Count some numbers.

        Args:
            values: shape (m,).
            index: where each stands, shape (m, columns), in rising order.

        Returns:
            A ``Histogram``.
        """
        undefined = np.isnan(values)
        if undefined.any():
            values, index = values[~undefined], index[~undefined]
        if not len(values):
            return cls(undefined=int(undefined.sum()))
        between = values[(values > 0) & (values < np.inf)].astype(np.float64)
        bins = np.searchsorted(EDGES, between, side="right")
        low, high = int(values.argmin()), int(values.argmax())
        return cls(
            np.bincount(bins, minlength=len(EDGES) + 1),
            int((values == 0).sum()),
            int((values == np.inf).sum()),
            int(undefined.sum()),
            Extreme(float(values[low]), tuple(index[low].tolist())),
            Extreme(float(values[high]), tuple(index[high].tolist())),
        )

    def __add__(self, other: Histogram) -> Histogram:
        """The histogram of both parts; of equal extremes the first row stays."""
        return Histogram(
            self.counts + other.counts,
            self.zero + other.zero,
            self.infinite + other.infinite,
            self.undefined + other.undefined,
            _extreme(self.lowest, other.lowest, 1),
            _extreme(self.highest, other.highest, -1),
        )

    @property
    def total(self) -> int:
        """How many numbers were counted, without those that are NaN."""
        return self.zero + int(self.counts.sum()) + self.infinite

    def quantile(self, q: float) -> tuple[float, float]:
        """The edges between which a quantile lies.

        Args:
            q: between 0 and 1.

        Returns:
            Bounds of the number at place ⌈q · total⌉ in rising order (the first for
            q = 0): the edges of its bin, narrowed by the exact extremes.

        Example:
            >>> values = np.array([1.0, 2.0, 3.0, 0.0])
            >>> found = Histogram.of(values, np.arange(4)[:, None])
            >>> [round(edge, 3) for edge in found.quantile(0.75)], found.quantile(0.0)
            ([1.911, 2.207], (0.0, 0.0))
        """
        if self.lowest is None or self.highest is None:
            return (np.nan, np.nan)
        place = max(1, int(np.ceil(q * self.total)))
        steps = np.cumsum([self.zero, *self.counts, self.infinite])
        at = int(np.searchsorted(steps, place))
        lower, upper = [0.0, 0.0, *EDGES, np.inf], [0.0, *EDGES, np.inf, np.inf]
        bounds = self.lowest.value, self.highest.value
        low, high = np.clip([lower[at], upper[at]], *bounds)
        return float(low), float(high)


def _extreme(first: Extreme | None, second: Extreme | None, sign: int):
    if first is None or second is None:
        return first or second
    return min((first, second), key=lambda e: (sign * e.value, e.index))


@dataclass(frozen=True)
class Flagged:
    """How many rows have a flag, and the worst of them.

    Attributes:
        count: how many there are.
        index: where the worst stand, shape (k, columns).
        values: their numbers, the worst first, of equal ones the first row.
    """

    count: int
    index: np.ndarray
    values: np.ndarray

    @classmethod
    def of(
        cls, chosen: np.ndarray, values: np.ndarray, index: np.ndarray, **order: Any
    ) -> Flagged:
        """Count and keep rows.

        Args:
            chosen: which rows have the flag, shape (m,).
            values: the number of each row, shape (m,).
            index: where each stands, shape (m, columns).
            order: ``keep``, the most rows to keep, and ``highest``.

        Returns:
            A ``Flagged``.
        """
        some = cls(int(chosen.sum()), index[chosen], values[chosen].astype(np.float64))
        return some._worst(**order)

    def plus(self, other: Flagged, **order: Any) -> Flagged:
        """Both parts together."""
        both = Flagged(
            self.count + other.count,
            np.concatenate([self.index, other.index]),
            np.concatenate([self.values, other.values]),
        )
        return both._worst(**order)

    def _worst(self, keep: int, highest: bool) -> Flagged:
        sign = -1 if highest else 1
        columns = [*self.index.T[::-1], sign * self.values]
        first = np.lexsort(columns)[:keep]
        return Flagged(self.count, self.index[first], self.values[first])
