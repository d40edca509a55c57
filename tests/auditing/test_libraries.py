"""Layers of six libraries: what their documentation says is what an audit finds."""

from __future__ import annotations

import os
from typing import Any, NamedTuple

import pytest

import normjax as nj
from normjax.auditing import Audit, resolve_target

os.environ.setdefault("KERAS_BACKEND", "jax")
pytestmark = pytest.mark.jax_defaults


class Stated(NamedTuple):
    """From the documentation of a layer; axes as R reduced, K kept, B blocks."""

    target: str
    shape: tuple[int, ...]
    axes: str
    epsilon: float
    center: bool = True
    gain: tuple[int, ...] = (2,)
    bias: tuple[int, ...] | None = None  # None: as the gain
    rule: str | None = None
    decay: float | None = None
    stored_ddof: int | None = None
    variance: str | None = "stable"


RMS: dict[str, Any] = {"center": False, "bias": (), "variance": None}
FAST: dict[str, Any] = {"variance": "one_pass"}
KEPT: dict[str, Any] = {"rule": "exponential", "decay": 0.99, "stored_ddof": 0}
NONE: dict[str, Any] = {"gain": (), "bias": ()}
LAST, CUBE, FLAT = (3, 5, 6), (2, 6, 5), (5, 4)
ONE: dict[str, Any] = {"gain": (1,)}

LAYERS = [
    # torch: eps 1e-5, momentum 0.1 is the update rate, stores the unbiased variance.
    Stated("torch.nn:LayerNorm(6)", LAST, "KKR", 1e-5),
    Stated("torch.nn:LayerNorm([5, 6], eps=1e-12)", LAST, "KRR", 1e-12, gain=(1, 2)),
    Stated("torch.nn:GroupNorm(3, 6)", CUBE, "KBR", 1e-5, **ONE),
    Stated("torch.nn:GroupNorm(1, 6)", CUBE, "KRR", 1e-5, **ONE),
    Stated("torch.nn:InstanceNorm1d(4)", (3, 4, 7), "KKR", 1e-5, **NONE),
    Stated("torch.nn:RMSNorm(6)", LAST, "KKR", 2.0**-23, **RMS),
    Stated("torch.nn:RMSNorm([5, 6], eps=1e-3)", LAST, "KRR", 1e-3, gain=(1, 2), **RMS),
    Stated("torch.nn:BatchNorm1d(4)", FLAT, "RK", 1e-5, **ONE,
           rule="exponential", decay=0.9, stored_ddof=1),
    Stated("torch.nn:BatchNorm2d(4, eps=1e-3, momentum=0.3)", (3, 4, 5, 2), "RKRR",
           1e-3, **ONE, rule="exponential", decay=0.7, stored_ddof=1),
    Stated("torch.nn:BatchNorm1d(4, momentum=None)", FLAT, "RK", 1e-5, **ONE,
           rule="cumulative", stored_ddof=1),
    Stated("torch.nn:BatchNorm1d(4, track_running_stats=False)", FLAT, "RK", 1e-5,
           **ONE),
    # flax: epsilon 1e-6, batch norm 1e-5; momentum 0.99 is kept; fast variance.
    Stated("flax.linen:LayerNorm", LAST, "KKR", 1e-6, **FAST),
    Stated("flax.linen:LayerNorm(use_fast_variance=False)", LAST, "KKR", 1e-6),
    Stated("flax.linen:LayerNorm(reduction_axes=(1, 2))", LAST, "KRR", 1e-6, **FAST),
    Stated("flax.linen:GroupNorm(num_groups=3)", (2, 5, 6), "KRB", 1e-6, **FAST),
    Stated("flax.linen:GroupNorm(num_groups=3, use_scale=False, use_bias=False)",
           (2, 5, 6), "KRB", 1e-6, **NONE, **FAST),
    Stated("flax.linen:InstanceNorm", (2, 7, 4), "KRK", 1e-6, **FAST),
    Stated("flax.linen:RMSNorm", LAST, "KKR", 1e-6, **RMS),
    Stated("flax.linen:BatchNorm", (3, 5, 4), "RRK", 1e-5, **KEPT, **FAST),
    Stated("flax.linen:BatchNorm(axis=1, momentum=0.9, epsilon=1e-3)", (4, 3, 5), "RKR",
           1e-3, **ONE, **FAST, **{**KEPT, "decay": 0.9}),
    Stated("flax.nnx:LayerNorm(6)", LAST, "KKR", 1e-6, **FAST),
    Stated("flax.nnx:RMSNorm(6)", LAST, "KKR", 1e-6, **RMS),
    Stated("flax.nnx:GroupNorm(6, num_groups=2)", (2, 5, 6), "KRB", 1e-6, **FAST),
    Stated("flax.nnx:InstanceNorm(4)", (2, 7, 4), "KRK", 1e-6, **FAST),
    Stated("flax.nnx:BatchNorm(4)", FLAT, "RK", 1e-5, **ONE, **KEPT, **FAST),
    # equinox: eps 1e-5, channels first; momentum 0.99 is kept.
    Stated("equinox.nn:LayerNorm(6)", LAST, "KKR", 1e-5),
    Stated("equinox.nn:LayerNorm((5, 6))", LAST, "KRR", 1e-5, gain=(1, 2)),
    Stated("equinox.nn:RMSNorm(6, use_bias=False)", LAST, "KKR", 1e-5, **RMS),
    Stated("equinox.nn:GroupNorm(2, 6)", CUBE, "KBR", 1e-5, **ONE),
    Stated("equinox.nn:BatchNorm(4, axis_name='b', mode='batch', momentum=0.9)", FLAT,
           "RK", 1e-5, **ONE, rule="debiased", decay=0.9, stored_ddof=0),
    # haiku: eps 1e-5; decay_rate is kept, debiased; batch norm takes E[x²] − E[x]².
    Stated("haiku:LayerNorm(-1, True, True)", LAST, "KKR", 1e-5),
    Stated("haiku:LayerNorm((1, 2), True, True, use_fast_variance=True)", LAST, "KRR",
           1e-5, **FAST),
    Stated("haiku:RMSNorm(-1)", LAST, "KKR", 1e-5, **RMS),
    Stated("haiku:GroupNorm(2)", (2, 5, 6), "KRB", 1e-5),
    Stated("haiku:InstanceNorm(True, True)", (2, 7, 4), "KRK", 1e-5),
    Stated("haiku:BatchNorm(True, True, 0.9)", FLAT, "RK", 1e-5, **ONE, **FAST,
           rule="debiased", decay=0.9, stored_ddof=0),
    # keras: epsilon 1e-3, RMS 1e-6; momentum 0.99 is kept.
    Stated("keras.layers:LayerNormalization", LAST, "KKR", 1e-3),
    Stated("keras.layers:LayerNormalization(axis=(1, 2))", (2, 3, 4), "KRR", 1e-3,
           gain=(1, 2)),
    Stated("keras.layers:RMSNormalization", LAST, "KKR", 1e-6, **RMS),
    Stated("keras.layers:GroupNormalization(3)", (2, 5, 6), "KRB", 1e-3),
    Stated("keras.layers:GroupNormalization(-1)", (2, 7, 4), "KRK", 1e-3),
    Stated("keras.layers:BatchNormalization", (3, 5, 4), "RRK", 1e-3, **KEPT),
    Stated("keras.layers:BatchNormalization(momentum=0.8, epsilon=1e-5)", FLAT, "RK",
           1e-5, **ONE, **{**KEPT, "decay": 0.8}),
]  # fmt: skip
# One of each library's main kinds; the others take a minute more.
FAST_ONES = (0, 2, 7, 11, 14, 18, 21, 24, 26, 29, 33, 35, 36, 39, 41)
LETTERS = {"reduced": "R", "kept": "K", "blocks": "B"}


