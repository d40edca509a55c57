"""Diagonal maps, and products that stay lazy."""

from __future__ import annotations

from dataclasses import dataclass

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
class Product(LinearOperator):
    """t ↦ left(right(t)).

    Example:
        >>> import jax.numpy as jnp
        >>> double = Diagonal(jnp.full(3, 2.0))
        >>> Product(double, double).mv(jnp.ones(3)).tolist()
        [4.0, 4.0, 4.0]
    """

    left: LinearOperator
    right: LinearOperator

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the arrays."""
        return self.right.shape

    @property
    def dtype(self) -> jnp.dtype:
        """Dtype of the entries."""
        return self.right.dtype

    def _apply(self, vector: Array, /) -> Array:
        """Apply right, then left."""
        return self.left.mv(self.right.mv(vector))

    @property
    def T(self) -> Product:
        """The product of the transposed maps in reverse order."""
        return Product(self.right.T, self.left.T)
