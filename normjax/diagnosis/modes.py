"""Training against evaluation: stored statistics beside those of the batch."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from normjax import functional, running
from normjax.diagnosis.alone import is_stacked
from normjax.diagnosis.record import Finding
from normjax.diagnosis.subject import BoundModel, Run, stateful
from normjax.layers.found import NormInputs, NormLayer, stores
from normjax.spec import Precision

STEP = "training against evaluation"
# Of a batch of B examples the mean errs by std/√B and log σ² by √(2/B), if positions of
# one example count as one: five of these are chance in one channel of a million. One
# std, and a factor of 4 in the variance, are what a deviation must reach in any case.
SIGMAS, MEAN_DRIFT, LOG_DRIFT = 5.0, 1.0, float(np.log(4.0))
# From here on it is a matter of most channels, and not of a few odd ones.
MOST = 0.5


def mode_findings(subject: BoundModel, train: Run, evaluate: Run) -> list[Finding]:
    """What differs between the two modes, and what should and does not."""
    found: list[Finding] = []
    trained = is_trained(train)
    for path, inputs in train.layers.items():
        if not stores(inputs.layer.spec) or path not in evaluate.layers:
            continue
        if not any(call.stored for call in evaluate.layers[path].calls):
            found.append(_batch_in_evaluation(path))
    checked = stateful(train)
    for path, inputs in train.layers.items():
        stacked = is_stacked(inputs.layer)
        if stores(inputs.layer.spec) and (path not in checked or stacked):
            found.append(_unchecked(path, stacked))
    for path, inputs in checked.items():
        if is_stacked(inputs.layer):
            continue
        found += _of_storage(path, inputs, train)
        found += _drift(path, inputs, subject.examples, trained)
    return found


def is_trained(run: Run) -> bool:
    """Whether any norm's scale or bias has left its initial value."""
    arrays = [
        np.asarray(value, np.float64)
        for inputs in run.layers.values()
        for value in inputs.layer.params.values()
    ]
    return any(each.size and not np.isin(each, (0, 1)).all() for each in arrays)


def _batch_in_evaluation(path: str) -> Finding:
    return Finding(
        "error", STEP, path, "evaluation uses the statistics of the batch", {},
        "a prediction depends on which other examples are in the batch",
        "pass the model's switch on to the layer (use_running_average), or tell "
        "diagnose which arguments mean evaluation: evaluate={...}",
    )  # fmt: skip


def _unchecked(path: str, stacked: bool) -> Finding:
    reason = "stacked, as by nn.scan or nn.vmap" if stacked else "of several layers"
    return Finding(
        "note", STEP, path, "stored statistics are not checked", {"reason": reason},
        "they are not one set of mean and var for this layer",
        "compare them with those of nj.surgery.norm_inputs on a batch",
    )  # fmt: skip


def _of_storage(path: str, inputs: NormInputs, run: Run) -> list[Finding]:
    """The update of one training call against the spec's own."""
    layer, calls = inputs.layer, inputs.calls
    old, new = layer.stored, run.stored.get(path, layer.stored)
    values = np.concatenate([np.ravel(np.asarray(old[n])) for n in ("mean", "var")])
    if not np.isfinite(values).all() or (np.asarray(old["var"]) < 0).any():
        return [
            Finding(
                "error", STEP, path, "stored statistics are not finite, or negative",
                {"lowest variance": float(np.min(np.asarray(old["var"], np.float64)))},
                "the root of a negative variance is NaN in every evaluation",
                "import them again, or nj.surgery.recalibrate(model, variables, data)",
            )
        ]  # fmt: skip
    if all(call.stored for call in calls):
        return [
            Finding(
                "warning", STEP, path, "training uses and keeps the stored statistics",
                {},
                "the layer is frozen: the statistics never follow the data",
                "pass the model's switch on to the layer; if it is frozen on purpose, "
                "all is well",
            )
        ]  # fmt: skip
    first, *others = calls
    if others:
        return [
            Finding(
                "warning", STEP, path, "statistics are updated several times in a step",
                {"updates": len(calls)},
                "a layer in several places mixes their statistics in one average",
                "give every place a layer of its own",
            )
        ]  # fmt: skip
    expected = _updated(layer, first)
    if expected is None:
        return []
    gap = max(
        float(
            np.max(np.abs(np.asarray(new[n], np.float64) - np.asarray(e, np.float64)))
        )
        for n, e in (("mean", expected.mean), ("var", expected.variance))
    )
    step = max(
        float(
            np.max(np.abs(np.asarray(old[n], np.float64) - np.asarray(e, np.float64)))
        )
        for n, e in (("mean", expected.mean), ("var", expected.variance))
    )
    # One update moves by `step`; rounding in half of the digits is no other rule.
    if step > 0 and gap > 0.01 * step:
        return [
            Finding(
                "error", STEP, path, "statistics are not updated as declared",
                {"distance over one update": gap / step},
                "1 is no update at all, and about decay a second one",
                "update once in each step: apply(..., mutable=['batch_stats']), and no "
                "second forward pass",
            )
        ]  # fmt: skip
    return []


