"""Gain and bias: the axes along which they vary, and the parameters that hold them."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from normjax.auditing.formula import DIVISORS, Floats, Formula
from normjax.auditing.grouping import Grouping
from normjax.auditing.probing import Probe
from normjax.auditing.record import Finding


@dataclass(frozen=True)
class Match:
    """A parameter that holds the gain or the bias.

    Attributes:
        role: ``"scale"`` or ``"bias"``.
        name: of the parameter.
        axes: the axis of x along which each of its axes runs.
        form: ``"w"`` or ``"1+w"``.
        ratio: the fitted gain over the parameter, κ^−p; None for a bias.
    """

    role: str
    name: str
    axes: tuple[int, ...]
    form: str = "w"
    ratio: float | None = None

    @property
    def place(self) -> str:
        """Whether its axes stand in x's order."""
        return "in place" if list(self.axes) == sorted(self.axes) else "transposed"


def find_parameters(
    parameters: Mapping[str, np.ndarray] | None,
    formula: Formula,
    allowed: float,
    count: int | None,
) -> tuple[Match, ...]:
    """The parameters that hold the gain A and the bias, over all orders of their axes.

    Args:
        parameters: the arrays of the callable; None if they are not known.
        formula: with fitted A and b.
        allowed: relative tolerance.
        count: group size, for the factor κ^−p between A and a parameter.
    """
    found: list[Match] = []
    for role, values in (("scale", formula.scale), ("bias", formula.bias)):
        if values is None:
            continue
        for name, stored in (parameters or {}).items():
            match = _match(role, name, np.asarray(stored, np.float64), values, allowed)
            if match is not None and _plausible(match, formula, allowed, count):
                found.append(match)
                break
    return tuple(found)


def _match(
    role: str, name: str, stored: Floats, values: Floats, allowed: float
) -> Match | None:
    forms = (
        (("w", stored), ("1+w", 1 + stored)) if role == "scale" else (("w", stored),)
    )
    for form, numbers in forms:
        constant = not np.ptp(numbers) if numbers.size else True
        if numbers.size < 2 or not np.abs(numbers).max() or (constant and form != "w"):
            continue
        for axes in itertools.permutations(range(values.ndim), numbers.ndim):
            if tuple(values.shape[a] for a in axes) != numbers.shape:
                continue
            order = np.argsort(axes)
            row = [1] * values.ndim
            for axis in axes:
                row[axis] = values.shape[axis]
            wide = np.broadcast_to(numbers.transpose(order).reshape(row), values.shape)
            ratio = float(np.vdot(wide, values) / np.vdot(wide, wide))
            if role == "bias":
                ratio = 1.0
            if np.abs(values - ratio * wide).max() <= allowed * np.abs(values).max():
                return Match(role, name, axes, form, ratio if role == "scale" else None)
    return None


def _plausible(
    match: Match, formula: Formula, allowed: float, count: int | None
) -> bool:
    """Whether the factor of a gain is one that a divisor explains."""
    if match.ratio is None or count is None:
        return True
    bare = {d: Formula(formula.groups, divisor=d).kappa(count) for d in DIVISORS}
    ratios = [kappa**-formula.power for kappa in bare.values()]
    return any(abs(match.ratio / ratio - 1) < allowed for ratio in ratios)


def axes_of(values: Floats, least: float) -> tuple[int, ...]:
    """The axes along which values vary by more than ``least``."""
    axes = range(values.ndim)
    return tuple(a for a in axes if np.ptp(values, axis=a).max() > least)


def affine_finding(
    probe: Probe,
    formula: Formula,
    grouping: Grouping,
    matches: tuple[Match, ...],
    residual: float,
) -> Finding:
    """Gain and bias, for the report."""
    allowed = max(probe.limits.fit, 20 * residual)
    scale, bias = formula.scale, formula.bias
    assert scale is not None
    assert bias is not None
    gain_error = allowed * np.abs(scale).max()
    # Both are read from the same outputs.
    bias_error = max(gain_error, allowed * np.abs(bias).max())
    scale_axes, bias_axes = axes_of(scale, gain_error), axes_of(bias, bias_error)
    texts = [_says("gain", scale, scale_axes, 1.0, gain_error)]
    texts.append(_says("bias", bias, bias_axes, 0.0, bias_error))
    parameters = probe.target.parameters
    facts: dict[str, Any] = {
        "scale_axes": scale_axes,
        "bias_axes": bias_axes,
        "parameters": {
            match.role: {"name": match.name, "axes": match.axes, "form": match.form}
            for match in matches
        },
    }
    by_role = {match.role: match for match in matches}
    evidence, defect, confidence = [], False, "strong" if scale_axes else "open"
    for role, axes in (("scale", scale_axes), ("bias", bias_axes)):
        match = by_role.get(role)
        if match is not None:
            form = "" if match.form == "w" else f" as {match.form}"
            evidence.append(f"{match.name} {match.place}{form}")
            confidence = "certain"
            defect |= match.place == "transposed"
        elif axes and parameters:
            evidence.append(f"{role} not found as stored in {', '.join(parameters)}")
            defect = True
    if parameters is None:
        evidence.append("w or 1+w cannot be seen from values")
    odd = _beside(formula, grouping, scale_axes)
    if odd:
        evidence.append(odd)
        # An instance norm has its gain there; nothing that keeps the mean does.
        defect |= formula.alpha == 0
    text = "; ".join(texts)
    return Finding("affine", text, confidence, "; ".join(evidence), defect, facts)


def _says(
    name: str, values: Floats, axes: tuple[int, ...], usual: float, near: float
) -> str:
    if axes:
        return f"{name} along axis {', '.join(map(str, axes))}"
    value = float(np.median(values))
    if abs(value - usual) <= near:
        return f"{name} none, or at its initial value"
    return f"{name} {value:.6g} everywhere"


def _beside(formula: Formula, grouping: Grouping, scale_axes: tuple[int, ...]) -> str:
    """Whether the gain runs along kept axes and not along the reduced ones."""
    kinds = [kind.kind for kind in grouping.axes]
    reduced = [axis for axis, kind in enumerate(kinds) if kind == "reduced"]
    kept = [axis for axis in scale_axes if kinds[axis] == "kept"]
    if grouping.coupled or "blocks" in kinds or "interleaved" in kinds:
        return ""
    if formula.measure == "none" or not kept or set(scale_axes) & set(reduced):
        return ""
    along, over = ", ".join(map(str, kept)), ", ".join(map(str, reduced))
    return f"gain along the kept axis {along} and not along the reduced axis {over}"
