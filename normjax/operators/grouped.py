"""gain · (I − U Vᵀ) on each group of an array: identity minus a few columns."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import jax
import jax.numpy as jnp
from jax import Array

from normjax.operators.base import LinearOperator


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class GroupedLowRank(LinearOperator):
    """t ↦ gain · (t − U (Vᵀ t)) on each group, with k columns in U and V.

    The array is seen as ``view``; a group is everything along ``axes`` at one index of
    the other axes. All arrays broadcast to the view.

    Attributes:
        gain: one number for each group.
        u: k columns.
        v: k columns, 0 on entries that are outside.
        core: I_k − VᵀU by rows, from whoever knows it more accurately than by
            subtraction.
        outside: None, or True on entries that are mapped to ``outside_gain`` times
            themselves and do not take part in their group (u and v are 0 there).
        array_shape: shape of the arrays.
        view: shape of the view.
        axes: axes of the view that span a group.
        outside_gain: what multiplies an outside entry.
        symmetric: whether the maker knows the map to be symmetric.
        triangular: whether the maker knows ``core`` to be triangular.
        axis_names: named axes over which a group is split: ``mv`` takes and gives this
            device's part, inside ``jax.shard_map`` or a named ``jax.vmap``.
    """

    gain: Array
    u: tuple[Array, ...]
    v: tuple[Array, ...]
    core: tuple[tuple[Array, ...], ...]
    outside: Array | None
    array_shape: tuple[int, ...] = field(metadata={"static": True})
    view: tuple[int, ...] = field(metadata={"static": True})
    axes: tuple[int, ...] = field(metadata={"static": True})
    outside_gain: float = field(default=0.0, metadata={"static": True})
    symmetric: bool = field(default=False, metadata={"static": True})
    triangular: bool = field(default=True, metadata={"static": True})
    axis_names: tuple[str, ...] = field(default=(), metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the arrays."""
        return self.array_shape

    @property
    def dtype(self) -> jnp.dtype:
        """Dtype of the entries."""
        return self.gain.dtype

    @property
    def inside(self) -> Array:
        """Whether an entry is one of its group, in the shape of the view."""
        if self.outside is None:
            return jnp.ones(self.view, bool)
        return ~jnp.broadcast_to(self.outside, self.view)

    @property
    def size_inside(self) -> Array:
        """Number of entries of each group, axes kept."""
        return jnp.sum(self.inside, self.axes, keepdims=True)

    def _apply(self, vector: Array, /) -> Array:
        """Compute Vᵀ t, subtract its columns, multiply."""
        t = vector.reshape(self.view)
        rest = t
        for u, weight in zip(self.u, self._weights(t), strict=True):
            rest = rest - u * weight
        out = self.gain * rest
        if self.outside is not None:
            out = jnp.where(self.outside, self.outside_gain * t, out)
        return out.reshape(self.array_shape)

    def _weights(self, t: Array) -> list[Array]:
        """Vᵀ t, each column from what the ones before have left of t.

        That is accurate for a t with a large part along the first columns; the core
        accounts for what they share. Across devices each one leaves out its own part
        along the first column, so that all sums travel together.
        """
        if self.axis_names:
            return self._weights_across(t)
        found: list[Array] = []
        for j, (u, v) in enumerate(zip(self.u, self.v, strict=True)):
            weight = jnp.sum(v * t, self.axes, keepdims=True)
            for i, earlier in enumerate(found):
                weight = weight - self.core[j][i] * earlier
            found.append(weight)
            t = t - u * weight
        return found

    def _weights_across(self, t: Array) -> list[Array]:
        """The same in one collective, for at most two columns."""
        if not self.u:
            return []
        first, *second = self.v

        def total(array: Array) -> Array:
            return jnp.sum(jnp.broadcast_to(array, self.view), self.axes, keepdims=True)

        u = self.u[0]
        square = total(u * u)
        level = total(u * t) / jnp.where(square > 0, square, 1)
        parts = [total(first * t)]
        parts += [total(v * (t - u * level)) + level * total(v * u) for v in second]
        return list(jax.lax.psum(jnp.stack(parts), self.axis_names))

    def as_matrix(self) -> Array:
        """The dense matrix; size² numbers.

        Raises:
            ValueError: across devices, where each has some of its rows.
        """
        self.check_whole()
        return super().as_matrix()

    def check_whole(self) -> None:
        """Refuse what needs a group as a whole.

        Raises:
            ValueError: if groups are split over named axes.
        """
        if self.axis_names:
            raise ValueError(
                f"each group is split over {self.axis_names!r}: this needs the whole "
                "group on one device, with axis_names=(); mv, T.mv and nj.spectrum do "
                "not"
            )

    @property
    def T(self) -> GroupedLowRank:
        """Swap U and V."""
        core = tuple(zip(*self.core, strict=True))
        return replace(self, u=self.v, v=self.u, core=core)