def found_by_audit(stated: Stated) -> Audit:
    pytest.importorskip(stated.target.split(".")[0].split(":")[0])
    train = "BatchNorm" in stated.target
    target = resolve_target(stated.target, stated.shape, "float32", train)
    return nj.audit(target)


@pytest.mark.parametrize(
    "stated",
    [
        pytest.param(each, marks=() if i in FAST_ONES else pytest.mark.slow)
        for i, each in enumerate(LAYERS)
    ],
    ids=[each.target for each in LAYERS],
)
def test_every_documented_fact_is_found(stated: Stated):
    found = found_by_audit(stated)
    assert found.kind is None
    letters = [LETTERS[kind] for kind in found["grouping"].facts["axes"]]
    assert "".join(letters) == stated.axes
    formula = found["formula"].facts
    assert formula["center"] == stated.center
    measure = "std" if stated.center else "rms"
    assert (formula["measure"], formula["power"]) == (measure, 0.5)
    epsilon = found["epsilon"].facts
    assert epsilon["placement"] == "inside"
    assert epsilon["epsilon"] == pytest.approx(stated.epsilon, rel=2e-6, abs=0)
    assert found["ddof"].value == "0"
    affine = found["affine"].facts
    bias = stated.gain if stated.bias is None else stated.bias
    assert (affine["scale_axes"], affine["bias_axes"]) == (stated.gain, bias)
    by_name = {finding.name: finding.facts for finding in found.findings}
    assert by_name.get("variance", {}).get("algorithm") == stated.variance
    if stated.rule is None:
        assert "running" not in by_name
    else:
        running = by_name["running"]
        assert running["rule"] == stated.rule
        assert running["stored_ddof"] == stated.stored_ddof
        assert running["decay"] == pytest.approx(stated.decay, abs=3e-5)
