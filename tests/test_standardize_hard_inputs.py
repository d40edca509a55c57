"""Offsets, constants, single elements, empty groups, ties: value and derivative."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compare import FACTOR, batched, jit, unit_roundoff, wide

import normjax as nj

pytestmark = pytest.mark.x32

PLACEMENTS = ("inside_sqrt", "outside_sqrt", "floor_var", "floor_std")
normalize = jit(nj.normalize)


@jit
def backward(spec: nj.NormSpec, x, params, bar):
    """y, and the gradients of Σ bar · y by x and by the parameters."""
    y, pull = jax.vjp(partial(nj.normalize, spec), x, params)
    return y, *pull(bar)


@jit
def everything(spec: nj.NormSpec, x):
    """y, and ∂y/∂x as matrices: by the rule in both modes, and by the operator."""
    modes = [mode(nj.normalize, 1)(spec, x) for mode in (jax.jacfwd, jax.jacrev)]
    rule = [J.reshape(x.size, x.size) for J in modes]
    return nj.normalize(spec, x), [*rule, nj.input_jacobian(spec, x).as_matrix()]


def gap(actual, expected) -> float:
    return float(
        np.linalg.norm(wide(actual) - expected) / (np.linalg.norm(expected) or 1)
    )


def layer_norm_by_hand(d, epsilon=1e-5):
    """Value and J of d in float64, for a d without an offset."""
    d = np.asarray(d, np.float64)
    n, c = len(d), d - d.mean()
    s = np.sqrt(c @ c / n + epsilon)
    J = (np.eye(n) - 1 / n) / s - np.outer(c, c) / (n * s**3)
    return c / s, J


@pytest.mark.parametrize(("base", "step"), [(1e4, 1), (1e6, 1), (2**24, 2)])
def test_offset(base: float, step: float):
    """N01, N04, N05, N73: ±1.3416, ±0.4472, and the gradient of the same vector."""
    value, J = layer_norm_by_hand([0.0, step, 2 * step, 3 * step])
    np.testing.assert_allclose(abs(value), [1.3416, 0.4472, 0.4472, 1.3416], atol=5e-5)
    x = jnp.array([base, base + step, base + 2 * step, base + 3 * step], jnp.float32)
    bound = FACTOR * unit_roundoff(np.float32) * 4
    y, found = everything(nj.layer_norm(), x)
    assert gap(y, value) <= bound
    for matrix in found:
        assert gap(matrix, J) <= bound
    column = jnp.broadcast_to(x[:, None], (4, 2))
    assert gap(normalize(nj.batch_norm(), column)[:, 1], value) <= bound


def test_offset_is_hard():
    """The vector tells algorithms apart: two passes miss it by more than the bound."""
    spec = nj.layer_norm(precision=nj.Precision(algorithm="two_pass"))
    x = jnp.array([2**24, 2**24 + 2, 2**24 + 4, 2**24 + 6], jnp.float32)
    value, _ = layer_norm_by_hand([0.0, 2, 4, 6])
    assert gap(normalize(spec, x), value) > FACTOR * unit_roundoff(np.float32) * 4


@pytest.mark.parametrize(
    ("placement", "size"), [*((place, 3) for place in PLACEMENTS), ("inside_sqrt", 100)]
)
def test_constant_group(placement: str, size: int):
    """N72: x̂ is 0 and J is P/S(0), finite, for every placement."""
    spec = nj.layer_norm(epsilon=1e-5, epsilon_placement=placement)
    at_zero = 1e-5 if placement in ("outside_sqrt", "floor_std") else np.sqrt(1e-5)
    J = (np.eye(size) - 1 / size) / at_zero
    if size == 3 and placement == "inside_sqrt":
        np.testing.assert_allclose(J[0, :2], [210.8185, -105.4093], atol=5e-5)
    bound = FACTOR * unit_roundoff(np.float32)
    for constant in (0.0, 0.1, 1e4 + 0.1, 3.3e15):
        x = jnp.full(size, constant, jnp.float32)
        y, found = everything(spec, x)
        assert not y.any()
        for matrix in found:
            assert gap(matrix, J) <= bound


@pytest.mark.parametrize(
    ("placement", "center"),
    [*((place, True) for place in PLACEMENTS), ("inside_sqrt", False)],
)
def test_zero_epsilon_on_a_constant_group(placement: str, center: bool):
    """S(σ²) = 0: x̂ and J are 0, and so are the gradients of all that is learned."""
    divide = "std" if center else "rms"
    spec = nj.NormSpec(
        "... [c]",
        center=center,
        divide=divide,
        epsilon=0.0,
        epsilon_placement=placement,
        affine="c",
    )
    x = jnp.full(5, 3.0 if center else 0.0, jnp.float32)
    params = {"scale": jnp.full(5, 2.0, x.dtype), "bias": jnp.full(5, 7.0, x.dtype)}
    y, x_bar, params_bar = backward(spec, x, params, jnp.arange(5, dtype=x.dtype))
    assert y.tolist() == [7.0] * 5
    assert not x_bar.any()
    assert not params_bar["scale"].any()
    assert params_bar["bias"].tolist() == [0, 1, 2, 3, 4]
    for matrix in everything(spec, x)[1]:
        assert not matrix.any()


def test_zero_epsilon_elsewhere_is_the_plain_quotient():
    x = jnp.array([[1.0, 2.0, 3.0], [4.0, 4.0, 4.0]], jnp.float32)
    value, J = layer_norm_by_hand([1.0, 2.0, 3.0], epsilon=0.0)
    spec, bound = nj.layer_norm(epsilon=0.0), FACTOR * unit_roundoff(np.float32) * 3
    y, found = everything(spec, x)
    assert gap(y, np.stack([value, 0 * value])) <= bound
    full = np.zeros((6, 6))
    full[:3, :3] = J
    for matrix in found:
        assert gap(matrix, full) <= bound


SINGLE = {
    "instance": (nj.instance_norm(), (2, 1, 1, 3)),
    "group": (nj.group_norm(groups=4), (2, 1, 4)),
    "layer": (nj.layer_norm(), (4, 1)),
    "batch": (nj.batch_norm(ddof=1), (1, 3)),
}


@pytest.mark.parametrize(("spec", "shape"), SINGLE.values(), ids=SINGLE)
def test_group_of_one(spec: nj.NormSpec, shape: tuple):
    """N26, N27: exactly the bias; gradients of x and scale exactly 0."""
    x = (np.arange(np.prod(shape)).reshape(shape) * 1e6 + 0.3).astype(np.float32)
    params = jax.tree.map(lambda leaf: np.asarray(leaf) + 2, nj.init(spec, shape))
    y, x_bar, params_bar = backward(spec, x, params, jnp.full(shape, 3.0, x.dtype))
    assert np.array_equal(y, np.full(shape, 2.0))
    assert not x_bar.any()
    assert not params_bar["scale"].any()
    count = x.size / params["bias"].size
    assert np.array_equal(params_bar["bias"], np.full(params["bias"].shape, 3 * count))
    for matrix in everything(spec, x)[1]:
        assert not matrix.any()


def test_group_of_one_without_centring():
    """RMS: x̂ = x/√(x²+ε) and J = ε/s³."""
    spec = nj.rms_norm(epsilon=0.25)
    x = jnp.array([[0.0], [0.5], [-3.0]], jnp.float32)
    s = np.sqrt(wide(x) ** 2 + 0.25)
    bound = FACTOR * unit_roundoff(np.float32)
    y, found = everything(spec, x)
    assert gap(y, wide(x) / s) <= bound
    for matrix in found:
        assert gap(matrix, np.diag((0.25 / s**3)[:, 0])) <= bound


@pytest.mark.parametrize(("size", "ddof"), [(2, 2), (2, 3), (1, 1), (3, 5)])
def test_count_not_above_ddof(size: int, ddof: int):
    """v is 0, never 0/0 or negative: x̂ = c/√ε, J = P/√ε."""
    spec = nj.layer_norm(ddof=ddof, epsilon=0.04)
    x = jnp.asarray(np.arange(size) ** 2 + 5.0, jnp.float32)
    c = np.arange(size) ** 2 - np.mean(np.arange(size) ** 2)
    bound = FACTOR * unit_roundoff(np.float32) * size
    y, found = everything(spec, x)
    assert gap(y, c / 0.2) <= bound
    for matrix in found:
        assert gap(matrix, (np.eye(size) - 1 / size) / 0.2) <= bound


def test_count_just_above_ddof():
    """The control: with one degree of freedom left, v is finite and used."""
    spec = nj.layer_norm(ddof=1, epsilon=0.0)
    y = wide(normalize(spec, jnp.array([1.0, 3.0], jnp.float32)))
    assert gap(y, np.array([-1, 1]) / np.sqrt(2)) <= FACTOR * unit_roundoff(np.float32)


@pytest.mark.parametrize(
    ("spec", "shape"),
    [
        (nj.batch_norm(), (0, 2)),
        (nj.layer_norm(), (0, 4)),
        (nj.instance_norm(), (2, 0, 3)),
        (nj.ghost_batch_norm(ghosts=2), (0, 3)),
    ],
    ids=["batch", "layer", "instance", "ghost"],
)
def test_empty(spec: nj.NormSpec, shape: tuple):
    """N28: output of the same shape, zero parameter gradients, moments of nothing."""
    x, params = jnp.zeros(shape, jnp.float32), nj.init(spec, shape)
    y, x_bar, params_bar = backward(spec, x, params, x)
    assert y.shape == shape
    assert x_bar.shape == shape
    assert all(not leaf.any() for leaf in jax.tree.leaves(params_bar))
    found = jax.tree.leaves(jit(nj.moments)(spec, x))
    assert all(not leaf.any() for leaf in found)


@pytest.mark.parametrize("placement", ["floor_var", "floor_std"])
def test_exact_floor_tie(placement: str):
    """At the tie the floor divides and S′ is 0; one step above it does not."""
    at = 4.0 if placement == "floor_var" else 2.0
    x = jnp.array([1.0, 5.0], jnp.float32)  # variance 4, standard deviation 2
    tie = nj.layer_norm(epsilon_placement=placement, epsilon=at)
    P = np.eye(2) - 0.5
    for matrix in everything(tie, x)[1]:
        np.testing.assert_array_equal(matrix, P / 2)
    below = tie.replace(epsilon=float(np.nextafter(np.float32(at), np.float32(0))))
    for matrix in everything(below, x)[1]:
        assert gap(matrix, 0 * P) <= FACTOR * unit_roundoff(np.float32)
    slope = jit(jax.grad(lambda e: nj.normalize(tie.replace(epsilon=e), x)[1]))
    # ∂x̂/∂ε as for an active floor
    right = -1 / (2 * 4) if placement == "floor_var" else -1 / 2
    assert float(slope(jnp.float32(at))) == right


def test_huge_magnitude():
    """Squares below float32's largest number: as accurate as anywhere."""
    value, J = layer_norm_by_hand([0.0, 1.0, 2.0, 3.0], epsilon=0.0)
    bound = FACTOR * unit_roundoff(np.float32) * 4
    for factor in (1e18, 1e-15):
        x = jnp.array([0.0, factor, 2 * factor, 3 * factor], jnp.float32)
        spec = nj.layer_norm(epsilon=0.0)
        y, found = everything(spec, x)
        assert gap(y, value) <= bound
        for matrix in found:
            assert gap(matrix, J / factor) <= bound


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_valid_nonfinite_values_spread_over_their_group_only(bad: float):
    x = np.random.default_rng(0).normal(size=(3, 5)).astype(np.float32)
    clean = normalize(nj.layer_norm(), x)
    x[1, 2] = bad
    y, slope, _ = backward(nj.layer_norm(), x, None, np.ones_like(x))
    assert np.isnan(y[1]).all()
    assert np.isnan(slope[1]).all()
    assert np.array_equal(y[::2], clean[::2])
    assert np.isfinite(slope[::2]).all()


