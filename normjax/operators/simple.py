"""Diagonal maps, dense matrices on the last axis, and parameters over some axes."""

from __future__ import annotations

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
from jax import Array

from normjax.operators.base import LinearOperator


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Diagonal(LinearOperator):
    """t ↦ values · t, with ``values`` of the shape of t."""

    values: Array

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the arrays."""
        return self.values.shape

    @property
    def dtype(self) -> jnp.dtype:
        """Dtype of the entries."""
        return self.values.dtype

    def _apply(self, vector: Array, /) -> Array:
        """Multiply entry by entry."""
        return self.values * vector

    @property
    def T(self) -> Diagonal:
        """The map itself."""
        return self


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Dense(LinearOperator):
    """t ↦ t @ kernel on the last axis: a Dense layer without its bias.

    Attributes:
        kernel: (features in, features out), as Flax stores it.
        lead: shape of the axes before the last one.
    """

    kernel: Array
    lead: tuple[int, ...] = field(metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the arrays that go in."""
        return (*self.lead, self.kernel.shape[0])

    @property
    def out_shape(self) -> tuple[int, ...]:
        """Shape of the arrays that come out."""
        return (*self.lead, self.kernel.shape[1])

    @property
    def dtype(self) -> jnp.dtype:
        """Dtype of the entries."""
        return self.kernel.dtype

    def _apply(self, vector: Array, /) -> Array:
        """One matrix product, at the highest precision that the device has."""
        return jnp.matmul(vector, self.kernel, precision=jax.lax.Precision.HIGHEST)

    @property
    def T(self) -> Dense:
        """The transposed kernel."""
        return Dense(self.kernel.T, self.lead)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Broadcast(LinearOperator):
    """t ↦ values · t, t having only some of the axes: what a parameter moves.

    Attributes:
        values: broadcasts to the view.
        array_shape: shape of t.
        array_view: that shape as it broadcasts to the view.
        view: the shape that t is broadcast to.
        result_shape: shape of the arrays that come out, of as many elements as the
            view.
    """

    values: Array
    array_shape: tuple[int, ...] = field(metadata={"static": True})
    array_view: tuple[int, ...] = field(metadata={"static": True})
    view: tuple[int, ...] = field(metadata={"static": True})
    result_shape: tuple[int, ...] = field(metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of t."""
        return self.array_shape

    @property
    def out_shape(self) -> tuple[int, ...]:
        """Shape of the arrays that come out."""
        return self.result_shape

    @property
    def dtype(self) -> jnp.dtype:
        """Dtype of the entries."""
        return self.values.dtype

    def _apply(self, vector: Array, /) -> Array:
        """Multiply, and repeat over the axes that t does not have."""
        moved = self.values * vector.reshape(self.array_view)
        return jnp.broadcast_to(moved, self.view).reshape(self.result_shape)

    @property
    def T(self) -> Reduction:
        """The sum over the axes that t does not have."""
        return Reduction(self)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Reduction(LinearOperator):
    """The transpose of a ``Broadcast``: t ↦ Σ values · t over the axes repeated."""

    broadcast: Broadcast

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the arrays that go in."""
        return self.broadcast.result_shape

    @property
    def out_shape(self) -> tuple[int, ...]:
        """Shape of the parameter."""
        return self.broadcast.array_shape

    @property
    def dtype(self) -> jnp.dtype:
        """Dtype of the entries."""
        return self.broadcast.dtype

    def _apply(self, vector: Array, /) -> Array:
        """Multiply and sum."""
        there = self.broadcast
        axes = tuple(i for i, size in enumerate(there.array_view) if size == 1)
        moved = there.values * vector.reshape(there.view)
        return moved.sum(axes).reshape(there.array_shape)

    @property
    def T(self) -> Broadcast:
        """The map that this is the transpose of."""
        return self.broadcast
