"""How far rounding can move the output of a layer, before it is run."""

from __future__ import annotations

import math
from dataclasses import dataclass

import jax.numpy as jnp

from normjax.spec import NormSpec, check_numbers
from normjax.statistics import at_least
from normjax.verify.oracles import numpy_divisor
from normjax.verify.tolerance import unit_roundoff

# A sum of n terms errs by at most SUM u log₂n Σ|xᵢ|. XLA adds in the order of a tree:
# the most that was measured on a CPU is 1.6, for n = 3, and 0.5 for n from 100 to 2²⁰.
SUM = 2.0
# Roundings of σ² + ε, the root, its inverse and the product, and of what is folded.
ELEMENTWISE = 4.0


@dataclass(frozen=True)
class PrecisionBound:
    """A bound on ‖x̂ − x̂*‖/‖x̂*‖ of one group, and the parts that it is made of.

    Attributes:
        value: (1 + deviation)(1 + divisor)(1 + rounding) − 1.
        deviation: of x − mean, relative to its norm, and of a folded application.
        divisor: of 1/S(σ²), relative.
        rounding: of the last operations, and of the output to its dtype.
        variance: of σ², relative.
    """

    value: float
    deviation: float
    divisor: float
    rounding: float
    variance: float

    @property
    def variance_lost(self) -> bool:
        """Whether no digit of the variance is certain."""
        return not self.variance < 1


def precision_bound(
    spec: NormSpec,
    dtype,
    n: int,
    kappa: float,
    *,
    std: float = 1.0,
    anchor: float | None = None,
) -> PrecisionBound:
    """Bound the error of x̂ by rounding, for any group with these few numbers.

    The error is the normwise relative one of a group, ‖x̂ − x̂*‖/‖x̂*‖ in the 2-norm,
    where x̂* is exact for the *rounded* input. With u the unit roundoff of the dtype of
    accumulation, g = 2 u log₂n, q = √(1+κ²) and t = |x₀ − mean|/std of the element x₀
    that the shifted algorithm subtracts:

        algorithm   mean errs by   x − mean by    σ² by, relative
        shifted     h = g √(1+t²)  e = u √(1+t²)  w = g + 2e, and too large by h²
        two_pass    h = g q        e = u          w = g + 2e, and too large by h²
        one_pass    h = g q        e = u          w = g q² + 2κh + h²

    in units of std. A centred x̂ errs by h + e, and by 4 u q more if the mean is folded
    into x·a + (b − m·a); σ² about 0 (rms, l2) has w = g. 1/S(σ²) then errs by the
    larger of

        1 − S(σ²)/S(σ² (1 + w + h²))   and   S(σ²)/S(σ² (1 − w)) − 1 ≤ 1/√(1−w) − 1

    At w ≥ 1 (one_pass at κ² g of about 1/4) the variance may be lost altogether: the
    second is S(σ²)/S(0) − 1, which for inside_sqrt is 1/√share − 1 with the stabilizer
    share ε/(σ²+ε), and inf without ε. The last operations add 4 u, an output in a
    narrower dtype its unit roundoff, and errors multiply.

    The bound is inf where a sum leaves the dtype of accumulation and nothing is
    rescaled. It says nothing of numbers near the smallest of a dtype, of statistics
    from elsewhere, and of the affine part.

    Args:
        spec: statistics from the input; its leaves are plain numbers.
        dtype: of the input.
        n: valid elements of the group, at least 2.
        kappa: κ = |mean|/std of the group.
        std: of the group, in the units of x: it decides what ε weighs, and overflow.
        anchor: t, if it is known; by default the largest that there can be, √(n−1).

    Returns:
        A ``PrecisionBound``.

    Raises:
        ValueError: for a blend or renorm, fewer than two elements, or a number that is
            negative or not finite.

    Example:
        >>> import normjax as nj
        >>> safe, fast = (
        ...     nj.layer_norm(),
        ...     nj.layer_norm(precision=nj.Precision(algorithm="one_pass")),
        ... )
        >>> nj.verify.precision_bound(safe, "float32", 4, 1e4).value < 1e-5
        True
        >>> lost = nj.verify.precision_bound(fast, "float32", 4, 1e4)
        >>> lost.variance_lost, round(lost.value)
        (True, 316)

    Reference: Higham, "Accuracy and Stability of Numerical Algorithms" (2002), sections
    1.9 and 4.2; Chan, Golub, LeVeque (1983) for the variance.
    """
    t = math.sqrt(max(1, n - 1)) if anchor is None else anchor
    _validate(spec, n, kappa=kappa, std=std, anchor=t)
    precision = spec.precision
    wide = at_least(dtype, precision.accumulate)
    u, q = unit_roundoff(wide), math.hypot(1, kappa)
    shifted = precision.algorithm == "shifted"
    distance = math.hypot(1, t) if shifted else q
    moved = SUM * math.log2(n) * u * distance
    rounded = u * distance if shifted else u
    low, high = _variance(spec, n, u, kappa, moved, rounded)
    deviation = moved + rounded if spec.center else 0.0
    if spec.center and precision.apply == "folded":
        deviation += ELEMENTWISE * u * q
    divisor = _divisor(spec, n, std, kappa, low, high)
    rounding = ELEMENTWISE * u + _output(spec, dtype, wide)
    value = math.expm1(sum(map(math.log1p, (deviation, divisor, rounding))))
    if not precision.rescale and _overflows(spec, wide, n, std, kappa, distance):
        value = math.inf
    return PrecisionBound(value, deviation, divisor, rounding, variance=high)


