"""Haiku's layers: channels last, computed in the dtype of the input.

Scale, offset and decay rate have no default there, so they have none here.
"""

from __future__ import annotations

from typing import Any

from normjax import running
from normjax.interop.patterns import channels, grouped, kept, written
from normjax.interop.record import Convention
from normjax.records import check_choice, names
from normjax.spec import Affine, NormSpec, Precision, Running

_TWO_PASS = Precision(algorithm="two_pass")
_FORMATS = ("channels_last", "channels_first", "N...C", "NC...")


def _last(data_format: str) -> bool:
    check_choice("data_format", data_format, _FORMATS)
    return data_format in ("channels_last", "N...C")


def _affine(axes: str, create_scale: bool, create_offset: bool) -> Affine | None:
    if not (create_scale or create_offset):
        return None
    return Affine(axes, scale=create_scale, bias=create_offset)


def _batch_norm(
    *,
    create_scale: bool,
    create_offset: bool,
    decay_rate: float,
    eps: float = 1e-5,
    axis: Any = None,
    cross_replica_axis: Any = None,
    data_format: str = "channels_last",
) -> NormSpec:
    channel = -1 if _last(data_format) else 1
    if axis is None:
        pattern, features = written(channel, channel, others=True)
    else:
        pattern, _ = written(axis)
        features = kept(pattern)
    return NormSpec(
        pattern,
        epsilon=eps,
        axis_names=() if cross_replica_axis is None else names(cross_replica_axis),
        affine=_affine(features, create_scale, create_offset),
        running=Running(
            running.decay(decay_rate, "haiku"), debias=True, initial=(0, 0)
        ),
        precision=Precision(algorithm="one_pass"),
    )


def _layer_norm(
    *,
    axis: Any,
    create_scale: bool,
    create_offset: bool,
    eps: float = 1e-5,
    use_fast_variance: bool = False,
    param_axis: Any = None,
) -> NormSpec:
    pattern, features = written(axis, -1 if param_axis is None else param_axis)
    return NormSpec(
        pattern,
        epsilon=eps,
        affine=_affine(features, create_scale, create_offset),
        precision=Precision(algorithm="one_pass") if use_fast_variance else _TWO_PASS,
    )


def _rms_norm(
    *,
    axis: Any,
    eps: float = 1e-5,
    create_scale: bool = True,
    param_axis: Any = None,
) -> NormSpec:
    pattern, features = written(axis, -1 if param_axis is None else param_axis)
    affine = _affine(features, create_scale, create_offset=False)
    return NormSpec(pattern, center=False, divide="rms", epsilon=eps, affine=affine)


def _group_norm(
    *,
    groups: int,
    axis: Any = None,
    create_scale: bool = True,
    create_offset: bool = True,
    eps: float = 1e-5,
    data_format: str = "channels_last",
) -> NormSpec:
    last = _last(data_format)
    if not (last or axis is None):
        raise ValueError(
            f"axis is {axis!r}, expected None beside data_format={data_format!r}: "
            "write the pattern"
        )
    axes = slice(1, None) if axis is None else axis
    return NormSpec(
        grouped(written(axes, -1)[0]) if last else "b (g [c]) [...]",
        sizes=channels(None, groups),
        epsilon=eps,
        affine=_affine("(g c)", create_scale, create_offset),
        precision=_TWO_PASS,
    )


def _instance_norm(
    *,
    create_scale: bool,
    create_offset: bool,
    eps: float = 1e-5,
    data_format: str = "channels_last",
) -> NormSpec:
    return NormSpec(
        "b [...] c" if _last(data_format) else "b c [...]",
        epsilon=eps,
        affine=_affine("c", create_scale, create_offset),
        precision=_TWO_PASS,
    )


_SOURCE = "dm-haiku 0.0.17, haiku."
_NARROW = (
    "parameters have the rank of the input with size 1 elsewhere, unless they belong "
    "to the last axis alone",
    "all arithmetic is in the dtype of the input: for bfloat16 and float16 "
    "precision.accumulate of that name rounds as often; the default is right",
)
LAYERS = {
    "haiku.BatchNorm": Convention(
        _batch_norm,
        f"{_SOURCE}BatchNorm",
        (
            "the one-pass variance is not clamped: where it comes out negative, as for "
            "100, 100.5, 101, 101.5 in bfloat16, it gives NaN, and no spec does",
            "the decay is rounded to the dtype of the input: 0.999 is 1 in bfloat16, "
            "and the debiased average 0/0",
            "a negative number in axis reduces that axis and gives it parameters all "
            "the same; here it has none",
            "statistics have the dtype of the input; nj.running.init keeps float32",
            *_NARROW,
        ),
    ),
    "haiku.LayerNorm": Convention(_layer_norm, f"{_SOURCE}LayerNorm", _NARROW),
    "haiku.RMSNorm": Convention(
        _rms_norm,
        f"{_SOURCE}RMSNorm",
        (
            "squares of float16 beyond 256 overflow there, and 0 comes out; no spec "
            "does that: an overflow is NaN here, and float32 has none",
            *_NARROW,
        ),
    ),
    "haiku.GroupNorm": Convention(_group_norm, f"{_SOURCE}GroupNorm", _NARROW),
    "haiku.InstanceNorm": Convention(_instance_norm, f"{_SOURCE}InstanceNorm", _NARROW),
}
