"""Running statistics: state that is initialized, updated, read and merged explicitly.

    exponential   stored ← decay · stored + (1 − decay) · new
    cumulative    stored ← stored + (new − stored)/t at update t

The number is always ``decay``, the share that is kept. Normalizing and updating are
separate acts: a freeze is not calling ``update``, a reset is calling ``init``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from normjax.arguments import bind, second_moment
from normjax.information import example_axes
from normjax.layout import Layout
from normjax.records import check_choice, check_number
from normjax.spec import NormSpec, Running, check_numbers
from normjax.statistics import Moments, Statistics, at_least, divide_or_zero
from normjax.statistics import merge as merge_moments


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class State:
    """Stored statistics, in at least float32.

    Attributes:
        mean: running mean, in the shape of the mapped axes without the example's.
        variance: running variance (mean square for rms, sum of squares for l2).
        count: number of updates that each entry has seen.
    """

    mean: Array
    variance: Array
    count: Array


# What a library calls momentum (or decay_rate): the share kept, or that of the new.
_KEEPS = ("flax", "keras", "tensorflow", "haiku", "equinox", "onnx", "paddle", "keep")
_RENEWS = ("torch", "mlx", "update_rate")


def decay(momentum: float, convention: str) -> float:
    """The share that is kept, from the number that a library calls momentum.

    Args:
        momentum: of the library, between 0 and 1.
        convention: ``"torch"``, ``"mlx"`` or ``"update_rate"``, where momentum is the
            weight of the new value; ``"flax"``, ``"keras"``, ``"tensorflow"``,
            ``"haiku"``, ``"equinox"``, ``"onnx"``, ``"paddle"`` or ``"keep"``, where it
            is the weight of the old one.

    Returns:
        ``Running.decay``: 1 − momentum, or momentum.

    Raises:
        ValueError: on an unknown convention, or a number that is no share.

    Example:
        >>> import normjax as nj
        >>> nj.running.decay(0.1, "torch"), nj.running.decay(0.99, "flax")
        (0.9, 0.99)
    """
    check_choice("convention", convention, (*_KEEPS, *_RENEWS))
    check_number("momentum", momentum, most=1)
    return 1 - momentum if convention in _RENEWS else momentum


def init(spec: NormSpec, shape: tuple[int, ...], dtype: Any = jnp.float32) -> State:
    """The state before any update.

    Args:
        spec: a layer with ``running``.
        shape: shape of the input.
        dtype: of the statistics; they are kept in at least float32.

    Returns:
        State filled with ``running.initial``.

    Raises:
        ValueError: if the spec stores nothing, or the shape does not fit.

    Example:
        >>> import normjax as nj
        >>> nj.running.init(nj.batch_norm(), (8, 3)).variance.tolist()
        [1.0, 1.0, 1.0]
    """
    running = _running(spec)
    layout = bind(spec, shape)
    stored = tuple(layout.view_shape[i] for i in _stored_axes(spec, layout))
    dtype = at_least(at_least(dtype, "float32"), spec.precision.accumulate)
    mean, variance = (jnp.full(stored, value, dtype) for value in running.initial)
    return State(mean, variance, jnp.zeros(stored, jnp.int32))


def update(spec: NormSpec, state: State, moments: Moments) -> State:
    """The state after one batch.

    Args:
        spec: the layer.
        state: from ``init`` or ``update``; a narrower one is widened to float32.
        moments: of the batch, from ``nj.moments``. Axes that belong to the examples
            (ghosts, instances) are merged first, weighted by their counts.

    Returns:
        The new State. Entries whose count is not above ``running.ddof`` are unchanged,
        likewise non-finite ones with ``nonfinite="skip"``.

    Raises:
        ValueError: if the shapes do not fit.

    Example:
        >>> import jax.numpy as jnp, normjax as nj
        >>> spec = nj.batch_norm(running=nj.Running(decay=0.9, ddof=1))
        >>> x = jnp.array([[1.0], [2.0], [3.0], [4.0]])
        >>> state = nj.running.update(
        ...     spec, nj.running.init(spec, x.shape), nj.moments(spec, x)
        ... )
        >>> round(float(state.variance[0]), 6)  # 0.9 + 0.1 * 5/3
        1.066667
    """
    running = _running(spec)
    _check_kind("state", state, State, "nj.running.init")
    _check_kind("moments", moments, Moments, "nj.moments")
    moments = _per_entry(spec, state, moments)
    dtype = at_least(state.mean.dtype, "float32")
    state = State(state.mean.astype(dtype), state.variance.astype(dtype), state.count)
    mean = (moments.mean + moments.mean_low).astype(dtype)
    variance = second_moment(spec, moments, running.ddof).astype(dtype)
    count = state.count + 1
    if running.average == "cumulative":
        weight = 1 / count.astype(dtype)
    else:
        # A plain number is subtracted before it is rounded: 1 − 0.99 has all digits.
        weight = jnp.asarray(1 - running.decay, dtype)
    taken = moments.count > running.ddof
    if running.nonfinite == "skip":
        taken = taken & jnp.isfinite(mean) & jnp.isfinite(variance)

    def mix(old: Array, new: Array) -> Array:
        new = jnp.where(taken, new, old)
        return jnp.where(taken, (1 - weight) * old + weight * new, old)

    return State(
        mix(state.mean, mean),
        mix(state.variance, variance),
        jnp.where(taken, count, state.count),
    )


def read(spec: NormSpec, state: State) -> Statistics:
    """The statistics to normalize with.

    Returns:
        ``Statistics``; with ``debias`` they are divided by 1 − decayᵗ, and are mean 0
        and variance 1 where there was no update yet.

    Example:
        >>> import jax.numpy as jnp, normjax as nj
        >>> spec = nj.batch_norm(running=nj.Running(debias=True, initial=(0, 0)))
        >>> x = jnp.array([[1.0], [2.0], [3.0], [4.0]])
        >>> state = nj.running.update(
        ...     spec, nj.running.init(spec, x.shape), nj.moments(spec, x)
        ... )
        >>> [
        ...     round(float(v[0]), 4)
        ...     for v in (state.mean, nj.running.read(spec, state).mean)
        ... ]
        [0.025, 2.5]
    """
    running = _running(spec)
    _check_kind("state", state, State, "nj.running.init")
    if not running.debias:
        return Statistics(state.mean, state.variance)
    weight = effective_weight(spec, state)
    fresh = weight == 0
    mean = divide_or_zero(state.mean, weight)
    variance = divide_or_zero(state.variance, weight)
    return Statistics(mean, jnp.where(fresh, jnp.ones_like(variance), variance))


def statistics(
    spec: NormSpec, state: State, stored: bool, reference: Statistics | None = None
) -> dict[str, Statistics | None]:
    """What a layer that holds a state passes to ``normalize``.

    Args:
        spec: the layer.
        state: from ``init`` or ``update``, before this batch.
        stored: normalize with the stored statistics, not the batch's own.
        reference: in place of the stored statistics, where the spec needs one.

    Returns:
        ``moments`` if stored, else ``reference``: the stored statistics for a blend and
        a renorm, None for others.

    Example:
        >>> import normjax as nj
        >>> state = nj.running.init(nj.batch_norm(), (8, 3))
        >>> nj.running.statistics(nj.batch_norm(), state, stored=False)
        {'reference': None}
    """
    if stored:
        return {"moments": read(spec, state)}
    if reference is None and spec.statistics != "input":
        reference = read(spec, state)
    return {"reference": reference}


def effective_weight(spec: NormSpec, state: State) -> Array:
    """Share of the stored average that comes from data: 1 − decayᵗ (1 if cumulative).

    Example:
        >>> import dataclasses, jax.numpy as jnp, normjax as nj
        >>> spec = nj.batch_norm()
        >>> state = nj.running.init(spec, (8, 1))
        >>> state = dataclasses.replace(state, count=jnp.array([100]))
        >>> nj.running.effective_weight(spec, state).round(4).tolist()
        [0.6340000033378601]
    """
    running = _running(spec)
    _check_kind("state", state, State, "nj.running.init")
    t = state.count.astype(state.mean.dtype)
    if running.average == "cumulative":
        return (t > 0).astype(t.dtype)
    weight = jnp.asarray(1 - running.decay, t.dtype)
    # 1 - decay**t loses digits for a decay near 1; at t = 0 both forms are 0.
    log = jnp.log1p(-jnp.where(weight < 1, weight, 0))
    return jnp.where(weight < 1, -jnp.expm1(t * log), (t > 0).astype(t.dtype))


def merge(states: Sequence[State], weights: Sequence[float] | None = None) -> State:
    """Pool states of the same layer that saw different data.

    Means and mean squares average; so the pooled variance contains the distance between
    the means, which an average of variances leaves out:

        mean = Σ pₖ meanₖ      variance = Σ pₖ (varianceₖ + (meanₖ − mean)²)

    Args:
        states: States of equal shape, about the mean (not for rms and l2).
        weights: shares pₖ, normalized here; equal if None.

    Returns:
        A State whose count is the sum of the counts.

    Raises:
        ValueError: if there are no states, their shapes differ, or there is not one
            weight for each.

    Example:
        >>> import dataclasses, jax.numpy as jnp, normjax as nj
        >>> first = nj.running.init(nj.batch_norm(), (8, 1))
        >>> second = dataclasses.replace(first, mean=jnp.array([4.0]))
        >>> pooled = nj.running.merge([first, second])
        >>> pooled.mean.tolist(), pooled.variance.tolist()
        ([2.0], [5.0])
    """
    if not isinstance(states, Sequence):
        raise ValueError(f"states is a {type(states).__name__}, expected a list")
    if not states:
        raise ValueError("merge got no states, expected one or more")
    for state in states:
        _check_kind("one of states", state, State, "nj.running.init")
    shapes = sorted({state.mean.shape for state in states})
    if len(shapes) > 1:
        raise ValueError(
            f"merge got states of shapes {', '.join(map(str, shapes))}, expected one "
            "shape: they must belong to the same layer"
        )
    shares = [1.0] * len(states) if weights is None else list(weights)
    if len(shares) != len(states):
        raise ValueError(
            f"merge got {len(states)} states and {len(shares)} weights, expected one "
            "weight for each state"
        )
    stacked = jax.tree.map(lambda *arrays: jnp.stack(arrays), *states)
    weight = jnp.asarray(shares, stacked.mean.dtype)
    weight = (weight / weight.sum()).reshape(-1, *[1] * (stacked.mean.ndim - 1))
    count = jnp.broadcast_to(weight, stacked.mean.shape)
    parts = Moments(
        count, stacked.mean, jnp.zeros_like(stacked.mean), count * stacked.variance
    )
    pooled = merge_moments(parts)
    return State(
        pooled.mean + pooled.mean_low, pooled.variance(), stacked.count.sum(axis=0)
    )


def _running(spec: NormSpec) -> Running:
    if spec.running is None:
        raise ValueError(
            f"{spec!r} stores no statistics: give it running=Running(decay=...)"
        )
    check_numbers(spec)
    return spec.running


def _check_kind(name: str, value: object, kind: type, source: str) -> None:
    if not isinstance(value, kind):
        raise ValueError(
            f"{name} is a {type(value).__name__}, expected {kind.__name__} ({source})"
        )


def _stored_axes(spec: NormSpec, layout: Layout) -> tuple[int, ...]:
    example = layout.example_axes(spec.example)
    return tuple(i for i in layout.mapped if i not in example)


def _per_entry(spec: NormSpec, state: State, moments: Moments) -> Moments:
    """Merge the axes that belong to examples, which the state does not have."""
    axes = example_axes(spec, moments.mean.ndim)
    kept = [size for i, size in enumerate(moments.mean.shape) if i not in axes]
    if tuple(kept) != state.mean.shape:
        raise ValueError(
            f"state has shape {state.mean.shape}, expected {tuple(kept)}: moments of "
            f"'{spec.pattern}' have shape {moments.mean.shape}; both must come from "
            "inputs that agree in the mapped axes"
        )
    return merge_moments(moments, axes) if axes else moments
