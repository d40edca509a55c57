"""Value and derivative rule of every program structure, against independent oracles."""

from __future__ import annotations

import inspect
from typing import get_type_hints

import jax
import jax.numpy as jnp
import mpmath
import numpy as np
import pytest
from cases import CASES
from compare import batched, evidence, measure
from frames import FRAMES, Case, Frame, inputs

import normjax as nj
from normjax.presets import PRESETS
from normjax.verify.oracles import mpmath_jacobian, mpmath_reference, numpy_reference

every_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)
PLAIN = [
    case
    for case in CASES.values()
    if case.given is None
    and case.spec.statistics == "input"
    and not case.affine
    and case.mask not in ("weights", "float", "int")
    and case.spec.masked_output == "keep"
]


def test_inventory_has_every_preset_and_sixty_structures():
    public = {
        name
        for name, member in vars(nj).items()
        if inspect.isfunction(member)
        and get_type_hints(member).get("return") is nj.NormSpec
    }
    assert public == set(PRESETS)
    assert {case.frame.preset for case in CASES.values()} == set(PRESETS.values())
    structures = {
        (str(jax.tree.structure(case.spec)), case.mask, case.given, case.affine)
        for case in CASES.values()
    }
    assert len(structures) >= 60


def test_inventory_varies_every_field():
    def seen(name: str) -> set:
        return {getattr(case.spec, name) for case in CASES.values()}

    assert seen("center") == {True, False}
    assert seen("divide") == {"std", "rms", "l2", "none"}
    assert len(seen("epsilon_placement")) == 4
    assert seen("ddof") >= {0, 1, 2}
    assert len(seen("detach")) == 4
    assert seen("masked_output") == {"keep", "zero", "passthrough"}
    assert seen("statistics") == {"input", "blend", "renorm"}
    assert {case.mask for case in CASES.values()} == {
        None,
        "bool",
        "int",
        "float",
        "weights",
    }
    assert {case.given for case in CASES.values()} == {
        None,
        "statistics",
        "stored",
        "moments",
    }


@every_case
def test_value(case: Case):
    evidence(case).value.check()


@every_case
def test_forward_mode(case: Case):
    evidence(case).forward.check()


@every_case
def test_reverse_mode(case: Case):
    evidence(case).reverse.check()


@every_case
def test_rule_agrees_with_operator(case: Case):
    evidence(case).rule.check()


@pytest.mark.parametrize("name", ["layer", "batch_space", "group", "rms", "ghost"])
def test_rule_is_not_the_code_that_it_is_compared_with(name: str):
    found = evidence(CASES[name])
    assert not found.forward.identical
    assert not found.operator.identical
    assert not found.rule.identical


@pytest.mark.parametrize("case", PLAIN, ids=lambda case: case.name)
def test_value_against_numpy(case: Case):
    spec, frame = case.spec, case.frame
    x, actual = evidence(case).x, evidence(case).values
    mask = None if case.weights is None else case.in_view(case.weights)
    expected = [
        numpy_reference(
            one.reshape(frame.view),
            frame.axes,
            epsilon=float(spec.epsilon),
            center=spec.center,
            divide=spec.divide,
            placement=spec.epsilon_placement,
            ddof=spec.ddof,
            mask=mask,
        )
        for one in x
    ]
    expected = np.stack(expected).reshape(x.shape)
    keep = np.isfinite(expected)
    if case.weights is None:
        assert keep.all()
    measure(case, x, np.where(keep, actual, 0), np.where(keep, expected, 0)).check()


