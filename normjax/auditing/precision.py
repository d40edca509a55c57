"""How the variance is computed, from what a large offset does to it."""

from __future__ import annotations

import numpy as np

from normjax.auditing.formula import Formula
from normjax.auditing.probing import Probe
from normjax.auditing.record import Finding

# Offsets 2^r in units of about one standard deviation, by the unit of rounding, and the
# largest r at which a two-pass variance is still right: a one-pass one errs by u 4^r.
OFFSETS = {
    2.0**-53: ((20, 26, 40, 50), 26),
    2.0**-24: ((5, 9, 12, 17, 22), 12),
    2.0**-11: ((3, 5, 7), 5),
    2.0**-8: ((2, 4, 6), 4),
}
SPREAD = 1.2
WRONG = 0.02
CLAMPED = 0.01
DRAWS = 3


def variance_finding(probe: Probe, formula: Formula) -> Finding | None:
    """Whether the variance is a difference of large numbers, E[x²] − E[x]².

    The output's slope along x − mean gives 1/D, hence the variance that the callable
    used; its relative error grows as u(2^r)² at an offset of 2^r standard deviations if
    it is computed in one pass, and stays small if not.

    Args:
        probe: the callable.
        formula: what it computes.

    Returns:
        The finding; None where no variance of three or more elements is divided by.
    """
    sizes = [len(each) for each in formula.members]
    if (formula.alpha, formula.measure, formula.power) != (1, "std", 0.5) or not sizes:
        return None
    if min(sizes) < 3:
        return None
    offsets, safe = OFFSETS[probe.limits.unit]
    errors = {r: _error(probe, formula, r) for r in offsets}
    early = [e for r, e in errors.items() if r <= safe]
    one_pass = any(not abs(e) <= WRONG for e in early)
    facts = {"algorithm": "one_pass" if one_pass else "stable", "errors": errors}
    shown = ", ".join(f"{e:.1g} at 2^{r}" for r, e in errors.items())
    evidence = f"relative error of the variance {shown} standard deviations"
    if not one_pass:
        return Finding("variance", "stable", "certain", evidence, facts=facts)
    missing = any(np.isnan(e) for e in errors.values())
    below = "NaN where it is negative" if missing else "clamped at 0"
    if not missing and not any(e < CLAMPED - 1 for e in errors.values()):
        below = "clamping not seen"
    text = f"ONE-PASS, {below}"
    return Finding("variance", text, "certain", evidence, defect=True, facts=facts)


def _error(probe: Probe, formula: Formula, r: int) -> float:
    """Median of v_used/v − 1 over groups; NaN if any output is not finite."""
    found = []
    for _ in range(DRAWS):
        x = np.zeros(probe.shape)
        flat = x.reshape(-1)
        for inside in formula.members:
            center = 1.37 * 2.0**r * probe.rng.uniform(1, 1.4)
            # A full mantissa: squares of round offsets are exact and hide the fault.
            center = float(probe.cast(np.array(center)))
            grid = max(
                2.0**-8, 2.0 ** np.floor(np.log2(center)) * 2 * probe.limits.unit
            )
            spread = np.round(SPREAD * probe.rng.normal(size=len(inside)) / grid)
            flat[inside] = center + grid * spread
        x = probe.cast(x)
        found += _ratios(formula, x, probe(x))
    ratios = np.array(found)
    return float(np.median(ratios) - 1) if np.isfinite(ratios).all() else np.nan


def _ratios(formula: Formula, x: np.ndarray, y: np.ndarray) -> list[float]:
    """The variance that each group was divided by, over the variance that it has."""
    scale = np.ones(x.shape) if formula.scale is None else formula.scale
    bias = np.zeros(x.shape) if formula.bias is None else formula.bias
    with np.errstate(all="ignore"):
        z = np.where(scale == 0, np.nan, (y - bias) / scale).ravel()
    values, kept = x.ravel(), scale.ravel() != 0
    found = []
    for inside in formula.members:
        chosen = inside[kept[inside]]
        square = np.var(values[inside]) * formula.kappa(len(inside))
        along = values[chosen] - values[chosen].mean()
        if not along.any():  # a coarse grid rounded them to one value
            continue
        slope = np.sum(z[chosen] * along) / np.sum(along**2)
        divisor = 1 / slope if slope else np.inf
        if formula.placement == "outside":
            used = (divisor - formula.epsilon) ** 2
        else:
            used = divisor**2 - formula.epsilon * (formula.placement == "inside")
        found.append(used / square)
    return found