def _updated(layer: NormLayer, call: Any) -> running.State | None:
    """The state after the batch, or None where the layer's arrays are stacked."""
    spec, x = layer.spec.replace(precision=Precision(), axis_names=()), call.x
    moments = functional.moments(spec, x.astype(jnp.float32), call.mask)
    count = layer.stored.get("count")
    mean, var = layer.stored["mean"], layer.stored["var"]
    needed = running.init(spec, x.shape).mean.shape
    if mean.size != np.prod(needed, dtype=int):
        return None
    mean, var = mean.reshape(needed), var.reshape(needed)
    count = jnp.zeros(needed, jnp.int32) if count is None else count
    new = running.update(spec, running.State(mean, var, count), moments)
    return jax.tree.map(lambda each: each.reshape(layer.stored["mean"].shape), new)


def _drift(
    path: str, inputs: NormInputs, examples: int, trained: bool
) -> list[Finding]:
    layer, call = inputs.layer, inputs.calls[0]
    start = layer.spec.running.initial
    mean, var = (
        np.asarray(layer.stored[n], np.float64).ravel() for n in ("mean", "var")
    )
    if (mean == start[0]).all() and (var == start[1]).all():
        return [
            Finding(
                "error" if trained else "note", STEP, path,
                "stored statistics are as they were made", {},
                "no training batch was taken in: evaluation normalizes with mean "
                f"{start[0]:g} and variance {start[1]:g}",
                "keep what apply(..., mutable=['batch_stats']) returns, or "
                "nj.surgery.recalibrate(model, variables, data)",
            )
        ]  # fmt: skip
    spec = layer.spec.replace(
        precision=Precision(), axis_names=(), **{"running.decay": 0.0}
    )
    now = _updated(NormLayer(path, layer.kind, spec, {}, layer.stored), call)
    if now is None or layer.spec.running.debias or (var < 0).any():
        return []
    batch = np.asarray(now.mean, np.float64).ravel()
    spread = np.asarray(now.variance, np.float64).ravel()
    live = spread > 0
    if not live.any() or not np.isfinite([*mean, *var]).all():
        return []
    shift = np.abs(mean - batch)[live] / np.sqrt(spread[live])
    least = np.finfo(np.float32).tiny
    ratio = np.log(np.maximum(var[live], least) / spread[live])
    limits = (
        max(MEAN_DRIFT, SIGMAS / examples**0.5),
        max(LOG_DRIFT, SIGMAS * (2 / examples) ** 0.5),
    )
    off = (shift > limits[0]) | (np.abs(ratio) > limits[1])
    if not off.any():
        return []
    return [
        Finding(
            "error" if off.mean() >= MOST else "warning", STEP, path,
            "stored statistics are not those of the batch",
            {
                "channels": int(off.sum()),
                "mean off by std": float(shift.max()),
                "variance times": float(np.exp(ratio[np.argmax(np.abs(ratio))])),
            },
            "evaluation computes another function than the one that was trained",
            "nj.surgery.recalibrate(model, variables, data); look for other data, "
            "preprocessing or averaged weights since the statistics were stored",
        )
    ]  # fmt: skip
