"""What the properties of a spec claim, measured; what they deny visibly fails."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from normjax import functional, running
from normjax.arguments import bind, second_moment
from normjax.layout import Layout
from normjax.pattern import ELLIPSIS
from normjax.spec import NormSpec
from normjax.spectra import spectrum
from normjax.statistics import at_least, merge
from normjax.traits import Properties, properties
from normjax.verify.checks import neutral
from normjax.verify.oracles import numpy_divisor
from normjax.verify.tolerance import Check, normwise, rounding_tolerance

VISIBLE = 1e-3


def check_laws(
    spec: NormSpec,
    shape: tuple[int, ...] | None = None,
    *,
    dtype: str = "float32",
    seed: int = 0,
) -> tuple[Check, ...]:
    """Measure every law that the properties of a spec claim or deny.

    Offset and scale invariance, sign, coupling across examples, the eigen-relations
    on the offset, radial and tangential directions, symmetry of the Jacobian,
    normalizing with one's own moments and with merged ones, masks, stored statistics.

    Args:
        spec: the layer; the affine part is left out. A blend or renorm is measured
            against a reference of mean 0 and variance 1.
        shape: shape of the random input; small sizes that fit the pattern if None.
        dtype: of the input.
        seed: of the input.

    Returns:
        One ``Check`` for each law. Where a property is denied, the predicted effect is
        at least 1e-3.

    Raises:
        ValueError: if the shape does not fit.

    Example:
        >>> import normjax as nj
        >>> all(check.ok for check in nj.verify.check_laws(nj.layer_norm()))
        True
    """
    shape = example_shape(spec) if shape is None else tuple(shape)
    with jax.enable_x64(True):
        subject = Subject.of(spec, shape, dtype, seed)
        checks = (law(subject) for law in LAWS)
        return tuple(check for check in checks if check is not None)


def example_shape(spec: NormSpec, start: int = 3) -> tuple[int, ...]:
    """A small shape with distinct sizes from ``start`` on that fits a pattern.

    Example:
        >>> import normjax as nj
        >>> example_shape(nj.group_norm(groups=2))
        (3, 4, 6)
    """
    sizes = dict(spec.sizes)
    fresh = count(start)
    shape: list[int] = []
    for dimension in spec.parsed.dimensions:
        if dimension.name == ELLIPSIS:
            shape.append(next(fresh))
        elif dimension.composite:
            unknown = [name for name in dimension.names if name not in sizes]
            known = [sizes[name] for name in dimension.names if name in sizes]
            shape.append(int(np.prod(known)) * 3 ** len(unknown))
        else:
            shape.append(sizes.get(dimension.name) or next(fresh))
    return tuple(shape)


@dataclass(frozen=True)
class Subject:
    """A spec on one random input, and how errors on it are measured."""

    spec: NormSpec
    claims: Properties
    layout: Layout
    x: Array
    given: dict[str, Any]
    y: Array

    @classmethod
    def of(
        cls, spec: NormSpec, shape: tuple[int, ...], dtype: str, seed: int
    ) -> Subject:
        """Draw x on a grid of 1/8, so that x + 10 is exact in every dtype."""
        layout = bind(spec, shape)
        normal = np.random.default_rng(seed).normal(0.7, 1.5, shape)
        x = jnp.asarray(np.round(normal * 8) / 8, jnp.dtype(dtype))
        given: dict[str, Any] = {"reference": neutral(spec, layout, x.dtype)}
        y = functional.normalize(spec, x, **given)
        return cls(spec, properties(spec), layout, x, given, y)

    def apply(self, x: Array, spec: NormSpec | None = None, **settings) -> Array:
        """The layer on another input."""
        spec = self.spec if spec is None else spec
        return functional.normalize(spec, x, **{**self.given, **settings})

    @property
    def own(self) -> bool:
        """Whether only statistics of the input are used."""
        return self.spec.statistics == "input"

    def grouped(self, array) -> np.ndarray:
        """One row for each group."""
        view = np.asarray(array, np.float64).reshape(self.layout.view_shape)
        order = (*self.layout.mapped, *self.layout.reduced)
        return view.transpose(order).reshape(-1, self.layout.group_size)

    def ungrouped(self, rows: np.ndarray) -> np.ndarray:
        """From one row for each group back to x's shape."""
        order = (*self.layout.mapped, *self.layout.reduced)
        shape = [self.layout.view_shape[i] for i in order]
        return rows.reshape(shape).transpose(np.argsort(order)).reshape(self.x.shape)

    def small(self, name: str, error: float, kappa: float = 1.0) -> Check:
        """A law that holds to rounding."""
        accumulate = at_least(self.x.dtype, self.spec.precision.accumulate)
        n = self.layout.group_size
        limit = rounding_tolerance(accumulate, n, kappa, output=self.y.dtype)
        reason = f"rounding in {accumulate}, n={n}, κ={kappa:.2g}"
        return self._check(name, error, "0", error, limit, reason)

    def equal(self, name: str, actual, expected, kappa: float = 1.0) -> Check:
        """Two outputs that agree to rounding, normwise for each group."""
        error = normwise(self.grouped(actual), self.grouped(expected))
        return self.small(name, error, kappa)

    def exact(self, name: str, actual, expected) -> Check:
        """Two outputs of the same arithmetic."""
        gap = float(jnp.max(jnp.abs(actual - expected)))
        return self._check(name, gap, "0", gap, 0.0, "the same arithmetic")

    def visible(self, name: str, gap: float) -> Check:
        """A claimed effect, or a denied property, that must show."""
        short = max(0.0, VISIBLE - gap)
        return self._check(name, gap, f"> {VISIBLE:g}", short, 0.0, "must show")

    def differs(self, name: str, actual, expected) -> Check:
        """Two outputs that are visibly different."""
        return self.visible(
            name, normwise(self.grouped(actual), self.grouped(expected))
        )

    def _check(self, name, measured, predicted, error, limit, reason) -> Check:
        subject = f"{self.x.dtype}{list(self.x.shape)}"
        return Check(name, subject, f"{measured:.1e}", predicted, error, limit, reason)


