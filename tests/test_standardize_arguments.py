"""Gradients by everything but x: parameters, ε, shares, given statistics, reference."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import CASES
from compare import FACTOR, batched, jit, measure, unit_roundoff, wide
from frames import Case, inputs

import normjax as nj

LEARNED = ["layer", "batch_space", "group_first", "rms", "mask_zero", "affine_plus_one"]
SOURCES = {
    "given": [
        "given_batch",
        "given_rms",
        "given_outside",
        "given_floor",
        "given_stored_ghost",
    ],
    "moments": ["given_moments", "given_moments_rms", "given_moments_l2"],
    "reference": ["blend_batch", "blend_layer_outside", "blend_floor", "mask_blend"],
}


def check(case: Case, ours, plain, start: dict[str, Any]) -> None:
    """∂y/∂ each argument in reverse mode against the oracle, per group of y."""
    x = points(case)

    def derivatives(function):
        return batched(
            lambda x: jax.jacrev(lambda moving: function(x, **moving))(start)
        )(x)

    found, expected = derivatives(ours), derivatives(plain)
    for name in start:
        measure(case, x, found[name], expected[name]).check()
    assert any(array.any() for array in expected.values())


def points(case: Case) -> np.ndarray:
    return inputs(case, 100, kappa=100.0, spread=1.0)


@pytest.mark.parametrize("name", LEARNED)
def test_scale_and_bias(name: str):
    case = CASES[name]
    params = {k: jnp.asarray(v) for k, v in case.parameters.items()}
    view = case.frame.affine_view

    def ours(x, **moving):
        return case.call(x, params=moving)

    def plain(x, **moving):
        return case.oracle(x, **{k: v.reshape(view) for k, v in moving.items()})

    check(case, ours, plain, params)


@pytest.mark.parametrize(
    "name",
    [
        "layer",
        "rms",
        "center_std_outside_sqrt",
        "center_std_floor_var",
        "center_std_floor_std",
        "given_outside",
        "blend_batch",
        "mask_zero",
    ],
)
def test_epsilon(name: str):
    """By autodiff of the reference; the table of closed forms is below."""
    case = CASES[name]
    start = {"epsilon": jnp.asarray(case.spec.epsilon)}

    def ours(x, epsilon):
        passed = case.arguments(x.dtype)
        spec = case.spec.replace(epsilon=epsilon)
        return nj.normalize(spec, x, passed.pop("params", None), **passed)

    check(case, ours, case.oracle, start)


@pytest.mark.x32
@pytest.mark.parametrize(
    ("placement", "power"),
    [("inside_sqrt", 2), ("outside_sqrt", 1), ("floor_var", 2), ("floor_std", 1)],
)
def test_epsilon_in_closed_form(placement: str, power: int):
    """−x̂/(2s²) inside and floor_var, −x̂/s outside and floor_std; 0 if inactive."""
    x = jnp.array([[1.0, 2.0, 4.0], [10.0, 20.0, 40.0]], jnp.float32)
    epsilon, spec = 5.0, nj.layer_norm(epsilon_placement=placement)

    def call(epsilon):
        return nj.normalize(spec.replace(epsilon=epsilon), x)

    y, moved = jit(lambda e: jax.jvp(call, (e,), (jnp.ones_like(e),)))(
        jnp.float32(epsilon)
    )
    c = wide(x) - wide(x).mean(1, keepdims=True)
    std = np.sqrt((c**2).mean(1, keepdims=True))
    floor = np.sqrt(epsilon) if placement == "floor_var" else epsilon
    s = {
        "inside_sqrt": np.sqrt(std**2 + epsilon),
        "outside_sqrt": std + epsilon,
    }.get(placement, np.maximum(std, floor))
    active = (std < floor) if placement.startswith("floor") else np.full((2, 1), True)
    assert active.any()
    right = np.where(active, -(c / s) / (power * s**power), 0)
    bound = FACTOR * unit_roundoff(np.float32) * 3
    assert np.linalg.norm(wide(y) - c / s) <= bound * np.linalg.norm(c / s)
    assert np.linalg.norm(wide(moved) - right) <= bound * np.linalg.norm(right)


@pytest.mark.parametrize("name", SOURCES["given"])
def test_given_statistics(name: str):
    case = CASES[name]
    keep = case.frame.keep_shape
    passed = case.arguments(np.float64)["moments"]
    start = {"mean": passed.mean, "variance": passed.variance}
    full = [1, *keep[1:]] if case.given == "stored" else keep

    def ours(x, mean, variance):
        return case.call(x, moments=nj.Statistics(mean, variance))

    def plain(x, mean, variance):
        given = [jnp.broadcast_to(a.reshape(full), keep) for a in (mean, variance)]
        return case.oracle(x, given=given)

    check(case, ours, plain, start)


@pytest.mark.parametrize("name", SOURCES["moments"])
def test_given_moments(name: str):
    """Through count, the mean pair and M2: ddof and divide apply."""
    case = CASES[name]
    passed, keep = case.arguments(np.float64)["moments"], case.frame.keep_shape
    start = {"mean": passed.mean, "m2": passed.m2}

    def ours(x, mean, m2):
        moments = nj.Moments(passed.count, mean, passed.mean_low, m2)
        return case.call(x, moments=moments)

    def plain(x, mean, m2):
        count, ddof = 5.0, case.spec.ddof
        mean = mean + passed.mean_low
        second = {
            "std": m2 / (count - ddof),
            "rms": (m2 + count * mean**2) / (count - ddof),
            "l2": m2 + count * mean**2,
        }[case.spec.divide]
        return case.oracle(x, given=(mean.reshape(keep), second.reshape(keep)))

    check(case, ours, plain, start)


@pytest.mark.parametrize("name", SOURCES["reference"])
def test_reference_and_shares(name: str):
    """By what a blend mixes in, and by how much of it."""
    case = CASES[name]
    passed, keep = case.arguments(np.float64)["reference"], case.frame.keep_shape
    start = {
        "mean": passed.mean,
        "variance": passed.variance,
        "mean_weight": jnp.asarray(float(case.spec.mean_weight)),
        "variance_weight": jnp.asarray(float(case.spec.variance_weight)),
    }

    def ours(x, mean, variance, **weights):
        passed = case.arguments(x.dtype)
        passed["reference"] = nj.Statistics(mean, variance)
        spec = case.spec.replace(**weights)
        return nj.normalize(spec, x, passed.pop("params", None), **passed)

    def plain(x, mean, variance, mean_weight, variance_weight):
        given = mean.reshape(keep), variance.reshape(keep)
        return case.oracle(x, given=given, share=(mean_weight, variance_weight))

    check(case, ours, plain, start)


@pytest.mark.x32
def test_gradient_through_the_own_moments_is_the_whole_derivative():
    """normalize(x, moments=moments(x)) has J of normalize(x), in every mode."""
    spec = nj.batch_norm()
    x = jnp.asarray(np.random.default_rng(0).normal(size=(6, 2)) + 100, jnp.float32)

    def through(x):
        return nj.normalize(spec, x, moments=nj.moments(spec, x))

    @jit
    def run(x):
        J = nj.input_jacobian(spec, x).as_matrix().reshape(*x.shape, *x.shape)
        held = nj.input_jacobian(spec, x, moments=nj.moments(spec, x)).as_matrix()
        return jax.jacfwd(through)(x), jax.jacrev(through)(x), J, held

    forward, reverse, right, held = wide(run(x))
    bound = FACTOR * unit_roundoff(np.float32) * (6 + 100)
    for J in (forward, reverse):
        assert np.linalg.norm(J - right) <= bound * np.linalg.norm(right)
    assert np.count_nonzero(held) == 12  # constants, as documented: a diagonal


def test_planted_derivatives_are_rejected():
    """A zero, a wrong sign, one part in 10⁴ and an exchange, in every group."""
    case = CASES["batch_space"]
    x = points(case)
    right = case.rng("planted").normal(size=(*x.shape, 2))
    measure(case, x, right, right).check()
    for wrong in (-right, 0 * right, right * (1 + 1e-4), right[..., ::-1]):
        measure(case, x, wrong, right).refute()