def test_outlier_as_first_element():
    """x₀ far from everything costs at most √n: the measured worst of the method."""
    rng = np.random.default_rng(1)
    x = rng.normal(size=(20, 4096)).astype(np.float32)
    x[:, 0] = 1e4
    y = batched(lambda x: nj.normalize(nj.layer_norm(), x), jnp.float32)(x)
    right = np.stack(
        [(row - row.mean()) / np.sqrt(row.var() + 1e-5) for row in wide(x)]
    )
    rest = np.linalg.norm(wide(y - right)[:, 1:], axis=1)
    bound = FACTOR * unit_roundoff(np.float32) * np.log2(4096)
    assert np.max(rest / np.linalg.norm(right, axis=1)) <= bound


@pytest.mark.parametrize("size", [1e20, 3e38])
@pytest.mark.parametrize(
    "spec", [nj.layer_norm(), nj.rms_norm(), nj.l2_norm()], ids=repr
)
def test_a_variance_beyond_the_dtype_is_nan_and_never_a_group_of_zeros(spec, size):
    """N06 in float32: 1/∞ would turn x̂ and J into 0 without a word."""
    x = jnp.array([[size, -size, size], [1.0, -1.0, 2.0]], jnp.float32)
    y, matrices = everything(spec, x)
    assert np.isnan(y[0]).all()
    assert np.isfinite(y[1]).all()
    for matrix in matrices:
        assert np.isnan(np.asarray(matrix)[:3, :3]).all()
        assert np.isfinite(np.asarray(matrix)[3:, 3:]).all()
