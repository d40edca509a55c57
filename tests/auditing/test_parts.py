"""The parts of an audit, each with an error that it must catch."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy_layers import PARTS, B, W, normalizer

import normjax as nj
from normjax.auditing import Audit, Finding, Target, adapt
from normjax.auditing.formula import Formula
from normjax.auditing.grouping import Grouping, find_groups, silent_outputs
from normjax.auditing.probing import BudgetError, Probe, float_dtype, limits
from normjax.auditing.specs import Declared, reproduces
from normjax.auditing.stabilizer import round_value

pytestmark = pytest.mark.jax_defaults
SHAPE = (3, 5, 6)
LAYER = normalizer(**PARTS)


def probe(layer: Callable, shape: tuple[int, ...] = SHAPE, **options: Any) -> Probe:
    return Probe(adapt(layer, shape), **options)


def grouped(layer: Callable, shape: tuple[int, ...] = SHAPE) -> Grouping:
    asked = probe(layer, shape)
    return find_groups(asked, silent_outputs(asked))


def holding(layer: Callable, parameters: dict[str, Any], shape=SHAPE) -> Target:
    arrays = {name: np.asarray(value) for name, value in parameters.items()}
    return replace(adapt(layer, shape), parameters=arrays)


def test_a_call_is_made_once_and_the_budget_is_kept():
    asked = probe(LAYER, max_calls=2)
    x = asked.normal()
    first = asked(x)
    assert asked(x) is first
    assert asked.target.calls == 1
    asked(x, again=True)
    with pytest.raises(BudgetError, match="stopped after 2 calls"):
        asked(2 * x)


def test_float64_that_was_computed_in_float32_has_its_limits():
    x = np.random.default_rng(0).normal(size=9)
    assert limits(np.float64, x).fit == 1e-10
    assert limits(np.float64, x.astype(np.float32).astype(np.float64)).fit == 3e-5
    assert limits(np.float32, x.astype(np.float16)).fit == 6e-3
    with pytest.raises(ValueError, match=r"dtype is 'int8', expected one of float64"):
        float_dtype("int8")


def test_groups_that_only_look_like_a_product_are_caught():
    """The first row is one group, the second one two."""

    def uneven(x: np.ndarray) -> np.ndarray:
        parts = (x[:1], x[1:, :3], x[1:, 3:])
        first, left, right = (LAYER_BARE(part) for part in parts)
        return np.concatenate([first, np.concatenate([left, right], axis=1)])

    LAYER_BARE = normalizer()
    found = grouped(uneven, (2, 6))
    np.testing.assert_array_equal(
        found.groups, [[0] * 6, [1] * 3 + [2] * 3]
    )  # fmt: skip
    assert found.size is None
    assert [kind.kind for kind in found.axes] == ["irregular"] * 2


def test_overlap_is_no_partition():
    def windows(x: np.ndarray) -> np.ndarray:
        s = np.pad(x * x, ((0, 0), (1, 1)))
        return x / np.sqrt(s[:, :-2] + s[:, 1:-1] + s[:, 2:] + 1)

    found = grouped(windows, (2, 5))
    assert found.matrix is not None
    band = np.abs(np.subtract.outer(range(5), range(5))) <= 1
    np.testing.assert_array_equal(found.matrix, np.kron(np.eye(2), band) > 0)


@pytest.mark.parametrize(
    ("parameters", "says", "defect"),
    [
        ({"w": W[:6], "b": B[:6]}, "w in place; b in place", False),
        ({"w": W[:6] - 1, "b": B[:6]}, "w in place as 1+w; b in place", False),
        ({"w": W[5::-1], "b": B[:6]}, "scale not found as stored in w, b; b in place",
         True),
        ({"w": W[:6], "b": B[5::-1]}, "w in place; bias not found as stored in w, b",
         True),
    ],
)  # fmt: skip
def test_parameters_are_found_or_missed(parameters: Any, says: str, *, defect: bool):
    found = nj.audit(holding(LAYER, parameters))["affine"]
    assert (found.evidence, found.defect) == (says, defect)


def test_a_scrambled_parameter_is_a_defect():
    """Stored over (c, t) and read over (t, c): a reshape in place of a transpose."""
    weights = np.random.default_rng(1).uniform(0.5, 1.5, (6, 5)).astype(np.float32)
    inner = normalizer(axes=(1, 2))
    scrambled = holding(lambda x: inner(x) * weights.reshape(5, 6), {"w": weights})
    turned = holding(lambda x: inner(x) * weights.T, {"w": weights})
    found = nj.audit(scrambled)["affine"]
    assert (found.evidence, found.defect) == ("scale not found as stored in w", True)
    found = nj.audit(turned)["affine"]
    assert (found.evidence, found.defect) == ("w transposed", True)


def test_a_parameter_settles_ddof_where_values_cannot():
    layer = normalizer(ddof=1, eps=1.2345e-5, **PARTS)
    found = nj.audit(layer, shape=SHAPE)
    assert (found["ddof"].value, found["ddof"].confidence) == (None, "open")
    assert found.open[0] == (
        "ddof 0, eps 1.02875e-05 = ddof 1, eps 1.2345e-05 with gain × 1.09545 = "
        "sum, eps 6.1725e-05 with gain × 2.44949"
    )
    found = nj.audit(holding(layer, {"w": W[:6]}))
    assert (found["ddof"].value, found["ddof"].confidence) == ("1", "certain")
    assert found["epsilon"].facts["epsilon"] == pytest.approx(1.2345e-5, rel=2e-6)


def test_a_wrong_spec_does_not_pass_for_the_layer():
    asked = probe(LAYER)
    params = {"scale": W[:6], "bias": B[:6]}
    spec = nj.layer_norm()
    assert reproduces(asked, Declared(spec, params, ())) < 1e-5
    for change in ({"ddof": 1}, {"epsilon": 2e-5}, {"center": False}):
        wrong = Declared(spec.replace(**change), params, ())
        assert reproduces(asked, wrong) > 1e-2


def test_round_numbers_are_recognized_and_others_are_not():
    assert round_value(1.0000001e-5, 1e-6) == (1e-5, 0)
    assert round_value(2.0**-23, 1e-7) == (2.0**-23, 0)
    assert round_value(3.0000001e-3, 1e-6) == (3e-3, 3)
    assert round_value(1.02875e-5, 1e-5) is None
    narrow = float(np.float32(1e-5))
    assert round_value(narrow, 1e-12) == (narrow, 11)


def test_a_probe_that_raises_ends_the_audit_and_not_the_program():
    def picky(x: np.ndarray) -> np.ndarray:
        if np.abs(x).max() > 100:
            raise OverflowError("too large")
        return LAYER(x)

    found = nj.audit(picky, shape=SHAPE)
    assert found.kind == "not to be probed: it raises OverflowError: too large"
    with pytest.raises(ValueError, match="refuses an input of shape"):
        nj.audit(lambda x: x[:, :, :, 0], shape=SHAPE)
    with pytest.raises(ValueError, match=r"shape is \(3, 0\), expected positive"):
        nj.audit(LAYER, shape=(3, 0))


def test_the_record_is_plain_data_and_names_what_there_is():
    finding = Finding("epsilon", 1e-5, "strong", facts={"a": np.array([np.nan, 1.0])})
    record = Audit("layer", (2, 3), "float32", (finding,), spec=nj.layer_norm())
    plain = record.to_dict()
    assert json.loads(json.dumps(plain, allow_nan=False)) == plain
    assert plain["findings"][0]["facts"] == {"a": ["nan", 1.0]}
    assert nj.NormSpec.from_dict(plain["spec"]) == nj.layer_norm()
    with pytest.raises(KeyError, match="no finding 'eps'; there are epsilon"):
        record["eps"]
    with pytest.raises(ValueError, match="confidence is 'sure', expected one of"):
        Finding("epsilon", 1e-5, "sure")


def test_the_formula_of_an_audit_is_the_layer():
    """Between the probes' scale and the crossing of ε, too."""
    known = Formula(np.repeat(np.arange(15), 6).reshape(SHAPE), scale=None)
    x = np.random.default_rng(5).normal(size=SHAPE).astype(np.float32)
    bare = normalizer()
    for size in (1.0, 1e-3):
        error = np.abs(known.reference(size * x) - bare(np.float32(size) * x)).max()
        assert error < 1e-5
