"""Mix each member's statistics, and give them to ``normalize``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import reduce
from operator import add, or_
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from normjax import functional
from normjax.arguments import Params, bind, prepare
from normjax.layout import Layout
from normjax.mixture.members import ALIKE, LOGITS, Mixture, owner, used_logits
from normjax.pattern import Pattern
from normjax.spec import NormSpec
from normjax.statistics import Moments, Statistics, two_sum


def init(mixture: Mixture, shape: tuple[int, ...], dtype: Any = jnp.float32) -> Params:
    """Parameters at equal shares and the identity.

    Args:
        mixture: of K members.
        shape: shape of the input.
        dtype: dtype of the parameters.

    Returns:
        ``{"mean_logits": (K,), "variance_logits": (K,), "scale": ..., "bias": ...}``
        without those that are not used: mean_logits needs center=True, variance_logits
        something that is divided by, scale and bias the affine part.

    Raises:
        ValueError: if a member's pattern does not fit the shape.

    Example:
        >>> import normjax as nj
        >>> params = nj.mixture.init(nj.mixture.switchable_norm(), (8, 5, 5, 16))
        >>> {name: value.shape for name, value in params.items()}
        {'mean_logits': (3,), 'variance_logits': (3,), 'scale': (16,), 'bias': (16,)}
    """
    layouts = [bind(spec, shape) for spec in mixture.specs]
    carrier, wide = _carrier(mixture, layouts, 0)
    affine = functional.init(carrier, wide, dtype)
    logits = jnp.zeros((len(mixture.specs),), dtype)
    return dict.fromkeys(used_logits(mixture), logits) | affine


def normalize(
    mixture: Mixture,
    x: Array,
    params: Params | None = None,
    *,
    mask: Array | None = None,
    moments: Sequence[Moments | Statistics | None] | None = None,
) -> Array:
    """Apply a mixture: y = scale · (x − Σ pₖ mₖ)/S(Σ qₖ σ²ₖ) + bias.

    Args:
        mixture: of K members.
        x: the input, any float dtype; its shape must fit every member's pattern.
        params: from ``init``; None: equal shares and no affine part. Logits of shape
            lead + (K,), lead being the leading sizes of x, give every example (or
            position) its own shares: a router's output.
        mask: as for ``nj.normalize``. x̂ is 0 where a member's group is masked
            altogether.
        moments: for each member statistics from elsewhere, as for ``nj.normalize``, or
            None: those of x. At inference the batch norm member takes the stored ones.

    Returns:
        y in x's shape, and in x's dtype unless the members say otherwise.

    Raises:
        ValueError: on a shape, dtype, mask or parameter that does not fit.

    Example:
        >>> import jax.numpy as jnp, normjax as nj
        >>> mixture = nj.mixture.switchable_norm()
        >>> x = jnp.array([[[1.0], [3.0]], [[5.0], [7.0]]])
        >>> print(nj.mixture.normalize(mixture, x).reshape(2, 2).round(4))
        [[-1.0911 0.2182] [-0.2182 1.0911]]
        >>> state = nj.running.init(mixture.specs[2], x.shape)
        >>> stored = nj.running.read(mixture.specs[2], state)
        >>> nj.mixture.normalize(mixture, x, moments=(None, None, stored)).shape
        (2, 2, 1)
    """
    mixed = mixed_statistics(mixture, x, params, mask, moments)
    given = {"mask": mixed.mask, "moments": mixed.moments}
    y = functional.normalize(mixed.carrier, mixed.x, mixed.affine, **given)
    return y.reshape(jnp.shape(x))


class Mixed(NamedTuple):
    """What is given to ``normalize``, and the members with their shares.

    Attributes:
        carrier: the spec that applies mixed statistics.
        x: the input in the shape that the carrier applies them on.
        affine: scale and bias.
        mask: that of x.
        moments: Σ pₖ mₖ and Σ qₖ σ²ₖ in the carrier's shape.
        shares: pₖ and qₖ of every member, broadcasting against the caller's x.
        empty: None, or where x̂ is 0 since a member's group is masked altogether.
    """

    carrier: NormSpec
    x: Array
    affine: Params | None
    mask: Array | None
    moments: Moments
    shares: tuple[list[Array], list[Array]]
    empty: Array | None


def mixed_statistics(mixture: Mixture, x: Array, params, mask, moments) -> Mixed:
    """Mix the members' statistics; arguments as for ``normalize``."""
    if not isinstance(mixture, Mixture):
        raise ValueError(f"mixture is {mixture!r}, expected Mixture((spec, spec))")
    x = x if isinstance(x, jax.Array) else jnp.asarray(x)
    found = _members(mixture, x, mask, moments)
    affine, logits = _split(mixture, x.shape, params)
    lead = max(value.ndim - 1 for value in logits)
    carrier, wide = _carrier(mixture, [member.layout for member in found], lead)
    ps, qs = (_shares(value, found[0].mean.dtype, x.ndim) for value in logits)
    mean, mean_low = _mixed_mean(ps, found)
    variance = reduce(add, (q * m.variance for q, m in zip(qs, found, strict=True)))
    empty = None
    if mask is not None and carrier.masked_output == "keep":
        empty = reduce(or_, (member.empty for member in found))
        x, mean, mean_low = (
            jnp.where(empty, jnp.zeros_like(a), a) for a in (x, mean, mean_low)
        )
    layout = bind(carrier, wide)
    kept = layout.keep_shape[: x.ndim]
    mixed = [
        jnp.broadcast_to(array, kept).reshape(layout.mapped_shape)
        for array in (jnp.ones_like(mean), mean, mean_low, variance)
    ]
    if mask is not None and jnp.ndim(mask) == x.ndim < len(wide):
        mask = jnp.asarray(mask)[..., None]
    x, moments = x.reshape(wide), Moments(*mixed)
    return Mixed(carrier, x, affine, mask, moments, (ps, qs), empty)


