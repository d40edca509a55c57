"""The derivative of a mixture against autodiff of the plain formula in float64."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compare import jit
from mixtures import BOUND, MIXTURES, SHAPE, arrays, draw, every, gap, parameters, plain

import normjax as nj
from normjax.mixture import Mixture, input_jacobian
from normjax.operators import Sum

# Offsets and scales that differ between examples and channels.
X = draw(*SHAPE) * np.arange(1, 7) + np.arange(3).reshape(3, 1, 1, 1)


def both(mixture, axes, x, params, mask=None) -> tuple[np.ndarray, np.ndarray]:
    """J of the library and of the formula, rows by columns."""

    def formula(x):
        return plain(mixture, axes, x, params, mask)

    found = jit(lambda x, p: input_jacobian(mixture, x, p, mask=mask).as_matrix())
    right = jit(jax.jacfwd(formula))(x).reshape(x.size, x.size)
    return np.asarray(found(x, params)), np.asarray(right)


@every
@pytest.mark.parametrize("lead", [(), (3,)], ids=["one", "example"])
def test_it_is_the_derivative_of_the_formula(name: str, lead):
    mixture, axes = MIXTURES[name]
    params = arrays(parameters(mixture, lead))
    found, right = both(mixture, axes, jnp.asarray(X), params)
    assert gap(found, right) <= BOUND


def test_every_term_is_needed():
    """Each left out is noticed: one for a mean, one for a variance, one diagonal."""
    mixture, axes = MIXTURES["switchable"]
    params = arrays(parameters(mixture))
    x = jnp.asarray(X)
    J = input_jacobian(mixture, x, params)
    assert isinstance(J, Sum)
    assert len(J.terms) == 7
    t = jnp.asarray(draw(*SHAPE, seed=4))
    right = jax.jvp(lambda x: plain(mixture, axes, x, params), (x,), (t,))[1]
    assert gap(J.mv(t), right) <= BOUND
    for k in range(len(J.terms)):
        less = replace(J, terms=J.terms[:k] + J.terms[k + 1 :])
        assert gap(less.mv(t), right) > 1e-3


@pytest.mark.parametrize("masked_output", ["keep", "zero", "passthrough"])
def test_masked_with_nan_below_and_an_empty_group(masked_output: str):
    """Against autodiff of our own value there: the formula divides by a count of 0."""
    members = (nj.instance_norm(), nj.layer_norm(), nj.batch_norm())
    members = tuple(s.replace(masked_output=masked_output) for s in members)
    mixture = Mixture(members, affine="c")
    mask = np.ones((*SHAPE[:3], 1), bool)
    mask[0, 1:], mask[1, 2, 3] = False, False  # positions: layer norm's groups
    x, valid = np.where(mask, X, np.nan), jnp.asarray(mask)
    params = arrays(parameters(mixture))
    t = jnp.asarray(draw(*SHAPE, seed=4))

    def value(x):
        return nj.mixture.normalize(mixture, x, params, mask=valid)

    right = jax.jvp(value, (jnp.asarray(x),), (t,))[1]
    found = input_jacobian(mixture, jnp.asarray(x), params, mask=valid).mv(t)
    seen = np.isfinite(right) if masked_output == "keep" else np.ones(SHAPE, bool)
    assert gap(np.where(seen, found, 0), np.where(seen, right, 0)) <= BOUND
    assert seen[mask[..., 0]].all()


def test_given_statistics_have_no_term():
    mixture, _ = MIXTURES["switchable"]
    x, t = jnp.asarray(X), jnp.asarray(draw(*SHAPE, seed=4))
    stored = nj.Statistics(jnp.zeros(6), jnp.ones(6))
    given = (None, None, stored)
    J = input_jacobian(mixture, x, moments=given)
    assert len(J.terms) == 5
    value = lambda x: nj.mixture.normalize(mixture, x, moments=given)  # noqa: E731
    assert gap(J.mv(t), jax.jvp(value, (x,), (t,))[1]) <= BOUND


def test_transposed_narrow_and_large_offset():
    """Jᵀ against reverse mode; float32 at an offset of 1e4 within u κ of float64."""
    mixture, axes = MIXTURES["switchable"]
    x, t = draw(*SHAPE, offset=1e4).astype(np.float32), draw(*SHAPE, seed=4)
    x64, t64 = jnp.asarray(x, jnp.float64), jnp.asarray(t)
    right = jax.vjp(lambda x: plain(mixture, axes, x), x64)[1](t64)[0]
    assert gap(input_jacobian(mixture, x64).T.mv(t64), right) <= 1e4 * BOUND
    found = input_jacobian(mixture, jnp.asarray(x)).T.mv(jnp.asarray(t, jnp.float32))
    assert found.dtype == jnp.float32
    assert gap(found, right) <= 1e4 * 2.0**-24
    narrow = input_jacobian(mixture, jnp.asarray(x, jnp.bfloat16))
    assert narrow.dtype == jnp.float32


def test_spectra_are_numerical_only_and_devices_are_refused():
    mixture, _ = MIXTURES["centre only"]
    J = input_jacobian(mixture, jnp.asarray(X[:1, :2, :2]))
    with pytest.raises(ValueError, match="numerical=True"):
        nj.singular_values(J)
    values = nj.singular_values(J, numerical=True)
    right = np.linalg.svd(np.asarray(J.as_matrix()), compute_uv=False)
    assert gap(jnp.sort(values.ravel()), np.sort(right)) <= BOUND
    across = Mixture((nj.layer_norm(), nj.batch_norm(axis_names=("i",))))
    with pytest.raises(ValueError, match="whole batch"):
        jax.vmap(lambda x: input_jacobian(across, x), axis_name="i")(jnp.asarray(X))
