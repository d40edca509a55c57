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
or only x where that is narrower than the accumulation or nothing is subtracted, and
numbers per group. Where S(σ²) = 0, which needs ε = 0, x̂ and J are 0; where it is
infinite, they are NaN.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.custom_derivatives import SymbolicZero

from normjax.program import (
    Given,
    Inputs,
    Numbers,
    Own,
    Program,
    apart,
    finite_under_mask,
    inverse,
    inverse_divisor,
    own_statistics,
)
from normjax.shared import push_statistics, push_value, shared_axes
from normjax.statistics import (
    counts,
    divide_or_zero,
    select,
    total,
    varying,
    weighted,
)


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
    x = program.widen(inputs.x, inputs.numbers)
    deviation, own = own_statistics(program, inputs.weights, x)
    scalars = _scalars(program, own, inputs.numbers)
    z = _standard(program, inputs, own, x, deviation) * scalars.inv
    if program.spec.precision.apply == "folded" and program.spec.center:
        y = _folded(inputs, own, x, scalars)
    else:
        x_hat = _empty_to_zero(inputs, own, _corrected(program, z, scalars))
        y = _applied(program, inputs, x_hat)
    y = y.astype(program.output(inputs.x.dtype)).reshape(inputs.x.shape)
    return y, finite_under_mask(inputs.weights, z), own


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


def _corrected(program: Program, z: Array, scalars: Scalars) -> Array:
    """x̂ = r z − offset, which is z itself but for a blend and a renorm."""
    if program.renorm:
        z = z * scalars.gain
    return z - scalars.offset if program.renorm or program.source == "blend" else z


def _applied(program: Program, inputs: Inputs, x_hat: Array) -> Array:
    """Scale · x̂ + bias, cast as the spec declares."""
    affine, out = program.spec.affine, program.output(inputs.x.dtype)
    y = x_hat.astype(out) if affine is not None and affine.cast == "before" else x_hat
    if inputs.scale is not None:
        y = y * inputs.scale.astype(y.dtype)
    if inputs.bias is not None:
        y = y + inputs.bias.astype(y.dtype)
    return y


def _folded(inputs: Inputs, own, x: Array, scalars: Scalars) -> Array:
    """The same map as x·a + (bias − m·a) with one rounded m, which loses |m|/s u."""
    source = inputs.numbers.given if own is None else own
    a = scalars.gain * scalars.inv
    shift = (source.mean + source.mean_low) * a + scalars.offset
    if inputs.scale is not None:
        a, shift = a * inputs.scale, shift * inputs.scale
    bias = 0 if inputs.bias is None else inputs.bias
    return _empty_to_zero(inputs, own, x) * a + (bias - shift)


def _empty_to_zero(inputs: Inputs, own, x_hat: Array) -> Array:
    """x̂ is 0 in groups without a valid entry."""
    if own is None or inputs.weights is None:
        return x_hat
    return jnp.where(own.count > 0, x_hat, jnp.zeros_like(x_hat))


class Scalars(NamedTuple):
    """Numbers per group: x̂ = gain · z − offset, and inv = 1/s."""

    gain: Array
    offset: Array
    inv: Array


def _scalars(program: Program, own, numbers: Numbers) -> Scalars:
    """What a blend still subtracts from z, (m̄ − m)/s, or renorm's r and −d, and 1/s.

    Plain jnp of numbers per group: the rule differentiates it, to any order.
    """
    zero = jnp.zeros_like(numbers.epsilon)
    source = numbers.given
    variance = source.variance
    if own is not None:
        mean, mean_low = program.detach("mean", (own.mean, own.mean_low))
        variance = divide_or_zero(own.squares, program.freedom(own.count))
        variance = program.detach("variance", variance)
        source = Given(mean, mean_low, variance)
    if program.source == "blend":
        share = numbers.variance_weight
        variance = share * variance + (1 - share) * numbers.reference.variance
    if program.spec.divide == "none":
        inv = zero + 1
    else:
        inv = inverse_divisor(program, numbers, variance)
    if own is not None:
        inv = jnp.where(own.count > 0, inv, 0)
    if program.renorm:
        return _renorm(program, numbers, source, inv)
    if program.source == "blend" and program.spec.center:
        gap = apart(numbers.reference, source)
        return Scalars(zero + 1, (1 - numbers.mean_weight) * gap * inv, inv)
    return Scalars(zero + 1, zero, inv)


def _renorm(program: Program, numbers: Numbers, batch: Given, inv: Array) -> Scalars:
    """r = s/s₀ and d = (m − m₀)/s₀, clipped and without gradient (Ioffe 2017)."""
    reference, outer = numbers.reference, jnp.ones_like(inv)
    if program.spec.divide != "none":
        outer = inverse_divisor(program, numbers, reference.variance)
    r = jnp.clip(inverse(inv) * outer, 1 / numbers.r_max, numbers.r_max)
    d = jnp.zeros_like(r)
    if program.spec.center:
        d = jnp.clip(apart(batch, reference) * outer, -numbers.d_max, numbers.d_max)
    return Scalars(*jax.lax.stop_gradient((r, -d)), inv)


