"""Algorithm, application, rescaling and renorm: what each field changes."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compare import FACTOR, jit, unit_roundoff, wide

import normjax as nj
from normjax.verify.oracles import numpy_reference, reference

pytestmark = pytest.mark.jax_defaults

RESCALE = nj.Precision(rescale=True)
FOLDED = nj.Precision(apply="folded")
ONE_PASS = nj.Precision(algorithm="one_pass")
U = unit_roundoff(np.float32)
HUGE = {
    "1e25": [1e25, -1e25, 3e25],
    "largest": [3e38, -3e38, 1e38],
    "mixed": [1e-30, 1.0, 2e30],
    "offset": [1e30, 1.0001e30, 1.0003e30],
}
LAYERS = {
    "layer": nj.layer_norm(),
    "rms": nj.rms_norm(),
    "l2": nj.l2_norm(),
    "scale only": nj.layer_norm(center=False),
    "outside": nj.layer_norm(epsilon_placement="outside_sqrt"),
    "floor_var": nj.rms_norm(epsilon_placement="floor_var"),
    "floor_std": nj.layer_norm(epsilon_placement="floor_std"),
}


def bound(x, n: int) -> float:
    """64 u (n + κ), the bound of every other test."""
    x = np.asarray(x, np.float64)
    return FACTOR * U * (n + abs(x.mean()) / x.std())


def settings(spec: nj.NormSpec) -> dict:
    return {
        "epsilon": spec.epsilon,
        "center": spec.center,
        "divide": spec.divide,
        "placement": spec.epsilon_placement,
    }


@pytest.mark.parametrize("values", HUGE.values(), ids=HUGE)
@pytest.mark.parametrize("spec", LAYERS.values(), ids=LAYERS)
def test_rescaled_squares_stay_in_range(spec: nj.NormSpec, values: list[float]):
    x = jnp.asarray(values, jnp.float32)
    found = jit(partial(nj.normalize, spec.replace(precision=RESCALE)))(x)
    exact = np.asarray(x, np.float64)
    expected = numpy_reference(exact, (0,), **settings(spec))
    gap = np.linalg.norm(wide(found) - expected)
    assert gap <= bound(x, 3) * np.linalg.norm(expected)


def test_without_rescaling_such_a_group_is_nan():
    """The control: the same inputs leave float32."""
    found = nj.normalize(nj.layer_norm(), jnp.asarray(HUGE["1e25"], jnp.float32))
    assert np.isnan(found).all()


@pytest.mark.parametrize("name", ["layer", "rms", "outside"])
def test_rescaled_derivatives(name: str):
    """In both modes, of ε too, and by the operator, against float64."""
    spec = LAYERS[name].replace(epsilon=1e-3)
    x = jnp.asarray(HUGE["1e25"], jnp.float32)
    run = partial(nj.normalize, spec.replace(precision=RESCALE))
    with jax.enable_x64(True):
        plain = partial(reference, axes=(0,), **settings(spec))
        expected = wide(jax.jacfwd(plain)(jnp.asarray(wide(x))))
    for found in (
        jit(jax.jacfwd(run))(x),
        jit(jax.jacrev(run))(x),
        nj.input_jacobian(spec.replace(precision=RESCALE), x).as_matrix(),
    ):
        gap = np.linalg.norm(wide(found) - expected)
        assert gap <= bound(x, 3) * np.linalg.norm(expected)
    tangential = float(nj.spectrum(spec.replace(precision=RESCALE), x).tangential)
    assert tangential == pytest.approx(np.linalg.eigvalsh(expected)[-1], rel=1e-5)


def test_rescaled_epsilon_keeps_its_derivative():
    """∂x̂/∂ε = −x̂/(2s²), where ε and σ² are of one size."""
    x = jnp.array([1e-3, -2e-3, 4e-3], jnp.float32)
    spec = nj.layer_norm(precision=RESCALE)
    found = jax.jacfwd(lambda e: nj.normalize(spec.replace(epsilon=e), x))(1e-5)
    s2 = np.var(np.asarray(x, np.float64)) + 1e-5
    expected = -np.asarray(nj.normalize(nj.layer_norm(), x), np.float64) / (2 * s2)
    np.testing.assert_allclose(found, expected, rtol=64 * U * 3)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_a_power_of_two_changes_no_bit(dtype: str):
    """Of ordinary inputs, where every product with it is exact (one operation each)."""
    x = jnp.asarray(np.random.default_rng(0).normal(size=(5, 64)) * 7 + 3, dtype)
    for spec in (nj.layer_norm(), nj.rms_norm(), nj.batch_norm()):
        plain = nj.normalize(spec, x)
        scaled = nj.normalize(spec.replace(precision=RESCALE), x)
        np.testing.assert_array_equal(plain, scaled)


def test_rescaling_reaches_down_to_the_smallest_numbers():
    """With ε = 0 squares would vanish and take the group with them."""
    x = jnp.array([1e-30, -1e-30, 3e-30], jnp.float32)
    spec = nj.layer_norm(epsilon=0.0)
    assert (nj.normalize(spec, x) == 0).all()
    found = nj.normalize(spec.replace(precision=RESCALE), x)
    expected = numpy_reference(np.asarray(x, np.float64), (0,), **settings(spec))
    np.testing.assert_allclose(found, expected, rtol=0, atol=bound(x, 3) * 2)


def test_a_group_is_rescaled_by_itself_and_by_its_valid_entries():
    x = jnp.array([[1e25, -1e25, 3e25], [1.0, 2.0, 4.0], [0.0, 0.0, 0.0]], jnp.float32)
    mask = jnp.array([[True] * 3, [True, True, False], [True] * 3])
    spec = nj.layer_norm(masked_output="zero", precision=RESCALE)
    found = nj.normalize(spec, x.at[1, 2].set(jnp.inf), mask=mask)
    expected = nj.normalize(spec, x[1:2, :2])
    np.testing.assert_array_equal(found[1, :2], expected[0])
    np.testing.assert_array_equal(found[2], 0)
    assert np.isfinite(found).all()
    bad = nj.normalize(spec, x.at[1, 0].set(jnp.nan))
    assert np.isnan(bad[1]).all()
    assert np.isfinite(bad[jnp.array([0, 2])]).all()


@pytest.mark.parametrize("affine", [False, True])
@pytest.mark.parametrize("spec", [nj.layer_norm(), nj.batch_norm()], ids=["l", "b"])
def test_folding_loses_what_the_offset_costs(spec: nj.NormSpec, affine: bool):
    """N05: κ u, where centring first errs by u; the derivative is the same."""
    kappa, n = 1e4, 16
    x = jnp.asarray(np.random.default_rng(1).normal(size=(n, n)) + kappa, jnp.float32)
    params = nj.init(spec, x.shape) if affine else None
    axis = 1 if spec.pattern.startswith("...") else 0
    exact = numpy_reference(np.asarray(x, np.float64), (axis,), **settings(spec))
    errors = [
        np.abs(wide(jit(partial(nj.normalize, way))(x, params)) - exact).max()
        for way in (spec, spec.replace(precision=FOLDED))
    ]
    assert errors[0] <= FACTOR * U * n
    assert FACTOR * U * n < errors[1] <= FACTOR * U * (n + kappa)
    J = [
        jit(jax.jacrev(partial(nj.normalize, way)))(x[:4, :4])
        for way in (spec, spec.replace(precision=FOLDED))
    ]
    np.testing.assert_array_equal(*J)


def test_folding_an_empty_group_gives_the_bias():
    spec = nj.batch_norm(precision=FOLDED)
    params = {"scale": jnp.full(2, 3.0), "bias": jnp.array([1.0, -1.0])}
    x = jnp.array([[jnp.nan, 1.0], [jnp.inf, 3.0]], jnp.float32)
    mask = jnp.array([[False, True], [False, True]])
    found = nj.normalize(spec, x, params, mask=mask)
    np.testing.assert_array_equal(found[:, 0], 1.0)
    np.testing.assert_allclose(found[:, 1], [-4.0, 2.0], rtol=1e-4)


@pytest.mark.parametrize("spec", [nj.layer_norm(), nj.batch_norm(ddof=1)])
def test_one_pass_errs_by_the_square_of_the_offset(spec: nj.NormSpec):
    """κ² u, never negative, and its derivative is the closed form at what it found."""
    one, n = spec.replace(precision=ONE_PASS), 16
    noise = np.random.default_rng(2).normal(size=(n, n))
    axis = 1 if spec.pattern.startswith("...") else 0
    for kappa in (0.0, 10.0, 100.0):
        x = jnp.asarray(noise + kappa, jnp.float32)
        exact = np.asarray(x, np.float64)
        expected = numpy_reference(exact, (axis,), ddof=spec.ddof, **settings(spec))
        gap = np.abs(wide(jit(partial(nj.normalize, one))(x)) - expected).max()
        assert gap <= FACTOR * U * (n + kappa**2)
        found = jit(jax.jacrev(partial(nj.normalize, one)))(x[:4, :4])
        operator = nj.input_jacobian(one, x[:4, :4]).as_matrix()
        limit = FACTOR * U * (n + kappa**2)
        np.testing.assert_allclose(found.reshape(16, 16), operator, atol=limit)
    lost = jnp.array([1e4, 1e4 + 1, 1e4 + 2, 1e4 + 3], jnp.float32)
    assert float(nj.moments(nj.layer_norm(precision=ONE_PASS), lost).m2) >= 0


def test_one_pass_is_what_flax_computes():
    """N01: ±1500 where ±1.34 is right, reproduced on purpose."""
    x = jnp.array([1e4, 1e4 + 1, 1e4 + 2, 1e4 + 3], jnp.float32)
    spec = nj.layer_norm(epsilon=1e-6, precision=ONE_PASS)
    np.testing.assert_allclose(
        nj.normalize(spec, x), [-1500, -500, 500, 1500], rtol=1e-5
    )


AIM = nj.Statistics(jnp.array([4.0]), jnp.array([1.0]))
RENORM = nj.batch_norm(statistics="renorm", epsilon=0.0)


def test_renorm_corrects_to_the_stored_statistics():
    """N41: batch (5, 2), stored (4, 1): r = 2, d = 1, so y = (x − 4)/1."""
    x = jnp.array([[3.0], [7.0]])
    found = nj.normalize(RENORM, x, reference=AIM)
    np.testing.assert_allclose(found, [[-1.0], [3.0]], rtol=1e-6)
    wide = jnp.array([[-5.0], [15.0]])  # standard deviation 10: r stops at 3
    found = nj.normalize(RENORM.replace(d_max=0.0), wide, reference=AIM)
    np.testing.assert_allclose(found, [[-3.0], [3.0]], rtol=1e-6)


def test_the_corrections_of_renorm_carry_no_gradient():
    """J = r J of batch norm; nothing reaches the reference."""
    x = jnp.asarray(np.random.default_rng(3).normal(size=(6, 1)) * 2 + 5)
    spec = nj.batch_norm(statistics="renorm", r_max=10.0, d_max=10.0)
    plain = spec.replace(statistics="input")

    def renormed(x, mean, variance):
        return nj.normalize(spec, x, reference=nj.Statistics(mean, variance))

    J, *rest = jax.jacrev(renormed, argnums=(0, 1, 2))(x, AIM.mean, AIM.variance)
    r = np.sqrt((np.var(x) + 1e-5) / (1 + 1e-5))
    expected = r * np.asarray(jax.jacrev(partial(nj.normalize, plain))(x))
    u = unit_roundoff(x.dtype)
    np.testing.assert_allclose(J, expected, rtol=0, atol=FACTOR * u * 9)
    for nothing in rest:
        np.testing.assert_array_equal(nothing, 0)


def test_renorm_without_room_is_batch_norm():
    x = jnp.asarray(np.random.default_rng(4).normal(size=(6, 1)) * 2 + 5)
    tight = nj.batch_norm(statistics="renorm", r_max=1.0, d_max=0.0)
    found = nj.normalize(tight, x, reference=AIM)
    np.testing.assert_array_equal(found, nj.normalize(nj.batch_norm(), x))


def test_renorm_at_inference_uses_the_stored_statistics_as_they_are():
    x = jnp.array([[3.0], [7.0]])
    found = nj.normalize(RENORM, x, moments=AIM)
    np.testing.assert_array_equal(
        found, nj.normalize(nj.batch_norm(epsilon=0.0), x, moments=AIM)
    )
