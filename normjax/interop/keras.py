"""Keras's layers: ε 1e-3, and x·inv + (beta − mean·inv).

``center`` and ``scale`` are Keras's words for the bias and the scale.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from normjax import running
from normjax.interop.patterns import written
from normjax.interop.record import Convention
from normjax.records import check_choice, check_count
from normjax.spec import Affine, NormSpec, Precision, Running

_FOLDED = Precision(algorithm="two_pass", apply="folded")


def _affine(axes: str, center: bool, scale: bool) -> Affine | None:
    return Affine(axes, scale=scale, bias=center) if center or scale else None


def _batch_norm(
    *,
    axis: int = -1,
    momentum: float = 0.99,
    epsilon: float = 1e-3,
    center: bool = True,
    scale: bool = True,
    renorm: bool = False,
    renorm_clipping: Any = None,
) -> NormSpec:
    pattern, names = written(axis, axis, others=True)
    return NormSpec(
        pattern,
        epsilon=epsilon,
        affine=_affine(names, center, scale),
        running=Running(running.decay(momentum, "keras")),
        precision=_FOLDED,
        **(_renorm(renorm_clipping) if renorm else {}),
    )


def _renorm(clipping: Any) -> dict[str, Any]:
    """Keras clips r below and above by two numbers, a spec by one and its inverse."""
    found = {} if clipping is None else clipping
    if not isinstance(found, Mapping):
        raise ValueError(f"renorm_clipping is {clipping!r}, expected a dict or None")
    for name in found:
        check_choice("a key of renorm_clipping", name, ("rmax", "rmin", "dmax"))
    r_max = found.get("rmax", math.inf)
    least = found.get("rmin", 0.0)
    if not math.isclose(least, 1 / r_max):
        raise ValueError(
            f"renorm_clipping is {dict(found)}, expected rmin to be 1/rmax: r_max of a "
            "spec clips r to 1/r_max … r_max"
        )
    return {
        "statistics": "renorm",
        "r_max": r_max,
        "d_max": found.get("dmax", math.inf),
    }


def _layer_norm(
    *,
    axis: Any = -1,
    epsilon: float = 1e-3,
    center: bool = True,
    scale: bool = True,
    rms_scaling: bool = False,
) -> NormSpec:
    pattern, names = written(axis, axis)
    if rms_scaling:
        return NormSpec(
            pattern,
            center=False,
            epsilon=epsilon,
            affine=Affine(names, bias=False),
            precision=Precision(algorithm="two_pass"),
        )
    affine = _affine(names, center, scale)
    return NormSpec(pattern, epsilon=epsilon, affine=affine, precision=_FOLDED)


def _group_norm(
    *,
    groups: int = 32,
    axis: int = -1,
    epsilon: float = 1e-3,
    center: bool = True,
    scale: bool = True,
) -> NormSpec:
    if axis not in (-1, 1):
        raise ValueError(f"axis is {axis!r}, expected -1 or 1: write the pattern")
    if groups == -1:
        pattern, names, sizes = "b [...] c", "c", {}
    else:
        check_count("groups", groups, least=1)
        pattern, names, sizes = "b [...] (g [c])", "(g c)", {"g": groups}
    if axis == 1:
        first, spatial, channel = pattern.split(" ", 2)
        pattern = f"{first} {channel} {spatial}"
    return NormSpec(
        pattern,
        sizes=sizes,
        epsilon=epsilon,
        affine=_affine(names, center, scale),
        precision=_FOLDED,
    )


def _rms_norm(*, axis: Any = -1, epsilon: float = 1e-6) -> NormSpec:
    pattern, names = written(axis, axis)
    return NormSpec(
        pattern,
        center=False,
        divide="rms",
        epsilon=epsilon,
        affine=Affine(names, bias=False),
    )


_SOURCE = "keras 3.15.1 with JAX, keras.layers."
_DTYPE = "input and output have the layer's dtype: precision.output says so"
_ROUNDED = (
    "the output is rounded to the dtype of the input, and then has the layer's: float32"
)
_SINGLE = "a float64 layer computes in float32 on JAX"
_AUTOCAST = (
    "with mixed_float16 the input is cast to float16 before the layer can widen it: "
    "beyond 65504 NaN comes out; no spec casts before, x.astype('float16') does"
)
_FOLD = (
    "it folds the mean into x·inv + (beta − mean·inv) and errs by |mean|/std units of "
    "rounding; spec.replace(precision=nj.Precision()) is right"
)
LAYERS = {
    "keras.layers.BatchNormalization": Convention(
        _batch_norm,
        f"{_SOURCE}BatchNormalization",
        (
            _FOLD,
            _DTYPE,
            _SINGLE,
            _AUTOCAST,
            "trainable=False is inference: stored statistics, no update",
            "renorm keeps averages of its own of the mean and of √(σ²+ε), with "
            "renorm_momentum: reference= takes their mean and square less ε",
            "a mask divides by its count plus 1e-7",
        ),
    ),
    "keras.layers.LayerNormalization": Convention(
        _layer_norm,
        f"{_SOURCE}LayerNormalization",
        (
            _FOLD,
            _ROUNDED,
            _SINGLE,
            "rms_scaling=True, which is deprecated, divides by the standard deviation "
            "and does not subtract the mean: no RMS norm",
        ),
    ),
    "keras.layers.GroupNormalization": Convention(
        _group_norm, f"{_SOURCE}GroupNormalization", (_FOLD, _ROUNDED, _SINGLE)
    ),
    "keras.layers.RMSNormalization": Convention(
        _rms_norm, f"{_SOURCE}RMSNormalization", (_DTYPE, _SINGLE, _AUTOCAST)
    ),
}
