"""nj.geometry against NumPy, at bad inputs, and mapped over many."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import normjax as nj


def test_numbers_of_a_group():
    """Every field by hand, in float64, for layer and RMS norm."""
    x = np.random.default_rng(0).normal(3, 2, (5, 8))
    for spec in (nj.layer_norm(epsilon=0.5), nj.rms_norm(epsilon=0.5)):
        found = nj.geometry(spec, jnp.asarray(x))
        c = x - x.mean(1, keepdims=True) if spec.center else x
        s2 = (c**2).mean(1) + 0.5
        for ours, right in (
            (found.share, 0.5 / s2),
            (found.condition, s2 / 0.5),
            (found.distance, np.linalg.norm(c, axis=1)),
            (found.kappa, abs(x.mean(1)) / x.std(1)),
            (found.rms, np.sqrt((x**2).mean(1))),
            (found.largest, abs(x).max(1)),
            (found.spectrum.tangential, 1 / np.sqrt(s2)),
        ):
            np.testing.assert_allclose(ours, right, rtol=64 * 2.0**-53 * 8)


@pytest.mark.parametrize("mask", [False, True])
def test_condition_of_a_map_that_is_not_symmetric(mask: bool):
    """Largest over smallest nonzero singular value of the dense matrix."""
    x = jnp.asarray(np.random.default_rng(1).normal(1, 1, (3, 7)))
    valid = jnp.arange(7) < 5 if mask else None
    valid = None if valid is None else jnp.broadcast_to(valid, x.shape)
    for spec in (nj.scale_only(epsilon=0.3), nj.layer_norm(divide="rms", epsilon=0.3)):
        found = nj.geometry(spec, x, mask=valid)
        zero = spec.replace(affine=None, masked_output="zero")
        for row in range(3):
            given = None if valid is None else valid[row]
            one = zero.replace(pattern="[c]")
            matrix = nj.input_jacobian(one, x[row], mask=given).as_matrix()
            values = np.linalg.svd(np.asarray(matrix), compute_uv=False)
            right = values[0] / values[values > 1e-12].min()
            np.testing.assert_allclose(found.condition[row], right, rtol=1e-11)


def test_mapped_over_leading_axes():
    x = jnp.asarray(np.random.default_rng(2).normal(size=(4, 3, 2, 6)))
    spec = nj.NormSpec("[b] c")
    many = nj.geometry(spec, x)
    assert many.share.shape == (4, 3, 6)
    one = nj.geometry(spec, x[2, 1])
    for ours, right in zip(jax.tree.leaves(many), jax.tree.leaves(one), strict=True):
        np.testing.assert_allclose(ours[2, 1], right, rtol=1e-13, atol=1e-13)


@pytest.mark.x32
def test_bad_inputs():
    """A constant group, zeros, an offset, an overflow, one element, nothing valid."""
    rows = [[7.0] * 4, [0.0] * 4, [1e6, 1e6 + 1, 1e6 + 2, 1e6 + 3], [7e4, 0, 1, 2]]
    x = jnp.asarray(rows, jnp.float32)
    found = nj.geometry(nj.layer_norm(), x)
    assert found.share.dtype == jnp.float32
    assert found.share[:2].tolist() == [1.0, 1.0]
    assert found.kappa[:2].tolist() == [np.inf, 0.0]
    assert found.distance[:2].tolist() == [0.0, 0.0]
    assert float(found.kappa[2]) == pytest.approx(1e6 / 1.25**0.5, rel=1e-5)
    assert np.isinf(found.rounding("float16")[jnp.array([0, 1, 2, 3])]).all()
    assert (
        float(found.rounding("bfloat16")[2]) > 1 > float(found.rounding("float32")[2])
    )
    assert float(found.cancellation("float32")[2]) > 1
    alone = nj.geometry(nj.layer_norm(), x[:, :1])
    assert not jnp.isnan(alone.condition).any()
    empty = nj.geometry(nj.layer_norm(), x, mask=jnp.zeros((4, 1), bool))
    for leaf in jax.tree.leaves(empty):
        assert not jnp.isnan(leaf).any()


@pytest.mark.parametrize("preset", ["layer_norm", "rms_norm", "l2_norm"])
def test_rounding_is_a_bound_that_is_reached(preset: str):
    """Rounding x to bfloat16 moves x̂ by at most that, and by a tenth of it or more.

    Where x is divided by its mean square, an offset of 20 costs nothing.
    """
    x = np.random.default_rng(3).normal(20, 1, (50, 64))
    spec = getattr(nj, preset)(epsilon=0.0)
    y = np.asarray(nj.normalize(spec, jnp.asarray(x)))
    near = jnp.asarray(x, jnp.bfloat16).astype(jnp.float64)
    moved = np.linalg.norm(np.asarray(nj.normalize(spec, near)) - y, axis=1)
    error = moved / np.linalg.norm(y, axis=1)
    bound = np.asarray(nj.geometry(spec, jnp.asarray(x)).rounding("bfloat16"))
    assert (error <= bound).all()
    assert (error >= bound / 10).all()


def test_a_mean_square_cancels_nothing():
    """E[x²] − E[x]² loses u κ² of a variance; a mean square has positive parts."""
    x = jnp.asarray(np.random.default_rng(3).normal(1e4, 1, (3, 64)), jnp.float32)
    u = 2.0**-24
    variance = np.asarray(nj.geometry(nj.layer_norm(), x).cancellation("float32"))
    square = np.asarray(nj.geometry(nj.rms_norm(), x).cancellation("float32"))
    np.testing.assert_allclose(square, u, rtol=1e-5)
    assert (variance > 1e7 * u).all()


def test_a_blend_is_refused():
    with pytest.raises(ValueError, match="a blend has no fixed offset"):
        nj.geometry(
            nj.batch_norm(statistics="blend"),
            jnp.ones((4, 2)),
            reference=nj.Statistics(jnp.zeros(2), jnp.ones(2)),
        )