@partial(_ruled.defjvp, symbolic_zeros=True)
def _rule(program: Program, primals: tuple[Inputs], tangents: tuple[Inputs]):
    """Evaluate, then push; only z or x and small arrays enter the tangent map."""
    (inputs,), (moving,) = primals, tangents
    y, z, own = _ruled(program, inputs)
    keep_x = jnp.finfo(inputs.x.dtype).bits < jnp.finfo(z.dtype).bits
    keep_x = keep_x or not program.spec.center
    if not keep_x:  # or XLA computes both again on the way back, by reductions of x
        z, own = jax.tree.map(jax.lax.optimization_barrier, (z, own))
    known = inputs._replace(x=inputs.x if keep_x else z)
    moving = jax.tree.map(_present, moving._replace(weights=None), is_leaf=_is_zero)
    # Recomputing elementwise arithmetic is free beside keeping one more array for it.
    push = jax.checkpoint(
        partial(_push, program, keep_x, jax.typeof(y)), prevent_cse=False
    )
    return (y, z, own), push(known, own, moving)


def _is_zero(tangent: Any) -> bool:
    return isinstance(tangent, SymbolicZero)


def _present(tangent: Any):
    """None for a tangent that is zero by construction: no term is computed for it."""
    return None if _is_zero(tangent) else tangent


def _push(program: Program, keep_x: bool, y, known: Inputs, own, moving: Inputs):
    """The tangent map z˙ = (ẋ − ṁ)/s − z · ṡ/s, and on to y˙, linear in ``moving``.

    ``known.x`` holds z, or x itself if ``keep_x``. Without a mean z˙ = x (1/s)˙ + ẋ/s.
    """
    scalars = _scalars(program, own, known.numbers)
    inv, z, x = scalars.inv, known.x, known.x
    if keep_x:
        x = program.widen(x, known.numbers)
        z = finite_under_mask(known.weights, _standard(program, known, own, x) * inv)
    t = None if moving.x is None else program.widen(moving.x, known.numbers)
    own_dot, rest, shared = None, t, shared_axes(program, known, moving)
    if shared and own is not None and t is not None:
        own_dot = push_statistics(program, shared, own, z, inv, t)
    elif own is not None:
        own_dot, rest = _push_own(program, known, own, z, inv, t)
    numbers_dot = jax.tree.map(
        lambda value, dot: jnp.zeros_like(value) if dot is None else dot,
        known.numbers,
        moving.numbers,
    )
    _, scalars_dot = jax.jvp(
        partial(_scalars, program), (own, known.numbers), (own_dot, numbers_dot)
    )
    ratio, shift = scalars_dot.inv, jnp.zeros_like(inv)
    if shared and own_dot is not None and t is not None:
        ratio = ratio * inverse(inv)
        y_dot = push_value(shared, known, moving, z, t, (inv, ratio, own_dot.mean))
        z_dot = z * ratio + (t - own_dot.mean) * inv
        return y_dot.astype(y.dtype).reshape(y.shape), z_dot, own_dot
    if program.spec.center:
        ratio = ratio * inverse(inv)
        moved = numbers_dot.given if own_dot is None else own_dot
        detached = own is not None and "mean" in program.spec.detach
        if own is not None and not (detached or program.spec.axis_names):
            t = rest  # ẋ − ṁ is one array for both: one sum less on the way back
        elif not detached:
            shift = (moved.mean + moved.mean_low) * inv
    if own is not None and program.spec.axis_names:
        sums = jnp.broadcast_arrays(ratio, shift, scalars_dot.offset)
        ratio, shift, offset = varying(program.spec.axis_names, jnp.stack(sums))
        scalars_dot = scalars_dot._replace(offset=offset)
    if program.spec.center:
        z_dot = z * ratio - shift
    else:
        z_dot = finite_under_mask(known.weights, x) * ratio
    if t is not None:
        z_dot = z_dot + t * inv
    y_dot = _corrected(program, z_dot, scalars_dot._replace(gain=scalars.gain))
    if known.scale is not None:
        y_dot = y_dot * known.scale
    if moving.scale is not None:
        y_dot = y_dot + _corrected(program, z, scalars) * moving.scale
    if moving.bias is not None:
        y_dot = y_dot + moving.bias
    return y_dot.astype(y.dtype).reshape(y.shape), z_dot, own_dot


def _push_own(program: Program, known: Inputs, own: Own, z: Array, inv, t):
    """Tangents of the input's own statistics, and t without its mean.

    The mean goes first and the squares see t − mean(t): exact where the variance is
    about the mean (x − m_v is s z plus a constant), and accurate for a t with a large
    offset. Over devices both sums travel together, the second with t about the mean of
    its device and what that left out: Σ w z is 0 over all devices, not over one.
    """
    # Under shard_map each zero must vary over devices as its own number does.
    none, weights = Own(*map(jnp.zeros_like, own)), known.weights
    if t is None:
        return none, None
    names, rest = program.spec.axis_names, t
    first, mean_dot, second = none.mean, none.mean, none.squares
    if program.needs_mean:
        here = own.count
        if names:
            here = counts(program.axes, program.view, weights, t.dtype)
        first = total(program.axes, weighted(weights, t))
        mean_dot = divide_or_zero(first, here)
        rest = t - mean_dot
    if program.spec.divide != "none":
        second = total(program.axes, weighted(weights, z * select(weights, rest)))
    if names:  # both sums in one collective: t about the mean of this device
        centred = z
        if program.about_mean and not program.spec.center:
            centred = z - (own.mean + own.mean_low) * inv
        if program.needs_mean and program.spec.divide != "none":
            second = second + mean_dot * total(
                program.axes, weighted(weights, select(weights, centred))
            )
        first, second = jax.lax.psum(jnp.stack([first, second]), names)
        mean_dot = divide_or_zero(first, own.count)
    squares_dot = 2 * inverse(inv) * second
    if program.needs_mean and program.spec.divide in ("rms", "l2"):
        mean = own.mean + own.mean_low
        squares_dot = squares_dot + 2 * own.count * mean * mean_dot
    return none._replace(mean=mean_dot, squares=squares_dot), rest
