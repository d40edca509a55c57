"""The audit of one callable, step by step."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from normjax.auditing import divisor as divisors
from normjax.auditing import fitting, others, stabilizer, stored
from normjax.auditing.adapters import adapt
from normjax.auditing.application import application_finding
from normjax.auditing.averages import running_finding
from normjax.auditing.companions import batch_finding
from normjax.auditing.derivative import derivative_finding
from normjax.auditing.formula import Formula
from normjax.auditing.grouping import (
    Grouping,
    NotDeterministic,
    find_groups,
    silent_outputs,
)
from normjax.auditing.halves import halves_finding
from normjax.auditing.masking import mask_finding
from normjax.auditing.precision import variance_finding
from normjax.auditing.probing import BudgetError, Probe, checked_shape, float_dtype
from normjax.auditing.record import Audit, Finding
from normjax.auditing.specs import Declared, declare, reproduces
from normjax.auditing.target import CallError, Target

# A spec reproduces a callable if held-out values agree to this share of max|y|, in a
# dtype that has no narrower bound.
HELD_OUT = 0.1
# How a formula that is known is computed; a quick audit asks for the first alone.
INSPECTIONS = (
    variance_finding,
    application_finding,
    halves_finding,
    mask_finding,
    running_finding,
    batch_finding,
    derivative_finding,
)


@dataclass
class _Found:
    """What the steps have found so far."""

    findings: list[Finding] = field(default_factory=list)
    open: list[str] = field(default_factory=list)
    kind: str | None = None
    formula: Formula | None = None
    grouping: Grouping | None = None
    declared: Declared = Declared(None, {}, ())
    error: float = np.inf


def audit(
    fn: Callable | Target,
    shape: tuple[int, ...] = (8, 16),
    dtype: Any = "float32",
    *,
    train: bool = False,
    seed: int | None = 0,
    max_calls: int | None = None,
    quick: bool = False,
) -> Audit:
    """Say which normalization a callable is, from its values alone.

    Args:
        fn: a function of one array, a layer of Flax, PyTorch, Keras, Equinox or Haiku,
            or a ``Target``.
        shape: of its input, batch included. Sizes that differ tell axes apart.
        dtype: of its input.
        train: call it as in training.
        seed: of the probes, and of the parameters that a layer is given. None keeps
            the layer's own; a gain of one hides the axes that it varies over.
        max_calls: stop after so many calls and report what is known by then.
        quick: ask for the formula and the variance alone, and say what was not asked.

    Returns:
        Findings with confidence and evidence, the spec that reproduces it or the
        nearest one, and what values cannot tell apart.

    Raises:
        ValueError: on a shape or dtype that is none, or if the callable refuses the
            input.

    Example:
        >>> def layer(x):
        ...     v = x.var(-1, ddof=1, keepdims=True)
        ...     return (x - x.mean(-1, keepdims=True)) / (v + np.float32(1e-5)) ** 0.5
        >>> found = audit(layer, shape=(3, 6))
        >>> found["ddof"].value, found["ddof"].confidence, found.defects[0].name
        ('1', 'certain', 'ddof')
        >>> found.spec
        NormSpec('b [c]', ddof=1)
    """
    start = time.perf_counter()
    target = fn
    if not isinstance(target, Target):
        kind = float_dtype(dtype)
        target = adapt(fn, checked_shape(shape), kind, train=train, seed=seed)
    probe = Probe(target, 0 if seed is None else seed, max_calls)
    found = _Found()
    try:
        _identify(probe, found)
        _inspect(probe, found, INSPECTIONS[:1] if quick else INSPECTIONS)
        if quick and found.formula is not None:
            found.open.append(
                "quick: application, half types, mask, stored statistics, other batch "
                "sizes and derivative were not asked"
            )
    except BudgetError as error:
        found.open.append(f"{error}: what comes later was not asked")
    except CallError as error:
        found.open.append(f"a probe raised {error}: what comes later was not asked")
        if found.formula is None:
            found.kind = f"not to be probed: it raises {error}"
    if found.kind is None and found.formula is not None:
        _declare(probe, found)
    exact = not found.declared.differs
    spec = found.declared.spec
    return Audit(
        target.name,
        probe.shape,
        np.dtype(target.dtype).name,
        tuple(found.findings),
        spec=spec if exact else None,
        nearest=None if exact else spec,
        differs=found.declared.differs,
        kind=found.kind,
        open=tuple(found.open),
        calls=target.calls,
        seconds=time.perf_counter() - start,
        seed=probe.seed,
    )


def _identify(probe: Probe, found: _Found) -> None:
    """Steps 0 to 5: groups, family, ε, ddof, gain and bias, and a held-out check."""
    try:
        silent = silent_outputs(probe)
    except NotDeterministic as error:
        found.kind = f"stochastic: {error}"
        return
    except ValueError as error:
        found.kind = str(error)
        return
    if silent.all():
        found.kind = "constant: the output does not depend on the input"
        return
    grouping = find_groups(probe, silent)
    found.grouping = grouping
    settled = None
    if not grouping.elementwise and (grouping.groups >= 0).any():
        settled = _fit(probe, grouping)
    if settled is None:
        other = others.recognize(probe, grouping)
        found.kind = other.kind
        if probe.target.has_state and not probe.target.train:
            found.open.append("it stores statistics: audit it as in training, too")
        finding = Finding(
            "kind", other.kind, "strong", other.evidence, facts=other.facts
        )
        found.findings.append(finding)
        return
    fit, known, formula, matches, divisor = settled
    found.formula = formula
    found.findings += [
        grouping.finding(),
        fitting.formula_finding(probe, replace(fit, formula=formula)),
        stabilizer.epsilon_finding(probe, known, formula.epsilon),
        divisors.ddof_finding(fit, divisor),
        stored.affine_finding(probe, formula, grouping, matches, fit.residual),
    ]
    if divisor.value is None and grouping.size is not None:
        found.open.append(divisors.equivalents(fit, known, grouping.size))
    if known.placement == "clamp":
        found.open.append(
            f"√max(var, {formula.epsilon:.6g}) = max(√var, {formula.epsilon**0.5:.6g})"
        )
    if found.findings[-1].confidence == "open":
        found.open.append("axes of a gain that is the same everywhere")


def _inspect(probe: Probe, found: _Found, inspections: tuple[Callable, ...]) -> None:
    """How a formula that is known is computed, and its derivative."""
    if found.formula is None:
        return
    for inspect in inspections:
        finding = inspect(probe, found.formula)
        if finding is not None:
            found.findings.append(finding)


def _fit(probe: Probe, grouping: Grouping):
    """Family to affine part; None if anything says that it is no normalization."""
    fit = fitting.fit_family(probe, grouping)
    found = None if fit is None else stabilizer.find_stabilizer(probe, fit)
    if found is None:
        return None
    known, fit = found
    if not fit.residual < 2 * probe.limits.fit:
        return None
    allowed = max(10 * probe.limits.fit, 20 * fit.residual)
    matches = stored.find_parameters(
        probe.target.parameters, fit.formula, allowed, grouping.size
    )
    divisor = divisors.find_divisor(probe, fit, known, grouping, matches)
    formula = divisors.settled(probe, fit, known, divisor, grouping.size)
    x = probe.cast(0.7 * probe.normal() + 0.6)
    y = probe(x)
    error = np.abs(y - formula.reference(x)).max() / np.abs(y).max()
    if not error < probe.limits.held_out:
        return None
    return fit, known, formula, matches, divisor


def _declare(probe: Probe, found: _Found) -> None:
    """The spec, and whether it gives the callable's values."""
    assert found.formula is not None
    assert found.grouping is not None
    by_name = {finding.name: finding for finding in found.findings}
    declared = declare(found.formula, found.grouping, by_name)
    if declared.spec is not None and not declared.differs:
        try:
            error = reproduces(probe, declared)
        except BudgetError:
            found.open.append("whether the spec reproduces it: no call was left")
            error = 0.0
        if not error <= min(probe.limits.held_out, HELD_OUT):
            text = f"held-out values differ by {error:.1e} of the largest"
            declared = declared._replace(differs=(text,))
    found.declared = declared
