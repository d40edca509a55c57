"""The family: what is subtracted, what size divides, and to which power."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from normjax.auditing.formula import MEASURES, Floats, Formula
from normjax.auditing.grouping import Grouping
from normjax.auditing.probing import Probe
from normjax.auditing.record import Finding

PAIRS = 4
# A family may be taken for the right one before ε is known if it misfits by less.
PROVISIONAL = 0.03
# Homogeneity is a whole number; roundoff and ε move it by less than this.
WHOLE = 0.02
# Two candidates are one function on these groups if they agree to this.
SAME = 1e-9


@dataclass(frozen=True)
class Fit:
    """A formula with gain A and bias b for each element, and how well it fits.

    Attributes:
        formula: with ``scale`` A and ``bias`` b, κ = 1.
        residual: rms of what it leaves, relative.
        runner_up: the next family and what it leaves.
        ties: families that are the same function on these groups.
        oddness: how far y(x) + y(−x) is from constant, relative to max|y|.
        homogeneity: h in y(2x) − b = 2^h (y(x) − b).
        exponent: the inputs of the fit are about 2^exponent.
        probes: pairs of x and the odd part of y.
    """

    formula: Formula
    residual: float
    runner_up: tuple[str, float]
    ties: tuple[str, ...]
    oddness: float
    homogeneity: float
    exponent: int
    probes: tuple[tuple[Floats, Floats], ...]


def fit_family(probe: Probe, grouping: Grouping) -> Fit | None:
    """Fit every family at large, middle and small scale; None if none fits.

    That nothing is divided is only believed at the largest scale: below √ε every norm
    looks linear.
    """
    top = probe.limits.exponent
    scales = (top, 0, -10) if top == 10 else (top, 0)
    for exponent in scales:
        fit = _fit_at(probe, grouping, exponent)
        if fit is None or not fit.residual < PROVISIONAL:
            continue
        if fit.formula.measure == "none" and exponent != top:
            continue
        return fit
    return None


def refit(fit: Fit, formula: Formula) -> Fit:
    """Gain and residual of a formula that knows ε, on the same probes."""
    bias = fit.formula.bias
    scale, residual = _gain(fit.probes, replace(formula, scale=None, bias=None))
    whole = replace(formula, scale=scale, bias=bias)
    return replace(fit, formula=whole, residual=residual)


def family_text(formula: Formula) -> str:
    """The formula as the report has it."""
    size = {
        "std": "var",
        "rms": "mean(x²)",
        "mean_abs_dev": "mean|x − mean|",
        "mean_abs": "mean|x|",
        "max_abs": "max|x|",
        "max_abs_dev": "max|x − mean|",
        "range": "(max − min)",
        "none": "",
    }[formula.measure]
    squared = formula.measure in ("std", "rms")
    if formula.divisor == "1":
        size = size.replace("var", "Σ(x − mean)²").replace("mean", "Σ")
    top = "(x − mean)" if formula.alpha else "x"
    power = formula.power if squared else 2 * formula.power
    inner, root = size, f"√{size}" if squared else size
    if formula.placement == "inside":
        inner = f"({size} + eps)" if squared else f"({size}² + eps)^0.5"
        root = f"√{inner}" if squared else inner
    elif formula.placement == "outside":
        root = f"({root} + eps)"
    elif formula.placement == "clamp":
        inner = f"max({size}, eps)"
        root = f"√{inner}" if squared else inner
    if formula.measure == "none":
        below = ""
    elif formula.power == 0.5:
        below = f" / {root}"
    else:
        below = f" / {inner}^{power:g}"
    return f"y = w {top}{below} + b"


def formula_finding(probe: Probe, fit: Fit) -> Finding:
    """The family, for the report."""
    name, next_best = fit.runner_up
    good = 4 * probe.limits.fit
    confidence = "strong"
    if fit.residual <= good and next_best >= 100 * fit.residual:
        confidence = "certain"
    evidence = f"fit {fit.residual:.0e}, next best {name} {next_best:.0e}"
    if fit.ties:
        evidence += f"; on these groups the same as {', '.join(fit.ties)}"
    formula = fit.formula
    facts = {
        "center": bool(formula.alpha),
        "measure": formula.measure,
        "power": formula.power,
        "residual": fit.residual,
        "runner_up": {"family": name, "residual": next_best},
        "same": list(fit.ties),
        "oddness": fit.oddness,
        "homogeneity": fit.homogeneity,
        "threshold": good,
    }
    # A power that is not 1/2 leaves the output's scale to the input's.
    wrong = formula.measure != "none" and formula.power != 0.5
    return Finding("formula", family_text(formula), confidence, evidence, wrong, facts)


def spread_probes(probe: Probe, groups: np.ndarray, exponent: int) -> list[Floats]:
    """Inputs whose groups differ in level and in size."""
    inputs = []
    count = int(groups.max()) + 1
    for k in range(PAIRS):
        level = (1.6 if k == 0 else 0.8) * probe.rng.normal(size=count)
        scale = 2.0 ** probe.rng.integers(-2, 3, size=count)
        x = probe.normal() + np.where(groups >= 0, level[groups], 0)
        x = x * np.where(groups >= 0, scale[groups], 1)
        inputs.append(probe.cast(2.0**exponent * x))
    return inputs


def odd_parts(probe: Probe, inputs: list[Floats]) -> tuple[list[Floats], Floats, float]:
    """(y(x) − y(−x))/2 of each, the bias, and how far y is from odd about it."""
    ys = [(probe(x), probe(-x)) for x in inputs]
    even = np.stack([(plus + minus) / 2 for plus, minus in ys])
    largest = max(np.abs(y).max() for pair in ys for y in pair)
    oddness = float(np.ptp(even, axis=0).max() / largest) if largest else 0.0
    return [(plus - minus) / 2 for plus, minus in ys], np.median(even, axis=0), oddness


def _gain(probes, bare: Formula) -> tuple[Floats, float]:
    """A for each element by least squares, and the relative rms misfit."""
    shapes = [bare.reference(x) for x, _ in probes]
    zs = [z for _, z in probes]
    with np.errstate(all="ignore"):
        below = sum(b * b for b in shapes)
        above = sum(z * b for z, b in zip(zs, shapes, strict=True))
        gain = np.where(np.asarray(below) > 0, above / below, 0.0)
        left = [z - gain * b for z, b in zip(zs, shapes, strict=True)]
        residual = np.sqrt(np.mean(np.square(left)) / np.mean(np.square(zs)))
    return gain, float(residual) if np.isfinite(residual) else np.inf


def _fit_at(probe: Probe, grouping: Grouping, exponent: int) -> Fit | None:
    """The best family for inputs of about 2^exponent."""
    inputs = spread_probes(probe, grouping.groups, exponent)
    zs, bias, oddness = odd_parts(probe, inputs)
    doubled = probe(2 * inputs[0]) - bias
    size = np.abs(zs[0])
    seen = size >= np.median(size[size > 0]) if size.any() else size > 0
    with np.errstate(all="ignore"):
        homogeneity = float(np.median(np.log2(np.abs(doubled / zs[0])[seen])))
    if not np.isfinite(homogeneity) or not oddness < 4 * probe.limits.fit:
        return None
    whole = round(homogeneity)
    if abs(homogeneity - whole) > max(WHOLE, probe.limits.unit * 16):
        return None
    measures = [m for m in MEASURES if (m == "none") == (whole == 1)]
    candidates = []
    probes = tuple(zip(inputs, zs, strict=True))
    for measure in measures:
        for alpha in (1, 0):
            bare = Formula(
                grouping.groups, alpha, measure, (1 - whole) / 2, 0.0, "none"
            )
            gain, residual = _gain(probes, bare)
            candidates.append((residual, replace(bare, scale=gain, bias=bias)))
    best = min(residual for residual, _ in candidates)
    if not np.isfinite(best):
        return None
    chosen = next(f for residual, f in candidates if residual <= 2 * best + SAME)
    others = [(r, f) for r, f in candidates if f is not chosen]
    same = [f for _, f in others if _is_same(chosen, f, inputs)]
    rest = [(r, _name(f)) for r, f in others if all(f is not twin for twin in same)]
    residual, name = min(rest)
    ties = tuple(_name(twin) for twin in same)
    left = next(r for r, f in candidates if f is chosen)
    return Fit(
        chosen, left, (name, residual), ties, oddness, homogeneity, exponent, probes
    )


def _name(formula: Formula) -> str:
    return f"{'(x − mean)' if formula.alpha else 'x'}/{formula.measure}"


def _is_same(one: Formula, other: Formula, inputs: list[Floats]) -> bool:
    """Whether two formulas differ by a constant factor only."""
    pairs = [
        (replace(one, scale=None, bias=None).reference(x),
         replace(other, scale=None, bias=None).reference(x))
        for x in inputs
    ]  # fmt: skip
    first = np.concatenate([a.ravel() for a, _ in pairs])
    second = np.concatenate([b.ravel() for _, b in pairs])
    finite = np.isfinite(first) & np.isfinite(second)
    first, second = first[finite], second[finite]
    if not (first @ first and second @ second):
        return False
    left = second - (first @ second) / (first @ first) * first
    return bool(left @ left <= SAME**2 * (second @ second))
