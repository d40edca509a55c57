"""Denominators: what a layer divides by, on its own input in training."""

from __future__ import annotations

from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from normjax.arguments import bind
from normjax.diagnosis.record import Finding
from normjax.diagnosis.subject import Run, specs
from normjax.layers.found import NormCall
from normjax.spec import NormSpec, Precision
from normjax.spectra import geometry
from normjax.traits import properties

STEP = "denominators"
# ρ = ε/(v + ε) is one half where ε is as large as the variance.
STABILIZED = 0.5
# A few such groups are empty regions of an input; a tenth of all is a scale problem.
MANY = 0.1


def layer_geometry(spec: NormSpec, call: NormCall) -> Any:
    """``nj.geometry`` of what a layer got; equal layers share one program."""
    plain = spec.replace(
        affine=None, running=None, statistics="input", single="zero", axis_names=(),
        precision=Precision(), masked_output="zero", detach=(),
    )  # fmt: skip
    x = call.x
    x = x if jnp.issubdtype(x.dtype, jnp.floating) else x.astype(jnp.float32)
    return jax.tree.map(np.asarray, _geometry(plain, x, call.mask))


_geometry = jax.jit(lambda spec, x, mask: geometry(spec, x, mask=mask))


def denominator_findings(train: Run) -> list[Finding]:
    """Groups without variance, of too few elements, or that ε decides."""
    found: list[Finding] = []
    for path, inputs in train.layers.items():
        for spec in specs(inputs):
            if spec.divide != "none":
                found += _of_layer(path, spec, inputs.calls[0])
    return found


def _of_layer(path: str, spec: NormSpec, call: NormCall) -> list[Finding]:
    size = bind(spec, tuple(call.x.shape)).group_size
    if size == 1:
        return [
            Finding(
                "error", STEP, path, "every group has one element", {"elements": size},
                "its own mean is the element: the output is the bias alone, and no "
                "gradient comes back",
                "reduce over more axes, take fewer groups or a larger batch",
            )
        ]  # fmt: skip
    found = []
    couples = properties(spec).couples_examples
    if couples and call.x.shape[0] == 1:
        found.append(
            Finding(
                "warning", STEP, path, "the batch is one example", {"elements": size},
                "its own positions are the statistics, in training alone",
                "diagnose and train with more examples",
            )
        )  # fmt: skip
    got = layer_geometry(spec, call)
    groups = prod(got.share.shape)
    valid = np.broadcast_to(got.spectrum.count > 0, got.share.shape)
    still = valid & (got.distance == 0)
    if still.any():
        found.append(
            Finding(
                "error" if still[valid].all() else "warning", STEP, path,
                "groups without variance",
                {"groups": int(still.sum()), "of": groups},
                "dead or constant: nothing but ε is left to divide by, and the first "
                f"noise is amplified {float(spec.epsilon) ** -0.5:.3g} times"
                if float(spec.epsilon) > 0
                else "0/0: the output is NaN",
                "look for dead units, constant features or padding before this layer",
            )
        )  # fmt: skip
    led = valid & ~still & (got.share >= STABILIZED)
    if led.any():
        found.append(
            Finding(
                "warning" if led.sum() >= MANY * valid.sum() else "note", STEP, path,
                "ε is at least as large as the variance",
                {
                    "groups": int(led.sum()),
                    "of": groups,
                    "largest share": float(got.share[led].max()),
                },
                "ε decides the size of the output: the layer does not normalize",
                "a smaller epsilon, or an input of a larger scale",
            )
        )  # fmt: skip
    return found
