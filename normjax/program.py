"""The static part and the inputs of one map, and what value and derivative share.

``standardize`` computes the map and its derivative rule from this, ``factors`` the
closed form of the derivative.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from normjax.spec import NormSpec
from normjax.statistics import (
    Moments,
    at_least,
    counts,
    deviations,
    gathered,
    merge,
    select,
    total,
    weighted,
)


class Given(NamedTuple):
    """Statistics from elsewhere, reduced axes kept: a mean pair and a variance."""

    mean: Array
    mean_low: Array
    variance: Array


def apart(first: Given | Own, second: Given | Own) -> Array:
    """How far two means lie apart, first − second, as the pairs that they are."""
    return (first.mean - second.mean) + (first.mean_low - second.mean_low)


class Numbers(NamedTuple):
    """The leaves of a spec, and statistics from elsewhere (0 if unused).

    With ``precision.rescale`` all are in units of 1/``unit``, a power of two for each
    group, and so is x once it is widened: x̂ does not change. ``least`` is then S(0),
    which ε may be too small to give.
    """

    epsilon: Array
    mean_weight: Array
    variance_weight: Array
    r_max: Array
    d_max: Array
    unit: Array
    least: Array
    given: Given
    reference: Given


class Inputs(NamedTuple):
    """What one evaluation depends on; all but x broadcast to the group view."""

    x: Array
    scale: Array | None
    bias: Array | None
    numbers: Numbers
    weights: Array | None


class Own(NamedTuple):
    """The input's own statistics: N, the mean pair, and Σ w (x − m_v)²."""

    count: Array
    mean: Array
    mean_low: Array
    squares: Array


@dataclass(frozen=True)
class Program:
    """The static part: a spec without its numbers, the group view, its reduced axes.

    ``source`` says whose statistics are used: ``"input"``, ``"given"`` or ``"blend"``;
    ``renorm`` whether x̂ is corrected to what the reference would give.
    """

    spec: NormSpec
    view: tuple[int, ...]
    axes: tuple[int, ...]
    source: str
    renorm: bool = False

    @property
    def own(self) -> bool:
        """Whether statistics of the input are used at all."""
        return self.source != "given"

    @property
    def about_mean(self) -> bool:
        """Whether the variance is taken about the mean: m_v = m, otherwise 0."""
        return self.spec.divide == "std"

    @property
    def needs_mean(self) -> bool:
        """Whether the mean of the input is computed."""
        return self.own and (self.spec.center or self.about_mean)

    def freedom(self, count: Array) -> Array:
        """What divides the squares: N − ddof, or 1 for l2."""
        l2 = self.spec.divide == "l2"
        return jnp.ones_like(count) if l2 else count - self.spec.ddof

    def detach(self, part: str, value):
        """Cut the gradient through the input's own ``"mean"`` or ``"variance"``."""
        return jax.lax.stop_gradient(value) if part in self.spec.detach else value

    def output(self, dtype) -> np.dtype:
        """The dtype of y."""
        declared = self.spec.precision.output
        return jnp.dtype(dtype if declared == "input" else declared)

    def widen(self, x: Array, numbers: Numbers) -> Array:
        """x as the group view, in the accumulation dtype and in units of 1/unit."""
        dtype = at_least(x.dtype, self.spec.precision.accumulate)
        x = x.reshape(self.view).astype(dtype)
        return x * numbers.unit if self.spec.precision.rescale else x


def own_statistics(program: Program, weights: Array | None, x: Array):
    """X − mean (x itself where no mean is needed), and the input's own statistics."""
    if not program.own:
        return x, None
    if program.needs_mean:
        algorithm = program.spec.precision.algorithm
        deviation, moments = deviations(x, program.axes, weights, algorithm)
        own = Own(moments.count, moments.mean, moments.mean_low, moments.m2)
    else:
        count = counts(program.axes, x.shape, weights, x.dtype)
        deviation, own = x, Own(count, *[jnp.zeros_like(count)] * 3)
    if not program.about_mean:
        valid = select(weights, x)
        squares = total(program.axes, weighted(weights, valid * valid))
        own = own._replace(squares=squares)
    if program.spec.axis_names:
        own = _across(program, own)
        if program.needs_mean:
            deviation = (x - own.mean) - own.mean_low
    return deviation, own


def _across(program: Program, own: Own) -> Own:
    """The statistics of all devices: squares about the mean merge, about zero add."""
    parts = Own(*gathered(program.spec.axis_names, own))
    merged = merge(Moments(*parts))
    squares = merged.m2 if program.about_mean else parts.squares.sum(0)
    return Own(merged.count, merged.mean, merged.mean_low, squares)


def inverse_divisor(program: Program, numbers: Numbers, variance: Array) -> Array:
    """1/S(σ²) for each epsilon placement, 0 where S(σ²) = 0, NaN where it is infinite.

    At an exact floor tie the floor divides, so that S′ = 0. A variance that leaves the
    dtype would otherwise turn its group into zeros.
    """
    placement, epsilon = program.spec.epsilon_placement, numbers.epsilon
    if placement == "inside_sqrt":
        s = root(variance + epsilon)
    elif placement == "outside_sqrt":
        s = root(variance) + epsilon
    elif placement == "floor_var":
        s = root(jnp.where(variance <= epsilon, epsilon, variance))
    else:
        std = root(variance)
        s = jnp.where(std <= epsilon, epsilon, std)
    if program.spec.precision.rescale and program.own:
        s = jnp.where(variance == 0, numbers.least, s)
    return inverse(jnp.where(jnp.isinf(s), jnp.nan, s))


def root(value: Array) -> Array:
    """√v, with derivative 0 at v = 0."""
    zero = value == 0
    return jnp.where(zero, 0, jnp.sqrt(jnp.where(zero, 1, value)))


def inverse(value: Array) -> Array:
    """1/v, and 0 (with derivative 0) at v = 0."""
    zero = value == 0
    return jnp.where(zero, 0, 1 / jnp.where(zero, 1, value))


def finite_under_mask(weights: Array | None, values: Array) -> Array:
    """0 where an entry is masked and not finite: what a derivative may multiply."""
    if weights is None:
        return values
    bad = ~(weights.astype(jnp.bool_) | jnp.isfinite(values))
    return jnp.where(bad, jnp.zeros_like(values), values)
