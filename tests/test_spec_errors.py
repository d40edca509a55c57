from __future__ import annotations

import re
from typing import Any

import pytest
from small import BATCH, refuse

from normjax.pattern import PatternError
from normjax.spec import Affine, NormSpec, Precision, Running, check_numbers

LEAVES = ["epsilon", "mean_weight", "variance_weight", "r_max", "d_max"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"epsilonn": 1}, "NormSpec has no field 'epsilonn'; did you mean 'epsilon'?"),
        ({"running.deacy": 1}, "Running has no field 'deacy'; did you mean 'decay'?"),
        ({"affine.scael": 1}, "Affine has no field 'scael'; did you mean 'scale'?"),
        ({"precision.dtype": 1}, "Precision has no field 'dtype'; expected one of ac"),
        ({"detach.mean": False}, "detach.mean cannot be set, since detach is ()"),
        (
            {"running.initial.x": 0},
            "initial.x cannot be set, since initial is (0.0, 1.0)",
        ),
        ({"sizes.b": 2}, "sizes names 'b', no axis of '[...] c'; expected one of c"),
        (
            {"divide": "var"},
            "divide is 'var', expected one of 'std', 'rms', 'l2', 'none'",
        ),
    ],
)
def test_replace_refuses(changes: dict[str, Any], message: str):
    with refuse(message):
        BATCH.replace(**changes)


@pytest.mark.parametrize(
    ("declared", "message"),
    [
        ({}, "pattern is missing: for instance '... [c]'"),
        (
            {"pattern": "[c]", "epsilno": 1},
            "no field 'epsilno'; did you mean 'epsilon'?",
        ),
        ({"pattern": "[c]", "epsilon": "1e-5"}, "epsilon is '1e-5', expected a number"),
        ({"pattern": "[c]", "epsilon": None}, "epsilon is None, expected a number"),
        ({"pattern": "[c]", "affine": {"axis": "c"}}, "Affine has no field 'axis'"),
        ({"pattern": "[c]", "affine": {"bias": False}}, "affine.axes is missing: name"),
        (
            {"pattern": "[c]", "running": {"momentum": 0.1}},
            "Running has no field 'mome",
        ),
        (
            {"pattern": "[c]", "running": {"decay": 2}},
            "running.decay is 2, expected betw",
        ),
        (
            {"pattern": "[c]", "running": True},
            "running is True, expected Running(decay=",
        ),
        (
            {"pattern": "[c]", "precision": None},
            "precision is None, expected Precision(",
        ),
        (
            {"pattern": "[c]", "precision": {"dtype": 1}},
            "Precision has no field 'dtype'",
        ),
    ],
)
def test_from_dict_refuses(declared: dict[str, Any], message: str):
    with refuse(message):
        NormSpec.from_dict(declared)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"pattern": "b h c"}, "pattern 'b h c' has no brackets: put them around the"),
        (
            {"sizes": {"z": 2}},
            "sizes names 'z', no axis of '... (g [c])'; expected one",
        ),
        ({"sizes": {"...": 2}}, "sizes names '...', no axis of"),
        ({"sizes": {"(g c)": 2}}, "sizes names '(g c)', no axis of"),
        ({"sizes": {"g": 0}}, "sizes.g is 0, expected a whole number, 1 or more"),
        ({"sizes": {"g": 2.0}}, "sizes.g is 2.0, expected a whole number, 1 or more"),
        ({"sizes": 8}, "sizes is 8, expected a dict, for instance {'g': 8}"),
        ({"example": "z"}, "example names 'z', no axis of '... (g [c])'; expected one"),
        ({"center": 1}, "center is 1, expected True or False"),
        (
            {"divide": "sdt"},
            "divide is 'sdt', expected one of 'std', 'rms', 'l2', 'none'",
        ),
        ({"divide": None}, "divide is None, expected one of"),
        ({"epsilon_placement": "inside"}, "did you mean 'inside_sqrt'?"),
        ({"ddof": -1}, "ddof is -1, expected a whole number, 0 or more"),
        ({"statistics": "batch"}, "statistics is 'batch', expected one of 'input', "),
        ({"detach": "var"}, "detach is 'var', expected one of 'mean', 'variance'"),
        ({"detach": None}, "detach is None, expected one of 'mean', 'variance'"),
        (
            {"masked_output": "nan"},
            "masked_output is 'nan', expected one of 'keep', 'z",
        ),
        ({"single": "warn"}, "single is 'warn', expected one of 'zero', 'error'"),
        (
            {"affine": "z"},
            "affine names 'z', no axis of '... (g [c])'; expected one of",
        ),
        ({"affine": "(c g)"}, "affine names '(c g)', no axis of"),
        ({"affine": "[c]"}, "affine axes '[c]' take no brackets: write the names"),
        ({"affine": True}, "affine is True, expected axes such as 'c', Affine(...) or"),
        ({"precision": "float64"}, "precision is 'float64', expected Precision(...)"),
    ],
)
def test_static_fields_are_validated_in_the_constructor(fields, message):
    with refuse(message):
        NormSpec(**{"pattern": "... (g [c])", **fields})


