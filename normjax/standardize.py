"""x, scale, bias → y with one derivative rule around all of it, and its factors.

Per group, with m̄ the subtracted mean and s = S(σ²) the divisor (``normjax.spec``):

    c = x − m̄      x̂ = c / s      y = scale · x̂ + bias
    J = ∂x̂/∂x = (I − U Vᵀ) / s         U = [1, c]    V = [a, b]
    a = αₘ w / N                       b = (S′(σ²)/s) αᵥ · 2 w∘(x − m_v)/(N − ddof)

αₘ, αᵥ are the shares of the input's own statistics (1; 0 for given or detached ones),
m_v is the mean that the variance is taken about (0 for rms and l2). For the plain
centred map J = P/s − c cᵀ/((n − ddof) s³) with P = I − 11ᵀ/n.

The rule is a ``custom_jvp``: its tangent map is linear, so forward and reverse mode,
vmap and higher orders all come from it. For the backward pass it keeps z = (x − m)/s,
or only x where that is narrower than the accumulation, and numbers per group. Where
S(σ²) = 0, which needs ε = 0, x̂ and J are 0; where it is infinite, they are NaN.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.custom_derivatives import SymbolicZero

from normjax.spec import NormSpec
from normjax.statistics import (
    at_least,
    counts,
    deviations,
    divide_or_zero,
    select,
    total,
    weighted,
)


class Given(NamedTuple):
    """Statistics from elsewhere, reduced axes kept: a mean pair and a variance."""

    mean: Array
    mean_low: Array
    variance: Array


class Numbers(NamedTuple):
    """The leaves of a spec that this map uses, and given statistics (0 if unused)."""

    epsilon: Array
    mean_weight: Array
    variance_weight: Array
    given: Given


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

    ``source`` says whose statistics are used: ``"input"``, ``"given"`` or ``"blend"``.
    """

    spec: NormSpec
    view: tuple[int, ...]
    axes: tuple[int, ...]
    source: str

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

    def widen(self, x: Array) -> Array:
        """x as the group view, in the accumulation dtype."""
        dtype = at_least(x.dtype, self.spec.precision.accumulate)
        return x.reshape(self.view).astype(dtype)


def standardize(program: Program, inputs: Inputs) -> Array:
    """Standardize and apply the affine part, with the closed-form derivative rule.

    Args:
        program: the static part.
        inputs: x, and what broadcasts to its group view. Weights carry no gradient.

    Returns:
        y, in x's shape and the output dtype.
    """
    return _ruled(program, inputs)[0]


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _ruled(program: Program, inputs: Inputs):
    """y, z = (x − m)/s and the input's own statistics: what the tangent map needs."""
    x = program.widen(inputs.x)
    deviation, own = own_statistics(program, inputs.weights, x)
    offset, inv = _scalars(program, own, inputs.numbers)
    z = _standard(program, inputs, own, x, deviation) * inv
    x_hat = _empty_to_zero(inputs, own, _less(program, z, offset))
    affine, output = program.spec.affine, program.spec.precision.output
    out = inputs.x.dtype if output == "input" else jnp.dtype(output)
    y = x_hat.astype(out) if affine is not None and affine.cast == "before" else x_hat
    if inputs.scale is not None:
        y = y * inputs.scale.astype(y.dtype)
    if inputs.bias is not None:
        y = y + inputs.bias.astype(y.dtype)
    y = y.astype(out).reshape(inputs.x.shape)
    return y, finite_under_mask(inputs.weights, z), own


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
    return deviation, own


def _standard(program: Program, inputs: Inputs, own, x: Array, deviation=None) -> Array:
    """s z: x without the input's own mean, or without the given one if that is used.

    Without ``deviation`` the mean pair is subtracted from x again.
    """
    given = inputs.numbers.given
    if not program.spec.center:
        return x
    if not program.own:
        return (x - given.mean) - given.mean_low
    if deviation is not None:
        return deviation
    mean, mean_low = program.detach("mean", (own.mean, own.mean_low))
    return (x - mean) - mean_low


def _less(program: Program, z: Array, offset: Array) -> Array:
    """x̂ = z − (m̄ − m)/s, where only a blend has an m̄ that is not m."""
    return z - offset if program.source == "blend" else z


def _empty_to_zero(inputs: Inputs, own, x_hat: Array) -> Array:
    """x̂ is 0 in groups without a valid entry."""
    if own is None or inputs.weights is None:
        return x_hat
    return jnp.where(own.count > 0, x_hat, jnp.zeros_like(x_hat))


