"""The closed form: operator, eigenvalues, singular values, spectrum, share of ε."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import CASES
from compare import (
    COUNT,
    FACTOR,
    batched,
    evidence,
    jit,
    operator,
    unit_roundoff,
    wide,
)
from frames import FRAMES, Case, inputs

import normjax as nj

every_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)
PLACEMENTS = ("inside_sqrt", "outside_sqrt", "floor_var", "floor_std")


@every_case
def test_operator(case: Case):
    """as_matrix() against jacfwd of the oracle, on every input."""
    found = evidence(case).operator
    found.check()
    assert len(found.units) == COUNT


def varies_within_a_group(case: Case) -> bool:
    """Whether a scale distinguishes entries of one group, by the hand-written views."""
    view = case.frame.affine_view
    scaled = "scale" in case.parameters
    return scaled and any(view[axis] > 1 for axis in case.frame.axes)


def unclaimed(matrix: np.ndarray, values: np.ndarray) -> float:
    """Backward error of claimed eigenvalues, as a share of |J|.

    λ is one, m times, of a matrix within σ of J if J − λI has m singular values of at
    most σ. Unlike a distance to computed eigenvalues this needs no conditioning: for a
    nearly double one of a map that is not normal that distance may be √u.
    """
    size, worst = np.linalg.norm(matrix, 2), 0.0
    near = FACTOR * unit_roundoff(np.float64) * len(matrix) * size
    for value in values:
        apart = np.sort(abs(values - value))
        times = np.count_nonzero(apart <= near)
        gaps = np.linalg.svd(matrix - value * np.eye(len(matrix)), compute_uv=False)
        worst = max(worst, (gaps[-times] - apart[times - 1]) / size)
    return worst


@every_case
def test_eigenvalues(case: Case):
    """All of them, with their multiplicities, and their sum is the trace."""
    found = evidence(case)
    assert (found.eigenvalues is None) == varies_within_a_group(case)
    if found.eigenvalues is None:
        with pytest.raises(ValueError, match="scale that varies within a group"):
            jax.eval_shape(lambda x: nj.eigenvalues(operator(case, x)), found.x[0])
        return
    bound = FACTOR * unit_roundoff(np.float64) * case.frame.group_size
    for matrix, values in zip(found.matrices, found.eigenvalues, strict=True):
        values = values.ravel()
        assert len(values) == len(matrix)
        assert unclaimed(matrix, values) <= bound
        trace, size = np.trace(matrix), np.linalg.norm(matrix, 2)
        assert abs(values.sum() - trace) <= bound * size * len(matrix)


def test_a_wrong_eigenvalue_is_rejected():
    """0 where ε/s³ is right, ε/s³ where 1/s is right, or one multiplicity too many."""
    found = evidence(Case("planted", FRAMES["weight"]))
    assert found.eigenvalues is not None
    n, bound = 8, FACTOR * unit_roundoff(np.float64) * 8
    for matrix, values in zip(found.matrices, found.eigenvalues, strict=True):
        offset, radial, *tangential = values[0]
        rest = values[1:].ravel()
        assert (
            unclaimed(matrix, np.array([offset, radial, *tangential, *rest])) <= bound
        )
        for wrong in (
            [offset, 0.0, *tangential],
            [offset, radial, *tangential[1:], radial],
            [tangential[0], radial, *tangential],
            [0.0] * n,
            [offset, radial * (1 + 1e-3), *tangential],
        ):
            if radial < 1e-6 * tangential[0] or radial > 0.99 * tangential[0]:
                continue  # the two are one to these digits
            assert unclaimed(matrix, np.array([*wrong, *rest])) > bound


@every_case
def test_singular_values(case: Case):
    """Of every map whose scale is constant within a group, symmetric or not."""
    found = evidence(case)

    def ours(x):
        return nj.singular_values(operator(case, x))

    if varies_within_a_group(case):
        with pytest.raises(ValueError, match="numerical form"):
            jax.eval_shape(ours, found.x[0])
        return
    values = batched(ours)(found.x).reshape(len(found.x), -1)
    right = np.linalg.svd(found.matrices, compute_uv=False)
    closed = np.sort(values)[:, ::-1]
    bound = FACTOR * unit_roundoff(np.float64) * case.frame.group_size
    error = np.max(np.abs(closed - right) / right[:, :1])
    print(f"{error / unit_roundoff(np.float64):.2g} u")
    assert error <= bound * values.shape[1]


def test_singular_values_are_not_found_through_a_gram_matrix():
    """In float32 a square root of a Gram matrix would floor at √u, 2e-4."""
    spec = nj.layer_norm(center=False, epsilon=1e-6)
    x = jnp.asarray([[1.0, -1.0, 2.0, -2.0, 0.5, 3.0]], jnp.float32)
    found = wide(nj.singular_values(nj.input_jacobian(spec, x)))
    exact = nj.input_jacobian(spec, x.astype(jnp.float64)).as_matrix()
    right = np.linalg.svd(wide(exact), compute_uv=False)
    assert right[-1] < 1e-5 * right[0]
    assert np.abs(found[0] - right).max() <= 64 * unit_roundoff(np.float32) * right[0]


def test_singular_values_are_descending():
    case = CASES["center_std"]
    x = inputs(case, 5)
    found = batched(lambda x: nj.singular_values(operator(case, x)))(x)
    matrices = batched(lambda x: operator(case, x).as_matrix())(x)
    assert found.shape == (5, 2, 6)
    for values, matrix in zip(found, matrices, strict=True):
        for group, one in enumerate(values):
            block = matrix[6 * group : 6 * group + 6, 6 * group : 6 * group + 6]
            right = np.linalg.svd(block, compute_uv=False)
            bound = FACTOR * unit_roundoff(np.float64) * 6 * right[0]
            assert np.max(abs(one - right)) <= bound


def test_refusals_name_the_reason():
    x = jnp.arange(6.0).reshape(2, 3)
    params = nj.init(nj.layer_norm(), x.shape, jnp.float64)
    J = nj.input_jacobian(nj.layer_norm(), x, params)
    with pytest.raises(ValueError, match="scale that varies within a group"):
        nj.eigenvalues(J)
    with pytest.raises(ValueError, match="no closed-form singular values"):
        nj.singular_values(J)
    blend = nj.layer_norm(statistics="blend", mean_weight=0.5)
    with pytest.raises(ValueError, match="no fixed offset and radial direction"):
        nj.spectrum(blend, x)


@pytest.mark.x32
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_table_of_placements(placement: str):
    """Offset, radial and tangential gain, on both sides of a floor."""
    spec = nj.layer_norm(epsilon_placement=placement)
    rng = np.random.default_rng(0)
    x = (rng.normal(size=(3, 7)) * [[0.1], [1.0], [10.0]]).astype(np.float32)
    find = jit(lambda s, x: (nj.spectrum(s, x), nj.stabilizer_share(s, x)))
    for epsilon in (1e-3, 1.0, 30.0):
        one = spec.replace(epsilon=epsilon)
        spectrum, share = wide(find(one, x))
        v = wide(x).var(1)
        std = np.sqrt(v)
        if placement == "inside_sqrt":
            s = np.sqrt(v + epsilon)
            radial, right = epsilon / s**3, epsilon / (v + epsilon)
        elif placement == "outside_sqrt":
            s = std + epsilon
            radial, right = epsilon / s**2, epsilon / s
        else:
            active = (v if placement == "floor_var" else std) < epsilon
            floor = np.sqrt(epsilon) if placement == "floor_var" else epsilon
            s = np.where(active, floor, std)
            radial, right = np.where(active, 1 / s, 0), active.astype(float)
        bound = FACTOR * unit_roundoff(np.float32)
        assert not spectrum.offset.any()
        np.testing.assert_allclose(spectrum.tangential, 1 / s, rtol=bound)
        np.testing.assert_allclose(spectrum.radial, radial, rtol=bound)
        np.testing.assert_allclose(share, right, rtol=bound)
        assert spectrum.count.tolist() == [7, 7, 7]
        assert spectrum.multiplicities == (1, 1, 5)


@pytest.mark.x32
@pytest.mark.parametrize("placement", PLACEMENTS[:2])
def test_radial_gain_keeps_its_digits(placement: str):
    """A few ulp down to ε/var = 1e-9, where 1 − bᵀc in float32 is all rounding."""
    rng = np.random.default_rng(1)
    x: Any = (rng.normal(size=(1, 64)) + 3).astype(np.float32)
    v = wide(x).var()
    spec = nj.layer_norm(epsilon_placement=placement)
    ratios = 10.0 ** np.arange(-9, 3, dtype=np.float32)
    epsilons = (ratios * (v if placement == "inside_sqrt" else np.sqrt(v))).astype(
        np.float32
    )

    def run(epsilon):
        one = spec.replace(epsilon=epsilon)
        return nj.spectrum(one, x).radial, nj.stabilizer_share(one, x)

    radial, share = wide(jit(jax.vmap(run))(epsilons))
    e = wide(epsilons)[:, None]
    s = np.sqrt(v + e) if placement == "inside_sqrt" else np.sqrt(v) + e
    power = 3 if placement == "inside_sqrt" else 2
    few = 32 * unit_roundoff(np.float32)
    np.testing.assert_allclose(radial, e / s**power, rtol=few)
    np.testing.assert_allclose(share, e / s ** (power - 1), rtol=few)
    # The control: by subtraction there is nothing left of it.
    c = x - x.mean()
    inv = np.float32(1) / np.sqrt((c * c).mean() + epsilons[0])
    naive = np.float32(1) - ((c * inv) ** 2).mean(dtype=np.float32)
    assert abs(naive - 1e-9) > 1e-9


def test_trace_and_determinant():
    """trace = (n − 2 + (1 − αₘ) + ρ)/s and det = s⁻ⁿ (1 − αₘ) ρ, αₘ 0 where unused."""
    rng = np.random.default_rng(2)
    x = jnp.asarray(rng.normal(size=(1, 5)) + 1)
    n, bound = 5, FACTOR * unit_roundoff(np.float64) * 5
    specs = {
        "centred": (nj.layer_norm(epsilon=0.3), 1.0),
        "rms": (nj.rms_norm(epsilon=0.3), 0.0),
        "detached mean": (nj.layer_norm(epsilon=0.3, detach="mean"), 0.0),
        "outside": (nj.layer_norm(epsilon=0.3, epsilon_placement="outside_sqrt"), 1.0),
        "ddof": (nj.layer_norm(epsilon=0.3, ddof=1), 1.0),
    }
    for spec, share_of_mean in specs.values():
        matrix, found, share = jit(
            lambda x, s=spec: (
                nj.input_jacobian(s, x).as_matrix(),
                nj.spectrum(s, x),
                nj.stabilizer_share(s, x),
            )
        )(x)
        s, rho = 1 / float(found.tangential[0]), float(share[0])
        trace = (n - 2 + (1 - share_of_mean) + rho) / s
        assert abs(np.trace(matrix) - trace) <= bound * n / s
        determinant = s**-n * (1 - share_of_mean) * rho
        assert abs(np.linalg.det(matrix) - determinant) <= bound * s**-n


@pytest.mark.x32
def test_reference_eigenvalues():
    """N71: 0, ε/(v + ε)/s and twice 1/s; J 1 = 0 and J c = (ε/s³) c."""
    x = jnp.array([1.0, 2.0, 3.0, 4.0], jnp.float32)
    spec, c = nj.layer_norm(), x - x.mean()

    def run(x, c):
        J, ones = nj.input_jacobian(spec, x), jnp.ones_like(x)
        return nj.eigenvalues(J), J.mv(ones), J.mv(1e6 * ones), J.mv(c)

    found, along, far, radial = wide(jit(run)(x, c))
    np.testing.assert_allclose(found, [0, 7.155e-6, 0.8944236, 0.8944236], atol=5e-8)
    u, gain = unit_roundoff(np.float32), 1e-5 / (1.25 + 1e-5) ** 1.5
    assert np.max(abs(along)) <= FACTOR * u
    assert not far.any()
    assert np.max(abs(radial - gain * wide(c))) <= FACTOR * u


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        (nj.layer_norm(), (1, 0, 0)),
        (nj.rms_norm(), (0, 1, 0)),
        (nj.layer_norm(center=False, divide="none"), (0, 1, 0)),
    ],
    ids=["centred", "rms", "identity"],
)
def test_group_of_one(spec: nj.NormSpec, expected: tuple):
    x = jnp.array([[2.0], [3.0]])
    found = nj.spectrum(spec, x)
    assert found.multiplicities == expected
    gains = jnp.stack([found.offset, found.radial, found.tangential], -1)
    alone = np.sum(np.asarray(gains) * expected, axis=-1)
    J = nj.input_jacobian(spec, x)
    bound = FACTOR * unit_roundoff(np.float64)
    np.testing.assert_allclose(nj.eigenvalues(J)[:, 0], alone, rtol=bound)
    # (I − c bᵀ)/s on one entry is ε/s³ by subtraction, so with an error of u/s.
    np.testing.assert_allclose(np.diag(J.as_matrix()), alone, rtol=0, atol=bound)


@pytest.mark.parametrize("output", ["keep", "zero", "passthrough"])
@pytest.mark.parametrize("valid", [0, 1, 2, 3])
def test_few_valid_entries(output: str, valid: int):
    """Eigenvalues of the valid block, and of the masked rows as declared."""
    x = jnp.asarray(np.random.default_rng(3).normal(size=(2, 4)))
    mask = jnp.stack([jnp.arange(4) < valid, jnp.ones(4, bool)])
    spec = nj.layer_norm(masked_output=output, epsilon=0.1)

    @jit
    def run(x):
        J = nj.input_jacobian(spec, x, mask=mask)
        return nj.eigenvalues(J), J.as_matrix(), nj.spectrum(spec, x, mask=mask)

    values, matrix, found = run(x)
    assert found.count.tolist() == [valid, 4]
    bound = FACTOR * unit_roundoff(np.float64) * 4
    assert unclaimed(np.asarray(matrix), np.asarray(values).ravel()) <= bound
    if valid == 1:
        masked = {"keep": 1 / np.sqrt(0.1), "zero": 0.0, "passthrough": 1.0}[output]
        np.testing.assert_allclose(values[0], [0, *[masked] * 3], rtol=1e-15)


@pytest.mark.x32
def test_spectrum_of_many_inputs():
    """vmap over inputs and over epsilon, and jit, give what a loop gives."""
    spec = nj.group_norm(groups=2)
    x = np.random.default_rng(4).normal(size=(3, 2, 3, 4)).astype(np.float32)
    many = jit(jax.vmap(partial(nj.spectrum, spec)))(x)
    assert many.tangential.shape == (3, 2, 2)
    assert many.multiplicities == (1, 1, 4)
    one = jit(partial(nj.spectrum, spec))
    few = 8 * unit_roundoff(np.float32)
    for i in range(3):
        for name in ("offset", "radial", "tangential", "count"):
            np.testing.assert_allclose(
                getattr(many, name)[i], getattr(one(x[i]), name), rtol=few
            )
    shares = jit(jax.vmap(lambda e: nj.stabilizer_share(spec.replace(epsilon=e), x[0])))
    found = shares(np.array([0.0, 1e-3, 1e3], np.float32))
    assert not found[0].any()
    assert np.all(found[1] < found[2])


def test_given_statistics_are_constants():
    """J is 1/s on the diagonal, and the stabilizer share 1: the layer is linear."""
    x = jnp.asarray(np.random.default_rng(5).normal(size=(4, 2)))
    given = nj.Statistics(jnp.array([1.0, 2.0]), jnp.array([4.0, 9.0]))
    spec = nj.batch_norm(epsilon=0.0)
    J = nj.input_jacobian(spec, x, moments=given)
    expected = np.diag([1 / 2, 1 / 3] * 4)
    np.testing.assert_allclose(J.as_matrix(), expected, rtol=1e-15)
    assert nj.stabilizer_share(spec, x, moments=given).tolist() == [1.0, 1.0]
    assert np.array_equal(nj.singular_values(J), [[1 / 2] * 4, [1 / 3] * 4])