def _offset(s: Subject) -> Check | None:
    """N(x + 10) = N(x) exactly when the offset is removed."""
    if not s.own:
        return None
    moved = s.apply(s.x + 10)
    if "offset" in s.claims.removes:
        return s.equal("N(x + 10) = N(x)", moved, s.y, kappa=10)
    return s.differs("N(x + 10) ≠ N(x)", moved, s.y)


def _scale(s: Subject) -> Check | None:
    """N(a x) = N(x) · a S(σ²)/S(a² σ²), for a = 1/64."""
    if not s.own:
        return None
    a, second = 1 / 64, _second_moment(s)
    if s.spec.divide == "none":
        factor = np.full_like(second, a)
    else:
        settings = (float(s.spec.epsilon), s.spec.epsilon_placement)
        small = numpy_divisor(a * a * second, *settings)
        factor = a * numpy_divisor(second, *settings) / small
    predicted = np.asarray(s.y, np.float64).reshape(s.layout.view_shape) * factor
    return s.equal("N(x/64) = N(x) S(σ²)/(64 S(σ²/64²))", s.apply(s.x * a), predicted)


def _scale_invariance(s: Subject) -> Check | None:
    """Without ε a positive scale has no effect exactly when something is divided by."""
    if not s.own:
        return None
    spec = s.spec.replace(epsilon=0.0)
    moved, still = s.apply(s.x / 64, spec), s.apply(s.x, spec)
    if "scale" in s.claims.removes:
        return s.equal("N(x/64) = N(x) at ε = 0", moved, still)
    return s.differs("N(x/64) ≠ N(x) at ε = 0", moved, still)


def _sign(s: Subject) -> Check | None:
    """N(−x) = −N(x): a negative scale is no invariance."""
    return s.equal("N(-x) = -N(x)", s.apply(-s.x), -s.y) if s.own else None


def _coupling(s: Subject) -> Check | None:
    """Other examples' outputs move with the first exactly when it is claimed."""
    axes = s.layout.example_axes(s.spec.example)
    if not axes:
        return None
    view = s.x.reshape(s.layout.view_shape)
    first = tuple(0 if i in axes else slice(None) for i in range(view.ndim))
    ramp = jnp.arange(view[first].size, dtype=view.dtype).reshape(view[first].shape)
    change = jnp.zeros_like(view).at[first].set(1 + ramp).reshape(s.x.shape)
    moved = s.apply(s.x + change)
    if s.spec.statistics == "renorm":  # within its clips only the derivative couples
        moved = s.y + _push(s, np.asarray(change))
    before = s.y.reshape(view.shape).at[first].set(0)
    after = moved.reshape(view.shape).at[first].set(0)
    if s.claims.couples_examples:
        gap = float(jnp.max(jnp.abs(after - before)))
        return s.visible("an example moves its companions", gap)
    return s.exact("an example moves no other", after, before)


def _own_moments(s: Subject) -> Check | None:
    """Normalizing with one's own moments is normalizing."""
    found = s.apply(s.x, moments=functional.moments(s.spec, s.x))
    return s.equal("N(x; moments(x)) = N(x)", found, s.y)


def _merged_moments(s: Subject) -> Check | None:
    """Moments of two uneven parts merge to those of the whole."""
    part = np.random.default_rng(7).random(s.x.shape) < 0.3
    both = [functional.moments(s.spec, s.x, jnp.asarray(m)) for m in (part, ~part)]
    merged = merge(jax.tree.map(lambda *arrays: jnp.stack(arrays), *both))
    return s.equal("N(x; merged moments) = N(x)", s.apply(s.x, moments=merged), s.y)


