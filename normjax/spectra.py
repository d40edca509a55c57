"""What the derivative does to each group, in numbers per group and O(n).

    offset (1 − αₘ)/s      radial ρ/s      tangential 1/s

For the plain centred map with ε inside the root: 0, ε/s³ and 1/s. ``normjax.factors``
has the numbers, ``normjax.jacobian`` the whole map.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import prod

import jax
import jax.numpy as jnp
from jax import Array

from normjax import functional
from normjax.arguments import checked, prepare
from normjax.factors import Factors, factors
from normjax.jacobian import input_jacobian
from normjax.layout import Layout
from normjax.operators import condition
from normjax.pattern import ELLIPSIS
from normjax.program import Program, inverse
from normjax.spec import NormSpec
from normjax.statistics import Moments, Statistics, counts, select


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Spectrum:
    """The eigenvalues of ∂x̂/∂x, one set for each group (of its valid entries).

    Attributes:
        offset: on the common offset: 0 if the input's own mean is subtracted.
        radial: on c = x − m̄: suppressed by ε.
        tangential: 1/s on everything else.
        count: number of valid entries N (the sum of the weights).
        size: number of entries n of a group.
        centered: whether something is subtracted.
    """

    offset: Array
    radial: Array
    tangential: Array
    count: Array
    size: int = field(metadata={"static": True})
    centered: bool = field(metadata={"static": True})

    @property
    def multiplicities(self) -> tuple[int, int, int]:
        """How often each occurs without a mask; under one the last is N − 2."""
        if self.size == 1:
            return (1, 0, 0) if self.centered else (0, 1, 0)
        return (1, 1, self.size - 2)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Geometry:
    """What a layer does to each group of an input, and how near it is to trouble.

    Every array has the shape of the mapped axes (behind those that were mapped over).

    Attributes:
        spectrum: the gains on the offset, radial and tangential directions.
        share: the stabilizer share ρ, radial over tangential gain.
        condition: largest over smallest nonzero singular value of ∂x̂/∂x: 1/ρ for a
            plain layer, 1 where ρ = 0.
        distance: ‖x − m‖, how far the group is from the nearest one without variance
            (‖x‖ for ``rms`` and ``l2``).
        kappa: κ = |mean|/std of the input; inf for a constant group off zero, 0 for a
            group of zeros.
        rms: √mean(x²) of the valid entries.
        largest: the largest |x| of them.
    """

    spectrum: Spectrum
    share: Array
    condition: Array
    distance: Array
    kappa: Array
    rms: Array
    largest: Array

    @property
    def _size(self) -> Array:
        """Root of the mean of the squares that are divided by: std, or rms."""
        return self.distance * inverse(jnp.sqrt(self.spectrum.count))

    def rounding(self, dtype) -> Array:
        """Bound on the normwise error of x̂ when x alone is rounded to ``dtype``.

        (u rms(x) + half the smallest subnormal)/std, or over rms(x) where x is divided
        by it: whatever computes afterwards, and however exactly. inf where an entry
        overflows, or nothing of the group is left.
        """
        limits = jnp.finfo(dtype)
        least = float(limits.smallest_subnormal) / 2
        lost = self.rms * (float(limits.eps) / 2) + least
        error = jnp.where(self._size > 0, lost * inverse(self._size), jnp.inf)
        return jnp.where(self.largest > float(limits.max), jnp.inf, error)

    def cancellation(self, dtype) -> Array:
        """Relative error of a variance E[x²] − E[x]² that is accumulated in ``dtype``.

        u (1 + κ²) to the leading order, u for a mean square; 1 and more leave no digit.
        inf where the sum of squares overflows.
        """
        limits = jnp.finfo(dtype)
        squares = self.rms * (self.rms * self.spectrum.count)
        ratio = jnp.where(self._size > 0, self.rms * inverse(self._size), jnp.inf)
        ratio = jnp.where(self.rms > 0, ratio, 1)
        error = ratio**2 * (float(limits.eps) / 2)
        return jnp.where(squares > float(limits.max), jnp.inf, error)


def spectrum(
    spec: NormSpec,
    x: Array,
    *,
    mask: Array | None = None,
    moments: Moments | Statistics | None = None,
    reference: Statistics | None = None,
) -> Spectrum:
    """The eigenvalues of ∂x̂/∂x in O(n), without the affine part.

    With ``axis_names`` those of the whole group, of which each device has a part.

    Args:
        spec: the layer.
        x: the input.
        mask: as for ``normalize``.
        moments: as for ``normalize``.
        reference: as for ``normalize``.

    Returns:
        A ``Spectrum`` whose arrays have the shape of the mapped axes.

    Raises:
        ValueError: as ``normalize``, and for ``statistics="blend"``, whose eigenvalues
            are those of ``input_jacobian``.

    Example:
        >>> import jax, jax.numpy as jnp, normjax as nj
        >>> xs = jnp.array([[1.0, 2.0, 3.0], [10.0, 20.0, 30.0]])
        >>> many = jax.vmap(lambda x: nj.spectrum(nj.layer_norm(epsilon=1.0), x))(xs)
        >>> print(many.tangential.round(4), many.multiplicities)
        [0.7746 0.1216] (1, 1, 1)
    """
    layout, program, found = _per_group(spec, x, mask, moments, reference)
    return _spectrum(layout, program, found)


def stabilizer_share(
    spec: NormSpec,
    x: Array,
    *,
    mask: Array | None = None,
    moments: Moments | Statistics | None = None,
    reference: Statistics | None = None,
) -> Array:
    """ρ, the radial over the tangential gain of every group.

    ρ = ε/(σ² + ε) for ε inside the root: 0 is exact local scale invariance, 1 means
    that the layer is linear in this direction.

    Args:
        spec: the layer.
        x: the input.
        mask: as for ``normalize``.
        moments: as for ``normalize``.
        reference: as for ``normalize``.

    Returns:
        An array in the shape of the mapped axes.

    Raises:
        ValueError: as ``spectrum``.

    Example:
        >>> import jax.numpy as jnp, normjax as nj
        >>> x = jnp.array([[0.0, 2.0]])
        >>> nj.stabilizer_share(nj.layer_norm(epsilon=1.0), x).tolist()
        [0.5]
    """
    return _per_group(spec, x, mask, moments, reference)[2].core[3]


def geometry(
    spec: NormSpec,
    x: Array,
    *,
    mask: Array | None = None,
    moments: Moments | Statistics | None = None,
    reference: Statistics | None = None,
) -> Geometry:
    """Gains, condition, distance to zero variance and precision of every group.

    It is mapped over leading axes that the pattern does not name (of x, and of a mask
    of the same rank): one call for many inputs. A pattern with ``...`` names all axes.

    Args:
        spec: the layer.
        x: the input, or many along leading axes.
        mask: as for ``normalize``.
        moments: as for ``normalize``; the same for all.
        reference: as for ``normalize``; the same for all.

    Returns:
        A ``Geometry``; condition is in O(n) too, by a QR of the factors where the map
        is not symmetric (weights, ``center`` against ``divide``).

    Raises:
        ValueError: as ``spectrum``.

    Example:
        >>> import jax.numpy as jnp, normjax as nj
        >>> x = jnp.array([[1.0, 2.0, 3.0], [1e4, 1e4 + 1, 1e4 + 2]])
        >>> found = nj.geometry(nj.NormSpec("[c]", epsilon=1e-2), x)
        >>> print(found.share.round(4), found.condition.round(2), found.kappa.round(2))
        [0.0148 0.0148] [67.67 67.67] [2.4500e+00 1.2249e+04]
        >>> [f"{error:.2g}" for error in found.rounding("bfloat16")]
        ['0.01', '48']
    """
    x = x if isinstance(x, jax.Array) else jnp.asarray(x)
    named = spec.parsed.dimensions
    extra = x.ndim - len(named)
    if extra > 0 and ELLIPSIS not in [dim.name for dim in named]:
        along = 0 if mask is not None and jnp.ndim(mask) == x.ndim else None

        def one(x: Array, mask: Array | None) -> Geometry:
            given = {"mask": mask, "moments": moments, "reference": reference}
            return geometry(spec, x, **given)

        return jax.vmap(one, in_axes=(0, along))(x, mask)
    given = {"moments": moments, "reference": reference}
    layout, program, found = _per_group(spec, x, mask, *given.values())
    own = functional.moments(spec, x, mask)
    mean, mean_square = jnp.abs(own.mean + own.mean_low), own.mean_square()
    variance = own.variance()
    std, rms = jnp.sqrt(variance), jnp.sqrt(mean_square)
    constant = jnp.where(mean > 0, jnp.inf, 0)
    squares = variance if spec.divide in ("std", "none") else mean_square
    bare = spec.replace(affine=None, masked_output="zero")
    return Geometry(
        spectrum=_spectrum(layout, program, found),
        share=found.core[3],
        condition=condition(input_jacobian(bare, x, mask=mask, **given)),
        distance=jnp.sqrt(squares * own.count),
        kappa=jnp.where(std > 0, mean / jnp.where(std > 0, std, 1), constant),
        rms=rms,
        largest=_largest(spec, x, mask),
    )


def _per_group(
    spec: NormSpec, x: Array, mask, moments, reference
) -> tuple[Layout, Program, Factors]:
    """Factors without the activations, and N, in the shape of the mapped axes."""
    if spec.statistics == "blend" and moments is None:
        raise ValueError(
            "a blend has no fixed offset and radial direction: use "
            "eigenvalues(input_jacobian(...))"
        )
    layout, program, inputs = prepare(spec, x, None, mask, moments, reference)
    found = factors(program, inputs)
    empty = jnp.zeros(layout.keep_shape, found.c.dtype)
    count = found.count
    if not program.own:
        count = counts(layout.reduced, layout.view_shape, inputs.weights, empty.dtype)
    found = found._replace(c=empty, a=empty, b=empty, count=count)

    def per_group(array: Array) -> Array:
        return jnp.broadcast_to(array, layout.keep_shape).reshape(layout.mapped_shape)

    return layout, program, jax.tree.map(per_group, found)


def _spectrum(layout: Layout, program: Program, found: Factors) -> Spectrum:
    names = program.spec.axis_names if program.own else ()
    return Spectrum(
        found.core[0] * found.gain,
        found.core[3] * found.gain,
        found.gain,
        found.count,
        size=layout.group_size * prod(jax.lax.axis_size(name) for name in names),
        centered=program.spec.center,
    )


def _largest(spec: NormSpec, x: Array, mask: Array | None) -> Array:
    """The largest |x| of the valid entries of every group."""
    layout, x, _, weights = checked(spec, x, mask)
    valid = select(weights, jnp.abs(x.reshape(layout.view_shape)))
    return jnp.max(valid, layout.reduced, initial=0)
