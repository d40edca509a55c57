"""What is no plain normalization: named where it is known, else what was observed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from normjax.auditing.activations import fit_activation, fit_tanh
from normjax.auditing.formula import Floats, Formula
from normjax.auditing.grouping import Grouping
from normjax.auditing.probing import Probe

SPHERE_PROBES = 30


@dataclass(frozen=True)
class Other:
    """What a callable is that is no plain normalization.

    Attributes:
        kind: in words.
        evidence: the decisive measurement.
        facts: numbers.
    """

    kind: str
    evidence: str
    facts: Mapping[str, Any] = field(default_factory=dict)


def recognize(probe: Probe, grouping: Grouping) -> Other:
    """Name what is no plain normalization."""
    linear = _linear(probe, grouping)
    if linear is not None:
        return linear
    if grouping.elementwise:
        return _elementwise(probe)
    softmax = _softmax(probe, grouping)
    if softmax is not None:
        return softmax
    if grouping.matrix is not None:
        return _reach(probe, grouping.matrix)
    if grouping.size is not None:
        composed = _composed(probe, grouping)
        if composed is not None:
            return composed
    kinds = ", ".join(kind.kind for kind in grouping.axes)
    return Other("not recognized", f"groups by axis: {kinds}; no known family fits")


def _linear(probe: Probe, grouping: Grouping) -> Other | None:
    """Superposition: f(a) + f(b) − f(0) = f(a + b), at two scales."""
    zero, left = probe(np.zeros(probe.shape)), 0.0
    for exponent in (probe.limits.exponent, 0):
        # On a grid, so that a + b is exact in the probes' dtype.
        a, b = (np.round(8 * probe.normal()) * 2.0 ** (exponent - 3) for _ in range(2))
        fa, fb, both = probe(a), probe(b), probe(a + b)
        size = np.abs(both).max()
        left = max(left, np.abs(fa + fb - zero - both).max() / size) if size else 0.0
        if not left <= probe.limits.fit:
            return None
    evidence = f"f(a) + f(b) − f(0) = f(a + b) to {left:.0e} of max|f|"
    if not grouping.elementwise:
        matrix = grouping.matrix
        if matrix is None:
            within = " within each group" if grouping.size else ""
            return Other(f"a linear map{within}", evidence)
        reach = _offsets(matrix, grouping.groups.shape)
        text = ", ".join(f"{low} to {high}" for low, high in reach)
        return Other(f"a linear map; reach by axis {text}", evidence, {"reach": reach})
    slope = (fa - fb) / np.where(a == b, np.inf, a - b)
    if np.abs(fa - a).max() <= probe.limits.fit * np.abs(a).max():
        return Other("identity", evidence)
    return Other(
        "element-wise and affine: fixed statistics, as a norm in inference has them",
        evidence,
        {"slope": slope, "offset": zero},
    )


def _elementwise(probe: Probe) -> Other:
    """tanh, x/√(x² + ε), an activation, or an unknown function."""
    found = fit_tanh(probe)
    if found is not None:
        alpha, misfit, sigmoid = found
        name = "sigmoid" if sigmoid else f"DyT: tanh({alpha:.4g} x)"
        return Other(f"element-wise: {name}", f"misfit {misfit:.0e}", {"alpha": alpha})
    single = _single(probe)
    if single is not None:
        return single
    found = fit_activation(probe, lambda x: x)
    if found is not None:
        return Other(f"element-wise: {found[0]}", f"misfit {found[1]:.0e}")
    return Other("element-wise, not recognized", "no element depends on another one")


def _single(probe: Probe) -> Other | None:
    """w x / √(x² + ε): a norm whose groups have one element."""
    signs = np.where(probe.rng.random(probe.shape) < 0.5, -1.0, 1.0)
    limits = probe.limits

    def odd(exponent: int) -> Floats:
        x = 2.0**exponent * signs
        return signs * (probe(x) - probe(-x)) / 2

    gain = odd(limits.exponent)
    readings = []
    for exponent in range(limits.exponent, limits.smallest, -1):
        with np.errstate(all="ignore"):
            ratio = float(np.median(odd(exponent) / gain))
            epsilon = 4.0**exponent * (ratio**-2 - 1)
        if not 0 < ratio < 1 + limits.fit:
            return None
        if ratio < 0.95:
            readings.append(epsilon)
        if len(readings) == 3:
            break
    if len(readings) < 3 or np.ptp(readings) > 300 * limits.fit * readings[1]:
        return None
    value = float(np.median(readings))
    return Other(
        f"element-wise: x / √(x² + {value:.4g}), a norm over single elements",
        f"three sizes give the same number within {np.ptp(readings) / value:.0e}",
        {"epsilon": value},
    )


def _softmax(probe: Probe, grouping: Grouping) -> Other | None:
    y = probe(probe.normal())
    if y.min() < 0 or grouping.matrix is not None:
        return None
    sums = [y[grouping.groups == g].sum() for g in np.unique(grouping.groups)]
    left = float(np.abs(np.asarray(sums) - 1).max())
    if left > probe.limits.fit:
        return None
    return Other("softmax over the groups", f"positive, sums to 1 within {left:.0e}")


def _offsets(matrix: np.ndarray, shape: tuple[int, ...]) -> list[tuple[int, int]]:
    """How far along each axis an output looks for its inputs."""
    out, inn = np.nonzero(matrix)
    places = zip(
        np.unravel_index(inn, shape), np.unravel_index(out, shape), strict=True
    )
    return [(int((i - o).min()), int((i - o).max())) for i, o in places]


def _reach(probe: Probe, matrix: np.ndarray) -> Other:
    """One-directional or overlapping dependence."""
    reach = _offsets(matrix, probe.shape)
    x = probe.normal()
    top = 2.0**probe.limits.exponent
    first, second = probe(top * x), probe(2 * top * x)
    invariant = (
        np.abs(first - second).max() <= 10 * probe.limits.fit * np.abs(first).max()
    )
    scale = "scale invariant" if invariant else "not scale invariant"
    facts = {"reach": reach, "scale_invariant": bool(invariant)}
    text = ", ".join(f"{low} to {high}" for low, high in reach)
    for axis, (low, high) in enumerate(reach):
        one_way = (high == 0) != (low == 0)
        whole = max(-low, high) == probe.shape[axis] - 1
        if one_way and whole:
            word = "earlier" if high == 0 else "later"
            kind = f"cumulative: each element sees all {word} ones along axis {axis}"
            return Other(f"{kind}; {scale}", f"reach by axis {text}", facts)
    return Other(
        f"overlapping windows, no partition; {scale}", f"reach by axis {text}", facts
    )


def _composed(probe: Probe, grouping: Grouping) -> Other | None:
    """A normalized input behind a function of each element, or before it a map."""
    top = 2.0 ** (probe.limits.exponent + 2)
    x = probe.cast(probe.normal() + 0.5)
    once, twice = probe(top * x), probe(2 * top * x)
    change = np.abs(once - twice).max()
    if not change <= 10 * probe.limits.fit * np.abs(once).max():
        return None
    if _permutable(probe, grouping, top * x):
        for name, alpha in (("a layer norm", 1), ("an RMS norm", 0)):
            found = fit_activation(probe, _normalized(grouping, alpha))
            if found is not None:
                return Other(f"{name}, then {found[0]}", f"misfit {found[1]:.0e}")
        return None
    return _sphere(probe, grouping, top)


def _normalized(grouping: Grouping, alpha: int):
    measure = "std" if alpha else "rms"
    return Formula(grouping.groups, alpha, measure, 0.5, 0.0, "none").reference


def _permutable(probe: Probe, grouping: Grouping, x: Floats) -> bool:
    """Whether an output stays as the others of its group change places."""
    y, other = probe(x), x.copy()
    fixed = []
    for inside in Formula(grouping.groups).members:
        fixed.append(inside[0])
        other.flat[inside[1:]] = np.roll(x.flat[inside[1:]], 1)
    moved = np.abs(probe(other) - y).flat[fixed].max()
    return bool(moved <= 30 * probe.limits.fit * np.abs(y).max())


def _sphere(probe: Probe, grouping: Grouping, top: float) -> Other | None:
    """Σ c (y − b)² = n: the output was normalized, its input was mixed before."""
    inputs = [probe.cast(top * probe.normal()) for _ in range(SPHERE_PROBES)]
    ys = np.stack([(probe(x), probe(-x)) for x in inputs])
    bias = ys.mean(axis=1).mean(axis=0)
    odd = np.abs(ys.mean(axis=1) - bias).max()
    if odd > 10 * probe.limits.fit * np.abs(ys).max():
        return None
    z = (ys[:, 0] - ys[:, 1]) / 2
    worst, smallest = 0.0, np.inf
    for group in np.unique(grouping.groups[grouping.groups >= 0]):
        part = z[:, grouping.groups == group]
        if part.shape[1] >= SPHERE_PROBES:
            return None
        weights, *_ = np.linalg.lstsq(part**2, np.ones(len(part)), rcond=None)
        worst = max(worst, float(np.abs(part**2 @ weights - 1).max()))
        values = np.linalg.svd(part, compute_uv=False)
        smallest = min(smallest, float(values[-1] / values[0]))
    if worst > 1e-3:
        return None
    centered = smallest < 1e-5
    word = "centered" if centered else "not centered"
    return Other(
        f"a linear map, then a normalization ({word})",
        f"outputs lie on an ellipsoid to {worst:.0e}; they change as the others of the "
        "group change places",
        {"misfit": worst, "smallest_singular_value": smallest},
    )
