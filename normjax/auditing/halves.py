"""What a layer does with half types: output dtype, squares, and where it rounds."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

from normjax.auditing.formula import Floats, Formula
from normjax.auditing.probing import Probe
from normjax.auditing.record import Finding
from normjax.auditing.target import CallError

HALVES = {"bfloat16": jnp.bfloat16, "float16": np.float16}
# Squares leave float16 at 256.
LARGE = (200.0, 300.0, 1000.0)
COLLAPSED = 0.05
AGREE = 0.9
DECISIVE = 20  # elements on which two orders differ
DRAWS = 6
WIDE_ERROR = 2.0**-12  # of an output that was not rounded to a half type
NARROW_ERROR = 2.0**-18


def halves_finding(probe: Probe, formula: Formula) -> Finding | None:
    """Output dtype and cast order in half types, and squares above float16's range.

    "Multiply, then cast" is round(ẑ w + b); "cast before the gain" rounds ẑ first. The
    gain is known from float32, as it is or rounded to the half type; the order is the
    one that gives at least nine tenths of the outputs on which the two differ.

    Args:
        probe: a callable in float32.
        formula: what it computes there.

    Returns:
        The finding; None in other dtypes, or if it raises in both half types.
    """
    target = probe.target
    if np.dtype(target.dtype) != np.float32 or formula.measure not in ("std", "rms"):
        return None
    outputs: dict[str, str] = {}
    orders: dict[str, str | None] = {}
    for name, half in HALVES.items():
        try:
            outputs[name], orders[name] = _order(probe, formula, np.dtype(half))
        except CallError:
            continue
    if not outputs:
        return None
    collapse = _collapse(probe, formula) if "float16" in outputs else None
    texts = []
    words = {
        "after": "multiplies, then casts",
        "before": "CASTS BEFORE THE GAIN",
        "half": "rounds on the way",
        None: "",
    }
    for name, given in outputs.items():
        order = words[orders[name]]
        if orders[name] == "after" and given != name:
            order = "nothing is rounded"
        texts.append(f"{name} → {given}" + (f", {order}" if order else ""))
    if collapse is not None:
        texts.append(f"FLOAT16 SQUARES OVERFLOW at {collapse:g}")
    known = {order for order in orders.values() if order is not None}
    facts = {
        "output": outputs,
        "order": orders,
        "cast": known.pop() if len(known) == 1 else None,
        "overflow": collapse,
    }
    sure = "strong" if facts["cast"] is not None else "open"
    evidence = (
        "orders are told apart by the outputs on which they differ"
        if facts["cast"] is not None
        else "a gain of one, or an output that is not rounded, shows no order"
    )
    defect = collapse is not None or "before" in orders.values()
    return Finding("half types", "; ".join(texts), sure, evidence, defect, facts)


def _order(probe: Probe, formula: Formula, half: np.dtype) -> tuple[str, str | None]:
    """The output's dtype, and where the rounding stands."""
    scale = np.ones(probe.shape) if formula.scale is None else formula.scale
    bias = np.zeros(probe.shape) if formula.bias is None else formula.bias
    bare = Formula(**{**_fields(formula), "scale": None, "bias": None})

    def rounded(values: Floats) -> Floats:
        return np.asarray(np.asarray(values, half), np.float64)

    scale, bias = _snapped(scale, rounded), _snapped(bias, rounded)
    hits: dict[str, list[np.ndarray]] = {"after": [], "before": []}
    given = ""
    for _ in range(DRAWS):
        probe.spend()
        x = np.asarray(probe.normal() * 2, half)
        raw = probe.target(x)
        given = np.dtype(raw.dtype).name
        narrow = np.dtype(raw.dtype) == half
        y = np.asarray(raw, np.float64)
        z = bare.reference(np.asarray(x, np.float64))
        last = rounded if narrow else (lambda values: values)
        gain, offset = rounded(scale), rounded(bias)
        late = [last(z * scale + bias), last(z * gain + offset)]
        early = [
            last(rounded(z) * scale + bias),
            last(rounded(rounded(z) * gain) + offset),
        ]
        size = np.maximum(np.abs(y), 2.0**-6)
        near = NARROW_ERROR if narrow else WIDE_ERROR / 2
        apart = np.abs(late[0] - early[0]) > near * size
        for word, options in (("after", late), ("before", early)):
            right = np.stack([np.abs(y - other) <= near * size for other in options])
            hits[word].append(right[:, apart])
    shares = {
        word: np.concatenate(each, axis=1).mean(axis=1).max() if each[0].size else 0.0
        for word, each in hits.items()
    }
    count = sum(each.shape[1] for each in hits["after"])
    if count < DECISIVE or not _varied(scale):
        return given, None
    best = max(shares, key=lambda word: shares[word])
    return given, best if shares[best] >= AGREE else "half"


def _fields(formula: Formula) -> dict[str, Any]:
    return {name: getattr(formula, name) for name in formula.__dataclass_fields__}


def _snapped(values: Floats, rounded: Any) -> Floats:
    """On the half type's grid where a fit is that close to it."""
    grid = rounded(values)
    return np.where(np.abs(grid - values) <= 1e-5 * np.abs(grid) + 1e-7, grid, values)


def _varied(scale: Floats) -> bool:
    """Whether a gain is there to be multiplied by."""
    return bool(np.abs(scale - 1).max() > 1e-2)


def _collapse(probe: Probe, formula: Formula) -> float | None:
    """The smallest of ``LARGE`` at which float16 output is lost, or not finite."""
    signs = np.ones(probe.shape)
    for inside in formula.members:
        signs.flat[inside] = np.where(np.arange(inside.size) % 2, -1.0, 1.0)
    for size in LARGE:
        probe.spend()
        x = np.asarray(size * signs, np.float16)
        y = np.asarray(probe.target(x), np.float64)
        bias = 0.0 if formula.bias is None else formula.bias
        right = formula.reference(np.asarray(x, np.float64)) - bias
        with np.errstate(all="ignore"):
            ratio = np.abs(y - bias).max() / np.abs(right).max()
        if not np.isfinite(y).all() or ratio < COLLAPSED:
            return size
    return None
