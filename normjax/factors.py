"""The factors of J = ∂x̂/∂x = (I − U Vᵀ)/s, U = [1, c], V = [a, b], of every group.

Everything that is said about a derivative (operators, spectra, coupling) is read from
here. The derivative rule of ``standardize`` does not use this module, so each is
evidence for the other.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from normjax.program import (
    Inputs,
    Numbers,
    Own,
    Program,
    apart,
    finite_under_mask,
    inverse,
    inverse_divisor,
    own_statistics,
    root,
)
from normjax.statistics import divide_or_zero, weighted


class Factors(NamedTuple):
    """One group each along the mapped axes; every array broadcasts to the group view.

    Attributes:
        gain: 1/s, times what renorm and a rescaled unit put before J.
        c: x − m̄, or x where nothing is subtracted.
        a: weights of the subtracted mean, αₘ w/N.
        b: (S′/s) αᵥ · 2 w∘(x − m_v)/(N − ddof).
        core: I₂ − VᵀU by rows: (1 − aᵀ1, −aᵀc, −bᵀ1, 1 − bᵀc), each in closed form,
            never by the subtraction, which float32 loses.
        count: N.
        inv: 1/s, in units of 1/unit.
        slope: S′(σ²)/s, in units of 1/unit².
    """

    gain: Array
    c: Array
    a: Array
    b: Array
    core: tuple[Array, Array, Array, Array]
    count: Array
    inv: Array
    slope: Array


def factors(program: Program, inputs: Inputs) -> Factors:
    """Compute s, U, V and I₂ − VᵀU for every group.

    Args:
        program: the static part of the map.
        inputs: x with its numbers and weights; scale and bias are not
            used.

    Returns:
        Factors in the accumulation dtype.
    """
    numbers, weights = inputs.numbers, inputs.weights
    x = program.widen(inputs.x, numbers)
    deviation, own = own_statistics(program, weights, x)
    variance, rest = _variance(program, own, numbers)
    if program.spec.divide == "none":
        inv, slope = jnp.ones_like(numbers.epsilon), jnp.zeros_like(numbers.epsilon)
    else:
        inv = inverse_divisor(program, numbers, variance)
        slope = _slope(program, numbers, variance, inv)
    mean_share, variance_share = shares(program, numbers)
    gap = _gap(program, own, numbers)
    c = finite_under_mask(weights, _centre(program, own, numbers, x, deviation, gap))
    if own is not None:
        inv = jnp.where(own.count > 0, inv, 0)
    gain = _gain(program, numbers, inv)
    if own is None:
        zero, one = jnp.zeros_like(inv), jnp.ones_like(inv)
        core = (one, zero, zero, one)
        return Factors(gain, c, zero, zero, core, zero, inv, slope * inv)
    about = deviation if program.about_mean else x
    strength = 2 * variance_share * slope * inv
    scale = divide_or_zero(jnp.ones_like(own.count), program.freedom(own.count))
    b = strength * scale * weighted(weights, about)
    ones = jnp.ones_like(x) if weights is not None else jnp.ones_like(own.count)
    a = mean_share * divide_or_zero(weighted(weights, ones), own.count)
    # b sees the constants 1 and m̄ − m only through m − m_v, which is 0 about the mean.
    mean = jnp.zeros_like(own.mean) if program.about_mean else own.mean + own.mean_low
    b_one = strength * scale * own.count * mean
    radial = _radial(program, numbers, variance, rest, inv)
    if program.spec.center:
        radial = radial + b_one * (mean - gap)
    core = (1 - mean_share, mean_share * -gap, -b_one, radial)
    return Factors(gain, c, a, b, core, own.count, inv, slope * inv)


def _gain(program: Program, numbers: Numbers, inv: Array) -> Array:
    """1/s, times renorm's clipped s/s₀; in units of x, for a rescaled group."""
    if program.renorm and program.spec.divide != "none":
        outer = inverse_divisor(program, numbers, numbers.reference.variance)
        ratio = inverse(inv) * outer
        inv = inv * jnp.clip(ratio, 1 / numbers.r_max, numbers.r_max)
    return inv * numbers.unit if program.spec.precision.rescale else inv


def shares(program: Program, numbers: Numbers) -> tuple[Array, Array]:
    """αₘ and αᵥ as the derivative sees them: 0 for unused, given and detached parts."""
    spec, one = program.spec, jnp.ones_like(numbers.epsilon)
    blend = program.source == "blend"
    mean = numbers.mean_weight * one if blend else one
    variance = numbers.variance_weight * one if blend else one
    if not (program.own and spec.center and "mean" not in spec.detach):
        mean = jnp.zeros_like(one)
    if not (program.own and spec.divide != "none" and "variance" not in spec.detach):
        variance = jnp.zeros_like(one)
    return mean, variance


def _variance(program: Program, own: Own | None, numbers: Numbers):
    """σ², and what of it the derivative holds fixed: σ² − αᵥ v."""
    if own is None:
        return numbers.given.variance, numbers.given.variance
    v = divide_or_zero(own.squares, program.freedom(own.count))
    detached = "variance" in program.spec.detach
    if program.source == "input":
        return v, v if detached else jnp.zeros_like(v)
    rest = (1 - numbers.variance_weight) * numbers.reference.variance
    variance = numbers.variance_weight * v + rest
    return variance, variance if detached else rest


def _gap(program: Program, own: Own | None, numbers: Numbers) -> Array:
    """What a blend adds to x − m: (1 − αₘ)(m − m₀) = m − m̄."""
    if program.source != "blend" or own is None or not program.spec.center:
        return jnp.zeros_like(numbers.epsilon)
    return (1 - numbers.mean_weight) * apart(own, numbers.reference)


def _centre(program: Program, own, numbers: Numbers, x, deviation, gap) -> Array:
    if not program.spec.center:
        return x
    if own is None:
        return (x - numbers.given.mean) - numbers.given.mean_low
    return deviation + gap


def _slope(program: Program, numbers: Numbers, variance: Array, inv: Array) -> Array:
    """S′(σ²); 0 where a floor divides, and at σ = 0 for the square root alone."""
    placement, epsilon = program.spec.epsilon_placement, numbers.epsilon
    if placement == "inside_sqrt":
        return inv / 2
    slope = inverse(2 * root(variance))
    if placement == "outside_sqrt":
        return slope
    value = variance if placement == "floor_var" else root(variance)
    return jnp.where(value <= epsilon, jnp.zeros_like(slope), slope)


def _radial(program: Program, numbers: Numbers, variance, rest, inv) -> Array:
    """ρ, the radial over the tangential gain, for m_v = m̄ or nothing subtracted.

    inside_sqrt (ε + rest)/s² · outside_sqrt (rest + εσ)/(sσ), 1 at σ = 0 · floors
    rest/σ², 1 where the floor divides; rest = σ² − αᵥ v. A variance that is not divided
    by gives 1.
    """
    placement, epsilon = program.spec.epsilon_placement, numbers.epsilon
    one = jnp.ones_like(inv)
    if program.spec.divide == "none":
        return one
    std = root(variance)
    if placement == "inside_sqrt":
        zero = variance + epsilon == 0
        return jnp.where(zero, one, (epsilon + rest) * inverse(variance + epsilon))
    if placement == "outside_sqrt":
        return jnp.where(std == 0, one, (rest * inverse(std) + epsilon) * inv)
    floored = (variance if placement == "floor_var" else std) <= epsilon
    return jnp.where(floored, one, rest * inverse(variance))
