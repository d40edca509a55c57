"""The influence matrix against brute force from the oracle's Jacobian."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import CASES
from compare import FACTOR, batched, jit, kappa, unit_roundoff, wide
from frames import Case, inputs

import normjax as nj
from normjax import coupling

INFLUENCED = [
    "layer",
    "layer_first",
    "rms",
    "batch",
    "batch_space",
    "batch_first",
    "ghost",
    "ghost_space",
    "ghost_first",
    "instance",
    "group",
    "group_first",
    "ddof_1_outside",
    "detach_mean",
    "detach_variance",
    "given_batch",
    "mask_positions",
    "mask_int_zero",
    "mask_ghost",
    "mask_ghost_space",
    "mask_rms",
    "weights_keep",
    "weights_ddof",
]
COUNT = 200


def brute_force(case: Case, x: np.ndarray) -> np.ndarray:
    """‖∂yᵢ/∂xⱼ‖_F by examples i and j: the first axis of every frame."""
    J = batched(jax.jacfwd(case.oracle))(x)
    b = case.frame.shape[0]
    parts = J.reshape(len(x), b, x[0].size // b, b, x[0].size // b)
    return np.sqrt((parts**2).sum((2, 4)))


def influence(case: Case, x):
    passed = case.arguments(x.dtype)
    return nj.influence(case.spec, x, passed.pop("params", None), **passed)


def relative(case: Case, x: np.ndarray, found: np.ndarray, right: np.ndarray) -> float:
    """Largest error of a matrix, in units of u·(n + κ)·|I|."""
    error = np.linalg.norm(found - right, axis=(1, 2))
    size = np.linalg.norm(right, axis=(1, 2))
    unit = unit_roundoff(np.float64) * (case.frame.group_size + kappa(case, x).max(1))
    return float(np.max(error / (unit * size)))


@pytest.mark.parametrize("name", INFLUENCED)
def test_influence(name: str):
    case = CASES[name]
    x = inputs(case, COUNT, kappa=100.0)
    right = brute_force(case, x)
    found = batched(partial(influence, case))(x)
    assert found.shape == right.shape
    assert relative(case, x, found, right) <= FACTOR


@pytest.mark.parametrize("name", ["batch_space", "group_first", "ghost_space"])
def test_planted_errors_are_rejected(name: str):
    """A lost diagonal, lost coupling, a transpose of what is not symmetric, a zero."""
    case = CASES[name]
    x = inputs(case, COUNT, kappa=100.0)
    right = brute_force(case, x)
    eye = np.eye(right.shape[-1])
    wrong = [0 * right, right * (1 - eye), right * (1 + 1e-6), right[:, ::-1]]
    if name == "batch_space":
        wrong += [right * eye]
    for found in wrong:
        for i in range(0, COUNT, 20):
            one = slice(i, i + 1)
            assert relative(case, x[one], found[one], right[one]) > FACTOR


@pytest.mark.x32
@pytest.mark.parametrize(
    "name", ["layer", "rms", "instance", "group", "given_batch", "weight_dense"]
)
def test_exactly_diagonal_where_examples_do_not_couple(name: str):
    case = CASES[name]
    spec = case.spec
    if name == "weight_dense":
        spec = spec.replace(example="o")
    x = jnp.asarray(inputs(case, 1, kappa=100.0, spread=1.0)[0], jnp.float32)
    moments = case.arguments(x.dtype).get("moments")
    found = jit(partial(nj.influence, spec, moments=moments))(x)
    assert np.array_equal(found, np.diag(np.diag(found)))
    assert np.all(np.diag(found) > 0)


@pytest.mark.x32
def test_ghosts_do_not_couple():
    """Blocks of consecutive examples, and nothing between them."""
    spec = nj.ghost_batch_norm(ghosts=2)
    x = np.random.default_rng(0).normal(size=(6, 5)).astype(np.float32)
    found = jit(partial(nj.influence, spec))(x)
    same = np.kron(np.eye(2), np.ones((3, 3))).astype(bool)
    assert not found[~same].any()
    assert found[same].all()


@pytest.mark.x32
def test_two_examples_without_epsilon():
    """Outputs are exactly ±1 and nothing moves them: exactly 0."""
    spec = nj.batch_norm(epsilon=0.0)
    x = jnp.array([[0.0, 1.0, 1e4], [2.0, -3.0, 1e4 + 1]], jnp.float32)
    assert np.array_equal(abs(nj.normalize(spec, x)), np.ones((2, 3)))
    found = jit(partial(nj.influence, spec))(x)
    assert not found.any()


@pytest.mark.x32
def test_formula_of_one_feature():
    """∂yᵢ/∂xⱼ = (δᵢⱼ − 1/n)/s − cᵢcⱼ/(n s³), and the triangle of companions."""
    spec = nj.batch_norm(epsilon=1e-2)
    x = np.random.default_rng(1).normal(size=(5, 1)).astype(np.float32) + 3
    c = wide(x)[:, 0] - wide(x).mean()
    s, n = np.sqrt(c @ c / 5 + 1e-2), 5
    right = abs((np.eye(n) - 1 / n) / s - np.outer(c, c) / (n * s**3))
    found = wide(jit(partial(nj.influence, spec))(x))
    bound = FACTOR * unit_roundoff(np.float32) * (n + 3)
    assert np.linalg.norm(found - right) <= bound * np.linalg.norm(right)


@pytest.mark.x32
def test_float32_on_an_offset():
    """As from 0: the offset is gone before anything is multiplied."""
    rng = np.random.default_rng(2)
    near = rng.integers(-8, 8, (6, 3)).astype(np.float32)
    spec = nj.batch_norm()
    run = jit(partial(nj.influence, spec))
    first, second = wide(run(near)), wide(run(near + np.float32(2**20)))
    bound = FACTOR * unit_roundoff(np.float32) * 6
    assert np.linalg.norm(first - second) <= bound * np.linalg.norm(first)


def test_an_example_axis_that_is_not_the_first():
    """Named, it may stand anywhere; the matrix is the one of the moved array."""
    x = np.random.default_rng(3).normal(size=(3, 4, 2))
    first = nj.influence(nj.NormSpec("[b t] c"), jnp.asarray(x))
    other = nj.influence(
        nj.NormSpec("[t b] c", example="b"), jnp.asarray(x.swapaxes(0, 1))
    )
    bound = FACTOR * unit_roundoff(np.float64) * 12
    assert np.linalg.norm(first - other) <= bound * np.linalg.norm(first)
    assert first.shape == other.shape == (3, 3)


def test_no_example_axis():
    with pytest.raises(ValueError, match="has no example axis"):
        nj.influence(nj.weight_standardization("i"), jnp.ones((3, 2)))


def test_under_vmap():
    spec = nj.batch_norm()
    x = jnp.asarray(np.random.default_rng(4).normal(size=(3, 5, 2)))
    many = jit(jax.vmap(partial(nj.influence, spec)))(x)
    one = jit(partial(nj.influence, spec))(x[2])
    bound = FACTOR * unit_roundoff(np.float64) * 5
    assert np.linalg.norm(many[2] - one) <= bound * np.linalg.norm(one)


def test_a_blend_against_brute_force():
    spec = nj.batch_norm(statistics="blend", mean_weight=0.4, variance_weight=0.7)
    x = jnp.asarray(np.random.default_rng(5).normal(size=(4, 3)))
    reference = nj.Statistics(jnp.ones(3), jnp.full(3, 2.0))
    run = partial(nj.normalize, spec, reference=reference)
    J = wide(jit(jax.jacfwd(run))(x))
    expected = np.sqrt((J**2).sum((1, 3)))
    bound = FACTOR * unit_roundoff(np.float64) * 4
    gap = np.linalg.norm(wide(nj.influence(spec, x, reference=reference)) - expected)
    assert gap <= bound * np.linalg.norm(expected)


@pytest.mark.parametrize("name", ["batch", "ghost_space", "mask_int_zero", "layer"])
@pytest.mark.parametrize("numbers", [1, 7, 13])
def test_blocks_of_any_size_give_the_same_matrix(name, numbers, monkeypatch):
    """Blocks of one row, and blocks that do not divide the examples."""
    case = CASES[name]
    x = jnp.asarray(inputs(case, 1, kappa=10.0)[0])
    whole = influence(case, x)
    monkeypatch.setattr(coupling, "_BLOCK", numbers)
    np.testing.assert_array_equal(influence(case, x), whole)


def test_many_examples_need_no_more_than_the_matrix():
    """The compiled program's scratch is O(examples²), whatever the features."""
    x = jax.ShapeDtypeStruct((512, 300), jnp.float32)
    compiled = jax.jit(lambda x: nj.influence(nj.batch_norm(affine=None), x)).lower(x)
    analysis = compiled.compile().memory_analysis()
    assert analysis is not None
    scratch = analysis.temp_size_in_bytes
    assert scratch <= 4 * 4 * 512**2 + 8 * 4 * 512 * 300
