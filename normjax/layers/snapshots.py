"""Stored statistics of whole models: kept, put back, merged.

A model or variables that are given stay as they are; what comes back is new.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import flax.linen as nn
import jax.numpy as jnp
from flax import nnx
from flax.traverse_util import flatten_dict, unflatten_dict
from jax import Array

from normjax import running
from normjax.layers.watch import held, modules
from normjax.records import check_choice

Snapshot = dict[str, dict[str, Array]]


def snapshot(model_or_variables: Any) -> Snapshot:
    """Every stored statistic, to be put back by ``restore``.

    Args:
        model_or_variables: an nnx model, or the variables of a linen one.

    Returns:
        By path of the layer, its arrays by name: ``{"bn": {"mean": ..., "var": ...}}``.

    Raises:
        ValueError: if there are none.

    Example:
        >>> import normjax as nj
        >>> from flax import nnx
        >>> model = nnx.Sequential(nnx.BatchNorm(1, rngs=nnx.Rngs(0)))
        >>> {path: list(each) for path, each in nj.surgery.snapshot(model).items()}
        {'layers/0': ['mean', 'var']}
    """
    found: Snapshot = {}
    if isinstance(model_or_variables, nnx.Module):
        for path, module in modules(model_or_variables).items():
            stored = held(module)[1]
            if stored:
                found[path] = stored
    elif isinstance(model_or_variables, Mapping):
        stats: Any = nn.meta.unbox(model_or_variables.get("batch_stats", {}))
        flat: dict[Any, Any] = flatten_dict(stats)
        for path, value in flat.items():
            found.setdefault("/".join(path[:-1]), {})[path[-1]] = value
    else:
        raise ValueError(
            f"got a {type(model_or_variables).__name__}, expected an nnx model or the "
            "variables of a linen one"
        )
    if not found:
        raise ValueError("there are no stored statistics: no nnx.BatchStat, and in "
                         "variables no 'batch_stats'")  # fmt: skip
    return found


def restore(model_or_variables: Any, stored: Snapshot) -> Any:
    """A model or variables with the statistics of a snapshot.

    Args:
        model_or_variables: as for ``snapshot``.
        stored: from ``snapshot``, ``merge_statistics``, or another like model's.

    Returns:
        A clone of the nnx model, or new variables.

    Raises:
        ValueError: if layers, names or shapes differ from those that there are.

    Example:
        >>> import jax.numpy as jnp, normjax as nj
        >>> from flax import nnx
        >>> model = nnx.BatchNorm(1, momentum=0.9, rngs=nnx.Rngs(0))
        >>> before = nj.surgery.snapshot(model)
        >>> y = model(jnp.ones((4, 1)))
        >>> model.mean.get_value().round(1).tolist()
        [0.1]
        >>> nj.surgery.restore(model, before).mean.get_value().tolist()
        [0.0]
    """
    theirs = _flat(snapshot(model_or_variables))
    ours = _flat(stored)
    for name in [*theirs, *ours]:
        shapes = [
            "nothing" if name not in each else f"shape {each[name].shape}"
            for each in (ours, theirs)
        ]
        if shapes[0] != shapes[1]:
            raise ValueError(
                f"the snapshot has {shapes[0]} for {'/'.join(name)}, and the model "
                f"{shapes[1]}: take one of a model with the same layers"
            )
    if isinstance(model_or_variables, nnx.Module):
        copy = nnx.clone(model_or_variables)
        for path, module in modules(copy).items():
            for name, value in stored.get(path, {}).items():
                getattr(module, name).set_value(value)
        return copy
    stats: dict[Any, Any] = flatten_dict(model_or_variables["batch_stats"])
    for path, old in stats.items():
        value = stored["/".join(path[:-1])][path[-1]]
        boxed = isinstance(old, nn.meta.AxisMetadata)
        stats[path] = old.replace_boxed(value) if boxed else value
    return {**model_or_variables, "batch_stats": unflatten_dict(stats)}


def merge_statistics(
    snapshots: Sequence[Snapshot],
    how: str = "pooled",
    counts: Sequence[float] | None = None,
) -> Snapshot:
    """One snapshot from those of several models, as weight averaging needs one.

        pooled:  mean = Σ pₖ meanₖ    variance = Σ pₖ (varianceₖ + (meanₖ − mean)²)

    is that of all their data together: the law of total variance. ``"average"`` leaves
    out the distance between the means. Both are about the mean (not for specs that
    divide by rms or l2). Neither is what the averaged weights would see:
    for that, ``recalibrate``.

    Args:
        snapshots: of models with the same layers.
        how: ``"pooled"``; ``"average"``: Σ pₖ varianceₖ; ``"copy"``: the last one.
        counts: how many examples each saw, for the shares pₖ; equal if None.

    Returns:
        A snapshot. Pooled and averaged counts of updates add up.

    Raises:
        ValueError: if there are none, they differ in layers or shapes, there is not one
            count for each, or an array is neither mean, var nor count.

    Example:
        >>> import jax.numpy as jnp, normjax as nj
        >>> one = {"bn": {"mean": jnp.zeros(1), "var": jnp.ones(1)}}
        >>> two = {"bn": {"mean": jnp.full(1, 4.0), "var": jnp.ones(1)}}
        >>> for how in ("pooled", "average"):
        ...     found = nj.surgery.merge_statistics([one, two], how)["bn"]
        ...     print(how, found["mean"].tolist(), found["var"].tolist())
        pooled [2.0] [5.0]
        average [2.0] [1.0]
    """
    check_choice("how", how, ("pooled", "average", "copy"))
    if not isinstance(snapshots, Sequence) or not snapshots:
        raise ValueError("merge_statistics got no snapshots, expected one or more")
    if counts is not None and len(counts) != len(snapshots):
        raise ValueError(
            f"merge_statistics got {len(snapshots)} snapshots and {len(counts)} "
            "counts, expected one for each"
        )
    flat = [_flat(each) for each in snapshots]
    for k, each in enumerate(flat):
        differ = sorted(set(each) ^ set(flat[0]))
        if differ:
            raise ValueError(
                f"snapshots 0 and {k} differ: only one has {'/'.join(differ[0])}"
            )
    if how == "copy":
        return {path: dict(each) for path, each in snapshots[-1].items()}
    return {
        path: _merged([each[path] for each in snapshots], how, counts, path)
        for path in snapshots[0]
    }


def _merged(
    several: list[dict[str, Array]], how: str, counts: Any, path: str
) -> dict[str, Array]:
    """One layer's arrays; those of member k of a mixture end with ``_k``."""
    merged: dict[str, Array] = {}
    for name in several[0]:
        known = re.fullmatch(r"(mean|var|count)(_\d+)?", name)
        if known is None:
            raise ValueError(
                f"{path}/{name} is neither mean, var nor count: how='copy' takes it"
            )
        if known[1] != "mean":
            continue
        end = known[2] or ""
        zero = jnp.zeros(several[0][name].shape, jnp.int32)
        states = [
            running.State(each[name], each[f"var{end}"], each.get(f"count{end}", zero))
            for each in several
        ]
        pooled = running.merge(states, counts)
        variance = pooled.variance
        if how == "average":
            # About one mean the pooled variance is the average.
            mean = jnp.zeros_like(pooled.mean)
            here = [running.State(mean, each.variance, zero) for each in states]
            variance = running.merge(here, counts).variance
        values = {"mean": pooled.mean, "var": variance, "count": pooled.count}
        for part, value in values.items():
            if f"{part}{end}" in several[0]:
                merged[f"{part}{end}"] = value
    return merged


def _flat(stored: Snapshot) -> dict[tuple[str, str], Array]:
    return {
        (path, name): v for path, each in stored.items() for name, v in each.items()
    }
