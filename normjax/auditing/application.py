"""How mean, divisor, gain and bias are applied: (x − m)·a + b, or x·a + (b − m·a)."""

from __future__ import annotations

import numpy as np

from normjax.auditing.formula import Formula
from normjax.auditing.probing import Probe
from normjax.auditing.record import Finding

# Binary exponent of the offset, where sums on the grid of 1/64 are exact.
OFFSET = {2.0**-53: 26, 2.0**-24: 9}
GRID = 1 / 64
DRAWS = 4
SCATTER = 0.08  # of R u: folded forms left 0.26 or more, centered ones 0.003 or less
WHOLE = 0.04  # of a unit in the last place of the offset: one fused rounding left 0.2


def application_finding(probe: Probe, formula: Formula) -> Finding | None:
    """Whether an offset of R standard deviations costs R roundoffs in y.

    The output at offset c and at 0, in units of the normalized value, on inputs whose
    mean is exact: their difference along x − m is an error of the divisor; what
    scatters about it is the rounding of x·a, in a folded form; what all elements have
    in common is an error of the mean, of whole units in the last place of c, or the
    rounding of b − m·a that a fused multiply-add adds once.

    Args:
        probe: the callable.
        formula: what it computes.

    Returns:
        The finding; None where no mean is subtracted and divided, groups have fewer
        than four elements, or the dtype is a half type.
    """
    if (formula.alpha, formula.measure, formula.power) != (1, "std", 0.5):
        return None
    sizes = [inside.size for inside in formula.members]
    if min(sizes) < 4 or probe.limits.unit not in OFFSET:
        return None
    unit = probe.limits.unit
    scale = np.ones(probe.shape) if formula.scale is None else formula.scale
    scatters, shifts, ratios = [], [], []
    for _ in range(DRAWS):
        offset, deviation = _inputs(probe, formula)
        near, far = probe(deviation), probe(offset + deviation)
        if not np.isfinite(far).all():
            return Finding("application", None, "open", "not finite at an offset")
        with np.errstate(all="ignore"):
            apart = ((far - near) / scale).ravel()
        for inside in formula.members:
            if (scale.ravel()[inside] == 0).any():
                continue
            d = deviation.ravel()[inside]
            center = float(offset.ravel()[inside[0]])
            design = np.stack([d - d.mean(), np.ones(d.size)], axis=1)
            (slope, shift), *_ = np.linalg.lstsq(design, apart[inside], rcond=None)
            left = apart[inside] - design @ [slope, shift]
            spread = np.sqrt(formula.size(d) * formula.kappa(d.size) + formula.epsilon)
            scatter = np.sqrt(np.sum(left**2) / (d.size - 2))
            scatters.append(scatter / (center / spread * unit))
            ulps = shift * spread / (2 * unit * 2.0 ** np.floor(np.log2(center)))
            shifts.append(abs(ulps - round(ulps)))
            ratios.append(center / spread)
    if not scatters:
        return None
    scatter, shift = float(np.median(scatters)), float(np.median(shifts))
    form = "folded" if scatter > SCATTER else "fused" if shift > WHOLE else "centered"
    text = {
        "folded": "FOLDED: x·a + (b − m·a)",
        "fused": "folded, in one fused rounding",
        "centered": "centered",
    }[form]
    evidence = (
        f"at {np.median(ratios):.0f} standard deviations outputs scatter by "
        f"{scatter:.2g} R u, and shift by {shift:.2g} of a unit beside a whole one"
    )
    facts = {"form": form, "scatter": scatter, "shift": shift}
    return Finding("application", text, "certain", evidence, form == "folded", facts)


def _inputs(probe: Probe, formula: Formula) -> tuple[np.ndarray, np.ndarray]:
    """Offsets with ten significant bits, and deviations on the grid, of mean 0."""
    offset, deviation = np.zeros(probe.shape), np.zeros(probe.shape)
    base = 2.0 ** OFFSET[probe.limits.unit]
    for inside in formula.members:
        steps = np.round(probe.rng.normal(size=inside.size) * 1.2 / GRID)
        steps[-1] -= steps.sum()
        deviation.flat[inside] = GRID * steps
        offset.flat[inside] = base * (1 + probe.rng.integers(0, 512) / 512)
    return offset, deviation
