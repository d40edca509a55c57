"""The interface of every operator: a linear map from arrays of one shape to another."""

from __future__ import annotations

import abc
from dataclasses import dataclass
from math import prod

import jax
import jax.numpy as jnp
from jax import Array


class LinearOperator(abc.ABC):
    """A linear map on arrays of ``shape``; subclasses are frozen pytree dataclasses.

    ``A @ B`` applies B and then A, ``A + B`` both: nothing is multiplied out. Under
    ``jax.vmap`` an operator that was made inside is one map per lane.

    Example:
        >>> import jax.numpy as jnp, normjax as nj
        >>> x = jnp.array([[1.0, 2.0, 4.0]])
        >>> J = nj.input_jacobian(nj.layer_norm(), x)
        >>> layer = nj.operators.Dense(jnp.ones((3, 2)), lead=(1,)) @ J
        >>> layer.shape, layer.out_shape, layer.T.mv(jnp.ones((1, 2))).shape
        ((1, 3), (1, 2), (1, 3))
    """

    @property
    @abc.abstractmethod
    def shape(self) -> tuple[int, ...]:
        """Shape of the arrays that go in."""

    @property
    def out_shape(self) -> tuple[int, ...]:
        """Shape of the arrays that come out; the same unless a map says otherwise."""
        return self.shape

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
        """Number of elements of the arrays that go in: the columns of the matrix."""
        return prod(self.shape)

    def as_matrix(self) -> Array:
        """The dense matrix on flattened (C order) arrays."""
        basis = jnp.eye(self.size, dtype=self.dtype).reshape(self.size, *self.shape)
        columns = jax.vmap(self.mv)(basis)
        return columns.reshape(self.size, prod(self.out_shape)).T

    def __matmul__(self, other: LinearOperator) -> Product:
        """The lazy product: other first, then self."""
        if not isinstance(other, LinearOperator):
            return NotImplemented
        _check("A @ B", self.shape, other.out_shape)
        return Product(self, other)

    def __add__(self, other: LinearOperator) -> Sum:
        """The lazy sum."""
        if not isinstance(other, LinearOperator):
            return NotImplemented
        _check("A + B", self.shape, other.shape)
        _check("A + B", self.out_shape, other.out_shape)
        return Sum((self, other))


def _check(name: str, first: tuple[int, ...], second: tuple[int, ...]) -> None:
    if first != second:
        raise ValueError(f"{name}: the shapes {first} and {second} do not fit")


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Product(LinearOperator):
    """t ↦ left(right(t)).

    Example:
        >>> import jax.numpy as jnp
        >>> from normjax.operators import Diagonal
        >>> double = Diagonal(jnp.full(3, 2.0))
        >>> (double @ double).mv(jnp.ones(3)).tolist()
        [4.0, 4.0, 4.0]
    """

    left: LinearOperator
    right: LinearOperator

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the arrays that go in."""
        return self.right.shape

    @property
    def out_shape(self) -> tuple[int, ...]:
        """Shape of the arrays that come out."""
        return self.left.out_shape

    @property
    def dtype(self) -> jnp.dtype:
        """Dtype of the entries."""
        return jnp.promote_types(self.left.dtype, self.right.dtype)

    def _apply(self, vector: Array, /) -> Array:
        """Apply right, then left."""
        return self.left.mv(self.right.mv(vector))

    @property
    def T(self) -> Product:
        """The product of the transposed maps in reverse order."""
        return Product(self.right.T, self.left.T)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Sum(LinearOperator):
    """t ↦ Σ term(t)."""

    terms: tuple[LinearOperator, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the arrays that go in."""
        return self.terms[0].shape

    @property
    def out_shape(self) -> tuple[int, ...]:
        """Shape of the arrays that come out."""
        return self.terms[0].out_shape

    @property
    def dtype(self) -> jnp.dtype:
        """Dtype of the entries."""
        return jnp.result_type(*(term.dtype for term in self.terms))

    def _apply(self, vector: Array, /) -> Array:
        """Apply every term and add, the first one first."""
        first, *rest = (term.mv(vector) for term in self.terms)
        return sum(rest, first)

    @property
    def T(self) -> Sum:
        """The sum of the transposed terms."""
        return Sum(tuple(term.T for term in self.terms))
