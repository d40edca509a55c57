"""What a layer stores, read through its outputs in inference.

There y = s x + c for each element, so two constant inputs give the stored variance
(w/s)² − ε and mean (b − c)/s, whatever the library calls them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from normjax.auditing.formula import Floats, Formula
from normjax.auditing.probing import Probe


class Stored(NamedTuple):
    """What a state holds, for each group."""

    mean: Floats
    variance: Floats


class Reader:
    """Steps of the target, and what a state holds."""

    def __init__(self, probe: Probe, formula: Formula):
        self.probe = probe
        self.formula = formula
        ones = np.ones(probe.shape)
        scale = ones if formula.scale is None else formula.scale
        self.scale = np.where(scale == 0, np.nan, scale)
        self.bias = 0 * ones if formula.bias is None else formula.bias

    def step(self, state: Any, x: Floats, *, train: bool) -> tuple[Floats, Any]:
        """One call of the target."""
        self.probe.spend()
        target = self.probe.target
        y, after = target.step(state, np.asarray(x, target.dtype), train)
        return np.asarray(y, np.float64), after

    def read(self, state: Any) -> Stored | None:
        """Mean and variance of each group; NaN if the output is not finite.

        None if inference is no fixed affine map of each element.
        """
        probe = self.probe

        def line(size: float) -> tuple[Floats, Floats]:
            constant = np.full(probe.shape, size)
            up, _ = self.step(state, constant, train=False)
            down, _ = self.step(state, -constant, train=False)
            return (up - down) / (2 * size), (up + down) / 2

        slope, offset = line(1.0)
        groups = self.formula.members
        if not np.isfinite(slope).all():
            nothing = np.full(len(groups), np.nan)
            return Stored(nothing, nothing)
        middle = float(np.median(np.abs(slope)))
        if middle:
            size = 2.0 ** np.round(4 - np.log2(middle))
            slope, offset = line(size)
        x = probe.cast(4 * probe.normal())
        y, _ = self.step(state, x, train=False)
        predicted = slope * x + offset
        if np.abs(y - predicted).max() > 1e-4 * np.abs(predicted).max():
            return None
        with np.errstate(all="ignore"):
            means = (self.bias - offset) / slope
            divisor = self.scale / slope
            variances = self._variance(divisor)
        return Stored(*(self._by_group(each) for each in (means, variances)))

    def _variance(self, divisor: Floats) -> Floats:
        formula = self.formula
        if formula.placement == "outside":
            return (divisor - formula.epsilon) ** 2
        return divisor**2 - formula.epsilon * (formula.placement == "inside")

    def _by_group(self, values: Floats) -> Floats:
        members = self.formula.members
        return np.array([np.nanmedian(values.ravel()[inside]) for inside in members])

    def fixed(self, x: Floats, stored: Stored) -> Floats:
        """y with stored statistics."""
        y = np.zeros(x.size)
        members = self.formula.members
        for inside, mean, variance in zip(members, *stored, strict=True):
            below = self.formula.denominator(variance, 1)
            y[inside] = (x.ravel()[inside] - mean) / below
        return np.nan_to_num(self.scale) * y.reshape(x.shape) + self.bias
