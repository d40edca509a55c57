"""Norms that are x·a + b for each feature, and exact changes of their parameters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from normjax import running
from normjax.functional import normalize
from normjax.pattern import ELLIPSIS, Dimension, dimensions
from normjax.records import check_choice, check_number
from normjax.running import State
from normjax.spec import NormSpec, Precision
from normjax.statistics import Statistics, at_least


def feature_map(
    spec: NormSpec,
    params: Mapping[str, Any] | None,
    stored: Statistics | None,
    features: tuple[int, ...],
) -> tuple[np.ndarray, np.ndarray]:
    """The numbers of norm(x) = x·a + b, in float64.

    Args:
        spec: the norm.
        params: as for ``nj.normalize``.
        stored: its statistics; None: a and b of the affine part alone.
        features: sizes of the axes that are to be its features.

    Returns:
        a and b, flat over the features.

    Raises:
        ValueError: if they are not, or a stored variance is negative or not finite.

    Example:
        >>> import numpy as np, normjax as nj
        >>> stored = nj.Statistics(np.array([2.0]), np.array([4.0]))
        >>> a, b = feature_map(nj.batch_norm(epsilon=0.0), None, stored, (1,))
        >>> a.tolist(), b.tolist()
        ([0.5], [-1.0])
    """
    owners = _owners(spec, stored is not None)
    if len(owners) == 1:
        features = (prod(features),)
    wide = {
        name: np.asarray(value, np.float64) for name, value in (params or {}).items()
    }
    for name, value in wide.items():
        _check_shape(f"params.{name}", value.shape, features)
    zeros, ones = np.zeros(features), np.ones(features)
    if stored is None:
        stored_as = spec.affine.stored if spec.affine is not None else "w"
        a = wide.get("scale", ones if stored_as == "w" else zeros)
        a = a + 1 if stored_as == "1+w" else a
        return a.ravel(), wide.get("bias", zeros).ravel()
    mean, variance = (np.asarray(v, np.float64) for v in (stored.mean, stored.variance))
    _check_stored(mean, variance)
    if not any(dimension.composite for dimension in owners):
        _check_shape("state", mean.shape, features)
    unbiased = {**wide, "bias": zeros} if "bias" in wide else wide
    a = _at(spec, owners, features, 1, unbiased, np.zeros_like(mean), variance)
    b = _at(spec, owners, features, 0, wide, mean, variance)
    return a.ravel(), b.ravel()


def _at(
    spec: NormSpec,
    owners: list[Dimension],
    features: tuple[int, ...],
    value: float,
    params: Mapping[str, np.ndarray],
    mean: np.ndarray,
    variance: np.ndarray,
) -> np.ndarray:
    """The norm of one constant, in float64, for each feature."""
    sizes, left = dict(spec.sizes), list(features)
    shape, index = [], []
    for dimension in spec.parsed.dimensions:
        if dimension in owners:
            shape.append(left.pop(0))
            index.append(slice(None))
        elif dimension.name != ELLIPSIS:
            shape.append(prod(sizes.get(axis.name, 1) for axis in dimension.parts))
            index.append(0)
    exact = Precision(accumulate="float64", output="float64")
    plain = spec.replace(precision=exact, single="zero", axis_names=())
    with jax.enable_x64(True):
        given = {name: jnp.asarray(array) for name, array in params.items()}
        stored = Statistics(jnp.asarray(mean), jnp.asarray(variance))
        x = jnp.full(shape, value, jnp.float64)
        y = np.asarray(_normalized(plain, x, given or None, stored))
    return y[tuple(index)]


@jax.jit
def _normalized(spec: NormSpec, x: Array, params: Any, stored: Statistics) -> Array:
    return normalize(spec, x, params, moments=stored)


def _owners(spec: NormSpec, with_statistics: bool) -> list[Dimension]:
    """The dimensions that are the features: last, or channels first."""
    pattern = spec.parsed
    example = pattern.example(spec.example)
    mapped = [
        dimension
        for dimension in pattern.dimensions
        if dimension != example and not all(axis.reduced for axis in dimension.parts)
    ]
    owners = mapped
    if spec.affine is not None:
        named = [dimension.name for dimension in dimensions(spec.affine.axes)]
        owners = [d for d in pattern.dimensions if d.name in named]
        if len(owners) < len(named):
            owners = []
    at = [pattern.dimensions.index(dimension) for dimension in owners]
    last = at == list(range(len(pattern.dimensions) - len(at), len(pattern.dimensions)))
    first = at == [1] and pattern.dimensions[0].name != ELLIPSIS
    if not at or not (last or first) or ELLIPSIS in [d.name for d in owners]:
        axes = None if spec.affine is None else spec.affine.axes
        raise ValueError(
            f"the features of '{spec.pattern}' with affine axes {axes!r} are not its "
            "last axes, nor the second one: a kernel has no other"
        )
    if with_statistics and not set(mapped) <= set(owners):
        names = " ".join(d.name for d in mapped if d not in owners)
        raise ValueError(
            f"'{spec.pattern}' has statistics for each {names}, and a kernel only has "
            "numbers for each feature"
        )
    return owners


def _check_shape(name: str, shape: tuple[int, ...], features: tuple[int, ...]) -> None:
    if shape != features:
        raise ValueError(
            f"{name} has shape {shape}, and the kernel's axes on the norm's side are "
            f"{features}: check order=, layout=, groups= and transposed="
        )


def _check_stored(mean: np.ndarray, variance: np.ndarray) -> None:
    if not (np.isfinite(mean).all() and np.isfinite(variance).all()):
        raise ValueError(
            "state has entries that are not finite: it was spoiled earlier"
        )
    if (variance < 0).any():
        raise ValueError(
            f"state has a variance of {variance.min():.3g}, expected 0 or more: was ε "
            "subtracted from it?"
        )


@dataclass(frozen=True)
class Rewritten:
    """The same norm with other parameters.

    Attributes:
        spec: the layer now.
        params: its parameters.
        error: largest relative change of a scale, from rounding alone.
    """

    spec: NormSpec
    params: dict[str, Any]
    error: float


def store_scale(
    spec: NormSpec, params: Mapping[str, Any], stored: str = "w"
) -> Rewritten:
    """Store a scale as itself or as its distance from one, without using another.

    Both directions are rounded to at least float32, in which the layer adds the one:
    ``"1+w"`` to ``"w"`` is what the layer multiplied with, bit by bit in float32.

    Args:
        spec: the norm.
        params: with ``scale``.
        stored: ``"w"`` or ``"1+w"``, as ``Affine.stored``.

    Returns:
        Rewritten, whose spec says which one it is.

    Raises:
        ValueError: if it is stored like that: the one would be added twice.

    Example:
        >>> import jax.numpy as jnp, normjax as nj
        >>> spec = nj.rms_norm(affine=nj.Affine("c", bias=False, stored="1+w"))
        >>> params = {"scale": jnp.array([15.8125], jnp.bfloat16)}
        >>> baked = nj.interop.store_scale(spec, params, "w")
        >>> baked.params["scale"].tolist(), baked.spec.affine.stored
        ([16.8125], 'w')
    """
    check_choice("stored", stored, ("w", "1+w"))
    if spec.affine is None or not spec.affine.scale or "scale" not in params:
        raise ValueError(f"{spec!r} has no scale: there is nothing to store")
    if spec.affine.stored == stored:
        raise ValueError(
            f"the scale is stored as {stored!r} already: a one would be "
            f"{'added' if stored == 'w' else 'subtracted'} twice"
        )
    before = jnp.asarray(params["scale"])
    dtype = at_least(before.dtype, "float32")
    wide = np.asarray(before, np.float64)
    sign = 1.0 if stored == "w" else -1.0
    scale = (wide + sign).astype(dtype)
    had, has = (wide + 1, scale) if sign > 0 else (wide, scale.astype(np.float64) + 1)
    affine = spec.affine.replace(stored=stored)
    return Rewritten(
        spec.replace(affine=affine),
        {**params, "scale": jnp.asarray(scale)},
        _relative(had, np.asarray(has, np.float64)),
    )


def absorb_epsilon(
    spec: NormSpec,
    params: Mapping[str, Any],
    state: State | Statistics,
    epsilon: float,
) -> Rewritten:
    """Another ε with the same output, where the statistics are stored.

        scale′ = scale · S_new(σ²)/S_old(σ²)

    It holds for those statistics: in training, and for a norm of its input, no scale
    can make up for another ε.

    Args:
        spec: a norm with a scale.
        params: of the norm.
        state: its stored statistics.
        epsilon: the new one.

    Returns:
        Rewritten.

    Raises:
        ValueError: if there is no scale, or a new divisor is 0.

    Example:
        >>> import jax.numpy as jnp, normjax as nj
        >>> stored = nj.Statistics(jnp.array([0.0]), jnp.array([0.01]))
        >>> params = nj.init(nj.batch_norm(), (2, 1))
        >>> new = nj.interop.absorb_epsilon(nj.batch_norm(), params, stored, 1e-3)
        >>> new.params["scale"].tolist(), new.spec.epsilon
        ([1.048285], 0.001)
    """
    check_number("epsilon", epsilon)
    if spec.affine is None or not spec.affine.scale or "scale" not in params:
        raise ValueError(f"{spec!r} has no scale that could take up another ε")
    if not isinstance(state, State | Statistics):
        raise ValueError(
            f"state is a {type(state).__name__}: only with stored statistics, State or "
            "Statistics, is another ε another scale"
        )
    stored = running.read(spec, state) if isinstance(state, State) else state
    old = jnp.asarray(params["scale"])
    new = spec.replace(epsilon=epsilon)
    bare = {"affine": None}
    before, _ = feature_map(spec.replace(**bare), None, stored, old.shape)
    after, _ = feature_map(new.replace(**bare), None, stored, old.shape)
    if not after.all():
        raise ValueError(f"with epsilon={epsilon} a stored variance of 0 divides by 0")
    offset = 1.0 if spec.affine.stored == "1+w" else 0.0
    wanted = (np.asarray(old, np.float64).ravel() + offset) * before / after
    scale = (wanted - offset).reshape(old.shape).astype(old.dtype)
    has = np.asarray(scale, np.float64).ravel() + offset
    params = {**params, "scale": jnp.asarray(scale)}
    return Rewritten(new, params, _relative(wanted, has))


def _relative(wanted: np.ndarray, found: np.ndarray) -> float:
    size = np.where(wanted == 0, 1, np.abs(wanted))
    return float((np.abs(found - wanted) / size).max(initial=0))
