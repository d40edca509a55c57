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
        size_inside: number of entries of each group that are not outside.
        array_shape: shape of the arrays.
        view: shape of the view.
        axes: axes of the view that span a group.
        outside_gain: what multiplies an outside entry.
        symmetric: whether the maker knows the map to be symmetric.
        triangular: whether the maker knows ``core`` to be triangular.
    """

    gain: Array
    u: tuple[Array, ...]
    v: tuple[Array, ...]
    core: tuple[tuple[Array, ...], ...]
    outside: Array | None
    size_inside: Array
    array_shape: tuple[int, ...] = field(metadata={"static": True})
    view: tuple[int, ...] = field(metadata={"static": True})
    axes: tuple[int, ...] = field(metadata={"static": True})
    outside_gain: float = field(default=0.0, metadata={"static": True})
    symmetric: bool = field(default=False, metadata={"static": True})
    triangular: bool = field(default=True, metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the arrays."""
        return self.array_shape

    @property
    def dtype(self) -> jnp.dtype:
        """Dtype of the entries."""
        return self.gain.dtype

    def _apply(self, vector: Array, /) -> Array:
        """Apply the map column by column, each to what the ones before have left.

        That is accurate for a t with a large part along the first columns; the core
        accounts for what they share.
        """
        t = vector.reshape(self.view)
        rest, found = t, []
        for j, (u, v) in enumerate(zip(self.u, self.v, strict=True)):
            weight = jnp.sum(v * rest, self.axes, keepdims=True)
            for i, earlier in enumerate(found):
                weight = weight - self.core[j][i] * earlier
            found.append(weight)
            rest = rest - u * weight
        out = self.gain * rest
        if self.outside is not None:
            out = jnp.where(self.outside, self.outside_gain * t, out)
        return out.reshape(self.array_shape)

    @property
    def T(self) -> GroupedLowRank:
        """Swap U and V."""
        core = tuple(zip(*self.core, strict=True))
        return replace(self, u=self.v, v=self.u, core=core)