class _Member(NamedTuple):
    """One member's statistics with x's dimensions; wholly reduced ones have size 1."""

    layout: Layout
    mean: Array
    mean_low: Array
    variance: Array
    empty: Array


def _members(mixture: Mixture, x: Array, mask, moments) -> list[_Member]:
    """Statistics of every member, repeated over the entries of their groups."""
    given = [None] * len(mixture.specs) if moments is None else moments
    if not isinstance(given, Sequence) or len(given) != len(mixture.specs):
        raise ValueError(
            f"moments is {given!r}, expected Moments, Statistics or None for each of "
            f"{len(mixture.specs)} members"
        )
    found = []
    for spec, elsewhere in zip(mixture.specs, given, strict=True):
        own = functional.moments(spec, x, mask) if elsewhere is None else elsewhere
        layout, _, inputs = prepare(spec, x, None, mask, own)
        mean, low, variance = inputs.numbers.given
        count = own.count if elsewhere is None else jnp.ones(layout.mapped_shape)
        empty = (count == 0).reshape(layout.keep_shape)
        arrays = (_repeated(layout, array) for array in (mean, low, variance, empty))
        found.append(_Member(layout, *arrays))
    return found


def _repeated(layout: Layout, array: Array) -> Array:
    """From the group view to x's dimensions: over the channels of a group."""
    whole = _whole(layout)
    sizes = zip(layout.view_shape, layout.owner, strict=True)
    view = [1 if owner in whole else size for size, owner in sizes]
    kept = [1 if i in whole else size for i, size in enumerate(layout.shape)]
    return jnp.broadcast_to(array, view).reshape(kept)


def _whole(layout: Layout) -> set[int]:
    """Dimensions of x of which every part is reduced."""
    return set(range(len(layout.shape))) - {layout.owner[i] for i in layout.mapped}


def _mixed_mean(shares: list[Array], found: list[_Member]) -> tuple[Array, Array]:
    """Σ pₖ mₖ as a pair: the first mean, and shares of the distances from it.

    A sum of products would round at the size of the means, not of their distances.
    """
    first, low = found[0], found[0].mean_low
    for share, other in zip(shares[1:], found[1:], strict=True):
        low = low + share * (
            (other.mean - first.mean) + (other.mean_low - first.mean_low)
        )
    return two_sum(first.mean, low)


def _split(mixture: Mixture, shape: tuple[int, ...], params: Params | None):
    """The affine part, and both logits: zeros for those that are not given."""
    count, used = len(mixture.specs), used_logits(mixture)
    logits: dict[str, Array] = {name: jnp.zeros((count,)) for name in LOGITS}
    if params is None:
        return None, list(logits.values())
    if not isinstance(params, Mapping) or not set(used) <= set(params):
        got = sorted(params) if isinstance(params, Mapping) else type(params).__name__
        raise ValueError(
            f"params is {got}, expected a dict with {', '.join(used)}, as "
            "nj.mixture.init gives it"
        )
    for name in used:
        logits[name] = value = jnp.asarray(params[name])
        lead = value.shape[:-1]
        if value.shape[-1:] != (count,) or lead != shape[: len(lead)]:
            raise ValueError(
                f"params.{name} has shape {value.shape}, expected ({count},), or "
                f"leading sizes of x {shape} and then {count}: one for each member"
            )
    affine = {name: params[name] for name in params if name not in used}
    return affine, list(logits.values())


def _shares(logits: Array, dtype, ndim: int) -> list[Array]:
    """The softmax, one array for each member that broadcasts against x."""
    shares = jax.nn.softmax(logits.astype(dtype), axis=-1)
    lead = shares.shape[:-1]
    shape = lead + (1,) * (ndim - len(lead))
    return [shares[..., k].reshape(shape) for k in range(shares.shape[-1])]


def _carrier(
    mixture: Mixture, layouts: list[Layout], lead: int
) -> tuple[NormSpec, tuple[int, ...]]:
    """The spec that applies mixed statistics, and the shape that it applies them on.

    Its groups are what shares all of them: the dimensions x0, x1, ... that all members
    reduce, behind those that logits have. Where there is none, x gets a last one of
    size one.
    """
    first, shape = mixture.specs[0], layouts[0].shape
    common = set.intersection(*map(_whole, layouts)) - set(range(lead))
    if not common:
        common, shape = {len(shape)}, (*shape, 1)
    affine = mixture.affine
    if affine is not None:
        layout = layouts[owner(mixture)]
        axes = dict.fromkeys(layout.owner[i] for i in layout.named(affine.axes))
        affine = affine.replace(axes=" ".join(f"x{i}" for i in axes))
    shared = {name: getattr(first, name) for name in ALIKE}
    shared["divide"] = "none" if first.divide == "none" else "std"
    pattern = str(Pattern.from_axes(len(shape), sorted(common)))
    return NormSpec(pattern, example=None, affine=affine, **shared), shape
