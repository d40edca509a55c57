"""Flax's layers and ours, called alike in linen and in nnx, as plain arrays."""

from __future__ import annotations

from typing import Any

import flax.linen
import flax.nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import normjax as nj

KEY = jax.random.key(0)
SHAPE = (5, 4, 3, 6)
KINDS = ("BatchNorm", "LayerNorm", "RMSNorm", "GroupNorm", "InstanceNorm")
THEIRS = {"linen": flax.linen, "nnx": flax.nnx}
OURS = {"linen": nj.linen, "nnx": nj.nnx}
RANDOM = {
    "scale_init": jax.nn.initializers.normal(1.0),
    "bias_init": jax.nn.initializers.normal(1.0),
}
BARE = {"use_bias": False, "use_scale": False}


def slow(parameters, *quick):
    """The same parameters, slow but for the quick ones."""
    several = [each if isinstance(each, tuple) else (each,) for each in parameters]
    return [
        pytest.param(*values, marks=() if each in quick else pytest.mark.slow)
        for each, values in zip(parameters, several, strict=True)
    ]


# Constructor arguments; what only linen takes stands in LINEN.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "batch": ("BatchNorm", {}),
    "batch, axis 1": ("BatchNorm", {"axis": 1, "epsilon": 0.1}),
    "batch, axis -2": ("BatchNorm", {"axis": -2, "momentum": 0.9}),
    "batch, axis 0": ("BatchNorm", {"axis": 0}),
    "batch, scale only": ("BatchNorm", {"use_bias": False}),
    "batch, bare": ("BatchNorm", BARE),
    "layer": ("LayerNorm", {}),
    "layer, bias only": ("LayerNorm", {"use_scale": False, "epsilon": 0.1}),
    "layer, bare": ("LayerNorm", BARE),
    "layer, all but the first": ("LayerNorm", {"reduction_axes": (1, 2, 3)}),
    "layer, positions": ("LayerNorm", {"reduction_axes": [1, 2]}),
    "layer, not the last": (
        "LayerNorm", {"reduction_axes": -2, "feature_axes": 1},
    ),
    "layer, two passes": ("LayerNorm", {"use_fast_variance": False}),
    "rms": ("RMSNorm", {}),
    "rms, two axes": ("RMSNorm", {"reduction_axes": (2, -1), "epsilon": 0.1}),
    "rms, bare": ("RMSNorm", {"use_scale": False}),
    "group": ("GroupNorm", {"num_groups": 3}),
    "group, by size": ("GroupNorm", {"num_groups": None, "group_size": 3}),
    "group, all axes": ("GroupNorm", {"num_groups": 2, "reduction_axes": (1, 2, 3)}),
    "group, of one": ("GroupNorm", {"num_groups": 6, **BARE}),
    "instance": ("InstanceNorm", {}),
    "instance, bare": ("InstanceNorm", {**BARE, "epsilon": 0.1}),
    "instance, axis 1": ("InstanceNorm", {"feature_axes": 1}),
}  # fmt: skip
LINEN: dict[str, tuple[str, dict[str, Any]]] = {
    "batch, two axes": ("BatchNorm", {"axis": (1, -1)}),
    "layer, three last": (
        "LayerNorm", {"reduction_axes": (-3, -2, -1), "feature_axes": (-1, -2)},
    ),
    "layer, no float32": ("LayerNorm", {"force_float32_reductions": False}),
    "batch, no float32": ("BatchNorm", {"force_float32_reductions": False}),
    "group, last axis": ("GroupNorm", {"num_groups": 1, "reduction_axes": -1}),
    "group, two axes": ("GroupNorm", {"num_groups": 2, "reduction_axes": (2, 3)}),
    "instance, two features": ("InstanceNorm", {"feature_axes": (-2, -1)}),
}  # fmt: skip
# Run always; the others are slow by their number.
QUICK = {
    "linen": (
        "batch, axis 1", "batch, no float32", "layer, positions", "rms, two axes",
        "group", "instance, axis 1",
    ),
    "nnx": ("batch, axis -2", "group, by size"),
}  # fmt: skip
EVERY = [
    pytest.param(
        framework, *each, id=f"{framework}: {case}",
        marks=() if case in QUICK[framework] else pytest.mark.slow,
    )
    for framework, cases in (("linen", {**CASES, **LINEN}), ("nnx", CASES))
    for case, each in cases.items()
]  # fmt: skip


def draw(shape=SHAPE, dtype: Any = np.float32, offset: float = 2.0) -> jax.Array:
    """Well conditioned: |mean| is 2/3 of the standard deviation."""
    values = np.random.default_rng(0).normal(size=shape) * 3 + offset
    return jnp.asarray(values, dtype)


def make(library: Any, kind: str, features: int | None = None, **arguments: Any):
    """A layer with random parameters; nnx ones are told their number of features."""
    known = RANDOM if kind != "RMSNorm" else {"scale_init": RANDOM["scale_init"]}
    arguments = {**known, **arguments}
    if library in (flax.nnx, nj.nnx):
        return getattr(library, kind)(features, **arguments, rngs=nnx.Rngs(0))
    if kind == "BatchNorm":
        arguments.setdefault("use_running_average", False)
    return getattr(library, kind)(**arguments)


def features(kind: str, arguments: dict[str, Any], shape=SHAPE) -> int:
    """How many features an nnx layer has."""
    word = "axis" if kind == "BatchNorm" else "feature_axes"
    return shape[arguments.get(word, -1)]


def called(layer: Any, x: jax.Array, gradients: bool = True, **call: Any):
    """Variables, y, the new statistics, and gradients of Σ sin(y), as plain arrays."""
    function, params, kept = pure(layer, x, **call)

    def loss(params, x):
        y, stats = function(params, x)
        return jnp.sum(jnp.sin(y.astype(jnp.float32))), (y, stats)

    if gradients:
        grad = jax.jit(jax.grad(loss, (0, 1), has_aux=True))
        found, (y, stats) = grad(params, x)
    else:
        found, (y, stats) = None, jax.jit(function)(params, x)
    return {"params": params, "kept": kept, "y": y, "stats": stats, "gradients": found}


def pure(layer: Any, x: jax.Array, **call: Any):
    """The layer as (params, x) ↦ (y, statistics), its parameters, its statistics."""
    if isinstance(layer, nnx.Module):
        graph, learned, rest = nnx.split(layer, nnx.Param, ...)

        def function(params, x):
            state = nnx.clone(learned)
            nnx.replace_by_pure_dict(state, params)
            merged = nnx.merge(graph, state, nnx.clone(rest))
            y = merged(x, **call)
            return y, nnx.to_pure_dict(nnx.state(merged, nnx.BatchStat))

        return function, nnx.to_pure_dict(learned), nnx.to_pure_dict(rest)
    variables: Any = jax.jit(lambda key, x: layer.init(key, x, **call))(KEY, x)
    kept = {name: each for name, each in variables.items() if name != "params"}

    def apply(params, x):
        held = {"params": params, **kept}
        y, changed = layer.apply(held, x, mutable=["batch_stats"], **call)
        return y, dict(changed).get("batch_stats", {})

    return apply, variables.get("params", {}), kept.get("batch_stats", {})
