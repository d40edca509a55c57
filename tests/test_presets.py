from __future__ import annotations

import inspect
import json
from typing import Any

import pytest
from small import refuse
from strategies import FIELDS

import normjax as nj
from normjax import presets
from normjax.pattern import PatternError
from normjax.presets import PRESETS
from normjax.spec import Affine, NormSpec, Running

FULL = Affine("c")
ROOT_MEAN_SQUARE = {"center": False, "divide": "rms"}
# All that the presets differ in: the pattern and these fields.
DECLARED: dict[str, tuple[str, dict[str, Any]]] = {
    "layer_norm": ("... [c]", {"affine": FULL}),
    "rms_norm": ("... [c]", {"affine": Affine("c", bias=False), **ROOT_MEAN_SQUARE}),
    "l2_norm": (
        "... [c]",
        {"affine": Affine("c", bias=False), "center": False, "divide": "l2"},
    ),
    "batch_norm": ("[...] c", {"affine": FULL, "running": Running()}),
    "ghost_batch_norm": (
        "(g [b]) [...] c",
        {"affine": FULL, "running": Running(), "sizes": {"g": 4}},
    ),
    "instance_norm": ("b [...] c", {"affine": FULL}),
    "group_norm": ("b [...] (g [c])", {"affine": Affine("(g c)"), "sizes": {"g": 32}}),
    "center_only": ("... [c]", {"affine": FULL, "divide": "none"}),
    "scale_only": ("... [c]", {"affine": FULL, "center": False}),
    "batch_renorm": (
        "[...] c",
        {"affine": FULL, "running": Running(), "statistics": "renorm"},
    ),
    "adaptive_layer_norm": ("b ... [c]", {"affine": Affine("b c", stored="1+w")}),
    "adaptive_instance_norm": ("b [...] c", {"affine": Affine("b c")}),
    "weight_standardization": ("[h w i] o", {"example": None}),
    "qk_norm": ("... [d]", {"affine": Affine("d", bias=False), **ROOT_MEAN_SQUARE}),
}
every_preset = pytest.mark.parametrize("name", PRESETS)


def test_presets_are_the_public_functions_of_the_module():
    public = {
        name: function
        for name, function in inspect.getmembers(presets, inspect.isfunction)
        if function.__module__ == presets.__name__ and not name.startswith("_")
    }
    assert public == PRESETS
    assert set(DECLARED) == set(PRESETS)
    for name, preset in PRESETS.items():
        assert getattr(nj, name) is preset


@every_preset
def test_a_preset_is_its_pattern_and_the_fields_of_its_line(name: str):
    pattern, fields = DECLARED[name]
    assert PRESETS[name]() == NormSpec(pattern, **fields)


@every_preset
def test_a_swap_of_presets_smuggles_no_number(name: str):
    spec = PRESETS[name]()
    assert (spec.epsilon, spec.ddof, spec.epsilon_placement) == (1e-5, 0, "inside_sqrt")
    assert spec.precision == NormSpec("[c]").precision
    assert (spec.running is not None) == ("batch" in name)
    if spec.running is not None:
        assert spec.running == Running(decay=0.99, ddof=0)


@every_preset
def test_repr_and_plain_data_round_trip(name: str):
    spec = PRESETS[name]()
    assert eval(repr(spec), dict(vars(nj))) == spec
    assert NormSpec.from_dict(json.loads(json.dumps(spec.to_dict()))) == spec


@every_preset
@pytest.mark.parametrize("field", FIELDS)
def test_every_field_may_be_given(name: str, field: str):
    spec = PRESETS[name]()
    axis = next(axis.name for axis in spec.parsed.axes if axis.name != "...")
    own = {
        "pattern": f"z {spec.pattern}",
        "sizes": {axis: 2},
        "example": axis,
        "center": not spec.center,
        "divide": "std" if spec.divide == "l2" else "l2",
        "affine": Affine(axis, stored="1+w"),
        "running": Running(0.5),
    }
    value = own.get(field, FIELDS[field][0])
    given = PRESETS[name](**{field: value})
    assert given == spec.replace(**{field: value})
    assert given != spec


@every_preset
def test_parts_may_be_left_out(name: str):
    bare = PRESETS[name](affine=None, running=None)
    assert (bare.affine, bare.running) == (None, None)


@every_preset
def test_an_unknown_keyword_suggests_the_nearest_field(name: str):
    message = "NormSpec has no field 'epsilno'; did you mean 'epsilon'?"
    with refuse(message):
        PRESETS[name](epsilno=1e-3)