def _mask(s: Subject) -> Check | None:
    """What stands under the mask, NaN and inf included, reaches no valid output."""
    valid = jnp.asarray(np.random.default_rng(8).random(s.x.shape) < 0.8)
    even = jnp.asarray(np.indices(s.x.shape).sum(0) % 2 == 0)
    junk = jnp.where(even, jnp.nan, jnp.inf).astype(s.x.dtype)
    clean = jnp.where(valid, s.apply(s.x, mask=valid), 0)
    dirty = jnp.where(valid, s.apply(jnp.where(valid, s.x, junk), mask=valid), 0)
    return s.exact("NaN and inf under the mask", dirty, clean)


def _push(s: Subject, direction: np.ndarray) -> Array:
    """J t by forward mode through ``nj.normalize``."""
    tangent = jnp.asarray(direction.reshape(s.x.shape), s.x.dtype)
    return jax.jvp(partial(s.apply), (s.x,), (tangent,))[1]


def _on_offset(s: Subject) -> Check | None:
    """J 1 = 0 exactly where the offset is removed and the mean is not detached."""
    removed = "offset" in s.claims.removes and "mean" not in s.spec.detach
    if not (s.own and removed):
        return None
    pushed = s.grouped(_push(s, np.ones(s.x.shape))) * _column(s, "spread")
    return s.small("s J 1 = 0", float(np.abs(pushed).max()))


def _on_radial(s: Subject) -> Check | None:
    """J c = (ρ/s) c, relative to 1/s."""
    if not s.own:
        return None
    view = s.grouped(s.x)
    c = view - view.mean(1, keepdims=True) if s.spec.center else view
    pushed = s.grouped(_push(s, s.ungrouped(c))) * _column(s, "spread")
    gap = np.linalg.norm(pushed - _column(s, "share") * c, axis=1)
    return s.small("s J c = ρ c", float((gap / np.linalg.norm(c, axis=1)).max()))


def _on_tangential(s: Subject) -> Check | None:
    """J t = t/s for t orthogonal to 1 and to x."""
    n = s.layout.group_size
    if not s.own or n < 3:
        return None
    t = np.random.default_rng(9).normal(size=s.grouped(s.x).shape)
    for row, values in zip(t, s.grouped(s.x), strict=True):
        basis, _ = np.linalg.qr(np.stack([np.ones(n), values], 1))
        row -= basis @ (basis.T @ row)
    pushed = s.grouped(_push(s, s.ungrouped(t))) * _column(s, "spread")
    return s.equal("s J t = t", s.ungrouped(pushed), s.ungrouped(t))


def _symmetry(s: Subject) -> Check | None:
    """∂x̂/∂x is symmetric exactly when it is claimed."""
    if not s.own or s.x.size > 512:
        return None
    matrix = np.asarray(jax.jacfwd(s.apply)(s.x), np.float64)
    matrix = matrix.reshape(s.x.size, s.x.size)
    gap = float(np.linalg.norm(matrix - matrix.T) / np.linalg.norm(matrix))
    if s.claims.symmetric_jacobian:
        return s.small("J = Jᵀ", gap)
    return s.visible("J ≠ Jᵀ", gap)


def _stored(s: Subject) -> Check | None:
    """Stored statistics make inference differ from training; a blend may be both."""
    if s.spec.running is None or s.spec.statistics != "input":
        return None
    state = running.init(s.spec, s.x.shape)
    state = running.update(s.spec, state, functional.moments(s.spec, s.x))
    stored = running.read(s.spec, state)
    y = s.apply(s.x, moments=stored, reference=None)
    return s.differs("inference ≠ training after one update", y, s.y)


LAWS = (
    _offset,
    _scale,
    _scale_invariance,
    _sign,
    _coupling,
    _own_moments,
    _merged_moments,
    _mask,
    _on_offset,
    _on_radial,
    _on_tangential,
    _symmetry,
    _stored,
)


def _second_moment(s: Subject) -> np.ndarray:
    """σ² of each group, as it broadcasts to the view."""
    found = functional.moments(s.spec, s.x)
    return np.asarray(second_moment(s.spec, found), np.float64).reshape(
        s.layout.keep_shape
    )


def _column(s: Subject, name: str) -> np.ndarray:
    """One number for each group, from the closed form: s (``"spread"``) or ρ."""
    found = spectrum(s.spec, s.x)
    spread = 1 / np.asarray(found.tangential, np.float64).reshape(-1, 1)
    share = np.asarray(found.radial, np.float64).reshape(-1, 1) * spread
    return spread if name == "spread" else share
