"""What divides the sum of squares: n, n − 1, or nothing.

At one group size (w, κ, ε) and (w/κ^p, 1, ε/κ) are the same function, so this needs a
second size, a known parameter, or a prior: a gain of one, a round ε.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from normjax.auditing.fitting import Fit, odd_parts, spread_probes
from normjax.auditing.formula import DIVISORS, Formula
from normjax.auditing.grouping import Grouping, product_groups
from normjax.auditing.probing import Probe
from normjax.auditing.record import Finding
from normjax.auditing.stabilizer import (
    MANTISSAS,
    Stabilizer,
    round_value,
    scaled,
    tolerance,
)
from normjax.auditing.stored import Match

# Rank of the last mantissa that counts as round: 1, 5, 2, 3.
ROUND = 3
WORDS = {"n": "0", "n-1": "1", "1": "sum in place of mean"}


@dataclass(frozen=True)
class Divisor:
    """What divides the sum, and what says so.

    Attributes:
        value: one of ``DIVISORS``; None if it is open.
        confidence: as in ``Finding``.
        evidence: the measurements, strongest first.
    """

    value: str | None
    confidence: str
    evidence: tuple[str, ...]


def find_divisor(
    probe: Probe,
    fit: Fit,
    stabilizer: Stabilizer,
    grouping: Grouping,
    matches: tuple[Match, ...],
) -> Divisor:
    """Ask a second size, parameters, a gain of one, a round ε, in this order."""
    if fit.formula.measure == "none":
        return Divisor("n", "certain", ("nothing is divided",))
    count = grouping.size
    if count is None:
        return Divisor(None, "open", ("groups differ in size",))
    sizes = _by_size(probe, fit, grouping, count)
    stored = _by_parameters(matches, fit.formula, count)
    unit = _by_gain(probe, fit, count)
    number = _by_epsilon(probe, fit, stabilizer, count)
    found = [answer for answer in (sizes, stored, unit, number) if answer is not None]
    if not found:
        return Divisor(None, "open", ("gain is free, n is fixed, no round epsilon",))
    value = found[0][0]
    agreeing = tuple(text for divisor, text in found if divisor == value)
    sure = sizes is not None or stored is not None
    return Divisor(value, "certain" if sure else "assumed", agreeing)


def _gain_ratio(formula: Formula, divisor: str, count: int) -> float:
    """A/w of a group of ``count``: κ^−p."""
    return replace(formula, divisor=divisor).kappa(count) ** -formula.power


def _nearest(ratios: dict[str, float], measured: float, allowed: float) -> str | None:
    """The one divisor whose ratio is the measured one."""
    close = [
        name for name, ratio in ratios.items() if abs(measured / ratio - 1) < allowed
    ]
    return close[0] if len(close) == 1 else None


def _by_size(probe: Probe, fit: Fit, grouping: Grouping, count: int):
    """Compare the gain at a second size of a reduced axis."""
    for axis, kind in enumerate(grouping.axes):
        size = probe.shape[axis]
        gain = fit.formula.scale
        if kind.kind != "reduced" or gain is None:
            continue
        if np.ptp(gain, axis=axis).max() > 10 * probe.limits.fit * np.abs(gain).max():
            continue
        shorter = 2 if size != 2 else 3
        shape = tuple(shorter if a == axis else n for a, n in enumerate(probe.shape))
        resized = probe.target.resized(shape)
        if resized is None:
            continue
        other = Probe(resized, probe.seed, probe.max_calls)
        other.limits = probe.limits
        groups = product_groups(grouping.axes, shape)
        inputs = spread_probes(other, groups, fit.exponent)[:1]
        (z,), _, _ = odd_parts(other, inputs)
        bare = replace(fit.formula, groups=groups, scale=None, bias=None)
        with np.errstate(all="ignore"):
            here = np.median(z / bare.reference(inputs[0]), axis=axis)
            there = np.median(gain, axis=axis)
            measured = float(np.nanmedian(here / there))
        fewer = count * shorter // size
        ratios = {
            divisor: _gain_ratio(fit.formula, divisor, fewer)
            / _gain_ratio(fit.formula, divisor, count)
            for divisor in DIVISORS
        }
        found = _nearest(ratios, measured, 10 * probe.limits.fit)
        if found is not None:
            return (
                found,
                f"gain at n = {fewer} is {measured:.6g} of that at n = {count}",
            )
    return None


def _by_parameters(matches: tuple[Match, ...], formula: Formula, count: int):
    """Compare the gain with a parameter that has its values."""
    for match in matches:
        if match.role == "scale" and match.ratio is not None:
            ratios = {d: _gain_ratio(formula, d, count) for d in DIVISORS}
            ratio = match.ratio
            found = min(ratios, key=lambda d: abs(ratio / ratios[d] - 1))
            return found, f"parameter {match.name} is the gain"
    return None


def _by_gain(probe: Probe, fit: Fit, count: int):
    """A gain that is the same everywhere is taken for one."""
    gain = fit.formula.scale
    if gain is None:
        return None
    seen = gain[fit.formula.groups >= 0]
    measured = float(np.median(seen))
    allowed = max(probe.limits.fit, 20 * fit.residual)
    if np.ptp(seen) > 2 * allowed * abs(measured) or not measured:
        return None
    ratios = {d: _gain_ratio(fit.formula, d, count) for d in DIVISORS}
    found = _nearest(ratios, measured, allowed)
    return None if found is None else (found, f"gain of one (measured {measured:.6g})")


def _by_epsilon(probe: Probe, fit: Fit, stabilizer: Stabilizer, count: int):
    """The one reading in which ε is the roundest number."""
    if stabilizer.placement not in ("inside", "outside"):
        return None
    near = tolerance(probe, stabilizer)
    ranks = {}
    for divisor in DIVISORS:
        value = scaled(stabilizer, fit.formula, divisor, count)
        rounded = round_value(value, near)
        if rounded is not None and rounded[1] % len(MANTISSAS) <= ROUND:
            ranks[divisor] = rounded[1] % len(MANTISSAS), rounded[0], value
    if "n" in ranks:  # an L2 norm must be the only reading
        ranks.pop("1", None)
    if not ranks:
        return None
    best = min(rank for rank, *_ in ranks.values())
    simplest = [d for d, (rank, *_) in ranks.items() if rank == best]
    if len(simplest) > 1:
        return None
    _, number, value = ranks[simplest[0]]
    return simplest[0], f"round epsilon {number:g} (read as {value:.8g})"


def settled(
    probe: Probe, fit: Fit, stabilizer: Stabilizer, divisor: Divisor, count: int | None
) -> Formula:
    """The formula with its gain and ε in the units of what divides."""
    chosen = divisor.value or "n"
    formula = replace(fit.formula, divisor=chosen)
    kappa = formula.kappa(count) if count else 1.0
    gain = fit.formula.scale
    if gain is None or formula.measure == "none":
        return formula
    epsilon = scaled(stabilizer, fit.formula, chosen, count or 1)
    nearest = round_value(epsilon, tolerance(probe, stabilizer))
    if nearest is not None:
        epsilon = nearest[0]
    return replace(formula, scale=gain * kappa**formula.power, epsilon=epsilon)


def equivalents(fit: Fit, stabilizer: Stabilizer, count: int) -> str:
    """The settings between which nothing decides, for the line "open"."""
    texts = []
    for divisor in DIVISORS:
        factor = 1 / _gain_ratio(fit.formula, divisor, count)
        epsilon = scaled(stabilizer, fit.formula, divisor, count)
        words = "sum" if divisor == "1" else f"ddof {WORDS[divisor]}"
        gain = "" if divisor == "n" else f" with gain × {factor:.6g}"
        texts.append(f"{words}, eps {epsilon:.6g}{gain}")
    return " = ".join(texts)


def ddof_finding(fit: Fit, divisor: Divisor) -> Finding:
    """For the report."""
    evidence = "; ".join(divisor.evidence)
    facts = {
        "ddof": {"n": 0, "n-1": 1}.get(divisor.value or ""),
        "divisor": divisor.value,
        "evidence": list(divisor.evidence),
    }
    value = None if divisor.value is None else WORDS[divisor.value]
    if fit.formula.measure not in ("std", "rms") and divisor.value == "n":
        value = "of the mean, none"
    # No library normalizes with n − 1.
    defect = divisor.value == "n-1"
    return Finding("ddof", value, divisor.confidence, evidence, defect, facts)
