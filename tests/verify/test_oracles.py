from __future__ import annotations

import jax
import jax.numpy as jnp
import mpmath
import numpy as np
import pytest

import normjax as nj
from normjax.verify.oracles import (
    mpmath_jacobian,
    mpmath_reference,
    numpy_reference,
    reference,
)

SETTINGS = [
    {
        "epsilon": 0.1,
        "center": center,
        "divide": divide,
        "placement": place,
        "ddof": ddof,
    }
    for center in (True, False)
    for divide in ("std", "rms", "l2", "none")
    for place in ("inside_sqrt", "outside_sqrt", "floor_var", "floor_std")
    for ddof in (0, 1)
]


def test_the_reference_program_has_no_custom_rule_and_ours_has_one():
    x = jnp.ones((2, 3))
    plain = str(jax.make_jaxpr(lambda x: reference(x, (1,), epsilon=1e-5))(x))
    ours = str(jax.make_jaxpr(lambda x: nj.normalize(nj.layer_norm(), x))(x))
    assert "custom" not in plain
    assert "custom_jvp" in ours


@pytest.mark.parametrize(
    "settings", SETTINGS, ids=lambda s: "-".join(map(str, s.values()))
)
def test_the_three_references_agree(settings):
    x = np.random.default_rng(0).normal(0.4, 1.0, (3, 5))
    plain = np.asarray(reference(jnp.asarray(x), (1,), **settings))
    by_numpy = numpy_reference(x, (1,), **settings)
    with mpmath.workdps(50):
        exact = [
            [
                float(v)
                for v in mpmath_reference([mpmath.mpf(v) for v in row], **settings)
            ]
            for row in x.tolist()
        ]
    np.testing.assert_allclose(plain, exact, rtol=64 * 2.0**-53 * 5)
    np.testing.assert_allclose(by_numpy, exact, rtol=64 * 2.0**-53 * 5)


def test_fifty_digits_give_the_textbook_jacobian():
    """N71: row 0 for [1, 2, 3, 4], ε = 1e-5."""
    found = mpmath_jacobian(np.array([1.0, 2.0, 3.0, 4.0]), epsilon=1e-5)
    expected = [0.2683303, -0.3577684, -0.0894434, 0.1788815]
    np.testing.assert_allclose(found[0], expected, atol=5e-8)  # digits that are given


def test_numpy_reference_leaves_masked_entries_out():
    x = np.array([[1.0, 2.0, 4.0, np.nan]])
    mask = np.array([[True, True, True, False]])
    found = numpy_reference(x, (1,), epsilon=0.0, mask=mask)
    alone = numpy_reference(x[:, :3], (1,), epsilon=0.0)
    np.testing.assert_array_equal(found[:, :3], alone)
    assert np.isnan(found[0, 3])


def test_numpy_reference_groups_by_the_reduced_axes():
    x = np.random.default_rng(1).normal(size=(2, 3, 4))
    found = numpy_reference(x, (0, 2), epsilon=0.0)
    np.testing.assert_allclose(found.mean((0, 2)), 0, atol=1e-15)
    np.testing.assert_allclose(found.std((0, 2)), 1, rtol=1e-14)
