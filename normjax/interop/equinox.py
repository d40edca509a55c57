"""Equinox's layers: written for one example, channels first; here with its batch.

``jax.vmap`` maps them over the first axis, which is ``b`` in these patterns.
"""

from __future__ import annotations

from typing import Any

from normjax import running
from normjax.interop.patterns import channels, trailing, written
from normjax.interop.record import Convention
from normjax.records import check_choice
from normjax.spec import Affine, NormSpec, Precision, Running

_TWO_PASS = Precision(algorithm="two_pass")


def _batch_norm(
    *,
    input_size: int | None = None,
    axis_name: Any = None,
    eps: float = 1e-5,
    channelwise_affine: bool = True,
    momentum: float = 0.99,
    mode: str = "ema",
) -> NormSpec:
    check_choice("mode", mode, ("ema", "batch", "legacy"))
    decay = running.decay(momentum, "equinox")
    batch = mode == "batch"
    own: dict[str, Any] = {} if batch else {"statistics": "blend"}
    if not batch:  # what training normalizes with holds 1 − momentum of the batch
        own |= {"mean_weight": 1 - decay, "variance_weight": 1 - decay}
    if axis_name is not None:
        own |= {"axis_names": axis_name, "example": None}
    return NormSpec(
        "[b] c [...]" if axis_name is None else "c [...]",
        sizes=channels(input_size),
        epsilon=eps,
        affine="c" if channelwise_affine else None,
        running=Running(decay, debias=batch, initial=(0, 0) if batch else (0, 1)),
        precision=_TWO_PASS,
        **own,
    )


def _affine(axes: str, use_weight: bool, use_bias: bool) -> Affine | None:
    if not (use_weight or use_bias):
        return None
    return Affine(axes, scale=use_weight, bias=use_bias)


def _layer_norm(
    *,
    shape: Any = None,
    eps: float = 1e-5,
    use_weight: bool = True,
    use_bias: bool = True,
) -> NormSpec:
    axes, sizes = trailing(shape)
    pattern, names = written(axes, axes)
    affine = _affine(names, use_weight, use_bias)
    return NormSpec(
        pattern, sizes=sizes, epsilon=eps, affine=affine, precision=_TWO_PASS
    )


def _rms_norm(
    *,
    shape: Any = None,
    eps: float = 1e-5,
    use_weight: bool = True,
    use_bias: bool = True,
) -> NormSpec:
    axes, sizes = trailing(shape)
    pattern, names = written(axes, axes)
    affine = _affine(names, use_weight, use_bias)
    return NormSpec(
        pattern, sizes=sizes, center=False, divide="rms", epsilon=eps, affine=affine
    )


def _group_norm(
    *,
    groups: int,
    channels: int | None = None,
    eps: float = 1e-5,
    channelwise_affine: bool = True,
) -> NormSpec:
    return NormSpec(
        "b (g [c]) [...]",
        sizes=_sizes(channels, groups),
        epsilon=eps,
        affine="(g c)" if channelwise_affine else None,
        precision=_TWO_PASS,
    )


_sizes = channels
_SOURCE = "equinox 0.13.8, equinox.nn."
_INTEGER = "integers are computed and cut off there, and an error here"
LAYERS = {
    "equinox.nn.BatchNorm": Convention(
        _batch_norm,
        f"{_SOURCE}BatchNorm",
        (
            "without axis_name the pattern has the batch axis; with it the spec is for "
            "one example inside jax.vmap(..., axis_name=...), as the layer is",
            "mode='ema' (its default, 'legacy') normalizes in training with the "
            "updated average: reference= is the stored one, read before the update",
            "mode='ema' copies the first batch: then use mean_weight=1, "
            "variance_weight=1, and put its statistics into the State; before it "
            "the library's are (0, 0), here (0, 1)",
            "mode='batch' starts its variance at 1 and divides by 1 − momentumᵗ all "
            "the same: momentumᵗ/(1 − momentumᵗ) too large after t updates; a State "
            "with variance 1 reproduces it",
            "it squares in the dtype of the input: float16 beyond 256 comes out as 0 "
            "there; a sum of squares that overflows is NaN here, with "
            "precision.accumulate='float16' too",
        ),
    ),
    "equinox.nn.LayerNorm": Convention(_layer_norm, f"{_SOURCE}LayerNorm", (_INTEGER,)),
    "equinox.nn.GroupNorm": Convention(_group_norm, f"{_SOURCE}GroupNorm", (_INTEGER,)),
    "equinox.nn.RMSNorm": Convention(
        _rms_norm,
        f"{_SOURCE}RMSNorm",
        ("it has a bias unless use_bias=False says otherwise", _INTEGER),
    ),
}
