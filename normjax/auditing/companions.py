"""Whether an example's output depends on how many others are in its batch."""

from __future__ import annotations

import numpy as np

from normjax.auditing.formula import Formula
from normjax.auditing.probing import Probe
from normjax.auditing.record import Finding
from normjax.auditing.target import CallError

SIZES = (1, 2, 3, 8, 33)
ROUNDOFFS = 100


def batch_finding(probe: Probe, formula: Formula) -> Finding | None:
    """One example in batches of several sizes, with random companions.

    Args:
        probe: the callable.
        formula: what it computes.

    Returns:
        The finding; None where groups span examples, or the batch has a fixed size.
    """
    first = formula.groups[0]
    if formula.groups.shape[0] > 1 and np.intersect1d(first, formula.groups[1:]).size:
        return None
    row = probe.normal()[:1]
    outputs = {}
    for size in SIZES:
        others = 3 * probe.rng.normal(size=(size - 1, *probe.shape[1:])) + 1
        target = probe.target.resized((size, *probe.shape[1:]))
        if target is None:
            continue
        probe.spend()
        x = np.asarray(np.concatenate([row, others]), target.dtype)
        try:
            outputs[size] = np.asarray(target(x)[0], np.float64)
        except CallError:
            continue
    if len(outputs) < 2:
        return None
    base = next(iter(outputs.values()))
    apart = max(float(np.abs(y - base).max()) for y in outputs.values())
    relative = apart / np.abs(base).max()
    shown = " ".join(map(str, outputs))
    facts = {"sizes": list(outputs), "difference": relative}
    evidence = f"batches of {shown}: one example's output moves by {relative:.0e}"
    if not apart:
        word, text = "bitwise", "bitwise equal"
    elif relative <= ROUNDOFFS * probe.limits.unit:
        word, text = "rounding", "equal to rounding"
    else:
        word, text = "dependent", "DEPENDS ON THE SIZE OF THE BATCH"
    facts["invariance"] = word
    defect = word == "dependent"
    return Finding("batch", text, "certain", evidence, defect, facts)
