"""Axes and broadcasting: each layer on a small input, beside what it declares."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from normjax.arguments import full_rank
from normjax.diagnosis.alone import Alone, alone
from normjax.diagnosis.record import Finding
from normjax.diagnosis.subject import BoundModel, Run
from normjax.layers.found import NormInputs
from normjax.spec import NormSpec
from normjax.verify.oracles import numpy_reference

STEP = "axes"
# Small integers are exact in every dtype: what is left is rounding of the division.
DIFFERS = 1e-3


def axes_findings(subject: BoundModel, train: Run) -> list[Finding]:
    """Layers that compute something else, or over axes that are no features."""
    found = []
    for path, inputs in train.layers.items():
        layer = alone(subject, train, path)
        if isinstance(layer, str):
            found.append(_unchecked(path, layer))
        elif 1 < layer.layout.group_size > layer.spec.ddof:
            found += _declared(path, layer)
        if isinstance(inputs.layer.spec, NormSpec):
            found += _features(path, inputs) + _mask(path, inputs)
    return found


def _unchecked(path: str, why: str) -> Finding:
    return Finding(
        "note", STEP, path, "the layer cannot be run on its own", {"reason": why},
        "its axes, and its derivative, are as it declares and were not measured",
        "nj.audit, on a function that calls it",
    )  # fmt: skip


def by_hand(layer: Alone, x: np.ndarray) -> np.ndarray:
    """What a layer declares, group by group in NumPy."""
    spec, layout = layer.spec, layer.layout
    y = numpy_reference(
        x.reshape(layout.view_shape),
        layout.reduced,
        epsilon=float(spec.epsilon),
        center=spec.center,
        divide=spec.divide,
        placement=spec.epsilon_placement,
        ddof=spec.ddof,
    )
    if spec.affine is not None:
        shape = layout.parameter(spec.affine.axes).view_shape
        y = y * layer.params.get("scale", np.ones(1)).reshape(
            shape if "scale" in layer.params else (1,) * y.ndim
        )
        if "bias" in layer.params:
            y = y + layer.params["bias"].reshape(shape)
    return y.reshape(x.shape)


def _declared(path: str, layer: Alone) -> list[Finding]:
    shape = layer.layout.shape
    x = np.random.default_rng(0).integers(-4, 5, shape).astype(np.float64)
    expected = by_hand(layer, x)
    with jax.enable_x64(True):
        y = np.asarray(layer.call(jnp.asarray(x)), np.float64)
    same = y.shape == expected.shape
    gap = np.abs(y - expected).max() / np.abs(expected).max() if same else np.inf
    if gap <= DIFFERS:
        return []
    return [
        Finding(
            "error", STEP, path, "the layer does not compute what it declares",
            {
                "input": str(shape),
                "output": str(y.shape),
                "difference over output": float(gap),
                "declared": layer.spec.pattern,
            },
            "on small integers it differs from the same formula by hand: other axes, "
            "another formula, or scale and bias along another axis",
            "nj.audit(layer, shape=...) says what it computes",
        )
    ]  # fmt: skip


def _features(path: str, inputs: NormInputs) -> list[Finding]:
    """Parameters or statistics along another axis than the last."""
    x, spec = inputs.calls[0].x, inputs.layer.spec
    last = spec.parsed.dimensions[-1].parts
    if spec.running is None or x.ndim < 3 or not last[-1].reduced:
        return []
    return [
        Finding(
            "warning", STEP, path, "the features are not on the last axis",
            {"declared": spec.pattern, "input": str(tuple(x.shape))},
            "axis is the one that is kept, and Flax's layers have their features last: "
            "this one has statistics for every position and mixes the features",
            "axis=-1, which is the default",
        )
    ]  # fmt: skip


def _mask(path: str, inputs: NormInputs) -> list[Finding]:
    """A mask that tells the features of one position apart, as an array moved right."""
    for call in inputs.calls:
        if call.mask is None:
            continue
        mask = full_rank(call.mask, call.x.shape)
        whole = np.asarray(mask, bool)
        if (whole == whole[..., :1]).all():
            continue
        return [
            Finding(
                "error", STEP, path, "the mask tells features of one position apart",
                {"mask": str(tuple(mask.shape)), "input": str(tuple(call.x.shape))},
                "Flax aligns a mask with the last axes: (examples, positions) is taken "
                "for (positions, features) where the sizes allow it",
                "mask[..., None], so that its last axis is of size 1",
            )
        ]  # fmt: skip
    return []