@pytest.mark.parametrize(
    ("kind", "fields", "message"),
    [
        (
            Affine,
            {"axes": "c", "scale": 1},
            "affine.scale is 1, expected True or False",
        ),
        (Affine, {"axes": "c", "bias": "no"}, "affine.bias is 'no', expected True or"),
        (
            Affine,
            {"axes": "c", "stored": "w+1"},
            "affine.stored is 'w+1', expected one",
        ),
        (
            Affine,
            {"axes": "c", "cast": "never"},
            "affine.cast is 'never', expected one",
        ),
        (Running, {"ddof": 1.0}, "running.ddof is 1.0, expected a whole number, 0 or"),
        (Running, {"debias": 1}, "running.debias is 1, expected True or False"),
        (
            Running,
            {"initial": 0},
            "running.initial is 0, expected finite numbers (mean, ",
        ),
        (
            Running,
            {"initial": ("a", 1)},
            "running.initial is ('a', 1), expected finite",
        ),
        (Running, {"initial": (0, 1, 2)}, "running.initial is (0, 1, 2), expected"),
        (Running, {"initial": (0, -1)}, "with a variance of 0 or more"),
        (
            Running,
            {"initial": (float("nan"), 1)},
            "running.initial is (nan, 1), expected",
        ),
        (
            Running,
            {"average": "mean"},
            "running.average is 'mean', expected one of 'exp",
        ),
        (
            Running,
            {"nonfinite": "stop"},
            "running.nonfinite is 'stop', expected one of",
        ),
        (Running, {"debias": True}, "set running.initial to (0, 0), got (0.0, 1.0)"),
        (
            Running,
            {"debias": True, "initial": (0, 0), "average": "cumulative"},
            "running.debias has no meaning for a cumulative average",
        ),
        (
            Precision,
            {"accumulate": "f32"},
            "precision.accumulate is 'f32', expected one",
        ),
        (
            Precision,
            {"algorithm": "welford"},
            "precision.algorithm is 'welford', expected",
        ),
        (Precision, {"rescale": 2}, "precision.rescale is 2, expected True or False"),
        (Precision, {"apply": "fused"}, "precision.apply is 'fused', expected one of"),
        (
            Precision,
            {"output": "int8"},
            "precision.output is 'int8', expected one of 'in",
        ),
    ],
)
def test_parts_are_validated_in_the_constructor(kind, fields, message):
    with refuse(message):
        kind(**fields)


@pytest.mark.parametrize("axes", ["c [d", " ", "b b"])
def test_the_caret_of_affine_axes_points_into_them(axes: str):
    with pytest.raises(PatternError, match=re.escape(f"\n  {axes}\n")) as caught:
        NormSpec("b [c]", affine=axes)
    assert caught.value.text == axes


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"axis_names": (1,)}, "axis_names is (1,), expected names of axes"),
        (
            {"divide": "none", "precision.rescale": True},
            "precision.rescale protects squares, and divide='none' takes none: use "
            "rescale=False",
        ),
        (
            {"affine": Affine("c", cast="before"), "precision.apply": "folded"},
            "affine.cast='before' casts x̂, which precision.apply='folded' never forms: "
            "use cast='after'",
        ),
    ],
)
def test_fields_that_do_not_go_together(fields: dict[str, Any], message: str):
    with refuse(message):
        BATCH.replace(**fields)


def test_a_scale_correction_is_one_or_more():
    with refuse("r_max is 0.5, expected 1 or more"):
        check_numbers(BATCH.replace(r_max=0.5))


@pytest.mark.parametrize("name", [*LEAVES, "running.decay"])
def test_leaves_are_validated_where_they_are_used(name: str):
    wrong = BATCH.replace(**{name: -1})  # the constructor also runs on placeholders
    with refuse(f"{name} is -1, expected "):
        check_numbers(wrong)
    with refuse(f"{name} is -1, expected "):
        NormSpec.from_dict(wrong.to_dict())
    check_numbers(BATCH.replace(**{name: 1}))


def test_corrections_may_be_unbounded_and_weights_are_shares():
    check_numbers(BATCH.replace(r_max=float("inf"), d_max=float("inf")))
    with refuse("epsilon is inf, expected a finite number"):
        check_numbers(BATCH.replace(epsilon=float("inf")))
    with refuse("mean_weight is 1.5, expected between 0 and 1"):
        check_numbers(BATCH.replace(mean_weight=1.5))