def _validate(spec: NormSpec, n: int, **numbers) -> None:
    check_numbers(spec)
    if spec.statistics != "input":
        raise ValueError(
            f"statistics is {spec.statistics!r}: only statistics='input' has a bound "
            "that depends on n and kappa alone"
        )
    if n < 2:
        raise ValueError(f"n is {n}, expected 2 or more elements in a group")
    for name, value in numbers.items():
        if not 0 <= value < math.inf or (name == "std" and value == 0):
            least = "above 0" if name == "std" else "0 or more"
            raise ValueError(f"{name} is {value}, expected a finite number {least}")


def _variance(
    spec: NormSpec, n: int, u: float, kappa: float, moved: float, rounded: float
) -> tuple[float, float]:
    """By how much, relatively, the computed σ² is too small, and too large, at most."""
    g = SUM * math.log2(n) * u
    if spec.divide == "none":
        return 0.0, 0.0
    if spec.divide != "std":
        return g, g
    if spec.precision.algorithm == "one_pass":
        w = g * (1 + kappa**2) + 2 * kappa * moved + moved**2
        return w, w
    return g + 2 * rounded, g + 2 * rounded + moved**2


def _divisor(
    spec: NormSpec, n: int, std: float, kappa: float, low: float, high: float
) -> float:
    """The relative error of 1/S(σ²), for a computed σ² between 1 − low and 1 + high."""
    if spec.divide == "none":
        return 0.0
    variance = std**2 * (1 if spec.divide == "std" else 1 + kappa**2)
    variance *= n if spec.divide == "l2" else n / max(1, n - spec.ddof)

    def s(value: float) -> float:
        return float(numpy_divisor(value, float(spec.epsilon), spec.epsilon_placement))

    lost = s(variance) / s(0.0) - 1 if s(0.0) > 0 else math.inf
    # For every placement S(σ²)/S(σ² (1 − w)) is below the ratio without ε.
    small = math.expm1(-0.5 * math.log1p(-low)) if low < 1 else math.inf
    return max(min(small, lost), 1 - s(variance) / s(variance * (1 + high)))


def _output(spec: NormSpec, dtype, wide) -> float:
    """The unit roundoff of an output that is narrower than the accumulation."""
    name = spec.precision.output
    out = jnp.dtype(dtype if name == "input" else name)
    return unit_roundoff(out) if jnp.finfo(out).bits < jnp.finfo(wide).bits else 0.0


def _overflows(
    spec: NormSpec, wide, n: int, std: float, kappa: float, distance: float
) -> bool:
    """Whether a sum of the statistics can leave the dtype of accumulation."""
    with_mean = spec.center or spec.divide == "std"
    sums = [n * std * distance] if with_mean else []
    squares = n * std**2
    if spec.divide in ("rms", "l2") or spec.precision.algorithm == "one_pass":
        squares *= 1 + kappa**2
    if spec.divide != "none":
        sums.append(squares)
    return max(sums, default=0.0) > float(jnp.finfo(wide).max)
