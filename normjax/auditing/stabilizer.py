"""Epsilon: its value and where it stands, from how small inputs shrink."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from normjax.auditing.fitting import Fit, refit
from normjax.auditing.formula import Floats, Formula
from normjax.auditing.probing import Probe
from normjax.auditing.record import Finding

CROSSING = 0.6
# Where ρ says something about ε: at the ends its roundoff is all there is.
LOW, HIGH = 0.08, 0.93
UNTOUCHED = 0.97
# A right placement leaves a hundredth of the fit's tolerance, √(var + ε) + ε more.
UNEXPLAINED = 3
MANTISSAS = (1, 5, 2, 3, 4, 6, 7, 8, 9, 1.5, 2.5)


@dataclass(frozen=True)
class Stabilizer:
    """ε/κ and its placement, as measured at one group size.

    Attributes:
        value: ε/κ (outside: ε/√κ); 0 if none was seen.
        placement: as in ``Formula``.
        misfit: rms of predicted against measured ρ, for each placement.
        spread: the relative uncertainty of ``value``.
        below: ε is below this, where none was seen.
        constant: whether a constant input gives a finite output, where none was seen.
    """

    value: float
    placement: str
    misfit: dict[str, float]
    spread: float
    below: float | None = None
    constant: bool | None = None


def find_stabilizer(probe: Probe, fit: Fit) -> tuple[Stabilizer, Fit] | None:
    """ε, its placement, and the family refitted with it; None if out of range.

    Two rounds: the gain at a finite scale carries a bias of ε/S, and ε needs the gain.
    """
    if fit.formula.measure == "none":
        return Stabilizer(0.0, "none", {}, 0.0), fit
    shrinking = _Shrinking(probe, fit)
    lowest, largest = probe.limits.smallest, probe.limits.largest
    if shrinking.degree < 0:  # further up the bias drowns the rest
        largest = fit.exponent + 2
    if shrinking.median(lowest, fit) > UNTOUCHED:
        constant = probe(np.full(probe.shape, 8.0))
        finite = bool(np.isfinite(constant[fit.formula.groups >= 0]).all())
        below = 2.0 ** (2 * lowest + 5)
        return Stabilizer(0.0, "none", {}, 0.0, below, finite), fit
    if not shrinking.median(largest, fit) >= CROSSING:
        return None
    while largest - lowest > 1:
        middle = (lowest + largest) // 2
        if shrinking.median(middle, fit) >= CROSSING:
            largest = middle
        else:
            lowest = middle
    exponents = range(largest - 3, largest + 3)
    found = shrinking.solve(exponents, fit)
    for _ in range(2):
        known = replace(fit.formula, epsilon=found.value, placement=found.placement)
        fit = refit(fit, known)
        found = shrinking.solve(exponents, fit)
    known = replace(fit.formula, epsilon=found.value, placement=found.placement)
    return found, refit(fit, known)


class _Shrinking:
    """ρ(a) = (y(a x₀) − b)/(a^h z∞), one for each element: 1 if there is no ε.

    x₀ alternates in sign within each group, so that there is no cancellation, and its
    magnitudes are exact under scaling by powers of two.
    """

    def __init__(self, probe: Probe, fit: Fit):
        self.probe = probe
        self.degree = 1 - 2 * fit.formula.power
        x = np.zeros(probe.shape)
        for inside in fit.formula.members:
            signs = np.where(np.arange(inside.size) % 2, -1.0, 1.0)
            sizes = 1 + probe.rng.integers(0, 33, size=inside.size) / 64
            x.flat[inside] = signs * sizes + (0 if fit.formula.alpha else 0.25)
        self.x = probe.cast(x)
        self.sizes = fit.formula.sizes(self.x)

    def ratios(self, exponent: int, fit: Fit) -> tuple[Floats, Floats]:
        """S at this scale and ρ, for the elements with a small bias."""
        bare = replace(fit.formula, epsilon=0.0, placement="none", bias=None)
        limit = bare.reference(self.x)
        a, bias = 2.0**exponent, np.asarray(fit.formula.bias)
        with np.errstate(all="ignore"):
            share = np.abs(bias / limit)
            seen = np.isfinite(share) & (np.abs(limit) > 0)
            seen &= share <= np.median(share[seen])
            moved = self.probe(a * self.x) - bias
            rho = moved[seen] / (a**self.degree * limit[seen])
        return a * a * self.sizes[seen], rho

    def median(self, exponent: int, fit: Fit) -> float:
        """The median of ρ."""
        rho = self.ratios(exponent, fit)[1]
        return float(np.median(rho)) if np.isfinite(rho).any() else 0.0

    def solve(self, exponents: range, fit: Fit) -> Stabilizer:
        """The placement that predicts ρ best, and its ε."""
        parts = [self.ratios(exponent, fit) for exponent in exponents]
        t = np.concatenate([size for size, _ in parts])
        rho = np.concatenate([ratio for _, ratio in parts])
        finite = np.isfinite(rho) & (rho > 0)
        t, rho, p = t[finite], rho[finite], fit.formula.power
        useful = (rho > LOW) & (rho < HIGH)
        clamped = (rho > LOW) & (rho < UNTOUCHED)
        values = {
            "inside": (t * (rho ** (-1 / p) - 1))[useful],
            "outside": (np.sqrt(t) * (rho ** (-0.5 / p) - 1))[useful],
            "clamp": (t / rho ** (1 / p))[clamped],
        }
        misfit, found = {}, {}
        for placement, all_of_them in values.items():
            if not all_of_them.size:
                continue
            value = float(np.median(all_of_them))
            scatter = np.median(np.abs(all_of_them - value)) * 1.4826
            spread = scatter / value / np.sqrt(all_of_them.size)
            predicted = {
                "inside": lambda e: (1 + e / t) ** -p,
                "outside": lambda e: (1 + e / np.sqrt(t)) ** (-2 * p),
                "clamp": lambda e: np.minimum(1, t / e) ** p,
            }[placement](value)
            misfit[placement] = float(np.sqrt(np.mean((predicted - rho) ** 2)))
            found[placement] = (value, float(spread))
        best = min(misfit, key=lambda name: misfit[name])
        value, spread = found[best]
        return Stabilizer(value, best, misfit, spread)


def scaled(stabilizer: Stabilizer, formula: Formula, divisor: str, count: int) -> float:
    """ε itself, if what divides the sum is ``divisor``."""
    kappa = replace(formula, divisor=divisor).kappa(count)
    factor = np.sqrt(kappa) if stabilizer.placement == "outside" else kappa
    return float(stabilizer.value * factor)


def round_value(value: float, tolerance: float) -> tuple[float, int] | None:
    """The simplest number within a relative tolerance, and its rank; None if none.

    Example:
        >>> round_value(9.9999996e-06, 1e-6), round_value(8.3333e-06, 1e-6)
        ((1e-05, 0), None)
    """
    if not value > 0:
        return None
    exponent = int(np.floor(np.log10(value)))
    finest = [2.0**-52, 2.0**-23, 2.0**-10, 2.0**-7]
    ranked = [
        (rank, float(f"{m}e{k}"))
        for rank, m in enumerate(MANTISSAS)
        for k in (exponent, exponent + 1)
    ]
    ranked = [(0, number) for number in finest] + ranked
    # What a narrower type made of it.
    ranked += [
        (len(MANTISSAS) + rank, float(np.float32(number)))
        for rank, number in ranked
        if 1e-37 < number < 1e38
    ]
    close = [
        (rank, number)
        for rank, number in ranked
        if abs(number / value - 1) <= tolerance
    ]
    if not close:
        return None
    rank, number = min(close)
    return number, rank


def tolerance(probe: Probe, stabilizer: Stabilizer) -> float:
    """How far a round number may be from the measured one."""
    wide = 20 if probe.limits.unit < 2.0**-20 else 3
    return max(wide * stabilizer.spread, 3 * probe.limits.unit)


def epsilon_finding(probe: Probe, stabilizer: Stabilizer, epsilon: float) -> Finding:
    """ε for the report; ``epsilon`` is its value at the ddof that was found."""
    facts = {
        "placement": stabilizer.placement,
        "epsilon": epsilon,
        "misfit": stabilizer.misfit,
        "spread": stabilizer.spread,
    }
    if stabilizer.placement == "none":
        if stabilizer.below is None:
            evidence = "nothing is divided"
            return Finding("epsilon", "none", "certain", evidence, facts=facts)
        facts["below"] = stabilizer.below
        text = "none" if not stabilizer.constant else f"none above {facts['below']:.0e}"
        seen = "finite" if stabilizer.constant else "not finite"
        evidence = f"a constant input gives output that is {seen}"
        # Without ε a constant group is 0/0.
        defect = stabilizer.constant is False
        return Finding("epsilon", text, "strong", evidence, defect, facts)
    nearest = round_value(epsilon, tolerance(probe, stabilizer))
    facts["epsilon"] = epsilon if nearest is None else nearest[0]
    facts["measured"] = epsilon
    where = {
        "inside": "inside the root",
        "outside": "outside the root",
        "clamp": "a floor under the size",
    }[stabilizer.placement]
    best = stabilizer.misfit[stabilizer.placement]
    others = [v for k, v in stabilizer.misfit.items() if k != stabilizer.placement]
    ratio = min(others, default=np.inf) / max(best, 1e-300)
    confidence = "certain" if ratio >= 100 else "strong" if ratio >= 10 else "open"
    if best > UNEXPLAINED * probe.limits.fit:
        confidence = "open"
        where += " comes closest, no single placement fits"
    text = f"{facts['epsilon']:.6g} ({where})"
    evidence = f"measured {epsilon:.9g}; misfit {best:.0e}, next {min(others):.0e}"
    return Finding("epsilon", text, confidence, evidence, False, facts)
