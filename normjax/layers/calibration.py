"""Stored statistics of whole models, computed again from data."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from normjax import functional, running
from normjax.arguments import second_moment
from normjax.information import example_axes
from normjax.layers.found import NormCall, NormLayer, stores
from normjax.layers.replace import replace_norms
from normjax.layers.snapshots import restore, snapshot
from normjax.layers.watch import norm_inputs, norm_layers
from normjax.spec import NormSpec, Precision
from normjax.statistics import Moments, at_least, merge


def recalibrate(
    model: Any, variables: Any, batches: Iterable[Any], **kwargs: Any
) -> Any:
    """Stored statistics of every norm from all of the data, each example counted once.

        mean = Σ x / N      variance = Σ (x − mean)² / (N − ddof)

    over all batches, masks left out, with the spec's ``running.ddof``. The sums are
    merged by their counts (Chan, Golub, LeVeque), and are not averages of batches: the
    order of the batches and their sizes matter to rounding alone. What the layers see
    is what they see in training: norms before them use the batch's own statistics,
    whatever mode the arguments ask for, as ``torch.optim.swa_utils.update_bn`` does.

    Args:
        model: a linen or an nnx module.
        variables: of a linen model; None for nnx.
        batches: each the input, or a tuple of positional arguments. They run as in
            ``norm_inputs``, which keeps what all norms get on one batch.
        kwargs: as for ``norm_layers``; say ``train=False`` or the like if dropout shall
            be off.

    Returns:
        The variables, or a clone of the nnx model, with new statistics. Entries that
        saw no more than ``running.ddof`` elements keep theirs; ``count`` is the number
        of calls that were taken in.

    Raises:
        ValueError: if there are no batches, no norm stores statistics, they are missing
            or stacked by ``nn.scan`` or ``nn.vmap``, or the layer is a mixture or
            modulated.

    Example:
        >>> import jax.numpy as jnp, normjax as nj
        >>> from flax import nnx
        >>> model = nnx.BatchNorm(1, rngs=nnx.Rngs(0))
        >>> batches = [jnp.array([[0.0], [2.0]]), jnp.full((6, 1), 10.0)]
        >>> new = nj.surgery.recalibrate(model, None, batches)
        >>> new.mean.get_value().tolist(), new.var.get_value().tolist()
        ([7.75], [15.4375])

    Reference: Izmailov et al., "Averaging Weights Leads to Wider Optima and Better
    Generalization" (2018), arXiv:1803.05407, section 3.2.
    """
    several = iter(batches)
    first = next(several, None)
    if first is None:
        raise ValueError("recalibrate got no batches, expected one or more")
    first = _positional(first)
    layers = norm_layers(model, variables, *first, **kwargs)
    layers = {path: each for path, each in layers.items() if stores(each.spec)}
    if not layers:
        raise ValueError(
            f"no norm of {type(model).__name__} stores statistics: there is nothing to "
            "recalibrate"
        )
    for layer in layers.values():
        _check_stored(layer)
    twin, _ = replace_norms(
        model, lambda path, _: "batch" if path in layers else None, variables, *first,
        **kwargs,
    )  # fmt: skip
    parts: dict[str, list[Moments]] = {path: [] for path in layers}
    for batch in itertools.chain([first], map(_positional, several)):
        seen = norm_inputs(twin, variables, *batch, **kwargs)
        for path in layers.keys() & seen.keys():
            spec = layers[path].spec
            parts[path] += [_moments(spec, call) for call in seen[path].calls]
    found = {path: _pooled(layers[path], each) for path, each in parts.items() if each}
    given = model if isinstance(model, nnx.Module) else variables
    return restore(given, {**snapshot(given), **found})


def _moments(spec: NormSpec, call: NormCall) -> Moments:
    """Of the input of one call, whatever the variance algorithm of the spec."""
    exact, x = spec.replace(precision=Precision(), axis_names=()), call.x
    x = x if jnp.issubdtype(x.dtype, jnp.floating) else x.astype(jnp.float32)
    found = functional.moments(exact, x, call.mask)
    axes = example_axes(exact, found.mean.ndim)
    return merge(found, axes) if axes else found


def _pooled(layer: NormLayer, parts: list[Moments]) -> dict[str, Array]:
    spec, old = layer.spec, layer.stored
    found = merge(jax.tree.map(lambda *arrays: jnp.stack(arrays), *parts))
    mean, variance = (
        found.mean + found.mean_low,
        second_moment(spec, found, spec.running.ddof),
    )
    count = jnp.full(mean.shape, len(parts), jnp.int32)
    if spec.running.debias:  # which reading divides by
        weight = running.effective_weight(spec, running.State(mean, variance, count))
        mean, variance = mean * weight, variance * weight
    taken = found.count > spec.running.ddof
    new = {}
    for name, value in (("mean", mean), ("var", variance), ("count", count)):
        if name in old:
            exact = name == "count"
            dtype = count.dtype if exact else at_least(old[name].dtype, "float32")
            kept = old[name].astype(dtype)
            new[name] = jnp.where(taken, value.astype(dtype), kept)
    return new


def _check_stored(layer: NormLayer) -> None:
    missing = [name for name in ("mean", "var") if name not in layer.stored]
    plain = hasattr(layer.spec, "running")
    if plain and missing:
        raise ValueError(
            f"{layer.path or layer.kind} has no {', '.join(missing)} in 'batch_stats': "
            "init makes them, and a checkpoint must hold them"
        )
    if not plain or layer.shape is None:
        return
    shape = running.init(layer.spec, layer.shape).mean.shape
    if layer.stored["mean"].size != prod(shape):
        raise ValueError(
            f"{layer.path} stores a mean of shape {layer.stored['mean'].shape}, and a "
            f"call sees {shape}: nn.scan or nn.vmap stacks them, and recalibrate pools "
            "one set for each layer"
        )


def _positional(batch: Any) -> tuple[Any, ...]:
    return batch if isinstance(batch, tuple) else (batch,)
