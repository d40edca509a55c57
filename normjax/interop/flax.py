"""Flax's layers, in linen and nnx: channels last, ε 1e-6, one-pass variance.

E[x²] − E[x]², clamped at 0, is what ``use_fast_variance``, the default, computes.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from normjax import running
from normjax.interop.patterns import channels, grouped, written
from normjax.interop.record import Convention
from normjax.records import names
from normjax.spec import Affine, NormSpec, Precision, Running


def _precision(use_fast_variance: bool, dtype: Any) -> Precision:
    return Precision(
        algorithm="one_pass" if use_fast_variance else "two_pass",
        output="input" if dtype is None else jnp.dtype(dtype).name,
    )


def _affine(axes: str, use_scale: bool, use_bias: bool) -> Affine | None:
    if not (use_scale or use_bias):
        return None
    return Affine(axes, scale=use_scale, bias=use_bias)


def _batch_norm(
    *,
    num_features: int | None = None,
    axis: int = -1,
    momentum: float = 0.99,
    epsilon: float = 1e-5,
    dtype: Any = None,
    use_bias: bool = True,
    use_scale: bool = True,
    axis_name: str | None = None,
    use_fast_variance: bool = True,
) -> NormSpec:
    pattern, features = written(axis, axis, others=True)
    return NormSpec(
        pattern,
        sizes=channels(num_features),
        epsilon=epsilon,
        axis_names=() if axis_name is None else names(axis_name),
        affine=_affine(features, use_scale, use_bias),
        running=Running(decay=running.decay(momentum, "flax")),
        precision=_precision(use_fast_variance, dtype),
    )


def _layer_norm(
    *,
    num_features: int | None = None,
    epsilon: float = 1e-6,
    dtype: Any = None,
    use_bias: bool = True,
    use_scale: bool = True,
    reduction_axes: Any = -1,
    feature_axes: Any = -1,
    axis_name: str | None = None,
    use_fast_variance: bool = True,
) -> NormSpec:
    pattern, features = written(reduction_axes, feature_axes)
    return NormSpec(
        pattern,
        sizes=channels(num_features),
        epsilon=epsilon,
        axis_names=() if axis_name is None else names(axis_name),
        affine=_affine(features, use_scale, use_bias),
        precision=_precision(use_fast_variance, dtype),
    )


def _rms_norm(
    *,
    num_features: int | None = None,
    epsilon: float = 1e-6,
    dtype: Any = None,
    use_scale: bool = True,
    reduction_axes: Any = -1,
    feature_axes: Any = -1,
    axis_name: str | None = None,
) -> NormSpec:
    spec = _layer_norm(
        num_features=num_features,
        epsilon=epsilon,
        dtype=dtype,
        use_bias=False,
        use_scale=use_scale,
        reduction_axes=reduction_axes,
        feature_axes=feature_axes,
        axis_name=axis_name,
    )
    changes = {"center": False, "divide": "rms", "precision.algorithm": "shifted"}
    return spec.replace(**changes)


def _group_norm(
    *,
    num_features: int | None = None,
    num_groups: int | None = 32,
    group_size: int | None = None,
    epsilon: float = 1e-6,
    dtype: Any = None,
    use_bias: bool = True,
    use_scale: bool = True,
    reduction_axes: Any = None,
    axis_name: str | None = None,
    use_fast_variance: bool = True,
) -> NormSpec:
    if (num_groups is None) == (group_size is None):
        raise ValueError(
            f"num_groups is {num_groups!r} and group_size {group_size!r}, expected "
            "exactly one of them: say num_groups=None beside group_size"
        )
    axes = slice(1, None) if reduction_axes is None else reduction_axes
    sizes = {"c": group_size} if group_size else channels(num_features, num_groups)
    return NormSpec(
        grouped(written(axes, -1)[0]),
        sizes=sizes,
        epsilon=epsilon,
        axis_names=() if axis_name is None else names(axis_name),
        affine=_affine("(g c)", use_scale, use_bias),
        precision=_precision(use_fast_variance, dtype),
    )


def _instance_norm(
    *,
    num_features: int | None = None,
    epsilon: float = 1e-6,
    dtype: Any = None,
    use_bias: bool = True,
    use_scale: bool = True,
    feature_axes: Any = -1,
    axis_name: str | None = None,
    use_fast_variance: bool = True,
) -> NormSpec:
    marked = [feature_axes] if isinstance(feature_axes, int) else [*feature_axes]
    pattern, kept = written([0, *marked], [0, *marked], others=True)
    return NormSpec(
        pattern,
        sizes=channels(num_features),
        epsilon=epsilon,
        axis_names=() if axis_name is None else names(axis_name),
        affine=_affine(kept.removeprefix("b "), use_scale, use_bias),
        precision=_precision(use_fast_variance, dtype),
    )


_COMMON = (
    "without dtype the output has the widest dtype of input and parameters: for "
    "float16 and bfloat16 say dtype='float32'",
    "with axis_name it averages means and mean squares of the devices without weights: "
    "with masks of different counts it is wrong, and NaN where one device has none",
    "an input without a valid entry gives NaN there, and 0 and an unchanged state here",
)
_FAST = (
    "the one-pass variance loses |mean|²/std² units of rounding: which digits it gets "
    "depends on the order of the sum. use_fast_variance=False, or spec.replace("
    "precision=nj.Precision()), is right",
    "where the clamp meets a variance of exactly 0 its derivative is halved, which no "
    "spec's is",
)
_BUILDERS = {
    "BatchNorm": (_batch_norm, (*_FAST, *_COMMON)),
    "LayerNorm": (_layer_norm, (*_FAST, *_COMMON)),
    "RMSNorm": (_rms_norm, _COMMON),
    "GroupNorm": (_group_norm, (*_FAST, *_COMMON)),
    "InstanceNorm": (_instance_norm, (*_FAST, *_COMMON)),
}
_NNX = {
    "BatchNorm": (
        "with dtype, nnx rounds the stored statistics to it before it uses them",
    ),
    "GroupNorm": (
        "with reduction_axes nnx repeats the statistics along axis 1 and not along the "
        "channels: unless they are all axes but the first, its output is wrong and no "
        "spec gives it; the spec is what linen computes",
    ),
}
LAYERS = {
    f"flax.{module}.{name}": Convention(
        build,
        f"flax 0.12.8, flax.{module}.{file}",
        (*notes, *(_NNX.get(name, ()) if module == "nnx" else ())),
        without=("num_features",) if module == "linen" else (),
    )
    for module, file in (("linen", "normalization"), ("nnx", "nn.normalization"))
    for name, (build, notes) in _BUILDERS.items()
}
