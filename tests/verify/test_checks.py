"""The checker holds on right layers, and fails on every planted error."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import normjax as nj
from normjax import functional
from normjax.verify import check_jacobian, checks

LARGEST = (1, checks.LARGEST)
SIZES = [
    ((2, 6), "float32"),
    ((2, 6), "float64"),
    (LARGEST, "float32"),
    (LARGEST, "float64"),
]


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
        "operator = jacfwd of plain reference",
        "jacfwd of normalize = operator",
        "jacrev of normalize = operator",
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


def test_too_large_an_input_is_refused():
    with pytest.raises(ValueError, match="x has 513 elements, expected at most 512"):
        check_jacobian(nj.layer_norm(), jnp.zeros((1, 513)))


class Planted:
    """An operator whose matrix has an error."""

    def __init__(self, right: np.ndarray, error: str, group: int):
        n = group
        ones = np.kron(np.eye(right.shape[0] // n), np.ones((n, n)) / n)
        gain = np.linalg.norm(right, 2)
        self.matrix = {
            "dropped mean": right + gain * ones,
            "wrong sign": right + 2 * gain * ones,
            "zero": 0 * right,
            "transposed groups": np.roll(right, 1, axis=1),
        }[error]

    def as_matrix(self) -> np.ndarray:
        return self.matrix


@pytest.mark.parametrize(("shape", "dtype"), SIZES)
@pytest.mark.parametrize(
    "error", ["dropped mean", "wrong sign", "zero", "transposed groups"]
)
def test_a_planted_error_in_the_operator_is_caught(monkeypatch, shape, dtype, error):
    right = nj.input_jacobian

    def planted(spec, x, **given):
        return Planted(np.asarray(right(spec, x, **given).as_matrix()), error, shape[1])

    monkeypatch.setattr(checks, "input_jacobian", planted)
    caught = failed(check_jacobian(nj.layer_norm(), draw(shape, dtype)))
    assert {
        "operator = jacfwd of plain reference",
        "jacfwd of normalize = operator",
        "operator = central differences",
    } <= caught
    assert ("operator = 50 digits" in caught) == (shape[1] <= checks.LARGEST_EXACT)


def wrong_rule(term: str):
    """``normalize`` with the right value and a derivative without one term."""
    right = functional.normalize

    def normalize(spec, x, **given):
        @jax.custom_jvp
        def layer(x):
            return right(spec, x, **given)

        @layer.defjvp
        def rule(primals, tangents):
            y, t = jax.jvp(partial(right, spec, **given), primals, tangents)
            share = nj.spectrum(spec, primals[0]).tangential[:, None]
            mean = tangents[0].mean(-1, keepdims=True)
            factor = {"mean": mean * share, "sign": -2 * t, "zero": -t}
            return y, t + factor[term].astype(t.dtype)

        return layer(x)

    return normalize


@pytest.mark.parametrize(("shape", "dtype"), SIZES)
@pytest.mark.parametrize("term", ["mean", "sign", "zero"])
def test_a_planted_error_in_the_rule_is_caught(monkeypatch, shape, dtype, term):
    monkeypatch.setattr(functional, "normalize", wrong_rule(term))
    caught = failed(check_jacobian(nj.layer_norm(), draw(shape, dtype)))
    assert caught == {
        "jacfwd of normalize = operator",
        "jacrev of normalize = operator",
    }


@pytest.mark.parametrize(("shape", "dtype"), SIZES)
def test_a_planted_error_in_the_value_is_caught(monkeypatch, shape, dtype):
    """Dividing by n − 1 in place of n, the smallest error that a layer makes."""
    right = functional.normalize

    def normalize(spec, x, **given):
        return right(spec.replace(ddof=1), x, **given)

    monkeypatch.setattr(functional, "normalize", normalize)
    caught = failed(check_jacobian(nj.layer_norm(), draw(shape, dtype)))
    values = {"value = plain reference", "value = NumPy float64"}
    if dtype == "float64" or shape != LARGEST:
        assert values <= caught
    else:  # 1/(2n) is below what float32 rounding may do to 512 terms
        assert not values & caught
        assert 0.5 / 512 < 64 * 2.0**-24 * 512
