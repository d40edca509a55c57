"""The same analysis of what every norm layer of a Flax model gets on a batch."""

from __future__ import annotations

from typing import Any

import numpy as np

from normjax.analysis.record import ActivationAnalysis
from normjax.analysis.source import AnalysisError
from normjax.analysis.stream import analyze
from normjax.layers.found import NormCall
from normjax.layers.watch import norm_inputs
from normjax.mixture import Mixture
from normjax.spec import NormSpec
from normjax.traits import properties


def analyze_model(
    model: Any, variables: Any = None, *args: Any, **kwargs: Any
) -> dict[str, ActivationAnalysis]:
    """Measure what every norm layer of a model does to its own input.

    The model is neither edited nor changed. A layer that is called with stored
    statistics is measured with those of the batch, as it is trained: with stored ones
    it is one gain for each feature.

    Args:
        model: a linen or an nnx module.
        variables: of a linen model; None for nnx.
        args: what the model is called with: one batch.
        kwargs: as for ``nj.surgery.norm_inputs``.

    Returns:
        By path, in the order of the calls. The second call of a layer has ``#2`` behind
        its path, and the second member of a mixture ``[1]``.

    Raises:
        AnalysisError: if a layer is called with a mask, which an analysis would not
            leave out, or on too little to analyze.
        ValueError: as ``nj.surgery.norm_inputs``.

    Example:
        >>> import jax, jax.numpy as jnp, normjax as nj
        >>> from flax import nnx
        >>> rngs = nnx.Rngs(0)
        >>> layers = nnx.Linear(3, 4, rngs=rngs), nnx.BatchNorm(4, rngs=rngs)
        >>> x = jax.random.normal(jax.random.key(0), (8, 3))
        >>> found = nj.analysis.analyze_model(nnx.Sequential(*layers), None, x)
        >>> found["layers/1"].groups, found["layers/1"].examples
        (4, 8)
    """
    found: dict[str, ActivationAnalysis] = {}
    for path, inputs in norm_inputs(model, variables, *args, **kwargs).items():
        layer = inputs.layer.spec
        for i, call in enumerate(inputs.calls):
            name = f"{path}#{i + 1}" if i else path
            if not isinstance(layer, Mixture):
                found[name] = _one(name, layer, call)
                continue
            for k, spec in enumerate(layer.specs):
                found[f"{name}[{k}]"] = _one(name, spec, call)
    return found


def _one(name: str, spec: NormSpec, call: NormCall) -> ActivationAnalysis:
    if call.mask is not None:
        raise AnalysisError(
            f"{name} is called with a mask, and an analysis has none: call the model "
            "on a batch without padding"
        )
    x = np.asarray(call.x)
    batch = x.shape[0] if properties(spec).couples_examples else None
    try:
        return analyze(x, spec, batch_size=batch)
    except AnalysisError as error:
        raise AnalysisError(f"{name}: {error}") from None
