"""Precision: every layer's own error, and what an offset will cost it."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from normjax import functional
from normjax.arguments import full_rank
from normjax.diagnosis.denominators import layer_geometry
from normjax.diagnosis.record import Finding
from normjax.diagnosis.subject import BoundModel, Run, stateful
from normjax.layers.found import NormCall, NormInputs
from normjax.spec import NormSpec, Precision

STEP = "precision"
# An error of a tenth of the output changes which entry of a group is the largest.
RISK = 0.1


def precision_findings(
    subject: BoundModel, train: Run, deployment_dtype: str
) -> list[Finding]:
    """Errors on the batch as it is and in the deployment dtype, layer by layer."""
    found = []
    narrow = subject.cast(deployment_dtype).run("train")
    for path, inputs in train.layers.items():
        runs = [(str(inputs.calls[0].x.dtype), inputs)]
        if path in narrow.layers:
            runs.append((deployment_dtype, narrow.layers[path]))
        lost = [name for name, each in runs if _error(each) >= RISK]
        if lost:
            found.append(_lost(path, lost[0], dict(runs)[lost[0]]))
        elif isinstance(inputs.layer.spec, NormSpec):
            found += _offset(path, inputs, deployment_dtype)
    if not any(each.severity == "error" for each in found):
        found += _whole(subject, train, narrow, deployment_dtype)
    for path, inputs in stateful(train).items():
        dtype = inputs.layer.stored["mean"].dtype
        if jnp.finfo(dtype).bits < 32:
            found.append(_narrow_statistics(path, dtype))
    return found


def _lost(path: str, dtype: str, inputs: NormInputs) -> Finding:
    return Finding(
        "error", STEP, path, f"the result is wrong in {dtype}",
        {"error over output": _error(inputs)},
        "against the same numbers in float64: the variance cancels, or a square leaves "
        "the range of the dtype",
        "nj.linen or nj.nnx in place of Flax's layer, use_fast_variance=False, or "
        "statistics in float32",
    )  # fmt: skip


def _offset(path: str, inputs: NormInputs, dtype: str) -> list[Finding]:
    spec = inputs.layer.spec
    if spec.divide == "none":
        return []
    got = layer_geometry(spec, inputs.calls[0])
    live = got.distance > 0
    error = np.where(live, np.asarray(got.rounding(dtype), np.float64), 0)
    if not error.size or error.max() < RISK:
        return []
    return [
        Finding(
            "warning", STEP, path, f"the offset is too large for {dtype}",
            {
                "error over output": float(error.max()),
                "|mean| over std": float(got.kappa[live].max()),
            },
            "storing the input in this dtype alone loses what the layer keeps",
            "keep this activation in float32, or take the offset away before it",
        )
    ]  # fmt: skip


def _whole(subject: BoundModel, train: Run, narrow: Run, dtype: str) -> list[Finding]:
    """The model's output, as it is and in the deployment dtype, against float64."""
    with jax.enable_x64(True):
        wide = subject.cast("float64").run("train")
    for name, run, severity in (
        ("as it is", train, "error"),
        (dtype, narrow, "warning"),
    ):
        error = _distance(run.output, wide.output)
        if error < RISK:
            continue
        paths = (
            path
            for path in wide.layers
            if path in run.layers
            and _distance(
                [call.y for call in run.layers[path].calls],
                [call.y for call in wide.layers[path].calls],
            )
            >= RISK
        )
        return [
            Finding(
                severity, STEP, next(paths, ""),
                f"the model's output {name} is not that of float64",
                {"error over output": error},
                "the layer is the first whose output is off by a tenth, by its own "
                "error or by what came to it",
                "keep what comes before it in float32, and take large offsets away",
            )
        ]  # fmt: skip
    return []


def _distance(output: Any, exact: Any) -> float:
    """The largest normwise distance of any array of floats, inf where NaN came up."""
    found = 0.0
    for one, other in zip(jax.tree.leaves(output), jax.tree.leaves(exact), strict=True):
        if not jnp.issubdtype(jnp.asarray(one).dtype, jnp.floating):
            continue
        a, b = (np.asarray(each, np.float64) for each in (one, other))
        if not np.isfinite(b).all():
            continue
        size = np.linalg.norm(b)
        gap = np.linalg.norm(a - b) if np.isfinite(a).all() else np.inf
        found = max(found, float(gap / size) if size > 0 else 0.0)
    return found


def _narrow_statistics(path: str, dtype: Any) -> Finding:
    return Finding(
        "warning", STEP, path, "stored statistics have a narrow dtype",
        {"dtype": str(dtype)},
        "an update by (1 − decay) of the difference is rounded away: they stand still",
        "keep batch_stats in float32",
    )  # fmt: skip


def _error(inputs: NormInputs) -> float:
    """The largest normwise error of the layer's calls, inf where NaN came of numbers.

    The reference is the layer's spec on the same input in float64; 0 where the layer
    is given more than an input (mixtures, modulated layers, stored statistics).
    """
    layer = inputs.layer
    taken = isinstance(layer.spec, NormSpec) and layer.spec.statistics == "input"
    if not taken or layer.kind.endswith("ModulatedNorm"):
        return 0.0
    return max((_call_error(layer, c) for c in inputs.calls if not c.stored), default=0)


def _call_error(layer: Any, call: NormCall) -> float:
    spec = layer.spec.replace(precision=Precision(), axis_names=(), running=None)
    with jax.enable_x64(True):
        x = jnp.asarray(np.asarray(call.x, np.float64))
        mask = None if call.mask is None else jnp.asarray(np.asarray(call.mask))
        bare = np.asarray(_exact(spec.replace(affine=None), x, mask))
    y = np.asarray(call.y, np.float64)
    params = {n: np.asarray(v, np.float64) for n, v in layer.params.items()}
    if spec.affine is not None:
        shape = functional.init(spec, call.x.shape)
        if any(params[n].size != shape[n].size for n in shape):
            return 0.0  # stacked by nn.scan or nn.vmap
        with jax.enable_x64(True):
            held = {n: jnp.asarray(params[n].reshape(shape[n].shape)) for n in shape}
            exact = np.asarray(_exact(spec, x, mask, held))
    else:
        exact = bare
    if call.mask is not None:
        full = np.asarray(full_rank(call.mask, exact.shape), bool)
        valid = np.broadcast_to(full, exact.shape)
        y, exact = np.where(valid, y, 0), np.where(valid, exact, 0)
    size = np.linalg.norm(exact)
    if not np.isfinite(exact).all() or size == 0:
        return 0.0
    return float(np.linalg.norm(y - exact) / size) if np.isfinite(y).all() else np.inf


_exact = jax.jit(
    lambda spec, x, mask, params=None: functional.normalize(spec, x, params, mask=mask)
)