VECTORS = np.array(
    [
        [1.0, 2.0, 3.0, 4.0],
        [1.0, 2.0, 4.0, 2.0],
        [1e4, 1e4 + 1, 1e4 + 2, 1e4 + 3],
        [1e5, 0.0, 1.0, 2.0],
        [1e-9, 2e-9, -1e-9, 0.0],
    ]
)
VECTOR = Frame(nj.layer_norm, {}, (4,), (4,), (0,), ())


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"ddof": 1},
        {"epsilon_placement": "outside_sqrt"},
        {"epsilon_placement": "floor_var"},
        {"epsilon_placement": "floor_std"},
        {"center": False, "divide": "rms"},
        {"center": False, "divide": "l2"},
        {"center": False},
        {"divide": "rms"},
    ],
    ids=str,
)
def test_value_and_derivative_against_fifty_digits(fields: dict):
    case = Case("vector", VECTOR, fields)
    settings = {
        "epsilon": 1e-5,
        "center": fields.get("center", True),
        "divide": fields.get("divide", "std"),
        "placement": fields.get("epsilon_placement", "inside_sqrt"),
        "ddof": fields.get("ddof", 0),
    }
    with mpmath.workdps(50):
        exact = [[mpmath.mpf(value) for value in vector] for vector in VECTORS]
        values = [mpmath_reference(vector, **settings) for vector in exact]
    values = np.array(values, np.float64)
    derivatives = np.stack([mpmath_jacobian(vector, **settings) for vector in VECTORS])
    found = batched(
        lambda x: (case.call(x), jax.jacfwd(case.call)(x), jax.jacrev(case.call)(x))
    )(VECTORS)
    measure(case, VECTORS, found[0], values).check()
    measure(case, VECTORS, found[1], derivatives).check()
    measure(case, VECTORS, found[2], derivatives).check()


def test_planted_errors_are_rejected():
    """At the largest group of the inventory, on each of 1000 inputs with v > ε."""
    largest = max(CASES.values(), key=lambda case: case.frame.group_size)
    n, frame = largest.frame.group_size, FRAMES["layer_space"]
    assert frame.group_size == n
    case = Case("planted", frame)
    x = inputs(case, 1000, spread=1.0)
    groups = x.reshape(len(x), 2, n)
    c = groups - groups.mean(-1, keepdims=True)
    s = np.sqrt((c**2).mean(-1) + 1e-5)[..., None, None]
    eye, offset = np.eye(n), np.full((n, n), 1 / n)
    radial = c[..., :, None] * c[..., None, :] / (n * s**2)
    right = (eye - offset - radial) / s
    wrong = {
        "zero": 0 * right,
        "sign": -right,
        "no offset term": (eye - radial) / s,
        "no radial term": (eye - offset) / s,
        "sign of the offset term": (eye + offset - radial) / s,
        "sign of the radial term": (eye - offset + radial) / s,
        "one diagonal entry": right * (1 - 1e-3 * np.outer(eye[3], eye[3])),
    }
    expected = batched(jax.jacfwd(case.oracle))(x)

    def compare(blocks):
        dense = np.zeros((len(x), 2, n, 2, n))
        dense[:, [0, 1], :, [0, 1], :] = blocks.swapaxes(0, 1)
        return measure(case, x, dense, expected)

    compare(right).check()
    for blocks in wrong.values():
        compare(blocks).refute()


def test_planted_value_is_rejected():
    case = CASES["weight"]
    x = inputs(case, 1000)
    expected = batched(case.oracle)(x)
    for wrong in (0 * expected, -expected, expected * (1 + 1e-6), expected[::-1]):
        measure(case, x, wrong, expected).refute()


@pytest.mark.x32
def test_closed_form_reference_row():
    """N71: the first rows of J on [1, 2, 3, 4]."""
    x = jnp.array([1.0, 2.0, 3.0, 4.0], jnp.float32)
    rows = [
        [0.2683303, -0.3577684, -0.0894434, 0.1788815],
        [-0.3577684, 0.6260969, -0.1788851, -0.0894434],
    ]
    digits = 5e-8  # the literature gives seven
    J = jax.jit(jax.jacrev(lambda x: nj.normalize(nj.layer_norm(), x)))(x)
    np.testing.assert_allclose(J[:2], rows, rtol=0, atol=digits + 2**-24)
    J = jax.jit(jax.jacfwd(lambda x: nj.normalize(nj.rms_norm(epsilon=1e-6), x)))(x)
    row = [0.3529767, -0.0243432, -0.0365148, -0.0486864]
    np.testing.assert_allclose(J[0], row, rtol=0, atol=digits + 2**-24)
