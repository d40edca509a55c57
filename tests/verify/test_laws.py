"""The laws hold for every preset, and a law that is broken on purpose is caught."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import normjax as nj
from normjax import arguments, functional, running
from normjax.presets import PRESETS
from normjax.verify import check_laws, check_spec, laws

SMALL: dict[str, dict[str, Any]] = {
    "group_norm": {"groups": 2},
    "ghost_batch_norm": {"ghosts": 2},
}
VARIANTS = {
    **{name: preset(**SMALL.get(name, {})) for name, preset in PRESETS.items()},
    "scale only": nj.layer_norm(center=False),
    "centre only": nj.layer_norm(divide="none"),
    "centred rms": nj.rms_norm(center=True),
    "identity": nj.layer_norm(center=False, divide="none"),
    "detached": nj.layer_norm(detach=("mean", "variance")),
    "blend": nj.batch_norm(statistics="blend", mean_weight=0.4, variance_weight=0.7),
    "outside": nj.layer_norm(epsilon_placement="outside_sqrt", epsilon=0.1),
    "floor": nj.rms_norm(epsilon_placement="floor_std", epsilon=0.1),
}


def failed(checks) -> set[str]:
    return {check.name for check in checks if not check.ok}


@pytest.mark.parametrize(
    "dtype",
    [
        pytest.param("float64", marks=pytest.mark.slow),  # test_standardize is float64
        "float32",
        "bfloat16",
    ],
)
@pytest.mark.parametrize("spec", VARIANTS.values(), ids=VARIANTS)
def test_laws_hold(spec, dtype):
    assert not failed(check_laws(spec, dtype=dtype))


def test_every_law_speaks_of_some_preset():
    names = {check.name for spec in VARIANTS.values() for check in check_laws(spec)}
    assert {
        "N(x + 10) = N(x)",
        "N(x + 10) ≠ N(x)",
        "N(x/64) = N(x) at ε = 0",
        "N(x/64) ≠ N(x) at ε = 0",
        "an example moves its companions",
        "an example moves no other",
        "J = Jᵀ",
        "J ≠ Jᵀ",
        "inference ≠ training after one update",
    } <= names
    assert len(names) >= len(laws.LAWS)


LIES = {
    "removes": ({"removes": ()}, {"N(x + 10) ≠ N(x)", "N(x/64) ≠ N(x) at ε = 0"}),
    "couples": ({"couples_examples": True}, {"an example moves its companions"}),
    "symmetry": ({"symmetric_jacobian": False}, {"J ≠ Jᵀ"}),
}


@pytest.mark.parametrize(("lie", "caught"), LIES.values(), ids=LIES)
def test_a_property_that_is_denied_wrongly_is_caught(monkeypatch, lie, caught):
    honest = laws.properties
    monkeypatch.setattr(laws, "properties", lambda spec: replace(honest(spec), **lie))
    assert caught <= failed(check_laws(nj.layer_norm()))


def test_a_property_that_is_claimed_wrongly_is_caught(monkeypatch):
    honest = laws.properties
    lie = {"removes": ("offset", "scale"), "symmetric_jacobian": True}
    monkeypatch.setattr(laws, "properties", lambda spec: replace(honest(spec), **lie))
    found = failed(check_laws(nj.layer_norm(center=False, divide="none")))
    assert {"N(x + 10) = N(x)", "N(x/64) = N(x) at ε = 0"} <= found
    assert "J = Jᵀ" in failed(check_laws(nj.layer_norm(center=False)))


def normalize_with(change):
    """``normalize`` whose output is changed, for a planted error."""
    right = functional.normalize

    def normalize(spec, x, *args, **given):
        return change(right, spec, x, *args, **given)

    return normalize


PLANTED = {
    "bias": (lambda f, s, x, *a, **k: f(s, x, *a, **k) + 0.01, "N(-x) = -N(x)"),
    "leak": (
        lambda f, s, x, **k: f(s, x, **{name: k[name] for name in k if name != "mask"}),
        "NaN and inf under the mask",
    ),
    "epsilon": (
        lambda f, s, x, **k: f(s.replace(epsilon=1.1 * s.epsilon), x, **k),
        "N(x/64) = N(x) S(σ²)/(64 S(σ²/64²))",
    ),
    "given": (
        lambda f, s, x, moments=None, **k: f(
            s.replace(ddof=1) if moments is not None else s, x, moments=moments, **k
        ),
        "N(x; moments(x)) = N(x)",
    ),
    "derivative": (
        lambda f, s, x, **k: f(s.replace(detach="variance"), x, **k),
        "s J c = ρ c",
    ),
    "mean derivative": (
        lambda f, s, x, **k: f(s.replace(detach="mean"), x, **k),
        "s J 1 = 0",
    ),
}


@pytest.mark.parametrize(("change", "caught"), PLANTED.values(), ids=PLANTED)
def test_a_planted_error_breaks_its_law(monkeypatch, change, caught):
    spec = nj.layer_norm(epsilon=1e-2)
    monkeypatch.setattr(functional, "normalize", normalize_with(change))
    assert caught in failed(check_laws(spec))


def test_means_that_are_averaged_and_not_merged_are_caught(monkeypatch):
    def average(parts, axis=0, keepdims=False):
        del axis, keepdims
        return nj.Moments(*(jnp.mean(p, 0) for p in vars(parts).values()))

    monkeypatch.setattr(laws, "merge", average)
    assert "N(x; merged moments) = N(x)" in failed(check_laws(nj.layer_norm()))


def test_a_stored_mode_that_uses_the_batch_is_caught(monkeypatch):
    def batch(spec, state):
        del state
        x = laws.Subject.of(spec, laws.example_shape(spec), "float32", 0).x
        found = functional.moments(spec, x)
        return nj.Statistics(found.mean + found.mean_low, found.variance())

    monkeypatch.setattr(running, "read", batch)
    found = failed(check_laws(nj.batch_norm()))
    assert found == {"inference ≠ training after one update"}


def test_a_shape_that_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="g=32 does not divide dimension 2 of size 6"):
        check_laws(nj.group_norm(), (3, 4, 6))


def test_the_suite_runs_every_kind_of_input_in_three_dtypes():
    found = check_spec(nj.rms_norm())
    assert not failed(found)
    kinds = {check.subject.split(",")[0] for check in found}
    assert {"normal", "offset 150", "constant", "masked"} <= kinds
    for dtype in ("float64", "float32", "bfloat16"):
        assert any(dtype in check.subject for check in found)


def test_example_shapes_fit_every_preset():
    for spec in VARIANTS.values():
        shape = laws.example_shape(spec)
        assert np.prod(shape) <= 512
        assert arguments.bind(spec, shape).group_size >= 3
