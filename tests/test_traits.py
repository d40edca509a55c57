"""What a layer does, checked by measuring it; and every way in which two differ."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import normjax as nj
from normjax.presets import PRESETS
from normjax.traits import FORMULAS, Difference, diff, flatten, properties

pytestmark = pytest.mark.jax_defaults

# Presets on an input that each fits: two axes of features, four examples.
OWN: dict[str, Any] = {"group_norm": {"groups": 2}, "ghost_batch_norm": {"ghosts": 2}}
SPECS = {name: preset(**OWN.get(name, {})) for name, preset in PRESETS.items()}
SHAPES = {name: (4, 3, 6) for name in SPECS} | {"weight_standardization": (3, 3, 4, 2)}
X = {
    name: np.random.default_rng(7).normal(0.5, 1.0, shape).astype(np.float32)
    for name, shape in SHAPES.items()
}
STD, RMS = "(x - m) / √(σ² + ε)", "x / √(mean(x²) + ε)"
TABLE = {
    # formula, statistics, removes, couples, stores, parameters
    "batch_norm": (STD, "over all other axes for each c", "offset scale", True, True,
                   ("scale over c", "bias over c")),
    "ghost_batch_norm": (STD, "over b, all other axes for each g, c", "offset scale",
                         True, True, ("scale over c", "bias over c")),
    "layer_norm": (STD, "over c for each position", "offset scale", False, False,
                   ("scale over c", "bias over c")),
    "rms_norm": (RMS, "over c for each position", "scale", False, False,
                 ("scale over c",)),
    "l2_norm": ("x / √(Σx² + ε)", "over c for each position", "scale", False, False,
                ("scale over c",)),
    "instance_norm": (STD, "over all other axes for each b, c", "offset scale", False,
                      False, ("scale over c", "bias over c")),
    "group_norm": (STD, "over all other axes, c for each b, g", "offset scale", False,
                   False, ("scale over (g c)", "bias over (g c)")),
    "weight_standardization": (STD, "over h, w, i for each o", "offset scale", False,
                               False, ()),
    "batch_renorm": (f"r · {STD} + d",
                     "over all other axes for each c, corrected to a reference", "",
                     True, True, ("scale over c", "bias over c")),
    "adaptive_layer_norm": (STD, "over c for each b, position", "offset scale", False,
                            False, ("scale over b c (given by the caller)",
                                    "bias over b c (given by the caller)")),
    "adaptive_instance_norm": (STD, "over all other axes for each b, c", "offset scale",
                               False, False, ("scale over b c (given by the caller)",
                                              "bias over b c (given by the caller)")),
    "center_only": ("x - m", "over c for each position", "offset", False, False,
                    ("scale over c", "bias over c")),
    "scale_only": ("x / √(σ² + ε)", "over c for each position", "scale", False, False,
                   ("scale over c", "bias over c")),
    "qk_norm": (RMS, "over d for each position", "scale", False, False,
                ("scale over d",)),
}  # fmt: skip


@pytest.mark.parametrize("name", PRESETS)
def test_properties_of_every_preset(name: str):
    found = properties(SPECS[name])
    formula, statistics, removes, couples, stores, parameters = TABLE[name]
    assert found.formula == formula
    assert found.statistics == statistics
    assert found.removes == tuple(removes.split())
    assert found.couples_examples is couples
    assert found.stores == (("mean", "variance") if stores else ())
    assert found.train_differs is stores
    assert found.parameters == parameters
    assert found.symmetric_jacobian is (name != "scale_only")


def matrix(spec: nj.NormSpec, x: Any) -> np.ndarray:
    given: dict[str, Any] = {}
    if spec.statistics != "input":
        zeros = jnp.zeros(x.shape[-1])
        given = {"reference": nj.Statistics(zeros, zeros + 1)}
    return np.asarray(nj.input_jacobian(spec, jnp.asarray(x), **given).as_matrix())


def cut(name: str) -> np.ndarray:
    """A small part of the input that the preset still fits."""
    return X[name][..., :1, :] if X[name].ndim == 3 else X[name][:2, :1]


@pytest.mark.parametrize("name", PRESETS)
def test_couples_examples_is_what_the_jacobian_says(name: str):
    if SPECS[name].example is None:
        assert not properties(SPECS[name]).couples_examples
        return
    x = cut(name)
    blocks = matrix(SPECS[name], x).reshape(*x.shape, *x.shape)
    between = max(
        np.abs(blocks[i, ..., j, :, :]).max()
        for i in range(len(x))
        for j in range(len(x))
        if i != j
    )
    assert (between > 1e-3) == properties(SPECS[name]).couples_examples
    assert between == 0 or between > 1e-3


CENTERS = [(c, d) for c in (True, False) for d in ("std", "rms", "l2", "none")]


@pytest.mark.parametrize(("center", "divide"), CENTERS)
@pytest.mark.parametrize("detach", [(), ("mean",), ("variance",), ("mean", "variance")])
def test_symmetric_is_what_the_matrix_is(center: bool, divide: str, detach):
    spec = nj.NormSpec("[c]", center=center, divide=divide, detach=detach)
    found = matrix(spec, np.array([0.3, -1.0, 2.0, 0.9], np.float32))
    symmetric = np.allclose(found, found.T, atol=1e-6)
    assert properties(spec).symmetric_jacobian == symmetric


@pytest.mark.parametrize(("center", "divide"), CENTERS)
def test_removes_is_what_an_output_no_longer_tells(center: bool, divide: str):
    spec = nj.NormSpec("b [c]", center=center, divide=divide, epsilon=1e-12)
    x = jnp.asarray(X["layer_norm"][:, 0])
    y = nj.normalize(spec, x)
    removes = properties(spec).removes
    shifted = np.allclose(nj.normalize(spec, x + 3), y, atol=1e-4)
    scaled = np.allclose(nj.normalize(spec, 4 * x), y, atol=1e-4)
    assert ("offset" in removes, "scale" in removes) == (shifted, scaled)


@pytest.mark.parametrize("placement", FORMULAS)
@pytest.mark.parametrize("divide", ["std", "rms", "l2"])
def test_the_formula_is_what_is_computed(placement: str, divide: str):
    spec = nj.NormSpec("[c]", divide=divide, epsilon_placement=placement, epsilon=0.3)
    x = np.array([0.3, -1.0, 2.0, 0.9])
    words = {"σ²": x.var(), "mean(x²)": (x**2).mean(), "Σx²": (x**2).sum()}
    text = properties(spec).formula
    assert text.startswith("(x - m) / ")
    bottom = text.removeprefix("(x - m) / ")
    for word, value in words.items():
        bottom = bottom.replace(word, f"({value})")
    bottom = bottom.replace("ε", "0.3").replace("√max", "√(max").replace("√", "sqrt")
    bottom += ")" if "sqrt(max" in bottom else ""
    divisor = eval(bottom, {"sqrt": np.sqrt, "max": max})
    expected = (x - x.mean()) / divisor
    np.testing.assert_allclose(
        nj.normalize(spec, jnp.asarray(x, jnp.float32)), expected, rtol=1e-5
    )


def test_other_formulas():
    assert properties(nj.layer_norm(divide="none")).formula == "x - m"
    assert properties(nj.rms_norm(divide="none")).formula == "x"
    outside = nj.layer_norm(epsilon_placement="outside_sqrt")
    assert properties(outside).formula == "(x - m) / (√σ² + ε)"


def test_degenerate_cases_in_words():
    """What they claim is measured in test_family_degenerate.py."""
    batch = properties(nj.batch_norm()).degenerate
    assert batch == (
        "one element over the other axes: 0 comes out, no gradient",
        "two elements over the other axes: ±1 comes out, almost no gradient",
        "equal elements over the other axes: 0 comes out, and noise in x is amplified: "
        "times 1/√ε",
        "one example in a batch: its own positions are the statistics",
        "inference before any update: mean 0 and variance 1 are used",
    )
    instance = properties(nj.instance_norm()).degenerate
    assert instance[0] == (
        "one element over the positions: 0 comes out, no gradient (instance norm on "
        "1×1 maps)"
    )
    assert properties(nj.rms_norm()).degenerate[0] == (
        "one element over c: only the sign of x is left, almost no gradient"
    )
    ghost = properties(nj.ghost_batch_norm()).degenerate
    assert "one example in each g: its own positions are the statistics" in ghost
    assert "one example" not in str(properties(nj.NormSpec("[b] c")).degenerate)
    for pattern in ("[c]", "b [...] c"):
        identity = nj.NormSpec(pattern, center=False, divide="none")
        assert properties(identity).degenerate == ()
    debiased = nj.Running(initial=(0, 0), debias=True)
    own = nj.Running(initial=(2, 3))
    for running, start in ((debiased, "0 and variance 1"), (own, "2 and variance 3")):
        text = f"inference before any update: mean {start} are used"
        assert text in properties(nj.batch_norm(running=running)).degenerate
    detached = properties(nj.layer_norm(detach="mean", ddof=2)).degenerate
    assert detached[0] == "one element over c: 0 comes out"
    assert detached[-1] == (
        "2 elements or fewer over c: the variance counts as 0, (x - m)/√ε comes out"
    )


def names(first: nj.NormSpec, second: nj.NormSpec, shape=None, declared=True) -> list:
    return [d.name for d in diff(first, second, shape) if d.declared == declared]


@pytest.mark.parametrize("name", PRESETS)
def test_a_spec_does_not_differ_from_itself(name: str):
    spec = SPECS[name]
    assert diff(spec, spec) == ()
    assert diff(spec, spec, SHAPES[name]) == ()
    assert diff(spec, nj.NormSpec.from_dict(spec.to_dict())) == ()


@pytest.mark.parametrize("first", PRESETS)
@pytest.mark.parametrize("second", PRESETS)
def test_differences_are_symmetric(first: str, second: str):
    there, back = (
        diff(SPECS[first], SPECS[second]),
        diff(SPECS[second], SPECS[first]),
    )
    swapped = {(d.name, d.second, d.first, d.declared) for d in back}
    assert {(d.name, d.first, d.second, d.declared) for d in there} == swapped
    assert len(there) == len(swapped)
    assert bool(there) == (first != second)


def test_batch_norm_and_layer_norm():
    assert diff(nj.batch_norm(), nj.layer_norm())[:2] == (
        Difference("pattern", "[...] c", "... [c]", declared=True),
        Difference("running.present", True, False, declared=True),
    )
    assert names(nj.batch_norm(), nj.layer_norm(), declared=False) == [
        "statistics",
        "reduced",
        "couples_examples",
        "stores",
        "train_differs",
        "degenerate",
    ]


def test_what_follows_from_a_field_names_that_field_only():
    first, second = nj.layer_norm(), nj.layer_norm(divide="none")
    assert names(first, second) == ["divide"]
    follows = names(first, second, declared=False)
    assert follows == ["formula", "removes", "degenerate"]
    assert names(first, first.replace(epsilon=1e-3), declared=False) == []
    bias = first.replace(**{"affine.bias": False})
    assert names(first, bias) == ["affine.bias"]
    assert names(first, bias, declared=False) == ["parameters"]


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (nj.group_norm(groups=1), nj.layer_norm("h c", affine="c")),
        (nj.group_norm(groups=6), nj.instance_norm()),
        (nj.layer_norm(), nj.NormSpec("b p [f]", affine="f")),
        (nj.batch_norm(affine=None), nj.batch_norm(affine=None, pattern="[b h] c")),
        (nj.instance_norm(channels="first", affine=None),
         nj.NormSpec("x y [z]")),
    ],
)  # fmt: skip
def test_other_words_for_the_same_axes_are_no_difference(first, second):
    shape = (4, 3, 6)
    assert diff(first, second, shape) == ()
    assert diff(second, first, shape) == ()
    assert "pattern" in names(first, second)
    x = jnp.asarray(X["layer_norm"])
    np.testing.assert_allclose(
        nj.normalize(first, x), nj.normalize(second, x), atol=1e-6
    )


def test_whether_two_patterns_are_equal_depends_on_the_shape():
    one, two = nj.group_norm(groups=2), nj.group_norm(groups=6)
    assert names(one, two, (4, 3, 6)) == ["sizes.g"]
    layer, batch = nj.layer_norm(affine=None), nj.NormSpec("[b] c")
    assert names(layer, batch, (3, 3)) == ["pattern"]
    group, instance = nj.group_norm(groups=3), nj.instance_norm()
    assert names(group, instance, (4, 3, 6)) == ["pattern"]
    assert names(group, instance, (4, 5, 3)) == []


def test_affine_axes_are_compared_by_the_dimensions_they_mean():
    base = nj.layer_norm("h c")
    assert names(base, nj.layer_norm("h c", affine="c"), (4, 3, 6)) == ["affine.axes"]
    other = nj.layer_norm("y x", affine="y x")
    assert names(base, other, (4, 3, 6)) == []


def test_one_number_for_all_is_its_own_set_of_axes():
    one = nj.qk_norm(scale="")
    assert properties(one).parameters == ("scale over no axis (one number)",)
    assert names(nj.qk_norm(), one) == ["affine.axes"]
    assert names(nj.qk_norm(), one, (2, 3, 4)) == ["affine.axes"]


def test_a_part_that_only_one_has_is_one_property():
    assert names(nj.layer_norm(), nj.layer_norm(affine=None)) == ["affine.present"]
    running = nj.Running(decay=0.5, ddof=1)
    assert names(nj.layer_norm(), nj.layer_norm(running=running)) == ["running.present"]
    assert names(nj.batch_norm(), nj.batch_norm(running=running)) == [
        "running.decay",
        "running.ddof",
    ]


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"center": False}, "center"),
        ({"epsilon": 1e-3}, "epsilon"),
        ({"ddof": 1}, "ddof"),
        ({"detach": "mean"}, "detach"),
        ({"example": None}, "example"),
        ({"masked_output": "zero"}, "masked_output"),
        ({"precision.output": "float64"}, "precision.output"),
        ({"affine.stored": "1+w"}, "affine.stored"),
        ({"affine.axes": "..."}, "affine.axes"),
    ],
)
def test_every_field_is_a_property_by_its_dotted_name(changes: dict, name: str):
    base = nj.layer_norm()
    assert names(base, base.replace(**changes)) == [name]


def test_flat_fields_by_their_dotted_names():
    flat = flatten(nj.group_norm(groups=2))
    assert flat["pattern"] == "b [...] (g [c])"
    assert flat["sizes.g"] == 2
    assert flat["affine.present"] is True
    assert flat["running.present"] is False
    assert flat["precision.accumulate"] == "float32"
    assert "running.decay" not in flat
    bound = flatten(nj.group_norm(groups=2), (4, 3, 6))
    assert bound["pattern"] == "x0 [x1] x2.0=2 [x2.1=3]"
    assert bound["affine.axes"] == "x2"
    with pytest.raises(ValueError, match=r"g=2 does not divide dimension 1 of size 5"):
        flatten(nj.group_norm(groups=2), (4, 5))
