"""From findings to the NormSpec that reproduces a callable, checked by running it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from normjax.auditing.formula import Formula
from normjax.auditing.grouping import Grouping
from normjax.auditing.probing import Probe
from normjax.auditing.record import Finding
from normjax.functional import normalize
from normjax.layout import Layout
from normjax.spec import MASKED_OUTPUT, Affine, NormSpec, Precision, Running

NAMES = {
    1: ("c",),
    2: ("b", "c"),
    3: ("b", "t", "c"),
    4: ("b", "h", "w", "c"),
    5: ("b", "d", "h", "w", "c"),
}


class Declared(NamedTuple):
    """A spec, the parameters at which it was fitted, and where it is not exact."""

    spec: NormSpec | None
    params: dict[str, np.ndarray]
    differs: tuple[str, ...]


def axis_names(ndim: int) -> tuple[str, ...]:
    """Names for the axes of an input.

    Example:
        >>> axis_names(3), axis_names(6)
        (('b', 't', 'c'), ('b', 'x1', 'x2', 'x3', 'x4', 'c'))
    """
    inner = tuple(f"x{i}" for i in range(1, ndim - 1))
    return NAMES.get(ndim, ("b", *inner, "c"))


def pattern_of(grouping: Grouping) -> tuple[str, dict[str, int], list[str]] | None:
    """The pattern, its sizes and the name of each dimension; None if there is none."""
    names = axis_names(len(grouping.axes))
    words, sizes, dimensions = [], {}, []
    split = [k for k in grouping.axes if k.kind in ("blocks", "interleaved")]
    for name, kind in zip(names, grouping.axes, strict=True):
        if kind.kind == "irregular":
            return None
        if kind.kind in ("blocks", "interleaved"):
            group = "g" if len(split) == 1 else f"g_{name}"
            sizes[group] = kind.parts
            inner, outer = f"[{name}]", group
            parts = (outer, inner) if kind.kind == "blocks" else (inner, outer)
            words.append(f"({parts[0]} {parts[1]})")
            dimensions.append(words[-1].replace("[", "").replace("]", ""))
            continue
        words.append(f"[{name}]" if kind.kind == "reduced" else name)
        dimensions.append(name)
    pattern = " ".join(words)
    if "[" not in pattern:
        return None
    merged = pattern.replace("] [", " ")
    return merged, sizes, dimensions


def declare(
    formula: Formula,
    grouping: Grouping,
    findings: Mapping[str, Finding],
) -> Declared:
    """The spec of a formula and of what the other findings add.

    Args:
        formula: as it was fitted.
        grouping: the groups.
        findings: by name; ``epsilon`` and ``affine``, and ``variance`` if it is there.
    """
    written = pattern_of(grouping)
    if written is None:
        return Declared(None, {}, ("groups that are no product over axes",))
    pattern, sizes, dimensions = written
    differs: list[str] = []
    fields = _arithmetic(formula, differs)
    if findings["epsilon"].confidence == "open":
        differs.append("no single placement of epsilon")
    facts = findings["affine"].facts
    stored = {match["form"] for match in facts["parameters"].values()}
    held = {axis for match in facts["parameters"].values() for axis in match["axes"]}
    axes = sorted({*facts["scale_axes"], *facts["bias_axes"]} or held)
    parts = _affine_parts(formula, facts)
    if parts:
        fields["affine"] = Affine(
            " ".join(dimensions[axis] for axis in axes),
            scale="scale" in parts,
            bias="bias" in parts,
            stored="1+w" if "1+w" in stored else "w",
            cast="before" if _casts_before(findings) else "after",
        )
    fields["precision"] = _precision(findings)
    mask = findings.get("mask")
    if mask is not None:
        fields |= _masked(mask.facts, differs)
    if "running" in findings:
        fields["running"] = _running(findings["running"].facts, differs)
    spec = NormSpec(pattern, sizes=sizes, **fields)
    return Declared(spec, _parameters(spec, formula), tuple(differs))


def reproduces(probe: Probe, declared: Declared) -> float:
    """The largest error of the spec on inputs that no fit has seen, relative to max|y|.

    The inputs are of unit size, and small enough for ε to matter.
    """
    spec = declared.spec
    assert spec is not None
    root = 1.0 if spec.epsilon_placement in ("outside_sqrt", "floor_std") else 0.5
    small = max(float(spec.epsilon) ** root, 2.0**-20)
    worst = 0.0
    for scale in (1.0, 2 * small):
        x = probe.cast(scale * (0.7 * probe.normal() + 0.2))
        expected = probe(x)
        y = values_of(spec, x, probe.target.dtype, declared.params)
        error = np.abs(y - expected).max() / max(np.abs(expected).max(), 1e-300)
        worst = max(worst, float(error) if np.isfinite(error) else np.inf)
    return worst


def values_of(
    spec: NormSpec, x: np.ndarray, dtype: Any, params: Mapping[str, np.ndarray]
) -> np.ndarray:
    """The spec on an array of the given dtype, in float64."""
    with jax.enable_x64(np.dtype(dtype) == np.float64):
        wide = jnp.float64 if np.dtype(dtype) == np.float64 else jnp.float32
        given = {name: jnp.asarray(value, wide) for name, value in params.items()}
        y = normalize(spec, jnp.asarray(x, dtype), given or None)
        return np.asarray(y).astype(np.float64)


def _arithmetic(formula: Formula, differs: list[str]) -> dict[str, Any]:
    """The fields of what is subtracted and divided; the nearest ones if none fits."""
    placement = {
        "inside": "inside_sqrt",
        "outside": "outside_sqrt",
        "clamp": "floor_var",
        "none": "inside_sqrt",
    }[formula.placement]
    divide = formula.measure
    if divide not in ("std", "rms", "none"):
        divide = "std" if formula.alpha else "rms"
        differs.append(f"divides by {formula.measure}, not by {divide}")
    if divide != "none" and formula.power != 0.5:
        differs.append(f"power {formula.power:g}, not 0.5")
    if divide != "none" and formula.divisor == "1":
        if divide == "rms":
            divide = "l2"
        else:
            differs.append("divides by the root of a sum, not of a mean")
    ddof = int(formula.divisor == "n-1")
    return {
        "center": bool(formula.alpha),
        "divide": divide,
        "epsilon": float(formula.epsilon),
        "epsilon_placement": placement,
        "ddof": ddof,
    }


def _casts_before(findings: Mapping[str, Finding]) -> bool:
    """Whether x̂ is rounded before it meets the gain."""
    halves = findings.get("half types")
    return halves is not None and halves.facts["cast"] == "before"


def _precision(findings: Mapping[str, Finding]) -> Precision:
    """The algorithm of the variance, and how it is applied."""
    known = {name: each.facts for name, each in findings.items()}
    one_pass = known.get("variance", {}).get("algorithm") == "one_pass"
    folded = known.get("application", {}).get("form") in ("folded", "fused")
    return Precision(
        algorithm="one_pass" if one_pass else "shifted",
        apply="folded" if folded else "centered",
    )


def _masked(facts: Mapping[str, Any], differs: list[str]) -> dict[str, str]:
    """What masked outputs are."""
    if not facts.get("honored"):
        differs.append("a mask is not properly honored")
        return {}
    if facts["output"] not in MASKED_OUTPUT:
        words = "the bias" if facts["output"] == "bias" else "not recognized"
        differs.append(f"masked outputs are {words}")
        return {}
    return {"masked_output": facts["output"]}


def _running(facts: Mapping[str, Any], differs: list[str]) -> Running | None:
    """The stored statistics; what no field expresses is said."""
    rule = facts.get("rule")
    if rule is None:
        differs.append("stores statistics by no known rule")
        return None
    debias = rule == "debiased"
    if debias and abs(facts["hidden_start"]) > 0.5:
        differs.append("debiases a variance that does not start at 0")
    if rule == "first copied":
        differs.append("stores a copy of the first batch, and averages from the second")
    if facts["training_uses"] != "the batch":
        differs.append(f"training normalizes with {facts['training_uses']}")
    if facts["updates_in_inference"]:
        differs.append("inference updates what is stored")
    start = (0.0, 0.0) if debias else facts["initial"] or (0.0, 1.0)
    decay = {} if facts["decay"] is None else {"decay": facts["decay"]}
    return Running(
        **decay,
        ddof=facts["stored_ddof"] or 0,
        debias=debias,
        initial=start,
        average="cumulative" if rule == "cumulative" else "exponential",
        nonfinite="skip" if facts["nonfinite"] == "skip" else "propagate",
    )


def _affine_parts(formula: Formula, facts: Mapping[str, Any]) -> tuple[str, ...]:
    """Which of scale and bias are there, in values or as a parameter."""
    assert formula.scale is not None
    assert formula.bias is not None
    parts = []
    if "scale" in facts["parameters"] or np.abs(formula.scale - 1).max() > 1e-3:
        parts.append("scale")
    if "bias" in facts["parameters"] or np.abs(formula.bias).max() > 1e-3:
        parts.append("bias")
    return tuple(parts)


def _parameters(spec: NormSpec, formula: Formula) -> dict[str, np.ndarray]:
    """The fitted gain and bias in the shapes of the spec's parameters."""
    if spec.affine is None:
        return {}
    layout = Layout.bind(spec.parsed, formula.shape, spec.sizes)
    home = layout.parameter(spec.affine.axes)
    over = tuple(i for i, size in enumerate(home.view_shape) if size == 1)
    params = {}
    for name, values in (("scale", formula.scale), ("bias", formula.bias)):
        if values is not None and getattr(spec.affine, name):
            view = values.reshape(layout.view_shape).mean(axis=over)
            params[name] = view.reshape(home.shape)
    if spec.affine.stored == "1+w" and "scale" in params:
        params["scale"] = params["scale"] - 1
    return params
