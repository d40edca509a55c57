"""The checker holds on right layers, and fails on every planted error."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src import public_test_util
from jax.test_util import check_grads

import normjax as nj
from normjax import functional
from normjax.verify import check_jacobian, checks

# Dense, dense at its limit, and what users have.
SIZES = [
    (nj.layer_norm(), (2, 6)),
    (nj.layer_norm(), (2, 256)),
    (nj.layer_norm(), (64, 1024)),
    pytest.param(nj.batch_norm(), (256, 512), marks=pytest.mark.slow),
    pytest.param(nj.group_norm(groups=8), (8, 16, 16, 64), marks=pytest.mark.slow),
]
every_size = pytest.mark.parametrize(("spec", "shape"), SIZES, ids=str)
both_dtypes = pytest.mark.parametrize("dtype", ["float32", "float64"])


def draw(shape, dtype, offset=0.7):
    return jnp.asarray(np.random.default_rng(0).normal(offset, 1.5, shape), dtype)


def failed(found) -> set[str]:
    return {check.name for check in found if not check.ok}


@pytest.mark.parametrize(
    "spec",
    [
        nj.layer_norm(),
        nj.rms_norm(epsilon_placement="outside_sqrt"),
        nj.batch_norm(ddof=1),
        nj.layer_norm(center=False),
        nj.rms_norm(center=True),
        nj.layer_norm(detach=("mean",)),
        nj.layer_norm(divide="none"),
    ],
    ids=repr,
)
@pytest.mark.parametrize("dtype", ["float64", "float32", "float16"])
def test_right_layers_pass(spec, dtype):
    found = check_jacobian(spec, draw((3, 5), dtype))
    assert not failed(found)
    names = {check.name for check in found}
    assert {
        "value = plain reference",
        "operator = plain reference",
        "jvp of normalize = operator",
        "vjp of normalize = operator",
    } <= names
    differentiable = not spec.detach
    assert ("operator = central differences" in names) == (
        differentiable and dtype != "float16"
    )
    assert ("operator = 50 digits" in names) == differentiable


def test_masked_given_and_blended_layers_pass():
    x = draw((3, 4), "float32")
    mask = jnp.asarray(np.random.default_rng(1).random((3, 4)) < 0.7)
    statistics = nj.Statistics(jnp.ones(4, x.dtype), jnp.full(4, 2.0, x.dtype))
    for masked in ("keep", "zero", "passthrough"):
        assert not failed(
            check_jacobian(nj.layer_norm(masked_output=masked), x, mask=mask)
        )
    assert not failed(check_jacobian(nj.batch_norm(), x, moments=statistics))
    blend = nj.batch_norm(statistics="blend", mean_weight=0.3, variance_weight=0.6)
    assert not failed(check_jacobian(blend, x, blend_with=statistics))


def test_masked_given_and_blended_layers_pass_at_a_size_that_users_have():
    x = draw((64, 512), "float32", offset=30.0)
    mask = jnp.asarray(np.random.default_rng(1).random(x.shape) < 0.7)
    statistics = nj.Statistics(jnp.ones(512, x.dtype), jnp.full(512, 2.0, x.dtype))
    blend = nj.batch_norm(statistics="blend", mean_weight=0.3, variance_weight=0.6)
    dirty = jnp.where(mask, x, jnp.nan)
    given: dict[str, Any]
    for spec, values, given in (
        (nj.layer_norm(), x, {"mask": mask}),
        (nj.rms_norm(masked_output="zero"), dirty, {"mask": mask}),
        (nj.batch_norm(), x, {"moments": statistics}),
        (blend, x, {"blend_with": statistics}),
    ):
        found = check_jacobian(spec, values, **given)
        assert not failed(found)
        assert max(check.tolerance for check in found[:4]) < 1e-3  # NaN adds nothing


def test_an_empty_input_and_groups_of_one_pass():
    assert not failed(check_jacobian(nj.layer_norm(), jnp.zeros((0, 4))))
    assert not failed(check_jacobian(nj.layer_norm(), draw((600, 1), "float32")))


def plant(J, error: str):
    """The operator with an error in one of its terms, in every group."""
    one, c = J.u
    a, b = J.v
    n = np.prod([J.view[axis] for axis in J.axes])
    group = next(i for i in range(len(J.view)) if i not in J.axes)
    move = partial(jax.tree.map, lambda array: jnp.roll(array, 1, group))
    return {
        "dropped mean": lambda: replace(J, u=(0 * one, c)),
        "dropped radial": lambda: replace(J, u=(one, 0 * c)),
        "wrong sign": lambda: replace(J, gain=-J.gain),
        "zero": lambda: replace(J, gain=0 * J.gain),
        "ddof 1": lambda: replace(J, v=(a, b * jnp.asarray(n / (n - 1), b.dtype))),
        "shifted groups": lambda: replace(
            J, gain=move(J.gain), u=move(J.u), v=move(J.v)
        ),
    }[error]()


ERRORS = (
    "dropped mean",
    "dropped radial",
    "wrong sign",
    "zero",
    "ddof 1",
    "shifted groups",
)


@every_size
@both_dtypes
def test_a_planted_error_is_caught_at_every_size(monkeypatch, spec, shape, dtype):
    """In the operator, and in the derivative rule."""
    x, right, layer = draw(shape, dtype), nj.input_jacobian, functional.normalize
    assert not failed(check_jacobian(spec, x))
    for error in ERRORS:

        def planted(*args, error=error, **given):
            return plant(right(*args, **given), error)

        def normalize(spec, x, *, planted=planted, **given):
            @jax.custom_jvp
            def ruled(x):
                return layer(spec, x, **given)

            @ruled.defjvp
            def rule(primals, tangents):
                J = planted(spec, *primals, **given)
                return layer(spec, *primals, **given), J.mv(*tangents)

            return ruled(x)

        with monkeypatch.context() as patched:
            patched.setattr(checks, "input_jacobian", planted)
            found = check_jacobian(spec, x)
        caught = failed(found)
        assert {
            "operator = plain reference",
            "jvp of normalize = operator",
            "vjp of normalize = operator",
        } <= caught, error
        assert ("operator = 50 digits" in caught) == (shape == (2, 6))
        whole = error != "ddof 1" or dtype == "float64"
        assert "operator = central differences" in caught or not whole, error
        if error.startswith("dropped"):  # by a factor that the docstring states
            one = {check.name: check for check in found}["operator = plain reference"]
            factor = 8000 if dtype == "float32" else 4e12
            assert one.error > 0.9
            assert shape != (64, 1024) or one.error > factor * one.tolerance
        with monkeypatch.context() as patched:
            patched.setattr(functional, "normalize", normalize)
            caught = failed(check_jacobian(spec, x))
        assert caught == {"jvp of normalize = operator", "vjp of normalize = operator"}


@every_size
@both_dtypes
def test_a_planted_error_in_the_value_is_caught(monkeypatch, spec, shape, dtype):
    """Dividing by n − 1 in place of n, the smallest error that a layer makes."""
    right = functional.normalize

    def normalize(spec, x, **given):
        return right(spec.replace(ddof=1), x, **given)

    monkeypatch.setattr(functional, "normalize", normalize)
    caught = failed(check_jacobian(spec, draw(shape, dtype)))
    assert {"value = plain reference", "value = NumPy float64"} <= caught


def accepts(term: str, shape: tuple[int, int], dtype: str, mode: str) -> bool:
    """Whether check_grads, at its defaults, accepts a layer norm without a term."""

    @jax.custom_jvp
    def layer(x):
        return nj.normalize(nj.layer_norm(), x)

    @layer.defjvp
    def rule(primals, tangents):
        J = nj.input_jacobian(nj.layer_norm(), *primals)
        J = J if term == "none" else plant(J, term)
        return layer(*primals), J.mv(*tangents)

    try:
        check_grads(jax.jit(layer), (draw(shape, dtype),), 1, modes=(mode,))
    except AssertionError:
        return False
    return True


@both_dtypes
def test_what_a_tolerance_times_size_accepts(dtype):
    """The numbers of check_jacobian's docstring, about JAX's own checker."""
    caught, passed = ((8, 16), (8, 32)) if dtype == "float32" else ((32, 256), None)
    large = (64, 1024)
    for term in ("dropped mean", "dropped radial"):
        assert accepts(term, large, dtype, "fwd")
        assert not accepts(term, caught, dtype, "fwd")
        assert passed is None or accepts(term, passed, dtype, "fwd")
        assert not accepts(term, large, dtype, "rev")
    for term in ("zero", "wrong sign"):
        assert accepts(term, large, dtype, "fwd") == (dtype == "float32")
    tolerances = public_test_util.default_gradient_tolerance
    expected = {"float32": 2e-3, "float64": 1e-5}
    assert tolerances[np.dtype(dtype)] == expected[dtype]
