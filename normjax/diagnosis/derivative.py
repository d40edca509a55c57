"""Derivative conditioning: gains, each layer's derivative, the model's gradients."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from normjax.diagnosis.alone import Alone, alone
from normjax.diagnosis.denominators import layer_geometry
from normjax.diagnosis.record import Finding
from normjax.diagnosis.subject import BoundModel, Run, specs
from normjax.layers.found import Call, NormInputs

STEP = "derivative"
# The gain |scale|/s of a layer that gets numbers of size 1 is 1. A hundredth of that
# size is an embedding at its initial value; a thousandth is what ε = 1e-6 ends at.
GAIN = 1000.0
# A central difference in float64 with step 1e-6 errs by 1e-10, and one in float32 with
# step 1e-2 by 1e-4; a term of the derivative that is missing is of order one.
DIFFERS = 1e-2
# Adam takes steps of one size; what is below is lost in the clipping of a global norm.
SPREAD = 1e3


def derivative_findings(subject: BoundModel, train: Run) -> list[Finding]:
    """Gains out of proportion, wrong derivatives, and gradients that are lost."""
    found = []
    for path, inputs in train.layers.items():
        found += _gain(path, inputs)
        layer = alone(subject, train, path)
        if not isinstance(layer, str) and layer.layout.group_size > 1:
            found += _differences(path, layer)
    return found + _gradients(subject, train)


def _gain(path: str, inputs: NormInputs) -> list[Finding]:
    """The closed form: 1/s on all directions but two, times the largest |scale|."""
    scale = inputs.layer.params.get("scale", jnp.ones(1))
    top = float(jnp.max(jnp.abs(jnp.asarray(scale, jnp.float32))))
    for spec in specs(inputs):
        if spec.divide == "none":
            continue
        got = layer_geometry(spec, inputs.calls[0])
        gain = np.where(got.distance > 0, np.asarray(got.spectrum.tangential), 0)
        gain = np.where(np.isfinite(gain), gain, 0) * top
        if gain.size and float(np.median(gain)) >= GAIN:
            return [
                Finding(
                    "warning", STEP, path, "changes of the input are amplified",
                    {
                        "median gain": float(np.median(gain)),
                        "largest gain": float(gain.max()),
                    },
                    "by |scale|/s, and gradients on their way back as well",
                    "an input of a larger scale, a larger epsilon, a smaller scale",
                )
            ]  # fmt: skip
    return []


def _differences(path: str, layer: Alone) -> list[Finding]:
    """JAX's derivative of the layer against central differences of its value."""
    if layer.spec.detach:
        return []  # declared: its derivative is not that of its value
    rng = np.random.default_rng(1)
    x, t = rng.normal(size=(2, *layer.layout.shape))
    with jax.enable_x64(True):
        point, tangent = jnp.asarray(x), jnp.asarray(t)
        y, moved = jax.jvp(layer.call, (point,), (tangent,))
        step = 1e-6 if y.dtype == jnp.float64 else 1e-2
        up, down = (layer.call(point + h * tangent) for h in (step, -step))
        expected = np.asarray((up - down) / (2 * step), np.float64)
    moved = np.asarray(moved, np.float64)
    # Of two elements a group has no direction but the two that it suppresses.
    size = max(np.linalg.norm(expected), 0.1 * np.linalg.norm(t))
    gap = np.linalg.norm(moved - expected) / size
    if gap <= DIFFERS:
        return []
    return [
        Finding(
            "error", STEP, path, "the derivative is not that of the function",
            {"difference over derivative": float(gap)},
            "against central differences of its own value on a smooth input: the model "
            "is trained with another gradient than its loss has",
            "look for stop_gradient, a custom rule or a rounding inside of the layer",
        )
    ]  # fmt: skip


def gradients(subject: BoundModel, train: Run) -> dict[str, tuple[Any, Any]]:
    """Gradients of a random function of the output by every layer's input and output.

    The function is Σ r·output with r from the normal distribution. Zeros are added to
    what every layer gets and gives in training, and it is differentiated by these; a
    layer that is called several times has the sum.

    Args:
        subject: the model.
        train: a run of it.

    Returns:
        By path ∂/∂x and ∂/∂y; nothing of a layer whose calls differ in shape.
    """
    zeros = {}
    for path, inputs in train.layers.items():
        shapes = {(call.x.shape, call.y.shape) for call in inputs.calls}
        if len(shapes) == 1:
            call = inputs.calls[0]
            zeros[path] = tuple(
                jnp.zeros(each.shape, jnp.promote_types(each.dtype, jnp.float32))
                for each in (call.x, call.y)
            )

    def function(added: Any) -> Array:
        def around(call: Call) -> Array:
            if call.path not in added:
                return call.run()
            before, after = added[call.path]
            x = call.given["x"]
            y = call.run(x + before.astype(x.dtype))
            return y + after.astype(y.dtype)

        output, _ = subject.call("train", around)
        key, total = jax.random.key(0), jnp.zeros(())
        for each in jax.tree.leaves(output):
            if jnp.issubdtype(jnp.asarray(each).dtype, jnp.floating):
                key, own = jax.random.split(key)
                weight = jax.random.normal(own, each.shape, jnp.float32)
                total = total + jnp.sum(weight * jnp.asarray(each, jnp.float32))
        return total

    return jax.tree.map(np.asarray, jax.grad(function)(zeros))


def _gradients(subject: BoundModel, train: Run) -> list[Finding]:
    inputs = [call.x for each in train.layers.values() for call in each.calls]
    if not all(jnp.issubdtype(x.dtype, jnp.floating) for x in inputs):
        return []
    found = gradients(subject, train)
    for path in reversed(found):
        before, after = found[path]
        if np.isfinite(before).all():
            continue
        own = bool(np.isfinite(after).all())
        return [
            Finding(
                "error", STEP, path,
                "the gradient is lost in this layer" if own
                else "the gradient is lost behind this layer",
                {"not finite": int((~np.isfinite(before)).sum()), "of": before.size},
                "NaN or infinity comes back to every parameter before it",
                "look at the root of 0, at ε = 0 and at NaN that is masked afterwards",
            )
        ]  # fmt: skip
    sizes = {path: float(np.linalg.norm(after)) for path, (_, after) in found.items()}
    live = {path: size for path, size in sizes.items() if size > 0}
    dead = [path for path, size in sizes.items() if size == 0]
    if dead:
        return [
            Finding(
                "warning", STEP, path, "no gradient reaches this layer", {"norm": 0.0},
                "what follows does not depend on it, so it trains nothing before it",
                "look for a detached or unused branch, and for scales that are 0",
            )
            for path in dead[:1]
        ]  # fmt: skip
    if not live:
        return []
    low, high = (edge(live, key=live.__getitem__) for edge in (min, max))
    if live[high] < SPREAD * live[low]:
        return []
    order = list(live)
    vanishes = order.index(low) < order.index(high)
    return [
        Finding(
            "warning", STEP, low if vanishes else high,
            "gradients vanish on their way to this layer" if vanishes
            else "gradients grow on their way to this layer",
            {"smallest norm": live[low], "largest norm": live[high]},
            "the layers are far from one learning rate",
            "compare the placement of norms on the branches, and the initial scales",
        )
    ]  # fmt: skip