@pytest.mark.parametrize(
    ("spec", "pattern", "affine"),
    [
        (nj.layer_norm("h w c"), "... [h w c]", "h w c"),
        (nj.layer_norm(axes="h w c", channels="first"), "b [h w c] ...", "h w c"),
        (nj.layer_norm(channels="first"), "b [c] ...", "c"),
        (nj.rms_norm("h c"), "... [h c]", "h c"),
        (nj.rms_norm(channels="first"), "b [c] ...", "c"),
        (nj.l2_norm("h c"), "... [h c]", "h c"),
        (nj.center_only("h c"), "... [h c]", "h c"),
        (nj.scale_only(channels="first"), "b [c] ...", "c"),
        (nj.adaptive_layer_norm(channels="first"), "b [c] ...", "b c"),
        (nj.adaptive_instance_norm(channels="first"), "b c [...]", "b c"),
        (nj.batch_renorm(channels="first"), "[b] c [...]", "c"),
        (nj.qk_norm("h d"), "... [h d]", "h d"),
        (nj.qk_norm("h d", scale="d"), "... [h d]", "d"),
        (nj.qk_norm("h d", scale="h"), "... [h d]", "h"),
        (nj.qk_norm(scale="h"), "... h [d]", "h"),
        (nj.qk_norm(scale="h d"), "... h [d]", "h d"),
        (nj.qk_norm(scale="h", pattern="b h ... [d]"), "b h ... [d]", "h"),
        (nj.batch_norm(channels="first"), "[b] c [...]", "c"),
        (nj.ghost_batch_norm(channels="first"), "(g [b]) c [...]", "c"),
        (nj.instance_norm(channels="first"), "b c [...]", "c"),
        (nj.group_norm(channels="first"), "b (g [c]) [...]", "(g c)"),
    ],
)
def test_axes_and_channels(spec: NormSpec, pattern: str, affine: str):
    assert spec.pattern == pattern
    assert spec.affine.axes == affine


@pytest.mark.parametrize(
    "spec", [nj.group_norm(8), nj.group_norm(groups=8), nj.ghost_batch_norm(ghosts=8)]
)
def test_groups_and_ghosts(spec: NormSpec):
    assert spec.sizes == (("g", 8),)


CHANNELS = [
    n for n in PRESETS if "channels" in inspect.signature(PRESETS[n]).parameters
]


@pytest.mark.parametrize("name", CHANNELS)
def test_channels_are_first_or_last(name: str):
    assert PRESETS[name](channels="last") == PRESETS[name]()
    assert PRESETS[name](channels="first") != PRESETS[name]()
    with refuse("channels is 'middle', expected 'first' or"):
        PRESETS[name](channels="middle")


@pytest.mark.parametrize(
    ("spec", "shape", "params"),
    [
        (nj.layer_norm(), (2, 6), {"scale": (6,), "bias": (6,)}),
        (nj.layer_norm("h c"), (2, 3, 6), {"scale": (3, 6), "bias": (3, 6)}),
        (nj.layer_norm(channels="first"), (2, 6, 5), {"scale": (6,), "bias": (6,)}),
        (nj.rms_norm(), (2, 6), {"scale": (6,)}),
        (nj.l2_norm(), (2, 6), {"scale": (6,)}),
        (nj.qk_norm(), (2, 4, 5, 8), {"scale": (8,)}),
        (nj.qk_norm("h d"), (2, 4, 5, 8), {"scale": (5, 8)}),
        (nj.qk_norm("h d", "h"), (2, 4, 5, 8), {"scale": (5,)}),
        (nj.qk_norm(scale="h"), (2, 4, 5, 8), {"scale": (5,)}),
        (nj.qk_norm(scale="h d"), (2, 4, 5, 8), {"scale": (5, 8)}),
        (nj.qk_norm(scale=""), (2, 4, 5, 8), {"scale": ()}),
        (nj.layer_norm(affine=""), (2, 6), {"scale": (), "bias": ()}),
        (nj.batch_norm(), (2, 5, 6), {"scale": (6,), "bias": (6,)}),
        (nj.adaptive_layer_norm(), (2, 5, 6), {"scale": (2, 6), "bias": (2, 6)}),
        (nj.adaptive_layer_norm(), (2, 6), {"scale": (2, 6), "bias": (2, 6)}),
        (nj.adaptive_instance_norm(), (2, 5, 6), {"scale": (2, 6), "bias": (2, 6)}),
        (nj.ghost_batch_norm(2), (4, 5, 6), {"scale": (6,), "bias": (6,)}),
        (nj.instance_norm(), (2, 5, 6), {"scale": (6,), "bias": (6,)}),
        (nj.group_norm(3), (2, 5, 6), {"scale": (6,), "bias": (6,)}),
        (nj.weight_standardization(), (3, 3, 4, 8), {}),
    ],
)
def test_parameter_shapes(spec: NormSpec, shape: tuple[int, ...], params: dict):
    assert {k: v.shape for k, v in nj.init(spec, shape).items()} == params


@pytest.mark.parametrize(
    ("spec", "shape", "message"),
    [
        (nj.group_norm(4), (2, 5, 6), "g=4 does not divide dimension 2 of size 6"),
        (nj.group_norm(), (2, 5, 48), "g=32 does not divide dimension 2 of size 48"),
        (nj.ghost_batch_norm(4), (6, 3), "g=4 does not divide dimension 0 of size 6"),
    ],
)
def test_groups_that_do_not_divide_name_both_numbers(spec, shape, message):
    with refuse(f"pattern '{spec.pattern}': {message}"):
        nj.init(spec, shape)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: nj.group_norm(groups=0),
            "sizes.g is 0, expected a whole number, 1 or",
        ),
        (lambda: nj.ghost_batch_norm(-1), "sizes.g is -1, expected a whole number"),
        (
            lambda: nj.batch_norm(groups=8),
            "NormSpec has no field 'groups'; expected",
        ),
        (lambda: nj.qk_norm("h"), "axes is 'h', expected one of 'd', 'h d'"),
        (lambda: nj.qk_norm(scale="c"), "scale is 'c', expected one of 'd', 'h'"),
    ],
)
def test_presets_refuse_what_the_spec_refuses(call, message):
    with refuse(message):
        call()


def test_axes_are_names_and_not_integers():
    with pytest.raises(PatternError, match=r"unexpected '-': .*\n  -1\n  \^"):
        nj.layer_norm("-1")
