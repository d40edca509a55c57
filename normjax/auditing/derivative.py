"""Whether the derivative of a callable is that of what it computes."""

from __future__ import annotations

import numpy as np

from normjax.auditing.formula import Formula
from normjax.auditing.probing import Probe
from normjax.auditing.record import Finding
from normjax.auditing.target import CallError, Target

MISSING = {
    (False, True): "MEAN TERM MISSING",
    (True, False): "SCALE TERM MISSING",
    (False, False): "MEAN AND SCALE TERMS MISSING",
}
CONSTANT = 8.0  # its mean is exact


def derivative_finding(probe: Probe, formula: Formula) -> Finding | None:
    """The Jacobian by automatic differentiation against the closed form.

    ‖J − J_closed‖/‖J_closed‖ at a random point, to three times the misfit that the fit
    allows; if it is wrong, against the forms without the derivative through the mean,
    through the divisor, and through both.

    Args:
        probe: the callable.
        formula: what it computes.

    Returns:
        The finding; None where there is no automatic differentiation.
    """
    target = probe.target
    if not isinstance(target, Target) or not target.has_jacobian:
        return None
    x = probe.cast(probe.normal() + 0.3)
    bound = 3 * probe.limits.fit
    measured = _jacobian(probe, x)
    if measured is None:
        return None
    forms = {(True, True): "right", **MISSING}
    errors = {}
    for mean_term, scale_term in forms:
        closed = formula.jacobian(x, mean_term=mean_term, scale_term=scale_term)
        error = np.linalg.norm(measured - closed) / np.linalg.norm(closed)
        errors[mean_term, scale_term] = float(error)
    best = next((key for key, error in errors.items() if error < bound), None)
    right = best == (True, True)
    value = "WRONG" if best is None else forms[best]
    evidence = f"‖J − closed form‖/‖J‖ = {errors[True, True]:.1g}"
    if best is not None and not right:
        evidence += f", {errors[best]:.1g} without the term"
    flat = _jacobian(probe, np.full(probe.shape, CONSTANT))
    smooth = formula.epsilon > 0 and formula.placement == "inside"
    lost = smooth and flat is not None and not np.isfinite(flat).all()
    if lost:
        value, evidence = f"{value}; NaN AT CONSTANT INPUT", f"{evidence}; at 8.0: NaN"
    return Finding(
        "derivative",
        value,
        "certain" if best is not None else "strong",
        evidence,
        defect=not right or lost,
        facts={"error": errors[True, True], "terms": best, "constant_finite": not lost},
    )


def _jacobian(probe: Probe, x: np.ndarray) -> np.ndarray | None:
    probe.spend()
    try:
        found = probe.target.jacobian(np.asarray(x, probe.target.dtype))
    except CallError:
        return None
    return None if found is None else np.asarray(found, np.float64)
