"""The interface of every operator: a linear map on arrays of one shape."""

from __future__ import annotations

import abc
from math import prod

import jax
import jax.numpy as jnp
from jax import Array


class LinearOperator(abc.ABC):
    """A linear map on arrays of ``shape``; subclasses are frozen pytree dataclasses.

    Under ``jax.vmap`` an operator that was made inside is one map per lane.
    """

    @property
    @abc.abstractmethod
    def shape(self) -> tuple[int, ...]:
        """Shape of the arrays that go in and come out."""

    @property
    @abc.abstractmethod
    def dtype(self) -> jnp.dtype:
        """Dtype of the entries."""

    @abc.abstractmethod
    def _apply(self, vector: Array, /) -> Array:
        """Apply the map to an array of the right shape."""

    def mv(self, vector: Array, /) -> Array:
        """Apply the map: J t, for t of ``shape``.

        Raises:
            ValueError: if t has another shape.
        """
        vector = jnp.asarray(vector)
        if vector.shape != self.shape:
            raise ValueError(
                f"mv got an array of shape {vector.shape}, expected {self.shape}; for "
                "one that was made under vmap use jax.vmap(lambda J, t: J.mv(t))"
            )
        return self._apply(vector)

    @property
    @abc.abstractmethod
    def T(self) -> LinearOperator:
        """The transposed map."""

    @property
    def size(self) -> int:
        """Number of elements of the arrays: the matrix is size × size."""
        return prod(self.shape)

    def as_matrix(self) -> Array:
        """The dense matrix on flattened (C order) arrays; size² numbers."""
        basis = jnp.eye(self.size, dtype=self.dtype).reshape(self.size, *self.shape)
        columns = jax.vmap(self.mv)(basis)
        return columns.reshape(self.size, self.size).T
