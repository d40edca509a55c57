"""Every operator under mv, T, as_matrix, jit, vmap, flattening, and wrong shapes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import normjax as nj
from normjax import operators
from normjax.operators import (
    Broadcast,
    Dense,
    Diagonal,
    GroupedLowRank,
    LinearOperator,
    Product,
    Reduction,
)

pytestmark = pytest.mark.x32

SHAPE = (2, 3, 4)
SIZE = 24
# Sums of at most 12 products of numbers near 1, in the worst order.
BOUND = 64 * 12 * 2.0**-24


def draw(seed: int, shape=SHAPE) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def low_rank(seed: int, columns: int, *, outside: bool, gain: float = 0.0):
    """gain · (I − U Vᵀ) over the last two axes, two groups; entries may be outside."""
    view, axes = SHAPE, (1, 2)
    u = [draw(seed + j, view) for j in range(columns)]
    v = [draw(seed + 10 + j, view) / 4 for j in range(columns)]
    away = None
    if outside:
        away = np.zeros(view, bool)
        away[0, 0], away[1, 1, 2] = True, True
        u = [np.where(away, np.float32(0), array) for array in u]
        v = [np.where(away, np.float32(0), array) for array in v]
    core = [
        [
            jnp.asarray((i == j) - (a * b).sum(axes, keepdims=True))
            for j, b in enumerate(u)
        ]
        for i, a in enumerate(v)
    ]
    return GroupedLowRank(
        jnp.asarray(np.array([0.5, 2.0], np.float32).reshape(2, 1, 1)),
        tuple(map(jnp.asarray, u)),
        tuple(map(jnp.asarray, v)),
        tuple(map(tuple, core)),
        None if away is None else jnp.asarray(away),
        SHAPE,
        view,
        axes,
        outside_gain=gain,
        triangular=columns < 2,
    )


def low_rank_matrix(operator: GroupedLowRank) -> np.ndarray:
    """The definition in NumPy, group by group, without the core."""
    dense = np.zeros((SIZE, SIZE))
    for group in range(2):
        block = np.eye(12)
        for u, v in zip(operator.u, operator.v, strict=True):
            left, right = (np.asarray(a, np.float64)[group].ravel() for a in (u, v))
            block = block - np.outer(left, right)
        block = block * float(operator.gain[group, 0, 0])
        if operator.outside is not None:
            away = np.asarray(operator.outside)[group].ravel()
            block[away] = operator.outside_gain * np.eye(12)[away]
        dense[12 * group : 12 * group + 12, 12 * group : 12 * group + 12] = block
    return dense


def scales(seed: int) -> np.ndarray:
    return draw(seed) + 2


def entry(make: Callable[[int], LinearOperator], dense: Callable) -> tuple:
    return make, dense


INVENTORY = {
    "diagonal": entry(
        lambda seed: Diagonal(jnp.asarray(scales(seed))),
        lambda operator: np.diag(np.asarray(operator.values, np.float64).ravel()),
    ),
    "identity times gain": entry(
        lambda seed: low_rank(seed, 0, outside=False), low_rank_matrix
    ),
    "one column": entry(lambda seed: low_rank(seed, 1, outside=False), low_rank_matrix),
    "two columns": entry(
        lambda seed: low_rank(seed, 2, outside=False), low_rank_matrix
    ),
    "outside is zero": entry(
        lambda seed: low_rank(seed, 2, outside=True), low_rank_matrix
    ),
    "outside is kept": entry(
        lambda seed: low_rank(seed, 1, outside=True, gain=1.0), low_rank_matrix
    ),
    "sum": entry(
        lambda seed: (
            Diagonal(jnp.asarray(scales(seed))) + low_rank(seed, 1, outside=True)
        ),
        lambda operator: (
            np.diag(np.asarray(operator.terms[0].values, np.float64).ravel())
            + low_rank_matrix(operator.terms[1])
        ),
    ),
    "product": entry(
        lambda seed: Product(
            Diagonal(jnp.asarray(scales(seed))), low_rank(seed, 2, outside=False)
        ),
        lambda operator: (
            np.asarray(operator.left.values, np.float64).reshape(-1, 1)
            * low_rank_matrix(operator.right)
        ),
    ),
}
each = pytest.mark.parametrize(("make", "dense"), INVENTORY.values(), ids=INVENTORY)


def close(found, right, size: Any) -> bool:
    gap = np.linalg.norm(np.asarray(found, np.float64) - right)
    return bool(gap <= BOUND * size)


def test_inventory_is_complete():
    public = {
        member
        for member in vars(operators).values()
        if isinstance(member, type)
        and issubclass(member, LinearOperator)
        and member is not LinearOperator
    }
    square = {type(make(0)) for make, _ in INVENTORY.values()}
    assert public == square | {Dense, Broadcast, Reduction}  # test_rectangular


@each
def test_matrix_and_its_transpose(make: Callable, dense: Callable):
    operator = make(0)
    right = dense(operator)
    size = np.linalg.norm(right)
    assert operator.shape == SHAPE
    assert operator.size == SIZE
    assert operator.dtype == jnp.float32
    assert close(operator.as_matrix(), right, size)
    assert close(operator.T.as_matrix(), right.T, size)
    assert close(operator.T.T.as_matrix(), right, size)
    assert operator.T.shape == SHAPE


@each
def test_planted_errors_are_rejected(make: Callable, dense: Callable):
    right = dense(make(0))
    size = np.linalg.norm(right)
    for wrong in (0 * right, -right, right + 1e-2 * np.eye(SIZE, k=1)):
        assert not close(wrong, right, size)
    if not np.allclose(right, right.T):
        assert not close(right.T, right, size)


@each
def test_products_with_arrays(make: Callable, dense: Callable):
    operator, t, bar = make(1), draw(2), draw(3)
    right = dense(operator)
    size = np.linalg.norm(right) * np.linalg.norm(t)
    moved = operator.mv(t)
    assert moved.shape == SHAPE
    assert close(moved.ravel(), right @ t.ravel(), size)
    pulled = operator.T.mv(bar)
    assert close(pulled.ravel(), right.T @ bar.ravel(), size)
    # ⟨bar, J t⟩ = ⟨Jᵀ bar, t⟩
    assert close(np.vdot(bar, moved), np.vdot(pulled, t), size * np.linalg.norm(bar))


@each
def test_jit_and_vmap(make: Callable, dense: Callable):
    """As an argument of jit, and one operator for each lane of vmap."""
    found = [make(seed) for seed in (0, 5)]
    ts = np.stack([draw(2), draw(3)])
    apply = jax.jit(lambda operator, t: (operator.mv(t), operator.T.mv(t)))
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *found)
    many = jax.jit(jax.vmap(lambda operator, t: (operator.mv(t), operator.T.mv(t))))(
        stacked, ts
    )
    for i, operator in enumerate(found):
        right = dense(operator)
        size = np.linalg.norm(right) * np.linalg.norm(ts[i])
        for moved in (apply(operator, ts[i]), [lane[i] for lane in many]):
            assert close(moved[0].ravel(), right @ ts[i].ravel(), size)
            assert close(moved[1].ravel(), right.T @ ts[i].ravel(), size)
    matrices = jax.jit(jax.vmap(lambda operator: operator.as_matrix()))(stacked)
    assert close(matrices[1], dense(found[1]), np.linalg.norm(dense(found[1])))


@each
def test_pytree_round_trip(make: Callable, dense: Callable):
    operator = make(0)
    leaves, structure = jax.tree.flatten(operator)
    again = jax.tree.unflatten(structure, leaves)
    assert type(again) is type(operator)
    assert np.array_equal(again.as_matrix(), operator.as_matrix())
    assert structure == jax.tree.structure(make(5))  # one program for both
    assert hash(structure) == hash(jax.tree.structure(make(5)))
    assert dense(again).shape == (SIZE, SIZE)


@each
def test_wrong_shape(make: Callable, dense: Callable):
    operator = make(0)
    for wrong in ((SIZE,), (3, 2, 4), (2, 3, 1), (1, *SHAPE)):
        with pytest.raises(ValueError, match=r"mv got an array of shape .*expected"):
            operator.mv(jnp.ones(wrong, jnp.float32))
    assert dense(operator).any()


@each
def test_linear_in_its_argument(make: Callable, dense: Callable):
    """jax.linear_transpose of mv is T, so mv is linear and T is its transpose."""
    operator, bar = make(0), jnp.asarray(draw(4))
    (pulled,) = jax.linear_transpose(operator.mv, bar)(bar)
    size = np.linalg.norm(dense(operator)) * np.linalg.norm(bar)
    assert close(pulled, np.asarray(operator.T.mv(bar)), size)


def test_eigenvalues_of_a_diagonal():
    operator = Diagonal(jnp.asarray(draw(0)))
    flat = np.sort(draw(0).ravel())
    assert np.array_equal(nj.eigenvalues(operator), flat)
    right = np.sort(abs(flat))[::-1]
    assert np.array_equal(nj.singular_values(operator), right)


@pytest.mark.parametrize("columns", [0, 1, 2])
@pytest.mark.parametrize("outside", [False, True])
def test_eigenvalues_of_low_rank(columns: int, outside: bool):
    """Any core, triangular or not: the sums of their powers are traces of powers."""
    operator = low_rank(0, columns, outside=outside, gain=1.0)
    matrix = low_rank_matrix(operator)
    found = np.asarray(nj.eigenvalues(operator)).astype(complex)
    assert found.shape == (2, 12)
    for group in range(2):
        block = matrix[12 * group : 12 * group + 12, 12 * group : 12 * group + 12]
        power = np.eye(12)
        for k in range(1, 5):
            power = power @ block
            size = np.linalg.norm(block) ** k * 12
            assert abs((found[group] ** k).sum() - np.trace(power)) <= k * BOUND * size
    kind = np.complex64 if columns == 2 else np.float32
    assert nj.eigenvalues(operator).dtype == kind


@pytest.mark.parametrize("columns", [0, 1, 2])
@pytest.mark.parametrize("outside", [False, True])
def test_singular_values_of_low_rank(columns: int, outside: bool):
    """Any two columns, with entries outside, against LAPACK on the dense matrix."""
    operator = low_rank(0, columns, outside=outside, gain=1.5)
    matrix = low_rank_matrix(operator)
    found = np.asarray(nj.singular_values(operator))
    assert found.shape == (2, 12)
    for group in range(2):
        block = matrix[12 * group : 12 * group + 12, 12 * group : 12 * group + 12]
        right = np.linalg.svd(block, compute_uv=False)
        assert np.abs(found[group] - right).max() <= BOUND * right[0]


def test_refusals():
    product = Product(Diagonal(jnp.ones(2)), Diagonal(jnp.ones(2)))
    with pytest.raises(ValueError, match="Product has no closed-form eigenvalues"):
        nj.eigenvalues(product)
    with pytest.raises(ValueError, match="Product has no closed-form singular values"):
        nj.singular_values(product)


@pytest.mark.parametrize("columns", [0, 1, 2])
@pytest.mark.parametrize("outside", [False, True])
@pytest.mark.parametrize("scaled", [False, True])
def test_numbers_of_each_group(columns: int, outside: bool, scaled: bool):
    """Diagonal, trace and determinant, also with a scale on the diagonal in front."""
    operator = low_rank(0, columns, outside=outside, gain=1.5)
    matrix, whole = low_rank_matrix(operator), operator
    if scaled:
        whole = Diagonal(jnp.asarray(scales(7))) @ operator
        matrix = scales(7).astype(np.float64).reshape(-1, 1) * matrix
    size = np.linalg.norm(matrix)
    assert close(operators.diagonal(whole).ravel(), np.diag(matrix), size)
    sign, logarithm = operators.slogdet(whole)
    for group in range(2):
        block = matrix[12 * group : 12 * group + 12, 12 * group : 12 * group + 12]
        assert close(operators.trace(whole)[group], np.trace(block), size)
        right = np.linalg.slogdet(block)
        assert float(sign[group]) == right.sign
        apart = np.linalg.cond(block) * BOUND
        assert abs(float(logarithm[group]) - right.logabsdet) <= apart
    numerical = operators.trace(whole, numerical=True)
    assert close(numerical, np.trace(matrix), size)


@pytest.mark.parametrize("zeros", [0, 1, 2])
def test_rank_condition_and_null_space(zeros: int):
    """A projector onto what is orthogonal to ``zeros`` of two columns."""
    q, _ = np.linalg.qr(draw(3, (12, 2)).astype(np.float64))
    u = [jnp.asarray(np.tile(q[:, j], 2).reshape(SHAPE), jnp.float32) for j in (0, 1)]
    kept = [0.0 if j < zeros else 0.25 for j in (0, 1)]
    rows = tuple(
        tuple(jnp.full((2, 1, 1), kept[j] if i == j else 0.0) for i in (0, 1))
        for j in (0, 1)
    )
    v = tuple((1 - share) * column for share, column in zip(kept, u, strict=True))
    operator = GroupedLowRank(
        jnp.full((2, 1, 1), 3.0), tuple(u), v, rows, None, SHAPE, SHAPE, (1, 2)
    )
    matrix = low_rank_matrix(operator)
    assert operators.rank(operator).tolist() == [12 - zeros] * 2
    values = np.linalg.svd(matrix[:12, :12], compute_uv=False)
    right = values[0] / values[11 - zeros]
    assert np.abs(operators.condition(operator) - right).max() <= BOUND * right
    basis = np.asarray(operators.null_space(operator), np.float64)[:, 0].reshape(2, 12)
    found = basis[np.linalg.norm(basis, axis=1) > 0.5]
    assert len(found) == zeros
    assert close(found @ found.T, np.eye(zeros), 1)
    assert close(matrix[:12, :12] @ found.T, 0 * found.T, 3)


def test_rectangular():
    """Dense and Broadcast, their transposes and a product, against einsum."""
    kernel, t, bar = draw(0, (4, 5)), draw(1), draw(2, (2, 3, 5))
    dense = Dense(jnp.asarray(kernel), lead=(2, 3))
    assert (dense.shape, dense.out_shape) == (SHAPE, (2, 3, 5))
    size = np.linalg.norm(kernel) * np.linalg.norm(t)
    assert close(dense.mv(jnp.asarray(t)), np.einsum("abi,ij->abj", t, kernel), size)
    assert close(
        dense.T.mv(jnp.asarray(bar)), np.einsum("abj,ij->abi", bar, kernel), size
    )
    values = draw(3)
    repeat = Broadcast(jnp.asarray(values), (4,), (1, 1, 4), SHAPE, SHAPE)
    few = draw(4, (4,))
    assert close(repeat.mv(jnp.asarray(few)), values * few, np.linalg.norm(values))
    assert close(repeat.T.mv(jnp.asarray(t)), (values * t).sum((0, 1)), size)
    assert repeat.T.T is repeat
    both = dense @ repeat
    matrix = np.einsum("abi,ij->abji", values, kernel).reshape(30, 4)
    assert close(both.as_matrix(), matrix, np.linalg.norm(matrix))
    assert close(both.T.as_matrix(), matrix.T, np.linalg.norm(matrix))
    with pytest.raises(ValueError, match=r"A @ B: the shapes .* do not fit"):
        _ = repeat @ dense
    with pytest.raises(ValueError, match=r"A \+ B: the shapes .* do not fit"):
        _ = dense + repeat
