"""PyTorch's layers: channels first, ``momentum`` is the share of the new value.

On the CPU all but LayerNorm and RMSNorm multiply out to x·a + (b − m·a).
"""

from __future__ import annotations

from functools import partial
from typing import Any

from normjax import running
from normjax.interop.patterns import channels, trailing, written
from normjax.interop.record import Convention
from normjax.spec import Affine, NormSpec, Precision, Running

# finfo(float32).eps, which eps=None is for float32, float16 and bfloat16.
SMALLEST = 2.0**-23

_FOLDED = Precision(algorithm="two_pass", apply="folded")


def _running(momentum: float | None) -> Running:
    if momentum is None:
        return Running(average="cumulative", ddof=1)
    return Running(decay=running.decay(momentum, "torch"), ddof=1)


def _batch_norm(
    pattern: str,
    *,
    num_features: int | None = None,
    eps: float = 1e-5,
    momentum: float | None = 0.1,
    affine: bool = True,
    track_running_stats: bool = True,
) -> NormSpec:
    return NormSpec(
        pattern,
        sizes=channels(num_features),
        epsilon=eps,
        affine="c" if affine else None,
        running=_running(momentum) if track_running_stats else None,
        precision=_FOLDED,
    )


def _sync_batch_norm(
    *,
    num_features: int | None = None,
    eps: float = 1e-5,
    momentum: float | None = 0.1,
    affine: bool = True,
    track_running_stats: bool = True,
) -> NormSpec:
    spec = _batch_norm(
        "[b] c [...]",
        num_features=num_features,
        eps=eps,
        momentum=momentum,
        affine=affine,
        track_running_stats=track_running_stats,
    )
    return spec.replace(precision=Precision())


def _instance_norm(
    pattern: str,
    *,
    num_features: int | None = None,
    eps: float = 1e-5,
    momentum: float | None = 0.1,
    affine: bool = False,
    track_running_stats: bool = False,
) -> NormSpec:
    spec = _batch_norm(
        pattern,
        num_features=num_features,
        eps=eps,
        momentum=momentum,
        affine=affine,
        track_running_stats=track_running_stats,
    )
    return spec if track_running_stats else spec.replace(single="error")


def _layer_norm(
    *,
    normalized_shape: Any = None,
    eps: float = 1e-5,
    elementwise_affine: bool = True,
    bias: bool = True,
) -> NormSpec:
    axes, sizes = trailing(normalized_shape)
    pattern, names = written(axes, axes)
    return NormSpec(
        pattern,
        sizes=sizes,
        epsilon=eps,
        affine=Affine(names, bias=bias) if elementwise_affine else None,
        precision=Precision(algorithm="two_pass"),
    )


def _rms_norm(
    *,
    normalized_shape: Any = None,
    eps: float | None = None,
    elementwise_affine: bool = True,
) -> NormSpec:
    axes, sizes = trailing(normalized_shape)
    pattern, names = written(axes, axes)
    return NormSpec(
        pattern,
        sizes=sizes,
        center=False,
        divide="rms",
        epsilon=SMALLEST if eps is None else eps,
        affine=Affine(names, bias=False) if elementwise_affine else None,
    )


def _group_norm(
    *,
    num_groups: int,
    num_channels: int | None = None,
    eps: float = 1e-5,
    affine: bool = True,
) -> NormSpec:
    return NormSpec(
        "b (g [c]) [...]",
        sizes=channels(num_channels, num_groups),
        epsilon=eps,
        affine="(g c)" if affine else None,
        precision=Precision(apply="folded"),
    )


_CPU = "the CPU kernels were run, those of CUDA and cuDNN were not"
_BATCH = (
    "it adds in float64, rounds the mean to float32 and folds it into x·a + (b − m·a): "
    "the last bits differ, and both err by |mean|/std units of rounding",
    "one value for each channel in training is an error there, here it comes out as "
    "the bias; single='error' would refuse stored statistics too",
    ".half() and .bfloat16() make the stored statistics half too, and they stop "
    "moving; here they are float32: cast them after every update to reproduce that",
    _CPU,
)
_INSTANCE = (
    *_BATCH[:1],
    "with track_running_stats it averages the variances of the instances; "
    "nj.running.update pools them, which adds the distance between their means",
    "the unbatched form (without b) is no part of the pattern",
    _CPU,
)
_SPATIAL = {"1d": "[...]", "2d": "[h w]", "3d": "[d h w]"}
_SOURCE = "torch 2.13.0, torch.nn.modules."

LAYERS = {
    **{
        f"torch.nn.BatchNorm{kind}": Convention(
            partial(_batch_norm, f"[b] c {axes}"), f"{_SOURCE}batchnorm", _BATCH
        )
        for kind, axes in _SPATIAL.items()
    },
    "torch.nn.SyncBatchNorm": Convention(
        _sync_batch_norm,
        f"{_SOURCE}batchnorm",
        (
            "its process group is axis_names here: spec.replace(axis_names='devices')",
            "it trains on GPUs only and was not run there: precision is the default",
        ),
    ),
    **{
        f"torch.nn.InstanceNorm{kind}": Convention(
            partial(_instance_norm, f"b c {axes}"),
            f"{_SOURCE}instancenorm",
            _INSTANCE,
        )
        for kind, axes in {**_SPATIAL, "1d": "[l]"}.items()
    },
    "torch.nn.LayerNorm": Convention(
        _layer_norm,
        f"{_SOURCE}normalization",
        (
            "its variance is right at any offset (Welford), its mean is one float32: "
            "near |mean|/std of 2²³ no spec gives its digits, and the default is right",
            _CPU,
        ),
    ),
    "torch.nn.GroupNorm": Convention(
        _group_norm,
        f"{_SOURCE}normalization",
        (
            "it folds the mean into x·a + (b − m·a): a group of one element is noise "
            "of |x|/√ε units of rounding there, not the bias",
            _CPU,
        ),
    ),
    "torch.nn.RMSNorm": Convention(
        _rms_norm,
        f"{_SOURCE}normalization",
        (
            "eps=None is 2⁻²³ for float32 and below; for float64 it is 2⁻⁵², to be "
            "given as eps",
            _CPU,
        ),
    ),
}