def _scalars(program: Program, own, numbers: Numbers) -> tuple[Array, Array]:
    """Per group: what a blend still subtracts from z, (m̄ − m)/s, and 1/s.

    Plain jnp of numbers per group: the rule differentiates it, to any order.
    """
    zero = jnp.zeros_like(numbers.epsilon)
    shift, given = zero, numbers.given
    if program.source == "blend" and program.spec.center:
        mean, mean_low = program.detach("mean", (own.mean, own.mean_low))
        gap = (given.mean - mean) + (given.mean_low - mean_low)
        shift = (1 - numbers.mean_weight) * gap
    if program.spec.divide == "none":
        inv = zero + 1
    elif not program.own:
        return zero, inverse_divisor(program, numbers, given.variance)
    else:
        variance = divide_or_zero(own.squares, program.freedom(own.count))
        variance = program.detach("variance", variance)
        if program.source == "blend":
            share = numbers.variance_weight
            variance = share * variance + (1 - share) * given.variance
        inv = inverse_divisor(program, numbers, variance)
    inv = inv if own is None else jnp.where(own.count > 0, inv, 0)
    return shift * inv, inv


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


@partial(_ruled.defjvp, symbolic_zeros=True)
def _rule(program: Program, primals: tuple[Inputs], tangents: tuple[Inputs]):
    """Evaluate, then push; only z or x and small arrays enter the tangent map."""
    (inputs,), (moving,) = primals, tangents
    y, z, own = _ruled(program, inputs)
    narrow = jnp.finfo(inputs.x.dtype).bits < jnp.finfo(z.dtype).bits
    known = inputs._replace(x=inputs.x if narrow else z)
    moving = jax.tree.map(_present, moving._replace(weights=None), is_leaf=_is_zero)
    # Recomputing elementwise arithmetic is free beside keeping one more array for it.
    push = jax.checkpoint(
        partial(_push, program, narrow, jax.typeof(y)), prevent_cse=False
    )
    return (y, z, own), push(known, own, moving)


def _is_zero(tangent: Any) -> bool:
    return isinstance(tangent, SymbolicZero)


def _present(tangent: Any):
    """None for a tangent that is zero by construction: no term is computed for it."""
    return None if _is_zero(tangent) else tangent


def _push(program: Program, narrow: bool, y, known: Inputs, own, moving: Inputs):
    """The tangent map z˙ = (ẋ − ṁ)/s − z · ṡ/s, and on to y˙, linear in ``moving``.

    ``known.x`` holds z, or x itself if ``narrow``.
    """
    offset, inv = _scalars(program, own, known.numbers)
    z = known.x
    if narrow:
        z = _standard(program, known, own, program.widen(z)) * inv
        z = finite_under_mask(known.weights, z)
    t = None if moving.x is None else program.widen(moving.x)
    own_dot = None if own is None else _push_own(program, known, own, z, inv, t)
    numbers_dot = jax.tree.map(
        lambda value, dot: jnp.zeros_like(value) if dot is None else dot,
        known.numbers,
        moving.numbers,
    )
    _, (offset_dot, inv_dot) = jax.jvp(
        partial(_scalars, program), (own, known.numbers), (own_dot, numbers_dot)
    )
    z_dot = z * (inv_dot * inverse(inv))
    if program.spec.center:
        moved = numbers_dot.given if own_dot is None else own_dot
        if own_dot is None or "mean" not in program.spec.detach:
            z_dot = z_dot - (moved.mean + moved.mean_low) * inv
    if t is not None:
        z_dot = z_dot + t * inv
    y_dot = _less(program, z_dot, offset_dot)
    if known.scale is not None:
        y_dot = y_dot * known.scale
    if moving.scale is not None:
        y_dot = y_dot + _less(program, z, offset) * moving.scale
    if moving.bias is not None:
        y_dot = y_dot + moving.bias
    return y_dot.astype(y.dtype).reshape(y.shape), z_dot, own_dot


def _push_own(program: Program, known: Inputs, own: Own, z: Array, inv, t) -> Own:
    """Tangents of the input's own statistics, in the accumulation dtype.

    The mean goes first and the squares see t − mean(t): exact where the variance is
    about the mean (x − m_v is s z plus a constant), and accurate for a t with a large
    offset.
    """
    zero, weights = jnp.zeros_like(own.mean), known.weights
    if t is None:
        return Own(zero, zero, zero, zero)
    mean_dot, rest = zero, t
    if program.needs_mean:
        mean_dot = divide_or_zero(total(program.axes, weighted(weights, t)), own.count)
        rest = t - mean_dot
    squares_dot = zero
    if program.spec.divide != "none":
        product = total(program.axes, weighted(weights, z * select(weights, rest)))
        squares_dot = 2 * inverse(inv) * product
        if not program.about_mean:
            mean = own.mean + own.mean_low
            squares_dot = squares_dot + 2 * own.count * mean * mean_dot
    return Own(zero, mean_dot, zero, squares_dot)
