"""Whether a mask is honored, what masked outputs are, and whether NaN passes it."""

from __future__ import annotations

from typing import Any

import numpy as np

from normjax.auditing.formula import Floats, Formula
from normjax.auditing.probing import Probe
from normjax.auditing.record import Finding
from normjax.auditing.target import CallError

SHARE = 0.65  # of valid entries
TRIES = 100


def mask_finding(probe: Probe, formula: Formula) -> Finding | None:
    """What a mask does to valid outputs, to masked ones, and to gradients.

    Args:
        probe: the callable.
        formula: what it computes without a mask.

    Returns:
        The finding; None where no mask is taken, or none leaves two valid elements in
        every group and one masked element.
    """
    if not probe.target.accepts_mask:
        return None
    mask = _mask(probe, formula)
    if mask is None:
        return None
    x = probe.cast(probe.normal() + 0.5)
    try:
        y = _masked(probe, x, mask)
        moved = _masked(probe, np.where(mask, x, x + 50 * probe.normal()), mask)
    except CallError as error:
        return Finding("mask", None, "open", f"a masked call raised {error}")
    if y.shape != x.shape:
        return Finding("mask", None, "open", f"a masked call gave shape {y.shape}")
    size = np.abs(y[mask]).max()
    if np.array_equal(y, probe(x)):
        evidence = "outputs are bit-equal with and without it"
        facts = {"honored": False}
        return Finding("mask", "IGNORED", "certain", evidence, defect=True, facts=facts)
    leak = float(np.abs(moved - y)[mask].max() / size)
    expected = formula.reference(x, mask)
    error = float(np.abs(y - expected)[mask].max() / size)
    bound = 30 * probe.limits.fit
    proper = leak < bound and error < bound
    facts: dict[str, Any] = {"honored": proper, "leak": leak, "error": error}
    facts["output"] = _output(formula, x, y, mask, expected)
    facts |= _under(probe, x, mask, y)
    return _said(facts)


def _mask(probe: Probe, formula: Formula) -> np.ndarray | None:
    """Two valid elements in every group, along the axes where it may vary."""
    axes = probe.target.mask_axes
    for _ in range(TRIES):
        mask = probe.rng.random(probe.shape) < SHARE
        if axes is not None:
            kept = [slice(None) if a in axes else slice(1) for a in range(mask.ndim)]
            mask = np.broadcast_to(mask[tuple(kept)], probe.shape)
        valid = [mask.ravel()[inside].sum() for inside in formula.members]
        if min(valid) >= 2 and not mask.all():
            return mask
    return None


def _masked(probe: Probe, x: Floats, mask: np.ndarray) -> Floats:
    probe.spend()
    values = np.asarray(x, probe.target.dtype)
    return np.asarray(probe.target(values, mask=mask), np.float64)


def _output(
    formula: Formula, x: Floats, y: Floats, mask: np.ndarray, expected: Floats
) -> str | None:
    """What masked entries of y are."""
    bias = np.zeros(x.shape) if formula.bias is None else formula.bias
    readings = {"keep": expected, "zero": 0 * x, "passthrough": x, "bias": bias}
    for word, values in readings.items():
        if np.abs(y - values)[~mask].max() < 1e-3 * np.abs(expected).max():
            return word
    return None


def _under(probe: Probe, x: Floats, mask: np.ndarray, y: Floats) -> dict[str, Any]:
    """What NaN under the mask does to valid outputs and gradients; nothing valid."""
    hidden = np.where(mask, x, np.nan)
    found: dict[str, Any] = {"nan_safe": None, "gradient_safe": None, "nothing": None}
    try:
        other = _masked(probe, hidden, mask)[mask]
        found["nan_safe"] = bool(np.abs(other - y[mask]).max() < 1e-3)
        nothing = _masked(probe, x, np.zeros(probe.shape, bool))
        found["nothing"] = "finite" if np.isfinite(nothing).all() else "not finite"
        probe.spend()
        values = np.asarray(hidden, probe.target.dtype)
        jacobian = probe.target.jacobian(values, mask=mask)
    except CallError as error:
        found["nothing"] = found["nothing"] or f"raises {error}"
        return found
    if jacobian is not None:
        rows = np.asarray(jacobian, np.float64)[mask.ravel()]
        found["gradient_safe"] = bool(np.isfinite(rows).all())
    return found


_OUTPUT = {
    "keep": "masked outputs are normalized",
    "zero": "masked outputs are 0",
    "passthrough": "masked outputs are x",
    "bias": "masked outputs are the bias",
    None: "masked outputs are something else",
}


def _said(facts: dict[str, Any]) -> Finding:
    proper = facts["honored"]
    words = ["honored" if proper else "NOT PROPERLY HONORED"]
    words.append(_OUTPUT[facts["output"]])
    if facts["nan_safe"] is False:
        words.append("NaN PASSES IT")
    if facts["gradient_safe"] is False:
        words.append("GRADIENT NaN UNDER IT")
    wrong = not proper or False in (facts["nan_safe"], facts["gradient_safe"])
    evidence = (
        f"other masked values move valid outputs by {facts['leak']:.0e}; valid outputs "
        f"are those of the valid subset to {facts['error']:.0e}; nothing valid: "
        f"{facts['nothing']}"
    )
    return Finding("mask", "; ".join(words), "certain", evidence, wrong, facts)
